"""A driver of the working directory is found when the user names its module, and nothing else there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aionn.cli.driver_module import find_driver_module
from aionn.conformance.vts.models import DATA_VARIABLE
from tests.support.conformance_data import vector_test, write_tests

RUN_S_MAX = 100
DRIVER = "from aionn.drivers.reference import ReferenceDevice as Device\n"
MARKING = "open(__file__ + '.executed', 'w').close()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_driver.py").write_text(DRIVER)
    # Python finds these elsewhere; and modules that are imported where they are installed.
    for name in ("json", "numpy", "secrets", "uvloop", "av"):
        (tmp_path / f"{name}.py").write_text(MARKING)
    return tmp_path


def test_directory_comes_last_on_the_path(folder: Path) -> None:
    before = list(sys.path)
    find_driver_module("my_driver:Device")
    assert sys.path == [*before, str(folder)]
    find_driver_module("my_driver:Device")
    assert sys.path == [*before, str(folder)]


@pytest.mark.parametrize(
    "driver",
    ["reference", "my_driver", "absent:Device", "json:Device", "__main__:Device", ":Device", "..:x", "a b:x"],
)
def test_path_stays_where_no_module_of_the_directory_is_named(folder: Path, driver: str) -> None:
    before = list(sys.path)
    find_driver_module(driver)
    assert sys.path == before


@pytest.mark.parametrize("has_init", [True, False])
def test_package_of_the_directory_is_found(folder: Path, has_init: bool) -> None:
    (folder / "acme_drivers").mkdir()
    (folder / "acme_drivers" / "one.py").write_text(DRIVER)
    if has_init:
        (folder / "acme_drivers" / "__init__.py").touch()
    find_driver_module("acme_drivers.one:Device")
    assert sys.path[-1] == str(folder)


def conformance(folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    from tests.conftest import REPOSITORY

    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    data = folder / "data" / "relu.msgpack.gz"  # No case that is run takes any.
    data.parent.mkdir()
    write_tests(data, [vector_test("RELU", [[-1]], [0])])
    return subprocess.run(
        [sys.executable, "-P", "-m", "aionn", "conformance", device, "--suite", "vts", "-k", "slots"],
        cwd=folder,
        env={**given, "PYTHONPATH": str(REPOSITORY), DATA_VARIABLE: str(data.parent)},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )


@pytest.mark.thorough
def test_conformance_finds_a_driver_of_the_working_directory(folder: Path) -> None:
    done = conformance(folder, "my_driver:Device")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    assert not [
        path.name
        for path in folder.glob("*.executed")
        if path.name not in ("uvloop.py.executed", "av.py.executed")
    ]


@pytest.mark.thorough
def test_missing_module_is_reported_in_a_sentence(folder: Path) -> None:
    done = conformance(folder, "their_driver:Device")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "their_driver" in line and "No module named" in line

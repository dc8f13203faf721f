"""No process of ours executes a file of the working directory.

Every entry point is run in a folder in which each module of the standard library, each dependency and each package of
ours has a namesake that leaves a mark when it is executed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from aionn.platform.python_process import module_path, python_command, python_environment

pytestmark = pytest.mark.forked("none")

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = str(REPOSITORY / "examples/data/digits_int8.tflite")
DEPENDENCIES = (
    "anyio",
    "numpy",
    "msgspec",
    "flatbuffers",
    "cyclopts",
    "rich",
    "av",
    "ai_edge_litert",
    "onnxruntime",
    "openvino",
    "uvloop",
)
OURS = ("aionn", "fmq", "fences")
STARTING = ("sitecustomize", "usercustomize")
NAMESAKES = sorted({*sys.stdlib_module_names, *DEPENDENCIES, *OURS, *STARTING, "stray_driver"})
MARKING = "open(__file__ + '.executed', 'w').close()\n"
ENTRY_POINTS = "[aionn.drivers]\nstray = stray_driver:Device\n"
LIMIT_S = 100


class Folder:
    """A folder that nothing may be imported from."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        for name in NAMESAKES:
            (path / f"{name}.py").write_text(MARKING)
        metadata = path / "stray-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stray\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)

    def executed(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("*.executed"))

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            command,
            cwd=self.path,
            env={**given, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "stray")


def test_namesakes_are_executed_where_the_folder_is_on_the_path(folder: Folder) -> None:
    folder.run([sys.executable, "-c", "import argparse"])
    # From 3.13 on the interpreter imports linecache for -c, and comes no further than its namesake.
    assert {"argparse.py.executed", "linecache.py.executed"} & set(folder.executed())


BENCH = ["bench", MODEL, "--device", "reference", "--count", "2", "--compilations", "1", "--samples", "1"]
ENTRIES = [
    # The installed command runs the model in the ordinary run.
    pytest.param(["run", MODEL, "--device", "reference"], marks=pytest.mark.long, id="run"),
    pytest.param(["devices"], marks=pytest.mark.long, id="devices"),
    ["env"],
    pytest.param(BENCH, marks=pytest.mark.long, id="bench"),
    pytest.param(
        ["conformance", "reference", "--suite", "vts", "-k", "slots"],
        marks=pytest.mark.long,
        id="conformance",
    ),
    pytest.param(
        ["stress", "--device", "reference", "--test", "parallel_inference", "--minutes", "0.002"],
        marks=pytest.mark.long,
        id="stress",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ENTRIES, ids=lambda arguments: arguments[0])
def test_command_executes_nothing_of_the_working_directory(folder: Folder, arguments: list[str]) -> None:
    done = folder.run([sys.executable, "-P", "-m", "aionn", *arguments])
    assert folder.executed() == [] and done.returncode == 0, (folder.executed(), done.stdout, done.stderr)
    assert "stray" not in done.stdout


@pytest.mark.thorough
def test_installed_command_executes_nothing_of_the_working_directory(folder: Folder) -> None:
    command = Path(sys.executable).with_name("aionn")
    if not command.exists():
        pytest.skip("the aionn command is not installed beside this interpreter")
    done = folder.run([str(command), "run", MODEL, "--device", "reference"])
    assert folder.executed() == [] and done.returncode == 0, (folder.executed(), done.stdout, done.stderr)


DRIVER = """
from aionn.drivers.reference import ReferenceDevice as Device
"""

APPLICATION = """
import asyncio, os, sys

os.chdir(sys.argv[1])


async def main():
    import aionn

    async with aionn.open(drivers={"beside": "beside_driver:Device"}) as runtime:
        (device,) = runtime.devices
        await runtime.compile(sys.argv[2])
        print(device.name)


asyncio.run(main())
"""


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("python_path", [f"{os.pathsep}.", None])
def test_driver_beside_the_script_is_found_from_any_working_directory(
    tmp_path: Path, folder: Folder, python_path: str | None
) -> None:
    """The application starts in a folder of its own, goes to the other one, and starts its driver there."""
    home = tmp_path / "application"
    home.mkdir()
    (home / "beside_driver.py").write_text(DRIVER)
    (home / "application.py").write_text(APPLICATION)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), python_path)))}
    done = subprocess.run(
        [sys.executable, str(home / "application.py"), str(folder.path), MODEL],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert folder.executed() == [], done.stderr
    assert done.stdout == "beside\n", done.stderr


def test_process_imports_in_the_order_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder at the end of sys.path hides nothing of the standard library over there either."""
    (tmp_path / "argparse.py").write_text(MARKING)
    (tmp_path / "told.py").write_text(
        textwrap.dedent("""
            import argparse, json, sys

            def main(arguments):
                print(json.dumps([sys.path, arguments]))
        """)
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    command = python_command("told", "a b", "")
    done = subprocess.run(
        command, env=python_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert json.loads(done.stdout) == [module_path(), ["a b", ""]]
    assert not (tmp_path / "argparse.py.executed").exists()


def test_module_path_has_no_entry_of_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":lib:/usr/lib:/gained")
    monkeypatch.setattr(sys, "path", ["", "lib", "/there/is:none", "/usr/lib"])
    assert module_path() == [
        "/gained",
        str(tmp_path / "lib"),
        "/there/is:none",
        "/usr/lib",
        str(REPOSITORY),
    ]


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), ("", None), (":", None), (".:lib", None), (":/a:.:/b", "/a:/b")]
)
def test_environment_names_no_relative_folder(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    assert python_environment().get("PYTHONPATH") == kept


def test_every_python_process_of_the_product_is_started_with_this_command() -> None:
    paths = [path for package in OURS for path in (REPOSITORY / package).rglob("*.py")]
    assert paths
    starting = {
        path.relative_to(REPOSITORY).as_posix() for path in paths if "sys.executable" in path.read_text()
    }
    # The watchdog is a script that imports nothing of ours: an isolated interpreter runs it.
    assert starting == {"aionn/platform/python_process.py", "aionn/realtime/watchdog.py"}
    assert '"-I",' in (REPOSITORY / "aionn/realtime/watchdog.py").read_text()

"""The files of a release: the checks that stop one, the lists that go with it, and with ``--long`` all of it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from release.contents import check_contents, platform_breach
from release.manifest import checksums, software_bill
from release.version import ReleaseError, check_changelog, declared_version
from tests.packaging.building import release
from tests.packaging.test_newer_pythons import VERSIONS


def test_version_is_the_same_everywhere(repository: Path) -> None:
    import aionn

    assert declared_version(repository) == aionn.__version__


def test_index_names_the_pythons_that_are_tested(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    named = {text.rpartition(" ")[2] for text in project["classifiers"] if ":: Python :: 3." in text}
    assert named == {project["requires-python"].removeprefix(">="), *VERSIONS}


def test_two_versions_stop_a_release(tmp_path: Path) -> None:
    (tmp_path / "aionn").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "aionn"\nversion = "1.2.3"\n')
    (tmp_path / "aionn/__init__.py").write_text('__version__ = "1.2.2"\n')
    with pytest.raises(ReleaseError, match=r"expected __version__ '1\.2\.3'.*got '1\.2\.2'"):
        declared_version(tmp_path)


def test_section_of_the_version_comes_first_and_has_an_entry() -> None:
    check_changelog("# Changes\n\n## 1.0\n\n- All.\n\n## 0.9\n", "1.0")
    for text, reason in (
        ("# Changes\n", "got none"),
        ("# Changes\n\n## Unreleased\n\n- All.\n", "rename it"),
        ("# Changes\n\n## 0.9\n\n- All.\n", "write one"),
        ("# Changes\n\n## 1.0\n\n## 0.9\n\n- All.\n", "expected an entry"),
    ):
        with pytest.raises(ReleaseError, match=reason):
            check_changelog(text, "1.0")


def test_bill_names_each_requirement_once_and_each_file_with_its_digest(
    repository: Path, tmp_path: Path
) -> None:
    pytest.importorskip("setuptools")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install --group release")
    wheel = tmp_path / "aionn-1-py3-none-any.whl"
    wheel.write_bytes(b"content")
    text = software_bill(repository, "1", [wheel])
    assert text == software_bill(repository, "1", [wheel])
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["version"]) == (
        "CycloneDX",
        "1.6",
        "1",
    )
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    by_name = {component["name"]: component for component in bill["components"]}
    assert len(by_name) == len(bill["components"])
    required = {name for name, component in by_name.items() if component["scope"] == "required"}
    assert required == {text.partition(">")[0] for text in project["dependencies"]}
    assert {"name": "aionn:extra", "value": "media"} in by_name["av"]["properties"]
    (reference,) = bill["metadata"]["component"]["externalReferences"]
    assert reference["hashes"][0]["content"] == hashlib.sha256(b"content").hexdigest()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_checksums_are_what_sha256sum_reads(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "SHA256SUMS").write_text(checksums([tmp_path / "a", tmp_path / "b"]))
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count(": OK") == 2


def test_wheel_without_its_data_stops_a_release(tmp_path: Path) -> None:
    wheel = tmp_path / "aionn.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("aionn/__init__.py", "")
        archive.writestr("tests/conftest.py", "")
    with pytest.raises(ReleaseError, match=r"example_data/shapes\.json.*too much: tests"):
        check_contents(wheel)


AUDIT = {"sym_tag": "manylinux_2_17_x86_64", "external_libs": {}, "unsupported_isa": False}
MUSL_AUDIT = {"sym_tag": "musllinux_1_2_x86_64", "external_libs": {"libc.so": None}, "unsupported_isa": False}


@pytest.mark.parametrize(
    ("report", "platform", "reason"),
    [
        (AUDIT, "manylinux_2_28_x86_64", ""),
        (MUSL_AUDIT, "musllinux_1_2_x86_64", ""),
        (AUDIT, "manylinux_2_28_aarch64", "symbols of manylinux_2_28_aarch64"),
        (AUDIT, "musllinux_1_2_x86_64", "symbols of musllinux"),
        ({**AUDIT, "sym_tag": "manylinux_2_34_x86_64"}, "manylinux_2_28_x86_64", "those of manylinux_2_34"),
        ({**AUDIT, "sym_tag": "linux_x86_64"}, "manylinux_2_28_x86_64", "those of linux_x86_64"),
        ({**AUDIT, "external_libs": {"libz.so.1": None}}, "manylinux_2_28_x86_64", "libz"),
        ({**MUSL_AUDIT, "sym_tag": "manylinux_2_17_x86_64"}, "manylinux_2_28_x86_64", "libc.so"),
        ({**AUDIT, "unsupported_isa": True}, "manylinux_2_28_x86_64", "instructions"),
    ],
)
def test_wheel_with_the_wrong_tag_stops_a_release(
    report: dict[str, object], platform: str, reason: str
) -> None:
    breach = platform_breach(report, platform)
    assert reason in breach and bool(reason) == bool(breach)


def test_platform_that_does_not_exist_is_reported_in_a_sentence(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    done = release(repository, tmp_path, "--platform", "win_amd64")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("release: --platform: expected some of manylinux_2_28_x86_64")


@pytest.mark.long
def test_release_has_a_wheel_for_each_platform_and_passes_its_checks(released: Path) -> None:
    names = sorted(path.name for path in released.iterdir())
    wheels = [name for name in names if name.endswith(".whl")]
    assert [name.partition("-abi3-")[2] for name in wheels] == [
        "manylinux_2_28_aarch64.whl", "manylinux_2_28_x86_64.whl", "musllinux_1_2_aarch64.whl", "musllinux_1_2_x86_64.whl",
    ]  # fmt: skip
    assert len(names) == 7 and {"SHA256SUMS"} < set(names)


@pytest.mark.long
def test_release_is_the_same_bytes_each_time(released: Path, repository: Path, tmp_path: Path) -> None:
    assert release(repository, tmp_path, "--rehearsal", "--platform", "musllinux_1_2_aarch64").returncode == 0
    again = [path for path in tmp_path.iterdir() if path.name.endswith((".whl", ".tar.gz"))]
    assert len(again) == 2
    for path in again:
        assert (released / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.long
def test_extension_for_this_machine_works(released: Path, tmp_path: Path, repository: Path) -> None:
    machine = os.uname().machine
    (wheel,) = released.glob(f"*manylinux*_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import fmq; q = fmq.MessageQueue.create(8, 16); q.write(bytes(8)); print(fmq.__file__)"
    given = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))

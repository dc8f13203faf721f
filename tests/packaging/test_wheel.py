"""What is installed works away from any source tree, and is the same each time it is built."""

from __future__ import annotations

import email
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from release.contents import check_contents
from tests.packaging.building import Environment, call_backend


def test_sdist_has_what_the_tests_need(source: Path, repository: Path) -> None:
    for name in (
        "tests/conftest.py",
        "examples/data/shapes.mp4",
        "docs/architecture.md",
        "fmq/_native.c",
        "fmq/_native.h",
        "fmq/_slots.c",
        "fmq/_answers.c",
        "aionn/drivers/onnxruntime/_entry.c",
        ".ci/run",
    ):
        assert (source / name).read_bytes() == (repository / name).read_bytes()
    assert not list(source.rglob("*.so")) and not list(source.rglob("__pycache__"))


def test_wheel_has_the_data_and_no_packages_but_ours(wheel: Path) -> None:
    check_contents(wheel)
    assert wheel.name.startswith("aionn-") and "-cp311-abi3-" in wheel.name


def test_installed_package_has_the_example_data(
    installed: Environment, tmp_path: Path, example_data: Path
) -> None:
    code = "from aionn.cli.example_data import example_data; print(example_data('--data'))"
    found = Path(installed.run(installed.python, "-c", code, cwd=tmp_path).strip())
    assert found.is_relative_to(installed.packages)
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        path.name: path.read_bytes() for path in example_data.iterdir()
    }


@pytest.mark.slow
def test_stress_runs_from_a_wheel(installed: Environment, tmp_path: Path) -> None:
    command = installed.folder / "bin" / "aionn"
    options = ("--device", "reference", "--test", "parallel_inference", "--minutes", "0.005", "--json")
    (result,) = json.loads(installed.run(command, "stress", *options, cwd=tmp_path))["reference"]
    assert result["result"] == "SUCCESS"


@pytest.mark.long
def test_demo_runs_from_a_wheel(installed: Environment, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    told = installed.run(installed.folder / "bin" / "aionn", "demo", "--json", cwd=tmp_path)
    report = json.loads(told)
    assert report["video"]["frames"] == 600 and report["video"]["accuracy"] >= 0.99
    assert report["audio"]["words_found"] == 30


def test_description_has_no_links_into_the_source_tree(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if not re.match(r"https?:|mailto:", link)] == []
    # The words of the links, and blocks of code, are there.
    readme = (repository / "README.md").read_text()
    assert "docs/architecture.md is the map" in text and "aionn demo" in text
    assert re.findall(r"^```.*?^```$", readme, re.M | re.S) == re.findall(r"^```.*?^```$", text, re.M | re.S)


@pytest.mark.long
def test_sdist_is_the_same_bytes_each_time(tree: Path, sdist: Path, tmp_path: Path) -> None:
    again = call_backend(tree, "build_sdist", tmp_path)
    assert again.read_bytes() == sdist.read_bytes()


def test_sdist_names_no_user_and_has_two_modes(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
    assert {m.mode for m in members} <= {0o644, 0o755}


def test_wheel_is_the_same_bytes_each_time_and_has_no_file_of_an_earlier_build(
    source: Path, wheel: Path, compiler_that_remembers: str, tmp_path: Path
) -> None:
    for stale in ("build/lib/aionn/stale.py", "build/lib/aionn/example_data/stale.json"):
        (source / stale).parent.mkdir(parents=True, exist_ok=True)
        (source / stale).touch()
    again = call_backend(source, "build_wheel", tmp_path, CC=compiler_that_remembers)
    assert again.read_bytes() == wheel.read_bytes()

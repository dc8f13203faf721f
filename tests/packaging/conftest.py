"""An sdist and a wheel of this source tree, built as an installer does, and an environment with the wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.packaging.building import Environment, call_backend, release

SETUPTOOLS_MIN = 77
TOOLS = ("setuptools", "ziglang", "auditwheel", "abi3audit")


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A copy of the files of this checkout that git does not ignore, named as a clone is: a build may write into it."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: pip install --group test")
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < SETUPTOOLS_MIN:
        pytest.skip("setuptools is too old: pip install --group test")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("clones") / "aionn"
    for name in listed.stdout.decode().split("\0"):
        if name and (repository / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, target)
    return copy


@pytest.fixture(scope="session")
def compiler_that_writes_nothing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that makes the file behind ``-o`` and compiles nothing: for tests of everything around the extension."""
    program = tmp_path_factory.mktemp("compiler") / "cc"
    program.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    program.chmod(0o755)
    return str(program)


REMEMBERING = """#!/bin/sh
for word; do [ "$last" = -o ] && target="$word"; last="$word"; done
[ -n "$target" ] || exec {compiler} "$@"
known="{folder}/$(basename "$target")"
[ -e "$known" ] || {{ {compiler} "$@" && cp "$target" "$known"; }} || exit
cp "$known" "$target"
"""


@pytest.fixture(scope="session")
def compiler_that_remembers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The machine's compiler, which makes each file once: for tests that build twice."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("remembered")
    program = folder / "cc"
    program.write_text(REMEMBERING.format(folder=folder, compiler=found))
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="session")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return call_backend(tree, "build_sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree that the sdist contains."""
    target = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (found,) = target.iterdir()
    return found


@pytest.fixture(scope="session")
def wheel(source: Path, compiler_that_remembers: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the machine's compiler gives, built from the sdist."""
    return call_backend(source, "build_wheel", tmp_path_factory.mktemp("wheel"), CC=compiler_that_remembers)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel."""
    environment = Environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(wheel)
    return environment


@pytest.fixture(scope="session")
def released(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of a rehearsed release of the last commit."""
    for tool in TOOLS:
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install --group release")
    out = tmp_path_factory.mktemp("release")
    done = release(repository, out, "--rehearsal")
    assert done.returncode == 0, done.stderr
    return out

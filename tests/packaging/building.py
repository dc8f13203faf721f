"""Builds by the project's backend, and environments that see nothing of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILD_S_MAX = 110
EPOCH_S = 1_700_000_000
RELEASE_S_MAX = 1800


def call_backend(tree: Path, function: str, out: Path, *arguments: object, **environment: str) -> Path:
    """Calls a hook of the build backend in a source tree, in a process of its own; the file that it made."""
    out.mkdir(parents=True, exist_ok=True)
    given = ", ".join(map(repr, (str(out), *arguments)))
    code = f"import sys; sys.path.insert(0, 'build_backend'); import aionn_build; print(aionn_build.{function}({given}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH_S), **environment},
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def release(repository: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Makes the files of a release of the last commit."""
    return subprocess.run(
        [sys.executable, "-m", "release", "--out", str(out), *options],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=RELEASE_S_MAX,
    )


class Environment:
    """A virtual environment that has nothing but wheels of ours, and sees the dependencies of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=BUILD_S_MAX
        )
        self.python = folder / "bin" / "python"
        (self.packages,) = (folder / "lib").glob("python*/site-packages")
        import numpy

        # Path files that lie there are not read: this checkout's own editable installation stays out.
        dependencies = Path(numpy.__file__).parents[1]
        (self.packages / "dependencies.pth").write_text(f"{dependencies}\n")

    def install(self, wheel: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install"]
        # A test imports a few of the modules: compiling all of them takes longer than the rest.
        done = subprocess.run(
            [*pip, "--quiet", "--no-compile", "--no-deps", "--no-index", "--ignore-installed", wheel],
            capture_output=True,
            text=True,
            timeout=BUILD_S_MAX,
        )
        if "No module named pip" in done.stderr:
            pytest.skip("pip is not installed here")
        assert done.returncode == 0, done.stderr

    def run(self, *command: str | Path, cwd: Path, timeout_s: float = BUILD_S_MAX) -> str:
        """Runs a program in a folder, without the variables that lead back to this checkout; its standard output."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=given, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

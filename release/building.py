"""Builds the sdist and the wheels, each in a process of its own, by the project's build backend."""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path

from release.version import ReleaseError

__all__ = ["build_sdist", "build_wheel", "commit_time_s", "export", "platforms", "unpack"]

BUILD_S_MAX = 600
"""Longest build; zig takes half a minute where its cache is cold and the machine busy."""

_BACKEND = Path(__file__).resolve().parents[1] / "build_backend"


def platforms() -> list[str]:
    """The platforms of the wheels: those of the build backend.

    Raises:
        ReleaseError: setuptools is missing.
    """
    spec = importlib.util.spec_from_file_location("aionn_build", _BACKEND / "aionn_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as e:
        raise ReleaseError(f"{e.name} is missing: pip install --group release") from e
    return list(module.PLATFORMS)


def commit_time_s(root: Path) -> int:
    """The time of the last commit, in seconds since 1970.

    Raises:
        ReleaseError: The folder is not a git checkout.
    """
    return int(_git(root, "log", "-1", "--format=%ct"))


def export(root: Path, target: Path) -> Path:
    """Writes the files of the last commit into a new folder, and returns the folder.

    Raises:
        ReleaseError: The folder is not a git checkout.
    """
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "--format=tar", "HEAD"))) as archive:
        archive.extractall(target, filter="data")
    return target


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def build_sdist(tree: Path, out: Path) -> Path:
    """Builds the sdist of a source tree, and returns its path.

    Raises:
        ReleaseError: The build fails.
    """
    return out / _call(tree, f"build_sdist({str(out.resolve())!r})")


def unpack(sdist: Path, target: Path) -> Path:
    """Unpacks an sdist into a new folder, and returns the source tree in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (tree,) = target.iterdir()
    return tree


def build_wheel(tree: Path, out: Path, platform: str) -> Path:
    """Builds the wheel of a source tree for a platform, and returns its path.

    Raises:
        ReleaseError: The build fails, or ziglang is missing.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise ReleaseError("ziglang is missing: pip install --group release")
    return out / _call(tree, f"build_wheel({str(out.resolve())!r}, {{'platform': {platform!r}}})")


def _call(tree: Path, call: str) -> str:
    """The result of a call of the backend of a source tree: the name of a file."""
    code = f"import sys; sys.path.insert(0, 'build_backend'); import aionn_build; print(repr(aionn_build.{call}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=BUILD_S_MAX
    )
    if done.returncode:
        raise ReleaseError(f"{call}: {done.stderr.strip() or done.stdout.strip()}")
    return str(ast.literal_eval(done.stdout.splitlines()[-1]))

"""Checks of a wheel: its files, its platform by auditwheel, and its use of the limited API by abi3audit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from release.version import ReleaseError

__all__ = ["check_abi", "check_contents", "check_platform"]

CHECK_S_MAX = 300
"""Longest check of one wheel."""

REQUIRED = (
    "aionn/__init__.py",
    "aionn/py.typed",
    "aionn/example_data/shapes.json",
    "aionn/example_data/shapes.mp4",
    "fences/py.typed",
    "fmq/_native.abi3.so",
    "fmq/_native.pyi",
    "fmq/py.typed",
)
TOP_LEVEL = {"aionn", "fences", "fmq"}


def check_contents(wheel: Path) -> None:
    """Checks that a wheel has the files that are easily forgotten, and no packages but ours.

    Raises:
        ReleaseError: One is missing, or too much.
    """
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in REQUIRED if name not in names]
    strange = sorted({n.split("/")[0] for n in names if ".dist-info/" not in n} - TOP_LEVEL)
    if missing or strange:
        raise ReleaseError(
            f"{wheel.name}: missing: {', '.join(missing) or '-'}; too much: {', '.join(strange) or '-'}"
        )


def check_platform(wheel: Path, platform: str) -> None:
    """Checks by auditwheel that a wheel needs no newer C library than its platform has.

    Raises:
        ReleaseError: It does, or auditwheel is missing.
    """
    report = json.loads(_run("auditwheel", "show", "--json", str(wheel)))
    if platform not in json.dumps(report):
        raise ReleaseError(f"{wheel.name}: expected {platform}, auditwheel reports {report}")


def check_abi(wheel: Path) -> None:
    """Checks by abi3audit that the extension uses nothing but the limited API of its tag.

    Raises:
        ReleaseError: It does, or abi3audit is missing.
    """
    _run("abi3audit", "--strict", "--report", str(wheel))


def _run(tool: str, *arguments: str) -> str:
    if importlib.util.find_spec(tool) is None:
        raise ReleaseError(f"{tool} is missing: pip install --group release")
    done = subprocess.run(
        [sys.executable, "-m", tool, *arguments], capture_output=True, text=True, timeout=CHECK_S_MAX
    )
    if done.returncode:
        raise ReleaseError(f"{tool} {arguments[-1]}: {done.stdout.strip()} {done.stderr.strip()}")
    return done.stdout

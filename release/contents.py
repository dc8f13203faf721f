"""Checks of a wheel: its files, its platform by auditwheel, and its use of the limited API by abi3audit."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from release.version import ReleaseError

__all__ = ["check_abi", "check_contents", "check_platform", "platform_breach"]

CHECK_S_MAX = 300
"""Longest check of one wheel."""

REQUIRED = (
    "aionn/__init__.py",
    "aionn/drivers/onnxruntime/_entry.abi3.so",
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
    """Checks by auditwheel that a wheel needs no newer C library than its platform has, and no other library.

    Raises:
        ReleaseError: It does, or auditwheel is missing.
    """
    # In an empty folder: on a machine with glibc auditwheel would find that machine's libc.so, a text, in place of musl's.
    with tempfile.TemporaryDirectory() as empty:
        report = json.loads(_run("auditwheel", "show", "--json", "--ldpaths", empty, str(wheel)))
    breach = platform_breach(report, platform)
    if breach:
        raise ReleaseError(f"{wheel.name}: {breach}")


def platform_breach(report: Mapping[str, Any], platform: str) -> str:
    """The reason why a wheel must not have the tag of a platform, by auditwheel's report; empty if it may."""
    needed, allowed = _tag_parts(report["sym_tag"]), _tag_parts(platform)
    if needed[0] != allowed[0] or needed[2] != allowed[2] or needed[1] > allowed[1]:
        return f"expected the symbols of {platform}, auditwheel finds those of {report['sym_tag']}"
    # musl's own name is that of no other library.
    libraries = set(report["external_libs"]) - ({"libc.so"} if allowed[0] == "musllinux" else set())
    if libraries:
        return f"expected the C library alone, auditwheel finds {', '.join(sorted(libraries))}"
    if report["unsupported_isa"]:
        return "expected the basic instructions of the processor, auditwheel finds newer ones"
    return ""


def _tag_parts(tag: str) -> tuple[str, tuple[int, ...], str]:
    """Family, version and processor of a tag such as ``manylinux_2_28_x86_64``; version () where it has none."""
    found = re.fullmatch(r"([a-z]+)((?:_\d+)*)_([a-z].*)", tag)
    assert found is not None, tag
    return found[1], tuple(int(part) for part in found[2].split("_")[1:]), found[3]


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

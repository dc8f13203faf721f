"""The build backend: setuptools' own, and a C compiler from the package index where the machine has none.

Owns these decisions:

1. The C files of `fmq` are compiled by the compiler of the machine ($CC, or cc, gcc or clang on PATH), or by `zig cc` out of the
   `ziglang` wheel where that is missing, or where a wheel for a named platform is wanted (`-C platform=musllinux_1_2_aarch64`).
2. A free-threaded Python is rejected.
3. The same files give the same archive, byte for byte: a wheel is built in a folder of its own, so that no file of an earlier
   build gets into it, and an sdist is written in order, with SOURCE_DATE_EPOCH as all times.

Everything else is handed to `setuptools.build_meta` as it is. That an editable installation is a plain path in a `.pth` file, which
type checkers and editors read, and not an import hook, which they cannot, follows from `package-dir` in pyproject.toml.

Facts that the use of zig rests on: `zig cc` links against the C library version named in its target, so an old one is
named and the result runs on older machines than the build; it instruments for undefined behaviour unless it is asked to
optimise; it keeps a cache under the home directory unless it is given another place, and a build container may have no home.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools

__all__ = [
    "PLATFORMS",
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_ZIG_REQUIREMENT = "ziglang>=0.13"
_OLDEST_GLIBC = "2.28"
"""The C library of manylinux_2_28: every call of `fmq`'s C files is in it."""

PLATFORMS = {
    f"{tag}_{machine}": f"{machine}-linux-{library}"
    for tag, library in (("manylinux_2_28", f"gnu.{_OLDEST_GLIBC}"), ("musllinux_1_2", "musl"))
    for machine in ("x86_64", "aarch64")
}
"""The platforms that a wheel can be built for on any Linux, and zig's name of each. numpy has no wheels for older ones."""

_Settings = Mapping[str, Any] | None


def has_compiler() -> bool:
    """Whether the machine brings its own C compiler: $CC if set, else cc, gcc or clang on PATH."""
    chosen = os.environ.get("CC")
    names = [shlex.split(chosen)[0]] if chosen and chosen.strip() else ["cc", "gcc", "clang"]
    return any(shutil.which(name) for name in names)


def zig_target() -> str:
    """The target triple of the running interpreter, with the C library version pinned for glibc."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "") + (
        sysconfig.get_config_var("SOABI") or ""
    ):
        return f"{machine}-linux-musl"
    return f"{machine}-linux-gnu.{_OLDEST_GLIBC}"


def _zig(target: str) -> str:
    return f"{shlex.quote(sys.executable)} -m ziglang cc -target {target} -fno-sanitize=undefined"


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for one build and puts the environment back."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _compiler(platform_tag: str | None = None) -> Iterator[None]:
    """Sets zig for one build where there is no compiler, or for a platform; else changes nothing."""
    if platform_tag is None and has_compiler():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zig-cache-") as cache:
        if platform_tag is None:
            cc = _zig(zig_target())
            changes = {"CC": cc, "LDSHARED": f"{cc} -shared"}
        else:
            changes = {"AIONN_CC": _zig(PLATFORMS[platform_tag])}
        for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
            changes[name] = os.environ.get(name, cache)
        with _environment(changes):
            yield


def _platform(settings: _Settings) -> str | None:
    """The platform of ``-C platform=...``; None for the machine's own."""
    wanted = (settings or {}).get("platform")
    if wanted is not None and wanted not in PLATFORMS:
        raise SystemExit(f"aionn: -C platform: expected one of {', '.join(PLATFORMS)}, got {wanted!r}")
    return wanted


def _check_python() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise SystemExit(
            f"aionn: expected a Python with a global interpreter lock, got a free-threaded build of "
            f"{platform.python_version()}: queues and fences rely on the lock"
        )


def _with_zig(requirements: list[str], settings: _Settings = None) -> list[str]:
    is_needed = _platform(settings) is not None or not has_compiler()
    return [*requirements, _ZIG_REQUIREMENT] if is_needed else requirements


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """The requirements of a wheel build besides `build-system.requires`."""
    _check_python()
    return _with_zig(_setuptools.get_requires_for_build_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """The requirements of an editable build besides `build-system.requires`."""
    _check_python()
    return _with_zig(_setuptools.get_requires_for_build_editable(config_settings))


def get_requires_for_build_sdist(config_settings: _Settings = None) -> list[str]:
    """The requirements of an sdist besides `build-system.requires`: nothing is compiled."""
    return _setuptools.get_requires_for_build_sdist(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: _Settings = None) -> str:
    """Writes the metadata directory of the wheel; compiles nothing."""
    _check_python()
    return _setuptools.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: _Settings = None) -> str:
    """Writes the metadata directory of the editable wheel; compiles nothing."""
    _check_python()
    return _setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel, tagged cp311-abi3, for this machine or for the platform of the settings."""
    _check_python()
    tag = _platform(config_settings)
    settings = dict(config_settings or {})
    if tag is not None:
        settings["--build-option"] = ["--plat-name", tag]
    with (
        tempfile.TemporaryDirectory(prefix="aionn-build-") as base,
        _compiler(tag),
        _environment({"AIONN_BUILD_BASE": base}),
    ):
        return _setuptools.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the editable wheel; the extension module is beside its source in the tree."""
    _check_python()
    with _compiler():
        return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    """Builds the sdist, the same bytes for the same files and SOURCE_DATE_EPOCH."""
    name = _setuptools.build_sdist(sdist_directory, config_settings)
    _normalise(Path(sdist_directory, name), int(os.environ.get("SOURCE_DATE_EPOCH", "0")))
    return name


def _normalise(path: Path, epoch_s: int) -> None:
    """Writes a ``.tar.gz`` again: in order, without its user's names and numbers, and with one time.

    Args:
        path: The archive.
        epoch_s: All times, in seconds since 1970; 0 keeps those of the files.
    """
    plain = io.BytesIO()
    with (
        tarfile.open(path) as old,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member) if member.isfile() else None
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.mtime = epoch_s or int(member.mtime)
            member.pax_headers = {}
            new.addfile(member, content)
    # A gzip member without a name and a time; level 9 takes three times as long for one per cent.
    path.write_bytes(gzip.compress(plain.getvalue(), compresslevel=6, mtime=0))

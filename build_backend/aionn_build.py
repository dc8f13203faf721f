"""The build backend: setuptools' own, and a C compiler from the package index where the machine has none.

Owns one decision: whether `fmq/_native.c` is compiled by the compiler of the machine ($CC, or cc, gcc or clang
on PATH) or by `zig cc` out of the `ziglang` wheel, asked for as a build requirement in the second case. Everything
else is handed to `setuptools.build_meta` as it is.

Facts the second case rests on: `zig cc` links against the C library version named in its target, so an old one is
named and the result runs on older machines than the build; it instruments for undefined behaviour unless told to
optimise; it keeps a cache under the home directory unless told where, and a build container may have no home.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
)

__all__ = [
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
"""The C library of manylinux_2_28: every call `_native.c` makes is in it."""

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


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """Sets CC and LDSHARED to zig for one build where there is no compiler, and puts the environment back."""
    if has_compiler():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zig-cache-") as cache:
        cc = f"{shlex.quote(sys.executable)} -m ziglang cc -target {zig_target()} -fno-sanitize=undefined"
        changes = {
            "CC": cc,
            "LDSHARED": f"{cc} -shared",
            "ZIG_GLOBAL_CACHE_DIR": os.environ.get("ZIG_GLOBAL_CACHE_DIR", cache),
            "ZIG_LOCAL_CACHE_DIR": os.environ.get("ZIG_LOCAL_CACHE_DIR", cache),
        }
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


def _with_zig(requirements: list[str]) -> list[str]:
    return requirements if has_compiler() else [*requirements, _ZIG_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """What a wheel build needs besides `build-system.requires`."""
    return _with_zig(_setuptools.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """What an editable build needs besides `build-system.requires`."""
    return _with_zig(_setuptools.get_requires_for_build_editable(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: _Settings = None) -> str:
    """Writes the metadata directory of the wheel; compiles nothing."""
    return _setuptools.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: _Settings = None) -> str:
    """Writes the metadata directory of the editable wheel; compiles nothing."""
    return _setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel, tagged cp311-abi3."""
    with _compiler():
        return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the editable wheel; the extension module lies beside its source in the tree."""
    with _compiler():
        return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)

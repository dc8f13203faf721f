"""The installed distribution of an engine, the number of its threads and whether bursts call it without Python: what a driver
checks before it imports the engine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os

from aionn.errors import DeviceUnavailable

__all__ = [
    "NATIVE_VARIABLE",
    "THREADS_MAX",
    "check_version",
    "is_native_on",
    "processor_digest",
    "processor_flags",
    "thread_count",
    "version_of",
]

THREADS_MAX = 256


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(distribution: str, found: str | None, least: tuple[int, ...], extra: str) -> str:
    """The version, if it can be used.

    Args:
        distribution: Its name.
        found: Its version; None where it is not installed.
        least: The first version that can be used.
        extra: The extra of aionn that installs it.

    Raises:
        DeviceUnavailable: It is not installed, or too old.
    """
    if found is None:
        raise DeviceUnavailable(f"{distribution} is not installed; pip install 'aionn[{extra}]'")
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < least:
        wanted = ".".join(map(str, least))
        raise DeviceUnavailable(f"{distribution}: expected version {wanted} or later, got {found}")
    return found


def thread_count(variable: str) -> int:
    """The number of threads of an execution, from an environment variable; 1 without it.

    Raises:
        DeviceUnavailable: It is not a number from 1 to ``THREADS_MAX``.
    """
    text = os.environ.get(variable, "1")
    if not text.isdecimal() or not 1 <= int(text) <= THREADS_MAX:
        raise DeviceUnavailable(f"{variable}: expected from 1 to {THREADS_MAX}, got {text!r}")
    return int(text)


NATIVE_VARIABLE = "AIONN_NATIVE"
"""Environment variable: 1 lets the bursts of a driver process call its engine without Python."""


def is_native_on() -> bool:
    """Whether ``PreparedModel.native`` may give calls, by ``AIONN_NATIVE``.

    Raises:
        DeviceUnavailable: It is neither 0 nor 1.
    """
    text = os.environ.get(NATIVE_VARIABLE, "0")
    if text not in ("0", "1"):
        raise DeviceUnavailable(f"{NATIVE_VARIABLE}: expected 0 or 1, got {text!r}")
    return text == "1"


@functools.cache
def processor_flags() -> str:
    """The processor's instructions in the words of the kernel; empty where the machine does not state them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def processor_digest() -> str:
    """A digest of the processor's instructions, by which engines choose their layouts; that of an empty text where the machine does
    not state them.
    """
    return hashlib.sha256(processor_flags().encode()).hexdigest()

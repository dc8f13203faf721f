"""Errors of cameras in words: what was expected, what the kernel answered, and whose fault that is.

Owns the translation. Refuses to own the calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from aionn.media.live.capture import SourceUnavailable

__all__ = ["is_gone", "lost", "problem"]

GONE = (errno.ENODEV, errno.ENXIO, errno.ENOENT)

PERMANENT = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOTTY,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EISDIR,
)
"""Errors that another attempt does not change."""


def problem(error: OSError, path: str, what: str, users: Sequence[str] = ()) -> SourceUnavailable:
    """The error for a camera that cannot be opened or started.

    Args:
        error: The kernel's answer.
        path: The device.
        what: The step that failed.
        users: Programs that have the device open.
    """
    reason = _reason(error, path, users)
    return SourceUnavailable(
        f"camera {path}: {what}: expected the driver to agree, got {errno.errorcode.get(error.errno or 0, 'an error')}: {reason}",
        is_permanent=error.errno in PERMANENT,
    )


def _reason(error: OSError, path: str, users: Sequence[str]) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"this process may not use it; add the user to the group that owns {path} (usually `video`) and log "
            f"in again, or pass the "
            "device into the container"
        )
    if error.errno == errno.EBUSY:
        by = f"by {', '.join(users)}" if users else "by another program, which is not visible to this user"
        return (
            f"it is in use {by}; close that, have one source serve several consumers (aionn.media.tee), or use a device that "
            "copies the camera"
        )
    if error.errno == errno.ENOSPC:
        return "the USB bus has no bandwidth left for this format; use MJPG, a smaller capture_size, a lower rate or another port"
    if error.errno in GONE:
        return (
            "there is no such camera; it was unplugged, or has another number now (`aionn devices --sources`)"
        )
    if error.errno in (errno.ENOTTY, errno.EISDIR):
        return "it is not a Video4Linux device"
    return os.strerror(error.errno or 0)


def is_gone(error: BaseException | None) -> bool:
    """Whether an answer of the kernel means that the device is not there."""
    return isinstance(error, OSError) and error.errno in GONE


def lost(error: OSError, path: str) -> SourceUnavailable:
    """The error for a camera that stops to deliver."""
    reason = "it was unplugged" if error.errno in GONE else os.strerror(error.errno or 0)
    name = errno.errorcode.get(error.errno or 0, "an error")
    return SourceUnavailable(f"camera {path}: expected a frame, got {name}: {reason}")

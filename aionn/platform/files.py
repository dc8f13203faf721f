"""Files that a user names: opened so that nothing but a regular file is read, and never without an end.

Owns the opening, the bounds and what errors call a path. Does not interpret the content of files.

Invariants:
1. Opening never waits: not for the other end of a pipe, nor for a device.
2. Reads at most the size that the file had when it was opened, and at most the caller's bound.

Source: open(2), on O_NONBLOCK and FIFOs.
"""

from __future__ import annotations

import os
import stat
from io import BufferedReader

from aionn.errors import InvalidArgument, ResourceExhausted, shortage_of
from fmq.available import MemoryShortage, check_available

__all__ = [
    "SOCKET_PATH_BYTES_MAX",
    "TEXT_BYTES_MAX",
    "MissingFile",
    "check_regular",
    "check_socket_path",
    "creation_error",
    "open_regular",
    "place_of",
    "read_regular",
]

SOCKET_PATH_BYTES_MAX = 107
"""The longest path of a socket: ``sun_path`` with its terminating zero. Source: unix(7)."""

TEXT_BYTES_MAX = 64 << 20
"""Settings, labels and the like that people write are far smaller, and reading so much takes a second or two."""

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class MissingFile(InvalidArgument, FileNotFoundError):
    """No file is there: what Python raises for that, and an argument of the caller's."""


def _kind_of(mode: int) -> str:
    """The kind of a file by its ``st_mode``, with its article."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def place_of(path: str) -> str:
    """Where a path was looked for, for the end of a message about a missing file; empty for an absolute path."""
    if path.startswith("~"):
        return "; ~ is a home directory in shells alone, see pathlib.Path.expanduser"
    if os.path.isabs(path):
        return ""
    if path.startswith(("http:/", "https:/")):  # A Path has one slash.
        return "; an address is not read, download the file first"
    try:
        return f" (in {os.getcwd()})"
    except FileNotFoundError:
        return " (the working directory has been deleted)"


def check_socket_path(path: str) -> None:
    """Rejects a path that is too long for a socket, for which the kernel has no words of its own.

    Raises:
        ValueError: It has more than ``SOCKET_PATH_BYTES_MAX`` bytes.
    """
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"its path has {length} bytes, and the path of a socket at most {SOCKET_PATH_BYTES_MAX}: use a shorter folder",
        )


def creation_error(path: str | os.PathLike[str], error: OSError) -> str:
    """The reason for which a file could not be created or written, for the end of a message."""
    folder = os.path.dirname(os.path.abspath(path))
    is_lost = isinstance(error, FileNotFoundError) and os.fspath(path) and not os.path.exists(folder)
    return "its folder does not exist" if is_lost else error.strerror or str(error)


def open_regular(path: str | os.PathLike[str], what: str) -> BufferedReader:
    """Opens a file for reading.

    Args:
        path: Where it is; links are followed.
        what: Its meaning to the user, such as ``model``; begins the message of an error.

    Raises:
        InvalidArgument: It cannot be opened, or is not a regular file; the message names it. ``MissingFile`` where none is there.
        ResourceExhausted: No descriptor is left for it.
    """
    name = os.fsdecode(path)
    if not name:
        raise InvalidArgument(f"{what}: the path is empty")
    if "\0" in name:
        raise InvalidArgument(f"{what} {name!r}: a path has no NUL characters")
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as e:
        if isinstance(e, FileNotFoundError):
            raise MissingFile(f"{what} {name}: cannot be read: {e.strerror}{place_of(name)}") from e
        shortage = shortage_of(e, f"{what} {name}")
        if shortage is not None:
            raise shortage from e
        raise InvalidArgument(f"{what} {name}: cannot be read: {e.strerror}") from e
    except UnicodeEncodeError as e:
        raise InvalidArgument(f"{what} {name!r}: cannot be read: {e.reason}") from e
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise InvalidArgument(f"{what} {name}: expected a regular file, got {_kind_of(mode)}")
    return open(fd, "rb")


def check_regular(path: str | os.PathLike[str], what: str) -> None:
    """Raises as ``open_regular``; for files that other code opens afterwards."""
    open_regular(path, what).close()


def read_regular(path: str | os.PathLike[str], what: str, bytes_max: int) -> bytes:
    """The bytes of a file, as many as it has when it is opened.

    Raises:
        InvalidArgument: As for ``open_regular``, or there are more than ``bytes_max``.
        ResourceExhausted: They do not fit into memory.
    """
    with open_regular(path, what) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > bytes_max:
            raise InvalidArgument(
                f"{what} {os.fsdecode(path)}: expected at most {bytes_max} bytes, got {size_bytes}"
            )
        try:
            check_available(size_bytes)
            return file.read(size_bytes)
        except MemoryShortage as e:
            raise ResourceExhausted(
                f"{what} {os.fsdecode(path)}: cannot hold its {size_bytes} bytes: {e.strerror}",
                transient=e.transient,
            ) from e
        except OSError as e:
            raise InvalidArgument(f"{what} {os.fsdecode(path)}: cannot be read: {e.strerror}") from e

"""The socket of a served device in the file system: how it appears, and how it is removed.

Owns the path. Invariants:
1. The path appears when clients can connect, with its permissions: a client that finds it can connect.
2. A socket's file that a crashed process left behind is replaced; one that is served is not, and nothing else is ever removed.
3. Of processes that start at the same time for one path, one begins to serve. Each other one is rejected with the reason.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from aionn.errors import DeviceUnavailable
from aionn.platform.files import SOCKET_PATH_BYTES_MAX, check_socket_path

__all__ = ["BACKLOG", "listen_at", "remove_socket"]

_logger = logging.getLogger("aionn.service")

BACKLOG = 64
"""Connections that wait to be accepted."""

_LOCK_S_MAX = 2.0
"""Seconds that a process waits for others that make a socket at the same path; each takes less than a millisecond."""

_RETRY_S = 0.01
"""Seconds between two attempts to lock the path."""


async def listen_at(path: str, mode: int) -> tuple[socket.socket, int]:
    """Makes a socket that listens at a path.

    Args:
        path: Where it appears; its directory exists.
        mode: Its permissions.

    Returns:
        The socket, non-blocking, and the inode number of its file, for ``remove_socket``.

    Raises:
        DeviceUnavailable: It cannot be made, another process serves there, or the file there is not a socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        check_socket_path(path)
        async with _locked(path):
            _warn_of_open_folder(path)
            return listener, _make(listener, path, mode)
    except (OSError, UnicodeError, ValueError) as e:
        listener.close()
        reason = "its folder does not exist" if isinstance(e, FileNotFoundError) else e
        raise DeviceUnavailable(f"socket {path}: cannot be served: {reason}") from e
    except BaseException:
        listener.close()
        raise


def _warn_of_open_folder(path: str) -> None:
    """Warns where users other than this one could put a socket of their own in the place of this one."""
    mode = os.stat(os.path.dirname(path) or ".").st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        _logger.warning(
            "socket %s: every user may write to its folder, remove the socket and serve in its place; use a folder of your own",
            path,
        )


def remove_socket(listener: socket.socket, path: str, identity: int) -> None:
    """Removes the file of a socket of ``listen_at``, which is still open, where it is still the one with this inode number.

    Ignored for a socket that is closed: while it is open, the kernel keeps the inode, and gives its number to no other file. ext4
    gives it to the next one, which would be the socket of the next server.
    """
    if listener.fileno() < 0:
        return
    try:
        if os.lstat(path).st_ino == identity:
            os.unlink(path)
    except OSError:
        pass  # It was removed or replaced, and does not belong to this process any more.


def _make(listener: socket.socket, path: str, mode: int) -> int:
    _remove_stale(path)
    # bind() makes the file before listen() can be called, and a client that connects in between is rejected. So the socket is
    # made beside the path and linked to it when it listens; link() replaces nothing.
    beside = _beside(path)
    _remove_stale(beside)  # Of a process that was killed in the lines below.
    # Narrow from the start: a client might connect between bind and chmod. No thread of aionn creates files at this time.
    before = os.umask(0o177)
    try:
        listener.bind(beside)
    finally:
        os.umask(before)
    try:
        os.chmod(beside, mode)
        listener.listen(BACKLOG)
        os.link(beside, path)
    finally:
        os.unlink(beside)
    return os.lstat(path).st_ino


def _beside(path: str) -> str:
    """A name in the same directory: no longer than a socket's may be where the path itself is as long as that."""
    if len(os.fsencode(path)) != SOCKET_PATH_BYTES_MAX:
        return path + "~"
    return path[:-1] + ("-" if path.endswith("~") else "~")


def _remove_stale(path: str) -> None:
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise DeviceUnavailable(f"socket {path}: there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                os.unlink(path)  # The process that made it is gone.
            return
        except FileNotFoundError:
            return  # A process that served there has just ended.
        except BlockingIOError:
            pass  # Its backlog is full, so a process listens.
    raise DeviceUnavailable(f"socket {path}: a process serves there already")


@asynccontextmanager
async def _locked(path: str) -> AsyncIterator[None]:
    """Holds the lock of a path's socket: without it, one of two processes that find a stale file could remove the socket that the
    other has made since. The kernel ends the lock with the process; its file is removed by the next one.

    The directory itself is not locked: every user who may list it could keep it locked.
    """
    file = _beside(path) + ".lock"
    descriptor: int | None = None
    with anyio.move_on_after(_LOCK_S_MAX):
        while (descriptor := _lock(file)) is None:
            await anyio.sleep(_RETRY_S)
    if descriptor is None:
        raise DeviceUnavailable(
            f"socket {path}: cannot be served: another process kept {file} locked for {_LOCK_S_MAX:g} s"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(file)
        os.close(descriptor)  # Last: a process that locks the file then sees that it has no name any more.


def _lock(file: str) -> int | None:
    """A descriptor with the lock of a file, which is made; None while another process has it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_size:
            raise OSError(
                f"{file} is not a lock, and would be removed: expected an empty file, got {status.st_size} bytes"
            )
        if os.lstat(file).st_ino == status.st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # The process that had the lock has removed the file, or is about to.
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None

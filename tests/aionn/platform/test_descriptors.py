"""Descriptors from other processes are recognised without a question to the file's own server."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from aionn.platform import descriptors
from aionn.platform.descriptors import CLOSING_MAX, close_apart, unusable

WAIT_S_MAX = 10.0


def test_memory_sockets_eventfds_and_local_files_are_usable(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    fds = [os.memfd_create("usable"), os.eventfd(0), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)]
    with ours, theirs:
        assert unusable([*fds, ours.fileno()]) == set()
    close_apart(fds)


def test_files_of_other_kinds_and_places_are_unusable(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    fds = [
        *os.pipe(),
        os.open("/dev/zero", os.O_RDONLY),
        os.open("/proc/self/status", os.O_RDONLY),
        os.open(tmp_path, os.O_RDONLY),
        os.open(tmp_path, os.O_PATH),
        os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),
        os.pidfd_open(os.getpid()),
    ]
    assert unusable(fds) == set(fds)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("kind", ["fuse", "fuseblk", "fuse.sshfs", "nfs4", "9p", "cifs", None])
def test_files_of_a_server_or_of_an_unseen_mount_are_asked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    number = descriptors._mount_of(fd)
    line = (
        f"{number} 1 0:25 / /a\\040-\\040b rw - {kind} source rw"
        if kind
        else "1 1 0:1 / / rw - ext4 source rw"
    )
    lines = {"/proc/self/mountinfo": [line], f"/proc/self/fdinfo/{fd}": [f"mnt_id:\t{number}"]}
    monkeypatch.setattr(descriptors, "_lines", lines.__getitem__)
    asked: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", asked.append)
        assert unusable([fd]) == {fd}
    assert not asked
    os.close(fd)


def test_closings_that_wait_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released, closed = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    waiting: list[Any] = []

    def close(fd: int) -> None:
        waiting.append(threading.current_thread())
        begun.release()
        assert released.wait(WAIT_S_MAX)

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        for number in range(CLOSING_MAX + 3):
            close_apart([number], closed.release)
        for _ in range(CLOSING_MAX):
            assert begun.acquire(timeout=WAIT_S_MAX)
        assert len(descriptors._closing) == 3
        released.set()
        for _ in range(CLOSING_MAX + 3):
            assert closed.acquire(timeout=WAIT_S_MAX)
    assert len(waiting) == CLOSING_MAX + 3
    assert len(set(waiting)) == CLOSING_MAX
    for thread in waiting:
        thread.join()

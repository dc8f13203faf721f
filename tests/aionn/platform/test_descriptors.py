"""Descriptors from other processes are recognised without a question to the file's own server, and closed in threads."""

from __future__ import annotations

import _thread
import ctypes
import fcntl
import mmap
import os
import pty
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn.platform import descriptors
from aionn.platform.descriptors import OTHERS_MAX, QUICK_BYTES_MAX, close_apart, is_quick, kinds_of

WAIT_S_MAX = 10.0
LIBC = ctypes.CDLL(None, use_errno=True)


def sealed(size_bytes: int, seals: int = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def lock(fd: int, command: int) -> None:
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1, 1, 0))


def test_memory_sockets_eventfds_and_local_files_are_usable(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    fds = [os.memfd_create("usable"), os.eventfd(0), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)]
    with ours, theirs:
        assert kinds_of([*fds, ours.fileno()]) == (set(), {})
    close_apart(fds)


def test_descriptors_of_other_kinds_are_useless(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    end, other_end = os.pipe()
    with select.epoll() as made:
        epoll = os.dup(made.fileno())
    fds = {
        end: "pipe",
        other_end: "pipe",
        epoll: "eventpoll",
        LIBC.inotify_init1(0): "inotify",
        LIBC.timerfd_create(1, 0): "timerfd",
        LIBC.signalfd(-1, bytes(128), 0): "signalfd",
        os.pidfd_open(os.getpid()): "pidfd",
        os.open("/proc/self/status", os.O_RDONLY): "a file of proc",
        os.open("/proc/self/ns/net", os.O_RDONLY): "net",
        os.open(tmp_path, os.O_RDONLY): "no regular file",
        os.open(tmp_path, os.O_PATH): "a path without a file",
        os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK): "no regular file",
    }
    assert kinds_of(list(fds)) == (set(), fds)
    assert not any(map(is_quick, fds))
    for fd in fds:
        os.close(fd)


def test_devices_and_terminals_are_never_usable() -> None:
    fds = [os.open("/dev/zero", os.O_RDONLY), *pty.openpty()]
    foreign, useless = kinds_of(fds)
    assert foreign.union(useless) == set(fds)
    for fd in fds:
        os.close(fd)


def test_small_sealed_memory_without_locks_is_closed_quickly() -> None:
    fds = [sealed(QUICK_BYTES_MAX)]
    assert is_quick(fds[0])
    fds += [socket.socket().detach()]  # A network socket may be in it, or is one.
    fds += [sealed(QUICK_BYTES_MAX + 1), sealed(4096, fcntl.F_SEAL_SHRINK)]
    locked = [sealed(4096), sealed(4096)]
    fds += locked
    reopened = os.open(f"/proc/self/fd/{locked[0]}", os.O_RDWR)
    lock(reopened, fcntl.F_OFD_SETLK)
    lock(locked[1], fcntl.F_OFD_SETLK)
    # Pages behind its end.
    behind = os.memfd_create("behind", os.MFD_ALLOW_SEALING)
    assert LIBC.fallocate(behind, 1, ctypes.c_long(0), ctypes.c_long(QUICK_BYTES_MAX + 4096)) == 0
    fcntl.fcntl(behind, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    assert os.fstat(behind).st_size == 0
    fds += [reopened, behind]
    assert not any(map(is_quick, fds[1:]))
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("kind", ["fuse", "fuseblk", "fuse.sshfs", "nfs4", "9p", "cifs", None])
def test_files_of_a_server_or_of_an_unseen_mount_are_asked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    number, _ = descriptors._mount_and_flags(fd)
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
        assert kinds_of([fd]) == ({fd}, {})
    assert not asked
    os.close(fd)


def test_closings_that_wait_take_a_bounded_number_of_threads_and_keep_no_memory_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, released, closed = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    waiting: list[Any] = []
    pipes = [fd for _ in range((OTHERS_MAX + 4) // 2) for fd in os.pipe()]
    close = os.closerange

    def close_late(first: int, end: int) -> None:
        if first in pipes:
            waiting.append(threading.get_ident())
            begun.release()
            assert released.wait(WAIT_S_MAX)
        close(first, end)

    with monkeypatch.context() as patched:
        patched.setattr(os, "closerange", close_late)
        for fd in pipes:
            close_apart([fd], lambda _: closed.release())
        for _ in range(OTHERS_MAX):
            assert begun.acquire(timeout=WAIT_S_MAX)
        memory_closed = threading.Event()
        close_apart([sealed(4096)], lambda _: memory_closed.set())
        assert memory_closed.wait(WAIT_S_MAX)
        assert len(descriptors._others.jobs) == len(pipes) - OTHERS_MAX
        released.set()
        for _ in pipes:
            assert closed.acquire(timeout=WAIT_S_MAX)
    assert len(waiting) == len(pipes)


def test_memory_is_unmapped_by_the_thread_when_it_is_let_go() -> None:
    fd = sealed(2 * QUICK_BYTES_MAX)
    number = os.fstat(fd).st_ino
    array = np.frombuffer(mmap.mmap(fd, 2 * QUICK_BYTES_MAX), dtype=np.uint8)
    closed = threading.Event()
    threads: list[int] = []

    def on_closed(used_ns: int) -> None:
        threads.append(threading.get_ident())
        assert used_ns > 0
        with open("/proc/self/maps") as maps:
            assert not any(f" {number} " in line and "sealed" in line for line in maps)
        closed.set()

    close_apart([fd], on_closed, mapping=array)
    del array
    assert closed.wait(WAIT_S_MAX)
    assert threads != [threading.get_ident()]


def test_closing_that_fails_for_want_of_memory_keeps_no_later_one_open() -> None:
    """The thread that closes has one place: lost, it would leave all later descriptors open."""
    failed, closed = threading.Event(), threading.Event()

    def fail(_: int) -> None:
        failed.set()
        raise MemoryError

    close_apart([sealed(4096)], fail)
    assert failed.wait(WAIT_S_MAX)
    close_apart([sealed(4096)], lambda _: closed.set())
    assert closed.wait(WAIT_S_MAX)


class Counted:
    """A closing without descriptors, as a job of threads."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.done = threading.Semaphore(0)

    def do(self) -> None:
        self.threads.append(threading.get_native_id())
        self.done.release()


@pytest.mark.parametrize("is_limited", [False, True])
def test_closing_for_which_no_thread_can_be_made_keeps_no_later_one_open(
    monkeypatch: pytest.MonkeyPatch, is_limited: bool
) -> None:
    def start(*_: object) -> None:
        raise MemoryError

    threads, job = descriptors._Threads(1, is_limited=is_limited), Counted()
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", start)
        threads.put(job)
    assert job.threads == [threading.get_native_id()]
    threads.put(job)
    for _ in range(2):
        assert job.done.acquire(timeout=WAIT_S_MAX)
    assert job.threads[1] != threading.get_native_id()


def test_closings_one_after_the_other_have_one_thread_and_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a thread takes as long as many closings, and a server closes a fence for each fenced execution."""
    monkeypatch.setattr(descriptors, "IDLE_S", WAIT_S_MAX)
    threads, job = descriptors._Threads(OTHERS_MAX, is_limited=True), Counted()
    for _ in range(100):
        threads.put(job)
        assert job.done.acquire(timeout=WAIT_S_MAX)
        _wait_until(lambda: len(threads._waiting) == 1)
    assert len(set(job.threads)) == 1
    assert len(threads._free) == OTHERS_MAX - 1


def _wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def _timers() -> str:
    return Path("/proc/self/timers").read_text()


@pytest.mark.skipif(not os.path.exists("/proc/self/timers"), reason="the kernel does not list timers")
def test_thread_and_timer_end_some_time_after_the_last_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "IDLE_S", 0.001)
    before = _timers().count("ID:")
    threads, job = descriptors._Threads(3, is_limited=True), Counted()
    for _ in range(10):
        threads.put(job)
    for _ in range(10):
        assert job.done.acquire(timeout=WAIT_S_MAX)
    _wait_until(lambda: len(threads._free) == 3)
    assert not threads._waiting
    assert not threads.jobs
    assert _timers().count("ID:") <= before


def test_closings_from_many_threads_are_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of closing end and are woken all the time meanwhile."""
    monkeypatch.setattr(descriptors, "IDLE_S", 1e-6)
    threads, job = descriptors._Threads(2, is_limited=False), Counted()
    putting = [threading.Thread(target=lambda: [threads.put(job) for _ in range(1000)]) for _ in range(4)]
    for thread in putting:
        thread.start()
    for thread in putting:
        thread.join(WAIT_S_MAX)
    for _ in range(4000):
        assert job.done.acquire(timeout=WAIT_S_MAX)
    _wait_until(lambda: len(threads._free) == 2)


def test_want_of_memory_for_the_timer_loses_no_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([MemoryError(), MemoryError()])
    takes_signal = descriptors._takes_signal

    def failing() -> bool:
        for failure in failures:
            raise failure
        return takes_signal()

    monkeypatch.setattr(descriptors, "_takes_signal", failing)
    threads, job = descriptors._Threads(1, is_limited=True), Counted()
    threads.put(job)
    assert job.done.acquire(timeout=WAIT_S_MAX)
    assert next(failures, None) is None


def test_child_of_a_fork_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's thread that waits for work is not there in the child."""
    monkeypatch.setattr(descriptors, "IDLE_S", WAIT_S_MAX)
    closed = threading.Event()
    close_apart([sealed(4096)], lambda _: closed.set())
    assert closed.wait(WAIT_S_MAX)
    _wait_until(lambda: len(descriptors._memories._waiting) == 1)
    pid = os.fork()
    if pid == 0:
        closed = threading.Event()
        close_apart([sealed(4096)], lambda _: closed.set())
        os._exit(0 if closed.wait(WAIT_S_MAX) else 1)
    assert os.waitpid(pid, 0)[1] == 0

"""The descriptor form: what is readable when, what crosses, what is refused, who may die, what a fork does, limits."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings

import pytest

import fences
from fences import (
    FenceError,
    FenceStateError,
    FenceStatus,
    ForeignFenceError,
    RemoteCause,
    SyncFence,
)
from fences.state import TEXT_CHARACTERS_MAX

HEAD = struct.Struct("<BBQ")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NOTICE_BOUND_S = 30
"""A generous bound on hearing of a death: the test is that it is heard of at all, without anybody's timer."""


def readable(fd, timeout_s=0):
    return bool(select.select([fd], [], [], timeout_s)[0])


@contextlib.contextmanager
def process(code, *fds):
    """Another Python that was given descriptors (`fds` there) and says what it has to say on its standard output."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, fences\nfds = [int(each) for each in sys.argv[1:]]\n" + code,
            *map(str, fds),
        ],
        pass_fds=fds,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


# Made when asked for


def test_fence_has_no_descriptor_until_asked():
    before = len(os.listdir("/proc/self/fd"))
    fence = SyncFence()
    fence.then(lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before
    number = fence.fileno()
    assert number == fence.fileno()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    fence.signal()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    fence.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptor_is_close_on_exec():
    with SyncFence() as fence, SyncFence.from_fd(fence.fileno()) as imported:
        duplicate = fence.duplicate()
        for number in (fence.fileno(), imported.fileno(), duplicate):
            assert fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(duplicate)


@pytest.mark.parametrize(
    "finish", [lambda fence: fence.signal(), lambda fence: fence.fail("x"), lambda fence: fence.close()]
)
def test_readable_means_finished(finish):
    fence = SyncFence()
    duplicate = fence.duplicate()
    poll = select.poll()
    poll.register(duplicate, select.POLLIN)
    epoll = select.epoll()
    epoll.register(duplicate, select.EPOLLIN)
    assert not readable(duplicate) and poll.poll(0) == [] and epoll.poll(0) == []
    finish(fence)
    assert readable(duplicate) and poll.poll(0) and epoll.poll(0)
    epoll.close()
    os.close(duplicate)


def test_export_of_a_finished_fence_is_readable_at_once():
    for fence in (SyncFence.signalled(7), SyncFence.signalled().then(lambda: 1 / 0)):
        assert readable(fence.fileno())
        imported = SyncFence.from_fd(fence.fileno())
        assert (imported.status, imported.signal_time_ns) == (fence.status, fence.signal_time_ns)
        fence.close()


def test_descriptor_that_was_handed_out_stays_valid_until_close():
    fence = SyncFence()
    number = fence.fileno()
    fence.signal()
    assert readable(number) and fence.fileno() == number
    fence.close()
    with pytest.raises(OSError):
        os.fstat(number)


def test_asked_again_after_close_a_finished_fence_makes_a_new_descriptor():
    fence = SyncFence.signalled(7)
    fence.fileno()
    fence.close()
    with SyncFence.from_fd(fence.fileno()) as imported:
        assert imported.signal_time_ns == 7
    fence.close()


# What crosses


def test_status_time_and_cause_cross():
    fence = SyncFence("conv")
    imported = SyncFence.from_fd(fence.fileno())
    assert imported.status is FenceStatus.PENDING and imported.imported
    fence.fail(ValueError("bad tile"), at_ns=11)
    error = imported.error
    assert (error.origin, error.message, error.at_ns) == ("conv", "ValueError: bad tile", 11)
    assert isinstance(error.__cause__, RemoteCause)
    assert (error.__cause__.type_name, str(error.__cause__)) == ("ValueError", "ValueError: bad tile")
    fence.close()


def test_cause_given_as_text_crosses_as_text():
    fence = SyncFence("conv")
    imported = SyncFence.from_fd(fence.fileno())
    fence.fail("bad tile")
    assert imported.error.message == "bad tile" and imported.error.__cause__ is None
    fence.close()


def test_long_and_odd_texts_are_cut_to_fit_one_record():
    for text in ("é" * 10_000, "\U0001f600" * 10_000, "\udcff" * 10_000, "\0" * 10_000):
        fence = SyncFence(text)
        imported = SyncFence.from_fd(fence.fileno())
        fence.fail(ValueError(text))
        assert len(imported.error.message) <= TEXT_CHARACTERS_MAX
        assert imported.error.origin
        fence.close()


def test_failure_keeps_its_origin_over_two_crossings():
    fence = SyncFence("root")
    middle = SyncFence.from_fd(fence.fileno())
    chained = middle.then(lambda: None, "middle")
    last = SyncFence.from_fd(chained.fileno())
    fence.fail(ValueError("boom"))
    with pytest.raises(FenceError):
        chained.wait(NOTICE_BOUND_S * 10**9)
    assert last.error.origin == "root"
    assert str(last.error.__cause__) == "ValueError: boom"
    chained.close()
    fence.close()


def test_export_of_a_chained_merged_or_timeline_fence():
    timeline = fences.Timeline()
    root = SyncFence()
    row = [
        root.then(lambda: None),
        fences.merge([root]),
        fences.first([root]),
        timeline.fence(4),
        fences.Chain(root).fence(1),
    ]
    imported = [SyncFence.from_fd(fence.fileno()) for fence in row]
    chain = row[4].timeline
    chain.append(lambda: None)
    assert {fence.status for fence in imported} == {FenceStatus.PENDING}
    root.signal(5)
    timeline.advance(4)
    assert {fence.status for fence in imported} == {FenceStatus.SIGNALLED}
    for fence in row:
        fence.close()


def test_several_processes_wait_on_duplicates():
    code = "f = fences.SyncFence.from_fd(fds[0]); print('ready', flush=True); f.wait(); print(f.signal_time_ns, flush=True)"
    fence = SyncFence()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(process(code, fence.fileno())) for _ in range(3)]
        for child in children:
            assert child.stdout.readline() == "ready\n"
        fence.signal(at_ns=123456)
        assert [child.stdout.readline() for child in children] == ["123456\n"] * 3
    fence.close()


def test_duplicate_read_by_another_process_stays_readable_for_all():
    fence = SyncFence()
    first, second = SyncFence.from_fd(fence.fileno()), SyncFence.from_fd(fence.fileno())
    fence.signal(9)
    assert first.signal_time_ns == 9
    assert readable(fence.fileno())
    assert second.signal_time_ns == 9
    fence.close()


def test_asyncio_in_another_process_awaits(run):
    code = """
import asyncio
async def main():
    fence = fences.SyncFence.from_fd(fds[0])
    print("ready", flush=True)
    try:
        await fence
    except fences.FenceError as error:
        print(error.origin, error.__cause__, flush=True)
asyncio.run(main())
"""
    fence = SyncFence("camera")
    with process(code, fence.fileno()) as child:
        assert child.stdout.readline() == "ready\n"
        fence.fail(OSError("unplugged"))
        assert child.stdout.readline() == "camera OSError: unplugged\n"
    fence.close()


# Death of the exporter

EXPORTER = """
import socket, time
fence = fences.SyncFence("doomed")
with socket.socket(fileno=fds[0]) as sock:
    fences.send_fence(sock, fence)
print("sent", flush=True)
sys.stdin.readline()
fence.signal(77)
print("signalled", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def exporter():
    ours, theirs = socket.socketpair()
    with ours, theirs, process(EXPORTER, theirs.fileno()) as child:
        assert child.stdout.readline() == "sent\n"
        yield child, fences.recv_fence(ours)


def test_importers_hear_of_the_exporters_death(run):
    async def main():
        with exporter() as (child, fence):
            tasks = [
                asyncio.ensure_future(asyncio.wait_for(each, NOTICE_BOUND_S))
                for each in (fence, fence.then(lambda: None))
            ]
            thread = asyncio.ensure_future(asyncio.to_thread(fence.wait, NOTICE_BOUND_S * 10**9))
            while fence.waiter_count < 3:
                await asyncio.sleep(0)
            os.kill(child.pid, signal.SIGKILL)
            for waiting in (*tasks, thread):
                with pytest.raises(FenceError, match=f"process {child.pid}"):
                    await waiting
            assert fence.status is FenceStatus.FAILED

    run(main())


def test_signal_of_an_exporter_that_then_dies_stays(run):
    with exporter() as (child, fence):
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "signalled\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert fence.wait(0) is True
        assert fence.signal_time_ns == 77


def test_exporter_that_drops_its_fence_fails_it_for_importers():
    fence = SyncFence("forgotten")
    imported = SyncFence.from_fd(fence.fileno())
    with pytest.warns(ResourceWarning, match="close it"):
        del fence
        gc.collect()
    assert "dropped while pending" in imported.error.message


def test_dropping_an_imported_pending_fence_warns():
    with SyncFence() as fence:
        imported = SyncFence.from_fd(fence.fileno())
        with pytest.warns(ResourceWarning, match="close it"):
            del imported
            gc.collect()


def test_dropping_finished_fences_does_not_warn():
    fence = SyncFence()
    imported = SyncFence.from_fd(fence.fileno())
    duplicate = fence.duplicate()
    fence.signal()
    assert imported.status is FenceStatus.SIGNALLED
    fence.close()
    os.close(duplicate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del fence, imported
        gc.collect()


def test_fence_of_another_process_cannot_be_finished_here():
    with exporter() as (child, fence):
        for finish in (fence.signal, fence.try_signal, lambda: fence.fail("x"), lambda: fence.try_fail("x")):
            with pytest.raises(ForeignFenceError, match=f"process {child.pid}"):
                finish()
        assert fence.status is FenceStatus.PENDING
        child.stdin.write("\n")
        child.stdin.flush()
        assert fence.wait(NOTICE_BOUND_S * 10**9) is True
        with pytest.raises(FenceStateError):
            fence.signal()


# Fork


def in_child(body):
    """Run in a forked child; its exit status tells whether the body returned true."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if body() else 2
        finally:
            os._exit(status)
    return child


def exit_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_does_not_keep_the_fence_alive():
    """The exporter forks and dies; its child lives on, and importers still hear of the death."""
    alive_reading, alive_writing = os.pipe()
    ours, theirs = socket.socketpair()

    def export_fork_and_die():
        fence = SyncFence("x")
        fences.send_fence(theirs, fence)
        if os.fork() == 0:
            os.close(alive_writing)
            os.read(alive_reading, 1)  # Until the test ends.
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    child = in_child(export_fork_and_die)
    with ours, theirs:
        fence = fences.recv_fence(ours)
        with pytest.raises(FenceError, match="died"):
            fence.wait(NOTICE_BOUND_S * 10**9)
    assert exit_of(child) == -signal.SIGKILL
    os.close(alive_writing)
    os.close(alive_reading)


def test_child_of_the_exporter_may_wait_but_not_signal():
    fence = SyncFence("parent's")
    fence.fileno()
    reading, writing = os.pipe()
    count = len(os.listdir("/proc/self/fd"))

    def body():
        assert len(os.listdir("/proc/self/fd")) == count - 1  # Without the exporting end.
        try:
            fence.signal()
        except ForeignFenceError:
            os.write(writing, b"x")
            return fence.wait(NOTICE_BOUND_S * 10**9) and fence.signal_time_ns == 42

    child = in_child(body)
    assert os.read(reading, 1) == b"x"
    assert fence.status is FenceStatus.PENDING
    fence.signal(42)
    assert exit_of(child) == 0
    fence.close()
    os.close(reading)
    os.close(writing)


def test_child_that_exits_or_closes_does_not_end_the_parents_fence():
    fence = SyncFence()
    imported = SyncFence.from_fd(fence.fileno())

    def body():
        imported.close()
        fence.close()
        return True

    assert exit_of(in_child(body)) == 0
    assert imported.status is FenceStatus.PENDING
    fence.signal()
    assert imported.status is FenceStatus.SIGNALLED
    fence.close()


@pytest.mark.parametrize("children", [8, pytest.param(40, marks=pytest.mark.long)])
def test_fences_work_in_a_child_forked_while_other_threads_use_them(children):
    """The package's locks are whole in the child, whatever thread held them."""
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            with SyncFence() as fence:
                fence.fileno()

    def body():
        with SyncFence() as fence, SyncFence.from_fd(fence.fileno()) as imported:
            fence.signal()
            return imported.status is FenceStatus.SIGNALLED

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Forking with threads is what is tested.
            for _ in range(children):
                assert exit_of(in_child(body)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_child_of_a_process_with_the_background_thread_watches_by_its_own():
    fence = SyncFence()
    imported = SyncFence.from_fd(fence.fileno())
    after = imported.then(lambda: None)

    def body():
        with SyncFence() as mine, SyncFence.from_fd(mine.fileno()) as seen:
            dependant = seen.then(lambda: None)
            mine.signal()
            return dependant.wait(NOTICE_BOUND_S * 10**9)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert exit_of(in_child(body)) == 0
    fence.signal()
    assert after.wait(NOTICE_BOUND_S * 10**9)
    fence.close()


# The limit of descriptors


@contextlib.contextmanager
def descriptors_left(count):
    """Lower the limit so that exactly `count` more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(number) for number in os.listdir("/proc/self/fd")}
    filler = []
    limit = max(used) + 1 + count
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with contextlib.suppress(OSError):
            while True:
                filler.append(os.dup(0))
        for _ in range(count):
            os.close(filler.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in filler:
            os.close(number)


@pytest.mark.parametrize("count", [0, 1])
def test_export_at_the_limit_fails_cleanly_and_works_later(count):
    fence = SyncFence()
    before = sorted(os.listdir("/proc/self/fd"))
    with descriptors_left(count):
        for ask in (fence.fileno, fence.duplicate, fence.export):
            with pytest.raises(OSError) as caught:
                ask()
            assert caught.value.errno == 24
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert fence.status is FenceStatus.PENDING
    with SyncFence.from_fd(fence.fileno()) as imported:
        fence.signal()
        assert imported.status is FenceStatus.SIGNALLED
    fence.close()


def test_duplicate_at_the_limit_leaves_no_half_made_pair():
    fence = SyncFence()
    before = sorted(os.listdir("/proc/self/fd"))
    with descriptors_left(2), pytest.raises(OSError):
        fence.duplicate()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_import_and_wait_at_the_limit_fail_cleanly():
    fence = SyncFence()
    number = fence.fileno()
    imported = SyncFence.from_fd(number)
    before = sorted(os.listdir("/proc/self/fd"))
    with descriptors_left(0):
        with pytest.raises(OSError):
            SyncFence.from_fd(number)
        with pytest.raises(OSError):
            imported.wait(10**9)
        with pytest.raises(OSError):
            imported.then(lambda: None)
        assert imported.waiter_count == 0
    assert sorted(os.listdir("/proc/self/fd")) == before
    fence.signal()
    assert imported.wait(0) is True
    fence.close()


def test_ten_thousand_fences_need_no_descriptor_and_exported_ones_give_theirs_back():
    row = [SyncFence() for _ in range(10_000)]
    before = len(os.listdir("/proc/self/fd"))
    for fence in row:
        number = fence.duplicate()
        fence.signal()
        os.close(number)
    assert len(os.listdir("/proc/self/fd")) == before


def test_signal_time_is_comparable_between_processes():
    before = time.monotonic_ns()
    with exporter() as (child, fence):
        child.stdin.write("\n")
        child.stdin.flush()
        fence.wait(NOTICE_BOUND_S * 10**9)
    code = "f = fences.SyncFence(); f.signal(); print(f.signal_time_ns, flush=True)"
    with process(code) as child:
        assert before < int(child.stdout.readline()) < time.monotonic_ns()

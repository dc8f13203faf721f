"""The waits of tasks and threads for a fence, and the path of a descriptor's readiness to an event loop.

Owns: the futures of the tasks that await a fence, one group for each event loop; the registration of a descriptor
with a loop; the sleep of a thread; the one background thread that watches imported fences which nothing else watches.
Refuses to own: the state of a fence, which it only asks to look at its descriptor. The only module of this package
that touches asyncio.

Invariants:
1. A fence has at most one group for each loop, a loop at most one registration for each fence, however many tasks await.
2. Futures are touched only in the thread of their loop; any other thread crosses by one ``call_soon_threadsafe`` a group.
3. A cancelled waiter takes away its own future and nothing else; the last one to leave takes away the registration.
4. A closed loop does not affect other loops: its futures are dead, all other waiters are woken as usual.
5. Nothing here reads a loop's clock, so a loop with virtual time behaves as any other.
6. A forked child leaves the registrations of its parent's loops as they are, however it ends.
7. The background thread continues whatever a callback raises, and logs what would end a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from asyncio import _get_running_loop
from collections.abc import Callable, Generator
from typing import Any, Protocol
from weakref import WeakSet, ref

from fences.descriptor import Port

POLL_MS_MAX = 2**31 - 1
"""The longest sleep ``poll`` takes; longer ones are slept in pieces."""

_separated: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
_last_separated: ref[asyncio.AbstractEventLoop] | None = None
"""The loop that was separated last: most processes have one, and each wait asks."""

_generation = 0
"""Number of forks between the first process and this one. Comparing it costs no system call, as ``os.getpid`` does."""


def separate_at_fork(loop: asyncio.AbstractEventLoop) -> None:
    """Have forked children get an empty epoll instance of their own for a loop of asyncio. Idempotent.

    A fork copies the number of the instance alone: the child's copy of the loop removes descriptors when its tasks are
    cancelled and when it is closed, and would remove them from the parent's instance.
    """
    global _last_separated
    if _last_separated is None or _last_separated() is not loop:
        _separated.add(loop)
        _last_separated = ref(loop)


class Waitable(Protocol):
    """The part of a fence that this module uses."""

    def _attach(self, waiter: Callable[[Any], object]) -> bool:
        """Have ``waiter(fence)`` called when it finishes; False, and nothing kept, if it already has."""

    def _detach(self, waiter: Callable[[Any], object]) -> bool:
        """Undo; False if the waiter was called, or is about to be."""

    def _group_of(self, loop: asyncio.AbstractEventLoop) -> LoopWaiters | None:
        """The group for a loop that is attached now."""

    def _poll_descriptor(self, is_reported: bool = False) -> bool:
        """Read the descriptor and take over its record. Whether the fence is finished. See ``Port.peek``."""


class LoopWaiters:
    """The tasks of one loop that await one fence, and that loop's registration of the fence's descriptor if it has one.

    Attributes:
        loop: The loop; everything but a call of the group itself happens in its thread.
        pinned: Dependants without a future rely on this registration, so it stays until the fence finishes.
    """

    __slots__ = ("_fence", "_futures", "_generation", "_number", "_port", "loop", "pinned")

    def __init__(self, fence: Waitable, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pinned = False
        self._fence = fence
        self._futures: dict[asyncio.Future[None], None] = {}
        self._port: Port | None = None
        self._number = -1
        self._generation = -1

    def __len__(self) -> int:
        return len(self._futures)

    def __bool__(self) -> bool:
        return True

    def watch(self, port: Port) -> None:
        """Register an imported fence's descriptor with the loop, once."""
        if self._port is None:
            number = port.hold()
            if number < 0:  # The fence has finished by now, and will call this group.
                return
            self._number = number
            self._port = port
            self._generation = _generation
            separate_at_fork(self.loop)
            try:
                self.loop.add_reader(self._number, self._fence._poll_descriptor, True)
            except BaseException:
                self._port = None
                port.release()
                raise

    def unwatch(self) -> None:
        """Take the descriptor out of the loop. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            # Not in a forked child: only loops of asyncio are separated there.
            if not self.loop.is_closed() and self._generation == _generation:
                self.loop.remove_reader(self._number)
            port.release()

    def add(self, future: asyncio.Future[None]) -> None:
        self._futures[future] = None

    def leave(self, future: asyncio.Future[None]) -> None:
        """A task stopped waiting, whatever the reason."""
        self._futures.pop(future, None)
        if not self._futures and not self.pinned and self._fence._detach(self):
            self.unwatch()

    def __call__(self, fence: Waitable) -> None:
        """The fence has finished: wake the tasks. Called once, in any thread."""
        if _get_running_loop() is self.loop:
            self._wake()
            return
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # The loop is closed: its tasks are gone, and so is its registration.
            self._futures.clear()
            port, self._port = self._port, None
            if port is not None:
                port.release()

    def _wake(self) -> None:
        for future in self._futures:
            if not future.done():
                future.set_result(None)
        self._futures.clear()
        if self._port is not None:
            # After the tasks: taking the descriptor out of epoll must not delay the waiters that the signal wakes.
            self.loop.call_soon(self.unwatch)


def wait_in_loop(fence: Waitable, port: Port | None) -> Generator[Any, None, None]:
    """Suspend the running task until the fence finishes. Cancelled, it leaves nothing behind and disturbs no other waiter.

    Args:
        fence: The fence to wait for, pending when last looked at.
        port: Its descriptor if only another process can finish it, else None.

    Raises:
        RuntimeError: no event loop is running.
    """
    loop = asyncio.get_running_loop()
    group = _join(fence, loop, port)
    if group is None:
        return
    future = loop.create_future()
    group.add(future)
    try:
        yield from future
    finally:
        group.leave(future)


def pin_in_loop(fence: Waitable, port: Port) -> None:
    """Have an imported fence watched until it finishes, for dependants other than tasks: by the running loop if
    there is one in
    this thread, else by the background thread."""
    loop = _get_running_loop()
    if loop is None:
        _watcher.watch(fence, port)
        return
    group = _join(fence, loop, port)
    if group is not None:
        group.pinned = True


def _join(fence: Waitable, loop: asyncio.AbstractEventLoop, port: Port | None) -> LoopWaiters | None:
    """The group of this loop, created and attached if missing; None if the fence has finished."""
    group = fence._group_of(loop)
    if group is None:
        group = LoopWaiters(fence, loop)
        if not fence._attach(group):
            return None
    if port is not None:
        try:
            group.watch(port)
        except BaseException:
            if not group._futures:
                fence._detach(group)
            raise
    return group


def wait_in_thread(fence: Waitable, port: Port | None, timeout_ns: int | None) -> None:
    """Block this thread until the fence finishes or the time is over, whichever is first; the caller looks which it was.

    Args:
        fence: The fence to wait for.
        port: Its descriptor if only another process can finish it, else None.
        timeout_ns: 0 or more, in ns of CLOCK_MONOTONIC whatever clock the loops use; None waits without limit.

    Raises:
        RuntimeError: an event loop runs in this thread.
    """
    if _get_running_loop() is not None:
        raise RuntimeError("wait() would block the event loop that runs in this thread; await the fence")
    deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
    if port is None:
        _sleep_on_lock(fence, deadline_ns)
    else:
        _sleep_on_descriptor(fence, port, deadline_ns)


def _sleep_on_lock(fence: Waitable, deadline_ns: int | None) -> None:
    sleeping = threading.Lock()
    sleeping.acquire()

    def wake(_: object) -> None:
        sleeping.release()

    if not fence._attach(wake):
        return
    try:
        if deadline_ns is None:
            sleeping.acquire()
            return
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if sleeping.acquire(timeout=min(left_ns / 1e9, threading.TIMEOUT_MAX)):
                return
    finally:
        fence._detach(wake)


def _sleep_on_descriptor(fence: Waitable, port: Port, deadline_ns: int | None) -> None:
    # The event descriptor wakes the sleep when the fence finishes otherwise: closed here, or read first by another reader.
    with contextlib.ExitStack() as stack:
        number = port.hold()
        if number < 0:  # Finished by now.
            return
        stack.callback(port.release)
        waking = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        stack.callback(os.close, waking)
        written = threading.Event()

        def wake(_: object) -> None:
            os.eventfd_write(waking, 1)
            written.set()

        if not fence._attach(wake):
            return
        poll = select.poll()
        poll.register(number, select.POLLIN)
        poll.register(waking, select.POLLIN)
        try:
            while not fence._poll_descriptor():
                if deadline_ns is None:
                    poll.poll()
                    continue
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    return
                poll.poll(min(-(-left_ns // 1_000_000), POLL_MS_MAX))
        finally:
            if not fence._detach(wake):
                written.wait()  # Another thread is about to write: the descriptor must outlive that.


class _Watcher:
    """One thread that watches imported fences for dependants that no loop serves. It ends when it has nothing to watch."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._watched: dict[int, tuple[Waitable, Port]] = {}
        self._waking = -1
        self._thread: threading.Thread | None = None

    def watch(self, fence: Waitable, port: Port) -> None:
        with self._lock:
            number = port.hold()
            if number < 0:  # Finished by now: its finisher runs the dependants.
                return
            if number in self._watched:
                port.release()
                return
            try:
                if self._thread is None:
                    self._waking = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                    self._thread = threading.Thread(target=self._run, name="fences watcher", daemon=True)
                    self._watched[number] = (fence, port)
                    self._thread.start()
                else:
                    self._watched[number] = (fence, port)
                    os.eventfd_write(self._waking, 1)
            except BaseException:
                self._watched.pop(number, None)
                port.release()
                if self._thread is not None and not self._thread.is_alive():
                    self._thread = None
                    os.close(self._waking)
                raise
        # When the fence finishes otherwise (closed here, read first elsewhere), the thread must release it.
        fence._attach(self._nudge)

    def _nudge(self, _: object) -> None:
        with self._lock:
            if self._thread is not None:
                os.eventfd_write(self._waking, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched.items())
            for number, (fence, port) in watched:
                if self._is_over(fence):
                    with self._lock:
                        del self._watched[number]
                    port.release()
            del watched
            with self._lock:
                if not self._watched:
                    os.close(self._waking)
                    self._thread = None
                    return
                poll = select.poll()
                poll.register(self._waking, select.POLLIN)
                for number in self._watched:
                    poll.register(number, select.POLLIN)
            fence = port = None  # type: ignore[assignment]
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._waking)

    def _is_over(self, fence: Waitable) -> bool:
        """Whether a fence is not to be watched any longer."""
        try:
            return fence._poll_descriptor()
        except (
            BaseException
        ):  # Also what ends a program: raised by a callback, it would end the watching of all other fences.
            _logger.exception("a callback of %r raised", fence)
            return True


_watcher = _Watcher()
_logger = logging.getLogger("fences")


def _after_fork_in_child() -> None:
    # The thread, and every loop that was running, belong to the parent. The child's copy of the event descriptor stays open:
    # closing a number here is safe, since the table of descriptors was copied.
    global _watcher, _generation, _last_separated
    _generation += 1
    for loop in list(_separated):
        selector = getattr(loop, "_selector", None)  # None in a loop of uvloop.
        fileno = getattr(selector, "fileno", None)
        if fileno is not None and not loop.is_closed():
            with select.epoll() as own:
                os.dup2(own.fileno(), fileno(), inheritable=False)
    _separated.clear()
    _last_separated = None
    waking = _watcher._waking if _watcher._thread is not None else -1
    _watcher = _Watcher()
    if waking >= 0:
        os.close(waking)


os.register_at_fork(after_in_child=_after_fork_in_child)

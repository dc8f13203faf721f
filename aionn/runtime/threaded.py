"""The thread with an event loop in which the runtime of ``aionn.blocking`` lives.

Owns the crossing from other threads into that loop, the threads that read the sources of streams, and the closing of what is still
open when the interpreter ends.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # Registers itself for the interpreter's end first: see check_not_ending.
import contextvars
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from aionn.errors import GeneralFailure, InvalidArgument, ResourceExhausted, shortage_of
from aionn.platform.loops import Outcome, in_loop, outcome_of_call
from aionn.platform.threads import start_thread
from aionn.runtime.background import Background, Cancelled, Waiter

__all__ = ["Forked", "LoopThread", "check_not_ending", "close_at_exit", "forget", "read_on_thread"]

_T = TypeVar("_T")
_Item = TypeVar("_Item")

EXIT_S_MAX = 5.0
"""Limit of the wait at the interpreter's end for runtimes that were not closed: twice the time of killing a driver process."""

THREADS_END_S_MAX = 0.2
"""Limit of the wait of closing for threads that were requested to end: a stream's source that does not block ends immediately, and
so does an idle worker thread of the loop.
"""


class Forked(InvalidArgument):
    """A child has no threads of its parent's, so a call would never return."""


class _Call(Generic[_T]):
    """A call on its way into the loop, and its answer on the way back.

    Attributes:
        is_cancelled: Whether the caller was interrupted, and does not wait any more.
        scope: Where it runs; None until it has begun.
        answer: The result or the error; None where the runtime was closed during the call.
    """

    # A ``concurrent.futures.Future`` has a lock that is written in Python: a thread that is interrupted just after it has taken
    # this lock never gives it back, and the loop waits for it with the answer. A ``SimpleQueue`` is one step of the interpreter.
    __slots__ = ("answer", "function", "is_cancelled", "scope")

    def __init__(self, function: Callable[[], Awaitable[_T]]) -> None:
        self.function = function
        self.is_cancelled = False
        self.scope: anyio.CancelScope | None = None
        self.answer: queue.SimpleQueue[Outcome[_T] | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Runs it in the loop."""
        ended: Outcome[_T] | None = None
        try:
            with anyio.CancelScope() as self.scope:
                ended = await outcome_of_call(self.function)
        except Cancelled:
            pass  # Its own, or the loop ends. Let out, it would end the other calls.
        finally:
            self.answer.put(ended)

    def cancel(self) -> None:
        """Cancels it in the loop. If it has ended, this does nothing."""
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()


class LoopThread:
    """The thread with the event loop.

    Attributes:
        background: Where the runtime's executions live.
        sources: Threads that read the sources of streams.
        is_closed: Whether it takes no calls any more.
    """

    def __init__(self, background: Background) -> None:
        self.background = background
        self._in_loop: Callable[[Callable[[], object]], object] | None = None
        self._calls: anyio.abc.TaskGroup
        self._stop: anyio.Event
        self._thread = 0
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._workers: list[threading.Thread] = []
        # Calls whose threads wait. Those that the loop has not begun when it ends are answered by the thread.
        self._waiting: set[_Call[Any]] = set()
        self._has_ended = False
        self.is_closed = False
        self.sources: set[threading.Thread] = set()
        started: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Not ``start_blocking_portal``: in a forked child its generator would be collected, and stop a loop that is not there.
        self._serving = threading.Thread(
            target=self._serve, args=(started,), name="aionn-blocking", daemon=True
        )
        try:
            self._serving.start()
            started.get()
            if self._failure is not None:
                raise self._failure
        except (MemoryError, OSError, RuntimeError) as e:
            raise shortage_of(e, "aionn.blocking") or e from e
        except BaseException:
            self._request_stop()  # This thread was interrupted: no other code has a reference to the loop.
            raise

    def _serve(self, started: queue.SimpleQueue[None]) -> None:
        async def serve() -> None:
            self._thread = threading.get_ident()
            self._stop = anyio.Event()
            self._in_loop = in_loop()
            try:
                async with anyio.create_task_group() as self._calls:
                    started.put(None)
                    if not self.is_closed:
                        await self._stop.wait()
                    self._calls.cancel_scope.cancel()
            finally:
                # They are requested to end when this task is done, and anyio does not wait for them.
                token = anyio.lowlevel.current_token()
                # Before version 4.11 of anyio the token was the loop itself.
                loop = getattr(token, "native_token", token)
                self._workers = [t for t in threading.enumerate() if getattr(t, "loop", None) is loop]

        try:
            anyio.run(serve)
        except BaseException as e:
            self._failure = e
        finally:
            # In this order: a call that sees no end yet is in the set, and any other raises.
            self._has_ended = True
            for call in list(self._waiting):
                call.answer.put(None)
            started.put(None)

    def check(self) -> None:
        """Rejects a call that would never return.

        Raises:
            InvalidArgument: This is a forked child, the loop's own thread, or the runtime is closed.
        """
        if os.getpid() != self._pid:
            raise Forked(
                f"aionn.blocking: expected the process that opened the runtime (pid {self._pid}), got a child that was forked "
                f"from it (pid {os.getpid()}); open a runtime of its own there"
            )
        if threading.get_ident() == self._thread:
            raise InvalidArgument("aionn.blocking: called on its own loop's thread; it would wait for itself")
        if self.is_closed:
            raise InvalidArgument("aionn.blocking: the runtime is closed")

    def call(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Runs a coroutine function there and waits for it."""
        self.check()
        call = _Call[_T](lambda: function(*args))
        try:
            self._waiting.add(call)
            if self._has_ended:
                raise self._closed_meanwhile()
            self._soon(lambda: self._begin(call))
            ended = call.answer.get()
        except BaseException:
            with suppress(GeneralFailure):
                self._soon(
                    call.cancel
                )  # This thread was interrupted; where the loop has ended there is no call.
            raise
        finally:
            self._waiting.discard(call)
        if ended is None:
            raise self._closed_meanwhile()
        return ended.get()

    def do(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function there that does not wait."""

        async def run() -> _T:
            return function(*args)

        return self.call(run)

    def post(self, function: Callable[[], object]) -> None:
        """Has a function called there, and does not wait: for the garbage collector, which may interrupt a thread that has a lock
        for which the loop waits. Nothing happens where the loop has ended, and in a forked child.
        """
        if os.getpid() == self._pid:
            with suppress(GeneralFailure):
                self._soon(function)

    def _soon(self, function: Callable[[], object]) -> None:
        assert self._in_loop is not None, "it was started"
        try:
            self._in_loop(function)
        except RuntimeError:
            raise self._closed_meanwhile() from None

    def _begin(self, call: _Call[Any]) -> None:
        if call.is_cancelled:
            return
        try:
            self._calls.start_soon(call.run)
        except RuntimeError:  # The group has ended.
            call.answer.put(None)

    def end(self, aclose: Callable[[], Awaitable[None]]) -> None:
        """Closes something of the runtime's, unless that was closed, and everything with it."""
        if not self.is_closed:
            self.call(aclose)

    def _closed_meanwhile(self) -> GeneralFailure:
        return GeneralFailure("aionn.blocking: the runtime was closed by another thread during the call")

    def _request_stop(self) -> None:
        self.is_closed = True
        if self._in_loop is not None:
            with suppress(GeneralFailure):  # It has stopped already.
                self._soon(self._stop.set)

    def close(self) -> None:
        """Ends the calls of other threads, the loop and its threads."""
        self._request_stop()
        self._serving.join()
        end_s = time.monotonic() + THREADS_END_S_MAX
        for thread in [*self.sources, *self._workers]:
            thread.join(max(0.0, end_s - time.monotonic()))


_open: set[Callable[[], None]] = set()
_is_registered = False
_is_ending = False


def _close_at_exit() -> None:
    """Closes the runtimes that are still open, concurrently, when the main thread has ended and before Python joins other
    threads.
    """
    global _is_ending
    _is_ending = True
    closing = []
    for close in list(_open):
        thread = threading.Thread(target=close, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            close()  # There is no thread for it; it takes bounded time as well.
        else:
            closing.append(thread)
    end_s = time.monotonic() + EXIT_S_MAX
    for thread in closing:
        thread.join(max(0.0, end_s - time.monotonic()))


def check_not_ending() -> None:
    """Rejects a runtime that nothing would close.

    Raises:
        InvalidArgument: The interpreter ends, as in a function of ``atexit``: Python starts no threads for the runtime any more.
    """
    global _is_registered
    ending = InvalidArgument("aionn.blocking: a runtime cannot be opened while the interpreter ends")
    if _is_ending:
        raise ending
    if not _is_registered:
        # Not ``atexit``: that comes after the threads were joined, and those of the loop wait for the loop to end. After the import
        # of concurrent.futures.thread, since the last to register is called first: threads of a pool may wait for one of our calls.
        try:
            threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]
        except RuntimeError:
            raise ending from None
        _is_registered = True


def close_at_exit(close: Callable[[], None]) -> None:
    """Has this called when the interpreter ends, before Python joins its threads; ``check_not_ending`` was called before."""
    _open.add(close)


def forget(close: Callable[[], None]) -> None:
    """Undoes ``close_at_exit``. Idempotent."""
    _open.discard(close)


os.register_at_fork(after_in_child=_open.clear)


class _Asked(Generic[_Item]):
    """The answer to a request for the next item."""

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.item: _Item | None = None
        self.is_end = False
        self.failure: BaseException | None = None


async def read_on_thread(source: Iterable[_Item], loop: LoopThread) -> AsyncIterator[_Item]:
    """The items of an ordinary iterable, each read when it is asked for."""
    # A thread of its own and a daemon: a source may block without end, such as a camera without frames, and must delay neither
    # closing nor the end of the interpreter. A worker thread of anyio would keep both.
    requests: queue.SimpleQueue[_Asked[_Item] | None] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def read() -> None:
        try:
            context.run(_read, source, requests, loop.background)
        finally:
            loop.sources.discard(threading.current_thread())

    thread = threading.Thread(target=read, name="aionn-source", daemon=True)
    loop.sources.add(thread)
    try:
        start_thread(thread, "aionn.blocking: the source of a stream")
    except ResourceExhausted:
        loop.sources.discard(thread)  # Closing joins what is there.
        raise
    try:
        while True:
            asked = _Asked[_Item](loop.background.waiter())
            requests.put(asked)
            await asked.waiter.future
            if asked.failure is not None:
                raise asked.failure
            if asked.is_end:
                return
            yield asked.item  # type: ignore[misc]
    finally:
        requests.put(None)


def _read(
    source: Iterable[_Item], requests: queue.SimpleQueue[_Asked[_Item] | None], background: Background
) -> None:
    items: Iterator[_Item] | None = None
    while (asked := requests.get()) is not None:
        try:
            items = iter(source) if items is None else items
            asked.item = next(items)
        except StopIteration:
            asked.is_end = True
        except BaseException as e:
            asked.failure = e
        background.call_soon(asked.waiter.wake)
        del asked  # The item is not kept until the next one is asked for.

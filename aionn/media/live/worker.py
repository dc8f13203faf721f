"""One thread for the calls of a live source that may block: opening, converting, closing.

Owns the thread, the order of its calls and the limit of each. Refuses to own what is called.

A device or a driver may block in ``open`` or ``close`` for as long as it likes, and no thread can be ended from outside. So a
call that
passes its limit is abandoned: its caller continues with an error, and its result is discarded by the thread when it comes. The
thread is a daemon, so that an abandoned call does not keep the process from ending.

Invariants:
1. Calls run one at a time, in the order in which they were submitted.
2. No call is submitted behind one that was abandoned at its limit, except the last one, which closes.
3. ``aclose`` returns when the thread has ended, or its limit has passed; however often its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import anyio

from aionn.media.live.capture import SourceUnavailable
from aionn.platform.threads import start_thread

__all__ = ["Call", "Worker", "outlast"]

_T = TypeVar("_T")

JOIN_S_MAX = 1.0
"""A thread that has done its last call ends within microseconds; a second is for a machine that is overloaded."""


class Call(Generic[_T]):
    """A call in the thread.

    Attributes:
        future: Its result, in the loop.
    """

    def __init__(self, run: Callable[[], _T], discard: Callable[[_T], object] | None) -> None:
        self._run = run
        self._discard = discard
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._has_returned = False
        self._unclaimed: Callable[[], object] | None = None
        self.future: asyncio.Future[_T] = self._loop.create_future()

    @property
    def has_returned(self) -> bool:
        """Whether the thread is done with it."""
        return self._has_returned

    def perform(self) -> None:
        """Runs it; in the thread."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._run()
        except BaseException as e:  # Any exception belongs to the caller.
            error = e
        discard = None if error is not None or self._discard is None else partial(self._discard, result)
        with self._lock:
            self._has_returned = True
            is_wanted = not self._is_abandoned
            if is_wanted:
                self._unclaimed = discard
                try:
                    self._loop.call_soon_threadsafe(self._finish, result, error)
                except RuntimeError:  # The loop was closed.
                    is_wanted = False
        if not is_wanted and discard is not None:
            discard()

    def abandon(self) -> Callable[[], object] | None:
        """Has the result discarded by the thread when it comes.

        Returns:
            The call that discards the result, for the caller to submit, if the result is here already; else None.
        """
        with self._lock:
            self._is_abandoned = True
            unclaimed, self._unclaimed = self._unclaimed, None
            return unclaimed

    def _finish(self, result: _T, error: BaseException | None) -> None:
        if self._is_abandoned or self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


async def outlast(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Waits for a future, however often the caller is cancelled, and at most ``limit_s``; returns whether it is done.

    Raises:
        asyncio.CancelledError: The caller was cancelled during the wait, which has ended.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    cancelled: asyncio.CancelledError | None = None
    # The shield is for anyio's cancellations, which would come again in each turn of the loop; asyncio's pass it.
    with anyio.CancelScope(shield=True):
        while not future.done() and (left_s := end_s - loop.time()) > 0:
            try:
                await asyncio.wait([future], timeout=left_s)
            except asyncio.CancelledError as e:
                cancelled = e
    if cancelled is not None:
        raise cancelled
    return future.done()


class Worker:
    """A thread, started with the first call.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: Call[Any] | None = None

    def submit(self, run: Callable[[], _T], discard: Callable[[_T], object] | None = None) -> Call[_T]:
        """Has a function called in the thread; never waits. Its caller bounds the number of calls.

        Args:
            run: The function.
            discard: Called with a result that is no longer wanted, in the thread or in the loop.

        Raises:
            ResourceExhausted: There is no room for the thread (transient); only of the first call.
        """
        if self._thread is None:
            thread = threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True)
            start_thread(thread, self._name)
            self._thread = thread
        call = Call(run, discard)
        self._calls.put(call)
        return call

    async def run(
        self,
        run: Callable[[], _T],
        *,
        limit_s: float,
        what: str,
        discard: Callable[[_T], object] | None = None,
    ) -> _T:
        """Calls a function in the thread and waits for its result.

        Args:
            run: The function.
            limit_s: The longest wait.
            what: Names the call in messages.
            discard: See `submit`.

        Raises:
            SourceUnavailable: The limit has passed, or an earlier call that passed its limit has not returned yet.
            ResourceExhausted: As for `submit`.
            Exception: That of the function.
        """
        if self._overdue is not None and not self._overdue.has_returned:
            raise SourceUnavailable(f"{what}: an earlier call of the system has not returned yet")
        self._overdue = None
        call = self.submit(run, discard)
        try:
            done, _ = await asyncio.wait([call.future], timeout=limit_s)
        except BaseException:
            self._abandon(call)
            raise
        if not done:
            self._abandon(call)
            self._overdue = call
            raise SourceUnavailable(
                f"{what}: expected an answer of the system within {limit_s:g} s, got none"
            )
        return call.future.result()

    def _abandon(self, call: Call[Any]) -> None:
        discard = call.abandon()
        if call.future.done() and not call.future.cancelled():
            call.future.exception()  # Otherwise asyncio reports an error that was not retrieved.
        if discard is not None:
            self.submit(discard)

    async def aclose(self, last: Callable[[], object], limit_s: float) -> None:
        """Has ``last`` called after everything else, ends the thread and waits for that, at most ``limit_s``. Nothing is called
        where no thread was started.

        A call that blocks is left to the thread, which then calls ``last`` and ends when that call returns.

        Raises:
            asyncio.CancelledError: The caller was cancelled during the wait, which has ended.
        """
        if self._thread is None:
            return  # Nothing was called, so there is nothing to close.
        call = self.submit(last)
        self._calls.put(None)
        try:
            await outlast(call.future, limit_s)
        finally:
            if call.has_returned:
                self._thread.join(JOIN_S_MAX)
            else:
                call.abandon()
            call.future.cancel()


def _serve(calls: queue.SimpleQueue[Call[Any] | None]) -> None:
    """Runs calls until the end is asked for. Holds no reference to the worker."""
    while (call := calls.get()) is not None:
        call.perform()
        del call

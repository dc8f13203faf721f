"""Operations of the event loop itself: finishing work, keeping objects to their loop, cancelling from a signal handler.

Owns the one answer to native cancellation. ``asyncio.Task.cancel`` passes a shielded scope of anyio, and it may come any number of
times: from ``asyncio.timeout``, from a task group of asyncio, from Ctrl-C, from ``asyncio.run`` when its main task has ended. So
what must be finished (closing, reaping, giving back) runs in a task to which no other code has a reference.

Owns the refusal of a call from elsewhere as well: another event loop, a thread without one, a forked child. Such a call waits for
an event in the loop of the object, so it would never return.

Invariants:
1. Work that ``finish`` has begun ends by itself; it is never cancelled.
2. A caller that is cancelled while it waits for that learns of it when the work has ended, and never before.
3. A thread that waits for the loop gets an answer or an error of aionn, also when the loop's tasks are cancelled during the wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from aionn.errors import DeadObject, InvalidArgument, general_failure_of

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

__all__ = [
    "Home",
    "Outcome",
    "begin",
    "caller",
    "canceller",
    "finish",
    "finish_all",
    "in_loop",
    "is_cancelled",
    "outcome_of_call",
    "running_loop",
    "wait_from_thread",
]

_T = TypeVar("_T")


running_loop = asyncio._get_running_loop
"""The event loop that runs the caller; None where none runs. Costs a third of ``asyncio.get_running_loop``."""


def begin(work: Coroutine[Any, Any, object], name: str) -> bool:
    """Begins work in a task of its own, to which no other code has a reference: an event loop alone would not keep the task.

    Args:
        work: It must not raise, and is cancelled by the end of its loop alone.
        name: Names the task.

    Returns:
        Whether it was begun: not where no loop runs, as in a coroutine that the garbage collector closes.
    """
    loop = running_loop()
    if loop is None:
        work.close()
        return False
    task = loop.create_task(work, name=name)
    _begun.add(task)
    task.add_done_callback(_begun.discard)
    return True


_begun: set[asyncio.Task[Any]] = set()


async def finish(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs work in a task of its own and waits for its end, however often the caller is cancelled during the wait.

    Args:
        work: It must end in bounded time by itself.

    Returns:
        The result of the work.

    Raises:
        asyncio.CancelledError: The caller was cancelled during the wait; the work has ended. Its result is lost, and its failure is
        the context of this error.
        GeneralFailure: The work was cancelled from within, as by a driver that cancels its own task: its caller was not.
        Exception: That of the work.
    """
    task = asyncio.get_running_loop().create_task(work, name="aionn-finish")
    # asyncio.run cancels all tasks of asyncio.all_tasks once its main task has ended; a waiter here keeps the loop alive then.
    # The call is private to asyncio. Where it is missing, everything else holds, and the end of asyncio.run reaches the work.
    leave_out: Callable[[asyncio.Task[Any]], None] | None = getattr(asyncio, "_unregister_task", None)
    if leave_out is not None:
        leave_out(task)
    cancelled: asyncio.CancelledError | None = None
    # The shield is for the cancellations of anyio, which would come again in each turn of the loop.
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as e:
                cancelled = e
    try:
        return task.result()
    except asyncio.CancelledError as e:
        raise general_failure_of(e, "work that must be finished") from e
    finally:
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                # The error refers to this frame: what was worked on would wait for the garbage collector.
                del cancelled, task


async def finish_all(works: Iterable[Callable[[], Coroutine[Any, Any, object]]]) -> None:
    """Begins all works, each as ``finish`` does, and waits for the end of all of them. A failing one does not stop the rest.

    Raises:
        BaseException: That of the first of those that failed.
    """
    outcomes = await asyncio.gather(*(finish(work()) for work in works), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


class Outcome(Generic[_T]):
    """The end of a call. A portal that an exception passes ends with all its calls, unless it is an ``Exception``; and it awaits a
    result that can be awaited. Neither is an ``Outcome``.
    """

    __slots__ = ("_error", "_result")

    def __init__(self, result: _T | None, error: BaseException | None) -> None:
        self._result = result
        self._error = error

    def get(self) -> _T:
        """The result. Raises what the call has raised."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
        return self._result  # type: ignore[return-value]


async def outcome_of_call(ask: Callable[[], Awaitable[_T]]) -> Outcome[_T]:
    """Awaits a call, for ``Outcome.get`` in another thread; a cancellation alone is raised here."""
    try:
        return Outcome(await ask(), None)
    except asyncio.CancelledError:
        raise
    except BaseException as e:
        return Outcome(None, e)


def wait_from_thread(portal: BlockingPortal, ask: Callable[[], Awaitable[_T]], ended: str) -> _T:
    """Awaits in the event loop of a portal, for another thread, which is blocked until the end.

    Args:
        portal: Takes the question into its loop.
        ask: The coroutine to await there.
        ended: The error's message if the portal ends before the answer.

    Returns:
        The answer.

    Raises:
        DeadObject: The portal has ended, or its task group was cancelled before the answer was there.
        BaseException: That of the coroutine.
    """
    try:
        # Raised through the portal, an error would be in a reference cycle with the portal's frames, and so would all objects that
        # they refer to.
        answered = portal.call(outcome_of_call, ask)
    except (concurrent.futures.CancelledError, RuntimeError) as e:
        raise DeadObject(ended) from e
    return answered.get()


def is_cancelled() -> bool:
    """Whether the running task was cancelled, by asyncio or by a scope of anyio.

    If not, a ``CancelledError`` that is raised in it is a failure of what it awaits, such as a driver whose own task was cancelled.
    """
    task = asyncio.current_task()
    assert task is not None, "called by a coroutine"
    return task.cancelling() > 0


def canceller() -> Callable[[], object]:
    """A function that cancels the running task, from any thread or from a signal handler."""
    task = asyncio.current_task()
    assert task is not None, "called by a coroutine"
    return caller(task.cancel)


def in_loop() -> Callable[[Callable[[], object]], object]:
    """A function that has what it is given called in the running loop, from any thread or from a signal handler.

    It raises RuntimeError when that loop is closed.
    """
    return asyncio.get_running_loop().call_soon_threadsafe


def caller(call: Callable[[], object]) -> Callable[[], object]:
    """A function that has ``call`` called in the running loop, from any thread or from a signal handler."""
    begin = in_loop()
    return lambda: begin(call)


class Home:
    """The loop that runs where this is made, and its process.

    Attributes:
        loop: That loop.
    """

    __slots__ = ("_pid", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    def check(self, where: str) -> None:
        """Refuses a call from elsewhere. Costs less than a tenth of a microsecond where there is nothing to refuse.

        Raises:
            InvalidArgument: Another loop runs here, or none.
        """
        # In a forked child no loop counts as running until it runs one of its own.
        if running_loop() is not self.loop:
            raise InvalidArgument(f"{where}: {self._elsewhere()}")

    @property
    def is_here(self) -> bool:
        """Whether that loop runs the caller."""
        return running_loop() is self.loop

    def _elsewhere(self) -> str:
        if os.getpid() != self._pid:
            return (
                f"expected the event loop in which it was opened, got a child (pid {os.getpid()}) that was forked from its "
                f"process (pid {self._pid}): what it needs must be opened there"
            )
        if running_loop() is None:
            return "expected the event loop in which it was opened, got none: threads use aionn.blocking"
        return (
            "called from another event loop than the one in which it was opened; threads use aionn.blocking"
        )

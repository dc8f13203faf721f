"""The task in which a runtime's executions and connections live.

A task group of anyio must be left by the task that entered it. A runtime may well be opened by one task and closed by another: each
async fixture of pytest-asyncio does that. So the group lives in a task of its own, which needs raw asyncio: anyio knows no task
without a group.

Invariants:
1. ``aclose`` returns when every task has ended, however often the one who calls it is cancelled.
2. Every closing that ``close_soon`` got before the end of ``aclose`` runs to its end.
3. A task of the group that fails ends all tasks: that is a bug of aionn, and ``aclose`` raises it. So no task of the group runs
   code of the application that could raise, or that has scopes of its own: ``start_reading`` is for that.
4. ``aclose`` waits for a source of the application, but not without a limit.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from aionn.errors import InvalidArgument, MissedDeadline
from aionn.hal import ExecutionResult, Launch
from aionn.platform.kernel_timer import SharedTimer, TimedCall, goes_by_kernel
from aionn.platform.loops import Home, finish, running_loop
from aionn.platform.process_bound import InThisProcess
from aionn.realtime import PageLocks
from fences import FenceStatus, SyncFence
from fences.waiting import separate_at_fork

__all__ = ["Background", "Cancelled", "InThisProcess", "Task", "Waiter", "failure_of", "is_running"]

Task = asyncio.Task[None]
Cancelled = asyncio.CancelledError

SOURCE_END_S_MAX = 1.0
"""Time that a source has for its end before it is cancelled (once more)."""

SOURCE_CANCEL_S = 0.05
"""Time between further cancellations of a source that does not end."""

SOURCE_CANCELS_MAX = 20
"""Number of those; then it is left to itself."""


def failure_of(task: Task) -> BaseException | None:
    """The error that ended a task, or its cancellation; None where it ended by itself."""
    return Cancelled() if task.cancelled() else task.exception()


def is_running(task: Task) -> bool:
    """Whether a task is the running one."""
    return asyncio.current_task() is task


class Waiter:
    """An event that one task awaits until another wakes it: an ``anyio.Event`` costs three times as much.

    Attributes:
        future: The future that it awaits.
    """

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not ``create_future``, which is a call of Python more: a stream has three waits for each frame.
        self.future: asyncio.Future[None] = asyncio.Future(loop=loop)

    def wake(self) -> None:
        """Wakes it. Idempotent; nothing happens where it was cancelled."""
        if not self.future.done():
            self.future.set_result(None)


class Background:
    """A task group in a task of its own.

    Attributes:
        tasks: Where to start tasks; valid from ``start`` to ``aclose``.
        home: The loop in which all of it runs; valid from ``start`` on.
        is_open: Whether its runtime is open, and is not being closed; the runtime sets it.
        locks: Keeps the memory of bursts in memory; None if real time is off. The runtime sets it.
        starting_count: Number of executions whose tasks have not begun. An execution in its caller's task waits for a turn of the
            loop if there are any, since they were asked for before.
    """

    def __init__(self) -> None:
        self.tasks: anyio.abc.TaskGroup
        self.home: Home
        self.is_open = False
        self.locks: PageLocks | None = None
        self.starting_count = 0
        self._loop: asyncio.AbstractEventLoop
        self._stop = anyio.Event()
        self._host: asyncio.Task[None] | None = None
        self._executions: set[asyncio.Task[None]] = set()
        # The tasks that read sources; those that have to end have a timer.
        self._readers: dict[asyncio.Task[None], asyncio.TimerHandle | None] = {}
        # The closings that have not begun: one for each object dropped in this turn of the loop. A bound would lose some of them.
        self._dropped: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._closings: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self._timer: SharedTimer | None = None
        self._failures: list[BaseException] = []

    @staticmethod
    def check_loop() -> None:
        """Refuses a caller that no event loop of asyncio runs.

        Raises:
            InvalidArgument: It runs under another framework.
        """
        if running_loop() is None:
            raise InvalidArgument(
                "open: expected a running event loop of asyncio, or of uvloop, and none runs; under trio use aionn.blocking "
                "in a thread (trio.to_thread.run_sync)"
            )

    async def start(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Starts the group.

        Args:
            on_end: Called when the group has ended, also when its loop ends without ``aclose``.
        """
        started = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self.home = Home()
        separate_at_fork(self._loop)
        self._new_timer()
        self._host = asyncio.create_task(self._run(started), name="aionn-runtime")
        self._host.add_done_callback(lambda _: self._stop_timer())
        self._host.add_done_callback(lambda _: on_end())
        # One loop turn. Cancelled in it or not, ``aclose`` ends the host.
        await finish(started.wait())

    async def _run(self, started: anyio.Event) -> None:
        async with anyio.create_task_group() as self.tasks:
            started.set()
            await self._stop.wait()
            self.tasks.cancel_scope.cancel()

    @staticmethod
    def is_this_task() -> Callable[[], bool]:
        """A function by which the running task recognises itself later."""
        task = asyncio.current_task()
        running = None if task is None else weakref.ref(task)
        return lambda: running is not None and running() is asyncio.current_task()

    def start_execution(
        self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]
    ) -> asyncio.Task[None]:
        """Starts one short piece of work in a plain task: a third of the cost of one in the group.

        Args:
            work: The work to do; it raises nothing but cancellation.
            on_end: Called when it has ended, also when it was cancelled before it began.
        """
        task = self._later(work)
        self._executions.add(task)
        task.add_done_callback(on_end)
        task.add_done_callback(self._ended)
        return task

    def start_reading(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a plain task that reads a source of the application. Its errors end nothing else."""
        task = self._later(work)
        self._readers[task] = None
        task.add_done_callback(self._reader_ended)
        return task

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that begins in the loop's next turn, also where the loop has ``asyncio.eager_task_factory``."""
        if self._loop.get_task_factory() is None:
            return self._loop.create_task(work)
        return asyncio.Task(work, loop=self._loop)

    def limit_reading(self, task: asyncio.Task[None]) -> None:
        """Has a task that reads a source end: it is cancelled at the end of its time, and again until it has ended. Idempotent."""
        if task in self._readers and self._readers[task] is None:
            self._cancel_reader_in(SOURCE_END_S_MAX, task, SOURCE_CANCELS_MAX)

    def _cancel_reader_in(self, seconds: float, task: asyncio.Task[None], count: int) -> None:
        self._readers[task] = self._loop.call_later(seconds, self._cancel_reader, task, count)

    def _cancel_reader(self, task: asyncio.Task[None], count: int) -> None:
        if task.done():
            return
        if count:
            task.cancel()
            self._cancel_reader_in(SOURCE_CANCEL_S, task, count - 1)
        else:
            error = TimeoutError("it was cancelled, and continues")
            self.report("aionn: the source of a stream does not end, and is left to itself", error)

    def _reader_ended(self, task: asyncio.Task[None]) -> None:
        timer = self._readers.pop(task)
        if timer is not None:
            timer.cancel()
        if not task.cancelled():
            task.exception()  # Only what ends the program is raised there, and the loop has raised it.

    async def _end_readers(self) -> None:
        for task, timer in tuple(self._readers.items()):
            if timer is None:
                task.cancel()
                self.limit_reading(task)
        if self._readers:
            limit_s = SOURCE_END_S_MAX + (SOURCE_CANCELS_MAX + 1) * SOURCE_CANCEL_S
            await asyncio.wait(self._readers, timeout=limit_s)

    def close_soon(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Awaits ``close`` in a task that ``aclose`` does not cancel. May be called in any thread. No effect after ``aclose``.

        Args:
            close: It must end in bounded time by itself, and raises nothing.
        """
        if not self._has_ended:
            self._dropped.append(close)
            self.call_soon(self._start_closings)

    async def close_dropped(self) -> None:
        """Waits for the closings that were asked for so far."""
        self._start_closings()
        while self._closings:
            await asyncio.wait(self._closings)

    def _start_closings(self) -> None:
        while self._dropped:
            closing = self.start_execution(self._dropped.popleft()(), self._closings.discard)
            self._closings.add(closing)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._executions.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._failures.append(failure)

    def at(self, time_ns: int, call: Callable[[], object]) -> TimedCall | asyncio.TimerHandle:
        """Calls at a time on the loop's clock; ``cancel`` of the result takes that back."""
        timer = self._timer
        if timer is None:
            timer = self._new_timer()
            if timer is None:
                return self._loop.call_at(time_ns / 1e9, call)
        return timer.at(time_ns, call)

    def _new_timer(self) -> SharedTimer | None:
        """Begins to watch the one timer of all deadlines; None where timers of the loop must do."""
        if self._has_ended or not goes_by_kernel(self._loop):
            return None
        try:
            self._timer = SharedTimer(self._loop)
        except OSError:
            pass  # No descriptor is left, or the loop has no room to watch one.
        return self._timer

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.close()

    def waiter(self) -> Waiter:
        """For the running task to await."""
        return Waiter(self._loop)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Calls in the loop's next turn, from whatever thread; never, where the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass

    def in_next_turn(self, call: Callable[[], object]) -> None:
        """As ``call_soon``, from the loop's thread: a third of the cost, since nothing wakes the loop."""
        self._loop.call_soon(call)

    def report(self, message: str, error: BaseException) -> None:
        """Reports a failure that no caller gets, by the loop's exception handler, which logs it as a rule. From any thread; nothing
        happens where the loop is closed.
        """
        if not self._loop.is_closed():
            self._loop.call_exception_handler({"message": message, "exception": error})

    async def in_time(
        self, deadline_ns: int | None, awaited: Launch | SyncFence, message: Callable[[], str]
    ) -> Any:
        """Awaits a launch or a fence, but not beyond a deadline.

        A timer cancels the task, and that cancellation is taken back, as ``asyncio.timeout_at`` does at a higher cost.

        Args:
            deadline_ns: Absolute; None means no deadline.
            awaited: Can be awaited again.
            message: Names what the deadline has ended.

        Raises:
            MissedDeadline: The deadline passed before.
            Exception: As ``awaited``.
        """
        if deadline_ns is None:
            return await awaited
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        cancelled_before = task.cancelling()
        has_passed = False

        def expire() -> None:
            nonlocal has_passed
            has_passed = True
            task.cancel()

        # Loop timers are floats and may fire a few ns early; the deadline then counts as passed.
        timer = self.at(deadline_ns, expire)
        try:
            return await awaited
        except asyncio.CancelledError:
            if not has_passed:
                raise
            if task.uncancel() > cancelled_before:
                # Another cancellation came as well. Two that come in one turn of the loop raise one error, with the message of the
                # first; a scope of anyio knows its own by the message, and raises it again in the next turn.
                await anyio.lowlevel.checkpoint_if_cancelled()
                raise
        finally:
            timer.cancel()
        if awaited.status != FenceStatus.PENDING if isinstance(awaited, SyncFence) else awaited.is_done:
            return await awaited  # It ended in the same turn of the loop.
        raise MissedDeadline(message(), transient=True)

    async def in_time_directly(
        self,
        deadline_ns: int,
        execution: Coroutine[Any, Any, ExecutionResult],
        in_flight: Callable[[], Launch | None],
        message: Callable[[], str],
    ) -> ExecutionResult:
        """As ``in_time``, for ``execute_synchronously`` of a burst, which asks its device to stop.

        Args:
            deadline_ns: Absolute.
            execution: The call of the burst.
            in_flight: That of the burst.
            message: See ``in_time``.
        """
        task = asyncio.current_task(self._loop)
        assert task is not None, "coroutines run in tasks"
        cancelled_before = task.cancelling()
        late: Launch | None = None

        def expire() -> None:
            nonlocal late
            late = in_flight()
            if late is not None:  # Otherwise it has ended in this turn of the loop.
                task.cancel()

        timer = self.at(deadline_ns, expire)
        try:
            return await execution
        except asyncio.CancelledError:
            if late is None:
                raise
            if task.uncancel() > cancelled_before:
                await anyio.lowlevel.checkpoint_if_cancelled()  # See ``in_time``.
                raise
        finally:
            timer.cancel()
        if late.is_done and not late.is_cancelled:
            return late.outcome()  # It ended in the same turn of the loop.
        raise MissedDeadline(message(), transient=True)

    def run_in_loop(self, call: Callable[[], object]) -> None:
        """Calls in the loop's thread: immediately if this is it, otherwise in the loop's next turn. Never, where it is closed."""
        if running_loop() is self._loop:
            call()
        else:
            self.call_soon(call)

    async def aclose(self) -> None:
        """Cancels what runs and waits for its end. Idempotent.

        Raises:
            BaseExceptionGroup: A task had failed.
        """
        if self._host is None:
            return
        host, self._host = self._host, None
        self._stop.set()
        await finish(self._end(host))

    async def _end(self, host: asyncio.Task[None]) -> None:
        self._start_closings()
        await self._end_readers()
        while self._executions:
            for task in self._executions - self._closings:
                task.cancel()
            await asyncio.wait(self._executions)
            self._start_closings()
        await asyncio.wait([host])
        await self.close_dropped()  # Asked for while the host ended.
        self._has_ended = True
        self._stop_timer()
        if (
            not host.cancelled()
        ):  # asyncio.run does that when its main task ends without having closed the runtime.
            host.result()
        if self._failures:
            raise BaseExceptionGroup("executions failed: a fault of aionn's own", self._failures)

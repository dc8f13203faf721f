"""Base classes for drivers that work on the event loop: write three methods, get the whole driver contract.

The counterpart of ``blocking``, for devices that wait in the loop: simulated ones, and engines with asynchronous interfaces.
Owns deadlines, timing, asynchronous and fenced execution, and a burst without queues; what it checks, saves and allocates is
``checked``'s. All times come from the loop, so such a device works in real and in virtual time alike.

Invariants:
1. ``run`` holds one of the device's slots until it returns, even if its caller was cancelled.
2. An execution whose deadline has passed before its turn is never started (MISSED_DEADLINE_PERSISTENT).
3. Callbacks and fences are finished exactly once, whatever ``run`` does; closing the device finishes all of them.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy.typing as npt

from aionn.drivers.kit import caching
from aionn.drivers.kit.arguments import Arguments, OutputArea, check_times
from aionn.drivers.kit.caching import CacheContents
from aionn.drivers.kit.checked import CheckedDevice, CheckedPreparedModel
from aionn.drivers.kit.prepared import DirectBurst
from aionn.drivers.kit.turns import Slots, Turn, left_s, loop_now_ns
from aionn.errors import (
    DeviceUnavailable,
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    status_of,
)
from aionn.hal import (
    NO_TIMING,
    CacheFiles,
    DeviceInfo,
    ExecutionCallback,
    ExecutionPreference,
    ExecutionResult,
    FencedExecution,
    FencedTiming,
    Launch,
    LaunchBase,
    Model,
    OutputShape,
    PreparedModel,
    Priority,
    Request,
    ResendingExecution,
    Timing,
    outcome_of,
)
from aionn.platform.loops import finish
from fences import FenceStatus, SyncFence, merge

__all__ = ["AsyncDevice", "AsyncPreparedModel"]

Array = npt.NDArray[Any]
_T = TypeVar("_T")


class AsyncPreparedModel(CheckedPreparedModel):
    """A model made ready by an asynchronous driver. Implement ``run``; override ``release`` to free what it holds.

    Attributes:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
    """

    device: AsyncDevice
    takes_priority = True

    @abc.abstractmethod
    async def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], turn: Turn
    ) -> Sequence[OutputShape]:
        """Computes the outputs.

        Args:
            inputs: One array per input, a view of shared memory that the client can still change: read each value once, and
                believe nothing that was checked before. Rank 0 for scalars, None for an input that is left out.
            outputs: Where the results go. On failure nothing may be assumed about their content.
            turn: Deadline, loop time-out, cancellation and preemption: between two steps call ``turn.check()`` and then
                ``await turn.give_way()`` as often as the device can stop.

        Returns:
            One shape per output. An output that does not fit is reported as insufficient, not raised.

        It is cancelled only when the device is closed.
        """

    def check_usable(self) -> None:
        """See the base class. Raises also ``DeviceUnavailable``: the device is closed."""
        super().check_usable()
        self.device.check_open()

    def _turn(
        self, deadline_ns: int | None, loop_timeout_ns: int | None, priority: Priority | None = None
    ) -> Turn:
        return Turn(
            self.device.slots,
            priority=self.priority if priority is None else priority,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            owner=self.owner,
        )

    async def _run_in_turn(self, arguments: Arguments, turn: Turn, measure: bool) -> ExecutionResult:
        # Device memories among the outputs are initialised afterwards, or uninitialised when this raises.
        try:
            result = await self._run(arguments, turn, measure)
            arguments.settle(result.output_shapes, is_sufficient=result.output_sufficient_size)
        except BaseException:
            arguments.fail()
            raise
        return result

    async def _run(self, arguments: Arguments, turn: Turn, measure: bool) -> ExecutionResult:
        await self.device.slots.take(turn)
        try:
            started_ns = turn.now()
            self.begin_run()
            try:
                shapes = tuple(await self.run(arguments.inputs(), arguments.outputs, turn))
            finally:
                self.end_run()
            took_ns = turn.now() - started_ns
        finally:
            if turn.slot is not None:
                self.device.slots.give_back(turn)
        sufficient = all(shape.is_sufficient for shape in shapes)
        return ExecutionResult(
            sufficient, shapes, Timing(took_ns, took_ns) if measure and sufficient else NO_TIMING
        )

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> Launch:
        """See ``PreparedModel``."""
        check_times(deadline_ns, loop_timeout_ns)
        arguments = self.bind(request)
        turn = self._turn(deadline_ns, loop_timeout_ns, priority)
        launch = _TurnLaunch(turn)
        self.device.start(self._run_in_turn(arguments, turn, measure), launch.finish)
        return launch

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> ExecutionResult:
        """See ``PreparedModel``. Cancellation asks the device to stop; it keeps its slot until it has."""
        return await outcome_of(
            self.launch(
                request,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
                priority=priority,
            )
        )

    async def execute(
        self,
        request: Request,
        callback: ExecutionCallback,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> ErrorStatus:
        """See ``PreparedModel``. The callback comes from the event loop, or from here when the launch fails."""

        def tell(outcome: ExecutionResult | Error) -> None:
            if isinstance(outcome, Error):
                callback(status_of(outcome), (), NO_TIMING)
                return
            enough = outcome.output_sufficient_size
            status = ErrorStatus.NONE if enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
            callback(status, outcome.output_shapes, outcome.timing)

        try:
            check_times(deadline_ns, loop_timeout_ns)
            arguments = self.bind(request)
        except Error as e:
            tell(e)
            return status_of(e)
        turn = self._turn(deadline_ns, loop_timeout_ns, priority)
        self.device.start(self._run_in_turn(arguments, turn, measure), tell)
        return ErrorStatus.NONE

    async def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[SyncFence],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        duration_ns: int | None = None,
    ) -> FencedExecution:
        """See ``PreparedModel``."""
        arguments = self.bind_fenced(
            request,
            wait_for,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            duration_ns=duration_ns,
            now_ns=loop_now_ns(),
        )
        launch = _Launch(self, arguments, measure, deadline_ns, loop_timeout_ns, duration_ns)
        self.device.start(launch.run(wait_for), launch.finish)
        return FencedExecution(launch.fence, launch.get_execution_info)

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> DirectBurst:
        """A burst without queues: the device is in this process. Raises ``InvalidArgument``: the prepared model is closed."""
        self.check_usable()
        return DirectBurst(self)

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> ResendingExecution:
        """See ``PreparedModel``."""
        check_times(None, loop_timeout_ns)
        self.bind(request).give_back()
        return ResendingExecution(self, request, measure, loop_timeout_ns)


class _TurnLaunch(LaunchBase):
    """An execution in a task of the device, which has a turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def _ask_to_stop(self) -> None:
        self._turn.cancel()


class _Launch:
    """One fenced execution: waits for fences, runs, finishes one fence."""

    def __init__(
        self,
        prepared: AsyncPreparedModel,
        arguments: Arguments,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        duration_ns: int | None,
    ) -> None:
        self._prepared = prepared
        self._arguments = arguments
        self._measure = measure
        self._limit_ns = deadline_ns
        self._loop_timeout_ns = loop_timeout_ns
        self._duration_ns = duration_ns
        self._launched_ns = loop_now_ns()
        self._outcome = (ErrorStatus.GENERAL_FAILURE, FencedTiming())
        self.fence = SyncFence("fenced execution")

    async def run(self, wait_for: Sequence[SyncFence]) -> FencedTiming:
        device, what = self._prepared.device, "its deadline passed"
        if wait_for:
            await self._before_limit(_wait_for(wait_for), what)
        ready_ns = loop_now_ns()
        if self._duration_ns is not None:
            allowance_ns = ready_ns + self._duration_ns
            if self._limit_ns is None or allowance_ns < self._limit_ns:
                self._limit_ns, what = allowance_ns, "its allowance after its fences passed"
        turn = self._prepared._turn(self._limit_ns, self._loop_timeout_ns)
        work = device.work(turn, lambda: self._prepared._run_in_turn(self._arguments, turn, self._measure))
        result = await self._before_limit(work, what)
        if not result.output_sufficient_size:
            raise GeneralFailure("fenced execution: an output does not fit its buffer")
        return self._timing(result, ready_ns)

    def finish(self, outcome: FencedTiming | Error) -> None:
        """Called once, with what ``run`` returned or raised."""
        # The information is set first: code that sees the finished fence may query it.
        if isinstance(outcome, Error):
            self._outcome = (status_of(outcome), FencedTiming())
            self._arguments.fail()  # Also if it is cancelled, and runs to its end without this task.
            self.fence.try_fail(outcome)
        else:
            self._outcome = (ErrorStatus.NONE, outcome)
            self.fence.try_signal()

    async def _before_limit(self, awaitable: Awaitable[_T], what: str) -> _T:
        with anyio.move_on_after(left_s(self._limit_ns)):
            return await awaitable
        raise MissedDeadline(f"fenced execution: {what}", transient=True)

    def _timing(self, result: ExecutionResult, ready_ns: int) -> FencedTiming:
        if not self._measure:
            return FencedTiming()
        end_ns, on_device_ns = loop_now_ns(), result.timing.time_on_device_ns
        return FencedTiming(
            launched=Timing(on_device_ns, end_ns - self._launched_ns),
            fenced=Timing(on_device_ns, end_ns - ready_ns),
        )

    async def get_execution_info(self) -> tuple[ErrorStatus, FencedTiming]:
        """Status and timings; GENERAL_FAILURE before completion."""
        if self.fence.status == FenceStatus.PENDING:
            return ErrorStatus.GENERAL_FAILURE, FencedTiming()
        return self._outcome


async def _wait_for(fences: Sequence[SyncFence]) -> None:
    try:
        await merge([*fences])
    except Exception as e:
        failure = GeneralFailure(f"fenced execution: a fence that it waits for has failed: {e}")
        raise failure from e


class AsyncDevice(CheckedDevice):
    """A device on the event loop. Set ``info``; implement ``supports`` and ``prepare``. To be used on one loop.

    Args:
        info: What never changes for a build of the driver.
        memory_bytes_max: What all device memories together may take, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        memories: The device memories; None for a device without.
        slots: The device's slots.
    """

    def __init__(self, info: DeviceInfo, *, memory_bytes_max: int | None = None) -> None:
        super().__init__(info, memory_bytes_max=memory_bytes_max)
        self.slots = Slots(info.slots, info.name)
        self._tasks: dict[asyncio.Task[Any], None] = {}  # In the order of their starts.

    @abc.abstractmethod
    async def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> AsyncPreparedModel:
        """Makes a validated and supported model ready."""

    def check_open(self) -> None:
        """Refuses a call that comes too late.

        Raises:
            DeviceUnavailable: The device is closed.
        """
        if self._closed:
            raise DeviceUnavailable(f"{self.info.name}: the device is closed")

    def start(self, call: Coroutine[Any, Any, _T], finish: Callable[[_T | Error], None]) -> None:
        """Runs a coroutine that outlives its caller, until the device is closed.

        Args:
            call: What to run.
            finish: Called exactly once with what it returned or raised, also when it never got to begin.
        """

        def ended(task: asyncio.Task[_T]) -> None:
            del self._tasks[task]
            finish(self._outcome_of(task))

        # A task group would have to be left by the task that entered it, and a device has no such task.
        task = asyncio.create_task(call, name=f"aionn-{self.info.name}")
        self._tasks[task] = None
        task.add_done_callback(ended)

    def _outcome_of(self, task: asyncio.Task[_T]) -> _T | Error:
        if task.cancelled():
            return DeviceUnavailable(f"{self.info.name}: the device was closed")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, Error):
            return error
        failure = GeneralFailure(f"{self.info.name}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    async def work(self, turn: Turn, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Runs ``call()`` to its end whether or not the caller waits for it; returns what it returns.

        Raises:
            Error: As ``call``; any other exception is the driver's bug and a GENERAL_FAILURE.
            DeviceUnavailable: The device was closed during the call.
        """
        outcome: list[_T | Error] = []
        done = SyncFence("execution")

        def finish(result: _T | Error) -> None:
            outcome.append(result)
            done.signal()

        self.start(call(), finish)
        try:
            await done
        except BaseException:
            turn.cancel()
            raise
        (result,) = outcome
        if isinstance(result, Error):
            raise result
        return result

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        self.check_open()
        # A large model takes milliseconds to check: not on the event loop.
        return await anyio.to_thread.run_sync(self._checked_support, model)

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> AsyncPreparedModel:
        """See ``Device``. The compilation is saved if the driver keeps something of it: see ``AsyncPreparedModel.cached``."""
        self.check_open()
        preference, priority = self._check_terms(preference, priority, deadline_ns, "prepare_model")
        held = self._held(cache)
        prepared = await self._checked_prepare(model, preference, priority, deadline_ns)
        if held is not None:
            await anyio.to_thread.run_sync(self._save, held, prepared)
        return prepared

    async def _checked_prepare(
        self, model: Model, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> AsyncPreparedModel:
        self._check_time_left(deadline_ns, loop_now_ns(), "prepare_model")
        self._check_supported(model, await self.supported_operations(model))
        prepared = await self.prepare(
            model, preference=preference, priority=priority, deadline_ns=deadline_ns
        )
        if deadline_ns is not None and loop_now_ns() >= deadline_ns:
            await prepared.aclose()
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)
        return prepared

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """See ``Device``."""
        where = "prepare_model_from_cache"
        self.check_open()
        _, priority = self._check_terms(ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns, where)
        held = self._held_to_load(cache)
        self._check_time_left(deadline_ns, loop_now_ns(), where)
        contents = await anyio.to_thread.run_sync(self._load, held)
        try:
            return await self.restore(contents, priority=priority, deadline_ns=deadline_ns)
        except InvalidArgument as e:
            raise self._not_what_was_saved(e) from e

    async def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> AsyncPreparedModel:
        """Makes ready what ``AsyncPreparedModel.cached`` gave, unchanged. By default that is the model, prepared again.

        A driver that keeps something else overrides both.
        """
        model = await anyio.to_thread.run_sync(caching.decode_model, contents)
        return await self._checked_prepare(
            model, ExecutionPreference.FAST_SINGLE_ANSWER, priority, deadline_ns
        )

    async def aclose(self) -> None:
        """Ends what runs and what waits (DEVICE_UNAVAILABLE). Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await finish(_ended(tasks))


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)

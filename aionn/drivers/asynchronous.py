"""Base classes for drivers that work on the event loop: write three methods, get the whole driver contract.

The counterpart of ``blocking``, for devices whose waiting is the loop's: simulated ones, and engines with asynchronous interfaces.
Owns argument checks, deadlines, timing, asynchronous and fenced execution, and a burst without queues. All times are the loop's, so
a device made of this lives in real and in virtual time alike.

Invariants:
1. ``run`` holds one of the device's slots until it returns; who gave up meanwhile does not matter to that.
2. An execution whose deadline has passed before its turn is never started (MISSED_DEADLINE_PERSISTENT).
3. Callbacks and fences are finished exactly once, whatever ``run`` does; closing the device finishes all of them.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import numpy.typing as npt

from aionn.drivers.arguments import Arguments, OutputArea, bind, check_fences, check_times
from aionn.drivers.blocking import DirectBurst
from aionn.drivers.turns import Slots, Turn, left_s, loop_now_ns
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
    CACHE_TOKEN_BYTES,
    NO_TIMING,
    Buffer,
    BufferDesc,
    BufferRole,
    CacheFiles,
    DeviceInfo,
    DeviceStatus,
    ExecutionCallback,
    ExecutionPreference,
    ExecutionResult,
    FencedExecution,
    FencedTiming,
    Model,
    OutputShape,
    PreparedModel,
    Priority,
    Request,
    ResendingExecution,
    Timing,
    check_deadline_ns,
    check_duration_ns,
    operation_type_name,
)
from aionn.validation import validate_model
from fences import FenceStatus, SyncFence, merge

__all__ = ["AsyncDevice", "AsyncPreparedModel"]

Array = npt.NDArray[Any]
_T = TypeVar("_T")


class AsyncPreparedModel(abc.ABC):
    """A model made ready by an asynchronous driver. Implement ``run``; override ``release`` to free what it holds.

    Attributes:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
        owner: Whose it is, where several clients share the device; equals take turns.
        takes_priority: Executions may say what class they are of, other than that of the prepared model.
    """

    takes_priority = True

    def __init__(self, device: AsyncDevice, model: Model, priority: Priority) -> None:
        self.device = device
        self.model = model
        self.priority = priority
        self.owner: Hashable = None
        self._closed = False

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

    def release(self) -> None:  # noqa: B027 - an optional hook, not a forgotten abstract method
        """Frees what the prepared model holds. Called once."""

    def bind(self, request: Request, *, allow_unspecified_outputs: bool = True) -> Arguments:
        """Checks a request against the model and maps it. Raises as ``aionn.drivers.arguments.bind``."""
        self._check_usable()
        return bind(self.model, request, allow_unspecified_outputs=allow_unspecified_outputs)

    def _check_usable(self) -> None:
        if self._closed:
            raise InvalidArgument("execution: the prepared model is closed")
        self.device.check_open()

    def _turn(
        self, deadline_ns: int | None, loop_timeout_ns: int | None, priority: Priority | None = None
    ) -> Turn:
        return Turn(
            self.device.slots,
            priority=self.priority if priority is None else priority,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
        )

    async def _run_in_turn(self, arguments: Arguments, turn: Turn, measure: bool) -> ExecutionResult:
        await self.device.slots.take(turn)
        try:
            started_ns = turn.now()
            shapes = tuple(await self.run(arguments.inputs(), arguments.outputs, turn))
            took_ns = turn.now() - started_ns
        finally:
            if turn.slot is not None:
                self.device.slots.give_back(turn)
        sufficient = all(shape.is_sufficient for shape in shapes)
        return ExecutionResult(
            sufficient, shapes, Timing(took_ns, took_ns) if measure and sufficient else NO_TIMING
        )

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
        check_times(deadline_ns, loop_timeout_ns)
        arguments = self.bind(request)
        turn = self._turn(deadline_ns, loop_timeout_ns, priority)
        return await self.device.work(turn, lambda: self._run_in_turn(arguments, turn, measure))

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
        check_times(deadline_ns, loop_timeout_ns)
        check_duration_ns(duration_ns, where="fenced execution")
        arguments = self.bind(request, allow_unspecified_outputs=False)
        check_fences(wait_for)
        if deadline_ns is not None and loop_now_ns() >= deadline_ns:
            raise MissedDeadline(
                "fenced execution: the deadline had passed before the start", transient=False
            )
        launch = _Launch(self, arguments, measure, deadline_ns, loop_timeout_ns, duration_ns)
        self.device.start(launch.run(wait_for), launch.finish)
        return FencedExecution(launch.fence, launch.get_execution_info)

    async def configure_execution_burst(self) -> DirectBurst:
        """A burst without queues: the device is in this process. Raises ``InvalidArgument``: the prepared model is closed."""
        self._check_usable()
        return DirectBurst(self)

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> ResendingExecution:
        """See ``PreparedModel``."""
        check_times(None, loop_timeout_ns)
        self.bind(request)
        return ResendingExecution(self, request, measure, loop_timeout_ns)

    async def aclose(self) -> None:
        """Refuses further executions and frees the prepared model. Idempotent."""
        if not self._closed:
            self._closed = True
            self.release()


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
        # Information first: whoever sees the fence finished may ask for it.
        if isinstance(outcome, Error):
            self._outcome = (status_of(outcome), FencedTiming())
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


class AsyncDevice(abc.ABC):
    """A device on the event loop. Set ``info``; implement ``supports`` and ``prepare``. To be used on one loop.

    Attributes:
        info: What never changes for a build of the driver.
        slots: The device's slots.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.slots = Slots(info.slots, info.name)
        self._tasks: dict[asyncio.Task[Any], None] = {}  # In the order of their starts.
        self._closed = False

    @abc.abstractmethod
    def supports(self, model: Model) -> Sequence[bool]:
        """Which operations of the main subgraph the device can run. The model has been validated. If unsure: False."""

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
            DeviceUnavailable: The device was closed meanwhile.
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

    async def status(self) -> DeviceStatus:
        """AVAILABLE; a driver whose hardware can go away overrides this."""
        return DeviceStatus.AVAILABLE

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        self.check_open()
        # A large model takes milliseconds to check: not on the event loop.
        return await anyio.to_thread.run_sync(self._checked_support, model)

    def _checked_support(self, model: Model) -> tuple[bool, ...]:
        validate_model(model)
        answer = tuple(bool(supported) for supported in self.supports(model))
        assert len(answer) == len(model.main.operations), "one answer per operation of the main subgraph"
        return answer

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> AsyncPreparedModel:
        """See ``Device``. Cache arguments are ignored unless a driver overrides this."""
        self.check_open()
        try:
            preference, priority = ExecutionPreference(preference), Priority(priority)
        except ValueError as e:
            raise InvalidArgument(f"prepare_model: {e}") from e
        check_deadline_ns(deadline_ns, where="prepare_model")
        if deadline_ns is not None and loop_now_ns() >= deadline_ns:
            raise MissedDeadline("prepare_model: the deadline had passed before the start", transient=False)
        answer = await self.supported_operations(model)
        operations = zip(model.main.operations, answer, strict=True)
        refused = sorted({operation_type_name(o.type) for o, is_supported in operations if not is_supported})
        if refused:
            raise InvalidArgument(f"prepare_model: {self.info.name} does not support {', '.join(refused)}")
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
        """Refuses: a device whose ``info.cache_files`` are (0, 0) does not cache. A driver that does overrides this."""
        check_deadline_ns(deadline_ns, where="prepare_model_from_cache")
        if len(cache.token) != CACHE_TOKEN_BYTES:
            raise InvalidArgument(
                f"prepare_model_from_cache: expected a token of {CACHE_TOKEN_BYTES} bytes, got {len(cache.token)}"
            )
        raise GeneralFailure(f"prepare_model_from_cache: {self.info.name} does not cache compilations")

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """Refuses: a driver without memories of its own answers so. One that has them overrides this."""
        if not input_roles and not output_roles:
            raise InvalidArgument("allocate: expected at least one role, got none")
        raise GeneralFailure(f"allocate: {self.info.name} has no device memories")

    async def aclose(self) -> None:
        """Ends what runs and what waits (DEVICE_UNAVAILABLE). Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

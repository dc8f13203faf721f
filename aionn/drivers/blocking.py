"""Base classes for drivers around blocking code: write three short methods, get the whole driver contract.

Owns argument checks, slots and threads, deadlines before the start, timing, asynchronous and fenced execution, device memories,
and a burst without queues. What a model computes is the subclass's.

Invariants:
1. ``run`` is called with checked arguments, on a thread that holds one of the device's slots, never on an event loop's.
2. An execution whose deadline has passed before its turn is never started (MISSED_DEADLINE_PERSISTENT).
3. Callbacks and fences are finished exactly once, whatever ``run`` does.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import msgspec
import numpy.typing as npt

from aionn.drivers.arguments import Arguments, OutputArea, bind
from aionn.drivers.fenced import Alarm, FencedLaunch
from aionn.drivers.gate import SlotGate
from aionn.drivers.memories import MemoryTable, Role
from aionn.errors import Error, ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline, status_of
from aionn.hal import (
    CACHE_TOKEN_BYTES,
    NO_TIMING,
    Buffer,
    BufferDesc,
    BufferRole,
    BufferToken,
    CacheFiles,
    DeviceInfo,
    DeviceStatus,
    ExecutionCallback,
    ExecutionPreference,
    ExecutionResult,
    FencedExecution,
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
from aionn.hal.real_work import begin_real_work, real_work
from aionn.interpreter import RunControl
from aionn.validation import check_buffer_roles, validate_model
from fences import FenceStatus, SyncFence
from fences import now_ns as fences_now_ns

__all__ = ["BlockingDevice", "BlockingPreparedModel"]

Array = npt.NDArray[Any]
_T = TypeVar("_T")
_identities = itertools.count(1)


class BlockingPreparedModel(abc.ABC):
    """A model made ready by a blocking driver. Implement ``run``; override ``release`` to free what it holds.

    Attributes:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
        identity: A number that no other prepared model of this process ever has.
    """

    def __init__(self, device: BlockingDevice, model: Model, priority: Priority) -> None:
        self.device = device
        self.model = model
        self.priority = priority
        self.identity = next(_identities)
        self._closed = False
        self._abandoned = False

    @abc.abstractmethod
    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        """Computes the outputs.

        Args:
            inputs: One array per input, a view of shared memory that the client can still change: read each value once, and
                believe nothing that was checked before. Rank 0 for scalars, None for an input that is left out.
            outputs: Where the results go. On failure nothing may be assumed about their content.
            control: Deadline, loop time-out and cancellation; call ``control.check()`` as often as the device can stop.

        Returns:
            One shape per output. An output that does not fit is reported as insufficient, not raised.
        """

    def release(self) -> None:  # noqa: B027 - an optional hook, not a forgotten abstract method
        """Frees what the prepared model holds. Called once."""

    def bind(
        self, request: Request, *, allow_unspecified_outputs: bool = True, is_ready: bool = True
    ) -> Arguments:
        """Checks a request against the model and maps it. Arguments and errors as of ``aionn.drivers.arguments.bind``."""
        if self._closed:
            raise InvalidArgument("execution: the prepared model is closed")
        return bind(
            self.model,
            request,
            allow_unspecified_outputs=allow_unspecified_outputs,
            memories=self.device.memories,
            prepared=self.identity,
            is_ready=is_ready,
        )

    def run_bound(
        self,
        arguments: Arguments,
        *,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> ExecutionResult:
        """Runs on the calling thread, which must hold a slot. Raises as ``PreparedModel.execute_synchronously`` does.

        Device memories among the outputs are initialised afterwards, or uninitialised when this raises.
        """
        try:
            result = self._run_checked(arguments, measure, deadline_ns, loop_timeout_ns, is_cancelled)
            if not result.output_sufficient_size and arguments.writes_memory:
                raise GeneralFailure("execution: a result does not fit, and one of the outputs is a device memory")
            arguments.succeed(result.output_shapes) if result.output_sufficient_size else arguments.fail()
        except BaseException:
            arguments.fail()
            raise
        return result

    def _run_checked(
        self,
        arguments: Arguments,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> ExecutionResult:
        now = self.device.now
        started_ns = now()
        if deadline_ns is not None and started_ns >= deadline_ns:
            raise MissedDeadline("execution: the deadline had passed before the start", transient=False)

        def is_over() -> bool:
            return self._abandoned or (is_cancelled is not None and is_cancelled())

        control = RunControl(
            deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns, is_cancelled=is_over, now=now
        )
        control.check()  # What was given up while it waited for its turn never starts.
        try:
            shapes = tuple(self.run(arguments.inputs(), arguments.outputs, control))
        except Error:
            raise
        except Exception as e:
            raise GeneralFailure(f"{self.device.info.name}: {type(e).__name__}: {e}") from e
        took_ns = now() - started_ns
        sufficient = all(shape.is_sufficient for shape in shapes)
        return ExecutionResult(
            sufficient, shapes, Timing(took_ns, took_ns) if measure and sufficient else NO_TIMING
        )

    def execute_now(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """Executes on the calling thread when its turn comes; blocks. Raises as ``PreparedModel.execute_synchronously`` does."""
        _check_times(deadline_ns, loop_timeout_ns)
        arguments = self.bind(request)
        with self.device.gate.slot(self.priority, deadline_ns):
            return self.run_bound(
                arguments, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
            )

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """See ``PreparedModel``. Cancellation asks the device to stop; it keeps its slot until it has."""
        _check_times(deadline_ns, loop_timeout_ns)
        arguments = self.bind(request)
        return await _on_gate(
            self.device.gate,
            self.priority,
            deadline_ns,
            lambda is_cancelled: self.run_bound(
                arguments,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
                is_cancelled=is_cancelled,
            ),
        )

    async def execute(
        self,
        request: Request,
        callback: ExecutionCallback,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ErrorStatus:
        """See ``PreparedModel``. The callback comes from one of the device's threads, or from here when the launch fails."""

        end = begin_real_work(f"work on {self.device.gate}")

        def job() -> None:
            try:
                result = self.run_bound(
                    arguments, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
                )
            except Error as e:
                callback(status_of(e), (), NO_TIMING)
            else:
                enough = result.output_sufficient_size
                status = ErrorStatus.NONE if enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
                callback(status, result.output_shapes, result.timing)
            finally:
                end()

        try:
            _check_times(deadline_ns, loop_timeout_ns)
            arguments = self.bind(request)
            self.device.gate.submit(self.priority, deadline_ns, job)
        except Error as e:
            end()
            callback(status_of(e), (), NO_TIMING)
            return status_of(e)
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
        _check_times(deadline_ns, loop_timeout_ns)
        check_duration_ns(duration_ns, where="fenced execution")
        launch = FencedLaunch(
            self,
            request,
            is_ready=all(fence.status != FenceStatus.PENDING for fence in wait_for),
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            duration_ns=duration_ns,
        )
        for index, fence in enumerate(wait_for):
            if fence.status == FenceStatus.FAILED:
                raise InvalidArgument(f"fenced execution: fence {index} to wait for has failed already")
        if deadline_ns is not None and self.device.now() >= deadline_ns:
            raise MissedDeadline(
                "fenced execution: the deadline had passed before the start", transient=False
            )
        launch.begin(wait_for)
        return FencedExecution(launch.fence, launch.get_execution_info)

    async def configure_execution_burst(self) -> DirectBurst:
        """A burst without queues, for a device in this process. A driver process puts queues around ``execute_now``."""
        return DirectBurst(self)

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> ResendingExecution:
        """See ``PreparedModel``."""
        _check_times(None, loop_timeout_ns)
        self.bind(request)
        return ResendingExecution(self, request, measure, loop_timeout_ns)

    def abandon(self) -> None:
        """Nobody wants results any more: what waits never starts, what runs ends where the device can stop."""
        self._abandoned = True

    async def aclose(self) -> None:
        """Refuses further executions and frees the prepared model. Idempotent."""
        if not self._closed:
            self._closed = True
            self.release()


class DirectBurst:
    """A burst of a device in this process: nothing to remember, since pools are mapped already."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared = prepared
        self._busy = False

    async def execute_synchronously(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """See ``Burst``."""
        if len(memory_identifiers) != len(request.pools) or any(i < -1 for i in memory_identifiers):
            raise InvalidArgument(
                f"burst: expected {len(request.pools)} memory identifiers of at least -1, got {list(memory_identifiers)}"
            )
        for pool, identifier in zip(request.pools, memory_identifiers, strict=True):
            if isinstance(pool, BufferToken) and identifier != -1:
                raise InvalidArgument(f"burst: expected identifier -1 for a device memory, got {identifier}")
        if self._busy:
            raise InvalidArgument("burst: an execution is in flight already")
        self._busy = True
        try:
            return await self._prepared.execute_synchronously(
                request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
            )
        finally:
            self._busy = False

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """See ``Burst``."""
        if memory_identifier < -1:
            raise InvalidArgument(
                f"burst: expected a memory identifier of at least -1, got {memory_identifier}"
            )

    async def aclose(self) -> None:
        """Nothing to free."""


class BlockingDevice(abc.ABC):
    """A device around blocking code. Set ``info``; implement ``supports`` and ``prepare``.

    Args:
        info: What never changes for a build of the driver.
        now: The clock that deadlines are compared with.
        memory_bytes_max: What all device memories together may take, in this process's memory; None for a device without.

    Attributes:
        info: See above.
        gate: The device's slots.
        alarm: Fails fences on time.
        now: See above.
        memories: The device memories; None for a device without.
    """

    def __init__(
        self,
        info: DeviceInfo,
        *,
        now: Callable[[], int] = fences_now_ns,
        memory_bytes_max: int | None = None,
    ) -> None:
        self.info = info
        self.gate = SlotGate(info.slots, name=info.name)
        self.alarm = Alarm(now, name=f"aionn-{info.name}-alarm")
        self.now = now
        self.memories = None if memory_bytes_max is None else MemoryTable(memory_bytes_max)
        self._closed = False

    @abc.abstractmethod
    def supports(self, model: Model) -> Sequence[bool]:
        """Which operations of the main subgraph the device can run. The model has been validated. If unsure: False."""

    @abc.abstractmethod
    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        """Makes a validated and supported model ready. Runs on a thread of the device and may take its time."""

    async def status(self) -> DeviceStatus:
        """AVAILABLE; a driver whose hardware can go away overrides this."""
        return DeviceStatus.AVAILABLE

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        return await _on_gate(self.gate, Priority.HIGH, None, lambda _: self._checked_support(model))

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
    ) -> BlockingPreparedModel:
        """See ``Device``. Cache arguments are ignored unless a driver overrides this."""
        try:
            preference, priority = ExecutionPreference(preference), Priority(priority)
        except ValueError as e:
            raise InvalidArgument(f"prepare_model: {e}") from e
        check_deadline_ns(deadline_ns, where="prepare_model")
        return await _on_gate(
            self.gate,
            priority,
            deadline_ns,
            lambda _: self._checked_prepare(model, preference, priority, deadline_ns),
        )

    def _checked_prepare(
        self, model: Model, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> BlockingPreparedModel:
        if deadline_ns is not None and self.now() >= deadline_ns:
            raise MissedDeadline("prepare_model: the deadline had passed before the start", transient=False)
        answer = self._checked_support(model)
        if not all(answer):
            refused = sorted(
                {
                    operation_type_name(o.type)
                    for o, ok in zip(model.main.operations, answer, strict=True)
                    if not ok
                }
            )
            raise InvalidArgument(f"prepare_model: {self.info.name} does not support {', '.join(refused)}")
        prepared = self.prepare(model, preference=preference, priority=priority, deadline_ns=deadline_ns)
        if deadline_ns is not None and self.now() >= deadline_ns:
            prepared.release()
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
        """See ``Device``."""
        prepared = [self._own(index, p) for index, p in enumerate(prepared_models)]
        # One view per prepared model: roles are compared by it, and two prepared models may share a model.
        views = {p.identity: msgspec.structs.replace(p.model) for p in prepared}
        operand = check_buffer_roles(
            description, [views[p.identity] for p in prepared], input_roles, output_roles
        )
        if self.memories is None:
            raise GeneralFailure(f"allocate: {self.info.name} has no device memories")
        roles = frozenset(
            Role(prepared[role.model_index].identity, is_output, role.io_index)
            for is_output, of_kind in ((False, input_roles), (True, output_roles))
            for role in of_kind
        )
        return self.memories.allocate(operand, roles)

    def _own(self, index: int, prepared: PreparedModel) -> BlockingPreparedModel:
        if not isinstance(prepared, BlockingPreparedModel) or prepared.device is not self or prepared._closed:
            raise InvalidArgument(f"allocate, model {index}: expected a prepared model of {self.info.name}")
        return prepared

    async def aclose(self) -> None:
        """Lets running work end and joins the device's threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        done = SyncFence("device close")

        def close() -> None:
            self.gate.close()
            self.alarm.close()
            done.signal()

        # Joining waits for running work, so it must not happen on the event loop's thread.
        closer = threading.Thread(target=close, name=f"aionn-{self.info.name}-close")
        with real_work(f"closing {self.gate}"):
            closer.start()
            await done
        closer.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _check_times(deadline_ns: int | None, loop_timeout_ns: int | None) -> None:
    check_deadline_ns(deadline_ns, where="execution")
    check_duration_ns(loop_timeout_ns, where="execution, loop time-out")


async def _on_gate(
    gate: SlotGate, priority: Priority, deadline_ns: int | None, call: Callable[[Callable[[], bool]], _T]
) -> _T:
    """Runs ``call`` on a thread of the gate and returns what it returns. Cancelled: ``call``'s argument turns True."""
    cancelled = threading.Event()
    outcome: list[_T | BaseException] = []

    def job() -> None:
        try:
            outcome.append(call(cancelled.is_set))
        except Error as e:
            outcome.append(e)
        except Exception as e:
            failure = GeneralFailure(f"{gate}: {type(e).__name__}: {e}")
            failure.__cause__ = e
            outcome.append(failure)
        done.signal()

    done = SyncFence("execution")
    try:
        with real_work(f"work on {gate}"):
            gate.submit(priority, deadline_ns, job)
            await done
    except BaseException:
        cancelled.set()
        raise
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result

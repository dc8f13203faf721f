"""Base class for the prepared models of blocking drivers: write ``run``, get every way of execution.

Owns argument checks, deadlines before the start, timing, synchronous, asynchronous and fenced execution, and a burst without
queues. The subclass computes.

Invariants:
1. ``run`` is called with checked arguments, on a thread that holds one of the device's slots, never on an event loop's.
2. An execution whose deadline has passed before its turn is never started (MISSED_DEADLINE_PERSISTENT).
3. Callbacks and fences are finished exactly once, whatever ``run`` does.

Source: obligations in ``aionn.hal.device``; the NN HAL's sample driver for the order of the checks.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy.typing as npt

from aionn.drivers.kit.arguments import Arguments, OutputArea, check_times
from aionn.drivers.kit.checked import CheckedPreparedModel
from aionn.drivers.kit.fenced import FencedLaunch
from aionn.errors import (
    Error,
    ErrorStatus,
    ExecutionCancelled,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
    status_of,
)
from aionn.hal import (
    NO_TIMING,
    BurstDefaults,
    ExecutionCallback,
    ExecutionResult,
    FencedExecution,
    Launch,
    LaunchBase,
    Memory,
    Model,
    OutputShape,
    PreparedModel,
    Priority,
    Request,
    ResendingExecution,
    Timing,
    outcome_of,
)
from aionn.hal.callers import client_of_call
from aionn.interpreter import RunControl
from aionn.observability.tracing import section
from aionn.platform.real_work import begin_real_work
from aionn.validation import check_memory_identifiers
from fences import SyncFence

if TYPE_CHECKING:
    from aionn.drivers.kit.blocking import BlockingDevice

__all__ = ["BlockingPreparedModel", "DirectBurst"]

Array = npt.NDArray[Any]

MEMORIES_MAX = 1 << 16
"""Memories that one burst remembers."""


class BlockingPreparedModel(CheckedPreparedModel):
    """A model made ready by a blocking driver. Implement ``run``; override ``release`` to free what it holds.

    Attributes:
        device: The device that prepared it.
        model: The model, validated.
        priority: Relative to other prepared models of the device.
        identity: A number that no other prepared model of this process ever has.
        extension_types: The operand types of the device's extensions, by the model's codes.
    """

    device: BlockingDevice
    takes_priority = True

    def __init__(self, device: BlockingDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        weakref.finalize(self, device.gate.forget, self.identity).atexit = False
        self._abandoned = False
        # By the identity of the request, which an entry keeps.
        self._left: dict[int, tuple[Request, SyncFence]] = {}

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
            with section("LD_PE", self.device.info.name):
                result = self._run_checked(arguments, measure, deadline_ns, loop_timeout_ns, is_cancelled)
            arguments.settle(result.output_shapes, is_sufficient=result.output_sufficient_size)
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

        control = self.device.gate.control(
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            is_cancelled=self._is_abandoned if is_cancelled is None else self._or_abandoned(is_cancelled),
        )
        control.check()  # An execution that was cancelled while it waited for a slot never starts.
        self.begin_run()
        try:
            shapes = tuple(self.run(arguments.inputs(), arguments.outputs, control))
        except Error:
            raise
        except Exception as e:
            raise GeneralFailure(f"{self.device.info.name}: {type(e).__name__}: {e}") from e
        finally:
            self.end_run()
        took_ns = now() - started_ns
        on_device_ns = took_ns - control.away_ns
        sufficient = False not in [shape.is_sufficient for shape in shapes]
        return ExecutionResult(
            sufficient, shapes, Timing(on_device_ns, took_ns) if measure and sufficient else NO_TIMING
        )

    def _is_abandoned(self) -> bool:
        return self._abandoned

    def _or_abandoned(self, is_cancelled: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: self._abandoned or is_cancelled()

    def _slot(self, deadline_ns: int | None) -> AbstractContextManager[None]:
        return self.device.gate.slot(self.priority, deadline_ns, owner=self.owner, model=self.identity)

    def execute_bound(
        self,
        arguments: Arguments,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        answer: Callable[[ExecutionResult], None] | None = None,
    ) -> ExecutionResult:
        """Executes on the calling thread when its turn comes; blocks. Raises as ``PreparedModel.execute_synchronously`` does.

        Args:
            arguments: What ``bind`` returned; for any number of executions, unless device memories are among its pools.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.
            answer: Called with the result before the slot is released, so that a client in another process continues sooner;
                None if the caller needs no earlier answer.
        """
        self.check_usable()
        with self._slot(deadline_ns):
            result = self.run_bound(
                arguments, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
            )
            if answer is not None:
                answer(result)
        return result

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
        launch = _GateLaunch(self, self.bind(request), measure, deadline_ns, loop_timeout_ns)
        launch.begin(self.priority if priority is None else priority)
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
        launch = self.launch(
            request,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            priority=priority,
        )
        try:
            return await outcome_of(launch)
        finally:
            if not launch.is_done:
                done = launch.done
                self._left[id(request)] = request, done
                done.add_callback(lambda done: self._forget(id(request), done))
            del launch

    def _forget(self, key: int, done: SyncFence) -> None:
        # A later execution of the same request may have been left since: that entry stays until it is over itself.
        if key in self._left and self._left[key][1] is done:
            del self._left[key]

    async def settle(self, request: Request) -> None:
        """Waits until the device is done with a request whose caller was cancelled; returns immediately if it is."""
        left = self._left.get(id(request))
        if left is not None:
            await left[1]

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
            check_times(deadline_ns, loop_timeout_ns)
            arguments = self.bind(request)
            self.device.gate.submit(
                self.priority if priority is None else priority,
                deadline_ns,
                job,
                owner=self.owner,
                model=self.identity,
            )
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
        arguments = self.bind_fenced(
            request,
            wait_for,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            duration_ns=duration_ns,
            now_ns=self.device.now(),
        )
        launch = FencedLaunch(
            self,
            arguments,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            duration_ns=duration_ns,
        )
        launch.begin(wait_for)
        return FencedExecution(launch.fence, launch.get_execution_info)

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> DirectBurst:
        """A burst without queues, for a device in this process. A driver process puts queues around ``execute_bound``."""
        self.check_usable()
        return DirectBurst(self)

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> ResendingExecution:
        """See ``PreparedModel``."""
        check_times(None, loop_timeout_ns)
        self.bind(request).give_back()
        return ResendingExecution(self, request, measure, loop_timeout_ns)

    def abandon(self) -> None:
        """The results are not wanted any more: waiting executions never start, running ones end where the device can stop."""
        self._abandoned = True


class _GateLaunch(LaunchBase):
    """An execution on a thread of the device's gate."""

    def __init__(
        self,
        prepared: BlockingPreparedModel,
        arguments: Arguments,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
    ) -> None:
        self._prepared = prepared
        # Dropped when it has run: the launch may be kept for longer than memories may be.
        self._arguments: Arguments | None = arguments
        self._measure = measure
        self._deadline_ns = deadline_ns
        self._loop_timeout_ns = loop_timeout_ns
        self._fence = SyncFence("execution")
        self._end = begin_real_work(f"work on {prepared.device.gate}")

    def begin(self, priority: Priority) -> None:
        """Enters the device's queue. Without an owner it is work of the client whose call this is.

        Raises:
            Error: There is no execution; see ``SlotGate.submit``.
        """
        prepared = self._prepared
        owner = client_of_call.get() if prepared.owner is None else prepared.owner
        try:
            prepared.device.gate.submit(
                priority, self._deadline_ns, self._run, owner=owner, model=prepared.identity
            )
        except BaseException:
            assert self._arguments is not None
            self._arguments.give_back()
            self._end()
            raise

    def _run(self) -> None:
        arguments, self._arguments = self._arguments, None
        assert arguments is not None, "run once"
        outcome: ExecutionResult | Error
        if self.is_cancelled:
            arguments.give_back()  # Others wait for the slot.
            outcome = ExecutionCancelled("execution: it was cancelled before its turn")
        else:
            try:
                outcome = self._prepared.run_bound(
                    arguments,
                    measure=self._measure,
                    deadline_ns=self._deadline_ns,
                    loop_timeout_ns=self._loop_timeout_ns,
                    is_cancelled=lambda: self.is_cancelled,
                )
            except Exception as e:
                outcome = e if isinstance(e, Error) else self._failure(e)
        del arguments
        self.finish(outcome)
        # Not before the event loop has been woken.
        self._end()
        del outcome  # It refers to this frame.

    def _failure(self, error: Exception) -> GeneralFailure:
        failure = GeneralFailure(f"{self._prepared.device.gate}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


class DirectBurst(BurstDefaults):
    """A burst of a device in this process: pools are mapped already, so that an identifier only names its first memory."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared = prepared
        self._memories: dict[int, Memory] = {}
        self._launch: Launch | None = None

    async def settle(self) -> None:
        """Waits until the device is done with a cancelled execution."""
        if self._launch is not None:
            await self._launch.done

    def launch(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> Launch:
        """See ``Burst``. The device itself orders an execution after one that was cancelled."""
        check_memory_identifiers(request, memory_identifiers)
        last = self._launch
        if last is not None and not last.is_done and not last.is_cancelled:
            raise InvalidArgument("burst: an execution is in flight already")
        request = self._with_remembered(request, memory_identifiers)
        self._launch = launch = self._prepared.launch(
            request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
        )
        return launch

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
        return await outcome_of(
            self.launch(
                request,
                memory_identifiers,
                measure=measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=loop_timeout_ns,
            )
        )

    def _with_remembered(self, request: Request, memory_identifiers: Sequence[int]) -> Request:
        """The request on the memories that its identifiers stand for: those that came with their first use."""
        pools = list(request.pools)
        for index, (pool, identifier) in enumerate(zip(pools, memory_identifiers, strict=True)):
            if identifier != -1 and isinstance(pool, Memory):
                if identifier not in self._memories and len(self._memories) >= MEMORIES_MAX:
                    raise ResourceExhausted(f"burst: more than {MEMORIES_MAX} memories", transient=False)
                pools[index] = self._memories.setdefault(identifier, pool)
        if all(a is b for a, b in zip(pools, request.pools, strict=True)):
            return request
        return msgspec.structs.replace(request, pools=tuple(pools))

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """See ``Burst``."""
        if memory_identifier < -1:
            raise InvalidArgument(
                f"burst: expected a memory identifier of at least -1, got {memory_identifier}"
            )
        self._memories.pop(memory_identifier, None)

    async def aclose(self) -> None:
        """Forgets the memories. Idempotent."""
        self._memories.clear()
        self._launch = None

"""A plan as a burst executes it: bursts of its devices, and a buffer for each slot with the steps over its memory.

Owns the memory of the buffers. ``burst`` owns when a plan is opened, replaced and closed.
"""

from __future__ import annotations

import functools
import logging
import mmap
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    BurstDefaults,
    ExecutionResult,
    Launch,
    Priority,
    check_abilities,
    dimensions_are_known,
)
from aionn.hal.callers import frame_of_launch
from aionn.observability.tracing import is_tracing
from aionn.platform.loops import finish_all
from aionn.platform.real_work import real_work
from aionn.realtime import PageLocks
from aionn.runtime.executions.job import ExecutionJob, JobOwner, ended, outcome_of_end, run_direct, run_job
from aionn.runtime.executions.results import ExecutionState, Result
from aionn.runtime.executions.slot_pool import FrameBuffer, SlotPool, nothing
from aionn.runtime.executions.stepping import (
    Conditions,
    DeviceBurst,
    InterpretedBurst,
    Step,
)
from aionn.runtime.memory.arguments import (
    Array,
    RequestArea,
    Value,
)
from aionn.runtime.placement.plan import learnt_by
from aionn.scheduler.job import TaskJob
from aionn.validation import check_execution_result

if TYPE_CHECKING:
    from aionn.runtime.placement.plan import Plan


__all__ = ["KeptAreas", "OpenedPlan", "check_known_shapes", "job_of"]


_logger = logging.getLogger("aionn.execution")


class _StepInBurst(Step):
    """A step over one buffer, launched through a burst of its device."""

    __slots__ = ("_buffer", "_bursts", "_direct", "_index", "_inside", "_own", "_request", "_used", "_work")

    def __init__(
        self,
        plan: Plan,
        index: int,
        buffer: FrameBuffer,
        opened: list[DeviceBurst] | InterpretedBurst,
        key: Hashable,
    ) -> None:
        step = plan.steps[index]
        super().__init__(step, key=key, fallback=plan.fallback_step(index), name=plan.step_name(index))
        self._index = index
        self._buffer = buffer
        # Executions of several or interpreted steps need one, and so do those that are counted or reported, and of which nothing is
        # learnt.
        owner = buffer.owner
        is_watched = owner.figures is not None or owner.report is not None
        is_launched = len(plan.steps) == 1 and isinstance(opened, list)
        needs_job = not is_launched or key is None or is_watched
        self._work: TaskJob | None = None
        # Nothing changes from frame to frame but the values, so the request is made once.
        self._request = buffer.area.request(step.inputs, step.outputs)
        self._inside = None if isinstance(opened, list) else opened
        self._bursts = opened if isinstance(opened, list) else opened.bursts
        # This one knows the memory of the request.
        own = self._own = self._bursts[buffer.identifier % len(self._bursts)] if self._bursts else None
        self._used: DeviceBurst | None = None  # By the direct execution that was begun last.
        self._direct = None if needs_job or own is None or not own.gives_launch else own

    @property
    def is_closed(self) -> bool:
        return any(burst.is_closed for burst in self._bursts)

    def pass_through(self, rank: Priority, deadline_ns: int | None) -> TaskJob | None:
        own = self._direct
        if own is None:
            return None
        if not own.is_direct:
            own = next((burst for burst in self._bursts if burst.is_direct), None)
            if own is None:
                return None
        if is_tracing() or _logger.isEnabledFor(logging.DEBUG):
            return None
        work = self.dispatcher.pass_through(
            self._work, rank, deadline_ns, self.key, self.prepared_step.prepared.expected_duration_ns
        )
        if work is not None:
            self._work, self._used = work, own
        return work

    async def run_directly(
        self, work: TaskJob, rank: Priority, deadline_ns: int | None, *, copy: bool
    ) -> Result:
        burst, buffer, started_ns = self._used, self._buffer, work.started_ns
        leave = buffer.leave
        assert burst is not None, "it has passed through"
        burst.is_taken = True
        hal = burst.hal
        try:
            if deadline_ns is None:
                result = await hal.execute_synchronously(self._request, buffer.identifiers)
            else:
                execution = hal.execute_synchronously(
                    self._request, buffer.identifiers, deadline_ns=deadline_ns
                )
                assert hal.in_flight is not None, "it gives its launch"
                result = await buffer.owner.background.in_time_directly(
                    deadline_ns, execution, hal.in_flight, _passed
                )
        except BaseException as e:
            job = self._job(leave, work, rank, deadline_ns, copy)
            return await run_direct(job, burst.leave(), work, e)
        burst.is_taken = False
        known = buffer.checked[0]
        if result is not known and result != known:  # A device in this process makes a new one each time.
            landed_ns = self.dispatcher.release(work, outcome=outcome_of_end(result))
            job = self._job(leave, work, rank, deadline_ns, copy)
            job.landed_ns, job.launched = landed_ns, ended(result)
            return await run_job(job)
        landed_ns = self.dispatcher.release(work)
        owner = buffer.owner
        try:
            outputs = buffer.area.outputs(owner.outputs, copy=copy)
        finally:
            leave(None)
        return Result(outputs, device=owner.device, total_ns=landed_ns - started_ns)

    def _job(
        self,
        leave: Callable[[object], None],
        work: TaskJob,
        rank: Priority,
        deadline_ns: int | None,
        copy: bool,
    ) -> ExecutionJob:
        """The job of a direct execution. Its buffer may have no steps any more: a burst that is closed takes its buffers apart."""
        job = job_of(self._buffer, deadline_ns, rank, False, copy)
        job.steps, job.finish, job.asked_ns = (self,), leave, work.started_ns
        return job

    def launch(self, area: RequestArea, job: Conditions) -> Launch:
        served = job.served
        token = frame_of_launch.set(served) if served is not None and served.reservation else None
        try:
            burst = self._own
            if burst is None or not burst.is_free:
                burst = next((burst for burst in self._bursts if burst.is_free), None)
                if burst is None:
                    return super().launch(area, job)
            return burst.launch(self._request, self._buffer.identifiers, job)
        finally:
            if token is not None:
                frame_of_launch.reset(token)

    async def interpret(self, area: RequestArea, job: Conditions) -> ExecutionResult:
        assert self.interpreted is not None, "other steps are launched"
        return await self.interpreted.interpret(self._request, job, self._inside)

    def accept(self, area: RequestArea, result: ExecutionResult, job: Conditions) -> bool:
        # Frames without timings give the same object again.
        checked = self._buffer.checked
        if result is not checked[self._index]:
            step = self.prepared_step
            check_execution_result(step.model.main, result, measure=job.measure)
            if not result.output_sufficient_size:
                raise GeneralFailure(f"burst: {step.device.name} reports an output larger than the model's")
            area.note(step.outputs, result.output_shapes)
            checked[self._index] = None if job.measure else result
        return True


class OpenedPlan:
    """A plan as a burst executes it: the device's bursts, and buffers.

    Args:
        plan: The plan.
        owner: The common part of its executions.
        kept: The memories of the buffers that stay in memory.

    Attributes:
        plan: See above.
        owner: See above.
        opened: Of each step, its device's bursts, or those of the steps inside of one that is interpreted.
        buffers: One for each slot of the burst.
        keys: Of each step, the key of its learnt durations.
        left: Number of buffers that may still be used.
        ended: Called once when it has ended, where it was replaced.
    """

    def __init__(self, plan: Plan, owner: JobOwner, kept: KeptAreas) -> None:
        self.plan = plan
        self.owner = owner
        self.opened: list[list[DeviceBurst] | InterpretedBurst] = []
        self.buffers: list[FrameBuffer] = []
        self.keys: list[Hashable] = []
        self.left = 0
        self.ended: Callable[[], None] | None = None
        self._kept = kept

    async def open(self, pool: SlotPool, polling: Mapping[str, int]) -> None:
        """Opens the bursts and makes the buffers. Raises as the devices; ``aclose`` then closes the ones that are open."""
        for step in self.plan.steps:
            if step.interpreted is not None:
                self.opened.append(await step.interpreted.open_burst(polling))
                continue
            bursts: list[DeviceBurst] = []
            self.opened.append(bursts)
            for _ in range(min(pool.slots, step.device.info.slots)):
                burst = await step.prepared.configure_execution_burst(**polling)
                check_abilities(burst, BurstDefaults, step.device.name)
                bursts.append(DeviceBurst(burst))
        values = self.plan.values([spec.dimensions for spec in self.plan.inputs], {})
        keys = self.keys = learnt_by(self.plan, self)
        for identifier in range(pool.slots):
            # On a thread, with every page touched: the kernel takes a while to find and clear memory.
            with real_work("making a burst's memory"):
                area = await anyio.to_thread.run_sync(_touched_area, values, self._kept)
            indexes = self.plan.model.main.input_indexes
            buffer = FrameBuffer(identifier, area, len(self.plan.steps), self.owner, indexes)
            buffer.leave = functools.partial(pool.leave, buffer)
            buffer.steps = [
                _StepInBurst(self.plan, index, buffer, opened, key)
                for index, (opened, key) in enumerate(zip(self.opened, keys, strict=True))
            ]
            self.buffers.append(buffer)
        self.left = len(self.buffers)

    def when_unused(self, call: Callable[[], None]) -> None:
        """Calls when none of the buffers is used any more: it was replaced."""

        def retire(buffer: FrameBuffer) -> None:
            _take_apart(buffer)
            self.left -= 1
            if not self.left:
                call()

        for buffer in self.buffers:
            buffer.retire = functools.partial(retire, buffer)

    def executing_threads(self) -> list[int]:
        """The threads that execute its steps in the processes of their devices, as far as they are known."""
        threads = (burst.hal.thread_id for burst in self._bursts())
        return [thread for thread in threads if thread is not None]

    def _bursts(self) -> Iterator[DeviceBurst]:
        for opened in self.opened:
            yield from opened if isinstance(opened, list) else opened.bursts

    async def landed(self) -> None:
        """Waits until nothing runs through it."""
        for burst in self._bursts():
            await burst.landed()

    async def aclose(self) -> None:
        """Ends the device's bursts. Idempotent."""
        closings: list[Callable[[], Coroutine[Any, Any, None]]] = []
        for bursts in self.opened:
            closings += [b.aclose for b in bursts] if isinstance(bursts, list) else [bursts.aclose]
        try:
            await finish_all(closings)
        finally:
            # There are no keys where opening failed.
            for step, key in zip(self.plan.steps, self.keys, strict=False):
                step.device.reservations.forget_model(key)
            self._kept.release()
            for buffer in self.buffers:
                _take_apart(buffer)
            self.buffers.clear()
            ended, self.ended = self.ended, None
            if ended is not None:
                ended()


def _passed() -> str:
    """The message for a deadline that passes during a direct execution."""
    return f"execution: the deadline passed while {ExecutionState.RUNNING.value}"


def job_of(
    buffer: FrameBuffer, deadline_ns: int | None, priority: Priority, measure: bool, copy: bool
) -> ExecutionJob:
    """The job of an execution of what is in a buffer, which it leaves at its end."""
    return ExecutionJob(
        buffer.owner,
        buffer.steps,
        buffer.leave,
        priority,
        area=buffer.area,
        deadline_ns=deadline_ns,
        measure=measure,
        copy=copy,
    )


def _take_apart(buffer: FrameBuffer) -> None:
    # Each refers to it.
    buffer.steps, buffer.leave, buffer.retire = (), nothing, nothing


class KeptAreas:
    """The memories of a burst that stay in memory, where real time is in use.

    Args:
        locks: Keeps them; None keeps nothing.
    """

    def __init__(self, locks: PageLocks | None) -> None:
        self._locks = locks
        self._arrays: list[Array] = []

    def keep(self, array: Array) -> None:
        """Keeps one more."""
        if self._locks is not None:
            self._locks.keep(array, "frame buffer of a burst")
            self._arrays.append(array)

    def release(self) -> None:
        """Keeps none of them any longer. Idempotent."""
        while self._arrays and self._locks is not None:
            self._locks.release(self._arrays.pop())


def _touched_area(values: Sequence[Value], kept: KeptAreas) -> RequestArea:
    area = RequestArea(values)
    array = area.memories[0].array
    array[:: mmap.PAGESIZE] = 0
    kept.keep(array)
    return area


def check_known_shapes(plan: Plan) -> None:
    """Checks that memory can be made for the executions of a plan before its first one.

    Raises:
        InvalidArgument: A shape is unknown.
    """
    for spec in (*plan.inputs, *plan.outputs, *plan.temporaries.values()):
        if not dimensions_are_known(spec.type, spec.dimensions):
            raise InvalidArgument(f"burst: expected known shapes, got {spec}")

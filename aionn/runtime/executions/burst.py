"""Bursts as an application sees them: one execution after the other, through memory and queues that stay.

Owns request memory in slots (while one request runs, the next is filled), and which of the device's bursts a request goes through.
Refuses to own the order of a stream's results and what happens to late frames: that is ``aionn.runtime.executions.stream``'s.

Invariants:
1. A slot is used again only when both the device and the consumer are done with it, and so is the device's own.
2. Nothing of a stream outlives its burst: closing the burst ends the stream's tasks.
3. An execution that is cancelled keeps its slots until the device has answered.
"""

from __future__ import annotations

import functools
import mmap
from collections import deque
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from aionn.errors import Error, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import Burst as HalBurst
from aionn.hal import (
    BurstDefaults,
    ExecutionResult,
    Priority,
    Timing,
    check_abilities,
    check_deadline_ns,
    dimensions_are_known,
)
from aionn.observability.tracing import section
from aionn.platform.loops import finish, finish_all
from aionn.platform.real_work import real_work
from aionn.runtime.background import Background
from aionn.runtime.clock import now_ns
from aionn.runtime.dropping import close_when_dropped
from aionn.runtime.executions.direct import execute_directly, hold
from aionn.runtime.executions.execution import Execution, Result, Turn, failing, priority_of, result_of
from aionn.runtime.executions.stepping import PreparedStep
from aionn.runtime.executions.stream import Frames, SlotClaim, Stream, frames_of
from aionn.runtime.memory.arguments import Array, RequestArea, TensorSpec, Value, Writer, check_inputs
from aionn.runtime.placement.plan import learnt_by
from aionn.scheduler.job import Job
from aionn.validation import check_execution_result, needed_inputs

if TYPE_CHECKING:
    from aionn.runtime.placement.plan import Plan

__all__ = ["Burst", "Line", "Slot"]

SLOTS_MAX = 64
"""Most request memories of one burst: frames that wait in a burst only get older."""

CLOSE_S_MAX = 1.0
"""Limit of the wait of closing for a running execution; then the burst ends anyway."""

_T = TypeVar("_T")


class Slot:
    """One execution's memory, the requests of its steps, and how many still use it."""

    def __init__(self, identifier: int, area: RequestArea, plan: Plan) -> None:
        self.identifier = identifier
        self.area = area
        # Nothing changes from frame to frame but the values, so the requests are made once.
        self.requests = [area.request(step.inputs, step.outputs) for step in plan.steps]
        self.identifiers = (identifier,)
        self.checked: list[ExecutionResult | None] = [None] * len(plan.steps)
        self.line: Line | None = None
        self.users = 0


class Line:
    """A burst of a device, and its user: one execution at a time."""

    __slots__ = ("free", "hal", "settle")

    def __init__(self, hal: HalBurst) -> None:
        self.hal = hal
        # Does not yield to the loop where there is nothing to wait for: the device's answer does.
        self.free = anyio.Semaphore(1, fast_acquire=True)
        self.settle = hal.settle


class Burst:
    """Repeated executions of one compilation. Use it with ``async with``; made by ``Compilation.burst``."""

    def __init__(
        self,
        background: Background,
        plan: Plan,
        priority: Priority,
        slots: int,
        *,
        polling: Mapping[str, int] | None = None,
        report: Callable[[Execution], None] | None = None,
        on_close: Callable[[Burst], None],
    ) -> None:
        if not 1 <= slots <= SLOTS_MAX:
            raise InvalidArgument(f"burst: expected from 1 to {SLOTS_MAX} slots, got {slots}")
        for spec in (*plan.inputs, *plan.outputs, *plan.temporaries.values()):
            if not dimensions_are_known(spec.type, spec.dimensions):
                raise InvalidArgument(f"burst: expected known shapes, got {spec}")
        self._background = background
        self._plan = plan
        self._inputs = plan.inputs
        self._needed = functools.cache(functools.partial(needed_inputs, plan.model))
        self._input_indexes = plan.model.main.input_indexes
        self._output_indexes = plan.model.main.output_indexes
        self._device_names = plan.device_names
        self._priority = priority
        self._slot_count = slots
        self._polling = polling or {}
        self._slots: list[Slot] = []
        self._unused: list[Slot] = []
        self._waiting: deque[SlotClaim] = deque()
        # Number of those that are executions, for which streams release slots that they can spare.
        self._demand = 0
        # For each step one for each slot of its device: with fewer the device would be idle between two executions.
        self._lines: list[list[Line]] = []
        self._opened = False
        # By slot and by whether they measure. Not in the slots: what refers to itself waits for the garbage collector.
        self._turns_of: dict[tuple[int, bool], list[Turn]] = {}
        self._streams: set[Frames] = set()
        self._on_close = on_close
        self._learnt_by = learnt_by(plan, self)
        self._report = report
        self._closed = False
        self._finalizer = close_when_dropped(self, background, functools.partial(_close_lines, self._lines))

    async def __aenter__(self) -> Self:
        if self._opened or self._closed:
            raise InvalidArgument("burst: can be entered once")
        self._opened = True
        try:
            for step in self._plan.steps:
                lines: list[Line] = []
                self._lines.append(lines)
                for _ in range(min(self._slot_count, step.device.info.slots)):
                    burst = await step.prepared.configure_execution_burst(**self._polling)
                    check_abilities(burst, BurstDefaults, step.device.name)
                    lines.append(Line(burst))
            values = self._plan.values([spec.dimensions for spec in self._inputs], {})
            for identifier in range(self._slot_count):
                # On a thread, with every page touched: the kernel takes a while to find and clear memory.
                with real_work("making a burst's memory"):
                    area = await anyio.to_thread.run_sync(_touched_area, values)
                self._slots.append(Slot(identifier, area, self._plan))
            # The first is taken first: a burst that is used by one alone keeps to one memory, which the caches know.
            self._unused = self._slots[::-1]
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _take(self, deadline_ns: int | None) -> Slot:
        """Waits for a slot, but not beyond the deadline; the caller must leave it.

        Raises:
            MissedDeadline: No slot was free in time.
            InvalidArgument: The burst is not open, or was closed during the call.
        """
        slot = self._take_unused()
        if slot is not None:
            return slot
        background = self._background
        if deadline_ns is not None and deadline_ns <= now_ns():
            raise MissedDeadline(
                "burst: the deadline had passed before the execution was asked for", transient=False
            )
        waiter = background.waiter()
        taken: list[Slot] = []

        def take(slot: Slot) -> None:
            taken.append(slot)
            waiter.wake()

        claim = SlotClaim(_always, take)
        timer = None if deadline_ns is None else background.at(deadline_ns, waiter.wake)
        self._wait_for_slot(claim)
        self._demand += 1
        try:
            self._reclaim()
            await waiter.future
        except BaseException:
            for slot in taken:
                self._leave(slot)
            raise
        finally:
            self._demand -= 1
            self._stop_waiting(claim)
            if timer is not None:
                timer.cancel()
        if not taken:
            raise MissedDeadline("burst: the deadline passed while waiting for a free slot", transient=True)
        if self._closed:
            self._leave(taken[0])
            raise InvalidArgument("burst: closed while an execution waited for a free slot")
        return taken[0]

    def _take_unused(self) -> Slot | None:
        """An unused slot, None if all are in use; the caller must leave it."""
        if self._closed:
            raise InvalidArgument("burst: closed")
        if not self._slots:
            raise InvalidArgument("burst: not open; use it with async with")
        self._background.home.check("burst")
        if not self._unused:
            return None
        slot = self._unused.pop()
        slot.users = 1
        return slot

    def _wait_for_slot(self, claim: SlotClaim) -> None:
        """Has the claim given the next slot that becomes free, by the task that leaves it. First come, first served."""
        self._waiting.append(claim)

    def _stop_waiting(self, claim: SlotClaim) -> None:
        for index, waiting in enumerate(self._waiting):
            if waiting is claim:
                del self._waiting[index]
                return

    def _leave(self, slot: Slot) -> None:
        slot.users -= 1
        if slot.users:
            if self._demand:
                self._reclaim()  # The device may have finished what a stream can spare.
            return
        for index, claim in enumerate(self._waiting):
            if claim.wants():
                del self._waiting[index]
                slot.users = 1
                claim.take(slot)
                return
        self._unused.append(slot)

    def _reclaim(self) -> None:
        """Makes a stream release the slot of a result that its consumer has not requested yet, if there is one."""
        for frames in tuple(self._streams):
            if frames.spare():
                return

    def _offer_unused(self) -> None:
        """Offers an unused slot to the waiters: one of them can use it now."""
        if self._waiting and self._unused:
            slot = self._unused.pop()
            slot.users = 1
            self._leave(slot)

    def _begin(
        self,
        slot: Slot,
        deadline_ns: int | None,
        priority: Priority,
        measure: bool,
        *,
        copy: bool,
        failure: Error | None = None,
    ) -> Execution:
        """Starts an execution in the background; one whose only step has failed already continues from there."""
        turns = self._turns(slot, measure)
        if failure is not None:
            turns = [turns[0]._replace(run=failing(failure), model=None)]
        slot.users += 1
        execution = Execution(
            lambda: slot.area,
            turns,
            self._output_indexes,
            device=self._device_names,
            priority=priority,
            deadline_ns=deadline_ns,
            copy=copy,
            rescue=self._plan.rescue(measure),
            report=self._report,
            finish=lambda area: self._leave(slot),
        )
        execution.start(self._background)
        return execution

    def _turns(self, slot: Slot, measure: bool) -> list[Turn]:
        turns = self._turns_of.get((slot.identifier, measure))
        if turns is None:
            turns = [self._turn(slot, index, measure) for index in range(len(self._lines))]
            self._turns_of[slot.identifier, measure] = turns
        return turns

    def _turn(self, slot: Slot, index: int, measure: bool) -> Turn:
        step, lines = self._plan.steps[index], self._lines[index]

        async def run(area: RequestArea, deadline_ns: int | None) -> Timing:
            # Without the burst, which would refer to itself.
            return await _run(step, index, slot, lines, measure, deadline_ns)

        fall_back = self._plan.fall_back(index, measure)
        declared_ns = step.prepared.expected_duration_ns
        return Turn(step.device.dispatcher, run, fall_back, self._learnt_by[index], declared_ns)

    async def execute(
        self,
        inputs: Sequence[Any],
        *,
        deadline: int | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
    ) -> Result:
        """Executes once. Waits for a free slot first; arguments, result and errors are those of ``Compilation.execute``.

        The deadline covers the wait for the slot as well.
        """
        check_deadline_ns(deadline, where="burst")
        values = check_inputs(self._inputs, inputs, self._needed)
        rank = self._priority if priority is None else self._priority_of(priority)
        slot = await self._take(deadline)
        try:
            slot.area.write(self._input_indexes, values)
            if deadline is None and self._is_alone():
                return await self._execute_directly(slot, rank, measure, copy=True)
            return await result_of(self._begin(slot, deadline, rank, measure, copy=True))
        finally:
            self._leave(slot)

    def _is_alone(self) -> bool:
        """Whether an execution without a deadline can run in the caller's task."""
        return len(self._lines) == 1 and self._lines[0][0].settle is not None and self._report is None

    async def _execute_directly(self, slot: Slot, priority: Priority, measure: bool, *, copy: bool) -> Result:
        """Executes the only step in the caller's own task.

        Cancelled or failed, what is left is done in the background: waiting for the device's answer, or falling back.
        """
        turn = self._turns(slot, measure)[0]

        def abandon(work: Job) -> None:
            assert slot.line is not None, "what was begun has a line"
            slot.users += 1
            ending = hold(functools.partial(_settled, slot.line), turn, work)
            self._background.start_execution(ending, lambda task: self._leave(slot))

        async def recover(failure: Error) -> Result:
            return await result_of(self._begin(slot, None, priority, measure, copy=copy, failure=failure))

        with section("LR_PE", self._device_names):
            return await execute_directly(
                turn,
                slot.area,
                self._output_indexes,
                device=self._device_names,
                priority=priority,
                copy=copy,
                abandon=abandon,
                recover=recover,
            )

    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | None = None,
        deadline: Callable[[_T], int] | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: str | Priority | None = None,
        measure: bool = False,
    ) -> Stream[_T]:
        """Executes every item of a source; iterate over the result with ``async for``.

        Args:
            source: Gives arrays for the model's only input, or anything that ``into`` can write.
            into: Writes an item straight into shared memory, as ``into(item, view)``; None copies arrays. See ``image_writer``.
            deadline: From an item to its absolute deadline in nanoseconds; None means no deadlines.
            on_late: ``drop``: an item that is late, or becomes late while running, gives a result without outputs, at its deadline.
                ``deliver``: it is executed all the same and its result is marked late.
            priority: Against other executions; None takes the compilation's.
            measure: Whether ``timing`` is wanted.

        Returns:
            An iterator of ``StreamResult`` in the source's order. Errors of the source, and of the device, are raised from it.

        Raises:
            InvalidArgument: The model has several inputs, or an argument is illegal.
        """
        if len(self._inputs) != 1:
            raise InvalidArgument(f"stream: expected a model with one input, got {len(self._inputs)}")
        if on_late not in ("drop", "deliver"):
            raise InvalidArgument(f"on_late: expected drop or deliver, got {on_late!r}")
        if not isinstance(source, AsyncIterable):
            raise InvalidArgument(f"stream: expected an async iterable, got a {type(source).__name__}")
        frames = frames_of(
            self,
            source,
            into or _array_writer(self._inputs[0]),
            deadline,
            on_late,
            self._priority_of(priority),
            measure,
        )
        self._streams.add(frames)
        return Stream(frames)

    def _priority_of(self, priority: str | Priority | None) -> Priority:
        return self._priority if priority is None else priority_of(priority)

    async def aclose(self) -> None:
        """Ends its streams and frees it at the driver. Waits for a running execution, but not without a limit. Idempotent.

        Cancelled, it is closed all the same before the cancellation is raised.
        """
        if self._closed:
            return
        self._background.home.check("burst")
        self._closed = True
        self._on_close(self)
        for frames in list(self._streams):
            frames.cancel()
        try:
            await finish(self._close())
        finally:
            self._slots.clear()

    async def _close(self) -> None:
        with anyio.move_on_after(CLOSE_S_MAX):
            for line in (line for lines in self._lines for line in lines):
                async with line.free:
                    pass
        await _close_lines(self._lines)
        self._finalizer.detach()  # Not before: a closing that failed is tried again when this object is dropped.
        # Completion callbacks run in the loop's next turn: wait for them before closing returns.
        await anyio.lowlevel.checkpoint()


def _always() -> bool:
    return True


async def _acquired(semaphore: anyio.Semaphore) -> None:
    """Acquires a semaphore; at a third of the cost where there is nothing to wait for."""
    if semaphore.value:
        semaphore.acquire_nowait()
    else:
        await semaphore.acquire()


def _line(slot: Slot, lines: Sequence[Line]) -> Line:
    """The burst through which a slot's request goes: the slot's own, which knows its memory; another while that is in use."""
    own = lines[slot.identifier % len(lines)]
    if own.free.value:
        return own
    return next((line for line in lines if line.free.value), own)


async def _run(
    step: PreparedStep, index: int, slot: Slot, lines: Sequence[Line], measure: bool, deadline_ns: int | None
) -> Timing:
    """Runs a step. The caller holds a slot of the device."""
    line = slot.line = _line(slot, lines)
    await _acquired(line.free)
    try:
        with section("LI_PE", step.device.name):
            result = await line.hal.execute_synchronously(
                slot.requests[index], slot.identifiers, measure=measure, deadline_ns=deadline_ns
            )
    finally:
        line.free.release()
    # Frames without timings give the same object again.
    if result is not slot.checked[index]:
        check_execution_result(step.model.main, result, measure=measure)
        if not result.output_sufficient_size:
            raise GeneralFailure(f"burst: {step.device.name} reports an output larger than the model's")
        slot.area.note(step.outputs, result.output_shapes)
        slot.checked[index] = None if measure else result
    return result.timing


async def _close_lines(lines: Sequence[Sequence[Line]]) -> None:
    await finish_all(line.hal.aclose for of_step in lines for line in of_step)


async def _settled(line: Line) -> None:
    async with line.free:
        if line.settle is not None:
            await line.settle()


def _touched_area(values: Sequence[Value]) -> RequestArea:
    area = RequestArea(values)
    area.memories[0].array[:: mmap.PAGESIZE] = 0
    return area


def _array_writer(spec: TensorSpec) -> Writer:
    def write(value: Any, view: Array) -> None:
        (array,) = check_inputs([spec], [value])
        if array is None:
            raise InvalidArgument(f"stream: expected an array for {spec.name}, got None")
        view[...] = array

    return write

"""Bursts as an application sees them: one execution after the other, through memory and queues that stay.

Owns the memory and the device's bursts, from opening to closing. ``slot_pool`` orders those that wait for a buffer, ``stream`` the
results of a stream.

Invariants:
1. A buffer is used again only when both the device and the consumer are done with it, and so is the device's own burst.
2. Nothing of a stream outlives its burst: closing the burst ends the stream's tasks.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import AsyncIterable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, overload

import anyio
import anyio.lowlevel
import anyio.to_thread

from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument
from aionn.hal import (
    BurstDefaults,
    ExecutionResult,
    Launch,
    Priority,
    check_abilities,
    dimensions_are_known,
)
from aionn.platform.loops import finish, finish_all
from aionn.platform.real_work import real_work
from aionn.realtime import PageLocks
from aionn.runtime.background import Background
from aionn.runtime.clock import check_deadline
from aionn.runtime.dropping import close_when_dropped
from aionn.runtime.executions.job import ExecutionJob, JobOwner, run_job
from aionn.runtime.executions.results import Result, priority_of
from aionn.runtime.executions.slot_pool import BurstStatistics, FrameBuffer, SlotPool
from aionn.runtime.executions.stepping import (
    Conditions,
    DeviceBurst,
    InterpretedBurst,
    Step,
)
from aionn.runtime.executions.stream import Stream, StreamPump
from aionn.runtime.executions.writing import ViewsWriter, item_writer
from aionn.runtime.guarantees.guarantee import StreamGuarantee
from aionn.runtime.guarantees.reservations import FrameArrival
from aionn.runtime.guarantees.stream import GuaranteedStream, ReservedPump, capture_deadline
from aionn.runtime.guarantees.terms import check_guarantee, in_progress_max, stated_terms
from aionn.runtime.memory.arguments import (
    Array,
    RequestArea,
    Value,
    Writer,
    check_inputs,
)
from aionn.runtime.placement.plan import learnt_by
from aionn.scheduler.admission import StreamTerms
from aionn.validation import check_execution_result, needed_inputs

if TYPE_CHECKING:
    from aionn.runtime.placement.plan import Plan

__all__ = ["Burst"]

SLOTS_MAX = 64
"""Most request memories of one burst: frames that wait in a burst only get older."""

CLOSE_S_MAX = 1.0
"""Limit of the wait of closing for a running execution; then the burst ends anyway."""

_T = TypeVar("_T")


class _StreamArguments(NamedTuple):
    """The arguments of a stream, with or without a guarantee, that were checked.

    Attributes:
        source: Gives the items.
        write: Writes an item into the memory of its inputs.
        drops_late: Whether late items are dropped.
    """

    source: AsyncIterable[Any]
    write: Callable[[Any, RequestArea], object]
    drops_late: bool


class _StepInBurst(Step):
    """A step over one buffer, launched through a burst of its device."""

    __slots__ = ("_buffer", "_bursts", "_index", "_inside", "_own", "_request")

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
        # Nothing changes from frame to frame but the values, so the request is made once.
        self._request = buffer.area.request(step.inputs, step.outputs)
        self._inside = None if isinstance(opened, list) else opened
        self._bursts = opened if isinstance(opened, list) else opened.bursts
        # This one knows the memory of the request.
        self._own = self._bursts[buffer.identifier % len(self._bursts)] if self._bursts else None

    def launch(self, area: RequestArea, job: Conditions) -> Launch:
        burst = self._own
        if burst is None or not burst.is_free:
            burst = next((burst for burst in self._bursts if burst.is_free), None)
            if burst is None:
                return super().launch(area, job)
        return burst.launch(self._request, self._buffer.identifiers, job)

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
        report: Callable[[ErrorStatus, Result | None, int], None] | None = None,
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
        self._priority = priority
        self._polling = polling or {}
        self._pool = SlotPool(background, slots)
        self._owner = JobOwner(
            background, plan.model.main.output_indexes, plan.device_names, plan.rescue_step(), report
        )
        # Of each step, its device's bursts, or those of the steps inside of one that is interpreted.
        self._opened: list[list[DeviceBurst] | InterpretedBurst] = []
        # By buffer.
        self._steps_of: dict[int, list[Step]] = {}
        self._leaving: dict[int, Callable[[ExecutionJob], None]] = {}
        self._was_entered = False
        self._streams: set[StreamPump] = set()
        self._on_close = on_close
        self._learnt_by = learnt_by(plan, self)
        self._closed = False
        self._kept = _Kept(background.locks)
        self._finalizer = close_when_dropped(
            self, background, functools.partial(_close_all, self._opened, self._kept)
        )

    async def __aenter__(self) -> Self:
        if self._was_entered or self._closed:
            raise InvalidArgument("burst: can be entered once")
        self._was_entered = True
        try:
            await self._open_steps()
            values = self._plan.values([spec.dimensions for spec in self._inputs], {})
            buffers: list[FrameBuffer] = []
            for identifier in range(self._pool.slots):
                # On a thread, with every page touched: the kernel takes a while to find and clear memory.
                with real_work("making a burst's memory"):
                    area = await anyio.to_thread.run_sync(_touched_area, values, self._kept)
                buffer = FrameBuffer(identifier, area, len(self._plan.steps))
                buffers.append(buffer)
                self._leaving[identifier] = functools.partial(_leave, self._pool, buffer)
                self._steps_of[identifier] = [
                    _StepInBurst(self._plan, index, buffer, opened, key)
                    for index, (opened, key) in enumerate(zip(self._opened, self._learnt_by, strict=True))
                ]
            self._pool.open(buffers)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _open_steps(self) -> None:
        for step in self._plan.steps:
            if step.interpreted is not None:
                self._opened.append(await step.interpreted.open_burst(self._polling))
                continue
            bursts: list[DeviceBurst] = []
            self._opened.append(bursts)
            for _ in range(min(self._pool.slots, step.device.info.slots)):
                burst = await step.prepared.configure_execution_burst(**self._polling)
                check_abilities(burst, BurstDefaults, step.device.name)
                bursts.append(DeviceBurst(burst))

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def statistics(self) -> BurstStatistics:
        """Counts of its buffers, and of those that use them."""
        return self._pool.statistics()

    def _run(
        self, buffer: FrameBuffer, deadline_ns: int | None, priority: Priority, measure: bool, copy: bool
    ) -> Coroutine[Any, Any, Result]:
        """Executes what is in a buffer, which the execution uses from now on."""
        buffer.users += 1
        job = ExecutionJob(
            self._owner,
            self._steps_of[buffer.identifier],
            self._leaving[buffer.identifier],
            priority,
            area=buffer.area,
            deadline_ns=deadline_ns,
            measure=measure,
            copy=copy,
        )
        return run_job(job)

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
        check_deadline(deadline, where="burst")
        values = check_inputs(self._inputs, inputs, self._needed)
        rank = self._priority if priority is None else priority_of(priority)
        pool = self._pool
        buffer = pool.take_free() or await pool.take(deadline)
        try:
            buffer.area.write(self._input_indexes, values)
            if self._background.starting_count:
                await anyio.lowlevel.checkpoint()
            return await self._run(buffer, deadline, rank, measure, True)
        finally:
            pool.leave(buffer)

    @overload
    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | ViewsWriter | None = None,
        deadline: Callable[[_T], int] | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: str | Priority | None = None,
        measure: bool = False,
        guarantee: Literal[False] = False,
    ) -> Stream[_T]: ...

    @overload
    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | ViewsWriter | None = None,
        deadline: float | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: str | Priority | None = None,
        measure: bool = False,
        guarantee: Literal[True, "best"],
        period: float,
        jitter: float | None = None,
        name: str = "stream",
    ) -> GuaranteedStream[_T]: ...

    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | ViewsWriter | None = None,
        deadline: Callable[[_T], int] | float | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: str | Priority | None = None,
        measure: bool = False,
        guarantee: bool | Literal["best"] = False,
        period: float | None = None,
        jitter: float | None = None,
        name: str = "stream",
    ) -> Stream[_T]:
        """Executes every item of a source; iterate over the result with ``async for``.

        Args:
            source: Gives arrays for the model's only input, mappings from the names of inputs to arrays where it has several, or
                anything that ``into`` can write. ``aionn.media.joined`` makes one source of two.
            into: Writes an item straight into shared memory, as ``into(item, view)``; None copies arrays. See ``image_writer``. For
                a model with several inputs ``into(item, views)`` gets a mapping from the inputs' names to views, and writes all of
                them: a view has the values of an earlier item before. ``into`` may also return such a mapping of arrays, for inputs
                that it has not written.
            deadline: From an item to its absolute deadline in nanoseconds; None means no deadlines. With a guarantee, the seconds
                from an item's capture (its ``captured_at_ns``, or the time at which the source gives it) to its result; None means
                the period.
            on_late: ``drop``: an item that is late, or becomes late while running, gives a result without outputs, at its deadline.
                ``deliver``: it is executed all the same and its result is marked late.
            priority: Against other executions; None takes the compilation's.
            measure: Whether ``timing`` is wanted.
            guarantee: True reserves device time before the source is read, or raises ``NotAdmitted`` then; ``"best"`` runs without
                a reservation where there is no room. See ``GuaranteedStream``, which is returned.
            period: With a guarantee: least seconds between the captures of two items.
            jitter: With a guarantee: longest time in seconds from an item's capture until the source gives it; None means a tenth
                of the shorter of period and deadline.
            name: With a guarantee: names the stream in messages.

        Returns:
            An iterator of ``StreamResult`` in the source's order. Errors of the source, and of the device, are raised from it.

        Raises:
            InvalidArgument: Two inputs have the same name, or an argument is illegal.
        """
        if on_late not in ("drop", "deliver"):
            raise InvalidArgument(f"on_late: expected drop or deliver, got {on_late!r}")
        _check_source(source)
        check_guarantee(guarantee)
        rank = self._priority if priority is None else priority_of(priority)
        given = _StreamArguments(
            source, item_writer(self._inputs, self._input_indexes, into), on_late == "drop"
        )
        if guarantee:
            terms = stated_terms(name, period, deadline, jitter)
            return self._reserved_stream(given, terms, rank, measure=measure, is_best=guarantee == "best")
        if period is not None or jitter is not None:
            raise InvalidArgument("stream: period and jitter are terms of a guarantee; write guarantee=True")
        if deadline is not None and not callable(deadline):
            raise InvalidArgument(
                f"stream, deadline: expected a function from an item to its deadline, got {deadline!r}; "
                "write deadline=lambda item: aionn.after(seconds)"
            )
        pump = StreamPump(
            self._pool,
            self._background,
            source,
            functools.partial(self._run, priority=rank, measure=measure, copy=False),
            write=given.write,
            deadline=deadline,
            drops_late=given.drops_late,
            device_slots=sum(len(opened) if isinstance(opened, list) else 1 for opened in self._opened),
            on_end=self._streams.discard,
        )
        self._streams.add(pump)
        return Stream(pump)

    def _reserved_stream(
        self, given: _StreamArguments, terms: StreamTerms, rank: Priority, *, measure: bool, is_best: bool
    ) -> GuaranteedStream[Any]:
        if len(self._plan.steps) != 1 or self._plan.steps[0].interpreted is not None:
            raise InvalidArgument(
                "stream: a guarantee needs a model that one device runs as a whole; this one runs in "
                f"{len(self._plan.steps)} steps on {self._plan.device_names}, with control flow or between devices"
            )
        self._check_buffers(terms)
        guarantee = StreamGuarantee(
            self._plan.steps[0].device.reservations,
            self._learnt_by[0],
            terms,
            declared_ns=self._plan.steps[0].prepared.expected_duration_ns,
            is_best=is_best,
            run=functools.partial(self._run_reserved, priority=rank, measure=measure),
            warm_up=self._warm_up,
            check=self._check_buffers,
        )
        pump = ReservedPump(
            self._pool,
            self._background,
            given.source,
            guarantee.execute,
            write=given.write,
            deadline=capture_deadline(guarantee),
            drops_late=given.drops_late,
            device_slots=self._pool.slots,
            on_end=self._streams.discard,
            guarantee=guarantee,
        )
        self._streams.add(pump)
        return GuaranteedStream(pump)

    def _check_buffers(self, terms: StreamTerms) -> None:
        """Refuses terms for which the burst has too few buffers: frames would be lost while they wait for one."""
        needed = in_progress_max(terms) + 1
        if needed > self._pool.slots:
            raise InvalidArgument(
                f'stream "{terms.name}": up to {needed - 1} of its frames are in progress between their captures and deadlines, and'
                f" its consumer has one; expected a burst with {needed} slots or more, got {self._pool.slots}"
            )

    async def _warm_up(self) -> Result:
        """Executes what is in a free buffer, whatever it is; before all best effort, which could keep it waiting without end."""
        pool = self._pool
        buffer = pool.take_free() or await pool.take(None)
        try:
            buffer.users += 1
            leave = self._leaving[buffer.identifier]
            steps = self._steps_of[buffer.identifier]
            job = ExecutionJob(self._owner, steps, leave, Priority.HIGH, area=buffer.area, copy=False)
            job.urgent_ns = job.asked_ns
            return await run_job(job)
        finally:
            pool.leave(buffer)

    def _run_reserved(
        self,
        buffer: FrameBuffer,
        deadline_ns: int | None,
        *,
        arrival: FrameArrival | None,
        priority: Priority,
        measure: bool,
    ) -> Coroutine[Any, Any, Result]:
        """As ``_run``, for a frame of a stream with a guarantee."""
        if arrival is None:
            return self._run(buffer, deadline_ns, priority, measure, False)
        buffer.users += 1

        def finish(job: ExecutionJob) -> None:
            self._pool.leave(buffer)
            arrival.ended()

        job = ExecutionJob(
            self._owner,
            self._steps_of[buffer.identifier],
            finish,
            priority,
            area=buffer.area,
            deadline_ns=deadline_ns,
            measure=measure,
            copy=False,
            server=arrival,
        )
        return run_job(job)

    async def aclose(self) -> None:
        """Ends its streams and frees it at the driver. Waits for a running execution, but not without a limit. Idempotent.

        Cancelled, it is closed all the same before the cancellation is raised.
        """
        if self._closed:
            return
        self._background.home.check("burst")
        self._closed = True
        self._pool.close()
        self._on_close(self)
        for pump in list(self._streams):
            pump.cancel()
        try:
            await finish(self._close())
        finally:
            self._pool.clear()
            self._steps_of.clear()
            self._leaving.clear()

    async def _close(self) -> None:
        with anyio.move_on_after(CLOSE_S_MAX):
            for opened in self._opened:
                for burst in opened if isinstance(opened, list) else opened.bursts:
                    await burst.landed()
        await _close_all(self._opened, self._kept)
        self._finalizer.detach()  # Not before: a closing that failed is tried again when this object is dropped.
        # Completion callbacks run in the loop's next turn: wait for them before closing returns.
        await anyio.lowlevel.checkpoint()


def _check_source(source: object) -> None:
    if isinstance(source, AsyncIterable):
        return
    advice = ""
    if callable(source):
        advice = "; call it, if it is an async generator function"
    elif isinstance(source, Iterable):
        advice = "; make it one by an async generator (async def and yield), or by aionn.media.Source"
    raise InvalidArgument(f"stream: expected an async iterable, got a {type(source).__name__}{advice}")


def _leave(pool: SlotPool, buffer: FrameBuffer, job: ExecutionJob) -> None:
    pool.leave(buffer)


async def _close_all(opened: Sequence[list[DeviceBurst] | InterpretedBurst], kept: _Kept) -> None:
    closings: list[Callable[[], Coroutine[Any, Any, None]]] = []
    for bursts in opened:
        closings += [b.hal.aclose for b in bursts] if isinstance(bursts, list) else [bursts.aclose]
    try:
        await finish_all(closings)
    finally:
        kept.release()


class _Kept:
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


def _touched_area(values: Sequence[Value], kept: _Kept) -> RequestArea:
    area = RequestArea(values)
    array = area.memories[0].array
    array[:: mmap.PAGESIZE] = 0
    kept.keep(array)
    return area

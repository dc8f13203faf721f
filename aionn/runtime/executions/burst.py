"""Bursts as an application sees them: one execution after the other, through memory and queues that stay.

Owns the memory and the device's bursts, from opening to closing. ``slot_pool`` orders those that wait for a buffer, ``stream`` the
results of a stream.

Invariants:
1. A buffer is used again only when both the device and the consumer are done with it, and so is the device's own burst.
2. Nothing of a stream outlives its burst: closing the burst ends the stream's tasks.
3. Every frame is executed once, by the plan that its buffer was made for. The bursts of a plan that was replaced end when no frame
   uses them any more.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import anyio
import anyio.lowlevel
import anyio.to_thread

from aionn.errors import ExecutionCancelled, InvalidArgument, ResourceExhausted, shortages_raised, status_of
from aionn.hal import Priority, whole_number
from aionn.platform.loops import finish, finish_all
from aionn.runtime.background import Background, InThisProcess
from aionn.runtime.clock import check_deadline, now_ns
from aionn.runtime.dropping import close_when_dropped
from aionn.runtime.executions.job import ExecutionJob, JobOwner, run_job
from aionn.runtime.executions.lent import LentSlot
from aionn.runtime.executions.opened_plan import (
    KeptAreas,
    OpenedPlan,
    check_known_shapes,
    job_of,
)
from aionn.runtime.executions.results import PriorityName, Result, flag_of, priority_of
from aionn.runtime.executions.slot_pool import BurstStatistics, FrameBuffer, SlotPool, nothing
from aionn.runtime.executions.source_task import check_source
from aionn.runtime.executions.stepping import DeviceBurst, InterpretedBurst
from aionn.runtime.executions.stream import Stream, StreamPump
from aionn.runtime.executions.writing import StreamArguments, ViewsWriter, item_writer
from aionn.runtime.guarantees.arrivals import FrameArrival
from aionn.runtime.guarantees.guarantee import StreamGuarantee
from aionn.runtime.guarantees.stream import GuaranteedStream, ReservedPump, capture_deadline
from aionn.runtime.guarantees.terms import Seconds, at_phase, check_guarantee, in_progress_max, stated_terms
from aionn.runtime.memory.arguments import Array, check_inputs
from aionn.runtime.memory.real_values import Writer
from aionn.runtime.memory.usual import usual_input
from aionn.runtime.metrics.figures import CompilationFigures
from aionn.scheduler.admission import StreamTerms
from aionn.validation import needed_inputs

if TYPE_CHECKING:
    from aionn.runtime.placement.plan import Plan

__all__ = ["Burst"]

SLOTS_MAX = 64
"""Most request memories of one burst: frames that wait in a burst only get older."""

CLOSE_S_MAX = 1.0
"""Limit of the wait of closing for a running execution; then the burst ends anyway."""

_T = TypeVar("_T")


class Burst(InThisProcess):
    """Repeated executions of one compilation. Use it with ``async with``; made by ``Compilation.burst``."""

    def __init__(
        self,
        background: Background,
        plan: Plan,
        owner: JobOwner,
        priority: Priority,
        slots: int,
        *,
        polling: Mapping[str, int] | None = None,
        figures: CompilationFigures | None = None,
        on_close: Callable[[Burst], None],
    ) -> None:
        slots = whole_number(slots, "burst, slots")
        if not 1 <= slots <= SLOTS_MAX:
            raise InvalidArgument(f"burst: expected from 1 to {SLOTS_MAX} slots, got {slots}")
        check_known_shapes(plan)
        self._background, self._plan, self._owner = background, plan, owner
        self._inputs = plan.inputs
        self._usual = usual_input(plan.inputs)
        self._needed = functools.cache(functools.partial(needed_inputs, plan.model))
        self._priority, self._figures = priority, figures
        self._polling = polling or {}
        self._pool = SlotPool(background, slots)
        self._opening = anyio.Lock(fast_acquire=True)
        # The plan that frames use now is the last one; those before it are used by frames that have not ended.
        self._plans: list[OpenedPlan] = []
        self._streams: set[StreamPump] = set()
        self._on_close = on_close
        self._was_entered = self._closed = False
        self._finalizer = close_when_dropped(self, background, functools.partial(_close_all, self._plans))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._was_entered else "not entered"
        return f"<Burst {state}, on {self._plan.device_names}, {len(self._streams)} streams>"

    @property
    def _opened(self) -> list[list[DeviceBurst] | InterpretedBurst]:
        return self._plans[-1].opened if self._plans else []

    @shortages_raised("burst")
    async def __aenter__(self) -> Self:
        if self._was_entered or self._closed:
            raise InvalidArgument("burst: can be entered once; call net.burst() again")
        self._was_entered = True
        try:
            async with self._opening:
                opened = OpenedPlan(self._plan, self._owner, KeptAreas(self._background.locks))
                self._plans.append(opened)
                await opened.open(self._pool, self._polling)
                self._pool.open(opened.buffers)
        except BaseException:
            await self.aclose()
            raise
        return self

    @property
    def was_entered(self) -> bool:
        """Whether it has bursts of its plan, or is opening them."""
        return self._was_entered and not self._closed

    def check_unreserved(self) -> None:
        """Raises ``InvalidArgument`` where a stream with a guarantee runs: its time is reserved for the present model."""
        if any(isinstance(pump, ReservedPump) for pump in self._streams):
            raise InvalidArgument(
                "replace: a stream with a guarantee runs in a burst of this compilation, whose device time is reserved for the"
                " present model; end the stream first"
            )

    async def open_beside(self, plan: Plan, owner: JobOwner) -> OpenedPlan | None:
        """Opens bursts of another plan with the same inputs and outputs, for ``replace``. Raises as entering.

        Returns:
            The bursts, for ``replace`` or ``aclose``; None if this burst is not open.
        """
        check_known_shapes(plan)
        if not self.was_entered:
            return None
        self.check_unreserved()
        async with self._opening:
            opened = OpenedPlan(plan, owner, KeptAreas(self._background.locks))
            try:
                await opened.open(self._pool, self._polling)
            except BaseException:
                await finish(opened.aclose())
                raise
            return opened

    def replace(
        self,
        plan: Plan,
        owner: JobOwner,
        opened: OpenedPlan | None,
        figures: CompilationFigures | None,
        ended: Callable[[], None],
    ) -> None:
        """Has each frame that is put into a buffer from now on executed by another plan.

        Args:
            plan: The plan.
            owner: The common part of its executions.
            opened: The result of ``open_beside``; None for a burst that is not open.
            figures: Count the streams that begin from now on; None without metrics.
            ended: Called when no frame uses the present plan any more, and its bursts have ended.
        """
        self._plan, self._owner, self._figures = plan, owner, figures
        self._needed = functools.cache(functools.partial(needed_inputs, plan.model))
        if opened is None or self._closed:
            ended()
            if opened is not None:
                self._background.close_soon(opened.aclose)
            return
        before = self._plans[-1]
        before.ended = ended
        before.when_unused(functools.partial(self._end_plan, before))
        self._plans.append(opened)
        self._pool.replace(opened.buffers)

    def _end_plan(self, opened: OpenedPlan) -> None:
        async def end() -> None:
            await opened.aclose()
            if opened in self._plans:
                self._plans.remove(opened)

        if not self._closed:
            self._background.close_soon(end)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (
            value is None or self._background.home.is_here
        ):  # A forked child leaves with an error of its own: that counts.
            await self.aclose()

    def statistics(self) -> BurstStatistics:
        """Counts of its buffers, and of those that use them."""
        return self._pool.statistics()

    async def _waited_for(self, deadline_ns: int | None, priority: Priority) -> FrameBuffer:
        """Waits for a buffer. Raises as ``SlotPool.take``; an execution that gets none ends here, and is counted."""
        job = ExecutionJob(self._owner, (), nothing, priority, deadline_ns=deadline_ns)
        try:
            return await self._pool.take(deadline_ns)
        except Exception as e:
            job.note_end(status_of(e), None)
            raise
        except BaseException:
            job.note_end(ExecutionCancelled("burst: cancelled").status, None, is_cancelled=True)
            raise

    def _run(
        self,
        buffer: FrameBuffer,
        deadline_ns: int | None,
        priority: Priority,
        measure: bool,
        copy: bool,
    ) -> Coroutine[Any, Any, Result]:
        """Executes what is in a buffer, which the execution uses from now on, beside its present user."""
        buffer.users += 1
        step = buffer.steps[0]
        work = None if measure else step.pass_through(priority, deadline_ns)
        if work is not None:
            return step.run_directly(work, priority, deadline_ns, copy=copy)
        return run_job(job_of(buffer, deadline_ns, priority, measure, copy))

    async def execute(
        self,
        inputs: Sequence[Any],
        *,
        deadline: int | None = None,
        priority: PriorityName | Priority | None = None,
        measure: bool = False,
    ) -> Result:
        """Executes once. Waits for a free slot first; arguments, result and errors are those of ``Compilation.execute``, but
        inputs are arrays, buffers or DLPack objects: a memory is an input of ``lend``'s slots, or of ``Compilation.execute``.

        The deadline covers the wait for the slot as well.
        """
        if deadline is not None:
            deadline = check_deadline(deadline, where="burst")
        if measure is not False:
            measure = flag_of(measure, "measure")
        usual = self._usual
        if usual is not None and type(inputs) is list and len(inputs) == 1 and usual.is_form_of(inputs[0]):
            values: Sequence[Array | None] = (inputs[0],)
        else:
            values = check_inputs(self._inputs, inputs, self._needed)
        rank = self._priority if priority is None else priority_of(priority)
        pool = self._pool
        asked_ns = 0
        buffer = pool.take_free()
        if buffer is None:
            asked_ns = now_ns()
            buffer = await self._waited_for(deadline, rank)
        try:
            for view, value in zip(buffer.views, values):
                if value is not None:
                    view[...] = value  # The check has compared their types.
            if self._background.starting_count:
                await anyio.lowlevel.checkpoint()
            # As ``_run``, but the execution takes the buffer over: it leaves it when the device is done.
            work = None if asked_ns or measure else buffer.steps[0].pass_through(rank, deadline)
            job = job_of(buffer, deadline, rank, measure, True) if work is None else None
        except BaseException:
            pool.leave(buffer)
            raise
        if work is not None:
            return await buffer.steps[0].run_directly(work, rank, deadline, copy=True)
        assert job is not None, "made where it did not pass through"
        if asked_ns:
            job.asked_ns = asked_ns
        return await run_job(job)

    def lend(self) -> LentSlot:
        """Lends a slot whose inputs the caller fills in place, such as by a camera's driver. Its other slots serve as before.

        A lent slot keeps the model that it was lent for when the compilation gets another one (``Compilation.replace``).

        Raises:
            InvalidArgument: The burst is not open.
            ResourceExhausted: Every slot is in use; transient.
        """
        buffer = self._pool.take_free()
        if buffer is None:
            raise ResourceExhausted(
                f"burst: expected a free slot to lend, all {self._pool.slots} are in use", transient=True
            )
        return LentSlot(self._pool, buffer, self._run_lent)

    def _run_lent(
        self, buffer: FrameBuffer, deadline_ns: int | None, priority: Priority | None, measure: bool
    ) -> Coroutine[Any, Any, Result]:
        if self._closed:
            raise InvalidArgument("burst: closed; use it inside its async with, or call net.burst() again")
        self._background.home.check("slot")
        return self._run(buffer, deadline_ns, self._priority if priority is None else priority, measure, True)

    # A lambda gets the types of its arguments from one kind of function at a time.
    @overload
    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | None = None,
        deadline: Callable[[_T], int] | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: PriorityName | Priority | None = None,
        measure: bool = False,
        guarantee: Literal[False] = False,
    ) -> Stream[_T]: ...

    @overload
    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: ViewsWriter,
        deadline: Callable[[_T], int] | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: PriorityName | Priority | None = None,
        measure: bool = False,
        guarantee: Literal[False] = False,
    ) -> Stream[_T]: ...

    @overload
    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | None = None,
        deadline: Seconds | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: PriorityName | Priority | None = None,
        measure: bool = False,
        guarantee: Literal[True, "best", "phased"],
        period: Seconds,
        jitter: Seconds | None = None,
        name: str = "stream",
        phase_ns: int | None = None,
    ) -> GuaranteedStream[_T]: ...

    @overload
    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: ViewsWriter,
        deadline: Seconds | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: PriorityName | Priority | None = None,
        measure: bool = False,
        guarantee: Literal[True, "best", "phased"],
        period: Seconds,
        jitter: Seconds | None = None,
        name: str = "stream",
        phase_ns: int | None = None,
    ) -> GuaranteedStream[_T]: ...

    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | ViewsWriter | None = None,
        deadline: Callable[[_T], int] | Seconds | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: PriorityName | Priority | None = None,
        measure: bool = False,
        guarantee: bool | Literal["best", "phased"] = False,
        period: Seconds | None = None,
        jitter: Seconds | None = None,
        name: str = "stream",
        phase_ns: int | None = None,
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
                a reservation where there is no room; ``"phased"`` is for captures at equal gaps: more streams fit, but the
                reservation ends if the source moves to where there is no room. See ``GuaranteedStream``, which is returned.
            period: With a guarantee: least seconds between the captures of two items.
            jitter: With a guarantee: longest time in seconds from an item's capture until the source gives it; None means a tenth
                of the shorter of period and deadline.
            name: With a guarantee: names the stream in messages.
            phase_ns: With ``"phased"``: the time of any capture on the monotonic clock; None chooses ``reservation.phase_ns``.

        Returns:
            An iterator of ``StreamResult`` in the source's order. Errors of the source, and of the device, are raised from it.

        Raises:
            InvalidArgument: Two inputs have the same name, or an argument is illegal.
        """
        if not isinstance(on_late, str) or on_late not in ("drop", "deliver"):
            raise InvalidArgument(f"on_late: expected drop or deliver, got {on_late!r}")
        check_source(source)
        check_guarantee(guarantee, phase_ns)
        measure = flag_of(measure, "measure")
        rank = self._priority if priority is None else priority_of(priority)
        writer = item_writer(self._inputs, into)
        given = StreamArguments(source, writer, on_late == "drop", rank, measure)
        if guarantee:
            terms = stated_terms(name, period, deadline, jitter)
            if guarantee == "phased":
                terms = at_phase(terms, now_ns() if phase_ns is None else phase_ns)
            return self._reserved_stream(given, terms, guarantee, chooses_phase=phase_ns is None)
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
            on_end=self._end_stream,
            figures=None if self._figures is None else self._figures.stream(),
        )
        self._streams.add(pump)
        return Stream(pump)

    def _end_stream(self, pump: StreamPump) -> None:
        self._streams.discard(pump)
        if pump.figures is not None:
            pump.figures.is_open = False

    def _reserved_stream(
        self, given: StreamArguments, terms: StreamTerms, guarantee: bool | str, *, chooses_phase: bool
    ) -> GuaranteedStream[Any]:
        if len(self._plan.steps) != 1 or self._plan.steps[0].interpreted is not None:
            raise InvalidArgument(
                "stream: a guarantee needs a model that one device runs as a whole; this one runs in "
                f"{len(self._plan.steps)} steps on {self._plan.device_names}, with control flow or between devices"
            )
        if not self._plans:
            raise InvalidArgument("burst: use it with async with")
        self._check_buffers(terms)
        admitted = StreamGuarantee(
            self._plan.steps[0].device.reservations,
            self._plans[-1].keys[0],
            terms,
            declared_ns=self._plan.steps[0].prepared.expected_duration_ns,
            is_best=guarantee == "best",
            run=functools.partial(self._run_reserved, priority=given.rank, measure=given.measure),
            warm_up=self._warm_up,
            check=self._check_buffers,
            chooses_phase=guarantee == "phased" and chooses_phase,
            threads=self._plans[-1].executing_threads,
        )
        pump = ReservedPump(
            self._pool,
            self._background,
            given.source,
            admitted.execute,
            write=given.write,
            deadline=capture_deadline(admitted),
            drops_late=given.drops_late,
            device_slots=self._pool.slots,
            on_end=self._end_stream,
            figures=None if self._figures is None else self._figures.stream(),
            guarantee=admitted,
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
            job = ExecutionJob(
                buffer.owner, buffer.steps, buffer.leave, Priority.HIGH, area=buffer.area, copy=False
            )
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
            buffer.owner,
            buffer.steps,
            finish,
            priority,
            area=buffer.area,
            deadline_ns=deadline_ns,
            measure=measure,
            copy=False,
            server=arrival,
            served=None if arrival.held.grant is None else arrival,
        )
        return run_job(job)

    def close_streams(self) -> None:
        """Ends its streams: an error for their consumers, unless the running task is the consumer."""
        for pump in list(self._streams):
            pump.close()

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
        self.close_streams()
        try:
            await finish(self._close())
        finally:
            self._pool.clear()

    async def _close(self) -> None:
        async with self._opening:  # Bursts that are being opened are closed as well.
            with anyio.move_on_after(CLOSE_S_MAX):
                for opened in self._plans:
                    await opened.landed()
            await _close_all(self._plans)
        self._finalizer.detach()  # Not before: a closing that failed is tried again when this object is dropped.
        # Completion callbacks run in the loop's next turn: wait for them before closing returns.
        await anyio.lowlevel.checkpoint()


async def _close_all(plans: Sequence[OpenedPlan]) -> None:
    await finish_all([opened.aclose for opened in plans])

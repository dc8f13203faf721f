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
import mmap
from collections.abc import AsyncIterable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

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
from aionn.platform.loops import finish, finish_all
from aionn.platform.real_work import real_work
from aionn.realtime import PageLocks
from aionn.runtime.background import Background
from aionn.runtime.clock import check_deadline
from aionn.runtime.dropping import close_when_dropped
from aionn.runtime.executions.job import ExecutionJob, JobOwner, run_job
from aionn.runtime.executions.results import Result, priority_of
from aionn.runtime.executions.slot_pool import BurstStatistics, FrameBuffer, SlotPool, nothing
from aionn.runtime.executions.stepping import (
    Conditions,
    DeviceBurst,
    InterpretedBurst,
    Step,
)
from aionn.runtime.executions.stream import Stream, StreamPump
from aionn.runtime.memory.arguments import (
    Array,
    RequestArea,
    TensorSpec,
    Value,
    Writer,
    check_inputs,
)
from aionn.runtime.metrics.figures import CompilationFigures
from aionn.runtime.placement.plan import learnt_by
from aionn.validation import check_execution_result, needed_inputs

if TYPE_CHECKING:
    from aionn.runtime.placement.plan import Plan

__all__ = ["Burst"]

SLOTS_MAX = 64
"""Most request memories of one burst: frames that wait in a burst only get older."""

CLOSE_S_MAX = 1.0
"""Limit of the wait of closing for a running execution; then the burst ends anyway."""

_T = TypeVar("_T")

ViewsWriter = Callable[[Any, Mapping[str, Array]], Mapping[str, Any] | None]
"""Writes a value of an application into views of several inputs, by their names; or returns arrays for some of them."""


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


class OpenedPlan:
    """A plan as a burst executes it: the device's bursts, and buffers.

    Args:
        plan: The plan.
        owner: What its executions have in common.
        kept: The memories of the buffers that stay in memory.

    Attributes:
        plan: See above.
        owner: See above.
        opened: Of each step, its device's bursts, or those of the steps inside of one that is interpreted.
        buffers: One for each slot of the burst.
        left: Number of buffers that may still be used.
        ended: Called once when it has ended, where it was replaced.
    """

    def __init__(self, plan: Plan, owner: JobOwner, kept: _Kept) -> None:
        self.plan = plan
        self.owner = owner
        self.opened: list[list[DeviceBurst] | InterpretedBurst] = []
        self.buffers: list[FrameBuffer] = []
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
        keys = learnt_by(self.plan, self)
        for identifier in range(pool.slots):
            # On a thread, with every page touched: the kernel takes a while to find and clear memory.
            with real_work("making a burst's memory"):
                area = await anyio.to_thread.run_sync(_touched_area, values, self._kept)
            indexes = self.plan.model.main.input_indexes
            buffer = FrameBuffer(identifier, area, len(self.plan.steps), self.owner, indexes)
            buffer.leave = functools.partial(_leave, pool, buffer)
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

    async def landed(self) -> None:
        """Waits until nothing runs through it."""
        for opened in self.opened:
            for burst in opened if isinstance(opened, list) else opened.bursts:
                await burst.landed()

    async def aclose(self) -> None:
        """Ends the device's bursts. Idempotent."""
        closings: list[Callable[[], Coroutine[Any, Any, None]]] = []
        for bursts in self.opened:
            closings += [b.hal.aclose for b in bursts] if isinstance(bursts, list) else [bursts.aclose]
        try:
            await finish_all(closings)
        finally:
            self._kept.release()
            for buffer in self.buffers:
                _take_apart(buffer)
            self.buffers.clear()
            ended, self.ended = self.ended, None
            if ended is not None:
                ended()


def _take_apart(buffer: FrameBuffer) -> None:
    # Each refers to it.
    buffer.steps, buffer.leave, buffer.retire = (), nothing, nothing


class Burst:
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
        if not 1 <= slots <= SLOTS_MAX:
            raise InvalidArgument(f"burst: expected from 1 to {SLOTS_MAX} slots, got {slots}")
        check_known_shapes(plan)
        self._background = background
        self._plan, self._owner = plan, owner
        self._inputs = plan.inputs
        self._needed = functools.cache(functools.partial(needed_inputs, plan.model))
        self._priority = priority
        self._polling = polling or {}
        self._figures = figures
        self._pool = SlotPool(background, slots)
        self._opening = anyio.Lock(fast_acquire=True)
        # The plan that frames use now is the last one; those before it are used by frames that have not ended.
        self._plans: list[OpenedPlan] = []
        self._was_entered = False
        self._streams: set[StreamPump] = set()
        self._on_close = on_close
        self._closed = False
        self._finalizer = close_when_dropped(self, background, functools.partial(_close_all, self._plans))

    @property
    def _opened(self) -> list[list[DeviceBurst] | InterpretedBurst]:
        return self._plans[-1].opened if self._plans else []

    async def __aenter__(self) -> Self:
        if self._was_entered or self._closed:
            raise InvalidArgument("burst: can be entered once")
        self._was_entered = True
        try:
            async with self._opening:
                opened = OpenedPlan(self._plan, self._owner, _Kept(self._background.locks))
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

    async def open_beside(self, plan: Plan, owner: JobOwner) -> OpenedPlan | None:
        """Opens bursts of another plan with the same inputs and outputs, for ``replace``. Raises as entering.

        Returns:
            The bursts, for ``replace`` or ``aclose``; None if this burst is not open.
        """
        check_known_shapes(plan)
        if not self.was_entered:
            return None
        async with self._opening:
            opened = OpenedPlan(plan, owner, _Kept(self._background.locks))
            try:
                await opened.open(self._pool, self._polling)
            except BaseException:
                await finish(opened.aclose())
                raise
            return opened

    def replace(
        self, plan: Plan, owner: JobOwner, opened: OpenedPlan | None, ended: Callable[[], None]
    ) -> None:
        """Has each frame that is put into a buffer from now on executed by another plan.

        Args:
            plan: The plan.
            owner: What its executions have in common.
            opened: The result of ``open_beside``; None for a burst that is not open.
            ended: Called when no frame uses the present plan any more, and its bursts have ended.
        """
        self._plan, self._owner = plan, owner
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
            buffer.owner,
            buffer.steps,
            buffer.leave,
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
            buffer.area.write(buffer.inputs, values)
            if self._background.starting_count:
                await anyio.lowlevel.checkpoint()
            return await self._run(buffer, deadline, rank, measure, True)
        finally:
            pool.leave(buffer)

    def stream(
        self,
        source: AsyncIterable[_T],
        *,
        into: Writer | ViewsWriter | None = None,
        deadline: Callable[[_T], int] | None = None,
        on_late: Literal["drop", "deliver"] = "drop",
        priority: str | Priority | None = None,
        measure: bool = False,
    ) -> Stream[_T]:
        """Executes every item of a source; iterate over the result with ``async for``.

        Args:
            source: Gives arrays for the model's only input, mappings from the names of inputs to arrays where it has several, or
                anything that ``into`` can write. ``aionn.media.joined`` makes one source of two.
            into: Writes an item straight into shared memory, as ``into(item, view)``; None copies arrays. See ``image_writer``. For
                a model with several inputs ``into(item, views)`` gets a mapping from the inputs' names to views, and writes all of
                them: a view has the values of an earlier item before. ``into`` may also return such a mapping of arrays, for inputs
                that it has not written.
            deadline: From an item to its absolute deadline in nanoseconds; None means no deadlines.
            on_late: ``drop``: an item that is late, or becomes late while running, gives a result without outputs, at its deadline.
                ``deliver``: it is executed all the same and its result is marked late.
            priority: Against other executions; None takes the compilation's.
            measure: Whether ``timing`` is wanted.

        Returns:
            An iterator of ``StreamResult`` in the source's order. Errors of the source, and of the device, are raised from it.

        Raises:
            InvalidArgument: Two inputs have the same name, or an argument is illegal.
        """
        if on_late not in ("drop", "deliver"):
            raise InvalidArgument(f"on_late: expected drop or deliver, got {on_late!r}")
        _check_source(source)
        if deadline is not None and not callable(deadline):
            raise InvalidArgument(
                f"stream, deadline: expected a function from an item to its deadline, got {deadline!r}; "
                "write deadline=lambda item: aionn.after(seconds)"
            )
        rank = self._priority if priority is None else priority_of(priority)
        pump = StreamPump(
            self._pool,
            self._background,
            source,
            functools.partial(self._run, priority=rank, measure=measure, copy=False),
            write=self._item_writer(into),
            deadline=deadline,
            drops_late=on_late == "drop",
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

    def _item_writer(self, into: Callable[[Any, Any], object] | None) -> Callable[[Any, FrameBuffer], object]:
        if into is not None and not callable(into):
            raise InvalidArgument(
                f"stream, into: expected a function into(item, view), got a {type(into).__name__}; see aionn.image_writer"
            )
        if len(self._inputs) == 1:
            write = into or _array_writer(self._inputs[0])

            def write_one(item: Any, buffer: FrameBuffer) -> None:
                write(item, buffer.area.view(buffer.inputs[0]).view())

            return write_one
        if not self._inputs or len({spec.name for spec in self._inputs}) != len(self._inputs):
            names = ", ".join(spec.name for spec in self._inputs)
            raise InvalidArgument(
                f"stream: expected a model whose inputs have different names, got {names or 'none'}"
            )
        return _ItemWriter(self._inputs, into)

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

    async def _close(self) -> None:
        async with self._opening:  # Bursts that are being opened are closed as well.
            with anyio.move_on_after(CLOSE_S_MAX):
                for opened in self._plans:
                    await opened.landed()
            await _close_all(self._plans)
        self._finalizer.detach()  # Not before: a closing that failed is tried again when this object is dropped.
        # Completion callbacks run in the loop's next turn: wait for them before closing returns.
        await anyio.lowlevel.checkpoint()


def check_known_shapes(plan: Plan) -> None:
    """Checks that memory can be made for the executions of a plan before its first one.

    Raises:
        InvalidArgument: A shape is unknown.
    """
    for spec in (*plan.inputs, *plan.outputs, *plan.temporaries.values()):
        if not dimensions_are_known(spec.type, spec.dimensions):
            raise InvalidArgument(f"burst: expected known shapes, got {spec}")


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


async def _close_all(plans: Sequence[OpenedPlan]) -> None:
    await finish_all([opened.aclose for opened in plans])


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


class _ItemWriter:
    """Writes items of a stream into several inputs, by their names."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        into: Callable[[Any, Mapping[str, Array]], object] | None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._into = into

    def __call__(self, item: Any, buffer: FrameBuffer) -> None:
        area = buffer.area
        views = {name: area.view(key).view() for name, key in zip(self._specs, buffer.inputs, strict=True)}
        if self._into is None:
            self._copy(item, views, is_whole=True)
            return
        given = self._into(item, views)
        if given is not None:
            self._copy(given, views, is_whole=False)

    def _copy(self, values: Any, views: Mapping[str, Array], *, is_whole: bool) -> None:
        names = ", ".join(self._specs)
        if not isinstance(values, Mapping):
            raise InvalidArgument(
                f"stream: expected a mapping from the names of inputs ({names}) to arrays, got a {type(values).__name__}"
            )
        unknown = [name for name in values if name not in views]
        missing = [name for name in views if name not in values] if is_whole else []
        if unknown or missing:
            wrong = f"{unknown[0]!r}, which the model lacks" if unknown else f"no {missing[0]!r}"
            raise InvalidArgument(f"stream: expected arrays for {names}; got {wrong}")
        for name, value in values.items():
            (array,) = check_inputs([self._specs[name]], [value])
            if array is None:
                raise InvalidArgument(f"stream: expected an array for {name}, got None")
            views[name][...] = array


def _array_writer(spec: TensorSpec) -> Writer:
    def write(value: Any, view: Array) -> None:
        (array,) = check_inputs([spec], [value])
        if array is None:
            raise InvalidArgument(f"stream: expected an array for {spec.name}, got None")
        view[...] = array

    return write

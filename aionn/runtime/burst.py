"""Bursts as an application sees them: one execution after the other, or a stream of frames.

Owns request memory in slots (while one request runs, the next is filled), the order of results, and what happens to frames that are
late.

Invariants:
1. Results of a stream come in the order of its source.
2. A slot is used again only when both the device and the consumer are done with it, and so is the device's own.
3. Nothing of a stream outlives its burst: closing the burst ends the stream's task.
4. An execution that is cancelled keeps its slots until the device has answered.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from aionn.errors import Error, GeneralFailure, InvalidArgument, MissedDeadline
from aionn.hal import Burst as HalBurst
from aionn.hal import ExecutionResult, Priority, Timing, check_deadline_ns, dimensions_are_known
from aionn.hal.real_work import real_work
from aionn.hal.tracing import section
from aionn.runtime.arguments import Array, RequestArea, TensorSpec, Value, Writer, check_inputs
from aionn.runtime.direct import execute_directly, hold
from aionn.runtime.execution import Execution, Result, Turn, failing, priority_of, result_of
from aionn.scheduler.work import Work
from aionn.validation import check_execution_result

if TYPE_CHECKING:
    from aionn.runtime.plan import Plan
    from aionn.runtime.runtime import Runtime

__all__ = ["Burst", "Stream", "StreamResult", "StreamStatistics"]

SLOTS_MAX = 64
"""Most request memories of one burst: frames that wait in a burst only get older."""

CLOSE_S_MAX = 1.0
"""How long closing waits for a running execution before it ends the burst anyway."""

_T = TypeVar("_T")
_Settle = Callable[[], Awaitable[None]]


class _Slot:
    """One execution's memory, the requests of its steps, and how many still use it."""

    def __init__(self, identifier: int, area: RequestArea, plan: Plan) -> None:
        self.identifier = identifier
        self.area = area
        # Nothing changes from frame to frame but the values, so the requests are made once.
        self.requests = [area.request(step.inputs, step.outputs) for step in plan.steps]
        self.identifiers = (identifier,)
        self.checked: list[ExecutionResult | None] = [None] * len(plan.steps)
        self.turns: dict[bool, list[Turn]] = {}
        self.users = 0


class _Line:
    """A burst of a device, and who may use it: one execution at a time."""

    __slots__ = ("free", "hal", "settle")

    def __init__(self, hal: HalBurst) -> None:
        self.hal = hal
        # Does not yield to the loop where there is nothing to wait for: the device's answer does.
        self.free = anyio.Semaphore(1, fast_acquire=True)
        # A burst in this process gives no answer to wait for when its caller is cancelled.
        self.settle: _Settle | None = getattr(hal, "settle", None)


class Burst:
    """Repeated executions of one compilation. Use it with ``async with``; made by ``Compilation.burst``."""

    def __init__(
        self,
        runtime: Runtime,
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
        self._runtime = runtime
        self._plan = plan
        self._inputs = plan.inputs
        self._input_indexes = plan.model.main.input_indexes
        self._output_indexes = plan.model.main.output_indexes
        self._device_names = plan.device_names
        self._priority = priority
        self._slot_count = slots
        self._polling = polling or {}
        self._slots: list[_Slot] = []
        self._unused: list[_Slot] = []
        self._free = anyio.Semaphore(0, fast_acquire=True)
        # Of each step as many as its device can use at a time: an execution in each, or the device would stand idle between two.
        self._lines: list[list[_Line]] = []
        self._opened = False
        self._streams: set[Stream[Any]] = set()
        self._on_close = on_close
        self._learnt_by = [object() for _ in plan.steps]
        self._report = report
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._opened or self._closed:
            raise InvalidArgument("burst: can be entered once")
        self._opened = True
        try:
            for step in self._plan.steps:
                lines: list[_Line] = []
                self._lines.append(lines)
                for _ in range(min(self._slot_count, step.device.info.slots)):
                    lines.append(_Line(await step.prepared.configure_execution_burst(**self._polling)))
            values = self._plan.values([spec.dimensions for spec in self._inputs], {})
            for identifier in range(self._slot_count):
                # On a thread, with every page touched: the kernel takes a while to find and clear memory.
                with real_work("making a burst's memory"):
                    area = await anyio.to_thread.run_sync(_touched_area, values)
                self._slots.append(_Slot(identifier, area, self._plan))
            # The first is taken first: a burst that is used by one alone keeps to one memory, which the caches know.
            self._unused = self._slots[::-1]
            for _ in self._slots:
                self._free.release()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _take(self) -> _Slot:
        if not self._slots or self._closed:
            raise InvalidArgument("burst: not open; use it with async with")
        await _acquired(self._free)
        slot = self._unused.pop()
        slot.users = 1
        return slot

    def _leave(self, slot: _Slot) -> None:
        slot.users -= 1
        if slot.users == 0:
            self._unused.append(slot)
            self._free.release()

    def _begin(
        self,
        slot: _Slot,
        deadline_ns: int | None,
        priority: Priority,
        measure: bool,
        *,
        copy: bool,
        failure: Error | None = None,
    ) -> Execution:
        """Starts an execution in the background; one whose only step has failed already goes on from there."""
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
        execution.start(self._runtime.background)
        return execution

    def _turns(self, slot: _Slot, measure: bool) -> list[Turn]:
        turns = slot.turns.get(measure)
        if turns is None:
            turns = [self._turn(slot, index, measure) for index in range(len(self._lines))]
            slot.turns[measure] = turns
        return turns

    def _line(self, slot: _Slot, index: int) -> _Line:
        """The burst through which a slot's requests go: always the same one, which learns its memory once."""
        lines = self._lines[index]
        return lines[slot.identifier % len(lines)]

    async def _run(self, slot: _Slot, index: int, measure: bool, deadline_ns: int | None) -> Timing:
        """Runs a step on a slot of its device that is had."""
        step = self._plan.steps[index]
        line = self._line(slot, index)
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
                raise GeneralFailure(
                    f"burst: {step.device.name} reports an output larger than the model says"
                )
            slot.area.note(step.outputs, result.output_shapes)
            slot.checked[index] = None if measure else result
        return result.timing

    def _turn(self, slot: _Slot, index: int, measure: bool) -> Turn:
        step = self._plan.steps[index]

        async def run(area: RequestArea, deadline_ns: int | None) -> Timing:
            return await self._run(slot, index, measure, deadline_ns)

        fall_back = self._plan.fall_back(index, measure)
        declared: int | None = getattr(step.prepared, "expected_duration_ns", None)
        return Turn(step.device.dispatcher, run, fall_back, self._learnt_by[index], declared)

    async def execute(
        self,
        inputs: Sequence[Any],
        *,
        deadline: int | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
    ) -> Result:
        """Executes once. Waits for a free slot first; arguments, result and errors are those of ``Compilation.execute``."""
        check_deadline_ns(deadline, where="burst")
        values = check_inputs(self._inputs, inputs)
        rank = self._priority if priority is None else self._priority_of(priority)
        slot = await self._take()
        try:
            slot.area.write(self._input_indexes, values)
            line = self._line(slot, 0)
            is_alone = len(self._lines) == 1 and line.settle is not None and self._report is None
            if deadline is None and is_alone:
                return await self._execute_directly(slot, line, rank, measure)
            return await result_of(self._begin(slot, deadline, rank, measure, copy=True))
        finally:
            self._leave(slot)

    async def _execute_directly(self, slot: _Slot, line: _Line, priority: Priority, measure: bool) -> Result:
        """Executes the only step in the caller's own task.

        Cancelled or failed, what is left is done in the background: waiting for the device's answer, or falling back.
        """
        turn = self._turns(slot, measure)[0]

        def abandon(work: Work) -> None:
            slot.users += 1
            ending = hold(functools.partial(_settled, line), turn, work)
            self._runtime.background.start_execution(ending, lambda task: self._leave(slot))

        async def recover(failure: Error) -> Result:
            return await result_of(self._begin(slot, None, priority, measure, copy=True, failure=failure))

        with section("LR_PE", self._device_names):
            return await execute_directly(
                turn,
                slot.area,
                self._output_indexes,
                device=self._device_names,
                priority=priority,
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
            deadline: From an item to its absolute deadline in nanoseconds; None for no deadlines.
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
        if not hasattr(source, "__aiter__"):
            raise InvalidArgument(f"stream: expected an async iterable, got a {type(source).__name__}")
        stream = Stream(
            self,
            source,
            into or _array_writer(self._inputs[0]),
            deadline,
            on_late,
            self._priority_of(priority),
            measure,
        )
        self._streams.add(stream)
        return stream

    def _priority_of(self, priority: str | Priority | None) -> Priority:
        return self._priority if priority is None else priority_of(priority)

    async def aclose(self) -> None:
        """Ends its streams and frees it at the driver. A running execution is waited for, but not for ever. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        for stream in list(self._streams):
            stream.cancel()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_S_MAX):
                for line in (line for lines in self._lines for line in lines):
                    async with line.free:
                        pass
            for line in (line for lines in self._lines for line in lines):
                await line.hal.aclose()
            # What has just ended is told in the loop's next turn: by now, who closes a burst may rely on it.
            await anyio.lowlevel.checkpoint()
        self._slots.clear()


async def _acquired(semaphore: anyio.Semaphore) -> None:
    """Acquires a semaphore; at a third of the cost where there is nothing to wait for."""
    if semaphore.value:
        semaphore.acquire_nowait()
    else:
        await semaphore.acquire()


async def _settled(line: _Line) -> None:
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


class StreamResult(msgspec.Struct, Generic[_T], frozen=True):
    """What became of one item of a stream.

    Attributes:
        item: The item.
        outputs: Read-only views of shared memory, valid until the next result is asked for; copy to keep. Empty when dropped.
        status: ``on_time``, ``late`` (executed, but after its deadline) or ``dropped`` (not there at its deadline).
        finished_ns: When its result was here, or when it was dropped.
        deadline_ns: Its deadline, None for none.
        timing: What the device measured.
    """

    item: _T
    outputs: tuple[Array, ...]
    status: Literal["on_time", "late", "dropped"]
    finished_ns: int
    deadline_ns: int | None
    timing: Timing

    @property
    def valid_until(self) -> str:
        """What ends the validity of ``outputs``: they are views of a slot that is used again."""
        return "the next result is asked for, or the stream ends"


class StreamStatistics(msgspec.Struct, frozen=True):
    """What became of a stream's items so far."""

    on_time: int
    late: int
    dropped: int


class Stream(AsyncIterator[StreamResult[_T]]):
    """The results of a stream; made by ``Burst.stream``."""

    def __init__(
        self,
        burst: Burst,
        source: AsyncIterable[_T],
        write: Writer,
        deadline: Callable[[_T], int] | None,
        on_late: str,
        priority: Priority,
        measure: bool,
    ) -> None:
        self._burst = burst
        self._source = source
        self._write = write
        self._deadline = deadline
        self._drop_late = on_late == "drop"
        self._priority = priority
        self._measure = measure
        self._scope = anyio.CancelScope()
        self._send, self._receive = anyio.create_memory_object_stream[
            tuple[_T, _Slot, Execution, int | None] | Exception
        ](burst._slot_count)
        self._started = False
        self._held: _Slot | None = None
        self._counts = {"on_time": 0, "late": 0, "dropped": 0}

    def __aiter__(self) -> Self:
        return self

    async def _feed(self) -> None:
        """Takes items, writes them into slots and starts them; the consumer reads the results."""
        with self._send, self._scope:
            try:
                async for item in self._source:
                    slot = await self._burst._take()
                    try:
                        (key,) = self._burst._plan.model.main.input_indexes
                        self._write(item, slot.area.view(key).view())
                        deadline_ns = None if self._deadline is None else self._deadline(item)
                        check_deadline_ns(deadline_ns, where="stream")
                        limit_ns = deadline_ns if self._drop_late else None
                        execution = self._burst._begin(
                            slot, limit_ns, self._priority, self._measure, copy=False
                        )
                    except BaseException:
                        self._burst._leave(slot)
                        raise
                    await self._send.send((item, slot, execution, deadline_ns))
            except anyio.BrokenResourceError:
                pass  # The consumer has closed the stream.
            except Exception as e:
                try:
                    await self._send.send(e)
                except anyio.BrokenResourceError:
                    pass

    async def __anext__(self) -> StreamResult[_T]:
        if not self._started:
            self._started = True
            self._burst._runtime.tasks.start_soon(self._feed)
        self._let_go()
        try:
            entry = await self._receive.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self.cancel()
            raise StopAsyncIteration from None
        if isinstance(entry, Exception):
            self.cancel()
            raise entry
        item, slot, execution, deadline_ns = entry
        self._held = slot
        outputs: tuple[Array, ...] = ()
        timing = Timing()
        try:
            result = await execution
            outputs, timing = result.outputs, result.timing
            late = deadline_ns is not None and execution.finished_ns > deadline_ns
            status: Literal["on_time", "late", "dropped"] = "late" if late else "on_time"
        except MissedDeadline:
            status = "dropped"
        except Error:
            self.cancel()
            raise
        self._counts[status] += 1
        return StreamResult(item, outputs, status, execution.finished_ns, deadline_ns, timing)

    def _let_go(self) -> None:
        slot, self._held = self._held, None
        if slot is not None:
            self._burst._leave(slot)

    def cancel(self) -> None:
        """Ends the stream: no further item is taken, nothing more is delivered. Idempotent."""
        self._scope.cancel()
        self._let_go()
        try:
            while True:
                entry = self._receive.receive_nowait()
                if not isinstance(entry, Exception):
                    entry[2].cancel()
                    self._burst._leave(entry[1])
        except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
            pass
        self._receive.close()
        if not self._started:
            self._send.close()
        self._burst._streams.discard(self)

    def statistics(self) -> StreamStatistics:
        """Counts so far."""
        return StreamStatistics(**self._counts)

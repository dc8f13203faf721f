"""A model made ready on one device or several, and the ways to execute it.

Owns request memory that is used again, the choice of the path (plain, fenced, burst), and the growth of outputs whose size only the
device knows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio.lowlevel
import anyio.to_thread

from aionn.errors import ErrorStatus, InvalidArgument
from aionn.hal import Priority, check_fences
from aionn.platform.loops import finish, finish_all
from aionn.platform.real_work import real_work
from aionn.runtime.background import Background
from aionn.runtime.clock import check_deadline, to_ns
from aionn.runtime.dropping import close_when_dropped
from aionn.runtime.executions.burst import Burst
from aionn.runtime.executions.execution import Execution, start
from aionn.runtime.executions.job import ExecutionJob, JobOwner, run_job
from aionn.runtime.executions.results import Result, priority_of
from aionn.runtime.memory.arguments import (
    AREAS_KEPT_MAX,
    BOUND,
    Array,
    Binding,
    RequestArea,
    check_inputs,
    output_target,
)
from aionn.runtime.memory.own import OwnMemory, bind, image_view
from aionn.runtime.placement.plan import LastValues, Plan, learnt_by
from aionn.validation import needed_inputs
from fences import SyncFence

if TYPE_CHECKING:
    from aionn.runtime.executions.reusable import ReusableExecution
    from aionn.runtime.recovery.prepared import Recoverer

__all__ = ["Compilation"]

NEW_BYTES_IN_LOOP_MAX = 1 << 18
"""Largest request memory that is made on the event loop: the kernel gives some 2 bytes a nanosecond at first use."""

COPIED_BYTES_IN_LOOP_MAX = 1 << 21
"""Most bytes of inputs that are copied on the event loop: at some 10 bytes a nanosecond, a fifth of a millisecond."""


class _Asked(NamedTuple):
    """The checked arguments of an execution's caller.

    Attributes:
        inputs: Arrays by input; None for values that are left out or bound.
        bound: Values in memories of the application's own, by key.
        targets: Arrays that outputs are copied to, by key.
        deadline_ns: Absolute; None means no deadline.
        priority: Against others.
        loop_timeout_ns: For every WHILE; None for the default.
    """

    inputs: Sequence[Array | None]
    bound: Mapping[int, Binding]
    targets: Mapping[int, Array]
    deadline_ns: int | None
    priority: Priority
    loop_timeout_ns: int | None


async def _on_thread(fill: Callable[[], RequestArea]) -> RequestArea:
    with real_work("filling request memory"):
        return await anyio.to_thread.run_sync(fill)


def _check_wait_for(wait_for: Sequence[SyncFence]) -> None:
    for given in (
        [wait_for]
        if isinstance(wait_for, Execution)
        else wait_for
        if isinstance(wait_for, list | tuple)
        else ()
    ):
        if isinstance(given, Execution):
            raise InvalidArgument(
                "wait_for: expected a list of fences, got an Execution; write [execution.fence]"
            )
    check_fences(wait_for, where="wait_for")


def _keep_memory(job: ExecutionJob) -> None:
    """A reusable execution keeps its memory."""


class Compilation:
    """A model made ready. Close it with ``aclose`` or ``async with``; the runtime closes what is left.

    One that is dropped is freed at its devices as well, soon after; what was made of it (bursts, reusable executions, executions
    under way) keeps it until then.

    Attributes:
        model: The model.
        inputs: What it takes.
        outputs: What it gives.
        devices: Names of the devices that it runs on.
        placement: Which operation runs where, and why.
        identity: What no other compilation has.
        from_cache: Whether every step came from the cache; the constants' memory (``model.pools``) may then be missing.
    """

    def __init__(
        self,
        background: Background,
        plan: Plan,
        priority: Priority,
        *,
        from_cache: bool = False,
        polling: Mapping[str, int] | None = None,
        report: Callable[[ErrorStatus, Result | None, int], None] | None = None,
        recoverer: Recoverer | None = None,
        on_close: Callable[[Compilation], None],
    ) -> None:
        self._recoverer = recoverer
        self._polling = polling or {}
        self._report = report
        self._background = background
        self._plan = plan
        self._priority = priority
        self._on_close = on_close
        self._areas: list[RequestArea] = []
        self._sizes: dict[int, int] = {}
        self._values = LastValues(plan)
        self._bursts: weakref.WeakSet[Burst] = weakref.WeakSet()
        self._closed = False
        self._finalizer = close_when_dropped(self, background, plan.aclose)
        self._steps = [
            plan.step(index, key=key, sizes=self._sizes) for index, key in enumerate(learnt_by(plan, self))
        ]
        self._owner = JobOwner(
            background, plan.model.main.output_indexes, plan.device_names, plan.rescue_step(), report
        )
        # Address and hash of a dropped compilation come again; this does not, as long as a memory refers to it.
        self.identity = object()
        self.model = plan.model
        self._needed = functools.cache(functools.partial(needed_inputs, plan.model))
        self.inputs = plan.inputs
        self.outputs = plan.outputs
        self.devices = tuple(device.name for device in plan.devices)
        self.placement = plan.placement
        self.from_cache = from_cache

    async def execute(
        self,
        inputs: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        deadline: int | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
        loop_timeout: float | None = None,
    ) -> Result:
        """Executes the model once.

        Args:
            inputs: One array (or buffer, or DLPack object, or memory) per input; None for an optional input that is left out.
            outputs: One entry per output: a memory that it is written to in place, an array (or writable buffer, or DLPack object)
                that it is copied to, or None for an array of its own; None for those alone. In the result, a shared memory's output
                is a view of it, a device memory's an empty array, and a given array that array.
            deadline: Absolute nanoseconds, see ``aionn.after``; None means no deadline.
            priority: Against other executions; None takes the compilation's.
            measure: Whether ``timing`` is wanted.
            loop_timeout: Seconds for every WHILE; None for the default.

        Returns:
            The result, with arrays of the caller's own.

        Raises:
            InvalidArgument: An input does not fit; nothing was sent.
            MissedDeadline: The deadline passed, before or while running. The device may still be busy with it.
            DeadObject: The driver process is gone; ``transient`` where the compilation recovers.
            Error: Any other failure.

        Cancelled while waiting: the execution never runs. Cancelled while running: the device keeps its slot until it is done.
        """
        asked = self._asked(inputs, outputs, deadline, priority, loop_timeout)
        if self._background.starting_count:
            await anyio.lowlevel.checkpoint()
        return await run_job(self._job(asked, measure))

    def execute_fenced(
        self,
        inputs: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        wait_for: Sequence[SyncFence] = (),
        deadline: int | None = None,
        duration: float | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
        loop_timeout: float | None = None,
    ) -> Execution:
        """Starts an execution that begins when all fences have signalled, and returns immediately.

        The inputs are read when the fences have signalled, so they may be filled by the executions that are waited for.

        Args:
            inputs: As for ``execute``.
            outputs: As for ``execute``.
            wait_for: Fences to wait for; one that fails later fails this execution.
            deadline: As for ``execute``.
            duration: Seconds allowed from the moment that the last fence signals, or from the call where there is no fence to
                wait for; None means no limit. Beside a deadline, the sooner of the two counts.
            priority: As for ``execute``.
            measure: Whether ``timing``, from this call on, and ``fenced``, from the last fence on, are wanted.
            loop_timeout: As for ``execute``.

        Returns:
            The execution: ``.fence`` for others to wait for, awaitable for the result.

        Raises:
            InvalidArgument: An input does not fit, or a fence has failed already.
        """
        _check_wait_for(wait_for)
        duration_ns = None if duration is None else to_ns(duration, what="duration")
        asked = self._asked(inputs, outputs, deadline, priority, loop_timeout)
        return start(self._job(asked, measure, wait_for, duration_ns))

    def _asked(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
        deadline: int | None,
        priority: str | Priority | None,
        loop_timeout: float | None,
    ) -> _Asked:
        self._check_open()
        check_deadline(deadline, where="execute")
        bound, plain, targets = self._bindings(inputs, outputs)
        return _Asked(
            check_inputs(self.inputs, plain, self._needed),
            bound,
            targets,
            deadline,
            self._priority if priority is None else priority_of(priority),
            None if loop_timeout is None else to_ns(loop_timeout, what="loop_timeout"),
        )

    def _job(
        self,
        asked: _Asked,
        measure: bool,
        wait_for: Sequence[SyncFence] = (),
        duration_ns: int | None = None,
    ) -> ExecutionJob:
        return ExecutionJob(
            self._owner,
            self._steps,
            self._give_back,
            asked.priority,
            fill=functools.partial(self._area, asked),
            deadline_ns=asked.deadline_ns,
            duration_ns=duration_ns,
            wait_for=wait_for,
            measure=measure,
            loop_timeout_ns=asked.loop_timeout_ns,
        )

    def _bindings(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None
    ) -> tuple[dict[int, Binding], Sequence[Any], dict[int, Array]]:
        """The values in memories of the application's own, by key; the other inputs; arrays that outputs are copied to, by key."""
        if outputs is None and not any(isinstance(value, OwnMemory) for value in inputs):
            return {}, inputs, {}
        main = self.model.main
        targets: dict[int, Array] = {}
        bound: dict[int, Binding] = {}
        plain = list(inputs)
        for index, value in enumerate(plain[: len(self.inputs)]):
            pixels = image_view(self._plan, index, value, f"input {index}")
            if pixels is not None:
                plain[index] = pixels
            elif isinstance(value, OwnMemory):
                bound[main.input_indexes[index]] = bind(
                    self._plan, self.identity, False, index, value, f"input {index}"
                )
                plain[index] = BOUND
        if outputs is not None and len(outputs) != len(self.outputs):
            raise InvalidArgument(f"outputs: expected {len(self.outputs)} entries, got {len(outputs)}")
        for index, value in enumerate(outputs or ()):
            if isinstance(value, OwnMemory):
                bound[main.output_indexes[index]] = bind(
                    self._plan, self.identity, True, index, value, f"output {index}"
                )
            elif value is not None:
                targets[main.output_indexes[index]] = output_target(index, self.outputs[index], value)
        return bound, plain, targets

    def _area(self, asked: _Asked) -> RequestArea | Awaitable[RequestArea]:
        """Memory that holds the inputs; to be awaited where filling it takes longer than the loop may be held."""
        arrays, bound, targets = asked.inputs, asked.bound, asked.targets
        shapes = tuple([None if array is None else array.shape for array in arrays])
        values = self._values.of(shapes, self._sizes, bound.keys())
        for index, area in enumerate(self._areas):
            if area.is_for(values):
                del self._areas[index]
                break
        else:
            self._areas.clear()  # The kept area is for other shapes or sizes.
            area = None

        def filled() -> RequestArea:
            filling = RequestArea(values) if area is None else area
            filling.bind(bound, targets)
            filling.write(self.model.main.input_indexes, arrays)
            return filling

        if area is None:
            is_quick = sum(value.size_bytes for value in values) <= NEW_BYTES_IN_LOOP_MAX
        else:
            is_quick = sum([a.nbytes for a in arrays if a is not None]) <= COPIED_BYTES_IN_LOOP_MAX
        return filled() if is_quick else _on_thread(filled)

    def _give_back(self, job: ExecutionJob) -> None:
        area = job.area
        # One that had to grow has its values scattered; the next execution starts with one memory of the right size.
        keep = area is not None and len(area.memories) == 1 and not self._closed
        if area is not None:
            area.bind({})
        if area is not None and keep and len(self._areas) < AREAS_KEPT_MAX:
            self._areas.append(area)

    def burst(self, *, slots: int = 2) -> Burst:
        """Repeated executions at low cost; use it with ``async with``.

        Args:
            slots: Number of requests that the burst has memory for: while one runs, other ones can be filled.

        Raises:
            InvalidArgument: The model's inputs or outputs have unknown shapes, or ``slots`` is below 1.
        """
        self._check_open()
        burst = Burst(
            self._background,
            self._plan,
            self._priority,
            slots,
            polling=self._polling,
            report=self._report,
            on_close=self._forget_burst,
        )
        self._bursts.add(burst)
        return burst

    def _forget_burst(self, burst: Burst) -> None:
        # A method, by which a burst keeps its compilation.
        self._bursts.discard(burst)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("compilation: closed")
        self._background.home.check("compilation")

    @property
    def recoveries(self) -> int:
        """Number of times that a step was prepared again after its driver had died; 0 without ``recover``."""
        return 0 if self._recoverer is None else self._recoverer.count

    @property
    def steps(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Device and operations of each step, in the order in which they run."""
        return tuple((step.device.name, step.operations) for step in self._plan.steps)

    def page(self, *, title: str = "compilation") -> str:
        """One self-contained HTML page that draws the model, each device's operations in a colour of their own.

        Raises:
            InvalidArgument: The model is too large to be drawn.
        """
        from aionn.runtime.page import compilation_page

        return compilation_page(self._plan, title=title)

    def reusable(self, *, measure: bool = False, loop_timeout: float | None = None) -> ReusableExecution:
        """An execution whose memory is kept: inputs are written into ``inputs``, results read from the result's views.

        Raises:
            InvalidArgument: An input has an unknown shape.
        """
        from aionn.runtime.executions.reusable import ReusableExecution

        self._check_open()
        return ReusableExecution(
            self._plan,
            self._sizes,
            measure,
            loop_timeout,
            check_open=self._check_open,
            make_job=self._computation,
            background=self._background,
        )

    def _computation(
        self,
        area: RequestArea,
        measure: bool,
        loop_timeout_ns: int | None,
        deadline_ns: int | None,
        priority: str | Priority | None,
    ) -> ExecutionJob:
        # A method, by which a reusable execution keeps its compilation.
        return ExecutionJob(
            self._owner,
            self._steps,
            _keep_memory,
            self._priority if priority is None else priority_of(priority),
            area=area,
            deadline_ns=deadline_ns,
            measure=measure,
            loop_timeout_ns=loop_timeout_ns,
            copy=False,
        )

    async def aclose(self) -> None:
        """Ends its bursts and frees it at the device. Idempotent.

        Cancelled, it is closed all the same before the cancellation is raised.
        """
        if self._closed:
            return
        self._background.home.check("compilation")
        self._closed = True
        self._on_close(self)
        await finish(self._close())

    async def _close(self) -> None:
        try:
            await finish_all([burst.aclose for burst in self._bursts])
        finally:
            self._areas.clear()
            await self._plan.aclose()
        self._finalizer.detach()  # Not before: a closing that failed is tried again when this object is dropped.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _repr_html_(self) -> str:
        from aionn.reports.notebooks import compilation_html

        placement = ((p.device, p.type) for p in self.placement)
        return compilation_html(self.inputs, self.outputs, placement, self.from_cache)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self._plan.device_names}"
        return f"<Compilation of {len(self.model.main.operations)} operations, {state}>"

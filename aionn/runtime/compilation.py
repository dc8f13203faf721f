"""A model made ready on one device or several, and the ways to execute it.

Owns the ways to execute, of which the caller chooses one (plain, fenced, burst), and the change from one model to another while
both are prepared.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from aionn.errors import InvalidArgument, class_text, shortages_raised
from aionn.hal import Model, Priority, check_fences
from aionn.platform.loops import finish, finish_all
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.background import Background
from aionn.runtime.clock import check_deadline, duration_to_ns
from aionn.runtime.executions.burst import Burst
from aionn.runtime.executions.execution import Execution, start
from aionn.runtime.executions.job import ExecutionJob, run_job
from aionn.runtime.executions.opened_plan import OpenedPlan
from aionn.runtime.executions.plan_in_use import (
    Asked,
    MakeReady,
    PlanInUse,
    Ready,
    check_same_signature,
    close_plans,
    free_unused,
)
from aionn.runtime.executions.results import PriorityName, Result, flag_of, priority_of
from aionn.runtime.memory.arguments import (
    BOUND,
    Array,
    Binding,
    RequestArea,
    check_apart,
    check_inputs,
    output_target,
)
from aionn.runtime.memory.own import OwnMemory, bind, image_view
from fences import SyncFence

if TYPE_CHECKING:
    from aionn.runtime.executions.reusable import ReusableExecution

__all__ = ["Compilation"]


def _checked_fences(wait_for: Sequence[SyncFence]) -> tuple[SyncFence, ...]:
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
    return check_fences(wait_for, where="wait_for")


def _entries(values: Sequence[Any]) -> str:
    return "1 entry" if len(values) == 1 else f"{len(values)} entries"


class Compilation(InThisProcess):
    """A model made ready. Close it with ``aclose`` or ``async with``; the runtime closes what is left.

    One that is dropped is freed at its devices as well, soon after; objects made of it (bursts, reusable executions, executions
    under way) keeps it until then.

    Attributes:
        model: The model.
        inputs: Types and shapes of the inputs.
        outputs: Types and shapes of the outputs.
        devices: Names of the devices that it runs on.
        placement: Which operation runs where, and why.
        identity: A number that no other compilation has.
        from_cache: Whether every step came from the cache; the constants' memory (``model.pools``) may then be missing.
    """

    def __init__(
        self,
        background: Background,
        ready: Ready,
        priority: Priority,
        *,
        polling: Mapping[str, int] | None = None,
        make_ready: MakeReady,
        on_close: Callable[[Compilation], None],
    ) -> None:
        self._polling = polling or {}
        self._background = background
        self._priority = priority
        self._make_ready = make_ready
        self._on_close = on_close
        self._bursts: weakref.WeakSet[Burst] = weakref.WeakSet()
        self._replacing = anyio.Lock()
        self._recovered_count = 0
        self._closed = False
        # The plan of executions that begin now is the last one; those before it are in use by executions that have not ended.
        self._plans: list[PlanInUse] = []
        self._use(ready)

    def _use(self, ready: Ready) -> None:
        """Has executions use a plan from now on."""
        plan = ready.plan
        self._current = current = PlanInUse(self._background, ready)
        self._plans.append(current)
        self._recoverer = ready.recoverer
        self._figures = ready.figures
        self._plan = plan
        self._areas = current.areas
        # Address and hash of a dropped compilation come again; this does not, as long as a memory refers to it.
        self.identity = object()
        self.model = plan.model
        self.inputs = plan.inputs
        self.outputs = plan.outputs
        self.devices = tuple(device.name for device in plan.devices)
        self.placement = plan.placement
        self.from_cache = ready.from_cache

    @shortages_raised("replace")
    async def replace(self, model: Model | str | os.PathLike[str], *, deadline: int | None = None) -> None:
        """Has another model executed from now on, with the options of the first one and without a gap.

        The model is prepared while the present one serves, and so are the bursts that are open. Then all of them change between two
        frames: an execution that has begun, and an item of a stream that is in a buffer, ends with the present model; the next one
        gets the new model. So each has one result, and none waits. The memory of both models is needed for that time.

        A reusable execution and a device memory belong to the model that they were made for: make them again.

        Args:
            model: A model, or the path of a .tflite or .onnx file, with the same inputs and outputs.
            deadline: Absolute nanoseconds for the preparation; None means no deadline.

        Raises:
            InvalidArgument: The inputs or outputs differ, or as for ``Runtime.compile``.
            Error: As for ``Runtime.compile``. The present model still serves, whatever is raised.

        Cancelled, the present model still serves.
        """
        self._check_open()
        deadline = check_deadline(deadline, where="replace")
        async with self._replacing:
            ready = await self._make_ready(model, deadline, None)
            opened: dict[Burst, OpenedPlan | None] = {}
            try:
                check_same_signature(self.inputs, ready.plan.inputs, "input")
                check_same_signature(self.outputs, ready.plan.outputs, "output")
                owner = ready.owner(self._background)
                # Until no burst was opened during the last wait: from then on nothing waits.
                while missing := [
                    b for b in self._bursts if b not in opened or (opened[b] is None and b.was_entered)
                ]:
                    for burst in missing:
                        opened[burst] = await burst.open_beside(ready.plan, owner)
                self._check_open()
                for burst in opened:
                    burst.check_unreserved()  # A stream may have begun while other bursts were opened.
            except BaseException:
                await finish(free_unused(ready.plan, opened.values()))
                raise
            before = self._current
            if self._recoverer is not None:
                self._recovered_count += self._recoverer.count
            self._use(ready)
            for burst, beside in opened.items():
                before.users += 1
                burst.replace(ready.plan, owner, beside, ready.figures, before.unused)
            before.retire(self._plans)

    async def execute(
        self,
        inputs: Sequence[Any],
        *,
        outputs: Sequence[Any] | None = None,
        deadline: int | None = None,
        priority: PriorityName | Priority | None = None,
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
        priority: PriorityName | Priority | None = None,
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
        fences = _checked_fences(wait_for)
        duration_ns = None if duration is None else duration_to_ns(duration, what="duration")
        asked = self._asked(inputs, outputs, deadline, priority, loop_timeout)
        return start(self._job(asked, measure, fences, duration_ns))

    def _asked(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any] | None,
        deadline: int | None,
        priority: PriorityName | Priority | None,
        loop_timeout: float | None,
    ) -> Asked:
        self._check_open()
        deadline = check_deadline(deadline, where="execute")
        bound, plain, targets = self._bindings(inputs, outputs)
        return Asked(
            self._current,
            check_inputs(self.inputs, plain, self._current.needed),
            bound,
            targets,
            deadline,
            self._priority if priority is None else priority_of(priority),
            None if loop_timeout is None else duration_to_ns(loop_timeout, what="loop_timeout"),
        )

    def _job(
        self,
        asked: Asked,
        measure: bool,
        wait_for: Sequence[SyncFence] = (),
        duration_ns: int | None = None,
    ) -> ExecutionJob:
        if measure is not False:
            measure = flag_of(measure, "measure")
        current = asked.plan
        current.users += 1
        return ExecutionJob(
            current.owner,
            current.steps,
            functools.partial(self._give_back, current),
            asked.priority,
            fill=functools.partial(current.area, asked),
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
        if not isinstance(inputs, list | tuple):
            return {}, inputs, {}  # ``check_inputs`` rejects them.
        if outputs is None and not any(isinstance(value, OwnMemory) for value in inputs):
            return {}, inputs, {}
        if outputs is not None and not isinstance(outputs, list | tuple):
            advice = "; write [output]" if isinstance(outputs, np.ndarray | OwnMemory) else ""
            raise InvalidArgument(
                f"outputs: expected a list with {_entries(self.outputs)}, got {class_text(outputs)}{advice}"
            )
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
            raise InvalidArgument(f"outputs: expected {_entries(self.outputs)}, got {len(outputs)}")
        for index, value in enumerate(outputs or ()):
            if isinstance(value, OwnMemory):
                bound[main.output_indexes[index]] = bind(
                    self._plan, self.identity, True, index, value, f"output {index}"
                )
            elif value is not None:
                targets[main.output_indexes[index]] = output_target(index, self.outputs[index], value)
        if len(targets) > 1:
            keys = enumerate(main.output_indexes)
            check_apart({index: targets[key] for index, key in keys if key in targets})
        return bound, plain, targets

    def _give_back(self, plan: PlanInUse, job: ExecutionJob) -> None:
        # A method, by which an execution under way keeps its compilation.
        plan.give_back(job)

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
            self._current.owner,
            self._priority,
            slots,
            polling=self._polling,
            figures=self._figures,
            on_close=self._forget_burst,
        )
        self._bursts.add(burst)
        return burst

    def _forget_burst(self, burst: Burst) -> None:
        # A method, by which a burst keeps its compilation.
        self._bursts.discard(burst)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument(
                "compilation: closed; use it inside the async with of its runtime, or compile again"
            )
        self._background.home.check("compilation")

    @property
    def recoveries(self) -> int:
        """Number of times that a step was prepared again after its driver had died; 0 without ``recover``."""
        return self._recovered_count + (0 if self._recoverer is None else self._recoverer.count)

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
        current = self._current
        return ReusableExecution(
            self._plan,
            current.sizes,
            flag_of(measure, "measure"),
            loop_timeout,
            check_open=functools.partial(self._check_current, current),
            make_job=functools.partial(self._computation, current),
            background=self._background,
        )

    def _check_current(self, plan: PlanInUse) -> None:
        self._check_open()
        if plan is not self._current:
            raise InvalidArgument("reusable execution: its model was replaced; make another one")

    def _computation(
        self,
        plan: PlanInUse,
        area: RequestArea,
        measure: bool,
        loop_timeout_ns: int | None,
        deadline_ns: int | None,
        priority: PriorityName | Priority | None,
    ) -> ExecutionJob:
        # A method, by which a reusable execution keeps its compilation.
        plan.users += 1
        return ExecutionJob(
            plan.owner,
            plan.steps,
            plan.unused,
            self._priority if priority is None else priority_of(priority),
            area=area,
            deadline_ns=deadline_ns,
            measure=measure,
            loop_timeout_ns=loop_timeout_ns,
            copy=False,
        )

    def close_streams(self) -> None:
        """Ends the streams of its bursts, as ``Burst.close_streams``."""
        for burst in self._bursts:
            burst.close_streams()

    async def aclose(self) -> None:
        """Ends its bursts and frees it at the device. Idempotent.

        Cancelled, it is closed all the same before the cancellation is raised.
        """
        if self._closed:
            return
        self._background.home.check("compilation")
        self._closed = True
        self._on_close(self)
        self.close_streams()
        await finish(self._close())

    async def _close(self) -> None:
        try:
            await finish_all([burst.aclose for burst in self._bursts])
        finally:
            await close_plans(self._plans)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (
            value is None or self._background.home.is_here
        ):  # A forked child leaves with an error of its own: that counts.
            await self.aclose()

    def _repr_html_(self) -> str:
        from aionn.reports.notebooks import compilation_html

        placement = ((p.device, p.type) for p in self.placement)
        return compilation_html(self.inputs, self.outputs, placement, self.from_cache)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self._plan.device_names}"
        return f"<Compilation of {len(self.model.main.operations)} operations, {state}>"

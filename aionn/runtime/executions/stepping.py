"""One step of a plan on its device: the driver's call, the check of its answer, and growth of outputs.

Owns the records of such a step, and which of the driver's calls is taken. ``job`` orders the steps and waits for them.

A burst of a device takes one launch at a time. The runtime has one for each of the device's slots, since with fewer the device
would be idle between two executions. Where all are in use, because the device was sent a more urgent execution beside one that it
interrupts, a request goes to the prepared model.

Invariants:
1. An answer that breaks the contract is rejected before anything relies on it.
2. An output that did not fit has at least twice the room at the next try.

Source: ``StepExecutor`` of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from aionn.errors import Error, InvalidArgument, OutputInsufficientSize
from aionn.hal import Burst as HalBurst
from aionn.hal import ExecutionResult, Launch, Model, PreparedModel, Priority, Request, Timing, check_launch
from aionn.hal.callers import ReservedFrame
from aionn.runtime.background import Background
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.executions.background_launch import BackgroundLaunch, execute_by_callback
from aionn.runtime.executions.results import Result
from aionn.runtime.memory.arguments import RequestArea
from aionn.scheduler.job import TaskJob
from aionn.validation import check_execution_result

__all__ = [
    "GROWTH_TRIES_MAX",
    "Conditions",
    "DeviceBurst",
    "Interpreted",
    "InterpretedBurst",
    "PreparedStep",
    "Step",
    "execute_step",
    "output_too_small",
]

GROWTH_TRIES_MAX = 8
"""Number of times that an execution is repeated with larger outputs; each try at least doubles those that were too small."""


class Conditions(Protocol):
    """The part of an execution that its steps see.

    Attributes:
        background: Where the runtime's tasks live.
        measure: Whether timings are wanted.
        deadline_ns: Absolute; None means no deadline.
        loop_timeout_ns: For every WHILE; None for the default.
        served: The frame of a reservation of a served device that it is; None for best effort, and on other devices.
    """

    @property
    def background(self) -> Background: ...

    measure: bool
    deadline_ns: int | None
    loop_timeout_ns: int | None
    served: ReservedFrame | None

    @property
    def rank(self) -> Priority:
        """Its priority, or that of an execution that waits for it where that is higher."""
        ...

    def run(self, step: Step, area: RequestArea) -> Awaitable[Timing]:
        """Runs a step that an interpreted step consists of: waits for its device, and falls back where that is allowed."""
        ...

    def when_unused(self, call: Callable[[], None]) -> None:
        """Calls when no device uses the memory of the execution any more; immediately if none does."""
        ...


class DeviceBurst:
    """A burst of a device, one launch at a time.

    Attributes:
        hal: The driver contract's side of it.
        last: The last launch through it; None before the first one.
        is_taken: Whether a direct execution runs through it, which has no launch here.
        gives_launch: Whether its driver gives the launch that a direct execution leaves at the device.
        is_closed: Whether the application has closed it: a launch that ends with DeadObject was ended by that, and not by a death.
    """

    __slots__ = ("gives_launch", "hal", "is_closed", "is_taken", "last")

    def __init__(self, hal: HalBurst) -> None:
        self.hal = hal
        self.gives_launch = hal.in_flight is not None
        self.is_closed = self.is_taken = False
        self.last: Launch | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing runs through it."""
        return not self.is_taken and (self.last is None or self.last.is_done)

    @property
    def is_direct(self) -> bool:
        """Whether it can execute directly now: it is free and open. Only where ``gives_launch``."""
        return self.is_free and not self.is_closed

    def leave(self) -> Launch | None:
        """Ends a direct execution that was cancelled or has failed; returns its launch if the device has not ended it."""
        self.is_taken = False
        assert self.hal.in_flight is not None, "it was executed directly"
        launch = self.hal.in_flight()
        if launch is not None:
            self.last = launch
        return launch

    def launch(self, request: Request, identifiers: Sequence[int], job: Conditions) -> Launch:
        """Launches a request while it is free. Raises as ``Burst.launch``: it was rejected; also where it is closed."""
        if self.is_closed:
            raise InvalidArgument("burst: closed before an execution had begun")
        launch = self.hal.launch(
            request,
            identifiers,
            measure=job.measure,
            deadline_ns=job.deadline_ns,
            loop_timeout_ns=job.loop_timeout_ns,
        )
        check_launch(launch, "burst")
        self.last = launch
        return launch

    async def landed(self) -> None:
        """Waits until nothing runs through it."""
        launch = self.last
        if self.is_taken and self.hal.in_flight is not None:
            launch = self.hal.in_flight()
        if launch is not None:
            await launch.done

    async def aclose(self) -> None:
        """Ends it at its device. Idempotent."""
        self.is_closed = True
        await self.hal.aclose()


class Interpreted(Protocol):
    """An IF or WHILE that the runtime itself runs, as the plan sees it that has it as a step."""

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """The devices that its subgraphs go to."""
        ...

    def uses(self, argument: int, *, is_output: bool) -> list[tuple[PreparedStep, bool, int]] | None:
        """The steps inside that read or write an argument in place; None if the runtime itself does."""
        ...

    async def open_burst(self, polling: Mapping[str, int]) -> InterpretedBurst:
        """Opens bursts for the steps inside. Raises as ``configure_execution_burst``."""
        ...

    async def interpret(
        self, request: Request, job: Conditions, burst: InterpretedBurst | None = None
    ) -> ExecutionResult:
        """Executes a request, through a burst that it has opened or without one. Waits for the devices of the steps inside, and
        raises as those do."""
        ...


class InterpretedBurst(Protocol):
    """The bursts of the steps inside of an IF or WHILE.

    Attributes:
        bursts: All of them.
    """

    @property
    def bursts(self) -> Sequence[DeviceBurst]: ...

    async def aclose(self) -> None:
        """Ends them. Idempotent."""
        ...


class PreparedStep(NamedTuple):
    """A step of a plan, made ready on its device.

    Attributes:
        device: Where it runs.
        prepared: The device's prepared model.
        model: The model that was prepared.
        inputs: Keys of the values that it reads, in the order of its model's inputs.
        outputs: Keys of the values that it writes, in the order of its model's outputs.
        operations: Which of the whole model's operations it has.
        interpreted: The IF or WHILE that the runtime itself runs, which ``prepared`` is then too; None for all other steps.
    """

    device: RuntimeDevice
    prepared: PreparedModel
    model: Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[int, ...]
    interpreted: Interpreted | None = None


class Step:
    """A prepared step as the executions of one owner run it.

    Attributes:
        prepared_step: The step of the plan.
        dispatcher: The slots of its device.
        interpreted: See ``PreparedStep``: the step has no slot of its own then.
        key: The key by which its duration on the device is learnt; None to learn nothing.
        sizes: Takes up what was learnt about sizes of outputs, for the next execution.
        fallback: The step on the reference device, for failures; None where that is not allowed.
        name: Names the step where a fallback is reported.
    """

    __slots__ = ("dispatcher", "fallback", "interpreted", "key", "name", "prepared_step", "sizes")

    def __init__(
        self,
        prepared_step: PreparedStep,
        *,
        key: Hashable = None,
        sizes: dict[int, int] | None = None,
        fallback: Step | None = None,
        name: str = "",
    ) -> None:
        self.prepared_step = prepared_step
        self.dispatcher = prepared_step.device.dispatcher
        self.interpreted = prepared_step.interpreted
        self.key = key
        self.sizes = {} if sizes is None else sizes
        self.fallback = fallback
        self.name = name

    @property
    def is_closed(self) -> bool:
        """Whether the application has closed a burst through which it is launched."""
        return False

    def pass_through(self, rank: Priority, deadline_ns: int | None) -> TaskJob | None:
        """Takes a slot for a direct execution, by ``run_directly``, which has no job of the runtime until it needs one. None where
        there is more to decide."""
        return None

    async def run_directly(
        self, work: TaskJob, rank: Priority, deadline_ns: int | None, *, copy: bool
    ) -> Result:
        """Executes in the slot that ``pass_through`` took. Raises and is cancelled as ``run_job``."""
        raise AssertionError("pass_through has taken no slot")

    def least_ns(self) -> int:
        """Its least duration, as far as is known."""
        return self.dispatcher.least_ns(self.key, self.prepared_step.prepared.expected_duration_ns)

    def expected_ns(self) -> int:
        """Its expected duration."""
        return self.dispatcher.expected_ns(self.key, self.prepared_step.prepared.expected_duration_ns)

    def launch(self, area: RequestArea, job: Conditions) -> Launch:
        """Launches it; the caller has a slot of its device. Raises as ``PreparedModel.launch``: it was rejected."""
        step = self.prepared_step
        prepared, request = step.prepared, area.request(step.inputs, step.outputs)
        rank = job.rank if prepared.takes_priority else None
        if rank is not None and step.device.raises_best_effort:
            # Reserved frames wait for it. Below their class, other programs would take its processor, and so their slot.
            rank = Priority.HIGH
        if step.device.is_asynchronous:
            call = execute_by_callback(
                prepared,
                request,
                measure=job.measure,
                deadline_ns=job.deadline_ns,
                loop_timeout_ns=job.loop_timeout_ns,
                priority=rank,
            )
            return BackgroundLaunch(job.background, call)
        launch = prepared.launch(
            request,
            measure=job.measure,
            deadline_ns=job.deadline_ns,
            loop_timeout_ns=job.loop_timeout_ns,
            priority=rank,
        )
        check_launch(launch, step.device.name)
        return launch

    async def interpret(self, area: RequestArea, job: Conditions) -> ExecutionResult:
        """Executes it where it is interpreted. Raises as its steps."""
        step = self.prepared_step
        assert self.interpreted is not None, "other steps are launched"
        return await self.interpreted.interpret(area.request(step.inputs, step.outputs), job)

    def accept(self, area: RequestArea, result: ExecutionResult, job: Conditions) -> bool:
        """Takes an answer over; False if an output did not fit: then the area has grown, and the step is to be repeated.

        Raises:
            Error: The answer breaks the contract, or an output is in memory that cannot grow.
        """
        step = self.prepared_step
        check_execution_result(step.model.main, result, measure=job.measure)
        area.note(step.outputs, result.output_shapes)
        if result.output_sufficient_size:
            return True
        self.sizes.update(area.grow(step.outputs, result.output_shapes))
        return False

    def fallback_message(self, error: Error) -> str:
        """The sentence with which a result reports that ``fallback`` ran after this error."""
        assert self.fallback is not None, "asked after it has run"
        device = self.prepared_step.device.name
        return f"{self.name}: {device} failed ({error}); ran on {self.fallback.prepared_step.device.name}"


async def execute_step(step: Step, area: RequestArea, job: Conditions) -> ExecutionResult:
    """Executes a step to its end without a slot of its device, again with more memory where an output did not fit.

    Raises:
        Error: It failed.
    """
    for _ in range(GROWTH_TRIES_MAX):
        result = await step.launch(area, job)
        if step.accept(area, result, job):
            return result
    raise output_too_small(result)


def output_too_small(result: ExecutionResult) -> OutputInsufficientSize:
    """The failure of a step whose outputs did not fit the last time that it was tried."""
    return OutputInsufficientSize(
        f"execute: the outputs did not fit after {GROWTH_TRIES_MAX} tries",
        [(shape.dimensions, shape.is_sufficient) for shape in result.output_shapes],
    )

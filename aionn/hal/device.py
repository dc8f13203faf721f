"""The driver contract: devices, prepared models, bursts and device memories.

Owns the protocols that every driver fulfils and that every caller may rely on. Calls that may wait are coroutines; failures are
``aionn.errors.Error`` with the statuses that the contract lists; any other exception is the driver's bug and counts as
GENERAL_FAILURE.

Obligations of a driver, for every method:
1. Every argument is hostile and is checked before it is used.
2. A call that fails changes nothing that a later call can see.
3. A deadline is absolute, in nanoseconds of CLOCK_MONOTONIC. One that has passed before the start is
   MISSED_DEADLINE_PERSISTENT, one that passes while running is MISSED_DEADLINE_TRANSIENT.
4. A cancelled call (the coroutine's cancellation) gives up waiting; the device may go on, and keeps its slot until it is done.
5. Nothing is written outside of the areas that the request names.

Source: ``IDevice``, ``IPreparedModel``, ``IBurst``, ``IBuffer`` of the NN HAL 1.3 and its AIDL form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from aionn.errors import ErrorStatus
from aionn.hal.capabilities import DeviceInfo, DeviceStatus
from aionn.hal.memory import Memory
from aionn.hal.model import Model
from aionn.hal.qos import ExecutionPreference, Priority
from aionn.hal.request import ExecutionResult, FencedTiming, OutputShape, Request, Timing
from fences import SyncFence

__all__ = [
    "Buffer",
    "BufferDesc",
    "BufferRole",
    "Burst",
    "CacheFiles",
    "Device",
    "Execution",
    "ExecutionCallback",
    "FencedExecution",
    "FencedExecutionInfo",
    "PreparedModel",
]


class CacheFiles(NamedTuple):
    """Compilation cache: open files, valid during the call alone, at any offset and with any old content.

    Attributes:
        model: Descriptors of the files whose integrity the driver checks.
        data: Descriptors of the files that hold constants and the like.
        token: 32 bytes that name the compilation.
        bytes_max: How much of all files together may be read; None for no limit. The files may grow after they were measured.
    """

    model: Sequence[int]
    data: Sequence[int]
    token: bytes
    bytes_max: int | None = None


class BufferDesc(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a device memory's shape beyond its roles; empty or 0 where unknown."""

    dimensions: tuple[int, ...] = ()


class BufferRole(msgspec.Struct, frozen=True, array_like=True):
    """One use that a device memory is meant for.

    Attributes:
        model_index: Which prepared model of the call.
        io_index: Which of its inputs or outputs.
        probability: How likely the use is, above 0 and at most 1.
    """

    model_index: int
    io_index: int
    probability: float = 1.0


ExecutionCallback = Callable[[ErrorStatus, Sequence[OutputShape], Timing], None]
"""Called exactly once with the status, the output shapes (empty unless NONE or OUTPUT_INSUFFICIENT_SIZE) and the timing."""

FencedExecutionInfo = Callable[[], Awaitable[tuple[ErrorStatus, FencedTiming]]]
"""Before completion: GENERAL_FAILURE. After: the execution's status, and the timings if they were measured."""


class FencedExecution(NamedTuple):
    """A fenced execution that was launched.

    Attributes:
        fence: Signals when the outputs are there, fails when they will never be; None says that they are there already.
        get_execution_info: Status and timings.
    """

    fence: SyncFence | None
    get_execution_info: FencedExecutionInfo


class Burst(Protocol):
    """Repeated executions of one prepared model at low cost. One execution at a time."""

    async def execute_synchronously(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """Executes a request whose pools the device remembers by identifier.

        Args:
            request: As for ``PreparedModel.execute_synchronously``.
            memory_identifiers: One per pool: -1 for "do not remember", else the pool's identifier for the life of the burst.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None for none.
            loop_timeout_ns: For every WHILE; None for the default.

        Raises:
            InvalidArgument: Another execution is in flight, or the request is illegal.
            Error: As for ``PreparedModel.execute_synchronously``.
        """
        ...

    async def release_memory_resource(self, memory_identifier: int) -> None:
        """Forgets a pool. Unknown identifiers are ignored; one below -1 is an ``InvalidArgument``."""
        ...

    async def aclose(self) -> None:
        """Ends the burst and frees what it holds at the driver. Idempotent."""
        ...


class Execution(Protocol):
    """A request that can be computed again and again, one computation at a time."""

    async def execute_synchronously(self, *, deadline_ns: int | None = None) -> ExecutionResult: ...

    async def execute_fenced(
        self, wait_for: Sequence[SyncFence], *, deadline_ns: int | None = None, duration_ns: int | None = None
    ) -> FencedExecution: ...


class Buffer(Protocol):
    """A device memory. Uninitialised until a successful write; uninitialised again after a failed one."""

    token: int

    async def copy_to(self, destination: Memory) -> None: ...

    async def copy_from(self, source: Memory, dimensions: Sequence[int]) -> None: ...

    async def aclose(self) -> None: ...


class PreparedModel(Protocol):
    """A model made ready on a device. All calls may be mixed and may run at the same time."""

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        """Executes and returns the result.

        Raises:
            InvalidArgument: The request does not fit the model.
            MissedDeadline: See the module's obligation 3.
            DeadObject: The driver's process is gone.
            Error: Any other failure.
        """
        ...

    async def execute(
        self,
        request: Request,
        callback: ExecutionCallback,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ErrorStatus:
        """Launches an execution and returns the launch status; the callback comes exactly once.

        A launch that fails notifies the callback with the same status. A deadline that has passed is no launch failure: the
        miss arrives by the callback.
        """
        ...

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
        """Launches an execution that starts when all fences have signalled.

        Args:
            request: Its outputs must be fully specified and not empty.
            wait_for: A fence that has failed already is an ``InvalidArgument``; one that fails later fails the returned fence.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None for none.
            loop_timeout_ns: For every WHILE; None for the default.
            duration_ns: Allowance, counted from the moment that the last fence signals, or from the call where there is no fence;
                None for none.
        """
        ...

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> Burst:
        """Opens a burst.

        Args:
            controller_polling_us: Microseconds that an execution looks for its result before it sleeps; 0 for not at all. A wish: a
                device in this process has nothing to look for.
            server_polling_us: The same for the driver's end, which looks for the next request.
        """
        ...

    async def create_reusable_execution(
        self, request: Request, *, measure: bool = False, loop_timeout_ns: int | None = None
    ) -> Execution:
        """Checks a request once, to compute it many times."""
        ...

    async def aclose(self) -> None:
        """Frees the prepared model at the driver. Idempotent; executions that run end first, those that wait fail."""
        ...


class Device(Protocol):
    """A device, as its driver presents it."""

    @property
    def info(self) -> DeviceInfo:
        """What never changes for a build of the driver."""
        ...

    async def status(self) -> DeviceStatus:
        """Whether the device can take work now."""
        ...

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """Which operations of the main subgraph the device can run, in their order.

        IF and WHILE are supported only with all that their subgraphs contain.

        Raises:
            InvalidArgument: The model breaks a rule.
        """
        ...

    async def prepare_model(
        self,
        model: Model,
        *,
        preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        cache: CacheFiles | None = None,
    ) -> PreparedModel:
        """Makes a model ready.

        Args:
            model: Validated by the driver.
            preference: What to optimise for.
            priority: Relative to other prepared models.
            deadline_ns: Absolute; None for none.
            cache: Where to save the compilation; anything wrong with it never fails the preparation.

        Raises:
            InvalidArgument: The model breaks a rule, or holds an operation that the device cannot run.
            MissedDeadline: The deadline passed.
            Error: Any other failure.
        """
        ...

    async def prepare_model_from_cache(
        self, cache: CacheFiles, *, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None
    ) -> PreparedModel:
        """Restores a saved compilation.

        Raises:
            GeneralFailure: The device does not cache, or the files do not hold what the token names.
            InvalidArgument: The arguments are malformed.
        """
        ...

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """Allocates a device memory for the given roles.

        Raises:
            GeneralFailure: The device has no memories of its own.
            InvalidArgument: The roles are illegal or disagree.
        """
        ...

    async def aclose(self) -> None:
        """Lets the device go. Idempotent."""
        ...

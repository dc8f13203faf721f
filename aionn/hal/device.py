"""The driver contract: devices, prepared models, bursts and device memories.

Owns the protocols that every driver fulfils and that every caller may rely on. Calls that may wait are coroutines; failures are
``aionn.errors.Error`` with the statuses that the contract lists; any other exception is the driver's bug and counts as
GENERAL_FAILURE.

Some members of a protocol are abilities: a device may have them, and a caller that finds one takes a shorter path. An object that
lacks the ability has the member all the same, with the value that means this. ``PreparedModelDefaults``, ``BurstDefaults`` and
``BufferDefaults`` give these values; the base classes of ``aionn.drivers`` inherit them, and so does a driver that is written
without base classes. An object without such a member is rejected where it enters (``check_abilities``), with the members that it
lacks and the class to inherit. An adapter around such an object is not simpler: ``Device.allocate`` takes prepared models back
and compares them with its own, so each adapter would have to be removed again on that way.

Obligations of a driver, for every method:
1. Every argument is hostile and is checked before it is used.
2. A call that fails changes nothing that a later call can see.
3. A deadline is absolute, in nanoseconds of CLOCK_MONOTONIC. One that has passed before the start is
   MISSED_DEADLINE_PERSISTENT, one that passes while running is MISSED_DEADLINE_TRANSIENT.
4. A cancelled call (the coroutine's cancellation) stops waiting; the device may continue, and keeps its slot until it is done.
   Until then it may read and write the memory that the call names. ``launch`` is the form of execution that reports when that
   ends.
5. Nothing is written outside of the areas that the request names.

Source: ``IDevice``, ``IPreparedModel``, ``IBurst``, ``IBuffer`` of the NN HAL 1.3 and its AIDL form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from aionn.errors import ErrorStatus, GeneralFailure
from aionn.hal.capabilities import DeviceInfo, DeviceStatus
from aionn.hal.launch import GiveNativeCall, Launch, TaskLaunch
from aionn.hal.memory import BufferDesc, BufferRole, Memory
from aionn.hal.model import Model
from aionn.hal.qos import ExecutionPreference, Priority
from aionn.hal.request import ExecutionResult, FencedTiming, OutputShape, Request, Timing
from fences import SyncFence

__all__ = [
    "Buffer",
    "BufferDefaults",
    "Burst",
    "BurstDefaults",
    "CacheFiles",
    "Device",
    "ExecuteBound",
    "Execution",
    "ExecutionCallback",
    "FencedExecution",
    "FencedExecutionInfo",
    "PreparedModel",
    "PreparedModelDefaults",
    "check_abilities",
]


class CacheFiles(NamedTuple):
    """Compilation cache: open files, valid during the call alone, at any offset and with any old content.

    Attributes:
        model: Descriptors of the files whose integrity the driver checks.
        data: Descriptors of the files that hold constants and the like.
        token: 32 bytes that name the compilation.
        bytes_max: Most bytes to read of all files together; None means no limit. The files may grow after they were measured.
    """

    model: Sequence[int]
    data: Sequence[int]
    token: bytes
    bytes_max: int | None = None


ExecutionCallback = Callable[[ErrorStatus, Sequence[OutputShape], Timing], None]
"""Called exactly once with the status, the output shapes (empty unless NONE or OUTPUT_INSUFFICIENT_SIZE) and the timing."""

FencedExecutionInfo = Callable[[], Awaitable[tuple[ErrorStatus, FencedTiming]]]
"""Before completion: GENERAL_FAILURE. After: the execution's status, and the timings if they were measured."""

ExecuteBound = Callable[
    [Any, bool, int | None, int | None, Callable[[ExecutionResult], None]], ExecutionResult
]
"""Executes on the calling thread, and blocks. Its arguments are the result of ``PreparedModel.bind``, whether to measure, the
deadline, the loop time-out, and a function that it may call with the result once, before it gives the device's slot back."""


class FencedExecution(NamedTuple):
    """A fenced execution that was launched. It runs to its end even if no caller keeps this record; nothing cancels it but its
    deadline, its allowance, or the end of its device.

    Attributes:
        fence: Signals when the outputs are there, fails when they will never be; None means that they are there already. When it
            is finished the device touches the request's memory no more, unless a deadline or an allowance failed it.
        get_execution_info: Status and timings.
    """

    fence: SyncFence | None
    get_execution_info: FencedExecutionInfo


class Burst(Protocol):
    """Repeated executions of one prepared model at low cost, one execution at a time.

    It lives from ``PreparedModel.configure_execution_burst`` until it or its prepared model is closed, and remembers the memories
    that its requests name. A cancelled execution leaves the burst usable: the next one may be asked for immediately, and waits
    for the cancelled one where it has to.
    ``in_flight`` returns the launch of an ``execute_synchronously`` that was cancelled or has failed, if the device has not ended
    it. None instead of a function: the burst does not know, and a caller that has to know uses ``launch``. ``thread_id`` is the
    kernel's number of the thread that executes its requests, as this process sees it; None: it is not known.
    """

    @property
    def in_flight(self) -> Callable[[], Launch | None] | None: ...

    @property
    def thread_id(self) -> int | None: ...

    def launch(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> Launch:
        """Launches a request whose pools the device remembers by identifier. See ``PreparedModel.launch``.

        Args:
            request: As for ``PreparedModel.launch``.
            memory_identifiers: One per pool: -1 for "do not remember", else the pool's identifier for the life of the burst.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.

        Raises:
            InvalidArgument: Another execution is in flight that was not cancelled, or the request is illegal.
            Error: As for ``PreparedModel.launch``.
        """
        ...

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
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.

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


class BurstDefaults:
    """The abilities of a ``Burst`` that has none: inherit it, and define ``launch`` where the burst has it."""

    thread_id: int | None = None
    execute_synchronously: Callable[..., Coroutine[Any, Any, ExecutionResult]]
    in_flight: Callable[[], Launch | None] | None = None

    def launch(
        self,
        request: Request,
        memory_identifiers: Sequence[int],
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> Launch:
        """See ``Burst``: ``execute_synchronously`` in a task of its own, which ``cancel`` does not end."""
        call = self.execute_synchronously(
            request,
            memory_identifiers,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
        )
        return TaskLaunch(call, "aionn-burst-execution")


class Execution(Protocol):
    """A request that can be computed again and again, one computation at a time.

    It lives from ``PreparedModel.create_reusable_execution`` until the last reference to it is dropped, and keeps its prepared
    model and the request's memory alive. Closing the prepared model ends it. A cancelled computation is over for this object: the
    next one may be asked for immediately, while the device may still be busy with the first.
    """

    async def execute_synchronously(self, *, deadline_ns: int | None = None) -> ExecutionResult:
        """Computes the request. Raises as ``PreparedModel.execute_synchronously``, or ``InvalidArgument``: one is outstanding."""
        ...

    async def execute_fenced(
        self, wait_for: Sequence[SyncFence], *, deadline_ns: int | None = None, duration_ns: int | None = None
    ) -> FencedExecution:
        """Computes the request when all fences have signalled. See ``PreparedModel.execute_fenced`` for the arguments and
        errors; ``InvalidArgument`` also means that one is outstanding."""
        ...


class Buffer(Protocol):
    """A device memory: a value that stays on the device between executions.

    Uninitialised until a successful write, by ``copy_from`` or by an execution; uninitialised again after a failed one. It lives
    from ``Device.allocate`` until it is closed or the last reference to it is dropped; executions that use it then continue with
    the memory that they have. A cancelled ``copy_from`` leaves it uninitialised, a cancelled ``copy_to`` leaves the destination
    with any content.

    Attributes:
        token: The number by which requests name it; positive.
        size_bytes: Bytes that count against the limit of the client that allocated it. 0 while its shape is not wholly known, and
            where the device does not count them.
    """

    @property
    def token(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    async def copy_to(self, destination: Memory) -> None:
        """Copies the value into shared memory of exactly its size. Raises ``GeneralFailure``: it is uninitialised."""
        ...

    async def copy_from(self, source: Memory, dimensions: Sequence[int]) -> None:
        """Copies a value of the given shape from shared memory of exactly its size; an empty shape means the allocation's."""
        ...

    async def aclose(self) -> None:
        """Frees the memory. Idempotent."""
        ...


class BufferDefaults:
    """The abilities of a ``Buffer`` that has none."""

    size_bytes: int = 0


class PreparedModel(Protocol):
    """A model made ready on a device. All calls may be mixed and may run at the same time.

    It lives from ``Device.prepare_model`` until it is closed or its device is; a closed one raises ``InvalidArgument``, one whose
    process is gone ``DeadObject``. A cancelled ``execute_synchronously`` is over for its caller, not for the device: see
    ``launch``, from which the other forms can be made. An execution with a callback or a fence (``execute``, ``execute_fenced``) is
    not cancelled by anything that its caller does.

    Attributes:
        owner: The client that it belongs to, or its ``Connection``, set by a process that serves several; executions of equal
            priority take turns among owners. None: no client was set. A device that does not distinguish clients ignores it.
        takes_priority: Whether one execution may have another priority than the prepared model. Callers pass ``priority`` only
            where this is true.
        expected_duration_ns: Duration of one execution on the idle device, in nanoseconds. None: the driver does not know it, and
            callers learn it.
        execute_bound: Executes on a thread of the caller's, which saves a burst two changes of threads. None: a burst's thread
            asks the event loop to execute.
        native: Gives calls of the engine that need no Python, for arguments that ``execute_bound`` has executed. None: it has none.
        is_gone: Whether the process or connection that it belongs to is known to have ended, so that every call raises
            ``DeadObject``. False: it has not, or the device is in this process.
    """

    owner: Hashable

    @property
    def takes_priority(self) -> bool: ...

    @property
    def expected_duration_ns(self) -> int | None: ...

    @property
    def execute_bound(self) -> ExecuteBound | None: ...

    @property
    def native(self) -> GiveNativeCall | None: ...

    @property
    def is_gone(self) -> bool: ...

    def bind(self, request: Request) -> Any:
        """Checks a request and returns the first argument of ``execute_bound``, for any number of executions unless device
        memories are among the request's pools.

        Used only where ``execute_bound`` is not None. Raises ``InvalidArgument``: the request does not fit the model.
        """
        ...

    def abandon(self) -> None:
        """Discards all results: waiting executions should never start, running ones should end where the device can stop.

        A wish, which a device that cannot stop ignores. Called before ``aclose``, when a client is gone.
        """
        ...

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> Launch:
        """Launches an execution, in the thread of the event loop. Never blocks.

        The device uses the request's memory until the launch is done; the caller keeps the memory until then. A device whose slots
        are in use accepts the launch all the same, and begins it in its turn.

        Args:
            request: The arguments to read and write, and their memories.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.
            priority: Of this execution; None means the prepared model's. Ignored unless ``takes_priority`` is true.

        Raises:
            Error: The request was rejected, and the device never touches its memory. Which errors are noticed here and which are
                outcomes of the launch is the driver's choice; see ``execute_synchronously`` for all.
        """
        ...

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> ExecutionResult:
        """Executes and returns the result.

        Args:
            request: The arguments to read and write, and their memories.
            measure: Whether timings are wanted.
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.
            priority: Of this execution; None means the prepared model's. Passed only where ``takes_priority`` is true.

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
        priority: Priority | None = None,
    ) -> ErrorStatus:
        """Launches an execution and returns the launch status; the callback comes exactly once, from any thread.

        A launch that fails notifies the callback with the same status. A deadline that has passed does not fail the launch: the
        miss arrives by the callback. See ``execute_synchronously`` for the arguments.
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
            deadline_ns: Absolute; None means no deadline.
            loop_timeout_ns: For every WHILE; None means the default.
            duration_ns: Allowance, counted from the moment that the last fence signals, or from the call where there is no fence;
                None means no allowance.
        """
        ...

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> Burst:
        """Opens a burst.

        Args:
            controller_polling_us: Microseconds that an execution looks for its result before it sleeps; 0 for not at all. A wish:
                a device in this process has nothing to look for.
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


class PreparedModelDefaults:
    """The abilities of a ``PreparedModel`` that has none: inherit it, and define the members that the device supports.

    ``def execute_bound(self, arguments, measure, deadline_ns, loop_timeout_ns, answer)`` is an ordinary method there.
    """

    owner: Hashable = None
    takes_priority: bool = False
    expected_duration_ns: int | None = None
    execute_bound: ExecuteBound | None = None
    native: GiveNativeCall | None = None
    execute_synchronously: Callable[..., Coroutine[Any, Any, ExecutionResult]]

    @property
    def is_gone(self) -> bool:
        """See ``PreparedModel``: False."""
        return False

    def launch(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        priority: Priority | None = None,
    ) -> Launch:
        """See ``PreparedModel``: ``execute_synchronously`` in a task of its own, which ``cancel`` does not end."""
        of_its_own = {"priority": priority} if priority is not None and self.takes_priority else {}
        call = self.execute_synchronously(
            request,
            measure=measure,
            deadline_ns=deadline_ns,
            loop_timeout_ns=loop_timeout_ns,
            **of_its_own,
        )
        return TaskLaunch(call, "aionn-execution")

    def bind(self, request: Request) -> Any:
        """See ``PreparedModel``: the request itself."""
        return request

    def abandon(self) -> None:
        """See ``PreparedModel``: ignored."""


def check_abilities(made: object, defaults: type, where: str) -> None:
    """Checks that an object of a driver has every member of its protocol's defaults.

    Args:
        made: A prepared model, a burst or a device memory.
        defaults: ``PreparedModelDefaults``, ``BurstDefaults`` or ``BufferDefaults``.
        where: Names the driver in the message.

    Raises:
        GeneralFailure: Members are missing; the message names them and the class to inherit.
    """
    missing = [name for name in vars(defaults) if not name.startswith("_") and not hasattr(made, name)]
    if missing:
        raise GeneralFailure(
            f"{where}: the driver's {type(made).__name__} lacks {', '.join(missing)}; inherit aionn.hal.{defaults.__name__}"
        )


class Device(Protocol):
    """A device, as its driver presents it. Its calls may be mixed and may run at the same time.

    It lives from the call of the driver's factory until it is closed. Its prepared models and memories do not outlive it: closing
    waits for running executions or ends them, waiting ones fail, and so does every later call (``DeviceUnavailable``, or
    ``DeadObject`` where its process is gone). A cancelled preparation may continue until the driver can stop; its result is
    discarded.
    """

    @property
    def info(self) -> DeviceInfo:
        """The description that never changes for a build of the driver.

        Assigned once, before the device is used, where the machine's settings hide vendor extensions that it has: a device with
        extensions keeps it in an attribute, and asks that attribute what it supports.
        """
        ...

    async def status(self) -> DeviceStatus:
        """Whether the device can take work now.

        Raises:
            DeviceUnavailable: It never can; the message has the reason.
        """
        ...

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """Whether the device can run each operation of the main subgraph, in their order.

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
            preference: The aim of the optimisation.
            priority: Relative to other prepared models.
            deadline_ns: Absolute; None means no deadline.
            cache: Where to save the compilation; anything wrong with it never fails the preparation. None saves nothing.

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
        """Closes the device. Idempotent."""
        ...

"""The runtime for code without an event loop: the same calls, blocking, from any thread.

Owns a thread with an event loop, in which the runtime lives. The calls are documented at their definitions: each name here has its
counterpart of the same name in ``aionn``.

Invariants:
1. Any number of threads may use one runtime and what it made at the same time.
2. A call that is interrupted, by Ctrl-C for instance, is cancelled in the loop.
3. Nothing is left when ``close`` returns: no thread, no process, no descriptor. The one exception is a thread in which the
   source of a stream blocks; it ends when that gives its item, and does not keep the interpreter.
4. A runtime that is still open when the interpreter ends is closed then, before Python joins its threads.
5. In a child that was forked with an open runtime every call raises immediately, and the parent's driver processes continue.
"""

from __future__ import annotations

import abc
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import aionn.runtime.compilation as asynchronous_compilation
import aionn.runtime.executions.burst as asynchronous_burst
import aionn.runtime.executions.execution as asynchronous_execution
import aionn.runtime.executions.lent as asynchronous_lent
import aionn.runtime.executions.reusable as asynchronous_reusable
import aionn.runtime.executions.stream as asynchronous_stream
import aionn.runtime.guarantees.stream as asynchronous_guarantee
import aionn.runtime.memory.own as asynchronous_memory
import aionn.runtime.runtime as asynchronous_runtime
from aionn.errors import InvalidArgument, NotAdmitted
from aionn.hal import DeviceStatus, Model, Priority
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.executions.results import (
    ExecutionState,
    PriorityName,
    Result,
    StreamResult,
    StreamStatistics,
)
from aionn.runtime.executions.slot_pool import BurstStatistics
from aionn.runtime.guarantees.guarantee import StreamReservation
from aionn.runtime.introspection import Support
from aionn.runtime.memory.arguments import Array, TensorSpec
from aionn.runtime.memory.images import ImageMemory
from aionn.runtime.memory.own import SharedMemory
from aionn.runtime.placement.plan import Placement
from aionn.runtime.realtime import RealtimeReport
from aionn.runtime.runtime import Unavailable, open_runtime
from aionn.runtime.settings import Settings
from aionn.runtime.threaded import Forked, LoopThread, check_not_ending, close_at_exit, forget, read_on_thread
from fences import SyncFence

__all__ = [
    "Burst",
    "Compilation",
    "DeviceMemory",
    "Execution",
    "GuaranteedStream",
    "LentSlot",
    "ReusableExecution",
    "Runtime",
    "Stream",
    "open",
]

_T = TypeVar("_T")
_Item = TypeVar("_Item")


def _inner_repr(inner: object) -> str:
    """The representation of an object of the loop, as that of the object here."""
    return f"<blocking.{repr(inner).removeprefix('<')}"


class _Closing(InThisProcess, abc.ABC):
    """An object that a ``with`` statement closes."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Forked:
            if value is None:
                raise
            # The child leaves with an error of its own, or with sys.exit: that counts.


def open(**options: Any) -> Runtime:
    """Opens a runtime; use it with ``with``. Options and errors are those of ``aionn.open``."""
    return Runtime(open_runtime(**options))


class Runtime(_Closing):
    """Devices and compilations; see ``aionn.Runtime``."""

    def __init__(self, runtime: asynchronous_runtime.Runtime) -> None:
        self._runtime = runtime
        self._loop: LoopThread | None = None
        self._was_open = False

    def __repr__(self) -> str:
        return _inner_repr(self._runtime)

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and is not being closed."""
        return self._runtime.is_open

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """The usable devices, in order of preference."""
        return self._runtime.devices

    @property
    def unavailable(self) -> tuple[Unavailable, ...]:
        """The unavailable devices, with the reasons."""
        return self._runtime.unavailable

    @property
    def metrics_url(self) -> str | None:
        """The address of the metrics; None if they are not exposed."""
        return self._runtime.metrics_url

    @property
    def settings(self) -> Settings:
        """The settings of the runtime."""
        return self._runtime.settings

    def device(self, name: str) -> RuntimeDevice:
        """See ``aionn.Runtime.device``."""
        return self._runtime.device(name)

    def status(self, name: str) -> DeviceStatus:
        """Asks a device's driver, and starts it if it does not run. Raises as ``Device.status``."""
        return self._open_loop().call(self._runtime.device(name).status)

    def compile(self, model: Model | str | os.PathLike[str], **options: Any) -> Compilation:
        """Makes a model ready. Arguments and errors are those of ``aionn.Runtime.compile``."""
        loop = self._open_loop()

        async def compile_there() -> asynchronous_compilation.Compilation:
            return await self._runtime.compile(model, **options)

        return Compilation(loop, loop.call(compile_there))

    def supported_operations(
        self, model: Model | str | os.PathLike[str], **options: Any
    ) -> tuple[Support, ...]:
        """The operations that each device can run. Arguments and errors are those of ``aionn.Runtime.supported_operations``."""
        return self._open_loop().call(lambda: self._runtime.supported_operations(model, **options))

    def allocate(
        self,
        *,
        inputs: Sequence[tuple[Compilation, int]] = (),
        outputs: Sequence[tuple[Compilation, int]] = (),
        shape: Sequence[int] = (),
    ) -> DeviceMemory | SharedMemory:
        """Memory that executions read and write in place. Arguments and errors are those of ``aionn.Runtime.allocate``."""
        loop = self._open_loop()
        uses_in, uses_out = (
            [(net._compilation, index) for net, index in roles] for roles in (inputs, outputs)
        )
        made = loop.call(lambda: self._runtime.allocate(inputs=uses_in, outputs=uses_out, shape=shape))
        return made if isinstance(made, SharedMemory) else DeviceMemory(loop, made)

    def copy(self, source: OwnMemory, destination: OwnMemory) -> None:
        """Copies the values of one memory into another; see ``aionn.Runtime.copy``."""
        self._open_loop().call(self._runtime.copy, _inner(source), _inner(destination))

    def realtime(self) -> RealtimeReport:
        """Reports the scheduling that the machine granted, thread by thread; see ``aionn.Runtime.realtime``."""
        return self._open_loop().call(self._runtime.realtime)

    def _open_loop(self) -> LoopThread:
        if self._loop is None:
            raise InvalidArgument("aionn.blocking: the runtime is not open; use it with a with statement")
        return self._loop

    def start(self) -> Self:
        """Opens the runtime without ``with``, as a notebook does; ``close`` closes it."""
        return self.__enter__()

    def __enter__(self) -> Self:
        if self._was_open:
            raise InvalidArgument("aionn.blocking: a runtime can be opened once")
        check_not_ending()
        self._was_open = True
        loop = LoopThread(self._runtime.background)
        try:
            loop.call(self._runtime.__aenter__)
            close_at_exit(self.close)
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        return self

    def close(self) -> None:
        """Closes every compilation, ends every driver process and the loop. Idempotent.

        Calls of other threads that are under way raise an ``Error``.

        Raises:
            InvalidArgument: This is a forked child; the parent's runtime continues.
        """
        if self._loop is not None:
            self._loop.check()
        loop, self._loop = self._loop, None
        if loop is not None:
            forget(self.close)
            try:
                loop.call(self._runtime.aclose)
            finally:
                loop.close()


class Compilation(_Closing):
    """A model made ready; see ``aionn.Compilation``."""

    def __init__(self, loop: LoopThread, compilation: asynchronous_compilation.Compilation) -> None:
        self._loop = loop
        self._compilation = compilation

    def __repr__(self) -> str:
        return _inner_repr(self._compilation)

    @property
    def model(self) -> Model:
        """The model."""
        return self._compilation.model

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs."""
        return self._compilation.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs."""
        return self._compilation.outputs

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that it runs on."""
        return self._compilation.devices

    @property
    def placement(self) -> tuple[Placement, ...]:
        """The device of each operation, with the reason."""
        return self._compilation.placement

    @property
    def steps(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Device and operations of each step, in the order in which they run."""
        return self._compilation.steps

    @property
    def recoveries(self) -> int:
        """See ``aionn.Compilation.recoveries``."""
        return self._compilation.recoveries

    @property
    def from_cache(self) -> bool:
        """Whether every step came from the cache."""
        return self._compilation.from_cache

    def replace(self, model: Model | str | os.PathLike[str], *, deadline: int | None = None) -> None:
        """Has another model executed from now on, without a gap. See ``aionn.Compilation.replace``."""
        self._loop.call(lambda: self._compilation.replace(model, deadline=deadline))

    def page(self, **options: Any) -> str:
        """One self-contained HTML page that draws the model; see ``aionn.Compilation.page``."""
        return self._compilation.page(**options)

    def execute(self, inputs: Sequence[Any], **options: Any) -> Result:
        """Executes the model once and waits for it. Arguments and errors are those of ``aionn.Compilation.execute``."""

        values, keywords = _inner_values(inputs), _inner_options(options)
        return self._loop.call(lambda: self._compilation.execute(values, **keywords))

    def execute_fenced(self, inputs: Sequence[Any], **options: Any) -> Execution:
        """Starts an execution that begins when all fences have signalled, and returns immediately.

        Arguments and errors are those of ``aionn.Compilation.execute_fenced``.
        """
        values, keywords = _inner_values(inputs), _inner_options(options)
        started = self._loop.do(lambda: self._compilation.execute_fenced(values, **keywords))
        return Execution(self._loop, started)

    def burst(self, *, slots: int = 2) -> Burst:
        """Repeated executions at low cost; use it with ``with``. See ``aionn.Compilation.burst``."""
        return Burst(self._loop, self._loop.do(lambda: self._compilation.burst(slots=slots)))

    def reusable(self, **options: Any) -> ReusableExecution:
        """An execution whose memory is kept. Arguments and errors are those of ``aionn.Compilation.reusable``."""
        return ReusableExecution(self._loop, self._loop.do(lambda: self._compilation.reusable(**options)))

    def close(self) -> None:
        """Ends its bursts and frees it at the devices. Idempotent."""
        self._loop.end(self._compilation.aclose)


class Execution(InThisProcess):
    """An execution under way; see ``aionn.Execution``."""

    def __init__(self, loop: LoopThread, execution: asynchronous_execution.Execution) -> None:
        self._loop = loop
        self._execution = execution

    def __repr__(self) -> str:
        return _inner_repr(self._execution)

    @property
    def fence(self) -> SyncFence:
        """Finished with the execution; others may wait for it."""
        return self._execution.fence

    @property
    def state(self) -> ExecutionState:
        """Where it is in its life."""
        return self._execution.state

    @property
    def deadline_ns(self) -> int | None:
        """Absolute limit; None means no limit."""
        return self._execution.deadline_ns

    def change_priority(self, priority: PriorityName | Priority) -> bool:
        """See ``aionn.Execution.change_priority``."""
        return self._loop.do(self._execution.change_priority, priority)

    def explain(self) -> str:
        """See ``aionn.Execution.explain``."""
        return self._loop.do(self._execution.explain)

    def result(self) -> Result:
        """Waits for the result.

        Raises:
            Error: The reason for the missing result.
        """
        return self._loop.call(self._execution.wait)

    def cancel(self) -> None:
        """Cancels the execution; see ``aionn.Execution.cancel``. ``result`` raises ``ExecutionCancelled`` then."""
        self._loop.do(self._execution.cancel)


class ReusableExecution(InThisProcess):
    """The same execution again and again, one computation at a time; see ``Compilation.reusable``.

    Attributes:
        inputs: Views of the inputs; the next computation reads their values.
    """

    def __init__(self, loop: LoopThread, execution: asynchronous_reusable.ReusableExecution) -> None:
        self._loop = loop
        self._execution = execution
        self.inputs = execution.inputs

    def __repr__(self) -> str:
        return _inner_repr(self._execution)

    @property
    def outputs(self) -> tuple[Array, ...]:
        """Views of the outputs as the last computation left them; empty before the first."""
        return self._execution.outputs

    def execute(self, **options: Any) -> Result:
        """Computes once and waits for it. The result's arrays are views that the next computation overwrites."""
        return self._loop.call(lambda: self._execution.execute(**options))


class DeviceMemory(_Closing):
    """Memory that a device manages; see ``aionn.DeviceMemory``. Close it, or use it with ``with``."""

    def __init__(self, loop: LoopThread, memory: asynchronous_memory.DeviceMemory) -> None:
        self._loop = loop
        self._memory = memory

    def __repr__(self) -> str:
        return _inner_repr(self._memory)

    @property
    def device(self) -> str:
        """The device's name."""
        return self._memory.device

    @property
    def spec(self) -> TensorSpec:
        """Type and shape of what it holds."""
        return self._memory.spec

    def write(self, values: Array) -> None:
        """Copies values in; errors are those of ``aionn.DeviceMemory.write``."""
        self._loop.call(self._memory.write, values)

    def read(self) -> Array:
        """A copy of the values; errors are those of ``aionn.DeviceMemory.read``."""
        return self._loop.call(self._memory.read)

    def close(self) -> None:
        """Frees it at the device. Idempotent."""
        self._loop.end(self._memory.aclose)


OwnMemory = SharedMemory | ImageMemory | DeviceMemory


def _inner(memory: Any) -> Any:
    return memory._memory if isinstance(memory, DeviceMemory) else memory


def _inner_values(values: Any) -> Any:
    """Arguments in the runtime's form; the runtime rejects a value that is not a list."""
    return [_inner(value) for value in values] if isinstance(values, list | tuple) else values


def _inner_options(options: dict[str, Any]) -> dict[str, Any]:
    return (
        options
        if options.get("outputs") is None
        else {**options, "outputs": _inner_values(options["outputs"])}
    )


class Burst(_Closing):
    """Repeated executions of one compilation; see ``aionn.Burst``."""

    def __init__(self, loop: LoopThread, burst: asynchronous_burst.Burst) -> None:
        self._loop = loop
        self._burst = burst

    def __repr__(self) -> str:
        return _inner_repr(self._burst)

    def execute(self, inputs: Sequence[Any], **options: Any) -> Result:
        """Executes once. Arguments and errors are those of ``aionn.Burst.execute``."""

        async def execute_there() -> Result:
            return await self._burst.execute(inputs, **options)

        return self._loop.call(execute_there)

    def stream(self, source: Iterable[_Item], **options: Any) -> Stream[_Item]:
        """Executes every item of a source; iterate over the result.

        Args:
            source: Gives items, on a thread of its own, so that it may block.
            options: Those of ``aionn.Burst.stream``.

        Returns:
            A ``GuaranteedStream`` with ``guarantee``, otherwise a ``Stream``.
        """
        items = read_on_thread(source, self._loop)
        stream = self._loop.do(lambda: self._burst.stream(items, **options))
        if isinstance(stream, asynchronous_guarantee.GuaranteedStream):
            return GuaranteedStream(self._loop, stream)
        return Stream(self._loop, stream)

    def lend(self) -> LentSlot:
        """Lends a slot that the caller fills in place; see ``aionn.Burst.lend``."""
        return LentSlot(self._loop, self._loop.do(self._burst.lend))

    def statistics(self) -> BurstStatistics:
        """Counts of its buffers, and of those that use them."""
        return self._loop.do(self._burst.statistics)

    def __enter__(self) -> Self:
        self._loop.call(self._burst.__aenter__)
        return self

    def close(self) -> None:
        """Ends its streams and frees it at the driver. Idempotent."""
        self._loop.end(self._burst.aclose)


class LentSlot(_Closing):
    """A slot of a burst that its user fills in place; see ``aionn.LentSlot``."""

    def __init__(self, loop: LoopThread, slot: asynchronous_lent.LentSlot) -> None:
        self._loop = loop
        self._slot = slot
        self.inputs = slot.inputs

    def __repr__(self) -> str:
        return _inner_repr(self._slot)

    @property
    def is_busy(self) -> bool:
        """Whether a device may still read it."""
        return self._loop.do(lambda: self._slot.is_busy)

    def execute(self, **options: Any) -> Result:
        """Executes what was written into ``inputs``. Options and errors are those of ``aionn.LentSlot.execute``."""

        async def execute_there() -> Result:
            return await self._slot.execute(**options)

        return self._loop.call(execute_there)

    def close(self) -> None:
        """Gives it back to the burst. Idempotent."""
        self._loop.do(self._slot.close)


class Stream(_Closing, Generic[_Item]):
    """Results of a source's items, in its order; see ``aionn.Stream``. Leaving the iteration ends it."""

    def __init__(self, loop: LoopThread, stream: asynchronous_stream.Stream[_Item]) -> None:
        self._loop = loop
        self._stream = stream
        # Not a method: the generator must not hold this object, so that the stream ends immediately when its consumer is dropped.
        self._results = _results(loop, stream)
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        return _inner_repr(self._stream)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamResult[_Item]:
        if not self._reading.acquire(blocking=False):
            raise InvalidArgument(
                "stream: expected one consumer, but another thread waits for the next result"
            )
        try:
            return next(self._results)
        finally:
            self._reading.release()

    def cancel(self) -> None:
        """Ends the stream. Idempotent."""
        self._loop.do(self._stream.cancel)

    def close(self) -> None:
        """As ``cancel``."""
        self.cancel()

    def statistics(self) -> StreamStatistics:
        """Counts so far."""
        return self._loop.do(self._stream.statistics)


class GuaranteedStream(Stream[_Item]):
    """Results of a stream with a guarantee; see ``aionn.GuaranteedStream``. ``with`` asks for the reservation."""

    def __init__(self, loop: LoopThread, stream: asynchronous_guarantee.GuaranteedStream[_Item]) -> None:
        super().__init__(loop, stream)
        self._guaranteed = stream

    def __enter__(self) -> Self:
        self.admit()
        return self

    @property
    def reservation(self) -> StreamReservation | None:
        """See ``aionn.GuaranteedStream.reservation``."""
        return self._guaranteed.reservation

    @property
    def refusal(self) -> NotAdmitted | None:
        """See ``aionn.GuaranteedStream.refusal``."""
        return self._guaranteed.refusal

    def admit(self) -> StreamReservation | None:
        """Asks for the reservation; see ``aionn.GuaranteedStream.admit``."""
        return self._loop.call(self._guaranteed.admit)

    def change(self, **terms: Any) -> StreamReservation | None:
        """Asks for other terms. Arguments and errors are those of ``aionn.GuaranteedStream.change``."""
        return self._loop.call(lambda: self._guaranteed.change(**terms))

    def explain(self) -> str:
        """See ``aionn.GuaranteedStream.explain``."""
        return self._loop.do(self._guaranteed.explain)


def _results(loop: LoopThread, stream: asynchronous_stream.Stream[_Item]) -> Iterator[StreamResult[_Item]]:
    try:
        while True:
            try:
                yield loop.call(stream.__anext__)
            except StopAsyncIteration:
                return
    finally:
        loop.post(stream.cancel)  # Not waited for: the collector may have come.

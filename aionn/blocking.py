"""The runtime for code without an event loop: the same calls, blocking, from any thread.

Owns a thread with an event loop, in which the runtime lives. What the calls mean is said where they are defined: each name here has
its counterpart of the same name in ``aionn``.

Invariants:
1. Any number of threads may use one runtime and what it made at the same time.
2. A call that is interrupted, by Ctrl-C for instance, is cancelled in the loop.
3. Nothing is left when ``close`` returns: no thread, no process, no descriptor. The one exception is a thread in which the
   source of a stream blocks; it ends when that gives its item, and does not keep the interpreter.
4. A runtime that is still open when the interpreter ends is closed then, before Python joins its threads.
5. In a child that was forked with an open runtime every call raises at once, and the parent's driver processes go on.
"""

from __future__ import annotations

import abc
import concurrent.futures.thread
import contextvars
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.from_thread

import aionn.runtime.burst as asynchronous_burst
import aionn.runtime.compilation as asynchronous_compilation
import aionn.runtime.execution as asynchronous_execution
import aionn.runtime.memory as asynchronous_memory
import aionn.runtime.reusable as asynchronous_reusable
import aionn.runtime.runtime as asynchronous_runtime
import aionn.runtime.stream as asynchronous_stream
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import DeviceStatus, Model, Priority
from aionn.runtime.arguments import Array, TensorSpec
from aionn.runtime.background import Background, Waiter
from aionn.runtime.execution import ExecutionState, Result
from aionn.runtime.images import ImageMemory
from aionn.runtime.introspection import Support
from aionn.runtime.memory import SharedMemory
from aionn.runtime.plan import Placement
from aionn.runtime.runtime import RuntimeDevice, Unavailable, open_runtime
from aionn.runtime.settings import Settings
from fences import SyncFence

__all__ = [
    "Burst",
    "Compilation",
    "DeviceMemory",
    "Execution",
    "ReusableExecution",
    "Runtime",
    "Stream",
    "open",
]

_T = TypeVar("_T")
_Item = TypeVar("_Item")

EXIT_S_MAX = 5.0
"""How long the end of the interpreter waits for runtimes that nobody closed: twice what killing a driver process takes."""

SOURCE_END_S_MAX = 0.2
"""How long closing waits for the thread of a stream's source: one that does not block in the source ends at once."""


class _Forked(InvalidArgument):
    """A child has no threads of its parent's, so a call would wait for ever."""


class _Loop:
    """The thread with the event loop.

    Attributes:
        background: Where the runtime's executions live.
        sources: Threads that read the sources of streams.
        is_closed: Whether it takes no calls any more.
    """

    def __init__(self, background: Background) -> None:
        self.background = background
        self._portal: anyio.from_thread.BlockingPortal
        self._failure: BaseException | None = None
        started = threading.Event()
        # Not ``start_blocking_portal``: in a forked child its generator would be collected, and stop a loop that is not there.
        self._serving = threading.Thread(
            target=self._serve, args=(started,), name="aionn-blocking", daemon=True
        )
        self._serving.start()
        started.wait()
        if self._failure is not None:
            raise self._failure
        self._thread = self._portal.call(threading.get_ident)
        self._pid = os.getpid()
        self.is_closed = False
        self.sources: set[threading.Thread] = set()

    def _serve(self, started: threading.Event) -> None:
        async def serve() -> None:
            async with anyio.from_thread.BlockingPortal() as self._portal:
                started.set()
                await self._portal.sleep_until_stopped()

        try:
            anyio.run(serve)
        except BaseException as e:
            self._failure = e
        finally:
            started.set()

    def check(self) -> None:
        """Refuses what would wait for ever.

        Raises:
            InvalidArgument: This is a forked child, the loop's own thread, or the runtime is closed.
        """
        if os.getpid() != self._pid:
            raise _Forked(
                f"aionn.blocking: expected the process that opened the runtime (pid {self._pid}), got a child that was forked "
                f"from it (pid {os.getpid()}); open a runtime of its own there"
            )
        if threading.get_ident() == self._thread:
            raise InvalidArgument("aionn.blocking: called on its own loop's thread; it would wait for itself")
        if self.is_closed:
            raise InvalidArgument("aionn.blocking: the runtime is closed")

    def call(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Runs a coroutine function there and waits for it."""
        self.check()
        try:
            future = self._portal.start_task_soon(function, *args)
        except RuntimeError:
            raise self._closed_meanwhile() from None
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._closed_meanwhile() from None
        except BaseException:
            future.cancel()  # This thread was interrupted; if the call has failed, this does nothing.
            raise

    def do(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function there that does not wait."""
        self.check()
        try:
            # In a tuple: the portal would await a result that can be awaited.
            (result,) = self._portal.call(lambda: (function(*args),))
        except concurrent.futures.CancelledError:
            raise self._closed_meanwhile() from None
        except RuntimeError:
            if self.is_closed:
                raise self._closed_meanwhile() from None
            raise
        return result

    def end(self, aclose: Callable[[], Awaitable[None]]) -> None:
        """Closes something of the runtime's, unless that was closed, and everything with it."""
        if not self.is_closed:
            self.call(aclose)

    def _closed_meanwhile(self) -> GeneralFailure:
        return GeneralFailure("aionn.blocking: the runtime was closed by another thread during the call")

    def close(self) -> None:
        """Ends the calls of other threads, the loop and its thread."""
        self.is_closed = True
        with suppress(RuntimeError):  # It has stopped already.
            self._portal.call(self._portal.stop, True)
        self._serving.join()
        end_s = time.monotonic() + SOURCE_END_S_MAX
        for thread in list(self.sources):
            thread.join(max(0.0, end_s - time.monotonic()))


_open_runtimes: set[Runtime] = set()
_is_registered = False


def _close_at_exit() -> None:
    """Closes what is still open, all at once, when the main thread has ended and before Python joins the others."""
    closing = [threading.Thread(target=runtime.close, daemon=True) for runtime in list(_open_runtimes)]
    for thread in closing:
        thread.start()
    end_s = time.monotonic() + EXIT_S_MAX
    for thread in closing:
        thread.join(max(0.0, end_s - time.monotonic()))


def _keep_until_exit(runtime: Runtime) -> None:
    global _is_registered
    if not _is_registered:
        # Not ``atexit``: that comes after the threads were joined, and those of the loop wait for the loop to end. After the import
        # of concurrent.futures.thread, since the last to register is called first: threads of a pool may wait for one of our calls.
        threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]
        _is_registered = True
    _open_runtimes.add(runtime)


os.register_at_fork(after_in_child=_open_runtimes.clear)


class _Closing(abc.ABC):
    """What a ``with`` statement closes."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except _Forked:
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
        self._loop: _Loop | None = None
        self._was_open = False

    @property
    def devices(self) -> tuple[RuntimeDevice, ...]:
        """What can be used, in order of preference."""
        return self._runtime.devices

    @property
    def unavailable(self) -> tuple[Unavailable, ...]:
        """What cannot, and why."""
        return self._runtime.unavailable

    @property
    def settings(self) -> Settings:
        """How it behaves."""
        return self._runtime.settings

    def device(self, name: str) -> RuntimeDevice:
        """See ``aionn.Runtime.device``."""
        return self._runtime.device(name)

    def status(self, name: str) -> DeviceStatus:
        """Asks a device's driver, and starts it if it does not run."""
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
        """Which device can run which operation. Arguments and errors are those of ``aionn.Runtime.supported_operations``."""
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

    def _open_loop(self) -> _Loop:
        if self._loop is None:
            raise InvalidArgument("aionn.blocking: the runtime is not open; use it with a with statement")
        return self._loop

    def __enter__(self) -> Self:
        if self._was_open:
            raise InvalidArgument("aionn.blocking: a runtime can be opened once")
        self._was_open = True
        loop = _Loop(self._runtime.background)
        try:
            loop.call(self._runtime.__aenter__)
            _keep_until_exit(self)
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        return self

    def close(self) -> None:
        """Closes every compilation, ends every driver process and the loop. Idempotent.

        Calls of other threads that are under way raise an ``Error``.

        Raises:
            InvalidArgument: This is a forked child; the parent's runtime goes on.
        """
        if self._loop is not None:
            self._loop.check()
        loop, self._loop = self._loop, None
        if loop is not None:
            _open_runtimes.discard(self)
            try:
                loop.call(self._runtime.aclose)
            finally:
                loop.close()


class Compilation(_Closing):
    """A model made ready; see ``aionn.Compilation``."""

    def __init__(self, loop: _Loop, compilation: asynchronous_compilation.Compilation) -> None:
        self._loop = loop
        self._compilation = compilation

    @property
    def model(self) -> Model:
        """The model."""
        return self._compilation.model

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes."""
        return self._compilation.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it gives."""
        return self._compilation.outputs

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that it runs on."""
        return self._compilation.devices

    @property
    def placement(self) -> tuple[Placement, ...]:
        """Which operation runs where, and why."""
        return self._compilation.placement

    @property
    def steps(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Device and operations of each step, in the order in which they run."""
        return self._compilation.steps

    @property
    def from_cache(self) -> bool:
        """Whether every step came from the cache."""
        return self._compilation.from_cache

    def page(self, **options: Any) -> str:
        """One self-contained HTML page that draws the model; see ``aionn.Compilation.page``."""
        return self._compilation.page(**options)

    def execute(self, inputs: Sequence[Any], **options: Any) -> Result:
        """Executes the model once and waits for it. Arguments and errors are those of ``aionn.Compilation.execute``."""

        values, told = _inner_values(inputs), _inner_options(options)
        return self._loop.call(lambda: self._compilation.execute(values, **told))

    def execute_fenced(self, inputs: Sequence[Any], **options: Any) -> Execution:
        """Starts an execution that begins when all fences have signalled, and returns at once.

        Arguments and errors are those of ``aionn.Compilation.execute_fenced``.
        """
        values, told = _inner_values(inputs), _inner_options(options)
        started = self._loop.do(lambda: self._compilation.execute_fenced(values, **told))
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


class Execution:
    """An execution under way; see ``aionn.Execution``."""

    def __init__(self, loop: _Loop, execution: asynchronous_execution.Execution) -> None:
        self._loop = loop
        self._execution = execution

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
        """Absolute limit; None for none."""
        return self._execution.deadline_ns

    def change_priority(self, priority: Priority) -> bool:
        """See ``aionn.Execution.change_priority``."""
        return self._loop.do(self._execution.change_priority, priority)

    def explain(self) -> str:
        """See ``aionn.Execution.explain``."""
        return self._loop.do(self._execution.explain)

    def result(self) -> Result:
        """Waits for the result.

        Raises:
            Error: Why there is none.
        """
        return self._loop.call(self._execution.wait)

    def cancel(self) -> None:
        """Gives the execution up; see ``aionn.Execution.cancel``."""
        self._loop.do(self._execution.cancel)


class ReusableExecution:
    """The same execution again and again, one computation at a time; see ``Compilation.reusable``.

    Attributes:
        inputs: Views of the inputs; what they hold is what the next computation reads.
    """

    def __init__(self, loop: _Loop, execution: asynchronous_reusable.ReusableExecution) -> None:
        self._loop = loop
        self._execution = execution
        self.inputs = execution.inputs

    @property
    def outputs(self) -> tuple[Array, ...]:
        """Views of the outputs as the last computation left them; empty before the first."""
        return self._execution.outputs

    def execute(self, **options: Any) -> Result:
        """Computes once and waits for it. The result's arrays are views that the next computation overwrites."""
        return self._loop.call(lambda: self._execution.execute(**options))


class DeviceMemory(_Closing):
    """Memory that a device manages; see ``aionn.DeviceMemory``. Close it, or use it with ``with``."""

    def __init__(self, loop: _Loop, memory: asynchronous_memory.DeviceMemory) -> None:
        self._loop = loop
        self._memory = memory

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
    """Arguments as the runtime takes them; what is no list is the runtime's to refuse."""
    return [_inner(value) for value in values] if isinstance(values, list | tuple) else values


def _inner_options(options: dict[str, Any]) -> dict[str, Any]:
    return (
        options
        if options.get("outputs") is None
        else {**options, "outputs": _inner_values(options["outputs"])}
    )


class Burst(_Closing):
    """Repeated executions of one compilation; see ``aionn.Burst``."""

    def __init__(self, loop: _Loop, burst: asynchronous_burst.Burst) -> None:
        self._loop = loop
        self._burst = burst

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
        """
        items = _asynchronous(source, self._loop)
        return Stream(self._loop, self._loop.do(lambda: self._burst.stream(items, **options)))

    def __enter__(self) -> Self:
        self._loop.call(self._burst.__aenter__)
        return self

    def close(self) -> None:
        """Ends its streams and frees it at the driver. Idempotent."""
        self._loop.end(self._burst.aclose)


class Stream(Generic[_Item]):
    """Results of a source's items, in its order; see ``aionn.Stream``. Leaving the iteration ends it."""

    def __init__(self, loop: _Loop, stream: asynchronous_stream.Stream[_Item]) -> None:
        self._loop = loop
        self._stream = stream
        # Not a method: the generator must not hold this object, so that a consumer who leaves ends the stream at once.
        self._results = _results(loop, stream)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> asynchronous_stream.StreamResult[_Item]:
        return next(self._results)

    def cancel(self) -> None:
        """Ends the stream. Idempotent."""
        self._loop.do(self._stream.cancel)

    def statistics(self) -> asynchronous_stream.StreamStatistics:
        """Counts so far."""
        return self._loop.do(self._stream.statistics)


def _results(
    loop: _Loop, stream: asynchronous_stream.Stream[_Item]
) -> Iterator[asynchronous_stream.StreamResult[_Item]]:
    try:
        while True:
            try:
                yield loop.call(stream.__anext__)
            except StopAsyncIteration:
                return
    finally:
        with suppress(
            InvalidArgument
        ):  # The collector may come after the runtime was closed, which ended the stream.
            loop.do(stream.cancel)


class _Asked(Generic[_Item]):
    """The answer to a request for the next item."""

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.item: _Item | None = None
        self.is_end = False
        self.failure: BaseException | None = None


async def _asynchronous(source: Iterable[_Item], loop: _Loop) -> AsyncIterator[_Item]:
    # A thread of its own and a daemon: a source may block for ever, as a camera that gives nothing does, and must keep neither
    # closing nor the end of the interpreter. A worker thread of anyio would keep both.
    requests: queue.SimpleQueue[_Asked[_Item] | None] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def read() -> None:
        try:
            context.run(_read, source, requests, loop.background)
        finally:
            loop.sources.discard(threading.current_thread())

    thread = threading.Thread(target=read, name="aionn-source", daemon=True)
    loop.sources.add(thread)
    thread.start()
    try:
        while True:
            asked = _Asked[_Item](loop.background.waiter())
            requests.put(asked)
            await asked.waiter.future
            if asked.failure is not None:
                raise asked.failure
            if asked.is_end:
                return
            yield asked.item  # type: ignore[misc]
    finally:
        requests.put(None)


def _read(
    source: Iterable[_Item], requests: queue.SimpleQueue[_Asked[_Item] | None], background: Background
) -> None:
    items: Iterator[_Item] | None = None
    while (asked := requests.get()) is not None:
        try:
            items = iter(source) if items is None else items
            asked.item = next(items)
        except StopIteration:
            asked.is_end = True
        except BaseException as e:
            asked.failure = e
        background.call_soon(asked.waiter.wake)
        del asked  # The item is not kept until the next one is asked for.

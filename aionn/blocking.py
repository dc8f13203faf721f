"""The runtime for code without an event loop: the same calls, blocking, from any thread.

Owns a thread with an event loop, in which the runtime lives. What the calls mean is said where they are defined: each name here has
its counterpart of the same name in ``aionn``.

Invariants:
1. Any number of threads may use one runtime and what it made at the same time.
2. A call that is interrupted, by Ctrl-C for instance, is cancelled in the loop.
3. Nothing is left when ``close`` returns: no thread, no process, no descriptor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

import aionn.runtime.burst as asynchronous_burst
import aionn.runtime.compilation as asynchronous_compilation
import aionn.runtime.execution as asynchronous_execution
import aionn.runtime.runtime as asynchronous_runtime
from aionn.errors import InvalidArgument
from aionn.hal import DeviceStatus, Model
from aionn.runtime.arguments import TensorSpec
from aionn.runtime.compilation import Placement
from aionn.runtime.execution import Result
from aionn.runtime.runtime import RuntimeDevice, Unavailable, open_runtime
from fences import SyncFence

__all__ = ["Burst", "Compilation", "Execution", "Runtime", "open"]

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class _Loop:
    """The thread with the event loop."""

    def __init__(self) -> None:
        self._context: AbstractContextManager[anyio.from_thread.BlockingPortal] = (
            anyio.from_thread.start_blocking_portal(name="aionn-blocking")
        )
        self._portal = self._context.__enter__()
        self._thread = self._portal.call(threading.get_ident)

    def call(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Runs a coroutine function there and waits for it."""
        if threading.get_ident() == self._thread:
            raise InvalidArgument("aionn.blocking: called on its own loop's thread; it would wait for itself")
        future = self._portal.start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # This thread was interrupted; if the call has failed, this does nothing.
            raise

    def do(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function there that does not wait."""
        # In a tuple: the portal would await a result that can be awaited.
        return self._portal.call(lambda: (function(*args),))[0]

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def open(**options: Any) -> Runtime:
    """Opens a runtime; use it with ``with``. Options and errors are those of ``aionn.open``."""
    return Runtime(open_runtime(**options))


class Runtime:
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

    def _open_loop(self) -> _Loop:
        if self._loop is None:
            raise InvalidArgument("aionn.blocking: the runtime is not open; use it with a with statement")
        return self._loop

    def __enter__(self) -> Self:
        if self._was_open:
            raise InvalidArgument("aionn.blocking: a runtime can be opened once")
        self._was_open = True
        loop = _Loop()
        try:
            loop.call(self._runtime.__aenter__)
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        return self

    def close(self) -> None:
        """Closes every compilation, ends every driver process and the loop. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.call(self._runtime.aclose)
            finally:
                loop.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Compilation:
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

    def execute(self, inputs: Sequence[Any], **options: Any) -> Result:
        """Executes the model once and waits for it. Arguments and errors are those of ``aionn.Compilation.execute``."""

        async def execute_there() -> Result:
            return await self._compilation.execute(inputs, **options)

        return self._loop.call(execute_there)

    def execute_fenced(self, inputs: Sequence[Any], **options: Any) -> Execution:
        """Starts an execution that begins when all fences have signalled, and returns at once.

        Arguments and errors are those of ``aionn.Compilation.execute_fenced``.
        """
        started = self._loop.do(lambda: self._compilation.execute_fenced(inputs, **options))
        return Execution(self._loop, started)

    def burst(self, *, slots: int = 2) -> Burst:
        """Repeated executions at low cost; use it with ``with``. See ``aionn.Compilation.burst``."""
        return Burst(self._loop, self._loop.do(lambda: self._compilation.burst(slots=slots)))

    def close(self) -> None:
        """Ends its bursts and frees it at the devices. Idempotent."""
        self._loop.call(self._compilation.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Execution:
    """An execution under way; see ``aionn.Execution``."""

    def __init__(self, loop: _Loop, execution: asynchronous_execution.Execution) -> None:
        self._loop = loop
        self._execution = execution

    @property
    def fence(self) -> SyncFence:
        """Finished with the execution; others may wait for it."""
        return self._execution.fence

    def result(self) -> Result:
        """Waits for the result.

        Raises:
            Error: Why there is none.
        """
        return self._loop.call(self._execution.wait)

    def cancel(self) -> None:
        """Gives the execution up; see ``aionn.Execution.cancel``."""
        self._loop.do(self._execution.cancel)


class Burst:
    """Repeated executions of one compilation; see ``aionn.Burst``."""

    def __init__(self, loop: _Loop, burst: asynchronous_burst.Burst) -> None:
        self._loop = loop
        self._burst = burst

    def execute(self, inputs: Sequence[Any], **options: Any) -> Result:
        """Executes once. Arguments and errors are those of ``aionn.Burst.execute``."""

        async def execute_there() -> Result:
            return await self._burst.execute(inputs, **options)

        return self._loop.call(execute_there)

    def stream(
        self, source: Iterable[_Item], **options: Any
    ) -> Iterator[asynchronous_burst.StreamResult[_Item]]:
        """Executes every item of a source; iterate over the result.

        Args:
            source: Gives items, on a worker thread, so that it may block.
            options: Those of ``aionn.Burst.stream``.
        """
        stream = self._loop.do(lambda: self._burst.stream(_asynchronous(source), **options))
        try:
            while True:
                try:
                    yield self._loop.call(stream.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._loop.do(stream.cancel)

    def __enter__(self) -> Self:
        self._loop.call(self._burst.__aenter__)
        return self

    def close(self) -> None:
        """Ends its streams and frees it at the driver. Idempotent."""
        self._loop.call(self._burst.aclose)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _asynchronous(source: Iterable[_Item]) -> AsyncIterator[_Item]:
    items = iter(source)
    end = object()
    while (item := await anyio.to_thread.run_sync(next, items, end)) is not end:
        yield item  # type: ignore[misc]

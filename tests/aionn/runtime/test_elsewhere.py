"""A call from another event loop, from a thread, or in a forked child is refused in a sentence; the right one goes on to work.

What such a call waits for comes in the runtime's own loop: without the refusal it would wait for ever.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.hal import OperationType
from aionn.testing.models import chain
from fences import SyncFence

X = np.ones(2, np.float32)
WAIT_S_MAX = 20.0


class Opened(NamedTuple):
    runtime: aionn.Runtime
    net: aionn.Compilation
    burst: aionn.Burst
    memory: Any
    stream: Any


async def _forever() -> AsyncIterator[Any]:
    while True:
        yield X


@pytest.fixture(params=["process", "in_process"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    async with aionn.open(drivers=["reference"], isolation=request.param) as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (2,)))
        memory = await runtime.allocate(inputs=[(net, 0)])
        await memory.write(X)
        async with net.burst() as burst, net.burst() as other:
            stream = other.stream(_forever())  # It holds the slots of its burst.
            await anext(stream)
            yield Opened(runtime, net, burst, memory, stream)
            stream.cancel()
        await memory.aclose()


async def _cancelled(stream: aionn.Stream[Any]) -> None:
    stream.cancel()


CALLS: dict[str, Callable[[Opened], Awaitable[Any]]] = {
    "compile": lambda o: o.runtime.compile(chain([OperationType.RELU], (2,))),
    "supported_operations": lambda o: o.runtime.supported_operations(chain([OperationType.RELU], (2,))),
    "allocate": lambda o: o.runtime.allocate(inputs=[(o.net, 0)]),
    "copy": lambda o: o.runtime.copy(o.memory, o.memory),
    "close the runtime": lambda o: o.runtime.aclose(),
    "execute": lambda o: o.net.execute([X]),
    "close the compilation": lambda o: o.net.aclose(),
    "execute in the burst": lambda o: o.burst.execute([X]),
    "close the burst": lambda o: o.burst.aclose(),
    "stream": lambda o: anext(o.stream),
    "end the stream": lambda o: _cancelled(o.stream),
    "close the stream": lambda o: o.stream.aclose(),
    "leave the stream": lambda o: o.stream.__aexit__(None, None, None),
}
OVER_A_CHANNEL: dict[str, Callable[[Opened], Awaitable[Any]]] = {
    "status": lambda o: o.runtime.device("reference").status(),
    "write": lambda o: o.memory.write(X),
    "read": lambda o: o.memory.read(),
}


def _refused(call: Callable[[Opened], Awaitable[Any]], opened: Opened) -> str:
    """The words with which a call is refused in an event loop of this thread's own."""

    async def main() -> str:
        with anyio.fail_after(WAIT_S_MAX):
            try:
                await call(opened)
            except aionn.InvalidArgument as e:
                return str(e)
        raise AssertionError("it was not refused")

    return asyncio.run(main())


async def test_calls_from_another_loop_are_refused(opened: Opened) -> None:
    calls = dict(CALLS)
    if opened.runtime.device("reference").pid is not None:
        calls |= OVER_A_CHANNEL
    for name, call in calls.items():
        words = await anyio.to_thread.run_sync(_refused, call, opened)
        assert "called from another event loop than the one in which it was opened" in words, name
        assert "aionn.blocking" in words, name
    assert (await anext(opened.stream)).status == "on_time"
    assert (await opened.net.execute([X])).status.name == "NONE"
    assert (await opened.burst.execute([X])).status.name == "NONE"
    assert (await opened.memory.read()).tolist() == X.tolist()


async def test_calls_from_a_thread_without_a_loop_are_refused(opened: Opened) -> None:
    with pytest.raises(aionn.InvalidArgument, match=r"got none: threads use aionn\.blocking"):
        await anyio.to_thread.run_sync(lambda: opened.net.execute_fenced([X]))
    with pytest.raises(aionn.InvalidArgument, match=r"got none: threads use aionn\.blocking"):
        await anyio.to_thread.run_sync(opened.stream.cancel)
    assert (await anext(opened.stream)).status == "on_time"


async def test_execution_can_be_awaited_from_another_loop(opened: Opened) -> None:
    # It is a fence that is waited for, and fences belong to no loop.
    go = SyncFence("go")
    execution = opened.net.execute_fenced([X], wait_for=[go])

    async def main() -> aionn.Result:
        with anyio.fail_after(WAIT_S_MAX):
            return await execution

    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            result = await anyio.to_thread.run_sync(lambda: asyncio.run(main()))
            assert result.outputs[0].tolist() == X.tolist()

        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        go.signal()


async def test_execution_is_cancelled_from_a_thread_in_its_own_loop(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback of a fence runs in any thread. Cancelled there, a task would not be continued before the loop wakes."""
    execution = opened.net.execute_fenced([X], wait_for=[SyncFence("never")])
    await anyio.lowlevel.checkpoint()
    loop, scheduled_in = asyncio.get_running_loop(), set()
    call_soon = loop.call_soon

    def note(*args: Any, **options: Any) -> Any:
        scheduled_in.add(threading.get_ident())
        return call_soon(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon", note)
        await anyio.to_thread.run_sync(execution.cancel)
        with pytest.raises(aionn.InvalidArgument, match=r"threads use aionn\.blocking"):
            await anyio.to_thread.run_sync(execution.change_priority, "high")
        with pytest.raises(aionn.ExecutionCancelled):
            await execution
    with anyio.fail_after(WAIT_S_MAX):
        while execution.state.name != "FINISHED":
            await anyio.lowlevel.checkpoint()
    assert scheduled_in == {threading.get_ident()}


@pytest.mark.sampled(2)
async def test_forked_child_is_refused_and_the_parent_goes_on(opened: Opened) -> None:
    for name, call in (CALLS | OVER_A_CHANNEL).items():
        if name in OVER_A_CHANNEL and opened.runtime.device("reference").pid is None:
            continue
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                call(opened).__await__().send(None)
            except aionn.InvalidArgument as e:
                code = 7 if "forked" in str(e) else 8
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  The child ends at once: that is the claim.
        assert os.waitstatus_to_exitcode(status) == 7, name
    assert (await opened.net.execute([X])).status.name == "NONE"
    assert (await opened.burst.execute([X])).status.name == "NONE"

"""Executions at a driver process that their callers cancel: when they are done, and what ends the wait for that."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure
from aionn.hal import (
    ExecutionPreference,
    ExecutionResult,
    Model,
    OperandType,
    OperationType,
    PreparedModelDefaults,
    Priority,
    Request,
)
from aionn.models.builder import GraphBuilder
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire.calls import Pending
from aionn.service.wire.channel import Channel, Handler
from aionn.service.wire.handles import PoolOnWire, RequestOnWire
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Done,
    Execute,
    Failed,
    Hello,
    HelloReply,
    Ping,
    PrepareModel,
    PrepareModelReply,
)
from aionn.service.wire.quotas import Quotas

ONE = np.ones(1, np.float32)
WAIT_S_MAX = 10.0


def relu() -> Model:
    graph = GraphBuilder()
    value = graph.input(OperandType.TENSOR_FLOAT32, (3,))
    return graph.build([graph.result(OperationType.RELU, [value], value)])


class Gated(ReferenceDevice):
    """Runs only when it is let, and cannot be stopped.

    Attributes:
        may_run: Lets it.
        runs: One for each execution that has begun.
    """

    def __init__(self) -> None:
        super().__init__("slow")
        self.may_run, self.runs = threading.Event(), threading.Semaphore(0)

    def prepare(self, model: Model, **options: Any) -> Any:
        prepared = super().prepare(model, **options)
        run = prepared.run

        def gated(*arguments: Any) -> Any:
            self.runs.release()
            assert self.may_run.wait(WAIT_S_MAX)
            return run(*arguments)

        prepared.run = gated  # type: ignore[method-assign, assignment]
        return prepared

    async def has_begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.runs.acquire, True, WAIT_S_MAX)


async def abandoned(device: Gated, execute: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Cancels the execution once it has begun."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(execute)
        await device.has_begun()
        tasks.cancel_scope.cancel()


async def test_launch_is_done_when_the_driver_has_answered(serving: Any, small: Any) -> None:
    device = Gated()
    client = (await serving(device)).client("slow")
    prepared = await client.prepare_model(small.sum_model())
    work, other = small.Sum(), small.Sum()
    launch = prepared.launch(work.request)
    await device.has_begun()
    launch.cancel()
    launch.cancel()
    with anyio.move_on_after(0.05) as scope:
        await launch.done
    assert scope.cancelled_caught and not launch.is_done, "the device still works on its memory"
    assert prepared._channel.pending_count == 1
    waiting = prepared.launch(other.request)
    waiting.cancel()
    await client.status()  # The driver's end has read the cancellation.
    device.may_run.set()
    with anyio.fail_after(WAIT_S_MAX):
        await launch.done
        await waiting.done
    assert prepared._channel.pending_count == 0
    for each in (launch, waiting):
        assert each.is_cancelled
        with pytest.raises(GeneralFailure, match="the caller cancelled the call"):
            each.outcome()
    assert not device.runs.acquire(blocking=False), "what waited for the slot never ran"
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await client.aclose()


async def test_launch_without_a_waiter_goes_with_its_answer(serving: Any, small: Any) -> None:
    device = Gated()
    client = (await serving(device)).client("slow")
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    await abandoned(device, lambda: prepared.execute_synchronously(work.request))
    assert prepared._channel.pending_count == 1
    device.may_run.set()
    with anyio.fail_after(WAIT_S_MAX):
        while prepared._channel.pending_count:
            await anyio.sleep(0.001)
    await client.aclose()


async def test_memory_of_a_launch_is_kept_until_it_is_done(serving: Any, small: Any) -> None:
    device = Gated()
    client = (await serving(device)).client("slow")
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    memory = weakref.ref(work.memory)
    launch = prepared.launch(work.request)
    await device.has_begun()
    del work
    gc.collect()
    assert memory() is not None
    device.may_run.set()
    with anyio.fail_after(WAIT_S_MAX):
        await launch
    assert memory() is None
    await client.aclose()


async def test_slot_is_held_until_the_driver_has_answered(serving: Any) -> None:
    device = Gated()
    client = (await serving(device)).client("slow")
    await client.connect()
    x = np.ones(3, np.float32)
    async with aionn.open(devices=[client]) as runtime:
        net = await runtime.compile(relu())
        await abandoned(device, lambda: net.execute([x]))
        second = net.execute_fenced([x])
        await anyio.sleep(0.05)
        assert not device.runs.acquire(blocking=False), "the device is still busy with the first"
        device.may_run.set()
        with anyio.fail_after(WAIT_S_MAX):
            assert (await second).outputs[0].tolist() == [1.0] * 3


@asynccontextmanager
async def busy_process() -> AsyncIterator[tuple[aionn.Runtime, aionn.Compilation]]:
    """A driver process with an execution that its caller has left, and that never ends on its own within this test."""
    async with aionn.open(drivers=["reference"], isolation="process") as runtime:
        net = await runtime.compile(endless_model())
        await net.execute([-ONE])
        pid = runtime.devices[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # It cannot even hear that it shall stop.
        try:
            with anyio.move_on_after(0.05) as scope:
                await net.execute([ONE])
            assert scope.cancelled_caught
            assert "free" not in runtime.devices[0].dispatcher.explain(), "the driver has not answered yet"
            yield runtime, net
        finally:
            if runtime.devices[0].pid == pid:
                os.kill(pid, signal.SIGCONT)


async def free(runtime: aionn.Runtime) -> None:
    with anyio.fail_after(WAIT_S_MAX):
        while "free" not in runtime.devices[0].dispatcher.explain():
            await anyio.sleep(0.001)


async def test_driver_is_told_to_stop() -> None:
    """The loop's own time-out is 15 seconds; it ends sooner."""
    async with aionn.open(drivers=["reference"], isolation="process") as runtime:
        net = await runtime.compile(endless_model())
        await net.execute([-ONE])
        with anyio.move_on_after(0.05) as scope:
            await net.execute([ONE], loop_timeout=15)
        assert scope.cancelled_caught
        with anyio.fail_after(WAIT_S_MAX):
            np.testing.assert_array_equal((await net.execute([-ONE])).outputs[0], -ONE)
        assert "free" in runtime.devices[0].dispatcher.explain()


async def test_process_that_goes_on_gives_the_slot_back() -> None:
    async with busy_process() as (runtime, net):
        pid = runtime.devices[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
        await free(runtime)
        with anyio.fail_after(WAIT_S_MAX):
            np.testing.assert_array_equal((await net.execute([-ONE])).outputs[0], -ONE)


async def test_killed_process_gives_the_slot_back() -> None:
    async with busy_process() as (runtime, _):
        pid = runtime.devices[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await free(runtime)


@pytest.mark.parametrize("limits", ["shortened", pytest.param("whole", marks=pytest.mark.long)])
async def test_runtime_can_be_closed_meanwhile(monkeypatch: pytest.MonkeyPatch, limits: str) -> None:
    if limits == "shortened":
        monkeypatch.setattr("aionn.service.client.supervisor.END_S_MAX", 0.3)
        monkeypatch.setattr("aionn.service.client.prepared.FREE_S_MAX", 0.2)
    async with busy_process() as (runtime, _):
        with anyio.fail_after(WAIT_S_MAX):
            await runtime.aclose()
        assert "free" in runtime.devices[0].dispatcher.explain()


# The driver's side


class HandWrittenModel(PreparedModelDefaults):
    """A prepared model without launches of its own, which no cancellation stops.

    Attributes:
        begun: Set when it executes.
        may_end: Lets it end.
        ends: How its executions ended.
    """

    def __init__(self) -> None:
        self.begun, self.may_end = anyio.Event(), anyio.Event()
        self.ends: list[str] = []

    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        self.begun.set()
        try:
            await self.may_end.wait()
        except BaseException:
            self.ends.append("cancelled")
            raise
        self.ends.append("answered")
        return ExecutionResult()

    async def aclose(self) -> None:
        self.may_end.set()


class CountedProgress(Progress):
    def __init__(self) -> None:
        super().__init__(None)
        self.count = 0

    def work(self) -> Any:
        return self

    def __enter__(self) -> Any:
        self.count += 1

    def __exit__(self, *raised: object) -> None:
        self.count -= 1


@asynccontextmanager
async def executing(small: Any) -> AsyncIterator[tuple[HandWrittenModel, CountedProgress, Channel, Pending]]:
    """An execution of a hand-written driver, with its session and the client's end of the connection."""
    prepared, progress = HandWrittenModel(), CountedProgress()
    device: Any = ReferenceDevice()

    async def prepare_model(model: Model, **options: Any) -> Any:
        return prepared

    device.prepare_model = prepare_model
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(device, portal, tasks, quotas=Quotas(), progress=progress)
        async with channels(session.handle) as channel:
            await channel.call(Hello(PROTOCOL_VERSION), HelloReply)
            asked = PrepareModel(
                small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None, None
            )
            handle = (await channel.call(asked, PrepareModelReply)).prepared
            on_wire = RequestOnWire.of(small.Sum().request, PoolOnWire)
            pending = channel.begin(Execute(handle, on_wire, False, None, None, None))
            await prepared.begun.wait()
            yield prepared, progress, channel, pending
        await session.aclose()
    await device.aclose()


async def test_driver_without_launches_is_not_cancelled_and_answers_when_it_is_done(small: Any) -> None:
    async with executing(small) as (prepared, progress, channel, pending):
        channel.cancel(pending)
        with anyio.move_on_after(0.05) as scope:
            await pending.over()
        assert scope.cancelled_caught and prepared.ends == []
        assert progress.count == 1, "it counts as work of the device"
        prepared.may_end.set()
        with anyio.fail_after(WAIT_S_MAX):
            await pending.over()
        assert prepared.ends == ["answered"] and progress.count == 0


async def test_end_of_the_connection_does_not_wait_for_a_cancelled_execution(small: Any) -> None:
    with anyio.fail_after(WAIT_S_MAX):
        async with executing(small) as (prepared, progress, channel, pending):
            channel.cancel(pending)
            await channel.command(Ping())  # The driver's end has read the cancellation.
            channel.close("the client leaves")
            await pending.over()
            assert prepared.ends == []
    assert progress.count == 0


# The channel between them


class Peer:
    """Answers when it is let.

    Attributes:
        begun: Set when it works on a call.
        may_answer: Lets it.
        may_leave: Lets it answer what was cancelled.
        ends: How its calls ended.
    """

    def __init__(self) -> None:
        self.begun, self.may_answer, self.may_leave = anyio.Event(), anyio.Event(), anyio.Event()
        self.ends: list[str] = []

    async def handle(self, body: Any, channel: Channel) -> Any:
        self.begun.set()
        try:
            await self.may_answer.wait()
        except BaseException:
            self.ends.append("cancelled")
            with anyio.CancelScope(shield=True):
                await self.may_leave.wait()
            raise
        self.ends.append("answered")
        return Done()


@asynccontextmanager
async def channels(handle: Handler) -> AsyncIterator[Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def refuse(body: Any, channel: Channel) -> Any:
        raise GeneralFailure("no")

    one = Channel(ours, refuse, peer_name="one")
    two = Channel(theirs, handle, peer_name="two")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        tasks.start_soon(two.run)
        yield one
        tasks.cancel_scope.cancel()
    one.release()
    two.release()


async def left_call(channel: Channel, until: Callable[[], Awaitable[object]]) -> Pending:
    """A call that is cancelled after ``until``."""
    pending = channel.begin(Ping())
    await until()
    channel.cancel(pending)
    return pending


async def test_cancelled_call_is_answered_when_its_handler_has_returned() -> None:
    peer = Peer()
    async with channels(peer.handle) as channel:
        pending = await left_call(channel, peer.begun.wait)
        with anyio.move_on_after(0.05) as scope:
            await pending.over()
        assert scope.cancelled_caught and channel.pending_count == 1 and peer.ends == ["cancelled"]
        peer.may_leave.set()
        with anyio.fail_after(WAIT_S_MAX):
            await pending.over()
        assert channel.pending_count == 0 and isinstance(pending.reply, Failed)


async def test_call_that_is_cancelled_before_it_begins_is_answered() -> None:
    peer = Peer()
    peer.may_leave.set()
    async with channels(peer.handle) as channel:
        # Sent in the first turn, cancelled in the next: both may come in the same turn of the peer.
        pending = await left_call(channel, lambda: _turns_until(lambda: channel.pending_count == 1))
        with anyio.fail_after(WAIT_S_MAX):
            await pending.over()
        assert "answered" not in peer.ends


async def _turns_until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()

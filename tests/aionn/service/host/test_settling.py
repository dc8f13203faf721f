"""What a cancelled caller leaves at a driver process: who waits for it, until when, and what ends that wait."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure
from aionn.hal import Model, OperandType, OperationType, PreparedModel, PreparedModelDefaults, Request
from aionn.models.builder import GraphBuilder
from aionn.service.host.settling import Settling, at_once
from aionn.service.progress import Progress
from aionn.service.wire.channel import Channel
from aionn.service.wire.pending import Pending
from aionn.service.wire.protocol import Done, Ping

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


async def test_settling_ends_when_the_driver_has_answered(serving: Any, small: Any) -> None:
    device = Gated()
    client = (await serving(device)).client("slow")
    prepared = await client.prepare_model(small.sum_model())
    work, other = small.Sum(), small.Sum()
    await abandoned(device, lambda: prepared.execute_synchronously(work.request))
    await prepared.settle(other.request)  # Nothing of that one is there.
    with anyio.move_on_after(0.05) as scope:
        await prepared.settle(work.request)
    assert scope.cancelled_caught, "the device still works on its memory"
    assert prepared._channel.pending_count == 1
    device.may_run.set()
    with anyio.fail_after(WAIT_S_MAX):
        await prepared.settle(work.request)
    assert prepared._channel.pending_count == 0 and not prepared._left
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await client.aclose()


async def test_what_nobody_settles_goes_with_its_answer(serving: Any, small: Any) -> None:
    device = Gated()
    client = (await serving(device)).client("slow")
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    await abandoned(device, lambda: prepared.execute_synchronously(work.request))
    assert len(prepared._left) == 1
    device.may_run.set()
    with anyio.fail_after(WAIT_S_MAX):
        while prepared._left:
            await anyio.sleep(0.001)
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
    """The loop's own time-out is two seconds; it ends sooner."""
    async with aionn.open(drivers=["reference"], isolation="process") as runtime:
        net = await runtime.compile(endless_model())
        await net.execute([-ONE])
        with anyio.move_on_after(0.05) as scope:
            await net.execute([ONE])
        assert scope.cancelled_caught
        with anyio.fail_after(1.5):
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


async def test_runtime_can_be_closed_meanwhile() -> None:
    async with busy_process() as (runtime, _):
        with anyio.fail_after(WAIT_S_MAX):
            await runtime.aclose()
        assert "free" in runtime.devices[0].dispatcher.explain()


# The driver's side


class Unsettled(PreparedModelDefaults):
    """A prepared model that cannot say when it is done with what was cancelled."""


class Settled(PreparedModelDefaults):
    """One that can."""

    def __init__(self) -> None:
        self.settled: list[Request] = []
        self.at_work: list[bool] = []
        self.progress = CountedProgress()

    async def settle(self, request: Request) -> None:
        self.settled.append(request)
        self.at_work.append(self.progress.count > 0)


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


async def test_settling_counts_as_work_of_the_device() -> None:
    prepared: Any = Settled()
    settling, body, request = Settling(prepared.progress), object(), Request((), (), ())
    assert settling.settle_of(body) is at_once
    with settling.execution(body, prepared, request):
        settle = settling.settle_of(body)
        assert settling.settle_of(object()) is at_once
    assert settle is not None and settling.settle_of(body) is at_once
    await settle()
    assert prepared.settled == [request] and prepared.at_work == [True] and prepared.progress.count == 0


def test_driver_that_cannot_settle_is_not_cancelled() -> None:
    settling, body = Settling(Progress(None)), object()
    prepared: PreparedModel = Unsettled()  # type: ignore[assignment]
    with settling.execution(body, prepared, Request((), (), ())):
        assert settling.settle_of(body) is None


# The channel between them


class Peer:
    """Answers when it is let.

    Attributes:
        begun: Set when it works on a call.
        may_answer: Lets it.
        may_settle: Lets what was cancelled be answered.
        ends: How its calls ended.
    """

    def __init__(self) -> None:
        self.begun, self.may_answer, self.may_settle = anyio.Event(), anyio.Event(), anyio.Event()
        self.ends: list[str] = []

    async def handle(self, body: Any, channel: Channel) -> Any:
        self.begun.set()
        try:
            await self.may_answer.wait()
        except BaseException:
            self.ends.append("cancelled")
            raise
        self.ends.append("answered")
        return Done()


@asynccontextmanager
async def channels(peer: Peer, settle_of: Any) -> AsyncIterator[Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def refuse(body: Any, channel: Channel) -> Any:
        raise GeneralFailure("no")

    one = Channel(ours, refuse, peer_name="one")
    two = Channel(theirs, peer.handle, peer_name="two", settle_of=settle_of)
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


@pytest.mark.parametrize("settles", [True, False])
async def test_cancelled_call_is_answered_when_it_is_over(settles: bool) -> None:
    peer = Peer()
    async with channels(peer, lambda body: peer.may_settle.wait if settles else None) as channel:
        pending = await left_call(channel, peer.begun.wait)
        with anyio.move_on_after(0.05) as scope:
            await pending.over()
        assert scope.cancelled_caught and channel.pending_count == 1
        assert peer.ends == (["cancelled"] if settles else [])
        (peer.may_settle if settles else peer.may_answer).set()
        with anyio.fail_after(WAIT_S_MAX):
            await pending.over()
        assert channel.pending_count == 0
        assert peer.ends == (["cancelled"] if settles else ["answered"])


async def test_call_that_is_cancelled_before_it_begins_is_answered() -> None:
    peer = Peer()
    async with channels(peer, None) as channel:
        # Sent in the first turn, cancelled in the next: both may come in the same turn of the peer.
        pending = await left_call(channel, lambda: _turns_until(lambda: channel.pending_count == 1))
        with anyio.fail_after(WAIT_S_MAX):
            await pending.over()
        assert "answered" not in peer.ends


async def _turns_until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()


async def test_settle_that_raises_is_an_answer_too() -> None:
    async def broken() -> None:
        raise RuntimeError("the driver's fault")

    peer = Peer()
    async with channels(peer, lambda body: broken) as channel:
        pending = await left_call(channel, peer.begun.wait)
        with anyio.fail_after(WAIT_S_MAX):
            await pending.over()
        assert "the driver's fault" in str(pending.reply) and channel.is_alive

"""Executions of several processes, and models prepared on one thread: whose turn is next, and who pauses for whom."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import InvalidArgument
from aionn.hal import DataLocation, ExecutionPreference, Memory, Priority, Request, RequestArgument
from aionn.hal.pieces import pace_of_call
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire import peers as peers_module
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.load import Load
from aionn.service.wire.peers import PAUSE, PIECE_NS, Peers
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Execute,
    ExecuteFenced,
    Hello,
    PrepareModel,
    SupportedOperations,
)
from aionn.service.wire.quotas import Quotas
from aionn.testing import models

WAIT_S = 20.0
CONNECTIONS = 6
CHANNEL: Any = None


def _prepare(operations: int = 1) -> PrepareModel:
    model = models.identity((4,), operations=operations)
    return PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)


class Noting(Progress):
    """Notes the pauses that are reported."""

    def __init__(self) -> None:
        super().__init__(None)
        self.pauses_s: list[float] = []

    def moved_on(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)


class Served:
    """Sessions with one device."""

    def __init__(self, device: ReferenceDevice, portal: Any, tasks: Any) -> None:
        self.peers, self.progress = Peers(), Noting()
        self._made = device, portal, tasks
        self.sessions: list[Session] = []

    async def session(self, process: int) -> Session:
        device, portal, tasks = self._made
        peer = self.peers.of(process)
        session = Session(device, portal, tasks, quotas=Quotas(), progress=self.progress, peer=peer)
        await session.handle(Hello(PROTOCOL_VERSION), CHANNEL)
        self.sessions.append(session)
        return session


@asynccontextmanager
async def _serving(device: ReferenceDevice) -> AsyncIterator[Served]:
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        served = Served(device, portal, tasks)
        yield served
        for session in served.sessions:
            await session.aclose()
    await device.aclose()


async def test_connections_of_a_process_have_one_turn_together() -> None:
    """With a turn for each connection, the model of the other process would come after one of each."""
    entered, may_end = threading.Event(), threading.Event()
    order: list[int] = []

    class Halting(ReferenceDevice):
        def supports(self, model: Any) -> Any:
            order.append(len(model.main.operations))
            entered.set()
            assert may_end.wait(WAIT_S)
            return super().supports(model)

    device = Halting()
    async with _serving(device) as served, anyio.create_task_group() as tasks:
        many = [await served.session(1) for _ in range(CONNECTIONS)]
        one = await served.session(2)
        tasks.start_soon(many[0].handle, _prepare(), CHANNEL)
        assert await anyio.to_thread.run_sync(entered.wait, WAIT_S)
        for session in many:
            tasks.start_soon(session.handle, _prepare(), CHANNEL)
        while device.preparing.waiting_count < CONNECTIONS:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(one.handle, _prepare(2), CHANNEL)
        while device.preparing.waiting_count <= CONNECTIONS:
            await anyio.lowlevel.checkpoint()
        may_end.set()
    assert order.index(2) <= 2


def _request() -> Request:
    first, second = (RequestArgument(False, DataLocation(0, offset, 16)) for offset in (0, 16))
    return Request((first,), (second,), (Memory.create(32),))


@pytest.mark.parametrize("how", ["plain", "fenced", "burst"])
async def test_executions_of_a_process_have_one_turn_together(how: str) -> None:
    """With a turn for each connection, the executions of the other process would come after one of each."""
    order: list[int] = []

    class Noted(ReferencePreparedModel):
        def run(self, *asked: Any) -> Any:
            order.append(len(self.model.main.operations))
            return super().run(*asked)

    class NotingDevice(ReferenceDevice):
        def prepare(self, model: Any, *, priority: Priority, **terms: Any) -> Noted:
            return Noted(self, model, priority)

    device = NotingDevice()

    async def execute(session: Session, handle: int) -> None:
        if how == "plain":
            body = Execute(handle, RequestOnWire.of(_request()), False, None, None)
            await session.handle(body, CHANNEL)
        elif how == "fenced":
            fenced = ExecuteFenced(handle, RequestOnWire.of(_request()), (), False, None, None, None)
            reply: Any = await session.handle(fenced, CHANNEL)
            await reply.fence
        else:  # As the thread of a burst.
            prepared: Any = session._prepared_model(handle)
            await anyio.to_thread.run_sync(prepared.execute_bound, prepared.bind(_request()))

    async with _serving(device) as served:
        work: list[tuple[Session, int]] = []
        for process in (*[1] * CONNECTIONS, 2):
            session = await served.session(process)
            prepared: Any = await session.handle(_prepare(process), CHANNEL)
            work.append((session, prepared.prepared))
        async with anyio.create_task_group() as tasks:
            with device.gate.slot(Priority.MEDIUM, None, owner="another"):
                for place, (session, handle) in enumerate([*work, work[-1]], 1):
                    tasks.start_soon(execute, session, handle)
                    while device.gate.waiting_count < place:
                        await anyio.lowlevel.checkpoint()
    assert order[:4] == [1, 2, 1, 2] and len(order) == CONNECTIONS + 2


@pytest.mark.parametrize("how", ["prepare", "support"])
async def test_no_process_waits_for_the_pauses_of_another_ones_preparation(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that prepares has several calls in progress, and a third one is served: alone with it, it would pause."""
    clock = types.SimpleNamespace(monotonic_ns=lambda: 0, thread_time_ns=lambda: 0)
    monkeypatch.setattr(peers_module, "time", clock)
    may_end = anyio.Event()
    waiting: list[None] = []

    class Waiting(ReferenceDevice):
        async def prepare_model(self, model: Any, **terms: Any) -> Any:
            waiting.append(None)
            await may_end.wait()
            raise InvalidArgument("not today")

        async def supported_operations(self, model: Any) -> Any:
            waiting.append(None)
            await may_end.wait()
            return (True,)

    async with _serving(Waiting()) as served:
        busy, other = await served.session(1), await served.session(2)
        peer, third = served.peers.of(1), served.peers.of(3)
        peer.loads.append(Load())
        for _ in range(2):
            peer.loads[0].begin(0, 0)
        third.received(has_waited=True)

        async def ask(session: Session) -> None:
            body = _prepare() if how == "prepare" else SupportedOperations(models.identity((4,)))
            try:
                await session.handle(body, CHANNEL)
            except InvalidArgument:
                assert how == "prepare"

        def pause_ns() -> int:
            return peer.pause_while_preparing_ns(PIECE_NS, 0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, busy)
            while len(waiting) < 1:
                await anyio.lowlevel.checkpoint()
            assert pause_ns() == PAUSE * PIECE_NS
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as cancelled:
                    cancelled.start_soon(ask, other)
                    while len(waiting) < 2:
                        await anyio.lowlevel.checkpoint()
                    assert pause_ns() == 0
                    scope.cancel()
            assert pause_ns() == PAUSE * PIECE_NS
            tasks.start_soon(ask, other)
            while len(waiting) < 3:
                await anyio.lowlevel.checkpoint()
            assert pause_ns() == 0
            may_end.set()
        assert pause_ns() == PAUSE * PIECE_NS


async def test_pieces_and_pauses_of_a_preparation_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch would take them for a hang of the device."""
    pieces = itertools.count(0, PIECE_NS)
    slept_s: list[float] = []
    time = types.SimpleNamespace(
        monotonic_ns=pieces.__next__, thread_time_ns=pieces.__next__, sleep=slept_s.append
    )
    monkeypatch.setattr(peers_module, "time", time)

    class Pausing(ReferenceDevice):
        async def supported_operations(self, model: Any) -> Any:
            pace = pace_of_call.get()
            assert pace is not None
            for _ in range(3):
                pace()
            return (True,)

    async with _serving(Pausing()) as served:
        session, third = await served.session(1), served.peers.of(3)
        body = SupportedOperations(models.identity((4,)))
        await session.handle(body, CHANNEL)
        assert served.progress.pauses_s == [0.0, 0.0] and not slept_s
        served.peers.of(1).connects_or_leaves()
        third.received(has_waited=True)
        await session.handle(body, CHANNEL)
        assert slept_s and served.progress.pauses_s[2:] == slept_s

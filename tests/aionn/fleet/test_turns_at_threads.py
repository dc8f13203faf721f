"""Clients of a node take turns at the threads that decode their large messages and make memory for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.fleet import carrying
from aionn.fleet.carrying import carry
from aionn.fleet.control import REPLY_LIMITS
from aionn.fleet.messages import Hello, Welcome, decode_from_node, framed
from aionn.fleet.node.server import Node
from aionn.fleet.node.session import CALLS_MAX, Session
from aionn.fleet.wire import Wire
from aionn.hal import Device, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.scheduler.worker_turns import WorkerTurns
from aionn.service.wire.protocol import Call, SupportedOperations
from aionn.testing import run
from aionn.testing.links import SimulatedLink
from tests.aionn.fleet.conftest import TimedDevice, simulated
from tests.aionn.service.sums import Sum, sum_model

WAIT_S_MAX = 30.0
THREADS = 2
LARGE = 300_000
"""Elements of a vector whose memory is made on a thread."""


def chain(count: int) -> Model:
    """A model of so many additions."""
    graph = GraphBuilder()
    first = value = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    for _ in range(count):
        value = graph.result(OperationType.ADD, [value, first, graph.constant(0)], first)
    return graph.build([value])


class RawClient:
    """A client that sends frames and ignores the answers."""

    def __init__(self, link: SimulatedLink, node: Node) -> None:
        self.wire = Wire(REPLY_LIMITS)
        self.wire.owner = self
        self.greeted = anyio.Event()
        link.join(self.wire, node.newcomer())
        self.wire.send(framed(Hello("control", 0)))

    def on_heard(self) -> None: ...

    def on_head(self, head: bytes, body_bytes: int) -> Sequence[memoryview]:
        if isinstance(decode_from_node(head), Welcome):
            self.greeted.set()
        return ()

    def on_body(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


@pytest.mark.thorough
async def test_client_with_many_large_calls_leaves_turns_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    read, may_end = carrying.read_parts, threading.Event()
    order: list[int] = []

    def halting(stands_for: Any, fds: Any) -> Any:
        order.append(stands_for.id)
        assert may_end.wait(WAIT_S_MAX)
        return read(stands_for, fds)

    link, model = SimulatedLink(), chain(1000)

    async def open_device(tasks: Any) -> Device:
        return TimedDevice(link)

    numbers = range(1, CALLS_MAX + 2)
    frames = [await carry(Call(number, SupportedOperations(model)), "test") for number in numbers]
    monkeypatch.setattr(carrying, "_turns", WorkerTurns("messages of this test", THREADS))
    monkeypatch.setattr(carrying, "read_parts", halting)
    async with anyio.create_task_group() as tasks:
        node = Node("edge1", open_device, tasks, now=link.node_now)
        many, one = RawClient(link, node), RawClient(link, node)
        with anyio.fail_after(WAIT_S_MAX):
            await many.greeted.wait()
            await one.greeted.wait()
            try:
                for number, (head, contents, _) in zip(numbers, frames, strict=True):
                    client = many if number <= CALLS_MAX else one
                    client.wire.send(head, contents)
                    while len(order) + carrying._turns.waiting_count < number:
                        await anyio.sleep(0.001)
            finally:
                may_end.set()
            while len(order) < len(numbers):
                await anyio.sleep(0.001)
        many.wire.close("the test is over")
        one.wire.close("the test is over")
        tasks.cancel_scope.cancel()
    # Threads that began together may run in another order.
    assert sorted(order) == [*numbers] and order.index(numbers[-1]) <= 3 * THREADS


def test_memories_of_all_connections_of_a_client_are_made_in_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, str]] = []

    class Noting(WorkerTurns):
        async def run(self, owner: Any, call: Any, *arguments: Any) -> Any:
            calls.append((owner, call.__qualname__.partition(".")[0]))
            return await super().run(owner, call, *arguments)

    async def main() -> None:
        async with simulated() as there:
            graph = GraphBuilder()
            a = graph.input(OperandType.TENSOR_FLOAT32, (LARGE,))
            constant = graph.constant(np.ones(LARGE, np.float32))
            model = graph.build([graph.result(OperationType.ADD, [a, constant, graph.constant(0)], a)])
            await (await there.device.prepare_model(model)).aclose()
            prepared, frame = await there.device.prepare_model(sum_model(LARGE)), Sum(LARGE)
            await prepared.execute_synchronously(frame.request)
            assert frame.is_right

    monkeypatch.setattr(carrying, "_turns", Noting("messages of this test", THREADS))
    run(main)
    at_node = [(owner, name) for owner, name in calls if isinstance(owner, Session)]
    assert len({id(owner) for owner, _ in at_node}) == 1
    assert {name for _, name in at_node} == {"memories_for", "DataConnection"}

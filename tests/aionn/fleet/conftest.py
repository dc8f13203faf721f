"""A node in virtual time behind a simulated network, and one in processes of its own on loopback."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.kit.asynchronous import AsyncDevice, AsyncPreparedModel
from aionn.drivers.kit.loop_gate import LoopControl
from aionn.fleet.addresses import NodeAddress, parse_node
from aionn.fleet.device import NodeDevice
from aionn.fleet.node.server import Node
from aionn.hal import (
    CancelCapability,
    Device,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    FeatureLevel,
    Launch,
    Model,
    OperationType,
    OutputShape,
    Priority,
    Request,
    uniform_capabilities,
)
from aionn.platform.python_process import python_command, python_environment
from aionn.testing.links import SimulatedLink

START_S_MAX = 60.0
"""Limit of the start of a node's processes, on a machine with much else to do."""


class TimedModel(AsyncPreparedModel):
    """Adds two vectors, after a while."""

    device: TimedDevice

    async def run(
        self, inputs: Sequence[Any], outputs: Sequence[OutputArea], control: LoopControl
    ) -> Sequence[OutputShape]:
        end_ns = control.now() + round(self.device.duration_s * 1e9)
        while control.now() < end_ns:
            control.check()
            await control.sleep_until(
                end_ns if control.deadline_ns is None else min(end_ns, control.deadline_ns)
            )
        control.check()
        return [outputs[0].store(inputs[0] + inputs[1])]

    def launch(self, request: Request, *, deadline_ns: int | None = None, **more: Any) -> Launch:
        """As the base class, for a deadline on the node's clock."""
        if deadline_ns is not None:
            own_ns = self.device.own_ns(deadline_ns)
            self.device.deadlines.append((own_ns, self.device.now()))
            deadline_ns = max(0, own_ns)
        return super().launch(request, deadline_ns=deadline_ns, **more)


class TimedDevice(AsyncDevice):
    """A device of a node whose clock is not that of the loop."""

    def __init__(self, link: SimulatedLink | None, *, version: str = "1", slots: int = 1) -> None:
        super().__init__(
            DeviceInfo(
                "timed",
                DeviceType.OTHER,
                version,
                FeatureLevel.LEVEL_4,
                uniform_capabilities(1.0, 1.0),
                slots=slots,
                cancel=CancelCapability.ANYTIME,
            )
        )
        self.link = link
        self.duration_s = 0.005
        self.deadlines: list[tuple[int, int]] = []
        self.prepared: list[TimedModel] = []

    def own_ns(self, node_ns: int) -> int:
        assert self.link is not None
        return self.link.client_time(node_ns)

    def supports(self, model: Model) -> Sequence[bool]:
        return [operation.type == OperationType.ADD for operation in model.main.operations]

    async def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> TimedModel:
        self.prepared.append(TimedModel(self, model, priority))
        return self.prepared[-1]


class LinkConnector:
    """Reaches a node over a simulated network."""

    def __init__(self, link: SimulatedLink, node: Callable[[], Node]) -> None:
        self.link = link
        self.node = node

    async def connect(self, make: Callable[[Any], Any]) -> None:
        await anyio.sleep(2 * self.link.latency_s)
        self.link.join(make(None), self.node().newcomer())


class Simulation:
    """A client and a node.

    Attributes:
        link: The network.
        device: The client's.
        local: What the node's client gets; replaced, the next connection gets it.
    """

    def __init__(
        self, link: SimulatedLink, tasks: Any, address: NodeAddress, slots: int, name: str = "edge1"
    ) -> None:
        self.link = link
        self.slots = slots
        self.local = TimedDevice(link, slots=slots)
        self.version = "1"
        self.node = Node(name, self._open, tasks, now=link.node_now)
        self.device = NodeDevice(address, LinkConnector(link, lambda: self.node), link.client_now)

    async def _open(self, tasks: Any) -> Device:
        if self.local._closed:
            self.local = TimedDevice(self.link, version=self.version, slots=self.slots)
        return self.local


@asynccontextmanager
async def simulated(
    *, address: str = "127.0.0.1:7463", slots: int = 1, name: str = "edge1", **options: Any
) -> AsyncIterator[Simulation]:
    """Joins a client and a node by a ``SimulatedLink`` with these options; to be run in virtual time."""
    async with anyio.create_task_group() as tasks:
        simulation = Simulation(SimulatedLink(**options), tasks, parse_node(address), slots, name)
        try:
            yield simulation
        finally:
            simulation.link.is_partitioned = False
            await simulation.device.aclose()
            tasks.cancel_scope.cancel()


class Served:
    """``aionn serve --listen`` in processes of its own.

    Attributes:
        process: That of the device.
        address: Where the node listens.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def node_pid(self) -> int:
        """The node's process."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [child for file in threads for child in file.read_text().split()]
        found = [int(child) for child in children if b"fleet.node" in _command(int(child))]
        assert len(found) == 1, children
        return found[0]

    def signal(self, number: int) -> None:
        """To all of its processes."""
        for pid in (self.node_pid, self.process.pid):
            os.kill(pid, number)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def serving(*arguments: str, device: str = "reference", name: str = "edge1") -> Iterator[Served]:
    """Serves a device on a free port of this machine."""
    command = python_command(
        "aionn.cli.main", "serve", device, "--listen", "127.0.0.1:0", "--node-name", name, *arguments
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=python_environment())
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S_MAX)
        line = process.stdout.readline().decode() if ready else ""
        assert line.startswith("serving "), (line, process.poll())
        address = line.split(" at ")[1].split(";")[0].split(" and ")[-1]
        yield Served(process, address)
    finally:
        process.send_signal(signal.SIGCONT)
        # SIGINT is ignored in what a shell starts in the background; the second SIGTERM ends a drain that waits.
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A node with the reference device, shared by the tests of a module."""
    with serving() as found:
        yield found


@pytest.fixture
async def device(served: Served) -> AsyncIterator[NodeDevice]:
    """A client's device. It waits for a busy machine: what is noticed in time has tests of its own."""
    client = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    await client.connect()
    yield client
    await client.aclose()

"""The quotas of a client of a node count by its name: their text, the accounts, and clients in virtual time."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import anyio
import pytest

from aionn.errors import DeviceUnavailable, InvalidArgument, NotAdmitted, ResourceExhausted
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.fleet.node.quotas import ClientQuotas, Names, quotas_of, share_ppm
from aionn.fleet.node.server import Node
from aionn.fleet.tls import name_of_address
from aionn.service.wire.scheduling_messages import AskedTime
from aionn.testing import run
from aionn.testing.links import SimulatedLink
from tests.aionn.fleet.conftest import LinkConnector, TimedDevice
from tests.aionn.service.sums import Sum, sum_model

MIB = 1 << 20
TENTH = AskedTime(name="gate", period_ns=1000, deadline_ns=1000, jitter_ns=0, duration_ns=100)


def test_quotas_are_read_by_name_and_the_rest_is_that_of_others() -> None:
    found = quotas_of(
        ["*:clients=4,memory-mib=64", "gate:executions=2, reserved-share=0.5", "2001:db8::/64:models=3"]
    )
    assert found["*"] == ClientQuotas(clients=4, memory_bytes=64 * MIB)
    assert found["gate"] == ClientQuotas(clients=4, memory_bytes=64 * MIB, executions=2, reserved_share=0.5)
    assert found["2001:db8::/64"].models == 3
    assert quotas_of([]) == {"*": ClientQuotas()}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["gate"], "expected NAME:QUOTA=NUMBER"),
        ([":clients=1"], "expected NAME:QUOTA=NUMBER"),
        (["gate:"], "expected one of clients"),
        (["gate:frames=1"], "expected one of clients"),
        (["gate:memory-bytes=1"], "expected one of clients"),
        (["gate:clients"], "expected a number, got ''"),
        (["gate:clients=x"], "expected a number, got 'x'"),
        (["gate:clients=0"], "expected 1 to"),
        (["gate:executions=99999999"], "expected 1 to"),
        (["gate:reserved-share=0"], "more than 0 and at most 1"),
        (["gate:reserved-share=nan"], "more than 0 and at most 1"),
        (["gate:reserved-share=1.5"], "more than 0 and at most 1"),
        (["gate:clients=1", "gate:models=1"], "comes twice"),
    ],
)
def test_text_that_is_no_quota_is_refused_with_its_name(texts: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument, match="--client-quota") as refused:
        quotas_of(texts)
    assert words in str(refused.value)


def test_clients_of_one_name_share_their_quotas_and_those_of_another_have_their_own() -> None:
    names = Names(quotas_of(["*:clients=2,executions=3", "hall:executions=1"]))
    first, second, other = names.joined("gate"), names.joined("gate"), names.joined("hall")
    first.take("executions", 2)
    second.take("executions")
    with pytest.raises(ResourceExhausted, match="clients of gate may have 3, have 3") as refused:
        second.take("executions")
    assert refused.value.transient
    with pytest.raises(ResourceExhausted) as refused:
        other.take("executions", 2)
    assert not refused.value.transient, "no end of another one makes room for it"
    other.take("executions")
    with pytest.raises(ResourceExhausted, match="clients of gate may have 2"):
        names.joined("gate")
    names.left(first)
    second.take("executions", 2)
    names.left(second)
    assert len(names) == 1
    names.left(other)
    assert not len(names), "strangers cost no memory"


def test_share_of_the_device_counts_by_name() -> None:
    names = Names(quotas_of(["*:reserved-share=0.25,reservations=3"]))
    first, second = names.joined("gate"), names.joined("gate")
    held = first.reserve(TENTH, 1)
    second.reserve(TENTH, 1)
    with pytest.raises(
        NotAdmitted, match=r"of gate hold a share of 0\.200 of a slot and may hold 0\.250"
    ) as refused:
        second.reserve(TENTH, 1)
    assert refused.value.would_fit.period_ns == 2000
    names.joined("hall").reserve(TENTH, 1)
    first.release(held)
    second.reserve(TENTH, 1)
    second.reserve(TENTH, 2)
    with pytest.raises(NotAdmitted, match="reservations"):
        second.reserve(TENTH, 2)


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (-1, 5), (1 << 70, 1), (5, 1 << 70)])
def test_values_that_the_ledger_rejects_count_as_nothing(values: tuple[int, int]) -> None:
    period_ns, duration_ns = values
    asked = AskedTime(name="x", period_ns=period_ns, deadline_ns=1, jitter_ns=0, duration_ns=duration_ns)
    assert share_ppm(asked) == 0


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_taken_an_account_is_within_its_quotas_and_empty_at_the_end(seed: int) -> None:
    rng = random.Random(seed)
    quotas = quotas_of(["*:clients=3,executions=5,memory-mib=1,reserved-share=0.3"])
    names, clients, held = Names(quotas), [], []
    for _ in range(400):
        with suppress(ResourceExhausted):
            match rng.randrange(6):
                case 0:
                    clients.append(names.joined(rng.choice(["a", "b"])))
                case 1 if clients:
                    gone = clients.pop(rng.randrange(len(clients)))
                    names.left(gone)
                    held = [one for one in held if one[0] is not gone]
                case 2 | 3 if clients:
                    client = rng.choice(clients)
                    what, amount = rng.choice([("executions", 1), ("memory_bytes", rng.randrange(MIB))])
                    client.take(what, amount)
                    held.append((client, what, amount))
                case 4 if clients:
                    client = rng.choice(clients)
                    held.append((client, "share", client.reserve(TENTH, 1)))
                case 5 if held:
                    client, what, amount = held.pop(rng.randrange(len(held)))
                    client.release(amount) if what == "share" else client.give_back(what, amount)
        for name in ("a", "b"):
            of_name = [one for one in held if one[0].name == name]
            assert sum(amount for _, what, amount in of_name if what == "executions") <= 5
            assert sum(amount for _, what, amount in of_name if what == "memory_bytes") <= MIB
            assert sum(what == "share" for _, what, _ in of_name) <= 3
    for client in clients:
        names.left(client)
    assert not len(names)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("127.0.0.1", "localhost"),
        ("127.9.8.7", "localhost"),
        ("::1", "localhost"),
        ("::ffff:127.0.0.3", "localhost"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("here", "here"),
    ],
)
def test_addresses_that_one_machine_chooses_freely_are_one_name(address: str, name: str) -> None:
    assert name_of_address(address) == name


class Clients:
    """Several clients of one node in virtual time, all of one name."""

    def __init__(self, tasks: Any, *quotas: str) -> None:
        self.link = SimulatedLink()
        self.local = TimedDevice(self.link, slots=2)
        self.node = Node("edge1", self._open, tasks, now=self.link.node_now, quotas=quotas_of(quotas))
        self.devices: list[NodeDevice] = []

    async def _open(self, tasks: Any) -> TimedDevice:
        return TimedDevice(self.link, slots=2)

    def another(self) -> NodeDevice:
        self.devices.append(
            NodeDevice(
                parse_node("127.0.0.1:7463"),
                LinkConnector(self.link, lambda: self.node),
                self.link.client_now,
            )
        )
        return self.devices[-1]


def with_clients(body: Any, *quotas: str) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            clients = Clients(tasks, *quotas)
            try:
                await body(clients)
            finally:
                for device in clients.devices:
                    await device.aclose()
                await anyio.sleep(1)
                assert not len(clients.node._names), "all was given back"
                tasks.cancel_scope.cancel()

    run(main)


def test_executions_of_all_clients_of_a_name_are_bounded_together() -> None:
    async def body(clients: Clients) -> None:
        first, second = [await clients.another().prepare_model(sum_model()) for _ in range(2)]
        for one in (first, second):
            await one.execute_synchronously(Sum().request)
        ends: list[str] = []

        async def execute(prepared: Any) -> None:
            try:
                await prepared.execute_synchronously(Sum().request)
                ends.append("done")
            except ResourceExhausted as e:
                assert e.transient
                ends.append(str(e))

        async with anyio.create_task_group() as executing:
            executing.start_soon(execute, first)
            executing.start_soon(execute, second)
        assert sorted(end == "done" for end in ends) == [False, True]
        assert "executions: the clients of unknown may have 1, have 1" in next(e for e in ends if e != "done")
        await execute(second)
        assert ends[-1] == "done", "the place is free again"

    with_clients(body, "*:executions=1")


def test_models_connections_and_clients_of_a_name_are_bounded_together() -> None:
    async def body(clients: Clients) -> None:
        first, second = clients.another(), clients.another()
        held = await first.prepare_model(sum_model())
        other = await second.prepare_model(sum_model())
        with pytest.raises(ResourceExhausted, match="models: the clients of unknown may have 2, have 2"):
            await second.prepare_model(sum_model())
        await held.execute_synchronously(Sum().request)
        with pytest.raises(ResourceExhausted, match="connections: the clients of unknown may have 1, have 1"):
            await other.execute_synchronously(Sum().request)
        await held.aclose()
        await anyio.sleep(0.1)
        await other.execute_synchronously(Sum().request)
        await second.prepare_model(sum_model())
        third = clients.another()
        with pytest.raises(DeviceUnavailable, match="clients: the clients of unknown may have 2, have 2"):
            await third.connect()

    with_clients(body, "*:models=2,connections=1,clients=2")


def test_memory_of_a_name_counts_until_its_model_is_closed() -> None:
    async def body(clients: Clients) -> None:
        first, second = clients.another(), clients.another()
        large = 100_000  # 400 kB a vector, and 1.2 MB for the values of an execution.
        held, other = (
            await first.prepare_model(sum_model(large)),
            await second.prepare_model(sum_model(large)),
        )
        await held.execute_synchronously(Sum(large).request)
        with pytest.raises(ResourceExhausted, match="memory bytes: the clients of unknown may have 2097152"):
            await other.execute_synchronously(Sum(large).request)
        await held.aclose()
        await anyio.sleep(0.1)
        await other.execute_synchronously(Sum(large).request)

    with_clients(body, "*:memory-mib=2")

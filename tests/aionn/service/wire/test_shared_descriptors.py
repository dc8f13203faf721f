"""The descriptors of a server's process are divided among users and their processes, however many connections they open."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import pytest

from aionn.errors import ResourceExhausted
from aionn.service.host import process as process_module
from aionn.service.host.admission import Credentials
from aionn.service.wire.quotas import Account, Quotas, Share, SharedDescriptors
from fences import SyncFence

COUNT = 1200
ANSWER_S_MAX = 10.0


class Thing:
    pass


def taken(share: Share, amount: int = 1) -> int:
    """Number of descriptors that a process gets when it takes as many as it can."""
    count = 0
    while True:
        try:
            share.shared.take(share, amount)
        except ResourceExhausted as e:
            assert e.transient
            return count
        count += amount


def test_one_process_gets_a_quarter_and_one_user_half() -> None:
    shared = SharedDescriptors(COUNT)
    assert taken(Share(shared, "user", 1)) == COUNT // 4
    assert taken(Share(shared, "user", 1)) == 0, "also by another connection of it"
    others = [taken(Share(shared, "user", process)) for process in range(2, 200)]
    assert others[0] == COUNT // 8
    assert sum(others) + COUNT // 4 <= COUNT // 2


def test_another_process_and_another_user_get_some_beside_greedy_ones() -> None:
    shared = SharedDescriptors(COUNT)
    for process in (1, 2):
        taken(Share(shared, "greedy", process))
    assert taken(Share(shared, "greedy", 3)) >= COUNT // 20
    assert taken(Share(shared, "other", 4)) >= COUNT // 10


def test_descriptors_that_are_dropped_are_there_for_others() -> None:
    shared = SharedDescriptors(40)
    accounts = [Account(Quotas()) for _ in range(2)]
    for account in accounts:
        account.share = Share(shared, "user", 1)
    kept = [accounts[0].receive(Thing, 2) for _ in range(5)]
    for account in accounts:
        with pytest.raises(ResourceExhausted, match="this process has 10 and its user 10 of 40"):
            account.receive(Thing, 2)
        assert account.taken("descriptors") == (10 if account is accounts[0] else 0)
    accounts[1].receive(Thing, 0)
    del kept[0]
    with pytest.raises(OSError, match="planted"):
        accounts[1].receive(_failing, 2)
    kept.append(accounts[1].receive(Thing, 2))  # Nothing was asked of the first account.
    kept.clear()
    assert taken(Share(shared, "user", 2)) == 10
    for account in accounts:
        assert account.taken("descriptors") == 0


def _failing() -> Thing:
    raise OSError("planted")


@pytest.mark.parametrize("is_same_user", [True, False])
async def test_connections_of_one_process_leave_descriptors_for_others(
    serving: Any, small: Any, monkeypatch: pytest.MonkeyPatch, is_same_user: bool
) -> None:
    pids = itertools.chain([1, 1, 1], [2])

    def of(sock: Any) -> Credentials:
        pid = next(pids)
        return Credentials(pid, 7 if pid == 1 or is_same_user else 8)

    monkeypatch.setattr(Credentials, "of", of)
    served = await serving(descriptors_max=160)  # 80 of them for clients, 20 for one process.
    kept: list[Any] = []
    clients = []
    for index in range(3):
        client = served.client(f"greedy {index}")
        clients.append(client)
        prepared = await client.prepare_model(small.sum_model())
        assert (len(kept) == 10) == (index > 0)
        with pytest.raises(ResourceExhausted, match="this process has 20 and its user 20 of 80"):
            for _ in range(11):
                work = small.Sum().request
                kept.append(await prepared.create_reusable_execution(work))
    other = served.client("other")
    clients.append(other)
    prepared = await other.prepare_model(small.sum_model())
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    burst = await prepared.configure_execution_burst()
    more = small.Sum()
    await burst.execute_synchronously(more.request, [5])
    assert more.is_right
    await burst.aclose()
    await clients[0].aclose()
    again = await clients[1].prepare_model(small.sum_model())
    with anyio.fail_after(ANSWER_S_MAX):
        while True:  # The objects of the client that left are freed a few at a time.
            try:
                await again.execute_synchronously(small.Sum().request)
                break
            except ResourceExhausted:
                await anyio.sleep(0.001)
    for client in clients[1:]:
        await client.aclose()


@pytest.fixture
def shared_by_all(monkeypatch: pytest.MonkeyPatch) -> list[SharedDescriptors]:
    """The descriptors of the server that is made next."""
    made: list[SharedDescriptors] = []

    class Recorded(SharedDescriptors):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made.append(self)

    monkeypatch.setattr(process_module, "SharedDescriptors", Recorded)
    return made


async def _until_none_is_taken(shared: SharedDescriptors) -> None:
    """The objects of a client that left are freed a few at a time."""
    with anyio.fail_after(ANSWER_S_MAX):
        while True:
            with shared._lock:
                shared._settle()
                if not shared._shares.taken:
                    return
            await anyio.sleep(0.001)


@pytest.mark.parametrize("what", ["bursts", "fenced executions"])
async def test_connections_of_one_process_leave_descriptors_for_bursts_and_fenced_executions_of_others(
    serving: Any,
    small: Any,
    monkeypatch: pytest.MonkeyPatch,
    shared_by_all: list[SharedDescriptors],
    what: str,
) -> None:
    pids = itertools.chain([1, 1, 1], [2])
    monkeypatch.setattr(Credentials, "of", lambda sock: Credentials(next(pids), 7))
    served = await serving(descriptors_max=320)  # 160 of them for clients, 40 for one process.
    clients = [served.client(f"client {index}") for index in range(4)]
    gates: list[SyncFence] = []
    launched: list[Any] = []

    async def open_one(prepared: Any) -> None:
        if what == "bursts":
            launched.append(await prepared.configure_execution_burst())
        else:
            gates.append(SyncFence())
            launched.append(await prepared.execute_fenced(small.Sum().request, [gates[-1]]))

    prepared = [await client.prepare_model(small.sum_model()) for client in clients]
    for greedy in prepared[:3]:
        with pytest.raises(ResourceExhausted, match="of 160 for all clients") as caught:
            for _ in range(20):
                await open_one(greedy)
        assert caught.value.transient
    assert len(launched) >= 4
    await open_one(prepared[3])
    assert what == "bursts" or len(launched) <= 40 // 3
    for gate in gates:
        gate.try_signal()
    for each in launched:
        if what == "bursts":
            await each.aclose()
        else:
            await each.fence
    launched.clear()
    for client in clients:
        await client.aclose()
    await _until_none_is_taken(shared_by_all[0])


def test_descriptors_count_until_their_owner_is_dropped_or_is_done() -> None:
    shared, account = SharedDescriptors(40), Account(Quotas())
    account.share = Share(shared, "user", 1)
    for is_done_first in (False, True):
        account.take_descriptors(2)
        owner = Thing()
        over = account.count_descriptors_until_dropped(owner, 2)
        assert account.taken("descriptors") == 2
        if is_done_first:
            over()
            assert account.taken("descriptors") == 0
        del owner
        over()
        assert account.taken("descriptors") == 0
    assert taken(Share(shared, "user", 1)) == 10

"""Newcomers at a limit: places that become free, newcomers that leave or send nothing, and crowds of them."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from aionn.service.host import newcomers as module
from aionn.service.host.admission import Admission, ClientLimits, Credentials, Place
from aionn.service.host.newcomers import Newcomers

ENDED_S_MAX = 10.0


class Host:
    """Newcomers of a host whose clients stay until they are let go.

    Attributes:
        served: The places of those that are served, in the order in which they came.
        most: The largest number of clients that were served concurrently.
        turns: Number of turns that closing connections has left to others.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, opened: ExitStack, **limits: int) -> None:
        self.newcomers = Newcomers(Admission(ClientLimits(**limits)), tasks, self._serve, self._next_turn)
        self.served: list[Place] = []
        self.most = self.turns = 0
        self._opened = opened
        self._gone: dict[Place, anyio.Event] = {}

    async def _next_turn(self) -> None:
        self.turns += 1
        await anyio.lowlevel.checkpoint()

    async def _serve(self, sock: socket.socket, client: Credentials, place: Place) -> None:
        with sock:
            if is_open(sock):
                gone = self._gone[place] = anyio.Event()
                self.served.append(place)
                self.most = max(self.most, len(self.served))
                place.on_displaced = lambda why: gone.set()
                await gone.wait()
                self.served.remove(place)
            self.newcomers.ends(place)
        self.newcomers.leave(place)

    def pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self._opened.enter_context(theirs)
        return ours, theirs

    async def come(self, pid: int, uid: int, *, sent: bytes = b"Hello") -> socket.socket:
        """A newcomer that has sent something before it is received."""
        ours, theirs = self.pair()
        if sent:
            theirs.send(sent)
        await self.newcomers.receive(ours, Credentials(pid, uid))
        return theirs

    async def serve(self, pid: int, uid: int) -> Place:
        """A client that has sent Hello and is served."""
        await self.come(pid, uid)
        await anyio.wait_all_tasks_blocked()
        place = self.served[-1]
        self.newcomers.admission.greeted(place)
        return place

    def go(self, place: Place) -> None:
        """A client is gone; its objects are being freed."""
        self.newcomers.ends(place)

    async def free(self, *places: Place) -> None:
        for place in places:
            self._gone[place].set()
        await anyio.wait_all_tasks_blocked()

    def pids(self) -> list[int]:
        return [place.client.pid for place in self.served]


def is_open(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, 0)
    return not poll.poll(0)


@asynccontextmanager
async def hosting(**limits: int) -> AsyncIterator[Host]:
    with anyio.fail_after(ENDED_S_MAX), ExitStack() as opened:
        async with anyio.create_task_group() as tasks:
            yield Host(tasks, opened, **limits)
            tasks.cancel_scope.cancel()


async def test_one_free_place_serves_one_of_those_that_wait() -> None:
    async with hosting(clients=2) as host:
        stays, goes = await host.serve(1, 1), await host.serve(2, 1)
        host.go(goes)
        for pid in range(10, 20):
            await host.come(pid, 1)
        await host.free(goes)
        assert host.pids() == [1, 10] and host.most == 2
        assert stays in host.served


async def test_limit_holds_where_silent_newcomers_wait() -> None:
    async with hosting(clients=2) as host:
        await host.serve(1, 1)
        goes = await host.serve(2, 1)
        host.go(goes)
        for pid in range(10, 20):
            await host.come(pid, 1, sent=b"")
        await host.free(goes)
        assert len(host.served) == 2 and host.most <= 3
        assert host.pids()[0] == 1


async def test_client_whose_hello_is_unread_is_not_displaced() -> None:
    async with hosting(clients=1) as host:
        await host.come(1, 1)
        await anyio.wait_all_tasks_blocked()
        await host.come(2, 1)
        await anyio.wait_all_tasks_blocked()
        assert host.pids() == [1]
    async with hosting(clients=1) as host:
        await host.come(1, 1, sent=b"")
        await anyio.wait_all_tasks_blocked()
        await host.come(2, 1)
        await anyio.wait_all_tasks_blocked()
        assert host.pids() == [2]


async def test_newcomer_that_left_gets_no_place() -> None:
    async with hosting(clients=1) as host:
        goes = await host.serve(1, 1)
        host.go(goes)
        (await host.come(10, 1)).close()
        await host.come(11, 1)
        await host.free(goes)
        assert host.pids() == [11]


async def test_newcomers_that_left_keep_nobody_from_waiting() -> None:
    async with hosting(clients=1) as host:
        goes = await host.serve(1, 1)
        host.go(goes)
        for pid in range(100, 300):
            (await host.come(pid, 1)).close()
        theirs = await host.come(11, 1)
        assert is_open(theirs)
        await host.free(goes)
        assert host.pids() == [11]


async def test_newcomers_of_one_user_keep_no_other_user_from_waiting() -> None:
    async with hosting(clients=4, clients_per_user=2) as host:
        await host.serve(1, 1)
        await host.serve(2, 1)
        await host.serve(3, 2)
        goes = await host.serve(4, 2)
        crowd = [await host.come(pid, 1, sent=b"") for pid in range(100, 300)]
        assert sum(map(is_open, crowd)) <= module.REFUSALS_PER_USER_MAX
        host.go(goes)
        await host.come(11, 2)
        await host.free(goes)
        assert host.pids() == [1, 2, 3, 11]


async def test_newcomers_of_one_process_keep_no_other_process_of_its_user_from_waiting() -> None:
    async with hosting(clients=3) as host:
        goes = await host.serve(1, 1)
        host.go(goes)
        await host.serve(2, 1)
        await host.serve(3, 1)
        crowd = [await host.come(10, 1, sent=b"") for _ in range(200)]
        assert sum(map(is_open, crowd)) <= module.REFUSALS_PER_PROCESS_MAX
        theirs = await host.come(11, 1)
        assert is_open(theirs)
        for each in crowd:
            each.close()
        await host.free(goes)
        assert host.pids() == [2, 3, 11]


async def test_place_that_is_free_at_the_end_of_the_wait_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREED_S_MAX", 0.0)
    async with hosting(clients=1) as host:
        goes = await host.serve(1, 1)
        host.go(goes)
        theirs = await host.come(10, 1)
        await host.free(goes)  # In the turn in which the wait ends.
        await anyio.wait_all_tasks_blocked()
        assert host.pids()[-1] == 10 and is_open(theirs)


async def test_places_serve_those_that_they_let_in_in_their_order() -> None:
    async with hosting(clients=4, clients_per_user=2) as host:
        of_one = [await host.serve(1, 1), await host.serve(2, 1)]
        of_two = [await host.serve(3, 2), await host.serve(4, 2)]
        for place in (*of_one, *of_two):
            host.go(place)
        for pid, uid in ((10, 1), (20, 2), (11, 1), (21, 2), (12, 1), (22, 2)):
            await host.come(pid, uid)
        await host.free(of_two[0])
        assert host.pids()[-1] == 20
        await host.free(of_one[1], of_one[0], of_two[1])
        assert sorted(host.pids()) == [10, 11, 20, 21]


@pytest.mark.parametrize("crowd", [0, module.REFUSALS_PER_USER_MAX])
async def test_others_have_turns_while_what_a_rejected_newcomer_sent_is_closed(crowd: int) -> None:
    async with hosting(clients=1) as host:
        await host.serve(1, 1)
        for pid in range(100, 100 + crowd):
            await host.come(pid, 1, sent=b"")
        ours, theirs = host.pair()
        read, write = os.pipe()
        messages = 16
        for _ in range(messages):
            socket.send_fds(theirs, [b"\xc1"], [write] * 16)
        os.close(write)
        await host.newcomers.receive(ours, Credentials(9, 1))
        await anyio.wait_all_tasks_blocked()
        assert host.turns >= messages - 2
        assert os.read(read, 1) == b""  # All of them are closed.
        os.close(read)
        assert not is_open(theirs)


async def test_cancelled_host_closes_the_connections_of_newcomers() -> None:
    with ExitStack() as opened:
        async with anyio.create_task_group() as tasks:
            host = Host(tasks, opened, clients=1)
            goes = await host.serve(1, 1)
            host.go(goes)
            waiting = [await host.come(pid, 1) for pid in range(10, 20)]
            await anyio.wait_all_tasks_blocked()
            waiting.append(await host.come(20, 1))
            tasks.cancel_scope.cancel()
        assert not any(map(is_open, waiting))


async def test_client_that_is_gone_is_noticed_though_its_messages_are_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as behind a large one, whose parts wait for their turns."""
    monkeypatch.setattr(module, "GONE_LOOK_S", 0.001)
    async with hosting(clients=2) as host, anyio.create_task_group() as tasks:
        theirs = await host.come(1, 1)
        await host.come(2, 1)
        await anyio.wait_all_tasks_blocked()
        goes, stays = host.served
        noticed = anyio.Event()
        gone: list[Place] = []
        goes.on_gone = noticed.set
        stays.on_gone = lambda: gone.append(stays)
        tasks.start_soon(host.newcomers.end_those_gone)
        theirs.close()
        await noticed.wait()
        assert not gone
        tasks.cancel_scope.cancel()

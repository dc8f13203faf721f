"""Which clients of a shared socket are served, by the rule alone and over real connections."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aionn.errors import DeviceUnavailable, InvalidArgument, ResourceExhausted
from aionn.service.host import admission, newcomers
from aionn.service.host.admission import (
    FOREIGN_PID,
    UNKNOWN_START,
    Admission,
    ClientLimits,
    Credentials,
    NoPlace,
)
from aionn.service.host.process import HELLO_TIMES_MAX, _await_hello
from aionn.service.host.session import Session
from aionn.service.wire.peers import Peers
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Call,
    Failed,
    GetStatus,
    Hello,
    HelloReply,
    Ping,
    Reply,
    decode,
    encode,
)

ENDED_S_MAX = 10.0
NOW_S = 1000.0


def test_each_limit_refuses_the_client_that_exceeds_it_and_names_it() -> None:
    own = Admission(ClientLimits(clients=5, clients_per_user=3, clients_per_process=2))
    places = []
    for client in (
        Credentials(1, 10),
        Credentials(1, 10),
        Credentials(2, 10),
        Credentials(3, 11),
        Credentials(4, 12),
    ):
        places.append(own.admit(client, NOW_S))
        own.greeted(places[-1])
    for client, whose in (
        (Credentials(1, 10), "serves 2 connections of process 1 already .--clients-per-process"),
        (Credentials(5, 10), "serves 3 connections of user 10 already .--clients-per-user"),
        (Credentials(6, 13), "serves its 5 connections already .--clients"),
    ):
        with pytest.raises(ResourceExhausted, match=whose):
            own.admit(client, NOW_S)
    assert len(own) == 5
    own.leave(places[0])
    own.leave(places[0])
    own.admit(Credentials(1, 10), NOW_S)
    assert len(own) == 5


def test_processes_of_another_namespace_are_limited_by_their_user_alone() -> None:
    """They all have the number 0: one of them would take the places of the others."""
    own = Admission(ClientLimits(clients=9, clients_per_user=4, clients_per_process=2))
    for uid in (10, 10, 10, 10, 11, 11, 11):
        own.greeted(own.admit(Credentials(FOREIGN_PID, uid), NOW_S))
    with pytest.raises(ResourceExhausted, match="serves 4 connections of user 10 already"):
        own.admit(Credentials(FOREIGN_PID, 10), NOW_S)
    own.admit(Credentials(FOREIGN_PID, 11), NOW_S)


def test_process_with_the_number_of_one_that_has_ended_has_places_of_its_own() -> None:
    own = Admission(ClientLimits(clients=9, clients_per_user=8, clients_per_process=2))
    before, after = Credentials(1, 10, start=100), Credentials(1, 10, start=200)
    places = [own.admit(client, NOW_S) for client in (before, before, after, after)]
    for place in places:
        own.greeted(place)
    with pytest.raises(ResourceExhausted, match="serves 2 connections of process 1 already"):
        own.admit(after, NOW_S)
    own.leave(places[0])
    with pytest.raises(ResourceExhausted, match="serves 2 connections of process 1 already"):
        own.admit(after, NOW_S)
    own.admit(before, NOW_S)


def test_start_of_a_process_is_read_whatever_its_name() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        client = Credentials.of(ours)
        assert client.pid == os.getpid() and client.start > 0
        program = Path("/proc/self/comm")
        name = program.read_text().rstrip()
        try:
            program.write_text("a) S 1 (b) 2")
            assert Credentials.of(ours) == client
        finally:
            program.write_text(name)
        assert admission._start_of(os.getppid()) <= client.start
        child = subprocess.Popen(["sh", "-c", ":"])
        child.wait()
        assert admission._start_of(child.pid) == UNKNOWN_START


async def test_process_with_the_number_of_one_that_has_ended_has_a_pace_and_a_share_of_its_own(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[object] = []
    of = Peers.of

    def noting(self: Peers, process: Any) -> Any:
        processes.append(process)
        return of(self, process)

    starts = iter((100, 200, 200))
    monkeypatch.setattr(Peers, "of", noting)
    monkeypatch.setattr(admission, "_start_of", lambda pid: next(starts))
    clients = [served.client() for _ in range(3)]
    for client in clients:
        await client.status()
    assert processes[0] != processes[1] == processes[2]
    for client in clients:
        await client.aclose()


async def test_connections_of_another_namespace_do_not_count_as_one_process(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[object] = []
    of = Peers.of

    def noting(self: Peers, process: Any) -> Any:
        processes.append(process)
        return of(self, process)

    monkeypatch.setattr(Peers, "of", noting)
    monkeypatch.setattr(Credentials, "of", lambda sock: Credentials(FOREIGN_PID, os.getuid()))
    clients = [served.client() for _ in range(3)]
    for client in clients:
        await client.status()
    assert len(processes) == len(set(processes)) == 3
    for client in clients:
        await client.aclose()


def test_silent_client_that_the_limit_counts_gives_up_its_place() -> None:
    own = Admission(ClientLimits(clients=4, clients_per_user=2, clients_per_process=2))
    told: list[tuple[int, str]] = []
    for pid, uid in ((1, 10), (2, 11), (3, 11)):
        place = own.admit(Credentials(pid, uid), NOW_S)
        place.on_displaced = lambda why, pid=pid: told.append((pid, why))  # type: ignore[misc]
    own.admit(Credentials(4, 11), NOW_S)  # The oldest of this user, not the oldest of all.
    assert [pid for pid, _ in told] == [2] and "had not sent Hello" in told[0][1]
    own.admit(Credentials(5, 12), NOW_S)
    own.admit(Credentials(6, 13), NOW_S)
    assert [pid for pid, _ in told] == [2, 1] and len(own) == 4


def test_error_tells_whether_a_place_that_the_limit_counts_is_being_freed() -> None:
    own = Admission(ClientLimits(clients=4, clients_per_user=2, clients_per_process=2))
    first, second, other, last = (own.admit(Credentials(pid, pid // 10), NOW_S) for pid in (11, 12, 21, 31))
    for place in (first, second, other, last):
        own.greeted(place)
    own.ends(other, NOW_S)
    for newcomer, is_being_freed in ((13, False), (41, True)):
        with pytest.raises(NoPlace) as raised:
            own.admit(Credentials(newcomer, newcomer // 10), NOW_S)
        assert raised.value.is_being_freed is is_being_freed
    own.ends(second, NOW_S)
    with pytest.raises(NoPlace) as raised:
        own.admit(Credentials(13, 1), NOW_S)
    assert raised.value.is_being_freed
    own.leave(second)
    own.ends(second, NOW_S)
    own.greeted(own.admit(Credentials(13, 1), NOW_S))
    with pytest.raises(NoPlace) as raised:
        own.admit(Credentials(14, 1), NOW_S)
    assert not raised.value.is_being_freed


def test_place_that_is_not_freed_in_time_is_not_waited_for() -> None:
    """A driver may never return from the freeing of an object: each newcomer would wait in vain."""
    own = Admission(ClientLimits(clients=1))
    place = own.admit(Credentials(1, 10), NOW_S)
    own.greeted(place)
    own.ends(place, NOW_S)
    own.ends(place, NOW_S + 1)  # It is gone since the first time.
    for after_s, is_being_freed in ((admission.FREED_S_MAX - 0.1, True), (admission.FREED_S_MAX, False)):
        with pytest.raises(NoPlace) as raised:
            own.admit(Credentials(2, 10), NOW_S + after_s)
        assert raised.value.is_being_freed is is_being_freed
    own.leave(place)
    own.admit(Credentials(2, 10), NOW_S + admission.FREED_S_MAX)


def test_refusals_are_reported_once_in_a_while() -> None:
    own = Admission(ClientLimits())
    assert [own.report(now_s) for now_s in (0.0, 0.1, 0.2, admission.REPORT_S)] == [1, 0, 0, 3]


@pytest.mark.parametrize("wrong", [{"clients": 0}, {"clients_per_user": -1}, {"hello_s": 0.0}])
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        ClientLimits(**wrong)


async def test_others_have_their_turns_between_connections(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, at_turns, turns = 24, [], 0
    of = Credentials.of

    def noted(sock: socket.socket) -> Credentials:
        at_turns.append(turns)
        return of(sock)

    monkeypatch.setattr(Credentials, "of", noted)
    socks = []
    for _ in range(waiting):  # All of them before the server has its first turn.
        socks.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
        socks[-1].connect(str(served.path))
    with anyio.fail_after(ENDED_S_MAX):
        while len(at_turns) < waiting:
            turns += 1
            await anyio.lowlevel.checkpoint()
    for sock in socks:
        sock.close()
    assert len(set(at_turns)) >= waiting - 1, at_turns


async def test_silent_sockets_keep_nobody_out(serving: Any, small: Any) -> None:
    served = await serving(limits=ClientLimits(clients=8))
    silent = [served.raw() for _ in range(20)]
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await client.aclose()
    for raw in silent:
        raw.close()


async def test_client_that_says_no_hello_is_told_so_and_ended(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serving(limits=ClientLimits(hello_s=0.05))
    raw = served.raw()
    with caplog.at_level(logging.WARNING, "aionn.service"):
        reply = decode(await raw.receive(), [])
        assert await raw.receive() == b""
    assert isinstance(reply, Reply) and isinstance(reply.body, Failed)
    assert reply.id == 1 and "expected Hello within 0.05 s" in reply.body.message
    assert f"pid {os.getpid()}, uid {os.getuid()}" in caplog.text
    raw.close()


async def test_other_calls_than_hello_gain_no_time(serving: Any) -> None:
    served = await serving(limits=ClientLimits(hello_s=0.2))
    raw = served.raw()
    reply = await raw.ask(1, GetStatus())
    assert isinstance(reply, Failed)
    await raw.receive()
    assert await raw.receive() == b""
    raw.close()


@pytest.mark.parametrize("rounds", [3, 2 * HELLO_TIMES_MAX])
async def test_hello_that_waits_for_its_turn_is_waited_for_up_to_a_limit(rounds: int) -> None:
    """Behind many connections that began at the same time."""
    asked, dismissed = [], []
    session = SimpleNamespace(greeted=anyio.Event())

    def is_kept_waiting() -> bool:
        asked.append(None)
        if len(asked) == rounds:
            session.greeted.set()
        return True

    with anyio.fail_after(30):
        await _await_hello(session, 0.001, is_kept_waiting, None, dismissed.append)  # type: ignore[arg-type]
    assert len(asked) == min(rounds, HELLO_TIMES_MAX)
    assert dismissed == ([] if rounds < HELLO_TIMES_MAX else ["service: expected Hello within 0.001 s"])


async def test_client_that_said_hello_may_be_silent_for_as_long_as_it_likes(serving: Any) -> None:
    served = await serving(limits=ClientLimits(hello_s=0.3))
    raw = await served.raw().hello()
    late = served.raw()
    await late.receive()
    assert await late.receive() == b""  # The limit has passed for a client that came later.
    assert not isinstance(await raw.ask(2, GetStatus()), Failed)
    raw.close()
    late.close()


async def test_refused_client_is_told_why_and_named_in_the_log(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serving(limits=ClientLimits(clients_per_process=2))
    places = [await served.raw().hello() for _ in range(2)]
    client = served.client()
    words = f"socket {served.path}: refused: the device serves 2 connections of process {os.getpid()} already"
    with (
        caplog.at_level(logging.WARNING, "aionn.service"),
        pytest.raises(
            DeviceUnavailable,
            match=re.escape(words),
        ),
    ):
        await client.connect()
    assert f"refused a client (pid {os.getpid()}, uid {os.getuid()})" in caplog.text
    raw = served.raw()  # Its number of the call comes back.
    reply = await raw.ask(77, Hello(PROTOCOL_VERSION))
    assert isinstance(reply, Failed) and "serves 2 connections" in reply.message
    raw.close()
    places.pop().close()
    raw = await served.raw().hello()
    raw.close()
    await client.aclose()
    places.pop().close()


async def test_client_gets_the_place_of_one_that_has_left_in_a_flood(serving: Any) -> None:
    served = await serving(limits=ClientLimits(clients_per_process=3))
    payload, _, _ = encode(Call(2, Ping()))
    for _ in range(5):
        crowd = [await served.raw().hello() for _ in range(3)]
        for raw in crowd:
            raw.sock.setblocking(False)
            try:
                while True:
                    raw.sock.send(payload)
            except BlockingIOError:
                pass
        for raw in crowd:
            raw.close()


async def test_newcomer_is_told_why_where_a_place_is_freed_too_late(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomers, "FREED_S_MAX", 0.05)
    served = await serving(limits=ClientLimits(clients_per_process=1))
    place = await served.raw().hello()
    is_held, is_over = anyio.Event(), anyio.Event()
    aclose = Session.aclose

    async def late(session: Session) -> None:
        is_held.set()
        await is_over.wait()
        await aclose(session)

    monkeypatch.setattr(Session, "aclose", late)
    place.close()
    await is_held.wait()
    raw = served.raw()
    reply = await raw.ask(1, Hello(PROTOCOL_VERSION))
    assert isinstance(reply, Failed) and "serves 1 connections of process" in reply.message
    raw.close()
    payload, _, _ = encode(Call(1, Hello(PROTOCOL_VERSION)))
    monkeypatch.setattr(newcomers, "FREED_S_MAX", ENDED_S_MAX)
    waiting = served.raw()
    waiting.sock.send(payload)
    await anyio.lowlevel.checkpoint()
    is_over.set()
    answer = decode(await waiting.receive(), [])
    assert isinstance(answer, Reply) and isinstance(answer.body, HelloReply)
    waiting.close()


async def test_more_refused_clients_than_are_waited_for_get_the_reason_and_are_closed(serving: Any) -> None:
    served = await serving(limits=ClientLimits(clients_per_process=1))
    place = await served.raw().hello()
    crowd = [served.raw() for _ in range(50)]
    for raw in crowd:
        assert b"--clients-per-process" in await raw.receive()
        assert await raw.receive() == b""
        raw.close()
    assert not isinstance(await place.ask(2, GetStatus()), Failed)
    place.close()


@pytest.mark.parametrize(
    "message",
    [
        b"\x83\xa4type\xa4Call\xa2id\x05\xa1z" + b"\x91" * 5000,
        b"\x82\xa4type\xa4Call\xa2id\xcf" + b"\xff" * 8,
        b"\x81\xa4type\xa1\xff",
        b"\xc1",
        b"",
    ],
    ids=["deep", "large number", "not UTF-8", "not msgpack", "empty"],
)
async def test_server_outlives_whatever_a_refused_client_sends(serving: Any, message: bytes) -> None:
    served = await serving(limits=ClientLimits(clients_per_process=1))
    place = await served.raw().hello()
    raw = served.raw()
    raw.sock.send(message)
    while await raw.receive():
        pass
    raw.close()
    assert not isinstance(await place.ask(2, GetStatus()), Failed)
    place.close()


async def test_descriptors_that_a_refused_client_sends_are_closed(serving: Any) -> None:
    served = await serving(limits=ClientLimits(clients_per_process=1))
    place = await served.raw().hello()
    raw = served.raw()
    socket.send_fds(raw.sock, [b"\x80"], [0] * 100)
    while await raw.receive():
        pass
    raw.close()
    place.close()

"""How processes that are served at the same time share the event loop: those that do not wait for their answers pause."""

from __future__ import annotations

import os
import random
import socket
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aionn.errors import DeadObject, InvalidArgument
from aionn.service.client.device import RemoteDevice
from aionn.service.wire import peers as peers_module
from aionn.service.wire.channel import TURN_WEIGHT, Channel
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.peers import (
    BACKLOG_NS,
    COMPANY_NS,
    FLOOD_NS,
    FLOOD_PAUSE_NS_MAX,
    PAUSE,
    PAUSE_NS_MAX,
    PAUSE_NS_MIN,
    Peer,
    Peers,
    Shares,
)
from aionn.service.wire.protocol import Call, CancelCall, Done, ExecuteFenced, Ping, decode, encode
from aionn.service.wire.received import DRAINED_WEIGHT
from aionn.service.wire.sizes import FENCES_MAX
from fences import FenceError, SyncFence

WAIT_S_MAX = 20.0
MS = 1_000_000


@pytest.fixture
def shares() -> Shares:
    """Two processes, A and B, have sent a message at time 0."""
    shares = Shares()
    shares.received("A", 0)
    shares.received("B", 0)
    return shares


def test_process_that_is_served_alone_never_pauses() -> None:
    shares = Shares()
    assert not shares.has_company("A", 0) and not shares.has_company(None, 0)
    for now_ns in range(0, 100 * MS, MS):
        shares.received("A", now_ns)
        shares.used("A", 10 * MS, now_ns)
        assert shares.pause_ns(now_ns) == 0 and not shares.has_company("A", now_ns)
        assert shares.has_company(None, now_ns)


def test_use_beside_another_process_is_followed_by_a_pause(shares: Shares) -> None:
    shares.used("A", MS, 3 * MS)
    assert shares.pause_ns(3 * MS) == PAUSE * MS
    assert shares.pause_ns(4 * MS) == (PAUSE - 1) * MS
    assert shares.pause_ns((3 + PAUSE) * MS) == 0


def test_short_uses_add_up_to_a_pause(shares: Shares) -> None:
    used_ns = -(-PAUSE_NS_MIN // (10 * PAUSE))
    pauses = []
    for _ in range(11):
        shares.used("A", used_ns, 0)
        pauses.append(shares.pause_ns(0))
    assert pauses[:9] == [0] * 9 and pauses[9] >= PAUSE_NS_MIN


def test_no_use_makes_the_pause_longer_than_its_bound(shares: Shares) -> None:
    for _ in range(3):
        shares.used("A", 10_000 * MS, 0)
        assert shares.pause_ns(0) == PAUSE_NS_MAX


def test_process_counts_as_served_for_some_time_after_its_message(shares: Shares) -> None:
    for other, process in (("A", "B"), ("B", "A")):
        assert shares.has_company(process, COMPANY_NS - 1), other
        assert not shares.has_company(process, COMPANY_NS), other
    shares.received("A", 5)
    shares.received("A", 6)
    assert shares.has_company("A", 7)  # B's message is the one before A's two.
    shares.used("A", MS, COMPANY_NS + MS)
    assert shares.pause_ns(COMPANY_NS + MS) == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_share_of_all_that_have_a_backlog_is_bounded(seed: int) -> None:
    """Whatever their messages take, and however late the pauses end."""
    draw, shares = random.Random(seed), Shares()
    now_ns = used_ns = most_ns = 0
    while now_ns < 10_000 * MS:
        shares.received("interactive", now_ns)
        process = draw.choice("ABC")
        pause_ns = shares.pause_ns(now_ns)
        if pause_ns:
            now_ns += pause_ns + draw.randrange(MS)
            continue
        message_ns = draw.randrange(1000, draw.choice([10_000, 200_000, 3 * MS]))
        now_ns += message_ns
        used_ns += message_ns
        most_ns = max(most_ns, message_ns)
        shares.used(process, message_ns, now_ns)
    assert used_ns <= now_ns / (1 + PAUSE) + most_ns + PAUSE_NS_MIN


def test_process_is_forgotten_with_its_last_connection() -> None:
    peers = Peers()
    first = peers.of(7)
    assert peers.of(7) is first and peers.of(8) is not first
    del first
    assert len(peers._known) == 0


async def done(body: Any, channel: Channel) -> Done:
    return Done()


@asynccontextmanager
async def connected(process: Peer, handler: Any = done) -> AsyncIterator[tuple[Channel, socket.socket]]:
    """A channel of a process, and its other end, which keeps some hundred messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    channel = Channel(ours, handler, peer_name="the peer", peer=process)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        for _ in range(4):
            await anyio.lowlevel.checkpoint()  # It waits for the first message.
        yield channel, theirs
        tasks.cancel_scope.cancel()
    channel.release()
    theirs.close()


async def ask(sock: socket.socket, number: int) -> None:
    """A call, and the wait for its answer."""
    sock.send(encode(Call(number, Ping()))[0])
    await answer(sock, number)


async def answer(sock: socket.socket, number: int) -> None:
    with anyio.fail_after(WAIT_S_MAX):
        while True:
            try:
                reply = decode(sock.recv(1 << 16), [])
            except BlockingIOError:
                await anyio.wait_readable(sock)
            else:
                assert reply.id == number
                return


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Time goes on where a test says so, and by sleeping. Each step of a call or connection takes ``step_ns``; of that, other
    threads have had the processor for ``taken_ns``.
    """

    class Clock:
        now_ns = 0
        step_ns = 0
        slept_ns = 0
        taken_ns = 0

        def monotonic_ns(self) -> int:
            return self.now_ns

        def thread_time_ns(self) -> int:
            return self.now_ns - self.slept_ns - self.taken_ns

        async def sleep(self, delay_s: float) -> None:
            self.now_ns += round(delay_s * 1e9)
            self.slept_ns += round(delay_s * 1e9)
            await anyio.lowlevel.checkpoint()

    clock = Clock()
    time = types.SimpleNamespace(monotonic_ns=clock.monotonic_ns, thread_time_ns=clock.thread_time_ns)
    monkeypatch.setattr(peers_module, "time", time)
    monkeypatch.setattr(
        peers_module,
        "anyio",
        types.SimpleNamespace(Lock=anyio.Lock, lowlevel=anyio.lowlevel, sleep=clock.sleep),
    )
    yield clock


def slow(clock: Any, call_ns: int) -> Any:
    """A handler that keeps the loop for so long."""

    async def handle(body: Any, channel: Channel) -> Done:
        clock.now_ns += call_ns
        return Done()

    return handle


CALL_NS = MS // 4


async def _pauses(clock: Any, peers: Peers, count: int, *, is_other_served: bool) -> int:
    """For how long calls of a process that sends all of them at once pause, each of which keeps the loop for ``CALL_NS``."""
    async with (
        connected(peers.of(1), slow(clock, CALL_NS)) as (channel, sock),
        connected(peers.of(2)) as (_, other),
    ):
        if is_other_served:
            await ask(other, 1)
        for number in range(count):
            sock.send(encode(Call(number, Ping()))[0])
        with anyio.fail_after(WAIT_S_MAX):
            while channel.received_count < count:
                await anyio.lowlevel.checkpoint()
    return int(clock.slept_ns)


async def test_calls_that_come_at_once_pause_beside_another_process(clock: Any) -> None:
    count = 10  # Their pauses end before the other process counts as gone, and they are no flood.
    slept_ns = await _pauses(clock, Peers(), count, is_other_served=True)
    assert (count - 3) * PAUSE * CALL_NS <= slept_ns <= count * PAUSE * CALL_NS


async def test_calls_that_do_not_end_pause_for_longer(clock: Any) -> None:
    count = 4 * FLOOD_NS // CALL_NS
    slept_ns = await _pauses(clock, Peers(), count, is_other_served=True)
    assert (
        slept_ns >= PAUSE * (FLOOD_NS - 3 * CALL_NS) + COMPANY_NS // 2
    )  # Then the other process counts as gone.


async def test_calls_that_come_at_once_do_not_pause_where_nobody_else_is_served(clock: Any) -> None:
    assert await _pauses(clock, Peers(), 10, is_other_served=False) == 0


async def test_processes_that_all_have_a_backlog_do_not_pause(clock: Any) -> None:
    peers, count = Peers(), 60
    async with (
        connected(peers.of(1), slow(clock, MS)) as (one, one_sock),
        connected(peers.of(2), slow(clock, MS)) as (two, two_sock),
    ):
        for number in range(count):
            for sock in (one_sock, two_sock):
                sock.send(encode(Call(number, Ping()))[0])
        with anyio.fail_after(WAIT_S_MAX):
            while one.received_count + two.received_count < 2 * count:
                await anyio.lowlevel.checkpoint()
    # The loop has waited for the first message of each, so that each had none for some time.
    assert clock.slept_ns <= COMPANY_NS + FLOOD_PAUSE_NS_MAX < 2 * (count - 1) * PAUSE * MS


async def test_processes_that_send_several_calls_for_each_frame_do_not_pause_each_other(clock: Any) -> None:
    peers, frames, calls = Peers(), 20, 4
    async with (
        connected(peers.of(1), slow(clock, MS)) as (_, one),
        connected(peers.of(2), slow(clock, MS)) as (_, two),
    ):
        for frame in range(frames):
            for sock in (one, two):
                for number in range(calls):
                    sock.send(encode(Call(calls * frame + number, Ping()))[0])
                for number in range(calls):
                    await answer(sock, calls * frame + number)
            if frame == 3:
                clock.slept_ns = 0  # Both have sent several calls at once by now.
            clock.now_ns += 33 * MS
    assert clock.slept_ns == 0


async def test_notice_before_a_call_is_no_backlog(clock: Any) -> None:
    peers = Peers()
    async with connected(peers.of(1), slow(clock, MS)) as (_, one), connected(peers.of(2)) as (_, two):
        for number in range(1, 11):
            one.send(encode(Call(0, CancelCall(99)))[0])
            await ask(one, number)
            await ask(two, number)
    assert clock.slept_ns == 0


def test_step_that_takes_longer_than_company_lasts_is_followed_by_a_pause(shares: Shares) -> None:
    shares.used("A", 2 * COMPANY_NS, 2 * COMPANY_NS)
    assert shares.pause_ns(2 * COMPANY_NS) == PAUSE_NS_MAX


async def test_calls_that_wait_for_their_answers_do_not_pause(clock: Any) -> None:
    peers = Peers()
    async with connected(peers.of(1), slow(clock, MS)) as (_, one), connected(peers.of(2)) as (_, two):
        for number in range(10):
            await ask(one, number)
            await ask(two, number)
    assert clock.slept_ns == 0


async def test_process_that_waits_again_for_its_answers_has_no_backlog_any_more(clock: Any) -> None:
    peers, count = Peers(), 10
    async with connected(peers.of(1), slow(clock, MS)) as (_, one), connected(peers.of(2)) as (_, two):
        await ask(two, 0)
        for number in range(count):
            one.send(encode(Call(number, Ping()))[0])
        for number in range(count):
            await answer(one, number)
        clock.now_ns += BACKLOG_NS
        await ask(one, count)
        slept_ns = clock.slept_ns
        for number in range(10):
            await ask(one, count + 1 + number)
            await ask(two, number)
        assert clock.slept_ns == slept_ns


async def test_calls_that_never_began_are_no_backlog_of_the_other_connections() -> None:
    process = Peers().of(1)

    async def never(body: Any, channel: Channel) -> Done:
        await anyio.sleep_forever()
        return Done()

    async with AsyncExitStack() as stack:
        channel, sock = await stack.enter_async_context(connected(process, never))
        for number in range(20):
            sock.send(encode(Call(number, Ping()))[0])
        sock.send(encode(Call(0, CancelCall(3)))[0])
        with anyio.fail_after(WAIT_S_MAX):
            while channel.received_count < 7:
                await anyio.lowlevel.checkpoint()
        assert process.calls > 0
    assert process.calls == 0 and len(process.loads) == 0


async def test_new_connections_wait_for_their_turn_beside_clients_that_are_served(clock: Any) -> None:
    peers = Peers()
    newcomer = peers.of(3)
    newcomer.connects_or_leaves()

    async def begin() -> None:
        clock.now_ns += MS

    await newcomer.charged(begin())
    await peers.next_connection()
    assert clock.slept_ns == 0
    async with connected(peers.of(2)) as (_, other):
        await ask(other, 1)
        await newcomer.charged(begin())
        await peers.next_connection()
        assert clock.slept_ns == PAUSE * MS


async def test_time_in_which_the_loop_had_no_processor_is_not_charged(clock: Any) -> None:
    """A client beside one for which the kernel works would be counted as a flood."""
    peers = Peers()
    delayed, other = peers.of(1), peers.of(2)

    async def delayed_step() -> None:
        clock.now_ns += 20 * MS
        clock.taken_ns += 20 * MS

    for _ in range(10):
        other.received(has_waited=True)
        delayed.connects_or_leaves()
        await delayed.charged(delayed_step())
        await delayed.next_turn()
    assert clock.slept_ns == 0


async def test_charged_coroutine_gets_what_is_sent_and_thrown() -> None:
    peer, reached = Peers().of(1), []

    async def work() -> str:
        try:
            await anyio.sleep_forever()
        except BaseException as e:
            reached.append(type(e))
            raise
        return ""

    with anyio.move_on_after(0) as scope:
        await peer.charged(work())
    assert scope.cancelled_caught and reached == [anyio.get_cancelled_exc_class()]

    async def fails() -> None:
        await anyio.lowlevel.checkpoint()
        raise InvalidArgument("here")

    with pytest.raises(InvalidArgument, match="here"):
        await peer.charged(fails())

    async def returns() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    assert await peer.charged(returns()) == 7


# Fences of one message


async def test_fenced_execution_waits_for_more_fences_than_a_message_may_have(
    background: Any, small: Any
) -> None:
    device = RemoteDevice("aionn.drivers.reference:ReferenceDevice", "reference", background.tasks)
    work = small.Sum()
    prepared = await device.prepare_model(small.sum_model())
    fences = [SyncFence(f"part {i}") for i in range(3 * FENCES_MAX)]
    launched = await prepared.execute_fenced(work.request, fences)
    assert launched.fence is not None
    for fence in fences:
        assert launched.fence.signal_time_ns is None
        fence.signal()
    with anyio.fail_after(WAIT_S_MAX):
        await launched.fence
    fences = [SyncFence(f"part {i}") for i in range(FENCES_MAX + 1)]
    launched = await prepared.execute_fenced(work.request, fences)
    fences[-1].fail("planted")
    with pytest.raises(FenceError), anyio.fail_after(WAIT_S_MAX):
        assert launched.fence is not None
        await launched.fence
    for fence in fences:
        fence.close()
    await device.aclose()


def test_message_with_more_fences_is_refused_before_they_are_taken(small: Any) -> None:
    fences = [SyncFence(f"part {i}") for i in range(FENCES_MAX + 1)]
    request = small.Sum().request
    body = ExecuteFenced(1, RequestOnWire.of(request), tuple(fences), False, None, None, None)
    payload, fds, _ = encode(Call(1, body))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match=f"at most {FENCES_MAX} fences"):
        decode(payload, fds)
    assert len(os.listdir("/proc/self/fd")) == before
    for fence in fences:
        fence.close()


class Turns:
    """Counts the turns of the loop, and of what there was in each of them."""

    def __init__(self) -> None:
        self.number = 0
        self.of: list[int] = []

    async def count(self) -> None:
        while True:
            self.number += 1
            await anyio.lowlevel.checkpoint()

    def note(self) -> None:
        self.of.append(self.number)

    @property
    def most(self) -> int:
        return max(self.of.count(number) for number in set(self.of))


CALLS = 300


@pytest.mark.parametrize("who", ["peer", "us"])
async def test_calls_end_a_few_in_each_turn_of_the_loop_when_the_connection_ends(who: str) -> None:
    """Those of the peer that are in progress, and those that the peer has not answered."""
    turns = Turns()

    async def never(body: Any, channel: Channel) -> Done:
        try:
            await anyio.sleep_forever()
        finally:
            turns.note()
        return Done()

    async def call(channel: Channel) -> None:
        with pytest.raises(DeadObject):
            await channel.command(Ping())
        turns.note()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns.count)
        async with connected(Peer(), never) as (channel, sock), anyio.create_task_group() as calls:
            number = 0
            with anyio.fail_after(WAIT_S_MAX):
                while channel.load[0] < CALLS if who == "peer" else channel.pending_count < CALLS:
                    if who == "us":
                        calls.start_soon(call, channel)
                    else:
                        with suppress(BlockingIOError):
                            number += 1
                            sock.send(encode(Call(number, Ping()))[0])
                    await anyio.lowlevel.checkpoint()
            sock.shutdown(socket.SHUT_RDWR)
            with anyio.fail_after(WAIT_S_MAX):
                while len(turns.of) < CALLS:
                    await anyio.lowlevel.checkpoint()
            assert channel.pending_count == 0 and channel.load[0] == 0
        tasks.cancel_scope.cancel()
    assert len(turns.of) >= CALLS and turns.most <= TURN_WEIGHT


async def test_pending_calls_fail_together_when_the_reading_task_is_cancelled() -> None:
    """A call that waits without end would keep its caller, and the server from ending."""
    async with connected(Peer()) as (channel, _), anyio.create_task_group() as calls:
        failed: list[Any] = []

        async def call() -> None:
            with pytest.raises(DeadObject) as e:
                await channel.command(Ping())
            failed.append(e.value)

        for _ in range(50):
            calls.start_soon(call)
        while channel.pending_count < 50:
            await anyio.lowlevel.checkpoint()
        channel.close("the end")
        with pytest.raises(DeadObject, match="the end"):
            await channel.command(Ping())
    assert len(failed) == 50 and {str(e) for e in failed} == {str(failed[0])}


async def test_unread_messages_of_an_ended_connection_are_taken_in_turns_of_the_process(clock: Any) -> None:
    peers = Peers()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    process, other = peers.of(1), peers.of(2)
    channel = Channel(ours, done, peer_name="the peer", peer=process)
    taken = 0
    next_turn = process.next_turn

    async def noting() -> None:
        nonlocal taken
        taken += 1
        assert process.takes_turns
        await next_turn()

    for number in range(5 * DRAINED_WEIGHT):
        theirs.send(encode(Call(number, Ping()))[0])
    channel.close("the end")
    other.received(has_waited=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Peer, "next_turn", lambda self: noting())
        with anyio.fail_after(WAIT_S_MAX):
            await channel.run()
    channel.release()
    theirs.close()
    assert taken >= 5


async def test_end_of_a_connection_pauses_after_its_backlog_is_over(clock: Any) -> None:
    """A pause may be longer than a backlog lasts, and what is left to free is more than one step."""
    peers = Peers()
    leaving, other = peers.of(1), peers.of(2)

    async def free() -> None:
        clock.now_ns += MS

    leaving.connects_or_leaves()
    await leaving.charged(free())
    clock.now_ns = 3 * BACKLOG_NS
    for round in range(1, 4):
        other.received(has_waited=True)
        leaving.connects_or_leaves()
        await leaving.charged(free())
        leaving._backlog_until_ns = clock.now_ns
        await leaving.next_turn()
        assert clock.slept_ns == (round - 1) * PAUSE * MS
        await leaving.next_turn_of_leaving()
        assert clock.slept_ns == round * PAUSE * MS

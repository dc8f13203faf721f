"""Executions that wait for fences of a client begin a few in each turn of the loop, however many are signalled together."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from aionn.drivers.kit.fenced import FencedLaunch
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import GeneralFailure, ResourceExhausted
from aionn.hal import ExecutionPreference, FencedExecution, Priority
from aionn.service.host import client_fences
from aionn.service.host.client_fences import FENCES_PER_TURN, UNWATCHED_S, UNWATCHED_S_MAX, ClientFences
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.peers import Peer, Peers
from aionn.service.wire.protocol import PROTOCOL_VERSION, ExecuteFenced, Hello, Launch, PrepareModel
from aionn.service.wire.quotas import Account, Quotas
from fences import FenceError, FenceStatus, SyncFence

COUNT = 5 * FENCES_PER_TURN
WAIT_S_MAX = 20.0


def received(fence: SyncFence) -> SyncFence:
    """What the process gets that a client sends its fence to."""
    return SyncFence.from_fd(fence.fileno(), reads_record=False)


@asynccontextmanager
async def serving(account: Account | None = None) -> AsyncIterator[ClientFences]:
    async with anyio.create_task_group() as tasks:
        fences = ClientFences(tasks, account or Account(Quotas()), Peers().of("a process"))
        yield fences
        for fence in fences.end():
            fence.close()


@pytest.mark.parametrize("count", [1, COUNT])
@pytest.mark.parametrize("ending", ["signalled", "failed", "dropped"])
async def test_executions_behind_fences_that_finish_together_begin_a_few_in_each_turn(
    count: int, ending: str
) -> None:
    turn, of_turn, theirs = 0, Counter[int](), [SyncFence() for _ in range(count)]
    async with serving() as fences:
        owns = [fences.take(received(theirs[i % count])) for i in range(COUNT)]
        for own in owns:
            own.add_callback(lambda _: of_turn.update([turn]))
        for fence in theirs:
            if ending == "signalled":
                fence.signal()
            elif ending == "failed":
                fence.fail("as an example")
            else:
                fence.close()
        with anyio.fail_after(WAIT_S_MAX):
            while of_turn.total() < COUNT:
                turn += 1
                await anyio.lowlevel.checkpoint()
        expected = FenceStatus.SIGNALLED if ending == "signalled" else FenceStatus.FAILED
        assert {own.status for own in owns} == {expected}
        assert max(of_turn.values()) <= FENCES_PER_TURN
    for fence in theirs:
        fence.close()


async def test_socket_is_watched_until_no_execution_waits_for_it() -> None:
    with SyncFence() as theirs:
        theirs.fileno()
        async with serving() as fences:
            before = len(os.listdir("/proc/self/fd"))
            first, second = (fences.take(received(theirs)) for _ in range(2))
            assert len(os.listdir("/proc/self/fd")) == before + 2, "the socket, and the watch of all"
            fences.give_back(first)
            assert first.status == FenceStatus.FAILED and second.status == FenceStatus.PENDING
            fences.give_back(second)
            assert len(os.listdir("/proc/self/fd")) == before + 1
            third = fences.take(received(theirs))
            theirs.signal()
            with anyio.fail_after(WAIT_S_MAX):
                await third
            assert len(os.listdir("/proc/self/fd")) <= before + 1


async def test_end_fails_what_waits_and_gives_the_descriptor_of_the_watch_back() -> None:
    account = Account(Quotas(descriptors=1))
    with SyncFence() as theirs:
        async with serving(account) as fences:
            own = fences.take(received(theirs))
            assert account.taken("descriptors") == 1
        assert account.taken("descriptors") == 0
        with pytest.raises(FenceError):
            await own


async def test_executions_of_a_client_that_is_served_alone_begin_in_turns_beyond_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_fences, "DIRECT_MAX", FENCES_PER_TURN)
    turn, of_turn = 0, Counter[int]()
    with SyncFence() as theirs:
        async with anyio.create_task_group() as tasks:
            fences = ClientFences(tasks, Account(Quotas()), Peer())
            for _ in range(COUNT):
                fences.take(received(theirs)).add_callback(lambda _: of_turn.update([turn]))
            theirs.signal()
            with anyio.fail_after(WAIT_S_MAX):
                while of_turn.total() < COUNT:
                    turn += 1
                    await anyio.lowlevel.checkpoint()
            assert max(of_turn.values()) <= 2 * FENCES_PER_TURN and fences.end() == []


async def test_few_fences_of_a_client_that_is_served_alone_stand_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_fences, "DIRECT_MAX", 2)
    with SyncFence() as theirs, SyncFence() as later:
        async with anyio.create_task_group() as tasks:
            fences = ClientFences(tasks, Account(Quotas()), Peer())
            first, second, third = (received(theirs) for _ in range(3))
            assert fences.take(first) is first and fences.take(second) is second
            own = fences.take(third)
            assert own is not third
            fences.give_back(first)
            fourth = received(later)
            assert fences.take(fourth) is fourth, "the place of the one that was given back"
            theirs.signal()
            with anyio.fail_after(WAIT_S_MAX):
                await own
                await second
            fifth = received(later)
            assert fences.take(fifth) is fifth, "the place of the one that has finished"
            for fence in (second, fourth, fifth, *fences.end()):
                fence.close()


async def test_fences_are_read_ever_more_seldom_while_the_loop_cannot_watch_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept_s: list[float] = []

    async def sleep(time_s: float) -> None:
        slept_s.append(time_s)
        if len(slept_s) == 10:
            theirs.signal()
        await anyio.lowlevel.checkpoint()

    async def wait_readable(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with SyncFence() as theirs:
        async with serving() as fences:
            with monkeypatch.context() as patch:
                patch.setattr(client_fences.anyio, "sleep", sleep)
                patch.setattr(client_fences.anyio, "wait_readable", wait_readable)
                own = fences.take(received(theirs))
                with anyio.fail_after(WAIT_S_MAX):
                    await own
    assert slept_s[:10] == [min(UNWATCHED_S * 2**place, UNWATCHED_S_MAX) for place in range(10)]
    assert slept_s[9] == UNWATCHED_S_MAX


@pytest.mark.parametrize("ending", ["signalled", "failed"])
@pytest.mark.parametrize("form", ["fenced", "launched"])
async def test_execution_counts_as_a_success_when_it_has_succeeded(
    small: Any, form: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    successes: list[Peer] = []
    monkeypatch.setattr(Peer, "executed", lambda peer: successes.append(peer))
    channel: Any = Commanded()
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        peer = Peers().of("a process")
        session = Session(device, portal, tasks, quotas=Quotas(), progress=Progress(None), peer=peer)
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        prepare = PrepareModel(
            small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None
        )
        prepared: Any = await session.handle(prepare, channel)
        request = RequestOnWire.of(small.Sum().request)
        with SyncFence() as theirs:
            if form == "fenced":
                fenced = ExecuteFenced(
                    prepared.prepared, request, (received(theirs),), False, None, None, None
                )
                reply: Any = await session.handle(fenced, channel)
                assert not successes
                if ending == "signalled":
                    theirs.signal()
                else:
                    theirs.fail("as an example")
                with anyio.fail_after(WAIT_S_MAX), contextlib.suppress(FenceError):
                    await reply.fence
            else:
                deadline_ns = None if ending == "signalled" else 1
                await session.handle(Launch(1, prepared.prepared, request, False, deadline_ns, None), channel)
                with anyio.fail_after(WAIT_S_MAX):
                    await channel.done
                    while session.account.taken("executions"):
                        await anyio.lowlevel.checkpoint()
        assert successes == ([peer] if ending == "signalled" else [])
        await session.aclose()
    await device.aclose()


class Commanded:
    """A channel on which the end of a launch is noticed."""

    def __init__(self) -> None:
        self.done = SyncFence("end of a launch")

    async def command(self, _: Any) -> None:
        self.done.signal()


async def test_fenced_execution_without_a_fence_is_the_drivers_fault_and_counts_nothing(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel: Any = None
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(device, portal, tasks, quotas=Quotas(), progress=Progress(None))
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        prepare = PrepareModel(
            small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None
        )
        prepared: Any = await session.handle(prepare, channel)

        async def execute_fenced(*_: Any, **__: Any) -> FencedExecution:
            strange: Any = "a fence"
            return FencedExecution(strange, strange)

        model = session._prepared_model(prepared.prepared)
        monkeypatch.setattr(type(model), "execute_fenced", execute_fenced)
        body = ExecuteFenced(
            prepared.prepared, RequestOnWire.of(small.Sum().request), (), False, None, None, None
        )
        with pytest.raises(GeneralFailure, match=r"expected a SyncFence or None .*, got a str"):
            await session.handle(body, channel)
        assert [session.account.taken(what) for what in ("fenced", "executions", "descriptors")] == [0, 0, 0]
        await session.aclose()
    await device.aclose()


async def test_executions_that_have_ended_do_not_add_up_behind_a_fence_that_never_does() -> None:
    async with serving() as fences:
        with SyncFence() as theirs:
            for _ in range(COUNT):
                own = fences.take(received(theirs))
                fences.leave([own])
            assert len(fences._by_own) == 1, "the last one; each further one takes those that have ended away"
            assert own.status is FenceStatus.PENDING
            other = fences.take(received(theirs))
            theirs.signal()
            with anyio.fail_after(WAIT_S_MAX):
                await other
            assert own.status is FenceStatus.FAILED


async def test_fence_that_the_loop_cannot_watch_is_rejected_and_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pin_in_loop(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    async with anyio.create_task_group() as tasks:
        fences = ClientFences(tasks, Account(Quotas()), Peer())
        with SyncFence() as theirs, received(theirs) as fence:
            with monkeypatch.context() as patch:
                patch.setattr("fences.fence.pin_in_loop", pin_in_loop)
                with pytest.raises(ResourceExhausted, match="cannot be watched: no room"):
                    fences.take(fence)
            assert not fences._direct
            assert fences.take(fence) is fence
        assert not fences._direct
        fences.end()


async def test_session_has_its_executions_wait_for_fences_that_are_read_in_turns(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, of_turn, on_ready = 0, Counter[int](), FencedLaunch._on_ready

    def counted(launch: FencedLaunch, ready: SyncFence) -> None:
        of_turn.update([turn])
        on_ready(launch, ready)

    monkeypatch.setattr(FencedLaunch, "_on_ready", counted)
    channel: Any = None
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        peer = Peers().of("a process")
        session = Session(device, portal, tasks, quotas=Quotas(), progress=Progress(None), peer=peer)
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        prepare = PrepareModel(
            small.sum_model(), ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None
        )
        prepared: Any = await session.handle(prepare, channel)
        work = small.Sum()
        request = RequestOnWire.of(work.request)
        outcomes = []
        with SyncFence() as theirs:
            for _ in range(COUNT):
                body = ExecuteFenced(prepared.prepared, request, (received(theirs),), False, None, None, None)
                reply: Any = await session.handle(body, channel)
                outcomes.append(reply.fence)
            theirs.signal()
            with anyio.fail_after(WAIT_S_MAX):
                while of_turn.total() < COUNT:
                    turn += 1
                    await anyio.lowlevel.checkpoint()
                for outcome in outcomes:
                    await outcome
        assert work.is_right and max(of_turn.values()) <= FENCES_PER_TURN
        assert len(session._fences._left) == COUNT, "each execution that has ended"
        await session.aclose()
    await device.aclose()

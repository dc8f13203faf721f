"""The end of a served device in order: accepted executions end, later ones are rejected with the reason, and the process exits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import DeadObject, DeviceUnavailable, InvalidArgument
from aionn.hal import DeviceStatus, Priority
from aionn.runtime.background import Background
from aionn.service.client.connection import Connection
from aionn.service.client.device import RemoteDevice
from aionn.service.host import accepted as accepted_module
from aionn.service.host import draining as draining_module
from aionn.service.host.accepted import Drain
from aionn.service.host.draining import (
    EXIT_STATUS,
    GRACE_NS,
    UNREAD_NS_MAX,
    DrainEvent,
    DrainState,
    DrainTable,
)
from aionn.service.host.listening import listen_at
from aionn.service.host.process import listen
from aionn.service.wire.handles import PoolOnWire, RequestOnWire
from aionn.service.wire.protocol import Execute, GetMemories
from aionn.service.wire.repetition import RecallMemories
from fmq import MessageQueue
from tests.support.mortal_driver import doubled_model

pytestmark = pytest.mark.forked("any")

LIMIT_S = 30
S = 1_000_000_000
LATER = 1000 * S


def draining(limit_ns: int = 8 * S) -> DrainTable:
    table = DrainTable(limit_ns)
    assert table.terminate(0) is DrainState.DRAINING
    return table


def test_every_last_state_has_an_exit_status_and_a_second_signal_stops_each() -> None:
    for state in set(DrainState) - {DrainState.SERVING, DrainState.DRAINING}:
        assert EXIT_STATUS[state] == {"DRAINED": 0, "CUT_OFF": 1, "STOPPED": 143}[state.name]
        table = DrainTable(S)
        table.state = state
        assert table.terminate(0) is DrainState.STOPPED
    assert {event.name for event in DrainEvent} == {"SIGTERM", "IDLE", "LIMIT"}


def test_drain_without_work_is_over_immediately() -> None:
    assert draining().look(0, [], has_unread=False) is DrainState.DRAINED


def test_execution_without_a_deadline_is_cut_off_at_the_limit() -> None:
    table = draining()
    assert table.look(8 * S + GRACE_NS - 1, [None], has_unread=False) is DrainState.DRAINING
    assert table.look(8 * S + GRACE_NS, [None], has_unread=False) is DrainState.CUT_OFF


def test_latest_deadline_ends_the_wait_and_nothing_was_cut_off() -> None:
    table = draining()
    assert table.look(2 * S, [S, 3 * S], has_unread=False) is DrainState.DRAINING
    assert table.look(3 * S + GRACE_NS - 1, [3 * S], has_unread=False) is DrainState.DRAINING
    assert table.look(3 * S + GRACE_NS, [3 * S], has_unread=False) is DrainState.DRAINED


def test_deadline_beyond_the_limit_does_not_extend_the_wait() -> None:
    table = draining(limit_ns=S)
    assert table.look(S + GRACE_NS, [LATER], has_unread=False) is DrainState.CUT_OFF


def test_answers_are_kept_until_they_are_read_but_not_without_a_limit() -> None:
    table = draining()
    table.look(0, [None], has_unread=False)
    assert table.look(5, [], has_unread=True) is DrainState.DRAINING
    assert table.look(5 + UNREAD_NS_MAX - 1, [], has_unread=True) is DrainState.DRAINING
    assert table.look(5 + UNREAD_NS_MAX, [], has_unread=True) is DrainState.DRAINED
    near = draining()
    near.look(0, [10], has_unread=False)
    assert near.look(10, [], has_unread=True) is DrainState.DRAINING
    assert near.look(10 + GRACE_NS, [], has_unread=True) is DrainState.DRAINED, "its deadline has passed"


def test_answers_of_executions_that_ended_before_the_drain_are_kept_as_long_as_those_of_others() -> None:
    table = draining()
    for now_ns in (5, 5 + GRACE_NS, 5 + UNREAD_NS_MAX - 1):
        assert table.look(now_ns, [], has_unread=True) is DrainState.DRAINING
    assert table.look(5 + UNREAD_NS_MAX, [], has_unread=True) is DrainState.DRAINED
    assert draining().look(5, [], has_unread=False) is DrainState.DRAINED


class Draining(NamedTuple):
    device: ReferenceDevice
    drain: Drain
    path: Path
    background: Background
    over: anyio.Event
    number: int

    def begin(self) -> None:
        assert self.drain.terminate() is DrainState.DRAINING
        self.drain.wake()

    async def client(self) -> RemoteDevice:
        client = RemoteDevice("reference", "reference", self.background.tasks, path=self.path)
        await client.connect()
        return client


@pytest.fixture
async def drained(tmp_path: Path, background: Background) -> AsyncIterator[Draining]:
    """A device that is served and can be drained."""
    device, drain, path, over = ReferenceDevice(), Drain(LIMIT_S), tmp_path / "d.sock", anyio.Event()
    started = anyio.Event()

    async def run() -> None:
        await listen(device, path, started=started, drain=drain)
        over.set()

    background.tasks.start_soon(run)
    await started.wait()
    made = Draining(device, drain, path, background, over, path.lstat().st_ino)
    yield made
    if not over.is_set():
        drain.terminate()
        drain.wake()
        with anyio.fail_after(LIMIT_S):
            await over.wait()
    await device.aclose()


async def test_accepted_executions_end_and_later_ones_are_rejected(drained: Draining, small: Any) -> None:
    client = await drained.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    await burst.execute_synchronously(small.Sum().request, [0])
    slot = drained.device.gate.slot(Priority.HIGH, None)
    await anyio.to_thread.run_sync(slot.__enter__)  # Both executions wait for the device.
    called, fast, idle = small.Sum(), small.Sum(), await drained.client()
    late = await prepared.configure_execution_burst()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepared.execute_synchronously, called.request)
        tasks.start_soon(burst.execute_synchronously, fast.request, [1])
        with anyio.fail_after(LIMIT_S):
            while drained.device.gate.waiting_count < 2:
                await anyio.lowlevel.checkpoint()
            drained.begin()
            while drained.path.exists():
                await anyio.lowlevel.checkpoint()
            assert await client.status() is DeviceStatus.OFFLINE
            with pytest.raises(DeviceUnavailable, match="SIGTERM"):
                await prepared.execute_synchronously(small.Sum().request)
            with pytest.raises(DeviceUnavailable, match="SIGTERM"):
                await late.execute_synchronously(small.Sum().request, [0])
            with pytest.raises(DeviceUnavailable, match="SIGTERM"):
                await idle.prepare_model(small.sum_model())
            with pytest.raises(DeviceUnavailable):
                await drained.client()
            assert drained.drain.state is DrainState.DRAINING, "two executions are under way"
            slot.__exit__(None, None, None)
    assert called.is_right and fast.is_right
    with anyio.fail_after(LIMIT_S):
        await drained.over.wait()
    assert drained.drain.state is DrainState.DRAINED
    with pytest.raises(DeadObject):
        await burst.execute_synchronously(small.Sum().request, [0])
    await burst.aclose()
    await late.aclose()
    await client.aclose()
    await idle.aclose()


async def test_socket_of_the_next_server_is_kept_when_the_drain_ends(
    drained: Draining, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next server is started while the one before it drains."""
    lstat = os.lstat

    def reused(path: Any) -> os.stat_result:
        seen = lstat(path)
        if os.fspath(path) != str(drained.path):
            return seen
        return os.stat_result((seen.st_mode, drained.number, *seen[2:]))

    monkeypatch.setattr(os, "lstat", reused)  # As on ext4: the next file gets the number of the last one.
    client = await drained.client()
    prepared = await client.prepare_model(small.sum_model())
    slot = drained.device.gate.slot(Priority.HIGH, None)
    await anyio.to_thread.run_sync(slot.__enter__)
    called = small.Sum()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepared.execute_synchronously, called.request)
        with anyio.fail_after(LIMIT_S):
            while not drained.device.gate.waiting_count:
                await anyio.lowlevel.checkpoint()
            drained.begin()
            # Until the socket is closed, which is when its number is free, and not only until its file is removed.
            while await client.status() is not DeviceStatus.OFFLINE:
                await anyio.lowlevel.checkpoint()
            following, identity = await listen_at(str(drained.path), 0o600)
            slot.__exit__(None, None, None)
            await drained.over.wait()
    assert called.is_right
    with following:
        assert drained.path.exists() and identity == drained.number
    await client.aclose()


async def test_preparation_ends_with_the_reason(drained: Draining, small: Any) -> None:
    may_end, has_begun = threading.Event(), threading.Event()
    prepare = drained.device.prepare

    def slow(*arguments: Any, **more: Any) -> Any:
        has_begun.set()
        may_end.wait(LIMIT_S)
        return prepare(*arguments, **more)

    drained.device.prepare = slow  # type: ignore[method-assign]
    client = await drained.client()
    raised: list[Exception] = []

    async def compile() -> None:
        with pytest.raises(DeviceUnavailable, match="SIGTERM") as error:
            await client.prepare_model(small.sum_model())
        raised.append(error.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(compile)
        with anyio.fail_after(LIMIT_S):
            await anyio.to_thread.run_sync(has_begun.wait)
            drained.begin()
            while not raised:
                await anyio.lowlevel.checkpoint()
            may_end.set()  # The engine compiled on.
            await drained.over.wait()
    assert drained.drain.state is DrainState.DRAINED
    await client.aclose()


async def test_silent_clients_and_those_that_were_not_accepted_do_not_delay_the_end(
    drained: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (accepted_module, draining_module):
        monkeypatch.setattr(module, "UNREAD_NS_MAX", LATER)  # The end does not come by a limit.
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(str(drained.path))
    greeted = await drained.client()
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting.connect(str(drained.path))  # In the same turn of the loop: it is in the backlog.
    drained.begin()
    with anyio.fail_after(LIMIT_S / 2):
        await drained.over.wait()
    for sock in (silent, waiting):
        sock.settimeout(LIMIT_S)
        answer = sock.recv(1 << 12)
        assert sock is silent or b"SIGTERM" in answer
        sock.close()
    await greeted.aclose()


def _serve(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "aionn", "serve", "reference", "--socket", str(path), "--quiet"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.thorough
async def test_stream_of_a_compilation_that_recovers_continues_at_the_next_server(tmp_path: Path) -> None:
    """The next server is started while the one before it drains."""
    path, frames = tmp_path / "s.sock", 400
    servers = [_serve(path)]
    try:
        with anyio.fail_after(LIMIT_S):
            while not path.exists():
                await anyio.sleep(0.01)
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                net = await runtime.compile(doubled_model(), recover=True)

                async def values() -> AsyncIterator[Any]:
                    for number in range(frames):
                        if number == 50:
                            os.kill(servers[0].pid, signal.SIGTERM)
                            while path.exists():
                                await anyio.sleep(0.001)
                            servers.append(_serve(path))
                        yield np.full(1, number, np.float32)

                statuses: list[str] = []
                async with net.burst() as burst:
                    async for result in burst.stream(values()):
                        if result.status == "on_time":
                            assert float(result.outputs[0][0]) == 2 * len(statuses)
                        statuses.append(result.status)
                assert await anyio.to_thread.run_sync(servers[0].wait) == 0
                assert net.recoveries == 1
        assert len(statuses) == frames and set(statuses) == {"on_time", "lost"}
        assert statuses[:48] == ["on_time"] * 48 and statuses[-1] == "on_time" and statuses.count("lost") <= 4
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.mark.slow
async def test_process_drains_at_sigterm_in_the_middle_of_streams(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    command = [sys.executable, "-P", "-m", "aionn", "serve", "reference", "--socket", str(path), "--quiet"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert server.stderr is not None
    try:
        with anyio.fail_after(LIMIT_S):
            while not path.exists():
                await anyio.sleep(0.01)
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                net = await runtime.compile(doubled_model())
                results: list[float] = []

                async def values() -> AsyncIterator[Any]:
                    for number in range(100_000):
                        if number == 50:
                            os.kill(server.pid, signal.SIGTERM)
                        yield np.full(1, number, np.float32)

                async with net.burst() as burst:
                    # The reason, or the end of the process where it is over before the next frame is sent.
                    with pytest.raises((DeviceUnavailable, DeadObject)):
                        async for result in burst.stream(values()):
                            results.append(float(result.outputs[0][0]))
                assert await anyio.to_thread.run_sync(server.wait) == 0
        assert len(results) >= 48 and results == [2 * number for number in range(len(results))]
        assert server.stderr.read() == b""
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


ENDLESS = """
import pathlib, threading
from aionn.drivers.skeleton import SkeletonDevice, SkeletonModel

class EndlessModel(SkeletonModel):
    def run(self, inputs, outputs, control):
        pathlib.Path("begun").touch()
        threading.Event().wait()
        return super().run(inputs, outputs, control)

class EndlessDevice(SkeletonDevice):
    def prepare(self, model, *, preference, priority, deadline_ns):
        return EndlessModel(self, model, priority)
"""


@pytest.mark.slow
async def test_second_sigterm_ends_the_process_with_status_143_in_the_middle_of_an_execution(
    tmp_path: Path,
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    path = tmp_path / "s.sock"
    command = [sys.executable, "-P", "-m", "aionn", "serve", "endless:EndlessDevice", "--quiet"]
    server = subprocess.Popen(
        [*command, "--socket", str(path), "--drain-within", "86400"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        with anyio.fail_after(LIMIT_S):
            while not path.exists():
                await anyio.sleep(0.01)
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                execution = (await runtime.compile(doubled_model())).execute_fenced([np.ones(1, np.float32)])
                while not (tmp_path / "begun").exists():
                    await anyio.sleep(0.01)
                server.send_signal(signal.SIGTERM)
                while path.exists():
                    await anyio.sleep(0.001)
                assert server.poll() is None, "it waits for the execution"
                server.send_signal(signal.SIGTERM)
                assert await anyio.to_thread.run_sync(server.wait) == EXIT_STATUS[DrainState.STOPPED] == 143
                with pytest.raises(DeadObject):
                    await execution
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("are_accepted", [True, False])
async def test_drain_does_not_depend_on_the_readers_of_its_lines(are_accepted: bool, tmp_path: Path) -> None:
    """Nobody reads what the server prints. An accepted execution ends, or is cut off at the limit."""
    (tmp_path / "endless.py").write_text(
        ENDLESS.replace(".Event().wait()", f".Event().wait({1 if are_accepted else None})")
    )
    path = tmp_path / "s.sock"
    command = [sys.executable, "-P", "-m", "aionn", "serve", "endless:EndlessDevice", "--socket", str(path)]
    within = "20" if are_accepted else "0.1"
    server = subprocess.Popen(
        [*command, "--drain-within", within], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert server.stdout is not None and server.stderr is not None
    server.stdout.close()
    server.stderr.close()
    try:
        with anyio.fail_after(LIMIT_S):
            while not path.exists():
                await anyio.sleep(0.01)
            async with aionn.open(drivers=[], sockets=[path]) as runtime:
                execution = (await runtime.compile(doubled_model())).execute_fenced([np.ones(1, np.float32)])
                while not (tmp_path / "begun").exists():
                    await anyio.sleep(0.01)
                server.send_signal(signal.SIGTERM)
                if are_accepted:
                    await execution
                else:
                    with pytest.raises(DeadObject):
                        await execution
                state = DrainState.DRAINED if are_accepted else DrainState.CUT_OFF
                assert await anyio.to_thread.run_sync(server.wait) == EXIT_STATUS[state]
    finally:
        server.kill()
        server.wait()


async def test_request_that_was_read_and_is_not_yet_under_way_is_answered(
    drained: Draining, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the burst loses its processor between its read and the record of that."""
    read, is_armed = MessageQueue.read_message_blocking, threading.Event()
    has_read, may_go_on = threading.Event(), threading.Event()

    def slow(queue: MessageQueue, timeout_ns: int | None) -> bytes | None:
        payload = read(queue, timeout_ns)
        if payload is not None and is_armed.is_set():
            has_read.set()
            may_go_on.wait(LIMIT_S)
        return payload

    monkeypatch.setattr(MessageQueue, "read_message_blocking", slow, raising=False)
    client = await drained.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    await burst.execute_synchronously(small.Sum().request, [0])
    is_armed.set()
    raised: list[Exception] = []

    async def execute() -> None:
        with pytest.raises((DeviceUnavailable, DeadObject)) as error:
            await burst.execute_synchronously(small.Sum().request, [0])
        raised.append(error.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(execute)
        with anyio.fail_after(LIMIT_S):
            await anyio.to_thread.run_sync(has_read.wait, LIMIT_S)
            drained.begin()
            while drained.drain.state is DrainState.DRAINING or drained.path.exists():
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.1)  # Long enough for the connection to end, if nothing held it.
            may_go_on.set()
            await drained.over.wait()
    assert isinstance(raised[0], DeviceUnavailable) and "SIGTERM" in str(raised[0])
    await burst.aclose()
    await client.aclose()


async def test_client_that_does_not_say_which_memories_it_means_does_not_delay_the_end(
    drained: Draining, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = anyio.Event(), anyio.Event()

    handle = Connection._handle

    async def silent(self: Connection, body: Any, channel: Any) -> Any:
        if isinstance(body, GetMemories):
            asked.set()
            await answer.wait()
        return await handle(self, body, channel)

    monkeypatch.setattr(Connection, "_handle", silent)
    client = await drained.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_fails, burst.execute_synchronously, small.Sum().request, [0])
        with anyio.fail_after(LIMIT_S):
            await asked.wait()
            drained.begin()
            began_s = anyio.current_time()
            await drained.over.wait()
            took_s = anyio.current_time() - began_s
        answer.set()
    assert drained.drain.state is DrainState.DRAINED and took_s < LIMIT_S / 2, (
        "not the limit of all executions"
    )
    await burst.aclose()
    await client.aclose()


async def test_client_that_does_not_say_which_memory_it_means_again_does_not_delay_the_end(
    drained: Draining, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = anyio.Event(), anyio.Event()

    async def silent(self: Connection, body: Any, channel: Any) -> Any:
        if isinstance(body, RecallMemories):
            asked.set()
            await answer.wait()
        raise InvalidArgument("too late")

    monkeypatch.setattr(Connection, "_handle", silent)
    client = await drained.client()
    prepared = await client.prepare_model(small.sum_model())
    request = RequestOnWire.of(small.Sum().request, lambda _: PoolOnWire(None, 0, 5))
    body = Execute(prepared.handle, request, False, None, None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_fails, prepared.connection.channel.command, body)
        with anyio.fail_after(LIMIT_S):
            await asked.wait()
            drained.begin()
            began_s = anyio.current_time()
            await drained.over.wait()
            took_s = anyio.current_time() - began_s
        answer.set()
    assert drained.drain.state is DrainState.DRAINED and took_s < LIMIT_S / 2, (
        "not the limit of all executions"
    )
    await client.aclose()


async def _fails(call: Any, *arguments: Any) -> None:
    with pytest.raises((DeviceUnavailable, DeadObject)):
        await call(*arguments)

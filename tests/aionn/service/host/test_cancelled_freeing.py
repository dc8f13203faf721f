"""What is freed by a task that is cancelled is free when the cancellation is raised, at both ends of a connection."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import DeviceUnavailable
from aionn.hal import BufferDesc, BufferRole, Device
from aionn.runtime.background import Background
from aionn.service.client.connection import ServedSocket
from aionn.service.client.device import RemoteDevice
from aionn.service.host import process as host
from aionn.service.host.session import Session
from tests.support.cancellation import NATIVE_COUNTS, cancelled_natively

TURNS = 10
"""Turns of the loop that the objects of this file take to close."""

every_count = pytest.mark.parametrize("count", NATIVE_COUNTS)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The sessions of this process, in the order of their starts."""
    made: list[Session] = []

    class Kept(Session):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(host, "Session", Kept)
    return made


class Slow:
    """Stands before something of the device's; closing takes some turns of the loop."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def aclose(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await self.inner.aclose()
        self.is_closed = True


@every_count
async def test_prepared_model_and_all_its_bursts(
    serving: Any, sessions: list[Session], small: Any, count: int
) -> None:
    client = (await serving()).client()
    prepared = await client.prepare_model(small.sum_model())
    bursts = [await prepared.configure_execution_burst() for _ in range(3)]
    account = sessions[0].account
    assert (account.taken("bursts"), account.taken("prepared_models")) == (3, 1)
    await cancelled_natively(prepared.aclose(), count)
    assert (account.taken("bursts"), account.taken("prepared_models")) == (0, 0)
    assert [burst.state.name for burst in bursts] == ["CLOSED"] * 3
    await client.aclose()


@every_count
async def test_burst_and_device_memory(serving: Any, sessions: list[Session], small: Any, count: int) -> None:
    client = (await serving()).client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    buffer = await client.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    account = sessions[0].account
    await cancelled_natively(burst.aclose(), count)
    assert account.taken("bursts") == 0
    await cancelled_natively(buffer.aclose(), count)
    assert account.taken("buffers") == 0
    await prepared.aclose()
    await client.aclose()


@every_count
async def test_object_of_the_device_at_its_host(
    serving: Any, sessions: list[Session], small: Any, count: int
) -> None:
    client = (await serving()).client()
    prepared = await client.prepare_model(small.sum_model())
    buffer = await client.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    (session,) = sessions
    ((buffer_handle, owned_buffer),) = session._buffers.items()
    slow_buffer = Slow(owned_buffer.buffer)
    session._buffers[buffer_handle] = owned_buffer._replace(buffer=slow_buffer)
    await cancelled_natively(session._free_buffer(buffer_handle), count)
    assert slow_buffer.is_closed
    burst = await prepared.configure_execution_burst()
    owned = session._prepared[prepared.handle]
    slow_model = Slow(owned.model)
    session._prepared[prepared.handle] = owned._replace(model=slow_model)
    await cancelled_natively(session._free_prepared(prepared.handle), count)
    assert slow_model.is_closed
    assert (session.account.taken("bursts"), session.account.taken("prepared_models")) == (0, 0)
    await burst.aclose()
    await buffer.aclose()
    await client.aclose()


@every_count
async def test_burst_of_the_host_gives_back_what_it_took(
    serving: Any, sessions: list[Session], small: Any, count: int
) -> None:
    client = (await serving()).client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    (session,) = sessions
    (handle,) = session.bursts._bursts
    before_bytes = session.account.taken("memory_bytes")
    await cancelled_natively(session.bursts.end(handle), count)
    assert session.account.taken("bursts") == 0
    assert session.account.taken("memory_bytes") < before_bytes
    await burst.aclose()
    await client.aclose()


@every_count
async def test_everything_of_a_client_when_serving_it_is_cancelled(
    sessions: list[Session], background: Background, small: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    device: Device = ReferenceDevice()
    serving = asyncio.create_task(host.serve(device, theirs))
    client = RemoteDevice("reference", "reference", background.tasks, path="connected")

    async def connected() -> ServedSocket:
        return ServedSocket(ours)

    monkeypatch.setattr(client, "_open", connected)
    prepared = [await client.prepare_model(small.sum_model()) for _ in range(2)]
    burst = await prepared[0].configure_execution_burst()
    (session,) = sessions
    slow = []
    for handle, owned in session._prepared.items():
        slow.append(Slow(owned.model))
        session._prepared[handle] = owned._replace(model=slow[-1])
    await cancelled_natively(serving, count)
    assert [model.is_closed for model in slow] == [True, True]
    assert session.account.taken("bursts") == 0
    assert theirs.fileno() == -1
    await burst.aclose()
    await client.aclose()
    await device.aclose()


@every_count
async def test_driver_process_is_reaped_when_the_end_of_its_device_is_cancelled(
    background: Background, count: int
) -> None:
    client = RemoteDevice("reference", "reference", background.tasks)
    await client.connect()
    pid = client.pid
    assert pid is not None and Path(f"/proc/{pid}").exists()
    await cancelled_natively(client.aclose(), count)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(DeviceUnavailable):
        await client.connect()

"""A driver that dies before it has served is started again after ever longer pauses, as one that dies later is."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aionn.errors import DeviceUnavailable
from aionn.service.client import device as client_module
from aionn.service.client.device import RemoteDevice


class Gone:
    """A process that has ended."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()

    def kill(self) -> None: ...

    async def log_output(self) -> None: ...

    async def wait(self) -> None: ...

    async def aclose(self) -> None: ...


async def test_driver_that_never_answers_hello_is_started_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused_s: list[float] = []

    async def noted(delay_s: float) -> None:
        paused_s.append(delay_s)
        await anyio.lowlevel.checkpoint()

    async def open_gone(self: RemoteDevice) -> Any:
        return Gone()

    monkeypatch.setattr(RemoteDevice, "_open", open_gone)
    monkeypatch.setattr(client_module.anyio, "sleep", noted)
    async with anyio.create_task_group() as tasks:
        device = RemoteDevice("reference", "test", tasks)
        began_s = time.monotonic()
        for _ in range(5):
            with pytest.raises(DeviceUnavailable):
                await device.connect()
        if time.monotonic() - began_s < client_module.SHORT_LIFE_S:
            starts_paused = [s for s in paused_s if s >= client_module.PAUSE_S_MIN]
            assert starts_paused == [client_module.PAUSE_S_MIN * 2**n for n in range(3)]
        await device.aclose()


async def test_start_that_its_caller_cancels_says_nothing_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused_s: list[float] = []
    hangs = True

    async def noted(delay_s: float) -> None:
        paused_s.append(delay_s)
        await anyio.lowlevel.checkpoint()

    async def open_never(self: RemoteDevice) -> Any:
        if hangs:
            await anyio.sleep_forever()
        return Gone()

    monkeypatch.setattr(RemoteDevice, "_open", open_never)
    async with anyio.create_task_group() as tasks:
        device = RemoteDevice("reference", "test", tasks)
        for _ in range(5):
            with anyio.CancelScope() as scope:
                asyncio.get_running_loop().call_soon(scope.cancel)
                await device.connect()
            assert scope.cancelled_caught
        monkeypatch.setattr(client_module.anyio, "sleep", noted)
        hangs = False
        for _ in range(2):
            with pytest.raises(DeviceUnavailable):
                await device.connect()
        assert not [s for s in paused_s if s >= client_module.PAUSE_S_MIN]
        await device.aclose()

"""A served device, clients of it, and a small model with requests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.hal import (
    Device,
)
from aionn.runtime.background import Background
from aionn.service.client.device import RemoteDevice
from aionn.service.host.admission import ClientLimits
from aionn.service.host.process import DEFAULT_LIMITS, SHARED_QUOTAS, listen
from aionn.service.wire.protocol import (
    PROTOCOL_VERSION,
    Call,
    CallBody,
    Hello,
    Reply,
    ReplyBody,
    decode,
    encode,
)
from tests.aionn.service.closing import until_closed
from tests.aionn.service.sums import Sum, sum_model

ANSWER_S_MAX = 10.0


@pytest.fixture(autouse=True)
def _earlier_descriptors_are_closed() -> None:
    """Tests count the descriptors of this process: those of an earlier test are not among them."""
    until_closed()


class Served:
    """A device behind a socket in the file system."""

    def __init__(self, device: Device, path: Path, background: Background) -> None:
        self.device = device
        self.path = path
        self._background = background

    def client(self, name: str = "reference", **more: Any) -> RemoteDevice:
        return RemoteDevice("reference", name, self._background.tasks, path=self.path, **more)

    def raw(self) -> Raw:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(ANSWER_S_MAX)
        sock.connect(str(self.path))
        return Raw(sock)

    def speaking(self, sock: socket.socket) -> Raw:
        return Raw(sock)


class Raw:
    """A client that says what it likes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def receive(self) -> bytes:
        """The next datagram; empty once the server has closed the connection."""
        with anyio.fail_after(ANSWER_S_MAX):
            self.sock.setblocking(False)
            while True:
                try:
                    return self.sock.recv(1 << 16)
                except BlockingIOError:
                    await anyio.wait_readable(self.sock)
                except ConnectionResetError:
                    return b""

    async def ask(self, number: int, body: CallBody) -> ReplyBody:
        payload, fds, keep = encode(Call(number, body))
        socket.send_fds(self.sock, [payload], fds) if fds else self.sock.send(payload)
        del keep
        reply = decode(await self.receive(), [])
        assert isinstance(reply, Reply) and reply.id == number
        return reply.body

    async def hello(self) -> Raw:
        await self.ask(1, Hello(PROTOCOL_VERSION))
        return self

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    own = Background()
    await own.start()
    yield own
    await own.aclose()


ServedMaker = Callable[..., Any]


@pytest.fixture
async def serving(tmp_path: Path, background: Background) -> AsyncIterator[ServedMaker]:
    """Makes served devices: ``await serving(device=None, idle_s=..., limits=..., **quotas)``."""
    devices: list[Device] = []
    scopes: list[anyio.CancelScope] = []
    over: list[anyio.Event] = []

    async def make(
        device: Device | None = None,
        *,
        idle_s: float = 60.0,
        limits: ClientLimits = DEFAULT_LIMITS,
        descriptors_max: int | None = None,
        **quotas: int,
    ) -> Served:
        own = device or ReferenceDevice()
        devices.append(own)
        path = tmp_path / f"device{len(devices)}.sock"
        started, ended, scope = anyio.Event(), anyio.Event(), anyio.CancelScope()
        own_quotas = msgspec.structs.replace(SHARED_QUOTAS, **quotas)

        async def run() -> None:
            with scope:
                await listen(
                    own,
                    path,
                    quotas=own_quotas,
                    limits=limits,
                    idle_s=idle_s,
                    started=started,
                    descriptors_max=descriptors_max,
                )
            ended.set()

        background.tasks.start_soon(run)
        await started.wait()
        scopes.append(scope)
        over.append(ended)
        return Served(own, path, background)

    yield make
    for scope, ended in zip(scopes, over, strict=True):
        scope.cancel()
        await ended.wait()
    for device in devices:
        await device.aclose()


@pytest.fixture
async def served(serving: ServedMaker) -> Any:
    return await serving()


@pytest.fixture
def small() -> Any:
    class Small:
        sum_model = staticmethod(sum_model)
        Sum = Sum

    return Small


@contextlib.asynccontextmanager
async def closing(device: RemoteDevice) -> AsyncIterator[RemoteDevice]:
    try:
        yield device
    finally:
        await device.aclose()

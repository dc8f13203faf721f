"""A node behind a proxy that cuts, delays, reorders, flips and replays bytes: results are right, or there is an error in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing

import anyio
import anyio.to_thread
import pytest

from aionn.errors import DeadObject, DeviceUnavailable, Error, MissedDeadline
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from tests.aionn.fleet.conftest import START_S_MAX, Served, serving
from tests.aionn.fleet.test_hostile_connections import Raw
from tests.aionn.fleet.test_tls import CLIENT, NODE, pin_of
from tests.aionn.service.sums import Sum, sum_model

pytestmark = pytest.mark.forked("any")

UP, DOWN = "to the node", "to the client"

Mangle = Callable[[str, bytes], list[bytes | None]]
"""Gets a direction and the bytes that came; returns those that go on, None where the connection is cut."""


class Proxy:
    """Passes connections on, and changes what goes through.

    Attributes:
        mangle: Changes bytes; None passes all on.
        delay_s: Each piece waits for so long.
        sent: All bytes that clients have sent, by connection.
    """

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tls://").rsplit(":", 1)
        self._to = host, int(port)
        self.mangle: Mangle | None = None
        self.delay_s = 0.0
        self.sent: list[bytearray] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            there, back = await asyncio.open_connection(*self._to)
            with closing(back):
                self.sent.append(bytearray())
                ways = [
                    asyncio.ensure_future(self._pass(UP, reader, back, self.sent[-1])),
                    asyncio.ensure_future(self._pass(DOWN, there, writer, None)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.wait(ways)

    async def _pass(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None
    ) -> None:
        while data := await self._read(reader):
            if kept is not None:
                kept += data
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            pieces = [data] if self.mangle is None else self.mangle(way, data)
            for piece in pieces:
                if piece is None:
                    await writer.drain()
                    return
                writer.write(piece)

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(1 << 16)
        except OSError:
            return b""  # It was reset.


@asynccontextmanager
async def proxy_to(address: str) -> AsyncIterator[Proxy]:
    proxy, tasks = Proxy(address), set[asyncio.Task[None]]()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(proxy.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@asynccontextmanager
async def behind(
    served: Served, options: str = "?silence_ms=30000"
) -> AsyncIterator[tuple[Proxy, NodeDevice]]:
    """A client of a node behind a proxy."""
    async with proxy_to(served.address) as proxy:
        scheme = "tls://" if served.address.startswith("tls://") else ""
        device = NodeDevice(parse_node(f"{scheme}127.0.0.1:{proxy.port}{options}"))
        try:
            with anyio.fail_after(START_S_MAX):
                yield proxy, device
        finally:
            await device.aclose()


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Served]:
    with serving("--tls-certificate", NODE, "--tls-clients", CLIENT) as served:
        yield served


MUTUAL = f"?silence_ms=30000&certificate={CLIENT}&pin={pin_of(NODE)}"


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("left", [0, 7, 40])
async def test_connection_that_is_cut_in_a_frame_is_an_error_and_the_node_is_reached_again(
    served: Served, way: str, left: int
) -> None:
    async with behind(served) as (proxy, device):
        prepared = await device.prepare_model(sum_model())
        await prepared.execute_synchronously(Sum().request)
        proxy.mangle = lambda direction, data: (
            [data[:left], None] if direction == way and len(data) > 40 else [data]
        )
        with pytest.raises(DeadObject):
            await prepared.execute_synchronously(Sum().request)
        proxy.mangle = None
        again, frame = await device.prepare_model(sum_model()), Sum()
        await again.execute_synchronously(frame.request)
        assert frame.is_right


async def test_delay_is_no_loss_and_the_caller_is_notified_at_the_deadline(served: Served) -> None:
    async with behind(served) as (proxy, device):
        prepared = await device.prepare_model(sum_model())
        await prepared.execute_synchronously(Sum().request)
        proxy.delay_s, frame = 0.1, Sum()
        await prepared.execute_synchronously(frame.request)
        assert frame.is_right
        begun_s = anyio.current_time()
        with pytest.raises(MissedDeadline):
            await prepared.execute_synchronously(
                Sum().request,
                deadline_ns=device.now() + 50_000_000,  # Before the request has arrived.
            )
        assert anyio.current_time() - begun_s >= 0.05
        proxy.delay_s, frame = 0.0, Sum()
        await prepared.execute_synchronously(frame.request)
        assert frame.is_right, "the late result was discarded"


def _flip(rng: random.Random, data: bytes) -> list[bytes | None]:
    place = rng.randrange(len(data))
    return [data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]]


def _swap(rng: random.Random, data: bytes) -> list[bytes | None]:
    place = rng.randrange(1, len(data)) if len(data) > 1 else 0
    return [data[place:], data[:place]]


def _replay(rng: random.Random, data: bytes) -> list[bytes | None]:
    return [data, data]


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("damage", [_flip, _swap, _replay])
async def test_with_encryption_every_damage_ends_the_connection(
    encrypted: Served, way: str, damage: Callable[[random.Random, bytes], list[bytes | None]]
) -> None:
    rng = random.Random(f"{way} {damage.__name__}")
    async with behind(encrypted, MUTUAL) as (proxy, device):
        for _ in range(5):
            proxy.mangle = None
            prepared, frame = await device.prepare_model(sum_model()), Sum()
            await prepared.execute_synchronously(frame.request)
            assert frame.is_right
            proxy.mangle = lambda direction, data: damage(rng, data) if direction == way else [data]
            frame = Sum()
            try:
                with anyio.fail_after(5):
                    await prepared.execute_synchronously(frame.request)
            except (Error, TimeoutError) as e:
                assert not isinstance(e, TimeoutError), "a damaged record ends the connection"
            else:
                assert frame.is_right and damage is _replay, "the copy came after the answer"


async def test_recorded_connections_have_no_effect_once_their_client_has_left(served: Served) -> None:
    async with behind(served) as (proxy, device):
        prepared = await device.prepare_model(sum_model())
        await prepared.execute_synchronously(Sum().request)
    control, data = (bytes(sent) for sent in proxy.sent)

    def replayed(recorded: bytes) -> str:
        raw = Raw(served.address)
        try:
            raw.send(recorded)
            return raw.words()
        finally:
            raw.sock.close()

    told = await anyio.to_thread.run_sync(replayed, data)
    # The node may be freeing what the client had.
    assert "a client that is not connected" in told or "there is no prepared model" in told
    told = await anyio.to_thread.run_sync(replayed, control)
    assert "expected nothing before the greeting was answered" in told, (
        "the calls were made for another greeting"
    )


async def test_proxy_that_forwards_nothing_is_an_unavailable_device_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.fleet.control.GREET_S_MAX", 0.2)
    async with behind(served) as (proxy, device):
        proxy.mangle = lambda direction, data: []
        with pytest.raises(DeviceUnavailable, match="did not greet"):
            await device.connect()

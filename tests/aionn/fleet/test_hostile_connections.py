"""Connections that mean harm: each gets its words or its end, and the node serves others meanwhile."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.abc
import pytest

from aionn.errors import DeviceUnavailable
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.fleet.framing import PRELUDE, frame_lengths
from aionn.fleet.messages import (
    Argument,
    Carried,
    Hello,
    Layout,
    Probe,
    Refused,
    Submit,
    Welcome,
    decode_from_node,
    framed,
)
from aionn.fleet.node.server import Node
from aionn.fleet.node.session import DATA_CONNECTIONS_MAX
from aionn.hal import Device
from aionn.service.host.admission import ClientLimits, NoPlace
from aionn.service.wire.protocol import Call, Ping, Reply, encode
from tests.aionn.fleet.conftest import Served
from tests.aionn.service.sums import Sum, sum_model

pytestmark = pytest.mark.forked("any")

ANSWER_S_MAX = 30.0


class Raw:
    """A client that says what it likes."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.sock = socket.create_connection((host, int(port)), ANSWER_S_MAX)
        self.sock.settimeout(ANSWER_S_MAX)
        self.data = b""

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError:
            pass  # It has ended already: what it said is read below.

    def rest(self) -> bytes:
        """All that comes until the node ends the connection."""
        while True:
            try:
                got = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return self.data
            if not got:
                return self.data
            self.data += got

    def message(self) -> object:
        """The next message."""
        self.data = self.data.removeprefix(PRELUDE)
        while len(self.data) < 16 or len(self.data) < 16 + struct.unpack(">4sIQ", self.data[:16])[1]:
            got = self.sock.recv(1 << 16)
            assert got, self.data
            self.data = (self.data + got).removeprefix(PRELUDE)
        _, head_bytes, body_bytes = struct.unpack(">4sIQ", self.data[:16])
        assert not body_bytes
        head, self.data = self.data[16 : 16 + head_bytes], self.data[16 + head_bytes :]
        return decode_from_node(head)

    def words(self) -> str:
        """Why the node ended the connection."""
        self.rest()
        while True:
            message = self.message()
            if isinstance(message, Refused):
                return message.why

    def hello(self) -> Welcome:
        self.send(PRELUDE + framed(Hello("control", 0)))
        message = self.message()
        assert isinstance(message, Welcome)
        return message


@pytest.fixture
def raw(served: Served) -> Iterator[Raw]:
    client = Raw(served.address)
    yield client
    client.sock.close()


@contextmanager
def another(served: Served) -> Iterator[Raw]:
    client = Raw(served.address)
    try:
        yield client
    finally:
        client.sock.close()


def carried(payload: bytes, parts: tuple[int, ...] = (), body: bytes = b"") -> bytes:
    return framed(Carried(payload, parts), sum(parts)) + body


async def serves(served: Served) -> None:
    """Another client is served."""
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    prepared = await device.prepare_model(sum_model())
    frame = Sum()
    await prepared.execute_synchronously(frame.request)
    await device.aclose()
    assert frame.is_right


def test_http_gets_an_answer_in_http(raw: Raw) -> None:
    raw.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = raw.rest().removeprefix(PRELUDE)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"does not speak HTTP" in answer


def test_other_protocol_is_ended(raw: Raw) -> None:
    raw.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
    assert raw.rest() in (b"", PRELUDE)


def test_other_version_is_told(raw: Raw) -> None:
    raw.send(PRELUDE[:-1] + b"\x07" + framed(Hello("control", 0)))
    assert "speaks version 7 of the protocol" in raw.words()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame_lengths(1 << 30, 0), "expected a head of at most"),
        (frame_lengths(10, 1 << 40), "expected a body of at most"),
        (b"garbage, sixteen bytes of it", "the stream is damaged"),
        (frame_lengths(3, 0) + b"\xc1\xc1\xc1", "cannot be read"),
        (framed(Probe(1)), "expected a greeting, got Probe"),
        (framed(Submit(1, 1, 1)), "expected a greeting, got Submit"),
        (framed(Hello("data", 0, b"x" * 16, 1)), "a client that is not connected"),
    ],
)
def test_first_frame_that_is_no_greeting_is_refused_in_words(raw: Raw, data: bytes, words: str) -> None:
    raw.send(PRELUDE + data)
    assert words in raw.words()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (framed(Hello("control", 0)), "does not belong to the control connection"),
        (framed(Submit(1, 1, 1)), "does not belong to the control connection"),
        (frame_lengths(1 << 30, 0), "expected a head of at most"),
        (frame_lengths(10, (1 << 30) + 1), "expected a body of at most"),
        (framed(Carried(b"x", (1 << 40,)), 5), "expected up to 241 contents of 5 bytes"),
        (framed(Carried(b"x", (0,)), 0), "expected up to 241 contents"),
        (framed(Carried(b"x", (1,) * 300), 300), "expected up to 241 contents"),
        (framed(Probe(1), 5), "expected Probe without a body"),
        (carried(b"\xc1"), "message: "),
        (carried(encode(Reply(1, __import__("aionn").service.wire.protocol.Done()))[0]), "expected a call"),
    ],
)
def test_message_out_of_place_ends_the_connection_with_words(raw: Raw, data: bytes, words: str) -> None:
    raw.hello()
    raw.send(data)
    assert words in raw.words()


def test_call_that_no_network_has_fails_and_the_connection_lives(raw: Raw) -> None:
    raw.hello()
    from aionn.service.wire.handles import RequestOnWire
    from aionn.service.wire.protocol import Execute, Failed, decode

    raw.send(carried(encode(Call(1, Execute(1, RequestOnWire((), (), ()), False, None, None)))[0]))
    message = raw.message()
    assert isinstance(message, Carried)
    reply = decode(message.payload, [])
    assert isinstance(reply, Reply) and isinstance(reply.body, Failed)
    assert "Execute is not served over a network" in reply.body.message
    raw.send(carried(encode(Call(2, Ping()))[0]))
    assert isinstance(raw.message(), Carried)


async def test_data_connection_that_breaks_its_rules_is_ended_with_words(served: Served) -> None:
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    prepared = await device.prepare_model(sum_model())
    link, handle = prepared._control, prepared._handle
    hello = Hello("data", 0, link.welcome.secret, handle)
    layout = Layout((Argument(16, (4,)), Argument(16, (4,))), (Argument(16, (4,)),))
    generation = link.welcome.generation

    def talk(*data: bytes) -> str:
        with another(served) as raw:
            raw.send(PRELUDE + framed(hello))
            assert isinstance(raw.message(), Welcome)
            for piece in data:
                raw.send(piece)
                if piece[16:].startswith(b"\x83") or b"Layout" in piece:
                    raw.message()
            return raw.words()

    for data, words in (
        ((framed(Submit(1, generation, 1), 32) + bytes(32),), "before its layout"),
        ((framed(layout), framed(Submit(1, 77, 1), 32)), "another connection"),
        ((framed(layout), framed(Submit(1, generation, 1), 33)), "expected inputs of 32 bytes"),
        ((framed(layout), framed(Submit(1, generation, 1), 1 << 50)), "expected a body of at most"),
        ((framed(Probe(1)),), "does not belong to a data connection"),
    ):
        told = await anyio.to_thread.run_sync(talk, *data)
        assert words in told, (words, told)
    frame = Sum()
    await prepared.execute_synchronously(frame.request)
    assert frame.is_right
    await device.aclose()


async def test_layout_beyond_the_limits_is_refused_and_costs_nothing(served: Served) -> None:
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    prepared = await device.prepare_model(sum_model())
    hello = Hello("data", 0, prepared._control.welcome.secret, prepared._handle)

    def ask(layout: Layout) -> str:
        with another(served) as raw:
            raw.send(PRELUDE + framed(hello))
            assert isinstance(raw.message(), Welcome)
            raw.send(framed(layout))
            return raw.message().message  # type: ignore[attr-defined, no-any-return]

    huge = Layout((Argument(1 << 40, ()),), ())
    assert "at most" in await anyio.to_thread.run_sync(ask, huge)
    many = Layout(tuple(Argument(0, ()) for _ in range(2049)), ())
    assert "2048 arguments" in await anyio.to_thread.run_sync(ask, many)
    assert "with their sizes" in await anyio.to_thread.run_sync(ask, Layout((Argument(-1, ()),), ()))
    await device.aclose()


async def test_data_connections_of_one_client_are_bounded(served: Served) -> None:
    device = NodeDevice(parse_node(f"{served.address}?silence_ms=30000"))
    prepared = await device.prepare_model(sum_model())
    hello = Hello("data", 0, prepared._control.welcome.secret, prepared._handle)

    def open_all() -> list[object]:
        answers, open_ones = [], []
        for _ in range(DATA_CONNECTIONS_MAX + 2):
            raw = Raw(served.address)
            open_ones.append(raw)
            raw.send(PRELUDE + framed(hello))
            answers.append(raw.message())
        for raw in open_ones:
            raw.sock.close()
        return answers

    answers = await anyio.to_thread.run_sync(open_all)
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert len(refused) == 2 and "at most 32 of one client" in refused[0].why
    await device.aclose()


async def test_half_open_connections_exclude_nobody(served: Served) -> None:
    """More silent connections than the node serves from one address: each new one displaces the oldest of them."""
    silent = [socket.create_connection(served.address.rsplit(":", 1)) for _ in range(150)]  # type: ignore[arg-type]
    for sock in silent[::2]:
        sock.send(PRELUDE[:5])
    try:
        with anyio.fail_after(ANSWER_S_MAX):
            await serves(served)
    finally:
        for sock in silent:
            sock.close()


async def test_client_of_tls_is_told_that_there_is_none(served: Served) -> None:
    device = NodeDevice(parse_node(f"tls://{served.address}"))
    with pytest.raises(DeviceUnavailable, match=r"no TLS connection|cannot be reached"):
        await device.connect()
    await device.aclose()


async def test_server_of_another_protocol_is_named() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    device = NodeDevice(parse_node(f"127.0.0.1:{port}"))
    with pytest.raises(DeviceUnavailable, match="an HTTP server answered"):
        await device.connect()
    await device.aclose()
    server.close()
    await server.wait_closed()


async def test_addresses_without_connections_are_forgotten() -> None:
    async with anyio.create_task_group() as tasks:
        node = Node("a", no_device, tasks, limits=ClientLimits(clients=8, clients_per_user=2))
        kept = node._admit("127.0.0.1")
        for number in range(1000):
            node.left(node._admit(f"127.1.{number // 256}.{number % 256}"))
        assert list(node._addresses) == ["127.0.0.1"], "one that stays does not keep the others"
        second = node._admit("127.0.0.1")
        kept.has_sent = second.has_sent = lambda: True
        with pytest.raises(NoPlace):
            node._admit("127.0.0.1")
        node.left(kept)
        node.left(node._admit("127.0.0.1"))
        node.left(second)
        assert not node._addresses


async def no_device(tasks: anyio.abc.TaskGroup) -> Device:
    raise AssertionError("no client has greeted")

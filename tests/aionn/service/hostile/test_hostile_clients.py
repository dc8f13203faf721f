"""Clients that say what is no message, send too much, or read nothing: their connection ends, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from aionn.errors import (
    InvalidArgument,
    ResourceExhausted,
)
from aionn.hal import BufferDesc, BufferRole, Memory
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.protocol import (
    Allocate,
    Call,
    CopyTo,
    EndBurst,
    Execute,
    Failed,
    FreeBuffer,
    FreeMemorySlot,
    FreePreparedModel,
    GetExecutionInfo,
    GetStatus,
    Hello,
    Ping,
    StatusReply,
    encode,
)

IN = [BufferRole(0, 0)]


async def other_client_works(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    await prepared.execute_synchronously(work.request)
    assert work.is_right
    await client.aclose()


@pytest.mark.parametrize(
    "datagram",
    [
        b"\xc1",
        b"garbage",
        b"\x80",
        b"\x93\x01\x02\x03",
        b"\x83\xa4type\xa4Call\xa2id\x01\xa4body\xc0",
        b"\x83\xa4type\xa4Call\xa2id\x01\xa4body\x81\xa4type\xa5Steal",
        b"\x92\xa9_InMemory\x10",
        b"\x92\xa9_InMemory\xce\xff\xff\xff\xff",
        b"\x92\xa9_InMemory\x00",
        b"\x91" * 30000,
        bytes(100_000),
    ],
)
async def test_garbage_ends_its_connection_alone(served: Any, small: Any, datagram: bytes) -> None:
    raw = await served.raw().hello()
    raw.sock.send(datagram)
    assert await raw.receive() == b""
    raw.close()
    await other_client_works(served, small)


async def test_wrong_version_and_missing_hello_are_refused(served: Any, small: Any) -> None:
    raw = served.raw()
    reply = await raw.ask(1, GetStatus())
    assert isinstance(reply, Failed) and "expected Hello first" in reply.message
    reply = await raw.ask(2, Hello(99))
    assert isinstance(reply, Failed) and "protocol version" in reply.message
    reply = await raw.ask(3, GetStatus())
    assert isinstance(reply, Failed)
    raw.close()


async def test_wrong_handles_are_refused(served: Any, small: Any) -> None:
    raw = await served.raw().hello()
    request = RequestOnWire.of(small.Sum().request)
    number = 10
    for handle in (0, -1, 1, 2**40):
        for body in (
            Execute(handle, request, False, None, None),
            GetExecutionInfo(handle, True),
            FreeMemorySlot(handle, 0),
            CopyTo(handle, Memory.create(8)),
            Allocate(BufferDesc(), (handle,), tuple(IN), ()),
        ):
            number += 1
            reply = await raw.ask(number, body)
            assert isinstance(reply, Failed) and reply.status == InvalidArgument.status
        for body in (FreePreparedModel(handle), FreeBuffer(handle), EndBurst(handle)):
            number += 1
            assert not isinstance(await raw.ask(number, body), Failed)  # Freeing what is free is no error.
    assert isinstance(await raw.ask(5000, GetStatus()), StatusReply)
    raw.close()


async def test_control_message_that_is_cut_off_ends_the_connection(served: Any, small: Any) -> None:
    raw = await served.raw().hello()
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("cut off")
    socket.send_fds(raw.sock, [b"\x80"], [fd] * 253)
    os.close(fd)
    assert await raw.receive() == b""
    await until_no_more_than(before)
    raw.close()
    await other_client_works(served, small)


async def until_no_more_than(count: int) -> None:
    """A thread closes what can take long."""
    with anyio.fail_after(10):
        while len(os.listdir("/proc/self/fd")) > count:
            await anyio.sleep(0.001)


async def test_descriptors_that_no_message_speaks_of_end_the_connection_and_are_closed(
    served: Any, small: Any
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for fd in (os.memfd_create("unnamed"), os.eventfd(0), os.open("/dev/null", os.O_RDONLY)):
        raw = await served.raw().hello()
        socket.send_fds(raw.sock, [encode(Call(3, Ping()))[0]], [fd] * 100)
        os.close(fd)
        assert await raw.receive() == b""
        raw.close()
    await until_no_more_than(before)
    await other_client_works(served, small)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open none until the end; those that are open stay so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        with pytest.raises(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_descriptor_limit_is_a_clean_error_and_passes(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    works = [small.Sum() for _ in range(3)]
    with no_descriptor_left():
        for work in works[:2]:
            with pytest.raises(ResourceExhausted, match="descriptor"):
                await prepared.execute_synchronously(work.request)
        with pytest.raises(ResourceExhausted):
            await prepared.configure_execution_burst()
    await prepared.execute_synchronously(works[2].request)
    assert works[2].is_right
    await client.aclose()


async def test_client_that_comes_while_no_descriptor_is_left_is_served_later(served: Any, small: Any) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with no_descriptor_left():
        sock.connect(str(served.path))
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
    raw = await served.speaking(sock).hello()
    raw.close()
    await other_client_works(served, small)


async def test_client_that_reads_no_answers_holds_nobody_up(served: Any, small: Any) -> None:
    raw = await served.raw().hello()
    payload = encode(Call(7, GetStatus()))[0]
    raw.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        for _ in range(1_000_000):
            raw.sock.send(payload)
            if _ % 100 == 0:
                await anyio.lowlevel.checkpoint()
    await other_client_works(served, small)
    raw.close()


@pytest.mark.thorough
async def test_many_connections_leave_nothing(served: Any, small: Any) -> None:
    raw = await served.raw().hello()
    raw.close()
    for _ in range(200):
        raw = await served.raw().hello()
        raw.close()
    await other_client_works(served, small)  # What is left behind is found when the test is over.

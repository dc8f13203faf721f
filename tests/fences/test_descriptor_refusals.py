"""The descriptor form: what is refused, and what a holder of it can do to the others."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct

import pytest

from fences import (
    FenceError,
    FenceStatus,
    NotAFenceError,
    SyncFence,
)
from fences.descriptor import NAME_PREFIX
from fences.state import RECORD_BYTES_MAX, TEXT_CHARACTERS_MAX, TIME_NS_MAX, Failure, decode, encode

HEAD = struct.Struct("<BBQ")

SO_PEEK_OFF = 42
"""Of Linux; the socket module does not name it."""


def readable(fd, timeout_s=0):
    return bool(select.select([fd], [], [], timeout_s)[0])


def foreign_descriptors(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    left, right = socket.socketpair()
    packets, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reading, writing = os.pipe()
    numbers = {
        "file": os.open(path, os.O_RDONLY),
        "directory": os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY),
        "eventfd": os.eventfd(1),
        "memfd": os.memfd_create("x"),
        "pipe": reading,
        "device": os.open("/dev/null", os.O_RDONLY),
        "epoll": select.epoll(),
        "stream socket": left,
        "packet socket": packets,
        "internet socket": tcp,
    }
    return numbers, [right, other, writing]


def test_descriptor_that_is_no_fence_is_refused(tmp_path):
    numbers, others = foreign_descriptors(tmp_path)
    before = sorted(os.listdir("/proc/self/fd"))
    for what, holder in numbers.items():
        number = holder if isinstance(holder, int) else holder.fileno()
        with pytest.raises(NotAFenceError) as caught:
            SyncFence.from_fd(number)
        assert str(number) in str(caught.value), what
    assert sorted(os.listdir("/proc/self/fd")) == before
    for holder in [*numbers.values(), *others]:
        os.close(holder) if isinstance(holder, int) else holder.close()


def test_closed_negative_and_mistyped_descriptors_are_refused():
    number = os.dup(0)
    os.close(number)
    with pytest.raises(OSError) as caught:
        SyncFence.from_fd(number)
    assert caught.value.errno == 9
    for impossible in (-1, 1 << 31, 1 << 70):
        with pytest.raises(NotAFenceError, match=f"expected a number from 0 to 2147483647, got {impossible}"):
            SyncFence.from_fd(impossible)
    for wrong in ("3", 3.0, True, None):
        with pytest.raises(TypeError):
            SyncFence.from_fd(wrong)


def test_importer_cannot_write_to_the_exporter():
    with SyncFence() as fence:
        with socket.socket(fileno=fence.duplicate()) as importing, pytest.raises(BrokenPipeError):
            importing.send(b"x")
        assert fence.status is FenceStatus.PENDING


def hand_made(*packets):
    """A descriptor as a hostile exporter makes it: the right name, any content."""
    importing, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    importing.bind(NAME_PREFIX + os.urandom(8).hex().encode())
    for packet in packets:
        sending.send(packet)
    sending.close()
    return importing


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        HEAD.pack(1, 1, 5)[:-1],
        HEAD.pack(1, 1, 5) + b"\x00",
        HEAD.pack(1, 2, 5) + b"\x00" * RECORD_BYTES_MAX,
        HEAD.pack(2, 1, 5),
        HEAD.pack(1, 3, 5),
        HEAD.pack(1, 1, 2**63),
        HEAD.pack(1, 2, 2**64 - 1) + b"\x93\xa0\xa0\xa0",
        HEAD.pack(1, 0, 0),
        HEAD.pack(1, 2, 5) + b"\x92\xa0\xa0",
        HEAD.pack(1, 2, 5) + b"\x93\xa0\xa0\x05",
        HEAD.pack(1, 2, 5) + b"\x93\xa0\xa0\xa4\xff\xff\xff\xff",
        HEAD.pack(1, 2, 5) + b"\xdd\xff\xff\xff\xff",
    ],
    ids=repr,
)
def test_malformed_record_reads_as_a_failure(packet):
    with hand_made(packet) as importing:
        fence = SyncFence.from_fd(importing.fileno())
        assert fence.status is FenceStatus.FAILED
        fence.close()


READINGS = pytest.mark.parametrize("reads_record", [True, False], ids=["read", "not_read"])


@pytest.mark.parametrize(
    ("packets", "status"),
    [
        ([], FenceStatus.FAILED),
        ([b""], FenceStatus.FAILED),
        ([HEAD.pack(1, 1, 5)], FenceStatus.SIGNALLED),
        ([HEAD.pack(1, 1, 5) + b"\0"], FenceStatus.FAILED),
        ([HEAD.pack(1, 1, 5)] * 2, FenceStatus.FAILED),
        ([HEAD.pack(1, 2, 5) + b"\x93\xa0\xa0\xa0"], FenceStatus.FAILED),
    ],
)
def test_record_that_is_not_read_decides_by_its_size(packets, status, monkeypatch):
    """The kernel copies a packet under a lock of the socket, which another holder can keep as long as it likes."""
    with hand_made(*packets) as importing:
        fence = SyncFence.from_fd(importing.fileno(), reads_record=False)
        for name in ("recv", "recv_into", "recvfrom", "recvmsg"):
            monkeypatch.setattr(socket.socket, name, None)
        assert fence.status is status
        fence.close()


@READINGS
@pytest.mark.parametrize("end", ["signal", "fail", "close"])
async def test_holder_that_moves_the_start_of_peeking_stops_no_importer(end, reads_record):
    """SO_PEEK_OFF belongs to the socket: past the packet, it is readable without end, and no look at it gives anything."""
    fence = SyncFence()
    imported = SyncFence.from_fd(fence.fileno(), reads_record=reads_record)
    with socket.socket(fileno=fence.duplicate()) as vandal:
        vandal.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 1000)
        assert imported.status is FenceStatus.PENDING

        async def wait():
            await imported

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        if end == "signal":
            fence.signal()
        elif end == "fail":
            fence.fail(ValueError("it broke"))
        else:
            fence.close()
        async with asyncio.timeout(20):
            if end == "signal":
                await waiting
            else:
                with pytest.raises(FenceError):
                    await waiting
        with hand_made(b"") as empty:
            empty.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 1000)
            other = SyncFence.from_fd(empty.fileno(), reads_record=reads_record)
            assert other.status is FenceStatus.FAILED
            other.close()
    imported.close()
    fence.close()


def test_record_taken_away_by_another_holder_reads_as_a_failure_never_as_a_signal():
    fence = SyncFence()
    imported = SyncFence.from_fd(fence.fileno())
    with socket.socket(fileno=fence.duplicate()) as thief:
        fence.signal()
        thief.recv(RECORD_BYTES_MAX)
    assert imported.status is FenceStatus.FAILED
    assert fence.status is FenceStatus.SIGNALLED
    fence.close()


def test_descriptor_shut_down_by_another_holder_reads_as_a_failure():
    fence = SyncFence()
    imported = SyncFence.from_fd(fence.fileno())
    with socket.socket(fileno=fence.duplicate()) as vandal:
        vandal.shutdown(socket.SHUT_RD)
    assert imported.status is FenceStatus.FAILED
    fence.signal()  # The exporter is not disturbed by the broken pipe.
    fence.close()


def test_descriptor_closed_behind_our_back_fails_the_imported_fence():
    with SyncFence() as fence:
        imported = SyncFence.from_fd(fence.fileno())
        os.close(imported.fileno())
        assert "Bad file descriptor" in imported.error.message
        imported.close()


def test_records_survive_their_encoding():
    for outcome in (None, 0, TIME_NS_MAX):
        assert decode(encode(outcome)) == outcome
    failure = decode(encode(Failure("o" * 5000, ValueError("m" * 5000), 7)))
    assert (failure.at_ns, len(failure.origin), failure.cause.type_name) == (
        7,
        TEXT_CHARACTERS_MAX,
        "ValueError",
    )

"""Fences over Unix sockets, honest and hostile peers."""

from __future__ import annotations

import array
import os
import socket
import struct
from contextlib import contextmanager

import pytest

import fences
from fences import FenceStatus, ForeignFenceError, NotAFenceError, SyncFence, recv_fence, send_fence
from fences.clock import TIME_NS_MAX
from fences.state import PENDING_STATE, encode

KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM]


@contextmanager
def pair(kind=socket.SOCK_STREAM):
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    with left, right:
        yield left, right


def rights(*numbers):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]


def message(record):
    return struct.pack("<I", len(record)) + record


@pytest.mark.parametrize("kind", KINDS)
def test_fences_in_every_state_cross_in_order(kind):
    with pair(kind) as (left, right):
        done, bad, later = SyncFence.signalled(5), SyncFence("bad"), SyncFence("later")
        bad.fail(OSError("x"))
        for fence in (done, later, bad):
            send_fence(left, fence)
        received = [recv_fence(right, "mine") for _ in range(3)]
        assert [fence.status for fence in received] == [
            FenceStatus.SIGNALLED,
            FenceStatus.PENDING,
            FenceStatus.FAILED,
        ]
        assert received[0].signal_time_ns == 5 and received[2].error.origin == "bad"
        assert received[1].name == "mine"
        later.signal(9)
        assert received[1].signal_time_ns == 9


def test_finished_fence_crosses_without_a_descriptor():
    state, number = SyncFence.signalled(5).export()
    assert number is None
    assert SyncFence.from_state(state, None).signal_time_ns == 5


@pytest.mark.parametrize("at_ns", [0, TIME_NS_MAX])
def test_first_and_last_moment_cross(at_ns):
    with pair() as (left, right):
        send_fence(left, SyncFence.signalled(at_ns))
        assert recv_fence(right).signal_time_ns == at_ns


def test_export_carries_a_pending_fence_in_another_protocol():
    fence = SyncFence()
    state, number = fence.export()
    imported = SyncFence.from_state(state, number)
    os.close(number)
    fence.signal(6)
    assert imported.signal_time_ns == 6


def test_pending_record_without_a_descriptor_is_refused():
    with pytest.raises(NotAFenceError, match="no descriptor"):
        SyncFence.from_state(PENDING_STATE, None)


def test_imported_fence_can_be_passed_on():
    fence = SyncFence("origin")
    with pair() as (left, right):
        send_fence(left, fence)
        middle = recv_fence(right)
        send_fence(left, middle)
        last = recv_fence(right)
        with pytest.raises(ForeignFenceError):
            last.signal()
        fence.fail("x")
        assert last.error.origin == middle.error.origin == "origin"


def test_same_fence_can_be_sent_to_many():
    fence = SyncFence()
    with pair() as (left, right):
        received = []
        for _ in range(10):
            send_fence(left, fence)
            received.append(recv_fence(right))
        fence.signal()
        assert {each.status for each in received} == {FenceStatus.SIGNALLED}


@pytest.mark.parametrize("kind", KINDS)
def test_non_blocking_sockets_raise_instead_of_waiting(kind):
    with pair(kind) as (left, right):
        left.setblocking(False)
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            recv_fence(right)
        count = 0
        done = SyncFence.signalled(5)
        with pytest.raises(BlockingIOError):
            while True:
                send_fence(left, done)
                count += 1
        for _ in range(count):
            assert recv_fence(right).signal_time_ns == 5
        with pytest.raises(BlockingIOError):
            recv_fence(right)


def test_end_of_the_connection_is_told():
    with pair() as (left, right):
        left.close()
        with pytest.raises(EOFError):
            recv_fence(right)
    with pair() as (left, right):
        left.send(struct.pack("<I", 10) + b"abc")
        left.close()
        with pytest.raises(EOFError, match="middle"):
            recv_fence(right)
    with pair() as (left, right):
        right.close()
        fence = SyncFence()
        with pytest.raises(BrokenPipeError):
            send_fence(left, fence)
        fence.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        struct.pack("<I", 0),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 4097) + b"x" * 4097,
        message(b"\xff" * 8),
        message(struct.pack("<BBQ", 7, 1, 5)),
        message(struct.pack("<BBQ", 1, 9, 5)),
        message(struct.pack("<BBQ", 1, 1, 2**63)),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_hostile_messages_are_refused_and_their_descriptors_closed(kind, data):
    with pair(kind) as (left, right):
        right.setblocking(False)
        number = os.eventfd(0)
        before = sorted(os.listdir("/proc/self/fd"))
        left.sendmsg([data], rights(number))
        with pytest.raises(NotAFenceError):
            recv_fence(right)
        assert sorted(os.listdir("/proc/self/fd")) == before
        os.close(number)


def test_wrong_and_too_many_descriptors_are_refused_and_closed():
    with SyncFence() as fence, pair(socket.SOCK_SEQPACKET) as (left, right):
        eventfd = os.eventfd(0)
        good = fence.fileno()
        before = sorted(os.listdir("/proc/self/fd"))
        for numbers in ([eventfd], [good, good], [good] * 8, [good] * 30):
            left.sendmsg([message(encode(None))], rights(*numbers))
            with pytest.raises(NotAFenceError):
                recv_fence(right)
            assert sorted(os.listdir("/proc/self/fd")) == before
        os.close(eventfd)


@pytest.mark.parametrize("kind", KINDS)
def test_other_ancillary_data_beside_a_fence_is_no_descriptor(kind):
    with SyncFence() as fence, pair(kind) as (left, right):
        right.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        fence.fileno()
        before = sorted(os.listdir("/proc/self/fd"))
        send_fence(left, fence)
        recv_fence(right).close()
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_received_descriptors_are_close_on_exec():
    import fcntl

    with SyncFence() as fence, pair() as (left, right):
        send_fence(left, fence)
        with recv_fence(right) as received:
            assert fcntl.fcntl(received.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_public_names_are_those_of_the_package():
    for name in fences.__all__:
        assert getattr(fences, name) is not None

"""The original's client and service tests, with a second process that holds the other endpoint.

The client here is the test; `peer.ask` is the service. Elements are 32-bit numbers, as there.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fmq
from fmq.region import create_memory

pytestmark = pytest.mark.forked("any")

Make = Callable[..., fmq.MessageQueue]
SYNC_COUNT = 1024
UNSYNC_COUNT = 2048
SECOND_NS = 1_000_000_000


def pattern(count: int, start: int = 0) -> bytes:
    return b"".join((start + i).to_bytes(4, "little") for i in range(count))


@pytest.fixture(params=["one fd", "two fds"])
def sync(request: pytest.FixtureRequest, make: Make) -> fmq.MessageQueue:
    import os

    if request.param == "one fd":
        return make(4, SYNC_COUNT)
    fd = create_memory("ring", SYNC_COUNT * 4)
    try:
        return make(4, SYNC_COUNT, ring_fd=fd)
    finally:
        os.close(fd)


@pytest.fixture
def unsync(make: Make) -> fmq.MessageQueue:
    return make(4, UNSYNC_COUNT, flavour=fmq.Flavour.UNSYNCHRONIZED)


# SynchronizedReadWriteClient


def test_blocking_read_write1(sync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(sync)
    bits = "read_notification=1, write_notification=2"
    other.begin(f"len(queue.read_blocking(64, {5 * SECOND_NS}, {bits}))")
    long_form = {
        "read_notification": fmq.Notification.NOT_FULL,
        "write_notification": fmq.Notification.NOT_EMPTY,
    }
    assert sync.write_blocking(pattern(64), 5 * SECOND_NS, **long_form)
    assert sync.write_blocking(pattern(SYNC_COUNT), 5 * SECOND_NS, **long_form)
    assert other.finish() == 256


def test_blocking_read_write2(sync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(sync)
    other.begin("len(queue.read_blocking(64))")
    assert sync.write_blocking(pattern(64))
    assert sync.write_blocking(pattern(SYNC_COUNT), 5 * SECOND_NS)
    assert other.finish() == 256


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("reader_count", "repeats"), [(64, 1), (128, 2), (32, 3)])
def test_blocking_read_write_repeat(
    sync: fmq.MessageQueue, peer: Any, reader_count: int, repeats: int
) -> None:
    """BlockingReadWriteRepeat1 (as much a read as a write), 2 (reads twice as large), 3 (writes twice as large)."""
    other = peer(sync)
    times = 256 * 64 // reader_count
    other.begin(f"read_repeatedly(queue, {reader_count}, {times}, {5 * SECOND_NS})")
    for _ in range(256):
        assert sync.write_blocking(pattern(64), 5 * SECOND_NS)
    assert other.finish() == times
    assert sync.write_blocking(pattern(SYNC_COUNT), 5 * SECOND_NS)


def test_blocking_read_write_zero_messages(sync: fmq.MessageQueue) -> None:
    assert sync.write_blocking(b"")
    assert sync.read_blocking(0) == b""


def test_misaligned_write_counter(make: Make, peer: Any, counters: Any) -> None:
    queue = make(4, SYNC_COUNT)
    other = peer(queue)
    assert other.ask("queue.write_many(pattern(1))")
    transaction = queue.begin_read(1)
    assert transaction is not None
    offset = queue.descriptor.grantors[fmq.Grantor.WRITEPTR].offset
    counters(queue)[offset : offset + 8] = (SYNC_COUNT * 4 - 1).to_bytes(8, "little")
    queue.commit_read(1)
    for _ in range(2):  # unusable from then on
        with pytest.raises(RuntimeError, match="CorruptQueue"):
            other.ask("queue.write_many(pattern(1))")
    assert other.ask("queue.available_to_write()") == 0
    with pytest.raises(fmq.CorruptQueue, match="not a multiple of the quantum"):
        queue.read()


def test_misaligned_write_counter_client_side(make: Make, counters: Any) -> None:
    queue = make(4, SYNC_COUNT)
    assert queue.begin_write(1) is not None
    offset = queue.descriptor.grantors[fmq.Grantor.WRITEPTR].offset
    counters(queue)[offset : offset + 8] = (SYNC_COUNT * 4 - 1).to_bytes(8, "little")
    with pytest.raises(fmq.CorruptQueue):
        queue.commit_write(1)
    with pytest.raises(fmq.CorruptQueue):
        queue.write(bytes(4))
    assert queue.available_to_write() == 0


def test_small_input_reader_test1(sync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(sync).ask("queue.write_many(pattern(16))")
    assert sync.read_many(16) == pattern(16)


def test_small_input_reader_test2(sync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(sync).ask("queue.write_many(pattern(16))")
    transaction = sync.begin_read(16)
    assert transaction is not None
    assert b"".join(bytes(transaction.slot(i)) for i in range(16)) == pattern(16)
    sync.commit_read(16)


def test_small_input_writer_test1(sync: fmq.MessageQueue, peer: Any) -> None:
    before = sync.available_to_write()
    assert sync.write_many(pattern(16))
    assert peer(sync).ask("queue.read_many(16) == pattern(16)")
    assert sync.available_to_write() == before


def test_small_input_writer_test2(sync: fmq.MessageQueue, peer: Any) -> None:
    before = sync.available_to_write()
    transaction = sync.begin_write(16)
    assert transaction is not None
    transaction.copy_to(pattern(16))
    sync.commit_write(16)
    assert peer(sync).ask("queue.read_many(16) == pattern(16)")
    assert sync.available_to_write() == before


def test_read_when_empty(sync: fmq.MessageQueue) -> None:
    assert sync.available_to_read() == 0
    assert sync.read_many(2) is None


def test_write_when_full(sync: fmq.MessageQueue, peer: Any) -> None:
    assert sync.write_many(pattern(SYNC_COUNT))
    assert sync.available_to_write() == 0
    assert not sync.write(bytes(4))
    assert peer(sync).ask(f"queue.read_many({SYNC_COUNT}) == pattern({SYNC_COUNT})")


def test_large_input_test1(sync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(sync).ask(f"queue.write_many(pattern({SYNC_COUNT}))")
    assert sync.read_many(SYNC_COUNT) == pattern(SYNC_COUNT)


def test_large_input_test2(sync: fmq.MessageQueue, peer: Any) -> None:
    with pytest.raises(RuntimeError, match="InvalidArgument"):
        peer(sync).ask("queue.write_many(pattern(2048))")
    assert sync.available_to_read() == 0
    assert sync.read() is None


def test_large_input_test3(sync: fmq.MessageQueue, peer: Any) -> None:
    assert sync.write_many(pattern(SYNC_COUNT))
    assert sync.available_to_write() == 0
    assert not sync.write_many(pattern(1))
    assert peer(sync).ask(f"queue.read_many({SYNC_COUNT}) == pattern({SYNC_COUNT})")


def test_multiple_read(sync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(sync).ask("queue.write_many(pattern(500))")
    assert b"".join(sync.read_many(100) or b"" for _ in range(5)) == pattern(500)


def test_multiple_write(sync: fmq.MessageQueue, peer: Any) -> None:
    for chunk in range(5):
        assert sync.write_many(pattern(100, chunk * 100))
    assert peer(sync).ask("queue.read_many(500) == pattern(500)")


def test_read_write_wrap_around1(sync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(sync)
    assert sync.write_many(pattern(SYNC_COUNT // 2))
    assert other.ask(f"queue.read_many({SYNC_COUNT // 2}) == pattern({SYNC_COUNT // 2})")
    assert sync.write_many(pattern(SYNC_COUNT))
    assert other.ask(f"queue.read_many({SYNC_COUNT}) == pattern({SYNC_COUNT})")


def test_read_write_wrap_around2(sync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(sync)
    assert sync.write_many(pattern(SYNC_COUNT // 2))
    assert other.ask(f"queue.read_many({SYNC_COUNT // 2}) == pattern({SYNC_COUNT // 2})")
    transaction = sync.begin_write(SYNC_COUNT)
    assert transaction is not None and transaction.second is not None
    for index in range(SYNC_COUNT):
        transaction.slot(index)[:] = pattern(1, index)
    sync.commit_write(SYNC_COUNT)
    assert other.ask(f"queue.read_many({SYNC_COUNT}) == pattern({SYNC_COUNT})")


# UnsynchronizedWriteClient: the service writes, or reads with an endpoint of its own.


def test_unsync_small_input_reader_test1(unsync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(unsync).ask("queue.write_many(pattern(16))")
    assert unsync.read_many(16) == pattern(16)


def test_unsync_small_input_writer_test1(unsync: fmq.MessageQueue, peer: Any) -> None:
    assert unsync.write_many(pattern(16))
    assert peer(unsync).ask("queue.read_many(16) == pattern(16)")


def test_unsync_read_when_empty(unsync: fmq.MessageQueue) -> None:
    assert unsync.available_to_read() == 0
    assert unsync.read_many(2) is None


def test_unsync_write_when_full(unsync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(unsync)
    assert other.ask(f"queue.write_many(pattern({UNSYNC_COUNT}))")
    assert unsync.available_to_write() == 0
    assert other.ask("queue.write_many(pattern(1))")
    assert peer(unsync).ask(f"read_all(queue, {UNSYNC_COUNT})") is None


def test_unsync_large_input_test1(unsync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(unsync).ask(f"queue.write_many(pattern({UNSYNC_COUNT}))")
    assert unsync.read_many(UNSYNC_COUNT) == pattern(UNSYNC_COUNT)


def test_unsync_large_input_test2(unsync: fmq.MessageQueue, peer: Any) -> None:
    with pytest.raises(RuntimeError, match="InvalidArgument"):
        peer(unsync).ask(f"queue.write_many(pattern({UNSYNC_COUNT + 1}))")
    assert unsync.available_to_read() == 0
    assert unsync.read() is None


def test_unsync_large_input_test3(unsync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(unsync)
    assert other.ask(f"queue.write_many(pattern({UNSYNC_COUNT}))")
    assert other.ask("queue.write_many(pattern(1))")
    with pytest.raises(fmq.Overflow):
        unsync.read()
    assert other.ask("queue.write_many(pattern(1, 7))")
    assert unsync.read() == pattern(1, 7)


def test_unsync_multiple_read(unsync: fmq.MessageQueue, peer: Any) -> None:
    assert peer(unsync).ask("queue.write_many(pattern(500))")
    assert b"".join(unsync.read_many(100) or b"" for _ in range(5)) == pattern(500)


def test_unsync_multiple_write(unsync: fmq.MessageQueue, peer: Any) -> None:
    other = peer(unsync)
    for chunk in range(5):
        assert other.ask(f"queue.write_many(pattern(100, {chunk * 100}))")
    assert unsync.available_to_read() == 500
    assert unsync.read_many(500) == pattern(500)


def test_unsync_read_write_wrap_around(unsync: fmq.MessageQueue, peer: Any) -> None:
    other, half = peer(unsync), UNSYNC_COUNT // 2
    assert unsync.write_many(pattern(half))
    assert other.ask(f"queue.read_many({half}) == pattern({half})")
    assert unsync.write_many(pattern(UNSYNC_COUNT))
    assert other.ask(f"queue.read_many({UNSYNC_COUNT}) == pattern({UNSYNC_COUNT})")


def test_small_input_multiple_reader_test(unsync: fmq.MessageQueue, join: Any, peer: Any) -> None:
    first, other = join(unsync), peer(unsync)
    assert unsync.write_many(pattern(16))
    assert other.ask("queue.read_many(16) == pattern(16)")
    assert first.read_many(16) == pattern(16)


def test_overflow_notification_test(unsync: fmq.MessageQueue, join: Any, peer: Any) -> None:
    first, other = join(unsync), peer(unsync)
    assert unsync.write_many(pattern(UNSYNC_COUNT)) and unsync.write_many(pattern(1))
    assert other.ask(f"read_all(queue, {UNSYNC_COUNT})") is None
    assert other.ask("queue.statistics().lost_count") == UNSYNC_COUNT + 1
    with pytest.raises(fmq.Overflow):
        first.read_many(UNSYNC_COUNT)


def test_multiple_readers_after_overflow(unsync: fmq.MessageQueue, peer: Any) -> None:
    """UnsynchronizedWriteClientMultiProcess: both readers see the overflow, recover and read the next batch."""
    readers = peer(unsync), peer(unsync)
    assert unsync.write_many(pattern(UNSYNC_COUNT)) and unsync.write_many(pattern(1))
    for reader in readers:
        assert reader.ask("read_all(queue, 16)") is None
    assert unsync.write_many(pattern(16, 100))
    for reader in readers:
        assert reader.ask("queue.read_many(16) == pattern(16, 100)")


# Beyond the original.


def test_an_overtaken_reader_never_sees_a_torn_element(make: Make, join: Any, peer: Any) -> None:
    queue = make(256, 4, flavour=fmq.Flavour.UNSYNCHRONIZED)
    reader, count = join(queue), 200_000
    writer = peer(queue)
    writer.begin(f"flood(queue, {count})")
    last, taken, lost, element = 0, 0, 0, bytearray(256)
    while last < count:
        try:
            if not reader.read_into(element):
                continue
        except fmq.Overflow as overflow:
            lost += overflow.lost_count
            if taken + lost == count:
                break
            continue
        assert element == element[:8] * 32
        number = int.from_bytes(element[:8], "little")
        assert number > last
        last, taken = number, taken + 1
    assert writer.finish() == count
    assert taken + lost == count
    assert reader.statistics().lost_count == lost


def test_nothing_is_lost_or_reordered_at_full_speed(make: Make, peer: Any) -> None:
    queue, count = make(256, 8), 30_000
    writer = peer(queue)
    writer.begin(f"flood(queue, {count})")
    number, element = 0, bytearray(256)
    while number < count:
        if queue.read_into(element):
            number += 1
            assert element == number.to_bytes(8, "little") * 32
        else:
            assert queue.wait_readable(1, 20 * SECOND_NS)
    assert writer.finish() == count
    assert queue.read() is None


def test_messages_echo_between_parked_processes(make: Make, peer: Any) -> None:
    there, back = make(1, 4096), make(1, 4096)
    other = peer(there, back)
    other.begin(f"wait_all(queues[0], 1, 5000, {20 * SECOND_NS})")
    for index in range(500):
        message = bytes([index & 0xFF]) * (1 + index * 7 % 4000)
        assert there.write_message_blocking(message, 20 * SECOND_NS)
        assert back.read_message_blocking(20 * SECOND_NS) == message
    assert there.write_message(b"")
    assert other.finish() == 500


def test_a_queue_passes_over_a_socket(make: Make) -> None:
    queue = make(1, 4096)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = (
            "import socket, sys, fmq\n"
            "with socket.socket(fileno=int(sys.argv[1])) as s, fmq.passing.receive_queue(s) as q:\n"
            "    assert q.write_message(q.read_message_blocking(None)[::-1])\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
        fmq.passing.send_queue(ours, queue)
        assert queue.write_message(b"stressed")
        assert child.wait(30) == 0
    assert queue.read_message() == b"desserts"


def test_a_queue_passes_over_a_socket_that_tells_credentials() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, fmq.MessageQueue.create(1, 64) as queue:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        fmq.passing.send_queue(ours, queue)
        with fmq.passing.receive_queue(theirs) as received:
            assert queue.write_message(b"x") and received.read_message() == b"x"


def test_refused_descriptors_are_closed() -> None:
    import os

    ours, theirs = socket.socketpair()
    with ours, theirs, fmq.MessageQueue.create(1, 64) as queue:
        before = sorted(os.listdir("/proc/self/fd"))
        payload = queue.descriptor.to_bytes()
        for message in (
            b"\x00\x00\x00\x80",
            len(payload).to_bytes(4, "little") + payload.replace(b"FMQ1", b"FMQ2"),
        ):
            socket.send_fds(ours, [message], list(queue.fds))
            with pytest.raises(fmq.InvalidDescriptor):
                fmq.passing.receive_queue(theirs)
        for count in (5, 9, 100):
            socket.send_fds(ours, [b"\x04\x00\x00\x00"], [0] * count)
            with pytest.raises(fmq.InvalidDescriptor, match="got more"):
                fmq.passing.receive_queue(theirs)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(fmq.InvalidDescriptor, match="end of the stream"):
            fmq.passing.receive_queue(theirs)
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_stopped_reader_costs_the_writer_time_and_nothing_else(make: Make, peer: Any) -> None:
    import signal

    queue = make(64, 16)
    other = peer(queue)
    other.process.send_signal(signal.SIGSTOP)
    try:
        written = 0
        while queue.write(bytes(64)):
            written += 1
        assert written == 16
        assert not queue.write_blocking(bytes(64), 20_000_000)
        room = threading.Thread(target=queue.write_blocking, args=(bytes(64),))
        room.start()
    finally:
        other.process.send_signal(signal.SIGCONT)
    assert other.ask("len(queue.read_many(16))") == 1024
    room.join(30)
    assert not room.is_alive()
    assert queue.available_to_read() == 1


@pytest.mark.long
def test_a_parked_peer_is_woken_and_not_found_by_its_slice(make: Make, peer: Any) -> None:
    """A lost wake would cost a tenth of a second; parks and publishes at random distances provoke it."""
    import random
    import time

    there, back = make(1, 4096), make(1, 4096)
    other = peer(there, back)
    other.begin(f"wait_all(queues[0], 1, 5000, {60 * SECOND_NS})")
    rng, late, trips = random.Random(34), 0, 300_000
    for _ in range(trips):
        for _ in range(rng.randrange(40)):
            pass
        began = time.monotonic_ns()
        assert there.write_message(b"x")
        assert back.read_message_blocking(60 * SECOND_NS) == b"x"
        late += time.monotonic_ns() - began > 95_000_000
    assert there.write_message(b"")
    assert other.finish() == trips
    assert late <= 3  # a busy machine may hold a process back as long

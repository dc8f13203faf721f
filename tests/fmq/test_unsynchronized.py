"""The unsynchronized flavour in one process: the original's UnsynchronizedWriteTest by name, and what overflow means."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator

import pytest

import fmq

COUNT = 2048
Queue = fmq.MessageQueue


def pattern(size: int) -> bytes:
    return bytes(i & 0xFF for i in range(size))


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue.create(1, COUNT, flavour=fmq.Flavour.UNSYNCHRONIZED) as made:
        yield made


@pytest.fixture
def reader(queue: Queue) -> Iterator[Queue]:
    with Queue.attach(queue.descriptor, queue.fds) as made:
        yield made


def test_small_input_test1(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(16))
    assert reader.read_many(16) == pattern(16)


def test_read_when_empty(reader: Queue) -> None:
    assert reader.available_to_read() == 0
    assert reader.read_many(2) is None
    assert reader.begin_read(2) is None


def test_write_when_full1(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert reader.available_to_write() == 0
    assert queue.write(b"x")
    with pytest.raises(fmq.Overflow) as caught:
        reader.read()
    assert caught.value.lost_count == COUNT + 1


def test_write_when_full2(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert reader.available_to_write() == 0
    assert queue.begin_write(1) is not None
    queue.commit_write(1)
    with pytest.raises(fmq.Overflow):
        reader.begin_read(1)


def test_large_input_test1(queue: Queue, reader: Queue) -> None:
    with pytest.raises(fmq.InvalidArgument, match="at most 2048"):
        queue.write_many(bytes(COUNT + 1))
    with pytest.raises(fmq.InvalidArgument, match="0 to 2048"):
        queue.begin_write(COUNT + 1)
    assert reader.available_to_read() == 0
    assert reader.read() is None


def test_large_input_test2(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert reader.read_many(COUNT) == pattern(COUNT)


def test_large_input_test3(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert queue.write(b"x")
    with pytest.raises(fmq.Overflow):
        reader.read()
    assert reader.available_to_read() == 0
    assert queue.write(b"y")
    assert reader.read() == b"y"


def test_multiple_read(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(500))
    assert b"".join(reader.read_many(100) or b"" for _ in range(5)) == pattern(500)


def test_multiple_write(queue: Queue, reader: Queue) -> None:
    for chunk in range(5):
        assert queue.write_many(pattern(500)[chunk * 100 : chunk * 100 + 100])
    assert reader.read_many(500) == pattern(500)


def test_read_write_wrap_around(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT // 2))
    assert reader.read_many(COUNT // 2) == pattern(COUNT // 2)
    assert queue.write_many(pattern(COUNT))
    assert reader.read_many(COUNT) == pattern(COUNT)


# Beyond the original.


def test_a_late_reader_starts_at_zero_and_first_sees_what_it_missed(queue: Queue) -> None:
    assert queue.write_many(pattern(10))
    with Queue.attach(queue.descriptor, queue.fds) as late:
        assert late.read_many(10) == pattern(10)
    assert queue.write_many(pattern(COUNT))
    with Queue.attach(queue.descriptor, queue.fds) as later:
        assert later.available_to_read() == COUNT + 10
        with pytest.raises(fmq.Overflow) as caught:
            later.read()
        assert caught.value.lost_count == COUNT + 10
        assert later.statistics().lost_count == COUNT + 10
        assert later.statistics().overflow_count == 1


def test_commit_read_refuses_what_was_overwritten_meanwhile(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    begun = reader.begin_read(4)
    assert begun is not None
    assert queue.write(b"x")
    with pytest.raises(fmq.Overflow):
        reader.commit_read(4)
    with pytest.raises(ValueError, match="released"):
        begun.first[0]
    assert reader.available_to_read() == 0


def test_an_unpublished_write_in_progress_already_spoils_what_it_overwrites(
    queue: Queue, reader: Queue
) -> None:
    # The original checks the published counter alone and would return the torn element.
    assert queue.write_many(pattern(COUNT))
    transaction = queue.begin_write(1)
    assert transaction is not None
    transaction.first[0] = 0xEE
    with pytest.raises(fmq.Overflow):
        reader.read()


def test_messages_can_be_broadcast(queue: Queue, reader: Queue) -> None:
    with Queue.attach(queue.descriptor, queue.fds) as second:
        for index in range(300):
            assert queue.write_message(b"%d" % index * 20)
            assert reader.read_message() == second.read_message() == b"%d" % index * 20
        while second.available_to_read() <= COUNT:
            queue.write_message(bytes(500))
        with pytest.raises(fmq.Overflow):
            second.read_message()
        queue.write_message(b"again")
        assert second.read_message() == b"again"


def test_waiting_is_refused(queue: Queue) -> None:
    calls: list[Callable[[], object]] = [
        lambda: queue.read_blocking(1, 0),
        lambda: queue.wait_readable(1, 0),
        lambda: queue.read_message_blocking(0),
        lambda: queue.read_blocking(1, 0, write_notification=1, read_notification=2),
    ]
    for call in calls:
        with pytest.raises(fmq.InvalidArgument, match="need the synchronized flavour"):
            call()


async def test_awaiting_is_refused(queue: Queue) -> None:
    with pytest.raises(fmq.InvalidArgument, match="needs the synchronized flavour"):
        await fmq.aio.read(queue)


def test_a_reader_without_write_permission_maps_read_only(queue: Queue) -> None:
    readonly = os.open(f"/proc/self/fd/{queue.fds[0]}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Queue.attach(queue.descriptor, [readonly, *queue.fds[1:]]) as reader:
            assert queue.write_many(pattern(16))
            assert reader.read_many(16) == pattern(16)
            with pytest.raises(fmq.InvalidArgument, match="mapped read-only"):
                reader.write(b"x")
        assert fcntl.fcntl(readonly, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(readonly)


def test_a_synchronized_queue_without_write_permission_is_refused() -> None:
    with Queue.create(1, 16) as queue:
        readonly = os.open(f"/proc/self/fd/{queue.fds[0]}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with pytest.raises(fmq.InvalidDescriptor, match="may be written"):
                Queue.attach(queue.descriptor, [readonly, *queue.fds[1:]])
        finally:
            os.close(readonly)

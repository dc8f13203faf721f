"""The synchronized flavour in one process: the original's SynchronizedReadWrites and QueueSizeOdd by name, and more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import fmq
from fmq.region import create_memory

COUNT = 2048
Queue = fmq.MessageQueue


def pattern(size: int) -> bytes:
    return bytes(i & 0xFF for i in range(size))


@pytest.fixture(params=["one fd", "two fds"])
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    if request.param == "one fd":
        with Queue.create(1, COUNT) as made:
            yield made
        return
    fd = create_memory("ring", COUNT)
    with Queue.create(1, COUNT, ring_fd=fd) as made:
        os.close(fd)
        yield made


@pytest.fixture
def reader(queue: Queue) -> Iterator[Queue]:
    with Queue.attach(queue.descriptor, queue.fds) as made:
        yield made


def filled(queue: Queue, count: int) -> None:
    transaction = queue.begin_write(count)
    assert transaction is not None
    for index in range(count):
        transaction.slot(index)[0] = index & 0xFF
    queue.commit_write(count)


def test_small_input_test1(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(16))
    assert reader.read_many(16) == pattern(16)


def test_small_input_test2(queue: Queue, reader: Queue) -> None:
    written = queue.begin_write(16)
    assert written is not None
    written.copy_to(pattern(16))
    assert reader.available_to_read() == 0
    queue.commit_write(16)
    read = reader.begin_read(16)
    assert read is not None
    assert read.copy_from() == pattern(16)
    reader.commit_read(16)
    assert reader.available_to_read() == 0


def test_small_input_test3(queue: Queue, reader: Queue) -> None:
    filled(queue, 16)
    read = reader.begin_read(16)
    assert read is not None
    assert [read.slot(i)[0] for i in range(16)] == list(range(16))
    reader.commit_read(16)


def test_read_when_empty1(reader: Queue) -> None:
    assert reader.available_to_read() == 0
    assert reader.read_many(2) is None
    assert reader.read() is None
    assert not reader.read_into(bytearray(1))
    assert not reader.read_many_into(bytearray(2))
    assert reader.read_available(COUNT) == b""


def test_read_when_empty2(reader: Queue) -> None:
    assert reader.begin_read(2) is None


def test_write_when_full1(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert queue.available_to_write() == 0
    assert not queue.write(b"x")
    assert reader.read_many(COUNT) == pattern(COUNT)


def test_write_when_full2(queue: Queue, reader: Queue) -> None:
    filled(queue, COUNT)
    assert queue.available_to_write() == 0
    assert queue.begin_write(1) is None
    assert reader.read_many(COUNT) == pattern(COUNT)


def test_large_input_test1(queue: Queue, reader: Queue) -> None:
    with pytest.raises(fmq.InvalidArgument, match=r"at most 2048 elements of 1 bytes .* got 2049 bytes"):
        queue.write_many(bytes(COUNT + 1))
    assert reader.available_to_read() == 0
    assert reader.read() is None


def test_large_input_test2(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert reader.read_many(COUNT) == pattern(COUNT)


def test_large_input_test3(queue: Queue, reader: Queue) -> None:
    with pytest.raises(fmq.InvalidArgument, match="a count of 0 to 2048 elements, got 2049"):
        queue.begin_write(COUNT + 1)
    with pytest.raises(fmq.InvalidArgument, match="a count of 0 to 2048 elements, got 2049"):
        reader.begin_read(COUNT + 1)
    assert reader.available_to_read() == 0


def test_large_input_test4(queue: Queue, reader: Queue) -> None:
    filled(queue, COUNT)
    read = reader.begin_read(COUNT)
    assert read is not None
    assert read.copy_from() == pattern(COUNT)
    reader.commit_read(COUNT)


def test_multiple_read(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(500))
    assert b"".join(reader.read_many(100) or b"" for _ in range(5)) == pattern(500)


def test_multiple_write(queue: Queue, reader: Queue) -> None:
    for chunk in range(5):
        assert queue.write_many(pattern(500)[chunk * 100 : chunk * 100 + 100])
    assert reader.read_many(500) == pattern(500)


def test_read_write_wrap_around1(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT // 2))
    assert reader.read_many(COUNT // 2) == pattern(COUNT // 2)
    assert queue.write_many(pattern(COUNT))
    assert reader.read_many(COUNT) == pattern(COUNT)


def test_read_write_wrap_around2(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT // 2))
    assert reader.read_many(COUNT // 2) == pattern(COUNT // 2)
    written = queue.begin_write(COUNT)
    assert written is not None and written.second is not None
    assert len(written.first) + len(written.second) == COUNT
    written.copy_to(pattern(COUNT))
    queue.commit_write(COUNT)
    read = reader.begin_read(COUNT)
    assert read is not None and read.second is not None
    assert [read.slot(i)[0] for i in range(COUNT)] == list(pattern(COUNT))
    assert read.copy_from() == pattern(COUNT)
    reader.commit_read(COUNT)


def test_event_flag_test_of_an_odd_queue_size() -> None:
    with Queue.create(1, COUNT + 1) as queue:
        assert queue.descriptor.grantors[fmq.Grantor.EVFLAG].offset % 8 == 0
        queue.event_flag.wake(fmq.Notification.NOT_EMPTY)
        assert queue.event_flag.wait(fmq.Notification.NOT_EMPTY, 0) == fmq.Notification.NOT_EMPTY
        for _ in range(3):  # 2049 is no power of two: positions by division
            assert queue.write_many(pattern(COUNT))
            assert queue.read_many(COUNT) == pattern(COUNT)


# Hidl2AidlOperation: the same ring through the other form of descriptor.


def converted(queue: Queue) -> Queue:
    return Queue.attach(fmq.MQDescriptor.from_bytes(queue.descriptor.to_bytes()), queue.fds)


def test_convert_descriptors_sync(queue: Queue) -> None:
    with converted(queue) as other:
        assert queue.write_many(pattern(64))
        assert other.read_many(64) == pattern(64)


def test_convert_descriptors_unsync() -> None:
    with (
        Queue.create(1, COUNT, flavour=fmq.Flavour.UNSYNCHRONIZED) as queue,
        converted(queue) as first,
        converted(queue) as second,
    ):
        assert queue.write_many(pattern(64))
        assert first.read_many(64) == second.read_many(64) == pattern(64)


def test_convert_fd_index1() -> None:
    fd = create_memory("ring", COUNT)
    with Queue.create(1, COUNT, ring_fd=fd) as queue, converted(queue) as other:
        os.close(fd)
        assert other.descriptor.grantors[fmq.Grantor.DATA].fd_index == 1
        assert queue.write_many(pattern(64))
        assert other.read_many(64) == pattern(64)


def test_convert_multiple_fds() -> None:
    fds = [create_memory("part", 4096) for _ in range(3)]
    place = fmq.GrantorDescriptor
    descriptor = fmq.MQDescriptor((place(0, 0, 8), place(1, 0, 8), place(2, 64, COUNT)), 1, 1)
    with Queue.attach(descriptor, fds, reset=True) as queue, converted(queue) as other:
        for fd in fds:
            os.close(fd)
        assert queue.write_many(pattern(64))
        assert other.read_many(64) == pattern(64)


# Beyond the original.


def test_zero_elements_always_succeed(queue: Queue, reader: Queue) -> None:
    assert queue.write_many(pattern(COUNT))
    assert queue.write_many(b"")
    assert queue.begin_write(0) is not None
    queue.commit_write(0)
    assert reader.read_many(COUNT) == pattern(COUNT)
    assert reader.read_many(0) == b""


def test_attaching_keeps_what_is_in_the_queue_and_reset_clears_it(queue: Queue) -> None:
    assert queue.write_many(pattern(10))
    with Queue.attach(queue.descriptor, queue.fds) as late:
        assert late.read_many(4) == pattern(4)
    with Queue.attach(queue.descriptor, queue.fds) as later:
        assert later.read_many(6) == pattern(10)[4:]
    assert queue.write_many(pattern(10))
    with Queue.attach(queue.descriptor, queue.fds, reset=True) as cleared:
        assert cleared.available_to_read() == 0
        assert cleared.available_to_write() == COUNT


def test_reset_under_a_writer_is_found_and_not_written_over(queue: Queue) -> None:
    assert queue.write_many(pattern(10))
    with (
        Queue.attach(queue.descriptor, queue.fds, reset=True),
        pytest.raises(fmq.CorruptQueue, match="own write counter changed by another: expected 10, got 0"),
    ):
        queue.write(b"x")


def test_commit_of_more_than_was_begun_is_refused(queue: Queue, reader: Queue) -> None:
    for commit in (queue.commit_write, reader.commit_read):
        with pytest.raises(fmq.InvalidArgument, match="expected a begun"):
            commit(1)
    assert queue.begin_write(4) is not None
    with pytest.raises(fmq.InvalidArgument, match="expected a begun write"):
        queue.commit_write(5)
    queue.commit_write(3)
    assert reader.available_to_read() == 3
    with pytest.raises(fmq.InvalidArgument, match="expected a begun write"):
        queue.commit_write(1)


def test_slot_index_equal_to_the_count_is_refused(queue: Queue) -> None:
    transaction = queue.begin_write(4)
    assert transaction is not None
    for index in (4, -1):
        with pytest.raises(fmq.InvalidArgument, match=f"a slot from 0 to 3, got {index}"):
            transaction.slot(index)
    for start, size in ((4, 1), (0, 5), (-1, 1), (2, 3)):
        with pytest.raises(fmq.InvalidArgument, match="within it"):
            transaction.copy_to(bytes(size), start)
        with pytest.raises(fmq.InvalidArgument, match="within it"):
            transaction.copy_from(start, size)


def test_views_of_an_ended_transaction_raise(queue: Queue, reader: Queue) -> None:
    written = queue.begin_write(4)
    assert written is not None
    queue.commit_write(4)
    with pytest.raises(ValueError, match="released"):
        written.first[0] = 1
    read = reader.begin_read(4)
    assert read is not None
    with pytest.raises(TypeError):
        read.first[0] = 1
    reader.commit_read(4)
    with pytest.raises(ValueError, match="released"):
        read.first[0]


def test_a_begun_write_that_is_not_committed_leaves_no_trace(queue: Queue, reader: Queue) -> None:
    transaction = queue.begin_write(4)
    assert transaction is not None
    transaction.copy_to(b"lost")
    assert queue.write_many(b"kept")
    assert reader.read_available(COUNT) == b"kept"


def test_another_write_or_read_ends_what_was_begun(queue: Queue, reader: Queue) -> None:
    assert queue.begin_write(4) is not None
    assert queue.write_many(b"abcdefgh")
    with pytest.raises(fmq.InvalidArgument, match="expected a begun write"):
        queue.commit_write(4)
    assert reader.begin_read(4) is not None
    assert reader.read_many(2) == b"ab"
    with pytest.raises(fmq.InvalidArgument, match="expected a begun read"):
        reader.commit_read(4)
    assert reader.read_available(COUNT) == b"cdefgh"


def test_whole_elements_are_demanded() -> None:
    with Queue.create(8, 16) as queue:
        for call in (queue.write, queue.write_many):
            with pytest.raises(fmq.InvalidArgument, match="of 8 bytes, got 12 bytes"):
                call(bytes(12))
        with pytest.raises(fmq.InvalidArgument, match="one element of 8 bytes, got 16 bytes"):
            queue.write(bytes(16))
        with pytest.raises(fmq.InvalidArgument, match="one element of 8 bytes, got 7 bytes"):
            queue.read_into(bytearray(7))
        for count in (-1, 17, 2**70):
            with pytest.raises(fmq.InvalidArgument, match="a count of 0 to 16"):
                queue.read_many(count)
        with pytest.raises(BufferError):
            queue.read_into(b"readonly")
        with pytest.raises(TypeError):
            queue.write("text")  # type: ignore[arg-type]


def test_structured_elements_go_through_as_they_are() -> None:
    kind = np.dtype([("id", "<u4"), ("weights", "<f4", 3), ("name", "S8")])
    array = np.zeros(50, kind)
    array["id"] = np.arange(50)
    array["weights"] = np.random.default_rng(1).random((50, 3))
    array["name"] = [f"n{i}" for i in range(50)]
    with Queue.create(kind.itemsize, 64, dtype=kind) as queue:
        for _ in range(5):
            assert queue.write_many(array)
            first = queue.read_array(20)
            assert first is not None
            assert np.array_equal(first, array[:20])
            assert np.array_equal(queue.read_available_array(10), array[20:30])
            assert np.array_equal(queue.read_available_array(), array[30:])
            assert queue.read_array(1) is None
            assert len(queue.read_available_array()) == 0
        into = np.zeros(50, kind)
        assert queue.write_many(array) and queue.read_many_into(into)
        assert np.array_equal(into, array)
        with pytest.raises(fmq.InvalidArgument, match="a count of 0 to 64"):
            queue.read_array(65)


def test_arrays_need_a_dtype(queue: Queue) -> None:
    with pytest.raises(fmq.InvalidArgument, match="made with a dtype"):
        queue.read_array(1)


@pytest.mark.parametrize(
    "kind",
    [
        "?",
        "i1",
        "u1",
        "<i2",
        "<u2",
        "<i4",
        "<u4",
        "<i8",
        "<u8",
        "<f2",
        "<f4",
        "<f8",
        "<c16",
        "S5",
        "(2,3)<f4",
    ],
)
def test_aidl_type_checks(kind: str) -> None:
    dtype = np.dtype(kind) if not kind.startswith("(") else np.dtype(("<f4", (2, 3)))
    values = np.frombuffer(np.random.default_rng(2).bytes(dtype.itemsize * 16), np.uint8)
    with Queue.create(dtype.itemsize, 16, dtype=dtype) as queue:
        assert queue.write_many(values)
        read = queue.read_array(16)
        assert read is not None
        assert read.tobytes() == values.tobytes()


def test_statistics_count_what_was_done(queue: Queue, reader: Queue) -> None:
    queue.write_many(pattern(10))
    reader.read_many(4)
    statistics = queue.statistics()
    assert (statistics.written_count, statistics.read_count, statistics.wake_count) == (10, 0, 0)
    assert (statistics.available_to_read, statistics.available_to_write) == (6, COUNT - 6)
    assert reader.statistics().read_count == 4
    assert "6 to read" in repr(queue)


def test_closed_endpoints_refuse_everything(queue: Queue) -> None:
    transaction = queue.begin_write(4)
    assert transaction is not None
    queue.close()
    queue.close()
    assert queue.closed and queue.state == "closed" and "closed" in repr(queue)
    calls: list[Callable[[], object]] = [
        queue.read,
        queue.available_to_read,
        queue.available_to_write,
        queue.read_message,
        queue.peek_message,
        lambda: queue.write(b"x"),
        lambda: queue.read_many(1),
        lambda: queue.begin_write(1),
        lambda: queue.begin_read(1),
        lambda: queue.commit_write(1),
        lambda: queue.write_message(b"x"),
        lambda: queue.read_message_blocking(None),
        lambda: queue.read_blocking(1),
        lambda: queue.write_blocking(b"x"),
        lambda: queue.wait_readable(1, None),
        lambda: queue.event_flag,
    ]
    for call in calls:
        with pytest.raises(fmq.ClosedQueue, match="closed"):
            call()
    with pytest.raises(ValueError, match="released"):
        transaction.first[0]
    assert queue.statistics().available_to_read == 0


def test_a_view_kept_over_the_close_still_reaches_mapped_memory() -> None:
    queue = Queue.create(8, 512)
    transaction = queue.begin_write(512)
    assert transaction is not None
    array = np.frombuffer(transaction.first, "<u8")
    queue.close()
    assert int(array.sum()) == 0


def test_an_endpoint_dropped_open_warns() -> None:
    queue = Queue.create(1, 16)
    with pytest.warns(ResourceWarning, match="dropped open"):
        del queue


def test_the_child_of_a_fork_is_refused_and_leaves_the_parent_be(queue: Queue) -> None:
    assert queue.write_many(b"before")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            queue.read()
        except fmq.ClosedQueue:
            with Queue.attach(queue.descriptor, queue.fds) as own:
                code = 0 if own.read_many(6) == b"before" else 2
            queue.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.available_to_read() == 0
    assert queue.write_many(b"after")

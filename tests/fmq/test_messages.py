"""Messages of any length: a length and a payload, published by one commit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import fmq

Make = Callable[..., fmq.MessageQueue]


def test_messages_of_every_length_wrap_anywhere(make: Make, join: Any) -> None:
    for capacity in (64, 61, 1000):
        queue = make(1, capacity)
        reader = join(queue)
        rng = random.Random(capacity)
        for _ in range(500):
            message = rng.randbytes(rng.randrange((capacity - 8) // 8 * 8 + 1))
            assert queue.write_message(message)
            assert reader.read_message() == message
            assert reader.read_message() is None


def test_several_messages_keep_their_boundaries(make: Make) -> None:
    queue = make(1, 4096)
    messages = [b"", b"a", bytes(7), bytes(8), bytes(9), b"b" * 1000]
    assert all(queue.write_message(message) for message in messages)
    assert [queue.read_message() for _ in messages] == messages


def test_a_message_that_does_not_fit_now_is_not_written(make: Make) -> None:
    queue = make(1, 64)
    assert queue.write_message(bytes(40))
    assert not queue.write_message(bytes(9))
    assert queue.write_message(bytes(8))
    assert queue.available_to_write() == 0
    assert queue.read_message() == bytes(40)
    assert queue.read_message() == bytes(8)


def test_a_message_that_could_never_fit_is_refused(make: Make) -> None:
    queue = make(1, 64)
    for call in (queue.write_message, lambda p: queue.write_message_blocking(p, None)):
        with pytest.raises(fmq.InvalidArgument, match=r"a message of at most 56 bytes .* got 57"):
            call(bytes(57))
    for size in (57, 2**33):
        with pytest.raises(fmq.InvalidArgument, match="at most 56 bytes"):
            queue.reserve_message(size)
    with pytest.raises(fmq.InvalidArgument, match="at least 0"):
        queue.reserve_message(-1)
    assert queue.write_message(bytes(56))


def test_messages_need_a_quantum_of_one(make: Make) -> None:
    queue = make(4, 64)
    calls: list[Callable[[], object]] = [
        lambda: queue.write_message(b"x"),
        queue.read_message,
        queue.peek_message,
        lambda: queue.reserve_message(1),
        lambda: queue.read_message_blocking(0),
        lambda: queue.write_message_blocking(b"x", 0),
    ]
    for call in calls:
        with pytest.raises(fmq.InvalidArgument, match="quantum 1"):
            call()


def test_a_reserved_message_is_written_and_read_in_place(make: Make) -> None:
    queue = make(1, 100)
    for index in range(50):
        payload = bytes((index + i) & 0xFF for i in range(40 + index % 40))
        reserved = queue.reserve_message(len(payload))
        assert reserved is not None
        assert queue.read_message() is None
        reserved.copy_to(payload)
        queue.commit_message()
        with pytest.raises(ValueError, match="released"):
            reserved.first[0]
        peeked = queue.peek_message()
        assert peeked is not None
        assert peeked.copy_from() == payload
        assert queue.available_to_read() > 0
        queue.release_message()
        assert queue.available_to_read() == 0


def test_a_reserved_message_can_be_committed_shorter(make: Make) -> None:
    queue = make(1, 128)
    reserved = queue.reserve_message(100)
    assert reserved is not None
    reserved.copy_to(b"short")
    with pytest.raises(fmq.InvalidArgument, match="reserved message"):
        queue.commit_message(101)
    queue.commit_message(5)
    assert queue.read_message() == b"short"
    assert queue.available_to_write() == 128


def test_message_and_element_transactions_do_not_mix(make: Make) -> None:
    queue = make(1, 128)
    with pytest.raises(fmq.InvalidArgument):
        queue.commit_message(0)
    with pytest.raises(fmq.InvalidArgument):
        queue.release_message()
    assert queue.reserve_message(8) is not None
    with pytest.raises(fmq.InvalidArgument):
        queue.commit_write(8)
    queue.commit_message()
    assert queue.begin_read(16) is not None
    with pytest.raises(fmq.InvalidArgument):
        queue.release_message()
    assert queue.peek_message() is not None
    with pytest.raises(fmq.InvalidArgument):
        queue.commit_read(8)
    queue.release_message()


def test_padding_is_cleared(make: Make) -> None:
    queue = make(1, 64)
    assert queue.write_many(b"\xff" * 64)
    assert queue.read_many(64)
    assert queue.write_message(b"abc")
    raw = queue.read_many(16)
    assert raw is not None
    assert raw[8:] == b"abc" + bytes(5)
    assert int.from_bytes(raw[:4], "little") == 3


def test_a_message_is_any_contiguous_buffer(make: Make) -> None:
    import array

    queue = make(1, 256)
    assert queue.write_message(array.array("I", [1, 2, 3]))
    assert queue.read_message() == array.array("I", [1, 2, 3]).tobytes()
    assert queue.write_message(memoryview(b"abcdef")[2:4])
    assert queue.read_message() == b"cd"
    with pytest.raises(BufferError):
        queue.write_message(memoryview(b"abcdef")[::2])


@pytest.mark.parametrize("header", [(57, None), (2**32 - 1, None), (8, 0), (0, 0)])
def test_hostile_headers_are_corruption(make: Make, join: Any, header: tuple[int, int | None]) -> None:
    queue = make(1, 64)
    reader = join(queue)
    length, check = header
    check = length ^ 0x464D5131 if check is None else check
    assert queue.write_many(length.to_bytes(4, "little") + check.to_bytes(4, "little") + bytes(8))
    with pytest.raises(fmq.CorruptQueue):
        reader.read_message()
    with pytest.raises(fmq.CorruptQueue, match="found corrupt earlier"):
        reader.peek_message()

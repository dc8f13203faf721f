"""The real queue against a plain model: random calls, in both flavours, with every answer predicted."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmq

Queue = fmq.MessageQueue


class Plain:
    """What a queue does, over a list of elements."""

    def __init__(self, count: int, flavour: fmq.Flavour) -> None:
        self.count = count
        self.lossy = flavour is fmq.Flavour.UNSYNCHRONIZED
        self.elements: deque[bytes] = deque()
        self.lost_count = 0

    def write(self, elements: list[bytes]) -> bool:
        if not self.lossy and len(self.elements) + len(elements) > self.count:
            return False
        self.elements.extend(elements)
        return True

    def overflowed(self) -> bool:
        if len(self.elements) <= self.count:
            return False
        self.lost_count += len(self.elements)
        self.elements.clear()
        return True

    def read(self, count: int) -> list[bytes] | None:
        if len(self.elements) < count:
            return None
        return [self.elements.popleft() for _ in range(count)]


calls = st.lists(
    st.tuples(
        st.sampled_from(["write", "write in place", "read", "read into", "read in place", "drain"]),
        st.integers(0, 12),
    ),
    max_size=60,
)


@settings(deadline=None, derandomize=True)
@given(
    quantum=st.sampled_from([1, 3, 8]),
    count=st.integers(1, 10),
    flavour=st.sampled_from(list(fmq.Flavour)),
    script=calls,
)
def test_the_queue_answers_as_the_plain_model(
    quantum: int, count: int, flavour: fmq.Flavour, script: list[tuple[str, int]]
) -> None:
    plain, number = Plain(count, flavour), 0
    with (
        Queue.create(quantum, count, flavour=flavour) as writer,
        Queue.attach(writer.descriptor, writer.fds) as reader,
    ):
        for call, n in script:
            n = min(n, count)
            if call.startswith("write"):
                elements = [(number + i).to_bytes(8, "little")[:quantum] for i in range(n)]
                fits = plain.write(elements)
                number += n if fits else 0
                assert write(writer, call, elements) is fits
                continue
            lost_before = plain.lost_count
            if plain.overflowed():
                with pytest.raises(fmq.Overflow) as caught:
                    read(reader, call, n, quantum)
                assert caught.value.lost_count == plain.lost_count - lost_before
            elif call == "drain":
                assert read(reader, call, n, quantum) == b"".join(
                    plain.read(min(n, len(plain.elements))) or []
                )
            else:
                expected = plain.read(n)
                assert read(reader, call, n, quantum) == (None if expected is None else b"".join(expected))
            assert reader.available_to_read() == len(plain.elements)
        assert reader.statistics().lost_count == plain.lost_count


def write(queue: Queue, call: str, elements: list[bytes]) -> bool:
    data = b"".join(elements)
    if call == "write":
        return queue.write(data) if len(elements) == 1 else queue.write_many(data)
    transaction = queue.begin_write(len(elements))
    if transaction is None:
        return False
    transaction.copy_to(data)
    queue.commit_write(len(elements))
    return True


def read(queue: Queue, call: str, count: int, quantum: int) -> bytes | None:
    if call == "drain":
        return queue.read_available(count)
    if call == "read":
        return queue.read() if count == 1 else queue.read_many(count)
    if call == "read into":
        into = bytearray(count * quantum)
        return bytes(into) if queue.read_many_into(into) else None
    transaction = queue.begin_read(count)
    if transaction is None:
        return None
    data = transaction.copy_from()
    queue.commit_read(count)
    return data


@settings(deadline=None, derandomize=True)
@given(
    capacity=st.integers(8, 80),
    script=st.lists(
        st.tuples(st.sampled_from(["write", "reserve", "read", "peek"]), st.integers(0, 80)), max_size=60
    ),
)
def test_messages_answer_as_a_list_of_messages(capacity: int, script: list[tuple[str, int]]) -> None:
    plain: deque[bytes] = deque()
    used = 0
    with Queue.create(1, capacity) as writer, Queue.attach(writer.descriptor, writer.fds) as reader:
        for call, size in script:
            if call in ("write", "reserve"):
                size = min(size, (capacity - 8) // 8 * 8)
                message = random.Random(size).randbytes(size)
                whole = 8 + (size + 7) // 8 * 8
                fits = used + whole <= capacity
                if call == "write":
                    assert writer.write_message(message) is fits
                else:
                    reserved = writer.reserve_message(size)
                    assert (reserved is not None) is fits
                    if reserved is not None:
                        reserved.copy_to(message)
                        writer.commit_message()
                if fits:
                    plain.append(message)
                    used += whole
                continue
            if call == "read":
                got = reader.read_message()
            else:
                peeked = reader.peek_message()
                got = None if peeked is None else peeked.copy_from()
                if peeked is not None:
                    reader.release_message()
            assert got == (plain.popleft() if plain else None)
            used -= 0 if got is None else 8 + (len(got) + 7) // 8 * 8
            assert reader.available_to_read() == used


@pytest.mark.parametrize("flavour", list(fmq.Flavour))
@pytest.mark.parametrize("before", [2**64 - 16, 2**63 - 16, 2**32 - 16])
def test_counters_pass_their_limits_in_a_ring_of_a_power_of_two(flavour: fmq.Flavour, before: int) -> None:
    """Counters near 2^64: what is written is what is read, across the wrap of the counters themselves."""
    with Queue.create(1, 64, flavour=flavour) as queue:
        preset(queue, before, before)
        writer = Queue.attach(queue.descriptor, queue.fds)
        reader = Queue.attach(queue.descriptor, queue.fds)
        with writer, reader:
            if flavour is fmq.Flavour.UNSYNCHRONIZED:
                # Its reader starts at 0, so a counter this large is an overflow, or out of any reach.
                with pytest.raises((fmq.Overflow, fmq.CorruptQueue)):
                    reader.read()
                return
            for turn in range(10):
                assert writer.write_many(bytes([turn] * 5))
                assert reader.read_many(5) == bytes([turn] * 5)
            assert writer.write_many(bytes(64))
            assert writer.available_to_write() == 0 and not writer.write(b"x")


def test_counters_never_pass_their_limits_in_another_ring() -> None:
    with Queue.create(3, 5) as queue:
        last = (2**64 - 1) // 3 * 3
        preset(queue, last - 6, last - 6)
        with Queue.attach(queue.descriptor, queue.fds) as writer:
            assert writer.write_many(bytes(6))
            with pytest.raises(fmq.CorruptQueue, match="would pass"):
                writer.write(bytes(3))


def preset(queue: Queue, write: int, read: int) -> None:
    import mmap
    import os

    with mmap.mmap(queue.fds[0], os.fstat(queue.fds[0]).st_size) as memory:
        for which, value in ((fmq.Grantor.WRITEPTR, write), (fmq.Grantor.READPTR, read)):
            offset = queue.descriptor.grantors[which].offset
            memory[offset : offset + 8] = value.to_bytes(8, "little")

"""Blocking calls, the event flag, interruption and closing: the original's BlockingReadWrites by name, and more."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import fmq

Make = Callable[..., fmq.MessageQueue]
SECOND_NS = 1_000_000_000
NOT_FULL, NOT_EMPTY = fmq.Notification.NOT_FULL, fmq.Notification.NOT_EMPTY
LONG: dict[str, Any] = {"read_notification": NOT_FULL, "write_notification": NOT_EMPTY}


# BlockingReadWrites


def test_small_input_test1(make: Make, join: Any, background: Any) -> None:
    """A hand-shake by the event flag alone, around plain reads and writes."""
    writer = make(1, 2048)
    reader = join(writer)

    def read() -> bytes | None:
        while True:
            assert reader.event_flag.wait(NOT_EMPTY, 5 * SECOND_NS) == NOT_EMPTY
            taken = reader.read_many(64)
            if taken is not None:
                reader.event_flag.wake(NOT_FULL)
                return taken

    reading = background(read)
    assert writer.write_many(bytes(range(64)))
    writer.event_flag.wake(NOT_EMPTY)
    assert reading.result() == bytes(range(64))
    assert writer.event_flag.wait(NOT_FULL, 5 * SECOND_NS) == NOT_FULL


@pytest.mark.parametrize("form", [{}, LONG], ids=["short form", "long form"])
def test_small_input_test2(make: Make, join: Any, background: Any, form: dict[str, Any]) -> None:
    writer = make(1, 2048)
    reader = join(writer)
    reading = background(lambda: reader.read_blocking(64, 5 * SECOND_NS, **form))
    assert writer.write_blocking(bytes(range(64)), 5 * SECOND_NS, **form)
    assert reading.result() == bytes(range(64))


def test_blocking_time_out_test(make: Make) -> None:
    queue = make(1, 2048)
    began = time.monotonic()
    assert queue.event_flag.wait(NOT_EMPTY, SECOND_NS // 5) == 0
    assert time.monotonic() - began >= 0.2


# Timeouts


@pytest.mark.parametrize("form", [{}, LONG], ids=["short form", "long form"])
def test_blocking_calls_end_at_the_timeout_and_transfer_nothing(make: Make, form: dict[str, Any]) -> None:
    queue = make(4, 8)
    assert queue.write_many(bytes(12))
    began = time.monotonic()
    assert queue.read_blocking(4, SECOND_NS // 10, **form) is None
    assert not queue.write_blocking(bytes(24), SECOND_NS // 10, **form)
    assert time.monotonic() - began >= 0.2
    assert queue.available_to_read() == 3


@pytest.mark.parametrize("form", [{}, LONG], ids=["short form", "long form"])
def test_data_beats_a_timeout_of_zero(make: Make, form: dict[str, Any]) -> None:
    queue = make(1, 8)
    assert queue.write_blocking(b"x", 0, **form)
    assert queue.read_blocking(1, 0, **form) == b"x"
    assert queue.read_blocking(1, 0, **form) is None
    assert queue.write_message_blocking(b"", 0)
    assert queue.read_message_blocking(0) == b""
    assert queue.read_message_blocking(0) is None
    queue.event_flag.wake(8)
    assert queue.event_flag.wait(8, 0) == 8


def test_timeouts_beyond_any_clock_wait_for_ever(make: Make, join: Any, background: Any, parked: Any) -> None:
    queue = make(1, 64)
    reader = join(queue)
    reading = background(lambda: reader.read_message_blocking(2**80))
    parked(reader)
    assert queue.write_message(b"x")
    assert reading.result() == b"x"


@pytest.mark.parametrize("timeout", [-1, -(2**70)])
def test_negative_timeouts_are_refused(make: Make, timeout: int) -> None:
    queue = make(1, 64)
    calls: list[Callable[[], object]] = [
        lambda: queue.read_blocking(1, timeout),
        lambda: queue.read_message_blocking(timeout),
        lambda: queue.write_message_blocking(b"", timeout),
        lambda: queue.event_flag.wait(1, timeout),
    ]
    for call in calls:
        with pytest.raises(fmq.InvalidArgument, match="expected None or at least 0"):
            call()


def test_a_mask_of_zero_to_wait_for_is_refused(make: Make) -> None:
    queue = make(1, 64)
    for call in (
        lambda: queue.event_flag.wait(0, 0),
        lambda: queue.read_blocking(1, 0, read_notification=1, write_notification=0),
        lambda: queue.write_blocking(b"x", 0, read_notification=0, write_notification=1),
    ):
        with pytest.raises(fmq.InvalidArgument, match="at least one"):
            call()
    with pytest.raises(fmq.InvalidArgument, match="at most 64"):
        queue.write_blocking(bytes(65))
    with pytest.raises(fmq.InvalidArgument, match="0 to 64"):
        queue.read_blocking(65)


def test_a_wake_mask_of_zero_wakes_nobody(make: Make) -> None:
    queue = make(1, 64)
    assert queue.write_blocking(b"x", 0, read_notification=1, write_notification=0)
    assert queue.read_blocking(1, 0, read_notification=0, write_notification=2) == b"x"
    assert queue.event_flag.value == 0


def test_queues_without_an_event_flag_do_not_block(make: Make) -> None:
    queue = make(1, 64, event_flag=False)
    assert len(queue.fds) == 1 and len(queue.descriptor.grantors) == 3
    assert queue.write(b"x") and queue.read() == b"x"
    for call in (
        lambda: queue.read_blocking(1, 0),
        lambda: queue.read_blocking(1, 0, **LONG),
        lambda: queue.read_message_blocking(0),
        lambda: queue.event_flag,
    ):
        with pytest.raises(fmq.InvalidArgument, match="need an event flag"):
            call()


def test_queues_without_parking_words_wait_by_the_flag_bits(make: Make, background: Any) -> None:
    made = make(1, 64)
    descriptor = msgspec.structs.replace(
        made.descriptor, grantors=made.descriptor.grantors[:4], reader_event_index=-1, writer_event_index=-1
    )
    with (
        fmq.MessageQueue.attach(descriptor, made.fds) as one,
        fmq.MessageQueue.attach(descriptor, made.fds) as other,
    ):
        reading = background(lambda: one.read_blocking(8, 5 * SECOND_NS))
        assert other.write_blocking(bytes(8), 5 * SECOND_NS)
        assert reading.result() == bytes(8)
        assert other.event_flag.value & NOT_FULL


# Waking


def test_a_parked_reader_is_woken_by_any_way_to_write(
    make: Make, join: Any, background: Any, parked: Any
) -> None:
    queue = make(1, 256)
    reader = join(queue)

    def by_transaction() -> None:
        transaction = queue.begin_write(8)
        assert transaction is not None
        queue.commit_write(8)

    def by_reservation() -> None:
        assert queue.reserve_message(0) is not None
        queue.commit_message()

    for write in (
        lambda: queue.write_many(bytes(8)),
        lambda: queue.write_blocking(bytes(8)),
        lambda: queue.write_message(b""),
        by_transaction,
        by_reservation,
    ):
        reading = background(lambda: reader.read_blocking(8, 20 * SECOND_NS))
        parked(reader)
        write()
        assert len(reading.result()) == 8


def test_a_parked_writer_is_woken_by_any_way_to_read(
    make: Make, join: Any, background: Any, parked: Any
) -> None:
    queue = make(1, 8)
    reader = join(queue)

    def by_transaction() -> None:
        assert reader.begin_read(8) is not None
        reader.commit_read(8)

    def by_peeking() -> None:
        assert reader.peek_message() is not None
        reader.release_message()

    for read in (lambda: reader.read_many(8), by_transaction, by_peeking, reader.read_message):
        assert queue.write_message(b"")
        writing = background(lambda: queue.write_message_blocking(b"", 20 * SECOND_NS))
        parked(queue)
        read()
        assert writing.result()
        assert reader.read_message() == b""


def test_no_system_call_to_wake_a_peer_that_is_awake(make: Make, join: Any) -> None:
    queue = make(64, 1024)
    reader = join(queue)
    for _ in range(1000):
        assert queue.write(bytes(64)) and reader.read()
    assert queue.statistics().wake_count == reader.statistics().wake_count == 0


def test_spinning_finds_data_before_sleeping(make: Make, join: Any, background: Any) -> None:
    queue = make(1, 256, spin_ns=20 * SECOND_NS)
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("spinning is off where only one processor is allowed")
    reader = join(queue, spin_ns=20 * SECOND_NS)
    reading = background(lambda: reader.read_message_blocking(None))
    while reader.statistics().spin_count == 0:
        os.sched_yield()
    assert queue.write_message(b"x")
    assert reading.result() == b"x"
    assert reader.statistics().park_count == 0


def test_spinning_is_off_on_a_single_processor(background: Any) -> None:
    def alone() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread
        with fmq.MessageQueue.create(1, 256, spin_ns=SECOND_NS) as queue:
            assert queue.read_message_blocking(1_000_000) is None
            return queue.statistics().spin_count

    assert background(alone).result() == 0


def test_interrupt_ends_waiting_and_nothing_else(make: Make, join: Any, background: Any, parked: Any) -> None:
    queue = make(1, 256)
    reader = join(queue)
    reading = background(lambda: reader.read_message_blocking(None))
    parked(reader)
    reader.interrupt()
    with pytest.raises(fmq.InterruptedQueue):
        reading.result()
    with pytest.raises(fmq.InterruptedQueue):
        reader.read_blocking(1, None)
    assert reader.interrupted and not queue.interrupted
    assert queue.write_message(b"x")
    assert reader.read_message_blocking(None) == b"x"


def test_closing_ends_waiting_in_other_threads(make: Make, join: Any, background: Any, parked: Any) -> None:
    queue = make(1, 16)
    reader = join(queue)
    assert queue.write_message(bytes(8))
    with fmq.MessageQueue.attach(queue.descriptor, queue.fds) as writer:
        writing = background(lambda: writer.write_message_blocking(bytes(8), None))
        parked(writer)
        writer.close()
        with pytest.raises(fmq.ClosedQueue):
            writing.result()
    assert reader.read_message() == bytes(8)
    reading = background(lambda: reader.read_message_blocking(None))
    parked(reader)
    reader.close()
    with pytest.raises(fmq.ClosedQueue):
        reading.result()


def test_closing_ends_waiting_for_the_event_flag(make: Make, background: Any) -> None:
    queue = make(1, 16)
    flag = queue.event_flag
    waiting = background(lambda: flag.wait(1))
    queue.close()
    with pytest.raises(fmq.ClosedQueue):
        waiting.result()


def test_a_signal_handler_runs_while_a_call_waits(make: Make) -> None:
    class Rang(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rang

    queue = make(1, 16)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for call in (lambda: queue.read_message_blocking(None), lambda: queue.event_flag.wait(1)):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(Rang):
                call()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_signals_do_not_stretch_a_timeout(make: Make) -> None:
    rings = []
    queue = make(1, 16)
    before = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        began = time.monotonic()
        assert queue.read_message_blocking(SECOND_NS // 5) is None
        assert queue.event_flag.wait(1, SECOND_NS // 5) == 0
        assert time.monotonic() - began >= 0.4
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rings


def test_spurious_wakes_are_no_data(
    make: Make, join: Any, background: Any, parked: Any, counters: Any
) -> None:
    """A hostile peer changes the parking word and wakes at will: the reader looks again and sleeps again."""
    queue = make(1, 64)
    reader = join(queue)
    word = queue.descriptor.grantors[fmq.Grantor.READER_PARK].offset
    memory = counters(queue)
    hostile = fmq.EventFlag(memoryview(memory)[word : word + 4])
    reading = background(lambda: reader.read_message_blocking(None))
    for bit in range(2, 12):
        parked(reader)
        hostile.wake(1 << bit)
    assert queue.write_message(b"x")
    assert reading.result() == b"x"
    hostile.close()
    gc.collect()


# EventFlag


def test_event_flag_takes_all_bits_of_its_mask_and_leaves_the_others(make: Make) -> None:
    flag = make(1, 16).event_flag
    flag.wake(0b10110)
    assert flag.wait(0b00111) == 0b00110
    assert flag.value == 0b10000
    flag.wake(0)
    assert flag.value == 0b10000
    flag.wake(0xFFFFFFFF)
    assert flag.wait(0xFFFFFFFF, 0) == 0xFFFFFFFF


@pytest.mark.parametrize("mask", [2**32, -1, 2**70])
def test_event_flag_masks_have_32_bits(make: Make, mask: int) -> None:
    flag = make(1, 16).event_flag
    for call in (flag.wake, flag.wait):
        with pytest.raises(fmq.InvalidArgument, match="32 bits"):
            call(mask)


def test_event_flag_needs_memory() -> None:
    for memory in (None, bytearray(3), b"readonly"):
        with pytest.raises((fmq.InvalidArgument, BufferError)):
            fmq.EventFlag(memory)  # type: ignore[arg-type]


def test_each_set_bit_is_taken_once_by_several_waiters(make: Make, background: Any) -> None:
    queue = make(1, 16)
    flag = queue.event_flag
    taken: list[int] = []
    lock = threading.Lock()

    def take() -> None:
        while True:
            bits = flag.wait(0xFFFF, 20 * SECOND_NS)
            with lock:
                taken.extend(1 << i for i in range(16) if bits >> i & 1)
            if bits & 0x8000 or bits == 0:
                flag.wake(0x8000)  # pass the end on
                return

    waiters = [background(take) for _ in range(4)]
    rounds = 200
    for turn in range(rounds):
        bit = 1 << (turn % 15)
        flag.wake(bit)
        while flag.value & bit:
            os.sched_yield()
    flag.wake(0x8000)
    for waiter in waiters:
        waiter.result()
    assert sum(1 for bit in taken if bit != 0x8000) == rounds


def test_event_flag_wait_without_retry_may_return_early_with_nothing(make: Make, background: Any) -> None:
    flag = make(1, 16).event_flag
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        assert flag.wait(1, 20 * SECOND_NS, retry=False) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_parked_reader_costs_next_to_nothing(make: Make, join: Any, background: Any, parked: Any) -> None:
    queue = make(1, 64)
    reader = join(queue)

    def wait() -> tuple[bytes | None, float]:
        before = time.thread_time()
        return reader.read_message_blocking(SECOND_NS // 2), time.thread_time() - before

    message, used_s = background(wait).result()
    assert message is None
    assert used_s < 0.05
    assert reader.statistics().park_count < 20

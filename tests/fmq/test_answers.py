"""Messages that C functions answer: what is answered, what is left to Python, and what a call keeps alive.

The functions are those of the C library, which count and write without Python, and functions of Python where a test has to stop or
fail a call.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from typing import Any

import pytest

import fmq
from tests.fmq.answering import (
    ANSWER,
    MESSAGE,
    NO_TIME,
    SECOND_NS,
    WAIT_S,
    Calls,
    Ends,
    Function,
    Gate,
    Kept,
    address_of,
)


def time_bytes(value: int) -> bytes:
    return value.to_bytes(8, "big")


# What is answered, and what is left


def test_a_known_message_is_answered_by_its_call_and_every_other_one_is_left(
    make_ends: Any, calls: Calls
) -> None:
    ends = make_ends()
    assert ends.ask(MESSAGE) == b"python"
    assert ends.add(calls)
    assert [ends.ask(MESSAGE) for _ in range(3)] == [ANSWER] * 3
    assert ends.ask(MESSAGE[:-1]) == ends.ask(MESSAGE + b"!") == ends.ask(b"") == b"python"
    assert calls.count == 3 and ends.events == []
    answered, began_ns, ended_ns = ends.answers.activity()
    assert answered == 3 and 0 < began_ns < ended_ns
    ends.answers.clear()
    assert ends.answers.count == 0 and ends.ask(MESSAGE) == b"python"


def test_a_message_that_differs_in_any_bit_is_left(make_ends: Any, calls: Calls) -> None:
    ends = make_ends()
    ends.add(calls)
    for place in range(len(MESSAGE)):
        for bit in range(8):
            changed = bytearray(MESSAGE)
            changed[place] ^= 1 << bit
            assert ends.ask(bytes(changed)) == b"python"
    assert calls.count == 0
    assert ends.ask(MESSAGE) == ANSWER


def test_the_words_of_a_call_are_those_that_were_added(make_ends: Any) -> None:
    ends = make_ends()
    gate = Gate()
    gate.may_end.set()
    ends.answers.add(MESSAGE, ANSWER, gate.function, ((1, 2, 3, 4, 5, 2**64 - 1), (9,)), ends.permit, None)
    assert ends.ask(MESSAGE) == ANSWER
    assert gate.got == [(1, 2, 3, 4, 5, 2**64 - 1)]


def test_times_differ_and_nothing_else_may(make_ends: Any, calls: Calls) -> None:
    ends = make_ends()
    head, middle = b"before", b"between"
    ends.add(calls, head + NO_TIME + middle + NO_TIME, times=(len(head), len(head) + 8 + len(middle)))

    def message(first: bytes, second: bytes) -> bytes:
        return head + first + middle + second

    late, far, long = time_bytes(1), time_bytes(2**63 - 1), time_bytes(5)
    assert ends.ask(message(NO_TIME, NO_TIME)) == ANSWER
    assert ends.ask(message(far, long)) == ANSWER
    assert calls.count == 2
    # Late, negative as a time of 63 bits, or another text between the times.
    assert ends.ask(message(late, NO_TIME)) == b"python"
    assert ends.ask(message(time_bytes(2**63), NO_TIME)) == b"python"
    assert ends.ask(message(NO_TIME, time_bytes(2**64 - 2))) == b"python"
    assert ends.ask(head + far + b"BETWEEN" + long) == b"python"
    assert calls.count == 2


def test_a_call_that_fails_gives_no_answer_and_is_reported(make_ends: Any) -> None:
    ends = make_ends()
    gate = Gate(status=5)
    gate.may_end.set()
    ends.add(gate, call="the call")
    assert ends.ask(MESSAGE) == b"failed"
    ((call, slot, status, began_ns, ended_ns),) = ends.events
    assert (call, slot, status) == ("the call", -1, 5) and 0 < began_ns < ended_ns
    assert ends.left == [] and len(gate.got) == 1, "it was executed once"


def test_every_call_is_reported_where_that_was_wished(make_ends: Any, calls: Calls) -> None:
    ends = make_ends(reports=True)
    ends.add(calls, call="the call")
    assert [ends.ask(MESSAGE) for _ in range(2)] == [ANSWER] * 2
    assert ends.ask(b"last") == b"python"
    assert [event[:3] for event in ends.events] == [("the call", -1, 0)] * 2


def test_an_answer_without_room_is_left(make_ends: Any, calls: Calls) -> None:
    ends = make_ends(result_bytes=64)
    ends.add(calls, answer=b"A" * 40)
    assert ends.requests.write_message(MESSAGE)
    assert ends.requests.write_message(MESSAGE)
    assert ends.results.read_message_blocking(SECOND_NS) == b"A" * 40
    assert ends.results.read_message_blocking(SECOND_NS) in (b"A" * 40, b"python")
    assert calls.count + len(ends.left) == 2
    ends.add(calls, answer=b"A" * 80)
    assert ends.ask(MESSAGE) == b"python", "it can never be written"


def test_a_full_table_takes_no_more_and_a_known_message_is_replaced(make_ends: Any, calls: Calls) -> None:
    ends = make_ends()
    count = 0
    while ends.add(calls, b"%d" % count):
        count += 1
    assert ends.answers.count == count >= 64
    assert not ends.add(calls, b"one more")
    assert ends.add(calls, b"0", b"another answer")
    assert ends.ask(b"0") == b"another answer"
    assert ends.ask(b"%d" % (count - 1)) == ANSWER


@pytest.mark.parametrize("times", [(16,), (1 << 40,), (8, 15), (8, 0), (0, 8, 16)], ids=str)
def test_impossible_times_are_rejected(times: tuple[int, ...], calls: Calls) -> None:
    answers, slots = fmq.Answers(), fmq.Slots(1)
    permit = fmq.Permit(slots, 1)
    with pytest.raises(fmq.InvalidArgument):
        answers.add(bytes(23), ANSWER, calls.function, (calls.words,), permit, None, times=times)
    assert answers.count == 0


def test_impossible_calls_are_rejected(calls: Calls) -> None:
    answers, slots = fmq.Answers(), fmq.Slots(2)
    permit = fmq.Permit(slots, 1)
    both = (calls.words, calls.words)
    good: dict[str, Any] = {"message": MESSAGE, "answer": ANSWER, "function": calls.function}
    good |= {"words": both, "permit": permit, "call": None}
    for bad in (
        {"message": bytes(4097)}, {"answer": bytes(4097)}, {"words": (calls.words,)}, {"words": ((0,) * 7,) * 2},
        {"permit": slots},
    ):  # fmt: skip
        with pytest.raises(fmq.InvalidArgument):
            answers.add(**{**good, **bad})
    for count in (0, -1, 33):
        with pytest.raises(fmq.InvalidArgument):
            fmq.Slots(count)
    with pytest.raises(fmq.InvalidArgument):
        slots.holder(2)
    assert answers.count == 0


def test_an_address_that_is_not_executable_is_rejected(calls: Calls) -> None:
    answers = fmq.Answers()
    permit = fmq.Permit(fmq.Slots(1), 1)
    data = ctypes.create_string_buffer(64)
    for address in (0, 8, ctypes.addressof(data), id(answers), 2**47 + 12345, 2**64 - 8):
        with pytest.raises(fmq.InvalidArgument, match="not in mapped executable memory"):
            answers.add(MESSAGE, ANSWER, address, (calls.words,), permit, None)
    assert answers.count == 0
    assert answers.add(MESSAGE, ANSWER, calls.function, (calls.words,), permit, None)


# Slots


def test_closed_or_taken_slots_leave_the_message(make_ends: Any, calls: Calls) -> None:
    ends = make_ends(slots=1)
    ends.add(calls)
    assert ends.slots.is_open and ends.slots.close() == ()
    assert ends.ask(MESSAGE) == b"python"
    ends.slots.open()
    assert ends.ask(MESSAGE) == ANSWER
    other, gate = make_ends(slots=1), Gate()
    other.permit = ends.permit
    other.add(gate)
    assert other.requests.write_message(MESSAGE)
    assert gate.entered.acquire(timeout=WAIT_S)
    assert ends.ask(MESSAGE) == b"python", "the only slot is taken"
    gate.may_end.set()
    assert other.results.read_message_blocking(SECOND_NS) == ANSWER


def test_a_slot_that_was_held_when_the_slots_were_closed_is_reported_once(make_ends: Any) -> None:
    ends, gate = make_ends(), Gate()
    ends.add(gate, call="the call")
    assert ends.requests.write_message(MESSAGE)
    assert gate.entered.acquire(timeout=WAIT_S)
    (slot,) = ends.slots.close()
    assert ends.slots.close() == ()
    owner, began_ns = ends.slots.holder(slot)
    assert owner == 7 and began_ns == ends.answers.activity()[1]
    gate.may_end.set()
    assert ends.results.read_message_blocking(SECOND_NS) == ANSWER
    assert ends.ask(MESSAGE) == b"python"
    assert [event[:3] for event in ends.events] == [("the call", slot, 0)]
    assert ends.slots.holder(slot) == (0, 0)
    ends.slots.open()
    assert ends.ask(MESSAGE) == ANSWER and len(ends.events) == 1


def test_no_slot_has_two_holders_and_every_closing_gets_its_reports(make_ends: Any) -> None:
    """Three tables take turns in two slots, which are closed and opened again all the time."""
    slots = fmq.Slots(2)
    slots.open()
    inside, most, lock = [0], [0], threading.Lock()

    @Function
    def call(*words: int) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        os.sched_yield()
        with lock:
            inside[0] -= 1
        return 0

    every = [make_ends() for _ in range(3)]
    for ends in every:
        ends.answers.add(MESSAGE, ANSWER, address_of(call), ((), ()), fmq.Permit(slots, 1), "call")
    may_end = threading.Event()

    def ask(ends: Ends) -> None:
        while not may_end.is_set():
            assert ends.ask(MESSAGE) in (ANSWER, b"python")

    clients = [threading.Thread(target=ask, args=(ends,)) for ends in every]
    for client in clients:
        client.start()
    adopted = 0
    for _ in range(100):
        held = slots.close()
        adopted += len(held)
        deadline = threading.Event()
        timer = threading.Timer(WAIT_S, deadline.set)
        timer.start()
        while sum(len(ends.events) for ends in every) < adopted:
            os.sched_yield()
            assert not deadline.is_set(), "a holder was not reported"
        timer.cancel()
        assert inside[0] == 0, "closed, and all holders reported: nothing runs"
        slots.open()
        os.sched_yield()
    may_end.set()
    for client in clients:
        client.join(WAIT_S)
    assert most[0] <= 2 and sum(len(ends.events) for ends in every) == adopted
    assert all(event[1] in (0, 1) for ends in every for event in ends.events)


def test_a_withdrawn_permit_leaves_the_message_and_a_call_that_runs_ends(make_ends: Any) -> None:
    ends, gate = make_ends(), Gate()
    ends.add(gate)
    assert ends.requests.write_message(MESSAGE)
    assert gate.entered.acquire(timeout=WAIT_S)
    assert not ends.permit.is_withdrawn
    ends.permit.withdraw()
    gate.may_end.set()
    assert ends.results.read_message_blocking(SECOND_NS) == ANSWER
    assert ends.permit.is_withdrawn and ends.ask(MESSAGE) == b"python"


# Lives


def test_what_a_call_keeps_alive_is_dropped_when_it_is_forgotten(make_ends: Any, calls: Calls) -> None:
    ends = make_ends()
    kept = Kept()
    dropped = weakref.ref(kept)
    ends.add(calls, call=kept)
    del kept
    gc.collect()
    assert dropped() is not None and ends.ask(MESSAGE) == ANSWER
    ends.answers.clear()  # While the thread waits for a message.
    gc.collect()
    assert dropped() is None


def test_a_running_call_that_is_forgotten_keeps_everything_until_it_ends(make_ends: Any) -> None:
    ends, gate = make_ends(), Gate()
    kept = Kept()
    dropped = threading.Event()
    weakref.finalize(kept, dropped.set)
    ends.add(gate, call=kept)
    del kept
    assert ends.requests.write_message(MESSAGE)
    assert gate.entered.acquire(timeout=WAIT_S)
    ends.answers.clear()
    gc.collect()
    assert ends.answers.count == 0 and not dropped.is_set()
    gate.may_end.set()
    assert ends.results.read_message_blocking(SECOND_NS) == ANSWER
    assert dropped.wait(WAIT_S), "dropped by the thread of the call, without a further message"
    assert ends.ask(MESSAGE) == b"python"


def test_a_table_that_is_dropped_drops_its_calls(calls: Calls) -> None:
    answers, kept = fmq.Answers(), Kept()
    dropped = weakref.ref(kept)
    answers.add(MESSAGE, ANSWER, calls.function, (calls.words,), fmq.Permit(fmq.Slots(1), 1), kept)
    del kept
    del answers
    gc.collect()
    assert dropped() is None


# Endpoints


def test_an_endpoint_that_is_served_is_refused_to_every_other_call(
    make_ends: Any, calls: Calls, parked: Any
) -> None:
    ends = make_ends()
    ends.add(calls)
    assert ends.ask(MESSAGE) == ANSWER
    assert ends.reader.state == ends.writer.state == "open"
    for call in (
        ends.reader.read_message,
        lambda: ends.writer.write_message(b""),
        lambda: ends.answers.serve(ends.reader, ends.writer),
    ):
        with pytest.raises(fmq.InvalidArgument):
            call()
    assert ends.reader.available_to_read() == 0 and ends.writer.available_to_write() > 0
    assert ends.reader.statistics().read_count > 0
    assert ends.ask(MESSAGE) == ANSWER


@pytest.mark.parametrize("how", ["interrupt", "close the reader", "close the writer"])
def test_serving_ends_with_its_queues(make_ends: Any, calls: Calls, how: str) -> None:
    ends = make_ends()
    ends.add(calls)
    assert ends.ask(MESSAGE) == ANSWER
    if how == "interrupt":
        ends.reader.interrupt()
    elif how == "close the reader":
        ends.reader.close()
    else:
        ends.writer.close()
        ends.requests.write_message(MESSAGE)
    ends.thread.join(WAIT_S)
    assert not ends.thread.is_alive()
    assert calls.count == 1


def test_queues_that_cannot_be_served_are_refused(calls: Calls, make: Any) -> None:
    answers = fmq.Answers()
    good, other = make(1, 64), make(1, 64)
    for bad in (
        make(8, 8),
        make(1, 64, event_flag=False),
        make(1, 64, flavour=fmq.Flavour.UNSYNCHRONIZED),
        good,
    ):
        with pytest.raises(fmq.InvalidArgument):
            answers.serve(good, bad)
        assert good.state == "open" and good.write_message(b"x") and good.read_message() == b"x"
    other.close()
    with pytest.raises(fmq.ClosedQueue):
        answers.serve(good, other)
    with pytest.raises(fmq.InvalidArgument):
        answers.serve(good, None)  # type: ignore[arg-type]


def test_a_window_of_spinning_changes_no_answer(make_ends: Any, calls: Calls) -> None:
    ends = make_ends(spin_ns=50_000)
    ends.add(calls)
    assert [ends.ask(MESSAGE) for _ in range(200)] == [ANSWER] * 200
    assert calls.count == 200

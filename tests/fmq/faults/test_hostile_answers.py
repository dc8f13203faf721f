"""Hostile clients of a service whose messages C functions answer, and deaths at every numbered point of it."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

import fmq
from fmq import _native
from tests.fmq.answering import ANSWER, MESSAGE, SECOND_NS, WAIT_S, Calls, Gate


def mutated(drawn: random.Random, good: bytes) -> bytes:
    """Half of them valid, the others altered in a few bits, cut, or of random bytes."""
    kind = drawn.random()
    if kind < 0.5:
        return good
    if kind < 0.8:
        changed = bytearray(good)
        for _ in range(drawn.choice((1, 1, 2, 5))):
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
        return bytes(changed)
    if kind < 0.9:
        return good[: drawn.randrange(len(good))]
    return drawn.randbytes(drawn.randrange(400))


@pytest.mark.parametrize("count", [4_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_hostile_messages_are_answered_or_left_and_never_called_with_altered_words(
    make_ends: Any, calls: Calls, count: int
) -> None:
    ends, drawn = make_ends(), random.Random(22)
    good = drawn.randbytes(150)
    ends.add(calls, good)
    expected = 0
    for _ in range(count):
        message = mutated(drawn, good)
        expected += message == good
        assert ends.ask(message) == (ANSWER if message == good else b"python")
    assert calls.count == expected
    assert ends.answers.activity()[0] == expected


@pytest.mark.forked("any")
def test_a_message_that_is_rewritten_while_it_is_read_is_taken_as_one_or_the_other(
    make_ends: Any, peer: Any
) -> None:
    """Another process writes two values in turns over the end of each message, one of which is known."""
    head, known, other = b"same bytes ", b"K" * 8, b"O" * 8
    ends, gate = (
        make_ends(request_bytes=32),
        Gate(),
    )  # One message fills the ring: it is always at the same place.
    gate.may_end.set()
    ends.add(gate, head + known)
    rewriting = peer(ends.requests)
    rewriting.begin(f"rewrite({8 + len(head)}, {other!r}, {known!r})")
    assert rewriting._line() == "rewriting"
    got = [ends.ask(head + known) for _ in range(2_000)]
    rewriting.begin("")
    assert rewriting.finish() > 0
    assert set(got) <= {ANSWER, b"python"}
    assert len(gate.got) == got.count(ANSWER) and set(gate.got) <= {(1, 2, 0, 0, 0, 0)}
    assert len(ends.left) == got.count(b"python")
    assert all(message[: len(head)] == head and len(message) == 19 for message in ends.left)


@pytest.mark.parametrize("word", ["READPTR", "WRITEPTR"])
@pytest.mark.parametrize("value", [1, 2**63, 2**64 - 1])
def test_impossible_counters_end_in_the_error_of_python(
    make_ends: Any, calls: Calls, counters: Any, word: str, value: int
) -> None:
    ends = make_ends()
    ends.add(calls)
    assert ends.ask(MESSAGE) == ANSWER
    memory = counters(ends.requests)
    at = ends.requests.descriptor.grantors[fmq.Grantor[word]].offset
    memory[at : at + 8] = value.to_bytes(8, "little")
    ends.thread.join(WAIT_S)
    assert not ends.thread.is_alive()
    assert isinstance(ends.failure, fmq.CorruptQueue) and calls.count == 1
    ends.failure = None


def test_a_corrupt_header_ends_in_the_error_of_python(make_ends: Any, calls: Calls, counters: Any) -> None:
    ends = make_ends()
    ends.add(calls)
    memory = counters(ends.requests)
    data = ends.requests.descriptor.grantors[fmq.Grantor.DATA]
    counter = ends.requests.descriptor.grantors[fmq.Grantor.WRITEPTR].offset
    memory[data.offset : data.offset + 8] = b"\xff" * 8
    memory[counter : counter + 8] = (32).to_bytes(8, "little")
    ends.thread.join(WAIT_S)
    assert isinstance(ends.failure, fmq.CorruptQueue) and calls.count == 0
    ends.failure = None


# Deaths


@pytest.mark.sampled(4)
@pytest.mark.forked("any")
@pytest.mark.parametrize("point", [12, 14, 2, 4, 5, 6, 8, 41, 42, 43, 44, 45, 46])
def test_a_process_that_dies_while_it_serves_leaves_all_of_an_answer_or_nothing(
    make: Any, point: int
) -> None:
    """A new endpoint continues where the counters are: the message is there still, or taken, and an answer is whole."""
    requests, results = make(1, 1 << 12), make(1, 1 << 12)
    assert requests.write_message(MESSAGE)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(int(WAIT_S))
            os.environ["FMQ_DEBUG_POINTS"] = "1"
            reader = fmq.MessageQueue.attach(requests.descriptor, requests.fds)
            writer = fmq.MessageQueue.attach(results.descriptor, results.fds)
            counting, slots, answers = Calls(), fmq.Slots(1), fmq.Answers()
            slots.open()
            permit = fmq.Permit(slots, 1)
            answers.add(MESSAGE, ANSWER, counting.function, (counting.words,), permit, None)
            _native.die_at(point)
            answers.serve(reader, writer)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it did not come to the point"
    with fmq.MessageQueue.attach(requests.descriptor, requests.fds) as reader:
        left = reader.read_message()
    answer = results.read_message_blocking(SECOND_NS // 20)
    assert left in (None, MESSAGE) and answer in (None, ANSWER)
    assert left is None or answer is None, "answered, and there still"
    if point in (41, 42, 12):
        assert left == MESSAGE
    if point in (44, 2, 4):
        assert left is None and answer is None
    if point in (45, 46):
        assert answer == ANSWER

"""Turns of threads that copy and free much memory."""

from __future__ import annotations

import os
import threading

import pytest

from aionn.platform import memory_turns
from aionn.platform.descriptors import close_apart
from aionn.platform.memory_turns import memory_turn

WATCHDOG_S = 30


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_turns, "_has_turns", True)


def test_second_thread_waits_for_the_end_of_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_turns, "WAIT_S_MAX", WATCHDOG_S)
    order: list[str] = []
    begins = threading.Event()

    def second() -> None:
        begins.set()
        with memory_turn():
            order.append("second")

    thread = threading.Thread(target=second)
    with memory_turn():
        thread.start()
        assert begins.wait(WATCHDOG_S)
        order.append("first")
    thread.join(WATCHDOG_S)
    assert order == ["first", "second"]


def test_thread_continues_without_a_turn_that_does_not_end() -> None:
    with memory_turn(), memory_turn():
        pass
    assert memory_turns._turn.acquire(blocking=False)  # What was not taken was not given back.
    memory_turns._turn.release()


def test_more_processors_need_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_turns, "_has_turns", False)
    with memory_turn():
        assert memory_turns._turn.acquire(blocking=False)
        memory_turns._turn.release()


def test_memory_is_freed_in_its_turn_and_closings_that_may_wait_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A descriptor of a FUSE file may close never: nothing is to wait for it."""
    during: dict[int, bool] = {}
    closing = os.closerange

    def noted(begin: int, end: int) -> None:
        for fd in range(begin, end):
            during[fd] = memory_turns._turn.locked()
        closing(begin, end)

    monkeypatch.setattr(os, "closerange", noted)
    memory = os.memfd_create("freed", os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    closed = threading.Event()
    close_apart([memory, reading, writing], lambda _: closed.set())
    assert closed.wait(WATCHDOG_S)
    assert during == {memory: True, reading: False, writing: False}


def test_turn_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), memory_turn():
        raise ZeroDivisionError
    assert not memory_turns._turn.locked()

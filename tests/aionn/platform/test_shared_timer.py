"""One timer of the kernel for many calls of a loop."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time

import anyio
import pytest

from aionn.platform import kernel_timer
from aionn.platform.kernel_timer import CANCELLED_MAX, CallTable, SharedTimer, TimedCall, goes_by_kernel
from aionn.testing.clock import VirtualClockLoop

WATCHDOG_S = 30.0
MS = 1_000_000


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times that the kernel was asked for."""
    seen: list[int] = []
    set_timer = kernel_timer._set_timer

    def noted(fd: int, time_ns: int, flags: int) -> None:
        seen.append(time_ns)
        set_timer(fd, time_ns, flags)

    monkeypatch.setattr(kernel_timer, "_set_timer", noted)
    return seen


def test_calls_come_in_the_order_of_their_times_and_of_their_addition() -> None:
    table, seen = CallTable(), []
    for time_ns, name in ((3, "c"), (1, "a"), (3, "d"), (2, "b")):
        table.add(time_ns, lambda name=name: seen.append(name))  # type: ignore[misc]
    assert table.first_ns() == 1 and table.take_due(0) is None
    while (call := table.take_due(3)) is not None:
        call()
    assert seen == ["a", "b", "c", "d"] and table.first_ns() is None and not len(table)


def test_table_behaves_as_a_sorted_list_and_keeps_few_calls_that_were_taken_back() -> None:
    source = random.Random(22)
    table, model, now_ns = CallTable(), dict[int, tuple[int, TimedCall]](), 0
    called: list[int] = []
    for number in range(5000):
        kind = source.random()
        if kind < 0.5 or not model:
            time_ns = now_ns + source.randrange(1, 1000)
            model[number] = time_ns, table.add(time_ns, lambda number=number: called.append(number))  # type: ignore[misc]
        elif kind < 0.93:
            taken = source.choice(list(model))
            timed = model.pop(taken)[1]
            timed.cancel()
            timed.cancel()
        else:
            now_ns += source.randrange(300)
            expected = sorted((t, n) for n, (t, _) in model.items() if t <= now_ns)
            while (call := table.take_due(now_ns)) is not None:
                call()
            assert called == [n for _, n in expected]
            called.clear()
            for _, due in expected:
                model.pop(due)[1].cancel()
        assert table.first_ns() == min((t for t, _ in model.values()), default=None)
        assert len(table) - len(model) <= max(CANCELLED_MAX, len(model)) + 1


def test_executions_one_after_the_other_leave_nothing_in_the_table() -> None:
    table = CallTable()
    for time_ns in range(1000):
        table.add(time_ns, int).cancel()
        assert len(table) == 0


async def test_calls_come_at_their_times_and_never_before() -> None:
    timer, seen = SharedTimer(asyncio.get_running_loop()), []
    with anyio.fail_after(WATCHDOG_S):
        done, start_ns = anyio.Event(), time.monotonic_ns()
        for wait_ms in (30, 10, 20, 40):

            def note(due_ns: int = start_ns + wait_ms * MS, wait_ms: int = wait_ms) -> None:
                assert time.monotonic_ns() >= due_ns
                seen.append(wait_ms)
                if wait_ms == 40:
                    done.set()

            timer.at(start_ns + wait_ms * MS, note)
        timer.at(start_ns + 15 * MS, lambda: seen.append(0)).cancel()
        await done.wait()
    assert seen == [10, 20, 30, 40]
    timer.close()


async def test_times_that_have_passed_are_due_in_the_next_turn() -> None:
    timer = SharedTimer(asyncio.get_running_loop())
    with anyio.fail_after(WATCHDOG_S):
        for time_ns in (0, time.monotonic_ns()):
            done = anyio.Event()
            timer.at(time_ns, done.set)
            await done.wait()
    timer.close()


async def test_later_times_and_cancellations_make_no_call_of_the_kernel(settings: list[int]) -> None:
    timer, start_ns = SharedTimer(asyncio.get_running_loop()), time.monotonic_ns()
    for second in range(60, 160):
        timer.at(start_ns + second * 10**9, int).cancel()
    assert settings == [start_ns + 60 * 10**9]
    timer.at(start_ns + 30 * 10**9, int).cancel()
    assert len(settings) == 2
    timer.close()


async def test_timer_that_finds_nothing_to_call_is_stopped_and_can_be_set_again(settings: list[int]) -> None:
    timer = SharedTimer(asyncio.get_running_loop())
    with anyio.fail_after(WATCHDOG_S):
        timer.at(time.monotonic_ns() + MS, int).cancel()
        while settings[-1] != 0:
            await anyio.sleep(0.001)
        done = anyio.Event()
        timer.at(time.monotonic_ns() + MS, done.set)
        await done.wait()
    timer.close()


async def test_call_that_raises_keeps_the_others(caplog: pytest.LogCaptureFixture) -> None:
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    timer, done = SharedTimer(loop), anyio.Event()

    def fail() -> None:
        raise ValueError("planted")

    with anyio.fail_after(WATCHDOG_S):
        timer.at(1, fail)
        timer.at(2, done.set)
        await done.wait()
    assert [str(error) for error in reported] == ["planted"]
    loop.set_exception_handler(None)
    timer.close()


async def test_closed_timer_has_no_descriptor_and_makes_the_calls_that_were_asked_for() -> None:
    before = descriptors()
    timer = SharedTimer(asyncio.get_running_loop())
    assert len(descriptors()) == len(before) + 1
    timer.close()
    timer.close()
    assert descriptors() == before
    timer, done = SharedTimer(asyncio.get_running_loop()), anyio.Event()
    timer.at(time.monotonic_ns() + 10 * MS, done.set)
    timer.close()
    with anyio.fail_after(WATCHDOG_S):
        await done.wait()
    assert descriptors() == before


def test_timer_of_a_loop_that_was_closed_leaves_no_descriptor() -> None:
    before = descriptors()

    async def main() -> None:
        SharedTimer(asyncio.get_running_loop()).at(time.monotonic_ns() + 3600 * 10**9, int)

    asyncio.run(main())
    gc.collect()
    assert descriptors() == before


async def test_loop_without_room_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, before = asyncio.get_running_loop(), descriptors()

    def full(*arguments: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(loop, "add_reader", full)
    with pytest.raises(OSError, match="planted"):
        SharedTimer(loop)
    assert descriptors() == before


def test_only_loops_on_the_clock_of_the_kernel_go_by_it() -> None:
    real, virtual = asyncio.new_event_loop(), VirtualClockLoop()
    assert goes_by_kernel(real) and not goes_by_kernel(virtual)
    virtual.clock._now_s = time.monotonic()
    assert not goes_by_kernel(virtual)
    real.close()
    virtual.close()

"""Every race between two threads, step by step: one action is stopped before each bytecode in turn while another runs.

The package decides such races by single steps that the interpreter does not divide (see ``fence``), so this walks all the places
where one thread can overtake another once, instead of hoping for them.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading

import pytest

import fences
from fences import Chain, FenceStatus, SyncFence

PACKAGE = os.path.dirname(fences.__file__)
STEPS_MAX = 5000
"""Far above the bytecodes of any action here: the walk must come to its end."""
LOCK_WAIT_S = 0.002
"""How long the other thread may run before it counts as waiting for a lock that the stopped one holds."""


def stopped_at(step, action, other):
    """Run the action with the other in a second thread before its given bytecode; whether it got that far."""
    count = 0
    threads = []

    def each(frame, event, _):
        nonlocal count
        if event == "opcode":
            count += 1
            if count == step:
                sys.settrace(None)
                threads.append(threading.Thread(target=other))
                threads[0].start()
                threads[0].join(LOCK_WAIT_S)
        return each

    def enter(frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace = each  # Python 3.13 heeds the next line only in a frame that has a trace function.
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return each

    before = sys.gettrace()
    # Python 3.12 reports bytecodes only if it was asked to before `settrace`.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(before)
    if not threads:
        other()
    else:
        threads[0].join(60)
        assert not threads[0].is_alive()
    return bool(threads)


def walk(scenario, stride=1):
    """Check a scenario for every step. It makes a pair of actions and a check of what must hold after both."""
    for step in range(1, STEPS_MAX, stride):
        action, other, check = scenario()
        going_on = stopped_at(step, action, other)
        check()
        if not going_on:
            assert step > 5
            return
    raise AssertionError("the action did not come to its end")


def both_orders(scenario):
    """A scenario and the one with its actions exchanged."""

    def exchanged():
        action, other, check = scenario()
        return other, action, check

    walk(scenario)
    walk(exchanged)


@pytest.mark.parametrize("waiter_count", [0, 1, 2])
def test_work_attached_while_the_fence_is_signalled_runs_once(waiter_count):
    def scenario():
        fence, calls, made = SyncFence(), [], []
        for _ in range(waiter_count):
            fence.add_callback(lambda _: None)

        def check():
            assert calls == [1] and made[0].status is FenceStatus.SIGNALLED and fence.waiter_count == 0

        return (lambda: made.append(fence.then(lambda: calls.append(1)))), fence.signal, check

    both_orders(scenario)


@pytest.mark.parametrize("waiter_count", [0, 1, 2])
def test_callback_added_while_the_fence_is_signalled_is_called_once(waiter_count):
    def scenario():
        fence, calls = SyncFence(), []
        for _ in range(waiter_count):
            fence.then(lambda: None)

        def check():
            assert calls == [fence] and fence.waiter_count == 0

        return (lambda: fence.add_callback(calls.append)), fence.signal, check

    both_orders(scenario)


@pytest.mark.parametrize("waiter_count", [0, 1])
def test_callback_removed_while_the_fence_is_signalled_is_called_or_not_as_told(waiter_count):
    def scenario():
        fence, calls, removed = SyncFence(), [], []
        for _ in range(waiter_count):
            fence.add_callback(lambda _: None)
        fence.add_callback(calls.append)

        def check():
            assert len(calls) == (0 if removed[0] else 1) and fence.waiter_count == 0

        return (lambda: removed.append(fence.remove_callback(calls.append))), fence.signal, check

    both_orders(scenario)


def test_two_callbacks_added_at_once_are_both_called():
    def scenario():
        fence, first, second = SyncFence(), [], []

        def check():
            fence.signal()
            assert first == second == [fence]

        return (lambda: fence.add_callback(first.append)), (lambda: fence.add_callback(second.append)), check

    walk(scenario)


def test_callback_added_while_another_is_removed_is_called():
    def scenario():
        fence, first, second = SyncFence(), [], []
        fence.add_callback(first.append)

        def check():
            fence.signal()
            assert (first, second) == ([], [fence])

        return (
            (lambda: fence.add_callback(second.append)),
            (lambda: fence.remove_callback(first.append)),
            check,
        )

    both_orders(scenario)


def test_of_two_that_finish_one_wins():
    def scenario():
        fence, wins, calls = SyncFence(), [], []
        fence.add_callback(calls.append)

        def check():
            assert sorted(wins) in ([("bad", False), ("ok", True)], [("bad", True), ("ok", False)])
            assert fence.status is (FenceStatus.SIGNALLED if ("ok", True) in wins else FenceStatus.FAILED)
            assert calls == [fence]

        return (
            (lambda: wins.append(("ok", fence.try_signal()))),
            (lambda: wins.append(("bad", fence.try_fail("x")))),
            check,
        )

    both_orders(scenario)


def test_chained_fence_is_closed_or_run():
    def scenario():
        root, calls = SyncFence(), []
        fence = root.then(lambda: calls.append(1))
        after = fence.then(lambda: None)

        def check():
            assert fence.status is after.status is (FenceStatus.SIGNALLED if calls else FenceStatus.FAILED)

        return root.signal, fence.close, check

    both_orders(scenario)


def test_merged_fence_finishes_once_whichever_part_is_last():
    for combine in (fences.merge, fences.first):

        def scenario(combine=combine):
            a, b, calls = SyncFence(), SyncFence(), []
            combined = combine([a, b])
            combined.add_callback(calls.append)

            def check():
                assert calls == [combined] and a.waiter_count == b.waiter_count == 0

            return a.signal, b.signal, check

        both_orders(scenario)


@pytest.mark.parametrize("ask", ["fileno", "duplicate"])
def test_descriptor_asked_for_while_the_fence_is_signalled_becomes_readable(ask):
    def scenario():
        fence, numbers = SyncFence(), []

        def check():
            assert select.select(numbers, [], [], 0)[0] == numbers
            imported = SyncFence.from_fd(numbers[0])
            assert imported.signal_time_ns == 5
            if ask == "duplicate":
                os.close(numbers[0])
            fence.close()

        return (lambda: numbers.append(getattr(fence, ask)())), (lambda: fence.signal(5)), check

    both_orders(scenario)


def test_point_asked_for_while_the_chain_reaches_it_is_signalled():
    def scenario():
        root, made = SyncFence(), []
        chain = Chain(root)
        for _ in range(3):
            chain.append(lambda: None)

        def check():
            assert made[0].status is FenceStatus.SIGNALLED and chain.pending_count == 0

        return (lambda: made.append(chain.fence(2))), root.signal, check

    both_orders(scenario)


def test_work_appended_while_the_chain_is_let_go_on_runs_once():
    def scenario():
        device, calls = SyncFence(), []
        chain = Chain()
        chain.append(lambda: device)

        def check():
            assert calls == [1] and chain.value == 2

        return (lambda: chain.append(lambda: calls.append(1))), device.signal, check

    both_orders(scenario)


def test_work_appended_while_another_thread_runs_the_works_runs_once():
    def scenario():
        root, calls = SyncFence(), []
        chain = Chain(root)
        chain.append(lambda: calls.append(1))

        def check():
            assert calls == [1, 2] and chain.value == 2

        return (lambda: chain.append(lambda: calls.append(2))), root.signal, check

    both_orders(scenario)


@pytest.fixture
def stride(request):
    """How many bytecodes from stop to stop where each stop costs milliseconds: every one only with --long."""
    return 1 if request.config.getoption("--long") else 7


LATE_S = 0.005
"""When a fence finishes that was not finished at a step: the waiter was asleep before it came to that step."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("how", ["signal", "close"])
def test_task_that_begins_to_wait_while_the_fence_finishes_wakes(imported, how, stride):
    loop = asyncio.new_event_loop()

    def scenario():
        source = SyncFence()
        fence = SyncFence.from_fd(source.fileno()) if imported else source
        finish = fence.close if how == "close" else source.try_signal

        async def wait():
            late = loop.call_later(LATE_S, finish)
            try:
                async with asyncio.timeout(30):
                    await fence
            except fences.FenceError:
                assert how == "close"
            late.cancel()

        def check():
            assert fence.status is not FenceStatus.PENDING and fence.waiter_count == 0
            loop.run_until_complete(asyncio.sleep(0))
            source.close()

        return (lambda: loop.run_until_complete(wait())), finish, check

    try:
        walk(scenario, stride)
    finally:
        loop.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("how", ["signal", "close"])
def test_thread_that_begins_to_wait_while_the_fence_finishes_wakes(imported, how, stride):
    def scenario():
        source = SyncFence()
        fence = SyncFence.from_fd(source.fileno()) if imported else source
        finish = fence.close if how == "close" else source.try_signal
        late = threading.Timer(LATE_S, finish)

        def wait():
            late.start()
            try:
                assert fence.wait(30 * 10**9)
            except fences.FenceError:
                assert how == "close"

        def check():
            late.join()
            assert fence.status is not FenceStatus.PENDING and fence.waiter_count == 0
            source.close()

        return wait, finish, check

    walk(scenario, stride)


def test_imported_fence_closed_while_a_dependant_is_attached_fails_it():
    loop = asyncio.new_event_loop()

    def scenario():
        source, made = SyncFence(), []
        fence = SyncFence.from_fd(source.fileno())

        async def attach():
            made.append(fence.then(lambda: None))

        def check():
            assert made[0].status is FenceStatus.FAILED
            loop.run_until_complete(asyncio.sleep(0))
            source.close()

        return (lambda: loop.run_until_complete(attach())), fence.close, check

    try:
        walk(scenario)
    finally:
        loop.close()

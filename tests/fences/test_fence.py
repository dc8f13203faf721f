"""SyncFence in one process: states, refusals, waiting, callbacks, chains."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import logging
import pickle
import sys
import threading
import tracemalloc

import pytest

import fences
from fences import FenceError, FenceStateError, FenceStatus, SyncFence

HOUR_NS = 3600 * 10**9


def failed(cause="broken", name="culprit"):
    fence = SyncFence(name)
    fence.fail(cause)
    return fence


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


# States


def test_new_fence_is_pending():
    fence = SyncFence()
    assert (fence.status, fence.signal_time_ns, fence.error) == (FenceStatus.PENDING, None, None)
    assert not fence.imported


def test_signal_records_the_given_time():
    fence = SyncFence()
    fence.signal(at_ns=123)
    assert (fence.status, fence.signal_time_ns, fence.error) == (FenceStatus.SIGNALLED, 123, None)


@pytest.mark.parametrize("at_ns", [0, 2**63 - 1])
def test_every_time_of_the_range_is_kept(at_ns):
    fence, earlier = SyncFence(), SyncFence.signalled(0)
    merged = fences.merge([fence, earlier])
    fence.signal(at_ns)
    assert fence.signal_time_ns == merged.signal_time_ns == at_ns


def test_signal_time_comes_from_the_clock_that_is_set():
    before = fences.set_clock(lambda: 77)
    try:
        fence = SyncFence()
        fence.signal()
        assert fence.signal_time_ns == 77 == fences.now_ns()
    finally:
        fences.set_clock(before)


def test_failure_keeps_origin_and_cause():
    cause = ValueError("bad tile")
    fence = failed(cause, "conv")
    assert fence.status is FenceStatus.FAILED
    assert fence.signal_time_ns is None
    error = fence.error
    assert error is not None and error is not fence.error
    assert (error.origin, error.__cause__, str(error)) == ("conv", cause, "conv: ValueError: bad tile")


def test_failure_with_a_fence_error_is_the_same_failure():
    fence = SyncFence("second")
    fence.fail(failed(KeyError("k"), "first").error)
    assert fence.error.origin == "first"
    assert isinstance(fence.error.__cause__, KeyError)


def test_failure_takes_an_origin_and_time():
    fence = SyncFence()
    fence.fail("late", origin="scheduler", at_ns=5)
    assert (fence.error.origin, fence.error.at_ns, fence.error.__cause__) == ("scheduler", 5, None)


def test_cause_whose_text_cannot_be_made_still_fails_the_fence():
    class Awkward(Exception):
        def __str__(self):
            raise RuntimeError

    assert "Awkward" in failed(Awkward()).error.message


def test_fence_error_survives_pickle():
    error = pickle.loads(pickle.dumps(FenceError("a", "b", 3)))
    assert (error.origin, error.message, error.at_ns) == ("a", "b", 3)


def test_signalled_makes_a_finished_fence():
    assert SyncFence.signalled(9).signal_time_ns == 9
    assert SyncFence.signalled().status is FenceStatus.SIGNALLED


def test_repr_shows_the_state():
    fence = SyncFence("x")
    assert repr(fence) == "<x: pending>"
    fence.signal(4)
    assert repr(fence) == "<x: signalled at 4 ns>"
    assert "broken" in repr(failed())


# Refusals


@pytest.mark.parametrize("first", ["signal", "fail"])
@pytest.mark.parametrize("second", ["signal", "fail"])
def test_second_finish_is_refused_and_changes_nothing(first, second):
    fence = SyncFence()
    finish = {"signal": lambda: fence.signal(1), "fail": lambda: fence.fail("first", at_ns=1)}
    again = {"signal": lambda: fence.signal(2), "fail": lambda: fence.fail("second", at_ns=2)}
    finish[first]()
    state = (fence.status, fence.signal_time_ns, repr(fence))
    with pytest.raises(FenceStateError):
        again[second]()
    assert fence.try_signal() is False
    assert fence.try_fail("third") is False
    assert (fence.status, fence.signal_time_ns, repr(fence)) == state


@pytest.mark.parametrize(
    "at_ns, error", [(-1, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_time_is_refused_and_changes_nothing(at_ns, error):
    fence = SyncFence()
    with pytest.raises(error):
        fence.signal(at_ns)
    with pytest.raises(error):
        fence.fail("x", at_ns=at_ns)
    assert fence.status is FenceStatus.PENDING


def test_cause_of_a_foreign_type_is_refused():
    fence = SyncFence()
    with pytest.raises(TypeError):
        fence.fail(5)
    assert fence.status is FenceStatus.PENDING


@pytest.mark.parametrize("make", [SyncFence, SyncFence.signalled, failed])
def test_negative_timeout_is_refused_in_every_state(make):
    fence = make()
    status = fence.status
    with pytest.raises(ValueError, match="timeout_ns"):
        fence.wait(-1)
    with pytest.raises(TypeError):
        fence.wait(0.5)
    assert fence.status is status


def test_dependent_fence_is_finished_by_what_it_depends_on_alone():
    source = SyncFence()
    for fence in (
        source.then(lambda: None),
        fences.merge([source]),
        fences.first([source]),
        fences.Timeline().fence(1),
    ):
        for finish, *arguments in (
            (fence.signal,),
            (fence.try_signal,),
            (fence.fail, "x"),
            (fence.try_fail, "x"),
        ):
            with pytest.raises(FenceStateError):
                finish(*arguments)
        assert fence.status is FenceStatus.PENDING


# Awaiting


def test_await_returns_none_or_raises(run):
    async def main():
        assert await SyncFence.signalled() is None
        with pytest.raises(FenceError, match="culprit"):
            await failed()
        fence = SyncFence()
        asyncio.get_running_loop().call_soon(fence.signal)
        assert await fence is None
        assert fence.waiter_count == 0

    run(main())


def test_await_of_finished_fence_does_not_yield(run):
    async def main():
        others = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        await SyncFence.signalled()
        with pytest.raises(FenceError):
            await failed()
        assert others == []

    run(main())


def test_each_waiter_of_a_failure_gets_its_own_exception(run):
    async def main():
        fence = SyncFence("f")
        tasks = [asyncio.ensure_future(asyncio.wait_for(fence, None)) for _ in range(3)]
        await turns()
        fence.fail(OSError("gone"))
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        assert all(isinstance(error, FenceError) and isinstance(error.__cause__, OSError) for error in errors)

    run(main())


def test_await_without_asyncio_is_refused():
    with pytest.raises(RuntimeError):
        next(SyncFence().__await__())


# Threads


def test_wait_of_zero_only_looks():
    assert SyncFence().wait(0) is False
    assert SyncFence.signalled().wait(0) is True
    with pytest.raises(FenceError):
        failed().wait(0)


def test_wait_ends_after_the_timeout_and_leaves_nothing():
    fence = SyncFence()
    assert fence.wait(1_000_000) is False
    assert fence.waiter_count == 0


def test_wait_takes_timeouts_beyond_the_range_of_the_clock():
    fence = SyncFence()
    thread = threading.Timer(0.01, fence.signal)
    thread.start()
    assert fence.wait(2**80) is True
    thread.join()


@pytest.mark.parametrize("timeout_ns", [None, HOUR_NS])
def test_threads_wake_on_signal(timeout_ns):
    fence = SyncFence()
    results = []
    threads = [threading.Thread(target=lambda: results.append(fence.wait(timeout_ns))) for _ in range(8)]
    for thread in threads:
        thread.start()
    while fence.waiter_count < 8:
        threading.Event().wait(0.001)
    fence.signal()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_threads_wake_on_failure():
    fence = SyncFence()
    timer = threading.Timer(0.01, fence.fail, ["no"])
    timer.start()
    with pytest.raises(FenceError, match="no"):
        fence.wait()
    timer.join()


def test_wait_refuses_to_block_a_running_loop(run):
    async def main():
        with pytest.raises(RuntimeError, match="event loop"):
            SyncFence().wait(HOUR_NS)
        assert SyncFence().wait(0) is False
        assert SyncFence.signalled().wait() is True

    run(main())


# Callbacks


def test_callbacks_run_once_in_order_after_the_state_is_visible():
    fence = SyncFence()
    seen = []
    for index in range(4):
        fence.add_callback(lambda which, index=index: seen.append((index, which is fence, which.status)))
    fence.signal()
    fence.try_signal()
    assert seen == [(index, True, FenceStatus.SIGNALLED) for index in range(4)]
    assert fence.waiter_count == 0


def test_callback_added_late_runs_at_once():
    seen = []
    failed().add_callback(seen.append)
    assert len(seen) == 1


def test_removed_callback_does_not_run():
    fence = SyncFence()
    seen, kept = [], []
    for _ in range(2):
        fence.add_callback(seen.append)
        fence.add_callback(kept.append)
        assert fence.remove_callback(seen.append) is True
        assert fence.remove_callback(seen.append) is False
        assert fence.remove_callback(kept.append) is True
    fence.add_callback(kept.append)
    fence.signal()
    assert (seen, kept) == ([], [fence])
    assert fence.remove_callback(kept.append) is False


def test_same_callback_twice_is_refused():
    fence = SyncFence()
    for callback in ([].append, [1].append):
        fence.add_callback(callback)
        with pytest.raises(ValueError, match="already"):
            fence.add_callback(callback)
    assert fence.waiter_count == 2


def test_callback_that_raises_is_logged_and_stops_nobody(caplog):
    fence = SyncFence()
    seen = []
    fence.add_callback(lambda _: 1 / 0)
    fence.add_callback(seen.append)
    with caplog.at_level(logging.ERROR, "fences"):
        fence.signal()
    assert seen == [fence]
    assert "ZeroDivisionError" in caplog.text


def test_interrupt_in_a_callback_comes_out_after_the_others_ran():
    fence = SyncFence()
    seen = []

    def interrupt(_):
        raise KeyboardInterrupt

    fence.add_callback(interrupt)
    fence.add_callback(seen.append)
    with pytest.raises(KeyboardInterrupt):
        fence.signal()
    assert seen == [fence]


def test_fence_signalled_in_a_callback_runs_its_waiters_after_that_callback():
    outer, inner = SyncFence(), SyncFence()
    order = []
    inner.add_callback(lambda _: order.append("inner"))

    def relay(_):
        inner.signal()
        assert inner.status is FenceStatus.SIGNALLED
        order.append("outer")

    outer.add_callback(relay)
    outer.signal()
    assert order == ["outer", "inner"]


def test_callbacks_that_signal_each_other_do_not_nest():
    length = 50_000
    row = [SyncFence() for _ in range(length + 1)]
    for before, after in itertools.pairwise(row):
        before.add_callback(lambda _, after=after: after.signal())
    row[0].signal()
    assert row[-1].status is FenceStatus.SIGNALLED


# Chains


def test_work_runs_when_the_fence_before_is_signalled():
    root = SyncFence()
    calls = []
    fence = root.then(lambda: calls.append(1), "work")
    assert (calls, fence.status, fence.name) == ([], FenceStatus.PENDING, "work")
    root.signal()
    assert (calls, fence.status) == ([1], FenceStatus.SIGNALLED)


def test_work_after_a_finished_fence_runs_at_once():
    calls = []
    assert SyncFence.signalled().then(lambda: calls.append(1)).status is FenceStatus.SIGNALLED
    assert failed().then(lambda: calls.append(2)).error.origin == "culprit"
    assert calls == [1]


def test_many_dependants_of_one_fence_run_in_order():
    root = SyncFence()
    calls = []
    dependants = [root.then(lambda index=index: calls.append(index)) for index in range(5)]
    late = dependants[0].then(lambda: calls.append("late"))
    root.signal()
    assert calls == [0, 1, 2, 3, 4, "late"]
    assert late.status is FenceStatus.SIGNALLED


def test_work_that_raises_fails_its_fence_and_those_after():
    root = SyncFence()
    calls = []
    bad = root.then(lambda: 1 / 0, "bad")
    after = bad.then(lambda: calls.append(1), "after")
    root.signal()
    assert root.status is FenceStatus.SIGNALLED
    assert (bad.error.origin, after.error.origin) == ("bad", "bad")
    assert isinstance(after.error.__cause__, ZeroDivisionError)
    assert calls == []


def test_work_may_go_on_in_a_fence_that_it_returns():
    root, device = SyncFence(), SyncFence("device")
    fence = root.then(lambda: device)
    after = fence.then(lambda: None)
    root.signal()
    assert fence.status is FenceStatus.PENDING
    device.signal(55)
    assert fence.signal_time_ns == 55
    assert after.status is FenceStatus.SIGNALLED


def test_failure_of_the_returned_fence_names_that_fence():
    device = SyncFence("device")
    fence = SyncFence.signalled().then(lambda: device)
    device.fail("hot")
    assert fence.error.origin == "device"


def test_work_that_returns_something_else_or_itself_fails():
    fence = SyncFence.signalled().then(lambda: 5)
    assert isinstance(fence.error.__cause__, TypeError)
    root = SyncFence()
    holder = []
    holder.append(root.then(lambda: holder[0]))
    root.signal()
    assert isinstance(holder[0].error.__cause__, TypeError)
    holder.clear()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outcome", ["signal", "fail"])
def test_chain_of_100000_needs_no_recursion_and_one_turn(run, outcome):
    async def main():
        root = SyncFence("root")
        fence = root
        for _ in range(100_000):
            fence = fence.then(lambda: None)
        waiter = asyncio.ensure_future(asyncio.wait_for(fence, None))
        await turns()
        turn_count = 0
        loop = asyncio.get_running_loop()

        def count():
            nonlocal turn_count
            turn_count += 1
            if not waiter.done():
                loop.call_soon(count)

        loop.call_soon(count)
        if outcome == "signal":
            root.signal()
            await waiter
        else:
            root.fail(ValueError("boom"))
            with pytest.raises(FenceError, match="root") as caught:
                await waiter
            assert isinstance(caught.value.__cause__, ValueError)
        assert turn_count <= 3

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        run(main())
    finally:
        sys.setrecursionlimit(limit)


def test_dropping_a_pending_chain_of_100000_needs_no_recursion():
    root = fence = SyncFence()
    for _ in range(100_000):
        fence = fence.then(lambda: None)
    del fence
    del root
    gc.collect()


def test_finished_chain_keeps_no_link_alive():
    class Work:
        def __call__(self):
            return None

    import weakref

    root = SyncFence()
    work = Work()
    gone = weakref.ref(work)
    tail = root.then(work).then(lambda: None)
    link = weakref.ref(tail)
    del work, tail
    root.signal()
    gc.collect()
    assert gone() is None and link() is None


# Closing


def test_close_of_a_pending_fence_fails_it_once():
    with SyncFence("x") as fence:
        after = fence.then(lambda: None)
    fence.close()
    assert "closed while pending" in after.error.message
    assert after.error.origin == "x"


def test_close_of_a_finished_fence_changes_nothing():
    fence = SyncFence.signalled(3)
    fence.close()
    assert fence.signal_time_ns == 3


def test_closed_chained_fence_does_not_run_its_work():
    root = SyncFence()
    calls = []
    fence = root.then(lambda: calls.append(1))
    fence.close()
    root.signal()
    assert calls == []
    assert fence.status is FenceStatus.FAILED


def test_close_while_following_a_returned_fence_fails_at_once():
    device = SyncFence()
    fence = SyncFence.signalled().then(lambda: device)
    fence.close()
    assert fence.status is FenceStatus.FAILED
    device.signal()
    assert fence.status is FenceStatus.FAILED


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_fence_is_not_copied_since_nothing_could_finish_the_copy(duplicate):
    fence = SyncFence()
    with pytest.raises(TypeError, match="send_fence"):
        duplicate(fence)
    with pytest.raises(TypeError, match="send_fence"):
        duplicate(fence.then(lambda: None))
    fence.signal()


# Cost


def test_pending_fence_costs_at_most_200_bytes():
    count = 10_000
    row = [None] * count
    gc.collect()
    tracemalloc.start()
    for index in range(count):
        row[index] = SyncFence()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size_bytes / count <= 200


def test_link_of_a_pending_chain_costs_at_most_200_bytes():
    count = 10_000
    root = fence = SyncFence()

    def work():
        return None

    gc.collect()
    tracemalloc.start()
    for _ in range(count):
        fence = fence.then(work)
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size_bytes / count <= 200
    root.signal()

"""Chains of works submitted ahead."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref

import pytest

from fences import Chain, FenceError, FenceStateError, FenceStatus, SyncFence


def test_works_run_in_order_once_the_fence_before_is_signalled():
    root = SyncFence()
    chain = Chain(root, "c")
    calls = []
    points = [chain.append(lambda index=index: calls.append(index)) for index in range(4)]
    last = chain.fence(points[-1])
    assert (points, calls, chain.value, chain.appended) == ([1, 2, 3, 4], [], 0, 4)
    root.signal()
    assert (calls, chain.value, last.status) == ([0, 1, 2, 3], 4, FenceStatus.SIGNALLED)


def test_work_runs_at_once_when_nothing_stands_before_it():
    chain = Chain()
    calls = []
    assert chain.append(lambda: calls.append(1)) == 1
    assert (calls, chain.fence(1).status) == ([1], FenceStatus.SIGNALLED)


def test_chain_waits_for_the_fence_that_a_work_returns():
    chain = Chain()
    device = SyncFence("device")
    calls = []
    chain.append(lambda: device)
    second = chain.fence(chain.append(lambda: calls.append(2)))
    assert (calls, chain.value) == ([], 0)
    device.signal()
    assert (calls, chain.value, second.status) == ([2], 2, FenceStatus.SIGNALLED)


def test_finished_fences_returned_by_many_works_do_not_nest():
    root = SyncFence()
    chain = Chain(root)
    for _ in range(20_000):
        chain.append(SyncFence.signalled)
    root.signal()
    assert chain.value == 20_000


@pytest.mark.parametrize("how", ["root", "raises", "returned", "type", "fail"])
def test_failure_reaches_all_points_ahead_with_its_origin(how):
    root, device = SyncFence("root"), SyncFence("device")
    chain = Chain(root, "c")
    calls = []
    chain.append(lambda: calls.append(1))
    chain.append(
        {"raises": lambda: 1 / 0, "returned": lambda: device, "type": lambda: 5}.get(how, lambda: None)
    )
    chain.append(lambda: calls.append(3))
    row = [chain.fence(point) for point in (1, 2, 3)]
    if how == "root":
        root.fail("x")
    elif how == "fail":
        chain.fail("x")
        root.signal()
    else:
        root.signal()
        device.fail("hot")
    origin = {"root": "root", "raises": "c at 2", "returned": "device", "type": "c at 2", "fail": "c"}[how]
    reached = 0 if how in ("root", "fail") else 1
    assert [fence.status is FenceStatus.SIGNALLED for fence in row] == [reached == 1, False, False]
    assert {fence.error.origin for fence in row[reached:]} == {origin}
    assert calls == [1] * reached
    after = chain.append(lambda: calls.append("late"))
    assert chain.fence(after).error.origin == origin and calls == [1] * reached


def test_chain_of_a_failed_fence_fails():
    root = SyncFence("root")
    root.fail("x")
    chain = Chain(root)
    assert chain.fence(chain.append(lambda: None)).error.origin == "root"


def test_only_works_advance_a_chain():
    chain = Chain()
    with pytest.raises(FenceStateError):
        chain.advance(3)
    assert chain.value == 0


def test_work_appended_by_a_work_runs_after_it():
    chain = Chain()
    calls = []

    def first():
        chain.append(lambda: calls.append("second"))
        calls.append("first")

    chain.append(first)
    assert calls == ["first", "second"] and chain.value == 2


def test_interrupt_in_a_work_fails_the_chain_and_comes_out():
    chain = Chain(name="c")

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chain.append(interrupt)
    assert isinstance(chain.error.__cause__, KeyboardInterrupt)


def test_point_reached_while_the_chain_runs_has_the_time_of_asking():
    times = iter(range(10, 10_000))
    root = SyncFence()
    chain = Chain(root, clock=lambda: next(times))
    seen = []
    chain.append(lambda: None)
    chain.append(lambda: seen.append(chain.fence(1).status))
    root.signal()
    assert seen == [FenceStatus.SIGNALLED]


def test_works_that_ran_are_let_go():
    class Work:
        def __call__(self):
            return None

    root = SyncFence()
    chain = Chain(root)
    work = Work()
    gone = weakref.ref(work)
    chain.append(work)
    del work
    root.signal()
    assert gone() is None


def test_chain_of_100000_takes_one_turn_and_no_recursion(run):
    async def main():
        root = SyncFence("root")
        chain = Chain(root)
        for _ in range(100_000):
            chain.append(lambda: None)
        waiter = asyncio.ensure_future(asyncio.wait_for(chain.fence(100_000), None))
        await asyncio.sleep(0)
        root.signal()
        turn_count = 0
        while not waiter.done():
            await asyncio.sleep(0)
            turn_count += 1
        assert turn_count <= 3 and chain.value == 100_000

    run(main())


def test_awaiting_a_failed_chain_raises(run):
    async def main():
        chain = Chain(name="c")
        chain.append(lambda: 1 / 0)
        with pytest.raises(FenceError, match="c at 1: ZeroDivisionError"):
            await chain.fence(7)

    run(main())


def test_works_run_once_and_in_order_while_other_threads_let_them_go_on():
    """Works return fences that another thread signals at the same time as this one appends."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        chain = Chain()
        calls = []
        row = [SyncFence() for _ in range(500)]

        def work(index):
            calls.append(index)
            return row[index]

        thread = threading.Thread(target=lambda: [fence.signal() for fence in row])
        thread.start()
        points = [chain.append(lambda index=index: work(index)) for index in range(500)]
        assert chain.fence(points[-1]).wait(60 * 10**9)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert calls == list(range(500)) and chain.value == 500


def test_fences_asked_for_while_another_thread_runs_the_chain_all_finish():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        root = SyncFence()
        chain = Chain(root)
        for _ in range(5000):
            chain.append(lambda: None)
        thread = threading.Thread(target=root.signal)
        thread.start()
        row = [chain.fence(point) for point in range(1, 5001)]
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert {fence.status for fence in row} == {FenceStatus.SIGNALLED}
    assert chain.pending_count == 0


def test_chain_after_what_is_no_fence_is_rejected():
    with pytest.raises(
        TypeError, match=r"after: expected a SyncFence or None, got str; its name is Chain\(name=...\)"
    ):
        Chain("first")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"after: expected a SyncFence or None, got Chain$"):
        Chain(Chain())  # type: ignore[arg-type]

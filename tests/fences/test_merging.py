"""merge and first: outcomes, flattening, collapsing, cost."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

import fences
from fences import FenceStatus, SyncFence, Timeline, first, leaves, merge

MANY = pytest.mark.parametrize("count", [20_000, pytest.param(200_000, marks=pytest.mark.long)])
"""Twenty times the depth to which Python may recurse; the long form exceeds that of C as well."""

DEEP = pytest.mark.parametrize("depth", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
"""Of nests, each level of which costs more."""


def failed(cause="broken", name="culprit"):
    fence = SyncFence(name)
    fence.fail(cause)
    return fence


def test_merge_is_signalled_with_the_last_at_the_latest_time():
    a, b = SyncFence(), SyncFence()
    merged = merge([a, b, SyncFence.signalled(5)])
    a.signal(30)
    assert merged.status is FenceStatus.PENDING
    b.signal(20)
    assert merged.signal_time_ns == 30


def test_merge_fails_at_once_with_the_origin_of_the_part():
    a, b = SyncFence("a"), SyncFence("b")
    merged = merge([a, b])
    b.fail(ValueError("x"))
    assert merged.error.origin == "b" and isinstance(merged.error.__cause__, ValueError)
    assert a.waiter_count == 0 and merged.parts == ()
    a.signal()


def test_first_is_signalled_with_the_first_and_ignores_failures():
    a, b, c = SyncFence(), SyncFence(), SyncFence()
    any_fence = first([a, b, c])
    a.fail("x")
    assert any_fence.status is FenceStatus.PENDING
    b.signal(7)
    assert any_fence.signal_time_ns == 7
    assert c.waiter_count == 0
    c.signal(8)
    assert any_fence.signal_time_ns == 7


def test_first_fails_when_all_have_failed_as_the_last():
    a, b = SyncFence("a"), SyncFence("b")
    any_fence = first([b, a])
    b.fail("x")
    a.fail("y")
    assert (any_fence.error.origin, any_fence.error.message) == ("a", "y")


def test_finished_fences_collapse():
    assert merge([SyncFence.signalled(3), SyncFence.signalled(9), SyncFence.signalled(4)]).signal_time_ns == 9
    assert merge([SyncFence.signalled(3), failed(), SyncFence()]).error.origin == "culprit"
    assert first([SyncFence.signalled(3), SyncFence.signalled(9), SyncFence()]).signal_time_ns == 3
    assert first([failed("a", "a"), failed("b", "b")]).error.origin == "b"
    pending = SyncFence()
    assert merge([SyncFence.signalled(), pending]).parts == (pending,)
    assert first([failed(), pending]).parts == (pending,)


def test_merge_of_nothing_is_signalled_and_first_of_nothing_refused():
    assert merge([]).status is FenceStatus.SIGNALLED
    with pytest.raises(ValueError, match="at least one"):
        first([])


def test_what_is_no_fence_is_refused_and_leaves_nothing_attached():
    fence = SyncFence()
    for combine in (merge, first):
        with pytest.raises(TypeError, match="expected fences, got int"):
            combine([fence, 5])
    assert fence.waiter_count == 0


def test_merges_are_flattened():
    row = [SyncFence() for _ in range(6)]
    for combine in (merge, first):
        nested = combine([combine(row[:3]), combine([combine(row[2:4]), row[5]])])
        assert set(nested.parts) == {*row[:4], row[5]}


def test_flattening_a_merge_keeps_the_time_of_its_finished_parts():
    a, b = SyncFence(), SyncFence()
    inner = merge([a, b])
    a.signal(1000)
    outer = merge([inner])
    b.signal(5)
    assert outer.signal_time_ns == inner.signal_time_ns == 1000


def test_merge_inside_first_and_the_other_way_round_stay_whole():
    a, b, c = SyncFence(), SyncFence(), SyncFence()
    both = merge([a, b])
    assert first([both, c]).parts == (both, c)
    either = first([a, b])
    assert merge([either, c]).parts == (either, c)
    a.signal()
    assert either.status is FenceStatus.SIGNALLED and both.status is FenceStatus.PENDING


def test_one_entry_for_each_timeline():
    timelines = [Timeline(), Timeline()]
    points = [timeline.fence(point) for timeline in timelines for point in (3, 9, 5)]
    merged, any_fence = merge(points), first(points)
    assert [part.point for part in merged.parts] == [9, 9]
    assert [part.point for part in any_fence.parts] == [3, 3]
    timelines[0].advance(3)
    assert any_fence.status is FenceStatus.SIGNALLED
    timelines[0].advance(9, 50)
    timelines[1].advance(9, 40)
    assert merged.signal_time_ns == 50


def test_same_fence_many_times_is_one_part():
    fence = SyncFence()
    merged = merge([fence] * 5)
    assert merged.parts == (fence,) and fence.waiter_count == 1
    fence.signal()
    assert merged.status is FenceStatus.SIGNALLED


def test_closed_merge_lets_go_of_its_parts():
    row = [SyncFence() for _ in range(3)]
    for combine in (merge, first):
        combined = combine(row)
        combined.close()
        assert combined.status is FenceStatus.FAILED
        assert [fence.waiter_count for fence in row] == [0, 0, 0]


def test_long_lived_part_does_not_gather_what_is_over():
    shutdown = SyncFence()
    for _ in range(1000):
        work = SyncFence()
        any_fence = first([work, shutdown])
        work.signal()
        assert any_fence.status is FenceStatus.SIGNALLED
    assert shutdown.waiter_count == 0


@pytest.mark.parametrize("combine", [merge, first])
def test_merge_of_100000_mostly_signalled(combine):
    finished = [SyncFence.signalled(1) if combine is merge else failed() for _ in range(100)] * 999
    row = [SyncFence() for _ in range(100)]
    combined = combine([*finished, *row])
    assert len(combined.parts) == 100
    for fence in row:
        fence.signal()
    assert combined.status is FenceStatus.SIGNALLED


@MANY
def test_merge_of_many_pending_and_of_many_points(count):
    row = [SyncFence() for _ in range(count)]
    merged = merge(row)
    for fence in row:
        fence.signal(4)
    assert merged.signal_time_ns == 4
    timeline = Timeline()
    merged = merge(timeline.fence(point) for point in range(1, count + 1))
    assert len(merged.parts) == 1
    timeline.advance(count)
    assert merged.status is FenceStatus.SIGNALLED


def nested(combine, depth):
    """Each one combines the one before with a fence of its own; the outermost, and the fences."""
    combined, row = SyncFence(), []
    row.append(combined)
    for _ in range(depth):
        row.append(SyncFence())
        combined = combine([combined, row[-1]])
    return combined, row


@pytest.mark.parametrize("combine", [merge, first])
def test_nesting_takes_steps_and_room_in_proportion_to_its_depth(combine, monkeypatch):
    attached = 0
    attach = SyncFence._attach

    def counted(self, waiter):
        nonlocal attached
        attached += 1
        return attach(self, waiter)

    monkeypatch.setattr(SyncFence, "_attach", counted)
    counts = []
    for depth in (1000, 2000):
        attached = 0
        _, row = nested(combine, depth)
        counts.append((attached, sum(fence.waiter_count for fence in row)))
    for small, large in zip(*counts, strict=True):
        assert large < 2.2 * small


@pytest.mark.sampled(12)
@pytest.mark.parametrize("order", ["as made", "backwards", "shuffled"])
@pytest.mark.parametrize("combine", [merge, first])
@pytest.mark.thorough
def test_deeply_nested_finishes_as_a_flat_one_does(combine, order):
    deep, row = nested(combine, 2000)
    flat = combine(row)
    if order == "backwards":
        row.reverse()
    elif order == "shuffled":
        random.Random(5).shuffle(row)
    last = row.pop()
    for at_ns, fence in enumerate(row, 1):
        if combine is merge:
            fence.signal(at_ns)
        else:
            fence.fail("broken")
    assert deep.status is flat.status is FenceStatus.PENDING
    last.signal(1)
    assert deep.signal_time_ns == flat.signal_time_ns == (len(row) if combine is merge else 1)


@DEEP
def test_failure_comes_through_a_deep_nest_at_once(depth):
    deep, row = nested(merge, depth)
    row[0].fail("broken")
    assert deep.error.message == "broken"
    for fence in row[1:]:
        fence.signal()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combine", [merge, first])
@DEEP
def test_pending_nest_of_any_depth_is_freed(combine, depth):
    deep, row = nested(combine, depth)
    gone = weakref.ref(deep)
    del deep, row
    gc.collect()
    assert gone() is None


@MANY
def test_pending_chain_of_any_length_is_freed(count):
    source = last = SyncFence()
    for _ in range(count):
        last = last.then(lambda: None)
    gone = weakref.ref(last)
    del source, last
    gc.collect()
    assert gone() is None


@MANY
def test_following_fences_deep_inside_needs_no_recursion(count):
    innermost = followed = SyncFence()
    start = SyncFence.signalled(1)
    for _ in range(count):
        followed = start.then(lambda inner=followed: inner)
    innermost.signal(7)
    assert followed.signal_time_ns == 7


def test_leaves_of_a_nest_are_told_once_each():
    deep, row = nested(lambda parts: merge([first([merge(parts), parts[-1]]), *parts]), 300)
    assert set(leaves(deep)) == set(row)
    assert len(list(leaves(deep))) == len(row)
    assert list(leaves(row[0])) == [row[0]]


def test_merges_nested_1000_deep_need_no_recursion():
    leaf = SyncFence()
    merged = leaf
    for index in range(1000):
        merged = (merge if index % 2 else first)([merged, SyncFence()] if index % 2 == 0 else [merged])
    leaf.signal()
    assert merged.status is FenceStatus.SIGNALLED


def test_imported_parts_that_finished_unnoticed_collapse():
    source = SyncFence()
    imported = SyncFence.from_fd(source.fileno())
    source.signal(3)
    assert merge([imported]).signal_time_ns == 3
    source.close()


def test_merge_of_local_and_imported_fences(run):
    async def main():
        import asyncio

        source, local = SyncFence("far"), SyncFence("near")
        imported = SyncFence.from_fd(source.fileno())
        merged = fences.merge([imported, local])
        local.signal()
        asyncio.get_running_loop().call_soon(source.signal)
        await merged
        assert merged.signal_time_ns == source.signal_time_ns
        await asyncio.sleep(0)
        source.close()

    run(main())

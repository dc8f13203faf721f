"""The queue between a source and its consumer, against a plain list; and the moment that a frame counts as captured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aionn.errors import InvalidArgument
from aionn.media.pacing import (
    QUEUE_MAX,
    TIMER_GRAIN_NS,
    PresentationQueue,
    captured_at_ns,
    checked_keep,
    checked_queue_max,
)


@given(
    keep=st.sampled_from(["all", "latest", "oldest"]),
    capacity=st.integers(1, 4),
    puts=st.lists(st.booleans(), max_size=60),
)
def test_queue_behaves_like_a_list_under_every_policy(keep, capacity, puts):
    queue = PresentationQueue(keep, capacity)
    room = 1 if keep == "latest" else capacity
    model, delivered, expected, dropped = [], [], [], 0
    for number, is_put in enumerate(puts):
        if is_put:
            assert queue.must_wait == (keep == "all" and len(model) == room)
            if queue.must_wait:
                continue
            queue.put(number)
            model.append(number)
            if len(model) > room:
                model.pop(0 if keep == "latest" else -1)
                dropped += 1
        elif model:
            delivered.append(queue.take())
            expected.append(model.pop(0))
        account = queue.statistics()
        assert account.queued == len(queue) == len(model)
        assert account.dropped == dropped
        assert account.presented == account.delivered + account.dropped + account.queued
    assert delivered == expected == sorted(delivered)


def test_marks_are_counted():
    queue = PresentationQueue("latest", 1)
    queue.put("a", late=True)
    queue.put("b", late=True, held_back=True)
    account = queue.statistics()
    assert (account.late, account.held_back, account.presented) == (2, 1, 2)


def test_frame_counts_from_when_it_was_due_if_the_loop_was_busy():
    assert captured_at_ns(1_000, 1_000 + 50 * TIMER_GRAIN_NS, 0, 0) == 1_000 + TIMER_GRAIN_NS


def test_frame_counts_from_when_it_was_handed_out_if_only_the_timer_was_coarse():
    assert captured_at_ns(1_000, 1_000 + TIMER_GRAIN_NS // 2, 0, 0) == 1_000 + TIMER_GRAIN_NS // 2


def test_frame_does_not_count_before_it_exists_or_is_let_go():
    late = 40 * TIMER_GRAIN_NS
    assert captured_at_ns(1_000, late, late - 7, 0) == late - 7
    assert captured_at_ns(1_000, late, 500, late - 9) == late - 9


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(
        InvalidArgument, match="here: keep: expected one of all, latest, oldest, got 'newest'"
    ):
        checked_keep("newest", "here")


@pytest.mark.parametrize("queue_max", [0, -1, QUEUE_MAX + 1])
def test_unbounded_or_empty_queue_is_refused(queue_max):
    with pytest.raises(InvalidArgument, match=f"here: n: expected 1 to {QUEUE_MAX}, got {queue_max}"):
        checked_queue_max(queue_max, "n", "here")

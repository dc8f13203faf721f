"""The event loop as a resource of admission: no admitted set loses a frame whose parts run in the order of the loop."""

import heapq
import random
from collections import deque
from typing import NamedTuple

import pytest

from aionn.errors import NotAdmitted
from aionn.scheduler.admission import Demand, SlotCost, StreamTerms
from aionn.scheduler.ledger import Ledger, ReservableSlot
from aionn.scheduler.reservations import event_loop
from aionn.scheduler.reservations.event_loop import FACTOR, NO_LOOP_COST, LoopCost, LoopLedger, loop_parts

MS = 1_000_000


class User:
    """The reservations of a device with some slots."""

    def __init__(self, loop, slots=1, name="npu"):
        self.loop = loop
        self.ledger = Ledger([ReservableSlot(f"{name}/{i}", can_preempt=False) for i in range(slots)])
        self.changes = 0

    def loop_changed(self):
        self.changes += 1

    def admit(self, terms, duration_ns, cost, slots=None, allowance_ns=None, measured=NO_LOOP_COST):
        slots = range(len(self.ledger._slots)) if slots is None else slots
        costs = dict.fromkeys(slots, SlotCost(duration_ns=duration_ns, piece_ns=duration_ns))
        return self.loop.reserve(
            self,
            terms,
            cost,
            lambda: self.ledger.admit(terms, costs, now_ns=0),
            costs=costs,
            allowance_ns=allowance_ns,
            measured=measured,
        )

    def admit_measured(self, measured_ns, **kind):
        """A stream of 1 ms on the device, whose executions take ``measured_ns`` of the loop."""
        measured = LoopCost(measured_ns // 2, measured_ns // 2)
        cost = measured.times(self.loop.factor)
        return self.admit(terms(**kind), MS, cost, measured=measured)[0]


def terms(period_ms=33, deadline_ms=None, jitter_ms=0, name="gate"):
    deadline_ns = round((period_ms if deadline_ms is None else deadline_ms) * MS)
    return StreamTerms(
        name=name, period_ns=round(period_ms * MS), deadline_ns=deadline_ns, jitter_ns=round(jitter_ms * MS)
    )


def count_admitted(user, loop_us, duration_ms=1.0, **kind):
    """The number of equal streams that are admitted, and the refusal of the next."""
    for number in range(200):
        try:
            user.admit(terms(**kind), round(duration_ms * MS), LoopCost(loop_us * 500, loop_us * 500))
        except NotAdmitted as e:
            return number, e
    raise AssertionError("no end")


# --- What is admitted ---


def test_frames_of_a_slot_and_the_loop_share_the_time():
    """33 ms hold 31 frames of 1 ms below the cap, and as many as 33 / 1.5 with half a millisecond of the loop each."""
    assert count_admitted(User(LoopLedger()), 0)[0] == 31
    assert count_admitted(User(LoopLedger()), 500)[0] == 20  # 0.95 of 33 ms, by 1.5 ms.
    assert count_admitted(User(LoopLedger()), 500, deadline_ms=15)[0] == 10


def test_refusal_names_the_loop_and_its_offer_is_admitted():
    user, cost = User(LoopLedger()), LoopCost(250_000, 250_000)
    for _ in range(10):
        user.admit(terms(), MS, cost)
    with pytest.raises(NotAdmitted) as caught:
        user.admit(terms(deadline_ms=6, name="door"), MS, cost)
    message, offered = str(caught.value), caught.value.would_fit
    assert 'stream "door" on npu/0: at t = 6 ms' in message
    assert "of that the event loop needs 5.5 ms for a frame of each of 11 streams, 500 us of it" in message
    assert "250 us after it), and without the event loop it would fit. It would fit with" in message
    assert caught.value.is_by_event_loop and user.loop.count == 10
    assert offered.deadline_ns == 7.5 * MS and offered.period_ns is None
    user.admit(terms(deadline_ms=7.5), MS, cost)


def test_device_alone_is_named_where_it_alone_has_no_time():
    user = User(LoopLedger())
    count, refusal = count_admitted(user, 1, duration_ms=12)
    assert count == 2 and "event loop" not in str(refusal) and not refusal.is_by_event_loop


def test_share_of_the_loop_is_bounded_and_the_period_that_is_offered_fits():
    loop = LoopLedger()
    user = User(loop, slots=64)
    count, refusal = count_admitted(user, 1000, duration_ms=0.1, period_ms=20, deadline_ms=400)
    assert count == 12 and loop.share == pytest.approx(0.6)
    assert 'stream "gate" on the event loop: its frames take 0.050 of the loop' in refusal.reason
    assert refusal.is_by_event_loop
    loop.release(12)
    with pytest.raises(NotAdmitted) as caught:
        user.admit(terms(10, 400), 100_000, LoopCost(500_000, 500_000))
    period_ns = caught.value.would_fit.period_ns
    assert period_ns == 20 * MS
    user.admit(terms(period_ns / MS, 400), 100_000, LoopCost(500_000, 500_000))


def test_devices_of_one_loop_share_it_and_those_of_another_do_not():
    loop = LoopLedger()
    first, second = User(loop), User(loop, name="gpu")
    assert count_admitted(first, 500, deadline_ms=15)[0] == 10
    with pytest.raises(NotAdmitted, match="streams on npu/0 would be late") as caught:
        second.admit(terms(deadline_ms=15), MS, LoopCost(250_000, 250_000))
    assert caught.value.is_by_event_loop
    assert second.ledger.reservations() == ()
    assert count_admitted(User(LoopLedger()), 500, deadline_ms=15)[0] == 10


def test_short_deadline_counts_with_all_frames_that_may_be_before_it():
    """The loop runs in the order of arrival: a frame of 5 ms waits for the frames of streams that have a second."""
    user = User(LoopLedger())
    for _ in range(10):
        user.admit(terms(1000), MS, LoopCost(250_000, 250_000))
    with pytest.raises(NotAdmitted, match="event loop"):
        user.admit(terms(33, 5), MS // 10, LoopCost(25_000, 25_000))


def test_refusal_changes_nothing_and_a_release_gives_the_room_back():
    loop = LoopLedger()
    user = User(loop)
    number, _ = user.admit(terms(), MS, LoopCost(250_000, 250_000))
    count_admitted(user, 500)
    before = (loop.count, loop.burst_ns, user.ledger.verdict(0))
    with pytest.raises(NotAdmitted):
        user.admit(terms(), MS, LoopCost(250_000, 250_000))
    assert (loop.count, loop.burst_ns, user.ledger.verdict(0)) == before
    held = user.ledger.reservations()[0]
    user.ledger.release(held.number)
    loop.release(number)
    loop.release(number)
    user.admit(terms(), MS, LoopCost(250_000, 250_000))


def test_frames_of_a_served_device_bear_no_more_than_their_allowance():
    loop = LoopLedger()
    user = User(loop)
    user.admit(terms(), MS, LoopCost(250_000, 250_000), allowance_ns=2 * MS)
    for _ in range(3):
        user.admit(terms(), MS, LoopCost(250_000, 250_000))
    with pytest.raises(NotAdmitted, match="streams on a served device would be late"):
        user.admit(terms(), MS, LoopCost(250_000, 250_000))


def test_change_to_less_demand_gives_time_back():
    loop = LoopLedger()
    user = User(loop)
    number, _ = user.admit(terms(), MS, LoopCost(5 * MS, 5 * MS))
    loop.change(number, terms(66))
    assert loop.share == pytest.approx(10 / 66)
    loop.change(99, terms())
    assert loop.count == 1


# --- What running streams show ---


def run_frames(loop, count, gap_ns, frame_ns, measured_ns):
    """Frames with a gap, each of which takes ``frame_ns`` of the thread."""
    for index in range(count):
        loop.ran(LoopCost(measured_ns, 0), index * gap_ns, lambda index=index: index * frame_ns)


def test_factor_is_what_running_frames_take():
    loop = LoopLedger()
    assert loop.factor == FACTOR
    run_frames(loop, 200, 10 * MS, 800_000, 200_000)
    assert loop.factor == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    ("frame_ns", "factor"),
    [(9_500_000, FACTOR), (100_000, 1.0), (5_000_000, event_loop.FACTOR_MAX)],
    ids=["busy loop", "cheaper than measured", "other work"],
)
def test_factor_is_bounded_and_a_busy_loop_shows_none(frame_ns, factor):
    loop = LoopLedger()
    run_frames(loop, 200, 10 * MS, frame_ns, 200_000)
    assert loop.factor == factor


def test_longest_callback_counts_before_each_part():
    loop = LoopLedger()
    user = User(loop)
    for _ in range(20):
        loop.blocked(3 * MS)
    run_frames(loop, 200, 10 * MS, 600_000, 200_000)
    assert 3 * MS <= loop.longest_ns < 4 * MS
    user.admit(terms(), MS, LoopCost(1, 1))
    assert user.ledger.verdict(0).delay_ns == loop.delay_ns == 2 * loop.longest_ns


def show_factor(loop, factor):
    """Has running frames show by how much they take more than an execution alone."""
    loop.restart(0, 0)
    for index in range(1, event_loop.WINDOW_FRAMES + 1):
        loop.ran(LoopCost(100_000, 0), index * 10 * MS, lambda index=index: round(index * factor * 100_000))
    assert loop.factor == factor


def test_admission_counts_with_what_frames_of_running_streams_take_by_now():
    """Ten were admitted with 15 ms of 33, half a millisecond of the loop in each. When frames take three times as much of it, the
    ten need 25 ms, and each more of them 2.5 ms. With the 15 ms of their admission, four too many would get in."""
    user = User(LoopLedger())
    measured = LoopCost(100_000, 100_000)
    for _ in range(10):
        user.admit(terms(), MS, LoopCost(250_000, 250_000), measured=measured)
    show_factor(user.loop, 7.5)
    found = []
    with pytest.raises(NotAdmitted) as caught:
        while True:
            found.append(user.admit_measured(200_000))
    assert len(found) == 2
    took = Kind(terms(), measured.times(7.5), MS, 0)
    kinds = [took] * (10 + len(found))
    assert lost_frames(kinds, sorted((0, 0, index) for index in range(len(kinds)))) == 0
    assert "19.5 ms for a frame of each of 13 streams (10 ms more than they were admitted with)" in str(
        caught.value
    )


def test_window_alone_changes_nothing_of_what_is_counted():
    """A noisy one could otherwise have a stream with a phase end that moves."""
    user = User(LoopLedger())
    numbers = [user.admit_measured(200_000) for _ in range(10)]
    before = (user.loop.burst_ns, user.loop.delay_ns, user.ledger.verdict(0))
    for _ in range(20):
        user.loop.blocked(2 * MS)
    show_factor(user.loop, 6)
    assert user.loop.longest_ns >= 2 * MS
    assert (user.loop.burst_ns, user.loop.delay_ns, user.ledger.verdict(0)) == before
    user.loop.release(numbers.pop())
    user.loop.change(numbers[-1], terms(66))
    assert user.loop.delay_ns == 0 and user.ledger.verdict(0).delay_ns == 0
    assert user.loop.burst_ns == 9 * 600_000


def test_refusal_restores_what_was_counted():
    user = User(LoopLedger())
    for _ in range(10):
        user.admit_measured(200_000)
    before = (user.loop.count, user.loop.burst_ns, user.loop.delay_ns, user.ledger.verdict(0))
    for _ in range(20):
        user.loop.blocked(MS // 10)
    show_factor(user.loop, 8)
    for kind in ({"deadline_ms": 5}, {"period_ms": 2}):
        with pytest.raises(NotAdmitted, match="event loop"):
            user.admit_measured(200_000, **kind)
        assert (user.loop.count, user.loop.burst_ns, user.loop.delay_ns, user.ledger.verdict(0)) == before


def test_streams_count_with_their_admission_where_frames_take_less_now():
    user = User(LoopLedger())
    user.admit_measured(200_000)
    show_factor(user.loop, 6)
    user.admit_measured(200_000)
    assert user.loop.burst_ns == 2 * 1_200_000
    show_factor(user.loop, 2)
    user.admit_measured(200_000)
    assert user.loop.burst_ns == 600_000 + 1_200_000 + 400_000


def test_stream_that_was_not_measured_counts_with_its_cost():
    user = User(LoopLedger())
    user.admit(terms(), MS, LoopCost(300_000, 300_000))
    show_factor(user.loop, 8)
    user.admit(terms(), MS, LoopCost(300_000, 300_000))
    assert user.loop.burst_ns == 1_200_000


# --- No admitted set loses a frame ---


class Kind(NamedTuple):
    terms: StreamTerms
    cost: LoopCost
    duration_ns: int
    slot: int


def lost_frames(kinds, arrivals):
    """Runs frames: callbacks of the loop in their order, slots by deadline; a slot is free when the loop has its last result."""
    events, loop, running, lost = [], deque(), False, 0
    waiting, busy = {}, set()
    numbers = iter(range(1 << 40))
    for arrived_ns, captured_ns, index in arrivals:
        heapq.heappush(events, (arrived_ns, 1, next(numbers), "arrives", index, captured_ns))

    def begin(slot, now_ns):
        if slot not in busy and waiting.get(slot):
            _, index, captured_ns = heapq.heappop(waiting[slot])
            busy.add(slot)
            heapq.heappush(
                events,
                (now_ns + kinds[index].duration_ns, 0, next(numbers), "computed", index, captured_ns),
            )

    while events:
        now_ns, _, _, what, index, captured_ns = heapq.heappop(events)
        kind = kinds[index]
        deadline_ns = captured_ns + kind.terms.deadline_ns
        if what == "arrives":
            loop.append(("sent", kind.cost.before_ns, index, captured_ns))
        elif what == "computed":
            loop.append(("ended", kind.cost.after_ns, index, captured_ns))
        else:
            running = False
            if what == "sent":
                heapq.heappush(waiting.setdefault(kind.slot, []), (deadline_ns, index, captured_ns))
            else:
                lost += now_ns > deadline_ns
                busy.discard(kind.slot)
            begin(kind.slot, now_ns)
        if loop and not running:
            running = True
            what, part_ns, index, captured_ns = loop.popleft()
            heapq.heappush(events, (now_ns + part_ns, 0, next(numbers), what, index, captured_ns))
    return lost


def drawn(numbers, raised=1.0):
    """A set that is admitted, as full as a loop and its slots are. After some streams, the frames of all of them take ``raised``
    times as much of the loop; the set is empty where no stream is admitted then."""
    slots = numbers.choice([1, 1, 2, 3])
    user, found, count_before = User(LoopLedger(), slots), [], 0
    user.loop.factor = 1.0
    base_ms = numbers.choice([10, 20, 33]) if numbers.random() < 0.3 else None
    for attempt in range(40):
        if attempt == 6 and raised != 1:
            user.loop.factor, count_before = raised, len(found)
        period_ms = numbers.choice([10, 16, 20, 33, 40, 50, 100]) if base_ms is None else base_ms
        deadline_ms = period_ms * (numbers.choice([1, 1, 0.8, 0.5, 2]) if base_ms is None else 1)
        total_ns = round(numbers.choice([0.1, 0.2, 0.45, 1, 2]) * MS)
        before_ns = round(total_ns * numbers.uniform(0.1, 0.9))
        kind = Kind(
            terms(period_ms, deadline_ms, numbers.choice([0, 0, deadline_ms // 10])),
            LoopCost(before_ns, total_ns - before_ns),
            round(numbers.choice([0.2, 0.4, 1, 4]) * MS * numbers.uniform(0.5, 1.5)),
            numbers.randrange(slots),
        )
        try:
            cost = kind.cost.times(user.loop.factor)
            user.admit(kind.terms, kind.duration_ns, cost, [kind.slot], measured=kind.cost)
        except NotAdmitted:
            if numbers.random() < 0.3:
                break
        else:
            found.append(kind)
    if len(found) == count_before:
        return []
    return [kind._replace(cost=kind.cost.times(user.loop.factor)) for kind in found]


def arrivals_of(kinds, numbers):
    """Unkind arrivals: all together, with the latest first or last, or at random phases."""
    manner, found = numbers.randrange(4), []
    span_ns = 4 * max(kind.terms.period_ns for kind in kinds)
    for index, kind in enumerate(kinds):
        captured_ns = 0 if manner < 2 else numbers.randrange(kind.terms.period_ns)
        while captured_ns < span_ns:
            late_ns = kind.terms.jitter_ns if manner == 1 else numbers.randint(0, kind.terms.jitter_ns)
            found.append((captured_ns + late_ns, captured_ns, index))
            captured_ns += kind.terms.period_ns
            if manner == 3 and numbers.random() < 0.2:
                captured_ns += numbers.randrange(kind.terms.period_ns)
    order = (
        (lambda entry: (entry[0], -kinds[entry[2]].terms.deadline_ns))
        if numbers.random() < 0.5
        else (lambda e: e)
    )
    return sorted(found, key=order)


def broken_sets(sets, phasings, raised):
    broken = 0
    for seed in range(sets):
        numbers = random.Random(seed)
        kinds = drawn(numbers, raised)
        if kinds:
            broken += any(lost_frames(kinds, arrivals_of(kinds, numbers)) for _ in range(phasings))
    return broken


@pytest.mark.parametrize("raised", [1.0, 2.5])
@pytest.mark.parametrize("sets", [12, pytest.param(400, marks=pytest.mark.thorough)])
def test_no_admitted_set_loses_a_frame(sets, raised):
    assert broken_sets(sets, 4, raised) == 0


def test_sets_that_are_admitted_are_full():
    """Otherwise the claim would be empty: with twice as many streams and more, sets lose frames."""
    broken = 0
    for seed in range(10):
        numbers = random.Random(seed)
        kinds = drawn(numbers)
        more = 2 * kinds + [kinds[-1]] * 4
        broken += any(lost_frames(more, arrivals_of(more, numbers)) for _ in range(4))
    assert broken >= 7


def without_other_devices(members):
    return ()


def with_own_deadlines(members):
    """As if the loop ran parts in the order of deadlines."""
    return tuple(
        Demand(t, SlotCost(duration_ns=max(1, c.total_ns), piece_ns=0)) for t, c in members if c.total_ns
    )


def with_half(members):
    return loop_parts((t, LoopCost(c.before_ns, 0)) for t, c in members)


def test_cost_of_running_streams_that_stays_as_admitted_is_found(monkeypatch):
    monkeypatch.setattr(event_loop._Member, "by", lambda member, factor: member)
    assert broken_sets(30, 4, 2.5) > 0


@pytest.mark.parametrize("mutant", [without_other_devices, with_own_deadlines, with_half])
def test_term_that_is_left_out_is_found(mutant, monkeypatch):
    monkeypatch.setattr(event_loop, "loop_parts", mutant)
    monkeypatch.setattr(LoopLedger, "_check_share", lambda *_: None)
    for seed in range(60):
        numbers = random.Random(seed)
        kinds = drawn(numbers)
        if any(lost_frames(kinds, arrivals_of(kinds, numbers)) for _ in range(4)):
            return
    raise AssertionError("no set lost a frame")

"""The search for counter-offers: it finds what halving the range finds, by fewer tests, since values without time are skipped."""

import random

import msgspec
import pytest

from aionn.errors import NotAdmitted
from aionn.scheduler.admission import DAY_NS, Demand, Piece, SlotCost, SlotTest, StreamTerms
from aionn.scheduler.ledger import Ledger, ReservableSlot
from aionn.scheduler.reservations import event_loop, offers
from aionn.scheduler.reservations.event_loop import LoopCost, LoopLedger
from aionn.scheduler.reservations.offers import counter_offers, least_that_fits

MS = 1_000_000


def halving(asked_ns, fits):
    """The search without bounds: the range is doubled until a value fits, then halved."""
    low_ns = high_ns = max(1, asked_ns)
    for _ in range(offers.DOUBLINGS_MAX):
        low_ns, high_ns = high_ns, min(2 * high_ns, DAY_NS)
        if fits(high_ns):
            break
    else:
        return None
    step_ns = int(10 ** max(0, len(str(low_ns)) - 3))
    low, high = low_ns // step_ns, -(-high_ns // step_ns)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * step_ns) else (middle, high)
    return min(high * step_ns, DAY_NS)


def without_bounds(asked_ns, least):
    return halving(asked_ns, lambda value: least(value) <= value)


# --- The search ---


@pytest.mark.parametrize("seed", range(4))
def test_search_finds_what_halving_finds_whatever_the_bounds(seed):
    numbers = random.Random(seed)
    for _ in range(500):
        asked_ns = round(10 ** numbers.uniform(0, 13.9))
        threshold_ns = asked_ns + max(1, round(asked_ns * 10 ** numbers.uniform(-4, 2.6)))
        near = numbers.choice([0, 0.5, 0.9, 1])

        def least(value_ns, threshold_ns=threshold_ns, near=near):
            if value_ns >= threshold_ns:
                return value_ns
            return value_ns + max(1, int(near * numbers.random() ** 0.2 * (threshold_ns - value_ns)))

        assert least_that_fits(asked_ns, least) == halving(asked_ns, threshold_ns.__le__)


def test_bound_that_is_exact_takes_two_tests_and_one_beyond_reach_takes_one():
    tested = []

    def least(value_ns, threshold_ns=7_512_345):
        tested.append(value_ns)
        return max(value_ns, threshold_ns)

    assert least_that_fits(MS, least) == 7_520_000
    assert tested == [MS, 7_520_000]
    assert least_that_fits(MS, lambda value: least(value, DAY_NS + 1)) is None
    assert len(tested) == 3


# --- One slot ---


def drawn(numbers, count, load, phases=0.0):
    found = []
    for index in range(count):
        period_ns = numbers.choice([10, 16, 20, 33, 40, 50, 100]) * MS + numbers.choice([0, 0, 7, 333])
        deadline_ns = round(period_ns * numbers.choice([0.3, 0.6, 1, 1, 2]))
        jitter_ns = numbers.choice([0, deadline_ns // 10])
        duration_ns = max(1000, round(period_ns * load / count * numbers.uniform(0.2, 1.8)))
        phase_ns = numbers.randrange(period_ns) if numbers.random() < phases else None
        terms = StreamTerms(
            name=f"s{index}",
            period_ns=period_ns,
            deadline_ns=deadline_ns,
            jitter_ns=jitter_ns,
            phase_ns=phase_ns,
        )
        piece_ns = numbers.choice([0, duration_ns // 3, duration_ns])
        found.append(Demand(terms, SlotCost(duration_ns=duration_ns, piece_ns=piece_ns)))
    return found


@pytest.mark.parametrize("phases", [0.0, 0.7], ids=["no phases", "phases"])
@pytest.mark.parametrize("sets", [150, pytest.param(2000, marks=pytest.mark.thorough)])
def test_counter_offers_of_a_slot_are_those_of_halving(sets, phases, monkeypatch):
    offered = {"deadline_ns": 0, "period_ns": 0}
    for seed in range(sets):
        numbers = random.Random(seed)
        *held, new = drawn(numbers, numbers.randrange(2, 9), numbers.uniform(0.5, 1.3), phases)
        lower = [Piece("low", numbers.randrange(1, 4 * MS))] * numbers.randrange(2)
        test = SlotTest(held, lower=lower, delay_ns=numbers.choice([0, 0, MS]))
        found = test.verdict(new)
        if found.fits:
            continue
        bounded = counter_offers(test, new, found)
        with monkeypatch.context() as patch:
            patch.setattr(offers, "least_that_fits", without_bounds)
            assert counter_offers(test, new, found) == bounded
        for field in offered:
            if (value_ns := getattr(bounded, field)) is not None:
                offered[field] += 1
                changed = msgspec.structs.replace(new.terms, **{field: value_ns})
                assert test.verdict(Demand(changed, new.cost)).fits
    assert offered["deadline_ns"] >= sets // 40 and (phases or offered["period_ns"] >= sets // 40)


# --- The event loop ---


class User:
    """The reservations of a device."""

    def __init__(self, loop, slots, name, lower_ns):
        self.loop = loop
        self.ledger = Ledger([ReservableSlot(f"{name}/{i}", can_preempt=False) for i in range(slots)])
        if lower_ns:
            for slot in range(slots):
                self.ledger.allow_lower(slot, "low", lower_ns)

    def loop_changed(self):
        pass

    def admit(self, new, loop_ns):
        costs = dict.fromkeys(range(len(self.ledger._slots)), new.cost)
        cost = LoopCost(loop_ns // 3, loop_ns - loop_ns // 3)
        self.loop.reserve(
            self, new.terms, cost, lambda: self.ledger.admit(new.terms, costs, now_ns=0), costs=costs
        )


def refusals(seed, phases, count=24):
    """The refusals of a random set of streams."""
    numbers = random.Random(seed)
    loop, slots = LoopLedger(), numbers.choice([1, 1, 2, 3])
    lower_ns = numbers.choice([0, 0, MS])
    users = [User(loop, slots, name, lower_ns) for name in ("npu", "gpu")[: numbers.choice([1, 1, 2])]]
    load, heaviest_ms = numbers.choice([0.5, 1, 3]), numbers.choice([0.1, 0.4, 2])
    found = []
    for new in drawn(numbers, count, load * slots * len(users), phases):
        try:
            numbers.choice(users).admit(new, round(heaviest_ms * MS * numbers.uniform(0.05, 1)))
        except NotAdmitted as e:
            found.append((str(e), e.would_fit))
    return found


@pytest.mark.parametrize("phases", [0.0, 0.6], ids=["no phases", "phases"])
@pytest.mark.parametrize("sets", [4, pytest.param(60, marks=pytest.mark.thorough)])
def test_counter_offers_beside_the_loop_are_those_of_halving(sets, phases, monkeypatch):
    deadlines = periods = 0
    for seed in range(sets // 2 if phases else sets):  # Tests by phases take ten times as long.
        bounded = refusals(seed, phases)
        with monkeypatch.context() as patch:
            for module in (offers, event_loop):
                patch.setattr(module, "least_that_fits", without_bounds)
            assert refusals(seed, phases) == bounded
        by_loop = [offered for message, offered in bounded if "event loop" in message]
        deadlines += sum(offered.deadline_ns is not None for offered in by_loop)
        periods += sum(offered.period_ns is not None for offered in by_loop)
    assert deadlines and (periods or phases)


@pytest.mark.parametrize("slots", [1, 4])
def test_refusal_beside_many_streams_takes_few_tests(slots, monkeypatch):
    """Without bounds, one of them takes 50 tests of each slot."""
    loop = LoopLedger()
    user, numbers, count = User(loop, slots, "npu", 0), random.Random(1), 0
    for new in drawn(numbers, 100, 0.3 * slots):
        try:
            user.admit(new, numbers.randrange(10_000, 40_000))
        except NotAdmitted:
            continue
    assert loop.count >= 40
    in_all_phases = SlotTest._in_all_phases

    def counted(self, *args, **options):
        nonlocal count
        count += 1
        return in_all_phases(self, *args, **options)

    monkeypatch.setattr(SlotTest, "_in_all_phases", counted)
    counts = []
    for loop_ns in (2 * MS, 4 * MS, 6 * MS, 12 * MS):
        terms = StreamTerms(name="new", period_ns=33 * MS, deadline_ns=32 * MS)
        before = count
        with pytest.raises(NotAdmitted, match="event loop"):
            user.admit(Demand(terms, SlotCost(duration_ns=100_000, piece_ns=0)), loop_ns)
        counts.append(count - before)
    assert max(counts) <= 8 + 4 * slots

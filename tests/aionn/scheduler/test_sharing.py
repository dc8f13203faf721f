"""Several clients before one device: classes go before clients, clients take turns, nothing is lost or starts twice."""

import random

import pytest

from aionn.errors import ResourceExhausted
from aionn.hal import Priority
from aionn.scheduler.job import Preempt
from aionn.scheduler.plain import PlainPolicy
from aionn.scheduler.policy import PlanPolicy
from aionn.scheduler.sharing import Claim, SharedSlots

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
POLICIES = [pytest.param(policy, id=policy.name) for policy in (PlanPolicy(), PlainPolicy())]


class Noted(Claim):
    """A claim that writes down when it is started."""

    def __init__(self, log, name, priority=MEDIUM, deadline_ns=None, **more):
        super().__init__(priority, deadline_ns, **more)
        self.log = log
        self.name = name
        self.interrupts = 0

    def start(self):
        self.log.append((self.name, self.slot))

    def interrupt(self):
        self.interrupts += 1


class Bench:
    """A device without threads: claims are given back when the test says so."""

    def __init__(self, slot_count=1, **options):
        self.now_ns = 0
        self.log = []
        self.slots = SharedSlots(slot_count, name="device", now=lambda: self.now_ns, **options)
        self.claims = {}

    def enter(self, name, *arguments, **more):
        claim = self.claims[name] = Noted(self.log, name, *arguments, **more)
        self.slots.enter(claim)
        return claim

    def run_all(self):
        """Gives back whoever holds a slot until nobody does; returns the names in the order of their starts."""
        while True:
            held = [claim for claim in self.claims.values() if claim.slot is not None]
            if not held:
                assert self.slots.waiting_count == self.slots.held_count == 0
                return [name for name, _ in self.log]
            self.slots.give_back(min(held, key=lambda claim: claim._since_ns))


@pytest.mark.parametrize("policy", POLICIES)
def test_high_of_one_client_goes_before_low_of_another(policy):
    bench = Bench(policy=policy)
    bench.enter("holder", owner="a")
    for number in range(3):
        bench.enter(f"low{number}", LOW, owner="a")
    bench.enter("high", HIGH, owner="b")
    bench.enter("medium", owner="b")
    assert bench.run_all() == ["holder", "high", "medium", "low0", "low1", "low2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_earliest_deadline_goes_first_whosever_it_is(policy):
    bench = Bench(policy=policy)
    bench.enter("holder")
    for name, owner, deadline_ns in (
        ("d9", "a", 9000),
        ("d3", "a", 3000),
        ("d5", "b", 5000),
        ("none", "b", None),
    ):
        bench.enter(name, MEDIUM, deadline_ns, owner=owner)
    assert bench.run_all() == ["holder", "d3", "d5", "d9", "none"]


@pytest.mark.parametrize("policy", POLICIES)
def test_clients_take_turns_among_equals(policy):
    bench = Bench(policy=policy)
    bench.enter("holder", owner="flood")
    for number in range(50):
        bench.enter(f"flood{number}", owner="flood")
    for number in range(3):
        bench.enter(f"guest{number}", owner="guest")
    order = bench.run_all()
    assert [order.index(f"guest{number}") for number in range(3)] == [2, 4, 6]
    assert [name for name in order if name.startswith("flood")] == [f"flood{number}" for number in range(50)]


@pytest.mark.parametrize("policy", POLICIES)
def test_expired_job_is_started_without_a_slot_to_tell_of_it(policy):
    bench = Bench(policy=policy)
    bench.enter("holder")
    bench.now_ns = 100
    expired = bench.enter("expired", HIGH, 50)
    assert bench.log[-1] == ("expired", None) and expired.slot is None
    bench.enter("soon", HIGH, 200)
    bench.now_ns = 300
    bench.enter("later", LOW)
    assert ("soon", None) in bench.log
    assert bench.run_all() == ["holder", "expired", "soon", "later"]


def test_expired_claim_does_not_hide_another_of_its_client():
    bench = Bench()
    holder = bench.enter("holder", deadline_ns=10**6)
    waiting = bench.enter("waiting", deadline_ns=1000)
    bench.now_ns = 100
    bench.enter("expired", deadline_ns=50)
    assert bench.log[-1] == ("expired", None)
    bench.slots.give_back(holder)
    assert waiting.slot == 0


def test_job_gets_its_slot_though_less_time_is_left_than_it_is_expected_to_take():
    bench = Bench()
    bench.now_ns = 1
    holder = bench.enter("holder", model="m")
    other = bench.enter("other")
    bench.now_ns = 1001
    bench.slots.give_back(holder)
    hurried = bench.enter("hurried", MEDIUM, 1500, model="m")
    assert bench.slots.learnt_count == 1 and ("hurried", None) not in bench.log
    bench.now_ns = 1499
    bench.slots.give_back(other)
    assert hurried.slot == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_high_asks_for_the_slot_and_what_gave_way_goes_on(policy):
    traced = []
    bench = Bench(policy=policy, can_preempt=True, trace=lambda at_ns, action: traced.append(type(action)))
    low = bench.enter("low", LOW, model="m")
    high = bench.enter("high", HIGH)
    assert low.is_wanted_back and low.interrupts == 1 and high.slot is None
    bench.enter("other", LOW, owner="b")
    bench.slots.give_way(low)
    assert high.slot == 0 and low.slot is None and not low.is_wanted_back
    assert bench.run_all() == ["low", "high", "low", "other"]
    assert traced.count(Preempt) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_job_continues_though_less_time_is_left_than_it_is_expected_to_take(policy):
    bench = Bench(policy=policy, can_preempt=True)
    for number in range(5):
        learnt = bench.enter(f"learnt{number}", LOW, model="m")
        other = bench.enter(f"other{number}", LOW)
        bench.now_ns += 1000
        bench.slots.give_back(learnt)
        bench.slots.give_back(other)
    low = bench.enter("low", LOW, bench.now_ns + 5000, model="m")
    high = bench.enter("high", HIGH)
    bench.slots.give_way(low)
    bench.now_ns += 4500  # It is expected to need another 1000 ns, and no other job or event will come.
    bench.slots.give_back(high)
    assert low.slot == 0 and bench.slots.waiting_count == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["started elsewhere", "cancelled"])
def test_preemption_is_withdrawn_when_its_job_waits_no_more(how, policy):
    bench = Bench(2, policy=policy, can_preempt=True)
    holders = [bench.enter(name, LOW, owner=name) for name in "ab"]
    high = bench.enter("high", HIGH)
    (asked,) = [claim for claim in holders if claim.is_wanted_back]
    (other,) = [claim for claim in holders if claim is not asked]
    if how == "cancelled":
        bench.slots.leave(high)
    else:
        bench.slots.give_back(other)
        assert high.slot is not None
    assert not asked.is_wanted_back
    if how == "cancelled":
        bench.enter("second", HIGH)
        assert asked.is_wanted_back != other.is_wanted_back, "another job preempts one again"


def test_device_that_cannot_stop_is_not_asked():
    bench = Bench()
    low = bench.enter("low", LOW)
    bench.enter("high", HIGH)
    assert not low.is_wanted_back


@pytest.mark.parametrize("policy", POLICIES)
def test_who_leaves_is_not_started(policy):
    bench = Bench(policy=policy)
    bench.enter("holder")
    claims = [bench.enter(f"c{number}") for number in range(6)]
    for claim in claims[::2]:
        bench.slots.leave(claim)
        bench.slots.leave(claim)
    bench.slots.leave(bench.claims["holder"])
    assert bench.run_all() == ["holder", "c1", "c3", "c5"]


def test_only_so_many_wait():
    bench = Bench(waiting_max=3)
    bench.enter("holder")
    for number in range(3):
        bench.enter(f"c{number}", owner=number % 2)
    with pytest.raises(ResourceExhausted) as caught:
        bench.enter("more", HIGH)
    assert caught.value.transient
    del bench.claims["more"]
    assert len(bench.run_all()) == 4


def test_claims_that_left_take_no_place_in_memory():
    bench = Bench(waiting_max=100)
    bench.enter("holder")
    for number in range(1000):
        claims = [bench.enter(f"c{number}.{index}") for index in range(100)]
        for claim in claims:
            bench.slots.leave(claim)
        assert bench.slots.waiting_count == 0
        assert all(len(behind._heap) <= 1 for behind in bench.slots._behind.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_slots_are_exclusive_and_every_claim_starts_once(seed, policy):
    source = random.Random(seed)
    slot_count = source.choice((1, 2, 3))
    bench = Bench(slot_count, can_preempt=source.random() < 0.7, policy=policy)
    left, given_way = set(), {}
    for number in range(400):
        bench.now_ns += source.randrange(1, 1000)
        name = f"c{number}"
        deadline_ns = None if source.random() < 0.5 else bench.now_ns + source.randrange(-50, 5000)
        model = source.choice((None, "m", "n"))
        bench.enter(name, source.choice(list(Priority)), deadline_ns, owner=source.randrange(3), model=model)
        held = [claim for claim in bench.claims.values() if claim.slot is not None]
        assert len(held) == bench.slots.held_count <= slot_count
        assert len({claim.slot for claim in held}) == len(held)
        for claim in held:
            if claim.is_wanted_back and source.random() < 0.8:
                given_way[claim.name] = given_way.get(claim.name, 0) + 1
                bench.slots.give_way(claim)
            elif source.random() < 0.4:
                bench.slots.give_back(claim)
        started = {name for name, _ in bench.log}
        waiting = [name for name in bench.claims if name not in started and name not in left]
        assert len(waiting) + sum(given_way.values()) >= bench.slots.waiting_count >= len(waiting)
        if waiting and source.random() < 0.1:
            left.add(source.choice(waiting))
            bench.slots.leave(bench.claims[max(left, key=lambda n: n in waiting)])
            left = {n for n in left if n not in {m for m, _ in bench.log}}
        if None not in bench.slots._holders:
            continue
        assert not bench.slots.waiting_count, "a slot stands free while somebody waits"
    order = bench.run_all()
    for name in bench.claims:
        assert order.count(name) <= 1 + given_way.get(name, 0), (
            "what gave way once is started at most once more"
        )
        assert order.count(name) >= 1 or name in left

"""Several clients before one device: classes go before clients, clients take turns, nothing is lost or starts twice."""

import itertools
import random

import pytest

from aionn.errors import ResourceExhausted
from aionn.hal import Priority
from aionn.hal.callers import Connection
from aionn.scheduler.job import ClientJob, Preempt
from aionn.scheduler.plain_policy import PlainPolicy
from aionn.scheduler.planned_queue import AGE_NS
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.shared_slots import SharedSlots

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
POLICIES = [pytest.param(policy, id=policy.name) for policy in (PlanPolicy(), PlainPolicy())]


class Noted(ClientJob):
    """A job that records its starts."""

    def __init__(self, log, name, priority=MEDIUM, deadline_ns=None, **more):
        super().__init__(priority, deadline_ns, **more)
        self.log = log
        self.name = name
        self.preemptions = 0

    def start(self):
        self.log.append((self.name, self.slot))

    def preempt(self):
        self.preemptions += 1


class Bench:
    """A device without threads: jobs are given back when the test says so."""

    def __init__(self, slot_count=1, **options):
        self.now_ns = 0
        self.log = []
        self.slots = SharedSlots(slot_count, name="device", now=lambda: self.now_ns, **options)
        self.jobs = {}

    def enter(self, name, *arguments, **more):
        job = self.jobs[name] = Noted(self.log, name, *arguments, **more)
        self.slots.enter(job)
        return job

    def run_all(self):
        """Gives back whoever holds a slot until nobody does; returns the names in the order of their starts."""
        while True:
            held = [job for job in self.jobs.values() if job.slot is not None]
            if not held:
                assert self.slots.waiting_count == self.slots.held_count == 0
                return [name for name, _ in self.log]
            self.slots.release(min(held, key=lambda job: job._since_ns))


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
def test_connections_of_a_process_have_one_turn_together_and_take_turns_at_it(policy):
    bench = Bench(policy=policy)
    flood, guest = Connection("node", "flood"), Connection("node", "guest")
    bench.enter("holder", owner="c")
    for number in range(4):
        bench.enter(f"flood{number}", owner=flood)
    for number in range(2):
        bench.enter(f"guest{number}", owner=guest)
    for number in range(3):
        bench.enter(f"other{number}", owner=Connection("other", number))
    assert bench.run_all() == [
        *("holder", "flood0", "other0", "flood1", "other1", "guest0", "other2", "flood2", "guest1", "flood3"),
    ]


def test_no_connection_of_a_process_waits_for_all_that_come_later():
    """Each of two others has its next job as soon as one has started, whatever waits already."""
    bench = Bench()
    owners = [Connection("node", number) for number in range(3)]
    bench.enter("holder", owner="c")
    for number in range(5):
        bench.enter(f"0.{number}", owner=owners[0])
    for number in range(50):
        for owner in owners[1:]:
            bench.enter(f"{owner.client}.{number}", owner=owner)
        for _ in range(2):
            bench.slots.release(next(job for job in bench.jobs.values() if job.slot is not None))
    started = [name for name, _ in bench.log]
    assert started.index("0.4") < 20, started
    bench.run_all()


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


def test_expired_job_does_not_hide_another_of_its_client():
    bench = Bench()
    holder = bench.enter("holder", deadline_ns=10**6)
    waiting = bench.enter("waiting", deadline_ns=1000)
    bench.now_ns = 100
    bench.enter("expired", deadline_ns=50)
    assert bench.log[-1] == ("expired", None)
    bench.slots.release(holder)
    assert waiting.slot == 0


def test_job_gets_its_slot_though_less_time_is_left_than_it_is_expected_to_take():
    bench = Bench()
    bench.now_ns = 1
    holder = bench.enter("holder", model="m")
    other = bench.enter("other")
    bench.now_ns = 1001
    bench.slots.release(holder)
    hurried = bench.enter("hurried", MEDIUM, 1500, model="m")
    assert bench.slots.learnt_count == 1 and ("hurried", None) not in bench.log
    bench.now_ns = 1499
    bench.slots.release(other)
    assert hurried.slot == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_high_asks_for_the_slot_and_what_was_suspended_goes_on(policy):
    traced = []
    bench = Bench(policy=policy, can_preempt=True, trace=lambda at_ns, action: traced.append(type(action)))
    low = bench.enter("low", LOW, model="m")
    high = bench.enter("high", HIGH)
    assert low.is_preempted and low.preemptions == 1 and high.slot is None
    bench.enter("other", LOW, owner="b")
    bench.slots.suspend(low)
    assert high.slot == 0 and low.slot is None and not low.is_preempted
    assert bench.run_all() == ["low", "high", "low", "other"]
    assert traced.count(Preempt) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_job_continues_though_less_time_is_left_than_it_is_expected_to_take(policy):
    bench = Bench(policy=policy, can_preempt=True)
    for number in range(5):
        learnt = bench.enter(f"learnt{number}", LOW, model="m")
        other = bench.enter(f"other{number}", LOW)
        bench.now_ns += 1000
        bench.slots.release(learnt)
        bench.slots.release(other)
    low = bench.enter("low", LOW, bench.now_ns + 5000, model="m")
    high = bench.enter("high", HIGH)
    bench.slots.suspend(low)
    bench.now_ns += 4500  # It is expected to need another 1000 ns, and no other job or event will come.
    bench.slots.release(high)
    assert low.slot == 0 and bench.slots.waiting_count == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["started elsewhere", "cancelled"])
def test_preemption_is_withdrawn_when_its_job_waits_no_more(how, policy):
    bench = Bench(2, policy=policy, can_preempt=True)
    holders = [bench.enter(name, LOW, owner=name) for name in "ab"]
    high = bench.enter("high", HIGH)
    (asked,) = [job for job in holders if job.is_preempted]
    (other,) = [job for job in holders if job is not asked]
    if how == "cancelled":
        bench.slots.leave(high)
    else:
        bench.slots.release(other)
        assert high.slot is not None
    assert not asked.is_preempted
    if how == "cancelled":
        bench.enter("second", HIGH)
        assert asked.is_preempted != other.is_preempted, "another job preempts one again"


@pytest.mark.parametrize("policy", POLICIES)
def test_suspended_jobs_count_as_waiting_jobs_of_their_process(policy):
    bench = Bench(policy=policy, can_preempt=True, waiting_max=8)
    for number in range(4):
        low = bench.enter(f"low{number}", LOW, 1000 - number, owner="a")
        if number:
            bench.slots.release(bench.jobs[f"high{number - 1}"])
        bench.enter(f"high{number}", HIGH, owner="a")
        bench.slots.suspend(low)
        assert bench.slots.suspended_of(low) == number + 1
    bench.enter("of a", LOW, owner="a")
    with pytest.raises(ResourceExhausted, match="5 of this client's process"):
        bench.enter("one more", LOW, owner="a")
    bench.enter("of b", LOW, owner="b")
    del bench.jobs["one more"]
    bench.run_all()
    assert bench.slots.suspended_of(low) == 0


def test_device_that_cannot_stop_is_not_asked():
    bench = Bench()
    low = bench.enter("low", LOW)
    bench.enter("high", HIGH)
    assert not low.is_preempted


@pytest.mark.parametrize("policy", POLICIES)
def test_who_leaves_is_not_started(policy):
    bench = Bench(policy=policy)
    bench.enter("holder")
    jobs = [bench.enter(f"c{number}") for number in range(6)]
    for job in jobs[::2]:
        bench.slots.leave(job)
        bench.slots.leave(job)
    bench.slots.leave(bench.jobs["holder"])
    assert bench.run_all() == ["holder", "c1", "c3", "c5"]


def test_only_so_many_wait():
    bench = Bench(waiting_max=3)
    bench.enter("holder")
    for number in range(3):
        bench.enter(f"c{number}", owner=number % 2)
    with pytest.raises(ResourceExhausted) as caught:
        bench.enter("more", HIGH)
    assert caught.value.transient
    del bench.jobs["more"]
    assert len(bench.run_all()) == 4


def _fill(bench, owner, priority=MEDIUM):
    """The number of jobs of an owner that are admitted before one is rejected."""
    count = 0
    while True:
        name = f"{owner}.{priority}.{count}"
        try:
            bench.enter(name, priority, owner=owner(count) if callable(owner) else owner)
        except ResourceExhausted as e:
            assert e.transient
            del bench.jobs[name]
            return count
        count += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_no_process_takes_the_places_of_others(policy):
    bench = Bench(waiting_max=64, policy=policy)
    bench.enter("holder")
    assert _fill(bench, lambda number: Connection("flood", number)) == 33
    assert _fill(bench, lambda number: Connection("flood", number), HIGH) == 0
    assert _fill(bench, Connection("other", 0)) == 16
    assert _fill(bench, "a client alone") == 8
    for number in range(7):  # The flood gets no place that another one leaves.
        bench.slots.leave(bench.jobs[f"a client alone.{MEDIUM}.{number}"])
        assert _fill(bench, Connection("flood", 0), LOW) == 0
    assert _fill(bench, Connection("third", 0)) > 0
    bench.run_all()
    bench.enter("holder")
    assert _fill(bench, None) == 64, "without clients all places are one's"


def test_jobs_that_left_take_no_place_in_memory():
    bench = Bench(waiting_max=100)
    bench.enter("holder")
    for number in range(100):
        jobs = [bench.enter(f"c{number}.{index}") for index in range(100)]
        for job in jobs:
            bench.slots.leave(job)
        assert bench.slots.waiting_count == 0
        assert all(len(behind._heap) <= 1 for behind in bench.slots._behind.values())


@pytest.mark.sampled(45)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(8, 20))]
)
def test_whatever_happens_slots_are_exclusive_and_every_job_starts_once(seed, policy):
    source = random.Random(seed)
    slot_count = source.choice((1, 2, 3))
    bench = Bench(slot_count, can_preempt=source.random() < 0.7, policy=policy)
    left, suspended = set(), {}
    for number in range(400):
        bench.now_ns += source.randrange(1, 1000)
        name = f"c{number}"
        deadline_ns = None if source.random() < 0.5 else bench.now_ns + source.randrange(-50, 5000)
        model = source.choice((None, "m", "n"))
        bench.enter(name, source.choice(list(Priority)), deadline_ns, owner=source.randrange(3), model=model)
        held = [job for job in bench.jobs.values() if job.slot is not None]
        assert len(held) == bench.slots.held_count <= slot_count
        assert len({job.slot for job in held}) == len(held)
        for job in held:
            if job.is_preempted and source.random() < 0.8:
                suspended[job.name] = suspended.get(job.name, 0) + 1
                bench.slots.suspend(job)
            elif source.random() < 0.4:
                bench.slots.release(job)
        started = {name for name, _ in bench.log}
        waiting = [name for name in bench.jobs if name not in started and name not in left]
        assert len(waiting) + sum(suspended.values()) >= bench.slots.waiting_count >= len(waiting)
        if waiting and source.random() < 0.1:
            left.add(source.choice(waiting))
            bench.slots.leave(bench.jobs[max(left, key=lambda n: n in waiting)])
            left = {n for n in left if n not in {m for m, _ in bench.log}}
        if bench.slots.held_count == slot_count:
            continue
        assert not bench.slots.waiting_count, "a slot stands free while somebody waits"
    order = bench.run_all()
    for name in bench.jobs:
        assert order.count(name) <= 1 + suspended.get(name, 0), (
            "what was suspended once is started at most once more"
        )
        assert order.count(name) >= 1 or name in left


def _turns(bench, names, lengths):
    """Has each job work for so many turns, and give it to others in between; returns who worked, turn by turn."""
    left, worked = dict(lengths), []
    while held := [job for job in bench.jobs.values() if job.slot is not None]:
        (job,) = held  # There is one slot.
        worked.append(job.name)
        left[job.name] -= 1
        if not left[job.name]:
            bench.slots.release(job)
        elif bench.slots.others_wait(job):
            bench.slots.give_turn(job)
    assert not any(left.values()) and bench.slots.waiting_count == 0
    return worked


@pytest.mark.parametrize("policy", POLICIES)
def test_long_jobs_of_some_processes_delay_a_short_one_by_a_turn_of_each(policy):
    bench = Bench(policy=policy)
    lengths = {}
    for process in "abc":
        for number in range(3):
            name = f"{process}{number}"
            lengths[name] = 10
            bench.enter(name, owner=Connection(process, number))
    lengths["short"] = 1
    bench.enter("short", owner=Connection("d", 0))
    worked = _turns(bench, "abc", lengths)
    assert worked[:4] == ["a0", "b0", "c0", "short"]
    # Of each process one job is begun at a time, and the processes take turns until the end.
    assert worked[4:33] == ["a0", "b0", "c0"] * 9 + ["a1", "b1"]
    assert [name for name in dict.fromkeys(worked) if name.startswith("a")] == ["a0", "a1", "a2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_job_gives_no_turn_to_lower_priorities_or_to_its_own_process(policy):
    bench = Bench(policy=policy)
    holder = bench.enter("holder", owner=Connection("a", 0))
    bench.enter("own", owner=Connection("a", 1))
    bench.enter("low", LOW, owner=Connection("b", 0))
    assert not bench.slots.others_wait(holder)
    bench.enter("high", HIGH, owner=Connection("b", 0))
    assert bench.slots.others_wait(holder)
    bench.slots.give_turn(holder)
    assert bench.run_all() == ["holder", "high", "holder", "own", "low"]


@pytest.mark.parametrize("policy", POLICIES)
def test_deadlines_of_one_process_keep_no_turn_from_another(policy):
    """A job with a deadline goes before one without, but only once, and no further one takes the place of one that has begun."""
    bench = Bench(policy=policy)
    holder = bench.enter("holder", MEDIUM, 1000, owner="a")
    bench.enter("other", owner="b")
    bench.slots.give_turn(holder)
    assert bench.jobs["other"].slot is not None
    bench.enter("earlier", MEDIUM, 1800, owner="a")
    bench.now_ns = 1500  # The holder's deadline has come: what it works for looks at it.
    assert bench.run_all() == ["holder", "other", "holder", "earlier"]


@pytest.mark.parametrize("policy", POLICIES)
def test_early_deadlines_of_other_processes_keep_no_job_from_its_turn(policy):
    """Two others have their next short job, with a deadline, before the last one ends."""
    bench = Bench(policy=policy)
    long = bench.enter("long", owner="a")
    for number in range(20):
        for process in "bc":
            bench.enter(f"{process}{number}", MEDIUM, 1000 + number, owner=process)
    while bench.slots.others_wait(long):
        bench.slots.give_turn(long)
        while long.slot is None:
            bench.slots.release(next(job for job in bench.jobs.values() if job.slot is not None))
    order = bench.run_all()
    turns = [position for position, name in enumerate(order) if name == "long"]
    assert all(later - earlier <= 3 for earlier, later in itertools.pairwise(turns)), order
    assert len(order) == 40 + len(turns)


@pytest.mark.parametrize("policy", POLICIES)
def test_job_that_gave_its_turn_waits_for_no_process_that_has_left(policy):
    bench = Bench(policy=policy)
    long = bench.enter("long", owner="a")
    first, second = (bench.enter(f"b{number}", owner="b") for number in range(2))
    gone = bench.enter("gone", owner="c")
    bench.slots.give_turn(long)
    assert first.slot is not None
    bench.slots.leave(gone)
    bench.slots.leave(second)
    bench.slots.release(first)
    assert long.slot is not None
    bench.slots.release(long)
    slots = bench.slots
    assert not (slots._shown or slots._behind or slots._suspended or slots._queued or slots._given)


@pytest.mark.parametrize("seed", range(20))
def test_turns_lose_no_job_and_begin_one_of_a_process_and_class_at_a_time(seed):
    chance = random.Random(seed)
    bench = Bench(policy=chance.choice([PlanPolicy(), PlainPolicy()]))
    left = {}
    for number in range(60):
        if number < 40:
            process = chance.choice("abc")
            deadline_ns = chance.choice([None, 10_000 + number])
            name = f"{number}"
            left[name] = chance.randrange(1, 6)
            owner = Connection(process, chance.randrange(3))
            bench.enter(name, chance.choice([LOW, MEDIUM]), deadline_ns, owner=owner)
        for _ in range(chance.randrange(4) if number < 40 else 1000):
            held = [job for job in bench.jobs.values() if job.slot is not None]
            if not held:
                break
            (job,) = held
            left[job.name] -= 1
            if not left[job.name]:
                bench.slots.release(job)
            elif bench.slots.others_wait(job):
                bench.slots.give_turn(job)
            begun = [
                (job.owner.process, job.priority)
                for job in bench.jobs.values()
                if left[job.name] and job.has_given_turn
            ]
            assert len(set(begun)) == len(begun)
    assert not any(left.values())
    assert bench.slots.waiting_count == bench.slots.held_count == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_turns_leaves_loses_no_job_and_keeps_no_process(seed):
    """With jobs that are cancelled wherever they are, deadlines that come, and times that pass."""
    chance = random.Random(seed)
    bench = Bench(policy=chance.choice([PlanPolicy(), PlainPolicy()]))
    slots = bench.slots
    gone = set()
    for number in range(600):
        bench.now_ns += chance.choice([0, 1, 100, AGE_NS // 50])
        held = [job for job in bench.jobs.values() if job.slot is not None]
        assert len(held) == slots.held_count <= 1 and (held or not slots.waiting_count)
        what = chance.choice(["enter", "enter", "leave", "release", "give", "give"])
        if number >= 300 and what in ("enter", "leave"):
            what = "release"  # All of them end.
        if what == "enter":
            deadline_ns = chance.choice([None, bench.now_ns + chance.choice([-1, 1, 1000, AGE_NS])])
            owner = Connection(chance.choice("abcd"), chance.randrange(2))
            bench.enter(f"{number}", chance.choice([LOW, MEDIUM, HIGH]), deadline_ns, owner=owner)
        elif what == "leave" and bench.jobs:
            name, job = chance.choice(list(bench.jobs.items()))
            starts = sum(name == started for started, _ in bench.log)
            if job.slot is None and (job.has_given_turn or not starts):
                slots.leave(job)
                gone.add(name)
        elif held and what == "release":
            slots.release(held[0])
            gone.add(held[0].name)
        elif held and slots.others_wait(held[0]):
            before = len(bench.log)
            slots.give_turn(held[0])
            # It goes on at once only where the deadline of another one has come.
            assert held[0].slot is None or None in [slot for _, slot in bench.log[before:]]
    bench.run_all()
    started = {name for name, _ in bench.log}
    assert started | gone == set(bench.jobs)
    assert not (slots._shown or slots._behind or slots._suspended or slots._queued or slots._given)
    assert not slots._behind_count

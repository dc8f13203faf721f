"""The bound: never below what can be done, and where the optimum is known, equal to it."""

import itertools
import random

import pytest

pytest.importorskip("scipy", reason="the bound needs scipy")

from aionn.hal import Priority
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.simulation import bound as bound_module
from aionn.simulation.baselines import POLICIES
from aionn.simulation.bound import BoundRequest, fluid_rate, on_time_bound, requests_of, total_bound
from aionn.simulation.engine import Engine, prepare

MS = 1_000_000


def moore_hodgson(jobs):
    """The most jobs ``(duration, deadline)`` on time on one device that all are there at 0."""
    taken, total = [], 0
    for duration, deadline in sorted(jobs, key=lambda job: job[1]):
        taken.append(duration)
        total += duration
        if total > deadline:
            total -= max(taken)
            taken.remove(max(taken))
    return len(taken)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.thorough
def test_bound_equals_the_optimum_on_one_device(seed):
    source = random.Random(seed)
    jobs = [(source.randrange(1, 20) * MS, source.randrange(5, 80) * MS) for _ in range(12)]
    requests = [BoundRequest(0, deadline, (duration,), Priority.LOW) for duration, deadline in jobs]
    best = moore_hodgson(jobs)
    # The program may serve a part of one request more; never less than what is possible.
    assert best <= total_bound(requests, [1]) <= best + 1


def test_bound_agrees_with_trying_everything():
    for seed in range(10):
        source = random.Random(seed)
        jobs = [
            (source.randrange(1, 9) * MS, source.randrange(2, 12) * MS, source.randrange(6, 20) * MS)
            for _ in range(5)
        ]
        best = 0
        for assignment in itertools.product((0, 1), repeat=len(jobs)):
            best = max(
                best,
                sum(
                    moore_hodgson([(job[d], job[2]) for job, at in zip(jobs, assignment) if at == d])
                    for d in (0, 1)
                ),
            )
        requests = [BoundRequest(0, job[2], (job[0], job[1]), Priority.LOW) for job in jobs]
        assert best <= total_bound(requests, [1, 1], migrates=False) <= total_bound(requests, [1, 1])


def test_high_comes_first():
    requests = [
        BoundRequest(0, 10 * MS, (10 * MS,), Priority.HIGH),
        *(BoundRequest(0, 10 * MS, (2 * MS,), Priority.LOW) for _ in range(5)),
    ]
    found = on_time_bound(requests, [1])
    assert found.by_priority == {Priority.HIGH: 1, Priority.MEDIUM: 0, Priority.LOW: 0}
    assert total_bound(requests, [1]) == 5


def test_impossible_requests_count_for_nothing():
    requests = [BoundRequest(0, 9 * MS, (10 * MS, None), Priority.LOW) for _ in range(20)]
    assert total_bound(requests, [2, 1]) == 0


def test_request_is_on_one_device_at_a_time():
    requests = [BoundRequest(0, 10 * MS, (11 * MS, 9 * MS), Priority.LOW)]
    assert total_bound([*requests, *requests], [1, 1]) == 2  # They swap devices halfway.
    assert total_bound([*requests, *requests], [1, 1], migrates=False) == 1
    assert total_bound([*requests, *requests, *requests], [1, 1]) == 2


def test_follower_is_served_no_more_than_what_it_follows():
    first = BoundRequest(0, 5 * MS, (10 * MS,), Priority.LOW)
    follower = BoundRequest(10 * MS, 20 * MS, (1 * MS,), Priority.LOW, 0)
    assert total_bound([first, follower], [1]) == 0


def test_no_policy_exceeds_the_bound(draw_workload):
    for seed in range(100, 106):
        scenario = prepare(draw_workload(seed, with_faults=False), seed)
        if any(arrival.deadline_ns is None for arrival in scenario.arrivals) or len(scenario.arrivals) > 150:
            continue
        most = total_bound(requests_of(scenario), [device.slots for device in scenario.devices])
        for policy in POLICIES.values():
            engine = Engine(scenario, policy)
            engine.run()
            assert sum(o.kind == "on_time" for o in engine.outcomes) <= most, (seed, policy.name)


def test_our_policy_is_optimal_for_what_is_all_there():
    from aionn.scheduler.job import Abort, DeviceSlot, Job, JobState, Start
    from aionn.scheduler.planned_queue import PlannedQueue

    for seed in range(60):
        source = random.Random(seed)
        terms = [(source.randrange(1, 20), source.randrange(5, 80)) for _ in range(source.randrange(2, 10))]
        slot = DeviceSlot(0, 0)
        queue = PlannedQueue([slot])
        # What runs first keeps the slot until all are there.
        jobs = [
            Job(i, priority=Priority.LOW, deadline_ns=d, arrival_ns=0, durations_ns=(p,))
            for i, (p, d) in enumerate(terms)
        ]
        for job in jobs:
            queue.add(job, 0)
        now, done = 0, 0
        while len(queue):
            for action in PlanPolicy().decide(now, queue, [slot]):
                queue.remove(action.job)
                action.job.state = JobState.ENDED
                if isinstance(action, Start):
                    now += action.job.durations_ns[0]
                    done += now <= action.job.deadline_ns
                    break
                assert isinstance(action, Abort)
            else:
                now = max(now, queue.next_wake_ns()) if len(queue) else now
        best = moore_hodgson(terms)
        assert best - 1 <= done <= best, (seed, jobs)


def test_fluid_rate_is_the_share_of_the_best_division():
    # A device does 100 of these in a second, another 50: 150 in all.
    assert fluid_rate([], [(1.0, (10 * MS, 20 * MS))], [1, 1], 1.0) == pytest.approx(150)
    assert fluid_rate(
        [(75.0, (10 * MS, 20 * MS))], [(1.0, (10 * MS, 20 * MS))], [1, 1], 1.0
    ) == pytest.approx(75)
    assert fluid_rate([(1000.0, (10 * MS,))], [(1.0, (10 * MS,))], [1], 1.0) == 0.0


def test_missing_scipy_is_told(monkeypatch):
    import sys

    from aionn.errors import DeviceUnavailable

    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'aionn\[bound\]'"):
        bound_module.total_bound([BoundRequest(0, 10, (5,), Priority.LOW)], [1])

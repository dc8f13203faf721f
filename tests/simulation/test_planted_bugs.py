"""Bugs planted into the scheduler: each must be caught by the checkers or by the engine's own assertions."""

import pytest

from aionn.scheduler import planning_policy as policy_module
from aionn.scheduler.job import Preempt, Start
from aionn.scheduler.planned_queue import PlannedQueue
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.slot_plan import Place
from aionn.simulation.checkers import Watched, breaches
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.workload import workload_from_text

TEXT = """
name = "mixed"
duration_s = 0.6
devices = ["slow", "quick"]
[[device]]
name = "slow"
rates = {int8 = 1e11, float16 = 1e11, float32 = 1e11}
memory_bandwidth = 1e10
[[device]]
name = "quick"
rates = {int8 = 5e11}
memory_bandwidth = 1e10
[[stream]]
name = "camera"
model = "classify-int8"
priority = "high"
rate_per_s = 60
deadline_s = 0.02
[[stream]]
name = "flood"
model = "embed-int8"
priority = "low"
arrivals = "poisson"
rate_per_s = 120
deadline_s = 0.15
"""

AGEING = """
name = "ageing"
duration_s = 6.0
devices = ["one"]
[[device]]
name = "one"
rates = {int8 = 1e11}
memory_bandwidth = 1e10
[[stream]]
name = "medium"
model = "classify-int8"
rate_per_s = 170
deadline_s = 5.0
[[stream]]
name = "low"
model = "keyword-int8"
priority = "low"
rate_per_s = 5
"""


def caught(policy, text=TEXT):
    """What the checkers say of a run; an assertion of the engine counts."""
    watched = Watched(policy)
    engine = Engine(prepare(workload_from_text(text), 3), watched, record=True)
    try:
        engine.run()
    except AssertionError as e:
        return [f"assertion: {e}"]
    overran = [str(o) for o in engine.outcomes if o.kind == "late" or "past its deadline" in o.why]
    return breaches(engine) + watched.breaches + overran


class StartsOnBusyLanes(PlanPolicy):
    def decide(self, now_ns, queue, slots):
        actions = super().decide(now_ns, queue, slots)
        return [Start(a.by, a.slot) if isinstance(a, Preempt) else a for a in actions]


class NeverInterrupts(PlanPolicy):
    def decide(self, now_ns, queue, slots):
        return [a for a in super().decide(now_ns, queue, slots) if not isinstance(a, Preempt)]


class RoomThatForgets(PlannedQueue):
    def add(self, job, now_ns):
        return None if job.has_run else super().add(job, now_ns)


class RoomWithoutAge(PlannedQueue):
    def age(self, now_ns):
        pass


class RoomThatKeepsTheExpired(PlannedQueue):
    """An expired job looks most urgent, as where what is left is clamped to zero."""

    def place_on(self, job, slot, now_ns):
        place = super().place_on(job, slot, now_ns)
        duration_ns = job.durations_ns[slot.device]
        if place is None and duration_ns < 1 << 62:
            return Place(
                now_ns + duration_ns,
                True,
                0 if not self.plans[slot.index].jobs else len(self.plans[slot.index]),
                duration_ns,
                False,
            )
        return place


class StartsAnywhere(PlanPolicy):
    """Takes the last free slot, whatever its device can run."""

    def decide(self, now_ns, queue, slots):
        actions = super().decide(now_ns, queue, slots)
        free = [slot for slot in slots if slot.job is None]
        return [Start(a.job, free.pop()) if isinstance(a, Start) else a for a in actions]


class WithRoom(PlanPolicy):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def make_queue(self, slots):
        return self.kind(slots)


@pytest.mark.parametrize("text", [TEXT, AGEING])
def test_without_a_bug_nothing_is_found(text):
    assert caught(PlanPolicy(), text) == []


def test_start_on_a_busy_slot_is_caught():
    assert any("one job at a time" in breach for breach in caught(StartsOnBusyLanes()))


def test_missing_interruption_is_caught():
    assert any("HIGH job" in breach for breach in caught(NeverInterrupts()))


def test_forgotten_job_is_caught():
    assert any("has an outcome" in breach for breach in caught(WithRoom(RoomThatForgets)))


def test_missing_ageing_is_caught():
    assert any("overtaken without end" in breach for breach in caught(WithRoom(RoomWithoutAge), AGEING))


def test_plans_that_cannot_be_kept_are_caught(monkeypatch):
    # The decision starts what its plan says, late or not.
    monkeypatch.setattr(policy_module.PlannedQueue, "replan", lambda self, job, now_ns: None)
    original = policy_module._start

    def start(now_ns, queue, slot, gone, actions):
        for job in queue.plans[slot.index].jobs:
            if job.number not in gone:
                gone.add(job.number)
                actions.append(Start(job, slot))
                return True
        return original(now_ns, queue, slot, gone, actions)

    monkeypatch.setattr(policy_module, "_start", start)
    assert any("past its deadline" in breach for breach in caught(WithRoom(RoomThatKeepsTheExpired)))


def test_job_on_a_device_that_cannot_run_it_is_caught():
    text = TEXT.replace('model = "embed-int8"', 'model = "classify-float16"')
    assert any("can run" in breach for breach in caught(StartsAnywhere(), text))

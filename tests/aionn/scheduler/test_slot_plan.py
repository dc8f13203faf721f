"""The plan of a slot against a simple list."""

import random

import pytest

from aionn.hal import Priority
from aionn.scheduler.job import Job
from aionn.scheduler.slot_plan import SlotPlan


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 30), marks=pytest.mark.long)], ids=["some", "more"]
)
@pytest.mark.thorough
def test_sums_and_slacks_agree_with_a_plain_list(seeds):
    for seed in seeds:
        source = random.Random(seed)
        plan = SlotPlan()
        model: list[tuple[Job, int]] = []
        for number in range(120):
            if model and source.random() < 0.4:
                job, _ = model.pop(0 if source.random() < 0.5 else source.randrange(len(model)))
                plan.remove(job)
            else:
                duration = source.randrange(1, 50)
                job = Job(
                    number,
                    priority=Priority(source.randrange(3)),
                    deadline_ns=source.randrange(1, 2000),
                    arrival_ns=0,
                    durations_ns=(duration,),
                )
                position = sum(other.key < job.key for other, _ in model)
                plan.insert(position, job, duration)
                model.insert(position, (job, duration))
            assert plan.jobs == [job for job, _ in model], seed
            passed = 0
            for position, (job, duration) in enumerate(model):
                assert plan.before_ns(position) == passed
                assert plan.duration_ns(position) == duration
                passed += duration
                assert plan.slack_ns(position, position + 1) == job.deadline_ns - passed
            late = [i for i in range(len(model)) if plan.slack_ns(i, i + 1) < 300]
            assert plan.first_late(0, 0, 300) == (late[0] if late else -1)
            for sooner in range(200, 400, 20):
                later, count = sooner + source.randrange(100), source.randrange(len(model) + 1)
                slacks = [plan.slack_ns(i, i + 1) for i in range(count)]
                for first, last in ((sooner, later), *((slack, slack + 1) for slack in slacks)):
                    between = any(first <= slack < last for slack in slacks)
                    assert plan.is_late_between(count, first, last) == between
                for slack in slacks:
                    assert plan.is_late_between(count, slack - 1, slack) == (slack - 1 in slacks)

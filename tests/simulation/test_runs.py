"""Whole runs over workloads, devices and faults drawn from a seed, judged by checkers that know nothing of the scheduler.

A failure names its seed; ``AIONN_SEED=<seed> python -m pytest tests/simulation/test_runs.py -k replay`` runs that one alone.
"""

import os

import pytest

from aionn.scheduler.estimates import Estimates
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.simulation.baselines import POLICIES
from aionn.simulation.checkers import Watched, breaches
from aionn.simulation.engine import Engine, prepare

QUICK = [*range(37), 1603, 1710, 1782, 2906]  # The last ones once found something.
LONG = range(1000, 3000)


def judge(draw_workload, seed):
    """Every breach in the runs of one seed: exact and with faults, ours and the others'."""
    found = []
    for with_faults in (False, True):
        scenario = prepare(draw_workload(seed, with_faults=with_faults), seed)
        watched = Watched(PlanPolicy())
        engine = Engine(
            scenario,
            watched,
            estimates=Estimates() if with_faults else None,
            record=True,
            answers_twice=seed % 3 == 0,
        )
        engine.run()
        found += breaches(engine) + watched.breaches
        if not with_faults:
            # Without noise whoever is begun and not displaced ends in time.
            found += [f"overran: {o}" for o in engine.outcomes if o.kind == "late" or "past its" in o.why]
        names = sorted(POLICIES)
        other = Engine(scenario, POLICIES[names[seed % len(names)]], record=True)
        other.run()
        found += breaches(other, ages=other.policy.name == "plan")
    return [f"seed {seed}: {breach}" for breach in found]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("block", range(0, len(QUICK), 10))
@pytest.mark.thorough
def test_runs_keep_the_rules(draw_workload, block):
    found = [breach for seed in QUICK[block : block + 10] for breach in judge(draw_workload, seed)]
    assert not found, f"replay with AIONN_SEED: {found[:5]}"


@pytest.mark.long
def test_many_runs_keep_the_rules(draw_workload):
    for seed in LONG:
        found = judge(draw_workload, seed)
        assert not found, f"replay with AIONN_SEED: {found[:5]}"


if "AIONN_SEED" in os.environ:

    def test_replay(draw_workload):
        assert judge(draw_workload, int(os.environ["AIONN_SEED"])) == []


def test_same_seed_gives_the_same_record(draw_workload):
    def digest(record=True):
        scenario = prepare(draw_workload(7, with_faults=True), 7)
        engine = Engine(scenario, PlanPolicy(), estimates=Estimates(), record=record)
        engine.run()
        return engine.digest(), engine.outcomes

    first = digest()
    assert all(digest() == first for _ in range(5))
    assert digest(record=False)[1] == first[1]

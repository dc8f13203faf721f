"""What no scheduler can promise: small games, played to the end by trying everything.

EDF with early abort knows no classes. No scheduler that keeps them is never below it, nor is any that ever chooses another device
than it does: so it is compared over many runs.
"""

from functools import cache

import msgspec
import pytest

from aionn.hal import Priority
from aionn.simulation.baselines import POLICIES
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.workload import Arrival, workload_from_text

LOW, HIGH = Priority.LOW, Priority.HIGH
MS = 1_000_000
NEVER = 99


def may_wait(running, waiting):
    """Any order is allowed."""
    return True


def high_waits_one_operation(running, waiting):
    """What HIGH may be made to wait for: the one operation of a lower job during which it came, which ``most`` lets end."""
    return running >= HIGH or HIGH not in waiting


def most(jobs, rule=may_wait, first=None, keeps_high=False):
    """The most jobs that any schedule ends on time, whatever it knows, an operation taking 1.

    Args:
        jobs: ``(release, deadline, durations by device, priority)``.
        rule: Whether one may run while others of given priorities wait.
        first: The device that the first job is begun on at once; None for any, or none.
        keeps_high: Whether all HIGH jobs must be among them.
    """
    devices = range(len(jobs[0][2]))
    end = max(deadline for _, deadline, _, _ in jobs)

    @cache
    def play(now, left, where):
        # left[j] is what job j still needs on where[j]; 0 when it has ended, where -1 before its first start.
        if now == end:
            loses_high = any(rest and job[3] == HIGH for rest, job in zip(left, jobs, strict=True))
            return 0 if keeps_high and loses_high else left.count(0)
        ready = [
            j
            for j, job in enumerate(jobs)
            if job[0] <= now and left[j] > 0 and now + min(left[j], *job[2]) <= job[1]
        ]
        best = 0
        for moves in every_assignment(ready, len(devices)):
            if first is not None and now == jobs[0][0] and moves[first] != 0:
                continue
            waiting = {jobs[j][3] for j in ready if j not in moves and jobs[j][0] < now}
            if any(j is not None and not rule(jobs[j][3], waiting) for j in moves):
                continue
            new_left, new_where = list(left), list(where)
            for device, j in enumerate(moves):
                if j is None:
                    continue
                if new_where[j] != device:
                    new_left[j], new_where[j] = jobs[j][2][device], device
                new_left[j] -= 1
                if new_left[j] == 0 and now + 1 > jobs[j][1]:
                    new_left[j] = NEVER
            best = max(best, play(now + 1, tuple(new_left), tuple(new_where)))
        return best

    return play(0, (NEVER,) * len(jobs), (-1,) * len(jobs))


def every_assignment(ready, device_count):
    """All ways to give devices one job each, or none."""
    if not device_count:
        yield ()
        return
    for rest in every_assignment(ready, device_count - 1):
        for j in [None, *(j for j in ready if j not in rest)]:
            yield (*rest, j)


def played(jobs, policy):
    """How many a policy ends on time, of all and of HIGH."""
    devices = [f"device{d}" for d in range(len(jobs[0][2]))]
    text = f"name = 'game'\nduration_s = 1.0\ndevices = {devices}\n"
    text += "".join(
        f"[[device]]\nname = '{d}'\nrates = {{int8 = 1e9}}\nmemory_bandwidth = 1e9\n" for d in devices
    )
    for index, (_, _, _, priority) in enumerate(jobs):
        text += f"[[stream]]\nname = 's{index}'\nmodel = 'keyword-int8'\nrate_per_s = 1.0\n"
        text += f"priority = '{priority.name.lower()}'\n"
    scenario = prepare(workload_from_text(text), 1)
    arrivals = [Arrival(job[0] * MS, index, job[1] * MS) for index, job in enumerate(jobs)]
    durations = [tuple(None if d == NEVER else (MS,) * d for d in job[2]) for job in jobs]
    engine = Engine(
        msgspec.structs.replace(scenario, arrivals=arrivals, durations_ns=durations),
        POLICIES[policy],
        is_clock_held=True,
    )
    engine.run()
    ended = [jobs[o.number] for o in engine.outcomes if o.kind == "on_time"]
    return len(ended), sum(job[3] == HIGH for job in ended)


def test_whoever_keeps_high_loses_to_edf_where_several_low_fit_for_one_high():
    jobs = [(0, 5, (4,), HIGH), *[(0, 4, (1,), LOW)] * 3]
    assert played(jobs, "edf-abort") == (3, 0)
    assert played(jobs, "plan") == (1, 1)
    assert most(jobs) == 3 and most(jobs, keeps_high=True) == 2


def test_whoever_lets_high_wait_one_operation_loses_to_edf_though_edf_loses_no_high():
    jobs = [(0, 4, (4,), LOW), (1, 10, (1,), HIGH)]
    assert played(jobs, "edf-abort") == (2, 1)
    assert played(jobs, "plan") == played(jobs, "edf-abort-high") == (1, 1)
    assert most(jobs) == 2 and most(jobs, high_waits_one_operation) == 1


@pytest.mark.parametrize(("chosen", "other"), [(0, 1), (1, 0)])
def test_every_choice_of_a_device_loses_to_the_other_choice_on_some_future(chosen, other):
    # The first may run anywhere, and must be begun at once; the second comes later, for the chosen device alone.
    durations = tuple(1 if device == chosen else NEVER for device in (0, 1))
    jobs = [(0, 2, (2, 2), LOW), (1, 2, durations, LOW)]
    assert most(jobs, first=chosen) == 1
    assert most(jobs, first=other) == 2
    # EDF makes the first of the two choices: whoever makes the second is below it on one of these futures.
    assert played(jobs, "edf-abort")[0] == (1 if chosen == 0 else 2)


def test_trying_everything_finds_the_best_of_a_domino():
    # EDF begins what it cannot end beside the others; the best leaves the long one out.
    jobs = [(0, 1, (1,), LOW), (0, 5, (4,), LOW), (0, 6, (2,), LOW), (0, 6, (2,), LOW)]
    assert most(jobs) == played(jobs, "plan")[0] == 3
    assert played(jobs, "edf-abort")[0] == 2

"""Streams with phases in virtual time: no frame of an admitted set is lost, and each part of the test is needed for that."""

import random

import msgspec
import numpy as np
import pytest

from aionn.drivers.simulated.profiles import DeviceProfile
from aionn.scheduler.admission import SHARE_PPM, Demand, SlotCost, SlotTest, StreamTerms
from aionn.scheduler.ledger import Reservation
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.reservations import phases
from aionn.simulation.checkers import breaches, broken_guarantees
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.phasings import PHASINGS, phased_arrivals
from aionn.simulation.reservations import Admission
from aionn.simulation.scenario import Scenario
from aionn.simulation.workload import Stream, Workload, workload_from_text
from benchmarks.guarantees import Drawn

MS = 1_000_000
SPAN_NS = 200 * MS


def draw_phased(seed, *, preemption="none", jitter=0.0, tolerance=0.0, plain=0.0, pieces=8):
    """Streams of few periods with short deadlines and random phases, of which a share promises no phase."""
    source = random.Random(f"phased/{seed}")
    device = DeviceProfile(name="lane", rates={"int8": 1e9}, memory_bandwidth=1e9, preemption=preemption)
    streams, rows, demands = [], [], []
    period = source.choice((20, 40)) * MS
    for index in range(source.randrange(3, 9)):
        own = period * source.choice((1, 1, 1, 2))
        operations = [source.randrange(100_000, max(200_000, own // 30)) for _ in range(pieces)]
        whole_ns = sum(operations)
        deadline_ns = int(max(whole_ns * 1.3, own * source.uniform(0.2, 0.8)))
        shorter_ns = min(own, deadline_ns)
        has_phase = source.random() >= plain
        terms = StreamTerms(
            name=f"s{index}",
            period_ns=own,
            deadline_ns=deadline_ns,
            jitter_ns=int(shorter_ns * source.uniform(0, jitter)),
            phase_ns=source.randrange(own) if has_phase else None,
            tolerance_ns=int(shorter_ns * source.uniform(0, tolerance)) if has_phase else 0,
        )
        piece_ns = max(operations) if preemption != "none" else whole_ns
        demands.append(Demand(terms, SlotCost(duration_ns=whole_ns, piece_ns=piece_ns)))
        rows.append((tuple(operations),))
        streams.append(
            Stream(
                name=f"s{index}",
                model="keyword-int8",
                rate_per_s=1e9 / own,
                deadline_s=deadline_ns / 1e9,
                guarantee=True,
            )
        )
    workload = Workload(
        name=f"set-{seed}", duration_s=1.0, devices=("lane",), stream=tuple(streams), device=(device,)
    )
    return Drawn(Scenario(workload, (device,), [], rows, seed), demands)


def admitted(drawn):
    """The streams that the test admits one after the other, and which of the refused ones fit only by their phases."""
    held, by_phase = {}, 0
    for index, new in enumerate(drawn.demands):
        before = [d for d in drawn.demands if d in held.values()]
        test = SlotTest(before, cap_ppm=SHARE_PPM)
        if test.verdict(new).fits:
            held[index] = new
            by_phase += not test._in_all_phases(new).fits
    return held, by_phase


def lost_in(drawn, held, seed, kinds=PHASINGS):
    """The frames that are lost, or labelled without a cause, in some kinds of arrivals."""
    kept = sorted(held)
    scenario = msgspec.structs.replace(
        drawn.scenario,
        workload=msgspec.structs.replace(
            drawn.scenario.workload,
            stream=tuple(drawn.scenario.workload.stream[index] for index in kept),
        ),
        durations_ns=[drawn.scenario.durations_ns[index] for index in kept],
    )
    demands = [drawn.demands[index] for index in kept]
    verdict = SlotTest(demands).verdict()
    reservations = {
        number: Reservation(number, "", d.terms, d.cost, 0, "lane/0", verdict, 0)
        for number, d in enumerate(demands)
    }
    found, frames = [], 0
    for kind in kinds:
        arrivals = phased_arrivals(demands, kind, seed, SPAN_NS)
        engine = Engine(
            msgspec.structs.replace(scenario, arrivals=arrivals),
            PlanPolicy(),
            is_clock_held=True,
            admission=Admission(reservations, {}),
            record=True,
        )
        engine.run()
        frames += len(arrivals)
        found += broken_guarantees(engine)
        found += [f"{n} is {f.label}" for n, f in engine.frames.items() if f.label is not None]
        found += [f"{n} was lost" for n, o in enumerate(engine.outcomes) if o.kind != "on_time"]
    return found, frames


CASES = [
    {"preemption": "none"},
    {"preemption": "none", "jitter": 0.2, "tolerance": 0.05},
    {"preemption": "between_operations", "jitter": 0.1, "tolerance": 0.1},
    {"preemption": "between_operations", "plain": 0.3, "jitter": 0.1, "tolerance": 0.02},
    {"preemption": "none", "plain": 0.3},
]


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 600), marks=pytest.mark.long)], ids=["some", "many"]
)
@pytest.mark.parametrize("settings", CASES, ids=lambda s: "-".join(map(str, s.values())))
def test_admitted_streams_with_phases_lose_no_frame(settings, seeds):
    by_phases = all_frames = 0
    for seed in seeds:
        drawn = draw_phased(seed, **settings)
        held, by_phase = admitted(drawn)
        kinds = [PHASINGS[(seed + n) % len(PHASINGS)] for n in (0, 3)] if len(seeds) < 20 else PHASINGS
        found, frames = lost_in(drawn, held, seed, kinds)
        assert found == [], f"set {seed}"
        by_phases += by_phase
        all_frames += frames
    assert by_phases >= len(seeds) // 6 and all_frames > 20 * len(seeds)


def breaks(seeds, **settings):
    """Whether a set that the test admits by its phases loses a frame."""
    for seed in seeds:
        drawn = draw_phased(seed, **settings)
        held, by_phase = admitted(drawn)
        if by_phase and lost_in(drawn, held, seed)[0]:
            return True
    return False


def without_blocking(monkeypatch):
    monkeypatch.setattr(phases, "_longest_pieces", lambda limits, pieces, lengths: np.zeros_like(lengths))


def with_floor_for_ceiling(monkeypatch):
    """A frame that may arrive exactly when the interval begins is not counted."""
    monkeypatch.setattr(
        phases, "_at_or_after", lambda times, opens, period: opens + ((times - opens) // period + 1) * period
    )


def without_widths(monkeypatch):
    monkeypatch.setattr(Demand, "windows", property(_narrow, None))


def _narrow(demand):
    terms, cost = demand.terms, demand.cost
    opens_ns = 0 if terms.phase_ns is None else terms.phase_ns % terms.period_ns
    return phases.Windows(opens_ns, terms.period_ns, 0, terms.deadline_ns, cost.duration_ns, cost.piece_ns)


def without_the_frame_that_ends_at_the_length(monkeypatch):
    original = phases.Bound.at
    monkeypatch.setattr(phases.Bound, "at", lambda self, lengths: original(self, lengths - 1))


def with_the_first_position_alone(monkeypatch):
    original = phases._envelope

    def envelope(lengths, demand, blocked, *rest):
        return original(lengths[:1], demand[:1], blocked[:1], *rest)

    monkeypatch.setattr(phases, "_envelope", envelope)


def without_streams_of_other_periods(monkeypatch):
    original = phases.demand_by_phases

    def demand_by_phases(streams, rest, **settings):
        return original(streams, [], **settings)

    monkeypatch.setattr("aionn.scheduler.admission.demand_by_phases", demand_by_phases)


@pytest.mark.parametrize(
    "mutation, settings",
    [
        (without_blocking, {"preemption": "none"}),
        (with_floor_for_ceiling, {"preemption": "none"}),
        (without_widths, {"jitter": 0.4, "tolerance": 0.1}),
        pytest.param(
            without_the_frame_that_ends_at_the_length, {"preemption": "none"}, marks=pytest.mark.thorough
        ),
        (with_the_first_position_alone, {"preemption": "none"}),
        (without_streams_of_other_periods, {"plain": 0.4}),
    ],
)
def test_test_without_a_part_admits_a_set_that_loses_frames(monkeypatch, mutation, settings):
    assert not breaks(range(6), **settings)
    mutation(monkeypatch)
    assert breaks(range(60), **settings)


# --- Workloads ----------------------------------------------------------------------------------------------------------------

TEXT = """
name = "phases"
duration_s = 2.0
devices = ["lane"]
[[device]]
name = "lane"
rates = {int8 = 1e9}
memory_bandwidth = 1e9
preemption = "none"
[[model]]
name = "cam"
operations = 4
arithmetic = 4e6
data_type = "int8"
"""
STREAM = """
[[stream]]
name = "NAME"
model = "cam"
rate_per_s = 30
phase_s = PHASE
jitter_s = 0.0005
deadline_s = 0.010
guarantee = "phased"
"""


def ran(phases_s):
    streams = [STREAM.replace("NAME", f"c{i}").replace("PHASE", str(s)) for i, s in enumerate(phases_s)]
    engine = Engine(prepare(workload_from_text(TEXT + "".join(streams)), 1), PlanPolicy(), record=True)
    engine.run()
    return engine


def test_workload_with_phases_that_are_spread_is_admitted_whole_and_loses_no_frame():
    engine = ran([0.0051 * index for index in range(6)])
    assert len(engine.admission.reservations) == 6
    assert breaches(engine, ages=False) == []
    assert {outcome.kind for outcome in engine.outcomes} == {"on_time"}
    assert {frame.label for frame in engine.frames.values()} == {None}


def test_workload_with_phases_that_come_together_is_refused_in_part():
    engine = ran([0.005] * 4)
    assert len(engine.admission.reservations) == 1
    assert all("with captures" in text for text in engine.admission.refusals.values())
    assert breaches(engine, ages=False) == []


def test_guarantee_by_phases_needs_periodic_arrivals():
    text = TEXT + STREAM.replace("NAME", "c").replace("PHASE", "0").replace(
        "rate_per_s = 30", 'rate_per_s = 30\nperiod_s = 0.03\narrivals = "poisson"'
    )
    with pytest.raises(ValueError, match="arrivals: expected periodic"):
        workload_from_text(text)

"""Admitted streams lose no frame, and each term of the admission test is needed for that."""

import random

import msgspec
import pytest

from aionn.scheduler import admission as admission_module
from aionn.scheduler.admission import Demand, Piece, SlotTest
from aionn.scheduler.bandwidth import Label
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.simulation.checkers import Watched, breaches, broken_guarantees
from aionn.simulation.engine import Engine, prepare
from aionn.simulation.phasings import PHASINGS, phased_arrivals
from aionn.simulation.reservations import Admission, admit_streams
from aionn.simulation.workload import Arrival, workload_from_text
from benchmarks.guarantees import Outcome, admit_by_test, draw_set, only, run_admitted, with_phases

SPAN_NS = 150_000_000


def judged(seeds, preemption, **settings):
    """What became of the admitted streams of drawn sets."""
    found = Outcome()
    for seed in seeds:
        drawn = draw_set(
            seed, slots=1 + seed % 4, preemption=preemption, jitter=0.4 if seed % 3 == 2 else 0.0
        )
        kinds = settings.get("kinds") or (
            PHASINGS[seed % len(PHASINGS)],
            PHASINGS[(seed + 3) % len(PHASINGS)],
        )
        run_admitted(found, seed, drawn, kinds=kinds, keeps_others=seed % 2 == 1)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preemption", ["between_operations", "none"])
@pytest.mark.thorough
def test_admitted_streams_lose_no_frame(preemption):
    found = judged(range(30), preemption)
    assert (found.lost, found.labelled, found.unlabelled) == (0, 0, 0)
    assert found.admitted > 100 and found.frames > 3000


@pytest.mark.long
@pytest.mark.parametrize("preemption", ["between_operations", "none"])
def test_admitted_streams_lose_no_frame_in_many_sets(preemption):
    found = judged(range(1000), preemption, kinds=PHASINGS)
    assert (found.lost, found.labelled, found.unlabelled) == (0, 0, 0)


def loses(seed, lower=(), kinds=PHASINGS, **settings):
    """Whether a set that the test admits loses a frame in some phasing."""
    drawn = draw_set(seed, load=(0.8, 1.0), tightness=(0.4, 0.9), **settings)
    found = Outcome()
    kept = sorted(admit_by_test(drawn, lower).reservations)
    if not kept:
        return False
    for kind in kinds:
        engine = Engine(
            with_phases(only(drawn, kept), kind, seed, SPAN_NS),
            PlanPolicy(),
            is_clock_held=True,
            admission=admit_by_test(only(drawn, kept), lower),
        )
        engine.run()
        found.lost += sum(outcome.kind != "on_time" for outcome in engine.outcomes)
    return found.lost > 0


def without_blocking(monkeypatch):
    original = SlotTest.__init__

    def init(self, held, **settings):
        original(self, [_free(demand) for demand in held], **settings)

    monkeypatch.setattr(SlotTest, "__init__", init)
    verdict = SlotTest.verdict
    monkeypatch.setattr(SlotTest, "verdict", lambda self, new=None: verdict(self, new and _free(new)))


def _free(demand):
    return Demand(demand.terms, msgspec.structs.replace(demand.cost, piece_ns=0))


def without_jitter(monkeypatch):
    monkeypatch.setattr(Demand, "first_ns", property(lambda self: self.terms.deadline_ns))


def with_floor_for_ceiling(monkeypatch):
    def busy_ns(self, sums):
        durations, periods, _, firsts = sums.columns
        busy = int(durations.sum())
        for _ in range(50):
            busy = int((durations * (busy // periods)).sum())
        return busy + (int(firsts.min()) if firsts.size else 0)

    monkeypatch.setattr(SlotTest, "_busy_ns", busy_ns)


def without_the_frame_that_ends_at_the_time(monkeypatch):
    original = admission_module._Sums.listed

    def listed(self, horizon_ns):
        times, sums = original(self, horizon_ns)
        return times, sums - admission_module.np.diff(sums, prepend=0)

    monkeypatch.setattr(admission_module._Sums, "listed", listed)


@pytest.mark.parametrize(
    "mutation, settings",
    [
        (without_blocking, {"preemption": "none"}),
        (without_blocking, {}),
        (without_jitter, {"jitter": 0.5}),
        (with_floor_for_ceiling, {}),
        (without_the_frame_that_ends_at_the_time, {}),
    ],
)
def test_test_without_a_term_admits_a_set_that_loses_frames(monkeypatch, mutation, settings):
    assert not any(loses(seed, kinds=PHASINGS[:2], **settings) for seed in range(4))
    mutation(monkeypatch)
    assert any(loses(seed, **settings) for seed in range(60))


def beside_low(seed, lower):
    """Whether reserved streams lose a frame beside long best-effort operations that the test did, or did not, count with."""
    drawn = draw_set(seed, load=(0.6, 0.9), tightness=(0.4, 0.7))
    piece_ns = 6_000_000
    found = admit_by_test(drawn, [Piece("low", piece_ns)] if lower else ())
    kept = only(drawn, sorted(found.reservations)) if found.reservations else None
    if kept is None:
        return False
    held = {new: found.reservations[old] for new, old in enumerate(sorted(found.reservations))}
    low = msgspec.structs.replace(
        drawn.scenario.workload.stream[0], name="low", guarantee=False, priority="low", deadline_s=0.09
    )
    workload = msgspec.structs.replace(kept.scenario.workload, stream=(*kept.scenario.workload.stream, low))
    arrivals = phased_arrivals(kept.demands, "together", seed, SPAN_NS)
    moments = sorted({arrival.at_ns for arrival in arrivals})
    arrivals += [Arrival(max(0, at - 1), len(kept.demands), at + 90_000_000) for at in moments]
    arrivals.sort(key=lambda arrival: arrival.at_ns)
    scenario = msgspec.structs.replace(
        kept.scenario,
        workload=workload,
        arrivals=arrivals,
        durations_ns=[*kept.scenario.durations_ns, ((piece_ns, 1_000),)],
    )
    engine = Engine(scenario, PlanPolicy(), is_clock_held=True, admission=Admission(held, {}), record=True)
    engine.run()
    return bool(broken_guarantees(engine))


def test_test_without_lower_jobs_admits_a_set_that_loses_frames():
    assert not any(beside_low(seed, True) for seed in range(30))
    assert any(beside_low(seed, False) for seed in range(30))


DELAY_NS = 4_000_000


class StandsStill(Engine):
    """A run in which the machine stands still once, during one execution."""

    def __init__(self, scenario, admission, chosen):
        super().__init__(scenario, PlanPolicy(), is_clock_held=True, admission=admission)
        self.until_it_stands_still = chosen
        for server in self._servers.values():
            server.stalls = ExplainsAll()

    def _start(self, job, slot):
        stream = self._stream_of(job)
        row = self._prefixes[stream]
        if self.until_it_stands_still == 0:
            self._prefixes[stream] = tuple((*ends[:-1], ends[-1] + DELAY_NS) for ends in row)
        self.until_it_stands_still -= 1
        super()._start(job, slot)
        self._prefixes[stream] = row


class ExplainsAll:
    def look(self, now_ns):
        pass

    def since(self, then_ns, now_ns, began_ns=None):
        return now_ns - then_ns


def lost_beside_a_standstill(seed, delay_ns):
    """The frames of admitted streams that are lost if the machine stands still during one of them; and all frames."""
    lost = frames = 0
    drawn = draw_set(seed, preemption="none", load=(0.5, 0.9), tightness=(0.6, 1.0))
    kept = only(drawn, sorted(admit_by_test(drawn, delay_ns=delay_ns).reservations))
    if not kept.demands or not all(with_phases(kept, kind, seed, SPAN_NS).arrivals for kind in PHASINGS):
        return 0, 0  # The only periods are longer than the span.
    for number, kind in enumerate(PHASINGS):
        scenario = with_phases(kept, kind, seed, SPAN_NS)
        chosen = random.Random(f"{seed}/{number}").randrange(len(scenario.arrivals))
        engine = StandsStill(scenario, admit_by_test(kept, delay_ns=delay_ns), chosen)
        engine.run()
        lost += sum(outcome.kind != "on_time" for outcome in engine.outcomes)
        frames += len(engine.outcomes)
    return lost, frames


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 600), marks=pytest.mark.long)], ids=["some", "many"]
)
def test_machine_that_stands_still_loses_no_frame_if_admission_counts_with_it(seeds):
    counted = [lost_beside_a_standstill(seed, DELAY_NS) for seed in seeds]
    assert sum(lost for lost, _ in counted) == 0 and sum(frames for _, frames in counted) > 1000
    assert sum(lost_beside_a_standstill(seed, 0)[0] for seed in seeds) > 0


def unruly(seed, kind):
    """A run in which one admitted stream sends more frames than it promised, or longer ones; None where fewer than two fit."""
    source = random.Random(seed)
    preemption = "between_operations" if seed % 2 else "none"
    drawn = draw_set(seed, slots=1 + seed % 2, preemption=preemption, jitter=0.3 if seed % 3 == 0 else 0.0)
    whole = admit_streams(drawn.scenario, is_clock_held=True)
    kept = sorted(whole.reservations)
    if len(kept) < 2:
        return None
    admission = Admission(
        {new: whole.reservations[old] for new, old in enumerate(kept)},
        {},
        frozenset(new for new, old in enumerate(kept) if old in whole.with_lower),
    )
    scenario = with_phases(only(drawn, kept), kind, seed, SPAN_NS)
    index = source.randrange(len(kept))
    terms = admission.reservations[index].terms
    arrivals, rows = list(scenario.arrivals), list(scenario.durations_ns)
    # Without boundaries a frame that is too long delays others: no scheduler can prevent that.
    if seed % 4 == 1:
        (operations,) = rows[index]
        rows[index] = (operations + operations[: source.randrange(1, len(operations) + 1)],)
    else:
        for arrival in scenario.arrivals:
            for _ in range(source.randrange(3) if arrival.stream_index == index else 0):
                at_ns = arrival.at_ns + source.choice((1, source.randrange(1, terms.period_ns)))
                arrivals.append(Arrival(at_ns, index, at_ns + terms.deadline_ns))
        arrivals.sort(key=lambda arrival: (arrival.at_ns, arrival.stream_index, arrival.deadline_ns))
    changed = msgspec.structs.replace(scenario, arrivals=arrivals, durations_ns=rows)
    engine = Engine(changed, PlanPolicy(), is_clock_held=True, admission=admission, record=True)
    engine.run()
    return engine


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.long)], ids=["some", "many"]
)
def test_stream_that_breaks_its_promises_takes_nothing_from_others(seeds):
    labelled = 0
    for seed in seeds:
        engine = unruly(seed, PHASINGS[seed % len(PHASINGS)])
        if engine is not None:
            assert broken_guarantees(engine) == [], f"set {seed}"
            labelled += sum(frame.label is not None for frame in engine.frames.values())
    assert labelled > 100


# --- Whole workloads ----------------------------------------------------------------------------------------------------------

TEXT = """
name = "guarded"
duration_s = 1.0
devices = ["lane"]
[[device]]
name = "lane"
rates = {int8 = 1e9}
memory_bandwidth = 1e9
NOISE
[[model]]
name = "cam"
operations = 10
arithmetic = 4e6
data_type = "int8"
[[model]]
name = "flood"
operations = 8
arithmetic = 8e6
data_type = "int8"
[[stream]]
name = "gate"
model = "cam"
rate_per_s = 30
deadline_s = 0.02
jitter_s = 0.002
guarantee = true
[[stream]]
name = "door"
model = "cam"
rate_per_s = RATE
period_s = 0.05
deadline_s = 0.03
guarantee = true
[[stream]]
name = "flood"
model = "flood"
priority = "high"
arrivals = "poisson"
rate_per_s = 150
deadline_s = 0.05
"""


def ran(*, noise="", rate="20", seed=3, text=TEXT):
    workload = workload_from_text(text.replace("NOISE", noise).replace("RATE", rate))
    watched = Watched(PlanPolicy())
    engine = Engine(prepare(workload, seed), watched, record=True)
    engine.run()
    return engine, breaches(engine, ages=False) + watched.breaches


def lost(engine, stream):
    numbers = [n for n, arrival in enumerate(engine.scenario.arrivals) if arrival.stream_index == stream]
    return sum(engine.outcomes[n].kind != "on_time" for n in numbers), len(numbers)


def labels(engine, stream):
    found = [f.label for n, f in engine.frames.items() if engine.scenario.arrivals[n].stream_index == stream]
    return {label.value: found.count(label) for label in set(found) - {None}}


def test_flood_of_higher_priority_takes_nothing_from_reserved_streams():
    engine, found = ran()
    assert found == [] and set(engine.admission.reservations) == {0, 1}
    assert lost(engine, 0) == (0, 30) and lost(engine, 1) == (0, 20)
    assert lost(engine, 2)[0] > 20 and not labels(engine, 0)


def test_same_streams_without_reservations_lose_frames():
    workload = workload_from_text(TEXT.replace("NOISE", "").replace("RATE", "20"))
    engine = Engine(prepare(workload, 3), PlanPolicy(), record=True, keeps_reservations=False)
    engine.run()
    assert len(broken_guarantees(engine)) > 5 and engine.frames == {}


def test_source_twice_as_fast_as_it_promised_harms_itself_alone():
    engine, found = ran(rate="40")
    assert found == [] and lost(engine, 0)[0] == 0
    missing, count = lost(engine, 1)
    assert labels(engine, 1)["early"] == count // 2 and missing <= count // 2


def test_bursts_are_early_but_for_their_first_frame():
    text = TEXT.replace('name = "door"', 'name = "door"\nburst = 4')
    engine, found = ran(text=text)
    assert found == [] and lost(engine, 0)[0] == 0
    assert labels(engine, 1) == {"early": 60}


def test_overruns_are_labelled_and_harm_no_other_stream():
    # The noise is far more than the reserved durations include.
    text = TEXT.replace("NOISE", "noise = 0.1")
    workload = workload_from_text(text.replace("RATE", "20"))
    scenario = prepare(workload, 5)
    exact = msgspec.structs.replace(
        scenario, devices=(msgspec.structs.replace(scenario.devices[0], noise=0.0),)
    )
    engine = Engine(scenario, PlanPolicy(), admission=admit_streams(exact), record=True)
    engine.run()
    assert broken_guarantees(engine) == []
    assert labels(engine, 0)["overran"] > 5


def test_noise_within_the_reserved_durations_loses_nothing():
    engine, found = ran(noise="noise = 0.1")
    assert found == [] and sum(lost(engine, stream)[0] for stream in (0, 1)) <= 1


def test_death_of_the_device_withdraws_and_its_return_reserves_again():
    engine, found = ran(noise="failures = {death = 0.05}")
    assert found == []
    of_gate = labels(engine, 0)
    missing, count = lost(engine, 0)
    assert of_gate.get("withdrawn", 0) > 0 and count - sum(of_gate.values()) > count // 2
    assert missing > 0


def test_stream_that_does_not_fit_is_best_effort_with_the_reason():
    text = TEXT.replace("deadline_s = 0.03", "deadline_s = 0.0045")
    engine, found = ran(text=text)
    assert found == [] and set(engine.admission.reservations) == {0}
    assert 'stream "door" on lane/0: at t =' in engine.admission.refusals[1]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("deadline_s = 0.02\n", "", "deadline_s: expected a deadline"),
        ("rate_per_s = 30", 'rate_per_s = 30\narrivals = "poisson"', "period_s: expected the period"),
        ('name = "door"', 'name = "door"\nafter = "gate"', "after: expected no stream to follow"),
        ("duration_s = 1.0", "duration_s = 1.0\ncap = 1.5", "cap: expected above 0"),
        ("period_s = 0.05", "period_s = -0.05", "period_s: expected a number of seconds above 0"),
        ("period_s = 0.05", "period_s = 0", "period_s: expected a number of seconds above 0"),
        ("period_s = 0.05", "period_s = 50_000_000", "period_s: .*did you mean 0.05"),
        ("deadline_s = 0.02", "deadline_s = 20_000_000", "deadline_s: .*at most 86400 .a day.*0.02"),
        ("deadline_s = 0.02", "deadline_s = 100_000.0", "deadline_s: .*at most 86400"),
        ("jitter_s = 0.002", "jitter_s = 0.02", "jitter_s: expected less than the deadline of 0.02 s"),
        ("rate_per_s = 30", "rate_per_s = 1e-6", "rate_per_s: expected one frame a day or more"),
    ],
)
def test_mistakes_in_a_file_are_named(old, new, message):
    with pytest.raises(ValueError, match=message):
        workload_from_text(TEXT.replace("NOISE", "").replace("RATE", "20").replace(old, new, 1))


@pytest.mark.parametrize("label", [Label.EARLY, Label.DELAYED, Label.OVERRAN])
def test_label_without_a_cause_is_found(label):
    engine, found = ran()
    assert found == []
    number = next(number for number, frame in engine.frames.items() if frame.label is None)
    engine.frames[number].label = label
    assert [f"request {number} of the admitted stream" in breach for breach in broken_guarantees(engine)] == [
        True
    ]

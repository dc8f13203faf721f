"""The worth and the cost of a guarantee: frames lost among admitted streams, sets admitted, best effort beside them,
decisions.

Random sets of periodic streams ask for reservations on described devices and run in virtual time over adversarial phasings, with
exact durations unless a row names noise. Plain earliest deadline first and today's policy without reservations run on the same
arrivals. No wall clock is involved but for the cost of a decision, so the other figures are the same on every run.

``--part decisions edf low noise lost`` runs some of its parts: the cost of decisions, sets admitted against plain earliest deadline
first, LOW beside reservations, noise, and frames lost among admitted streams, which takes most of the time. ``--sets`` has fewer or
more sets than 1,000; the three parts in the middle take a quarter of them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import anyio
import msgspec

from aionn.drivers.simulated.profiles import DeviceProfile
from aionn.errors import NotAdmitted
from aionn.runtime.guarantees.arrivals import Measured
from aionn.runtime.guarantees.reservations import DeviceReservations
from aionn.scheduler.admission import (
    SHARE_PPM,
    Demand,
    Piece,
    SlotCost,
    SlotTest,
    StreamTerms,
)
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.estimates import Estimates
from aionn.scheduler.ledger import Ledger, ReservableSlot, Reservation
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.reservations.event_loop import LoopCost, LoopLedger
from aionn.service.host.asked_time import checked
from aionn.service.host.reservations import ServedReservations
from aionn.service.wire.peers import Peer
from aionn.service.wire.scheduling_messages import AskedTime, Release
from aionn.simulation.baselines import POLICIES
from aionn.simulation.checkers import broken_guarantees
from aionn.simulation.engine import Engine
from aionn.simulation.phasings import PHASINGS, phased_arrivals
from aionn.simulation.reservations import Admission, admit_streams, cost_of, terms_of
from aionn.simulation.scenario import Scenario
from aionn.simulation.workload import Arrival, Stream, Workload
from benchmarks.rows import Report, at_least, at_most, options, single

SETS = 1000
QUICK_SETS = 60
PERIODS_MS = (10, 16, 20, 33, 40, 50, 66, 100, 200)
SPAN_NS = 400_000_000
"""Captures of a run: two of the longest periods and the first of the next."""

PARTS = ("decisions", "edf", "low", "noise", "lost")

NOISE = 0.1
STREAMS = 50
"""Streams on the slot whose decisions are timed."""

LOOP_STREAMS = 58
"""The same for decisions that count with the event loop."""

MANY_STREAMS = 300
"""The same for a served device with more applications than a machine has, as a rule."""

APPLICATIONS = 10
DECISIONS_OF_A_SET = 25
UNUSED: Any = None
"""The channel of a client to which nothing is sent."""


@dataclass
class Drawn:
    """A random set of streams with a guarantee, on slots of one device."""

    scenario: Scenario
    demands: list[Demand]


def draw_set(
    seed: int,
    *,
    slots: int = 1,
    preemption: str = "between_operations",
    load: tuple[float, float] = (0.6, 1.0),
    tightness: tuple[float, float] = (0.5, 1.0),
    jitter: float = 0.0,
    noise: float = 0.0,
    priority: str = "high",
    cap: float = 1.0,
) -> Drawn:
    """Streams whose shares add up to a drawn load for each slot, with operations of drawn lengths.

    Args:
        seed: Of the set.
        slots: Slots of the device.
        preemption: Of the device.
        load: Range of the load of a slot.
        tightness: Range of deadline over period.
        jitter: The most jitter, as a share of the deadline.
        noise: Of the device.
        priority: Of the streams.
        cap: The share that may be reserved.
    """
    source = random.Random(f"set/{seed}")
    device = DeviceProfile(
        name="lane",
        slots=slots,
        rates={"int8": 1e9},
        memory_bandwidth=1e9,
        preemption=preemption,
        noise=noise,
    )
    left = source.uniform(*load) * slots
    count = source.randrange(2, 8) * slots
    streams: list[Stream] = []
    durations: list[tuple[tuple[int, ...] | None, ...]] = []
    for index in range(count):
        rest = count - index - 1
        share = left if not rest else left * (1 - source.random() ** (1 / rest))
        share = min(share, 0.95)
        left -= share
        period_ns = source.choice(PERIODS_MS) * 1_000_000
        whole_ns = max(1000, int(share * period_ns))
        deadline_ns = int(period_ns * source.uniform(*tightness))
        jitter_ns = int(deadline_ns * source.uniform(0, jitter)) if jitter else 0
        cuts = sorted(source.randrange(1, whole_ns) for _ in range(source.randrange(30)))
        bounds = sorted({0, *cuts, whole_ns})
        durations.append((tuple(b - a for a, b in pairwise(bounds)),))
        streams.append(
            Stream(
                name=f"s{index}",
                model="keyword-int8",
                priority=priority,
                rate_per_s=1e9 / period_ns,
                period_s=period_ns / 1e9,
                deadline_s=deadline_ns / 1e9,
                jitter_s=jitter_ns / 1e9,
                guarantee=True,
            )
        )
    workload = Workload(
        name=f"set-{seed}",
        duration_s=1.0,
        devices=("lane",),
        stream=tuple(streams),
        device=(device,),
        cap=cap,
    )
    scenario = Scenario(workload, (device,), [], durations, seed)
    demands = []
    for stream, row in zip(streams, durations, strict=True):
        cost = cost_of(row[0], device)
        assert cost is not None
        demands.append(Demand(terms_of(stream), cost))
    return Drawn(scenario, demands)


def only(drawn: Drawn, indexes: Sequence[int]) -> Drawn:
    """Some of the streams of a set."""
    scenario = drawn.scenario
    workload = msgspec.structs.replace(
        scenario.workload, stream=tuple(scenario.workload.stream[index] for index in indexes)
    )
    changed = msgspec.structs.replace(
        scenario, workload=workload, durations_ns=[scenario.durations_ns[index] for index in indexes]
    )
    return Drawn(changed, [drawn.demands[index] for index in indexes])


def with_phases(drawn: Drawn, kind: str, seed: int = 0, span_ns: int = SPAN_NS) -> Scenario:
    """The scenario of a set with the arrivals of one phasing."""
    arrivals = phased_arrivals(drawn.demands, kind, seed, span_ns)
    return msgspec.structs.replace(drawn.scenario, arrivals=arrivals)


@dataclass
class Outcome:
    """The results of some runs."""

    sets: int = 0
    streams: int = 0
    admitted: int = 0
    runs: int = 0
    frames: int = 0
    lost: int = 0
    unlabelled: int = 0
    labelled: int = 0
    broken_sets: set[int] = field(default_factory=set)


def admit_by_test(drawn: Drawn, lower: Sequence[Piece] = (), delay_ns: int = 0) -> Admission:
    """The streams that the test alone admits on the slots of a set's device, first fit by falling share; no others run."""
    device = drawn.scenario.devices[0]
    slots: list[list[Demand]] = [[] for _ in range(device.slots)]
    found = Admission({}, {})
    for index in sorted(range(len(drawn.demands)), key=lambda i: -drawn.demands[i].share_ppm):
        new = drawn.demands[index]
        for slot, held in enumerate(slots):
            verdict = SlotTest(held, cap_ppm=SHARE_PPM, lower=lower, delay_ns=delay_ns).verdict(new)
            if verdict.fits:
                held.append(new)
                found.reservations[index] = Reservation(
                    index, "", new.terms, new.cost, slot, f"lane/{slot}", verdict, 0
                )
                break
        else:
            found.refusals[index] = "does not fit"
    return found


def run_admitted(
    outcome: Outcome,
    seed: int,
    drawn: Drawn,
    *,
    kinds: Sequence[str] = PHASINGS,
    keeps_others: bool = False,
    keeps_reservations: bool = True,
    estimates: bool = False,
) -> None:
    """Runs the admitted streams of a set over phasings, and counts.

    Args:
        outcome: Where it is counted.
        seed: The set's number.
        drawn: The set.
        kinds: The phasings.
        keeps_others: Whether the streams that are not admitted run beside as best effort, and the ledger counts with that;
            otherwise the test alone decides.
        keeps_reservations: Whether the policy knows the reservations.
        estimates: Whether durations are learnt.
    """
    if keeps_others:
        admission = admit_streams(drawn.scenario, is_clock_held=True)
    else:
        admission = admit_by_test(drawn)
    outcome.sets += 1
    outcome.streams += len(drawn.demands)
    outcome.admitted += len(admission.reservations)
    if not admission.reservations:
        return
    if not keeps_others:
        kept = sorted(admission.reservations)
        drawn = only(drawn, kept)
        admission = Admission({new: admission.reservations[old] for new, old in enumerate(kept)}, {})
    for kind in kinds:
        engine = Engine(
            with_phases(drawn, kind, seed),
            PlanPolicy(),
            is_clock_held=True,
            admission=admission,
            keeps_reservations=keeps_reservations,
            estimates=Estimates() if estimates else None,
            record=True,
        )
        engine.run()
        outcome.runs += 1
        for number, arrival in enumerate(engine.scenario.arrivals):
            if arrival.stream_index not in admission.reservations:
                continue
            found, frame = engine.outcomes[number], engine.frames.get(number)
            outcome.frames += 1
            outcome.labelled += frame is not None and frame.label is not None
            if found is None or found.kind != "on_time":
                outcome.lost += 1
                outcome.broken_sets.add(seed)
        outcome.unlabelled += len(broken_guarantees(engine))


def soundness(report: Report, sets: int) -> None:
    """Frames lost among admitted streams, with exact durations."""
    for preemption in ("between_operations", "none"):
        ours, plain = Outcome(), Outcome()
        for seed in range(sets):
            drawn = draw_set(
                seed,
                slots=1 + seed % 4,
                preemption=preemption,
                tightness=(1.0, 1.0) if seed % 3 == 0 else (0.5, 1.0),
                jitter=0.4 if seed % 3 == 2 else 0.0,
            )
            run_admitted(ours, seed, drawn, keeps_others=seed % 2 == 1)
            if seed % 5 == 0:
                run_admitted(plain, seed, drawn, keeps_others=seed % 2 == 1, keeps_reservations=False)
        where = "stops between operations" if preemption != "none" else "never stops"
        report.note(
            f"{where}: {ours.sets} sets, {ours.admitted} of {ours.streams} streams admitted, {ours.runs} runs,"
            f" {ours.frames} frames; without reservations {plain.lost} of {plain.frames} lost, in"
            f" {len(plain.broken_sets)} of {plain.sets} sets"
        )
        report.add(
            single(f"frames lost, admitted, {where}", "", [ours.lost], at_most(0)),
            single(
                f"labels or breaches, admitted, {where}", "", [ours.labelled + ours.unlabelled], at_most(0)
            ),
        )


def tightness_of_test(report: Report, sets: int) -> None:
    """Sets that pass the test over those that plain earliest deadline first serves in all phasings; one slot, cap 1."""
    served = accepted = with_own = false = without_blocking = 0
    for seed in range(sets):
        drawn = draw_set(seed, tightness=(1.0, 1.0) if seed % 2 else (0.5, 1.0), load=(0.6, 1.0))
        fits = SlotTest(drawn.demands[:-1], cap_ppm=SHARE_PPM).verdict(drawn.demands[-1]).fits
        ledger = Ledger([ReservableSlot("lane/0", True, SHARE_PPM)])
        try:
            held = [ledger.admit(demand.terms, {0: demand.cost}, now_ns=0) for demand in drawn.demands]
            whole = all(ledger.may_run_lower(reservation.number) for reservation in held)
        except NotAdmitted:
            whole = False
        free = [Demand(d.terms, SlotCost(duration_ns=d.cost.duration_ns, piece_ns=0)) for d in drawn.demands]
        no_blocking = SlotTest(free, cap_ppm=SHARE_PPM).verdict().fits
        is_served = True
        for kind in PHASINGS:
            engine = Engine(
                with_phases(drawn, kind, seed, 1_200_000_000),
                POLICIES["edf"],
                is_clock_held=True,
                admission=Admission({}, {}),
            )
            engine.run()
            if any(o is None or o.kind != "on_time" for o in engine.outcomes):
                is_served = False
                break
        served += is_served
        accepted += fits and is_served
        with_own += whole and is_served
        false += fits and not is_served
        without_blocking += no_blocking and not is_served
    report.note(
        f"{sets} sets: EDF serves {served} in all phasings; the test accepts {accepted} of these and {false} others; without"
        f" blocking {without_blocking} others would be accepted; in {with_own} of {served} early and overrun frames"
        " may run as best effort"
    )
    report.add(
        single("sets admitted / served by EDF in all phasings", "", [accepted / served], at_least(0.97))
    )


def beside(seed: int, priority: str) -> tuple[int, int, int, int, int]:
    """LOW on time beside reserved streams, and under the policy without reservations; LOW frames; reserved frames lost in both."""
    drawn = draw_set(seed, load=(0.3, 0.7), tightness=(0.6, 1.0), priority=priority)
    source = random.Random(f"low/{seed}")
    low = []
    rows = []
    for index in range(3):
        whole_ns = source.randrange(1_000_000, 12_000_000)
        low.append(
            Stream(
                name=f"low{index}",
                model="keyword-int8",
                priority="low",
                arrivals="poisson",
                rate_per_s=source.uniform(0.15, 0.35) * 1e9 / whole_ns,
                deadline_s=whole_ns * source.uniform(3, 12) / 1e9,
            )
        )
        parts = source.randrange(4, 30)
        rows.append(((whole_ns // parts,) * parts,))
    scenario = drawn.scenario
    workload = msgspec.structs.replace(
        scenario.workload, stream=(*scenario.workload.stream, *low), duration_s=1.0
    )
    whole = msgspec.structs.replace(
        scenario, workload=workload, durations_ns=[*scenario.durations_ns, *rows], seed=seed
    )
    arrivals = phased_arrivals(drawn.demands, "random", seed, 1_000_000_000)
    for index, stream in enumerate(low, len(drawn.demands)):
        at_ns = 0
        assert stream.deadline_s is not None
        while True:
            at_ns += round(source.expovariate(stream.rate_per_s) * 1e9)
            if at_ns > 1_000_000_000:
                break
            arrivals.append(Arrival(at_ns, index, at_ns + round(stream.deadline_s * 1e9)))
    arrivals.sort(key=lambda arrival: (arrival.at_ns, arrival.stream_index))
    whole = msgspec.structs.replace(whole, arrivals=arrivals)
    admission = admit_streams(whole, is_clock_held=True)
    if len(admission.reservations) < len(drawn.demands):
        return 0, 0, 0, 0, 0
    counts = []
    lost = []
    for keeps in (True, False):
        engine = Engine(
            whole, PlanPolicy(), is_clock_held=True, admission=admission, keeps_reservations=keeps
        )
        engine.run()
        is_on_time = [outcome is not None and outcome.kind == "on_time" for outcome in engine.outcomes]
        pairs = list(zip(is_on_time, arrivals, strict=True))
        counts.append(sum(ok for ok, a in pairs if a.stream_index >= len(drawn.demands)))
        lost.append(sum(not ok for ok, a in pairs if a.stream_index < len(drawn.demands)))
    return counts[0], counts[1], sum(a.stream_index >= len(drawn.demands) for a in arrivals), lost[0], lost[1]


def best_effort(report: Report, sets: int) -> None:
    """LOW on time beside reserved streams of a priority, over the policy without reservations."""
    for priority, bound in (("high", 0.95), ("medium", 0.85)):
        totals = [0, 0, 0, 0, 0]
        for seed in range(sets):
            totals = [a + b for a, b in zip(totals, beside(seed, priority), strict=True)]
        report.note(
            f"{priority}: LOW {totals[0]} with, {totals[1]} without reservations, of {totals[2]}; reserved"
            f" lost {totals[3]}, {totals[4]}"
        )
        report.add(
            single(
                f"LOW on time beside reserved {priority}",
                "",
                [totals[0] / max(1, totals[1])],
                at_least(bound),
            )
        )


def noisy(report: Report, sets: int) -> None:
    """Frames lost among admitted streams with noise and a cap of 0.95; each must be labelled."""
    found = Outcome()
    for seed in range(sets):
        drawn = draw_set(seed, slots=1 + seed % 2, noise=NOISE, cap=0.95, load=(0.5, 0.9))
        run_admitted(found, seed, drawn, kinds=("together", "random", "longest first"), keeps_others=True)
    report.note(
        f"noise {NOISE}: {found.admitted} streams, {found.frames} frames, {found.labelled} labelled, {found.lost} lost"
    )
    report.add(
        single("share lost among admitted, noise", "", [found.lost / max(1, found.frames)], at_most(0.001)),
        single("lost without a label, noise", "", [found.unlabelled], at_most(0)),
    )


def decisions(report: Report, rounds: int) -> None:
    """Processor time to admit or refuse a stream beside many on one slot, with counter-offers."""
    source = random.Random(1)
    times: dict[str, list[float]] = {"admit": [], "refuse": []}
    for _ in range(rounds):
        held: list[Demand] = []
        load = source.uniform(0.3, 0.9)
        for index in range(STREAMS - 1):
            period_ns = source.choice(PERIODS_MS) * 1_000_000 + source.randrange(1000)
            duration_ns = max(1000, int(period_ns * load / STREAMS * source.uniform(0.2, 1.8)))
            deadline_ns = int(period_ns * source.uniform(0.6, 1.0))
            terms = StreamTerms(
                name=f"s{index}", period_ns=period_ns, deadline_ns=deadline_ns, jitter_ns=deadline_ns // 10
            )
            held.append(Demand(terms, SlotCost(duration_ns=duration_ns, piece_ns=duration_ns // 4)))
        ledger = Ledger([ReservableSlot("lane/0")])
        for demand in held:
            try:
                ledger.admit(demand.terms, {0: demand.cost}, now_ns=0)
            except NotAdmitted:
                continue
        for duration_ns in (50_000, 30_000_000):
            terms = StreamTerms(name="new", period_ns=33_333_333, deadline_ns=32_000_000, jitter_ns=1_000_000)
            start = time.process_time()
            try:
                ledger.admit(
                    terms, {0: SlotCost(duration_ns=duration_ns, piece_ns=duration_ns // 10)}, now_ns=0
                )
                kind = "admit"
            except NotAdmitted:
                kind = "refuse"
            times[kind].append(time.process_time() - start)
    for kind, found in times.items():
        found.sort()
        p99 = found[int(0.99 * (len(found) - 1))] * 1e3
        report.note(f"{kind}: {len(found)} decisions, p50 {found[len(found) // 2] * 1e3:.2f} ms")
        report.add(single(f"decision, {STREAMS} streams, {kind}, p99", "ms", [p99], at_most(5)))


def loop_decisions(report: Report, sets: int, slots: int) -> None:
    """Processor time of a decision of one device among many streams whose frames take time of the event loop as well."""
    source = random.Random(3)
    times: dict[str, list[float]] = {"admit": [], "no_time": [], "event_loop": []}
    for _ in range(sets):
        times_of = Estimates()
        dispatcher = Dispatcher(slots, now=lambda: 0, can_preempt=False, estimates=times_of)
        device = DeviceReservations("npu", slots, dispatcher, times_of)
        device.loop = LoopLedger()
        load = source.uniform(0.1, 0.3) * slots
        for index in range(4 * LOOP_STREAMS):
            period_ns = source.choice(PERIODS_MS[3:]) * 1_000_000 + source.randrange(1000)
            deadline_ns = int(period_ns * source.uniform(0.6, 1.0))
            terms = StreamTerms(name=f"s{index}", period_ns=period_ns, deadline_ns=deadline_ns)
            duration_ns = max(1000, int(period_ns * load / LOOP_STREAMS * source.uniform(0.2, 1.8)))
            measured = Measured(duration_ns, 16, loop=LoopCost(*(source.randrange(4_000, 12_000),) * 2))
            with suppress(NotAdmitted):
                device.admit(terms, measured, "model", now_ns=0)
            if device.count == LOOP_STREAMS:
                break
        terms = StreamTerms(name="new", period_ns=33_333_333, deadline_ns=32_000_000, jitter_ns=1_000_000)
        for duration_us, part_us in ((50, 8), (200, 1000), (200, 2500), (100, 6000), (30_000, 8)):
            measured = Measured(duration_us * 1000, 16, loop=LoopCost(part_us * 1000, part_us * 1000))
            device.loop.factor += 0.03  # As if running frames had shown it: all streams count anew.
            before = dict(device.refusals)
            start = time.process_time()
            try:
                held = device.admit(terms, measured, "model", now_ns=0)
                taken, found = time.process_time() - start, "admit"
                device.end(held)
            except NotAdmitted:
                taken = time.process_time() - start
                found = next(reason for reason, count in device.refusals.items() if count > before[reason])
            times[found].append(taken)
    for kind, found_s in times.items():
        found_s.sort()
        p50, p99 = (found_s[int(part * (len(found_s) - 1))] * 1e3 for part in (0.5, 0.99))
        what = f"event loop, {slots} slots, {kind}"
        report.note(f"{what}: {len(found_s)} decisions, p50 {p50:.2f} ms")
        report.add(single(f"decision, {LOOP_STREAMS} streams, {what}, p99", "ms", [p99], at_most(5)))


async def served_decisions(report: Report, sets: int, streams: int) -> None:
    """Processor time of a decision in the process of a served device, among the streams of ten applications on its slot."""
    source = random.Random(2)
    times: dict[str, list[float]] = {"admit": [], "refuse": []}
    for _ in range(sets):
        shared = ServedReservations("npu", 1, share=1.0)
        clients = [shared.client(f"pid {number}", Peer(), number) for number in range(APPLICATIONS)]
        load, held = source.uniform(0.3, 0.8), 0
        for index in range(2 * streams):
            period_ns = source.choice(PERIODS_MS) * 1_000_000 + source.randrange(1000)
            deadline_ns = int(period_ns * source.uniform(0.6, 1.0))
            asked = AskedTime(
                name=f"s{index}",
                period_ns=period_ns,
                deadline_ns=deadline_ns,
                jitter_ns=deadline_ns // 10,
                duration_ns=max(1000, int(period_ns * load / streams * source.uniform(0.2, 1.8))),
            )
            try:
                shared.reserve(clients[index % APPLICATIONS], checked(asked, 1), None)
                held += 1
            except NotAdmitted:
                continue
            if held == streams - 1:
                break
        for _ in range(DECISIONS_OF_A_SET):
            for duration_ns in (10_000, 30_000_000):
                asked = AskedTime(
                    name="new",
                    period_ns=33_333_333 + source.randrange(1000),
                    deadline_ns=32_000_000,
                    jitter_ns=1_000_000,
                    duration_ns=duration_ns,
                )
                start = time.process_time()
                try:
                    reply = shared.reserve(clients[0], checked(asked, 1), None)
                    found = "admit"
                except NotAdmitted:
                    found = "refuse"
                times[found].append(time.process_time() - start)
                if found == "admit":
                    assert reply.reserved is not None
                    await clients[0].handle(Release(reply.reserved.reservation), UNUSED)
    for kind, taken in times.items():
        taken.sort()
        p99 = taken[int(0.99 * (len(taken) - 1))] * 1e3
        report.note(f"served, {kind}: {len(taken)} decisions, p50 {taken[len(taken) // 2] * 1e3:.2f} ms")
        goal = at_most(5) if streams == STREAMS else None
        report.add(single(f"decision, served, {streams} streams, {kind}, p99", "ms", [p99], goal))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--sets", type=int, help="number of random sets of streams")
    mine, _ = parser.parse_known_args()
    chosen = options(__doc__, parser)
    report = Report(chosen)
    sets = mine.sets or (QUICK_SETS if chosen.quick else SETS)
    if "decisions" in mine.part:
        decisions(report, 50 if chosen.quick else 500)
        for slots in (1, 4):
            loop_decisions(report, 10 if chosen.quick else 100, slots)
        for streams in (STREAMS, MANY_STREAMS):
            anyio.run(served_decisions, report, 4 if chosen.quick else 20, streams)
    if "edf" in mine.part:
        tightness_of_test(report, sets // 4)
    if "low" in mine.part:
        best_effort(report, sets // 4)
    if "noise" in mine.part:
        noisy(report, sets // 4)
    if "lost" in mine.part:
        soundness(report, sets)


if __name__ == "__main__":
    main()

"""Capacity: the number of streams with a guarantee that some devices take, what fits where, what limits it, and the cheapest
change.

Owns the plan of a described workload, by the same test as an admission; its check in virtual time; and the plan as a page. The
devices' clocks count as held at their full rate, as an open burst holds them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import msgspec

from aionn.errors import InvalidArgument, NotAdmitted, WouldFit
from aionn.hal import duration_text
from aionn.reports.html_page import document, element, key, table
from aionn.reports.plots import curves
from aionn.scheduler.admission import SHARE_PPM, Demand, SlotCost, StreamTerms
from aionn.scheduler.ledger import Ledger, Reservation
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.reservations.event_loop import LOOP_CAP_PPM, LoopCost, LoopLedger
from aionn.simulation.checkers import broken_guarantees
from aionn.simulation.engine import Engine
from aionn.simulation.phasings import PHASINGS, phased_arrivals
from aionn.simulation.reservations import Admission, cost_of, reservable_slots, terms_of
from aionn.simulation.scenario import Scenario
from aionn.simulation.workload import Stream

__all__ = [
    "CapacityPlan",
    "Fit",
    "SlotUse",
    "Verification",
    "capacity_page",
    "copies_that_fit",
    "plan_capacity",
    "verify",
]

CURVE_MAX = 400
"""Number of times that a drawn curve shows: more steps would be thinner than a pixel."""

PERIODS_MAX = 10
"""Number of the longest periods that are run for each phasing: most of what phases can do comes in the first."""


class Fit(msgspec.Struct, frozen=True):
    """The number of streams of one kind that an empty slot of a device takes.

    Attributes:
        stream: Its name.
        device: The device's name.
        duration_ms: The longest duration of a frame; None where the device cannot run the model.
        admitted: The number that is admitted, whatever the phases.
        spread: The number that would fit if the phases were spread evenly; None with jitter, which spreads no phases.
        share: The number that the share which may be reserved has time for.
    """

    stream: str
    device: str
    duration_ms: float | None
    admitted: int
    spread: int | None
    share: int


class SlotUse(msgspec.Struct, frozen=True):
    """A slot of the plan.

    Attributes:
        slot: Its name.
        streams: Those that are placed there.
        share: The share that they take.
        slack_ms: The time that is left at the tightest time.
        at_ms: That time.
        blocker: The stream or model whose operation blocks then; empty where none does.
    """

    slot: str
    streams: tuple[str, ...]
    share: float
    slack_ms: float
    at_ms: float
    blocker: str


class Refusal(msgspec.Struct, frozen=True):
    """A stream that has no place.

    Attributes:
        stream: Its name.
        reason: Why, on the slot that lacks the least.
        cheapest: The smallest change by which it would fit; empty where no single one suffices.
    """

    stream: str
    reason: str
    cheapest: str


class Verification(msgspec.Struct, frozen=True):
    """The outcome of the plan in virtual time under one phasing.

    Attributes:
        phasing: Its kind.
        frames: Number of frames of the placed streams.
        lost: Number of those that were not on time.
        labelled: Number of frames that broke a promise, by noise.
        unexplained: Number of lost ones that broke none.
    """

    phasing: str
    frames: int
    lost: int
    labelled: int
    unexplained: int


class CapacityPlan(msgspec.Struct, frozen=True):
    """A plan.

    Attributes:
        fits: For each kind of stream and device.
        slots: All slots in their order.
        refusals: The streams without a place.
        decided_ms: The time that the plan took.
        reservations: Of the placed streams, by the index of the stream in the workload.
        curves: By slot, the demand and the blocking over time.
    """

    fits: tuple[Fit, ...]
    slots: tuple[SlotUse, ...]
    refusals: tuple[Refusal, ...]
    decided_ms: float
    reservations: dict[int, Reservation]
    curves: dict[str, list[tuple[int, int, int]]]


def copies_that_fit(
    terms: StreamTerms, cost: SlotCost, *, cap_ppm: int, lower_ns: int = 0, loop_ns: int = 0
) -> int:
    """The number of equal streams that an empty slot admits: the test has a closed form for them.

    Args:
        terms: Of each stream.
        cost: Of each frame.
        cap_ppm: The share that may be reserved, in millionths.
        lower_ns: The longest piece of best-effort jobs.
        loop_ns: The time of the event loop for each frame.
    """
    by_deadline = (terms.deadline_ns - terms.jitter_ns - lower_ns) // (cost.duration_ns + loop_ns)
    return max(0, min(by_deadline, _copies_by_share(terms, cost, cap_ppm, loop_ns)))


def _copies_by_share(terms: StreamTerms, cost: SlotCost, cap_ppm: int, loop_ns: int = 0) -> int:
    by_slot = terms.period_ns * cap_ppm // (SHARE_PPM * (cost.duration_ns + loop_ns))
    return min(by_slot, terms.period_ns * LOOP_CAP_PPM // (SHARE_PPM * loop_ns)) if loop_ns else by_slot


class _OnLoop:
    """The slots of a plan, as the ledger of the event loop asks them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def loop_changed(self) -> None:
        """See ``LoopUser``."""


def plan_capacity(scenario: Scenario) -> CapacityPlan:
    """Places the streams with a guarantee: first fit, the largest shares first; slots of quicker devices are tried first.

    Raises:
        InvalidArgument: No stream asks for a guarantee, or a time of one is too short or too long.
    """
    start_s = time.perf_counter()
    streams = scenario.workload.stream
    wanted = [index for index, stream in enumerate(streams) if stream.guarantee]
    if not wanted:
        raise InvalidArgument(f"workload {scenario.workload.name}: expected a stream with guarantee = true")
    slots = reservable_slots(scenario.devices, scenario.workload.cap)
    costs = [
        [cost_of(row[device], profile) for device, profile in enumerate(scenario.devices)]
        for row in scenario.durations_ns
    ]
    lower = _lower(scenario, costs)
    terms = {index: terms_of(streams[index], scenario.seed) for index in wanted}
    ledger = Ledger([slot for _, slot in slots])
    loop, on_loop = LoopLedger(), _OnLoop(ledger)
    loop_cost = _loop_cost(scenario)
    for number, (device, _) in enumerate(slots):
        for name, piece_ns in lower[device].items():
            ledger.allow_lower(number, name, piece_ns)
    reservations: dict[int, Reservation] = {}
    refusals = []
    for index in sorted(wanted, key=lambda index: (-_least_share(terms[index], costs[index]), index)):
        by_slot = {
            number: cost
            for number, (device, _) in enumerate(slots)
            if (cost := costs[index][device]) is not None
        }
        # With a loop the emptiest first: a full slot has no room for the loop's parts of frames on other slots.
        held_ppm = {number: ledger.share_ppm(number) if loop_cost.total_ns else 0 for number in by_slot}
        by_slot = dict(
            sorted(by_slot.items(), key=lambda item: (item[1].duration_ns, held_ppm[item[0]], item[0]))
        )
        try:
            admit = functools.partial(
                ledger.admit, terms[index], by_slot, now_ns=0, chooses_phase=_is_free(streams[index])
            )
            _, reservations[index] = loop.reserve(on_loop, terms[index], loop_cost, admit, costs=by_slot)
        except NotAdmitted as e:
            pieces = {**_pieces(lower), **{r.terms.name: r.cost.piece_ns for r in reservations.values()}}
            pieces[streams[index].name] = max(cost.piece_ns for cost in by_slot.values())
            refusals.append(
                Refusal(streams[index].name, e.reason, _cheapest(e.would_fit, terms[index], pieces))
            )
    fits = [
        _fit(scenario, terms[index], costs[index], lower, device)
        for index in wanted
        for device in range(len(scenario.devices))
    ]
    uses = [_use(ledger, number, slot.name) for number, (_, slot) in enumerate(slots)]
    return CapacityPlan(
        tuple(fits),
        tuple(uses),
        tuple(refusals),
        (time.perf_counter() - start_s) * 1e3,
        reservations,
        {slot.name: ledger.curve(number)[:CURVE_MAX] for number, (_, slot) in enumerate(slots)},
    )


def _loop_cost(scenario: Scenario) -> LoopCost:
    """The time of the event loop for a frame: half of it before the device, and half after it."""
    half_ns = round(scenario.workload.loop_s * 5e8)
    return LoopCost(half_ns, half_ns)


def _is_free(stream: Stream) -> bool:
    """Whether the plan chooses a stream's phase: the file states none."""
    return stream.guarantee == "phased" and stream.phase_s is None


def _lower(scenario: Scenario, costs: Sequence[Sequence[SlotCost | None]]) -> list[dict[str, int]]:
    """By device, the longest piece of each best-effort model."""
    found: list[dict[str, int]] = [{} for _ in scenario.devices]
    for stream, by_device in zip(scenario.workload.stream, costs, strict=True):
        for pieces, cost in zip(found, by_device, strict=True):
            if not stream.guarantee and cost is not None:
                pieces[stream.model] = cost.piece_ns
    return found


def _pieces(lower: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The longest piece of each best-effort model on any device."""
    found: dict[str, int] = {}
    for pieces in lower:
        for name, piece_ns in pieces.items():
            found[name] = max(piece_ns, found.get(name, 0))
    return found


def _least_share(terms: StreamTerms, costs: Sequence[SlotCost | None]) -> int:
    return min(Demand(terms, cost).share_ppm for cost in costs if cost is not None)


def _fit(
    scenario: Scenario,
    terms: StreamTerms,
    costs: Sequence[SlotCost | None],
    lower: Sequence[dict[str, int]],
    device: int,
) -> Fit:
    cost, cap_ppm = costs[device], round(scenario.workload.cap * SHARE_PPM)
    name = scenario.devices[device].name
    if cost is None:
        return Fit(terms.name, name, None, 0, 0, 0)
    lower_ns = max(lower[device].values(), default=0)
    loop_ns = _loop_cost(scenario).total_ns
    by_share = _copies_by_share(terms, cost, cap_ppm, loop_ns)
    spread = (
        None
        if terms.jitter_ns
        else by_share
        if cost.duration_ns + lower_ns + loop_ns <= terms.deadline_ns
        else 0
    )
    admitted = copies_that_fit(terms, cost, cap_ppm=cap_ppm, lower_ns=lower_ns, loop_ns=loop_ns)
    return Fit(terms.name, name, cost.duration_ns / 1e6, admitted, spread, by_share)


def _use(ledger: Ledger, number: int, name: str) -> SlotUse:
    held = ledger.reservations(number)
    if not held:
        return SlotUse(name, (), 0.0, 0.0, 0.0, "")
    verdict = ledger.verdict(number)
    return SlotUse(
        name,
        tuple(reservation.terms.name for reservation in held),
        verdict.share_ppm / SHARE_PPM,
        verdict.slack_ns / 1e6,
        verdict.at_ns / 1e6,
        verdict.blocker if verdict.blocking_ns else "",
    )


def _cheapest(offers: WouldFit, terms: StreamTerms, pieces: Mapping[str, int]) -> str:
    """Of the changes that suffice, the one that changes its value by the smallest factor."""
    found: list[tuple[float, str]] = []
    if offers.deadline_ns is not None:
        text = (
            f"a deadline of {duration_text(offers.deadline_ns)} instead of {duration_text(terms.deadline_ns)}"
        )
        found.append((offers.deadline_ns / terms.deadline_ns, text))
    if offers.period_ns is not None:
        text = f"{1e9 / offers.period_ns:.3g} frames/s instead of {1e9 / terms.period_ns:.3g}"
        found.append((offers.period_ns / terms.period_ns, text))
    if offers.shift_ns is not None:
        found.append(
            (1 + offers.shift_ns / terms.period_ns, f"captures {duration_text(offers.shift_ns)} later")
        )
    if offers.blocker is not None and offers.piece_ns:
        text = f'operations of "{offers.blocker}" of at most {duration_text(offers.piece_ns)}'
        found.append((pieces[offers.blocker] / offers.piece_ns, text))
    return min(found)[1] if found else ""


def verify(scenario: Scenario, plan: CapacityPlan, *, seed: int = 1) -> list[Verification]:
    """Runs the placed streams in virtual time over all kinds of phasing, beside no best effort."""
    if not plan.reservations:
        return []
    placed = list(plan.reservations)
    demands = [plan.reservations[index].demand for index in placed]
    span_ns = PERIODS_MAX * max(demand.terms.period_ns for demand in demands)
    found = []
    for kind in PHASINGS:
        arrivals = phased_arrivals(demands, kind, seed, span_ns, indexes=placed)
        engine = Engine(
            msgspec.structs.replace(scenario, arrivals=arrivals),
            PlanPolicy(),
            is_clock_held=True,
            admission=Admission(plan.reservations, {}),
            record=True,
        )
        engine.run()
        lost = sum(outcome is None or outcome.kind != "on_time" for outcome in engine.outcomes)
        labelled = sum(frame.label is not None for frame in engine.frames.values())
        found.append(Verification(kind, len(arrivals), lost, labelled, len(broken_guarantees(engine))))
    return found


# --- The page -----------------------------------------------------------------------------------------------------------------

PHASE_HEADS = ("stream", "slot", "period ms", "phase ms", "tolerance ms")
FIT_HEADS = ("stream", "device", "frame ms", "admitted", "spread", "time for")
SLOT_HEADS = ("slot", "streams", "share %", "slack ms", "at ms", "blocked by")
VERIFICATION_HEADS = ("phasing", "frames", "lost", "labelled", "unexplained")


def fit_rows(plan: CapacityPlan) -> list[tuple[object, ...]]:
    """The rows of a table under ``FIT_HEADS``."""
    return [
        (
            f.stream,
            f.device,
            "-" if f.duration_ms is None else f.duration_ms,
            f.admitted,
            "-" if f.spread is None else f.spread,
            f.share,
        )
        for f in plan.fits
    ]


def slot_rows(plan: CapacityPlan) -> list[tuple[object, ...]]:
    """The rows of a table under ``SLOT_HEADS``."""
    return [
        (s.slot, len(s.streams), 100 * s.share, s.slack_ms, s.at_ms, s.blocker or "-") for s in plan.slots
    ]


def phase_rows(plan: CapacityPlan) -> list[tuple[object, ...]]:
    """The rows of a table of the streams with phases, under ``PHASE_HEADS``: when their captures come within their periods."""
    found: list[tuple[object, ...]] = []
    for held in plan.reservations.values():
        terms = held.terms
        if terms.phase_ns is not None:
            phase_ms = terms.phase_ns % terms.period_ns / 1e6
            found.append(
                (terms.name, held.slot_name, terms.period_ns / 1e6, phase_ms, terms.tolerance_ns / 1e6)
            )
    return found


def capacity_page(name: str, plan: CapacityPlan, checked: Sequence[Verification]) -> str:
    """The plan as one HTML page: what fits, and for each slot the demand over time against the time there is."""
    placed = sum(len(slot.streams) for slot in plan.slots)
    total = placed + len(plan.refusals)
    parts = [
        element("p", f"{placed} of {total} streams are admitted."),
        element("h2", "Slots"),
        table(SLOT_HEADS, _texts(slot_rows(plan))),
        *(element("p", f"{r.reason}. {_change_text(r)}") for r in plan.refusals),
        *_phase_parts(plan),
        element("h2", "Streams of one kind on an empty slot"),
        table(FIT_HEADS, _texts(fit_rows(plan))),
        element("h2", "Demand over time"),
        element(
            "p",
            "The frames whose deadlines come by t, if all streams without a phase begin together, and with the longest operation"
            " that may be in the way. Both stay below the line.",
        ),
        key([("medium", "demand"), ("late", "demand and blocking"), ("on-time", "time")]),
    ]
    for slot in plan.slots:
        points = plan.curves[slot.slot]
        if slot.streams and points:
            end = points[-1][0] / 1e6
            series = [
                ("time", "on-time", [(0.0, 0.0), (end, end)]),
                ("demand", "medium", _steps([(t, demand) for t, demand, _ in points])),
                (
                    "demand and blocking",
                    "late",
                    _steps([(t, demand + blocking) for t, demand, blocking in points]),
                ),
            ]
            parts += [element("h3", slot.slot), curves(f"Demand on {slot.slot}", series, unit="ms")]
    if checked:
        rows = [(v.phasing, v.frames, v.lost, v.labelled, v.unexplained) for v in checked]
        parts += [element("h2", "In virtual time"), table(VERIFICATION_HEADS, rows)]
    return document(f"Capacity of {name}", *parts)


def _phase_parts(plan: CapacityPlan) -> list[str]:
    rows = phase_rows(plan)
    return [element("h2", "Phases"), table(PHASE_HEADS, _texts(rows))] if rows else []


def _texts(rows: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [tuple(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row) for row in rows]


def _change_text(refusal: Refusal) -> str:
    return (
        f"Cheapest change: {refusal.cheapest}." if refusal.cheapest else "No single change would make it fit."
    )


def _steps(points: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """A line that rises at each point, in milliseconds."""
    found = [(0.0, 0.0)]
    for at_ns, value_ns in points:
        found.append((at_ns / 1e6, found[-1][1]))
        found.append((at_ns / 1e6, value_ns / 1e6))
    return found

"""The invariants of every run, for all policies, workloads and faults: checked on the record of events alone.

Owns the rules and the search for breaches; knows nothing of how policies or the engine function. A checker returns sentences, one a
breach.

Source: the scheduler's obligations: exclusive slots, one answer per request, no answer after a miss was reported, conservation of
job, bounded priority inversion, no starvation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aionn.hal import Priority
from aionn.scheduler.bandwidth import Label
from aionn.scheduler.job import Abort, Action, DeviceSlot, JobState, Preempt
from aionn.scheduler.planned_queue import AGE_NS
from aionn.scheduler.ready_queue import Policy
from aionn.simulation.engine import Engine, Event, Outcome, Scenario, slots_of
from aionn.simulation.workload import PRIORITIES

__all__ = ["OVERTAKEN_MAX", "Watched", "breaches", "broken_guarantees"]

ANSWERS = ("on_time", "late", "aborted", "refused", "failed")

OVERTAKEN_MAX = 64
"""Number of later jobs that are not HIGH and may still start before an aged job: those that were planned already."""

CONFORMITY_MAX = 64
"""Number of earlier frames of a stream that each is compared with: the jitter of that many periods is known by then."""


def breaches(engine: Engine, *, ages: bool = True) -> list[str]:
    """Every breach of a finished and recorded run, in the order of the rules.

    Args:
        engine: The run.
        ages: Whether the policy promises that nothing starves.
    """
    scenario, events, outcomes = engine.scenario, engine.events, engine.outcomes
    found = _slots(scenario, events)
    found += _answers(scenario, events, outcomes)
    found += _conservation(scenario, events)
    found += _deadlines(scenario, outcomes)
    found += _boundaries(scenario, events)
    if engine.frames:
        found += broken_guarantees(engine)
    if ages:
        found += _starvation(scenario, events)
    return found


def broken_guarantees(engine: Engine) -> list[str]:
    """Every frame of an admitted stream that was lost although no promise was broken, and every label without a cause.

    Under a policy that knows no reservations, every lost frame of the streams that were admitted.
    """
    scenario = engine.scenario
    used_ns = _used(engine.events)
    found: list[str] = []
    overran: set[int] = set()
    for number, is_conforming in _conformity(engine):
        outcome, frame = engine.outcomes[number], engine.frames.get(number)
        stream = scenario.arrivals[number].stream_index
        held = engine.admission.reservations[stream]
        has_overrun = used_ns.get(number, 0) > held.cost.duration_ns
        if has_overrun:
            overran.add(stream)
        label = None if frame is None else frame.label
        is_lost = outcome is None or outcome.kind != "on_time"
        if is_lost and label is None:
            found.append(f"request {number} of the admitted stream {held.terms.name} was lost: {outcome}")
        # A frame pays for one of its stream that overran before.
        is_wrong = (label in (Label.EARLY, Label.DELAYED) and is_conforming) or (
            label is Label.OVERRAN and stream not in overran
        )
        if is_wrong and label is not None:
            found.append(f"request {number} of the admitted stream {held.terms.name} is not {label.value}")
    return found


def _conformity(engine: Engine) -> Iterator[tuple[int, bool]]:
    """Each request of an admitted stream, and whether it came as promised: by the arrivals alone, not by the servers' state."""
    conforming: dict[int, list[int]] = {}
    for number, arrival in enumerate(engine.scenario.arrivals):
        held = engine.admission.reservations.get(arrival.stream_index)
        if held is None:
            continue
        terms = held.terms
        at_ns, deadline_ns = arrival.at_ns, arrival.deadline_ns
        before = conforming.setdefault(arrival.stream_index, [])
        if terms.phase_ns is not None:
            # One frame in each window, whose deadline counts from its beginning at the earliest.
            opens_ns = terms.phase_ns - terms.tolerance_ns
            opens_ns += (at_ns - opens_ns) // terms.period_ns * terms.period_ns
            fits = at_ns - opens_ns <= terms.width_ns and opens_ns not in before[-1:]
            if fits:
                before.append(opens_ns)
            is_whole = deadline_ns is None or deadline_ns >= opens_ns + terms.deadline_ns
            yield number, fits and is_whole
            continue
        # Of any number of successive frames the first and the last are that many periods apart, but for the jitter.
        is_early = any(
            at_ns - earlier_ns < count * terms.period_ns - terms.jitter_ns
            for count, earlier_ns in enumerate(reversed(before[-CONFORMITY_MAX:]), 1)
        )
        is_delayed = deadline_ns is not None and deadline_ns - at_ns < terms.deadline_ns - terms.jitter_ns
        if not is_early:
            before.append(at_ns)
        yield number, not is_early and not is_delayed


def _used(events: Sequence[Event]) -> dict[int, int]:
    """The device time of each job."""
    since: dict[int, int] = {}
    used: dict[int, int] = {}
    for at_ns, kind, number, _ in events:
        if kind == "start":
            since[number] = at_ns
        elif kind in ("stop", "end", "lost") and number in since:
            used[number] = used.get(number, 0) + at_ns - since.pop(number)
    return used


def _slots(scenario: Scenario, events: Sequence[Event]) -> list[str]:
    """A slot runs one job at a time, a job runs on one slot at a time, and only on devices that can run its model."""
    devices = [slot.device for slot in slots_of(scenario.devices)]
    running: dict[int, int] = {}
    on_slot: dict[int, int] = {}
    found = []
    for at_ns, kind, number, slot in events:
        if kind == "start":
            if slot in running:
                found.append(f"{at_ns} ns: slot {slot} starts {number} while {running[slot]} runs there")
            if number in on_slot:
                found.append(
                    f"{at_ns} ns: job {number} starts on slot {slot} while it runs on {on_slot[number]}"
                )
            stream = scenario.arrivals[number].stream_index
            if scenario.durations_ns[stream][devices[slot]] is None:
                found.append(f"{at_ns} ns: job {number} starts on slot {slot}, which cannot run it")
            running[slot] = number
            on_slot[number] = slot
        elif kind in ("stop", "end", "lost"):
            if running.pop(slot, None) != number:
                found.append(f"{at_ns} ns: job {number} leaves slot {slot}, where it does not run")
            on_slot.pop(number, None)
    return found


def _answers(scenario: Scenario, events: Sequence[Event], outcomes: Sequence[Outcome | None]) -> list[str]:
    """Every request has one answer, the first; nothing starts after it."""
    reported: dict[int, str] = {}
    found = []
    for at_ns, kind, number, _ in events:
        if kind in ANSWERS:
            if number in reported:
                found.append(f"{at_ns} ns: request {number} is reported as {kind} after {reported[number]}")
            reported[number] = kind
        elif kind == "start" and number in reported:
            found.append(f"{at_ns} ns: request {number} starts after it was reported as {reported[number]}")
    for number in range(len(scenario.arrivals)):
        outcome = outcomes[number]
        if outcome is None or reported.get(number) != outcome.kind:
            found.append(f"request {number} has no answer, or not the one that was reported")
    return found


def _conservation(scenario: Scenario, events: Sequence[Event]) -> list[str]:
    """A job that ended on time without noise has had the whole of its device time, operations neither skipped nor done twice."""
    if any(device.noise or device.clock.cold_share < 1 for device in scenario.devices):
        return []
    devices = [slot.device for slot in slots_of(scenario.devices)]
    used: dict[int, tuple[int, int]] = {}
    since: dict[int, int] = {}
    found = []
    for at_ns, kind, number, slot in events:
        if kind == "start":
            since[number] = at_ns
            if number not in used or used[number][0] != devices[slot]:
                used[number] = (devices[slot], 0)  # Elsewhere it begins anew.
        elif kind in ("stop", "end", "lost") and number in since:
            device, before_ns = used[number]
            used[number] = (device, before_ns + at_ns - since.pop(number))
        if kind == "on_time":
            device, used_ns = used.get(number, (-1, 0))
            durations = scenario.durations_ns[scenario.arrivals[number].stream_index][device]
            whole_ns = sum(durations) if durations is not None else 0
            if used_ns != whole_ns:
                found.append(f"{at_ns} ns: request {number} ended after {used_ns} of {whole_ns} ns")
    return found


def _deadlines(scenario: Scenario, outcomes: Sequence[Outcome | None]) -> list[str]:
    """On time means by the deadline, and late after it."""
    found = []
    for outcome in outcomes:
        if outcome is None:
            continue
        deadline_ns = scenario.arrivals[outcome.number].deadline_ns
        is_late = deadline_ns is not None and outcome.at_ns > deadline_ns
        if (outcome.kind == "on_time" and is_late) or (outcome.kind == "late" and not is_late):
            found.append(
                f"{outcome.at_ns} ns: request {outcome.number} is reported as {outcome.kind}; its deadline is {deadline_ns} ns"
            )
    return found


def _boundaries(scenario: Scenario, events: Sequence[Event]) -> list[str]:
    """A job that is requested to stop does so within one operation."""
    if any(device.noise or device.clock.cold_share < 1 for device in scenario.devices):
        return []
    devices = [slot.device for slot in slots_of(scenario.devices)]
    asked: dict[int, tuple[int, int]] = {}
    found = []
    for at_ns, kind, number, slot in events:
        if kind == "ask":
            asked[slot] = (at_ns, number)
        elif kind in ("stop", "end", "lost") and slot in asked:
            since_ns, who = asked.pop(slot)
            durations = scenario.durations_ns[scenario.arrivals[who].stream_index][devices[slot]]
            longest_ns = max(durations) if durations is not None else 0
            if kind != "lost" and at_ns - since_ns > longest_ns:
                found.append(
                    f"{at_ns} ns: slot {slot} was asked to stop {number} at {since_ns} ns, an operation takes {longest_ns}"
                )
    return found


def _starvation(scenario: Scenario, events: Sequence[Event]) -> list[str]:
    """A job that has waited long is not overtaken without end by later ones; HIGH jobs, and what HIGH jobs follow, excepted."""
    high = _high_streams(scenario)
    devices = [slot.device for slot in slots_of(scenario.devices)]
    waiting: dict[int, int] = {}
    overtaken: dict[int, int] = {}
    found = []
    for at_ns, kind, number, slot in events:
        if kind == "arrive":
            waiting[number] = at_ns
        elif kind in ("start", *ANSWERS):
            waiting.pop(number, None)
        if kind != "start":
            continue
        stream = scenario.arrivals[number].stream_index
        if stream in high:
            continue
        # Waiting jobs are in the order of their arrival: the old ones come first.
        for other, since_ns in waiting.items():
            if at_ns - since_ns <= AGE_NS or other > number:
                break
            can_run = scenario.durations_ns[scenario.arrivals[other].stream_index][devices[slot]] is not None
            overtaken[other] = overtaken.get(other, 0) + can_run
            if overtaken[other] == OVERTAKEN_MAX:
                found.append(
                    f"{at_ns} ns: request {other} has waited since {since_ns} ns and is overtaken without end"
                )
    return found


def _high_streams(scenario: Scenario) -> set[int]:
    """Streams of HIGH requests, those that HIGH ones follow, which inherit their priority, and those with a guarantee."""
    streams = scenario.workload.stream
    found: set[int] = set()
    names: set[str | None] = set()
    # A stream is listed after the one that it follows.
    for index in range(len(streams) - 1, -1, -1):
        stream = streams[index]
        is_high = PRIORITIES[stream.priority] == Priority.HIGH or stream.guarantee
        if is_high or stream.name in names:
            found.add(index)
            names.add(streams[index].after)
    return found


class Watched:
    """A policy whose every decision is checked: a HIGH job planned on a slot waits for one operation of a lower job there at most.

    Args:
        policy: One whose queue has ``plans``.

    Attributes:
        breaches: The breaches that were found.
        decisions: Number of decisions that were checked.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.breaches: list[str] = []
        self.decisions = 0

    def make_queue(self, slots: Sequence[DeviceSlot]) -> Any:
        """The policy's own."""
        return self._policy.make_queue(slots)

    def decide(self, now_ns: int, queue: Any, slots: Sequence[DeviceSlot]) -> list[Action]:
        """The policy's decision, checked."""
        actions = self._policy.decide(now_ns, queue, slots)
        self.decisions += 1
        asked = {action.slot.index for action in actions if isinstance(action, Preempt)}
        gone = {action.job.number for action in actions if not isinstance(action, Preempt)}
        aborted = {action.job.number for action in actions if isinstance(action, Abort)}
        for slot in slots:
            running = slot.job
            if running is None or not slot.can_preempt or running.rank >= Priority.HIGH:
                continue
            if slot.is_stopping or slot.index in asked or running.state is JobState.ENDED:
                continue
            if running.number in aborted:
                continue
            for job in queue.plans[slot.index].jobs:
                if job.rank == Priority.HIGH and job.number not in gone:
                    self.breaches.append(
                        f"{now_ns} ns: HIGH job {job.number} waits behind {running!r} on slot {slot.index}"
                    )
        return actions

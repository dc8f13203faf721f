"""The reservations of a scenario: which of its streams with a guarantee are admitted, and on which slots.

Owns the step from a described workload to the ledger: the longest duration of a frame under noise and a cold clock, and the longest
operation of each model, since any stream may be best effort. The streams ask in the order of the file.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from aionn.drivers.simulated.profiles import DeviceProfile
from aionn.errors import NotAdmitted
from aionn.hal import CancelCapability
from aionn.scheduler.admission import SHARE_PPM, SlotCost, StreamTerms
from aionn.scheduler.ledger import Ledger, ReservableSlot, Reservation
from aionn.scheduler.reservations.windows import phase_tolerance_ns
from aionn.simulation.scenario import Scenario
from aionn.simulation.workload import Stream, first_capture_ns

__all__ = ["Admission", "admit_streams", "cost_of", "reservable_slots", "terms_of"]

NOISE_DEVIATIONS = 3.0
"""Deviations of the noise that a reserved duration includes: one frame in 700 takes longer."""


class Admission(NamedTuple):
    """The result of asking for the reservations of a scenario.

    Attributes:
        reservations: By the index of the stream.
        refusals: The messages for the streams that were not admitted, by index.
        with_lower: The admitted streams whose other frames may run as best effort, by index.
    """

    reservations: dict[int, Reservation]
    refusals: dict[int, str]
    with_lower: frozenset[int] = frozenset()


def terms_of(stream: Stream, seed: int = 0) -> StreamTerms:
    """The terms of a stream with a guarantee; the phase of one that counts with it is that of its first capture under the seed.

    Raises:
        InvalidArgument: A time is too short or too long.
    """
    assert stream.deadline_s is not None, "checked by the stream"
    period_s = 1.0 / stream.rate_per_s if stream.period_s is None else stream.period_s
    if stream.guarantee == "phased":
        period_ns, jitter_ns = round(period_s * 1e9), math.ceil(stream.jitter_s * 1e9)
        return StreamTerms(
            name=stream.name,
            period_ns=period_ns,
            deadline_ns=round(stream.deadline_s * 1e9),
            jitter_ns=jitter_ns,
            phase_ns=first_capture_ns(stream, seed),
            tolerance_ns=phase_tolerance_ns(period_ns, jitter_ns),
        )
    # Arrivals are rounded to nanoseconds one by one: two may be closer than the period by one.
    return StreamTerms(
        name=stream.name,
        period_ns=max(1, int(period_s * 1e9) - 1) if stream.period_s is None else round(period_s * 1e9),
        deadline_ns=round(stream.deadline_s * 1e9),
        jitter_ns=math.ceil(stream.jitter_s * 1e9) + 1 if stream.jitter_s else 0,
    )


def cost_of(
    durations_ns: tuple[int, ...] | None, device: DeviceProfile, *, is_clock_held: bool = True
) -> SlotCost | None:
    """The device time of one execution with the given operations, with what noise and a cold clock add; None where it cannot
    run."""
    if durations_ns is None:
        return None
    factor = math.exp(NOISE_DEVIATIONS * device.noise)
    if not is_clock_held:
        factor /= device.clock.cold_share
    duration_ns = sum(durations_ns) if factor == 1.0 else math.ceil(sum(durations_ns) * factor)
    can_preempt = device.cancel != CancelCapability.NONE
    piece_ns = min(duration_ns, math.ceil(max(durations_ns) * factor)) if can_preempt else duration_ns
    return SlotCost(duration_ns=duration_ns, piece_ns=piece_ns)


def reservable_slots(devices: tuple[DeviceProfile, ...], cap: float) -> list[tuple[int, ReservableSlot]]:
    """``(index of the device, slot)`` for each slot of the devices, in their order."""
    return [
        (
            index,
            ReservableSlot(
                f"{device.name}/{number}", device.cancel != CancelCapability.NONE, round(cap * SHARE_PPM)
            ),
        )
        for index, device in enumerate(devices)
        for number in range(device.slots)
    ]


def admit_streams(scenario: Scenario, *, is_clock_held: bool = False) -> Admission:
    """Asks for the reservations of a scenario's streams, one after the other; slots of quicker devices are tried first."""
    streams = scenario.workload.stream
    if not any(stream.guarantee for stream in streams):
        return Admission({}, {})
    slots = reservable_slots(scenario.devices, scenario.workload.cap)
    ledger = Ledger([slot for _, slot in slots])
    costs = [
        {
            number: cost
            for number, (device, _) in enumerate(slots)
            if (cost := cost_of(row[device], scenario.devices[device], is_clock_held=is_clock_held))
            is not None
        }
        for row in scenario.durations_ns
    ]
    for stream, by_slot in zip(streams, costs, strict=True):
        # Of all streams: those that are not admitted are best effort.
        for number, cost in by_slot.items():
            ledger.allow_lower(number, stream.name, cost.piece_ns)
    found = Admission({}, {})
    for index, stream in enumerate(streams):
        if not stream.guarantee:
            continue
        by_slot = dict(sorted(costs[index].items(), key=lambda item: (item[1].duration_ns, item[0])))
        try:
            found.reservations[index] = ledger.admit(terms_of(stream, scenario.seed), by_slot, now_ns=0)
        except NotAdmitted as e:
            found.refusals[index] = str(e)
    with_lower = {i for i, held in found.reservations.items() if ledger.may_run_lower(held.number)}
    return found._replace(with_lower=frozenset(with_lower))

"""The question to the ledger of a served device, its answer, and its reports about frames, in the words of ``reservations``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aionn.hal.callers import FrameReport
from aionn.scheduler.admission import STREAM_NAME_CHARACTERS_MAX, StreamTerms
from aionn.scheduler.bandwidth import Frame, Label
from aionn.scheduler.ledger import Reservation
from aionn.scheduler.reservations.ways import label_at_queue
from aionn.service.client.reservations import ServedReservation
from aionn.service.wire.scheduling_messages import AskedTime

__all__ = ["as_granted", "asked_time", "loop_allowance_ns", "number_of", "take_report", "with_verdict"]


LOOP_ALLOWANCE_PART = 8
"""On a served device, one part in so many of the deadline is for the event loop: its ledger cannot be asked again for each stream
that the loop gets later."""

LOOP_ALLOWANCE_NS = 10_000_000
"""And no more than this: a frame of each of some 20 streams."""


def loop_allowance_ns(terms: StreamTerms) -> int:
    """The time that the parts of all frames on the event loop may take from a frame of a served device."""
    return min((terms.deadline_ns - terms.width_ns) // LOOP_ALLOWANCE_PART, LOOP_ALLOWANCE_NS)


def asked_time(
    terms: StreamTerms, duration_ns: int, best_effort: Mapping[str, int], *, chooses_phase: bool
) -> AskedTime:
    """The time that a stream asks for.

    Args:
        terms: The stream.
        duration_ns: The device time of a frame.
        best_effort: The longest execution of each other model of this application.
        chooses_phase: Whether the phase may be replaced.
    """
    blocker = max(best_effort, key=best_effort.__getitem__, default="")
    return AskedTime(
        name=_printable(terms.name),
        period_ns=terms.period_ns,
        deadline_ns=terms.deadline_ns,
        jitter_ns=terms.jitter_ns,
        phase_ns=terms.phase_ns,
        tolerance_ns=terms.tolerance_ns,
        chooses_phase=chooses_phase,
        duration_ns=duration_ns,
        blocker=_printable(blocker),
        blocker_ns=best_effort.get(blocker, 0),
    )


def as_granted(
    terms: StreamTerms, granted: ServedReservation | None, *, chooses_phase: bool
) -> tuple[StreamTerms, bool]:
    """The terms with the phase that was granted, and whether a phase is still to be chosen."""
    if granted is None:
        return terms, chooses_phase
    return msgspec.structs.replace(terms, phase_ns=granted.reserved.phase_ns), False


def with_verdict(reservation: Reservation, granted: ServedReservation | None) -> Reservation:
    """A reservation with the tightest time among the streams of all applications."""
    if granted is None:
        return reservation
    reserved = granted.reserved
    verdict = msgspec.structs.replace(reservation.verdict, slack_ns=reserved.slack_ns, at_ns=reserved.at_ns)
    return msgspec.structs.replace(reservation, verdict=verdict)


def number_of(frame: Frame | None, granted: ServedReservation | None) -> int:
    """The number of the reservation that the device is to execute a frame under; 0 for best effort: it broke a promise on arrival,
    or its reservation has ended."""
    if frame is None or not frame.has_budget or granted is None or granted.end:
        return 0
    return granted.reserved.reservation


def take_report(frame: Frame, report: FrameReport, *, is_way_late: bool) -> Label | None:
    """Gives a frame the label that the queue of the device has found; returns that, None where the frame has another one.

    Args:
        frame: The frame.
        report: The report about it.
        is_way_late: See ``label_at_queue``.
    """
    if frame.label is not None or not report.label:
        return None
    try:
        label = label_at_queue(Label(report.label), is_way_late=is_way_late)
    except ValueError:
        return None  # The device knows another one.
    frame.note(label)
    return label


def _printable(name: str) -> str:
    """A name as the ledger of a served device takes it."""
    text = "".join(character if character.isprintable() else "?" for character in name)
    return text[:STREAM_NAME_CHARACTERS_MAX]

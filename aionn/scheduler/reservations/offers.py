"""The changes that would make a stream fit, by the same test as its admission; and the result of that test in words.

Owns the search for counter-offers and for a phase, and the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from aionn.errors import WouldFit
from aionn.hal import duration_text
from aionn.scheduler.admission import (
    DAY_NS,
    POINTS_MAX,
    SHARE_PPM,
    Demand,
    SlotTest,
    StreamTerms,
    Verdict,
    with_piece_of,
)
from aionn.scheduler.reservations.phases import phases_to_try

__all__ = [
    "Changing",
    "counter_offers",
    "fitting_phase",
    "frames_by",
    "least_that_fits",
    "least_that_may_fit",
    "most_offered_ns",
    "offers_text",
    "reason_text",
]

DOUBLINGS_MAX = 8
"""A counter-offer is at most 256 times what was asked for: more is another application."""

GUESSES_MAX = 6
"""Most values at which a search looks because none below them fits; then it halves the range, as it does without such values."""


def counter_offers(test: SlotTest, new: Demand, verdict: Verdict, *, tries_phases: bool = True) -> WouldFit:
    """The changes of which each alone would make a stream fit that does not; the ledger adds other slots.

    Args:
        test: The slot.
        new: The stream.
        verdict: The result for it, which is negative.
        tries_phases: Whether another phase is looked for, if it has one.
    """
    terms, cost = new.terms, new.cost

    def least(value_ns: int, changed: StreamTerms, changing: Changing) -> int:
        short = test.shortage(Demand(changed, cost))
        return value_ns if short is None else least_that_may_fit(value_ns, short, changing)

    deadline_ns = period_ns = shift_ns = None
    if tries_phases and terms.phase_ns is not None:
        placed = fitting_phase(test, new)
        if placed is not None and placed.phase_ns is not None:
            shift_ns = (placed.phase_ns - terms.phase_ns) % terms.period_ns
    if verdict.limit == "demand":
        by_deadline = Changing(
            lambda at, value: cost.duration_ns * frames_by(at, value - terms.width_ns, terms.period_ns),
            0,
            most_offered_ns(terms.deadline_ns),
        )
        deadline_ns = least_that_fits(
            terms.deadline_ns,
            lambda value: least(value, msgspec.structs.replace(terms, deadline_ns=value), by_deadline),
        )
    room_ppm = test.cap_ppm - (verdict.share_ppm - verdict.own_ppm)
    if room_ppm > 0 and terms.phase_ns is None:  # With another period it has no place among the phases.
        # Nothing below this period fits the share; the search begins there.
        least_ns = max(terms.period_ns, cost.duration_ns * SHARE_PPM // room_ppm)
        if least_ns <= terms.period_ns << DOUBLINGS_MAX:
            by_period = Changing(
                lambda at, value: cost.duration_ns * frames_by(at, new.first_ns, value),
                cost.duration_ns,
                most_offered_ns(least_ns),
            )
            period_ns = least_that_fits(
                least_ns - 1,
                lambda value: least(value, msgspec.structs.replace(terms, period_ns=value), by_period),
            )
    blocker, piece_ns = None, verdict.blocking_ns + verdict.slack_ns
    if verdict.blocker and piece_ns > 0:
        changed = with_piece_of(new, verdict.blocker, piece_ns)
        if test.with_piece(verdict.blocker, piece_ns).verdict(changed).fits:
            blocker = verdict.blocker
    return WouldFit(deadline_ns, period_ns, (), blocker, None if blocker is None else piece_ns, shift_ns)


def fitting_phase(test: SlotTest, new: Demand) -> StreamTerms | None:
    """The terms of a stream at a phase at which it fits; None where it fits at none of those that are tried."""
    held = [demand.windows for demand in test.held if demand.terms.phase_ns is not None]
    for opens_ns in phases_to_try(held, new.windows):
        # An equal time, not before 0.
        phase_ns = opens_ns + new.terms.tolerance_ns
        terms = msgspec.structs.replace(new.terms, phase_ns=phase_ns)
        if test.fits(Demand(terms, new.cost)):
            return terms
    return None


def least_that_fits(asked_ns: int, least: Callable[[int], int]) -> int | None:
    """The least value above ``asked_ns`` with three digits that fits; None where none up to ``DOUBLINGS_MAX`` doublings does.

    Args:
        asked_ns: A value that does not fit.
        least: Tests a value. Returns it where it fits; otherwise a greater one, below which none fits.
    """
    high_ns = max(1, asked_ns)
    floor_ns = max(high_ns + 1, least(high_ns))
    for _ in range(DOUBLINGS_MAX):
        low_ns, high_ns = high_ns, min(2 * high_ns, DAY_NS)
        if floor_ns <= high_ns:
            found, floor_ns = _least_within(low_ns, high_ns, floor_ns, least)
            if found is not None:
                return found
    return None


def _least_within(
    low_ns: int, high_ns: int, floor_ns: int, least: Callable[[int], int]
) -> tuple[int | None, int]:
    """The least value with three digits above ``low_ns`` that fits, if ``high_ns`` does; and the value below which none fits."""
    step_ns = int(10 ** max(0, len(str(low_ns)) - 3))
    low, high = low_ns // step_ns, -(-high_ns // step_ns)
    for _ in range(GUESSES_MAX):
        value_ns = -(-floor_ns // step_ns) * step_ns
        if floor_ns <= low_ns + 1 or value_ns > high_ns:
            break
        found_ns = least(value_ns)
        if found_ns <= value_ns:
            return value_ns, floor_ns
        if found_ns > high_ns:
            return None, found_ns
        floor_ns = found_ns
    found_ns = least(high_ns)
    if found_ns > high_ns:
        return None, found_ns
    while high - (low := max(low, (floor_ns - 1) // step_ns)) > 1:
        middle = (low + high) // 2
        found_ns = least(middle * step_ns)
        if found_ns <= middle * step_ns:
            high = middle
        else:
            floor_ns = found_ns
    return min(high * step_ns, DAY_NS), floor_ns


class Changing(NamedTuple):
    """The demand on a slot that depends on the deadline, or on the period, of a stream.

    Attributes:
        demand_at: By a time and the changed value: the demand up to that time that depends on the value. It falls as the value
            rises.
        per_frame_ns: With another period, the time of a frame in the share of the slot; 0 with another deadline, which changes no
            share.
        most_ns: The greatest value of interest.
    """

    demand_at: Callable[[int, int], int]
    per_frame_ns: int
    most_ns: int


def least_that_may_fit(value_ns: int, short: Verdict, changing: Changing) -> int:
    """A value below which none can fit a slot: time would be missing where it is missing with ``value_ns``, or the share would be
    exceeded.

    Args:
        value_ns: A value that does not fit.
        short: The result of the test with it by ``SlotTest.shortage``.
        changing: The demand that depends on the value.

    Returns:
        More than ``value_ns``; more than ``most_ns`` where no value fits.
    """
    none_ns = max(value_ns, changing.most_ns) + 1
    if short.limit == "share":
        # Shares are rounded down to millionths, and each term is: 2 of them are more than that.
        own_ppm = -(-changing.per_frame_ns * SHARE_PPM // value_ns)
        left_ppm = short.cap_ppm - short.share_ppm + own_ppm + 2
        if not changing.per_frame_ns or left_ppm <= 0:
            return none_ns
        return max(value_ns + 1, changing.per_frame_ns * SHARE_PPM // left_ppm)
    if short.limit != "demand":
        return value_ns + 1
    now_ns = changing.demand_at(short.at_ns, value_ns)
    most_ns = now_ns + short.slack_ns
    if short.held_ns + short.own_ns == now_ns:
        most_ns = max(0, most_ns)  # Without any demand by that time, none is late then.
    if changing.demand_at(short.at_ns, changing.most_ns) > most_ns:
        return none_ns
    low_ns, high_ns = value_ns, changing.most_ns
    while high_ns - low_ns > 1:
        middle_ns = (low_ns + high_ns) // 2
        if changing.demand_at(short.at_ns, middle_ns) <= most_ns:
            high_ns = middle_ns
        else:
            low_ns = middle_ns
    return max(high_ns, value_ns + 1)


def frames_by(at_ns: int, first_ns: int, period_ns: int) -> int:
    """Number of frames of a stream whose deadlines come by a time, the first of them at ``first_ns``."""
    return max(0, (at_ns - first_ns) // period_ns + 1)


def most_offered_ns(asked_ns: int) -> int:
    """The greatest value that ``least_that_fits`` may find."""
    return min(asked_ns << DOUBLINGS_MAX, DAY_NS)


# --- In words -----------------------------------------------------------------------------------------------------------------


def reason_text(terms: StreamTerms, slot: str, verdict: Verdict) -> str:
    """Where the demand exceeds the time, in a sentence without a full stop."""
    where = f'stream "{terms.name}" on {slot}'
    if verdict.limit == "share":
        held = (verdict.share_ppm - verdict.own_ppm) / SHARE_PPM
        return (
            f"{where}: the reserved streams take {max(0.0, held):.3f} of its time, this one {verdict.own_ppm / SHARE_PPM:.3f}"
            f" more, and at most {verdict.cap_ppm / SHARE_PPM:.3f} may be reserved"
        )
    if verdict.limit == "points":
        return (
            f"{where}: the test would need more than {POINTS_MAX} times, since the periods differ too much or the share of"
            f" {verdict.share_ppm / SHARE_PPM:.3f} is too close to the whole"
        )
    blocking = ""
    if verdict.blocking_ns:
        blocking = f', and an operation of "{verdict.blocker}" may occupy the device for {duration_text(verdict.blocking_ns)}'
    if verdict.delay_ns:
        blocking += f", and the machine may delay it by {duration_text(verdict.delay_ns)}"
    return (
        f"{where}: at t = {duration_text(verdict.at_ns)} the reserved streams need {duration_text(verdict.held_ns)}, this one"
        f" {duration_text(verdict.own_ns)}{' more' if verdict.held_ns else ''}{blocking}:"
        f" {duration_text(-verdict.slack_ns)} too much"
    )


def offers_text(offers: WouldFit) -> str:
    """The counter-offers, in a sentence without a full stop."""
    parts = []
    if offers.deadline_ns is not None:
        parts.append(f"with deadline >= {_seconds_text(offers.deadline_ns)} s")
    if offers.period_ns is not None:
        parts.append(f"with period >= {_seconds_text(offers.period_ns)} s")
    if offers.shift_ns is not None:
        parts.append(f"with captures {duration_text(offers.shift_ns)} later")
    parts += [f"on {slot}" for slot in offers.slots]
    if offers.blocker is not None and offers.piece_ns is not None:
        parts.append(f'if "{offers.blocker}" had operations of {duration_text(offers.piece_ns)}')
    return (
        f"It would fit {', or '.join(parts)}" if parts else "No change of one of its terms would make it fit"
    )


def _seconds_text(value_ns: int) -> str:
    return f"{value_ns / 1e9:.9f}".rstrip("0").rstrip(".")

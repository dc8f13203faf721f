"""The changes that would make a stream fit, by the same test as its admission; and the result of that test in words.

Owns the search for counter-offers and for a phase, and the messages.
"""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = ["counter_offers", "fitting_phase", "least_that_fits", "offers_text", "reason_text"]

DOUBLINGS_MAX = 8
"""A counter-offer is at most 256 times what was asked for: more is another application."""


def counter_offers(test: SlotTest, new: Demand, verdict: Verdict, *, tries_phases: bool = True) -> WouldFit:
    """The changes of which each alone would make a stream fit that does not; the ledger adds other slots.

    Args:
        test: The slot.
        new: The stream.
        verdict: The result for it, which is negative.
        tries_phases: Whether another phase is looked for, if it has one.
    """
    terms, cost = new.terms, new.cost

    def with_terms(deadline_ns: int, period_ns: int) -> bool:
        changed = msgspec.structs.replace(terms, deadline_ns=deadline_ns, period_ns=period_ns)
        return test.fits(Demand(changed, cost))

    deadline_ns = period_ns = shift_ns = None
    if tries_phases and terms.phase_ns is not None:
        placed = fitting_phase(test, new)
        if placed is not None and placed.phase_ns is not None:
            shift_ns = (placed.phase_ns - terms.phase_ns) % terms.period_ns
    if verdict.limit == "demand":
        deadline_ns = least_that_fits(terms.deadline_ns, lambda value: with_terms(value, terms.period_ns))
    room_ppm = test.cap_ppm - (verdict.share_ppm - verdict.own_ppm)
    if room_ppm > 0 and terms.phase_ns is None:  # With another period it has no place among the phases.
        # Nothing below this period fits the share; the search begins there.
        least_ns = max(terms.period_ns, cost.duration_ns * SHARE_PPM // room_ppm)
        if least_ns <= terms.period_ns << DOUBLINGS_MAX:
            period_ns = least_that_fits(least_ns - 1, lambda value: with_terms(terms.deadline_ns, value))
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


def least_that_fits(asked_ns: int, fits: Callable[[int], bool]) -> int | None:
    """The least value above ``asked_ns`` with three digits that fits; None where none up to ``DOUBLINGS_MAX`` doublings does."""
    low_ns = high_ns = max(1, asked_ns)
    for _ in range(DOUBLINGS_MAX):
        low_ns, high_ns = high_ns, min(2 * high_ns, DAY_NS)
        if fits(high_ns):
            break
    else:
        return None
    step_ns = int(10 ** max(0, len(str(low_ns)) - 3))
    low, high = low_ns // step_ns, -(-high_ns // step_ns)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step_ns):
            high = middle
        else:
            low = middle
    return min(high * step_ns, DAY_NS)


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

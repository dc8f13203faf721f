"""Whether the new terms of a stream demand no more than its old ones, so that they can take their place without a test.

Owns that comparison. Pure.
"""

from __future__ import annotations

from aionn.scheduler.admission import Demand, StreamTerms

__all__ = ["demands_no_more", "terms_demand_no_more"]


def demands_no_more(new: Demand, old: Demand) -> bool:
    """Whether no set of streams is harmed by the new one that bears the old one, also while frames of both are in progress."""
    return (
        terms_demand_no_more(new.terms, old.terms)
        and new.cost.duration_ns <= old.cost.duration_ns
        and new.cost.piece_ns <= old.cost.piece_ns
        and _is_at_the_same_phase(new.terms, old.terms)
    )


def terms_demand_no_more(new: StreamTerms, old: StreamTerms) -> bool:
    """Whether frames come no more often and no later, and have no less time; phases aside."""
    return (
        new.period_ns >= old.period_ns
        and new.deadline_ns >= old.deadline_ns
        and new.jitter_ns <= old.jitter_ns
    )


def _is_at_the_same_phase(new: StreamTerms, old: StreamTerms) -> bool:
    if old.phase_ns is None:
        return True  # Its frames may come at any time.
    return (
        new.phase_ns is not None
        and new.period_ns == old.period_ns
        and (new.phase_ns - old.phase_ns) % old.period_ns == 0
        and new.tolerance_ns <= old.tolerance_ns
    )

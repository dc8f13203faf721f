"""Arrivals of reserved streams that are as unkind as their terms allow: phases, jitter and gaps.

Owns the kinds of phasing. Same terms, kind and seed, same arrivals.

Source: without blocking, streams that begin together are the worst case of earliest deadline first; with blocking, a long piece
that begins just before them; with jitter, a first frame that is late while the next ones are not (Spuri 1996).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from aionn.scheduler.admission import Demand
from aionn.simulation.workload import Arrival

__all__ = ["PHASINGS", "phased_arrivals"]

PHASINGS = (
    "together",
    "longest first",
    "laxest first",
    "deadlines together",
    "even",
    "random",
    "random, late first",
    "sporadic",
)
"""Kinds of phasing. All begin together; the one with the longest piece, or with the longest deadline, begins just before; the first
deadlines come together; the phases are spread evenly; or drawn; drawn, with a full jitter of the first frames alone; with longer
gaps."""


def phased_arrivals(
    demands: Sequence[Demand], kind: str, seed: int, until_ns: int, *, indexes: Sequence[int] | None = None
) -> list[Arrival]:
    """The arrivals of all streams up to a time, in order. Streams with a phase have that one, whatever the kind: it decides their
    jitter alone.

    Args:
        demands: The streams.
        kind: One of ``PHASINGS``.
        seed: Of what is drawn.
        until_ns: No capture comes later.
        indexes: The stream indexes of the arrivals; None means those of ``demands``.
    """
    source = random.Random(f"{seed}/{kind}")
    found = []
    for position, (demand, phase_ns) in enumerate(zip(demands, _phases(demands, kind, source), strict=True)):
        terms = demand.terms
        index = position if indexes is None else indexes[position]
        captured_ns, number, last_ns = phase_ns, 0, 0
        if terms.phase_ns is not None:
            captured_ns = demand.windows.opens_ns
        while captured_ns <= until_ns:
            # In the order of the captures, whatever the jitter: a stream does not overtake itself.
            last_ns = max(last_ns, captured_ns + _late_ns(terms.width_ns, kind, number, source))
            # With a phase, captures come up to twice the tolerance after the begin of their windows.
            since_ns = max(captured_ns, last_ns - terms.jitter_ns) if terms.tolerance_ns else captured_ns
            found.append(Arrival(last_ns, index, since_ns + terms.deadline_ns))
            captured_ns += terms.period_ns
            if kind == "sporadic" and source.random() < 0.3 and terms.phase_ns is None:
                captured_ns += source.randrange(terms.period_ns)
            number += 1
    found.sort(key=lambda arrival: (arrival.at_ns, arrival.stream_index, arrival.deadline_ns))
    return found


def _phases(demands: Sequence[Demand], kind: str, source: random.Random) -> list[int]:
    if kind in ("together", "longest first", "laxest first"):
        phases = [1] * len(demands)
        if kind == "longest first":
            phases[max(range(len(demands)), key=lambda i: demands[i].cost.piece_ns)] = 0
        elif kind == "laxest first":
            phases[max(range(len(demands)), key=lambda i: demands[i].terms.deadline_ns)] = 0
        return phases
    if kind == "deadlines together":
        last_ns = max(demand.first_ns for demand in demands)
        return [last_ns - demand.first_ns for demand in demands]
    if kind == "even":
        return [d.terms.period_ns * position // len(demands) for position, d in enumerate(demands)]
    return [source.randrange(demand.terms.period_ns) for demand in demands]


def _late_ns(jitter_ns: int, kind: str, number: int, source: random.Random) -> int:
    """The time from a capture to its arrival."""
    if not jitter_ns:
        return 0
    if kind in ("random", "even", "sporadic"):
        return source.randrange(jitter_ns + 1)
    return jitter_ns if number == 0 else 0

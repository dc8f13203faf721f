"""Reports of a node about frames, on the clock of the application."""

from __future__ import annotations

import random

from aionn.fleet.clocks import ClockOffset
from aionn.fleet.reported import report_here
from aionn.hal.callers import FrameReport


def test_times_are_those_of_this_clock_to_half_of_the_round_trip() -> None:
    rng = random.Random(1)
    for _ in range(500):
        offset_ns, there_ns, back_ns = (
            rng.randrange(-(10**12), 10**12),
            rng.randrange(10**6),
            rng.randrange(10**6),
        )
        sent_ns = rng.randrange(10**12, 2 * 10**12)
        arrived_ns = sent_ns + there_ns
        ended_ns = arrived_ns + rng.randrange(10**8)
        answered_ns = ended_ns + rng.randrange(10**5)
        read_ns = answered_ns + back_ns
        clock = ClockOffset()
        clock.exchange(sent_ns, arrived_ns + offset_ns, answered_ns + offset_ns, read_ns)
        report = FrameReport(
            "", 5, False, arrived_ns + offset_ns, ended_ns + offset_ns, answered_ns + offset_ns, 7, 0
        )
        found = report_here(report, ahead_ns=clock.bounds_ns(read_ns), sent_ns=sent_ns, read_ns=read_ns)
        bound_ns = (there_ns + back_ns) / 2 + 1
        for here, true in (
            (found.arrived_ns, arrived_ns),
            (found.ended_ns, ended_ns),
            (found.answered_ns, answered_ns),
        ):
            assert abs(here - true) <= bound_ns
        assert sent_ns <= found.arrived_ns <= found.ended_ns <= found.answered_ns <= read_ns
        assert (found.held_ns, found.blocked_ns) == (5, 7)


def test_a_frame_that_never_had_its_slot_has_no_end() -> None:
    report = FrameReport("", 0, False, 100, 0, 200)
    assert report_here(report, ahead_ns=(50, 50), sent_ns=10, read_ns=500).ended_ns == 0

"""The report about a frame of a reservation, on the clock of the application. Pure.

The difference of both clocks is known as an interval (``clocks``); its middle is taken, and no time is then before the frame was
sent or after its answer was read. So a time is wrong by half of the shortest round trip at most.
"""

from __future__ import annotations

import msgspec

from aionn.hal.callers import FrameReport

__all__ = ["report_here"]


def report_here(report: FrameReport, *, ahead_ns: tuple[int, int], sent_ns: int, read_ns: int) -> FrameReport:
    """The report with the times of this clock.

    Args:
        report: On the node's clock.
        ahead_ns: The least and the greatest time by which that is ahead.
        sent_ns: When the frame was sent, on this clock.
        read_ns: When its answer was read, on this clock.
    """
    middle_ns = sum(ahead_ns) // 2

    def here(node_ns: int) -> int:
        return min(max(node_ns - middle_ns, sent_ns), read_ns)

    return msgspec.structs.replace(
        report,
        arrived_ns=here(report.arrived_ns),
        ended_ns=here(report.ended_ns) if report.ended_ns else 0,
        answered_ns=here(report.answered_ns),
    )

"""The option ``--realtime`` of commands, and the sentence about what was granted."""

from __future__ import annotations

from typing import Literal

from aionn.realtime.threads import State
from aionn.realtime.threads.slices import SLICE_NS
from aionn.runtime.realtime import RealtimeReport

__all__ = ["RealtimeOption", "realtime_sentence"]

RealtimeOption = Literal["required", "if_permitted", "off"] | None
"""None takes ``AIONN_REALTIME``."""


def realtime_sentence(report: RealtimeReport) -> str:
    """The permission and the number of threads that have real-time scheduling or a short slice now; empty if real time is off."""
    if not report.permission:
        return ""
    rows = [row for process in report.processes for row in process.rows]
    count = sum(row.state is State.REALTIME for row in rows)
    sliced = sum(row.slice_ns is not None for row in rows)
    slices = f", {sliced} with a slice of {SLICE_NS / 1e6:g} ms" if sliced else ""
    sentence = f"{count} of {len(rows)} threads under SCHED_RR{slices}; {report.permission}"
    others = [f"{row.name}: {row.state}" for row in rows if row.state in (State.REFUSED, State.PUT_BACK)]
    return f"{sentence}; {', '.join(others)}" if others and report.is_realtime else sentence

"""Findings of the checks of the machine, and the verdict whether it can keep deadlines. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

__all__ = ["Distribution", "Finding", "Gaps", "Measured", "Severity", "Verdict", "judge"]


class Severity(enum.StrEnum):
    """The weight of a finding: SEVERE settings make frames miss deadlines, NOTE is for information."""

    FINE = "fine"
    NOTE = "note"
    WARNING = "warning"
    SEVERE = "severe"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        name: The name of the check.
        severity: The weight of the finding.
        sentence: The state that the check found.
        remedy: The change that improves it; empty if none is needed or known.
        late_ms: The delay that it may cause a HIGH frame on a busy machine: an order of magnitude; 0 means none.
    """

    name: str
    severity: Severity
    sentence: str
    remedy: str = ""
    late_ms: float = 0.0


class Distribution(msgspec.Struct, frozen=True):
    """Times in microseconds.

    Attributes:
        count: Number of times.
        median_us: Half of the times are shorter.
        p99_us: One of a hundred is longer.
        max_us: The longest.
    """

    count: int
    median_us: float
    p99_us: float
    max_us: float

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> Distribution:
        """The distribution of times in nanoseconds; all zeros for an empty list."""
        if not times_ns:
            return cls(0, 0.0, 0.0, 0.0)
        ordered = sorted(times_ns)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3

        return cls(len(ordered), at(0.5), at(0.99), ordered[-1] / 1e3)


class Gaps(msgspec.Struct, frozen=True):
    """Times in which a thread that never waits did not run.

    Attributes:
        count: Number of gaps longer than ``floor_us``.
        floor_us: Shorter gaps are not counted: the kernel's own interrupts cause them.
        longest_us: The longest.
        share: The share of the measured time that the gaps take, 0 to 1.
    """

    count: int
    floor_us: float
    longest_us: float
    share: float

    @classmethod
    def of(cls, gaps_ns: Sequence[int], floor_us: float, looked_ns: int) -> Gaps:
        """The summary of gaps in nanoseconds, all longer than the floor, that occurred within ``looked_ns``."""
        total = sum(gaps_ns)
        return cls(
            len(gaps_ns), floor_us, max(gaps_ns, default=0) / 1e3, total / looked_ns if looked_ns else 0.0
        )


class Measured(msgspec.Struct, frozen=True):
    """The measured delays of this machine.

    Attributes:
        seconds: Length of the measurement.
        scheduling: Scheduling of the measuring threads: ``SCHED_RR``, ``nice`` or ``ordinary``.
        timers: Delays of threads that wake from a sleep, on each processor in turn.
        wakes: Times of a wake-up from one processor to another, half of a round trip; None with one processor.
        gaps: Gaps in a thread that never waits: time that the hypervisor or the firmware took, and without SCHED_RR other programs.
        steal: Share of the time that the hypervisor reports as taken; None if it does not report it.
    """

    seconds: float
    scheduling: str
    timers: Distribution
    wakes: Distribution | None
    gaps: Gaps
    steal: float | None

    @property
    def late_ms(self) -> float:
        """The longest of these delays, in milliseconds."""
        wakes = 0.0 if self.wakes is None else self.wakes.max_us
        return max(self.timers.max_us, wakes, self.gaps.longest_us) / 1e3


class Verdict(msgspec.Struct, frozen=True):
    """The answer to the question whether this machine can keep deadlines of a length.

    Attributes:
        expected: Whether it can.
        sentence: The reason.
    """

    expected: bool
    sentence: str


def judge(findings: Sequence[Finding], deadline_ms: float, measured: Measured | None) -> Verdict:
    """Decide whether this machine can keep deadlines of this length: no delay that was found or measured may be as long.

    Args:
        findings: The findings of all checks.
        deadline_ms: Milliseconds between a frame and its result, beyond the time that the model takes.
        measured: The measured delays; None if nothing was measured.
    """
    against = [
        f"{finding.name} ({finding.late_ms:g} ms)" for finding in findings if finding.late_ms >= deadline_ms
    ]
    if measured is not None and measured.late_ms >= deadline_ms:
        against.append(f"the longest measured delay ({measured.late_ms:.3g} ms)")
    if against:
        return Verdict(
            False,
            f"this machine cannot keep deadlines of {deadline_ms:g} ms when it is busy; too long for them: {', '.join(against)}",
        )
    worst = max((finding.late_ms for finding in findings), default=0.0)
    sentence = f"this machine can keep deadlines of {deadline_ms:g} ms: the longest delay that its settings cause is {worst:g} ms"
    if measured is not None:
        sentence += f", the longest measured delay {measured.late_ms:.3g} ms"
    return Verdict(True, sentence)

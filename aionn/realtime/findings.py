"""What a check of the machine says, and whether deadlines can be expected by it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

__all__ = ["Distribution", "Finding", "Gaps", "Measured", "Severity", "Verdict", "judge"]


class Severity(enum.StrEnum):
    """How much a finding is against deadlines."""

    FINE = "fine"
    NOTE = "note"
    WARNING = "warning"
    SEVERE = "severe"


class Finding(msgspec.Struct, frozen=True):
    """What one check found.

    Attributes:
        name: The check's.
        severity: How much it is against deadlines.
        sentence: What was found.
        remedy: What to do; empty for nothing.
        late_ms: How late a HIGH frame may be because of it on a busy machine: an order of magnitude; 0 for not at all.
    """

    name: str
    severity: Severity
    sentence: str
    remedy: str = ""
    late_ms: float = 0.0


class Distribution(msgspec.Struct, frozen=True):
    """Times in microseconds.

    Attributes:
        count: How many.
        median_us: Half of them are shorter.
        p99_us: One of a hundred is longer.
        max_us: The longest.
    """

    count: int
    median_us: float
    p99_us: float
    max_us: float

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> Distribution:
        """The distribution of times in nanoseconds; zeros where there are none."""
        if not times_ns:
            return cls(0, 0.0, 0.0, 0.0)
        ordered = sorted(times_ns)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3

        return cls(len(ordered), at(0.5), at(0.99), ordered[-1] / 1e3)


class Gaps(msgspec.Struct, frozen=True):
    """Times in which a thread that never waits did not run.

    Attributes:
        count: How many were longer than ``floor_us``.
        floor_us: What is not counted: interrupts of the kernel's own.
        longest_us: The longest.
        share: Of the time, 0 to 1.
    """

    count: int
    floor_us: float
    longest_us: float
    share: float

    @classmethod
    def of(cls, gaps_ns: Sequence[int], floor_us: float, looked_ns: int) -> Gaps:
        """Gaps in nanoseconds that are longer than the floor, over the time that was looked at."""
        total = sum(gaps_ns)
        return cls(
            len(gaps_ns), floor_us, max(gaps_ns, default=0) / 1e3, total / looked_ns if looked_ns else 0.0
        )


class Measured(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        seconds: How long in all.
        scheduling: How the measuring threads ran: ``SCHED_RR``, ``nice`` or ``ordinary``.
        timers: How late sleeping threads woke, on each processor in turn.
        wakes: How long a wake from one processor to another took, half of a round trip; None with one processor.
        gaps: In a thread that never waits: time that the hypervisor or the firmware took, and without SCHED_RR other programs.
        steal: Share of the time that the hypervisor says it took; None where it does not say.
    """

    seconds: float
    scheduling: str
    timers: Distribution
    wakes: Distribution | None
    gaps: Gaps
    steal: float | None

    @property
    def late_ms(self) -> float:
        """The worst of it, in milliseconds."""
        wakes = 0.0 if self.wakes is None else self.wakes.max_us
        return max(self.timers.max_us, wakes, self.gaps.longest_us) / 1e3


class Verdict(msgspec.Struct, frozen=True):
    """Whether deadlines of a length can be expected.

    Attributes:
        expected: Whether they can.
        sentence: Why, or why not.
    """

    expected: bool
    sentence: str


def judge(findings: Sequence[Finding], deadline_ms: float, measured: Measured | None) -> Verdict:
    """Whether deadlines of this length can be expected: nothing that was found or measured may last as long.

    Args:
        findings: Of all checks.
        deadline_ms: Between a frame and its answer, beyond what the model takes.
        measured: What was measured; None for nothing.
    """
    against = [
        f"{finding.name} ({finding.late_ms:g} ms)" for finding in findings if finding.late_ms >= deadline_ms
    ]
    if measured is not None and measured.late_ms >= deadline_ms:
        against.append(f"what was measured now ({measured.late_ms:.3g} ms)")
    if against:
        return Verdict(
            False,
            f"deadlines of {deadline_ms:g} ms cannot be expected on this machine when it is busy: {', '.join(against)}",
        )
    worst = max((finding.late_ms for finding in findings), default=0.0)
    told = (
        f"deadlines of {deadline_ms:g} ms can be expected: the largest delay that was found is {worst:g} ms"
    )
    if measured is not None:
        told += f", the largest that was measured {measured.late_ms:.3g} ms"
    return Verdict(True, told)

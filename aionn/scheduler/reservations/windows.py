"""The enforcement of a reservation with a phase: frames are reserved in their windows alone; and the phase of the source.

Owns the rules for one stream, and the estimate by how much its source has moved. Every window opens a tolerance before a capture is
due, and stays open for the jitter and the tolerance after it. Pure: ``now`` is an argument. Whether the reservation may follow its
source is the ledger's decision.

Invariants:
1. Each window has one reserved frame at most, which arrives while it is open, and counts with the deadline of a capture at its
   beginning: whatever a source does, its reserved frames are a sequence that admission has tested.
2. As for every reservation, no frame uses more than its budget, and a label is the first promise that was broken.

Source: as ``aionn.scheduler.bandwidth``; the windows are those of ``aionn.scheduler.reservations.phases``.
"""

from __future__ import annotations

from typing import Any

from aionn.scheduler.bandwidth import BandwidthServer, Frame, Label

__all__ = ["PhasedServer", "phase_tolerance_ns"]

DRIFT_PPM = 200
"""The most by which the clock of a source and ours are taken to differ: crystals differ by some 50, and the time service adds to
that."""

REVIEW_NS = 1_000_000_000
"""Time after which the captures are looked at: at ``DRIFT_PPM`` a source moves by 0.2 ms in it, a part of the jitter of a
camera."""

REVIEW_FRAMES = 4
"""Frames that are looked at at least: the earliest of them shows the phase, since arrivals are late rather than early."""

JITTER_PART = 4
"""The tolerance has the drift, and one part in so many of the jitter: times of capture are not exact either."""

MOVE_PART = 4
"""A source that has moved by less than one part in so many of the tolerance is left where it is."""


def phase_tolerance_ns(period_ns: int, jitter_ns: int) -> int:
    """The most that a capture may be before or after its time: the drift until the source has been looked at, and a part of the
    jitter."""
    drift_ns = -(-DRIFT_PPM * (REVIEW_NS + REVIEW_FRAMES * period_ns) // 1_000_000)
    return drift_ns + jitter_ns // JITTER_PART


class PhasedServer(BandwidthServer):
    """The state of a reserved stream with a phase. See ``BandwidthServer``.

    Args:
        phase_ns: The time of a capture.
        tolerance_ns: The most that captures are before or after their times.

    Attributes:
        phase_ns: The phase that holds now.
        tolerance_ns: See above.
        captured_ns: The capture of the last frame that came; None before the first.
        wanted_ns: The phase that the source had when it was last looked at, if that is another one; None otherwise.
    """

    __slots__ = (
        "_count",
        "_earliest_ns",
        "_since_ns",
        "_taken_label",
        "_taken_ns",
        "captured_ns",
        "phase_ns",
        "tolerance_ns",
        "wanted_ns",
    )

    def __init__(self, number: int, *, phase_ns: int, tolerance_ns: int, **values: Any) -> None:
        super().__init__(number, **values)
        self.phase_ns = phase_ns
        self.tolerance_ns = tolerance_ns
        self.captured_ns: int | None = None
        self.wanted_ns: int | None = None
        # When the last window opened that has its frame, and the label of that.
        self._taken_ns: int | None = None
        self._taken_label: Label | None = None
        self._count = 0
        self._since_ns = 0
        self._earliest_ns = 0

    # --- The phase of the source ---

    def look(self, now_ns: int, deadline_ns: int | None) -> None:
        """Takes the capture of a frame that comes, before ``arrive``; sets ``wanted_ns`` where the source has another phase.

        That is decided by the first frame if it is outside of its window, and later by the earliest of ``REVIEW_FRAMES`` frames or
        more, every ``REVIEW_NS``.
        """
        captured_ns = now_ns if deadline_ns is None else deadline_ns - self.deadline_ns
        is_first, self.captured_ns = self.captured_ns is None, captured_ns
        off_ns = self.off_ns(captured_ns)
        if is_first:
            self._since_ns = now_ns
            opened_ns = self._opened_ns(now_ns)
            if captured_ns < opened_ns or now_ns > opened_ns + self._width_ns:
                self.wanted_ns = self.phase_ns + off_ns
            return
        self._earliest_ns = min(off_ns, self._earliest_ns) if self._count else off_ns
        self._count += 1
        if self._count >= REVIEW_FRAMES and now_ns - self._since_ns >= REVIEW_NS:
            self._count, self._since_ns = 0, now_ns
            has_moved = abs(self._earliest_ns) * MOVE_PART > self.tolerance_ns
            self.wanted_ns = self.phase_ns + self._earliest_ns if has_moved else None

    def off_ns(self, captured_ns: int) -> int:
        """By how much a capture is after the nearest time at which one is due; negative before it."""
        half_ns = self.period_ns // 2
        return (captured_ns - self.phase_ns + half_ns) % self.period_ns - half_ns

    @property
    def is_astray(self) -> bool:
        """Whether the source has left its windows, as far as it was looked at."""
        return self.wanted_ns is not None and abs(self.off_ns(self.wanted_ns)) > self.tolerance_ns

    def move(self, phase_ns: int) -> None:
        """Takes another phase: see ``Ledger.move``."""
        self.phase_ns = phase_ns
        self.wanted_ns = self._taken_ns = None
        self._count = 0

    # --- The frames ---

    @property
    def _width_ns(self) -> int:
        return self.jitter_ns + 2 * self.tolerance_ns

    def _opened_ns(self, now_ns: int) -> int:
        """When the last window opened."""
        first_ns = self.phase_ns - self.tolerance_ns
        return first_ns + (now_ns - first_ns) // self.period_ns * self.period_ns

    def arrive(self, now_ns: int, deadline_ns: int | None) -> Frame:
        """See ``BandwidthServer.arrive``."""
        self.frame_count += 1
        if self.is_withdrawn:
            return Frame(self, Label.WITHDRAWN, now_ns)
        self.stalls.look(now_ns)
        opened_ns = self._opened_ns(now_ns)
        captured_ns = None if deadline_ns is None else deadline_ns - self.deadline_ns
        if now_ns > opened_ns + self._width_ns:
            return Frame(self, self._label_outside(captured_ns, opened_ns, now_ns), now_ns)
        if self._taken_ns is not None and opened_ns <= self._taken_ns:
            # A frame that came late from the window before has taken this one's place.
            return Frame(self, self._taken_label or Label.EARLY, now_ns)
        label = None
        if captured_ns is not None and captured_ns < opened_ns:
            label = self._late_label(captured_ns, now_ns)
        self._taken_ns, self._taken_label = opened_ns, label
        if self.debt_ns > 0 and self.debt_ns >= self.duration_ns:
            self.debt_ns -= self.duration_ns
            return Frame(self, Label.OVERRAN, now_ns)
        return Frame(self, label, now_ns, opened_ns + self.deadline_ns)

    def _label_outside(self, captured_ns: int | None, opened_ns: int, now_ns: int) -> Label:
        """The label of a frame that comes between two windows: the one before, or the one after, was its own."""
        if captured_ns is None or captured_ns > opened_ns + 2 * self.tolerance_ns:
            return Label.EARLY
        return self._late_label(captured_ns, now_ns)

    def _late_label(self, captured_ns: int, now_ns: int) -> Label:
        """The label of a frame that comes too late after its capture."""
        late_ns = now_ns - self.jitter_ns - captured_ns
        is_stalled = late_ns > 0 and self.stalls.since(captured_ns, now_ns) >= late_ns
        return Label.STALLED if is_stalled else Label.DELAYED

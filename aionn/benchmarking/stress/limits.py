"""The limits of a stress test's body: of its set-up and compilations, and of its work.

Pure: ``now_s`` is an argument. ``bodies`` cancels a body that exceeds its limit.

Invariants:
1. A compilation and the rest of a set-up have a limit of their own, which a machine with much other work keeps: how long they take
   does not show whether the device hangs.
2. Every body has a limit at any time, and the last one is ``SETUP_S_MAX`` and ``LIVENESS_S_MAX`` behind the end of its work.
"""

from __future__ import annotations

import math

__all__ = ["LIVENESS_S_MAX", "SETUP_S_MAX", "Limit"]

LIVENESS_S_MAX = 10.0
"""Limit of the known model's execution, and of the time that a body takes beyond its own, without compilations."""

SETUP_S_MAX = 300.0
"""Limit of a set-up, or of one compilation. The start of a driver and its first compilation take one or two seconds on an idle
machine, and more than ten on two cores with twelve busy processes. A device that never answers costs a test so long."""


class Limit:
    """Until when a body may work.

    A body is set up first. From ``begin`` on it works, and may compile, one model at a time.

    Args:
        now_s: The present time, of any clock.
        seconds: Duration of its work.

    Attributes:
        end_s: When its work ends; infinite before it begins.
        deadline_s: When it is late.
    """

    def __init__(self, now_s: float, seconds: float) -> None:
        self._seconds = seconds
        self._set_up_late_s: float | None = now_s + SETUP_S_MAX
        self.end_s = math.inf
        self.deadline_s = now_s + SETUP_S_MAX

    @property
    def has_begun(self) -> bool:
        """Whether the first set-up is over."""
        return self.end_s < math.inf

    def begin(self, now_s: float) -> None:
        """The set-up is over, and the time of the work begins."""
        self._set_up_late_s = None
        self.end_s = now_s + self._seconds
        self.deadline_s = self.end_s + LIVENESS_S_MAX

    def compiling(self, now_s: float) -> None:
        """A compilation begins. Before the work it is a part of the set-up, and changes nothing."""
        if self.has_begun:
            self._set_up_late_s = now_s + SETUP_S_MAX
            self.deadline_s = min(self._set_up_late_s, self.end_s + SETUP_S_MAX + LIVENESS_S_MAX)

    def compiled(self, now_s: float) -> None:
        """It has ended."""
        if self.has_begun:
            self._set_up_late_s = None
            self.deadline_s = min(max(self.end_s, now_s), self.end_s + SETUP_S_MAX) + LIVENESS_S_MAX

    def is_set_up_late(self, now_s: float) -> bool:
        """Whether the set-up or compilation that is in progress has taken longer than it may; otherwise the work is late."""
        return self._set_up_late_s is not None and now_s >= self._set_up_late_s

"""When the process of a node is started again, as a table and a rule. Pure: ``now`` is an argument.

Invariants:
1. A process that ends by itself is started again after a pause, which doubles with each failure up to ``PAUSE_NS_MAX``.
2. After more than ``FAILURES_MAX`` failures in a row none is started any more: a device that cannot be served is reported and not
   tried without end. A process that has served for ``STEADY_NS`` has no failures behind it.
3. A node that drains is never started again.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["FAILURES_MAX", "NodeState", "Restarts"]

PAUSE_NS_MIN: Final = 200_000_000
PAUSE_NS_MAX: Final = 10_000_000_000
"""The pause after the first failure: a port is free again, and its driver has closed the device. The longest one: a machine whose
device is reset needs seconds, and more starts would only burn its processors."""

FAILURES_MAX: Final = 8
"""Failures in a row after each of which it is started again, over half a minute with these pauses: a mistake in the arguments does
not go away."""

STEADY_NS: Final = 10_000_000_000
"""Time of service after which earlier failures do not count: a start, a model and its first frames are within it."""


class NodeState(enum.Enum):
    """The state of a node's process."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "waits for its next start"
    ENDING = "ending in order"
    ENDED = "ended"
    FAILED = "failed, and is not started again"


_NEXT: Final[dict[tuple[NodeState, str], NodeState]] = {
    (NodeState.STARTING, "serves"): NodeState.SERVING,
    (NodeState.STARTING, "died"): NodeState.PAUSED,
    (NodeState.SERVING, "died"): NodeState.PAUSED,
    (NodeState.PAUSED, "start"): NodeState.STARTING,
    (NodeState.PAUSED, "fail"): NodeState.FAILED,
    (NodeState.STARTING, "end"): NodeState.ENDING,
    (NodeState.SERVING, "end"): NodeState.ENDING,
    (NodeState.PAUSED, "end"): NodeState.ENDED,
    (NodeState.ENDING, "died"): NodeState.ENDED,
}
"""The state after an event; others leave it as it is."""


class Restarts:
    """See the module.

    Attributes:
        state: Of the process.
        starts: Number of starts.
    """

    def __init__(self) -> None:
        self.state = NodeState.STARTING
        self.starts = 1
        self._failures = 0
        self._serves_since_ns: int | None = None

    def serves(self, now_ns: int) -> None:
        """The process has reported where it listens."""
        if self._enters("serves"):
            self._serves_since_ns = now_ns

    def died(self, now_ns: int) -> int | None:
        """The process has ended.

        Returns:
            The pause in nanoseconds before the next start, for ``start``; None if the process is not started again.
        """
        if not self._enters("died") or self.state is NodeState.ENDED:
            return None
        since_ns, self._serves_since_ns = self._serves_since_ns, None
        if since_ns is not None and now_ns - since_ns >= STEADY_NS:
            self._failures = 0
        self._failures += 1
        if self._failures > FAILURES_MAX:
            self._enters("fail")
            return None
        return min(PAUSE_NS_MAX, PAUSE_NS_MIN << (self._failures - 1))

    def start(self) -> bool:
        """The pause is over; whether a process is to be started."""
        has_begun = self._enters("start")
        self.starts += has_begun
        return has_begun

    def end(self) -> bool:
        """The node is to end in order; whether a process runs that has to get SIGTERM."""
        return self._enters("end") and self.state is NodeState.ENDING

    def _enters(self, event: str) -> bool:
        state = _NEXT.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True

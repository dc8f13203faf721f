"""When a silent node counts as lost, and when a lost one is called again.

Owns both decisions, as tables; no I/O, and no clock but the arguments.

While a client has work at a node, the node sends a heartbeat every ``HEARTBEAT_NS``, and the client looks as often whether anything
came. It counts its own looks, not the time: a client whose event loop did not run for a while has looked once in that time, and
reads the bytes that came in it before it looks again.

Invariants:
1. A node is lost after ``SILENT_LOOKS`` looks, and as many as its round trip lasts, in which nothing came while work was out.
2. A generation that is lost never counts as alive again. A node that answers later does so for a generation without callers.
3. Calls of a node that does not answer pause between attempts, longer after each failure, up to a limit.
"""

from __future__ import annotations

import enum

__all__ = ["HEARTBEAT_NS", "ControlState", "Liveness", "Reconnection", "next_state"]

HEARTBEAT_NS = 50_000_000
"""Interval of heartbeats and of looks. Twenty small messages a second while work is out are nothing for a network, and a machine
that is busy delays a process by tens of milliseconds as a rule."""

SILENT_LOOKS = 4
"""Looks without a byte: between 150 and 200 ms, in which three heartbeats are missing. Every waiting call has its error within 250
ms."""

PAUSE_NS_MIN = 50_000_000
PAUSE_NS_MAX = 5_000_000_000
"""The pause after the first failed attempt to reach a node; it doubles with each further one, up to the maximum."""


class ControlState(enum.Enum):
    """The state of a client's connection to a node."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"
    CLOSED = "closed"


_NEXT: dict[tuple[ControlState, str], ControlState] = {
    (ControlState.CONNECTING, "welcome"): ControlState.CONNECTED,
    (ControlState.CONNECTING, "lost"): ControlState.LOST,
    (ControlState.CONNECTED, "lost"): ControlState.LOST,
    (ControlState.CONNECTING, "close"): ControlState.CLOSED,
    (ControlState.CONNECTED, "close"): ControlState.CLOSED,
}


def next_state(state: ControlState, event: str) -> ControlState:
    """The state after an event: ``welcome``, ``lost`` or ``close``. Events that a state does not have leave it as it is."""
    return _NEXT.get((state, event), state)


class Liveness:
    """Whether a node is silent.

    Args:
        looks: See ``SILENT_LOOKS``.
    """

    __slots__ = ("_looks", "_silent")

    def __init__(self, looks: int = SILENT_LOOKS) -> None:
        self._looks = looks
        self._silent = 0

    def heard(self) -> None:
        """Bytes of the node came, on any of its connections."""
        self._silent = 0

    def look(self, *, is_work_out: bool, round_trip_ns: int) -> bool:
        """One look; whether the node is lost.

        Args:
            is_work_out: Whether an answer is expected; the node owes no heartbeats otherwise.
            round_trip_ns: An upper estimate, by which the first heartbeat is later.
        """
        self._silent = self._silent + 1 if is_work_out else 0
        return self._silent >= self._looks + round_trip_ns // HEARTBEAT_NS


class Reconnection:
    """The pauses between attempts to reach a node."""

    __slots__ = ("_failures", "_not_before_ns")

    def __init__(self) -> None:
        self._failures = 0
        self._not_before_ns = 0

    def pause_ns(self, now_ns: int) -> int:
        """The wait before the next attempt; 0 if it may begin."""
        return max(0, self._not_before_ns - now_ns)

    def failed(self, now_ns: int) -> None:
        """An attempt failed."""
        self._not_before_ns = now_ns + min(PAUSE_NS_MAX, PAUSE_NS_MIN << min(self._failures, 16))
        self._failures += 1

    def succeeded(self) -> None:
        """The node has answered."""
        self._failures = 0
        self._not_before_ns = 0

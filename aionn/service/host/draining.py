"""The end of a served device in order: nothing new is accepted, accepted executions end, then the process exits. Pure: the caller
brings the time.

Owns the states between the first SIGTERM and the exit, and the limits of each wait. ``accepted`` knows what is under way.

The rule. An execution is accepted when the process has read it. From the first SIGTERM on, calls that would begin something are
rejected. The wait for accepted executions ends at the latest of their deadlines, and for one without a deadline after
``DRAIN_S_MAX``, or the operator's limit in its place; no deadline extends the wait beyond that. Then the answers are kept until
their clients have read them, ``UNREAD_NS_MAX`` at most. A second SIGTERM ends the process immediately.

Invariants:
1. A drain ends: each state but the last ones is left after a time that is known when it is entered.
2. The exit status is 0 unless an accepted execution was cut off before its deadline, or a second SIGTERM came.

Source: what orchestrators expect of a process (systemd.service(5), ``TimeoutStopSec``; Kubernetes, termination of pods).
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final

__all__ = ["DRAIN_S_MAX", "EXIT_STATUS", "UNREAD_NS_MAX", "DrainEvent", "DrainState", "DrainTable"]

DRAIN_S_MAX: Final = 8.0
"""Limit of the wait for executions without a deadline: Docker kills a container 10 s after SIGTERM, systemd after 90 s."""

GRACE_NS: Final = 50_000_000
"""Time after the last deadline in which the device ends at a boundary and answers, and the least time in which a client can read an
answer: several periods of a busy event loop."""

UNREAD_NS_MAX: Final = 1_000_000_000
"""Limit of the wait for a client that does not read its answers, or does not answer a question about its own request: it is
stopped, or its event loop is blocked."""


class DrainState(enum.Enum):
    """Where the process is between its start and its exit."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "every accepted execution has ended"
    CUT_OFF = "the limit has passed with executions under way"
    STOPPED = "a second SIGTERM came"


class DrainEvent(enum.Enum):
    """An event that a drain depends on."""

    SIGTERM = "SIGTERM"
    IDLE = "nothing accepted is under way, or only what is past its deadline"
    LIMIT = "the limit has passed"


_S, _E = DrainState, DrainEvent

_NEXT: Final = {
    (_S.SERVING, _E.SIGTERM): _S.DRAINING,
    (_S.DRAINING, _E.SIGTERM): _S.STOPPED,
    (_S.DRAINING, _E.IDLE): _S.DRAINED,
    (_S.DRAINING, _E.LIMIT): _S.CUT_OFF,
    (_S.DRAINED, _E.SIGTERM): _S.STOPPED,
    (_S.CUT_OFF, _E.SIGTERM): _S.STOPPED,
    (_S.STOPPED, _E.SIGTERM): _S.STOPPED,
}
"""The next state by state and event; a pair that is not here cannot occur."""

EXIT_STATUS: Final = {_S.DRAINED: 0, _S.CUT_OFF: 1, _S.STOPPED: 143}
"""The process's exit status by its last state; a shell reports 143 for a program that SIGTERM ended (128 + 15)."""


class DrainTable:
    """The state of one process.

    Args:
        limit_ns: Limit of the wait for executions without a deadline, or with a later one.

    Attributes:
        state: Where it is.
    """

    def __init__(self, limit_ns: int) -> None:
        self.state = DrainState.SERVING
        self._limit_ns = limit_ns
        self._ends_ns = 0
        self._bound_ns = 0
        self._idle_ns: int | None = None

    def terminate(self, now_ns: int) -> DrainState:
        """SIGTERM came."""
        if self.state is DrainState.SERVING:
            self._ends_ns = now_ns + self._limit_ns
        return self._move(DrainEvent.SIGTERM)

    def look(self, now_ns: int, under_way: Collection[int | None], *, has_unread: bool) -> DrainState:
        """Decides whether a drain is over.

        Args:
            now_ns: The time.
            under_way: The deadline of each accepted execution that has not ended; None for one without.
            has_unread: Whether a client has not read an answer yet.
        """
        if self.state is not DrainState.DRAINING:
            return self.state
        if under_way:
            self._idle_ns = None
            self._bound_ns = max(self._ends_ns if d is None else min(d, self._ends_ns) for d in under_way)
            if now_ns < self._bound_ns + GRACE_NS:
                return self.state
            are_late = all(d is not None and d <= now_ns for d in under_way)
            return self._move(DrainEvent.IDLE if are_late else DrainEvent.LIMIT)
        if has_unread:
            if self._idle_ns is None:
                self._idle_ns = now_ns
            # A client has until the deadline of the last execution to read its answer, as far as that is near. Where all executions
            # had ended before the first look, no deadline is known, and the answer may be wanted for long.
            until_ns = self._idle_ns + UNREAD_NS_MAX
            if self._bound_ns:
                until_ns = min(max(self._bound_ns, self._idle_ns + GRACE_NS), until_ns)
            if now_ns < until_ns:
                return self.state
        return self._move(DrainEvent.IDLE)

    def _move(self, event: DrainEvent) -> DrainState:
        self.state = _NEXT[self.state, event]
        return self.state

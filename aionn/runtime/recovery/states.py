"""When a prepared model is prepared again after its driver has died, and when that is abandoned. Pure: the caller brings the time.

Owns the states, the number of preparations in a minute, and the pauses between those that fail.

Invariants:
1. At most ``PREPARATIONS_MAX`` preparations begin within ``WINDOW_NS``; one more abandons it, for good.
2. A failure that would repeat itself (the driver rejects the model) abandons it immediately.
3. A state that was abandoned or closed is never left.

Source: the resilient wrappers of the NN HAL's runtime, which prepare again once for each call; the limit is that of a supervisor's
restarts in systemd (``StartLimitBurst``) and Erlang.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

__all__ = ["PREPARATIONS_MAX", "WINDOW_NS", "Recovery", "RecoveryEvent", "RecoveryState"]

PREPARATIONS_MAX: Final = 6
"""Preparations within a minute: enough for a service that is restarted (the pauses add up to 15 s), too few to keep a core busy
where the driver dies of the model itself."""

WINDOW_NS: Final = 60_000_000_000
"""A minute: a driver that dies less often than ``PREPARATIONS_MAX`` times in it still serves most of the time."""

PAUSE_NS_MIN: Final = 500_000_000
"""Pause after a preparation that failed; each further one in a row doubles it. The first preparation begins immediately."""


class RecoveryState(enum.Enum):
    """Where a prepared model is."""

    READY = "ready"
    PREPARING = "being prepared again"
    ABANDONED = "abandoned"
    CLOSED = "closed"


class RecoveryEvent(enum.Enum):
    """An event in the life of a prepared model."""

    DIED = "the driver died"
    PREPARED = "the model was prepared"
    FAILED = "the preparation failed"
    REJECTED = "the preparation failed, and would fail again"
    CLOSED = "it was closed"


_S, _E = RecoveryState, RecoveryEvent

_NEXT: Final = {
    (_S.READY, _E.DIED): _S.PREPARING,
    (_S.READY, _E.CLOSED): _S.CLOSED,
    (_S.PREPARING, _E.DIED): _S.PREPARING,
    (_S.PREPARING, _E.PREPARED): _S.READY,
    (_S.PREPARING, _E.FAILED): _S.PREPARING,
    (_S.PREPARING, _E.REJECTED): _S.ABANDONED,
    (_S.PREPARING, _E.CLOSED): _S.CLOSED,
    (_S.ABANDONED, _E.DIED): _S.ABANDONED,
    (_S.ABANDONED, _E.CLOSED): _S.CLOSED,
    (_S.CLOSED, _E.DIED): _S.CLOSED,
    (_S.CLOSED, _E.PREPARED): _S.CLOSED,
    (_S.CLOSED, _E.FAILED): _S.CLOSED,
    (_S.CLOSED, _E.REJECTED): _S.CLOSED,
    (_S.CLOSED, _E.CLOSED): _S.CLOSED,
}
"""The next state by state and event; a pair that is not here cannot occur."""


class Recovery:
    """The state of one prepared model.

    Attributes:
        state: Where it is.
        deaths: Number of deaths of its driver.
        ready_ns: Since when it has been ready; 0 for the first preparation.
    """

    def __init__(self) -> None:
        self.state = RecoveryState.READY
        self.deaths = 0
        self.ready_ns = 0
        self._began_ns: deque[int] = deque(maxlen=PREPARATIONS_MAX)
        self._failed_in_a_row = 0

    @property
    def preparations(self) -> int:
        """Number of preparations that have begun within the window, at the last event."""
        return len(self._began_ns)

    def died(self, now_ns: int, launched_ns: int) -> int | None:
        """The driver has died, as an execution reports that was asked for at ``launched_ns``.

        One from before the last preparation reports a death that is known.

        Returns:
            When to begin a preparation; None for not now: one is under way, or it was abandoned.
        """
        if self.state is RecoveryState.READY and launched_ns < self.ready_ns:
            return None
        was = self._move(RecoveryEvent.DIED)
        if was is not RecoveryState.READY:
            return None
        self.deaths += 1
        return self._begin(now_ns)

    def prepared(self, now_ns: int) -> bool:
        """A preparation has ended well. Returns whether it is wanted: not after the model was closed."""
        self._move(RecoveryEvent.PREPARED)
        self._failed_in_a_row = 0
        self.ready_ns = now_ns
        return self.state is RecoveryState.READY

    def failed(self, now_ns: int, *, is_transient: bool) -> int | None:
        """A preparation has failed.

        Args:
            now_ns: The time.
            is_transient: Whether another one may succeed.

        Returns:
            When to begin the next one; None for never.
        """
        self._move(RecoveryEvent.FAILED if is_transient else RecoveryEvent.REJECTED)
        if self.state is not RecoveryState.PREPARING:
            return None
        self._failed_in_a_row += 1
        return self._begin(now_ns)

    def close(self) -> None:
        """It is not needed any more. Idempotent."""
        self._move(RecoveryEvent.CLOSED)

    def _begin(self, now_ns: int) -> int | None:
        begins_ns = now_ns
        if self._failed_in_a_row:
            begins_ns += PAUSE_NS_MIN << (self._failed_in_a_row - 1)
        while self._began_ns and begins_ns - self._began_ns[0] >= WINDOW_NS:
            self._began_ns.popleft()
        if len(self._began_ns) == PREPARATIONS_MAX:
            self.state = RecoveryState.ABANDONED
            return None
        self._began_ns.append(begins_ns)
        return begins_ns

    def _move(self, event: RecoveryEvent) -> RecoveryState:
        was = self.state
        self.state = _NEXT[was, event]
        return was

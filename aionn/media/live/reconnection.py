"""The life of a connection to a live source, and when a lost one is opened again: a state table.

Owns the states, the delays between attempts, the reasons and what is logged of them. Refuses to own the opening itself, tasks and
clocks: everything here is synchronous and takes the time as an argument (`source.py` is the shell around it).

Invariants:
1. Only the transitions of `TRANSITIONS` happen; any other one is our own mistake.
2. The delay before an attempt is between ``first_s`` and ``most_s``, 20 % more or less, however many attempts have failed.
3. ``ENDED`` is final.
4. A loss and the return are logged once each, however many attempts fail between them: a program that waits for items sees
   nothing else of it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable

import msgspec

from aionn.errors import InvalidArgument, shown
from aionn.media.arguments import checked_flag
from aionn.platform.numbers import checked_seconds

__all__ = ["Connection", "ConnectionEvent", "ConnectionState", "Health", "Reconnection"]

DOUBLINGS_MAX = 64
"""Failures that still lengthen the delay; a float could not hold many more powers, and every limit is reached long before."""

JITTER = 0.2
"""Part of a delay by which it is varied at random, so that many sources that one failure ended do not come back in step."""

_logger = logging.getLogger("aionn.manager")

DELAY_S_MAX = 86_400.0
"""The longest delay that a policy may ask for, a day: beyond that it is a mistake in the unit."""


class ConnectionState(enum.Enum):
    """State of a connection."""

    OPENING = "opening"
    LIVE = "live"
    WAITING = "waiting"
    ENDED = "ended"


class ConnectionEvent(enum.Enum):
    """Event that changes the state of a connection."""

    OPENED = "opened"
    FAILED = "failed"
    LOST = "lost"
    DUE = "due"
    ENDED = "ended"


TRANSITIONS: dict[tuple[ConnectionState, ConnectionEvent], ConnectionState] = {
    (ConnectionState.OPENING, ConnectionEvent.OPENED): ConnectionState.LIVE,
    (ConnectionState.OPENING, ConnectionEvent.FAILED): ConnectionState.WAITING,
    (ConnectionState.LIVE, ConnectionEvent.LOST): ConnectionState.WAITING,
    (ConnectionState.WAITING, ConnectionEvent.DUE): ConnectionState.OPENING,
    (ConnectionState.OPENING, ConnectionEvent.ENDED): ConnectionState.ENDED,
    (ConnectionState.LIVE, ConnectionEvent.ENDED): ConnectionState.ENDED,
    (ConnectionState.WAITING, ConnectionEvent.ENDED): ConnectionState.ENDED,
    (ConnectionState.ENDED, ConnectionEvent.ENDED): ConnectionState.ENDED,
}


class Reconnection(msgspec.Struct, frozen=True, kw_only=True):
    """The policy by which a lost source is opened again.

    Attributes:
        first_s: Delay before the first attempt; each failed attempt doubles it.
        most_s: The longest delay.
        calm_s: A connection that was live for so long begins with ``first_s`` again when it is lost.
        end_after_s: The source ends with the last error when it was not live for so long; None means that it never does.
        from_start: Whether the first opening is repeated as well. By default its error is raised to the caller, who has
            probably made a mistake in the name.
    """

    first_s: float = 0.25
    most_s: float = 10.0
    calm_s: float = 5.0
    end_after_s: float | None = None
    from_start: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            InvalidArgument: A number is not one, not finite, negative, or ``most_s`` is below ``first_s``.
        """
        where = "aionn.media.Reconnection"
        checked: dict[str, float | bool] = {
            "calm_s": checked_seconds(self.calm_s, f"{where}: calm_s", most=None),
            "from_start": checked_flag(self.from_start, f"{where}: from_start"),
        }
        if self.end_after_s is not None:
            checked["end_after_s"] = checked_seconds(self.end_after_s, f"{where}: end_after_s", most=None)
        most_s = checked_seconds(self.most_s, f"{where}: most_s", least=0.01, most=DELAY_S_MAX)
        first_s = checked_seconds(self.first_s, f"{where}: first_s", least=0.01, most=DELAY_S_MAX)
        if not first_s <= most_s:
            raise InvalidArgument(
                f"{where}: expected 0.01 <= first_s <= most_s <= {DELAY_S_MAX:g}, got {shown(self.first_s)} and "
                f"{shown(self.most_s)}"
            )
        for name, value in {**checked, "first_s": first_s, "most_s": most_s}.items():
            msgspec.structs.force_setattr(self, name, value)

    def delay_ns(self, failures: int, random: float) -> int:
        """Delay before the next attempt.

        Args:
            failures: Attempts that have failed since the source was last live for ``calm_s``.
            random: A number of [0, 1).
        """
        doubled_s = min(self.first_s * 2.0 ** min(failures, DOUBLINGS_MAX), self.most_s)
        return int(doubled_s * (1 + JITTER * (2 * random - 1)) * 1e9)


class Health(msgspec.Struct, frozen=True):
    """The state of a live source's connection.

    Attributes:
        state: ``opening``, ``live``, ``waiting`` (for the next attempt) or ``ended``.
        since_ns: When that state began, CLOCK_MONOTONIC.
        reason: Why the source was last lost or, while it waits, could not be opened; empty if neither has happened.
        failures: Attempts that have failed since it was last live.
        reconnections: Number of times that a lost source was opened again.
    """

    state: str
    since_ns: int
    reason: str
    failures: int
    reconnections: int


class Connection:
    """The state of one source's connection.

    Args:
        policy: None means that the source ends when it is lost.
        now_ns: When the first opening begins.
        random: Gives numbers of [0, 1).
    """

    def __init__(self, policy: Reconnection | None, now_ns: int, random: Callable[[], float]) -> None:
        self._policy = policy
        self._random = random
        self._state = ConnectionState.OPENING
        self._since_ns = now_ns
        self._lost_ns = now_ns
        self._was_live = False
        self._reason = self._loss = ""
        self._failures = 0
        self._delays = 0
        self._reconnections = 0
        self._wake_ns = 0

    @property
    def state(self) -> ConnectionState:
        """The state now."""
        return self._state

    @property
    def wake_ns(self) -> int:
        """When the next attempt is due; valid in ``WAITING``."""
        assert self._state is ConnectionState.WAITING
        return self._wake_ns

    @property
    def reconnections(self) -> int:
        """Number of times that a lost source was opened again."""
        return self._reconnections

    def health(self) -> Health:
        """The record for users."""
        return Health(self._state.value, self._since_ns, self._reason, self._failures, self._reconnections)

    def opened(self, now_ns: int) -> None:
        """The source was opened."""
        self._change(ConnectionEvent.OPENED, now_ns)
        if self._was_live:
            self._reason = self._loss
            _logger.warning(
                "a source is open again, after %.1f s; %s", (now_ns - self._lost_ns) / 1e9, self._loss
            )
        self._reconnections += self._was_live
        self._was_live = True
        self._failures = 0

    def failed(self, now_ns: int, reason: str, *, is_permanent: bool) -> None:
        """An attempt to open the source has failed.

        Args:
            now_ns: When.
            reason: The error's message.
            is_permanent: Whether no later attempt can succeed, such as without permission.
        """
        self._reason = reason
        self._failures += 1
        may_repeat = self._was_live or (self._policy is not None and self._policy.from_start)
        self._wait_or_end(ConnectionEvent.FAILED, now_ns, is_permanent or not may_repeat)
        if self._state is ConnectionState.WAITING and self._failures == 1 and not self._was_live:
            _logger.warning("%s; attempts to open it continue", reason)

    def lost(self, now_ns: int, reason: str, *, is_permanent: bool = False) -> None:
        """The source was live, and is not any more. See `failed` for the arguments."""
        self._reason = self._loss = reason
        self._lost_ns = now_ns
        if self._policy is not None and now_ns - self._since_ns >= self._policy.calm_s * 1e9:
            self._delays = 0
        self._wait_or_end(ConnectionEvent.LOST, now_ns, is_permanent)
        if self._state is ConnectionState.WAITING:
            _logger.warning("%s; it is being opened again", reason)

    def due(self, now_ns: int) -> None:
        """The next attempt begins."""
        self._change(ConnectionEvent.DUE, now_ns)

    def ended(self, now_ns: int) -> None:
        """The source was closed. May be called in any state."""
        self._change(ConnectionEvent.ENDED, now_ns)

    def _wait_or_end(self, event: ConnectionEvent, now_ns: int, is_final: bool) -> None:
        policy = self._policy
        if policy is None or is_final or self._is_too_long(policy, now_ns):
            self._change(ConnectionEvent.ENDED, now_ns)
            return
        self._wake_ns = now_ns + policy.delay_ns(self._delays, self._random())
        self._delays += 1
        self._change(event, now_ns)

    def _is_too_long(self, policy: Reconnection, now_ns: int) -> bool:
        """Whether ``end_after_s`` has passed since the source was live."""
        return policy.end_after_s is not None and now_ns - self._lost_ns >= policy.end_after_s * 1e9

    def _change(self, event: ConnectionEvent, now_ns: int) -> None:
        after = TRANSITIONS.get((self._state, event))
        assert after is not None, f"{event} in {self._state}"
        if after is not self._state:
            self._since_ns = now_ns
        self._state = after

"""The pauses between the items of a live source: the silence after which it is lost, and the item that is about to come. Pure: it
takes the time as an argument.

Owns the limits, and the pauses that they follow. Refuses to own the waits (`source.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

__all__ = ["Silence", "silence_ns"]

FIRST_ITEM_S_MAX = 5.0
"""The first item after opening may take so long: cameras measure the light first, and a stream begins with a key frame."""

SILENCE_PERIODS = 3
"""A source is lost if so many periods pass without an item, since two missing ones may be an exposure in the dark."""

SILENCE_S_MIN = 1.0
"""A source is not lost earlier, however short its period: a busy machine may pause for tenths of a second."""

SILENCE_S_DEFAULT = 5.0
"""The limit for a source whose period is not known, and after the first item of each opening: many streams declare 25 frames/s
and send one in seconds."""

PAUSES_KEPT = 8
"""The longest of the last pauses counts as the period where it is longer than the declared one. Eight are the second and more of
a slow stream, in which exposure and network vary, and pass within 0.3 s where it is fast again."""


DUE_SHARE = 4
"""An item that is expected within a quarter of a period is worth a wait: it is younger than the last one by three quarters. A slow
consumer loses an eighth of its results at most, where it needs 1.75 periods for one and waits before each."""

LATE_SHARE = 8
"""An item that is expected is waited for so much of a period longer: the pace of a network and of a busy machine varies."""


class Silence:
    """The pauses between the items of one connection.

    Args:
        now_ns: When the source was opened.

    Attributes:
        limit_ns: The longest pause of a source that is not lost.
    """

    def __init__(self, now_ns: int) -> None:
        self.limit_ns = int(FIRST_ITEM_S_MAX * 1e9)
        self._last_ns = now_ns
        self._pauses_ns: deque[int] | None = None

    def left_ns(self, now_ns: int) -> int:
        """Time until the source is lost."""
        return self._last_ns + self.limit_ns - now_ns

    def excuse(self, now_ns: int) -> None:
        """Begins a new pause, since the source was not read."""
        self._last_ns = now_ns

    def worthwhile_ns(self, now_ns: int) -> int:
        """The longest wait for the next item that is worthwhile for a consumer that could take the last one; 0 if none is."""
        pauses_ns = self._pauses_ns
        if pauses_ns is None or len(pauses_ns) < PAUSES_KEPT:
            return 0
        period_ns = sorted(pauses_ns)[PAUSES_KEPT // 2]
        left_ns = self._last_ns + period_ns - now_ns
        return left_ns + period_ns // LATE_SHARE if 0 < left_ns <= period_ns // DUE_SHARE else 0

    def end(self, now_ns: int, period_ns: int | None) -> None:
        """Ends a pause: an item has come.

        Args:
            now_ns: When.
            period_ns: The declared time between two items; None if none is declared.
        """
        if self._pauses_ns is None:
            self._pauses_ns = deque(maxlen=PAUSES_KEPT)
        else:
            self._pauses_ns.append(now_ns - self._last_ns)
        self._last_ns, self.limit_ns = now_ns, silence_ns(period_ns, self._pauses_ns)


def silence_ns(period_ns: int | None, pauses_ns: Collection[int]) -> int:
    """The longest pause between two items of a source that is not lost.

    Args:
        period_ns: The declared time between two items; None if none is declared.
        pauses_ns: The last pauses; empty after the first item, when nothing shows whether the declared period is true.
    """
    least_ns = int((SILENCE_S_MIN if period_ns is not None and pauses_ns else SILENCE_S_DEFAULT) * 1e9)
    return max(SILENCE_PERIODS * max(period_ns or 0, *pauses_ns, 0), least_ns)

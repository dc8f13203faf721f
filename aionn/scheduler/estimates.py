"""Expected durations of jobs: learnt from timings, per model and device.

Owns the recent timings and the quantile that decisions use. A mean would be missed half of the time; the quantile is missed as
seldom as one asks for. Certain lateness is judged by the shortest timing instead: one slow execution must not cause the rejection
of all later ones. Refuses to measure: timings come from outside.

Invariants:
1. An estimate is at least 1 ns, whatever was observed.
2. Memory is bounded: ``window`` timings of each of at most ``KEYS_MAX`` pairs, the longest unused forgotten first.

Source: profiled time per model and device as in deadline-aware serving systems; a sliding window follows changes of the clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, KeysView
from itertools import islice
from typing import Literal

from aionn.errors import InvalidArgument

__all__ = ["COLD_COUNT", "KEYS_MAX", "Estimates", "believed_ns"]

KEYS_MAX = 4096
"""Most pairs of model and device that are remembered: some 16 MB at the default window."""

MARGIN = 0.3
"""Margin of the estimate of a pair that was never timed, as a share: three deviations of a timing with 10 % noise. It
shrinks with the root of the count: the largest of few timings is a poor bound of the next."""

COLD_COUNT = 2
"""Timings of a pair that are of a cold device: the clock rises, and caches are filled."""

SURE_COUNT = 4
"""From how many timings on the shortest of them is believed to be the least there is: the first are slow, as caches are cold."""


DECLARED_NS_MAX = 86_400_000_000_000
"""Longest duration that a driver is believed to need: a day. A number near the end of time means that a device cannot run it."""


def believed_ns(declared_ns: int | None) -> int:
    """The effective value of a duration that a driver declares; the least if it declares none, or a negative one."""
    return 1 if declared_ns is None else min(max(1, declared_ns), DECLARED_NS_MAX)


class _Timings:
    """The timings of a pair.

    Attributes:
        recent: The last ones before ``unsorted``, in their order.
        ordered: The same, ascending.
        unsorted: Those that came after them, since the last question.
        observed_count: Number of all but ``unsorted``.
    """

    __slots__ = ("observed_count", "ordered", "recent", "unsorted")

    def __init__(self, window: int) -> None:
        self.recent: deque[int] = deque(maxlen=window)
        self.ordered: list[int] = []
        self.unsorted: list[int] = []
        self.observed_count = 0

    def sort(self) -> None:
        """Takes up what came since the last question."""
        recent, ordered, unsorted = self.recent, self.ordered, self.unsorted
        self.observed_count += len(unsorted)
        if len(unsorted) == 1:  # As below, for a question after each timing.
            if len(recent) == recent.maxlen:
                del ordered[bisect_left(ordered, recent[0])]
            insort(ordered, unsorted[0])
            recent.append(unsorted[0])
        else:
            recent.extend(unsorted)
            ordered[:] = sorted(recent)
        unsorted.clear()


class Estimates:
    """Expected durations.

    Args:
        quantile: Which share of executions should take no longer than expected; above 0 and at most 1.
        window: Number of timings of a pair that count.
    """

    def __init__(self, *, quantile: float = 0.99, window: int = 64) -> None:
        if not 0 < quantile <= 1:
            raise InvalidArgument(f"estimates: quantile must be above 0 and at most 1, got {quantile}")
        if window < 1:
            raise InvalidArgument(f"estimates: window must be at least 1, got {window}")
        self._window = window
        self._seen: OrderedDict[Hashable, _Timings] = OrderedDict()
        # By the number of timings: which of them is the quantile, and the factor of the margin.
        self._ranks = [max(0, math.ceil(quantile * count) - 1) for count in range(window + 1)]
        self._factors = [1 + MARGIN / math.sqrt(1 + count) for count in range(window + 1)]

    def keys(self) -> KeysView[Hashable]:
        """The pairs that were timed."""
        return self._seen.keys()

    def observe(
        self, key: Hashable, duration_ns: int, limit: Literal["none", "at_least", "at_most"] = "none"
    ) -> None:
        """Learns from a timing.

        Args:
            key: Model and device.
            duration_ns: From start to end on the device.
            limit: ``at_least`` if it was broken off, ``at_most`` if something else took part of the time: such a timing counts only
                if it adds information.

        Raises:
            InvalidArgument: The duration is negative.
        """
        if duration_ns < 0:
            raise InvalidArgument(f"estimates: a duration must be at least 0 ns, got {duration_ns}")
        seen = self._seen
        pair = seen.get(key)
        if pair is None:
            if len(seen) >= KEYS_MAX:
                seen.popitem(last=False)
            pair = seen[key] = _Timings(self._window)
        elif limit != "none":
            ordered = self._sorted(pair)
            if duration_ns < ordered[0] if limit == "at_least" else duration_ns > ordered[-1]:
                return
        # Sorted by the next question: most executions have no deadline, and nothing is asked.
        unsorted = pair.unsorted
        unsorted.append(duration_ns)
        if len(unsorted) >= self._window:
            pair.sort()
        seen.move_to_end(key)

    @staticmethod
    def _sorted(pair: _Timings) -> list[int]:
        if pair.unsorted:
            pair.sort()
        return pair.ordered

    def forget(self, key: Hashable) -> None:
        """Drops the timings of a pair that is never asked for again. From any thread, also from a finaliser."""
        self._seen.pop(key, None)

    def durations_ns(self, key: Hashable, default_ns: int) -> tuple[int, int]:
        """The expected duration, with a margin for how little is known; and the least duration, with less than which left an
        execution is certain to be late.

        Args:
            key: Model and device.
            default_ns: The estimate as long as nothing was observed; the least duration, as long as little was.
        """
        pair = self._seen.get(key)
        if pair is None:
            return int(default_ns * (1 + MARGIN)) or 1, default_ns or 1
        if pair.unsorted:
            pair.sort()
        ordered = pair.ordered
        count = len(ordered)
        expected_ns = int(ordered[self._ranks[count]] * self._factors[count]) or 1
        return expected_ns, (default_ns if count < SURE_COUNT else ordered[0]) or 1

    def duration_ns(self, key: Hashable, default_ns: int) -> int:
        """The expected duration; see ``durations_ns``."""
        return self.durations_ns(key, default_ns)[0]

    def warm_ns(self, key: Hashable, default_ns: int) -> int:
        """As ``duration_ns``, without the first ``COLD_COUNT`` timings of a pair if there are others: an engine that has just
        prepared a model fills its caches with these, which no later execution does."""
        pair = self._seen.get(key)
        if pair is not None:
            self._sorted(pair)
        cold_count = 0 if pair is None else COLD_COUNT - (pair.observed_count - len(pair.recent))
        if pair is None or cold_count <= 0 or len(pair.recent) <= cold_count:
            return self.duration_ns(key, default_ns)
        ordered = sorted(islice(pair.recent, cold_count, None))
        return int(ordered[self._ranks[len(ordered)]] * self._factors[len(ordered)]) or 1

    def least_ns(self, key: Hashable, default_ns: int) -> int:
        """The least duration; see ``durations_ns``."""
        return self.durations_ns(key, default_ns)[1]

    def count(self, key: Hashable) -> int:
        """Number of timings of a pair that count now."""
        pair = self._seen.get(key)
        return 0 if pair is None else len(self._sorted(pair))

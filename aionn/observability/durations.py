"""Counts of durations in buckets of a fixed size, cheap enough for every frame; pure.

Owns the buckets: four for each power of two, so that a bucket is 14 to 25 % wide, 19 % in the mean. The index of a bucket is the
number of bits of the duration and the two bits below the highest one: three operations on integers, no logarithm and no search.

Written by one thread. Another one may copy at any time: a list is copied in one step of the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["BUCKETS", "EXPOSED_NS", "LEAST_NS", "Durations", "SignedDurations", "bucket_of"]

LEAST_NS = 4
"""Shorter durations count as this one: the formula of the bucket needs three bits."""

BUCKETS = 4 * 64
"""Enough for every time of 64 bits."""

EXPOSED_NS = tuple((2 + half) << shift for shift in range(13, 33) for half in (0, 1))
"""The upper bounds that are exposed: every second bucket from 16 us to 13 s. Each is a series of the monitoring system; with a
factor of 1.41 between two bounds a quantile is exact within some 20 %."""


class Durations:
    """The durations of one kind.

    Attributes:
        counts: By bucket; see ``add`` for the index.
        total_ns: Their sum.
    """

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.total_ns = 0

    def add(self, duration_ns: int) -> None:
        """Counts one; one below zero counts as ``LEAST_NS``."""
        if duration_ns < LEAST_NS:
            duration_ns = LEAST_NS
        bits = duration_ns.bit_length()
        self.counts[(bits << 2) + (duration_ns >> bits - 3) - 8] += 1
        self.total_ns += duration_ns

    def copy(self) -> Durations:
        """The same counts, which do not change any more."""
        made = Durations()
        made.counts, made.total_ns = self.counts[:], self.total_ns
        return made

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """``(bound, number of durations below it)`` for each bound of ``EXPOSED_NS``."""
        passed = index = 0
        for bound_ns in EXPOSED_NS:
            end = bucket_of(bound_ns)
            passed += sum(self.counts[index:end])
            index = end
            yield bound_ns, passed


def bucket_of(duration_ns: int) -> int:
    """The index of a duration's bucket, which begins at the duration itself for a power of two and its quarters."""
    bits = duration_ns.bit_length()
    return (bits << 2) + (duration_ns >> bits - 3) - 8


class SignedDurations:
    """Durations that may be negative, such as the time from an end to a deadline.

    Attributes:
        positive: Those from zero on.
        negative: The others, without their sign.
    """

    __slots__ = ("negative", "positive")

    def __init__(self) -> None:
        self.positive = Durations()
        self.negative = Durations()

    def add(self, duration_ns: int) -> None:
        """Counts one."""
        if duration_ns >= 0:
            self.positive.add(duration_ns)
        else:
            self.negative.add(-duration_ns)

    def copy(self) -> SignedDurations:
        """The same counts, which do not change any more."""
        made = SignedDurations()
        made.positive, made.negative = self.positive.copy(), self.negative.copy()
        return made

    @property
    def count(self) -> int:
        """Number of durations."""
        return self.positive.count + self.negative.count

    @property
    def total_ns(self) -> int:
        """Their sum."""
        return self.positive.total_ns - self.negative.total_ns

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """``(bound, number of durations below it)``, from the most negative bound of ``EXPOSED_NS`` to the highest."""
        all_negative = self.negative.count
        for bound_ns, shorter in reversed(list(self.negative.cumulative())):
            yield -bound_ns, all_negative - shorter
        yield 0, all_negative
        for bound_ns, shorter in self.positive.cumulative():
            yield bound_ns, all_negative + shorter

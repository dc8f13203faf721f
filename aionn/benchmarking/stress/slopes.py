"""The growth of a quantity, and its confidence interval: pure arithmetic over samples of a long run.

Owns the cut of the warm-up, the slope with its interval, and the verdict. Samples of one process depend on their neighbours in time
(a pool that grows keeps its size), so the line is laid through means of blocks, which depend on each other far less.

Source: least squares over batch means with Student's t, as for the output of simulations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from aionn.errors import InvalidArgument

__all__ = ["BLOCKS_MAX", "BLOCKS_MIN", "WARM_UP_SHARE", "Slope", "slope_of"]

WARM_UP_SHARE = 0.25
"""Share of the samples, from the first on, that does not count: caches fill, pools of threads and of memory find their size."""

BLOCKS_MAX = 12
"""Most blocks: with more of them neighbours depend on each other, and Student's t gains little above 10 degrees of freedom."""

BLOCKS_MIN = 4
"""Fewest blocks that give an interval: two degrees of freedom, and one block over."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95 % on both sides, from one degree of freedom on."""

SECONDS_PER_HOUR = 3600.0


class Slope(msgspec.Struct, frozen=True):
    """The growth of a quantity.

    Attributes:
        quantity: Which, with the process that it is of.
        first: Its mean over the first block that counts.
        last: Its mean over the last block.
        per_hour: The slope; None where there are too few samples for one.
        low: Lower end of its 95 % interval; None as above.
        high: Upper end of its 95 % interval; None as above.
        bound: Growth per hour that does not matter in practice.
    """

    quantity: str
    first: float
    last: float
    per_hour: float | None
    low: float | None
    high: float | None
    bound: float

    @property
    def is_steady(self) -> bool:
        """Whether no growth was shown: the interval includes zero, is below it or below the bound, or is unknown."""
        return self.low is None or self.high is None or self.low <= 0 or self.high <= self.bound


def slope_of(quantity: str, times_s: Sequence[float], values: Sequence[float], bound: float) -> Slope:
    """The growth of a quantity after its warm-up.

    Args:
        quantity: Its name.
        times_s: When each sample was taken, ascending.
        values: The samples.
        bound: Growth per hour that does not matter; at least 0.

    Returns:
        The slope; without an interval where fewer than ``BLOCKS_MIN`` samples count.

    Raises:
        InvalidArgument: Times and values differ in number, are empty, the times do not ascend, or the bound is negative.
    """
    times, samples = np.asarray(times_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if times.shape != samples.shape or not times.size or (np.diff(times) <= 0).any() or not bound >= 0:
        raise InvalidArgument(
            f"slope of {quantity}: expected as many values as ascending times, at least one, and a bound of at least 0;"
            f" got {samples.size} values, {times.size} times, bound {bound}"
        )
    skipped = int(times.size * WARM_UP_SHARE)
    count = min(BLOCKS_MAX, times.size - skipped)
    x = np.array([block.mean() for block in np.array_split(times[skipped:], count)])
    y = np.array([block.mean() for block in np.array_split(samples[skipped:], count)])
    first, last = float(y[0]), float(y[-1])
    if count < BLOCKS_MIN:
        return Slope(quantity, first, last, None, None, None, bound)
    spread = x - x.mean()
    square = float((spread**2).sum())
    slope = float((spread * y).sum()) / square
    rest = y - y.mean() - slope * spread
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / square)
    half = _T_975[count - 3] * error
    hourly = [SECONDS_PER_HOUR * value for value in (slope, slope - half, slope + half)]
    return Slope(quantity, first, last, hourly[0], hourly[1], hourly[2], bound)

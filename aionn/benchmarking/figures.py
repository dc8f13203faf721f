"""Statistics of a list of measured numbers: quantiles with enough samples beyond them, mean, spread, and a histogram.

Owns the arithmetic; pure. A quantile is reported only if several samples are beyond it, since a single one is not significant.

Source: the 32-bucket histograms of MLTS, the HAL's own benchmark suite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "BEYOND_MIN",
    "BUCKETS",
    "Spread",
    "Verdict",
    "figure_text",
    "judgement",
    "percentile",
    "spread_of",
    "verdict",
]

BUCKETS = 32

BEYOND_MIN = 5
"""Number of samples that must be beyond a quantile: the median needs 10 samples, the 90th percentile 50, the 99th 500."""

SAME_SHARE = 0.01
"""Differences up to this share count as none; MLTS's number."""

SAME_POINTS = 0.01
"""Shares of right answers that differ by up to one point are the same; MLTS's number."""

Verdict = str
"""``better``, ``same`` or ``worse``."""


class Spread(msgspec.Struct, frozen=True):
    """Statistics of a list of numbers.

    Attributes:
        count: Their number.
        mean: Their mean.
        deviation: Their standard deviation; 0 for one.
        min: The least.
        max: The largest.
        p50: The median; None if fewer than ``BEYOND_MIN`` samples are beyond it, as for the next two.
        p90: The 90th percentile.
        p99: The 99th percentile.
        histogram: Number of them in each of ``BUCKETS`` equal parts from ``min`` to ``limit``; larger ones count in the last.
        limit: The upper end of the histogram: the 99th percentile of whatever there is, so that one outlier does not flatten it.
    """

    count: int
    mean: float
    deviation: float
    min: float
    max: float
    p50: float | None
    p90: float | None
    p99: float | None
    histogram: tuple[int, ...]
    limit: float


def spread_of(values: Sequence[float]) -> Spread:
    """Summarises numbers, at least one.

    Raises:
        ValueError: The list is empty, or a number is not finite.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise ValueError(f"expected at least one number, all finite; got {numbers.size} numbers")
    low, limit = float(numbers.min()), percentile(numbers, 0.99)
    top = limit if limit > low else low + 1e-9
    counts, _ = np.histogram(np.minimum(numbers, top), bins=BUCKETS, range=(low, top))

    def quantile(share: float) -> float | None:
        is_enough = math.floor(numbers.size * (1 - share) + 1e-9) >= BEYOND_MIN
        return percentile(numbers, share) if is_enough else None

    return Spread(
        count=int(numbers.size),
        mean=float(numbers.mean()),
        deviation=float(numbers.std(ddof=1)) if numbers.size > 1 else 0.0,
        min=low,
        max=float(numbers.max()),
        p50=quantile(0.5),
        p90=quantile(0.9),
        p99=quantile(0.99),
        histogram=tuple(int(c) for c in counts),
        limit=limit,
    )


def percentile(values: Sequence[float] | npt.NDArray[np.float64], share: float) -> float:
    """The value that ``share`` of the numbers do not exceed, interpolated between two of them; 0 without numbers."""
    return float(np.quantile(values, share)) if len(values) else 0.0


def figure_text(value: float | None, decimals: int) -> str:
    """A figure for people; empty without one."""
    return "" if value is None else f"{value:.{decimals}f}"


def verdict(value: float, baseline: float) -> Verdict:
    """The ratio of a time to the baseline's; lower is better."""
    if abs(value - baseline) <= SAME_SHARE * abs(baseline):
        return "same"
    return "better" if value < baseline else "worse"


def judgement(value: float, baseline: float, *, higher_is_better: bool) -> Verdict:
    """The comparison of a share of correct answers, or of an error, with the baseline's. A missing number is worse than any
    other.
    """
    if abs(value - baseline) <= SAME_POINTS:
        return "same"
    is_better = value > baseline if higher_is_better else value < baseline
    return "better" if is_better else "worse"

"""The counts of a live source. Refuses to count: `source.py` does."""

from __future__ import annotations

from aionn.media.records import SourceStatistics

__all__ = ["LiveStatistics"]


class LiveStatistics(SourceStatistics, frozen=True):
    """Counts of a live source so far. ``presented == delivered + dropped + queued`` at any time.

    Attributes:
        lost: Items that the device or the sender lost before they reached this process, by its own count.
        corrupt: Items left out because they were incomplete or damaged.
        reconnections: Number of times that the source was opened again after it had been lost.
        delay_ns: Delay of the last item over the fastest of the last seconds, for sources with a clock of their
            own; else 0.
        drift_ppm: Slowness of the source's clock against CLOCK_MONOTONIC; None if it is the same, or not known yet.
    """

    lost: int = 0
    corrupt: int = 0
    reconnections: int = 0
    delay_ns: int = 0
    drift_ppm: float | None = None

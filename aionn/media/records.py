"""The items of a source: frames, windows of sound, and counts of their outcomes.

Owns the three records. Refuses to own how they come about.

Invariants:
1. Records are frozen; the array inside belongs to the record alone and is never written again by the source.
2. ``captured_at_ns`` is the moment at which the source presented the item, so a latency counted from it holds no decoding, as with
   a camera, where decoding does not exist. Items that wait in a queue keep the moment at which they were presented.
3. ``index`` counts in the source. A dropped item leaves a gap.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["AudioWindow", "Frame", "SourceStatistics"]


class Frame(msgspec.Struct, frozen=True, eq=False):
    """One picture.

    Attributes:
        data: uint8 ``[height, width, 3]``, red, green, blue.
        captured_at_ns: When the source presented it, CLOCK_MONOTONIC.
        index: Number in the source, from 0.
        time_s: Position in the medium; the first frame is at 0.
        clock: Origin of ``captured_at_ns``: ``presented`` by a source with a pace; ``driver``, the stamp of the device;
            ``arrival`` of the data, smoothed where they have time stamps of their own; ``sender``, the clock of the sender.
        uncertainty_ns: The frame may have been captured so much earlier or later, as far as that clock shows.
        lost_before: Frames that the device or the sender lost since the last one, by its own count.
        follows_gap: Whether the source was lost, and opened again, since the last frame.
    """

    data: npt.NDArray[np.uint8]
    captured_at_ns: int
    index: int
    time_s: float
    clock: str = "presented"
    uncertainty_ns: int = 0
    lost_before: int = 0
    follows_gap: bool = False

    def __repr__(self) -> str:
        height, width = self.data.shape[:2]
        return f"Frame(index={self.index}, time_s={self.time_s:.3f}, {width}x{height})"


class AudioWindow(msgspec.Struct, frozen=True, eq=False):
    """One stretch of sound.

    Attributes:
        samples: float32 ``[samples]``, mono, in [-1, 1].
        captured_at_ns: When its last sample was captured, CLOCK_MONOTONIC.
        index: Number of the window in the source, from 0.
        start_s: Position of its first sample in the medium.
        clock: As in `Frame`.
        uncertainty_ns: As in `Frame`.
        lost_before: Windows that were lost since the last one.
        follows_gap: As in `Frame`.
    """

    samples: npt.NDArray[np.float32]
    captured_at_ns: int
    index: int
    start_s: float
    clock: str = "presented"
    uncertainty_ns: int = 0
    lost_before: int = 0
    follows_gap: bool = False

    def __repr__(self) -> str:
        return f"AudioWindow(index={self.index}, start_s={self.start_s:.3f}, samples={self.samples.size})"


class SourceStatistics(msgspec.Struct, frozen=True):
    """Counts of a source so far. ``presented == delivered + dropped + queued`` at any time.

    Attributes:
        presented: Items that came due and were offered to the consumer.
        delivered: Items that the consumer took.
        dropped: Items dropped because the consumer was slow.
        queued: Items that wait for the consumer now.
        held_back: Items presented late because the queue was full (``keep="all"``): the consumer slows the source down.
        late: Items presented late because they were not decoded when they came due: the machine is too slow for the medium.
    """

    presented: int
    delivered: int
    dropped: int
    queued: int
    held_back: int
    late: int

"""The cutting of samples into windows.

Owns the cutting of a stream of samples into windows that overlap (or leave gaps). Refuses to own where the samples come from and
when a window is presented.

Invariants:
1. Window k holds the samples ``[k * hop, k * hop + window)``, whatever the sizes of the blocks in which they arrived.
2. A window is handed out as soon as its last sample is there; a window that the stream does not fill is not handed out.
3. The cutter keeps at most one window and one block.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, shown
from aionn.media.arguments import checked_whole
from aionn.platform.numbers import number_of

__all__ = ["WindowCutter", "WindowPlan"]

Samples = npt.NDArray[np.float32]

# 60 s at 192 kHz is 46 MB a window; beyond that a window is not meant for a network.
WINDOW_S_MAX = 60.0
SAMPLE_RATE_HZ_MAX = 192_000


class WindowPlan(msgspec.Struct, frozen=True):
    """Windows in samples.

    Attributes:
        window_samples: Length of a window.
        hop_samples: Distance between the starts of neighbours.
        sample_rate_hz: Samples per second.
    """

    window_samples: int
    hop_samples: int
    sample_rate_hz: int

    @classmethod
    def of(cls, window_s: float, hop_s: float, sample_rate_hz: int, where: str) -> WindowPlan:
        """Rounds both lengths to whole samples.

        Raises:
            InvalidArgument: A length is below one sample or above a minute, or the rate is not a whole
                number between 1 and 192,000.
        """
        rate_hz = checked_whole(sample_rate_hz, 1, SAMPLE_RATE_HZ_MAX, f"{where}: sample_rate_hz")
        samples: list[int] = []
        for name, length_s in (("window_s", window_s), ("hop_s", hop_s)):
            seconds = number_of(length_s)
            # Written so that a NaN fails as well.
            if seconds is None or not 1.0 <= seconds * rate_hz <= WINDOW_S_MAX * rate_hz:
                raise InvalidArgument(
                    f"{where}: {name}: expected one sample (1/{rate_hz} s) to {WINDOW_S_MAX:g} s, got {shown(length_s)}"
                )
            samples.append(round(seconds * rate_hz))
        window_samples, hop_samples = samples
        return cls(window_samples, hop_samples, rate_hz)

    def start(self, index: int) -> int:
        """Number of the first sample of a window."""
        return index * self.hop_samples

    def stop(self, index: int) -> int:
        """Number of the first sample after a window."""
        return index * self.hop_samples + self.window_samples

    def start_s(self, index: int) -> float:
        """Position of a window in the medium."""
        return self.start(index) / self.sample_rate_hz

    def captured_after_ns(self, index: int) -> int:
        """Time from the start of the medium to the capture of a window's last sample."""
        return self.stop(index) * 1_000_000_000 // self.sample_rate_hz

    def count(self, samples: int) -> int:
        """Number of windows that a medium of so many samples fills."""
        return max(0, (samples - self.window_samples) // self.hop_samples + 1)


class WindowCutter:
    """Turns blocks of samples into windows."""

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._kept: Samples = np.empty(0, np.float32)
        self._kept_start = 0
        self._next_index = 0

    def push(self, block: Samples) -> list[tuple[int, Samples]]:
        """Takes the next samples, ``[n]``; returns ``(index, samples)`` of every window that they complete, in order.

        Every window is an array of its own.
        """
        plan = self._plan
        kept = np.concatenate((self._kept, block))
        end = self._kept_start + kept.size
        windows = []
        while plan.stop(self._next_index) <= end:
            first = plan.start(self._next_index) - self._kept_start
            windows.append((self._next_index, kept[first : first + plan.window_samples].copy()))
            self._next_index += 1
        # With gaps between windows the next one may start beyond what has arrived: then nothing is kept.
        spent = min(plan.start(self._next_index) - self._kept_start, kept.size)
        self._kept = kept[spent:].copy()
        self._kept_start += spent
        return windows

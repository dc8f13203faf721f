"""Raw samples that arrive in a descriptor, as windows with times of capture.

Owns the reading of a pipe or socket, the conversion to mono float32 and the stamps. Refuses to own what writes into the descriptor
(`recorders.py`).

The time of capture of a sample is that of its arrival, smoothed: sound has no time stamps, but its samples are counted, and a
recorder takes them at an even pace.

Invariants:
1. ``dequeue`` never waits: the descriptor does not block.
2. At most one read, `READ_BYTES`, and the windows that it completes are held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.media.arguments import checked_whole, one_of
from aionn.media.live.capture import Grab, SourceUnavailable
from aionn.media.live.clock import CaptureTime, MediaClock
from aionn.media.records import AudioWindow
from aionn.media.windows import WindowCutter, WindowPlan

__all__ = ["SampleFormat", "SampleLayout", "SamplesCapture", "mono"]

SampleFormat = Literal["s16le", "f32le"]

READ_BYTES = 65_536
"""A pipe holds so much by default: one read empties it."""

CHANNELS_MAX = 64
"""Channels of a recorder; microphone arrays have up to some thirty."""

GAP_NS = 200_000_000
"""Samples that come so much later than their number announces show that some are missing: a recorder's own buffers hold less."""

_TYPES: dict[str, str] = {"s16le": "<i2", "f32le": "<f4"}


class SampleLayout(msgspec.Struct, frozen=True):
    """Samples as bytes, the channels interleaved.

    Attributes:
        format: Type of a sample.
        channels: Number of channels, which are mixed into one.
        sample_rate_hz: Samples of each channel per second.
    """

    format: SampleFormat
    channels: int
    sample_rate_hz: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of every channel."""
        return np.dtype(_TYPES[self.format]).itemsize * self.channels

    @classmethod
    def of(cls, sample_format: str, channels: int, sample_rate_hz: int, where: str) -> SampleLayout:
        """Checks a caller's numbers.

        Raises:
            InvalidArgument: The format is not one of `SampleFormat`, or there are no channels, or too many.
        """
        channels = checked_whole(channels, 1, CHANNELS_MAX, f"{where}: channels")
        known: SampleFormat = one_of(sample_format, get_args(SampleFormat), f"{where}: sample_format")
        return cls(known, channels, sample_rate_hz)


def mono(data: bytes, layout: SampleLayout) -> npt.NDArray[np.float32]:
    """Whole samples as float32 ``[n]`` in [-1, 1]; NaN becomes 0."""
    raw = np.frombuffer(data, _TYPES[layout.format]).reshape(-1, layout.channels)
    if layout.format == "s16le":
        scaled: npt.NDArray[np.float32] = raw.mean(axis=1, dtype=np.float32) / np.float32(32768)
        return scaled
    mixed = np.nan_to_num(raw.mean(axis=1, dtype=np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    samples: npt.NDArray[np.float32] = mixed.clip(-1.0, 1.0)
    return samples


class SamplesCapture:
    """Windows of the samples that arrive in a descriptor.

    Args:
        name: Of the source, for messages.
        fd: The descriptor, which does not block. It belongs to ``release``.
        layout: Of the samples.
        plan: The windows; the layout has the same rate.
        reason: Describes why the descriptor has reached its end; called once then.
        release: Frees everything.
        overruns: Counts the blocks that the recorder has lost so far.
    """

    is_immediate = True
    depth = 4

    def __init__(
        self,
        name: str,
        fd: int,
        layout: SampleLayout,
        plan: WindowPlan,
        *,
        reason: Callable[[], str],
        release: Callable[[], None],
        overruns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._name = name
        self._fd = fd
        self._layout = layout
        self._plan = plan
        self._reason = reason
        self._release = release
        self._overruns = overruns
        self._overruns_seen = 0
        self._rest = b""
        self._clock = MediaClock()
        self._restart()
        self._windows: deque[Grab] = deque()
        self._has_gap = False

    @property
    def name(self) -> str:
        """The source, for messages."""
        return self._name

    @property
    def period_ns(self) -> int | None:
        """Windows come in the pace of their distance."""
        return max(1, self._plan.hop_samples * 1_000_000_000 // self._plan.sample_rate_hz)

    @property
    def clock(self) -> MediaClock | None:
        """The recorder's clock, by the number of its samples."""
        return self._clock

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def dequeue(self, now_ns: int) -> Grab | None:
        """See `aionn.media.live.capture.Capture`. One read may complete several windows, which are returned one by one."""
        if not self._windows:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return None
            except OSError as e:
                raise SourceUnavailable(
                    f"{self._name}: expected samples, got: {os.strerror(e.errno or 0)}"
                ) from e
            if not data:
                raise SourceUnavailable(f"{self._name}: expected samples, got their end: {self._reason()}")
            self._take(data, now_ns)
        return self._windows.popleft() if self._windows else None

    def requeue(self, grab: Grab) -> None:
        """Windows have no buffers to give back."""

    def convert(self, grab: Grab) -> AudioWindow:
        """See `aionn.media.live.capture.Capture`."""
        captured = grab.captured
        return AudioWindow(
            grab.content,
            captured.at_ns,
            grab.index,
            max(0.0, grab.time_s),
            clock=captured.clock,
            uncertainty_ns=captured.uncertainty_ns,
            lost_before=grab.lost_before,
            follows_gap=grab.follows_gap,
        )

    def close(self) -> None:
        """See `aionn.media.live.capture.Capture`."""
        self._release()

    def _restart(self) -> None:
        self._cutter = WindowCutter(self._plan)
        self._received = 0

    def _take(self, data: bytes, now_ns: int) -> None:
        whole_bytes = self._rest + data
        whole = len(whole_bytes) // self._layout.frame_bytes * self._layout.frame_bytes
        self._rest = whole_bytes[whole:]
        overruns = self._overruns()
        if overruns != self._overruns_seen:
            self._overruns_seen = overruns
            self._leave_gap()
        samples = mono(whole_bytes[:whole], self._layout)
        media_ns = (self._received + samples.size) * 1_000_000_000 // self._plan.sample_rate_hz
        captured = self._clock.observe(media_ns, now_ns)
        if self._clock.delay_ns > GAP_NS + self._block_ns(samples.size):
            # The samples are as late as if some were missing: they begin anew, here.
            self._leave_gap()
            captured = self._clock.observe(samples.size * 1_000_000_000 // self._plan.sample_rate_hz, now_ns)
        self._received += samples.size
        for index, window in self._cutter.push(samples):
            behind_ns = (self._received - self._plan.stop(index)) * 1_000_000_000 // self._plan.sample_rate_hz
            stamp = CaptureTime(captured.at_ns - behind_ns, captured.clock, captured.uncertainty_ns)
            self._windows.append(Grab(0, stamp, content=window, follows_gap=self._has_gap))
            self._has_gap = False

    def _leave_gap(self) -> None:
        """Windows across a gap would hold sounds that never followed each other."""
        self._restart()
        self._clock = MediaClock()
        self._has_gap = True

    def _block_ns(self, samples: int) -> int:
        return samples * 1_000_000_000 // self._plan.sample_rate_hz

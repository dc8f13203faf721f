"""Log-mel energies, the front end of the digits model.

Owns the arithmetic from samples to features. Refuses to own windows of sound and their times.

Invariants:
1. Tables (window, filter bank) are computed once per `LogMel`; a call allocates its intermediate arrays and nothing else.
2. No value is below ``log(1e-6)``, and silence gives exactly that.

Source: the mel scale of O'Shaughnessy, 2595 log10(1 + f / 700); the other numbers are those that the model was trained with.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, class_text
from aionn.media.arguments import checked_number, checked_whole

__all__ = ["LogMel", "log_mel"]

FLOOR = 1e-6

# Four seconds at 16 kHz, and finer than an ear: the table of both at their limits takes some 100 MB.
FRAME_SAMPLES_MAX = 65_536
BANDS_MAX = 512
# Above every converter.
SAMPLE_RATE_HZ_MAX = 10**9


class LogMel:
    """Turns samples ``[n]`` into log-mel energies ``[frames, bands]``.

    The samples are cut into frames of ``frame_samples``, one every ``hop_samples``; each goes through a symmetric Hann window and
    a real Fourier transform; its power is summed under triangles of height 1 with corners evenly spaced in mel; the natural
    logarithm is taken of the sum, or of 1e-6 if that is more.
    """

    def __init__(
        self,
        *,
        sample_rate_hz: int = 16_000,
        frame_samples: int = 512,
        hop_samples: int = 320,
        bands: int = 40,
        low_hz: float = 60.0,
        high_hz: float = 7_600.0,
    ) -> None:
        """Computes the tables. The defaults are those of the digits model.

        Raises:
            InvalidArgument: The numbers make no filter bank, or are above `FRAME_SAMPLES_MAX`, `BANDS_MAX` or
                `SAMPLE_RATE_HZ_MAX`.
        """
        where = "aionn.media.LogMel"
        sample_rate_hz = checked_whole(sample_rate_hz, 1, SAMPLE_RATE_HZ_MAX, f"{where}: sample_rate_hz")
        frame_samples = checked_whole(frame_samples, 2, FRAME_SAMPLES_MAX, f"{where}: frame_samples")
        bands = checked_whole(bands, 1, BANDS_MAX, f"{where}: bands")
        low_hz = checked_number(low_hz, 0, sample_rate_hz / 2, f"{where}: low_hz")
        high_hz = checked_number(high_hz, 0, sample_rate_hz / 2, f"{where}: high_hz")
        if not low_hz < high_hz:
            raise InvalidArgument(f"{where}: expected low_hz < high_hz, got {low_hz} and {high_hz}")
        self.frame_samples = frame_samples
        self.hop_samples = checked_whole(hop_samples, 1, None, f"{where}: hop_samples")
        self._hann = np.hanning(frame_samples).astype(np.float32)
        bins_hz = np.arange(frame_samples // 2 + 1, dtype=np.float64) * (sample_rate_hz / frame_samples)
        self._filters = np.ascontiguousarray(filter_bank(bins_hz, bands, low_hz, high_hz).T, np.float32)

    def __call__(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Returns float32 ``[frames, bands]`` with ``frames = (n - frame_samples) // hop_samples + 1``.

        Args:
            samples: Mono, ``[n]``, in [-1, 1], at least one frame long.

        Raises:
            InvalidArgument: Another rank or type, or too few samples.
        """
        _check_samples(samples, "aionn.media.LogMel")
        if samples.ndim != 1 or samples.size < self.frame_samples:
            raise InvalidArgument(
                f"aionn.media.LogMel: expected samples of shape [n], n >= {self.frame_samples}, got {list(samples.shape)}"
            )
        frames = np.lib.stride_tricks.sliding_window_view(samples, self.frame_samples)[:: self.hop_samples]
        spectrum = np.fft.rfft(frames * self._hann)
        # Not abs() ** 2: that takes a square root only to undo it. numpy before 2.0 transforms in float64.
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
        energies = power @ self._filters
        logarithms: npt.NDArray[np.float32] = np.log(np.maximum(energies, np.float32(FLOOR)))
        return logarithms


def filter_bank(
    bins_hz: npt.NDArray[np.float64], bands: int, low_hz: float, high_hz: float
) -> npt.NDArray[np.float64]:
    """Triangles of height 1 over the bins, ``[bands, bins]``; each begins and ends at the peaks of its neighbours."""
    low_mel, high_mel = (2595 * np.log10(1 + hz / 700) for hz in (low_hz, high_hz))
    corners_hz = 700 * (10 ** (np.linspace(low_mel, high_mel, bands + 2) / 2595) - 1)
    left, peak, right = (corners_hz[k : k + bands, None] for k in range(3))
    rising = (bins_hz - left) / (peak - left)
    falling = (right - bins_hz) / (right - peak)
    triangles: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles


@functools.cache
def _digits_front_end() -> LogMel:
    return LogMel()


def log_mel(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The input of the digits model: float32 ``[49, 40]`` from one second of sound.

    Args:
        samples: Mono, float32 ``[16000]`` in [-1, 1] at 16 kHz.

    Raises:
        InvalidArgument: Another shape or type.
    """
    _check_samples(samples, "aionn.media.log_mel")
    if samples.shape != (16_000,):
        raise InvalidArgument(
            f"aionn.media.log_mel: expected samples of shape [16000], got {list(samples.shape)}"
        )
    return _digits_front_end()(samples)


def _check_samples(samples: object, where: str) -> None:
    if not isinstance(samples, np.ndarray) or samples.dtype.kind != "f":
        kind = samples.dtype if isinstance(samples, np.ndarray) else class_text(samples)
        raise InvalidArgument(f"{where}: expected samples as an array of floats, got {kind}")

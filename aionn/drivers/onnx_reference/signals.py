"""Fourier transforms, windows, and counts of n-grams.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference.arrays import Array, axis_of, check_room, single
from aionn.errors import InvalidArgument

__all__ = ["KERNELS"]


def _number(array: Array) -> int:
    return int(single(array, "a length, step, axis or rate"))


def _complex(x: Array) -> Array:
    """Complex numbers of an array whose last axis has the real and, if there are two, the imaginary parts."""
    if x.shape[-1] not in (1, 2):
        raise InvalidArgument(f"last axis: expected 1 or 2 elements, got {x.shape[-1]}")
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _parts(x: Array) -> Array:
    return np.stack([x.real, x.imag], -1)


def dft(
    x: Array,
    length: Array | None = None,
    axis_input: Array | None = None,
    *,
    version: int,
    axis: int | None = None,
    inverse: int = 0,
    onesided: int = 0,
) -> Array:
    if axis_input is not None:
        axis = _number(axis_input)
    elif axis is None:
        axis = 1 if version < 20 else -2
    along = axis_of(axis, x.ndim)
    size = None if length is None else check_room([_number(length)])[0]
    signal = _complex(x)
    if inverse and onesided:
        return np.fft.irfft(signal, size, along)[..., None]
    if inverse:
        return _parts(np.fft.ifft(signal, size, along))
    result = np.fft.fft(signal, size, along)
    if onesided:
        result = np.take(result, range(result.shape[along] // 2 + 1), along)
    return _parts(result)


def stft(
    x: Array, step: Array, window: Array | None = None, length: Array | None = None, *, onesided: int = 1
) -> Array:
    if length is not None:
        size = _number(length)
    else:
        size = x.shape[1] if window is None else window.shape[0]
    distance = _number(step)
    if distance < 1 or not 0 < size <= x.shape[1]:
        raise InvalidArgument(
            f"STFT: expected frames within {x.shape[1]} elements, got {size} every {distance}"
        )
    signal = _complex(x) if x.ndim == 3 else x
    frames = np.stack(
        [signal[:, begin : begin + size] for begin in range(0, x.shape[1] - size + 1, distance)], 1
    )
    result = np.fft.fft(frames if window is None else frames * window, axis=-1)
    return _parts(result[..., : size // 2 + 1] if onesided else result)


def _window(*shares: float) -> Callable[..., Array]:
    """A kernel of a sum of cosines."""

    def kernel(size: Array, *, output_datatype: int = 1, periodic: int = 1) -> Array:
        count = check_room([_number(size)])[0]
        angle = 2 * np.pi * np.arange(count) / max(1, count if periodic else count - 1)
        return np.asarray(sum(share * np.cos(order * angle) for order, share in enumerate(shares)))

    return kernel


def mel_weight_matrix(
    bins: Array, length: Array, rate: Array, lower: Array, upper: Array, *, output_datatype: int = 1
) -> Array:
    count, size = _number(bins), _number(length)
    result = np.zeros(check_room((size // 2 + 1, count)))
    low, high = (2595 * np.log10(1 + float(edge.reshape(-1)[0]) / 700) for edge in (lower, upper))
    mels = np.arange(count + 2) * ((high - low) / (count + 2)) + low
    places = ((size + 1) * (700 * (10 ** (mels / 2595) - 1)) // _number(rate)).astype(int)
    rows = np.arange(result.shape[0])
    for column, (left, centre, right) in enumerate(zip(places, places[1:], places[2:], strict=False)):
        if centre == left:
            result[centre, column] = 1
        else:
            rising = (rows >= left) & (rows <= centre)
            result[rising, column] = (rows[rising] - left) / (centre - left)
        falling = (rows >= centre) & (rows < right)
        result[falling, column] = (right - rows[falling]) / (right - centre) if right > centre else 0
    return result


def tfidf_vectorizer(
    x: Array,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Any,
    ngram_indexes: Any,
    pool_int64s: Any,
    weights: Any = None,
) -> Array:
    """Counts the n-grams of a pool in each row. n-grams of one number do not skip."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise InvalidArgument(f"attribute 'mode': expected TF, IDF or TFIDF, got {mode!r:.40}")
    grams: dict[tuple[int, ...], int] = {}
    ends = [*ngram_counts[1:], len(pool_int64s)]
    for order, (begin, end) in enumerate(zip(ngram_counts, ends, strict=True), 1):
        for start in range(begin, end, order):
            grams[tuple(pool_int64s[start : start + order])] = len(grams)
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    result = np.zeros((rows.shape[0], max(ngram_indexes) + 1), np.float32)
    for place, row in enumerate(rows.tolist()):
        for order in range(min_gram_length, max_gram_length + 1):
            for skip in range(1, 2 if order == 1 else max_skip_count + 2):
                for start in range(len(row) - (order - 1) * skip):
                    found = grams.get(tuple(row[start : start + (order - 1) * skip + 1 : skip]))
                    if found is not None:
                        result[place, ngram_indexes[found]] += 1
    factors = np.ones(result.shape[1], np.float32)
    if weights:
        factors[np.array(ngram_indexes)] = np.array(weights, np.float32)
    if mode == "IDF":
        result = (result > 0) * factors
    elif mode == "TFIDF":
        result = result * factors
    return result.reshape(-1) if x.ndim < 2 else result


KERNELS: dict[str, Callable[..., Any]] = {
    "BlackmanWindow": _window(0.42, -0.5, 0.08),
    "DFT": dft,
    "HammingWindow": _window(25 / 46, -21 / 46),
    "HannWindow": _window(0.5, -0.5),
    "MelWeightMatrix": mel_weight_matrix,
    "STFT": stft,
    "TfIdfVectorizer": tfidf_vectorizer,
}
"""The kernels by operator."""

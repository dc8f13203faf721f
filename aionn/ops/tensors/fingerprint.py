"""FarmHash Fingerprint64 of many byte strings of one length together.

Owns the hash that LSH_PROJECTION is defined by. Works on rows of a byte matrix; all arithmetic is modulo 2**64, so that the result
is the same on every machine.

Invariant: equal to ``farmhash::Fingerprint64`` for every length, including 0.

Source: the published FarmHash algorithm (its "na" variant), which the NN HAL's CPU operations use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["fingerprint64"]

_Words = npt.NDArray[np.uint64]
_Bytes = npt.NDArray[np.uint8]

_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_BLOCK_BYTES = 64


def _constant(value: int) -> np.uint64:
    return np.uint64(value & 0xFFFF_FFFF_FFFF_FFFF)


def _fetch64(rows: _Bytes, at: int) -> _Words:
    return np.ascontiguousarray(rows[:, at : at + 8]).view("<u8")[:, 0].astype(np.uint64)


def _fetch32(rows: _Bytes, at: int) -> _Words:
    return np.ascontiguousarray(rows[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)


def _rotate(words: _Words, count: int) -> _Words:
    """Rotates right."""
    return (words >> np.uint64(count)) | (words << np.uint64(64 - count))


def _shift_mix(words: _Words) -> _Words:
    return words ^ (words >> np.uint64(47))


def _combine(u: _Words, v: _Words, multiplier: _Words | np.uint64) -> _Words:
    """Two words into one."""
    a = _shift_mix((u ^ v) * multiplier)
    return _shift_mix((v ^ a) * multiplier) * multiplier


def _up_to_16(rows: _Bytes, length: int) -> _Words:
    multiplier = _K2 + _constant(length * 2)
    if length >= 8:
        a = _fetch64(rows, 0) + _K2
        b = _fetch64(rows, length - 8)
        return _combine(_rotate(b, 37) * multiplier + a, (_rotate(a, 25) + b) * multiplier, multiplier)
    if length >= 4:
        a = (_fetch32(rows, 0) << np.uint64(3)) + _constant(length)
        return _combine(a, _fetch32(rows, length - 4), multiplier)
    if length > 0:
        first, middle, last = (rows[:, at].astype(np.uint64) for at in (0, length >> 1, length - 1))
        y = first + (middle << np.uint64(8))
        z = (last << np.uint64(2)) + _constant(length)
        return _shift_mix((y * _K2) ^ (z * _K0)) * _K2
    return np.full(len(rows), _K2)


def _up_to_32(rows: _Bytes, length: int) -> _Words:
    multiplier = _K2 + _constant(length * 2)
    a = _fetch64(rows, 0) * _K1
    b = _fetch64(rows, 8)
    c = _fetch64(rows, length - 8) * multiplier
    d = _fetch64(rows, length - 16) * _K2
    return _combine(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, multiplier)


def _up_to_64(rows: _Bytes, length: int) -> _Words:
    multiplier = _K2 + _constant(length * 2)
    a = _fetch64(rows, 0) * _K2
    b = _fetch64(rows, 8)
    c = _fetch64(rows, length - 8) * multiplier
    d = _fetch64(rows, length - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _combine(y, a + _rotate(b + _K2, 18) + c, multiplier)
    e = _fetch64(rows, 16) * multiplier
    f = _fetch64(rows, 24)
    g = (y + _fetch64(rows, length - 32)) * multiplier
    h = (z + _fetch64(rows, length - 24)) * multiplier
    return _combine(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, multiplier)


def _weak_pair(rows: _Bytes, at: int, a: _Words, b: _Words) -> tuple[_Words, _Words]:
    """Mixes 32 bytes into two seeds."""
    w, x, y, z = (_fetch64(rows, at + offset) for offset in (0, 8, 16, 24))
    a = a + w
    b = _rotate(b + a + z, 21)
    c = a
    a = a + x + y
    return a + z, b + _rotate(a, 44) + c


def _above_64(rows: _Bytes, length: int) -> _Words:
    seed = np.full(len(rows), 81, dtype=np.uint64)
    zero = np.zeros(len(rows), dtype=np.uint64)
    x = seed * _K2 + _fetch64(rows, 0)
    y = seed * _K1 + _constant(113)
    z = _shift_mix(y * _K2 + _constant(113)) * _K2
    v, w = (zero, zero), (zero, zero)
    rest = (length - 1) % _BLOCK_BYTES
    for at in range(0, length - 1 - rest, _BLOCK_BYTES):
        x = _rotate(x + y + v[0] + _fetch64(rows, at + 8), 37) * _K1
        y = _rotate(y + v[1] + _fetch64(rows, at + 48), 42) * _K1
        x = x ^ w[1]
        y = y + v[0] + _fetch64(rows, at + 40)
        z = _rotate(z + w[0], 33) * _K1
        v = _weak_pair(rows, at, v[1] * _K1, x + w[0])
        w = _weak_pair(rows, at + 32, z + w[1], y + _fetch64(rows, at + 16))
        z, x = x, z
    # The last block is the string's last 64 bytes; it overlaps the one before unless the length is a multiple of 64.
    at = length - _BLOCK_BYTES
    nine = _constant(9)
    multiplier = _K1 + ((z & _constant(0xFF)) << np.uint64(1))
    w = (w[0] + _constant(rest), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x = _rotate(x + y + v[0] + _fetch64(rows, at + 8), 37) * multiplier
    y = _rotate(y + v[1] + _fetch64(rows, at + 48), 42) * multiplier
    x = x ^ (w[1] * nine)
    y = y + v[0] * nine + _fetch64(rows, at + 40)
    z = _rotate(z + w[0], 33) * multiplier
    v = _weak_pair(rows, at, v[1] * multiplier, x + w[0])
    w = _weak_pair(rows, at + 32, z + w[1], y + _fetch64(rows, at + 16))
    z, x = x, z
    return _combine(
        _combine(v[0], w[0], multiplier) + _shift_mix(y) * _K0 + z,
        _combine(v[1], w[1], multiplier) + x,
        multiplier,
    )


def fingerprint64(rows: _Bytes) -> _Words:
    """The 64-bit fingerprint of every row.

    Args:
        rows: Bytes, shape [count, length].

    Returns:
        Unsigned 64-bit integers, shape [count].
    """
    length = rows.shape[1]
    # Wrapping is wanted; numpy warns of it only where both operands are scalars.
    with np.errstate(over="ignore"):
        if length <= 16:
            return _up_to_16(rows, length)
        if length <= 32:
            return _up_to_32(rows, length)
        if length <= 64:
            return _up_to_64(rows, length)
        return _above_64(rows, length)

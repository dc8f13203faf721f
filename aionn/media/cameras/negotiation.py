"""The choice of the format, size and rate of a camera.

Owns the choice. Refuses to own the questions to the camera (`capture.py`): everything here is a function of what it offers.

Invariants:
1. Only formats that `aionn` can convert are chosen.
2. The same offers and the same wish give the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from aionn.errors import InvalidArgument, shown
from aionn.media.arguments import checked_size, one_of
from aionn.platform.numbers import number_of

__all__ = ["Choice", "Offer", "PixelFormat", "Wish", "checked_wish", "choose"]

PixelFormat = Literal["YUYV", "UYVY", "NV12", "GREY", "RGB3", "BGR3", "MJPG"]
"""The formats that can be converted, by the four characters of the kernel's headers."""

PREFERENCE: tuple[PixelFormat, ...] = get_args(PixelFormat)
"""The cheapest conversion first; a compressed picture costs the most, and grey has no colour to show."""

COLOURLESS = ("GREY",)

SIZE_DEFAULT = (640, 480)
"""The size that is asked for where the caller names none: every webcam has it."""

RATE_DEFAULT = 30.0
"""Frames per second that are asked for where the caller names none."""

RATE_MAX = 1000.0
"""Frames per second; a greater number is a mistake in the unit."""

EDGE_MAX = 16_384
"""The longest edge of a picture, as for files."""


class Offer(msgspec.Struct, frozen=True):
    """One format at one size, or at a range of sizes.

    Attributes:
        format: Its four characters.
        smallest: ``(width, height)``.
        largest: The same as ``smallest`` for a discrete size.
        step: Distance between the sizes of a range.
        rates: Frames per second, of a discrete list or the ends of a range; empty if the camera names none.
        is_emulated: Whether a library converts it, rather than the camera.
    """

    format: str
    smallest: tuple[int, int]
    largest: tuple[int, int]
    step: tuple[int, int] = (1, 1)
    rates: tuple[float, ...] = ()
    is_emulated: bool = False


class Wish(msgspec.Struct, frozen=True):
    """The caller's wish.

    Attributes:
        size: ``(width, height)`` that the picture should have at least.
        rate: Frames per second that it should have at least.
        format: None means any.
    """

    size: tuple[int, int] = SIZE_DEFAULT
    rate: float = RATE_DEFAULT
    format: PixelFormat | None = None


class Choice(msgspec.Struct, frozen=True):
    """The format, size and rate that the camera is asked for. ``rate`` is None if it offers none."""

    format: PixelFormat
    size: tuple[int, int]
    rate: float | None


def checked_wish(
    size: tuple[int, int] | None, rate: float | None, pixel_format: str | None, where: str
) -> Wish:
    """Returns the wish with its defaults.

    Raises:
        InvalidArgument: A number is out of range, or the format is not one of `PixelFormat`.
    """
    wanted = SIZE_DEFAULT if size is None else checked_size(size, f"{where}: capture_size")
    wished = RATE_DEFAULT if rate is None else number_of(rate)
    # Written so that a NaN fails as well.
    if wished is None or not 0 < wished <= RATE_MAX:
        raise InvalidArgument(
            f"{where}: rate: expected a number above 0 and up to {RATE_MAX:g}, got {shown(rate)}"
        )
    known: PixelFormat | None = None
    if pixel_format is not None:
        known = one_of(pixel_format, PREFERENCE, f"{where}: pixel_format")
    return Wish(wanted, wished, known)


def choose(offers: Sequence[Offer], wish: Wish, *, can_decode_jpeg: bool) -> Choice | None:
    """The best offer for a wish, None if none can be used.

    In this order: a size that is at least as large as the wish, or else the largest; a rate that is at least the wish, or else the
    highest; colour; the smallest size; the cheapest conversion. So an uncompressed format is taken unless it is too slow at
    the size, as it is over USB for large pictures.

    Args:
        offers: Everything that the camera offers.
        wish: The caller's wish.
        can_decode_jpeg: Whether MJPEG can be decoded here.
    """
    best: tuple[tuple[float, ...], Choice] | None = None
    for offer in offers:
        pixel_format = _usable(offer, wish, can_decode_jpeg)
        if pixel_format is None:
            continue
        size = _fitting(offer, wish.size)
        rate = _fastest_needed(offer.rates, wish.rate)
        rank = _rank(offer, pixel_format, size, rate, wish)
        if best is None or rank < best[0]:
            best = rank, Choice(pixel_format, size, rate)
    return None if best is None else best[1]


def _usable(offer: Offer, wish: Wish, can_decode_jpeg: bool) -> PixelFormat | None:
    if any(edge < 1 for edge in offer.smallest) or any(edge > EDGE_MAX for edge in offer.smallest):
        return None
    for known in PREFERENCE:
        if offer.format == known and wish.format in (None, known) and (known != "MJPG" or can_decode_jpeg):
            return known
    return None


def _fitting(offer: Offer, wished: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of an offer that covers the wish in both directions, or its largest."""
    edges = []
    for low, high, step, want in zip(offer.smallest, offer.largest, offer.step, wished):
        high = min(max(low, high), EDGE_MAX)
        steps = -(-max(0, want - low) // max(1, step))
        edge = low + steps * max(1, step)
        edges.append(edge if edge <= high else low + (high - low) // max(1, step) * max(1, step))
    return edges[0], edges[1]


def _fastest_needed(rates: tuple[float, ...], wished: float) -> float | None:
    """The lowest rate that is at least the wish, or the highest; None for an empty list."""
    enough = [rate for rate in rates if rate >= wished * 0.99]  # 29.97 serves a wish of 30.
    return min(enough) if enough else max(rates, default=None)


def _rank(
    offer: Offer, pixel_format: PixelFormat, size: tuple[int, int], rate: float | None, wish: Wish
) -> tuple[float, ...]:
    """The lower, the better."""
    covers = size[0] >= wish.size[0] and size[1] >= wish.size[1]
    area = size[0] * size[1]
    # A rate that the camera does not name is taken for sufficient.
    missing = 0.0 if rate is None else max(0.0, wish.rate * 0.99 - rate)
    return (
        0 if covers else 1,
        0 if covers else -area,
        missing,
        pixel_format in COLOURLESS,
        offer.is_emulated,
        area,
        PREFERENCE.index(pixel_format),
    )

"""Pictures as inputs of a model: fitted to its size, normalised and quantised, written straight into shared memory.

Owns the arithmetic between a picture and an input's values. Refuses to own decoding: a picture is an array.

Invariant: a picture is read once; of a larger one only the pixels that the model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, class_text
from aionn.hal import OperandType, operand_type_name
from aionn.runtime.memory.arguments import Array, TensorSpec, check_unmasked
from aionn.runtime.memory.real_values import Writer, check_input
from aionn.runtime.memory.remedies import remedy_for_picture

__all__ = ["Fit", "boxes_in_picture", "image_size", "image_writer"]

Fit = Literal["exact", "stretch", "letterbox", "crop"]
"""The way of a picture of another size into an input: ``exact`` rejects it; ``stretch`` changes its proportions; ``letterbox``
keeps them and fills the rest; ``crop`` keeps them and leaves out what is beyond, the same on both sides."""

IMAGE_CHANNELS = (1, 3, 4)
"""Numbers of channels of a picture."""

_LAST, _FIRST = (0, 1, 2), (1, 2, 0)

Convert = Callable[[Array, Array], object]


def image_writer(
    spec: TensorSpec,
    *,
    low: float = 0.0,
    high: float = 1.0,
    mean: Sequence[float] | None = None,
    deviation: Sequence[float] | None = None,
    fit: Fit = "exact",
    fill: int = 114,
) -> Writer:
    """Writes pictures (uint8 [height, width, channels]) into the input, quantised if it is.

    0 becomes ``low`` and 255 becomes ``high``; then ``mean`` is subtracted and the difference divided by ``deviation``. A picture
    of another size is scaled by taking the nearest pixel, before anything is computed: the cost depends on the input's size. The
    input may have its channels last or first.

    Args:
        spec: The input.
        low: See above.
        high: See above.
        mean: One number for each channel; None subtracts nothing.
        deviation: One number for each channel; None divides by nothing.
        fit: See ``Fit``.
        fill: Level of the bars of ``letterbox``, from 0 to 255; detectors of the YOLO family are trained with 114.

    Raises:
        InvalidArgument: The input is not one of a compilation, or not a picture of one batch; or an argument is out of range.
    """
    check_input(spec, "image_writer")
    order = _image_order(spec)
    shape = height, width, channels = tuple(spec.dimensions[1:][axis] for axis in order)
    if fit not in get_args(Fit):
        raise InvalidArgument(f"image_writer: fit: expected one of {', '.join(get_args(Fit))}, got {fit!r}")
    if not 0 <= fill <= 255:
        raise InvalidArgument(f"image_writer: fill: expected 0 to 255, got {fill}")
    convert = _conversion(spec, low, high, channels, mean, deviation)
    fitting = _Fitting((width, height), channels, fit)
    bar = np.full((1, 1, channels), fill, np.uint8)

    def write(value: Any, view: Array) -> None:
        if not isinstance(value, np.ndarray):
            raise InvalidArgument(
                f"{spec.name}: expected a picture as a uint8 array, got {class_text(value)}"
                f"{remedy_for_picture(value, width, height)}"
            )
        check_unmasked(value, spec.name)
        if value.dtype != np.uint8 or (value.shape != shape and not fitting.takes(value)):
            raise InvalidArgument(
                f"{spec.name}: expected a uint8 picture of shape {list(shape)}, got {value.dtype} {list(value.shape)}"
                f"{remedy_for_picture(value, width, height)}"
            )
        picture = view[0].transpose(order)
        if value.shape == picture.shape:
            convert(value, picture)
            return
        scaled, region = fitting.scaled(value)
        into = picture[region.top : region.bottom, region.left : region.right]
        if into.shape != picture.shape:
            # Every time: the buffer may have had a picture of another size before.
            edges = (
                picture[: region.top],
                picture[region.bottom :],
                picture[:, : region.left],
                picture[:, region.right :],
            )
            for edge in edges:
                if edge.size:
                    convert(np.broadcast_to(bar, edge.shape), edge)
        convert(scaled, into)

    return write


def image_size(spec: TensorSpec) -> tuple[int, int]:
    """The width and height of the pictures that an input takes.

    Raises:
        InvalidArgument: The input is not a picture of one batch.
    """
    shape = spec.dimensions[1:]
    height, width, _ = (shape[axis] for axis in _image_order(spec))
    return width, height


def boxes_in_picture(
    boxes: Array, picture: tuple[int, int], into: tuple[int, int], fit: Fit
) -> npt.NDArray[np.float32]:
    """Boxes that a model found in its input, as shares of the picture that was fitted into it.

    Args:
        boxes: ``[boxes, 4]``: left, top, right, bottom, as shares of the input.
        picture: ``(width, height)`` of the picture.
        into: ``(width, height)`` of the input.
        fit: As for ``image_writer``.
    """
    kept, region = _regions(picture, into, fit)
    offset = np.array([region.left / into[0], region.top / into[1]] * 2)
    shown = np.array([(region.right - region.left) / into[0], (region.bottom - region.top) / into[1]] * 2)
    start = np.array([kept.left / picture[0], kept.top / picture[1]] * 2)
    part = np.array([(kept.right - kept.left) / picture[0], (kept.bottom - kept.top) / picture[1]] * 2)
    shares: npt.NDArray[np.float32] = ((boxes - offset) / shown * part + start).astype(np.float32)
    return shares


class _Region(NamedTuple):
    """A rectangle in pixels."""

    left: int
    top: int
    right: int
    bottom: int


def _regions(picture: tuple[int, int], into: tuple[int, int], fit: Fit) -> tuple[_Region, _Region]:
    """The part of a picture that is kept, and the part of the input that it fills."""
    whole, filled = _Region(0, 0, *picture), _Region(0, 0, *into)
    if fit == "letterbox":
        filled = _centred(into, picture)
    elif fit == "crop":
        whole = _centred(picture, into)
    return whole, filled


def _centred(outer: tuple[int, int], shape: tuple[int, int]) -> _Region:
    """The largest rectangle of a shape's proportions in the middle of another one, at least one pixel wide and high."""
    share = min(outer[0] / shape[0], outer[1] / shape[1])
    width, height = (max(1, min(o, round(s * share))) for o, s in zip(outer, shape, strict=True))
    left, top = (outer[0] - width) // 2, (outer[1] - height) // 2
    return _Region(left, top, left + width, top + height)


class _Fitting:
    """Scales pictures into one size, and remembers the way of the last size that came."""

    def __init__(self, size: tuple[int, int], channels: int, fit: Fit) -> None:
        self._size = size
        self._channels = channels
        self._fit: Fit = fit
        self._shape: tuple[int, ...] = ()
        self._indexes: npt.NDArray[np.intp]
        self._scratch: Array
        self._region: _Region

    def takes(self, value: Array) -> bool:
        """Whether a picture of another size can be written."""
        return (
            self._fit != "exact" and value.ndim == 3 and value.shape[2] == self._channels and value.size > 0
        )

    def scaled(self, value: Array) -> tuple[Array, _Region]:
        """The picture in the size of its region of the input, and that region. Valid until the next call."""
        if value.shape != self._shape:
            self._learn(value.shape)
        # mode="clip" spares numpy a buffer for the output; the indexes are in range.
        pixels = np.ascontiguousarray(value).reshape(-1, self._channels)
        np.take(pixels, self._indexes, axis=0, out=self._scratch, mode="clip")
        return self._scratch, self._region

    def _learn(self, shape: tuple[int, ...]) -> None:
        kept, region = _regions((shape[1], shape[0]), self._size, self._fit)
        rows = _nearest(kept.top, kept.bottom, region.bottom - region.top)
        columns = _nearest(kept.left, kept.right, region.right - region.left)
        self._indexes = rows[:, None] * shape[1] + columns
        self._scratch = np.empty((len(rows), len(columns), self._channels), np.uint8)
        self._region = region
        self._shape = shape


def _nearest(start: int, stop: int, count: int) -> npt.NDArray[np.intp]:
    """For each of ``count`` pixels the one at its centre, of those from ``start`` to ``stop``."""
    return start + ((2 * np.arange(count) + 1) * (stop - start)) // (2 * count)


def _conversion(
    spec: TensorSpec,
    low: float,
    high: float,
    channels: int,
    mean: Sequence[float] | None,
    deviation: Sequence[float] | None,
) -> Convert:
    """From levels to the values of an input."""
    real = low + (high - low) * np.arange(256) / 255.0
    if mean is None and deviation is None:
        return _through(_table(spec, real))
    means = _per_channel(mean, 0.0, channels, "mean")
    deviations = _per_channel(deviation, 1.0, channels, "deviation")
    if not np.all(np.abs(deviations) > 0):
        raise InvalidArgument(
            f"image_writer: deviation: expected numbers other than 0, got {list(deviations)}"
        )
    ways = [_through(_table(spec, (real - m) / d)) for m, d in zip(means, deviations)]

    def convert(picture: Array, into: Array) -> None:
        for channel, way in enumerate(ways):
            way(picture[..., channel], into[..., channel])

    return convert


def _per_channel(
    numbers: Sequence[float] | None, default: float, channels: int, name: str
) -> npt.NDArray[np.float64]:
    found = np.full(channels, default) if numbers is None else np.asarray(numbers, np.float64)
    if found.shape != (channels,) or not np.isfinite(found).all():
        raise InvalidArgument(f"image_writer: {name}: expected {channels} finite numbers, got {numbers}")
    return found


def _table(spec: TensorSpec, real: npt.NDArray[np.floating[Any]]) -> Array:
    """The value of each level."""
    levels: Array = real
    if spec.scale:
        info = np.iinfo(spec.dtype)
        levels = np.clip(np.rint(real / spec.scale) + spec.zero_point, info.min, info.max)
    elif spec.type not in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16):
        raise InvalidArgument(
            f"{spec.name}: expected a float or quantised input, got {operand_type_name(spec.type)}"
        )
    table: Array = levels.astype(spec.dtype)
    return table


def _image_order(spec: TensorSpec) -> tuple[int, int, int]:
    """The axes of height, width and channels among the last three: channels are first only where they cannot be last."""
    if len(spec.dimensions) != 4 or spec.dimensions[0] != 1:
        raise InvalidArgument(
            f"{spec.name}: expected an input of shape [1, height, width, channels] or [1, channels, height, width], "
            f"got {list(spec.dimensions)}"
        )
    _, first, _, last = spec.dimensions
    return _FIRST if first in IMAGE_CHANNELS and last not in IMAGE_CHANNELS else _LAST


def _through(table: Array) -> Convert:
    """The quickest way to write ``table[picture]``: arithmetic, 4 to 40 times as fast, where it gives the table's very bytes."""
    ways: list[Convert]
    if table.dtype == np.float32:
        white = np.float32(255 / float(table[255])) if table[255] else np.float32(1)
        ways = [lambda picture, into: np.divide(picture, white, out=into, dtype=np.float32)]
    elif table.dtype == np.int8:
        ways = [lambda picture, into: np.bitwise_xor(picture, 0x80, out=into.view(np.uint8))]
    else:
        ways = [lambda picture, into: np.copyto(into, picture, casting="same_kind")]
    levels, found = np.arange(256, dtype=np.uint8), np.empty_like(table)
    for way in ways:
        way(levels, found)
        if found.tobytes() == table.tobytes():
            return way
    # mode="clip" spares numpy a buffer for the output; a uint8 index cannot be out of range.
    return lambda picture, into: np.take(table, picture, out=into, mode="clip")

"""Windows that slide over spatial axes: padding and extents of convolutions and pools.

Owns the arithmetic that shape rules and drivers share.

Source: the ONNX operators' specifications of Conv, ConvTranspose, MaxPool and the pools like it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aionn.errors import InvalidModel

__all__ = ["Windows", "transposed_pads", "windows"]

Shape = tuple[int, ...]


class Windows(NamedTuple):
    """The windows of a convolution or pool, an entry for each spatial axis.

    Attributes:
        kernel: Extents of a window.
        strides: Distance between windows.
        dilations: Distance between elements of a window.
        begins: Padding before the first element.
        ends: Padding after the last element.
        extents: Number of windows.
    """

    kernel: Shape
    strides: Shape
    dilations: Shape
    begins: Shape
    ends: Shape
    extents: Shape


def _listed(attributes: Mapping[str, Any], name: str, count: int, default: int) -> list[int]:
    values = attributes.get(name)
    if values is None or values == []:
        return [default] * count
    if not isinstance(values, list) or len(values) != count or any(type(v) is not int for v in values):
        raise InvalidModel(f"attribute {name!r}: expected {count} whole numbers, got {values!r:.40}")
    if any(value < (0 if name == "pads" else 1) for value in values):
        raise InvalidModel(f"attribute {name!r}: expected no negative numbers, got {values!r:.40}")
    return values


def windows(
    attributes: Mapping[str, Any], spatial: Sequence[int], kernel: Sequence[int], *, is_pool: bool = False
) -> Windows:
    """The windows over an image.

    Args:
        attributes: strides, dilations, pads, auto_pad, ceil_mode.
        spatial: Extents of the image.
        kernel: Extents of a window.
        is_pool: Whether the last window may begin within the image and end outside of the padding (``ceil_mode``).

    Raises:
        InvalidModel: An attribute is wrong.
    """
    count = len(spatial)
    strides = _listed(attributes, "strides", count, 1)
    dilations = _listed(attributes, "dilations", count, 1)
    begins_ends = _listed(attributes, "pads", 2 * count, 0)
    begins, ends = begins_ends[:count], begins_ends[count:]
    auto = attributes.get("auto_pad", "NOTSET")
    extents = []
    for axis in range(count):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max(0, (-(-spatial[axis] // strides[axis]) - 1) * strides[axis] + reach - spatial[axis])
            begins[axis] = total // 2 if auto == "SAME_UPPER" else total - total // 2
            ends[axis] = total - begins[axis]
        elif auto == "VALID":
            begins[axis] = ends[axis] = 0
        elif auto not in ("NOTSET", ""):
            raise InvalidModel(f"attribute 'auto_pad': expected a kind of padding, got {auto!r:.40}")
        room = spatial[axis] + begins[axis] + ends[axis] - reach
        if room < 0:
            raise InvalidModel(
                f"window: expected at most {room + reach} elements on axis {axis + 2}, got {reach}"
            )
        extent = room // strides[axis] + 1
        if is_pool and attributes.get("ceil_mode", 0) and auto in ("NOTSET", ""):
            extent = -(-room // strides[axis]) + 1
            if (extent - 1) * strides[axis] >= spatial[axis] + begins[axis]:
                extent -= 1
        extents.append(extent)
    return Windows(
        tuple(kernel), tuple(strides), tuple(dilations), tuple(begins), tuple(ends), tuple(extents)
    )


def transposed_pads(attributes: Mapping[str, Any], spatial: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows of ConvTranspose: ``extents`` are those of its result.

    Raises:
        InvalidModel: An attribute is wrong.
    """
    count = len(spatial)
    strides = _listed(attributes, "strides", count, 1)
    dilations = _listed(attributes, "dilations", count, 1)
    more = attributes.get("output_padding") or [0] * count
    begins_ends = _listed(attributes, "pads", 2 * count, 0)
    begins, ends = begins_ends[:count], begins_ends[count:]
    auto = attributes.get("auto_pad", "NOTSET")
    wanted = attributes.get("output_shape")
    extents = []
    for axis in range(count):
        full = strides[axis] * (spatial[axis] - 1) + more[axis] + (kernel[axis] - 1) * dilations[axis] + 1
        if wanted or auto in ("SAME_UPPER", "SAME_LOWER"):
            extent = wanted[axis - count] if wanted else spatial[axis] * strides[axis]
            total = max(0, full - extent)
            begins[axis] = total - total // 2 if auto == "SAME_LOWER" else total // 2
            if wanted and auto not in ("SAME_UPPER", "SAME_LOWER"):
                begins[axis] = total - total // 2
            ends[axis] = total - begins[axis]
        else:
            extent = full - begins[axis] - ends[axis]
        extents.append(extent)
    return Windows(
        tuple(kernel), tuple(strides), tuple(dilations), tuple(begins), tuple(ends), tuple(extents)
    )

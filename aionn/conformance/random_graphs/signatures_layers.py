"""Random instances of the operations that combine neighbouring elements: convolution, pooling, products, normalisation, resizing,
regions of interest.

Owns ``SIGNATURES`` of these operations, as data with one builder function a form.

Source: the operation signatures of the NN HAL's random graph generator, and the operations' contracts for what came later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aionn.conformance.random_graphs.extents import Extent
from aionn.conformance.random_graphs.signatures import (
    F16,
    F32,
    FLOATS,
    I32,
    Q8,
    Q8S,
    Q16A,
    Array,
    Draft,
    Signature,
    Value,
    by_level,
)
from aionn.hal import OperandType, OperationType, Padding

__all__ = ["SIGNATURES"]

_UP_TO_4 = (1, 2, 3, 4)
_SIGNED_RESIZE_MAX = 5
"""Largest extent of a resized image of signed values: the spec's places are off by up to 1/2048 of a pixel more in each row and
column, and one of 255 levels is left of the tolerance of 2 when both sides have rounded."""
_PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL


# --- images and windows


@dataclass(frozen=True, slots=True)
class _Form:
    """The optional arguments of an operation on windows.

    Attributes:
        is_explicit: Padding by numbers, not by a scheme.
        has_layout: With the layout argument.
        has_dilation: With dilations (and the layout).
    """

    is_explicit: bool
    has_layout: bool = False
    has_dilation: bool = False


def _in_layout(batch: Extent, height: Extent, width: Extent, depth: Extent, is_nchw: bool) -> list[Extent]:
    return [batch, depth, height, width] if is_nchw else [batch, height, width, depth]


class _Window:
    """Padding, strides and dilations of an operation on windows: draws them, adds them, computes output extents."""

    def __init__(self, draft: Draft, form: _Form) -> None:
        self.draft = draft
        self.form = form
        self.is_nchw = form.has_layout and draft.chance(0.5)
        self.pads = [draft.integer(1, 3) for _ in range(4)]
        self.scheme = Padding(draft.integer(1, 2))
        self.stride_width, self.stride_height = draft.integer(1, 3), draft.integer(1, 3)
        self.dilation_width = draft.integer(1, 3) if form.has_dilation else 1
        self.dilation_height = draft.integer(1, 3) if form.has_dilation else 1

    def add_padding_and_strides(self) -> None:
        numbers = self.pads if self.form.is_explicit else [int(self.scheme)]
        for number in (*numbers, self.stride_width, self.stride_height):
            self.draft.scalar(OperandType.INT32, number)

    def add_layout_and_dilations(self) -> None:
        if self.form.has_layout:
            self.draft.scalar(OperandType.BOOL, self.is_nchw)
        if self.form.has_dilation:
            self.draft.scalar(OperandType.INT32, self.dilation_width)
            self.draft.scalar(OperandType.INT32, self.dilation_height)

    def output_extents(
        self, height: Extent, width: Extent, filter_height: Extent, filter_width: Extent
    ) -> tuple[Extent, Extent]:
        left, right, top, bottom = self.pads
        return (
            self._output(height, filter_height, self.stride_height, self.dilation_height, top, bottom),
            self._output(width, filter_width, self.stride_width, self.dilation_width, left, right),
        )

    def _output(
        self, extent: Extent, size: Extent, stride: int, dilation: int, before: int, after: int
    ) -> Extent:
        if not self.form.is_explicit and self.scheme == Padding.SAME:
            return (extent + (stride - 1)) // stride
        reach = (size - 1) * dilation + 1
        if not self.form.is_explicit:
            self.draft.extents.require_at_least(extent, reach)
            return (extent - reach + stride) // stride
        # A window must be larger than the padding, or it could be wholly inside it.
        self.draft.extents.require_at_least(reach, max(before, after) + 1)
        self.draft.extents.require_at_least(extent + (before + after), reach)
        return (extent - reach + (stride + before + after)) // stride

    def transposed_extents(
        self, height: Extent, width: Extent, filter_height: Extent, filter_width: Extent
    ) -> tuple[Extent, Extent]:
        left, right, top, bottom = self.pads
        return (
            self._transposed(height, filter_height, self.stride_height, top + bottom),
            self._transposed(width, filter_width, self.stride_width, left + right),
        )

    def _transposed(self, extent: Extent, size: Extent, stride: int, pads: int) -> Extent:
        if self.form.is_explicit:
            return (extent - 1) * stride + size - pads
        if self.scheme == Padding.SAME:
            return extent * stride
        return (extent - 1) * stride + size


def _filter_and_bias(
    draft: Draft, x: Value, shape: Sequence[Extent], channels: Extent, channel_dim: int | None
) -> Value:
    """Adds a filter and a bias to an input; where the level allows it, half of the quantised filters are per channel."""
    if draft.is_quantized and channel_dim is not None and draft.level >= 3 and draft.chance(0.5):
        filters = draft.tensor(shape, _PER_CHANNEL, is_linkable=False)
        filters.channel_dim = channel_dim
        bias = draft.tensor([channels], I32)
    else:
        filters = draft.tensor(shape)
        bias = draft.tensor([channels], I32 if draft.is_quantized else None)
        if draft.is_quantized:
            bias.scale = float(np.float32(x.scale) * np.float32(filters.scale))
    return filters


def _scaled_output(draft: Draft, x: Value, filters: Value, shape: Sequence[Extent]) -> None:
    """Adds the output of products of two inputs; before level 3 its scale must be larger than the product of theirs."""
    quantization = None
    if draft.is_quantized and draft.level < 3:
        least = x.scale * filters.scale
        quantization = (draft.real(least * 1.001, least * 5), draft.quantization(draft.type)[1])
    draft.output(shape, quantization=quantization)


def _convolution(form: _Form) -> Callable[[Draft], None]:
    def build(draft: Draft) -> None:
        window = _Window(draft, form)
        batch, height, width, depth = draft.frees(4)
        x = draft.tensor(_in_layout(batch, height, width, depth, window.is_nchw))
        count, filter_height, filter_width = draft.frees(3)
        filters = _filter_and_bias(draft, x, [count, filter_height, filter_width, depth], count, 0)
        window.add_padding_and_strides()
        draft.activation()
        window.add_layout_and_dilations()
        out_height, out_width = window.output_extents(height, width, filter_height, filter_width)
        shape = _in_layout(batch, out_height, out_width, count, window.is_nchw)
        _scaled_output(draft, x, filters, shape)

    return build


def _depthwise_convolution(form: _Form) -> Callable[[Draft], None]:
    def build(draft: Draft) -> None:
        window = _Window(draft, form)
        batch, height, width, depth = draft.frees(4)
        x = draft.tensor(_in_layout(batch, height, width, depth, window.is_nchw))
        multiplier = draft.free(1, 5)
        channels = depth * multiplier
        filter_height, filter_width = draft.frees(2)
        one = draft.extents.extent(1)
        filters = _filter_and_bias(draft, x, [one, filter_height, filter_width, channels], channels, 3)
        window.add_padding_and_strides()
        draft.scalar_extent(multiplier)
        draft.activation()
        window.add_layout_and_dilations()
        out_height, out_width = window.output_extents(height, width, filter_height, filter_width)
        shape = _in_layout(batch, out_height, out_width, channels, window.is_nchw)
        _scaled_output(draft, x, filters, shape)

    return build


def _grouped_convolution(form: _Form) -> Callable[[Draft], None]:
    def build(draft: Draft) -> None:
        window = _Window(draft, form)
        groups = draft.free(1, 5)
        batch, height, width, group_depth = draft.frees(4)
        x = draft.tensor(_in_layout(batch, height, width, groups * group_depth, window.is_nchw))
        count, filter_height, filter_width = draft.frees(3)
        # Every group makes equally many channels.
        group_count = draft.free()
        draft.extents.require_equal(groups * group_count, count)
        shape = [count, filter_height, filter_width, group_depth]
        filters = _filter_and_bias(draft, x, shape, count, 0)
        window.add_padding_and_strides()
        draft.scalar_extent(groups)
        draft.activation()
        window.add_layout_and_dilations()
        out_height, out_width = window.output_extents(height, width, filter_height, filter_width)
        _scaled_output(draft, x, filters, _in_layout(batch, out_height, out_width, count, window.is_nchw))

    return build


def _transpose_convolution(form: _Form) -> Callable[[Draft], None]:
    def build(draft: Draft) -> None:
        window = _Window(draft, form)
        batch, height, width, depth = draft.frees(4)
        x = draft.tensor(_in_layout(batch, height, width, depth, window.is_nchw))
        count, filter_height, filter_width = draft.frees(3)
        filters = _filter_and_bias(draft, x, [count, filter_height, filter_width, depth], count, 0)
        out_height, out_width = window.transposed_extents(height, width, filter_height, filter_width)
        shape = _in_layout(batch, out_height, out_width, count, window.is_nchw)
        if not form.is_explicit:
            draft.integers(4, lambda: [extent.value for extent in shape])
        window.add_padding_and_strides()
        draft.activation()
        window.add_layout_and_dilations()
        _scaled_output(draft, x, filters, shape)

    return build


def _pooling(form: _Form) -> Callable[[Draft], None]:
    def build(draft: Draft) -> None:
        window = _Window(draft, form)
        batch, height, width, depth = draft.frees(4)
        x = draft.tensor(_in_layout(batch, height, width, depth, window.is_nchw))
        window.add_padding_and_strides()
        filter_width, filter_height = draft.free(1, 4), draft.free(1, 4)
        draft.scalar_extent(filter_width)
        draft.scalar_extent(filter_height)
        draft.activation()
        window.add_layout_and_dilations()
        out_height, out_width = window.output_extents(height, width, filter_height, filter_width)
        draft.output(_in_layout(batch, out_height, out_width, depth, window.is_nchw), like=x)

    return build


# --- products


def _fully_connected(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    units, size = draft.frees(2)
    filters = _filter_and_bias(draft, x, [units, size], units, None)
    draft.activation()
    batch = draft.extents.divided_exactly(draft.extents.product(x.dimensions), size)
    _scaled_output(draft, x, filters, [batch, units])


def _batch_matmul(draft: Draft) -> None:
    is_a_turned, is_b_turned = draft.chance(0.5), draft.chance(0.5)
    outer = draft.frees(draft.rank - 2)
    rows, inner, columns = draft.frees(3)
    a = draft.tensor([*outer, *([inner, rows] if is_a_turned else [rows, inner])])
    b = draft.tensor([*outer, *([columns, inner] if is_b_turned else [inner, columns])])
    draft.scalar(OperandType.BOOL, is_a_turned)
    draft.scalar(OperandType.BOOL, is_b_turned)
    least = a.scale * b.scale
    quantization = (draft.real(least * 1.001, least * 5), draft.quantization(draft.type)[1])
    # A sum of products of integers may not fit them.
    draft.output([*outer, rows, columns], quantization=quantization, is_linkable=draft.type != I32)


# --- normalisation


def _softmax(draft: Draft, *, has_axis: bool) -> None:
    x = draft.tensor(draft.frees())
    draft.real_scalar_between(0.1, 10)
    if has_axis:
        draft.scalar(OperandType.INT32, draft.axis())
    draft.output(x.dimensions, quantization=(1 / 256, -128 if draft.type == Q8S else 0))


def _l2_normalization(draft: Draft, *, has_axis: bool) -> None:
    x = draft.tensor(draft.frees())
    if has_axis:
        draft.scalar(OperandType.INT32, draft.axis())
    # All zeros may become anything: nothing is linked to the result.
    quantization = (1 / 128, 0 if draft.type == Q8S else 128)
    draft.output(x.dimensions, quantization=quantization, is_linkable=False)


def _local_response_normalization(draft: Draft, *, has_axis: bool) -> None:
    x = draft.tensor(draft.frees())
    draft.integer_scalar(1, 10)
    draft.real_scalar_between(0.0, 10)
    draft.real_scalar_between(0.1, 10)
    draft.real_scalar_between(0.1, 1)
    if has_axis:
        draft.scalar(OperandType.INT32, draft.axis())
    draft.output(x.dimensions)


def _with_axis(build: Callable[..., None], has_axis: bool) -> Callable[[Draft], None]:
    def built(draft: Draft) -> None:
        build(draft, has_axis=has_axis)

    return built


def _instance_normalization(draft: Draft) -> None:
    x = draft.tensor(draft.frees())
    draft.real_scalar_between(0.1, 10)
    draft.real_scalar_between(-10, 10)
    draft.real_scalar_between(0.01, 1)
    draft.flag()
    draft.output(x.dimensions)


# --- resizing and regions


def _resize(*, by_factor: bool, flag_count: int) -> Callable[[Draft], None]:
    """``flag_count``: 0, 1 with the layout, 3 with corners and centres too."""

    def build(draft: Draft) -> None:
        is_nchw = flag_count > 0 and draft.chance(0.5)
        batch, height, width, depth = draft.frees(4)
        x = draft.tensor(_in_layout(batch, height, width, depth, is_nchw))
        if by_factor:
            out_width = width.scaled(draft.real_scalar_between(0.2, 4))
            out_height = height.scaled(draft.real_scalar_between(0.2, 4))
        else:
            out_width, out_height = draft.free(), draft.free()
            draft.scalar_extent(out_width)
            draft.scalar_extent(out_height)
        if draft.type == Q8S and draft.signature.operation == OperationType.RESIZE_BILINEAR:
            for extent in (out_width, out_height):
                draft.extents.require_at_least(draft.extents.extent(_SIGNED_RESIZE_MAX), extent)
        if flag_count > 0:
            draft.scalar(OperandType.BOOL, is_nchw)
        if flag_count > 1:
            is_half_pixel = draft.chance(0.5)
            draft.scalar(OperandType.BOOL, not is_half_pixel and draft.chance(0.5))
            draft.scalar(OperandType.BOOL, is_half_pixel)
        draft.output(_in_layout(batch, out_height, out_width, depth, is_nchw), like=x)

    return build


def _boxes_within(
    draft: Draft, count: Extent, width: Callable[[], float], height: Callable[[], float]
) -> Value:
    """Adds boxes inside of an image; quantised in eighths where the primary type is quantised."""

    def fill() -> Array:
        unit = 8.0 if draft.is_quantized else 1.0
        x = np.sort(draft.rng.uniform(0, width() * unit, (count.value, 2)), axis=1)
        y = np.sort(draft.rng.uniform(0, height() * unit, (count.value, 2)), axis=1)
        boxes = np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], axis=1).astype(np.float32)
        return np.floor(boxes) if draft.is_quantized else boxes

    four = draft.extents.extent(4)
    boxes = draft.tensor([count, four], Q16A if draft.is_quantized else None, fill=fill, is_linkable=False)
    if draft.is_quantized:
        boxes.scale, boxes.zero_point = 0.125, 0
    return boxes


def _region_pooling(draft: Draft) -> None:
    is_align = draft.signature.operation == OperationType.ROI_ALIGN
    is_nchw = draft.chance(0.5)
    batch, height, width, depth = draft.frees(4)
    x = draft.tensor(_in_layout(batch, height, width, depth, is_nchw))
    # Few regions and bins: each bin may have a hundred samples.
    count, out_height, out_width = draft.free(1, 10), draft.free(1, 8), draft.free(1, 8)
    # Below 1 the largest coordinate could round past the image's edge; above 8 it could leave 16 bits.
    stride_height, stride_width = draft.real(1.0, 8.0), draft.real(1.0, 8.0)
    shrink = 0.999

    def largest(extent: Extent, stride: float) -> float:
        return extent.value * stride * shrink

    _boxes_within(draft, count, lambda: largest(width, stride_width), lambda: largest(height, stride_height))
    draft.integers([count], lambda: np.sort(draft.rng.integers(0, batch.value, count.value)))
    draft.scalar_extent(out_height)
    draft.scalar_extent(out_width)
    draft.scalar(draft.real_scalar, stride_height)
    draft.scalar(draft.real_scalar, stride_width)
    if is_align:
        draft.integer_scalar(0, 10)
        draft.integer_scalar(0, 10)
    draft.scalar(OperandType.BOOL, is_nchw)
    shape = _in_layout(count, out_height, out_width, depth, is_nchw)
    draft.output(shape, like=None if is_align else x)


def _heatmap(draft: Draft) -> None:
    is_nchw = draft.chance(0.5)
    count, keypoints = draft.frees(2)
    size = draft.free(low=2)
    draft.tensor(_in_layout(count, size, size, keypoints, is_nchw))
    _boxes_within(draft, count, lambda: float(size.value), lambda: float(size.value))
    draft.scalar(OperandType.BOOL, is_nchw)
    draft.output([count, keypoints])
    corner = draft.output(
        [count, keypoints, draft.extents.extent(2)], Q16A if draft.is_quantized else None, is_linkable=False
    )
    if draft.is_quantized:
        corner.scale, corner.zero_point = 0.125, 0


_Levels = Mapping[int, tuple[OperandType, ...]]
_FIRST: _Levels = {1: (F32, Q8), 3: (F16, Q8), 4: (Q8S,)}
_THIRD: _Levels = {3: (F32, Q8, F16), 4: (Q8S,)}
_WITH_FLAGS: _Levels = {4: (F32, Q8, F16, Q8S)}
_BOXES: _Levels = {3: (F32, Q8), 4: (Q8S,)}
"""Boxes in float16 lose their pixels: its results could not be judged."""

_PLAIN_FORMS = {"explicit": _Form(True), "implicit": _Form(False)}
_LAYOUT_FORMS = {"explicit_layout": _Form(True, True), "implicit_layout": _Form(False, True)}
_DILATED_FORMS = {
    "explicit_dilation": _Form(True, True, True),
    "implicit_dilation": _Form(False, True, True),
}

O = OperationType  # noqa: E741 - the table below has one on every line


def _windows(
    operation: OperationType,
    build: Callable[[_Form], Callable[[Draft], None]],
    levels: _Levels,
    forms: dict[str, _Form],
) -> list[Signature]:
    return [s for name, form in forms.items() for s in by_level(operation, levels, (4,), build(form), name)]


_POOLED: _Levels = {1: (F32, Q8), 3: (F16,)}
_POOLED_FLOAT: _Levels = {1: (F32,), 3: (F16,)}

SIGNATURES: tuple[Signature, ...] = (
    *_windows(O.CONV_2D, _convolution, _FIRST, _PLAIN_FORMS),
    *_windows(O.CONV_2D, _convolution, _THIRD, {**_LAYOUT_FORMS, **_DILATED_FORMS}),
    *_windows(O.DEPTHWISE_CONV_2D, _depthwise_convolution, _FIRST, _PLAIN_FORMS),
    *_windows(O.DEPTHWISE_CONV_2D, _depthwise_convolution, _THIRD, {**_LAYOUT_FORMS, **_DILATED_FORMS}),
    *_windows(O.GROUPED_CONV_2D, _grouped_convolution, _THIRD, _LAYOUT_FORMS),
    *_windows(O.TRANSPOSE_CONV_2D, _transpose_convolution, _THIRD, _LAYOUT_FORMS),
    *_windows(O.AVERAGE_POOL_2D, _pooling, _POOLED, _PLAIN_FORMS),
    *_windows(O.AVERAGE_POOL_2D, _pooling, _THIRD, _LAYOUT_FORMS),
    *_windows(O.L2_POOL_2D, _pooling, _POOLED_FLOAT, _PLAIN_FORMS),
    *_windows(O.L2_POOL_2D, _pooling, {3: FLOATS}, _LAYOUT_FORMS),
    *_windows(O.MAX_POOL_2D, _pooling, _POOLED, _PLAIN_FORMS),
    *_windows(O.MAX_POOL_2D, _pooling, _THIRD, _LAYOUT_FORMS),
    *by_level(O.FULLY_CONNECTED, _FIRST, (2, 3, 4), _fully_connected),
    *by_level(O.BATCH_MATMUL, {6: (F32, F16, Q8S, I32)}, (2, 3, 4), _batch_matmul),
    *by_level(O.SOFTMAX, {1: (F32, Q8)}, (2, 4), _with_axis(_softmax, False)),
    *by_level(O.SOFTMAX, {3: (F32, Q8)}, (1, 3), _with_axis(_softmax, False), "odd"),
    *by_level(O.SOFTMAX, {3: (F16,), 4: (Q8S,)}, _UP_TO_4, _with_axis(_softmax, False), "typed"),
    *by_level(O.SOFTMAX, _THIRD, _UP_TO_4, _with_axis(_softmax, True), "axis"),
    *by_level(O.LOG_SOFTMAX, {3: FLOATS}, _UP_TO_4, _with_axis(_softmax, True)),
    *by_level(O.L2_NORMALIZATION, {1: (F32,)}, (4,), _with_axis(_l2_normalization, False)),
    *by_level(O.L2_NORMALIZATION, {3: (F32,)}, (1, 2, 3), _with_axis(_l2_normalization, False), "low"),
    *by_level(
        O.L2_NORMALIZATION,
        {3: (F16, Q8), 4: (Q8S,)},
        _UP_TO_4,
        _with_axis(_l2_normalization, False),
        "typed",
    ),
    *by_level(O.L2_NORMALIZATION, _THIRD, _UP_TO_4, _with_axis(_l2_normalization, True), "axis"),
    *by_level(
        O.LOCAL_RESPONSE_NORMALIZATION, {1: (F32,)}, (4,), _with_axis(_local_response_normalization, False)
    ),
    *by_level(
        O.LOCAL_RESPONSE_NORMALIZATION,
        {3: (F32,)},
        (1, 2, 3),
        _with_axis(_local_response_normalization, False),
        "low",
    ),
    *by_level(
        O.LOCAL_RESPONSE_NORMALIZATION,
        {3: (F16,)},
        _UP_TO_4,
        _with_axis(_local_response_normalization, False),
        "typed",
    ),
    *by_level(
        O.LOCAL_RESPONSE_NORMALIZATION,
        {3: FLOATS},
        _UP_TO_4,
        _with_axis(_local_response_normalization, True),
        "axis",
    ),
    *by_level(O.INSTANCE_NORMALIZATION, {3: FLOATS}, (4,), _instance_normalization),
    *by_level(
        O.RESIZE_BILINEAR, {1: (F32,), 3: (Q8, F16), 4: (Q8S,)}, (4,), _resize(by_factor=False, flag_count=0)
    ),
    *(
        signature
        for operation in (O.RESIZE_BILINEAR, O.RESIZE_NEAREST_NEIGHBOR)
        for by_factor, name in ((False, "size"), (True, "factor"))
        for levels, count, suffix in ((_THIRD, 1, ""), (_WITH_FLAGS, 3, "_flags"))
        for signature in by_level(
            operation, levels, (4,), _resize(by_factor=by_factor, flag_count=count), name + suffix
        )
    ),
    *by_level(O.ROI_ALIGN, _BOXES, (4,), _region_pooling),
    *by_level(O.ROI_POOLING, _BOXES, (4,), _region_pooling),
    *by_level(O.HEATMAP_MAX_KEYPOINT, _BOXES, (4,), _heatmap),
)

"""Convolutions: CONV_2D, DEPTHWISE_CONV_2D, GROUPED_CONV_2D, TRANSPOSE_CONV_2D.

Owns how windows of an image meet the filter. ``geometry`` places the windows, ``weighted_sums`` converts the sums.

Invariants:
1. The heavy work is one matrix product per block of output rows, or one multiply-add per tap of a depthwise filter.
2. Everything that follows from constants (filter as floats, totals, multipliers, geometry) is computed once for a prepared model.

Source: ``Conv2D.cpp``, ``DepthwiseConv2D.cpp``, ``GroupedConv2D.cpp``, ``TransposeConv2D.cpp`` of the NN HAL's CPU operations;
integer arithmetic of TensorFlow Lite's reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.hal.windows import WindowArguments, window_arguments
from aionn.ops.numerics.axes import bounded_shape
from aionn.ops.numerics.geometry import (
    BLOCK_ELEMENTS,
    Axis,
    blocks,
    check_window,
    check_working_bytes,
    image_shape,
    laid_out,
    pad_image,
    transposed_axes,
    window_axes,
)
from aionn.ops.numerics.weighted_sums import (
    QUANT8,
    Finish,
    check_bias,
    check_weighted,
    finisher,
    row_repeats,
    weight_values,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The way of a convolution's windows over its input. It depends on no weight, so that a shape is known without reading them."""

    input_shape: Shape
    output_shape: Shape  # [batch, height, width, depth]
    is_nchw: bool
    down: Axis
    across: Axis
    activation: int  # The index of this input.
    groups: int = 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parameters of a convolution other than its input's values."""

    layout: _Layout
    fill: float
    weights: Array
    finish: Finish
    repeats: int

    @property
    def input_shape(self) -> Shape:
        return self.layout.input_shape


_Place = Callable[[Call], _Layout]
_Make = Callable[[Call, _Layout], _Plan]
_Kept = TypeVar("_Kept", _Layout, _Plan)


def _kept(call: Call, key: str, compute: Callable[[], _Kept]) -> _Kept:
    """A layout or plan of this call, kept where the model fixes all that it depends on."""
    data = call.tensor(0)
    if data.operand.dimensions == data.shape:
        found = call.kept(key, range(1, len(call.inputs)), compute)
        # A subgraph's input may come with another shape than it declares.
        if found.input_shape == data.shape:
            return found
    return compute()


def _shapes(place: _Place) -> Callable[[Call], Sequence[Shape]]:
    def shapes(call: Call) -> Sequence[Shape]:
        layout = _kept(call, "layout", lambda: place(call))
        return [bounded_shape(call, "padding and strides", laid_out(layout.output_shape, layout.is_nchw))]

    return shapes


def _execute(
    place: _Place, make: _Make, compute: Callable[[Array, Array, _Plan], None]
) -> Callable[[Call], list[Array]]:
    def execute(call: Call) -> list[Array]:
        plan = _kept(call, "plan", lambda: make(call, place(call)))
        layout = plan.layout
        image = call.array(0)
        if layout.is_nchw:
            image = image.transpose(0, 2, 3, 1)
        out = np.empty(layout.output_shape, dtype=operand_dtype(call.outputs[0].type))
        if out.size:
            compute(image, out, plan)
        return [np.ascontiguousarray(out.transpose(0, 3, 1, 2)) if layout.is_nchw else out]

    return execute


def _flag(call: Call, index: int | None) -> bool:
    return index is not None and bool(call.scalar(index))


def _fill(call: Call) -> int:
    data = call.tensor(0)
    return data.zero_point if data.type in QUANT8 else 0


def _check_ranks(check: Check, filter_depth_axis: int, bias_axis: int) -> None:
    check.input_rank(0, 4)
    check.input_rank(1, 4)
    check.input_rank(2, 1)
    check.output_rank(0, 4)
    dimensions = check.inputs[1].dimensions
    if len(dimensions) == 4 and dimensions[bias_axis]:
        check.extent("input 2", check.inputs[2], 0, dimensions[bias_axis])


# CONV_2D and GROUPED_CONV_2D


def _arguments(call: Call, operation: OperationType) -> WindowArguments:
    return window_arguments(operation, [-1 if tensor is None else tensor.type for tensor in call.inputs])


def _checked_arguments(check: Check, *, may_crop: bool = False) -> WindowArguments:
    arguments = window_arguments(check.operation_type, [operand.type for operand in check.inputs])
    _check_all_used(check, arguments)
    check_window(check, arguments, may_crop=may_crop)
    return arguments


def _validate_conv_2d(check: Check) -> None:
    check.counts((7, 8, 10, 11, 13))
    check_weighted(check, channel_dim=0)
    arguments = _checked_arguments(check)
    _check_ranks(check, 3, 0)
    _check_depths(check, arguments, 1)


def _validate_grouped_conv_2d(check: Check) -> None:
    check.counts((9, 12))
    check.needs(3)
    check_weighted(check, channel_dim=0)
    arguments = _checked_arguments(check)
    _check_ranks(check, 3, 0)
    groups = check.constant(arguments.extra[0])
    if groups is not None:
        count = int(groups.reshape(()))
        check.require(count >= 1, f"input {arguments.extra[0]}", "at least 1 group", count)
        _check_depths(check, arguments, count)


def _check_all_used(check: Check, arguments: WindowArguments) -> None:
    expected = arguments.indexes[-1] + 1
    check.require(
        len(check.inputs) == expected, "number of inputs", f"{expected} for these types", len(check.inputs)
    )


def _check_depths(check: Check, arguments: WindowArguments, groups: int) -> None:
    weights = check.inputs[1].dimensions
    axis = _depth_axis(check, arguments)
    if axis is None or len(weights) != 4 or not weights[3]:
        return
    check.extent("input 0", check.inputs[0], axis, weights[3] * groups)
    check.require(weights[0] % groups == 0, "input 1", f"a multiple of {groups} on axis 0", list(weights))


def _depth_axis(check: Check, arguments: WindowArguments) -> int | None:
    """The axis of the image's depth where the model fixes the layout."""
    if arguments.is_nchw is None:
        return 3
    layout = check.constant(arguments.is_nchw)
    return None if layout is None else (1 if bool(layout.reshape(())) else 3)


def _place_conv_2d(call: Call) -> _Layout:
    return _place_dense(call, _arguments(call, OperationType.CONV_2D), groups=1)


def _place_grouped_conv_2d(call: Call) -> _Layout:
    arguments = _arguments(call, OperationType.GROUPED_CONV_2D)
    groups = call.scalar(arguments.extra[0])
    if groups < 1:
        call.refuse(f"input {arguments.extra[0]}: expected at least 1 group, got {groups}")
    return _place_dense(call, arguments, groups=groups)


def _place_dense(call: Call, arguments: WindowArguments, *, groups: int) -> _Layout:
    data, weights = call.tensor(0), call.tensor(1)
    is_nchw = _flag(call, arguments.is_nchw)
    batch, height, width, depth = image_shape(data.array, is_nchw)
    _check_filter(call, f"expected rank 4 with {depth} / {groups} on axis 3", 4)
    channels, window_height, window_width, group_depth = weights.shape
    if group_depth * groups != depth or channels % groups or not channels:
        call.refuse(
            f"input 1: expected {depth / groups:g} on axis 3 and a multiple of {groups} on axis 0, got {list(weights.shape)}"
        )
    check_bias(call, channels)
    down, across = window_axes(call, arguments, height, width, window_height, window_width)
    shape = batch, down.count, across.count, channels
    return _Layout(data.shape, shape, is_nchw, down, across, arguments.activation, groups)


def _plan_dense(call: Call, layout: _Layout) -> _Plan:
    """Filter [depth out, height, width, depth in per group] as [groups, taps times depth in, depth out per group]."""
    groups, channels = layout.groups, layout.output_shape[3]
    values, totals = _weight_values(call, (1, 2, 3))
    repeats = row_repeats(layout.across.count, channels)
    matrices = values.reshape(groups, channels // groups, -1).transpose(0, 2, 1)
    return _Plan(
        layout,
        _fill(call),
        matrices[0] if groups == 1 else matrices,
        finisher(call, layout.activation, totals, repeats=repeats),
        repeats,
    )


def _weight_values(
    call: Call, reduced: tuple[int, ...], *, spans_zero_point: bool = False
) -> tuple[Array, Array]:
    """The filter as floats; kept by itself, because a plan for extents that the model leaves open is not."""
    data, weights = call.tensor(0), call.tensor(1)
    return call.kept(
        "weights", (1,), lambda: weight_values(data, weights, reduced, spans_zero_point=spans_zero_point)
    )


def _check_filter(call: Call, expected: str, rank: int) -> None:
    if call.array(1).ndim != rank:
        call.refuse(f"input 1: {expected}, got shape {list(call.array(1).shape)}")


def _windows(image: Array, plan: _Plan) -> Array:
    """The windows of an image: [batch, height out, width out, window height, window width, depth], mostly a view."""
    down, across = plan.layout.down, plan.layout.across
    if down.is_plain and across.is_plain:
        return np.ascontiguousarray(image)[:, :, :, None, None, :]
    padded = pad_image(image, down, across, plan.fill, plan.weights.dtype)
    along_batch, along_height, along_width, along_depth = padded.strides
    return np.ndarray(
        (len(image), down.count, across.count, down.window, across.window, image.shape[3]),
        dtype=padded.dtype,
        buffer=padded,
        strides=(
            along_batch,
            along_height * down.stride,
            along_width * across.stride,
            along_height * down.dilation,
            along_width * across.dilation,
            along_depth,
        ),
    )


def _convolve(image: Array, out: Array, plan: _Plan) -> None:
    windows = _windows(image, plan)
    weights, groups = plan.weights, plan.layout.groups
    batch, height, width, channels = out.shape
    inner = weights.shape[-2] * groups
    columns: Array
    for images, rows in blocks(batch, height, width * max(inner // 4, channels)):
        part = windows[images, rows]
        target = out[images, rows].reshape(-1, channels)
        if groups == 1:
            columns = part.reshape(-1, inner).astype(weights.dtype, copy=False)
            sums = np.matmul(columns, weights, out=target if target.dtype == weights.dtype else None)
        else:
            taps = part.reshape(len(target), -1, groups, image.shape[3] // groups)
            columns = (
                taps.transpose(2, 0, 1, 3).reshape(groups, len(target), -1).astype(weights.dtype, copy=False)
            )
            sums = np.matmul(columns, weights).transpose(1, 0, 2).reshape(len(target), channels)
        _finish(plan, sums, target)


def _finish(plan: _Plan, sums: Array, target: Array) -> None:
    row = (-1, plan.repeats * target.shape[-1])
    flat = target.reshape(row)
    plan.finish(flat if sums is target else sums.reshape(row), flat)


# DEPTHWISE_CONV_2D


def _validate_depthwise_conv_2d(check: Check) -> None:
    check.counts((8, 9, 11, 12, 14))
    check_weighted(check, channel_dim=3)
    arguments = _checked_arguments(check)
    _check_ranks(check, 3, 3)
    check.extent("input 1", check.inputs[1], 0, 1)
    multiplier = check.constant(arguments.extra[0])
    if multiplier is not None:
        value = int(multiplier.reshape(()))
        check.require(value >= 1, f"input {arguments.extra[0]}", "a depth multiplier of at least 1", value)
        axis, data = _depth_axis(check, arguments), check.inputs[0].dimensions
        if axis is not None and data and data[axis]:
            check.extent("input 1", check.inputs[1], 3, data[axis] * value)


def _place_depthwise(call: Call) -> _Layout:
    data, weights = call.tensor(0), call.tensor(1)
    arguments = _arguments(call, OperationType.DEPTHWISE_CONV_2D)
    is_nchw = _flag(call, arguments.is_nchw)
    batch, height, width, depth = image_shape(data.array, is_nchw)
    multiplier = call.scalar(arguments.extra[0])
    _check_filter(call, "expected rank 4", 4)
    one, window_height, window_width, channels = weights.shape
    if one != 1 or multiplier < 1 or multiplier * depth != channels:
        call.refuse(
            f"input 1: expected 1 on axis 0 and depth {depth} times multiplier {multiplier} on axis 3, "
            f"got {list(weights.shape)}"
        )
    check_bias(call, channels)
    down, across = window_axes(call, arguments, height, width, window_height, window_width)
    shape = batch, down.count, across.count, channels
    return _Layout(data.shape, shape, is_nchw, down, across, arguments.activation)


def _plan_depthwise(call: Call, layout: _Layout) -> _Plan:
    """Filter [1, height, width, depth out] as one row per tap, repeated for several pixels."""
    channels = layout.output_shape[3]
    values, totals = _weight_values(call, (0, 1, 2))
    repeats = row_repeats(layout.across.count, channels)
    return _Plan(
        layout,
        _fill(call),
        np.tile(values.reshape(-1, channels), repeats),
        finisher(call, layout.activation, totals, repeats=repeats),
        repeats,
    )


def _convolve_depthwise(image: Array, out: Array, plan: _Plan) -> None:
    down, across, weights = plan.layout.down, plan.layout.across, plan.weights
    batch, height, width, channels = out.shape
    if channels != image.shape[3]:
        image = np.repeat(image, channels // image.shape[3], axis=3)
    if out.size * len(weights) <= max(BLOCK_ELEMENTS, image.size):
        # Little work, or a window as large as the image: one product instead of one per tap.
        kernel = weights[:, :channels].reshape(down.window, across.window, channels)
        sums = np.add.reduce(_windows(image, plan) * kernel, axis=(3, 4))
        _finish(plan, sums.reshape(-1, channels), out.reshape(-1, channels))
        return
    # Columns that a stride apart taps meet are laid side by side, so that a tap's row is contiguous.
    phases = {tap * across.dilation % across.stride for tap in range(across.window)}
    planes = {
        phase: pad_image(image, down, across, plan.fill, weights.dtype, phase=phase, phases=across.stride)
        for phase in phases
    }
    flat = {phase: plane.reshape(batch, down.padded, -1) for phase, plane in planes.items()}
    taps = []
    for index, weight in enumerate(weights):
        row, column = divmod(index, across.window)
        start, phase = divmod(column * across.dilation, across.stride)
        first = row * down.dilation
        view = flat[phase][:, first : first + (height - 1) * down.stride + 1 : down.stride]
        view = view[:, :, start * channels : (start + width) * channels]
        taps.append((view.reshape(batch, height, -1, len(weight)), weight))
    for images, rows in blocks(batch, height, width * channels):
        target = out[images, rows].reshape(-1, weights.shape[1])
        shape = (images.stop - images.start, rows.stop - rows.start, *taps[0][0].shape[2:])
        sums = target if target.dtype == weights.dtype else np.empty(target.shape, dtype=weights.dtype)
        total, product = sums.reshape(shape), np.empty(shape, dtype=weights.dtype)
        np.multiply(taps[0][0][images, rows], taps[0][1], out=total)
        for view, weight in taps[1:]:
            np.multiply(view[images, rows], weight, out=product)
            total += product
        plan.finish(sums, target)


# TRANSPOSE_CONV_2D


def _validate_transpose_conv_2d(check: Check) -> None:
    check.counts((9, 11))
    check.needs(3)
    check_weighted(check, channel_dim=0)
    # The padding behind may be negative here.
    arguments = _checked_arguments(check, may_crop=True)
    if len(check.inputs) == 9:
        check.input_type(3, (OperandType.TENSOR_INT32,))
        check.input_rank(3, 1)
        check.extent("input 3", check.inputs[3], 0, 4)
    _check_ranks(check, 3, 0)
    _check_depths(check, arguments, 1)


def _place_transpose(call: Call) -> _Layout:
    data, weights = call.tensor(0), call.tensor(1)
    arguments = _arguments(call, OperationType.TRANSPOSE_CONV_2D)
    is_nchw = _flag(call, arguments.is_nchw)
    batch, height, width, depth = image_shape(data.array, is_nchw)
    _check_filter(call, f"expected rank 4 with {depth} on axis 3", 4)
    channels, window_height, window_width, weights_depth = weights.shape
    if weights_depth != depth or not channels:
        call.refuse(f"input 1: expected {depth} on axis 3, got {list(weights.shape)}")
    check_bias(call, channels)
    output_height = output_width = 0
    if len(call.inputs) == 9:
        wanted = call.array(3)
        if wanted.shape != (4,):
            call.refuse(f"input 3: expected shape [4], got {list(wanted.shape)}")
        output_height, output_width = (int(v) for v in (wanted[2:4] if is_nchw else wanted[1:3]))
    down, across = transposed_axes(
        call, arguments, (height, width), (output_height, output_width), (window_height, window_width)
    )
    shape = batch, down.count, across.count, channels
    return _Layout(data.shape, shape, is_nchw, down, across, arguments.activation)


def _plan_transpose(call: Call, layout: _Layout) -> _Plan:
    """Filter [depth out, height, width, depth in] as [depth in, taps times depth out]."""
    values, totals = _weight_values(call, (1, 2, 3), spans_zero_point=True)
    repeats = row_repeats(layout.across.count, layout.output_shape[3])
    return _Plan(
        layout,
        _fill(call),
        np.ascontiguousarray(values.transpose(3, 1, 2, 0).reshape(values.shape[3], -1)),
        finisher(call, layout.activation, totals, repeats=repeats, keeps_zero_point=False),
        repeats,
    )


def _convolve_transposed(image: Array, out: Array, plan: _Plan) -> None:
    down, across, weights = plan.layout.down, plan.layout.across, plan.weights
    batch, height, width, channels = out.shape
    _, rows, columns, depth = image.shape
    # Every input pixel's products are laid over the outputs around it; those in the padding are cut off.
    full = (
        max((rows - 1) * down.stride + down.window, down.before + height),
        max((columns - 1) * across.stride + across.window, across.before + width),
        channels,
    )
    check_working_bytes("output before cropping", full, weights.dtype, out.size)
    sums = np.empty(full, dtype=weights.dtype)
    for number in range(batch):
        sums[:] = 0
        for _, part in blocks(1, rows, columns * weights.shape[1]):
            values = image[number, part].reshape(-1, depth).astype(weights.dtype)
            if plan.fill:
                values -= weights.dtype.type(plan.fill)
            products = np.matmul(values, weights).reshape(-1, columns, down.window, across.window, channels)
            first = part.start * down.stride
            for row in range(down.window):
                top = first + row
                for column in range(across.window):
                    sums[
                        top : top + (len(products) - 1) * down.stride + 1 : down.stride,
                        column : column + (columns - 1) * across.stride + 1 : across.stride,
                    ] += products[:, :, row, column]
        inner = sums[down.before : down.before + height, across.before : across.before + width]
        _finish(plan, inner.reshape(-1, channels), out[number].reshape(-1, channels))


# Contracts

_FILTER_TYPES = """
Types: float32; from level 3 float16; quant8 asymm (unsigned), filter of the same type or, from level 3, quant8 symm per channel
with scales on axis {axis}; from level 4 quant8 asymm signed, likewise. The output has the input's type.
Quantisation: bias int32, zero point 0, scale = input scale * filter scale (per-channel filter: the scale of each channel; the
operand's own scale is ignored). sums = bias + sum((x - zx) * (w - zw)), exact; result = sums * multiplier (input scale * filter
scale / output scale as a 31-bit integer and a shift, rounded half up after the product, half away from zero after the shift)
+ output zero point, clipped to the type's range and the activation's. Multipliers of signed and per-channel types are products in
double precision, those of unsigned per-tensor types are rounded to float32 first. Unsigned with output scale <= input scale *
filter scale needs level 3.
Float16 is computed in float32 and rounded once. Only the batch may be 0.
Stricter than AOSP: scalars that the model fixes are checked when it is validated.
"""

_WINDOW_FORMS = """
Padding, implicit form: {first} scheme (1 SAME, 2 VALID). Explicit form: {first}, +1, +2, +3 left, right, top, bottom, each less
than the dilated window.
Then INT32 stride width, stride height{extras}, activation (0 NONE, 1 RELU, 2 RELU1, 3 RELU6){tail}.
"""

_CONV_2D_DOC = (
    """
out[b, y, x, o] = activation(bias[o] + sum over i, j, c of in[b, y*sh + i*dh - top, x*sw + j*dw - left, c] * filter[o, i, j, c]);
values outside of the image count as zero.

Inputs: 0 image [batch, height, width, depth in] (NCHW: [batch, depth in, height, width]); 1 filter [depth out, height, width,
depth in]; 2 bias [depth out].
"""
    + _WINDOW_FORMS.format(
        first=3,
        extras="",
        tail="; optional BOOL true for NCHW (level 3); optional dilations width, height (level 3)",
    )
    + """Output: [batch, height out, width out, depth out] in the input's layout."""
    + _FILTER_TYPES.format(axis=0)
    + "Source: Conv2D.cpp of the NN HAL; ConvPerChannel of TensorFlow Lite's reference kernels."
)

_DEPTHWISE_DOC = (
    """
out[b, y, x, c*m + q] = activation(bias[c*m + q] + sum over i, j of in[b, y*sh + i*dh - top, x*sw + j*dw - left, c] *
filter[0, i, j, c*m + q]), with the depth multiplier m.

Inputs: 0 image as for CONV_2D; 1 filter [1, height, width, depth in * m]; 2 bias [depth in * m].
"""
    + _WINDOW_FORMS.format(
        first=3,
        extras=", depth multiplier",
        tail="; optional BOOL true for NCHW (level 3); optional dilations width, height (level 3)",
    )
    + """Output: [batch, height out, width out, depth in * m] in the input's layout."""
    + _FILTER_TYPES.format(axis=3)
    + "Source: DepthwiseConv2D.cpp of the NN HAL; DepthwiseConvPerChannel of TensorFlow Lite's reference kernels."
)

_GROUPED_DOC = (
    """
CONV_2D within each of g groups: depth in and depth out are cut into g equal parts, and part k of the output sees part k of the
input alone. Level 3.

Inputs: 0 image as for CONV_2D; 1 filter [depth out, height, width, depth in / g]; 2 bias [depth out].
"""
    + _WINDOW_FORMS.format(first=3, extras=", number of groups g", tail=", BOOL true for NCHW")
    + """Output: as for CONV_2D."""
    + _FILTER_TYPES.format(axis=0)
    + "Source: GroupedConv2D.cpp of the NN HAL."
)

_TRANSPOSE_DOC = (
    """
The gradient of CONV_2D: every pixel in[b, y, x] adds in[b, y, x, c] * filter[o, i, j, c] to out[b, y*sh + i - top, x*sw + j - left,
o]; then bias and activation. Level 3.

Inputs: 0 image as for CONV_2D; 1 filter [depth out, height, width, depth in]; 2 bias [depth out].
Implicit form: 3 output shape TENSOR_INT32 [4], 4 scheme (1 SAME, 2 VALID). Explicit form: 3, 4, 5, 6 left, right, top, bottom;
right and bottom may be negative, which adds outputs.
Then INT32 stride width, stride height, activation, BOOL true for NCHW.
Output: height = (height in - 1) * stride + window - top - bottom, width likewise. The shape of input 3 decides SAME padding alone.
"""
    + _FILTER_TYPES.format(axis=0)
    + "Source: TransposeConv2D.cpp of the NN HAL."
)


def _contract(
    operation: OperationType,
    validate: Callable[[Check], None],
    place: _Place,
    make: _Make,
    compute: Callable[[Array, Array, _Plan], None],
    doc: str,
) -> OperationContract:
    return OperationContract(operation, validate, _shapes(place), _execute(place, make, compute), doc)


OPERATIONS: tuple[OperationContract, ...] = (
    _contract(OperationType.CONV_2D, _validate_conv_2d, _place_conv_2d, _plan_dense, _convolve, _CONV_2D_DOC),
    _contract(
        OperationType.DEPTHWISE_CONV_2D,
        _validate_depthwise_conv_2d,
        _place_depthwise,
        _plan_depthwise,
        _convolve_depthwise,
        _DEPTHWISE_DOC,
    ),
    _contract(
        OperationType.GROUPED_CONV_2D,
        _validate_grouped_conv_2d,
        _place_grouped_conv_2d,
        _plan_dense,
        _convolve,
        _GROUPED_DOC,
    ),
    _contract(
        OperationType.TRANSPOSE_CONV_2D,
        _validate_transpose_conv_2d,
        _place_transpose,
        _plan_transpose,
        _convolve_transposed,
        _TRANSPOSE_DOC,
    ),
)

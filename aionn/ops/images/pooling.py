"""Pooling: AVERAGE_POOL_2D, L2_POOL_2D, MAX_POOL_2D.

Owns how a window of an image becomes one pixel. ``geometry`` places the windows.

Invariants:
1. Padding never counts: not in sums, not in the number of elements, not in maxima.
2. A window is reduced along its height, then along its width, so the work grows with the sum of both.

Source: ``Pooling.cpp`` of the NN HAL's CPU operations; ``AveragePool`` of TensorFlow Lite's reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.hal.windows import WindowArguments, window_arguments
from aionn.ops.numerics.axes import bounded_shape
from aionn.ops.numerics.fixed_point import activation_range, float_activation
from aionn.ops.numerics.geometry import (
    Axis,
    check_window,
    image_shape,
    laid_out,
    window_axes,
)
from aionn.ops.numerics.weighted_sums import DATA_LEVELS, QUANT8
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]

_FLOAT_LEVELS = {t: level for t, level in DATA_LEVELS.items() if t not in QUANT8}


@dataclass(frozen=True, slots=True)
class _Pooled:
    values: Array  # [batch, height, width, depth]
    counts: Array  # [height, width, 1]: number of taps inside the image
    is_nchw: bool


def _arguments(count: int) -> WindowArguments:
    # The three operations have the same forms, and the number of inputs alone selects one.
    return window_arguments(OperationType.MAX_POOL_2D, (OperandType.INT32,) * count)


def _validate(check: Check, levels: dict[OperandType, int]) -> None:
    check.counts((7, 8, 10, 11))
    data_type = check.input_type(0, levels)
    check.output_type(0, (data_type,))
    arguments = _arguments(len(check.inputs))
    check_window(check, arguments)
    for index in arguments.extra:
        value = check.constant(index)
        if value is not None:
            size = int(value.reshape(()))
            check.require(size >= 1, f"input {index}", "a window of at least 1", size)
    check.input_rank(0, 4)
    check.output_rank(0, 4)
    if data_type in QUANT8:
        check.same_quantization("output 0", check.inputs[0], check.outputs[0])


def _axes(call: Call) -> tuple[bool, tuple[int, int, int, int], Axis, Axis]:
    arguments = _arguments(len(call.inputs))
    is_nchw = arguments.is_nchw is not None and bool(call.scalar(arguments.is_nchw))
    batch, height, width, depth = image_shape(call.array(0), is_nchw)
    window_width, window_height = (call.scalar(i) for i in arguments.extra)
    down, across = window_axes(call, arguments, height, width, window_height, window_width)
    return is_nchw, (batch, down.count, across.count, depth), down, across


def _shapes(call: Call) -> Sequence[Shape]:
    is_nchw, shape, _, _ = _axes(call)
    return [bounded_shape(call, "padding and strides", laid_out(shape, is_nchw))]


def _pool(
    call: Call, reduce: np.ufunc, working: type[np.generic] | None, fill: float, *, squares: bool = False
) -> _Pooled:
    """Every window reduced to one value.

    Args:
        call: The operation.
        reduce: The binary function.
        working: Element type that partial results need; None for the image's own.
        fill: The value of padding: it leaves partial results as they are.
        squares: Whether the image is squared first.
    """
    is_nchw, _, down, across = _axes(call)
    image = call.array(0)
    if is_nchw:
        image = image.transpose(0, 2, 3, 1)
    image = image.astype(working, copy=False) if working is not None else image
    if squares:
        image = np.square(image)
    values = _slide(_slide(image, 1, down, reduce, fill), 2, across, reduce, fill)
    return _Pooled(values, (down.valid_taps()[:, None] * across.valid_taps())[:, :, None], is_nchw)


def _slide(image: Array, position: int, axis: Axis, reduce: np.ufunc, fill: float) -> Array:
    """Reduces the windows along one axis: output by output or tap by tap, whichever are fewer."""
    lead: tuple[slice, ...] = (slice(None),) * position
    if axis.count <= axis.window:
        starts = [output * axis.stride - axis.before for output in range(axis.count)]
        parts = [image[(*lead, slice(max(start, 0), start + axis.window))] for start in starts]
        return np.concatenate(
            [reduce.reduce(part, axis=position, keepdims=True) for part in parts], axis=position
        )
    if axis.before or axis.after:
        shape = (*image.shape[:position], axis.padded, *image.shape[position + 1 :])
        padded = np.full(shape, fill, dtype=image.dtype)
        padded[(*lead, slice(axis.before, axis.before + axis.extent))] = image
        image = padded
    length = (axis.count - 1) * axis.stride + 1
    values: Array = image[(*lead, slice(0, length, axis.stride))].copy()
    for tap in range(1, axis.window):
        reduce(values, image[(*lead, slice(tap, tap + length, axis.stride))], out=values)
    return values


def _result(call: Call, pooled: _Pooled, values: Array) -> list[Array]:
    """Applies the activation to values [batch, height, width, depth] and gives them the output's type and layout."""
    output = call.outputs[0]
    activation = call.scalar(_arguments(len(call.inputs)).activation)
    if not 0 <= activation <= 3:
        call.refuse(f"activation: expected a fused activation from 0 to 3, got {activation}")
    if output.type in QUANT8:
        values = np.clip(values, *activation_range(activation, output))
    else:
        values = float_activation(values, activation)
    if pooled.is_nchw:
        values = values.transpose(0, 3, 1, 2)
    # A copy also where nothing changed: the result must not be a view of an input.
    return [values.astype(operand_dtype(output.type), order="C")]


def _average_pool_2d(call: Call) -> list[Array]:
    quantized = call.tensor(0).type in QUANT8
    pooled = _pool(call, np.add, np.int32 if quantized else np.float32, 0)
    sums, counts = pooled.values, pooled.counts
    if not quantized:
        return _result(call, pooled, sums / counts.astype(np.float32))
    # Rounded to nearest, half away from zero.
    magnitudes = (np.abs(sums) + (counts // 2).astype(np.int32)) // counts.astype(np.int32)
    return _result(call, pooled, np.where(sums < 0, -magnitudes, magnitudes))


def _l2_pool_2d(call: Call) -> list[Array]:
    pooled = _pool(call, np.add, np.float32, 0, squares=True)
    return _result(call, pooled, np.sqrt(pooled.values / pooled.counts.astype(np.float32)))


def _max_pool_2d(call: Call) -> list[Array]:
    if call.tensor(0).type in QUANT8:
        least: float = np.iinfo(call.array(0).dtype).min
        pooled = _pool(call, np.maximum, None, least)
    else:
        pooled = _pool(call, np.maximum, np.float32, -np.inf)
    return _result(call, pooled, pooled.values)


_ARGUMENTS_DOC = """
Inputs: 0 image [batch, height, width, depth] (NCHW: [batch, depth, height, width]). Padding, implicit form: 1 scheme (1 SAME,
2 VALID). Explicit form: 1, 2, 3, 4 left, right, top, bottom, each less than the window. Then INT32 stride width, stride height,
window width, window height, activation (0 NONE, 1 RELU, 2 RELU1, 3 RELU6); optional BOOL true for NCHW (level 3).
Output: [batch, height out, width out, depth] in the input's layout. Only the batch may be 0.
"""


def _contract(
    operation: OperationType,
    levels: dict[OperandType, int],
    execute: Callable[[Call], Sequence[Array]],
    formula: str,
    types: str,
) -> OperationContract:
    return OperationContract(
        operation, lambda check: _validate(check, levels), _shapes, execute, formula + _ARGUMENTS_DOC + types
    )


_QUANTIZED_TYPES = """Types: float32, quant8 asymm; from level 3 float16; from level 4 quant8 asymm signed.
Quantisation: the output has the input's scale and zero point{rounding}.
Stricter than AOSP: the equal quantisation that the spec demands is checked.
Source: Pooling.cpp of the NN HAL; pooling of TensorFlow Lite's reference kernels.
"""

OPERATIONS: tuple[OperationContract, ...] = (
    _contract(
        OperationType.AVERAGE_POOL_2D,
        DATA_LEVELS,
        _average_pool_2d,
        """
out[b, y, x, c] = activation(mean of in[b, y*sh + i - top, x*sw + j - left, c] over the taps i, j inside the image).
""",
        _QUANTIZED_TYPES.format(
            rounding="; the mean of the stored values is rounded to nearest, half away from zero"
        ),
    ),
    _contract(
        OperationType.L2_POOL_2D,
        _FLOAT_LEVELS,
        _l2_pool_2d,
        """
out[b, y, x, c] = activation(square root of the mean of in[...]**2 over the taps inside the image).
""",
        """Types: float32; from level 3 float16.
Source: Pooling.cpp of the NN HAL.
""",
    ),
    _contract(
        OperationType.MAX_POOL_2D,
        DATA_LEVELS,
        _max_pool_2d,
        """
out[b, y, x, c] = activation(largest in[...] over the taps inside the image).
""",
        _QUANTIZED_TYPES.format(rounding=""),
    ),
)

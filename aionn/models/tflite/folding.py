"""Whole numbers that the importer can compute itself: the arithmetic of shapes that converters leave in a model.

Owns the evaluation of operators whose inputs are all known integers and whose results are small; such results become constants,
and the operators vanish. Values for which the file promises nothing are never folded.

Invariant: folding an operator gives what TensorFlow Lite's kernel gives; other operators are left to the ordinary way.

Source: the TensorFlow Lite operators' documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aionn.models.tflite.constants import Array
from aionn.models.tflite.graph import OPERAND_RANK_MAX, SubgraphWriter, is_known
from aionn.models.tflite.schema import TensorType, TfliteOperator

__all__ = ["FOLDERS", "fold"]

ELEMENTS_MAX = 64
"""Results with more numbers are not shapes."""

Folder = Callable[[SubgraphWriter, TfliteOperator, list[Array]], Array | None]


def fold(g: SubgraphWriter, op: TfliteOperator) -> bool:
    """Turns the operator's output into a constant if possible; returns whether it did."""
    if op.code == SHAPE or op.code == RANK:
        shape = _shape_of(g, op)
        if shape is None:
            return False
        g.fold(op, 0, np.array(shape if op.code == SHAPE else len(shape), dtype=np.int64))
        return True
    folder = FOLDERS.get(op.code)
    if folder is None or len(op.outputs) != 1 or not op.inputs:
        return False
    if g.output_tensor(op).type not in (TensorType.INT32, TensorType.INT64):
        return False
    values = []
    for position in range(len(op.inputs)):
        value = g.value_of(op, position) if g.has(op, position) else None
        if value is None or value.dtype.kind != "i" or value.size > ELEMENTS_MAX:
            return False
        values.append(value.astype(np.int64))
    result = folder(g, op, values)
    if result is None or result.size > ELEMENTS_MAX:
        return False
    if g.output_tensor(op).type == TensorType.INT32 and result.size and abs(result).max() > 2**31 - 1:
        return False
    g.fold(op, 0, result)
    return True


SHAPE, RANK = 77, 110


def _shape_of(g: SubgraphWriter, op: TfliteOperator) -> tuple[int, ...] | None:
    tensor = g.input_tensor(op, 0)
    if tensor.dimensions == ():
        return ()
    operand = g.input(op, 0)
    # The operand of a tensor with more axes has some of them merged.
    shape = tensor.dimensions if len(tensor.dimensions) > OPERAND_RANK_MAX else g.dimensions(operand)
    return shape if is_known(shape) or op.code == RANK else None


def _fits(value: Array) -> bool:
    return value.size == 0 or bool(abs(value).max() < 2**31)


def _binary(function: Callable[[Array, Array], Array], options: str) -> Folder:
    def folder(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
        if len(values) != 2 or op.integer(options, "fused_activation_function"):
            return None
        # Products of 32-bit numbers fit 64 bits, so nothing wraps around before the result is checked.
        if not all(map(_fits, values)) or not _broadcast(values):
            return None
        return function(values[0], values[1])

    return folder


def _broadcast(values: list[Array]) -> bool:
    try:
        return math.prod(np.broadcast_shapes(*(v.shape for v in values))) <= ELEMENTS_MAX
    except ValueError:
        return False


def _strided_slice(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
    table = "StridedSliceOptions"
    if len(values) != 4 or any(op.integer(table, n) for n in ("ellipsis_mask", "new_axis_mask", "offset")):
        return None
    data, *lists = values
    if any(v.shape != (data.ndim,) for v in lists) or not lists[2].all():
        return None
    masks = [op.integer(table, n) for n in ("begin_mask", "end_mask", "shrink_axis_mask")]
    index: list[int | slice] = []
    for axis, (begin, end, stride) in enumerate(np.stack(lists, axis=1).tolist()):
        bit = 1 << axis
        if masks[2] & bit:
            if not -data.shape[axis] <= begin < data.shape[axis]:
                return None
            index.append(begin)
        else:
            index.append(slice(None if masks[0] & bit else begin, None if masks[1] & bit else end, stride))
    return np.asarray(data[tuple(index)])


def _gather(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
    data, indices = values[0], values[-1]
    if len(values) != 2 or data.ndim != 1 or op.integer("GatherOptions", "batch_dims"):
        return None
    if indices.size and not (indices.min() >= 0 and indices.max() < data.size):
        return None
    return np.asarray(data[indices])


def _join(table: str) -> Folder:
    def folder(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
        rank = 0 if table == "PackOptions" else 1
        if any(v.ndim != rank for v in values) or op.integer(table, "axis") not in (0, -1):
            return None
        return np.concatenate([v.reshape(-1) for v in values])

    return folder


def _reduce_prod(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
    data, axes = values[0], values[-1]
    if len(values) != 2 or data.ndim != 1 or axes.reshape(-1).tolist() not in ([0], [-1]):
        return None
    product = math.prod(data.tolist())
    if abs(product) >= 2**31:
        return None
    return np.array([product] if op.integer("ReducerOptions", "keep_dims") else product, dtype=np.int64)


def _reshaped(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
    shape = g.output_tensor(op).dimensions
    return values[0].reshape(shape) if math.prod(shape) == values[0].size else None


def _same(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
    return values[0]


def _range(g: SubgraphWriter, op: TfliteOperator, values: list[Array]) -> Array | None:
    if len(values) != 3 or any(v.size != 1 for v in values):
        return None
    start, limit, delta = (int(v.reshape(())) for v in values)
    if delta == 0 or len(range(start, limit, delta)) > ELEMENTS_MAX:
        return None
    return np.arange(start, limit, delta, dtype=np.int64)


FOLDERS: dict[int, Folder] = {
    0: _binary(np.add, "AddOptions"),
    2: _join("ConcatenationOptions"),
    18: _binary(np.multiply, "MulOptions"),
    22: _reshaped,
    36: _gather,
    41: _binary(np.subtract, "SubOptions"),
    43: _reshaped,
    45: _strided_slice,
    53: _same,
    70: _reshaped,
    81: _reduce_prod,
    83: _join("PackOptions"),
    96: _range,
}
"""The operators that can be computed, by code: ADD, CONCATENATION, MUL, RESHAPE, GATHER, SUB, SQUEEZE, STRIDED_SLICE, CAST,
EXPAND_DIMS, REDUCE_PROD, PACK, RANGE."""

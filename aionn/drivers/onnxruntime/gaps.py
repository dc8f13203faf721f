"""Operators of the extension that ONNX Runtime computes otherwise than ONNX defines them, or not at all though it has a kernel.

Owns the conditions, none of which ONNX Runtime reports before an execution.

Source: ONNX's node tests on ONNX Runtime 1.32; the checks at the beginning of its kernels' computations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.schema import DataType

__all__ = ["gap_of"]

Constant = Callable[[int], Array | None]
"""The array of an input, by its place; None if it is omitted or not constant."""


def _at(kinds: Sequence[ValueType | None], place: int) -> ValueType | None:
    """The type of an input or an output; None if it is omitted."""
    return kinds[place] if place < len(kinds) else None


def _attention(record: Record, constant: Constant) -> str | None:
    mask = _at(record.inputs, 3)
    has_infinities = record.attributes.get("is_causal") or (
        mask is not None and mask.data_type == DataType.BOOL
    )
    if has_infinities and _at(record.outputs, 3) is not None:
        return "its products have the lowest float32 where a mask has -infinity"
    if _at(record.inputs, 4) is not None and _at(record.outputs, 1) is None:
        return "past keys without present ones"
    return None


def _zero_point(place: int) -> Callable[[Record, Constant], str | None]:
    """The gap of an operator that has one zero point where ONNX allows several."""

    def gap(record: Record, constant: Constant) -> str | None:
        kind = _at(record.inputs, place)
        return None if kind is None or kind.shape in ((), (1,)) else "a zero point for each row or channel"

    return gap


def _quantised_convolution(record: Record, constant: Constant) -> str | None:
    if _zero_point(5)(record, constant) is None:
        return None
    zero_points = constant(5)
    is_one = zero_points is not None and (zero_points == zero_points.reshape(-1)[:1]).all()
    return None if is_one else "zero points of channels that differ"


def _unpooling(record: Record, constant: Constant) -> str | None:
    if _at(record.inputs, 2) is not None:
        return "indexes are taken for those of the shape without output_shape"
    return None


def _reduction(record: Record, constant: Constant) -> str | None:
    kind = record.inputs[0]
    if kind is None or kind.data_type != DataType.BOOL:
        return None
    if kind.shape is None or any(extent <= 0 for extent in kind.shape):  # -1: only the execution knows it.
        return "truth values without elements"
    return None


def _resizing(record: Record, constant: Constant) -> str | None:
    if record.attributes.get("coordinate_transformation_mode") != "align_corners":
        return None
    kind, given = record.inputs[0], _at(record.inputs, 2)
    if given is None or given.shape == (0,):
        return None
    scales = constant(2)
    if scales is None or kind is None or kind.shape is None or len(kind.shape) != scales.size:
        return "corners by scales that are not known"
    extents = np.asarray(kind.shape) * scales.astype(np.float64)
    return "corners by scales that give fractions of elements" if (extents % 1).any() else None


_GAPS: Mapping[str, Callable[[Record, Constant], str | None]] = {
    "Attention": _attention,
    "ConvInteger": _zero_point(3),
    "MatMulInteger": _zero_point(2),
    "MaxUnpool": _unpooling,
    "QLinearConv": _quantised_convolution,
    "QLinearMatMul": _zero_point(2),
    "ReduceMax": _reduction,
    "ReduceMin": _reduction,
    "Resize": _resizing,
}


def gap_of(op_type: str, record: Record, constant: Constant) -> str | None:
    """Why ONNX Runtime cannot be given an application of an operator; None if it can."""
    gap = _GAPS.get(op_type)
    return None if gap is None else gap(record, constant)

"""Operators of the extension that ONNX Runtime computes otherwise than ONNX defines them, or not at all though it has a kernel.

Owns the conditions, none of which ONNX Runtime reports before an execution.

Source: ONNX's node tests on ONNX Runtime 1.32, and on 1.31.1 with CUDA; the checks at the beginning of its kernels' computations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.schema import DataType

__all__ = ["foreign_gap_of", "gap_of"]

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


def _may_be_empty(kind: ValueType | None) -> bool:
    """Whether a value may have no elements; -1 is an extent that only the execution knows."""
    return kind is None or kind.shape is None or any(extent <= 0 for extent in kind.shape)


def _may_have_one_element(kind: ValueType | None) -> bool:
    """Whether a channel of a value of several images may have one element alone."""
    if kind is None or kind.shape is None or len(kind.shape) < 3:
        return True
    images, _, *extents = kind.shape
    return images != 1 and all(extent in (1, -1) for extent in extents)


def _reduction(record: Record, constant: Constant) -> str | None:
    kind = record.inputs[0]
    if kind is None or kind.data_type != DataType.BOOL:
        return None
    return "truth values without elements" if _may_be_empty(kind) else None


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


def _windows(record: Record, weights: int | None) -> list[tuple[int, int, int]]:
    """The extent, stride and dilation of the windows along each axis.

    Args:
        record: Of a convolution or a pooling.
        weights: The place of the input that has the extents where the operator does not state them; None if it always does.

    Returns:
        Nothing for the padding that the operator states, or where the extents are not known.
    """
    stated = record.attributes
    if not str(stated.get("auto_pad", "NOTSET")).startswith("SAME"):
        return []
    extents = stated.get("kernel_shape")
    if extents is None and weights is not None:
        kind = _at(record.inputs, weights)
        extents = None if kind is None or kind.shape is None else kind.shape[2:]
    if not extents:
        return []
    ones = [1] * len(extents)
    return list(zip(extents, stated.get("strides") or ones, stated.get("dilations") or ones, strict=True))


def _pooling(record: Record, constant: Constant) -> str | None:
    windows = _windows(record, None)
    if any(dilation > 1 for _, _, dilation in windows):
        return "the padding SAME is that of windows without dilation"
    if any(extent < stride for extent, stride, _ in windows):
        return "the padding SAME of windows that are smaller than their strides"
    return None


def _convolution(weights: int) -> Callable[[Record, Constant], str | None]:
    def gap(record: Record, constant: Constant) -> str | None:
        windows = _windows(record, weights)
        return "the padding SAME of dilated windows" if any(d > 1 for _, _, d in windows) else None

    return gap


def _transposed_convolution(record: Record, constant: Constant) -> str | None:
    windows = _windows(record, 1)
    if any((extent - 1) * dilation + 1 < stride for extent, stride, dilation in windows):
        return "the padding SAME of windows that are smaller than their strides"
    return None


def _either(
    first: Callable[[Record, Constant], str | None], second: Callable[[Record, Constant], str | None]
) -> Callable[[Record, Constant], str | None]:
    return lambda record, constant: first(record, constant) or second(record, constant)


_GAPS: Mapping[str, Callable[[Record, Constant], str | None]] = {
    "Attention": _attention,
    "AveragePool": _pooling,
    "Conv": _convolution(1),
    "ConvInteger": _either(_zero_point(3), _convolution(1)),
    "ConvTranspose": _transposed_convolution,
    "LpPool": _pooling,
    "MatMulInteger": _zero_point(2),
    "MaxPool": _pooling,
    "MaxUnpool": _unpooling,
    "QLinearConv": _either(_quantised_convolution, _convolution(3)),
    "QLinearMatMul": _zero_point(2),
    "ReduceMax": _reduction,
    "ReduceMin": _reduction,
    "Resize": _resizing,
}


def gap_of(op_type: str, record: Record, constant: Constant) -> str | None:
    """The reason not to give ONNX Runtime an application of an operator; None if it takes that."""
    gap = _GAPS.get(op_type)
    return None if gap is None else gap(record, constant)


_INDEXES = {
    "Gather": 1, "GatherElements": 1, "GatherND": 1, "MaxUnpool": 1, "Scatter": 1, "ScatterElements": 1, "ScatterND": 1,
    "TensorScatter": 2,
}  # fmt: skip
"""Operators that read or write at the indexes of an input, and the place of that."""


def foreign_gap_of(op_type: str, record: Record, constant: Constant) -> str | None:
    """As ``gap_of``, on other providers than the CPU: an index out of range reads or writes elsewhere there, or is ignored."""
    place = _INDEXES.get(op_type)
    if place is not None and _at(record.inputs, place) is not None and constant(place) is None:
        return "indexes that are not constants: one out of range is not reported"
    if op_type == "Attention" and _at(record.outputs, 3) is not None:
        return "its products are computed on the CPU alone"
    if op_type in ("ReduceLogSum", "ReduceLogSumExp") and _may_be_empty(record.inputs[0]):
        return "logarithms of no elements, which are 0 on CUDA"
    if op_type == "InstanceNormalization" and _may_have_one_element(record.inputs[0]):
        return "one element for each channel of several images, which is NaN on CUDA"
    return gap_of(op_type, record, constant)

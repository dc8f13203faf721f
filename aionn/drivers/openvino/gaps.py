"""Operators of the extension that OpenVINO computes otherwise than ONNX defines them, or not at all though it has a kernel.

Owns the conditions, none of which OpenVINO reports before an execution.

Source: ONNX's node tests on OpenVINO 2026.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aionn.drivers.kit.arguments import Array
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.schema import DataType

__all__ = ["gap_of"]

Constant = Callable[[int], Array | None]
"""The array of an input, by its place; None if it is omitted or not constant."""

_ALWAYS = {
    "DFT": "it takes the axis and the sides of another version",
    "DynamicQuantizeLinear": "halves are rounded otherwise",
    "NonMaxSuppression": "boxes that overlap as much as the threshold are dropped",
    "TopK": "equal numbers are in another order",
}

_MASK = 3
"""The place of an attention's mask, its last input without a cache."""

_ATTENTION = frozenset(("is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "softmax_precision"))

_SHRINKING = ("antialias", "exclude_outside")


def _at(record: Record, place: int) -> ValueType | None:
    """The type of an input; None if it is omitted."""
    return record.inputs[place] if place < len(record.inputs) else None


def _attention(record: Record, constant: Constant) -> str | None:
    if any(kind is not None for kind in record.inputs[_MASK + 1 :]) or len(record.outputs) > 1:
        return "a cache, lengths of sequences, or products as an output"
    stated = {name for name, value in record.attributes.items() if value}
    return None if stated <= _ATTENTION else "a window"


def _shift(record: Record, constant: Constant) -> str | None:
    kind = record.inputs[0]
    return "numbers with a sign" if kind is not None and kind.data_type == DataType.INT8 else None


def _grid(record: Record, constant: Constant) -> str | None:
    kind = record.inputs[0]
    return None if kind is not None and kind.shape is not None and len(kind.shape) == 4 else "volumes"


def _recurrent(record: Record, constant: Constant) -> str | None:
    return "the batch before the steps" if record.attributes.get("layout") else None


def _quantising(record: Record, constant: Constant) -> str | None:
    return None if constant(1) is not None else "a scale that is computed, whose halves are rounded otherwise"


def _resizing(record: Record, constant: Constant) -> str | None:
    stated = record.attributes
    if any(stated.get(name) for name in _SHRINKING):
        return "weights of several elements"
    if stated.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "extents that keep their ratio"
    by_scales = _at(record, 3) is None
    return (
        "corners by scales"
        if by_scales and stated.get("coordinate_transformation_mode") == "align_corners"
        else None
    )


def _regions(record: Record, constant: Constant) -> str | None:
    return "the largest of products" if record.attributes.get("mode") == "max" else None


def _tiling(record: Record, constant: Constant) -> str | None:
    return None if constant(1) is not None else "repetitions that are computed"


_GAPS: Mapping[str, Callable[[Record, Constant], str | None]] = {
    "Attention": _attention,
    "BitShift": _shift,
    "GRU": _recurrent,
    "GridSample": _grid,
    "LSTM": _recurrent,
    "QuantizeLinear": _quantising,
    "RNN": _recurrent,
    "Resize": _resizing,
    "RoiAlign": _regions,
    "Tile": _tiling,
}


def gap_of(op_type: str, record: Record, constant: Constant) -> str | None:
    """The reason not to give OpenVINO an application of an operator; None if it takes that."""
    if op_type in _ALWAYS:
        return _ALWAYS[op_type]
    shapes = [kind.shape for kind in (*record.inputs, *record.outputs) if kind is not None]
    if any(shape is not None and 0 in shape for shape in shapes):
        return "values without elements"
    gap = _GAPS.get(op_type)
    return None if gap is None else gap(record, constant)

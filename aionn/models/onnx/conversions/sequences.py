"""Sequences of values within a graph: a list of known length at import, of which nothing is left in the model.

Exporters write one where a program collects results in a list. Positions must be constants.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from aionn.models.onnx.conversions.control_flow import (
    UNROLLED_NODES_MAX,
    Around,
    Held,
    Inputs,
    TensorList,
    constant_of,
    stacked,
)
from aionn.models.onnx.extending import AnyTensor
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.tensors import Inexpressible

__all__ = ["SEQUENCES"]

REFERENCE_BYTES = 8
"""An entry of a sequence."""


def _listing(around: Around, items: tuple[AnyTensor, ...]) -> TensorList:
    """A sequence. Each costs memory, since the values of all nodes are kept until the import ends."""
    around.charge(REFERENCE_BYTES * len(items))
    return TensorList(items)


def _listed(op: Operator, inputs: Inputs) -> tuple[AnyTensor, ...]:
    value = inputs[0] if inputs else None
    if not isinstance(value, TensorList):
        _refuse(op, 0, "a sequence")
    return value.items


def _tensor(op: Operator, inputs: Inputs, position: int) -> AnyTensor:
    value = inputs[position] if position < len(inputs) else None
    if value is None or isinstance(value, TensorList):
        _refuse(op, position, "a tensor")
    return value


def _refuse(op: Operator, position: int, expected: str) -> NoReturn:
    op.refuse(f"input {position}", expected, "another value")


def _position(op: Operator, inputs: Inputs, index: int, count: int, last: int, default: int) -> int:
    """A position from 0 to ``last``; a negative one counts from the end of ``count`` elements."""
    value = inputs[index] if index < len(inputs) else None
    if value is None:
        return default
    position = int(constant_of(op, value, "a position in a sequence"))
    if not -count <= position <= last:
        op.refuse("position", f"one from {-count} to {last}", position)
    return position + count if position < 0 else position


def _empty(around: Around, op: Operator, inputs: Inputs) -> Held:
    op.ignore("dtype")
    return TensorList(())


def _construct(around: Around, op: Operator, inputs: Inputs) -> Held:
    return _listing(around, tuple(_tensor(op, inputs, position) for position in range(len(inputs))))


def _insert(around: Around, op: Operator, inputs: Inputs) -> Held:
    items = _listed(op, inputs)
    # The end is a position as well, but not one that counts from the end.
    at = _position(op, inputs, 2, len(items), len(items), len(items))
    return _listing(around, (*items[:at], _tensor(op, inputs, 1), *items[at:]))


def _erase(around: Around, op: Operator, inputs: Inputs) -> Held:
    items = _listed(op, inputs)
    if not items:
        _refuse(op, 0, "a sequence with elements")
    at = _position(op, inputs, 1, len(items), len(items) - 1, len(items) - 1)
    return _listing(around, (*items[:at], *items[at + 1 :]))


def _at(around: Around, op: Operator, inputs: Inputs) -> Held:
    items = _listed(op, inputs)
    if not items:
        _refuse(op, 0, "a sequence with elements")
    return items[_position(op, inputs, 1, len(items), len(items) - 1, 0)]


def _length(around: Around, op: Operator, inputs: Inputs) -> Held:
    return around.constant(np.array(len(_listed(op, inputs)), np.int64))


def _joined(around: Around, op: Operator, inputs: Inputs) -> Held:
    items, axis = _listed(op, inputs), op.integer("axis")
    if not items:
        raise Inexpressible("a sequence without elements")
    if op.integer("new_axis", 0):
        return stacked(around, items, axis)
    return items[0] if len(items) == 1 else around.apply("Concat", items, axis=axis)


def _split(around: Around, op: Operator, inputs: Inputs) -> Held:
    value = _tensor(op, inputs, 0)
    if value.shape is None or any(extent < 0 for extent in value.shape):
        raise Inexpressible("a value whose extents are not known")
    axis = op.axis(op.integer("axis", 0), len(value.shape))
    extent, keeps = value.shape[axis], op.integer("keepdims", 1)
    if extent > UNROLLED_NODES_MAX:
        raise Inexpressible(f"a sequence of up to {extent} values")
    if not op.has(1):
        if not keeps:
            return TensorList(
                tuple(
                    around.apply("Gather", [value, around.constant(np.array(i, np.int64))], axis=axis)
                    for i in range(extent)
                )
            )
        sizes = [1] * extent
    else:
        sizes = op.numbers(1, "the sizes")
        if op.input(1).rank == 0:
            size = sizes[0]
            if size < 1:
                op.refuse("input 1 (the size)", "1 or more", size)
            sizes = [min(size, extent - start) for start in range(0, extent, size)]
    if any(size < 0 for size in sizes) or sum(sizes) != extent:
        op.refuse("input 1 (the sizes)", f"sizes whose sum is {extent}", sizes[:8])
    ends = np.cumsum(sizes, dtype=np.int64)
    return TensorList(
        tuple(
            around.apply(
                "Slice",
                [value, *(around.constant(np.array([n], np.int64)) for n in (end - size, end, axis))],
            )
            for size, end in zip(sizes, ends.tolist(), strict=True)
        )
    )


SEQUENCES: Mapping[str, Callable[[Around, Operator, Inputs], Held]] = {
    "ConcatFromSequence": _joined,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
}
"""The function that returns the output, by operator."""

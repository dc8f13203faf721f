"""Operators of transformers that are written as other operators of ONNX.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import numpy as np

from aionn.hal import OperationType
from aionn.models.onnx.conversions.elementwise import arithmetic
from aionn.models.onnx.conversions.movement import concat, reshape, slice_, transposed, unsqueeze
from aionn.models.onnx.conversions.places import gather
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import Tensor
from aionn.models.onnx.writer import GraphWriter

__all__ = ["rotary_embedding"]


class _Composition:
    """Writes an operator as other operators of ONNX."""

    def __init__(self, g: GraphWriter, op: Operator) -> None:
        self._g = g
        self._op = op

    def call(self, convert: Convert, op_type: str, inputs: list[Tensor], **attributes: int) -> Tensor:
        result = convert(self._g, self._op.derived(op_type, inputs, **attributes))
        assert isinstance(result, Tensor), "operators with one output"
        return result

    def numbers(self, *numbers: int) -> Tensor:
        return self._g.constant(np.array(numbers, np.int64))

    def part(self, x: Tensor, start: int, end: int, step: int = 1) -> Tensor:
        """Elements along the last axis."""
        lists = [self.numbers(number) for number in (start, end, x.rank - 1, step)]
        return self.call(slice_, "Slice", [x, *lists])

    def combined(self, kind: OperationType, a: Tensor, b: Tensor) -> Tensor:
        return self.call(arithmetic(kind), kind.name, [a, b])


def rotary_embedding(g: GraphWriter, op: Operator) -> Tensor:
    """Rotates pairs of elements of each head by the angles of their position."""
    given = op.input(0)
    c = _Composition(g, op)
    heads, is_interleaved = op.integer("num_heads", 0), bool(op.integer("interleaved", 0))
    rotated = op.integer("rotary_embedding_dim", 0)
    if given.rank == 3 and heads > 0 and given.shape[2] % heads == 0:
        batch, time, size = given.shape
        x = c.call(reshape, "Reshape", [given, c.numbers(batch, time, heads, size // heads)], allowzero=0)
    elif given.rank == 4:
        x = transposed(g, given, (0, 2, 1, 3))
    else:
        op.refuse("input 0", "four axes, or three and a number of heads", list(given.shape))
    size = x.shape[3]
    rotated = rotated or size
    if rotated > size or rotated % 2:
        op.refuse("attribute 'rotary_embedding_dim'", f"an even number up to {size}", rotated)
    caches = [op.input(1), op.input(2)]
    if op.has(3):
        caches = [c.call(gather, "Gather", [cache, op.input(3)], axis=0) for cache in caches]
    cos, sin = (c.call(unsqueeze, "Unsqueeze", [c.part(t, 0, rotated // 2), c.numbers(2)]) for t in caches)
    turning = c.part(x, 0, rotated)
    if is_interleaved:
        a, b = c.part(turning, 0, rotated, 2), c.part(turning, 1, rotated, 2)
    else:
        a, b = c.part(turning, 0, rotated // 2), c.part(turning, rotated // 2, rotated)
    mul, sub, add = OperationType.MUL, OperationType.SUB, OperationType.ADD
    real = c.combined(sub, c.combined(mul, cos, a), c.combined(mul, sin, b))
    imaginary = c.combined(add, c.combined(mul, sin, a), c.combined(mul, cos, b))
    if is_interleaved:
        columns = [c.call(unsqueeze, "Unsqueeze", [t, c.numbers(4)]) for t in (real, imaginary)]
        pairs = c.call(concat, "Concat", columns, axis=4)
        result = c.call(reshape, "Reshape", [pairs, c.numbers(*turning.shape)], allowzero=0)
    else:
        result = c.call(concat, "Concat", [real, imaginary], axis=3)
    if rotated < size:
        result = c.call(concat, "Concat", [result, c.part(x, rotated, size)], axis=3)
    if given.rank == 4:
        return transposed(g, result, (0, 2, 1, 3))
    return c.call(reshape, "Reshape", [result, c.numbers(*given.shape)], allowzero=0)

"""Operators of ONNX that the importer has to express by several operations, written as one node again.

Owns their compositions. An operation that ends a composition is written as the node, and what leads to it as well; nodes that
nothing reads are dropped at the end, so that a value within a composition may have other readers.

Invariant: the node's result differs from the composition's by no more than 1e-5 of the largest value.

Source: ``aionn.models.onnx.conversions``, which writes these compositions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.drivers.kit.onnx.graph import Graph
from aionn.hal import OperandType, Operation, OperationType

__all__ = ["ERF_ABOVE", "ERF_BELOW", "Patterns"]

ERF_ABOVE = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
ERF_BELOW = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip
"""Coefficients of the importer's error function: x * P(x ** 2) / Q(x ** 2) from -4 to 4, highest powers first."""

_ENDS = (OperationType.ADD, OperationType.MUL, OperationType.DIV)
_FUSED = (OperationType.ADD, OperationType.SUB, OperationType.MUL, OperationType.DIV)


class Patterns:
    """The compositions in a model.

    Args:
        g: The graph that is being lowered.
    """

    def __init__(self, g: Graph) -> None:
        self._g = g
        self._writers = {index: op for op in g.model.main.operations for index in op.outputs}

    def write(self, op: Operation) -> bool:
        """Writes the operation as the end of a composition, if it is one."""
        if op.type not in _ENDS or len(op.outputs) != 1:
            return False
        g, output = self._g, op.outputs[0]
        if g.model.main.operands[output].type != OperandType.TENSOR_FLOAT32:
            return False
        return self._write_erf(output) or self._write_gelu(output) or self._write_normalization(output)

    def _write_erf(self, output: int) -> bool:
        source = self._erf(output)
        if source is None:
            return False
        g = self._g
        value = g.value(source)
        order = g.common_order(value)
        g.set(g.value(output), g.emit("Erf", [g.name(value, order)]), order)
        return True

    def _write_gelu(self, output: int) -> bool:
        found = self._gelu(output)
        if found is None:
            return False
        g, (source, approximate) = self._g, found
        value = g.value(source)
        order = g.common_order(value)
        g.set(g.value(output), g.emit("Gelu", [g.name(value, order)], approximate=approximate), order)
        return True

    def _write_normalization(self, output: int) -> bool:
        g, end = self._g, output
        factors: dict[OperationType, int] = {}
        for kind in (OperationType.ADD, OperationType.MUL):
            if self._normalized(output) is None and (factor := self._factor(output, kind)) is not None:
                output, factors[kind] = factor
        found = self._normalized(output)
        if found is None:
            return False
        source, epsilon = found
        value = g.value(source)
        scale, bias = factors.get(OperationType.MUL), factors.get(OperationType.ADD)
        if scale is None:
            g.known.charge(4 * value.shape[-1])
            factors_name = g.constant(np.ones(value.shape[-1], np.float32))
        else:
            factors_name = g.name(g.value(scale))
        inputs = [g.name(value), factors_name]
        if bias is not None:
            inputs.append(g.name(g.value(bias)))
        g.set(g.value(end), g.emit("LayerNormalization", inputs, axis=-1, epsilon=epsilon))
        return True

    def _factor(self, operand: int, kind: OperationType) -> tuple[int, int] | None:
        """The value and the factor for each element of its last axis, or the addend, that make an operand."""
        pair = self._pair(operand, kind)
        if pair is None:
            return None
        shape = self._g.known.shapes[pair[0]]
        return pair if shape is not None and self._g.known.shapes[pair[1]] == shape[-1:] else None

    # Compositions

    def _normalized(self, operand: int) -> tuple[int, float] | None:
        """The rows that an operand is the normalisation of, and epsilon."""
        centred, inverse = self._pair(operand, OperationType.MUL) or (None, None)
        if centred is None or inverse is None:
            return None
        one, root = self._pair(inverse, OperationType.DIV) or (None, None)
        if one is None or root is None or self._number(one) != 1:
            return None
        (spread,) = self._inputs(root, OperationType.SQRT) or (None,)
        variance, epsilon = (
            (None, None) if spread is None else self._pair(spread, OperationType.ADD) or (None, None)
        )
        if variance is None or epsilon is None or (small := self._number(epsilon)) is None:
            return None
        square = self._mean(variance)
        if square is None or self._pair(square, OperationType.MUL) != (centred, centred):
            return None
        source, mean = self._pair(centred, OperationType.SUB) or (None, None)
        if source is None or mean is None or self._mean(mean) != source:
            return None
        return source, small

    def _mean(self, operand: int) -> int | None:
        """The value that an operand is the mean of along its last axis, which is kept."""
        op = self._writers.get(operand)
        if op is None or op.type != OperationType.MEAN:
            return None
        shape, axes = self._g.known.shapes[op.inputs[0]], self._g.known.value(op.inputs[1])
        if shape is None or axes is None or axes.reshape(-1).tolist() not in ([len(shape) - 1], [-1]):
            return None
        kept = self._g.known.value(op.inputs[2])
        return op.inputs[0] if kept is not None and int(kept.reshape(())) > 0 else None

    def _gelu(self, operand: int) -> tuple[int, str] | None:
        """The value that an operand is the Gelu of, and the form of approximation."""
        half, more = self._pair(operand, OperationType.MUL) or (None, None)
        if half is None or more is None:
            return None
        source = self._scaled(half, 0.5)
        curve, one = self._pair(more, OperationType.ADD) or (None, None)
        if source is None or curve is None or one is None or self._number(one) != 1:
            return None
        inner = self._erf(curve)
        if inner is not None:
            return (source, "none") if self._scaled(inner, math.sqrt(0.5)) == source else None
        (argument,) = self._inputs(curve, OperationType.TANH) or (None,)
        total = None if argument is None else self._scaled(argument, math.sqrt(2 / math.pi))
        first, cubic = (None, None) if total is None else self._pair(total, OperationType.ADD) or (None, None)
        if first != source or cubic is None:
            return None
        cube = self._scaled(cubic, 0.044715)
        square, last = (None, None) if cube is None else self._pair(cube, OperationType.MUL) or (None, None)
        if last != source or square is None or self._pair(square, OperationType.MUL) != (source, source):
            return None
        return source, "tanh"

    def _erf(self, operand: int) -> int | None:
        """The value that an operand is the error function of."""
        above, below = self._pair(operand, OperationType.DIV) or (None, None)
        if above is None or below is None:
            return None
        near, polynomial = self._pair(above, OperationType.MUL) or (None, None)
        if near is None or polynomial is None:
            return None
        square = self._polynomial(polynomial, ERF_ABOVE)
        if square is None or square != self._polynomial(below, ERF_BELOW):
            return None
        if self._pair(square, OperationType.MUL) != (near, near):
            return None
        low, four = self._inputs(near, OperationType.MINIMUM) or (None, None)
        source, minus_four = (
            (None, None) if low is None else self._inputs(low, OperationType.MAXIMUM) or (None, None)
        )
        if source is None or four is None or minus_four is None:
            return None
        return source if (self._number(minus_four), self._number(four)) == (-4, 4) else None

    def _polynomial(self, operand: int, coefficients: Sequence[float]) -> int | None:
        """The value that an operand is a polynomial of."""
        variables = set()
        for coefficient in reversed(coefficients[1:]):
            product, constant = self._pair(operand, OperationType.ADD) or (None, None)
            if product is None or constant is None or self._number(constant) != np.float32(coefficient):
                return None
            variable, rest = self._pair(product, OperationType.MUL) or (None, None)
            if variable is None or rest is None:
                return None
            variables.add(variable)
            operand = rest
        if self._number(operand) != np.float32(coefficients[0]) or len(variables) != 1:
            return None
        return variables.pop()

    # Operands

    def _inputs(self, operand: int, kind: OperationType) -> tuple[int, ...] | None:
        """The inputs of the operation that writes an operand, if it is of this kind and has no activation."""
        op = self._writers.get(operand)
        if op is None or op.type != kind:
            return None
        if kind not in _FUSED:
            return tuple(op.inputs)
        activation = self._g.known.value(op.inputs[2])
        if activation is None or int(activation.reshape(())) != 0:
            return None
        return tuple(op.inputs[:2])

    def _pair(self, operand: int, kind: OperationType) -> tuple[int, int] | None:
        inputs = self._inputs(operand, kind)
        return None if inputs is None else (inputs[0], inputs[1])

    def _number(self, operand: int) -> float | None:
        """The number of a constant that has one element."""
        array = self._g.known.value(operand)
        return float(array.reshape(())) if array is not None and array.size == 1 else None

    def _scaled(self, operand: int, factor: float) -> int | None:
        """The value that an operand is a multiple of."""
        pair = self._pair(operand, OperationType.MUL)
        if pair is None or self._number(pair[1]) != np.float32(factor):
            return None
        return pair[0]

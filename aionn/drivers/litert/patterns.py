"""Compositions that the importer makes of one TensorFlow Lite operator, recognised and written as that operator again.

Owns those over 8-bit values: the mean with another scale (a depthwise convolution with a constant filter), the fully connected
layer with scales per channel (one layer for each unit side by side, or a 1 x 1 convolution), and changes of 8-bit type (DEQUANTIZE,
QUANTIZE) or of scale, by QUANTIZE or RELU (a depthwise convolution with the filter [1]); and formulas over floats (``FORMULAS``),
which stand for COS, GELU and others. With them an imported file comes back as it was, and LiteRT gives it its own bytes.

Invariants:
1. Values between the composition's operations are read by nothing else and are not outputs.
2. The operator computes what the composition does; where LiteRT rounds otherwise, by no more than 1 of the stored numbers.

Source: ``aionn.models.tflite.conversions.layers`` and ``.elementwise``, which make them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from aionn.drivers.litert.flatbuffer_writer import Array, Quantization
from aionn.drivers.litert.graph import Graph
from aionn.drivers.litert.lowering_elementwise import reduce_axes
from aionn.hal import (
    FusedActivation,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Padding,
    Subgraph,
    constant_array,
)
from aionn.models.tflite.rounding import mean_filter

__all__ = ["Pattern", "find_patterns"]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
_EIGHT_BITS = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)


class Term(NamedTuple):
    """An operation in a formula; its inputs are terms, numbers (constants all of whose elements are that number) or ``X``."""

    type: OperationType
    inputs: tuple[Term | float | str, ...]


X = "x"
"""The formula's argument."""


def _term(kind: OperationType, *inputs: Term | float | str) -> Term:
    return Term(kind, inputs)


def _binary(kind: OperationType, a: Term | float | str, b: Term | float | str) -> Term:
    return Term(kind, (a, b, 0.0))  # Without an activation.


def _ceil() -> Term:
    o = OperationType
    return _term(o.NEG, _term(o.FLOOR, _term(o.NEG, X)))


def _cos() -> Term:
    o = OperationType
    sine = _term(o.SIN, _binary(o.MUL, X, 0.5))
    return _binary(o.SUB, 1.0, _binary(o.MUL, _binary(o.MUL, sine, sine), 2.0))


def _gelu() -> Term:
    o = OperationType
    cube = _binary(o.MUL, _binary(o.MUL, _binary(o.MUL, X, X), X), 0.044715)
    curve = _term(o.TANH, _binary(o.MUL, _binary(o.ADD, X, cube), math.sqrt(2 / math.pi)))
    return _binary(o.MUL, _binary(o.MUL, X, 0.5), _binary(o.ADD, curve, 1.0))


def _round() -> Term:
    o = OperationType
    magnitude = _term(o.ABS, X)
    rounded = _binary(o.SUB, _binary(o.ADD, magnitude, 2.0**23), 2.0**23)
    signed = _term(o.SELECT, _term(o.LESS, X, 0.0), _term(o.NEG, rounded), rounded)
    return _term(o.SELECT, _term(o.LESS, magnitude, 2.0**23), signed, X)


def _sign() -> Term:
    o = OperationType
    lower = _term(o.SELECT, _term(o.LESS, X, 0.0), -1.0, X)
    return _term(o.SELECT, _term(o.GREATER, X, 0.0), 1.0, lower)


class Formula(NamedTuple):
    """A formula that stands for an operator of one input.

    Attributes:
        term: Its last operation.
        name: The operator.
        options: The table of its options; None means no options.
        values: An entry of the table.
    """

    term: Term
    name: str
    options: str | None = None
    values: tuple[tuple[str, bool], ...] = ()


FORMULAS = (
    Formula(_ceil(), "CEIL"),
    Formula(_cos(), "COS"),
    Formula(_gelu(), "GELU", "GeluOptions", (("approximate", True),)),
    Formula(_round(), "ROUND"),
    Formula(_sign(), "SIGN", "SignOptions"),
    Formula(_term(OperationType.RELU, _term(OperationType.RELU1, X)), "RELU_0_TO_1"),
)

_FORMULA_ENDS = frozenset(formula.term.type for formula in FORMULAS)


_RESCALED: dict[FusedActivation, tuple[str, str | None]] = {
    FusedActivation.NONE: ("QUANTIZE", "QuantizeOptions"),
    FusedActivation.RELU: ("RELU", None),
    FusedActivation.RELU1: ("RELU_N1_TO_1", None),
    FusedActivation.RELU6: ("RELU6", None),
}
"""The operator that a change of scale with an activation stands for, and the table of its options."""


class Pattern(NamedTuple):
    """The replacement of an operation: an operator, or nothing if the composition's last operation represents it."""

    write: Callable[[Graph], None]


def _nothing(g: Graph) -> None:
    """A part of a composition that is written elsewhere."""


def find_patterns(model: Model, subgraph: Subgraph) -> dict[int, Pattern]:
    """The compositions of a subgraph: what to write for each of their operations, by its index."""
    finder = _Finder(model, subgraph)
    found: dict[int, Pattern] = {}
    for index, operation in enumerate(subgraph.operations):
        if index in found:
            continue
        if operation.type in _FORMULA_ENDS:
            formula = finder.formula(index)
            if formula is not None:
                others, write_formula = formula
                found.update(dict.fromkeys(others, Pattern(_nothing)))
                found[index] = Pattern(write_formula)
                continue
        match operation.type:
            case OperationType.DEPTHWISE_CONV_2D:
                middle = finder.between_reshapes(index)
                write = None if middle is None else (finder.mean(middle) or finder.rescale(middle))
            case OperationType.CONCATENATION:
                columns = finder.columns(index)
                if columns is not None:
                    found.update(dict.fromkeys(columns, Pattern(_nothing)))
                    found[index] = Pattern(finder.side_by_side(columns, index))
                continue
            case OperationType.CONV_2D:
                middle = finder.between_reshapes(index)
                write = None if middle is None else finder.fully_connected(middle)
            case OperationType.QUANTIZE:
                source = finder.writer(operation.inputs[0])
                middle = None if source is None else Middle(source, index, index)
                write = None if middle is None else finder.shift(middle)
            case _:
                continue
        if write is not None and middle is not None:
            found.update(dict.fromkeys(middle[:2], Pattern(_nothing)))
            found[middle.last] = Pattern(write)
    return found


class Middle(NamedTuple):
    """The operations of a composition: what leads in, the work, what leads out."""

    first: int
    work: int
    last: int


class _Finder:
    """Looks at one subgraph."""

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        self.model = model
        self.subgraph = subgraph
        self._readers = Counter(i for o in subgraph.operations for i in o.inputs)
        self._readers.update(subgraph.output_indexes)
        self._writers = {i: n for n, o in enumerate(subgraph.operations) for i in o.outputs}
        self._reader = {i: n for n, o in enumerate(subgraph.operations) for i in o.inputs}

    def operation(self, index: int) -> Operation:
        return self.subgraph.operations[index]

    def operand(self, index: int) -> Operand:
        return self.subgraph.operands[index]

    def writer(self, operand: int) -> int | None:
        """The operation that alone writes an operand which one operation alone reads."""
        return self._writers.get(operand) if self._readers[operand] == 1 else None

    def formula(self, index: int) -> tuple[set[int], Callable[[Graph], None]] | None:
        """The operations before it in a formula that it ends, and what writes the operator; None where it ends none."""
        operation = self.operation(index)
        target = operation.outputs[0]
        if self.operand(target).type not in _FLOATS:
            return None
        for formula in FORMULAS:
            parts: set[int] = set()
            arguments: set[int] = set()
            if not self._is_term(operation.outputs[0], formula.term, parts, arguments) or len(arguments) != 1:
                continue
            (source,) = arguments
            shapes = [self.operand(i).dimensions for i in (source, target)]
            if shapes[0] != shapes[1] or not shapes[0] or 0 in shapes[0]:
                continue  # A constant may have repeated the argument.
            inner = {i for part in parts - {index} for i in self.operation(part).outputs}
            outside = (i for n, o in enumerate(self.subgraph.operations) if n not in parts for i in o.inputs)
            if inner.intersection((*outside, *self.subgraph.output_indexes)):
                continue

            def write(g: Graph, found: Formula = formula, source: int = source) -> None:
                g.emit(found.name, [g.value(source)], g.value(target), found.options, **dict(found.values))

            return parts - {index}, write
        return None

    def _is_term(self, operand: int, term: Term | float | str, parts: set[int], arguments: set[int]) -> bool:
        """Whether an operand has been computed by a term; adds the term's operations and the operand that stands for ``X``."""
        if isinstance(term, str):
            arguments.add(operand)
            return len(arguments) == 1
        if isinstance(term, float):
            known = self.operand(operand)
            if not known.is_constant:
                return False
            values = constant_array(self.model, known)
            return bool((values == values.dtype.type(term)).all())
        writer = self._writers.get(operand)
        if writer is None or self.operation(writer).type != term.type:
            return False
        parts.add(writer)
        inputs = self.operation(writer).inputs
        return len(inputs) == len(term.inputs) and all(
            self._is_term(i, t, parts, arguments) for i, t in zip(inputs, term.inputs, strict=True)
        )

    def scalars(self, operation: Operation, start: int) -> list[int] | None:
        """The constant scalars from an input on."""
        operands = [self.operand(i) for i in operation.inputs[start:]]
        if not all(o.is_constant for o in operands):
            return None
        return [int(constant_array(self.model, o).reshape(-1)[0]) for o in operands]

    def between_reshapes(self, index: int) -> Middle | None:
        """The operation with the RESHAPE before and the one after it."""
        work = self.operation(index)
        first = self.writer(work.inputs[0])
        output = work.outputs[0]
        if first is None or self._readers[output] != 1 or output not in self._reader:
            return None
        last = self._reader[output]
        kinds = (self.operation(first).type, self.operation(last).type)
        return Middle(first, index, last) if kinds == (OperationType.RESHAPE, OperationType.RESHAPE) else None

    def _ends(self, middle: Middle) -> tuple[int, int]:
        return self.operation(middle.first).inputs[0], self.operation(middle.last).outputs[0]

    def _plain_depthwise(self, middle: Middle) -> tuple[Operand, int, int] | None:
        """Filter operand, its only value and the only bias of a depthwise convolution of one multiplier and stride."""
        work = self.operation(middle.work)
        if (self.scalars(work, 3) or [])[:-1] != [Padding.VALID, 1, 1, 1]:
            return None
        pixels, filter_, bias = (self.operand(i) for i in work.inputs[:3])
        if (
            not (filter_.is_constant and bias.is_constant)
            or filter_.type not in _EIGHT_BITS
            or filter_.zero_point
        ):
            return None
        if filter_.dimensions[3:] != pixels.dimensions[3:]:
            return None
        weights, biases = constant_array(self.model, filter_), constant_array(self.model, bias)
        if (weights != weights.flat[0]).any() or (biases != biases.flat[0]).any():
            return None
        return filter_, int(weights.flat[0]), int(biases.flat[0])

    def pixels(self, middle: Middle) -> Operand:
        """The data of a convolution."""
        return self.operand(self.operation(middle.work).inputs[0])

    def activation(self, middle: Middle) -> FusedActivation:
        """The activation of a convolution without further arguments."""
        return FusedActivation((self.scalars(self.operation(middle.work), 3) or [0])[-1])

    def mean(self, middle: Middle) -> Callable[[Graph], None] | None:
        """MEAN with another scale."""
        plain = self._plain_depthwise(middle)
        source, target = self._ends(middle)
        a, b = self.operand(source), self.operand(target)
        if plain is None or a.type not in _EIGHT_BITS or a.type != b.type:
            return None
        filter_, weight, bias = plain
        if filter_.dimensions[1:] != self.pixels(middle).dimensions[1:] or self.activation(middle):
            return None
        count, depth = filter_.dimensions[1], filter_.dimensions[3]
        rule = mean_filter(a, b, count)
        if (rule.weight, np.float32(rule.scale), rule.bias) != (weight, np.float32(filter_.scale), bias):
            return None
        place = _axes_of(a.dimensions, b.dimensions, count, depth)
        if place is None:
            return None
        axes, keep = place

        def write(g: Graph) -> None:
            reduce_axes(g, "MEAN", g.value(source), axes, g.value(target), is_kept=keep)

        return write

    def rescale(self, middle: Middle) -> Callable[[Graph], None] | None:
        """QUANTIZE from one scale to another, or RELU and the like whose result has another scale."""
        plain = self._plain_depthwise(middle)
        source, target = self._ends(middle)
        if plain is None or self.operand(source).dimensions != self.operand(target).dimensions:
            return None
        filter_, weight, bias = plain
        if (filter_.dimensions, weight, filter_.scale, bias) != ((1, 1, 1, 1), 1, 1.0, 0):
            return None
        name, options = _RESCALED[self.activation(middle)]
        return lambda g: g.emit(name, [g.value(source)], g.value(target), options)

    def shift(self, middle: Middle) -> Callable[[Graph], None] | None:
        """QUANTIZE between the 8-bit types with one scale."""
        first = self.operation(middle.first)
        source, target = first.inputs[0], self.operation(middle.last).outputs[0]
        a, b = self.operand(source), self.operand(target)
        if (
            first.type != OperationType.DEQUANTIZE
            or a.type not in _EIGHT_BITS
            or a.type == b.type
            or a.scale != b.scale
        ):
            return None
        if self.operand(first.outputs[0]).type != OperandType.TENSOR_FLOAT32:
            return None
        if a.zero_point + (128 if b.type == OperandType.TENSOR_QUANT8_ASYMM else -128) != b.zero_point:
            return None
        return lambda g: g.emit("QUANTIZE", [g.value(source)], g.value(target), "QuantizeOptions")

    def fully_connected(self, middle: Middle) -> Callable[[Graph], None] | None:
        """FULLY_CONNECTED with scales per channel."""
        work = self.operation(middle.work)
        numbers = self.scalars(work, 3)
        source, target = self._ends(middle)
        pixels, filter_, bias = (self.operand(i) for i in work.inputs[:3])
        quant = filter_.channel_quant
        if (
            numbers is None
            or numbers[:-1] != [Padding.VALID, 1, 1]
            or quant is None
            or quant.channel_dim != 0
        ):
            return None
        if (
            not filter_.is_constant
            or not bias.is_constant
            or pixels.type != OperandType.TENSOR_QUANT8_ASYMM_SIGNED
        ):
            return None
        units, height, width, depth = filter_.dimensions
        out = self.operand(target).dimensions
        if (
            (height, width) != (1, 1)
            or pixels.dimensions[1:] != (1, 1, depth)
            or len(out) != 2
            or out[1] != units
        ):
            return None
        weights = constant_array(self.model, filter_).reshape(units, depth)
        biases = constant_array(self.model, bias)
        return self._per_channel(source, target, weights, biases, tuple(quant.scales), numbers[-1])

    def _per_channel(
        self,
        source: int,
        target: int,
        weights: Array,
        biases: Array,
        scales: tuple[float, ...],
        activation: int,
    ) -> Callable[[Graph], None]:
        data_scale = np.float32(self.operand(source).scale)

        def write(g: Graph) -> None:
            g.check_ratio(float(data_scale) * max(scales), g.value(target))
            bias_scales = data_scale * np.asarray(scales, dtype=np.float32)
            inputs = [
                g.value(source),
                g.constant(weights, Quantization(scales, 0, 0)),
                g.constant(biases, Quantization(tuple(float(s) for s in bias_scales))),
            ]
            options = {"fusedActivationFunction": activation}
            g.emit("FULLY_CONNECTED", inputs, g.value(target), "FullyConnectedOptions", **options)

        return write

    def columns(self, index: int) -> list[int] | None:
        """The layers of one unit each, over one input, whose results are all that a concatenation joins."""
        work = self.operation(index)
        axis, target = self.scalars(work, len(work.inputs) - 1), self.operand(work.outputs[0])
        if axis not in ([1], [-1]) or target.type != OperandType.TENSOR_QUANT8_ASYMM_SIGNED:
            return None
        columns = []
        for value in work.inputs[:-1]:
            layer = self.writer(value)
            if layer is None or not self._is_unit(layer, target):
                return None
            columns.append(layer)
        first = self.operation(columns[0])
        same = {(o.inputs[0], self._activation(o)) for o in map(self.operation, columns)}
        return columns if len(columns) > 1 and same == {(first.inputs[0], self._activation(first))} else None

    def _activation(self, layer: Operation) -> tuple[int, ...]:
        return tuple(self.scalars(layer, 3) or ())

    def _is_unit(self, layer: int, target: Operand) -> bool:
        operation = self.operation(layer)
        if operation.type != OperationType.FULLY_CONNECTED or not self._activation(operation):
            return False
        data, weights, bias = (self.operand(i) for i in operation.inputs[:3])
        output = self.operand(operation.outputs[0])
        signed = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
        return (
            data.type == weights.type == output.type == signed
            and weights.is_constant
            and bias.is_constant
            and weights.zero_point == 0
            and weights.dimensions[:1] == (1,)
            and len(output.dimensions) == len(target.dimensions) == 2
            and output.dimensions[1] == 1
            and (output.scale, output.zero_point) == (target.scale, target.zero_point)
        )

    def side_by_side(self, columns: list[int], index: int) -> Callable[[Graph], None]:
        """FULLY_CONNECTED with scales per channel, of layers of one unit each."""
        layers = [self.operation(i) for i in columns]
        rows = [self.operand(o.inputs[1]) for o in layers]
        weights = np.concatenate([constant_array(self.model, r).reshape(1, -1) for r in rows])
        biases = np.concatenate(
            [constant_array(self.model, self.operand(o.inputs[2])).reshape(1) for o in layers]
        )
        (activation,) = self._activation(layers[0])
        target = self.operation(index).outputs[0]
        scales = tuple(r.scale for r in rows)
        return self._per_channel(layers[0].inputs[0], target, weights, biases, scales, activation)


def _axes_of(
    before: tuple[int, ...], after: tuple[int, ...], count: int, depth: int
) -> tuple[list[int], bool] | None:
    """The neighbouring axes that a mean over ``count`` elements removed, and whether it kept them with extent 1."""
    rank = len(before)
    runs = [list(range(start, start + n)) for n in range(1, rank + 1) for start in range(rank - n + 1)]
    # Axes of extent 1 in a run change no value. Models average height and width, and XNNPACK takes these.
    for axes in sorted(runs, key=lambda run: run != [1, 2]):
        inside, behind = before[axes[0] : axes[-1] + 1], before[axes[-1] + 1 :]
        if math.prod(inside) != count or math.prod(behind) != depth:
            continue
        for keep in (False, True):
            left = [1 if i in axes else e for i, e in enumerate(before) if keep or i not in axes]
            if tuple(left or (1,)) == after:
                return axes, keep
    return None

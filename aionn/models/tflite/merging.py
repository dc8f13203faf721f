"""Operators on tensors of more than four axes, and on booleans that move: the same operator on tensors that the HAL takes.

Owns which axes an operator treats alike, so that they can be one, and what stands for booleans where an operation takes none. The
operator itself is written by its ordinary function, from substitutes for its tensors.

Invariants:
1. A substitute holds the same elements in the same order: nothing but the shape changes, and true and false become 1 and 0.
2. An operator that has no rule here and takes a tensor of more than four axes is inexpressible.

Source: the TensorFlow Lite operators' documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.models.tflite.graph import (
    OPERAND_RANK_MAX,
    Convert,
    Inexpressible,
    Shape,
    SubgraphWriter,
    is_known,
)
from aionn.models.tflite.schema import Tensor, TensorType, TfliteOperator

__all__ = ["booleans", "numbers", "reshaped", "write"]

_ELEMENTWISE = frozenset(
    {0, 6, 8, 14, 18, 19, 20, 21, 28, 41, 42, 47, 53, 54, 55, 57, 58, 59, 61, 62, 63, 64, 66, 71, 72, 73, 75, 76, 78, 84, 86, 87,
     90, 92, 93, 95, 98, 99, 101, 104, 106, 108, 111, 114, 116, 117, 123, 147, 150, 152, 158, 161}
)  # fmt: skip
"""Operators whose result at a place depends on the inputs at that place, or where it repeats there."""

_WHOLE = frozenset({22, 43, 70, 77, 110, 118, 119})
"""Operators that take stored tensors as they are: RESHAPE, SQUEEZE, EXPAND_DIMS, SHAPE, RANK, IF, WHILE."""

_OWN_RULE = frozenset({45, 65, 109, 126, 132})
"""Operators that look at their tensors' own shapes: STRIDED_SLICE, SLICE, WHERE, BATCH_MATMUL, CONV_3D."""

_MOVING = {
    2: None, 22: 0, 34: 0, 36: 0, 39: 0, 43: 0, 45: 0, 49: 1, 65: 0, 69: 0, 70: 0, 83: None, 88: 0, 100: 0, 102: 0, 105: 0, 107: 0,
    151: None,
}  # fmt: skip
"""Operators that move values: which input holds them, None for all that are booleans."""


Numbers = Sequence[int] | Sequence[Sequence[int]]


class _Plan(NamedTuple):
    """The form of an operator with fewer axes.

    Attributes:
        inputs: Shapes of the inputs that substitutes replace, by position.
        outputs: Shapes of the outputs.
        values: New whole numbers of constant inputs, by position.
        options: Options that change.
    """

    inputs: dict[int, Shape]
    outputs: list[Shape]
    values: dict[int, Numbers]
    options: tuple[tuple[str, float], ...] = ()


def write(g: SubgraphWriter, op: TfliteOperator, convert: Convert) -> None:
    """Writes an operator, with substitutes where its tensors need them."""
    if op.code in _MOVING and any(
        g.output_tensor(op, p).type == TensorType.BOOL for p in range(len(op.outputs))
    ):
        _withnumbers(g, op, convert)
        return
    shapes = [g.tensors[i].dimensions for i in (*op.inputs, *op.outputs) if i >= 0]
    if op.code in _WHOLE | _OWN_RULE or all(len(shape) <= OPERAND_RANK_MAX for shape in shapes):
        convert(g, op)
        return
    if op.code in _ELEMENTWISE:
        plan = _elementwise(g, op)
    elif op.code in _RULES:
        plan = _RULES[op.code](g, op)
    else:
        raise Inexpressible("a tensor of more than four axes")
    for shape in (*plan.inputs.values(), *plan.outputs):
        if len(shape) > OPERAND_RANK_MAX:
            raise Inexpressible(f"more than four axes that do not merge: {list(shape)}")
    _apply(g, op, plan, convert)


def _apply(g: SubgraphWriter, op: TfliteOperator, plan: _Plan, convert: Convert) -> None:
    inputs = list(op.inputs)
    for position, shape in plan.inputs.items():
        tensor = g.input_tensor(op, position)
        if g.value_of(op, position) is not None and not tensor.is_constant:
            continue  # Whole numbers that the importer has computed have few axes.
        operand = reshaped(g, g.input(op, position), shape or (1,))
        inputs[position] = g.stand_in(_with_shape(tensor, shape), operand=operand)
    for position, given in plan.values.items():
        value = np.array(given, dtype=np.int64)
        tensor = _with_shape(g.input_tensor(op, position), value.shape)
        inputs[position] = g.stand_in(msgspec.structs.replace(tensor, type=TensorType.INT64), value=value)
    outputs = [
        g.stand_in(_with_shape(g.output_tensor(op, position), shape))
        for position, shape in enumerate(plan.outputs)
    ]
    stand_in = msgspec.structs.replace(
        op, inputs=tuple(inputs), outputs=tuple(outputs), replaced=(*op.replaced, *plan.options)
    )
    convert(g, stand_in)
    for position, tensor_index in enumerate(outputs):
        wanted = g.describe_output(op, position).dimensions
        g.bind(op, position, reshaped(g, g.operand_of(tensor_index), wanted))


def _with_shape(tensor: Tensor, shape: Shape) -> Tensor:
    return msgspec.structs.replace(tensor, shape=shape, dimensions=shape, data_offset=0, data_bytes=0)


# Booleans


def numbers(g: SubgraphWriter, condition: int) -> int:
    """Ones and zeros, of 8 bits with scale 1, for booleans."""
    kind, shape = OperandType.TENSOR_QUANT8_ASYMM, g.dimensions(condition)
    operand = g.operands[condition]
    if operand.is_constant:
        return g.constant(kind, g.model.value(operand), scale=1.0)
    result = g.temporary(kind, shape, scale=1.0)
    one, zero = (g.full(kind, shape, value, scale=1.0) for value in (1, 0))
    g.emit(OperationType.SELECT, [condition, one, zero], [result])
    return result


def booleans(g: SubgraphWriter, ones: int) -> int:
    """Booleans for what ``numbers`` gives: true where it is not 0."""
    result = g.temporary(OperandType.TENSOR_BOOL8, g.dimensions(ones))
    zero = g.full(OperandType.TENSOR_QUANT8_ASYMM, (1,), 0, scale=1.0)
    g.emit(OperationType.NOT_EQUAL, [ones, zero], [result])
    return result


def reshaped(g: SubgraphWriter, source: int, shape: Shape) -> int:
    """As ``SubgraphWriter.reshaped``, also for booleans, which RESHAPE does not take."""
    if g.dimensions(source) == shape:
        return source
    if g.type_of(source) != OperandType.TENSOR_BOOL8 or g.operands[source].is_constant:
        return g.reshaped(source, shape)
    return booleans(g, g.reshaped(numbers(g, source), shape))


def _withnumbers(g: SubgraphWriter, op: TfliteOperator, convert: Convert) -> None:
    inputs = list(op.inputs)
    for position in range(len(inputs)):
        if _MOVING[op.code] not in (None, position) or g.input_tensor(op, position).type != TensorType.BOOL:
            continue
        tensor = _as_number(g.input_tensor(op, position))
        inputs[position] = g.stand_in(tensor, operand=numbers(g, g.input(op, position)))
    outputs = [g.stand_in(_as_number(g.output_tensor(op, p))) for p in range(len(op.outputs))]
    write(g, msgspec.structs.replace(op, inputs=tuple(inputs), outputs=tuple(outputs)), convert)
    for position, tensor_index in enumerate(outputs):
        g.bind(op, position, booleans(g, g.operand_of(tensor_index)))


def _as_number(tensor: Tensor) -> Tensor:
    if tensor.type != TensorType.BOOL:
        raise Inexpressible("results of several types")
    return msgspec.structs.replace(
        tensor, type=TensorType.UINT8, scales=(1.0,), zero_points=(0,), data_offset=0, data_bytes=0
    )


# Axes


def _known(g: SubgraphWriter, tensor: Tensor) -> Shape:
    if tensor.dimensions and not is_known(tensor.dimensions):
        raise Inexpressible(f"shape {list(tensor.dimensions)}, of which every extent must be known")
    return tensor.dimensions


def _input_shape(g: SubgraphWriter, op: TfliteOperator, position: int = 0) -> Shape:
    return _known(g, g.input_tensor(op, position))


def _output_shape(g: SubgraphWriter, op: TfliteOperator, position: int = 0) -> Shape:
    return _known(g, g.output_tensor(op, position))


def _groups(keys: Sequence[object]) -> list[list[int]]:
    """Neighbouring axes with equal keys together; None fits every neighbour."""
    groups: list[list[int]] = []
    last: object = None
    for axis, key in enumerate(keys):
        if groups and (key is None or last is None or key == last):
            groups[-1].append(axis)
        else:
            groups.append([axis])
            last = None
        last = key if key is not None else last
    return groups


def _merged(shape: Shape, groups: Sequence[Sequence[int]]) -> Shape:
    return tuple(math.prod(shape[axis] for axis in group) for group in groups)


def _elementwise(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """Axes over which every input is repeated or not in the same way."""
    result = _output_shape(g, op)
    given = {p: _input_shape(g, op, p) for p in range(len(op.inputs)) if g.has(op, p)}
    rank = len(result)
    if any(len(shape) > rank for shape in given.values()):
        g.refuse(op, "inputs", f"shapes that repeat to {list(result)}", [list(s) for s in given.values()])
    wide = {p: (1,) * (rank - len(shape)) + shape for p, shape in given.items()}
    if any(e not in (1, r) for shape in wide.values() for e, r in zip(shape, result, strict=True)):
        g.refuse(op, "inputs", f"shapes that repeat to {list(result)}", [list(s) for s in given.values()])
    keys = [
        None if result[axis] == 1 else tuple(shape[axis] == 1 for shape in wide.values())
        for axis in range(rank)
    ]
    groups = _groups(keys)
    return _Plan({p: _merged(shape, groups) for p, shape in wide.items()}, [_merged(result, groups)], {})


def _broadcast_to(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    plan = _elementwise(g, msgspec.structs.replace(op, inputs=op.inputs[:1]))
    return plan._replace(values={1: plan.outputs[0]})


def _axes_of(g: SubgraphWriter, op: TfliteOperator, position: int, rank: int) -> list[int]:
    axes = g.integers_of(op, position, "axes")
    if any(not -rank <= axis < rank for axis in axes):
        g.refuse(op, f"input {position} (axes)", f"axes from {-rank} to {rank - 1}", axes)
    return [axis % rank for axis in axes]


def _reduction(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """Neighbouring axes that all go, or all stay."""
    shape = _input_shape(g, op)
    axes = _axes_of(g, op, 1, len(shape))
    groups = _groups([axis in axes if extent > 1 else None for axis, extent in enumerate(shape)])
    gone = [i for i, group in enumerate(groups) if any(a in axes and shape[a] > 1 for a in group)]
    merged = _merged(shape, groups)
    kept = tuple(extent for i, extent in enumerate(merged) if i not in gone)
    return _Plan({0: merged}, [kept], {1: gone}, (("keep_dims", 0),))


def _along(shape: Shape, axis: int) -> Shape:
    """The extents before an axis, of the axis, and behind it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _checked_axis(g: SubgraphWriter, op: TfliteOperator, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        g.refuse(op, "axis", f"{-rank} to {rank - 1}", axis)
    return axis % rank


def _concatenation(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    result = _output_shape(g, op)
    axis = _checked_axis(g, op, op.integer("ConcatenationOptions", "axis"), len(result))
    shapes = {p: _input_shape(g, op, p) for p in range(len(op.inputs))}
    for shape in shapes.values():
        if len(shape) != len(result):
            g.refuse(op, "inputs", f"rank {len(result)}", f"shape {list(shape)}")
    return _Plan({p: _along(s, axis) for p, s in shapes.items()}, [_along(result, axis)], {}, (("axis", 1),))


def _pack(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    result = _output_shape(g, op)
    axis = _checked_axis(g, op, op.integer("PackOptions", "axis"), len(result))
    before, count, behind = _along(result, axis)
    inputs: dict[int, Shape] = {}
    for position in range(len(op.inputs)):
        if _input_shape(g, op, position) != (*result[:axis], *result[axis + 1 :]):
            g.refuse(op, f"input {position}", "the output's shape without its axis", list(result))
        inputs[position] = (before, behind)
    return _Plan(inputs, [(before, count, behind)], {}, (("axis", 1),))


def _parts(
    position: int, axis_at: int | None, keeps_axis: bool
) -> Callable[[SubgraphWriter, TfliteOperator], _Plan]:
    """SPLIT, SPLIT_V and UNPACK: parts along an axis, which is an input or an option."""

    def plan(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
        shape = _input_shape(g, op, position)
        number = op.integer("UnpackOptions", "axis") if axis_at is None else g.integer_of(op, axis_at, "axis")
        axis = _checked_axis(g, op, number, len(shape))
        before, _, behind = _along(shape, axis)
        outputs: list[Shape] = []
        for index in range(len(op.outputs)):
            part = _output_shape(g, op, index)
            if keeps_axis and len(part) != len(shape):
                g.refuse(op, f"output {index}", f"rank {len(shape)}", f"shape {list(part)}")
            outputs.append((before, part[axis], behind) if keeps_axis else (before, behind))
        values: dict[int, Numbers] = {} if axis_at is None else {axis_at: [1]}
        return _Plan({position: _along(shape, axis)}, outputs, values, (("axis", 1),))

    return plan


def _gather(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    shape, indices = _input_shape(g, op), _input_shape(g, op, 1)
    if op.integer("GatherOptions", "batch_dims"):
        raise Inexpressible("batch dimensions with more than four axes")
    axis = _checked_axis(g, op, op.integer("GatherOptions", "axis"), len(shape))
    before, _, behind = merged = _along(shape, axis)
    count = math.prod(indices)
    return _Plan({0: merged, 1: (count,)}, [(before, count, behind)], {}, (("axis", 1),))


def _extremum(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    shape = _input_shape(g, op)
    axis = _checked_axis(g, op, g.integer_of(op, 1, "axis"), len(shape))
    before, _, behind = merged = _along(shape, axis)
    return _Plan({0: merged}, [(before, behind)], {1: [1]})


def _cumsum(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    shape = _input_shape(g, op)
    merged = _along(shape, _checked_axis(g, op, g.integer_of(op, 1, "axis"), len(shape)))
    return _Plan({0: merged}, [merged], {1: [1]})


def _last(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """SOFTMAX, LOG_SOFTMAX, L2_NORMALIZATION, FULLY_CONNECTED: along the last axis."""
    shape, result = _input_shape(g, op), _output_shape(g, op)
    if not shape or not result:
        g.refuse(op, "input 0", "at least one axis", f"shape {list(shape)}")
    rows = math.prod(result[:-1])
    return _Plan({0: (math.prod(shape) // shape[-1], shape[-1])}, [(rows, result[-1])], {})


def _transpose(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """Axes that stay neighbours move as one; those of extent 1 do not count."""
    shape = _input_shape(g, op)
    order = g.integers_of(op, 1, "permutation")
    if sorted(order) != list(range(len(shape))):
        g.refuse(op, "input 1 (permutation)", f"a permutation of {len(shape)} axes", order)
    moving = [axis for axis in order if shape[axis] > 1]
    real = sorted(moving)
    runs: list[list[int]] = []
    for axis in moving:
        if runs and real.index(axis) == real.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    placed = sorted(range(len(runs)), key=lambda i: runs[i][0])
    source = tuple(math.prod(shape[a] for a in runs[i]) for i in placed) or (1,)
    permutation = [placed.index(i) for i in range(len(runs))] or [0]
    return _Plan({0: source}, [tuple(source[i] for i in permutation)], {1: permutation})


def _tile(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """A repeated axis may have unrepeated ones behind it."""
    shape, multiples = _input_shape(g, op), g.integers_of(op, 1, "multiples")
    if not shape or len(multiples) != len(shape) or min(multiples) < 1:
        g.refuse(op, "input 1 (multiples)", f"{len(shape)} numbers of at least 1", multiples)
    groups: list[list[int]] = []
    for axis, multiple in enumerate(multiples):
        if groups and (multiple == 1 or math.prod(shape[a] for a in groups[-1]) == 1 == multiples[axis - 1]):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    merged = _merged(shape, groups)
    times = [math.prod(multiples[a] for a in group) for group in groups]
    return _Plan({0: merged}, [tuple(e * t for e, t in zip(merged, times, strict=True))], {1: times})


def _padding(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """Neighbouring axes without padding."""
    shape, flat = _input_shape(g, op), g.integers_of(op, 1, "paddings")
    if not shape or len(flat) != 2 * len(shape) or min(flat) < 0:
        g.refuse(op, "input 1 (paddings)", f"{len(shape)} pairs of at least 0", flat)
    pads = [flat[2 * axis : 2 * axis + 2] for axis in range(len(shape))]
    groups = _groups([axis if any(pads[axis]) else "whole" for axis in range(len(shape))])
    merged = _merged(shape, groups)
    kept = [pads[group[0]] for group in groups]
    result = tuple(e + sum(p) for e, p in zip(merged, kept, strict=True))
    return _Plan({0: merged}, [result], {1: kept})


def _reverse(g: SubgraphWriter, op: TfliteOperator) -> _Plan:
    """Neighbouring axes that are all reversed are one that is."""
    shape = _input_shape(g, op)
    axes = _axes_of(g, op, 1, len(shape))
    groups = _groups([axis in axes if extent > 1 else None for axis, extent in enumerate(shape)])
    merged = _merged(shape, groups)
    turned = [i for i, group in enumerate(groups) if any(a in axes and shape[a] > 1 for a in group)]
    return _Plan({0: merged}, [merged], {1: turned})


_RULES: dict[int, Callable[[SubgraphWriter, TfliteOperator], _Plan]] = {
    2: _concatenation,
    9: _last,
    11: _last,
    25: _last,
    34: _padding,
    36: _gather,
    39: _transpose,
    40: _reduction,
    49: _parts(1, 0, keeps_axis=True),
    50: _last,
    56: _extremum,
    60: _padding,
    69: _tile,
    74: _reduction,
    79: _extremum,
    81: _reduction,
    82: _reduction,
    83: _pack,
    88: _parts(0, None, keeps_axis=False),
    89: _reduction,
    91: _reduction,
    100: _padding,
    102: _parts(0, 2, keeps_axis=True),
    105: _reverse,
    128: _cumsum,
    130: _broadcast_to,
    140: _reduction,
}

"""Operators that read and write chosen places: GATHER and its kin, SCATTER_ND and its kin, WHERE, DYNAMIC_UPDATE_SLICE.

Owns how places are counted, and what writes to places where no operation of the HAL does: a GATHER from the other side where the
places are constants, a product with a matrix of ones and zeros where they are not.

Source: the TensorFlow Lite operators' documentation and reference kernels; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.hal import FusedActivation, OperandType, OperationType
from aionn.models.tflite.constants import Array
from aionn.models.tflite.conversions.elementwise import broadcasted
from aionn.models.tflite.conversions.shapes import axis_of, parts_of
from aionn.models.tflite.graph import OPERAND_RANK_MAX, Inexpressible, Shape, SubgraphWriter, is_known
from aionn.models.tflite.merging import numbers
from aionn.models.tflite.schema import TfliteOperator

__all__ = [
    "dynamic_update_slice",
    "gather",
    "gather_nd",
    "matrix_diag",
    "matrix_set_diag",
    "reverse_sequence",
    "scatter_nd",
    "segment_sum",
    "unsorted_segment_sum",
    "where",
]

MATRIX_ELEMENTS_MAX = 1 << 20
"""Most elements of a matrix that writes to places which are known at run time only: a megabyte for itself, four as floats."""

COUNTED_MAX = 1 << 20
"""Most elements that WHERE looks through: it sorts them, and floats count exactly up to 2 ** 24."""

T = OperandType
_FLOATS = (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16)


def _arithmetic(g: SubgraphWriter, kind: OperationType, a: int, b: int, shape: Shape) -> int:
    result = g.like(a, shape)
    g.emit(kind, [a, b, g.int32(FusedActivation.NONE)], [result])
    return result


def _shape(g: SubgraphWriter, index: int) -> Shape:
    shape = g.dimensions(index)
    if not is_known(shape):
        raise Inexpressible(f"shape {list(shape)}, of which every extent must be known")
    return shape


# Reading


def gather(g: SubgraphWriter, op: TfliteOperator) -> None:
    """GATHER; a single index without a rank makes an axis of extent 1, which RESHAPE removes."""
    data, indices = g.input(op, 0), g.input(op, 1)
    shape = g.dimensions(data)
    axis = axis_of(g, op, op.integer("GatherOptions", "axis"), len(shape))
    batch_rank = len(g.input_tensor(op, 1).dimensions)
    batches = axis_of(g, op, op.integer("GatherOptions", "batch_dims"), batch_rank + 1)
    if batches:
        _gather_batches(g, op, data, indices, axis, batches)
        return
    output = g.output(op)
    inputs = [data, g.int32(axis), indices]
    if g.input_tensor(op, 1).dimensions != ():
        g.emit(OperationType.GATHER, inputs, [output])
        return
    wide = g.like(output, (*shape[:axis], 1, *shape[axis + 1 :]))
    g.emit(OperationType.GATHER, inputs, [wide])
    g.reshape(wide, output)


def _gather_batches(
    g: SubgraphWriter, op: TfliteOperator, data: int, indices: int, axis: int, batches: int
) -> None:
    """A GATHER of rows of all batches one behind the other, by indexes to which the batch's first row is added."""
    shape, places = _shape(g, data), _shape(g, indices)
    if axis < batches or shape[:batches] != places[:batches]:
        g.refuse(op, "batch dimensions", f"the same extents before axis {axis}", [list(shape), list(places)])
    batch, between = math.prod(shape[:batches]), math.prod(shape[batches:axis])
    extent, behind = shape[axis], math.prod(shape[axis + 1 :])
    count = math.prod(places[batches:])
    if between > 1:
        apart = g.like(data, (batch, extent, between, behind))
        whole = g.reshaped(data, (batch, between, extent, behind))
        _transpose(g, whole, (0, 2, 1, 3), apart)
        data = apart
    rows = g.reshaped(data, (batch * extent, between * behind))
    gathered = _gather_rows(g, rows, indices, (batch, count), extent)
    if between > 1:
        apart = g.like(gathered, (batch, between, count, behind))
        _transpose(g, g.reshaped(gathered, (batch, count, between, behind)), (0, 2, 1, 3), apart)
        gathered = apart
    g.bind(
        op,
        0,
        g.reshaped(gathered, _output_shape(g, op, (*shape[:axis], *places[batches:], *shape[axis + 1 :]))),
    )


def _transpose(g: SubgraphWriter, source: int, order: Sequence[int], target: int) -> None:
    if g.type_of(source) == T.TENSOR_INT32:
        raise Inexpressible("axes between the batch and the gathered axis, of integers")
    g.emit(OperationType.TRANSPOSE, [source, g.int32s(order)], [target])


def _gather_rows(g: SubgraphWriter, rows: int, indices: int, shape: tuple[int, int], extent: int) -> int:
    """Rows by indexes ``[batch, count]`` into the batch's own ``extent`` rows."""
    batch, count = shape
    g.model.check_budget(8 * batch)
    first = g.int32s(np.arange(batch).reshape(batch, 1) * extent)
    wide = _arithmetic(g, OperationType.ADD, g.reshaped(indices, shape), first, shape)
    gathered = g.like(rows, (batch * count, *g.dimensions(rows)[1:]))
    g.emit(OperationType.GATHER, [rows, g.int32(0), g.reshaped(wide, (batch * count,))], [gathered])
    return gathered


def _output_shape(g: SubgraphWriter, op: TfliteOperator, found: Shape) -> Shape:
    """The output's shape in the file, or the inferred one if the file leaves it open."""
    wanted = g.describe_output(op).dimensions
    return wanted if is_known(wanted) else found


def _flat_places(g: SubgraphWriter, indices: int, extents: Shape) -> int:
    """Indexes ``[..., len(extents)]`` as one number each, ``[..., 1]``, counted over the extents in row-major order."""
    flat: int | None = None
    places = g.dimensions(indices)
    for axis, part in enumerate(parts_of(g, indices, len(places) - 1, len(extents))):
        step = g.int32s([math.prod(extents[axis + 1 :])])
        term = _arithmetic(g, OperationType.MUL, part, step, g.dimensions(part))
        flat = term if flat is None else _arithmetic(g, OperationType.ADD, flat, term, g.dimensions(part))
    assert flat is not None, "a known shape has no extent of 0"
    return flat


def gather_nd(g: SubgraphWriter, op: TfliteOperator) -> None:
    """GATHER from the value with the indexed axes made one, by indexes that MUL and ADD compute."""
    data, indices = g.input(op, 0), g.input(op, 1)
    shape, places = g.dimensions(data), g.dimensions(indices)
    count = places[-1]
    if not (is_known(shape) and is_known(places)) or count > len(shape):
        raise Inexpressible(f"shape {list(shape)} with indexes of shape {list(places)}")
    flat = _flat_places(g, indices, shape[:count])
    rows = g.reshaped(data, (math.prod(shape[:count]), *shape[count:]))
    positions = g.reshaped(flat, places[:-1] or (1,))
    wide = g.like(data, (*g.dimensions(positions), *shape[count:]))
    g.emit(OperationType.GATHER, [rows, g.int32(0), positions], [wide])
    g.reshape(wide, g.output(op))


def reverse_sequence(g: SubgraphWriter, op: TfliteOperator) -> None:
    """GATHER with batch dimensions: the index is length - 1 - i in front of the length and i behind it."""
    table = "ReverseSequenceOptions"
    data, lengths = g.input(op, 0), g.input(op, 1)
    shape = _shape(g, data)
    axis = axis_of(g, op, op.integer(table, "seq_dim"), len(shape))
    batch_axis = axis_of(g, op, op.integer(table, "batch_dim"), len(shape))
    if batch_axis != 0 or axis != 1 or g.dimensions(lengths) != shape[:1]:
        raise Inexpressible(f"batches along axis {batch_axis} and sequences along axis {axis}, not 0 and 1")
    batch, extent = shape[0], shape[1]
    wide = (batch, extent)
    g.model.check_budget(8 * batch * extent)
    steps = g.int32s(np.broadcast_to(np.arange(extent), wide))
    ends = _arithmetic(g, OperationType.SUB, g.reshaped(lengths, (batch, 1)), g.int32s([1]), (batch, 1))
    mirrored = _arithmetic(g, OperationType.SUB, ends, steps, wide)
    is_behind = g.temporary(T.TENSOR_BOOL8, wide)
    g.emit(OperationType.LESS, [mirrored, g.int32s([0])], [is_behind])
    indices = g.like(mirrored)
    g.emit(OperationType.SELECT, [is_behind, steps, mirrored], [indices])
    rows = g.reshaped(data, (batch * extent, math.prod(shape[2:])))
    g.bind(op, 0, g.reshaped(_gather_rows(g, rows, indices, wide, extent), shape))


# Writing


def scatter_nd(g: SubgraphWriter, op: TfliteOperator) -> None:
    """Updates that are added up at their places; 0 elsewhere. Places outside are left out, where TensorFlow Lite fails."""
    indices, updates = g.input(op, 0), g.input(op, 1)
    result = tuple(g.integers_of(op, 2, "shape"))
    places = _shape(g, indices)
    count = places[-1]
    if not is_known(result) or count > len(result):
        raise Inexpressible(f"shape {list(result)} with indexes of shape {list(places)}")
    rows, width = math.prod(result[:count]), math.prod(result[count:])
    number = math.prod(places[:-1])
    if math.prod(_shape(g, updates)) != number * width:
        g.refuse(
            op, "input 1 (updates)", f"{number * width} elements", f"shape {list(g.dimensions(updates))}"
        )
    value = g.value_of(op, 0)
    matrix = g.reshaped(updates, (number, width))
    if value is None:
        flat = _flat_places(g, indices, result[:count])
        written = _added_up(g, matrix, g.reshaped(flat, (1, number)), rows)
    elif value.dtype.kind not in "iu":
        g.refuse(op, "input 0 (indexes)", "whole numbers", value.dtype)
    else:
        steps = [math.prod(result[axis + 1 : count]) for axis in range(count)]
        within = (value >= 0) & (value < np.array(result[:count]))
        if not within.all():
            g.refuse(op, "input 0 (indexes)", f"places within {list(result[:count])}", value[~within][0])
        written = _written_to(g, matrix, (value.astype(np.int64) * steps).sum(axis=-1).reshape(-1), rows)
    g.bind(op, 0, g.reshaped(written, _output_shape(g, op, result)))


def _written_to(g: SubgraphWriter, updates: int, places: Array, rows: int) -> int:
    """Rows at constant places: each is read from the row of its update, or from a row of zeros behind them."""
    number, width = g.dimensions(updates)
    is_once = len(np.unique(places)) == number
    if not is_once or g.type_of(updates) not in _FLOATS:
        return _added_up(g, updates, g.int32s(places.reshape(1, number)), rows)
    g.model.check_budget(8 * rows)
    padded = g.like(updates, (number + 1, width))
    g.emit(OperationType.PAD, [updates, g.int32s(np.array([[0, 1], [0, 0]]))], [padded])
    sources = np.full(rows, number)
    sources[places] = np.arange(number)
    written = g.like(updates, (rows, width))
    g.emit(OperationType.GATHER, [padded, g.int32(0), g.int32s(sources)], [written])
    return written


def _added_up(g: SubgraphWriter, updates: int, places: int, rows: int) -> int:
    """The product with a matrix that has a 1 where an update ``[number, width]`` goes; ``places`` are ``[1, number]``."""
    number, width = g.dimensions(updates)
    kind = g.type_of(updates)
    if kind not in (*_FLOATS, T.TENSOR_INT32):
        raise Inexpressible("updates of 8-bit integers, whose stored zero is not 0")
    if rows * number > MATRIX_ELEMENTS_MAX:
        raise Inexpressible(f"{number} updates of {rows} places, more than {MATRIX_ELEMENTS_MAX} together")
    is_here = g.temporary(T.TENSOR_BOOL8, (rows, number))
    g.emit(OperationType.EQUAL, [places, g.int32s(np.arange(rows).reshape(rows, 1))], [is_here])
    matrix = g.temporary(kind, (rows, number))
    g.emit(OperationType.CAST, [numbers(g, is_here)], [matrix])
    written = g.like(updates, (rows, width))
    no = g.boolean(False)
    g.emit(OperationType.BATCH_MATMUL, [matrix, updates, no, no], [written])
    return written


def unsorted_segment_sum(g: SubgraphWriter, op: TfliteOperator) -> None:
    """As SCATTER_ND, with the segments as places."""
    _segments(g, op, g.integer_of(op, 2, "number of segments"))


def segment_sum(g: SubgraphWriter, op: TfliteOperator) -> None:
    """As SCATTER_ND, with the segments, which must be constants, as places."""
    _segments(g, op, max(g.integers_of(op, 1, "segments"), default=-1) + 1)


def _segments(g: SubgraphWriter, op: TfliteOperator, count: int) -> None:
    data, segments = g.input(op, 0), g.input(op, 1)
    shape, places = _shape(g, data), _shape(g, segments)
    if shape[: len(places)] != places or count < 1:
        g.refuse(op, "input 1 (segments)", f"one for each of {list(shape)}", [list(places), count])
    number, rest = math.prod(places), shape[len(places) :]
    written = _added_up(
        g, g.reshaped(data, (number, math.prod(rest))), g.reshaped(segments, (1, number)), count
    )
    g.bind(op, 0, g.reshaped(written, _output_shape(g, op, (count, *rest))))


def _on_diagonal(g: SubgraphWriter, op: TfliteOperator, values: int, others: int | None) -> None:
    shape = _shape(g, g.output(op)) if others is None else g.dimensions(others)
    if (
        len(shape) < 2
        or math.prod(_shape(g, values)) * shape[-2] != math.prod(shape)
        or shape[-1] != shape[-2]
    ):
        raise Inexpressible(f"a diagonal of shape {list(g.dimensions(values))} in {list(shape)}")
    g.model.check_budget(math.prod(shape))
    on = g.constant(T.TENSOR_BOOL8, np.broadcast_to(np.eye(shape[-1], dtype=bool), shape))
    repeated = broadcasted(g, g.reshaped(values, (*shape[:-2], 1, shape[-1])), shape)
    operand = g.operands[values]
    if others is None:
        kind = OperandType(operand.type)
        others = g.full(kind, shape, 0, scale=operand.scale, zero_point=operand.zero_point)
        target = g.operand_of(op.outputs[0])
    else:
        target = g.output(op)
    g.emit(OperationType.SELECT, [on, repeated, others], [target])


def matrix_diag(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SELECT between the repeated diagonal and 0."""
    _on_diagonal(g, op, g.input(op, 0), None)


def matrix_set_diag(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SELECT between the repeated diagonal and the matrix."""
    _on_diagonal(g, op, g.input(op, 1), g.input(op, 0))


def where(g: SubgraphWriter, op: TfliteOperator) -> None:
    """The places of what is not 0: their numbers are sorted to the front, and as many are cut off as there are."""
    given = g.input(op, 0)
    stored, shape = _shape(g, given), g.input_tensor(op, 0).dimensions
    if len(shape) <= OPERAND_RANK_MAX or not is_known(shape):
        shape = stored
    count = math.prod(shape)
    if g.input_tensor(op, 0).dimensions == () or count > COUNTED_MAX:
        raise Inexpressible(
            f"places of a tensor of shape {list(shape)}, of rank 0 or above {COUNTED_MAX} elements"
        )
    condition = given
    if g.type_of(given) != T.TENSOR_BOOL8:
        condition = g.temporary(T.TENSOR_BOOL8, stored)
        g.emit(OperationType.NOT_EQUAL, [given, _zero(g, given)], [condition])
    ones = g.reshaped(numbers(g, condition), (count,))
    integers = g.temporary(T.TENSOR_INT32, (count,))
    g.emit(OperationType.CAST, [ones], [integers])
    g.model.check_budget(8 * count)
    # The earlier a place, the larger its number; a value of 0 has the number 0 and comes last.
    ranks = _arithmetic(g, OperationType.MUL, integers, g.int32s(np.arange(count, 0, -1)), (count,))
    values, places = g.like(ranks), g.like(ranks)
    g.emit(OperationType.TOPK_V2, [ranks, g.int32(count)], [values, places])
    reals, total = g.temporary(T.TENSOR_FLOAT32, (count,)), g.temporary(T.TENSOR_FLOAT32, (1,))
    g.emit(OperationType.DEQUANTIZE, [ones], [reals])
    g.emit(OperationType.REDUCE_SUM, [reals, g.int32s([0]), g.boolean(True)], [total])
    found = g.temporary(T.TENSOR_INT32, (1,))
    g.emit(OperationType.CAST, [total], [found])
    first = g.like(ranks, (0,))
    g.emit(OperationType.SLICE, [values, g.int32s([0]), found], [first])
    flat = g.like(ranks, (0,))
    none = g.int32(FusedActivation.NONE)
    g.emit(OperationType.SUB, [g.int32s([count]), first, none], [flat])
    output = g.bind(op, 0, g.temporary(T.TENSOR_INT32, (0, len(shape))))
    if len(shape) == 1:
        g.reshape(flat, output, (-1, 1))
    else:
        g.emit(OperationType.PACK, [g.int32(1), *_coordinates(g, flat, shape)], [output])


def _zero(g: SubgraphWriter, like: int) -> int:
    operand = g.operands[like]
    return g.zeros(OperandType(operand.type), (1,), scale=operand.scale, zero_point=operand.zero_point)


def _coordinates(g: SubgraphWriter, flat: int, shape: Shape) -> list[int]:
    """The index along each axis, from numbers in row-major order."""
    coordinates = []
    for axis in range(len(shape) - 1):
        step = g.int32s([math.prod(shape[axis + 1 :])])
        coordinates.append(_arithmetic(g, OperationType.DIV, flat, step, (0,)))
        above = _arithmetic(g, OperationType.MUL, coordinates[-1], step, (0,))
        flat = _arithmetic(g, OperationType.SUB, flat, above, (0,))
    return [*coordinates, flat]


def dynamic_update_slice(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SELECT between the value and the update, which GATHER has moved along every axis where it is the smaller one."""
    data, update, starts = (g.input(op, position) for position in range(3))
    shape, part = _shape(g, data), _shape(g, update)
    rank = len(shape)
    if len(part) != rank or any(p > s for p, s in zip(part, shape, strict=True)):
        g.refuse(op, "input 1 (update)", f"at most shape {list(shape)}", f"shape {list(part)}")
    if _shape(g, starts) != (rank,):
        g.refuse(op, "input 2 (starts)", f"{rank} numbers", f"shape {list(g.dimensions(starts))}")
    inside: int | None = None
    for axis, (extent, size) in enumerate(zip(shape, part, strict=True)):
        if extent == size:
            continue  # The start is clamped to 0.
        g.model.check_budget(8 * extent)
        start = g.temporary(T.TENSOR_INT32, (1,))
        g.emit(OperationType.SLICE, [starts, g.int32s([axis]), g.int32s([1])], [start])
        start = _clamped(g, start, extent - size, (1,))
        line = tuple(extent if a == axis else 1 for a in range(rank))
        steps = g.int32s(np.arange(extent).reshape(line))
        offsets = _arithmetic(g, OperationType.SUB, steps, start, line)
        places = _clamped(g, offsets, size - 1, line)
        is_in = g.temporary(T.TENSOR_BOOL8, line)
        g.emit(OperationType.EQUAL, [offsets, places], [is_in])
        before = g.dimensions(update)
        moved = g.like(update, (*before[:axis], extent, *before[axis + 1 :]))
        g.emit(OperationType.GATHER, [update, g.int32(axis), g.reshaped(places, (extent,))], [moved])
        update = moved
        if inside is None:
            inside = is_in
        else:
            both = tuple(map(max, g.dimensions(inside), line))
            joined = g.temporary(T.TENSOR_BOOL8, both)
            g.emit(OperationType.LOGICAL_AND, [inside, is_in], [joined])
            inside = joined
    if inside is None:
        g.bind(op, 0, update)
        return
    g.emit_to(op, OperationType.SELECT, [broadcasted(g, inside, shape), update, data])


def _clamped(g: SubgraphWriter, value: int, most: int, shape: Shape) -> int:
    """Whole numbers held within 0 and ``most``."""
    low, both = g.like(value, shape), g.like(value, shape)
    g.emit(OperationType.MAXIMUM, [value, g.int32s([0])], [low])
    g.emit(OperationType.MINIMUM, [low, g.int32s([most])], [both])
    return both

"""Whatever makes a single number and whatever reads it: the tensor has the HAL's shape [1], and the results are the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from aionn.hal import OperandType, OperationType, operand_dtype
from aionn.interpreter import Interpreter, RunControl
from aionn.models.builder import GraphBuilder, Value

pytest.importorskip("ai_edge_litert.interpreter", reason="LiteRT is not installed", exc_type=ImportError)

from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert.engine import check, make_engines
from aionn.drivers.litert.lowering import lower

Array = npt.NDArray[Any]
T, O = OperandType, OperationType  # noqa: E741 - the tables below have them everywhere

SCALE, ZERO_POINT = 0.5, 3


def quantized(kind: OperandType) -> dict[str, Any]:
    is_quantized = kind in (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)
    return {"scale": SCALE, "zero_point": ZERO_POINT} if is_quantized else {}


def numbers(*values: int) -> Array:
    return np.array(values, np.int32)


Produce = Callable[[GraphBuilder, OperandType], Value]
Consume = Callable[[GraphBuilder, Value], list[Value]]


def produced(
    kind: OperationType, shape: tuple[int, ...], *arguments: Any, out: OperandType | None = None
) -> Produce:
    def produce(g: GraphBuilder, type_: OperandType) -> Value:
        x = g.input(type_, shape, **quantized(type_))
        y = g.variable(out or type_, (1,), **quantized(out or type_))
        g.operation(kind, [x, *(g.constant(a) for a in arguments)], [y])
        return y

    return produce


PRODUCERS: dict[str, Produce] = {
    **{
        f"{kind.name}_{len(shape)}": produced(kind, shape, numbers(*range(len(shape))), False)
        for kind, shape in (
            (O.REDUCE_SUM, (2, 3)), (O.REDUCE_PROD, (2, 3)), (O.REDUCE_ALL, (2, 3)), (O.REDUCE_ANY, (1, 3)),
            (O.REDUCE_MAX, (1, 2, 2, 3)), (O.REDUCE_MIN, (3,)),
        )
    },
    **{
        f"MEAN_{len(shape)}": produced(O.MEAN, shape, numbers(*range(-len(shape), 0)), 0)
        for shape in ((3,), (2, 3), (1, 2, 2, 3))
    },
    "ARGMAX": produced(O.ARGMAX, (4,), 0, out=T.TENSOR_INT32),
    "ARGMIN": produced(O.ARGMIN, (4,), -1, out=T.TENSOR_INT32),
    "STRIDED_SLICE_1": produced(O.STRIDED_SLICE, (4,), numbers(2), numbers(3), numbers(1), 0, 0, 1),
    "STRIDED_SLICE_2": produced(
        O.STRIDED_SLICE, (2, 3), numbers(-1, 1), numbers(0, 2), numbers(1, 1), 0, 0, 3
    ),
    "STRIDED_SLICE_kept": produced(
        O.STRIDED_SLICE, (2, 3), numbers(1, 1), numbers(2, 2), numbers(1, 1), 0, 0, 1
    ),
    "SQUEEZE": produced(O.SQUEEZE, (1, 1), numbers(0, 1)),
    "RESHAPE": produced(O.RESHAPE, (1, 1, 1), numbers(-1)),
    "SLICE": produced(O.SLICE, (4,), numbers(2), numbers(1)),
    "GATHER": produced(O.GATHER, (4,), 0, numbers(3)),
}  # fmt: skip

_ALL = (T.TENSOR_FLOAT32, T.TENSOR_QUANT8_ASYMM_SIGNED, T.TENSOR_QUANT8_ASYMM, T.TENSOR_INT32, T.TENSOR_BOOL8)
_NUMBERS = _ALL[:4]
_REALS = _ALL[:3]
_QUANTIZED = _ALL[1:3]

TYPES: dict[str, tuple[OperandType, ...]] = {
    "REDUCE_SUM": _ALL[:1], "REDUCE_PROD": _ALL[:1], "REDUCE_MAX": _REALS, "REDUCE_MIN": _REALS,
    "REDUCE_ALL": _ALL[4:], "REDUCE_ANY": _ALL[4:], "MEAN": _REALS, "ARGMAX": _NUMBERS, "ARGMIN": _NUMBERS,
    "STRIDED_SLICE": _REALS, "SQUEEZE": _REALS, "RESHAPE": _NUMBERS, "SLICE": _NUMBERS, "GATHER": _NUMBERS,
}  # fmt: skip
"""The operand types of input 0 of each producer."""


def consumed(
    kind: OperationType, out: tuple[int, ...], *arguments: Any, type: OperandType | None = None
) -> Consume:
    def consume(g: GraphBuilder, x: Value) -> list[Value]:
        target = OperandType(x.operand.type) if type is None else type
        y = g.variable(target, out, **quantized(target))
        inputs = [x if a is SELF else a(g, x) if callable(a) else g.constant(a) for a in arguments]
        g.operation(kind, inputs, [y])
        return [y]

    return consume


SELF = object()
"""Stands for the number that was produced."""


def three(g: GraphBuilder, x: Value) -> Value:
    kind = OperandType(x.operand.type)
    return g.constant(np.array([1, 0, 2]).astype(operand_dtype(kind)), type=kind, **quantized(kind))


def scalar_like(g: GraphBuilder, x: Value) -> Value:
    kind = {T.TENSOR_FLOAT32: T.FLOAT32}.get(OperandType(x.operand.type), T.INT32)
    return g.constant(7, type=kind)


CONSUMERS: dict[str, tuple[tuple[OperandType, ...], Consume]] = {
    "PAD": (_REALS, consumed(O.PAD, (4,), SELF, np.array([[2, 1]], np.int32))),
    "PAD_V2": (_REALS, consumed(O.PAD_V2, (4,), SELF, np.array([[1, 2]], np.int32), scalar_like)),
    "MIRROR_PAD": (_NUMBERS, consumed(O.MIRROR_PAD, (2,), SELF, np.array([[1, 0]], np.int32), 1)),
    "SLICE": (_NUMBERS, consumed(O.SLICE, (1,), SELF, numbers(0), numbers(-1))),
    "STRIDED_SLICE": (_REALS, consumed(O.STRIDED_SLICE, (1,), SELF, numbers(0), numbers(1), numbers(1), 0, 0, 0)),
    "STRIDED_SLICE_shrunk": (
        _REALS, consumed(O.STRIDED_SLICE, (1,), SELF, numbers(-1), numbers(0), numbers(1), 0, 0, 1)
    ),
    "RESHAPE": (_NUMBERS, consumed(O.RESHAPE, (1, 1), SELF, numbers(1, -1))),
    "EXPAND_DIMS": (_NUMBERS, consumed(O.EXPAND_DIMS, (1, 1), SELF, 1)),
    "SQUEEZE": (_REALS, consumed(O.SQUEEZE, (1,), SELF, numbers(0))),
    "TILE": (_NUMBERS, consumed(O.TILE, (3,), SELF, numbers(3))),
    "TRANSPOSE": (_REALS, consumed(O.TRANSPOSE, (1,), SELF, numbers(0))),
    "REVERSE": (_NUMBERS, consumed(O.REVERSE, (1,), SELF, numbers(0))),
    "CONCATENATION": (_REALS, consumed(O.CONCATENATION, (4,), SELF, three, 0)),
    "PACK": (_NUMBERS, consumed(O.PACK, (2, 1), 0, SELF, SELF)),
    "SPLIT": (_NUMBERS, consumed(O.SPLIT, (1,), SELF, 0, 1)),
    "GATHER": (_NUMBERS, consumed(O.GATHER, (2,), SELF, 0, numbers(0, 0))),
    "GATHER_indices": (_ALL[3:4], consumed(O.GATHER, (1,), np.arange(9, dtype=np.int32), 0, SELF, type=T.TENSOR_INT32)),
    "TOPK": (_NUMBERS, lambda g, x: topk(g, x)),
    "ADD": (_NUMBERS, consumed(O.ADD, (3,), SELF, three, 0)),
    "MUL": (_NUMBERS, consumed(O.MUL, (1,), SELF, SELF, 0)),
    "MAXIMUM": (_NUMBERS, consumed(O.MAXIMUM, (3,), three, SELF)),
    "LESS": (_ALL, consumed(O.LESS, (3,), SELF, three, type=T.TENSOR_BOOL8)),
    "EQUAL": (_ALL, consumed(O.EQUAL, (3,), three, SELF, type=T.TENSOR_BOOL8)),
    "LOGICAL_OR": (_ALL[4:], consumed(O.LOGICAL_OR, (3,), SELF, three)),
    "LOGICAL_NOT": (_ALL[4:], consumed(O.LOGICAL_NOT, (1,), SELF)),
    "SELECT": (_NUMBERS, lambda g, x: selected(g, x)),
    "ABS": (_ALL[:1] + _ALL[3:4], consumed(O.ABS, (1,), SELF)),
    "RELU": (_REALS, consumed(O.RELU, (1,), SELF)),
    "LOGISTIC": (_ALL[:1], consumed(O.LOGISTIC, (1,), SELF)),
    "PRELU": (_ALL[:1], consumed(O.PRELU, (1,), SELF, np.array([0.5], np.float32))),
    "CAST": ((_ALL[0], *_ALL[2:4]), consumed(O.CAST, (1,), SELF, type=T.TENSOR_FLOAT32)),
    "QUANTIZE": (_ALL[:1], consumed(O.QUANTIZE, (1,), SELF, type=T.TENSOR_QUANT8_ASYMM)),
    "DEQUANTIZE": (_QUANTIZED, consumed(O.DEQUANTIZE, (1,), SELF, type=T.TENSOR_FLOAT32)),
    "L2_NORMALIZATION": (_ALL[:1], consumed(O.L2_NORMALIZATION, (1,), SELF, 0)),
    "LOG_SOFTMAX": (_ALL[:1], consumed(O.LOG_SOFTMAX, (1,), SELF, 1.0, 0)),
    "SOFTMAX": (_ALL[:1], consumed(O.SOFTMAX, (1,), SELF, 1.0, 0)),
    "MEAN": (_REALS, consumed(O.MEAN, (1,), SELF, numbers(0), 0)),
    "REDUCE_MAX": (_REALS, consumed(O.REDUCE_MAX, (1,), SELF, numbers(0), True)),
    "REDUCE_ANY": (_ALL[4:], consumed(O.REDUCE_ANY, (1,), SELF, numbers(0), False)),
    "ARGMAX": (_NUMBERS, consumed(O.ARGMAX, (1,), SELF, 0, type=T.TENSOR_INT32)),
    "nothing": (_ALL, lambda g, x: [x]),
}  # fmt: skip
"""By name: the operand types that it takes, and how it reads the number."""


def topk(g: GraphBuilder, x: Value) -> list[Value]:
    kind = OperandType(x.operand.type)
    best, place = g.variable(kind, (1,), **quantized(kind)), g.variable(T.TENSOR_INT32, (1,))
    g.operation(O.TOPK_V2, [x, g.constant(1)], [best, place])
    return [best, place]


def selected(g: GraphBuilder, x: Value) -> list[Value]:
    kind = OperandType(x.operand.type)
    y = g.variable(kind, (1,), **quantized(kind))
    g.operation(O.SELECT, [g.constant(np.array([True])), x, x], [y])
    return [y]


def value_of(kind: OperandType, shape: tuple[int, ...]) -> Array:
    dtype = operand_dtype(kind)
    drawn = np.random.default_rng(3).permutation(int(np.prod(shape))).reshape(shape)
    # Odd numbers: their mean is a whole number, which no rounding moves.
    return (drawn % 2).astype(dtype) if kind == T.TENSOR_BOOL8 else (2 * drawn + 1).astype(dtype)


PART = 3
"""Of the pairs of a producer and a consumer, one in so many is in the ordinary run, another one for each type."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["part", "whole"]
)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_single_number_is_read_as_the_reference_reads_it(producer: str, is_whole: bool) -> None:
    kinds = next(kinds for name, kinds in TYPES.items() if producer.startswith(name))
    first = list(PRODUCERS).index(producer)
    differences, count = [], 0
    for turn, kind in enumerate(kinds):
        for place, (consumer, (taken, consume)) in enumerate(CONSUMERS.items(), first + turn):
            if place % PART and not is_whole:
                continue
            g = GraphBuilder()
            number = PRODUCERS[producer](g, kind)
            if number.operand.type not in taken:
                continue
            model = g.build(consume(g, number))
            inputs = [value_of(OperandType(o.type), tuple(o.dimensions)) for o in model.main.inputs]
            wanted = Interpreter(model).run(inputs, RunControl())
            count += 1
            try:
                got = executed(model, inputs)
            except Exception as e:  # the matrix tells all of them at once
                differences.append(f"{kind.name} {consumer}: {type(e).__name__}: {e}")
                continue
            for a, b in zip(got, wanted, strict=True):
                if a.shape != b.shape or not np.allclose(
                    a.astype(np.float64), b.astype(np.float64), 1e-6, 1e-6
                ):
                    differences.append(f"{kind.name} {consumer}: {a} for {b}")
    assert count > 0
    assert differences == []


def test_file_whose_tensors_get_other_shapes_is_unsupported() -> None:
    g = GraphBuilder()
    x = g.input(T.TENSOR_FLOAT32, (2, 3))
    lowered = lower(
        g.build([g.result(O.REDUCE_SUM, [x, g.constant(numbers(0)), g.constant(False)], x, (3,))])
    )
    check(lowered)
    shapes = ((2, 3), *((1,) if shape == (3,) else shape for shape in lowered.shapes[1:]))
    with pytest.raises(Unsupported, match=r"LiteRT gives tensor t\d+ shape \(3,\), expected \(1,\)"):
        check(msgspec.structs.replace(lowered, shapes=shapes))


def executed(model: Any, inputs: list[Array]) -> list[Array]:
    """The outputs, computed as the driver computes them."""
    lowered = lower(model)
    check(lowered)
    operands = model.main.outputs
    (engine,) = make_engines(lowered, 1, [tuple(o.dimensions) for o in operands], 1)
    buffers = [np.zeros(256, np.uint8) for _ in operands]
    areas = [OutputArea(o, tuple(o.dimensions), b) for o, b in zip(operands, buffers, strict=True)]
    shapes = [s.dimensions for s in engine.run(inputs, areas)]
    return [
        np.frombuffer(b, operand_dtype(o.type), int(np.prod(s))).reshape(s)
        for b, o, s in zip(buffers, operands, shapes, strict=True)
    ]

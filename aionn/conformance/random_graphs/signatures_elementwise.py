"""Random instances of the operations that treat each element by itself: arithmetic, comparison, logic, activation, conversion.

Owns ``SIGNATURES`` of these operations, as data with one builder function a form.

Source: the operation signatures of the NN HAL's random graph generator, and the operations' contracts for what came later.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aionn.conformance.random_graphs.signatures import (
    BOOL8,
    F16,
    F32,
    FLOATS,
    I32,
    Q8,
    Q8S,
    Q8SYM,
    Q16A,
    Q16S,
    Array,
    Draft,
    Guarantee,
    Signature,
    Value,
    by_level,
)
from aionn.hal import OPERAND_TYPE_PROPERTIES, OperandType, OperationType

__all__ = ["SIGNATURES"]

_ANY = Guarantee.NONE
_NOT_NEGATIVE = Guarantee.NON_NEGATIVE
_NOT_ZERO = Guarantee.NON_ZERO
_POSITIVE = Guarantee.NON_NEGATIVE | Guarantee.NON_ZERO
_UP_TO_4 = (1, 2, 3, 4)
_UP_TO_5 = (1, 2, 3, 4, 5)


def _few_values(draft: Draft, value: Value) -> Callable[[], Array]:
    """Stored numbers around the zero point."""

    def fill() -> Array:
        drawn = draft.rng.integers(-2, 2, value.shape, endpoint=True) + value.zero_point
        properties = OPERAND_TYPE_PROPERTIES[value.type]
        if properties.is_quantized:
            drawn = np.clip(drawn, properties.zero_point_min, properties.zero_point_max)
        return np.asarray(drawn)

    return fill


def _broadcast(
    *,
    has_activation: bool = False,
    output_type: OperandType | None = None,
    asks: tuple[Guarantee, Guarantee] = (_ANY, _ANY),
    is_linkable: bool = True,
    has_few_values: bool = False,
) -> Callable[[Draft], None]:
    """Two inputs whose shapes broadcast; the second may have fewer axes, or, exchanged, the first.

    With ``has_few_values`` they have the same quantisation and small whole numbers, so that some are equal.
    """

    def build(draft: Draft) -> None:
        rank = draft.rank
        result = draft.frees()
        missing = rank - draft.integer(1, rank)
        first, second = list(result), result[missing:]
        for axis in range(missing, rank):
            if draft.chance(0.5):
                continue
            if draft.chance(0.5):
                first[axis] = draft.extents.extent(1)
            else:
                second[axis - missing] = draft.extents.extent(1)
        if draft.chance(0.5):
            first, second = second, first
        a = draft.tensor(first, asks=asks[0])
        b = draft.tensor(second, asks=asks[1], like=a if has_few_values else None)
        if has_few_values and draft.type != BOOL8:
            a.fill, b.fill = _few_values(draft, a), _few_values(draft, b)
        if has_activation:
            draft.activation(none_only=draft.type == I32)
        quantization = None
        if draft.signature.operation == OperationType.MUL and draft.is_quantized:
            # The output's scale must be larger than the product of the inputs'.
            least = a.scale * b.scale
            quantization = (draft.real(least * 1.001, least * 5), draft.quantization(draft.type)[1])
        draft.output(result, output_type, quantization=quantization, is_linkable=is_linkable)

    return build


def _elementwise(
    asks: Guarantee = _ANY,
    gives: Guarantee = _ANY,
    *,
    keeps_quantization: bool = True,
    quantization: dict[OperandType, tuple[float, int]] | None = None,
    scalar: tuple[float, float] | None = None,
) -> Callable[[Draft], None]:
    """One input, an output of the same shape."""

    def build(draft: Draft) -> None:
        x = draft.tensor(draft.frees(), asks=asks)
        if scalar is not None:
            draft.real_scalar_between(*scalar)
        fixed = None if quantization is None else quantization.get(draft.type)
        like = x if keeps_quantization and fixed is None else None
        draft.output(x.dimensions, like=like, quantization=fixed, gives=gives)

    return build


def _convert(output_type: OperandType) -> Callable[[Draft], None]:
    """One input, an output of the same shape and another type."""

    def build(draft: Draft) -> None:
        x = draft.tensor(draft.frees())
        same = output_type == draft.type
        y = draft.output(x.dimensions, output_type, like=x if same else None)
        # A scale that float16 cannot hold would be rounded on one side only.
        for value, other in ((x, y), (y, x)):
            if other.type == F16:
                value.scale = float(np.float16(value.scale))

    return build


def _select(draft: Draft) -> None:
    shape = draft.frees()
    draft.tensor(shape, BOOL8)
    a = draft.tensor(shape)
    draft.tensor(shape, like=a)
    draft.output(shape, like=a)


_LOGISTIC_OUTPUT = {Q8: (1 / 256, 0), Q8S: (1 / 256, -128)}
_TANH_OUTPUT = {Q8: (1 / 128, 128), Q8S: (1 / 128, 0)}
_COMPARED = {3: (F32, F16, I32, Q8), 4: (Q8S,)}
_EQUALITY = _broadcast(output_type=BOOL8, has_few_values=True)
_RELU_TYPES = {1: (F32, Q8), 3: (F16,), 4: (Q8S,)}

O = OperationType  # noqa: E741 - the table below has one on every line

SIGNATURES: tuple[Signature, ...] = (
    *by_level(
        O.ADD,
        {1: (F32, Q8), 3: (F16,), 4: (Q8S, I32)},
        _UP_TO_4,
        _broadcast(has_activation=True),
    ),
    *by_level(O.MUL, {1: (F32, Q8), 3: (F16,), 4: (Q8S, I32)}, _UP_TO_4, _broadcast(has_activation=True)),
    *by_level(O.SUB, {2: (F32,), 3: (F16, Q8), 4: (Q8S, I32)}, _UP_TO_4, _broadcast(has_activation=True)),
    # Quotients and powers may be infinite: nothing is linked to them.
    *by_level(
        O.DIV,
        {2: (F32,), 3: (F16,), 4: (I32,)},
        _UP_TO_4,
        _broadcast(has_activation=True, asks=(_ANY, _NOT_ZERO), is_linkable=False),
    ),
    *by_level(O.POW, {3: FLOATS}, _UP_TO_5, _broadcast(asks=(_NOT_NEGATIVE, _ANY), is_linkable=False)),
    *by_level(O.MAXIMUM, {3: (F32, F16, Q8, I32), 4: (Q8S,)}, _UP_TO_5, _broadcast()),
    *by_level(O.MINIMUM, {3: (F32, F16, Q8, I32), 4: (Q8S,)}, _UP_TO_5, _broadcast()),
    *by_level(O.PRELU, {3: (F32, F16, Q8), 4: (Q8S,)}, _UP_TO_5, _broadcast()),
    *by_level(O.LOGICAL_AND, {3: (BOOL8,)}, _UP_TO_5, _broadcast()),
    *by_level(O.LOGICAL_OR, {3: (BOOL8,)}, _UP_TO_5, _broadcast()),
    *by_level(O.EQUAL, {3: (*_COMPARED[3], BOOL8), 4: (Q8S,)}, _UP_TO_4, _EQUALITY),
    *by_level(O.NOT_EQUAL, {3: (*_COMPARED[3], BOOL8), 4: (Q8S,)}, _UP_TO_4, _EQUALITY),
    *by_level(O.GREATER, _COMPARED, _UP_TO_4, _broadcast(output_type=BOOL8)),
    *by_level(O.GREATER_EQUAL, _COMPARED, _UP_TO_4, _broadcast(output_type=BOOL8)),
    *by_level(O.LESS, _COMPARED, _UP_TO_4, _broadcast(output_type=BOOL8)),
    *by_level(O.LESS_EQUAL, _COMPARED, _UP_TO_4, _broadcast(output_type=BOOL8)),
    *by_level(O.FLOOR, {1: (F32,), 3: (F16,)}, _UP_TO_4, _elementwise()),
    *by_level(O.RELU, _RELU_TYPES, _UP_TO_4, _elementwise(gives=_NOT_NEGATIVE)),
    *by_level(O.RELU1, _RELU_TYPES, _UP_TO_4, _elementwise()),
    *by_level(O.RELU6, _RELU_TYPES, _UP_TO_4, _elementwise(gives=_NOT_NEGATIVE)),
    *by_level(
        O.LOGISTIC,
        {1: (F32, Q8), 3: (F16,), 4: (Q8S,)},
        _UP_TO_4,
        _elementwise(gives=_POSITIVE, quantization=_LOGISTIC_OUTPUT),
    ),
    *by_level(
        O.TANH, {1: (F32,), 3: (F16, Q8), 4: (Q8S,)}, _UP_TO_4, _elementwise(quantization=_TANH_OUTPUT)
    ),
    *by_level(O.HARD_SWISH, {4: (F32, F16, Q8, Q8S)}, _UP_TO_4, _elementwise(keeps_quantization=False)),
    *by_level(O.ELU, {4: FLOATS}, _UP_TO_5, _elementwise(scalar=(0.0, 10.0))),
    *by_level(O.ABS, {3: FLOATS, 4: (I32,)}, _UP_TO_5, _elementwise(gives=_NOT_NEGATIVE)),
    *by_level(O.EXP, {3: FLOATS}, _UP_TO_5, _elementwise(gives=_POSITIVE)),
    *by_level(O.NEG, {3: (*FLOATS, I32)}, _UP_TO_5, _elementwise()),
    *by_level(O.SIN, {3: FLOATS}, _UP_TO_5, _elementwise()),
    *by_level(O.LOG, {3: FLOATS}, _UP_TO_5, _elementwise(asks=_POSITIVE)),
    *by_level(O.SQRT, {3: FLOATS}, _UP_TO_5, _elementwise(asks=_NOT_NEGATIVE, gives=_NOT_NEGATIVE)),
    *by_level(O.RSQRT, {3: FLOATS}, _UP_TO_5, _elementwise(asks=_POSITIVE, gives=_NOT_NEGATIVE)),
    *by_level(
        O.RSQRT,
        {7: (Q8, Q8S)},
        _UP_TO_4,
        _elementwise(asks=_POSITIVE, keeps_quantization=False),
        "quantized",
    ),
    *by_level(O.LOGICAL_NOT, {3: (BOOL8,)}, _UP_TO_5, _elementwise()),
    *by_level(O.DEQUANTIZE, {1: (Q8,), 3: (Q8SYM,), 4: (Q8S,)}, _UP_TO_4, _convert(F32), "float32"),
    *by_level(O.DEQUANTIZE, {3: (Q8, Q8SYM), 4: (Q8S,)}, _UP_TO_4, _convert(F16), "float16"),
    *by_level(O.QUANTIZE, {3: FLOATS}, _UP_TO_4, _convert(Q8), "unsigned"),
    *by_level(O.QUANTIZE, {4: FLOATS}, _UP_TO_4, _convert(Q8S), "signed"),
    *by_level(O.CAST, {3: (F32, F16, Q8, I32)}, _UP_TO_5, _convert(F32), "to_float32"),
    *by_level(O.CAST, {3: (F32, F16, Q8, I32)}, _UP_TO_5, _convert(F16), "to_float16"),
    *by_level(O.CAST, {3: (F32, F16, Q8, I32)}, _UP_TO_5, _convert(Q8), "to_quant8"),
    *by_level(O.CAST, {3: (F32, F16, Q8, I32)}, _UP_TO_5, _convert(I32), "to_int32"),
    *(
        signature
        for type in (BOOL8, Q16A, Q16S, Q8S, Q8SYM)
        for signature in by_level(O.CAST, {4: (type,)}, _UP_TO_5, _convert(type), f"of_{type.name}")
    ),
    *by_level(O.SELECT, {3: (F32, F16, I32, Q8), 4: (Q8S,)}, _UP_TO_4, _select),
)

"""Claims about the functions of one operand that the conformance data leave open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32 = Operand(T.TENSOR_FLOAT32)
F16 = Operand(T.TENSOR_FLOAT16)
I32 = Operand(T.TENSOR_INT32)
DEFINITIONS = {
    O.ABS: abs,
    O.EXP: math.exp,
    O.FLOOR: math.floor,
    O.LOG: math.log,
    O.NEG: lambda x: -x,
    O.RSQRT: lambda x: 1 / math.sqrt(x),
    O.SIN: math.sin,
    O.SQRT: math.sqrt,
}


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_kernel_follows_the_definition(bench: Any, operation: OperationType) -> None:
    values = np.random.default_rng(1).uniform(0.01, 8, (3, 50)).astype(np.float32)
    got = bench.run(operation, [(F32, values)], F32)
    expected = np.array([DEFINITIONS[operation](float(v)) for v in values.reshape(-1)]).reshape(values.shape)
    assert got.dtype == np.float32
    assert np.allclose(got, expected, rtol=4e-7, atol=1e-7)


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_float16_is_the_float32_result_rounded_once(bench: Any, operation: OperationType) -> None:
    values = np.random.default_rng(2).uniform(0.01, 8, 200).astype(np.float16)
    wide = bench.run(operation, [(F32, values.astype(np.float32))], F32)
    got = bench.run(operation, [(F16, values)], F16)
    assert got.dtype == np.float16
    assert np.array_equal(got, wide.astype(np.float16))


@pytest.mark.parametrize(
    ("operation", "value", "expected"),
    [
        (O.LOG, 0.0, -math.inf),
        (O.LOG, -1.0, math.nan),
        (O.SQRT, -1.0, math.nan),
        (O.RSQRT, 0.0, math.inf),
        (O.RSQRT, -1.0, math.nan),
        (O.EXP, 200.0, math.inf),
        (O.FLOOR, -0.5, -1.0),
    ],
)
def test_outside_of_the_domain_the_result_is_ieee(
    bench: Any, operation: OperationType, value: float, expected: float
) -> None:
    (got,) = bench.run(operation, [(F32, np.float32([value]))], F32).tolist()
    assert got == expected or (math.isnan(got) and math.isnan(expected))


@pytest.mark.parametrize("operation", [O.ABS, O.NEG])
def test_least_int32_stays_what_it_is(bench: Any, operation: OperationType) -> None:
    got = bench.run(operation, [(I32, np.int32([-(2**31), -5]))], I32)
    assert got.dtype == np.int32
    assert got.tolist() == [-(2**31), 5]


def test_quantised_reciprocal_root_of_nothing_is_the_largest_value(bench: Any) -> None:
    source = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.25, -100)
    output = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.1, -50)
    values = np.int8([-128, -100, -99, -96, -84, 127])
    # Two values at or below zero, then 0.25, 1, 4 and 56.75, whose reciprocal roots are 2, 1, 0.5 and 0.13.
    got = bench.run(O.RSQRT, [(source, values)], output)
    assert got.dtype == np.int8
    assert got.tolist() == [127, 127, -30, -40, -45, -49]


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_zero_sized_input_gives_a_zero_sized_output(bench: Any, operation: OperationType) -> None:
    assert bench.run(operation, [(F32, np.zeros((2, 0), np.float32))], F32).shape == (2, 0)


LEVELS: dict[OperationType, dict[OperandType, int]] = {
    O.ABS: {F32.type: 3, F16.type: 3, I32.type: 4},
    O.EXP: {F32.type: 3, F16.type: 3},
    O.FLOOR: {F32.type: 1, F16.type: 3},
    O.LOG: {F32.type: 3, F16.type: 3},
    O.NEG: {F32.type: 3, F16.type: 3, I32.type: 3},
    O.RSQRT: {F32.type: 3, F16.type: 3, T.TENSOR_QUANT8_ASYMM: 7, T.TENSOR_QUANT8_ASYMM_SIGNED: 7},
    O.SIN: {F32.type: 3, F16.type: 3},
    O.SQRT: {F32.type: 3, F16.type: 3},
}


@pytest.mark.parametrize("operation", LEVELS)
def test_types_and_levels(bench: Any, operation: OperationType) -> None:
    for kind in (t for t in T if t.name.startswith("TENSOR_")):
        tensor = Operand(kind, (2, 3))
        if kind in LEVELS[operation]:
            assert bench.level(operation, [tensor], [tensor]) == LEVELS[operation][kind]
        else:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_"):
                bench.level(operation, [tensor], [tensor])


def test_output_of_another_type_is_refused(bench: Any) -> None:
    with pytest.raises(InvalidModel, match="output 0: expected TENSOR_FLOAT32, got TENSOR_FLOAT16"):
        bench.level(O.SIN, [F32], [F16])


def test_only_floor_bounds_the_rank(bench: Any) -> None:
    tensor = Operand(T.TENSOR_FLOAT32, (1, 1, 1, 1, 2))
    assert bench.level(O.EXP, [tensor], [tensor]) == 3
    with pytest.raises(InvalidModel, match="input 0: expected rank of at most 4, got 5"):
        bench.level(O.FLOOR, [tensor], [tensor])

"""Claims about the arithmetic operations that the conformance data leave open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32 = Operand(T.TENSOR_FLOAT32)
F16 = Operand(T.TENSOR_FLOAT16)
I32 = Operand(T.TENSOR_INT32)
SCALAR = Operand(T.INT32)
NONE, RELU, RELU1, RELU6 = (np.int32(value) for value in range(4))
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def quantize_multiplier(real: float) -> tuple[int, int]:
    fraction, shift = math.frexp(real)
    return round(fraction * 2**31), shift


def plain_sum(bench: Any, a: int, b: int, sign: int, x: Operand, y: Operand, z: Operand) -> int:
    twice = 2 * max(x.scale, y.scale)
    m1, s1 = quantize_multiplier(x.scale / twice)
    m2, s2 = quantize_multiplier(y.scale / twice)
    m, s = quantize_multiplier(twice / (2**20 * z.scale))
    total = bench.fixed_point_product((a - x.zero_point) * 2**20, m1, s1) + bench.fixed_point_product(
        (b - y.zero_point) * 2**20, sign * m2, s2
    )
    return bench.fixed_point_product(total, m, s) + z.zero_point


def plain_product(bench: Any, a: int, b: int, x: Operand, y: Operand, z: Operand) -> int:
    real = np.float32(x.scale) * np.float32(y.scale) / np.float32(z.scale)
    return (
        bench.fixed_point_product((a - x.zero_point) * (b - y.zero_point), *quantize_multiplier(float(real)))
        + z.zero_point
    )


def random_operands(rng: np.random.Generator, kind: OperandType) -> tuple[list[Operand], int, int]:
    low, high = (-128, 127) if kind == T.TENSOR_QUANT8_ASYMM_SIGNED else (0, 255)
    scales = [float(np.float32(s)) for s in np.exp(rng.uniform(-3, 1, 3))]
    zeros = [int(z) for z in rng.integers(low, high + 1, 3)]
    return [Operand(kind, (), s, z) for s, z in zip(scales, zeros, strict=True)], low, high


@pytest.mark.parametrize("kind", [T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize("operation", [O.ADD, O.SUB, O.MUL])
def test_quantised_kernels_equal_the_definition_to_the_last_bit(
    bench: Any, operation: OperationType, kind: OperandType
) -> None:
    rng = np.random.default_rng(11)
    for _ in range(6):
        (x, y, z), low, high = random_operands(rng, kind)
        if operation == O.MUL:
            z = Operand(kind, (), float(np.float32(x.scale * y.scale * rng.uniform(1.01, 60))), z.zero_point)
        dtype = np.int8 if low else np.uint8
        a, b = rng.integers(low, high + 1, (2, 400)).astype(dtype)
        got = bench.run(operation, [(x, a), (y, b), (SCALAR, NONE)], z)
        assert got.dtype == dtype
        for p, q, value in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
            if operation == O.MUL:
                plain = plain_product(bench, p, q, x, y, z)
            else:
                plain = plain_sum(bench, p, q, 1 if operation == O.ADD else -1, x, y, z)
            assert value == min(max(plain, low), high)


def test_kept_table_and_direct_computing_agree(bench: Any) -> None:
    rng = np.random.default_rng(12)
    (x, y, z), low, high = random_operands(rng, T.TENSOR_QUANT8_ASYMM)
    a, b = rng.integers(low, high + 1, (2, 5000)).astype(np.uint8)
    kept: dict[str, Any] = {}
    whole = bench.run(O.ADD, [(x, a), (y, b), (SCALAR, RELU)], z, kept=kept)
    assert kept
    parts = [
        bench.run(O.ADD, [(x, a[i : i + 500]), (y, b[i : i + 500]), (SCALAR, RELU)], z)
        for i in range(0, 5000, 500)
    ]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize(
    ("activation", "low", "high"), [(NONE, 0, 255), (RELU, 20, 255), (RELU1, 10, 30), (RELU6, 20, 80)]
)
def test_quantised_activation_clamps_to_its_range(
    bench: Any, activation: np.int32, low: int, high: int
) -> None:
    x = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 128)
    z = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.1, 20)
    values = np.arange(256, dtype=np.uint8)
    got = bench.run(O.ADD, [(x, values), (x, np.full(256, 128, np.uint8)), (SCALAR, activation)], z)
    assert (got.min(), got.max()) == (low, high)


def test_sum_whose_output_scale_is_too_small_ends_the_execution(bench: Any) -> None:
    x, z = Operand(T.TENSOR_QUANT8_ASYMM, (), 4.0, 0), Operand(T.TENSOR_QUANT8_ASYMM, (), 2.0**-19, 0)
    with pytest.raises(InvalidArgument, match="output multiplier between 0 and 1"):
        bench.run(O.ADD, [(x, np.uint8([1])), (x, np.uint8([1])), (SCALAR, NONE)], z)


def test_float16_is_rounded_once(bench: Any) -> None:
    a, b = np.float16([2048, 1]), np.float16([1.0009765625, 2.0**-11])
    got = bench.run(O.ADD, [(F16, a), (F16, b), (SCALAR, NONE)], F16)
    assert got.dtype == np.float16
    assert got.tolist() == [float(np.float16(2049.0009765625)), 1.0]


@pytest.mark.parametrize(
    ("operation", "a", "b", "expected"),
    [
        (O.ADD, INT32_MAX, 1, INT32_MIN),
        (O.SUB, INT32_MIN, 1, INT32_MAX),
        (O.MUL, 65536, 65536, 0),
        (O.DIV, INT32_MIN, -1, INT32_MIN),
        (O.DIV, 7, -2, -4),
        (O.DIV, -7, -2, 3),
        (O.DIV, 5, 0, 0),
    ],
)
def test_int32_wraps_around_and_divides_towards_minus_infinity(
    bench: Any, operation: OperationType, a: int, b: int, expected: int
) -> None:
    got = bench.run(operation, [(I32, np.int32([a])), (I32, np.int32([b])), (SCALAR, NONE)], I32)
    assert got.dtype == np.int32
    assert got.tolist() == [expected]


def test_activation_given_at_run_time_is_checked_there(bench: Any) -> None:
    ones = np.ones(2, np.int32)
    with pytest.raises(InvalidArgument, match="input 2: expected a fused activation from 0 to 3, got 9"):
        bench.run(O.ADD, [(I32, ones), (I32, ones), (SCALAR, np.int32(9))], I32)
    with pytest.raises(InvalidArgument, match="input 2: expected no fused activation"):
        bench.run(O.ADD, [(I32, ones), (I32, ones), (SCALAR, RELU)], I32)


def test_zero_sized_operand_gives_a_zero_sized_result(bench: Any) -> None:
    for operand, dtype in ((F32, np.float32), (Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0), np.uint8)):
        a, b = np.zeros((2, 0, 3), dtype), np.zeros((1, 3), dtype)
        assert bench.run(O.ADD, [(operand, a), (operand, b), (SCALAR, NONE)], operand).shape == (2, 0, 3)


def test_extrema_requantise_before_they_compare(bench: Any) -> None:
    a, b = Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0, 0), Operand(T.TENSOR_QUANT8_ASYMM, (), 0.25, 100)
    output = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 10)
    x, y = np.uint8([3, 200, 0]), np.uint8([120, 255, 99])  # 3, 200, 0 and 5, 38.75, -0.25
    assert bench.run(O.MAXIMUM, [(a, x), (b, y)], output).tolist() == [20, 255, 10]
    # -0.25 is half a step below the zero point, 9.5, and rounds away from zero.
    assert bench.run(O.MINIMUM, [(a, x), (b, y)], output).tolist() == [16, 88, 10]


def test_extrema_keep_nan(bench: Any) -> None:
    a, b = np.float32([np.nan, 1]), np.float32([1, np.nan])
    assert np.isnan(bench.run(O.MAXIMUM, [(F32, a), (F32, b)], F32)).all()


def test_power_outside_of_the_reals_is_nan(bench: Any) -> None:
    got = bench.run(O.POW, [(F32, np.float32([-8, -8, 0, 2])), (F32, np.float32([1 / 3, 3, 0, -1]))], F32)
    assert np.isnan(got[0])
    assert got[1:].tolist() == [-512.0, 1.0, 0.5]


def operand(kind: OperandType, *shape: int, scale: float = 0.0) -> Operand:
    return Operand(kind, shape, scale)


LEVELS = {
    O.ADD: {F32.type: 1, T.TENSOR_QUANT8_ASYMM: 1, F16.type: 3, T.TENSOR_QUANT8_ASYMM_SIGNED: 4, I32.type: 4},
    O.MUL: {F32.type: 1, T.TENSOR_QUANT8_ASYMM: 1, F16.type: 3, T.TENSOR_QUANT8_ASYMM_SIGNED: 4, I32.type: 4},
    O.SUB: {F32.type: 2, T.TENSOR_QUANT8_ASYMM: 3, F16.type: 3, T.TENSOR_QUANT8_ASYMM_SIGNED: 4, I32.type: 4},
    O.DIV: {F32.type: 2, F16.type: 3, I32.type: 4},
    O.POW: {F32.type: 3, F16.type: 3},
    O.MAXIMUM: {
        F32.type: 3,
        F16.type: 3,
        I32.type: 3,
        T.TENSOR_QUANT8_ASYMM: 3,
        T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
    },
}


@pytest.mark.parametrize("operation", LEVELS)
def test_types_and_levels(bench: Any, operation: OperationType) -> None:
    scalars = [SCALAR] if operation in (O.ADD, O.SUB, O.MUL, O.DIV) else []
    for kind in (t for t in T if t.name.startswith("TENSOR_")):
        tensor = Operand(kind, (2, 3), 0.5 if "QUANT" in kind.name else 0.0)
        if kind in LEVELS[operation]:
            assert bench.level(operation, [tensor, tensor, *scalars], [tensor]) == LEVELS[operation][kind]
        else:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_"):
                bench.level(operation, [tensor, tensor, *scalars], [tensor])


@pytest.mark.parametrize(
    ("operation", "inputs", "output", "constants", "message"),
    [
        (O.ADD, [F32, F32], F32, {}, "number of inputs: expected 3, got 2"),
        (O.ADD, [F32, F16, SCALAR], F32, {}, "input 1: expected TENSOR_FLOAT32, got TENSOR_FLOAT16"),
        (O.ADD, [F32, F32, F32], F32, {}, "input 2: expected INT32, got TENSOR_FLOAT32"),
        (O.ADD, [F32, F32, SCALAR], I32, {}, "output 0: expected TENSOR_FLOAT32, got TENSOR_INT32"),
        (
            O.ADD,
            [F32, F32, SCALAR],
            F32,
            {2: 4},
            r"input 2: expected a fused activation of \[0, 1, 2, 3\], got 4",
        ),
        (O.SUB, [I32, I32, SCALAR], I32, {2: 1}, r"input 2: expected a fused activation of \[0\], got 1"),
        (
            O.DIV,
            [operand(F32.type, 1, 1, 1, 1, 2), F32, SCALAR],
            F32,
            {},
            "input 0: expected rank of at most 4",
        ),
        (
            O.POW,
            [operand(F32.type, 2), operand(F32.type, 3)],
            F32,
            {},
            "input 1: expected a shape that broadcasts",
        ),
        (
            O.MUL,
            [operand(T.TENSOR_QUANT8_ASYMM, 2, scale=0.5)] * 2 + [SCALAR],
            operand(T.TENSOR_QUANT8_ASYMM, 2, scale=0.25),
            {},
            "output 0: expected a scale above the product 0.25",
        ),
    ],
)
def test_refusals_name_the_place(
    bench: Any,
    operation: OperationType,
    inputs: list[Operand],
    output: Operand,
    constants: dict[int, object],
    message: str,
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(operation, inputs, [output], constants)

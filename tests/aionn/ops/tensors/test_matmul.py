"""Claims about FULLY_CONNECTED and BATCH_MATMUL that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.numerics.fixed_point import multiply_by_quantized_multiplier, quantize_multiplier

T = OperandType
O = OperationType  # noqa: E741
SCALAR, FLAG = Operand(T.INT32), Operand(T.BOOL)
NONE, RELU1 = (SCALAR, np.int32(0)), (SCALAR, np.int32(2))


def flags(*values: bool) -> list[tuple[Operand, Any]]:
    return [(FLAG, np.bool_(value)) for value in values]


@pytest.mark.parametrize("kind", [T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize("batch", [1, 5])
def test_quantised_fully_connected_rounds_the_exact_sum_once(
    bench: Any, kind: OperandType, batch: int
) -> None:
    rng = np.random.default_rng(1)
    low, dtype = (0, np.uint8) if kind == T.TENSOR_QUANT8_ASYMM else (-128, np.int8)
    data = rng.integers(low, low + 256, (batch, 1, 40)).astype(dtype)
    weights = rng.integers(low, low + 256, (700, 40)).astype(dtype)
    bias = rng.integers(-9000, 9000, 700).astype(np.int32)
    got = bench.run(
        O.FULLY_CONNECTED,
        [
            (Operand(kind, (), 0.3, low + 7), data),
            (Operand(kind, (), 0.2, low + 130), weights),
            (Operand(T.TENSOR_INT32, (), 0.06), bias),
            NONE,
        ],
        Operand(kind, (), 7.0, low + 90),
    )
    sums = (data[:, 0].astype(int) - low - 7) @ (weights.astype(int) - low - 130).T + bias
    multiplier, shift = quantize_multiplier(float(np.float32(0.3) * np.float32(0.2)) / 7.0)
    rounded = (sums * multiplier + (1 << (30 - shift))) >> (31 - shift)
    np.testing.assert_array_equal(got, (rounded + low + 90).clip(low, low + 255))


def test_fully_connected_takes_any_rank_as_rows(bench: Any) -> None:
    rng = np.random.default_rng(2)
    data, weights, bias = (rng.normal(size=s).astype(np.float32) for s in ((2, 3, 2, 4), (5, 8), (5,)))
    f32 = Operand(T.TENSOR_FLOAT32)
    got = bench.run(O.FULLY_CONNECTED, [(f32, data), (f32, weights), (f32, bias), RELU1], f32)
    np.testing.assert_allclose(got, (data.reshape(6, 8) @ weights.T + bias).clip(-1, 1), rtol=1e-5, atol=1e-5)


def test_fully_connected_of_an_empty_batch_is_empty(bench: Any) -> None:
    f16 = Operand(T.TENSOR_FLOAT16)
    arrays = [np.zeros(shape, np.float16) for shape in ((0, 8), (5, 8), (5,))]
    got = bench.run(O.FULLY_CONNECTED, [*((f16, a) for a in arrays), NONE], f16)
    assert got.shape == (0, 5) and got.dtype == np.float16


def test_fully_connected_keeps_its_weights_unwritten(bench: Any) -> None:
    f32 = Operand(T.TENSOR_FLOAT32)
    inputs = [
        (f32, np.ones((2, 3), np.float32)),
        (f32, np.ones((4, 3), np.float32)),
        (f32, np.ones(4, np.float32)),
        NONE,
    ]
    kept: dict[str, Any] = {}
    first = bench.run(O.FULLY_CONNECTED, inputs, f32, kept=kept)
    np.testing.assert_array_equal(bench.run(O.FULLY_CONNECTED, inputs, f32, kept=kept), first)
    assert kept


@pytest.mark.parametrize(
    ("data", "weights", "bias", "message"),
    [
        ((2, 9), (4, 8), (4,), r"input 0: expected a multiple of 8 elements, got shape \[2, 9\]"),
        ((9,), (4, 8), (4,), r"input 0: expected rank 2 or 3 or 4, got shape \[9\]"),
        ((2, 8), (4, 8, 1), (4,), "input 1: expected rank 2"),
        ((2, 8), (4, 8), (3,), "input 2: expected extent 4 on axis 0"),
    ],
)
def test_fully_connected_refuses_shapes_that_do_not_fit(
    bench: Any, data: Any, weights: Any, bias: Any, message: str
) -> None:
    operands = [Operand(T.TENSOR_FLOAT32, shape) for shape in (data, weights, bias)]
    with pytest.raises(InvalidModel, match=message):
        bench.level(O.FULLY_CONNECTED, [*operands, SCALAR], [Operand(T.TENSOR_FLOAT32)])


def test_fully_connected_has_no_weights_with_scales_per_channel(bench: Any) -> None:
    signed = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (2, 8), 0.5, 0)
    weights = Operand(T.TENSOR_QUANT8_SYMM_PER_CHANNEL, (4, 8))
    with pytest.raises(InvalidModel, match="input 1: expected TENSOR_QUANT8_ASYMM_SIGNED"):
        bench.level(O.FULLY_CONNECTED, [signed, weights, Operand(T.TENSOR_INT32, (4,)), SCALAR], [signed])


@pytest.mark.parametrize(("scale", "expected"), [(0.26, 1), (0.25, 3)])
def test_fully_connected_level_follows_the_output_scale(bench: Any, scale: float, expected: int) -> None:
    unsigned = Operand(T.TENSOR_QUANT8_ASYMM, (2, 8), 0.5, 0)
    bias = Operand(T.TENSOR_INT32, (2,), 0.25)
    output = Operand(T.TENSOR_QUANT8_ASYMM, (2, 2), scale, 0)
    assert bench.level(O.FULLY_CONNECTED, [unsigned, unsigned, bias, SCALAR], [output]) == expected


@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
def test_batch_matmul_transposes_what_its_flags_say(bench: Any, transposes: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(3)
    x, y = (
        rng.integers(-9, 9, (2, 3, 4, 5)).astype(np.int32),
        rng.integers(-9, 9, (2, 3, 5, 6)).astype(np.int32),
    )
    stored = [a.swapaxes(-1, -2) if t else a for a, t in zip((x, y), transposes, strict=True)]
    i32 = Operand(T.TENSOR_INT32)
    got = bench.run(O.BATCH_MATMUL, [*((i32, a) for a in stored), *flags(*transposes)], i32)
    np.testing.assert_array_equal(got, x @ y)
    assert got.dtype == np.int32


def test_batch_matmul_of_int32_wraps(bench: Any) -> None:
    i32 = Operand(T.TENSOR_INT32)
    x = np.full((1, 1), 2**30, np.int32)
    assert (
        bench.run(O.BATCH_MATMUL, [(i32, x), (i32, np.array([[5]], np.int32)), *flags(False, False)], i32)
        == 2**30
    )


def test_batch_matmul_of_signed_takes_both_zero_points_out(bench: Any) -> None:
    rng = np.random.default_rng(4)
    x, y = (
        rng.integers(-128, 128, (3, 7, 9)).astype(np.int8),
        rng.integers(-128, 128, (3, 9, 8)).astype(np.int8),
    )
    signed = T.TENSOR_QUANT8_ASYMM_SIGNED
    got = bench.run(
        O.BATCH_MATMUL,
        [(Operand(signed, (), 0.5, 100), x), (Operand(signed, (), 0.25, -50), y), *flags(False, False)],
        Operand(signed, (), 40.0, 5),
    )
    sums = (x.astype(int) - 100) @ (y.astype(int) + 50)
    expected = multiply_by_quantized_multiplier(sums, *quantize_multiplier(0.125 / 40.0)) + 5
    np.testing.assert_array_equal(got, expected.clip(-128, 127))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((2, 3, 4), (3, 4, 5), "expected the rank .* and batches of input 0"),
        ((3, 4), (2, 4, 5), "expected the rank .* and batches of input 0"),
        ((4,), (4,), "expected the rank"),
        ((3, 4), (5, 4), "input 1: expected 4 rows, got 5"),
        ((0, 4), (4, 5), "rows"),
    ],
)
def test_batch_matmul_refuses_shapes_that_do_not_fit(bench: Any, x: Any, y: Any, message: str) -> None:
    f32 = Operand(T.TENSOR_FLOAT32)
    pairs = [(f32, np.zeros(shape, np.float32)) for shape in (x, y)]
    with pytest.raises(InvalidArgument, match=message):
        bench.run(O.BATCH_MATMUL, [*pairs, *flags(False, False)], f32)


def test_batch_matmul_has_no_unsigned_form(bench: Any) -> None:
    unsigned = Operand(T.TENSOR_QUANT8_ASYMM, (2, 2), 0.5, 0)
    with pytest.raises(InvalidModel, match="input 0: expected TENSOR_FLOAT32"):
        bench.level(O.BATCH_MATMUL, [unsigned, unsigned, FLAG, FLAG], [unsigned])

"""Claims about activations that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.numerics.fixed_point import multiply_by_quantized_multiplier, quantize_multiplier

T = OperandType
O = OperationType  # noqa: E741
F32, F16 = Operand(T.TENSOR_FLOAT32), Operand(T.TENSOR_FLOAT16)
SIGNED, UNSIGNED = T.TENSOR_QUANT8_ASYMM_SIGNED, T.TENSOR_QUANT8_ASYMM
EVERY_BYTE = np.arange(256, dtype=np.uint8).reshape(2, 128)
REAL: dict[OperationType, Any] = {
    O.LOGISTIC: lambda v: 1 / (1 + np.exp(-v)),
    O.TANH: np.tanh,
    O.HARD_SWISH: lambda v: v * (v + 3).clip(0, 6) / 6,
}
OUTPUTS = {O.LOGISTIC: (1 / 256, 0), O.TANH: (1 / 128, 128), O.HARD_SWISH: (0.07, 50)}


def stored(kind: OperandType) -> np.ndarray[Any, Any]:
    return EVERY_BYTE if kind == UNSIGNED else EVERY_BYTE.view(np.int8)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("operation", REAL)
@pytest.mark.parametrize("kind", [UNSIGNED, SIGNED])
@pytest.mark.parametrize("scale", [0.004, 0.05, 0.3])
def test_tables_follow_the_real_function(
    bench: Any, operation: OperationType, kind: OperandType, scale: float
) -> None:
    low = 0 if kind == UNSIGNED else -128
    step, zero = OUTPUTS[operation]
    data, output = Operand(kind, (), scale, low + 120), Operand(kind, (), step, low + zero)
    got = bench.run(operation, [(data, stored(kind))], output)
    steps = REAL[operation]((stored(kind).astype(float) - data.zero_point) * scale) / step + output.zero_point
    # Fixed-point HARD_SWISH has 15 bits on the way, tables are rounded exactly.
    error = np.abs(got - steps.clip(low, low + 255))
    assert error.max() <= (1.0 if operation == O.HARD_SWISH else 0.5 + 1e-9)


@pytest.mark.parametrize("operation", REAL)
def test_float_functions_are_rounded_once_to_float16(bench: Any, operation: OperationType) -> None:
    values = np.random.default_rng(1).normal(scale=4, size=(4, 50)).astype(np.float16)
    got = bench.run(operation, [(F16, values)], F16)
    expected = REAL[operation](values.astype(np.float32)).astype(np.float16)
    assert got.dtype == np.float16
    assert np.abs(got.view(np.int16).astype(int) - expected.view(np.int16)).max() <= 1


def test_logistic_has_its_limits_at_infinity(bench: Any) -> None:
    values = np.array([-np.inf, -1e4, 1e4, np.inf], np.float32)
    assert bench.run(O.LOGISTIC, [(F32, values)], F32).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("operation", "bounds"), [(O.RELU, (100, 255)), (O.RELU1, (90, 110)), (O.RELU6, (100, 160))]
)
def test_quantised_relu_clips_stored_values(
    bench: Any, operation: OperationType, bounds: tuple[int, int]
) -> None:
    operand = Operand(UNSIGNED, (), 0.1, 100)
    got = bench.run(operation, [(operand, EVERY_BYTE)], operand)
    np.testing.assert_array_equal(got, EVERY_BYTE.clip(*bounds))
    assert got.dtype == np.uint8


def test_elu_is_exact_near_zero(bench: Any) -> None:
    values = np.array([-1e-6, 0.0, 1e-6, -50.0], np.float32)
    got = bench.run(O.ELU, [(F32, values), (Operand(T.FLOAT32), np.float32(2))], F32)
    np.testing.assert_allclose(got, [-2e-6, 0, 1e-6, -2], rtol=1e-5)


@pytest.mark.parametrize("kind", [UNSIGNED, SIGNED])
def test_quantised_prelu_has_a_multiplier_for_either_sign(bench: Any, kind: OperandType) -> None:
    low = 0 if kind == UNSIGNED else -128
    data, slope, output = (
        Operand(kind, (), 0.05, low + 130),
        Operand(kind, (), 0.02, low + 40),
        Operand(kind, (), 0.06, low + 70),
    )
    slopes = stored(kind).reshape(-1)[::16].reshape(16, 1, 1)
    got = bench.run(O.PRELU, [(data, stored(kind)), (slope, slopes)], output)
    x, a = stored(kind).astype(int) - data.zero_point, slopes.astype(int) - slope.zero_point
    above = multiply_by_quantized_multiplier(
        x, *quantize_multiplier(float(np.float32(0.05) / np.float32(0.06)))
    )
    real = np.float32(0.05) * np.float32(0.02) / np.float32(0.06)
    below = multiply_by_quantized_multiplier(x * a, *quantize_multiplier(float(real)))
    np.testing.assert_array_equal(
        got, (np.where(x >= 0, above, below) + output.zero_point).clip(low, low + 255)
    )
    assert got.shape == (16, 2, 128)


def test_prelu_refuses_shapes_that_do_not_broadcast(bench: Any) -> None:
    pairs = [(F32, np.zeros(shape, np.float32)) for shape in ((2, 3), (2,))]
    with pytest.raises(
        InvalidArgument, match=r"input 1: expected a shape that broadcasts with \[2, 3\], got \[2\]"
    ):
        bench.run(O.PRELU, pairs, F32)


@pytest.mark.parametrize("operation", [O.RELU, O.LOGISTIC, O.TANH, O.HARD_SWISH])
def test_empty_tensors_stay_empty(bench: Any, operation: OperationType) -> None:
    step, zero = OUTPUTS.get(operation, (0.1, 5))
    output = Operand(UNSIGNED, (), step, zero)
    data = output if operation == O.RELU else Operand(UNSIGNED, (), 0.1, 5)
    assert bench.run(operation, [(data, np.zeros((0, 3), np.uint8))], output).shape == (0, 3)


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [
        (O.LOGISTIC, T.TENSOR_FLOAT32, 1),
        (O.LOGISTIC, UNSIGNED, 1),
        (O.TANH, UNSIGNED, 3),
        (O.RELU6, T.TENSOR_FLOAT16, 3),
        (O.TANH, SIGNED, 4),
        (O.HARD_SWISH, T.TENSOR_FLOAT32, 4),
        (O.PRELU, UNSIGNED, 3),
        (O.PRELU, SIGNED, 4),
    ],
)
def test_level_follows_the_type(
    bench: Any, operation: OperationType, kind: OperandType, expected: int
) -> None:
    step, zero = OUTPUTS.get(operation, (0.1, 0))
    low = 0 if kind == UNSIGNED else -128
    output = Operand(kind, (), step, low + zero) if kind in (SIGNED, UNSIGNED) else Operand(kind)
    data = Operand(kind, (), 0.1, 0) if kind in (SIGNED, UNSIGNED) else Operand(kind)
    if operation == O.RELU6:
        output = data
    inputs = [data, data] if operation == O.PRELU else [data]
    assert bench.level(operation, inputs, [output]) == expected


@pytest.mark.parametrize(
    ("operation", "data", "output", "message"),
    [
        (
            O.LOGISTIC,
            Operand(UNSIGNED, (), 1.0, 0),
            Operand(UNSIGNED, (), 1 / 128, 0),
            "output 0: expected scale 1/256",
        ),
        (
            O.TANH,
            Operand(SIGNED, (), 1.0, 0),
            Operand(SIGNED, (), 1 / 128, 128),
            "output 0: expected zero point 0, got 128",
        ),
        (
            O.RELU,
            Operand(UNSIGNED, (), 1.0, 0),
            Operand(UNSIGNED, (), 1.0, 1),
            "output 0: expected scale 1.0 and zero point 0",
        ),
        (O.RELU, Operand(T.TENSOR_FLOAT32, (1,) * 5), F32, "rank of at most 4, got 5"),
        (O.HARD_SWISH, Operand(T.TENSOR_INT32), Operand(T.TENSOR_INT32), "input 0: expected TENSOR_FLOAT32"),
    ],
)
def test_activations_refuse_with_the_place(
    bench: Any, operation: OperationType, data: Operand, output: Operand, message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(operation, [data], [output])

"""Claims about SOFTMAX and LOG_SOFTMAX that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32, F16, SCALAR, BETA = (Operand(t) for t in (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.INT32, T.FLOAT32))
UNSIGNED_OUT = Operand(T.TENSOR_QUANT8_ASYMM, (), 1 / 256, 0)
SIGNED_OUT = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 1 / 256, -128)


def arguments(beta: float, axis: int | None = None) -> list[tuple[Operand, Any]]:
    pairs: list[tuple[Operand, Any]] = [(BETA, np.float32(beta))]
    return pairs if axis is None else [*pairs, (SCALAR, np.int32(axis))]


def real(values: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    powers = np.exp(values - values.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


@pytest.mark.parametrize("axis", [-3, -1, 0, 1, 2, None])
@pytest.mark.parametrize("output", [UNSIGNED_OUT, SIGNED_OUT])
def test_quantised_softmax_is_within_one_step_of_the_real_one(
    bench: Any, axis: int | None, output: Operand
) -> None:
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 256, (4, 5, 6)).astype(np.uint8)
    values = stored if output is UNSIGNED_OUT else (stored ^ 0x80).view(np.int8)
    data = Operand(output.type, (), 0.04, 3)
    got = bench.run(O.SOFTMAX, [(data, values), *arguments(1.5, axis)], output)
    expected = real(stored * 0.04 * 1.5, -1 if axis is None else axis) * 256 + output.zero_point
    assert np.abs(got - expected.clip(None, output.zero_point + 255)).max() <= 1
    assert got.dtype == values.dtype


def test_signed_and_unsigned_softmax_are_the_same_bytes_but_for_the_sign(bench: Any) -> None:
    stored = np.random.default_rng(2).integers(0, 256, (9, 300)).astype(np.uint8)
    unsigned = bench.run(
        O.SOFTMAX, [(Operand(T.TENSOR_QUANT8_ASYMM, (), 0.1, 9), stored), *arguments(1.0)], UNSIGNED_OUT
    )
    signed_data = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.1, 9)
    signed = bench.run(O.SOFTMAX, [(signed_data, (stored ^ 0x80).view(np.int8)), *arguments(1.0)], SIGNED_OUT)
    np.testing.assert_array_equal(signed.astype(int) + 128, unsigned)


def test_one_value_takes_all_that_the_type_can_say(bench: Any) -> None:
    data = Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0, 0)
    assert bench.run(O.SOFTMAX, [(data, np.array([[7]], np.uint8)), *arguments(1.0)], UNSIGNED_OUT) == [[255]]


def test_differences_beyond_31_count_as_nothing(bench: Any) -> None:
    data = Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0, 0)
    got = bench.run(O.SOFTMAX, [(data, np.array([[0, 100, 100]], np.uint8)), *arguments(1.0)], UNSIGNED_OUT)
    assert got.tolist() == [[0, 128, 128]]


def test_float_softmax_does_not_overflow(bench: Any) -> None:
    values = np.array([[1e30, 0, -1e30]], np.float32)
    assert bench.run(O.SOFTMAX, [(F32, values), *arguments(10.0)], F32).tolist() == [[1, 0, 0]]
    log = bench.run(O.LOG_SOFTMAX, [(F32, np.array([[800.0, 0.0]], np.float32)), *arguments(1.0, -1)], F32)
    assert log.tolist() == [[0, -800]]


def test_log_softmax_is_the_logarithm_of_softmax(bench: Any) -> None:
    values = np.random.default_rng(3).normal(size=(3, 4, 5)).astype(np.float32)
    for axis in (-2, 0, 2):
        soft = bench.run(O.SOFTMAX, [(F32, values), *arguments(0.7, axis)], F32)
        log = bench.run(O.LOG_SOFTMAX, [(F32, values), *arguments(0.7, axis)], F32)
        np.testing.assert_allclose(np.exp(log), soft, rtol=1e-5)


@pytest.mark.parametrize("operation", [O.SOFTMAX, O.LOG_SOFTMAX])
def test_empty_tensors_stay_empty(bench: Any, operation: OperationType) -> None:
    half = (Operand(T.FLOAT16), np.float16(1))
    got = bench.run(operation, [(F16, np.zeros((0, 4), np.float16)), half, (SCALAR, np.int32(0))], F16)
    assert got.shape == (0, 4) and got.dtype == np.float16


@pytest.mark.parametrize(
    ("rank", "count", "expected"), [(1, 2, 3), (2, 2, 1), (3, 2, 3), (4, 2, 1), (0, 2, 1), (2, 3, 3)]
)
def test_softmax_level_follows_rank_and_axis(bench: Any, rank: int, count: int, expected: int) -> None:
    data = Operand(T.TENSOR_FLOAT32, (2,) * rank)
    assert bench.level(O.SOFTMAX, [data, *[BETA, SCALAR][: count - 1]], [data]) == expected


@pytest.mark.parametrize(
    ("data", "output", "constants", "message"),
    [
        (F16, F16, {}, "input 1: expected FLOAT16, got FLOAT32"),
        (F32, F32, {1: 0}, "input 1: expected a positive beta, got 0"),
        (Operand(T.TENSOR_FLOAT32, (2, 3)), F32, {2: 2}, "input 2: expected an axis from -2 to 1, got 2"),
        (Operand(T.TENSOR_FLOAT32, (1,) * 5), F32, {}, "input 0: expected rank of at most 4, got 5"),
        (
            Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0, 0),
            Operand(T.TENSOR_QUANT8_ASYMM, (), 1 / 128, 0),
            {},
            "output 0: expected scale 1/256, got 0.0078125",
        ),
        (
            Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 1.0, 0),
            Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 1 / 256, 0),
            {},
            "output 0: expected zero point -128, got 0",
        ),
    ],
)
def test_softmax_refuses_with_the_place(
    bench: Any, data: Operand, output: Operand, constants: Any, message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(O.SOFTMAX, [data, BETA, SCALAR], [output], constants)


@pytest.mark.parametrize(
    ("beta", "axis", "message"), [(-1.0, 0, "positive beta"), (1.0, 2, "axis from -2 to 1")]
)
def test_softmax_refuses_values_at_run_time(bench: Any, beta: float, axis: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        bench.run(O.SOFTMAX, [(F32, np.zeros((2, 2), np.float32)), *arguments(beta, axis)], F32)

"""Claims about normalisations that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32, F16, SCALAR, REAL = (Operand(t) for t in (T.TENSOR_FLOAT32, T.TENSOR_FLOAT16, T.INT32, T.FLOAT32))
SIGNED_OUT = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 1 / 128, 0)
UNSIGNED_OUT = Operand(T.TENSOR_QUANT8_ASYMM, (), 1 / 128, 128)


def axis_of(value: int) -> tuple[Operand, Any]:
    return SCALAR, np.int32(value)


@pytest.mark.parametrize("output", [SIGNED_OUT, UNSIGNED_OUT])
@pytest.mark.parametrize("axis", [-3, -1, 0, 1, 2])
def test_quantised_l2_normalisation_is_within_one_step(bench: Any, output: Operand, axis: int) -> None:
    stored = np.random.default_rng(1).integers(0, 256, (9, 40, 5)).astype(np.uint8)
    values = stored if output is UNSIGNED_OUT else stored.view(np.int8)
    data = Operand(output.type, (), 0.1, 37)
    got = bench.run(O.L2_NORMALIZATION, [(data, values), axis_of(axis)], output)
    centred = values.astype(float) - 37
    real = centred / np.sqrt((centred**2).sum(axis=axis, keepdims=True)) * 128 + output.zero_point
    low = output.zero_point - 128
    assert np.abs(got - real.clip(low, low + 255)).max() <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40000])
def test_quantised_l2_normalisation_holds_for_few_and_many_values(bench: Any, count: int) -> None:
    # 40,000 squares of 255 pass 2**29, where the sum is scaled down first.
    data = Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0, 0)
    got = bench.run(O.L2_NORMALIZATION, [(data, np.full((1, count), 255, np.uint8))], UNSIGNED_OUT)
    assert np.abs(got.astype(float) - min(128 + 128 / count**0.5, 255)).max() <= 1


@pytest.mark.parametrize("operand", [SIGNED_OUT, UNSIGNED_OUT, F32])
def test_l2_normalisation_of_zeros_is_zero(bench: Any, operand: Operand) -> None:
    dtype = {SIGNED_OUT: np.int8, UNSIGNED_OUT: np.uint8, F32: np.float32}[operand]
    zeros = np.full((2, 3), operand.zero_point).astype(dtype)
    np.testing.assert_array_equal(bench.run(O.L2_NORMALIZATION, [(operand, zeros)], operand), zeros)


@pytest.mark.parametrize("radius", [0, 1, 3, 100])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_local_response_normalisation_equals_the_plain_loop(bench: Any, radius: int, axis: int) -> None:
    values = np.random.default_rng(2).normal(size=(4, 5, 6)).astype(np.float32)
    scalars = [(REAL, np.float32(s)) for s in (2.0, 0.5, 0.75)]
    got = bench.run(
        O.LOCAL_RESPONSE_NORMALIZATION,
        [(F32, values), (SCALAR, np.int32(radius)), *scalars, axis_of(axis)],
        F32,
    )
    moved = np.moveaxis(values.astype(float), axis, -1)
    expected = np.empty_like(moved)
    for i in range(moved.shape[-1]):
        total = (moved[..., max(i - radius, 0) : i + radius + 1] ** 2).sum(axis=-1)
        expected[..., i] = moved[..., i] / (2.0 + 0.5 * total) ** 0.75
    np.testing.assert_allclose(np.moveaxis(got, axis, -1), expected, rtol=1e-5)


@pytest.mark.parametrize("nchw", [False, True])
def test_instance_normalisation_gives_every_channel_mean_beta_and_deviation_gamma(
    bench: Any, nchw: bool
) -> None:
    values = (np.random.default_rng(3).normal(size=(2, 8, 9, 3)) * 50 + 7).astype(np.float32)
    scalars = [(REAL, np.float32(s)) for s in (3.0, -2.0, 1e-6)]
    image = np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if nchw else values
    got = bench.run(
        O.INSTANCE_NORMALIZATION, [(F32, image), *scalars, (Operand(T.BOOL), np.bool_(nchw))], F32
    )
    pixels = (2, 3) if nchw else (1, 2)
    np.testing.assert_allclose(got.mean(axis=pixels), -2, rtol=1e-4)
    np.testing.assert_allclose(got.std(axis=pixels), 3, rtol=1e-4)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [(O.L2_NORMALIZATION, []), (O.LOCAL_RESPONSE_NORMALIZATION, [SCALAR, REAL, REAL, REAL])],
)
def test_level_follows_rank_and_axis(bench: Any, operation: OperationType, arguments: list[Operand]) -> None:
    for rank, has_axis, expected in ((4, False, 1), (4, True, 3), (2, False, 3), (0, False, 3)):
        data = Operand(T.TENSOR_FLOAT32, (2,) * rank)
        inputs = [data, *arguments, *([SCALAR] if has_axis else [])]
        assert bench.level(operation, inputs, [data]) == expected


@pytest.mark.parametrize(
    ("operation", "inputs", "output", "constants", "message"),
    [
        (
            O.L2_NORMALIZATION,
            [UNSIGNED_OUT],
            Operand(T.TENSOR_QUANT8_ASYMM, (), 1 / 128, 0),
            {},
            "expected zero point 128, got 0",
        ),
        (
            O.L2_NORMALIZATION,
            [Operand(T.TENSOR_FLOAT32, (2, 3)), SCALAR],
            F32,
            {1: -3},
            "an axis from -2 to 1, got -3",
        ),
        (O.L2_NORMALIZATION, [Operand(T.TENSOR_FLOAT32, (1,) * 5)], F32, {}, "rank of at most 4, got 5"),
        (
            O.LOCAL_RESPONSE_NORMALIZATION,
            [F16, SCALAR, REAL, REAL, REAL],
            F16,
            {},
            "input 2: expected FLOAT16, got FLOAT32",
        ),
        (
            O.LOCAL_RESPONSE_NORMALIZATION,
            [F32, SCALAR, REAL, REAL, REAL],
            F32,
            {1: -1},
            "a radius of at least 0, got -1",
        ),
        (
            O.INSTANCE_NORMALIZATION,
            [F32, REAL, REAL, REAL, SCALAR],
            F32,
            {},
            "input 4: expected BOOL, got INT32",
        ),
    ],
)
def test_normalisations_refuse_with_the_place(
    bench: Any, operation: OperationType, inputs: Any, output: Operand, constants: Any, message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(operation, inputs, [output], constants)


def test_axis_out_of_range_is_refused_at_run_time(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected an axis from -2 to 1, got 2"):
        bench.run(O.L2_NORMALIZATION, [(F32, np.zeros((2, 2), np.float32)), axis_of(2)], F32)

"""Claims about pooling: kernels against a plain loop over pixels, and what the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
SCALAR, FLAG = Operand(T.INT32), Operand(T.BOOL)
SIGNED = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.05, -3)
UNSIGNED = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.05, 125)
F32, F16 = Operand(T.TENSOR_FLOAT32), Operand(T.TENSOR_FLOAT16)
WINDOWS = [
    # padding (left, right, top, bottom), stride (width, height), window (width, height)
    ((0, 0, 0, 0), (1, 1), (1, 1)),
    ((1, 0, 2, 1), (2, 3), (2, 3)),
    ((2, 2, 0, 3), (1, 2), (3, 4)),
    ((0, 0, 0, 0), (5, 5), (5, 7)),
    ((3, 4, 5, 6), (1, 1), (5, 7)),
]


def arguments(
    padding: Any, stride: Any, window: Any, activation: int, nchw: bool = False
) -> list[tuple[Operand, Any]]:
    numbers = [*padding, *stride, *window, activation]
    return [*((SCALAR, np.int32(n)) for n in numbers), (FLAG, np.bool_(nchw))]


def rounded_mean(taps: np.ndarray[Any, Any]) -> int:
    total, count = int(taps.sum()), len(taps)
    half_up = (abs(total) + count // 2) // count
    return half_up if total >= 0 else -half_up


REDUCTIONS: dict[OperationType, Any] = {
    O.MAX_POOL_2D: np.max,
    O.L2_POOL_2D: lambda taps: np.sqrt(np.mean(taps.astype(np.float64) ** 2)),
    O.AVERAGE_POOL_2D: lambda taps: np.mean(taps.astype(np.float64)),
}

CASES = [
    (operation, operand)
    for operation in REDUCTIONS
    for operand in (F32, F16, SIGNED, UNSIGNED)
    if not (operation == O.L2_POOL_2D and operand.scale)
]


def plain(operation: OperationType, image: Any, padding: Any, stride: Any, window: Any) -> Any:
    left, right, top, bottom = padding
    batch, height, width, depth = image.shape
    rows = (height + top + bottom - window[1]) // stride[1] + 1
    columns = (width + left + right - window[0]) // stride[0] + 1
    is_integer = image.dtype.kind in "iu"
    reduce = rounded_mean if is_integer and operation == O.AVERAGE_POOL_2D else REDUCTIONS[operation]
    out = np.empty((batch, rows, columns, depth), np.int64 if is_integer else np.float64)
    for b, y, x, c in np.ndindex(*out.shape):
        down, across = y * stride[1] - top, x * stride[0] - left
        taps = image[b, max(down, 0) : down + window[1], max(across, 0) : across + window[0], c]
        out[b, y, x, c] = reduce(taps.reshape(-1))
    return out


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("operation", "operand"), CASES)
@pytest.mark.parametrize("window", WINDOWS)
def test_pooling_equals_the_plain_loop(
    bench: Any, operation: OperationType, operand: Operand, window: Any
) -> None:
    rng = np.random.default_rng(1)
    if operand.scale:
        image = (
            rng.integers(0, 256, (2, 7, 6, 3))
            .astype(np.uint8)
            .view(np.int8 if operand is SIGNED else np.uint8)
        )
        # 6 / 0.05 = 120 steps above the zero point.
        bounds = (operand.zero_point, min(operand.zero_point + 120, 127 if operand is SIGNED else 255))
        tolerance = 0.0
    else:
        image = rng.normal(size=(2, 7, 6, 3)).astype(np.float16 if operand is F16 else np.float32)
        bounds, tolerance = (0, 6), 1e-3 if operand is F16 else 1e-5
    expected = plain(operation, image, *window).clip(*bounds)
    got = bench.run(operation, [(operand, image), *arguments(*window, 3)], operand)
    assert got.dtype == image.dtype
    np.testing.assert_allclose(got.astype(float), expected, rtol=tolerance, atol=tolerance)
    turned = np.ascontiguousarray(image.transpose(0, 3, 1, 2))
    nchw = bench.run(operation, [(operand, turned), *arguments(*window, 3, True)], operand)
    np.testing.assert_array_equal(nchw.transpose(0, 2, 3, 1), got)


def test_maxima_below_zero_survive_padding(bench: Any) -> None:
    image = np.full((1, 2, 2, 1), -7, np.float32)
    got = bench.run(O.MAX_POOL_2D, [(F32, image), *arguments((1, 1, 1, 1), (1, 1), (2, 2), 0)], F32)
    assert (got == -7).all()


def test_average_of_halves_rounds_away_from_zero(bench: Any) -> None:
    image = np.array([[[[-1], [-2]]], [[[1], [2]]]], np.int8)
    got = bench.run(O.AVERAGE_POOL_2D, [(SIGNED, image), *arguments((0, 0, 0, 0), (1, 1), (2, 1), 0)], SIGNED)
    assert got.reshape(-1).tolist() == [-2, 2]


def test_empty_batch_gives_an_empty_batch(bench: Any) -> None:
    image = np.zeros((0, 4, 4, 3), np.uint8)
    got = bench.run(O.MAX_POOL_2D, [(UNSIGNED, image), *arguments((0, 0, 0, 0), (2, 2), (2, 2), 0)], UNSIGNED)
    assert got.shape == (0, 2, 2, 3)


def test_result_is_not_a_view_of_the_input(bench: Any) -> None:
    image = np.ones((1, 2, 2, 1), np.float32)
    got = bench.run(O.MAX_POOL_2D, [(F32, image), *arguments((0, 0, 0, 0), (1, 1), (1, 1), 0)], F32)
    assert not np.shares_memory(got, image)


@pytest.mark.parametrize(
    ("operand", "count", "expected"),
    [(Operand(T.TENSOR_FLOAT32, (1, 4, 4, 1)), 6, 1), (Operand(T.TENSOR_FLOAT32, (1, 4, 4, 1)), 9, 1)],
)
def test_level_of_plain_pooling_is_1(bench: Any, operand: Operand, count: int, expected: int) -> None:
    assert bench.level(O.AVERAGE_POOL_2D, [operand, *[SCALAR] * count], [operand]) == expected
    assert bench.level(O.AVERAGE_POOL_2D, [operand, *[SCALAR] * count, FLAG], [operand]) == 3


@pytest.mark.parametrize(
    ("operation", "inputs", "output", "constants", "message"),
    [
        (
            O.L2_POOL_2D,
            [UNSIGNED, *[SCALAR] * 6],
            UNSIGNED,
            {},
            "input 0: expected TENSOR_FLOAT32 or TENSOR_FLOAT16",
        ),
        (O.MAX_POOL_2D, [F32, *[SCALAR] * 7], F32, {}, "input 7: expected BOOL, got INT32"),
        (
            O.MAX_POOL_2D,
            [F32, *[SCALAR] * 5],
            F32,
            {},
            "number of inputs: expected 7 or 8 or 10 or 11, got 6",
        ),
        (O.MAX_POOL_2D, [F32, *[SCALAR] * 6], F32, {4: 0}, "input 4: expected a window of at least 1, got 0"),
        (
            O.AVERAGE_POOL_2D,
            [UNSIGNED, *[SCALAR] * 6],
            Operand(T.TENSOR_QUANT8_ASYMM, (), 0.1, 125),
            {},
            "output 0: expected scale 0.05 and zero point 125, got scale 0.1",
        ),
    ],
)
def test_pooling_refuses_with_the_place(
    bench: Any, operation: OperationType, inputs: Any, output: Operand, constants: Any, message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(operation, inputs, [output], constants)


def test_padding_as_wide_as_the_window_is_refused(bench: Any) -> None:
    image = np.ones((1, 4, 4, 1), np.float32)
    with pytest.raises(InvalidArgument, match="less than the window's width of 2"):
        bench.run(O.MAX_POOL_2D, [(F32, image), *arguments((2, 0, 0, 0), (1, 1), (2, 2), 0)], F32)


@pytest.mark.parametrize("operation", [O.MAX_POOL_2D, O.AVERAGE_POOL_2D])
def test_windows_far_larger_than_the_image_cost_nothing(bench: Any, operation: OperationType) -> None:
    image = np.array([[[[1.0], [5.0]]]], np.float32)
    huge = 2**30
    padding, stride = (huge - 1, huge - 1, huge - 1, huge - 1), (huge, huge)
    got = bench.run(operation, [(F32, image), *arguments(padding, stride, (huge, huge), 0)], F32)
    assert got.tolist() == [[[[1.0], [5.0]]]]


def test_outputs_beyond_32_bits_of_bytes_are_refused(bench: Any) -> None:
    image, huge = np.ones((1, 1, 1, 1), np.float32), 2**30
    with pytest.raises(InvalidArgument, match="at most 4294967295 bytes"):
        bench.run(
            O.MAX_POOL_2D, [(F32, image), *arguments((huge - 1, huge - 1, 0, 0), (1, 1), (huge, 1), 0)], F32
        )

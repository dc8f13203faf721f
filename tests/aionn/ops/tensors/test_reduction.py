"""Claims about the reductions that the conformance data leave open."""

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
B8 = Operand(T.TENSOR_BOOL8)
I32 = Operand(T.TENSOR_INT32)
BOOL = Operand(T.BOOL)
INT = Operand(T.INT32)
DROP, KEEP = np.False_, np.True_


def axes(*values: int) -> tuple[Operand, np.ndarray]:
    return I32, np.array(values, dtype=np.int32)


def plain_mean(bench: Any, values: list[int], source: Operand, output: Operand) -> int:
    fraction, shift = math.frexp(source.scale / output.scale)
    count = len(values)
    extra = min(int(math.log2(count)), 31 + shift)
    multiplier = round(fraction * 2**31) * 2**extra // count
    return (
        bench.fixed_point_product(sum(values) - count * source.zero_point, multiplier, shift - extra)
        + output.zero_point
    )


@pytest.mark.parametrize("kind", [T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED])
def test_quantised_mean_equals_the_definition_to_the_last_bit(bench: Any, kind: OperandType) -> None:
    rng = np.random.default_rng(3)
    low, high = (-128, 127) if kind == T.TENSOR_QUANT8_ASYMM_SIGNED else (0, 255)
    for count in (1, 2, 3, 7, 16, 49, 100):
        zeros = [int(z) for z in rng.integers(low, high + 1, 2)]
        source = Operand(kind, (), float(np.float32(rng.uniform(0.01, 0.1))), zeros[0])
        output = Operand(kind, (), float(np.float32(source.scale * rng.uniform(1.01, 2))), zeros[1])
        array = rng.integers(low, high + 1, (count, 20)).astype(np.int8 if low else np.uint8)
        got = bench.run(O.MEAN, [(source, array), axes(0), (INT, np.int32(0))], output)
        expected = [plain_mean(bench, column, source, output) for column in array.T.tolist()]
        assert got.tolist() == [min(max(value, low), high) for value in expected]


def test_mean_of_equal_quantisation_rounds_to_nearest(bench: Any) -> None:
    tensor = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 7)
    array = np.uint8([[1, 1, 1, 2], [1, 1, 2, 2], [1, 2, 2, 2]])
    assert bench.run(O.MEAN, [(tensor, array), axes(1), (INT, np.int32(0))], tensor).tolist() == [1, 1, 2]


def test_sum_and_mean_are_accumulated_beyond_float32(bench: Any) -> None:
    values = np.full(2**16 + 1, 0.1, np.float32)
    values[0] = 2**24
    expected = float(np.sum(values.astype(np.float64)))
    got = bench.run(O.REDUCE_SUM, [(F32, values), axes(0), (BOOL, DROP)], F32)
    assert got.tolist() == [float(np.float32(expected))]
    mean = bench.run(O.MEAN, [(F32, values), axes(0), (INT, np.int32(1))], F32)
    assert mean.tolist() == [float(np.float32(expected / values.size))]


def test_float16_sum_is_rounded_once(bench: Any) -> None:
    values = np.array([2048] + [1] * 9, np.float16)
    assert bench.run(O.REDUCE_SUM, [(F16, values), axes(-1), (BOOL, DROP)], F16).tolist() == [2056.0]


def test_negative_and_repeated_axes_count_once(bench: Any) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    got = bench.run(O.REDUCE_SUM, [(F32, array), axes(-1, 2, 0, -3), (BOOL, DROP)], F32)
    assert got.tolist() == array.sum(axis=(0, 2)).tolist()


def test_shape_is_one_element_where_all_axes_go(bench: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bench.run(O.REDUCE_MAX, [(F32, array), axes(0, 1), (BOOL, DROP)], F32).tolist() == [5.0]
    assert bench.run(O.REDUCE_MIN, [(F32, array), axes(0, 1), (BOOL, KEEP)], F32).tolist() == [[0.0]]


def test_no_axes_reduce_nothing(bench: Any) -> None:
    flags = np.array([[True, False]])
    assert bench.run(O.REDUCE_ALL, [(B8, flags), axes(), (BOOL, DROP)], B8).tolist() == [[True, False]]


def test_product_with_a_zero_is_zero_beside_infinity(bench: Any) -> None:
    array = np.float32([[0, np.inf], [2, np.inf]])
    assert bench.run(O.REDUCE_PROD, [(F32, array), axes(1), (BOOL, DROP)], F32).tolist() == [0.0, np.inf]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("operation", "infinity"), [(O.REDUCE_MAX, -np.inf), (O.REDUCE_MIN, np.inf)])
def test_extremum_of_infinities_is_infinite(
    bench: Any, operation: OperationType, infinity: float, dtype: type
) -> None:
    operand = F32 if dtype is np.float32 else F16
    array = np.array([[infinity, infinity], [infinity, 2.0]], dtype)
    assert bench.run(operation, [(operand, array), axes(1), (BOOL, DROP)], operand).tolist() == [
        infinity,
        2.0,
    ]


@pytest.mark.parametrize(
    ("operation", "operand", "dtype", "expected"),
    [
        (O.REDUCE_ALL, B8, bool, True),
        (O.REDUCE_ANY, B8, bool, False),
        (O.REDUCE_SUM, F32, np.float32, 0.0),
        (O.REDUCE_PROD, F32, np.float32, 1.0),
        (O.REDUCE_MAX, F16, np.float16, -65504.0),
        (O.REDUCE_MIN, Operand(T.TENSOR_QUANT8_ASYMM, (), 1.0), np.uint8, 255),
    ],
)
def test_reduction_of_no_elements_is_the_neutral_one(
    bench: Any, operation: OperationType, operand: Operand, dtype: type, expected: object
) -> None:
    got = bench.run(operation, [(operand, np.zeros((2, 0), dtype)), axes(1), (BOOL, DROP)], operand)
    assert got.dtype == dtype
    assert got.tolist() == [expected, expected]


def test_mean_of_no_elements_ends_the_execution(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected elements to take the mean of"):
        bench.run(O.MEAN, [(F32, np.zeros((2, 0), np.float32)), axes(1), (INT, np.int32(0))], F32)


def test_first_of_equal_extrema_counts(bench: Any) -> None:
    array = np.int32([[3, 1, 3, 1], [0, 0, 0, 0]])
    assert bench.run(O.ARGMAX, [(I32, array), (INT, np.int32(-1))], I32).tolist() == [0, 0]
    assert bench.run(O.ARGMIN, [(I32, array), (INT, np.int32(1))], I32).tolist() == [1, 0]


def test_argmax_of_a_list_is_a_list(bench: Any) -> None:
    got = bench.run(O.ARGMAX, [(F16, np.float16([1, 5, 2])), (INT, np.int32(0))], I32)
    assert got.dtype == np.int32
    assert got.tolist() == [1]


@pytest.mark.parametrize("axis", [2, -3])
def test_axis_out_of_range_ends_the_execution(bench: Any, axis: int) -> None:
    array = np.zeros((2, 2), np.float32)
    message = f"input 1: expected an axis from -2 to 1, got {axis}"
    with pytest.raises(InvalidArgument, match=message):
        bench.run(O.REDUCE_SUM, [(F32, array), axes(axis), (BOOL, DROP)], F32)
    with pytest.raises(InvalidArgument, match=message):
        bench.run(O.ARGMAX, [(F32, array), (INT, np.int32(axis))], I32)


def test_argmax_along_an_empty_axis_ends_the_execution(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected elements along axis 0"):
        bench.run(O.ARGMAX, [(F32, np.zeros((0, 2), np.float32)), (INT, np.int32(0))], I32)


FLOATS = {F32.type: 3, F16.type: 3}
QUANT8 = {T.TENSOR_QUANT8_ASYMM: 3, T.TENSOR_QUANT8_ASYMM_SIGNED: 4}
LEVELS = {
    O.REDUCE_ALL: {B8.type: 3},
    O.REDUCE_MAX: FLOATS | QUANT8,
    O.REDUCE_PROD: FLOATS,
    O.MEAN: {F32.type: 2, F16.type: 3, T.TENSOR_QUANT8_ASYMM: 2, T.TENSOR_QUANT8_ASYMM_SIGNED: 4},
    O.ARGMAX: FLOATS | QUANT8 | {I32.type: 3},
}


@pytest.mark.parametrize("operation", LEVELS)
def test_types_and_levels(bench: Any, operation: OperationType) -> None:
    arguments = {O.ARGMAX: [INT], O.MEAN: [I32, INT]}.get(operation, [I32, BOOL])
    for kind in (t for t in T if t.name.startswith("TENSOR_")):
        tensor = Operand(kind, (2, 3), 0.5 if "QUANT" in kind.name else 0.0)
        output = I32 if operation == O.ARGMAX else tensor
        if kind in LEVELS[operation]:
            assert bench.level(operation, [tensor, *arguments], [output]) == LEVELS[operation][kind]
        else:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_"):
                bench.level(operation, [tensor, *arguments], [output])


def test_only_mean_takes_another_output_quantisation(bench: Any) -> None:
    tensor, other = (Operand(T.TENSOR_QUANT8_ASYMM, (2, 3), scale, 0) for scale in (0.5, 0.25))
    assert bench.level(O.MEAN, [tensor, I32, INT], [other]) == 2
    with pytest.raises(
        InvalidModel, match=r"output 0: expected scale 0\.5 and zero point 0, got scale 0\.25"
    ):
        bench.level(O.REDUCE_MAX, [tensor, I32, BOOL], [other])


def test_constant_axes_out_of_range_are_refused_with_the_model(bench: Any) -> None:
    tensor = Operand(T.TENSOR_FLOAT32, (2, 3))
    with pytest.raises(InvalidModel, match="input 1: expected an axis from -2 to 1, got 2"):
        bench.level(O.REDUCE_SUM, [tensor, I32, BOOL], [F32], {1: [0, 2]})
    with pytest.raises(InvalidModel, match="input 1: expected an axis from -2 to 1, got -3"):
        bench.level(O.ARGMIN, [tensor, INT], [I32], {1: -3})
    assert bench.level(O.REDUCE_SUM, [F32, I32, BOOL], [F32], {1: [7]}) == 3


def test_rank_is_at_most_4_save_for_argmax(bench: Any) -> None:
    tensor = Operand(T.TENSOR_FLOAT32, (1,) * 5)
    assert bench.level(O.ARGMAX, [tensor, INT], [I32]) == 3
    with pytest.raises(InvalidModel, match="input 0: expected rank of at most 4, got 5"):
        bench.level(O.MEAN, [tensor, I32, INT], [F32])

"""Claims about axes and extents as arguments."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.numerics.axes import axes_of, bounded_shape, known_rank, require_axes, resolve_axis
from aionn.ops.signature import Call, Check, Tensor

T = OperandType
LIST = Operand(T.TENSOR_INT32)


def call_with(axes: object, output: OperandType = T.TENSOR_FLOAT32) -> Call:
    return Call([Tensor(LIST, np.array(axes, dtype=np.int32))], [Operand(output)])


def test_axis_counts_from_both_ends() -> None:
    assert [resolve_axis(axis, 3, "input 1") for axis in range(-3, 3)] == [0, 1, 2, 0, 1, 2]
    for axis in (-4, 3):
        with pytest.raises(InvalidArgument, match=f"input 1: expected an axis from -3 to 2, got {axis}"):
            resolve_axis(axis, 3, "input 1")


def test_list_of_axes_comes_sorted_and_without_repetitions() -> None:
    assert axes_of(call_with([2, -3, -1, 0]), 0, 3) == (0, 2)
    assert axes_of(call_with([]), 0, 3) == ()


def test_list_of_axes_has_rank_1() -> None:
    with pytest.raises(
        InvalidArgument, match=r"input 0: expected a list of axes of rank 1, got shape \[1, 2\]"
    ):
        axes_of(call_with([[0, 1]]), 0, 3)


def test_unknown_rank_leaves_constant_axes_to_the_execution() -> None:
    inputs = [Operand(T.TENSOR_FLOAT32), LIST]
    check = Check(OperationType.MEAN, inputs, [], where="operation 0", constant=lambda operand: np.array([5]))
    require_axes(check, 1, known_rank(inputs[0]))
    with pytest.raises(
        InvalidModel, match=r"operation 0 \(MEAN\), input 1: expected an axis from -2 to 1, got 5"
    ):
        require_axes(check, 1, 2)


def test_bounded_shape_counts_bytes() -> None:
    assert bounded_shape(call_with([], T.TENSOR_QUANT8_ASYMM), "input 0", (2**16, 2**15)) == (2**16, 2**15)
    assert bounded_shape(call_with([]), "input 0", (2**20, 0)) == (2**20, 0)
    for shape in ((2**16, 2**15), (2**32, 0), (3, -1)):
        with pytest.raises(InvalidArgument, match="input 0: expected an output of no negative extent"):
            bounded_shape(call_with([]), "input 0", shape)

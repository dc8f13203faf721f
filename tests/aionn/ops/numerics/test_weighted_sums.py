"""Claims about exactness and cost of weighted sums."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.hal import Operand, OperandType
from aionn.ops import Tensor
from aionn.ops.numerics.weighted_sums import SCRATCH_ROW, exact_float, row_repeats, weight_values

T = OperandType


def test_float32_serves_as_long_as_it_holds_every_integer() -> None:
    assert exact_float(2**24 - 1) is np.float32
    assert exact_float(2**24) is np.float64


@pytest.mark.parametrize(("length", "expected"), [(518, np.float32), (519, np.float64)])
def test_type_of_the_weights_follows_their_sum(length: int, expected: type) -> None:
    # 519 products of 255 and 127 may pass 2**24, 518 may not.
    data = Tensor(Operand(T.TENSOR_QUANT8_ASYMM, (1, length), 1.0, 3), np.zeros((1, length), np.uint8))
    weights = Tensor(
        Operand(T.TENSOR_QUANT8_ASYMM, (2, length), 1.0, 128), np.full((2, length), 255, np.uint8)
    )
    values, totals = weight_values(data, weights, (1,))
    assert values.dtype == expected
    assert totals.tolist() == [127.0 * length] * 2


def test_taking_out_the_zero_point_first_doubles_the_range() -> None:
    data = Tensor(Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (1, 600), 1.0, 3), np.zeros((1, 600), np.int8))
    weights = Tensor(Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (1, 600), 1.0, 0), np.full((1, 600), 127, np.int8))
    assert weight_values(data, weights, (1,))[0].dtype == np.float32
    assert weight_values(data, weights, (1,), spans_zero_point=True)[0].dtype == np.float64


def test_float_weights_are_not_copied() -> None:
    stored = np.ones((2, 3), np.float32)
    data = Tensor(Operand(T.TENSOR_FLOAT32), np.ones((1, 3), np.float32))
    assert weight_values(data, Tensor(Operand(T.TENSOR_FLOAT32), stored), (1,))[0] is stored


def test_row_repeats_divide_the_row_and_are_bounded() -> None:
    for width in range(1, 60):
        for channels in (1, 3, 17, 300, SCRATCH_ROW, 5000):
            repeats = row_repeats(width, channels)
            assert width % repeats == 0
            assert repeats == 1 or repeats * channels <= SCRATCH_ROW

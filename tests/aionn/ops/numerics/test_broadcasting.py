"""Claims about shapes that meet, and about the table of 8-bit pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.numerics.broadcasting import broadcast_shape, byte_pairs, require_broadcast
from aionn.ops.signature import Call, Check, Tensor

T = OperandType


def test_broadcast_shape_agrees_with_numpy_on_all_small_shapes() -> None:
    shapes = [s for rank in range(4) for s in itertools.product((0, 1, 2, 3), repeat=rank)]
    for a, b in itertools.product(shapes, repeat=2):
        try:
            expected = np.broadcast_shapes(a, b)
        except ValueError:
            with pytest.raises(InvalidArgument, match="broadcasts with"):
                broadcast_shape(a, b)
        else:
            assert broadcast_shape(a, b) == expected


@pytest.mark.parametrize(
    ("a", "b"), [((2, 3), (3,)), ((2, 0), (4,)), ((), (7, 7)), ((2, 1), (1, 9)), ((0,), (5,))]
)
def test_unknown_extents_and_ranks_are_left_to_the_execution(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    inputs = [Operand(T.TENSOR_FLOAT32, a), Operand(T.TENSOR_FLOAT32, b)]
    require_broadcast(Check(OperationType.POW, inputs, [], where="operation 0"))


def test_known_shapes_that_do_not_fit_are_refused_with_the_model() -> None:
    inputs = [Operand(T.TENSOR_FLOAT32, (2, 3)), Operand(T.TENSOR_FLOAT32, (2, 4))]
    with pytest.raises(InvalidModel, match=r"operation 0 \(POW\), input 1: expected a shape that broadcasts"):
        require_broadcast(Check(OperationType.POW, inputs, [], where="operation 0"))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_table_gives_what_computing_gives(dtype: type) -> None:
    rng = np.random.default_rng(5)
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max + 1, (64, 1, 80)).astype(dtype)
    b = rng.integers(info.min, info.max + 1, (3, 80)).astype(dtype)
    kind = Operand(T.TENSOR_QUANT8_ASYMM, scale=1.0)
    kept: dict[str, object] = {}
    call = Call([Tensor(kind, a), Tensor(kind, b)], [kind], kept=kept)

    def compute(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x.astype(np.int32) * 1000 - y

    for _ in range(2):
        assert np.array_equal(byte_pairs(call, compute), compute(a, b))
    (table,) = kept.values()
    assert table.size == 65536  # type: ignore[attr-defined]


def test_small_outputs_need_no_table() -> None:
    kind = Operand(T.TENSOR_QUANT8_ASYMM, scale=1.0)
    a = np.arange(6, dtype=np.uint8)
    kept: dict[str, object] = {}
    call = Call([Tensor(kind, a), Tensor(kind, a)], [kind], kept=kept)
    assert byte_pairs(call, np.maximum).tolist() == [0, 1, 2, 3, 4, 5]
    assert kept == {}

"""Claims about the operations on shapes that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from tests.support.contracts import F32, I32, INT, ints, scalar, shaped

T = OperandType
O = OperationType  # noqa: E741
ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_reshape_stretches_one_extent(bench: Any) -> None:
    got = bench.run(O.RESHAPE, [(F32, ARRAY), ints(4, -1)], F32)
    assert got.shape == (4, 6)
    assert got.reshape(-1).tolist() == ARRAY.reshape(-1).tolist()


@pytest.mark.parametrize("target", [(5, 5), (-1, 5), (-1, -1), (-2, 12), (-1, 0), ()])
def test_reshape_to_another_size_ends_the_execution(bench: Any, target: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected extents"):
        bench.run(O.RESHAPE, [(F32, ARRAY), ints(*target)], F32)


@pytest.mark.parametrize("operation", [O.RESHAPE, O.FILL, O.TRANSPOSE])
def test_long_list_ends_the_execution_unread(bench: Any, operation: OperationType) -> None:
    # The product of millions of extents takes hours.
    many = I32, np.full(4097, 2, np.int32)
    inputs = [many, (INT, np.array(1, np.int32))] if operation == O.FILL else [(F32, ARRAY), many]
    with pytest.raises(InvalidArgument, match="expected at most 4096 elements, got 4097"):
        bench.run(operation, inputs, I32 if operation == O.FILL else F32)


def test_reshape_of_nothing_is_nothing(bench: Any) -> None:
    assert bench.run(O.RESHAPE, [(F32, ARRAY[:0]), ints(0, 7)], F32).shape == (0, 7)
    assert bench.run(O.RESHAPE, [(F32, ARRAY[:0]), ints(-1, 7)], F32).shape == (0, 7)
    with pytest.raises(InvalidArgument, match="input 1: expected an output of no negative extent"):
        bench.run(O.RESHAPE, [(F32, ARRAY[:0]), ints(0, 2**31 - 1, 2**31 - 1)], F32)


@pytest.mark.parametrize(
    ("shape", "target", "message"),
    [
        ((2, 3), [-1, -1], "input 1: expected extents, at most one of them -1"),
        ((2, 0), [2, -2], "input 1: expected extents, at most one of them -1"),
        ((2, 3), [7], r"input 1: expected extents for the elements of shape \[2, 3\], got \[7\]"),
        ((2, 3), [-1, 4], r"input 1: expected extents for the elements of shape \[2, 3\]"),
        ((2, 3), [2] * 4097, "input 1: expected at most 4096 elements, got 4097"),
    ],
)
def test_reshape_refuses_constant_nonsense_with_the_model(
    bench: Any, shape: tuple[int, ...], target: list[int], message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        bench.level(O.RESHAPE, [shaped(*shape), I32], [F32], {1: target})


def test_reshape_with_unknown_extents_is_left_to_the_execution(bench: Any) -> None:
    assert bench.level(O.RESHAPE, [shaped(2, 0), I32], [F32], {1: [7]}) == 1
    assert bench.level(O.RESHAPE, [shaped(2, 3), I32], [F32], {1: [3, -1]}) == 1


def test_squeeze_without_a_list_takes_every_extent_of_1(bench: Any) -> None:
    assert bench.run(O.SQUEEZE, [(F32, ARRAY.reshape(1, 24, 1)), None], F32).shape == (24,)
    assert bench.run(O.SQUEEZE, [(F32, ARRAY.reshape(1, 24, 1)), ints(-1)], F32).shape == (1, 24)
    assert bench.run(O.SQUEEZE, [(F32, ARRAY[:1, :1, :1]), ints(0, 1, 2, -1)], F32).shape == (1,)
    assert bench.level(O.SQUEEZE, [shaped(1, 24), None], [F32]) == 2


def test_squeeze_of_a_larger_extent_ends_the_execution(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"input 1: expected axes of extent 1, got axis 1 of shape"):
        bench.run(O.SQUEEZE, [(F32, ARRAY.reshape(1, 24, 1)), ints(1)], F32)


@pytest.mark.parametrize(
    ("axis", "shape"), [(0, (1, 2, 3, 4)), (3, (2, 3, 4, 1)), (-1, (2, 3, 4, 1)), (-4, (1, 2, 3, 4))]
)
def test_expand_dims_counts_axes_of_the_output(bench: Any, axis: int, shape: tuple[int, ...]) -> None:
    assert bench.run(O.EXPAND_DIMS, [(F32, ARRAY), scalar(axis)], F32).shape == shape


def test_expand_dims_beyond_the_rank_is_refused(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected an axis from -4 to 3, got 4"):
        bench.run(O.EXPAND_DIMS, [(F32, ARRAY), scalar(4)], F32)
    with pytest.raises(InvalidModel, match="input 1: expected an axis from -3 to 2, got 3"):
        bench.level(O.EXPAND_DIMS, [shaped(2, 3), INT], [F32], {1: 3})


def test_transpose_moves_axes(bench: Any) -> None:
    got = bench.run(O.TRANSPOSE, [(F32, ARRAY), ints(2, 0, 1)], F32)
    assert got.shape == (4, 2, 3)
    assert all(got[k, i, j] == ARRAY[i, j, k] for i, j, k in np.ndindex(2, 3, 4))


def test_transpose_without_an_order_turns_a_matrix(bench: Any) -> None:
    assert bench.run(O.TRANSPOSE, [(F32, ARRAY[0]), None], F32).tolist() == ARRAY[0].T.tolist()
    with pytest.raises(InvalidArgument, match="input 0: expected rank 2 where no order is given, got rank 3"):
        bench.run(O.TRANSPOSE, [(F32, ARRAY), None], F32)
    with pytest.raises(InvalidModel, match="input 0: expected rank 2"):
        bench.level(O.TRANSPOSE, [shaped(2, 3, 4), None], [F32])


def test_transpose_takes_permutations_only(bench: Any) -> None:
    for order in ((0, 1), (0, 1, 1), (0, 1, 3), (-1, 0, 1)):
        with pytest.raises(InvalidArgument, match="input 1: expected a permutation of 3 axes"):
            bench.run(O.TRANSPOSE, [(F32, ARRAY), ints(*order)], F32)
        with pytest.raises(InvalidModel, match="input 1: expected a permutation of 3 axes"):
            bench.level(O.TRANSPOSE, [shaped(2, 3, 4), I32], [F32], {1: order})


def test_rank_is_a_scalar(bench: Any) -> None:
    got = bench.run(O.RANK, [(F32, ARRAY[:0])], INT)
    assert (got.shape, got.dtype, int(got)) == ((), np.int32, 3)


def test_rank_takes_every_tensor_but_oem(bench: Any) -> None:
    for kind in T:
        if kind.name.startswith("TENSOR_") and kind != T.TENSOR_OEM_BYTE:
            assert bench.level(O.RANK, [shaped(2, kind=kind)], [INT]) == 4
        else:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_FLOAT32 or"):
                bench.level(O.RANK, [Operand(kind)], [INT])


def test_reverse_turns_one_axis(bench: Any) -> None:
    got = bench.run(O.REVERSE, [(F32, ARRAY), ints(1)], F32)
    assert got.tolist() == ARRAY[:, ::-1].tolist()


def test_reverse_takes_exactly_one_axis_from_the_front(bench: Any) -> None:
    for axes in ((3,), (-1,), (0, 1), ()):
        with pytest.raises(InvalidArgument, match="input 1: expected one axis from 0 to 2"):
            bench.run(O.REVERSE, [(F32, ARRAY), ints(*axes)], F32)
    with pytest.raises(InvalidModel, match="input 1: expected extent 1 on axis 0"):
        bench.level(O.REVERSE, [shaped(2, 3), shaped(2, kind=I32.type)], [F32])
    with pytest.raises(InvalidModel, match="input 1: expected an axis from 0 to 1, got -1"):
        bench.level(O.REVERSE, [shaped(2, 3), I32], [F32], {1: [-1]})
    with pytest.raises(InvalidModel, match="output 0: expected rank 2"):
        bench.level(O.REVERSE, [shaped(2, 3), I32], [shaped(6)])


def test_fill_takes_its_type_from_the_output(bench: Any) -> None:
    half = Operand(T.FLOAT16), np.array(1.5, np.float16)
    got = bench.run(O.FILL, [ints(2, 0, 3), half], Operand(T.TENSOR_FLOAT16))
    assert (got.shape, got.dtype) == ((2, 0, 3), np.float16)
    assert bench.run(O.FILL, [ints(3), scalar(-7)], I32).tolist() == [-7, -7, -7]
    with pytest.raises(InvalidModel, match="input 1: expected FLOAT16, got INT32"):
        bench.level(O.FILL, [I32, INT], [Operand(T.TENSOR_FLOAT16)])
    with pytest.raises(InvalidModel, match="output 0: expected TENSOR_FLOAT32 or"):
        bench.level(O.FILL, [I32, INT], [Operand(T.TENSOR_BOOL8)])


@pytest.mark.parametrize("extents", [(-1,), (2, -3), (2**16, 2**15, 2)])
def test_fill_of_a_shape_that_cannot_exist_ends_the_execution(bench: Any, extents: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="input 0: expected an output of no negative extent"):
        bench.run(O.FILL, [ints(*extents), scalar(0)], I32)


@pytest.mark.parametrize(("axis", "groups"), [(0, 2), (2, 2), (-1, 4), (1, 3), (1, 1)])
def test_channel_shuffle_follows_the_definition(bench: Any, axis: int, groups: int) -> None:
    got = bench.run(O.CHANNEL_SHUFFLE, [(F32, ARRAY), scalar(groups), scalar(axis)], F32)
    moved, source = np.moveaxis(got, axis, 0), np.moveaxis(ARRAY, axis, 0)
    members = len(source) // groups
    for group in range(groups):
        for member in range(members):
            assert np.array_equal(moved[member * groups + group], source[group * members + member])


def test_channel_shuffle_wants_groups_that_divide_the_channels(bench: Any) -> None:
    for groups in (2, 0, -1):
        with pytest.raises(InvalidArgument, match="input 1: expected groups that divide 3 channels"):
            bench.run(O.CHANNEL_SHUFFLE, [(F32, ARRAY), scalar(groups), scalar(1)], F32)
    with pytest.raises(InvalidModel, match="input 1: expected groups that divide 3 channels, got 2"):
        bench.level(O.CHANNEL_SHUFFLE, [shaped(2, 3), INT, INT], [F32], {1: 2, 2: 1})
    with pytest.raises(InvalidModel, match="input 2: expected an axis from -2 to 1, got 2"):
        bench.level(O.CHANNEL_SHUFFLE, [shaped(2, 3), INT, INT], [F32], {2: 2})


FROM_3 = {
    T.TENSOR_FLOAT32: 3,
    T.TENSOR_FLOAT16: 3,
    T.TENSOR_QUANT8_ASYMM: 3,
    T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}
FROM_2 = FROM_3 | {T.TENSOR_FLOAT32: 2, T.TENSOR_QUANT8_ASYMM: 2}
LEVELS = {
    O.RESHAPE: (FROM_3 | {T.TENSOR_FLOAT32: 1, T.TENSOR_QUANT8_ASYMM: 1, T.TENSOR_INT32: 6}, [I32]),
    O.SQUEEZE: (FROM_2, [I32]),
    O.EXPAND_DIMS: (FROM_3 | {T.TENSOR_INT32: 3}, [INT]),
    O.TRANSPOSE: (FROM_2, [I32]),
    O.REVERSE: (dict.fromkeys((*FROM_3, T.TENSOR_INT32), 7), [I32]),
    O.CHANNEL_SHUFFLE: (FROM_3, [INT, INT]),
}


@pytest.mark.parametrize("operation", LEVELS)
def test_types_levels_and_quantisation(bench: Any, operation: OperationType) -> None:
    levels, arguments = LEVELS[operation]
    for kind in (t for t in T if t.name.startswith("TENSOR_")):
        scale = 0.5 if "QUANT" in kind.name else 0.0
        tensor = Operand(kind, (), scale)
        if kind not in levels:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_"):
                bench.level(operation, [tensor, *arguments], [tensor])
            continue
        assert bench.level(operation, [tensor, *arguments], [tensor]) == levels[kind]
        if scale:
            with pytest.raises(InvalidModel, match="output 0: expected scale"):
                bench.level(operation, [tensor, *arguments], [Operand(kind, (), 0.25)])

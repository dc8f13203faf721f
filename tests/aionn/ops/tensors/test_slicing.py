"""Claims about parts and joins of tensors that the conformance data leave open."""

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


def test_slice_reaches_to_the_end_with_minus_1(bench: Any) -> None:
    got = bench.run(O.SLICE, [(F32, ARRAY), ints(0, 1, 2), ints(2, -1, 1)], F32)
    assert got.tolist() == ARRAY[:, 1:, 2:3].tolist()


def test_slice_may_be_empty(bench: Any) -> None:
    assert bench.run(O.SLICE, [(F32, ARRAY), ints(2, 0, 0), ints(-1, 3, 0)], F32).shape == (0, 3, 0)


@pytest.mark.parametrize(
    ("begin", "size"),
    [((0, 0, 3), (1, 1, 2)), ((3, 0, 0), (-1, 1, 1)), ((-1, 0, 0), (1, 1, 1)), ((0, 0, 0), (1, 1, -2))],
)
def test_slice_beyond_the_input_ends_the_execution(
    bench: Any, begin: tuple[int, ...], size: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgument, match="inputs 1 and 2: expected a part of the"):
        bench.run(O.SLICE, [(F32, ARRAY), ints(*begin), ints(*size)], F32)


def test_slice_wants_one_number_per_axis(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected one number for each of 3 axes"):
        bench.run(O.SLICE, [(F32, ARRAY), ints(0, 0), ints(1, 1)], F32)
    with pytest.raises(InvalidModel, match="input 2: expected extent 3 on axis 0"):
        bench.level(O.SLICE, [shaped(2, 3, 4), I32, shaped(2, kind=I32.type)], [F32])
    with pytest.raises(InvalidModel, match="input 1: expected no negative begin"):
        bench.level(O.SLICE, [F32, I32, I32], [F32], {1: [0, -1]})
    with pytest.raises(InvalidModel, match="input 2: expected sizes of -1 or more"):
        bench.level(O.SLICE, [F32, I32, I32], [F32], {2: [0, -2]})


def strided(begin: Any, end: Any, strides: Any, *masks: int) -> list[tuple[Operand, np.ndarray]]:
    return [(F32, ARRAY), ints(*begin), ints(*end), ints(*strides), *(scalar(mask) for mask in masks)]


def test_strided_slice_clamps_and_counts_like_a_slice(bench: Any) -> None:
    rng = np.random.default_rng(4)
    for _ in range(300):
        begin, end = rng.integers(-6, 7, (2, 3)).tolist()
        strides = [int(s) for s in rng.choice([-3, -2, -1, 1, 2, 3], 3)]
        begin_mask, end_mask = (int(m) for m in rng.integers(0, 8, 2))
        parts = tuple(
            slice(
                None if begin_mask >> i & 1 else begin[i], None if end_mask >> i & 1 else end[i], strides[i]
            )
            for i in range(3)
        )
        got = bench.run(O.STRIDED_SLICE, strided(begin, end, strides, begin_mask, end_mask, 0), F32)
        assert got.tolist() == ARRAY[parts].tolist()


def test_strided_slice_removes_axes_of_one_element(bench: Any) -> None:
    got = bench.run(O.STRIDED_SLICE, strided((1, 0, 2), (2, 3, 3), (1, 1, 1), 0, 0, 0b101), F32)
    assert got.tolist() == ARRAY[1, :, 2].tolist()
    got = bench.run(O.STRIDED_SLICE, strided((1, -1, -2), (2, 0, -1), (1, 1, 1), 0, 0, 0b111), F32)
    assert got.tolist() == [ARRAY[1, -1, -2]]


@pytest.mark.parametrize(
    ("begin", "end", "strides", "message"),
    [
        (
            (0, 0, 0),
            (1, 2, 1),
            (1, 1, 1),
            "input 6: expected one element .* removed axis 1, got 2 with stride 1",
        ),
        ((0, 2, 0), (1, 1, 1), (1, -1, 1), "input 6: expected one element .* got 1 with stride -1"),
        ((0, 5, 0), (1, 6, 1), (1, 1, 1), "input 6: expected one element .* got 0 with stride 1"),
        ((0, 0, 0), (1, 1, 1), (1, 0, 1), "input 3: expected no stride of 0"),
    ],
)
def test_illegal_strided_slices_end_the_execution(
    bench: Any, begin: Any, end: Any, strides: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        bench.run(O.STRIDED_SLICE, strided(begin, end, strides, 0, 0, 0b010), F32)


def test_strided_slice_refuses_a_constant_stride_of_0_with_the_model(bench: Any) -> None:
    inputs = [shaped(2, 3), I32, I32, I32, INT, INT, INT]
    with pytest.raises(InvalidModel, match="input 3: expected no stride of 0"):
        bench.level(O.STRIDED_SLICE, inputs, [F32], {3: [1, 0]})
    assert bench.level(O.STRIDED_SLICE, inputs, [F32], {3: [1, -1]}) == 2


def test_split_cuts_equal_parts(bench: Any) -> None:
    got = bench.run_all(O.SPLIT, [(F32, ARRAY), scalar(-1), scalar(2)], [F32, F32])
    assert [part.tolist() for part in got] == [ARRAY[..., :2].tolist(), ARRAY[..., 2:].tolist()]


def test_split_into_unequal_parts_ends_the_execution(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 2: expected a divisor of the extent 3 on axis 1, got 2"):
        bench.run_all(O.SPLIT, [(F32, ARRAY), scalar(1), scalar(2)], [F32, F32])
    with pytest.raises(InvalidArgument, match="input 2: expected the number of outputs, 2, got 3"):
        bench.run_all(O.SPLIT, [(F32, ARRAY), scalar(1), scalar(3)], [F32, F32])
    with pytest.raises(InvalidModel, match="input 2: expected 2, got 3"):
        bench.level(O.SPLIT, [F32, INT, INT], [F32, F32], {2: 3})
    with pytest.raises(InvalidModel, match="output 1: expected TENSOR_FLOAT32, got TENSOR_INT32"):
        bench.level(O.SPLIT, [F32, INT, INT], [F32, I32])


def test_concatenation_takes_empty_parts(bench: Any) -> None:
    got = bench.run(O.CONCATENATION, [(F32, ARRAY[:, :0]), (F32, ARRAY), (F32, ARRAY[:, :1]), scalar(1)], F32)
    assert got.tolist() == np.concatenate([ARRAY, ARRAY[:, :1]], axis=1).tolist()


@pytest.mark.parametrize(
    ("kind", "dtype", "shift"),
    [(T.TENSOR_QUANT8_ASYMM, np.uint8, 0), (T.TENSOR_QUANT8_ASYMM_SIGNED, np.int8, -128)],
)
def test_concatenation_rescales_what_differs(bench: Any, kind: OperandType, dtype: type, shift: int) -> None:
    same, other = Operand(kind, (), 0.5, 100 + shift), Operand(kind, (), 0.25, 50 + shift)
    a, b = (np.array([0, 100, 255]) + shift).astype(dtype), (np.array([0, 50, 53, 255]) + shift).astype(dtype)
    got = bench.run(O.CONCATENATION, [(same, a), (other, b), scalar(0)], same)
    # 53 stands for 0.75, which is a step and a half and rounds up.
    assert got.dtype == dtype
    assert (got.astype(int) - shift).tolist() == [0, 100, 255, 75, 100, 102, 203]


def test_concatenation_of_unequal_quantisation_needs_level_3(bench: Any) -> None:
    a, b = (Operand(T.TENSOR_QUANT8_ASYMM, (2,), scale, 0) for scale in (0.5, 0.25))
    assert bench.level(O.CONCATENATION, [a, a, INT], [a]) == 1
    assert bench.level(O.CONCATENATION, [a, b, INT], [a]) == 3
    assert bench.level(O.CONCATENATION, [a, a, INT], [b]) == 3


def test_concatenation_of_shapes_that_do_not_fit_is_refused(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"input 1: expected shape \[2, 3, 4\] but for axis 1, got"):
        bench.run(O.CONCATENATION, [(F32, ARRAY), (F32, ARRAY[:1]), scalar(1)], F32)
    with pytest.raises(InvalidArgument, match="input 2: expected an axis from 0 to 2, got -1"):
        bench.run(O.CONCATENATION, [(F32, ARRAY), (F32, ARRAY), scalar(-1)], F32)
    with pytest.raises(InvalidModel, match=r"input 1: expected shape \[2, 0\] but for axis 1"):
        bench.level(O.CONCATENATION, [shaped(2, 3), shaped(3, 3), INT], [F32], {2: 1})
    with pytest.raises(InvalidModel, match="input 2: expected an axis from 0 to 1, got 2"):
        bench.level(O.CONCATENATION, [shaped(2, 3), shaped(2, 3), INT], [F32], {2: 2})
    assert bench.level(O.CONCATENATION, [shaped(2, 3), shaped(0, 5), INT], [F32], {2: 1}) == 1


def test_pack_puts_a_new_axis_where_it_is_told(bench: Any) -> None:
    for axis in range(4):
        got = bench.run(O.PACK, [scalar(axis), (F32, ARRAY), (F32, ARRAY + 100)], F32)
        assert got.tolist() == np.stack([ARRAY, ARRAY + 100], axis).tolist()


def test_pack_refuses_what_does_not_match(bench: Any) -> None:
    for axis in (-1, 4):
        with pytest.raises(InvalidArgument, match=f"input 0: expected an axis from 0 to 3, got {axis}"):
            bench.run(O.PACK, [scalar(axis), (F32, ARRAY)], F32)
    with pytest.raises(InvalidArgument, match=r"input 2: expected the shape \[2, 3, 4\] of input 1"):
        bench.run(O.PACK, [scalar(0), (F32, ARRAY), (F32, ARRAY[:1])], F32)
    with pytest.raises(InvalidModel, match=r"input 2: expected shape \[2, 3\], got shape \[2, 4\]"):
        bench.level(O.PACK, [INT, shaped(2, 3), shaped(2, 4)], [F32])
    with pytest.raises(InvalidModel, match="input 1: expected rank 1"):
        bench.level(O.PACK, [INT, shaped(2, 3)], [shaped(1, 2)])
    with pytest.raises(InvalidModel, match="input 0: expected an axis from 0 to 2, got 3"):
        bench.level(O.PACK, [INT, shaped(2, 3)], [F32], {0: 3})
    a, b = (Operand(T.TENSOR_QUANT8_ASYMM, (2,), scale, 0) for scale in (0.5, 0.25))
    with pytest.raises(InvalidModel, match=r"input 2: expected scale 0\.5 and zero point 0, got scale 0\.25"):
        bench.level(O.PACK, [INT, a, b], [Operand(a.type, (), a.scale, a.zero_point)])


def test_tile_repeats_along_each_axis(bench: Any) -> None:
    got = bench.run(O.TILE, [(F32, ARRAY), ints(2, 1, 3)], F32)
    assert all(got[i, j, k] == ARRAY[i % 2, j, k % 4] for i, j, k in np.ndindex(4, 3, 12))
    assert bench.run(O.TILE, [(F32, ARRAY), ints(0, 1, 1)], F32).shape == (0, 3, 4)


@pytest.mark.parametrize("multiples", [(1, 1, -1), (2**31 - 1, 1, 1), (1, 1)])
def test_tile_by_nonsense_ends_the_execution(bench: Any, multiples: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected"):
        bench.run(O.TILE, [(F32, ARRAY), ints(*multiples)], F32)


def test_tile_refuses_constant_nonsense_with_the_model(bench: Any) -> None:
    with pytest.raises(InvalidModel, match="input 1: expected no negative multiple"):
        bench.level(O.TILE, [shaped(2), I32], [F32], {1: [-1]})


FROM_3 = {
    T.TENSOR_FLOAT32: 3,
    T.TENSOR_FLOAT16: 3,
    T.TENSOR_QUANT8_ASYMM: 3,
    T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}
LEVELS = {
    O.SLICE: (FROM_3 | {T.TENSOR_INT32: 3}, [I32, I32]),
    O.STRIDED_SLICE: (
        FROM_3 | {T.TENSOR_FLOAT32: 2, T.TENSOR_QUANT8_ASYMM: 2},
        [I32, I32, I32, INT, INT, INT],
    ),
    O.SPLIT: (FROM_3 | {T.TENSOR_INT32: 3}, [INT, INT]),
    O.TILE: (FROM_3 | {T.TENSOR_INT32: 3}, [I32]),
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

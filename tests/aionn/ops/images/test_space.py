"""Claims about blocks moved between space, depth and batch that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType

T = OperandType
O = OperationType  # noqa: E741
F32 = Operand(T.TENSOR_FLOAT32)
I32 = Operand(T.TENSOR_INT32)
INT = Operand(T.INT32)
FLAG = Operand(T.BOOL)


def image(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def ints(values: object) -> tuple[Operand, np.ndarray]:
    return I32, np.array(values, dtype=np.int32)


def block(value: int) -> tuple[Operand, np.ndarray]:
    return INT, np.array(value, dtype=np.int32)


def layout(is_nchw: bool) -> tuple[Operand, np.ndarray]:
    return FLAG, np.array(is_nchw)


def test_depth_to_space_follows_the_definition(bench: Any) -> None:
    source, size = image(2, 3, 4, 18), 3
    got = bench.run(O.DEPTH_TO_SPACE, [(F32, source), block(size)], F32)
    assert got.shape == (2, 9, 12, 2)
    for b, y, x, d in np.ndindex(got.shape):
        assert got[b, y, x, d] == source[b, y // size, x // size, (y % size * size + x % size) * 2 + d]


def test_space_to_depth_undoes_depth_to_space(bench: Any) -> None:
    source = image(2, 4, 6, 12)
    there = bench.run(O.DEPTH_TO_SPACE, [(F32, source), block(2)], F32)
    assert bench.run(O.SPACE_TO_DEPTH, [(F32, there), block(2)], F32).tolist() == source.tolist()


def test_batch_to_space_follows_the_definition(bench: Any) -> None:
    source, rows, columns = image(12, 2, 3, 5), 2, 3
    got = bench.run(O.BATCH_TO_SPACE_ND, [(F32, source), ints([rows, columns])], F32)
    assert got.shape == (2, 4, 9, 5)
    for b, y, x, d in np.ndindex(got.shape):
        inner = (y % rows * columns + x % columns) * 2 + b
        assert got[b, y, x, d] == source[inner, y // rows, x // columns, d]


def test_space_to_batch_pads_with_the_zero_point(bench: Any) -> None:
    tensor = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, 7)
    source = np.uint8([[[[1], [2], [3]]]])
    got = bench.run(O.SPACE_TO_BATCH_ND, [(tensor, source), ints([2, 2]), ints([[1, 0], [0, 1]])], tensor)
    assert got.tolist() == [[[[7], [7]]], [[[7], [7]]], [[[1], [3]]], [[[2], [7]]]]


def test_batch_to_space_undoes_space_to_batch(bench: Any) -> None:
    source = image(3, 4, 6, 2)
    there = bench.run(O.SPACE_TO_BATCH_ND, [(F32, source), ints([2, 3]), ints([[0, 0], [0, 0]])], F32)
    assert there.shape == (18, 2, 2, 2)
    assert bench.run(O.BATCH_TO_SPACE_ND, [(F32, there), ints([2, 3])], F32).tolist() == source.tolist()


@pytest.mark.parametrize(
    ("operation", "arguments", "shape"),
    [
        (O.DEPTH_TO_SPACE, [block(2)], (2, 3, 5, 8)),
        (O.SPACE_TO_DEPTH, [block(3)], (2, 3, 6, 5)),
        (O.BATCH_TO_SPACE_ND, [ints([2, 1])], (4, 3, 5, 2)),
        (O.SPACE_TO_BATCH_ND, [ints([2, 3]), ints([[1, 0], [0, 2]])], (1, 3, 4, 2)),
    ],
)
def test_layouts_agree(bench: Any, operation: OperationType, arguments: Any, shape: tuple[int, ...]) -> None:
    source = image(*shape)
    plain = bench.run(operation, [(F32, source), *arguments], F32)
    nhwc = bench.run(operation, [(F32, source), *arguments, layout(False)], F32)
    nchw = bench.run(operation, [(F32, np.moveaxis(source, 3, 1)), *arguments, layout(True)], F32)
    assert plain.tolist() == nhwc.tolist() == np.moveaxis(nchw, 1, 3).tolist()


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        (
            O.DEPTH_TO_SPACE,
            [block(2)],
            "input 1: expected a block size whose square divides the depth 6, got 2",
        ),
        (O.DEPTH_TO_SPACE, [block(0)], "input 1: expected a positive block size, got 0"),
        (O.SPACE_TO_DEPTH, [block(2)], "input 1: expected a block size that divides 4 x 5, got 2"),
        (O.BATCH_TO_SPACE_ND, [ints([2, 2])], "input 1: expected blocks whose size divides the batch 2"),
        (O.BATCH_TO_SPACE_ND, [ints([2, 0])], "input 1: expected two positive block sizes"),
        (O.BATCH_TO_SPACE_ND, [ints([2])], "input 1: expected two positive block sizes"),
        (
            O.SPACE_TO_BATCH_ND,
            [ints([3, 1]), ints([[0, 1], [0, 0]])],
            "input 1: expected blocks that divide the padded 5 x 5",
        ),
        (O.SPACE_TO_BATCH_ND, [ints([1, 1]), ints([[0, -1], [0, 0]])], "input 2: expected paddings"),
        (
            O.SPACE_TO_BATCH_ND,
            [ints([1, 1]), ints([[2**31 - 1, 0], [0, 0]])],
            "expected an output of no negative",
        ),
    ],
)
def test_illegal_arguments_end_the_execution(
    bench: Any, operation: OperationType, arguments: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        bench.run(operation, [(F32, image(2, 4, 5, 6)), *arguments], F32)


def test_images_have_rank_4(bench: Any) -> None:
    with pytest.raises(InvalidArgument, match="input 0: expected rank 4"):
        bench.run(O.DEPTH_TO_SPACE, [(F32, image(2, 4)), block(1)], F32)
    with pytest.raises(InvalidModel, match="input 0: expected rank 4"):
        bench.level(O.DEPTH_TO_SPACE, [Operand(T.TENSOR_FLOAT32, (2, 4)), INT], [F32])


def test_zero_sized_batch_stays_zero_sized(bench: Any) -> None:
    assert bench.run(O.SPACE_TO_DEPTH, [(F32, image(0, 4, 4, 1)), block(2)], F32).shape == (0, 2, 2, 4)
    got = bench.run(
        O.SPACE_TO_BATCH_ND, [(F32, image(0, 4, 4, 1)), ints([2, 2]), ints([[0, 0], [0, 0]])], F32
    )
    assert got.shape == (0, 2, 2, 1)


ARGUMENTS = {
    O.DEPTH_TO_SPACE: (1, [INT]),
    O.SPACE_TO_DEPTH: (1, [INT]),
    O.BATCH_TO_SPACE_ND: (2, [I32]),
    O.SPACE_TO_BATCH_ND: (2, [I32, I32]),
}


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_types_levels_and_layout_flag(bench: Any, operation: OperationType) -> None:
    first, arguments = ARGUMENTS[operation]
    levels = {
        T.TENSOR_FLOAT32: first,
        T.TENSOR_QUANT8_ASYMM: first,
        T.TENSOR_FLOAT16: 3,
        T.TENSOR_QUANT8_ASYMM_SIGNED: 4,
    }
    for kind in (t for t in T if t.name.startswith("TENSOR_")):
        tensor = Operand(kind, (1, 0, 2, 4), 0.5 if "QUANT" in kind.name else 0.0)
        if kind in levels:
            assert bench.level(operation, [tensor, *arguments], [tensor]) == levels[kind]
            assert bench.level(operation, [tensor, *arguments, FLAG], [tensor]) == max(levels[kind], 3)
        else:
            with pytest.raises(InvalidModel, match="input 0: expected TENSOR_"):
                bench.level(operation, [tensor, *arguments], [tensor])
    with pytest.raises(InvalidModel, match=f"number of inputs: expected {len(arguments) + 1} or "):
        bench.level(operation, [F32], [F32])


def test_zero_point_raises_the_level_of_space_to_batch(bench: Any) -> None:
    for zero_point, level in ((0, 2), (1, 3)):
        tensor = Operand(T.TENSOR_QUANT8_ASYMM, (), 0.5, zero_point)
        assert bench.level(O.SPACE_TO_BATCH_ND, [tensor, I32, I32], [tensor]) == level
        assert bench.level(O.BATCH_TO_SPACE_ND, [tensor, I32], [tensor]) == 2


def test_constant_nonsense_is_refused_with_the_model(bench: Any) -> None:
    with pytest.raises(InvalidModel, match="input 1: expected a positive block size, got -1"):
        bench.level(O.SPACE_TO_DEPTH, [F32, INT], [F32], {1: -1})
    with pytest.raises(InvalidModel, match="input 1: expected positive block sizes"):
        bench.level(O.BATCH_TO_SPACE_ND, [F32, I32], [F32], {1: [1, 0]})
    with pytest.raises(InvalidModel, match="input 2: expected no negative padding"):
        bench.level(O.SPACE_TO_BATCH_ND, [F32, I32, I32], [F32], {2: [[0, 0], [-1, 0]]})
    tensor, other = (Operand(T.TENSOR_QUANT8_ASYMM, (), scale, 0) for scale in (0.5, 0.25))
    with pytest.raises(InvalidModel, match="output 0: expected scale"):
        bench.level(O.DEPTH_TO_SPACE, [tensor, INT], [other])

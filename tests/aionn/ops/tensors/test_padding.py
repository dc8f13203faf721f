"""Claims about paddings that the conformance data leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from tests.support.contracts import F32, I32, INT, scalar

T = OperandType
O = OperationType  # noqa: E741
ARRAY = np.arange(1, 7, dtype=np.float32).reshape(2, 3)


def pads(*pairs: tuple[int, int]) -> tuple[Operand, np.ndarray]:
    return I32, np.array(pairs, dtype=np.int32)


def test_pad_puts_zeros_around(bench: Any) -> None:
    got = bench.run(O.PAD, [(F32, ARRAY), pads((1, 0), (0, 2))], F32)
    assert got.tolist() == [[0, 0, 0, 0, 0], [1, 2, 3, 0, 0], [4, 5, 6, 0, 0]]


def test_quantised_padding_is_the_zero_point(bench: Any) -> None:
    signed = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.5, -9)
    assert bench.run(O.PAD, [(signed, np.int8([5])), pads((1, 2))], signed).tolist() == [-9, 5, -9, -9]


def test_pad_v2_puts_the_quantised_value_itself(bench: Any) -> None:
    signed = Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (), 0.5, -9)
    got = bench.run(O.PAD_V2, [(signed, np.int8([5])), pads((1, 1)), scalar(-128)], signed)
    assert got.tolist() == [-128, 5, -128]
    with pytest.raises(InvalidArgument, match="input 2: expected a value from -128 to 127, got 200"):
        bench.run(O.PAD_V2, [(signed, np.int8([5])), pads((1, 1)), scalar(200)], signed)
    with pytest.raises(InvalidModel, match="input 2: expected a value from -128 to 127, got -129"):
        bench.level(O.PAD_V2, [signed, I32, INT], [signed], {2: -129})


def test_padding_of_nothing_is_all_padding(bench: Any) -> None:
    assert bench.run(O.PAD, [(F32, ARRAY[:0]), pads((1, 1), (0, 0))], F32).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("mode", ["reflect", "symmetric"])
def test_mirror_pad_continues_by_its_mirror_image(bench: Any, mode: str) -> None:
    array = np.arange(60).reshape(3, 4, 5).astype(np.int32)
    pairs = ((2, 1), (0, 3), (4, 4))
    got = bench.run(
        O.MIRROR_PAD, [(I32, array), pads(*pairs), scalar(["reflect", "symmetric"].index(mode))], I32
    )
    assert got.tolist() == np.pad(array, pairs, mode=mode).tolist()  # type: ignore[call-overload]


@pytest.mark.parametrize(("mode", "largest"), [(0, 2), (1, 3)])
def test_mirror_pad_cannot_reach_beyond_the_input(bench: Any, mode: int, largest: int) -> None:
    got = bench.run(O.MIRROR_PAD, [(F32, ARRAY), pads((0, 0), (largest, 0)), scalar(mode)], F32)
    assert got.shape == (2, 3 + largest)
    with pytest.raises(InvalidArgument, match=f"input 1: expected at most {largest} on axis 1"):
        bench.run(O.MIRROR_PAD, [(F32, ARRAY), pads((0, 0), (0, largest + 1)), scalar(mode)], F32)


def test_mirror_pad_knows_two_modes(bench: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"input 2: expected mode 0 \(REFLECT\) or 1 \(SYMMETRIC\), got 2"
    ):
        bench.run(O.MIRROR_PAD, [(F32, ARRAY), pads((0, 0), (0, 0)), scalar(2)], F32)
    with pytest.raises(InvalidModel, match="input 2: expected mode 0"):
        bench.level(O.MIRROR_PAD, [F32, I32, INT], [F32], {2: -1})


@pytest.mark.parametrize("operation", [O.PAD, O.PAD_V2, O.MIRROR_PAD])
def test_illegal_paddings_end_the_execution(bench: Any, operation: OperationType) -> None:
    last = {
        O.PAD: [],
        O.PAD_V2: [(Operand(T.FLOAT32), np.array(1.0, np.float32))],
        O.MIRROR_PAD: [scalar(1)],
    }[operation]
    with pytest.raises(InvalidArgument, match="input 1: expected no negative padding"):
        bench.run(operation, [(F32, ARRAY), pads((0, 0), (0, -1)), *last], F32)
    with pytest.raises(InvalidArgument, match=r"input 1: expected shape \[2, 2\], got \[1, 2\]"):
        bench.run(operation, [(F32, ARRAY), pads((0, 0)), *last], F32)
    if operation != O.MIRROR_PAD:
        with pytest.raises(
            InvalidArgument, match=r"input 1: expected an output of .* at most 4294967295 bytes"
        ):
            bench.run(operation, [(F32, ARRAY), pads((0, 2**30), (0, 2**30)), *last], F32)


@pytest.mark.parametrize("operation", [O.PAD, O.PAD_V2, O.MIRROR_PAD])
def test_illegal_paddings_are_refused_with_the_model(bench: Any, operation: OperationType) -> None:
    last = {O.PAD: [], O.PAD_V2: [Operand(T.FLOAT32)], O.MIRROR_PAD: [INT]}[operation]
    tensor = Operand(T.TENSOR_FLOAT32, (2, 3))
    with pytest.raises(InvalidModel, match="input 1: expected no negative padding"):
        bench.level(operation, [tensor, I32, *last], [F32], {1: [[0, 0], [0, -1]]})
    for shape, message in (((2,), "rank 2"), ((3, 2), "extent 2 on axis 0"), ((2, 3), "extent 2 on axis 1")):
        with pytest.raises(InvalidModel, match=f"input 1: expected {message}"):
            bench.level(operation, [tensor, Operand(T.TENSOR_INT32, shape), *last], [F32])
    with pytest.raises(InvalidModel, match="output 0: expected rank 2"):
        bench.level(operation, [tensor, I32, *last], [Operand(T.TENSOR_FLOAT32, (6,))])


def test_zero_point_raises_the_level_of_pad(bench: Any) -> None:
    for zero_point, level in ((0, 2), (1, 3)):
        tensor = Operand(T.TENSOR_QUANT8_ASYMM, (2, 3), 0.5, zero_point)
        assert bench.level(O.PAD, [tensor, I32], [tensor]) == level


@pytest.mark.parametrize(
    ("operation", "kind", "level"),
    [
        (O.PAD, T.TENSOR_FLOAT32, 2),
        (O.PAD, T.TENSOR_FLOAT16, 3),
        (O.PAD, T.TENSOR_QUANT8_ASYMM_SIGNED, 4),
        (O.PAD_V2, T.TENSOR_FLOAT32, 3),
        (O.PAD_V2, T.TENSOR_FLOAT16, 3),
        (O.PAD_V2, T.TENSOR_QUANT8_ASYMM, 3),
        (O.PAD_V2, T.TENSOR_QUANT8_ASYMM_SIGNED, 4),
        (O.MIRROR_PAD, T.TENSOR_FLOAT32, 7),
        (O.MIRROR_PAD, T.TENSOR_INT32, 7),
        (O.MIRROR_PAD, T.TENSOR_QUANT8_ASYMM, 7),
    ],
)
def test_levels(bench: Any, operation: OperationType, kind: OperandType, level: int) -> None:
    values = {T.TENSOR_FLOAT32: T.FLOAT32, T.TENSOR_FLOAT16: T.FLOAT16}
    last = {O.PAD: [], O.PAD_V2: [Operand(values.get(kind, T.INT32))], O.MIRROR_PAD: [INT]}[operation]
    tensor = Operand(kind, (2, 3))
    assert bench.level(operation, [tensor, I32, *last], [tensor]) == level


def test_rank_is_at_most_4_save_for_mirrors(bench: Any) -> None:
    tensor = Operand(T.TENSOR_FLOAT32, (1,) * 5)
    assert bench.level(O.MIRROR_PAD, [tensor, I32, INT], [tensor]) == 7
    with pytest.raises(InvalidModel, match="input 0: expected rank of at most 4, got 5"):
        bench.level(O.PAD, [tensor, I32], [tensor])

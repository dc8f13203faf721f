"""What is made while a model is lowered takes a bounded amount of memory, however large the shapes that it declares."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from aionn.drivers.kit.engines import known
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx import lowering as onnx_lowering
from aionn.drivers.kit.onnx.lowered import Dialect
from aionn.drivers.litert import lowering as litert_lowering
from aionn.hal import FusedActivation, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder

ROOM_BYTES = 1 << 20
EXTENT = 1 << 22
"""More elements than the room has bytes."""


def mirrored() -> Model:
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (EXTENT,))
    pads = g.constant(np.array([[1, 0]], np.int32))
    return g.build([g.result(OperationType.MIRROR_PAD, [x, pads, 0], x, (EXTENT + 1,))])


def resized() -> Model:
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_QUANT8_ASYMM, (1, 1, 3, 1), scale=1.0)
    return g.build(
        [g.result(OperationType.RESIZE_NEAREST_NEIGHBOR, [x, EXTENT, 1, False], x, (1, 1, EXTENT, 1))]
    )


def repeated() -> Model:
    """Results of constants alone, each of a quarter of the room."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1,))
    one = g.constant(np.ones(1, np.float32))
    for count in range(40):
        many = ROOM_BYTES // 16 - count
        tiled = g.result(OperationType.TILE, [one, g.constant(np.array([many], np.int32))], x, (many,))
        first = g.result(
            OperationType.SLICE, [tiled, *(g.constant(np.array([n], np.int32)) for n in (0, 1))], x, (1,)
        )
        x = g.result(OperationType.ADD, [x, first, int(FusedActivation.NONE)], x, (1,))
    return g.build([x])


def traced_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("model", [mirrored, resized], ids=lambda model: model.__name__)
@pytest.mark.parametrize("lower", [onnx_lowering.lower, litert_lowering.lower], ids=["onnx", "litert"])
def test_indexes_of_huge_shapes_are_not_made(
    lower: Callable[[Model], object], model: Callable[[], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "MADE_BYTES_MAX", ROOM_BYTES)
    built = model()

    def lowered() -> None:
        if model is mirrored and lower is litert_lowering.lower:
            lower(built)  # LiteRT has such an operation.
            return
        with pytest.raises(
            Unsupported,
            match=f"{built.main.operations[0].type.name}: shapes that need constants of more than",
        ):
            lower(built)

    assert traced_bytes(lowered) < 2 * ROOM_BYTES


def test_results_of_constants_share_one_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = repeated()
    monkeypatch.setattr(known, "MADE_BYTES_MAX", ROOM_BYTES)
    found = known.Known(model)
    assert sum(array.nbytes for array in found.values.values()) <= ROOM_BYTES + known.MADE_PER_CONSTANT * len(
        model.operand_values
    )
    # What has no room is left to the execution.
    assert (
        0
        < len(
            [index for index in found.operations if model.main.operations[index].type == OperationType.TILE]
        )
        < 10
    )
    assert onnx_lowering.lower(model).file


def test_zeros_around_a_huge_image_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MADE_BYTES_MAX", ROOM_BYTES)
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1, 1, EXTENT, 1))
    weights, bias = g.constant(np.ones((1, 2, 1, 1), np.float32)), g.constant(np.zeros(1, np.float32))
    y = g.result(OperationType.CONV_2D, [x, weights, bias, 0, 0, 0, 1, 1, 1, 0], x, (1, 1, EXTENT, 1))
    model = g.build([y])

    def lowered() -> None:
        with pytest.raises(Unsupported, match="CONV_2D: shapes that need constants"):
            onnx_lowering.lower(model, Dialect(has_all_windows=False))

    assert traced_bytes(lowered) < 2 * ROOM_BYTES

"""Operations of `openvino-cpu` that OpenVINO computes wrongly beside certain others: sums with constants, views of a value."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.hal import Memory, Model, OperandType, OperationType, Priority
from aionn.models.builder import GraphBuilder
from aionn.models.onnx.schema import read_model
from tests.aionn.drivers.openvino.test_exactness import computed

pytest.importorskip("openvino", reason="OpenVINO is not installed")

FLOAT, INTEGER = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
UNSIGNED, SIGNED = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED


def in_turn(*steps: tuple[str, float]) -> Model:
    """Arithmetic with constants, one after the other."""
    graph = GraphBuilder()
    x = value = graph.input(FLOAT, (13,))
    for name, number in steps:
        constant = graph.constant(np.array([number], np.float32))
        value = graph.result(OperationType[name], [value, constant, graph.constant(0)], x, (13,))
    return graph.build([value])


@pytest.mark.parametrize(
    "steps",
    [
        (("ADD", 2.0**23), ("SUB", 2.0**23)),
        (("ADD", 2.0**23), ("MUL", 1.0), ("SUB", 2.0**23)),
        (("MUL", 1e30), ("MUL", 1e30), ("DIV", 1e30)),
    ],
    ids=lambda steps: "-".join(name for name, _ in steps),
)
async def test_constants_are_applied_in_turn(steps: tuple[tuple[str, float], ...]) -> None:
    # OpenVINO 2026.4 adds both constants first, so that a sum that rounds its operand to whole numbers does not.
    value = np.linspace(0, 3, 13, dtype=np.float32)
    wanted, got = (found.view(np.float32) for found in await computed(in_turn(*steps), [value]))
    assert not np.allclose(wanted, value)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [UNSIGNED, SIGNED])
@pytest.mark.parametrize("name", ["ADD", "SUB"])
@pytest.mark.parametrize("count", [1, 4])
async def test_every_quantised_sum_with_a_constant_counts(kind: OperandType, name: str, count: int) -> None:
    # OpenVINO 2026.4 keeps one of several such sums where the zero point is 0.
    graph, dtype = GraphBuilder(), np.uint8 if kind == UNSIGNED else np.int8
    x = value = graph.input(kind, (1, 4), scale=1.0)
    constant = graph.constant(np.arange(1, 1 + count, dtype=dtype), kind, scale=1.0)
    for _ in range(3):
        value = graph.result(OperationType[name], [value, constant, graph.constant(0)], x, (1, 4))
    wanted, got = await computed(graph.build([value]), [np.array([[20, 30, 40, 50]], dtype)])
    assert np.array_equal(wanted, got)


async def test_value_with_a_convolution_and_a_reshape_among_its_readers_keeps_its_memory() -> None:
    # OpenVINO 2026.4's Transpose before the convolution reads other memory where a Reshape of the same value is an output.
    drawn = np.random.default_rng(3)
    graph = GraphBuilder()
    x = graph.input(FLOAT, (2, 6, 6, 5))
    value = graph.result(OperationType.SIN, [x], x, (2, 6, 6, 5))
    weights = graph.constant(drawn.standard_normal((4, 2, 2, 5), np.float32))
    numbers = [graph.constant(one) for one in (2, 1, 1, 0)]
    bias = graph.constant(np.zeros(4, np.float32))
    image = graph.result(OperationType.CONV_2D, [value, weights, bias, *numbers], x, (2, 5, 5, 4))
    shape = graph.constant(np.array([72, 5], np.int32))
    model = graph.build([image, graph.result(OperationType.RESHAPE, [value, shape], x, (72, 5))])
    wanted, got = await computed(model, [drawn.standard_normal((2, 6, 6, 5), np.float32)])
    np.testing.assert_allclose(got.view(np.float32), wanted.view(np.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MEAN", FLOAT),
        ("REDUCE_SUM", FLOAT),
        ("REDUCE_PROD", FLOAT),
        ("REDUCE_MAX", FLOAT),
        ("REDUCE_MAX", UNSIGNED),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
@pytest.mark.parametrize("is_transposed", [False, True])
async def test_reduced_value_whose_extents_of_one_are_moved_keeps_its_shape(
    name: str, kind: OperandType, is_transposed: bool
) -> None:
    # OpenVINO 2026.4 forgets the Reshape or Transpose between [4, 1] and [1, 4], and gives [4, 1].
    dtype = np.dtype(np.uint8 if kind == UNSIGNED else np.float32)
    scale = 0.5 if kind == UNSIGNED else 0.0
    graph = GraphBuilder()
    x = graph.input(kind, (2, 4, 1, 3), scale=scale)
    axes = graph.constant(np.array([0, 3], np.int32))
    keeps = graph.constant(0) if name == "MEAN" else graph.constant(False)
    value = graph.result(OperationType[name], [x, axes, keeps], x, (4, 1))
    to = graph.constant(np.array([1, 0] if is_transposed else [1, 4], np.int32))
    move = OperationType.TRANSPOSE if is_transposed else OperationType.RESHAPE
    value = graph.result(move, [value, to], x, (1, 4))
    model = graph.build(
        [graph.result(OperationType.PAD, [value, graph.constant(np.zeros((2, 2), np.int32))], x, (1, 4))]
    )
    wanted, got = await computed(model, [np.arange(24).reshape(2, 4, 1, 3).astype(dtype)])
    np.testing.assert_allclose(got.view(dtype), wanted.view(dtype), rtol=1e-6)


def test_neighbours_that_do_no_harm_are_left_as_they_are() -> None:
    nodes = read_model(OpenvinoDevice().lower(in_turn(("MUL", 2.0), ("ADD", 1.0))).file).graph.nodes
    assert [node.op_type for node in nodes] == ["Mul", "Add", "Identity"]


def rotated() -> Model:
    """The halves of the last axis as the real and imaginary parts of numbers, turned by angles."""
    graph = GraphBuilder()
    x = graph.input(FLOAT, (2, 4, 3, 8))
    cosines, sines = (graph.input(FLOAT, (2, 1, 3, 4)) for _ in range(2))
    none, half = graph.constant(0), (2, 4, 3, 4)
    sizes = graph.constant(np.array(half, np.int32))

    def pair(kind: OperationType, a: int, b: int) -> int:
        return graph.result(kind, [a, b, none], x, half)

    real, imaginary = (
        graph.result(
            OperationType.SLICE, [x, graph.constant(np.array([0, 0, 0, at], np.int32)), sizes], x, half
        )
        for at in (0, 4)
    )
    first, second = pair(OperationType.MUL, cosines, real), pair(OperationType.MUL, sines, imaginary)
    third, fourth = pair(OperationType.MUL, sines, real), pair(OperationType.MUL, cosines, imaginary)
    parts = [pair(OperationType.SUB, first, second), pair(OperationType.ADD, third, fourth)]
    return graph.build(
        [graph.result(OperationType.CONCATENATION, [*parts, graph.constant(3)], x, (2, 4, 3, 8))]
    )


async def test_model_that_is_exported_wrongly_is_right_in_every_slot_and_from_the_cache() -> None:
    # OpenVINO 2026.4 makes one operation of the rotation, whose form is lost when it is exported: half of the result is noise.
    model, drawn = rotated(), np.random.default_rng(7)
    values = [
        drawn.standard_normal(shape, np.float32) for shape in ((2, 4, 3, 8), (2, 1, 3, 4), (2, 1, 3, 4))
    ]
    wanted, _ = await computed(model, values)
    async with OpenvinoDevice() as device:
        prepared = await device.prepare_model(model)
        restored = device.restore(prepared.cached(), priority=Priority.MEDIUM, deadline_ns=None)
        for one in (prepared, restored):
            for slot in one._idle:
                area = one.bind(request := request_for(model, values))
                slot.run(area.inputs(), area.outputs)
                location = request.outputs[0].location
                pool = request.pools[location.pool_index]
                assert isinstance(pool, Memory)
                got = pool.array[location.offset :][: wanted.size].view(np.float32)
                np.testing.assert_allclose(got, wanted.view(np.float32), rtol=1e-4, atol=1e-5)
            await one.aclose()

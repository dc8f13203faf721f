"""Operations of `openvino-cpu` that OpenVINO computes wrongly beside certain others: sums with constants, views of a value."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.hal import Model, OperandType, OperationType
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


def test_neighbours_that_do_no_harm_are_left_as_they_are() -> None:
    nodes = read_model(OpenvinoDevice().lower(in_turn(("MUL", 2.0), ("ADD", 1.0))).file).graph.nodes
    assert [node.op_type for node in nodes] == ["Mul", "Add", "Identity"]

"""Numbers that `openvino-cpu` computes as the HAL has them, where OpenVINO's kernels do not: large integers, products, and
quotients.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.openvino import driver
from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.hal import Model, OperandType, OperationType, Priority
from aionn.models.builder import GraphBuilder
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from tests.aionn.drivers.openvino.test_exactness import computed
from tests.aionn.models.onnx.building import file, info

pytest.importorskip("openvino", reason="OpenVINO is not installed")

FLOAT, INTEGER = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
LARGE = 2**27
"""Float32 has every eighth number from here on."""


def product(factors: np.ndarray, kind: OperandType, axes: list[int]) -> Model:
    graph = GraphBuilder()
    x = graph.input(kind, factors.shape)
    shape = tuple(n for axis, n in enumerate(factors.shape) if axis not in axes) or (1,)
    arguments = [x, graph.constant(np.array(axes, np.int32)), graph.constant(False)]
    return graph.build([graph.result(OperationType.REDUCE_PROD, arguments, x, shape)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [FLOAT, OperandType.TENSOR_FLOAT16])
@pytest.mark.parametrize(
    ("shape", "axes"), [((1, 16, 1), [1]), ((3, 16), [1]), ((2, 2, 4), [0, 2]), ((1, 16), [0, 1])]
)
@pytest.mark.thorough
async def test_products_do_not_overflow_in_parts(
    kind: OperandType, shape: tuple[int, ...], axes: list[int]
) -> None:
    # OpenVINO 2026.4 multiplies the elements of each lane of a vector first: 0 and an infinity here, whose product is NaN.
    dtype = np.float32 if kind == FLOAT else np.float16
    large, small = (1e20, 1e-20) if kind == FLOAT else (1e4, 1e-4)
    factors = np.where(np.arange(np.prod(shape)) % 2, small, large).astype(dtype).reshape(shape)
    wanted, got = (found.view(dtype) for found in await computed(product(factors, kind, axes), [factors]))
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=2e-3)


async def test_relaxed_model_with_quantised_values_is_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With float16 a tenth of the numbers that nothing is added to would be another one, on processors that have it.
    chosen: list[str] = []
    properties_for = driver.properties_for

    def noted(*arguments: Any, **named: Any) -> Any:
        chosen.append(named["is_relaxed"])
        return properties_for(*arguments, **named)

    monkeypatch.setattr(driver, "properties_for", noted)
    numbers = np.arange(256, dtype=np.uint8)
    for kind in (OperandType.TENSOR_QUANT8_ASYMM, FLOAT):
        graph = GraphBuilder()
        scale = 0.00408 if kind != FLOAT else 0.0
        zero_point = 100 if kind != FLOAT else 0
        x = graph.input(kind, (256,), scale=scale, zero_point=zero_point)
        zero = np.array([zero_point], numbers.dtype if kind != FLOAT else np.float32)
        y = graph.constant(zero, kind, scale=scale, zero_point=zero_point)
        model = graph.build([graph.result(OperationType.ADD, [x, y, graph.constant(0)], x)])
        relaxed = msgspec.structs.replace(model, relax_computation_float32_to_float16=True)
        value = numbers.astype(zero.dtype)
        wanted, got = await computed(relaxed, [value])
        np.testing.assert_array_equal(wanted.view(zero.dtype), value)
        np.testing.assert_array_equal(got.view(zero.dtype), value)
        assert chosen[-1] == (kind == FLOAT)


def test_products_of_many_factors_are_left_to_others() -> None:
    device = OpenvinoDevice()
    assert device.lower(product(np.ones((4, 16), np.float32), FLOAT, [1])).file
    with pytest.raises(Unsupported, match="many factors"):
        device.lower(product(np.ones((4, 17), np.float32), FLOAT, [1]))
    nodes = [
        node("Compress", ["x", "chosen"], ["some"], axis=0),
        node("ReduceProd", ["some", "axes"], ["y"], keepdims=0),
    ]
    inputs = [info("x", np.zeros(40, np.float32)), info("chosen", np.zeros(40, np.bool_))]
    model = load_onnx(file(nodes, inputs, ["y"], {"axes": np.array([0])})).model
    assert list(device.supports(model)) == [True, False]


def compared(name: str, *, is_constant: bool) -> tuple[Model, list[np.ndarray]]:
    drawn = np.random.default_rng(9)
    pair = [(LARGE + drawn.integers(-9, 10, (4, 50))).astype(np.int32) for _ in range(2)]
    pair[1][0, :2] = pair[0][0, :2] = -(2**31), 2**31 - 1
    graph = GraphBuilder()
    x = graph.input(INTEGER, (4, 50))
    y = graph.constant(pair[1]) if is_constant else graph.input(INTEGER, (4, 50))
    result = graph.variable(OperandType.TENSOR_BOOL8, (4, 50))
    graph.operation(OperationType[name], [x, y], [result])
    return graph.build([result]), pair[: 1 if is_constant else 2]


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("name", ["EQUAL", "NOT_EQUAL"])
async def test_large_integers_are_equal_only_where_they_are(name: str, is_constant: bool) -> None:
    # OpenVINO 2026.4 compares integers as floats, which have every eighth of these numbers.
    model, values = compared(name, is_constant=is_constant)
    wanted, got = await computed(model, values)
    assert 0 < wanted.sum() < wanted.size
    assert np.array_equal(wanted, got)


def test_integers_that_openvino_computes_as_floats_are_left_to_others() -> None:
    device = OpenvinoDevice()
    for name in ("LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"):
        with pytest.raises(Unsupported, match="compares as floats"):
            device.lower(compared(name, is_constant=False)[0])
    graph = GraphBuilder()
    x = graph.input(INTEGER, (4, 50))
    values, indexes = graph.variable(INTEGER, (4, 3)), graph.variable(INTEGER, (4, 3))
    graph.operation(OperationType.TOPK_V2, [x, graph.constant(3)], [values, indexes])
    with pytest.raises(Unsupported, match="sorts as floats"):
        device.lower(graph.build([values, indexes]))


def bounded(bound: np.ndarray) -> Model:
    """A MAXIMUM and a MINIMUM with constants, which OpenVINO makes a clamp of floats where each is one number."""
    graph = GraphBuilder()
    x = graph.input(INTEGER, (4, 6))
    y = graph.result(OperationType.MAXIMUM, [x, graph.constant(bound - 3)], x, (4, 6))
    return graph.build([graph.result(OperationType.MINIMUM, [y, graph.constant(bound + 3)], x, (4, 6))])


async def test_large_integers_are_bounded_exactly() -> None:
    device = OpenvinoDevice()
    with pytest.raises(Unsupported, match="integers with a bound"):
        device.lower(bounded(np.full((4, 6), LARGE, np.int32)))
    drawn = np.random.default_rng(2)
    wanted, got = await computed(
        bounded((LARGE + np.arange(24).reshape(4, 6) % 2).astype(np.int32)),
        [(LARGE + drawn.integers(-9, 10, (4, 6))).astype(np.int32)],
    )
    assert np.array_equal(wanted, got)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL"])
@pytest.mark.parametrize("is_constant", [False, True])
async def test_arithmetic_of_large_integers_is_exact(name: str, is_constant: bool) -> None:
    graph = GraphBuilder()
    x = graph.input(INTEGER, (4, 6))
    other = np.array([LARGE // 2 + 5 if name != "MUL" else 3], np.int32)
    y = graph.constant(other) if is_constant else graph.input(INTEGER, (1,))
    for _ in range(2):
        x = graph.result(OperationType[name], [x, y, graph.constant(0)], x, (4, 6))
    value = (LARGE + np.arange(24).reshape(4, 6)).astype(np.int32)
    wanted, got = await computed(graph.build([x]), [value, *([] if is_constant else [other])])
    assert np.array_equal(wanted, got)


@pytest.mark.parametrize("name", ["ARGMAX", "ARGMIN"])
async def test_places_of_the_largest_integers_are_right(name: str) -> None:
    graph = GraphBuilder()
    x = graph.input(INTEGER, (9, 6))
    y = graph.variable(INTEGER, (9,))
    graph.operation(OperationType[name], [x, graph.constant(1)], [y])
    value = (LARGE + np.random.default_rng(7).integers(-9, 10, (9, 6))).astype(np.int32)
    wanted, got = await computed(graph.build([y]), [value])
    assert np.array_equal(wanted, got)


@pytest.mark.parametrize("name", ["ReduceProd", "ReduceMean", "Sign"])
def test_operators_of_the_extension_that_compute_integers_are_left_to_others(name: str) -> None:
    # OpenVINO 2026.4's ReduceSum, for one, gives -56,828,532 for -56,828,533.
    device = OpenvinoDevice()
    for dtype in (np.int32, np.float32):
        model = load_onnx(
            file([node(name, ["x"], ["y"])], [info("x", np.ones((2, 3), dtype))], ["y"], {})
        ).model
        assert all(device.supports(model)) == (dtype == np.float32)


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_operators_of_the_extension_that_only_move_integers_are_supported(reduction: str) -> None:
    scattered = node("ScatterND", ["x", "places", "new"], ["y"], reduction=reduction)
    constants = {"places": np.array([[1], [3]]), "new": np.ones((2, 5), np.int32)}
    model = load_onnx(file([scattered], [info("x", np.ones((4, 5), np.int32))], ["y"], constants)).model
    assert all(OpenvinoDevice().supports(model)) == (reduction == "none")


@pytest.mark.parametrize("is_constant", [False, True])
async def test_quotients_are_rounded_once_in_every_slot_and_from_the_cache(is_constant: bool) -> None:
    # OpenVINO 2026.4 would multiply by the rounded reciprocal: 41 / 41 is less than 1 then, and its floor 0.
    numbers = np.arange(1, 81, dtype=np.float32)
    dividends, divisors = np.repeat(numbers, 80), np.tile(numbers, 80)
    if not is_constant:  # OpenVINO makes such constants 0.
        divisors[:3], dividends[:3] = 1e-40, (0.0, 1e-40, -1e-40)
    graph = GraphBuilder()
    x = graph.input(FLOAT, dividends.shape)
    y = graph.constant(divisors) if is_constant else graph.input(FLOAT, divisors.shape)
    quotient = graph.result(OperationType.DIV, [x, y, graph.constant(0)], x, dividends.shape)
    floor = graph.result(OperationType.FLOOR, [quotient], x, dividends.shape)
    given = [dividends, *([] if is_constant else [divisors])]
    async with OpenvinoDevice() as device:
        made: Any = await device.prepare_model(graph.build([quotient, floor]))
        restored: Any = device.restore(made.cached(), priority=Priority.MEDIUM, deadline_ns=None)
        for prepared in (made, restored):
            area = prepared.bind(request_for(prepared.model, given))
            for slot in prepared._idle:
                slot.begin()
                slot.run(area.inputs(), area.outputs)
                got = [np.array(one.buffer.view(np.float32)) for one in area.outputs]
                np.testing.assert_array_equal(got[0], dividends / divisors)
                np.testing.assert_array_equal(got[1], np.floor(dividends / divisors))
            await prepared.aclose()


@pytest.mark.parametrize("producer", ["mean", "fully connected", "product", "root"])
async def test_constant_over_something_computed_is_no_quotient_the_other_way_round(producer: str) -> None:
    # OpenVINO 2026.4 would make a marked division a part of the operation before it, and divide by the constant there.
    values = np.random.default_rng(5).uniform(0.5, 4.0, (4, 8)).astype(np.float32)
    weights = np.random.default_rng(6).uniform(0.1, 1.0, (8, 8)).astype(np.float32)
    graph = GraphBuilder()
    x = graph.input(FLOAT, values.shape)
    computed, shape = {
        "mean": (values.mean(1, keepdims=True), (4, 1)),
        "fully connected": (values @ weights.T, (4, 8)),
        "product": (values * values, (4, 8)),
        "root": (np.sqrt(values.mean(1, keepdims=True)), (4, 1)),
    }[producer]
    if producer == "fully connected":
        bias = graph.constant(np.zeros(8, np.float32))
        kind, given = OperationType.FULLY_CONNECTED, [x, graph.constant(weights), bias, graph.constant(0)]
    elif producer == "product":
        kind, given = OperationType.MUL, [x, x, graph.constant(0)]
    else:
        kind, given = OperationType.MEAN, [x, graph.constant(np.array([1], np.int32)), graph.constant(1)]
    divisor = graph.result(kind, given, x, shape)
    if producer == "root":
        divisor = graph.result(OperationType.SQRT, [divisor], x, shape)
    three = graph.constant(np.array([3], np.float32))
    quotient = graph.result(OperationType.DIV, [three, divisor, graph.constant(0)], x, shape)
    async with OpenvinoDevice() as device:
        prepared: Any = await device.prepare_model(graph.build([quotient]))
        area = prepared.bind(request_for(prepared.model, [values]))
        slot = prepared._idle[0]
        slot.begin()
        slot.run(area.inputs(), area.outputs)
        got = np.array(area.outputs[0].buffer.view(np.float32)).reshape(shape)
        np.testing.assert_allclose(got, 3 / computed, rtol=1e-5)
        await prepared.aclose()

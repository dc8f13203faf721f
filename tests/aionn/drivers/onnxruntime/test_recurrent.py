"""Recurrent layers over a sequence on `ort-cpu` give the reference device's results; what ONNX has otherwise is not supported."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder, Value

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from aionn.drivers.onnxruntime.driver import OrtDevice

Array = npt.NDArray[Any]

FLOAT = OperandType.TENSOR_FLOAT32
TIME, BATCH, INPUT, UNITS = 5, 2, 3, 4


class Layer:
    """A layer whose constants are random numbers."""

    def __init__(self, *, is_time_first: bool) -> None:
        self.rng = np.random.default_rng(11)
        self.graph = GraphBuilder()
        self.shape = (TIME, BATCH) if is_time_first else (BATCH, TIME)
        self.x = self.graph.input(FLOAT, (*self.shape, INPUT))

    def drawn(self, *shape: int) -> Value:
        return self.graph.constant(self.rng.uniform(-1, 1, shape).astype(np.float32), FLOAT)

    def state(self) -> Value:
        return self.graph.input(FLOAT, (BATCH, UNITS))

    def written(self, kind: OperationType, inputs: list[Any], states: int) -> Model:
        outputs = [self.graph.variable(FLOAT, (*self.shape, UNITS))]
        outputs += [self.graph.variable(FLOAT, (BATCH, UNITS)) for _ in range(states)]
        values = [one if isinstance(one, Value) else self.graph.constant(one) for one in inputs]
        self.graph.operation(kind, values, outputs)
        return self.graph.build(outputs)


def lstm(
    *,
    is_time_first: bool = True,
    peepholes: bool = False,
    states: int = 2,
    activation: int = 4,
    **changed: Any,
) -> Model:
    layer = Layer(is_time_first=is_time_first)
    no = layer.graph.omitted(FLOAT)
    gates = range(4)
    inputs: list[Any] = [layer.x, *(layer.drawn(UNITS, INPUT) for _ in gates)]
    inputs += [layer.drawn(UNITS, UNITS) for _ in gates]
    inputs += [layer.drawn(UNITS) if peepholes else no for _ in range(3)]
    inputs += [layer.drawn(UNITS) for _ in gates]
    inputs += [
        no,
        no,
        layer.state(),
        layer.state(),
        activation,
        changed.get("limit", 0.0),
        0.0,
        is_time_first,
    ]
    inputs += [no] * 4
    if changed.get("coupled"):
        for position in (1, 5, 9, 12):
            inputs[position] = no
    return layer.written(OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM, inputs, states)


def rnn(*, is_time_first: bool = True, activation: int = 4) -> Model:
    layer = Layer(is_time_first=is_time_first)
    inputs = [
        layer.x,
        layer.drawn(UNITS, INPUT),
        layer.drawn(UNITS, UNITS),
        layer.drawn(UNITS),
        layer.state(),
    ]
    return layer.written(
        OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, [*inputs, activation, int(is_time_first)], 1
    )


MODELS = {
    "lstm": lstm(),
    "lstm, batch first, with peepholes": lstm(is_time_first=False, peepholes=True),
    "lstm without states as outputs": lstm(states=0),
    "lstm of another activation": lstm(activation=1),
    "rnn": rnn(),
    "rnn, batch first": rnn(is_time_first=False, activation=6),
}


@pytest.mark.parametrize("name", MODELS)
async def test_layer_gives_the_reference_s_results(name: str) -> None:
    model = MODELS[name]
    rng = np.random.default_rng(12)
    values = [rng.uniform(-1, 1, one.dimensions).astype(np.float32) for one in model.main.inputs]
    found = []
    async with OrtDevice() as first, ReferenceDevice() as second:
        for device in (first, second):
            async with (
                aionn.open(devices=[device], drivers=[]) as runtime,
                await runtime.compile(model) as net,
            ):
                found.append((await net.execute(values)).outputs)
    for got, expected in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("changed", [{"coupled": True}, {"limit": 1.5}, {"activation": 0}])
async def test_layer_that_onnx_does_not_have_is_not_supported(changed: dict[str, Any]) -> None:
    async with OrtDevice() as device:
        assert await device.supported_operations(lstm(**changed)) == (False,)

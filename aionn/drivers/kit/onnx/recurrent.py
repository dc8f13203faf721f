"""Lowering of recurrent layers over a sequence: UNIDIRECTIONAL_SEQUENCE_LSTM and UNIDIRECTIONAL_SEQUENCE_RNN.

Owns the order of the gates and the number of axes: ONNX has the weights of all gates in one tensor with an axis for directions.

Source: the contracts in ``aionn.ops``; the operators of ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.elementwise import Rule
from aionn.drivers.kit.onnx.graph import Graph
from aionn.drivers.kit.onnx.value import Value
from aionn.hal import Operation, OperationType

__all__ = ["RULES"]

_ACTIVATIONS = {1: "Relu", 4: "Tanh", 6: "Sigmoid"}
"""ONNX's names of the HAL's activations."""

_TIME_FIRST = (1, 0, 2)
"""The order of the axes of a sequence that has the batch first."""

_GATES = (0, 3, 1, 2)
"""The positions of ONNX's gates, input, output, forget and cell, among the HAL's: input, forget, cell, output."""


def _activation(g: Graph, op: Operation, position: int) -> str:
    number = int(g.scalar(op, position))
    if number not in _ACTIVATIONS:
        raise Unsupported(f"activation {number}")
    return _ACTIVATIONS[number]


def _stacked(g: Graph, values: Sequence[Value], zeros: int = 0) -> str:
    """Values one after the other along their first axis, zeros behind them, with a leading axis for the only direction."""
    shape = (1, sum(value.shape[0] for value in values) + zeros, *values[0].shape[1:])
    if all(value.constant is not None for value in values):
        arrays = [value.constant for value in values if value.constant is not None]
        return g.constant(
            np.concatenate([*arrays, np.zeros(zeros, np.float32)] if zeros else arrays).reshape(shape)
        )
    names = [g.name(value) for value in values]
    if zeros:
        names.append(g.constant(np.zeros(zeros, np.float32)))
    return g.reshaped(g.emit("Concat", names, axis=0) if len(names) > 1 else names[0], shape)


def _sequence(g: Graph, value: Value, *, is_time_first: bool) -> str:
    return g.name(value, None if is_time_first else _TIME_FIRST)


def _state(g: Graph, value: Value) -> str:
    return g.reshaped(g.name(value), (1, *value.shape))


def _set_results(g: Graph, op: Operation, names: Sequence[str], *, is_time_first: bool) -> None:
    """States the outputs: the sequence, and the states after its last step."""
    outputs = [g.output(op, position) for position in range(len(op.outputs))]
    sequence = outputs[0]
    order = sequence.plain if is_time_first else _TIME_FIRST
    g.set(sequence, g.reshaped(names[0], tuple(sequence.shape[axis] for axis in order)), order)
    for value, name in zip(outputs[1:], names[1:], strict=False):
        g.set(value, g.reshaped(name, value.shape))


def lstm(g: Graph, op: Operation) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM, with or without peepholes."""
    if not all(g.has(op, position) for position in (1, 5, 12)):
        raise Unsupported("an input gate that is coupled with the forget gate")
    if any(g.has(op, position) for position in (16, 17, 24, 25, 26, 27)):
        raise Unsupported("a projection or a normalisation in a recurrent layer")
    if any(float(g.scalar(op, position)) for position in (21, 22)):
        raise Unsupported("limits of the state, which ONNX does not have")
    activation, is_time_first = _activation(g, op, 20), bool(g.scalar(op, 23))
    weights, recurrent, biases = ([g.input(op, start + gate) for gate in _GATES] for start in (1, 5, 12))
    units = weights[0].shape[0]
    inputs = [
        _sequence(g, g.input(op, 0), is_time_first=is_time_first),
        _stacked(g, weights),
        _stacked(g, recurrent),
        _stacked(g, biases, zeros=4 * units),
        "",
        _state(g, g.input(op, 18)),
        _state(g, g.input(op, 19)),
    ]
    peepholes = [g.has(op, position) for position in (9, 10, 11)]
    if all(peepholes):
        inputs.append(_stacked(g, [g.input(op, position) for position in (9, 11, 10)]))
    elif any(peepholes):
        raise Unsupported("one or two of the three peepholes")
    names = g.emit_all("LSTM", inputs, 3, hidden_size=units, activations=["Sigmoid", activation, activation])
    _set_results(g, op, names, is_time_first=is_time_first)


def rnn(g: Graph, op: Operation) -> None:
    """UNIDIRECTIONAL_SEQUENCE_RNN."""
    activation, is_time_first = _activation(g, op, 5), bool(g.scalar(op, 6))
    units = g.input(op, 1).shape[0]
    inputs = [
        _sequence(g, g.input(op, 0), is_time_first=is_time_first),
        _stacked(g, [g.input(op, 1)]),
        _stacked(g, [g.input(op, 2)]),
        _stacked(g, [g.input(op, 3)], zeros=units),
        "",
        _state(g, g.input(op, 4)),
    ]
    names = g.emit_all("RNN", inputs, 2, hidden_size=units, activations=[activation])
    _set_results(g, op, names, is_time_first=is_time_first)


RULES: Mapping[OperationType, Rule] = {
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM: lstm,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN: rnn,
}

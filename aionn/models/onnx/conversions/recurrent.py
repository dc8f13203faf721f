"""LSTM and RNN: the HAL's sequence operations, one for each direction.

ONNX keeps the weights of the gates in one tensor, in the order input, output, forget, cell; the HAL takes a tensor for each gate.
The two biases of a gate are added. For the direction from the end, the sequence is reversed before and its result afterwards.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.hal import OperationType
from aionn.models.builder import Value
from aionn.models.onnx.conversions.movement import sliced, transposed
from aionn.models.onnx.formula import Formula
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.tensors import Inexpressible, Order, Shape, Tensor, distinct
from aionn.models.onnx.writer import GraphWriter, Input

__all__ = ["lstm", "rnn"]

NONE, RELU, TANH, SIGMOID = 0, 1, 4, 6
"""The numbers of activations in the HAL's recurrent operations."""

_RNN_ACTIVATIONS = {"Tanh": TANH, "Relu": RELU, "Sigmoid": SIGMOID}


class _Layer:
    """The inputs and attributes that both operators have.

    Attributes:
        x: The sequence, [time, batch, input].
        units: Size of the state.
        directions: For each direction whether it runs from the end.
    """

    def __init__(self, g: GraphWriter, op: Operator, gates: int) -> None:
        x = op.input(0)
        if not x.is_float or x.rank != 3:
            raise Inexpressible(f"values of type {x.dtype} and rank {x.rank}")
        self.batch_first = bool(op.integer("layout", 0))
        self.x = transposed(g, x, (1, 0, 2)) if self.batch_first else x
        self.time, self.batch = self.x.shape[:2]
        direction = op.text("direction", "forward")
        known = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        if direction not in known:
            op.refuse("attribute 'direction'", "forward, reverse or bidirectional", direction)
        self.directions = known[direction]
        count = len(self.directions)
        self.units = op.integer("hidden_size", op.input(2).shape[-1])
        for position, shape in (
            (1, (count, gates * self.units, x.shape[2])),
            (2, (count, gates * self.units, self.units)),
            (3, (count, 2 * gates * self.units)),
        ):
            if op.has(position) and op.input(position).shape != shape:
                op.refuse(f"input {position}", list(shape), list(op.input(position).shape))
        if op.has(4) and (distinct(op.array(4, "the lengths")) != self.time).any():
            raise Inexpressible("sequences of different lengths")
        if op.reals("activation_alpha") or op.reals("activation_beta") or op.has_attribute("clip"):
            raise Inexpressible("activations with numbers of their own")
        self.gates = gates

    def part(self, g: GraphWriter, tensor: Tensor, direction: int, first: int, shape: Shape) -> Tensor:
        """The elements of a direction's weights from row ``first`` on, in a shape."""
        row = sliced(g, sliced(g, tensor, 0, direction, 1), 1, first, shape[0])
        if row.array is not None:
            return g.constant(row.array.reshape(shape), row.dtype)
        return g.tensor(g.reshaped(g.form(row), shape), row.dtype, shape)

    def bias(self, g: GraphWriter, op: Operator, direction: int, gate: int) -> Value:
        """The sum of both biases of a gate."""
        shape = (self.units,)
        if not op.has(3):
            return g.like(0.0, g.form(self.x), shape)
        parts = [
            Formula(g, g.form(self.part(g, op.input(3), direction, start + gate * self.units, shape)))
            for start in (0, self.gates * self.units)
        ]
        return (parts[0] + parts[1]).value

    def state(self, g: GraphWriter, op: Operator, position: int, direction: int) -> Value:
        """The state before the first step, [batch, units]."""
        shape = (self.batch, self.units)
        if not op.has(position):
            return g.like(0.0, g.form(self.x), shape)
        state = op.input(position)
        state = transposed(g, state, (1, 0, 2)) if self.batch_first else state
        if state.shape != (len(self.directions), *shape):
            op.refuse(f"input {position}", [len(self.directions), *shape], list(state.shape))
        return g.reshaped(g.form(sliced(g, state, 0, direction, 1)), shape)

    def sequence(self, g: GraphWriter, *, is_reversed: bool) -> Value:
        value = g.form(self.x)
        return g.emit(OperationType.REVERSE, [value, g.int32s([0])]) if is_reversed else value

    def results(self, g: GraphWriter, runs: Sequence[Sequence[Value]]) -> list[Tensor]:
        """The outputs of all directions together, in the requested layout."""
        count, time, batch, units = len(runs), self.time, self.batch, self.units
        outputs = []
        for position, values in enumerate(zip(*runs, strict=True)):
            listed = list(values)
            if position == 0:
                for index, is_reversed in enumerate(self.directions):
                    if is_reversed:
                        listed[index] = g.emit(OperationType.REVERSE, [listed[index], g.int32s([0])])
                # ONNX's output is [time, direction, batch, units], the HAL's is [time, batch, units] for each direction.
                shape: Shape = (time, count, batch, units)
                parts = [g.reshaped(value, (time, 1, batch, units)) for value in listed]
                axis = 1
                turn: Order = (2, 0, 1, 3)
            else:
                shape = (count, batch, units)
                parts = [g.reshaped(value, (1, batch, units)) for value in listed]
                axis, turn = 0, (1, 0, 2)
            whole = parts[0] if count == 1 else g.emit(OperationType.CONCATENATION, [*parts, axis])
            tensor = g.tensor(whole, self.x.dtype, shape)
            outputs.append(transposed(g, tensor, turn) if self.batch_first else tensor)
        return outputs


def _activations(op: Operator, defaults: Sequence[str], count: int) -> list[str]:
    given = op.texts("activations") or list(defaults) * count
    names = [name.capitalize() for name in given]
    if len(names) != len(defaults) * count:
        op.refuse("attribute 'activations'", f"{len(defaults) * count} names", given)
    return names


def rnn(g: GraphWriter, op: Operator) -> list[Tensor]:
    """UNIDIRECTIONAL_SEQUENCE_RNN for each direction."""
    layer = _Layer(g, op, 1)
    names = _activations(op, ["Tanh"], len(layer.directions))
    runs = []
    for direction, is_reversed in enumerate(layer.directions):
        if names[direction] not in _RNN_ACTIVATIONS:
            raise Inexpressible(f"activation {names[direction]}")
        x = layer.sequence(g, is_reversed=is_reversed)
        weights = [
            g.form(
                layer.part(g, op.input(position), direction, 0, (layer.units, op.input(position).shape[2]))
            )
            for position in (1, 2)
        ]
        state = layer.state(g, op, 5, direction)
        inputs: list[Input] = [
            x,
            *weights,
            layer.bias(g, op, direction, 0),
            state,
            _RNN_ACTIVATIONS[names[direction]],
            1,
        ]
        runs.append(g.emit_all(OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, inputs, [None, None]))
    return layer.results(g, runs)


def lstm(g: GraphWriter, op: Operator) -> list[Tensor]:
    """UNIDIRECTIONAL_SEQUENCE_LSTM for each direction."""
    layer = _Layer(g, op, 4)
    units = layer.units
    if op.integer("input_forget", 0):
        raise Inexpressible("coupled gates")
    if _activations(op, ["Sigmoid", "Tanh", "Tanh"], len(layer.directions)) != [
        "Sigmoid",
        "Tanh",
        "Tanh",
    ] * len(layer.directions):
        raise Inexpressible("activations other than Sigmoid, Tanh, Tanh")
    order = [0, 2, 3, 1]  # The positions of the HAL's input, forget, cell and output gate in ONNX's order.
    runs = []
    for direction, is_reversed in enumerate(layer.directions):
        x = layer.sequence(g, is_reversed=is_reversed)
        weights = [
            g.form(
                layer.part(
                    g, op.input(position), direction, gate * units, (units, op.input(position).shape[2])
                )
            )
            for position in (1, 2)
            for gate in order
        ]
        omitted = g.omitted(x)
        peepholes = [omitted] * 3
        if op.has(7):
            if op.input(7).shape != (len(layer.directions), 3 * units):
                op.refuse("input 7", [len(layer.directions), 3 * units], list(op.input(7).shape))
            # ONNX's order is input, output, forget; the HAL's is input, forget, output.
            peepholes = [
                g.form(layer.part(g, op.input(7), direction, k * units, (units,))) for k in (0, 2, 1)
            ]
        biases = [layer.bias(g, op, direction, gate) for gate in order]
        states = [layer.state(g, op, position, direction) for position in (5, 6)]
        inputs: list[Input] = [x, *weights, *peepholes, *biases, omitted, omitted, *states, TANH]
        limits = [g.scalar(0.0, x), g.scalar(0.0, x)]
        runs.append(
            g.emit_all(
                OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
                [*inputs, *limits, True, *[omitted] * 4],
                [None, None, None],
            )
        )
    return layer.results(g, runs)

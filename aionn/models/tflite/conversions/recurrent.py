"""Recurrent layers: the fused operators of TensorFlow Lite, whose inputs have nearly the HAL's order.

Owns how their arguments become HAL arguments, and what happens to their state: TensorFlow Lite keeps it in variable tensors from
one execution to the next until they are reset; a model here starts every execution as after such a reset, with zeros, and the last
state is not handed out.

Source: the TensorFlow Lite operators' documentation and kernels; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

from collections.abc import Collection

from aionn.hal import OperandType, OperationType
from aionn.models.tflite.graph import Inexpressible, SubgraphWriter
from aionn.models.tflite.schema import ActivationFunctionType, TfliteOperator

__all__ = [
    "bidirectional_sequence_lstm",
    "bidirectional_sequence_rnn",
    "lstm",
    "rnn",
    "svdf",
    "unidirectional_sequence_lstm",
    "unidirectional_sequence_rnn",
]

_ACTIVATION = "fused_activation_function"


def _activation(g: SubgraphWriter, op: TfliteOperator, table: str) -> int:
    # NONE to TANH have the numbers that the HAL's recurrent operations give them.
    code = op.integer(table, _ACTIVATION)
    if not ActivationFunctionType.NONE <= code <= ActivationFunctionType.TANH:
        raise Inexpressible(f"fused activation {code}")
    return g.int32(code)


def _inputs(g: SubgraphWriter, op: TfliteOperator, count: int, states: Collection[int]) -> list[int]:
    """The first ``count`` inputs; variable states as zeros, what is left out without a value."""
    data = g.input(op, 0)
    kind = OperandType(g.type_of(data))
    found = []
    for position in range(count):
        if not g.has(op, position):
            found.append(g.omitted(kind))
        elif position in states and g.input_tensor(op, position).is_variable:
            tensor = g.input_tensor(op, position)
            found.append(g.zeros(kind, tensor.dimensions))
        else:
            found.append(g.input(op, position))
    return found


def _clips(g: SubgraphWriter, op: TfliteOperator, table: str, data: int) -> list[int]:
    return [g.real(op.option(table, name), data) for name in ("cell_clip", "proj_clip")]


def _flag(g: SubgraphWriter, op: TfliteOperator, table: str, name: str) -> int:
    return g.boolean(bool(op.integer(table, name)))


def _norms(g: SubgraphWriter, op: TfliteOperator) -> list[int]:
    """The norm weights, inputs 20 to 23 of the file's operator, where it has any."""
    if not any(g.has(op, position) for position in range(20, 24)):
        return []
    kind = OperandType(g.type_of(g.input(op, 0)))
    return [g.input(op, position) if g.has(op, position) else g.omitted(kind) for position in range(20, 24)]


def unidirectional_sequence_lstm(g: SubgraphWriter, op: TfliteOperator) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM."""
    table = "UnidirectionalSequenceLSTMOptions"
    if op.integer(table, "diagonal_recurrent_tensors"):
        raise Inexpressible("diagonal recurrent weights")
    inputs = _inputs(g, op, 20, states=(18, 19))
    inputs += [_activation(g, op, table), *_clips(g, op, table, inputs[0])]
    inputs += [_flag(g, op, table, "time_major"), *(_norms(g, op) or _no_norms(g, inputs[0], 4))]
    g.emit_to(op, OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM, inputs)


def _no_norms(g: SubgraphWriter, data: int, count: int) -> list[int]:
    return [g.omitted(OperandType(g.type_of(data))) for _ in range(count)]


def bidirectional_sequence_lstm(g: SubgraphWriter, op: TfliteOperator) -> None:
    """BIDIRECTIONAL_SEQUENCE_LSTM without norms, which the file's operator has not."""
    table = "BidirectionalSequenceLSTMOptions"
    inputs = _inputs(g, op, 48, states=(35, 36, 37, 38))
    inputs += [_activation(g, op, table), *_clips(g, op, table, inputs[0])]
    inputs += [_flag(g, op, table, "merge_outputs"), _flag(g, op, table, "time_major")]
    inputs += _no_norms(g, inputs[0], 8)
    outputs = [g.output(op, position) for position in range(len(op.outputs))]
    g.emit(OperationType.BIDIRECTIONAL_SEQUENCE_LSTM, inputs, outputs)


def lstm(g: SubgraphWriter, op: TfliteOperator) -> None:
    """LSTM in its full form; the states and the scratch area that the HAL's operation also gives are not used."""
    table = "LSTMOptions"
    if op.integer(table, "kernel_type"):
        raise Inexpressible("the basic kernel, whose inputs are joined")
    inputs = _inputs(g, op, 20, states=(18, 19))
    inputs += [_activation(g, op, table), *_clips(g, op, table, inputs[0]), *_norms(g, op)]
    data = g.operands[inputs[0]]
    output = g.output(op)
    shape = g.dimensions(output)
    if len(data.dimensions) != 2 or len(shape) != 2:
        g.refuse(op, "input 0", "a matrix", f"shape {list(data.dimensions)}")
    batch, units = data.dimensions[0], g.dimensions(inputs[2])[0]
    gates = 4 if g.has(op, 1) else 3
    rest = [g.temporary(data.type, (batch, width)) for width in (gates * units, shape[1], units)]
    g.emit(OperationType.LSTM, inputs, [*rest, output])


def rnn(g: SubgraphWriter, op: TfliteOperator) -> None:
    """RNN; the state that the HAL's operation also gives is not used."""
    inputs = [*_inputs(g, op, 5, states=(4,)), _activation(g, op, "RNNOptions")]
    output = g.output(op)
    g.emit(OperationType.RNN, inputs, [g.like(output), output])


def unidirectional_sequence_rnn(g: SubgraphWriter, op: TfliteOperator) -> None:
    """UNIDIRECTIONAL_SEQUENCE_RNN."""
    table = "SequenceRNNOptions"
    inputs = [*_inputs(g, op, 5, states=(4,)), _activation(g, op, table)]
    g.emit_to(
        op,
        OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
        [*inputs, g.int32(int(bool(op.integer(table, "time_major"))))],
    )


def bidirectional_sequence_rnn(g: SubgraphWriter, op: TfliteOperator) -> None:
    """BIDIRECTIONAL_SEQUENCE_RNN."""
    table = "BidirectionalSequenceRNNOptions"
    inputs = [*_inputs(g, op, 12, states=(4, 8)), _activation(g, op, table)]
    inputs += [_flag(g, op, table, "time_major"), _flag(g, op, table, "merge_outputs")]
    outputs = [g.output(op, position) for position in range(len(op.outputs))]
    g.emit(OperationType.BIDIRECTIONAL_SEQUENCE_RNN, inputs, outputs)


def svdf(g: SubgraphWriter, op: TfliteOperator) -> None:
    """SVDF; the state that the HAL's operation also gives is not used."""
    table = "SVDFOptions"
    inputs = [*_inputs(g, op, 5, states=(4,)), g.int32(op.integer(table, "rank")), _activation(g, op, table)]
    output = g.output(op)
    g.emit(OperationType.SVDF, inputs, [g.like(inputs[4]), output])

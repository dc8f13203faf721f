"""Basic recurrent layers: RNN, UNIDIRECTIONAL_SEQUENCE_RNN and BIDIRECTIONAL_SEQUENCE_RNN.

Owns their contracts and the one step that all of them repeat. Shapes with names, activations and the order of time are in
``aionn.ops.recurrent.recurrence``.

Invariants:
1. Everything is computed in float32; float16 results are rounded once, and the state stays float32 from step to step.
2. The products with the input are taken for all steps together; only the product with the state waits for the step before.

Source: the operations' entries in the NN HAL's specification and its CPU operations.
"""

from __future__ import annotations

import numpy as np

from aionn.hal import OperandLifeTime, OperandType, OperationType
from aionn.ops.recurrent.recurrence import (
    SIGMOID,
    TANH,
    Axes,
    Floats,
    activate,
    check_activation,
    check_extents,
    extents,
    layout_axes,
    optional_floats,
    require_present,
    sequence_floats,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]

_ACTIVATIONS = (0, 1, 2, 3, TANH, SIGMOID)
_FLOATS = {OperandType.TENSOR_FLOAT32: 1, OperandType.TENSOR_FLOAT16: 3}


def _floats(call: Call, index: int) -> Floats:
    return call.array(index).astype(np.float32, copy=False)


def _activation(call: Call, index: int) -> int:
    code = int(call.scalar(index))
    if code not in _ACTIVATIONS:
        call.refuse(f"input {index}: expected an activation of {list(_ACTIVATIONS)}, got {code}")
    return code


def _unroll(
    drive: Floats, recurrent_weights: Floats, state: Floats, activation: int, *, is_backward: bool = False
) -> tuple[Floats, Floats]:
    """state = activation(drive[t] + state * recurrent_weights') for each time.

    Args:
        drive: Inputs times weights plus bias, [time, batch, units].
        recurrent_weights: [units, units].
        state: Before the first step, [batch, units].
        activation: Its code.
        is_backward: Whether time runs from the last entry to the first.

    Returns:
        The states after each step, at the place of the step's input, and the last of them.
    """
    outputs = np.empty(drive.shape, dtype=np.float32)
    # A copy, so that a sequence without steps does not answer with its input.
    state = state.copy()
    transposed = np.ascontiguousarray(recurrent_weights.T)
    steps = range(len(drive))
    for step in reversed(steps) if is_backward else steps:
        state = activate(drive[step] + state @ transposed, activation)
        outputs[step] = state
    return outputs, state


# RNN

_RNN_AXES: dict[int, Axes] = {
    0: ("batch", "input"),
    1: ("units", "input"),
    2: ("units", "units"),
    3: ("units",),
    4: ("batch", "units"),
}


def _validate_rnn(check: Check) -> None:
    check.counts(6, 2)
    float_type = check.input_type(0, _FLOATS)
    check.input_types(*[float_type] * 5, OperandType.INT32)
    check.output_types(float_type, float_type)
    require_present(check, *range(6))
    check_extents(check, _RNN_AXES, {0: ("batch", "units"), 1: ("batch", "units")})
    check_activation(check, 5, _ACTIVATIONS)


def _shapes_rnn(call: Call) -> list[Shape]:
    found = extents(call, _RNN_AXES)
    return [(found["batch"], found["units"])] * 2


def _execute_rnn(call: Call) -> list[Array]:
    inputs, weights, recurrent, bias, state = (_floats(call, index) for index in range(5))
    drive = inputs @ weights.T + bias
    _, state = _unroll(drive[None], recurrent, state, _activation(call, 5))
    return [
        float_result(value, operand)
        for value, operand in zip((state, state.copy()), call.outputs, strict=True)
    ]


# UNIDIRECTIONAL_SEQUENCE_RNN


def _sequence_axes(is_time_major: bool | None) -> dict[int, Axes]:
    return {**_RNN_AXES, 0: layout_axes(is_time_major, "input")}


def _validate_unidirectional(check: Check) -> None:
    check.needs(3)
    check.counts(7, (1, 2))
    float_type = check.input_type(0, _FLOATS)
    check.input_types(*[float_type] * 5, OperandType.INT32, OperandType.INT32)
    check.output_types(*[float_type] * len(check.outputs))
    if len(check.outputs) == 2:
        check.needs(4)
    require_present(check, *range(7))
    check_activation(check, 5, _ACTIVATIONS)
    layout = check.constant(6)
    if layout is not None:
        check.require(layout.item() in (0, 1), "input 6", "0 (batch first) or 1 (time first)", layout.item())
    is_time_major = None if layout is None else bool(layout.item())
    check_extents(
        check,
        _sequence_axes(is_time_major),
        {0: layout_axes(is_time_major, "units"), 1: ("batch", "units")},
    )


def _is_time_major(call: Call) -> bool:
    layout = int(call.scalar(6))
    if layout not in (0, 1):
        call.refuse(f"input 6: expected 0 (batch first) or 1 (time first), got {layout}")
    return bool(layout)


def _shapes_unidirectional(call: Call) -> list[Shape]:
    is_time_major = _is_time_major(call)
    found = extents(call, _sequence_axes(is_time_major))
    output = tuple(found[name] for name in layout_axes(is_time_major, "units"))
    return [output, (found["batch"], found["units"])][: len(call.outputs)]


def _execute_unidirectional(call: Call) -> list[Array]:
    is_time_major = _is_time_major(call)
    weights, recurrent, bias, state = (_floats(call, index) for index in range(1, 5))
    drive = sequence_floats(call.array(0), is_time_major=is_time_major) @ weights.T + bias
    outputs, state = _unroll(drive, recurrent, state, _activation(call, 5))
    results = [sequence_floats(outputs, is_time_major=is_time_major), state]
    return [float_result(value, operand) for value, operand in zip(results, call.outputs, strict=False)]


# BIDIRECTIONAL_SEQUENCE_RNN

_AUXILIARY, _FORWARD_AUXILIARY_WEIGHTS, _BACKWARD_AUXILIARY_WEIGHTS = 9, 10, 11
_LINKED = (_AUXILIARY, _FORWARD_AUXILIARY_WEIGHTS, _BACKWARD_AUXILIARY_WEIGHTS)
_LINKINGS = "auxiliary input with both weights, the input alone, or none of them"


def _bidirectional_axes(is_time_major: bool | None, *, is_parallel: bool | None) -> dict[int, Axes]:
    """Names of the axes. Linked in parallel, the backward weights take the auxiliary input; None where that is not known yet."""
    backward_input = {None: "backward input", True: "auxiliary", False: "input"}[is_parallel]
    return {
        0: layout_axes(is_time_major, "input"),
        1: ("forward units", "input"),
        2: ("forward units", "forward units"),
        3: ("forward units",),
        4: ("batch", "forward units"),
        5: ("backward units", backward_input),
        6: ("backward units", "backward units"),
        7: ("backward units",),
        8: ("batch", "backward units"),
        9: layout_axes(is_time_major, "auxiliary"),
        10: ("forward units", "auxiliary"),
        11: ("backward units", "auxiliary"),
    }


def _bidirectional_outputs(is_time_major: bool | None, *, is_merged: bool, count: int) -> list[Axes]:
    sequences = (
        [layout_axes(is_time_major, "forward and backward units")]
        if is_merged
        else [layout_axes(is_time_major, "forward units"), layout_axes(is_time_major, "backward units")]
    )
    return [*sequences, ("batch", "forward units"), ("batch", "backward units")][:count]


def _validate_bidirectional(check: Check) -> None:
    check.needs(3)
    check.counts(15, (1, 2, 3, 4))
    float_type = check.input_type(0, _FLOATS)
    check.input_types(*[float_type] * 12, OperandType.INT32, OperandType.BOOL, OperandType.BOOL)
    check.output_types(*[float_type] * len(check.outputs))
    if len(check.outputs) > 2:
        check.needs(4)
    require_present(check, *range(9), 12, 13, 14)
    check_activation(check, 12, _ACTIVATIONS)
    lifetimes = [check.inputs[index].lifetime for index in _LINKED]
    is_parallel: bool | None = None
    # A subgraph's input may still be left out by the request.
    if OperandLifeTime.SUBGRAPH_INPUT not in lifetimes:
        present = tuple(lifetime != OperandLifeTime.NO_VALUE for lifetime in lifetimes)
        is_parallel = present == (True, False, False)
        check.require(
            present in ((False,) * 3, (True,) * 3) or is_parallel, "inputs 9 to 11", _LINKINGS, list(present)
        )
    is_time_major = _known_bool(check, 13)
    is_merged = _known_bool(check, 14)
    outputs: dict[int, Axes] = {}
    if is_merged is not None:
        legal = (1, 3) if is_merged else (2, 4)
        check.counts(15, legal)
        table = _bidirectional_outputs(is_time_major, is_merged=is_merged, count=len(check.outputs))
        outputs = dict(enumerate(table))
    check_extents(
        check,
        _bidirectional_axes(is_time_major, is_parallel=is_parallel),
        outputs,
        optional=_LINKED,
    )


def _known_bool(check: Check, index: int) -> bool | None:
    value = check.constant(index)
    return None if value is None else bool(value.item())


def _is_parallel(call: Call) -> bool:
    present = tuple(call.has(index) for index in _LINKED)
    if present not in ((False,) * 3, (True,) * 3, (True, False, False)):
        call.refuse(f"inputs 9 to 11: expected {_LINKINGS}, got {list(present)}")
    return present == (True, False, False)


def _shapes_bidirectional(call: Call) -> list[Shape]:
    is_time_major, is_merged = bool(call.scalar(13)), bool(call.scalar(14))
    count = len(call.outputs)
    if count not in ((1, 3) if is_merged else (2, 4)):
        call.refuse(f"input 14: expected merged outputs exactly with 1 or 3 outputs, got {count} outputs")
    axes = _bidirectional_axes(is_time_major, is_parallel=_is_parallel(call))
    found = extents(call, axes, optional=_LINKED)
    found["forward and backward units"] = found["forward units"] + found["backward units"]
    table = _bidirectional_outputs(is_time_major, is_merged=is_merged, count=count)
    return [tuple(found[name] for name in names) for names in table]


def _execute_bidirectional(call: Call) -> list[Array]:
    is_time_major, is_merged, activation = bool(call.scalar(13)), bool(call.scalar(14)), _activation(call, 12)
    inputs = sequence_floats(call.array(0), is_time_major=is_time_major)
    auxiliary = (
        sequence_floats(call.array(_AUXILIARY), is_time_major=is_time_major) if call.has(_AUXILIARY) else None
    )
    sequences, states = [], []
    for first, is_backward in ((1, False), (5, True)):
        weights, recurrent, bias, state = (_floats(call, first + i) for i in range(4))
        own = auxiliary if is_backward and auxiliary is not None and _is_parallel(call) else inputs
        drive = own @ weights.T + bias
        extra = optional_floats(
            call, _BACKWARD_AUXILIARY_WEIGHTS if is_backward else _FORWARD_AUXILIARY_WEIGHTS
        )
        if extra is not None and auxiliary is not None:
            drive = drive + auxiliary @ extra.T
        outputs, state = _unroll(drive, recurrent, state, activation, is_backward=is_backward)
        sequences.append(sequence_floats(outputs, is_time_major=is_time_major))
        states.append(state)
    if is_merged:
        sequences = [np.concatenate(sequences, axis=2)]
    return [
        float_result(value, operand)
        for value, operand in zip([*sequences, *states], call.outputs, strict=False)
    ]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.RNN,
        validate=_validate_rnn,
        shapes=_shapes_rnn,
        execute=_execute_rnn,
        doc="""One step of a basic recurrent layer.

output = state' = activation(input * weights^T + state * recurrent_weights^T + bias).

Inputs:
    0: input [batch, input].
    1: weights [units, input].
    2: recurrent weights [units, units].
    3: bias [units].
    4: state [batch, units].
    5: activation, INT32: 0 none, 1 RELU, 2 RELU1, 3 RELU6, 4 tanh, 6 sigmoid.

Outputs:
    0: state after the step [batch, units].
    1: output [batch, units], the same values.

Quantisation: none.

Types by feature level: 1 float32; 3 float16. All tensors have the same type.

Looser than the spec: tanh and sigmoid are accepted, as by the spec's kernel; so is RELU1, which the spec names and its kernel does
not know.

Source: NN HAL 1.0, ``OperationType::RNN``.
""",
    ),
    OperationContract(
        type=OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
        validate=_validate_unidirectional,
        shapes=_shapes_unidirectional,
        execute=_execute_unidirectional,
        doc="""A basic recurrent layer over a sequence.

output[t] = state = activation(input[t] * weights^T + state * recurrent_weights^T + bias) for t from first to last.

Inputs:
    0: input, [time, batch, input] if time-major, else [batch, time, input].
    1: weights [units, input].
    2: recurrent weights [units, units].
    3: bias [units].
    4: state before the first step [batch, units].
    5: activation, INT32, as for RNN.
    6: time-major, INT32: 0 or 1.

Outputs:
    0: output, in the input's layout, last extent units.
    1: state after the last step [batch, units]; may be missing.

Quantisation: none.

Types by feature level: 3 float16, float32; 4 with output 1. All tensors have the same type.

Looser than the spec: activations as for RNN. A sequence without steps returns the state unchanged.

Source: NN HAL 1.2 and 1.3, ``OperationType::UNIDIRECTIONAL_SEQUENCE_RNN``.
""",
    ),
    OperationContract(
        type=OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
        validate=_validate_bidirectional,
        shapes=_shapes_bidirectional,
        execute=_execute_bidirectional,
        doc="""Two basic recurrent layers over a sequence, one from first to last and one from last to first.

output[t] = state = activation(input[t] * weights^T + auxiliary[t] * auxiliary_weights^T + state * recurrent_weights^T + bias).
Without an auxiliary input (no linking) its term falls away. With it but without its weights (parallel linking) the forward layer
takes the input and the backward layer the auxiliary input in its place. With both (cross-linking) both layers take both.

Inputs:
    0: input, [time, batch, input] if time-major, else [batch, time, input].
    1 to 4: forward weights [units, input], recurrent weights [units, units], bias [units], state [batch, units].
    5 to 8: the same of the backward layer; its weights take the auxiliary extent when linked in parallel.
    9: auxiliary input in the input's layout, last extent auxiliary; may be left out.
    10, 11: forward and backward auxiliary weights [units, auxiliary]; may be left out together.
    12: activation, INT32, as for RNN.
    13: time-major, BOOL.
    14: merge outputs, BOOL.

Outputs:
    0: forward output in the input's layout, last extent forward units; if merged, followed by the backward output's.
    1: backward output; missing if merged.
    Then, both or neither: forward and backward state after the last step [batch, units].

Quantisation: none.

Types by feature level: 3 float16, float32; 4 with state outputs. All tensors have the same type.

Looser than the spec: activations as for RNN; parallel linking is accepted from level 3 on, as by the spec's validator. The
auxiliary extent may differ from the input's in cross-linking, as in the text; the spec's kernel reads only the input's number of
values.

Source: NN HAL 1.2 and 1.3, ``OperationType::BIDIRECTIONAL_SEQUENCE_RNN``.
""",
    ),
)

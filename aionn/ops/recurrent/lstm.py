"""Long short-term memory in floating point: LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM and BIDIRECTIONAL_SEQUENCE_LSTM.

Owns their contracts: the places of their operands, the order of time and the outputs. The cell that all of them repeat,
with its options, is in ``aionn.ops.recurrent.lstm_cell``.

Invariants:
1. Everything is computed in float32; float16 results are rounded once, and states stay float32 from step to step.
2. A sequence takes the steps of LSTM one after the other: nothing is defined twice.

Source: the operations' entries in the NN HAL's specification and its CPU operations.
"""

from __future__ import annotations

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.ops.recurrent.lstm_cell import (
    Cell,
    CellPlaces,
    Presence,
    Refuse,
    cell_parameters,
    check_parameters,
    check_run_options,
    known_presence,
    run_refusal,
    validate_options,
    validate_projection,
)
from aionn.ops.recurrent.recurrence import (
    Axes,
    Floats,
    check_extents,
    extents,
    layout_axes,
    require_present,
    sequence_floats,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result, scalar_type_for

__all__ = ["OPERATIONS"]

_FLOATS = {OperandType.TENSOR_FLOAT32: 1, OperandType.TENSOR_FLOAT16: 3}


def _known_bool(check: Check, index: int) -> bool | None:
    value = check.constant(index)
    return None if value is None else bool(value.item())


def _rounded(call: Call, values: list[Floats]) -> list[Array]:
    return [float_result(value, operand) for value, operand in zip(values, call.outputs, strict=False)]


# LSTM


def _lstm_places(input_count: int) -> CellPlaces:
    return CellPlaces(1, states=(18, 19), norms=(23, 24, 25, 26) if input_count == 27 else ())


def _validate_lstm(check: Check) -> None:
    check.counts((23, 27), 4)
    float_type = check.input_type(0, _FLOATS)
    scalar_type = scalar_type_for(float_type)
    check.input_types(*[float_type] * 20, OperandType.INT32, scalar_type, scalar_type, *[float_type] * 4)
    check.output_types(*[float_type] * 4)
    if len(check.inputs) == 27:
        check.needs(3)
    places = _lstm_places(len(check.inputs))
    require_present(check, 0)
    validate_options(check, places)
    check_parameters(check, 20)
    outputs = {
        0: ("batch", "gates * units"),
        1: ("batch", "output"),
        2: ("batch", "units"),
        3: ("batch", "output"),
    }
    axes = {0: ("batch", "input"), **places.axes()}
    found = check_extents(check, axes, outputs, optional=places.optional)
    validate_projection(check, places, found)
    has_input_gate = known_presence(check)(places.weights[0])
    if has_input_gate is not None and {"units", "gates * units"} <= found.keys():
        size = (4 if has_input_gate else 3) * found["units"]
        check.require(
            found["gates * units"] == size, "output 0", f"{size} values per batch", found["gates * units"]
        )


def _shapes_lstm(call: Call) -> list[Shape]:
    places = _lstm_places(len(call.inputs))
    found = extents(call, {0: ("batch", "input"), **places.axes()}, optional=places.optional)
    check_run_options(call, places, found)
    gates = 4 if call.has(places.weights[0]) else 3
    batch, units, output = found["batch"], found["units"], found["output"]
    return [(batch, gates * units), (batch, output), (batch, units), (batch, output)]


def _execute_lstm(call: Call) -> list[Array]:
    cell = Cell(call, _lstm_places(len(call.inputs)), cell_parameters(call, 20))
    drive = cell.drive(call.array(0).astype(np.float32, copy=False))
    output, cell_state, gates = cell.step(drive, cell.output_state, cell.cell_state)
    return _rounded(call, [gates, output, cell_state, output.copy()])


# UNIDIRECTIONAL_SEQUENCE_LSTM

_SEQUENCE_PLACES = CellPlaces(1, states=(18, 19), norms=(24, 25, 26, 27))


def _validate_unidirectional(check: Check) -> None:
    check.needs(3)
    check.counts(28, (1, 3))
    float_type = check.input_type(0, _FLOATS)
    scalar_type = scalar_type_for(float_type)
    check.input_types(*[float_type] * 20, OperandType.INT32, scalar_type, scalar_type, OperandType.BOOL)
    check.input_types(*[float_type] * 4, start=24)
    check.output_types(*[float_type] * len(check.outputs))
    if len(check.outputs) == 3:
        check.needs(4)
    require_present(check, 0, 23)
    validate_options(check, _SEQUENCE_PLACES)
    check_parameters(check, 20)
    is_time_major = _known_bool(check, 23)
    axes = {0: layout_axes(is_time_major, "input"), **_SEQUENCE_PLACES.axes()}
    outputs = {0: layout_axes(is_time_major, "output"), 1: ("batch", "output"), 2: ("batch", "units")}
    found = check_extents(check, axes, outputs, optional=_SEQUENCE_PLACES.optional)
    validate_projection(check, _SEQUENCE_PLACES, found)


def _shapes_unidirectional(call: Call) -> list[Shape]:
    is_time_major = bool(call.scalar(23))
    axes = {0: layout_axes(is_time_major, "input"), **_SEQUENCE_PLACES.axes()}
    found = extents(call, axes, optional=_SEQUENCE_PLACES.optional)
    check_run_options(call, _SEQUENCE_PLACES, found)
    sequence = tuple(found[name] for name in layout_axes(is_time_major, "output"))
    states = [(found["batch"], found["output"]), (found["batch"], found["units"])]
    return [sequence, *states][: len(call.outputs)]


def _execute_unidirectional(call: Call) -> list[Array]:
    is_time_major = bool(call.scalar(23))
    cell = Cell(call, _SEQUENCE_PLACES, cell_parameters(call, 20))
    drive = cell.drive(sequence_floats(call.array(0), is_time_major=is_time_major))
    outputs, output_state, cell_state = cell.unroll(drive)
    return _rounded(call, [sequence_floats(outputs, is_time_major=is_time_major), output_state, cell_state])


# BIDIRECTIONAL_SEQUENCE_LSTM

_FORWARD = CellPlaces(1, (35, 36), norms=(53, 54, 55, 56), auxiliary=(40, 41, 42, 43), name="forward ")
_BACKWARD = CellPlaces(18, (37, 38), norms=(57, 58, 59, 60), auxiliary=(44, 45, 46, 47), name="backward ")
_AUXILIARY = 39
_BOTH_OPTIONAL = (*_FORWARD.optional, *_BACKWARD.optional, _AUXILIARY)


def _linking(present: Presence, refuse: Refuse) -> bool | None:
    """Whether the cells are linked in parallel: an auxiliary input without weights, which the backward cell takes as its input."""
    states = (present(_AUXILIARY), present(_FORWARD.auxiliary[1]), present(_BACKWARD.auxiliary[1]))
    if None in states:
        return None
    if states not in ((False,) * 3, (True,) * 3, (True, False, False)):
        expected = "an auxiliary input with weights for both cells, the input alone, or none of them"
        got = " and ".join("given" if state else "left out" for state in states)
        refuse(f"inputs {_AUXILIARY}, {_FORWARD.auxiliary[1]} and {_BACKWARD.auxiliary[1]}", expected, got)
    return states == (True, False, False)


def _bidirectional_axes(is_time_major: bool | None, is_parallel: bool | None) -> dict[int, Axes]:
    source = {None: "backward input", True: "auxiliary", False: "input"}[is_parallel]
    return {
        0: layout_axes(is_time_major, "input"),
        _AUXILIARY: layout_axes(is_time_major, "auxiliary"),
        **_FORWARD.axes(),
        **_BACKWARD.axes(source),
    }


def _bidirectional_outputs(is_time_major: bool | None, *, is_merged: bool, count: int) -> list[Axes]:
    sizes = ["both outputs"] if is_merged else ["forward output", "backward output"]
    sequences = [layout_axes(is_time_major, size) for size in sizes]
    states = [
        ("batch", f"{places.name}{size}") for places in (_FORWARD, _BACKWARD) for size in ("output", "units")
    ]
    return [*sequences, *states][:count]


def _validate_bidirectional(check: Check) -> None:
    check.needs(3)
    check.counts(61, (1, 2, 5, 6))
    float_type = check.input_type(0, _FLOATS)
    scalar_type = scalar_type_for(float_type)
    check.input_types(*[float_type] * 48, OperandType.INT32, scalar_type, scalar_type)
    check.input_types(OperandType.BOOL, OperandType.BOOL, *[float_type] * 8, start=51)
    check.output_types(*[float_type] * len(check.outputs))
    if len(check.outputs) > 2:
        check.needs(4)
    require_present(check, 0, 51, 52)
    validate_options(check, _FORWARD)
    validate_options(check, _BACKWARD)
    check_parameters(check, 48)
    is_parallel = _linking(known_presence(check), check.refuse)
    is_merged, is_time_major = _known_bool(check, 51), _known_bool(check, 52)
    outputs: dict[int, Axes] = {}
    if is_merged is not None:
        check.counts(61, (1, 5) if is_merged else (2, 6))
        table = _bidirectional_outputs(is_time_major, is_merged=is_merged, count=len(check.outputs))
        outputs = dict(enumerate(table))
    axes = _bidirectional_axes(is_time_major, is_parallel)
    found = check_extents(check, axes, outputs, optional=_BOTH_OPTIONAL)
    validate_projection(check, _FORWARD, found)
    validate_projection(check, _BACKWARD, found)


def _is_parallel(call: Call) -> bool:
    return bool(_linking(call.has, run_refusal(call)))


def _shapes_bidirectional(call: Call) -> list[Shape]:
    is_merged, is_time_major, count = bool(call.scalar(51)), bool(call.scalar(52)), len(call.outputs)
    if count not in ((1, 5) if is_merged else (2, 6)):
        call.refuse(f"input 51: expected merged outputs exactly with 1 or 5 outputs, got {count} outputs")
    found = extents(call, _bidirectional_axes(is_time_major, _is_parallel(call)), optional=_BOTH_OPTIONAL)
    for places in (_FORWARD, _BACKWARD):
        check_run_options(call, places, found)
    found["both outputs"] = found["forward output"] + found["backward output"]
    table = _bidirectional_outputs(is_time_major, is_merged=is_merged, count=count)
    return [tuple(found[name] for name in names) for names in table]


def _execute_bidirectional(call: Call) -> list[Array]:
    is_merged, is_time_major = bool(call.scalar(51)), bool(call.scalar(52))
    parameters = cell_parameters(call, 48)
    inputs = sequence_floats(call.array(0), is_time_major=is_time_major)
    auxiliary = (
        sequence_floats(call.array(_AUXILIARY), is_time_major=is_time_major) if call.has(_AUXILIARY) else None
    )
    sequences, states = [], []
    for places, is_backward in ((_FORWARD, False), (_BACKWARD, True)):
        cell = Cell(call, places, parameters)
        is_replaced = is_backward and auxiliary is not None and _is_parallel(call)
        drive = cell.drive(auxiliary if is_replaced and auxiliary is not None else inputs, auxiliary)
        outputs, output_state, cell_state = cell.unroll(drive, is_backward=is_backward)
        sequences.append(sequence_floats(outputs, is_time_major=is_time_major))
        states += [output_state, cell_state]
    if is_merged:
        sequences = [np.concatenate(sequences, axis=2)]
    return _rounded(call, [*sequences, *states])


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.LSTM,
        validate=_validate_lstm,
        shapes=_shapes_lstm,
        execute=_execute_lstm,
        doc="""One step of a long short-term memory.

With x the input, h the output state, c the cell state, g the activation, * by element and N the layer normalisation
N(z) = (z - mean) / sqrt(variance + 1e-8) * norm weights over the units, or N(z) = z without it:
i = sigmoid(N(Wi x + Ri h + pi * c) + bi); f = sigmoid(N(Wf x + Rf h + pf * c) + bf); without input gate (CIFG) i = 1 - f;
c' = clip(f * c + i * g(N(Wc x + Rc h) + bc)); o = sigmoid(N(Wo x + Ro h + po * c') + bo);
h' = o * g(c'), with projection h' = clip(P (o * g(c')) + bp).

Inputs:
    0: x [batch, input].
    1 to 4: Wi, Wf, Wc, Wo [units, input].
    5 to 8: Ri, Rf, Rc, Ro [units, output].
    9 to 11: pi, pf, po [units]; peepholes, left out together.
    12 to 15: bi, bf, bc, bo [units].
    16, 17: P [output, units] and bp [output]; bp only with P. Without P output equals units.
    18: h [batch, output]. 19: c [batch, units].
    20: activation g, INT32: 0 none, 1 RELU, 3 RELU6, 4 tanh, 6 sigmoid.
    21, 22: clips of cell state and projection, FLOAT32 or FLOAT16 as the tensors, at least 0; 0 does not clip.
    23 to 26: norm weights of i, f, c, o [units]; left out together, or not stated at all.
    For CIFG inputs 1, 5 and 12, and the norm weight of i, are left out.

Outputs:
    0: scratch [batch, gates * units], 3 gates for CIFG, else 4: the gates' values; without meaning to the caller.
    1: h' [batch, output]. 2: c' [batch, units]. 3: h' again.

Quantisation: none.

Types by feature level: 1 float32 with 23 inputs; 3 float16, 27 inputs. All tensors have the same type.

Looser than the spec: with CIFG the peephole pi may be given and is not used, as by the spec's kernel.

Source: NN HAL 1.0 and 1.2, ``OperationType::LSTM``.
""",
    ),
    OperationContract(
        type=OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
        validate=_validate_unidirectional,
        shapes=_shapes_unidirectional,
        execute=_execute_unidirectional,
        doc="""A long short-term memory over a sequence: the step of LSTM for each time from first to last.

Inputs:
    0: x, [time, batch, input] if time-major, else [batch, time, input].
    1 to 22: as for LSTM.
    23: time-major, BOOL.
    24 to 27: norm weights of i, f, c, o [units]; may be left out together.

Outputs:
    0: h' of every step in the input's layout, last extent output.
    1, 2: h' [batch, output] and c' [batch, units] after the last step; missing together.

Quantisation: none.

Types by feature level: 3 float16, float32; 4 with outputs 1 and 2. All tensors have the same type.

Looser than the spec: as for LSTM. A sequence without steps returns the states unchanged.

Source: NN HAL 1.2 and 1.3, ``OperationType::UNIDIRECTIONAL_SEQUENCE_LSTM``.
""",
    ),
    OperationContract(
        type=OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
        validate=_validate_bidirectional,
        shapes=_shapes_bidirectional,
        execute=_execute_bidirectional,
        doc="""Two long short-term memories over a sequence, one from first to last and one from last to first.

The step of LSTM, with A a added to W x in every gate, a being the auxiliary input: both cells take both inputs (cross-linking).
Without weights A the backward cell takes a in place of x (parallel linking); without a each cell takes x alone.

Inputs:
    0: x, [time, batch, input] if time-major, else [batch, time, input].
    1 to 17: the forward cell's weights, biases and projection, as inputs 1 to 17 of LSTM.
    18 to 34: the same of the backward cell; linked in parallel its W have the auxiliary extent.
    35 to 38: forward h and c, backward h and c.
    39: a in the input's layout, last extent auxiliary; may be left out.
    40 to 43, 44 to 47: forward and backward A of i, f, c, o [units, auxiliary]; may be left out together; that of i is left out
        for CIFG.
    48 to 50: activation and clips, as inputs 20 to 22 of LSTM.
    51: merge outputs, BOOL. 52: time-major, BOOL.
    53 to 56, 57 to 60: forward and backward norm weights of i, f, c, o [units]; may be left out, each cell's together.

Outputs:
    0: forward h' of every step in the input's layout; if merged, followed by the backward cell's along the last axis.
    1: backward h' of every step; missing if merged.
    Then, all or none: h' and c' of the forward cell after its last step, then of the backward cell.

Quantisation: none.

Types by feature level: 3 float16, float32; 4 with state outputs. All tensors have the same type.

Looser than the spec: as for LSTM; parallel linking is accepted from level 3 on, as by the spec's validator; either cell may be
CIFG by itself; the auxiliary extent may differ from the input's in cross-linking, as in the text, which the spec's kernel does not
allow.

Source: NN HAL 1.2 and 1.3, ``OperationType::BIDIRECTIONAL_SEQUENCE_LSTM``.
""",
    ),
)

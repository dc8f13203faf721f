"""SVDF: a dense layer over a sliding window of frames, factored into a filter over features and one over time.

Owns its contract and kernel.

Invariant: the state that goes out is the window after the frame was taken in, moved by one place, with zeros where the next frame
will go; so the output of one step is the input of the next.

Source: SVDF of the NN HAL 1.0 and its CPU operation; Nakkiran et al., "Compressing deep neural networks using a rank-constrained
topology" (2015).
"""

from __future__ import annotations

import numpy as np

from aionn.hal import OperandType, OperationType
from aionn.ops.recurrent.recurrence import (
    SIGMOID,
    TANH,
    Axes,
    activate,
    check_activation,
    check_extents,
    extents,
    optional_floats,
    require_present,
)
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, float_result

__all__ = ["OPERATIONS"]

_ACTIVATIONS = (0, 1, 2, 3, TANH, SIGMOID)
_BIAS = 3
_AXES: dict[int, Axes] = {
    0: ("batch", "input"),
    1: ("filters", "input"),
    2: ("filters", "memory"),
    _BIAS: ("units",),
    4: ("batch", "memory * filters"),
}


def _validate(check: Check) -> None:
    check.counts(7, 2)
    float_type = check.input_type(0, {OperandType.TENSOR_FLOAT32: 1, OperandType.TENSOR_FLOAT16: 3})
    check.input_types(*[float_type] * 5, OperandType.INT32, OperandType.INT32)
    check.output_types(float_type, float_type)
    require_present(check, 0, 1, 2, 4, 5, 6)
    outputs = {0: ("batch", "memory * filters"), 1: ("batch", "units")}
    found = check_extents(check, _AXES, outputs, optional=(_BIAS,))
    if {"filters", "memory", "memory * filters"} <= found.keys():
        size = found["filters"] * found["memory"]
        check.require(
            found["memory * filters"] == size, "input 4", f"{size} values", found["memory * filters"]
        )
    check_activation(check, 6, _ACTIVATIONS)
    rank = check.constant(5)
    if rank is not None:
        check.require(rank.item() >= 1, "input 5", "a rank of at least 1", rank.item())
        filters = found.get("filters", rank.item())
        check.require(
            filters % rank.item() == 0, "input 5", f"a rank that divides {filters} filters", rank.item()
        )
        if {"filters", "units"} <= found.keys():
            units = filters // rank.item()
            check.require(found["units"] == units, "input 5", f"{units} units", found["units"])


def _shapes(call: Call) -> list[Shape]:
    found, rank = extents(call, _AXES, optional=(_BIAS,)), int(call.scalar(5))
    filters, memory = found["filters"], found["memory"]
    if rank < 1 or filters % rank:
        call.refuse(f"input 5: expected a rank that divides {filters} filters, got {rank}")
    if found.get("units", filters // rank) != filters // rank:
        call.refuse(f"input 3: expected shape [{filters // rank}], got [{found['units']}]")
    if found["memory * filters"] != memory * filters:
        call.refuse(f"input 4: expected {memory * filters} values per batch, got {found['memory * filters']}")
    if memory < 1:
        call.refuse("input 2: expected a memory of at least one frame, got none")
    return [(found["batch"], memory * filters), (found["batch"], filters // rank)]


def _execute(call: Call) -> list[Array]:
    inputs, feature_weights, time_weights, state = (
        call.array(index).astype(np.float32, copy=False) for index in (0, 1, 2, 4)
    )
    bias, rank, activation = optional_floats(call, _BIAS), int(call.scalar(5)), int(call.scalar(6))
    if activation not in _ACTIVATIONS:
        call.refuse(f"input 6: expected an activation of {list(_ACTIVATIONS)}, got {activation}")
    (filters, memory), batch = time_weights.shape, len(inputs)
    window = state.reshape(batch, filters, memory).copy()
    window[:, :, -1] = inputs @ feature_weights.T
    filtered = np.einsum("bfm,fm->bf", window, time_weights)
    output = filtered.reshape(batch, filters // rank, rank).sum(axis=2)
    if bias is not None:
        output = output + bias
    window[:, :, :-1] = window[:, :, 1:]
    window[:, :, -1] = 0
    return [
        float_result(window.reshape(batch, filters * memory), call.outputs[0]),
        float_result(activate(output, activation), call.outputs[1]),
    ]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.SVDF,
        validate=_validate,
        shapes=_shapes,
        execute=_execute,
        doc="""One frame of a layer that filters features and then time.

window[f] = state[f] with its last entry replaced by input * feature_weights[f]^T;
output[u] = activation(sum over the rank's filters f of unit u of window[f] * time_weights[f] + bias[u]);
state'[f] = window[f] without its first entry, then 0. Unit u owns filters u * rank to u * rank + rank - 1.

Inputs:
    0: input [batch, input].
    1: feature weights [filters, input], filters = rank * units.
    2: time weights [filters, memory].
    3: bias [units]; may be left out.
    4: state [batch, memory * filters], each filter's entries together, the oldest first.
    5: rank, INT32, at least 1.
    6: activation, INT32: 0 none, 1 RELU, 2 RELU1, 3 RELU6, 4 tanh, 6 sigmoid.

Outputs:
    0: state [batch, memory * filters].
    1: output [batch, units].

Quantisation: none.

Types by feature level: 1 float32; 3 float16. All tensors have the same type.

Other than the spec's text: the text gives the state (memory - 1) entries per filter; its kernel and data have memory entries, and
so has this. Looser: tanh and sigmoid, as by the spec's kernel.

Source: NN HAL 1.0, ``OperationType::SVDF``.
""",
    ),
)

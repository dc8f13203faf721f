"""Long short-term memory in integers: QUANTIZED_16BIT_LSTM and QUANTIZED_LSTM.

Owns their contracts and kernels. Gates are 16-bit fixed-point numbers; the functions on those are in
``aionn.ops.numerics.fixed_point_int16``, and which operands belong together is the same as for the floating-point LSTM
(``aionn.ops.recurrent.lstm_cell``).

Invariants:
1. Results equal those of the spec's kernels to the last bit, except for the differences in the operation's documentation.
2. Sums of products are exact: products of 8-bit numbers, added in float64, stay far below 2**53.

Source: the operations' entries in the NN HAL's specification and its CPU operations (``QuantizedLSTM``, ``QLSTM``, ``QuantUtils``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.numerics.fixed_point import (
    Int64Array,
    multiply_by_quantized_multiplier,
    quantize_multiplier,
    rounding_divide_by_pot,
)
from aionn.ops.numerics.fixed_point_int16 import (
    INT16_MAX,
    INTEGER_BITS_MAX,
    inverse_sqrt,
    logistic_int16,
    multiply_int16,
    saturate_int16,
    shift_left_int16,
    tanh_int16,
)
from aionn.ops.recurrent.lstm_cell import CellPlaces, check_run_options, validate_options, validate_projection
from aionn.ops.recurrent.recurrence import Axes, check_extents, extents, require_present
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, Tensor

__all__ = ["OPERATIONS"]

_Q8 = OperandType.TENSOR_QUANT8_ASYMM
_Q8S = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
_Q8_SYMM = OperandType.TENSOR_QUANT8_SYMM
_Q16_SYMM = OperandType.TENSOR_QUANT16_SYMM
_INT32 = OperandType.TENSOR_INT32

_GATE_INTEGER_BITS = 3
"""Gates before their activation are fixed-point numbers in [-8, 8)."""


def _power_of_two(scale: float) -> int | None:
    """The exponent of a scale that is a power of two, None for another; off by less than 1e-3 counts, as in the spec's kernels."""
    exponent = math.log2(scale) if scale > 0 else math.inf
    if not math.isfinite(exponent) or abs(exponent - round(exponent)) >= 1e-3:
        return None
    return round(exponent)


def _product(a: npt.NDArray[Any], b: npt.NDArray[np.float64]) -> Int64Array:
    """The matrix product of integers, exact."""
    result: Int64Array = (a.astype(np.float64) @ b).astype(np.int64)
    return result


# QUANTIZED_16BIT_LSTM

_STATE_INTEGER_BITS = 4
_FULL_WEIGHTS = range(1, 9)
_FULL_BIASES = range(9, 13)
_FULL_AXES: dict[int, Axes] = {
    0: ("batch", "input"),
    **dict.fromkeys(range(1, 5), ("output", "input")),
    **dict.fromkeys(range(5, 9), ("output", "output")),
    **dict.fromkeys(_FULL_BIASES, ("output",)),
    13: ("batch", "output"),
    14: ("batch", "output"),
}


def _validate_16bit(check: Check) -> None:
    check.needs(3)
    check.counts(15, 2)
    check.input_types(*[_Q8] * 9, *[_INT32] * 4, _Q16_SYMM, _Q8)
    check.output_types(_Q16_SYMM, _Q8)
    require_present(check, *range(15))
    check_extents(check, _FULL_AXES, {0: ("batch", "output"), 1: ("batch", "output")})
    unit = Operand(_Q8, scale=1 / 128, zero_point=128)
    for index in (0, 14):
        check.same_quantization(f"input {index}", unit, check.inputs[index])
    check.same_quantization("output 1", unit, check.outputs[1])
    weights = check.inputs[1]
    for index in _FULL_WEIGHTS:
        check.same_quantization(f"input {index}", weights, check.inputs[index])
    for index in _FULL_BIASES:
        bias = check.inputs[index]
        # A scale is a float32 to the spec, however a model spells it.
        fits = np.float32(bias.scale) == np.float32(weights.scale) / np.float32(128) and bias.zero_point == 0
        check.require(
            bool(fits), f"input {index}", f"scale {weights.scale / 128} and zero point 0", bias.scale
        )
    exponent = _STATE_INTEGER_BITS - 15
    for what, state in (("input 13", check.inputs[13]), ("output 0", check.outputs[0])):
        check.require(_power_of_two(state.scale) == exponent, what, f"scale 2**{exponent}", state.scale)


def _shapes_16bit(call: Call) -> list[Shape]:
    found = extents(call, _FULL_AXES)
    return [(found["batch"], found["output"])] * 2


def _execute_16bit(call: Call) -> list[Array]:
    zero_point = call.tensor(1).zero_point

    def joined() -> npt.NDArray[np.float64]:
        # Gates in the operation's order: input, forget, cell, output. Recurrent weights first, although the input comes first
        # below: so the spec's kernel does, and so its data were made.
        rows = [np.concatenate([call.array(index + 4), call.array(index)], axis=1) for index in range(1, 5)]
        return np.ascontiguousarray(np.concatenate(rows).T.astype(np.float64) - zero_point)

    weights = call.kept("weights", _FULL_WEIGHTS, joined)
    bias = np.concatenate([call.array(index) for index in _FULL_BIASES]).astype(np.int64)
    operands = np.concatenate([call.array(0), call.array(14)], axis=1).astype(np.int64) - 128
    state = call.array(13).astype(np.int64)

    sums = bias + _product(operands, weights)
    # From the scale of the bias to 12 fractional bits.
    multiplier, shift = quantize_multiplier(float(np.float32(call.tensor(9).scale)) * 4096)
    gates = saturate_int16(multiply_by_quantized_multiplier(sums, multiplier, shift))
    take, forget, candidate, release = np.split(gates, 4, axis=1)
    take, forget, release = (logistic_int16(gate, _GATE_INTEGER_BITS) for gate in (take, forget, release))
    candidate = tanh_int16(candidate, _GATE_INTEGER_BITS)

    added = rounding_divide_by_pot(multiply_int16(take, candidate), _STATE_INTEGER_BITS)
    state = saturate_int16(added + multiply_int16(forget, state))
    # tanh takes as many integer bits as the gates: beyond 8 it does not change any more.
    clamped = shift_left_int16(state, _STATE_INTEGER_BITS - _GATE_INTEGER_BITS)
    hidden = multiply_int16(release, tanh_int16(clamped, _GATE_INTEGER_BITS))
    result = np.clip(rounding_divide_by_pot(hidden, 8), -128, 127) + 128
    return [state.astype(np.int16), result.astype(np.uint8)]


# QUANTIZED_LSTM

_PLACES = CellPlaces(1, states=(18, 19), norms=(20, 21, 22, 23))
_AXES: dict[int, Axes] = {0: ("batch", "input"), **_PLACES.axes()}
_OUTPUT_AXES: dict[int, Axes] = {0: ("batch", "output"), 1: ("batch", "units"), 2: ("batch", "output")}
_CELL_CLIP, _PROJECTION_CLIP, _GATE_SCALES, _HIDDEN_ZERO_POINT, _HIDDEN_SCALE = (
    24,
    25,
    (26, 27, 28, 29),
    30,
    31,
)


def _validate_quantized(check: Check) -> None:
    check.needs(4)
    check.counts(32, 3)
    check.input_types(
        _Q8S, *[_Q8_SYMM] * 8, *[_Q16_SYMM] * 3, *[_INT32] * 4, _Q8_SYMM, _INT32, _Q8S, _Q16_SYMM
    )
    check.input_types(*[_Q16_SYMM] * 4, *[OperandType.FLOAT32] * 6, start=20)
    check.input_types(OperandType.INT32, OperandType.FLOAT32, start=30)
    check.output_types(_Q8S, _Q16_SYMM, _Q8S)
    require_present(check, 0, *_GATE_SCALES[1:], _HIDDEN_ZERO_POINT, _HIDDEN_SCALE)
    validate_options(check, _PLACES)
    validate_projection(check, _PLACES, check_extents(check, _AXES, _OUTPUT_AXES, optional=_PLACES.optional))
    for index in (*_GATE_SCALES, _HIDDEN_SCALE):
        scale = check.constant(index)
        is_used = index != _GATE_SCALES[0] or not check.is_omitted(_PLACES.weights[0])
        if scale is not None and is_used:
            check.require(scale.item() > 0, f"input {index}", "a scale above 0", scale.item())
    zero_point = check.constant(_HIDDEN_ZERO_POINT)
    if zero_point is not None:
        got = zero_point.item()
        check.require(-128 <= got <= 127, f"input {_HIDDEN_ZERO_POINT}", "a zero point from -128 to 127", got)
    exponent, state = _power_of_two(check.inputs[19].scale), check.inputs[19]
    expected = f"scale 2**n, n from -15 to {INTEGER_BITS_MAX - 15}"
    check.require(
        exponent is not None and 0 <= exponent + 15 <= INTEGER_BITS_MAX, "input 19", expected, state.scale
    )
    for output, source in ((0, 18), (1, 19), (2, 18)):
        check.same_quantization(f"output {output}", check.inputs[source], check.outputs[output])


def _shapes_quantized(call: Call) -> list[Shape]:
    found = extents(call, _AXES, optional=_PLACES.optional)
    check_run_options(call, _PLACES, found)
    output = (found["batch"], found["output"])
    return [output, (found["batch"], found["units"]), output]


def _float32(call: Call, index: int, *, default: float | None = None) -> np.float32:
    if default is not None and not call.has(index):
        return np.float32(default)
    value = np.float32(call.scalar(index))
    if default is None and not value > 0:
        call.refuse(f"input {index}: expected a scale above 0, got {value}")
    return value


def _scaled(x: Int64Array, real: float | np.floating[Any]) -> Int64Array:
    """Integers times a real number, with the spec's rounding; the real number is a float32 to the spec's kernels."""
    multiplier, shift = quantize_multiplier(float(np.float32(real)))
    return multiply_by_quantized_multiplier(x, multiplier, shift)


def _truncated(x: npt.NDArray[Any], divisor: int) -> Int64Array:
    """C's division: towards zero."""
    quotient: Int64Array = np.where(x >= 0, x // divisor, -(-x // divisor))
    return quotient


def _normalized(gate: Int64Array, weights: Tensor, bias: Int64Array) -> Int64Array:
    """Layer normalisation of 16-bit numbers [batch, units] with 10 more fractional bits inside.

    The mean is an integer division, and the variance is divided by ``2**20 // units`` of 2**20: both as in the spec's kernels, and
    exact where the units are a power of two.
    """
    units = gate.shape[1]
    mean = _truncated(gate.sum(axis=1) * 1024, units)
    variance = _truncated((gate * gate).sum(axis=1) * ((1 << 20) // units) - mean * mean, 1 << 20)
    scale = np.float32(weights.scale)
    least = min(1, int(10000 * scale))
    inverses = [inverse_sqrt(v if v >= 1 else least) for v in variance.tolist()]
    multiplier, shift = (np.array(column, dtype=np.int64)[:, None] for column in zip(*inverses, strict=True))
    centred = multiply_by_quantized_multiplier(gate * 1024 - mean[:, None], multiplier, shift)
    weighted = centred * weights.array.astype(np.int64) + bias
    rounded = _truncated(np.where(weighted > 0, weighted + 512, weighted - 512), 1024)
    multiplier_out, shift_out = quantize_multiplier(float(scale))
    return saturate_int16(multiply_by_quantized_multiplier(rounded, multiplier_out, shift_out + 12))


class _Gates:
    """The gates of one execution, numbered in the operation's order: 0 input, 1 forget, 2 cell, 3 output."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._state_scale = 2.0 ** _state_exponent(call)

    def _weighted(self, source: int, index: int, gate_scale: np.float32, bias: Int64Array) -> Int64Array:
        """Weights times a signed 8-bit operand, in the gate's scale."""
        call = self._call
        key = f"weights {index}"
        weights = call.kept(
            key, (index,), lambda: np.ascontiguousarray(call.array(index).T, dtype=np.float64)
        )
        operand, weight = call.tensor(source), call.tensor(index)
        sums = _product(operand.array.astype(np.int64) - operand.zero_point, weights) + bias
        # float32 and in this order, as the spec's kernels compute it.
        real = np.float32(weight.scale) * np.float32(operand.scale) / gate_scale
        return _scaled(sums, real)

    def gate(self, number: int, state: Int64Array, peephole: int | None) -> Int64Array:
        """A gate before its activation; ``state`` is the cell state that its peephole sees."""
        call = self._call
        scale = _float32(call, _GATE_SCALES[number])
        bias = call.array(_PLACES.biases[number]).astype(np.int64)
        is_normalized = call.has(_PLACES.norms[number])
        # The bias comes after the normalisation where there is one.
        inner = np.zeros_like(bias) if is_normalized else bias
        value = saturate_int16(self._weighted(0, _PLACES.weights[number], scale, inner))
        recurrent = self._weighted(_PLACES.states[0], _PLACES.recurrent[number], scale, np.zeros_like(bias))
        value = saturate_int16(value + recurrent)
        if peephole is not None and call.has(peephole):
            weight = call.tensor(peephole)
            real = self._state_scale * float(np.float32(weight.scale)) / float(scale)
            value = saturate_int16(value + _scaled(weight.array.astype(np.int64) * state, real))
        if is_normalized and value.size:
            value = _normalized(value, call.tensor(_PLACES.norms[number]), bias)
        return value


def _state_exponent(call: Call) -> int:
    exponent = _power_of_two(call.tensor(19).scale)
    assert exponent is not None, "the validator demands a power of two"
    return exponent


def _next_state(call: Call, gates: _Gates, state: Int64Array) -> Int64Array:
    to_input, to_forget, _ = _PLACES.peepholes
    forget = logistic_int16(gates.gate(1, state, to_forget), _GATE_INTEGER_BITS)
    candidate = tanh_int16(gates.gate(2, state, None), _GATE_INTEGER_BITS)
    if call.has(_PLACES.weights[0]):
        take = logistic_int16(gates.gate(0, state, to_input), _GATE_INTEGER_BITS)
    else:
        take = INT16_MAX - forget
    exponent = _state_exponent(call)
    kept = rounding_divide_by_pot(forget * state, 15)
    added = rounding_divide_by_pot(take * candidate, 30 + exponent)
    after = saturate_int16(kept + added)
    clip = _float32(call, _CELL_CLIP, default=0.0)
    if clip > 0:
        # Truncated, as the spec's kernels do; the same for the projection.
        bound = int(min(clip / np.float32(call.tensor(19).scale), np.float32(INT16_MAX)))
        after = np.clip(after, -bound, bound) if bound > 0 else after
    return after


def _projected(
    call: Call, hidden: Int64Array, hidden_scale: np.float32, hidden_zero_point: int
) -> Int64Array:
    weights_index, bias_index = _PLACES.projection
    if not call.has(weights_index):
        return hidden
    weights, target = call.tensor(weights_index), call.tensor(_PLACES.states[0])
    # Hidden values are stored with their zero point subtracted, not added.
    sums = _product(hidden + hidden_zero_point, weights.array.T.astype(np.float64))
    if call.has(bias_index):
        sums = sums + call.array(bias_index).astype(np.int64)
    scale = np.float32(weights.scale)
    output = _scaled(sums, scale * hidden_scale / np.float32(target.scale)) + target.zero_point
    output = np.clip(output, -128, 127)
    clip = _float32(call, _PROJECTION_CLIP, default=0.0)
    bound = int(min(clip / scale, np.float32(127))) if clip > 0 else 0
    return np.clip(output, -bound, bound) if bound > 0 else output


def _execute_quantized(call: Call) -> list[Array]:
    hidden_scale, hidden_zero_point = _float32(call, _HIDDEN_SCALE), int(call.scalar(_HIDDEN_ZERO_POINT))
    if not -128 <= hidden_zero_point <= 127:
        call.refuse(
            f"input {_HIDDEN_ZERO_POINT}: expected a zero point from -128 to 127, got {hidden_zero_point}"
        )
    gates = _Gates(call)
    state = _next_state(call, gates, call.array(19).astype(np.int64))
    release = logistic_int16(gates.gate(3, state, _PLACES.peepholes[2]), _GATE_INTEGER_BITS)
    squashed = tanh_int16(state, _state_exponent(call) + 15)
    hidden = _scaled(release * squashed, 2.0**-30 / float(hidden_scale)) - hidden_zero_point
    output = _projected(call, np.clip(hidden, -128, 127), hidden_scale, hidden_zero_point).astype(np.int8)
    return [output, state.astype(np.int16), output.copy()]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.QUANTIZED_16BIT_LSTM,
        validate=_validate_16bit,
        shapes=_shapes_16bit,
        execute=_execute_16bit,
        doc="""One step of a long short-term memory with 8-bit operands and a 16-bit cell state.

The step of LSTM with tanh as activation, without peepholes, projection, norm or clips, in fixed point: each gate is [R W] [x h] + b
in 32 bits, brought to 16 bits with 3 integer bits, saturated; logistic and tanh of it have none; the cell state has 4, saturated;
tanh of the cell state takes it with 3, saturated.

[R W] is the matrix of both weights side by side, [x h] the vector of input and output one after the other: R does not meet h alone,
as the text of the spec has it. So its kernel computes and so its data are.

Inputs:
    0: x [batch, input], quant8 asymm, scale 1/128, zero point 128.
    1 to 4: Wi, Wf, Wc, Wo [output, input], quant8 asymm.
    5 to 8: Ri, Rf, Rc, Ro [output, output], quant8 asymm, quantised as inputs 1 to 4.
    9 to 12: bi, bf, bc, bo [output], int32.
    13: cell state [batch, output], quant16 symm, scale 2**-11.
    14: h [batch, output], quantised as x.

Outputs:
    0: cell state after the step, as input 13.
    1: h after the step, as input 14.

Quantisation: all weights share scale and zero point; biases have the weights' scale / 128 and zero point 0.

Types by feature level: 3.

Stricter than the spec: none.

Source: NN HAL 1.2, ``OperationType::QUANTIZED_16BIT_LSTM``.
""",
    ),
    OperationContract(
        type=OperationType.QUANTIZED_LSTM,
        validate=_validate_quantized,
        shapes=_shapes_quantized,
        execute=_execute_quantized,
        doc="""One step of a long short-term memory with 8-bit operands, 16-bit gates and its options.

The step of LSTM with tanh as activation. Each product W x and R h is brought to the gate's own scale (inputs 26 to 29) and
saturated to 16 bits, as is each sum; so is the peephole's product. The norm, where there is one, is computed in integers; its
result, like a gate's value without norm, counts as 3 integer bits. o * tanh(c') is brought to the hidden state's scale in 8 bits,
its zero point subtracted; the projection, where there is one, brings it to the output's scale.

Inputs:
    0: x [batch, input], quant8 asymm signed.
    1 to 4: Wi, Wf, Wc, Wo [units, input], quant8 symm.
    5 to 8: Ri, Rf, Rc, Ro [units, output], quant8 symm.
    9 to 11: pi, pf, po [units], quant16 symm; peepholes, left out together.
    12 to 15: bi, bf, bc, bo [units], int32.
    16, 17: projection P [output, units], quant8 symm, and bp [output], int32; bp only with P. Without P output equals units.
    18: h [batch, output], quant8 asymm signed.
    19: c [batch, units], quant16 symm, scale 2**n, n from -15 to -9.
    20 to 23: norm weights of i, f, c, o [units], quant16 symm; left out together.
    24, 25: clips of cell state and projection, FLOAT32; left out or 0 does not clip.
    26 to 29: scales of the gates i, f, c, o before the norm, FLOAT32, above 0.
    30, 31: zero point, INT32 from -128 to 127, and scale, FLOAT32 above 0, of the hidden state.
    For CIFG inputs 1, 5, 12 and 20 are left out, and input 26 is not looked at.

Outputs:
    0: h after the step, as input 18.
    1: c after the step, as input 19.
    2: h again.

Quantisation: outputs have scale and zero point of the states that they replace.

Types by feature level: 4.

Other than the spec's kernel, which reads or leaves out the wrong values there: peepholes of i and f see the cell state before the
step, as in the formula; peepholes cover all units where a projection makes the output narrower; without norm the bias belongs to
the gate; the projection's bias may be left out. A clip of the projection is divided by the scale of its weights, as by the kernel.

Source: NN HAL 1.3, ``OperationType::QUANTIZED_LSTM``; bias without norm: TensorFlow Lite's integer LSTM.
""",
    ),
)

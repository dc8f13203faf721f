"""Claims about the integer LSTMs: number by number as the published kernels compute, near the real LSTM, levels and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.numerics.fixed_point import multiply_by_quantized_multiplier, quantize_multiplier
from aionn.ops.numerics.fixed_point_int16 import inverse_sqrt, logistic_int16, tanh_int16
from aionn.ops.recurrent.quantized_lstm import OPERATIONS
from aionn.ops.signature import Array, Call, Tensor
from tests.support.contracts import level_of

CONTRACTS = {contract.type: contract for contract in OPERATIONS}
T = OperandType
OLD, NEW = OperationType.QUANTIZED_16BIT_LSTM, OperationType.QUANTIZED_LSTM
BATCH, INPUT, UNITS = 3, 5, 4
MISSING = OperandLifeTime.NO_VALUE

Value = tuple[Operand, Array | None]


def run(operation: OperationType, values: list[Value], outputs: list[Operand]) -> list[Array]:
    inputs = [None if array is None else Tensor(operand, array) for operand, array in values]
    call = Call(inputs, outputs)
    contract = CONTRACTS[operation]
    assert contract.shapes is not None
    shapes = contract.shapes(call)
    results = list(contract.execute(call))
    assert [r.shape for r in results] == [tuple(s) for s in shapes]
    return results


def half_away(x: int, exponent: int) -> int:
    """x / 2**exponent, rounded half away from zero."""
    half = (1 << exponent) >> 1
    return (x + half) >> exponent if x >= 0 else -((-x + half) >> exponent)


def scaled(x: int, real: float) -> int:
    """One number at a time, through the multiplier of a float32."""
    return int(multiply_by_quantized_multiplier(x, *quantize_multiplier(float(np.float32(real)))))


def clip16(x: int) -> int:
    return max(-32768, min(32767, x))


def logistic(x: int) -> int:
    return int(logistic_int16(np.array(x), 3))


def tanh(x: int, integer_bits: int = 3) -> int:
    return int(tanh_int16(np.array(x), integer_bits))


def real_lstm(
    x: Array, weights: list[Array], recurrent: list[Array], biases: list[Array], h: Array, c: Array
):
    """The formula over real numbers without options."""

    def gate(i: int) -> Array:
        return x @ weights[i].T + h @ recurrent[i].T + biases[i]

    i, f, o = (1 / (1 + np.exp(-gate(k))) for k in (0, 1, 3))
    state = f * c + i * np.tanh(gate(2))
    return o * np.tanh(state), state


# QUANTIZED_16BIT_LSTM

WEIGHT_SCALE, WEIGHT_ZERO = 1 / 200, 100
UNIT = {"scale": 1 / 128, "zero_point": 128}


def old_operands() -> list[Operand]:
    weight = {"scale": WEIGHT_SCALE, "zero_point": WEIGHT_ZERO}
    q8 = T.TENSOR_QUANT8_ASYMM
    return [
        Operand(q8, (BATCH, INPUT), **UNIT),
        *[Operand(q8, (UNITS, INPUT), **weight)] * 4,
        *[Operand(q8, (UNITS, UNITS), **weight)] * 4,
        *[Operand(T.TENSOR_INT32, (UNITS,), scale=WEIGHT_SCALE / 128)] * 4,
        Operand(T.TENSOR_QUANT16_SYMM, (BATCH, UNITS), scale=2**-11),
        Operand(q8, (BATCH, UNITS), **UNIT),
    ]


def old_outputs() -> list[Operand]:
    return [
        Operand(T.TENSOR_QUANT16_SYMM, (BATCH, UNITS), scale=2**-11),
        Operand(T.TENSOR_QUANT8_ASYMM, (BATCH, UNITS), **UNIT),
    ]


def old_values(seed: int) -> list[Value]:
    rng = np.random.default_rng(seed)
    values: list[Value] = []
    for operand in old_operands():
        low, high, dtype = {
            T.TENSOR_QUANT8_ASYMM: (0, 256, np.uint8),
            T.TENSOR_INT32: (-30000, 30000, np.int32),
            T.TENSOR_QUANT16_SYMM: (-32768, 32768, np.int16),
        }[operand.type]
        values.append((operand, rng.integers(low, high, operand.dimensions).astype(dtype)))
    return values


def test_16bit_step_is_its_definition_number_by_number() -> None:
    values = old_values(1)
    state_out, output = run(OLD, values, old_outputs())
    data = [np.asarray(array).astype(int).tolist() for _, array in values]
    for b in range(BATCH):
        operands = [v - 128 for v in (*data[0][b], *data[14][b])]
        for u in range(UNITS):
            gates = []
            for g in range(4):
                # The weights' row has the recurrent part first, the operands have the input first.
                row = [w - WEIGHT_ZERO for w in (*data[5 + g][u], *data[1 + g][u])]
                total = data[9 + g][u] + sum(a * w for a, w in zip(operands, row, strict=True))
                gates.append(clip16(scaled(total, np.float32(WEIGHT_SCALE / 128) * 4096)))
            i, f, c, o = logistic(gates[0]), logistic(gates[1]), tanh(gates[2]), logistic(gates[3])
            added = half_away((i * c + (1 << 14)) >> 15, 4)
            state = clip16(added + ((f * data[13][b][u] + (1 << 14)) >> 15))
            hidden = (o * tanh(clip16(state * 2)) + (1 << 14)) >> 15
            assert state_out[b, u] == state
            assert output[b, u] == 128 + max(-128, min(127, half_away(hidden, 8)))


def test_16bit_step_is_near_the_real_lstm_when_weights_are_laid_out_for_it() -> None:
    # With equal input and output sizes the two blocks of weights change places.
    rng = np.random.default_rng(2)
    values = old_values(3)
    square = [Operand(o.type, (UNITS, UNITS), o.scale, o.zero_point) for o, _ in values[1:9]]
    x = rng.integers(0, 256, (BATCH, UNITS)).astype(np.uint8)
    values[0] = (Operand(T.TENSOR_QUANT8_ASYMM, (BATCH, UNITS), **UNIT), x)
    for index, operand in enumerate(square, 1):
        values[index] = (operand, rng.integers(0, 256, (UNITS, UNITS)).astype(np.uint8))
    state_out, output = run(OLD, values, old_outputs())

    def real(index: int) -> Array:
        operand, array = values[index]
        return (np.asarray(array).astype(np.float64) - operand.zero_point) * operand.scale

    h, state = real_lstm(
        real(0),
        [real(i) for i in range(5, 9)],
        [real(i) for i in range(1, 5)],
        [real(i) for i in range(9, 13)],
        real(14),
        real(13),
    )
    assert np.abs(state_out * 2.0**-11 - np.clip(state, -16, 16)).max() < 0.01
    assert np.abs((output.astype(float) - 128) / 128 - h).max() < 0.01


def test_16bit_empty_batch_is_empty() -> None:
    values = old_values(4)
    for index in (0, 13, 14):
        operand, array = values[index]
        values[index] = (operand, np.asarray(array)[:0])
    for result in run(OLD, values, old_outputs()):
        assert result.shape == (0, UNITS)


def test_16bit_needs_level_3() -> None:
    assert level_of(OLD, old_operands(), old_outputs()) == 3


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, {"type": T.TENSOR_QUANT8_ASYMM_SIGNED}, "input 0: expected TENSOR_QUANT8_ASYMM"),
        (0, {"scale": 1 / 64}, r"input 0: expected scale 0\.0078125 and zero point 128"),
        (14, {"zero_point": 0}, r"input 14: expected scale 0\.0078125 and zero point 128"),
        (3, {"scale": 0.1}, r"input 3: expected scale 0\.005 and zero point 100"),
        (8, {"zero_point": 1}, r"input 8: expected scale 0\.005 and zero point 100"),
        (11, {"scale": 0.1}, "input 11: expected scale"),
        (13, {"scale": 2**-12}, r"input 13: expected scale 2\*\*-11"),
        (7, {"dimensions": (UNITS, 9)}, "input 7: expected shape"),
        (2, {"lifetime": MISSING}, "input 2: expected a value"),
    ],
)
def test_16bit_validator_refuses_with_the_place(index: int, change: dict[str, object], message: str) -> None:
    inputs = old_operands()
    fields = {f: getattr(inputs[index], f) for f in ("type", "dimensions", "scale", "zero_point", "lifetime")}
    inputs[index] = Operand(**{**fields, **change})
    with pytest.raises(InvalidModel, match=message):
        level_of(OLD, inputs, old_outputs())


def test_16bit_outputs_have_the_states_quantization() -> None:
    outputs = old_outputs()
    with pytest.raises(InvalidModel, match=r"output 0: expected scale 2\*\*-11"):
        level_of(OLD, old_operands(), [Operand(T.TENSOR_QUANT16_SYMM, scale=2**-10), outputs[1]])
    with pytest.raises(InvalidModel, match="output 1: expected scale"):
        level_of(OLD, old_operands(), [outputs[0], Operand(T.TENSOR_QUANT8_ASYMM, scale=1 / 128)])


# QUANTIZED_LSTM

STATE_EXPONENT = -11
GATE_SCALES = (2**-12, 0.0003, 2**-12, 0.0004)


def new_values(
    seed: int,
    *,
    is_coupled: bool = False,
    has_peepholes: bool = False,
    has_projection: bool = False,
    has_norm: bool = False,
    output: int | None = None,
    clips: tuple[float, float] = (0.0, 0.0),
) -> list[Value]:
    rng = np.random.default_rng(seed)
    output = output if output is not None else UNITS
    hidden_zero = 3 if has_projection else 0

    def value(
        kind: OperandType, shape: tuple[int, ...], scale: float, bound: int, is_given: bool, zero: int = 0
    ) -> Value:
        if not is_given:
            return Operand(kind, lifetime=MISSING), None
        dtype = {T.TENSOR_QUANT16_SYMM: np.int16, T.TENSOR_INT32: np.int32}.get(kind, np.int8)
        array = rng.integers(-bound, bound, shape).astype(dtype)
        return Operand(kind, shape, scale, zero), array

    def scalar(kind: OperandType, number: float) -> Value:
        return Operand(kind), np.array(number, np.float32 if kind == T.FLOAT32 else np.int32)

    has = [not is_coupled, True, True, True]
    q8, q16, q8s = T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT16_SYMM, T.TENSOR_QUANT8_ASYMM_SIGNED
    return [
        value(q8s, (BATCH, INPUT), 0.01, 128, True, 4),
        *(value(q8, (UNITS, INPUT), 0.006 + g / 1000, 128, has[g]) for g in range(4)),
        *(value(q8, (UNITS, output), 0.007 + g / 1000, 128, has[g]) for g in range(4)),
        *(value(q16, (UNITS,), 0.00004, 32768, has_peepholes and has[g]) for g in (0, 1, 3)),
        *(value(T.TENSOR_INT32, (UNITS,), 0.00006, 20000, has[g]) for g in range(4)),
        value(q8, (output, UNITS), 0.005, 128, has_projection),
        value(T.TENSOR_INT32, (output,), 0.00003, 9000, has_projection),
        value(q8s, (BATCH, output), 0.008, 128, True, -5),
        value(q16, (BATCH, UNITS), 2.0**STATE_EXPONENT, 32768, True),
        *(value(q16, (UNITS,), 0.00005, 32768, has_norm and has[g]) for g in range(4)),
        *(scalar(T.FLOAT32, n) for n in (*clips, *GATE_SCALES)),
        scalar(T.INT32, hidden_zero),
        scalar(T.FLOAT32, 0.007),
    ]


def new_outputs(values: list[Value]) -> list[Operand]:
    state, cell = values[18][0], values[19][0]
    return [state, cell, state]


def plain_norm(row: list[int], weights: list[int], bias: list[int], scale: np.float32) -> list[int]:
    def toward_zero(a: int, b: int) -> int:
        return abs(a) // b * (1 if a >= 0 else -1)

    n = len(row)
    mean = toward_zero(sum(row) * 1024, n)
    variance = toward_zero(sum(v * v for v in row) * ((1 << 20) // n) - mean * mean, 1 << 20)
    inverse = inverse_sqrt(variance if variance >= 1 else min(1, int(10000 * scale)))
    multiplier, shift = quantize_multiplier(float(scale))
    results = []
    for v, w, b in zip(row, weights, bias, strict=True):
        weighted = int(multiply_by_quantized_multiplier(1024 * v - mean, *inverse)) * w + b
        rounded = toward_zero(weighted + (512 if weighted > 0 else -512), 1024)
        results.append(clip16(int(multiply_by_quantized_multiplier(rounded, multiplier, shift + 12))))
    return results


def plain_step(values: list[Value]) -> tuple[list[list[int]], list[list[int]]]:
    """The published kernel's integers, one by one; outputs and cell states."""
    data = [None if array is None else np.asarray(array).astype(int).tolist() for _, array in values]
    f32 = [np.float32(operand.scale) for operand, _ in values]
    real = [float(np.asarray(array)) for _, array in values[24:]]
    hidden_zero, hidden_scale = int(real[6]), np.float32(real[7])

    def gate(g: int, b: int, state: list[int] | None, peephole: int) -> list[int]:
        scale = np.float32(GATE_SCALES[g])
        norm, row = data[20 + g], []
        for u in range(UNITS):
            inner = sum(
                (x - values[0][0].zero_point) * w for x, w in zip(data[0][b], data[1 + g][u], strict=True)
            )
            inner += 0 if norm else data[12 + g][u]
            total = clip16(scaled(inner, f32[1 + g] * f32[0] / scale))
            inner = sum(
                (h - values[18][0].zero_point) * w for h, w in zip(data[18][b], data[5 + g][u], strict=True)
            )
            total = clip16(total + scaled(inner, f32[5 + g] * f32[18] / scale))
            if state is not None and data[peephole] is not None:
                weight = 2.0**STATE_EXPONENT * float(f32[peephole]) / float(scale)
                total = clip16(total + scaled(data[peephole][u] * state[u], weight))
            row.append(total)
        return plain_norm(row, norm, data[12 + g], f32[20 + g]) if norm else row

    outputs, states = [], []
    for b in range(BATCH):
        before = data[19][b]
        forget = [logistic(v) for v in gate(1, b, before, 10)]
        take = (
            [32767 - f for f in forget] if data[1] is None else [logistic(v) for v in gate(0, b, before, 9)]
        )
        candidate = [tanh(v) for v in gate(2, b, None, 0)]
        state = [
            clip16(half_away(f * c, 15) + half_away(i * g, 30 + STATE_EXPONENT))
            for f, c, i, g in zip(forget, before, take, candidate, strict=True)
        ]
        if real[0]:
            bound = int(np.float32(real[0]) / f32[19])
            state = [max(-bound, min(bound, s)) for s in state]
        release = [logistic(v) for v in gate(3, b, state, 11)]
        hidden = [
            max(
                -128,
                min(
                    127,
                    scaled(o * tanh(s, STATE_EXPONENT + 15), 2.0**-30 / float(hidden_scale)) - hidden_zero,
                ),
            )
            for o, s in zip(release, state, strict=True)
        ]
        if data[16] is not None:
            projected = []
            for row, bias in zip(data[16], data[17], strict=True):
                total = sum((h + hidden_zero) * w for h, w in zip(hidden, row, strict=True)) + bias
                out = scaled(total, f32[16] * hidden_scale / f32[18]) + values[18][0].zero_point
                out = max(-128, min(127, out))
                if real[1]:
                    bound = int(np.float32(real[1]) / f32[16])
                    out = max(-bound, min(bound, out))
                projected.append(out)
            hidden = projected
        outputs.append(hidden)
        states.append(state)
    return outputs, states


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("has_peepholes", [False, True])
@pytest.mark.parametrize("has_projection", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_every_combination_of_options_is_its_definition_number_by_number(
    is_coupled: bool, has_peepholes: bool, has_projection: bool, has_norm: bool
) -> None:
    for seed, clips in ((1, (0.0, 0.0)), (2, (2.5, 0.3))):
        values = new_values(
            seed,
            is_coupled=is_coupled,
            has_peepholes=has_peepholes,
            has_projection=has_projection,
            has_norm=has_norm,
            output=6 if has_projection else None,
            clips=clips,
        )
        output_state, cell_state, output = run(NEW, values, new_outputs(values))
        want_output, want_state = plain_step(values)
        assert cell_state.tolist() == want_state
        assert output.tolist() == want_output
        assert np.array_equal(output_state, output)


def test_step_without_options_is_near_the_real_lstm() -> None:
    values = new_values(5)
    # Without norm a gate's value counts as 3 integer bits whatever its scale, so the scales must say the same.
    for index in (26, 27, 28, 29):
        values[index] = (values[index][0], np.array(2.0**-12, np.float32))
    for index in range(12, 16):
        operand, array = values[index]
        scale = values[0][0].scale * values[index - 11][0].scale
        values[index] = (Operand(operand.type, operand.dimensions, scale), array)
    values[18] = (Operand(T.TENSOR_QUANT8_ASYMM_SIGNED, (BATCH, UNITS), 0.007), values[18][1])
    output, state, _ = run(NEW, values, new_outputs(values))

    def real(index: int) -> Array:
        operand, array = values[index]
        return (np.asarray(array).astype(np.float64) - operand.zero_point) * operand.scale

    h, c = real_lstm(
        real(0), *([real(i) for i in range(first, first + 4)] for first in (1, 5, 12)), real(18), real(19)
    )
    assert np.abs(state * 2.0**STATE_EXPONENT - c).max() < 0.01
    assert np.abs(output * 0.007 - np.clip(h, -128 * 0.007, 127 * 0.007)).max() < 0.01


def test_norm_of_equal_values_is_the_bias() -> None:
    values = new_values(6, has_norm=True)
    for index in range(1, 9):
        operand, array = values[index]
        values[index] = (operand, np.zeros_like(np.asarray(array)))
    _, state, _ = run(NEW, values, new_outputs(values))
    assert state.tolist() == plain_step(values)[1]


def test_projection_bias_and_clips_may_be_left_out() -> None:
    values = new_values(7, has_projection=True)
    zero = [*values]
    zero[17] = (zero[17][0], np.zeros_like(np.asarray(zero[17][1])))
    left_out = [*values]
    for index in (17, 24, 25):
        left_out[index] = (Operand(left_out[index][0].type, lifetime=MISSING), None)
    for a, b in zip(
        run(NEW, left_out, new_outputs(values)), run(NEW, zero, new_outputs(values)), strict=True
    ):
        assert np.array_equal(a, b)


def test_empty_batch_is_empty() -> None:
    values = new_values(8, has_norm=True, has_projection=True, output=6)
    for index in (0, 18, 19):
        operand, array = values[index]
        values[index] = (operand, np.asarray(array)[:0])
    assert [r.shape for r in run(NEW, values, new_outputs(values))] == [(0, 6), (0, UNITS), (0, 6)]


def test_quantized_lstm_needs_level_4() -> None:
    values = new_values(9, has_peepholes=True, has_projection=True, has_norm=True)
    assert level_of(NEW, [operand for operand, _ in values], new_outputs(values)) == 4


def replaced(operand: Operand, **change: object) -> Operand:
    fields = {f: getattr(operand, f) for f in ("type", "dimensions", "scale", "zero_point", "lifetime")}
    return Operand(**{**fields, **change})


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, {"type": T.TENSOR_QUANT8_ASYMM}, "input 0: expected TENSOR_QUANT8_ASYMM_SIGNED"),
        (9, {"type": T.TENSOR_QUANT8_SYMM}, "input 9: expected TENSOR_QUANT16_SYMM"),
        (30, {"type": T.FLOAT32}, "input 30: expected INT32"),
        (1, {"lifetime": MISSING}, "inputs 1 to 12: expected input gate together"),
        (10, {"lifetime": MISSING}, "inputs 10 to 11: expected peephole weights together"),
        (16, {"lifetime": MISSING}, "input 17: expected no value"),
        (22, {"lifetime": MISSING}, "inputs 21 to 23: expected normalisation weights together"),
        (27, {"lifetime": MISSING}, "input 27: expected a value"),
        (31, {"lifetime": MISSING}, "input 31: expected a value"),
        (19, {"scale": 0.0005}, r"input 19: expected scale 2\*\*n"),
        (19, {"scale": 2**-8}, r"input 19: expected scale 2\*\*n"),
        (19, {"scale": 2**-16}, r"input 19: expected scale 2\*\*n"),
        (13, {"dimensions": (9,)}, "input 13: expected shape"),
    ],
)
def test_validator_refuses_with_the_place(index: int, change: dict[str, object], message: str) -> None:
    values = new_values(10, has_peepholes=True, has_projection=True, has_norm=True)
    inputs = [operand for operand, _ in values]
    inputs[index] = replaced(inputs[index], **change)
    with pytest.raises(InvalidModel, match=message):
        level_of(NEW, inputs, new_outputs(values))


def test_constant_scales_and_zero_point_are_checked() -> None:
    values = new_values(11)
    inputs = [operand for operand, _ in values]
    for constants, message in (
        ({26: 0.0}, "input 26: expected a scale above 0"),
        ({29: -1.0}, "input 29: expected a scale above 0"),
        ({31: math.nan}, "input 31: expected a scale above 0"),
        ({30: 128}, "input 30: expected a zero point from -128 to 127"),
    ):
        with pytest.raises(InvalidModel, match=message):
            level_of(NEW, inputs, new_outputs(values), constants)
    coupled = [operand for operand, _ in new_values(11, is_coupled=True)]
    assert level_of(NEW, coupled, new_outputs(values), {26: 0.0}) == 4


def test_outputs_have_the_states_quantization() -> None:
    values = new_values(12)
    for output in range(3):
        outputs = new_outputs(values)
        outputs[output] = replaced(outputs[output], scale=0.5)
        with pytest.raises(InvalidModel, match=f"output {output}: expected scale"):
            level_of(NEW, [operand for operand, _ in values], outputs)


def test_bad_run_time_values_end_the_execution() -> None:
    for index, array, message in (
        (27, np.array(0, np.float32), "input 27: expected a scale above 0"),
        (31, np.array(np.nan, np.float32), "input 31: expected a scale above 0"),
        (30, np.array(200, np.int32), "input 30: expected a zero point"),
        (13, None, "input 13: expected a value"),
        (1, None, "inputs 1 to 12: expected input gate together"),
        (14, np.zeros(9, np.int32), "input 14: expected shape"),
    ):
        values = new_values(13)
        values[index] = (values[index][0], array)
        with pytest.raises(InvalidArgument, match=message):
            run(NEW, values, new_outputs(values))

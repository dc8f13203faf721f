"""Claims about the basic recurrent layers: a plain-loop definition, linking, layouts, levels and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.recurrent.rnn import OPERATIONS
from aionn.ops.signature import Array, Call, Tensor
from tests.support.contracts import level_with_outputs

CONTRACTS = {contract.type: contract for contract in OPERATIONS}
T = OperandType
ONE, UNI, BI = (
    OperationType.RNN,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
)
ACTIVATIONS = {
    0: lambda x: x,
    1: lambda x: max(x, 0.0),
    2: lambda x: min(max(x, -1.0), 1.0),
    3: lambda x: min(max(x, 0.0), 6.0),
    4: math.tanh,
    6: lambda x: 1 / (1 + math.exp(-x)),
}


def run(operation: OperationType, arrays: list[object], output_count: int) -> list[Array]:
    """Runs a kernel on float32, or on float16 where the first array is, and checks the shape rule against it."""
    values = [None if a is None else np.asarray(a) for a in arrays]
    assert values[0] is not None
    kind = T.TENSOR_FLOAT16 if values[0].dtype == np.float16 else T.TENSOR_FLOAT32
    inputs = [None if a is None else Tensor(Operand(kind), a) for a in values]
    contract = CONTRACTS[operation]
    call = Call(inputs, [Operand(kind)] * output_count)
    assert contract.shapes is not None
    shapes = contract.shapes(call)
    results = list(contract.execute(call))
    assert [r.shape for r in results] == [tuple(s) for s in shapes]
    assert all(r.dtype == values[0].dtype for r in results)
    return results


def plain_layer(
    sequence: Array, cell: list[Array], activation: int, extra: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """The definition, number by number: outputs [time, batch, units] and the last state."""
    weights, recurrent, bias, state = (a.astype(np.float64) for a in cell)
    outputs = []
    for step, x in enumerate(sequence.astype(np.float64)):
        after = np.zeros(state.shape)
        for b in range(len(x)):
            for u in range(len(bias)):
                total = bias[u]
                for i in range(x.shape[1]):
                    total += x[b, i] * weights[u, i]
                if extra is not None:
                    for i in range(extra[0].shape[2]):
                        total += float(extra[0][step, b, i]) * float(extra[1][u, i])
                for v in range(len(bias)):
                    total += state[b, v] * recurrent[u, v]
                after[b, u] = ACTIVATIONS[activation](total)
        state = after
        outputs.append(after)
    return np.array(outputs).reshape(len(sequence), *state.shape), state


def random_cell(rng: np.random.Generator, units: int, inputs: int, batch: int) -> list[Array]:
    shapes = ((units, inputs), (units, units), (units,), (batch, units))
    return [rng.standard_normal(shape).astype(np.float32) * np.float32(0.5) for shape in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_step_is_its_definition(activation: int) -> None:
    rng = np.random.default_rng(activation)
    x, cell = rng.standard_normal((2, 3)).astype(np.float32), random_cell(rng, 4, 3, 2)
    state, output = run(ONE, [x, *cell, np.int32(activation)], 2)
    expected, _ = plain_layer(x[None], cell, activation)
    np.testing.assert_allclose(output, expected[0], rtol=1e-5, atol=1e-6)
    assert np.array_equal(state, output)


@pytest.mark.parametrize("is_time_major", [False, True])
def test_sequence_is_the_step_repeated(is_time_major: bool) -> None:
    rng = np.random.default_rng(8)
    x, cell = rng.standard_normal((5, 2, 3)).astype(np.float32), random_cell(rng, 4, 3, 2)
    given = x if is_time_major else x.swapaxes(0, 1)
    output, state = run(UNI, [given, *cell, np.int32(4), np.int32(is_time_major)], 2)
    expected, last = plain_layer(x, cell, 4)
    got = output if is_time_major else output.swapaxes(0, 1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_time_major", [False, True])
@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("linking", ["none", "parallel", "cross"])
def test_both_directions_in_every_linking(linking: str, is_merged: bool, is_time_major: bool) -> None:
    rng = np.random.default_rng(9)
    x, aux = (rng.standard_normal((4, 2, n)).astype(np.float32) for n in (3, 5))
    forward = random_cell(rng, 4, 3, 2)
    backward = random_cell(rng, 6, 5 if linking == "parallel" else 3, 2)
    aux_weights = [rng.standard_normal((n, 5)).astype(np.float32) for n in (4, 6)]
    linked: list[Array | None] = {
        "none": [None, None, None],
        "parallel": [aux, None, None],
        "cross": [aux, *aux_weights],
    }[linking]
    arrays: list[object] = [x, *forward, *backward, *linked]
    if not is_time_major:
        for i in (0, 9):
            if arrays[i] is not None:
                arrays[i] = np.asarray(arrays[i]).swapaxes(0, 1)
    arrays += [np.int32(4), np.bool_(is_time_major), np.bool_(is_merged)]
    *sequences, forward_state, backward_state = run(BI, arrays, 3 if is_merged else 4)

    def extra(index: int, order: slice) -> tuple[Array, Array] | None:
        return (aux[order], aux_weights[index]) if linking == "cross" else None

    ahead, reverse = slice(None), slice(None, None, -1)
    forward_out, forward_last = plain_layer(x, forward, 4, extra(0, ahead))
    own = aux if linking == "parallel" else x
    backward_out, backward_last = plain_layer(own[reverse], backward, 4, extra(1, reverse))
    expected = [forward_out, backward_out[reverse]]
    if is_merged:
        expected = [np.concatenate(expected, axis=2)]
    for got, want in zip(sequences, expected, strict=True):
        got = got if is_time_major else got.swapaxes(0, 1)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(forward_state, forward_last, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(backward_state, backward_last, rtol=1e-5, atol=1e-6)


def test_float16_is_rounded_once() -> None:
    rng = np.random.default_rng(3)
    x, cell = rng.standard_normal((6, 2, 3)), random_cell(rng, 4, 3, 2)
    half = [a.astype(np.float16) for a in (x, *cell)]
    wide = [a.astype(np.float32) for a in half]
    tail = [np.int32(4), np.int32(1)]
    got, want = run(UNI, [*half, *tail], 2), run(UNI, [*wide, *tail], 2)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b.astype(np.float16))


def test_results_share_no_memory_with_inputs_or_each_other() -> None:
    cell = random_cell(np.random.default_rng(2), 4, 3, 2)
    for operation, x, tail in (
        (ONE, np.ones((2, 3), np.float32), [np.int32(0)]),
        (UNI, np.zeros((0, 2, 3), np.float32), [np.int32(0), np.int32(1)]),
    ):
        results = run(operation, [x, *cell, *tail], 2)
        assert not np.may_share_memory(results[0], results[1])
        assert not any(np.may_share_memory(r, a) for r in results for a in (x, *cell))


def test_empty_batch_and_empty_sequence() -> None:
    rng = np.random.default_rng(1)
    tail = [np.int32(4), np.int32(1)]
    (output,) = run(UNI, [np.zeros((5, 0, 3), np.float32), *random_cell(rng, 4, 3, 0), *tail], 1)
    assert output.shape == (5, 0, 4)
    cell = random_cell(rng, 4, 3, 2)
    output, state = run(UNI, [np.zeros((0, 2, 3), np.float32), *cell, *tail], 2)
    assert output.shape == (0, 2, 4)
    assert np.array_equal(state, cell[3])


def operands_of(operation: OperationType, kind: OperandType = T.TENSOR_FLOAT32) -> list[Operand]:
    """Legal inputs with batch 2, time 4, input 3, units 5 (backward 6), auxiliary 7."""

    def cell(units: int) -> list[Operand]:
        return [Operand(kind, s) for s in ((units, 3), (units, units), (units,), (2, units))]

    if operation == ONE:
        return [Operand(kind, (2, 3)), *cell(5), Operand(T.INT32)]
    sequence = Operand(kind, (2, 4, 3))
    if operation == UNI:
        return [sequence, *cell(5), Operand(T.INT32), Operand(T.INT32)]
    linked = [Operand(kind, s) for s in ((2, 4, 7), (5, 7), (6, 7))]
    return [sequence, *cell(5), *cell(6), *linked, Operand(T.INT32), Operand(T.BOOL), Operand(T.BOOL)]


@pytest.mark.parametrize(
    ("operation", "kind", "output_count", "level"),
    [
        (ONE, T.TENSOR_FLOAT32, 2, 1),
        (ONE, T.TENSOR_FLOAT16, 2, 3),
        (UNI, T.TENSOR_FLOAT32, 1, 3),
        (UNI, T.TENSOR_FLOAT32, 2, 4),
        (BI, T.TENSOR_FLOAT16, 1, 3),
        (BI, T.TENSOR_FLOAT32, 2, 3),
        (BI, T.TENSOR_FLOAT32, 3, 4),
        (BI, T.TENSOR_FLOAT32, 4, 4),
    ],
)
def test_level_follows_type_and_state_outputs(
    operation: OperationType, kind: OperandType, output_count: int, level: int
) -> None:
    assert level_with_outputs(operation, operands_of(operation, kind), output_count) == level


@pytest.mark.parametrize(
    ("operation", "index", "replacement", "message"),
    [
        (
            ONE,
            0,
            Operand(T.TENSOR_QUANT8_ASYMM, (2, 3)),
            "input 0: expected TENSOR_FLOAT32 or TENSOR_FLOAT16",
        ),
        (ONE, 3, Operand(T.TENSOR_FLOAT16, (5,)), "input 3: expected TENSOR_FLOAT32"),
        (ONE, 3, Operand(T.TENSOR_FLOAT32, (4,)), r"input 3: expected shape \[units = 5\], got \[4\]"),
        (ONE, 2, Operand(T.TENSOR_FLOAT32, (5,)), "input 2: expected shape"),
        (ONE, 4, Operand(T.TENSOR_FLOAT32, (3, 5)), r"input 4: expected shape \[batch = 2, units = 5\]"),
        (ONE, 3, Operand(T.TENSOR_FLOAT32, lifetime=OperandLifeTime.NO_VALUE), "input 3: expected a value"),
        (UNI, 0, Operand(T.TENSOR_FLOAT32, (2, 3)), "input 0: expected shape"),
        (UNI, 6, Operand(T.BOOL), "input 6: expected INT32"),
        (BI, 13, Operand(T.INT32), "input 13: expected BOOL"),
        (BI, 10, Operand(T.TENSOR_FLOAT32, (5, 8)), "input 10: expected shape"),
        (BI, 10, Operand(T.TENSOR_FLOAT32, lifetime=OperandLifeTime.NO_VALUE), "inputs 9 to 11: expected"),
        (BI, 9, Operand(T.TENSOR_FLOAT32, lifetime=OperandLifeTime.NO_VALUE), "inputs 9 to 11: expected"),
    ],
)
def test_validator_refuses_with_the_place(
    operation: OperationType, index: int, replacement: Operand, message: str
) -> None:
    inputs = operands_of(operation)
    inputs[index] = replacement
    with pytest.raises(InvalidModel, match=message):
        level_with_outputs(operation, inputs, 2)


def test_constant_arguments_are_checked() -> None:
    with pytest.raises(InvalidModel, match="input 5: expected an activation"):
        level_with_outputs(ONE, operands_of(ONE), 2, {5: 5})
    with pytest.raises(InvalidModel, match="input 6: expected 0"):
        level_with_outputs(UNI, operands_of(UNI), 1, {6: 2})
    with pytest.raises(InvalidModel, match="number of outputs: expected 1 or 3, got 2"):
        level_with_outputs(BI, operands_of(BI), 2, {14: True})
    with pytest.raises(InvalidModel, match="number of outputs: expected 2 or 4, got 3"):
        level_with_outputs(BI, operands_of(BI), 3, {14: False})


def test_layout_decides_about_the_output() -> None:
    output = Operand(T.TENSOR_FLOAT32, (2, 4, 5))
    assert level_with_outputs(UNI, operands_of(UNI), 1, {6: 0}, output) == 3
    with pytest.raises(InvalidModel, match="input 4: expected shape"):
        level_with_outputs(UNI, operands_of(UNI), 1, {6: 1}, output)


def test_unknown_extents_are_left_to_the_execution() -> None:
    inputs = operands_of(ONE)
    inputs[0] = Operand(T.TENSOR_FLOAT32)
    inputs[4] = Operand(T.TENSOR_FLOAT32, (0, 5))
    assert level_with_outputs(ONE, inputs, 2) == 1
    rng = np.random.default_rng(0)
    cell = random_cell(rng, 5, 3, 2)
    with pytest.raises(
        InvalidArgument, match=r"input 4: expected shape \[batch = 1, units = 5\], got \[2, 5\]"
    ):
        run(ONE, [np.zeros((1, 3), np.float32), *cell, np.int32(0)], 2)


def test_missing_values_and_bad_arguments_end_the_execution() -> None:
    rng = np.random.default_rng(0)
    x, cell = np.zeros((2, 3), np.float32), random_cell(rng, 5, 3, 2)
    with pytest.raises(InvalidArgument, match="input 3: expected a value"):
        run(ONE, [x, *cell[:2], None, cell[3], np.int32(0)], 2)
    with pytest.raises(InvalidArgument, match="input 5: expected an activation"):
        run(ONE, [x, *cell, np.int32(7)], 2)
    with pytest.raises(InvalidArgument, match="input 6: expected 0"):
        run(UNI, [x[None], *cell, np.int32(0), np.int32(-1)], 1)
    both = [x[:, None], *cell, *cell, None, None, None, np.int32(0), np.bool_(False), np.bool_(True)]
    with pytest.raises(InvalidArgument, match=r"input 14: .* got 2 outputs"):
        run(BI, both, 2)

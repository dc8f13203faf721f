"""Claims about SVDF: a plain-loop definition over several frames, the state's life, levels and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.recurrent.svdf import OPERATIONS
from aionn.ops.signature import Array, Call, Tensor
from tests.support.contracts import level_of

(CONTRACT,) = OPERATIONS
T = OperandType
BATCH, INPUT, UNITS, RANK, MEMORY = 2, 3, 4, 2, 5
FILTERS = UNITS * RANK


def run(arrays: list[object]) -> tuple[Array, Array]:
    values = [None if a is None else np.asarray(a) for a in arrays]
    assert values[0] is not None
    kind = T.TENSOR_FLOAT16 if values[0].dtype == np.float16 else T.TENSOR_FLOAT32
    call = Call([None if a is None else Tensor(Operand(kind), a) for a in values], [Operand(kind)] * 2)
    assert CONTRACT.shapes is not None
    shapes = CONTRACT.shapes(call)
    state, output = CONTRACT.execute(call)
    assert [state.shape, output.shape] == [tuple(s) for s in shapes]
    return state, output


def random_weights(seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    shapes = ((FILTERS, INPUT), (FILTERS, MEMORY), (UNITS,))
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return a, b, c


def test_frames_follow_the_definition() -> None:
    feature, time, bias = random_weights(1)
    frames = np.random.default_rng(2).standard_normal((8, BATCH, INPUT)).astype(np.float32)
    state = np.zeros((BATCH, MEMORY * FILTERS), np.float32)
    history: list[Array] = []
    for frame in frames:
        before = state.copy()
        state_out, output = run([frame, feature, time, bias, state, np.int32(RANK), np.int32(1)])
        assert np.array_equal(state, before)
        history.append(frame.astype(np.float64) @ feature.T.astype(np.float64))
        expected = np.tile(bias.astype(np.float64), (BATCH, 1))
        for b in range(BATCH):
            for f in range(FILTERS):
                for age, activations in enumerate(reversed(history[-MEMORY:])):
                    expected[b, f // RANK] += activations[b, f] * time[f, MEMORY - 1 - age]
        np.testing.assert_allclose(output, np.maximum(expected, 0), rtol=1e-5, atol=1e-5)
        state = state_out


def test_state_moves_and_leaves_room() -> None:
    feature, time, _ = random_weights(3)
    frame = np.random.default_rng(4).standard_normal((BATCH, INPUT)).astype(np.float32)
    state = np.arange(BATCH * MEMORY * FILTERS, dtype=np.float32).reshape(BATCH, -1)
    after, _ = run([frame, feature, time, None, state, np.int32(RANK), np.int32(0)])
    old, new = (s.reshape(BATCH, FILTERS, MEMORY) for s in (state, after))
    assert np.array_equal(new[:, :, : MEMORY - 2], old[:, :, 1 : MEMORY - 1])
    assert np.array_equal(new[:, :, MEMORY - 2], frame @ feature.T)
    assert not new[:, :, MEMORY - 1].any()


def test_bias_left_out_is_zero() -> None:
    feature, time, bias = random_weights(5)
    frame, state = np.ones((BATCH, INPUT), np.float32), np.ones((BATCH, MEMORY * FILTERS), np.float32)
    tail = [state, np.int32(RANK), np.int32(4)]
    _, without = run([frame, feature, time, None, *tail])
    _, zero = run([frame, feature, time, np.zeros_like(bias), *tail])
    assert np.array_equal(without, zero)


def test_memory_of_one_frame_forgets() -> None:
    feature, time, bias = random_weights(6)
    frame, state = np.ones((BATCH, INPUT), np.float32), np.full((BATCH, FILTERS), 9, np.float32)
    after, _ = run([frame, feature, time[:, :1], bias, state, np.int32(RANK), np.int32(0)])
    assert not after.any()


def test_float16_is_rounded_once_and_empty_batch_is_empty() -> None:
    feature, time, bias = random_weights(7)
    rng = np.random.default_rng(8)
    tensors = [rng.standard_normal((BATCH, INPUT)), feature, time, bias]
    tensors.append(rng.standard_normal((BATCH, MEMORY * FILTERS)))
    half = [a.astype(np.float16) for a in tensors]
    wide = [a.astype(np.float32) for a in half]
    tail = [np.int32(RANK), np.int32(0)]
    for got, want in zip(run([*half, *tail]), run([*wide, *tail]), strict=True):
        assert got.dtype == np.float16
        assert np.array_equal(got, want.astype(np.float16))
    wide[0], wide[4] = wide[0][:0], wide[4][:0]
    assert run([*wide, *tail])[1].shape == (0, UNITS)


def legal_inputs(kind: OperandType = T.TENSOR_FLOAT32) -> list[Operand]:
    shapes = ((BATCH, INPUT), (FILTERS, INPUT), (FILTERS, MEMORY), (UNITS,), (BATCH, MEMORY * FILTERS))
    return [*(Operand(kind, shape) for shape in shapes), Operand(T.INT32), Operand(T.INT32)]


def validate(inputs: list[Operand], constants: dict[int, int] | None = None) -> int:
    return level_of(OperationType.SVDF, inputs, [Operand(inputs[0].type)] * 2, constants)


def test_level_follows_the_type() -> None:
    assert validate(legal_inputs(), {5: RANK, 6: 0}) == 1
    assert validate(legal_inputs(T.TENSOR_FLOAT16)) == 3


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (0, Operand(T.TENSOR_QUANT8_ASYMM, (BATCH, INPUT)), "input 0: expected TENSOR_FLOAT32"),
        (1, Operand(T.TENSOR_FLOAT32, (FILTERS, 9)), r"input 1: expected shape \[filters = 8, input = 3\]"),
        (2, Operand(T.TENSOR_FLOAT32, (9, MEMORY)), r"input 2: expected shape \[filters = 8, memory = 5\]"),
        (4, Operand(T.TENSOR_FLOAT32, (BATCH, 7)), "input 4: expected 40 values, got 7"),
        (4, Operand(T.TENSOR_FLOAT32, lifetime=OperandLifeTime.NO_VALUE), "input 4: expected a value"),
        (3, Operand(T.TENSOR_FLOAT32, (UNITS + 1,)), "input 5: expected 4 units, got 5"),
    ],
)
def test_validator_refuses_with_the_place(index: int, replacement: Operand, message: str) -> None:
    inputs = legal_inputs()
    inputs[index] = replacement
    with pytest.raises(InvalidModel, match=message):
        validate(inputs, {5: RANK})


def test_constant_rank_and_activation_are_checked() -> None:
    for constants, message in (
        ({5: 0}, "input 5: expected a rank of at least 1"),
        ({5: 3}, "input 5: expected a rank that divides 8 filters, got 3"),
        ({6: 5}, "input 6: expected an activation"),
    ):
        with pytest.raises(InvalidModel, match=message):
            validate(legal_inputs(), constants)


def test_bad_run_time_values_end_the_execution() -> None:
    feature, time, bias = random_weights(1)
    frame, state = np.ones((BATCH, INPUT), np.float32), np.ones((BATCH, MEMORY * FILTERS), np.float32)
    for arrays, message in (
        ([frame, feature, time, bias, state, np.int32(3), np.int32(0)], "input 5: expected a rank"),
        ([frame, feature, time, bias, state, np.int32(1), np.int32(0)], "input 3: expected shape"),
        ([frame, feature, time, bias, state[:, 1:], np.int32(2), np.int32(0)], "input 4: expected 40"),
        ([frame, feature, time, bias, state, np.int32(2), np.int32(5)], "input 6: expected an activation"),
        ([frame, feature, time, bias, None, np.int32(2), np.int32(0)], "input 4: expected a value"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            run(arrays)

"""Claims about RANDOM_MULTINOMIAL: its generator, that seeds decide everything, and the distribution."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandType, OperationType
from aionn.ops.signature import Array, Call, Check, Tensor
from aionn.ops.tensors.sampling import OPERATIONS, philox_4x32, uniform_float64

(CONTRACT,) = OPERATIONS
T = OperandType


def draw(logits: Array, count: int, seeds: tuple[int, int]) -> Array:
    arrays = [np.asarray(logits), np.array(count, np.int32), np.array(seeds, np.int32)]
    call = Call([Tensor(Operand(T.TENSOR_FLOAT32), a) for a in arrays], [Operand(T.TENSOR_INT32)])
    assert CONTRACT.shapes is not None
    (shape,) = CONTRACT.shapes(call)
    (samples,) = CONTRACT.execute(call)
    assert samples.shape == tuple(shape)
    assert samples.dtype == np.int32
    return samples


# Published answers of Philox 4x32-10: counter, key, result.
PHILOX = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_generator_is_philox(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    got = philox_4x32(np.array(counter, dtype=np.uint64).reshape(4, 1), key)
    assert got[:, 0].tolist() == list(expected)


def test_stream_takes_two_words_per_number() -> None:
    first, second = uniform_float64((0, 0), 2).tolist()
    words = PHILOX[0][2]
    assert first == (((words[0] & 0xFFFFF) << 32) | words[1]) / 2**52
    assert second == (((words[2] & 0xFFFFF) << 32) | words[3]) / 2**52


def test_negative_seeds_extend_their_sign() -> None:
    (got,) = uniform_float64((-1, -1), 1).tolist()
    counter = np.array([0, 0, 0xFFFFFFFF, 0xFFFFFFFF], dtype=np.uint64).reshape(4, 1)
    words = philox_4x32(counter, (0xFFFFFFFF, 0xFFFFFFFF))[:, 0].tolist()
    assert got == (((words[0] & 0xFFFFF) << 32) | words[1]) / 2**52


def test_a_longer_stream_begins_with_a_shorter_one() -> None:
    assert uniform_float64((7, 9), 1001)[:37].tolist() == uniform_float64((7, 9), 37).tolist()


def test_same_seeds_give_the_same_samples() -> None:
    logits = np.log(np.array([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=np.float32))
    a, b, c = draw(logits, 50, (3, 4)), draw(logits, 50, (3, 4)), draw(logits, 50, (3, 5))
    assert a.tolist() == b.tolist()
    assert a.tolist() != c.tolist()


def test_seeds_of_zero_are_drawn_anew() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    assert draw(logits, 50, (0, 0)).tolist() != draw(logits, 50, (0, 0)).tolist()


def test_samples_follow_the_cumulative_sums() -> None:
    logits = np.random.default_rng(4).standard_normal((3, 6)).astype(np.float32)
    samples = draw(logits, 40, (12, -5))
    numbers = iter(uniform_float64((12, -5), 120).tolist())
    for row, got in zip(logits.astype(np.float64), samples.tolist(), strict=True):
        weights = [float(np.exp(v - row.max())) for v in row]
        for index in got:
            target, total, expected = next(numbers) * sum(weights), 0.0, 0
            for expected, weight in enumerate(weights):  # noqa: B007
                total += weight
                if total > target:
                    break
            assert index == expected


def test_frequencies_approach_the_probabilities() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    logits = (np.log(probabilities) + 100).astype(np.float32)[None]
    counts = np.bincount(draw(logits, 20000, (1, 1))[0], minlength=4) / 20000
    assert np.abs(counts - probabilities).max() < 0.02


def test_class_without_a_finite_logit_is_never_drawn() -> None:
    logits = np.array([[np.inf, 0, -np.inf, 0, np.nan]], dtype=np.float16)
    assert set(draw(logits, 200, (1, 2))[0].tolist()) == {1, 3}


def test_row_without_a_finite_logit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"input 0: .* got none in row 1"):
        draw(np.array([[0.0, 1.0], [np.nan, -np.inf]], np.float32), 3, (1, 2))


def test_no_samples_and_no_batches_are_empty() -> None:
    assert draw(np.zeros((2, 3), np.float32), 0, (1, 2)).shape == (2, 0)
    assert draw(np.zeros((0, 3), np.float32), 5, (1, 2)).shape == (0, 5)


def level_of(logits: Operand, seeds: Operand, count: int | None = None, output: tuple[int, ...] = ()) -> int:
    inputs = [logits, Operand(T.INT32), seeds]
    constant = None if count is None else np.array(count)
    check = Check(
        OperationType.RANDOM_MULTINOMIAL,
        inputs,
        [Operand(T.TENSOR_INT32, output)],
        where="operation 0",
        constant=lambda operand: constant if operand is inputs[1] else None,
    )
    CONTRACT.validate(check)
    return check.level


def test_both_float_types_need_level_3() -> None:
    for logits in (T.TENSOR_FLOAT16, T.TENSOR_FLOAT32):
        assert level_of(Operand(logits, (1, 2)), Operand(T.TENSOR_INT32, (2,)), 4) == 3


def test_validator_refuses_with_the_place() -> None:
    logits, seeds = Operand(T.TENSOR_FLOAT32, (1, 2)), Operand(T.TENSOR_INT32, (2,))
    for a, b, count, message in (
        (Operand(T.TENSOR_INT32, (1, 2)), seeds, 1, "input 0: expected TENSOR_FLOAT16 or TENSOR_FLOAT32"),
        (Operand(T.TENSOR_FLOAT32, (2,)), seeds, 1, "input 0: expected rank 2"),
        (logits, Operand(T.TENSOR_INT32, (3,)), 1, "input 2: expected extent 2"),
        (logits, seeds, -1, "input 1: expected a number of samples, got -1"),
    ):
        with pytest.raises(InvalidModel, match=message):
            level_of(a, b, count)


def test_stated_output_shape_must_follow_from_the_inputs() -> None:
    logits, seeds = Operand(T.TENSOR_FLOAT32, (2, 3)), Operand(T.TENSOR_INT32, (2,))
    assert level_of(logits, seeds, 4, (2, 4)) == 3
    for output, message in (
        ((3, 4), "output 0: expected extent 2 on axis 0"),
        ((2, 5), "output 0: expected extent 4 on axis 1"),
        ((8,), "output 0: expected rank 2"),
    ):
        with pytest.raises(InvalidModel, match=message):
            level_of(logits, seeds, 4, output)

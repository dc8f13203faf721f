"""RANDOM_MULTINOMIAL: draws class indexes with given log-probabilities.

Owns the operation and its generator, the counter-based Philox 4x32-10. The same seeds give the same samples, on every machine and
in every run; only when both seeds are 0 does the operation take randomness from the system, because the spec demands it.

Invariants:
1. Sample ``s`` of batch ``b`` depends on the seeds, on ``b * samples + s`` and on the logits of batch ``b`` alone.
2. A class whose logit is not finite is never drawn.

Source: RANDOM_MULTINOMIAL of the NN HAL 1.2; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"; TensorFlow's use
of it (what the seeds set, how two words become a float64).
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from aionn.hal import OperandType, OperationType
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape

__all__ = ["OPERATIONS"]

_Words = npt.NDArray[np.uint64]
_ROUNDS = 10
_MASK = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox_4x32(counters: _Words, key: tuple[int, int]) -> _Words:
    """Philox with four 32-bit words and ten rounds.

    Args:
        counters: 32-bit values, shape [4, count].
        key: Two 32-bit values.

    Returns:
        32-bit values, shape [4, count].
    """
    c0, c1, c2, c3 = counters
    for turn in range(_ROUNDS):
        key0, key1 = (np.uint64((k + turn * step) & 0xFFFF_FFFF) for k, step in zip(key, _KEY_STEPS))
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ key0,
            product1 & _MASK,
            (product0 >> _HALF) ^ c3 ^ key1,
            product0 & _MASK,
        )
    return np.stack([c0, c1, c2, c3])


def uniform_float64(seeds: tuple[int, int], count: int) -> npt.NDArray[np.float64]:
    """The first ``count`` numbers in [0, 1) of the stream that two signed seeds set.

    The first seed is the key, the second the upper half of the counter; the counter's lower half counts groups of four words. Two
    words make a number: 20 bits of the first, then the 32 of the second.
    """
    groups = np.arange((count + 1) // 2, dtype=np.uint64)
    key, upper = (seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds)
    counters = np.empty((4, len(groups)), dtype=np.uint64)
    counters[0], counters[1] = groups & _MASK, groups >> _HALF
    counters[2], counters[3] = upper & 0xFFFF_FFFF, upper >> 32
    words = philox_4x32(counters, (key & 0xFFFF_FFFF, key >> 32)).T.reshape(-1, 2)
    mantissas = ((words[:, 0] & np.uint64(0xF_FFFF)) << _HALF) | words[:, 1]
    return mantissas[:count].astype(np.float64) * 2.0**-52


def _validate(check: Check) -> None:
    check.needs(3)
    check.counts(3, 1)
    check.input_type(0, (OperandType.TENSOR_FLOAT16, OperandType.TENSOR_FLOAT32))
    check.input_types(OperandType.INT32, OperandType.TENSOR_INT32, start=1)
    check.output_types(OperandType.TENSOR_INT32)
    check.input_rank(0, 2)
    check.input_rank(2, 1)
    check.extent("input 2", check.inputs[2], 0, 2)
    count = check.constant(1)
    if count is not None:
        check.require(count.item() >= 0, "input 1", "a number of samples", count.item())
    check.output_rank(0, 2)
    if check.inputs[0].dimensions and check.inputs[0].dimensions[0]:
        check.extent("output 0", check.outputs[0], 0, check.inputs[0].dimensions[0])
    if count is not None:
        check.extent("output 0", check.outputs[0], 1, count.item())


def _shapes(call: Call) -> list[Shape]:
    logits, count, seeds = call.array(0), int(call.scalar(1)), call.array(2)
    if logits.ndim != 2:
        call.refuse(f"input 0: expected rank 2, got shape {list(logits.shape)}")
    if count < 0:
        call.refuse(f"input 1: expected a number of samples, got {count}")
    if seeds.shape != (2,):
        call.refuse(f"input 2: expected shape [2], got {list(seeds.shape)}")
    return [(len(logits), count)]


def _execute(call: Call) -> list[Array]:
    logits, count = call.array(0).astype(np.float32), int(call.scalar(1))
    first, second = (int(seed) for seed in call.array(2))
    if first == 0 and second == 0:
        first, second = secrets.randbits(64), secrets.randbits(64)
    output = np.empty((len(logits), count), dtype=np.int32)
    uniform = uniform_float64((first, second), output.size).reshape(output.shape)
    for batch, row in enumerate(logits):
        finite = np.isfinite(row)
        if not finite.any():
            call.refuse(f"input 0: expected a finite logit in every row, got none in row {batch}")
        exponents = np.where(finite, row, -np.inf).astype(np.float64)
        cumulative = np.add.accumulate(np.exp(exponents - exponents.max()))
        output[batch] = np.searchsorted(cumulative, uniform[batch] * cumulative[-1], side="right")
    return [output]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.RANDOM_MULTINOMIAL,
        validate=_validate,
        shapes=_shapes,
        execute=_execute,
        doc="""Draws samples from a multinomial distribution.

output[b, s] = the number of classes c whose sum of p[b, 0..c] is at most u[b * samples + s] * sum of p[b], where
p[b, c] = exp(logits[b, c] - max of logits[b]), computed in float64, and u is the Philox stream that the seeds set.

Inputs:
    0: logits [batches, classes], float16 or float32; need not be normalised.
    1: number of samples per batch, INT32, not negative.
    2: seeds, TENSOR_INT32 [2]; both 0 means random seeds from the system.

Outputs:
    0: class indexes, TENSOR_INT32 [batches, samples].

Quantisation: none; scale and zero point of the output are free.

Types by feature level: 3 float16, float32.

Stricter than the spec: a batch without any finite logit is refused, where the spec's kernel answers an index that names no class.

Source: NN HAL 1.2, ``OperationType::RANDOM_MULTINOMIAL``.
""",
    ),
)

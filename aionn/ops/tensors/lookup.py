"""Operations that pick values by index, key, rank or hash: GATHER, EMBEDDING_LOOKUP, HASHTABLE_LOOKUP, TOPK_V2, LSH_PROJECTION.

Owns their contracts and kernels; the hash is in ``aionn.ops.tensors.fingerprint``. Nothing here computes with values but TOPK_V2,
which compares them, and LSH_PROJECTION, which sums hashes.

Invariants:
1. An index from a run-time tensor is checked before it is used; none counts from the end.
2. Values pass unchanged, so their quantisation must be the same on both sides.

Source: the operations' entries in the NN HAL's specification and its CPU operations (order of equal values, type of sums).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType, combine_dimensions
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape
from aionn.ops.tensors.fingerprint import fingerprint64

__all__ = ["OPERATIONS"]

_INT32 = OperandType.TENSOR_INT32

_SPARSE_DEPRECATED = 1
_DENSE = 2
_SPARSE = 3
_HASH_BITS_MAX = 32
"""A signature is one int32."""


def _require_indexes(call: Call, index: int, indexes: Array, extent: int) -> None:
    """Ends the execution unless every index is in [0, extent)."""
    if indexes.size and (indexes.min() < 0 or indexes.max() >= extent):
        bad = indexes[(indexes < 0) | (indexes >= extent)].reshape(-1)[0]
        call.refuse(f"input {index}: expected indexes from 0 to {extent - 1}, got {bad}")


def _expect_output(check: Check, index: int, shape: Shape) -> None:
    """Refuses the model where an output's stated shape contradicts the one that follows from the inputs; 0 is unknown in both."""
    stated = check.outputs[index].dimensions
    fits = combine_dimensions(stated, shape) is not None
    check.require(fits, f"output {index}", f"shape {list(shape)}", list(stated))


# GATHER

_VALUE_LEVELS = {
    OperandType.TENSOR_FLOAT16: 3,
    OperandType.TENSOR_FLOAT32: 3,
    OperandType.TENSOR_INT32: 3,
    OperandType.TENSOR_QUANT8_ASYMM: 3,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
}


def _validate_gather(check: Check) -> None:
    check.needs(3)
    check.counts(3, 1)
    value_type = check.input_type(0, _VALUE_LEVELS)
    check.input_types(OperandType.INT32, _INT32, start=1)
    check.output_types(value_type)
    check.same_quantization("output 0", check.inputs[0], check.outputs[0])
    values, axis, indexes = check.inputs[0].dimensions, check.constant(1), check.inputs[2].dimensions
    rank = len(values)
    if rank and axis is not None:
        at = axis.item()
        check.require(-rank <= at < rank, "input 1", f"an axis from {-rank} to {rank - 1}", at)
        if indexes:
            _expect_output(check, 0, (*values[: at % rank], *indexes, *values[at % rank + 1 :]))


def _gather_axis(call: Call) -> int:
    rank, axis = call.array(0).ndim, int(call.scalar(1))
    if not -rank <= axis < rank:
        call.refuse(f"input 1: expected an axis from {-rank} to {rank - 1}, got {axis}")
    return axis % rank


def _shape_gather(call: Call) -> list[Shape]:
    axis, shape = _gather_axis(call), call.array(0).shape
    return [(*shape[:axis], *call.array(2).shape, *shape[axis + 1 :])]


def _execute_gather(call: Call) -> list[Array]:
    values, indexes, axis = call.array(0), call.array(2), _gather_axis(call)
    _require_indexes(call, 2, indexes, values.shape[axis])
    return [np.take(values, indexes, axis=axis)]


# EMBEDDING_LOOKUP


def _validate_embedding_lookup(check: Check) -> None:
    check.counts(2, 1)
    value_type = check.input_type(
        1,
        {
            OperandType.TENSOR_FLOAT32: 1,
            OperandType.TENSOR_INT32: 3,
            OperandType.TENSOR_QUANT8_ASYMM: 3,
            OperandType.TENSOR_FLOAT16: 4,
            OperandType.TENSOR_QUANT8_ASYMM_SIGNED: 4,
        },
    )
    check.input_types(_INT32)
    check.output_types(value_type)
    check.input_rank(0, 1)
    check.require(
        len(check.inputs[1].dimensions) != 1,
        "input 1",
        "rank of at least 2",
        list(check.inputs[1].dimensions),
    )
    check.same_quantization("output 0", check.inputs[1], check.outputs[0])
    lookups, values = check.inputs[0].dimensions, check.inputs[1].dimensions
    if values:
        _expect_output(check, 0, (*(lookups or (0,)), *values[1:]))


def _shape_embedding_lookup(call: Call) -> list[Shape]:
    lookups, values = call.array(0), call.array(1)
    if lookups.ndim != 1:
        call.refuse(f"input 0: expected rank 1, got shape {list(lookups.shape)}")
    if values.ndim < 2:
        call.refuse(f"input 1: expected rank of at least 2, got shape {list(values.shape)}")
    return [(len(lookups), *values.shape[1:])]


def _execute_embedding_lookup(call: Call) -> list[Array]:
    lookups, values = call.array(0), call.array(1)
    _require_indexes(call, 0, lookups, len(values))
    return [np.take(values, lookups, axis=0)]


# HASHTABLE_LOOKUP


def _validate_hashtable_lookup(check: Check) -> None:
    check.counts(3, 2)
    check.input_types(_INT32, _INT32)
    value_type = check.input_type(
        2, {OperandType.TENSOR_FLOAT32: 1, _INT32: 1, OperandType.TENSOR_QUANT8_ASYMM: 1}
    )
    check.output_types(value_type, OperandType.TENSOR_QUANT8_ASYMM)
    check.input_rank(0, 1)
    check.input_rank(1, 1)
    if check.inputs[1].dimensions and check.inputs[1].dimensions[0]:
        check.extent("input 2", check.inputs[2], 0, check.inputs[1].dimensions[0])
    check.same_quantization("output 0", check.inputs[2], check.outputs[0])
    check.same_quantization("output 1", Operand(OperandType.TENSOR_QUANT8_ASYMM, scale=1.0), check.outputs[1])
    lookups, values = check.inputs[0].dimensions or (0,), check.inputs[2].dimensions
    if values:
        _expect_output(check, 0, (*lookups, *values[1:]))
    _expect_output(check, 1, lookups)


def _shape_hashtable_lookup(call: Call) -> list[Shape]:
    lookups, keys, values = call.array(0), call.array(1), call.array(2)
    for index, array in enumerate((lookups, keys)):
        if array.ndim != 1:
            call.refuse(f"input {index}: expected rank 1, got shape {list(array.shape)}")
    if values.ndim < 1 or len(values) != len(keys):
        call.refuse(f"input 2: expected {len(keys)} rows, one per key, got shape {list(values.shape)}")
    return [(len(lookups), *values.shape[1:]), (len(lookups),)]


def _execute_hashtable_lookup(call: Call) -> list[Array]:
    lookups, keys, values = call.array(0), call.array(1), call.array(2)
    if not np.all(keys[1:] >= keys[:-1]):
        call.refuse("input 1: expected keys in ascending order, got keys out of order")
    output = np.zeros((len(lookups), *values.shape[1:]), dtype=values.dtype)
    if not len(keys):
        return [output, np.zeros(len(lookups), dtype=np.uint8)]
    rows = np.minimum(np.searchsorted(keys, lookups), len(keys) - 1)
    hits = keys[rows] == lookups
    output[hits] = values[rows[hits]]
    return [output, hits.astype(np.uint8)]


# TOPK_V2


def _validate_topk(check: Check) -> None:
    check.needs(3)
    check.counts(2, 2)
    value_type = check.input_type(0, _VALUE_LEVELS)
    check.input_types(OperandType.INT32, start=1)
    check.output_types(value_type, _INT32)
    check.same_quantization("output 0", check.inputs[0], check.outputs[0])
    k, dimensions = check.constant(1), check.inputs[0].dimensions
    if k is not None:
        check.require(k.item() > 0, "input 1", "at least 1", k.item())
        if dimensions and dimensions[-1]:
            check.require(
                k.item() <= dimensions[-1], "input 1", f"at most the last extent {dimensions[-1]}", k.item()
            )

    if dimensions:
        shape = (*dimensions[:-1], 0 if k is None else k.item())
        _expect_output(check, 0, shape)
        _expect_output(check, 1, shape)


def _shape_topk(call: Call) -> list[Shape]:
    shape, k = call.array(0).shape, int(call.scalar(1))
    if not shape:
        call.refuse("input 0: expected rank of at least 1, got rank 0")
    if not 0 < k <= shape[-1]:
        call.refuse(f"input 1: expected a number from 1 to the last extent {shape[-1]}, got {k}")
    return [(*shape[:-1], k)] * 2


def _execute_topk(call: Call) -> list[Array]:
    values, k = call.array(0), int(call.scalar(1))
    # A stable ascending sort read backwards: of equal values the one with the larger index comes first, as the spec demands.
    order = np.argsort(values, axis=-1, kind="stable")[..., ::-1][..., :k]
    return [np.take_along_axis(values, order, axis=-1), order.astype(np.int32)]


# LSH_PROJECTION


def _validate_lsh_projection(check: Check) -> None:
    check.counts(4, 1)
    hash_type = check.input_type(0, {OperandType.TENSOR_FLOAT32: 1, OperandType.TENSOR_FLOAT16: 3})
    check.input_type(
        1,
        {
            OperandType.TENSOR_FLOAT16: 3,
            OperandType.TENSOR_FLOAT32: 1,
            _INT32: 1,
            OperandType.TENSOR_QUANT8_ASYMM: 1,
        },
    )
    check.input_types(hash_type, OperandType.INT32, start=2)
    check.output_types(_INT32)
    for index in (0, 1, 3):
        check.require(not check.is_omitted(index), f"input {index}", "a value", "none")
    check.input_rank(0, 2)
    if len(check.inputs[0].dimensions) == 2:
        bits = check.inputs[0].dimensions[1]
        check.require(bits <= _HASH_BITS_MAX, "input 0", f"at most {_HASH_BITS_MAX} bits per hash", bits)
    kind = check.constant(3)
    if kind is not None:
        _check_kind(check, kind.item())


def _check_kind(check: Check, kind: int) -> None:
    check.require(
        kind in (_SPARSE_DEPRECATED, _DENSE, _SPARSE),
        "input 3",
        "1, 2 or 3 (sparse, dense, sparse with offset)",
        kind,
    )
    hashes = check.inputs[0].dimensions
    if len(hashes) == 2:
        _expect_output(check, 0, (math.prod(hashes),) if kind == _DENSE else hashes[:1])
    if kind == _DENSE:
        check.require(not check.is_omitted(2), "input 2", "weights, since the projection is dense", "none")
        check.input_rank(2, 1)
        if check.inputs[1].dimensions and check.inputs[1].dimensions[0]:
            check.extent("input 2", check.inputs[2], 0, check.inputs[1].dimensions[0])
    else:
        # A subgraph's input may still be left out by the request.
        lifetime = check.inputs[2].lifetime
        absent = lifetime in (OperandLifeTime.NO_VALUE, OperandLifeTime.SUBGRAPH_INPUT)
        check.require(
            absent, "input 2", "no weights, since the projection is sparse", f"lifetime {lifetime.name}"
        )


def _shape_lsh_projection(call: Call) -> list[Shape]:
    hashes, values, kind = call.array(0), call.array(1), int(call.scalar(3))
    if hashes.ndim != 2 or hashes.shape[1] > _HASH_BITS_MAX:
        call.refuse(
            f"input 0: expected shape [hashes, at most {_HASH_BITS_MAX} bits], got {list(hashes.shape)}"
        )
    if values.ndim < 1:
        call.refuse("input 1: expected rank of at least 1, got rank 0")
    if kind == _DENSE:
        if not call.has(2) or call.array(2).shape != values.shape[:1]:
            got = list(call.array(2).shape) if call.has(2) else "none"
            call.refuse(f"input 2: expected weights of shape {list(values.shape[:1])}, got {got}")
        return [(hashes.size,)]
    if kind not in (_SPARSE_DEPRECATED, _SPARSE):
        call.refuse(f"input 3: expected 1, 2 or 3 (sparse, dense, sparse with offset), got {kind}")
    if call.has(2):
        call.refuse("input 2: expected no weights, since the projection is sparse, got a tensor")
    return [(len(hashes),)]


def _projected_bits(
    seeds: npt.NDArray[np.float32], values: Array, weights: Array | None
) -> npt.NDArray[np.bool_]:
    """For each seed, whether the weighted sum over all rows of hash(seed, row) is positive."""
    row_size_bytes = values.itemsize * math.prod(values.shape[1:])
    row_bytes = np.frombuffer(values.tobytes(), dtype=np.uint8).reshape(len(values), row_size_bytes)
    seed_bytes = np.ascontiguousarray(seeds).astype("<f4").view(np.uint8).reshape(len(seeds), 4)
    pairs = np.empty((len(seeds), len(row_bytes), 4 + row_bytes.shape[1]), dtype=np.uint8)
    pairs[:, :, :4] = seed_bytes[:, None, :]
    pairs[:, :, 4:] = row_bytes
    hashes = fingerprint64(pairs.reshape(-1, pairs.shape[2])).view(np.int64)
    terms = hashes.reshape(len(seeds), len(row_bytes)).astype(np.float64)
    if weights is not None:
        terms = terms * weights.astype(np.float64)
    if not terms.shape[1]:
        return np.zeros(len(seeds), dtype=np.bool_)
    # The definition adds one term after the other; numpy's sum would add pairwise, and a sign could differ.
    positive: npt.NDArray[np.bool_] = np.add.accumulate(terms, axis=1)[:, -1] > 0
    return positive


def _execute_lsh_projection(call: Call) -> list[Array]:
    hashes, values, kind = call.array(0), call.array(1), int(call.scalar(3))
    weights = call.array(2) if call.has(2) else None
    count, bit_count = hashes.shape
    bits = _projected_bits(hashes.reshape(-1).astype(np.float32), values, weights)
    if kind == _DENSE:
        return [bits.astype(np.int32)]
    places = np.arange(bit_count - 1, -1, -1, dtype=np.int64)
    signatures = (bits.reshape(count, bit_count).astype(np.int64) << places).sum(axis=1)
    if kind == _SPARSE:
        signatures += np.arange(count, dtype=np.int64) << np.int64(bit_count)
    return [signatures.astype(np.uint32).view(np.int32)]


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.GATHER,
        validate=_validate_gather,
        shapes=_shape_gather,
        execute=_execute_gather,
        doc="""Picks slices along an axis by index.

output[a..., i..., b...] = input0[a..., indices[i...], b...], the axis being that of indices[i...] in input 0.

Inputs:
    0: values, rank n of at least 1.
    1: axis, INT32 in [-n, n); negative ones count from the end.
    2: indices, TENSOR_INT32 of any shape, each in [0, extent of the axis).

Outputs:
    0: values of input 0's type, shape input0[:axis] + indices + input0[axis + 1:].

Quantisation: output 0 has scale and zero point of input 0.

Types by feature level: 3 float16, float32, int32, quant8 asymm; 4 quant8 asymm signed.

Stricter than the spec: none. An index out of range ends the execution.

Source: NN HAL 1.2, ``OperationType::GATHER``.
""",
    ),
    OperationContract(
        type=OperationType.EMBEDDING_LOOKUP,
        validate=_validate_embedding_lookup,
        shapes=_shape_embedding_lookup,
        execute=_execute_embedding_lookup,
        doc="""Picks slices along the first axis by index.

output[i, ...] = values[lookups[i], ...].

Inputs:
    0: lookups, TENSOR_INT32 [k], each in [0, extent of values' first axis).
    1: values, rank of at least 2.

Outputs:
    0: values of input 1's type, shape [k] + input1[1:].

Quantisation: output 0 has scale and zero point of input 1.

Types by feature level: 1 float32; 3 int32, quant8 asymm; 4 float16, quant8 asymm signed.

Stricter than the spec: none. An index out of range ends the execution.

Source: NN HAL 1.0, ``OperationType::EMBEDDING_LOOKUP``.
""",
    ),
    OperationContract(
        type=OperationType.HASHTABLE_LOOKUP,
        validate=_validate_hashtable_lookup,
        shapes=_shape_hashtable_lookup,
        execute=_execute_hashtable_lookup,
        doc="""Picks slices along the first axis by key.

output[i, ...] = values[j, ...] and hits[i] = 1 where keys[j] == lookups[i]; zero bytes and hits[i] = 0 where there is no such key.

Inputs:
    0: lookups, TENSOR_INT32 [k].
    1: keys, TENSOR_INT32 [n], ascending.
    2: values, shape [n, ...].

Outputs:
    0: values of input 2's type, shape [k, ...].
    1: hits, TENSOR_QUANT8_ASYMM [k], 1 for a hit and 0 for a miss.

Quantisation: output 0 has scale and zero point of input 2, a miss gives the byte 0 whatever the zero point; output 1 has scale 1
and zero point 0.

Types by feature level: 1 float32, int32, quant8 asymm.

Stricter than the spec's kernel: keys out of order end the execution (the spec demands the order, its kernel returns misses).
Looser: values of rank 1 are accepted, as by the spec's kernel.

Source: NN HAL 1.0, ``OperationType::HASHTABLE_LOOKUP``.
""",
    ),
    OperationContract(
        type=OperationType.LSH_PROJECTION,
        validate=_validate_lsh_projection,
        shapes=_shape_lsh_projection,
        execute=_execute_lsh_projection,
        doc="""Projects the input to bits by locality sensitive hashing.

bit(seed) = sum over i of weight[i] * hash(seed, input[i]) > 0, where hash is FarmHash's Fingerprint64, read as a signed integer, of
the seed's four bytes as float32 followed by the bytes of input[i]; the sum is one of float64, in order.
Dense: output[j * bits + b] = bit(functions[j, b]). Sparse: output[j] = the bits of function j, the first one highest, plus
j << bits unless the deprecated kind is chosen.

Inputs:
    0: functions, float32 or float16 [functions, bits], at most 32 bits.
    1: input, rank of at least 1, float16, float32, int32 or quant8 asymm; its bytes count, not its quantisation.
    2: weights, of input 0's type, [extent of input 1's first axis]; given for dense, left out for sparse.
    3: kind, INT32: 1 sparse (deprecated, without offset), 2 dense, 3 sparse.

Outputs:
    0: TENSOR_INT32, [functions] for sparse, [functions * bits] for dense.

Quantisation: none; scale and zero point of input 1 are free.

Types by feature level: 1 float32 functions; 3 float16 functions or input.

Looser than the spec: kind 3 is accepted from level 1 on, as by the spec's validator. Stricter: the kind's presence of weights is
demanded as by the spec's kernel, where the text allows weights to be left out of either.

Source: NN HAL 1.0 and 1.2, ``OperationType::LSH_PROJECTION``.
""",
    ),
    OperationContract(
        type=OperationType.TOPK_V2,
        validate=_validate_topk,
        shapes=_shape_topk,
        execute=_execute_topk,
        doc="""The k largest values along the last axis, in descending order.

values[..., i] = input[..., indices[..., i]]; of equal values the one with the larger index comes first. NaN counts as largest.

Inputs:
    0: input, rank of at least 1.
    1: k, INT32, from 1 to the last extent.

Outputs:
    0: values of input 0's type, shape of input 0 with the last extent k.
    1: indices, TENSOR_INT32 of the same shape.

Quantisation: output 0 has scale and zero point of input 0.

Types by feature level: 3 float16, float32, int32, quant8 asymm; 4 quant8 asymm signed.

Stricter than the spec: none.

Source: NN HAL 1.2, ``OperationType::TOPK_V2``.
""",
    ),
)

"""Claims about GATHER, the lookups, TOPK_V2 and LSH_PROJECTION that the conformance data leave open."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.signature import Array, Call, Tensor
from aionn.ops.tensors.fingerprint import fingerprint64
from aionn.ops.tensors.lookup import OPERATIONS
from tests.support.contracts import level_of

CONTRACTS = {contract.type: contract for contract in OPERATIONS}
T = OperandType
I32 = T.TENSOR_INT32
F32 = T.TENSOR_FLOAT32
Q8 = T.TENSOR_QUANT8_ASYMM
Q8S = T.TENSOR_QUANT8_ASYMM_SIGNED
ABSENT = OperandLifeTime.NO_VALUE


def run(operation: OperationType, *arrays: Array | None) -> list[Array]:
    """Runs a kernel and checks the shape rule against it."""
    inputs = [None if a is None else Tensor(Operand(F32), np.asarray(a)) for a in arrays]
    contract = CONTRACTS[operation]
    call = Call(inputs, [Operand(F32)] * 2)
    assert contract.shapes is not None
    shapes = contract.shapes(call)
    results = contract.execute(call)
    assert [r.shape for r in results] == [tuple(s) for s in shapes]
    return list(results)


def ints(*values: int) -> Array:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("value_type", "level"),
    [(T.TENSOR_FLOAT16, 3), (F32, 3), (I32, 3), (Q8, 3), (Q8S, 4)],
)
def test_gather_level_follows_its_type(value_type: OperandType, level: int) -> None:
    value = Operand(value_type, (2, 3))
    inputs = [value, Operand(T.INT32), Operand(I32, (2,))]
    assert level_of(OperationType.GATHER, inputs, [value]) == level


@pytest.mark.parametrize(
    ("value_type", "level"), [(F32, 1), (I32, 3), (Q8, 3), (T.TENSOR_FLOAT16, 4), (Q8S, 4)]
)
def test_embedding_lookup_level_follows_its_type(value_type: OperandType, level: int) -> None:
    value, output = Operand(value_type, (4, 3)), Operand(value_type, (2, 3))
    assert level_of(OperationType.EMBEDDING_LOOKUP, [Operand(I32, (2,)), value], [output]) == level


def test_gather_counts_negative_axis_from_the_end() -> None:
    values = np.arange(24).reshape(2, 3, 4)
    indexes = np.array([[3, 0], [1, 1]], dtype=np.int32)
    (got,) = run(OperationType.GATHER, values, ints(-1), indexes)
    assert np.array_equal(got, values[:, :, indexes])


def test_gather_of_no_indexes_is_empty() -> None:
    (got,) = run(OperationType.GATHER, np.zeros((2, 3), np.float32), ints(1), ints())
    assert got.shape == (2, 0)


@pytest.mark.parametrize("index", [-1, 3])
def test_gather_refuses_an_index_out_of_range(index: int) -> None:
    with pytest.raises(InvalidArgument, match=f"input 2: expected indexes from 0 to 2, got {index}"):
        run(OperationType.GATHER, np.zeros((3, 2)), ints(0), ints(0, index))


def test_gather_refuses_an_axis_out_of_range_when_constant_and_when_not() -> None:
    value = Operand(F32, (2, 3))
    inputs = [value, Operand(T.INT32), Operand(I32, (2,))]
    with pytest.raises(InvalidModel, match="input 1: expected an axis from -2 to 1, got 2"):
        level_of(OperationType.GATHER, inputs, [value], {1: 2})
    with pytest.raises(InvalidArgument, match="input 1: expected an axis from -2 to 1, got -3"):
        run(OperationType.GATHER, np.zeros((2, 3)), ints(-3), ints(0))


@pytest.mark.parametrize("index", [-1, 4])
def test_embedding_lookup_refuses_an_index_out_of_range(index: int) -> None:
    with pytest.raises(InvalidArgument, match=f"input 0: .* got {index}"):
        run(OperationType.EMBEDDING_LOOKUP, ints(index), np.zeros((4, 2)))


def test_embedding_lookup_refuses_values_without_rows() -> None:
    with pytest.raises(InvalidModel, match="input 1: expected rank of at least 2"):
        level_of(OperationType.EMBEDDING_LOOKUP, [Operand(I32, (2,)), Operand(F32, (4,))], [Operand(F32)])


def test_values_keep_their_quantization() -> None:
    value = Operand(Q8, (4, 2), scale=0.5, zero_point=3)
    other = Operand(Q8, (4, 2), scale=0.5, zero_point=4)
    index = Operand(I32, (4,))
    hits = Operand(Q8, (4,), scale=1.0)
    for operation, inputs, outputs in (
        (OperationType.GATHER, [value, Operand(T.INT32), index], [other]),
        (OperationType.EMBEDDING_LOOKUP, [index, value], [other]),
        (OperationType.HASHTABLE_LOOKUP, [index, index, value], [other, hits]),
        (OperationType.TOPK_V2, [value, Operand(T.INT32)], [other, index]),
    ):
        with pytest.raises(InvalidModel, match=r"output 0: expected scale 0\.5 and zero point 3"):
            level_of(operation, inputs, outputs)


def test_hits_have_scale_1_and_zero_point_0() -> None:
    index, value = Operand(I32, (4,)), Operand(F32, (4, 2))
    with pytest.raises(InvalidModel, match=r"output 1: expected scale 1\.0 and zero point 0"):
        level_of(OperationType.HASHTABLE_LOOKUP, [index, index, value], [value, Operand(Q8, (4,), scale=0.5)])


def test_hashtable_miss_is_zero_bytes() -> None:
    values = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.uint8)
    got, hits = run(OperationType.HASHTABLE_LOOKUP, ints(7, -2, 8, 100), ints(-2, 7, 9), values)
    assert got.tolist() == [[3, 4], [1, 2], [0, 0], [0, 0]]
    assert hits.tolist() == [1, 1, 0, 0]


def test_hashtable_without_keys_misses_always() -> None:
    got, hits = run(OperationType.HASHTABLE_LOOKUP, ints(1, 2), ints(), np.zeros((0, 3), np.float32))
    assert got.shape == (2, 3)
    assert hits.tolist() == [0, 0]


def test_hashtable_refuses_keys_out_of_order() -> None:
    with pytest.raises(InvalidArgument, match="input 1: expected keys in ascending order"):
        run(OperationType.HASHTABLE_LOOKUP, ints(1), ints(2, 1), np.zeros((2, 1)))


def test_topk_puts_the_larger_index_first_among_equals() -> None:
    values, indexes = run(OperationType.TOPK_V2, np.array([[2, 7, 7, 1, 7]], np.int32), ints(4))
    assert values.tolist() == [[7, 7, 7, 2]]
    assert indexes.tolist() == [[4, 2, 1, 0]]


def test_topk_equals_a_sort_of_pairs() -> None:
    rows = np.random.default_rng(5).integers(-3, 4, (20, 9)).astype(np.int8)
    values, indexes = run(OperationType.TOPK_V2, rows, ints(6))
    for row, got_values, got_indexes in zip(rows.tolist(), values.tolist(), indexes.tolist(), strict=True):
        pairs = sorted(((v, i) for i, v in enumerate(row)), reverse=True)[:6]
        assert list(zip(got_values, got_indexes, strict=True)) == pairs


@pytest.mark.parametrize("k", [0, -1, 4])
def test_topk_refuses_an_impossible_k_when_constant_and_when_not(k: int) -> None:
    value = Operand(F32, (2, 3))
    with pytest.raises(InvalidModel, match="input 1"):
        level_of(OperationType.TOPK_V2, [value, Operand(T.INT32)], [value, Operand(I32)], {1: k})
    with pytest.raises(InvalidArgument, match=f"input 1: .* got {k}"):
        run(OperationType.TOPK_V2, np.zeros((2, 3)), ints(k))


# What the published implementation answers, for lengths of each of its cases.
FINGERPRINTS = {
    "": 0x9AE16A3B2F90404F,
    "ab": 12289600257749001502,
    "farm" * 3: 6568574825596011902,
    "farm-hash" * 2: 555207453625488016,
    "farm-hash" * 5: 11129922458326124614,
    "0123456789abcdef" * 4: 18366880019007039744,
    "farm-hash" * 8: 2728629782794997326,
    "test": 8581389452482819506,
    "test" * 8: -4196240717365766262,
    "test" * 64: 3500507768004279527,
}


@pytest.mark.parametrize("text", FINGERPRINTS)
def test_fingerprint_is_farmhash(text: str) -> None:
    row = np.frombuffer(text.encode(), dtype=np.uint8)
    (got,) = fingerprint64(np.stack([row]))
    assert int(got) == FINGERPRINTS[text] % 2**64


def test_fingerprint_of_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(3)
    for length in (1, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 300):
        rows = rng.integers(0, 256, (5, length), dtype=np.uint8)
        alone = [int(fingerprint64(row[None])[0]) for row in rows]
        assert fingerprint64(rows).tolist() == alone
        assert len(set(alone)) > 1


@pytest.mark.parametrize("value_dtype", [np.float16, np.float32, np.int32, np.uint8])
def test_projection_follows_its_definition(value_dtype: type) -> None:
    rng = np.random.default_rng(11)
    functions = rng.standard_normal((3, 5)).astype(np.float32)
    values = (rng.standard_normal((4, 2, 3)) * 50).astype(value_dtype)
    weights = rng.standard_normal(4).astype(np.float32)

    def bit(seed: float, weighted: bool) -> int:
        score = 0.0
        for row, weight in zip(values, weights, strict=True):
            key = np.frombuffer(struct.pack("<f", seed) + row.tobytes(), dtype=np.uint8)
            signed = int(fingerprint64(key[None]).view(np.int64)[0])
            score += float(weight) * float(signed) if weighted else float(signed)
        return int(score > 0)

    (dense,) = run(OperationType.LSH_PROJECTION, functions, values, weights, ints(2))
    assert dense.tolist() == [bit(seed, True) for seed in functions.reshape(-1).tolist()]
    plain = [int("".join(str(bit(s, False)) for s in row), 2) for row in functions.tolist()]
    (deprecated,) = run(OperationType.LSH_PROJECTION, functions, values, None, ints(1))
    assert deprecated.tolist() == plain
    (sparse,) = run(OperationType.LSH_PROJECTION, functions, values, None, ints(3))
    assert sparse.tolist() == [p + (j << 5) for j, p in enumerate(plain)]


def test_projection_with_32_bits_fills_the_sign() -> None:
    functions = np.random.default_rng(2).standard_normal((20, 32)).astype(np.float32)
    values = np.arange(3, dtype=np.int32)
    (signatures,) = run(OperationType.LSH_PROJECTION, functions, values, None, ints(1))
    (bits,) = run(OperationType.LSH_PROJECTION, functions, values, np.ones(3, np.float32), ints(2))
    assert signatures.dtype == np.int32
    assert [s % 2**32 for s in signatures.tolist()] == [
        int("".join(map(str, row)), 2) for row in bits.reshape(20, 32).tolist()
    ]
    assert (signatures < 0).any()


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        (0, Operand(F32, (4,)), "input 3: expected 1, 2 or 3"),
        (4, Operand(F32, (4,)), "input 3: expected 1, 2 or 3"),
        (2, Operand(F32, lifetime=ABSENT), "input 2: expected weights"),
        (2, Operand(F32, (5,)), "input 2: expected extent 4"),
        (1, Operand(F32, (4,), lifetime=OperandLifeTime.CONSTANT_COPY), "input 2: expected no weights"),
        (3, Operand(F32, (4,)), "input 2: expected no weights"),
    ],
)
def test_projection_kind_decides_about_weights(kind: int, weights: Operand, message: str) -> None:
    inputs = [Operand(F32, (3, 2)), Operand(I32, (4, 2)), weights, Operand(T.INT32)]
    with pytest.raises(InvalidModel, match=message):
        level_of(OperationType.LSH_PROJECTION, inputs, [Operand(I32)], {3: kind})


def test_projection_weights_may_be_left_out_by_the_request() -> None:
    weights = Operand(F32, (4,), lifetime=OperandLifeTime.SUBGRAPH_INPUT)
    inputs = [Operand(F32, (3, 2)), Operand(I32, (4, 2)), weights, Operand(T.INT32)]
    assert level_of(OperationType.LSH_PROJECTION, inputs, [Operand(I32)], {3: 3}) == 1
    with pytest.raises(InvalidArgument, match="input 2: expected no weights"):
        run(OperationType.LSH_PROJECTION, np.zeros((3, 2)), np.zeros((4, 2)), np.zeros(4), ints(3))
    with pytest.raises(InvalidArgument, match="input 2: expected weights"):
        run(OperationType.LSH_PROJECTION, np.zeros((3, 2)), np.zeros((4, 2)), None, ints(2))


def test_projection_refuses_more_than_32_bits() -> None:
    inputs = [Operand(F32, (3, 33)), Operand(I32, (4, 2)), Operand(F32, lifetime=ABSENT), Operand(T.INT32)]
    with pytest.raises(InvalidModel, match="at most 32 bits"):
        level_of(OperationType.LSH_PROJECTION, inputs, [Operand(I32)])


def test_projection_of_nothing_is_zero() -> None:
    functions = np.ones((2, 3), dtype=np.float32)
    for values in (np.zeros((0, 2), np.float32), np.zeros((0,), np.int32)):
        (sparse,) = run(OperationType.LSH_PROJECTION, functions, values, None, ints(1))
        assert sparse.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("operation", "inputs", "outputs", "constants", "message"),
    [
        (
            OperationType.GATHER,
            [Operand(F32, (2, 3)), Operand(T.INT32), Operand(I32, (5,))],
            [Operand(F32, (2, 3))],
            {1: -1},
            r"output 0: expected shape \[2, 5\], got \[2, 3\]",
        ),
        (
            OperationType.EMBEDDING_LOOKUP,
            [Operand(I32, (5,)), Operand(F32, (4, 3))],
            [Operand(F32, (4, 3))],
            {},
            r"output 0: expected shape \[5, 3\], got \[4, 3\]",
        ),
        (
            OperationType.HASHTABLE_LOOKUP,
            [Operand(I32, (5,)), Operand(I32, (4,)), Operand(F32, (4, 3))],
            [Operand(F32, (5, 3)), Operand(Q8, (4,), scale=1.0)],
            {},
            r"output 1: expected shape \[5\], got \[4\]",
        ),
        (
            OperationType.TOPK_V2,
            [Operand(F32, (2, 3)), Operand(T.INT32)],
            [Operand(F32, (2, 2)), Operand(I32, (2, 3))],
            {1: 2},
            r"output 1: expected shape \[2, 2\], got \[2, 3\]",
        ),
        (
            OperationType.LSH_PROJECTION,
            [Operand(F32, (3, 2)), Operand(I32, (4,)), Operand(F32, (4,)), Operand(T.INT32)],
            [Operand(I32, (3,))],
            {3: 2},
            r"output 0: expected shape \[6\], got \[3\]",
        ),
    ],
)
def test_stated_output_shape_must_follow_from_the_inputs(
    operation: OperationType,
    inputs: list[Operand],
    outputs: list[Operand],
    constants: dict[int, object],
    message: str,
) -> None:
    with pytest.raises(InvalidModel, match=message):
        level_of(operation, inputs, outputs, constants)


def test_unknown_extents_are_left_to_the_execution() -> None:
    unknown, partly = Operand(F32), Operand(F32, (0, 3))
    assert level_of(OperationType.GATHER, [unknown, Operand(T.INT32), Operand(I32)], [partly], {1: 7}) == 3
    assert level_of(OperationType.EMBEDDING_LOOKUP, [Operand(I32), partly], [Operand(F32, (9, 3))]) == 1
    assert level_of(OperationType.TOPK_V2, [partly, Operand(T.INT32)], [unknown, Operand(I32)], {1: 3}) == 3

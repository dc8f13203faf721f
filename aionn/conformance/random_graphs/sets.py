"""The named sets of random graph tests: which operations, types, ranks and sizes, and how close results must be.

Owns the names: ``ADD_1`` is ADD as feature level 1 has it, ``CONV_2D_4`` what level 4 adds to CONV_2D, ``SMALL_TENSOR_FLOAT32_4``
a graph of 5 operations on float32 tensors of rank 4. Each set is run with the seeds 0 to ``SEEDS - 1``.

Invariants:
1. 179 single-operation sets and 32 graph sets come from the original; the rest is of levels that it does not cover.

Source: the tests of the NN HAL's random graph generator.
"""

from __future__ import annotations

import functools

import msgspec

from aionn.conformance.accuracy import Criteria
from aionn.conformance.random_graphs.signatures import Signature
from aionn.conformance.random_graphs.signatures_elementwise import SIGNATURES as _ELEMENTWISE
from aionn.conformance.random_graphs.signatures_layers import SIGNATURES as _LAYERS
from aionn.conformance.random_graphs.signatures_layout import SIGNATURES as _LAYOUT
from aionn.hal import OperandType, OperationType

__all__ = [
    "CHAIN_TESTS",
    "EDGE_TESTS",
    "EXACT_OPERATIONS",
    "GRAPH_TESTS",
    "LATER_TESTS",
    "MOVING",
    "NOT_COVERED",
    "SEEDS",
    "SIGNATURES",
    "SINGLE_OPERATION_TESTS",
    "TESTS",
    "GraphTest",
]

SEEDS = 50
"""Seeds of a full run of each set."""

SIGNATURES: tuple[Signature, ...] = tuple(
    sorted((*_ELEMENTWISE, *_LAYERS, *_LAYOUT), key=lambda signature: signature.name)
)
"""All signatures by name, so that a seed picks the same one at any place in the sources."""

O = OperationType  # noqa: E741 - the tables below have it everywhere

NOT_COVERED: dict[OperationType, str] = {
    O.LSH_PROJECTION: "hashes are judged by the conformance data",
    O.LSTM: "state",
    O.RNN: "state",
    O.SVDF: "state",
    O.BIDIRECTIONAL_SEQUENCE_LSTM: "state",
    O.BIDIRECTIONAL_SEQUENCE_RNN: "state",
    O.UNIDIRECTIONAL_SEQUENCE_LSTM: "state",
    O.UNIDIRECTIONAL_SEQUENCE_RNN: "state",
    O.QUANTIZED_16BIT_LSTM: "state",
    O.QUANTIZED_LSTM: "state",
    O.AXIS_ALIGNED_BBOX_TRANSFORM: "boxes have a form of their own",
    O.BOX_WITH_NMS_LIMIT: "the number of results depends on values",
    O.DETECTION_POSTPROCESSING: "near-equal scores change the selection",
    O.GENERATE_PROPOSALS: "the number of results depends on values",
    O.RANDOM_MULTINOMIAL: "results are random",
    O.IF: "refers to other subgraphs",
    O.WHILE: "refers to other subgraphs",
    O.OEM_OPERATION: "has no definition",
}
"""The operations without signatures, and why."""


Candidate = tuple[Signature, tuple[OperandType, ...], tuple[int, ...]]
"""A signature with the types and the ranks that a set takes of it."""


class GraphTest(msgspec.Struct, frozen=True):
    """A set of random graphs.

    Attributes:
        name: Unique.
        criteria: The required closeness of results.
        operation: The only operation; None for all.
        level: The feature level of the signatures; None for all.
        type: The primary type; None for all.
        rank: The primary rank; None for all.
        operation_count: Operations a graph.
        extent_max: Largest free extent. Tensors have at most 10,000 elements where it is more than 10.
        has_edges: Whether values at the edges of their types are drawn, and compared more strictly; see ``judge``.
    """

    name: str
    criteria: Criteria
    operation: OperationType | None = None
    level: int | None = None
    type: OperandType | None = None
    rank: int | None = None
    operation_count: int = 1
    extent_max: int = 1000
    has_edges: bool = False

    def candidates(self) -> tuple[Candidate, ...]:
        """The signatures that the set draws from, each with the types and ranks that it may take."""
        return _candidates(self.operation, self.level, self.type, self.rank)


@functools.cache
def _candidates(
    operation: OperationType | None, level: int | None, type: OperandType | None, rank: int | None
) -> tuple[Candidate, ...]:
    found = []
    for signature in SIGNATURES:
        types = tuple(t for t in signature.types if type in (None, t))
        ranks = tuple(r for r in signature.ranks if rank in (None, r))
        if operation in (None, signature.operation) and level in (None, signature.level) and types and ranks:
            found.append((signature, types, ranks))
    return tuple(found)


_S, _M, _R, _C = Criteria.STRICT, Criteria.MEDIUM, Criteria.RELAXED, Criteria.CONVOLUTION

_SINGLE: dict[OperationType, tuple[Criteria, tuple[int, ...]]] = {
    O.ADD: (_M, (1, 3, 4)),
    O.MUL: (_M, (1, 3, 4)),
    O.SUB: (_M, (2, 3, 4)),
    O.DIV: (_R, (2, 3)),
    O.FLOOR: (_M, (1, 3)),
    O.LOGISTIC: (_R, (1, 3, 4)),
    O.RELU: (_M, (1, 3, 4)),
    O.RELU1: (_M, (1, 3, 4)),
    O.RELU6: (_M, (1, 3, 4)),
    O.TANH: (_R, (1, 3, 4)),
    O.SOFTMAX: (_R, (1, 3, 4)),
    O.L2_NORMALIZATION: (_R, (1, 3, 4)),
    O.LOCAL_RESPONSE_NORMALIZATION: (_R, (1, 3)),
    O.AVERAGE_POOL_2D: (_R, (1, 3, 4)),
    O.L2_POOL_2D: (_R, (1, 3)),
    O.MAX_POOL_2D: (_R, (1, 3, 4)),
    O.CONV_2D: (_C, (1, 3, 4)),
    O.DEPTHWISE_CONV_2D: (_C, (1, 3, 4)),
    O.CONCATENATION: (_M, (1, 3, 4)),
    O.RESIZE_BILINEAR: (_R, (1, 3, 4)),
    O.DEPTH_TO_SPACE: (_S, (1, 3, 4)),
    O.SPACE_TO_DEPTH: (_S, (1, 3, 4)),
    O.EMBEDDING_LOOKUP: (_S, (1, 3, 4)),
    O.HASHTABLE_LOOKUP: (_S, (1,)),
    O.FULLY_CONNECTED: (_R, (1, 3, 4)),
    O.RESHAPE: (_S, (1, 3, 4)),
    O.DEQUANTIZE: (_M, (1, 3, 4)),
    O.BATCH_TO_SPACE_ND: (_S, (2, 3, 4)),
    O.SPACE_TO_BATCH_ND: (_S, (2, 3, 4)),
    O.MEAN: (_R, (2, 3, 4)),
    O.PAD: (_S, (2, 3, 4)),
    O.TRANSPOSE: (_S, (2, 3, 4)),
    O.SQUEEZE: (_S, (2, 3, 4)),
    O.STRIDED_SLICE: (_S, (2, 3, 4)),
    O.ABS: (_M, (3, 4)),
    O.EXP: (_R, (3,)),
    O.LOG: (_R, (3,)),
    O.NEG: (_M, (3,)),
    O.RSQRT: (_R, (3,)),
    O.SIN: (_R, (3,)),
    O.SQRT: (_R, (3,)),
    O.ARGMAX: (_S, (3, 4)),
    O.ARGMIN: (_S, (3, 4)),
    O.EQUAL: (_S, (3, 4)),
    O.NOT_EQUAL: (_S, (3, 4)),
    O.GREATER: (_S, (3, 4)),
    O.GREATER_EQUAL: (_S, (3, 4)),
    O.LESS: (_S, (3, 4)),
    O.LESS_EQUAL: (_S, (3, 4)),
    O.LOGICAL_AND: (_S, (3,)),
    O.LOGICAL_OR: (_S, (3,)),
    O.LOGICAL_NOT: (_S, (3,)),
    O.MAXIMUM: (_M, (3, 4)),
    O.MINIMUM: (_M, (3, 4)),
    O.POW: (_R, (3,)),
    O.PRELU: (_M, (3, 4)),
    O.REDUCE_ALL: (_R, (3,)),
    O.REDUCE_ANY: (_R, (3,)),
    O.REDUCE_MAX: (_R, (3, 4)),
    O.REDUCE_MIN: (_R, (3, 4)),
    O.REDUCE_PROD: (_R, (3,)),
    O.REDUCE_SUM: (_R, (3,)),
    O.CHANNEL_SHUFFLE: (_S, (3, 4)),
    O.INSTANCE_NORMALIZATION: (_R, (3,)),
    O.LOG_SOFTMAX: (_R, (3,)),
    O.GROUPED_CONV_2D: (_C, (3, 4)),
    O.TRANSPOSE_CONV_2D: (_C, (3, 4)),
    O.RESIZE_NEAREST_NEIGHBOR: (_R, (3, 4)),
    O.PAD_V2: (_S, (3, 4)),
    O.QUANTIZE: (_M, (3, 4)),
    O.CAST: (_M, (3, 4)),
    O.EXPAND_DIMS: (_S, (3, 4)),
    O.TILE: (_S, (3, 4)),
    O.GATHER: (_S, (3, 4)),
    O.SELECT: (_S, (3, 4)),
    O.TOPK_V2: (_S, (3, 4)),
    O.SLICE: (_S, (3, 4)),
    O.SPLIT: (_M, (3, 4)),
    O.ROI_ALIGN: (_R, (3, 4)),
    O.ROI_POOLING: (_R, (3, 4)),
    O.HEATMAP_MAX_KEYPOINT: (_R, (3, 4)),
    O.ELU: (_M, (4,)),
    O.HARD_SWISH: (_M, (4,)),
    O.FILL: (_S, (4,)),
    O.RANK: (_S, (4,)),
}

_LATER: dict[OperationType, tuple[Criteria, tuple[int, ...]]] = {
    O.RESHAPE: (_S, (6,)),
    O.BATCH_MATMUL: (_R, (6,)),
    O.PACK: (_S, (6,)),
    O.MIRROR_PAD: (_S, (7,)),
    O.REVERSE: (_S, (7,)),
    O.RSQRT: (_R, (7,)),
}

EXACT_OPERATIONS = frozenset(
    operation
    for operation in OperationType
    if {table[operation][0] for table in (_SINGLE, _LATER) if operation in table} == {_S}
)
"""The operations that only move, select or compare: nothing in them is rounded."""

MOVING = EXACT_OPERATIONS - {O.TOPK_V2}
"""Those of them that keep the sign of a zero. TOPK_V2 may take either of two zeros."""

_GRAPH_TYPES = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_BOOL8,
)


def _single(table: dict[OperationType, tuple[Criteria, tuple[int, ...]]]) -> list[GraphTest]:
    return [
        GraphTest(f"{operation.name}_{level}", criteria, operation, level)
        for operation, (criteria, levels) in table.items()
        for level in levels
    ]


SINGLE_OPERATION_TESTS: tuple[GraphTest, ...] = (
    *_single(_SINGLE),
    # The one operation that is judged differently by level: at level 4 its operands are integers.
    GraphTest("DIV_4", _M, O.DIV, 4),
)
"""One operation, extents up to 1000."""

LATER_TESTS: tuple[GraphTest, ...] = tuple(_single(_LATER))
"""One operation, of feature levels that the original generator does not cover."""

GRAPH_TESTS: tuple[GraphTest, ...] = tuple(
    GraphTest(f"{size}_{type.name}_{rank}", criteria, None, None, type, rank, count, extent_max)
    for type in _GRAPH_TYPES
    for rank in (4, 3, 2, 1)
    for size, criteria, count, extent_max in (
        ("SMALL", Criteria.SMALL_GRAPH, 5, 1000),
        ("LARGE", Criteria.LARGE_GRAPH, 40, 10),
    )
)
"""Graphs of one primary type and rank: mixed, few operations could be linked. None of quantised types, for their parameters
would seldom match."""

CHAIN_TESTS: tuple[GraphTest, ...] = tuple(
    GraphTest(f"CHAIN_{type.name}", Criteria.SMALL_GRAPH, None, None, type, None, 4, 6)
    for type in (
        *_GRAPH_TYPES,
        OperandType.TENSOR_QUANT8_ASYMM,
        OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    )
)
"""Four operations of any rank, linked wherever they fit: small extents make shapes meet that are rare in larger graphs, such as the
one element that a reduction of all axes leaves."""

EDGE_TESTS: tuple[GraphTest, ...] = tuple(
    GraphTest(f"{name}_{type.name}", criteria, None, None, type, None, count, 6, has_edges=True)
    for type in (
        *_GRAPH_TYPES,
        OperandType.TENSOR_QUANT8_ASYMM,
        OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    )
    if type != OperandType.TENSOR_BOOL8
    for name, criteria, count in (("EDGE", Criteria.EDGE, 1), ("EDGES", Criteria.SMALL_GRAPH, 3))
    if count == 1 or type not in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)
)
"""One operation, and three, on values at the edges of their types: NaN, infinities, whole ranges of integers, saturation. Of floats
only one: infinities and NaN of one operation would go to others that leave their results open."""

TESTS: dict[str, GraphTest] = {
    test.name: test
    for test in (*SINGLE_OPERATION_TESTS, *LATER_TESTS, *GRAPH_TESTS, *CHAIN_TESTS, *EDGE_TESTS)
}
"""All sets by name."""

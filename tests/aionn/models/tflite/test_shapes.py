"""Operators that move, cut and join, and whole graphs: imported, they compute what LiteRT computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

CASES: dict[str, tuple[Callable[..., Any], float]] = {}
"""Name -> what makes the graph from the writer, and the absolute tolerance; 0 demands equality in every bit."""


def case(name: str, atol: float = 0.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = (make, atol)
        return make

    return register


# Shapes


@case("RESHAPE")
def _(t):
    return t.one([t.f32(2, 6), t.T("int32", value=np.int32([3, -1]))], [t.f32(3, 4)], 22)


@case("SQUEEZE")
def _(t):
    return t.one([t.f32(1, 6, 1)], [t.f32(6)], 43)


@case("EXPAND_DIMS")
def _(t):
    return t.one([t.f32(2, 6), t.T("int32", value=np.int32(1))], [t.f32(2, 1, 6)], 70)


@case("TRANSPOSE")
def _(t):
    return t.one([t.f32(2, 3, 4), t.T("int32", value=np.int32([2, 0, 1]))], [t.f32(4, 2, 3)], 39)


@case("SLICE")
def _(t):
    return t.one(
        [t.f32(4, 5), t.T("int32", value=np.int32([1, 2])), t.T("int32", value=np.int32([2, -1]))],
        [t.f32(2, 3)],
        65,
    )


@case("STRIDED_SLICE")
def _(t):
    lists = [t.T("int32", value=np.int32(v)) for v in ([1, 4, 0], [2, 0, 3], [1, -2, 1])]
    return t.one(
        [t.f32(4, 5, 3), *lists],
        [t.f32(2, 3)],
        45,
        "StridedSliceOptions",
        shrink_axis_mask=1,
        end_mask=4,
    )


@case("STRIDED_SLICE int32")
def _(t):
    lists = [t.T("int32", value=np.int32(v)) for v in ([1, 0], [2, 3], [1, 1])]
    return t.one(
        [t.T("int32", (4, 5)), *lists], [t.T("int32", (3,))], 45, "StridedSliceOptions", shrink_axis_mask=1
    )


@case("STRIDED_SLICE to one number")
def _(t):
    lists = [t.T("int32", value=np.int32([v])) for v in (-1, 0, 1)]
    return t.one([t.f32(4), *lists], [t.f32()], 45, "StridedSliceOptions", shrink_axis_mask=1)


@case("SPLIT")
def _(t):
    return t.one(
        [t.T("int32", value=np.int32(1)), t.f32(2, 6)],
        [t.f32(2, 2)] * 3,
        49,
        "SplitOptions",
        num_splits=3,
    )


@case("SPLIT_V")
def _(t):
    sizes = t.T("int32", value=np.int32([1, -1, 2]))
    axis = t.T("int32", value=np.int32(-1))
    return t.one(
        [t.f32(2, 6), sizes, axis],
        [t.f32(2, 1), t.f32(2, 3), t.f32(2, 2)],
        102,
        "SplitVOptions",
        num_splits=3,
    )


@case("UNPACK")
def _(t):
    return t.one([t.f32(2, 3, 4)], [t.f32(2, 4)] * 3, 88, "UnpackOptions", num=3, axis=1)


@case("PACK")
def _(t):
    return t.one([t.f32(2, 4)] * 3, [t.f32(2, 3, 4)], 83, "PackOptions", axis=1, values_count=3)


@case("PACK numbers")
def _(t):
    return t.one([t.T("int32")] * 3, [t.T("int32", (3,))], 83, "PackOptions", values_count=3)


@case("CONCATENATION")
def _(t):
    return t.one([t.f32(2, 4), t.f32(2, 1)], [t.f32(2, 5)], 2, "ConcatenationOptions", axis=-1)


@case("CONCATENATION int32")
def _(t):
    return t.one(
        [t.T("int32", (3, 2)), t.T("int32", value=np.int32([[7, 8]])), t.T("int32", (1, 2))],
        [t.T("int32", (5, 2))],
        2,
        "ConcatenationOptions",
        axis=0,
    )


@case("GATHER")
def _(t):
    return t.one(
        [t.f32(4, 5), t.T("int32", value=np.int32([3, 0, 3]))],
        [t.f32(3, 5)],
        36,
        "GatherOptions",
        axis=0,
    )


@case("GATHER one index")
def _(t):
    return t.one([t.f32(4, 5), t.T("int32", value=np.int32(3))], [t.f32(4)], 36, "GatherOptions", axis=1)


@case("GATHER_ND")
def _(t):
    indices = np.int32([[[0, 2], [1, 1]], [[1, 0], [0, 0]], [[1, 2], [1, 2]]])
    return t.one([t.f32(2, 3, 4), t.T("int32", value=indices)], [t.f32(3, 2, 4)], 107)


@case("GATHER_ND one element")
def _(t):
    return t.one([t.f32(2, 3), t.T("int32", value=np.int32([1, 2]))], [t.f32()], 107)


@case("TILE")
def _(t):
    return t.one([t.f32(2, 3), t.T("int32", value=np.int32([2, 1]))], [t.f32(4, 3)], 69)


@case("BROADCAST_TO")
def _(t):
    graph = t.one([t.f32(3, 1), t.T("int32", value=np.int32([2, 3, 4]))], [t.f32(2, 3, 4)], 130)
    return graph._replace(operators=[graph.operators[0]._replace(version=2)])


@case("REVERSE_V2")
def _(t):
    return t.one([t.f32(3, 4), t.T("int32", value=np.int32([1]))], [t.f32(3, 4)], 105)


@case("PAD")
def _(t):
    return t.one([t.f32(2, 3), t.T("int32", value=np.int32([[1, 0], [2, 1]]))], [t.f32(3, 6)], 34)


@case("PADV2")
def _(t):
    return t.one(
        [t.f32(2, 3), t.T("int32", value=np.int32([[1, 0], [2, 1]])), t.T("float32", value=np.float32([9]))],
        [t.f32(3, 6)],
        60,
    )


@case("PADV2 int8")
def _(t):
    quant = {"scale": 0.5, "zero_point": 3}
    return t.one(
        [
            t.T("int8", (2, 3), **quant),
            t.T("int32", value=np.int32([[1, 0], [2, 1]])),
            t.T("int8", value=np.int8([9]), **quant),
        ],
        [t.T("int8", (3, 6), **quant)],
        60,
    )


@case("MIRROR_PAD")
def _(t):
    return t.one(
        [t.f32(3, 4), t.T("int32", value=np.int32([[1, 1], [2, 1]]))],
        [t.f32(5, 7)],
        100,
        "MirrorPadOptions",
        mode=1,
    )


@case("SPACE_TO_DEPTH")
def _(t):
    return t.one([t.f32(1, 4, 4, 3)], [t.f32(1, 2, 2, 12)], 26, "SpaceToDepthOptions", block_size=2)


@case("DEPTH_TO_SPACE")
def _(t):
    return t.one([t.f32(1, 2, 2, 12)], [t.f32(1, 4, 4, 3)], 5, "DepthToSpaceOptions", block_size=2)


@case("SPACE_TO_BATCH_ND")
def _(t):
    return t.one(
        [
            t.f32(1, 4, 3, 2),
            t.T("int32", value=np.int32([2, 2])),
            t.T("int32", value=np.int32([[0, 0], [1, 0]])),
        ],
        [t.f32(4, 2, 2, 2)],
        38,
    )


@case("BATCH_TO_SPACE_ND with crops")
def _(t):
    return t.one(
        [
            t.f32(4, 2, 2, 2),
            t.T("int32", value=np.int32([2, 2])),
            t.T("int32", value=np.int32([[0, 1], [1, 0]])),
        ],
        [t.f32(1, 3, 3, 2)],
        37,
    )


for _align, _half in ((False, False), (True, False), (False, True)):
    for _code, _name, _table in (
        (23, "RESIZE_BILINEAR", "ResizeBilinearOptions"),
        (97, "RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions"),
    ):

        @case(f"{_name} align {_align} half {_half}", 1e-5)
        def _(t, code=_code, table=_table, align=_align, half=_half):
            return t.one(
                [t.f32(1, 3, 4, 2), t.T("int32", value=np.int32([6, 7]))],
                [t.f32(1, 6, 7, 2)],
                code,
                table,
                align_corners=align,
                half_pixel_centers=half,
            )


@case("ONE_HOT")
def _(t):
    return t.one(
        [
            t.T("int32", (3, 4)),
            t.T("int32", value=np.int32(5)),
            t.T("float32", value=np.float32(2)),
            t.T("float32", value=np.float32(-1)),
        ],
        [t.f32(3, 4, 5)],
        85,
        "OneHotOptions",
        axis=-1,
    )


@case("FILL")
def _(t):
    tensors = [
        t.f32(2, 3),
        t.T("int32", value=np.int32([2, 3])),
        t.T("float32", value=np.float32(4)),
        t.f32(2, 3),
        t.f32(2, 3),
    ]
    return t.Graph(tensors, [t.Op(94, [1, 2], [3]), t.Op(0, [0, 3], [4], "AddOptions")], [0], [4])


@case("EMBEDDING_LOOKUP")
def _(t):
    return t.one([t.T("int32", value=np.int32([2, 0])), t.f32(4, 3)], [t.f32(2, 3)], 7)


# Whole graphs


@case("shape arithmetic folds away")
def _(t):
    tensors = [
        t.f32(2, 3, 4),
        t.T("int32", (3,)),
        *(t.T("int32", value=np.int32([v])) for v in (0, 1, 1)),
        t.T("int32"),
        t.T("int32", value=np.int32(-1)),
        t.T("int32", (2,)),
        t.T("float32", (2, 12), signature=(-1, -1)),
    ]
    operators = [
        t.Op(77, [0], [1], "ShapeOptions", {"out_type": 2}),
        t.Op(45, [1, 2, 3, 4], [5], "StridedSliceOptions", {"shrink_axis_mask": 1}),
        t.Op(83, [5, 6], [7], "PackOptions", {"values_count": 2}),
        t.Op(22, [0, 7], [8]),
    ]
    return t.Graph(tensors, operators, [0], [8])


@case("an input that is an output")
def _(t):
    tensors = [t.f32(2, 3), t.f32(2, 3)]
    return t.Graph(tensors, [t.Op(101, [0], [1])], [0], [1, 0])


@case("IF")
def _(t):
    main = t.Graph(
        [t.T("bool", (1,)), t.f32(3), t.f32(3)],
        [t.Op(118, [0, 1], [2], "IfOptions", {"then_subgraph_index": 1, "else_subgraph_index": 2})],
        [0, 1],
        [2],
    )
    branches = [t.Graph([t.f32(3), t.f32(3)], [t.Op(code, [0], [1])], [0], [1]) for code in (101, 59)]
    return [main, *branches]


@case("WHILE")
def _(t):
    scalar, vector = t.T("int32", (1,)), t.f32(3)
    main = t.Graph(
        [scalar, vector, vector, scalar, vector, vector],
        [
            t.Op(
                119,
                [0, 1, 2],
                [3, 4, 5],
                "WhileOptions",
                {"cond_subgraph_index": 1, "body_subgraph_index": 2},
            )
        ],
        [0, 1, 2],
        [3, 4, 5],
    )
    limit = t.T("int32", value=np.int32([30]))
    condition = t.Graph(
        [scalar, vector, vector, limit, t.T("bool", (1,))], [t.Op(58, [0, 3], [4])], [0, 1, 2], [4]
    )
    step = t.T("int32", value=np.int32([3]))
    body = t.Graph(
        [scalar, vector, vector, step, scalar, vector],
        [t.Op(0, [0, 3], [4], "AddOptions"), t.Op(0, [1, 2], [5], "AddOptions")],
        [0, 1, 2],
        [4, 5, 2],
    )
    return [main, condition, body]


@pytest.mark.parametrize("name", CASES)
def test_import_computes_what_the_reference_kernels_compute(name, tflite, compare_with_litert):
    make, atol = CASES[name]
    compare_with_litert(make(tflite), atol, is_only_optimized=name == "BROADCAST_TO")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_damaged_file_loads_or_is_refused(name, tflite, load_damaged):
    load_damaged(CASES[name][0](tflite), name)

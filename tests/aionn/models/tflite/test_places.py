"""Operators that read and write chosen places, cut, and take booleans or more than four axes: they compute what LiteRT computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.interpreter import Interpreter, RunControl
from aionn.models.tflite import load_tflite

CASES: dict[str, tuple[Callable[..., Any], float]] = {}
"""Name -> what makes the graph from the writer, and the absolute tolerance; 0 demands equality in every bit."""

ONLY_OPTIMIZED = {"GATHER_ND of booleans"}


def add(name: str, make: Callable[..., Any], atol: float = 0.0) -> None:
    CASES[name] = (make, atol)


def ints(t: Any, *values: Any) -> Any:
    return t.T("int32", value=np.int32(values[0] if len(values) == 1 else values))


# Places

for _starts in ([1, 2], [-3, 9], [0, 0], [3, 4]):
    add(
        f"DYNAMIC_UPDATE_SLICE at {_starts}",
        lambda t, s=_starts: t.one([t.f32(5, 6), t.f32(2, 3), ints(t, s)], [t.f32(5, 6)], 151),
    )
add(
    "DYNAMIC_UPDATE_SLICE at run time",
    lambda t: t.one([t.f32(1, 9, 2, 4), t.f32(1, 3, 2, 4), t.T("int32", (4,))], [t.f32(1, 9, 2, 4)], 151),
)
add(
    "DYNAMIC_UPDATE_SLICE of everything",
    lambda t: t.one([t.f32(2, 3), t.f32(2, 3), t.T("int32", (2,))], [t.f32(2, 3)], 151),
)
for _kind in ("int32", "bool", "int8"):
    add(
        f"DYNAMIC_UPDATE_SLICE of {_kind}",
        lambda t, k=_kind: t.one([t.T(k, (4, 5)), t.T(k, (2, 2)), t.T("int32", (2,))], [t.T(k, (4, 5))], 151),
    )
for _axis, _batches, _shape, _indices, _out in (
    (1, 1, (3, 5, 2), (3, 4), (3, 4, 2)),
    (2, 1, (2, 3, 5, 2), (2, 4), (2, 3, 4, 2)),
    (2, 2, (2, 3, 5), (2, 3), (2, 3)),
    (-1, 1, (2, 5), (2, 2, 2), (2, 2, 2)),
):

    def _gather(t: Any, axis=_axis, batches=_batches, shape=_shape, indices=_indices, out=_out) -> Any:
        places = np.random.default_rng(3).integers(0, 5, indices)
        return t.one(
            [t.f32(*shape), ints(t, places)],
            [t.f32(*out)],
            36,
            "GatherOptions",
            axis=axis,
            batch_dims=batches,
        )

    add(f"GATHER of {_batches} batches along {_axis} of {_shape}", _gather)
add(
    "SCATTER_ND with repeated places",
    lambda t: t.one([ints(t, [[1], [4], [1], [0]]), t.f32(4, 3), ints(t, 6, 3)], [t.f32(6, 3)], 122),
    1e-6,
)
add(
    "SCATTER_ND with single places",
    lambda t: t.one([ints(t, [[1, 2], [0, 0], [2, 1]]), t.f32(3), ints(t, 3, 4)], [t.f32(3, 4)], 122),
)
add(
    "SCATTER_ND of integers",
    lambda t: t.one(
        [ints(t, [[2], [0], [2]]), t.T("int32", (3, 2)), ints(t, 4, 2)], [t.T("int32", (4, 2))], 122
    ),
)

# Booleans and integers that move


def moved(kind: str, code: int, out: tuple[int, ...], *extra: Any, options: Any = None, **values: Any) -> Any:
    def make(t: Any) -> Any:
        more = [ints(t, v) for v in extra]
        return t.one([t.T(kind, (2, 3, 4)), *more], [t.T(kind, out)], code, options, **values)

    return make


for _kind in ("bool", "int32"):
    add(f"SLICE of {_kind}", moved(_kind, 65, (1, 2, 2), [1, 0, 2], [1, 2, 2]))
    add(f"TRANSPOSE of {_kind}", moved(_kind, 39, (4, 2, 3), [2, 0, 1]))
    add(f"RESHAPE of {_kind}", moved(_kind, 22, (4, 6), [4, 6]))
    add(f"GATHER of {_kind}", moved(_kind, 36, (2, 2, 4), [2, 0], options="GatherOptions", axis=1))
    for _begin, _end, _stride, _masks, _out in (
        ([0, 2, 0], [2, -4, 4], [1, -2, 1], {}, (2, 2, 4)),
        ([0, 0, 1], [1, 3, 4], [1, 1, 2], {"shrink_axis_mask": 1}, (3, 2)),
        ([0, 1], [0, 3], [1, 2], {"ellipsis_mask": 1}, (2, 3, 1)),
        ([0, 0, 1], [0, 0, 2], [1, 1, 1], {"new_axis_mask": 2, "begin_mask": 1, "end_mask": 1}, (2, 1, 1, 4)),
        ([1, 2, 3], [2, 3, 4], [1, 1, 1], {"shrink_axis_mask": 7}, ()),
    ):
        add(
            f"STRIDED_SLICE of {_kind} {_begin} {_end} {_stride} {_masks}",
            moved(_kind, 45, _out, _begin, _end, _stride, options="StridedSliceOptions", **_masks),
        )
add(
    "CONCATENATION of bool",
    lambda t: t.one(
        [t.T("bool", (2, 3)), t.T("bool", (2, 2)), t.T("bool", value=np.array([[True], [False]]))],
        [t.T("bool", (2, 6))],
        2,
        "ConcatenationOptions",
        axis=1,
    ),
)
add(
    "GATHER_ND of booleans",
    lambda t: t.one([t.T("bool", (3, 4)), ints(t, [[0, 1], [2, 3]])], [t.T("bool", (2,))], 107),
)

# More than four axes

FIVE = (2, 3, 2, 2, 3)
SIX = (2, 1, 3, 2, 2, 3)


def five(
    code: int, out: tuple[int, ...], *extra: Any, options: Any = None, shape: Any = FIVE, **values: Any
) -> Any:
    def make(t: Any) -> Any:
        return t.one([t.f32(*shape), *(ints(t, v) for v in extra)], [t.f32(*out)], code, options, **values)

    return make


add("five axes ABS", five(101, FIVE))
add("five axes SOFTMAX", five(25, FIVE, options="SoftmaxOptions", beta=1.0), 1e-6)
add("five axes TRANSPOSE", five(39, (2, 2, 3, 2, 3), [0, 3, 1, 2, 4]))
add("five axes TRANSPOSE of neighbours", five(39, (2, 3, 2, 3, 2), [3, 4, 0, 1, 2][2:] + [3, 4][::-1]))
add("five axes SUM", five(74, (2, 2, 3), [1, 2], options="ReducerOptions"), 1e-5)
add(
    "five axes REDUCE_MAX that keep",
    five(82, (2, 1, 1, 2, 3), [1, 2], options="ReducerOptions", keep_dims=True),
)
add("five axes MEAN of all", five(40, (), [0, 1, 2, 3, 4], options="ReducerOptions"), 1e-6)
add("five axes SLICE", five(65, (2, 2, 2, 2, 3), [0, 1, 0, 0, 0], [2, 2, 2, 2, 3]))
add(
    "five axes STRIDED_SLICE",
    five(
        45, (2, 2, 2, 3), [0, 2, 0, 1, 0], [2, -4, 2, 2, 3], [1, -2, 1, 1, 1],
        options="StridedSliceOptions", shrink_axis_mask=8,
    ),
)  # fmt: skip
add("five axes TILE", five(69, (2, 6, 2, 2, 6), [1, 2, 1, 1, 2]))
add("five axes GATHER", five(36, (2, 3, 4, 2, 3), [1, 0, 1, 1], options="GatherOptions", axis=2))
add(
    "five axes ARG_MAX",
    lambda t: t.one(
        [t.f32(*FIVE), ints(t, [3])], [t.T("int32", (2, 3, 2, 3))], 56, "ArgMaxOptions", output_type=2
    ),
)
add("six axes LOGISTIC", five(14, SIX, shape=SIX), 1e-6)
add("six axes REVERSE_V2", five(105, FIVE, [3], shape=FIVE))
for _other in ((3,), (3, 2, 2, 3), (2, 1, 1, 1, 1), (2, 3, 1, 2, 3), ()):
    add(
        f"five axes MUL with {_other}",
        lambda t, o=_other: t.one([t.f32(*FIVE), t.f32(*o)], [t.f32(*FIVE)], 18, "MulOptions"),
    )
add(
    "five axes LESS",
    lambda t: t.one([t.f32(*FIVE), t.f32(2, 2, 3)], [t.T("bool", FIVE)], 58),
)
add(
    "five axes PACK and UNPACK",
    lambda t: t.Graph(
        [t.f32(2, 3, 2, 2), t.f32(2, 3, 2, 2), t.f32(2, 3, 2, 2, 2), *[t.f32(2, 2, 2, 2)] * 3],
        [
            t.Op(83, [0, 1], [2], "PackOptions", {"values_count": 2, "axis": 3}),
            t.Op(88, [2], [3, 4, 5], "UnpackOptions", {"num": 3, "axis": 1}),
        ],
        [0, 1],
        [3, 4, 5],
    ),
)
add(
    "five axes CONCATENATION and SPLIT",
    lambda t: t.Graph(
        [t.f32(*FIVE), t.f32(*FIVE), t.f32(2, 3, 4, 2, 3), ints(t, 2), *[t.f32(2, 3, 1, 2, 3)] * 4],
        [
            t.Op(2, [0, 1], [2], "ConcatenationOptions", {"axis": 2}),
            t.Op(49, [3, 2], [4, 5, 6, 7], "SplitOptions", {"num_splits": 4}),
        ],
        [0, 1],
        [4, 5, 6, 7],
    ),
)
add(
    "five axes BATCH_MATMUL",
    lambda t: t.one(
        [t.f32(2, 1, 2, 3, 4), t.f32(3, 2, 5, 4)],
        [t.f32(2, 3, 2, 3, 5)],
        126,
        "BatchMatMulOptions",
        adj_y=True,
    ),
    1e-5,
)

# Matrices, tables


def matmul(a: Any, b: Any, out: Any, **flags: Any) -> Any:
    return lambda t: t.one([t.f32(*a), t.f32(*b)], [t.f32(*out)], 126, "BatchMatMulOptions", **flags)


add("BATCH_MATMUL 3 x 2", matmul((2, 3, 4), (4, 5), (2, 3, 5)), 1e-5)
add("BATCH_MATMUL 3 x 2 adjoint left", matmul((2, 4, 3), (4, 5), (2, 3, 5), adj_x=True), 1e-5)
add("BATCH_MATMUL 2 x 3", matmul((3, 4), (2, 5, 4), (2, 3, 5), adj_y=True), 1e-5)
add("BATCH_MATMUL that repeats both", matmul((3, 1, 2, 4), (5, 4, 3), (3, 5, 2, 3)), 1e-5)
add(
    "BATCH_MATMUL int8 3 x 2",
    lambda t: t.one(
        [
            t.T("int8", (2, 5, 30), scale=0.04, zero_point=-7),
            t.T("int8", value=t.weights((30, 6)), scale=0.03, zero_point=9),
        ],
        [t.T("int8", (2, 5, 6), scale=0.2, zero_point=5)],
        126,
        "BatchMatMulOptions",
    ),
)
for _approximate in (False, True):
    add(
        f"GELU int8 approximate {_approximate}",
        lambda t, a=_approximate: t.one(
            [t.T("int8", (2, 300), scale=0.05, zero_point=7)],
            [t.T("int8", (2, 300), scale=0.025, zero_point=-100)],
            150,
            "GeluOptions",
            approximate=a,
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_import_computes_what_the_reference_kernels_compute(name, tflite, compare_with_litert):
    make, atol = CASES[name]
    compare_with_litert(make(tflite), atol, is_only_optimized=name in ONLY_OPTIMIZED)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_damaged_file_loads_or_is_refused(name, tflite, load_damaged):
    load_damaged(CASES[name][0](tflite), name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["bool", "float32", "int32"])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 1, 4), (2, 2, 2, 2, 2)])
def test_where_finds_every_place_in_order(tflite, kind, density, shape):
    rank = len(shape)
    graph = tflite.one([tflite.T(kind, shape)], [tflite.T("int64", (0, rank), signature=(-1, rank))], 109)
    model = load_tflite(tflite.write(graph)).model
    values = (np.random.default_rng(5).random(shape) < density).astype(kind)
    (found,) = Interpreter(model).run([values.reshape(model.main.inputs[0].dimensions)], RunControl())
    np.testing.assert_array_equal(found, np.argwhere(values))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -0.0, 1e-30])
def test_updates_at_single_constant_places_keep_every_value(tflite, value):
    graph = tflite.one(
        [ints(tflite, [[3], [0]]), tflite.f32(2, 2), ints(tflite, 5, 2)], [tflite.f32(5, 2)], 122
    )
    updates = np.full((2, 2), value, np.float32)
    (got,) = Interpreter(load_tflite(tflite.write(graph)).model).run([updates], RunControl())
    wanted = np.zeros((5, 2), np.float32)
    wanted[[3, 0]] = updates
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: t.one([ints(t, [[6]]), t.f32(1, 3), ints(t, 6, 3)], [t.f32(6, 3)], 122), "places within"),
        (lambda t: t.one([ints(t, [[-1]]), t.f32(1, 3), ints(t, 6, 3)], [t.f32(6, 3)], 122), "places within"),
        (
            lambda t: t.one(
                [t.T("int32", (2000, 1)), t.f32(2000, 3), ints(t, 6000, 3)], [t.f32(6000, 3)], 122
            ),
            "more than 1048576 together",
        ),
        (
            lambda t: t.one([t.f32(2**20 + 1)], [t.T("int64", (0, 1), signature=(-1, 1))], 109),
            "above 1048576 elements",
        ),
        (
            lambda t: t.one([t.f32(5, 6), t.f32(6, 2), t.T("int32", (2,))], [t.f32(5, 6)], 151),
            "at most shape",
        ),
        (
            lambda t: t.one([t.f32(2, 2, 2, 2, 2), ints(t, [4, 3, 2, 1, 0])], [t.f32(2, 2, 2, 2, 2)], 39),
            "more than four axes that do not merge",
        ),
        (lambda t: t.one([t.f32(1, 2, 3, 2, 2)], [t.f32(1, 2, 3, 2, 2)], 13), "more than four axes"),
        (
            lambda t: t.one(
                [t.f32(2, 3), t.T("int32", (3,))], [t.f32(2, 3)], 36, "GatherOptions", batch_dims=1
            ),
            "batch dimensions",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_reason(tflite, make, text):
    with pytest.raises(InvalidModel, match=text):
        load_tflite(tflite.write(make(tflite)))

"""Kernels of single elements, movements, indices and reductions: values by hand or by an independent formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aionn.drivers.onnx_reference.kernels import KERNELS
from aionn.errors import InvalidArgument
from aionn.models.onnx.extension.contracts import CONTRACTS
from tests.aionn.drivers.onnx_reference.building import compute, same

X = [-2.0, -0.5, 0.0, 0.5, 2.0]


def test_every_contract_has_a_kernel() -> None:
    assert KERNELS.keys() == CONTRACTS.keys()


@pytest.mark.parametrize(
    ("op_type", "function"),
    [
        ("Abs", abs),
        ("Acos", lambda x: math.acos(x / 2)),
        ("Asin", lambda x: math.asin(x / 2)),
        ("Asinh", math.asinh),
        ("Atan", math.atan),
        ("Atanh", lambda x: math.atanh(x / 4)),
        ("Acosh", lambda x: math.acosh(x + 4)),
        ("Ceil", math.ceil),
        ("Cos", math.cos),
        ("Cosh", math.cosh),
        ("Erf", math.erf),
        ("Exp", math.exp),
        ("Floor", math.floor),
        ("Identity", float),
        ("Log", lambda x: math.log(x + 4)),
        ("Neg", lambda x: -x),
        ("Reciprocal", lambda x: 1 / (x + 4)),
        ("Relu", lambda x: max(x, 0)),
        ("Round", round),
        ("Sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("Sign", lambda x: (x > 0) - (x < 0)),
        ("Sin", math.sin),
        ("Sinh", math.sinh),
        ("Softplus", lambda x: math.log1p(math.exp(x))),
        ("Softsign", lambda x: x / (1 + abs(x))),
        ("Sqrt", lambda x: math.sqrt(x + 4)),
        ("Tan", math.tan),
        ("Tanh", math.tanh),
        ("Mish", lambda x: x * math.tanh(math.log1p(math.exp(x)))),
        ("HardSwish", lambda x: x * max(0, min(1, x / 6 + 0.5))),
    ],
)
def test_functions_of_one_value(op_type, function) -> None:
    change = {
        "Acos": lambda x: x / 2,
        "Asin": lambda x: x / 2,
        "Atanh": lambda x: x / 4,
        **dict.fromkeys(("Acosh", "Log", "Reciprocal", "Sqrt"), lambda x: x + 4),
    }.get(op_type, float)
    same(compute(op_type, [change(x) for x in X]), [function(x) for x in X], rtol=1e-5)


def test_activations_with_numbers() -> None:
    same(compute("Celu", X, alpha=2.0), [2 * math.expm1(x / 2) if x < 0 else x for x in X])
    same(compute("Elu", X, alpha=2.0), [2 * math.expm1(x) if x < 0 else x for x in X])
    same(compute("Selu", X, alpha=2.0, gamma=3.0), [3 * (2 * math.expm1(x) if x < 0 else x) for x in X])
    same(compute("LeakyRelu", X, alpha=0.1), [0.1 * x if x < 0 else x for x in X])
    same(compute("ThresholdedRelu", X, alpha=0.5), [0, 0, 0, 0, 2])
    same(compute("Shrink", X, bias=1.0, lambd=1.0), [-1, 0, 0, 0, 1])
    same(compute("HardSigmoid", X), [max(0, min(1, 0.2 * x + 0.5)) for x in X])
    same(compute("Swish", X, alpha=2.0), [x / (1 + math.exp(-2 * x)) for x in X])
    same(compute("SwiGLU", X, X), [x * x / (1 + math.exp(-x)) for x in X])
    same(compute("Gelu", X), [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in X])
    tanh = [0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in X]
    same(compute("Gelu", X, approximate="tanh"), tanh)
    same(compute("PRelu", X, [0.5]), [0.5 * x if x < 0 else x for x in X])
    same(compute("Clip", X, -1.0, 1.0), [-1, -0.5, 0, 0.5, 1])
    same(compute("Clip", X, version=6, max=1.0), [-2, -0.5, 0, 0.5, 1])


def test_arithmetic_keeps_the_type_and_wraps_around() -> None:
    small = np.array([200, 100], np.uint8)
    assert compute("Add", small, small)[0].tolist() == [144, 200]
    assert compute("Mul", small, small)[0].tolist() == [64, 16]
    assert compute("Sub", small, np.uint8(150))[0].tolist() == [50, 206]
    wide = np.array([2**40], np.int64)
    assert compute("Mul", wide, wide)[0].tolist() == [0]
    assert compute("Add", wide, wide)[0].tolist() == [2**41]


def test_whole_numbers_are_divided_towards_zero() -> None:
    a, b = np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])
    assert compute("Div", a, b)[0].tolist() == [3, -3, -3, 3]
    assert compute("Mod", a, b)[0].tolist() == [1, 1, -1, -1]
    assert compute("Mod", a, b, fmod=1)[0].tolist() == [1, -1, 1, -1]
    same(compute("Mod", [5.5, -5.5], [2.0, 2.0], fmod=1), [1.5, -1.5])
    for op_type in ("Div", "Mod"):
        with pytest.raises(InvalidArgument, match="by 0"):
            compute(op_type, a, np.zeros(4, np.int64))


def test_several_values() -> None:
    same(compute("Max", [1.0, 5.0], [3.0, 2.0], [2.0, 2.0]), [3, 5])
    same(compute("Min", [1.0, 5.0], [3.0, 2.0]), [1, 2])
    same(compute("Sum", [1.0, 5.0], [3.0, 2.0]), [4, 7])
    same(compute("Mean", [1.0, 5.0], [3.0, 2.0]), [2, 3.5])
    same(compute("Pow", [2.0, 3.0], np.array([3, 2])), [8, 9])
    assert compute("Pow", np.array([2, 3], np.int32), [3.0, 2.0])[0].tolist() == [8, 9]


def test_bits() -> None:
    a, b = np.array([0b1100, 1], np.uint8), np.array([0b1010, 9], np.uint8)
    assert compute("BitwiseAnd", a, b)[0].tolist() == [0b1000, 1]
    assert compute("BitwiseOr", a, b)[0].tolist() == [0b1110, 9]
    assert compute("BitwiseXor", a, b)[0].tolist() == [0b0110, 8]
    assert compute("BitwiseNot", a)[0].tolist() == [0b11110011, 254]
    shift = np.array([2, 9], np.uint8)
    assert compute("BitShift", a, shift, direction="LEFT")[0].tolist() == [0b110000, 0]
    assert compute("BitShift", a, shift, direction="RIGHT")[0].tolist() == [0b11, 0]
    negative = np.array([-4, -4], np.int8)
    assert compute("BitShift", negative, np.array([1, 9], np.int8), direction="RIGHT")[0].tolist() == [-2, -1]
    assert compute("BitCast", np.float32(1), to=6)[0] == 0x3F800000


def test_truth() -> None:
    a, b = np.array([True, True, False]), np.array([True, False, False])
    assert compute("And", a, b)[0].tolist() == [True, False, False]
    assert compute("Or", a, b)[0].tolist() == [True, True, False]
    assert compute("Xor", a, b)[0].tolist() == [False, True, False]
    assert compute("Not", b)[0].tolist() == [False, True, True]
    big = np.array([2**60, 2**60 + 1], np.int64)
    assert compute("Less", big, big[::-1])[0].tolist() == [True, False]
    assert compute("GreaterOrEqual", big, big[::-1])[0].tolist() == [False, True]
    assert compute("LessOrEqual", big, big)[0].all() and not compute("Greater", big, big)[0].any()
    assert compute("Equal", big, big[::-1])[0].tolist() == [False, False]
    same(compute("Where", a, [1.0, 2.0, 3.0], 9.0), [1, 2, 9])
    special = [np.nan, np.inf, -np.inf, 1.0]
    assert compute("IsNaN", special)[0].tolist() == [True, False, False, False]
    assert compute("IsInf", special)[0].tolist() == [False, True, True, False]
    assert compute("IsInf", special, detect_negative=0)[0].tolist() == [False, True, False, False]


def test_casts() -> None:
    assert compute("Cast", [1.9, -1.9], to=7)[0].tolist() == [1, -1]
    assert compute("Cast", np.array([2**33], np.int64), to=1)[0].tolist() == [2.0**33]
    assert compute("CastLike", [1.5], np.zeros(1, np.uint16))[0].dtype == np.uint16


def test_shapes() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert compute("Shape", x, start=1)[0].tolist() == [3, 4]
    assert compute("Size", x)[0] == 24
    assert compute("Reshape", x, np.array([0, -1]))[0].shape == (2, 12)
    assert compute("Reshape", x, version=4, shape=[4, 6])[0].shape == (4, 6)
    assert compute("Flatten", x, axis=2)[0].shape == (6, 4)
    assert compute("Unsqueeze", x, np.array([0, -1]))[0].shape == (1, 2, 3, 4, 1)
    assert compute("Squeeze", x[None], np.array([0]))[0].shape == (2, 3, 4)
    same(compute("Transpose", x, perm=[2, 0, 1]), x.transpose(2, 0, 1))
    same(compute("Concat", x, x, axis=1), np.concatenate([x, x], 1))
    first, second = compute("Split", x, outputs=2, axis=2, num_outputs=2)
    same(first, x[..., :2])
    same(second, x[..., 2:])
    same(compute("Expand", x[:, :1], np.array([2, 3, 4])), np.repeat(x[:, :1], 3, 1))
    same(compute("Tile", x, np.array([1, 2, 1])), np.concatenate([x, x], 1))
    same(compute("ConstantOfShape", np.array([2, 2])), np.zeros((2, 2)))
    same(compute("EyeLike", np.zeros((2, 3), np.float32), k=1), [[0, 1, 0], [0, 0, 1]])
    assert compute("Range", np.int64(1), np.int64(8), np.int64(3))[0].tolist() == [1, 4, 7]


def test_slices() -> None:
    x = np.arange(10, dtype=np.float32)
    at = [np.array([n]) for n in (-2, -11, 0, -3)]
    same(compute("Slice", x, *at), x[-2::-3])
    same(compute("Slice", x, version=9, starts=[2], ends=[100]), x[2:])
    with pytest.raises(InvalidArgument, match="step"):
        compute("Slice", x, np.array([0]), np.array([1]), np.array([0]), np.array([0]))


def test_padding() -> None:
    x = np.array([[1.0, 2, 3]], np.float32)
    pads = np.array([0, 2, 1, 1])
    same(compute("Pad", x, pads, np.float32(9)), [[9, 9, 1, 2, 3, 9], [9] * 6])
    for mode, row in (
        ("reflect", [3, 2, 1, 2, 3, 2]),
        ("edge", [1, 1, 1, 2, 3, 3]),
        ("wrap", [2, 3, 1, 2, 3, 1]),
    ):
        same(compute("Pad", x, np.array([0, 2, 0, 1]), mode=mode), [row])
    same(compute("Pad", x, np.array([-1, 2]), None, np.array([1])), [[2, 3, 0, 0]])
    same(compute("CenterCropPad", x, np.array([1, 1])), [[2]])
    same(compute("CenterCropPad", x, np.array([5]), axes=[1]), [[0, 1, 2, 3, 0]])


def test_triangles_blocks_and_sequences() -> None:
    x = np.arange(1, 10, dtype=np.int64).reshape(3, 3)
    assert compute("Trilu", x)[0].tolist() == [[1, 2, 3], [0, 5, 6], [0, 0, 9]]
    assert compute("Trilu", x, np.int64(-1), upper=0)[0].tolist() == [[0, 0, 0], [4, 0, 0], [7, 8, 0]]
    assert compute("ReverseSequence", x, np.array([1, 2, 3]))[0].tolist() == [[1, 5, 9], [4, 2, 6], [7, 8, 3]]
    assert not compute("Trilu", x, np.int64(2**40))[0].any()
    deep = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    same(compute("DepthToSpace", deep, blocksize=2)[0][0, 0], [[0, 2], [4, 6]])
    same(compute("DepthToSpace", deep, blocksize=2, mode="CRD")[0][0, 0], [[0, 1], [2, 3]])
    back = compute("SpaceToDepth", compute("DepthToSpace", deep, blocksize=2)[0], blocksize=2)
    same(back, deep)


def test_gathering() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    same(compute("Gather", x, np.array([[-1, 0]]), axis=1), [[[2, 0]], [[5, 3]]])
    same(compute("GatherElements", x, np.array([[2, -3], [0, 1]]), axis=1), [[2, 0], [3, 4]])
    same(compute("GatherElements", x, np.array([[1, 0]]), axis=0), [[3, 1]])
    same(compute("GatherND", x, np.array([[0, 1], [-1, 2]])), [1, 5])
    same(compute("GatherND", x, np.array([[1], [0]]), batch_dims=1), [1, 3])
    for op_type, indices in (("Gather", [2]), ("GatherElements", [[2, 0, 0]]), ("GatherND", [[0, -4]])):
        with pytest.raises(InvalidArgument, match="indices"):
            compute(op_type, x, np.array(indices))


def test_scattering() -> None:
    x = np.zeros((3, 2), np.float32)
    at, updates = np.array([[2, 0], [2, 1]]), [[1.0, 2.0], [3.0, 4.0]]
    same(compute("ScatterElements", x, at, updates), [[0, 2], [0, 4], [3, 0]])
    same(compute("ScatterElements", x, at, updates, reduction="add"), [[0, 2], [0, 4], [4, 0]])
    same(compute("ScatterElements", x, np.array([[-1]]), [[5.0]], axis=1), [[0, 5], [0, 0], [0, 0]])
    same(compute("Scatter", x, at, updates, version=9), [[0, 2], [0, 4], [3, 0]])
    places = np.array([[0, 1], [-1, 0], [0, 1]])
    same(compute("ScatterND", x, places, [1.0, 2.0, 3.0]), [[0, 3], [0, 0], [2, 0]])
    same(compute("ScatterND", x, places, [1.0, 2.0, 3.0], reduction="max"), [[0, 3], [0, 0], [2, 0]])
    with pytest.raises(InvalidArgument, match="indices"):
        compute("ScatterND", x, np.array([[3, 0]]), [1.0])
    past = np.zeros((1, 3, 1), np.float32)
    same(compute("TensorScatter", past, [[[1.0], [2.0]]], np.array([2]), mode="circular"), [[[2], [0], [1]]])


def test_selection() -> None:
    x = np.array([[3.0, 0.0], [0.0, 7.0]], np.float32)
    assert compute("NonZero", x)[0].tolist() == [[0, 1], [0, 1]]
    assert compute("NonZero", np.float32(2))[0].shape == (0, 1)
    same(compute("Compress", x, np.array([False, True]), axis=0), [[0, 7]])
    same(compute("Compress", x, np.array([True, False, False, True])), [3, 7])
    assert compute("OneHot", np.array([2, -1]), np.int64(3), [0.0, 1.0])[0].tolist() == [[0, 0, 1]] * 2
    values, first, inverse, counts = compute("Unique", [2.0, 1.0, 1.0, 3.0], outputs=4, sorted=0)
    assert (values.tolist(), first.tolist(), inverse.tolist(), counts.tolist()) == (
        [2, 1, 3],
        [0, 1, 3],
        [0, 1, 1, 2],
        [1, 2, 1],
    )


@pytest.mark.parametrize(
    ("op_type", "inputs"),
    [
        ("Pad", ([1.0], np.array([1, 1]), [0.0, 2.0])),
        ("OneHot", (np.array([0]), np.array([2, 3]), [0.0, 1.0])),
        ("CumSum", ([1.0], np.array([0, 0]))),
    ],
)
def test_several_numbers_in_place_of_one_are_refused(op_type, inputs) -> None:
    with pytest.raises(InvalidArgument, match="expected one number, got 2"):
        compute(op_type, *inputs)


def test_order() -> None:
    x = [[1.0, 3.0, 3.0, 2.0]]
    values, places = compute("TopK", x, np.array([3]), outputs=2)
    assert values.tolist() == [[3, 3, 2]] and places.tolist() == [[1, 2, 3]]
    values, places = compute("TopK", x, np.array([2]), outputs=2, largest=0)
    assert values.tolist() == [[1, 2]] and places.tolist() == [[0, 3]]
    with pytest.raises(InvalidArgument, match="TopK"):
        compute("TopK", x, np.array([5]), outputs=2)
    assert compute("ArgMax", x, axis=1)[0].tolist() == [[1]]
    assert compute("ArgMax", x, axis=1, keepdims=0, select_last_index=1)[0].tolist() == [2]
    assert compute("ArgMin", x, axis=-1)[0].tolist() == [[0]]
    same(compute("Hardmax", x), [[0, 1, 0, 0]])


def test_boxes_that_overlap_are_suppressed() -> None:
    boxes = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 2, 1, 3], [1, 1, 0, 0]]], np.float32)
    scores = np.array([[[0.9, 0.8, 0.7, 0.95]]], np.float32)
    limits = [np.array([n]) for n in (3,)]
    got = compute("NonMaxSuppression", boxes, scores, *limits, [0.5], [0.0])
    assert got[0].tolist() == [[0, 0, 3], [0, 0, 2]]
    centred = np.array([[[0.5, 0.5, 1, 1], [0.6, 0.5, 1, 1]]], np.float32)
    got = compute("NonMaxSuppression", centred, scores[..., :2], *limits, [0.9], center_point_box=1)
    assert got[0].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert compute("NonMaxSuppression", boxes, scores)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("op_type", "function"),
    [
        ("ReduceSum", sum),
        ("ReduceProd", math.prod),
        ("ReduceMax", max),
        ("ReduceMin", min),
        ("ReduceMean", lambda row: sum(row) / len(row)),
        ("ReduceL1", lambda row: sum(map(abs, row))),
        ("ReduceL2", lambda row: math.sqrt(sum(n * n for n in row))),
        ("ReduceLogSum", lambda row: math.log(sum(row))),
        ("ReduceLogSumExp", lambda row: math.log(sum(map(math.exp, row)))),
        ("ReduceSumSquare", lambda row: sum(n * n for n in row)),
    ],
)
def test_reductions(op_type, function) -> None:
    x = [[1.0, 2.0, 4.0], [3.0, 1.0, 0.5]]
    same(compute(op_type, x, np.array([1])), [[function(row)] for row in x])
    same(compute(op_type, x, version=11, axes=[-1], keepdims=0), [function(row) for row in x])
    same(compute(op_type, x, keepdims=0), function([n for row in x for n in row]))


def test_reductions_of_no_axes_and_of_whole_numbers() -> None:
    x = np.array([[1, -2]], np.int32)
    assert compute("ReduceSum", x, noop_with_empty_axes=1)[0].tolist() == [[1, -2]]
    assert compute("ReduceSumSquare", x, noop_with_empty_axes=1)[0].tolist() == [[1, 4]]
    assert compute("ReduceSum", np.array([2**31 - 1, 1], np.int32), keepdims=0)[0] == -(2**31)
    assert compute("ReduceMax", np.array([True, False]), keepdims=0)[0]


def test_running_sums() -> None:
    x = np.array([1, 2, 3], np.int32)
    axis = np.int64(0)
    assert compute("CumSum", x, axis)[0].tolist() == [1, 3, 6]
    assert compute("CumSum", x, axis, exclusive=1, reverse=1)[0].tolist() == [5, 3, 0]
    assert compute("CumProd", x, axis, exclusive=1)[0].tolist() == [1, 1, 2]


def test_softmax() -> None:
    x = np.array([[0.0, math.log(3)], [700.0, 700.0]], np.float32)
    same(compute("Softmax", x), [[0.25, 0.75], [0.5, 0.5]])
    same(compute("LogSoftmax", x)[0][0], [math.log(0.25), math.log(0.75)])
    flat = compute("Softmax", x[:1, None], version=11, axis=1)[0]
    same(flat, [[[0.25, 0.75]]])


def test_losses() -> None:
    logs, target = np.array([[-1.0, -2.0], [-3.0, -4.0]], np.float32), np.array([1, 0])
    same(compute("NegativeLogLikelihoodLoss", logs, target, reduction="none"), [2, 3])
    same(compute("NegativeLogLikelihoodLoss", logs, target, [1.0, 3.0]), (2 * 3 + 3) / 4)
    same(compute("NegativeLogLikelihoodLoss", logs, target, ignore_index=0, reduction="sum"), 2)
    loss, shares = compute("SoftmaxCrossEntropyLoss", [[0.0, math.log(3)]], np.array([0]), outputs=2)
    same(loss, math.log(4))
    same(shares, [[math.log(0.25), math.log(0.75)]])
    with pytest.raises(InvalidArgument, match="classes"):
        compute("NegativeLogLikelihoodLoss", logs, np.array([2, 0]))


def test_results_that_are_too_large_are_rejected() -> None:
    x = np.ones((1, 1), np.float32)
    huge = np.array([2**20, 2**20])
    for op_type, *more in (
        ("Expand", huge),
        ("Tile", huge),
        ("ConstantOfShape",),
        ("Pad", np.array([0, 0, 2**20, 2**20])),
    ):
        with pytest.raises(InvalidArgument, match="result"):
            compute(op_type, *([x, *more] if more else [huge]))
    with pytest.raises(InvalidArgument, match="Range"):
        compute("Range", np.int64(0), np.int64(2**60), np.int64(1))

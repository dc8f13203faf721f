"""What operators compute, against numpy."""

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from tests.aionn.models.onnx.building import evaluate, file, info, operations

RANDOM = np.random.default_rng(11)
IMAGE = RANDOM.standard_normal((2, 4, 5, 6)).astype(np.float32)
MATRIX = RANDOM.standard_normal((3, 4)).astype(np.float32)
WHOLE = np.array([[-7, 7, 0], [3, -3, 9]], np.int32)


def one(op_type, arrays, constants=None, opset=21, **attributes):
    names = [*arrays, *(constants or {})]
    return evaluate([node(op_type, names, ["y"], **attributes)], arrays, ["y"], constants, opset=opset)[0]


@pytest.mark.parametrize(
    ("op_type", "function"),
    [
        ("Abs", np.abs),
        ("Neg", np.negative),
        ("Exp", np.exp),
        ("Floor", np.floor),
        ("Ceil", np.ceil),
        ("Round", np.rint),
        ("Sin", np.sin),
        ("Cos", np.cos),
        ("Tan", np.tan),
        ("Sinh", np.sinh),
        ("Cosh", np.cosh),
        ("Tanh", np.tanh),
        ("Sign", np.sign),
        ("Reciprocal", np.reciprocal),
        ("Sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("Relu", lambda x: np.maximum(x, 0)),
        ("Softplus", lambda x: np.log1p(np.exp(x))),
        ("Softsign", lambda x: x / (1 + np.abs(x))),
        ("HardSwish", lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
        ("Mish", lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    ],
)
def test_functions_of_one_value(op_type, function):
    x = np.concatenate([IMAGE.reshape(-1), np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e-3, -1e-3], np.float32)])
    if op_type == "Tan":
        x = x[np.abs(x) < 1.4]  # Beside its poles the last digits of pi count.
    expected = function(x.astype(np.float64))
    np.testing.assert_allclose(one(op_type, {"x": x}), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("op_type", "function"), [("Sinh", np.sinh), ("Cosh", np.cosh)])
def test_hyperbolic_functions_are_exact_over_the_whole_range(op_type, function):
    """The largest argument whose result fits float32 is 89.4159; EXP of it overflows from 88.73 on."""
    sizes = np.concatenate([np.geomspace(1e-44, 89.4, 2000), np.linspace(88.7, 89.4159, 500), [np.inf]])
    x = np.concatenate([sizes, -sizes]).astype(np.float32)
    expected = function(x.astype(np.float64))
    np.testing.assert_allclose(one(op_type, {"x": x}), expected, rtol=6e-7, atol=2e-45)


def test_the_error_function_is_exact_in_float32():
    import math

    x = np.linspace(-6, 6, 997, dtype=np.float32)
    expected = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(one("Erf", {"x": x}), expected, rtol=1e-6, atol=1e-7)
    gelu = x * 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))
    np.testing.assert_allclose(one("Gelu", {"x": x}), gelu, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op_type", "function"), [("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)]
)
@pytest.mark.parametrize(
    "shapes", [((2, 3, 4, 5), (3, 1, 5)), ((4,), (2, 3, 4)), ((2, 1, 4), (3, 1)), ((), (3, 2))]
)
def test_arithmetic_broadcasts(op_type, function, shapes):
    a, b = (RANDOM.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes)
    np.testing.assert_allclose(one(op_type, {"a": a, "b": b}), function(a, b), rtol=1e-6)
    np.testing.assert_allclose(one(op_type, {"a": a}, {"b": b}), function(a, b), rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 2, 4, 5), (1, 3, 1, 4, 1), (2, 1, 2, 1, 2, 1), (5,)])
def test_arithmetic_of_more_than_four_axes_broadcasts(shape):
    a = RANDOM.standard_normal(
        np.broadcast_shapes((2, 3, 2, 4, 5) if len(shape) < 6 else (2, 3, 2, 3, 2, 3), shape)
    )
    b = RANDOM.standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(one("Mul", {"a": a.astype(np.float32), "b": b}), a * b, rtol=1e-5)


def test_division_of_whole_numbers_rounds_towards_0():
    y = np.array([[2, -2, 4]], np.int32)
    np.testing.assert_array_equal(one("Div", {"x": WHOLE, "d": y}), np.trunc(WHOLE / y).astype(np.int32))


@pytest.mark.parametrize("fmod", [0, 1])
def test_the_rest_has_the_sign_that_the_flag_says(fmod):
    y = np.array([[4, -4, 2]], np.int32)
    expected = np.fmod(WHOLE, y) if fmod else np.mod(WHOLE, y)
    np.testing.assert_array_equal(one("Mod", {"x": WHOLE, "d": y}, fmod=fmod), expected)


def test_arithmetic_on_64_bits_needs_a_proof():
    x = np.array([1, 2], np.int64)
    data = file([node("Mul", ["x", "x"], ["y"])], [info("x", x)], ["y"])
    with pytest.raises(InvalidModel, match="may not fit 32 bits"):
        load_onnx(data, extensions="none")
    # The largest index of three is 2, so that its square is known to fit.
    nodes = [node("ArgMax", ["x"], ["i"], axis=1, keepdims=0), node("Mul", ["i", "i"], ["y"])]
    (y,) = evaluate(nodes, {"x": np.array([[1, 3, 9], [5, 4, 3]], np.float32)}, ["y"])
    assert y.dtype == np.int64 and y.tolist() == [4, 0]


def test_sums_of_64_bits_need_a_proof():
    x = np.array([[1, 2]], np.int64)
    data = file([node("ReduceSum", ["x", "a"], ["y"])], [info("x", x)], ["y"], {"a": np.array([1])})
    with pytest.raises(InvalidModel, match="may not fit 32 bits"):
        load_onnx(data, extensions="none")
    nodes = [
        node("Clip", ["x", "low", "high"], ["c"]),
        node("Clip", ["c", "", "most"], ["d"]),
        node("ReduceSum", ["d", "a"], ["y"]),
    ]
    constants = {"low": np.int64(0), "high": np.int64(2**63 - 1), "most": np.int64(1000), "a": np.array([1])}
    assert evaluate(nodes, {"x": x}, ["y"], constants)[0].tolist() == [[3]]


def test_constants_of_64_bits_are_joined():
    nodes = [node("Concat", ["a", "b"], ["e"], axis=0), node("Slice", ["x", "s", "e"], ["y"])]
    constants = {"a": np.array([2]), "b": np.array([2**63 - 1]), "s": np.array([0, 1])}
    np.testing.assert_array_equal(evaluate(nodes, {"x": MATRIX}, ["y"], constants)[0], MATRIX[:2, 1:])


def test_comparisons_and_choices():
    a, b = MATRIX, -MATRIX
    nodes = [
        node("Less", ["a", "b"], ["l"]),
        node("Not", ["l"], ["n"]),
        node("Xor", ["l", "n"], ["always"]),
        node("And", ["always", "l"], ["c"]),
        node("Where", ["c", "a", "zero"], ["y"]),
    ]
    y, n = evaluate(nodes, {"a": a, "b": b}, ["y", "n"], {"zero": np.float32(0)})
    np.testing.assert_array_equal(y, np.minimum(a, 0))
    assert n.dtype == bool
    np.testing.assert_array_equal(n, ~(a < b))


def test_truth_values_move_like_numbers():
    x = MATRIX > 0
    nodes = [
        node("Transpose", ["x"], ["t"]),
        node("Concat", ["t", "t"], ["c"], axis=0),
        node("Slice", ["c", "one", "far"], ["s"]),
        node("Where", ["s", "s", "no"], ["y"]),
    ]
    constants = {"one": np.array([1]), "far": np.array([2**62]), "no": np.array(False)}
    (y,) = evaluate(nodes, {"x": x}, ["y"], constants)
    np.testing.assert_array_equal(y, np.concatenate([x.T, x.T])[1:])


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_whole_numbers_are_transposed_and_joined(perm):
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4) + (1 << 24)  # More than a float holds exactly.
    nodes = [node("Transpose", ["x"], ["t"], perm=list(perm)), node("Concat", ["t", "c", "t"], ["y"], axis=1)]
    t = x.transpose(perm)
    c = t[:, :1] * 2
    (y,) = evaluate(nodes, {"x": x}, ["y"], {"c": c})
    np.testing.assert_array_equal(y, np.concatenate([t, c, t], 1))


@pytest.mark.parametrize("perm", [(0, 2, 1, 3, 4), (4, 3, 2, 1, 0), (0, 1, 4, 2, 3), (1, 0, 3, 2, 4)])
def test_transposes_of_five_axes(perm):
    x = RANDOM.standard_normal((2, 3, 2, 3, 2)).astype(np.float32)
    np.testing.assert_array_equal(one("Transpose", {"x": x}, perm=list(perm)), x.transpose(perm))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_padding(mode):
    pads = [0, 0, 1, 2, 0, 0, 2, 1]
    widths = [(0, 0), (0, 0), (1, 2), (2, 1)]
    np.testing.assert_array_equal(
        one("Pad", {"x": IMAGE}, {"p": np.array(pads)}, mode=mode), np.pad(IMAGE, widths, mode)
    )
    x = np.arange(120, dtype=np.int32).reshape(1, 4, 5, 6)
    np.testing.assert_array_equal(
        one("Pad", {"x": x}, {"p": np.array(pads)}, mode=mode), np.pad(x, widths, mode)
    )


@pytest.mark.parametrize("numbers", [[], [1, 1]])
@pytest.mark.parametrize(
    ("op_type", "x", "constants", "what"),
    [
        ("Pad", MATRIX, {"p": np.array([0, 1, 0, 1]), "n": np.float32}, r"input 2 \(the value\)"),
        ("OneHot", np.array([0, 1]), {"n": np.int64, "v": np.array([0, 1])}, r"input 1 \(the depth\)"),
        ("CumSum", MATRIX, {"n": np.int64}, r"input 1 \(the axis\)"),
        ("TopK", MATRIX, {"n": np.int64}, r"input 1 \(k\)"),
        ("Trilu", MATRIX, {"n": np.int64}, r"input 1 \(k\)"),
    ],
)
def test_several_numbers_in_place_of_one_are_refused(op_type, x, constants, what, numbers):
    given = {name: value if name != "n" else np.array(numbers, value) for name, value in constants.items()}
    with pytest.raises(InvalidModel, match=rf"{what}: expected one number, got {len(numbers)} numbers"):
        one(op_type, {"x": x}, given)


def test_slices_of_all_steps():
    constants = {
        "s": np.array([4, -100, 0]),
        "e": np.array([-100, 100, 5]),
        "a": np.array([2, -1, 1]),
        "t": np.array([-2, 2, 3]),
    }
    y = one("Slice", {"x": IMAGE}, constants)
    np.testing.assert_array_equal(y, IMAGE[:, 0:5:3, 4::-2, ::2])


def test_gathers_take_negative_indexes():
    i = np.array([[0, -1], [2, -4]], np.int64)
    np.testing.assert_array_equal(one("Gather", {"x": MATRIX}, {"i": i}, axis=1), np.take(MATRIX, i, 1))
    np.testing.assert_array_equal(one("Gather", {"x": MATRIX, "i": i}, axis=1), np.take(MATRIX, i, 1))
    j = np.array([[0, -1, 1]], np.int64)
    np.testing.assert_array_equal(
        one("GatherElements", {"x": MATRIX, "i": j}, axis=0), np.take_along_axis(MATRIX[:, :3], j % 3, 0)
    )


def test_the_first_of_equal_values_is_taken():
    x = np.array([[1, 5, 5, 2, 5]], np.float32)
    v, i = evaluate([node("TopK", ["x", "k"], ["v", "i"])], {"x": x}, ["v", "i"], {"k": np.array([4])})
    assert v.tolist() == [[5, 5, 5, 2]] and i.tolist() == [[1, 2, 4, 3]]
    assert one("ArgMax", {"x": x}, axis=1, keepdims=0).tolist() == [1]
    assert one("ArgMax", {"x": x}, axis=1, keepdims=0, select_last_index=1).tolist() == [4]


@pytest.mark.parametrize("axes", [[0], [1, 3], [-1], [0, 1, 2, 3]])
@pytest.mark.parametrize("keeps", [0, 1])
def test_reductions(axes, keeps):
    for op_type, function in (("ReduceMean", np.mean), ("ReduceMax", np.max), ("ReduceSum", np.sum)):
        y = one(op_type, {"x": IMAGE}, {"a": np.array(axes)}, keepdims=keeps)
        np.testing.assert_allclose(
            y, function(IMAGE, tuple(axes), keepdims=bool(keeps)), rtol=1e-5, atol=1e-6
        )


def test_reduction_with_axes_ignores_the_rule_for_none():
    one = node("ReduceMean", ["x", "axes"], ["y"], keepdims=1, noop_with_empty_axes=1)
    model = load_onnx(file([one], [info("x", np.zeros((2, 3), np.float32))], ["y"], {"axes": np.array([1])}))
    assert operations(model) == ["MEAN"]


def test_reductions_of_whole_numbers():
    for op_type, function in (("ReduceMax", np.max), ("ReduceMin", np.min), ("ReduceSum", np.sum)):
        y = one(op_type, {"x": WHOLE}, {"a": np.array([1])}, keepdims=0)
        np.testing.assert_array_equal(y, function(WHOLE, 1))


def convolved(x, w, b, strides, pads, dilations, groups):
    n = len(x)
    o, per, kh, kw = w.shape
    x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(np.float64)
    oh = (x.shape[2] - (kh - 1) * dilations[0] - 1) // strides[0] + 1
    ow = (x.shape[3] - (kw - 1) * dilations[1] - 1) // strides[1] + 1
    y = np.zeros((n, o, oh, ow))
    for k in range(o):
        group = k // (o // groups)
        part = x[:, group * per : (group + 1) * per]
        for i in range(oh):
            for j in range(ow):
                rows = slice(i * strides[0], i * strides[0] + (kh - 1) * dilations[0] + 1, dilations[0])
                columns = slice(j * strides[1], j * strides[1] + (kw - 1) * dilations[1] + 1, dilations[1])
                y[:, k, i, j] = (part[:, :, rows, columns] * w[k]).sum((1, 2, 3)) + b[k]
    return y


@pytest.mark.parametrize(
    ("depth", "groups", "strides", "pads", "dilations"),
    [
        (3, 1, [1, 1], [0, 0, 0, 0], [1, 1]),
        (3, 1, [2, 1], [1, 2, 0, 1], [1, 1]),
        (2, 1, [1, 1], [2, 1, 2, 3], [2, 1]),
        (4, 4, [1, 2], [1, 1, 1, 1], [1, 1]),
        (8, 4, [1, 1], [1, 0, 1, 0], [1, 2]),
        (6, 2, [1, 1], [1, 1, 1, 1], [1, 1]),
        (4, 2, [1, 1], [2, 2, 2, 2], [2, 2]),
        (2, 1, [1, 1], [4, 4, 4, 4], [1, 1]),
    ],
)
def test_convolutions(depth, groups, strides, pads, dilations):
    w = RANDOM.standard_normal((depth, 4 // groups, 3, 2)).astype(np.float32)
    b = RANDOM.standard_normal(depth).astype(np.float32)
    more = {"strides": strides, "pads": pads, "dilations": dilations, "group": groups}
    expected = convolved(IMAGE, w, b, strides, pads, dilations, groups)
    np.testing.assert_allclose(
        one("Conv", {"x": IMAGE}, {"w": w, "b": b}, **more), expected, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        one("Conv", {"x": IMAGE, "w": w, "b": b}, **more), expected, rtol=1e-4, atol=1e-4
    )


def test_products_of_matrices():
    for left, right in (
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (3, 4, 2)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4,)),
    ):
        a, b = (RANDOM.standard_normal(shape).astype(np.float32) for shape in (left, right))
        np.testing.assert_allclose(one("MatMul", {"a": a, "b": b}), a @ b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one("MatMul", {"a": a}, {"b": b}), a @ b, rtol=1e-4, atol=1e-5)
    c = RANDOM.standard_normal(5).astype(np.float32)
    w = RANDOM.standard_normal((5, 4)).astype(np.float32)
    y = one("Gemm", {"a": MATRIX}, {"w": w, "c": c}, transB=1, alpha=0.5, beta=2.0)
    np.testing.assert_allclose(y, 0.5 * MATRIX @ w.T + 2 * c, rtol=1e-5, atol=1e-5)


def test_softmax_before_version_13_takes_all_axes_behind():
    flat = IMAGE.reshape(2, -1)
    expected = np.exp(flat - flat.max(1, keepdims=True))
    expected = (expected / expected.sum(1, keepdims=True)).reshape(IMAGE.shape)
    np.testing.assert_allclose(one("Softmax", {"x": IMAGE}, opset=11, axis=1), expected, rtol=1e-5)


def test_average_pools_count_padding_only_if_told():
    x = np.ones((1, 1, 4, 4), np.float32)
    more = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    assert one("AveragePool", {"x": x}, **more)[0, 0, 0, 0] == 1
    np.testing.assert_allclose(
        one("AveragePool", {"x": x}, count_include_pad=1, **more)[0, 0, 0, 0], 4 / 9, rtol=1e-6
    )


def test_pools_round_up():
    x = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    y = one("MaxPool", {"x": x}, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    assert y.tolist() == [[[[6, 8, 9], [16, 18, 19], [21, 23, 24]]]]


def test_resizing_takes_the_neighbour_that_the_mode_names():
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4)
    scales = {"roi": np.array([], np.float32), "s": np.array([1, 1, 1, 0.5], np.float32)}
    assert one("Resize", {"x": x}, scales, mode="nearest").tolist() == [[[[0, 2]]]]
    assert one("Resize", {"x": x}, scales, mode="nearest", nearest_mode="round_prefer_ceil").tolist() == [
        [[[1, 3]]]
    ]


def test_normalisation_of_batches_is_one_product_and_one_sum():
    s, b, m, v = RANDOM.uniform(0.5, 2, (4, 4)).astype(np.float32)
    nodes = [node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"])]
    constants = {"s": s, "b": b, "m": m, "v": v}
    model = load_onnx(file(nodes, [info("x", IMAGE)], ["y"], constants))
    assert operations(model) == ["MUL", "ADD"]
    c = (slice(None), None, None)
    expected = (IMAGE - m[c]) / np.sqrt(v[c] + 1e-5) * s[c] + b[c]
    np.testing.assert_allclose(
        evaluate(nodes, {"x": IMAGE}, ["y"], constants)[0], expected, rtol=1e-4, atol=1e-5
    )


def test_8_bit_numbers_keep_their_scale():
    x = np.array([[0, 1.25, -3, 100]], np.float32)
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("Reshape", ["q", "shape"], ["r"]),
        node("DequantizeLinear", ["r", "s", "z"], ["y"]),
    ]
    constants = {"s": np.float32(0.5), "z": np.uint8(10), "shape": np.array([4])}
    q, y = evaluate(nodes, {"x": x}, ["q", "y"], constants)
    assert q.tolist() == [[10, 13, 4, 210]] and y.tolist() == [0, 1.5, -3, 100]
    # Plain numbers of the same type are shifted and multiplied.
    p = np.array([10, 13], np.uint8)
    assert one("DequantizeLinear", {"q": p}, {"s": np.float32(0.5), "z": np.uint8(10)}).tolist() == [0, 1.5]


def test_8_bit_weights_with_a_scale_for_each_channel_become_floats():
    q = RANDOM.integers(-128, 128, (4, 3), np.int8)
    s = RANDOM.uniform(0.1, 1, 3).astype(np.float32)
    nodes = [node("DequantizeLinear", ["q", "s"], ["w"], axis=1), node("MatMul", ["x", "w"], ["y"])]
    constants = {"q": q, "s": s}
    model = load_onnx(file(nodes, [info("x", MATRIX)], ["y"], constants))
    assert operations(model) == ["FULLY_CONNECTED"]
    (y,) = evaluate(nodes, {"x": MATRIX}, ["y"], constants)
    np.testing.assert_allclose(y, MATRIX @ (q * s), rtol=1e-4, atol=1e-4)


def test_8_bit_numbers_have_a_scale_for_each_channel():
    s, z = np.array([0.5, 1, 2], np.float32), np.array([10, 0, 255], np.uint8)
    x = np.array([[1.25, 2.5, -4], [1000, -1, 6]], np.float32)
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    q, y = evaluate(nodes, {"x": x}, ["q", "y"], {"s": s, "z": z})
    expected = np.clip(np.rint(x / s) + z, 0, 255)
    np.testing.assert_array_equal(q, expected)
    np.testing.assert_array_equal(y, (expected - z) * s)


def test_quantised_products_are_a_step_away_at_most():
    a, b = RANDOM.integers(0, 256, (3, 4), np.uint8), RANDOM.integers(-128, 128, (4, 5), np.int8)
    constants = {
        "as": np.float32(0.02),
        "az": np.uint8(120),
        "b": b,
        "bs": RANDOM.uniform(0.01, 0.02, 5).astype(np.float32),
        "bz": np.zeros(5, np.int8),
        "ys": np.float32(0.1),
        "yz": np.uint8(128),
    }
    nodes = [node("QLinearMatMul", ["a", "as", "az", "b", "bs", "bz", "ys", "yz"], ["y"])]
    (y,) = evaluate(nodes, {"a": a}, ["y"], constants)
    product = (a.astype(np.int64) - 120) @ b.astype(np.int64) * (0.02 * constants["bs"])
    expected = np.clip(np.rint(product / 0.1) + 128, 0, 255)
    assert y.dtype == np.uint8 and np.abs(y - expected).max() <= 1


def test_quantised_values_are_not_compared_as_plain_numbers():
    nodes = [node("QuantizeLinear", ["x", "s"], ["q"]), node("Max", ["q", "c"], ["y"])]
    data = file(nodes, [info("x", MATRIX)], ["y"], {"s": np.float32(0.5), "c": np.uint8(3)})
    with pytest.raises(InvalidModel, match="quantised values as plain numbers"):
        load_onnx(data, extensions="none")


def test_casts_that_wrap_around_are_refused():
    for dtype, target in ((np.int32, 2), (np.float32, 7)):
        data = file([node("Cast", ["x"], ["y"], to=target)], [info("x", np.ones(3, dtype))], ["y"])
        with pytest.raises(InvalidModel, match="a cast of"):
            load_onnx(data, extensions="none")


@pytest.mark.parametrize(
    "op_type", ["Max", "Min", "Clip", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool"]
)
def test_a_nan_is_the_largest_and_the_smallest_number(op_type):
    x = np.array([[[[1, np.nan, 3, -2]]]], np.float32)
    constants, attributes = {}, {}
    if op_type in ("Max", "Min", "Clip"):
        constants = {"c": np.float32(0)}
    if op_type == "MaxPool":
        attributes = {"kernel_shape": [1, 2], "strides": [1, 2]}
    found = one(op_type, {"x": x}, constants, **attributes).reshape(-1)
    places = {"MaxPool": [True, False]}.get(op_type, [False, True, False, False] if constants else [True])
    assert np.isnan(found).tolist() == places


def test_sums_of_squares_wrap_around():
    x = np.array([65536, 46341, 3], np.int32)
    assert int(one("ReduceSumSquare", {"x": x}, keepdims=0)) == 46341**2 + 9 - 2**32


def test_aligned_corners_use_the_length_before_it_is_rounded_down():
    x, scale = np.array([[[[0, 1, 2, 3, 4]]]], np.float32), 1.3
    nodes = [
        node("Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="align_corners")
    ]
    (found,) = evaluate(nodes, {"x": x}, ["y"], {"s": np.array([1, 1, 1, scale], np.float32)})
    np.testing.assert_allclose(found[0, 0, 0], np.arange(6) * 4 / (5 * scale - 1), rtol=1e-5)


@pytest.mark.parametrize(
    ("op_type", "expected"),
    [
        ("ReduceSum", 0),
        ("ReduceProd", 1),
        ("ReduceMax", -np.inf),
        ("ReduceMin", np.inf),
        ("ReduceL1", 0),
        ("ReduceL2", 0),
        ("ReduceSumSquare", 0),
        ("ReduceLogSum", -np.inf),
        ("ReduceLogSumExp", -np.inf),
    ],
)
@pytest.mark.parametrize(("keepdims", "shape"), [(0, (2, 4)), (1, (2, 1, 4))])
def test_reductions_of_no_elements(op_type, expected, keepdims, shape):
    nodes = [node(op_type, ["none", "axes"], ["r"], keepdims=keepdims), node("Add", ["x", "r"], ["y"])]
    constants = {"none": np.zeros((2, 0, 4), np.float32), "axes": np.array([1])}
    (y,) = evaluate(nodes, {"x": np.zeros(shape, np.float32)}, ["y"], constants)
    np.testing.assert_array_equal(y, np.full(shape, expected, np.float32))


@pytest.mark.parametrize(
    ("op_type", "dtype", "expected"),
    [
        ("ReduceMax", np.int32, -(2**31)),
        ("ReduceMin", np.int32, 2**31 - 1),
        ("ReduceMax", bool, False),
        ("ReduceMin", bool, True),
    ],
)
def test_extremes_of_no_elements_are_the_ends_of_the_type(op_type, dtype, expected):
    nodes = [node(op_type, ["none", "axes"], ["r"], keepdims=0), node("Where", ["x", "r", "r"], ["y"])]
    constants = {"none": np.zeros((0, 2), dtype), "axes": np.array([0])}
    (y,) = evaluate(nodes, {"x": np.array([True, False])}, ["y"], constants)
    assert y.tolist() == [expected] * 2


def test_a_mean_of_no_elements_is_rejected():
    nodes = [node("ReduceMean", ["none", "axes"], ["r"], keepdims=0), node("Add", ["x", "r"], ["y"])]
    constants = {"none": np.zeros((0, 2), np.float32), "axes": np.array([0])}
    data = file(nodes, [info("x", np.zeros(2, np.float32))], ["y"], constants)
    with pytest.raises(InvalidModel, match="a reduction of no elements"):
        load_onnx(data)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_swiglu(dtype):
    a, b = IMAGE.astype(dtype), IMAGE[0, :, ::-1].astype(dtype)
    wide = a.astype(np.float64)
    expected = wide / (1 + np.exp(-0.5 * wide)) * b
    found = one("SwiGLU", {"a": a, "b": b}, opset=28, alpha=0.5)
    np.testing.assert_allclose(found, expected, *((1e-5, 1e-6) if dtype == np.float32 else (2e-3, 2e-3)))


def test_indexes_of_one_hot_may_be_floats():
    x = np.array([[1, 9], [2, -4]], np.float32)
    y = one("OneHot", {"x": x}, {"depth": np.float32(10), "values": np.float32([1, 3])}, opset=11, axis=1)
    assert y.shape == (2, 10, 2) and np.argwhere(y == 3).tolist() == [
        [0, 1, 0],
        [0, 9, 1],
        [1, 2, 0],
        [1, 6, 1],
    ]


def test_batch_normalization_in_training():
    scale, bias, mean, variance = (RANDOM.uniform(0.5, 2, 4).astype(np.float32) for _ in range(4))
    names = ["x", "scale", "bias", "mean", "variance"]
    nodes = [
        node("BatchNormalization", names, ["y", "m", "v"], training_mode=1, momentum=0.75, epsilon=1e-2),
    ]
    constants = {"scale": scale, "bias": bias, "mean": mean, "variance": variance}
    y, m, v = evaluate(nodes, {"x": IMAGE}, ["y", "m", "v"], constants)
    own, spread = IMAGE.mean((0, 2, 3)), IMAGE.var((0, 2, 3))
    across = (4, 1, 1)
    normal = (IMAGE - own.reshape(across)) / np.sqrt(spread + 1e-2).reshape(across)
    np.testing.assert_allclose(y, normal * scale.reshape(across) + bias.reshape(across), 1e-4, 1e-5)
    np.testing.assert_allclose(m, mean * 0.75 + own * 0.25, 1e-5, 1e-6)
    np.testing.assert_allclose(v, variance * 0.75 + spread * 0.25, 1e-5, 1e-6)

"""Constants of all shapes that broadcast, against numpy: extents that coincide do not make a column a row.

Source: "Broadcasting in ONNX", and the operators' specifications.
"""

import itertools

import numpy as np
import pytest

from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from tests.aionn.models.onnx.building import evaluate, file, info

EXTENTS = (3, 3, 3, 3)
SHAPES = [shape for rank in range(5) for shape in itertools.product((1, 3), repeat=rank)]
"""All shapes of up to four axes that broadcast to ``EXTENTS``."""

MATRICES = [(3, 3), (1, 3), (3, 1), (2, 3), (3, 2), (1, 1)]
IDENTITY = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)

ELEMENTWISE = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
    "Sum": np.add,
    "Mean": lambda a, b: (a + b) / 2,
    "Pow": np.power,
    "PRelu": lambda a, b: np.where(a < 0, a * b, a),
    "Greater": np.greater,
    "Equal": np.equal,
}


def numbers(seed, shape):
    return np.random.default_rng([seed, *shape]).uniform(0.5, 2, shape).astype(np.float32)


def signed(seed, shape):
    return numbers(seed, shape) * np.random.default_rng([seed, *shape, 7]).choice([-1, 1], shape).astype(
        np.float32
    )


def evaluated(op_type, arrays, constants, order, *, opset=21, **attributes):
    return evaluate([node(op_type, order, ["y"], **attributes)], arrays, ["y"], constants, opset=opset)[0]


def narrower(shape):
    """The shapes of a constant that broadcast to a shape in one direction, of all ranks up to its own."""
    return [
        tuple(extents)
        for rank in range(len(shape) + 1)
        for extents in sorted(set(itertools.product(*((1, e) for e in shape[len(shape) - rank :]))))
    ]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("op_type", ELEMENTWISE)
def test_a_constant_of_any_shape_meets_its_axes(op_type):
    function = ELEMENTWISE[op_type]
    for rank in range(1, 5):
        x = signed(rank, EXTENTS[:rank]) if op_type == "PRelu" else numbers(rank, EXTENTS[:rank])
        for shape in narrower(x.shape):
            c = numbers(9, shape)
            found = evaluated(op_type, {"x": x}, {"c": c}, ["x", "c"])
            np.testing.assert_allclose(found, function(x, c), rtol=1e-5, err_msg=f"{x.shape} {shape}")
            if op_type != "PRelu":
                found = evaluated(op_type, {"x": x}, {"c": c}, ["c", "x"])
                np.testing.assert_allclose(found, function(c, x), rtol=1e-5, err_msg=f"{shape} {x.shape}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op_type", ["Add", "Mul", "Max", "PRelu", "Pow", "Greater"])
def test_a_constant_meets_the_axes_of_an_image(op_type):
    """A convolution leaves its image with channels last, so that the constant's axes change their places."""
    x = numbers(3, EXTENTS)
    for shape in SHAPES:
        nodes = [node("Conv", ["x", "w"], ["i"]), node(op_type, ["i", "c"], ["y"])]
        c = numbers(4, shape)
        (found,) = evaluate(nodes, {"x": x}, ["y"], {"w": IDENTITY, "c": c})
        np.testing.assert_allclose(found, ELEMENTWISE[op_type](x, c), rtol=1e-5, err_msg=f"{shape}")


def test_choices_meet_the_axes_of_the_condition():
    condition = np.random.default_rng(5).random((3, 3, 3)) < 0.5
    for yes, no in itertools.product(narrower((3, 3, 3)), repeat=2):
        a, b = numbers(1, yes), numbers(2, no)
        found = evaluated("Where", {"x": condition}, {"a": a, "b": b}, ["x", "a", "b"])
        np.testing.assert_array_equal(found, np.where(condition, a, b), err_msg=f"{yes} {no}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("turns", [(0, 0), (1, 1)])
def test_the_bias_of_a_product_is_a_row_a_column_or_a_matrix(turns, is_constant):
    for (rows, columns), beta in itertools.product(MATRICES, (1.0, 0.5)):
        a, b = numbers(1, (rows, 3)), numbers(2, (3, columns))
        for shape in narrower((rows, columns)):
            c = numbers(3, shape)
            constants = {"b": b.T.copy() if turns[1] else b}
            arrays = {"a": a.T.copy() if turns[0] else a}
            (constants if is_constant else arrays)["c"] = c
            found = evaluated(
                "Gemm", arrays, constants, ["a", "b", "c"], transA=turns[0], transB=turns[1], beta=beta
            )
            np.testing.assert_allclose(found, a @ b + beta * c, rtol=1e-5, err_msg=f"{a.shape} {shape}")


def test_a_bias_that_is_larger_than_the_product_is_refused():
    a, b = numbers(1, (1, 3)), numbers(2, (3, 3))
    for shape in ((3, 3), (1, 1, 3), (2,)):
        data = file(
            [node("Gemm", ["a", "b", "c"], ["y"])], [info("a", a)], ["y"], {"b": b, "c": numbers(3, shape)}
        )
        with pytest.raises(InvalidModel, match="broadcasts to"):
            load_onnx(data)


def test_a_sum_after_a_product_meets_its_axes():
    a, b = numbers(1, (3, 3, 3)), numbers(2, (3, 3))
    for shape in narrower((3, 3, 3)):
        nodes = [node("MatMul", ["a", "b"], ["p"]), node("Add", ["p", "c"], ["y"])]
        c = numbers(3, shape)
        (found,) = evaluate(nodes, {"a": a}, ["y"], {"b": b, "c": c})
        np.testing.assert_allclose(found, a @ b + c, rtol=1e-5, err_msg=f"{shape}")


@pytest.mark.parametrize("axis", [1, 2])
def test_the_scale_of_a_layer_meets_its_axes(axis):
    x = numbers(1, (3, 3, 3))
    inner = tuple(range(axis, 3))
    centred = x - x.mean(inner, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(inner, keepdims=True) + 1e-5)
    for shape in narrower(x.shape[axis:]):
        scale, bias = numbers(2, shape), numbers(3, shape)
        found = evaluated("LayerNormalization", {"x": x}, {"s": scale, "b": bias}, ["x", "s", "b"], axis=axis)
        np.testing.assert_allclose(found, normal * scale + bias, rtol=1e-4, atol=1e-5, err_msg=f"{shape}")


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_numbers_for_each_channel_meet_the_channels(rank):
    x = numbers(1, EXTENTS[:rank])
    scale, bias, mean, variance = (numbers(seed, (3,)) for seed in range(2, 6))
    across = (3, *(1,) * (rank - 2))

    def channel(values):
        return values.reshape(across)

    found = evaluated(
        "BatchNormalization",
        {"x": x},
        {"s": scale, "b": bias, "m": mean, "v": variance},
        ["x", "s", "b", "m", "v"],
    )
    expected = (x - channel(mean)) / np.sqrt(channel(variance) + 1e-5) * channel(scale) + channel(bias)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if rank > 2:
        inner = tuple(range(2, rank))
        centred = x - x.mean(inner, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(inner, keepdims=True) + 1e-5)
        for op_type, more in (("InstanceNormalization", {}), ("GroupNormalization", {"num_groups": 3})):
            found = evaluated(op_type, {"x": x}, {"s": scale, "b": bias}, ["x", "s", "b"], **more)
            expected = normal * channel(scale) + channel(bias)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_slopes_of_old_operator_sets_are_one_for_each_channel(rank, is_constant):
    x, slope = signed(1, EXTENTS[:rank]), numbers(2, (3,))
    arrays, constants = {"x": x}, {}
    (constants if is_constant else arrays)["s"] = slope
    found = evaluated("PRelu", arrays, constants, ["x", "s"], opset=6)
    np.testing.assert_allclose(found, np.where(x < 0, x * slope.reshape(3, *(1,) * (rank - 2)), x), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scales_of_a_channel_meet_their_axis(axis):
    x = (numbers(1, (3, 3, 3)) * 20).astype(np.float32)
    scale, zero = np.array([0.5, 0.25, 1], np.float32), np.array([1, 2, 3], np.uint8)
    across = [1, 1, 1]
    across[axis] = 3
    constants = {"s": scale, "z": zero}
    found = evaluated("QuantizeLinear", {"x": x}, constants, ["x", "s", "z"], axis=axis)
    scales, zeros = scale.reshape(across), zero.reshape(across)
    whole = np.clip(np.rint(x / scales) + zeros, 0, 255)
    np.testing.assert_array_equal(found, whole)
    q = whole.astype(np.uint8)
    found = evaluated("DequantizeLinear", {"x": q}, constants, ["x", "s", "z"], axis=axis)
    np.testing.assert_allclose(found, (q.astype(np.float32) - zeros) * scales)

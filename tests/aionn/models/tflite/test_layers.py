"""Layers with weights, pooling and reductions: imported, they compute what LiteRT computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aionn.interpreter import Interpreter, RunControl
from aionn.models.tflite import load_tflite

CASES: dict[str, tuple[Callable[..., Any], float]] = {}
"""Name -> what makes the graph from the writer, and the absolute tolerance; 0 demands equality in every bit."""


def case(name: str, atol: float = 0.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = (make, atol)
        return make

    return register


# Layers

for _padding in (0, 1):
    for _dilation in (1, 2):

        @case(f"CONV_2D padding {_padding} dilation {_dilation}", 1e-5)
        def _(t, p=_padding, d=_dilation):
            size = {(0, 1): (4, 5), (1, 1): (3, 3), (0, 2): (7, 9), (1, 2): (3, 5)}[p, d]
            s = 2 if d == 1 else 1
            return t.one(
                [
                    t.f32(1, 7, 9, 3),
                    t.T("float32", value=t.reals((4, 3, 3, 3))),
                    t.T("float32", value=t.reals((4,))),
                ],
                [t.f32(1, size[0], size[1] if s == 1 or p == 0 else 4, 4)],
                3,
                "Conv2DOptions",
                padding=p,
                stride_w=s,
                stride_h=s,
                dilation_w_factor=d,
                dilation_h_factor=d,
                fused_activation_function=1,
            )


@case("CONV_2D grouped", 1e-5)
def _(t):
    return t.one(
        [t.f32(1, 5, 5, 6), t.T("float32", value=t.reals((4, 3, 3, 3))), t.T("float32", value=t.reals((4,)))],
        [t.f32(1, 5, 5, 4)],
        3,
        "Conv2DOptions",
        stride_w=1,
        stride_h=1,
    )


def _int8_layer(t, shape, filter_shape, axis, out_shape, code, table, **values):
    count = filter_shape[axis]
    scales = np.linspace(0.002, 0.009, count, dtype=np.float32)
    bias = np.random.default_rng(3).integers(-4000, 4000, count).astype(np.int32)
    return t.one(
        [
            t.T("int8", shape, scale=0.04, zero_point=-11),
            t.T("int8", value=t.weights(filter_shape), scale=scales, axis=axis),
            t.T("int32", value=bias, scale=scales * np.float32(0.04)),
        ],
        [t.T("int8", out_shape, scale=0.09, zero_point=13)],
        code,
        table,
        **values,
    )


@case("CONV_2D int8 per channel")
def _(t):
    return _int8_layer(
        t, (1, 8, 8, 5), (12, 3, 3, 5), 0, (1, 8, 8, 12), 3, "Conv2DOptions", stride_w=1, stride_h=1
    )


@case("DEPTHWISE_CONV_2D int8 per channel")
def _(t):
    return _int8_layer(
        t, (1, 8, 8, 6), (1, 3, 3, 12), 3, (1, 4, 4, 12), 4, "DepthwiseConv2DOptions", stride_w=2, stride_h=2
    )


@case("CONV_2D with FLOAT16 weights", 1e-5)
def _(t):
    tensors = [
        t.f32(1, 5, 5, 3),
        t.T("float16", value=t.reals((4, 3, 3, 3)).astype(np.float16)),
        t.f32(4, 3, 3, 3),
        t.T("float16", value=t.reals((4,)).astype(np.float16)),
        t.f32(4),
        t.f32(1, 5, 5, 4),
    ]
    operators = [
        t.Op(6, [1], [2]),
        t.Op(6, [3], [4]),
        t.Op(3, [0, 2, 4], [5], "Conv2DOptions", {"stride_w": 1, "stride_h": 1}),
    ]
    return t.Graph(tensors, operators, [0], [5])


@case("DEPTHWISE_CONV_2D", 1e-5)
def _(t):
    return t.one(
        [t.f32(1, 6, 6, 3), t.T("float32", value=t.reals((1, 3, 3, 6))), t.T("float32", value=t.reals((6,)))],
        [t.f32(1, 6, 6, 6)],
        4,
        "DepthwiseConv2DOptions",
        stride_w=1,
        stride_h=1,
    )


@case("TRANSPOSE_CONV", 1e-5)
def _(t):
    return t.one(
        [
            t.T("int32", value=np.int32([1, 8, 8, 4])),
            t.T("float32", value=t.reals((4, 3, 3, 2))),
            t.f32(1, 4, 4, 2),
        ],
        [t.f32(1, 8, 8, 4)],
        67,
        "TransposeConvOptions",
        stride_w=2,
        stride_h=2,
    )


for _name, _code in (("AVERAGE_POOL_2D", 1), ("MAX_POOL_2D", 17), ("L2_POOL_2D", 12)):

    @case(_name, 1e-6)
    def _(t, code=_code):
        return t.one(
            [t.f32(1, 7, 7, 3)],
            [t.f32(1, 4, 4, 3)],
            code,
            "Pool2DOptions",
            stride_w=2,
            stride_h=2,
            filter_width=3,
            filter_height=3,
        )


@case("AVERAGE_POOL_2D int8")
def _(t):
    return t.one(
        [t.T("int8", (1, 7, 7, 3), scale=0.1, zero_point=3)],
        [t.T("int8", (1, 4, 4, 3), scale=0.1, zero_point=3)],
        1,
        "Pool2DOptions",
        stride_w=2,
        stride_h=2,
        filter_width=3,
        filter_height=3,
        fused_activation_function=1,
    )


for _keep in (False, True):

    @case(f"FULLY_CONNECTED rank 3 keep {_keep}", 1e-5)
    def _(t, keep=_keep):
        return t.one(
            [t.f32(2, 3, 10), t.T("float32", value=t.reals((4, 10))), t.T("float32", value=t.reals((4,)))],
            [t.f32(2, 3, 4) if keep else t.f32(6, 4)],
            9,
            "FullyConnectedOptions",
            keep_num_dims=keep,
            fused_activation_function=1,
        )


@case("FULLY_CONNECTED int8 per tensor")
def _(t):
    return t.one(
        [
            t.T("int8", (5, 64), scale=0.04, zero_point=-11),
            t.T("int8", value=t.weights((20, 64)), scale=0.005),
            t.T("int32", value=np.arange(20, dtype=np.int32) * 50, scale=0.0002),
        ],
        [t.T("int8", (5, 20), scale=0.11, zero_point=13)],
        9,
        "FullyConnectedOptions",
    )


for _units in (1, 20, 64):

    @case(f"FULLY_CONNECTED int8 per channel, {_units} units")
    def _(t, units=_units):
        return _int8_layer(t, (5, 64), (units, 64), 0, (5, units), 9, "FullyConnectedOptions")


# LiteRT rounds this one once at the end, a convolution after the product and after the shift: at most one step apart.
@case("FULLY_CONNECTED int8 per channel, 65 units", 1)
def _(t):
    return _int8_layer(t, (5, 64), (65, 64), 0, (5, 65), 9, "FullyConnectedOptions")


@case("BATCH_MATMUL", 1e-5)
def _(t):
    return t.one([t.f32(2, 3, 4), t.f32(2, 5, 4)], [t.f32(2, 3, 5)], 126, "BatchMatMulOptions", adj_y=True)


@case("L2_NORMALIZATION", 1e-6)
def _(t):
    return t.one([t.f32(1, 2, 2, 8)], [t.f32(1, 2, 2, 8)], 11, "L2NormOptions")


@case("LOCAL_RESPONSE_NORMALIZATION", 1e-6)
def _(t):
    return t.one([t.f32(1, 2, 2, 8)], [t.f32(1, 2, 2, 8)], 13, "LocalResponseNormalizationOptions",
        radius=2, bias=1.0, alpha=0.5, beta=0.6,
    )  # fmt: skip


# Reductions

for _name, _code in (("MEAN", 40), ("SUM", 74), ("REDUCE_PROD", 81)):

    @case(_name, 1e-4)
    def _(t, code=_code):
        return t.one(
            [t.f32(2, 3, 4), t.T("int32", value=np.int32([-1]))], [t.f32(2, 3)], code, "ReducerOptions"
        )


for _name, _code in (("REDUCE_MAX", 82), ("REDUCE_MIN", 89)):

    @case(f"{_name} keep", 0)
    def _(t, code=_code):
        return t.one(
            [t.f32(2, 3, 4), t.T("int32", value=np.int32([0, 2]))],
            [t.f32(1, 3, 1)],
            code,
            "ReducerOptions",
            keep_dims=True,
        )


for _name, _code in (("REDUCE_ANY", 91),):

    @case(_name, 0)
    def _(t, code=_code):
        return t.one(
            [t.T("bool", (3, 4)), t.T("int32", value=np.int32([1]))],
            [t.T("bool", (3,))],
            code,
            "ReducerOptions",
        )


def _quantized_reduction(t, dtype, zero, code, scale, out_zero):
    return t.one(
        [t.T(dtype, (1, 7, 7, 64), scale=0.0235, zero_point=zero), t.T("int32", value=np.int32([1, 2]))],
        [t.T(dtype, (1, 64), scale=scale, zero_point=out_zero)],
        code,
        "ReducerOptions",
    )


# The filter that rounds as the reference does is not found for every zero point; where it is not, one step of difference remains.
for _dtype, _zero, _zero_to, _atol in (("int8", -128, -128, 0), ("int8", 5, -3, 1), ("uint8", 0, 0, 0)):
    CASES[f"MEAN {_dtype} {_zero}"] = (
        lambda t, d=_dtype, z=_zero, o=_zero_to: _quantized_reduction(t, d, z, 40, 0.0113, o),
        _atol,
    )
CASES["SUM uint8"] = (lambda t: _quantized_reduction(t, "uint8", 0, 74, 1.3, 0), 0)


@case("ARG_MAX")
def _(t):
    return t.one(
        [t.f32(4, 9), t.T("int32", value=np.int32(-1))],
        [t.T("int32", (4,))],
        56,
        "ArgMaxOptions",
        output_type=2,
    )


@case("ARG_MIN")
def _(t):
    return t.one(
        [t.f32(4, 9), t.T("int32", value=np.int32(0))],
        [t.T("int32", (9,))],
        79,
        "ArgMinOptions",
        output_type=2,
    )


@case("TOPK_V2")
def _(t):
    return t.one([t.f32(4, 9), t.T("int32", value=np.int32(3))], [t.f32(4, 3), t.T("int32", (4, 3))], 48)


@case("TOPK_V2 of equal numbers")
def _(t):
    # Of 300 8-bit numbers many are equal, and so are their indexes' order.
    stored = {"scale": 0.5, "zero_point": 3}
    return t.one(
        [t.T("int8", (2, 300), **stored), t.T("int32", value=np.int32(60))],
        [t.T("int8", (2, 60), **stored), t.T("int32", (2, 60))],
        48,
    )


@case("CUMSUM", 1e-6)
def _(t):
    return t.one([t.f32(3, 6, 2), t.T("int32", value=np.int32(1))], [t.f32(3, 6, 2)], 128, "CumsumOptions")


@case("CUMSUM exclusive reverse int32")
def _(t):
    return t.one(
        [t.T("int32", (3, 6)), t.T("int32", value=np.int32(1))],
        [t.T("int32", (3, 6))],
        128,
        "CumsumOptions",
        exclusive=True,
        reverse=True,
    )


@pytest.mark.parametrize("name", CASES)
def test_import_computes_what_the_reference_kernels_compute(name, tflite, compare_with_litert):
    make, atol = CASES[name]
    compare_with_litert(make(tflite), atol, is_only_optimized=name == "LOCAL_RESPONSE_NORMALIZATION")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_damaged_file_loads_or_is_refused(name, tflite, load_damaged):
    load_damaged(CASES[name][0](tflite), name)


def test_sum_of_int8_is_rescaled_and_saturates(tflite):
    # LiteRT's own kernel for this returns -1 everywhere.
    graph = _quantized_reduction(tflite, "int8", 5, 74, 0.4, -3)
    imported = load_tflite(tflite.write(graph))
    x = np.random.default_rng(20240607).integers(-128, 128, (1, 7, 7, 64)).astype(np.int8)
    (got,) = Interpreter(imported.model).run([x], RunControl())
    exact = (x.astype(np.int64) - 5).sum((1, 2)) * (np.float32(0.0235) / np.float32(0.4)) - 3
    np.testing.assert_allclose(got, np.clip(exact, -128, 127), atol=0.53)
    assert np.abs(got.astype(int)).max() > 60


@pytest.mark.parametrize("code", [3, 9])
def test_integer_weights_of_float_data_become_floats_first(code, tflite):
    # LiteRT quantises the data instead and multiplies integers, which is less exact.
    t = tflite
    shape, table = ((4, 1, 1, 6), "Conv2DOptions") if code == 3 else ((4, 6), "FullyConnectedOptions")
    values = {"stride_w": 1, "stride_h": 1} if code == 3 else {}
    data = t.f32(1, 2, 2, 6) if code == 3 else t.f32(3, 6)
    out = t.f32(1, 2, 2, 4) if code == 3 else t.f32(3, 4)
    stored = t.weights(shape)
    scales = np.float32([0.1, 0.2, 0.3, 0.4])
    reals = stored * scales.reshape(-1, *[1] * (len(shape) - 1))
    weights = (t.T("int8", value=stored, scale=scales), t.T("float32", value=reals))
    x = np.random.default_rng(3).uniform(-1, 1, data.shape).astype(np.float32)
    results = []
    for tensor in weights:
        imported = load_tflite(t.write(t.one([data, tensor], [out], code, table, **values)))
        results.append(np.array(Interpreter(imported.model).run([x], RunControl())[0]))
        for pool in imported.model.pools:
            pool.close()
    np.testing.assert_array_equal(*results)
    assert np.abs(results[0]).max() > 1

"""Operators on 8-bit integers: imported, they compute in every bit what LiteRT's reference kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

CASES: dict[str, tuple[Callable[..., Any], float]] = {}
"""Name -> what makes the graph from the writer, and how many steps the results may differ."""

KINDS = {"int8": (-128, 4, -9), "uint8": (0, 132, 119)}
"""For each type its least value and two zero points."""


def add(name: str, make: Callable[..., Any], atol: float = 0.0) -> None:
    for kind in KINDS:
        CASES[f"{name} {kind}"] = (lambda t, k=kind: make(t, k, *KINDS[k]), atol)


def unary(
    code: int, scale: float, least: int | None = None, *options: Any, **values: Any
) -> Callable[..., Any]:
    """An operator from one scale to another; ``least`` is the output's zero point above the type's least value."""

    def make(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
        out_zero = zero if least is None else low + least
        return t.one(
            [t.T(kind, (2, 3, 40), scale=0.06, zero_point=zero)],
            [t.T(kind, (2, 3, 40), scale=scale, zero_point=out_zero)],
            code,
            *options,
            **values,
        )

    return make


add("LOGISTIC", unary(14, 1 / 256, 0))
add("TANH", unary(28, 1 / 128, 128))
add("SOFTMAX", unary(25, 1 / 256, 0, "SoftmaxOptions", beta=1.0))
add("HARD_SWISH", unary(117, 0.05))
add("RELU", unary(19, 0.06))
add("RELU6", unary(21, 0.06))
add("L2_NORMALIZATION", unary(11, 1 / 128, 128, "L2NormOptions"))


def binary(code: int, out_scale: float, table: str | None = None) -> Callable[..., Any]:
    def make(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
        same = out_scale == 0
        return t.one(
            [
                t.T(kind, (3, 50), scale=0.05, zero_point=zero),
                t.T(kind, (1, 50), scale=0.05 if same else 0.03, zero_point=zero if same else other),
            ],
            [t.T(kind, (3, 50), scale=out_scale or 0.05, zero_point=zero)],
            code,
            table,
        )

    return make


add("ADD", binary(0, 0.07, "AddOptions"))
add("SUB", binary(41, 0.07, "SubOptions"))
add("MUL", binary(18, 0.11, "MulOptions"))
add("MAXIMUM", binary(55, 0))
add("MINIMUM", binary(57, 0))


def compare(code: int) -> Callable[..., Any]:
    def make(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
        a, b = (t.T(kind, (4, 60), scale=0.05, zero_point=zero) for _ in range(2))
        return t.one([a, b], [t.T("bool", (4, 60))], code)

    return make


for _name, _code in (("LESS", 58), ("GREATER_EQUAL", 62), ("EQUAL", 71)):
    add(_name, compare(_code))


def pool(code: int) -> Callable[..., Any]:
    def make(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
        return t.one(
            [t.T(kind, (1, 7, 7, 5), scale=0.1, zero_point=zero)],
            [t.T(kind, (1, 4, 4, 5), scale=0.1, zero_point=zero)],
            code,
            "Pool2DOptions",
            stride_w=2,
            stride_h=2,
            filter_width=3,
            filter_height=3,
        )

    return make


add("AVERAGE_POOL_2D", pool(1))
add("MAX_POOL_2D", pool(17))


def moved(
    code: int, out_shape: tuple[int, ...], *extra: Any, options: str | None = None, **values: Any
) -> Callable[..., Any]:
    """An operator that moves values and keeps their scale."""

    def make(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
        quant = {"scale": 0.05, "zero_point": zero}
        more = [t.T("int32", value=np.int32(v)) for v in extra]
        return t.one(
            [t.T(kind, (1, 4, 6, 2), **quant), *more],
            [t.T(kind, out_shape, **quant)],
            code,
            options,
            **values,
        )

    return make


add("PAD", moved(34, (1, 6, 9, 2), [[0, 0], [1, 1], [2, 1], [0, 0]]))
add(
    "MIRROR_PAD",
    moved(100, (1, 6, 9, 2), [[0, 0], [1, 1], [2, 1], [0, 0]], options="MirrorPadOptions", mode=0),
)
add("TRANSPOSE", moved(39, (1, 2, 6, 4), [0, 3, 2, 1]))
add("RESHAPE", moved(22, (8, 6), [8, 6]))
add("SLICE", moved(65, (1, 2, 3, 2), [0, 1, 2, 0], [1, 2, 3, 2]))
add("GATHER", moved(36, (1, 4, 3, 2), [5, 0, 5], options="GatherOptions", axis=2))
add("TILE", moved(69, (2, 4, 6, 6), [2, 1, 1, 3]))
add("SPACE_TO_DEPTH", moved(26, (1, 2, 3, 8), options="SpaceToDepthOptions", block_size=2))
add("REDUCE_MAX", moved(82, (1, 6, 2), [1], options="ReducerOptions"))
add("MEAN of one scale", moved(40, (1, 2), [1, 2], options="ReducerOptions"))
add("RESIZE_NEAREST_NEIGHBOR", moved(97, (1, 8, 9, 2), [8, 9], options="ResizeNearestNeighborOptions"))
add(
    "RESIZE_BILINEAR",
    moved(23, (1, 8, 9, 2), [8, 9], options="ResizeBilinearOptions"),
)
# Of unsigned results the HAL's kernel drops the fraction and LiteRT's rounds it.
CASES["RESIZE_BILINEAR uint8"] = (CASES["RESIZE_BILINEAR uint8"][0], 1)


def _argmax(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
    return t.one(
        [t.T(kind, (5, 9), scale=0.05, zero_point=zero), t.T("int32", value=np.int32(1))],
        [t.T("int32", (5,))],
        56,
        "ArgMaxOptions",
        output_type=2,
    )


def _concatenation(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
    quant = {"scale": 0.05, "zero_point": zero}
    return t.one(
        [t.T(kind, (2, 3), **quant), t.T(kind, (2, 5), **quant)],
        [t.T(kind, (2, 8), **quant)],
        2,
        "ConcatenationOptions",
        axis=1,
    )


def _prelu(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
    alpha = np.arange(1, 6).astype(kind)
    return t.one(
        [
            t.T(kind, (1, 4, 4, 5), scale=0.05, zero_point=zero),
            t.T(kind, value=alpha, scale=0.1, zero_point=other),
        ],
        [t.T(kind, (1, 4, 4, 5), scale=0.06, zero_point=other)],
        54,
    )


add("ARG_MAX", _argmax)
add("CONCATENATION", _concatenation)
add("PRELU", _prelu)


def _layer(
    code: int, shape: Any, weights: Any, out_shape: Any, table: str, **values: Any
) -> Callable[..., Any]:
    """A layer with weights of the data's type and one scale."""

    def make(t: Any, kind: str, low: int, zero: int, other: int) -> Any:
        stored = np.random.default_rng(5).integers(low + 1, low + 256, weights).astype(kind)
        count = out_shape[-1]
        bias = np.random.default_rng(6).integers(-3000, 3000, count).astype(np.int32)
        return t.one(
            [
                t.T(kind, shape, scale=0.04, zero_point=zero),
                t.T(kind, value=stored, scale=0.005, zero_point=0 if kind == "int8" else 120),
                t.T("int32", value=bias, scale=0.04 * 0.005),
            ],
            [t.T(kind, out_shape, scale=0.12, zero_point=other)],
            code,
            table,
            **values,
        )

    return make


add("CONV_2D", _layer(3, (1, 6, 6, 4), (8, 3, 3, 4), (1, 6, 6, 8), "Conv2DOptions", stride_w=1, stride_h=1))
add(
    "DEPTHWISE_CONV_2D",
    _layer(4, (1, 6, 6, 4), (1, 3, 3, 8), (1, 6, 6, 8), "DepthwiseConv2DOptions", stride_w=1, stride_h=1),
)
add(
    "FULLY_CONNECTED",
    _layer(9, (6, 80), (30, 80), (6, 30), "FullyConnectedOptions", fused_activation_function=1),
)


def _transpose_conv(t: Any) -> Any:
    scales = np.linspace(0.002, 0.009, 6, dtype=np.float32)
    return t.one(
        [
            t.T("int32", value=np.int32([1, 8, 8, 6])),
            t.T("int8", value=t.weights((6, 3, 3, 4)), scale=scales),
            t.T("int8", (1, 4, 4, 4), scale=0.04, zero_point=-7),
        ],
        [t.T("int8", (1, 8, 8, 6), scale=0.06, zero_point=5)],
        67,
        "TransposeConvOptions",
        stride_w=2,
        stride_h=2,
    )


def _batch_matmul(t: Any) -> Any:
    return t.one(
        [
            t.T("int8", (2, 5, 30), scale=0.04, zero_point=-7),
            t.T("int8", (2, 30, 6), scale=0.03, zero_point=9),
        ],
        [t.T("int8", (2, 5, 6), scale=0.2, zero_point=5)],
        126,
        "BatchMatMulOptions",
    )


CASES["TRANSPOSE_CONV int8 per channel"] = (_transpose_conv, 0)
CASES["BATCH_MATMUL int8"] = (_batch_matmul, 0)


@pytest.mark.parametrize("name", CASES)
def test_import_computes_what_the_reference_kernels_compute(name, tflite, compare_with_litert):
    make, atol = CASES[name]
    compare_with_litert(make(tflite), atol, is_only_optimized=False)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_damaged_file_loads_or_is_refused(name, tflite, load_damaged):
    load_damaged(CASES[name][0](tflite), name)

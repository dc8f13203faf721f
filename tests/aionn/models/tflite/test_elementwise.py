"""Operators that work element by element, and changes of type: imported, they compute what LiteRT computes."""

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


# Unary and binary operators

for _name, _code in {
    "ABS": 101, "CEIL": 104, "FLOOR": 8, "NEG": 59, "SQUARE": 92, "RELU": 19, "RELU_N1_TO_1": 20, "RELU6": 21,
    "RELU_0_TO_1": 152, "SIGN": 158, "ZEROS_LIKE": 93,
}.items():  # fmt: skip
    CASES[_name] = (lambda t, c=_code: t.one([t.f32(2, 5, 7)], [t.f32(2, 5, 7)], c), 0)
for _name, _code in {
    "EXP": 47, "SIN": 66, "LOGISTIC": 14, "TANH": 28, "HARD_SWISH": 117, "ELU": 111, "LOG_SOFTMAX": 50, "COS": 108,
}.items():  # fmt: skip
    CASES[_name] = (lambda t, c=_code: t.one([t.f32(3, 11)], [t.f32(3, 11)], c), 2e-6)
for _name, _code in {"MAXIMUM": 55, "MINIMUM": 57}.items():
    CASES[_name] = (lambda t, c=_code: t.one([t.f32(2, 5), t.f32(5)], [t.f32(2, 5)], c), 0)
for _name, _code in {
    "LESS": 58,
    "LESS_EQUAL": 63,
    "GREATER": 61,
    "GREATER_EQUAL": 62,
    "EQUAL": 71,
    "NOT_EQUAL": 72,
}.items():
    CASES[_name] = (
        lambda t, c=_code: t.one([t.T("int32", (3, 40)), t.T("int32", (1, 40))], [t.T("bool", (3, 40))], c),
        0,
    )
for _name, _code in {"LOGICAL_AND": 86, "LOGICAL_OR": 84}.items():
    CASES[_name] = (
        lambda t, c=_code: t.one([t.T("bool", (4, 5)), t.T("bool", (4, 5))], [t.T("bool", (4, 5))], c),
        0,
    )
CASES["LOGICAL_NOT"] = (lambda t: t.one([t.T("bool", (9,))], [t.T("bool", (9,))], 87), 0)
for _name, _code, _table in (
    ("ADD", 0, "AddOptions"),
    ("SUB", 41, "SubOptions"),
    ("MUL", 18, "MulOptions"),
    ("DIV", 42, "DivOptions"),
):
    for _act in range(4):
        CASES[f"{_name} activation {_act}"] = (
            lambda t, c=_code, o=_table, a=_act: t.one(
                [t.f32(2, 3, 4), t.f32(3, 1)],
                [t.f32(2, 3, 4)],
                c,
                o,
                fused_activation_function=a,
            ),
            1e-6,
        )
    if _name != "DIV":
        CASES[f"{_name} int32"] = (
            lambda t, c=_code, o=_table: t.one(
                [t.T("int32", (6,)), t.T("int32")], [t.T("int32", (6,))], c, o
            ),
            0,
        )
        CASES[f"{_name} int8"] = (
            lambda t, c=_code, o=_table: t.one(
                [
                    t.T("int8", (2, 30), scale=0.02, zero_point=3),
                    t.T("int8", (30,), scale=0.03, zero_point=-7),
                ],
                [t.T("int8", (2, 30), scale=0.05, zero_point=11)],
                c,
                o,
                fused_activation_function=1,
            ),
            0,
        )


@case("ROUND")
def _(t):
    # Multiples of a half beside the random numbers.
    halves = t.T("float32", value=np.arange(-8, 8, dtype=np.float32) / 2)
    tensors = [t.f32(16), halves, t.f32(16), t.f32(16), t.f32(16), t.f32(16)]
    operators = [
        t.Op(116, [0], [2]),
        t.Op(0, [1, 0], [3], "AddOptions"),
        t.Op(41, [3, 0], [4], "SubOptions"),
        t.Op(116, [4], [5]),
    ]
    return t.Graph(tensors, operators, [0], [2, 5])


@case("SQUARED_DIFFERENCE", 1e-6)
def _(t):
    return t.one([t.f32(4, 3), t.f32(3)], [t.f32(4, 3)], 99)


@case("DIV int32")
def _(t):
    return t.one(
        [t.T("int32", (50,)), t.T("int32", value=np.int32([-3]))], [t.T("int32", (50,))], 42, "DivOptions"
    )


@case("FLOOR_DIV int32")
def _(t):
    return t.one([t.T("int32", (50,)), t.T("int32", value=np.int32([-3]))], [t.T("int32", (50,))], 90)


@case("FLOOR_MOD int32")
def _(t):
    return t.one([t.T("int32", (50,)), t.T("int32", value=np.int32([-3]))], [t.T("int32", (50,))], 95)


@case("FLOOR_DIV float", 0)
def _(t):
    return t.one([t.f32(50), t.T("float32", value=np.float32([0.5]))], [t.f32(50)], 90)


@case("ADD_N", 1e-6)
def _(t):
    return t.one([t.f32(2, 3), t.f32(2, 3), t.f32(2, 3)], [t.f32(2, 3)], 106)


@case("GELU approximate", 1e-6)
def _(t):
    return t.one([t.f32(40)], [t.f32(40)], 150, "GeluOptions", approximate=True)


@case("LEAKY_RELU", 1e-6)
def _(t):
    return t.one([t.f32(4, 9)], [t.f32(4, 9)], 98, "LeakyReluOptions", alpha=0.2)


for _alpha in (0.2, -0.3):

    @case(f"LEAKY_RELU int8 {_alpha}")
    def _(t, alpha=_alpha):
        return t.one(
            [t.T("int8", (4, 60), scale=0.05, zero_point=5)],
            [t.T("int8", (4, 60), scale=0.04, zero_point=-9)],
            98,
            "LeakyReluOptions",
            alpha=alpha,
        )


for _code, _name in ((19, "RELU"), (21, "RELU6"), (20, "RELU_N1_TO_1")):

    @case(f"{_name} int8 to another scale")
    def _(t, code=_code):
        return t.one(
            [t.T("int8", (4, 60), scale=0.07, zero_point=5)],
            [t.T("int8", (4, 60), scale=0.03, zero_point=-128)],
            code,
        )


@case("PRELU", 1e-6)
def _(t):
    return t.one([t.f32(1, 3, 3, 5), t.T("float32", value=t.reals((1, 1, 5)))], [t.f32(1, 3, 3, 5)], 54)


@case("SOFTMAX", 1e-6)
def _(t):
    return t.one([t.f32(3, 10)], [t.f32(3, 10)], 25, "SoftmaxOptions", beta=1.5)


@case("SELECT same shapes")
def _(t):
    return t.one([t.T("bool", (3, 4)), t.f32(3, 4), t.f32(3, 4)], [t.f32(3, 4)], 64)


@case("SELECT_V2 broadcast")
def _(t):
    return t.one([t.T("bool", (1, 4)), t.f32(3, 1), t.T("float32", value=t.reals((4,)))], [t.f32(3, 4)], 123)


# Changes of type and quantisation

for _from, _zero, _to, _zero_to in (
    ("int8", 4, "int8", -20),
    ("uint8", 100, "int8", -5),
    ("int8", 4, "uint8", 128),
    ("uint8", 128, "int8", 0),
):

    @case(f"QUANTIZE {_from} {_zero} to {_to} {_zero_to}")
    def _(t, a=_from, za=_zero, b=_to, zb=_zero_to):
        return t.one(
            [t.T(a, (7, 40), scale=0.031, zero_point=za)],
            [t.T(b, (7, 40), scale=0.031 if zb == 0 else 0.047, zero_point=zb)],
            114,
        )


@case("QUANTIZE float to int8")
def _(t):
    return t.one([t.f32(500)], [t.T("int8", (500,), scale=0.02, zero_point=7)], 114)


@case("DEQUANTIZE int8")
def _(t):
    return t.one([t.T("int8", (300,), scale=0.02, zero_point=7)], [t.f32(300)], 6)


@case("DEQUANTIZE float16 constant")
def _(t):
    half = t.T("float16", value=t.reals((4, 5)).astype(np.float16))
    tensors = [t.f32(4, 5), half, t.f32(4, 5), t.f32(4, 5)]
    return t.Graph(tensors, [t.Op(6, [1], [2]), t.Op(0, [0, 2], [3], "AddOptions")], [0], [3])


for _from, _to in (
    ("float32", "int32"),
    ("int32", "float32"),
    ("bool", "float32"),
    ("int32", "bool"),
    ("uint8", "float32"),
    ("int8", "float32"),
    ("int8", "int32"),
    ("bool", "int32"),
):

    @case(f"CAST {_from} to {_to}")
    def _(t, a=_from, b=_to):
        return t.one([t.T(a, (5, 8))], [t.T(b, (5, 8))], 53)


@pytest.mark.parametrize("name", CASES)
def test_import_computes_what_the_reference_kernels_compute(name, tflite, compare_with_litert):
    make, atol = CASES[name]
    compare_with_litert(make(tflite), atol, is_only_optimized=name in {"CEIL", "ELU", "ROUND"})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_damaged_file_loads_or_is_refused(name, tflite, load_damaged):
    load_damaged(CASES[name][0](tflite), name)

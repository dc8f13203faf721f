"""Pools, resizing and transposed convolutions by HAL operations, against the kernels of the extension's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aionn.drivers.onnx_reference.kernels import kernel_for
from aionn.errors import InvalidModel
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import DATA_TYPES, node
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.extension.application import Application
from aionn.models.onnx.extension.contracts import output_types
from tests.aionn.models.onnx.building import file, info, run

Array = np.ndarray[Any, Any]

RANDOM = np.random.default_rng(17)
IMAGE = RANDOM.standard_normal((2, 3, 7, 8)).astype(np.float32)
LINE = RANDOM.standard_normal((1, 2, 9)).astype(np.float32)
BYTES = (IMAGE * 50 + 100).clip(0, 255).astype(np.uint8)
KERNEL = RANDOM.standard_normal((3, 2, 3, 3)).astype(np.float32)


def reals(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


def wholes(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


def both(
    op_type: str, x: Array, constants: Sequence[Array | None], outputs: int, attributes: dict[str, Any]
) -> tuple[list[Array], Sequence[Array]]:
    """The results of HAL operations, and those of the extension's kernel."""
    given = {f"c{place}": constant for place, constant in enumerate(constants) if constant is not None}
    names = ["x", *(f"c{place}" if f"c{place}" in given else "" for place in range(len(constants)))]
    results = [f"y{place}" for place in range(outputs)]
    data = file([node(op_type, names, results, **attributes)], [info("x", x)], results, given, opset=22)
    inputs = [
        None if a is None else ValueType(int(DATA_TYPES[a.dtype.name]), a.shape) for a in (x, *constants)
    ]
    listed = {name: list(value) if isinstance(value, list) else value for name, value in attributes.items()}
    types = output_types(Application(op_type, 22, listed, inputs, [x, *constants], outputs))
    kernel = kernel_for(op_type, Record(22, listed, tuple(inputs), tuple(types)))
    assert kernel is not None, "the device has the operation"
    return run(load_onnx(data, extensions="none"), {"x": x}), kernel(x, *constants)


def check(op_type: str, x: Array, *constants: Array | None, outputs: int = 1, **attributes: Any) -> None:
    found, expected = both(op_type, x, constants, outputs, attributes)
    tolerance = 2e-3 if x.dtype == np.float16 else 2e-5
    for own, other in zip(found, expected, strict=True):
        assert (own.shape, own.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(own, other, tolerance, tolerance)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    ("x", "attributes"),
    [
        (IMAGE, {"kernel_shape": [2, 3], "dilations": [2, 2]}),
        (IMAGE, {"kernel_shape": [3, 3], "dilations": [2, 1], "pads": [1, 1, 2, 1], "strides": [2, 2], "ceil_mode": 1}),
        (LINE, {"kernel_shape": [3], "dilations": [2], "auto_pad": "SAME_LOWER"}),
        (IMAGE.astype(np.float16), {"kernel_shape": [2, 2], "dilations": [3, 3]}),
    ],
)  # fmt: skip
def test_windows_may_have_gaps(op_type: str, x: Array, attributes: dict[str, Any]) -> None:
    check(op_type, x, **attributes)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("counts", [0, 1])
def test_averages_beyond_the_end_count_what_is_there(dilation: int, counts: int) -> None:
    pads: dict[str, Any] = {
        "pads": [1, 1, 1, 1],
        "strides": [3, 3],
        "ceil_mode": 1,
        "count_include_pad": counts,
    }
    check("AveragePool", IMAGE, kernel_shape=[3, 3], dilations=[dilation] * 2, **pads)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_norms_of_any_order(p: int) -> None:
    check("LpPool", IMAGE, kernel_shape=[2, 2], pads=[1, 0, 0, 1], p=p)
    check("LpPool", IMAGE, kernel_shape=[2, 2], dilations=[2, 2], p=p)
    check("LpPool", LINE, kernel_shape=[4], strides=[2], ceil_mode=1, p=p)
    check("LpPool", IMAGE.astype(np.float16), kernel_shape=[2, 2], p=p)
    check("GlobalLpPool", IMAGE, p=p)


@pytest.mark.parametrize(
    "x", [IMAGE, IMAGE.clip(-0.2, 0.2), BYTES], ids=["floats", "equal ones", "whole numbers"]
)
@pytest.mark.parametrize("storage_order", [0, 1])
def test_places_of_the_largest_elements(x: Array, storage_order: int) -> None:
    window: dict[str, Any] = {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "strides": [2, 1], "ceil_mode": 1}
    check("MaxPool", x, outputs=2, storage_order=storage_order, **window)


def test_places_in_a_line() -> None:
    check("MaxPool", LINE, outputs=2, kernel_shape=[3], dilations=[2], pads=[1, 1])


def test_windows_with_gaps_are_bounded() -> None:
    x = np.zeros((1, 1, 40, 40), np.float32)
    data = file(
        [node("MaxPool", ["x"], ["y"], kernel_shape=[9, 9], dilations=[2, 2])],
        [info("x", x)],
        ["y"],
        opset=22,
    )
    with pytest.raises(InvalidModel, match="of more than 64 elements"):
        load_onnx(data, extensions="none")


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("excludes", [0, 1])
@pytest.mark.parametrize("scales", [(0.6, 0.8), (0.3, 2.0), (0.5, 0.15)])
def test_shrinking_is_smoothed(mode: str, excludes: int, scales: tuple[float, float]) -> None:
    more: dict[str, Any] = {"mode": mode, "antialias": 1, "exclude_outside": excludes}
    check("Resize", IMAGE, None, reals(1, 1, *scales), **more)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize(
    ("region", "sizes", "axes"),
    [
        ((0, 0, 0.4, 0.6, 1, 1, 0.6, 0.8), (2, 3, 3, 3), None),
        ((0, 0, 0.4, 0.6, 1, 1, 1.2, 1.7), (2, 3, 3, 4), None),
        ((0.6, 0.4, 0.9, 0.9), (8, 1), [3, 2]),
    ],
)
def test_regions_are_resized(mode: str, region: Sequence[float], sizes: Sequence[int], axes: Any) -> None:
    more: dict[str, Any] = {} if axes is None else {"axes": axes}
    more |= {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}
    check("Resize", IMAGE, reals(*region), None, wholes(*sizes), mode=mode, **more)


@pytest.mark.parametrize("wanted", [[20, 21], [21, 24], [19, 22], [22, 25], [24, 26]])
@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("bias", [[], [reals(5, 7)]])
def test_padding_follows_from_the_shape_of_a_transposed_convolution(
    wanted: list[int], mode: str, bias: list[Array]
) -> None:
    """Windows alone give 21 x 24. ONNX Runtime has the same results."""
    check("ConvTranspose", IMAGE, KERNEL, *bias, strides=[3, 3], output_shape=wanted, auto_pad=mode)

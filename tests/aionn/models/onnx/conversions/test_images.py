"""Transposed convolutions by HAL operations, against the kernels of the extension's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aionn.drivers.onnx_reference.kernels import kernel_for
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import DATA_TYPES, node
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.extension.application import Application
from aionn.models.onnx.extension.contracts import output_types
from tests.aionn.models.onnx.building import file, info, run

Array = np.ndarray[Any, Any]

RANDOM = np.random.default_rng(17)
IMAGE = RANDOM.standard_normal((2, 3, 7, 8)).astype(np.float32)
KERNEL = RANDOM.standard_normal((3, 2, 3, 3)).astype(np.float32)


def reals(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


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


@pytest.mark.parametrize("wanted", [[20, 21], [21, 24], [19, 22], [22, 25], [24, 26]])
@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("bias", [[], [reals(5, 7)]])
def test_padding_follows_from_the_shape_of_a_transposed_convolution(
    wanted: list[int], mode: str, bias: list[Array]
) -> None:
    """Windows alone give 21 x 24. ONNX Runtime has the same results."""
    check("ConvTranspose", IMAGE, KERNEL, *bias, strides=[3, 3], output_shape=wanted, auto_pad=mode)

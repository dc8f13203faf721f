"""Operators of the extension that OpenVINO computes otherwise than ONNX defines them are left to other devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.drivers.openvino.driver import OpenvinoDevice
from aionn.drivers.openvino.gaps import gap_of
from aionn.models.onnx import load_onnx
from aionn.models.onnx.encoding import node
from aionn.models.onnx.extension import Record, ValueType
from aionn.models.onnx.schema import DataType
from tests.aionn.models.onnx.building import file, info

FLOAT = ValueType(DataType.FLOAT, (1, 2, 4, 4))


def gap(op_type: str, inputs: tuple[ValueType | None, ...] = (FLOAT,), **attributes: Any) -> str | None:
    """The gap of an application whose inputs are not constant."""
    return gap_of(op_type, Record(21, attributes, inputs, (FLOAT,)), lambda place: None)


@pytest.mark.parametrize("op_type", ["DFT", "DynamicQuantizeLinear", "NonMaxSuppression", "TopK"])
def test_operator_that_openvino_defines_otherwise_is_left_to_others(op_type: str) -> None:
    assert gap(op_type) and not gap("Erf")


@pytest.mark.parametrize(
    ("attributes", "is_left"),
    [
        ({"mode": "cubic"}, False),
        ({"mode": "cubic", "antialias": 1}, True),
        ({"mode": "cubic", "exclude_outside": 1}, True),
        ({"coordinate_transformation_mode": "align_corners"}, True),
        ({"keep_aspect_ratio_policy": "not_larger"}, True),
        ({"keep_aspect_ratio_policy": "stretch"}, False),
    ],
)
def test_unusual_resizing_is_left_to_others(attributes: dict[str, Any], is_left: bool) -> None:
    assert (gap("Resize", **attributes) is not None) == is_left


@pytest.mark.parametrize(
    ("inputs", "attributes", "is_left"),
    [
        (3, {"is_causal": 1, "scale": 0.5}, False),
        (4, {}, False),
        (6, {}, True),
        (3, {"left_window_size": 2}, True),
    ],
)
def test_unusual_attention_is_left_to_others(inputs: int, attributes: dict[str, Any], is_left: bool) -> None:
    assert (gap("Attention", (FLOAT,) * inputs, **attributes) is not None) == is_left


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [("GRU", {"layout": 1}), ("RoiAlign", {"mode": "max"}), ("Tile", {}), ("QuantizeLinear", {})],
)
def test_form_of_an_operator_is_left_to_others(op_type: str, attributes: dict[str, Any]) -> None:
    assert gap(op_type, **attributes)


def test_values_without_elements_and_volumes_are_left_to_others() -> None:
    assert gap("ReduceSum", (ValueType(DataType.FLOAT, (2, 0, 4)),)) == "values without elements"
    assert gap("GridSample", (ValueType(DataType.FLOAT, (1, 2, 3, 4, 5)),)) == "volumes"
    assert gap("GridSample") is None


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_device_asks_for_the_gaps(dtype: Any) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    shift = node("BitShift", ["x", "by"], ["y"], direction="LEFT")
    model = load_onnx(file([shift], [info("x", np.ones(4, dtype))], ["y"], {"by": np.ones(4, dtype)})).model
    assert all(OpenvinoDevice().supports(model)) == (dtype == np.uint8)

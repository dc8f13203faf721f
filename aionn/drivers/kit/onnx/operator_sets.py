"""ONNX operators of older operator sets as those of the one that is written, and the set that newer operators need.

Owns the changes between versions that change the meaning or the arguments of an operator. Changes that only add element types or
attributes with the former meaning as default need nothing.

Invariant: an operator that cannot be rewritten with certainty is ``Unsupported``.

Source: "Operator Changelog" of ONNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.support import Unsupported

__all__ = ["INTRODUCED", "Application", "needed_version", "upgraded"]

INTRODUCED = {
    "Attention": 23, "RMSNormalization": 23, "RotaryEmbedding": 23, "Swish": 24, "TensorScatter": 24, "BitCast": 26, "CumProd": 26,
    "CausalConvWithState": 27, "LinearAttention": 27, "SwiGLU": 28,
}  # fmt: skip
"""The first version of the operators that ``lowered.OPSET`` does not have."""

_ATTRIBUTES = {
    ("DequantizeLinear", "output_dtype"): 23, ("QuantizeLinear", "precision"): 23, ("Cast", "round_mode"): 24,
    ("CastLike", "round_mode"): 24, ("Attention", "left_window_size"): 25, ("Attention", "right_window_size"): 25,
    ("Range", "stash_type"): 27, ("SpaceToDepth", "mode"): 28,
}  # fmt: skip
"""The same for attributes."""


class Application(NamedTuple):
    """A node before it is written.

    Attributes:
        op_type: The operator.
        attributes: By name.
        inputs: The names of the inputs; empty for omitted ones.
    """

    op_type: str
    attributes: dict[str, Any]
    inputs: list[str]


def needed_version(op_type: str, attributes: dict[str, Any]) -> int:
    """The least version that has an operator with these attributes, as far as it is newer than ``lowered.OPSET``; else 0."""
    versions = [_ATTRIBUTES.get((op_type, name), 0) for name in attributes]
    return max(INTRODUCED.get(op_type, 0), *versions, 0)


def upgraded(
    application: Application, version: int, output_count: int, constant: Callable[[Array], str]
) -> Application:
    """The same node for the newest operators.

    Args:
        application: The node.
        version: The version of the operator set that it is of.
        output_count: Number of its outputs.
        constant: Returns the name of a new constant.

    Raises:
        Unsupported: No newer operator is certain to compute the same.
    """
    op_type, attributes, inputs = application.op_type, dict(application.attributes), list(application.inputs)

    def to_inputs(*names: str) -> None:
        """Makes attributes that are lists of whole numbers the inputs behind the first one."""
        for name in names:
            numbers = attributes.pop(name, None)
            inputs.append("" if numbers is None else constant(np.asarray(numbers, np.int64).reshape(-1)))
        while inputs and not inputs[-1]:
            inputs.pop()

    is_reduction = op_type.startswith("Reduce") and op_type != "ReduceSum"
    for names, before, lists in _LISTS:
        if version < before and (op_type in names or (is_reduction and names == ("Reduce",))):
            if op_type == "Slice" and "axes" not in attributes:
                attributes["axes"] = list(range(len(attributes.get("starts", ()))))
            to_inputs(*lists)
    match op_type:
        case "Clip" if version < 11:
            for name, limit in (("min", np.finfo(np.float32).min), ("max", np.finfo(np.float32).max)):
                inputs.append(constant(np.asarray(attributes.pop(name, limit), np.float32)))
        case "Pad" if version < 11:
            value = attributes.pop("value", 0.0)
            to_inputs("pads")
            inputs.append(constant(np.asarray(value, np.float32)))
        case "Split" if version < 18 and len(inputs) < 2:
            attributes["num_outputs"] = output_count
        case "Dropout":
            attributes.pop("ratio", None)
            if output_count > 1 and version < 10:
                raise Unsupported("a mask of floats")
            if len(inputs) > 2 and inputs[2]:
                raise Unsupported("training, which draws random numbers")
        case "BatchNormalization":
            if attributes.pop("spatial", 1) != 1 or (output_count > 1 and version < 14):
                raise Unsupported("normalisation as in a version before 14")
        case "GridSample" if version < 20:
            names_now = {"bilinear": "linear", "bicubic": "cubic"}
            mode = attributes.get("mode", "bilinear")
            attributes["mode"] = names_now.get(mode, mode)
        case "DFT" if version < 20:
            inputs += [""] * (2 - len(inputs))
            inputs.append(constant(np.asarray(attributes.pop("axis", 1), np.int64)))
        case "RoiAlign" if version < 16:
            attributes["coordinate_transformation_mode"] = "output_half_pixel"
        case "Scatter":
            op_type = "ScatterElements"
        case "Upsample":
            raise Unsupported("its scales mean something else since version 10")
        case "Resize" if version < 11:
            raise Unsupported("its coordinates mean something else since version 11")
        case "GroupNormalization" if version < 21:
            raise Unsupported("its factors are those of groups before version 21")
        case "Softmax" | "LogSoftmax" | "Hardmax" if version < 13 and attributes.get("axis", 1) != -1:
            raise Unsupported("it joins axes before version 13")
    return Application(op_type, attributes, inputs)


_LISTS: tuple[tuple[tuple[str, ...], int, tuple[str, ...]], ...] = (
    (("Reduce",), 18, ("axes",)),
    (("ReduceSum", "Squeeze", "Unsqueeze"), 13, ("axes",)),
    (("Split",), 13, ("split",)),
    (("Slice",), 10, ("starts", "ends", "axes")),
    (("TopK",), 10, ("k",)),
)
"""Operators whose lists of whole numbers were attributes before a version."""

"""ONNX files: reads them without the ``onnx`` package, and converts them to models of HAL operations."""

from __future__ import annotations

from aionn.models.onnx.encoding import encode_model
from aionn.models.onnx.load import (
    OnnxArgument,
    OnnxModel,
    UnsupportedOperator,
    UnsupportedOperators,
    load_onnx,
)

__all__ = [
    "OnnxArgument",
    "OnnxModel",
    "UnsupportedOperator",
    "UnsupportedOperators",
    "encode_model",
    "load_onnx",
]

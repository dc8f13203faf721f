"""ONNX files: reads them without the ``onnx`` package, and converts them to models of HAL operations.

Names are imported when first used, so that a driver can import ``extension`` without the importer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aionn.models.onnx.encoding import encode_model
    from aionn.models.onnx.load import (
        OnnxArgument,
        OnnxModel,
        UnsupportedOperator,
        UnsupportedOperators,
        load_onnx,
    )

_HOME_BY_NAME = {
    "OnnxArgument": "aionn.models.onnx.load",
    "OnnxModel": "aionn.models.onnx.load",
    "UnsupportedOperator": "aionn.models.onnx.load",
    "UnsupportedOperators": "aionn.models.onnx.load",
    "encode_model": "aionn.models.onnx.encoding",
    "load_onnx": "aionn.models.onnx.load",
}

__all__ = [
    "OnnxArgument",
    "OnnxModel",
    "UnsupportedOperator",
    "UnsupportedOperators",
    "encode_model",
    "load_onnx",
]


def __getattr__(name: str) -> Any:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)

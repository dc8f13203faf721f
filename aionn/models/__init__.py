"""Where models come from: TensorFlow Lite and ONNX files, and calls to a builder; and how a model's graph is drawn.

Knows what an operation's contract is, and no rule that takes a whole model: that is ``aionn.validation``'s.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aionn.models.builder import ExtensionCode, GraphBuilder, Value
    from aionn.models.dot import graph_text, write_graph
    from aionn.models.importing import ImportedModel, ImportOptions, load_file
    from aionn.models.onnx import (
        OnnxArgument,
        OnnxModel,
        UnsupportedOperator,
        UnsupportedOperators,
        load_onnx,
    )
    from aionn.models.tflite import TfliteArgument, TfliteModel, TfliteSignature, load_tflite

_HOME_BY_NAME = {
    "ExtensionCode": "aionn.models.builder",
    "GraphBuilder": "aionn.models.builder",
    "ImportOptions": "aionn.models.importing",
    "ImportedModel": "aionn.models.importing",
    "OnnxArgument": "aionn.models.onnx.load",
    "OnnxModel": "aionn.models.onnx.load",
    "TfliteArgument": "aionn.models.tflite",
    "TfliteModel": "aionn.models.tflite",
    "TfliteSignature": "aionn.models.tflite",
    "UnsupportedOperator": "aionn.models.onnx.load",
    "UnsupportedOperators": "aionn.models.onnx.load",
    "Value": "aionn.models.builder",
    "graph_text": "aionn.models.dot",
    "load_file": "aionn.models.importing",
    "load_onnx": "aionn.models.onnx.load",
    "load_tflite": "aionn.models.tflite",
    "write_graph": "aionn.models.dot",
}

__all__ = [
    "ExtensionCode",
    "GraphBuilder",
    "ImportOptions",
    "ImportedModel",
    "OnnxArgument",
    "OnnxModel",
    "TfliteArgument",
    "TfliteModel",
    "TfliteSignature",
    "UnsupportedOperator",
    "UnsupportedOperators",
    "Value",
    "graph_text",
    "load_file",
    "load_onnx",
    "load_tflite",
    "write_graph",
]


def __getattr__(name: str) -> Any:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)

"""Where models come from: TensorFlow Lite and ONNX files, and calls to a builder; and how a model's graph is drawn.

Knows what an operation's contract is, and no rule that takes a whole model: that is ``aionn.validation``'s.
"""

from __future__ import annotations

from aionn.models.builder import ExtensionCode, GraphBuilder, Value
from aionn.models.dot import graph_text, write_graph
from aionn.models.importing import ImportedModel, ImportOptions, load_file
from aionn.models.onnx import OnnxArgument, OnnxModel, UnsupportedOperator, UnsupportedOperators, load_onnx
from aionn.models.tflite import TfliteArgument, TfliteModel, TfliteSignature, load_tflite

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

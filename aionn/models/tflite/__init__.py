"""The importer of TensorFlow Lite files: ``load_tflite`` makes a ``hal.Model`` of a file."""

from __future__ import annotations

from aionn.models.tflite.load import TfliteArgument, TfliteModel, TfliteSignature, load_tflite

__all__ = ["TfliteArgument", "TfliteModel", "TfliteSignature", "load_tflite"]

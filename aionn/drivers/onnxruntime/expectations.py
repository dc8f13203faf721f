"""The features that the ``ort-*`` drivers can never have, and the differences of ONNX Runtime's results from the HAL's.

Source: runs of the conformance data.
"""

from __future__ import annotations

from aionn.drivers.kit.onnx.expectations import UNSUPPORTED

__all__ = ["EXPECTED_DIFFERENCES", "EXPECTED_FAILURES", "UNSUPPORTED"]

EXPECTED_FAILURES: dict[str, str] = {}

EXPECTED_DIFFERENCES: dict[str, str] = {
    "edges/QUANTIZE_*": "ONNX Runtime may take any value for a NaN",
    "edges/SELECT_*": "ONNX Runtime's Where gives 0 for -0.0",
}

"""The features that the ``openvino-*`` drivers can never have, and the differences of OpenVINO's results from the HAL's.

Source: runs of the conformance data.
"""

from __future__ import annotations

from aionn.drivers.kit.onnx.expectations import UNSUPPORTED

__all__ = ["EXPECTED_DIFFERENCES", "EXPECTED_FAILURES", "UNSUPPORTED"]

EXPECTED_FAILURES: dict[str, str] = {}

_ACTIVATION = "OpenVINO's activations make a NaN one of their bounds"

EXPECTED_DIFFERENCES: dict[str, str] = {
    **{f"edges/{name}_*": _ACTIVATION for name in ("ADD", "DIV", "MUL", "RELU", "RELU1", "RELU6", "SUB")},
    "edges/QUANTIZE_*": "OpenVINO may take any value for a NaN",
    "edges/TOPK_V2_*": "OpenVINO may count a NaN as smaller than numbers",
}

"""The features that a driver can never have whose engine reads ONNX models.

Source: ONNX's operators.
"""

from __future__ import annotations

__all__ = ["UNSUPPORTED"]

_BOXES = "ONNX has no operator for boxes and regions with the HAL's rules"
_RECURRENT = "ONNX's recurrent layers have other gates and arguments"
_CONTROL = "other subgraphs are run by the runtime, which takes their operations one by one"

UNSUPPORTED: dict[str, str] = {
    "AXIS_ALIGNED_BBOX_TRANSFORM": _BOXES,
    "BOX_WITH_NMS_LIMIT": _BOXES,
    "DETECTION_POSTPROCESSING": _BOXES,
    "GENERATE_PROPOSALS": _BOXES,
    "HEATMAP_MAX_KEYPOINT": _BOXES,
    "ROI_ALIGN": _BOXES,
    "ROI_POOLING": _BOXES,
    "LSTM": _RECURRENT,
    "BIDIRECTIONAL_SEQUENCE_LSTM": _RECURRENT,
    "RNN": _RECURRENT,
    "BIDIRECTIONAL_SEQUENCE_RNN": _RECURRENT,
    "SVDF": _RECURRENT,
    "QUANTIZED_LSTM": _RECURRENT,
    "QUANTIZED_16BIT_LSTM": _RECURRENT,
    "HASHTABLE_LOOKUP": "ONNX has no search for keys",
    "IF": _CONTROL,
    "WHILE": _CONTROL,
    "LSH_PROJECTION": "ONNX has no such hash function",
    "RANDOM_MULTINOMIAL": "the engines' samplers draw other numbers from the same seed",
}

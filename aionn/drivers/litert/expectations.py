"""The features that ``litert-cpu`` can never have, and the differences of LiteRT's results from the HAL's.

Source: LiteRT's list of builtin operators; runs of the conformance data.
"""

from __future__ import annotations

__all__ = ["DIFFERENCES", "EXPECTED_DIFFERENCES", "EXPECTED_FAILURES", "UNSUPPORTED"]

_BOXES = "LiteRT has no builtin operator for boxes and regions"
_STATE = "LiteRT keeps the state in variable tensors, which the HAL's operation takes and gives as arguments"

UNSUPPORTED: dict[str, str] = {
    "AXIS_ALIGNED_BBOX_TRANSFORM": _BOXES,
    "BOX_WITH_NMS_LIMIT": _BOXES,
    "DETECTION_POSTPROCESSING": _BOXES,
    "GENERATE_PROPOSALS": _BOXES,
    "HEATMAP_MAX_KEYPOINT": _BOXES,
    "ROI_ALIGN": _BOXES,
    "ROI_POOLING": _BOXES,
    "LSTM": _STATE,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": _STATE,
    "BIDIRECTIONAL_SEQUENCE_LSTM": _STATE,
    "RNN": _STATE,
    "UNIDIRECTIONAL_SEQUENCE_RNN": _STATE,
    "BIDIRECTIONAL_SEQUENCE_RNN": _STATE,
    "SVDF": _STATE,
    "QUANTIZED_LSTM": "LiteRT has no operator with these 8-bit weights and 16-bit states",
    "QUANTIZED_16BIT_LSTM": "LiteRT's basic LSTM takes its weights joined, and its states are variable tensors",
    "RANDOM_MULTINOMIAL": "LiteRT's sampler draws other numbers from the same seed",
    "while_infinite_loop*": "LiteRT cannot be stopped, so that only loops that are sure to end are taken",
    "RANK": "the result is a scalar operand, and LiteRT's outputs are tensors",
}

EXPECTED_FAILURES: dict[str, str] = {
    "div_int32_by_zero": "LiteRT ends an execution that divides integers by 0, which the HAL leaves undefined",
}

_NAN = "LiteRT makes a NaN the largest integer"
_ENDS = "XNNPACK's functions at the ends of the range, and of NaN"

EXPECTED_DIFFERENCES: dict[str, str] = {
    "edges/CAST_to_int32_*": _NAN,
    "edges/CAST_to_quant8_*": _NAN,
    "edges/MAXIMUM_*": "LiteRT may ignore a NaN",
    "edges/MINIMUM_*": "LiteRT may ignore a NaN",
    "edges/TOPK_V2_*": "LiteRT may count a NaN as smaller than numbers",
    "edges/EXP_*": _ENDS,
    "edges/LOG_*": _ENDS,
    "edges/LOGISTIC_*": _ENDS,
    "edges/RSQRT_3*": _ENDS,
    "edges/SIN_*": _ENDS,
    "edges/SQRT_*": _ENDS,
}

DIFFERENCES: dict[str, str] = {
    "numbers below 1.2e-38": "LiteRT's C interface computes with 0 in their place, its interpreter with the numbers",
    "float layers with 8-bit weights": "LiteRT rounds the data to 8 bits in every execution; the HAL's weights are floats",
    "comparisons of 8-bit values of different scales or of scales below 1/256": (
        "LiteRT compares multiples of 1/256; here the real numbers are compared"
    ),
    "RESIZE_NEAREST_NEIGHBOR of 8-bit values to some sizes": (
        "LiteRT steps by multiples of 1/65536 and takes a neighbour of the nearest pixel; here it is the nearest"
    ),
    "float operators over constants alone": "they are computed once by the reference device's kernels",
}
"""Where an imported file gives other bytes than LiteRT with the file itself, and why.

``docs/engines/litert.md`` shows this table."""

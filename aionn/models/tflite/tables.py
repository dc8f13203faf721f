"""Numbers of the fields of the TensorFlow Lite file schema that the importer reads: tables, and the options of operators.

Owns these numbers, their kinds and their defaults alone; values read by them are checked in ``schema``.

Source: the public schema, version 3 (file identifier TFL3), of TensorFlow Lite.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FIELDS", "OPTIONS", "Field"]


class Field(NamedTuple):
    """A field of a table: its number, kind and default."""

    number: int
    kind: str
    default: float = 0


FIELDS: dict[str, dict[str, int]] = {
    "Model": {
        "version": 0,
        "operator_codes": 1,
        "subgraphs": 2,
        "buffers": 4,
        "signature_defs": 7,
    },
    "OperatorCode": {"deprecated_builtin_code": 0, "custom_code": 1, "version": 2, "builtin_code": 3},
    "SubGraph": {"tensors": 0, "inputs": 1, "outputs": 2, "operators": 3, "name": 4},
    "Tensor": {
        "shape": 0,
        "type": 1,
        "buffer": 2,
        "name": 3,
        "quantization": 4,
        "is_variable": 5,
        "sparsity": 6,
        "shape_signature": 7,
    },
    "QuantizationParameters": {"scale": 2, "zero_point": 3, "quantized_dimension": 6},
    "Operator": {
        "opcode_index": 0,
        "inputs": 1,
        "outputs": 2,
        "builtin_options_type": 3,
        "builtin_options": 4,
    },
    "Buffer": {"data": 0, "offset": 1, "size": 2},
    "SignatureDef": {"inputs": 0, "outputs": 1, "signature_key": 2, "subgraph_index": 4},
    "TensorMap": {"name": 0, "tensor_index": 1},
}
"""Numbers of the fields that are read, by table."""

_ACTIVATION = "fused_activation_function"

OPTIONS: dict[str, tuple[int, dict[str, Field]]] = {
    "Conv2DOptions": (
        1,
        {
            "padding": Field(0, "int8"),
            "stride_w": Field(1, "int32"),
            "stride_h": Field(2, "int32"),
            _ACTIVATION: Field(3, "int8"),
            "dilation_w_factor": Field(4, "int32", 1),
            "dilation_h_factor": Field(5, "int32", 1),
        },
    ),
    "DepthwiseConv2DOptions": (
        2,
        {
            "padding": Field(0, "int8"),
            "stride_w": Field(1, "int32"),
            "stride_h": Field(2, "int32"),
            _ACTIVATION: Field(4, "int8"),
            "dilation_w_factor": Field(5, "int32", 1),
            "dilation_h_factor": Field(6, "int32", 1),
        },
    ),
    "LSHProjectionOptions": (4, {"type": Field(0, "int8")}),
    "Pool2DOptions": (
        5,
        {
            "padding": Field(0, "int8"),
            "stride_w": Field(1, "int32"),
            "stride_h": Field(2, "int32"),
            "filter_width": Field(3, "int32"),
            "filter_height": Field(4, "int32"),
            _ACTIVATION: Field(5, "int8"),
        },
    ),
    "SVDFOptions": (6, {"rank": Field(0, "int32"), _ACTIVATION: Field(1, "int8")}),
    "RNNOptions": (7, {_ACTIVATION: Field(0, "int8")}),
    "FullyConnectedOptions": (
        8,
        {
            _ACTIVATION: Field(0, "int8"),
            "weights_format": Field(1, "int8"),
            "keep_num_dims": Field(2, "bool"),
        },
    ),
    "SoftmaxOptions": (9, {"beta": Field(0, "float32")}),
    "ConcatenationOptions": (10, {"axis": Field(0, "int32"), _ACTIVATION: Field(1, "int8")}),
    "AddOptions": (11, {_ACTIVATION: Field(0, "int8")}),
    "L2NormOptions": (12, {_ACTIVATION: Field(0, "int8")}),
    "LocalResponseNormalizationOptions": (
        13,
        {
            "radius": Field(0, "int32"),
            "bias": Field(1, "float32"),
            "alpha": Field(2, "float32"),
            "beta": Field(3, "float32"),
        },
    ),
    "LSTMOptions": (
        14,
        {
            _ACTIVATION: Field(0, "int8"),
            "cell_clip": Field(1, "float32"),
            "proj_clip": Field(2, "float32"),
            "kernel_type": Field(3, "int8"),
        },
    ),
    "ResizeBilinearOptions": (
        15,
        {"align_corners": Field(2, "bool"), "half_pixel_centers": Field(3, "bool")},
    ),
    "SpaceToDepthOptions": (19, {"block_size": Field(0, "int32")}),
    "MulOptions": (21, {_ACTIVATION: Field(0, "int8")}),
    "GatherOptions": (23, {"axis": Field(0, "int32"), "batch_dims": Field(1, "int32")}),
    "ReducerOptions": (27, {"keep_dims": Field(0, "bool")}),
    "SubOptions": (28, {_ACTIVATION: Field(0, "int8")}),
    "DivOptions": (29, {_ACTIVATION: Field(0, "int8")}),
    "SequenceRNNOptions": (31, {"time_major": Field(0, "bool"), _ACTIVATION: Field(1, "int8")}),
    "StridedSliceOptions": (
        32,
        {
            "begin_mask": Field(0, "int32"),
            "end_mask": Field(1, "int32"),
            "ellipsis_mask": Field(2, "int32"),
            "new_axis_mask": Field(3, "int32"),
            "shrink_axis_mask": Field(4, "int32"),
            "offset": Field(5, "bool"),
        },
    ),
    "TransposeConvOptions": (
        49,
        {
            "padding": Field(0, "int8"),
            "stride_w": Field(1, "int32"),
            "stride_h": Field(2, "int32"),
            _ACTIVATION: Field(3, "int8"),
        },
    ),
    "OneHotOptions": (61, {"axis": Field(0, "int32")}),
    "PackOptions": (59, {"axis": Field(1, "int32")}),
    "UnpackOptions": (64, {"num": Field(0, "int32"), "axis": Field(1, "int32")}),
    "BidirectionalSequenceLSTMOptions": (
        69,
        {
            _ACTIVATION: Field(0, "int8"),
            "cell_clip": Field(1, "float32"),
            "proj_clip": Field(2, "float32"),
            "merge_outputs": Field(3, "bool"),
            "time_major": Field(4, "bool", 1),
        },
    ),
    "BidirectionalSequenceRNNOptions": (
        70,
        {"time_major": Field(0, "bool"), _ACTIVATION: Field(1, "int8"), "merge_outputs": Field(2, "bool")},
    ),
    "UnidirectionalSequenceLSTMOptions": (
        71,
        {
            _ACTIVATION: Field(0, "int8"),
            "cell_clip": Field(1, "float32"),
            "proj_clip": Field(2, "float32"),
            "time_major": Field(3, "bool"),
            "diagonal_recurrent_tensors": Field(5, "bool"),
        },
    ),
    "ResizeNearestNeighborOptions": (
        74,
        {"align_corners": Field(0, "bool"), "half_pixel_centers": Field(1, "bool")},
    ),
    "ReverseSequenceOptions": (87, {"seq_dim": Field(0, "int32"), "batch_dim": Field(1, "int32")}),
    "LeakyReluOptions": (75, {"alpha": Field(0, "float32")}),
    "MirrorPadOptions": (77, {"mode": Field(0, "int8")}),
    "IfOptions": (
        92,
        {"then_subgraph_index": Field(0, "int32"), "else_subgraph_index": Field(1, "int32")},
    ),
    "WhileOptions": (
        93,
        {"cond_subgraph_index": Field(0, "int32"), "body_subgraph_index": Field(1, "int32")},
    ),
    "DepthToSpaceOptions": (94, {"block_size": Field(0, "int32")}),
    "BatchMatMulOptions": (101, {"adj_x": Field(0, "bool"), "adj_y": Field(1, "bool")}),
    "Conv3DOptions": (
        106,
        {
            "padding": Field(0, "int8"),
            "stride_d": Field(1, "int32"),
            "stride_w": Field(2, "int32"),
            "stride_h": Field(3, "int32"),
            _ACTIVATION: Field(4, "int8"),
            "dilation_d_factor": Field(5, "int32", 1),
            "dilation_w_factor": Field(6, "int32", 1),
            "dilation_h_factor": Field(7, "int32", 1),
        },
    ),
    "CumsumOptions": (102, {"exclusive": Field(0, "bool"), "reverse": Field(1, "bool")}),
    "GeluOptions": (116, {"approximate": Field(0, "bool")}),
}
"""Options tables that are read: the union's code and the fields."""

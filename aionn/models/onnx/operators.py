"""The table of the ONNX operators that are converted to HAL operations.

``docs/engines/onnx-operators.md`` is generated from the table, and a test compares both. The modules of ``conversions`` contain the
conversions.

Invariant: an operator of any operator set in ``graph.OPSETS`` is either written as its specification defines it, or rejected.

Source: "Operator Schemas" of ONNX, operator sets 1 to 28.
"""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

import numpy as np

from aionn.hal import OperationType
from aionn.models.onnx import folding
from aionn.models.onnx.conversions import (
    attention,
    layers,
    movement,
    normalization,
    places,
    pools,
    quantization,
    recurrent,
    reductions,
    resizing,
)
from aionn.models.onnx.conversions import elementwise as ew
from aionn.models.onnx.conversions.control_flow import UNROLLED_NODES_MAX
from aionn.models.onnx.extension.contracts import CONTRACTS
from aionn.models.onnx.operator import Convert, Operator
from aionn.models.onnx.tensors import Inexpressible, Tensor, distinct
from aionn.models.onnx.writer import GraphWriter

__all__ = ["CONVERSIONS", "Conversion", "document"]


class Conversion(NamedTuple):
    """One operator.

    Attributes:
        name: The operator's name.
        convert: Writes its operations and returns its outputs.
        how: The operations, for the documentation.
        tier: 0 if it becomes no operation, 1 if one, 2 if several.
    """

    name: str
    convert: Convert
    how: str
    tier: int


def _dropout(g: GraphWriter, op: Operator) -> list[Tensor]:
    x = op.input(0)
    op.ignore("ratio", "seed")
    if op.version < 7 and not op.integer("is_test", 0):
        raise Inexpressible("training")
    if op.has(2) and distinct(op.array(2, "training_mode")).any():
        ratio = float(op.single(1, "the ratio")) if op.has(1) else 0.5
        if ratio != 0:
            raise Inexpressible("training")
    outputs = [x]
    if op.wants(1):
        mask = np.broadcast_to(np.ones((), "bool" if op.version >= 10 else x.dtype), x.shape)
        outputs.append(g.constant(mask))
    return outputs


def _cast(g: GraphWriter, op: Operator) -> Tensor:
    op.ignore("saturate", "round_mode")
    return ew.cast(g, op, folding.element_type(op, op.integer("to")))


def _cast_like(g: GraphWriter, op: Operator) -> Tensor:
    op.ignore("saturate", "round_mode")
    return ew.cast(g, op, op.input(1).dtype)


def _bit_cast(g: GraphWriter, op: Operator) -> Tensor:
    if folding.element_type(op, op.integer("to")) != op.input(0).dtype:
        raise Inexpressible("bits under another type")
    return op.input(0)


O = OperationType  # noqa: E741

_UNARY = [
    ("Exp", O.EXP, ()),
    ("Log", O.LOG, ()),
    ("Sqrt", O.SQRT, ()),
    ("Floor", O.FLOOR, ()),
    ("Sin", O.SIN, ()),
    ("Tanh", O.TANH, ()),
    ("Sigmoid", O.LOGISTIC, ()),
    ("HardSwish", O.HARD_SWISH, ()),
    ("Abs", O.ABS, ("int32", "int64")),
    ("Neg", O.NEG, ("int32", "int64")),
    ("Not", O.LOGICAL_NOT, ("bool",)),
]

_FORMULAS: list[tuple[str, Any, str, bool]] = [
    ("Ceil", ew.ceil, "NEG, FLOOR, NEG", False),
    ("Reciprocal", ew.reciprocal, "DIV", False),
    ("Cos", ew.cosine, "SIN of the half, MUL, MUL, SUB", True),
    ("Tan", ew.tangent, "SIN, DIV by Cos", True),
    ("Sinh", ew.hyperbolic_sine, "TANH, MUL, DIV near 0, else SUB, EXP, MUL; SELECT", True),
    ("Cosh", ew.hyperbolic_cosine, "SUB, EXP, MUL, ADD", True),
    ("Softplus", ew.softplus, "ABS, NEG, EXP, ADD, LOG, MAXIMUM, ADD", True),
    ("Softsign", ew.softsign, "ABS, ADD, DIV", False),
    ("Mish", ew.mish, "the operations of Softplus; TANH, MUL", True),
    ("Swish", ew.swish, "LOGISTIC, MUL", False),
    ("Elu", ew.elu, "ELU", False),
    ("Selu", ew.selu, "ELU, MUL", False),
    ("Celu", ew.celu, "MAXIMUM, DIV, MINIMUM, ELU, MUL, ADD", False),
    ("HardSigmoid", ew.hard_sigmoid, "MUL, ADD, MAXIMUM, MINIMUM", False),
    ("LeakyRelu", ew.leaky_relu, "PRELU", False),
    ("ThresholdedRelu", ew.thresholded_relu, "GREATER, SELECT", False),
    ("Shrink", ew.shrink, "GREATER, LESS, SUB, ADD, SELECT", False),
    ("Sign", ew.sign, "GREATER, LESS, SELECT", False),
    ("Round", ew.round_, "ABS, ADD, SUB, LESS, SELECT, NEG", True),
    ("Erf", ew.erf, "MUL, ADD, DIV of polynomials, with an error of some 2 ** -23", True),
    ("Gelu", ew.gelu, "MUL, ADD, and TANH or the operations of Erf", True),
]

_TABLE: list[Conversion] = [
    Conversion("Identity", ew.same, "no operation", 0),
    Conversion("Dropout", _dropout, "no operation", 0),
    Conversion("Shape", folding.shape_of, "a constant", 0),
    Conversion("Size", folding.size_of, "a constant", 0),
    Conversion("Constant", folding.constant, "a constant", 0),
    Conversion("ConstantOfShape", folding.constant_of_shape, "a constant", 0),
    Conversion("Range", folding.range_, "a constant", 0),
    Conversion("EyeLike", folding.eye_like, "a constant", 0),
    *(
        Conversion(f"{name}Window", folding.window, "a constant", 0)
        for name in ("Hann", "Hamming", "Blackman")
    ),
    Conversion(
        "LSTM", recurrent.lstm, "UNIDIRECTIONAL_SEQUENCE_LSTM for each direction; REVERSE, CONCATENATION", 1
    ),
    Conversion(
        "RNN", recurrent.rnn, "UNIDIRECTIONAL_SEQUENCE_RNN for each direction; REVERSE, CONCATENATION", 1
    ),
    *(Conversion(name, ew.direct(kind, *others), kind.name, 1) for name, kind, others in _UNARY),
    *(
        Conversion(name, ew.composed(formula, is_wide=wide), how, 1 if how in ("ELU", "PRELU", "DIV") else 2)
        for name, formula, how, wide in _FORMULAS
    ),
    Conversion("Relu", ew.relu, "RELU, or fused with the operation before; MAXIMUM for whole numbers", 1),
    Conversion("IsNaN", ew.is_nan, "NOT_EQUAL", 2),
    Conversion("IsInf", ew.is_inf, "ABS, EQUAL", 2),
    Conversion("Add", ew.arithmetic(O.ADD), "ADD", 1),
    Conversion("Sub", ew.arithmetic(O.SUB), "SUB", 1),
    Conversion("Mul", ew.arithmetic(O.MUL), "MUL", 1),
    Conversion("Div", ew.divide, "DIV; MUL, SUB, SELECT, ADD to round negative whole numbers towards 0", 1),
    Conversion("Mod", ew.modulo, "DIV, MUL, SUB, for whole numbers only", 2),
    Conversion("SwiGLU", ew.swiglu, "the operations of Swish; MUL", 2),
    Conversion("Pow", ew.power, "POW; CAST of the exponent", 1),
    Conversion("Max", ew.variadic(O.MAXIMUM), "MAXIMUM", 2),
    Conversion("Min", ew.variadic(O.MINIMUM), "MINIMUM", 2),
    Conversion("Sum", ew.variadic(O.ADD), "ADD", 2),
    Conversion("Mean", ew.variadic(O.ADD, is_mean=True), "ADD, DIV", 2),
    Conversion("Equal", ew.compare(O.EQUAL), "EQUAL", 1),
    Conversion("Less", ew.compare(O.LESS), "LESS", 1),
    Conversion("LessOrEqual", ew.compare(O.LESS_EQUAL), "LESS_EQUAL", 1),
    Conversion("Greater", ew.compare(O.GREATER), "GREATER", 1),
    Conversion("GreaterOrEqual", ew.compare(O.GREATER_EQUAL), "GREATER_EQUAL", 1),
    Conversion("And", ew.logical(O.LOGICAL_AND), "LOGICAL_AND", 1),
    Conversion("Or", ew.logical(O.LOGICAL_OR), "LOGICAL_OR", 1),
    Conversion("Xor", ew.logical(O.NOT_EQUAL), "NOT_EQUAL", 1),
    Conversion("Where", ew.select, "SELECT; TILE before it if shapes differ", 1),
    Conversion("Clip", ew.clip, "RELU, RELU1, RELU6, or MAXIMUM, MINIMUM", 2),
    Conversion("PRelu", ew.prelu, "PRELU", 1),
    Conversion("Cast", _cast, "CAST; NOT_EQUAL to BOOL, SELECT from BOOL", 1),
    Conversion("CastLike", _cast_like, "the operations of Cast", 1),
    Conversion("BitCast", _bit_cast, "no operation, for the same type only", 0),
    Conversion("Reshape", movement.reshape, "RESHAPE", 1),
    Conversion("Flatten", movement.flatten, "RESHAPE", 1),
    Conversion("Squeeze", movement.squeeze, "RESHAPE", 1),
    Conversion("Unsqueeze", movement.unsqueeze, "RESHAPE", 1),
    Conversion(
        "Transpose",
        movement.transpose,
        "TRANSPOSE if another operator needs the new order of axes; GATHER for INT32, INT64 and BOOL",
        1,
    ),
    Conversion("Concat", movement.concat, "CONCATENATION; GATHER, SELECT for INT32 and INT64", 1),
    Conversion("Split", movement.split, "SPLIT, or SLICE for each part", 1),
    Conversion("Slice", movement.slice_, "SLICE, STRIDED_SLICE; GATHER for negative steps", 1),
    Conversion(
        "Pad",
        movement.pad,
        "PAD_V2, MIRROR_PAD; GATHER for other modes; GATHER, SELECT for INT32 and INT64",
        1,
    ),
    Conversion("Tile", movement.tile, "TILE", 1),
    Conversion("Expand", movement.expand, "TILE", 1),
    Conversion("Gather", places.gather, "GATHER; LESS, ADD, SELECT before it if indexes may be negative", 1),
    Conversion("GatherElements", places.gather_elements, "MUL, ADD of the indexes, GATHER", 2),
    Conversion("GatherND", places.gather_nd, "GATHER, for constant indexes only", 2),
    Conversion(
        "DepthToSpace",
        places.depth_to_space,
        "DEPTH_TO_SPACE; GATHER of the channels before it for mode CRD",
        1,
    ),
    Conversion("SpaceToDepth", places.space_to_depth, "SPACE_TO_DEPTH", 1),
    Conversion("Trilu", movement.trilu, "SELECT", 2),
    Conversion("CenterCropPad", movement.center_crop_pad, "SLICE, PAD_V2", 2),
    Conversion("Conv", layers.conv, "CONV_2D, DEPTHWISE_CONV_2D, GROUPED_CONV_2D", 1),
    Conversion("ConvTranspose", layers.conv_transpose, "TRANSPOSE_CONV_2D", 1),
    Conversion(
        "MaxPool",
        pools.pool(O.MAX_POOL_2D),
        "MAX_POOL_2D; STRIDED_SLICE and MAXIMUM for each element of a window with dilation; GREATER, SELECT for the places",
        1,
    ),
    Conversion(
        "AveragePool",
        pools.pool(O.AVERAGE_POOL_2D),
        "AVERAGE_POOL_2D; PAD_V2 before it if padding is counted; STRIDED_SLICE, ADD, DIV for a window with dilation",
        1,
    ),
    Conversion(
        "LpPool",
        pools.pool(O.L2_POOL_2D),
        "L2_POOL_2D, MUL; POW, AVERAGE_POOL_2D, MUL, POW for other norms; STRIDED_SLICE, ADD for a window with dilation",
        1,
    ),
    Conversion("GlobalAveragePool", pools.global_pool(O.MEAN), "MEAN", 1),
    Conversion("GlobalMaxPool", pools.global_pool(O.REDUCE_MAX), "REDUCE_MAX", 1),
    Conversion(
        "GlobalLpPool", pools.global_pool(O.REDUCE_SUM), "MUL, REDUCE_SUM, SQRT; POW for other norms", 1
    ),
    Conversion("Gemm", layers.gemm, "FULLY_CONNECTED, or BATCH_MATMUL, MUL, ADD", 1),
    Conversion(
        "MatMul",
        layers.matmul,
        "FULLY_CONNECTED if the second input is a constant matrix, else BATCH_MATMUL",
        1,
    ),
    Conversion(
        "BatchNormalization", normalization.batch_normalization, "MUL, ADD; MEAN, SQRT, DIV for training", 2
    ),
    Conversion(
        "InstanceNormalization", normalization.instance_normalization, "INSTANCE_NORMALIZATION, MUL, ADD", 2
    ),
    Conversion(
        "LayerNormalization",
        normalization.layer_normalization,
        "MEAN, SUB, MUL, MEAN, ADD, SQRT, DIV, MUL, MUL, ADD",
        2,
    ),
    Conversion("RMSNormalization", normalization.rms_normalization, "MUL, MEAN, ADD, SQRT, DIV, MUL", 2),
    Conversion(
        "GroupNormalization",
        normalization.group_normalization,
        "RESHAPE, MEAN, SUB, MUL, MEAN, ADD, SQRT, DIV, MUL, ADD",
        2,
    ),
    Conversion(
        "MeanVarianceNormalization",
        normalization.mean_variance_normalization,
        "MEAN, SUB, MUL, MEAN, SQRT, ADD, DIV",
        2,
    ),
    Conversion("LRN", normalization.lrn, "LOCAL_RESPONSE_NORMALIZATION", 1),
    Conversion("LpNormalization", normalization.lp_normalization, "MUL, REDUCE_SUM, SQRT, SELECT, DIV", 2),
    Conversion("Softmax", normalization.softmax(O.SOFTMAX), "SOFTMAX", 1),
    Conversion("LogSoftmax", normalization.softmax(O.LOG_SOFTMAX), "LOG_SOFTMAX", 1),
    Conversion("Resize", resizing.resize, "RESIZE_BILINEAR; GATHER or FULLY_CONNECTED for each axis", 1),
    Conversion("Upsample", resizing.resize, "the operations of Resize", 1),
    Conversion(
        "QuantizeLinear",
        quantization.quantize,
        "QUANTIZE for one scale; else DIV, ADD, MAXIMUM, MINIMUM, CAST",
        1,
    ),
    Conversion(
        "DequantizeLinear",
        quantization.dequantize,
        "DEQUANTIZE, or CAST, SUB, MUL; constants become floats",
        1,
    ),
    Conversion("RotaryEmbedding", attention.rotary_embedding, "SLICE, MUL, SUB, ADD, CONCATENATION", 2),
    Conversion(
        "QLinearMatMul",
        quantization.qlinear_matmul,
        "DEQUANTIZE or CAST, the operations of MatMul, QUANTIZE",
        1,
    ),
    Conversion(
        "QLinearConv", quantization.qlinear_conv, "DEQUANTIZE or CAST, the operations of Conv, QUANTIZE", 1
    ),
    *(
        Conversion(
            name,
            reductions.reduction(reduce, 13 if name == "ReduceSum" else 18, noop=reductions.NOOPS.get(name)),
            "MEAN" if name == "ReduceMean" else "REDUCE_SUM and others",
            1 if name in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd") else 2,
        )
        for name, reduce in reductions.REDUCTIONS.items()
    ),
    Conversion("ArgMax", reductions.arg_extremum(O.ARGMAX), "ARGMAX; REVERSE, SUB for the last index", 1),
    Conversion("ArgMin", reductions.arg_extremum(O.ARGMIN), "ARGMIN; REVERSE, SUB for the last index", 1),
    Conversion("TopK", reductions.top_k, "REVERSE, TOPK_V2, SUB", 1),
    Conversion("Hardmax", reductions.hardmax, "ARGMAX, EQUAL, SELECT", 2),
    Conversion("OneHot", reductions.one_hot, "CAST of floats; EQUAL, SELECT", 2),
    Conversion(
        "CumSum", reductions.cumulative_sum, "BATCH_MATMUL with a triangle of ones; values must be finite", 2
    ),
]

CONVERSIONS = {conversion.name: conversion for conversion in _TABLE}
"""The table of ONNX's own domain, by name."""


def document() -> str:
    """The text of ``docs/engines/onnx-operators.md``."""
    listed = sorted(_TABLE, key=lambda conversion: conversion.name)
    rows = "\n".join(f"| {c.name} | {c.how}{'' if c.name in CONTRACTS else _HAL_ONLY} |" for c in listed)
    others = ", ".join(sorted(CONTRACTS.keys() - CONVERSIONS.keys()))
    return _HEAD.format(
        count=len(listed),
        rows=rows,
        all=len(CONTRACTS),
        others=textwrap.fill(others, 128),
        unrolled=f"{UNROLLED_NODES_MAX:,}",
    )


_HAL_ONLY = "; no extension operation"

_HEAD = """# ONNX operators

The importer (`aionn.models.load_onnx`) converts the operators of an `.onnx` file to operations of the HAL. Where the HAL cannot
express an operator, it writes an operation of the vendor extension `ai.onnx`, see [below](#operations-of-the-extension). This page
is generated from the importer's tables (`aionn.models.onnx.operators.document`), and a test compares both. HAL operations can
express {count} operators of ONNX's own domain, for operator sets 1 to 28; operators of other domains are rejected.

Rules for all operators:

- Every HAL operation is checked against its contract, so the HAL operation in the table determines the types and ranks. An operator
  that breaks a contract needs the extension.
- One error lists all operators of a file that cannot be expressed, with their counts. An operator with an unknown attribute is
  rejected as well. `load_onnx(path, extensions="none")` also rejects every operator that needs the extension.
- Types: FLOAT, FLOAT16, INT32 and BOOL have HAL types. UINT8 and INT8 become quantised types with scale 1, until QuantizeLinear
  gives them a scale. The import computes with constants of any type.
- DOUBLE: values are float32 in the model, so results have the precision of float32. A constant that float32 cannot hold needs the
  extension.
- INT64: values are INT32 in the model. Constants must fit, and HAL arithmetic is written only if the bounds of its inputs prove
  that the result fits; otherwise the operator needs the extension. UINT64, UINT32, INT16, UINT16 and whole numbers of 4 and 2 bits
  are INT32 as well, floats of 8 and 4 bits are float32, and only operations of the extension read them.
- BFLOAT16 is float32 as well. HAL operations move such values, compare them and convert them to other types, which is exact; all
  other operators need the extension, which rounds its results to BFLOAT16. Weights of BFLOAT16 that the file converts to FLOAT need
  no operation.
- Inputs that must have one element type are checked, since values of two types may be the same HAL type.
- Open extents are given as `dimensions={{"batch": 1}}`, or as `input_shapes` if they have no name. Inputs that determine shapes
  are given as `values` and become constants. If such an input is not constant, its operator and all operators after it need the
  extension, since only the execution knows their extents.
- Layout: inside the model images have their channels last; inputs and outputs have the order of the file, and so have operations of
  the extension. A TRANSPOSE is written only if no operation made the order of axes that another one needs.
- More than four axes: the leading axes of inputs and outputs are merged. A HAL operation on such values is written if its
  neighbouring axes can be merged to four, or as a GATHER of the flattened value.
- INT32, INT64 and BOOL values are moved by GATHER, since few HAL operations accept them; BOOL values are moved as bytes.
- An operator whose inputs are constants becomes a constant. Relu and Clip (0 to 6, -1 to 1) are fused with the operation before;
  BatchNormalization is computed into the constants of a Conv before it.
- If is replaced by a branch where its condition is a constant, Loop and Scan by the nodes of all iterations where constants decide
  their number, up to {unrolled} nodes in a file. Otherwise If becomes an IF, if the results of both branches have the same shapes,
  and Loop a WHILE, if its values keep their shapes and its results of all iterations are not used; so does a Loop of more
  iterations than that.
- Sequences within a graph become their values, if positions are constants. The functions of a file are inlined.
- Results of HAL operations differ from ONNX's in two cases: QuantizeLinear with one scale rounds halves away from 0; CumSum needs
  finite values.
- Cases that ONNX leaves open: a NaN among the inputs of Max, Min, Clip, MaxPool, GlobalMaxPool, ReduceMax and ReduceMin is the
  result on the device `reference`; other devices may ignore it. Whole numbers wrap around where ReduceProd and ReduceSumSquare
  overflow.
- ONNX Runtime differs from the specification where this importer follows it: Resize with `align_corners` uses the new length before
  it is rounded down, and ConvTranspose with `auto_pad` SAME has as many outputs as inputs times strides, for any window.
- An input without elements becomes a constant.

| operator | HAL operations |
| --- | --- |
{rows}

## Operations of the extension

`ai.onnx` has operations for {all} operators, with ONNX's own inputs, attributes and order of axes. The device `onnx-reference`
([devices](../running/devices.md#the-onnx-reference-device)) has all of them. Those of
the table are written only where the HAL cannot express the operator: for other types, ranks and attributes, or values of unknown
extents. These operators always need the extension:

{others}.

The other operators of ONNX are rejected: those on texts and optional values, sequences as inputs and outputs, those with random
results, image decoding, and those of control flow that are excluded above.
"""

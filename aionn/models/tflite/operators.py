"""The conversion of each builtin operator: the table of the importer.

Owns the codes, names and the way of every builtin operator of the public schema: the function that writes it, or why the HAL cannot
express it. ``docs/engines/tflite-operators.md`` shows this table and a test keeps both equal.

Invariant: every code of the schema, 0 to 209, is listed here exactly once.

Source: ``BuiltinOperator`` of the public TensorFlow Lite schema.
"""

from __future__ import annotations

from typing import NamedTuple

from aionn.hal import FusedActivation, OperationType
from aionn.models.tflite.conversions import (
    control_flow,
    layers,
    places,
    recurrent,
    shapes,
    slices,
    volumes,
)
from aionn.models.tflite.conversions import elementwise as ew
from aionn.models.tflite.graph import Convert, Inexpressible, SubgraphWriter
from aionn.models.tflite.schema import TfliteOperator

__all__ = ["CONVERSIONS", "Conversion", "document", "operator_name"]

CUSTOM = 32


class Conversion(NamedTuple):
    """The conversion of an operator.

    Attributes:
        code: The builtin operator's code.
        name: Its name.
        convert: Writes it; None where the HAL cannot express it.
        how: One line for the table: what it becomes, or why it cannot.
    """

    code: int
    name: str
    convert: Convert | None
    how: str


_BITS = "the HAL has no operation on bits"
_COMPLEX = "the HAL has no complex numbers"
_DYNAMIC = "the HAL has no operation that counts or orders what it finds in this way"
_FOREIGN = "not part of the schema: only its author knows what it computes"
_FUNCTION = "the HAL has no such function"
_NOTHING = "no operation of the HAL computes it"
_PLACEHOLDER = "no operator: a mark for old readers"
_RANDOM = "results are random, and the HAL's only sampler takes another form of input"
_RESOURCE = "it keeps a resource between executions, and the HAL has no such state"
_ROUNDING = "the HAL has no operation that rounds to the nearest whole number"
_SCATTER = "the HAL has no operation that writes to chosen places"
_SPARSE = "the HAL has no sparse constants"
_STABLEHLO = "a form that converters lower before a model is executed"
_FRESH_STATE = "variable tensors start as zeros at every execution"
_STRINGS = "the HAL has no strings"
_SUPPRESSION = "the HAL's suppression gives boxes and not their indexes, and each box that is kept takes some 25 operations"
_UNUSED = "no converter writes it, and TensorFlow Lite has no kernel for it"
_VOLUME = "the HAL convolves over two axes only"


def _folded_only(g: SubgraphWriter, op: TfliteOperator) -> None:
    raise Inexpressible("its result is not known before execution")


_TABLE: tuple[Conversion, ...] = (
    Conversion(0, "ADD", ew.arithmetic(OperationType.ADD, "AddOptions"), "ADD"),
    Conversion(1, "AVERAGE_POOL_2D", layers.pool_2d(OperationType.AVERAGE_POOL_2D), "AVERAGE_POOL_2D"),
    Conversion(
        2, "CONCATENATION", shapes.concatenation, "CONCATENATION; integers by SPLIT, PACK and RESHAPE"
    ),
    Conversion(
        3,
        "CONV_2D",
        layers.conv_2d,
        "CONV_2D; GROUPED_CONV_2D with fewer filter channels; DEQUANTIZE or CAST before for smaller weights of float data",
    ),
    Conversion(
        4,
        "DEPTHWISE_CONV_2D",
        layers.depthwise_conv_2d,
        "DEPTHWISE_CONV_2D; DEQUANTIZE or CAST before for smaller weights of float data",
    ),
    Conversion(
        5,
        "DEPTH_TO_SPACE",
        shapes.space_depth(OperationType.DEPTH_TO_SPACE, "DepthToSpaceOptions"),
        "DEPTH_TO_SPACE",
    ),
    Conversion(6, "DEQUANTIZE", layers.dequantize, "DEQUANTIZE; CAST from FLOAT16"),
    Conversion(7, "EMBEDDING_LOOKUP", ew.direct(OperationType.EMBEDDING_LOOKUP), "EMBEDDING_LOOKUP"),
    Conversion(8, "FLOOR", ew.direct(OperationType.FLOOR), "FLOOR"),
    Conversion(
        9,
        "FULLY_CONNECTED",
        layers.fully_connected,
        "FULLY_CONNECTED; with scales per channel one for each unit and CONCATENATION, or above 64 units RESHAPE, CONV_2D, "
        "RESHAPE; RESHAPE after to keep dimensions",
    ),
    Conversion(10, "HASHTABLE_LOOKUP", ew.direct(OperationType.HASHTABLE_LOOKUP), "HASHTABLE_LOOKUP"),
    Conversion(11, "L2_NORMALIZATION", shapes.l2_normalization, "L2_NORMALIZATION along the last axis"),
    Conversion(12, "L2_POOL_2D", layers.pool_2d(OperationType.L2_POOL_2D), "L2_POOL_2D"),
    Conversion(
        13,
        "LOCAL_RESPONSE_NORMALIZATION",
        shapes.local_response_normalization,
        "LOCAL_RESPONSE_NORMALIZATION",
    ),
    Conversion(14, "LOGISTIC", ew.direct(OperationType.LOGISTIC), "LOGISTIC"),
    Conversion(15, "LSH_PROJECTION", shapes.lsh_projection, "LSH_PROJECTION"),
    Conversion(16, "LSTM", recurrent.lstm, f"LSTM; {_FRESH_STATE}"),
    Conversion(17, "MAX_POOL_2D", layers.pool_2d(OperationType.MAX_POOL_2D), "MAX_POOL_2D"),
    Conversion(18, "MUL", ew.arithmetic(OperationType.MUL, "MulOptions"), "MUL"),
    Conversion(
        19,
        "RELU",
        ew.relu(OperationType.RELU, FusedActivation.RELU),
        "RELU; with another scale RESHAPE, DEPTHWISE_CONV_2D, RESHAPE",
    ),
    Conversion(
        20,
        "RELU_N1_TO_1",
        ew.relu(OperationType.RELU1, FusedActivation.RELU1),
        "RELU1; with another scale as RELU",
    ),
    Conversion(
        21, "RELU6", ew.relu(OperationType.RELU6, FusedActivation.RELU6), "RELU6; with another scale as RELU"
    ),
    Conversion(22, "RESHAPE", shapes.reshape, "RESHAPE; nothing where the shape stays"),
    Conversion(
        23,
        "RESIZE_BILINEAR",
        shapes.resize(OperationType.RESIZE_BILINEAR, "ResizeBilinearOptions"),
        "RESIZE_BILINEAR to a constant size",
    ),
    Conversion(24, "RNN", recurrent.rnn, f"RNN; {_FRESH_STATE}"),
    Conversion(25, "SOFTMAX", ew.softmax, "SOFTMAX"),
    Conversion(
        26,
        "SPACE_TO_DEPTH",
        shapes.space_depth(OperationType.SPACE_TO_DEPTH, "SpaceToDepthOptions"),
        "SPACE_TO_DEPTH",
    ),
    Conversion(27, "SVDF", recurrent.svdf, f"SVDF; {_FRESH_STATE}"),
    Conversion(28, "TANH", ew.direct(OperationType.TANH), "TANH"),
    Conversion(29, "CONCAT_EMBEDDINGS", None, _UNUSED),
    Conversion(30, "SKIP_GRAM", None, _STRINGS),
    Conversion(31, "CALL", None, _UNUSED),
    Conversion(32, "CUSTOM", None, _FOREIGN),
    Conversion(33, "EMBEDDING_LOOKUP_SPARSE", None, _NOTHING),
    Conversion(34, "PAD", shapes.pad, "PAD"),
    Conversion(
        35,
        "UNIDIRECTIONAL_SEQUENCE_RNN",
        recurrent.unidirectional_sequence_rnn,
        f"UNIDIRECTIONAL_SEQUENCE_RNN; {_FRESH_STATE}",
    ),
    Conversion(
        36,
        "GATHER",
        places.gather,
        "GATHER; RESHAPE after for a single index; of batches RESHAPE and ADD of the batch's first row before",
    ),
    Conversion(37, "BATCH_TO_SPACE_ND", shapes.batch_to_space_nd, "BATCH_TO_SPACE_ND; SLICE after for crops"),
    Conversion(38, "SPACE_TO_BATCH_ND", shapes.space_to_batch_nd, "SPACE_TO_BATCH_ND"),
    Conversion(
        39,
        "TRANSPOSE",
        shapes.transpose,
        "TRANSPOSE; RESHAPE where only axes of extent 1 move; GATHER of integers",
    ),
    Conversion(
        40,
        "MEAN",
        layers.reduce_mean,
        "MEAN; RESHAPE, DEPTHWISE_CONV_2D, RESHAPE with another scale in the result",
    ),
    Conversion(41, "SUB", ew.arithmetic(OperationType.SUB, "SubOptions"), "SUB"),
    Conversion(
        42,
        "DIV",
        ew.arithmetic(OperationType.DIV, "DivOptions"),
        "DIV; of integers MUL, SUB, LESS, NOT_EQUAL, LOGICAL_AND, ADD, SELECT after it to round towards 0",
    ),
    Conversion(43, "SQUEEZE", shapes.reshape, "RESHAPE; nothing where the shape stays"),
    Conversion(
        44,
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        recurrent.unidirectional_sequence_lstm,
        f"UNIDIRECTIONAL_SEQUENCE_LSTM; {_FRESH_STATE}",
    ),
    Conversion(
        45,
        "STRIDED_SLICE",
        slices.strided_slice,
        "STRIDED_SLICE; SLICE, GATHER and RESHAPE of integers and with an ellipsis or new axes",
    ),
    Conversion(
        46,
        "BIDIRECTIONAL_SEQUENCE_RNN",
        recurrent.bidirectional_sequence_rnn,
        f"BIDIRECTIONAL_SEQUENCE_RNN; {_FRESH_STATE}",
    ),
    Conversion(47, "EXP", ew.direct(OperationType.EXP), "EXP"),
    Conversion(48, "TOPK_V2", shapes.topk_v2, "REVERSE, TOPK_V2 with a constant k, SUB"),
    Conversion(49, "SPLIT", shapes.split, "SPLIT"),
    Conversion(50, "LOG_SOFTMAX", ew.log_softmax, "LOG_SOFTMAX"),
    Conversion(51, "DELEGATE", None, _FOREIGN),
    Conversion(
        52,
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        recurrent.bidirectional_sequence_lstm,
        f"BIDIRECTIONAL_SEQUENCE_LSTM; {_FRESH_STATE}",
    ),
    Conversion(53, "CAST", ew.cast, "CAST; DEQUANTIZE from INT8, NOT_EQUAL to and SELECT from BOOL"),
    Conversion(54, "PRELU", ew.direct(OperationType.PRELU), "PRELU"),
    Conversion(55, "MAXIMUM", ew.direct(OperationType.MAXIMUM), "MAXIMUM"),
    Conversion(56, "ARG_MAX", shapes.arg_extremum(OperationType.ARGMAX), "ARGMAX along a constant axis"),
    Conversion(57, "MINIMUM", ew.direct(OperationType.MINIMUM), "MINIMUM"),
    Conversion(58, "LESS", ew.direct(OperationType.LESS), "LESS"),
    Conversion(59, "NEG", ew.direct(OperationType.NEG), "NEG"),
    Conversion(60, "PADV2", shapes.pad_v2, "PAD_V2 with a constant value"),
    Conversion(61, "GREATER", ew.direct(OperationType.GREATER), "GREATER"),
    Conversion(62, "GREATER_EQUAL", ew.direct(OperationType.GREATER_EQUAL), "GREATER_EQUAL"),
    Conversion(63, "LESS_EQUAL", ew.direct(OperationType.LESS_EQUAL), "LESS_EQUAL"),
    Conversion(
        64,
        "SELECT",
        ew.select,
        "SELECT; inputs of other shapes are repeated by TILE, LOGICAL_OR or in constants",
    ),
    Conversion(65, "SLICE", slices.slice_, "SLICE"),
    Conversion(66, "SIN", ew.direct(OperationType.SIN), "SIN"),
    Conversion(67, "TRANSPOSE_CONV", layers.transpose_conv, "TRANSPOSE_CONV_2D"),
    Conversion(68, "SPARSE_TO_DENSE", None, _SCATTER),
    Conversion(69, "TILE", shapes.tile, "TILE"),
    Conversion(70, "EXPAND_DIMS", shapes.expand_dims, "EXPAND_DIMS"),
    Conversion(71, "EQUAL", ew.direct(OperationType.EQUAL), "EQUAL"),
    Conversion(72, "NOT_EQUAL", ew.direct(OperationType.NOT_EQUAL), "NOT_EQUAL"),
    Conversion(73, "LOG", ew.direct(OperationType.LOG), "LOG"),
    Conversion(
        74, "SUM", layers.reduce_sum, "REDUCE_SUM; RESHAPE, DEPTHWISE_CONV_2D, RESHAPE of 8-bit integers"
    ),
    Conversion(75, "SQRT", ew.direct(OperationType.SQRT), "SQRT"),
    Conversion(76, "RSQRT", ew.direct(OperationType.RSQRT), "RSQRT"),
    Conversion(77, "SHAPE", _folded_only, "a constant, where the shape is known"),
    Conversion(78, "POW", ew.direct(OperationType.POW), "POW"),
    Conversion(79, "ARG_MIN", shapes.arg_extremum(OperationType.ARGMIN), "ARGMIN along a constant axis"),
    Conversion(80, "FAKE_QUANT", None, _ROUNDING),
    Conversion(81, "REDUCE_PROD", shapes.reduce(OperationType.REDUCE_PROD), "REDUCE_PROD"),
    Conversion(82, "REDUCE_MAX", shapes.reduce(OperationType.REDUCE_MAX), "REDUCE_MAX"),
    Conversion(83, "PACK", shapes.pack, "PACK; RESHAPE after for single numbers"),
    Conversion(84, "LOGICAL_OR", ew.direct(OperationType.LOGICAL_OR), "LOGICAL_OR"),
    Conversion(85, "ONE_HOT", shapes.one_hot, "EXPAND_DIMS, EQUAL, SELECT"),
    Conversion(86, "LOGICAL_AND", ew.direct(OperationType.LOGICAL_AND), "LOGICAL_AND"),
    Conversion(87, "LOGICAL_NOT", ew.direct(OperationType.LOGICAL_NOT), "LOGICAL_NOT"),
    Conversion(88, "UNPACK", shapes.unpack, "SPLIT, RESHAPE of each part"),
    Conversion(89, "REDUCE_MIN", shapes.reduce(OperationType.REDUCE_MIN), "REDUCE_MIN"),
    Conversion(90, "FLOOR_DIV", ew.floor_div, "DIV of integers; DIV, FLOOR of floats"),
    Conversion(91, "REDUCE_ANY", shapes.reduce(OperationType.REDUCE_ANY), "REDUCE_ANY"),
    Conversion(92, "SQUARE", ew.square, "MUL"),
    Conversion(93, "ZEROS_LIKE", shapes.zeros_like, "a constant"),
    Conversion(94, "FILL", shapes.fill, "a constant; FILL where the shape is known at run time only"),
    Conversion(
        95,
        "FLOOR_MOD",
        ew.floor_mod,
        "DIV, MUL, SUB of integers; DIV, FLOOR, MUL, SUB, MUL, LESS, ADD, SELECT of floats, whose product is rounded",
    ),
    Conversion(96, "RANGE", _folded_only, "a constant, where the limits are constant integers"),
    Conversion(
        97,
        "RESIZE_NEAREST_NEIGHBOR",
        shapes.resize(OperationType.RESIZE_NEAREST_NEIGHBOR, "ResizeNearestNeighborOptions"),
        "RESIZE_NEAREST_NEIGHBOR to a constant size",
    ),
    Conversion(98, "LEAKY_RELU", ew.leaky_relu, "PRELU with one alpha"),
    Conversion(99, "SQUARED_DIFFERENCE", ew.squared_difference, "SUB, MUL"),
    Conversion(100, "MIRROR_PAD", shapes.mirror_pad, "MIRROR_PAD"),
    Conversion(101, "ABS", ew.direct(OperationType.ABS), "ABS"),
    Conversion(102, "SPLIT_V", shapes.split_v, "SLICE for each part"),
    Conversion(103, "UNIQUE", None, _DYNAMIC),
    Conversion(104, "CEIL", ew.ceil, "NEG, FLOOR, NEG"),
    Conversion(105, "REVERSE_V2", shapes.reverse, "REVERSE for each axis"),
    Conversion(106, "ADD_N", ew.add_n, "a chain of ADDs"),
    Conversion(107, "GATHER_ND", places.gather_nd, "SPLIT, MUL and ADD of the indexes, GATHER, RESHAPE"),
    Conversion(108, "COS", ew.cos, "SIN of the half, MUL, MUL, SUB"),
    Conversion(
        109,
        "WHERE",
        places.where,
        "NOT_EQUAL, SELECT, CAST, MUL, TOPK_V2, SLICE of as many as REDUCE_SUM counts; DIV, MUL, SUB, PACK for the axes",
    ),
    Conversion(110, "RANK", _folded_only, "a constant"),
    Conversion(111, "ELU", ew.elu, "ELU"),
    Conversion(
        112,
        "REVERSE_SEQUENCE",
        places.reverse_sequence,
        "SUB, LESS, SELECT, ADD of the indexes, GATHER; batches along axis 0, sequences along axis 1",
    ),
    Conversion(113, "MATRIX_DIAG", places.matrix_diag, "TILE, SELECT"),
    Conversion(
        114,
        "QUANTIZE",
        layers.quantize,
        "QUANTIZE of floats; DEQUANTIZE, QUANTIZE between 8-bit types; RESHAPE, DEPTHWISE_CONV_2D, RESHAPE to another scale",
    ),
    Conversion(115, "MATRIX_SET_DIAG", places.matrix_set_diag, "TILE, SELECT"),
    Conversion(
        116, "ROUND", ew.round_, "ABS, ADD, SUB, NEG, LESS, SELECT: the fraction falls off beside 2 ** 23"
    ),
    Conversion(117, "HARD_SWISH", ew.direct(OperationType.HARD_SWISH), "HARD_SWISH"),
    Conversion(118, "IF", control_flow.if_, "IF"),
    Conversion(119, "WHILE", control_flow.while_, "WHILE"),
    Conversion(120, "NON_MAX_SUPPRESSION_V4", None, _SUPPRESSION),
    Conversion(121, "NON_MAX_SUPPRESSION_V5", None, _SUPPRESSION),
    Conversion(
        122,
        "SCATTER_ND",
        places.scatter_nd,
        "PAD, GATHER to constant places; else EQUAL, SELECT, CAST, BATCH_MATMUL, where floats must be finite",
    ),
    Conversion(
        123,
        "SELECT_V2",
        ew.select,
        "SELECT; inputs of other shapes are repeated by TILE, LOGICAL_OR or in constants",
    ),
    Conversion(124, "DENSIFY", None, _SPARSE),
    Conversion(
        125, "SEGMENT_SUM", places.segment_sum, "EQUAL, SELECT, CAST, BATCH_MATMUL with constant segments"
    ),
    Conversion(
        126,
        "BATCH_MATMUL",
        layers.batch_matmul,
        "BATCH_MATMUL; RESHAPE and GATHER before where ranks or batches differ",
    ),
    Conversion(127, "PLACEHOLDER_FOR_GREATER_OP_CODES", None, _PLACEHOLDER),
    Conversion(
        128, "CUMSUM", shapes.cumsum, "SPLIT, ADD for each step, CONCATENATION (PACK, RESHAPE of integers)"
    ),
    Conversion(129, "CALL_ONCE", None, _RESOURCE),
    Conversion(130, "BROADCAST_TO", ew.broadcast_to, "TILE; LOGICAL_OR with false for booleans"),
    Conversion(131, "RFFT2D", None, _COMPLEX),
    Conversion(
        132,
        "CONV_3D",
        volumes.conv_3d,
        "PAD, GATHER for each tap of the filter's depth, CONCATENATION, CONV_2D: constant weights",
    ),
    Conversion(133, "IMAG", None, _COMPLEX),
    Conversion(134, "REAL", None, _COMPLEX),
    Conversion(135, "COMPLEX_ABS", None, _COMPLEX),
    Conversion(136, "HASHTABLE", None, _RESOURCE),
    Conversion(137, "HASHTABLE_FIND", None, _RESOURCE),
    Conversion(138, "HASHTABLE_IMPORT", None, _RESOURCE),
    Conversion(139, "HASHTABLE_SIZE", None, _RESOURCE),
    Conversion(140, "REDUCE_ALL", shapes.reduce(OperationType.REDUCE_ALL), "REDUCE_ALL"),
    Conversion(141, "CONV_3D_TRANSPOSE", None, _VOLUME),
    Conversion(142, "VAR_HANDLE", None, _RESOURCE),
    Conversion(143, "READ_VARIABLE", None, _RESOURCE),
    Conversion(144, "ASSIGN_VARIABLE", None, _RESOURCE),
    Conversion(145, "BROADCAST_ARGS", None, _NOTHING),
    Conversion(146, "RANDOM_STANDARD_NORMAL", None, _RANDOM),
    Conversion(147, "BUCKETIZE", None, _NOTHING),
    Conversion(148, "RANDOM_UNIFORM", None, _RANDOM),
    Conversion(149, "MULTINOMIAL", None, _RANDOM),
    Conversion(
        150,
        "GELU",
        ew.gelu,
        "ADD, MUL and TANH for the approximate form, MUL, ADD and DIV of polynomials for the exact one; GATHER of 8-bit integers",
    ),
    Conversion(
        151,
        "DYNAMIC_UPDATE_SLICE",
        places.dynamic_update_slice,
        "for each axis SLICE, SUB, MAXIMUM, MINIMUM, EQUAL and GATHER; SELECT",
    ),
    Conversion(152, "RELU_0_TO_1", ew.relu_0_to_1, "RELU1, RELU"),
    Conversion(153, "UNSORTED_SEGMENT_PROD", None, _SCATTER),
    Conversion(154, "UNSORTED_SEGMENT_MAX", None, _SCATTER),
    Conversion(
        155,
        "UNSORTED_SEGMENT_SUM",
        places.unsorted_segment_sum,
        "EQUAL, SELECT, CAST, BATCH_MATMUL with a constant number of segments",
    ),
    Conversion(156, "ATAN2", None, _FUNCTION),
    Conversion(157, "UNSORTED_SEGMENT_MIN", None, _SCATTER),
    Conversion(158, "SIGN", ew.sign, "LESS, GREATER, SELECT"),
    Conversion(159, "BITCAST", None, _BITS),
    Conversion(160, "BITWISE_XOR", None, _BITS),
    Conversion(161, "RIGHT_SHIFT", ew.right_shift, "DIV by the power of 2 of a constant"),
    Conversion(162, "STABLEHLO_LOGISTIC", None, _STABLEHLO),
    Conversion(163, "STABLEHLO_ADD", None, _STABLEHLO),
    Conversion(164, "STABLEHLO_DIVIDE", None, _STABLEHLO),
    Conversion(165, "STABLEHLO_MULTIPLY", None, _STABLEHLO),
    Conversion(166, "STABLEHLO_MAXIMUM", None, _STABLEHLO),
    Conversion(167, "STABLEHLO_RESHAPE", None, _STABLEHLO),
    Conversion(168, "STABLEHLO_CLAMP", None, _STABLEHLO),
    Conversion(169, "STABLEHLO_CONCATENATE", None, _STABLEHLO),
    Conversion(170, "STABLEHLO_BROADCAST_IN_DIM", None, _STABLEHLO),
    Conversion(171, "STABLEHLO_CONVOLUTION", None, _STABLEHLO),
    Conversion(172, "STABLEHLO_SLICE", None, _STABLEHLO),
    Conversion(173, "STABLEHLO_CUSTOM_CALL", None, _STABLEHLO),
    Conversion(174, "STABLEHLO_REDUCE", None, _STABLEHLO),
    Conversion(175, "STABLEHLO_ABS", None, _STABLEHLO),
    Conversion(176, "STABLEHLO_AND", None, _STABLEHLO),
    Conversion(177, "STABLEHLO_COSINE", None, _STABLEHLO),
    Conversion(178, "STABLEHLO_EXPONENTIAL", None, _STABLEHLO),
    Conversion(179, "STABLEHLO_FLOOR", None, _STABLEHLO),
    Conversion(180, "STABLEHLO_LOG", None, _STABLEHLO),
    Conversion(181, "STABLEHLO_MINIMUM", None, _STABLEHLO),
    Conversion(182, "STABLEHLO_NEGATE", None, _STABLEHLO),
    Conversion(183, "STABLEHLO_OR", None, _STABLEHLO),
    Conversion(184, "STABLEHLO_POWER", None, _STABLEHLO),
    Conversion(185, "STABLEHLO_REMAINDER", None, _STABLEHLO),
    Conversion(186, "STABLEHLO_RSQRT", None, _STABLEHLO),
    Conversion(187, "STABLEHLO_SELECT", None, _STABLEHLO),
    Conversion(188, "STABLEHLO_SUBTRACT", None, _STABLEHLO),
    Conversion(189, "STABLEHLO_TANH", None, _STABLEHLO),
    Conversion(190, "STABLEHLO_SCATTER", None, _STABLEHLO),
    Conversion(191, "STABLEHLO_COMPARE", None, _STABLEHLO),
    Conversion(192, "STABLEHLO_CONVERT", None, _STABLEHLO),
    Conversion(193, "STABLEHLO_DYNAMIC_SLICE", None, _STABLEHLO),
    Conversion(194, "STABLEHLO_DYNAMIC_UPDATE_SLICE", None, _STABLEHLO),
    Conversion(195, "STABLEHLO_PAD", None, _STABLEHLO),
    Conversion(196, "STABLEHLO_IOTA", None, _STABLEHLO),
    Conversion(197, "STABLEHLO_DOT_GENERAL", None, _STABLEHLO),
    Conversion(198, "STABLEHLO_REDUCE_WINDOW", None, _STABLEHLO),
    Conversion(199, "STABLEHLO_SORT", None, _STABLEHLO),
    Conversion(200, "STABLEHLO_WHILE", None, _STABLEHLO),
    Conversion(201, "STABLEHLO_GATHER", None, _STABLEHLO),
    Conversion(202, "STABLEHLO_TRANSPOSE", None, _STABLEHLO),
    Conversion(203, "DILATE", None, _NOTHING),
    Conversion(204, "STABLEHLO_RNG_BIT_GENERATOR", None, _STABLEHLO),
    Conversion(205, "REDUCE_WINDOW", None, _NOTHING),
    Conversion(206, "STABLEHLO_COMPOSITE", None, _STABLEHLO),
    Conversion(207, "STABLEHLO_SHIFT_LEFT", None, _STABLEHLO),
    Conversion(208, "STABLEHLO_CBRT", None, _STABLEHLO),
    Conversion(209, "STABLEHLO_CASE", None, _STABLEHLO),
)

CONVERSIONS = {conversion.code: conversion for conversion in _TABLE}
"""The table by code."""


def operator_name(operator: TfliteOperator) -> str:
    """An operator's name for messages; a custom one with the name that the file gives it."""
    if operator.code == CUSTOM:
        return f"CUSTOM {operator.custom_code!r}"
    conversion = CONVERSIONS.get(operator.code)
    return conversion.name if conversion is not None else f"code {operator.code}"


def document() -> str:
    """``docs/engines/tflite-operators.md`` as text."""
    known = sum(c.convert is not None for c in _TABLE)
    rows = "\n".join(
        f"| {c.code} | {c.name} | {'yes' if c.convert is not None else 'no'} | {c.how} |" for c in _TABLE
    )
    return f"{_HEAD.format(known=known, count=len(_TABLE))}\n{rows}\n"


_HEAD = """# TensorFlow Lite operators

`aionn.models.tflite.load_tflite` turns a `.tflite` file into a model of HAL operations. This table is made from the importer's own
(`aionn.models.tflite.operators.document`), and a test keeps both equal. {known} of the {count} builtin operators can be expressed.

Notes on the table:

- Every operation that is written is checked against its contract, so types and ranks are those of the HAL operation that is named;
  an operator that breaks a contract is refused with the contract's own message.
- One error lists all operators of a file that cannot be expressed, with their counts.
- Tensors: FLOAT32, FLOAT16, INT32, BOOL, UINT8 and INT8 have HAL types, INT8 constants with scales per channel as well. 8-bit
  integers without quantisation are numbers with scale 1. Shape [] becomes [1].
- INT64: inputs become INT32, so that an application hands in 32-bit numbers. So do constants that fit, and results of ARG_MAX,
  ARG_MIN, WHERE and of what only chooses or moves INT32 values. Other arithmetic on INT64 is refused: it can need 64 bits.
- INT16 with a scale (16-bit activations with 8-bit weights) becomes FLOAT32: inputs and outputs are the real values. TensorFlow
  Lite rounds to 16 bits after every operator, so results are some steps of 16 bits apart; only QUANTIZE keeps to the 16-bit range.
- More than four axes: the leading ones are merged (`[1, 5, 6, 7, 2]` is `[5, 6, 7, 2]`), in inputs and outputs as well. An operator
  on such tensors is written where neighbouring axes that it treats alike merge to four; booleans that only move become UINT8.
- Shapes: open extents of the main inputs take the shape that the file calls its default, or that `load_tflite` is given; others
  are inferred.
- Signatures: the first subgraph is imported, or that of the signature named in `load_tflite`.
- Arithmetic on shapes (SHAPE, RANK, RANGE, and ADD, SUB, MUL, CAST, CONCATENATION, EXPAND_DIMS, GATHER, PACK, REDUCE_PROD, RESHAPE,
  SQUEEZE, STRIDED_SLICE of known whole numbers) is done at import and leaves constants.
- Fused activations NONE, RELU, RELU_N1_TO_1 and RELU6 stay fused; TANH becomes an operation of its own; SIGN_BIT is refused.
- Float results are as near to TensorFlow Lite's as the order of additions lets them be, with two exceptions: FLOOR_MOD rounds the
  product of quotient and divisor, and the error function of the exact GELU is a quotient of polynomials, true to some 2 ** -23.
- 8-bit results equal those of TensorFlow Lite's reference kernels in every bit, with three exceptions of at most one step:
  FULLY_CONNECTED with scales per channel and more than 64 units, where the reference rounds once and the HAL's convolution twice;
  RESIZE_BILINEAR of UINT8, where the reference rounds and the HAL drops the fraction; and MEAN to another scale over a number of
  elements that is not a power of two, such as 7 x 7, where for most scales no filter rounds as the reference does. The LiteRT
  driver recognises every such MEAN and gives LiteRT's bytes.
- Float data with weights of 8 bits: the weights become floats first; TensorFlow Lite quantises the data instead.

| code | operator | can be expressed | as, or why not |
| --- | --- | --- | --- |"""

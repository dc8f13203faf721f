"""Operations: what a subgraph computes, by number.

Owns the operation codes and the scalar enumerations that operations take as arguments. ``aionn.ops`` defines the operations.

Source: ``OperationType`` of the NN HAL 1.0 to 1.3 and of its AIDL versions 2 and 3; 106 operations up to feature level 7.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

__all__ = [
    "EXTENSION_OPERATION_MIN",
    "FusedActivation",
    "Operation",
    "OperationType",
    "Padding",
    "operation_type_name",
]

EXTENSION_OPERATION_MIN = 0x10000
"""Operation codes from here on belong to vendor extensions."""


class OperationType(enum.IntEnum):
    """Operations with the spec's numbers."""

    ADD = 0
    AVERAGE_POOL_2D = 1
    CONCATENATION = 2
    CONV_2D = 3
    DEPTHWISE_CONV_2D = 4
    DEPTH_TO_SPACE = 5
    DEQUANTIZE = 6
    EMBEDDING_LOOKUP = 7
    FLOOR = 8
    FULLY_CONNECTED = 9
    HASHTABLE_LOOKUP = 10
    L2_NORMALIZATION = 11
    L2_POOL_2D = 12
    LOCAL_RESPONSE_NORMALIZATION = 13
    LOGISTIC = 14
    LSH_PROJECTION = 15
    LSTM = 16
    MAX_POOL_2D = 17
    MUL = 18
    RELU = 19
    RELU1 = 20
    RELU6 = 21
    RESHAPE = 22
    RESIZE_BILINEAR = 23
    RNN = 24
    SOFTMAX = 25
    SPACE_TO_DEPTH = 26
    SVDF = 27
    TANH = 28
    BATCH_TO_SPACE_ND = 29
    DIV = 30
    MEAN = 31
    PAD = 32
    SPACE_TO_BATCH_ND = 33
    SQUEEZE = 34
    STRIDED_SLICE = 35
    SUB = 36
    TRANSPOSE = 37
    ABS = 38
    ARGMAX = 39
    ARGMIN = 40
    AXIS_ALIGNED_BBOX_TRANSFORM = 41
    BIDIRECTIONAL_SEQUENCE_LSTM = 42
    BIDIRECTIONAL_SEQUENCE_RNN = 43
    BOX_WITH_NMS_LIMIT = 44
    CAST = 45
    CHANNEL_SHUFFLE = 46
    DETECTION_POSTPROCESSING = 47
    EQUAL = 48
    EXP = 49
    EXPAND_DIMS = 50
    GATHER = 51
    GENERATE_PROPOSALS = 52
    GREATER = 53
    GREATER_EQUAL = 54
    GROUPED_CONV_2D = 55
    HEATMAP_MAX_KEYPOINT = 56
    INSTANCE_NORMALIZATION = 57
    LESS = 58
    LESS_EQUAL = 59
    LOG = 60
    LOGICAL_AND = 61
    LOGICAL_NOT = 62
    LOGICAL_OR = 63
    LOG_SOFTMAX = 64
    MAXIMUM = 65
    MINIMUM = 66
    NEG = 67
    NOT_EQUAL = 68
    PAD_V2 = 69
    POW = 70
    PRELU = 71
    QUANTIZE = 72
    QUANTIZED_16BIT_LSTM = 73
    RANDOM_MULTINOMIAL = 74
    REDUCE_ALL = 75
    REDUCE_ANY = 76
    REDUCE_MAX = 77
    REDUCE_MIN = 78
    REDUCE_PROD = 79
    REDUCE_SUM = 80
    ROI_ALIGN = 81
    ROI_POOLING = 82
    RSQRT = 83
    SELECT = 84
    SIN = 85
    SLICE = 86
    SPLIT = 87
    SQRT = 88
    TILE = 89
    TOPK_V2 = 90
    TRANSPOSE_CONV_2D = 91
    UNIDIRECTIONAL_SEQUENCE_LSTM = 92
    UNIDIRECTIONAL_SEQUENCE_RNN = 93
    RESIZE_NEAREST_NEIGHBOR = 94
    QUANTIZED_LSTM = 95
    IF = 96
    WHILE = 97
    ELU = 98
    HARD_SWISH = 99
    FILL = 100
    RANK = 101
    BATCH_MATMUL = 102
    PACK = 103
    MIRROR_PAD = 104
    REVERSE = 105
    OEM_OPERATION = 10000


class FusedActivation(enum.IntEnum):
    """The activation that an operation applies to its result."""

    NONE = 0
    RELU = 1
    RELU1 = 2
    RELU6 = 3


class Padding(enum.IntEnum):
    """Implicit padding schemes. 0 is not legal."""

    SAME = 1
    VALID = 2


INDEXES_MAX = 1 << 16
"""Most inputs or outputs of a message's operation: 2 ms to decode."""

_Indexes = Annotated[tuple[int, ...], msgspec.Meta(max_length=INDEXES_MAX)]


class Operation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of a subgraph.

    Attributes:
        type: An ``OperationType``, or an extension's operation code.
        inputs: Operand indexes in the subgraph, in the order that the operation's contract numbers them.
        outputs: Operand indexes of the results.
    """

    type: int
    inputs: _Indexes
    outputs: _Indexes

    def __post_init__(self) -> None:
        if type(self.type) is int and self.type in _TYPE_BY_CODE:
            msgspec.structs.force_setattr(self, "type", _TYPE_BY_CODE[self.type])


_TYPE_BY_CODE = {int(member): member for member in OperationType}


def operation_type_name(code: int) -> str:
    """The spec's name of an operation, or the code itself in hexadecimal."""
    member = _TYPE_BY_CODE.get(int(code))
    return member.name if member is not None else f"0x{code:x}"

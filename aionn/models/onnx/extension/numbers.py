"""The numbers of the extension ``ai.onnx``: operations by the operator's name, operand types by the element type.

Invariant: numbers are never changed and never used again, since models and compilation caches contain them. New operators and types
are appended. An operator has one number for all operator sets; the record of an operation has the version.

Source: the operators of ONNX's own domain up to operator set 28, and its element types.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from aionn.errors import InvalidModel
from aionn.hal import Extension, ExtensionOperandType

__all__ = ["DTYPES", "EXTENSION", "EXTENSION_NAME", "OPERATORS", "ElementType", "number_of", "op_type_of"]

EXTENSION_NAME = "ai.onnx"
"""The name of the extension: that of the operators' domain."""


class ElementType(enum.IntEnum):
    """Operand types of the extension. All are tensors."""

    INT64 = 0
    UINT64 = 1
    UINT32 = 2
    INT16 = 3
    UINT16 = 4
    INT8 = 5
    UINT8 = 6
    FLOAT64 = 7
    BFLOAT16 = 8
    FLOAT8E4M3FN = 9
    FLOAT8E4M3FNUZ = 10
    FLOAT8E5M2 = 11
    FLOAT8E5M2FNUZ = 12
    PACKED4 = 13
    """Bytes with two values of 4 bits each, the first in the low bits; the extents of an operand count bytes."""
    ATTRIBUTES = 14
    """The bytes of a record."""


DTYPES: dict[ElementType, np.dtype[Any]] = {
    ElementType.INT64: np.dtype(np.int64),
    ElementType.UINT64: np.dtype(np.uint64),
    ElementType.UINT32: np.dtype(np.uint32),
    ElementType.INT16: np.dtype(np.int16),
    ElementType.UINT16: np.dtype(np.uint16),
    ElementType.INT8: np.dtype(np.int8),
    ElementType.UINT8: np.dtype(np.uint8),
    ElementType.FLOAT64: np.dtype(np.float64),
    ElementType.BFLOAT16: np.dtype(np.uint16),
    **{kind: np.dtype(np.uint8) for kind in ElementType if kind >= ElementType.FLOAT8E4M3FN},
}
"""numpy's type of an element by operand type; bits as whole numbers where numpy has no such type."""

EXTENSION = Extension(
    EXTENSION_NAME,
    tuple(ExtensionOperandType(int(kind), True, DTYPES[kind].itemsize) for kind in ElementType),
)
"""The extension as a driver declares it. Devices that declare it differently cannot be used together."""

_NAMES = """
Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization
Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast CastLike CausalConvWithState
Ceil Celu CenterCropPad Clip Col2Im Compress Concat ConcatFromSequence Constant ConstantOfShape Conv ConvInteger
ConvTranspose Cos Cosh CumProd CumSum DFT DeformConv DepthToSpace DequantizeLinear Det Div Dropout
DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu
Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HammingWindow
HannWindow HardSigmoid HardSwish Hardmax Identity If ImageDecoder InstanceNormalization IsInf IsNaN LRN LSTM
LayerNormalization LeakyRelu Less LessOrEqual LinearAttention Log LogSoftmax Loop LpNormalization LpPool MatMul
MatMulInteger Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization MelWeightMatrix Min Mish Mod Mul
Multinomial Neg NegativeLogLikelihoodLoss NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement
OptionalHasElement Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN RandomNormal
RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare RegexFullMatch Relu Reshape Resize ReverseSequence
RoiAlign RotaryEmbedding Round STFT Scan Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct
SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap Shape Shrink Sigmoid Sign Sin Sinh Size Slice
Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze StringConcat
StringNormalizer StringSplit Sub Sum SwiGLU Swish Tan Tanh TensorScatter TfIdfVectorizer ThresholdedRelu Tile TopK
Transpose Trilu Unique Unsqueeze Upsample Where Xor
"""

OPERATORS: tuple[str, ...] = tuple(_NAMES.split())
"""The operator of each operation; the number is the position."""

_NUMBERS = {name: number for number, name in enumerate(OPERATORS)}


def number_of(op_type: str) -> int:
    """The number of an operator's operation.

    Raises:
        InvalidModel: The extension has no such operation.
    """
    number = _NUMBERS.get(op_type)
    if number is None:
        raise InvalidModel(f"extension {EXTENSION_NAME}: expected an operator of its table, got {op_type!r}")
    return number


def op_type_of(number: int) -> str:
    """The operator of an operation's number, the low 16 bits of its code.

    Raises:
        InvalidModel: The extension has no such operation.
    """
    if not 0 <= number < len(OPERATORS):
        raise InvalidModel(
            f"extension {EXTENSION_NAME}: expected an operation from 0 to {len(OPERATORS) - 1}, got {number}"
        )
    return OPERATORS[number]

"""The contracts of the extension's operations: numbers of inputs and outputs, element types of outputs, and shape rules.

The importer derives the operands of outputs from them, and drivers check the operations of a model with them. An operator without a
contract is not written: those with texts, sequences, optional values, graphs or random numbers, and those without inputs.

Source: "Operator Schemas" of ONNX, operator sets 1 to 28.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aionn.errors import InvalidModel
from aionn.models.onnx.extension import shapes as s
from aionn.models.onnx.extension.application import Application, Shape, Unknown
from aionn.models.onnx.extension.attributes import ATTRIBUTE_NAMES
from aionn.models.onnx.extension.records import VALUES_MAX, AttributeTensor, Record, ValueType
from aionn.models.onnx.schema import DataType

__all__ = ["CONTRACTS", "Contract", "check_application", "output_types"]

TypeRule = int | DataType | str
"""The element type of an output: that of an input by its position, always the same, or the number of an attribute."""

ShapeRule = Callable[[Application], Sequence[Shape | None]]


class Contract(NamedTuple):
    """The contract of an operator in all versions.

    Attributes:
        least: The least number of inputs.
        most: The largest number of inputs.
        types: One for each output; the last one holds for all further outputs if ``is_variadic``.
        shapes: Returns the shapes of the outputs; None means that only the execution knows them.
        is_variadic: Whether the operator has any number of outputs.
    """

    least: int
    most: int
    types: tuple[TypeRule, ...] = (0,)
    shapes: ShapeRule | None = None
    is_variadic: bool = False


MANY = VALUES_MAX
I32, I64, U8, F32, BOOL = DataType.INT32, DataType.INT64, DataType.UINT8, DataType.FLOAT, DataType.BOOL


def _rows(names: str, contract: Contract) -> dict[str, Contract]:
    return dict.fromkeys(names.split(), contract)


CONTRACTS: dict[str, Contract] = {
    **_rows(
        "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Hardmax "
        "Identity LeakyRelu Log LogSoftmax LpNormalization LRN MeanVarianceNormalization Mish Neg Not Reciprocal Relu Round Selu "
        "Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu",
        Contract(1, 1, (0,), s.like_first),
    ),
    **_rows(
        "Add BitShift BitwiseAnd BitwiseOr BitwiseXor Div Mod Mul Pow PRelu Sub",
        Contract(2, 2, (0,), s.broadcast),
    ),
    **_rows("And Equal Greater GreaterOrEqual Less LessOrEqual Or Xor", Contract(2, 2, (BOOL,), s.broadcast)),
    **_rows("IsInf IsNaN", Contract(1, 1, (BOOL,), s.like_first)),
    **_rows("Max Mean Min Sum", Contract(1, MANY, (0,), s.broadcast)),
    **_rows("ArgMax ArgMin", Contract(1, 1, (I64,), s.arg_extremum)),
    **_rows(
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare",
        Contract(1, 2, (0,), s.reduction),
    ),
    **_rows("AveragePool LpPool", Contract(1, 1, (0,), s.pool)),
    **_rows("GlobalAveragePool GlobalLpPool GlobalMaxPool", Contract(1, 1, (0,), s.global_pool)),
    **_rows("CumProd CumSum ReverseSequence", Contract(2, 2, (0,), s.like_first)),
    **_rows("GRU RNN", Contract(3, 6, (0, 0), s.recurrent)),
    **_rows("GroupNormalization InstanceNormalization", Contract(3, 3, (0,), s.like_first)),
    **_rows("Scatter ScatterElements ScatterND", Contract(3, 3, (0,), s.like_first)),
    **_rows("BlackmanWindow HammingWindow HannWindow", Contract(1, 1, ("output_datatype",), s.window)),
    "AffineGrid": Contract(2, 2, (0,), s.affine_grid),
    "Attention": Contract(3, 7, (0, 0, 2, 0), s.attention),
    "BatchNormalization": Contract(5, 5, (0, 3, 4, 3, 4), s.batch_normalization),
    "BitCast": Contract(1, 1, ("to",), s.like_first),
    "Cast": Contract(1, 1, ("to",), s.like_first),
    "CastLike": Contract(2, 2, (1,), s.like_first),
    "CausalConvWithState": Contract(2, 4, (0, 0), None),
    "CenterCropPad": Contract(2, 2, (0,), s.center_crop_pad),
    "Clip": Contract(1, 3, (0,), s.like_first),
    "Col2Im": Contract(3, 3, (0,), s.col2im),
    "Compress": Contract(2, 2, (0,), None),
    "Concat": Contract(1, MANY, (0,), s.concat),
    "ConstantOfShape": Contract(1, 1, ("value",), s.constant_of_shape),
    "Conv": Contract(2, 3, (0,), s.conv),
    "ConvInteger": Contract(2, 4, (I32,), s.conv),
    "ConvTranspose": Contract(2, 3, (0,), s.conv_transpose),
    "DFT": Contract(1, 3, (0,), s.dft),
    "DeformConv": Contract(3, 5, (0,), s.conv),
    "DepthToSpace": Contract(1, 1, (0,), s.depth_to_space),
    "DequantizeLinear": Contract(2, 3, ("output_dtype",), s.like_first),
    "Det": Contract(1, 1, (0,), s.det),
    "Dropout": Contract(1, 3, (0, BOOL), s.like_first),
    "DynamicQuantizeLinear": Contract(1, 1, (U8, F32, U8), s.dynamic_quantize),
    "Einsum": Contract(1, MANY, (0,), s.einsum),
    "Expand": Contract(2, 2, (0,), s.expand),
    "EyeLike": Contract(1, 1, ("dtype",), s.like_first),
    "Flatten": Contract(1, 1, (0,), s.flatten),
    "Gather": Contract(2, 2, (0,), s.gather),
    "GatherElements": Contract(2, 2, (0,), s.like_second),
    "GatherND": Contract(2, 2, (0,), s.gather_nd),
    "Gemm": Contract(2, 3, (0,), s.gemm),
    "GridSample": Contract(2, 2, (0,), s.grid_sample),
    "LSTM": Contract(3, 8, (0, 0, 0), s.recurrent),
    "LayerNormalization": Contract(2, 3, (0, "stash_type", "stash_type"), s.layer_normalization),
    "LinearAttention": Contract(3, 6, (0, 3), None),
    "MatMul": Contract(2, 2, (0,), s.matmul),
    "MatMulInteger": Contract(2, 4, (I32,), s.matmul),
    "MaxPool": Contract(1, 1, (0, I64), s.pool),
    "MaxRoiPool": Contract(2, 2, (0,), s.max_roi_pool),
    "MaxUnpool": Contract(2, 3, (0,), s.max_unpool),
    "MelWeightMatrix": Contract(5, 5, ("output_datatype",), s.mel_weight_matrix),
    "NegativeLogLikelihoodLoss": Contract(2, 3, (0,), s.loss),
    "NonMaxSuppression": Contract(2, 5, (I64,), s.non_max_suppression),
    "NonZero": Contract(1, 1, (I64,), s.non_zero),
    "OneHot": Contract(3, 3, (2,), s.one_hot),
    "Pad": Contract(1, 4, (0,), s.pad),
    "QLinearConv": Contract(8, 9, (7,), s.conv),
    "QLinearMatMul": Contract(8, 8, (7,), s.matmul),
    "QuantizeLinear": Contract(2, 3, ("output_dtype",), s.like_first),
    "RMSNormalization": Contract(2, 2, (0,), s.like_first),
    "Range": Contract(3, 3, (0,), s.range_),
    "Reshape": Contract(1, 2, (0,), s.reshape),
    "Resize": Contract(1, 4, (0,), s.resize),
    "RoiAlign": Contract(3, 3, (0,), s.roi_align),
    "RotaryEmbedding": Contract(3, 4, (0,), s.like_first),
    "STFT": Contract(2, 4, (0,), s.stft),
    "Shape": Contract(1, 1, (I64,), s.shape_of),
    "Size": Contract(1, 1, (I64,), s.scalar),
    "Slice": Contract(1, 5, (0,), s.slice_),
    "SoftmaxCrossEntropyLoss": Contract(2, 3, (0, 0), s.loss),
    "SpaceToDepth": Contract(1, 1, (0,), s.space_to_depth),
    "Split": Contract(1, 2, (0,), s.split, True),
    "Squeeze": Contract(1, 2, (0,), s.squeeze),
    "SwiGLU": Contract(2, 2, (0,), s.broadcast),
    "TensorScatter": Contract(2, 3, (0,), s.like_first),
    "TfIdfVectorizer": Contract(1, 1, (F32,), None),
    "Tile": Contract(2, 3, (0,), s.tile),
    "TopK": Contract(1, 2, (0, I64), s.top_k),
    "Transpose": Contract(1, 1, (0,), s.transpose),
    "Trilu": Contract(1, 2, (0,), s.like_first),
    "Unique": Contract(1, 1, (0, I64, I64, I64), None),
    "Unsqueeze": Contract(1, 2, (0,), s.unsqueeze),
    "Upsample": Contract(1, 2, (0,), s.resize),
    "Where": Contract(3, 3, (1,), s.broadcast),
}
"""The contract of each operation, by the operator's name."""

_DEFAULTS = {"output_datatype": F32, "stash_type": F32}
"""The types that attributes state where they are omitted."""


def _contract(application: Application) -> Contract:
    contract = CONTRACTS.get(application.op_type)
    if contract is None:
        raise InvalidModel(f"{application.op_type}: expected an operator with a contract, got none")
    given = len(application.inputs)
    if not contract.least <= given <= contract.most:
        application.refuse("number of inputs", f"{contract.least} to {contract.most}", given)
    if any(application.inputs[position] is None for position in range(min(1, given))):
        application.refuse("input 0", "a value", "none")
    unknown = sorted(set(application.attributes) - ATTRIBUTE_NAMES.get(application.op_type, frozenset()))
    if unknown:
        application.refuse("attributes", "those of the operator", ", ".join(unknown)[:80])
    if not 1 <= application.outputs <= (MANY if contract.is_variadic else len(contract.types)):
        application.refuse("number of outputs", f"1 to {len(contract.types)}", application.outputs)
    return contract


def _type(application: Application, rule: TypeRule) -> DataType:
    if isinstance(rule, DataType):
        return rule
    if isinstance(rule, int):
        # Statistics in training have the type of the first input where theirs is omitted.
        return application.type(rule if application.has(rule) else 0)
    if rule == "value":
        value = application.attributes.get(rule)
        if value is not None and not isinstance(value, AttributeTensor):
            application.refuse(f"attribute {rule!r}", "a tensor", repr(value)[:40])
        return F32 if value is None else DataType(value.data_type)
    if rule in application.attributes:
        number = application.integer(rule, 0)
        if number in DataType.__members__.values() and number:
            return DataType(number)
        if number:
            application.refuse(f"attribute {rule!r}", "an element type", number)
    if rule == "output_dtype":
        # QuantizeLinear has the type of the zero point, DequantizeLinear that of the scale.
        if application.op_type == "DequantizeLinear":
            return application.type(1)
        return application.type(2) if application.has(2) else U8
    if rule == "dtype":
        return application.type(0)
    if rule not in _DEFAULTS:
        application.refuse(f"attribute {rule!r}", "an element type", "none")
    return _DEFAULTS[rule]


def output_types(application: Application) -> list[ValueType]:
    """Type and shape of each output.

    Raises:
        InvalidModel: The application breaks the operator's contract.
    """
    contract = _contract(application)
    kinds = [
        _type(application, contract.types[min(position, len(contract.types) - 1)])
        for position in range(application.outputs)
    ]
    found: Sequence[Shape | None] = ()
    if contract.shapes is not None:
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found = contract.shapes(application)
        except Unknown:
            found = ()
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise InvalidModel(
                f"{application.op_type}: expected inputs that fit each other, got others: {e}"
            ) from e
    shapes = [*found, *[None] * len(kinds)]
    return [ValueType(int(kind), shape) for kind, shape in zip(kinds, shapes, strict=False)]


def check_application(op_type: str, record: Record) -> None:
    """Checks the numbers of values and the types of an operation's record.

    Raises:
        InvalidModel: They break the operator's contract.
    """
    empty = [None] * len(record.inputs)
    application = Application(
        op_type, record.version, record.attributes, record.inputs, empty, len(record.outputs)
    )
    for position, (stated, derived) in enumerate(zip(record.outputs, output_types(application), strict=True)):
        if stated is not None and stated.data_type != derived.data_type:
            application.refuse(
                f"output {position}", DataType(derived.data_type).name, DataType(stated.data_type).name
            )

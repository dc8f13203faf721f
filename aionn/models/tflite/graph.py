"""Writes HAL subgraphs from the file's operators: operands, constants, checks, shapes.

Owns how a tensor becomes an operand, and the check of every operation that is written against its contract. The modules of
``conversions`` write operators, ``constants`` stores constants.

Invariants:
1. An operation that is written fulfils its contract; where it would not, the operator counts as ``Inexpressible``.
2. A tensor of shape [] becomes an operand of shape [1]: the HAL has no tensors of rank 0 of known shape. Of one with more than
   ``OPERAND_RANK_MAX`` axes the leading ones are merged (see ``stored_shape``); the operators that take it are in ``merging``.
3. An operation's inputs are written before it, so the order of the operations is executable.

Source: sections "Operand" and "Model" of the NN HAL; the TensorFlow Lite schema's tensor types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import Error, InvalidModel
from aionn.hal import (
    ChannelQuant,
    DataLocation,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    operand_dtype,
    operand_size_bytes,
)
from aionn.models.tflite.constants import Array, ModelWriter, without_dead
from aionn.models.tflite.schema import Tensor, TensorType, TfliteOperator
from aionn.ops import CONTRACTS, Call, Check, stand_in
from aionn.ops import Tensor as Value

__all__ = ["Consequence", "Convert", "Inexpressible", "SubgraphWriter", "is_known", "stored_shape"]

Shape = tuple[int, ...]

OPERAND_RANK_MAX = 4
"""Most axes that the HAL's operations take."""

OPERAND_BYTES_MAX = 2**32 - 1
"""Sizes are unsigned 32-bit numbers on the HAL's wire."""

NARROWED_CODES = frozenset(
    {2, 22, 34, 36, 39, 43, 45, 48, 49, 53, 55, 56, 57, 60, 64, 65, 69, 70, 79, 82, 83, 85, 88, 89, 93, 94, 95, 100, 102, 105, 107,
     109, 118, 119, 122, 123, 130, 151}
)  # fmt: skip
"""Operators whose INT64 results become INT32: indexes (ARG_MAX, ARG_MIN, WHERE), the remainders of FLOOR_MOD, what only chooses,
moves, cuts, joins or repeats values that were INT32 already, and the results of subgraphs. Other arithmetic can need 64 bits."""

_OPERAND_TYPES = {
    TensorType.FLOAT32: OperandType.TENSOR_FLOAT32,
    TensorType.FLOAT16: OperandType.TENSOR_FLOAT16,
    TensorType.INT32: OperandType.TENSOR_INT32,
    TensorType.UINT8: OperandType.TENSOR_QUANT8_ASYMM,
    TensorType.INT8: OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
    TensorType.BOOL: OperandType.TENSOR_BOOL8,
}
_NUMPY_TYPES: dict[TensorType, str] = {
    TensorType.FLOAT32: "<f4",
    TensorType.FLOAT16: "<f2",
    TensorType.INT32: "<i4",
    TensorType.UINT8: "u1",
    TensorType.INT8: "i1",
    TensorType.BOOL: "u1",
    TensorType.INT64: "<i8",
    TensorType.INT16: "<i2",
}
_QUANTIZED = frozenset({OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED})


class Inexpressible(Exception):
    """An operator has no form in the HAL; the message has the reason."""


class Consequence(Inexpressible):
    """An operator takes what an inexpressible one should have given; it is not at fault itself."""


def is_known(dimensions: Shape) -> bool:
    """Whether the rank and every extent are known."""
    return len(dimensions) > 0 and all(extent > 0 for extent in dimensions)


def stored_shape(dimensions: Shape) -> Shape:
    """The shape that an operand has for a tensor's: no rank 0, and no more than four axes, the leading ones merged."""
    if len(dimensions) <= OPERAND_RANK_MAX:
        return dimensions or (1,)
    kept = OPERAND_RANK_MAX - 1
    return (math.prod(dimensions[:-kept]), *dimensions[-kept:])


class SubgraphWriter:
    """Writes one subgraph.

    Attributes:
        model: The part that the subgraphs share.
        tensors: The file's tensors.
        operands: The operands so far.
        operations: The operations so far.
        sources: For each operation, the operator that it comes from: ``operator 4 CONV_2D``.
        source: The operator that is being written.
        references: The HAL's indexes of the subgraphs that control flow here refers to.
    """

    def __init__(self, model: ModelWriter, subgraph_index: int, *, is_main: bool = False) -> None:
        self.model = model
        self.index = subgraph_index
        source = model.file.subgraphs[subgraph_index]
        self.tensors = list(source.tensors)
        self.operands: list[Operand] = []
        self.operations: list[Operation] = []
        self.sources: list[str] = []
        self.source = ""
        self.references: set[int] = set()
        self._by_tensor: dict[int, int] = {}
        self._folded: dict[int, Array] = {}
        self._missing: set[int] = set()
        self._constants: dict[Operand, int] = {}
        self.input_indexes = tuple(self._declare_input(i, is_main) for i in source.inputs)

    def _declare_input(self, tensor_index: int, is_main: bool) -> int:
        tensor = self.tensors[tensor_index]
        if tensor.type == TensorType.INT64:
            tensor = msgspec.structs.replace(tensor, type=TensorType.INT32)
        # The main subgraph's inputs have the shape that the file calls its default.
        described = self.describe(
            msgspec.structs.replace(tensor, dimensions=tensor.shape) if is_main else tensor
        )
        index = self.add(msgspec.structs.replace(described, lifetime=OperandLifeTime.SUBGRAPH_INPUT))
        self._by_tensor[tensor_index] = index
        return index

    # Operands

    def add(self, operand: Operand) -> int:
        """Adds an operand and gives its index."""
        if operand_size_bytes(operand.type, operand.dimensions) > OPERAND_BYTES_MAX:
            raise Inexpressible(f"a tensor of shape {list(operand.dimensions)}, larger than 4 GiB")
        self.operands.append(operand)
        return len(self.operands) - 1

    def describe(self, tensor: Tensor) -> Operand:
        """Type, shape and quantisation of a tensor as an operand.

        Raises:
            Inexpressible: The HAL has no such type.
        """
        if tensor.type == TensorType.INT16 and len(tensor.scales) == 1 and tensor.zero_points == (0,):
            # 16-bit activations: the HAL's layers take none. Reals carry at least as much information.
            tensor = msgspec.structs.replace(tensor, type=TensorType.FLOAT32)
        if tensor.type not in _OPERAND_TYPES:
            raise Inexpressible(f"the HAL has no tensors of type {tensor.type.name}")
        if tensor.is_variable:
            raise Inexpressible(
                "a variable tensor keeps its value between executions; the HAL has no such state"
            )
        kind = _OPERAND_TYPES[tensor.type]
        dimensions = stored_shape(tensor.dimensions)
        if kind not in _QUANTIZED:
            return Operand(kind, dimensions)
        if len(tensor.scales) > 1:
            if dimensions != tensor.dimensions:
                raise Inexpressible("scales per channel of a tensor with more than four axes")
            if kind != OperandType.TENSOR_QUANT8_ASYMM_SIGNED or any(tensor.zero_points):
                raise Inexpressible("scales per channel need INT8 and zero points of 0")
            if not all(scale > 0 for scale in tensor.scales):
                raise Inexpressible("a scale of 0")
            return Operand(
                OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL,
                dimensions,
                channel_quant=ChannelQuant(tensor.scales, tensor.quantized_dimension),
            )
        # Integers without quantisation are plain numbers.
        scale = tensor.scales[0] if tensor.scales else 1.0
        if not scale > 0:
            raise Inexpressible("a scale of 0")
        return Operand(kind, dimensions, scale, tensor.zero_points[0] if tensor.zero_points else 0)

    def constant(
        self,
        kind: OperandType,
        value: npt.ArrayLike,
        *,
        dimensions: Shape | None = None,
        scale: float = 0.0,
        zero_point: int = 0,
    ) -> int:
        """A constant operand, of the value's shape unless another is given (``()`` for a scalar)."""
        array = np.ascontiguousarray(value, dtype=operand_dtype(kind))
        lifetime, location = self.model.place_bytes(array.tobytes())
        shape = array.shape if dimensions is None else dimensions
        return self._constant(Operand(kind, shape, scale, zero_point, lifetime=lifetime, location=location))

    def _constant(self, operand: Operand) -> int:
        index = self._constants.get(operand)
        if index is None:
            index = self._constants[operand] = self.add(operand)
        return index

    def int32(self, value: int) -> int:
        """A constant INT32 scalar."""
        if not -(2**31) <= value < 2**31:
            raise Inexpressible(f"the number {value} does not fit 32 bits")
        return self.constant(OperandType.INT32, value, dimensions=())

    def boolean(self, value: bool) -> int:
        """A constant BOOL scalar."""
        return self.constant(OperandType.BOOL, value, dimensions=())

    def real(self, value: float, like: int) -> int:
        """A constant FLOAT16 scalar where operand ``like`` is float16, else FLOAT32."""
        half = self.operands[like].type == OperandType.TENSOR_FLOAT16
        return self.constant(OperandType.FLOAT16 if half else OperandType.FLOAT32, value, dimensions=())

    def int32s(self, values: Sequence[int] | Array) -> int:
        """A constant TENSOR_INT32."""
        array = np.asarray(values, dtype=np.int64)
        if array.size == 0:
            raise Inexpressible("an empty list of numbers")
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise Inexpressible("a number that does not fit 32 bits")
        return self.constant(OperandType.TENSOR_INT32, array)

    def zeros(self, kind: OperandType, dimensions: Shape, *, scale: float = 0.0, zero_point: int = 0) -> int:
        """A constant whose stored value is the zero point everywhere."""
        return self.full(kind, dimensions, zero_point, scale=scale, zero_point=zero_point)

    def full(
        self, kind: OperandType, dimensions: Shape, value: float, *, scale: float = 0.0, zero_point: int = 0
    ) -> int:
        """A constant with the same stored value everywhere."""
        if not is_known(dimensions):
            raise Inexpressible(f"shape {list(dimensions)} must be known")
        dtype = operand_dtype(kind)
        count = 1
        for extent in dimensions:
            count *= extent
        self.model.check_budget(count * dtype.itemsize)
        return self.constant(
            kind, np.full(dimensions, value, dtype=dtype), scale=scale, zero_point=zero_point
        )

    def temporary(self, kind: int, dimensions: Shape, *, scale: float = 0.0, zero_point: int = 0) -> int:
        """A value between two operations of one operator."""
        return self.add(Operand(kind, dimensions, scale, zero_point))

    def like(self, operand_index: int, dimensions: Shape | None = None) -> int:
        """A temporary of the same type and quantisation, and of the same shape unless another is given."""
        operand = self.operands[operand_index]
        return self.temporary(
            operand.type,
            operand.dimensions if dimensions is None else dimensions,
            scale=operand.scale,
            zero_point=operand.zero_point,
        )

    def omitted(self, kind: OperandType) -> int:
        """An optional input that is left out."""
        return self.add(Operand(kind, lifetime=OperandLifeTime.NO_VALUE))

    def subgraph(self, subgraph_index: int, output_count: int) -> int:
        """The operand that stands for a subgraph of the file with its first outputs. The index must have been checked."""
        assert 0 < subgraph_index < len(self.model.file.subgraphs), "the caller looked"
        index = self.model.reference(subgraph_index, output_count)
        self.references.add(index)
        return self.add(
            Operand(
                OperandType.SUBGRAPH,
                lifetime=OperandLifeTime.SUBGRAPH,
                location=DataLocation(0, index, 0),
            )
        )

    # Tensors of an operator

    def has(self, operator: TfliteOperator, position: int) -> bool:
        """Whether the operator has this input."""
        return position < len(operator.inputs) and operator.inputs[position] >= 0

    def input_tensor(self, operator: TfliteOperator, position: int) -> Tensor:
        """The tensor of an input that must be there."""
        return self.tensors[self._input_index(operator, position)]

    def _input_index(self, operator: TfliteOperator, position: int) -> int:
        if not self.has(operator, position):
            self.refuse(operator, f"input {position}", "a tensor", "none")
        return operator.inputs[position]

    def output_tensor(self, operator: TfliteOperator, position: int = 0) -> Tensor:
        """The tensor of an output that must be there."""
        if position >= len(operator.outputs):
            self.refuse(operator, f"output {position}", "a tensor", "none")
        return self.tensors[operator.outputs[position]]

    def refuse(self, operator: TfliteOperator, what: str, expected: object, got: object) -> NoReturn:
        """Refuses the file for an operator."""
        raise InvalidModel(
            f"tflite, {operator.where} ({self.source.split(maxsplit=2)[-1]}), {what}: expected {expected}, got {got}"
        )

    def input(self, operator: TfliteOperator, position: int) -> int:
        """The operand of an input that must be there."""
        return self.operand_of(self._input_index(operator, position), operator)

    def inputs(self, operator: TfliteOperator) -> list[int]:
        """The operands of all inputs, none of which may be left out."""
        return [self.input(operator, position) for position in range(len(operator.inputs))]

    def operand_of(self, tensor_index: int, operator: TfliteOperator | None = None) -> int:
        """The operand of a tensor that is an input, a constant, or already written."""
        index = self._by_tensor.get(tensor_index)
        if index is not None:
            return index
        if tensor_index in self._missing:
            raise Consequence("an operator before it cannot be expressed")
        tensor = self.tensors[tensor_index]
        value = self._folded.get(tensor_index)
        if value is not None:
            index = self._integer_constant(value)
        elif tensor.is_constant or tensor.is_variable:
            # A variable tensor is refused there; operators that know their states do not ask for it here.
            index = self._constant_of(tensor)
        else:
            where = operator.where if operator is not None else f"subgraph {self.index}"
            raise InvalidModel(
                f"tflite, {where}: expected tensor {tensor_index} ({tensor.name!r}) to be an input, a constant or "
                "written by an earlier operator, got none of these"
            )
        self._by_tensor[tensor_index] = index
        return index

    def _constant_of(self, tensor: Tensor) -> int:
        if tensor.is_sparse:
            raise Inexpressible("a sparse constant")
        if tensor.type == TensorType.INT64:
            return self._integer_constant(self._array_of(tensor))
        described = self.describe(msgspec.structs.replace(tensor, dimensions=tensor.shape))
        if tensor.type == TensorType.INT16:
            self.model.check_budget(4 * math.prod(tensor.shape))
            with np.errstate(over="ignore"):
                reals = self._array_of(tensor).astype(np.float32) * np.float32(tensor.scales[0])
            return self.constant(OperandType.TENSOR_FLOAT32, reals, dimensions=described.dimensions)
        if tensor.type == TensorType.BOOL:
            # Anything but 0 means true in the file, while numpy takes the byte as it is.
            truth = self._array_of(tensor) != 0
            return self.constant(OperandType.TENSOR_BOOL8, truth, dimensions=described.dimensions)
        return self.constant_view(tensor, described)

    def constant_view(self, tensor: Tensor, described: Operand) -> int:
        """A constant tensor's bytes under another description of the same size."""
        if not tensor.is_constant or tensor.is_sparse:
            raise Inexpressible(f"tensor {tensor.name!r} must be a dense constant")
        lifetime, location = self.model.place_range(tensor.data_offset, tensor.data_bytes)
        return self._constant(msgspec.structs.replace(described, lifetime=lifetime, location=location))

    def _integer_constant(self, value: Array) -> int:
        if value.size == 0:
            raise Inexpressible("an empty constant")
        return self.int32s(value.reshape(stored_shape(value.shape)))

    def _array_of(self, tensor: Tensor) -> Array:
        if tensor.is_sparse or tensor.type not in _NUMPY_TYPES:
            raise Inexpressible(f"a constant of type {tensor.type.name}")
        end = tensor.data_offset + tensor.data_bytes
        raw = memoryview(self.model.file.data)[tensor.data_offset : end]
        return np.frombuffer(raw, dtype=_NUMPY_TYPES[tensor.type]).reshape(tensor.shape)

    def value_of(self, operator: TfliteOperator, position: int) -> Array | None:
        """The value of an input where the file fixes it, of the file's type and shape; else None."""
        index = self._input_index(operator, position)
        if index in self._folded:
            return self._folded[index]
        tensor = self.tensors[index]
        if index in self._by_tensor and not self.operands[self._by_tensor[index]].is_constant:
            return None
        if tensor.is_constant:
            return self._array_of(tensor)
        is_empty = 0 in tensor.shape and index not in self._by_tensor and tensor.type in _NUMPY_TYPES
        return np.zeros(tensor.shape, dtype=_NUMPY_TYPES[tensor.type]) if is_empty else None

    def integers_of(self, operator: TfliteOperator, position: int, what: str) -> list[int]:
        """The numbers of an input that must be a constant of whole numbers, in row-major order."""
        value = self.value_of(operator, position)
        if value is None:
            raise Inexpressible(f"input {position} ({what}) must be a constant")
        if value.dtype.kind not in "iu":
            self.refuse(operator, f"input {position} ({what})", "whole numbers", value.dtype)
        return [int(v) for v in value.reshape(-1)]

    def integer_of(self, operator: TfliteOperator, position: int, what: str) -> int:
        """As ``integers_of``, for exactly one number."""
        values = self.integers_of(operator, position, what)
        if len(values) != 1:
            self.refuse(operator, f"input {position} ({what})", "one number", f"{len(values)}")
        return values[0]

    def output(self, operator: TfliteOperator, position: int = 0) -> int:
        """A new operand for an output."""
        return self.bind(operator, position, self.add(self.describe_output(operator, position)))

    def describe_output(self, operator: TfliteOperator, position: int = 0) -> Operand:
        """As ``describe``, for an output; INT64 becomes INT32 where the operator's results are sure to fit."""
        tensor = self.output_tensor(operator, position)
        if tensor.type == TensorType.INT64 and operator.code in NARROWED_CODES:
            tensor = msgspec.structs.replace(tensor, type=TensorType.INT32)
        return self.describe(tensor)

    def bind(self, operator: TfliteOperator, position: int, operand_index: int) -> int:
        """Declares that an output is the value of this operand."""
        self.output_tensor(operator, position)
        tensor_index = operator.outputs[position]
        if tensor_index in self._by_tensor or tensor_index in self._folded:
            self.refuse(
                operator, f"output {position}", "a tensor that is written once", f"tensor {tensor_index}"
            )
        self._by_tensor[tensor_index] = operand_index
        return operand_index

    def fold(self, operator: TfliteOperator, position: int, value: Array) -> None:
        """Declares that an output is a constant of whole numbers that the importer has computed."""
        self.output_tensor(operator, position)
        tensor_index = operator.outputs[position]
        if tensor_index in self._by_tensor or tensor_index in self._folded:
            self.refuse(
                operator, f"output {position}", "a tensor that is written once", f"tensor {tensor_index}"
            )
        self.model.check_budget(value.nbytes)
        self._folded[tensor_index] = value

    def bind_anything(self, operator: TfliteOperator) -> None:
        """After a failure: gives the operator's outputs an operand each, so that later operators are looked at as well."""
        for tensor_index in operator.outputs:
            if tensor_index in self._by_tensor or tensor_index in self._folded:
                continue
            try:
                self._by_tensor[tensor_index] = self.add(self.describe(self.tensors[tensor_index]))
            except Inexpressible:
                self._missing.add(tensor_index)

    def is_written(self, tensor_index: int) -> bool:
        """Whether a tensor has a value."""
        return (
            self.tensors[tensor_index].is_variable
            or tensor_index in self._by_tensor
            or tensor_index in self._folded
            or tensor_index in self._missing
            or self.tensors[tensor_index].is_constant
            or 0 in self.tensors[tensor_index].shape  # A constant without elements has no bytes.
        )

    def dimensions(self, operand_index: int) -> Shape:
        """An operand's shape."""
        return self.operands[operand_index].dimensions

    def type_of(self, operand_index: int) -> int:
        """An operand's type."""
        return self.operands[operand_index].type

    def is_quantized(self, operand_index: int) -> bool:
        """Whether an operand is TENSOR_QUANT8_ASYMM or its signed form."""
        return self.operands[operand_index].type in _QUANTIZED

    # Operations

    def emit(self, kind: OperationType, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Writes an operation.

        Raises:
            Inexpressible: The operation's contract forbids these operands.
        """
        self.model.charge_operation()
        operation = Operation(kind, tuple(inputs), tuple(outputs))
        contract = CONTRACTS[kind]
        check = Check(
            kind,
            [self.operands[i] for i in inputs],
            [self.operands[i] for i in outputs],
            where="",
            constant=lambda operand: self.model.value(operand) if operand.is_constant else None,
        )
        try:
            contract.validate(check)
        except InvalidModel as e:
            raise Inexpressible(str(e).lstrip()) from e
        self.operations.append(operation)
        self.sources.append(self.source)
        if not all(is_known(self.operands[i].dimensions) for i in outputs):
            self._infer(kind, inputs, outputs)

    def _infer(self, kind: OperationType, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Fills in unknown extents of outputs that the inputs' shapes and the constants determine."""
        shapes = CONTRACTS[kind].shapes
        values = [self.operands[i] for i in inputs]
        if shapes is None:
            return
        for operand in values:
            # A number that is only known at run time may decide about the shape.
            if not operand.is_constant and (
                operand.type == OperandType.TENSOR_INT32 or not is_known(operand.dimensions)
            ):
                return
        try:
            call = Call(
                [self._value_or_zeros(o) for o in values],
                [self.operands[i] for i in outputs],
            )
            found = shapes(call)
        except (Error, ValueError, ArithmeticError):
            # Shapes that do not fit together, or that numpy cannot hold: execution will raise the error.
            return
        for index, shape in zip(outputs, found, strict=True):
            known = self.operands[index].dimensions
            fits = len(known) == len(shape) and all(k in (0, s) for k, s in zip(known, shape, strict=True))
            if fits and is_known(tuple(shape)):
                self.operands[index] = msgspec.structs.replace(self.operands[index], dimensions=tuple(shape))

    def _value_or_zeros(self, operand: Operand) -> Value:
        """A constant's value, or zeros of the operand's shape that take no memory."""
        if operand.is_constant:
            return Value(operand, self.model.value(operand), is_constant=True)
        return stand_in(operand, operand.dimensions)

    def emit_to(
        self, operator: TfliteOperator, kind: OperationType, inputs: Sequence[int], position: int = 0
    ) -> int:
        """Writes an operation whose only result is an output of the operator."""
        output = self.output(operator, position)
        self.emit(kind, inputs, [output])
        return output

    def reshape(self, source: int, target: int, dimensions: Sequence[int] | None = None) -> None:
        """Writes a RESHAPE to an operand; its shape, or the given one with at most one -1, must be known."""
        shape = self._reshape_target(source, target) if dimensions is None else tuple(dimensions)
        self.emit(OperationType.RESHAPE, [source, self.int32s(shape)], [target])

    def _reshape_target(self, source: int, target: int) -> Shape:
        shape = self.dimensions(target)
        unknown = [axis for axis, extent in enumerate(shape) if extent == 0]
        if not shape or len(unknown) > 1:
            raise Inexpressible(f"the output's shape {list(shape)} must be known but for one extent")
        return tuple(-1 if extent == 0 else extent for extent in shape)

    def reshaped(self, source: int, dimensions: Sequence[int]) -> int:
        """A temporary with the value in another shape; one extent may be -1."""
        known = tuple(0 if extent == -1 else extent for extent in dimensions)
        if known == self.dimensions(source):
            return source
        operand = self.operands[source]
        if operand.is_constant and is_known(known) and operand.channel_quant is None:
            return self._constant(msgspec.structs.replace(operand, dimensions=known))
        target = self.like(source, known)
        self.reshape(source, target, dimensions)
        return target

    def stand_in(self, tensor: Tensor, *, operand: int | None = None, value: Array | None = None) -> int:
        """Adds a tensor that the file does not have; ``operand``, or whole numbers, are its value where it has one already."""
        index = len(self.tensors)
        self.tensors.append(tensor)
        if operand is not None:
            self._by_tensor[index] = operand
        elif value is not None:
            self.model.check_budget(value.nbytes)
            self._folded[index] = value
        return index

    def finish(self, output_count: int) -> Subgraph:
        """The subgraph, with its first ``output_count`` outputs."""
        self.source = "output"
        output_indexes: list[int] = []
        for tensor_index in self.model.file.subgraphs[self.index].outputs[:output_count]:
            index = self.operand_of(tensor_index)
            if self.operands[index].lifetime != OperandLifeTime.TEMPORARY_VARIABLE:
                # An input, a constant, or an output already: outputs must be written by an operation. CAST to the same type copies.
                copy = self.like(index)
                self.emit(OperationType.CAST, [index], [copy])
                index = copy
            self.operands[index] = msgspec.structs.replace(
                self.operands[index], lifetime=OperandLifeTime.SUBGRAPH_OUTPUT
            )
            output_indexes.append(index)
        whole = Subgraph(
            operands=tuple(self.operands),
            operations=tuple(self.operations),
            input_indexes=self.input_indexes,
            output_indexes=tuple(output_indexes),
        )
        return without_dead(whole)


Convert = Callable[[SubgraphWriter, TfliteOperator], None]

"""Writes HAL operations for the operators of an ONNX graph.

Owns constants, the order of axes in memory, the check of every operation against its contract, output shapes, and the computation
of operations whose inputs are all constant. The modules of ``conversions`` define the operations of each operator.

ONNX keeps images as [batch, channels, height, width], but drivers are built for channels last. So a ``Tensor`` has forms with its
axes in different orders; a conversion takes the form that its operation needs, and a TRANSPOSE is written only if no operation
made that form. A Transpose of the file only changes the order of a form; it writes no operation until another form is needed.

Invariants:
1. A written operation keeps its contract; if it would not, the operator is ``Inexpressible``.
2. Unused values and operations are not part of the model.
3. Constants that are made here are charged to a budget before they take memory.

Source: "Operand" and "Model" of the NN HAL; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from aionn.errors import Error, InvalidModel
from aionn.hal import Model, Operand, OperandType, OperationType, operand_dtype
from aionn.models.builder import ExtensionCode, GraphBuilder, Value
from aionn.models.onnx.extension import EXTENSION_NAME, ElementType, number_of
from aionn.models.onnx.extension.narrow import KINDS, ROUNDING_BYTES, rounded
from aionn.models.onnx.tensors import (
    ELEMENT_TYPES,
    EXTENSION_STORED,
    OPERAND_TYPES,
    RANK_MAX,
    Array,
    Inexpressible,
    OpenTensor,
    Order,
    Shape,
    Tensor,
    distinct,
    fits_int32,
    is_finite_in,
    ordered,
    stored_shape,
)
from aionn.ops import CONTRACTS, Call
from aionn.ops.remembered import Parts, arguments_of, checked_shapes

__all__ = ["GraphWriter", "Input"]

CONSTANT_BYTES_MAX = 640 << 20
"""Largest sum of the constants that the import makes, besides views of the file. The largest classifiers whose weights a file of
some kilobytes defines by ConstantOfShape have 574 MB of them."""

OPERATIONS_MAX = 200_000
"""Operations of one model. Large language models have some thousand nodes, of about ten operations each."""

OPERAND_BYTES_MAX = 2**32 - 1
"""Sizes are unsigned 32-bit numbers on the HAL's wire."""

Input = Value | bool | int | float
"""An argument of an operation: a number means a constant scalar."""


class _Step(NamedTuple):
    kind: OperationType | ExtensionCode
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    source: str
    name: str
    is_checked: bool = False


class _Room(msgspec.Struct, eq=False):
    """The size that a model and the graphs nested in it may still grow by."""

    constant_bytes: int
    operations: int


class GraphWriter:
    """Builds a model.

    Attributes:
        source: The operator that is being written; it is part of the operations' names.
    """

    def __init__(self) -> None:
        self.source = ""
        self._builder = GraphBuilder()
        self._arrays: dict[Value, Array] = {}
        self._parts: Parts = {}
        self._described: list[Value] = []  # They live as long as ``_parts``.
        self._steps: list[_Step] = []
        self._numbers: dict[tuple[type, int], Value] = {}
        self._unshaped: dict[Value, Value] = {}  # The input of a RESHAPE by its result.
        self._inputs: set[Value] = set()
        self._room = _Room(CONSTANT_BYTES_MAX, OPERATIONS_MAX)

    def charge(self, size_bytes: int) -> None:
        """Takes the bytes of a constant from the budget. Call it before the constant takes memory.

        Raises:
            InvalidModel: The constants that follow from the file exceed the budget.
        """
        if size_bytes > self._room.constant_bytes:
            raise InvalidModel(
                f"onnx, {self.source}: expected at most {CONSTANT_BYTES_MAX} bytes of constants that the import computes, got more"
            )
        self._room.constant_bytes -= size_bytes

    def counted(self, count: int) -> Array:
        """The whole numbers from 0 to ``count`` - 1, charged."""
        self.charge(8 * count)
        return np.arange(count)

    # Tensors

    def input(self, dtype: str, shape: Shape, types: Mapping[str, OperandType] = OPERAND_TYPES) -> Tensor:
        """Adds the next input of the model, with its axes in ONNX's order; its type is one of ``types``."""
        operand = self._operand(dtype, stored_shape(shape), types)
        value = self._builder.input(operand.type, operand.dimensions, scale=operand.scale)
        self._inputs.add(value)
        return self.tensor(value, dtype, shape)

    def constant(self, array: Array, dtype: str | None = None) -> Tensor:
        """A constant; the model contains only the forms of it that are used.

        Args:
            array: Its elements.
            dtype: Its element type where numpy lacks that; None means the array's.
        """
        return Tensor(dtype or array.dtype.name, array.shape, array=array)

    def rounded(self, array: Array, dtype: str) -> Array:
        """The elements rounded to a type, in numpy's type or that which carries the values."""
        if dtype not in KINDS:
            return array.astype(dtype, copy=False)
        self.charge(ROUNDING_BYTES * array.size)
        with np.errstate(all="ignore"):
            return rounded(array, KINDS[dtype])

    def tensor(
        self,
        value: Value,
        dtype: str,
        shape: Shape,
        *,
        order: Order | None = None,
        limits: tuple[int, int] | None = None,
    ) -> Tensor:
        """The tensor of a written value; a constant if the operation's inputs are all constant."""
        result = Tensor(dtype, shape, order=order, limits=limits)
        assert value.operand.dimensions == stored_shape(ordered(shape, result.order)), (
            "a form has its tensor's shape"
        )
        array = self._arrays.get(value)
        if array is not None:
            back = tuple(int(axis) for axis in np.argsort(result.order))
            plain = self.rounded(array.reshape(ordered(shape, result.order)).transpose(back), dtype)
            result = Tensor(dtype, shape, array=plain, order=order)
            if value.operand.scale not in (0.0, 1.0) or value.operand.zero_point:
                # The form is not kept, since forms of constants are made from unquantised numbers.
                return result
        result.forms[result.order] = value
        return result

    def form(self, tensor: Tensor, order: Order | None = None) -> Value:
        """The HAL value of a tensor with its axes in an order; None means ONNX's.

        Raises:
            Inexpressible: The HAL has no such type, or a constant has numbers that do not fit.
        """
        wanted = tuple(range(tensor.rank)) if order is None else order
        if wanted not in tensor.forms:
            tensor.forms[wanted] = self._form(tensor, wanted)
        return tensor.forms[wanted]

    def _form(self, tensor: Tensor, wanted: Order) -> Value:
        if tensor.array is not None:
            return self.constant_value(tensor.array.transpose(wanted), tensor.dtype)
        present = tensor.forms[tensor.order]
        permutation = tuple(tensor.order.index(axis) for axis in wanted)
        return self.transposed(present, ordered(tensor.shape, tensor.order), permutation)

    def _operand(
        self, dtype: str, dimensions: Shape, types: Mapping[str, OperandType] = OPERAND_TYPES
    ) -> Operand:
        kind = types.get(dtype)
        if kind is None:
            raise Inexpressible(f"values of type {dtype}")
        if 0 in dimensions:
            raise Inexpressible("a value without elements")
        return Operand(kind, dimensions, scale=1.0 if dtype in ("uint8", "int8") else 0.0)

    def constant_value(self, array: Array, dtype: str | None = None) -> Value:
        """A HAL constant with the elements of an array, in its stored shape."""
        operand = self._operand(dtype or array.dtype.name, stored_shape(array.shape))
        target = operand_dtype(operand.type)
        if target == np.int32 and array.dtype != np.int32 and not fits_int32(distinct(array)):
            raise Inexpressible("a constant whose whole numbers do not fit 32 bits")
        if array.dtype == np.float64 and target != np.float64 and not is_finite_in(distinct(array), target):
            raise Inexpressible(f"a constant of type DOUBLE whose numbers do not fit {target.name}")
        if not array.flags.c_contiguous or array.dtype != target:
            self.charge(array.size * target.itemsize)
        stored = np.ascontiguousarray(array, target).reshape(operand.dimensions)
        value = self._builder.constant(stored, operand.type, scale=operand.scale)
        self._arrays[value] = stored
        return value

    def int32s(self, numbers: Sequence[int]) -> Value:
        """A constant TENSOR_INT32 of rank 1."""
        return self.constant_value(np.array(numbers, np.int32))

    def like(self, number: float, value: Value, dimensions: Shape = (1,)) -> Value:
        """A constant of a value's element type with the same number in all elements."""
        dtype = operand_dtype(value.operand.type)
        self.charge(math.prod(dimensions) * dtype.itemsize)
        array = np.full(dimensions, number, dtype)
        constant = self._builder.constant(array, value.operand.type, scale=value.operand.scale)
        self._arrays[constant] = array
        return constant

    def scalar(self, number: float, value: Value) -> Value:
        """A scalar argument of the float type that an operation on this tensor requires."""
        is_half = value.operand.type == OperandType.TENSOR_FLOAT16
        kind = OperandType.FLOAT16 if is_half else OperandType.FLOAT32
        return self._scalar(
            self._builder.constant(float(number), kind), np.array(number, operand_dtype(kind))
        )

    def _scalar(self, value: Value, array: Array) -> Value:
        self._arrays[value] = array
        return value

    def omitted(self, like: Value) -> Value:
        """An omitted optional input of a value's type."""
        return self._builder.omitted(like.operand.type)

    def _argument(self, given: Input) -> Value:
        if isinstance(given, Value):
            return given
        # A float is left out: 0.0 and -0.0 are equal.
        key = (type(given), given) if isinstance(given, int) else None
        known = None if key is None else self._numbers.get(key)
        if known is not None:
            return known
        value = self._builder.constant(given)
        self._scalar(value, np.array(given, operand_dtype(value.operand.type)))
        if key is not None:
            self._numbers[key] = value
        return value

    # Operations

    def emit(self, kind: OperationType, inputs: Sequence[Input], like: Operand | None = None) -> Value:
        """Writes an operation with one output.

        Args:
            kind: Its operator.
            inputs: Values; a Python number means a scalar.
            like: Type and quantisation of the output; None means those of the first input.

        Raises:
            Inexpressible: The contract forbids it.
        """
        return self.emit_all(kind, inputs, [like])[0]

    def emit_all(
        self, kind: OperationType, inputs: Sequence[Input], likes: Sequence[Operand | None]
    ) -> list[Value]:
        """The same as ``emit``, for an operation with several outputs."""
        values = tuple(map(self._argument, inputs))
        first = values[0].operand
        sources = [first if like is None else like for like in likes]
        templates = [Operand(one.type, (), one.scale, one.zero_point) for one in sources]
        shapes = self._check(kind, values, templates)
        whole = [Operand(t.type, s, t.scale, t.zero_point) for t, s in zip(templates, shapes, strict=True)]
        if all(map(self._arrays.__contains__, values)):
            return self._computed(kind, values, whole)
        self._check_room()
        outputs = tuple(
            self._builder.variable(o.type, o.dimensions, scale=o.scale, zero_point=o.zero_point)
            for o in whole
        )
        self._steps.append(_Step(kind, values, outputs, self.source, kind.name, is_checked=True))
        return list(outputs)

    def _check_room(self) -> None:
        if not self._room.operations:
            raise InvalidModel(f"onnx, {self.source}: expected at most {OPERATIONS_MAX} operations, got more")
        self._room.operations -= 1

    # Operations of the extension

    def emit_extension(
        self,
        op_type: str,
        inputs: Sequence[Value],
        record: bytes,
        outputs: Sequence[tuple[str, Shape | None]],
    ) -> list[Value]:
        """Writes an operation of the extension ``ai.onnx``.

        Args:
            op_type: The operator.
            inputs: Values with ONNX's order of axes.
            record: The record, the operation's last input.
            outputs: Element type and shape of each output: -1 for an unknown extent, None for an unknown rank.

        Raises:
            Inexpressible: A driver cannot store a value of the type.
        """
        self._check_room()
        variables = []
        for dtype, shape in outputs:
            if shape is None:
                dimensions: Shape = ()
            elif all(extent > 0 for extent in shape):
                dimensions = stored_shape(shape)
            else:
                dimensions = tuple(max(extent, 0) for extent in shape)
            kind = EXTENSION_STORED.get(dtype)
            if kind is None:
                raise Inexpressible(f"values of type {dtype}")
            if math.prod(dimensions) * operand_dtype(kind).itemsize > OPERAND_BYTES_MAX:
                raise Inexpressible(f"a value of more than {OPERAND_BYTES_MAX} bytes")
            variables.append(
                self._builder.variable(kind, dimensions, scale=1.0 if dtype in ("uint8", "int8") else 0.0)
            )
        kinds = ExtensionCode(EXTENSION_NAME, ElementType.ATTRIBUTES)
        data = self._builder.constant(record, kinds, dimensions=(len(record),))
        code = ExtensionCode(EXTENSION_NAME, number_of(op_type))
        step = _Step(code, (*inputs, data), tuple(variables), self.source, f"{EXTENSION_NAME}.{op_type}")
        self._steps.append(step)
        return variables

    def extension_value(self, tensor: Tensor | OpenTensor | None) -> Value:
        """The HAL value of an input of an extension operation; None and constants without elements become omitted ones."""
        if isinstance(tensor, OpenTensor):
            return tensor.value
        if tensor is None or (tensor.array is not None and not tensor.size):
            return self._builder.omitted(OperandType.TENSOR_FLOAT32)
        if tensor.array is None or (
            tensor.dtype in OPERAND_TYPES and tensor.dtype not in ("int64", "float64")
        ):
            return self.form(tensor)
        self.charge(tensor.array.nbytes)
        code = ExtensionCode(EXTENSION_NAME, ELEMENT_TYPES[tensor.dtype])
        return self._builder.constant(
            np.ascontiguousarray(tensor.array), code, dimensions=stored_shape(tensor.shape)
        )

    def _check(
        self, kind: OperationType, values: Sequence[Value], outputs: Sequence[Operand]
    ) -> tuple[Shape, ...]:
        """Checks the operation against its contract, and returns the outputs' shapes."""
        arrays = self._arrays
        by_operand = {id(value.operand): arrays.get(value) for value in values}
        operands = [value.operand for value in values]
        self._described += values
        try:
            shapes = checked_shapes(
                CONTRACTS[kind], operands, outputs, lambda o: by_operand[id(o)], parts=self._parts
            )
        except Error as e:
            raise Inexpressible(str(e).lstrip()) from e
        for shape, operand in zip(shapes, outputs, strict=True):
            if 0 in shape:
                raise Inexpressible("a value without elements")
            if math.prod(shape) * operand_dtype(operand.type).itemsize > OPERAND_BYTES_MAX:
                raise Inexpressible(f"a value of more than {OPERAND_BYTES_MAX} bytes")
        return shapes

    def _computed(
        self, kind: OperationType, values: Sequence[Value], outputs: Sequence[Operand]
    ) -> list[Value]:
        self.charge(sum(math.prod(o.dimensions) * operand_dtype(o.type).itemsize for o in outputs))
        by_operand = {id(value.operand): self._arrays[value] for value in values}
        arguments = arguments_of([value.operand for value in values], lambda o: by_operand[id(o)])
        try:
            with np.errstate(all="ignore"):
                arrays = CONTRACTS[kind].execute(Call(arguments, outputs))
        except Error as e:
            raise Inexpressible(str(e).lstrip()) from e
        results = []
        for operand, array in zip(outputs, arrays, strict=True):
            value = self._builder.constant(
                np.ascontiguousarray(array), operand.type, scale=operand.scale, zero_point=operand.zero_point
            )
            self._arrays[value] = array.reshape(operand.dimensions)
            results.append(value)
        return results

    # Moving elements

    def reshaped(self, value: Value, dimensions: Shape) -> Value:
        """The elements in another shape of at most ``RANK_MAX`` axes, in the same order."""
        if value.operand.dimensions == dimensions:
            return value
        if value.operand.type == OperandType.TENSOR_BOOL8 and value not in self._arrays:
            return self.as_truth(self.reshaped(self.as_bytes(value), dimensions))
        array = self._arrays.get(value)
        if array is not None:
            constant = self._builder.constant(
                array.reshape(dimensions),
                value.operand.type,
                scale=value.operand.scale,
                zero_point=value.operand.zero_point,
            )
            self._arrays[constant] = array.reshape(dimensions)
            return constant
        # One RESHAPE replaces several in a row.
        source = self._unshaped.get(value, value)
        if source.operand.dimensions == dimensions:
            return source
        result = self.emit(OperationType.RESHAPE, [source, self.int32s(dimensions)])
        self._unshaped[result] = source
        return result

    def transposed(self, value: Value, shape: Shape, permutation: Order) -> Value:
        """The elements with the axes of ``shape`` permuted; ``shape`` and the result may have more axes than the value."""
        target = ordered(shape, permutation)
        # Axes that stay neighbours are merged into one, and axes of extent 1 are ignored, so that fewer axes need a TRANSPOSE.
        long_axes = [axis for axis in permutation if shape[axis] != 1]
        groups: list[list[int]] = []
        for axis in long_axes:
            previous = groups[-1][-1] if groups else None
            between = range(axis if previous is None else previous + 1, axis)
            if previous is not None and previous < axis and all(shape[other] == 1 for other in between):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        starts = sorted(group[0] for group in groups)
        if [group[0] for group in groups] != starts:
            if len(groups) > RANK_MAX or value.operand.type in (
                OperandType.TENSOR_INT32,
                OperandType.TENSOR_BOOL8,
            ):
                places = self.counted(math.prod(shape)).reshape(shape).transpose(permutation)
                return self.taken(value, places)
            if len(shape) <= RANK_MAX:
                return self.emit(OperationType.TRANSPOSE, [value, self.int32s(permutation)])
            by_start = {group[0]: math.prod(shape[axis] for axis in group) for group in groups}
            value = self.reshaped(value, tuple(by_start[start] for start in starts))
            moved = [starts.index(group[0]) for group in groups]
            value = self.emit(OperationType.TRANSPOSE, [value, self.int32s(moved)])
        return self.reshaped(value, stored_shape(target))

    def taken(self, value: Value, places: Array) -> Value:
        """The elements at indices of the flattened value, in the shape of ``places``: any movement of elements of any type."""
        if value.operand.type == OperandType.TENSOR_BOOL8 and value not in self._arrays:
            return self.as_truth(self.taken(self.as_bytes(value), places))
        if places.size == 0:
            raise Inexpressible("a value without elements")
        self.charge(4 * places.size)
        flat = self.reshaped(value, (math.prod(value.operand.dimensions),))
        indices = self.constant_value(places.astype(np.int32).reshape(stored_shape(places.shape)))
        return self.emit(OperationType.GATHER, [flat, 0, indices])

    def as_bytes(self, value: Value) -> Value:
        """Truth values as numbers 0 and 1 of 8 bits, a type that all operations that move elements accept."""
        byte = self._operand("uint8", (1,))
        dimensions = value.operand.dimensions
        return self.selected(value, byte, 1, 0, dimensions)

    def selected(self, condition: Value, like: Operand, yes: float, no: float, dimensions: Shape) -> Value:
        """One of two numbers for each truth value."""
        dtype = operand_dtype(like.type)
        self.charge(2 * math.prod(dimensions) * dtype.itemsize)
        sides = []
        for number in (yes, no):
            array = np.full(dimensions, number, dtype)
            side = self._builder.constant(array, like.type, scale=like.scale, zero_point=like.zero_point)
            self._arrays[side] = array
            sides.append(side)
        return self.emit(OperationType.SELECT, [condition, *sides], like)

    def as_truth(self, value: Value) -> Value:
        """Truth values of numbers: whether they differ from 0, as a NaN does."""
        return self.emit(OperationType.NOT_EQUAL, [value, self.like(0, value)], self.truth)

    @property
    def truth(self) -> Operand:
        """The description of an output of truth values."""
        return Operand(OperandType.TENSOR_BOOL8)

    def described(self, dtype: str) -> Operand:
        """The description of an output of an ONNX type.

        Raises:
            Inexpressible: The HAL has no such type.
        """
        return self._operand(dtype, (1,))

    @staticmethod
    def check_plain(value: Value) -> None:
        """Checks that a value's 8-bit numbers are not quantised, which an operation of several values needs.

        Raises:
            Inexpressible: They have a scale or zero point.
        """
        if value.operand.zero_point or value.operand.scale not in (0.0, 1.0):
            raise Inexpressible("quantised values as plain numbers")

    # Nested graphs

    def nested(self) -> GraphWriter:
        """The writer of a graph within this one, which takes from the same budgets."""
        inner = GraphWriter()
        inner._room, inner.source = self._room, self.source
        return inner

    def passed(
        self, tensor: Tensor, inner: GraphWriter, limits: tuple[int, int] | None = None
    ) -> tuple[Value, Tensor]:
        """A tensor as an input of a nested graph: the value to pass, and the tensor that the nested graph reads."""
        value = self.form(tensor, tensor.order)
        operand = value.operand
        entry = inner._builder.input(
            operand.type, operand.dimensions, scale=operand.scale, zero_point=operand.zero_point
        )
        inner._inputs.add(entry)
        return value, inner.tensor(entry, tensor.dtype, tensor.shape, order=tensor.order, limits=limits)

    def emit_nested(
        self, kind: OperationType, inputs: Sequence[Value | GraphBuilder], likes: Sequence[Operand]
    ) -> list[Value]:
        """Writes an IF or WHILE.

        Args:
            kind: Which one.
            inputs: Its inputs; nested graphs are finished.
            likes: Type, shape and quantisation of each output.
        """
        self._check_room()
        given = tuple(self._builder.graph(one) if isinstance(one, GraphBuilder) else one for one in inputs)
        outputs = tuple(
            self._builder.variable(o.type, o.dimensions, scale=o.scale, zero_point=o.zero_point)
            for o in likes
        )
        self._steps.append(_Step(kind, given, outputs, self.source, kind.name))
        return list(outputs)

    # The whole

    def end(self, given: Iterable[Value]) -> tuple[GraphBuilder, list[Value]]:
        """The finished graph with these outputs, and its outputs: copies of inputs, of constants, and of repeated values."""
        values: dict[Value, None] = {}
        for value in given:
            if value in self._inputs or value in self._arrays or value in values:
                value = self._copied(value)
            values[value] = None
        for step in self._live(values):
            self._builder.operation(step.kind, step.inputs, step.outputs, is_checked=step.is_checked)
        return self._builder.finish(list(values)), list(values)

    def _live(self, outputs: Iterable[Value]) -> list[_Step]:
        """The operations that the outputs need."""
        needed = set(outputs)
        live: list[_Step] = []
        for step in reversed(self._steps):
            if needed.intersection(step.outputs):
                live.append(step)
                needed.update(step.inputs)
        live.reverse()
        return live

    def finish(self, outputs: Sequence[Tensor | OpenTensor]) -> tuple[Model, tuple[str, ...]]:
        """Build the model, with its outputs in ONNX's order of axes, and a name for each operation that states its origin."""
        self.source = "output"
        values = [tensor.value if isinstance(tensor, OpenTensor) else self.form(tensor) for tensor in outputs]
        builder, values = self.end(values)
        return builder.build(), tuple(f"{step.name} of {step.source}" for step in self._live(values))

    def _copied(self, value: Value) -> Value:
        """A copy made by CAST to the same type, since an operation must write each output."""
        variable = self._builder.variable(
            value.operand.type,
            value.operand.dimensions,
            scale=value.operand.scale,
            zero_point=value.operand.zero_point,
        )
        self._steps.append(_Step(OperationType.CAST, (value,), (variable,), self.source, "CAST"))
        return variable

"""The state of lowering a model to an ONNX graph: which tensor an operand has become, and the steps that many operations share.

Owns operands as ONNX values, constants, orders of axes and quantisation. Float16 values are float32 here; the main subgraph's
inputs and outputs are float16, with a Cast beside them.

Invariants:
1. A value has one form per order of its axes, made when it is first asked for: a transposition that its reader undoes is never
   written.
2. A form that is not certain to be equal is ``Unsupported``.
3. The name of a node begins with ``#`` and the index of its operation, which errors of engines quote.

Source: operand types of the NN HAL; the operators of ONNX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.known import Known, Shape
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.extensions import extension_code
from aionn.drivers.kit.onnx.lowered import FULL, OPSET, Dialect
from aionn.drivers.kit.onnx.value import QUANTIZED, Order, Value, moved
from aionn.hal import (
    ChannelQuant,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    constant_bytes,
    is_extension_operand_type,
    is_scalar_type,
    operand_dtype,
)
from aionn.models.onnx.encoding import DATA_TYPES, node, tensor
from aionn.models.onnx.extension import DTYPES, EXTENSION_NAME, ElementType
from aionn.models.onnx.schema import NodeProto, TensorProto

__all__ = ["WIDE", "NCHW", "NHWC", "Graph", "Native"]

NCHW: Order = (0, 3, 1, 2)
"""The order in which a value with the axes batch, height, width, depth is an ONNX image."""

NHWC: Order = (0, 2, 3, 1)
"""The order in which an ONNX image has the axes batch, height, width, depth."""

_FLOATS = (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16)
_EXTENSION_DTYPES = {int(kind): DTYPES[kind].name for kind in ElementType if kind <= ElementType.FLOAT64}
WIDE = ("float64", "int64", "uint64", "uint32")
"""Element types that an engine without wide numbers cannot hold."""

_SIGNED_BYTES = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)

_TYPE_NAMES = {int(kind): name for name, kind in DATA_TYPES.items()}


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """numpy's name of an element type, which numpy puts together each time."""
    return dtype.name


class Native(NamedTuple):
    """A value of an operation of ``ai.onnx``, with ONNX's type and shape.

    Attributes:
        name: Its name.
        dtype: numpy's name of its element type.
        shape: Its extents, -1 where unknown; None means an unknown rank.
    """

    name: str
    dtype: str
    shape: Shape | None


class Graph:
    """A main subgraph that is being lowered.

    Args:
        model: The HAL's model.
        dialect: Of the engine.

    Attributes:
        model: See above.
        dialect: See above.
        known: The shapes and values that are known before execution.
        nodes: The nodes written so far.
        initializers: The constants, by name.
        types: The element types of constants, inputs and what nodes write, by name.
        operation_index: The operation that is being lowered.
        natives: By operand, the results of operations of ``ai.onnx``.
        opset: The version of the operators that the nodes need.
        checks: The names of numbers that are not 0 where an index was out of range.
    """

    def __init__(self, model: Model, dialect: Dialect = FULL) -> None:
        self.model = model
        self.dialect = dialect
        self.known = Known(model)
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.types: dict[str, str] = {}
        self.operation_index = 0
        self.natives: dict[int, Native] = {}
        self.opset = OPSET
        self.checks: list[str] = []
        self._values: dict[int, Value] = {}
        self._scalars: dict[int, Any] = {}
        self._small: dict[tuple[np.dtype[Any], Shape, bytes], str] = {}
        self._count = 0

    # Operands

    def operand(self, operation: Operation, position: int) -> Operand:
        """An input's operand."""
        return self.model.main.operands[operation.inputs[position]]

    def has(self, operation: Operation, position: int) -> bool:
        """Whether an optional input is there."""
        return (
            position < len(operation.inputs)
            and self.operand(operation, position).lifetime != OperandLifeTime.NO_VALUE
        )

    def input(self, operation: Operation, position: int) -> Value:
        """An input that must be there."""
        if not self.has(operation, position):
            raise Unsupported(f"input {position} is omitted")
        return self.value(operation.inputs[position])

    def output(self, operation: Operation, position: int = 0) -> Value:
        """An output."""
        return self.value(operation.outputs[position])

    def value(self, index: int) -> Value:
        """The value of an operand; created at its first use."""
        known = self._values.get(index)
        if known is None:
            known = self._values[index] = self._declared(index)
        return known

    def _declared(self, index: int) -> Value:
        operand = self.model.main.operands[index]
        if is_extension_operand_type(operand.type):
            return self._declared_extension(index, operand)
        dtype = "float32" if operand.type in _FLOATS else _name_of(operand_dtype(operand.type))
        if dtype not in DATA_TYPES or dtype in ("uint32", "int16", "uint16"):
            raise Unsupported("engines have too few kernels for this operand type")
        array = self.known.value(index)
        if array is not None:
            if array.dtype == np.float16:
                array = array.astype(np.float32)
            shape: Shape | None = () if is_scalar_type(operand.type) else array.shape
        else:
            shape = self.known.shapes[index]
        if shape is None or 0 in shape:
            raise Unsupported("a shape that is not known before execution")
        is_moved = operand.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED
        if is_moved and array is not None:
            array = moved(array)
        return Value(
            "uint8" if is_moved else dtype,
            shape,
            scale=operand.scale,
            zero_point=operand.zero_point + 128 * is_moved,
            channels=operand.channel_quant,
            constant=None if array is None else array.reshape(shape),
            is_moved=is_moved,
        )

    def _declared_extension(self, index: int, operand: Operand) -> Value:
        code = extension_code(self.model, operand.type)
        if code is None or code[0] != EXTENSION_NAME or code[1] not in _EXTENSION_DTYPES:
            raise Unsupported("engines have too few kernels for this operand type")
        dtype, shape = _EXTENSION_DTYPES[code[1]], self.known.shapes[index]
        if shape is None:
            raise Unsupported("a shape that is not known before execution")
        if not operand.is_constant and not self.dialect.has_wide_numbers and dtype in WIDE:
            raise Unsupported(f"{dtype} as an argument, which the engine computes in 32 bits")
        constant = None
        if operand.is_constant:
            constant = np.frombuffer(constant_bytes(self.model, operand), dtype).reshape(shape)
        return Value(dtype, shape, constant=constant)

    def scalar(self, operation: Operation, position: int) -> Any:
        """The number of a scalar input, which must be known."""
        index = operation.inputs[position]
        if index not in self._scalars:
            array = self.known.value(index)
            if array is None or array.size != 1:
                raise Unsupported(f"input {position}, a parameter, is not constant")
            self._scalars[index] = array.reshape(-1)[0].item()
        return self._scalars[index]

    def optional(self, operation: Operation, position: int, default: Any) -> Any:
        """The number of an optional scalar, or the default."""
        return self.scalar(operation, position) if self.has(operation, position) else default

    def integers(self, operation: Operation, position: int) -> list[int]:
        """The numbers of a tensor, which must be known."""
        array = self.known.value(operation.inputs[position])
        if array is None:
            raise Unsupported(f"input {position}, a list of numbers, is not constant")
        return [int(number) for number in array.reshape(-1)]

    # Nodes

    def emit(self, op_type: str, inputs: Sequence[str], *, domain: str = "", **attributes: Any) -> str:
        """Writes a node with one output, and returns its name."""
        return self.emit_all(op_type, inputs, 1, domain=domain, **attributes)[0]

    def emit_all(
        self, op_type: str, inputs: Sequence[str], count: int, *, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Writes a node, and returns the names of its outputs."""
        self._count += 1
        name = f"#{self.operation_index}.{self._count}"
        outputs = [f"{name}.{i}" for i in range(count)]
        self._write(node(op_type, list(inputs), outputs, domain=domain, name=name, **attributes))
        return outputs

    def _write(self, written: NodeProto) -> None:
        self.nodes.append(written)
        for output, dtype in zip(written.outputs, self._result_types(written), strict=False):
            self.types[output] = dtype

    def _result_types(self, written: NodeProto) -> list[str]:
        """The element types of a node's outputs. Those of operators of the extension are known from their records."""
        given = [self.types.get(name, "") for name in (*written.inputs, "", "", "")]
        match written.op_type:
            case "Cast":
                to = next((a.value for a in written.attributes if a.name == "to"), None)
                if to not in _TYPE_NAMES:
                    raise Unsupported(f"Cast to a type of number {to}")
                return [_TYPE_NAMES[to]]
            case "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "IsNaN":
                return ["bool"]
            case "ArgMax" | "ArgMin":
                return ["int64"]
            case "TopK":
                return [given[0], "int64"]
            case "DequantizeLinear":
                return ["float32"]
            case "QuantizeLinear":
                return [given[2]]
            case "Where":
                return [given[1]]
            case _:
                return [given[0]] * len(written.outputs)

    def kernel(self, written: NodeProto) -> tuple[object, ...]:
        """The properties of a node by which an engine chooses its kernel."""
        types = tuple(self.types.get(name, "") for name in (*written.inputs, *written.outputs))
        names = tuple(sorted(a.name for a in written.attributes))
        return written.domain, written.op_type, types, names

    def require_version(self, opset: int) -> None:
        """Lets the model have operators of at least this version."""
        self.opset = max(self.opset, opset)

    def emit_to(self, output: str, op_type: str, inputs: Sequence[str], **attributes: Any) -> None:
        """Writes a node whose output has a given name."""
        self._count += 1
        name = f"#{self.operation_index}.{self._count}"
        self._write(node(op_type, list(inputs), [output], name=name, **attributes))

    def constant(self, array: npt.ArrayLike, dtype: str | None = None) -> str:
        """The name of a constant."""
        value = np.asarray(array, dtype=dtype)
        if value.nbytes > 64:
            return self._initializer(value)
        key = (value.dtype, value.shape, value.tobytes())
        known = self._small.get(key)
        if known is None:
            known = self._small[key] = self._initializer(value)
        return known

    def _initializer(self, value: Array) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers[name] = tensor(name, value)
        self.types[name] = _name_of(value.dtype)
        return name

    def int64s(self, numbers: Sequence[int]) -> str:
        """A constant list of numbers, of the type that ONNX has for shapes and axes."""
        return self.constant(np.asarray(numbers, dtype=np.int64))

    # Forms

    def name(self, value: Value, order: Order | None = None) -> str:
        """The name of a value with its axes in an order; None for the HAL's."""
        return self._form(value, value.forms, order)

    def real(self, value: Value, order: Order | None = None) -> str:
        """The name of the real numbers as float32."""
        if value.dtype == "float32":
            return self.name(value, order)
        if not value.is_quantized:
            raise Unsupported(f"the real numbers of {value.dtype}")
        wanted = value.plain if order is None else order
        if wanted not in value.reals:
            chosen = self.nearest_order(value, wanted)
            value.reals[chosen] = self._dequantized(value, chosen)
        return self._form(value, value.reals, wanted)

    def _dequantized(self, value: Value, order: Order) -> str:
        if value.constant is not None and value.zero_point and not self.dialect.has_zero_points:
            return self._centred(value, value.constant, order)
        if value.is_moved and value.constant is not None:
            # The quickest kernels take signed weights beside unsigned data.
            signed = Value("int8", value.shape, constant=moved(value.constant))
            return self.dequantized(self.name(signed, order), value.scale, value.zero_point - 128, "int8")
        stored = self.name(value, order)
        if value.channels is None:
            return self.dequantized(stored, value.scale, value.zero_point, value.dtype)
        scales = self.constant(value.channels.scales, "float32")
        return self.emit("DequantizeLinear", [stored, scales], axis=order.index(value.channels.channel_dim))

    def _centred(self, value: Value, stored: Array, order: Order) -> str:
        """The real numbers of a constant without its zero point: of signed numbers where they fit 8 bits, else floats."""
        numbers = stored.astype(np.int16) - np.int16(value.zero_point)
        if numbers.min() >= -128 and numbers.max() <= 127:
            signed = Value("int8", value.shape, constant=numbers.astype(np.int8))
            return self.dequantized(self.name(signed, order), value.scale, 0, "int8")
        reals = numbers.astype(np.float32) * np.float32(value.scale)
        return self.name(Value("float32", value.shape, constant=reals), order)

    def real_constant(self, value: Value, order: Order) -> str:
        """The name of the real numbers of weights. Those of a constant are a constant of floats, with which no engine makes a layer
        one of 8-bit numbers.
        """
        if value.constant is None or not value.is_quantized:
            return self.real(value, order)
        numbers = value.constant.astype(np.int32) - np.int32(value.zero_point)
        scales: Array = np.asarray(value.scale, np.float32)
        if value.channels is not None:
            shape = [1] * value.rank
            shape[value.channels.channel_dim] = -1
            scales = np.asarray(value.channels.scales, np.float32).reshape(shape)
        reals = numbers.astype(np.float32) * scales
        return self.name(Value("float32", value.shape, constant=reals), order)

    def exact_real(self, value: Value, order: Order | None = None) -> str:
        """The name of the real numbers of a quantised value, to the last bit: float32 products of the scale and the number without
        its zero point.
        """
        if self.dialect.has_exact_reals:
            return self.real(value, order)
        numbers = np.arange(256, dtype=np.int32) if value.dtype == "uint8" else _SIGNED_BYTES
        table = (numbers - value.zero_point).astype(np.float32) * np.float32(value.scale)
        if value.constant is not None:
            stored = value.constant.view(np.uint8)
            return self.name(Value("float32", value.shape, constant=table[stored]), order)
        return self.looked_up(self.name(value, order), value.dtype, table)

    def dequantized(self, stored: str, scale: float, zero_point: int, dtype: str) -> str:
        """The real numbers of stored ones."""
        return self.emit(
            "DequantizeLinear",
            [stored, self.constant(scale, "float32"), self.constant(zero_point, dtype)],
        )

    def nearest_order(self, value: Value, wanted: Order) -> Order:
        """An order in which a value has a form: the wanted one if it can be."""
        if value.constant is not None or not value.forms or wanted in value.forms:
            return wanted
        return next(iter(value.forms))

    def _form(self, value: Value, forms: dict[Order, str], order: Order | None) -> str:
        wanted = value.plain if order is None else order
        known = forms.get(wanted)
        if known is not None:
            return known
        if forms is value.forms and value.constant is not None:
            array = value.constant
            if len(wanted) > array.ndim:  # It is broadcast to a higher rank.
                array = array.reshape((1,) * (len(wanted) - array.ndim) + array.shape)
            forms[wanted] = self.constant(np.ascontiguousarray(array.transpose(wanted)))
            return forms[wanted]
        if not forms:
            raise Unsupported("a value that no operation writes")
        given, source = next(iter(forms.items()))
        extents = [value.shape[axis] for axis in wanted]
        if [axis for axis in given if value.shape[axis] != 1] == [
            axis for axis, extent in zip(wanted, extents, strict=True) if extent != 1
        ]:
            # No element moves: a mean of an image, for example. A Transpose would be looked at by the engine's optimiser.
            forms[wanted] = self.reshaped(source, extents)
            return forms[wanted]
        forms[wanted] = self.emit("Transpose", [source], perm=[given.index(axis) for axis in wanted])
        return forms[wanted]

    def common_order(self, *values: Value) -> Order:
        """An order that spares transpositions where an operation treats all values element by element, with broadcasting."""
        rank = max(value.rank for value in values)
        plain = tuple(range(rank))
        computed = [value for value in values if value.constant is None]
        if not computed or any(value.rank != rank for value in computed):
            return plain
        shared = set.intersection(*(set(value.forms) for value in computed))
        return plain if plain in shared else min(shared, default=plain)

    def names(self, values: Sequence[Value], order: Order) -> list[str]:
        """The names of values in a common order."""
        return self._in_order(values, order, self.name)

    def reals(self, values: Sequence[Value], order: Order) -> list[str]:
        """The names of values' real numbers in a common order."""
        return self._in_order(values, order, self.real)

    def exact_reals(self, values: Sequence[Value], order: Order) -> list[str]:
        """The names of values' exact real numbers in a common order."""
        return self._in_order(values, order, self.exact_real)

    def _in_order(
        self, values: Sequence[Value], order: Order, name_of: Callable[[Value, Order | None], str]
    ) -> list[str]:
        found = []
        for value in values:
            if value.rank == len(order) or value.constant is not None:
                found.append(name_of(value, order))
                continue
            # OpenVINO removes an operation with a constant that changes no number, and with it the broadcasting to a higher rank.
            shape = (1,) * (len(order) - value.rank) + value.shape
            found.append(self.reshaped(name_of(value, None), shape))
        return found

    def set(self, value: Value, name: str, order: Order | None = None) -> None:
        """States what an output is: a value of its own type."""
        value.forms[value.plain if order is None else order] = name

    def set_real(self, value: Value, name: str, order: Order | None = None) -> None:
        """States what an output is, by its real numbers: quantised ones are rounded to its scale."""
        if value.dtype == "float32":
            self.set(value, name, order)
        elif value.is_quantized and value.channels is None:
            self.set(value, self.quantized(name, value), order)
        else:
            raise Unsupported(f"real numbers as {value.dtype}")

    def quantized(self, name: str, like: Value) -> str:
        """Real numbers rounded to a value's scale.

        ONNX rounds halves to even, the HAL away from zero. With a scale that is smaller by twice what float32 resolves, a quotient
        of a half becomes a little more, and no result changes whose quotient is not as near to a half as that.
        """
        scale = np.float32(like.scale * (1 - 2**-22))
        return self.emit(
            "QuantizeLinear",
            [name, self.constant(scale, "float32"), self.constant(like.zero_point, like.dtype)],
        )

    # Steps that many operations share

    def view(self, value: Value, permutation: Order) -> Value:
        """The value with its axes permuted, which writes nothing by itself."""
        turned = Value(
            value.dtype,
            tuple(value.shape[axis] for axis in permutation),
            scale=value.scale,
            zero_point=value.zero_point,
            constant=None if value.constant is None else value.constant.transpose(permutation),
            is_moved=value.is_moved,
        )
        if value.channels is not None:
            place = permutation.index(value.channels.channel_dim)
            turned.channels = ChannelQuant(value.channels.scales, place)
        if value.constant is None:
            for order, name in value.forms.items():
                turned.forms[tuple(permutation.index(axis) for axis in order)] = name
        return turned

    def like(self, value: Value, shape: Shape) -> Value:
        """A value of the same type and quantisation that nothing is known of."""
        return Value(
            value.dtype, shape, scale=value.scale, zero_point=value.zero_point, is_moved=value.is_moved
        )

    def unsigned(self, name: str) -> str:
        """Signed 8-bit numbers as unsigned ones; see ``moved``."""
        return self.flipped(self.cast(name, "uint8"))

    def signed(self, name: str) -> str:
        """The inverse of ``unsigned``."""
        return self.cast(self.flipped(name), "int8")

    def flipped(self, name: str) -> str:
        """Unsigned 8-bit numbers with the other highest bit."""
        if not self.dialect.has_bitwise:
            return self.looked_up(name, "uint8", np.arange(256, dtype=np.uint8) ^ np.uint8(0x80))
        return self.emit("BitwiseXor", [name, self.constant(0x80, "uint8")])

    def cast(self, name: str, dtype: str) -> str:
        """Numbers of another element type, converted as C does."""
        return self.emit("Cast", [name], to=int(DATA_TYPES[dtype]))

    def reshaped(self, name: str, shape: Sequence[int]) -> str:
        """The elements in another shape."""
        return self.emit("Reshape", [name, self.int64s(shape)])

    def same_quantization(self, *values: Value) -> None:
        """Demands that all quantised values have one scale and zero point."""
        quantized = [value for value in values if value.is_quantized]
        if any(not value.has_quantization_of(quantized[0]) for value in quantized[1:]):
            raise Unsupported("values of different scales or zero points")

    def looked_up(self, name: str, dtype: str, table: Array) -> str:
        """The entries of a table of 256 for stored 8-bit numbers, in the order of their bytes: a negative index counts from the
        end, as a negative number's byte does.
        """
        assert dtype in QUANTIZED and len(table) == 256, "made for it"
        return self.emit("Gather", [self.constant(table), self.cast(name, "int32")], axis=0)

    def index_within(self, name: str, extent: int, least: int = 0) -> str:
        """An index for the engine: one from ``least`` to below ``extent``, where another one ends the execution."""
        dtype = self.types[name]
        if self.dialect.reports_indexes:
            is_negative = self.emit("Less", [name, self.constant(0, dtype)])
            return self.emit("Where", [is_negative, self.constant(extent, dtype), name])
        is_below = self.emit("Less", [name, self.constant(least, dtype)])
        is_beyond = self.emit("GreaterOrEqual", [name, self.constant(extent, dtype)])
        is_wrong = self.emit("Or", [is_below, is_beyond])
        flags = self.reshaped(self.cast(is_wrong, "int32"), (-1,))
        self.checks.append(self.emit("ReduceMax", [flags, self.int64s([0])], keepdims=0))
        return self.emit("Where", [is_wrong, self.constant(0, dtype), name])

    def activated(self, name: str, activation: int) -> str:
        """Real numbers after a fused activation."""
        if activation == 0:
            return name
        if activation == 1:
            return self.emit("Relu", [name])
        low, high = {2: (-1.0, 1.0), 3: (0.0, 6.0)}[activation]
        return self.emit("Clip", [name, self.constant(low, "float32"), self.constant(high, "float32")])

"""One application of an operator, as the argument of its conversion: values, attributes, and errors.

Owns the error for operators that cannot be expressed, the access to attributes, and the list of those that the conversion has not
read: an attribute that a conversion does not know may change the meaning of the operator.

Source: "Attributes" of the ONNX IR specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from aionn.errors import InvalidModel
from aionn.hal import FusedActivation
from aionn.models.foreign_files import shortened
from aionn.models.onnx.constants import ConstantReader
from aionn.models.onnx.extension.application import NUMBERS_MAX
from aionn.models.onnx.extension.narrow import NAMES
from aionn.models.onnx.graph import Node
from aionn.models.onnx.schema import Attribute, AttributeType, DataType, SparseTensorProto, TensorProto
from aionn.models.onnx.tensors import Array, Inexpressible, Tensor
from aionn.models.onnx.writer import GraphWriter

__all__ = [
    "Convert",
    "Operator",
    "UnsupportedOperator",
    "UnsupportedOperators",
    "check_types",
    "read_constant",
    "unsupported",
]

KINDS_SHOWN, KIND_SHOWN = 100, 200
"""Operators that the text of one error lists, and characters of each; its ``operators`` has all. Files of networks have some dozens
of kinds in all.
"""


class UnsupportedOperator(msgspec.Struct, frozen=True):
    """Operators of one name that cannot be expressed for one reason.

    Attributes:
        name: The operator's name with its domain; ``input`` or ``output`` for a value of the graph.
        count: Number of nodes.
        reason: The reason, as a phrase.
    """

    name: str
    count: int
    reason: str


class UnsupportedOperators(InvalidModel):
    """A file has operators that the HAL cannot express.

    Attributes:
        operators: All of them, by name and reason.
    """

    def __init__(self, message: str, operators: tuple[UnsupportedOperator, ...] = ()) -> None:
        super().__init__(message)
        self.operators = operators


def unsupported(failures: Mapping[tuple[str, str], int]) -> UnsupportedOperators:
    """The error of a file with operators that the HAL cannot express: the number of nodes by name and reason."""
    found = tuple(UnsupportedOperator(name, n, reason) for (name, reason), n in failures.items())
    listed = "; ".join(
        f"{each.count} x {shortened(each.name, KIND_SHOWN)}: {shortened(each.reason, KIND_SHOWN)}"
        for each in found[:KINDS_SHOWN]
    )
    if len(found) > KINDS_SHOWN:
        listed += f"; {len(found) - KINDS_SHOWN} further kinds"
    count = sum(each.count for each in found)
    return UnsupportedOperators(
        f"onnx: expected operators that the HAL can express, got {count} that it cannot: {listed}", found
    )


class Typed(Protocol):
    """A value with an element type."""

    @property
    def dtype(self) -> str:
        """ONNX's element type by numpy's name."""
        ...


def read_constant(reader: ConstantReader, proto: TensorProto | SparseTensorProto) -> Tensor:
    """A constant of the file.

    Raises:
        InvalidModel: Its elements do not fit type and shape, or cannot be read.
        UnsupportedType: The importer cannot read its element type.
    """
    if isinstance(proto, SparseTensorProto):
        array, kind = reader.sparse(proto), proto.values.data_type
    else:
        array, kind = reader.array(proto), proto.data_type
    return Tensor(NAMES[DataType(kind)], array.shape, array=array)


SAME_TYPES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Sum", "Mean", "PRelu", "SwiGLU")),
    **dict.fromkeys(("And", "Or", "Xor", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")),
    **dict.fromkeys(("Concat", "Conv", "ConvTranspose", "Gemm", "MatMul")),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization", "LayerNormalization")),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (0, 1, 2, 3, 5, 6, 7)),
    "Clip": (0, 1, 2),
    "Pad": (0, 2),
    "Where": (1, 2),
}
"""The inputs that have one element type, by operator; None means all of them."""


def check_types(op: Operator, inputs: Sequence[Typed | None]) -> None:
    """Checks the element types of an operator's inputs, as far as several inputs must have the same one.

    Raises:
        InvalidModel: They differ.
    """
    if op.node.domain or op.type not in SAME_TYPES:
        return
    places = SAME_TYPES[op.type]
    given = [tensor for place, tensor in enumerate(inputs) if places is None or place in places]
    types = dict.fromkeys(tensor.dtype for tensor in given if tensor is not None)
    if len(types) > 1:
        op.refuse("inputs", "values of one element type", " and ".join(types))


class Operator:
    """An application of an operator.

    Attributes:
        node: The node of the graph.
        inputs: Values; None means an omitted input.
        version: The version of its operator set.
        activation: The activation that is applied to its first output.
        is_sole_reader: Whether no other node reads its first input.
    """

    __slots__ = ("_asked", "_reader", "activation", "inputs", "is_sole_reader", "node", "version")

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Tensor | None],
        reader: ConstantReader,
        *,
        is_sole_reader: bool = False,
    ) -> None:
        self.node = node
        self.inputs = tuple(inputs)
        self.version = node.version
        self.activation: FusedActivation = node.activation
        self.is_sole_reader = is_sole_reader
        self._reader = reader
        self._asked: set[str] = set()

    def derived(self, op_type: str, inputs: Sequence[Tensor | None], **attributes: int) -> Operator:
        """An operator of another type at the place of this one; it has the attributes of this one, and the given attributes."""
        given = {name: Attribute(name, AttributeType.INT, value) for name, value in attributes.items()}
        node = msgspec.structs.replace(
            self.node, op_type=op_type, attributes=self.node.attributes | given, outputs=self.node.outputs[:1]
        )
        self._asked.update(self.node.attributes)
        return Operator(node, inputs, self._reader)

    @property
    def type(self) -> str:
        return self.node.op_type

    def refuse(self, what: str, expected: object, got: object) -> NoReturn:
        """Rejects the file: its use of the operator breaks the specification."""
        raise InvalidModel(f"onnx, {self.node.where}, {what}: expected {expected}, got {got}")

    def has(self, position: int) -> bool:
        """Whether an input is given."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def input(self, position: int) -> Tensor:
        """A required input."""
        tensor = self.inputs[position] if position < len(self.inputs) else None
        if tensor is None:
            self.refuse(f"input {position}", "a value", "none")
        return tensor

    def wants(self, position: int) -> bool:
        """Whether the node has an output at this position."""
        return position < len(self.node.outputs) and bool(self.node.outputs[position])

    def given(self) -> list[Tensor]:
        """All inputs, all of which are required."""
        return [self.input(position) for position in range(len(self.inputs))]

    def array(self, position: int, what: str) -> Array:
        """The array of an input that must be constant.

        Raises:
            Inexpressible: It is not.
        """
        array = self.input(position).array
        if array is None:
            raise Inexpressible(f"{what} (input {position}) must be a constant")
        return array

    def numbers(self, position: int, what: str) -> list[int]:
        """The whole numbers of a constant input, in row-major order."""
        array = self.array(position, what)
        if array.dtype.kind not in "iu":
            self.refuse(f"input {position} ({what})", "whole numbers", array.dtype)
        if array.size > NUMBERS_MAX:
            self.refuse(f"input {position} ({what})", f"at most {NUMBERS_MAX} numbers", array.size)
        return [int(number) for number in array.reshape(-1)]

    def single(self, position: int, what: str) -> Any:
        """The number of a constant input with one element."""
        array = self.array(position, what)
        if array.size != 1:
            self.refuse(f"input {position} ({what})", "one number", f"{array.size} numbers")
        return array.reshape(-1)[0]

    def _attribute(self, name: str, kind: AttributeType) -> Attribute | None:
        self._asked.add(name)
        found = self.node.attributes.get(name)
        if found is not None and found.type != kind:
            self.refuse(f"attribute {name!r}", kind.name, AttributeType(found.type).name)
        if found is not None and found.value is None:
            # Messages have no default, unlike numbers and texts.
            self.refuse(f"attribute {name!r}", f"a value of type {kind.name}", "none")
        return found

    def has_attribute(self, name: str) -> bool:
        """Whether an attribute is given."""
        return name in self.node.attributes

    def ignore(self, *names: str) -> None:
        """Marks attributes that do not change the written operations."""
        self._asked.update(names)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; without a default the attribute is required."""
        found = self._attribute(name, AttributeType.INT)
        if found is None:
            if default is None:
                self.refuse(f"attribute {name!r}", "a whole number", "none")
            return default
        return int(found.value)

    def real(self, name: str, default: float) -> float:
        """A real number."""
        found = self._attribute(name, AttributeType.FLOAT)
        return default if found is None else float(found.value)

    def text(self, name: str, default: str) -> str:
        """A text."""
        found = self._attribute(name, AttributeType.STRING)
        return default if found is None else bytes(found.value).decode("utf-8", "replace")

    def integers(self, name: str) -> list[int] | None:
        """Whole numbers, None where they are not given."""
        found = self._attribute(name, AttributeType.INTS)
        return None if found is None else [int(number) for number in found.value]

    def reals(self, name: str) -> list[float] | None:
        """Real numbers, None where they are not given."""
        found = self._attribute(name, AttributeType.FLOATS)
        return None if found is None else [float(number) for number in found.value]

    def texts(self, name: str) -> list[str] | None:
        """Texts, None where they are not given."""
        found = self._attribute(name, AttributeType.STRINGS)
        return None if found is None else [bytes(text).decode("utf-8", "replace") for text in found.value]

    def tensor(self, name: str) -> Tensor | None:
        """A constant, None where it is not given."""
        found = self._attribute(name, AttributeType.TENSOR)
        return None if found is None else read_constant(self._reader, found.value)

    def sparse(self, name: str) -> Tensor | None:
        """A sparse constant, with its zeros; None where it is not given."""
        found = self._attribute(name, AttributeType.SPARSE_TENSOR)
        return None if found is None else read_constant(self._reader, found.value)

    def raw(self, name: str, kind: AttributeType) -> Any:
        """The value of an attribute of a kind that has no method of its own; None where it is not given."""
        found = self._attribute(name, kind)
        return None if found is None else found.value

    def axis(self, value: int, rank: int, what: str = "axis") -> int:
        """The axis from 0 to ``rank`` - 1 for a number that may count from the end."""
        if not -rank <= value < rank:
            self.refuse(what, f"an axis from {-rank} to {rank - 1}", value)
        return value % rank

    def axes(self, values: Sequence[int], rank: int) -> list[int]:
        """The same as ``axis`` for several axes, which must differ."""
        axes = [self.axis(value, rank, "axes") for value in values]
        if len(set(axes)) != len(axes):
            self.refuse("axes", "every axis once", list(values))
        return axes

    def check_attributes(self) -> None:
        """Checks that the conversion has read every attribute.

        Raises:
            Inexpressible: The conversion does not know an attribute.
        """
        unknown = sorted(set(self.node.attributes) - self._asked)
        if unknown:
            raise Inexpressible(f"attribute {', '.join(unknown)}")


Convert = Callable[[GraphWriter, Operator], Tensor | Sequence[Tensor]]
"""Writes the operations of an operator and returns its outputs."""

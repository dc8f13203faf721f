"""One application of an operator as contracts and shape rules see it: types, shapes, attributes, constants.

Owns the access to them with the errors that name the operator. A shape is a tuple of extents, or None if it is not known; rules
take known shapes only.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel
from aionn.models.onnx.extension.records import AttributeTensor, ValueType
from aionn.models.onnx.schema import DataType

__all__ = ["NUMBERS_MAX", "Application", "Shape", "Unknown"]

Shape = tuple[int, ...]


NUMBERS_MAX = 1 << 10
"""Most numbers of a constant list of axes, extents, bounds or parts; the longest of real models are the parts of a Split, some
hundred. The product of a thousand takes milliseconds, that of 65,000 half a minute."""


class Unknown(Exception):
    """A rule needs a shape or a constant that is not known before the execution."""


class Application(msgspec.Struct, frozen=True, eq=False):
    """One application of an operator.

    Attributes:
        op_type: The operator's name.
        version: The version of the operator set.
        attributes: By name; see ``records.Record``.
        inputs: Type and shape of each input, None for an omitted one.
        constants: The array of each input that is constant, else None.
        outputs: Number of outputs.
    """

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: Sequence[ValueType | None]
    constants: Sequence[npt.NDArray[Any] | None]
    outputs: int = 1

    def refuse(self, what: str, expected: object, got: object) -> NoReturn:
        """Rejects the application: it breaks the operator's specification."""
        raise InvalidModel(f"{self.op_type}, {what}: expected {expected}, got {got}")

    def has(self, position: int) -> bool:
        """Whether an input is given."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def _input(self, position: int) -> ValueType:
        value = self.inputs[position] if position < len(self.inputs) else None
        if value is None:
            self.refuse(f"input {position}", "a value", "none")
        return value

    def type(self, position: int) -> DataType:
        """The element type of a required input."""
        return DataType(self._input(position).data_type)

    def shape(self, position: int) -> Shape:
        """The shape of a required input.

        Raises:
            Unknown: It is not known.
        """
        value = self._input(position)
        if value.shape is None or not value.is_known:
            raise Unknown
        return value.shape

    def rank(self, position: int) -> int:
        """The number of axes of a required input.

        Raises:
            Unknown: It is not known.
        """
        shape = self._input(position).shape
        if shape is None:
            raise Unknown
        return len(shape)

    def _constant(self, position: int) -> npt.NDArray[Any]:
        array = self.constants[position] if position < len(self.constants) else None
        if array is None:
            raise Unknown
        if array.size > NUMBERS_MAX:
            self.refuse(f"input {position}", f"at most {NUMBERS_MAX} numbers", array.size)
        return array

    def numbers(self, position: int) -> list[int]:
        """The whole numbers of a constant input.

        Raises:
            Unknown: It is not constant.
        """
        array = self._constant(position)
        if array.dtype.kind not in "iu":
            self.refuse(f"input {position}", "whole numbers", array.dtype)
        return [int(number) for number in array.reshape(-1)]

    def number(self, position: int) -> int:
        """The whole number of a constant input with one element."""
        numbers = self.numbers(position)
        if len(numbers) != 1:
            self.refuse(f"input {position}", "one number", len(numbers))
        return numbers[0]

    def reals(self, position: int) -> list[float]:
        """The numbers of a constant input.

        Raises:
            Unknown: It is not constant.
        """
        array = self._constant(position)
        return [float(number) for number in array.reshape(-1)]

    def real(self, position: int) -> float:
        """The number of a constant input with one element."""
        numbers = self.reals(position)
        if len(numbers) != 1:
            self.refuse(f"input {position}", "one number", len(numbers))
        return numbers[0]

    def integer(self, name: str, default: int) -> int:
        """A whole number of the attributes."""
        value = self.attributes.get(name, default)
        if type(value) is not int:
            self.refuse(f"attribute {name!r}", "a whole number", reprlib.repr(value)[:40])
        return value

    def integers(self, name: str) -> list[int] | None:
        """Whole numbers of the attributes, None where they are not given."""
        value = self.attributes.get(name)
        if value is not None and not (isinstance(value, list) and all(type(item) is int for item in value)):
            self.refuse(f"attribute {name!r}", "whole numbers", reprlib.repr(value)[:40])
        return value

    def text(self, name: str, default: str) -> str:
        """A text of the attributes."""
        value = self.attributes.get(name, default)
        if not isinstance(value, str):
            self.refuse(f"attribute {name!r}", "a text", reprlib.repr(value)[:40])
        return value

    def tensor(self, name: str) -> npt.NDArray[Any] | None:
        """A tensor of the attributes, None where it is not given."""
        value = self.attributes.get(name)
        if value is not None and not isinstance(value, AttributeTensor):
            self.refuse(f"attribute {name!r}", "a tensor", reprlib.repr(value)[:40])
        return None if value is None else value.array

    def axis(self, value: int, rank: int) -> int:
        """The axis from 0 to ``rank`` - 1 for a number that may count from the end."""
        if not -rank <= value < rank:
            self.refuse("axis", f"an axis from {-rank} to {rank - 1}", value)
        return value % rank

    def broadcast(self, *shapes: Shape) -> Shape:
        """The shape that shapes broadcast to."""
        try:
            return tuple(int(extent) for extent in np.broadcast_shapes(*shapes))
        except ValueError:
            self.refuse("shapes", "ones that broadcast", " and ".join(str(list(shape)) for shape in shapes))

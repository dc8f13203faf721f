"""The form of an operation's definition.

Owns the four things that together define an operation (``OperationContract``), the facts that a validator sees and the means to
refuse (``Check``), and the values that a shape rule and a kernel see (``Call``, ``Tensor``). Knows no operation.

Invariants:
1. A validator decides from types, shapes, quantisation and constants alone; it never sees run-time values.
2. A shape rule and a kernel read their inputs and never write them: inputs may be shared memory or constants.
3. A kernel returns new arrays of the output operands' element types, with exactly the shapes that the shape rule gives; quantised
   values are returned quantised with the output operand's scale and zero point.

Source: the three phases validate, prepare, execute of the NN HAL's CPU operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure, InvalidArgument, InvalidModel
from aionn.hal import (
    OPERAND_TYPE_PROPERTIES,
    Operand,
    OperandLifeTime,
    OperandType,
    OperationType,
    operand_dtype,
    operand_type_name,
    operation_type_name,
)

__all__ = ["Array", "Call", "Check", "OperationContract", "Shape", "Tensor", "stand_in"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
_T = TypeVar("_T")

LIST_ELEMENTS_MAX = 4096
"""Most elements of an input that lists extents, axes or paddings, many times what the largest rank needs. As Python's numbers they
take nine times their memory, and their product takes hours where there are millions."""


class Tensor:
    """A value during execution.

    Attributes:
        operand: Type and quantisation as the model states them (its dimensions may still be unknown: use ``array.shape``).
        array: The value; rank 0 for scalars. Never written.
        is_constant: True when the value is part of the model, so that what is derived from it may be kept.
    """

    __slots__ = ("array", "is_constant", "operand")

    def __init__(self, operand: Operand, array: Array, *, is_constant: bool = False) -> None:
        self.operand = operand
        self.array = array
        self.is_constant = is_constant

    @property
    def type(self) -> int:
        return self.operand.type

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def scale(self) -> float:
        return self.operand.scale

    @property
    def zero_point(self) -> int:
        return self.operand.zero_point


_ZEROS = bytes(8)


def stand_in(operand: Operand, shape: Shape) -> Tensor:
    """The value of an operand that only an execution knows, for shape rules: zeros of this shape that take no memory."""
    dtype = operand_dtype(operand.type)
    return Tensor(operand, np.ndarray(shape, dtype, _ZEROS, strides=(0,) * len(shape)))


class Call:
    """One execution of one operation: its input values and the model's description of its outputs.

    Attributes:
        inputs: Values in the contract's order; None for an operand that is left out.
        outputs: The output operands as the model states them; extents may be unknown.
        is_relaxed: Whether float32 may be computed with the range and precision of float16.
    """

    __slots__ = ("_kept", "inputs", "is_relaxed", "outputs")

    def __init__(
        self,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Operand],
        *,
        is_relaxed: bool = False,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.is_relaxed = is_relaxed
        self._kept = kept

    def has(self, index: int) -> bool:
        """Whether the input exists and is not left out."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def tensor(self, index: int) -> Tensor:
        """An input that must be there.

        Raises:
            InvalidArgument: It is left out.
        """
        try:
            tensor = self.inputs[index]
        except IndexError:
            tensor = None
        if tensor is None:
            raise InvalidArgument(f"input {index}: expected a value, got none")
        return tensor

    def array(self, index: int) -> Array:
        """The value of an input that must be there."""
        return self.tensor(index).array

    def numbers(self, index: int) -> list[int]:
        """The elements of an input that must be there and lists extents or axes, in whatever shape.

        Raises:
            InvalidArgument: There are too many.
        """
        array = self.array(index)
        if array.size > LIST_ELEMENTS_MAX:
            raise InvalidArgument(
                f"input {index}: expected at most {LIST_ELEMENTS_MAX} elements, got {array.size}"
            )
        return [int(number) for number in array.reshape(-1)]

    def scalar(self, index: int) -> Any:
        """The value of a scalar input that must be there, as a Python number or bool."""
        array = self.array(index)
        if array.size != 1:
            raise InvalidArgument(f"input {index}: expected one value, got shape {list(array.shape)}")
        return array.item()

    def kept(self, key: str, indexes: Collection[int], compute: Callable[[], _T]) -> _T:
        """A value derived from inputs: computed once for a prepared model where all of them are constants, else each time.

        For what is worth keeping, such as a transposed filter or a table of multipliers. ``compute`` may run more than once
        when executions overlap; its result must not be written.

        Args:
            key: Unique within the operation.
            indexes: The inputs that the value depends on. One that is left out counts as constant.
            compute: Derives the value.
        """
        if self._kept is None:
            return compute()
        for index in indexes:
            tensor = self.inputs[index] if index < len(self.inputs) else None
            if tensor is not None and not tensor.is_constant:
                return compute()
        if key not in self._kept:
            self._kept[key] = compute()
        value: _T = self._kept[key]
        return value

    def refuse(self, message: str) -> NoReturn:
        """Ends the execution: a run-time value is illegal. Name the input, the expected and the actual value."""
        raise InvalidArgument(message)

    def fail(self, message: str) -> NoReturn:
        """Ends the execution with GENERAL_FAILURE."""
        raise GeneralFailure(message)


class Check:
    """A validator's view of one operation in a model, and its errors.

    Every refusal names the place: ``subgraph 0, operation 4 (CONV_2D), input 1: expected ..., got ...``.

    Attributes:
        operation_type: The operation's code.
        inputs: Input operands in the contract's order.
        outputs: Output operands.
        level: The lowest feature level found so far to be able to express the operation; raised with ``needs``.
    """

    __slots__ = ("_constant", "inputs", "level", "operation_type", "outputs", "where")

    def __init__(
        self,
        operation_type: int,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        *,
        where: str,
        constant: Callable[[Operand], Array | None] = lambda operand: None,
    ) -> None:
        self.operation_type = operation_type
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.level = 1
        self.where = f"{where} ({operation_type_name(operation_type)})"
        self._constant = constant

    def needs(self, level: int) -> None:
        """Declares that only feature levels from this one on can express the operation."""
        self.level = max(self.level, level)

    def refuse(self, what: str, expected: object, got: object) -> NoReturn:
        """Refuses the model. ``what`` names the place within the operation, such as ``input 1``."""
        raise InvalidModel(f"{self.where}, {what}: expected {expected}, got {got}")

    def require(self, condition: bool, what: str, expected: object, got: object) -> None:
        """Refuses the model unless the condition holds."""
        if not condition:
            self.refuse(what, expected, got)

    def counts(self, inputs: Collection[int] | int, outputs: Collection[int] | int = 1) -> None:
        """Demands one of the given numbers of inputs and of outputs."""
        for what, legal, got in (
            ("inputs", inputs, len(self.inputs)),
            ("outputs", outputs, len(self.outputs)),
        ):
            numbers = [legal] if isinstance(legal, int) else sorted(legal)
            if got not in numbers:
                self.refuse(f"number of {what}", " or ".join(map(str, numbers)), got)

    def counts_at_least(self, inputs: int, outputs: int) -> None:
        """Demands at least the given numbers of inputs and of outputs."""
        self.require(len(self.inputs) >= inputs, "number of inputs", f"at least {inputs}", len(self.inputs))
        self.require(
            len(self.outputs) >= outputs, "number of outputs", f"at least {outputs}", len(self.outputs)
        )

    def is_omitted(self, index: int) -> bool:
        """Whether the model leaves the input out (too few inputs, or lifetime NO_VALUE)."""
        return index >= len(self.inputs) or self.inputs[index].lifetime == OperandLifeTime.NO_VALUE

    def constant(self, index: int) -> Array | None:
        """The value of an input where the model fixes it, else None: a scalar or a short list."""
        value = self._constant(self.inputs[index]) if index < len(self.inputs) else None
        if value is not None and value.size > LIST_ELEMENTS_MAX:
            self.refuse(f"input {index}", f"at most {LIST_ELEMENTS_MAX} elements", value.size)
        return value

    def input_type(
        self, index: int, levels: Mapping[OperandType, int] | Collection[OperandType]
    ) -> OperandType:
        """Demands one of the given types of an input; a mapping also gives the first level of each type."""
        return self._type(f"input {index}", self.inputs[index], levels)

    def output_type(
        self, index: int, levels: Mapping[OperandType, int] | Collection[OperandType]
    ) -> OperandType:
        """Demands one of the given types of an output; a mapping also gives the first level of each type."""
        return self._type(f"output {index}", self.outputs[index], levels)

    def input_types(self, *types: OperandType | None, start: int = 0) -> None:
        """Demands the types of consecutive inputs; None accepts any; inputs beyond the model's last are not looked at."""
        for index, expected in enumerate(types, start):
            if expected is not None and index < len(self.inputs):
                self._type(f"input {index}", self.inputs[index], (expected,))

    def output_types(self, *types: OperandType | None) -> None:
        """Demands the types of the outputs; None accepts any."""
        for index, expected in enumerate(types):
            if expected is not None and index < len(self.outputs):
                self._type(f"output {index}", self.outputs[index], (expected,))

    def _type(
        self, what: str, operand: Operand, levels: Mapping[OperandType, int] | Collection[OperandType]
    ) -> OperandType:
        if operand.type not in levels:
            names = " or ".join(operand_type_name(t) for t in levels)
            self.refuse(what, names, operand_type_name(operand.type))
        found = operand.type if type(operand.type) is OperandType else OperandType(operand.type)
        level = OPERAND_TYPE_PROPERTIES[found].feature_level
        # An abstract class is slow to ask, and nearly all of these are tuples.
        if type(levels) is dict or (type(levels) is not tuple and isinstance(levels, Mapping)):
            level = max(level, levels[found])
        if level > self.level:
            self.level = level
        return found

    def same_quantization(self, what: str, a: Operand, b: Operand) -> None:
        """Demands equal scale and zero point of two operands."""
        self.require(
            a.scale == b.scale and a.zero_point == b.zero_point,
            what,
            f"scale {a.scale} and zero point {a.zero_point}",
            f"scale {b.scale} and zero point {b.zero_point}",
        )

    def input_rank(self, index: int, *ranks: int) -> None:
        """Demands one of the ranks of an input where the model knows it; unknown ranks are left to the execution."""
        self._rank(f"input {index}", self.inputs[index], ranks)

    def input_rank_at_most(self, index: int, rank_max: int) -> None:
        """Demands a rank of at most ``rank_max`` where the model knows it."""
        got = len(self.inputs[index].dimensions)
        self.require(got <= rank_max, f"input {index}", f"rank of at most {rank_max}", got)

    def output_rank(self, index: int, *ranks: int) -> None:
        """Demands one of the ranks of an output where the model knows it."""
        self._rank(f"output {index}", self.outputs[index], ranks)

    def _rank(self, what: str, operand: Operand, ranks: Sequence[int]) -> None:
        got = len(operand.dimensions)
        if got and got not in ranks:
            self.refuse(what, f"rank {' or '.join(map(str, ranks))}", f"shape {list(operand.dimensions)}")

    def extent(self, what: str, operand: Operand, axis: int, expected: int) -> None:
        """Demands an extent where the model knows it."""
        if axis < len(operand.dimensions) and operand.dimensions[axis] not in (0, expected):
            self.refuse(what, f"extent {expected} on axis {axis}", f"shape {list(operand.dimensions)}")


ValidateFunction = Callable[[Check], None]
ShapeFunction = Callable[[Call], Sequence[Shape]]
ExecuteFunction = Callable[[Call], Sequence[Array]]


@dataclass(frozen=True, slots=True)
class OperationContract:
    """All that defines an operation.

    Attributes:
        type: Its code.
        validate: Refuses what the contract forbids; raises the check's level to the least that can express the operation.
        shapes: The output shapes from the input values; None if it is known only after computing (detections, proposals).
        execute: Computes the outputs.
        doc: The documented contract: formula, inputs by number with types and shapes, outputs, quantisation rule, types and
            arguments by feature level, where we are stricter or looser than the spec and why, source.
    """

    type: OperationType
    validate: ValidateFunction
    shapes: ShapeFunction | None
    execute: ExecuteFunction
    doc: str


def scalar_type_for(tensor_type: OperandType) -> OperandType:
    """The scalar type that goes with a float tensor type in an operation's arguments."""
    return OperandType.FLOAT16 if tensor_type == OperandType.TENSOR_FLOAT16 else OperandType.FLOAT32


def float_result(values: Array, operand: Operand) -> Array:
    """Rounds a float result to the output operand's float type."""
    dtype = np.float16 if operand.type == OperandType.TENSOR_FLOAT16 else np.float32
    return np.asarray(values, dtype=dtype)

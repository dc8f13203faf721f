"""Checks of operations and inferred shapes that are remembered: networks repeat their layers, and processes see the same networks.

Owns the keys of both. A key has all that a validator and a shape rule may read, so that equal keys mean equal results.

Invariants:
1. A result is remembered only if it was computed without an error. Errors name places, and are found anew each time.
2. A validator that reads the value of a constant that the key does not have is not remembered. Shape rules read no value of such
   a constant: it is too long for a list of extents or axes, and of a type for weights.
3. The memory is bounded by ``ENTRIES_MAX`` and ``KEY_BYTES_MAX``, whatever models come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from aionn.hal import Operand, OperandLifeTime, OperandType
from aionn.ops.signature import Array, Call, Check, OperationContract, Shape, Tensor, stand_in

__all__ = ["Parts", "Results", "arguments_of", "checked_level", "checked_shapes", "described", "key_of"]

ENTRIES_MAX = 4096
"""Results of one kind. A large network has some hundred operations that differ."""

KEY_BYTES_MAX = 1024
"""Largest key: a convolution has some 150 bytes. All keys of one kind take 4 MiB."""

VALUE_ELEMENTS_MAX = 16
"""Elements of the largest constant whose value is part of a key: numbers, extents, axes and paddings."""

_WEIGHTS = frozenset(
    (
        OperandType.TENSOR_FLOAT32,
        OperandType.TENSOR_FLOAT16,
        OperandType.TENSOR_QUANT8_ASYMM,
        OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
        OperandType.TENSOR_QUANT8_SYMM,
        OperandType.TENSOR_QUANT16_SYMM,
        OperandType.TENSOR_QUANT16_ASYMM,
    )
)
"""Types of which no constant lists extents, axes or indexes: no shape rule reads the values of a large one."""

_DESCRIBED = frozenset(OperandType) - {
    OperandType.OEM,
    OperandType.TENSOR_OEM_BYTE,
    OperandType.SUBGRAPH,
}
"""Types whose values have a size that follows from the shape."""

ValueOf = Callable[[Operand], Array | None]
"""Gives the value of an operand that is known beforehand; None for another one."""

Parts = dict[int, bytes | None]
"""The parts of keys that were made so far, by the identities of operands that live as long."""

_T = TypeVar("_T")

_encode = msgspec.msgpack.Encoder().encode


def described(operand: Operand, value_of: ValueOf, shape: Shape | None = None) -> bytes | None:
    """The part of a key for one operand; None for an operand whose operations are not remembered.

    Args:
        operand: Its type, dimensions, quantisation and life time.
        value_of: Asked for its value, if that has a size that follows from the shape.
        shape: The shape, where that is known beside the dimensions.
    """
    kind = operand.type
    if kind not in _DESCRIBED or operand.channel_quant is not None or operand.extension_data is not None:
        return None
    value = value_of(operand)
    data: bytes | bool = False
    if value is not None:
        if value.size <= VALUE_ELEMENTS_MAX:
            data = value.tobytes()
        elif kind in _WEIGHTS:
            data = True
        else:
            return None
    facts = (kind, operand.dimensions, operand.scale, operand.zero_point, operand.lifetime, shape, data)
    try:
        return _encode(facts)
    except (OverflowError, TypeError, ValueError):
        return None  # A number beyond 64 bits, for example, which a check rejects.


def key_of(
    type: int, inputs: Sequence[bytes | None], outputs: Sequence[bytes | None], *, is_relaxed: bool = False
) -> bytes | None:
    """The key of an operation; None if it is not remembered. Each part ends by itself, so that no two operations have one key."""
    parts = [_encode((type, len(inputs), len(outputs), is_relaxed))]
    for part in (*inputs, *outputs):
        if part is None:
            return None
        parts.append(part)
    key = b"".join(parts)
    return key if len(key) <= KEY_BYTES_MAX else None


class Results(Generic[_T]):
    """Results by their keys. Any thread may use it."""

    def __init__(self) -> None:
        self._results: dict[bytes, _T] = {}

    def get(self, key: bytes | None) -> _T | None:
        """The result; None if it is not remembered."""
        return None if key is None else self._results.get(key)

    def keep(self, key: bytes | None, result: _T) -> None:
        """Remembers a result. The first one beyond ``ENTRIES_MAX`` drops all others."""
        if key is None:
            return
        if len(self._results) >= ENTRIES_MAX:
            self._results.clear()
        self._results[key] = result


class _Reading:
    """The constants of one check, with a note whether a value was read that the key has not."""

    __slots__ = ("_value_of", "is_beyond_key")

    def __init__(self, value_of: ValueOf) -> None:
        self._value_of = value_of
        self.is_beyond_key = False

    def __call__(self, operand: Operand) -> Array | None:
        value = self._value_of(operand)
        if value is not None and value.size > VALUE_ELEMENTS_MAX:
            self.is_beyond_key = True
        return value


_levels: Results[int] = Results()
_shapes: Results[tuple[Shape, ...]] = Results()


def _part(operand: Operand, value_of: ValueOf, parts: Parts) -> bytes | None:
    identity = id(operand)
    if identity not in parts:
        parts[identity] = described(operand, value_of)
    return parts[identity]


def checked_level(
    contract: OperationContract,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    value_of: ValueOf,
    *,
    where: str,
    parts: Parts,
) -> int:
    """Checks an operation against its contract.

    Args:
        contract: Of the operation.
        inputs: Its operands.
        outputs: The same.
        value_of: Gives the values of constants.
        where: Begins every message.
        parts: The parts of keys of operands; those of these operands are added.

    Returns:
        The lowest feature level that can express the operation.

    Raises:
        InvalidModel: The contract is broken.
    """
    key = key_of(
        contract.type,
        [_part(operand, value_of, parts) for operand in inputs],
        [_part(operand, value_of, parts) for operand in outputs],
    )
    level = _levels.get(key)
    if level is None:
        reading = _Reading(value_of)
        check = Check(contract.type, inputs, outputs, where=where, constant=reading)
        contract.validate(check)
        level = check.level
        _levels.keep(None if reading.is_beyond_key else key, level)
    return level


def checked_shapes(
    contract: OperationContract,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    value_of: ValueOf,
    *,
    parts: Parts,
) -> tuple[Shape, ...]:
    """Checks an operation against its contract, and returns the shapes of its outputs by the contract's shape rule.

    Args:
        contract: Of an operation whose shapes do not depend on values.
        inputs: Its operands, with known shapes.
        outputs: The types and quantisation of its outputs.
        value_of: Gives the values of constants.
        parts: See ``checked_level``; those of the inputs are added.

    Raises:
        Error: The contract is broken, or the shapes do not fit together.
    """
    assert contract.shapes is not None, "the operation's output shapes do not depend on values"
    key = key_of(
        contract.type,
        [_part(operand, value_of, parts) for operand in inputs],
        [described(operand, lambda _: None) for operand in outputs],
    )
    shapes = _shapes.get(key)
    if shapes is None:
        reading = _Reading(value_of)
        contract.validate(Check(contract.type, inputs, outputs, where="", constant=reading))
        found = contract.shapes(Call(arguments_of(inputs, value_of), outputs))
        shapes = tuple(tuple(map(int, shape)) for shape in found)
        _shapes.keep(None if reading.is_beyond_key else key, shapes)
    return shapes


def arguments_of(operands: Sequence[Operand], value_of: ValueOf) -> list[Tensor | None]:
    """The values of constants, zeros that take no memory for other operands, and None for omitted ones."""
    found: list[Tensor | None] = []
    for operand in operands:
        value = value_of(operand)
        if operand.lifetime == OperandLifeTime.NO_VALUE:
            found.append(None)
        elif value is None:
            found.append(stand_in(operand, operand.dimensions))
        else:
            found.append(Tensor(operand, value, is_constant=True))
    return found

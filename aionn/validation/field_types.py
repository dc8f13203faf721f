"""The types of the fields of records that an application or a driver has made.

Owns the check that a record's fields hold what their annotations declare, at any depth. msgspec checks that when it decodes, not
when Python code constructs a record, and a record of wrong types is neither computed with nor sent.

Invariants:
1. A record that passed can be encoded, but for its size and its descriptors; its enumerators are enumerators and its lists tuples.
2. Nothing is copied: bytes and memories are looked at by type alone.
"""

from __future__ import annotations

import enum
import functools
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeGuard

import msgspec

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Model, OperandType, OperationType
from aionn.hal.pieces import between_pieces

__all__ = ["check_field_types", "is_iterable"]

_INTEGERS: frozenset[type] = frozenset({int, OperandType, OperationType})
"""The types of whole numbers: a code of a type or an operation is an enumerator where the spec knows it."""

_LISTS: dict[Any, tuple[type, ...]] = {tuple: (tuple,), Sequence: (list, tuple)}
"""The classes of lists, by the origins of their annotations."""

_Check = Callable[[Any], bool]
"""Whether a value is right. Raises ``_Mismatch`` for a place inside of it."""


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether an argument can be iterated. An array of numpy without dimensions has the method, and cannot."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


class _Mismatch(Exception):
    """A value of a wrong type. ``path`` is its place inside of the record, from the inside to the outside."""

    def __init__(self, place: str, expected: object, got: object) -> None:
        self.path = [place]
        self.expected = expected
        self.got = got


def check_field_types(value: object, kind: Any, where: str) -> None:
    """Checks a record, or a list of records, against the annotations of its fields.

    Args:
        value: The record.
        kind: The type that it must have: a Struct or a NamedTuple of ``aionn.hal``, or a ``Sequence`` of one.
        where: Its name in the message, such as ``request``.

    Raises:
        InvalidModel: A field of a model holds a value of another type. The message begins with its place, such as
            ``model.main.operands[3].dimensions``.
        InvalidArgument: The same for another record, or it is not of this kind.
    """
    try:
        _inside(value, kind, _check_of(kind), where)
    except _Mismatch as e:
        error = InvalidModel if isinstance(value, Model) else InvalidArgument
        got = f"{type(e.got).__name__} {reprlib.repr(e.got)}"
        raise error(f"{''.join(reversed(e.path))}: expected {_text_of(e.expected)}, got {got}") from None


def _text_of(annotation: Any) -> str:
    """An annotation as Python code, without the names of modules."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _text_of(annotation.__origin__)
    if origin in _LISTS:
        return f"tuple[{_text_of(arguments[0])}, ...]"
    if arguments:
        return " | ".join(_text_of(argument) for argument in arguments)
    return "None" if annotation is types.NoneType else str(annotation.__name__)


@functools.cache
def _types_of(annotation: Any) -> frozenset[type]:
    """The types of which every value is right, without a further look; empty for an annotation of another kind."""
    if typing.get_origin(annotation) in _LISTS:
        return frozenset()
    if typing.get_origin(annotation) is Annotated:
        return _types_of(annotation.__origin__)
    arguments = typing.get_args(annotation)
    if arguments:
        return frozenset().union(*map(_types_of, arguments))
    if annotation is int:
        return _INTEGERS
    if annotation is float:
        return _INTEGERS | {float}
    return frozenset() if _fields_of(annotation) else frozenset({annotation})


@functools.cache
def _check_of(annotation: Any) -> _Check:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:  # The limits are those of decoders.
        return _check_of(annotation.__origin__)
    if origin in _LISTS:
        return _list_check(_LISTS[origin], arguments[0])
    if arguments:
        checks = [_check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in checks)
    if _fields_of(annotation):
        return _record_check(annotation)
    if annotation in (int, float):
        known = _types_of(annotation)
        # An extension may name its types and operations by enumerators of its own.
        return lambda value: type(value) in known or isinstance(value, enum.IntEnum)
    return lambda value: isinstance(value, annotation)


def _list_check(lists: tuple[type, ...], element: Any) -> _Check:
    known, check_element = _types_of(element), _check_of(element)

    def check(value: Any) -> bool:
        items = value
        if not isinstance(value, lists):
            return False
        if known.issuperset(map(type, items)):
            return True
        for index, one in enumerate(items):
            _inside(one, element, check_element, f"[{index}]")
            between_pieces()
        return True

    return check


def _fields_of(kind: Any) -> list[tuple[str, Any]]:
    """The names and annotations of the fields of a record; empty for anything else."""
    if issubclass(kind, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return list(typing.get_type_hints(kind).items()) if hasattr(kind, "_fields") else []


def _record_check(kind: Any) -> _Check:
    fields = [(name, known, _types_of(known), _check_of(known)) for name, known in _fields_of(kind)]
    values_of = msgspec.structs.astuple if issubclass(kind, msgspec.Struct) else tuple

    def check(value: Any) -> bool:
        if not isinstance(value, kind):
            return False
        for one, (name, annotation, known, check_field) in zip(values_of(value), fields, strict=False):
            if type(one) not in known:
                _inside(one, annotation, check_field, f".{name}")
        return True

    return check


def _inside(value: Any, annotation: Any, check: _Check, place: str) -> None:
    try:
        is_right = check(value)
    except _Mismatch as e:
        e.path.append(place)
        raise
    if not is_right:
        raise _Mismatch(place, annotation, value)

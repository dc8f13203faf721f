"""The checks of arguments: numbers, flags, texts, paths, sizes, names of choices, functions.

Owns the types that are accepted, and the messages. Refuses to own ranges and choices, which the callers give.

Invariants:
1. A value of another type, and a number out of its range, is an `InvalidArgument` when a function is called, before anything is
   opened.
2. A number of any class is returned as Python's: those of numpy have other texts and narrower ranges, and cannot be encoded.
3. Every value has a message, also one whose text cannot be made. Texts are not shown: an address holds credentials.

A whole number is one of any class that Python takes as an index; a bool is not a number.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from aionn.errors import InvalidArgument, class_text, shown
from aionn.platform.numbers import number_of

__all__ = [
    "SIZE_MAX",
    "checked_flag",
    "checked_function",
    "checked_number",
    "checked_path",
    "checked_size",
    "checked_text",
    "checked_texts",
    "checked_whole",
    "checked_wholes",
    "one_of",
]

# 8K twice over; beyond that a size is a mistake, and 16,384 squared already is 800 MB a frame.
SIZE_MAX: Final = 16_384


def checked_number(value: object, least: float, most: float | None, where: str) -> float:
    """Returns a finite number between both ends, which belong to the range.

    Args:
        value: The argument.
        least: The smallest one.
        most: The largest one; None means that every finite number is accepted.
        where: The function and the argument; begins the message.

    Raises:
        InvalidArgument: It is another one, or not a number.
    """
    number = number_of(value)
    # Written so that a NaN fails as well.
    if number is None or not least <= number <= (sys.float_info.max if most is None else most):
        raise InvalidArgument(f"{where}: expected {_range(least, most)}, got {shown(value)}")
    return number


def checked_whole(
    value: object, least: int, most: int | None, where: str, *, expected: str | None = None
) -> int:
    """Returns a whole number between both ends, which belong to the range. See `checked_number`.

    Args:
        value: The argument.
        least: The smallest one.
        most: The largest one; None means no limit.
        where: The function and the argument; begins the message.
        expected: The values that the message expects, where these are not whole numbers alone; None means the range.

    Raises:
        InvalidArgument: It is another one, or not a whole number.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = expected or f"a whole number of {_range(least, most)}"
        raise InvalidArgument(f"{where}: expected {kind}, got {shown(value)}") from None
    if number < least or (most is not None and number > most):
        kind, got = (expected, value) if expected else (_range(least, most), number)
        raise InvalidArgument(f"{where}: expected {kind}, got {shown(got)}")
    return number


def _range(least: float, most: float | None) -> str:
    low, high = (end if end is None or isinstance(end, int) else f"{end:g}" for end in (least, most))
    return f"{low} or more" if high is None else f"{low} to {high}"


def checked_wholes(value: object, names: str, where: str) -> list[Any]:
    """Returns the entries, which are not checked, of a tuple, a list or an array that has as many as the names.

    Args:
        value: The argument.
        names: Of the entries, with commas between them.
        where: The function and the argument; begins the message.

    Raises:
        InvalidArgument: It is something else.
    """
    is_sequence = isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim == 1)
    if not is_sequence or len(value) != names.count(",") + 1:  # type: ignore[arg-type]
        raise InvalidArgument(f"{where}: expected ({names}), got {shown(value)}")
    return list(value)  # type: ignore[call-overload, no-any-return]


def checked_size(size: object, where: str) -> tuple[int, int]:
    """Returns ``(width, height)`` if both are whole numbers between 1 and `SIZE_MAX`, else raises `InvalidArgument`."""
    edges = []
    for edge in checked_wholes(size, "width, height", where):
        try:
            edges.append(checked_whole(edge, 1, SIZE_MAX, where))
        except InvalidArgument:
            raise InvalidArgument(
                f"{where}: expected width and height of 1 to {SIZE_MAX}, got {shown(size)}"
            ) from None
    return edges[0], edges[1]


def checked_flag(value: object, where: str) -> bool:
    """Returns a bool, Python's or numpy's, as Python's; else raises `InvalidArgument`."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgument(f"{where}: expected a bool, got {shown(value)}")
    return bool(value)


def one_of(value: object, choices: tuple[Any, ...], where: str) -> Any:
    """Returns the choice that a text names, else raises `InvalidArgument`."""
    for choice in choices:
        if isinstance(value, str) and value == choice:
            return choice
    names = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
    raise InvalidArgument(f"{where}: expected {names}, got {shown(value)}")


def checked_text(value: object, where: str, *, may_be_empty: bool = False) -> str:
    """Returns a text that programs and libraries can be given.

    Raises:
        InvalidArgument: It is something else, is empty, or has a null byte or half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}: expected a text, got {class_text(value)}")
    if not (value or may_be_empty):
        raise InvalidArgument(f"{where}: expected a text, got an empty one")
    _check_characters(value, where, "a text", "strict")
    return value


def checked_texts(value: object, where: str) -> dict[str, str]:
    """Returns a mapping from texts to texts, else raises `InvalidArgument`."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where}: expected a mapping from texts to texts, got {class_text(value)}")
    return {
        checked_text(name, where): checked_text(text, f"{where}: {shown(name)}", may_be_empty=True)
        for name, text in value.items()
    }


def checked_path(value: object, where: str) -> str:
    """Returns the path as text, whatever is there.

    Raises:
        InvalidArgument: It is not a path, is bytes, is empty, or has a character that no path has.
    """
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise InvalidArgument(f"{where}: expected a path, got {class_text(value)}")
    if not path:
        raise InvalidArgument(f"{where}: expected a path, got an empty one")
    # The names of files that are not UTF-8 hold surrogates, which stand for their bytes.
    _check_characters(path, where, "a path", "surrogateescape")
    return path


def _check_characters(text: str, where: str, kind: str, errors: str) -> None:
    if "\0" in text:
        raise InvalidArgument(f"{where}: expected {kind} without null bytes, got one with them")
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError as e:
        raise InvalidArgument(
            f"{where}: expected {kind} of whole characters, got {text[e.start]!r} in it"
        ) from None


def checked_function(value: object, where: str) -> Callable[..., Any]:
    """Returns a function, or another object that can be called; else raises `InvalidArgument`."""
    if not callable(value):
        raise InvalidArgument(f"{where}: expected a function, got {shown(value)}")
    return value

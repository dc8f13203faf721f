"""Records from TOML files, with every mistake reported by line and field.

Owns the way from a file's text to a frozen record, and the search for the line that an error belongs to. Knows no record: devices
and workloads are described in their own modules.

Source: TOML 1.0 as read by the standard library; field rules by msgspec and by each record's own checks.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from aionn.errors import InvalidArgument
from aionn.platform.files import TEXT_BYTES_MAX, read_regular

__all__ = ["convert_described", "described_text", "read_described"]

MODEL_SUFFIXES = (".tflite", ".onnx")
"""The names of models' files, which are given by mistake."""

_T = TypeVar("_T")


def read_described(path: str | os.PathLike[str], kind: type[_T]) -> _T:
    """Reads a TOML file into a record.

    Raises:
        InvalidArgument: The file cannot be read or has a mistake; the message names its line and field.
    """
    return convert_described(described_text(path, "description"), kind, where=os.fspath(path))


def described_text(path: str | os.PathLike[str], what: str) -> str:
    """The text of a TOML file.

    Args:
        path: The file.
        what: Names its content in errors, without an article.

    Raises:
        InvalidArgument: It cannot be read, or is a model or another file that is not text.
    """
    content = read_regular(path, what, TEXT_BYTES_MAX)
    name = os.fsdecode(path)
    if name.lower().endswith(MODEL_SUFFIXES):
        raise InvalidArgument(
            f"{name}: expected a {what} as TOML text, got a model; a workload names the file of a model: [[model]] with"
            f' name = "..." and file = {os.path.basename(name)!r}'
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"{name}: expected a {what} as TOML text, got a file that is not text"
        ) from None


def convert_described(text: str, kind: type[_T], *, where: str) -> _T:
    """Turns TOML text into a record. ``where`` names the text in errors.

    Raises:
        InvalidArgument: As for ``read_described``.
    """
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise InvalidArgument(f"{where}: no TOML: {e}") from e
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as e:
        raise InvalidArgument(_located(str(e), text, table, kind, where)) from e


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_NAMED = re.compile(
    r"^(?P<field>[a-z_][a-z_0-9.]*): |unknown field `(?P<unknown>[^`]+)`|required field `(?P<required>[^`]+)`"
)
_TYPES = re.compile(r"^Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`$")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "datetime": "a date and time",
    "date": "a date",
    "time": "a time",
}
"""The types of msgspec's messages in words."""


def _located(message: str, text: str, table: Mapping[str, Any], kind: type[_T], where: str) -> str:
    match = _PATH.match(message)
    assert match is not None, "the pattern matches every text"
    what = match["what"]
    steps: list[str | int] = []
    for key, index in _STEP.findall(match["path"] or ""):
        if not key and index == "...":
            steps.append(_index_of(message, table, kind, steps))
        else:
            steps.append(key if key else int(index))
    named, types = _NAMED.search(what), _TYPES.match(what)
    if named is not None and (unknown := named["unknown"]) is not None:
        what = _unknown_field(unknown, list(dict.fromkeys(_fields_at(kind, steps))))
    elif named is not None and (required := named["required"]) is not None:
        what = f"expected the field {required}, which is missing"
    elif types is not None:
        what = f"expected {_in_words(types['expected'])}, got {_in_words(types['got'])}"
    if named is not None and (field := named["field"] or named["unknown"]) is not None:
        steps += [int(step) if step.isdigit() else step for step in field.split(".")]
        what = what.removeprefix(f"{named['field']}: ")
    line = _line_of(text, steps)
    shown = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).lstrip(".")
    return f"{where}, line {line}, {shown or 'file'}: {what}"


def _unknown_field(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    return f"expected one of {', '.join(known)}; got {name}{advice}"


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(each, each) for each in types.split(" | ") if each != "null")


def _fields_at(kind: type[Any], steps: Sequence[str | int]) -> Iterator[str]:
    """The names of the fields of the records at a place: those of all that a union permits there."""
    found = [msgspec.inspect.type_info(kind)]
    for step in steps:
        found = [below for each in found for below in _below(each, step)]
    for each in found:
        for member in _members(each):
            if isinstance(member, msgspec.inspect.StructType):
                yield from (field.encode_name for field in member.fields)


def _members(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _below(kind: msgspec.inspect.Type, step: str | int) -> Iterator[msgspec.inspect.Type]:
    for member in _members(kind):
        match member:
            case msgspec.inspect.StructType():
                yield from (field.type for field in member.fields if field.encode_name == step)
            case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
                yield member.item_type
            case msgspec.inspect.DictType():
                yield member.value_type


def _index_of(message: str, table: Mapping[str, Any], kind: type[_T], steps: Sequence[str | int]) -> int:
    """The entry of an array that an error without an index refers to: the first that is wrong by itself."""
    if len(steps) == 1 and isinstance(entries := table.get(str(steps[0])), list):
        for index, entry in enumerate(entries):
            try:
                msgspec.convert({**table, str(steps[0]): [entry]}, kind)
            except msgspec.ValidationError as e:
                if str(e) == message:
                    return index
    return 0


def _line_of(text: str, steps: Sequence[str | int]) -> int:
    """The line of the deepest part of a path that the text names; 1 if it names none."""
    best, best_depth = 1, 0
    prefix: list[str | int] = []
    counts: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            is_array = stripped.startswith("[[")
            name = stripped.strip("[] ").split("]")[0]
            keys: list[str | int] = []
            for key in name.split("."):
                keys.append(key.strip().strip("\"'"))
                if (*keys,) in counts:
                    keys.append(counts[(*keys,)])
            if is_array:
                plain = (*(keys[:-1] if isinstance(keys[-1], int) else keys),)
                counts[plain] = counts.get(plain, -1) + 1
                keys = [*plain, counts[plain]]
            prefix = keys
            found = prefix
        elif "=" in stripped and not stripped.startswith("#"):
            found = [*prefix, *(k.strip().strip("\"'") for k in stripped.split("=")[0].split("."))]
        else:
            continue
        depth = len(found)
        if depth > best_depth and list(steps[:depth]) == found:
            best, best_depth = number, depth
    return best

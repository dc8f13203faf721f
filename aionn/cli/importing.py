"""The options of commands for the import of .onnx files: ``--dimension``, ``--input-shape`` and ``--value``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from aionn.errors import InvalidArgument
from aionn.models.importing import ImportOptions
from aionn.platform.arrays import read_array

__all__ = ["Dimensions", "InputShapes", "Values", "import_options"]

Dimensions = Annotated[list[str] | None, Parameter(name="--dimension", negative=())]
InputShapes = Annotated[list[str] | None, Parameter(name="--input-shape", negative=())]
Values = Annotated[list[str] | None, Parameter(name="--value", negative=())]


def import_options(
    dimension: Sequence[str] | None,
    input_shape: Sequence[str] | None = None,
    value: Sequence[str] | None = None,
) -> ImportOptions:
    """The options of an import from the texts of a command.

    Args:
        dimension: Texts ``NAME=EXTENT``.
        input_shape: Texts ``NAME=EXTENT,EXTENT``.
        value: Texts ``NAME=FILE.npy`` or ``NAME=NUMBER,NUMBER``; one number has rank 0.

    Raises:
        InvalidArgument: A text has another form, a name is given twice, or a file cannot be read.
    """
    extents = {name: _extent(text, name) for name, text in _pairs(dimension, "--dimension").items()}
    shapes = {
        name: tuple(_extent(part, name, "--input-shape") for part in text.split(",") if part or text)
        for name, text in _pairs(input_shape, "--input-shape").items()
    }
    arrays = {name: _value(text, name) for name, text in _pairs(value, "--value").items()}
    return ImportOptions(extents, shapes, arrays)


def _pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        # Names of inputs may hold an equals sign, extents and numbers do not.
        name, _, rest = text.rpartition("=")
        if not name:
            raise InvalidArgument(f"{option}: expected NAME=VALUE, got {text!r}")
        if name in found:
            raise InvalidArgument(f"{option}: expected every name once, got {name!r} again")
        found[name] = rest
    return found


def _extent(text: str, name: str, option: str = "--dimension") -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise InvalidArgument(f"{option} {name}: expected a whole number of 0 or more, got {text!r}")
    return int(text)


def _value(text: str, name: str) -> Any:
    if text.endswith(".npy"):
        return read_array(text, f"--value {name}")
    parts = text.split(",")
    try:
        numbers: list[float] = [int(part) for part in parts]
        dtype = "int64"
    except ValueError:
        try:
            numbers, dtype = [float(part) for part in parts], "float32"
        except ValueError:
            raise InvalidArgument(
                f"--value {name}: expected the name of an .npy file, or numbers with commas, got {text!r}"
            ) from None
    try:
        return np.array(numbers if len(parts) > 1 else numbers[0], dtype)
    except OverflowError:
        raise InvalidArgument(f"--value {name}: expected numbers of 64 bits, got {text!r}") from None

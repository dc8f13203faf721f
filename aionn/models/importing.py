"""Model files of all formats: chooses the importer by the content and the name of a file.

Owns the choice and the options of an import. The importers are in ``tflite`` and ``onnx``.

Source: the file identifier of the TensorFlow Lite schema; the first field of ONNX's ``ModelProto``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from aionn.errors import InvalidArgument
from aionn.hal import Model
from aionn.models.foreign_files import TFLITE_IDENTIFIER
from aionn.models.onnx import load_onnx
from aionn.models.tflite import load_tflite
from aionn.platform.files import open_regular

__all__ = [
    "NO_OPTIONS",
    "ImportOptions",
    "ImportedArgument",
    "ImportedModel",
    "check_import_options",
    "is_onnx",
    "load_file",
]

ONNX_BEGIN = b"\x08"
"""The first byte of an .onnx file: the tag of ``ir_version``, which all exporters write first."""

HEAD_BYTES = 8
"""Bytes that the choice of the importer needs."""


class ImportOptions(msgspec.Struct, frozen=True):
    """Options of the import of an .onnx file; see ``load_onnx``.

    Attributes:
        dimensions: Extents by the names that the file gives to open ones.
        input_shapes: Shapes by the names of inputs, for open extents without a name.
        values: Arrays by the names of inputs that become constants.
    """

    dimensions: Mapping[str, int] = {}
    input_shapes: Mapping[str, Sequence[int]] = {}
    values: Mapping[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the options that are given."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name))

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as keyword arguments of ``load_onnx`` and ``Runtime.compile``."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


NO_OPTIONS = ImportOptions()
"""The options of an import without any."""


class ImportedArgument(msgspec.Struct, frozen=True):
    """An input or output of an imported model.

    Attributes:
        name: Its name in the file.
        dtype: numpy's name of the element type that the file declares; empty if it is that of the operand.
        dimensions: The shape that the file declares; None if it is that of the operand.
    """

    name: str
    dtype: str = ""
    dimensions: tuple[int, ...] | None = None


class ImportedModel(msgspec.Struct, frozen=True):
    """The model of a file.

    Attributes:
        model: The model that a device prepares.
        inputs: The inputs in the order of the arguments.
        outputs: The outputs in the order of the results.
    """

    model: Model
    inputs: tuple[ImportedArgument, ...]
    outputs: tuple[ImportedArgument, ...]


def check_import_options(
    dimensions: Mapping[str, int] | None,
    input_shapes: Mapping[str, Sequence[int]] | None,
    values: Mapping[str, Any] | None,
) -> ImportOptions:
    """The options of an import; None means none.

    Raises:
        InvalidArgument: One is not a mapping from names to extents, shapes or arrays.
    """
    for what, given in (("dimensions", dimensions), ("input_shapes", input_shapes), ("values", values)):
        if given is not None and not (
            isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
        ):
            raise InvalidArgument(f"{what}: expected a mapping by names, got {given!r:.80}")
    for name, extent in (dimensions or {}).items():
        if not _is_extent(extent):
            raise InvalidArgument(
                f"dimensions, {name!r}: expected a whole number of 0 or more, got {extent!r:.80}"
            )
    for name, shape in (input_shapes or {}).items():
        if not isinstance(shape, Sequence) or isinstance(shape, str) or not all(map(_is_extent, shape)):
            raise InvalidArgument(
                f"input_shapes, {name!r}: expected whole numbers of 0 or more, got {shape!r:.80}"
            )
    for name, value in (values or {}).items():
        try:
            dtype = np.asarray(value).dtype
        except ValueError:
            dtype = np.dtype(object)
        # The package ``ml_dtypes`` adds bfloat16 to numpy, whose own floats have another kind.
        if dtype.kind not in "biuf" and dtype.name != "bfloat16":
            raise InvalidArgument(f"values, {name!r}: expected an array of numbers, got {value!r:.80}")
    return ImportOptions(dict(dimensions or {}), dict(input_shapes or {}), dict(values or {}))


def _is_extent(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def is_onnx(path: str | os.PathLike[str]) -> bool:
    """Whether ``load_file`` imports a file as ONNX: by its content, else by its suffix.

    Raises:
        InvalidArgument: The path cannot be read, or names no regular file.
    """
    name, head = os.fsdecode(path), _head(path)
    if head[4:] == TFLITE_IDENTIFIER:
        return False
    if name.lower().endswith(".onnx"):
        return True
    return head[:1] == ONNX_BEGIN and not name.lower().endswith(".tflite")


def _head(path: str | os.PathLike[str]) -> bytes:
    with open_regular(path, "model") as file:
        try:
            return file.read(HEAD_BYTES)
        except OSError as e:
            raise InvalidArgument(f"model {os.fsdecode(path)}: cannot be read: {e.strerror}") from e


def load_file(path: str | os.PathLike[str], options: ImportOptions = NO_OPTIONS) -> ImportedModel:
    """Imports a .tflite or .onnx file.

    Args:
        path: The path of the file.
        options: Options for .onnx files.

    Raises:
        InvalidModel: The file is damaged, or has operators that the HAL cannot express; all of these are listed.
        InvalidArgument: The path cannot be read, or names no regular file; an extent is open and not given, or does not fit; or
            there are options for a .tflite file.
        ResourceExhausted: The file does not fit into memory.
    """
    if not is_onnx(path):
        if options.names:
            raise InvalidArgument(
                f"model {os.fsdecode(path)}: expected an .onnx file with the option {options.names[0]}, got a .tflite file"
            )
        loaded = load_tflite(path)
        return ImportedModel(
            loaded.model,
            tuple(ImportedArgument(a.name) for a in loaded.inputs),
            tuple(ImportedArgument(a.name) for a in loaded.outputs),
        )
    imported = load_onnx(path, **options.keywords)
    return ImportedModel(
        imported.model,
        tuple(ImportedArgument(a.name, a.dtype, a.dimensions) for a in imported.inputs),
        tuple(ImportedArgument(a.name, a.dtype, a.dimensions) for a in imported.outputs),
    )

"""The content of an ONNX file before its import: declared inputs and outputs, and the operators with their counts.

Source: the ONNX IR specification.
"""

from __future__ import annotations

import os
from collections import Counter

import msgspec

from aionn.errors import InvalidModel
from aionn.models.foreign_files import error_of_file
from aionn.models.onnx.graph import resolve
from aionn.models.onnx.load import FILE_BYTES_MAX
from aionn.models.onnx.schema import DataType, ValueInfo, read_model
from aionn.platform.files import read_regular

__all__ = ["OnnxSummary", "summarize_onnx"]


class OnnxSummary(msgspec.Struct, frozen=True):
    """The content of a file.

    Attributes:
        inputs: Name, element type and shape of each input, open extents by their names or ``?``.
        outputs: The same of each output.
        operators: Number of nodes that the outputs need, by operator, with the file's own functions replaced by their nodes.
        opsets: The version by domain; the empty domain is ONNX's own.
        open_extents: Names of extents that the file leaves open.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: dict[str, int]
    opsets: dict[str, int]
    open_extents: tuple[str, ...]


def summarize_onnx(path: str | os.PathLike[str]) -> OnnxSummary:
    """Describe the content of a file. Does not check that the operators can be expressed.

    Raises:
        InvalidModel: The file is damaged.
        InvalidArgument: The path cannot be read, or names no regular file.
    """
    data = read_regular(path, "model", FILE_BYTES_MAX)
    try:
        graph = resolve(read_model(data))
    except InvalidModel as e:
        raise error_of_file(f"model {os.fsdecode(path)}", data, e) from e
    names = [extent for info in graph.inputs for extent in info.shape or () if isinstance(extent, str)]
    return OnnxSummary(
        tuple(map(_described, graph.inputs)),
        tuple(map(_described, graph.outputs)),
        dict(sorted(Counter(node.label for node in graph.nodes).items())),
        graph.opsets,
        tuple(dict.fromkeys(names)),
    )


def _described(info: ValueInfo) -> str:
    if info.kind != "tensor":
        return f"{info.name} {info.kind}"
    if not info.data_type and info.shape is None:
        return f"{info.name} (type and shape not declared)"
    known = info.data_type in DataType.__members__.values()
    name = DataType(info.data_type).name.lower() if known else f"type {info.data_type}"
    if info.shape is None:
        return f"{info.name} {name} of unknown shape"
    extents = ", ".join("?" if extent is None else str(extent) for extent in info.shape)
    return f"{info.name} {name} [{extents}]"

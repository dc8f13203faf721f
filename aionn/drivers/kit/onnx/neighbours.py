"""Nodes between others, for engines that compute a node wrongly beside some others.

Owns which neighbours are kept apart, by ``Dialect``. The nodes between them change no number.
"""

from __future__ import annotations

import msgspec
import numpy as np

from aionn.drivers.kit.onnx.graph import Graph
from aionn.models.onnx.encoding import attribute
from aionn.models.onnx.schema import NodeProto

__all__ = ["keep_apart"]

_SUMS = frozenset(("Add", "Sub"))
_PRODUCTS = frozenset(("Mul", "Div"))
_VIEWS = frozenset(("Flatten", "Reshape", "Squeeze", "Unsqueeze"))


def keep_apart(g: Graph) -> None:
    """Writes nodes between neighbours that must be kept apart. After all nodes were written."""
    dialect = g.dialect
    if (
        dialect.has_separate_constants
        and dialect.has_views_beside_transposes
        and dialect.has_moved_reductions
    ):
        return
    nodes, g.nodes = g.nodes, []
    writers: dict[str, NodeProto] = {}
    transposed = {node.inputs[0] for node in nodes if node.op_type == "Transpose"}
    for node in nodes:
        inputs = list(node.inputs)
        for place, name in enumerate(inputs):
            if g.types.get(name) == "float32" and _is_spoilt(g, node, name, writers.get(name), transposed):
                g.operation_index = int(node.name[1:].partition(".")[0])
                inputs[place] = _copied(g, name)
        kept = msgspec.structs.replace(node, inputs=tuple(inputs))
        # For all readers: an engine removes nodes that change nothing, and then considers the next ones.
        if not dialect.has_moved_reductions and _drops_axes(g, kept):
            _write_in_two(g, kept)
        else:
            g.nodes.append(kept)
        writers.update(dict.fromkeys(node.outputs, kept))


def _is_spoilt(g: Graph, node: NodeProto, name: str, writer: NodeProto | None, transposed: set[str]) -> bool:
    """Whether a node must be given a copy of one of its inputs."""
    if writer is None:
        return False
    if node.op_type in _VIEWS and not g.dialect.has_views_beside_transposes:
        return name in transposed
    if g.dialect.has_separate_constants or not _has_constant(g, node) or not _has_constant(g, writer):
        return False
    if node.op_type in _PRODUCTS:
        return writer.op_type in _SUMS or writer.op_type in _PRODUCTS
    return node.op_type in _SUMS and writer.op_type in _SUMS


def _has_constant(g: Graph, node: NodeProto) -> bool:
    return any(name in g.initializers for name in node.inputs)


def _drops_axes(g: Graph, node: NodeProto) -> bool:
    """Whether it reduces along some axes, which its result does not have."""
    if not node.op_type.startswith("Reduce") or len(node.inputs) < 2 or node.inputs[1] not in g.initializers:
        return False
    return any(one.name == "keepdims" and one.value == 0 for one in node.attributes)


def _write_in_two(g: Graph, node: NodeProto) -> None:
    """Writes a reduction that keeps its axes, and a Squeeze of these: the same numbers."""
    others = [one for one in node.attributes if one.name != "keepdims"]
    whole = f"{node.outputs[0]}.whole"
    g.nodes.append(
        msgspec.structs.replace(node, outputs=(whole,), attributes=(*others, attribute("keepdims", 1)))
    )
    g.types[whole] = g.types[node.outputs[0]]
    g.operation_index = int(node.name[1:].partition(".")[0])
    g.emit_to(node.outputs[0], "Squeeze", [whole, node.inputs[1]])


def _copied(g: Graph, name: str) -> str:
    """The same floats, NaN included, by nodes that no engine takes away: a choice by whether each equals itself."""
    is_number = g.emit("Equal", [name, name])
    return g.emit("Where", [is_number, name, g.constant(np.nan, "float32")])

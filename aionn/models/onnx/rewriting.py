"""Changes of the resolved graph before operations are written: activations are fused with the operators before them.

Invariant: the changed graph computes the same results.

Source: the activations of the HAL's operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from aionn.hal import FusedActivation
from aionn.models.onnx.graph import Graph, Node, names_within
from aionn.models.onnx.schema import AttributeType
from aionn.models.onnx.tensors import Array

__all__ = ["fuse_activations", "uses_of"]

FUSING = {
    "Add", "Sub", "Mul", "Div", "Sum", "Conv", "ConvTranspose", "BatchNormalization", "Gemm", "MatMul", "MaxPool", "AveragePool",
}  # fmt: skip
"""Operators whose operations can apply an activation to their results."""

_RANGES = {
    (0.0, math.inf): FusedActivation.RELU,
    (-1.0, 1.0): FusedActivation.RELU1,
    (0.0, 6.0): FusedActivation.RELU6,
}

Constant = Callable[[str], Array | None]


def uses_of(graph: Graph) -> Counter[str]:
    """Number of reads of each name, by nodes, by graphs within them, and as an output."""
    uses = Counter(name for node in graph.nodes for name in (*node.inputs, *names_within(node)))
    uses.update(info.name for info in graph.outputs)
    return uses


def fuse_activations(graph: Graph, constant: Constant) -> None:
    """Fuse an activation with the operator before it if no other node reads that operator's result; it becomes an Identity.

    Args:
        graph: The graph to change.
        constant: Returns the array of a constant by its name, None for other values.
    """
    uses = uses_of(graph)
    writers = {node.outputs[0]: node for node in graph.nodes if node.outputs and not node.domain}
    for name, node in writers.items():
        if node.op_type == "Constant" and not node.inputs:
            continue
        activation = _activation(node, constant, writers)
        before = writers.get(node.inputs[0]) if node.inputs else None
        if activation is None or before is None or before.op_type not in FUSING or uses[node.inputs[0]] != 1:
            continue
        if before.activation or len(list(filter(None, before.outputs))) != 1:
            continue
        before.activation = activation
        node.op_type, node.attributes, node.inputs = "Identity", {}, node.inputs[:1]
        assert name == node.outputs[0], "an activation keeps its name"


def _activation(node: Node, constant: Constant, writers: dict[str, Node]) -> FusedActivation | None:
    if node.op_type == "Relu":
        return FusedActivation.RELU
    if node.op_type != "Clip":
        return None
    if node.version < 11:
        limits = []
        for key, default in (("min", -math.inf), ("max", math.inf)):
            attribute = node.attributes.get(key)
            if attribute is not None and attribute.type != AttributeType.FLOAT:
                return None
            limits.append(default if attribute is None else float(attribute.value))
        return _RANGES.get((limits[0], limits[1]))
    limits = [-math.inf, math.inf]
    for position, name in enumerate(node.inputs[1:3]):
        if not name:
            continue
        array = constant(name)
        if array is None or array.size != 1 or array.dtype.kind != "f":
            return None
        limits[position] = float(array.reshape(-1)[0])
    return _RANGES.get((limits[0], limits[1]))

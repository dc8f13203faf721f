"""If, Loop and Scan whose course is known at import: the nodes of their graphs are converted once for each iteration.

Owns the choice of a branch, the number of iterations, the values that one iteration hands to the next, and the results that all
iterations write together. ``Around`` converts the nodes.

Invariants:
1. An iteration count or a condition that no constant decides is ``Inexpressible``.
2. The iterations of a file together convert at most ``UNROLLED_NODES_MAX`` nodes.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from aionn.models.onnx.extending import AnyTensor
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.schema import AttributeType, GraphProto
from aionn.models.onnx.tensors import Array, Inexpressible, Tensor

__all__ = [
    "CONTROL_FLOW",
    "UNROLLED_NODES_MAX",
    "Around",
    "Body",
    "Held",
    "Inputs",
    "TensorList",
    "constant_of",
    "stacked",
]

UNROLLED_NODES_MAX = 20_000
"""Nodes that the iterations of all loops of a file convert together, with one for each iteration. They take some two seconds; a
recurrent cell of 20 nodes over 1,000 steps has as many."""


class TensorList(msgspec.Struct, frozen=True, eq=False):
    """A sequence of values.

    Attributes:
        items: The values.
    """

    items: tuple[AnyTensor, ...]


Held = AnyTensor | TensorList
"""The values that names of a graph can have."""

Inputs = Sequence[Held | None]


class Body(Protocol):
    """A graph within a node."""

    def __call__(self, inputs: Sequence[Held], /) -> list[Held]:
        """Converts its nodes for these inputs, and returns its outputs."""
        ...


class Around(Protocol):
    """The conversion of the graph around a node."""

    def body(self, graph: GraphProto) -> Body:
        """A graph within the node."""
        ...

    def apply(self, op_type: str, inputs: Sequence[AnyTensor], **attributes: int) -> AnyTensor:
        """The result of an operator of version 13 for these inputs."""
        ...

    def charge(self, size_bytes: int) -> None:
        """Takes bytes from the budget of the import, before they take memory."""
        ...

    def constant(self, array: Array) -> AnyTensor:
        """A constant."""
        ...


def _graph(op: Operator, name: str, inputs: int, outputs: int) -> GraphProto:
    """A graph attribute with this number of inputs, and at least this number of outputs."""
    graph = op.raw(name, AttributeType.GRAPH)
    if not isinstance(graph, GraphProto):
        op.refuse(f"attribute {name!r}", "a graph", "none")
    if len(graph.inputs) != inputs or len(graph.outputs) < outputs:
        op.refuse(
            f"attribute {name!r}",
            f"a graph with {inputs} inputs and {outputs} outputs",
            f"one with {len(graph.inputs)} and {len(graph.outputs)}",
        )
    return graph


def constant_of(op: Operator, value: Held | None, what: str) -> bool | int:
    """The number or truth value of a constant with one element.

    Raises:
        Inexpressible: The value is not a constant.
    """
    array = value.array if isinstance(value, Tensor) else None
    if array is None:
        raise Inexpressible(f"{what} that is not a constant")
    if array.size != 1 or array.dtype.kind not in "biu":
        op.refuse(what, "one number or truth value", f"{array.size} of type {array.dtype}")
    number: bool | int = array.reshape(-1)[0].item()
    return number


def _given(op: Operator, values: Inputs) -> list[Held]:
    if any(value is None for value in values):
        op.refuse("inputs", "a value for each input of the graph", "an omitted one")
    return [value for value in values if value is not None]


def branch(around: Around, op: Operator, inputs: Inputs) -> list[Held]:
    """The outputs of the branch of an If that a constant condition chooses."""
    condition = constant_of(op, inputs[0] if inputs else None, "a condition")
    graphs = [_graph(op, name, 0, len(op.node.outputs)) for name in ("else_branch", "then_branch")]
    return around.body(graphs[bool(condition)])([])


def loop(around: Around, op: Operator, inputs: Inputs) -> list[Held]:
    """The results of a Loop: the last values that iterations hand on, then the values of all iterations."""
    count, condition = (inputs[i] if i < len(inputs) else None for i in (0, 1))
    limit = None if count is None else int(constant_of(op, count, "a trip count"))
    goes_on = condition is None or bool(constant_of(op, condition, "a condition"))
    carried = _given(op, inputs[2:])
    graph = _graph(op, "body", 2 + len(carried), 1 + len(carried))
    body = around.body(graph)
    collected: list[list[Held]] = [[] for _ in graph.outputs[1 + len(carried) :]]
    done = 0
    while goes_on and (limit is None or done < limit):
        numbers = [around.constant(np.array(done, np.int64)), around.constant(np.array(True))]
        results = body([*numbers, *carried])
        goes_on = bool(constant_of(op, results[0], "a condition of an iteration"))
        for values, result in zip(collected, results[1 + len(carried) :], strict=True):
            values.append(result)
        carried = results[1 : 1 + len(carried)]
        done += 1
    return [*carried, *(stacked(around, values, 0) for values in collected)]


def _tensors(values: Sequence[Held]) -> list[AnyTensor]:
    tensors = [value for value in values if not isinstance(value, TensorList)]
    if len(tensors) != len(values):
        raise Inexpressible("a sequence in each iteration")
    return tensors


def stacked(around: Around, values: Sequence[Held], axis: int) -> AnyTensor:
    """Values of one shape along a new axis."""
    if not values:
        raise Inexpressible("results of no iteration")
    axes = around.constant(np.array([axis], np.int64))
    parts = [around.apply("Unsqueeze", [value, axes]) for value in _tensors(values)]
    return parts[0] if len(parts) == 1 else around.apply("Concat", parts, axis=axis)


def _picked(around: Around, value: AnyTensor, index: int, axis: int) -> AnyTensor:
    return around.apply("Gather", [value, around.constant(np.array(index, np.int64))], axis=axis)


def _length(op: Operator, values: Sequence[AnyTensor], axes: Sequence[int]) -> int:
    """The common extent of the scanned values."""
    extents = set()
    for value, axis in zip(values, axes, strict=True):
        if value.shape is None:
            raise Inexpressible("a scanned value whose extents are not known")
        extents.add(value.shape[op.axis(axis, len(value.shape))])
    if len(extents) != 1:
        op.refuse("scanned inputs", "one length", sorted(extents))
    (length,) = extents
    if length < 0:
        raise Inexpressible("a scanned value whose extents are not known")
    return length


def scan(around: Around, op: Operator, inputs: Inputs) -> list[Held]:
    """The results of a Scan: the last values that iterations hand on, then the values of all iterations."""
    scanned = op.integer("num_scan_inputs")
    has_batches = op.version < 9
    if has_batches and inputs and inputs[0] is not None:
        raise Inexpressible("sequences of different lengths")
    values = _given(op, inputs[1:] if has_batches else inputs)
    if not 1 <= scanned <= len(values):
        op.refuse("attribute 'num_scan_inputs'", f"1 to {len(values)}", scanned)
    states = len(values) - scanned
    graph = _graph(op, "body", len(values), states)
    outputs = len(graph.outputs) - states
    axes = _listed(op, "scan_input_axes", scanned)
    backwards = _listed(op, "directions" if has_batches else "scan_input_directions", scanned)
    output_axes = _listed(op, "scan_output_axes", outputs)
    output_backwards = _listed(op, "scan_output_directions", outputs)
    body = around.body(graph)

    def one(given: Sequence[Held]) -> list[Held]:
        carried, sources = list(given[:states]), _tensors(given[states:])
        length = _length(op, sources, axes)
        collected: list[list[Held]] = [[] for _ in range(outputs)]
        for step in range(length):
            slices = [
                _picked(around, source, length - 1 - step if is_back else step, axis)
                for source, axis, is_back in zip(sources, axes, backwards, strict=True)
            ]
            results = body([*carried, *slices])
            carried = results[:states]
            for listed, result in zip(collected, results[states:], strict=True):
                listed.append(result)
        for listed, is_back in zip(collected, output_backwards, strict=True):
            if is_back:
                listed.reverse()
        whole = [stacked(around, *each) for each in zip(collected, output_axes, strict=True)]
        return [*carried, *whole]

    if not has_batches:
        return one(values)
    tensors = _tensors(values)
    batches = [
        one([_picked(around, value, batch, 0) for value in tensors])
        for batch in range(_length(op, tensors, [0] * len(tensors)))
    ]
    return [stacked(around, results, 0) for results in zip(*batches, strict=True)]


def _listed(op: Operator, name: str, count: int) -> list[int]:
    """A list of numbers, all zeros by default."""
    numbers = op.integers(name) or [0] * count
    if len(numbers) != count:
        op.refuse(f"attribute {name!r}", f"{count} numbers", len(numbers))
    return numbers


CONTROL_FLOW: Mapping[str, Callable[[Around, Operator, Inputs], list[Held]]] = {
    "If": branch,
    "Loop": loop,
    "Scan": scan,
}
"""The function that returns the outputs, by operator."""

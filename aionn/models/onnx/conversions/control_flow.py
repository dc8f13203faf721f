"""If, Loop and Scan: the nodes of their graphs are converted in their place where the course is known at import, once for each
iteration. Otherwise an If becomes an IF, and a Loop a WHILE, with nested graphs; so does a Loop of more iterations than there is
room for.

Owns the choice of a branch, the number of iterations, the values that one iteration hands to the next, the results that all
iterations write together, and the agreement of branches and iterations. ``Around`` converts the nodes.

Invariants:
1. Results of all iterations of a Loop that no constant decides are ``Inexpressible``, since their extents would be unknown; so are
   branches and iterations whose results differ in shape.
2. The iterations of a file together convert at most ``UNROLLED_NODES_MAX`` nodes; a value that a nested graph reads counts as one.
3. The nested graphs of an operation read the same values from outside, as its inputs.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from aionn.hal import OperationType
from aionn.models.builder import Value
from aionn.models.onnx.extending import AnyTensor
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.schema import AttributeType, GraphProto
from aionn.models.onnx.tensors import INT32, Array, Inexpressible, Tensor
from aionn.models.onnx.writer import GraphWriter

__all__ = [
    "CONTROL_FLOW",
    "UNROLLED_NODES_MAX",
    "Around",
    "Body",
    "Held",
    "Inputs",
    "Nested",
    "State",
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


class State(NamedTuple):
    """A value that the operation with nested graphs hands to them.

    Attributes:
        tensor: The initial value.
        limits: Least and largest number that it may have; None means any.
    """

    tensor: Tensor
    limits: tuple[int, int] | None = None


class Nested(NamedTuple):
    """Graphs within a node, converted as nested graphs.

    Attributes:
        outer: The writer of the graph around them.
        passed: Values of that graph, in the order of their inputs: the state, then other values that they read.
        inner: The writer of each.
        state: The state as each reads it.
        results: The outputs of each.
    """

    outer: GraphWriter
    passed: Sequence[Value]
    inner: Sequence[GraphWriter]
    state: Sequence[Sequence[Tensor]]
    results: Sequence[Sequence[Held]]


class Around(Protocol):
    """The conversion of the graph around a node."""

    def nested(
        self, graphs: Sequence[GraphProto | None], state: Sequence[State] = (), places: Sequence[int] = ()
    ) -> Nested:
        """Graphs within the node as nested graphs with the same inputs.

        Args:
            graphs: The graphs; None for one that only reads the state.
            state: The first inputs of the nested graphs.
            places: For each input of the graphs its place in the state.
        """
        ...

    def body(self, graph: GraphProto) -> Body:
        """A graph within the node."""
        ...

    def room(self) -> int:
        """Number of nodes that iterations may still convert."""
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
    """The results of an If: of the branch that a constant condition chooses, or of an IF."""
    condition = inputs[0] if inputs else None
    count = len(op.node.outputs)
    graphs = [_graph(op, name, 0, count) for name in ("else_branch", "then_branch")]
    if not isinstance(condition, Tensor) or condition.array is not None:
        is_then = constant_of(op, condition, "a condition")
        return around.body(graphs[bool(is_then)])([])
    _check_single(op, condition, "b", "a condition")
    nested = around.nested(graphs[::-1])
    then, other = ([_sized(value) for value in results[:count]] for results in nested.results)
    for a, b in zip(then, other, strict=True):
        if a.dtype != b.dtype:
            op.refuse("branches", "results of one type", f"{a.dtype} and {b.dtype}")
        if a.shape != b.shape:
            raise Inexpressible("branches whose results differ in shape")
    return [*_chosen(condition, nested, then, other)]


def _sized(value: Held) -> Tensor:
    if not isinstance(value, Tensor):
        raise Inexpressible("a sequence, or a value of unknown extents, between nested graphs")
    return value


def _check_same_quantisation(values: Sequence[Value], others: Sequence[Value]) -> None:
    for a, b in zip(values, others, strict=True):
        one, other = a.operand, b.operand
        if (one.type, one.scale, one.zero_point) != (other.type, other.scale, other.zero_point):
            raise Inexpressible("results of nested graphs that differ in quantisation")


def _chosen(
    condition: Tensor, nested: Nested, then: Sequence[Tensor], other: Sequence[Tensor]
) -> list[Tensor]:
    """The results of an IF."""
    outer, pairs = nested.outer, list(zip(then, other, strict=True))
    # An order of axes that an operation made needs no TRANSPOSE, and constants have every order.
    orders = [(a if a.array is None else b).order for a, b in pairs]
    graphs, sides = [], []
    for inner, results in zip(nested.inner, (then, other), strict=True):
        graph, values = inner.end(map(inner.form, results, orders))
        graphs.append(graph)
        sides.append(values)
    _check_same_quantisation(*sides)
    truth = outer.reshaped(outer.form(condition), (1,))
    likes = [value.operand for value in sides[0]]
    written = outer.emit_nested(OperationType.IF, [truth, *graphs, *nested.passed], likes)
    return [
        outer.tensor(
            value,
            a.dtype,
            a.shape,
            order=order,
            limits=(min(a.limits[0], b.limits[0]), max(a.limits[1], b.limits[1])),
        )
        for value, order, (a, b) in zip(written, orders, pairs, strict=True)
    ]


def loop(around: Around, op: Operator, inputs: Inputs) -> list[Held]:
    """The results of a Loop: the last values that iterations hand on, then the values of all iterations."""
    carried = _given(op, inputs[2:])
    graph = _graph(op, "body", 2 + len(carried), 1 + len(carried))
    count, condition = (inputs[i] if i < len(inputs) else None for i in (0, 1))
    ways = [_unrolled, _repeated]
    if _is_too_long(around, graph, count, len(carried)):
        ways.reverse()
    try:
        return [*ways[0](around, op, graph, count, condition, carried)]
    except Inexpressible as e:
        reason = e
    try:
        return [*ways[1](around, op, graph, count, condition, carried)]
    except Inexpressible as e:
        raise Inexpressible(f"{reason}, with {e}") from e


def _is_too_long(around: Around, graph: GraphProto, count: Held | None, carried: int) -> bool:
    """Whether a constant trip count is larger than the import has room for, and small enough for a WHILE to count to it. A file
    that states a larger one means a loop that its condition ends, as does one whose condition changes between iterations.
    """
    if not _keeps_condition(graph):
        return False
    array = count.array if isinstance(count, Tensor) else None
    if array is None or array.size != 1 or array.dtype.kind not in "iu":
        return False
    number, results = int(array.reshape(-1)[0]), len(graph.outputs) - 1 - carried
    nodes = (
        number * (_node_count(graph) + 1 + results) + results
    )  # With those that join the results of all iterations.
    return number <= INT32[1] and nodes > around.room()


def _node_count(graph: GraphProto) -> int:
    """The nodes of a graph and of the graphs in it. Each was read, so that they nest no deeper than a file may."""
    values = (attribute.value for node in graph.nodes for attribute in node.attributes)
    inner = (value for value in values if isinstance(value, GraphProto))
    return len(graph.nodes) + sum(map(_node_count, inner))


def _keeps_condition(graph: GraphProto) -> bool:
    """Whether the body of a Loop hands on the condition that it got, or a constant."""
    name = graph.outputs[0].name
    made_by = {output: node for node in graph.nodes for output in node.outputs}
    while name in made_by and made_by[name].op_type == "Identity":
        name = made_by.pop(name).inputs[0]
    return name not in made_by or made_by[name].op_type == "Constant"


def _unrolled(
    around: Around,
    op: Operator,
    graph: GraphProto,
    count: Held | None,
    condition: Held | None,
    carried: Sequence[Held],
) -> Sequence[Held]:
    limit = None if count is None else int(constant_of(op, count, "a trip count"))
    goes_on = condition is None or bool(constant_of(op, condition, "a condition"))
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


def _repeated(
    around: Around,
    op: Operator,
    graph: GraphProto,
    count: Held | None,
    condition: Held | None,
    carried: Sequence[Held],
) -> Sequence[Held]:
    """The results of a WHILE. Its state: the values that iterations hand on, the number of the iteration, whether there is another
    one, and the number of iterations if there is a limit.
    """
    values = [_sized(value) for value in carried]
    size = len(values)
    if any(op.node.outputs[size:]):
        raise Inexpressible("results of all iterations")
    goes_on = Tensor("bool", (), array=np.array(True)) if condition is None else _sized(condition)
    _check_single(op, goes_on, "b", "a condition")
    state = [
        *map(State, values),
        State(Tensor("int64", (), array=np.array(0)), (0, INT32[1])),
        State(goes_on),
    ]
    if count is not None:
        state.append(State(_limit(op, _sized(count))))
    nested = around.nested([None, graph], state, (size, size + 1, *range(size)))
    decides, repeats = nested.inner
    number, goes, *limits = (decides.form(tensor) for tensor in nested.state[0][size:])
    for limit in limits:
        is_left = decides.emit(OperationType.LESS, [number, limit], decides.truth)
        goes = decides.emit(OperationType.LOGICAL_AND, [is_left, goes])
    results = [_sized(value) for value in nested.results[1][: 1 + size]]
    _check_single(op, results[0], "b", "a condition of an iteration")
    for before, after in zip(values, results[1:], strict=True):
        if before.dtype != after.dtype:
            op.refuse("attribute 'body'", f"a result of type {before.dtype}", after.dtype)
        if before.shape != after.shape:
            raise Inexpressible("iterations whose results differ in shape")
    following = repeats.emit(OperationType.ADD, [repeats.form(nested.state[1][size]), repeats.int32s([1]), 0])
    last = [repeats.form(after, before.order) for before, after in zip(values, results[1:], strict=True)]
    again = repeats.reshaped(repeats.form(results[0]), (1,))
    condition_graph, _ = decides.end([goes])
    body_graph, outputs = repeats.end([*last, following, again])
    _check_same_quantisation(outputs, nested.passed[: len(outputs)])
    written = nested.outer.emit_nested(
        OperationType.WHILE,
        [condition_graph, body_graph, *nested.passed],
        [value.operand for value in outputs[:size]],
    )
    return [
        nested.outer.tensor(value, tensor.dtype, tensor.shape, order=tensor.order)
        for value, tensor in zip(written, values, strict=True)
    ]


def _check_single(op: Operator, value: Tensor, kinds: str, what: str) -> None:
    if value.size != 1 or np.dtype(value.dtype).kind not in kinds:
        expected = "one truth value" if kinds == "b" else "one whole number"
        op.refuse(what, expected, f"{value.size} of type {value.dtype}")


def _limit(op: Operator, count: Tensor) -> Tensor:
    """The number of iterations as 32 bits hold it: a loop that only its condition ends has the largest number."""
    _check_single(op, count, "iu", "a trip count")
    return (
        count if count.array is None else Tensor("int64", (), array=np.clip(count.array.reshape(()), *INT32))
    )


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

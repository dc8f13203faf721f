"""The graph of an ONNX file, resolved: every node with its version, functions inlined, nodes in an order in which they can run.

Owns names, operator sets, functions, and the extents and values that a caller gives for inputs, but not the meaning of operators.

Invariants:
1. Every name is written once, by an input, a constant or a node, and read only after that.
2. A node's ``version`` is that of its domain's operator set in the model, or in the function that the node comes from.
3. Functions that call themselves, or expand to more than ``NODES_MAX`` nodes or ``RENAMED_MAX`` names, are rejected.
4. A node has a text of bounded length as its name, whatever the length of the names in the file.

Source: "Graphs", "Functions" and "Operator Sets" of the ONNX IR specification.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import FusedActivation
from aionn.models.foreign_files import shortened
from aionn.models.onnx.schema import (
    Attribute,
    AttributeType,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OpsetImport,
    SparseTensorProto,
    TensorProto,
    ValueInfo,
)

__all__ = ["Bindings", "Functions", "Graph", "Node", "in_order", "inner_nodes", "names_within", "resolve"]

NODES_MAX = 200_000
"""Nodes of a graph with its functions inlined. The largest exported language models have some ten thousand."""

CALLS_MAX = 64
"""Largest depth of calls between functions. Exporters nest them as deep as modules, about ten."""

RENAMED_MAX = 1_000_000
"""Names and attributes that calls of functions are given, with those of the graphs within their nodes. A function of some kilobytes
may have a hundred thousand, and be called as often; exported models have some hundred thousand in all calls."""

SHOWN = 100
"""Characters of a name that errors show. A name may be as long as the file, and every call of a function repeats those in it."""

WHERE_SHOWN = 300
"""The same for the names of all nodes around a node."""

VERSION_OF_OLD_FILES, IR_VERSION_WITH_OPSETS = 1, 3
"""Files of earlier versions of the format state no operator sets: they mean this version of ONNX's own."""

OPSETS = range(1, 29)
"""Versions of the main operator set that the conversions were written for."""

EXTENT_MAX = (1 << 31) - 1
"""The HAL's arguments hold extents as INT32 numbers."""


class Node(msgspec.Struct, eq=False):
    """A node.

    Attributes:
        op_type: The operator's name.
        domain: Its domain, empty for ONNX's own.
        version: The version of the domain's operator set.
        inputs: Names; an empty one means an omitted input.
        outputs: Names; an empty one means an omitted output.
        attributes: The attributes by name.
        where: The name of the node in errors.
        activation: The activation that is applied to its first output.
        opsets: The version by domain, for the graphs within it.
    """

    op_type: str
    domain: str
    version: int
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Attribute]
    where: str
    activation: FusedActivation = FusedActivation.NONE
    opsets: Mapping[str, int] = {}

    @property
    def label(self) -> str:
        """The operator's name with its domain."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


class Graph(msgspec.Struct, eq=False):
    """A resolved graph.

    Attributes:
        inputs: The inputs that a caller supplies; constants that the file lists as inputs are excluded.
        outputs: The outputs that a caller receives.
        nodes: The nodes in an order in which they can run.
        constants: The constants by name.
        opsets: The version by domain.
        functions: Inlines the calls in graphs within nodes.
    """

    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    nodes: list[Node]
    constants: dict[str, TensorProto | SparseTensorProto]
    opsets: dict[str, int]
    functions: Functions


def resolve(model: ModelProto) -> Graph:
    """The graph of a file.

    Raises:
        InvalidModel: Names, versions or functions break the specification.
    """
    opsets = _opsets(model.opsets, "the model")
    if not opsets and model.ir_version < IR_VERSION_WITH_OPSETS:
        opsets[""] = VERSION_OF_OLD_FILES
    graph = model.graph
    constants = _constants(graph)
    _check_inputs(graph)
    inputs = tuple(info for info in graph.inputs if info.name not in constants)
    functions: dict[tuple[str, str, str], FunctionProto] = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name, function.overload)
        if key in functions:
            raise InvalidModel(
                f"onnx, function {function.name!r}: expected every function once, got it again"
            )
        functions[key] = function
    calls = Functions(functions)
    nodes = calls.inlined(graph.nodes, opsets)
    known = [constants, {info.name for info in inputs}]
    return Graph(inputs, graph.outputs, in_order(nodes, known, graph.outputs), constants, opsets, calls)


class Bindings(msgspec.Struct):
    """The extents and values that the caller gives for the inputs."""

    dimensions: Mapping[str, int]
    input_shapes: Mapping[str, Sequence[int]]
    values: Mapping[str, Any]

    def check_names(self, graph: Graph) -> None:
        """Checks that the file has every given name."""
        names = {info.name for info in graph.inputs}
        open_ = {extent for info in graph.inputs for extent in info.shape or () if isinstance(extent, str)}
        for what, given, known in (
            ("dimensions", self.dimensions, open_),
            ("input_shapes", self.input_shapes, names),
            ("values", self.values, names),
        ):
            unknown = sorted(set(given) - known)
            if unknown:
                raise InvalidArgument(f"{what}: expected names among {sorted(known)}, got {unknown}")

    def check_complete(self, graph: Graph) -> None:
        """Checks that every open extent of an input is given."""
        names: list[str] = []
        inputs: list[str] = []
        for info in graph.inputs:
            if info.name in self.values or info.name in self.input_shapes or info.kind != "tensor":
                continue
            extents: Sequence[int | str | None] = (None,) if info.shape is None else info.shape
            names += [each for each in extents if isinstance(each, str) and each not in self.dimensions]
            inputs += [info.name] if None in extents else []
        if not names and not inputs:
            return
        named, unnamed = list(dict.fromkeys(names)), list(dict.fromkeys(inputs))
        ways = []
        if named:
            ways.append("dimensions={" + ", ".join(f"{name!r}: ..." for name in named) + "}")
            ways.append(" ".join(f"--dimension {name}=..." for name in named))
        if unnamed:
            ways.append("input_shapes={" + ", ".join(f"{name!r}: ..." for name in unnamed) + "}")
            ways.append(" ".join(f"--input-shape {name}=..." for name in unnamed))
        what = [
            *(f"extent {name!r}" for name in named),
            *(f"the shape of input {name!r}" for name in unnamed),
        ]
        raise InvalidArgument(
            f"inputs: expected all extents, got a file that leaves open {', '.join(what)}; "
            f"give them as {' or '.join(ways)}"
        )

    def shape(self, info: ValueInfo) -> tuple[int, ...]:
        """The shape of an input with all extents known."""
        given = self.input_shapes.get(info.name)
        if info.shape is None:
            if given is None:
                raise InvalidArgument(f"input {info.name!r}: its shape is open; give it in input_shapes")
            return _extents(info.name, given)
        if given is not None and len(given) != len(info.shape):
            raise InvalidArgument(
                f"shape of input {info.name!r}: expected {len(info.shape)} extents, got {len(given)}"
            )
        extents = []
        for axis, extent in enumerate(info.shape):
            stated = given[axis] if given is not None else None
            if isinstance(extent, str):
                extent = self.dimensions.get(extent, stated if stated is not None else extent)
            if extent is None:
                extent = stated
            if extent is None or isinstance(extent, str):
                how = f"dimensions={{{extent!r}: ...}}" if extent else f"input_shapes={{{info.name!r}: ...}}"
                raise InvalidArgument(f"input {info.name!r}: extent {axis} is open; give it as {how}")
            if stated not in (None, extent):
                raise InvalidArgument(
                    f"shape of input {info.name!r}: expected {extent} on axis {axis}, got {stated}"
                )
            extents.append(extent)
        return _extents(info.name, extents)


def _extents(name: str, extents: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(int(extent) for extent in extents)
    if any(not 0 <= extent <= EXTENT_MAX for extent in shape):
        raise InvalidArgument(
            f"shape of input {name!r}: expected extents up to {EXTENT_MAX}, got {list(shape)}"
        )
    return shape


def inner_nodes(
    graph: GraphProto, node: Node, functions: Functions, outer: Sequence[Container[str]]
) -> list[Node]:
    """The nodes of a graph within a node, with functions inlined, in order.

    Args:
        graph: The inner graph.
        node: The node whose attribute the graph is.
        functions: Those of the file.
        outer: Collections of the names that are defined outside the graph.
    """
    nodes = functions.inlined(graph.nodes, node.opsets, f"{node.where}, ")
    _check_inputs(graph)
    inputs = {info.name for info in graph.inputs}
    return in_order(nodes, [*outer, _constants(graph), inputs], graph.outputs)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _opsets(imports: Sequence[OpsetImport], what: str) -> dict[str, int]:
    versions: dict[str, int] = {}
    for one in imports:
        domain = _domain(one.domain)
        if versions.setdefault(domain, one.version) != one.version:
            raise InvalidModel(f"onnx, {what}: expected one version of operator set {domain!r}, got two")
    version = versions.get("")
    if version is not None and version not in OPSETS:
        newer = "; the model is newer than this reader" if version > OPSETS[-1] else ""
        raise InvalidModel(
            f"onnx, {what}: expected operator set {OPSETS[0]} to {OPSETS[-1]} of ai.onnx, got {version}{newer}"
        )
    return versions


def _check_inputs(graph: GraphProto) -> None:
    names = [info.name for info in graph.inputs]
    if len(set(names)) != len(names) or "" in names:
        name = "" if "" in names else next(name for name, count in Counter(names).items() if count > 1)
        got = f"{shortened(name, SHOWN)!r} again" if name else "an empty name"
        raise InvalidModel(f"onnx, inputs: expected every name once, got {got}")


def _constants(graph: GraphProto) -> dict[str, TensorProto | SparseTensorProto]:
    constants: dict[str, TensorProto | SparseTensorProto] = {}
    named: list[tuple[str, TensorProto | SparseTensorProto]] = [(t.name, t) for t in graph.initializers]
    named += [(sparse.values.name, sparse) for sparse in graph.sparse_initializers]
    for name, proto in named:
        if not name or name in constants:
            raise InvalidModel(f"onnx, constants: expected every name once, got {name!r} again")
        constants[name] = proto
    return constants


def _node(proto: NodeProto, index: int, opsets: Mapping[str, int], where: str = "") -> Node:
    domain = _domain(proto.domain)
    attributes = {one.name: one for one in proto.attributes}
    name = f" {shortened(proto.name, SHOWN)!r}" if proto.name else ""
    label = f"{shortened(where, WHERE_SHOWN)}node {index}{name} {shortened(proto.op_type, SHOWN)}"
    if len(attributes) != len(proto.attributes):
        raise InvalidModel(f"onnx, {label}: expected every attribute once")
    return Node(
        proto.op_type,
        domain,
        opsets.get(domain, 0),
        list(proto.inputs),
        list(proto.outputs),
        attributes,
        label,
        opsets=opsets,
    )


class Functions:
    """The functions of a file, whose calls are replaced by their nodes.

    Args:
        functions: By domain, name and overload.
    """

    def __init__(self, functions: Mapping[tuple[str, str, str], FunctionProto]) -> None:
        self._functions = functions
        self._opsets = {
            key: _opsets(f.opsets, f"function {shortened(f.name, SHOWN)!r}") for key, f in functions.items()
        }
        self._count = 0
        self._renamed = 0

    def inlined(self, protos: Sequence[NodeProto], opsets: Mapping[str, int], where: str = "") -> list[Node]:
        """The nodes of a graph with all calls replaced, in the order of the file.

        Args:
            protos: The nodes.
            opsets: The version by domain.
            where: Begins the names of the nodes.

        Raises:
            InvalidModel: A call does not fit its function, or there are too many nodes in all graphs together.
        """
        nodes: list[Node] = []
        for index, proto in enumerate(protos):
            self._add(nodes, proto, _node(proto, index, opsets, where), 0)
        return nodes

    def charge(self, count: int) -> None:
        """Counts names and attributes that a call is given.

        Raises:
            InvalidModel: All calls together have too many.
        """
        self._renamed += count
        if self._renamed > RENAMED_MAX:
            raise InvalidModel(
                f"onnx: expected at most {RENAMED_MAX} names and attributes in all calls of functions, got more"
            )

    def _add(self, nodes: list[Node], proto: NodeProto, node: Node, depth: int) -> None:
        self._count += 1
        if self._count > NODES_MAX:
            raise InvalidModel(f"onnx: expected at most {NODES_MAX} nodes with functions inlined, got more")
        key = (node.domain, node.op_type, proto.overload)
        function = self._functions.get(key)
        if function is None:
            if not node.domain and not node.version:
                raise InvalidModel(
                    f"onnx, {node.where}: expected a version of operator set ai.onnx, which neither the model nor a function "
                    "around the node states, got none"
                )
            nodes.append(node)
            return
        if depth >= CALLS_MAX:
            raise InvalidModel(
                f"onnx, {node.where}: expected functions that nest at most {CALLS_MAX} deep, got deeper ones"
            )
        if len(node.inputs) > len(function.inputs) or len(node.outputs) > len(function.outputs):
            raise InvalidModel(
                f"onnx, {node.where}: expected at most {len(function.inputs)} inputs and {len(function.outputs)} outputs, "
                f"got {len(node.inputs)} and {len(node.outputs)}"
            )
        self.charge(
            len(function.inputs) + len(function.outputs) + len(function.defaults) + len(node.attributes)
        )
        names = {"": ""}
        names.update(dict.fromkeys(function.inputs, ""))
        names.update(zip(function.inputs, node.inputs))
        prefix = f"{self._count}:{shortened(function.name, SHOWN)}/"
        # The function also writes an output that the call omits, under an unused name.
        names.update({inner: outer for inner, outer in zip(function.outputs, node.outputs) if outer})
        given = {one.name: one for one in function.defaults} | node.attributes
        renaming = _Renaming(names, prefix, given, self.charge)
        for index, inner in enumerate(function.nodes):
            renamed = renaming.node(inner)
            self._add(nodes, renamed, _node(renamed, index, self._opsets[key], f"{node.where}, "), depth + 1)


class _Renaming:
    """Gives a function's nodes the names and attributes of one call."""

    def __init__(
        self,
        names: dict[str, str],
        prefix: str,
        given: Mapping[str, Attribute],
        charge: Callable[[int], None],
    ) -> None:
        self._names = names
        self._prefix = prefix
        self._given = given
        self._charge = charge

    def _name(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:
            # A number makes the beginning of a long name differ from all others.
            short = name if len(name) <= SHOWN else f"{len(self._names)}:{name[:SHOWN]}"
            found = self._names[name] = self._prefix + short
        return found

    def node(self, proto: NodeProto) -> NodeProto:
        self._charge(len(proto.inputs) + len(proto.outputs) + len(proto.attributes))
        attributes = []
        for one in proto.attributes:
            if one.reference:
                # If the call omits the attribute, the node omits it as well.
                if one.reference in self._given:
                    attributes.append(msgspec.structs.replace(self._given[one.reference], name=one.name))
            elif one.type == AttributeType.GRAPH:
                attributes.append(msgspec.structs.replace(one, value=self._graph(one.value)))
            elif one.type == AttributeType.GRAPHS:
                attributes.append(msgspec.structs.replace(one, value=tuple(map(self._graph, one.value))))
            else:
                attributes.append(one)
        return msgspec.structs.replace(
            proto,
            inputs=tuple(map(self._name, proto.inputs)),
            outputs=tuple(map(self._name, proto.outputs)),
            attributes=tuple(attributes),
        )

    def _graph(self, graph: GraphProto | None) -> GraphProto:
        def infos(values: tuple[ValueInfo, ...]) -> tuple[ValueInfo, ...]:
            return tuple(msgspec.structs.replace(info, name=self._name(info.name)) for info in values)

        graph = graph or GraphProto()
        self._charge(
            len(graph.inputs) + len(graph.outputs) + len(graph.initializers) + len(graph.sparse_initializers)
        )
        return GraphProto(
            tuple(map(self.node, graph.nodes)),
            infos(graph.inputs),
            infos(graph.outputs),
            tuple(msgspec.structs.replace(t, name=self._name(t.name)) for t in graph.initializers),
            tuple(
                msgspec.structs.replace(
                    s, values=msgspec.structs.replace(s.values, name=self._name(s.values.name))
                )
                for s in graph.sparse_initializers
            ),
            (),
            graph.name,
        )


_GRAPHS = (AttributeType.GRAPH, AttributeType.GRAPHS)


def names_within(node: Node) -> Iterator[str]:
    """The names that graphs within a node read: all values from outside that they may use."""
    pending = [one for one in node.attributes.values() if one.type in _GRAPHS]
    while pending:
        one = pending.pop()
        graphs = (
            one.value
            if one.type == AttributeType.GRAPHS
            else (one.value,)
            if one.type == AttributeType.GRAPH
            else ()
        )
        for graph in graphs:
            if graph is None:
                continue
            yield from (info.name for info in graph.outputs)
            for inner in graph.nodes:
                yield from inner.inputs
                pending += inner.attributes


def _reads(node: Node) -> set[str]:
    return {name for name in (*node.inputs, *names_within(node)) if name}


def in_order(
    nodes: Sequence[Node], known: Sequence[Container[str]], outputs: Sequence[ValueInfo]
) -> list[Node]:
    """The nodes that the outputs need, sorted; nodes that are in order already stay in order.

    Args:
        nodes: The nodes.
        known: Collections of other names; none is gone through, since each of many branches knows the names of the whole file.
        outputs: The outputs.

    Raises:
        InvalidModel: A name is written twice, or read and never written, or nodes depend on each other in a cycle.
    """
    writer: dict[str, int] = {}

    def is_known(name: str) -> bool:
        return any(name in names for names in known)

    for index, node in enumerate(nodes):
        for name in filter(None, node.outputs):
            if name in writer or is_known(name):
                raise InvalidModel(
                    f"onnx, {node.where}: expected every name to be written once, got {name!r} again"
                )
            writer[name] = index
    for info in outputs:
        if info.name not in writer and not is_known(info.name):
            raise InvalidModel(f"onnx, output {info.name!r}: expected a name that is written, got none")
    sources: dict[int, set[int]] = {}
    pending = [writer[info.name] for info in outputs if info.name in writer]
    while pending:
        index = pending.pop()
        if index in sources:
            continue
        node = nodes[index]
        for name in node.inputs:
            if name and name not in writer and not is_known(name):
                raise InvalidModel(f"onnx, {node.where}: expected inputs that are written, got {name!r}")
        sources[index] = {writer[name] for name in _reads(node) if name in writer}
        pending += sources[index]
    return [nodes[index] for index in _sorted(sources, nodes)]


def _sorted(sources: dict[int, set[int]], nodes: Sequence[Node]) -> list[int]:
    followers: dict[int, list[int]] = {}
    for index, needed in sources.items():
        for source in needed:
            followers.setdefault(source, []).append(index)
    ready = [index for index, needed in sources.items() if not needed]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for follower in followers.get(index, ()):
            sources[follower].discard(index)
            if not sources[follower]:
                heapq.heappush(ready, follower)
    if len(order) != len(sources):
        stuck = nodes[min(set(sources) - set(order))]
        raise InvalidModel(f"onnx, {stuck.where}: expected nodes without a cycle of dependencies, got one")
    return order

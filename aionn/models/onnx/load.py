"""Imports ONNX files: ``load_onnx`` makes a ``hal.Model`` of a file.

Owns the order of the import and the description of the result: names, types, the origin of each operation. ``schema`` and
``constants`` read the file, ``graph`` resolves names, ``writer`` writes operations, ``operators`` has the table of conversions.

Invariants:
1. A file either becomes a model whose operations keep their contracts, or is rejected with one ``InvalidModel``, for any bytes.
2. If the HAL cannot express operators, that error lists all of them with their counts.
3. The model holds its own copy of the constants; the file is not needed afterwards.
4. Inputs and outputs have ONNX's order of axes.

Source: the ONNX IR specification; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from aionn.errors import Error, InvalidArgument, InvalidModel, ResourceExhausted
from aionn.hal import Model, Operand
from aionn.models.foreign_files import error_of_file, shortened
from aionn.models.onnx.constants import ConstantReader, UnsupportedType
from aionn.models.onnx.conversions.control_flow import (
    CONTROL_FLOW,
    UNROLLED_NODES_MAX,
    Body,
    Held,
    Nested,
    State,
    TensorList,
)
from aionn.models.onnx.conversions.sequences import SEQUENCES
from aionn.models.onnx.extending import AnyTensor, extended, needs_extension
from aionn.models.onnx.extension.contracts import CONTRACTS
from aionn.models.onnx.extension.narrow import CARRIERS, NAMES
from aionn.models.onnx.folding import fold
from aionn.models.onnx.graph import Bindings, Graph, Node, inner_nodes, names_within, resolve
from aionn.models.onnx.operator import (
    Operator,
    UnsupportedOperator,
    UnsupportedOperators,
    check_types,
    read_constant,
    unsupported,
)
from aionn.models.onnx.operators import CONVERSIONS
from aionn.models.onnx.rewriting import fuse_activations, uses_of
from aionn.models.onnx.schema import (
    Attribute,
    AttributeType,
    DataType,
    GraphProto,
    ValueInfo,
    read_model,
)
from aionn.models.onnx.tensors import EXTENSION_STORED, OPERAND_TYPES, Inexpressible, OpenTensor, Tensor
from aionn.models.onnx.writer import GraphWriter
from aionn.platform.files import read_regular

__all__ = ["OnnxArgument", "OnnxModel", "UnsupportedOperator", "UnsupportedOperators", "load_onnx"]

FILE_BYTES_MAX = (1 << 31) - 1
"""The largest protobuf message: its lengths are 31 bits; larger models keep their constants in other files."""

LISTED_SHOWN = 20_000
"""Characters of an error that lists the open extents of a file: those of a hundred inputs fit."""

DEPTH_MAX = 32
"""Largest depth of nested branches, the same as the limit for nested graphs of a file."""

APPLIED_VERSION = 13
"""The version of the operators that iterations of a Loop or Scan add: Gather, Unsqueeze and Concat."""


class OnnxArgument(msgspec.Struct, frozen=True):
    """An input or output of an imported model.

    Attributes:
        name: The value's name in the file.
        operand: Its operand in ``model.main``: ``type``, ``dimensions``, ``scale`` and ``zero_point``.
        dimensions: Its shape in the file with all extents known. The operand's shape differs for rank 0, which becomes [1], and
            for more than four axes, of which the leading ones are merged. None if only the execution knows the extents.
        dtype: numpy's name of the file's element type; ``int64`` values are TENSOR_INT32, ``float64`` ones TENSOR_FLOAT32.
    """

    name: str
    operand: Operand
    dimensions: tuple[int, ...] | None = ()
    dtype: str = ""


class OnnxModel(msgspec.Struct, frozen=True):
    """An imported file.

    Attributes:
        model: The model of HAL operations.
        inputs: The inputs in the order of the arguments; constants that the file lists as inputs are excluded.
        outputs: The outputs in the order of the results.
        operation_names: A name per operation, such as ``CONV_2D of node 3 'conv1' Conv``.
        opsets: The version by domain; the empty domain is ONNX's own.
        unused_inputs: Names of inputs that no output depends on.
    """

    model: Model
    inputs: tuple[OnnxArgument, ...]
    outputs: tuple[OnnxArgument, ...]
    operation_names: tuple[str, ...]
    opsets: dict[str, int]
    unused_inputs: tuple[str, ...] = ()


def load_onnx(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    *,
    dimensions: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Any] | None = None,
    external_data: str | os.PathLike[str] | None = None,
    extensions: Literal["needed", "none"] = "needed",
) -> OnnxModel:
    """Imports a file.

    Args:
        source: Its path, or its bytes.
        dimensions: Extents by the names that the file gives to open ones, such as ``{"batch": 1}``.
        input_shapes: Shapes by the names of inputs, for open extents without a name.
        values: Arrays by the names of inputs that become constants, such as shapes and switches; the model has no such inputs then.
        external_data: The folder of other files with constants; None means the file's own folder, or no such files if ``source`` is
            bytes.
        extensions: ``needed`` writes operators that HAL operations cannot express as operations of the extension ``ai.onnx``,
            ``none`` rejects them.

    Raises:
        InvalidModel: The file is damaged, or has operators that the HAL cannot express; all of these are listed.
        InvalidArgument: The path cannot be read, or names no regular file; an extent is open and not given, or does not fit.
        ResourceExhausted: The file does not fit into memory.
    """
    folder = external_data
    if isinstance(source, bytes | bytearray | memoryview):
        where, data = "model", bytes(source)
    else:
        where, data = f"model {os.fsdecode(source)}", read_regular(source, "model", FILE_BYTES_MAX)
        folder = folder or os.path.dirname(os.path.abspath(os.fsdecode(source)))
    bound = Bindings(dimensions or {}, input_shapes or {}, values or {})
    if extensions not in ("needed", "none"):
        raise InvalidArgument(f"extensions: expected 'needed' or 'none', got {extensions!r:.80}")
    try:
        graph = resolve(read_model(data))
        return _Import(graph, ConstantReader(folder), bound, extends=extensions == "needed").run()
    except MemoryError as e:
        raise ResourceExhausted(f"{where}: expected constants that fit into memory, got too many") from e
    except UnsupportedOperators as e:
        raise UnsupportedOperators(f"{where}: {e}", e.operators) from e
    except InvalidModel as e:
        raise error_of_file(where, data, e) from e
    except InvalidArgument as e:
        raise InvalidArgument(f"{where}: {shortened(str(e), LISTED_SHOWN)}") from e


def _dtype(info: ValueInfo) -> str:
    if info.kind != "tensor":
        raise Inexpressible(f"a {info.kind}")
    known = info.data_type in DataType.__members__.values()
    name = NAMES.get(DataType(info.data_type)) if known else None
    if name is None:
        raise Inexpressible(f"values of type {DataType(info.data_type).name if known else info.data_type}")
    return name


def _in_type(array: Any, dtype: str) -> Any:
    """Numbers in the type that holds those of their input, if they have its type, or are whole and fit; other arrays are returned
    as they are.
    """
    held = CARRIERS.get(dtype, dtype)
    if array.dtype.name == dtype:
        return array.astype(held, copy=False)
    if array.dtype.kind not in "iu" or np.dtype(held).kind not in "iuf":
        return array
    converted = array.astype(held)
    return converted if np.array_equal(converted, array) else array


class _Missing(Exception):
    """A value is missing, since the operator that writes it cannot be expressed."""


NO_CONVERSION = "the importer has no conversion for this operator"

NAMES_PER_NODE = 64
"""Inputs and constants of a graph that an iteration replaces in the time in which it converts a node."""

_UNFORESEEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions for faults of a file that no check finds; they are reported as the file's as well."""


def _is_convertible(node: Node, *, extends: bool) -> bool:
    if node.domain:
        return False
    return any(node.op_type in table for table in (CONVERSIONS, CONTROL_FLOW, SEQUENCES)) or (
        extends and node.op_type in CONTRACTS
    )


class _Import:
    """One import: values by name, and the operators that cannot be expressed."""

    def __init__(self, graph: Graph, reader: ConstantReader, bound: Bindings, *, extends: bool) -> None:
        self._graph = graph
        self._extends = extends
        self._reader = reader
        self._bound = bound
        self._g = GraphWriter()
        self._values: dict[str, Held | None] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        self._uses: Counter[str] = Counter()
        self._unrolled = 0

    def run(self) -> OnnxModel:
        graph = self._graph
        self._bound.check_names(graph)
        self._bound.check_complete(graph)
        inputs = self._inputs()
        fuse_activations(graph, self._constant)
        self._uses = uses_of(graph)
        for node in graph.nodes:
            self._node(node, 0)
        outputs = []
        for info in graph.outputs:
            try:
                outputs.append(self._tensor(info.name))
            except _Missing:
                continue
            except Inexpressible as e:
                self._failures["output", str(e)] += 1
        if self._failures:
            raise unsupported(self._failures)
        if not outputs:
            raise InvalidModel("onnx: expected a graph with outputs, got none")
        try:
            model, names = self._g.finish(outputs)
        except Inexpressible as e:
            raise InvalidModel(f"onnx, outputs: the HAL cannot express {e}") from e
        if not model.main.operations:
            raise InvalidModel("onnx: expected a graph with operations, got one that computes nothing")
        read = {index for operation in model.main.operations for index in operation.inputs}
        if read.isdisjoint(model.main.input_indexes):
            # A device cannot be given a model without inputs.
            raise InvalidModel("onnx: expected outputs that depend on inputs, got constants only")
        return OnnxModel(
            model,
            tuple(
                OnnxArgument(n, o, t.shape, t.dtype)
                for (n, t), o in zip(inputs, model.main.inputs, strict=True)
            ),
            tuple(
                OnnxArgument(i.name, o, None if isinstance(t, OpenTensor) else t.shape, t.dtype)
                for i, o, t in zip(graph.outputs, model.main.outputs, outputs, strict=True)
            ),
            names,
            graph.opsets,
            tuple(name for name, _ in inputs if not self._uses[name]),
        )

    def _inputs(self) -> list[tuple[str, Tensor]]:
        inputs = []
        for info in self._graph.inputs:
            self._g.source = f"input {info.name!r}"
            try:
                dtype = _dtype(info)
                if info.name in self._bound.values:
                    if dtype in CARRIERS and dtype not in OPERAND_TYPES:
                        raise Inexpressible(f"a given value of type {dtype}")
                    array = _in_type(np.asarray(self._bound.values[info.name]), dtype)
                    shape = info.shape
                    fits = shape is None or (
                        len(shape) == array.ndim
                        and all(
                            not isinstance(e, int) or e == s for e, s in zip(shape, array.shape, strict=True)
                        )
                    )
                    if not fits or array.dtype.name != CARRIERS.get(dtype, dtype):
                        raise InvalidArgument(
                            f"value of input {info.name!r}: expected {dtype} {shape}, got {array.dtype} {array.shape}"
                        )
                    self._values[info.name] = self._g.constant(self._g.rounded(array, dtype), dtype)
                    continue
                types = EXTENSION_STORED if self._extends else OPERAND_TYPES
                extents = self._bound.shape(info)
                if self._extends and 0 in extents:
                    # It has one possible value, and devices take no inputs without elements.
                    array = np.zeros(extents, CARRIERS.get(dtype, dtype))
                    self._values[info.name] = Tensor(dtype, extents, array=array)
                    continue
                tensor = self._g.input(dtype, extents, types)
            except Inexpressible as e:
                self._failures["input", str(e)] += 1
                self._values[info.name] = None
                continue
            self._values[info.name] = tensor
            inputs.append((info.name, tensor))
        return inputs

    # Values

    def _constant(self, name: str) -> Any:
        """The array of a constant of the file or of an input with a given value, else None."""
        if name in self._graph.constants or name in self._bound.values:
            try:
                tensor = self._value(name)
            except (_Missing, Inexpressible):
                return None
            return tensor.array if isinstance(tensor, Tensor) else None
        return None

    def _value(self, name: str) -> Held:
        if name not in self._values:
            proto = self._graph.constants.get(name)
            if proto is None:
                raise _Missing(name)
            try:
                self._values[name] = read_constant(self._reader, proto)
            except UnsupportedType as e:
                raise Inexpressible(f"a constant of type {e}") from e
            except _UNFORESEEN as e:
                if isinstance(e, Error):
                    raise
                raise InvalidModel(f"onnx, constant {name!r}: unforeseen contents: {e!r}") from e
        tensor = self._values[name]
        if tensor is None:
            raise _Missing(name)
        return tensor

    def _tensor(self, name: str) -> AnyTensor:
        value = self._value(name)
        if isinstance(value, TensorList):
            raise Inexpressible("a sequence")
        return value

    # Nodes

    def _node(self, node: Node, depth: int) -> None:
        self._g.source = node.where
        try:
            inputs = [self._value(name) if name else None for name in node.inputs]
            results = self._converted(node, inputs, depth)
        except (Inexpressible, _Missing, UnsupportedType) as e:
            if not isinstance(e, _Missing):
                self._failures[node.label, str(e)] += 1
            elif not _is_convertible(node, extends=self._extends):
                # Found although its inputs are missing, so that one error lists all unknown operators.
                self._failures[node.label, NO_CONVERSION] += 1
            for name in filter(None, node.outputs):
                self._values.setdefault(name, None)
            return
        except _UNFORESEEN as e:
            if isinstance(e, Error):
                raise
            raise InvalidModel(f"onnx, {node.where}: unforeseen contents: {e!r}") from e
        if any(node.outputs[len(results) :]):
            raise InvalidModel(
                f"onnx, {node.where}: expected at most {len(results)} outputs, got {len(node.outputs)}"
            )
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                self._values[name] = result

    def _converted(self, node: Node, given: Sequence[Held | None], depth: int) -> Sequence[Held]:
        """The outputs of a node: by HAL operations, or by an operation of the extension if that is not possible."""
        is_sole = bool(node.inputs) and depth == 0 and self._uses[node.inputs[0]] == 1
        known = [tensor if isinstance(tensor, Tensor) else None for tensor in given]
        op = Operator(node, known, self._reader, is_sole_reader=is_sole)
        around, kind = _Around(self, node, depth), "" if node.domain else node.op_type
        if kind in CONTROL_FLOW:
            return CONTROL_FLOW[kind](around, op, given)
        if kind in SEQUENCES:
            return [SEQUENCES[kind](around, op, given)]
        inputs = [value for value in given if not isinstance(value, TensorList)]
        if len(inputs) < len(given):
            if kind == "Identity":
                return [value for value in given if value is not None]
            raise Inexpressible("a sequence")
        check_types(op, inputs)
        try:
            if needs_extension(node.op_type, inputs):
                raise Inexpressible("values that only operations of the extension can read")
            return self._by_hal(node, op)
        except Inexpressible as e:
            if not self._extends:
                raise
            reason = e
        try:
            return extended(self._g, op, inputs)
        except Inexpressible:
            raise reason from None

    def _by_hal(self, node: Node, op: Operator) -> Sequence[AnyTensor]:
        folded = fold(self._g, op)
        if folded is not None:
            op.check_attributes()
            return [folded]
        conversion = CONVERSIONS.get(node.op_type) if not node.domain else None
        if conversion is None:
            raise Inexpressible(NO_CONVERSION)
        converted = conversion.convert(self._g, op)
        op.check_attributes()
        results = [converted] if isinstance(converted, Tensor) else converted
        if any(node.outputs[len(results) :]):
            raise Inexpressible("an output beyond the first")
        return results

    # Graphs within nodes

    def body(self, graph: GraphProto, node: Node, depth: int) -> Body:
        """The conversion of a graph within a node."""
        if depth >= DEPTH_MAX:
            raise InvalidModel(
                f"onnx, {node.where}: expected graphs that nest at most {DEPTH_MAX} deep, got deeper ones"
            )
        # The names of a graph are local, so those from outside are restored after each iteration: these alone, as a file may have
        # as many graphs as names.
        values, constants = self._values, self._graph.constants
        nodes = inner_nodes(graph, node, self._graph.functions, [values, constants])
        own = {proto.name: proto for proto in graph.initializers}
        inputs = [info.name for info in graph.inputs]
        local = {*own, *inputs, *(name for inner in nodes for name in inner.outputs)}
        read: dict[str, Held | None] = {}
        cost = len(nodes) + 1 + (len(own) + len(inputs)) // NAMES_PER_NODE

        def convert(given: Sequence[Held]) -> list[Held]:
            self.count(node, cost)
            hidden = {name: values.pop(name) for name in local if name in values}
            stored = {name: constants[name] for name in own if name in constants}
            try:
                constants.update(own)
                values.update(read)
                values.update(zip(inputs, given, strict=True))
                for inner in nodes:
                    self._node(inner, depth + 1)
                # The constants that were read stay the same tensors in the next iteration.
                read.update((name, values[name]) for name in own if name in values)
                return [self._value(info.name) for info in graph.outputs]
            finally:
                for name in local:
                    values.pop(name, None)
                for name in own:
                    constants.pop(name, None)
                constants.update(stored)
                values.update(hidden)

        return convert

    def nested(
        self,
        graphs: Sequence[GraphProto | None],
        state: Sequence[State],
        places: Sequence[int],
        node: Node,
        depth: int,
    ) -> Nested:
        """Graphs within a node as nested graphs. A value of this graph becomes an input of each, a constant one of its own."""
        outer, values = self._g, self._values
        read_names = dict.fromkeys(names_within(node))
        names = [name for name in read_names if name in values]
        # Each becomes an operand of each graph, though one node may read any number of them.
        constants = [name for name in read_names if name in self._graph.constants and name not in values]
        self.count(node, len(names) + len(constants) + len(state))
        found = Nested(outer, [], [], [], [])
        missing: _Missing | None = None
        for graph in graphs:
            writer = outer.nested()
            passed = [outer.passed(tensor, writer, limits) for tensor, limits in state]
            entries: dict[str, Held | None] = {}
            for name in names:
                tensor = values[name]
                if tensor is None:
                    entries[name] = None
                elif not isinstance(tensor, Tensor):
                    raise Inexpressible("a sequence, or a value of unknown extents, for nested graphs")
                elif tensor.array is not None:
                    entries[name] = Tensor(
                        tensor.dtype,
                        tensor.shape,
                        array=tensor.array,
                        order=tensor.order,
                        limits=tensor.limits,
                    )
                else:
                    passed.append(outer.passed(tensor, writer, tensor.limits))
                    entries[name] = passed[-1][1]
            read = [entry for _, entry in passed[: len(state)]]
            self._g, self._values = writer, entries
            results: list[Held] = []
            try:
                if graph is not None:
                    results = self.body(graph, node, depth)([read[place] for place in places])
            except _Missing as e:
                missing = e  # After the other graphs, so that one error lists the operators of all.
            finally:
                self._g, self._values = outer, values
            found = Nested(
                outer,
                [value for value, _ in passed],
                [*found.inner, writer],
                [*found.state, read],
                [*found.results, results],
            )
        if missing is not None:
            raise missing
        return found

    def room(self) -> int:
        """Number of nodes that iterations may still convert, and of values that nested graphs may still read."""
        return UNROLLED_NODES_MAX - self._unrolled

    def count(self, node: Node, more: int) -> None:
        """Counts nodes that iterations convert and values that nested graphs read, and rejects the file beyond the limit."""
        self._unrolled += more
        if self.room() < 0:
            raise InvalidModel(
                f"onnx, {node.where}: expected at most {UNROLLED_NODES_MAX} nodes in all iterations and nested graphs, got more"
            )

    def apply(
        self, node: Node, depth: int, op_type: str, inputs: Sequence[AnyTensor], **attributes: int
    ) -> AnyTensor:
        """The result of an operator of version ``APPLIED_VERSION`` at the place of a node."""
        self.count(node, 1)
        given = {name: Attribute(name, AttributeType.INT, value) for name, value in attributes.items()}
        made = Node(op_type, "", APPLIED_VERSION, [""] * len(inputs), ["y"], given, node.where)
        (result,) = self._converted(made, inputs, depth + 1)
        assert not isinstance(result, TensorList), "operators of tensors give tensors"
        return result


class _Around(NamedTuple):
    """The import around a node with graphs; see ``Around``."""

    importer: _Import
    node: Node
    depth: int

    def body(self, graph: GraphProto) -> Body:
        return self.importer.body(graph, self.node, self.depth)

    def room(self) -> int:
        return self.importer.room()

    def nested(
        self, graphs: Sequence[GraphProto | None], state: Sequence[State] = (), places: Sequence[int] = ()
    ) -> Nested:
        return self.importer.nested(graphs, state, places, self.node, self.depth)

    def apply(self, op_type: str, inputs: Sequence[AnyTensor], **attributes: int) -> AnyTensor:
        return self.importer.apply(self.node, self.depth, op_type, inputs, **attributes)

    def charge(self, size_bytes: int) -> None:
        self.importer._g.charge(size_bytes)

    def constant(self, array: Any) -> AnyTensor:
        return Tensor(array.dtype.name, array.shape, array=array)

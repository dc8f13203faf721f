"""Builds models by hand: values, operations in any order, nested models.

Owns the way from calls to a ``hal.Model``: where constants go, the order of the operations, what is dropped, the numbering of
extensions. ``aionn.validation`` checks the model in every respect; each operation's contract is checked here, since an error is
clearest where the operation is added.

Invariants:
1. Constants of up to 128 bytes are copied when they are given; larger ones are only referred to until ``build`` and must stay
   unchanged until then. All large ones end in one pool, which is sealed against writing.
2. ``finish`` freezes a graph; a graph can be nested only when it is finished, so graphs cannot contain themselves.
3. A nested graph that is used several times, or equals another, becomes one referenced subgraph.

Source: the NN API's model builder.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import (
    EXTENSION_OPERATION_MIN,
    EXTENSION_TYPE_MIN,
    PREFERRED_ALIGNMENT_BYTES,
    ChannelQuant,
    DataLocation,
    ExtensionNameAndPrefix,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_scalar_type,
    operand_dtype,
    operation_type_name,
)
from aionn.models.trailing_defaults import droppable_count
from aionn.ops import CONTRACTS, Check

__all__ = ["ExtensionCode", "GraphBuilder", "Value"]

_logger = logging.getLogger("aionn.model")

COPIED_BYTES_MAX = 128
"""Constants up to this size are copied when they are given; the NN API's number."""

SAMPLED_BYTES = 64
"""Bytes of a large constant by which equal ones are looked for: weights differ in them."""

COMPARED_MAX = 4
"""Large constants with the same sampled bytes that a further one is compared with. A file may have thousands of them that differ in
one byte, and each comparison reads a whole constant; beyond this number they are stored without being compared."""

_TENSOR_TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "bool": OperandType.TENSOR_BOOL8,
}


class ExtensionCode(NamedTuple):
    """A type or operation of an extension: the extension's name and the low 16 bits. ``build`` assigns the prefix."""

    extension: str
    number: int


class Value:
    """An operand of a graph under construction. Made by a ``GraphBuilder``, usable in that one alone.

    Attributes:
        operand: Its known properties; lifetime and location are settled by ``build``.
    """

    __slots__ = ("_data", "_graph", "_owner", "extension", "operand")

    def __init__(self, owner: object, operand: Operand) -> None:
        self._owner = owner
        self.operand = operand
        self.extension: ExtensionCode | None = None
        self._data: npt.NDArray[Any] | None = None
        self._graph: GraphBuilder | None = None

    def __repr__(self) -> str:
        kind = OperandType(self.operand.type).name if self.extension is None else str(self.extension)
        return f"<Value {kind} {list(self.operand.dimensions)} {self.operand.lifetime.name}>"


class _Step(NamedTuple):
    type: int | ExtensionCode
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class GraphBuilder:
    """A graph under construction.

    Example::

        g = GraphBuilder()
        x = g.input(OperandType.TENSOR_FLOAT32, (1, 4))
        y = g.result(OperationType.ADD, [x, g.constant(np.ones(4, np.float32)), 0], x)
        model = g.build([y])

    Args:
        relaxed: Whether float32 may be computed with the range and precision of float16; counts for the outermost graph.
    """

    def __init__(self, *, relaxed: bool = False) -> None:
        self._relaxed = relaxed
        self._inputs: list[Value] = []
        self._steps: list[_Step] = []
        self._outputs: tuple[Value, ...] | None = None
        self._order: tuple[_Step, ...] = ()
        # Values refer to this and not to the graph, which refers to them: a circle would keep constants until it is collected.
        self._identity = object()
        self._scalars: dict[tuple[OperandType, bytes], Value] = {}

    # Values

    def input(
        self,
        type: int | ExtensionCode,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
    ) -> Value:
        """The next input of the graph."""
        value = self._new(type, dimensions, scale, zero_point, OperandLifeTime.SUBGRAPH_INPUT)
        self._inputs.append(value)
        return value

    def variable(
        self,
        type: int | ExtensionCode,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
    ) -> Value:
        """A value that some operation, added before or after, writes."""
        return self._new(type, dimensions, scale, zero_point, OperandLifeTime.TEMPORARY_VARIABLE)

    def constant(
        self,
        value: npt.ArrayLike | bytes,
        type: int | ExtensionCode | None = None,
        *,
        dimensions: Sequence[int] | None = None,
        scale: float = 0.0,
        zero_point: int = 0,
        channel_quant: ChannelQuant | None = None,
    ) -> Value:
        """A constant.

        Args:
            value: A number for a scalar, an array for a tensor, bytes for an extension's type.
            type: None takes TENSOR_FLOAT32, TENSOR_FLOAT16, TENSOR_INT32 or TENSOR_BOOL8 by the array's element type, and
                BOOL, INT32 or FLOAT32 for a Python number; lists of Python numbers have 32 bits.
            dimensions: None takes the array's shape.
            scale: See ``Operand``.
            zero_point: See ``Operand``.
            channel_quant: See ``Operand``.

        Raises:
            InvalidArgument: The value does not fit the type.
        """
        if isinstance(type, ExtensionCode):
            raw = np.frombuffer(
                np.asarray(value).tobytes() if not isinstance(value, bytes) else value, np.uint8
            )
            result = self._new(type, dimensions or (), scale, zero_point, OperandLifeTime.CONSTANT_COPY)
            return self._keep(result, raw)
        kind = self._type_of_value(value, type)
        array = _as_array(value, kind)
        is_scalar = is_scalar_type(kind)
        if is_scalar and array.size != 1:
            raise InvalidArgument(f"constant of type {kind.name}: expected one number, got {array.size}")
        shape = () if is_scalar else tuple(array.shape if dimensions is None else dimensions)
        key = (kind, array.tobytes()) if is_scalar else None
        if key in self._scalars:
            return self._scalars[key]
        result = self._new(kind, shape, scale, zero_point, OperandLifeTime.CONSTANT_COPY)
        if channel_quant is not None:
            result.operand = msgspec.structs.replace(result.operand, channel_quant=channel_quant)
        if key is not None:
            self._scalars[key] = result
        return self._keep(result, array)

    @staticmethod
    def _type_of_value(value: Any, type: int | None) -> OperandType:
        if type is not None:
            return OperandType(type)
        if isinstance(value, bool):
            return OperandType.BOOL
        if isinstance(value, int):
            return OperandType.INT32
        if isinstance(value, float):
            return OperandType.FLOAT32
        name = np.asarray(value).dtype.name
        if not isinstance(value, np.ndarray | np.generic):
            # A list of Python numbers has no width of its own.
            name = {"int64": "int32", "float64": "float32"}.get(name, name)
        if name not in _TENSOR_TYPES:
            raise InvalidArgument(
                f"constant: expected a type for elements of {name}; only {', '.join(_TENSOR_TYPES)} have one by themselves"
            )
        return _TENSOR_TYPES[name]

    def _keep(self, result: Value, array: npt.NDArray[Any]) -> Value:
        result._data = array.copy() if array.nbytes <= COPIED_BYTES_MAX else array
        return result

    def omitted(self, type: int) -> Value:
        """An optional input that is left out."""
        return self._new(type, (), 0.0, 0, OperandLifeTime.NO_VALUE)

    def graph(self, inner: GraphBuilder) -> Value:
        """A nested graph, for IF and WHILE.

        Raises:
            InvalidArgument: It is not finished.
        """
        if inner._outputs is None:
            raise InvalidArgument("nested graph: expected a finished one, got one without finish()")
        value = self._new(OperandType.SUBGRAPH, (), 0.0, 0, OperandLifeTime.SUBGRAPH)
        value._graph = inner
        return value

    def _new(
        self,
        type: int | ExtensionCode,
        dimensions: Sequence[int],
        scale: float,
        zero_point: int,
        lifetime: OperandLifeTime,
    ) -> Value:
        self._check_open()
        # The prefix of an extension's code is known only when the whole model is built; 1 replaces it until then.
        code = EXTENSION_TYPE_MIN | type.number if isinstance(type, ExtensionCode) else type
        _check_dimensions(dimensions)
        value = Value(self._identity, Operand(code, tuple(dimensions), scale, zero_point, lifetime=lifetime))
        if isinstance(type, ExtensionCode):
            value.extension = type
        return value

    # Operations

    def operation(
        self,
        type: int | ExtensionCode,
        inputs: Sequence[Value | bool | int | float],
        outputs: Sequence[Value],
        *,
        is_checked: bool = False,
    ) -> None:
        """Adds an operation; the order of the calls does not matter.

        Args:
            type: Its operation.
            inputs: Values; a Python number stands for a constant scalar.
            outputs: Variables that it writes; no other operation may.
            is_checked: Whether the caller has checked its contract with these inputs, and has the outputs' shapes from it.

        Raises:
            InvalidArgument: A value belongs to another graph, or an output is not a variable.
            InvalidModel: The operation's contract is broken.
        """
        self._check_open()
        ins = tuple(i if isinstance(i, Value) else self.constant(i) for i in inputs)
        outs = tuple(outputs)
        where = f"operation {len(self._steps)}"
        if not all(value._owner is self._identity for value in (*ins, *outs)):
            what, position = next(
                (what, position)
                for what, values in (("input", ins), ("output", outs))
                for position, value in enumerate(values)
                if value._owner is not self._identity
            )
            raise InvalidArgument(
                f"{where}, {what} {position}: expected a value of this graph, got another's"
            )
        for position, value in enumerate(outs):
            if value.operand.lifetime != OperandLifeTime.TEMPORARY_VARIABLE:
                raise InvalidArgument(f"{where}, output {position}: expected a variable, got {value!r}")
        if not isinstance(type, ExtensionCode):
            ins = ins[: len(ins) - _droppable(type, ins)]
            if not is_checked:
                _check_contract(type, ins, outs, where)
        self._steps.append(_Step(type, ins, outs))

    def result(
        self,
        type: int | ExtensionCode,
        inputs: Sequence[Value | bool | int | float],
        like: Value,
        dimensions: Sequence[int] | None = None,
    ) -> Value:
        """Adds an operation with one output and returns that: a variable like another value, of that shape unless one is given."""
        operand = like.operand
        output = self.variable(
            like.extension if like.extension is not None else operand.type,
            operand.dimensions if dimensions is None else dimensions,
            scale=operand.scale,
            zero_point=operand.zero_point,
        )
        self.operation(type, inputs, [output])
        return output

    def _check_open(self) -> None:
        if self._outputs is not None:
            raise InvalidArgument("graph: expected one that is not finished yet")

    def finish(self, outputs: Sequence[Value]) -> GraphBuilder:
        """Freezes the graph, checks that every value is written once, and sorts the operations. Returns the graph itself.

        Raises:
            InvalidArgument: It is finished already, or an output is not a variable of this graph.
            InvalidModel: A value is written twice or never, or the operations form a circle.
        """
        self._check_open()
        for position, value in enumerate(outputs):
            is_variable = value.operand.lifetime == OperandLifeTime.TEMPORARY_VARIABLE
            if value._owner is not self._identity or not is_variable:
                raise InvalidArgument(
                    f"graph output {position}: expected a variable of this graph, got {value!r}"
                )
        if len(set(map(id, outputs))) != len(outputs):
            raise InvalidArgument("graph outputs: expected every value once")
        self._order = self._sorted(outputs)
        self._outputs = tuple(outputs)
        return self

    def _sorted(self, outputs: Sequence[Value]) -> tuple[_Step, ...]:
        writer: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            for value in step.outputs:
                if id(value) in writer:
                    raise InvalidModel(
                        f"operation {index}: expected values that no other operation writes, "
                        f"got one of operation {writer[id(value)]}"
                    )
                writer[id(value)] = index
        needed = [(f"graph output {i}", value) for i, value in enumerate(outputs)]
        needed += [(f"operation {i}", value) for i, step in enumerate(self._steps) for value in step.inputs]
        for where, value in needed:
            if value.operand.lifetime == OperandLifeTime.TEMPORARY_VARIABLE and id(value) not in writer:
                raise InvalidModel(f"{where}: expected a value that an operation writes, got {value!r}")
        waits_for = [
            {writer[id(value)] for value in step.inputs if id(value) in writer} for step in self._steps
        ]
        followers: dict[int, list[int]] = {}
        for index, sources in enumerate(waits_for):
            for source in sources:
                followers.setdefault(source, []).append(index)
        ready = [index for index, sources in enumerate(waits_for) if not sources]
        heapq.heapify(ready)
        order = []
        while ready:
            # The least index first: operations keep the order of their calls where that is free.
            index = heapq.heappop(ready)
            order.append(index)
            for follower in followers.get(index, ()):
                waits_for[follower].discard(index)
                if not waits_for[follower]:
                    heapq.heappush(ready, follower)
        if len(order) != len(self._steps):
            circle = sorted(set(range(len(self._steps))) - set(order))
            raise InvalidModel(f"operations {circle}: expected no circle, but each waits for another of them")
        return tuple(self._steps[index] for index in order)

    def build(self, outputs: Sequence[Value] | None = None) -> Model:
        """The model of this graph and those nested in it.

        Args:
            outputs: Finishes the graph first; None where it is finished.

        Raises:
            InvalidArgument: See ``finish``.
            InvalidModel: See ``finish``.
        """
        if outputs is not None:
            self.finish(outputs)
        if self._outputs is None:
            raise InvalidArgument("graph: expected outputs, or a graph that is finished")
        model = _Assembly().model(self, is_relaxed=self._relaxed)
        counts = (len(model.main.operations), len(model.main.operands), len(model.referenced))
        _logger.debug("built: %d operations, %d operands, %d referenced subgraphs", *counts)
        return model


_WHOLE = frozenset((int,))


def _check_dimensions(dimensions: Any) -> None:
    if type(dimensions) is tuple and _WHOLE.issuperset(map(type, dimensions)):
        return
    if isinstance(dimensions, str) or not isinstance(dimensions, Sequence | np.ndarray):
        raise InvalidModel(f"dimensions: expected a sequence of whole numbers, got {dimensions!r}")
    for extent in dimensions:
        if isinstance(extent, bool) or not isinstance(extent, int | np.integer):
            raise InvalidModel(
                f"dimensions: expected whole numbers (0 for an extent that is not known), got {list(dimensions)}"
            )


def _as_array(value: Any, kind: OperandType) -> npt.NDArray[Any]:
    dtype = operand_dtype(kind)
    array = np.asarray(value)
    if array.dtype != dtype:
        converted = array.astype(dtype)
        if array.dtype.kind in "iub" and not np.array_equal(converted.astype(array.dtype), array):
            raise InvalidArgument(
                f"constant of type {kind.name}: expected numbers of {dtype}, got some that do not fit"
            )
        if array.dtype.kind == "f" and dtype.kind in "iu":
            raise InvalidArgument(f"constant of type {kind.name}: expected whole numbers, got {array.dtype}")
        array = converted
    return np.ascontiguousarray(array)


def _droppable(type: int, inputs: tuple[Value, ...]) -> int:
    def constant(position: int) -> tuple[int, object] | None:
        value = inputs[position]
        if value._data is None or value._data.size != 1:
            return None
        return value.operand.type, value._data.reshape(()).item()

    return droppable_count(type, [v.operand.type for v in inputs], constant)


def _check_contract(type: int, inputs: Sequence[Value], outputs: Sequence[Value], where: str) -> None:
    if type >= EXTENSION_OPERATION_MIN:
        raise InvalidArgument(
            f"{where}: expected an ExtensionCode for an extension's operation, got {type:#x}"
        )
    if type == OperationType.OEM_OPERATION:
        return
    contract = CONTRACTS.get(type)  # type: ignore[call-overload]
    if contract is None:
        raise InvalidModel(f"{where}: expected an operation of the spec, got {operation_type_name(type)}")
    values = {id(value.operand): value for value in inputs}

    def constant(operand: Operand) -> npt.NDArray[Any] | None:
        value = values.get(id(operand))
        if value is None or value._data is None:
            return None
        return value._data.reshape(operand.dimensions)

    contract.validate(
        Check(type, [v.operand for v in inputs], [v.operand for v in outputs], where=where, constant=constant)
    )


_Bytes = npt.NDArray[np.uint8]


class _Assembly:
    """One build: the constants, extension prefixes and referenced subgraphs of all graphs."""

    def __init__(self) -> None:
        self._copied = bytearray()
        self._large: list[tuple[int, _Bytes]] = []
        self._large_bytes = 0
        self._places: dict[bytes, tuple[OperandLifeTime, DataLocation]] = {}
        self._large_places: dict[tuple[int, bytes], list[tuple[_Bytes, DataLocation]]] = {}
        self._by_address: dict[tuple[int, int], DataLocation] = {}
        self._prefixes: dict[str, int] = {}
        self._referenced: dict[Subgraph, int] = {}
        self._built: dict[int, int] = {}

    def model(self, main: GraphBuilder, *, is_relaxed: bool) -> Model:
        subgraph = self._subgraph(main)
        pools = []
        if self._large:
            pools.append(Memory.of_constants(self._large_bytes, self._large))
        return Model(
            main=subgraph,
            referenced=tuple(self._referenced),
            operand_values=bytes(self._copied),
            pools=tuple(pools),
            relax_computation_float32_to_float16=is_relaxed,
            extension_name_to_prefix=tuple(
                ExtensionNameAndPrefix(name, prefix) for name, prefix in self._prefixes.items()
            ),
        )

    def _subgraph(self, graph: GraphBuilder) -> Subgraph:
        outputs = graph._outputs
        assert outputs is not None, "only finished graphs get here"
        output_ids = set(map(id, outputs))
        indexes: dict[int, int] = {}
        operands: list[Operand] = []

        def index_of(value: Value) -> int:
            identity = id(value)
            index = indexes.get(identity)
            if index is None:
                index = indexes[identity] = len(operands)
                operands.append(self._operand(value, is_output=identity in output_ids))
            return index

        # Values that no operation uses are never asked for, and so are dropped; inputs and outputs are part of the interface.
        input_indexes = tuple(index_of(value) for value in graph._inputs)
        operations = []
        for step in graph._order:
            ins = tuple(map(index_of, step.inputs))
            outs = tuple(map(index_of, step.outputs))
            operations.append(Operation(self._code(step.type), ins, outs))
        return Subgraph(
            operands=tuple(operands),
            operations=tuple(operations),
            input_indexes=input_indexes,
            output_indexes=tuple(index_of(value) for value in outputs),
        )

    def _code(self, type: int | ExtensionCode) -> int:
        if not isinstance(type, ExtensionCode):
            return type
        prefix = self._prefixes.setdefault(type.extension, len(self._prefixes) + 1)
        return prefix * EXTENSION_TYPE_MIN | type.number

    def _operand(self, value: Value, *, is_output: bool) -> Operand:
        changes: dict[str, Any] = {}
        if is_output:
            changes["lifetime"] = OperandLifeTime.SUBGRAPH_OUTPUT
        if value.extension is not None:
            changes["type"] = self._code(value.extension)
        if value._data is not None:
            changes["lifetime"], changes["location"] = self._place(value._data)
        if value._graph is not None:
            changes["location"] = DataLocation(0, self._reference(value._graph), 0)
        return msgspec.structs.replace(value.operand, **changes)

    def _reference(self, graph: GraphBuilder) -> int:
        if id(graph) not in self._built:
            subgraph = self._subgraph(graph)
            self._built[id(graph)] = self._referenced.setdefault(subgraph, len(self._referenced))
        return self._built[id(graph)]

    def _place(self, array: npt.NDArray[Any]) -> tuple[OperandLifeTime, DataLocation]:
        if array.nbytes > COPIED_BYTES_MAX:
            return OperandLifeTime.CONSTANT_REFERENCE, self._large_place(array.reshape(-1).view(np.uint8))
        data = array.tobytes()
        if data not in self._places:
            self._copied.extend(bytes(-len(self._copied) % 8))
            place = OperandLifeTime.CONSTANT_COPY, DataLocation(0, len(self._copied), len(data))
            self._copied.extend(data)
            self._places[data] = place
        return self._places[data]

    def _large_place(self, data: _Bytes) -> DataLocation:
        # Views of the same memory are not compared: a file may have thousands of a large one.
        address = data.__array_interface__["data"][0], data.nbytes
        if address not in self._by_address:
            self._by_address[address] = self._found_place(data)
        return self._by_address[address]

    def _found_place(self, data: _Bytes) -> DataLocation:
        key = data.nbytes, data[:: data.nbytes // SAMPLED_BYTES].tobytes()
        alike = self._large_places.setdefault(key, [])
        for other, location in alike:
            if np.array_equal(other, data):
                return location
        self._large_bytes += -self._large_bytes % PREFERRED_ALIGNMENT_BYTES
        location = DataLocation(0, self._large_bytes, data.nbytes)
        self._large.append((self._large_bytes, data))
        self._large_bytes += data.nbytes
        if len(alike) < COMPARED_MAX:
            alike.append((data, location))
        return location

"""From an HAL model to an ONNX model that an engine runs.

Owns the order of the work, the model's inputs and outputs, and what an engine may do in memory that a client can change. The
other modules convert the operations.

Invariants:
1. ``lower`` either gives a model that computes every operation or raises ``Unsupported``.
2. Inputs and outputs of the ONNX model equal the HAL model's, in order, of its types, without inputs that nothing reads and outputs
   that no input decides.
3. The versions that are written are ``OPSET`` and ``IR_VERSION``, whatever is installed.

Source: the contracts in ``aionn.ops``; ``onnx.proto`` and the operators of ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.extensions import extension_code
from aionn.drivers.kit.onnx import elementwise, layers, recurrent, shapes
from aionn.drivers.kit.onnx.elementwise import Rule
from aionn.drivers.kit.onnx.extension import narrowed, write_extension
from aionn.drivers.kit.onnx.graph import Graph, Native
from aionn.drivers.kit.onnx.lowered import FULL, IR_VERSION, Argument, Dialect, Lowered
from aionn.drivers.kit.onnx.neighbours import keep_apart
from aionn.drivers.kit.onnx.patterns import Patterns
from aionn.hal import (
    EXTENSION_OPERATION_MIN,
    Model,
    Operation,
    OperationType,
    is_extension_operand_type,
    is_scalar_type,
    operand_dtype,
    operation_type_name,
)
from aionn.hal.pieces import between_pieces
from aionn.models.onnx.encoding import DATA_TYPES, encode_model
from aionn.models.onnx.extension import EXTENSION_NAME
from aionn.models.onnx.schema import GraphProto, ModelProto, NodeProto, OpsetImport, TensorProto, ValueInfo
from aionn.models.onnx.wire import PART_BYTES_MIN

__all__ = ["RULES", "lower"]

RULES: Mapping[OperationType, Rule] = {
    **elementwise.RULES,
    **layers.RULES,
    **recurrent.RULES,
    **shapes.RULES,
}


def lower(model: Model, dialect: Dialect = FULL) -> Lowered:
    """Lowers a whole model.

    Args:
        model: The model.
        dialect: Of the engine that reads the result.

    Raises:
        Unsupported: ONNX has no equivalent of something in it; the message names the operation.
    """
    return _Lowering(model, dialect).run()


class _Lowering:
    """One lowering."""

    def __init__(self, model: Model, dialect: Dialect) -> None:
        self._model = model
        self._graph = Graph(model, dialect)
        self._patterns = Patterns(self._graph)
        self._sources: dict[str, str] = {}

    def run(self) -> Lowered:
        g, main = self._graph, self._model.main
        for operand in main.inputs:
            if not is_extension_operand_type(operand.type) and is_scalar_type(operand.type):
                raise Unsupported("a scalar that is not constant")
        inputs = [self._input(position, index) for position, index in enumerate(main.input_indexes)]
        for index, operation in enumerate(main.operations):
            if index not in g.known.operations:
                g.operation_index = index
                self._operation(operation)
            between_pieces()
        # A copy: a value may be a view of the model's constants, which live no longer than the model.
        fixed = tuple(
            None if (value := g.known.values.get(index)) is None else value.copy()
            for index in main.output_indexes
        )
        outputs = [
            self._output(position, index)
            for position, index in enumerate(main.output_indexes)
            if fixed[position] is None
        ]
        check = self._check() if outputs else None
        written = outputs if check is None else [*outputs, check]
        keep_apart(g)
        self._drop_unused(written)
        readers = _readers(g.nodes)
        used = [argument for argument in inputs if argument.name in readers]
        weights = self._taken_out(readers) if outputs else ()
        return Lowered(
            self._encoded(used, written) if outputs else b"",
            tuple(argument.name in readers for argument in inputs),
            fixed,
            tuple(_marked(argument, argument.name, readers) for argument in used),
            tuple(_marked(argument, self._sources[argument.name], readers) for argument in outputs),
            check,
            frozenset(map(g.kernel, g.nodes)),
            weights,
        )

    def _taken_out(self, readers: _Readers) -> tuple[TensorProto, ...]:
        """Takes large constants out of the file, which the engine reads where they are: each copy of all weights takes as long as
        the conversion of a network."""
        g = self._graph
        if not g.dialect.takes_weights or not all(pool.is_unchanging for pool in self._model.pools):
            return ()
        taken = [
            constant
            for name, constant in g.initializers.items()
            if constant.raw is not None
            and len(constant.raw) >= PART_BYTES_MIN
            and g.types[name] in _WEIGHT_TYPES
            and _is_only_a_value(name, readers)
        ]
        for constant in taken:
            place = {"location": _BESIDE, "offset": "0", "length": str(len(constant.raw or b""))}
            g.initializers[constant.name] = msgspec.structs.replace(constant, raw=None, external=place)
        return tuple(taken)

    def _operation(self, operation: Operation) -> None:
        if operation.type >= EXTENSION_OPERATION_MIN:
            self._extension_operation(operation)
            return
        rule = RULES.get(operation.type)  # type: ignore[call-overload]
        if rule is None:
            raise Unsupported(f"{operation_type_name(operation.type)}: ONNX has no such operator")
        try:
            if not self._patterns.write(operation):
                rule(self._graph, operation)
        except Unsupported as e:
            raise Unsupported(f"{operation_type_name(operation.type)}: {e}") from e

    def _extension_operation(self, operation: Operation) -> None:
        code = extension_code(self._model, operation.type)
        if code is None or code[0] != EXTENSION_NAME:
            raise Unsupported("an operation of another extension")
        write_extension(self._graph, operation, code[1])

    def _argument(self, name: str, index: int) -> Argument:
        operand, value = self._model.main.operands[index], self._graph.value(index)
        is_extension = is_extension_operand_type(operand.type)
        dtype = value.dtype if is_extension else operand_dtype(operand.type).name
        return Argument(name, dtype, value.shape, False)

    def _input(self, position: int, index: int) -> Argument:
        g = self._graph
        argument = self._argument(f"in{position}", index)
        g.operation_index = -1
        g.types[argument.name] = argument.dtype
        value, name = g.value(index), argument.name
        if argument.dtype == "float16":
            name = g.cast(name, "float32")
        elif value.is_moved:
            name = g.unsigned(name)
        g.set(value, name)
        return argument

    def _output(self, position: int, index: int) -> Argument:
        g = self._graph
        native = g.natives.get(index)
        if native is not None and g.known.shapes[index] is None:
            return self._open_output(f"out{position}", index, native)
        argument = self._argument(f"out{position}", index)
        value = g.value(index)
        name = g.name(value)
        self._sources[argument.name] = argument.name
        if argument.dtype == "float16":
            g.emit_to(argument.name, "Cast", [name], to=int(DATA_TYPES["float16"]))
        elif value.is_moved:
            flipped = g.flipped(name)
            g.emit_to(argument.name, "Cast", [flipped], to=int(DATA_TYPES["int8"]))
        else:
            g.emit_to(argument.name, "Identity", [name])
            # Engines remove an Identity: the node that writes its input then writes the output.
            self._sources[argument.name] = name
        return argument

    def _open_output(self, name: str, index: int, native: Native) -> Argument:
        """An output whose shape only the execution knows."""
        g, operand = self._graph, self._model.main.operands[index]
        is_extension = is_extension_operand_type(operand.type)
        dtype = native.dtype if is_extension else operand_dtype(operand.type).name
        source = native.name
        if dtype != native.dtype:
            source = narrowed(g, native, dtype)
        if native.shape == ():
            source = g.reshaped(source, (1,))
        g.emit_to(name, "Identity", [source])
        self._sources[name] = source
        return Argument(name, dtype, None, False)

    def _check(self) -> Argument | None:
        """The output that reports indexes out of range."""
        g = self._graph
        if not g.checks:
            return None
        g.operation_index = -1
        name = g.checks[0] if len(g.checks) == 1 else g.emit("Max", g.checks)
        g.emit_to("check", "Reshape", [name, g.int64s([1])])
        return Argument("check", "int32", (1,), False)

    def _drop_unused(self, outputs: Sequence[Argument]) -> None:
        """Drops nodes and constants that no output needs."""
        g = self._graph
        needed = {argument.name for argument in outputs}
        nodes: list[NodeProto] = []
        for node in reversed(g.nodes):
            if needed.intersection(node.outputs):
                nodes.append(node)
                needed.update(node.inputs)
        g.nodes = nodes[::-1]
        g.initializers = {name: c for name, c in g.initializers.items() if name in needed}

    def _encoded(self, inputs: Sequence[Argument], outputs: Sequence[Argument]) -> bytes:
        g = self._graph
        infos = [
            tuple(ValueInfo(a.name, DATA_TYPES[a.dtype], a.shape) for a in arguments)
            for arguments in (inputs, outputs)
        ]
        graph = GraphProto(tuple(g.nodes), infos[0], infos[1], tuple(g.initializers.values()), name="aionn")
        return encode_model(ModelProto(IR_VERSION, (OpsetImport("", g.opset),), graph, producer_name="aionn"))


_ARITHMETIC = frozenset(
    (
        "Abs", "Add", "AveragePool", "BitwiseXor", "Cast", "Clip", "Concat", "Conv", "ConvTranspose", "DequantizeLinear", "Div",
        "Elu", "Erf", "Exp", "Floor", "Gelu", "Gemm", "GlobalAveragePool", "HardSigmoid", "InstanceNormalization", "LRN",
        "LayerNormalization", "Log", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg", "PRelu", "Pad", "Pow", "QuantizeLinear",
        "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "Relu", "Resize", "Sigmoid", "Sin", "Slice", "Softmax", "Split",
        "Sqrt", "Sub", "Tanh", "Tile", "Transpose",
    )
)  # fmt: skip
"""Operators that read each number for itself, whatever it is by then: none becomes an index, a count or a bound, and none that was
compared is compared again. Shapes, axes and bounds are constants wherever they are inputs."""

_WEIGHT_TYPES = frozenset(("float32", "uint8", "int8"))
"""Element types of constants that may be beside the file. Those of other types are short, or list extents and indexes."""

_BESIDE = "x" * 256
"""The name of another file, which a constant that is not in the file must have: one byte longer than the names that Linux has."""

_SAME_MEMORY = frozenset(("Identity", "Reshape"))
"""Operators whose output may be their input's memory."""


_Readers = Mapping[str, Sequence[NodeProto]]


def _readers(nodes: Sequence[NodeProto]) -> _Readers:
    """The nodes that read a value, by its name."""
    found: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in node.inputs:
            found.setdefault(name, []).append(node)
    return found


def _marked(argument: Argument, name: str, readers: _Readers) -> Argument:
    return msgspec.structs.replace(argument, is_in_place=_is_only_a_value(name, readers))


def _is_only_a_value(name: str, readers: _Readers) -> bool:
    """Whether a value is read only by operators to which its numbers are just numbers."""
    pending = [name]
    while pending:
        name = pending.pop()
        for node in readers.get(name, ()):
            if node.op_type in _SAME_MEMORY and node.inputs[0] == name:
                pending += node.outputs
            elif node.op_type not in _ARITHMETIC:
                return False
    return True

"""From an HAL model to a .tflite file that LiteRT runs.

Owns the order of the work, control flow, and the compositions that the importer makes of one TensorFlow Lite operator and that
become that operator again (see ``patterns``). The ``lowering_*`` modules convert the operations.

Invariants:
1. ``lower`` either gives a file that computes every operation of the model or raises ``Unsupported``.
2. Inputs and outputs of the file's main subgraph equal the model's, in order, of the model's types, without inputs that nothing
   reads and outputs that no input decides.

Source: the contracts in ``aionn.ops``; the public TensorFlow Lite schema.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aionn.drivers.kit.engines.device import LoweredModel
from aionn.drivers.kit.engines.known import Known
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert import lowering_elementwise, lowering_layers, lowering_shapes
from aionn.drivers.litert.flatbuffer_writer import VALUE_TYPES, FileWriter, SubgraphFile
from aionn.drivers.litert.graph import Graph, Value
from aionn.drivers.litert.patterns import find_patterns
from aionn.hal import (
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    constant_array,
    is_scalar_type,
    operation_type_name,
)
from aionn.hal.pieces import between_pieces

__all__ = ["RULES", "Lowered", "lower"]

RULES: Mapping[OperationType, lowering_elementwise.Rule] = {
    **lowering_elementwise.RULES,
    **lowering_layers.RULES,
    **lowering_shapes.RULES,
}


class Lowered(LoweredModel, frozen=True):
    """A model as a .tflite file.

    Attributes:
        is_static: Whether LiteRT keeps the place of every tensor from one execution to the next.
        is_input_in_place: For each input of the file, whether LiteRT may read it in memory that a client can change during the
            execution.
        is_output_in_place: For each output of the file, whether LiteRT may write it, and read it again, in such memory.
        shapes: Of the main subgraph's tensors, as the file declares them; 0 or empty where unknown. None are kept in a cache.
    """

    is_static: bool
    is_input_in_place: tuple[bool, ...]
    is_output_in_place: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...] = ()


def lower(model: Model) -> Lowered:
    """Lowers a whole model.

    Raises:
        Unsupported: LiteRT has no equivalent of something in it; the message names the operation.
    """
    return _Lowering(model).run()


class _Lowering:
    """One lowering: subgraphs in the order in which they are found."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._file = FileWriter()

    def run(self) -> Lowered:
        main = self._model.main
        for operand in main.inputs:
            if is_scalar_type(operand.type):
                raise Unsupported("a scalar that is not constant")
            if not operand.dimensions or 0 in operand.dimensions:
                raise Unsupported("an input whose shape is not known before execution")
        folded = Known(self._model, main, infers_shapes=False)
        g = Graph(self._model, main, self._file.subgraph(), folded)
        inputs = [self._main_input(g, i) for i in main.input_indexes]
        self._operations(g)
        # A copy: a result may be a view of the model's constants, which live no longer than the model.
        fixed = [
            None if (value := g.folded.values.get(i)) is None else value.copy() for i in main.output_indexes
        ]
        outputs = [
            self._main_output(g, i)
            for i, value in zip(main.output_indexes, fixed, strict=True)
            if value is None
        ]
        read = {int(i) for operator in g.file.operators for i in operator.inputs}
        is_read = tuple(i in read or i in outputs for i in inputs)
        g.file.inputs = [i for i, is_needed in zip(inputs, is_read, strict=True) if is_needed]
        g.file.outputs = outputs
        if not outputs:
            return Lowered(b"", (False,) * len(inputs), tuple(fixed), True, (), ())
        return Lowered(
            self._file.finish(),
            is_read,
            tuple(fixed),
            self._file.parts.is_static and _all_depend_on_inputs(g.file),
            tuple(_is_only_a_value(g.file, i) for i in g.file.inputs),
            tuple(_is_only_a_value(g.file, i) for i in outputs),
            tuple(g.file.shapes),
        )

    def _main_input(self, g: Graph, index: int) -> int:
        operand = g.subgraph.operands[index]
        if operand.type != OperandType.TENSOR_FLOAT16:
            return g.value(index).index
        half = g.file.tensor("float16", operand.dimensions)
        full = g.value(index)
        g.emit(
            "CAST",
            [Value(half, "float16", operand.dimensions)],
            full,
            "CastOptions",
            inDataType=1,
            outDataType=0,
        )
        return half

    def _main_output(self, g: Graph, index: int) -> int:
        operand = g.subgraph.operands[index]
        value = g.value(index)
        if operand.type != OperandType.TENSOR_FLOAT16:
            return value.index
        half = Value(g.file.tensor("float16", operand.dimensions), "float16", operand.dimensions)
        g.emit("CAST", [value], half, "CastOptions", inDataType=0, outDataType=1)
        return half.index

    def _operations(self, g: Graph) -> None:
        patterns = find_patterns(self._model, g.subgraph)
        for index, operation in enumerate(g.subgraph.operations):
            if index in g.folded.operations:
                continue
            pattern = patterns.get(index)
            try:
                if pattern is not None:
                    pattern.write(g)
                else:
                    self._operation(g, operation)
            except Unsupported as e:
                raise Unsupported(f"{operation_type_name(operation.type)}: {e}") from e
            between_pieces()

    def _operation(self, g: Graph, operation: Operation) -> None:
        if operation.type == OperationType.IF:
            self._if(g, operation)
        elif operation.type == OperationType.WHILE:
            self._while(g, operation)
        else:
            rule = RULES.get(operation.type)  # type: ignore[call-overload]
            if rule is None:
                raise Unsupported("LiteRT has no such operator")
            rule(g, operation)

    # Control flow

    def _referenced(self, g: Graph, operation: Operation, position: int) -> Subgraph:
        index = g.operand(operation, position).location.offset
        return self._model.referenced[index]

    def _write_subgraph(self, subgraph: Subgraph, extra_outputs: int) -> int:
        """Writes a referenced subgraph; the inputs after the first ones are handed on as ``extra_outputs`` more outputs."""
        self._file.parts.is_static = False
        for operand in subgraph.inputs:
            if is_scalar_type(operand.type):
                raise Unsupported("a scalar that is not constant")
        folded = Known(self._model, subgraph, with_outputs=False, infers_shapes=False)
        g = Graph(self._model, subgraph, self._file.subgraph(), folded)
        index = len(self._file.subgraphs) - 1
        inputs = [g.value(i) for i in subgraph.input_indexes]
        g.file.inputs = [v.index for v in inputs]
        self._operations(g)
        outputs = [g.value(i).index for i in subgraph.output_indexes]
        if extra_outputs:
            outputs += [v.index for v in inputs[-extra_outputs:]]
        if len(set(outputs)) != len(outputs):
            raise Unsupported("a subgraph with one value as two outputs")
        g.file.outputs = outputs
        return index

    def _if(self, g: Graph, op: Operation) -> None:
        condition = g.input(op, 0)
        then, otherwise = (self._write_subgraph(self._referenced(g, op, i), 0) for i in (1, 2))
        inputs = [g.input(op, i) for i in range(3, len(op.inputs))]
        outputs = [g.output(op, i) for i in range(len(op.outputs))]
        g.emit(
            "IF", [condition, *inputs], outputs, "IfOptions",
            thenSubgraphIndex=then, elseSubgraphIndex=otherwise,
        )  # fmt: skip

    def _while(self, g: Graph, op: Operation) -> None:
        condition, body = self._referenced(g, op, 0), self._referenced(g, op, 1)
        state = [g.input(op, i) for i in range(2, len(op.inputs))]
        if not _ends(self._model, condition, body):
            raise Unsupported("a loop that is not sure to end, since LiteRT cannot be stopped")
        kept = len(body.output_indexes)
        condition_index = self._write_subgraph(condition, 0)
        body_index = self._write_subgraph(body, len(state) - kept)
        outputs = [g.output(op, i) for i in range(len(op.outputs))]
        outputs += [g.like(state[i]) for i in range(len(outputs), len(state))]
        g.emit(
            "WHILE", state, outputs, "WhileOptions",
            condSubgraphIndex=condition_index, bodySubgraphIndex=body_index,
        )  # fmt: skip


_ARITHMETIC = frozenset(
    (
        "ADD", "AVERAGE_POOL_2D", "CONCATENATION", "CONV_2D", "DEPTHWISE_CONV_2D", "DEQUANTIZE", "DIV", "FULLY_CONNECTED",
        "LOGISTIC", "MAXIMUM", "MAX_POOL_2D", "MEAN", "MINIMUM", "MUL", "PAD", "PADV2", "QUANTIZE", "RELU", "RELU6", "SUB",
        "TANH", "TRANSPOSE", "TRANSPOSE_CONV",
    )
)  # fmt: skip
"""Operators that read each number for itself, whatever it is by then: none becomes an index, a count or a bound, and none that was
compared is compared again."""

_SAME_MEMORY = frozenset(("EXPAND_DIMS", "RESHAPE", "SQUEEZE"))
"""Operators whose output may be their input's memory."""


def _all_depend_on_inputs(file: SubgraphFile) -> bool:
    """Whether every output depends on an input. LiteRT computes others once, and in memory of its own."""
    reached = set(file.inputs)
    for operator in file.operators:
        if reached.intersection(map(int, operator.inputs)):
            reached.update(map(int, operator.outputs))
    return reached.issuperset(file.outputs)


def _is_only_a_value(file: SubgraphFile, tensor: int) -> bool:
    """Whether a float or 8-bit tensor is read only by operators to which its numbers are just numbers."""
    if file.tensors[tensor].type not in VALUE_TYPES:
        return False
    names = file.parts.codes
    for operator in file.operators:
        if tensor in operator.inputs:
            name = names[operator.opcodeIndex]
            if name in _SAME_MEMORY and operator.inputs[0] == tensor:
                if not _is_only_a_value(file, int(operator.outputs[0])):
                    return False
            elif name not in _ARITHMETIC:
                return False
    return True


_UPPER_BOUNDS = (OperationType.LESS, OperationType.LESS_EQUAL)


def _ends(model: Model, condition: Subgraph, body: Subgraph) -> bool:
    """Whether a loop is sure to end: some int32 state is below a bound that stays, and grows in every round."""
    writers = {i: o for o in condition.operations for i in o.outputs}

    def bounds(index: int) -> list[Operation]:
        writer = writers.get(index)
        if writer is None:
            return []
        if writer.type == OperationType.LOGICAL_AND:
            return [*bounds(writer.inputs[0]), *bounds(writer.inputs[1])]
        return [writer] if writer.type in _UPPER_BOUNDS else []

    for comparison in bounds(condition.output_indexes[0]):
        counter, bound = comparison.inputs
        if counter not in condition.input_indexes:
            continue
        place = condition.input_indexes.index(counter)
        if place < len(body.output_indexes) and _stays(condition, body, bound) and _grows(model, body, place):
            return True
    return False


def _stays(condition: Subgraph, body: Subgraph, bound: int) -> bool:
    """Whether the bound is the same in every round."""
    if condition.operands[bound].is_constant:
        return True
    if bound not in condition.input_indexes:
        return False
    place = condition.input_indexes.index(bound)
    return place >= len(body.output_indexes) or body.output_indexes[place] == body.input_indexes[place]


def _grows(model: Model, body: Subgraph, place: int) -> bool:
    """Whether the body adds a positive constant to the int32 state of this place."""
    target, source = body.output_indexes[place], body.input_indexes[place]
    for operation in body.operations:
        if target in operation.outputs:
            if operation.type != OperationType.ADD or source not in operation.inputs[:2]:
                return False
            other = operation.inputs[1 if operation.inputs[0] == source else 0]
            operand: Operand = body.operands[other]
            if operand.type != OperandType.TENSOR_INT32 or not operand.is_constant:
                return False
            return bool(np.all(np.asarray(constant_array(model, operand), dtype=np.int64) > 0))
    return False

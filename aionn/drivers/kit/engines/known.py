"""The shapes and the values of a subgraph that are known before execution.

Owns shape inference, by the shape rules of the contracts, and the operations over constants alone, which are computed here by the
reference's kernels. Outputs that a model declares with unknown shapes get their shapes here, so that an engine can write them
where the client wants them.

Invariants:
1. A shape that is known is the shape that the execution gives; a rule that fails leaves it unknown.
2. An operation is computed whole or not at all. An operation that its kernel rejects is left to the execution, which reports it.
3. No result is larger than ``COMPUTED_BYTES_MAX``, and all results together, with what a lowering makes by itself, are not larger
   than ``MADE_BYTES_MAX`` and some times the model's own constants.

Source: the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.support import Unsupported
from aionn.errors import Error
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    Operation,
    OperationType,
    Subgraph,
    combine_dimensions,
    constant_array,
    dimensions_are_known,
    is_extension_operand_type,
    operand_dtype,
)
from aionn.hal.pieces import between_pieces
from aionn.ops import CONTRACTS, Call, Tensor, stand_in
from aionn.ops.remembered import Results, described, key_of

__all__ = ["COMPUTED_BYTES_MAX", "MADE_BYTES_MAX", "Known"]

Shape = tuple[int, ...]

COMPUTED_BYTES_MAX = 1 << 28
"""Largest result that is computed beforehand: the weights of the largest layers in use, and far less than what a file may have."""

MADE_BYTES_MAX = 1 << 29
"""Most bytes that are computed beforehand or made by a lowering (indexes along an axis, zeros around an image) for one model,
besides ``MADE_PER_CONSTANT`` for each byte of its constants. Shapes alone decide these sizes, so a model of some kilobytes could
take any amount when a device is asked what it supports; those of real models are far smaller."""

MADE_PER_CONSTANT = 8
"""Weights of 8 bits become floats and then take another order of axes."""

_NEVER = (OperationType.IF, OperationType.WHILE, OperationType.RANDOM_MULTINOMIAL)
"""Other subgraphs are not looked into, and a sample is drawn in each execution."""

_shapes: Results[tuple[Shape, ...]] = Results()
"""The shapes that a rule gave. A rule that fails is applied again each time."""

_FAILURES = (Error, ArithmeticError, ValueError, TypeError, IndexError, MemoryError)


class Known:
    """The known shapes and values of a subgraph.

    Args:
        model: The model, validated.
        subgraph: One of its subgraphs; None means the main one.
        with_outputs: Whether operations that write outputs of the subgraph are computed as well.
        infers_shapes: Whether shapes are inferred. Without, only operations over constants are looked at.

    Attributes:
        shapes: By operand, its shape; None where it is unknown.
        values: By operand, the value of what was computed.
        operations: Indexes of the operations that need not be executed.
    """

    def __init__(
        self,
        model: Model,
        subgraph: Subgraph | None = None,
        *,
        with_outputs: bool = True,
        infers_shapes: bool = True,
    ) -> None:
        self._model = model
        self._subgraph = model.main if subgraph is None else subgraph
        self._left = frozenset() if with_outputs else frozenset(self._subgraph.output_indexes)
        self._infers_shapes = infers_shapes
        self.values: dict[int, Array] = {}
        self._constants: dict[int, Array] = {}
        self._parts: dict[int, bytes | None] = {}  # Of keys, by operand.
        self.operations: set[int] = set()
        constant_bytes = len(model.operand_values) + sum(pool.size_bytes for pool in model.pools)
        self._room_bytes = MADE_BYTES_MAX + MADE_PER_CONSTANT * constant_bytes
        self.shapes: list[Shape | None] = [
            operand.dimensions if _is_known(operand) else None for operand in self._subgraph.operands
        ]
        for index, operation in enumerate(self._subgraph.operations):
            self._look_at(index, operation)
            between_pieces()

    def value(self, index: int) -> Array | None:
        """The value of an operand that is constant, or was computed; None for others."""
        found = self.values.get(index)
        if found is None:
            found = self._constants.get(index)
        if found is not None:
            return found
        operand = self._subgraph.operands[index]
        if not operand.is_constant or is_extension_operand_type(operand.type):
            return None
        found = self._constants[index] = constant_array(self._model, operand)
        return found

    def charge(self, size_bytes: int) -> None:
        """Takes the bytes of a constant that a lowering makes by itself from the model's room, before they take memory.

        Raises:
            Unsupported: There is not enough left.
        """
        if not self._takes(size_bytes):
            raise Unsupported(f"shapes that need constants of more than {MADE_BYTES_MAX} bytes")

    def _takes(self, size_bytes: int) -> bool:
        if size_bytes > self._room_bytes:
            return False
        self._room_bytes -= size_bytes
        return True

    def _look_at(self, index: int, operation: Operation) -> None:
        contract = CONTRACTS.get(operation.type)  # type: ignore[call-overload]
        if contract is None or contract.shapes is None or operation.type in _NEVER:
            return
        if not self._left.isdisjoint(operation.outputs):
            return
        outputs = [self._subgraph.operands[place] for place in operation.outputs]
        key = self._key(operation, outputs)
        shapes = _shapes.get(key)
        if shapes is not None and operation.type != OperationType.RANK and not self._is_fixed(operation):
            self._infer(operation, outputs, shapes)
            return
        inputs: list[Tensor | None] = []
        for place in operation.inputs:
            operand = self._subgraph.operands[place]
            value = self.value(place)
            if operand.lifetime == OperandLifeTime.NO_VALUE:
                inputs.append(None)
            elif value is not None:
                inputs.append(Tensor(operand, value, is_constant=True))
            else:
                shape = self.shapes[place]
                if shape is None or not self._infers_shapes or is_extension_operand_type(operand.type):
                    return
                # A rule that uses the zeros as values gives a shape for an operation that is not supported: an input that
                # decides a shape must be constant.
                inputs.append(stand_in(operand, shape))
        call = Call(inputs, outputs, is_relaxed=self._model.relax_computation_float32_to_float16)
        try:
            shapes = tuple(tuple(int(extent) for extent in shape) for shape in contract.shapes(call))
        except _FAILURES:
            return
        _shapes.keep(key, shapes)
        self._infer(operation, outputs, shapes)
        # A rank is known with the shape.
        if operation.type == OperationType.RANK or all(t is None or t.is_constant for t in inputs):
            self._compute(index, operation, call, shapes)

    def _key(self, operation: Operation, outputs: Sequence[Operand]) -> bytes | None:
        """The key of an operation's output shapes; None if they are not remembered. Its inputs are written before."""
        if not self._infers_shapes:
            return None
        for place in operation.inputs:
            if place not in self._parts:
                operand, value = self._subgraph.operands[place], self.value(place)
                shape = self.shapes[place] if value is None else value.shape
                is_open = shape is None and operand.lifetime != OperandLifeTime.NO_VALUE
                self._parts[place] = (
                    None if is_open else described(operand, lambda _, value=value: value, shape)  # type: ignore[misc]
                )
        return key_of(
            operation.type,
            [self._parts[place] for place in operation.inputs],
            [described(operand, lambda _: None) for operand in outputs],
            is_relaxed=self._model.relax_computation_float32_to_float16,
        )

    def _is_fixed(self, operation: Operation) -> bool:
        """Whether the values of all inputs are known."""
        operands = self._subgraph.operands
        return all(
            self.value(place) is not None or operands[place].lifetime == OperandLifeTime.NO_VALUE
            for place in operation.inputs
        )

    def _infer(self, operation: Operation, outputs: Sequence[Operand], shapes: Sequence[Shape]) -> None:
        for place, operand, shape in zip(operation.outputs, outputs, shapes, strict=True):
            fits = combine_dimensions(operand.dimensions, shape) is not None or not operand.dimensions
            self.shapes[place] = shape if fits else None

    def _compute(self, index: int, operation: Operation, call: Call, shapes: Sequence[Shape]) -> None:
        sizes = []
        for place, operand, shape in zip(operation.outputs, call.outputs, shapes, strict=True):
            if self.shapes[place] is None or 0 in shape:
                return
            sizes.append(math.prod(shape) * operand_dtype(operand.type).itemsize)
        if max(sizes, default=0) > COMPUTED_BYTES_MAX or not self._takes(sum(sizes)):
            return
        try:
            with np.errstate(all="ignore"):
                results: list[Array] = list(CONTRACTS[OperationType(operation.type)].execute(call))
        except _FAILURES:
            return
        self.values.update(zip(operation.outputs, results, strict=True))
        self.operations.add(index)


def _is_known(operand: Operand) -> bool:
    if is_extension_operand_type(operand.type):
        return bool(operand.dimensions) and 0 not in operand.dimensions
    return dimensions_are_known(operand.type, operand.dimensions)

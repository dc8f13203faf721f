"""Data shared by the subgraphs of an imported model: constants, and the list of subgraphs that control flow refers to.

Owns where constants go (one pool for large ones, ``operand_values`` for small ones) and how much they may take.

Invariants:
1. Equal constants are stored once: bytes of the file by their place, made ones by their value.
2. All constants together take no more than the file plus ``SYNTHESIZED_BYTES_MAX``.

Source: section "Model" of the NN HAL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidModel
from aionn.hal import (
    PREFERRED_ALIGNMENT_BYTES,
    DataLocation,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    Operation,
    Subgraph,
    operand_dtype,
)
from aionn.models.tflite.schema import TfliteFile

__all__ = ["Array", "ModelWriter", "without_dead"]

Array = npt.NDArray[Any]

COPIED_BYTES_MAX = 128
"""Constants up to this size are copied into the model, larger ones are stored in the pool; the NN API's number."""

SYNTHESIZED_BYTES_MAX = 16 << 20
"""Limit for constants that the file does not contain, such as biases of zeros. Real models need kilobytes."""

OPERATIONS_PER_OPERATOR = 12
"""Limit of a composition on average; the longest of a fixed length, the exact GELU, has some thirty."""

OPERATIONS_MAX = 4096
"""Additional limit for compositions that grow with a shape, such as CUMSUM."""

SEARCHES_MAX = 64
"""Most means of a file whose rounding is matched exactly: a search takes milliseconds, and real models have a few dozen."""

_VALUE_ALIGNMENT_BYTES = 8


class ModelWriter:
    """Collects what all subgraphs share: constants, and the subgraphs that control flow refers to.

    Attributes:
        file: The file to import.
        wanted: The referenced subgraphs in the order of their HAL indexes: the file's index, and how many outputs are kept.
        searches_left: Number of exact means that may still be searched for.
    """

    def __init__(self, file: TfliteFile) -> None:
        self.file = file
        self.wanted: list[tuple[int, int]] = []
        self.searches_left = SEARCHES_MAX
        self._indexes: dict[tuple[int, int], int] = {}
        operator_count = sum(len(subgraph.operators) for subgraph in file.subgraphs)
        self._operations_left = OPERATIONS_MAX + OPERATIONS_PER_OPERATOR * operator_count
        self._copied = bytearray()
        self._referenced: list[tuple[int, memoryview]] = []
        self._referenced_bytes = 0
        self._places: dict[tuple[int, int] | bytes, tuple[OperandLifeTime, DataLocation]] = {}
        self._values: dict[tuple[OperandLifeTime, DataLocation], memoryview] = {}
        self._budget_bytes = len(file.data) + SYNTHESIZED_BYTES_MAX

    def reference(self, subgraph_index: int, output_count: int) -> int:
        """The HAL's index of a subgraph, which is imported later with its first ``output_count`` outputs."""
        key = (subgraph_index, output_count)
        if key not in self._indexes:
            self._indexes[key] = len(self.wanted)
            self.wanted.append(key)
        return self._indexes[key]

    def charge_operation(self) -> None:
        """Counts an operation.

        Raises:
            InvalidModel: The file's operators unfold to more operations than any real model's.
        """
        self._operations_left -= 1
        if self._operations_left < 0:
            raise InvalidModel(
                f"tflite: expected operators that become at most {OPERATIONS_PER_OPERATOR} operations each and {OPERATIONS_MAX} "
                "beyond, got more"
            )

    def check_budget(self, size_bytes: int) -> None:
        """Demands that constants of this size may still be made. Call it before they take memory.

        Raises:
            InvalidModel: The file asks for more constants than it can justify.
        """
        if size_bytes > self._budget_bytes:
            raise InvalidModel(
                f"tflite: constants that the operators imply take more than {SYNTHESIZED_BYTES_MAX} bytes over the file's size"
            )

    def place_range(self, offset: int, length: int) -> tuple[OperandLifeTime, DataLocation]:
        """Stores bytes of the file as a constant, once."""
        return self._place((offset, length), memoryview(self.file.data)[offset : offset + length])

    def place_bytes(self, value: bytes) -> tuple[OperandLifeTime, DataLocation]:
        """Stores a constant, once."""
        return self._place(value, memoryview(value))

    def _place(self, key: tuple[int, int] | bytes, value: memoryview) -> tuple[OperandLifeTime, DataLocation]:
        place = self._places.get(key)
        if place is not None:
            return place
        length = len(value)
        self.check_budget(length)
        self._budget_bytes -= length
        if length <= COPIED_BYTES_MAX:
            self._copied.extend(bytes(-len(self._copied) % _VALUE_ALIGNMENT_BYTES))
            place = OperandLifeTime.CONSTANT_COPY, DataLocation(0, len(self._copied), length)
            self._copied.extend(value)
        else:
            self._referenced_bytes += -self._referenced_bytes % PREFERRED_ALIGNMENT_BYTES
            place = OperandLifeTime.CONSTANT_REFERENCE, DataLocation(0, self._referenced_bytes, length)
            self._referenced.append((self._referenced_bytes, value))
            self._referenced_bytes += length
        self._places[key] = place
        self._values[place] = value
        return place

    def value(self, operand: Operand) -> Array:
        """A constant as an array of the operand's shape, rank 0 for a scalar."""
        raw = self._values[operand.lifetime, operand.location]
        return np.frombuffer(raw, dtype=operand_dtype(operand.type)).reshape(operand.dimensions)

    def finish(self, subgraphs: Sequence[Subgraph]) -> Model:
        """The model of the written subgraphs, main first."""
        pools: tuple[Memory, ...] = ()
        if self._referenced:
            parts = ((offset, np.frombuffer(value, np.uint8)) for offset, value in self._referenced)
            pools = (Memory.of_constants(self._referenced_bytes, parts),)
        return Model(
            main=subgraphs[0],
            referenced=tuple(subgraphs[1:]),
            operand_values=bytes(self._copied),
            pools=pools,
        )


def without_dead(subgraph: Subgraph) -> Subgraph:
    """The subgraph without unused operands; the remaining ones keep their order."""
    used = {*subgraph.input_indexes, *subgraph.output_indexes}
    for operation in subgraph.operations:
        used.update(operation.inputs, operation.outputs)
    renumbered = {old: new for new, old in enumerate(sorted(used))}

    def moved(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(renumbered[i] for i in indexes)

    return Subgraph(
        operands=tuple(subgraph.operands[i] for i in sorted(used)),
        operations=tuple(Operation(o.type, moved(o.inputs), moved(o.outputs)) for o in subgraph.operations),
        input_indexes=moved(subgraph.input_indexes),
        output_indexes=moved(subgraph.output_indexes),
    )

"""Requests over fresh shared memory: where values are placed in a pool, and a request whose values are all in one.

Owns the layout of request pools: alignment, padding and guards. An application's arrays reach a device by
``aionn.runtime.memory.arguments``, which uses the same layout.

Source: ``preferredAlignment`` and ``preferredPadding`` of memory in the NN HAL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.hal.memory import PREFERRED_ALIGNMENT_BYTES, Memory
from aionn.hal.model import Model
from aionn.hal.operand import (
    DataLocation,
    Operand,
    dimensions_are_known,
    is_scalar_type,
    operand_dtype,
    operand_size_bytes,
)
from aionn.hal.request import Request, RequestArgument

__all__ = ["PooledRequest", "place_values"]

Array = npt.NDArray[Any]


def place_values(
    sizes: Iterable[int], *, pool_index: int = 0, guard_bytes: int = 0
) -> tuple[list[DataLocation], int]:
    """Places values one behind the other in a pool, each aligned as the HAL prefers it.

    Args:
        sizes: Of the values in bytes; an empty one has a place of its own as well.
        pool_index: The pool's index in the request.
        guard_bytes: Number of bytes that stay free before the first value, and at least as many behind each one.

    Returns:
        The locations, and the size of the pool in bytes: at least 1, a multiple of the alignment plus the first guard.
    """
    locations, end = [], guard_bytes
    for size in sizes:
        locations.append(DataLocation(pool_index, end, size))
        end += -(-(max(size, 1) + guard_bytes) // PREFERRED_ALIGNMENT_BYTES) * PREFERRED_ALIGNMENT_BYTES
    return locations, max(end, PREFERRED_ALIGNMENT_BYTES)


class PooledRequest:
    """A request over one shared memory, to be executed any number of times. Close it.

    Args:
        model: States the shapes of the outputs.
        input_shapes: Of the inputs, for a model that leaves some open; None for the model's.

    Attributes:
        request: The request. It keeps the memory alive.

    Raises:
        InvalidArgument: A shape is not known, or the number of inputs is wrong.
        ResourceExhausted: There is not enough memory.
    """

    def __init__(self, model: Model, input_shapes: Sequence[tuple[int, ...]] | None = None) -> None:
        main = model.main
        if input_shapes is None:
            input_shapes = [operand.dimensions for operand in main.inputs]
            _check_known("input", main.inputs)
        _check_known("output", main.outputs)
        if len(input_shapes) != len(main.inputs):
            raise InvalidArgument(f"request: expected {len(main.inputs)} inputs, got {len(input_shapes)}")
        self._outputs = main.outputs
        operands = (*main.inputs, *main.outputs)
        shapes = (*input_shapes, *(operand.dimensions for operand in main.outputs))
        locations, end = place_values(
            operand_size_bytes(operand.type, shape) for operand, shape in zip(operands, shapes, strict=True)
        )
        self._memory = Memory.create(end, name="aionn-request")
        arguments = tuple(
            RequestArgument(False, location, () if shape == operand.dimensions else shape)
            for location, operand, shape in zip(locations, operands, shapes, strict=True)
        )
        count = len(main.inputs)
        self.request = Request(arguments[:count], arguments[count:], (self._memory,))

    def write(self, inputs: Sequence[Array]) -> None:
        """Copies values of the inputs into the memory."""
        for argument, value in zip(self.request.inputs, inputs, strict=True):
            self._bytes(argument)[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def outputs(self) -> list[Array]:
        """Copies of the outputs, in the shapes that the model states."""
        found = []
        for argument, operand in zip(self.request.outputs, self._outputs, strict=True):
            values = self._bytes(argument).copy().view(operand_dtype(operand.type))
            found.append(values.reshape(() if is_scalar_type(operand.type) else operand.dimensions))
        return found

    def _bytes(self, argument: RequestArgument) -> npt.NDArray[np.uint8]:
        location = argument.location
        return self._memory.array[location.offset : location.offset + location.length]

    def close(self) -> None:
        """Frees the memory, unless another process has it mapped. Idempotent."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_known(kind: str, operands: Sequence[Operand]) -> None:
    for index, operand in enumerate(operands):
        if not dimensions_are_known(operand.type, operand.dimensions):
            shape = list(operand.dimensions)
            raise InvalidArgument(
                f"request, {kind} {index}: expected a shape that the model states, got {shape}"
            )

"""Requests over fresh shared memory, for tests that call a device directly: inputs in, outputs out.

Owns the layout of one pool per request. An application's arrays go their way to a device by ``aionn.runtime.memory.arguments``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.hal import (
    DataLocation,
    Memory,
    Model,
    Request,
    RequestArgument,
    dimensions_are_known,
    operand_dtype,
    operand_size_bytes,
)

__all__ = ["outputs_of", "request_for"]

ALIGNMENT_BYTES = 64


def request_for(model: Model, inputs: Sequence[npt.NDArray[Any]]) -> Request:
    """A request with these inputs, and room for outputs of the shapes that the model states.

    Raises:
        InvalidArgument: An output's shape is not known, or the number of inputs is wrong.
    """
    main = model.main
    if len(inputs) != len(main.inputs):
        raise InvalidArgument(f"request: expected {len(main.inputs)} inputs, got {len(inputs)}")
    for index, operand in enumerate(main.outputs):
        if not dimensions_are_known(operand.type, operand.dimensions):
            raise InvalidArgument(f"request, output {index}: the model does not state its shape")
    sizes = [a.nbytes for a in inputs] + [operand_size_bytes(o.type, o.dimensions) for o in main.outputs]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    pool = Memory.create(offsets[-1])
    for array, offset in zip(inputs, offsets, strict=False):
        pool.array[offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    shapes = [tuple(a.shape) for a in inputs] + [o.dimensions for o in main.outputs]
    arguments = [
        RequestArgument(False, DataLocation(0, offset, size), shape)
        for offset, size, shape in zip(offsets, sizes, shapes, strict=False)
    ]
    return Request(tuple(arguments[: len(inputs)]), tuple(arguments[len(inputs) :]), (pool,))


def outputs_of(model: Model, request: Request) -> list[npt.NDArray[Any]]:
    """Copies of the present outputs of a request from ``request_for``."""
    (pool,) = request.pools
    assert isinstance(pool, Memory), "request_for makes one pool of shared memory"
    outputs = []
    for argument, operand in zip(request.outputs, model.main.outputs, strict=True):
        location = argument.location
        data = pool.array[location.offset : location.offset + location.length].tobytes()
        outputs.append(np.frombuffer(data, operand_dtype(operand.type)).reshape(argument.dimensions))
    return outputs

"""From a request to arrays: where the inputs of an execution lie and where its outputs go.

Owns the binding of locations to views of pool memory. Which requests are legal is for ``aionn.validation`` to say; binding calls it first.

Invariants:
1. A view never reaches outside of the area that the request names.
2. Locations are read once, from the request itself, which is private memory; pools are shared with the client and only hold values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure
from aionn.hal import (
    BufferToken,
    Model,
    Operand,
    OutputShape,
    Request,
    RequestArgument,
    combine_dimensions,
    is_scalar_type,
    operand_dtype,
)
from aionn.validation import validate_request

__all__ = ["Arguments", "OutputArea", "bind"]

Array = npt.NDArray[Any]


class OutputArea:
    """Where one output goes.

    Attributes:
        operand: The model's output operand.
        dimensions: What model and request say of its shape; 0 or empty where unknown.
        buffer: The bytes that may be written, ``[length]`` uint8.
    """

    __slots__ = ("buffer", "dimensions", "operand")

    def __init__(self, operand: Operand, dimensions: tuple[int, ...], buffer: npt.NDArray[np.uint8]) -> None:
        self.operand = operand
        self.dimensions = dimensions
        self.buffer = buffer

    def store(self, array: Array) -> OutputShape:
        """Writes the output if it fits, and says what it turned out to be."""
        size_bytes = array.nbytes
        if size_bytes > self.buffer.nbytes:
            return OutputShape(array.shape, is_sufficient=False)
        if size_bytes:
            dtype = operand_dtype(self.operand.type)
            # frombuffer, unlike ndarray.view, takes any alignment.
            into = np.frombuffer(self.buffer, dtype=dtype, count=array.size).reshape(array.shape)
            np.copyto(into, array, casting="no")
        return OutputShape(array.shape)


class Arguments(NamedTuple):
    """The bound arguments of one execution.

    Attributes:
        inputs: Views of shared memory; rank 0 for scalars, None for an input that is left out.
        outputs: Where the results go.
    """

    inputs: Sequence[Array | None]
    outputs: Sequence[OutputArea]


def bind(model: Model, request: Request, *, allow_unspecified_outputs: bool = True) -> Arguments:
    """Checks a request and maps it.

    Raises:
        InvalidArgument: The request does not fit the model.
        GeneralFailure: A pool is a device memory, which this driver does not have.
    """
    shapes = validate_request(model, request, allow_unspecified_outputs=allow_unspecified_outputs)
    for index, pool in enumerate(request.pools):
        if isinstance(pool, BufferToken):
            raise GeneralFailure(f"request, pool {index}: this driver has no device memories")
    main = model.main
    inputs = [
        None if argument.has_no_value else _input(request, argument, operand, shape or ())
        for argument, operand, shape in zip(request.inputs, main.inputs, shapes, strict=True)
    ]
    outputs = [
        OutputArea(
            operand,
            combine_dimensions(operand.dimensions, argument.dimensions) or (),
            _area(request, argument),
        )
        for argument, operand in zip(request.outputs, main.outputs, strict=True)
    ]
    return Arguments(inputs, outputs)


def _area(request: Request, argument: RequestArgument) -> npt.NDArray[np.uint8]:
    pool = request.pools[argument.location.pool_index]
    assert not isinstance(pool, BufferToken), "refused before"
    location = argument.location
    return pool.array[location.offset : location.offset + location.length]


def _input(request: Request, argument: RequestArgument, operand: Operand, shape: tuple[int, ...]) -> Array:
    flat = np.frombuffer(_area(request, argument), dtype=operand_dtype(operand.type))
    array = flat.reshape(() if is_scalar_type(operand.type) else shape)
    array.flags.writeable = False
    return array

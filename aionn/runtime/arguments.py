"""An application's arrays and the shared memory that carries them to a device.

Owns the description of a model's inputs and outputs, the checks of what an application passes, the layout of request memory, and how
pictures and real values become what a model's input wants.

Invariants:
1. Values lie 64-byte aligned and padded in one memory per request, so that mapping it once serves every argument.
2. A value that does not fit the model is refused before anything is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.hal import (
    PREFERRED_ALIGNMENT_BYTES,
    DataLocation,
    Memory,
    Operand,
    OperandType,
    OutputShape,
    Request,
    RequestArgument,
    combine_dimensions,
    is_scalar_type,
    operand_dtype,
    operand_size_bytes,
    operand_type_name,
)

__all__ = [
    "Array",
    "RequestArea",
    "TensorSpec",
    "check_inputs",
    "image_writer",
    "tensor_spec",
    "value_writer",
]

Array = npt.NDArray[Any]

UNKNOWN_OUTPUT_BYTES = 4096
"""First guess for an output whose size the model does not tell: a page; the device says what it wants if that is too small."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output of a model.

    Attributes:
        name: Its name, where the model has one.
        type: Operand type.
        dimensions: Extents, 0 where unknown; ``()`` for a scalar or an unknown rank.
        scale: Quantisation scale, 0 for types without.
        zero_point: Quantisation zero point.
    """

    name: str
    type: int
    dimensions: tuple[int, ...]
    scale: float = 0.0
    zero_point: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy's element type."""
        return operand_dtype(self.type)

    def __str__(self) -> str:
        shape = "x".join(str(d) if d else "?" for d in self.dimensions) or "scalar"
        quantisation = f" scale {self.scale:g} zero point {self.zero_point}" if self.scale else ""
        return f"{self.name} {operand_type_name(self.type)} {shape}{quantisation}"


def tensor_spec(operand: Operand, name: str) -> TensorSpec:
    """The description of an operand."""
    return TensorSpec(name, operand.type, operand.dimensions, operand.scale, operand.zero_point)


def check_inputs(specs: Sequence[TensorSpec], values: Sequence[Any]) -> list[Array | None]:
    """What an application passes, as arrays of the model's types; None stays None: an input that is left out.

    Raises:
        InvalidArgument: Wrong number, type or shape; says which input, what was expected and what came.
    """
    if not isinstance(values, list | tuple):
        raise InvalidArgument(
            f"inputs: expected a list with {len(specs)} arrays, got a {type(values).__name__}"
        )
    if len(values) != len(specs):
        raise InvalidArgument(f"inputs: expected {len(specs)} arrays, got {len(values)}")
    return [
        None if v is None else _check_input(i, s, v)
        for i, (s, v) in enumerate(zip(specs, values, strict=True))
    ]


def _check_input(index: int, spec: TensorSpec, value: Any) -> Array:
    where = f"input {index} ({spec.name})"
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__dlpack__"):
            value = np.from_dlpack(value)
        elif is_scalar_type(spec.type) and isinstance(value, bool | int | float):
            value = np.asarray(value, dtype=spec.dtype)
        else:
            try:
                value = np.asarray(memoryview(value))
            except TypeError:
                raise InvalidArgument(
                    f"{where}: expected an array or a buffer, got a {type(value).__name__}"
                ) from None
    if value.dtype != spec.dtype:
        raise InvalidArgument(f"{where}: expected element type {spec.dtype}, got {value.dtype}")
    expected = spec.dimensions
    if is_scalar_type(spec.type):
        if value.size != 1:
            raise InvalidArgument(f"{where}: expected a scalar, got shape {list(value.shape)}")
        return np.asarray(value).reshape(())
    if expected and (value.ndim != len(expected) or combine_dimensions(expected, value.shape) is None):
        raise InvalidArgument(f"{where}: expected shape {list(expected)}, got {list(value.shape)}")
    return np.asarray(value)


class RequestArea:
    """Shared memory for the arguments of one execution, and the request that refers to it.

    Args:
        inputs: Descriptions of the inputs.
        outputs: Descriptions of the outputs.
        input_shapes: One shape per input; None for one that is left out.
        output_bytes: Room per output; None takes what the description says, or a guess.

    Attributes:
        memory: Holds all values.
        inputs: One writable view per input, None for one that is left out.
        request: Refers to ``memory`` as pool 0.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        input_shapes: Sequence[tuple[int, ...] | None],
        output_bytes: Sequence[int] | None = None,
    ) -> None:
        sizes: list[int] = []
        for spec, shape in zip(inputs, input_shapes, strict=True):
            sizes.append(0 if shape is None else operand_size_bytes(spec.type, shape))
        for index, spec in enumerate(outputs):
            known = operand_size_bytes(spec.type, spec.dimensions)
            sizes.append(output_bytes[index] if output_bytes is not None else known or UNKNOWN_OUTPUT_BYTES)
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-max(size, 1) // PREFERRED_ALIGNMENT_BYTES) * PREFERRED_ALIGNMENT_BYTES
        self.memory = Memory.create(max(end, PREFERRED_ALIGNMENT_BYTES), name="aionn-request")
        self._output_specs = tuple(outputs)
        self.inputs: list[Array | None] = []
        input_arguments, output_arguments = [], []
        for position, (spec, shape) in enumerate(zip(inputs, input_shapes, strict=True)):
            if shape is None:
                self.inputs.append(None)
                input_arguments.append(RequestArgument(has_no_value=True))
                continue
            refined = () if shape == spec.dimensions else shape
            self.inputs.append(self._view(offsets[position], sizes[position], spec, shape))
            input_arguments.append(
                RequestArgument(False, DataLocation(0, offsets[position], sizes[position]), refined)
            )
        self._output_offsets = offsets[len(inputs) :]
        self._output_sizes = sizes[len(inputs) :]
        for offset, size in zip(self._output_offsets, self._output_sizes, strict=True):
            output_arguments.append(RequestArgument(False, DataLocation(0, offset, size)))
        self.request = Request(tuple(input_arguments), tuple(output_arguments), (self.memory,))

    def _view(self, offset: int, size: int, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        flat = self.memory.array[offset : offset + size].view(spec.dtype)
        return flat.reshape(() if is_scalar_type(spec.type) else shape)

    def write(self, values: Sequence[Array | None]) -> None:
        """Copies checked inputs into the memory."""
        for view, value in zip(self.inputs, values, strict=True):
            if view is not None and value is not None:
                np.copyto(view, value, casting="no")

    def outputs(self, shapes: Sequence[OutputShape]) -> tuple[Array, ...]:
        """Read-only views of the outputs, in the shapes that the device reported (or the model's, where it reported none)."""
        views = []
        for index, spec in enumerate(self._output_specs):
            shape = shapes[index].dimensions if shapes else spec.dimensions
            size = operand_size_bytes(spec.type, shape) if all(shape) else 0
            if size > self._output_sizes[index]:
                raise InvalidArgument(
                    f"output {index}: the device reports {size} bytes in a room of {self._output_sizes[index]}"
                )
            view = self._view(self._output_offsets[index], size, spec, shape)
            view.flags.writeable = False
            views.append(view)
        return tuple(views)

    def larger_outputs(self, shapes: Sequence[OutputShape]) -> list[int]:
        """Room to try next, after the device said that some output did not fit."""
        sizes = []
        for index, spec in enumerate(self._output_specs):
            needed = operand_size_bytes(spec.type, shapes[index].dimensions) if shapes else 0
            enough = not shapes or shapes[index].is_sufficient
            sizes.append(max(needed, self._output_sizes[index] * (1 if enough else 2)))
        return sizes


Writer = Callable[[Any, Array], None]
"""Writes a value of an application into a view of an input."""


def value_writer(spec: TensorSpec) -> Writer:
    """Writes real values (any float array of the input's number of elements) into the input, quantised if it is."""

    def write(value: Any, view: Array) -> None:
        array = np.asarray(value)
        if array.size != view.size:
            raise InvalidArgument(f"{spec.name}: expected {view.size} values, got {array.size}")
        array = array.reshape(view.shape)
        if spec.scale:
            info = np.iinfo(spec.dtype)
            view[...] = np.clip(np.rint(array / spec.scale) + spec.zero_point, info.min, info.max)
        else:
            view[...] = array

    return write


def image_writer(spec: TensorSpec, *, low: float = 0.0, high: float = 1.0) -> Writer:
    """Writes pictures (uint8 [height, width, 3]) into the input: 0 becomes ``low``, 255 becomes ``high``, quantised if it is.

    Raises:
        InvalidArgument: The input is no picture of one batch.
    """
    if len(spec.dimensions) != 4 or spec.dimensions[0] != 1:
        raise InvalidArgument(
            f"{spec.name}: expected an input of shape [1, height, width, channels], got {list(spec.dimensions)}"
        )
    real = low + (high - low) * np.arange(256) / 255.0
    if spec.scale:
        info = np.iinfo(spec.dtype)
        table = np.clip(np.rint(real / spec.scale) + spec.zero_point, info.min, info.max).astype(spec.dtype)
    elif spec.type in (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16):
        table = real.astype(spec.dtype)
    else:
        raise InvalidArgument(
            f"{spec.name}: expected a float or quantised input, got {operand_type_name(spec.type)}"
        )

    def write(value: Any, view: Array) -> None:
        if value.dtype != np.uint8 or value.shape != view.shape[1:]:
            raise InvalidArgument(
                f"{spec.name}: expected a uint8 picture of shape {list(view.shape[1:])}, got {value.dtype} {list(value.shape)}"
            )
        # mode="clip" spares numpy a buffer for the output; a uint8 index cannot be out of range.
        np.take(table, value, out=view[0], mode="clip")

    return write

"""A lowered model: the ONNX file, and how its inputs and outputs belong to the HAL model's.

Owns the versions that are written.
"""

from __future__ import annotations

import msgspec

from aionn.drivers.kit.arguments import Array

__all__ = ["IR_VERSION", "OPSET", "Argument", "Lowered"]

OPSET = 21
"""Version of the operators: the first with 8-bit types for all that moves elements; every ONNX Runtime since 1.19 has it."""

IR_VERSION = 10
"""Version of the file format that belongs to ``OPSET``."""


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """An input or output of the ONNX model.

    Attributes:
        name: Its name.
        dtype: numpy's name of its element type.
        shape: Its extents; None for an output whose shape only the execution knows.
        is_in_place: Whether ONNX Runtime may use it in memory that a client can change during the execution.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    is_in_place: bool


class Lowered(msgspec.Struct, frozen=True):
    """A lowered model.

    Attributes:
        file: The ONNX model; empty where no output depends on an input.
        inputs: Its inputs: those of the HAL model's that are read.
        outputs: Its outputs: those of the HAL model's that are computed.
        is_read: For each input of the HAL model, whether it is among the inputs; only others may be omitted at an execution.
        fixed: For each output of the HAL model, its value where no input decides it; None where it is computed.
        kernels: What ONNX Runtime needs kernels for: each kind of node once.
    """

    file: bytes
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    is_read: tuple[bool, ...]
    fixed: tuple[Array | None, ...]
    kernels: frozenset[tuple[object, ...]] = frozenset()

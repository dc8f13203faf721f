"""A lowered model: the ONNX file, and how its inputs and outputs belong to the HAL model's.

Owns the versions that are written.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from aionn.drivers.kit.arguments import Array
from aionn.drivers.kit.engines.bound import Place
from aionn.drivers.kit.engines.device import LoweredModel
from aionn.models.onnx.encoding import encode_model
from aionn.models.onnx.extension import Record
from aionn.models.onnx.schema import TensorProto, read_model

__all__ = ["FULL", "IR_VERSION", "OPSET", "Argument", "Dialect", "Lowered"]

OPSET = 21
"""Version of the operators: the first with 8-bit types for all that moves elements; every ONNX Runtime since 1.19 has it."""

IR_VERSION = 10
"""Version of the file format that belongs to ``OPSET``."""


def _no_gap(op_type: str, record: Record, constant: Callable[[int], Array | None]) -> None:
    return None


class Dialect(msgspec.Struct, frozen=True):
    """Where an engine's reading of ONNX differs.

    Attributes:
        has_wide_numbers: Whether numbers of 64 bits are computed as such, and integers are divided as integers.
        reports_indexes: Whether an index out of range ends an execution.
        has_lrn_bias: Whether LRN may have a bias other than 1.
        has_zero_points: Whether the zero point of constants may be any number, and not 0 alone.
        has_all_windows: Whether convolutions may have any window, and those of 8-bit numbers any groups: otherwise the window fits
            into the image, the stride is 1 along an axis with one window, and those of 8-bit numbers have one group, or one for
            each channel with one output.
        has_transposed_integers: Whether transposed convolutions of 8-bit numbers are right with what is behind them.
        has_computed_slopes: Whether the slopes of PRelu may be computed.
        has_joined_vectors: Whether the result of a Concat of vectors may have several readers.
        has_exact_reals: Whether the real numbers of quantised ones are exact products of float32.
        has_exact_integers: Whether integers of 32 bits are compared, bounded, sorted and reduced as such, and not as floats.
        has_products_in_turn: Whether ReduceProd multiplies floats one after another: products of some elements, multiplied in the
            end, may be an infinity and a zero although the product of all is neither.
        has_separate_constants: Whether two operations with constants, one behind the other, are not computed as one.
        has_views_beside_transposes: Whether a value that is computed may have a Transpose and a Reshape among its readers.
        has_moved_reductions: Whether a reduction may drop axes although a Reshape or Transpose behind it moves extents of 1.
        has_bitwise: Whether there is a kernel for BitwiseXor; a table takes its place otherwise.
        takes_weights: Whether large constants may be beside the file, in memory of a client that is sealed against writing.
        gap_of: Given an operator of the extension, its record, and a function that returns the array of a constant input by its
            place: why the engine cannot be given it, or None.
    """

    has_wide_numbers: bool = True
    reports_indexes: bool = True
    has_lrn_bias: bool = True
    has_zero_points: bool = True
    has_all_windows: bool = True
    has_transposed_integers: bool = True
    has_computed_slopes: bool = True
    has_joined_vectors: bool = True
    has_exact_reals: bool = True
    has_exact_integers: bool = True
    has_products_in_turn: bool = True
    has_separate_constants: bool = True
    has_views_beside_transposes: bool = True
    has_moved_reductions: bool = True
    has_bitwise: bool = True
    takes_weights: bool = False
    gap_of: Callable[[str, Record, Callable[[int], Array | None]], str | None] = _no_gap


FULL = Dialect()
"""ONNX as it is defined."""


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """An input or output of the ONNX model.

    Attributes:
        name: Its name.
        dtype: numpy's name of its element type.
        shape: Its extents; None for an output whose shape only the execution knows.
        is_in_place: Whether the engine may use it in memory that a client can change during the execution.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    is_in_place: bool

    @property
    def place(self) -> Place:
        """Its properties that matter to an execution."""
        return Place(self.dtype, self.shape, self.is_in_place)


class Lowered(LoweredModel, frozen=True):
    """A model as an ONNX model.

    Attributes:
        inputs: The file's inputs: those of the HAL model's that are read.
        outputs: Its outputs: those of the HAL model's that are computed.
        check: A further output at the end, which is not 0 where an index was out of range; None where the file checks no index.
        kernels: The nodes that the engine needs kernels for: each kind of node once. None are kept in a cache.
        weights: The constants that the file does not contain. Their memory may be the client's, sealed against writing. A client
            that mapped it before the seal can still write; only operators read it to which any number is just a number.
    """

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    check: Argument | None = None
    kernels: frozenset[tuple[object, ...]] = frozenset()
    weights: tuple[TensorProto, ...] = ()

    def whole_file(self) -> bytes:
        """The file with all constants."""
        if not self.weights:
            return self.file
        model, beside = read_model(self.file), {tensor.name: tensor for tensor in self.weights}
        constants = tuple(beside.get(tensor.name, tensor) for tensor in model.graph.initializers)
        graph = msgspec.structs.replace(model.graph, initializers=constants)
        return encode_model(msgspec.structs.replace(model, graph=graph))

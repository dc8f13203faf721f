"""The state of lowering one subgraph: which tensor an operand has become, and the small steps that many operations share.

Owns operands as tensors, constants, changes of layout and of 8-bit type. Float16 values are float32 tensors here; only the main
subgraph's inputs and outputs are float16, with a CAST beside them.

Invariants:
1. An operand has at most one tensor; an operation's inputs have theirs before it is lowered.
2. A form that is not certain to be equal is ``Unsupported``.

Source: operand types of the NN HAL; tensor types of the TensorFlow Lite schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.drivers.kit.engines.known import Known
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.litert.flatbuffer_writer import NO_TENSOR, Array, Quantization, SubgraphFile
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    Subgraph,
    constant_array,
    is_extension_operand_type,
    is_scalar_type,
)

__all__ = ["Graph", "Shape", "Value"]

Shape = tuple[int, ...]

_DTYPES = {
    OperandType.TENSOR_FLOAT32: "float32",
    OperandType.TENSOR_FLOAT16: "float32",
    OperandType.TENSOR_INT32: "int32",
    OperandType.TENSOR_QUANT8_ASYMM: "uint8",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "int8",
    OperandType.TENSOR_QUANT8_SYMM: "int8",
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: "int8",
    OperandType.TENSOR_BOOL8: "bool",
    OperandType.FLOAT32: "float32",
    OperandType.FLOAT16: "float32",
    OperandType.INT32: "int32",
    OperandType.BOOL: "bool",
}
_QUANTIZED = ("uint8", "int8")

_SHAPED = frozenset(
    {"BATCH_TO_SPACE_ND", "FILL", "IF", "MIRROR_PAD", "PAD", "PADV2", "RESHAPE", "SLICE", "SPACE_TO_BATCH_ND"}
    | {"STRIDED_SLICE", "TILE", "TRANSPOSE", "WHILE"}
)
"""Operators whose results' shapes depend on the values of int32 inputs; where these are computed, LiteRT moves its memory about."""

SCALE_RATIO_MAX = 256
"""XNNPACK's limit of the factor by which it multiplies sums of stored numbers; see ``Graph.check_ratio``."""

NHWC_TO_NCHW = (0, 3, 1, 2)
NCHW_TO_NHWC = (0, 2, 3, 1)


class Value:
    """A tensor.

    Attributes:
        index: Its index in the subgraph.
        dtype: Its element type's name.
        shape: Its shape; empty where the rank is unknown, 0 for an unknown extent.
        quantization: Of 8-bit types.
        constant: Its value, where it is part of the model.
    """

    __slots__ = ("constant", "dtype", "index", "quantization", "shape")

    def __init__(
        self,
        index: int,
        dtype: str,
        shape: Shape,
        quantization: Quantization | None = None,
        constant: Array | None = None,
    ) -> None:
        self.index = index
        self.dtype = dtype
        self.shape = shape
        self.quantization = quantization
        self.constant = constant

    @property
    def is_quantized(self) -> bool:
        """Whether its numbers are quantised."""
        return self.dtype in _QUANTIZED

    @property
    def scale(self) -> float:
        """The scale of a value with one."""
        assert self.quantization is not None
        return self.quantization.scales[0]

    @property
    def zero_point(self) -> int:
        """The zero point of a quantised value."""
        assert self.quantization is not None
        return self.quantization.zero_point


class Graph:
    """One subgraph that is being lowered.

    Attributes:
        model: The HAL's model.
        subgraph: The HAL's subgraph.
        file: Where it is written.
        folded: The results computed beforehand.
        values: The operands that have tensors.
    """

    def __init__(self, model: Model, subgraph: Subgraph, file: SubgraphFile, folded: Known) -> None:
        self.model = model
        self.subgraph = subgraph
        self.file = file
        self.folded = folded
        self.values: dict[int, Value] = {}

    # Operands

    def operand(self, operation: Operation, position: int) -> Operand:
        """An input's operand."""
        return self.subgraph.operands[operation.inputs[position]]

    def has(self, operation: Operation, position: int) -> bool:
        """Whether an optional input is there."""
        return (
            position < len(operation.inputs)
            and self.operand(operation, position).lifetime != OperandLifeTime.NO_VALUE
        )

    def input(self, operation: Operation, position: int) -> Value:
        """The tensor of an input that must be there."""
        index = operation.inputs[position]
        if self.subgraph.operands[index].lifetime == OperandLifeTime.NO_VALUE:
            raise Unsupported(f"input {position} is left out")
        return self.value(index)

    def value(self, index: int) -> Value:
        """The tensor of an operand; created at its first use."""
        known = self.values.get(index)
        if known is None:
            known = self.values[index] = self._declare(index)
        return known

    def number(self, index: int) -> Array | None:
        """The value of an operand that is constant, or was computed beforehand; None for others."""
        folded = self.folded.values.get(index)
        if folded is not None:
            return folded
        operand = self.subgraph.operands[index]
        return constant_array(self.model, operand) if operand.is_constant else None

    def _declare(self, index: int) -> Value:
        operand = self.subgraph.operands[index]
        dtype = _DTYPES.get(operand.type) if not is_extension_operand_type(operand.type) else None  # type: ignore[call-overload]
        if dtype is None:
            raise Unsupported("LiteRT has no tensors of this operand type")
        quantization = None
        if dtype in _QUANTIZED:
            channels = operand.channel_quant
            if channels is not None:
                quantization = Quantization(tuple(channels.scales), 0, channels.channel_dim)
            else:
                quantization = Quantization((operand.scale,), operand.zero_point)
        elif operand.type == OperandType.TENSOR_INT32 and operand.scale > 0:
            # A bias; XNNPACK takes only those with a scale.
            quantization = Quantization((operand.scale,), operand.zero_point)
        array = self.number(index)
        if array is None:
            return self.temporary(dtype, operand.dimensions, quantization)
        shape = () if is_scalar_type(operand.type) else array.shape
        if array.dtype == np.float16:
            array = array.astype(np.float32)
        return self.constant(array.reshape(shape), quantization)

    def output(self, operation: Operation, position: int = 0) -> Value:
        """The tensor of an output."""
        return self.value(operation.outputs[position])

    def scalar(self, operation: Operation, position: int) -> Any:
        """The number of a constant scalar input."""
        array = self.number(operation.inputs[position])
        if array is None:
            raise Unsupported(f"input {position}, a parameter, is not constant")
        return array.reshape(-1)[0].item()

    def optional(self, operation: Operation, position: int, default: Any) -> Any:
        """The number of an optional scalar, or what holds without it."""
        return self.scalar(operation, position) if self.has(operation, position) else default

    def integers(self, operation: Operation, position: int) -> list[int]:
        """The numbers of a constant tensor."""
        array = self.number(operation.inputs[position])
        if array is None:
            raise Unsupported(f"input {position}, a list of numbers, is not constant")
        return [int(v) for v in array.reshape(-1)]

    # Tensors

    def temporary(self, dtype: str, shape: Sequence[int], quantization: Quantization | None = None) -> Value:
        """A tensor that is computed."""
        if not shape or 0 in shape:
            self.file.parts.is_static = (
                False  # Tensors whose size LiteRT determines only while it computes may move.
            )
        index = self.file.tensor(dtype, shape, quantization)
        return Value(index, dtype, tuple(shape), quantization)

    def like(self, value: Value, shape: Sequence[int] | None = None) -> Value:
        """A tensor of the same type and quantisation."""
        return self.temporary(value.dtype, value.shape if shape is None else shape, value.quantization)

    def constant(self, array: Array, quantization: Quantization | None = None) -> Value:
        """A constant tensor."""
        index = self.file.tensor(str(array.dtype), array.shape, quantization, array)
        return Value(index, str(array.dtype), tuple(array.shape), quantization, array)

    def int32s(self, values: Sequence[int]) -> Value:
        """A constant list of numbers."""
        return self.constant(np.asarray(values, dtype=np.int32))

    def int32(self, value: int) -> Value:
        """A constant number."""
        return self.constant(np.asarray(value, dtype=np.int32))

    def real(self, value: float) -> Value:
        """A constant float32 number."""
        return self.constant(np.asarray(value, dtype=np.float32))

    def emit(
        self,
        name: str,
        inputs: Sequence[Value | None],
        outputs: Value | Sequence[Value],
        options: str | None = None,
        **values: Any,
    ) -> None:
        """Writes an operator."""
        if name in _SHAPED and any(
            i is not None and i.dtype == "int32" and i.constant is None for i in inputs
        ):
            self.file.parts.is_static = False
        targets = [outputs] if isinstance(outputs, Value) else list(outputs)
        self.file.operator(
            name,
            [NO_TENSOR if i is None else i.index for i in inputs],
            [o.index for o in targets],
            options,
            values,
        )

    # Steps that many operations share

    def rank(self, value: Value) -> int:
        """The rank, which must be known."""
        if not value.shape:
            raise Unsupported("a tensor of unknown rank")
        return len(value.shape)

    def known(self, value: Value) -> Shape:
        """The shape, which must be known."""
        if not value.shape or 0 in value.shape:
            raise Unsupported("a shape that is not known before execution")
        return value.shape

    def transposed(self, value: Value, order: Sequence[int]) -> Value:
        """The value with its axes in another order."""
        if len(value.shape) != len(order):
            raise Unsupported("a tensor of unknown rank")
        target = self.like(value, [value.shape[i] for i in order])
        self.transpose(value, order, target)
        return target

    def transpose(self, value: Value, order: Sequence[int], target: Value) -> None:
        """Writes a TRANSPOSE."""
        self.emit("TRANSPOSE", [value, self.int32s(order)], target, "TransposeOptions")

    def in_nhwc(
        self, is_nchw: bool, data: Value, output: Value, write: Callable[[Value, Value], None]
    ) -> None:
        """Lets ``write`` compute ``output`` from ``data``, both in the layout NHWC."""
        if not is_nchw:
            write(data, output)
            return
        wide = [output.shape[i] for i in NCHW_TO_NHWC] if len(output.shape) == 4 else [0, 0, 0, 0]
        result = self.like(output, wide)
        write(self.transposed(data, NCHW_TO_NHWC), result)
        self.transpose(result, NHWC_TO_NCHW, output)

    def last_axis(self, axis: int, data: Value, output: Value, write: Callable[[Value, Value], None]) -> None:
        """Lets ``write`` compute ``output`` from ``data`` with the given axis as the last."""
        rank = self.rank(data)
        axis %= rank
        if axis == rank - 1:
            write(data, output)
            return
        order = [i for i in range(rank) if i != axis] + [axis]
        result = self.like(output, [data.shape[i] for i in order])
        write(self.transposed(data, order), result)
        self.transpose(result, [order.index(i) for i in range(rank)], output)

    def same_quantization(self, *values: Value) -> None:
        """Demands that all quantised values have one scale and zero point."""
        if len({v.quantization for v in values if v.quantization is not None}) > 1:
            raise Unsupported("values of different scales or zero points")

    def check_ratio(self, scale: float, output: Value) -> None:
        """Rejects sums whose terms have a scale that is too large beside the result's.

        XNNPACK refuses such layers when a model is prepared, and gives wrong results for such an ADD.

        Raises:
            Unsupported: The scale is ``SCALE_RATIO_MAX`` times the output's, or larger.
        """
        if output.is_quantized and np.float32(scale) >= SCALE_RATIO_MAX * np.float32(output.scale):
            raise Unsupported(f"terms of scale {scale:g} in a result of scale {output.scale:g}")

    def requantized(self, value: Value, like: Value) -> Value:
        """The value with another's type and quantisation."""
        if (value.dtype, value.quantization) == (like.dtype, like.quantization):
            return value
        target = self.temporary(like.dtype, value.shape, like.quantization)
        self.emit("QUANTIZE", [value], target, "QuantizeOptions")
        return target

    def moved(self, value: Value, dtype: str) -> Value:
        """A quantised value as the other 8-bit type: the same real numbers, stored 128 higher or lower."""
        if value.dtype == dtype:
            return value
        shift = 128 if dtype == "uint8" else -128
        quantization = Quantization((value.scale,), value.zero_point + shift)
        if value.constant is not None:
            return self.constant((value.constant.astype(np.int16) + shift).astype(dtype), quantization)
        target = self.temporary(dtype, value.shape, quantization)
        self.emit("QUANTIZE", [value], target, "QuantizeOptions")
        return target

    def moved_output(self, output: Value, dtype: str, write: Callable[[Value], None]) -> None:
        """Lets ``write`` compute an output as the other 8-bit type."""
        if output.dtype == dtype:
            write(output)
            return
        shift = 128 if dtype == "uint8" else -128
        target = self.temporary(dtype, output.shape, Quantization((output.scale,), output.zero_point + shift))
        write(target)
        self.emit("QUANTIZE", [target], output, "QuantizeOptions")

"""Conversions between floats and 8-bit numbers.

A value with one scale becomes a quantised operand; scales for each channel or block are written as formulas of unquantised
numbers, and constants become floats at import.

Source: QuantizeLinear and DequantizeLinear of ONNX.
"""

from __future__ import annotations

import numpy as np

from aionn.hal import Operand, OperandType, OperationType
from aionn.models.onnx.conversions.elementwise import round_
from aionn.models.onnx.conversions.layers import conv, matmul
from aionn.models.onnx.formula import aligned
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.schema import DataType
from aionn.models.onnx.tensors import Array, Inexpressible, Tensor
from aionn.models.onnx.writer import GraphWriter

__all__ = ["dequantize", "qlinear_conv", "qlinear_matmul", "quantize"]


def _parameters(g: GraphWriter, op: Operator, x: Tensor, dtype: str) -> tuple[Array, Array]:
    """Scales and zero points, as single numbers or in shapes that broadcast to the value's."""
    scale = op.array(1, "the scale")
    zero = op.array(2, "the zero point") if op.has(2) else np.zeros(scale.shape, dtype)
    axis, block = op.integer("axis", 1), op.integer("block_size", 0)
    g.charge(2 * scale.nbytes)
    if not np.isfinite(scale).all() or (scale <= 0).any():
        op.refuse("scale", "positive numbers", "others")
    if scale.shape != zero.shape and zero.size != 1:
        op.refuse("zero point", list(scale.shape), list(zero.shape))
    if scale.size == 1 and not block:
        return scale.reshape(()), zero.reshape(())[()] * np.ones((), zero.dtype)
    axis = op.axis(axis, x.rank)
    if scale.ndim == 1 and not block:
        if scale.size != x.shape[axis]:
            op.refuse("scale", x.shape[axis], scale.size)
        across = (-1, *(1,) * (x.rank - axis - 1))
        return scale.reshape(across), np.broadcast_to(zero, scale.shape).reshape(across)
    counts = [-(-e // block) if a == axis and block > 0 else e for a, e in enumerate(x.shape)]
    if block < 1 or list(scale.shape) != counts:
        op.refuse("scale", f"one for each block of {list(x.shape)}", list(scale.shape))
    g.charge(scale.size * block * (scale.itemsize + zero.itemsize))
    whole = [np.repeat(np.broadcast_to(v, scale.shape), block, axis) for v in (scale, zero)]
    index = tuple(slice(0, extent) for extent in x.shape)
    return whole[0][index], whole[1][index]


def quantize(g: GraphWriter, op: Operator) -> Tensor:
    """QUANTIZE for one scale; else DIV, rounding, ADD, MAXIMUM, MINIMUM and a cast to unquantised numbers."""
    x = op.input(0)
    op.ignore("saturate", "precision")
    stated = {0: "", DataType.UINT8: "uint8", DataType.INT8: "int8"}.get(op.integer("output_dtype", 0))
    dtype = op.input(2).dtype if op.has(2) else stated or "uint8"
    if x.dtype not in ("float32", "float16") or stated is None or dtype not in ("uint8", "int8"):
        raise Inexpressible(f"values of type {x.dtype} as {dtype}")
    scale, zero = _parameters(g, op, x, dtype)
    kind = OperandType.TENSOR_QUANT8_ASYMM if dtype == "uint8" else OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    if scale.size == 1:
        like = Operand(kind, (), float(scale), int(zero))
        return g.tensor(
            g.emit(OperationType.QUANTIZE, [g.form(x, x.order)], like), dtype, x.shape, order=x.order
        )
    if x.dtype != "float32":
        raise Inexpressible(f"scales for each channel of type {x.dtype}")
    all_ = aligned(g, op, [x, g.constant(scale), g.constant(zero.astype(np.float32))])
    f, scales, zeros = all_.formulas()
    low, high = (0, 255) if dtype == "uint8" else (-128, 127)
    whole = (round_(f / scales, op) + zeros).maximum(low).minimum(high)
    operation = OperationType.CAST if dtype == "uint8" else OperationType.QUANTIZE
    return all_.tensor(g.emit(operation, [whole.value], g.described(dtype)), dtype)


def dequantize(g: GraphWriter, op: Operator) -> Tensor:
    """DEQUANTIZE if the operand has the scale, else CAST to floats, SUB of the zero point and MUL by the scale."""
    x = op.input(0)
    dtype = op.input(1).dtype
    scale, zero = _parameters(g, op, x, x.dtype)
    if dtype not in ("float32", "float16") or op.integer("output_dtype", 0) not in (
        0,
        DataType.FLOAT if dtype == "float32" else DataType.FLOAT16,
    ):
        raise Inexpressible(f"values of type {x.dtype} as {dtype}")
    if x.array is not None:
        g.charge(x.size * 12)
        numbers = x.array.astype(np.int64) - zero.astype(np.int64)
        return g.constant(
            numbers.astype(np.float32) * scale if dtype == "float32" else (numbers * scale).astype(dtype)
        )
    if x.dtype not in ("uint8", "int8", "int32"):
        raise Inexpressible(f"values of type {x.dtype}")
    value, like = g.form(x, x.order), g.described(dtype)
    operand = value.operand
    if (
        scale.size == 1
        and x.dtype != "int32"
        and (operand.scale, operand.zero_point) == (float(scale), int(zero))
    ):
        return g.tensor(g.emit(OperationType.DEQUANTIZE, [value], like), dtype, x.shape, order=x.order)
    if x.dtype != "int32":
        g.check_plain(value)
    kind = OperationType.DEQUANTIZE if x.dtype == "int8" else OperationType.CAST
    floats = g.tensor(g.emit(kind, [value], like), dtype, x.shape, order=x.order)
    all_ = aligned(g, op, [floats, g.constant(zero.astype(dtype)), g.constant(scale)])
    f, zeros, scales = all_.formulas()
    return all_.tensor((f - zeros) * scales, dtype)


def _floats(g: GraphWriter, op: Operator, first: int, axis: int) -> Tensor:
    """The floats of an input whose scale and zero point are the next two inputs."""
    three = [op.input(first), op.input(first + 1), op.input(first + 2)]
    return dequantize(g, op.derived("DequantizeLinear", three, axis=axis, block_size=0))


def qlinear_matmul(g: GraphWriter, op: Operator) -> Tensor:
    """DEQUANTIZE, a product of floats, and QUANTIZE: its result differs by at most one step from that of whole numbers."""
    a, b = _floats(g, op, 0, max(0, op.input(0).rank - 2)), _floats(g, op, 3, max(0, op.input(3).rank - 1))
    product = _single(g, matmul(g, op.derived("MatMul", [a, b])))
    return quantize(g, op.derived("QuantizeLinear", [product, op.input(6), op.input(7)]))


def qlinear_conv(g: GraphWriter, op: Operator) -> Tensor:
    """The same as ``qlinear_matmul`` for a convolution; the scale of its bias is the product of both scales."""
    x, weights = _floats(g, op, 0, 1), _floats(g, op, 3, 0)
    bias = None
    if op.has(8):
        scale = op.array(1, "the scale") * op.array(4, "the scale of the weights")
        bias = g.constant((op.array(8, "the bias") * scale).astype(np.float32))
    result = _single(g, conv(g, op.derived("Conv", [x, weights, bias])))
    return quantize(g, op.derived("QuantizeLinear", [result, op.input(6), op.input(7)]))


def _single(g: GraphWriter, x: Tensor) -> Tensor:
    """A value in float32; float16 cannot represent all steps of a product of 8-bit numbers."""
    if x.dtype == "float32":
        return x
    value = g.emit(OperationType.CAST, [g.form(x, x.order)], g.described("float32"))
    return g.tensor(value, "float32", x.shape, order=x.order)

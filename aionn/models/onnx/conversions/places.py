"""Operators that choose elements by index, and those that move blocks of an image into channels and back.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math

import numpy as np

from aionn.hal import OperationType
from aionn.models.builder import Value
from aionn.models.onnx.conversions.movement import moved
from aionn.models.onnx.formula import Formula
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.tensors import RANK_MAX, Array, Inexpressible, Shape, Tensor, stored_shape
from aionn.models.onnx.writer import GraphWriter

__all__ = ["depth_to_space", "gather", "gather_elements", "gather_nd", "space_to_depth"]


# Choices by index


def _whole_indices(g: GraphWriter, op: Operator, indices: Tensor, extent: int) -> Value:
    """The indexes without negative ones, which ONNX counts from the end."""
    if indices.dtype not in ("int32", "int64"):
        op.refuse("indexes", "whole numbers of 32 or 64 bits", indices.dtype)
    if indices.array is not None:
        if indices.size and (indices.limits[0] < -extent or indices.limits[1] >= extent):
            op.refuse(
                "indexes",
                f"numbers from {-extent} to {extent - 1}",
                f"{indices.limits[0]} to {indices.limits[1]}",
            )
        g.charge(4 * indices.size)
        return g.constant_value(
            np.where(indices.array < 0, indices.array + extent, indices.array).astype(np.int32)
        )
    value = g.form(indices)
    if indices.limits[0] >= 0:
        return value
    f = Formula(g, value)
    return f.less(0).where(f + extent, f, f).value


def gather(g: GraphWriter, op: Operator) -> Tensor:
    x, indices = op.input(0), op.input(1)
    axis = op.axis(op.integer("axis", 0), x.rank)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    if x.array is not None and indices.array is not None:
        _whole_indices(g, op, indices, x.shape[axis])
        if not x.array.flags.aligned:
            # Else numpy would copy all of a constant of the file for each of many nodes that take one element of it.
            g.charge(x.array.nbytes)
            x.array = x.array.copy()
        g.charge(math.prod(shape) * x.array.itemsize)
        return g.constant(np.take(x.array, indices.array, axis), x.dtype)
    if 0 in shape:
        raise Inexpressible("a value without elements")
    places = _whole_indices(g, op, indices, x.shape[axis])
    if indices.rank == 1 and x.rank <= RANK_MAX and x.dtype != "bool":
        value = g.emit(OperationType.GATHER, [g.form(x, x.order), x.order.index(axis), places])
        return g.tensor(value, x.dtype, shape, order=x.order, limits=x.limits)
    merged = (math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
    value = g.form(x)
    if x.dtype == "bool":
        value = g.as_bytes(value)
    flat = g.reshaped(places, (indices.size,))
    value = g.emit(OperationType.GATHER, [g.reshaped(value, merged), 1, flat])
    value = g.reshaped(value, stored_shape(shape))
    return g.tensor(g.as_truth(value) if x.dtype == "bool" else value, x.dtype, shape, limits=x.limits)


def gather_elements(g: GraphWriter, op: Operator) -> Tensor:
    """GATHER from the flattened value, at the index times the stride of its axis plus the offset of the other axes."""
    x, indices = op.input(0), op.input(1)
    axis = op.axis(op.integer("axis", 0), x.rank)
    if indices.rank != x.rank:
        op.refuse("indexes", f"rank {x.rank}", indices.rank)
    if any(i > e for a, (i, e) in enumerate(zip(indices.shape, x.shape)) if a != axis):
        op.refuse("indexes", f"a shape inside of {list(x.shape)}", list(indices.shape))
    places = Formula(g, _whole_indices(g, op, indices, x.shape[axis]))
    strides = [math.prod(x.shape[a + 1 :]) for a in range(x.rank)]
    g.charge(4 * indices.size)
    base = np.zeros(indices.shape, np.int32)
    for other in range(x.rank):
        if other != axis:
            across = (1,) * other + (-1,) + (1,) * (x.rank - other - 1)
            base = base + (np.arange(indices.shape[other], dtype=np.int32) * strides[other]).reshape(across)
    flat = places * strides[axis] + Formula(g, g.constant_value(base.astype(np.int32)))
    return _at(g, x, flat.value, indices.shape)


def _at(g: GraphWriter, x: Tensor, places: Value, shape: Shape) -> Tensor:
    value = g.as_bytes(g.form(x)) if x.dtype == "bool" else g.form(x)
    value = g.emit(OperationType.GATHER, [g.reshaped(value, (x.size,)), 0, places])
    value = g.reshaped(value, stored_shape(shape))
    return g.tensor(g.as_truth(value) if x.dtype == "bool" else value, x.dtype, shape, limits=x.limits)


def gather_nd(g: GraphWriter, op: Operator) -> Tensor:
    """GATHER of rows from the flattened value, for constant indexes."""
    x, batches = op.input(0), op.integer("batch_dims", 0)
    indices = op.array(1, "the indexes")
    depth = indices.shape[-1] if indices.ndim else 0
    if not 0 <= batches < min(x.rank, indices.ndim) or not 0 < depth <= x.rank - batches:
        op.refuse(
            "indexes", f"fitting ones for {list(x.shape)}", f"{list(indices.shape)} after {batches} axes"
        )
    g.charge(8 * indices.size)
    extents = np.array(x.shape[batches : batches + depth])
    if ((indices < -extents) | (indices >= extents)).any() or indices.shape[:batches] != x.shape[:batches]:
        op.refuse("indexes", f"numbers inside of {list(x.shape)}", "others")
    indices = np.where(indices < 0, indices + extents, indices)
    shape = (*indices.shape[:-1], *x.shape[batches + depth :])

    def move(array: Array) -> Array:
        if not batches:
            return np.asarray(array[tuple(np.moveaxis(indices, -1, 0))])
        grid = np.indices(indices.shape[:-1])[:batches]
        return np.asarray(array[(*grid, *np.moveaxis(indices, -1, 0))])

    return moved(g, x, shape, move)


# Blocks


def depth_to_space(g: GraphWriter, op: Operator) -> Tensor:
    x = op.input(0)
    block, mode = op.integer("blocksize"), op.text("mode", "DCR")
    if x.rank != 4 or block < 1 or x.shape[1] % block**2 or mode not in ("DCR", "CRD"):
        op.refuse("block", "one that fits an image", f"{block} {mode} for {list(x.shape)}")
    n, c, h, w = x.shape
    depth = c // block**2
    shape = (n, depth, h * block, w * block)

    def move(array: Array) -> Array:
        if mode == "DCR":
            return array.reshape(n, block, block, depth, h, w).transpose(0, 3, 4, 1, 5, 2).reshape(shape)
        return array.reshape(n, depth, block, block, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(shape)

    def direct() -> Tensor:
        last = (0, 2, 3, 1)
        value = g.form(x, last)
        if mode == "CRD":
            channels = g.counted(c).reshape(depth, block**2).T.reshape(-1)
            value = g.emit(OperationType.GATHER, [value, 3, g.constant_value(channels)])
        return g.tensor(g.emit(OperationType.DEPTH_TO_SPACE, [value, block]), x.dtype, shape, order=last)

    return moved(g, x, shape, move, direct)


def space_to_depth(g: GraphWriter, op: Operator) -> Tensor:
    x, block = op.input(0), op.integer("blocksize")
    mode = op.text("mode", "DCR")
    if x.rank != 4 or block < 1 or x.shape[2] % block or x.shape[3] % block or mode not in ("DCR", "CRD"):
        op.refuse("block", "one that fits an image", f"{block} {mode} for {list(x.shape)}")
    n, c, h, w = x.shape
    shape = (n, c * block**2, h // block, w // block)

    def move(array: Array) -> Array:
        parts = array.reshape(n, c, h // block, block, w // block, block)
        return parts.transpose((0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)).reshape(shape)

    def direct() -> Tensor:
        if mode != "DCR":
            raise Inexpressible("another order of channels")
        last = (0, 2, 3, 1)
        value = g.emit(OperationType.SPACE_TO_DEPTH, [g.form(x, last), block])
        return g.tensor(value, x.dtype, shape, order=last)

    return moved(g, x, shape, move, direct)

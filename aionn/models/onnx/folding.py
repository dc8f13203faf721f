"""Operators whose inputs are constants, computed by numpy at import: the arithmetic of shapes that exporters leave in a file.

Owns the evaluation, in ONNX's own element types, 64-bit ones included. The conversions of operators that only move elements compute
constants themselves. Operators that have no entry in the table here are written as HAL operations, whose kernels compute the
constants.

Invariants:
1. A folded result is the one that the operator's specification defines.
2. The size of a result is charged before it takes memory.

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.models.onnx.constants import DTYPES
from aionn.models.onnx.extension.narrow import CARRIERS, NAMES
from aionn.models.onnx.operator import Operator
from aionn.models.onnx.schema import AttributeType, DataType
from aionn.models.onnx.tensors import Array, Inexpressible, Tensor
from aionn.models.onnx.writer import GraphWriter

__all__ = [
    "constant",
    "constant_of_shape",
    "element_type",
    "eye_like",
    "fold",
    "range_",
    "shape_of",
    "size_of",
]

Folder = Callable[[Operator, list[Array]], Array | None]

WIDEST_BYTES = 8
"""The size of an element of the widest type."""


def fold(g: GraphWriter, op: Operator) -> Tensor | None:
    """The result if all inputs are constants and the operator is in the table, else None."""
    folder = FOLDERS.get(op.type)
    if folder is None or op.node.domain or not op.inputs:
        return None
    arrays = [t.array for t in op.inputs if t is not None]
    if any(a is None for a in arrays) or not arrays or len(arrays) != len(op.inputs):
        return None
    given = [a for a in arrays if a is not None]
    least, most = ARITIES.get(op.type, (2, 2))
    if not least <= len(given) <= most:
        op.refuse("number of inputs", f"{least} to {most}", len(given))
    try:
        shape = np.broadcast_shapes(*(a.shape for a in given)) if op.type not in REDUCED else given[0].shape
    except ValueError:
        op.refuse("shapes", "ones that broadcast", " and ".join(str(list(a.shape)) for a in given))
    itemsize = WIDEST_BYTES if op.type == "Cast" else max(a.itemsize for a in given)
    # A list of inputs may name the same constant many times: each costs a pass over the elements.
    g.charge(math.prod(shape) * itemsize * max(1, len(given) - 1))
    if op.type.startswith("Scatter"):
        g.charge(sum(a.size for a in given) * WIDEST_BYTES)
    if op.type == "NonZero":
        g.charge(math.prod(shape) * 8 * len(shape))
    if op.version < 7 and op.has_attribute("axis") and op.type not in REDUCED:
        return None
    with np.errstate(all="ignore"):
        result = folder(op, given)
    if result is None:
        return None
    if op.activation:
        low, high = {1: (0, math.inf), 2: (-1, 1), 3: (0, 6)}[int(op.activation)]
        result = np.minimum(np.maximum(result, low), high).astype(result.dtype)
    dtype = _result_type(op, result)
    return g.constant(g.rounded(result, dtype), dtype)


def _result_type(op: Operator, result: Array) -> str:
    """The element type of a result: numpy's, or the type of inputs that numpy lacks."""
    if op.type == "Cast":
        return element_type(op, op.integer("to"))
    source = op.given()[1 if op.type == "Where" else 0]
    return source.dtype if result.dtype == source.numpy_type else result.dtype.name


def _elementwise(function: Callable[..., Any]) -> Folder:
    """A function of numpy whose result has the type of the first value."""

    def folder(op: Operator, arrays: list[Array]) -> Array:
        op.ignore("broadcast", "consumed_inputs")
        return np.asarray(function(*arrays)).astype(arrays[0].dtype, copy=False)

    return folder


def _truth(function: Callable[..., Any]) -> Folder:
    def folder(op: Operator, arrays: list[Array]) -> Array:
        op.ignore("broadcast")
        return np.asarray(function(*arrays), np.bool_)

    return folder


def _chain(function: Callable[..., Any]) -> Folder:
    def folder(op: Operator, arrays: list[Array]) -> Array:
        op.ignore("consumed_inputs")
        total = arrays[0]
        for array in arrays[1:]:
            total = function(total, array)
        return np.asarray(total)

    return folder


def _divide(op: Operator, arrays: list[Array]) -> Array:
    op.ignore("broadcast", "consumed_inputs")
    a, b = arrays
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    if (b == 0).any():
        raise Inexpressible("a division by a constant 0")
    quotient = a // b
    return np.asarray(quotient + ((quotient < 0) & (a % b != 0)).astype(a.dtype)).astype(a.dtype)


def _modulo(op: Operator, arrays: list[Array]) -> Array:
    is_c = bool(op.integer("fmod", 0))
    if arrays[1].dtype.kind in "iu" and (arrays[1] == 0).any():
        raise Inexpressible("a division by a constant 0")
    return np.asarray(np.fmod(*arrays) if is_c else np.mod(*arrays))


def _power(op: Operator, arrays: list[Array]) -> Array:
    a, b = arrays
    if a.dtype.kind in "iu" and b.dtype.kind in "iu" and (b < 0).any():
        raise Inexpressible("a negative power of whole numbers")
    return np.asarray(np.power(a, b)).astype(a.dtype)


def _clip(op: Operator, arrays: list[Array]) -> Array:
    if op.version < 11:
        low, high = op.real("min", -math.inf), op.real("max", math.inf)
        return np.asarray(np.minimum(np.maximum(arrays[0], low), high)).astype(arrays[0].dtype)
    result = arrays[0]
    for function, bound in zip((np.maximum, np.minimum), arrays[1:]):
        result = function(result, bound.reshape(()))
    return np.asarray(result).astype(arrays[0].dtype)


def element_type(op: Operator, number: int) -> str:
    """The name of an element type that an attribute gives by number.

    Raises:
        Inexpressible: The importer has no constants of the type.
    """
    name = NAMES[DataType(number)] if number in DTYPES else None
    if name is None:
        known = number in DataType.__members__.values()
        raise Inexpressible(f"elements of type {DataType(number).name if known else number}")
    return name


def _cast(op: Operator, arrays: list[Array]) -> Array:
    op.ignore("saturate", "round_mode")
    if op.has_attribute("to") and op.node.attributes["to"].type == AttributeType.STRING:
        raise Inexpressible("a type by its name")
    dtype = element_type(op, op.integer("to"))
    # Numbers are rounded once, from their own type.
    return arrays[0] if dtype in CARRIERS else arrays[0].astype(dtype)


def _where(op: Operator, arrays: list[Array]) -> Array:
    return np.where(arrays[0], arrays[1], arrays[2])


def _reduce(function: Callable[..., Any], first_version: int = 18) -> Folder:
    def folder(op: Operator, arrays: list[Array]) -> Array | None:
        keeps = bool(op.integer("keepdims", 1))
        x = arrays[0]
        noop = bool(op.integer("noop_with_empty_axes", 0)) if op.version >= first_version else False
        if op.version >= first_version:
            given = arrays[1].reshape(-1).tolist() if len(arrays) > 1 else []
        else:
            given = op.integers("axes") or []
        if not given and noop:
            return x if function in (np.sum, np.prod, np.max, np.min, np.mean) else _none()
        axes = tuple(op.axes(given, x.ndim)) if given else None
        if x.size == 0:
            return None
        return np.asarray(function(x, axis=axes, keepdims=keeps)).astype(x.dtype)

    return folder


def _none() -> Array:
    raise Inexpressible("a reduction of no axes")


def _nonzero(op: Operator, arrays: list[Array]) -> Array:
    return np.array(np.nonzero(arrays[0]), np.int64).reshape(arrays[0].ndim, -1)


_UPDATES: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _places(op: Operator, indices: Array, extent: int) -> Array:
    if indices.dtype.kind not in "iu":
        op.refuse("input 1 (indexes)", "whole numbers", indices.dtype)
    if indices.size and not -extent <= int(indices.min()) <= int(indices.max()) < extent:
        op.refuse("input 1 (indexes)", f"numbers from {-extent} to {extent - 1}", "others")
    return indices


def _updated(op: Operator, x: Array, places: tuple[Array, ...], updates: Array) -> Array:
    result, reduction = x.copy(), op.text("reduction", "none")
    if updates.dtype != x.dtype:
        op.refuse("input 2 (updates)", x.dtype, updates.dtype)
    if reduction == "none":
        result[places] = updates
    elif reduction in _UPDATES and x.dtype.kind in "iuf":
        _UPDATES[reduction].at(result, places, updates)
    else:
        raise Inexpressible(f"reduction {reduction:.20} of {x.dtype}")
    return result


def _scatter_nd(op: Operator, arrays: list[Array]) -> Array:
    x, indices, updates = arrays
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= x.ndim or updates.shape != (*indices.shape[:-1], *x.shape[depth:]):
        op.refuse("shapes", "indexes and updates that fit the data", [list(a.shape) for a in arrays])
    return _updated(op, x, tuple(_places(op, indices[..., i], x.shape[i]) for i in range(depth)), updates)


def _scatter_elements(op: Operator, arrays: list[Array]) -> Array:
    x, indices, updates = arrays
    axis = op.axis(op.integer("axis", 0), x.ndim)
    is_within = indices.ndim == x.ndim and all(
        own <= extent or place == axis
        for place, (own, extent) in enumerate(zip(indices.shape, x.shape, strict=True))
    )
    if indices.shape != updates.shape or not is_within:
        op.refuse("shapes", "indexes and updates that fit the data", [list(a.shape) for a in arrays])
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = _places(op, indices, x.shape[axis])
    return _updated(op, x, tuple(places), updates)


ARITIES = {
    **dict.fromkeys(
        ("Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tanh"), (1, 1)
    ),
    **dict.fromkeys(("Reciprocal", "Relu", "Cast", "Not", "NonZero"), (1, 1)),
    **dict.fromkeys(("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean"), (1, 2)),
    **dict.fromkeys(("Max", "Min", "Sum"), (1, 1 << 20)),
    "Clip": (1, 3),
    "Where": (3, 3),
    "ScatterND": (3, 3),
    "ScatterElements": (3, 3),
}
"""Least and largest number of inputs; all others have two."""

REDUCED = {
    "ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean", "NonZero", "ScatterND", "ScatterElements",
}  # fmt: skip
"""Operators whose inputs do not broadcast."""

FOLDERS: dict[str, Folder] = {
    "Abs": _elementwise(np.abs),
    "Neg": _elementwise(np.negative),
    "Sign": _elementwise(np.sign),
    "Floor": _elementwise(np.floor),
    "Ceil": _elementwise(np.ceil),
    "Round": _elementwise(np.rint),
    "Sqrt": _elementwise(np.sqrt),
    "Exp": _elementwise(np.exp),
    "Log": _elementwise(np.log),
    "Sin": _elementwise(np.sin),
    "Cos": _elementwise(np.cos),
    "Tanh": _elementwise(np.tanh),
    "Reciprocal": _elementwise(np.reciprocal),
    "Relu": _elementwise(lambda x: np.maximum(x, np.zeros((), x.dtype))),
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _divide,
    "Mod": _modulo,
    "Pow": _power,
    "Max": _chain(np.maximum),
    "Min": _chain(np.minimum),
    "Sum": _chain(np.add),
    "Clip": _clip,
    "Cast": _cast,
    "Where": _where,
    "Equal": _truth(np.equal),
    "Less": _truth(np.less),
    "LessOrEqual": _truth(np.less_equal),
    "Greater": _truth(np.greater),
    "GreaterOrEqual": _truth(np.greater_equal),
    "And": _truth(np.logical_and),
    "Or": _truth(np.logical_or),
    "Xor": _truth(np.logical_xor),
    "Not": _truth(np.logical_not),
    "ReduceSum": _reduce(np.sum, 13),
    "ReduceProd": _reduce(np.prod),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceMean": _reduce(np.mean),
    "NonZero": _nonzero,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
}
"""The function that computes the result, by operator; it returns None where the conversion has to."""


# Constants that need no values


def shape_of(g: GraphWriter, op: Operator) -> Any:
    """The shape of a value."""
    shape = op.input(0).shape
    # ``start`` and ``end`` beyond the rank are clamped, as in a slice of Python.
    start = op.integer("start", 0)
    end = op.integer("end", len(shape))
    return g.constant(np.array(shape[start:end], np.int64))


def size_of(g: GraphWriter, op: Operator) -> Any:
    """The number of elements of a value."""
    return g.constant(np.array(op.input(0).size, np.int64))


def constant(g: GraphWriter, op: Operator) -> Any:
    """The value of an attribute."""
    given: list[Tensor] = []
    whole, wholes = op.raw("value_int", AttributeType.INT), op.integers("value_ints")
    real, reals = op.raw("value_float", AttributeType.FLOAT), op.reals("value_floats")
    for value, dtype in ((whole, np.int64), (wholes, np.int64), (real, np.float32), (reals, np.float32)):
        if value is not None:
            given.append(g.constant(np.array(value, dtype)))
    given += [tensor for tensor in (op.tensor("value"), op.sparse("sparse_value")) if tensor is not None]
    if op.has_attribute("value_string") or op.has_attribute("value_strings"):
        op.ignore("value_string", "value_strings")
        raise Inexpressible("texts")
    if len(given) != 1:
        op.refuse("attributes", "one value", len(given))
    return given[0]


def _extents(op: Operator, numbers: Sequence[int]) -> tuple[int, ...]:
    if any(extent < 0 for extent in numbers):
        op.refuse("shape", "extents of 0 or more", list(numbers))
    return tuple(numbers)


def constant_of_shape(g: GraphWriter, op: Operator) -> Any:
    """An array with one value in all elements: a view, which takes no memory until it is used."""
    shape = _extents(op, op.numbers(0, "the shape"))
    tensor = op.tensor("value") or g.constant(np.zeros((), np.float32))
    value = tensor.array
    assert value is not None, "attributes are constants"
    if value.size != 1:
        op.refuse("attribute 'value'", "one number", value.size)
    if math.prod(shape) * value.itemsize >= 2**32:
        op.refuse("shape", "less than 2**32 bytes", list(shape))
    return g.constant(np.broadcast_to(value.reshape(()), shape), tensor.dtype)


def range_(g: GraphWriter, op: Operator) -> Any:
    """Numbers from a start to a limit."""
    start, limit, delta = map(op.single, range(3), ("start", "limit", "step"))
    if delta == 0:
        op.refuse("input 2 (step)", "not 0", 0)
    try:
        count = max(0, math.ceil((limit.item() - start.item()) / delta.item()))
    except (OverflowError, ValueError):
        op.refuse("start, limit and step", "finite numbers", f"{start}, {limit} and {delta}")
    g.charge(count * WIDEST_BYTES)
    # Each number is computed by a product, since repeated sums would accumulate rounding errors.
    numbers = start + np.arange(count).astype(start.dtype) * delta
    dtype = op.input(0).dtype
    return g.constant(g.rounded(numbers, dtype), dtype)


def eye_like(g: GraphWriter, op: Operator) -> Any:
    """Ones on a diagonal."""
    x = op.input(0)
    if x.rank != 2:
        op.refuse("input 0", "a matrix", list(x.shape))
    dtype = element_type(op, op.integer("dtype")) if op.has_attribute("dtype") else x.dtype
    g.charge(x.size * 8)
    rows, columns = x.shape
    eye = np.eye(rows, columns, op.integer("k", 0), np.dtype(CARRIERS.get(dtype, dtype)))
    return g.constant(eye, dtype)


def window(g: GraphWriter, op: Operator) -> Any:
    """The constant of HannWindow, HammingWindow or BlackmanWindow."""
    size = int(op.single(0, "the size"))
    if not 0 < size < 1 << 24:
        op.refuse("size", "a number from 1 to 2**24", size)
    n = g.counted(size) / max(1, size if op.integer("periodic", 1) else size - 1)
    shares = {
        "HannWindow": (0.5, 0.5, 0.0),
        "HammingWindow": (25 / 46, 21 / 46, 0.0),
        "BlackmanWindow": (0.42, 0.5, 0.08),
    }[op.type]
    values = shares[0] - shares[1] * np.cos(2 * np.pi * n) + shares[2] * np.cos(4 * np.pi * n)
    dtype = element_type(op, op.integer("output_datatype", 1))
    return g.constant(g.rounded(values, dtype), dtype)

"""Evaluates models by the plain definitions: what the reference is judged by.

Owns the order of work, ``DEFINITIONS``, all of them together, and the legal roundings of results, which show whether a graph has a
single right answer.

Source: see ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aionn.conformance.random_graphs.plain import Array, Definition, PlainCall, stored_numbers
from aionn.conformance.random_graphs.plain_elementwise import DEFINITIONS as _ELEMENTWISE
from aionn.conformance.random_graphs.plain_layers import DEFINITIONS as _LAYERS
from aionn.conformance.random_graphs.plain_layout import DEFINITIONS as _LAYOUT
from aionn.conformance.random_graphs.sets import EXACT_OPERATIONS
from aionn.errors import InvalidArgument
from aionn.hal import (
    OPERAND_TYPE_PROPERTIES,
    Model,
    Operand,
    OperandType,
    OperationType,
    constant_array,
)

__all__ = ["DEFINITIONS", "Disturb", "Disturbance", "evaluate_plainly"]

DEFINITIONS: dict[OperationType, Definition] = {**_ELEMENTWISE, **_LAYERS, **_LAYOUT}
"""The plain definition of each operation that has one."""

_FLOAT16_RANGE = (np.finfo(np.float16).min, np.finfo(np.float16).max)

ROUNDED_UNITS = 8
"""Units in the last place by which implementations of one operation differ, as the criteria for single operations allow."""

Disturb = Callable[[PlainCall, Operand, Array], Array]
"""Given an operation with its inputs, the operand that it writes and the result: the result as another implementation might have
it."""


def evaluate_plainly(
    model: Model, inputs: Sequence[Array | None], *, disturb: Disturb | None = None
) -> list[Array]:
    """Runs a model without control flow.

    Args:
        model: A legal model.
        inputs: One array an argument; None for one that is left out.
        disturb: Changes each result before later operations take it; None leaves them as they are.

    Raises:
        InvalidArgument: The model has an operation without a definition here.
    """
    graph = model.main
    values: dict[int, Array | None] = {
        index: constant_array(model, operand)
        for index, operand in enumerate(graph.operands)
        if operand.is_constant
    }
    values.update(zip(graph.input_indexes, inputs, strict=True))
    with np.errstate(all="ignore"):
        for position, operation in enumerate(graph.operations):
            definition = DEFINITIONS.get(OperationType(operation.type))
            if definition is None:
                name = OperationType(operation.type).name
                raise InvalidArgument(f"operation {position}: {name} has no plain definition")
            outputs = [graph.operands[i] for i in operation.outputs]
            call = PlainCall(
                OperationType(operation.type),
                [graph.operands[i] for i in operation.inputs],
                [values.get(i) for i in operation.inputs],
                outputs,
            )
            results = definition(call)
            for index, operand, result in zip(operation.outputs, outputs, results, strict=True):
                stored = stored_numbers(result, operand)
                values[index] = stored if disturb is None else disturb(call, operand, stored)
    found = [values[index] for index in graph.output_indexes]
    return [array for array in found if array is not None]


class Disturbance:
    """Rounds results as other legal implementations might: floats by some units in the last place, quantised values by a step.

    Products of many elements are taken in float32 one after another, from either end: what is beyond its range in between stays an
    infinity or 0, though the product itself is a small number.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, call: PlainCall, operand: Operand, result: Array) -> Array:
        if call.operation in EXACT_OPERATIONS or result.size == 0:
            return result
        if call.operation == OperationType.REDUCE_PROD:
            result = _product_in_turn(call, result, is_from_end=bool(self._rng.integers(2)))
        if result.dtype.kind == "f":
            wide = result.astype(np.float64)
            finite = wide[np.isfinite(wide)]
            # A sum's error is that of its largest terms, however small the sum.
            typical = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
            unit = float(np.finfo(result.dtype).eps) * ROUNDED_UNITS
            if self._rng.integers(2):
                size = np.where(np.isfinite(wide), np.abs(wide), 0.0) + typical
                moved = wide + self._rng.uniform(-unit, unit, result.shape) * size
            else:
                # Nearly equal numbers become equal, and those near zero become zero, which no random error does.
                grid = unit * typical
                moved = np.round(wide / grid) * grid if grid else wide
            if result.dtype == np.float16 and self._rng.integers(2):
                # Others keep these numbers in float32, and have a large number instead of an infinity.
                moved = np.clip(moved, *_FLOAT16_RANGE)
            return np.asarray(moved, result.dtype)
        if OPERAND_TYPE_PROPERTIES[OperandType(operand.type)].is_quantized:
            info = np.iinfo(result.dtype)
            step = self._rng.integers(-1, 2, result.shape)
            return np.asarray(np.clip(result.astype(np.int64) + step, info.min, info.max), result.dtype)
        return result


def _product_in_turn(call: PlainCall, result: Array, *, is_from_end: bool) -> Array:
    x = call.tensor(0).astype(np.float32)
    axes = sorted({axis % x.ndim for axis in call.integers(1)})
    last = range(x.ndim - len(axes), x.ndim)
    elements = np.moveaxis(x, axes, last).reshape(result.size, -1)
    if not elements.size:
        return result
    products = np.multiply.accumulate(elements[:, ::-1] if is_from_end else elements, axis=1)
    return products[:, -1].reshape(result.shape).astype(result.dtype)

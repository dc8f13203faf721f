"""Plain definitions of the operations that treat each element by itself.

Owns ``DEFINITIONS`` of these operations; see ``plain``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aionn.conformance.random_graphs.plain import Array, Definition, PlainCall, Stored, activated
from aionn.hal import OperationType, operand_dtype

__all__ = ["DEFINITIONS"]


def _one(function: Callable[[Array], Array]) -> Definition:
    return lambda call: [function(call.tensor(0))]


def _two(function: Callable[[Array, Array], Array]) -> Definition:
    return lambda call: [function(call.tensor(0), call.tensor(1))]


def _two_activated(function: Callable[[Array, Array], Array]) -> Definition:
    return lambda call: [activated(function(call.tensor(0), call.tensor(1)), call.integer(2))]


def _divide(a: Array, b: Array) -> Array:
    return np.asarray(np.floor_divide(a, b) if a.dtype == np.int64 else np.true_divide(a, b))


def _hard_swish(x: Array) -> Array:
    return np.asarray(x * np.clip(x + 3, 0, 6) / 6)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _elu(call: PlainCall) -> list[Array]:
    x, alpha = call.tensor(0), call.number(1)
    return [np.where(x >= 0, x, alpha * np.expm1(x))]


def _cast(call: PlainCall) -> list[Stored]:
    """Quantised values are numbers like any other here: their scale is not looked at."""
    x = call.stored[0]
    assert x is not None
    dtype = operand_dtype(call.outputs[0].type)
    if dtype.kind not in "iu" or x.dtype == dtype:
        return [Stored(x)]
    info = np.iinfo(np.dtype(dtype.name))
    wide = x.astype(np.float64)
    # numpy leaves the integer of a NaN to the processor, which has several.
    whole = np.where(np.isnan(wide), 0.0, np.trunc(wide))
    return [Stored(np.clip(whole, info.min, info.max))]


def _select(call: PlainCall) -> list[Array]:
    return [np.where(call.tensor(0), call.tensor(1), call.tensor(2))]


O = OperationType  # noqa: E741 - the table below has one on every line

DEFINITIONS: dict[OperationType, Definition] = {
    O.ADD: _two_activated(np.add),
    O.SUB: _two_activated(np.subtract),
    O.MUL: _two_activated(np.multiply),
    O.DIV: _two_activated(_divide),
    O.POW: _two(np.power),
    O.MAXIMUM: _two(np.maximum),
    O.MINIMUM: _two(np.minimum),
    O.PRELU: _two(lambda x, slope: np.where(x >= 0, x, x * slope)),
    O.LOGICAL_AND: _two(np.logical_and),
    O.LOGICAL_OR: _two(np.logical_or),
    O.LOGICAL_NOT: _one(np.logical_not),
    O.EQUAL: _two(np.equal),
    O.NOT_EQUAL: _two(np.not_equal),
    O.GREATER: _two(np.greater),
    O.GREATER_EQUAL: _two(np.greater_equal),
    O.LESS: _two(np.less),
    O.LESS_EQUAL: _two(np.less_equal),
    O.FLOOR: _one(np.floor),
    O.RELU: _one(lambda x: activated(x, 1)),
    O.RELU1: _one(lambda x: activated(x, 2)),
    O.RELU6: _one(lambda x: activated(x, 3)),
    O.LOGISTIC: _one(_logistic),
    O.TANH: _one(np.tanh),
    O.HARD_SWISH: _one(_hard_swish),
    O.ELU: _elu,
    O.ABS: _one(np.abs),
    O.NEG: _one(np.negative),
    O.EXP: _one(np.exp),
    O.LOG: _one(np.log),
    O.SIN: _one(np.sin),
    O.SQRT: _one(np.sqrt),
    O.RSQRT: _one(lambda x: 1 / np.sqrt(x)),
    # A NaN becomes the largest value.
    O.QUANTIZE: _one(lambda x: np.where(np.isnan(x), np.inf, x)),
    O.DEQUANTIZE: _one(np.asarray),
    O.CAST: _cast,
    O.SELECT: _select,
}

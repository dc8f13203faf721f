"""The table of kernels, and the kernel for an operation of a model.

A kernel is a function of numpy arrays: its parameters are the operator's inputs in order, its keyword parameters the attributes
with their defaults. So the signature defines which inputs and attributes are accepted. Four keyword parameters are not attributes:
``version`` is that of the operator set, ``count`` the number of outputs, ``kind`` the element type of the first output and ``out``
numpy's type of that. Values of types that numpy lacks are in their carriers (``aionn.models.onnx.extension.narrow``).

Source: the ONNX operators' specifications.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aionn.drivers.onnx_reference import (
    elementwise,
    images,
    indexing,
    layers,
    linear,
    movement,
    quantization,
    recurrent,
    reductions,
    signals,
)
from aionn.drivers.onnx_reference.arrays import Array
from aionn.models.onnx.extension import AttributeTensor, Record
from aionn.models.onnx.extension.narrow import NAMES, NARROW, carrier_of, rounded
from aionn.models.onnx.schema import DataType

__all__ = ["KERNELS", "Kernel", "kernel_for"]

KERNELS: dict[str, Callable[..., Any]] = {
    **elementwise.KERNELS,
    **images.KERNELS,
    **indexing.KERNELS,
    **layers.KERNELS,
    **linear.KERNELS,
    **movement.KERNELS,
    **quantization.KERNELS,
    **recurrent.KERNELS,
    **reductions.KERNELS,
    **signals.KERNELS,
}
"""The kernels by operator."""

Kernel = Callable[..., Sequence[Array]]
"""Takes an array or None for each input, and returns an array for each output."""

_FROM_RECORD = {"version", "count", "out", "kind"}


@functools.cache
def _parameters(op_type: str) -> tuple[int, int, frozenset[str], frozenset[str]]:
    """The least and the largest number of inputs of a kernel, its keyword parameters, and those that are required."""
    least = most = 0
    known, required = set(), set()
    for parameter in inspect.signature(KERNELS[op_type]).parameters.values():
        if parameter.kind == parameter.VAR_POSITIONAL:
            most = 1 << 20
            least = max(least, 1)
        elif parameter.kind == parameter.KEYWORD_ONLY:
            known.add(parameter.name)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
        else:
            most += 1
            least += parameter.default is parameter.empty
    return least, most, frozenset(known), frozenset(required)


def kernel_for(op_type: str, record: Record) -> Kernel | None:
    """The kernel of an operation with its attributes; None if no kernel accepts them."""
    if op_type not in KERNELS:
        return None
    least, most, known, required = _parameters(op_type)
    given: dict[str, Any] = {
        name: value.array if isinstance(value, AttributeTensor) else value
        for name, value in record.attributes.items()
    }
    if given.keys() & _FROM_RECORD or not given.keys() <= known:
        return None
    kinds = [None if value is None else DataType(value.data_type) for value in record.outputs]
    if any(kind is not None and kind not in NAMES for kind in kinds):
        return None
    values = {
        "version": record.version,
        "count": len(record.outputs),
        "out": None if kinds[0] is None else carrier_of(kinds[0]),
        "kind": kinds[0],
    }
    given |= {name: values[name] for name in _FROM_RECORD & known}
    if required - given.keys() or not least <= len(record.inputs) <= most:
        return None
    if any(value is None for value in record.inputs[:least]):
        return None
    function = functools.partial(KERNELS[op_type], **given)

    def kernel(*inputs: Array | None) -> Sequence[Array]:
        results = function(*inputs)
        listed = results if isinstance(results, tuple) else (results,)
        return [_typed(np.asarray(array), kind) for array, kind in zip(listed, kinds, strict=False)]

    return kernel


def _typed(array: Array, kind: DataType | None) -> Array:
    """A result in its element type."""
    if kind is None:
        return array
    return rounded(array, kind) if kind in NARROW else array.astype(carrier_of(kind), copy=False)

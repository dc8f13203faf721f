"""Real values become what a model's input takes.

Owns functions that write values of an application into views of inputs; ``pictures`` has those for pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aionn.errors import InvalidArgument, class_text
from aionn.runtime.memory.arguments import Array, TensorSpec, check_unmasked

__all__ = ["Writer", "check_input", "value_writer"]

Writer = Callable[[Any, Array], None]
"""Writes a value of an application into a view of an input."""


def _real_numbers(value: Any, count: int, where: str) -> Array:
    check_unmasked(value, where)
    expected, given = f"{where}: expected {count} real numbers", class_text(value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(f"{expected}, got {given}: {e}") from e
    if not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise InvalidArgument(f"{expected}, got {given} with elements of type {array.dtype}")
    return array


def check_input(spec: TensorSpec, where: str) -> None:
    """Rejects what is not an input, such as the compilation itself.

    Raises:
        InvalidArgument: It has another type.
    """
    if not isinstance(spec, TensorSpec):
        raise InvalidArgument(f"{where}: expected an input, such as net.inputs[0], got {class_text(spec)}")


def value_writer(spec: TensorSpec) -> Writer:
    """Writes real values (any float array of the input's number of elements) into the input, quantised if it is.

    Raises:
        InvalidArgument: It is not an input of a compilation.
    """
    check_input(spec, "value_writer")

    def write(value: Any, view: Array) -> None:
        array = _real_numbers(value, view.size, spec.name)
        if array.size != view.size:
            raise InvalidArgument(
                f"{spec.name}: expected {view.size} values (its shape is {list(view.shape)}), got {array.size}"
            )
        array = array.reshape(view.shape)
        if spec.scale:
            info = np.iinfo(spec.dtype)
            view[...] = np.clip(np.rint(array / spec.scale) + spec.zero_point, info.min, info.max)
        else:
            view[...] = array

    return write

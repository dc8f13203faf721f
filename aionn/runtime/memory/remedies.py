"""The remedies at the end of messages about values that an input does not take.

Owns the usual mistakes with types and axes. Decides nothing: a value has been refused before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.hal import combine_dimensions

__all__ = ["remedy_for_input", "remedy_for_picture"]

Array = npt.NDArray[Any]

PICTURE_AXES = (3, 4)
"""Numbers of axes that a picture may have: without a batch and with one."""

_ARRANGEMENTS: dict[int, dict[str, Callable[[Array], Array]]] = {
    3: {
        "array.transpose(1, 2, 0)[numpy.newaxis]": lambda array: array.transpose(1, 2, 0)[np.newaxis],
        "array.transpose(2, 0, 1)[numpy.newaxis]": lambda array: array.transpose(2, 0, 1)[np.newaxis],
    },
    4: {
        "array.transpose(0, 2, 3, 1)": lambda array: array.transpose(0, 2, 3, 1),
        "array.transpose(0, 3, 1, 2)": lambda array: array.transpose(0, 3, 1, 2),
    },
}
"""Other orders of the axes of a picture, by their number: channels first where they are last, and the reverse."""


def remedy_for_input(
    value: object, types: tuple[str, ...], dimensions: tuple[int, ...], *, is_quantised: bool
) -> str:
    """The value to write instead; empty where the reason alone must do.

    Args:
        value: The refused value.
        types: The names of the element types that the input takes.
        dimensions: The shape that it takes; 0 stands for any extent, and ``()`` for a scalar or any shape.
        is_quantised: Whether its whole numbers stand for real ones.
    """
    if isinstance(value, str | os.PathLike):
        return "; a path is not read here"
    if not isinstance(value, np.ndarray):
        return _remedy_for_holder(value)
    if value.dtype.name not in types:
        if value.dtype == np.uint8 and len(dimensions) == 4 and value.ndim in PICTURE_AXES:
            return "; aionn.image_writer makes the function that writes a picture into it"
        if is_quantised and value.dtype.kind == "f":
            return "; aionn.value_writer makes the function that writes real values into it"
        # By the class: numpy.bool exists from numpy 2 on, numpy.bool_ before it. numpy lacks bfloat16, which packages add.
        classes = (np.sctypeDict[name] for name in types if name in np.sctypeDict)
        chosen = next(one for one in classes if one.__module__ == "numpy")
        return f"; types are not converted, write array.astype(numpy.{chosen.__name__})"
    return _remedy_for_shape(value, dimensions)


def _remedy_for_holder(value: object) -> str:
    if isinstance(getattr(value, "data", None), np.ndarray):
        return "; its array is its attribute data, which into= of a stream writes: see aionn.image_writer"
    return ""


def _remedy_for_shape(array: Array, dimensions: tuple[int, ...]) -> str:
    if not dimensions:
        return ""
    ways: dict[str, Callable[[Array], Array]] = {"array[numpy.newaxis]": lambda array: array[np.newaxis]}
    if array.shape[:1] == (1,):
        ways["array[0]"] = lambda array: array[0]
    ways |= _ARRANGEMENTS.get(array.ndim, {})
    for text, way in ways.items():
        shape = way(array).shape
        if len(shape) == len(dimensions) and combine_dimensions(dimensions, shape) is not None:
            return f"; did you mean {text}?"
    return ""


def remedy_for_picture(value: object, width: int, height: int) -> str:
    """The picture to write instead of one that ``image_writer`` has refused.

    Args:
        value: The refused picture.
        width: Of the pictures that are taken, in pixels.
        height: The same.
    """
    if not isinstance(value, np.ndarray):
        is_frame = isinstance(getattr(value, "data", None), np.ndarray)
        return "; write frame.data" if is_frame else "; numpy.asarray(image) makes it one"
    if value.dtype != np.uint8:
        return "; aionn.value_writer writes real numbers"
    if value.ndim == 3:
        return f"; open the source with size=({width}, {height}), or see fit= of image_writer"
    return "; write array[0]" if value.ndim == 4 else ""

"""The usual form of a frame: an array of exactly the type and shape of the only input of a model.

Owns the question whether a model has such a form. Each frame of a burst is compared with it first; ``check_inputs`` checks
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aionn.runtime.memory.arguments import TensorSpec

__all__ = ["UsualInput", "usual_input"]


class UsualInput(NamedTuple):
    """The form of the only input of a model that nearly all values have, by which each frame is checked first.

    Attributes:
        dimensions: Its shape.
        dtype: Its element type.
    """

    dimensions: tuple[int, ...]
    dtype: np.dtype[Any]

    def is_form_of(self, value: object) -> bool:
        """Whether a value has this form, so that no other check is needed."""
        return type(value) is np.ndarray and value.shape == self.dimensions and value.dtype is self.dtype


def usual_input(specs: Sequence[TensorSpec]) -> UsualInput | None:
    """The form of a model's only input: an array of exactly this type and shape fits. None where ``check_inputs`` has to look."""
    if len(specs) != 1 or not all(specs[0].dimensions):
        return None
    return UsualInput(specs[0].dimensions, specs[0].dtype)

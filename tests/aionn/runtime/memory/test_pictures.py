"""Pictures become a model's input: the very numbers of the exact map from levels to values, whichever way is taken to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aionn
from aionn.errors import InvalidArgument
from aionn.hal import OperandType
from aionn.runtime.memory.arguments import TensorSpec

SIGNED, UNSIGNED = OperandType.TENSOR_QUANT8_ASYMM_SIGNED, OperandType.TENSOR_QUANT8_ASYMM
SHAPE = (1, 6, 5, 3)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0), (0.0, 0.3), (1.0, 0.0)])
@pytest.mark.parametrize(
    ("kind", "scale", "zero_point"),
    [
        (OperandType.TENSOR_FLOAT32, 0.0, 0),
        (OperandType.TENSOR_FLOAT16, 0.0, 0),
        (SIGNED, 1 / 255, -128),
        (SIGNED, 0.0078, 3),
        (UNSIGNED, 1 / 255, 0),
        (UNSIGNED, 0.0078, 127),
    ],
)
def test_every_level_becomes_its_exact_value(
    kind: OperandType, scale: float, zero_point: int, low: float, high: float
) -> None:
    spec = TensorSpec("image", kind, SHAPE, scale, zero_point)
    picture = np.random.default_rng(1).permutation(256)[:90].astype(np.uint8).reshape(SHAPE[1:])
    picture[0, 0] = (0, 255, 128)
    view: Any = np.zeros(SHAPE, dtype=spec.dtype)
    aionn.image_writer(spec, low=low, high=high)(picture, view)
    real = low + (high - low) * picture.astype(np.float64) / 255.0
    if scale:
        info = np.iinfo(spec.dtype)
        real = np.clip(np.rint(real / scale) + zero_point, info.min, info.max)
    assert view[0].tobytes() == real.astype(spec.dtype).tobytes()


@pytest.mark.parametrize("picture", [np.zeros((6, 5, 3), np.float32), np.zeros((5, 6, 3), np.uint8)])
def test_other_pictures_are_refused(picture: Any) -> None:
    spec = TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE)
    with pytest.raises(InvalidArgument, match="expected a uint8 picture of shape"):
        aionn.image_writer(spec)(picture, np.zeros(SHAPE, np.float32))

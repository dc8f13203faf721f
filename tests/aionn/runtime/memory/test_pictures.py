"""Pictures become a model's input: the very numbers of the exact map from levels to values, whichever way is taken to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aionn
from aionn.errors import InvalidArgument
from aionn.hal import OperandType
from aionn.runtime.memory.arguments import TensorSpec
from aionn.runtime.memory.pictures import boxes_in_picture, image_writer

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


def written(spec: TensorSpec, picture: Any, **options: Any) -> Any:
    view: Any = np.full(spec.dimensions, 99, dtype=spec.dtype)
    image_writer(spec, **options)(picture, view)
    return view[0]


def gradient(height: int, width: int) -> Any:
    rows, columns = np.mgrid[:height, :width]
    return np.stack((rows % 256, columns % 256, (rows + columns) % 256), axis=2).astype(np.uint8)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(60, 50), (7, 4), (6, 11), (1, 1), (1080, 1920)])
def test_stretched_picture_has_the_nearest_pixels(shape: tuple[int, int]) -> None:
    picture = gradient(*shape)
    found = written(
        TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE), picture, high=255.0, fit="stretch"
    )
    for row in range(6):
        for column in range(5):
            nearest = picture[int((row + 0.5) * shape[0] / 6), int((column + 0.5) * shape[1] / 5)]
            assert found[row, column].tolist() == nearest.tolist()


@pytest.mark.parametrize("is_first", [False, True])
def test_letterboxed_picture_keeps_its_proportions_between_bars(is_first: bool) -> None:
    shape = (1, 3, 8, 6) if is_first else (1, 8, 6, 3)
    spec = TensorSpec("image", OperandType.TENSOR_FLOAT32, shape)
    found = written(spec, np.full((20, 30, 3), 255, np.uint8), fit="letterbox", fill=51)
    found = found.transpose(1, 2, 0) if is_first else found
    assert found[2:6].min() == 1.0 and np.allclose(found[[0, 1, 6, 7]], 0.2)


def test_bars_are_written_again_when_the_buffer_had_another_picture() -> None:
    spec = TensorSpec("image", SIGNED, (1, 8, 6, 3), 1 / 255, -128)
    write = image_writer(spec, fit="letterbox", fill=0)
    view: Any = np.zeros(spec.dimensions, np.int8)
    for picture in (gradient(8, 6), np.full((30, 10, 3), 255, np.uint8), np.full((20, 30, 3), 255, np.uint8)):
        write(picture, view)
    assert (view[0, [0, 1, 6, 7]] == -128).all() and (view[0, 2:6] == 127).all()


def test_cropped_picture_loses_the_same_on_both_sides() -> None:
    picture = np.zeros((6, 20, 3), np.uint8)
    picture[:, 8:13] = 255
    found = written(TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE), picture, fit="crop")
    assert found.sum() > 0.7 * found.size
    tall = written(
        TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE), np.full((60, 5, 3), 255, np.uint8), fit="crop"
    )
    assert (tall == 1.0).all()


def test_levels_are_normalised_by_channel() -> None:
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    picture = gradient(6, 5)
    spec = TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE)
    found = written(spec, picture, mean=mean, deviation=deviation)
    assert np.allclose(found, (picture / 255.0 - mean) / deviation, atol=1e-6)


@pytest.mark.parametrize("fit", ["stretch", "letterbox", "crop"])
def test_boxes_in_the_input_are_boxes_in_the_picture(fit: Any) -> None:
    picture = np.zeros((90, 160, 3), np.uint8)
    picture[36:54, 64:96] = 255
    spec = TensorSpec("image", OperandType.TENSOR_FLOAT32, (1, 64, 64, 3))
    rows, columns = np.nonzero(written(spec, picture, fit=fit, fill=0)[..., 0])
    box = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]) / 64
    assert boxes_in_picture(box, (160, 90), (64, 64), fit)[0] == pytest.approx([0.4, 0.4, 0.6, 0.6], abs=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"fit": "fill"},
        {"fill": 256},
        {"mean": (1, 2)},
        {"mean": (1, 2, float("nan"))},
        {"deviation": (1, 0, 1)},
        {"deviation": 3},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="image_writer: "):
        image_writer(TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE), **options)


@pytest.mark.parametrize(
    "picture", [np.zeros((9, 9, 4), np.uint8), np.zeros((9, 9), np.uint8), np.zeros((0, 9, 3), np.uint8)]
)
def test_pictures_that_cannot_be_fitted_are_refused(picture: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected a uint8 picture"):
        written(TensorSpec("image", OperandType.TENSOR_FLOAT32, SHAPE), picture, fit="letterbox")

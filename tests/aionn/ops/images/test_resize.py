"""Claims about the resizing operations that the conformance data leave open."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Operand, OperandLifeTime, OperandType, OperationType
from aionn.ops.images.resize import OPERATIONS
from aionn.ops.signature import Array, Call, Tensor
from tests.support.contracts import level_of

T = OperandType
CONTRACTS = {contract.type: contract for contract in OPERATIONS}
BILINEAR, NEAREST = OperationType.RESIZE_BILINEAR, OperationType.RESIZE_NEAREST_NEIGHBOR


def validate(operation: OperationType, inputs: list[Operand], output: Operand, **constants: object) -> int:
    values = {int(name[1:]): value for name, value in constants.items()}
    return level_of(operation, inputs, [output], values)


def run(
    operation: OperationType, image: Array, width: object, height: object, *flags: bool, kind: OperandType
) -> Array:
    scalar = {int: T.INT32, float: T.FLOAT32}
    tensors = [Tensor(Operand(kind, image.shape, 0.5, 0), image)]
    tensors += [Tensor(Operand(scalar[type(v)]), np.array(v)) for v in (width, height)]
    tensors += [Tensor(Operand(T.BOOL), np.array(flag)) for flag in flags]
    contract = CONTRACTS[operation]
    call = Call(tensors, [Operand(kind, (), 0.5, 0)])
    assert contract.shapes is not None
    (shape,) = contract.shapes(call)
    (result,) = contract.execute(call)
    assert result.shape == shape
    assert result.dtype == image.dtype
    return result


def arguments(kind: OperandType, size: OperandType, flag_count: int) -> tuple[list[Operand], Operand]:
    image = Operand(kind, (1, 2, 2, 1), 0.5, 0)
    flags = [Operand(T.BOOL) for _ in range(flag_count)]
    return [image, Operand(size), Operand(size), *flags], Operand(kind, (1, 3, 3, 1), 0.5, 0)


@pytest.mark.parametrize(
    ("kind", "size", "flag_count", "level"),
    [
        (T.TENSOR_FLOAT32, T.INT32, 0, 1),
        (T.TENSOR_FLOAT32, T.FLOAT32, 0, 3),
        (T.TENSOR_FLOAT32, T.INT32, 1, 3),
        (T.TENSOR_FLOAT32, T.INT32, 2, 4),
        (T.TENSOR_FLOAT16, T.FLOAT16, 0, 3),
        (T.TENSOR_QUANT8_ASYMM, T.FLOAT32, 0, 3),
        (T.TENSOR_QUANT8_ASYMM_SIGNED, T.INT32, 0, 4),
    ],
)
def test_level_follows_types_and_arguments(
    kind: OperandType, size: OperandType, flag_count: int, level: int
) -> None:
    assert validate(BILINEAR, *arguments(kind, size, flag_count)) == level


def test_nearest_neighbor_needs_its_layout_argument() -> None:
    with pytest.raises(InvalidModel, match="number of inputs: expected 4 or 5 or 6, got 3"):
        validate(NEAREST, *arguments(T.TENSOR_FLOAT32, T.INT32, 0))
    assert validate(NEAREST, *arguments(T.TENSOR_FLOAT32, T.INT32, 1)) == 3


def test_sizes_of_two_types_are_refused() -> None:
    inputs, output = arguments(T.TENSOR_FLOAT32, T.INT32, 0)
    inputs[2] = Operand(T.FLOAT32)
    with pytest.raises(InvalidModel, match=r"RESIZE_BILINEAR\), input 2: expected INT32, got FLOAT32"):
        validate(BILINEAR, inputs, output)


def test_factor_of_another_float_type_is_refused() -> None:
    with pytest.raises(InvalidModel, match="input 1: expected INT32 or FLOAT16, got FLOAT32"):
        validate(BILINEAR, *arguments(T.TENSOR_FLOAT16, T.FLOAT32, 0))


def test_omitted_size_is_refused() -> None:
    inputs, output = arguments(T.TENSOR_FLOAT32, T.INT32, 0)
    inputs[1] = Operand(T.INT32, lifetime=OperandLifeTime.NO_VALUE)
    with pytest.raises(InvalidModel, match="input 1: expected a value"):
        validate(BILINEAR, inputs, output)


def test_output_of_another_quantization_is_refused() -> None:
    inputs, _ = arguments(T.TENSOR_QUANT8_ASYMM, T.INT32, 0)
    with pytest.raises(InvalidModel, match=r"output 0: expected scale 0\.5 and zero point 0"):
        validate(BILINEAR, inputs, Operand(T.TENSOR_QUANT8_ASYMM, (1, 3, 3, 1), 0.25, 0))


def test_illegal_constants_are_refused_with_the_model() -> None:
    inputs, output = arguments(T.TENSOR_FLOAT32, T.INT32, 3)
    with pytest.raises(InvalidModel, match="input 2: expected a positive number"):
        validate(BILINEAR, inputs, output, i2=0)
    with pytest.raises(InvalidModel, match="inputs 4 and 5: expected at most one of them true"):
        validate(BILINEAR, inputs, output, i4=True, i5=True)


def test_unknown_rank_is_left_to_the_execution() -> None:
    inputs, output = arguments(T.TENSOR_FLOAT32, T.INT32, 0)
    inputs[0], output = Operand(T.TENSOR_FLOAT32), Operand(T.TENSOR_FLOAT32)
    assert validate(BILINEAR, inputs, output) == 1
    with pytest.raises(InvalidArgument, match="input 0: expected rank 4"):
        run(BILINEAR, np.zeros((2, 2), np.float32), 1, 1, kind=T.TENSOR_FLOAT32)


@pytest.mark.parametrize(
    ("width", "height", "flags"), [(0, 1, ()), (1, -3, ()), (0.2, 1.0, ()), (2, 2, (False, True, True))]
)
def test_illegal_run_time_values_are_refused(width: object, height: object, flags: tuple[bool, ...]) -> None:
    with pytest.raises(InvalidArgument):
        run(BILINEAR, np.zeros((1, 4, 4, 1), np.float32), width, height, *flags, kind=T.TENSOR_FLOAT32)


def test_batch_of_no_images_stays_empty() -> None:
    image = np.zeros((0, 2, 3, 4), np.float32)
    assert run(BILINEAR, image, 6, 5, kind=T.TENSOR_FLOAT32).shape == (0, 5, 6, 4)
    assert run(NEAREST, image, 6, 5, False, kind=T.TENSOR_FLOAT32).shape == (0, 5, 6, 4)


def test_factor_on_an_extent_is_rounded_down() -> None:
    image = np.zeros((1, 5, 3, 1), np.float32)
    assert run(BILINEAR, image, 1.7, 0.5, kind=T.TENSOR_FLOAT32).shape == (1, 2, 5, 1)


@pytest.mark.parametrize("operation", [BILINEAR, NEAREST])
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_layouts_agree(operation: OperationType, flags: tuple[bool, bool]) -> None:
    image = np.random.default_rng(1).normal(size=(2, 5, 4, 3)).astype(np.float32)
    channels_last = run(operation, image, 7, 3, False, *flags, kind=T.TENSOR_FLOAT32)
    channels_first = run(operation, image.transpose(0, 3, 1, 2), 7, 3, True, *flags, kind=T.TENSOR_FLOAT32)
    assert np.array_equal(channels_first.transpose(0, 2, 3, 1), channels_last)


@pytest.mark.parametrize("operation", [BILINEAR, NEAREST])
def test_same_size_changes_nothing(operation: OperationType) -> None:
    rng = np.random.default_rng(2)
    for kind, dtype in ((T.TENSOR_QUANT8_ASYMM, np.uint8), (T.TENSOR_QUANT8_ASYMM_SIGNED, np.int8)):
        image = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (1, 5, 6, 2), dtype, endpoint=True)
        for flags in ((False, False), (True, False), (False, True)):
            assert np.array_equal(run(operation, image, 6, 5, False, *flags, kind=kind), image)


def source_position(index: int, size: int, out: int, align: bool, half: bool, shift: float) -> float:
    scale = (size - 1) / (out - 1) if align and out > 1 else size / out
    return (index + 0.5) * scale - shift if half else index * scale


@pytest.mark.parametrize("seed", range(12))
def test_bilinear_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width, out_height, out_width = (int(n) for n in rng.integers(1, 7, 4))
    align, half = [(False, False), (True, False), (False, True)][seed % 3]
    image = rng.normal(size=(2, height, width, 2)).astype(np.float32)
    got = run(BILINEAR, image, out_width, out_height, False, align, half, kind=T.TENSOR_FLOAT32)
    for y in range(out_height):
        for x in range(out_width):
            fy = min(max(source_position(y, height, out_height, align, half, 0.5), 0), height - 1)
            fx = min(max(source_position(x, width, out_width, align, half, 0.5), 0), width - 1)
            y0, x0 = int(fy), int(fx)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            dy, dx = fy - y0, fx - x0
            expected = (
                image[:, y0, x0] * (1 - dy) * (1 - dx)
                + image[:, y1, x0] * dy * (1 - dx)
                + image[:, y0, x1] * (1 - dy) * dx
                + image[:, y1, x1] * dy * dx
            )
            assert np.allclose(got[:, y, x], expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_nearest_neighbor_equals_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width, out_height, out_width = (int(n) for n in rng.integers(1, 9, 4))
    align, half = [(False, False), (True, False), (False, True)][seed % 3]
    image = rng.integers(0, 255, (1, height, width, 1), dtype=np.uint8)
    got = run(NEAREST, image, out_width, out_height, False, align, half, kind=T.TENSOR_QUANT8_ASYMM)

    def source(index: int, size: int, out: int) -> int:
        # Fractions, so that a half is a half; float32 decides as they do for numbers this small but for ties and whole numbers.
        position = source_position(index, size, out, align, half, 0.0)
        position = float(np.float32(position))
        return min(max(math.floor(position + 0.5) if align else math.floor(position), 0), size - 1)

    for y in range(out_height):
        for x in range(out_width):
            assert got[0, y, x, 0] == image[0, source(y, height, out_height), source(x, width, out_width), 0]


def test_aligned_corners_keep_the_corners() -> None:
    image = np.arange(12, dtype=np.float32).reshape(1, 3, 4, 1)
    got = run(BILINEAR, image, 9, 7, False, True, False, kind=T.TENSOR_FLOAT32)[0, :, :, 0]
    assert [got[0, 0], got[0, -1], got[-1, 0], got[-1, -1]] == [0, 3, 8, 11]


def test_signed_result_is_rounded_and_unsigned_result_is_truncated() -> None:
    signed = np.array([-3, 0], np.int8).reshape(1, 1, 2, 1)
    got = run(BILINEAR, signed, 4, 1, kind=T.TENSOR_QUANT8_ASYMM_SIGNED)
    assert got.reshape(-1).tolist() == [-3, -2, 0, 0]
    unsigned = np.array([0, 3], np.uint8).reshape(1, 1, 2, 1)
    got = run(BILINEAR, unsigned, 4, 1, kind=T.TENSOR_QUANT8_ASYMM)
    assert got.reshape(-1).tolist() == [0, 1, 3, 3]


def test_float16_is_rounded_once() -> None:
    image = np.random.default_rng(5).normal(size=(1, 4, 4, 2)).astype(np.float16)
    tensors = [Tensor(Operand(T.TENSOR_FLOAT16), image)]
    tensors += [Tensor(Operand(T.INT32), np.array(7)) for _ in range(2)]
    (half,) = CONTRACTS[BILINEAR].execute(Call(tensors, [Operand(T.TENSOR_FLOAT16)]))
    single = run(BILINEAR, image.astype(np.float32), 7, 7, kind=T.TENSOR_FLOAT32)
    assert half.dtype == np.float16
    assert np.array_equal(half, single.astype(np.float16))

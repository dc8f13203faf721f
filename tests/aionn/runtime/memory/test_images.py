"""Images as inputs and outputs of an application's executions, and the ways to make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import av
import msgspec
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import INFO, ReferenceDevice
from aionn.hal import HardwareBufferFormat, Memory, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.own import copy

GRAY = np.arange(60, dtype=np.uint8).reshape(1, 4, 5, 3)


def relu(shape: tuple[int, ...], kind: OperandType = OperandType.TENSOR_QUANT8_ASYMM) -> Model:
    """Values above 10 stay, the others become 10."""
    graph = GraphBuilder()
    x = graph.input(kind, shape, scale=1.0, zero_point=10)
    return graph.build([graph.result(OperationType.RELU, [x], x)])


@pytest.fixture
def runtime(any_shared_runtime: aionn.Runtime) -> aionn.Runtime:
    return any_shared_runtime


async def test_image_is_read_and_written_in_place(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(relu((1, 4, 5, 3)))
    with (
        aionn.ImageMemory.from_array(GRAY, stride=8) as source,
        aionn.ImageMemory.create(5, 4, format=HardwareBufferFormat.R8G8B8X8_UNORM, stride=6) as target,
    ):
        result = await net.execute([source], outputs=[target])
        np.testing.assert_array_equal(target.array, np.maximum(GRAY, 10))
        assert np.shares_memory(result.outputs[0], target.array)
        source.array[...] = 200
        await net.execute([source], outputs=[target])
        assert (target.array == 200).all()
        # The X bytes and the gaps are nobody's.
        assert not target.memory.array.reshape(4, 6, 4)[:, :, 3].any()
        assert not target.memory.array.reshape(4, 6, 4)[:, 5:].any()
        np.testing.assert_array_equal((await net.execute([GRAY])).outputs[0], np.maximum(GRAY, 10))


@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 1, 5, 3), (0, 0, 0, 0)])
async def test_extents_of_1_do_not_count_and_unknown_ones_come_from_the_image(
    runtime: aionn.Runtime, shape: tuple[int, ...]
) -> None:
    net = await runtime.compile(relu(shape))
    with aionn.ImageMemory.from_array(GRAY) as source:
        (output,) = (await net.execute([source])).outputs
    assert output.shape == (shape if all(shape) else GRAY.shape)
    np.testing.assert_array_equal(output.ravel(), np.maximum(GRAY, 10).ravel())


@pytest.mark.parametrize("change", ["size", "channels", "type", "closed"])
@pytest.mark.parametrize("side", ["input", "output"])
async def test_image_that_does_not_fit_is_refused(runtime: aionn.Runtime, change: str, side: str) -> None:
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED if change == "type" else OperandType.TENSOR_QUANT8_ASYMM
    net = await runtime.compile(relu((1, 4, 5, 3), kind))
    height, format = 4, HardwareBufferFormat.R8G8B8_UNORM
    if change == "size":
        height = 3
    if change == "channels":
        format = HardwareBufferFormat.R8G8B8A8_UNORM
    image = aionn.ImageMemory.create(5, height, format=format)
    if change == "closed":
        image.close()
    plain = GRAY.astype(np.int8) if change == "type" else GRAY
    with image, pytest.raises(aionn.InvalidArgument, match=f"{side} 0"):
        if side == "input":
            await net.execute([image])
        else:
            await net.execute([plain], outputs=[image])


async def test_device_without_images_gets_a_copy_and_refuses_outputs() -> None:
    class Plain(ReferenceDevice):
        def __init__(self) -> None:
            super().__init__()
            self.info = msgspec.structs.replace(INFO, takes_images=False)

    async with aionn.open(devices=[Plain()]) as runtime:
        net = await runtime.compile(relu((4, 5, 3)))
        with aionn.ImageMemory.from_array(GRAY, stride=9) as image:
            (output,) = (await net.execute([image])).outputs
            np.testing.assert_array_equal(output, np.maximum(GRAY, 10)[0])
            with pytest.raises(
                aionn.InvalidArgument, match="output 0: a device that uses it takes no images"
            ):
                await net.execute([GRAY[0]], outputs=[image])
            image.close()
            with pytest.raises(aionn.InvalidArgument, match="input 0: the image is closed"):
                await net.execute([image])


async def test_images_and_other_memories_are_copied_into_each_other(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(relu((4, 5, 3)))
    device = await runtime.allocate(inputs=[(net, 0)])
    with (
        aionn.ImageMemory.from_array(GRAY, stride=7) as image,
        aionn.ImageMemory.create(5, 4, format=HardwareBufferFormat.R8G8B8X8_UNORM) as other,
        aionn.SharedMemory.create((4, 5, 3), np.uint8) as shared,
    ):
        await copy(image, device)
        await copy(device, shared)
        await copy(shared, other)
        np.testing.assert_array_equal(other.array, GRAY)
        other.array[...] = 1
        await copy(image, other)
        await copy(other, other)
        np.testing.assert_array_equal(await other.read(), GRAY)
        with (
            aionn.ImageMemory.create(4, 5) as turned,
            pytest.raises(aionn.InvalidArgument, match="image: expected"),
        ):
            await copy(image, turned)
    await device.aclose()


# Making them


@pytest.mark.parametrize(
    ("shape", "format", "stride"),
    [
        ((4, 6), "R8_UNORM", 0),
        ((4, 6, 1), "R8_UNORM", 9),
        ((4, 6, 3), "R8G8B8_UNORM", 0),
        ((2, 4, 6, 3), "R8G8B8X8_UNORM", 6),
        ((4, 6, 4), "R8G8B8A8_UNORM", 16),
    ],
)
def test_image_of_an_array_has_its_values_whatever_its_strides(
    shape: tuple[int, ...], format: str, stride: int
) -> None:
    every = np.random.default_rng(1).integers(0, 256, (*shape[:-1], 2 * shape[-1]), np.uint8)
    array = every[..., ::2]
    kind = HardwareBufferFormat[format] if format.endswith("X8_UNORM") else None
    with aionn.ImageMemory.from_array(array, format=kind, stride=stride) as image:
        assert image.description.format.name == format
        np.testing.assert_array_equal(image.array.reshape(shape), array)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 6, 2), np.uint8),
        np.zeros((4, 6, 3), np.float32),
        np.zeros(4, np.uint8),
        np.zeros((0, 6, 3), np.uint8),
    ],
)
def test_array_that_is_no_image_is_refused(array: Any) -> None:
    with pytest.raises(aionn.InvalidArgument):
        aionn.ImageMemory.from_array(array)


def test_format_must_fit_the_channels() -> None:
    with pytest.raises(aionn.InvalidArgument, match="image: expected uint8"):
        aionn.ImageMemory.from_array(
            np.zeros((4, 6, 4), np.uint8), format=HardwareBufferFormat.R8G8B8X8_UNORM
        )
    with pytest.raises(aionn.InvalidArgument, match="a stride of at least"):
        aionn.ImageMemory.from_array(np.zeros((4, 6), np.uint8), stride=5)
    with pytest.raises(aionn.InvalidArgument, match="hardware_buffer"):
        aionn.ImageMemory(Memory.create(64))


def _frame(format: str, pixels: Any, line_bytes: int) -> Any:
    """What a decoder gives: rows that are longer than their pixels."""
    rows = np.full((pixels.shape[0], line_bytes), 0xEE, np.uint8)
    rows[:, : pixels[0].size] = pixels.reshape(pixels.shape[0], -1)
    plane = type("Plane", (bytes,), {"line_size": line_bytes})(rows.tobytes())
    return SimpleNamespace(
        format=SimpleNamespace(name=format), width=pixels.shape[1], height=pixels.shape[0], planes=(plane,)
    )


@pytest.mark.parametrize(
    ("format", "size"), [("gray", 1), ("gray8", 1), ("rgb24", 3), ("rgba", 4), ("rgb0", 4)]
)
def test_image_of_a_frame_has_its_pixels(format: str, size: int) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (7, 5, size), np.uint8)
    with aionn.ImageMemory.from_frame(_frame(format, pixels, 32), stride=6) as image:
        np.testing.assert_array_equal(image.array[0], pixels[..., : 3 if format == "rgb0" else size])


def test_image_of_a_frame_of_pyav_has_its_pixels() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (30, 50, 3), np.uint8)
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    with aionn.ImageMemory.from_frame(frame) as image:
        np.testing.assert_array_equal(image.array[0], pixels)
    with pytest.raises(aionn.InvalidArgument, match="got yuv420p"):
        aionn.ImageMemory.from_frame(frame.reformat(format="yuv420p"))


def test_image_of_a_descriptor_is_the_same_image() -> None:
    with (
        aionn.ImageMemory.from_array(GRAY, stride=7) as image,
        aionn.ImageMemory.from_fd(image.memory.fileno(), image.description, writable=False) as other,
    ):
        np.testing.assert_array_equal(other.array, GRAY)
        image.array[...] = 3
        assert (other.array == 3).all() and not other.array.flags.writeable

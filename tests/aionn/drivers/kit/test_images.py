"""Images as arguments of executions, in this process and through a driver process."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.conformance.computing import MODES
from aionn.drivers.reference import INFO, ReferenceDevice
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    BufferDesc,
    BufferRole,
    DataLocation,
    Device,
    HardwareBufferDesc,
    HardwareBufferFormat,
    Memory,
    MemoryKind,
    Model,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from fences import SyncFence

F = HardwareBufferFormat
GAP = 0xEE


def relu(shape: tuple[int, ...], kind: OperandType = OperandType.TENSOR_QUANT8_ASYMM) -> Model:
    """What values above 10 stay and others become 10, of 8-bit values with zero point 10."""
    graph = GraphBuilder()
    x = graph.input(kind, shape, scale=1.0, zero_point=10)
    return graph.build([graph.result(OperationType.RELU, [x], x)])


def image(format: HardwareBufferFormat, *, stride: int = 7, layers: int = 2) -> Memory:
    """5 pixels by 3 rows, filled with what must not be touched, values put in."""
    made = Memory.create_hardware_buffer(HardwareBufferDesc(5, 3, layers, format, stride))
    made.array[:] = GAP
    made.pixels[...] = np.arange(made.pixels.size).reshape(made.pixels.shape) % 200
    return made


def expected(values: Any) -> Any:
    return np.maximum(values, 10)


def whole(pool_index: int, **changes: int) -> RequestArgument:
    return RequestArgument(location=DataLocation(pool_index, **changes))


def gaps(memory: Memory) -> Any:
    """The bytes that are no pixel's."""
    mask = np.ones(memory.size_bytes, bool)
    description = memory.image
    assert description is not None
    rows = mask.reshape(-1, description.stride or description.width, description.pixel_bytes)
    rows[:, : description.width, : description.channel_count] = False
    return memory.array[mask]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stride", [0, 7])
@pytest.mark.parametrize("format", [f for f in F if f != F.BLOB], ids=lambda f: f.name)
async def test_rows_with_gaps_become_a_tensor_and_back(
    device: Device, format: HardwareBufferFormat, stride: int
) -> None:
    source, target = image(format, stride=stride), image(format, stride=stride)
    target.pixels[...] = 0
    prepared = await device.prepare_model(relu(source.pixels.shape))
    result = await prepared.execute_synchronously(Request((whole(0),), (whole(1),), (source, target)))
    assert result.output_shapes[0].dimensions == source.pixels.shape
    np.testing.assert_array_equal(target.pixels, expected(source.pixels))
    assert (gaps(target) == GAP).all()


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (3, 1, 5, 1), (1, 3, 5, 1)])
async def test_extents_of_1_do_not_count(device: Device, shape: tuple[int, ...]) -> None:
    source = image(F.R8_UNORM, layers=1)
    output = Memory.create(15)
    prepared = await device.prepare_model(relu(shape))
    plain = RequestArgument(location=DataLocation(1, 0, 15))
    await prepared.execute_synchronously(Request((whole(0),), (plain,), (source, output)))
    np.testing.assert_array_equal(output.array, expected(source.pixels).ravel())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
async def test_every_way_of_execution_takes_images_again_and_again(device: Device, mode: str) -> None:
    source, target = image(F.R8G8B8X8_UNORM), image(F.R8G8B8X8_UNORM)
    prepared = await device.prepare_model(relu(source.pixels.shape))
    request = Request((whole(0),), (whole(1),), (source, target))
    burst = await prepared.configure_execution_burst()
    for shift in range(3):
        source.pixels[...] = np.arange(90).reshape(source.pixels.shape) + shift
        if mode == "burst":
            await burst.execute_synchronously(request, (0, 1))
        elif mode == "fenced":
            fence, _ = await prepared.execute_fenced(request, ())
            assert fence is not None
            await fence
        elif mode == "async":
            called = SyncFence("callback")
            await prepared.execute(request, lambda *_, called=called: called.signal())
            await called
        else:
            await prepared.execute_synchronously(request)
        np.testing.assert_array_equal(target.pixels, expected(source.pixels))
    await burst.aclose()


def _change(request: Request, what: str) -> Request:
    source, target = request.pools
    assert isinstance(source, Memory) and isinstance(target, Memory)
    changed = {
        "offset": Request((whole(0, offset=1),), (whole(1),), (source, target)),
        "length": Request((whole(0, length=90),), (whole(1),), (source, target)),
        "output length": Request((whole(0),), (whole(1, length=90),), (source, target)),
        "other channels": Request((whole(0),), (whole(1),), (image(F.R8_UNORM), target)),
        "other rows": Request((whole(0),), (whole(1),), (source, image(F.R8G8B8_UNORM, layers=3))),
        "overlap": Request((whole(0),), (whole(0),), (source, target)),
        "read-only output": Request(
            (whole(0),),
            (whole(1),),
            (
                source,
                Memory.from_fd(
                    target.fileno(), kind=MemoryKind.HARDWARE_BUFFER, image=target.image, writable=False
                ),
            ),
        ),
    }
    return changed[what]


@pytest.mark.parametrize(
    "what",
    ["offset", "length", "output length", "other channels", "other rows", "overlap", "read-only output"],
)
async def test_request_that_does_not_fit_its_image_is_refused(device: Device, what: str) -> None:
    source, target = image(F.R8G8B8_UNORM), image(F.R8G8B8_UNORM)
    prepared = await device.prepare_model(relu(source.pixels.shape))
    before = target.array.copy()
    request = _change(Request((whole(0),), (whole(1),), (source, target)), what)
    with pytest.raises(InvalidArgument, match=r"request, (in|out)put 0"):
        await prepared.execute_synchronously(request)
    np.testing.assert_array_equal(target.array, before)


async def test_only_8_bit_values_are_pixels(device: Device) -> None:
    source = image(F.R8_UNORM)
    prepared = await device.prepare_model(relu(source.pixels.shape, OperandType.TENSOR_QUANT8_ASYMM_SIGNED))
    output = Memory.create(30)
    plain = RequestArgument(location=DataLocation(1, 0, 30))
    with pytest.raises(InvalidArgument, match="expected TENSOR_QUANT8_ASYMM for an image"):
        await prepared.execute_synchronously(Request((whole(0),), (plain,), (source, output)))


async def test_image_is_not_written_by_an_execution_that_fails(device: Device) -> None:
    target = image(F.R8_UNORM)
    before = target.array.copy()
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_QUANT8_ASYMM, (2, 3, 5, 1), scale=1.0, zero_point=10)
    indexes = graph.input(OperandType.TENSOR_INT32, (2,))
    prepared = await device.prepare_model(
        graph.build([graph.result(OperationType.GATHER, [x, 0, indexes], x)])
    )
    pool = Memory.create(64)
    pool.array[32:40] = np.array([0, 99], np.int32).view(np.uint8)
    inputs = (
        RequestArgument(location=DataLocation(0, 0, 30)),
        RequestArgument(location=DataLocation(0, 32, 8)),
    )
    with pytest.raises((GeneralFailure, InvalidArgument)):
        await prepared.execute_synchronously(Request(inputs, (whole(1),), (pool, target)))
    np.testing.assert_array_equal(target.array, before)


async def test_images_hold_no_constants(device: Device) -> None:
    model = relu((1, 3, 5, 1))
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_QUANT8_ASYMM, (1, 3, 5, 1), scale=1.0, zero_point=10)
    big = graph.constant(np.zeros((1, 300, 300, 1), np.uint8), OperandType.TENSOR_QUANT8_ASYMM, scale=1.0)
    model = graph.build(
        [graph.result(OperationType.RELU, [x], x), graph.result(OperationType.RELU, [big], big)]
    )
    (pool,) = model.pools
    side = HardwareBufferDesc(pool.size_bytes, 1, 1, F.R8_UNORM)
    changed = msgspec.structs.replace(model, pools=(Memory.create_hardware_buffer(side),))
    with pytest.raises(InvalidArgument, match="a pool that can hold constants"):
        await device.prepare_model(changed)
    blob = HardwareBufferDesc(pool.size_bytes, 1, 1, F.BLOB)
    changed = msgspec.structs.replace(model, pools=(Memory.create_hardware_buffer(blob),))
    await device.prepare_model(changed)


async def test_device_memories_are_not_copied_from_or_to_images(device: Device) -> None:
    source = image(F.R8_UNORM, stride=0)
    prepared = await device.prepare_model(relu(source.pixels.shape))
    buffer = await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    with pytest.raises(InvalidArgument, match="an image"):
        await buffer.copy_from(source, ())
    with pytest.raises(GeneralFailure):
        await buffer.copy_to(Memory.create(30))
    with pytest.raises(InvalidArgument, match="an image"):
        await buffer.copy_to(source)


class Plain(ReferenceDevice):
    """A driver that takes no images."""

    def __init__(self) -> None:
        super().__init__()
        self.info = msgspec.structs.replace(INFO, takes_images=False)


async def test_driver_that_takes_no_images_says_so_with_a_general_failure(small: Any) -> None:
    source = image(F.R8_UNORM)
    async with Plain() as device:
        prepared = await device.prepare_model(relu(source.pixels.shape))
        plain = RequestArgument(location=DataLocation(1, 0, 30))
        with pytest.raises(GeneralFailure, match="takes no images"):
            await prepared.execute_synchronously(Request((whole(0),), (plain,), (source, Memory.create(30))))

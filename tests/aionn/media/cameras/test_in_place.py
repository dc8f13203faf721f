"""Pictures that the driver writes into memory of the application: the slots of a burst, counted copies, and what is rejected."""

import ctypes
import errno
import pathlib

import anyio
import numpy as np
import pytest

import aionn
from aionn.errors import InvalidArgument
from aionn.hal import OperandType, OperationType
from aionn.media import CaptureMemory, Reconnection, SourceUnavailable, camera
from aionn.media.cameras import videodev
from aionn.media.cameras.pixels import PixelConverter
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.arguments import RequestArea
from tests.support.media.fake_camera import FakeSystem, Listed

SOON = Reconnection(first_s=0.01, most_s=0.05)
HEIGHT, WIDTH = 48, 64


def arrays(count=4, shape=(HEIGHT, WIDTH, 3)):
    return [np.zeros(shape, np.uint8) for _ in range(count)]


@pytest.fixture
def rgb(system):
    """A machine whose camera has RGB3."""
    system.camera.listed = [
        Listed("YUYV", WIDTH, HEIGHT),
        Listed("RGB3", WIDTH, HEIGHT),
        Listed("RGB3", 640, 480),
    ]
    return system


async def until(condition):
    while not condition():
        await anyio.sleep(0.001)


def picture_model():
    """A model that takes the bytes of a picture as they are, and averages them."""
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_QUANT8_ASYMM, (1, HEIGHT, WIDTH, 3), scale=1 / 255)
    mean = graph.result(
        OperationType.AVERAGE_POOL_2D, [x, 2, WIDTH, HEIGHT, WIDTH, HEIGHT, 0], x, (1, 1, 1, 3)
    )
    return graph.build([mean])


def mappings(name):
    """Address ranges of mappings by the name of their file."""
    found = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            found.append(range(first, last))
    return found


def test_driver_fills_the_slots_of_a_burst_and_nothing_copies_a_pixel(really, rgb, monkeypatch):
    copies = []
    monkeypatch.setattr(PixelConverter, "convert", lambda *_: copies.append("conversion"))
    monkeypatch.setattr(RequestArea, "write", lambda *_: copies.append("write"))

    async def body():
        means = []
        async with (
            aionn.open(drivers=["reference"]) as runtime,
            await runtime.compile(picture_model()) as net,
            net.burst(slots=4) as burst,
        ):
            slots = [burst.lend() for _ in range(4)]
            memory = CaptureMemory([slot.inputs[0] for slot in slots])
            async with camera(system=rgb, into=memory, keep="all", queue_frames_max=1) as frames:
                # The buffers of the kernel are the slots, in the memory that the driver process maps.
                shared = mappings("memfd:aionn-request")
                for number, address in rgb.camera.addresses.items():
                    assert address == slots[number].inputs[0].ctypes.data
                    assert any(
                        address in place and address + memory.size_bytes - 1 in place for place in shared
                    )
                assert rgb.camera.maps == []
                for index in range(12):
                    assert rgb.camera.fill(bytes([index * 20]) * memory.size_bytes)
                    frame = await anext(frames)
                    slot = slots[memory.number(frame)]
                    assert np.shares_memory(frame.data, slot.inputs[0])
                    result = await slot.execute(deadline=aionn.after(20))
                    means.append(int(result.outputs[0].flat[0]))
                    memory.release(frame)
            for slot in slots:
                slot.close()
        return means, rgb.camera.addresses

    means, addresses = really(body)
    assert means == [index * 20 for index in range(12)]
    assert sorted(addresses) == [0, 1, 2, 3]
    assert copies == []


def test_frame_is_not_filled_again_before_it_is_released(really, rgb):
    async def body():
        memory = CaptureMemory(arrays())
        async with camera(system=rgb, into=memory) as frames:
            rgb.camera.fill(b"\x01" * memory.size_bytes)
            first = await anext(frames)
            with pytest.raises(ValueError, match="read-only"):
                first.data[0] = 0
            for level in range(2, 40):
                rgb.camera.fill(bytes([level]) * memory.size_bytes)
                await until(lambda: len(rgb.camera.queued) >= 2)
            assert (first.data == 1).all()
            assert memory.lent == {memory.number(first)}
            number = memory.number(first)
            assert number not in rgb.camera.queued
            memory.release(first)
            memory.release(first)
            assert list(rgb.camera.queued).count(number) == 1
            newest = await anext(frames)
            return int(newest.data.flat[0]), frames.statistics()

    level, account = really(body)
    assert level == 39
    assert account.presented == account.delivered + account.dropped + account.queued


def test_camera_waits_while_the_application_holds_every_array(really, rgb, impatient):
    async def body():
        memory = CaptureMemory(arrays(3))
        async with camera(system=rgb, into=memory, reconnect=SOON) as frames:
            held = []
            for _ in range(3):
                rgb.camera.fill()
                held.append(await anext(frames))
            await anyio.sleep(0.7)  # Longer than the silence after which a source is lost.
            assert frames.health().state == "live" and frames.statistics().reconnections == 0
            for frame in held:
                memory.release(frame)
            rgb.camera.fill()
            await anext(frames)
            return frames.statistics()

    assert really(body).reconnections == 0


def test_held_frames_survive_an_unplugged_camera_and_their_arrays_are_filled_afterwards(really, rgb, filming):
    async def body():
        memory = CaptureMemory(arrays(5))
        async with camera(system=rgb, into=memory, reconnect=SOON) as frames, filming(rgb.camera):
            held = await anext(frames)
            content = held.data.copy()
            rgb.camera.unplug()
            await until(lambda: frames.health().state != "live")
            rgb.camera.plug()
            async for frame in frames:
                memory.release(frame)
                if frame.follows_gap:
                    break
            for _ in range(20):
                memory.release(await anext(frames))
            np.testing.assert_array_equal(held.data, content)
            assert memory.lent == {memory.number(held)}
            memory.release(held)
            await until(lambda: memory.number(held) in rgb.camera.queued)
        assert memory.lent == frozenset() and not memory.is_attached

    really(body)


def test_frame_that_was_converted_for_a_cancelled_consumer_is_released(really, rgb):
    async def body():
        memory = CaptureMemory(arrays())
        async with camera(system=rgb, into=memory) as frames:
            rgb.camera.fill()
            await until(lambda: len(frames._queue))
            frames._convert_next()  # As a consumer does that is cancelled before it takes the frame.
            assert len(memory.lent) == 1
            rgb.camera.fill()
            await until(lambda: len(frames._queue))
            frame = await anext(frames)
            assert memory.lent == {memory.number(frame)}
            return frame.index, frames.statistics()

    index, account = really(body)
    assert index == 1
    assert account.dropped == 1


def test_incomplete_picture_is_left_out(really, rgb):
    async def body():
        memory = CaptureMemory(arrays())
        async with camera(system=rgb, into=memory) as frames:
            rgb.camera.fill(used=10)
            rgb.camera.fill()
            await anext(frames)
            return frames.statistics()

    assert really(body).corrupt == 1


def padded(camera):
    camera.stride = WIDTH * 3 + 8


def of_another_size(camera):
    camera.returned_size = (WIDTH * 2, HEIGHT)


def longer(camera):
    camera.size_image = WIDTH * HEIGHT * 3 + 4096


def with_own_memory_alone(camera):
    camera.takes_memory = False


def with_few_buffers(camera):
    camera.buffers_given = 2


def without_the_format(camera):
    camera.listed = [Listed("YUYV", WIDTH, HEIGHT)]


def busy(camera):
    camera.failing[videodev.REQBUFS] = errno.EBUSY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (padded, "with rows of 192, which the memory has, got"),
        (of_another_size, "got 128x48"),
        (longer, "got 64x48 in 13312 bytes"),
        (with_own_memory_alone, "capture without into="),
        (with_few_buffers, "expected 4 buffers, got 2"),
        (without_the_format, "expected the format RGB3, got YUYV"),
        (busy, "it is in use"),
    ],
)
def test_camera_whose_pictures_do_not_fit_the_memory_is_an_error(really, rgb, change, message):
    change(rgb.camera)

    async def body():
        with pytest.raises(SourceUnavailable) as raised:
            async with camera(system=rgb, into=CaptureMemory(arrays()), reconnect=None):
                pass
        assert message in str(raised.value)

    really(body)


def test_memory_is_for_one_camera_at_a_time(really):
    machine = FakeSystem()
    machine.cameras["/dev/video1"] = type(machine.camera)("Other", "usb-2")
    for one in machine.cameras.values():
        one.listed = [Listed("RGB3", WIDTH, HEIGHT)]

    async def body():
        memory = CaptureMemory(arrays())
        async with camera(0, system=machine, into=memory) as frames:
            machine.camera.fill()
            memory.release(await anext(frames))
            with pytest.raises(SourceUnavailable, match="another camera"):
                async with camera(1, system=machine, into=memory):
                    pass
        async with camera(1, system=machine, into=memory) as frames:
            machine.cameras["/dev/video1"].fill()
            memory.release(await anext(frames))

    really(body)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: arrays(2), "3 to 32 arrays, got 2"),
        (lambda: arrays(33, (1, 1, 1)), "got 33"),
        (lambda: [np.zeros((2, 2, 3), np.int8)] * 3, "uint8, got int8"),
        (lambda: [b"bytes"] * 3, "got bytes"),
        (lambda: arrays(3, (2, 2, 4)), "1 to 3 channels"),
        (lambda: arrays(3, (2, 2)), "1 to 3 channels"),
        (lambda: [*arrays(3, (2, 2, 3)), *arrays(1, (2, 4, 3))], "one shape"),
        (lambda: [np.zeros((2, 8, 3), np.uint8)[:, ::2] for _ in range(3)], "contiguous"),
        (lambda: [np.frombuffer(bytes(12), np.uint8).reshape(2, 2, 3) for _ in range(3)], "writable"),
        (lambda: arrays(1) * 3, "share no memory"),
    ],
)
def test_arrays_that_cannot_be_filled_are_rejected(given, message):
    with pytest.raises(InvalidArgument, match=message):
        CaptureMemory(given())


def test_impossible_argument_is_rejected():
    memory = CaptureMemory(arrays())
    with pytest.raises(InvalidArgument, match="either into or a size"):
        camera(into=memory, size=(8, 8))
    with pytest.raises(InvalidArgument, match="RGB3 or BGR3"):
        camera(into=memory, pixel_format="YUYV")
    assert CaptureMemory(arrays(3, (1, 4, 8, 2))).size == (8, 4)


def test_entry_of_the_kernel_has_address_and_length():
    given = arrays(3)
    entry = CaptureMemory(given).entry(2)
    assert (entry.index, entry.memory) == (2, videodev.MEMORY_USERPTR)
    assert (entry.m.userptr, entry.length) == (given[2].ctypes.data, HEIGHT * WIDTH * 3)
    assert ctypes.string_at(entry.m.userptr, 3) == b"\0\0\0"

"""Tests that run in the emulated machine: two cameras of vivid, unplugged, with dropped buffers and injected errors; pictures that
the kernel writes into a burst's slots; controls.

Times are of an emulated processor: ages are compared with the period of the camera, and the limits of the sources are longer.
"""

import asyncio
import itertools
import os
import subprocess
import time
from pathlib import Path

import anyio
import numpy as np
import pytest

import aionn
from aionn.hal import OperandType, OperationType
from aionn.media import (
    CaptureMemory,
    Reconnection,
    SourceUnavailable,
    camera,
    camera_controls,
    list_cameras,
    set_camera_controls,
    tee,
)
from aionn.media.cameras.pixels import PixelConverter
from aionn.media.cameras.system import System
from aionn.models.builder import GraphBuilder
from aionn.runtime.memory.arguments import RequestArea
from tests.guest.assembling import environment

pytestmark = pytest.mark.long
"""The watchdog of ordinary tests is shorter than what an emulated processor takes on a busy machine; each test has its limit."""

CAMERAS = ("/dev/video0", "/dev/video1")
SIZE = 320, 180
SOON = Reconnection(first_s=0.05, most_s=0.5)
SMALL = {"capture_size": SIZE, "size": (96, 96), "input_index": 0, "rate": 10.0, "reconnect": SOON}
LIMIT_S = 300


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 10.0)
    monkeypatch.setattr("aionn.media.live.silence.FIRST_ITEM_S_MAX", 30.0)
    monkeypatch.setattr("aionn.media.cameras.opening.OPEN_S_MAX", 60.0)
    monkeypatch.setattr("aionn.media.cameras.opening._CameraOpener.limit_s", 60.0)
    monkeypatch.setattr("aionn.service.client.device.START_S_MAX", 240.0)


def control(path, setting):
    """Sets a control of vivid."""
    folder = Path(os.environ["AIONN_GUEST"])
    program = folder / "root/usr/bin/v4l2-ctl"
    subprocess.run([program, "-d", path, "-c", setting], check=True, env=environment(folder))


async def controlled(path, setting):
    await anyio.to_thread.run_sync(control, path, setting)


def run(body):
    async def limited():
        async with asyncio.timeout(LIMIT_S):
            return await body()

    return asyncio.run(limited())


def test_cameras_are_listed():
    found = run(list_cameras)
    assert [one.path for one in found if not one.problem][:2] == list(CAMERAS)
    assert all("YUYV" in one.formats for one in found[:2])


def test_frames_have_the_stamps_and_numbers_of_the_kernel():
    async def body():
        async with camera(CAMERAS[0], **SMALL) as source:
            frames = [await anext(source) for _ in range(10)]
            return frames, time.monotonic_ns(), source.statistics()

    frames, now_ns, account = run(body)
    stamps = [frame.captured_at_ns for frame in frames]
    assert stamps == sorted(stamps) and stamps[-1] <= now_ns
    assert {frame.clock for frame in frames} == {"driver"}
    assert [frame.data.shape for frame in frames] == [(96, 96, 3)] * 10
    assert account.presented == account.delivered + account.dropped + account.queued
    assert max(np.abs(a.data.astype(int) - b.data).mean() for a, b in itertools.pairwise(frames)) > 0


def test_two_cameras_go_through_bursts_at_a_time():
    async def body():
        model = Path(__file__).resolve().parents[2] / "examples/data/shapes_int8.tflite"
        async with aionn.open(drivers=["litert-cpu"]) as runtime, await runtime.compile(model) as net:
            write = aionn.image_writer(net.inputs[0])
            counts = {}

            async def stream(path):
                async with camera(path, **SMALL) as frames, net.burst() as burst:
                    results = burst.stream(
                        frames,
                        into=lambda frame, view: write(frame.data, view),
                        deadline=lambda frame: frame.captured_at_ns + 2_000_000_000,
                    )
                    counts[path] = 0
                    async with results:
                        async for result in results:
                            counts[path] += result.status == "on_time"
                            if counts[path] == 10:
                                return

            async with anyio.create_task_group() as tasks:
                for path in CAMERAS:
                    tasks.start_soon(stream, path)
            return counts

    assert run(body) == dict.fromkeys(CAMERAS, 10)


def test_camera_that_is_unplugged_comes_back_to_every_consumer():
    async def body():
        async with camera(CAMERAS[0], **SMALL) as source, tee(source) as shared:
            branches = [shared.branch(), shared.branch()]
            for branch in branches:
                await anext(branch)
            await controlled(CAMERAS[0], "disconnect=1")
            while source.statistics().reconnections == 0:
                await anyio.sleep(0.05)
            for branch in branches:
                while not (await anext(branch)).follows_gap:
                    pass
            return source.health()

    health = run(body)
    assert health.state == "live" and health.reconnections == 1
    assert health.reason


def test_lost_buffers_are_counted_by_the_numbers_of_the_kernel():
    async def body():
        async with camera(CAMERAS[1], **{**SMALL, "rate": 25.0}) as source:
            await anext(source)
            await controlled(CAMERAS[1], "percentage_of_dropped_buffers=50")
            try:
                while source.statistics().lost < 5:
                    await anext(source)
            finally:
                await controlled(CAMERAS[1], "percentage_of_dropped_buffers=0")
            return source.statistics()

    assert run(body).reconnections == 0


def test_fatal_error_of_the_stream_is_a_loss_and_the_camera_is_opened_again():
    async def body():
        async with camera(CAMERAS[1], **SMALL) as source:
            await anext(source)
            await controlled(CAMERAS[1], "inject_fatal_streaming_error=1")
            while not (await anext(source)).follows_gap:
                pass
            return source.statistics()

    assert run(body).reconnections >= 1


def test_frame_after_a_stall_of_a_second_is_fresh():
    async def body():
        ages = []
        async with camera(CAMERAS[0], **SMALL) as source:
            for _ in range(3):
                for _ in range(3):
                    await anext(source)
                time.sleep(1.0)
                frame = await anext(source)
                ages.append((time.monotonic_ns() - frame.captured_at_ns) / 1e9)
        return ages

    # Two periods of 100 ms, and the emulated processor's own time: the best of three.
    assert min(run(body)) <= 0.3


def test_camera_in_use_and_absent_camera_are_errors_that_name_the_fault():
    async def body():
        async with camera(CAMERAS[0], **SMALL) as source:
            await anext(source)
            with pytest.raises(SourceUnavailable, match="use"):
                async with camera(CAMERAS[0], **{**SMALL, "reconnect": None}):
                    pass
        with pytest.raises(SourceUnavailable, match="no such camera"):
            async with camera("/dev/video77", reconnect=None):
                pass

    run(body)


def picture_model():
    """A model that takes a picture of the camera as it is, and averages parts of it."""
    width, height = SIZE
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_QUANT8_ASYMM, (1, height, width, 3), scale=1 / 255)
    parts = graph.result(
        OperationType.AVERAGE_POOL_2D,
        [x, 2, width // 4, height // 4, width // 4, height // 4, 0],
        x,
        (1, 4, 4, 3),
    )
    return graph.build([parts])


def test_kernel_writes_into_the_slots_of_a_burst_and_nothing_copies_a_pixel(monkeypatch):
    copies, queued = [], {}
    monkeypatch.setattr(PixelConverter, "convert", lambda *_: copies.append("conversion"))
    monkeypatch.setattr(RequestArea, "write", lambda *_: copies.append("write"))
    monkeypatch.setattr(System, "map", lambda *_: copies.append("mapped buffer"))
    entry_of = CaptureMemory.entry

    def entry(self, number):
        made = entry_of(self, number)
        queued[number] = made.m.userptr
        return made

    monkeypatch.setattr(CaptureMemory, "entry", entry)

    async def body():
        async with (
            aionn.open(drivers=["reference"]) as runtime,
            await runtime.compile(picture_model()) as net,
            net.burst(slots=4) as burst,
        ):
            slots = [burst.lend() for _ in range(4)]
            memory = CaptureMemory([slot.inputs[0] for slot in slots])
            options = {"into": memory, "input_index": 0, "rate": 10.0, "reconnect": SOON}
            async with camera(CAMERAS[0], **options) as frames:
                for count in range(20):
                    frame = await anext(frames)
                    slot = slots[memory.number(frame)]
                    assert np.shares_memory(frame.data, slot.inputs[0])
                    result = await slot.execute()
                    whole = frame.data.reshape(4, SIZE[1] // 4, 4, SIZE[0] // 4, 3).mean(axis=(1, 3))
                    assert np.abs(result.outputs[0][0].astype(float) - whole).max() <= 1
                    assert count or frame.data.any(), "the picture of vivid is not black"
                    memory.release(frame)
                # The addresses that the kernel got are in the memory that the driver process maps.
                shared = []
                for line in Path("/proc/self/maps").read_text().splitlines():
                    if "memfd:aionn-request" in line:
                        first, last = (int(part, 16) for part in line.split()[0].split("-"))
                        shared.append(range(first, last))
                assert sorted(queued) == [0, 1, 2, 3]
                for number, address in queued.items():
                    assert address == slots[number].inputs[0].ctypes.data
                    assert any(
                        address in place and address + memory.size_bytes - 1 in place for place in shared
                    )
                return frames.statistics()

    account = run(body)
    assert copies == []
    assert account.delivered == 20 and account.corrupt == 0


def test_camera_that_is_unplugged_comes_back_into_the_same_memory():
    async def body():
        memory = CaptureMemory([np.zeros((SIZE[1], SIZE[0], 3), np.uint8) for _ in range(4)])
        options = {"into": memory, "input_index": 0, "rate": 10.0, "reconnect": SOON}
        async with camera(CAMERAS[0], **options) as frames:
            memory.release(await anext(frames))
            await controlled(CAMERAS[0], "disconnect=1")
            while True:
                frame = await anext(frames)
                memory.release(frame)
                if frame.follows_gap:
                    return frames.statistics()

    assert run(body).reconnections >= 1


def test_controls_of_the_kernel_are_listed_and_set_by_name():
    async def body():
        before = {one.name: one for one in await camera_controls(CAMERAS[0])}
        assert {"brightness", "contrast", "hue"} <= set(before)
        limit = before["brightness"].maximum
        after = {one.name: one for one in await set_camera_controls(CAMERAS[0], {"brightness": limit})}
        assert after["brightness"].value == limit
        with pytest.raises(aionn.InvalidArgument, match="expected"):
            await set_camera_controls(CAMERAS[0], {"brightness": limit + 1})
        with pytest.raises(aionn.InvalidArgument, match="brightness"):
            await set_camera_controls(CAMERAS[0], {"no_such_control": 1})
        # Set at each opening, here by the text of a menu's entry.
        menu = next(
            one
            for one in before.values()
            if one.kind == "menu" and len(one.choices) > 1 and not one.is_read_only
        )
        wanted = list(menu.choices.values())[1]
        async with camera(CAMERAS[0], **SMALL, controls={"brightness": 10, menu.name: wanted}) as frames:
            await anext(frames)
            now = {one.name: one for one in await camera_controls(CAMERAS[0])}
            assert (now["brightness"].value, menu.choices[now[menu.name].value]) == (10, wanted)
        await set_camera_controls(
            CAMERAS[0], {menu.name: menu.default, "brightness": before["brightness"].default}
        )

    run(body)

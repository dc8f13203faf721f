"""A camera as a source, over a driver in Python: what is delivered, dropped, lost, and how it ends."""

import asyncio
import errno
import gc
import os
import threading
import time

import anyio
import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import Reconnection, SourceUnavailable, camera, camera_controls
from aionn.media.cameras import videodev
from tests.support.media.fake_camera import FakeCamera, FakeSystem, Listed

SOON = Reconnection(first_s=0.01, most_s=0.05)
MS = 1_000_000


async def until(condition):
    while not condition():
        await anyio.sleep(0.001)


def test_frames_come_with_the_drivers_stamp_and_number(really, system, filming):
    async def body():
        frames = []
        async with camera(system=system, size=(8, 6)) as source, filming(system.camera):
            async for frame in source:
                frames.append(frame)
                if len(frames) == 10:
                    return frames, source.statistics()

    frames, account = really(body)
    assert [frame.data.shape for frame in frames] == [(6, 8, 3)] * 10
    assert all(frame.data.dtype == np.uint8 and frame.data.flags.c_contiguous for frame in frames)
    indices = [frame.index for frame in frames]
    assert indices == sorted(set(indices))
    stamps = [frame.captured_at_ns for frame in frames]
    assert stamps == sorted(set(stamps)) and stamps[-1] <= time.monotonic_ns()
    assert {frame.clock for frame in frames} == {"driver"}
    assert frames[0].time_s == 0 and frames[-1].time_s > 0
    assert account.presented == account.delivered + account.dropped + account.queued
    assert account.delivered == 10


def test_frames_share_no_memory_with_the_buffers(really, system):
    system.camera.listed = [Listed("GREY", 64, 48)]

    async def body():
        async with camera(system=system, keep="all", queue_frames_max=2) as source:
            kept = []
            for _ in range(20):
                assert system.camera.fill()
                kept.append(await anext(source))
            return kept

    kept = really(body)
    assert [frame.data.mean() for frame in kept] == list(range(20))


def test_slow_consumer_gets_the_newest_frame_and_nothing_else_is_converted(really, system):
    async def body():
        async with camera(system=system) as source:
            converted = []
            convert = source._capture.convert
            source._capture.convert = lambda grab: converted.append(grab.sequence) or convert(grab)
            for _ in range(30):
                assert system.camera.fill()
                await until(lambda: len(system.camera.queued) >= 3)
            frame = await anext(source)
            return frame, converted, source.statistics()

    frame, converted, account = really(body)
    assert frame.index == 29
    assert converted == [29]
    assert (account.presented, account.delivered, account.dropped, account.lost) == (30, 1, 29, 0)


def test_frame_that_went_stale_while_the_loop_was_busy_is_not_delivered(really, system):
    async def body():
        async with camera(system=system) as source:
            system.camera.fill()
            await anext(source)
            # Four buffers are filled while the loop is busy; what comes then, is lost, and what was filled, is old.
            for _ in range(30):
                system.camera.fill(age_ns=500 * MS)
            with anyio.move_on_after(0.2):
                await anext(source)
                pytest.fail("a stale frame")
            system.camera.fill()
            frame = await anext(source)
            return time.monotonic_ns() - frame.captured_at_ns, frame, source.statistics()

    age_ns, frame, account = really(body)
    assert age_ns < 400 * MS
    assert (frame.lost_before, account.lost) == (26, 26)
    assert account.dropped == 4


def test_all_delivers_every_frame_in_order_and_the_camera_counts_what_it_loses(really, system):
    async def body():
        async with camera(system=system, keep="all", queue_frames_max=3) as source:
            for _ in range(20):
                system.camera.fill()
                await anyio.sleep(0.002)
            frames = [await anext(source) for _ in range(5)]
            system.camera.fill()
            frames.append(await anext(source))
            return frames, source.statistics()

    frames, account = really(body)
    assert [frame.index for frame in frames] == [0, 1, 2, 3, 4, 20]
    assert frames[-1].lost_before == account.lost == 15
    assert account.dropped == 0


def test_oldest_keeps_the_first_frames(really, system):
    async def body():
        async with camera(system=system, keep="oldest", queue_frames_max=3) as source:
            for count in range(1, 21):
                system.camera.fill()
                while source.statistics().presented < count:
                    await anyio.sleep(0.001)
            return [(await anext(source)).index for _ in range(3)], source.statistics()

    indices, account = really(body)
    assert indices == [0, 1, 2]
    assert (account.dropped, account.lost) == (17, 0)


def test_incomplete_and_empty_frames_are_counted_and_left_out(really, system):
    async def body():
        async with camera(system=system, keep="all") as source:
            system.camera.fill(flags=videodev.BUF_FLAG_ERROR)
            system.camera.fill(used=0)
            system.camera.fill(used=100)
            await anyio.sleep(0.05)
            system.camera.fill()
            frame = await anext(source)
            return frame, source.statistics()

    frame, account = really(body)
    assert frame.index > 0
    assert (account.corrupt, account.delivered, account.dropped) == (3, 1, 0)


def test_camera_that_gives_damaged_frames_alone_is_an_error(really, system, filming):
    async def body():
        film = filming(system.camera, 0.001, flags=videodev.BUF_FLAG_ERROR)
        async with camera(system=system, reconnect=None) as source, film:
            with pytest.raises(SourceUnavailable, match="60 damaged ones in a row"):
                await anext(source)

    really(body)


def test_frames_that_the_driver_fills_too_little_are_an_error_too(really, system, filming):
    async def body():
        async with camera(system=system, reconnect=None) as source, filming(system.camera, 0.001, used=7):
            with pytest.raises(SourceUnavailable, match="60 damaged ones in a row"):
                await anext(source)

    really(body)


def test_unplugged_camera_ends_the_source_with_an_error_after_what_was_captured(really, system):
    async def body():
        async with camera(system=system, keep="all", reconnect=None) as source:
            system.camera.fill()
            await until(lambda: len(source._queue))
            system.camera.unplug()
            await until(lambda: source.health().state == "ended")
            assert (await anext(source)).index == 0
            with pytest.raises(
                SourceUnavailable, match=r"camera /dev/video0: expected a frame, got ENODEV: it was unplugged"
            ):
                await anext(source)
            with pytest.raises(StopAsyncIteration):
                await anext(source)

    really(body)


def test_camera_goes_on_when_it_is_plugged_in_again(really, system, filming):
    async def body():
        async with camera(system=system, reconnect=SOON) as source, filming(system.camera):
            first = await anext(source)
            for round_number in range(1, 4):
                system.camera.unplug()
                await until(lambda: source.health().failures > 1)
                assert source.health().state != "live"
                system.camera.plug()
                frame = await anext(source)
                while not frame.follows_gap:
                    frame = await anext(source)
                assert source.statistics().reconnections == round_number
            after = await anext(source)
            assert not after.follows_gap
            assert after.index > frame.index > first.index
            return source.health()

    health = really(body)
    assert (health.state, health.failures) == ("live", 0)
    assert system.camera.opened > 4


def test_camera_that_has_another_number_afterwards_is_found_by_its_name_and_place(really):
    one, other = FakeCamera("Left", "usb-1"), FakeCamera("Right", "usb-2")
    system = FakeSystem({"/dev/video0": one, "/dev/video2": other})

    async def body():
        async with camera(system=system, reconnect=SOON, keep="all") as source:
            one.fill()
            await anext(source)
            one.unplug()
            await until(lambda: source.health().state != "live")
            one.plug()
            system.cameras = {"/dev/video0": other, "/dev/video1": one}
            await until(lambda: source.health().state == "live")
            assert not other.is_streaming
            one.fill()
            assert (await anext(source)).follows_gap

    really(body)
    assert one.holds_nothing and other.holds_nothing


def test_silent_camera_is_opened_again(really, system, monkeypatch):
    monkeypatch.setattr("aionn.media.live.silence.SILENCE_S_MIN", 0.05)

    async def body():
        async with camera(system=system, reconnect=SOON) as source:
            for _ in range(2):
                system.camera.fill()
                await anext(source)
            await until(lambda: source.health().reconnections)
            return source.health()

    assert "expected an item within" in really(body).reason


def test_error_descriptor_without_frames_does_not_keep_a_core_busy(really, system):
    async def body():
        async with camera(system=system):
            fd = system.camera.fd
            asks = 0
            answer = system.camera.answer

            def counted(request, argument):
                nonlocal asks
                asks += request == videodev.DQBUF
                if request == videodev.DQBUF:
                    raise OSError(errno.EAGAIN, "again")
                answer(request, argument)

            system.camera.answer = counted
            os.eventfd_write(fd, 1)
            await anyio.sleep(0.3)
            assert 1 < asks < 100

    really(body)


def test_requests_on_the_loops_thread_are_those_that_never_wait(really, system, filming):
    calls = {}
    original = system.ioctl

    def noted(fd, request, argument):
        calls.setdefault(request, set()).add(threading.current_thread())
        original(fd, request, argument)

    system.ioctl = noted

    async def body():
        async with camera(system=system) as source, filming(system.camera):
            for _ in range(5):
                await anext(source)

    really(body)
    on_loop = {request for request, threads in calls.items() if threading.main_thread() in threads}
    assert on_loop == {videodev.QBUF, videodev.DQBUF}


def test_open_that_blocks_is_bounded_and_is_closed_when_it_returns(really, system, monkeypatch):
    monkeypatch.setattr("aionn.media.cameras.opening.OPEN_S_MAX", 0.05)
    monkeypatch.setattr("aionn.media.cameras.opening._CameraOpener.limit_s", 0.05)
    monkeypatch.setattr("aionn.media.live.source.CLOSE_S_MAX", 0.05)
    system.camera.blocks_open = threading.Event()

    async def body():
        started = time.monotonic()
        with pytest.raises(SourceUnavailable, match=r"expected an answer of the system within 0\.05 s"):
            async with camera(system=system):
                pass
        assert time.monotonic() - started < 5
        system.camera.blocks_open.set()
        await until(lambda: system.camera.opened and system.camera.holds_nothing)

    really(body)


def test_close_that_blocks_is_bounded(really, system, monkeypatch):
    monkeypatch.setattr("aionn.media.live.source.CLOSE_S_MAX", 0.05)

    async def body():
        async with camera(system=system):
            system.camera.blocks_close = threading.Event()
        system.camera.blocks_close.set()
        await until(lambda: system.camera.holds_nothing)

    really(body)


@pytest.mark.parametrize("turns", range(12))
def test_cancelled_opening_leaves_nothing(really, system, turns):
    async def body():
        async def use():
            async with camera(system=system) as source:
                await anext(source)

        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert system.camera.holds_nothing

    really(body)


def test_consumer_that_is_cancelled_twice_while_it_closes_leaves_nothing(really, system, filming):
    async def body():
        async with filming(system.camera):
            for turns in range(8):
                got = asyncio.Event()

                async def use(got=got):
                    async with camera(system=system) as source:
                        async for _ in source:
                            got.set()

                task = asyncio.create_task(use())
                await got.wait()
                task.cancel()
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                assert system.camera.holds_nothing

    really(body)


def test_cancelled_wait_loses_nothing_under_all(really, system):
    async def body():
        async with camera(system=system, keep="all") as source:
            indices = []
            for number in range(40):
                system.camera.fill()
                while len(indices) <= number:
                    with anyio.move_on_after(0.0005):
                        indices.append((await anext(source)).index)
            return indices

    assert really(body) == list(range(40))


def test_error_of_the_body_is_raised_as_it_is(really, system):
    async def body():
        with pytest.raises(ZeroDivisionError):
            async with camera(system=system):
                raise ZeroDivisionError

    really(body)


def test_source_is_used_once_and_inside_its_context(really, system):
    async def body():
        source = camera(system=system)
        with pytest.raises(InvalidArgument, match="inside its `async with`"):
            await anext(source)
        async with source:
            pass
        with pytest.raises(InvalidArgument, match="not used before"):
            async with source:
                pass
        assert "ended" in repr(source)

    really(body)


def test_source_that_is_dropped_open_warns(really, system):
    async def body():
        async with camera(system=system) as source:
            source._state = "open"
        source._state = "open"
        with pytest.warns(ResourceWarning, match="dropped open"):
            del source
            gc.collect()

    really(body)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (lambda s: s.cameras.clear(), r"camera /dev/video0: .*ENOENT: there is no such camera"),
        (
            lambda s: s.forbidden.add("/dev/video0"),
            r"EACCES: this process may not use it; add the user to the group",
        ),
        (
            lambda s: s.camera.failing.update({videodev.S_FMT: errno.EBUSY}),
            r"EBUSY: it is in use by cheese \(pid 7\)",
        ),
        (
            lambda s: s.camera.failing.update({videodev.STREAMON: errno.ENOSPC}),
            r"USB bus has no bandwidth left .*MJPG",
        ),
        (lambda s: s.camera.failing.update({videodev.QUERYCAP: errno.ENOTTY}), r"not a Video4Linux device"),
        (lambda s: s.camera.failing.update({videodev.ENUM_FMT: errno.EIO}), r"listing its formats"),
        (lambda s: s.camera.failing.update({videodev.REQBUFS: errno.ENOMEM}), r"requesting 4 buffers"),
        (lambda s: s.camera.failing.update({videodev.QUERYBUF: errno.EINVAL}), r"asking for buffer 0"),
        (lambda s: s.camera.failing.update({videodev.QBUF: errno.EIO}), r"queueing a buffer"),
        (lambda s: s.camera.failing.update({videodev.S_PARM: errno.EIO}), r"setting the rate"),
        (lambda s: setattr(s.camera, "capabilities", 0x04200000), r"a second node, for metadata"),
        (
            lambda s: setattr(s.camera, "listed", [Listed("H264", 640, 480)]),
            r"expected the format YUYV.*got H264",
        ),
        (lambda s: setattr(s.camera, "listed", []), r"got none"),
        (lambda s: setattr(s.camera, "returned_size", (0, 0)), r"expected YUYV 64x48, got YUYV 0x0"),
        (lambda s: setattr(s.camera, "returned_size", (4_000_000_000, 1)), r"does not keep to its own list"),
        (lambda s: setattr(s.camera, "returned_format", "NV12"), r"expected YUYV 64x48, got NV12"),
        (lambda s: setattr(s.camera, "size_image", 100), r"expected a buffer of 6144"),
        (lambda s: setattr(s.camera, "stride", 60_000), r"expected a buffer of"),
        (lambda s: setattr(s.camera, "buffers_given", 1), r"expected 2 to 64 buffers, got 1"),
        (lambda s: setattr(s.camera, "buffers_given", 0), r"got 0"),
    ],
)
def test_camera_that_cannot_be_opened_is_an_error_that_names_the_fault(really, setup, words):
    system = FakeSystem()
    one = system.camera
    system.users = ["cheese (pid 7)"]
    setup(system)

    async def body():
        with pytest.raises(SourceUnavailable, match=words):
            async with camera(system=system, size=(64, 48)):
                pass

    really(body)
    assert one.holds_nothing


@pytest.mark.parametrize("index", [4, 31, 2**32 - 1])
def test_buffer_that_does_not_exist_is_an_error(really, system, index):
    async def body():
        async with camera(system=system, reconnect=None) as source:
            system.camera.fill(index=index)
            with pytest.raises(SourceUnavailable, match=f"got number {index}; the driver is at fault"):
                await anext(source)

    really(body)


def test_counter_that_goes_round_or_back_counts_no_loss(really, system):
    async def body():
        async with camera(system=system, keep="all") as source:
            lost = []
            for sequence in (2**32 - 1, 0, 1, 4, 2, 3):
                system.camera.sequence = sequence
                system.camera.fill()
                lost.append((await anext(source)).lost_before)
            return lost

    assert really(body) == [0, 0, 0, 2, 0, 0]


def test_camera_without_rates_and_sizes_works(really, system):
    system.camera.failing = dict.fromkeys(
        (videodev.ENUM_FRAMESIZES, videodev.ENUM_FRAMEINTERVALS, videodev.G_PARM), errno.ENOTTY
    )

    async def body():
        async with camera(system=system, capture_size=(32, 16)) as source:
            system.camera.fill()
            return (await anext(source)).data.shape

    assert really(body) == (16, 32, 3)


def test_missing_camera_is_waited_for_if_the_policy_says_so(really):
    system = FakeSystem({})
    one = FakeCamera()

    async def body():
        policy = Reconnection(first_s=0.01, most_s=0.02, from_start=True)
        async with camera(system=system, reconnect=policy) as source:
            await until(lambda: source.health().failures > 2)
            system.cameras["/dev/video0"] = one
            await until(lambda: one.is_streaming)
            one.fill()
            frame = await anext(source)
            return frame, source.statistics()

    frame, account = really(body)
    assert not frame.follows_gap
    assert account.reconnections == 0
    assert one.holds_nothing


@pytest.mark.thorough
def test_two_cameras_run_at_a_time(really, filming):
    left, right = FakeCamera("Left"), FakeCamera("Right")
    system = FakeSystem({"/dev/video0": left, "/dev/video1": right})

    async def body():
        async with (
            camera(0, system=system) as one,
            camera("right", system=system) as two,
            filming(left),
            filming(right),
        ):
            for _ in range(5):
                await anext(one)
                await anext(two)

    really(body)
    assert left.holds_nothing and right.holds_nothing


@pytest.mark.parametrize("name", [9, "/dev/video9", "C920"])
@pytest.mark.parametrize(
    ("cameras", "words"),
    [
        ({"/dev/video0": "Front", "/dev/video2": "Back"}, "/dev/video0 'Front', /dev/video2 'Back'"),
        ({}, "none|this machine has no camera"),
    ],
)
def test_missing_camera_is_an_error_that_names_the_others_and_sources_without_one(
    really, name, cameras, words
):
    system = FakeSystem({path: FakeCamera(title) for path, title in cameras.items()})

    async def body():
        with pytest.raises(SourceUnavailable, match=f"({words}); .*named_source .*replay:FILE.*'pattern:'"):
            async with camera(name, system=system):
                pass
        with pytest.raises(SourceUnavailable, match=f"({words}); .*named_source .*replay:FILE.*'pattern:'"):
            await camera_controls(name, system=system)

    really(body)
    assert all(one.holds_nothing for one in system.cameras.values())


def test_name_that_no_camera_has_lists_those_that_are_there(really, system):
    async def body():
        with pytest.raises(SourceUnavailable, match=r"got /dev/video0 'Fake Camera'"):
            async with camera("C920", system=system):
                pass

    really(body)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": -1},
        {"name": ""},
        {"size": (0, 1)},
        {"queue_frames_max": 0},
        {"queue_frames_max": 29},
        {"keep": "some"},
        {"rate": 0},
        {"pixel_format": "H264"},
    ],
    ids=str,
)
def test_impossible_argument_is_rejected(arguments):
    with pytest.raises(InvalidArgument, match=r"aionn\.media\.camera"):
        camera(**{"name": 0, **arguments})

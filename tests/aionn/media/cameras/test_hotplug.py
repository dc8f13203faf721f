"""Cameras that come and go are noticed by the kernel's report, without asking again and again."""

import asyncio
import contextlib
import errno
import itertools
import os

import anyio
import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import CameraWatch, CaptureMemory, Reconnection, SourceUnavailable, camera
from aionn.media.cameras.hotplug import DeviceWatch
from aionn.media.live.readable import until_readable
from tests.support.media.fake_camera import FakeCamera, Listed

LATE = Reconnection(first_s=100.0, most_s=100.0)
"""An attempt by its time alone would come long after the limit of the tests."""


async def until(condition):
    while not condition():
        await anyio.sleep(0.001)


@pytest.fixture
def watch(tmp_path):
    with contextlib.closing(
        DeviceWatch([str(tmp_path), str(tmp_path / "v4l"), str(tmp_path / "v4l/by-id")])
    ) as made:
        yield made


def test_nodes_and_names_of_cameras_are_news_and_others_are_not(tmp_path, watch):
    assert not watch.news()
    (tmp_path / "ttyUSB0").touch()
    assert not watch.news()
    (tmp_path / "video0").touch()
    assert watch.news() and not watch.news()
    (tmp_path / "video0").chmod(0o600)
    assert watch.news(), "udev has given it to its group"
    (tmp_path / "v4l").mkdir()
    assert watch.news()
    (tmp_path / "v4l" / "by-id").mkdir()
    assert watch.news()
    (tmp_path / "v4l" / "by-id" / "usb-Cam").symlink_to(tmp_path / "video0")
    assert watch.news()
    (tmp_path / "video0").unlink()
    assert watch.news()


def test_descriptor_is_readable_when_there_is_something_to_read(tmp_path, watch):
    async def body():
        ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(watch.fileno(), ready.set)
        await asyncio.sleep(0)
        assert not ready.is_set()
        (tmp_path / "video1").touch()
        async with asyncio.timeout(20):
            await ready.wait()
        asyncio.get_running_loop().remove_reader(watch.fileno())

    asyncio.run(body())


def test_watch_without_a_folder_is_an_error_and_leaves_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no folder to watch"):
        DeviceWatch([str(tmp_path / "none")])
    assert len(os.listdir("/proc/self/fd")) == before


def test_thousands_of_events_are_read_in_bounded_steps(tmp_path, watch):
    for number in range(3000):
        (tmp_path / f"tty{number}").touch()
    (tmp_path / "video0").touch()
    rounds = 0
    while not watch.news():
        rounds += 1
        assert rounds < 100


def test_camera_that_is_plugged_in_is_opened_when_the_kernel_reports_it(really, system, filming):
    async def body():
        async with camera(system=system, reconnect=LATE) as frames, filming(system.camera):
            await anext(frames)
            system.camera.unplug()
            await until(lambda: frames.health().state == "waiting" and system.watch is not None)
            system.camera.plug()
            system.announce()
            while not (await anext(frames)).follows_gap:
                pass
            return frames.statistics()

    assert really(body).reconnections == 1
    assert system.watch.fileno() == -1


def test_group_that_is_set_a_moment_later_does_not_end_the_source(really, system, filming):
    async def body():
        async with camera(system=system, reconnect=LATE) as frames, filming(system.camera):
            await anext(frames)
            system.camera.unplug()
            await until(lambda: frames.health().state == "waiting" and system.watch is not None)
            system.forbidden.add("/dev/video0")
            system.camera.plug()
            system.announce()
            await until(lambda: frames.health().failures == 1)
            assert "this process may not use it" in frames.health().reason
            await until(lambda: frames.health().state == "waiting" and system.watch.fileno() >= 0)
            system.forbidden.clear()
            system.announce()
            while not (await anext(frames)).follows_gap:
                pass
            return frames.statistics()

    assert really(body).reconnections == 1


def test_camera_comes_back_by_time_where_the_kernel_reports_nothing(really, system, filming):
    system.has_watch = False

    async def body():
        soon = Reconnection(first_s=0.01, most_s=0.05)
        async with camera(system=system, reconnect=soon) as frames, filming(system.camera):
            await anext(frames)
            system.camera.unplug()
            await until(lambda: frames.health().state == "waiting")
            system.camera.plug()
            while not (await anext(frames)).follows_gap:
                pass

    really(body)


def test_source_that_is_closed_while_it_waits_leaves_no_watch(really, system):
    async def body():
        async with camera(system=system, reconnect=LATE) as frames:
            system.camera.unplug()
            await until(lambda: frames.health().state == "waiting" and system.watch is not None)

    really(body)
    assert system.watch.fileno() == -1


def test_lists_of_cameras_follow_the_changes(really, system):
    async def body():
        lists = []
        async with CameraWatch(system=system) as changes:
            async for cameras in changes:
                lists.append([one.path for one in cameras])
                if len(lists) == 1:
                    system.announce()  # A change that concerns no camera gives no list.
                    system.cameras["/dev/video1"] = FakeCamera("Second", "usb-2")
                    system.announce()
                elif len(lists) == 2:
                    del system.cameras["/dev/video1"]
                    system.announce()
                else:
                    return lists

    assert really(body) == [["/dev/video0"], ["/dev/video0", "/dev/video1"], ["/dev/video0"]]
    assert system.watch.fileno() == -1


def test_cancelled_wait_for_a_change_loses_nothing(really, system):
    async def body():
        async with CameraWatch(system=system) as changes:
            await anext(changes)
            with anyio.move_on_after(0.05):
                await anext(changes)
            system.cameras["/dev/video1"] = FakeCamera("Second", "usb-2")
            system.announce()
            return len(await anext(changes))

    assert really(body) == 2


def test_watch_that_another_task_leaves_ends_its_consumer(really, system):
    """The loop watches no descriptor that is closed: the next one of that number is another file."""

    async def body():
        async with CameraWatch(system=system) as changes:
            await anext(changes)
            waiting = asyncio.create_task(anext(changes))
            await asyncio.sleep(0.01)
            with pytest.raises(InvalidArgument, match="expected one consumer"):
                await anext(changes)
        with pytest.raises(StopAsyncIteration):
            await waiting
        assert system.watch.fileno() == -1
        reading, writing = os.pipe()
        try:
            os.write(writing, b"x")
            assert await until_readable(reading, 5)
        finally:
            os.close(reading)
            os.close(writing)

    really(body)


@pytest.mark.parametrize("times", [1, 2])
def test_watch_whose_consumer_is_cancelled_while_another_task_leaves_it_is_closed(really, system, times):
    async def body():
        async with CameraWatch(system=system) as changes:
            await anext(changes)
            waiting = asyncio.create_task(anext(changes))
            await asyncio.sleep(0.01)
            for _ in range(times):
                waiting.cancel()
        with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
            await waiting
        assert system.watch.fileno() == -1

    really(body)


def test_watch_that_cannot_be_used_is_an_error(really, system):
    system.has_watch = False

    async def body():
        with pytest.raises(SourceUnavailable, match=os.strerror(errno.EMFILE)):
            async with CameraWatch(system=system):
                pass
        with pytest.raises(InvalidArgument, match="inside its `async with`"):
            await anext(CameraWatch(system=system))

    really(body)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_camera_that_is_unplugged_at_any_step_of_its_opening_leaves_nothing(really, system, is_in_place):
    system.camera.listed = [Listed("RGB3", 64, 48)]
    answered = system.camera.answer
    steps = 0

    async def body():
        nonlocal steps
        for step in itertools.count(1):
            seen = 0

            def answer(request, argument, step=step):
                nonlocal seen
                seen += 1
                if seen == step:
                    system.camera.is_plugged = False
                answered(request, argument)

            system.camera.answer = answer
            system.camera.plug()
            memory = (
                CaptureMemory([np.zeros((48, 64, 3), np.uint8) for _ in range(4)]) if is_in_place else None
            )
            size = None if is_in_place else (64, 48)
            try:
                async with camera(system=system, size=size, into=memory, reconnect=None):
                    if seen < step:
                        return
            except SourceUnavailable as error:
                assert "ENODEV" in str(error)
            assert system.camera.holds_nothing
            assert memory is None or not memory.is_attached
            steps = step

    really(body)
    assert steps >= 10

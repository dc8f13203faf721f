"""Live sources under random events: plugs pulled, consumers cancelled, frames damaged, calls that hang."""

import asyncio
import errno
import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import anyio
import pytest

import aionn
from aionn.media import Reconnection, SourceUnavailable, camera, list_cameras, microphone, record, replay
from aionn.media.cameras import videodev
from aionn.media.live.source import LiveSource
from tests.aionn.media.live.test_slow_consumer import Device, Opener
from tests.support.media.fake_camera import FakeSystem

SOON = Reconnection(first_s=0.01, most_s=0.02)


async def until(condition):
    while not condition():
        await anyio.sleep(0.001)


def disturb(one, chance):
    """One random event of the device."""
    event = chance.random()
    if event < 0.03:
        one.unplug()
    elif event < 0.2:
        one.plug()
    elif event < 0.25:
        one.fill(flags=videodev.BUF_FLAG_ERROR)
    elif event < 0.3:
        one.fill(used=chance.randrange(0, 100))
    elif event < 0.31:
        one.fill(index=77)
    elif event < 0.33:
        one.sequence = chance.randrange(2**32)
    elif event < 0.35:
        request = chance.choice(sorted(REQUESTS))
        one.failing = {request: chance.choice([5, 16, 22, 28])}
    elif event < 0.5:
        one.failing = {}
    else:
        for _ in range(chance.randrange(1, 9)):
            one.fill(age_ns=chance.choice([0, 0, 10**9]))


REQUESTS = {
    videodev.S_FMT,
    videodev.QBUF,
    videodev.DQBUF,
    videodev.STREAMON,
    videodev.REQBUFS,
    videodev.QUERYCAP,
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("keep", ["latest", "oldest", "all"])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 60))]
)
@pytest.mark.thorough
def test_random_events_break_no_promise(really, seed, keep):
    chance = random.Random(seed)
    system = FakeSystem()
    one = system.camera

    async def consume(source, indices):
        while True:
            with anyio.move_on_after(chance.choice([0.0003, 0.003, 1.0])):
                indices.append((await anext(source)).index)
            await anyio.sleep(chance.choice([0, 0, 0.004]))

    async def body():
        indices = []
        async with camera(
            system=system, keep=keep, queue_frames_max=chance.randrange(1, 5), reconnect=SOON
        ) as source:
            task = asyncio.create_task(consume(source, indices))
            for _ in range(150):
                disturb(one, chance)
                await anyio.sleep(chance.choice([0, 0.001, 0.003]))
                account = source.statistics()
                assert account.presented == account.delivered + account.dropped + account.queued
                assert 0 <= account.queued <= 3 * 5
                if source.health().state == "ended":
                    break
            one.plug()
            one.failing = {}
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or isinstance(task.exception(), SourceUnavailable), task
        assert indices == sorted(set(indices))
        account = source.statistics()
        assert account.queued == 0 and account.delivered == len(indices)

    really(body)
    assert one.holds_nothing


def test_opening_that_hangs_while_reconnecting_uses_one_thread_and_recovers(really, monkeypatch):
    system = FakeSystem()
    one = system.camera

    async def body():
        async with camera(system=system, reconnect=SOON) as source:
            one.fill()
            await anext(source)
            # Not before: the first opening of a process may take longer.
            monkeypatch.setattr("aionn.media.cameras.opening._CameraOpener.limit_s", 0.05)
            threads = threading.active_count()
            one.blocks_open = threading.Event()
            one.unplug()
            await until(lambda: source.health().failures > 3)
            assert threading.active_count() == threads
            assert "has not returned yet" in source.health().reason
            one.plug()
            one.blocks_open.set()
            await until(lambda: source.health().state == "live")
            one.fill()
            assert (await anext(source)).follows_gap

    really(body)
    assert one.holds_nothing


def test_lost_camera_outlasts_a_list_of_devices_that_cannot_be_read(really, monkeypatch):
    system = FakeSystem()
    one = system.camera

    def refuse(self):
        raise OSError(errno.EMFILE, "Too many open files")

    async def body():
        async with camera("fake", system=system, reconnect=SOON) as source:
            one.fill()
            await anext(source)
            with monkeypatch.context() as patch:
                patch.setattr(FakeSystem, "video_nodes", refuse)
                with pytest.raises(aionn.ResourceExhausted, match=r"camera: .*Too many open files"):
                    async with camera("fake", system=system):
                        pass
                with pytest.raises(aionn.ResourceExhausted, match=r"list_cameras: .*Too many open files"):
                    await list_cameras(system=system)
                one.unplug()
                await until(lambda: source.health().failures > 2)
                assert "Too many open files" in source.health().reason
            one.plug()
            await until(lambda: source.health().state == "live")
            one.fill()
            assert (await anext(source)).follows_gap

    really(body)
    assert one.holds_nothing


def test_absent_camera_is_named_although_the_others_cannot_be_listed(really, monkeypatch):
    def refuse(self):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(FakeSystem, "video_nodes", refuse)

    async def body():
        with pytest.raises(SourceUnavailable, match=r"/dev/video7.*no such camera.*cannot be listed"):
            async with camera(7, system=FakeSystem()):
                pass

    really(body)


def test_gap_before_a_dropped_frame_is_marked_on_the_next_one(really):
    system = FakeSystem()
    one = system.camera

    async def body():
        async with camera(system=system, reconnect=SOON) as source:
            one.fill()
            await anext(source)
            one.unplug()
            await until(lambda: source.health().state != "live")
            one.plug()
            await until(lambda: source.health().state == "live")
            while not source.statistics().dropped:
                one.fill()
                await anyio.sleep(0.001)
            assert (await anext(source)).follows_gap
            for _ in range(source.statistics().queued):
                assert not (await anext(source)).follows_gap
            one.fill()
            assert not (await anext(source)).follows_gap

    really(body)


def test_conversion_that_hangs_is_bounded(really, monkeypatch):
    monkeypatch.setattr("aionn.media.live.source.CONVERT_S_MAX", 0.05)
    monkeypatch.setattr("aionn.media.live.source.CLOSE_S_MAX", 0.05)
    system = FakeSystem()
    hangs = threading.Event()

    async def body():
        async with camera(system=system, reconnect=None) as source:
            source._capture.convert = lambda grab: hangs.wait(20)
            system.camera.fill()
            waiting = asyncio.create_task(anext(source))
            await until(lambda: source._converting)
            while not waiting.done():
                system.camera.fill()
                await anyio.sleep(0.005)
            with pytest.raises(SourceUnavailable, match=r"converted within 0\.05 s"):
                await waiting
        hangs.set()
        await until(lambda: system.camera.holds_nothing)

    really(body)


def test_exception_of_a_conversion_ends_the_source_with_it(really):
    system = FakeSystem()

    async def body():
        async with camera(system=system, reconnect=SOON) as source:

            def broken(grab):
                raise ZeroDivisionError("a bug")

            source._capture.convert = broken
            system.camera.fill()
            waiting = asyncio.create_task(anext(source))
            while not waiting.done():
                system.camera.fill()
                await anyio.sleep(0.001)
            with pytest.raises(SourceUnavailable, match="ZeroDivisionError: a bug"):
                await waiting

    really(body)
    assert system.camera.holds_nothing


def test_conversion_without_memory_loses_the_source_and_does_not_end_it(really):
    system = FakeSystem()

    async def body():
        async with camera(system=system, reconnect=SOON) as source:

            def short(grab):
                raise MemoryError

            source._capture.convert = short
            waiting = asyncio.create_task(anext(source))
            while not waiting.done():
                system.camera.fill()
                await anyio.sleep(0.001)
            assert (await waiting).follows_gap
            assert "MemoryError" in source.health().reason
            account = source.statistics()
            assert account.presented == account.delivered + account.dropped + account.queued

    really(body)
    assert system.camera.holds_nothing


def test_failing_conversion_in_the_loop_gives_its_buffer_back(really):
    async def body():
        device = Device(SimpleNamespace(now_ns=time.monotonic_ns()))

        def short(grab):
            raise MemoryError

        device.convert = short
        async with LiveSource(Opener(device), name="test", reconnect=None) as source:
            waiting = asyncio.create_task(anext(source))
            while not waiting.done():
                device.fill()
                await anyio.sleep(0.001)
            with pytest.raises(SourceUnavailable, match="device: MemoryError"):
                await waiting
        account = source.statistics()
        assert account.presented == account.dropped > 0
        return device.held

    assert really(body) == 0


def test_many_sources_open_and_close_at_a_time(really):
    system = FakeSystem({f"/dev/video{n}": FakeSystem().camera for n in range(20)})

    async def use(number):
        async with camera(number, system=system) as source:
            system.cameras[f"/dev/video{number}"].fill()
            await anext(source)

    async def body():
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(use, number)

    really(body)
    assert all(one.holds_nothing for one in system.cameras.values())


def test_loop_stays_responsive_while_a_camera_floods(really):
    system = FakeSystem()
    one = system.camera
    ends = threading.Event()

    def flood():
        while not ends.is_set():
            one.fill()

    async def body():
        thread = threading.Thread(target=flood)
        async with camera(system=system) as source:
            thread.start()
            # The watchdog ends it if the loop starves.
            for _ in range(20):
                await anyio.sleep(0.001)
            await anext(source)
            ends.set()
            thread.join()

    really(body)


@pytest.mark.thorough
def test_sources_work_on_uvloop(repository):
    pytest.importorskip("uvloop", reason="uvloop is not installed")
    # In a process of its own: uvloop keeps a pipe as long as its process lives.
    program = """
import asyncio, uvloop
from aionn.media import Reconnection, camera
from tests.support.media.fake_camera import FakeSystem
system = FakeSystem()
one = system.camera
async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)
async def body():
    async with camera(system=system, reconnect=Reconnection(first_s=0.01, most_s=0.02)) as source:
        for _ in range(3):
            one.fill()
            await anext(source)
            one.unplug()
            await until(lambda: source.health().state != "live")
            one.plug()
            await until(lambda: source.health().state == "live")
        waiting = asyncio.create_task(anext(source))
        await asyncio.sleep(0)
        waiting.cancel()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(asyncio.wait_for(body(), 30))
assert one.holds_nothing
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.thorough
def test_loop_that_ends_with_an_open_source_leaves_no_thread_that_keeps_the_process(repository):
    """A program that returns from its main task without closing, and one that is interrupted, end by themselves."""
    program = """
import asyncio, sys
from aionn.media import camera
from tests.support.media.fake_camera import FakeSystem
system = FakeSystem()
async def use():
    async with camera(system=system) as source:
        await anext(source)
async def main():
    task = asyncio.create_task(use())
    while not system.camera.is_streaming:
        await asyncio.sleep(0.001)
    if sys.argv[1] == "error":
        raise SystemExit(7)
asyncio.run(main())
assert system.camera.holds_nothing
print("ended")
"""
    for way, code in (("return", 0), ("error", 7)):
        ended = subprocess.run(
            [sys.executable, "-c", program, way],
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        assert ended.stderr == ""


@pytest.mark.parametrize(
    "make",
    [
        lambda path: record(path / "new.rec"),
        lambda path: replay(path / "none.rec"),
        lambda path: microphone(),
    ],
    ids=["a recorder", "a file", "a live source"],
)
def test_source_without_a_thread_says_so_and_leaves_nothing(make, tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def main():
        source = make(tmp_path)
        with pytest.raises(aionn.ResourceExhausted, match="no thread") as raised:
            async with source:
                pass
        assert raised.value.transient

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []

"""Half an hour at twice the rate that the consumer can take, in virtual time: the age of what it gets does not grow."""

import os
import threading
from collections import deque

import anyio
import pytest

from aionn.errors import InvalidArgument
from aionn.media.live.capture import Grab, SourceUnavailable
from aionn.media.live.clock import CaptureTime
from aionn.media.live.source import LiveSource
from aionn.media.records import Frame
from aionn.testing.clock import VirtualClock, run

RATE, CONSUMED_PER_S = 20, 10


class Device:
    """A camera with four buffers, as the kernel has them: while all are full, frames are lost and counted."""

    name, depth, period_ns, clock, is_immediate = "device", 4, 10**9 // RATE, None, True

    def __init__(self, virtual):
        self.virtual = virtual
        self.lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.filled = deque()
        self.held = self.sequence = 0

    def fill(self):
        # Another thread closes it, and a closed descriptor's number soon belongs to another object.
        with self.lock:
            if self.fd >= 0 and len(self.filled) + self.held < self.depth:
                self.filled.append((self.virtual.now_ns, self.sequence))
                os.eventfd_write(self.fd, 1)
            self.sequence += 1

    def fileno(self):
        return self.fd

    def dequeue(self, now_ns):
        if not self.filled:
            return None
        os.eventfd_read(self.fd)
        at_ns, sequence = self.filled.popleft()
        self.held += 1
        return Grab(0, CaptureTime(at_ns, "driver", 0), sequence)

    def requeue(self, grab):
        self.held -= 1

    def convert(self, grab):
        return Frame(None, grab.captured.at_ns, grab.index, grab.time_s)

    def close(self):
        with self.lock:
            os.close(self.fd)
            self.fd = -1


class Opener:
    limit_s = 10.0

    def __init__(self, device):
        self.device = device

    def open(self):
        return self.device

    def cancel(self):
        pass


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keep", ["latest", "all", "oldest"])
@pytest.mark.parametrize("minutes", [0.5, pytest.param(30, marks=pytest.mark.long)])
def test_delay_is_bounded_however_long_the_camera_is_twice_as_fast(keep, minutes):
    clock = VirtualClock(pin_descriptors=False, stuck_s=60)
    frames = int(minutes * 60 * RATE)

    async def film(device):
        for _ in range(frames):
            await anyio.sleep(1 / RATE)
            device.fill()

    async def body():
        device = Device(clock)
        source = LiveSource(
            Opener(device), name="test", keep=keep, queue_max=2, reconnect=None, now=lambda: clock.now_ns
        )
        ages_ms, indices = [], []
        # Opening and closing take real time, in a thread.
        with clock.pin("opening"):
            await source.__aenter__()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(film, device)
            try:
                while True:
                    frame = await anext(source)
                    ages_ms.append((clock.now_ns - frame.captured_at_ns) / 1e6)
                    indices.append(frame.index)
                    account = source.statistics()
                    assert account.presented == account.delivered + account.dropped + account.queued
                    await anyio.sleep(1 / CONSUMED_PER_S)
            except SourceUnavailable as error:
                assert "is silent" in str(error)
        with clock.pin("closing"):
            await source.__aexit__(None, None, None)
        return ages_ms, indices, source.statistics()

    ages_ms, indices, account = run(body, clock=clock)
    period_ms = 1000 / RATE
    # Buffers of the driver and of the queue, however long it runs.
    bound_ms = {"latest": 2, "oldest": 6, "all": 12}[keep] * period_ms
    assert max(ages_ms) <= bound_ms
    half = len(ages_ms) // 2
    assert max(ages_ms[half:]) <= max(ages_ms[:half]) + 0.01
    assert indices == sorted(set(indices))
    assert abs(len(indices) - frames / 2) <= frames / 20 + 5
    missed = {"latest": account.dropped, "oldest": account.dropped, "all": account.lost}[keep]
    assert missed >= frames * 0.4


class Counting(Device):
    """A device that knows which of its items is the last one that waits."""

    def __init__(self, virtual):
        super().__init__(virtual)
        self.answers = []

    def dequeue(self, now_ns):
        grab = super().dequeue(now_ns)
        if grab is not None:
            grab.is_last = not self.filled
        self.answers.append(grab)
        return grab


@pytest.mark.parametrize("waiting", [1, 2, 4])
def test_newest_item_wins_and_a_capture_that_knows_its_last_one_is_not_asked_for_another(waiting):
    clock = VirtualClock(pin_descriptors=False, stuck_s=60)

    async def body():
        device = Counting(clock)
        source = LiveSource(Opener(device), name="test", reconnect=None, now=lambda: clock.now_ns)
        with clock.pin("opening"):
            await source.__aenter__()
        for _ in range(waiting):
            device.fill()
        frame = await anext(source)
        with clock.pin("closing"):
            await source.__aexit__(None, None, None)
        return frame.index, device.answers

    index, answers = run(body, clock=clock)
    assert index == waiting - 1
    assert len(answers) == waiting and None not in answers


def test_second_consumer_is_rejected_while_the_first_waits():
    clock = VirtualClock(pin_descriptors=False, stuck_s=60)

    async def body():
        device = Device(clock)
        source = LiveSource(Opener(device), name="test", reconnect=None, now=lambda: clock.now_ns)
        with clock.pin("opening"):
            await source.__aenter__()
        with anyio.move_on_after(0.1):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, source)
                await anyio.sleep(0.05)
                with pytest.raises(InvalidArgument, match="expected one consumer"):
                    await anext(source)
        device.fill()
        assert (await anext(source)).index == 0
        with clock.pin("closing"):
            await source.__aexit__(None, None, None)

    run(body, clock=clock)

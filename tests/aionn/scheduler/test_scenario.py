"""Video and audio at HIGH beside a LOW flood on one device, in virtual time: who keeps what, and the same order every time."""

import functools

import anyio

from aionn.errors import MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.job import Start
from aionn.testing.clock import run
from tests.aionn.scheduler.table import acquire

MS = 1_000_000
SECONDS = 2.0


def now_ns():
    return round(anyio.current_time() * 1e9)


class Scenario:
    """Requests for one slot; the device is time that passes."""

    def __init__(self):
        self.begin_ns = now_ns()
        self.dispatcher = Dispatcher(1, now=now_ns, trace=self.trace)
        self.decisions = []
        self.kept = {"video": 0, "audio": 0, "flood": 0}
        self.lost = {"video": 0, "audio": 0, "flood": 0}

    def trace(self, at_ns, action):
        self.decisions.append((at_ns - self.begin_ns, type(action).__name__, action.job.number))

    async def request(self, name, priority, duration_ms, deadline_ms):
        deadline_ns = now_ns() + int(deadline_ms * MS)
        try:
            job = await acquire(self.dispatcher, priority=priority, deadline_ns=deadline_ns, model=name)
        except MissedDeadline:
            self.lost[name] += 1
            return
        await anyio.sleep(duration_ms / 1000)
        self.dispatcher.release(job)
        (self.kept if now_ns() <= deadline_ns else self.lost)[name] += 1

    async def stream(self, tasks, name, priority, period_ms, duration_ms, deadline_ms):
        for number in range(round(SECONDS * 1000 / period_ms)):
            await anyio.sleep(max(0.0, (self.begin_ns + number * period_ms * MS - now_ns()) / 1e9))
            tasks.start_soon(self.request, name, priority, duration_ms, deadline_ms)

    async def play(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.stream, tasks, "video", Priority.HIGH, 1000 / 30, 8, 1000 / 30)
            tasks.start_soon(self.stream, tasks, "audio", Priority.HIGH, 10, 0.5, 10)
            tasks.start_soon(self.stream, tasks, "flood", Priority.LOW, 1, 1, 100)


async def played():
    scenario = Scenario()
    await scenario.play()
    return scenario


@functools.cache
def first():
    """For all tests."""
    return run(played)


def test_high_loses_nothing_and_low_goes_on():
    scenario = first()
    assert scenario.lost["audio"] == scenario.lost["video"] == 0
    assert scenario.kept["audio"] == 200 and scenario.kept["video"] == 60
    # What HIGH leaves of two seconds is 1.42 s, and a piece of the flood takes 1 ms.
    assert scenario.kept["flood"] > 1300
    statistics = scenario.dispatcher.statistics()
    assert statistics.waiting == 0
    assert statistics.entered == 2260
    assert statistics.started == sum(kind == Start.__name__ for _, kind, _ in scenario.decisions)


def test_decisions_are_the_same_every_time():
    assert first().decisions and run(played).decisions == first().decisions

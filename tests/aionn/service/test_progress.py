"""When the timer that ends a hanging driver process rings, on a clock that stands still between two events."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.from_thread
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.hal import ExecutionPreference, Priority
from aionn.service import progress as progress_module
from aionn.service.host.session import Session
from aionn.service.progress import Progress
from aionn.service.wire.handles import RequestOnWire
from aionn.service.wire.protocol import PROTOCOL_VERSION, ExecuteFenced, Hello, PrepareModel
from aionn.service.wire.quotas import Quotas
from fences import SyncFence

LIMIT_S = 64.0
"""Longer than any test: the thread that takes the timer away does nothing meanwhile, unless a test wants it to."""


class Timer:
    """In place of the interpreter's: notes when it would ring."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.rings_s: float | None = None
        self.set_count = 0
        self.cancelled, self.is_set = threading.Event(), threading.Event()
        self.watches: list[Progress] = []
        monkeypatch.setattr(progress_module.faulthandler, "dump_traceback_later", self.set)
        monkeypatch.setattr(progress_module.faulthandler, "cancel_dump_traceback_later", self.cancel)

    def watch(self, limit_s: float) -> Progress:
        self.watches.append(Progress(limit_s, now_s=lambda: self.now_s))
        return self.watches[-1]

    def set(self, timeout_s: float, *, exit: bool) -> None:
        assert exit
        self.rings_s = self.now_s + timeout_s
        self.set_count += 1
        self.is_set.set()

    def cancel(self) -> None:
        self.rings_s = None
        self.cancelled.set()


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timer]:
    timer = Timer(monkeypatch)
    yield timer
    for watch in timer.watches:
        watch.close()


def test_timer_never_rings_early_and_at_most_a_quarter_late(timer: Timer) -> None:
    progress = timer.watch(LIMIT_S)
    source = random.Random(11)
    under_way: list[AbstractContextManager[None]] = []
    moved_s = 0.0
    for _ in range(5_000):
        timer.now_s += source.choice((0.0, 1 / 64, 1.0, 13.0, LIMIT_S / 4, 21.0))
        if under_way and source.random() < 0.5:
            under_way.pop(source.randrange(len(under_way))).__exit__(None, None, None)
            moved_s = timer.now_s
        else:
            if not under_way:
                moved_s = timer.now_s
            work = progress.work()
            work.__enter__()
            under_way.append(work)
        if under_way:
            assert timer.rings_s is not None
            assert LIMIT_S <= timer.rings_s - moved_s <= 1.25 * LIMIT_S
    while under_way:
        under_way.pop().__exit__(None, None, None)


def test_frames_in_a_row_set_it_once_in_a_quarter_of_the_limit(timer: Timer) -> None:
    progress = timer.watch(LIMIT_S)
    for _ in range(1_000):
        with progress.work():
            timer.now_s += LIMIT_S / 1_000
    assert 1 <= timer.set_count <= 4


def test_idle_device_has_no_timer_and_the_next_work_sets_one(timer: Timer) -> None:
    progress = timer.watch(0.02)
    for count in (1, 2):
        timer.cancelled.clear()
        with progress.work():
            assert timer.set_count == count
        assert timer.cancelled.wait(10), "the timer of an idle device would end its process"


def test_busy_device_keeps_its_timer_until_it_is_idle(timer: Timer) -> None:
    progress = timer.watch(0.02)
    with progress.work():
        assert not timer.cancelled.wait(0.05)
        assert timer.rings_s is not None
    assert timer.cancelled.wait(10)
    assert timer.rings_s is None


def test_closed_watch_has_no_timer_and_sets_none(timer: Timer) -> None:
    progress = timer.watch(LIMIT_S)
    with progress.work():
        assert timer.rings_s is not None
        progress.close()
        assert timer.rings_s is None
        with progress.work():
            pass
    progress.close()
    assert timer.set_count == 1


def test_without_a_limit_nothing_is_watched(timer: Timer) -> None:
    with Progress(None).work():
        Progress(None).moved_on(1.0)
        assert timer.set_count == 0


@pytest.mark.parametrize("pause_s", [0.0, LIMIT_S / 300, LIMIT_S / 3, 3 * LIMIT_S])
def test_work_in_pieces_is_no_hang_however_long_the_process_pauses_between_them(
    timer: Timer, pause_s: float
) -> None:
    progress = timer.watch(LIMIT_S)
    with progress.work(), progress.work():  # One of them waits for its turn.
        for _ in range(1000):
            timer.now_s += LIMIT_S / 100
            progress.moved_on(pause_s)
            timer.now_s += pause_s
            assert timer.rings_s is not None
            assert LIMIT_S <= timer.rings_s - timer.now_s <= 1.25 * LIMIT_S + 1e-6
        assert timer.set_count <= 1 + 1000 * (LIMIT_S / 100 + pause_s) / (LIMIT_S / 4)


def test_other_work_that_ends_during_a_pause_does_not_shorten_it(timer: Timer) -> None:
    progress = timer.watch(LIMIT_S)
    with progress.work():
        progress.moved_on(LIMIT_S)
        for _ in range(2):
            with progress.work():
                timer.now_s += LIMIT_S / 4
    assert timer.rings_s == 2.25 * LIMIT_S


def test_pieces_beside_an_idle_device_set_no_timer(timer: Timer) -> None:
    """Its caller has gone, or the watch has ended."""
    progress = timer.watch(LIMIT_S)
    progress.moved_on(1.0)
    assert timer.set_count == 0
    with progress.work():
        progress.close()
        progress.moved_on(LIMIT_S)
    assert timer.set_count == 1


class Native:
    """The record of a burst's native calls."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self.began_s = self.ended_s = 0.0

    def begin(self) -> None:
        self.began_s = self._timer.now_s

    def end(self) -> None:
        self.ended_s = self._timer.now_s + 1e-6

    @property
    def is_running(self) -> bool:
        return self.began_s > self.ended_s

    def __call__(self) -> tuple[float, float]:
        return self.began_s, self.ended_s


def test_native_calls_are_watched_like_other_work(timer: Timer) -> None:
    """Looked at a quarter of the limit apart, as the thread of the watch does, among work of Python."""
    progress = timer.watch(LIMIT_S)
    natives = [Native(timer) for _ in range(2)]
    ends = [progress.watch(native) for native in natives]
    source = random.Random(12)
    under_way: list[AbstractContextManager[None]] = []
    moved_s = looked_s = timer.now_s = 1.0
    for _ in range(5_000):
        step_s = source.choice((1 / 64, 0.5, 3.0, 9.0))
        while looked_s + LIMIT_S / 4 <= timer.now_s + step_s:
            looked_s += LIMIT_S / 4
            now_s, timer.now_s = timer.now_s, looked_s
            with progress._changed:
                progress._look(LIMIT_S)
            timer.now_s = now_s
            is_idle = not under_way and not any(native.is_running for native in natives)
            assert (timer.rings_s is None) == is_idle
            if timer.rings_s is not None:
                assert LIMIT_S <= timer.rings_s - moved_s <= 1.25 * LIMIT_S + 0.001
        timer.now_s += step_s
        is_idle = not under_way and not any(native.is_running for native in natives)
        native = source.choice(natives)
        draw = source.random()
        if draw < 0.3 and under_way:
            under_way.pop().__exit__(None, None, None)
            moved_s = timer.now_s
        elif draw < 0.6 and native.is_running:
            native.end()
            moved_s = timer.now_s
        elif draw < 0.8 and not native.is_running:
            native.begin()
            moved_s = timer.now_s if is_idle else moved_s
        elif len(under_way) < 3:
            under_way.append(progress.work())
            under_way[-1].__enter__()
            moved_s = timer.now_s if is_idle else moved_s
    for each in under_way:
        each.__exit__(None, None, None)
    for end in ends:
        end()
        end()
    assert progress._natives == []


def test_a_native_call_that_hangs_alone_sets_the_timer(timer: Timer) -> None:
    progress = timer.watch(0.04)
    native = Native(timer)
    timer.now_s = 5.0
    native.begin()
    end = progress.watch(native)
    assert timer.is_set.wait(10)
    assert timer.rings_s == pytest.approx(5.0 + 1.25 * 0.04)
    native.end()
    assert timer.cancelled.wait(10)
    end()


class Counting(Progress):
    """Counts the stretches of work that begin."""

    begun = 0

    def work(self) -> AbstractContextManager[None]:
        self.begun += 1
        return super().work()


@pytest.mark.parametrize("is_ready", [True, False])
async def test_call_that_waits_for_fences_of_others_is_no_work_of_the_device(
    small: Any, is_ready: bool
) -> None:
    progress = Counting(None)
    begun_at_device: list[int] = []
    device = ReferenceDevice()
    async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
        session = Session(device, portal, tasks, quotas=Quotas(), progress=progress)
        channel: Any = None
        await session.handle(Hello(PROTOCOL_VERSION), channel)
        model = small.sum_model()
        prepare = PrepareModel(model, ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None)
        reply = await session.handle(prepare, channel)
        prepared = session._prepared_model(reply.prepared)
        launch = prepared.execute_fenced

        async def noting(*arguments: Any, **named: Any) -> Any:
            begun_at_device.append(progress.begun)
            return await launch(*arguments, **named)

        prepared.execute_fenced = noting
        begun = progress.begun
        wait_for = (SyncFence.signalled(), SyncFence.signalled() if is_ready else SyncFence())
        request = RequestOnWire.of(small.Sum().request)
        body = ExecuteFenced(reply.prepared, request, wait_for, False, None, None, None)
        launched = await session.handle(body, channel)
        assert begun_at_device == [begun + is_ready]
        if not is_ready:
            wait_for[1].signal()
        if launched.fence is not None:
            await launched.fence
        await session.aclose()
    await device.aclose()

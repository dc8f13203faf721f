"""Calls at given times: each comes once, and one that is not needed any more keeps nothing, however late its time is."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.fenced import FencedLaunch
from aionn.drivers.kit.threads.alarm import Alarm
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import InvalidArgument
from aionn.hal import LaunchBase
from aionn.testing import models
from fences import SyncFence

FAR_NS = 2**62
WAIT_S_MAX = 10.0
X = np.zeros(4, np.float32)


class Kept:
    """What a call refers to."""

    def call(self) -> None:
        raise AssertionError("its time never comes")


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm(lambda: 0, name="aionn-device-alarm")
    yield alarm
    alarm.close()


def test_call_that_was_cancelled_is_not_made_and_keeps_nothing(alarm: Alarm) -> None:
    kept = Kept()
    reference = weakref.ref(kept)
    later = [alarm.call_at(FAR_NS, Kept().call) for _ in range(3)]
    cancel = alarm.call_at(FAR_NS - 1, kept.call)
    del kept
    assert reference() is not None
    cancel()
    assert reference() is None, "also while its entry is there, and what cancels it is kept"
    cancel()
    assert len(alarm) <= len(later) + 1


def test_cancelled_calls_are_never_more_than_the_others(alarm: Alarm) -> None:
    cancels = [alarm.call_at(FAR_NS + index, Kept().call) for index in range(100)]
    for left, cancel in zip(range(99, -1, -1), cancels, strict=True):
        cancel()
        assert left <= len(alarm) <= 2 * left


def test_cancelled_call_delays_and_repeats_no_other() -> None:
    time_ns = 0
    alarm = Alarm(lambda: time_ns, name="aionn-device-alarm")
    calls: list[int] = []
    done = threading.Event()
    cancels = [alarm.call_at(index, functools.partial(calls.append, index)) for index in range(1, 9)]
    alarm.call_at(9, done.set)
    for index in (1, 2, 5):
        cancels[index - 1]()
    time_ns = 9
    alarm.call_at(10, lambda: None)  # The thread looks at the time again.
    assert done.wait(WAIT_S_MAX)
    assert calls == [3, 4, 6, 7, 8]
    cancels[2]()
    assert len(alarm) == 1
    alarm.close()


async def _until_empty(alarm: Alarm) -> None:
    with anyio.fail_after(WAIT_S_MAX):
        while len(alarm):
            await anyio.sleep(0.001)


@pytest.mark.parametrize("limit", ["deadline_ns", "duration_ns"])
async def test_fenced_execution_that_is_over_has_no_call_left(limit: str) -> None:
    limits: Any = {limit: FAR_NS}
    async with ReferenceDevice() as device:
        prepared = await device.prepare_model(models.identity((4,)))
        request: Any = request_for(prepared.model, [X])
        for wait_for in ([], [SyncFence("camera")]):
            launched: Any = await prepared.execute_fenced(request, wait_for, **limits)
            for fence in wait_for:
                fence.signal()
            await launched.fence
            del launched
            await _until_empty(device.alarm)
        camera = SyncFence("camera")
        launched = await prepared.execute_fenced(request, [camera], deadline_ns=FAR_NS)
        camera.fail("unplugged")
        with pytest.raises(Exception, match="unplugged"):
            await launched.fence
        del launched
        assert not len(device.alarm)


async def test_fenced_execution_that_ends_while_its_call_is_entered_has_none_left() -> None:
    cancelled: list[int] = []

    class Timers:
        @staticmethod
        def now() -> int:
            return 0

        @staticmethod
        def call(function: Callable[[], None]) -> None:
            function()

        @staticmethod
        def call_at(time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
            execution.close()  # In another thread.
            return lambda: cancelled.append(time_ns)

    arguments: Any = type("Arguments", (), {"fail": lambda self: None})()
    execution = FencedLaunch(
        Timers(), lambda limit_ns: LaunchBase(), arguments, measure=False, deadline_ns=None, duration_ns=5
    )
    execution.begin([])
    assert cancelled == [5]


@pytest.mark.parametrize("end", ["prepared", "rejected", "cancelled"])
async def test_preparation_that_is_over_has_no_call_left(end: str) -> None:
    async with ReferenceDevice() as device:
        if end == "prepared":
            await (await device.prepare_model(models.identity((4,)), deadline_ns=FAR_NS)).aclose()
        elif end == "rejected":
            broken = msgspec.structs.replace(models.identity((4,)), operand_values=b"1")
            broken = msgspec.structs.replace(broken, main=msgspec.structs.replace(broken.main, operations=()))
            with pytest.raises(InvalidArgument):
                await device.prepare_model(broken, deadline_ns=FAR_NS)
        else:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await device.prepare_model(models.identity((4,)), deadline_ns=FAR_NS)
        assert not len(device.alarm)

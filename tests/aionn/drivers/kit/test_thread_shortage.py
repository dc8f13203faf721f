"""A device for which no thread can be started says so with its name, loses nothing, and is closed without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.gate import SlotGate
from aionn.drivers.kit.threads.alarm import Alarm
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ResourceExhausted
from aionn.hal import Priority
from aionn.testing import models

X = np.ones(4, np.float32)
WAIT_S_MAX = 10.0


class Limit:
    """How many more threads of devices can be started."""

    def __init__(self) -> None:
        self.left = 0
        self.refused = 0


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    own, start = Limit(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("aionn-"):
            if own.left == 0:
                own.refused += 1
                raise RuntimeError("can't start new thread")  # Python's words
            own.left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    yield own


async def test_device_without_threads_refuses_by_name_and_serves_later(limit: Limit) -> None:
    before = set(threading.enumerate())
    device = ReferenceDevice()
    for _ in range(2):
        with pytest.raises(ResourceExhausted, match=r"^reference.*: no thread can be started"):
            await device.prepare_model(models.identity((4,)))
    limit.left = 10
    prepared = await device.prepare_model(models.identity((4,)))
    assert (await prepared.execute_synchronously(request_for(prepared.model, [X]))).output_sufficient_size
    limit.left = 0
    await device.aclose()  # which starts one as a rule
    assert set(threading.enumerate()) <= before


async def test_device_that_never_had_a_thread_is_closed_without_one(limit: Limit) -> None:
    device = ReferenceDevice()
    with pytest.raises(ResourceExhausted):
        await device.prepare_model(models.identity((4,)))
    async with asyncio.timeout(WAIT_S_MAX):
        await device.aclose()


def test_fewer_threads_than_slots_run_everything(limit: Limit) -> None:
    gate = SlotGate(4, name="device")
    limit.left = 1
    done = threading.Semaphore(0)
    for _ in range(8):
        gate.submit(Priority.MEDIUM, None, done.release)
    for _ in range(8):
        assert done.acquire(timeout=WAIT_S_MAX)
    gate.close()


def test_job_gives_no_turn_to_what_no_thread_would_run_and_tries_once_a_turn(limit: Limit) -> None:
    now_ns = 0
    gate = SlotGate(1, name="device", now=lambda: now_ns)
    limit.left = 1
    order: list[str] = []
    asked, done = threading.Event(), threading.Semaphore(0)

    def long() -> None:
        nonlocal now_ns
        assert asked.wait(WAIT_S_MAX)
        for piece in range(40):
            if piece == 35:
                limit.left = 1
            now_ns += 1
            gate.give_turn_after(10)
        order.append("long")
        done.release()

    def short() -> None:
        order.append("short")
        done.release()

    gate.submit(Priority.MEDIUM, None, long, owner="a")
    gate.submit(Priority.MEDIUM, None, short, owner="b")
    asked.set()
    for _ in range(2):
        assert done.acquire(timeout=WAIT_S_MAX)
    gate.close()
    assert (order, limit.refused, gate._paused_count) == (["short", "long"], 3, 0)


def test_job_is_not_suspended_for_what_no_thread_would_run(limit: Limit) -> None:
    gate = SlotGate(1, name="device", can_preempt=True)
    limit.left = 1
    order: list[str] = []
    asked, done = threading.Event(), threading.Semaphore(0)

    def low() -> None:
        control = gate.control(deadline_ns=None, loop_timeout_ns=None, is_cancelled=None)
        assert asked.wait(WAIT_S_MAX)
        control.check()
        order.append("low")
        done.release()

    def high() -> None:
        order.append("high")
        done.release()

    gate.submit(Priority.LOW, None, low)
    gate.submit(Priority.HIGH, None, high)
    asked.set()
    for _ in range(2):
        assert done.acquire(timeout=WAIT_S_MAX)
    assert order == ["low", "high"]
    gate.close()


def test_alarm_without_a_thread_says_so_and_is_closed(limit: Limit) -> None:
    alarm = Alarm(lambda: 0, name="aionn-device-alarm")
    with pytest.raises(ResourceExhausted, match="aionn-device-alarm: no thread"):
        alarm.call_at(1, lambda: None)
    alarm.close()


async def test_fenced_execution_with_an_allowance_fails_where_no_thread_can_watch_it(limit: Limit) -> None:
    limit.left = 10
    device = ReferenceDevice()
    prepared = await device.prepare_model(models.identity((4,)))
    limit.left = 0
    launched: Any = await prepared.execute_fenced(
        request_for(prepared.model, [X]), [], duration_ns=10_000_000_000
    )
    with launched.fence, pytest.raises(Exception, match="no thread can be started"):
        async with asyncio.timeout(WAIT_S_MAX):
            await launched.fence
    await device.aclose()

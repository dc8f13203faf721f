"""Stopping a run that is inside one call of its engine: cancellation, deadlines and abandoned results reach it."""

import threading

import anyio
import anyio.to_thread
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.interrupting import Interrupts
from aionn.drivers.reference import INFO
from aionn.errors import Error, GeneralFailure, MissedDeadline
from aionn.testing import models
from fences import now_ns

WAIT_S = 60.0
MODEL = models.identity((4,))
ZEROS = [np.zeros(4, np.float32)]


class EndlessModel(BlockingPreparedModel):
    """Its engine returns when it is interrupted, and otherwise never."""

    def __init__(self, device, model, priority):
        super().__init__(device, model, priority)
        self.entered, self.interrupted = threading.Event(), threading.Event()

    def run(self, inputs, outputs, control):
        with self.interruptible(control, self.interrupted.set):
            self.entered.set()
            assert self.interrupted.wait(WAIT_S)
        control.check()
        return [area.store(value) for area, value in zip(outputs, inputs, strict=True)]


class EndlessDevice(BlockingDevice):
    def __init__(self):
        super().__init__(INFO)

    def supports(self, model):
        return [True] * len(model.main.operations)

    def prepare(self, model, *, preference, priority, deadline_ns):
        return EndlessModel(self, model, priority)


async def test_cancelled_launch_interrupts_the_engine() -> None:
    async with EndlessDevice() as device:
        prepared = await device.prepare_model(MODEL)
        launch = prepared.launch(request_for(MODEL, ZEROS))
        assert await anyio.to_thread.run_sync(prepared.entered.wait, WAIT_S)
        launch.cancel()
        with pytest.raises(GeneralFailure, match="cancelled"):
            await launch
        await prepared.aclose()


async def test_deadline_interrupts_the_engine() -> None:
    async with EndlessDevice() as device:
        prepared = await device.prepare_model(MODEL)
        for delay_ms in (20, 500, 5000):  # On a busy machine a deadline may pass before the start.
            with pytest.raises(MissedDeadline) as caught:
                deadline_ns = now_ns() + delay_ms * 1_000_000
                await prepared.execute_synchronously(request_for(MODEL, ZEROS), deadline_ns=deadline_ns)
            if prepared.entered.is_set():
                break
        assert caught.value.status.name == "MISSED_DEADLINE_TRANSIENT"
        assert prepared.entered.is_set()
        await prepared.aclose()


async def test_abandoned_model_interrupts_the_engine() -> None:
    async with EndlessDevice() as device:
        prepared = await device.prepare_model(MODEL)
        launch = prepared.launch(request_for(MODEL, ZEROS))
        assert await anyio.to_thread.run_sync(prepared.entered.wait, WAIT_S)
        prepared.abandon()
        with pytest.raises(Error):
            await launch
        await prepared.aclose()


def test_run_that_has_left_is_not_interrupted() -> None:
    now = [0]
    interrupts, stopped = Interrupts(lambda: now[0], name="test"), threading.Event()
    cancelled = threading.Event()
    with interrupts.watching(30_000_000, cancelled.is_set, stopped.set):
        pass
    cancelled.set()
    interrupts.look()
    # A later deadline has passed: so has the earlier one, on the same thread.
    later = threading.Event()
    now[0] = 60_000_000
    with interrupts.watching(60_000_000, None, later.set):
        assert later.wait(WAIT_S)
    interrupts.close()
    assert not stopped.is_set()


def test_run_that_is_cancelled_before_it_enters_is_interrupted_at_once() -> None:
    interrupts, stopped = Interrupts(now_ns, name="test"), threading.Event()
    with interrupts.watching(None, lambda: True, stopped.set):
        assert stopped.is_set()
    interrupts.close()


def test_earlier_deadline_of_a_later_run_is_met() -> None:
    interrupts = Interrupts(now_ns, name="test")
    first, second = threading.Event(), threading.Event()
    with interrupts.watching(now_ns() + 3_600_000_000_000, None, first.set):
        assert not second.wait(0.01)  # The thread sleeps until the first deadline by now.
        with interrupts.watching(now_ns() + 1_000_000, None, second.set):
            assert second.wait(WAIT_S)
    interrupts.close()
    assert not first.is_set()


def test_run_is_interrupted_once() -> None:
    interrupts, calls = Interrupts(now_ns, name="test"), []
    with interrupts.watching(None, lambda: True, lambda: calls.append(1)):
        interrupts.look()
        interrupts.look()
    interrupts.close()
    assert calls == [1]


def test_runs_without_deadlines_need_no_thread() -> None:
    interrupts = Interrupts(now_ns, name="a thread of its own")
    with interrupts.watching(None, None, lambda: None):
        assert not [thread for thread in threading.enumerate() if thread.name == "a thread of its own"]
    interrupts.close()

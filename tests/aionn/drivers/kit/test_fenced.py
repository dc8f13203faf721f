"""One fenced execution and the events that would end it: result, deadline, failed dependency, the end of the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aionn.drivers.kit.fenced import FencedLaunch
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ErrorStatus
from aionn.hal import ExecutionResult, LaunchBase
from fences import FenceError, FenceStatus, SyncFence
from tests.support.loop_reference import LoopReferenceDevice

A = np.arange(6, dtype=np.float32).reshape(2, 3)


class Interrupted(SyncFence):
    """Code that looks whether it is pending gets that answer, and is then too late: another event has ended it."""

    meanwhile: Any = None

    @property
    def status(self) -> FenceStatus:
        seen = super().status
        if self.meanwhile is not None and seen == FenceStatus.PENDING:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return seen


class Timed:
    """The timers of a device, in a test's hands."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.now: Callable[[], int] = lambda: 0

    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        self.calls.append(function)
        return lambda: None

    def call(self, function: Callable[[], None]) -> None:
        function()


class Arguments:
    """Counts how often the outputs were declared to hold nothing."""

    failed = 0

    def fail(self) -> None:
        self.failed += 1


class Fenced:
    """A fenced execution with a deadline, whose launch ends when a test ends it."""

    def __init__(self) -> None:
        self.timers, self.launched, self.arguments = Timed(), LaunchBase(), Arguments()
        self.execution = FencedLaunch(
            self.timers,
            lambda limit_ns: self.launched,
            self.arguments,  # type: ignore[arg-type]
            measure=False,
            deadline_ns=1,
            duration_ns=None,
        )

    def end(self, event: str) -> None:
        if event == "deadline":
            (expire,) = self.timers.calls
            expire()
        else:
            self.launched.finish(ExecutionResult())


@pytest.mark.parametrize(("first", "second"), [("result", "deadline"), ("deadline", "result")])
async def test_information_agrees_with_the_fence_for_each_order_of_events(first: str, second: str) -> None:
    fenced = Fenced()
    fence = fenced.execution.fence = Interrupted("launch")
    fenced.execution.begin([])
    # The second event comes while the first has looked at the fence and has not yet finished it.
    fence.meanwhile = lambda: fenced.end(second)
    fenced.end(first)
    fenced.end(second)
    status, _ = await fenced.execution.get_execution_info()
    fence.meanwhile = None
    assert fence.status != FenceStatus.PENDING
    assert (status == ErrorStatus.NONE) == (fence.status == FenceStatus.SIGNALLED)


async def test_launch_whose_fence_has_finished_is_cancelled_and_its_outputs_hold_nothing() -> None:
    fenced = Fenced()
    fenced.execution.begin([])
    assert not fenced.launched.is_cancelled
    fenced.end("deadline")
    assert fenced.launched.is_cancelled and fenced.arguments.failed == 1
    fenced.end("result")
    assert fenced.arguments.failed == 2, "it ran to its end after all"
    fenced = Fenced()
    fenced.execution.begin([])
    fenced.execution.fence.close()
    assert fenced.launched.is_cancelled


async def test_execution_that_is_over_is_no_waiter_of_its_dependencies() -> None:
    for ends in ("deadline", "failed dependency"):
        fenced, camera, never = Fenced(), SyncFence("camera"), SyncFence("never")
        fenced.execution.begin([camera, never])
        assert never.waiter_count == 1
        if ends == "deadline":
            fenced.end("deadline")
        else:
            camera.fail("unplugged")
        assert never.waiter_count == 0 and fenced.execution.fence.status == FenceStatus.FAILED


async def test_failed_dependency_keeps_its_origin() -> None:
    fenced, dependency = Fenced(), SyncFence("camera")
    fenced.execution.begin([dependency])
    dependency.fail("unplugged")
    with pytest.raises(FenceError, match=r"a fence that it waits for has failed: .*unplugged") as caught:
        await fenced.execution.fence
    assert caught.value.origin == "camera"


@pytest.mark.parametrize("kind", [ReferenceDevice, LoopReferenceDevice])
async def test_end_of_the_device_ends_what_waits_for_fences(kind: type[Any], small: Any) -> None:
    async with kind() as device:
        prepared = await device.prepare_model(small.sum_model())
        request = small.request([A, A], [(A.nbytes, (2, 3))])
        launched = await prepared.execute_fenced(request, [SyncFence("never")])
    with pytest.raises(FenceError, match="the device was closed"):
        await launched.fence
    assert (await launched.get_execution_info())[0] == ErrorStatus.DEVICE_UNAVAILABLE


@pytest.mark.parametrize("raised", [RuntimeError, MemoryError, asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("place", ["launch", "outcome"])
async def test_whatever_a_device_raises_fails_the_fence(place: str, raised: type[BaseException]) -> None:
    """Its fence has waiters, who would wait without end."""
    fenced = Fenced()

    def fail(*arguments: Any) -> Any:
        raise raised("planted")

    if place == "launch":
        fenced.execution._launch = fail
    else:
        fenced.launched.outcome = fail  # type: ignore[method-assign]
    fenced.execution.begin([])
    fenced.end("result")
    assert fenced.execution.fence.status == FenceStatus.FAILED and fenced.arguments.failed == 1
    status, _ = await fenced.execution.get_execution_info()
    assert status == ErrorStatus.GENERAL_FAILURE

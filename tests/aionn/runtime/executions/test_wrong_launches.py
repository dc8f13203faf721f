"""Drivers whose launches are wrong: their slots and memory come back all the same, and the caller gets an ``Error``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import BurstDefaults, ExecutionResult, LaunchBase, Request
from aionn.runtime.executions import burst as burst_module
from aionn.testing.models import identity
from tests.support.loop_reference import LoopReferenceDevice

ONE = np.ones(1, np.float32)
LIMIT_S = 30.0


class Uncancellable(LaunchBase):
    def cancel(self) -> None:
        raise RuntimeError("planted")


class Burst(BurstDefaults):
    def __init__(self, model: Model) -> None:
        self._model = model

    def launch(self, request: Request, memory_identifiers: Sequence[int], **options: Any) -> Any:
        return self._model.launch(request, **options)

    async def aclose(self) -> None:
        pass


class Model:
    """A prepared model of another device, which launches as a test says."""

    def __init__(self, inner: Any, launch: Callable[[], Any]) -> None:
        self._inner = inner
        self._launch = launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, request: Request, **options: Any) -> Any:
        return self._launch()

    async def configure_execution_burst(self, **polling: int) -> Any:
        return Burst(self)


class WrongDevice(LoopReferenceDevice):
    launches: Callable[[], Any]

    async def prepare_model(self, *arguments: Any, **options: Any) -> Any:
        return Model(await super().prepare_model(*arguments, **options), lambda: self.launches())


class Bench:
    """A device that launches as a test says, and the three calls that launch on it."""

    def __init__(self, device: WrongDevice, runtime: aionn.Runtime, burst: aionn.Burst, net: Any) -> None:
        self.device = device
        self._dispatcher = runtime.devices[0].dispatcher
        self.burst = burst
        self.calls = (net.execute, burst.execute, lambda inputs: net.execute_fenced(inputs).wait())

    @property
    def is_idle(self) -> bool:
        statistics = self.burst.statistics()
        return "slot 0: free" in self._dispatcher.explain() and statistics.free == statistics.total

    async def leave(self, call: Callable[[list[Any]], Awaitable[object]]) -> None:
        """Calls, and cancels the call when it waits for its launch."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, [ONE])
            await anyio.wait_all_tasks_blocked()
            assert not self.is_idle
            tasks.cancel_scope.cancel()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    device = WrongDevice("wrong")
    async with aionn.open(devices=[device]) as runtime:
        net = await runtime.compile(identity())
        async with net.burst(slots=1) as burst:
            yield Bench(device, runtime, burst, net)


@pytest.mark.parametrize("made", [lambda: None, lambda: 7, lambda: asyncio.Future()])
async def test_what_is_no_launch_is_rejected_and_its_slot_released(
    bench: Bench, made: Callable[[], Any]
) -> None:
    bench.device.launches = made
    for call in bench.calls:
        with (
            anyio.fail_after(LIMIT_S),
            pytest.raises(GeneralFailure, match="expected a Launch from the driver"),
        ):
            await call([ONE])
        assert bench.is_idle


async def test_launch_that_cannot_be_cancelled_keeps_its_slot_until_it_is_done(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for call in bench.calls[:2]:
        launch = Uncancellable()
        bench.device.launches = lambda launch=launch: launch
        with caplog.at_level(logging.CRITICAL):
            await bench.leave(call)
        assert not bench.is_idle
        launch.finish(ExecutionResult())
        assert bench.is_idle


@pytest.mark.parametrize("outcome", [None, "a result", ValueError("planted")])
async def test_outcome_of_another_type_is_a_failure(bench: Bench, outcome: Any) -> None:
    def made() -> LaunchBase:
        launch = LaunchBase()
        asyncio.get_running_loop().call_soon(launch.finish, outcome)
        return launch

    bench.device.launches = made
    for call in bench.calls:
        with (
            anyio.fail_after(LIMIT_S),
            pytest.raises(GeneralFailure, match="expected an ExecutionResult, got"),
        ):
            await call([ONE])
        assert bench.is_idle


class Raising(LaunchBase):
    """Its outcome is an exception that no driver may raise."""

    def __init__(self, raised: type[BaseException]) -> None:
        self._raised = raised

    def outcome(self) -> ExecutionResult:
        raise self._raised("planted")


@pytest.mark.parametrize("raised", [asyncio.CancelledError, RuntimeError])
async def test_outcome_that_raises_anything_is_a_failure_and_no_cancellation_of_the_caller(
    bench: Bench, raised: type[BaseException]
) -> None:
    def made() -> LaunchBase:
        launch = Raising(raised)
        asyncio.get_running_loop().call_soon(launch.finish, ExecutionResult())
        return launch

    bench.device.launches = made
    for call in bench.calls:
        with anyio.fail_after(LIMIT_S), pytest.raises(GeneralFailure, match=f"{raised.__name__}: planted"):
            await call([ONE])
        assert bench.is_idle


@pytest.mark.parametrize("raised", [asyncio.CancelledError, RuntimeError])
async def test_slot_of_a_launch_that_was_left_is_free_whatever_its_outcome_raises(
    bench: Bench, raised: type[BaseException]
) -> None:
    for call in bench.calls[:2]:
        launch = Raising(raised)
        bench.device.launches = lambda launch=launch: launch
        await bench.leave(call)
        assert not bench.is_idle
        launch.finish(ExecutionResult())
        assert bench.is_idle


async def test_burst_that_closes_rejects_what_waits_for_a_device_that_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst_module, "CLOSE_S_MAX", 0.01)
    launch = LaunchBase()

    async def wait() -> None:
        with pytest.raises(InvalidArgument, match="closed while an execution waited for a free slot"):
            await bench.burst.execute([ONE])

    bench.device.launches = lambda: launch
    await bench.leave(bench.burst.execute)
    assert bench.burst.statistics().free == 0
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await bench.burst.aclose()
    launch.finish(ExecutionResult())

"""A prepared model that is closed: what waits for its turn is refused, and what runs keeps what it needs until it has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.asynchronous import AsyncDevice, AsyncPreparedModel
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.litert.driver import LitertDevice
from aionn.drivers.reference import INFO
from aionn.errors import ErrorStatus, InvalidArgument
from aionn.hal import Model, OutputShape, Priority
from aionn.testing import models

X = np.ones(4, np.float32)
WAIT_S_MAX = 10.0


class Halting:
    """What a run stops at, and the order of what happened."""

    def __init__(self) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.happened: list[str] = []


class BlockingModel(BlockingPreparedModel):
    def run(self, inputs: Any, outputs: Any, control: Any) -> Sequence[OutputShape]:
        halting = self.device.halting  # type: ignore[attr-defined]
        halting.entered.set()
        assert halting.may_end.wait(WAIT_S_MAX)
        halting.happened.append("run ends")
        return [area.store(value) for area, value in zip(outputs, inputs, strict=True)]

    def release(self) -> None:
        self.device.halting.happened.append("freed")  # type: ignore[attr-defined]


class Blocking(BlockingDevice):
    def __init__(self, halting: Halting) -> None:
        super().__init__(INFO)
        self.halting = halting

    def supports(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.main.operations)

    def prepare(self, model: Model, *, priority: Priority, **_: Any) -> BlockingModel:
        return BlockingModel(self, model, priority)


class LoopModel(AsyncPreparedModel):
    async def run(self, inputs: Any, outputs: Any, turn: Any) -> Sequence[OutputShape]:
        halting = self.device.halting  # type: ignore[attr-defined]
        halting.entered.set()
        while not halting.may_end.is_set():
            await asyncio.sleep(0)
        halting.happened.append("run ends")
        return [area.store(value) for area, value in zip(outputs, inputs, strict=True)]

    def release(self) -> None:
        self.device.halting.happened.append("freed")  # type: ignore[attr-defined]


class OnLoop(AsyncDevice):
    def __init__(self, halting: Halting) -> None:
        super().__init__(INFO)
        self.halting = halting

    def supports(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.main.operations)

    async def prepare(self, model: Model, *, priority: Priority, **_: Any) -> LoopModel:
        return LoopModel(self, model, priority)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not is_so():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", [Blocking, OnLoop])
async def test_what_runs_ends_first_and_what_waits_is_refused(kind: Any) -> None:
    halting = Halting()
    async with kind(halting) as device:
        prepared = await device.prepare_model(models.identity((4,)))
        runs = [
            asyncio.create_task(prepared.execute_synchronously(request_for(prepared.model, [X])))
            for _ in range(INFO.slots + 2)
        ]
        await until(halting.entered.is_set)
        for _ in range(20):
            await asyncio.sleep(0)  # until the others wait
        await prepared.aclose()
        await prepared.aclose()
        assert halting.happened == []
        halting.may_end.set()
        first, *others = await asyncio.gather(*runs, return_exceptions=True)
        assert first.output_sufficient_size
        assert len(others) > 0
        for refused in others[INFO.slots - 1 :]:
            assert isinstance(refused, InvalidArgument) and "closed" in str(refused)
        await until(lambda: "freed" in halting.happened)
    assert halting.happened == ["run ends"] * INFO.slots + ["freed"]


async def test_model_that_does_not_run_is_freed_at_once() -> None:
    halting = Halting()
    async with Blocking(halting) as device:
        prepared = await device.prepare_model(models.identity((4,)))
        await prepared.aclose()
        assert halting.happened == ["freed"]


async def test_model_that_cannot_be_freed_costs_no_thread_of_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def release(self: BlockingModel) -> None:
        raise OSError("it does not let go")

    halting = Halting()
    monkeypatch.setattr(BlockingModel, "release", release)
    async with Blocking(halting) as device:
        prepared = await device.prepare_model(models.identity((4,)))
        told: asyncio.Queue[ErrorStatus] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        request = request_for(prepared.model, [X])
        await prepared.execute(request, lambda status, *_: loop.call_soon_threadsafe(told.put_nowait, status))
        await until(halting.entered.is_set)
        await prepared.aclose()
        halting.may_end.set()
        async with asyncio.timeout(WAIT_S_MAX):
            assert await told.get() == ErrorStatus.NONE
            again = await device.prepare_model(models.identity((4,)))
            await again.execute_synchronously(request)
    assert "it does not let go" in caplog.text


async def test_executions_that_wait_for_litert_say_that_their_model_is_closed() -> None:
    pytest.importorskip("ai_edge_litert.interpreter", exc_type=ImportError)
    may_end = threading.Event()
    async with LitertDevice() as device:
        prepared = await device.prepare_model(models.identity((4,)))
        for _ in range(device.info.slots):
            device.gate.submit(Priority.HIGH, None, lambda: may_end.wait(WAIT_S_MAX))
        run = asyncio.create_task(prepared.execute_synchronously(request_for(prepared.model, [X])))
        await until(lambda: device.gate.waiting_count == 1)
        await prepared.aclose()
        may_end.set()
        with pytest.raises(InvalidArgument, match="the prepared model is closed"):
            await run

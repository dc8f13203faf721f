"""Another model in place of the present one: prepared beside it, used from the next frame on, or not at all."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.executions.opened_plan import OpenedPlan
from tests.support.mortal_driver import DIES, doubled_model

Values = npt.NDArray[np.float32]
ONE = np.ones(1, np.float32)
LIMIT_S = 60


def times(factor: float, *, steps: int = 1, count: int = 1, inputs: int = 1) -> Model:
    """The first input times ``factor``, in so many operations; operands of other numbers for other numbers of steps."""
    graph = GraphBuilder()
    given = [graph.input(OperandType.TENSOR_FLOAT32, (count,)) for _ in range(inputs)]
    value = given[0]
    for other in given[1:]:
        value = graph.result(OperationType.ADD, [value, other, 0], given[0])
    one = graph.constant(np.ones(1, np.float32))
    for _ in range(steps - 1):
        value = graph.result(OperationType.MUL, [value, one, 0], given[0])
    scale = graph.constant(np.full(1, factor, np.float32))
    return graph.build([graph.result(OperationType.MUL, [value, scale, 0], given[0])])


class Device(ReferenceDevice):
    """Counts what it prepared and what is not freed, and fails or waits where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0
        self.fails = False
        self.may_prepare = threading.Event()
        self.may_prepare.set()
        self.prepares = threading.Event()

    def prepare(self, *arguments: Any, **more: Any) -> Any:
        self.prepares.set()
        assert self.may_prepare.wait(LIMIT_S)
        if self.fails:
            raise aionn.GeneralFailure("planted")
        made = super().prepare(*arguments, **more)
        close = made.aclose
        self.open += 1

        async def aclose() -> None:
            self.open -= 1
            await close()

        made.aclose = aclose  # type: ignore[method-assign]
        return made


@pytest.fixture
async def device() -> Device:
    return Device()


@pytest.fixture
async def runtime(device: Device) -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(devices=[device]) as opened:
        yield opened
    assert device.open == 0


async def freed(device: Device, count: int) -> None:
    with anyio.fail_after(LIMIT_S):
        while device.open != count:
            await anyio.lowlevel.checkpoint()


async def out(execution: Any) -> float:
    return float((await execution).outputs[0][0])


async def test_executions_use_the_new_model_and_the_present_one_is_freed(
    runtime: aionn.Runtime, device: Device
) -> None:
    net = await runtime.compile(times(2))
    assert await out(net.execute([ONE])) == 2
    await net.replace(times(3, steps=3))
    assert await out(net.execute([ONE])) == 3
    assert len(net.model.main.operations) == 3
    await freed(device, 1)
    await net.replace(times(5))
    assert await out(net.execute_fenced([ONE])) == 5
    await freed(device, 1)


async def test_burst_and_stream_continue_with_the_new_model(runtime: aionn.Runtime, device: Device) -> None:
    net = await runtime.compile(times(2))

    async def values() -> AsyncIterator[Values]:
        for number in range(60):
            if number in (20, 40):
                await net.replace(times(3 if number == 20 else 4, steps=number // 10))
            yield np.full(1, 1 + number, np.float32)

    async with net.burst(slots=3) as burst:
        assert await out(burst.execute([ONE])) == 2
        with anyio.fail_after(LIMIT_S):
            results = [float(r.outputs[0][0]) / float(r.item[0]) async for r in burst.stream(values())]
        # One result for each item, in order, of one model each; an item that was read later never gets an earlier model.
        assert results == [2.0] * 20 + [3.0] * 20 + [4.0] * 20
        assert await out(burst.execute([ONE])) == 4
        await freed(device, 1)
        statistics = burst.statistics()
        assert (statistics.total, statistics.free) == (3, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slots", [1, 4])
async def test_every_frame_has_one_result_of_one_model_while_models_change(
    runtime: aionn.Runtime, device: Device, slots: int
) -> None:
    net = await runtime.compile(times(1, count=8))
    seen: list[float] = []
    is_over = False

    async with net.burst(slots=slots) as burst:

        async def execute() -> None:
            while not is_over:
                result = await burst.execute([np.ones(8, np.float32)])
                (factor,) = {float(value) for value in result.outputs[0]}
                seen.append(factor)

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(execute)
                for factor in range(2, 12):
                    await net.replace(times(factor, steps=1 + factor % 3, count=8))
                    begun = len(seen)
                    while len(seen) < begun + 5:
                        await anyio.lowlevel.checkpoint()
                is_over = True
        assert set(seen) >= set(range(3, 12)) and seen[-1] == 11
        await freed(device, 1)


async def test_execution_that_runs_ends_with_its_model(runtime: aionn.Runtime, device: Device) -> None:
    net = await runtime.compile(times(2))
    blocker = device.gate.slot(3, None)
    async with net.burst(slots=1) as burst:
        await anyio.to_thread.run_sync(blocker.__enter__)
        async with anyio.create_task_group() as tasks:
            results: list[float] = []

            async def run(execution: Any) -> None:
                results.append(await out(execution))

            tasks.start_soon(run, burst.execute([ONE]))
            with anyio.fail_after(LIMIT_S):
                while device.gate.waiting_count < 1:
                    await anyio.lowlevel.checkpoint()
                await net.replace(times(3))
                assert device.open == 2, "the present model is in use"
                blocker.__exit__(None, None, None)
        assert results == [2.0]
        assert await out(burst.execute([ONE])) == 3
        await freed(device, 1)


async def test_model_that_cannot_be_prepared_changes_nothing(runtime: aionn.Runtime, device: Device) -> None:
    net = await runtime.compile(times(2))
    async with net.burst() as burst:
        device.fails = True
        with pytest.raises(aionn.GeneralFailure, match="planted"):
            await net.replace(times(3))
        device.fails = False
        assert (await out(burst.execute([ONE])), await out(net.execute([ONE]))) == (2, 2)
        assert device.open == 1


async def test_burst_that_cannot_be_opened_changes_nothing(
    runtime: aionn.Runtime, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = await runtime.compile(times(2))
    async with net.burst() as first, net.burst() as second:
        prepare, count = device.prepare, 0

        def prepared(*arguments: Any, **more: Any) -> Any:
            made = prepare(*arguments, **more)
            configure = made.configure_execution_burst

            async def once(**options: Any) -> Any:
                nonlocal count
                count += 1
                if count == 2:
                    raise aionn.ResourceExhausted("planted")
                return await configure(**options)

            made.configure_execution_burst = once
            return made

        monkeypatch.setattr(device, "prepare", prepared)
        with pytest.raises(aionn.ResourceExhausted, match="planted"):
            await net.replace(times(3))
        assert [await out(burst.execute([ONE])) for burst in (first, second)] == [2, 2]
        assert device.open == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (times(3, count=2), r"replace, input 0: expected .*FLOAT32 1, got .*FLOAT32 2"),
        (times(3, inputs=2), "replace: expected 1 inputs, got 2"),
    ],
)
async def test_other_signature_is_refused_with_both(
    runtime: aionn.Runtime, device: Device, other: Model, words: str
) -> None:
    net = await runtime.compile(times(2))
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.replace(other)
    assert await out(net.execute([ONE])) == 2 and device.open == 1


@pytest.mark.parametrize("begins", ["before", "while the bursts are opened"])
async def test_stream_with_a_guarantee_keeps_the_model_that_its_time_is_reserved_for(
    runtime: aionn.Runtime, device: Device, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    async def values() -> AsyncIterator[Values]:
        yield ONE

    net = await runtime.compile(times(2))
    async with net.burst(slots=3) as burst:
        streams = []

        def begin() -> None:
            streams.append(burst.stream(values(), guarantee="best", period=1.0))

        with monkeypatch.context() as patch:
            if begins == "before":
                begin()
            else:
                opens = OpenedPlan.open

                async def open_and_begin(*arguments: Any) -> None:
                    await opens(*arguments)
                    begin()

                patch.setattr(OpenedPlan, "open", open_and_begin)
            with pytest.raises(aionn.InvalidArgument, match="end the stream first"):
                await net.replace(times(3))
        await freed(device, 1)
        (stream,) = streams
        assert [float(result.outputs[0][0]) async for result in stream] == [2]
        await net.replace(times(3))
        assert await out(burst.execute([ONE])) == 3


async def test_cancelled_replacement_changes_nothing(runtime: aionn.Runtime, device: Device) -> None:
    net = await runtime.compile(times(2))
    device.may_prepare.clear()
    device.prepares.clear()
    async with net.burst() as burst:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(net.replace, times(3))
            assert await anyio.to_thread.run_sync(device.prepares.wait, LIMIT_S)
            assert await out(burst.execute([ONE])) == 2, "it serves meanwhile"
            tasks.cancel_scope.cancel()
        device.may_prepare.set()
        assert await out(burst.execute([ONE])) == 2
        await net.replace(times(4))
        assert await out(burst.execute([ONE])) == 4
    await freed(device, 1)


async def test_bursts_that_open_or_close_meanwhile_are_on_the_new_model(
    runtime: aionn.Runtime, device: Device
) -> None:
    net = await runtime.compile(times(2))
    unopened, closing = net.burst(), net.burst()
    await closing.__aenter__()
    device.may_prepare.clear()
    device.prepares.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(net.replace, times(3))
        assert await anyio.to_thread.run_sync(device.prepares.wait, LIMIT_S)
        opened = net.burst()
        await opened.__aenter__()
        await closing.aclose()
        device.may_prepare.set()
    async with unopened:
        assert [await out(burst.execute([ONE])) for burst in (opened, unopened)] == [3, 3]
    await opened.aclose()
    await freed(device, 1)


async def test_objects_of_the_present_model_say_that_it_was_replaced(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(times(2))
    reusable = net.reusable()
    reusable.inputs[0][...] = 1
    assert (await reusable.execute()).outputs[0] == 2
    memory = await runtime.allocate(inputs=[(net, 0)])
    await net.replace(times(3))
    with pytest.raises(aionn.InvalidArgument, match="its model was replaced"):
        await reusable.execute()
    with pytest.raises(aionn.InvalidArgument):
        await net.execute([memory])


async def test_closed_compilation_is_not_replaced(runtime: aionn.Runtime, device: Device) -> None:
    net = await runtime.compile(times(2))
    device.may_prepare.clear()
    device.prepares.clear()
    async with anyio.create_task_group() as tasks:

        async def replace() -> None:
            with pytest.raises(aionn.InvalidArgument, match="closed"):
                await net.replace(times(3))

        tasks.start_soon(replace)
        assert await anyio.to_thread.run_sync(device.prepares.wait, LIMIT_S)
        await net.aclose()
        device.may_prepare.set()
    await freed(device, 0)


@pytest.mark.slow
async def test_new_model_recovers_as_the_first_one() -> None:
    drivers = {"mortal": "tests.support.mortal_driver:MortalDevice"}
    async with aionn.open(drivers=drivers, spare_processes=False) as runtime:
        net = await runtime.compile(doubled_model(), recover=True)
        async with net.burst() as burst:
            assert await out(burst.execute([ONE])) == 2
            await net.replace(times(3))
            with anyio.fail_after(LIMIT_S):
                with pytest.raises(aionn.DeadObject):
                    await burst.execute([DIES * ONE])
                assert await out(burst.execute([ONE])) == 3
            assert net.recoveries == 1
            await net.replace(times(5))
            assert await out(burst.execute([ONE])) == 5 and net.recoveries == 1

"""Engines that can be stopped: cancellations and deadlines end a run between two operations, and leave nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.benchmarking.stress.samples import descriptor_count, mapping_count
from aionn.conformance.requests import request_for
from aionn.errors import Error, ExecutionCancelled, GeneralFailure, MissedDeadline
from aionn.hal import CancelCapability, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from fences import now_ns

WAIT_S = 20.0
TRIES_MAX = 8
"""How often a time is compared with another one: other processes may use the machine at one of them."""

OPERATIONS = 40
"""Of the execution that is cancelled."""

KEPT_MAX = 8
"""Descriptors, and mappings of shared memory, that a driver process may have more after cancellations: it keeps some memories of
its client, which come again. Far fewer than one for each cancellation."""


@pytest.fixture
def stoppable(engine: Any) -> Any:
    """A driver whose engine can be stopped."""
    if not engine.is_stoppable:
        pytest.skip("this engine cannot be stopped")
    return engine


def products(count: int, size: int) -> Model:
    """Products of matrices one after the other: far more work than any test waits for, between operations that take little."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (size, size))
    no = graph.constant(False)
    value = a
    for _ in range(count):
        value = graph.result(OperationType.BATCH_MATMUL, [value, a, no, no], a, (size, size))
    return graph.build([value])


class Started:
    """Notes when a slot begins a run."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = importlib.import_module(f"{engine.folder}.engine").Slot
        begin, self.event = slot.begin, threading.Event()

        def watched(one: Any) -> None:
            begin(one)
            self.event.set()

        monkeypatch.setattr(slot, "begin", watched)


def test_drivers_of_stoppable_engines_promise_it(described: Any) -> None:
    expected = CancelCapability.BETWEEN_OPERATIONS if described.is_stoppable else CancelCapability.NONE
    assert described.lists.INFO.cancel == expected


@pytest.mark.sampled(3)
@pytest.mark.slow
async def test_cancelled_execution_stops_within_an_operation(
    stoppable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = products(OPERATIONS, 512)  # An operation takes some milliseconds.
    started = Started(stoppable, monkeypatch)
    request = request_for(model, [np.zeros((512, 512), np.float32)])
    async with stoppable.make() as device:
        prepared = await device.prepare_model(model)
        started_ns = now_ns()
        await prepared.execute_synchronously(request)
        operation_ns = (now_ns() - started_ns) // OPERATIONS
        took_ns = OPERATIONS * operation_ns
        for _ in range(TRIES_MAX):
            started.event.clear()
            launch = prepared.launch(request)
            assert await anyio.to_thread.run_sync(started.event.wait, WAIT_S)
            started_ns = now_ns()
            launch.cancel()
            with pytest.raises(GeneralFailure, match="cancelled"):
                await launch
            took_ns = min(took_ns, now_ns() - started_ns)
            if took_ns < 2 * operation_ns:
                break
        # The rest of the operation that runs, and the way back.
        assert took_ns < 2 * operation_ns
        # What stopped it is taken back before the next one.
        await prepared.execute_synchronously(request)
        await prepared.aclose()


@pytest.mark.sampled(3)
@pytest.mark.slow
async def test_deadline_stops_a_running_execution(stoppable: Any) -> None:
    model = products(400, 256)
    request = request_for(model, [np.zeros((256, 256), np.float32)])
    async with stoppable.make() as device:
        prepared = await device.prepare_model(model)
        started_ns = now_ns()
        await prepared.execute_synchronously(request)
        delay_ns, told = (now_ns() - started_ns) // 2, ""
        for _ in range(TRIES_MAX):
            try:
                await prepared.execute_synchronously(request, deadline_ns=now_ns() + delay_ns)
                delay_ns //= 2  # The machine was busy at first.
            except MissedDeadline as e:
                told = str(e)
                if "passed between two operations" in told:
                    break
                delay_ns *= 2  # The machine is busy, and it passed before the start.
        assert "passed between two operations" in told
        await prepared.execute_synchronously(request)
        await prepared.aclose()


async def test_execution_that_is_cancelled_before_it_starts_never_runs(stoppable: Any, small: Any) -> None:
    ones = np.ones((2, 3), np.float32)
    async with stoppable.make() as device:
        prepared = await device.prepare_model(small.sum_model())
        slot = prepared._idle[-1]
        slot.begin()
        slot.stop()  # Another thread may be quicker than the engine's start.
        request = small.request([ones, ones], [(24, (2, 3))])
        area = prepared.bind(request)
        try:
            slot.run(area.inputs(), area.outputs)
        except Error:
            pass  # It may also have been quicker than its stop.
        await prepared.execute_synchronously(request)
        assert set(small.output(request).tolist()) == {2.0}
        await prepared.aclose()


async def test_cancelling_again_and_after_the_end_stops_no_other_execution(stoppable: Any) -> None:
    model, value = products(8, 64), np.eye(64, dtype=np.float32)
    async with stoppable.make() as device:
        prepared = await device.prepare_model(model)
        over = []
        for _ in range(3 * device.info.slots):
            launch = prepared.launch(request_for(model, [value]))
            launch.cancel()
            launch.cancel()
            with contextlib.suppress(Error):
                await launch
            over.append(launch)
            request = request_for(model, [value])
            following = prepared.launch(request)
            for one in over:
                one.cancel()
            await following
            assert np.array_equal(request.pools[-1].array[: value.nbytes].view(np.float32), value.reshape(-1))
        await prepared.aclose()


async def _cancel_at_random_moments(stoppable: Any, count: int) -> None:
    model, drawn = products(8, 64), random.Random(5)
    value = np.eye(64, dtype=np.float32)
    stopped = ended = 0
    async with stoppable.make() as device:
        prepared = await device.prepare_model(model)
        for _ in range(count):
            request = request_for(model, [value])
            launch = prepared.launch(request)
            await anyio.to_thread.run_sync(threading.Event().wait, drawn.random() * 0.002)
            launch.cancel()
            try:
                await launch
                ended += 1
            except ExecutionCancelled:
                stopped += 1
            except GeneralFailure as e:
                assert "cancelled" in str(e)
                stopped += 1
        assert len(prepared._idle) == device.info.slots
        # Every slot computes as if nothing had been.
        requests = [request_for(model, [value]) for _ in range(2 * device.info.slots)]
        for request in requests:
            await prepared.execute_synchronously(request)
            assert np.array_equal(request.pools[-1].array[: value.nbytes].view(np.float32), value.reshape(-1))
        await prepared.aclose()
    assert stopped + ended == count


async def test_cancellations_at_random_moments_leave_every_slot_usable(stoppable: Any) -> None:
    await _cancel_at_random_moments(stoppable, 40)


@pytest.mark.long
async def test_a_thousand_cancellations_at_random_moments_leave_every_slot_usable(stoppable: Any) -> None:
    await _cancel_at_random_moments(stoppable, 1000)


async def _cancel_calls_at_random_moments(stoppable: Any, count: int) -> None:
    model, drawn = products(8, 64), random.Random(6)
    value = np.eye(64, dtype=np.float32)
    moments = {False: 0, True: 0}
    async with (
        aionn.open(drivers=[stoppable.device]) as runtime,
        await runtime.compile(model) as net,
        net.burst() as burst,
    ):
        device = runtime.device(stoppable.device)

        async def all_slots() -> None:
            async def one() -> None:
                result = await net.execute([value])
                np.testing.assert_array_equal(result.outputs[0], value)

            with anyio.fail_after(WAIT_S):
                async with anyio.create_task_group() as group:
                    for _ in range(device.info.slots + 1):
                        group.start_soon(one)
                np.testing.assert_array_equal((await burst.execute([value])).outputs[0], value)

        def held(pid: int) -> tuple[int, int]:
            return descriptor_count(pid), mapping_count(pid)

        await all_slots()
        pid = device.pid
        assert pid is not None
        before = held(pid)
        for index in range(count):
            way = burst.execute if index % 2 else net.execute
            with anyio.move_on_after(drawn.random() * 0.003) as scope:
                await way([value])
            moments[scope.cancelled_caught] += 1
        await all_slots()
        assert device.pid == pid, "the process was started anew"
        with anyio.fail_after(WAIT_S):
            while any(now > then + KEPT_MAX for now, then in zip(held(pid), before, strict=True)):
                await anyio.sleep(0.01)
    assert sum(moments.values()) == count


@pytest.mark.sampled(3)
@pytest.mark.slow
async def test_calls_that_are_cancelled_at_random_moments_leave_nothing_in_the_driver_s_process(
    stoppable: Any,
) -> None:
    await _cancel_calls_at_random_moments(stoppable, 30)


@pytest.mark.long
async def test_a_thousand_calls_that_are_cancelled_leave_nothing_in_the_driver_s_process(
    stoppable: Any,
) -> None:
    await _cancel_calls_at_random_moments(stoppable, 1000)

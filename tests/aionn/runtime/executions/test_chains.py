"""Many fenced executions over two devices: nothing per link but memory, also where each link is cut over both."""

from __future__ import annotations

import os
from functools import partial

import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn.errors import GeneralFailure
from aionn.hal import OperationType
from aionn.runtime.executions.execution import ExecutionState
from aionn.testing.models import chain
from fences import FenceStatus, SyncFence
from tests.support.split import PickyDevice

Op = OperationType
LINKS = 400
X = np.array([-2.5], np.float32)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _note(order: list[int], index: int, fence: SyncFence) -> None:
    order.append(index)


def two_devices() -> list[PickyDevice]:
    return [PickyDevice("left", {Op.RELU, Op.ABS}), PickyDevice("right", {Op.FLOOR})]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kinds", "steps"),
    [([Op.ABS, Op.FLOOR], 2), ([Op.ABS, Op.FLOOR, Op.RELU, Op.FLOOR], 4)],
    ids=["two steps", "four steps"],
)
async def test_chain_of_cut_executions_takes_no_descriptors(kinds: list[OperationType], steps: int) -> None:
    async with aionn.open(devices=two_devices(), isolation="in_process") as runtime:
        net = await runtime.compile(chain(kinds))
        assert len(net.steps) == steps and net.devices == ("left", "right")
        await net.execute([X])
        before, start = descriptors(), SyncFence("start")
        fence, order = start, list[int]()
        links: list[aionn.Execution] = []
        for index in range(LINKS):
            links.append(net.execute_fenced([X - index], wait_for=[fence]))
            fence = links[-1].fence
            fence.add_callback(partial(_note, order, index))
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert {link.state for link in links} == {ExecutionState.WAITING_FOR_FENCES}
        assert descriptors() == before, (
            "a fence that nobody exports has no descriptor, a link that waits no memory"
        )
        start.signal()
        results = [await link for link in links]
        assert order == list(range(LINKS))
        expected = [float(np.floor(np.abs(X - index))[0]) for index in range(LINKS)]
        assert [float(result.outputs[0][0]) for result in results] == expected
        assert descriptors() <= before + 2, "the memory of one link serves the one after the next"


@pytest.mark.thorough
async def test_batch_behind_one_fence_starts_in_one_turn() -> None:
    """As many executions as there are: all wait for their devices a turn or two after the fence, none for another's turn."""
    async with aionn.open(devices=two_devices(), isolation="in_process") as runtime:
        net = await runtime.compile(chain([Op.ABS, Op.FLOOR]))
        start = SyncFence("start")
        batch = [net.execute_fenced([X], wait_for=[start]) for _ in range(LINKS)]
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert {execution.state for execution in batch} == {ExecutionState.WAITING_FOR_FENCES}
        start.signal()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert ExecutionState.WAITING_FOR_FENCES not in {execution.state for execution in batch}
        for execution in batch:
            assert (await execution).outputs[0] == 2


async def test_failure_goes_down_a_chain_of_cut_executions_without_a_device() -> None:
    devices = two_devices()
    async with aionn.open(devices=devices, isolation="in_process") as runtime:
        net = await runtime.compile(chain([Op.ABS, Op.FLOOR]))
        start = SyncFence("start")
        fence = start
        links: list[aionn.Execution] = []
        for _ in range(LINKS):
            links.append(net.execute_fenced([X], wait_for=[fence]))
            fence = links[-1].fence
        start.fail("planted")
        with pytest.raises(GeneralFailure, match="planted"):
            await links[-1]
        assert all(link.fence.status is FenceStatus.FAILED for link in links)
        assert [device.executions for device in devices] == [0, 0]

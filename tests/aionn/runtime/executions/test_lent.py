"""A slot of a burst that its user fills in place: nothing is copied into it, and nobody else has it."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

import aionn
import aionn.blocking
from aionn.conformance.vts.models import endless_model
from aionn.runtime.memory.arguments import RequestArea

Values = npt.NDArray[np.float32]


async def test_slot_executes_what_was_written_into_it_without_a_copy(
    any_shared_runtime: aionn.Runtime, digits: Path, silence: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = await any_shared_runtime.compile(digits)
    expected = [(await net.execute([np.full_like(silence, i)])).outputs[0] for i in range(3)]
    copied: list[Any] = []
    monkeypatch.setattr(RequestArea, "write", lambda self, keys, arrays: copied.append(arrays))
    async with net.burst(slots=2) as burst:
        with burst.lend() as slot:
            for index, right in enumerate(expected):
                slot.inputs[0][...] = index
                result = await slot.execute(deadline=aionn.after(20))
                np.testing.assert_array_equal(result.outputs[0], right)
    assert copied == []


async def test_lent_slot_is_used_by_nobody_else_until_it_is_given_back(
    shared_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await shared_runtime.compile(digits)
    async with net.burst(slots=2) as burst:
        slot = burst.lend()
        slot.inputs[0][...] = 7
        for _ in range(4):
            await burst.execute([silence])
        assert (slot.inputs[0] == 7).all()
        with (
            burst.lend() as other,
            pytest.raises(aionn.ResourceExhausted, match="all 2 are in use") as raised,
        ):
            assert not np.shares_memory(other.inputs[0], slot.inputs[0])
            burst.lend()
        assert raised.value.transient
        slot.close()
        slot.close()
        assert burst.statistics().free == 2
        with pytest.raises(aionn.InvalidArgument, match="given back"):
            await slot.execute()


async def test_slot_that_is_dropped_is_given_back(
    shared_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await shared_runtime.compile(digits)
    async with net.burst(slots=1) as burst:
        kept = [burst.lend()]
        kept.append(kept)  # type: ignore[arg-type]  # The collector finds it.
        del kept
        gc.collect()
        await anyio.lowlevel.checkpoint()
        assert burst.statistics().free == 1
        slot = burst.lend()
        del slot
        await burst.execute([silence], deadline=aionn.after(20))


async def test_slot_that_another_thread_gives_back_wakes_the_execution_that_waits(
    shared_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await shared_runtime.compile(digits)
    async with net.burst(slots=1) as burst:
        slot = burst.lend()
        left_in: list[int] = []
        leave = burst._pool.leave
        burst._pool.leave = lambda *a: (left_in.append(threading.get_ident()), leave(*a))  # type: ignore[method-assign, assignment, func-returns-value]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(burst.execute, [silence])
            while not burst.statistics().waiting:
                await anyio.lowlevel.checkpoint()
            await anyio.to_thread.run_sync(slot.close)
        assert set(left_in) == {threading.get_ident()}


async def test_slot_and_stream_are_not_copied(
    shared_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    """The one would be given back twice; the other would end, without an error, when its copy is dropped."""

    async def items() -> AsyncIterator[Values]:
        for _ in range(3):
            yield silence

    net = await shared_runtime.compile(digits)
    async with net.burst() as burst:
        with burst.lend() as slot, pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(slot)
        async with burst.stream(items()) as stream:
            with pytest.raises(TypeError, match="cannot be copied"):
                copy.copy(stream)
            assert [result.status async for result in stream] == ["on_time"] * 3


async def test_slot_is_executed_in_its_own_loop_alone(shared_runtime: aionn.Runtime, digits: Path) -> None:
    net = await shared_runtime.compile(digits)
    async with net.burst(slots=1) as burst:
        with burst.lend() as slot:
            with pytest.raises(aionn.InvalidArgument, match="another event loop"):
                await anyio.to_thread.run_sync(lambda: anyio.run(slot.execute))
            assert not slot.is_busy


async def test_slot_of_a_cancelled_execution_is_busy_until_the_device_is_done(
    shared_runtime: aionn.Runtime,
) -> None:
    net = await shared_runtime.compile(endless_model())
    async with net.burst(slots=1) as burst:
        slot = burst.lend()
        slot.inputs[0][...] = True
        with anyio.move_on_after(0.05):
            await slot.execute(deadline=aionn.after(60))
        assert slot.is_busy and "busy" in repr(slot)
        with pytest.raises(aionn.InvalidArgument, match="still reads"):
            await slot.execute()
        with anyio.fail_after(20):
            while slot.is_busy:
                await anyio.sleep(0.01)
        slot.close()


async def test_slot_outlives_its_burst_and_executes_nothing_more(
    shared_runtime: aionn.Runtime, digits: Path
) -> None:
    net = await shared_runtime.compile(digits)
    async with net.burst() as burst:
        slot = burst.lend()
    slot.inputs[0][...] = 1
    with pytest.raises(aionn.InvalidArgument, match="closed"):
        await slot.execute()
    slot.close()
    with pytest.raises(aionn.InvalidArgument, match="closed"):
        burst.lend()


@pytest.mark.thorough
def test_slot_is_lent_to_a_thread(digits: Path, silence: Values) -> None:
    with aionn.blocking.open(drivers=["reference"]) as runtime, runtime.compile(digits) as net:
        expected = net.execute([silence]).outputs[0]
        with net.burst() as burst, burst.lend() as slot:
            slot.inputs[0][...] = silence
            np.testing.assert_array_equal(slot.execute().outputs[0], expected)
            assert not slot.is_busy

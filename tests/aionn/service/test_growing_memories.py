"""Device memories whose shape is not known when they are allocated count against the client's account as they grow."""

from __future__ import annotations

import weakref
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import Error, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    BufferDesc,
    BufferRole,
    BufferToken,
    DataLocation,
    Memory,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.hal.callers import account_of_call
from aionn.models.builder import GraphBuilder
from aionn.service.wire.quotas import Account, Quotas
from fences import FenceError, FenceStatus, SyncFence

LIMIT_BYTES = 1 << 20
FLOATS = LIMIT_BYTES // 4
ROLE = [BufferRole(0, 0)]
ANSWER_S_MAX = 10.0


def model(extent: int = 0, count: int = 1) -> Any:
    """The floor of ``count`` vectors of one extent, 0 for one that is not known."""
    graph = GraphBuilder()
    inputs = [graph.input(OperandType.TENSOR_FLOAT32, (extent,)) for _ in range(count)]
    return graph.build([graph.result(OperationType.FLOOR, [each], each) for each in inputs])


def source(floats: int) -> Memory:
    return Memory.create(4 * floats)


def request(memory: Memory, floats: int, tokens: list[int]) -> Request:
    """Each output into a device memory; all inputs are the same values."""
    argument = RequestArgument(False, DataLocation(0, 0, 4 * floats), (floats,))
    outputs = tuple(RequestArgument(False, DataLocation(1 + i, 0, 0)) for i in range(len(tokens)))
    return Request((argument,) * len(tokens), outputs, (memory, *map(BufferToken, tokens)))


async def until(device: ReferenceDevice, used_bytes: int) -> None:
    assert device.memories is not None
    with anyio.fail_after(ANSWER_S_MAX):
        while device.memories.used_bytes != used_bytes:
            await anyio.sleep(0.001)


async def test_copies_into_memories_of_unknown_shape_count(serving: Any) -> None:
    device = ReferenceDevice()
    client = (await serving(device, memory_bytes=LIMIT_BYTES)).client()
    prepared = await client.prepare_model(model())
    part = FLOATS // 4
    buffers = [await client.allocate(BufferDesc(), [prepared], ROLE, []) for _ in range(4)]
    for buffer in buffers[:3]:
        await buffer.copy_from(source(part), (part,))
    with pytest.raises(ResourceExhausted, match="this client may have") as told:
        await buffers[3].copy_from(source(part), (part,))
    assert told.value.transient
    with pytest.raises(ResourceExhausted, match="this client may have") as told:
        await buffers[3].copy_from(source(2 * FLOATS), (2 * FLOATS,))
    assert not told.value.transient
    await until(device, 3 * 4 * part)
    await buffers[0].copy_from(source(1), (1,))  # It shrinks.
    await buffers[3].copy_from(source(part), (part,))
    await buffers[1].aclose()
    await buffers[0].copy_from(source(part), (part,))
    await until(device, 3 * 4 * part)
    known = await client.prepare_model(model(part))
    with pytest.raises(ResourceExhausted, match="this client may have"):
        await client.allocate(BufferDesc(), [known], ROLE, [])
    for buffer in buffers:
        await buffer.aclose()
    await (await client.allocate(BufferDesc(), [known], ROLE, [])).aclose()
    await client.aclose()
    await until(device, 0)


@pytest.mark.parametrize("way", ["synchronous", "fenced"])
async def test_results_in_memories_of_unknown_shape_count(serving: Any, way: str) -> None:
    device = ReferenceDevice()
    client = (await serving(device, memory_bytes=LIMIT_BYTES)).client()
    prepared = await client.prepare_model(model())
    buffers = [await client.allocate(BufferDesc(), [prepared], [], ROLE) for _ in range(3)]
    part = 2 * FLOATS // 5

    async def execute(buffer: Any, floats: int = part) -> None:
        asked = request(source(floats), floats, [buffer.token])
        if way == "synchronous":
            await prepared.execute_synchronously(asked)
            return
        sized = RequestArgument(False, DataLocation(1, 0, 0), (floats,))
        launched: Any = await prepared.execute_fenced(Request(asked.inputs, (sized,), asked.pools), [])
        await launched.fence

    await execute(buffers[0])
    await execute(buffers[1])
    with pytest.raises(Error, match="this client may have"):
        await execute(buffers[2])
    await until(device, 2 * 4 * part)
    await buffers[0].aclose()
    await execute(buffers[2])
    await client.aclose()
    await until(device, 0)


async def _allocated(
    device: ReferenceDevice, account: Account, prepared: Any, index: int, **known: Any
) -> Any:
    token = account_of_call.set(account)
    try:
        role = [BufferRole(0, index)]
        return await device.allocate(BufferDesc(**known), [prepared], [], role)
    finally:
        account_of_call.reset(token)


async def test_result_that_does_not_fit_one_of_several_memories_leaks_nothing() -> None:
    account = Account(Quotas(memory_bytes=LIMIT_BYTES))
    async with ReferenceDevice() as device:
        assert device.memories is not None
        prepared = await device.prepare_model(model(count=3))
        fitting = await _allocated(device, account, prepared, 0)
        unfitting = await _allocated(device, account, prepared, 1, dimensions=(2,))
        behind = await _allocated(device, account, prepared, 2)
        before_bytes = device.memories.used_bytes
        for _ in range(2):
            with pytest.raises(GeneralFailure):
                await prepared.execute_synchronously(
                    request(source(1), 1, [fitting.token, unfitting.token, behind.token])
                )
        assert device.memories.used_bytes == before_bytes + 4, "what fitted stays until it is freed"
        assert account.taken("memory_bytes") == 4
        for buffer in (fitting, unfitting, behind):
            await buffer.aclose()
        await until(device, 0)  # The thread of the execution leaves them after its answer.
        assert account.taken("memory_bytes") == 0


async def test_memory_that_is_rejected_or_unused_does_not_count() -> None:
    account = Account(Quotas(memory_bytes=1 << 40))
    async with ReferenceDevice() as device:
        assert device.memories is not None
        device.memories._shares.amount_max = 100
        prepared = await device.prepare_model(model())
        buffer = await _allocated(device, account, prepared, 0)
        with pytest.raises(ResourceExhausted, match="device memory"):
            await buffer.copy_from(source(50), (50,))
        with pytest.raises(InvalidArgument):
            await buffer.copy_from(source(3), (4,))
        assert device.memories.used_bytes == account.taken("memory_bytes") == 0
        memory = device.memories.memory(buffer.token)
        memory.unused(memory.writable(8))
        assert device.memories.used_bytes == account.taken("memory_bytes") == 0
        array = memory.writable(8)
        await buffer.aclose()
        assert account.taken("memory_bytes") == 8, "an execution writes into it"
        memory.written(array, (2,))
        assert device.memories.used_bytes == account.taken("memory_bytes") == 0
        assert np.all(array == 0)


async def test_memory_that_is_freed_counts_until_the_execution_that_writes_it_has_ended() -> None:
    async with ReferenceDevice() as device:
        assert device.memories is not None
        prepared = await device.prepare_model(model(FLOATS))
        buffer = await device.allocate(BufferDesc(), [prepared], [], ROLE)
        fence = SyncFence()
        launched = await prepared.execute_fenced(request(source(FLOATS), FLOATS, [buffer.token]), [fence])
        await buffer.aclose()
        assert device.memories.used_bytes == LIMIT_BYTES, (
            "nothing else bounds what a client frees in this way"
        )
        fence.signal()
        assert launched.fence is not None
        await launched.fence
        del launched
        await until(device, 0)


async def test_waiting_execution_keeps_neither_a_freed_memory_that_it_reads_nor_a_closed_model() -> None:
    graph = GraphBuilder()
    value = graph.input(OperandType.TENSOR_FLOAT32, (FLOATS,))
    constant = graph.constant(np.ones(FLOATS, np.float32))
    made = graph.build([graph.result(OperationType.ADD, [value, constant, graph.constant(0)], value)])
    kept = weakref.ref(made.pools[0])
    async with ReferenceDevice() as device:
        assert device.memories is not None
        prepared = await device.prepare_model(made)
        del made, graph
        buffer = await device.allocate(BufferDesc(), [prepared], ROLE, [])
        await buffer.copy_from(source(FLOATS), ())
        array = weakref.ref(device.memories.memory(buffer.token)._array)
        asked = Request(
            (RequestArgument(False, DataLocation(1, 0, 0)),),
            (RequestArgument(False, DataLocation(0, 0, 4 * FLOATS)),),
            (source(FLOATS), BufferToken(buffer.token)),
        )
        fence = SyncFence()
        launched = await prepared.execute_fenced(asked, [fence])
        assert launched.fence is not None
        await buffer.aclose()
        await prepared.aclose()
        with anyio.fail_after(ANSWER_S_MAX):
            while array() is not None or kept() is not None:  # A thread leaves them after its answer.
                await anyio.sleep(0.001)
        assert launched.fence.status == FenceStatus.PENDING
        fence.signal()
        with pytest.raises(FenceError):
            await launched.fence

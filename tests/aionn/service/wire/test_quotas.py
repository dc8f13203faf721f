"""What one client may make the process map, read and keep; limits of objects are in ``test_served``."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import (
    CacheFiles,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Priority,
    Subgraph,
)
from aionn.service.host.process import SHARED_QUOTAS
from aionn.service.wire.handles import CacheOnWire, RequestOnWire
from aionn.service.wire.protocol import (
    Call,
    Execute,
    ExecuteFenced,
    Failed,
    GetStatus,
    PrepareModelFromCache,
    StatusReply,
    decode,
    encode,
)
from aionn.service.wire.quotas import Account, Quotas
from aionn.service.wire.sizes import FENCES_MAX
from fences import SyncFence

GIB = 1 << 30


class Thing:
    pass


def test_what_was_received_counts_until_it_is_dropped() -> None:
    account = Account(Quotas(descriptors=4, mapped_bytes=100))
    held = [account.receive(Thing, 2, 50) for _ in range(2)]
    for descriptors, mapped_bytes in ((1, 0), (0, 1)):
        with pytest.raises(ResourceExhausted):
            account.receive(Thing, descriptors, mapped_bytes)
    held.pop()
    assert (account.taken("descriptors"), account.taken("mapped_bytes")) == (2, 50)

    def fail() -> Thing:
        raise GeneralFailure("no")

    with pytest.raises(GeneralFailure):
        account.receive(fail, 2, 50)
    held.append(account.receive(Thing, 2, 50))
    held.clear()
    assert (account.taken("descriptors"), account.taken("mapped_bytes")) == (0, 0)


def test_garbage_collection_in_the_middle_of_the_account_does_not_block() -> None:
    account = Account(Quotas(descriptors=4))
    thing: Any = account.receive(Thing, 2)
    thing.itself = thing
    del thing
    with account._lock:  # As if the collector came within a method.
        gc.collect()
    assert account.taken("descriptors") == 0


def test_message_that_would_exceed_the_account_is_refused_and_takes_nothing(small: Any) -> None:
    account = Account(Quotas(descriptors=5, mapped_bytes=1 << 20))
    memories = tuple(Memory.create(4096) for _ in range(3))
    from aionn.service.wire.protocol import GetMemoriesReply, Reply

    payload, fds, _ = encode(Reply(1, GetMemoriesReply(memories)))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ResourceExhausted, match=r"descriptors: this client may have 5 \(aionn serve --descriptors\), has 4"
    ):
        decode(payload, fds, account=account)
    gc.collect()
    assert account.taken("descriptors") == account.taken("mapped_bytes") == 0
    assert len(os.listdir("/proc/self/fd")) == before


async def test_memories_of_requests_count_while_they_are_kept(serving: Any, small: Any) -> None:
    served = await serving(descriptors=8, pools=2)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    works = [small.Sum() for _ in range(4)]
    executions = [await prepared.create_reusable_execution(work.request) for work in works]
    with pytest.raises(ResourceExhausted, match="descriptors"):
        await prepared.execute_synchronously(small.Sum().request)
    other = served.client()
    await (await other.prepare_model(small.sum_model())).execute_synchronously(small.Sum().request)
    await executions[0].execute_synchronously()
    assert works[0].is_right
    del executions
    gc.collect()
    for _ in range(10):
        work = small.Sum()
        await prepared.execute_synchronously(work.request)
        assert work.is_right
    await client.aclose()
    await other.aclose()


async def test_mapped_bytes_are_limited_per_client(serving: Any, small: Any) -> None:
    served = await serving(mapped_bytes=1 << 20)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    large = Memory.create(1 << 21)
    request = small.Sum().request
    with pytest.raises(ResourceExhausted, match="mapped bytes"):
        await prepared.execute_synchronously(type(request)(request.inputs, request.outputs, (large,)))
    await prepared.execute_synchronously(small.Sum().request)
    await client.aclose()


async def test_pending_fences_are_limited_per_client(serving: Any, small: Any) -> None:
    served = await serving(descriptors=24)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    fences = [SyncFence() for _ in range(3 * FENCES_MAX)]
    first = await prepared.execute_fenced(work.request, fences[:FENCES_MAX])
    second = await prepared.execute_fenced(work.request, fences[FENCES_MAX : 2 * FENCES_MAX])
    with pytest.raises(ResourceExhausted, match="descriptors"):
        await prepared.execute_fenced(work.request, fences[2 * FENCES_MAX :])
    for fence in fences:
        fence.signal()
    await first.fence
    await second.fence
    assert work.is_right
    await client.aclose()


def sparse_file(path: Path, size_bytes: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


async def test_cache_files_count_and_large_ones_are_not_read(
    serving: Any, small: Any, tmp_path: Path
) -> None:
    served = await serving(memory_bytes=1 << 20)
    client = served.client()
    await client.connect()
    fds = [sparse_file(tmp_path / str(number), 64 * GIB) for number in range(2)]
    cache = CacheFiles(fds[:1], fds[1:], bytes(32))
    with pytest.raises(ResourceExhausted, match="memory bytes"):
        await client.prepare_model_from_cache(cache)
    for fd in fds:
        os.ftruncate(fd, 0)
    prepared = await client.prepare_model(small.sum_model(), cache=cache)
    await prepared.aclose()
    restored = await client.prepare_model_from_cache(cache)
    work = small.Sum()
    await restored.execute_synchronously(work.request)
    assert work.is_right
    for fd in fds:
        os.close(fd)
    await client.aclose()


async def test_more_cache_files_than_a_device_can_have_are_no_message(served: Any, tmp_path: Path) -> None:
    raw = await served.raw().hello()
    fd = sparse_file(tmp_path / "file", 1)
    good = CacheOnWire.of(CacheFiles([fd] * 32, [], bytes(32)))
    reply = await raw.ask(2, PrepareModelFromCache(good, Priority.MEDIUM, None))
    assert isinstance(reply, Failed)
    # As somebody would say it who does not use our classes.
    payload, fds, keep = encode(Call(3, PrepareModelFromCache(good, Priority.MEDIUM, None)))
    head, sep, tail = payload.partition(b"\xdc\x00\x20")
    assert sep
    socket.send_fds(raw.sock, [head + b"\xdc\x00\x21\x00" + tail], fds)
    del keep
    assert await raw.receive() == b""
    raw.close()
    os.close(fd)


async def test_request_that_repeats_one_descriptor_counts_each_use(serving: Any, small: Any) -> None:
    served = await serving(descriptors=FENCES_MAX - 1)
    raw = await served.raw().hello()
    work = small.Sum()
    before = len(os.listdir("/proc/self/fd"))
    request = RequestOnWire.of(work.request)
    many = type(request)(request.inputs, request.outputs, request.pools * 200)
    reply = await raw.ask(2, Execute(1, many, False, None, None))
    assert isinstance(reply, Failed) and reply.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    fences = tuple(SyncFence() for _ in range(FENCES_MAX))
    reply = await raw.ask(3, ExecuteFenced(1, request, fences, False, None, None, None))
    assert isinstance(reply, Failed) and reply.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    for fence in fences:
        fence.close()
    assert isinstance(await raw.ask(4, GetStatus()), StatusReply)
    del reply, fences
    assert len(os.listdir("/proc/self/fd")) <= before
    raw.close()


def test_negative_size_of_a_memory_gains_nothing() -> None:
    account = Account(Quotas(mapped_bytes=100))
    with pytest.raises(ResourceExhausted):
        account.receive(Thing, 0, 101)
    with pytest.raises(InvalidArgument, match="expected 0 or more"):
        account.take("mapped_bytes", -1)


async def test_operands_and_operations_of_prepared_models_count(serving: Any) -> None:
    tensor = OperandType.TENSOR_FLOAT32
    count = 1500  # More than are counted in the event loop.
    operands = tuple(
        Operand(tensor, (2,), lifetime=OperandLifeTime.TEMPORARY_VARIABLE) for _ in range(count - 1)
    )
    operands = (
        Operand(tensor, (2,), lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        *operands,
        Operand(tensor, (2,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    operations = tuple(Operation(OperationType.RELU, (i,), (i + 1,)) for i in range(count))
    model = Model(Subgraph(operands, operations, (0,), (count,)))
    least_bytes = 200 * (2 * count)  # CPython's objects alone.
    served = await serving(memory_bytes=3 * least_bytes)
    client = served.client()
    first = await client.prepare_model(model)
    with pytest.raises(ResourceExhausted, match="memory bytes") as told:
        await client.prepare_model(model)
    assert told.value.transient
    await first.aclose()
    await (await client.prepare_model(model)).aclose()
    small_one = await serving(memory_bytes=least_bytes)
    with pytest.raises(ResourceExhausted, match="memory bytes") as told:
        await small_one.client().prepare_model(model)
    assert not told.value.transient
    with pytest.raises(ResourceExhausted, match="memory bytes"):
        await small_one.client().supported_operations(model)


def test_client_of_a_shared_device_has_smaller_quotas_of_everything() -> None:
    alone, shared = Quotas(), SHARED_QUOTAS
    for name in Quotas.__struct_fields__:
        assert 0 < getattr(shared, name) < getattr(alone, name), name

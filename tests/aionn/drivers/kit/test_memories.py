"""Device memories: what may be allocated, copied and executed with, in which order it is checked, and what a failure leaves."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from aionn.drivers.kit import memories as memories_module
from aionn.drivers.kit.memories import COPY_ON_LOOP_BYTES_MAX, MemoryTable
from aionn.drivers.reference import MEMORY_BYTES_MAX, ReferenceDevice
from aionn.errors import (
    Error,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from aionn.hal import (
    BufferDesc,
    BufferRole,
    Device,
    Memory,
    Operand,
    OperandType,
    OutputShape,
    PreparedModel,
    Request,
    Timing,
)
from aionn.hal.callers import Connection, Sharer, client_of_call, sharer_of_call
from aionn.scheduler import worker_turns
from aionn.scheduler.worker_turns import BESIDE_MAX
from fences import SyncFence
from fmq.available import CHECKED_BYTES_MIN, Available

A = np.arange(6, dtype=np.float32).reshape(2, 3)
SIZE = A.nbytes
WAIT_S_MAX = 20.0
INPUT, OUTPUT = [BufferRole(0, 0)], [BufferRole(0, 0)]


def pool(values: np.ndarray) -> Memory:
    memory = Memory.create(values.nbytes)
    memory.array[:] = np.frombuffer(values.tobytes(), np.uint8)
    return memory


def floats(memory: Memory) -> np.ndarray:
    return memory.array.view(np.float32)


async def by_synchronous(prepared: PreparedModel, request: Request) -> ErrorStatus:
    try:
        result = await prepared.execute_synchronously(request)
    except Error as e:
        return e.status
    return ErrorStatus.NONE if result.output_sufficient_size else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE


async def by_asynchronous(prepared: PreparedModel, request: Request) -> ErrorStatus:
    done = SyncFence()
    told: list[ErrorStatus] = []

    def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
        told.append(status)
        done.try_signal()

    await prepared.execute(request, callback)
    await done
    assert len(told) == 1
    return told[0]


async def by_fenced(prepared: PreparedModel, request: Request) -> ErrorStatus:
    try:
        launched = await prepared.execute_fenced(request, [])
    except Error as e:
        return e.status
    if launched.fence is not None:
        with contextlib.suppress(Exception):
            await launched.fence
    return (await launched.get_execution_info())[0]


@pytest.fixture(params=[by_synchronous, by_asynchronous, by_fenced])
def executed(request: pytest.FixtureRequest) -> Any:
    return request.param


# allocate


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("description", "inputs", "outputs"),
    [
        ((), [], []),
        ((), [BufferRole(1, 0)], []),
        ((), [BufferRole(-1, 0)], []),
        ((), [BufferRole(0, 2)], []),
        ((), [], [BufferRole(0, 1)]),
        ((), [BufferRole(0, 0, 10.0)], []),
        ((), [BufferRole(0, 0, 0.0)], []),
        ((), [BufferRole(0, 0, -0.5)], []),
        ((), [BufferRole(0, 0), BufferRole(0, 0)], []),
        ((), [], [BufferRole(0, 0), BufferRole(0, 0)]),
        ((2,), [BufferRole(0, 0)], []),
        ((2, 4), [BufferRole(0, 0)], []),
        ((2, -3), [BufferRole(0, 0)], []),
    ],
)
async def test_illegal_allocation_is_refused(
    fresh_device: Device,
    small: Any,
    description: tuple[int, ...],
    inputs: list[BufferRole],
    outputs: list[BufferRole],
) -> None:
    prepared = await fresh_device.prepare_model(small.sum_model())
    with pytest.raises(InvalidArgument, match="allocate"):
        await fresh_device.allocate(BufferDesc(description), [prepared], inputs, outputs)
    # Nothing was taken: the first token is still the next.
    assert (await fresh_device.allocate(BufferDesc(), [prepared], INPUT, [])).token == 1


async def test_foreign_closed_and_missing_models_are_refused(
    device: Device, reference: ReferenceDevice, small: Any
) -> None:
    foreign = await reference.prepare_model(small.sum_model())
    closed = await device.prepare_model(small.sum_model())
    await closed.aclose()
    for wrong in (foreign, closed, object(), None):
        with pytest.raises(InvalidArgument):
            await device.allocate(BufferDesc(), [wrong], INPUT, [])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument):
        await device.allocate(BufferDesc(), [], INPUT, [])


async def test_roles_of_two_models_must_agree(device: Device, small: Any) -> None:
    first = await device.prepare_model(small.sum_model((2, 3)))
    for dimensions in ((2, 4), (6,)):
        other = await device.prepare_model(small.sum_model(dimensions))
        with pytest.raises(InvalidArgument, match="dimensions"):
            await device.allocate(BufferDesc(), [first, other], [BufferRole(0, 0), BufferRole(1, 0)], [])
    same = await device.prepare_model(small.sum_model((2, 3)))
    await device.allocate(
        BufferDesc(), [first, same], [BufferRole(0, 0), BufferRole(1, 0)], [BufferRole(0, 0)]
    )


async def test_the_same_model_prepared_twice_has_roles_of_its_own(
    reference: ReferenceDevice, small: Any
) -> None:
    model = small.sum_model()
    twice = [await reference.prepare_model(model), await reference.prepare_model(model)]
    await reference.allocate(BufferDesc(), twice, [BufferRole(0, 0), BufferRole(1, 0)], [])
    with pytest.raises(InvalidArgument, match="once"):
        await reference.allocate(BufferDesc(), [twice[0], twice[0]], [BufferRole(0, 0), BufferRole(1, 0)], [])


async def test_tokens_start_at_one_and_the_last_freed_comes_first(fresh_device: Device, small: Any) -> None:
    prepared = await fresh_device.prepare_model(small.sum_model())

    async def allocate() -> Any:
        return await fresh_device.allocate(BufferDesc(), [prepared], INPUT, [])

    buffers = [await allocate() for _ in range(4)]
    assert [b.token for b in buffers] == [1, 2, 3, 4]
    await buffers[1].aclose()
    await buffers[3].aclose()
    await buffers[3].aclose()
    again = [await allocate() for _ in range(3)]
    assert [b.token for b in again] == [4, 2, 5]


async def test_closed_and_dropped_buffers_give_their_memory_back(
    reference: ReferenceDevice, small: Any
) -> None:
    prepared = await reference.prepare_model(small.sum_model())
    assert reference.memories is not None
    kept = await reference.allocate(BufferDesc(), [prepared], INPUT, [])
    await kept.aclose()
    dropped = await reference.allocate(BufferDesc(), [prepared], INPUT, [])
    assert reference.memories.used_bytes == SIZE
    del dropped
    gc.collect()
    assert (reference.memories.used_bytes, len(reference.memories)) == (0, 0)
    with pytest.raises(InvalidArgument, match="closed"):
        await kept.copy_from(pool(A), [])


async def test_more_than_the_device_has_is_refused(reference: ReferenceDevice, small: Any) -> None:
    prepared = await reference.prepare_model(small.sum_model((0, 3)))
    with pytest.raises(ResourceExhausted):
        await reference.allocate(BufferDesc((MEMORY_BYTES_MAX, 3)), [prepared], INPUT, [])
    assert (await reference.allocate(BufferDesc((2, 3)), [prepared], INPUT, [])).token == 1


def test_shortage_is_persistent_where_the_memory_could_never_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = MemoryTable(1 << 30)
    monkeypatch.setattr("fmq.available.available", lambda: Available(CHECKED_BYTES_MIN, 1 << 29))
    for size_bytes, transient in ((1 << 29, True), (1 << 30, False), ((1 << 30) + 1, False)):
        with pytest.raises(ResourceExhausted) as told:
            table.take(size_bytes)
        assert told.value.transient is transient
    assert table.used_bytes == 0
    table.take(1000)
    with pytest.raises(ResourceExhausted, match="at most") as told:
        table.take(1 << 30)
    assert told.value.transient


# copies


async def test_copies_carry_the_value(device: Device, small: Any) -> None:
    prepared = await device.prepare_model(small.sum_model())
    buffer = await device.allocate(BufferDesc(), [prepared], INPUT, OUTPUT)
    await buffer.copy_from(pool(A), [])
    into = Memory.create(SIZE)
    await buffer.copy_to(into)
    np.testing.assert_array_equal(floats(into), A.ravel())
    await buffer.copy_from(pool(A + 1), [2, 3])
    await buffer.copy_to(into)
    np.testing.assert_array_equal(floats(into), A.ravel() + 1)


async def test_large_copies_go_through_a_thread(reference: ReferenceDevice, small: Any) -> None:
    count = COPY_ON_LOOP_BYTES_MAX // 4 + 1
    prepared = await reference.prepare_model(small.sum_model((count,)))
    buffer = await reference.allocate(BufferDesc(), [prepared], INPUT, [])
    values = np.arange(count, dtype=np.float32)
    await buffer.copy_from(pool(values), [])
    into = Memory.create(values.nbytes)
    await buffer.copy_to(into)
    np.testing.assert_array_equal(floats(into), values)


async def test_size_is_checked_before_the_state(device: Device, small: Any) -> None:
    prepared = await device.prepare_model(small.sum_model())
    buffer = await device.allocate(BufferDesc(), [prepared], INPUT, OUTPUT)
    for size in (SIZE // 2, SIZE * 2):
        with pytest.raises(InvalidArgument, match="copy to"):
            await buffer.copy_to(Memory.create(size))
    with pytest.raises(GeneralFailure, match="nothing was written"):
        await buffer.copy_to(Memory.create(SIZE))


@pytest.mark.parametrize("is_dynamic", [False, True])
async def test_failed_copy_leaves_the_memory_uninitialised(
    device: Device, small: Any, is_dynamic: bool
) -> None:
    prepared = await device.prepare_model(small.sum_model((0, 3) if is_dynamic else (2, 3)))
    buffer = await device.allocate(BufferDesc(), [prepared], INPUT, OUTPUT)
    for source, dimensions in [
        (Memory.create(SIZE // 2), [2, 3]),
        (Memory.create(SIZE * 2), [2, 3]),
        (pool(A), [2, 4]),
        (pool(A), [6]),
        (pool(A), [2, -3]),
        (pool(A), [2**40, 3]),
    ]:
        await buffer.copy_from(pool(A), [2, 3])
        with pytest.raises(InvalidArgument, match="copy from"):
            await buffer.copy_from(source, dimensions)
        with pytest.raises(GeneralFailure):
            await buffer.copy_to(Memory.create(SIZE))


async def test_dynamic_memory_takes_the_shape_of_each_write(device: Device, small: Any) -> None:
    prepared = await device.prepare_model(small.sum_model((0, 3)))
    buffer = await device.allocate(BufferDesc(), [prepared], INPUT, OUTPUT)
    with pytest.raises(InvalidArgument, match="whole shape"):
        await buffer.copy_from(pool(A), [])
    for rows in (2, 5, 1):
        values = np.arange(rows * 3, dtype=np.float32)
        await buffer.copy_from(pool(values), [rows, 3])
        with pytest.raises(InvalidArgument):
            await buffer.copy_to(Memory.create(values.nbytes + 4))
        into = Memory.create(values.nbytes)
        await buffer.copy_to(into)
        np.testing.assert_array_equal(floats(into), values)


async def test_read_only_memory_is_no_destination(reference: ReferenceDevice, small: Any) -> None:
    prepared = await reference.prepare_model(small.sum_model())
    buffer = await reference.allocate(BufferDesc(), [prepared], INPUT, [])
    await buffer.copy_from(pool(A), [])
    own = Memory.create(SIZE)
    with pytest.raises(InvalidArgument, match="read-only"):
        await buffer.copy_to(Memory.from_fd(own.fileno(), writable=False))


# executions


class Three:
    """Three memories around one prepared model: an input, an output, and one for both."""

    def __init__(self, prepared: PreparedModel, source: Any, target: Any, both: Any) -> None:
        self.prepared = prepared
        self.source = source
        self.target = target
        self.both = both


@pytest_asyncio.fixture(loop_scope="module")
async def three(device: Device, small: Any) -> Three:
    prepared = await device.prepare_model(small.sum_model())
    return Three(
        prepared,
        await device.allocate(BufferDesc(), [prepared], INPUT, []),
        await device.allocate(BufferDesc(), [prepared], [], OUTPUT),
        await device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0), BufferRole(0, 1)], OUTPUT),
    )


async def test_memories_feed_executions_and_take_their_results(
    three: Three, small: Any, executed: Any
) -> None:
    await three.source.copy_from(pool(A), [])
    request = small.request([three.source.token, A], [three.target.token])
    assert await executed(three.prepared, request) == ErrorStatus.NONE
    into = Memory.create(SIZE)
    await three.target.copy_to(into)
    np.testing.assert_array_equal(floats(into), 2 * A.ravel())
    # Written by an execution, read by the next one, twice in the same request.
    assert await executed(three.prepared, small.request([A, A], [three.both.token])) == ErrorStatus.NONE
    token = three.both.token
    request = small.request([token, token], [(SIZE, (2, 3))])
    assert await executed(three.prepared, request) == ErrorStatus.NONE
    np.testing.assert_array_equal(small.output(request), 4 * A.ravel())


async def test_unknown_tokens_are_refused(three: Three, small: Any, executed: Any) -> None:
    for token in (100, 0, -1):
        for request in (
            small.request([token, A], [(SIZE, (2, 3))]),
            small.request([A, A], [token]),
        ):
            assert await executed(three.prepared, request) == ErrorStatus.INVALID_ARGUMENT


async def test_uses_that_were_not_declared_are_refused(
    device: Device, three: Three, small: Any, executed: Any
) -> None:
    await three.source.copy_from(pool(A), [])
    other = await device.prepare_model(small.sum_model())
    refused = [
        (three.prepared, small.request([A, three.source.token], [(SIZE, (2, 3))])),  # another input
        (three.prepared, small.request([A, A], [three.source.token])),  # an output
        (three.prepared, small.request([three.target.token, A], [(SIZE, (2, 3))])),  # an input
        (other, small.request([three.source.token, A], [(SIZE, (2, 3))])),  # another prepared model
        (other, small.request([A, A], [three.target.token])),
    ]
    for prepared, request in refused:
        assert await executed(prepared, request) == ErrorStatus.INVALID_ARGUMENT


async def test_uninitialised_input_is_a_general_failure(three: Three, small: Any, executed: Any) -> None:
    request = small.request([three.source.token, A], [(SIZE, (2, 3))])
    assert await executed(three.prepared, request) == ErrorStatus.GENERAL_FAILURE


async def test_one_memory_for_input_and_output_is_refused(three: Three, small: Any, executed: Any) -> None:
    await three.both.copy_from(pool(A), [])
    request = small.request([three.both.token, A], [three.both.token])
    assert await executed(three.prepared, request) == ErrorStatus.INVALID_ARGUMENT
    # A request that was refused changed nothing.
    await three.both.copy_to(Memory.create(SIZE))


async def test_inputs_keep_the_shape_of_the_last_write_and_outputs_may_change_it(
    device: Device, small: Any, executed: Any
) -> None:
    prepared = await device.prepare_model(small.sum_model((0, 3)))
    buffer = await device.allocate(BufferDesc(), [prepared], INPUT, OUTPUT)
    await buffer.copy_from(pool(A), [2, 3])

    def reading(rows: int) -> Request:
        b = np.ones((rows, 3), np.float32)
        request = small.request([buffer.token, b], [(b.nbytes, (rows, 3))])
        first = msgspec.structs.replace(request.inputs[0], dimensions=(rows, 3))
        return msgspec.structs.replace(request, inputs=(first, request.inputs[1]))

    assert await executed(prepared, reading(3)) == ErrorStatus.INVALID_ARGUMENT
    assert await executed(prepared, reading(2)) == ErrorStatus.NONE
    if executed is not by_fenced:  # which demands known outputs
        values = np.ones((3, 3), np.float32)
        assert await executed(prepared, small.request([values, values], [buffer.token])) == ErrorStatus.NONE
        assert await executed(prepared, reading(3)) == ErrorStatus.NONE
        assert await executed(prepared, reading(2)) == ErrorStatus.INVALID_ARGUMENT


async def test_result_outside_of_the_allocation_is_a_general_failure(device: Device, small: Any) -> None:
    prepared = await device.prepare_model(small.sum_model((0, 3)))
    buffer = await device.allocate(BufferDesc((2, 3)), [prepared], [], OUTPUT)
    for rows in (
        3,
        1,
    ):  # More than fits, which would be OUTPUT_INSUFFICIENT_SIZE elsewhere; and another shape.
        await buffer.copy_from(pool(A), [])
        values = np.ones((rows, 3), np.float32)
        with pytest.raises(GeneralFailure):
            await prepared.execute_synchronously(small.request([values, values], [buffer.token]))
        with pytest.raises(GeneralFailure):
            await buffer.copy_to(Memory.create(SIZE))


async def test_failed_execution_leaves_its_output_uninitialised(three: Three, small: Any) -> None:
    request = small.request([A, A], [three.target.token])
    await three.prepared.execute_synchronously(request)
    await three.target.copy_to(Memory.create(SIZE))
    with pytest.raises(MissedDeadline):
        await three.prepared.execute_synchronously(request, deadline_ns=1)
    with pytest.raises(GeneralFailure):
        await three.target.copy_to(Memory.create(SIZE))


async def test_fenced_execution_looks_at_its_inputs_when_it_starts(three: Three, small: Any) -> None:
    gate = SyncFence("dependency")
    request = small.request([three.source.token, A], [three.target.token])
    launched = await three.prepared.execute_fenced(request, [gate])
    await three.source.copy_from(pool(A), [])
    gate.signal()
    assert launched.fence is not None
    await launched.fence
    into = Memory.create(SIZE)
    await three.target.copy_to(into)
    np.testing.assert_array_equal(floats(into), 2 * A.ravel())


async def test_failed_dependency_leaves_the_output_uninitialised(three: Three, small: Any) -> None:
    await three.prepared.execute_synchronously(small.request([A, A], [three.target.token]))
    gate = SyncFence("dependency")
    launched = await three.prepared.execute_fenced(small.request([A, A], [three.target.token]), [gate])
    gate.fail("unplugged")
    assert launched.fence is not None
    with pytest.raises(Exception, match="unplugged"):
        await launched.fence
    with pytest.raises(GeneralFailure):
        await three.target.copy_to(Memory.create(SIZE))


async def test_burst_takes_memories_by_identifier_minus_one_alone(
    reference: ReferenceDevice, small: Any
) -> None:
    prepared = await reference.prepare_model(small.sum_model())
    buffer = await reference.allocate(BufferDesc(), [prepared], INPUT, [])
    await buffer.copy_from(pool(A), [])
    burst = await prepared.configure_execution_burst()
    request = small.request([buffer.token, A], [(SIZE, (2, 3))])
    with pytest.raises(InvalidArgument, match="-1"):
        await burst.execute_synchronously(request, [3, 1, 2])
    await burst.execute_synchronously(request, [-1, 1, 2])
    np.testing.assert_array_equal(small.output(request), 2 * A.ravel())


async def test_freed_memory_does_not_crash_what_still_uses_it(reference: ReferenceDevice, small: Any) -> None:
    assert reference.memories is not None
    prepared = await reference.prepare_model(small.sum_model((0, 3)))
    buffer = await reference.allocate(BufferDesc(), [prepared], INPUT, OUTPUT)
    request = small.request([A, A], [buffer.token])
    gate = SyncFence("dependency")
    arguments = prepared.bind(request)
    await buffer.aclose()
    gate.signal()
    prepared.run_bound(arguments, measure=False, deadline_ns=None, loop_timeout_ns=None)
    assert reference.memories.used_bytes == 0


async def test_processes_take_turns_at_large_copies_whatever_their_number_of_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, start, may_end = np.copyto, worker_turns._Call.start, threading.Event()
    order: list[object] = []

    def noted(call: worker_turns._Call) -> None:
        # A thread may begin later than others that get their turn after it.
        assert isinstance(call.owner, Connection)
        order.append(call.owner.process)
        start(call)

    def halting(target: np.ndarray, source: np.ndarray) -> None:
        assert may_end.wait(WAIT_S_MAX)
        copy(target, source)

    monkeypatch.setattr(worker_turns._Call, "start", noted)
    monkeypatch.setattr(np, "copyto", halting)
    flood = 40 + 3 * BESIDE_MAX
    sources = [np.full(COPY_ON_LOOP_BYTES_MAX + 1, process, np.uint8) for process in (1, 2)]
    target = np.zeros_like(sources[0])

    async def one(process: int, client: int) -> None:
        client_of_call.set(Connection(process, client))
        await memories_module._copy(target, sources[process - 1])

    async with anyio.create_task_group() as tasks:
        try:
            for client in range(flood):
                tasks.start_soon(one, 1, client)
            with anyio.fail_after(WAIT_S_MAX):
                while len(order) + memories_module._copies.waiting_count < flood:
                    await anyio.sleep(0.001)
                assert len(order) == BESIDE_MAX  # One process may use all threads.
                tasks.start_soon(one, 2, 0)
                while memories_module._copies.waiting_count < flood + 1 - BESIDE_MAX:
                    await anyio.sleep(0.001)
        finally:
            may_end.set()
    assert order.count(1) == flood and order.count(2) == 1 and order.index(2) <= 3 * BESIDE_MAX


def test_processes_that_share_a_device_leave_memory_for_others() -> None:
    table = MemoryTable(1200)

    def taken(sharer: Sharer | None) -> int:
        count = 0
        while True:
            try:
                table.take(1, sharer)
            except ResourceExhausted as e:
                assert e.transient
                return count
            count += 1

    greedy = Sharer("user", 1)
    assert 299 <= taken(greedy) <= 300
    assert 149 <= taken(Sharer("user", 2)) <= 150
    assert taken(Sharer("other", 3)) >= 120
    with pytest.raises(ResourceExhausted) as caught:
        table.take(301, greedy)
    assert not caught.value.transient
    table = MemoryTable(1200)
    assert taken(None) == 1200, "one process alone may have all"


def test_a_memory_counts_for_the_process_of_the_call() -> None:
    table = MemoryTable(1200)
    operand = Operand(OperandType.TENSOR_FLOAT32, dimensions=(60,))
    token = sharer_of_call.set(Sharer("user", 1))
    kept = table.allocate(operand, frozenset())
    with pytest.raises(ResourceExhausted):
        table.allocate(operand, frozenset())
    sharer_of_call.reset(token)
    other = table.allocate(operand, frozenset())
    assert len(table) == 2
    del kept, other
    token = sharer_of_call.set(Sharer("user", 1))
    table.allocate(operand, frozenset())
    sharer_of_call.reset(token)

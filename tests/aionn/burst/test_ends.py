"""Controller and server over real queues in one process: answers, hostile requests, small result queues, death."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import fmq
from aionn.burst.controller import BurstController
from aionn.burst.packets import decode_result, encode_request
from aionn.burst.server import BurstServer
from aionn.burst.session import BurstState
from aionn.errors import DeadObject, ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import DataLocation, ExecutionResult, Memory, OutputShape, Request, RequestArgument

ANSWER_S_MAX = 5


class Ends:
    """Both ends of a burst around an executor that doubles a byte."""

    def __init__(self, result_bytes: int = 1 << 12) -> None:
        self.requests = fmq.MessageQueue.create(1, 1 << 12)
        self.results = fmq.MessageQueue.create(1, result_bytes)
        self.asked: list[list[int]] = []
        self.freed: list[int] = []
        self.executed = 0
        self.execute: Callable[[Request, bool], ExecutionResult] = self._double
        self.controller = BurstController(self.requests, self.results, free_slot=self._free, end=self._end)
        self.server = BurstServer(
            fmq.MessageQueue.attach(self.requests.descriptor, self.requests.fds),
            fmq.MessageQueue.attach(self.results.descriptor, self.results.fds),
            execute=lambda request, measure, deadline_ns, loop_timeout_ns: self.execute(request, measure),
            get_memories=self._memories,
            name="aionn-burst-test",
        )
        self.server.start()

    def _double(self, request: Request, measure: bool) -> ExecutionResult:
        self.executed += 1
        pool = request.pools[0]
        assert isinstance(pool, Memory)
        pool.array[1] = pool.array[0] * 2
        return ExecutionResult(True, (OutputShape((1,)),))

    def _memories(self, slots: Sequence[int]) -> Sequence[Memory]:
        self.asked.append(list(slots))
        return self.controller.memories(slots)

    async def _free(self, slot: int) -> None:
        self.freed.append(slot)
        self.server.free_slot(slot)

    async def _end(self) -> None:
        await anyio.to_thread.run_sync(self.server.stop)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    both = Ends()
    yield both
    await both.controller.aclose()
    both.server.stop()


@pytest.fixture
def memory() -> Memory:
    return Memory.create(64)


def doubling(memory: Memory) -> Request:
    return Request(
        (RequestArgument(False, DataLocation(0, 0, 1)),),
        (RequestArgument(False, DataLocation(0, 1, 1)),),
        (memory,),
    )


async def test_memory_is_asked_for_once_and_again_after_a_release(ends: Ends, memory: Memory) -> None:
    memory.array[0] = 21
    for _ in range(3):
        result = await ends.controller.execute_synchronously(doubling(memory), [0])
    assert memory.array[1] == 42 and result.output_shapes == (OutputShape((1,)),)
    assert ends.asked == [[0]]
    await ends.controller.release_memory_resource(0)
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert ends.asked == [[0], [0]] and ends.freed == [0]


async def test_memory_that_is_not_remembered_is_asked_for_every_time(ends: Ends, memory: Memory) -> None:
    for _ in range(3):
        await ends.controller.execute_synchronously(doubling(memory), [-1])
    assert len(ends.asked) == 3


async def test_status_of_the_driver_becomes_the_error(ends: Ends, memory: Memory) -> None:
    def refuse(request: Request, measure: bool) -> ExecutionResult:
        raise InvalidArgument("no")

    ends.execute = refuse
    with pytest.raises(InvalidArgument, match="INVALID_ARGUMENT"):
        await ends.controller.execute_synchronously(doubling(memory), [0])
    ends.execute = lambda request, measure: ExecutionResult(False, (OutputShape((0,), False),))
    result = await ends.controller.execute_synchronously(doubling(memory), [0])
    assert not result.output_sufficient_size


@pytest.mark.parametrize("identifiers", [[], [0, 1], [-2]])
async def test_illegal_identifiers_are_refused_before_anything_is_sent(
    ends: Ends, memory: Memory, identifiers: list[int]
) -> None:
    with pytest.raises(InvalidArgument, match="memory identifiers"):
        await ends.controller.execute_synchronously(doubling(memory), identifiers)
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert ends.executed == 1


async def test_second_execution_at_once_is_refused(ends: Ends, memory: Memory) -> None:
    hold = threading.Event()

    def wait(request: Request, measure: bool) -> ExecutionResult:
        hold.wait(ANSWER_S_MAX)
        return ExecutionResult()

    ends.execute = wait
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.controller.execute_synchronously, doubling(memory), [0])
        while ends.controller.state != BurstState.IN_FLIGHT:
            await anyio.lowlevel.checkpoint()
        with pytest.raises(InvalidArgument, match="cannot send while in flight"):
            await ends.controller.execute_synchronously(doubling(memory), [0])
        hold.set()


async def test_request_larger_than_the_queue_is_refused_not_blocked(ends: Ends, memory: Memory) -> None:
    request = Request((RequestArgument(False, DataLocation(0, 0, 1)),) * 1000, (), (memory,))
    with anyio.fail_after(ANSWER_S_MAX), pytest.raises(ResourceExhausted, match="does not fit the queue"):
        await ends.controller.execute_synchronously(request, [0])


async def test_unknown_slot_and_garbage_are_answered_and_the_burst_goes_on(
    ends: Ends, memory: Memory
) -> None:
    packet = encode_request(doubling(memory), [2**31 - 1], measure=False)
    for hostile in (packet, b"\xc1 garbage", b"", b"\x90"):
        assert ends.requests.write_message(hostile)
        with anyio.fail_after(ANSWER_S_MAX):
            answer = decode_result(await fmq.aio.read_message(ends.results))
        assert answer.status != ErrorStatus.NONE and answer.output_shapes == ()
    await ends.controller.execute_synchronously(doubling(memory), [0])


async def test_result_that_does_not_fit_is_answered_shortly(memory: Memory) -> None:
    ends = Ends(result_bytes=64)
    try:
        ends.execute = lambda request, measure: ExecutionResult(True, (OutputShape((1, 2, 3, 4)),) * 100)
        with anyio.fail_after(ANSWER_S_MAX), pytest.raises(GeneralFailure, match="GENERAL_FAILURE"):
            await ends.controller.execute_synchronously(doubling(memory), [0])
    finally:
        await ends.controller.aclose()


async def test_death_ends_the_pending_call_and_every_later_one(ends: Ends, memory: Memory) -> None:
    hold = threading.Event()

    def wait(request: Request, measure: bool) -> ExecutionResult:
        hold.wait(ANSWER_S_MAX)
        return ExecutionResult()

    ends.execute = wait
    async with anyio.create_task_group() as tasks:

        async def pending() -> None:
            with pytest.raises(DeadObject, match="unplugged"):
                await ends.controller.execute_synchronously(doubling(memory), [0])

        tasks.start_soon(pending)
        await anyio.sleep(0.01)
        ends.controller.peer_died("unplugged")
    hold.set()
    with pytest.raises(DeadObject, match="unplugged"):
        await ends.controller.execute_synchronously(doubling(memory), [0])


async def test_repeated_request_is_sent_again_and_a_changed_one_is_not_mistaken_for_it(
    ends: Ends, memory: Memory
) -> None:
    request = doubling(memory)
    for value in (3, 4):
        memory.array[0] = value
        await ends.controller.execute_synchronously(request, [0])
        assert memory.array[1] == 2 * value
    other = Memory.create(64)
    other.array[0] = 9
    await ends.controller.execute_synchronously(doubling(other), [1])
    assert other.array[1] == 18 and ends.asked == [[0], [1]]
    await ends.controller.release_memory_resource(0)
    await ends.controller.execute_synchronously(request, [0])
    assert ends.asked == [[0], [1], [0]]

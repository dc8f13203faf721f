"""Controller and server over real queues in one process: answers, hostile requests, small result queues, death."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest

import fmq
from aionn.burst import server as server_module
from aionn.burst.packets import ExecutionLimits, decode_result, encode_request, serialize_request
from aionn.burst.server import ARGUMENT_BYTES, BurstServer
from aionn.burst.session import BurstState
from aionn.errors import DeadObject, ErrorStatus, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import DataLocation, ExecutionResult, LaunchBase, Memory, OutputShape, Request, RequestArgument
from fmq.descriptor import Grantor
from tests.aionn.burst.both_ends import ANSWER_S_MAX, CountedTurns, Ends, doubling
from tests.support.cancellation import NATIVE_COUNTS, cancelled_natively


async def test_memory_is_asked_for_once_and_again_after_a_release(ends: Ends, memory: Memory) -> None:
    memory.array[0] = 21
    for _ in range(3):
        result = await ends.controller.execute_synchronously(doubling(memory), [0])
    assert memory.array[1] == 42 and result.output_shapes == (OutputShape((1,)),)
    assert ends.asked == [[0]]
    await ends.controller.release_memory_resource(0)
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert ends.asked == [[0], [0]] and ends.freed == [0]


async def test_what_takes_longer_than_the_window_is_looked_for_less_and_less(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Ends(polling_ns=1000)
    looked_for = [False]

    def look(window_ns: int) -> None:
        """The result is never here within the window. In real time it is, where the thread has no processor while it looks."""
        looked_for[-1] = True

    monkeypatch.setattr(both.results, "read_message_blocking", look)
    for _ in range(40):
        await both.controller.execute_synchronously(doubling(memory), [0])
        looked_for.append(False)
    assert [count for count, was_looked_for in enumerate(looked_for) if was_looked_for] == [
        0,
        2,
        5,
        10,
        19,
        36,
    ]
    await both.controller.aclose()
    both.server.stop()


async def test_memory_that_is_not_remembered_is_asked_for_every_time(ends: Ends, memory: Memory) -> None:
    for _ in range(3):
        await ends.controller.execute_synchronously(doubling(memory), [-1])
    assert len(ends.asked) == 3


async def test_memory_that_is_not_remembered_is_let_go_with_its_result(ends: Ends, memory: Memory) -> None:
    request = doubling(memory)
    for value in (3, 4, 5):
        memory.array[0] = value
        await ends.controller.execute_synchronously(request, [-1])
        assert memory.array[1] == 2 * value
        assert ends.freed == [slot for (slot,) in ends.asked]
    assert len(ends.asked) == 3


async def test_memory_that_is_freed_while_its_request_is_learnt_is_not_remembered(memory: Memory) -> None:
    def bind(request: Request) -> Request:
        if len(both.asked) == 1:
            both.server.free_slot(0)
        return request

    both = Ends(bind=bind)
    for _ in range(3):
        await both.controller.execute_synchronously(doubling(memory), [0])
    assert both.asked == [[0], [0]]
    await both.controller.aclose()


class StoppedWhileReading:
    """A queue of requests whose reader is stopped in the moment in which one comes."""

    def __init__(self, queue: fmq.MessageQueue, stop: Callable[[], None]) -> None:
        self._queue = queue
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def read_message_blocking(self, timeout_ns: int | None) -> bytes | None:
        payload = self._queue.read_message_blocking(timeout_ns)
        self._stop()
        return payload


async def test_request_that_comes_with_the_stop_is_not_executed(memory: Memory) -> None:
    queues = [fmq.MessageQueue.create(1, 1 << 12) for _ in range(2)]
    executed: list[object] = []
    stopped = threading.Event()

    def execute(*asked: object) -> ExecutionResult:
        executed.append(asked)
        return ExecutionResult()

    server = BurstServer(
        StoppedWhileReading(queues[0], lambda: server.begin_stop()),  # type: ignore[arg-type]
        queues[1],
        execute=execute,
        get_memories=lambda slots: [memory],
        on_stopped=stopped.set,
        name="aionn-burst-test",
    )
    assert queues[0].write_message(encode_request(doubling(memory), [0], measure=False))
    server.start()
    assert await anyio.to_thread.run_sync(stopped.wait, ANSWER_S_MAX)
    server.stop()
    assert executed == []


async def test_release_of_an_unknown_memory_does_nothing(ends: Ends, memory: Memory) -> None:
    await ends.controller.execute_synchronously(doubling(memory), [0])
    for identifier in (-1, 7):
        await ends.controller.release_memory_resource(identifier)
    with pytest.raises(InvalidArgument, match="at least -1, got -2"):
        await ends.controller.release_memory_resource(-2)
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert ends.asked == [[0]] and ends.freed == []


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limits", [{}, {"loop_timeout_ns": 1}])
async def test_request_larger_than_the_queue_goes_through_the_model(
    memory: Memory, limits: dict[str, Any]
) -> None:
    launched: list[tuple[Request, int | None]] = []

    class Launching:
        def launch(self, request: Request, **asked: Any) -> Any:
            launched.append((request, asked["loop_timeout_ns"]))
            launch = LaunchBase()
            launch.finish(ExecutionResult())
            return launch

    ends = Ends(model=Launching())
    ends.execute = lambda request, measure: ExecutionResult()
    try:
        for identifier in (0, -1, 0):
            launched.clear()
            for count in range(445, 460):  # At one of these numbers the packet ceases to fit.
                request = Request((RequestArgument(False, DataLocation(0, 0, 1)),) * count, (), (memory,))
                await ends.controller.execute_synchronously(request, [identifier], **limits)
            assert 1 < len(launched) < 14 and launched[0][1] == limits.get("loop_timeout_ns")
            assert launched[-1][0].pools == (memory,)
    finally:
        await ends.controller.aclose()


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


async def test_packets_that_had_to_be_decoded_take_turns_and_remembered_ones_do_not(
    ends: Ends, memory: Memory
) -> None:
    request = doubling(memory)
    for measure in (False, False, False, True, False):
        await ends.controller.execute_synchronously(request, [0], measure=measure)
    # One before the client is asked for the memory and one after it, and one for the packet that measures.
    assert len(ends.turns.used_ns) == 3 and ends.turns.succeeded == 2


@pytest.mark.parametrize("is_known", [False, True])
async def test_packet_that_fails_takes_a_turn_also_if_it_is_remembered(
    is_known: bool, ends: Ends, memory: Memory
) -> None:
    def fail(request: Request, measure: bool) -> ExecutionResult:
        raise GeneralFailure("the engine failed")

    request, right = doubling(memory), ends.execute
    await ends.controller.execute_synchronously(request, [0], measure=True)
    if is_known:
        await ends.controller.execute_synchronously(request, [0])
    ends.turns.used_ns.clear()
    ends.turns.succeeded = 0
    ends.execute = fail
    for _ in range(3):
        with pytest.raises(GeneralFailure, match="engine failed"):
            await ends.controller.execute_synchronously(request, [0])
    ends.execute = right
    await ends.controller.execute_synchronously(request, [0])  # Before it is read the turns were taken.
    assert ends.turns.used_ns.count(None) == 3
    assert len(ends.turns.used_ns) == (3 if is_known else 4) and ends.turns.succeeded == 0


async def test_malformed_packet_takes_a_turn_for_its_decoding_and_one_for_its_failure(ends: Ends) -> None:
    for _ in range(2):
        assert ends.requests.write_message(b"\x91")
        assert await anyio.to_thread.run_sync(ends.results.read_message_blocking, ANSWER_S_MAX * 10**9)
    assert None in ends.turns.used_ns and len(ends.turns.used_ns) >= 3 and not ends.turns.held


class TakenTurns(CountedTurns):
    """The turn is another burst's, for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self._woken = threading.Semaphore(0), threading.Event()

    def take(self, is_ending: Callable[[], bool]) -> bool:
        self.asked.release()
        while not is_ending():
            assert self._woken.wait(ANSWER_S_MAX)
        return False

    def wake(self) -> None:
        self._woken.set()


@pytest.mark.parametrize("how", ["drain", "stop"])
async def test_packet_that_waits_for_its_turn_does_not_delay_the_end_of_its_burst(
    how: str, memory: Memory
) -> None:
    turns = TakenTurns()
    both = Ends(turns=turns)
    assert both.requests.write_message(encode_request(doubling(memory), [0], measure=False))
    assert await anyio.to_thread.run_sync(lambda: turns.asked.acquire(timeout=ANSWER_S_MAX))
    if how == "drain":
        both.server.drain("the device is put away")
        answer = await anyio.to_thread.run_sync(both.results.read_message_blocking, ANSWER_S_MAX * 10**9)
        assert answer is not None
        result = decode_result(answer)
        assert result.status == ErrorStatus.DEVICE_UNAVAILABLE
        assert result.texts is not None and "put away" in result.texts.message
    both.server.begin_stop()
    await anyio.to_thread.run_sync(both.server._thread.join, ANSWER_S_MAX)
    assert not both.server._thread.is_alive() and both.executed == 0
    await both.controller.aclose()


def _rejected(both: Ends) -> None:
    answer = both.results.read_message_blocking(ANSWER_S_MAX * 10**9)
    assert answer is not None and decode_result(answer).status == ErrorStatus.DEVICE_UNAVAILABLE


async def test_packet_that_is_rejected_while_the_server_drains_takes_a_turn(
    ends: Ends, memory: Memory
) -> None:
    packet = encode_request(doubling(memory), [0], measure=False)
    ends.server.drain("the device is put away")
    for _ in range(3):
        assert ends.requests.write_message(packet)
        await anyio.to_thread.run_sync(_rejected, ends)
    await anyio.to_thread.run_sync(ends.server.stop)
    assert ends.turns.used_ns in ([None] * 2, [None] * 3) and ends.executed == 0


async def test_packet_that_comes_in_the_pause_of_a_draining_server_is_answered_when_it_stops(
    memory: Memory,
) -> None:
    class Pausing(TakenTurns):
        def failed(self, is_ending: Callable[[], bool]) -> None:
            assert not self.take(is_ending)

    turns = Pausing()
    both = Ends(turns=turns)
    packet = encode_request(doubling(memory), [0], measure=False)
    both.server.drain("the device is put away")
    turns._woken.clear()
    assert both.requests.write_message(packet)
    await anyio.to_thread.run_sync(_rejected, both)
    assert await anyio.to_thread.run_sync(lambda: turns.asked.acquire(timeout=ANSWER_S_MAX))
    assert both.requests.write_message(packet)
    both.server.begin_stop()
    await anyio.to_thread.run_sync(_rejected, both)
    await anyio.to_thread.run_sync(both.server.stop)
    assert both.executed == 0
    await both.controller.aclose()


async def test_time_of_an_execution_is_not_the_time_of_its_packet(ends: Ends, memory: Memory) -> None:
    engine_ns = 20_000_000

    def compute(request: Request, measure: bool) -> ExecutionResult:
        end_ns = time.thread_time_ns() + engine_ns
        while time.thread_time_ns() < end_ns:
            pass
        return ExecutionResult()

    ends.execute = compute
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert len(ends.turns.used_ns) == 2 and all(
        ns is not None and ns < engine_ns for ns in ends.turns.used_ns
    )


async def test_remembered_requests_have_a_bound_in_bytes(
    ends: Ends, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes some bytes of its packet and those of its two arguments."""
    packet_bytes = len(encode_request(doubling(memory), [0], measure=False))
    each = packet_bytes + 2 * ARGUMENT_BYTES
    monkeypatch.setattr(server_module, "REMEMBERED_BYTES_MAX", 3 * each)
    requests = [doubling(memory, at) for at in range(2, 6)]
    for request in requests[:3]:
        await ends.controller.execute_synchronously(request, [0])
    assert len(ends.server._remembered) == 3
    await ends.controller.execute_synchronously(requests[3], [0])
    assert len(ends.server._remembered) == 1
    for request in requests[:2]:
        await ends.controller.execute_synchronously(request, [0])
    assert len(ends.server._remembered) == 3


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


async def test_limits_reach_the_executor_and_do_not_make_a_request_another_one(
    ends: Ends, memory: Memory
) -> None:
    request, later_ns = doubling(memory), time.monotonic_ns() + 10**12
    limits = [(None, None), (later_ns, None), (later_ns + 1, 5), (None, 7), (None, None), (later_ns, None)]
    for deadline_ns, loop_timeout_ns in limits:
        await ends.controller.execute_synchronously(
            request, [0], deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
        )
    assert ends.limits == limits and ends.asked == [[0]]
    # With limits or without, the request is known by its bytes.
    assert len(ends.server._remembered) == 2


async def test_limits_in_a_shorter_form_of_their_numbers_are_legal(ends: Ends, memory: Memory) -> None:
    await ends.controller.execute_synchronously(doubling(memory), [0])
    datums = serialize_request(doubling(memory), [0], measure=False)
    datums[0] = msgspec.structs.replace(datums[0], packet_size=len(datums) + 1)
    payload = msgspec.msgpack.encode([*datums, ExecutionLimits(2**63 - 1, 7)])
    for _ in range(2):
        assert ends.requests.write_message(payload)
        with anyio.fail_after(ANSWER_S_MAX):
            answer = decode_result(await fmq.aio.read_message(ends.results))
        assert answer.status == ErrorStatus.NONE
    assert ends.limits[1:] == [(2**63 - 1, 7)] * 2


async def test_packet_cut_before_its_limits_is_refused_though_its_bytes_are_known(
    ends: Ends, memory: Memory
) -> None:
    request = doubling(memory)
    await ends.controller.execute_synchronously(request, [0], loop_timeout_ns=7)
    (head,) = ends.server._remembered
    assert ends.requests.write_message(head)
    with anyio.fail_after(ANSWER_S_MAX):
        answer = decode_result(await fmq.aio.read_message(ends.results))
    assert answer.status == ErrorStatus.GENERAL_FAILURE and ends.executed == 1
    await ends.controller.execute_synchronously(request, [0], loop_timeout_ns=7)


async def test_whatever_the_executor_raises_is_answered(
    ends: Ends, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Request, measure: bool) -> ExecutionResult:
        raise ZeroDivisionError("a bug")

    right, ends.execute = ends.execute, fail
    with anyio.fail_after(ANSWER_S_MAX), pytest.raises(GeneralFailure):
        await ends.controller.execute_synchronously(doubling(memory), [0])
    assert "a bug" in caplog.text
    ends.execute = right
    await ends.controller.execute_synchronously(doubling(memory), [0])


async def test_result_that_is_no_packet_is_a_failure_of_the_driver(ends: Ends, memory: Memory) -> None:
    ends.server.stop()
    driver = fmq.MessageQueue.attach(ends.results.descriptor, ends.results.fds)
    driver.write_message(b"\xc1 garbage")
    with pytest.raises(GeneralFailure, match="cannot be read"):
        await ends.controller.execute_synchronously(doubling(memory), [0])
    driver.close()


async def test_corrupt_queue_ends_the_server_which_tells_its_owner(ends: Ends, memory: Memory) -> None:
    await ends.controller.execute_synchronously(doubling(memory), [0])
    place = ends.requests.descriptor.grantors[Grantor.WRITEPTR]
    with mmap.mmap(ends.requests.fds[0], os.fstat(ends.requests.fds[0]).st_size) as shared:
        shared[place.offset : place.offset + 8] = struct.pack("<Q", 2**62 + 3)
        with anyio.fail_after(ANSWER_S_MAX):
            while not ends.ended:
                await anyio.sleep(0.005)
    assert len(ends.ended) == 1 and "expected" in ends.ended[0]


async def test_server_may_be_stopped_by_what_it_executes(ends: Ends, memory: Memory) -> None:
    stopped = threading.Event()

    def stop(request: Request, measure: bool) -> ExecutionResult:
        ends.server.stop()
        stopped.set()
        return ExecutionResult()

    ends.execute = stop
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.controller.execute_synchronously, doubling(memory), [0])
        assert await anyio.to_thread.run_sync(stopped.wait, ANSWER_S_MAX)
        tasks.cancel_scope.cancel()
    await anyio.to_thread.run_sync(ends.server._thread.join, ANSWER_S_MAX)
    assert not ends.server._thread.is_alive() and ends.ended == []


async def test_server_that_was_never_started_may_be_stopped() -> None:
    queues = [fmq.MessageQueue.create(1, 1 << 12) for _ in range(2)]
    server = BurstServer(
        *queues, execute=lambda *asked: ExecutionResult(), get_memories=lambda slots: (), name="t"
    )
    server.stop()
    assert all(queue.closed for queue in queues)


async def test_stopped_server_tells_nobody(ends: Ends) -> None:
    await anyio.to_thread.run_sync(ends.server.stop)
    assert ends.ended == []


async def test_memories_rest_once_and_never_while_a_request_is_served(ends: Ends, memory: Memory) -> None:
    hold, begun = threading.Event(), threading.Event()

    def wait(request: Request, measure: bool) -> ExecutionResult:
        begun.set()
        hold.wait(ANSWER_S_MAX)
        return ExecutionResult()

    right = ends.execute
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert not ends.server.rest(1e9)
    ends.execute = wait
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.controller.execute_synchronously, doubling(memory), [0])
        await anyio.to_thread.run_sync(begun.wait, ANSWER_S_MAX)
        assert not ends.server.rest(0.0)
        hold.set()
    ends.execute = right
    assert ends.server.rest(0.0) and not ends.server.rest(0.0)
    await ends.controller.execute_synchronously(doubling(memory), [0])
    assert ends.asked == [[0], [0]] and ends.server.rest(0.0)


@pytest.mark.parametrize("count", NATIVE_COUNTS)
async def test_closing_that_is_cancelled_ends_the_driver_end_first(count: int) -> None:
    both = Ends()
    ended: list[str] = []

    async def end() -> None:
        await both._end()
        ended.append("ended")

    both.controller._end = end
    await cancelled_natively(both.controller.aclose(), count)
    assert ended == ["ended"]
    assert both.controller.state == BurstState.CLOSED


async def test_executor_that_ends_its_thread_gives_an_answer(ends: Ends, memory: Memory) -> None:
    def end(request: Request, measure: bool) -> ExecutionResult:
        raise SystemExit(3)

    execute, ends.execute = ends.execute, end
    with anyio.fail_after(ANSWER_S_MAX):
        with pytest.raises(GeneralFailure, match="the driver answered GENERAL_FAILURE"):
            await ends.controller.execute_synchronously(doubling(memory), [0])
        ends.execute = execute
        assert (await ends.controller.execute_synchronously(doubling(memory), [0])).output_sufficient_size

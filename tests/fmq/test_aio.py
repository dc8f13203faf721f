"""Awaiting queues and event flags: on asyncio's loop and on uvloop, with threads and processes at the other end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import fmq

Make = Callable[..., fmq.MessageQueue]
SECOND_NS = 1_000_000_000
WATCHDOG_S = 30


def loops() -> list[Any]:
    found = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    try:
        import uvloop

        uvloop.new_event_loop().close()  # opens pipes that the library keeps for the process
        found.append(pytest.param(uvloop.new_event_loop, id="uvloop"))
    except ImportError:
        found.append(pytest.param(None, id="uvloop", marks=pytest.mark.skip("uvloop is not installed")))
    return found


@pytest.fixture(params=loops())
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on a loop of the kind, with a watchdog."""

    def call(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(coroutine, WATCHDOG_S))

    return call


async def asleep(queue: fmq.MessageQueue) -> None:
    """Until a task waits in the endpoint."""
    before = queue.statistics().park_count
    while queue.statistics().park_count == before:
        await asyncio.sleep(0)


def test_messages_echo_between_two_tasks(make: Make, join: Any, run: Any) -> None:
    there, back = make(1, 4096), make(1, 4096)
    there_reader, back_reader = join(there), join(back)

    async def echo() -> None:
        while message := await fmq.aio.read_message(there_reader):
            await fmq.aio.write_message(back, message)

    async def main() -> None:
        task = asyncio.create_task(echo())
        for index in range(300):
            message = bytes([index & 0xFF]) * (1 + index * 13 % 4000)
            await fmq.aio.write_message(there, message)
            assert await fmq.aio.read_message(back_reader) == message
        await fmq.aio.write_message(there, b"")
        await task

    run(main())


def test_every_awaitable_moves_elements(make: Make, join: Any, run: Any) -> None:
    queue = make(4, 8)
    reader = join(queue)

    async def main() -> None:
        into, both = bytearray(4), bytearray(8)
        reads: list[tuple[Coroutine[Any, Any, Any], Any]] = [
            (fmq.aio.read(reader), b"aaaa"),
            (fmq.aio.read_many(reader, 2), b"bbbbcccc"),
            (fmq.aio.read_into(reader, into), None),
            (fmq.aio.read_many_into(reader, both), None),
        ]
        writes = [b"aaaa", b"bbbbcccc", b"dddd", b"eeeeffff"]
        for (read, expected), elements in zip(reads, writes, strict=True):
            task = asyncio.create_task(read)
            await asleep(reader)
            await fmq.aio.write_many(queue, elements)
            assert await task == expected
        assert (into, both) == (b"dddd", b"eeeeffff")
        await fmq.aio.write_many(queue, bytes(32))
        for write, count in ((fmq.aio.write(queue, bytes(4)), 1), (fmq.aio.write_many(queue, bytes(16)), 4)):
            task = asyncio.create_task(write)
            await asleep(queue)
            assert not task.done()
            assert reader.read_many(count) is not None
            await task
        await fmq.aio.wait_readable(reader, 8)
        waiting = asyncio.create_task(fmq.aio.wait_writable(queue, 3))
        await asleep(queue)
        assert reader.read_many(3) is not None
        await waiting

    run(main())


def test_one_end_may_be_a_thread(make: Make, join: Any, background: Any, run: Any) -> None:
    requests, results = make(1, 1024), make(1, 1024)
    listener_requests, listener_results = join(requests), join(results)

    def listen() -> int:
        count = 0
        while message := listener_requests.read_message_blocking(WATCHDOG_S * SECOND_NS):
            assert listener_results.write_message_blocking(message[::-1], WATCHDOG_S * SECOND_NS)
            count += 1
        return count

    listener = background(listen)

    async def main() -> None:
        for index in range(500):
            await fmq.aio.write_message(requests, b"%d" % index)
            assert await fmq.aio.read_message(results) == (b"%d" % index)[::-1]
        await fmq.aio.write_message(requests, b"")

    run(main())
    assert listener.result() == 500


@pytest.mark.sampled(2)
def test_one_end_may_be_a_process(make: Make, peer: Any, run: Any) -> None:
    there, back = make(1, 4096), make(1, 4096)
    other = peer(there, back)
    other.begin(f"wait_all(queues[0], 1, 5000, {20 * SECOND_NS})")

    async def main() -> None:
        for index in range(300):
            await fmq.aio.write_message(there, b"%d" % index * 50)
            assert await fmq.aio.read_message(back) == b"%d" % index * 50
        await fmq.aio.write_message(there, b"")

    run(main())
    assert other.finish() == 300


@pytest.mark.sampled(2)
def test_a_full_queue_holds_the_writer_back(make: Make, peer: Any, run: Any) -> None:
    queue = make(1, 256)
    other = peer(queue)
    other.begin("repeat(lambda: queue.read_message_blocking(20 * 10**9), 2000)")

    async def main() -> None:
        for _ in range(2000):
            await fmq.aio.write_message(queue, bytes(range(100)))

    run(main())
    assert other.finish() == 2000


def test_no_wakes_while_the_reader_is_awake(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 65536)
    reader = join(queue)

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        for _ in range(100):
            assert queue.write_message(b"x")
        await task
        for _ in range(99):
            assert await fmq.aio.read_message(reader) == b"x"

    run(main())
    assert queue.statistics().wake_count == 1


def test_a_cancelled_read_takes_nothing(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 256)
    reader = join(queue)

    async def main() -> None:
        for index in range(20):
            task = asyncio.create_task(fmq.aio.read_message(reader))
            await asleep(reader)
            if index % 2:
                assert queue.write_message(b"x")  # the wake and the cancellation race
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if index % 2:
                assert await fmq.aio.read_message(reader) == b"x"
        assert queue.write_message(b"last")
        assert await fmq.aio.read_message(reader) == b"last"

    run(main())


def test_a_cancelled_write_writes_nothing(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 16)
    reader = join(queue)

    async def main() -> None:
        await fmq.aio.write_message(queue, b"first")
        task = asyncio.create_task(fmq.aio.write_message(queue, b"second"))
        await asleep(queue)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reader.read_message() == b"first"
        assert reader.read_message() is None

    run(main())


def test_a_second_task_on_the_same_side_is_refused(make: Make, run: Any) -> None:
    queue = make(1, 256)

    async def main() -> None:
        first = asyncio.create_task(fmq.aio.read_message(queue))
        await asleep(queue)
        with pytest.raises(fmq.InvalidArgument, match="one task to read this endpoint at a time"):
            await fmq.aio.read_message(queue)
        assert queue.write_message(b"x")
        assert await first == b"x"

    run(main())


def test_a_reader_gives_message_after_message(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 256)
    reader = join(queue)

    async def main() -> None:
        messages = fmq.aio.message_reader(reader)

        async def take(count: int) -> list[bytes]:
            return [await messages for _ in range(count)]

        task = asyncio.create_task(take(3))
        for message in (b"first", b"second", b"third"):
            await asleep(reader)
            assert queue.write_message(message)
        assert await task == [b"first", b"second", b"third"]
        task = asyncio.create_task(take(1))
        await asleep(reader)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.write_message(b"kept")
        assert await messages == b"kept"

    run(main())


def test_a_reader_whose_loop_has_left_the_queue_is_refused(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 256)
    reader = join(queue)

    async def made() -> Any:
        return fmq.aio.message_reader(reader)

    async def main(left: Any) -> None:
        fmq.aio.message_reader(reader)
        with pytest.raises(fmq.InvalidArgument, match="one that has left it"):
            await left
        assert queue.write_message(b"x")
        assert await left == b"x"

    run(main(run(made())))


def test_only_the_reading_side_of_a_queue_has_a_reader(make: Make, run: Any) -> None:
    queue = make(1, 256)

    async def main() -> None:
        native = fmq.aio.MessageReader
        watch = fmq.watch.LoopWatch(asyncio.get_running_loop(), queue.fds[-1], False)
        for arguments in ((queue, watch), (watch, watch), (queue, queue)):
            with pytest.raises(fmq.InvalidArgument, match="the watch of its reading side"):
                native(*arguments)
        with pytest.raises(fmq.InvalidArgument, match="not initialised"):
            await native.__new__(native)
        watch.leave()

    run(main())


def test_an_await_goes_on_after_a_forked_child_has_ended_its_copy(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 4096)
    reader = join(queue)

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        await asyncio.sleep(0.01)  # uvloop registers at the end of a turn.
        child = os.fork()
        if child == 0:
            watch = reader._watches[True]
            watch.cancel()
            watch.leave()
            os._exit(0)
        os.waitpid(child, 0)  # noqa: ASYNC222  The child ends immediately.
        wakes = queue.statistics().wake_count
        await fmq.aio.write_message(queue, b"after")
        assert queue.statistics().wake_count == wakes + 1, "the reader still counts as asleep"
        assert await task == b"after"

    run(main())


def test_closing_ends_an_await(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 256)

    async def main() -> None:
        reader = join(queue)
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        reader.close()
        with pytest.raises(fmq.ClosedQueue):
            await task
        with pytest.raises(fmq.ClosedQueue):
            await fmq.aio.read_message(reader)

    before = sorted(os.listdir("/proc/self/fd"))
    run(main())
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_closing_from_another_thread_ends_an_await(make: Make, join: Any, background: Any, run: Any) -> None:
    queue = make(1, 256)

    async def main() -> None:
        reader = join(queue)
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        closing = background(reader.close)
        with pytest.raises(fmq.ClosedQueue):
            await task
        closing.result()

    before = sorted(os.listdir("/proc/self/fd"))
    run(main())
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_interrupt_ends_an_await(make: Make, join: Any, background: Any, run: Any) -> None:
    reader = join(make(1, 256))

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        background(reader.interrupt).result()
        with pytest.raises(fmq.InterruptedQueue):
            await task

    run(main())


def test_corruption_ends_an_await(make: Make, join: Any, counters: Any, run: Any) -> None:
    queue = make(4, 64)
    reader = join(queue)

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read(reader))
        await asleep(reader)
        counters(queue)[0:8] = b"\xff" * 8  # found at the next slice at the latest, without any wake
        with pytest.raises(fmq.CorruptQueue):
            await task

    run(main())


def test_an_endpoint_moves_to_the_next_loop(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 256)
    reader = join(queue)

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        assert queue.write_message(b"x")
        assert await task == b"x"

    for _ in range(3):
        run(main())


def test_a_second_running_loop_is_refused(make: Make, join: Any, background: Any, run: Any) -> None:
    reader = join(make(1, 256))

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        other = background(lambda: asyncio.run(fmq.aio.read_message(reader)))
        while other._thread.is_alive():
            await asyncio.sleep(0.001)
        with pytest.raises(fmq.InvalidArgument, match="one event loop"):
            other.result()
        task.cancel()

    run(main())


def test_a_wake_without_data_is_no_data(make: Make, join: Any, run: Any) -> None:
    """A peer that reads or writes the eventfd at will, or fills it and makes it blocking, stops nobody."""
    queue = make(1, 256)
    reader = join(queue)
    event = queue.fds[queue.descriptor.reader_event_index]

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        for _ in range(10):
            os.eventfd_write(event, 1)
            assert os.eventfd_read(event) == 1
            await asleep(reader)
        os.eventfd_write(event, 2**63 - 2)
        os.set_blocking(event, True)
        assert queue.write_message(b"x")
        assert await task == b"x"

    run(main())


@pytest.mark.parametrize("count", [0, 1])
def test_waiting_works_with_eventfds_that_hold_nothing(make: Make, join: Any, run: Any, count: int) -> None:
    """Those of a peer that made them otherwise than this package does: a poke that cannot be told is made up for."""
    queue = make(1, 256)
    events = [os.eventfd(count, os.EFD_CLOEXEC) for _ in range(2)]
    writer = fmq.MessageQueue.attach(queue.descriptor, [queue.fds[0], *events])
    reader = join(writer)
    for event in events:
        os.close(event)

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        assert writer.write_message(b"x")
        assert await task == b"x"

    run(main())
    writer.close()


def test_a_message_published_without_a_wake_is_found(make: Make, join: Any, counters: Any, run: Any) -> None:
    """What a peer leaves behind that dies between publishing and waking."""
    queue = make(1, 256)
    reader = join(queue)

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        park = queue.descriptor.grantors[fmq.Grantor.READER_PARK].offset
        counters(queue)[park : park + 4] = bytes(4)
        assert queue.write_message(b"x")
        assert queue.statistics().wake_count == 0
        assert await task == b"x"

    run(main())


def test_a_poke_wakes_though_the_eventfd_is_read_by_another(make: Make, join: Any, run: Any) -> None:
    queue = make(1, 256)
    reader = join(queue)
    event = queue.fds[queue.descriptor.reader_event_index]

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.read_message(reader))
        await asleep(reader)
        assert queue.write_message(b"x")
        assert os.eventfd_read(event) == 1  # before the loop has looked
        assert await task == b"x"

    run(main())


@pytest.mark.parametrize("kind", ["the C Task", "the Python Task", "debug mode"])
def test_every_kind_of_task_can_wait_and_be_cancelled(make: Make, join: Any, kind: str) -> None:
    queue = make(1, 256)
    reader = join(queue)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        if kind == "the Python Task":
            loop.set_task_factory(
                lambda loop, coro, **options: asyncio.tasks._PyTask(coro, loop=loop, **options)
            )  # type: ignore[attr-defined]
        for _ in range(3):
            task = loop.create_task(fmq.aio.read_message(reader))
            await asleep(reader)
            assert queue.write_message(b"x")
            assert await task == b"x"
            task = loop.create_task(fmq.aio.read_message(reader))
            await asleep(reader)
            task.cancel("enough")
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(main(), WATCHDOG_S), debug=kind == "debug mode")


def test_a_cancel_scope_of_anyio_ends_an_await(make: Make, join: Any, run: Any) -> None:
    anyio = pytest.importorskip("anyio")
    queue = make(1, 256)
    reader = join(queue)

    async def main() -> None:
        with anyio.move_on_after(0.02) as scope:
            await fmq.aio.read_message(reader)
        assert scope.cancelled_caught
        async with anyio.create_task_group() as group:
            group.start_soon(fmq.aio.read_message, reader)
            await asleep(reader)
            group.cancel_scope.cancel()
        assert queue.write_message(b"x")
        assert await fmq.aio.read_message(reader) == b"x"

    run(main())


def test_context_variables_are_the_tasks_own(make: Make, join: Any, run: Any) -> None:
    import contextvars

    variable = contextvars.ContextVar("variable", default="outside")
    queue = make(1, 256)
    reader = join(queue)

    async def wait() -> str:
        variable.set("inside")
        await fmq.aio.read_message(reader)
        return variable.get()

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asleep(reader)
        assert queue.write_message(b"x")
        assert await task == "inside"
        assert variable.get() == "outside"

    run(main())


def test_queues_without_an_event_flag_are_refused(make: Make, run: Any) -> None:
    queue = make(1, 256, event_flag=False)
    with pytest.raises(fmq.InvalidArgument, match="and an event flag"):
        run(fmq.aio.read_message(queue))
    assert queue.write_message(b"x")
    assert run(fmq.aio.read_message(queue)) == b"x"


@pytest.mark.parametrize("count", [-1, 257])
def test_counts_beyond_the_capacity_are_refused(make: Make, run: Any, count: int) -> None:
    queue = make(1, 256)
    for call in (fmq.aio.wait_readable, fmq.aio.wait_writable, fmq.aio.read_many):
        with pytest.raises(fmq.InvalidArgument, match="0 to 256"):
            run(call(queue, count))


# EventFlag


def test_event_flag_is_awaited(make: Make, run: Any) -> None:
    flag = make(1, 16).event_flag

    async def main() -> None:
        task = asyncio.create_task(fmq.aio.wait_event_flag(flag, 0b110))
        await asyncio.sleep(0)
        flag.wake(0b001)
        await asyncio.sleep(0)
        assert not task.done()
        flag.wake(0b011)
        assert await task == 0b010
        assert flag.value == 0b001
        assert await fmq.aio.wait_event_flag(flag, 1, 0) == 1
        assert await fmq.aio.wait_event_flag(flag, 1, 0) == 0
        assert await fmq.aio.wait_event_flag(flag, 1, 20_000_000) == 0

    run(main())


def test_a_cancelled_event_flag_wait_takes_no_bits_and_leaves_no_thread(make: Make, run: Any) -> None:
    import threading

    flag = make(1, 16).event_flag

    async def main() -> None:
        for _ in range(5):
            task = asyncio.create_task(fmq.aio.wait_event_flag(flag, 1))
            await asyncio.sleep(0)
            flag.wake(2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            flag.wake(1)
            assert flag.wait(3, 0) == 3

    before = threading.active_count()
    run(main())
    assert threading.active_count() == before


def test_awaiting_a_mask_of_zero_is_refused(make: Make, run: Any) -> None:
    with pytest.raises(fmq.InvalidArgument, match="at least one bit"):
        run(fmq.aio.wait_event_flag(make(1, 16).event_flag, 0))

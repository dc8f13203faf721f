"""Awaiting a queue or an event flag in asyncio.

Owns the meeting of a queue's eventfds with an event loop, and the bridge to an event flag's futex (which cannot be
polled). Refuses to own the queue: functions take it and leave it open.

Invariants:
1. Nothing is taken or written before the last await of a call, so a cancelled call has had no effect.
2. The loop watches a private epoll, and the eventfd that the peer shares is neither read nor written here, so nothing
   that the peer makes of it blocks.
3. The loop is woken through an eventfd only while a task here has declared itself asleep; otherwise the peer makes no
   system call.
4. One task at a time waits on either side of an endpoint; a second one is refused, since messages have one order.
5. A waiting task looks again every quarter of a second, so a peer that dies between publishing and waking costs delay only.

Works on asyncio's own loops and uvloop. Calls that need not wait do not yield to the loop, as `asyncio.Queue`'s.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from fmq._native import HEADER_BYTES, MESSAGE_ALIGNMENT, MessageReader
from fmq.errors import ClosedQueue, InvalidArgument
from fmq.event_flag import EventFlag
from fmq.queue import MessageQueue
from fmq.watch import LoopWatch

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "MessageReader",
    "message_reader",
    "read",
    "read_into",
    "read_many",
    "read_many_into",
    "read_message",
    "wait_event_flag",
    "wait_readable",
    "wait_writable",
    "write",
    "write_many",
    "write_message",
]


def _watch(queue: MessageQueue, reader: bool) -> LoopWatch:
    watch = queue._watches.get(reader)
    # Not get_running_loop(), which makes a system call on Python 3.11: a loop that runs in this thread is this one.
    if watch is not None and watch.thread == threading.get_ident() and watch.loop.is_running():
        return watch
    if watch is not None and watch.loop.is_running():
        raise InvalidArgument("queue: expected one event loop to wait on this endpoint, got a second one")
    descriptor = queue.descriptor
    index = descriptor.reader_event_index if reader else descriptor.writer_event_index
    if queue.closed:
        raise ClosedQueue("queue: the endpoint is closed")
    if index < 0:
        raise InvalidArgument(
            "queue: waiting in asyncio needs the synchronized flavour and an event flag, got a queue without"
        )
    if watch is not None:
        watch.leave()
    made = LoopWatch(asyncio.get_running_loop(), queue.fds[index], reader)
    queue._watches[reader] = made
    return made


def _message_bytes(size_bytes: int) -> int:
    return HEADER_BYTES + (size_bytes + MESSAGE_ALIGNMENT - 1) // MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT


async def read_message(queue: MessageQueue) -> bytes:
    """Takes the next message, waiting for it. Cancelled, it has taken nothing.

    Raises:
        InterruptedQueue, ClosedQueue, CorruptQueue: See there; also when that happens while waiting.
        InvalidArgument: The quantum is not 1, or another task waits to read this endpoint.
    """
    message = queue.read_message()
    return await message_reader(queue) if message is None else message


def message_reader(queue: MessageQueue) -> MessageReader:
    """For a task that takes many messages of one queue in one event loop: awaiting the result is `read_message` with fewer calls.

    Raises:
        ClosedQueue: The endpoint is closed.
        InvalidArgument: The queue cannot be awaited, or another event loop waits on this endpoint. Awaiting it raises this as well
            once another event loop has waited there.
        OSError: No descriptor is left for the watch of the event loop.
    """
    return MessageReader(queue, _watch(queue, True))


async def write_message(queue: MessageQueue, payload: Buffer) -> None:
    """Appends a message, waiting for room. Cancelled, it has written nothing.

    Raises:
        As `read_message`; InvalidArgument also if the message could never fit.
    """
    while not queue.write_message(payload):
        watch = _watch(queue, False)
        if watch.arm(queue, _message_bytes(memoryview(payload).nbytes)):
            await watch


async def read(queue: MessageQueue) -> bytes:
    """Takes one element, waiting for it. Cancelled, it has taken nothing. Raises as `read_message`."""
    while (element := queue.read()) is None:
        watch = _watch(queue, True)
        if watch.arm(queue, queue.quantum_bytes):
            await watch
    return element


async def read_many(queue: MessageQueue, count: int) -> bytes:
    """Takes exactly `count` elements, waiting for them. Cancelled, it has taken nothing. Raises as `read_message`."""
    while (elements := queue.read_many(count)) is None:
        watch = _watch(queue, True)
        if watch.arm(queue, count * queue.quantum_bytes):
            await watch
    return elements


async def read_into(queue: MessageQueue, buffer: Buffer) -> None:
    """Takes one element into a buffer, waiting for it. Cancelled, it has taken nothing. Raises as `read_message`."""
    while not queue.read_into(buffer):
        watch = _watch(queue, True)
        if watch.arm(queue, queue.quantum_bytes):
            await watch


async def read_many_into(queue: MessageQueue, buffer: Buffer) -> None:
    """Fills a buffer with elements, waiting for all. Cancelled, it has taken nothing. Raises as `read_message`."""
    while not queue.read_many_into(buffer):
        watch = _watch(queue, True)
        if watch.arm(queue, memoryview(buffer).nbytes):
            await watch


async def write(queue: MessageQueue, element: Buffer) -> None:
    """Appends one element, waiting for room. Cancelled, it has written nothing. Raises as `read_message`."""
    while not queue.write(element):
        watch = _watch(queue, False)
        if watch.arm(queue, queue.quantum_bytes):
            await watch


async def write_many(queue: MessageQueue, elements: Buffer) -> None:
    """Appends all elements of a buffer together, waiting for room. Cancelled, it has written nothing.

    Raises:
        As `read_message`; InvalidArgument also for more than the capacity.
    """
    while not queue.write_many(elements):
        watch = _watch(queue, False)
        if watch.arm(queue, memoryview(elements).nbytes):
            await watch


async def wait_readable(queue: MessageQueue, count: int = 1) -> None:
    """Waits until `count` elements (at most the capacity) can be read; takes nothing. Raises as `read_message`."""
    _check_count(queue, count)
    while not queue.wait_readable(count, 0):
        watch = _watch(queue, True)
        if watch.arm(queue, count * queue.quantum_bytes):
            await watch


async def wait_writable(queue: MessageQueue, count: int = 1) -> None:
    """Waits until `count` elements (at most the capacity) can be written; writes nothing. Raises as `read_message`."""
    _check_count(queue, count)
    while not queue.wait_writable(count, 0):
        watch = _watch(queue, False)
        if watch.arm(queue, count * queue.quantum_bytes):
            await watch


def _check_count(queue: MessageQueue, count: int) -> None:
    if not 0 <= count <= queue.count:
        raise InvalidArgument(f"queue: expected a count of 0 to {queue.count} elements, got {count}")


async def wait_event_flag(flag: EventFlag, mask: int, timeout_ns: int | None = None) -> int:
    """Takes bits of an event flag, waiting for at least one of `mask`.

    A thread watches the futex for as long as the wait takes and consumes nothing; the bits are taken here, after the
    last await, so a cancelled wait has taken none. Dearer than a queue's own awaits by the starting of that thread.

    Returns:
        The bits taken; 0 at the timeout (None: never; 0: look once).

    Raises:
        InvalidArgument: A mask of 0 or of more than 32 bits.
        ClosedQueue: The flag is closed.
    """
    bits = flag.wait(mask, 0)
    loop = asyncio.get_running_loop()
    deadline_s = None if timeout_ns is None else loop.time() + timeout_ns / 1e9
    while bits == 0 and (deadline_s is None or loop.time() < deadline_s):
        remaining_ns = None if deadline_s is None else max(0, round((deadline_s - loop.time()) * 1e9))
        await _watched_by_thread(loop, flag, mask, remaining_ns)
        bits = flag.wait(mask, 0)
    return bits


async def _watched_by_thread(
    loop: asyncio.AbstractEventLoop, flag: EventFlag, mask: int, timeout_ns: int | None
) -> None:
    over = loop.create_future()
    interruptions = flag._interruptions

    def finish() -> None:
        if not over.done():
            over.set_result(None)

    def watch() -> None:
        try:
            flag._watch(mask, timeout_ns, interruptions)
        except ClosedQueue:
            pass  # the consuming wait reports it in the task
        finally:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                pass  # the loop was closed under the task

    thread = threading.Thread(target=watch, name="fmq event flag watch", daemon=True)
    thread.start()
    cancelled: asyncio.CancelledError | None = None
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError as error:
            # The thread leaves immediately, or at its next slice if it was between looking and sleeping.
            cancelled = error
            flag._interrupt()
    thread.join()
    if cancelled is not None:
        raise cancelled

"""The two processes of each contender: how it sends and receives, and the loops that are timed.

A contender gives each side its resources (made by the driver, handed over when the process starts) and opens them there
as a `Channel`: a send and a receive for round trips, and where it streams, a put and a take. The loops over them are the
same for all. Every process turns the garbage collector off and touches its memory before it is timed.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import fmq

PAYLOAD = bytes(64)
DEPTH = 1024
"""Messages a stream may be ahead, for every contender that lets one choose."""
BATCH = 64
LARGE_BYTES = 4 << 20
SPIN_NS = 50_000
"""Before sleeping, in the streams of ours; iceoryx2 has nothing but spinning there."""


class Shared:
    """A queue, or a descriptor of the system, on its way to a child process."""

    def __init__(self, queue: fmq.MessageQueue, spin_ns: int) -> None:
        self.queue = queue
        self.spin_ns = spin_ns

    def __reduce__(self) -> tuple[Any, ...]:
        fds = [DupFd(fd) for fd in self.queue.fds]
        return _attach, (self.queue.descriptor.to_bytes(), fds, self.spin_ns)


def _attach(data: bytes, duplicates: list[Any], spin_ns: int) -> fmq.MessageQueue:
    fds = [duplicate.detach() for duplicate in duplicates]
    queue = fmq.MessageQueue.attach(fmq.MQDescriptor.from_bytes(data), fds, spin_ns=spin_ns)
    for fd in fds:
        os.close(fd)
    return queue


class SharedFd:
    """A file descriptor on its way to a child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.fd),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


@dataclass
class Channel:
    """The calls of one side; a contender leaves out those that are not measured."""

    send: Callable[[], object] | None = None
    receive: Callable[[], object] | None = None
    client: Callable[[int], list[float]] | None = None
    server: Callable[[int], object] | None = None
    put: Callable[[int], object] | None = None
    take: Callable[[int], object] | None = None
    keep: Any = None


def round_trips(channel: Channel, count: int, group: int) -> list[float]:
    """Nanoseconds of each round trip, or the mean of each group of them where one is too short for a clock."""
    if channel.client is not None:
        return channel.client(count)
    send, receive, clock = channel.send, channel.receive, time.perf_counter_ns
    assert send is not None and receive is not None
    times = []
    for _ in range(max(1, count // group)):
        began = clock()
        for _ in range(group):
            send()
            receive()
        times.append((clock() - began) / group)
    return times


def serve(channel: Channel, count: int, group: int) -> None:
    """The other side of `round_trips`."""
    if channel.server is not None:
        channel.server(count)
        return
    send, receive = channel.send, channel.receive
    assert send is not None and receive is not None
    for _ in range(max(1, count // group) * group):
        receive()
        send()


def worker(
    opener: Callable[[bool, Any], Channel], client: bool, resources: Any, control: Connection, group: int
) -> None:
    """The life of one process: opens its side, then executes the commands of the driver until that of the end."""
    channel = opener(client, resources)
    gc.collect()
    gc.freeze()
    gc.disable()
    control.send("ready")
    everywhere = os.sched_getaffinity(0)
    while True:
        command, count, core = control.recv()
        if command == "end":
            return
        os.sched_setaffinity(0, everywhere if core is None else {core})
        if command == "round trips" and client:
            times = round_trips(channel, count, group)
            control.send((statistics.median(times), times))
        elif command == "round trips":
            control.send("started")
            serve(channel, count, group)
        elif client:  # a stream: the client receives
            assert channel.take is not None
            channel.take(1)
            began = time.perf_counter_ns()
            channel.take(count)
            control.send(((time.perf_counter_ns() - began) / count, []))
        else:
            control.send("started")
            assert channel.put is not None
            channel.put(count + 1)


# ---- ours ---------------------------------------------------------------------------------------------------------------


def fmq_resources(
    quantum: int = 64, count: int = DEPTH, spin_ns: int = 0
) -> tuple[Any, Any, Callable[[], None]]:
    """Two queues, there and back; the same for both sides."""
    there, back = fmq.MessageQueue.create(quantum, count), fmq.MessageQueue.create(quantum, count)

    def close() -> None:
        there.close()
        back.close()

    shared = (Shared(there, spin_ns), Shared(back, spin_ns))
    return shared, shared, close


def open_fmq_spin(client: bool, queues: Any) -> Channel:
    """Busy waiting in Python over the non-blocking calls."""
    out, into = queues if client else queues[::-1]
    write, read_into, buffer = out.write, into.read_into, bytearray(64)

    def receive() -> None:
        while not read_into(buffer):
            pass

    return Channel(send=functools.partial(write, PAYLOAD), receive=receive)


def open_fmq_blocking(client: bool, queues: Any) -> Channel:
    """Messages, sleeping on the futex."""
    out, into = queues if client else queues[::-1]
    write, read = out.write_message, into.read_message_blocking
    return Channel(send=functools.partial(write, PAYLOAD), receive=functools.partial(read, None))


def open_fmq_large(client: bool, resources: Any) -> Channel:
    """A message in place, reserved there and peeked at here, busy waiting."""
    size, queues = resources
    out, into = queues if client else queues[::-1]
    for queue in queues:
        queue.available_to_read()

    def send() -> None:
        while out.reserve_message(size) is None:
            pass
        out.commit_message(size)

    def receive() -> None:
        while into.peek_message() is None:
            pass
        into.release_message()

    return Channel(send=send, receive=receive)


def open_fmq_stream(client: bool, queues: Any) -> Channel:
    """Single elements; a side that finds nothing to do waits, at first spinning if that has been short of late."""
    queue = queues[0]
    buffer = bytearray(64)
    write, read_into = queue.write, queue.read_into

    def put(count: int) -> None:
        for _ in range(count):
            while not write(PAYLOAD):
                queue.wait_writable(DEPTH // 2, None)

    def take(count: int) -> None:
        for _ in range(count):
            while not read_into(buffer):
                queue.wait_readable(1, None)

    return Channel(put=put, take=take)


def open_fmq_batches(client: bool, queues: Any) -> Channel:
    """Batches of elements, and all that is there for each wake."""
    queue = queues[0]
    batch = PAYLOAD * BATCH

    def put(count: int) -> None:
        while count:
            some = batch if count >= BATCH else PAYLOAD * count
            while not queue.write_many(some):
                queue.wait_writable(DEPTH // 2, None)
            count -= len(some) // 64

    def take(count: int) -> None:
        while count:
            got = len(queue.read_available(min(count, DEPTH))) // 64
            if got == 0:
                queue.wait_readable(1, None)
            count -= got

    return Channel(put=put, take=take)


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """asyncio's own loop, or uvloop's."""
    if kind == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
    return asyncio.new_event_loop()


def open_fmq_aio(client: bool, resources: Any) -> Channel:
    """Both ends await in an event loop."""
    kind, queues = resources
    out, into = queues if client else queues[::-1]
    loop = new_loop(kind)

    async def trips(count: int) -> list[float]:
        times, clock = [], time.perf_counter_ns
        for _ in range(count):
            began = clock()
            await fmq.aio.write(out, PAYLOAD)
            await fmq.aio.read(into)
            times.append(float(clock() - began))
        return times

    async def echo(count: int) -> None:
        for _ in range(count):
            await fmq.aio.write(out, await fmq.aio.read(into))

    return Channel(
        client=lambda count: loop.run_until_complete(trips(count)),
        server=lambda count: loop.run_until_complete(echo(count)),
    )


# ---- the bare eventfd ------------------------------------------------------------------------------------------------------


def eventfd_resources(kind: str) -> tuple[Any, Any, Callable[[], None]]:
    """Two eventfds, there and back."""
    fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
    shared = (kind, SharedFd(fds[0]), SharedFd(fds[1]))

    def close() -> None:
        for fd in fds:
            os.close(fd)

    return shared, shared, close


def open_eventfd(client: bool, resources: Any) -> Channel:
    """The best that a loop can do: a callback of `add_reader` that answers, no task, no data."""
    kind, there, back = resources
    out, into = (there, back) if client else (back, there)
    loop = new_loop(kind)

    def run(count: int) -> list[float]:
        times: list[float] = []
        clock = time.perf_counter_ns
        began = 0

        def echo() -> None:
            os.eventfd_read(into)
            os.eventfd_write(out, 1)
            times.append(0.0)
            if len(times) == count:
                loop.stop()

        def answered() -> None:
            nonlocal began
            os.eventfd_read(into)
            times.append(float(clock() - began))
            if len(times) == count:
                loop.stop()
                return
            began = clock()
            os.eventfd_write(out, 1)

        loop.add_reader(into, answered if client else echo)
        if client:
            began = clock()
            os.eventfd_write(out, 1)
        loop.run_forever()
        loop.remove_reader(into)
        return times

    return Channel(client=run, server=run)


# ---- peers ---------------------------------------------------------------------------------------------------------------


def pipe_resources(context: Any) -> tuple[Any, Any, Callable[[], None]]:
    """multiprocessing.Pipe."""
    client, server = context.Pipe()

    def close() -> None:
        client.close()
        server.close()

    return client, server, close


def open_pipe(client: bool, pipe: Any) -> Channel:
    """Bytes, without pickling."""

    def put(count: int) -> None:
        for _ in range(count):
            pipe.send_bytes(PAYLOAD)

    def take(count: int) -> None:
        for _ in range(count):
            pipe.recv_bytes()

    return Channel(
        send=functools.partial(pipe.send_bytes, PAYLOAD), receive=pipe.recv_bytes, put=put, take=take
    )


def queue_resources(context: Any) -> tuple[Any, Any, Callable[[], None]]:
    """Two multiprocessing.Queues."""
    shared = (context.Queue(DEPTH), context.Queue(DEPTH))

    def close() -> None:
        for queue in shared:
            queue.close()

    return shared, shared, close


def open_queue(client: bool, queues: Any) -> Channel:
    """put and get; the library pickles and has a thread for putting."""
    out, into = queues if client else queues[::-1]

    def put(count: int) -> None:
        for _ in range(count):
            queues[0].put(PAYLOAD)

    def take(count: int) -> None:
        for _ in range(count):
            queues[0].get()

    return Channel(send=functools.partial(out.put, PAYLOAD), receive=into.get, put=put, take=take)


def open_zmq(client: bool, address: Any) -> Channel:
    """A pair of sockets over ipc."""
    import zmq

    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(DEPTH)
    socket.setsockopt(zmq.LINGER, 0)
    if client:
        socket.connect(address)
    else:
        socket.bind(address)

    def put(count: int) -> None:
        for _ in range(count):
            socket.send(PAYLOAD)

    def take(count: int) -> None:
        for _ in range(count):
            socket.recv()

    return Channel(send=functools.partial(socket.send, PAYLOAD), receive=socket.recv, put=put, take=take)


def identity(data: Any) -> Any:
    """Takes the place of pickling."""
    return data


def faster_fifo_resources() -> tuple[Any, Any, Callable[[], None]]:
    """Two faster-fifo queues, spared the pickling of what are bytes already."""
    import faster_fifo

    shared = tuple(
        faster_fifo.Queue(max_size_bytes=DEPTH * 80, loads=identity, dumps=identity) for _ in range(2)
    )
    return shared, shared, lambda: None


def open_faster_fifo(client: bool, queues: Any) -> Channel:
    """put and get, one at a time."""
    out, into = queues if client else queues[::-1]

    def put(count: int) -> None:
        for _ in range(count):
            queues[0].put(PAYLOAD, timeout=60)

    def take(count: int) -> None:
        for _ in range(count):
            queues[0].get(timeout=60)

    return Channel(
        send=functools.partial(out.put, PAYLOAD, timeout=60),
        receive=functools.partial(into.get, timeout=60),
        put=put,
        take=take,
    )


def open_faster_fifo_batches(client: bool, queues: Any) -> Channel:
    """put_many and get_many."""
    queue = queues[0]

    def put(count: int) -> None:
        while count:
            some = [PAYLOAD] * min(BATCH, count)
            queue.put_many(some, timeout=60)
            count -= len(some)

    def take(count: int) -> None:
        while count:
            count -= len(queue.get_many(max_messages_to_get=min(count, DEPTH), timeout=60))

    return Channel(put=put, take=take)


class Iceoryx2Payload(ctypes.Structure):
    """64 bytes, as iceoryx2 wants them."""

    _fields_ = [("data", ctypes.c_uint8 * 64)]

    @staticmethod
    def type_name() -> str:
        """The name both sides must agree on."""
        return "Bytes64"


def _iceoryx2_node() -> tuple[Any, Any]:
    import iceoryx2

    iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
    return iceoryx2, iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)


def open_iceoryx2_pub_sub(client: bool, name: Any) -> Channel:
    """Two services, busy waiting; nothing is overwritten, a full buffer is retried."""
    iceoryx2, node = _iceoryx2_node()

    def service(which: str) -> Any:
        builder = node.service_builder(iceoryx2.ServiceName.new(f"{name}/{which}"))
        builder = builder.publish_subscribe(Iceoryx2Payload).enable_safe_overflow(False)
        return builder.subscriber_max_buffer_size(DEPTH).open_or_create()

    out, into = ("there", "back") if client else ("back", "there")
    services = service(out), service(into)
    publisher = (
        services[0]
        .publisher_builder()
        .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
        .create()
    )
    subscriber = services[1].subscriber_builder().buffer_size(DEPTH).create()
    payload = Iceoryx2Payload()

    def receive() -> None:
        while subscriber.receive() is None:
            pass

    def put(count: int) -> None:
        for _ in range(count):
            publisher.send_copy(payload)

    def take(count: int) -> None:
        for _ in range(count):
            while subscriber.receive() is None:
                pass

    send = functools.partial(publisher.send_copy, payload)
    channel = Channel(send=send, receive=receive, put=put, take=take)
    channel.keep = (node, services)
    return channel


def open_iceoryx2_request(client: bool, name: Any) -> Channel:
    """Request and response, busy waiting."""
    iceoryx2, node = _iceoryx2_node()
    builder = node.service_builder(iceoryx2.ServiceName.new(f"{name}/request"))
    service = builder.request_response(Iceoryx2Payload, Iceoryx2Payload).open_or_create()
    payload = Iceoryx2Payload()
    pending: list[Any] = []
    if client:
        requests = service.client_builder().create()

        def ask() -> None:
            pending[:] = [requests.send_copy(payload)]

        def answered() -> None:
            while pending[0].receive() is None:
                pass

        channel = Channel(send=ask, receive=answered)
    else:
        server = service.server_builder().create()

        def asked() -> None:
            while (request := server.receive()) is None:
                pass
            pending[:] = [request]

        channel = Channel(send=lambda: pending[0].send_copy(payload), receive=asked)
    channel.keep = (node, service)
    return channel


def open_iceoryx2_event(client: bool, name: Any) -> Channel:
    """Notifier and blocking listener; events carry no data."""
    iceoryx2, node = _iceoryx2_node()

    def service(which: str) -> Any:
        return node.service_builder(iceoryx2.ServiceName.new(f"{name}/{which}")).event().open_or_create()

    out, into = ("there", "back") if client else ("back", "there")
    services = service(out), service(into)
    notifier = services[0].notifier_builder().create()
    listener = services[1].listener_builder().create()
    wait = listener.blocking_wait
    channel = Channel(send=notifier.notify, receive=lambda: wait_event(wait))
    channel.keep = (node, services)
    return channel


def wait_event(wait: Callable[[], Any]) -> None:
    """One event; an empty wake is waited on."""
    while not wait():
        pass

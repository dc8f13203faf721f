"""Random descriptors, random calls, and shared words overwritten between any two of them.

The property: whatever happens, a call answers or raises one of the package's errors, and no byte outside of the parts a
descriptor names ever changes. After AOSP's fmq_fuzzer: 0 to 6 grantors with arbitrary places, both flavours, a ring in
memory of its own or not, one writer and up to five readers, waits of 100 microseconds.

In some sessions a second process overwrites the words and the data at full rate, during calls too; a failure in one of those may
need several runs to come again. Everything else depends on the seed alone.

Run as a script for longer: `python tests/fmq/faults/fuzzer.py SEED OPERATIONS`; under a sanitizer:
`python tests/sanitizers.py --fuzz OPERATIONS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import fmq
from fmq.region import create_memory

WAIT_NS = 100_000
GUARD = 0xA5
MEMORY_BYTES = 16384
SESSION_OPERATIONS = 2000
OVERWRITTEN_DURING_CALLS = 0.1
"""Of all sessions, those in which another process overwrites the memory meanwhile: its start takes as long as many calls."""
PROGRESS_S = 10.0


def run(seed: int, operations: int, told: Callable[[Counter[str]], object] = lambda _: None) -> Counter[str]:
    """So many calls; how they ended, by name. `told` is called with that after each session."""
    rng = random.Random(seed)
    endings: Counter[str] = Counter()
    while endings.total() < operations:
        session(rng, min(SESSION_OPERATIONS, operations - endings.total()), endings)
        told(endings)
    return endings


def session(rng: random.Random, operations: int, endings: Counter[str]) -> None:
    """One pair of memories under several attachments."""
    fds = [create_memory("fuzz", MEMORY_BYTES) for _ in range(2)]
    for _ in range(2):
        kind = rng.choice([0, os.EFD_SEMAPHORE])
        fds.append(os.eventfd(rng.choice([0, 1, 2**31]), os.EFD_CLOEXEC | os.EFD_NONBLOCK | kind))
    memories = [mmap.mmap(fd, MEMORY_BYTES) for fd in fds[:2]]
    overwritten = rng.random() < OVERWRITTEN_DURING_CALLS
    try:
        while operations > 0:
            for memory in memories:
                memory[:] = bytes([GUARD]) * MEMORY_BYTES
            descriptor = good_descriptor(rng) if rng.random() < 0.6 or overwritten else any_descriptor(rng)
            with overwriting(rng, descriptor, memories) if overwritten else contextlib.nullcontext():
                spent = attachment(rng, descriptor, fds, memories, operations, endings, overwritten)
            check_guards(descriptor, memories)
            operations -= spent
    finally:
        for memory in memories:
            memory.close()
        for fd in fds:
            os.close(fd)


def good_descriptor(rng: random.Random) -> fmq.MQDescriptor:
    """Parts in a random order at random places, as a valid descriptor may have them."""
    quantum = rng.choice([1, 1, 1, 2, 3, 8, 64])
    extents = [8, 16, quantum * rng.randrange(1, 4000 // quantum + 1), 4, 4, 4][: rng.choice([3, 4, 6, 6, 6])]
    places, ends = {}, [0, 0]
    for part in rng.sample(range(len(extents)), len(extents)):
        fd = rng.randrange(2)
        offset = (ends[fd] + 7) // 8 * 8 + 8 * rng.randrange(4)
        places[part] = fmq.GrantorDescriptor(fd, offset, extents[part])
        ends[fd] = offset + extents[part]
    events = (2, 3) if len(extents) == 6 and rng.random() < 0.9 else (-1, -1)
    return fmq.MQDescriptor(
        tuple(places[i] for i in range(len(extents))), quantum, rng.choice([1, 1, 2]), *events
    )


def any_descriptor(rng: random.Random) -> fmq.MQDescriptor:
    """Numbers that are sometimes possible."""

    def number() -> int:
        small = rng.choice([0, 1, 2, 3, 4, 7, 8, 16, 24, 64, 100, 128, 4096, 8192, 16384, -1, -8])
        return small if rng.random() < 0.9 else rng.choice([2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])

    count = rng.randrange(7)
    grantors = tuple(
        fmq.GrantorDescriptor(rng.choice([0, 0, 0, 1, 1, 2, 5, -1]), number(), number()) for _ in range(count)
    )
    events = (rng.choice([-1, 2, 3, 0]), rng.choice([-1, 3, 2, 9]))
    return fmq.MQDescriptor(grantors, number(), rng.choice([1, 2, 1, 2, 0, 3]), *events)


def attachment(
    rng: random.Random,
    descriptor: fmq.MQDescriptor,
    fds: list[int],
    memories: list[mmap.mmap],
    operations: int,
    endings: Counter[str],
    overwritten: bool,
) -> int:
    """A writer and readers of one descriptor until they are found corrupt or a while has passed."""
    ends: list[fmq.MessageQueue] = []
    try:
        for index in range(1 + (1 if descriptor.flavour == 1 else rng.randrange(1, 6))):
            spin_ns = rng.choice([0, 0, WAIT_NS])
            ends.append(fmq.MessageQueue.attach(descriptor, fds, reset=index == 0, spin_ns=spin_ns))
    except fmq.InvalidDescriptor:
        for end in ends:
            end.close()
        endings["refused descriptor"] += 1
        return 1
    held: list[fmq.Transaction] = []
    spent = 0
    words = [descriptor.grantors[i] for i in range(len(descriptor.grantors)) if i != fmq.Grantor.DATA]
    data = descriptor.grantors[fmq.Grantor.DATA]
    hostile = rng.random() < 0.7
    while spent < min(operations, SESSION_OPERATIONS if overwritten else 200):
        if hostile and rng.random() < 0.05:
            place = rng.choice(words) if rng.random() < 0.8 else data
            overwrite(rng, memories[place.fd_index], place, ends[0])
            jam(rng, fds[2 + rng.randrange(2)])
        end = rng.choice(ends)
        if rng.random() < 0.02:
            touch(rng, end, held)
        spent += 1
        try:
            rng.choice(CALLS)(rng, end)
            endings["answered"] += 1
        except fmq.Error as error:
            endings[type(error).__name__] += 1
            if isinstance(error, fmq.CorruptQueue) and all(e.state == "corrupt" for e in ends):
                break
        if rng.random() < 0.002:
            end.interrupt()
        elif rng.random() < 0.001:
            end.close()
    for end in ends:
        end.close()
    for transaction in held:
        for region in transaction.regions:
            with contextlib.suppress(ValueError):  # released
                assert bytes(region) is not None
    return spent


def touch(rng: random.Random, end: fmq.MessageQueue, held: list[fmq.Transaction]) -> None:
    """Keeps a transaction and looks at it later, when it has been dropped, committed, or its endpoint closed."""
    try:
        begun = rng.choice([end.begin_read, end.begin_write])(rng.randrange(end.count + 1))
    except fmq.Error:
        begun = None
    if begun is not None:
        held.append(begun)
    for transaction in rng.sample(held, min(len(held), 2)):
        for region in transaction.regions:
            with contextlib.suppress(ValueError):  # released
                if region.readonly:
                    bytes(region)
                else:
                    region[:] = bytes(len(region))


def jam(rng: random.Random, event: int) -> None:
    """What a peer can make of an eventfd: full or empty, blocking or not."""
    os.set_blocking(event, False)
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(event, rng.choice([1, 2**32, 2**63, 2**64 - 2]))
    with contextlib.suppress(BlockingIOError):
        for _ in range(rng.randrange(3)):
            os.eventfd_read(event)
    os.set_blocking(event, rng.random() < 0.7)


@contextlib.contextmanager
def overwriting(
    rng: random.Random, descriptor: fmq.MQDescriptor, memories: list[mmap.mmap]
) -> Iterator[None]:
    """Another process overwrites the parts of a queue as fast as it can, until this ends."""
    values = [rng.getrandbits(64) for _ in range(8)] + [0, 1, 2, 3, 2**64 - 1, 2**63]
    data = descriptor.grantors[fmq.Grantor.DATA]
    values += [descriptor.quantum_bytes * rng.randrange(data.extent) for _ in range(8)] + [data.extent] * 4
    todo = []
    for _ in range(1024):
        place = rng.choice(descriptor.grantors) if rng.random() < 0.7 else data
        size = min(8, place.extent)
        at = place.offset + (rng.randrange(place.extent - size + 1) if place is data else 0)
        value = (rng.choice(values) % 2 ** (8 * size)).to_bytes(size, "little")
        todo.append((memories[place.fd_index], at, at + size, value))
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of other threads, which the child has no use for
        child = os.fork()
    if child == 0:
        while os.getppid() == parent:
            for memory, start, stop, value in todo:
                memory[start:stop] = value
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def overwrite(
    rng: random.Random, memory: mmap.mmap, place: fmq.GrantorDescriptor, end: fmq.MessageQueue
) -> None:
    size = min(8, place.extent)
    at = place.offset if rng.random() < 0.7 else place.offset + rng.randrange(place.extent - size + 1)
    now = int.from_bytes(memory[at : at + size], "little")
    near = now + rng.choice(
        [1, -1, end.quantum_bytes, -end.quantum_bytes, end.count * end.quantum_bytes, 8, 2**32]
    )
    value = rng.choice(
        [near, near, rng.getrandbits(8 * size), 0, 2**64 - 1, 2**63, 2**64 - end.quantum_bytes]
    )
    memory[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")


def check_guards(descriptor: fmq.MQDescriptor, memories: list[mmap.mmap]) -> None:
    """Every byte outside of the parts still is what the session put there."""
    for index, memory in enumerate(memories):
        named = bytearray(memory[:])
        for grantor in descriptor.grantors:
            if grantor.fd_index == index and grantor.offset >= 0 and grantor.extent > 0:
                stop = min(MEMORY_BYTES, grantor.offset + grantor.extent)
                if grantor.offset < stop:
                    named[grantor.offset : stop] = bytes([GUARD]) * (stop - grantor.offset)
        assert named.count(GUARD) == MEMORY_BYTES, f"bytes outside of the queue changed: {descriptor}"


def count_of(rng: random.Random, end: fmq.MessageQueue) -> int:
    return rng.choice([0, 1, 1, 2, end.count // 2, end.count, end.count + 1, rng.randrange(end.count + 1)])


def write_in_place(rng: random.Random, end: fmq.MessageQueue) -> None:
    count = count_of(rng, end)
    transaction = end.begin_write(count)
    if transaction is not None:
        for region in transaction.regions:
            region[:] = bytes(len(region))
        end.commit_write(rng.choice([count, count, 0, count // 2, count + 1]))


def read_in_place(rng: random.Random, end: fmq.MessageQueue) -> None:
    count = count_of(rng, end)
    transaction = end.begin_read(count)
    if transaction is not None:
        assert len(transaction.copy_from()) == count * end.quantum_bytes
        end.commit_read(rng.choice([count, count, 0, count // 2, count + 1]))


def message_in_place(rng: random.Random, end: fmq.MessageQueue) -> None:
    reserved = end.reserve_message(rng.randrange(200))
    if reserved is not None:
        reserved.copy_to(bytes(reserved.count))
        end.commit_message()
    peeked = end.peek_message()
    if peeked is not None:
        peeked.copy_from()
        end.release_message()


def bits(rng: random.Random, end: fmq.MessageQueue) -> None:
    end.event_flag.wake(rng.getrandbits(3))
    end.event_flag.wait(1 + rng.getrandbits(3), WAIT_NS)


def arrays(rng: random.Random, end: fmq.MessageQueue) -> None:
    if end.closed:  # Its descriptors' numbers may be others' by now.
        return
    with fmq.MessageQueue.attach(end.descriptor, end.fds, dtype=f"V{end.quantum_bytes}") as other:
        rng.choice([other.read_array, other.read_available_array])(count_of(rng, end))


def parts(rng: random.Random, end: fmq.MessageQueue) -> None:
    """The accessors of a transaction, with places that are sometimes none of its own."""
    begun = rng.choice([end.begin_read, end.begin_write])(count_of(rng, end))
    if begun is not None:
        assert len(begun.slot(rng.randrange(-1, end.count + 1))) == end.quantum_bytes
        assert begun.first is not None and (begun.second is None or len(begun.second) > 0)
        begun.copy_from(rng.randrange(-1, end.count + 1), rng.randrange(-1, end.count + 1))


def passed(rng: random.Random, end: fmq.MessageQueue) -> None:
    """Over a socket, with some of the bytes changed."""
    if end.closed:
        return
    payload = bytearray(end.descriptor.to_bytes())
    for _ in range(rng.randrange(3)):
        payload[rng.randrange(len(payload))] = rng.getrandbits(8)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        head = len(payload).to_bytes(4, "little")
        socket.send_fds(ours, [head + payload], list(end.fds)[: rng.choice([4, 4, 4, 3, 1])])
        ours.shutdown(socket.SHUT_WR)
        fmq.passing.receive_queue(theirs).close()


AWAITS: list[Callable[[random.Random, fmq.MessageQueue], Coroutine[Any, Any, object]]] = [
    lambda rng, end: fmq.aio.read(end),
    lambda rng, end: fmq.aio.read_many(end, count_of(rng, end)),
    lambda rng, end: fmq.aio.read_into(end, bytearray(end.quantum_bytes)),
    lambda rng, end: fmq.aio.read_many_into(end, bytearray(count_of(rng, end) * end.quantum_bytes)),
    lambda rng, end: fmq.aio.read_message(end),
    lambda rng, end: fmq.aio.write(end, bytes(end.quantum_bytes)),
    lambda rng, end: fmq.aio.write_many(end, bytes(count_of(rng, end) * end.quantum_bytes)),
    lambda rng, end: fmq.aio.write_message(end, rng.randbytes(rng.randrange(300))),
    lambda rng, end: fmq.aio.wait_readable(end, count_of(rng, end)),
    lambda rng, end: fmq.aio.wait_writable(end, count_of(rng, end)),
]


def awaited(rng: random.Random, end: fmq.MessageQueue) -> None:
    """A few awaits in a loop of their own, each ended by a time-out at the latest."""
    chosen = [rng.choice(AWAITS) for _ in range(4)]

    async def main() -> None:
        for each in chosen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_NS / 1e9):
                    await each(rng, end)

    asyncio.run(main())


def waited(rng: random.Random, end: fmq.MessageQueue) -> None:
    """The waiting calls for threads."""
    elements = bytes(count_of(rng, end) * end.quantum_bytes)
    bits = rng.choice([None, 0, 1, 2, 3])
    rng.choice(
        [
            lambda: end.wait_readable(count_of(rng, end), WAIT_NS),
            lambda: end.wait_writable(count_of(rng, end), WAIT_NS),
            lambda: end.write_message_blocking(bytes(rng.randrange(300)), WAIT_NS),
            lambda: end.read_blocking(
                count_of(rng, end), WAIT_NS, read_notification=bits, write_notification=1
            ),
            lambda: end.write_blocking(elements, WAIT_NS, read_notification=1, write_notification=bits),
        ]
    )()


CALLS: list[Callable[[random.Random, fmq.MessageQueue], object]] = [
    lambda rng, end: end.write(bytes(end.quantum_bytes)),
    lambda rng, end: end.write_many(rng.randbytes(count_of(rng, end) * end.quantum_bytes)),
    lambda rng, end: end.read(),
    lambda rng, end: end.read_many(count_of(rng, end)),
    lambda rng, end: end.read_available(count_of(rng, end)),
    lambda rng, end: end.read_many_into(bytearray(count_of(rng, end) * end.quantum_bytes)),
    lambda rng, end: end.write_message(rng.randbytes(rng.randrange(300))),
    lambda rng, end: end.read_message(),
    lambda rng, end: (end.available_to_read(), end.available_to_write(), end.statistics(), repr(end)),
    write_in_place,
    read_in_place,
    message_in_place,
    lambda rng, end: rng.random() < 0.05 and end.read_blocking(count_of(rng, end), WAIT_NS),
    lambda rng, end: rng.random() < 0.05 and end.write_blocking(bytes(end.quantum_bytes), WAIT_NS),
    lambda rng, end: rng.random() < 0.05 and end.read_message_blocking(WAIT_NS),
    lambda rng, end: rng.random() < 0.05 and bits(rng, end),
    lambda rng, end: rng.random() < 0.05 and waited(rng, end),
    lambda rng, end: rng.random() < 0.01 and awaited(rng, end),
    lambda rng, end: rng.random() < 0.03 and arrays(rng, end),
    lambda rng, end: rng.random() < 0.03 and passed(rng, end),
    lambda rng, end: end.read_into(bytearray(end.quantum_bytes)),
    lambda rng, end: end.wait_readable(count_of(rng, end), 0),
    lambda rng, end: end.wait_writable(count_of(rng, end), 0),
    parts,
]


def main(seed: int, operations: int) -> None:
    """So many calls, with a line of progress now and then."""
    print(f"seed {seed}, {operations} operations", flush=True)
    began = last = time.monotonic()

    def tell(endings: Counter[str]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_S or endings.total() >= operations:
            last = now
            done = endings.total()
            print(f"{done} operations in {now - began:.0f} s ({done / (now - began):.0f}/s)", flush=True)

    print(dict(run(seed, operations, tell)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""Random descriptors, random calls, and shared words overwritten between any two of them.

The property: whatever happens, a call answers or raises one of the package's errors, and no byte outside of the parts a
descriptor names ever changes. After AOSP's fmq_fuzzer: 0 to 6 grantors with arbitrary places, both flavours, a ring in
memory of its own or not, one writer and up to five readers, waits of 100 microseconds.

Run as a script for longer, or under a sanitizer: `python tests/fmq/fuzzer.py SEED OPERATIONS`.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections import Counter
from collections.abc import Callable

import fmq
from fmq.region import create_memory

WAIT_NS = 100_000
GUARD = 0xA5
MEMORY_BYTES = 16384


def run(seed: int, operations: int) -> Counter[str]:
    """So many calls; how they ended, by name."""
    rng = random.Random(seed)
    endings: Counter[str] = Counter()
    while endings.total() < operations:
        session(rng, min(2000, operations - endings.total()), endings)
    return endings


def session(rng: random.Random, operations: int, endings: Counter[str]) -> None:
    """One pair of memories under several attachments."""
    fds = [create_memory("fuzz", MEMORY_BYTES) for _ in range(2)]
    fds += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
    memories = [mmap.mmap(fd, MEMORY_BYTES) for fd in fds[:2]]
    try:
        while operations > 0:
            for memory in memories:
                memory[:] = bytes([GUARD]) * MEMORY_BYTES
            descriptor = good_descriptor(rng) if rng.random() < 0.6 else any_descriptor(rng)
            spent = attachment(rng, descriptor, fds, memories, operations, endings)
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
) -> int:
    """A writer and readers of one descriptor until they are found corrupt or a while has passed."""
    ends: list[fmq.MessageQueue] = []
    try:
        for index in range(1 + (1 if descriptor.flavour == 1 else rng.randrange(1, 6))):
            ends.append(fmq.MessageQueue.attach(descriptor, fds, reset=index == 0))
    except fmq.InvalidDescriptor:
        for end in ends:
            end.close()
        endings["refused descriptor"] += 1
        return 1
    spent = 0
    words = [descriptor.grantors[i] for i in range(len(descriptor.grantors)) if i != fmq.Grantor.DATA]
    data = descriptor.grantors[fmq.Grantor.DATA]
    hostile = rng.random() < 0.7
    while spent < min(operations, 200):
        if hostile and rng.random() < 0.05:
            place = rng.choice(words) if rng.random() < 0.8 else data
            overwrite(rng, memories[place.fd_index], place, ends[0])
        end = rng.choice(ends)
        spent += 1
        try:
            rng.choice(CALLS)(rng, end)
            endings["answered"] += 1
        except fmq.Error as error:
            endings[type(error).__name__] += 1
            if isinstance(error, fmq.CorruptQueue) and all(e.state == "corrupt" for e in ends):
                break
    for end in ends:
        end.close()
    return spent


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
]


if __name__ == "__main__":
    print(dict(run(int(sys.argv[1]), int(sys.argv[2]))))

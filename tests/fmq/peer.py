"""The second process of the queue tests: evaluates one expression a line and answers with one line.

Run as a script with the queues' descriptors as hexadecimal bytes and their file descriptors (inherited) as arguments:
`peer.py HEX:FD,FD,.. HEX:FD,..`. The queues are `queue` and `queues` in the expressions. An answer is the repr of the
value, or `!` and the name of the exception with its text.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import select
import sys

import fmq


def pattern(count: int, start: int = 0) -> bytes:
    """`count` 32-bit numbers counting up from `start`, as the original's test service writes them."""
    return b"".join((start + i).to_bytes(4, "little") for i in range(count))


def repeat(call: object, times: int) -> int:
    """Calls something so many times; how often it answered with something true (or a non-empty bytes)."""
    assert callable(call)
    return sum(1 for _ in range(times) if call())


def flood(queue: fmq.MessageQueue, count: int) -> int:
    """Writes so many elements of 256 bytes, each 32 times its own number, as fast as it can."""
    for number in range(1, count + 1):
        element = number.to_bytes(8, "little") * 32
        if not queue.write(element):
            assert queue.write_blocking(element, 20_000_000_000)
    return count


def read_repeatedly(queue: fmq.MessageQueue, count: int, times: int, timeout_ns: int) -> int:
    """Blocking reads of `count` elements each; how many of them brought data."""
    return repeat(lambda: queue.read_blocking(count, timeout_ns), times)


def read_all(queue: fmq.MessageQueue, count: int) -> bytes | None:
    """What the original's test service reads: exactly `count` elements, or None; an overflow is None as well."""
    try:
        return queue.read_many(count)
    except fmq.Overflow:
        return None


def wait_all(queue: fmq.MessageQueue, first: int, size: int, timeout_ns: int) -> int:
    """Echoes messages until one is empty; how many there were."""
    echoed = 0
    back = first
    while message := queue.read_message_blocking(timeout_ns):
        assert queues[back].write_message_blocking(message[:size], timeout_ns)
        echoed += 1
    return echoed


def flip(seed: int, message_headers: bool) -> int:
    """Overwrites the counters, parking words or message headers of the first queue at full rate until told to stop."""
    rng = random.Random(seed)
    queue = queues[0]
    with mmap.mmap(queue.fds[0], os.fstat(queue.fds[0]).st_size) as memory:
        grantors = queue.descriptor.grantors
        data = grantors[fmq.Grantor.DATA]
        places = [g.offset for i, g in enumerate(grantors) if i != fmq.Grantor.DATA]
        if message_headers:
            places = [data.offset + 8 * i for i in range(data.extent // 8)]
        values = [rng.getrandbits(64) for _ in range(16)] + [
            rng.randrange(data.extent + 2) for _ in range(64)
        ]
        values += [0, 1, 2**64 - 1, 2**63, 2**64 - 8, data.extent, data.extent + 1]
        todo = [(rng.choice(places), rng.choice(values).to_bytes(8, "little")) for _ in range(4096)]
        flips = 0
        print("flipping", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            for place, value in todo:
                memory[place : place + 8] = value
            flips += len(todo)
    return flips


def rewrite(place: int, first: bytes, second: bytes) -> int:
    """Writes two words in turns to a place of the first queue's ring at full rate until told to stop."""
    queue = queues[0]
    with mmap.mmap(queue.fds[0], os.fstat(queue.fds[0]).st_size) as memory:
        start = queue.descriptor.grantors[fmq.Grantor.DATA].offset + place
        end, count = start + len(first), 0
        print("rewriting", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            for _ in range(1000):
                memory[start:end] = first
                memory[start:end] = second
            count += 1000
    return count


def fill(event: int) -> None:
    """Writes to an eventfd until it holds all that it can."""
    os.set_blocking(event, False)
    for bit in reversed(range(64)):
        try:
            while True:
                os.eventfd_write(event, 1 << bit)
        except BlockingIOError:
            pass


def jam() -> int:
    """Fills both eventfds of the first queue, and makes them blocking again and again until told to stop."""
    events = queues[0].fds[-2:]
    flips = 0
    for event in events:
        fill(event)
    print("jamming", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(1000):
            for event in events:
                fcntl.fcntl(event, fcntl.F_SETFL, 0)
        flips += 1000
        for event in events:
            os.set_blocking(event, False)
            try:
                os.eventfd_write(event, 1)  # in the place of what was taken
            except BlockingIOError:
                pass
    for event in events:
        os.set_blocking(event, True)
    return flips


queues: list[fmq.MessageQueue] = []


def main() -> None:
    for argument in sys.argv[1:]:
        text, fds = argument.split(":")
        numbers = [int(fd) for fd in fds.split(",")]
        queues.append(fmq.MessageQueue.attach(fmq.MQDescriptor.from_bytes(bytes.fromhex(text)), numbers))
    names = dict(globals())
    if queues:
        names["queue"] = queues[0]
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = repr(eval(line, names))
        except Exception as error:
            answer = f"!{type(error).__name__} {error}"
        print(answer, flush=True)
    for queue in queues:
        queue.close()


if __name__ == "__main__":
    main()

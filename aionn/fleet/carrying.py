"""Calls of the driver contract over a network: the messages of a Unix socket, whose descriptors become contents.

Owns the way from a message's descriptors to the contents of their files, and at the other end from these to sealed memories, whose
descriptors the message is decoded with. So there is one form of each message, with one set of checks.

Invariants:
1. Files are never opened by a name of the other machine: what comes is bytes, which get memories of this process.
2. Decoding a large message never keeps the event loop for longer than one of its parts.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from aionn.errors import ResourceExhausted
from aionn.fleet.messages import Carried, framed
from aionn.hal import Memory, MemoryKind, Model
from aionn.service.wire.large import in_memory, in_turns, read_parts
from aionn.service.wire.protocol import Message, decode_inline, decode_parts, encode, has_large_model

__all__ = ["CONTENTS_KIND", "carry", "decoded", "destinations", "memories_for", "portable"]

CONTENTS_KIND = MemoryKind.ASHMEM


def portable(model: Model) -> Model:
    """The model, whose constants are in sealed memories of exactly their size. Copies those that are in files; may block."""
    if all(pool.kind == CONTENTS_KIND and not pool.offset for pool in model.pools):
        return model
    pools = []
    for pool in model.pools:
        copied = Memory.create(pool.size_bytes, name="aionn-constants")
        copied.array[:] = pool.array
        pools.append(copied)
    return msgspec.structs.replace(model, pools=tuple(pools))


async def carry(message: Message) -> tuple[bytes, list[memoryview], object]:
    """A message as a frame.

    Returns:
        The head, the parts of the body, and an object to keep until they are sent.

    Raises:
        InvalidArgument: The message is too large.
        ResourceExhausted: No descriptor or no memory is left for it.
    """
    if has_large_model(message):
        payload, fds, keep = await anyio.to_thread.run_sync(encode, message)
    else:
        payload, fds, keep = encode(message)
    contents = [_contents(fd) for fd in fds]
    sizes = tuple(part.nbytes for part in contents)
    return framed(Carried(payload, sizes), sum(sizes)), contents, keep


def _contents(fd: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ))
    except OSError as e:
        raise ResourceExhausted(f"message: its contents cannot be mapped: {e.strerror}") from e


def memories_for(parts: Sequence[int]) -> list[Memory]:
    """Memories for contents of these sizes. Takes as long as the memories are large.

    Raises:
        ResourceExhausted: There is not enough memory.
    """
    memories: list[Memory] = []
    try:
        for part in parts:
            memories.append(Memory.create(part, name="aionn-carried"))
    except BaseException:
        for memory in memories:
            memory.close()
        raise
    return memories


def destinations(memories: Sequence[Memory]) -> list[memoryview]:
    """Where the contents go."""
    return [memory.array.data for memory in memories]


async def decoded(payload: bytes, memories: Sequence[Memory]) -> Message:
    """The message of a frame, whose contents are in these memories; the caller closes them.

    Raises:
        Error: See ``aionn.service.wire.protocol.decode``.
    """
    fds = [memory.fileno() for memory in memories]
    stands_for = in_memory(payload)
    if stands_for is None:
        return decode_inline(payload, fds, sealed_only=True)
    structure, values = await anyio.to_thread.run_sync(read_parts, stands_for, fds)
    steps = decode_parts(stands_for, structure, values, fds, sealed_only=True)
    return await in_turns(steps, anyio.lowlevel.checkpoint)

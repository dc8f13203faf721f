"""Calls of the driver contract over a network: the messages of a Unix socket, whose descriptors become contents.

Owns the way from a message's descriptors to the contents of their files, and at the other end from these to sealed memories, whose
descriptors the message is decoded with. So there is one form of each message, with one set of checks. Owns the threads beside the
event loop on which the peers' large messages are encoded and decoded, and memory for them is made; peers have them in turns.

Invariants:
1. Files are never opened by a name of the other machine: what comes is bytes, which get memories of this process.
2. Decoding a large message never keeps the event loop for longer than one of its parts.
3. A peer that has one such call waits for ``BESIDE_MAX`` of each other peer at most, whatever the number of theirs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import anyio
import anyio.lowlevel
import msgspec

from aionn.errors import ResourceExhausted
from aionn.fleet.messages import Carried, framed
from aionn.hal import Memory, MemoryKind, Model
from aionn.scheduler.worker_turns import BESIDE_MAX, WorkerTurns
from aionn.service.wire.large import in_memory, in_turns, read_parts
from aionn.service.wire.protocol import Message, decode_inline, decode_parts, encode, has_large_model

__all__ = ["CONTENTS_KIND", "beside_loop", "carry", "decoded", "destinations", "memories_for", "portable"]

CONTENTS_KIND = MemoryKind.ASHMEM

_turns = WorkerTurns("messages of a network", BESIDE_MAX)
_R = TypeVar("_R")


async def beside_loop(peer: Hashable, call: Callable[..., _R], *arguments: object) -> _R:
    """Calls what takes long on a thread when the peer's turn comes, and returns what that returns. See ``WorkerTurns.run``.

    Args:
        peer: The other end that the call is for: all connections of a client are one peer.
        call: The function to call.
        arguments: Its arguments.

    Raises:
        ResourceExhausted: No thread is left, or too many calls wait.
    """
    return await _turns.run(peer, call, *arguments)


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


async def carry(message: Message, peer: Hashable) -> tuple[bytes, list[memoryview], object]:
    """A message to a peer as a frame. See ``beside_loop`` for the peer.

    Returns:
        The head, the parts of the body, and an object to keep until they are sent.

    Raises:
        InvalidArgument: The message is too large.
        ResourceExhausted: No descriptor, no memory or no thread is left for it.
    """
    if has_large_model(message):
        payload, fds, keep = await beside_loop(peer, encode, message)
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


async def decoded(payload: bytes, memories: Sequence[Memory], peer: Hashable) -> Message:
    """The message of a frame of a peer (see ``beside_loop``), whose contents are in these memories; the caller closes them.

    Raises:
        Error: See ``aionn.service.wire.protocol.decode`` and ``beside_loop``.
    """
    fds = [memory.fileno() for memory in memories]
    stands_for = in_memory(payload)
    if stands_for is None:
        return decode_inline(payload, fds, sealed_only=True)
    structure, values = await beside_loop(peer, read_parts, stands_for, fds)
    steps = decode_parts(stands_for, structure, values, fds, sealed_only=True)
    return await in_turns(steps, anyio.lowlevel.checkpoint)

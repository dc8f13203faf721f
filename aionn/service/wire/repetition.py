"""Data sent once: memories that a driver process remembers, and requests that it has checked.

Owns the two tables of a connection: which memory has which identifier (client), and which memory an identifier stands for (driver
process); and the messages that speak of them.

Invariants:
1. Client: an identifier stands for one memory for the life of the connection and is never used again.
2. Client: a memory that is closed or dropped is forgotten by both ends; at most ``limit`` memories are remembered.
3. Driver process: forgetting is always allowed. A request that names what is not remembered any more makes it ask.

Source: memory identifiers of ``IBurst`` and reusable executions of the AIDL form of the NN HAL.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import anyio
import msgspec

from aionn.errors import DeadObject, InvalidArgument, ResourceExhausted
from aionn.hal import Memory
from aionn.service.wire.handles import PoolOnWire, RequestOnWire
from aionn.service.wire.quotas import Account
from fences import SyncFence

__all__ = [
    "Compute",
    "ComputeFenced",
    "CreateExecution",
    "CreateExecutionReply",
    "ForgetMemory",
    "MemoryIdentifiers",
    "RecallMemories",
    "RememberedMemories",
]


class ForgetMemory(msgspec.Struct, frozen=True, tag=True):
    """The client closed or dropped a memory that is remembered."""

    identifier: int


class RecallMemories(msgspec.Struct, frozen=True, tag=True):
    """Driver to client: what memories do these identifiers stand for? Answered by ``GetMemoriesReply``."""

    identifiers: tuple[int, ...]


class CreateExecution(msgspec.Struct, frozen=True, tag=True):
    """``PreparedModel.create_reusable_execution``; ``ForgetExecution`` frees it."""

    prepared: int
    request: RequestOnWire
    measure: bool
    loop_timeout_ns: int | None


class CreateExecutionReply(msgspec.Struct, frozen=True, tag=True):
    """The handle of the reusable execution."""

    execution: int


class Compute(msgspec.Struct, frozen=True, tag=True):
    """``Execution.execute_synchronously``; answered by ``ExecuteReply``."""

    execution: int
    deadline_ns: int | None


class ComputeFenced(msgspec.Struct, frozen=True, tag=True):
    """``Execution.execute_fenced``; answered by ``ExecuteFencedReply``."""

    execution: int
    wait_for: tuple[SyncFence, ...]
    deadline_ns: int | None
    duration_ns: int | None


class MemoryIdentifiers:
    """The client's table: which of its memories the driver process remembers.

    Args:
        forget: Notifies the driver process that an identifier is freed; called from any thread, also by the garbage collector.

    Attributes:
        limit: Most memories that may be remembered; the driver process reports it in HelloReply.
    """

    def __init__(self, forget: Callable[[int], object]) -> None:
        self.limit = 0
        self._forget = forget
        self._next = itertools.count()
        self._seen: weakref.WeakSet[Memory] = weakref.WeakSet()
        # By identity, and without locks, since the garbage collector may come between any two lines. Single operations of a
        # dict are whole.
        self._known: dict[int, tuple[weakref.ref[Memory], int, Callable[[], None]]] = {}
        self._by_identifier: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def on_wire(self, memory: Memory) -> PoolOnWire:
        """The form of a memory in a message: alone the first time, since many are used once; then with an identifier; then as that
        alone.
        """
        known = self._known.get(id(memory))
        if known is not None and known[0]() is memory:
            return PoolOnWire(None, 0, known[1])
        if self.limit <= 0 or memory.is_closed or memory not in self._seen:
            self._seen.add(memory)
            return PoolOnWire(memory)
        while len(self._known) >= self.limit:
            self._drop(next(iter(self._known)))
        identifier = next(self._next)
        key = id(memory)

        def closed() -> None:
            self._drop(key)

        self._known[key] = weakref.ref(memory), identifier, closed
        self._by_identifier[identifier] = memory
        memory.add_close_callback(closed)
        return PoolOnWire(memory, 0, identifier)

    def _drop(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            reference, identifier, closed = known
            memory = reference()
            if memory is not None:
                memory.remove_close_callback(closed)
            self._by_identifier.pop(identifier, None)
            self._forget(identifier)

    def memories(self, identifiers: Iterable[int]) -> tuple[Memory, ...]:
        """Answers the driver process's question.

        Raises:
            InvalidArgument: An identifier stands for nothing, or nothing any more; nothing is given then.
        """
        found = []
        for identifier in identifiers:
            memory = self._by_identifier.get(identifier)
            if memory is None or memory.is_closed:
                raise InvalidArgument(f"request: no memory has the identifier {identifier}, or it was closed")
            found.append(memory)
        return tuple(found)

    def close(self) -> None:
        """The connection has ended: releases the memories without a word."""
        self.limit = 0
        self._forget = _nobody
        for key in list(self._known):
            self._drop(key)


def _nobody(identifier: int) -> None:
    """There is no peer to notify."""


class RememberedMemories:
    """The driver process's table: what an identifier stands for.

    Args:
        account: The client's; ``pools`` of its quotas bounds the table.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._known: dict[int, Memory] = {}
        self._used_s: dict[int, float] = {}
        self._asking: set[int] = set()
        self._questions: set[anyio.CancelScope] = set()

    def __len__(self) -> int:
        return len(self._known)

    def take(self, pools: Sequence[PoolOnWire]) -> tuple[list[Memory | None], list[int]]:
        """The memories of a request's pools, None for those that are device memories or unknown; and the unknown identifiers.

        Received memories are remembered as far as the quota allows. Call it before anything is awaited, so that a later
        ``ForgetMemory`` cannot overtake the request; ask for the unknown ones within ``question``.
        """
        memories: list[Memory | None] = []
        unknown: list[int] = []
        for pool in pools:
            memory = pool.memory
            if pool.identifier >= 0:
                known = self._known.get(pool.identifier)
                if known is not None:
                    memory = known  # The memory that came first stays, whatever came along.
                    self._used_s[pool.identifier] = time.monotonic()
                elif memory is not None:
                    self._remember(pool.identifier, memory)
                else:
                    unknown.append(pool.identifier)
            memories.append(memory)
        self._asking.update(unknown)
        return memories, unknown

    def learn(self, identifiers: Sequence[int], memories: Sequence[Memory]) -> None:
        """Takes the memories of the client's answer; closed ones are not kept.

        Raises:
            InvalidArgument: The numbers differ.
        """
        if len(identifiers) != len(memories):
            raise InvalidArgument(f"request: asked for {len(identifiers)} memories, got {len(memories)}")
        for identifier, memory in zip(identifiers, memories, strict=True):
            if identifier in self._asking and identifier not in self._known:
                self._remember(identifier, memory)

    @contextmanager
    def question(self, identifiers: Sequence[int]) -> Iterator[None]:
        """The client is asked for these.

        Raises:
            DeadObject: ``end_questions`` was called, and it has not answered in time.
        """
        with anyio.CancelScope() as scope:
            self._questions.add(scope)
            try:
                yield
            finally:
                self._questions.discard(scope)
                self._asking.difference_update(identifiers)
        if scope.cancelled_caught:
            raise DeadObject("request: its client does not answer which memories it means")

    def end_questions(self, within_s: float) -> None:
        """Has the client answer the present questions within this time."""
        for scope in self._questions:
            scope.deadline = min(scope.deadline, anyio.current_time() + within_s)

    def _remember(self, identifier: int, memory: Memory) -> None:
        try:
            self._account.take("pools")
        except ResourceExhausted:
            return  # It works without; it only takes longer.
        self._known[identifier] = memory
        self._used_s[identifier] = time.monotonic()

    def forget(self, identifier: int) -> None:
        """Lets go of a memory; an unknown identifier is ignored."""
        self._asking.discard(identifier)
        if self._known.pop(identifier, None) is not None:
            del self._used_s[identifier]
            self._account.give_back("pools")

    def rest(self, idle_s: float) -> int:
        """Lets go of what was not used for so long; a request that names it makes the driver process ask. Returns how many."""
        limit_s = time.monotonic() - idle_s
        idle = [identifier for identifier, used_s in self._used_s.items() if used_s <= limit_s]
        for identifier in idle:
            self.forget(identifier)
        return len(idle)

    def clear(self) -> None:
        """Lets go of everything."""
        for identifier in list(self._known):
            self.forget(identifier)

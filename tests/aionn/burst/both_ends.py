"""Both ends of a burst in one process, around an executor of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread

import fmq
from aionn.burst.controller import BurstController
from aionn.burst.server import Answer, BurstServer, PacketTurns
from aionn.hal import DataLocation, ExecutionResult, Memory, OutputShape, Request, RequestArgument

ANSWER_S_MAX = 30


class CountedTurns:
    """The turns of a client that is never kept waiting.

    Attributes:
        used_ns: What each turn took, None for one after a failure.
        held: How many threads have a turn.
    """

    def __init__(self) -> None:
        self.used_ns: list[int | None] = []
        self.succeeded = 0
        self.held = 0

    def take(self, is_ending: Callable[[], bool]) -> bool:
        assert not self.held
        self.held += not is_ending()
        return bool(self.held)

    def give_back(self, used_ns: int) -> None:
        self.held -= 1
        self.used_ns.append(used_ns)

    def failed(self, is_ending: Callable[[], bool]) -> None:
        self.used_ns.append(None)

    def wake(self) -> None:
        pass

    def executed(self) -> None:
        self.succeeded += 1


class Ends:
    """Both ends of a burst around an executor that doubles a byte."""

    def __init__(
        self,
        result_bytes: int = 1 << 12,
        polling_ns: int = 0,
        *,
        bind: Callable[[Request], Request] | None = None,
        turns: PacketTurns | None = None,
        model: Any = None,
    ) -> None:
        self.requests = fmq.MessageQueue.create(1, 1 << 12)
        self.results = fmq.MessageQueue.create(1, result_bytes, spin_ns=polling_ns)
        self.asked: list[list[int]] = []
        self.freed: list[int] = []
        self.executed = 0
        self.limits: list[tuple[int | None, int | None]] = []
        self.ended: list[str] = []
        self.turns = CountedTurns()
        self.execute: Callable[[Request, bool], ExecutionResult] = self._double
        self.controller = BurstController(
            self.requests,
            self.results,
            free_slot=self._free,
            end=self._end,
            model=model,
            polling_ns=polling_ns,
        )
        self.server = BurstServer(
            fmq.MessageQueue.attach(self.requests.descriptor, self.requests.fds),
            fmq.MessageQueue.attach(self.results.descriptor, self.results.fds),
            execute=self._execute,
            get_memories=self._memories,
            bind=bind,
            turns=self.turns if turns is None else turns,
            on_end=self.ended.append,
            name="aionn-burst-test",
        )
        self.server.start()

    def _execute(
        self,
        request: Request,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        answer: Answer,
    ) -> ExecutionResult:
        self.limits.append((deadline_ns, loop_timeout_ns))
        assert not self.turns.held
        return self.execute(request, measure)

    def _double(self, request: Request, measure: bool) -> ExecutionResult:
        self.executed += 1
        pool = request.pools[0]
        assert isinstance(pool, Memory)
        pool.array[1] = pool.array[0] * 2
        return ExecutionResult(True, (OutputShape((1,)),))

    def _memories(self, slots: Sequence[int]) -> Sequence[Memory]:
        self.asked.append(list(slots))
        assert not self.turns.held  # The client may never answer.
        return self.controller.memories(slots)

    async def _free(self, slot: int) -> None:
        self.freed.append(slot)
        self.server.free_slot(slot)

    async def _end(self) -> None:
        await anyio.to_thread.run_sync(self.server.stop)


def doubling(memory: Memory, at: int = 1) -> Request:
    """A request with its output at a place."""
    return Request(
        (RequestArgument(False, DataLocation(0, 0, 1)),),
        (RequestArgument(False, DataLocation(0, at, 1)),),
        (memory,),
    )

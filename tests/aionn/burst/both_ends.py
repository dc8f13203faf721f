"""Both ends of a burst in one process, around an executor of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio.to_thread

import fmq
from aionn.burst.controller import BurstController
from aionn.burst.server import Answer, BurstServer
from aionn.hal import DataLocation, ExecutionResult, Memory, OutputShape, Request, RequestArgument

ANSWER_S_MAX = 30


class Ends:
    """Both ends of a burst around an executor that doubles a byte."""

    def __init__(
        self,
        result_bytes: int = 1 << 12,
        polling_ns: int = 0,
        *,
        bind: Callable[[Request], Request] | None = None,
    ) -> None:
        self.requests = fmq.MessageQueue.create(1, 1 << 12)
        self.results = fmq.MessageQueue.create(1, result_bytes, spin_ns=polling_ns)
        self.asked: list[list[int]] = []
        self.freed: list[int] = []
        self.executed = 0
        self.limits: list[tuple[int | None, int | None]] = []
        self.ended: list[str] = []
        self.decoded: list[tuple[int, bool]] = []
        self.execute: Callable[[Request, bool], ExecutionResult] = self._double
        self.controller = BurstController(
            self.requests, self.results, free_slot=self._free, end=self._end, polling_ns=polling_ns
        )
        self.server = BurstServer(
            fmq.MessageQueue.attach(self.requests.descriptor, self.requests.fds),
            fmq.MessageQueue.attach(self.results.descriptor, self.results.fds),
            execute=self._execute,
            get_memories=self._memories,
            bind=bind,
            on_decoded=lambda *decoded: self.decoded.append(decoded),
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
        return self.execute(request, measure)

    def _double(self, request: Request, measure: bool) -> ExecutionResult:
        self.executed += 1
        pool = request.pools[0]
        assert isinstance(pool, Memory)
        pool.array[1] = pool.array[0] * 2
        return ExecutionResult(True, (OutputShape((1,)),))

    def _memories(self, slots: Sequence[int]) -> Sequence[Memory]:
        self.asked.append(list(slots))
        return self.controller.memories(slots)

    async def _free(self, slot: int) -> None:
        self.freed.append(slot)
        self.server.free_slot(slot)

    async def _end(self) -> None:
        await anyio.to_thread.run_sync(self.server.stop)


def doubling(memory: Memory) -> Request:
    return Request(
        (RequestArgument(False, DataLocation(0, 0, 1)),),
        (RequestArgument(False, DataLocation(0, 1, 1)),),
        (memory,),
    )

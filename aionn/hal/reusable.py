"""A reusable execution for prepared models that have none of their own.

Owns the rule that at most one computation is outstanding. A driver that gains from binding a request once has an
``Execution`` of its own.

Source: the wrapper that the NN HAL's runtime puts around drivers below feature level 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.errors import InvalidArgument
from aionn.hal.device import FencedExecution, PreparedModel
from aionn.hal.request import ExecutionResult, Request
from fences import FenceStatus, SyncFence

__all__ = ["ResendingExecution"]


class ResendingExecution:
    """A request that is sent again for every computation. At most one computation is outstanding."""

    def __init__(
        self, prepared: PreparedModel, request: Request, measure: bool, loop_timeout_ns: int | None
    ) -> None:
        self._prepared = prepared
        self._request = request
        self._measure = measure
        self._loop_timeout_ns = loop_timeout_ns
        self._running: SyncFence | None = None

    def _begin(self) -> SyncFence:
        if self._running is not None and self._running.status == FenceStatus.PENDING:
            raise InvalidArgument("reusable execution: a computation is outstanding already")
        self._running = SyncFence("reusable execution")
        return self._running

    async def execute_synchronously(self, *, deadline_ns: int | None = None) -> ExecutionResult:
        """See ``PreparedModel.execute_synchronously``."""
        running = self._begin()
        try:
            return await self._prepared.execute_synchronously(
                self._request,
                measure=self._measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=self._loop_timeout_ns,
            )
        finally:
            running.signal()

    async def execute_fenced(
        self, wait_for: Sequence[SyncFence], *, deadline_ns: int | None = None, duration_ns: int | None = None
    ) -> FencedExecution:
        """See ``PreparedModel.execute_fenced``."""
        running = self._begin()
        try:
            launched = await self._prepared.execute_fenced(
                self._request,
                wait_for,
                measure=self._measure,
                deadline_ns=deadline_ns,
                loop_timeout_ns=self._loop_timeout_ns,
                duration_ns=duration_ns,
            )
        except BaseException:
            running.signal()
            raise
        self._running = launched.fence
        return launched

"""A slot of a burst that its user fills in place: by a camera's driver, a decoder or a library that writes into memory it is given.

Owns the way from such a slot to an execution. ``slot_pool`` owns the slots.

Invariants:
1. No other execution or stream uses a lent slot until it is given back, by its user or since nothing refers to it any more.
2. Nothing is copied into it: the device reads what its user has written.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from aionn.errors import InvalidArgument
from aionn.hal import Priority
from aionn.platform.process_bound import InThisProcess
from aionn.runtime.clock import check_deadline
from aionn.runtime.executions.results import Result, flag_of, priority_of
from aionn.runtime.executions.slot_pool import FrameBuffer, SlotPool
from aionn.runtime.memory.arguments import Array

__all__ = ["LentSlot"]

RunSlot = Callable[[FrameBuffer, int | None, Priority | None, bool], Coroutine[Any, Any, Result]]
"""Executes what is in a buffer: ``(buffer, deadline, priority, measure)``."""


class LentSlot(InThisProcess):
    """A slot of a burst that is lent to a user. Made by ``Burst.lend``; use it with ``with``, or close it. One that is dropped is
    given back as well, soon after, also where one of its ``inputs`` is still referred to.

    Args:
        pool: Has the slot.
        buffer: The slot.
        run: Executes it.

    Attributes:
        inputs: Writable views of the inputs, in the model's order. The driver process maps the same memory.
    """

    INSTEAD = "its inputs are arrays, which can be copied"

    def __init__(self, pool: SlotPool, buffer: FrameBuffer, run: RunSlot) -> None:
        self._pool = pool
        self._buffer: FrameBuffer | None = buffer
        self._run = run
        self.inputs: tuple[Array, ...] = tuple(buffer.area.view(key) for key in buffer.inputs)

    @property
    def is_busy(self) -> bool:
        """Whether a device may still read it. An execution that was cancelled, or has missed its deadline, may be under way."""
        return self._buffer is not None and self._buffer.users > 1

    async def execute(
        self,
        *,
        deadline: int | None = None,
        priority: str | Priority | None = None,
        measure: bool = False,
    ) -> Result:
        """Executes what was written into ``inputs``; the result has arrays of its own. See ``Burst.execute``.

        Cancelled, or at its deadline, it ends before the device does: see ``is_busy``.

        Raises:
            InvalidArgument: The slot was given back, is busy, or the burst is closed.
        """
        deadline = check_deadline(deadline, where="slot")
        measure = flag_of(measure, "measure")
        buffer = self._buffer
        if buffer is None:
            raise InvalidArgument("slot: expected a slot that is lent, this one was given back")
        if buffer.users > 1:
            raise InvalidArgument("slot: expected a slot that is idle, a device still reads this one")
        rank = None if priority is None else priority_of(priority)
        return await self._run(buffer, deadline, rank, measure)

    def close(self) -> None:
        """Gives it back to the burst, which lends or uses it again when no device reads it any more. Idempotent; from any thread.

        ``inputs`` must not be written afterwards: they belong to another frame.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool.give_back(buffer, is_collected=False)

    def __del__(self) -> None:
        buffer = self._buffer
        if buffer is not None:
            self._pool.give_back(buffer, is_collected=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "given back" if self._buffer is None else "busy" if self.is_busy else "lent"
        return f"<LentSlot {state}, {', '.join(str(list(view.shape)) for view in self.inputs)}>"

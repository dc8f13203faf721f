"""LoopWatch: one side of an endpoint, as an event loop watches it.

Owns the registration of a queue's eventfd with one loop, and the end of it. `fmq.aio` makes one for each side on which a
task waits; the queue keeps it, and stops it when it closes.
"""

from __future__ import annotations

import asyncio
import os
import threading

from fmq._native import Watch
from fmq.errors import ClosedQueue

__all__ = ["LoopWatch"]


class LoopWatch(Watch):
    """One side of one endpoint on one loop: what the loop watches, and what the task that waits awaits.

    It is the awaited object itself, in the protocol a Task has for objects other than a Future; `_native.c` has the reason.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, reader: bool) -> None:
        super().__init__(loop, fd, reader)
        self.loop = loop
        self.thread = threading.get_ident()
        self._process = os.getpid()
        loop.add_reader(self.poll_fd, self._readable)

    def cancel(self, msg: object = None) -> bool:
        """For the Task: whether there was a wait to cancel; nothing has been taken by it."""
        return self._fail(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))

    def _fail(self, error: BaseException) -> bool:
        taken = self._take(error)
        if taken is None:
            return False
        callback, context, queue = taken
        if self._process == os.getpid():  # A forked child's task ends; that of the parent still waits.
            queue._disarm(self.reader)
        self.loop.call_soon(callback, self, context=context)
        return True

    def stop(self, fd: int) -> None:
        """Lets go of the eventfd and closes it, in the loop's thread; a waiting task raises ClosedQueue."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop or not self.loop.is_running():
            self._detach(fd)
        else:
            try:
                self.loop.call_soon_threadsafe(self._detach, fd)
            except RuntimeError:  # closed between the question and the call
                self._leave()
                os.close(fd)

    def _detach(self, fd: int) -> None:
        self.leave()
        if not self.loop.is_closed():
            self._fail(ClosedQueue("queue: the endpoint was closed while a task waited"))
        os.close(fd)

    def leave(self) -> None:
        """Lets go of the eventfd, and of the slices' timer. A forked child leaves the loop as it is."""
        if not self.loop.is_closed() and self._process == os.getpid():
            self.loop.remove_reader(self.poll_fd)
        self._leave()

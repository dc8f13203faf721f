"""Ends a driver process whose device makes no progress.

Owns the count of work under way and the timer. The timer is the interpreter's own (``faulthandler``), a thread that needs no GIL,
so that an engine which holds it for ever cannot stop the watch. It prints where every thread stands, and the process ends with
status 1.

Invariant: while work is under way, the timer is no older than the last beginning of work on an idle device, or the last end of any.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

__all__ = ["Progress"]

_NOTHING = nullcontext()


class Progress:
    """Watches the device of this process.

    Args:
        hang_after_s: How long work may go on without any of it ending; None for no watch. Waiting for a turn counts as work.
    """

    def __init__(self, hang_after_s: float | None) -> None:
        self._hang_after_s = hang_after_s
        self._lock = threading.Lock()
        self._count = 0

    @property
    def is_watching(self) -> bool:
        """Whether there is a watch."""
        return self._hang_after_s is not None

    def work(self) -> AbstractContextManager[None]:
        """Something that the device does; from any thread."""
        # Without a watch this is in the way of every frame of a burst for nothing.
        return _NOTHING if self._hang_after_s is None else self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        assert self._hang_after_s is not None
        with self._lock:
            before, self._count = self._count, self._count + by
            if self._count == 0:
                faulthandler.cancel_dump_traceback_later()
            elif before == 0 or by < 0:
                faulthandler.dump_traceback_later(self._hang_after_s, exit=True)

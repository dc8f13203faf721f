"""A thread that calls functions at given times: deadlines of blocking drivers, which have no event loop of their own."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections.abc import Callable

from aionn.drivers.kit.threads.classes import serving
from aionn.platform.threads import start_thread

__all__ = ["Alarm"]


class _Entry:
    """One call to come.

    Attributes:
        function: The function to call; None once the call was made or cancelled, so that the entry refers to nothing.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function


class Alarm:
    """Calls functions at given times, on one thread that is started when first needed.

    The functions must be quick and must not raise. Entries that were cancelled stay until they come to the front or outnumber the
    rest, so that cancelling many calls takes a time in proportion to their number.
    """

    def __init__(self, now: Callable[[], int], *, name: str) -> None:
        self._now = now
        self._name = name
        self._condition = threading.Condition()
        self._heap: list[tuple[int, int, _Entry]] = []
        self._count = 0  # Of the calls to come, without those that were cancelled.
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        """Number of entries, those that were cancelled included."""
        return len(self._heap)

    def call_at(self, time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
        """Calls ``function`` once ``time_ns`` has come.

        Returns:
            A function that prevents that. Idempotent, and without effect on a call that has begun.

        Raises:
            ResourceExhausted: The thread cannot be started.
        """
        entry = _Entry(function)
        with self._condition:
            if self._closed:
                entry.function = None
            else:
                if self._thread is None:
                    thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    start_thread(thread, self._name)
                    self._thread = thread
                heapq.heappush(self._heap, (time_ns, next(self._sequence), entry))
                self._count += 1
                self._condition.notify()
        return functools.partial(self._cancel, entry)

    def _cancel(self, entry: _Entry) -> None:
        with self._condition:
            function, entry.function = entry.function, None
            if function is None or self._closed:
                return
            self._count -= 1
            if 2 * self._count < len(self._heap):
                self._heap = [each for each in self._heap if each[2].function is not None]
                heapq.heapify(self._heap)

    def _work(self) -> None:
        with serving(self._name):
            self._call_all()

    def _call_all(self) -> None:
        while (function := self._next()) is not None:
            function()
            del function  # This thread may wait for the next one without end.

    def _next(self) -> Callable[[], None] | None:
        """Waits for the next call; None when the alarm is closed."""
        with self._condition:
            while not self._closed:
                left_s = None
                if self._heap:
                    time_ns, _, entry = self._heap[0]
                    left_s = (time_ns - self._now()) / 1e9
                    if entry.function is None or left_s <= 0:
                        heapq.heappop(self._heap)
                        function, entry.function = entry.function, None
                        if function is not None:
                            self._count -= 1
                            return function
                        continue
                    del entry
                self._condition.wait(None if left_s is None else min(left_s, 3600.0))
        return None

    def close(self) -> None:
        """Forgets what was to come and joins the thread. Idempotent."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

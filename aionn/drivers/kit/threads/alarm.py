"""A thread that calls functions at given times: deadlines of blocking drivers, which have no event loop of their own."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from aionn.drivers.kit.threads.classes import serving
from aionn.platform.threads import start_thread

__all__ = ["Alarm"]


class Alarm:
    """Calls functions at given times, on one thread that is started when first needed.

    The functions must be quick and must not raise.
    """

    def __init__(self, now: Callable[[], int], *, name: str) -> None:
        self._now = now
        self._name = name
        self._condition = threading.Condition()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(self, time_ns: int, function: Callable[[], None]) -> None:
        """Calls ``function`` once ``time_ns`` has come. Nothing prevents that but closing.

        Raises:
            ResourceExhausted: The thread cannot be started.
        """
        with self._condition:
            if self._closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                start_thread(thread, self._name)
                self._thread = thread
            heapq.heappush(self._heap, (time_ns, next(self._sequence), function))
            self._condition.notify()

    def _work(self) -> None:
        with serving(self._name):
            self._call_all()

    def _call_all(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (not self._heap or self._heap[0][0] > self._now()):
                    left_s = (self._heap[0][0] - self._now()) / 1e9 if self._heap else None
                    self._condition.wait(None if left_s is None else max(0.0, min(left_s, 3600.0)))
                if self._closed:
                    return
                function = heapq.heappop(self._heap)[2]
            function()

    def close(self) -> None:
        """Forgets what was to come and joins the thread. Idempotent."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

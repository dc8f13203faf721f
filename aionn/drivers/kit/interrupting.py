"""Stopping engines that run inside of one call: cancellation and deadlines reach them from another thread.

Owns which runs can be interrupted now, and the thread that waits for their deadlines.

Invariants:
1. A run is interrupted at most once, and never after it has left.
2. There are as many runs here as the device has slots, and one more while it prepares; the thread exists once a run had a deadline.

Source: the engines' own calls for it, such as ``RunOptions.terminate`` of ONNX Runtime, which take effect between two operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from aionn.errors import ResourceExhausted
from aionn.platform.threads import start_thread

__all__ = ["Interrupts"]

SLEEP_MAX_S = 3600.0
"""Longest sleep without a look at the clock: the time-out of a condition is bounded."""


class Interrupts:
    """The runs of a device that can be interrupted.

    Args:
        now: The clock that deadlines are compared with.
        name: Names the thread.

    Attributes:
        lock: Held while a run is entered, left or interrupted.
        runs: Those that are entered.
    """

    def __init__(self, now: Callable[[], int], *, name: str) -> None:
        self._now = now
        self._name = name
        # Every run takes the lock itself: a condition has it behind calls of Python, which cost more than it.
        self.lock = threading.Lock()
        self._condition = threading.Condition(self.lock)
        self.runs: set[_Run] = set()
        self._thread: threading.Thread | None = None
        self._wakes_ns: int | None = None
        self._closed = False

    def watching(
        self, deadline_ns: int | None, is_cancelled: Callable[[], bool] | None, interrupt: Callable[[], None]
    ) -> _Run:
        """Lets a run of the calling thread be interrupted within the context that this returns.

        Args:
            deadline_ns: Absolute; None means no deadline.
            is_cancelled: Looked at when the context is entered, and when ``look`` is called.
            interrupt: Called in another thread once the deadline has passed or the run is cancelled. It must be quick and must not
                raise.
        """
        return _Run(self, deadline_ns, is_cancelled, interrupt)

    def look(self) -> None:
        """Interrupts the runs that are cancelled by now. From any thread."""
        with self.lock:
            for run in self.runs:
                run.look()

    def wait_for(self, deadline_ns: int) -> None:
        """Has the thread look at the runs at this time, at the latest. Called with the lock held."""
        if self._closed:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                start_thread(thread, self._name)
            except ResourceExhausted:
                return  # The run continues to its end, and its caller is notified in time all the same.
            self._thread = thread
        elif self._wakes_ns is None or deadline_ns < self._wakes_ns:
            self._condition.notify()

    def _work(self) -> None:
        with self.lock:
            while not self._closed:
                now_ns = self._now()
                deadlines = []
                for run in self.runs:
                    if run.deadline_ns is not None and not run.is_interrupted:
                        if run.deadline_ns <= now_ns:
                            run.stop()
                        else:
                            deadlines.append(run.deadline_ns)
                self._wakes_ns = min(deadlines, default=None)
                left_s = None if self._wakes_ns is None else (self._wakes_ns - now_ns) / 1e9
                self._condition.wait(None if left_s is None else min(left_s, SLEEP_MAX_S))

    def close(self) -> None:
        """Interrupts nothing more, and joins the thread. Idempotent."""
        with self.lock:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()


class _Run:
    """A run that can be interrupted while it is entered."""

    __slots__ = ("_all", "_interrupt", "_is_cancelled", "deadline_ns", "is_interrupted")

    def __init__(
        self,
        all_runs: Interrupts,
        deadline_ns: int | None,
        is_cancelled: Callable[[], bool] | None,
        interrupt: Callable[[], None],
    ) -> None:
        self._all = all_runs
        self.deadline_ns = deadline_ns
        self._is_cancelled = is_cancelled
        self._interrupt = interrupt
        self.is_interrupted = False

    def look(self) -> None:
        """Stops it if it is cancelled. Called with the lock held."""
        if not self.is_interrupted and self._is_cancelled is not None and self._is_cancelled():
            self.stop()

    def stop(self) -> None:
        """Interrupts it. Called with the lock held: so that a run that has left is not interrupted."""
        self.is_interrupted = True
        self._interrupt()

    def __enter__(self) -> None:
        with self._all.lock:
            self._all.runs.add(self)
            if self._is_cancelled is not None and self._is_cancelled():
                self.stop()
            if self.deadline_ns is not None:
                self._all.wait_for(self.deadline_ns)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._all.lock:
            self._all.runs.discard(self)

"""Ends a driver process whose device makes no progress.

Owns the count of work under way and the timer. The timer is the interpreter's own (``faulthandler``), a thread that needs no GIL,
so that an engine which never releases it cannot stop the watch. It prints the stack of every thread, and the process ends with
status 1.

Invariants:
1. While work is under way, the timer expires no earlier than the limit after the last beginning of work on an idle device or the
   last end of any, whichever came later, and at most a quarter of the limit after that.
2. An idle device has no timer, after a quarter of the limit at the latest.
3. Native calls, which begin and end without Python, count as well: they are looked at every quarter of the limit.
4. A piece of work that is reported counts as the end of some work, and so does the end of the pause that this process makes then.

Setting the timer starts a thread, some 30 microseconds, which a stream would pay for each frame. So it is set for a quarter more
than the limit, and again only when it is older than a quarter; a thread of this module takes it away.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self

from aionn.platform.numbers import POSITIVE_S_MIN, checked_seconds

__all__ = ["Progress", "check_hang_after_s"]

HANG_AFTER_S_MAX = 7 * 24 * 3600.0
"""The longest watch, a week: the interpreter's timer is limited to some centuries, and no real watch is that long."""

_NOTHING = nullcontext()


NativeActivity = Callable[[], tuple[float, float]]
"""When the last native call of a burst began and when the last one ended, in seconds of CLOCK_MONOTONIC; one runs while the first
is later. From any thread."""


def check_hang_after_s(hang_after_s: float | None, *, where: str) -> None:
    """Rejects an invalid time after which work counts as hanging; None means no watch.

    Raises:
        InvalidArgument: It is not a number of seconds above 0, or is more than a week.
    """
    if hang_after_s is not None:
        checked_seconds(hang_after_s, where, least=POSITIVE_S_MIN, most=HANG_AFTER_S_MAX)


class Progress:
    """Watches the device of this process until it is closed.

    Args:
        hang_after_s: Time in which some of the work must end; None means no watch. Waiting for a turn counts as work.
        now_s: The clock, in seconds.
    """

    def __init__(self, hang_after_s: float | None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._hang_after_s = hang_after_s
        self._now_s = now_s
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._set_s: float | None = None
        self._natives: list[NativeActivity] = []
        self._busy_s = self._moved_s = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        if hang_after_s is not None:
            pause_s = hang_after_s / 4
            self._thread = threading.Thread(
                target=self._forget_when_idle, args=(pause_s,), name="aionn-progress", daemon=True
            )
            self._thread.start()

    @property
    def is_watching(self) -> bool:
        """Whether there is a watch."""
        return self._hang_after_s is not None

    def work(self) -> AbstractContextManager[None]:
        """Something that the device does; from any thread."""
        # Without a watch this is in the way of every frame of a burst for nothing.
        return _NOTHING if self._hang_after_s is None else self._watched()

    def moved_on(self, pause_s: float) -> None:
        """A piece of the work under way has ended, and by its own rules this process sleeps so long before the next; from any
        thread.
        """
        if self._hang_after_s is None:
            return
        with self._changed:
            if self._closed or self._count == 0:
                return
            self._moved_s = moved_s = self._now_s() + pause_s
            margin_s = self._hang_after_s / 4
            if self._set_s is None or moved_s - self._set_s > margin_s:
                faulthandler.dump_traceback_later(self._hang_after_s + margin_s + pause_s, exit=True)
                self._set_s = moved_s
                self._changed.notify()

    def watch(self, activity: NativeActivity) -> Callable[[], None]:
        """Watches native calls as well.

        Args:
            activity: See ``NativeActivity``. It must be quick and must not raise.

        Returns:
            Ends that; idempotent, from any thread.
        """
        if self._hang_after_s is None:
            return _no_watch

        def end() -> None:
            with self._changed:
                if activity in self._natives:
                    self._natives.remove(activity)

        with self._changed:
            self._natives.append(activity)
            self._changed.notify()
        return end

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        assert self._hang_after_s is not None
        with self._changed:
            before, self._count = self._count, self._count + by
            if self._natives and (by < 0 or before == 0):
                now_s = self._now_s()
                if by > 0:
                    self._busy_s = now_s
                    if self._running():
                        self._look(self._hang_after_s)  # The device was not idle: nothing has moved on.
                        return
                self._moved_s = now_s
            if self._closed or self._count == 0 or (before > 0 and by > 0):
                return
            now_s, margin_s = self._now_s(), self._hang_after_s / 4
            if self._set_s is None or now_s - self._set_s > margin_s:
                faulthandler.dump_traceback_later(self._hang_after_s + margin_s, exit=True)
                self._set_s = now_s
                self._changed.notify()

    def _forget_when_idle(self, pause_s: float) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._closed or self._set_s is not None or self._natives)
                self._changed.wait_for(lambda: self._closed, pause_s)
                self._look(4 * pause_s)

    def _running(self) -> list[float]:
        """When the native calls began that run now."""
        return [
            began_s for began_s, ended_s in (activity() for activity in self._natives) if began_s > ended_s
        ]

    def _look(self, limit_s: float) -> None:
        """Takes the timer away from an idle device, and sets it anew where native calls moved on. With the lock."""
        running = self._running()
        if self._closed or not (self._count or running):
            if self._set_s is not None:
                faulthandler.cancel_dump_traceback_later()
                self._set_s = None
            return
        if not self._natives:
            return
        # A call that began beside other work has moved nothing on.
        began_s = min(running, default=0.0)
        if self._count and began_s > self._busy_s:
            began_s = 0.0
        moved_s = max(self._moved_s, began_s, *(activity()[1] for activity in self._natives))
        if self._set_s is None or moved_s > self._set_s:
            left_s = moved_s + 1.25 * limit_s - self._now_s()
            faulthandler.dump_traceback_later(max(left_s, 1e-3), exit=True)
            self._set_s = moved_s

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _no_watch() -> None:
    pass

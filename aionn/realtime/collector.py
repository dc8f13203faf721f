"""Python's garbage collector kept out of the way of frames: one setting, and afterwards as it was.

A full collection looks at every object that may be part of a circle: 10 to 30 ms with a model imported, during which no task runs.

Source: the documentation of ``gc``: ``freeze`` moves all objects that are there into a generation that is never looked at.
"""

from __future__ import annotations

import enum
import gc
import threading

__all__ = ["Collection", "CollectorMode"]


class CollectorMode(enum.StrEnum):
    """What becomes of the collector. ``FROZEN`` looks at what is made afterwards; ``DISABLED`` at nothing unless it is asked."""

    ORDINARY = "ordinary"
    FROZEN = "frozen"
    DISABLED = "disabled"


class Collection:
    """The collector's setting. Several may be open in one process: the strictest holds, and the last to close restores."""

    _lock = threading.Lock()
    _open: list[Collection] = []  # noqa: RUF012  Of the process, as the collector is.
    _was_enabled = True
    _was_frozen = False

    def __init__(self, mode: CollectorMode) -> None:
        """Takes a setting; it holds from ``open`` on."""
        self.mode = mode

    def open(self) -> None:
        """Sets it. Call it when everything is made that stays: a collection runs first, then what is left is frozen."""
        if self.mode is CollectorMode.ORDINARY:
            return
        with Collection._lock:
            if self in Collection._open:
                return
            if not Collection._open:
                Collection._was_enabled = gc.isenabled()
                Collection._was_frozen = gc.get_freeze_count() > 0
            Collection._open.append(self)
            gc.collect()
            gc.freeze()
            if self.mode is CollectorMode.DISABLED:
                gc.disable()

    def collect(self) -> int:
        """Looks at what was made since, for a moment in which nothing is due; the number of objects that were freed."""
        return gc.collect()

    def close(self) -> None:
        """Sets back what was: enabled or not, and nothing frozen unless something was frozen before. May be called again."""
        with Collection._lock:
            if self not in Collection._open:
                return
            Collection._open.remove(self)
            left = Collection._open
            if Collection._was_enabled and not any(each.mode is CollectorMode.DISABLED for each in left):
                gc.enable()
            if not left and not Collection._was_frozen:
                gc.unfreeze()

"""A setting of Python's garbage collector that avoids collections during frames, and restores the previous setting.

A full collection visits every object that may be part of a reference cycle: 10 to 30 ms with a model imported, during which no task
runs.

Source: the documentation of ``gc``: ``freeze`` moves all existing objects into a generation that no collection visits.
"""

from __future__ import annotations

import enum
import gc
import threading

__all__ = ["Collection", "CollectorMode"]


class CollectorMode(enum.StrEnum):
    """The collector's setting. ``FROZEN`` collects only objects made afterwards; ``DISABLED`` collects only when ``collect`` is
    called."""

    ORDINARY = "ordinary"
    FROZEN = "frozen"
    DISABLED = "disabled"


class Collection:
    """A request for a setting. Several may be open in one process: the strictest applies, and the last to close restores the first
    state."""

    _lock = threading.Lock()
    _open: list[Collection] = []  # noqa: RUF012  Of the process, as the collector is.
    _was_enabled = True
    _was_frozen = False

    def __init__(self, mode: CollectorMode) -> None:
        """Keeps a setting, which ``open`` applies."""
        self.mode = mode

    def open(self) -> None:
        """Applies the setting. Call it after all long-lived objects are made: it collects, then freezes the objects that remain."""
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
        """Collects the objects made since ``open``, for a moment in which no frame is due. Returns the number of freed objects."""
        return gc.collect()

    def close(self) -> None:
        """Restores the previous state: enabled or not, and unfrozen unless objects were frozen before. May be called again."""
        with Collection._lock:
            if self not in Collection._open:
                return
            Collection._open.remove(self)
            left = Collection._open
            if Collection._was_enabled and not any(each.mode is CollectorMode.DISABLED for each in left):
                gc.enable()
            if not left and not Collection._was_frozen:
                gc.unfreeze()

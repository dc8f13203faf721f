"""The C library's memory in a process that lasts: one heap for all threads.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["use_one_heap"]

_M_ARENA_MAX = -8


def use_one_heap() -> None:
    """Makes threads that start from now on share the existing heap.

    By default each of a few dozen threads gets a heap of its own. Memory that one of them freed is not available to another, so a
    process with threads that come and go grows for hours. Does nothing if ``MALLOC_ARENA_MAX`` is set, or if the C library is not
    glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)

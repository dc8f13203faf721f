"""The C library's memory in a process that lasts: one heap for all threads.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["use_one_heap"]

_M_ARENA_MAX = -8


def use_one_heap() -> None:
    """Has threads that start from now on share the heap that there is.

    By default each of a few dozen threads gets a heap of its own. What one of them gave back is of no use to another, so a process
    with threads that come and go grows for hours. Does nothing where ``MALLOC_ARENA_MAX`` says otherwise, or where the C library
    is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)

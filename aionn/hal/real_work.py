"""Work that the event loop cannot see: announced, so that a virtual clock stands still while it goes on.

Owns the one place where drivers say "a thread, an engine or another process works for this loop until I say otherwise", and where a
virtual clock asks to be told. Without such a clock an announcement costs one comparison. Refuses to own the clock itself:
``aionn.testing.clock`` has that, and nothing of the product imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

__all__ = ["RealWork", "real_work", "set_pinner"]

RealWork = contextlib.AbstractContextManager[Any]
"""Entered when the work begins, left when its result has been handed to the loop; by any thread."""

_pinner: Callable[[str], RealWork] | None = None
_NOTHING = contextlib.nullcontext()


def real_work(name: str) -> RealWork:
    """Announces work under a name that says who does what, for the message about work that never ends.

    Enter it before the work can begin, and leave it after the loop has been woken with the result: the clock may jump at once.
    """
    return _NOTHING if _pinner is None else _pinner(name)


def set_pinner(pinner: Callable[[str], RealWork] | None) -> Callable[[str], RealWork] | None:
    """Sets who is told, for the whole process; returns who was told before. None for nobody."""
    global _pinner
    before, _pinner = _pinner, pinner
    return before

"""Work that the event loop cannot see: announced, so that a virtual clock stands still while it goes on.

Owns the one place where drivers say "a thread, an engine or another process works for this loop until I say otherwise", and where a
virtual clock asks to be told. Without such a clock an announcement costs one comparison. Refuses to own the clock itself:
``aionn.testing.clock`` has that, and nothing of the product imports it.

Invariants:
1. Work is announced before it can begin, and its end is told after the loop has been woken with the result: the clock may jump at
   once.
2. An end may be told by any thread, and more than once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Pinner", "begin_real_work", "real_work", "set_pinner"]

Pinner = Callable[[str], Callable[[], None]]
"""Told of work by name when it begins; returns what is called at its end."""

_pinner: Pinner | None = None


def begin_real_work(name: str) -> Callable[[], None]:
    """Announces work that ends elsewhere, on a thread for instance; returns what must be called at its end.

    Args:
        name: Who does what: said about work that never ends.
    """
    return _nothing if _pinner is None else _pinner(name)


@contextlib.contextmanager
def real_work(name: str) -> Iterator[None]:
    """Announces work that the caller waits for inside."""
    end = begin_real_work(name)
    try:
        yield
    finally:
        end()


def set_pinner(pinner: Pinner | None) -> Pinner | None:
    """Sets who is told, for the whole process; returns who was told before. None for nobody."""
    global _pinner
    before, _pinner = _pinner, pinner
    return before


def _nothing() -> None:
    pass

"""Work that the event loop cannot see: announced, so that a virtual clock does not advance while it runs.

Owns the one place where drivers announce that a thread, an engine or another process works for this loop, and where a virtual clock
registers for these announcements. Without such a clock an announcement costs one comparison. Refuses to own the clock itself:
``aionn.testing.clock`` has that, and nothing of the product imports it.

Invariants:
1. Work is announced before it can begin, and its end is announced after the loop has been woken with the result: the clock may jump
   immediately.
2. An end may be announced by any thread, and more than once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["Pinner", "begin_real_work", "real_work", "set_pinner"]

Pinner = Callable[[str], Callable[[], None]]
"""Called with the name of work when it begins; returns a function to call at its end."""

_pinner: Pinner | None = None


def begin_real_work(name: str) -> Callable[[], None]:
    """Announces work that ends elsewhere, on a thread for instance; returns what must be called at its end.

    Args:
        name: The worker and its work, for the message about work that never ends.
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
    """Sets the listener of the whole process; returns the one before. None means no listener."""
    global _pinner
    before, _pinner = _pinner, pinner
    return before


def _nothing() -> None:
    pass

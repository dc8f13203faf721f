"""Objects that an application drops without closing them: compilations and bursts.

Owns how their end reaches the devices: the garbage collector may run in any thread and interrupt anything, so it only posts the
closing to the event loop. Closing explicitly stays the better way: it happens at a known time, and waits.

Invariants:
1. Nothing that is dropped stays at a device until the runtime closes.
2. An object that is closed explicitly is not closed again.

No ``ResourceWarning`` is given: everything is freed promptly, and a compilation that goes out of scope is ordinary use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from aionn.errors import Error
from aionn.runtime.background import Background

__all__ = ["close_when_dropped"]


def close_when_dropped(
    owner: object, background: Background, close: Callable[[], Awaitable[None]]
) -> weakref.finalize[..., Any]:
    """Has ``close`` awaited in the background once nothing refers to ``owner`` any more.

    Args:
        owner: Whose end it is.
        background: Where it is awaited; a runtime that is closed has freed everything.
        close: Frees what the owner had at its devices. It must not refer to the owner.

    Returns:
        Its ``detach`` takes that back.
    """
    finalizer = weakref.finalize(owner, _post, background, close)
    finalizer.atexit = False  # Driver processes end with this one.
    return finalizer


def _post(background: Background, close: Callable[[], Awaitable[None]]) -> None:
    background.close_soon(functools.partial(_closed, close))


async def _closed(close: Callable[[], Awaitable[None]]) -> None:
    try:
        await close()
    except Error:
        pass  # The driver is gone, and with it everything that this would have freed.

"""Waiting in the event loop until a descriptor is readable.

Owns that wait alone. It is raw asyncio, since anyio waits for sockets only in the oldest version that aionn supports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["until_readable", "while_readable"]


async def until_readable(fd: int, limit_s: float) -> bool:
    """Waits until a descriptor is readable, or has an error to report; returns whether that came within ``limit_s``.

    The descriptor is not watched any more when this returns or raises. It must stay open until then.
    """
    return await while_readable(fd, _never_again, limit_s)


def _never_again() -> bool:
    return False


async def while_readable(fd: int, read: Callable[[], bool], limit_s: float) -> bool:
    """Calls a function whenever a descriptor is readable, in the turn of the loop that notices it: a task that waits for each
    item, and is watched anew for each, has it some turns later.

    The descriptor is not watched any more when this returns or raises. It must stay open until then.

    Args:
        fd: The descriptor.
        read: Reads it, without waiting; returns whether to continue.
        limit_s: Time of all calls together.

    Returns:
        Whether ``read`` ended it, rather than the limit.

    Raises:
        Exception: That of ``read``.
    """
    reading = _Reading(fd, read)
    reading.loop.add_reader(fd, reading.call)
    try:
        await asyncio.wait([reading.ended], timeout=limit_s)
    finally:
        reading.loop.remove_reader(fd)
    error, reading.error = reading.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # It refers to this frame.
    return reading.ended.done()


class _Reading:
    """The calls for one descriptor.

    Attributes:
        loop: Watches it.
        ended: Done when no further call is made.
        error: Raised by the last call.
    """

    def __init__(self, fd: int, read: Callable[[], bool]) -> None:
        self._fd = fd
        self._read = read
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.error: Exception | None = None

    def call(self) -> None:
        """One call."""
        try:
            if self._read():
                return
        except Exception as e:  # Any exception belongs to the task that waits.
            self.error = e
        # The descriptor may stay readable, so that the loop would call this again and again.
        self.loop.remove_reader(self._fd)
        if not self.ended.done():
            self.ended.set_result(None)

"""Waiting in the event loop until a descriptor is readable.

Owns that wait alone. It is raw asyncio, since anyio waits for sockets only in the oldest version that aionn supports.
"""

from __future__ import annotations

import asyncio

__all__ = ["until_readable"]


async def until_readable(fd: int, limit_s: float) -> bool:
    """Waits until a descriptor is readable, or has an error to report; returns whether that came within ``limit_s``.

    The descriptor is not watched any more when this returns or raises. It must stay open until then.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        # The descriptor stays readable until it is read, so that the loop would call this again and again.
        loop.remove_reader(fd)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        done, _ = await asyncio.wait([ready], timeout=limit_s)
    finally:
        loop.remove_reader(fd)
    return bool(done)

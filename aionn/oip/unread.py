"""Calls of gRPC whose answers are not read to their end, and the connections that they keep.

gRPC has no limit for such a call: a client that gives no window of HTTP/2 and answers pings keeps it as long as it likes. Neither
an abort nor a cancellation ends it, since the trailers wait behind the answer. Only the end of the connection does, which gRPC
does not offer. So the socket of the client's address is found among the descriptors of this process, and shut down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from typing import Any, Final, Protocol
from urllib.parse import unquote

__all__ = ["UNREAD_S_MAX", "AnsweredCall", "UnreadCalls", "is_worth_logging"]

_logger = logging.getLogger("aionn.manager")

UNREAD_S_MAX: Final = 30.0
"""The connection of a call whose client does not read its answer to the end for so long is closed."""


class AnsweredCall(Protocol):
    """The members of ``grpc.aio.ServicerContext`` that are used."""

    def peer(self) -> str: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...


class UnreadCalls:
    """The calls of one server whose answers were given. A connection that is closed is logged once."""

    def __init__(self) -> None:
        self._closed = ""

    def limit(self, call: AnsweredCall) -> None:
        """Closes the connection of a call unless its answer, which is given now, is read to its end within ``UNREAD_S_MAX``."""
        timer = asyncio.get_running_loop().call_later(UNREAD_S_MAX, self._end, call.peer())
        call.add_done_callback(lambda _: timer.cancel())

    def _end(self, peer: str) -> None:
        # gRPC closes the descriptor later, and then ends the connection's other calls.
        if shut_down(peer) and peer != self._closed:
            self._closed = peer
            _logger.warning(
                "oip: the client %s has not read an answer to its end for %g s: its connection was closed",
                peer,
                UNREAD_S_MAX,
            )


def is_worth_logging(record: logging.LogRecord) -> bool:
    """A filter of gRPC's log: it drops answers that were not sent, since their connection is closed."""
    return not record.exc_info or getattr(record.exc_info[0], "__name__", "") != "ExecuteBatchError"


def address_of(peer: str) -> tuple[str, int] | None:
    """Address and port of a client as gRPC names it, ``ipv4:HOST:PORT`` or ``ipv6:%5BHOST%5D:PORT``; None for other forms."""
    family, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isascii() or not port.isdecimal():
        return None
    return host.strip("[]").removeprefix("::ffff:"), int(port)


def shut_down(peer: str) -> int:
    """Shuts down the sockets of this process that are connected to a client; returns how many there were. Takes some
    microseconds for each descriptor of the process."""
    address = address_of(peer)
    count = 0
    for name in os.listdir("/proc/self/fd") if address is not None else ():
        try:
            # A descriptor of its own: the number may belong to another object at any time, this one stays what it is.
            fd = os.dup(int(name))
        except OSError:
            continue  # It was closed in between, or no descriptor is free.
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and _peer_of(one) == address:
                    one.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:
            continue  # It is not connected.
        finally:
            os.close(fd)
    return count


def _peer_of(one: socket.socket) -> tuple[str, int]:
    host, port, *_ = one.getpeername()
    return host.removeprefix("::ffff:"), port

"""Connections of a client to a node: by TCP, with or without TLS.

Owns the connection attempt, its limit of time and its errors. Tests replace it by a ``SimulatedLink``.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

import anyio
import anyio.to_thread

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.fleet.addresses import NodeAddress
from aionn.fleet.tls import check_pin, client_context
from aionn.fleet.wire import Wire, tune

__all__ = ["CONNECT_S_MAX", "GREET_S_MAX", "Connector", "TcpConnector"]

CONNECT_S_MAX = 5.0
"""Limit of the time until a node accepts a connection."""

GREET_S_MAX = 30.0
"""Limit of the time until a node has greeted: it opens a connection to its device first, as a process that starts."""


class Connector(Protocol):
    """Makes connections to one node."""

    async def connect(self, make: Callable[[socket.socket | None], Wire]) -> None:
        """Connects.

        Args:
            make: Makes the end of the connection here; it gets the socket if there is no encryption between both.

        Raises:
            DeviceUnavailable: The node cannot be reached, or is another one.
        """
        ...


class TcpConnector:
    """Makes connections by TCP.

    Args:
        address: Of the node.
    """

    def __init__(self, address: NodeAddress) -> None:
        self._address = address
        self._context: ssl.SSLContext | None = None

    async def connect(self, make: Callable[[socket.socket | None], Wire]) -> None:
        """See ``Connector``."""
        address = self._address
        if address.is_tls and self._context is None:
            self._context = await anyio.to_thread.run_sync(client_context, address)
        try:
            with anyio.fail_after(CONNECT_S_MAX):
                await self._connect(make)
        except TimeoutError:
            raise DeviceUnavailable(
                f"node {address.text}: it did not accept within {CONNECT_S_MAX:g} s"
            ) from None
        except ssl.SSLCertVerificationError as e:
            raise DeviceUnavailable(
                f"node {address.text}: its certificate is not accepted: {e.verify_message}; pin=SHA256 in the address names one"
            ) from e
        except ssl.SSLError as e:
            raise DeviceUnavailable(
                f"node {address.text}: no TLS connection: {e.reason or e}; it may serve without TLS"
            ) from e
        except OSError as e:
            raise DeviceUnavailable(f"node {address.text}: cannot be reached: {e.strerror or e}") from e

    async def _connect(self, make: Callable[[socket.socket | None], Wire]) -> None:
        loop = asyncio.get_running_loop()
        address, context = self._address, self._context
        sock = await _connected_socket(address)
        try:
            tune(sock)
            transport, wire = await loop.create_connection(
                lambda: make(None if context is not None else sock),
                sock=sock,
                ssl=context,
                server_hostname=address.host if context is not None else None,
            )
        except BaseException:
            sock.close()
            raise
        try:
            check_pin(address, transport)
        except DeviceUnavailable:
            wire.abort("its certificate is another one")
            raise


async def _connected_socket(address: NodeAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as e:
        raise DeviceUnavailable(f"node {address.text}: no address of this name: {e}") from e
    if not found:
        raise InvalidArgument(f"node {address.text}: no address of this name")
    error: OSError | None = None
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, place)
            return sock
        except OSError as e:
            error = e
            sock.close()
        except BaseException:
            sock.close()
            raise
    assert error is not None, "there was at least one attempt"
    raise error

"""The REST server: uvicorn around ``RestApp``, in the event loop of the gRPC server.

uvicorn, as for the watch page. It has a limit neither of connections nor of the time of a request's headers, nor one for a client
that does not read; ``_bounded`` adds all three.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

import aionn
from aionn.oip.door import Door
from aionn.oip.rest_app import RestApp

__all__ = ["RestServer"]

CONNECTIONS_MAX: Final = 128
"""Connections at the same time; clients keep some for their next requests."""

BACKLOG: Final = 128
"""Connections that wait to be accepted."""

HEADERS_S_MAX: Final = 5.0
"""A connection on which no whole headers of a request came for so long is closed."""

UNREAD_S_MAX: Final = 30.0
"""A connection whose client does not read an answer to its end for so long is closed."""

HEADERS_BYTES_MAX: Final = 16 << 10
"""Headers of a request."""

FLUSH_S_MAX: Final = 1
"""Whole seconds in which answers are still sent at the end."""


def _bounded(protocol: type[Any]) -> type[Any]:
    """A protocol of uvicorn for HTTP with limits of connections, of silence, and of answers that are not read."""

    class BoundedProtocol(protocol):  # type: ignore[misc]
        _limit: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > CONNECTIONS_MAX:
                transport.abort()
                return
            # Each byte that waits for the client is reported, also when the server closes a connection that it has answered.
            transport.set_write_buffer_limits(high=0)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def _watch(self) -> None:
            # While a request is answered there is a cycle; between two requests uvicorn closes what is silent.
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and self._limit is not None:
                self._limit.cancel()
                self._limit = None
            elif not is_answering and self._limit is None:
                self._limit = asyncio.get_running_loop().call_later(HEADERS_S_MAX, self._end_silent)

        def _end_silent(self) -> None:
            self._limit = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = asyncio.get_running_loop().call_later(UNREAD_S_MAX, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._limit, self._unread):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

    return BoundedProtocol


def _unsignalled(server: type[Any]) -> type[Any]:
    """uvicorn's server, which leaves the signals to its process."""

    class Server(server):  # type: ignore[misc]
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


class RestServer:
    """Serves a door by REST.

    Args:
        door: Has the models.
        host: An address of this machine.
        port: 0 takes a free one.
        is_remote: Whether other machines reach the address.
    """

    def __init__(self, door: Door, host: str, port: int, *, is_remote: bool = False) -> None:
        self._door = door
        self._host, self._port = host, port
        self._is_remote = is_remote
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def start(self) -> int:
        """Serves from now on; returns the port.

        Raises:
            InvalidArgument: The address cannot be used.
        """
        self._listener = listener = _listener(self._host, self._port)
        config = uvicorn.Config(
            RestApp(self._door, is_remote=self._is_remote),
            http=_bounded(H11Protocol),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(HEADERS_S_MAX),
            timeout_graceful_shutdown=FLUSH_S_MAX,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        )
        self._server = _unsignalled(uvicorn.Server)(config)
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[listener]), name="aionn-oip-rest"
        )
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Ends it: answers that were given are sent first. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._server is None or self._listener is None:
            return
        self._server.should_exit = True
        try:
            await asyncio.wait([task])
        finally:
            self._listener.close()
        with contextlib.suppress(asyncio.CancelledError):
            task.result()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise aionn.InvalidArgument(f"--oip-rest {host}:{port}: cannot listen there: {e.strerror}") from e
    return listener

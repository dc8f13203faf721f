"""The process that serves the page: uvicorn around ``WatchApp``, and the questions to the application.

Owns the limits of the server. ``server`` starts and ends this process.

uvicorn, not hypercorn: it is released every few weeks and used by most ASGI applications, and needs three small packages. It has no
limit for connections that send nothing, which hypercorn ends by itself, or that do not read; ``_bounded`` and ``_read`` add these.

Invariants:
1. The process ends when the application's end of the socket is gone.
2. The number of connections is bounded; one that sends no whole request in time, or does not read in time, is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.abc
import msgspec
import numpy as np
import numpy.typing as npt

from aionn.media.live.readable import until_readable
from aionn.watch.app import TABS_MAX, WatchApp
from aionn.watch.messages import MESSAGE_BYTES_MAX, QUESTION_FIGURES, Answer, Ready, Start
from aionn.watch.streams import Shot

__all__ = ["RemoteUpstream", "main", "server_for"]

CONNECTIONS_MAX = 2 * TABS_MAX
"""Connections at the same time: a tab has one, and one more while it loads."""

REQUEST_S_MAX = 5.0
"""A connection that has sent no whole request for so long is closed."""

HEADERS_BYTES_MAX = 16 << 10
"""Browsers send less than 2 kB of headers."""

QUESTION_BYTES_MAX = 1024
"""The largest message of a tab; ``WatchApp`` takes less."""

UNREAD_S_MAX = 30.0
"""A connection whose client does not read what was sent to its end for so long is closed. One that is answered, or pinged in vain,
is otherwise kept until all was sent."""

PING_S = 20.0
"""A tab that does not answer a ping of its socket within this time is closed: its machine is gone."""

REPEAT_S = 2.0
"""A question is asked again after this time without an answer, since the application may have discarded one."""

STALE_S = 0.5
"""An answer that was left by a tab that is gone is not shown later than this."""

CONTENT_BYTES_MAX = 8 << 20
"""The largest content of an answer: a picture has at most 640 x 640 pixels of three bytes."""

NICENESS = 10
"""The page takes the processor's time only where frames leave it."""


class RemoteUpstream:
    """Figures and pictures of the application at the other end of a socket; see ``Upstream``.

    Args:
        link: The socket.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._asked_s: dict[int, float] = {}
        self._answers: dict[int, tuple[float, Answer, bytes]] = {}
        self._changed = anyio.Event()

    async def figures(self) -> bytes:
        """See ``Upstream``."""
        _, content = await self._ask(QUESTION_FIGURES)
        return content

    async def picture(self, stream: int) -> tuple[npt.NDArray[np.uint8], Shot]:
        """See ``Upstream``."""
        while True:
            answer, content = await self._ask(stream)
            size = answer.height, answer.width, 3
            if answer.shot is not None and len(content) == answer.height * answer.width * 3:
                return np.frombuffer(content, np.uint8).reshape(size), answer.shot

    async def _ask(self, question: int) -> tuple[Answer, bytes]:
        arrived_s = self._answers.get(question, (0.0,))[0]
        if time.monotonic() - arrived_s > STALE_S:
            self._answers.pop(question, None)
        while question not in self._answers:
            now_s = time.monotonic()
            if now_s - self._asked_s.get(question, -REPEAT_S) >= REPEAT_S:
                self._asked_s[question] = now_s
                with contextlib.suppress(BlockingIOError):
                    self._link.send(bytes([question]))
            with anyio.move_on_after(REPEAT_S):
                await self._changed.wait()
        self._asked_s.pop(question, None)
        return self._answers.pop(question)[1:]

    async def run(self) -> None:
        """Receives answers until the application's end is closed."""
        while True:
            await until_readable(self._link.fileno(), 3600.0)
            try:
                message, descriptors, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES_MAX, 1)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not message:
                return
            content = b""
            for descriptor in descriptors:
                content = os.pread(descriptor, CONTENT_BYTES_MAX, 0)
                os.close(descriptor)
            try:
                answer = msgspec.json.decode(message, type=Answer)
            except msgspec.MsgspecError:
                continue  # It is asked for again.
            question = QUESTION_FIGURES if answer.kind == "figures" else answer.stream
            self._answers[question] = (time.monotonic(), answer, content)
            self._changed.set()
            self._changed = anyio.Event()


def _read(protocol: type[Any]) -> type[Any]:
    """A protocol of uvicorn with a limit of the time for which bytes wait for the client."""

    class ReadProtocol(protocol):  # type: ignore[misc]
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # Each byte that waits is reported, also when the server closes the connection.
            transport.set_write_buffer_limits(high=0)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = asyncio.get_running_loop().call_later(UNREAD_S_MAX, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._unread is not None:
                self._unread.cancel()
            super().connection_lost(exc)

    return ReadProtocol


def _bounded(protocol: type[Any]) -> type[Any]:
    """A protocol of uvicorn for HTTP with a limit of connections, and of the time until a request is there."""

    class BoundedProtocol(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > CONNECTIONS_MAX:
                transport.abort()
                return
            self._limit = asyncio.get_running_loop().call_later(REQUEST_S_MAX, self._end_silent)

        def _end_silent(self) -> None:
            # A request that is being answered has a cycle; uvicorn itself ends what is silent after an answer.
            if self.cycle is None and not self._is_upgraded():
                self.transport.abort()

        def _is_upgraded(self) -> bool:
            return self.transport.get_protocol() is not self

        def connection_lost(self, exc: Exception | None) -> None:
            limit = getattr(self, "_limit", None)
            if limit is not None:
                limit.cancel()
            super().connection_lost(exc)

    return BoundedProtocol


def server_for(app: Any) -> Any:
    """uvicorn's server of an ASGI application, with the limits of this module."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    config = uvicorn.Config(
        app,
        http=_bounded(_read(H11Protocol)),
        ws=_read(WebSocketsSansIOProtocol),
        ws_max_size=QUESTION_BYTES_MAX,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(REQUEST_S_MAX),
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
    )
    return uvicorn.Server(config)


async def _serve(link: socket.socket, listener: socket.socket, start: Start) -> None:
    upstream = RemoteUpstream(link)
    server = server_for(WatchApp(upstream, token=start.token, hosts=start.hosts, is_remote=start.is_remote))

    async def end_with_application() -> None:
        await upstream.run()
        os._exit(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_with_application)
        link.send(msgspec.json.encode(Ready()))
        await server.serve(sockets=[listener])
        os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Serves until the application is gone.

    Args:
        arguments: Numbers of two inherited descriptors: the socket to the application, and the one that listens.
    """
    link, listener = (socket.socket(fileno=int(number)) for number in arguments)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    start = msgspec.json.decode(link.recv(MESSAGE_BYTES_MAX), type=Start)
    link.setblocking(False)
    try:
        anyio.run(_serve, link, listener, start)
    except Exception as e:
        with contextlib.suppress(OSError):
            link.send(msgspec.json.encode(Ready(f"{type(e).__name__}: {e}")))
        os._exit(1)

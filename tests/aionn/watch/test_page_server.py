"""The server of the page, without its process: clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")

from aionn.watch import process

WAIT_S_MAX = 20.0

UPGRADE = (
    b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


UNREAD = b"x" * 40_000
"""More than the kernel takes, and less than the buffer from which on asyncio reports that a client does not read."""


async def answer(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        headers = [(b"connection", b"close"), (b"content-length", b"%d" % len(UNREAD))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": UNREAD})
        return
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "bytes": UNREAD})
    await send({"type": "websocket.close", "code": 1000})


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Any, int]]:
    server = process.server_for(answer)
    server.capture_signals = contextlib.nullcontext
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # Accepted sockets have it, too.
        listener.bind(("127.0.0.1", 0))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            with anyio.fail_after(WAIT_S_MAX):
                while not server.started:
                    await anyio.sleep(0.001)
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="page"),
        pytest.param(UPGRADE, id="tab"),
    ],
)
async def test_connection_that_is_not_read_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn itself closes it when all was sent, which an unread answer never is, and counts it until then."""
    monkeypatch.setattr(process, "UNREAD_S_MAX", 0.2)
    async with served() as (server, port):
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            unread.connect(("127.0.0.1", port))
            unread.sendall(sent)
            with anyio.fail_after(WAIT_S_MAX):
                while not server.server_state.connections:
                    await anyio.sleep(0.001)
                while server.server_state.connections:
                    await anyio.sleep(0.001)
            unread.setblocking(True)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := unread.recv(65536):
                    received += data
            assert received.startswith((b"HTTP/1.1 200", b"HTTP/1.1 101"))

"""The page and its live data as an ASGI application.

Owns paths, headers and the life of a tab's web socket. ``access`` decides which requests are answered, ``feed`` what a tab gets.

A web socket, not server-sent events: browsers allow six connections to a server by HTTP/1.1, so that the seventh tab with an event
stream would wait without end, and one-way events need a second connection for pictures. On the socket a tab asks when it has drawn
the last answer, and gets one message for each question. A tab that does not read therefore has one message under way, not a queue.

Invariants:
1. Nothing is read from a request but its path, its query and three headers, and from a socket only ``TabRequest``.
2. The number of tabs, the size of a question and the waits are bounded.
3. Nothing is written to disk, and no response may be stored by the browser.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import anyio
import msgspec

from aionn.observability.access import Access, Refusal
from aionn.watch.collector import Collector, Snapshot
from aionn.watch.feed import Feed, LocalUpstream, TabRequest, Upstream
from aionn.watch.metrics import metrics_text
from aionn.watch.page import POLICY, page_text

__all__ = ["TABS_MAX", "WatchApp"]

TABS_MAX = 32
"""Tabs at the same time: each takes a connection and some memory; more are rejected."""

QUESTION_BYTES_MAX = 256
"""A ``TabRequest`` has less than 100 bytes."""

SILENT_S_MAX = 150.0
"""A tab asks again within seconds; browsers wake hidden tabs once in a minute. One that is silent for longer is closed."""

SEND_S_MAX = 20.0
"""A tab that has not read an answer for so long is closed."""

SNAPSHOT_S_MAX = 3.0
"""Longest wait for figures: an application whose event loop is blocked for longer does not answer."""

PROTOCOL_ERROR, BAD_DATA, REFUSED, TRY_AGAIN = 1002, 1007, 1008, 1013
"""Codes with which a web socket is closed (RFC 6455, section 7.4.1)."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class WatchApp:
    """An ASGI application: alone by ``WatchPage``, or mounted in another one.

    Args:
        source: A collector, or what gives figures and pictures of one in another process.
        token: A token that the query of each request must have, as ``?token=...``; None means none, if the application around this
            one checks its users.
        hosts: Names by which this machine is reached, besides ``localhost``; None accepts all, where the application around
            this one checks them.
        is_remote: Whether other machines may reach it by an address.
    """

    def __init__(
        self,
        source: Collector | Upstream,
        *,
        token: str | None,
        hosts: Sequence[str] | None = (),
        is_remote: bool = False,
    ) -> None:
        self._access = Access(token=token, hosts=hosts, is_remote=is_remote)
        self._feed = Feed(LocalUpstream(source) if isinstance(source, Collector) else source)
        self._tabs = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection, as ASGI 3 defines it."""
        kind = scope["type"]
        if kind == "lifespan":
            await _live(receive, send)
        elif kind == "http":
            await self._serve_request(scope, send)
        elif kind == "websocket":
            await self._serve_tab(scope, receive, send)

    async def _serve_request(self, scope: Scope, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        if scope["method"] not in ("GET", "HEAD"):
            await _respond(send, 405, "Only GET is answered.", extra=[(b"allow", b"GET, HEAD")])
            return
        refusal = self._access.refusal(scope["headers"], scope["query_string"])
        if refusal is not None:
            await _respond(send, refusal.status, refusal.text, is_head=is_head)
            return
        path = _path(scope)
        if path == "":
            # Without the slash the page's own addresses would lead beside it.
            target = scope.get("root_path", "").encode() + b"/?" + scope["query_string"]
            await _respond(send, 307, "", extra=[(b"location", target)], is_head=is_head)
        elif path == "/":
            await _respond(send, 200, page_text(), kind="text/html", is_head=is_head)
        elif path == "/metrics":
            await self._respond_metrics(send, is_head)
        else:
            await _respond(send, 404, "There is no such page.", is_head=is_head)

    async def _respond_metrics(self, send: Send, is_head: bool) -> None:
        with anyio.move_on_after(SNAPSHOT_S_MAX):
            snapshot = msgspec.json.decode(await self._feed.snapshot(), type=Snapshot)
            await _respond(send, 200, metrics_text(snapshot), kind="text/plain", is_head=is_head)
            return
        await _respond(send, 503, "The application does not answer.", is_head=is_head)

    async def _serve_tab(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # The event ``websocket.connect``, which has no content.
        refusal = self._access.refusal(scope["headers"], scope["query_string"])
        if refusal is None and _path(scope) != "/live":
            refusal = Refusal(404, "")
        if refusal is not None or self._tabs >= TABS_MAX:
            # Before the handshake is accepted the server answers with status 403.
            await send({"type": "websocket.close", "code": REFUSED if refusal else TRY_AGAIN})
            return
        self._tabs += 1
        try:
            await send({"type": "websocket.accept"})
            code = await self._answer_tab(receive, send)
            if code is not None:
                with anyio.move_on_after(SEND_S_MAX):
                    await send({"type": "websocket.close", "code": code})
        except OSError:
            pass  # The tab was closed while an answer was on its way.
        finally:
            self._tabs -= 1

    async def _answer_tab(self, receive: Receive, send: Send) -> int | None:
        """Answers questions until the tab is gone; returns the code to close its socket with, None if it is closed."""
        while True:
            message = None
            with anyio.move_on_after(SILENT_S_MAX):
                message = await receive()
            if message is None:
                return TRY_AGAIN
            if message["type"] == "websocket.disconnect":
                return None
            asked = message.get("text")
            if not isinstance(asked, str) or len(asked) > QUESTION_BYTES_MAX:
                return BAD_DATA
            try:
                request = msgspec.json.decode(asked, type=TabRequest)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                return BAD_DATA
            answer = await self._feed.answer(request)
            is_sent = False
            with anyio.move_on_after(SEND_S_MAX):
                await send({"type": "websocket.send", "bytes": answer})
                is_sent = True
            if not is_sent:
                return TRY_AGAIN


async def _live(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


def _path(scope: Scope) -> str:
    """The path below the place where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _respond(
    send: Send,
    status: int,
    text: str,
    *,
    kind: str = "text/plain",
    extra: Sequence[tuple[bytes, bytes]] = (),
    is_head: bool = False,
) -> None:
    body = text.encode()
    headers = [
        (b"content-type", f"{kind}; charset=utf-8".encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        # One request for each connection: one that is kept open and silent would take the place of another.
        (b"connection", b"close"),
        (b"content-security-policy", POLICY.encode()),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else body})

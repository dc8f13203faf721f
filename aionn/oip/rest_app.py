"""The REST form of the Open Inference Protocol as an ASGI application: seven addresses, no framework.

A request is checked before its body is read: its path and method, its ``Host`` against DNS rebinding, ``Origin``, which only
browsers send, and its length. A client that disconnects cancels its execution.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec

import aionn
from aionn.oip import rest_messages as messages
from aionn.oip.door import Door
from aionn.oip.models import message_bytes_max
from aionn.oip.refusals import WHY, refusal_of
from aionn.oip.requests import Answer, Request

__all__ = ["BODY_S_MAX", "RestApp"]

_logger = logging.getLogger("aionn.manager")

BODY_S_MAX: Final = 30.0
"""Time for the body of a request: 250 MB at 10 MB/s, nearly."""

TIMEOUT_S_MAX: Final = 10**9
"""Longest time of ``X-Request-Timeout-Seconds``."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = b"application/json"


class _Rejected(Exception):
    """A request that no error of aionn describes."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Disconnected(Exception):
    """The client is gone."""


class _Response(NamedTuple):
    """A response: its status, the pieces of its body, its headers."""

    status: int
    pieces: Sequence[Any]
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", _JSON),)


class RestApp:
    """Answers requests for a door.

    Args:
        door: Has the models.
        is_remote: Whether other machines reach the server: then ``Host`` may be any name.
    """

    def __init__(self, door: Door, *, is_remote: bool = False) -> None:
        self._door = door
        self._is_remote = is_remote
        self._body_bytes_max = message_bytes_max(door.models.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Web sockets; uvicorn closes the connection.
            raise RuntimeError(f"oip: {scope['type']} is not served")
        arrived_ns = aionn.now_ns()
        try:
            await self._respond(scope, receive, send, arrived_ns)
        except _Disconnected:
            return

    async def _respond(self, scope: Scope, receive: Receive, send: Send, arrived_ns: int) -> None:
        place = None
        try:
            headers = _headers_of(scope)
            self._check_origin(headers)
            parts = _parts_of(scope["path"])
            if parts[-1:] == ["infer"] and len(parts) > 2:
                name, version = _model_of(parts[:-1])
                _check_method(scope, "POST")
                self._door.model(name, version)  # Before the body is read.
                place = self._door.enter()
                response = await self._infer(headers, name, version, receive, arrived_ns)
            else:
                _check_method(scope, "GET")
                response = self._question(parts)
        except _Rejected as e:
            response = _Response(e.status, [messages.error_json(str(e))])
        except Exception as e:
            if isinstance(e, _Disconnected):
                raise
            response = _refused(e)
        finally:
            # Not around the sending: a client that does not read is bounded by the number of connections.
            if place is not None:
                place.leave()
        await _send(response, send)

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        if b"origin" in headers:
            raise _Rejected(403, "requests from pages of a browser are not answered")
        if not self._is_remote and not _is_loopback(headers.get(b"host", b"").decode("latin-1")):
            raise _Rejected(421, "this name is not one of this server's: use 127.0.0.1 or localhost")

    def _question(self, parts: list[str]) -> _Response:
        door = self._door
        match parts:
            case ["v2"]:
                return _Response(200, [messages.server_json()])
            case ["v2", "health", "live"]:
                return _Response(200, [b'{"live":true}'])
            case ["v2", "health", "ready"]:
                return _ready(door.is_ready, "")
            case ["v2", "models", *_]:
                word = parts[-1] if len(parts) in (4, 6) and parts[-1] in ("ready", "config") else ""
                model = door.model(*_model_of(parts[:-1] if word else parts))
                if word == "ready":
                    return _ready(door.is_ready, model.name)
                make = messages.config_json if word == "config" else messages.model_json
                return _Response(200, [make(model.description)])
        raise _Rejected(404, "no such address")

    # --- Inference ---

    async def _infer(
        self, headers: Mapping[bytes, bytes], name: str, version: str, receive: Receive, arrived_ns: int
    ) -> _Response:
        if headers.get(b"content-encoding", b"identity") not in (b"identity", b""):
            raise _Rejected(415, "compressed bodies are not supported")
        json_bytes = _number(headers, b"inference-header-content-length")
        remaining_ns = _remaining_ns(headers)
        body = await self._body(headers, receive)
        outcome: list[Answer] = []
        error: list[Exception] = []

        async with anyio.create_task_group() as tasks:

            async def infer() -> None:
                try:
                    request = await self._request(body, json_bytes, name, version)
                    outcome.append(await self._door.infer(request, arrived_ns, remaining_ns))
                except Exception as e:
                    error.append(e)
                tasks.cancel_scope.cancel()

            tasks.start_soon(infer)
            await _disconnected(receive)
            tasks.cancel_scope.cancel()
        if error:
            raise error[0]
        if not outcome:
            raise _Disconnected
        return await self._response(outcome[0])

    async def _request(self, body: bytes, json_bytes: int | None, name: str, version: str) -> Request:
        return await self._door.convert(
            len(body) if json_bytes is None else json_bytes,
            lambda: messages.request_of(memoryview(body), json_bytes, name, version),
        )

    async def _response(self, answer: Answer) -> _Response:
        work = sum(array.nbytes for _, array, is_binary in answer.outputs if not is_binary)
        pieces, json_bytes = await self._door.convert(work, lambda: messages.response_of(answer))
        if json_bytes is None:
            return _Response(200, pieces)
        length = b"inference-header-content-length", b"%d" % json_bytes
        return _Response(200, pieces, ((b"content-type", b"application/octet-stream"), length))

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        most = self._body_bytes_max
        too_large = _Rejected(413, f"expected a body of at most {most} bytes")
        if (_number(headers, b"content-length") or 0) > most:
            raise too_large
        pieces = []
        count = 0
        try:
            with anyio.fail_after(BODY_S_MAX):
                while True:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise _Disconnected
                    pieces.append(event.get("body", b""))
                    count += len(pieces[-1])
                    if count > most:
                        raise too_large
                    if not event.get("more_body"):
                        return b"".join(pieces)
        except TimeoutError:
            raise _Rejected(408, f"expected the whole body within {BODY_S_MAX:g} s") from None


async def _disconnected(receive: Receive) -> None:
    """Waits until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(response: _Response, send: Send) -> None:
    length = b"%d" % sum(len(piece) for piece in response.pieces)
    headers = [*response.headers, (b"content-length", length)]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    last = len(response.pieces) - 1
    for index, piece in enumerate(response.pieces):
        await send({"type": "http.response.body", "body": bytes(piece), "more_body": index < last})


def _refused(error: Exception) -> _Response:
    if not isinstance(error, aionn.Error):
        _logger.error("oip: a request failed", exc_info=error)
    refusal = refusal_of(error)
    why = WHY.encode(), refusal.why.encode()
    return _Response(refusal.status, [messages.error_json(refusal.text)], ((b"content-type", _JSON), why))


def _ready(is_ready: bool, name: str) -> _Response:
    text = {"name": name, "ready": is_ready} if name else {"ready": is_ready}
    return _Response(200 if is_ready else 503, [msgspec.json.encode(text)])


def _headers_of(scope: Scope) -> dict[bytes, bytes]:
    """The headers by name in lower case.

    Raises:
        _Rejected: One that is used here is there twice.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name in (b"host", b"content-length", b"inference-header-content-length"):
            raise _Rejected(400, f"expected the header {name.decode('latin-1')} once, got it twice")
        found[name] = value.strip()
    return found


def _parts_of(path: str) -> list[str]:
    return path.strip("/").split("/")


def _model_of(parts: Sequence[str]) -> tuple[str, str]:
    """Name and version of the model that a path names; the version is empty without one.

    Raises:
        _Rejected: It is not the path of a model.
    """
    match parts:
        case ["v2", "models", name]:
            return name, ""
        case ["v2", "models", name, "versions", version] if version:
            return name, version
    raise _Rejected(404, "no such address")


def _check_method(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise _Rejected(405, f"expected {method}, got {scope['method']}")


def _number(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    """The number in a header; None without it."""
    text = headers.get(name)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 15:
        raise _Rejected(400, f"header {name.decode()}: expected a number of bytes, got {text[:40]!r}")
    return int(text)


def _remaining_ns(headers: Mapping[bytes, bytes]) -> int | None:
    text = headers.get(b"x-request-timeout-seconds")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= TIMEOUT_S_MAX:
        raise _Rejected(
            400, f"header x-request-timeout-seconds: expected seconds from 0 on, got {text[:40]!r}"
        )
    return int(seconds * 1e9)


def _is_loopback(netloc: str) -> bool:
    try:
        host = urlsplit(f"//{netloc}").hostname
        return host == "localhost" or (host is not None and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False

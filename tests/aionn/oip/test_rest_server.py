"""The REST server over sockets: addresses, statuses, and clients that are hostile, slow or gone."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.abc
import numpy as np
import pytest

import aionn
from aionn.oip import rest_app
from aionn.oip.door import Door
from tests.aionn.oip.conftest import HeldNet, served_model

pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")

from aionn.oip import rest_server  # It imports uvicorn.

WAIT_S_MAX = 20.0
INFER = "/v2/models/double/infer"


class Response(NamedTuple):
    """A response: status, headers by name in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server(NamedTuple):
    """A door with one model, and the port of its server."""

    net: HeldNet
    door: Door
    port: int

    async def connect(self) -> anyio.abc.SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        """One request on a connection of its own; underscores in names of headers are hyphens."""
        given = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"}
        if body or method == "POST":
            given["Content-Length"] = str(len(body))
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
        async with await self.connect() as stream:
            await stream.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            return parsed(await everything(stream))

    async def infer(self, values: list[float] | None = None, **headers: str) -> Response:
        return await self.ask("POST", INFER, infer_body(values), **headers)


def infer_body(values: list[float] | None = None, **more: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": values or [1, 2, 3, 4]}
    return json.dumps({"inputs": [tensor], **more}).encode()


async def everything(stream: anyio.abc.SocketStream) -> bytes:
    """Reads until the server closes a connection."""
    content = b""
    with anyio.fail_after(WAIT_S_MAX):
        while True:
            try:
                content += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return content


def parsed(content: bytes) -> Response:
    head, _, body = content.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return Response(int(first.split()[1]), {name.lower(): value for name, value in pairs}, body)


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_S_MAX):
        while not is_so():
            await anyio.sleep(0.001)


@asynccontextmanager
async def serving(executions_max: int = 4, *, is_remote: bool = False) -> AsyncIterator[Server]:
    net = HeldNet()
    door = Door({"double": served_model(net)}, executions_max=executions_max)
    server = rest_server.RestServer(door, "127.0.0.1", 0, is_remote=is_remote)
    try:
        yield Server(net, door, await server.start())
    finally:
        net.release()
        await server.stop()


async def test_every_address_is_answered() -> None:
    async with serving() as server:
        for path, expected in (
            ("/v2", {"name": "aionn"}),
            ("/v2/", {"name": "aionn"}),
            ("/v2/health/live", {"live": True}),
            ("/v2/health/ready", {"ready": True}),
            ("/v2/models/double", {"name": "double", "versions": ["1"]}),
            ("/v2/models/double/versions/1", {"name": "double"}),
            ("/v2/models/double/ready", {"name": "double", "ready": True}),
            ("/v2/models/double/versions/1/ready", {"ready": True}),
            ("/v2/models/double/config", {"max_batch_size": 0}),
        ):
            found = await server.ask("GET", path)
            assert found.status == 200, path
            assert expected.items() <= found.json.items()
        for path in (INFER, "/v2/models/double/versions/1/infer"):
            found = await server.ask("POST", path, infer_body([1, 2, 3, 4], id="7"))
            assert (found.status, found.json["id"]) == (200, "7")
            assert found.json["outputs"] == [
                {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [2, 4, 6, 8]}
            ]


async def test_binary_tensors_go_both_ways() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    async with serving() as server:
        found = await server.ask(
            "POST",
            INFER,
            head + np.arange(4, dtype="<f4").tobytes(),
            Inference_Header_Content_Length=str(len(head)),
        )
    assert (found.status, found.headers["content-type"]) == (200, "application/octet-stream")
    length = int(found.headers["inference-header-content-length"])
    assert json.loads(found.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(found.body[length:], "<f4").tolist() == [0, 2, 4, 6]


MISTAKES: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "/", {}, 404),
    ("GET", "/v2/models", {}, 404),
    ("GET", "/v2/models/other", {}, 404),
    ("GET", "/v2/models/double/versions/2", {}, 404),
    ("GET", "/v2/models/double/stats", {}, 404),
    ("GET", "/v2/models/double/versions", {}, 404),
    ("GET", "/v2/../../etc/passwd", {}, 404),
    ("POST", "/v2", {}, 405),
    ("GET", INFER, {}, 405),
    ("POST", "/v2/models/other/infer", {}, 404),
    ("POST", "/v2/models/double/versions/9/infer", {}, 404),
    ("POST", INFER, {}, 400),
    ("POST", INFER, {"Content_Encoding": "gzip"}, 415),
    ("POST", INFER, {"Inference_Header_Content_Length": "-1"}, 400),
    ("POST", INFER, {"Inference_Header_Content_Length": "9" * 40}, 400),
    ("POST", INFER, {"X_Request_Timeout_Seconds": "nan"}, 400),
    ("POST", INFER, {"Origin": "http://evil.example"}, 403),
    ("GET", "/v2", {"Host": "evil.example"}, 421),
    ("GET", "/v2", {"Host": "localhost:1"}, 200),
    ("GET", "/v2", {"Host": "[::1]"}, 200),
]
"""Method, path and headers of requests, and the statuses that they get."""


async def test_request_gets_the_status_that_its_mistake_has() -> None:
    async with serving() as server:
        for method, path, headers, status in MISTAKES:
            found = await server.ask(method, path, **headers)
            assert (method, path, headers, found.status) == (method, path, headers, status)
            assert status == 200 or found.json["error"]
        assert server.door.under_way == 0


async def test_name_of_a_remote_server_is_any() -> None:
    async with serving(is_remote=True) as server:
        assert (await server.ask("GET", "/v2", Host="models.example")).status == 200
        assert (await server.ask("GET", "/v2", Origin="http://models.example")).status == 403


async def test_errors_of_an_execution_have_their_statuses() -> None:
    async with serving() as server:
        for error, status, why in (
            (aionn.MissedDeadline("late"), 504, "MISSED_DEADLINE_TRANSIENT"),
            (aionn.ResourceExhausted("full"), 429, "RESOURCE_EXHAUSTED_TRANSIENT"),
            (aionn.DeadObject("gone"), 503, "DEAD_OBJECT"),
            (ZeroDivisionError("secret"), 500, "GENERAL_FAILURE"),
        ):
            server.net.error = error
            found = await server.infer()
            assert (found.status, found.headers["aionn-why"]) == (status, why)
            assert b"secret" not in found.body


async def test_deadline_is_the_header_or_a_parameter() -> None:
    async with serving() as server:
        server.net.is_held = True
        assert (await server.infer(X_Request_Timeout_Seconds="0.03")).status == 504
        body = infer_body(parameters={"aionn_deadline_us": 50_000, "aionn_age_us": 45_000})
        assert (await server.ask("POST", INFER, body)).status == 504
        assert server.door.under_way == 0


async def test_full_door_and_draining_one_refuse() -> None:
    async with serving(executions_max=1) as server:
        server.net.is_held = True
        found: list[Response] = []

        async def first() -> None:
            found.append(await server.infer())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await until(lambda: server.net.running == 1)
            assert (await server.infer()).status == 429
            tasks.start_soon(server.door.drain, WAIT_S_MAX)
            await until(lambda: not server.door.is_ready)
            assert (await server.infer()).status == 503
            ready = await server.ask("GET", "/v2/health/ready")
            assert (ready.status, ready.json) == (503, {"ready": False})
            assert (await server.ask("GET", "/v2/models/double/ready")).status == 503
            assert (await server.ask("GET", "/v2/health/live")).status == 200
            server.net.release()
        assert found[0].status == 200


async def test_client_that_disconnects_cancels_its_execution() -> None:
    async with serving() as server:
        server.net.is_held = True
        async with await server.connect() as stream:
            head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(infer_body())}\r\n\r\n"
            await stream.send(head.encode() + infer_body())
            await until(lambda: server.net.running == 1)
        await until(lambda: server.net.cancelled == 1)
        await until(lambda: server.door.under_way == 0)


async def test_body_beyond_the_largest_message_is_refused_before_it_is_read() -> None:
    async with serving() as server:
        async with await server.connect() as stream:
            await stream.send(
                f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000\r\n\r\n".encode()
            )
            assert b" 413 " in (await stream.receive()).partition(b"\r\n")[0]
        async with await server.connect() as stream:
            # Without a length: the chunks are counted.
            await stream.send(
                f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
            answer = b""
            with anyio.fail_after(WAIT_S_MAX):
                for _ in range(100):
                    await stream.send(b"4000\r\n" + bytes(0x4000) + b"\r\n")
                    with anyio.move_on_after(0.001):
                        answer += await stream.receive()
                    if answer:
                        break
                answer = answer or await stream.receive()
            assert b" 413 " in answer
        assert server.door.under_way == 0


@pytest.mark.parametrize(
    "content",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00\xff" * 100,
        b"GET /v2 HTTP/1.1\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST " + INFER.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
    ],
)
async def test_request_that_is_none_is_refused_or_ended(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_server, "HEADERS_S_MAX", 0.3)
    monkeypatch.setattr(rest_app, "BODY_S_MAX", 0.3)
    async with serving() as server:
        async with await server.connect() as stream:
            with anyio.fail_after(WAIT_S_MAX):
                try:
                    await stream.send(content)
                except anyio.BrokenResourceError:
                    pass
            answer = await everything(stream)
        assert answer == b"" or parsed(answer).status in (400, 404, 408, 421)
        assert (await server.infer()).status == 200


async def test_silent_and_slow_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_server, "HEADERS_S_MAX", 0.2)
    monkeypatch.setattr(rest_app, "BODY_S_MAX", 0.2)
    async with serving() as server:
        async with await server.connect() as silent, await server.connect() as headers:
            await headers.send(b"GET /v2 HTTP/1.1\r\nHost: local")
            assert await everything(silent) == b""
            assert await everything(headers) == b""
        async with await server.connect() as second:
            # The second request of a connection has the same limit.
            await second.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v2 HTTP/1.1\r\nHo")
            assert (await everything(second)).startswith(b"HTTP/1.1 200")
        async with await server.connect() as body:
            await body.send(
                f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300\r\n\r\n{{".encode()
            )
            assert parsed(await everything(body)).status == 408
        assert server.door.under_way == 0


async def test_connection_with_few_unread_bytes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn itself closes it when all was sent, which an unread answer never is, and counts it until then."""
    monkeypatch.setattr(rest_server, "UNREAD_S_MAX", 0.2)
    monkeypatch.setattr(rest_server, "CONNECTIONS_MAX", 1)
    listen = rest_server._listener

    def with_small_buffers(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # Accepted sockets have it, too.
        return listener

    monkeypatch.setattr(rest_server, "_listener", with_small_buffers)
    async with serving() as server:
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            unread.connect(("127.0.0.1", server.port))
            # Some 40 kB of answers, which are less than asyncio's limit for ``pause_writing``, and more than the kernel takes.
            unread.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
            statuses: list[int] = []
            with anyio.fail_after(WAIT_S_MAX):
                while 200 not in statuses:
                    async with await server.connect() as other:
                        await other.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                        content = await everything(other)
                        statuses.append(parsed(content).status if content else 0)
            assert statuses[0] == 0, "its place was taken"


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_server, "CONNECTIONS_MAX", 2)
    async with (
        serving() as server,
        await server.connect(),
        await server.connect(),
        await server.connect() as third,
    ):
        assert await everything(third) == b""


async def test_address_that_cannot_be_used_is_an_error_with_the_place() -> None:
    async with serving() as server:
        other = rest_server.RestServer(server.door, "127.0.0.1", server.port)
        with pytest.raises(aionn.InvalidArgument, match=f"127.0.0.1:{server.port}: cannot listen there"):
            await other.start()
        await other.stop()


async def test_large_values_are_converted_in_a_thread() -> None:
    class Wide(HeldNet):
        inputs = (aionn.TensorSpec("x", HeldNet.inputs[0].type, (1, 40_000)),)

    net = Wide()
    door = Door({"double": served_model(net)})
    calls: list[int] = []
    convert = door.convert

    async def counted(work_bytes: int, work: Callable[[], Any]) -> Any:
        calls.append(work_bytes)
        return await convert(work_bytes, work)

    door.convert = counted  # type: ignore[method-assign]
    server = rest_server.RestServer(door, "127.0.0.1", 0)
    port = await server.start()
    values = np.arange(40_000).tolist()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 40_000], "data": values}
    found = await Server(net, door, port).ask("POST", INFER, json.dumps({"inputs": [tensor]}).encode())
    await server.stop()
    assert found.json["outputs"][0]["data"] == [2 * value for value in values]
    assert len(calls) == 3 and min(calls) > 32 << 10

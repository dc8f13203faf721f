"""Claims about the gRPC server, checked in a process of its own: gRPC's threads and descriptors stay until a process ends.

``python -m tests.aionn.oip.grpc_claims`` prints a JSON object: the traceback of each claim that failed, empty for the others.
Clients are channels of ``grpc.aio`` that send bytes, and sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import grpc
import grpc.aio
import numpy as np

import aionn
from aionn.oip import grpc_messages, grpc_server, unread
from aionn.oip import protobuf as pb
from aionn.oip.door import Door
from aionn.oip.grpc_server import SERVICE, GrpcServer
from tests.aionn.oip.conftest import HeldNet, served_model
from tests.aionn.oip.windowless import calls_without_a_window

CLAIM_S_MAX = 30.0
"""A claim that takes longer has failed."""

ROUNDED_NS_MAX = 1e9
"""gRPC rounds the time that is left up, to steps of 0.1 s here, and converts deadlines from one clock to another: a deadline of the
server may be later than the client's, by some milliseconds as measured."""


def infer_message(
    values: list[float] | None = None, model: str = "double", id: str = "", **parameters: int
) -> bytes:
    """A ``ModelInferRequest`` with raw contents."""
    tensor = [*pb.view_field(1, "x"), *pb.view_field(2, "FP32"), pb.packed_field(3, (1, 4))]
    pieces = [*pb.view_field(1, model), *pb.view_field(3, id)]
    for name, value in parameters.items():
        number = b"".join(pb.view_field(2, pb.number_field(2, value)))
        pieces += pb.view_field(4, b"".join([*pb.view_field(1, name), number]))
    pieces += pb.view_field(5, b"".join(tensor))
    pieces += pb.view_field(7, np.array(values or [1, 2, 3, 4], "<f4").tobytes())
    return b"".join(pieces)


def outputs_of(message: bytes) -> list[float]:
    """The values of the only output of a ``ModelInferResponse``."""
    raw = [value for number, _, value in pb.fields(memoryview(message), "answer") if number == 6]
    return list(np.frombuffer(raw[0], "<f4"))


def streamed(message: bytes) -> tuple[str, str, list[float]]:
    """Error, id and values of a ``ModelStreamInferResponse``."""
    found: dict[int, Any] = {n: v for n, _, v in pb.fields(memoryview(message), "answer")}
    response = found.get(2, memoryview(b""))
    ids = [bytes(value) for number, _, value in pb.fields(response, "answer") if number == 3]
    error = bytes(found.get(1, b"")).decode()
    return error, b"".join(ids).decode(), [] if error else outputs_of(bytes(response))


class Client(NamedTuple):
    """A door with one model, and a channel to its server."""

    net: HeldNet
    door: Door
    server: GrpcServer
    port: int
    channel: grpc.aio.Channel

    def call(self, method: str, message: bytes = b"", **more: Any) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/{method}")(message, **more)

    def infer(self, message: bytes | None = None, **more: Any) -> Any:
        return self.call("ModelInfer", infer_message() if message is None else message, **more)

    def stream(self, **more: Any) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(**more)

    async def running(self, count: int) -> None:
        await until(lambda: self.net.running == count)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition; the claim has a limit."""
    while not is_so():
        await anyio.sleep(0.001)


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str, str | None]:
    """Code, text and ``aionn-why`` of a call that fails."""
    try:
        await call
    except grpc.aio.AioRpcError as e:
        trailers = dict(e.trailing_metadata() or ())
        return e.code(), e.details() or "", trailers.get("aionn-why")
    raise AssertionError("it succeeded")


@asynccontextmanager
async def serving(executions_max: int = 4) -> AsyncIterator[Client]:
    net = HeldNet()
    door = Door({"double": served_model(net)}, executions_max=executions_max)
    server = GrpcServer(door, "127.0.0.1:0")
    port = await server.start()
    # Each claim has a connection of its own.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        try:
            yield Client(net, door, server, port, channel)
        finally:
            net.release()
    await server.stop()


# --- Unary calls --------------------------------------------------------------------------------------------------------------


async def claim_request_is_answered() -> None:
    async with serving() as client:
        assert outputs_of(await client.infer(infer_message([1, 2, 3, 4]))) == [2, 4, 6, 8]
        assert client.door.under_way == 0


async def claim_deadline_of_the_client_is_that_of_the_execution() -> None:
    async with serving() as client:
        began_ns = aionn.now_ns()
        await client.infer(timeout=20)
        await client.infer()
        first, second = (deadline for deadline, _ in client.net.asked)
        assert first is not None and began_ns + 10e9 < first <= aionn.now_ns() + 20e9 + ROUNDED_NS_MAX
        assert second is None


async def claim_expired_deadline_ends_the_execution_and_frees_its_place() -> None:
    async with serving() as client:
        client.net.is_held = True
        code, _, _ = await refused(client.infer(timeout=0.05))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await client.running(0)
        await until(lambda: client.door.under_way == 0)


async def claim_deadline_by_parameter_is_reported_with_the_reason() -> None:
    async with serving() as client:
        client.net.is_held = True
        message = infer_message(aionn_deadline_us=50_000, aionn_age_us=45_000)
        code, text, why = await refused(client.infer(message))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (text, why) == ("held: the deadline passed", "MISSED_DEADLINE_PERSISTENT")


async def claim_cancelled_call_cancels_the_execution() -> None:
    async with serving() as client:
        client.net.is_held = True
        call = client.infer()
        await client.running(1)
        call.cancel()
        await client.running(0)
        assert client.net.cancelled == 1
        await until(lambda: client.door.under_way == 0)


async def claim_client_that_is_gone_cancels_its_execution() -> None:
    async with serving() as client:
        client.net.is_held = True
        other = grpc.aio.insecure_channel(f"127.0.0.1:{client.port}", [("grpc.use_local_subchannel_pool", 1)])
        call = other.unary_unary(f"/{SERVICE}/ModelInfer")(infer_message())
        await client.running(1)
        await other.close()
        await client.running(0)
        assert client.net.cancelled == 1
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call


async def claim_request_without_a_place_is_refused_immediately() -> None:
    async with serving(executions_max=3) as client:
        client.net.is_held = True
        calls = [client.infer() for _ in range(3)]
        await client.running(3)
        code, text, why = await refused(client.infer())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3 requests are under way" in text
        assert why == "RESOURCE_EXHAUSTED_TRANSIENT"
        client.net.release()
        for call in calls:
            await call


async def claim_drain_answers_what_was_accepted_and_refuses_the_rest() -> None:
    async with serving() as client:
        client.net.is_held = True
        call = client.infer()
        await client.running(1)
        drain = asyncio.ensure_future(client.door.drain(20))
        await until(lambda: not client.door.is_ready)
        code, _, why = await refused(client.infer())
        assert (code, why) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_UNAVAILABLE")
        assert await client.call("ServerLive") == grpc_messages.flag_message(True)
        assert await client.call("ServerReady") == b""
        assert await client.call("ModelReady", b"".join(pb.view_field(1, "double"))) == b""
        client.net.release()
        assert outputs_of(await call) == [2, 4, 6, 8]
        assert await drain


async def claim_errors_have_their_codes() -> None:
    async with serving() as client:
        cases = [
            (client.infer(infer_message(model="other")), "NOT_FOUND", "model 'other' is not served"),
            (client.infer(b"\x0a\x05ab"), "INVALID_ARGUMENT", "field 1 has 5 bytes"),
            (client.infer(infer_message(priority=-1)), "INVALID_ARGUMENT", "priority"),
            (client.call("ModelMetadata", b"".join(pb.view_field(1, "no"))), "NOT_FOUND", "'no'"),
            (client.call("ModelConfig", b"".join(pb.view_field(1, "no"))), "NOT_FOUND", "'no'"),
            (client.call("ModelReady", b"\xff"), "INVALID_ARGUMENT", "does not end"),
            (client.call("SystemSharedMemoryRegister"), "UNIMPLEMENTED", ""),
            (client.infer(bytes(1 << 20)), "RESOURCE_EXHAUSTED", "larger"),
        ]
        for call, code, text in cases:
            found, details, _ = await refused(call)
            assert (found.name, text in details) == (code, True), details
        assert outputs_of(await client.infer()) == [2, 4, 6, 8]


async def claim_errors_of_the_device_have_their_codes() -> None:
    async with serving() as client:
        for error, code, why in (
            (aionn.DeadObject("gone"), "UNAVAILABLE", "DEAD_OBJECT"),
            (aionn.GeneralFailure("broken"), "INTERNAL", "GENERAL_FAILURE"),
            (ZeroDivisionError("secret"), "INTERNAL", "GENERAL_FAILURE"),
        ):
            client.net.error = error
            found, text, reason = await refused(client.infer())
            assert (found.name, reason) == (code, why)
            assert "secret" not in text
        assert client.door.under_way == 0


async def claim_long_text_of_an_error_reaches_the_client() -> None:
    async with serving() as client:
        client.net.error = aionn.InvalidArgument("\N{SNOWMAN}" * 5000)
        code, text, _ = await refused(client.infer())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith("\N{SNOWMAN}" * 100)


# --- Streams ------------------------------------------------------------------------------------------------------------------


async def claim_stream_answers_in_order_and_continues_after_an_error() -> None:
    async with serving(executions_max=20) as client:
        stream = client.stream()
        for number in range(30):
            model = "other" if number == 5 else "double"
            await stream.write(infer_message([number] * 4, model=model, id=f"r{number}"))
        await stream.done_writing()
        answers = [streamed(message) async for message in stream]
        assert [identifier for _, identifier, _ in answers] == [f"r{number}" for number in range(30)]
        for number, (error, _, values) in enumerate(answers):
            if number == 5:
                assert error == "model 'other' is not served [INVALID_ARGUMENT]"
            else:
                assert (error, values) == ("", [2 * number] * 4)
        assert client.door.under_way == 0


async def claim_stream_executes_a_bounded_number_of_requests_concurrently() -> None:
    async with serving(executions_max=64) as client:
        client.net.is_held = True
        stream = client.stream()
        for number in range(40):
            await stream.write(infer_message(id=str(number)))
        await stream.done_writing()
        most = grpc_server.STREAM_REQUESTS_MAX
        await client.running(most)
        await anyio.sleep(0.05)
        assert client.net.running == most
        client.net.release()
        assert [streamed(message)[1] async for message in stream] == [str(n) for n in range(40)]


async def claim_full_door_is_an_error_of_the_stream() -> None:
    async with serving(executions_max=1) as client:
        client.net.is_held = True
        call = client.infer()
        await client.running(1)
        stream = client.stream()
        await stream.write(infer_message(id="a"))
        error, identifier, _ = streamed(await stream.read())
        assert "1 requests are under way" in error
        assert identifier == ""
        client.net.release()
        await call
        await stream.write(infer_message(id="b"))
        assert streamed(await stream.read()) == ("", "b", [2, 4, 6, 8])
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def claim_cancelled_stream_cancels_its_executions() -> None:
    async with serving() as client:
        client.net.is_held = True
        stream = client.stream()
        for _ in range(3):
            await stream.write(infer_message())
        await client.running(3)
        stream.cancel()
        await client.running(0)
        assert client.net.cancelled == 3
        await until(lambda: client.door.under_way == 0)


async def claim_deadline_of_a_stream_is_that_of_its_requests() -> None:
    async with serving() as client:
        stream = client.stream(timeout=20)
        await stream.write(infer_message())
        await stream.read()
        ((deadline, _),) = client.net.asked
        assert deadline is not None and deadline <= aionn.now_ns() + 20e9 + ROUNDED_NS_MAX
        stream.cancel()


async def claim_streams_are_bounded() -> None:
    async with serving() as client:
        grpc_server.STREAMS_MAX, before = 2, grpc_server.STREAMS_MAX  # type: ignore[misc]
        try:
            first, second = client.stream(), client.stream()
            for stream in (first, second):
                await stream.write(infer_message())
                await stream.read()
            third = client.stream()
            code, text, _ = await refused(third.read())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 streams are open" in text
            await first.done_writing()
            assert await first.read() is grpc.aio.EOF
            fourth = client.stream()
            await fourth.write(infer_message(id="4"))
            assert streamed(await fourth.read())[1] == "4"
            for stream in (second, fourth):
                stream.cancel()
        finally:
            grpc_server.STREAMS_MAX = before  # type: ignore[misc]


async def claim_silent_stream_is_ended() -> None:
    async with serving() as client:
        grpc_server.STREAM_SILENT_S_MAX, before = 0.1, grpc_server.STREAM_SILENT_S_MAX  # type: ignore[misc]
        try:
            stream = client.stream()
            await stream.write(infer_message())
            await stream.read()
            code, text, _ = await refused(stream.read())
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "nothing was requested for 0.1 s" in text
            assert outputs_of(await client.infer()) == [2, 4, 6, 8]
        finally:
            grpc_server.STREAM_SILENT_S_MAX = before  # type: ignore[misc]


async def claim_stream_that_is_not_read_is_ended_and_its_places_are_free() -> None:
    class Wide(HeldNet):
        outputs = (aionn.TensorSpec("y", HeldNet.outputs[0].type, (1, 1 << 20)),)

        async def execute(self, inputs: Any, **more: Any) -> Any:
            found = await super().execute(inputs, **more)
            found.outputs = [np.zeros((1, 1 << 20), np.float32)]
            return found

    grpc_server.STREAM_UNREAD_S_MAX, before = 0.2, grpc_server.STREAM_UNREAD_S_MAX  # type: ignore[misc]
    try:
        net = Wide()
        door = Door({"double": served_model(net)})
        server = GrpcServer(door, "127.0.0.1:0")
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
            for _ in range(4):
                await stream.write(infer_message())
            await until(lambda: len(net.asked) == 4)
            await until(lambda: door.under_way == 0)
            stream.cancel()
        await server.stop()
    finally:
        grpc_server.STREAM_UNREAD_S_MAX = before  # type: ignore[misc]


async def claim_connection_whose_answers_are_not_read_is_closed_and_its_calls_are_free() -> None:
    unread.UNREAD_S_MAX, before = 0.2, unread.UNREAD_S_MAX  # type: ignore[misc]
    most = grpc_server.CALLS_MAX
    grpc_server.CALLS_MAX = 4  # type: ignore[misc]
    try:
        async with serving() as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(calls_without_a_window("ServerMetadata", 4))
            while await reader.read(
                1 << 16
            ):  # Until the server has closed it; the acknowledgement of settings is not required.
                pass
            writer.close()
            assert await client.call("ServerMetadata")
    finally:
        unread.UNREAD_S_MAX, grpc_server.CALLS_MAX = before, most  # type: ignore[misc]


async def claim_connection_whose_answers_are_read_stays_open() -> None:
    unread.UNREAD_S_MAX, before = 0.1, unread.UNREAD_S_MAX  # type: ignore[misc]
    closed: list[str] = []
    shut_down = unread.shut_down
    unread.shut_down = lambda peer: closed.append(peer) or 0
    try:
        async with serving() as client:
            stream = client.stream()
            for _ in range(3):
                assert await client.call("ServerMetadata")
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await client.call("ModelMetadata", bytes([10, 1, 120]))
                await stream.write(infer_message())
                assert streamed(await stream.read())[2] == [2, 4, 6, 8]
            await anyio.sleep(3 * unread.UNREAD_S_MAX)
            stream.cancel()
            assert closed == []
    finally:
        unread.UNREAD_S_MAX, unread.shut_down = before, shut_down  # type: ignore[misc]


async def claim_stream_gets_an_error_while_the_door_drains() -> None:
    async with serving() as client:
        stream = client.stream()
        await stream.write(infer_message())
        await stream.read()
        await client.door.drain(1)
        await stream.write(infer_message())
        error, _, _ = streamed(await stream.read())
        assert error == "the server is ending: it accepts nothing new [DEVICE_UNAVAILABLE]"
        stream.cancel()


# --- Connections --------------------------------------------------------------------------------------------------------------


async def ends(sock: socket.socket) -> bytes:
    """Reads until the server ends a connection; returns the bytes."""
    sock.setblocking(False)
    content = b""
    while True:
        await anyio.wait_readable(sock.fileno())
        try:
            more = sock.recv(65536)
        except ConnectionError:
            return content
        if not more:
            return content
        content += more


ENDLESS_BYTES = 64 << 20
"""Bytes of headers that do not end."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(content).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content


async def claim_connection_that_sends_nothing_is_closed() -> None:
    before = grpc_server.HANDSHAKE_MS_MAX
    grpc_server.HANDSHAKE_MS_MAX = 200  # type: ignore[misc]
    try:
        async with serving() as client:
            with socket.create_connection(("127.0.0.1", client.port)) as silent:
                await ends(silent)
            with socket.create_connection(("127.0.0.1", client.port)) as half:
                half.sendall(PREFACE[:7])
                await ends(half)
            assert outputs_of(await client.infer()) == [2, 4, 6, 8]
    finally:
        grpc_server.HANDSHAKE_MS_MAX = before  # type: ignore[misc]


async def claim_bytes_that_are_not_http2_end_their_connection() -> None:
    async with serving() as client:
        for content in (
            b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n",
            bytes(range(256)) * 8,
            PREFACE + b"\xff" * 64,
            PREFACE + SETTINGS + frame(0, 0, 1, b"data of a stream that was not opened"),
        ):
            with socket.create_connection(("127.0.0.1", client.port)) as sock:
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
                await ends(sock)
        assert outputs_of(await client.infer()) == [2, 4, 6, 8]


async def claim_headers_without_end_take_no_memory_and_delay_no_others() -> None:
    async with serving() as client:
        # One literal header whose value never ends, in CONTINUATION frames.
        value = b"\x00\x03abc\x7f" + b"\xff\xff\xff\x07"
        with socket.create_connection(("127.0.0.1", client.port)) as sock:
            sock.settimeout(CLAIM_S_MAX)
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with contextlib.suppress(ConnectionError):
                sock.sendall(PREFACE + SETTINGS + frame(1, 0, 1, value))
                for _ in range(ENDLESS_BYTES // 16000):
                    sock.sendall(frame(9, 0, 1, b"x" * 16000))
                    await anyio.lowlevel.checkpoint()
            assert outputs_of(await client.infer()) == [2, 4, 6, 8]
            gained_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            assert gained_kib < ENDLESS_BYTES / 1024 / 4, gained_kib


async def claim_large_headers_are_refused() -> None:
    async with serving() as client:
        metadata = [(f"x-{number}", "v" * 1000) for number in range(40)]
        code, _, _ = await refused(client.infer(metadata=metadata))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.net.asked == []
        assert outputs_of(await client.infer()) == [2, 4, 6, 8]


async def claim_connections_are_bounded() -> None:
    before = grpc_server.CONNECTIONS_MAX
    grpc_server.CONNECTIONS_MAX = 4  # type: ignore[misc]
    try:
        async with serving() as client:
            assert outputs_of(await client.infer()) == [2, 4, 6, 8]
            with contextlib.ExitStack() as stack:
                socks = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
                    for _ in range(8)
                ]
                for sock in socks:
                    with contextlib.suppress(ConnectionError):
                        sock.sendall(PREFACE + SETTINGS)
                ended = [0]

                async def end(sock: socket.socket) -> None:
                    await ends(sock)
                    ended[0] += 1

                async with anyio.create_task_group() as tasks:
                    for sock in socks:
                        tasks.start_soon(end, sock)
                    await until(lambda: ended[0] >= 5)
                    tasks.cancel_scope.cancel()
            assert outputs_of(await client.infer()) == [2, 4, 6, 8]
    finally:
        grpc_server.CONNECTIONS_MAX = before  # type: ignore[misc]


async def claim_port_in_use_is_an_error_with_the_place() -> None:
    async with serving() as client:
        try:
            await GrpcServer(client.door, f"127.0.0.1:{client.port}").start()
        except aionn.InvalidArgument as e:
            assert f"127.0.0.1:{client.port}: cannot listen there" in str(e)
        else:
            raise AssertionError("it listens twice")


async def main() -> None:
    outcomes = {}
    for name, claim in list(globals().items()):
        if name.startswith("claim_"):
            try:
                with anyio.fail_after(CLAIM_S_MAX):
                    await claim()
                outcomes[name] = ""
            except BaseException:
                outcomes[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    anyio.run(main)

"""``inference.GRPCInferenceService`` by grpcio: the calls of the Open Inference Protocol, and Triton's stream and configuration.

Owns the limits of connections, calls and streams. Handlers take and give bytes: ``grpc_messages`` reads and writes them.

A stream is one ordered channel: each of its requests has one answer, in the order of the requests. The error of a request is a
message of the stream, and does not end it.

gRPC cancels a handler when its client cancels, is gone, or is out of time; the execution is cancelled with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import grpc
import grpc.aio

import aionn
from aionn.oip import grpc_messages as messages
from aionn.oip.door import Door, Place
from aionn.oip.models import message_bytes_max
from aionn.oip.refusals import WHY, Refusal, refusal_of
from aionn.oip.unread import AnsweredCall, UnreadCalls

__all__ = ["SERVICE", "GrpcServer"]

_logger = logging.getLogger("aionn.manager")

SERVICE: Final = "inference.GRPCInferenceService"

CALLS_MAX: Final = 256
"""Calls at the same time, of all kinds: requests in excess of a door's places are refused within a millisecond, streams are bounded
by ``STREAMS_MAX``, and questions about models are short."""

CALLS_PER_CONNECTION_MAX: Final = 100
"""Calls of one connection at the same time; a client waits for its turn with more."""

CONNECTIONS_MAX: Final = 256
"""Connections at the same time. Each needs a descriptor and some 30 KiB."""

STREAMS_MAX: Final = 32
"""Open streams at the same time: one for each camera of a large machine."""

STREAM_REQUESTS_MAX: Final = 8
"""Requests of one stream under way: while one is executed, others are decoded and wait in the scheduler. The client's next ones are
not read, which the flow control of HTTP/2 shows to the client."""

STREAM_SILENT_S_MAX: Final = 600.0
"""A stream on which nothing was requested for so long is ended."""

STREAM_UNREAD_S_MAX: Final = 30.0
"""A stream whose client does not read an answer for so long is ended."""

HEADERS_BYTES_MAX: Final = 8 << 10
"""Headers of a call. Larger ones end the call, and the connection where they are twice as large."""

HANDSHAKE_MS_MAX: Final = 5_000
"""A connection that has not begun HTTP/2 after this time is closed."""

IDLE_MS_MAX: Final = 600_000
"""A connection without a call is closed after this time; clients connect again by themselves."""

PING_MS: Final = 20_000
"""A connection is asked for a sign of life so often."""

PONG_MS_MAX: Final = 10_000
"""One that does not answer within this time is closed: its machine is gone."""

CLIENT_PING_MS_MIN: Final = 5_000
"""Clients that ping more often are disconnected."""

FLUSH_S_MAX: Final = 0.5
"""Time in which answers are still sent after the last one was given, and open streams are ended in order."""


class _Context(AnsweredCall, Protocol):
    """The members of ``grpc.aio.ServicerContext`` that are used."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> None: ...

    async def read(self) -> Any: ...

    async def write(self, message: bytes) -> None: ...

    def time_remaining(self) -> float | None: ...


_Answer = TypeVar("_Answer")

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def _options(message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # A port that is in use is an error.
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION_MAX),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.max_metadata_size", HEADERS_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", 2 * HEADERS_BYTES_MAX),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        ("grpc.max_connection_idle_ms", IDLE_MS_MAX),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PONG_MS_MAX),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PING_MS_MIN),
    ]


class GrpcServer:
    """Serves a door by gRPC.

    Args:
        door: Has the models.
        address: ``HOST:PORT``; port 0 takes a free one.
    """

    def __init__(self, door: Door, address: str) -> None:
        self._door = door
        self._address = address
        self._server: grpc.aio.Server | None = None
        self._streams = 0
        self._unread = UnreadCalls()

    async def start(self) -> int:
        """Serves from now on; returns the port.

        Raises:
            InvalidArgument: The address cannot be used.
        """
        server = grpc.aio.server(
            options=_options(message_bytes_max(self._door.models.values())),
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        unary = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._with_limit(call)) for name, call in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._with_limit(self._stream))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port: int = server.add_insecure_port(self._address)
        except RuntimeError as e:
            await server.stop(0)
            raise aionn.InvalidArgument(
                f"--oip {self._address}: cannot listen there; the port is in use, or the address is not one of this machine"
            ) from e
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """Ends it: answers that were given are sent first. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(FLUSH_S_MAX)

    def _with_limit(
        self, call: Callable[[Any, _Context], Awaitable[_Answer]]
    ) -> Callable[[Any, _Context], Awaitable[_Answer]]:
        """A handler whose client has a limit of the time in which it reads the answer, or the end of a stream."""

        async def limited(asked: Any, context: _Context) -> _Answer:
            answer = await call(asked, context)
            self._unread.limit(context)
            return answer

        return limited

    # --- Questions ---

    async def _server_live(self, message: bytes, context: _Context) -> bytes:
        return messages.flag_message(True)

    async def _server_ready(self, message: bytes, context: _Context) -> bytes:
        return messages.flag_message(self._door.is_ready)

    async def _server_metadata(self, message: bytes, context: _Context) -> bytes:
        return messages.server_message()

    async def _model_ready(self, message: bytes, context: _Context) -> bytes:
        name, version = await self._answered(context, lambda: messages.model_of(message))
        return messages.flag_message(self._door.is_model_ready(name, version))

    async def _model_metadata(self, message: bytes, context: _Context) -> bytes:
        model = await self._answered(context, lambda: self._door.model(*messages.model_of(message)))
        return messages.model_message(model.description)

    async def _model_config(self, message: bytes, context: _Context) -> bytes:
        model = await self._answered(context, lambda: self._door.model(*messages.model_of(message)))
        return messages.config_message(model.description)

    async def _answered(self, context: _Context, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as e:
            await self._abort(context, e)

    async def _abort(self, context: _Context, error: Exception) -> None:
        refusal = _refusal(error)
        self._unread.limit(context)  # An abort, too, waits for the client.
        await context.abort(_CODES[refusal.code], refusal.text, ((WHY, refusal.why),))

    # --- Inference ---

    async def _infer(self, message: bytes, context: _Context) -> bytes:
        arrived_ns, remaining_ns = aionn.now_ns(), _remaining_ns(context)
        try:
            with self._door.enter():
                answer = await self._door.infer(messages.request_of(message), arrived_ns, remaining_ns)
                return messages.answer_message(answer)
        except Exception as e:
            await self._abort(context, e)
            raise  # ``abort`` raises.

    async def _stream(self, requests: Any, context: _Context) -> None:
        if self._streams >= STREAMS_MAX:
            await self._abort(
                context,
                aionn.ResourceExhausted(f"server: {STREAMS_MAX} streams are open, no more are accepted"),
            )
        self._streams += 1
        try:
            why = await _StreamCall(self._door, context).run()
        finally:
            self._streams -= 1
        if why is not None:
            self._unread.limit(context)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)


class _StreamEnded(Exception):
    """The server ends a stream, for a reason that its client gets."""


class _StreamCall:
    """One ``ModelStreamInfer``: its requests are executed concurrently, and answered in their order."""

    def __init__(self, door: Door, context: _Context) -> None:
        self._door = door
        self._context = context
        # Beside them one is awaited by the writer, and one waits for room.
        self._answers: asyncio.Queue[asyncio.Task[tuple[bytes, Place | None]] | None] = asyncio.Queue(
            STREAM_REQUESTS_MAX - 2
        )
        self._unwritten: set[Place] = set()

    async def run(self) -> str | None:
        """Serves until the client has ended its requests; returns the reason where the server ended them, or None."""
        why = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                await self._read(tasks)
                await self._answers.put(None)
        except* _StreamEnded as group:
            why = str(group.exceptions[0])
        finally:
            for place in self._unwritten:
                place.leave()
        return why

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                async with asyncio.timeout(STREAM_SILENT_S_MAX):
                    message = await self._context.read()
            except TimeoutError:
                raise _StreamEnded(f"stream: nothing was requested for {STREAM_SILENT_S_MAX:g} s") from None
            if message is grpc.aio.EOF:
                return
            arrived_ns = aionn.now_ns()
            answer = self._answer(message, arrived_ns)
            await self._answers.put(tasks.create_task(answer))

    async def _answer(self, message: bytes, arrived_ns: int) -> tuple[bytes, Place | None]:
        """The answer to a request, and its place, which is left when the answer is written."""
        model = identifier = ""
        place = None
        try:
            place = self._door.enter()
            self._unwritten.add(place)
            request = messages.request_of(message)
            model, identifier = request.model, request.id
            answer = await self._door.infer(request, arrived_ns, _remaining_ns(self._context))
            if request.parameters.get("triton_enable_empty_final_response") is True:
                answer.parameters["triton_final_response"] = True
            return messages.stream_message(answer), place
        except Exception as e:
            refusal = _refusal(e)
            text = f"{refusal.text} [{refusal.why}]"
            return messages.stream_message(None, text, model=model, id=identifier), place

    async def _write(self) -> None:
        while (answer := await self._answers.get()) is not None:
            content, place = await answer
            try:
                async with asyncio.timeout(STREAM_UNREAD_S_MAX):
                    await self._context.write(content)
            except TimeoutError:
                raise _StreamEnded(
                    f"stream: the client has not read an answer for {STREAM_UNREAD_S_MAX:g} s"
                ) from None
            if place is not None:
                place.leave()
                self._unwritten.discard(place)


def _remaining_ns(context: _Context) -> int | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else int(remaining_s * 1e9)


def _refusal(error: Exception) -> Refusal:
    if not isinstance(error, aionn.Error):
        _logger.error("oip: a request failed", exc_info=error)
    return refusal_of(error)

"""The server that a monitoring system reads metrics from: one thread, which waits for no single client.

Owns the thread, the connections and their limits. ``access`` decides which requests are answered; the figures come from the caller.

Paths: ``/metrics``, and ``/ready``, which answers 200 or 503 for an orchestrator.

Invariants:
1. Neither reading a request nor writing the text is on the event loop's thread. The loop copies the figures when a request asks
   for them, which takes some microseconds for each histogram; requests that come before it is made share it.
2. A connection is closed after ``REQUEST_S_MAX``, whatever its client does. Neither a request that is not whole yet, nor an answer
   that is not read, nor an event loop that is blocked delays another connection: there are ``CONNECTIONS_MAX``, and the oldest is
   closed for a further one: of those without a whole request, if there is one.
3. A forked child has no copy of the listener and of the connections.
4. Writing the text lets other threads have the interpreter's lock every ``exposition.PART_LINES`` lines.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from aionn.errors import InvalidArgument, ResourceExhausted
from aionn.observability.access import Access, is_loopback
from aionn.observability.exposition import CONTENT_TYPE, Family, Sample, exposition_parts
from aionn.platform.forking import close_at_fork

__all__ = ["PORT", "MetricsServer", "Source", "metrics_place"]

PORT = 9464
"""The usual port of an exporter in a program, as OpenTelemetry's has it."""

BACKLOG = 128
"""Connections that wait to be accepted while the text is written: a monitoring system has one or two. Where there are more, the
kernel has a client try again after a second."""

CONNECTIONS_MAX = 16
"""Connections: a browser opens one or two in advance; a client that opens many displaces others that are as slow."""

REQUEST_S_MAX = 2.0
"""Limit of the time from a connection to its end: a request is one packet, and the answer some tens of kilobytes."""

REQUEST_BYTES_MAX = 8 << 10
"""The largest request; Prometheus sends 300 bytes."""

COLLECT_S_MAX = 1.0
"""Limit of the wait for the event loop, which copies the figures. A loop that is blocked for longer is reported by status 503."""

RETRY_S = 0.1
"""Pause before accepting again when no descriptor was left."""

JOIN_S_MAX = 3.0
"""Limit of the wait for the thread, which may be writing the text of many figures."""

PLAIN = "text/plain; charset=utf-8"

_logger = logging.getLogger("aionn.manager")

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
}
_REASONS |= {503: "Service Unavailable"}


class _Connection:
    """A connection, from its request to its answer.

    Attributes:
        ends_s: When it is closed.
        request: The bytes of its request that have arrived.
        waits: Whether its answer is made of the figures, which are not here yet.
        answer: The rest of the answer that was not sent; None before.
    """

    __slots__ = ("answer", "ends_s", "request", "waits")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.request = bytearray()
        self.waits = False
        self.answer: memoryview | None = None

    @property
    def events(self) -> int:
        """The events that its next step needs."""
        if self.answer is not None:
            return select.POLLOUT
        return 0 if self.waits else select.POLLIN  # With 0 the end of its client is reported.


class _Collection:
    """One copy of the figures by the event loop, for all requests that wait for it.

    Attributes:
        ends_s: When it is not waited for any longer.
        samples: The copy; None before, and where it failed.
        is_over: Whether the loop has answered.
    """

    __slots__ = ("ends_s", "is_over", "samples")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.samples: list[Sample] | None = None
        self.is_over = False


class _Bell:
    """Wakes the thread that polls ``descriptor``, from any thread, also after its end."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._is_closed = False

    def ring(self) -> None:
        """Wakes it."""
        with self._lock:  # The descriptor's number may be another file's when it is closed.
            if not self._is_closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Has it sleep again."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Ends it. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)


class Source(NamedTuple):
    """The figures that a server exposes.

    Attributes:
        families: The metrics, by name.
        collect: Returns the samples of now; called by ``in_loop``.
        in_loop: Has a function called in the event loop's thread, from any thread.
        is_ready: Whether new work is accepted; from any thread.
    """

    families: Mapping[str, Family]
    collect: Callable[[], Iterable[Sample]]
    in_loop: Callable[[Callable[[], object]], object]
    is_ready: Callable[[], bool]


def metrics_place(text: str) -> tuple[str, int]:
    """Address and port of ``HOST:PORT``, ``HOST``, ``:PORT`` or ``PORT``; ``127.0.0.1`` and 9464 where they are left out.

    Raises:
        InvalidArgument: It has another form.
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"metrics: expected the text HOST:PORT, got {text!r}")
    host, colon, port = text.strip().rpartition(":")
    if text.strip().endswith("]") or not (colon or port.isdecimal()):
        host, port = text.strip(), ""
    host = host.strip("[]") or "127.0.0.1"
    if host == "localhost":
        host = "127.0.0.1"
    try:
        number = int(port) if port else PORT
        address = str(ipaddress.ip_address(host))
        if not 0 <= number <= 65535:
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"metrics: expected HOST:PORT with an address of this machine, such as 127.0.0.1:{PORT}, got {text!r}"
        ) from None
    return address, number


class MetricsServer:
    """Serves the figures until it is closed.

    Args:
        place: ``HOST:PORT``, see ``metrics_place``. Anything but a loopback address lets other machines read the figures.
        source: The figures.

    Attributes:
        url: The address of the metrics.

    Raises:
        InvalidArgument: The place is wrong, used, or not this user's to use.
        ResourceExhausted: No thread can be started.
    """

    def __init__(self, place: str, source: Source) -> None:
        host, port = metrics_place(place)
        self._source = source
        self._access = Access(token=None, hosts=(os.uname().nodename,), is_remote=not is_loopback(host))
        self._listener = socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC
        )
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(BACKLOG)
            port = self._listener.getsockname()[1]
            self._bell = _Bell()
        except OSError as e:
            self._listener.close()
            raise InvalidArgument(f"metrics: {host} port {port} cannot be used: {e.strerror}") from e
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/metrics"
        self._listener.setblocking(False)
        close_at_fork(self._listener)
        self._connections: dict[socket.socket, _Connection] = {}
        self._collection: _Collection | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="aionn-metrics")
        try:
            self._thread.start()
        except RuntimeError as e:
            self._bell.close()
            self._listener.close()
            raise ResourceExhausted(f"metrics: no thread is left to serve them: {e}") from e

    def close(self) -> None:
        """Ends the server. Idempotent. Waits for its thread, milliseconds as a rule."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._bell.ring()
        self._thread.join(JOIN_S_MAX)

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                for sock in self._ready():
                    self._step(sock)
                self._end_collection()
        finally:
            for sock in list(self._connections):
                self._drop(sock)
            self._listener.close()
            self._bell.close()

    def _ready(self) -> list[socket.socket]:
        """Waits for connections and for their clients; closes those whose time is over."""
        now_s = time.monotonic()
        for sock in [sock for sock, connection in self._connections.items() if connection.ends_s <= now_s]:
            self._drop(sock)
        # The oldest is the first.
        ends_s = [connection.ends_s for connection in self._connections.values()][:1]
        if self._collection is not None:
            ends_s.append(self._collection.ends_s)
        poller = select.poll()
        poller.register(self._bell.descriptor, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        for sock, connection in self._connections.items():
            poller.register(sock, connection.events)
        found = dict(poller.poll(1000 * (min(ends_s) - now_s) + 1 if ends_s else None))
        if self._bell.descriptor in found:
            self._bell.clear()
        # Those that have sent something come before the listener, whose new connections may displace them.
        return [sock for sock in (*self._connections, self._listener) if sock.fileno() in found]

    def _step(self, sock: socket.socket) -> None:
        """Does what a connection, or the listener, is ready for."""
        if sock is self._listener:
            self._accept()
            return
        connection = self._connections.get(sock)
        if connection is None:
            return  # Closed for a further one, or with the answer of this turn.
        try:
            if connection.answer is not None:
                self._write(sock, connection)
            elif connection.waits:
                self._drop(sock)  # Its client is gone.
            else:
                self._read(sock, connection)
        except OSError:
            self._drop(sock)  # Its client is gone.
        except Exception:
            _logger.exception("metrics: a request failed")
            self._drop(sock)

    def _accept(self) -> None:
        for _ in range(CONNECTIONS_MAX):  # Then those that exist have their turn.
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._closed.wait(RETRY_S)  # No descriptor is left; later one is.
                return
            close_at_fork(sock)
            sock.setblocking(False)
            if len(self._connections) >= CONNECTIONS_MAX:
                self._drop(self._displaced())
            self._connections[sock] = _Connection(time.monotonic() + REQUEST_S_MAX)
            self._step(sock)

    def _displaced(self) -> socket.socket:
        """The connection that is closed for a further one."""
        silent = (s for s, c in self._connections.items() if not c.waits and c.answer is None)
        return next(silent, next(iter(self._connections)))

    def _read(self, sock: socket.socket, connection: _Connection) -> None:
        """Reads what is there of a request, and answers one that is whole."""
        try:
            part = sock.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        connection.request.extend(part)
        head, end, _ = bytes(connection.request).partition(b"\r\n\r\n")
        if end:
            answer = self._answered(head)
            if answer is not None:
                self._begin_answer(sock, connection, *answer)
                return
            connection.waits = True
            self._begin_collection()
        elif not part or len(connection.request) > REQUEST_BYTES_MAX:
            self._drop(sock)

    def _begin_answer(
        self, sock: socket.socket, connection: _Connection, status: int, body: bytes, kind: str
    ) -> None:
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Connection: close\r\nX-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n\r\n"
        is_head = connection.request.startswith(b"HEAD ")
        connection.answer = memoryview(head.encode() + (b"" if is_head else body))
        self._write(sock, connection)

    def _write(self, sock: socket.socket, connection: _Connection) -> None:
        """Sends what the client has room for of the answer."""
        assert connection.answer is not None, "it is being sent"
        try:
            connection.answer = connection.answer[sock.send(connection.answer) :]
        except BlockingIOError:
            return
        if not connection.answer:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        del self._connections[sock]
        sock.close()

    def _answered(self, head: bytes) -> tuple[int, bytes, str] | None:
        """Status, body and type of the answer; None where it is made of the figures."""
        found = self._answered_immediately(head)
        return None if found is None else (found[0], found[1].encode(), PLAIN)

    def _answered_immediately(self, head: bytes) -> tuple[int, str] | None:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not all(b":" in line for line in lines):
            return 400, "expected a request of HTTP/1.1\n"
        headers = [(name.lower(), value) for name, _, value in (line.partition(b":") for line in lines)]
        refusal = self._access.refusal(headers, b"")
        if refusal is not None:
            return 421 if refusal.status == 421 else 400, f"{refusal.text}\n"
        if words[0] not in (b"GET", b"HEAD"):
            return 405, "expected GET\n"
        path = words[1].partition(b"?")[0]
        if path == b"/ready":
            return (200, "ready\n") if self._source.is_ready() else (503, "not ready\n")
        if path != b"/metrics":
            return 404, "expected /metrics or /ready\n"
        return None

    # --- The figures ---

    def _begin_collection(self) -> None:
        """Has the event loop copy the figures, unless a copy is in progress."""
        if self._collection is not None:
            return
        collection = self._collection = _Collection(time.monotonic() + COLLECT_S_MAX)

        def collect() -> None:
            try:
                collection.samples = list(self._source.collect())
            except Exception:
                _logger.exception("metrics: the figures could not be read")
            collection.is_over = True
            self._bell.ring()

        try:
            self._source.in_loop(collect)
        except RuntimeError:
            collection.is_over = True  # The loop is closed.

    def _end_collection(self) -> None:
        """Answers the requests that wait for the figures, once these are here or are not waited for any longer."""
        collection = self._collection
        if collection is None or not (collection.is_over or time.monotonic() >= collection.ends_s):
            return
        self._collection = None
        answer = 503, f"the event loop did not answer within {COLLECT_S_MAX:g} s\n".encode(), PLAIN
        if collection.is_over:
            answer = 503, b"the figures could not be read\n", PLAIN
        if collection.samples is not None:
            try:
                answer = 200, self._text(collection.samples), CONTENT_TYPE
            except Exception:
                _logger.exception("metrics: the text of the figures could not be written")
        for sock, connection in list(self._connections.items()):
            if connection.waits:
                connection.waits = False
                try:
                    self._begin_answer(sock, connection, *answer)
                except OSError:
                    self._drop(sock)  # Its client is gone.

    def _text(self, samples: list[Sample]) -> bytes:
        parts = []
        for part in exposition_parts(self._source.families, samples):
            parts.append(part.encode())
            select.select((), (), (), 0)  # Releases the interpreter's lock, for which a frame may wait.
        return b"".join(parts)

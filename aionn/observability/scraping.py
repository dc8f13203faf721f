"""The server that a monitoring system reads metrics from: one thread, one short request at a time.

Owns the thread, the requests and their limits. ``access`` decides which requests are answered; the figures come from the caller.

Paths: ``/metrics``, and ``/ready``, which answers 200 or 503 for an orchestrator.

Invariants:
1. Neither reading a request nor writing the text is on the event loop's thread. The loop copies the figures when a request asks
   for them, which takes some microseconds for each histogram.
2. A connection is closed after ``REQUEST_S_MAX``, whatever its client does. One is answered at a time. One whose request is not
   whole yet delays no other: ``WAITING_MAX`` of them wait, and the oldest is closed for a further one.
3. Writing the text lets other threads have the interpreter's lock every ``exposition.PART_LINES`` lines.
"""

from __future__ import annotations

import concurrent.futures
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

__all__ = ["PORT", "MetricsServer", "Source", "metrics_place"]

PORT = 9464
"""The usual port of an exporter in a program, as OpenTelemetry's has it."""

BACKLOG = 128
"""Connections that wait to be accepted while a request is answered: a monitoring system has one or two. Where there are more, the
kernel has a client try again after a second."""

WAITING_MAX = 16
"""Connections whose request has not been read: a browser opens one or two in advance; a client that opens many displaces others
that are as slow."""

REQUEST_S_MAX = 2.0
"""Limit of the time from a connection to its end: a request is one packet, and the answer some tens of kilobytes."""

REQUEST_BYTES_MAX = 8 << 10
"""The largest request; Prometheus sends 300 bytes."""

COLLECT_S_MAX = 1.0
"""Limit of the wait for the event loop, which copies the figures. One that is blocked for longer is reported by status 503."""

RETRY_S = 0.1
"""Pause before accepting again when no descriptor was left."""

JOIN_S_MAX = 3.0
"""Limit of the wait for the thread: longer than a request may take."""

_logger = logging.getLogger("aionn.manager")

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
}
_REASONS |= {503: "Service Unavailable"}


class _Reading(NamedTuple):
    """A request that is not whole yet.

    Attributes:
        ends_s: When its connection is closed.
        request: What has come of it.
    """

    ends_s: float
    request: bytearray


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
        except OSError as e:
            self._listener.close()
            raise InvalidArgument(f"metrics: {host} port {port} cannot be used: {e.strerror}") from e
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/metrics"
        self._listener.setblocking(False)
        self._waiting: dict[socket.socket, _Reading] = {}
        self._answering: socket.socket | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="aionn-metrics")
        try:
            self._thread.start()
        except RuntimeError as e:
            self._listener.close()
            raise ResourceExhausted(f"metrics: no thread is left to serve them: {e}") from e

    def close(self) -> None:
        """Ends the server. Idempotent. Waits for its thread, milliseconds as a rule."""
        if self._closed.is_set():
            return
        self._closed.set()
        for sock in (self._listener, self._answering):
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # Wakes the thread that waits for it.
                except OSError:
                    pass  # It has ended by itself.
        self._thread.join(JOIN_S_MAX)
        self._listener.close()

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                for sock in self._readable():
                    if sock is self._listener:
                        self._accept()
                    else:
                        self._read(sock)
        finally:
            for sock in list(self._waiting):
                self._drop(sock)

    def _readable(self) -> list[socket.socket]:
        """Waits for connections and for what they send; closes those whose time is over."""
        now_s = time.monotonic()
        for sock in [sock for sock, reading in self._waiting.items() if reading.ends_s <= now_s]:
            self._drop(sock)
        # The oldest is the first.
        left_s = next((reading.ends_s - now_s for reading in self._waiting.values()), None)
        poller = select.poll()
        by_fd = {sock.fileno(): sock for sock in (*self._waiting, self._listener)}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        # Those that have sent something come before the listener, whose new connections may displace them.
        found = dict(poller.poll(None if left_s is None else 1000 * left_s + 1))
        return [sock for fd, sock in by_fd.items() if fd in found]

    def _accept(self) -> None:
        for _ in range(WAITING_MAX):  # Then those that wait have their turn.
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                self._closed.wait(RETRY_S)  # No descriptor is left; later one is.
                return
            if len(self._waiting) >= WAITING_MAX:
                self._drop(next(iter(self._waiting)))
            self._waiting[sock] = _Reading(time.monotonic() + REQUEST_S_MAX, bytearray())
            self._read(sock)

    def _read(self, sock: socket.socket) -> None:
        """Reads what is there of a request, and answers one that is whole."""
        reading = self._waiting[sock]
        try:
            part = sock.recv(REQUEST_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        reading.request.extend(part)
        if b"\r\n\r\n" in reading.request:
            del self._waiting[sock]
            self._answering = sock
            try:
                with sock:
                    self._answer(sock, bytes(reading.request), reading.ends_s)
            except OSError:
                pass  # Its client is gone, or does not read.
            except Exception:
                _logger.exception("metrics: a request failed")
            finally:
                self._answering = None
        elif not part or len(reading.request) > REQUEST_BYTES_MAX:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        del self._waiting[sock]
        sock.close()

    def _answer(self, connection: socket.socket, request: bytes, ends_s: float) -> None:
        status, text, kind = self._answered(request.partition(b"\r\n\r\n")[0])
        body = text.encode()
        is_head = request.startswith(b"HEAD ")
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Connection: close\r\nX-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n\r\n"
        connection.settimeout(max(0.001, ends_s - time.monotonic()))
        connection.sendall(head.encode() + (b"" if is_head else body))

    def _answered(self, head: bytes) -> tuple[int, str, str]:
        """Status, text and type of the answer."""
        plain = "text/plain; charset=utf-8"
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not all(b":" in line for line in lines):
            return 400, "expected a request of HTTP/1.1\n", plain
        headers = [(name.lower(), value) for name, _, value in (line.partition(b":") for line in lines)]
        refusal = self._access.refusal(headers, b"")
        if refusal is not None:
            return 421 if refusal.status == 421 else 400, f"{refusal.text}\n", plain
        if words[0] not in (b"GET", b"HEAD"):
            return 405, "expected GET\n", plain
        path = words[1].partition(b"?")[0]
        if path == b"/ready":
            return (200, "ready\n", plain) if self._source.is_ready() else (503, "not ready\n", plain)
        if path != b"/metrics":
            return 404, "expected /metrics or /ready\n", plain
        samples = self._collected()
        if samples is None:
            return 503, f"the event loop did not answer within {COLLECT_S_MAX:g} s\n", plain
        parts = []
        for part in exposition_parts(self._source.families, samples):
            parts.append(part)
            select.select((), (), (), 0)  # Releases the interpreter's lock, for which a frame may wait.
        return 200, "".join(parts), CONTENT_TYPE

    def _collected(self) -> list[Sample] | None:
        """The samples; None if the event loop does not answer."""
        collected: concurrent.futures.Future[list[Sample]] = concurrent.futures.Future()

        def collect() -> None:
            try:
                collected.set_result(list(self._source.collect()))
            except Exception as e:
                collected.set_exception(e)

        try:
            self._source.in_loop(collect)
            return collected.result(COLLECT_S_MAX)
        except (RuntimeError, TimeoutError):  # The loop is closed, or blocked.
            return None

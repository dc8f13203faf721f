"""The text of the metrics, and the server that a monitoring system reads them from."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aionn.errors import InvalidArgument
from aionn.observability import scraping
from aionn.observability.durations import Durations
from aionn.observability.exposition import Family, Sample, exposition
from aionn.observability.scraping import MetricsServer, Source, metrics_place

LIMIT_S = 10
FAMILIES = {
    "a_total": Family("counter", "Count."),
    "b_seconds": Family("histogram", "Time."),
}
LINE = re.compile(r'[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)*\})? (-?[0-9.e+-]+|\+Inf)')


def some_samples() -> list[Sample]:
    durations = Durations()
    durations.add(1_000_000)
    return [
        Sample("b_seconds", {"device": "npu"}, durations),
        Sample("a_total", {"device": 'a"b\\c\nd'}, 3),
        Sample("b_seconds", {}, Durations()),
    ]


def test_text_keeps_the_samples_of_a_metric_together_and_escapes_labels() -> None:
    lines = exposition(FAMILIES, some_samples()).splitlines()
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE b_seconds histogram",
        "# TYPE a_total counter",
    ]
    assert 'a_total{device="a\\"b\\\\c\\nd"} 3' in lines
    assert all(LINE.fullmatch(line) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", ["we\udcffird", "\ud800", "a\rb", "caf\u00e9"])
def test_text_of_any_label_can_be_sent(name: str) -> None:
    text = exposition(FAMILIES, [Sample("a_total", {"device": name}, 1)])
    assert text.encode().endswith(b'"} 1\n')


@pytest.mark.parametrize("count", [0, 999_999_999, 1_234_567_891, 2**53 + 1])
def test_counts_keep_all_digits(count: int) -> None:
    durations = Durations()
    durations.counts[0], durations.total_ns = count, 10**16 + 1_000_000
    samples = [Sample("a_total", {}, count), Sample("b_seconds", {}, durations)]
    lines = exposition(FAMILIES, samples).splitlines()
    assert f"a_total {count}" in lines and f"b_seconds_count {count}" in lines
    assert "b_seconds_sum 10000000.001" in lines


def test_histogram_grows_to_its_count() -> None:
    lines = exposition(FAMILIES, some_samples()[:1]).splitlines()
    counts = [int(line.split()[-1]) for line in lines if "_bucket" in line]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 1
    assert lines[-2:] == ['b_seconds_sum{device="npu"} 0.001', 'b_seconds_count{device="npu"} 1']
    assert 'b_seconds_bucket{device="npu",le="+Inf"} 1' in lines


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", ("127.0.0.1", 9464)),
        ("9000", ("127.0.0.1", 9000)),
        (":0", ("127.0.0.1", 0)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("0.0.0.0", ("0.0.0.0", 9464)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 9464)),
    ],
)
def test_places(text: str, place: tuple[str, int]) -> None:
    assert metrics_place(text) == place


@pytest.mark.parametrize("text", ["example.com:80", "127.0.0.1:65536", "127.0.0.1:x", "1.2.3", ":-1", "a b"])
def test_wrong_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected HOST:PORT"):
        metrics_place(text)


@pytest.mark.parametrize("place", [9464, True, b"9464", ("127.0.0.1", 0)])
def test_place_of_another_type_is_refused(place: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected the text HOST:PORT"):
        metrics_place(place)


class Served:
    def __init__(self) -> None:
        self.is_ready = True
        self.samples: Any = some_samples()
        self.in_loop: Callable[[Callable[[], object]], object] = lambda call: call()
        self.server = MetricsServer(
            "127.0.0.1:0",
            Source(FAMILIES, self.collect, lambda call: self.in_loop(call), lambda: self.is_ready),
        )
        self.port = int(self.server.url.rpartition(":")[2].partition("/")[0])

    def collect(self) -> list[Sample]:
        found: list[Sample] = self.samples() if callable(self.samples) else self.samples
        return found

    def wait_until(self, holds: Callable[[list[Any]], bool]) -> None:
        limit_s = time.monotonic() + LIMIT_S
        while not holds(list(self.server._connections.values())):
            assert time.monotonic() < limit_s
            time.sleep(0.001)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def ask(self, request: str) -> tuple[int, str]:
        with self.connect() as sock:
            sock.sendall(request.replace("\n", "\r\n").encode())
            answer = b""
            while part := sock.recv(1 << 16):
                answer += part
        head, _, body = answer.decode().partition("\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    def get(self, path: str, host: str = "localhost", more: str = "") -> tuple[int, str]:
        return self.ask(f"GET {path} HTTP/1.1\nHost: {host}\n{more}\n")


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()


def test_forked_child_has_no_copy_of_the_listener(served: Served) -> None:
    reading, writing = os.pipe()
    begun, beginning = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(beginning, b"x")
        os.read(reading, 1)  # Lives until the end of this test.
        os._exit(0)
    try:
        assert (
            os.read(begun, 1) == b"x"
        )  # It closes its copy when it runs, which this process need not wait for.
        served.server.close()
        with pytest.raises(ConnectionRefusedError):
            served.connect()
    finally:
        for fd in (writing, reading, begun, beginning):
            os.close(fd)
        os.waitpid(child, 0)


def test_metrics_and_readiness_are_served(served: Served) -> None:
    status, text = served.get("/metrics")
    assert (status, text) == (200, exposition(FAMILIES, some_samples()))
    assert served.get("/ready") == (200, "ready\n")
    served.is_ready = False
    assert served.get("/ready")[0] == 503
    assert served.ask("HEAD /metrics HTTP/1.1\nHost: localhost\n\n") == (200, "")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        (os.uname().nodename, 200),
        ("evil.example", 421),
        ("10.0.0.1", 421),
    ],
)
def test_host_must_be_one_of_this_machine(served: Served, host: str, status: int) -> None:
    assert served.get("/metrics", host)[0] == status


def test_pages_of_other_sites_are_refused(served: Served) -> None:
    assert served.get("/metrics", more="Origin: http://evil.example\n")[0] == 400


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("POST /metrics HTTP/1.1\nHost: localhost\n\n", 405),
        ("GET /other HTTP/1.1\nHost: localhost\n\n", 404),
        ("GET /metrics HTTP/1.1\n\n", 421),
        ("GET /metrics\n\n", 400),
        ("\0\n\n", 400),
        ("GET /metrics HTTP/1.1\nno colon\n\n", 400),
        ("G" * 20_000, 0),
    ],
)
def test_wrong_requests_are_answered_or_closed(served: Served, request_text: str, status: int) -> None:
    try:
        assert served.ask(request_text)[0] == status
    except ConnectionError:
        assert status == 0, "closed with data unread"
    assert served.get("/ready")[0] == 200


def test_client_that_sends_nothing_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S_MAX", 0.05)
    with served.connect() as silent, served.connect() as slow:
        slow.sendall(b"GET /ready HTTP/1.1\r\n")
        assert served.get("/ready") == (200, "ready\n")
        assert (silent.recv(1), slow.recv(1)) == (b"", b"")


def test_clients_that_send_no_whole_request_delay_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S_MAX", 3600.0)
    silent = [served.connect() for _ in range(3 * scraping.CONNECTIONS_MAX)]
    for sock in silent[::2]:
        sock.sendall(b"GET /ready HTTP/1.1\r\n")
    assert served.get("/ready") == (200, "ready\n")
    with contextlib.suppress(ConnectionResetError):  # It is closed with its half of a request unread.
        assert silent[0].recv(1) == b"", "the oldest has been closed for a further one"
    silent[-1].sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert silent[-1].recv(12) == b"HTTP/1.1 200"
    for sock in silent:
        sock.close()


def test_whole_request_is_not_displaced_by_silent_clients(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S_MAX", 3600.0)
    monkeypatch.setattr(scraping, "COLLECT_S_MAX", 3600.0)
    calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    served.in_loop = calls.put
    with served.connect() as asking:
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        collect = calls.get(timeout=LIMIT_S)
        silent = [served.connect() for _ in range(3 * scraping.CONNECTIONS_MAX)]
        assert served.get("/ready") == (200, "ready\n"), "all of them have been accepted"
        assert silent[0].recv(1) == b"", "the oldest without a request has been closed"
        collect()
        assert asking.recv(12) == b"HTTP/1.1 200"
    for sock in silent:
        sock.close()


def test_loop_that_is_blocked_or_closed_is_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "COLLECT_S_MAX", 0.02)
    served.in_loop = lambda call: None
    assert served.get("/metrics")[0] == 503

    def closed(call: Any) -> None:
        raise RuntimeError("Event loop is closed")

    served.in_loop = closed
    assert served.get("/metrics")[0] == 503


LARGE = [Sample("a_total", {"device": "x" * 1000, "model": str(number)}, 1) for number in range(20_000)]
"""20 MB of text: more than the kernel takes of an answer that is not read."""


def test_answer_that_is_not_read_delays_no_other(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S_MAX", 3600.0)
    served.samples = LARGE
    with served.connect() as unread:
        unread.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert unread.recv(12) == b"HTTP/1.1 200"
        served.samples = some_samples()
        for _ in range(3):
            assert served.get("/metrics") == (200, exposition(FAMILIES, some_samples()))
        assert served.get("/ready")[0] == 200
        rest = b""
        while b'model="19999"' not in rest and (part := unread.recv(1 << 20)):
            rest = rest[-2000:] + part
        assert rest.endswith(b'model="19999"} 1\n'), "the answer is whole when it is read after all"


def test_answer_that_is_not_read_is_given_up_after_its_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "REQUEST_S_MAX", 0.1)
    served.samples = LARGE
    with served.connect() as unread:
        unread.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert unread.recv(12) == b"HTTP/1.1 200"
        served.wait_until(lambda connections: not connections)
        served.samples = some_samples()
        monkeypatch.setattr(scraping, "REQUEST_S_MAX", 3600.0)
        assert served.get("/metrics")[0] == 200


def test_blocked_loop_delays_neither_readiness_nor_the_requests_that_wait_for_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "COLLECT_S_MAX", 3600.0)
    monkeypatch.setattr(scraping, "REQUEST_S_MAX", 3600.0)
    asked: list[Callable[[], object]] = []
    arrived = threading.Event()

    def in_loop(call: Callable[[], object]) -> None:
        asked.append(call)
        arrived.set()

    served.in_loop = in_loop
    waiting = [served.connect() for _ in range(5)]
    for sock in waiting:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert arrived.wait(LIMIT_S)
    assert served.get("/ready") == (200, "ready\n")
    served.wait_until(lambda connections: sum(each.waits for each in connections) == len(waiting))
    asked[0]()
    for sock in waiting:
        assert sock.recv(12) == b"HTTP/1.1 200"
        sock.close()
    assert len(asked) == 1, "one copy of the figures is for all that wait"


def test_figures_that_cannot_be_read_or_written_are_reported(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> list[Sample]:
        raise ValueError("figures")

    for served.samples in (failing, [Sample("unknown_total", {}, 1)]):
        assert served.get("/metrics") == (503, "the figures could not be read\n")
    assert served.get("/ready")[0] == 200
    assert len(caplog.records) == 2


def test_late_copy_of_a_loop_that_was_blocked_harms_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "COLLECT_S_MAX", 0.02)
    asked: list[Callable[[], object]] = []
    served.in_loop = asked.append
    assert served.get("/metrics")[0] == 503
    served.in_loop = lambda call: call()
    asked[0]()
    assert served.get("/metrics")[0] == 200
    served.server.close()
    asked[0]()


def test_closing_ends_the_thread_while_a_client_is_connected() -> None:
    served = Served()
    with served.connect():
        served.server.close()
        served.server.close()
    assert not any(thread.name == "aionn-metrics" for thread in threading.enumerate())


def test_used_port_is_refused(served: Served) -> None:
    with pytest.raises(InvalidArgument, match="in use"):
        MetricsServer(f"127.0.0.1:{served.port}", Source({}, list, print, bool))

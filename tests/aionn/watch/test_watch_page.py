"""The page's server in its own process: the answers that a tab gets, and the clients that it must withstand."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest

from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.media import Frame, SourceStatistics
from aionn.runtime.clock import now_ns
from aionn.watch import Collector, Finding, WatchedStream, WatchPage
from aionn.watch.process import CONNECTIONS_MAX

websockets = pytest.importorskip("websockets", reason="uvicorn and websockets are not installed")
pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")
pytest.importorskip("av", reason="PyAV is not installed")

from websockets.asyncio.client import connect  # noqa: E402

LIMIT_S = 60


@contextlib.asynccontextmanager
async def feeding(stream: WatchedStream, period_s: float = 0.02) -> AsyncIterator[None]:
    """A stream that gets a frame, of another grey each, again and again."""

    async def feed() -> None:
        for index in range(1_000_000):
            data = np.full((48, 64, 3), index % 256, np.uint8)
            frame = Frame(data, now_ns(), index, 0.0)
            stream.add_item(frame, "on_time", now_ns(), [Finding("cat", 0.5, (0.1, 0.1, 0.5, 0.5))])
            await anyio.sleep(period_s)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed)
        yield
        tasks.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[WatchPage, WatchedStream]]:
    collector = Collector("a title")
    stream = collector.add_stream("camera", within_ns=33_000_000)
    with anyio.fail_after(LIMIT_S):
        async with WatchPage(collector, port=0, **options) as page, feeding(stream):
            yield page, stream


def place(page: WatchPage) -> tuple[str, int]:
    host, _, port = page.url.removeprefix("http://").partition("/")[0].rpartition(":")
    return host, int(port)


def live(page: WatchPage) -> str:
    return page.url.replace("http://", "ws://").replace("/?", "/live?")


async def ask(tab: Any, **have: int) -> tuple[dict[str, Any], bytes]:
    await tab.send(json.dumps(have))
    answer = await tab.recv()
    length = int.from_bytes(answer[:4], "big")
    return json.loads(answer[4 : 4 + length]), answer[4 + length :]


async def get(page: WatchPage, target: str, *headers: str, method: str = "GET") -> tuple[int, str]:
    """Status and the rest of a plain request."""
    host, port = place(page)
    async with await anyio.connect_tcp(host, port) as connection:
        lines = [f"{method} {target} HTTP/1.1", *(headers or (f"Host: {host}:{port}",)), "", ""]
        await connection.send("\r\n".join(lines).encode("latin-1"))
        received = b""
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                received += await connection.receive()
    return int(received.split(b" ", 2)[1]) if received else 0, received.decode("latin-1")


def query(page: WatchPage) -> str:
    return page.url.partition("?")[2]


async def test_tabs_get_moving_pictures_with_findings_and_figures() -> None:
    async with served() as (page, _), connect(live(page)) as tab:
        first, jpeg = await ask(tab, stream=0)
        second, other = await ask(tab, stream=0, picture=first["picture"], figures=first["number"])
    assert jpeg[:2] == other[:2] == b"\xff\xd8" and jpeg != other
    assert second["picture"] > first["picture"] and second["shot"]["index"] > first["shot"]["index"]
    assert first["shot"]["findings"] == [{"label": "cat", "score": 0.5, "box": [0.1, 0.1, 0.5, 0.5]}]
    assert first["figures"]["title"] == "a title" and first["figures"]["streams"][0]["on_time"] >= 1
    assert 0 <= first["age_ms"] < 30_000


async def test_picture_is_encoded_once_for_all_tabs() -> None:
    async with served() as (page, stream), contextlib.AsyncExitStack() as stack:
        asked = 0
        request = stream.request_picture

        def count(deliver: Any) -> None:
            nonlocal asked
            asked += deliver is not None
            request(deliver)

        stream.request_picture = count  # type: ignore[method-assign]
        tabs = [await stack.enter_async_context(connect(live(page))) for _ in range(10)]
        answers: list[int] = []

        async def follow(tab: Any) -> None:
            have = 0
            for _ in range(4):
                header, _ = await ask(tab, stream=0, picture=have)
                have = header.get("picture", have)
            answers.append(have)

        async with anyio.create_task_group() as tasks:
            for tab in tabs:
                tasks.start_soon(follow, tab)
    assert len(answers) == 10 and min(answers) >= 1
    assert asked <= max(answers) + 2


async def test_nothing_is_asked_for_when_no_tab_is_open() -> None:
    async with served() as (page, stream):
        async with connect(live(page)) as tab:
            await ask(tab, stream=0)
        # One request may be under way when the tab is closed, and is served by the next frame.
        with anyio.fail_after(10):
            while stream._deliver is not None:
                await anyio.sleep(0.01)
        stream.request_picture = lambda deliver: deliver and pytest.fail("no tab asks")  # type: ignore
        assert (await get(page, "/?" + query(page)))[0] == 200


async def test_page_is_served_with_the_token_alone() -> None:
    async with served() as (page, _):
        status, text = await get(page, "/?" + query(page))
        assert status == 200 and "content-security-policy: default-src 'none'" in text
        assert "cache-control: no-store" in text and "connection: close" in text
        assert query(page).partition("=")[2] not in text.partition("\r\n\r\n")[2]
        assert (await get(page, "/"))[0] == 401
        assert (await get(page, "/?token=wrong"))[0] == 401
        assert (await get(page, "/?" + query(page), "Host: evil.example"))[0] == 421
        host = "Host: {}:{}".format(*place(page))
        assert (await get(page, "/?" + query(page), host, "Origin: http://evil.example"))[0] == 403
        assert (await get(page, "/other?" + query(page)))[0] == 404
        assert (await get(page, "/?" + query(page), method="POST"))[0] == 405
        assert (await get(page, "/metrics?" + query(page)))[1].count("# TYPE aionn_stream_items_total") == 1


async def test_web_socket_needs_the_token_and_the_own_page() -> None:
    async with served() as (page, _):
        address = live(page)
        for wrong in (address + "0", address.replace("/live", "/x"), address.partition("?")[0]):
            with pytest.raises(websockets.InvalidStatus, match="403"):
                async with connect(wrong):
                    pytest.fail("it was accepted")
        with pytest.raises(websockets.InvalidStatus, match="403"):
            async with connect(address, origin="http://evil.example"):
                pytest.fail("it was accepted")


NONSENSE: tuple[str | bytes, ...] = (
    "",
    "{",
    "[]",
    "null",
    '{"stream": "0"}',
    '{"stream": 1e400}',
    '{"picture": 0.5}',
    '{"more": 1}',
    "[" * 250,
    b"\x00\xff",
    "x" * 100_000,
)


async def test_nonsense_closes_the_tab_that_sends_it_alone() -> None:
    async with served() as (page, _), connect(live(page)) as good:
        for question in NONSENSE:
            async with connect(live(page)) as bad:
                with contextlib.suppress(websockets.ConnectionClosed):
                    await bad.send(question)
                with pytest.raises(websockets.ConnectionClosed):
                    pytest.fail(f"{question!r} was answered: {await bad.recv()!r}")
        far = 10**100
        for numbers in (
            {"stream": 99},
            {"stream": -5},
            {"stream": 0, "picture": 1 << 60},
            {"figures": -far},
            {"stream": far},
        ):
            assert (await ask(good, **numbers))[0]
        assert "picture" not in (await ask(good, stream=1))[0], "there is no such stream"
        assert (await ask(good, stream=0))[0]["picture"]


async def test_port_in_use_is_reported_in_words() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"port {port} of 127.0.0.1 is used by another program"):
            async with WatchPage(Collector(), port=port):
                pytest.fail("it was opened")


@pytest.mark.parametrize(
    "options",
    [{"host": "example.com"}, {"host": "203.0.113.7"}, {"port": 70000}, {"token": "a&b"}, {"host": ""}],
)
async def test_addresses_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="watch: "):
        async with WatchPage(Collector(), **{"port": 0, **options}):
            pytest.fail("it was opened")


async def test_missing_package_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match=r"uvicorn and websockets.*pip install 'aionn\[watch\]'"):
        async with WatchPage(Collector(), port=0):
            pytest.fail("it was opened")


async def test_streams_continue_when_the_process_dies(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (page, stream):
        assert page.is_serving and page.pid is not None
        os.kill(page.pid, signal.SIGKILL)
        while page.is_serving:
            await anyio.sleep(0.01)
        before = stream.figures.results
        while stream.figures.results < before + 3:
            await anyio.sleep(0.01)
    assert "the streams continue without it" in caplog.text


@pytest.mark.thorough
async def test_many_connections_are_bounded_and_open_tabs_stay() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        async with served() as (page, _), connect(live(page)) as tab:
            await ask(tab, stream=0)
            idle = []
            for _ in range(1000):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(place(page))
                idle.append(client)
            try:
                for _ in range(3):
                    header, _ = await ask(tab, stream=0)
                    assert header["picture"]
                assert len(os.listdir(f"/proc/{page.pid}/fd")) < CONNECTIONS_MAX + 60
            finally:
                for client in idle:
                    client.close()
            # The silent ones are gone: a new tab is served.
            while (await get(page, "/?" + query(page)))[0] != 200:
                await anyio.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.thorough
async def test_tab_that_never_reads_delays_no_other() -> None:
    async with served() as (page, _), connect(live(page)) as tab:
        silent = await connect(live(page))
        # A receive buffer of two kilobytes, and many questions: the server must not queue the answers.
        silent.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        silent.transport.pause_reading()
        for _ in range(3000):
            await silent.send('{"stream":0}')
        for _ in range(3):
            header, jpeg = await ask(tab, stream=0)
            assert header["picture"] and jpeg
        with open(f"/proc/{page.pid}/status") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        assert resident < 400_000, "kB"
        silent.transport.abort()
        await silent.wait_closed()


@pytest.mark.long
async def test_silent_connection_and_slow_request_are_closed() -> None:
    async with served() as (page, _):

        async def wait_for_end(start: bytes) -> None:
            async with await anyio.connect_tcp(*place(page)) as connection:
                if start:
                    await connection.send(start)
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    while True:
                        await connection.receive()

        async with anyio.create_task_group() as tasks:
            for start in (b"", b"GET /?", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "):
                tasks.start_soon(wait_for_end, start)


async def test_closed_page_leaves_no_process_and_frees_its_port() -> None:
    async with served() as (page, _):
        pid, (_, port) = page.pid, place(page)
        async with connect(live(page)) as tab:
            await ask(tab, stream=0)
            await page.aclose()
            with pytest.raises(websockets.ConnectionClosed):
                await tab.recv()
        assert page.pid is None and not os.path.exists(f"/proc/{pid}/fd")
        await page.aclose()
        async with WatchPage(Collector(), port=port) as again:
            assert place(again)[1] == port


@pytest.mark.long
async def test_process_ends_with_an_application_that_is_killed() -> None:
    program = (
        "import anyio\n"
        "from aionn.watch import Collector, WatchPage\n"
        "async def main():\n"
        "    async with WatchPage(Collector(), port=0) as page:\n"
        "        print(page.pid, flush=True)\n"
        "        await anyio.sleep(1000)\n"
        "anyio.run(main)\n"
    )
    with anyio.fail_after(LIMIT_S):
        async with await anyio.open_process([sys.executable, "-c", program], stderr=None) as application:
            assert application.stdout is not None
            pid = int(await application.stdout.receive())
            assert os.path.exists(f"/proc/{pid}")
            application.kill()
            await application.wait()
            while os.path.exists(f"/proc/{pid}") and state_of(pid) != "Z":
                await anyio.sleep(0.02)


def state_of(pid: int) -> str:
    """The letter of a process's state; ``Z`` if it has gone while it was read."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


async def test_source_that_cannot_count_ends_neither_page_nor_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        is_broken = True

        def statistics(self) -> SourceStatistics:
            if self.is_broken:
                raise ValueError("a fault of the application")
            return SourceStatistics(1, 1, 0, 0, 0, 0)

    async with served() as (page, stream), connect(live(page)) as tab:
        stream.source = source = Broken()
        assert "figures" not in (await ask(tab))[0]
        source.is_broken = False
        while "figures" not in (await ask(tab))[0]:
            pass
        assert page.is_serving
    assert "the figures cannot be collected" in caplog.text


async def test_forked_child_has_no_copy_of_the_link() -> None:
    async with served() as (page, _):
        assert page._link is not None
        child = os.fork()
        if child == 0:
            os._exit(0 if page._link.fileno() == -1 else 1)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222  The child ends immediately.
        assert status == 0
        assert page.is_serving and (await get(page, f"/?{query(page)}"))[0] == 200

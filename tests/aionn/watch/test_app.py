"""The ASGI application without a server: mounted in another one, and at its limits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.media import Frame
from aionn.runtime.clock import now_ns
from aionn.watch import Collector, WatchApp
from aionn.watch.app import TABS_MAX
from aionn.watch.feed import Newest

HOST = [(b"host", b"localhost")]


async def request(
    app: WatchApp, path: str, *, method: str = "GET", **scope: Any
) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        pytest.fail("no body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": HOST, **scope}
    await app(whole, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


class Tab:
    """One end of a web socket."""

    def __init__(self, app: WatchApp, **scope: Any) -> None:
        self.scope = {"type": "websocket", "path": "/live", "query_string": b"", "headers": HOST, **scope}
        self.app = app
        self._to, self._questions = anyio.create_memory_object_stream[Any](10)
        self._answers, self.received = anyio.create_memory_object_stream[Any](10)

    async def run(self) -> None:
        with self._to, self._questions, self._answers:
            await self._to.send({"type": "websocket.connect"})
            await self.app(self.scope, self._questions.receive, self._answers.send)

    async def ask(self, **have: int) -> dict[str, Any]:
        await self._to.send({"type": "websocket.receive", "text": json.dumps(have)})
        answer = (await self.received.receive())["bytes"]
        found: dict[str, Any] = json.loads(answer[4 : 4 + int.from_bytes(answer[:4], "big")])
        return found

    async def leave(self) -> None:
        await self._to.send({"type": "websocket.disconnect", "code": 1001})
        self.received.close()


@contextlib.asynccontextmanager
async def opened(app: WatchApp, count: int = 1) -> AsyncIterator[list[Tab]]:
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tabs = [Tab(app) for _ in range(count)]
            for tab in tabs:
                tasks.start_soon(tab.run)
                assert (await tab.received.receive())["type"] == "websocket.accept"
            yield tabs
            for tab in tabs:
                await tab.leave()


async def test_mounted_page_needs_no_token_and_leads_to_its_own_slash() -> None:
    app = WatchApp(Collector(), token=None, hosts=None)
    status, headers, _ = await request(app, "/watch", root_path="/watch", query_string=b"a=b")
    assert (status, headers[b"location"]) == (307, b"/watch/?a=b")
    status, headers, body = await request(
        app, "/watch/", root_path="/watch", headers=[(b"host", b"any.example")]
    )
    assert status == 200 and b"<h1" in body and headers[b"content-type"].startswith(b"text/html")
    status, headers, body = await request(app, "/", method="HEAD")
    assert (status, body) == (200, b"") and int(headers[b"content-length"]) > 1000
    assert (await request(app, "/live"))[0] == 404


async def test_page_needs_no_process_to_show_pictures_of_the_same_loop() -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    collector = Collector("here")
    stream = collector.add_stream("camera")
    async with opened(WatchApp(collector, token=None)) as (tab,):
        assert "picture" not in await tab.ask(stream=3)
        async with anyio.create_task_group() as tasks:

            async def feed() -> None:
                while True:
                    stream.add_item(Frame(np.zeros((9, 7, 3), np.uint8), now_ns(), 3, 0.0), "late", now_ns())
                    await anyio.sleep(0.001)

            tasks.start_soon(feed)
            found = await tab.ask(stream=0)
            tasks.cancel_scope.cancel()
    assert found["shot"]["status"] == "late" and found["picture"] == 1


async def test_missing_pyav_is_a_sentence_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    collector = Collector()
    collector.add_stream("camera")
    async with opened(WatchApp(collector, token=None)) as (tab,):
        found = await tab.ask(stream=0)
    assert "pip install 'aionn[media]'" in found["problem"] and found["figures"]


async def test_tabs_are_bounded_and_a_closed_one_makes_room() -> None:
    app = WatchApp(Collector(), token=None)
    async with opened(app, TABS_MAX) as tabs:
        late = Tab(app)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.run)
            assert (await late.received.receive())["type"] == "websocket.close"
            late.received.close()
        await tabs.pop().leave()
        await anyio.wait_all_tasks_blocked()
        async with opened(app) as (again,):
            assert (await again.ask())["figures"]


async def test_lifespan_and_metrics_are_answered() -> None:
    app = WatchApp(Collector(), token=None)
    events = iter(("lifespan.startup", "lifespan.shutdown"))
    sent: list[str] = []

    async def receive() -> Any:
        return {"type": next(events)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert (await request(app, "/metrics"))[0] == 200


async def test_newest_is_made_once_for_all_and_again_when_its_maker_leaves() -> None:
    made = 0
    go = anyio.Event()

    async def make() -> int:
        nonlocal made
        made += 1
        await go.wait()
        return made

    newest = Newest(make, 0.0)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            leaving = anyio.CancelScope()

            async def leave() -> None:
                with leaving:
                    await newest.newer(0)

            tasks.start_soon(leave)
            await anyio.wait_all_tasks_blocked()
            for _ in range(10):
                tasks.start_soon(newest.newer, 0)
            await anyio.wait_all_tasks_blocked()
            assert made == 1
            leaving.cancel()
            await anyio.wait_all_tasks_blocked()
            assert made == 2, "the next one makes it"
            go.set()
    assert (newest.number, newest.value, made) == (1, 2, 2)


async def test_number_of_another_server_counts_as_none() -> None:
    async def make() -> int:
        return 5

    newest = Newest(make, 0.0)
    with anyio.fail_after(10):
        await newest.newer(77)
    assert newest.number == 1

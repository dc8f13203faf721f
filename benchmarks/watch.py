"""The price of the watch page: latency of a stream's frames without a page, with one and no tab, and with ten tabs.

    python -m benchmarks.watch [--json] [--quick] [--tabs]

Frames of 96 x 96 pixels at 60 a second go through a burst to LiteRT in a driver process. The forms alternate in short blocks, and
their order is reversed in every other round, so that a change of the machine's load meets all of them:

    none         no page
    page         a page in its own process, which no tab shows
    tabs         the same with ten tabs, each of which takes every picture that it can get (15 a second)
    thread_tabs  ten tabs on a server in a thread of the application

The ratio of a form is the median of its rounds, with the least and the most, each against the block without a page in that round.
``--tabs`` compares the first and the third form alone, within three minutes, and ends with status 1 where ten tabs lengthen the
99th percentile by more than 5 %.

The tabs are clients in a process of their own with the lowest priority. On two cores they still take time from the driver. The
application's processor time for a frame is measured beside the latencies, since other load hardly changes it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import numpy as np

import aionn
from aionn.media import synthetic_video
from aionn.watch import Collector, WatchApp, WatchedStream, WatchPage

MODEL = Path(__file__).parents[1] / "examples" / "data" / "shapes_int8.tflite"
TABS = 10
FORMS = ("none", "page", "tabs", "thread_tabs")
FPS = 60.0

P99_RATIO_MAX = 1.05
"""Ten tabs may lengthen the 99th percentile by so much."""

TOKEN = "benchmark"


def follow(address: str, ready: object, stop: object) -> None:
    """Ten tabs, in a process of their own."""
    os.nice(19)

    async def tab() -> None:
        from websockets.asyncio.client import connect

        async with connect(address) as socket_:
            have = {"stream": 0, "picture": 0, "figures": 0}
            while not stop.is_set():  # type: ignore[attr-defined]
                await socket_.send(json.dumps(have))
                answer = await socket_.recv()
                header = json.loads(answer[4 : 4 + int.from_bytes(answer[:4], "big")])
                have["picture"] = header.get("picture", have["picture"])
                have["figures"] = header.get("number", have["figures"])
                ready.release()  # type: ignore[attr-defined]

    async def all_tabs() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(TABS):
                tasks.start_soon(tab)

    anyio.run(all_tabs)


@contextlib.asynccontextmanager
async def tabs_at(address: str) -> AsyncIterator[None]:
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Semaphore(0), context.Event()
    process = context.Process(target=follow, args=(address, ready, stop), daemon=True)
    process.start()
    try:
        for _ in range(TABS):
            await anyio.to_thread.run_sync(lambda: ready.acquire(timeout=30))
        yield
    finally:
        stop.set()
        await anyio.to_thread.run_sync(process.join, 10)
        process.kill()


@contextlib.contextmanager
def thread_server(collector: Collector) -> Iterator[str]:
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    app = WatchApp(collector, token=TOKEN)
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="websockets-sansio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/live?token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join()


async def measure(burst: aionn.Burst, write: object, stream: WatchedStream, seconds: float) -> list[float]:
    """Latencies in ms."""
    found = []
    frames = round(seconds * FPS)
    into = stream.writer(lambda frame, view: write(frame.data, view))  # type: ignore[operator]
    async with synthetic_video(frames=frames, fps=FPS) as source:
        async for result in burst.stream(source, into=into, measure=True):
            stream.add(result)
            found.append((result.finished_ns - result.item.captured_at_ns) / 1e6)
    return found[round(FPS / 2) :]


async def run(forms: tuple[str, ...], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    latencies: dict[str, list[float]] = {form: [] for form in forms}
    by_round: dict[str, list[float]] = {form: [] for form in forms}
    cpu_us: dict[str, list[float]] = {form: [] for form in forms}
    async with aionn.open(drivers=["litert-cpu"]) as runtime, await runtime.compile(MODEL) as net:
        write = aionn.image_writer(net.inputs[0])
        async with net.burst() as burst:
            for number in range(rounds):
                for form in forms if number % 2 else forms[::-1]:
                    collector = Collector()
                    stream = collector.add_stream("video", within_ns=33_000_000)
                    async with contextlib.AsyncExitStack() as stack:
                        if form in ("page", "tabs"):
                            page = await stack.enter_async_context(WatchPage(collector, port=0, token=TOKEN))
                            address = page.url.replace("http:", "ws:").replace("/?", "/live?")
                        if form == "thread_tabs":
                            address = stack.enter_context(thread_server(collector))
                        if form.endswith("tabs"):
                            # They ask for a picture before the stream runs: a few frames let them begin.
                            async with anyio.create_task_group() as tasks:
                                tasks.start_soon(measure, burst, write, stream, 4.0)
                                await stack.enter_async_context(tabs_at(address))
                        before_s = time.process_time()
                        got = await measure(burst, write, stream, seconds)
                        cpu_us[form].append((time.process_time() - before_s) * 1e6 / (seconds * FPS))
                        latencies[form] += got
                        by_round[form].append(float(np.percentile(got, 99)))
                        print(
                            f"{form:12} p50 {np.percentile(got, 50):6.2f} p99 {by_round[form][-1]:6.2f}",
                            file=sys.stderr,
                        )
    rows = {}
    for form in forms:
        ratios = [a / b for a, b in zip(by_round[form], by_round["none"], strict=True)]
        rows[form] = {
            "p50_ms": round(float(np.percentile(latencies[form], 50)), 3),
            "p99_ms": round(float(np.percentile(latencies[form], 99)), 3),
            "p99_ratio": round(float(np.median(ratios)), 3),
            "p99_ratio_least": round(min(ratios), 3),
            "p99_ratio_most": round(max(ratios), 3),
            "cpu_us_per_frame": round(float(np.median(cpu_us[form])), 1),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tabs", action="store_true", help="the forms none and tabs alone")
    arguments = parser.parse_args()
    forms = ("none", "tabs") if arguments.tabs else FORMS
    length = (2, 4.0) if arguments.quick else (4, 15.0) if arguments.tabs else (8, 15.0)
    rows = anyio.run(run, forms, *length)
    status = int(arguments.tabs and rows["tabs"]["p99_ratio"] > P99_RATIO_MAX)
    if arguments.json:
        print(json.dumps(rows))
        sys.exit(status)
    print(f"{'':12} {'p50 ms':>9} {'p99 ms':>9} {'p99 ratio of rounds':>20} {'CPU us per frame':>17}")
    for form, row in rows.items():
        ratio = f"{row['p99_ratio']:.2f} [{row['p99_ratio_least']:.2f}, {row['p99_ratio_most']:.2f}]"
        print(
            f"{form:12} {row['p50_ms']:9.2f} {row['p99_ms']:9.2f} {ratio:>20} {row['cpu_us_per_frame']:17.1f}"
        )
    sys.exit(status)


if __name__ == "__main__":
    main()

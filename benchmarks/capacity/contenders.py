"""The contenders, and the process of one: it opens its engine once, then runs as many streams as each line of standard input asks
for.

``python -m benchmarks.capacity.contenders CONTENDER ENGINE SLOTS MODEL...``. A line ``[streams, seconds, stops]`` is answered by a
line with the tallies; ``stops`` ends a run whose streams are not all admitted, with the reason on standard error. The first line
that is written has the milliseconds of a frame of each model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

import aionn
from benchmarks.capacity.cameras import PERIOD_NS, Camera, Tally, captures, make_cameras
from benchmarks.engines.peers import openvino_core
from fences import now_ns

__all__ = ["CONTENDERS", "ENGINES", "missing"]

WARM_NS = 500_000_000
LEAD_NS = 200_000_000
"""Time from the order to the first capture, in which tasks and threads begin."""

QUEUE_FRAMES_MAX = 256
"""Frames that wait for a worker thread: some seconds of a busy engine, so that the queue does not limit them."""

TIMED_CALLS = 20
SLOTS_PER_STREAM = 3
"""Buffers of a burst for each stream: one frame runs, one is at the consumer, one is written."""

BURST_STREAMS_MAX = 21
"""Streams of one burst, which has 64 buffers at most."""

PACKAGES = {"litert": "ai_edge_litert", "ort": "onnxruntime", "openvino": "openvino"}

ENGINES = tuple(PACKAGES)

Array = npt.NDArray[Any]


class Call(NamedTuple):
    """An engine with a model, for one thread at a time.

    Attributes:
        frame: A picture, as the model takes it.
        run: Computes a frame.
    """

    frame: Array
    run: Callable[[Array], object]


def made_call(engine: str, path: Path) -> Call:
    """The engine alone, on one thread."""
    if engine == "litert":
        from benchmarks.engine import Engine

        alone = Engine(path)
        return Call(alone.quantised(np.zeros(alone.input_shape, np.float32)), alone)
    from benchmarks.engines.peers import OnnxRuntime, OpenVino

    peer = OnnxRuntime(path) if engine == "ort" else OpenVino(path)

    def run(frame: Array) -> Array:
        np.copyto(peer.x, frame)
        peer()
        return peer.y()

    return Call(peer.x.copy(), run)


class Run(NamedTuple):
    """One run of some streams, which take the models in turn.

    Attributes:
        streams: Their number.
        models: The number of models.
        seconds: Time during which frames count.
        stops: Whether it ends where a stream is not admitted.
    """

    streams: int
    models: int
    seconds: float
    stops: bool

    def cameras(self) -> list[Camera]:
        """The cameras of the streams, which begin soon."""
        begin_ns = now_ns() + LEAD_NS
        return make_cameras(self.streams, self.models, begin_ns, warm_ns=WARM_NS, seconds=self.seconds)


class Contender(Protocol):
    """Runs streams on an engine."""

    def frame_ms(self) -> list[float]:
        """The time of a frame of each model, with nothing beside it."""
        ...

    def run(self, run: Run) -> list[Tally]:
        """Runs the streams to their end."""
        ...

    def close(self) -> None:
        """Ends its threads and processes."""
        ...


def timed_ms(call: Callable[[], object]) -> float:
    """The median time of a call."""
    times = []
    for _ in range(TIMED_CALLS):
        began_ns = now_ns()
        call()
        times.append((now_ns() - began_ns) / 1e6)
    return statistics.median(times)


def tallies_of(cameras: Sequence[Camera], on_time: Sequence[int]) -> list[Tally]:
    """The tallies of streams that were not refused."""
    return [Tally(camera.counted(), count) for camera, count in zip(cameras, on_time, strict=True)]


# --- The engine in worker threads ---


class Threads:
    """Worker threads, each with the engine for every model, and one queue of all frames: first come, first served."""

    def __init__(self, engine: str, slots: int, paths: Sequence[Path]) -> None:
        self._workers = [[made_call(engine, path) for path in paths] for _ in range(slots)]

    def frame_ms(self) -> list[float]:
        return [timed_ms(functools.partial(call.run, call.frame)) for call in self._workers[0]]

    def run(self, run: Run) -> list[Tally]:
        cameras = run.cameras()
        waiting: queue.Queue[tuple[int, int] | None] = queue.Queue(QUEUE_FRAMES_MAX)
        on_time = [0] * len(cameras)

        def work(calls: Sequence[Call]) -> None:
            while (entry := waiting.get()) is not None:
                captured_ns, number = entry
                call = calls[cameras[number].model]
                call.run(call.frame)
                if now_ns() <= captured_ns + PERIOD_NS and cameras[number].counts(captured_ns):
                    on_time[number] += 1

        threads = [threading.Thread(target=work, args=(calls,)) for calls in self._workers]
        for thread in threads:
            thread.start()
        for entry in captures(cameras):
            sleep_until(entry[0])
            with contextlib.suppress(queue.Full):
                waiting.put_nowait(entry)
        for _ in threads:
            waiting.put(None)
        for thread in threads:
            thread.join()
        return tallies_of(cameras, on_time)

    def close(self) -> None:
        self._workers.clear()


def sleep_until(at_ns: int) -> None:
    """Sleeps in a thread."""
    left_ns = at_ns - now_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


# --- asyncio, one place for the newest frame of each stream ---


class Newest:
    """An asyncio application: each stream has a place for its newest frame, and the workers take the streams in turn."""

    def __init__(self, engine: str, slots: int, paths: Sequence[Path]) -> None:
        self._workers = [[made_call(engine, path) for path in paths] for _ in range(slots)]
        self._pool = concurrent.futures.ThreadPoolExecutor(slots)

    def frame_ms(self) -> list[float]:
        return [timed_ms(functools.partial(call.run, call.frame)) for call in self._workers[0]]

    def run(self, run: Run) -> list[Tally]:
        return asyncio.run(self._run(run.cameras()))

    async def _run(self, cameras: Sequence[Camera]) -> list[Tally]:
        ready: asyncio.Queue[int] = asyncio.Queue()
        newest: dict[int, int] = {}
        on_time = [0] * len(cameras)
        loop = asyncio.get_running_loop()

        async def work(calls: Sequence[Call]) -> None:
            while True:
                number = await ready.get()
                captured_ns = newest.pop(number)
                call = calls[cameras[number].model]
                await loop.run_in_executor(self._pool, call.run, call.frame)
                if now_ns() <= captured_ns + PERIOD_NS and cameras[number].counts(captured_ns):
                    on_time[number] += 1

        tasks = [asyncio.create_task(work(calls)) for calls in self._workers]
        for captured_ns, number in captures(cameras):
            await asyncio.sleep(max(0, captured_ns - now_ns()) / 1e9)
            if number not in newest:
                ready.put_nowait(number)
            newest[number] = captured_ns
        await asyncio.sleep(PERIOD_NS / 1e9)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return tallies_of(cameras, on_time)

    def close(self) -> None:
        self._pool.shutdown()
        self._workers.clear()


# --- OpenVINO's queue ---


class InferQueue:
    """OpenVINO's ``AsyncInferQueue``, one for each model, with as many requests as slots; a frame waits for a free one."""

    def __init__(self, engine: str, slots: int, paths: Sequence[Path]) -> None:
        import openvino as ov

        core = openvino_core()
        properties = {
            "PERFORMANCE_HINT": "LATENCY" if slots == 1 else "THROUGHPUT",
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": str(slots),
            "INFERENCE_NUM_THREADS": str(slots),
            "ENABLE_CPU_PINNING": "NO",
        }
        models = [core.compile_model(str(path), "CPU", properties) for path in paths]
        self._frames = [np.zeros(tuple(model.input(0).shape), np.float32) for model in models]
        self._queues = [ov.AsyncInferQueue(model, slots) for model in models]

    def frame_ms(self) -> list[float]:
        found = []
        for infer, frame in zip(self._queues, self._frames, strict=True):

            def call(infer: Any = infer, frame: Array = frame) -> None:
                infer.start_async({0: frame}, None)
                infer.wait_all()

            found.append(timed_ms(call))
        return found

    def run(self, run: Run) -> list[Tally]:
        cameras = run.cameras()
        on_time = [0] * len(cameras)
        lock = threading.Lock()

        def ended(request: Any, entry: tuple[int, int] | None) -> None:
            ended_ns = now_ns()
            if entry is None:
                return
            captured_ns, number = entry
            request.get_output_tensor(0).data.copy()
            if ended_ns <= captured_ns + PERIOD_NS and cameras[number].counts(captured_ns):
                with lock:
                    on_time[number] += 1

        for infer in self._queues:
            infer.set_callback(ended)
        end_ns = max(camera.end_ns for camera in cameras)
        for entry in captures(cameras):
            sleep_until(entry[0])
            if now_ns() > end_ns:
                break  # It waits for requests, and the frames that are left are late.
            model = cameras[entry[1]].model
            self._queues[model].start_async({0: self._frames[model]}, entry)
        for infer in self._queues:
            infer.wait_all()
        return tallies_of(cameras, on_time)

    def close(self) -> None:
        self._queues.clear()


# --- aionn ---


class Frame(NamedTuple):
    """A frame of a camera."""

    captured_at_ns: int
    data: Array


async def frames_of(cameras: Sequence[Camera], number: int, data: Array) -> AsyncIterator[Frame]:
    """The frames of a camera, the newest one whenever it is asked. The list is filled before the first one is requested."""
    camera = cameras[number]
    index = 0
    while True:
        index = camera.newest(now_ns(), index)
        captured_ns = camera.due_ns(index)
        if captured_ns >= camera.end_ns:
            return
        left_ns = captured_ns - now_ns()
        if left_ns > 0:
            await asyncio.sleep(left_ns / 1e9)
        yield Frame(captured_ns, data)
        index += 1


def write(frame: Frame, view: Array) -> None:
    """Puts a frame into the memory of its input."""
    np.copyto(view, frame.data)


class Aionn:
    """Streams of aionn with deadlines, as best effort or with a guarantee; each burst has the buffers of many streams."""

    def __init__(self, engine: str, slots: int, paths: Sequence[Path], *, guarantee: bool) -> None:
        self._guarantee = guarantee
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        name = {"litert": "litert-cpu", "ort": "ort-cpu", "openvino": "openvino-cpu"}[engine]
        driver = name if slots == 2 else f"benchmarks.capacity.devices:{engine}"
        self._runner.run(self._open({name: driver}, paths))

    async def _open(self, drivers: Mapping[str, str], paths: Sequence[Path]) -> None:
        runtime = await self._stack.enter_async_context(aionn.open(drivers=drivers))
        self._nets = [await runtime.compile(path) for path in paths]
        self._frames = [np.zeros(net.inputs[0].dimensions, net.inputs[0].dtype) for net in self._nets]

    def frame_ms(self) -> list[float]:
        return self._runner.run(self._timed())

    async def _timed(self) -> list[float]:
        found = []
        for net, frame in zip(self._nets, self._frames, strict=True):
            async with net.burst() as burst:
                times = []
                for _ in range(TIMED_CALLS):
                    began_ns = now_ns()
                    await burst.execute([frame])
                    times.append((now_ns() - began_ns) / 1e6)
                found.append(statistics.median(times))
        return found

    def run(self, run: Run) -> list[Tally]:
        return self._runner.run(self._run(run))

    async def _run(self, run: Run) -> list[Tally]:
        cameras: list[Camera] = []
        async with contextlib.AsyncExitStack() as stack:
            streams: list[aionn.Stream[Frame]] = []
            admitted = [True] * run.streams
            for number, burst in enumerate(await self._bursts(stack, run)):
                source = frames_of(cameras, number, self._frames[number % run.models])
                if not self._guarantee:
                    streams.append(burst.stream(source, into=write, deadline=deadline_of))
                    continue
                stream = burst.stream(
                    source, into=write, guarantee="best", period=PERIOD_NS / 1e9, name=f"camera-{number}"
                )
                streams.append(await stack.enter_async_context(stream))
                admitted[number] = stream.refusal is None
                if run.stops and stream.refusal is not None:
                    print(stream.refusal.reason, file=sys.stderr, flush=True)
                    return [Tally(0, 0, is_admitted=False)]
            # Not before: an admission measures durations.
            cameras += run.cameras()
            counts = await asyncio.gather(*map(on_time_count, streams, cameras))
        return [Tally(c.counted(), *row) for c, *row in zip(cameras, counts, admitted, strict=True)]

    async def _bursts(self, stack: contextlib.AsyncExitStack, run: Run) -> list[aionn.Burst]:
        """The burst of each stream."""
        found: dict[int, aionn.Burst] = {}
        for model, net in enumerate(self._nets):
            numbers = range(model, run.streams, run.models)
            for first in range(0, len(numbers), BURST_STREAMS_MAX):
                part = numbers[first : first + BURST_STREAMS_MAX]
                burst = await stack.enter_async_context(net.burst(slots=SLOTS_PER_STREAM * len(part)))
                found.update(dict.fromkeys(part, burst))
        return [found[number] for number in range(run.streams)]

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


def deadline_of(frame: Frame) -> int:
    """A period after the capture."""
    return frame.captured_at_ns + PERIOD_NS


async def on_time_count(stream: aionn.Stream[Frame], camera: Camera) -> int:
    """Reads a stream to its end."""
    count = 0
    async for result in stream:
        if result.status == "on_time" and camera.counts(result.item.captured_at_ns):
            count += 1
    return count


CONTENDERS: Mapping[str, Callable[[str, int, Sequence[Path]], Contender]] = {
    "aionn, guarantee": functools.partial(Aionn, guarantee=True),
    "aionn": functools.partial(Aionn, guarantee=False),
    "worker threads": Threads,
    "asyncio, newest wins": Newest,
    "AsyncInferQueue": InferQueue,
}
"""By name. The engine is in worker threads: "LiteRT in worker threads", and so on."""


def missing(contender: str, engine: str) -> str | None:
    """The reason why a contender cannot run on an engine; None if it can."""
    if importlib.util.find_spec(PACKAGES[engine]) is None:
        return f"{PACKAGES[engine]} is not installed"
    if contender == "AsyncInferQueue" and engine != "openvino":
        return "it belongs to OpenVINO"
    return None


def main(contender: str, engine: str, slots: int, paths: Sequence[Path]) -> None:
    """Answers the lines of standard input until it ends."""
    made = CONTENDERS[contender](engine, slots, paths)
    try:
        print(json.dumps(made.frame_ms()), flush=True)
        for line in sys.stdin:
            streams, seconds, stops = json.loads(line)
            print(json.dumps(made.run(Run(streams, len(paths), seconds, stops))), flush=True)
    finally:
        made.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [Path(text) for text in sys.argv[4:]])

"""One contender of ``benchmarks.busy``: the demo's two streams at their pace for some seconds, in a process of its own.

``python -m benchmarks.busy.contenders NAME SECONDS`` prints one JSON object: milliseconds from the time at which each item was due
to its result. All periods are counted from the same start, so that a late item does not postpone the next.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import aionn

DATA = Path(__file__).resolve().parents[2] / "examples" / "data"
VIDEO, AUDIO = DATA / "shapes_int8.tflite", DATA / "digits_int8.tflite"
FRAME_S, WINDOW_S = 1 / 30, 1 / 10
FRAME_SHAPE, WINDOW_SHAPE = (1, 96, 96, 3), (1, 49, 40, 1)
WARM_COUNT = 20
PRIORITY = 10
"""The priority that a user sets by hand; aionn's HIGH has the same."""

FLOOD_WIDTH = 2
"""Executions of the LOW flood that are under way: as many as the device has slots."""

Execute = Callable[[Any], Awaitable[object]]


class Result:
    """The measurements of a contender.

    Attributes:
        frames_ms: From the due time of each frame to its result.
        windows_ms: The same for the windows of the recording.
        low_count: Executions of the LOW flood.
        note: The rights that the machine granted.
    """

    def __init__(self) -> None:
        self.frames_ms: list[float] = []
        self.windows_ms: list[float] = []
        self.low_count = 0
        self.note = ""


async def paced(count: int, period_s: float) -> AsyncIterator[float]:
    """The due times of ``count`` items; each is given when it is due, or as soon as the consumer asks for it."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time() + period_s
    for number in range(count):
        due_s = begin_s + number * period_s
        while (left_s := due_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
        yield due_s


async def run_stream(
    execute: Execute, item: Any, count: int, period_s: float, latencies: list[float]
) -> None:
    async for due_s in paced(count, period_s):
        await execute(item)
        latencies.append(1e3 * (time.monotonic() - due_s))


async def both(see: Execute, hear: Execute, seconds: float, result: Result) -> None:
    rng = np.random.default_rng(1)
    frame = rng.integers(-128, 128, FRAME_SHAPE, np.int8)
    window = rng.integers(-128, 128, WINDOW_SHAPE, np.int8)
    for _ in range(WARM_COUNT):
        await see(frame)
        await hear(window)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_stream(see, frame, round(seconds / FRAME_S), FRAME_S, result.frames_ms))
        tasks.create_task(run_stream(hear, window, round(seconds / WINDOW_S), WINDOW_S, result.windows_ms))


async def run_aionn(realtime: str, seconds: float, result: Result, flooded: str = "") -> None:
    devices = {"litert-cpu": "litert-cpu", **({flooded: "litert-cpu"} if flooded else {})}
    async with aionn.open(drivers=devices, realtime=realtime) as runtime:
        seeing = await runtime.compile(VIDEO, devices="litert-cpu", priority="high")
        hearing = await runtime.compile(AUDIO, devices="litert-cpu", priority="medium")
        async with seeing.burst() as seen, hearing.burst() as heard:
            flood = asyncio.create_task(_flood(runtime, flooded, result)) if flooded else None
            await both(lambda x: seen.execute([x]), lambda x: heard.execute([x]), seconds, result)
            report = await runtime.realtime()
            result.note = "; ".join(
                f"{row.name} {row.state}" for process in report.processes for row in process.rows
            )
            if flood is not None:
                flood.cancel()
                await asyncio.wait([flood])


async def _flood(runtime: aionn.Runtime, device: str, result: Result) -> None:
    net = await runtime.compile(VIDEO, devices=device, priority="low")
    frame = np.zeros(FRAME_SHAPE, np.int8)

    async def one() -> None:
        while True:
            await burst.execute([frame])
            result.low_count += 1

    async with net.burst() as burst, asyncio.TaskGroup() as tasks:
        for _ in range(FLOOD_WIDTH):
            tasks.create_task(one())


def _become_real_time() -> None:
    """Sets the calling thread's class by hand."""
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))


def run_timer(seconds: float, result: Result) -> None:
    """Sleeps until each frame is due, and does nothing else: what is late here, the kernel has delayed."""
    _become_real_time()
    begin_s = time.monotonic() + FRAME_S
    for number in range(round(seconds / FRAME_S)):
        due_s = begin_s + number * FRAME_S
        time.sleep(max(0.0, due_s - time.monotonic()))
        result.frames_ms.append(1e3 * (time.monotonic() - due_s))


async def run_litert(is_realtime: bool, seconds: float, result: Result) -> None:
    from ai_edge_litert.interpreter import Interpreter

    def set_class() -> None:
        if is_realtime:
            _become_real_time()

    def execute_with(path: Path) -> Execute:
        interpreter = Interpreter(model_path=str(path), num_threads=1)
        interpreter.allocate_tensors()
        index_in = interpreter.get_input_details()[0]["index"]
        index_out = interpreter.get_output_details()[0]["index"]
        pool = concurrent.futures.ThreadPoolExecutor(1, initializer=set_class)

        def call(value: Any) -> Any:
            interpreter.set_tensor(index_in, value)
            interpreter.invoke()
            return interpreter.get_tensor(index_out)

        async def execute(value: Any) -> object:
            return await asyncio.get_running_loop().run_in_executor(pool, call, value)

        return execute

    see, hear = execute_with(VIDEO), execute_with(AUDIO)
    set_class()
    gc.collect()
    gc.freeze()
    await both(see, hear, seconds, result)


async def run_openvino(seconds: float, result: Result) -> None:
    import openvino

    core = openvino.Core()

    def execute_with(path: Path) -> Execute:
        compiled = core.compile_model(
            str(path), "CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1}
        )
        queue = openvino.AsyncInferQueue(compiled, 1)
        loop = asyncio.get_running_loop()
        queue.set_callback(lambda _, future: loop.call_soon_threadsafe(future.set_result, None))

        async def execute(value: Any) -> object:
            future = loop.create_future()
            queue.start_async({0: value}, future)
            return await future

        return execute

    see, hear = execute_with(VIDEO), execute_with(AUDIO)
    gc.collect()
    gc.freeze()
    await both(see, hear, seconds, result)


async def run_round_trips(realtime: str, seconds: float, result: Result) -> None:
    """Executions of the digits model through a burst, one after the other."""
    async with aionn.open(drivers=["litert-cpu"], realtime=realtime) as runtime:
        net = await runtime.compile(AUDIO, priority="high")
        window = np.zeros(WINDOW_SHAPE, np.int8)
        async with net.burst() as burst:
            for _ in range(WARM_COUNT):
                await burst.execute([window])
            end_s = time.monotonic() + seconds
            while (begin_s := time.monotonic()) < end_s:
                await burst.execute([window])
                result.frames_ms.append(1e3 * (time.monotonic() - begin_s))
                await asyncio.sleep(0.005)


CONTENDERS: dict[str, Callable[[float, Result], Awaitable[None]]] = {
    "aionn": lambda seconds, result: run_aionn("off", seconds, result),
    "aionn real time": lambda seconds, result: run_aionn("if_permitted", seconds, result),
    "aionn, no privilege": lambda seconds, result: run_aionn("if_permitted", seconds, result),
    "aionn, LOW flood": lambda seconds, result: run_aionn("off", seconds, result, "litert-cpu"),
    "aionn real time, LOW flood": lambda seconds, result: run_aionn(
        "if_permitted", seconds, result, "litert-cpu"
    ),
    "aionn real time, LOW flood on another device": lambda seconds, result: run_aionn(
        "if_permitted", seconds, result, "other"
    ),
    "LiteRT thread": lambda seconds, result: run_litert(False, seconds, result),
    "LiteRT thread, SCHED_RR": lambda seconds, result: run_litert(True, seconds, result),
    "OpenVINO AsyncInferQueue": run_openvino,
    "limit: timer, SCHED_RR": lambda seconds, result: asyncio.to_thread(run_timer, seconds, result),
    "round trip": lambda seconds, result: run_round_trips("off", seconds, result),
    "round trip real time": lambda seconds, result: run_round_trips("if_permitted", seconds, result),
}


def main() -> None:
    name, seconds = sys.argv[1], float(sys.argv[2])
    result = Result()

    async def run() -> None:
        await CONTENDERS[name](seconds, result)

    asyncio.run(run())
    print(json.dumps(vars(result)))


if __name__ == "__main__":
    main()

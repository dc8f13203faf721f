"""The stress tests of a device: each body in a process of its own, watched from here.

Owns the verdicts: the report of a body counts; one that dies is a CRASH, one that does not report in time is a HANG, or a FAILURE
where its set-up is not over, and is killed with all processes that it started. The next test begins whatever became of the one
before.

Source: the crash tests of MLTS, whose coordinator waits for a result, the process's death or a time-out, whichever comes first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL

import anyio
import msgspec
from anyio.abc import Process

from aionn.benchmarking.stress.bodies import BODIES, Ended, StressTask, read_until_begun, task_command
from aionn.benchmarking.stress.limits import LIVENESS_S_MAX, SETUP_S_MAX
from aionn.errors import Error, InvalidArgument
from aionn.models.importing import NO_OPTIONS, ImportOptions, load_file
from aionn.platform.loops import finish
from aionn.platform.python_process import python_environment
from aionn.runtime.runtime import open_runtime

__all__ = ["GRACE_S", "TEST_S_MAX", "StressResult", "stress", "suited_model"]

START_S_MAX = SETUP_S_MAX + 20.0
"""Limit of the start of a test's process and its set-up. Its body reports a set-up that takes too long before that."""

GRACE_S = SETUP_S_MAX + LIVENESS_S_MAX + 20.0
"""Time that a test may take beyond its limit before it counts as hanging: the last limit of its body, and MLTS's number."""

TEST_S_MAX = 86400.0
"""Longest time that a test works, a day."""


class StressResult(msgspec.Struct, frozen=True):
    """The end of one test.

    Attributes:
        test: Its name.
        result: SUCCESS, FAILURE, HANG or CRASH.
        message: The reason.
        count: Number of executions or compilations.
        seconds: Its duration.
    """

    test: str
    result: str
    message: str
    count: int
    seconds: float


async def suited_model(device: str, models: Sequence[Path]) -> Path:
    """The first of some models whose every operation a device supports; the first of all where it supports none of them, or does
    not answer: the tests report that.

    Args:
        device: Registered name of a driver.
        models: .tflite or .onnx files, at least one.

    Raises:
        InvalidArgument: A file cannot be imported.
    """
    try:
        with anyio.fail_after(SETUP_S_MAX):
            async with open_runtime(drivers=[device]) as runtime:
                for model in models:
                    (answer,) = await runtime.supported_operations(model, devices=device)
                    if not answer.error and all(answer.supported):
                        return model
    except InvalidArgument:
        raise
    except (Error, OSError):  # A device that does not answer in time raises TimeoutError, an OSError.
        pass
    return models[0]


async def stress(
    device: str,
    model: Path,
    tests: Sequence[str],
    seconds: float,
    *,
    seed: int = 0,
    grace_s: float = GRACE_S,
    progress: Callable[[str, int], None] = lambda _test, _index: None,
    imports: ImportOptions = NO_OPTIONS,
    done: Callable[[StressResult], None] = lambda _: None,
) -> tuple[StressResult, ...]:
    """Makes the tests one after the other.

    Args:
        device: Registered name of a driver.
        model: A .tflite or .onnx file.
        tests: Names from ``BODIES``.
        seconds: Duration of each test.
        seed: Seed of everything that is random.
        grace_s: Time that a test may take beyond that, its set-up not counted.
        progress: Called with each test before it begins, and its number.
        imports: Open extents and shapes of an .onnx file.
        done: Called with each result immediately, so that a caller that is cancelled has those before.

    Raises:
        InvalidArgument: There is no such test, the model cannot be imported, or the time makes no sense.
    """
    unknown = [test for test in tests if test not in BODIES]
    if unknown or not tests:
        raise InvalidArgument(
            f"stress: expected tests of {', '.join(BODIES)}; got {', '.join(unknown) or 'none'}"
        )
    if not 0 < seconds <= TEST_S_MAX:
        raise InvalidArgument(
            f"stress: expected more than 0 and at most {TEST_S_MAX:g} s for each test, got {seconds:g}"
        )
    # Each test would fail on a file that cannot be imported.
    await anyio.to_thread.run_sync(load_file, model, imports)
    results = []
    for index, test in enumerate(tests):
        progress(test, index)
        started_s = time.monotonic()
        shapes = {name: tuple(shape) for name, shape in imports.input_shapes.items()}
        task = StressTask(test, device, str(model), seconds, seed, dict(imports.dimensions), shapes)
        ended = await _watched(task, seconds + grace_s)
        took_s = round(time.monotonic() - started_s, 3)
        results.append(StressResult(test, ended.result, ended.message, ended.count, took_s))
        done(results[-1])
    return tuple(results)


async def _watched(task: StressTask, limit_s: float) -> Ended:
    """Runs a test's process until it ends or its time, which begins when its set-up is over, is up."""
    text = b""
    started: list[Process] = []

    async def start() -> None:
        # A session of its own: what the test started ends with it.
        process = await anyio.open_process(
            task_command(task),
            stdin=DEVNULL,
            stderr=DEVNULL,
            env=python_environment(),
            start_new_session=True,
        )
        started.append(process)

    try:
        await finish(start())
        (process,) = started
        assert process.stdout is not None
        with anyio.move_on_after(START_S_MAX) as starting:
            _, text = await read_until_begun(process.stdout)
        if starting.cancelled_caught:
            return Ended("FAILURE", f"its start and set-up took longer than {START_S_MAX:g} s")
        with anyio.move_on_after(limit_s) as scope:
            async for chunk in process.stdout:
                text += chunk
            await process.wait()
    finally:
        for process in started:
            await finish(_end(process))
    if scope.cancelled_caught:
        return Ended("HANG", f"no result within {limit_s:g} s")
    try:
        return msgspec.json.decode(text.strip().splitlines()[-1], type=Ended)
    except (msgspec.MsgspecError, IndexError):
        return Ended("CRASH", f"the test's process ended with code {process.returncode} and without a result")


async def _end(process: Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    await process.aclose()

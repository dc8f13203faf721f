"""A stress test's limits: its set-up and its compilations have their own, so that a machine with much other work makes no hang."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import aionn
from aionn.benchmarking.stress import bodies
from aionn.benchmarking.stress.bodies import StressTask, run_task
from aionn.benchmarking.stress.limits import LIVENESS_S_MAX, SETUP_S_MAX, Limit
from aionn.benchmarking.stress.run import stress

SECONDS = 40.0
"""Duration of the work."""

SLEEPING = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
"""A process that never ends its set-up."""


@pytest.fixture
def model(example_data: Path) -> Path:
    return example_data / "digits_int8.tflite"


class Slow:
    """A runtime in which every compilation takes a while."""

    def __init__(self, runtime: aionn.Runtime, compile_s: Callable[[int], float]) -> None:
        self._runtime = runtime
        self._compile_s = compile_s
        self._count = 0

    async def compile(self, *args: Any, **kwargs: Any) -> aionn.Compilation:
        self._count += 1
        await anyio.sleep(self._compile_s(self._count))
        return await self._runtime.compile(*args, **kwargs)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], None]:
    """Has the bodies compile slowly: the argument gives the seconds of each compilation by its number, from 1."""

    def use(compile_s: Callable[[int], float]) -> None:
        @asynccontextmanager
        async def opened(drivers: list[str]) -> AsyncIterator[Slow]:
            async with aionn.open(drivers=drivers, isolation="in_process") as runtime:
                yield Slow(runtime, compile_s)

        monkeypatch.setattr(bodies, "open_runtime", opened)

    return use


def test_set_up_has_a_limit_of_its_own_and_the_work_begins_after_it() -> None:
    limit = Limit(5.0, SECONDS)
    assert (limit.end_s, limit.deadline_s) == (math.inf, 5 + SETUP_S_MAX)
    limit.compiling(6.0)
    limit.compiled(200.0)
    assert (limit.end_s, limit.deadline_s) == (math.inf, 5 + SETUP_S_MAX)
    assert not limit.is_set_up_late(4.9 + SETUP_S_MAX)
    assert limit.is_set_up_late(5 + SETUP_S_MAX)
    limit.begin(250.0)
    assert (limit.end_s, limit.deadline_s) == (250 + SECONDS, 250 + SECONDS + LIVENESS_S_MAX)
    assert not limit.is_set_up_late(math.inf)


@pytest.mark.parametrize(
    ("started_s", "ended_s", "during_s", "after_s"),
    [
        pytest.param(1, 2, 1 + SETUP_S_MAX, SECONDS + LIVENESS_S_MAX, id="early"),
        pytest.param(39, 140, 39 + SETUP_S_MAX, 140 + LIVENESS_S_MAX, id="over the end"),
        pytest.param(
            900, 950, SECONDS + SETUP_S_MAX + LIVENESS_S_MAX, SECONDS + SETUP_S_MAX + LIVENESS_S_MAX,
            id="never beyond the last limit",
        ),
    ],
)  # fmt: skip
def test_compilation_extends_the_limit_of_the_work(
    started_s: float, ended_s: float, during_s: float, after_s: float
) -> None:
    limit = Limit(-1.0, SECONDS)
    limit.begin(0.0)
    limit.compiling(started_s)
    assert limit.deadline_s == during_s
    assert limit.is_set_up_late(started_s + SETUP_S_MAX) and not limit.is_set_up_late(started_s)
    limit.compiled(ended_s)
    assert limit.deadline_s == after_s
    assert not limit.is_set_up_late(math.inf)


@pytest.mark.aionn(virtual_time=True)
@pytest.mark.parametrize("body", ["load_and_unload", "mapped_models", "random_models"])
async def test_slow_compilations_are_no_hang(
    model: Path, slow: Callable[[Callable[[int], float]], None], body: str
) -> None:
    slow(lambda _: SECONDS * 0.75)
    ended = await run_task(StressTask(body, "reference", str(model), SECONDS, 1))
    assert (ended.result, ended.message, ended.count) == ("SUCCESS", "", 2)


@pytest.mark.aionn(virtual_time=True)
@pytest.mark.parametrize(
    ("body", "late"),
    [
        pytest.param("long_inference", 1, id="the known model"),
        pytest.param("long_inference", 2, id="before the work"),
        pytest.param("load_and_unload", 2, id="in the work"),
    ],
)
async def test_set_up_that_never_ends_is_named(
    model: Path, slow: Callable[[Callable[[int], float]], None], body: str, late: int
) -> None:
    slow(lambda number: math.inf if number == late else 0.0)
    ended = await run_task(StressTask(body, "reference", str(model), SECONDS, 1))
    assert ended.result == "FAILURE"
    assert ended.message == f"set-up took longer than {SETUP_S_MAX:g} s; other work of the machine counts too"


@pytest.mark.aionn(virtual_time=True)
async def test_work_that_never_ends_is_a_hang(
    model: Path, slow: Callable[[Callable[[int], float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(work: bodies.Work) -> None:
        work.begin()
        await anyio.sleep_forever()

    monkeypatch.setattr(bodies, "BODIES", {"for_ever": for_ever})
    slow(lambda _: 100.0)
    begun: list[float] = []
    ended = await run_task(
        StressTask("for_ever", "reference", str(model), SECONDS, 1),
        lambda: begun.append(anyio.current_time()),
    )
    assert (ended.result, ended.message) == ("HANG", f"TimeoutError: no answer within {LIVENESS_S_MAX:g} s")
    assert [anyio.current_time() - began_s for began_s in begun] == [SECONDS + LIVENESS_S_MAX]


async def test_clients_that_never_begin_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.benchmarking.stress.limits.SETUP_S_MAX", 0.5)
    monkeypatch.setattr(bodies, "task_command", lambda task: SLEEPING)
    ended = await run_task(StressTask("killed_clients", "reference", str(model), 0.1, 1))
    assert ended.result == "FAILURE"
    assert ended.message.startswith("set-up took longer than ")


async def test_client_that_dies_in_its_set_up_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "task_command", lambda task: ["sh", "-c", "exit 7"])
    ended = await run_task(StressTask("killed_clients", "reference", str(model), 0.1, 1))
    assert (ended.result, ended.count) == ("FAILURE", 0)
    assert ended.message == "a client that was not killed: CRASH it printed no result"


async def test_process_that_never_begins_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.benchmarking.stress.run.task_command", lambda task: SLEEPING)
    monkeypatch.setattr("aionn.benchmarking.stress.run.START_S_MAX", 0.1)
    (result,) = await stress("reference", model, ["long_inference"], 0.1)
    assert (result.result, result.message) == ("FAILURE", "its start and set-up took longer than 0.1 s")

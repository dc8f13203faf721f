"""The metrics of a runtime: each execution and each item is counted once, under labels whose number is bounded."""

from __future__ import annotations

import random
import re
import shutil
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.errors import ErrorStatus
from aionn.hal import NO_TIMING, Priority, Timing
from aionn.observability.durations import Durations
from aionn.runtime.executions.results import Result
from aionn.runtime.metrics.exposed import FAMILIES, samples
from aionn.runtime.metrics.figures import (
    IMMEDIATE_NS,
    KEPT_NS,
    MODELS_MAX,
    OTHER,
    OUTCOMES,
    STREAMS_MAX,
    ExecutionFigures,
    RuntimeFigures,
)
from aionn.service.host.metrics import FAMILIES as HOST_FAMILIES
from aionn.testing.models import identity

ONE = np.ones(1, np.float32)


class Job:
    def __init__(self, priority: Priority = Priority.MEDIUM, deadline_ns: int | None = None) -> None:
        self.priority, self.deadline_ns = priority, deadline_ns
        self.landed_ns, self.queued_ns = 1000, 100


def outcomes_of(figures: ExecutionFigures, priority: Priority = Priority.MEDIUM) -> dict[str, int]:
    counts = figures.by_priority[priority].outcomes()
    assert list(counts) == list(OUTCOMES)
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("status", "queued_ns", "outcome"),
    [
        (ErrorStatus.MISSED_DEADLINE_PERSISTENT, 0, "refused"),
        (ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, 0, "refused"),
        (ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT, 0, "refused"),
        (ErrorStatus.MISSED_DEADLINE_TRANSIENT, 0, "aborted"),
        (ErrorStatus.MISSED_DEADLINE_TRANSIENT, 5, "overran"),
        (ErrorStatus.GENERAL_FAILURE, 5, "failed"),
        (ErrorStatus.DEAD_OBJECT, 5, "failed"),
    ],
)
def test_failure_has_one_outcome(status: ErrorStatus, queued_ns: int, outcome: str) -> None:
    figures, job = ExecutionFigures(), Job()
    job.queued_ns = queued_ns
    figures.failed(job, status, is_cancelled=False)
    assert outcomes_of(figures) == {outcome: 1}
    figures.failed(job, status, is_cancelled=True)
    assert outcomes_of(figures) == {outcome: 1, "cancelled": 1}


def test_result_is_on_time_until_its_deadline_and_its_durations_are_those_of_durations() -> None:
    figures = ExecutionFigures()
    for deadline_ns in (None, 1000, 999):
        figures.ended(Job(Priority.HIGH, deadline_ns), Result((), NO_TIMING), 777)
    assert outcomes_of(figures, Priority.HIGH) == {"on_time": 2, "late": 1}
    found, expected = figures.by_priority[Priority.HIGH], Durations()
    for _ in range(3):
        expected.add(777)
    assert (found.whole.counts, found.whole.total_ns) == (expected.counts, expected.total_ns)
    assert found.queue().count == found.immediate == 3 and found.device.count == 0
    figures.ended(Job(Priority.HIGH), Result((), Timing(600, 650)), 777)
    assert (found.device.total_ns, found.transfer.total_ns) == (600, 77)
    waiting = Job(Priority.HIGH)
    waiting.queued_ns = IMMEDIATE_NS
    figures.ended(waiting, Result((), NO_TIMING), 777)
    assert (found.queue().count, found.waits.count, found.immediate) == (5, 1, 4)
    figures.ended(Job(), Result((), NO_TIMING), -1)  # A clock that went back must not end an execution.


def test_number_of_labels_is_bounded() -> None:
    figures = RuntimeFigures(lambda: 0)
    for number in range(MODELS_MAX + 10):
        figures.compilation("npu", f"m{number}")
    assert len(figures.executions) == MODELS_MAX + 1 and (OTHER, OTHER) in figures.executions
    assert figures.compilation("npu", "m1").executions is figures.compilation("npu", "m1").executions
    streams = [figures.stream("m") for _ in range(STREAMS_MAX + 10)]
    assert len(figures.streams) == STREAMS_MAX + 1
    streams[3].is_open = False
    assert figures.stream("m") is streams[3], "the label of a stream that has ended"


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_label_of_a_compilation_that_is_gone_is_freed_when_nothing_was_counted_for_long() -> None:
    clock = Clock()
    figures = RuntimeFigures(clock)
    used, gone = figures.compilation("npu", "used"), figures.compilation("npu", "gone")
    twin = figures.compilation("npu", "gone")
    executions = gone.executions
    del gone
    for _ in range(3):
        clock.now_ns += KEPT_NS
        figures.free_labels(clock())
    assert len(figures.executions) == 2, "a second compilation has the label, too"
    del twin
    figures.free_labels(clock())
    clock.now_ns += KEPT_NS - 1
    executions.ended(Job(), Result((), NO_TIMING), 10)  # One that was under way.
    figures.free_labels(clock())
    clock.now_ns += KEPT_NS - 1
    figures.free_labels(clock())
    assert len(figures.executions) == 2
    clock.now_ns += 1
    figures.free_labels(clock())
    assert list(figures.executions) == [("npu", "used")]
    again = figures.compilation("npu", "gone")
    assert again.executions.count == 0, "a counter that comes back begins at zero"
    assert used.executions is figures.executions[("npu", "used")]


def test_label_of_a_stream_that_has_ended_is_freed_and_one_that_is_open_never() -> None:
    clock = Clock()
    figures = RuntimeFigures(clock)
    first, second = figures.stream("m"), figures.stream("m")
    first.lost("deadline")
    first.is_open = False
    for _ in range(2):
        figures.free_labels(clock())
        clock.now_ns += KEPT_NS
    figures.free_labels(clock())
    assert figures.streams == {"m-1": second}
    assert figures.stream("m") is figures.streams["m-0"] is not first


def test_labels_that_were_freed_are_there_for_others_and_the_last_one_is_kept() -> None:
    clock = Clock()
    figures = RuntimeFigures(clock)
    for number in range(MODELS_MAX + 1):
        figures.compilation("npu", f"m{number}").executions.ended(Job(), Result((), NO_TIMING), 10)
    streams = [figures.stream(f"s{number}") for number in range(STREAMS_MAX + 1)]
    for stream in streams:
        stream.is_open = False
    for _ in range(2):
        figures.free_labels(clock())
        clock.now_ns += KEPT_NS
    late = [figures.compilation("npu", f"n{number}") for number in range(MODELS_MAX)]
    assert {each.model for each in late} == {f"n{number}" for number in range(MODELS_MAX)}
    assert figures.executions[(OTHER, OTHER)].count == 1
    assert figures.stream("t") is figures.streams["t-0"]


def test_counts_never_fall_while_their_label_exists() -> None:
    numbers, clock = random.Random(5), Clock()
    figures, seen, held = RuntimeFigures(clock), dict[Any, int](), list[Any]()
    for _ in range(3000):
        clock.now_ns += numbers.randrange(KEPT_NS)
        action = numbers.randrange(4)
        if action == 0:
            held.append(figures.compilation("npu", f"m{numbers.randrange(100)}"))
        elif action == 1 and held:
            numbers.choice(held).executions.ended(Job(), Result((), NO_TIMING), 10)
        elif action == 2 and held:
            held.pop(numbers.randrange(len(held)))
        else:
            figures.free_labels(clock())
        counts = {key: executions.count for key, executions in figures.executions.items()}
        assert all(counts[key] >= seen[key] for key in counts.keys() & seen.keys())
        assert {(f.executions) for f in held} <= set(figures.executions.values())
        seen = counts
    assert len(seen) <= MODELS_MAX + 1


class Frame(NamedTuple):
    data: Any
    captured_at_ns: Any


class Hostile:
    @property
    def captured_at_ns(self) -> int:
        raise KeyError("captured_at_ns")


@pytest.mark.parametrize(
    "item", [Frame(ONE, None), Frame(ONE, -(2**70)), Frame(ONE, "now"), Hostile(), ONE, None]
)
def test_item_without_a_time_of_capture_has_no_age_wherever_it_is_in_its_stream(item: Any) -> None:
    figures = RuntimeFigures(lambda: 0).stream("m")
    for each in (Frame(ONE, 1), item, Frame(ONE, 2)):
        figures.delivered(each, 10, None)
    assert (figures.age.count, figures.age.total_ns) == (2, 17)
    first = RuntimeFigures(lambda: 0).stream("m")
    for each in (item, Frame(ONE, 1)):
        first.delivered(each, 10, None)
    assert first.age.count == 1


def values_of(text: str, name: str) -> dict[str, float]:
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation="in_process", metrics=":0") as opened:
        yield opened


async def read(runtime: aionn.Runtime, path: str = "/metrics") -> str:
    assert runtime.metrics_url is not None
    url = runtime.metrics_url.replace("/metrics", path)
    with anyio.fail_after(30):
        return await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(url, timeout=20).read().decode())


async def test_executions_and_items_are_counted_once(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(identity())
    for _ in range(3):
        await net.execute([ONE])
    with pytest.raises(aionn.MissedDeadline):
        await net.execute([ONE], deadline=aionn.now_ns() - 1)
    execution = net.execute_fenced([ONE], priority="high", measure=True)
    await execution

    async def frames() -> AsyncIterator[Frame]:
        for _ in range(5):
            yield Frame(ONE, aionn.now_ns() - 2_000_000)

    def write(frame: Frame, view: Any) -> None:
        view[...] = frame.data

    async with net.burst() as burst:
        await burst.execute([ONE])
        stream = burst.stream(frames(), into=write, deadline=lambda frame: aionn.after(60))
        assert len([result async for result in stream]) == 5
        gone = burst.stream(frames(), into=write, deadline=lambda frame: aionn.now_ns() - 1)
        assert [result.status async for result in gone] == ["dropped"] * 5
    text = await read(runtime)
    executions = values_of(text, "aionn_executions_total")
    counted = {
        tuple(re.findall(r'"(.*?)"', labels)[2:]): count for labels, count in executions.items() if count
    }
    assert counted[("medium", "on_time")] == 9 and counted[("high", "on_time")] == 1
    assert counted[("medium", "refused")] + counted.get(("medium", "aborted"), 0) >= 1
    (durations,) = [v for k, v in values_of(text, "aionn_execution_seconds_count").items() if "medium" in k]
    assert durations == 9
    assert values_of(text, "aionn_device_seconds_count"), "one execution was measured"
    ages = values_of(text, "aionn_frame_age_seconds_count")
    assert sum(ages.values()) == sum(values_of(text, "aionn_slack_seconds_count").values()) == 5
    assert sum(values_of(text, "aionn_frame_age_seconds_sum").values()) >= 5 * 0.002
    dropped = values_of(text, "aionn_frames_dropped_total")
    assert sum(count for labels, count in dropped.items() if "deadline" in labels) == 5
    assert values_of(text, "aionn_device_up") == {'device="reference"': 1}
    assert values_of(text, "aionn_queue_length") == {'device="reference"': 0}
    assert await read(runtime, "/ready") == "ready\n"


async def test_wait_for_a_slot_of_a_burst_is_a_part_of_the_execution(runtime: aionn.Runtime) -> None:
    async def source() -> AsyncIterator[np.ndarray[Any, Any]]:
        yield ONE

    net, results = await runtime.compile(identity()), list[Any]()
    async with net.burst(slots=1) as burst, anyio.create_task_group() as waiting:

        async def wait() -> None:
            results.append(await burst.execute([ONE]))

        async with burst.stream(source()) as stream:
            await anext(stream)  # It keeps the only slot.
            with pytest.raises(aionn.MissedDeadline):
                await burst.execute([ONE], deadline=aionn.after(0.02))
            with pytest.raises(aionn.MissedDeadline):
                await burst.execute([ONE], deadline=aionn.now_ns() - 1)
            async with anyio.create_task_group() as cancelled:
                cancelled.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                cancelled.cancel_scope.cancel()
            waiting.start_soon(wait)
            await anyio.sleep(0.02)
    (result,) = results
    assert result.total_ns >= result.queued_ns >= 10_000_000
    counted = values_of(await read(runtime), "aionn_executions_total")
    outcomes = {re.findall(r'"(.*?)"', labels)[-1]: count for labels, count in counted.items() if count}
    assert outcomes == {"on_time": 2, "aborted": 1, "refused": 1, "cancelled": 1}


async def test_executions_and_streams_after_a_replacement_have_the_label_of_the_new_model(
    runtime: aionn.Runtime, repository: Path, tmp_path: Path
) -> None:
    window = np.zeros((1, 49, 40, 1), np.float32)
    for name in ("old", "new"):
        shutil.copy(repository / "examples" / "data" / "digits_float.tflite", tmp_path / f"{name}.tflite")

    async def source() -> AsyncIterator[np.ndarray[Any, Any]]:
        yield window

    net = await runtime.compile(tmp_path / "old.tflite")
    async with net.burst() as burst:
        for number in range(2):
            async for _ in burst.stream(source(), deadline=lambda _: aionn.after(60)):
                pass
            if number == 0:
                await net.replace(tmp_path / "new.tflite")
    text = await read(runtime)
    assert values_of(text, "aionn_slack_seconds_count") == {'stream="old-0"': 1, 'stream="new-0"': 1}
    executions = values_of(text, "aionn_execution_seconds_count")
    assert sorted(re.findall(r'model="(.*?)"', " ".join(executions))) == ["new", "old"]


async def test_every_sample_has_a_family_and_closing_ends_the_server() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process", metrics=":0") as runtime:
        url = runtime.metrics_url
        assert url is not None
        figures = RuntimeFigures(lambda: 0)
        figures.compilation("a", "b").executions.ended(Job(), Result((), Timing(1, 1)), 10)
        stream = figures.stream("b")
        stream.delivered(Frame(ONE, 0), 10, 20)
        names = {sample.name for sample in samples(figures, runtime.devices)}
    assert names <= set(FAMILIES) and len(names) >= 9
    assert runtime.metrics_url is None
    with pytest.raises(OSError):
        await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(url, timeout=5))


def test_documentation_names_every_metric(repository: Path) -> None:
    text = (repository / "docs" / "production" / "operating.md").read_text()
    assert set(re.findall(r"`(aionn_[a-z_]+)`", text)) == FAMILIES.keys() | HOST_FAMILIES.keys()


async def test_wrong_place_is_refused_when_the_runtime_is_made() -> None:
    with pytest.raises(aionn.InvalidArgument, match="metrics: expected HOST:PORT"):
        aionn.open(metrics="example.com:80")

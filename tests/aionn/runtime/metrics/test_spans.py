"""Executions as spans of OpenTelemetry: their parts, the trace that they belong to, and no cost without them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import aionn
import aionn.blocking
from aionn.testing import SimulatedDevice, VirtualClock, run
from aionn.testing.models import identity

trace = pytest.importorskip("opentelemetry.trace", reason="opentelemetry-sdk is not installed")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
exporting = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

ONE = np.ones(1, np.float32)
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Made:
    """A provider that keeps its spans."""

    def __init__(self) -> None:
        self._kept = in_memory.InMemorySpanExporter()
        self.provider = sdk.TracerProvider()
        self.provider.add_span_processor(exporting.SimpleSpanProcessor(self._kept))

    def take(self) -> dict[str, list[Any]]:
        """The spans that ended since the last call, by name."""
        found: dict[str, list[Any]] = {}
        for span in self._kept.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        self._kept.clear()
        return found


@pytest.fixture
def made() -> Iterator[Made]:
    found = Made()
    yield found
    found.provider.shutdown()


@pytest.fixture
async def net(made: Made) -> AsyncIterator[aionn.Compilation]:
    async with aionn.open(drivers=["reference"], isolation="in_process", spans=made.provider) as runtime:
        yield await runtime.compile(identity())


async def test_parts_of_an_execution_follow_each_other_within_it(made: Made, net: aionn.Compilation) -> None:
    result = await net.execute([ONE], measure=True)
    spans = made.take()
    ((whole,), (queue,), (transfer,), (device,)) = (
        spans[name] for name in ("aionn.execution", "queue", "transfer", "device")
    )
    assert whole.start_time == queue.start_time <= queue.end_time == transfer.start_time
    assert transfer.start_time <= device.start_time <= device.end_time <= transfer.end_time == whole.end_time
    assert queue.end_time - queue.start_time == result.queued_ns
    assert whole.end_time - whole.start_time == result.total_ns
    assert queue.parent.span_id == transfer.parent.span_id == whole.context.span_id
    assert device.parent.span_id == transfer.context.span_id
    assert whole.attributes["aionn.device"] == "reference" and whole.attributes["aionn.model"]


async def test_execution_belongs_to_the_trace_of_its_caller(made: Made, net: aionn.Compilation) -> None:
    with aionn.trace_context(HEADER, "vendor=a"):
        await net.execute([ONE])
        fenced = net.execute_fenced([ONE])
    await fenced
    await net.execute([ONE])
    first, second, third = made.take()["aionn.execution"]
    for span in (first, second):
        assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
        assert span.context.trace_state.get("vendor") == "a"
    assert third.parent is None and third.context.trace_id != TRACE


async def test_every_frame_of_a_stream_belongs_to_the_trace_of_its_consumer(
    made: Made, net: aionn.Compilation
) -> None:
    async def source() -> AsyncIterator[Any]:
        for _ in range(4):
            yield ONE

    with aionn.trace_context(HEADER):
        async with net.burst() as burst:
            assert len([result async for result in burst.stream(source())]) == 4
    assert {span.context.trace_id for span in made.take()["aionn.execution"]} == {TRACE}


async def test_span_of_the_application_is_the_parent_where_it_is_nearer(
    made: Made, net: aionn.Compilation
) -> None:
    with aionn.trace_context(HEADER), made.provider.get_tracer("test").start_as_current_span("mine") as mine:
        await net.execute([ONE])
    (span,) = made.take()["aionn.execution"]
    assert span.parent.span_id == mine.get_span_context().span_id and span.context.trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00",
        HEADER[:-1],
        HEADER.upper(),
        f"ff{HEADER[2:]}",
        f"{HEADER}-more",
        f"00-{0:032x}-{PARENT:016x}-01",
        f"00-{TRACE:032x}-{0:016x}-01",
        "9" * 100_000,
        "\udcff",
    ],
)
async def test_header_that_is_not_valid_is_ignored(
    made: Made, net: aionn.Compilation, header: str | None
) -> None:
    with aionn.trace_context(header, "vendor=a"):
        await net.execute([ONE])
    (span,) = made.take()["aionn.execution"]
    assert span.parent is None


async def test_caller_that_does_not_record_gets_no_spans(made: Made, net: aionn.Compilation) -> None:
    with aionn.trace_context(f"{HEADER[:-1]}0"):
        await net.execute([ONE], measure=True)
    assert made.take() == {}


async def test_failure_is_a_span_with_its_status_and_without_parts(
    made: Made, net: aionn.Compilation
) -> None:
    with pytest.raises(aionn.MissedDeadline):
        await net.execute([ONE], deadline=aionn.now_ns() - 1)
    spans = made.take()
    assert list(spans) == ["aionn.execution"]
    assert spans["aionn.execution"][0].status.status_code is trace.StatusCode.ERROR
    assert "MISSED_DEADLINE" in spans["aionn.execution"][0].status.description


async def test_listeners_and_spans_both_get_an_execution(made: Made) -> None:
    reports: list[Any] = []
    async with aionn.open(
        drivers=["reference"], isolation="in_process", spans=made.provider, telemetry=[reports.append]
    ) as runtime:
        await (await runtime.compile(identity())).execute([ONE])
    assert [report.kind for report in reports] == ["compilation", "execution"]
    assert len(made.take()["aionn.execution"]) == 1


def test_trace_of_a_thread_reaches_its_executions(made: Made) -> None:
    with aionn.blocking.open(drivers=["reference"], isolation="in_process", spans=made.provider) as runtime:
        net = runtime.compile(identity())
        with aionn.trace_context(HEADER):
            net.execute([ONE])
    (span,) = made.take()["aionn.execution"]
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)


async def events_of(burst: aionn.Burst) -> Counter[str]:
    """The interpreter's events in the loop's thread during one execution, by file."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        found[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        await burst.execute([ONE])
    finally:
        sys.setprofile(None)
    return found


def test_frame_without_spans_has_no_event_more() -> None:
    """In virtual time, where the loop wakes equally often for each frame."""
    plain, traced = list[Counter[str]](), list[Counter[str]]()

    async def main() -> None:
        async with (
            aionn.open(devices=[SimulatedDevice("npu", run_time_s=0.004, results="zeros")]) as runtime,
            (await runtime.compile(identity())).burst() as burst,
        ):
            for _ in range(5):
                plain.append(await events_of(burst))
            with aionn.trace_context(HEADER):
                for _ in range(5):
                    traced.append(await events_of(burst))

    run(main, clock=VirtualClock())
    assert traced[-1] == plain[-1] == plain[-2]
    assert any(file.endswith("executions/opened_plan.py") for file in plain[-1])
    assert not [file for file in traced[-1] if file.endswith("metrics/spans.py") or "opentelemetry" in file]


@pytest.mark.parametrize("spans", [1, "yes", object()])
def test_other_values_are_refused(spans: Any) -> None:
    with pytest.raises(aionn.InvalidArgument, match="spans: expected True or a TracerProvider"):
        aionn.open(drivers=["reference"], spans=spans)


@pytest.mark.parametrize("arguments", [(b"00",), (HEADER, 1)])
def test_headers_that_are_not_text_are_refused(arguments: tuple[Any, ...]) -> None:
    with (
        pytest.raises(aionn.InvalidArgument, match="expected the text of the header"),
        aionn.trace_context(*arguments),
    ):
        pass


def test_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(aionn.DeviceUnavailable, match=r"pip install 'aionn\[otel\]'"):
        aionn.open(drivers=["reference"], spans=True)
    with aionn.trace_context(HEADER):
        pass

"""Traces: one timeline over all processes, opened by viewers, added up by layer; nothing while nobody asks."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.cli.main import main
from aionn.observability.tracing import TRACE_VARIABLE, is_tracing, section, start_tracing, stop_tracing
from aionn.runtime import traces
from aionn.runtime.traces import end_trace, read_trace, summarize, summarize_applications

pytestmark = pytest.mark.forked("any")

Values = npt.NDArray[np.float32]


def names(path: Path) -> set[str]:
    return {event.name for event in read_trace(path)}


@pytest.mark.parametrize("isolation", ["process", "in_process"])
async def test_trace_has_every_layer_on_one_timeline(
    tmp_path: Path, digits: Path, silence: Values, isolation: str
) -> None:
    path = tmp_path / "trace.json"
    async with aionn.open(drivers=["reference"], isolation=isolation, trace=path) as runtime:
        net = await runtime.compile(digits)
        for _ in range(3):
            await net.execute([silence])
        async with net.burst() as burst:
            await burst.execute([silence])
    assert not is_tracing()
    events = msgspec.json.decode(path.read_bytes())  # one whole JSON array
    assert {"name", "ph", "ts", "dur", "pid", "tid"} <= set(events[-1])
    marks = {e["name"].partition("]")[0] + "]" for e in events if e["ph"] == "X"}
    assert marks == {
        f"[NN_{m}]"
        for m in [
            "LR_PI",
            "LR_PP",
            "LR_PC",
            "LI_PC",
            "LD_PC",
            "LR_PE",
            "LR_PIO",
            "LI_PE",
            "LD_PE",
            "LC_PCO",
            "LR_PR",
            "LR_PT",
        ]
    }
    assert len({e["pid"] for e in events}) == (2 if isolation == "process" else 1)
    client = [e for e in events if e["name"].startswith("[NN_LI_PE]")]
    server = [e for e in events if e["name"].startswith("[NN_LD_PE]")]
    assert len(client) == len(server) == 4
    for outer, inner in zip(client, sorted(server, key=lambda e: e["ts"]), strict=True):
        assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


async def test_sections_of_overlapping_tasks_have_lanes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    start_tracing(path, process="test")
    gates = [anyio.Event() for _ in range(3)]

    async def work(index: int) -> None:
        with section("LR_PE", str(index)):
            await gates[index].wait()
            with section("LR_PR", str(index)):
                pass

    async with anyio.create_task_group() as tasks:
        for index in range(3):
            tasks.start_soon(work, index)
        await anyio.lowlevel.checkpoint()
        for gate in gates:
            await anyio.lowlevel.checkpoint()
            gate.set()
    with section("LR_PT"):
        pass
    end_trace(path)
    events = [e for e in read_trace(path) if e.ph == "X"]
    lanes = [[e for e in events if e.tid == lane] for lane in sorted({e.tid for e in events})]
    assert len(lanes) == 3  # the last section took a lane that was free again
    for lane in lanes:
        ordered = sorted(lane, key=lambda e: (e.ts, -e.dur))
        for a, b in itertools.pairwise(ordered):
            assert b.ts >= a.ts + a.dur or b.ts + b.dur <= a.ts + a.dur, "sections of a lane nest"
    assert summarize(events).executions == 3


def event(mark: str, start_ms: float, end_ms: float, pid: int = 1, tid: int = 1) -> str:
    took = (end_ms - start_ms) * 1000
    return f'{{"name":"[NN_{mark}]x","ph":"X","ts":{start_ms * 1000},"dur":{took},"pid":{pid},"tid":{tid}}}'


def test_time_is_the_layers_own(tmp_path: Path) -> None:
    """Runtime 10 ms, of which 1 + 1 are copies and 6 a call, of which the driver works 4, of which the CPU executor 3."""
    path = tmp_path / "trace.json"
    lines = [
        event("LR_PE", 0, 10),
        event("LR_PIO", 0, 1),
        event("LI_PE", 2, 8),
        event("LR_PR", 8, 9),
        event("LD_PE", 3, 7, pid=2),
        event("LC_PCO", 3, 6, pid=2),
        '{"name":"foreign","ph":"X","ts":0,"dur":99,"pid":1,"tid":1}',
    ]
    path.write_text("[" + ",\n".join(lines) + "]")
    found = summarize(read_trace(path))
    assert (found.executions, found.processes, found.wall_ms) == (1, 2, 10)
    compute = {layer: cells["Compute"] for layer, cells in found.rows.items()}
    assert compute == {"Runtime": 2, "IPC": 2, "Driver": 1, "CPU": 3, "Total": 8}
    assert found.rows["Runtime"]["I/O"] == found.rows["Runtime"]["Results"] == 1
    assert found.rows["Total"]["Ex. total"] == found.rows["Total"]["Total"] == 10
    assert found.rows["Runtime"]["Compilation"] is None


def test_each_part_of_the_application_has_its_table(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    lines = [
        event("LA_PO", 0, 10),
        event("LA_PP", 0, 1),
        event("LR_PE", 2, 6),
        event("LI_PE", 3, 5),
        event("LD_PE", 3, 4, pid=2),
        event("LA_PO", 20, 30),
        event("LR_PE", 21, 22),
        event("LR_PE", 23, 24),
        event("LR_PC", 40, 41),
    ]
    path.write_text("[" + ",\n".join(lines) + "]")
    events = read_trace(path)
    first, second = summarize_applications(events)
    assert (first.application, first.executions, second.executions) == ("x", 1, 2)
    assert first.rows["Application"]["Total"] == 6 and first.rows["Application"]["Preparation"] == 1
    assert first.rows["Runtime"]["Compute"] == 2 and first.rows["IPC"]["Compute"] == 1
    assert second.rows["Runtime"]["Total"] == 2 and "Driver" not in second.rows
    assert summarize(events).rows["Runtime"]["Compilation"] == 1
    total = summarize_applications(events, total_times=True)[0].rows
    assert total["Application"]["Total"] == 11 and total["Runtime"]["Compute"] == 4
    assert total["IPC"]["Compute"] == 2 and total["Driver"]["Compute"] == 1


async def test_application_marks_its_own_parts(tmp_path: Path, digits: Path, silence: Values) -> None:
    path = tmp_path / "trace.json"
    async with aionn.open(drivers=["reference"], trace=path) as runtime:
        net = await runtime.compile(digits)
        with aionn.section("LA_PO", "warm"):
            await net.execute([silence])
        with aionn.section("LA_PO", "measured"):
            for _ in range(3):
                await net.execute([silence])
    found = summarize_applications(read_trace(path))
    assert [(s.application, s.executions) for s in found] == [("warm", 1), ("measured", 3)]
    assert all({"Application", "Runtime", "IPC", "Driver", "CPU"} <= set(s.rows) for s in found)


def test_sections_inside_of_an_execution_are_no_executions(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        "[" + event("LR_PE", 0, 9) + "," + event("LR_PE", 1, 2) + "," + event("LR_PE", 10, 11) + "]"
    )
    found = summarize(read_trace(path))
    assert found.executions == 2 and found.rows["Runtime"]["Compute"] == 10


def test_cut_off_trace_is_added_up_without_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        "[\n" + event("LR_PE", 0, 1) + ",\n" + event("LR_PE", 1, 2) + ",\n" + event("LR_PE", 2, 3)[:20]
    )
    assert summarize(read_trace(path)).executions == 2


@contextlib.contextmanager
def full_disk(path: Path, room: int) -> Iterator[None]:
    """Files can grow by no more than ``room`` bytes beyond the size of one of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("has_room_again", [True, False])
def test_trace_on_a_full_disk_is_whole(has_room_again: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    start_tracing(path, process="test")
    with section("LR_PE", "before"):
        pass
    with full_disk(path, 30):
        for _ in range(3):
            with section("LR_PE", "cut"):
                pass
        assert not path.read_bytes().endswith(b",\n"), "a line was cut off"
        if not has_room_again:
            end_trace(path)
    if has_room_again:
        with section("LR_PE", "after"):
            pass
        end_trace(path)
    found = [e["name"] for e in msgspec.json.decode(path.read_bytes()) if e["ph"] == "X"]
    assert found == [
        f"[NN_LR_PE]{name}" for name in ("before", *(("cut", "after") if has_room_again else ()))
    ]


def test_lines_between_parts_of_others_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    whole = event("LR_PE", 0, 1)
    path.write_text(f"[\n{whole},\n{whole[:20]}{whole},\n{whole},\n{whole}\n]\n")
    assert len(read_trace(path)) == 3


def test_forked_child_does_not_trace_to_the_file_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = """
import os, sys
from aionn.observability.tracing import is_tracing, section
from aionn.runtime.traces import begin_trace
begin_trace(None)
with section("LR_PE", "parent"):
    child = os.fork()
    if child == 0:
        begin_trace(None)
        with section("LR_PE", "child"):
            sys.exit(int(is_tracing()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    environment = {**os.environ, TRACE_VARIABLE: str(path), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    found = [e["name"] for e in msgspec.json.decode(path.read_bytes()) if e["ph"] == "X"]
    assert found == ["[NN_LR_PE]parent"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"no trace",
        b"[1, 2]",
        b'[{"name": 5, "ph": "X"}]',
        b'[{"name": "x", "ph": "X", "deep": ' + b"[" * 5000 + b"}]",
    ],
    ids=["empty", "no array", "no JSON", "numbers", "wrong type", "deep"],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(aionn.InvalidArgument, match="expected a JSON array"):
        read_trace(path)


async def test_process_traces_to_one_file_at_a_time(tmp_path: Path) -> None:
    async with aionn.open(drivers=["reference"], trace=tmp_path / "a") as _:
        with pytest.raises(aionn.InvalidArgument, match="this process traces to"):
            await aionn.open(drivers=["reference"], trace=tmp_path / "b").__aenter__()
    assert not is_tracing()


async def test_unwritable_trace_is_refused_when_opening(tmp_path: Path) -> None:
    with pytest.raises(aionn.InvalidArgument, match="cannot be written"):
        await aionn.open(drivers=["reference"], trace=tmp_path / "no" / "trace").__aenter__()
    assert not is_tracing()


def test_section_is_nothing_while_nobody_traces() -> None:
    stop_tracing()
    assert section("LR_PE") is section("LD_PE", "other")


def test_variable_traces_a_whole_process(tmp_path: Path, digits: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import asyncio, sys, numpy as np, aionn\n"
        "async def main():\n"
        "    for _ in range(2):\n"
        "        async with aionn.open(drivers=['reference']) as runtime:\n"
        "            net = await runtime.compile(sys.argv[1])\n"
        "            await net.execute([np.zeros((1, 49, 40, 1), np.float32)])\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, TRACE_VARIABLE: str(path), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", program, str(digits)], env=environment, check=True, timeout=60)
    msgspec.json.decode(path.read_bytes())  # finished
    found = summarize(read_trace(path))
    assert (found.executions, found.processes) == (2, 3)


def test_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[" + event("LR_PE", 0, 4) + "," + event("LR_PE", 4, 6) + "]")
    with pytest.raises(SystemExit) as ended:
        main(["trace", "summary", str(path), "--per-execution"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "2 executions" in printed and "3.000" in printed and "n/a" in printed
    with pytest.raises(SystemExit):
        main(["trace", "summary", str(path), "--json"])
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["rows"]["Runtime"]["Compute"] == 6.0 and told["applications"] == []
    path.write_text("[" + event("LA_PO", 0, 9) + "," + event("LR_PE", 4, 6) + "]")
    with pytest.raises(SystemExit):
        main(["trace", "summary", str(path), "--total-times"])
    printed = capsys.readouterr().out
    assert "x: 1 execution, 1 process, " in printed and "9.000" in printed and "2.000" in printed


def test_part_of_the_application_has_what_starts_with_it_and_not_what_starts_when_it_ends(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    lines = [event("LA_PO", 0, 10), event("LR_PE", 0, 4), event("LR_PE", 10, 14), event("LA_PO", 10, 20)]
    path.write_text("[" + ",\n".join(lines) + "]")
    assert [found.executions for found in summarize_applications(read_trace(path))] == [1, 1]


def test_trace_of_the_largest_number_of_events_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "EVENTS_MAX", 2)
    path = tmp_path / "trace.json"
    lines = [event("LR_PE", index, index + 1) for index in range(3)]
    path.write_text("[" + ",".join(lines[:2]) + "]")
    assert len(read_trace(path)) == 2
    path.write_text("[" + ",".join(lines) + "]")
    with pytest.raises(aionn.InvalidArgument, match="expected at most 2 events, got 3"):
        read_trace(path)

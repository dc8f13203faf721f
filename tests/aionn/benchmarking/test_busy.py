"""`benchmarks.busy`: its loads go on by themselves, end with it, and its rows come as soon as they are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.busy import __main__ as busy
from benchmarks.busy import loads
from benchmarks.rows import Options, Report, Row

WATCHDOG_S = 30.0
"""Longest wait of a test for a process on a busy machine."""

COUNTING = """
import os, signal, sys
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
if os.path.getsize(sys.argv[1]) > int(sys.argv[2]):
    sys.exit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Notes its start; is killed as by the kernel until the notes are long enough, then ends by itself."""

STAYING = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(60)
"""


def eventually(found: object) -> None:
    end = time.monotonic() + WATCHDOG_S
    while not found():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.005)


def starts(notes: Path) -> list[int]:
    return [int(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def has_ended(pid: int) -> bool:
    """Whether a process runs no longer; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_load_that_the_kernel_killed_is_started_again(tmp_path: Path) -> None:
    notes = tmp_path / "starts"
    command = [sys.executable, "-S", "-c", loads.KEEPING, COUNTING, str(notes), "20"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert len(starts(notes)) >= 3
    assert ended.returncode == 1 and "ended with status 3" in ended.stderr


def test_load_is_started_again_beside_a_measurement_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "starts"
    monkeypatch.setattr(loads, "RECLAIMING", STAYING)
    kept = loads._python(loads.KEEPING, STAYING, str(notes))
    monkeypatch.setitem(loads.LOADS, "reclaim", lambda folder: [kept])
    with loads.beside("reclaim") as check:
        for count in (1, 2):
            eventually(lambda count=count: len(starts(notes)) == count)
            check()
            os.kill(starts(notes)[-1], signal.SIGKILL)
        eventually(lambda: len(starts(notes)) == 3)
        check()
    eventually(lambda: has_ended(starts(notes)[-1]))


def test_program_of_a_load_ends_when_its_keeper_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "starts"
    keeper = subprocess.Popen([sys.executable, "-S", "-c", loads.KEEPING, STAYING, str(notes)])
    eventually(lambda: len(starts(notes)) == 1)
    keeper.kill()
    keeper.wait()
    eventually(lambda: has_ended(starts(notes)[0]))


def test_load_that_ends_by_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loads.LOADS, "reclaim", lambda folder: [loads._python("pass")])
    with loads.beside("reclaim") as check:

        def is_reported() -> bool:
            try:
                check()
            except ChildProcessError as e:
                return "'reclaim' ended by itself" in str(e)
            return False

        eventually(is_reported)


def test_idle_is_always_measured_first() -> None:
    assert busy.chosen_loads([], quick=False) == ["idle", "four busy loops", "stress", "reclaim"]
    assert busy.chosen_loads([], quick=True) == ["idle", "four busy loops", "stress"]
    assert busy.chosen_loads(["reclaim"], quick=True) == ["idle", "reclaim"]
    assert busy.chosen_loads(["stress", "four busy loops", "idle"], quick=False) == [
        "idle",
        "four busy loops",
        "stress",
    ]


def test_rows_of_a_contender_come_before_the_next_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    def run_block(contender: str, seconds: float) -> dict[str, object]:
        events.append(contender)
        return {"frames_ms": [1.0] * 500, "windows_ms": [], "low_count": 0}

    class Noting(Report):
        def add(self, *rows: Row) -> None:
            events.extend(f"row of {row.name.split(', ')[0]}" for row in rows[:1])
            super().add(*rows)

    monkeypatch.setattr(busy, "STREAMS", ("aionn", "aionn real time"))
    monkeypatch.setattr(busy, "OPENVINO", ())
    monkeypatch.setattr(busy, "LIMIT", "limit: timer")
    monkeypatch.setattr(busy, "ROUND_TRIPS", ("round trip",))
    monkeypatch.setattr(busy, "permits_real_time", lambda: False)
    monkeypatch.setattr(busy, "run_block", run_block)
    chosen = Options(json=True, quick=True)
    busy.report_loads(Noting(chosen), chosen, ["idle"])
    assert events == [
        "aionn",
        "aionn real time",
        "limit: timer",
        "round trip",
        "round trip",
        "row of idle: round trip",
        "limit: timer",
        "row of idle: limit: timer",
        "aionn real time",
        "row of idle: aionn real time",
        "aionn",
        "row of idle: aionn",
    ]
    assert '"name": "idle: aionn, on time"' in capsys.readouterr().out

"""What a driver process writes to its standard error: logged within limits, and what exceeds them is counted."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time

import anyio
import anyio.lowlevel
import pytest

from aionn.service.client.standard_error import (
    BYTES_BURST,
    LINE_BYTES_MAX,
    LINES_BURST,
    LINES_PER_S,
    LINES_PER_STEP,
    REPORT_S,
    StandardError,
)
from aionn.service.client.supervisor import STDERR_BYTES_AT_ONCE, STDERR_PAUSE_S, DriverProcess

NAME = "aionn.driver.noisy"


@pytest.fixture
def noisy(caplog: pytest.LogCaptureFixture) -> StandardError:
    caplog.set_level(logging.INFO, logger="aionn.driver")
    return StandardError("noisy", 7, now_s=0.0)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == NAME]


def take(error: StandardError, chunk: bytes, now_s: float = 0.0) -> int:
    """How many steps it took."""
    return sum(1 for _ in error.take(chunk, now_s))


def test_lines_come_in_pieces_and_are_whole(noisy: StandardError, caplog: pytest.LogCaptureFixture) -> None:
    for chunk in (b"one\ntw", b"o", b"\n\nthree", b""):
        take(noisy, chunk)
    assert said(caplog) == ["one", "two", "three"]


def test_lines_beyond_the_burst_are_counted_and_the_number_is_reported(
    noisy: StandardError, caplog: pytest.LogCaptureFixture
) -> None:
    take(noisy, b"x\n" * (LINES_BURST + 100))
    take(noisy, b"x\n" * 50)
    take(noisy, b"")
    lines = said(caplog)
    assert lines.count("x") == LINES_BURST
    reports = [line for line in lines if "suppressed" in line]
    assert "100 lines (200 bytes)" in reports[0] and "50 lines (100 bytes)" in reports[1]
    assert noisy.is_over_limit


def test_limit_is_over_when_time_passes(noisy: StandardError, caplog: pytest.LogCaptureFixture) -> None:
    take(noisy, b"x\n" * (LINES_BURST + 1))
    assert noisy.is_over_limit
    take(noisy, b"y\n" * 2 * LINES_PER_S, now_s=1.0)
    assert said(caplog).count("y") == LINES_PER_S


def test_nothing_is_reported_where_nothing_was_suppressed(
    noisy: StandardError, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(3):
        take(noisy, b"x\n", now_s=turn * 2 * REPORT_S)
    take(noisy, b"", now_s=7 * REPORT_S)
    assert said(caplog) == ["x"] * 3


@pytest.mark.parametrize(
    ("lines", "reports"),
    [(40, 2), *(pytest.param(n, 10, marks=pytest.mark.long) for n in (200, 1_000, 8_000, 32_000))],
)
def test_flood_is_reported_once_in_a_while(
    noisy: StandardError, caplog: pytest.LogCaptureFixture, lines: int, reports: int
) -> None:
    for turn in range(100 * reports):
        take(noisy, b"x\n" * lines, now_s=turn * REPORT_S / 100)
    found = sum("suppressed" in line for line in said(caplog))
    assert reports - 1 <= found <= reports + 1
    assert len(said(caplog)) <= LINES_BURST + LINES_PER_S * reports * REPORT_S + found


def test_beginning_of_an_endless_line_is_logged_and_the_next_line_is_whole(
    noisy: StandardError, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        take(noisy, b"z" * 8192)
    take(noisy, b"end\nnext\n")
    take(noisy, b"")
    lines = said(caplog)
    assert lines[0] == "z" * LINE_BYTES_MAX
    assert [line for line in lines[1:] if "suppressed" not in line] == ["next"]
    assert sum(len(line) for line in lines) < 3 * LINE_BYTES_MAX


def test_long_lines_are_bounded_in_bytes(noisy: StandardError, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(1000):
        take(noisy, (b"w" * 4000 + b"\n") * 4)
    assert sum(len(line) for line in said(caplog)) < BYTES_BURST + 2 * LINE_BYTES_MAX


def test_work_for_a_chunk_comes_in_steps(noisy: StandardError) -> None:
    assert take(noisy, b"x\n" * 1000) >= 1000 // LINES_PER_STEP


def test_empty_lines_count_and_are_not_logged(noisy: StandardError, caplog: pytest.LogCaptureFixture) -> None:
    take(noisy, b"\n  \n" * LINES_BURST)
    assert noisy.is_over_limit
    assert take(noisy, b"\n" * (1 << 16)) == 1
    assert [line for line in said(caplog) if "suppressed" not in line] == []


def test_lines_under_a_tag_are_limited_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="aionn.driver")
    error = StandardError("noisy", 7, now_s=0.0)
    take(error, b"aionn-log aionn.driver: said\n" * 3 * LINES_BURST)
    assert sum(record.getMessage().startswith("said") for record in caplog.records) == LINES_BURST


@pytest.mark.sampled(3)
@pytest.mark.parametrize("written", ["x", "\\n", "x\\n" * 500], ids=["bytes", "empty lines", "lines"])
async def test_standard_error_is_read_a_thousand_times_in_a_second_at_most(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os, time\nend = time.monotonic() + 0.5\nwhile time.monotonic() < end: os.write(2, b'{written}')"
    reads = 0
    read = os.read

    def counted(fd: int, count: int) -> bytes:
        nonlocal reads
        reads += count == STDERR_BYTES_AT_ONCE
        return read(fd, count)

    monkeypatch.setattr(os, "read", counted)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        driver = DriverProcess(process, one, "noisy")
        began_s = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.log_output)
            with anyio.fail_after(60):
                await driver.wait()
            took_s = time.monotonic() - began_s
            await driver.aclose()
    assert 1 < reads <= took_s / STDERR_PAUSE_S + 10


async def test_last_words_leave_others_their_turns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aionn.driver")
    code = "import os\nos.write(2, b'x\\n' * 1000)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        driver = DriverProcess(process, one, "noisy")
        with anyio.fail_after(60):
            await driver.wait()
            turns = 0
            async with anyio.create_task_group() as tasks:

                async def turn() -> None:
                    nonlocal turns
                    while True:
                        await anyio.lowlevel.checkpoint()
                        turns += len(said(caplog)) not in (0, 1000)

                tasks.start_soon(turn)
                await driver.aclose()
                tasks.cancel_scope.cancel()
    assert said(caplog) == ["x"] * 1000 and turns > 10


async def test_process_that_floods_its_standard_error_is_neither_blocked_nor_logged_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="aionn.driver")
    total = 4 << 20
    code = (
        f"import os\nfor _ in range({total // 8192}): os.write(2, b'x' * 63 + b'\\n' + b'y' * 8127 + b'\\n')"
    )
    ours, theirs = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs)
    os.close(theirs)
    process.stderr = os.fdopen(ours, "rb")
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    driver = DriverProcess(process, one, "noisy")
    turns = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.log_output)
        begin = time.monotonic()
        with anyio.fail_after(60):
            while process.poll() is None:
                await anyio.lowlevel.checkpoint()
                turns += 1
        assert process.returncode == 0, time.monotonic() - begin
        await driver.aclose()
    one.close()
    other.close()
    logged = sum(len(line) for line in said(caplog))
    assert 0 < logged < 2 * BYTES_BURST and any("suppressed" in line for line in said(caplog))
    assert turns > total >> 16  # The loop had its turns between one pipe's content and the next.

"""``aionn serve --watch``: the executions of all clients by priority, and the row of the device."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.cli.commands.serve import serve
from aionn.cli.serving.served import ServedFigures
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import DeadObject, InvalidArgument, MissedDeadline
from aionn.hal import Priority
from aionn.runtime.clock import now_ns
from aionn.watch import Collector

THREADS, EXECUTIONS = 4, 500


def test_executions_are_counted_by_priority_and_outcome() -> None:
    collector = Collector("served")
    figures = ServedFigures(ReferenceDevice(), collector)
    assert collector.snapshot().streams == ()
    with figures.executing(Priority.HIGH, None):
        pass
    with figures.executing(Priority.HIGH, now_ns() - 1):
        pass
    for error in (MissedDeadline("late", transient=False), MissedDeadline("late", transient=True)):
        with pytest.raises(MissedDeadline), figures.executing(Priority.LOW, None):
            raise error
    with pytest.raises(DeadObject), figures.executing(Priority.LOW, None):
        raise DeadObject("gone")
    high, low = collector.snapshot().streams
    assert (high.name, high.on_time, high.late, high.dropped) == ("high priority", 1, 1, 0)
    assert (low.name, low.dropped, low.lost) == ("low priority", 2, 1)
    assert high.latency.p50 is not None and low.latency.p50 is None


def test_row_of_the_device_has_its_clients_and_its_queue() -> None:
    collector = Collector("served")
    device = ReferenceDevice()
    figures = ServedFigures(device, collector)
    figures.clients = 3
    with pytest.raises(MissedDeadline), figures.executing(Priority.MEDIUM, None):
        raise MissedDeadline("no room", transient=False)
    (row,) = collector.snapshot().devices
    assert (row.name, row.clients, row.slots) == (device.info.name, 3, device.info.slots)
    assert (row.started, row.rejected, row.waiting) == (0, 1, 0)


def test_threads_of_bursts_lose_no_count_while_the_page_reads() -> None:
    collector = Collector("served")
    figures = ServedFigures(ReferenceDevice(), collector)

    def execute() -> None:
        for _ in range(EXECUTIONS):
            with figures.executing(Priority.MEDIUM, None):
                pass

    threads = [threading.Thread(target=execute) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collector.snapshot()
    (stream,) = collector.snapshot().streams
    assert stream.on_time == THREADS * EXECUTIONS
    assert sum(second.on_time for second in stream.seconds) == THREADS * EXECUTIONS


def test_page_whose_address_would_not_be_printed_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="either --watch or --quiet"):
        serve("reference", socket=tmp_path / "s", watch=True, quiet=True)
    with pytest.raises(InvalidArgument, match="--watch-at"):
        serve("reference", socket=tmp_path / "s", watch_at="a:b:c")


@pytest.mark.slow
@pytest.mark.forked("any")
async def test_served_device_has_a_page_with_the_executions_of_its_clients(
    tmp_path: Path, example_data: Path
) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")
    pytest.importorskip("websockets", reason="uvicorn and websockets are not installed")
    path = tmp_path / "s.sock"
    command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", str(path), "--watch-at", ":0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None and server.stdout is not None
        try:
            with anyio.fail_after(60):
                line = await anyio.to_thread.run_sync(server.stderr.readline)
                found = re.match(r"watch: (http://127\.0\.0\.1:\d+/)(\?token=\w+)", line)
                assert found is not None, line
                assert "serving" in await anyio.to_thread.run_sync(server.stdout.readline)
                async with aionn.open(drivers=[], sockets=[path]) as runtime:
                    net = await runtime.compile(example_data / "digits_float.tflite")
                    async with net.burst() as burst:
                        for _ in range(3):
                            await burst.execute([np.zeros((1, 49, 40, 1), np.float32)])
                    await net.execute([np.zeros((1, 49, 40, 1), np.float32)])
                    text = await anyio.to_thread.run_sync(_read, f"{found[1]}metrics{found[2]}")
        finally:
            server.terminate()
        assert await anyio.to_thread.run_sync(server.wait) == 0
    counted = re.findall(r'aionn_stream_items_total\{.*outcome="on_time"\} (\d+)', text)
    assert sum(map(int, counted)) == 4
    assert 'aionn_device_executions_total{device="reference",outcome="started"} 4' in text


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return str(answer.read().decode())

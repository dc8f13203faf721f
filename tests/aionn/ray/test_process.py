"""The process of a node, as an actor keeps it: with a small program in place of the command, and with the command."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

import aionn
from aionn.ray.process import NodeProcess
from aionn.ray.settings import NodeSettings
from aionn.testing import models

START_S_MAX = 60.0

SERVE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
port = sys.argv[3].rpartition(":")[2]
with open(sys.argv[-1], "a") as file:
    file.write(port + "\\n")
print(f"serving x at 127.0.0.1:{port if port != '0' else 5555}; Ctrl-C ends it", flush=True)
sys.stdin.read()
"""

FAIL = """
import sys
sys.stderr.write("aionn: there is no driver of this name\\n")
sys.exit(2)
"""


def program(code: str, *more: str) -> Callable[[Sequence[str]], list[str]]:
    return lambda arguments: [sys.executable, "-S", "-c", code, *arguments, *more]


def settings(**more: object) -> NodeSettings:
    return NodeSettings("reference", "edge1", "127.0.0.1", **more)  # type: ignore[arg-type]


@asynccontextmanager
async def running(process: NodeProcess) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(process.run())
    try:
        with anyio.fail_after(START_S_MAX):
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_process_that_dies_is_started_again_on_its_port(tmp_path: Path) -> None:
    ports = tmp_path / "ports"
    process = NodeProcess(settings(), program(SERVE, str(ports)))
    async with running(process):
        assert await process.address() == "127.0.0.1:5555"
        assert process._process is not None
        process._process.kill()
        while process.figures()["starts"] < 2:
            await process._changed.wait()
        assert await process.address() == "127.0.0.1:5555"
        while ports.read_text().split() != ["0", "5555"]:
            await anyio.sleep(0.01)


async def test_a_process_that_cannot_serve_is_reported_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aionn.ray.restarts.FAILURES_MAX", 1)
    monkeypatch.setattr("aionn.ray.restarts.PAUSE_NS_MIN", 1)
    process = NodeProcess(settings(), program(FAIL))
    async with running(process) as task:
        with pytest.raises(
            aionn.DeviceUnavailable,
            match=r"node edge1: failed, and is not started again \(2 starts\): aionn: there is no driver of this name",
        ):
            await process.address()
        await task


async def test_a_program_that_does_not_exist_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("aionn.ray.restarts.FAILURES_MAX", 0)
    process = NodeProcess(settings(), lambda arguments: [str(tmp_path / "missing")])
    async with running(process):
        with pytest.raises(aionn.DeviceUnavailable, match="it cannot be started: No such file"):
            await process.address()


async def test_a_drained_process_ends_in_order_and_is_not_started_again(tmp_path: Path) -> None:
    process = NodeProcess(settings(), program(SERVE, str(tmp_path / "ports")))
    async with running(process) as task:
        await process.address()
        await process.drain()
        await task
        assert process.figures()["state"] == "ended" and process.figures()["starts"] == 1
        with pytest.raises(aionn.DeviceUnavailable, match="node edge1: ended"):
            await process.address()


@pytest.mark.thorough
@pytest.mark.forked("any")
@pytest.mark.parametrize("victim", ["device", pytest.param("keeper", marks=pytest.mark.long)])
async def test_the_command_serves_is_killed_serves_again_and_ends_with_its_keeper(victim: str) -> None:
    process = NodeProcess(settings())
    async with running(process) as task:
        address = await process.address()
        model = models.identity((4,))
        async with aionn.open(drivers=[], fleet=[address]) as runtime:
            assert [device.name for device in runtime.devices] == ["edge1/reference"]
            net = await runtime.compile(model)
            assert process._process is not None
            served = children(process._process.pid)
            assert len(served) == 1
            os.kill(served[0] if victim == "device" else process._process.pid, signal.SIGKILL)
            while process.figures()["starts"] < 2:
                await process._changed.wait()
            assert await process.address() == address
            with pytest.raises(aionn.DeadObject):
                await net.execute([np.ones(4, np.float32)])
            assert await runtime.compile(model)
            served = children(process._process.pid)
        task.cancel()
        await asyncio.wait([task])
        assert not any(Path(f"/proc/{pid}").exists() for pid in served), "they end with the actor"


def children(pid: int) -> list[int]:
    return [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]

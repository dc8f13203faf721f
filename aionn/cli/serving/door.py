"""``aionn serve --oip``: the process that serves models of a device by the Open Inference Protocol."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from aionn.cli.serving.children import ends_with_server
from aionn.errors import DeviceUnavailable, InvalidArgument
from aionn.fleet.addresses import parse_listen
from aionn.observability.access import is_loopback
from aionn.oip.models import find_models
from aionn.oip.settings import DoorSettings, Started, check_packages
from aionn.platform.loops import finish
from aionn.platform.python_process import python_command, python_environment

__all__ = ["DoorProcess", "door_of", "serving_door"]

START_S_MAX = 600.0
"""Limit of the start of the process, which compiles all models: some engines need minutes for a large one."""

END_S_MAX = 2.0
"""Time in which the process ends once it has no work."""

LINE_BYTES_MAX = 65536
"""The line that it writes when it serves, or the reason why it cannot."""


def door_of(
    oip: str | None, rest: int | None, models: Sequence[str], *, any_client: bool, drain_s: float
) -> DoorSettings | None:
    """Checks the options of a door; None without ``--oip``. The path of the device's socket is added later.

    Raises:
        InvalidArgument: They make no sense together, or a model's file does not exist.
        DeviceUnavailable: A package is missing.
    """
    if oip is None:
        if models or rest is not None:
            raise InvalidArgument(f"{'--model' if models else '--oip-rest'} goes with --oip")
        return None
    if not models:
        raise InvalidArgument("--oip: expected --model NAME=FILE, once or more: the models that are served")
    try:
        place = parse_listen(f"127.0.0.1:{oip}" if oip.isdecimal() else oip, "--oip")
    except InvalidArgument:
        raise InvalidArgument(f"--oip: expected PORT or HOST:PORT, got {oip!r}") from None
    # The name would stand for two addresses, of which gRPC takes both.
    host = "127.0.0.1" if place.host == "localhost" else place.host or "0.0.0.0"
    is_remote = not is_loopback(host)
    if is_remote and not any_client:
        raise InvalidArgument(
            f"--oip {oip}: other machines reach this address, and clients need no certificate; give --any-client to serve all"
            " that can connect"
        )
    check_packages()
    files = {name: os.path.abspath(path) for name, path in find_models(models).items()}
    rest_port = rest if rest is not None else max(0, place.port - 1)
    return DoorSettings("", files, host, place.port, rest_port, is_remote, drain_s)


class DoorProcess:
    """A process that serves.

    Args:
        process: The process.
        settings: Its settings.
        started: Its answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], settings: DoorSettings, started: Started) -> None:
        self._process = process
        self._is_ending = False
        self._drain_s = settings.drain_s
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.address = f"{host}:{started.port}"
        self.rest_url = f"http://{host}:{started.rest_port}/v2"

    async def drain(self) -> bool:
        """Ends the process when it has answered the requests that it has accepted; returns whether it has answered all."""
        self._is_ending = True
        await anyio.to_thread.run_sync(_end, self._process, self._drain_s + END_S_MAX)
        return self._process.returncode == 0

    async def watch(self) -> None:
        """Raises ``DeviceUnavailable`` when the process ends by itself."""
        descriptor = os.pidfd_open(self._process.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        if not self._is_ending:
            raise DeviceUnavailable(
                f"oip: the process that serves the models (pid {self._process.pid}) has ended by itself"
            )


@asynccontextmanager
async def serving_door(settings: DoorSettings | None, path: Path) -> AsyncIterator[DoorProcess | None]:
    """Serves the models of a device's socket while inside; None where there is no door.

    Raises:
        InvalidArgument: A model cannot be compiled, or an address cannot be used.
        DeviceUnavailable: The process cannot be started, or has ended.
    """
    if settings is None:
        yield None
        return
    given = msgspec.json.encode(msgspec.structs.replace(settings, socket=os.fspath(path))).decode()
    process = await anyio.to_thread.run_sync(_popen, python_command("aionn.oip.process", given))
    with ends_with_server(process):
        try:
            door = DoorProcess(process, settings, await _started(process))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(door.watch)
                yield door
                tasks.cancel_scope.cancel()
        finally:
            await finish(anyio.to_thread.run_sync(_end, process, END_S_MAX))


def _popen(command: list[str]) -> subprocess.Popen[bytes]:
    environment = python_environment()
    environment.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # Its lines about what clients do wrong are for its own developers.
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    except OSError as e:
        raise DeviceUnavailable(f"oip: the process that serves cannot be started: {e.strerror}") from e


async def _started(process: subprocess.Popen[bytes]) -> Started:
    pipe: Any = process.stdout
    os.set_blocking(pipe.fileno(), False)
    line = b""
    with anyio.move_on_after(START_S_MAX):
        while not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
            await anyio.wait_readable(pipe.fileno())
            with contextlib.suppress(BlockingIOError):
                content = os.read(pipe.fileno(), LINE_BYTES_MAX)
                if not content:
                    break
                line += content
    try:
        started = msgspec.json.decode(line, type=Started)
    except msgspec.MsgspecError:
        raise DeviceUnavailable("oip: the process that serves the models ended while it started") from None
    if started.problem:
        raise InvalidArgument(started.problem)
    return started


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Ends the process: in order, then by force. Blocks for a bounded time."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""What one client asks of a device that takes long keeps the others' executions waiting for moments only: real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aionn.hal import DeviceStatus, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.service.client.device import RemoteDevice

pytestmark = pytest.mark.forked("any")

WAIT_S_MAX = 30.0
OPERATIONS = 4000
"""A sixth of a second to check, on one core."""

DRIVERS = """
    import sys
    from aionn.drivers.reference import ReferenceDevice
    from aionn.hal import DeviceStatus

    class Telling(ReferenceDevice):
        async def status(self):
            is_short = sys.getswitchinterval() <= 0.001
            return DeviceStatus.AVAILABLE if is_short else DeviceStatus.BUSY
"""


def chain(length: int) -> Model:
    """A long chain of sums."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (4,))
    none, last = graph.constant(0), a
    for _ in range(length):
        last = graph.result(OperationType.ADD, [last, a, none], a)
    return graph.build([last])


@contextlib.contextmanager
def _serve(driver: str, path: Path, repository: Path, modules: Path) -> Iterator[None]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), str(modules)])}
    command = [sys.executable, "-m", "aionn", "serve", driver, "--name", "device", "--socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None and "serving" in server.stdout.readline()
        try:
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(WAIT_S_MAX) == 0


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "telling.py").write_text(textwrap.dedent(DRIVERS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


async def test_threads_of_a_process_that_serves_pass_the_interpreters_lock_on_early(
    modules: Path, repository: Path, background: Any
) -> None:
    path = modules / "device.sock"
    own = RemoteDevice("telling:Telling", "device", background.tasks)
    assert await own.status() == DeviceStatus.AVAILABLE
    await own.aclose()
    with _serve("telling:Telling", path, repository, modules):
        shared = RemoteDevice("device", "device", background.tasks, path=path)
        assert await shared.status() == DeviceStatus.AVAILABLE
        await shared.aclose()


@pytest.mark.parametrize("how", [pytest.param("support", marks=pytest.mark.long), "prepare"])
@pytest.mark.thorough
async def test_no_execution_waits_until_the_model_of_another_client_is_checked(
    modules: Path, repository: Path, background: Any, small: Any, how: str
) -> None:
    path, model, took_s = modules / "device.sock", chain(OPERATIONS), []
    with _serve("reference", path, repository, modules):
        one, other = (RemoteDevice("device", "device", background.tasks, path=path) for _ in range(2))
        prepared = await one.prepare_model(small.sum_model())
        burst = await prepared.configure_execution_burst()
        work = small.Sum()
        await burst.execute_synchronously(work.request, [0])
        is_over = anyio.Event()

        async def ask() -> None:
            if how == "support":
                await other.supported_operations(model)
            else:
                await (await other.prepare_model(model)).aclose()
            is_over.set()

        async def timed(execution: Awaitable[Any]) -> None:
            began_s = time.monotonic()
            await execution
            took_s.append(time.monotonic() - began_s)

        began_s = time.monotonic()
        with anyio.fail_after(WAIT_S_MAX):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while not is_over.is_set():
                    await timed(prepared.execute_synchronously(work.request))
                    await timed(burst.execute_synchronously(work.request, [0]))
        in_all_s = time.monotonic() - began_s
        assert work.is_right
        await burst.aclose()
        await one.aclose()
        await other.aclose()
    # The check is more than half of all: an execution that waited for the device's only slot would take as long.
    assert max(took_s) < in_all_s / 4

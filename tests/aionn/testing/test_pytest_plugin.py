"""The pytest plugin, as users see it: whole runs of pytest on small files."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAD = """
import asyncio, anyio, pytest
virtual = pytest.mark.aionn(virtual_time=True)

def kind():
    return type(asyncio.get_running_loop()).__name__
"""

WORKING = """
import pytest_asyncio

@pytest_asyncio.fixture
async def slow_fixture():
    await anyio.sleep(100)
    yield asyncio.get_running_loop().time()
    await anyio.sleep(100)

@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fixture():
    return kind()

@virtual
@pytest.mark.asyncio
async def test_virtual(virtual_clock, slow_fixture, shared_fixture):
    assert slow_fixture == 100
    await anyio.sleep(3600)
    assert virtual_clock.now == 3700
    assert shared_fixture != "VirtualClockLoop", "it belongs to other tests as well"

@pytest.mark.asyncio
async def test_real(shared_fixture):
    assert kind() != "VirtualClockLoop"

@virtual
def test_loops_of_a_test_without_one(virtual_clock):
    asyncio.run(asyncio.sleep(10))
    anyio.run(anyio.sleep, 10)
    assert virtual_clock.now == 20

def test_loops_of_an_unmarked_test():
    async def main():
        return kind()
    assert asyncio.run(main()) != "VirtualClockLoop"

@virtual
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_anyio(anyio_backend, virtual_clock):
    await anyio.sleep(3600)
    assert virtual_clock.now == 3600

@pytest.mark.aionn(virtual_time=True, start_s=7.0)
@pytest.mark.asyncio
async def test_options(virtual_clock):
    assert virtual_clock.now == 7

@pytest.mark.aionn(virtual_time=False)
@pytest.mark.asyncio
async def test_switched_off():
    assert kind() != "VirtualClockLoop"

@virtual
class TestInAClass:
    @pytest.mark.asyncio
    async def test_method(self, virtual_clock):
        assert kind() == "VirtualClockLoop"
"""

FAILING = """
@virtual
@pytest.mark.asyncio(loop_scope="module")
async def test_wrong_loop():
    pass

@pytest.mark.asyncio
async def test_unmarked(virtual_clock):
    pass

@pytest.mark.aionn(virtual=True)
def test_unknown_option():
    pass

@virtual
@pytest.mark.asyncio
async def test_deadlock():
    await asyncio.Event().wait()

@pytest.mark.aionn(virtual_time=True, stuck_s=0.05)
@pytest.mark.asyncio
async def test_stuck(virtual_clock):
    with virtual_clock.pin("the sleeper itself"):
        await anyio.sleep(1)
"""

DEVICES = """
import numpy as np
import aionn
from aionn.testing import SimulatedDevice, models

@pytest.mark.aionn(virtual_time=True, devices=["phone-cpu", "phone-gpu"])
@pytest.mark.asyncio
async def test_profiles(aionn_runtime):
    assert [device.name for device in aionn_runtime.devices] == ["phone-cpu", "phone-gpu"]

class TestOwnDevices:
    @pytest.fixture
    def aionn_devices(self):
        return [SimulatedDevice("npu", run_time_s=0.5)]

    @virtual
    @pytest.mark.asyncio
    async def test_device(self, aionn_runtime, virtual_clock):
        net = await aionn_runtime.compile(models.identity((2,)))
        await net.execute([np.zeros(2, np.float32)])
        assert virtual_clock.now == 0.5
"""

IDLE = """
import sys

def test_nothing_is_imported():
    ours = [name for name in sys.modules if name.split(".")[0] in ("aionn", "fences", "fmq", "numpy")]
    assert set(ours) <= {"aionn", "aionn.testing", "aionn.testing.pytest_plugin"}, ours
"""


def run_pytest(folder: Path, repository: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    installed = importlib.metadata.entry_points(group="pytest11", name="aionn")
    plugin = [] if installed else ["-p", "aionn.testing.pytest_plugin"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-W",
        "error",
        "--strict-markers",
        "-rA",
        "--tb=short",
        *plugin,
    ]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def outcomes(finished: subprocess.CompletedProcess[str]) -> dict[str, str]:
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it.py::(\S+)", finished.stdout, re.MULTILINE)
    return {name.split("[")[0]: outcome for outcome, name in found}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_marked_tests_run_on_virtual_time_and_others_do_not(
    tmp_path: Path, repository: Path, mode: str
) -> None:
    finished = run_pytest(tmp_path, repository, HEAD + WORKING + DEVICES, f"--asyncio-mode={mode}")
    assert set(outcomes(finished).values()) == {"PASSED"}, finished.stdout
    assert len(outcomes(finished)) == 10


@pytest.mark.thorough
def test_mistakes_are_told(tmp_path: Path, repository: Path) -> None:
    finished = run_pytest(tmp_path, repository, HEAD + FAILING)
    assert outcomes(finished) == {
        "test_wrong_loop": "FAILED",
        "test_unmarked": "ERROR",
        "test_unknown_option": "FAILED",
        "test_deadlock": "FAILED",
        "test_stuck": "FAILED",
    }
    for message in (
        "ran on another event loop",
        "needs the marker @pytest.mark.aionn(virtual_time=True)",
        "expected keywords among devices, pin_descriptors, start_s, stuck_s, virtual_time; got virtual",
        "in test_deadlock (",
        "the sleeper itself",
    ):
        assert message in finished.stdout


@pytest.mark.thorough
def test_pytest_starts_without_us(tmp_path: Path, repository: Path) -> None:
    finished = run_pytest(tmp_path, repository, IDLE)
    assert outcomes(finished) == {"test_nothing_is_imported": "PASSED"}, finished.stdout


def test_the_plugin_is_an_entry_point(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"aionn": "aionn.testing.pytest_plugin"}

"""A runtime with one driver process, and the small models."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

import aionn
from aionn.testing.models import identity

TURNS_MAX = 2000


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"]) as opened:
        yield opened


@pytest.fixture(params=["process", "in_process"])
async def any_runtime(request: pytest.FixtureRequest) -> AsyncIterator[aionn.Runtime]:
    """The same claims hold with the driver in a process of its own and in this one."""
    async with aionn.open(drivers=["reference"], isolation=request.param) as opened:
        yield opened


async def _warmed(runtime: aionn.Runtime) -> aionn.Runtime:
    """Has a runtime start what it starts when it is first needed: a process, threads, a watch of descriptors."""
    async with await runtime.compile(identity()) as net, net.burst() as burst:
        one = np.ones(1, np.float32)
        await net.execute([-one])
        await net.execute_fenced([-one])
        await burst.execute([-one])
    return runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime_of_module() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"]) as opened:
        yield await _warmed(opened)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["process", "in_process"])
async def any_runtime_of_module(request: pytest.FixtureRequest) -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation=request.param) as opened:
        yield await _warmed(opened)


def _holds_constants() -> bool:
    return "aionn-constants" in Path("/proc/self/maps").read_text()


async def _until_freed(runtime: aionn.Runtime) -> None:
    """Waits until what a test dropped is closed: that takes turns of the loop, and of the collector where errors were kept."""
    background = runtime.background
    for turn in range(TURNS_MAX):
        under_way = background._dropped or background._executions
        if not (list(runtime._compilations) or under_way or _holds_constants()):
            return
        await anyio.sleep(0.001)
        if turn % 100 == 10:
            gc.collect()


@pytest_asyncio.fixture(loop_scope="module")
async def shared_runtime(runtime_of_module: aionn.Runtime) -> AsyncIterator[aionn.Runtime]:
    """A runtime with one driver process for all tests of a module, in one event loop."""
    yield runtime_of_module
    await _until_freed(runtime_of_module)


@pytest_asyncio.fixture(loop_scope="module")
async def any_shared_runtime(any_runtime_of_module: aionn.Runtime) -> AsyncIterator[aionn.Runtime]:
    """The same with the driver in a process of its own and in this one."""
    yield any_runtime_of_module
    await _until_freed(any_runtime_of_module)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs what uses a shared runtime in its event loop."""
    for item in items:
        if {"shared_runtime", "any_shared_runtime"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture
def digits(example_data: Path) -> Path:
    return example_data / "digits_float.tflite"


@pytest.fixture
def silence() -> npt.NDArray[np.float32]:
    return np.full((1, 49, 40, 1), np.log(1e-6), dtype=np.float32)

"""At a limit of the process a call raises RESOURCE_EXHAUSTED and says where; above the limit again, the next call works.

An application of its own each: the limit is on its address space, so that no further thread gets its stack.
"""

from __future__ import annotations

import subprocess
import sys

import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.errors import ErrorStatus, shortage_of, shortages_raised, status_of
from aionn.hal import OperationType
from aionn.testing.models import chain

RUN_S_MAX = 60

LIMITED = """
import asyncio, os, resource, threading
import aionn, aionn.blocking, aionn.drivers.reference
from aionn.hal import OperationType
from aionn.testing.models import chain

# Larger than the stacks of threads that have ended, which the C library keeps for the next ones.
threading.stack_size(32 << 20)
def limit(more):
    resource.setrlimit(resource.RLIMIT_AS, (more, resource.RLIM_INFINITY))
def lower():
    # Less than the stack of a thread.
    limit(int(open("/proc/self/statm").read().split()[0]) * 4096 + (2 << 20))
def lift():
    limit(resource.RLIM_INFINITY)
def told(e):
    print(type(e).__name__, str(e).split(":")[0], "thread" in str(e))
"""

BLOCKING = """
lower()
try:
    aionn.blocking.open(drivers=["reference"], isolation="in_process").__enter__()
except aionn.Error as e:
    told(e)
lift()
with aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime:
    print(len(runtime.devices))
print(threading.active_count())
"""

ASYNC = """
async def main():
    lower()
    try:
        async with aionn.open(drivers=["reference"], isolation="in_process"):
            pass
    except aionn.Error as e:
        told(e)
    lift()
    print(len(asyncio.all_tasks()))
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        print(len(runtime.devices))
asyncio.run(main())
"""


@pytest.mark.forked("any")
@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (BLOCKING, ["ResourceExhausted aionn.blocking True", "1", "1"]),
        (ASYNC, ["ResourceExhausted open True", "1", "1"]),
    ],
    ids=["blocking", "async"],
)
def test_runtime_that_gets_no_thread_says_so_and_leaves_nothing(code: str, lines: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED + code], capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )
    assert (ended.stdout.splitlines(), ended.stderr) == (lines, "")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("can't start new thread"), OSError(11, "EAGAIN"), OSError(24, "EMFILE")],
)
def test_shortages_of_python_are_resource_exhausted(error: Exception) -> None:
    told = shortage_of(error, "here")
    assert isinstance(told, aionn.ResourceExhausted) and told.transient and str(told).startswith("here: ")
    assert status_of(error) == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


@pytest.mark.parametrize("error", [RuntimeError("other"), OSError(2, "ENOENT"), ValueError()])
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert shortage_of(error, "here") is None
    assert status_of(error) == ErrorStatus.GENERAL_FAILURE


async def test_shortage_is_told_from_a_block_and_from_a_coroutine_function() -> None:
    @shortages_raised("there")
    async def starve(error: Exception) -> None:
        raise error

    with pytest.raises(aionn.ResourceExhausted, match="here: no memory"), shortages_raised("here"):
        raise MemoryError
    with pytest.raises(aionn.ResourceExhausted, match="there: no memory"):
        await starve(MemoryError())
    with pytest.raises(ValueError, match="other"):
        await starve(ValueError("other"))


async def test_burst_and_replacement_without_a_thread_are_told_in_the_same_words(
    shared_runtime: aionn.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    model = chain([OperationType.RELU], (2,))
    net = await shared_runtime.compile(model)
    async with net.burst() as burst:
        with monkeypatch.context() as patch:
            patch.setattr(anyio.to_thread, "run_sync", refuse)
            with pytest.raises(aionn.ResourceExhausted, match=r"^burst: no thread"):
                async with net.burst():
                    pass
            with pytest.raises(aionn.ResourceExhausted, match=r"^replace: no thread"):
                await net.replace(model)
        x = np.ones(2, np.float32)
        assert (await burst.execute([x])).outputs[0].tolist() == [1, 1]
        await net.replace(model)

"""A child that is forked from an application with an open runtime ends; the application's runtime, loop and processes go on.

Each case is an application of its own, since a child that leaves by an error runs all that its parent's frames have for that.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.forked("any")

RUN_S_MAX = 60
"""Far more than an application takes that starts a driver process; one that hangs does so for ever."""

APPLICATION = """
import asyncio, os, sys
import numpy as np
import aionn
from aionn.hal import OperationType
from aionn.testing.models import chain
from fences import SyncFence

X = np.ones(2, np.float32)

async def main(isolation):
    fence = SyncFence("of another process")
    imported = SyncFence.from_fd(fence.fileno())
    async def wait():
        await imported
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (2,)))
        async with net.burst() as burst:
            await net.execute([X])
            await burst.execute([X])
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            pid = os.fork()
            if pid == 0:
                sys.stderr = open(os.devnull, "w")
                LEAVE
            _, status = os.waitpid(pid, 0)
            before = runtime.devices[0].pid
            await asyncio.to_thread(lambda: None)  # Another thread wakes the loop.
            for _ in range(20):
                await net.execute([X])
                await burst.execute([X])
            fence.signal()
            await waiting
            print(os.waitstatus_to_exitcode(status), runtime.devices[0].pid == before)

asyncio.run(main(sys.argv[1]))
"""

LEAVES = {
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('of the child')", 1),
    "os._exit": ("os._exit(4)", 4),
    "closing": ("await runtime.aclose()", 1),
    "closing_a_fence": ("imported.close(); sys.exit(5)", 5),
    "cancelling": ("waiting.cancel(); await asyncio.sleep(0); sys.exit(6)", 6),
}


@pytest.mark.parametrize("isolation", ["process", "in_process"])
@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.thorough
def test_parent_goes_on_however_a_forked_child_leaves(leave: str, isolation: str) -> None:
    if leave != "os._exit" and sys.version_info >= (3, 14):
        pytest.skip(
            "from Python 3.14 on asyncio itself never ends in a child that is forked within a coroutine"
        )
    words, expected = LEAVES[leave]
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION.replace("LEAVE", words), isolation],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected} True\n", "")

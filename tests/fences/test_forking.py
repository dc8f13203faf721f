"""A forked child ends; the fences for which tasks of its parent wait are noticed by the parent as if there had been no child."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from fences import SyncFence
from fences.waiting import separate_at_fork

RUN_S_MAX = 60
"""Far more than a program of one fence takes; one that hangs does so for ever."""

PROGRAM = """
import asyncio, os, sys
from fences import SyncFence

fence = SyncFence("of another process")
imported = SyncFence.from_fd(fence.fileno())

async def wait():
    await imported

async def main():
    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        LEAVE
    _, status = os.waitpid(pid, 0)
    await asyncio.to_thread(lambda: None)  # Another thread wakes the loop.
    fence.signal()
    await task
    print(os.waitstatus_to_exitcode(status))

asyncio.run(main())
"""

LEAVES = {
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('of the child')", 1),
    "os._exit": ("os._exit(4)", 4),
    "closing": ("imported.close(); await asyncio.sleep(0); sys.exit(5)", 5),
    "cancelling": ("task.cancel(); await asyncio.sleep(0); sys.exit(6)", 6),
}


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.thorough
def test_wait_of_the_parent_ends_however_a_forked_child_leaves(leave):
    if leave != "os._exit" and sys.version_info >= (3, 14):
        pytest.skip(
            "from Python 3.14 on asyncio itself never ends in a child that is forked within a coroutine"
        )
    words, expected = LEAVES[leave]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("LEAVE", words)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def _in_child(call):
    pid = os.fork()
    if pid == 0:
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_forked_child_removes_no_descriptor_of_the_parents_loop():
    async def main():
        loop = asyncio.get_running_loop()
        separate_at_fork(loop)
        reading, writing = os.pipe()
        seen = asyncio.Event()
        loop.add_reader(reading, seen.set)
        _in_child(lambda: loop.remove_reader(reading))
        os.write(writing, b"1")
        await asyncio.wait_for(seen.wait(), 10)
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)

    asyncio.run(main())


def test_registration_outlives_a_child_that_shares_the_epoll_instance(run, monkeypatch):
    """As on a loop whose epoll instance cannot be separated."""
    monkeypatch.setattr("fences.waiting.separate_at_fork", lambda loop: None)

    async def main():
        fence = SyncFence("exporter")
        imported = SyncFence.from_fd(fence.fileno(), "importer")

        async def wait():
            await imported

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)  # uvloop registers at the end of a turn.
        _in_child(imported.close)
        fence.signal()
        await asyncio.wait_for(task, 10)
        for each in (fence, imported):
            each.close()

    run(main())

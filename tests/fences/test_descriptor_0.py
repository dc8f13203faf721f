"""A fence whose descriptor is 0, where a process has closed its standard input."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_STANDARD_INPUT = """
import asyncio, os, threading
from fences import SyncFence

def exported():
    # The import has the lowest number that is free.
    source = SyncFence()
    number = source.fileno()
    os.close(0)
    fence = SyncFence.from_fd(number)
    assert fence.fileno() == 0 and not fence.wait(1)
    return source, fence

async def wait_for(source, fence):
    async def wait():
        await fence
    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    source.signal()
    await asyncio.wait_for(waiting, 30)

source, fence = exported()
again = SyncFence.from_fd(0)
asyncio.run(wait_for(source, fence))
assert again.wait(10**10)
fence.close()
os.open(os.devnull, os.O_RDONLY)

source, fence = exported()
woken = threading.Event()
fence.add_callback(lambda _: woken.set())
source.signal()
assert woken.wait(10) and fence.wait(0)
"""


def test_descriptor_0_is_imported_and_watched_as_any_other():
    subprocess.run([sys.executable, "-c", WITHOUT_STANDARD_INPUT], check=True, timeout=60)

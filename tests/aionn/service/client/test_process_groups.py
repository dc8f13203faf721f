"""What a driver process has started ends with it: it may keep copies of sockets and fences, by whose closing its end is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import anyio
import pytest

from aionn.service.client.supervisor import DriverProcess

END_S_MAX = 20.0

FORKS = "import os, signal, time\npid = os.fork()\nif pid == 0: time.sleep(100)\nprint(pid, flush=True)\n"
ENDS = {
    "exits": "os._exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is asked to": "time.sleep(100)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_watched", [True, False])
async def test_child_ends_with_its_driver_process(
    end: str, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS + ENDS[end]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        driver = DriverProcess(process, one, "forking")
        assert process.stdout is not None
        with process.stdout as said:
            child = os.pidfd_open(int(said.readline()))
        if not is_watched:
            monkeypatch.setattr(anyio, "wait_readable", _no_room)
        with anyio.fail_after(END_S_MAX):
            if end == "is asked to":
                driver.kill()
            status = await driver.wait()
            monkeypatch.undo()
            await anyio.wait_readable(child)
        os.close(child)
        await driver.aclose()
    assert status == (0 if end == "exits" else -signal.SIGKILL)


async def _no_room(descriptor: object) -> None:
    raise OSError("the event loop has no room to watch it")

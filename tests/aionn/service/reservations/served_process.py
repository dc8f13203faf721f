"""``aionn serve`` of a device that writes down what it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

__all__ = ["LIMIT_S", "begun", "serving", "until_served"]

LIMIT_S = 60

COUNTING = """
import os
from aionn.drivers.skeleton import SkeletonDevice, SkeletonModel

class CountingModel(SkeletonModel):
    def run(self, inputs, outputs, control):
        os.write(self.device.begun, b"%d\\n" % inputs[0].flat[0])
        return super().run(inputs, outputs, control)

class CountingDevice(SkeletonDevice):
    def __init__(self, name):
        super().__init__(name)
        self.begun = os.open("begun", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def prepare(self, model, *, preference, priority, deadline_ns):
        return CountingModel(self, model, priority)
"""
"""A device that writes the first value of each execution that it begins into a file."""


@contextmanager
def serving(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``aionn serve`` of a counting device in a folder, at the socket ``s``."""
    (folder / "counting.py").write_text(COUNTING)
    command = [sys.executable, "-m", "aionn", "serve", "counting:CountingDevice", "--socket", "s", "--quiet"]
    paths = [str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        yield server
    finally:
        server.kill()
        server.wait()


async def until_served(folder: Path) -> Path:
    with anyio.fail_after(LIMIT_S):
        while not (folder / "s").exists():
            await anyio.sleep(0.005)
    return folder / "s"


def begun(folder: Path) -> list[int]:
    """The first values of the executions that the device in a folder has begun, in their order."""
    return [int(line) for line in (folder / "begun").read_text().split()]

"""The least that a model in another process costs: LiteRT behind two eventfds and one piece of shared memory.

No runtime, no checks, no event loop, one model and one caller, who blocks. The difference to this in-process is the price of the
other process on this machine; a further one is the price of aionn.

Run as a program it is the other process: `python -m benchmarks.bare_process MODEL MEMORY_FD ASKED_FD ANSWERED_FD`.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from benchmarks.engine import Engine

Array = npt.NDArray[Any]

ONE = (1).to_bytes(8, sys.byteorder)
START_S_MAX = 30.0


def place(memory: mmap.mmap, details: dict[str, Any], offset: int) -> Array:
    """A tensor's place in the shared memory."""
    shape = tuple(int(n) for n in details["shape"])
    flat = np.frombuffer(memory, details["dtype"], int(np.prod(shape)), offset)
    return flat.reshape(shape)


class BareProcess:
    """The caller's side.

    Args:
        path: The model: one input, one output.
        details: Of its input and its output, as LiteRT has them.
    """

    def __init__(self, path: Path, details: tuple[dict[str, Any], dict[str, Any]]) -> None:
        read, written = details
        size_bytes = sum(int(np.prod(d["shape"])) * np.dtype(d["dtype"]).itemsize for d in details)
        memory_fd = os.memfd_create("bare")
        os.ftruncate(memory_fd, size_bytes)
        self._memory = mmap.mmap(memory_fd, size_bytes)
        self._input = place(self._memory, read, 0)
        self._output = place(self._memory, written, self._input.nbytes)
        self._asked, self._answered = os.eventfd(0), os.eventfd(0)
        fds = (memory_fd, self._asked, self._answered)
        command = [sys.executable, "-m", "benchmarks.bare_process", str(path), *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.DEVNULL)
        os.close(memory_fd)

    def __call__(self, x: Array) -> Array:
        np.copyto(self._input, x)
        os.write(self._asked, ONE)
        os.read(self._answered, 8)
        return self._output.copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(START_S_MAX)
        os.close(self._asked)
        os.close(self._answered)


def main() -> None:
    """The other process."""
    path, memory_fd, asked, answered = sys.argv[1], *map(int, sys.argv[2:])
    memory = mmap.mmap(memory_fd, 0)
    engine = Engine(Path(path))
    given = place(memory, engine.input, 0)
    result = place(memory, engine.output, given.nbytes)
    while True:
        os.read(asked, 8)
        result[...] = engine(given)
        os.write(answered, ONE)


if __name__ == "__main__":
    main()

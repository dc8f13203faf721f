"""The process of a node, as its actor keeps it: started, watched, started again, drained.

Owns the process and its output; ``restarts`` decides. It needs no Ray.

Invariants:
1. At most one process runs. It is started again on the port that it had, so that applications find the node where it was.
2. A call of ``address`` returns it, or raises an error with the last words of the process.
3. When ``run`` has ended, however that came, no process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import aionn
from aionn.platform.python_process import python_command, python_environment
from aionn.ray.restarts import NodeState, Restarts
from aionn.ray.settings import NodeSettings, address_for_clients, place_of, port_of, serve_arguments

__all__ = ["NodeProcess"]

LINES_KEPT: Final = 20
"""Last lines of the standard error that an error quotes: a traceback with its message."""

LINE_BYTES_MAX: Final = 1 << 16
"""Longest line of the output; the rest of a longer one is another line."""

KILL_S_MAX: Final = 10.0
"""Time in which the keeper ends when its standard input is closed; twice what it gives the device."""


class NodeProcess:
    """See the module.

    Args:
        settings: Of the node.
        command: Makes the command line from the arguments of ``aionn serve``; tests give another program.
        now: The clock, in nanoseconds.
    """

    def __init__(
        self,
        settings: NodeSettings,
        command: Callable[[Sequence[str]], list[str]] = lambda arguments: python_command(
            "aionn.ray.keeper", *arguments
        ),
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._command = command
        self._now = now
        self._restarts = Restarts()
        self._place = ""
        self._process: asyncio.subprocess.Process | None = None
        self._changed = asyncio.Event()
        self._words: deque[str] = deque(maxlen=LINES_KEPT)
        self._status: int | None = None

    async def run(self) -> None:
        """Keeps the process until it has ended in order, or has failed too often. To be run once, as a task."""
        try:
            while True:
                await self._run_once()
                pause_ns = self._restarts.died(self._now())
                self._notify()
                if pause_ns is None:
                    return
                await asyncio.sleep(pause_ns / 1e9)
                if not self._restarts.start():
                    return
                self._notify()
        finally:
            await self._kill()
            self._notify()

    async def _run_once(self) -> None:
        port = port_of(self._place) if self._place else 0
        self._words.clear()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command(serve_arguments(self._settings, port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=python_environment(),
                limit=LINE_BYTES_MAX,
            )
        except OSError as e:
            self._words.append(f"it cannot be started: {e.strerror}")
            return
        assert process.stdout is not None and process.stderr is not None, "it was started so"
        if self._restarts.state is NodeState.ENDING:
            process.terminate()
        await asyncio.gather(
            self._read(process.stdout, self._reported),
            self._read(process.stderr, self._words.append),
            process.wait(),
        )
        self._status = process.returncode
        self._process = None

    async def _read(self, stream: asyncio.StreamReader, line_read: Callable[[str], object]) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # It is longer than ``LINE_BYTES_MAX``, and was dropped.
            if not line:
                return
            line_read(line.decode(errors="replace").rstrip())

    def _reported(self, line: str) -> None:
        place = place_of(line)
        if place is not None:
            self._place = place
            self._restarts.serves(self._now())
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def address(self) -> str:
        """The address for clients, as soon as the process serves.

        Raises:
            DeviceUnavailable: It has ended, or has failed too often.
        """
        while True:
            match self._restarts.state:
                case NodeState.SERVING:
                    return address_for_clients(self._settings, self._place)
                case NodeState.FAILED | NodeState.ENDING | NodeState.ENDED:
                    raise aionn.DeviceUnavailable(f"node {self._settings.node}: {self.explain()}")
            await self._changed.wait()

    def explain(self) -> str:
        """The state, in a line of text, with the last words of a process that has ended by itself."""
        text = self._restarts.state.value
        if self._restarts.state in (NodeState.PAUSED, NodeState.FAILED):
            words = "; ".join(self._words) or f"exit status {self._status}"
            text += f" ({self._restarts.starts} starts): {words}"
        return text

    def figures(self) -> dict[str, Any]:
        """State, starts, place, and the number of the process (the keeper's); None where none runs."""
        return {
            "state": self._restarts.state.value,
            "starts": self._restarts.starts,
            "place": self._place,
            "pid": None if self._process is None else self._process.pid,
        }

    async def drain(self) -> None:
        """Has the process end in order, as at SIGTERM, and waits for that: accepted executions end first."""
        if self._restarts.end() and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        self._notify()
        while self._restarts.state not in (NodeState.ENDED, NodeState.FAILED):
            await self._changed.wait()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None, "it was started so"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), KILL_S_MAX)
        except TimeoutError:
            process.kill()
            await process.wait()

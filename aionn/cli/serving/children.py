"""The processes beside a server (its node, its door): ended by force where the server ends without closing anything.

In order they end by themselves when the server's end of their standard input is closed. One that hangs, or is stopped, does not
notice that, and would keep the addresses at which it listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

__all__ = ["ends_with_server", "kill_all"]

_running: list[subprocess.Popen[bytes]] = []


@contextmanager
def ends_with_server(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Has ``kill_all`` kill the process while inside: until it was waited for."""
    _running.append(process)
    try:
        yield
    finally:
        _running.remove(process)


def kill_all() -> None:
    """Kills the processes that run. Does not wait; may be called in a signal handler, right before the end of this process."""
    for process in list(_running):
        process.kill()

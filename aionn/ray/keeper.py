"""A process between an actor and ``aionn serve``: it ends the latter when the actor is gone, however that ended.

Ray ends the processes of actors by SIGKILL, and the kernel does not end their children. So this process has its standard input from
the actor, whose end it notices, and owns the process of the device.

Invariants:
1. When its standard input ends, the process of the device gets SIGTERM, and SIGKILL after ``END_S_MAX``.
2. It ends with the exit status of the process of the device, and passes SIGTERM on.
3. Where it is killed itself, the kernel sends the process of the device SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from aionn.platform.python_process import python_command, python_environment

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1
"""Of ``linux/prctl.h``."""

END_S_MAX: Final = 5.0
"""Time in which a device ends whose actor is gone. Applications wait for its answers a quarter of a second."""


def main(arguments: Sequence[str]) -> None:
    """The process: the arguments of ``aionn serve``."""
    served = subprocess.Popen(
        python_command("aionn.cli.main", "serve", *arguments),
        stdin=subprocess.DEVNULL,
        env=python_environment(),
        preexec_fn=_end_with_parent,  # This process has one thread.
    )
    signal.signal(signal.SIGTERM, lambda *_: served.send_signal(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = os.pidfd_open(served.pid)
    try:
        while served.poll() is None:
            readable, _, _ = select.select([sys.stdin.fileno(), end], [], [])
            if end not in readable and not os.read(sys.stdin.fileno(), 1024):
                _end(served)
    finally:
        os.close(end)
    code = served.returncode
    raise SystemExit(code if code >= 0 else 128 - code)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(served: subprocess.Popen[bytes]) -> None:
    served.terminate()
    try:
        served.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        served.kill()
        served.wait()

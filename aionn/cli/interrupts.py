"""Ctrl-C on the command line: one sentence and exit code 130 at any moment, never a traceback.

Owns the handler of SIGINT from the first line of ``main`` to the end of the process. Python's own raises KeyboardInterrupt wherever
the program is: in the middle of an import, in a finaliser, in the event loop's own code, at the interpreter's end.

Invariants:
1. Outside of ``run`` there is nothing to clean up: the process ends immediately.
2. Inside, the first signal cancels the task that runs, which cleans up; the second ends the process immediately. Driver processes
   notice that by their sockets and end by themselves.
3. A signal that is ignored when the process starts, as in a shell's background job, stays ignored.

A shell reports 130 for a program that SIGINT ended (128 + 2). The process exits with that code and does not end itself by
the signal, so that callers other than shells see the same number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from aionn.reports.lines import write_if_taken

__all__ = ["INTERRUPTED", "end_at_once", "guard", "run"]

INTERRUPTED = 130

_T = TypeVar("_T")

_SHOW_CURSOR = b"\x1b[?25h"
"""A live table hides it."""

_cancel: Callable[[], object] | None = None
_is_interrupted = False


def guard() -> None:
    """Takes SIGINT over from Python."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_signal)


def end_at_once() -> NoReturn:
    """Ends the process as interrupted."""
    if os.isatty(1):
        write_if_taken(1, _SHOW_CURSOR)
    write_if_taken(2, b"aionn: interrupted\n")
    os._exit(INTERRUPTED)


def _on_signal(number: int, frame: object) -> None:
    global _is_interrupted
    if _cancel is None or _is_interrupted:
        end_at_once()
    _is_interrupted = True
    _cancel()


def run(function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
    """Runs an async function in an event loop of its own.

    Raises:
        KeyboardInterrupt: SIGINT came, and the function has ended because of it.
    """
    import anyio

    from aionn.platform.loops import canceller

    async def interruptible() -> _T:
        global _cancel
        _cancel = canceller()
        try:
            return await function(*arguments)
        finally:
            _cancel = None

    try:
        return anyio.run(interruptible)
    except BaseException:
        if _is_interrupted:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            raise KeyboardInterrupt from None
        raise

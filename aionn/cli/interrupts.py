"""Ctrl-C and SIGTERM on the command line: one sentence and exit code 130 or 143 at any moment, never a traceback.

Owns the handlers of both signals from the first line of ``main`` to the end of the process; ``serve`` alone has one of its own for
SIGTERM while it serves. Python's own handler of SIGINT raises KeyboardInterrupt wherever the program is: in the middle of an
import, in a finaliser, in the event loop's own code, at the interpreter's end.

Invariants:
1. Outside of ``run`` there is nothing to clean up: the process ends immediately.
2. Inside, the first signal cancels the task that runs, which cleans up; the second ends the process immediately. Driver processes
   and the processes beside a server are killed: one that hangs, or is stopped, would not notice the end of this one.
3. The first signal within ``ends_early`` or ``is_polled`` ends that block alone, so that the command reports its results so far; it
   does not change the report of a block that has ended. The exit code is that of the signal in both cases.
4. A signal that is ignored when the process starts, as in a shell's background job, stays ignored.

A shell reports 130 for a program that SIGINT ended (128 + 2), and 143 for SIGTERM. The process exits with that code and does not
end itself by the signal, so that callers other than shells see the same number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeVar

from aionn.cli.serving.children import kill_all
from aionn.observability.lines import write_if_taken

__all__ = ["INTERRUPTED", "TERMINATED", "end_at_once", "ends_early", "guard", "is_ending", "is_polled", "run"]

INTERRUPTED = 128 + signal.SIGINT

TERMINATED = 128 + signal.SIGTERM

_T = TypeVar("_T")

_SHOW_CURSOR = b"\x1b[?25h"
"""A live table hides it."""

_end: Callable[[], object] | None = None
"""The effect of the first signal; None means that the process ends."""

_received: int | None = None
"""The first signal that came."""


def guard() -> None:
    """Takes SIGINT over from Python, and SIGTERM from the kernel."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _on_signal)


def is_ending() -> bool:
    """Whether a signal has come."""
    return _received is not None


def end_at_once() -> NoReturn:
    """Ends the process by the signal that came."""
    if os.isatty(1):
        write_if_taken(1, _SHOW_CURSOR)
    is_terminated = _received == signal.SIGTERM
    write_if_taken(2, b"aionn: terminated\n" if is_terminated else b"aionn: interrupted\n")
    kill_all()
    # Not imported here: a command without devices has none of them, and the signal may come in the middle of that import.
    kill_drivers = getattr(sys.modules.get("aionn.service.client.supervisor"), "kill_all", None)
    if kill_drivers is not None:
        kill_drivers()
    os._exit(TERMINATED if is_terminated else INTERRUPTED)


def _on_signal(number: int, frame: object) -> None:
    global _received
    if _received is not None:
        end_at_once()
    _received = number
    if _end is None:
        end_at_once()
    _end()


@contextlib.contextmanager
def ends_early() -> Iterator[None]:
    """A block that the first signal ends as its own end does, for a command whose results so far are worth a report.

    Within ``run``. A signal that comes after the block changes only the exit code: the report follows in bounded time.
    """
    import anyio

    from aionn.platform.loops import caller

    global _end
    with anyio.CancelScope() as scope:
        _end = caller(scope.cancel)
        try:
            yield
        finally:
            _end = _nothing


@contextlib.contextmanager
def is_polled() -> Iterator[None]:
    """A block whose first signal changes ``is_ending`` alone, for work that asks that and ends in order. Within ``run``."""
    global _end
    _end = _nothing
    yield


def _nothing() -> None:
    """The effect of a signal on a command that ends by itself."""


def run(function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
    """Runs an async function in an event loop of its own.

    Raises:
        KeyboardInterrupt: A signal came, and the function has ended because of it.
    """
    import anyio

    from aionn.platform.loops import canceller

    async def interruptible() -> _T:
        global _end
        _end = canceller()
        try:
            return await function(*arguments)
        finally:
            _end = None

    try:
        return anyio.run(interruptible)
    except BaseException:
        if is_ending():
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            raise KeyboardInterrupt from None
        raise

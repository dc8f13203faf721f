"""Work for a call that takes long in the interpreter, in short pieces: other work goes first between two of them.

Owns the two hooks alone. The service sets the pace of the work for a client, a driver that works on a thread of its own applies it,
and work with a loop over a model's operands or operations declares its pieces. Threads of a process share the interpreter's lock,
so that an execution of another client waits several times for a thread that never sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["between_pieces", "pace_of_call", "pausing"]

pace_of_call: ContextVar[Callable[[], None] | None] = ContextVar("pace_of_call", default=None)
"""To be called between short pieces of work for this call, on a thread that holds up no other call; it may sleep. None for a call
beside which no others are served.
"""

_pausing: ContextVar[Callable[[], None] | None] = ContextVar("pausing", default=None)


def between_pieces() -> None:
    """Called after a short piece of work, such as the checks of one operation.

    Raises:
        Exception: Whatever ends the work here: see ``pausing``.
    """
    pause = _pausing.get()
    if pause is not None:
        pause()


def pausing(pause: Callable[[], None]) -> None:
    """Sets the function that ``between_pieces`` calls in the present context; its exceptions end the work.

    Only in a context of a thread that may sleep, never in that of an event loop's task.
    """
    _pausing.set(pause)

"""Turns of threads for which the kernel clears, copies or frees much memory, on machines with few processors.

Two such threads beside each other take both processors of a small machine. A kernel that is built without preemption of itself lets
a thread that wakes wait until its next tick then, 4 ms as a rule: the event loop, and the threads of executions.

Invariants:
1. With ``FEW_PROCESSORS`` or less, one thread has a turn. With more, none waits.
2. A thread waits ``WAIT_S_MAX`` at most and continues without a turn: memory of one client never keeps another's from being copied.
3. A finaliser can wait for a turn, wherever it comes: the lock is one object of a C type, which no code in Python holds for its own
   steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["FEW_PROCESSORS", "WAIT_S_MAX", "memory_turn"]

FEW_PROCESSORS = 4
"""With more, a processor is left for a thread that wakes."""

WAIT_S_MAX = 0.05
"""Wait for a turn. The kernel frees 0.1 GiB in this time."""

_turn = threading.Lock()
_has_turns = len(os.sched_getaffinity(0)) <= FEW_PROCESSORS


@contextlib.contextmanager
def memory_turn() -> Iterator[None]:
    """Waits for a turn, and has it until the end of the block. On a thread that may sleep; a turn within a turn waits in vain."""
    is_turn = _has_turns and _turn.acquire(timeout=WAIT_S_MAX)
    try:
        yield
    finally:
        if is_turn:
            _turn.release()

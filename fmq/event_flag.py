"""EventFlag: 32 bits in shared memory that processes set for each other and wait for.

Owns the names of the bits and the object over one word; the word's operations are in `_native.c`. Refuses to own the
memory: the flag keeps the buffer it was given alive, and the queue it belongs to closes it.

Invariants:
1. A wake before the wait is not lost: the bits stay set until a wait takes them.
2. A wait takes all set bits of its mask in one step; each set bit is taken by one waiter.
3. Set bits beat an expired timeout; timeouts are absolute on CLOCK_MONOTONIC however often the kernel returns early.

Source: libfmq's EventFlag.
"""

from __future__ import annotations

import enum
from typing import NoReturn

from fmq._native import FlagWord
from fmq.errors import InvalidArgument

__all__ = ["EventFlag", "Notification"]


class Notification(enum.IntFlag):
    """The bits libfmq's blocking calls use; a program may use the remaining ones."""

    NOT_FULL = 0x01
    """Set by a reader that has made room."""
    NOT_EMPTY = 0x02
    """Set by a writer that has published."""


class EventFlag(FlagWord):
    """Bits on one futex word, shared between processes and threads.

    `wake(mask)` sets bits and wakes only if some of them are new; a mask of 0 does nothing. `wait(mask,
    timeout_ns=None, retry=True)` takes the bits of the mask that are set, waiting with the GIL released until there
    is one; it returns 0 at the timeout (None: never; 0: look once) or, without `retry`, at a spurious return.

    Args:
        memory: At least 4 writable bytes at a multiple of 4, kept alive until `close()`.

    Raises:
        InvalidArgument: No memory, too little, or misaligned.
    """

    def __init__(self, memory: memoryview) -> None:
        if memory is None:
            raise InvalidArgument("event flag: expected 4 bytes of shared memory, got None")
        super().__init__(memory)

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled: its word is memory that it shares."""
        raise TypeError(
            "event flag: cannot be copied or pickled; fmq.passing.send_queue sends its queue to a process"
        )

    def __repr__(self) -> str:
        return "<fmq.EventFlag>"

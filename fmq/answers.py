"""Answers: messages that a C function answers, without Python and without the interpreter's lock.

Owns the check of the function's address and the Python form of the table. `_answers.c` owns the table and the loop that serves it,
`_slots.c` the words from which its calls take the slots of a device.

Invariants:
1. A message is answered here only if all of its bytes, except its times, are those of a message that was added. Its bytes are
   copied before they are compared, so that a peer that rewrites the message changes nothing.
2. A call is made with the words that were added, never with a word of the message.
3. Everything else stays in the queue: an unknown message, a deadline that has passed, slots that are closed or taken, an answer
   that does not fit, a permit that was withdrawn, and queues that are interrupted or corrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from fmq._native import Answers as _Answers
from fmq._native import Permit, Slots
from fmq.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Answers", "Permit", "Slots"]


class Answers(_Answers):
    """A table of messages whose answers are known, and the loop that gives them.

    One thread serves: it calls `serve(requests, results)` with the reader's endpoint of one queue and the writer's endpoint of
    another; no other thread uses the two endpoints during the call, except to interrupt or close them. `serve` waits without the
    lock and returns when Python is needed. It returns None if the reason is to be found in the queue of requests. Otherwise it
    returns `(call, slot, status, began_ns, ended_ns)` of a call that was made: `slot` is to be released by Python, since the slots
    were closed during the call (-1: none); a `status` other than 0 is that of a call that failed and gave no answer. `add` is for
    the same thread; any thread may call `clear` and `activity`.

    Args:
        reports: Whether `serve` returns after every call, so that Python sees each of them.

    Attributes:
        count: The number of messages in the table.
        is_busy: Whether a message was found whose call has not ended. After `clear` no other one is found.
    """

    def __init__(self, reports: bool = False) -> None:
        super().__init__(reports)
        self._checked: set[int] = set()

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled: the table belongs to the thread that serves."""
        raise TypeError(
            "answers: cannot be copied or pickled; add the messages to a table of the other process"
        )

    def __repr__(self) -> str:
        return f"<fmq.Answers to {self.count} messages>"

    def add(
        self,
        message: Buffer,
        answer: Buffer,
        function: int,
        words: tuple[tuple[int, ...], ...],
        permit: Permit,
        call: Any,
        *,
        times: tuple[int, ...] = (),
    ) -> bool:
        """Answers a message from now on by a call: `function(*words of the slot)`, which returns 0 for success.

        Args:
            message: Its bytes, at most 4096.
            answer: The bytes that are written when the call has succeeded, at most 4096.
            function: The address of `int f(uintptr_t, ..6)`. It must be safe to call in any thread, without the lock.
            words: For each slot the arguments of the call, at most 6.
            permit: Names the slots, and the owner that holds one during the call.
            call: Given back with the events of `serve`; kept alive, with all that the words point to, until the message is
                forgotten and no call uses it.
            times: Where the message has 8 bytes that differ each time, ascending: big-endian nanoseconds of CLOCK_MONOTONIC,
                2^64 - 1 for none. The first is the deadline; no call begins after it.

        Returns:
            Whether it was added; False when the table is full.

        Raises:
            InvalidArgument: The address is not in mapped executable memory, or an argument is illegal.
        """
        if function not in self._checked:
            check_function(function)
            self._checked.add(function)
        return self._add(message, answer, function, words, permit, call, times)


def check_function(address: int) -> None:
    """Rejects an address that cannot be that of a function.

    Raises:
        InvalidArgument: It is not in a mapped executable range of this process.
    """
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            bounds, permissions = line.split(maxsplit=2)[:2]
            first, _, end = bounds.partition("-")
            if int(first, 16) <= address < int(end, 16):
                if "x" in permissions:
                    return
                break
    raise InvalidArgument(
        f"answers: expected the address of a function, got {address:#x}, which is not in mapped executable memory"
    )

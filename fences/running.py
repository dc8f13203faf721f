"""The loop that runs those who wait for a finished fence.

Owns: the queue of each thread that is finishing fences, the order in which waiters run, what becomes of their exceptions.
Refuses to own: the state of a fence and the attachment of waiters (``fence``, which also describes the agreement of threads).

Invariants:
1. In one thread there is one loop, that of the outermost call: what is finished inside a waiter is queued for it. So
   waiters never nest.
2. A chained fence with one dependant hands over to it in place: a chain costs neither stack nor queue.
3. A waiter that raises stops no other. An interrupt (KeyboardInterrupt, SystemExit) comes out when all have run; no other does.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

from fences.clock import the_clock
from fences.state import Outcome

Waiter = Callable[[Any], object]
"""Called with the finished fence."""

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the program, wherever they are raised."""

Queue = deque[tuple[Any, Any]]
"""Waiters to run, each with its finished fence; None for all that are attached to that."""

chained_type: Any = None
"""The type of chained fences, which are run in place; ``fence`` sets it, for it imports this module."""

_logger = logging.getLogger("fences")
_queues: dict[int, Queue] = {}


def run(waiter: Waiter | None, fence: Any) -> None:
    """Run one waiter of a finished fence (None: all that are attached), or leave that to the call further up in this thread."""
    ident = get_ident()
    queue = _queues.get(ident)
    if queue is not None:
        queue.append((waiter, fence))
        return
    _queues[ident] = queue = deque(((waiter, fence),))
    try:
        drain(queue)
    finally:
        del _queues[ident]


def finish_together(fences: list[Any], outcome: Outcome) -> None:
    """Finish several fences with one outcome before the waiters of any of them run; those that have finished are left alone."""
    ident = get_ident()
    outermost = ident not in _queues
    queue = _queues.setdefault(ident, deque())
    try:
        for fence in fences:
            fence._finish(outcome)
        if outermost:
            drain(queue)
    finally:
        if outermost:
            del _queues[ident]


def drain(queue: Queue) -> None:
    """Run waiters until none is left, in the order of attaching, fences in the order of finishing.

    A chained fence with one dependant hands over to it in place, so a chain costs neither stack nor queue.
    """
    interrupt: BaseException | None = None
    clock = the_clock()
    chained = chained_type
    waiter: Any
    while queue:
        waiter, fence = queue.popleft()
        while True:
            if type(waiter) is chained:
                try:
                    work = waiter._work
                    del waiter._work
                except AttributeError:  # Closed before its turn came.
                    break
                outcome = fence._outcome
                if type(outcome) is int:
                    try:
                        result = work()
                        if result is not None:
                            waiter._adopt(result)
                            break
                        outcome = clock()
                    except BaseException as error:
                        outcome = waiter._failure(error, None, None)
                        if isinstance(error, INTERRUPTS):
                            interrupt = error
                waiter._outcome = outcome
                port = waiter._port
                if port is not None:
                    port.publish(outcome)
                    waiter._retire(port)
                fence = waiter
                if queue:  # Others came first.
                    queue.append((None, fence))
                    break
            elif waiter is not None:
                try:
                    waiter(fence)
                except INTERRUPTS as error:
                    interrupt = error
                except (
                    BaseException
                ):  # A callback's CancelledError does not cancel the code that finishes the fence.
                    _logger.exception("a callback of %r raised", fence)
                break
            # `fence` has just finished: continue with those who wait for it.
            try:
                waiter = fence._next
                if type(waiter) is chained:
                    # No claim: a chained fence is never taken back, and its work is claimed above.
                    fence._next = None
                elif waiter is not None:
                    del fence._next
            except AttributeError:
                waiter = None
            if fence._more:
                if waiter is not None:
                    queue.append((waiter, fence))
                more = fence._more
                queue.extend((each, fence) for each in list(more) if more.pop(each, fence) is None)
                break
            if waiter is None:
                break
    if interrupt is not None:
        raise interrupt


def _after_fork_in_child() -> None:
    ident = get_ident()
    for other in [each for each in _queues if each != ident]:
        del _queues[other]  # Of threads that do not exist here; their numbers may be given out again.


os.register_at_fork(after_in_child=_after_fork_in_child)

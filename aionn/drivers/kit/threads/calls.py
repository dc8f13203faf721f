"""Calls of an event loop on the threads of a gate.

Owns the answer at the deadline, and what a call keeps when its caller has left: neither its arguments nor a place in the queue.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

from aionn.drivers.kit.gate import SlotGate, SubmittedJob
from aionn.drivers.kit.threads.classes import running_as
from aionn.errors import Error, MissedDeadline, ResourceExhausted, general_failure_of
from aionn.hal import Priority
from aionn.hal.callers import client_of_call
from aionn.platform.real_work import real_work
from aionn.realtime import SchedulingClass, current
from fences import SyncFence

__all__ = ["run_on_gate"]

_T = TypeVar("_T")


async def run_on_gate(
    gate: SlotGate,
    priority: Priority,
    deadline_ns: int | None,
    call: Callable[[Callable[[], bool]], _T],
    *,
    owner: Hashable = None,
    model: Hashable = None,
    call_at: Callable[[int, Callable[[], None]], Callable[[], None]] | None = None,
) -> _T:
    """Runs ``call`` on a thread of the gate and returns what it returns.

    With ``call_at``, which calls a function at a time and returns what prevents that, the caller is answered at the deadline
    although ``call`` still runs: by MissedDeadline. The result of ``call`` is dropped then.

    Cancelled before its start, ``call`` is not run; cancelled later, its argument turns True. Without an ``owner`` it is a job of
    the client whose call this is.
    """
    if owner is None:
        owner = client_of_call.get()
    cancelled = threading.Event()
    outcome: list[_T | BaseException] = []
    # Emptied when the caller has left: what a call refers to is not kept until the job's turn comes.
    calls = [call]
    del call

    def job() -> None:
        if cancelled.is_set():
            done.try_signal()  # It has no waiter, while other callers wait for their slots, or for the end of the device.
            return
        try:
            outcome.append(_called(calls.pop(), cancelled.is_set))
        except Error as e:
            outcome.append(e)
        except BaseException as e:  # SystemExit too: the caller waits, and so do others for this thread.
            outcome.append(general_failure_of(e, str(gate)))
        if cancelled.is_set():
            outcome.clear()
        done.try_signal()

    def late() -> None:
        done.try_signal()

    forget_late: Callable[[], None] | None = None
    submitted: SubmittedJob | None = None
    done = SyncFence("execution")
    try:
        with real_work(f"work on {gate}"):
            submitted = gate.submit(priority, deadline_ns, job, owner=owner, model=model)
            if call_at is not None and deadline_ns is not None:
                # Without a thread for it the answer comes later.
                with contextlib.suppress(ResourceExhausted):
                    forget_late = call_at(deadline_ns, late)
            await done
            if not outcome:
                raise MissedDeadline(f"{gate}: the deadline passed while preparing", transient=True)
    except BaseException:
        cancelled.set()
        calls.clear()
        # An error refers to the frames that it went through, and the frame of ``job`` to ``outcome``.
        done.add_callback(lambda done: outcome.clear())
        if submitted is not None and gate.withdraw(submitted):
            done.try_signal()
        raise
    finally:
        if forget_late is not None:
            forget_late()
    result = outcome.pop()
    if isinstance(result, BaseException):
        try:
            raise result
        finally:
            del result  # For the same reason.
    return result


def _called(call: Callable[[Callable[[], bool]], _T], is_cancelled: Callable[[], bool]) -> _T:
    scheduling = current()
    if scheduling is None:
        return call(is_cancelled)
    # Not an execution: it may compute for seconds.
    with running_as(scheduling, SchedulingClass.LOW):
        return call(is_cancelled)

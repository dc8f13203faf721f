"""Failures that are kept or passed to another task: what they must not keep alive with them, and what they must not mean there."""

from __future__ import annotations

import inspect
from types import TracebackType

from aionn.errors import Error, GeneralFailure
from aionn.runtime.background import Cancelled
from fences import FenceError

__all__ = ["clear_frames", "own_error", "raisable"]

_MAY_BE_SUSPENDED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

CHAIN_MAX = 16
"""Number of causes of a failure whose frames are cleared: drivers wrap an error once or twice."""


def own_error(error: Error) -> Error:
    """The same failure for one more caller.

    Each is raised an exception of its own: what is raised refers to the frames that it went through, and those to the execution,
    whose fence keeps the failure. All of that would stay until the garbage collector comes.
    """
    copy = type(error).__new__(type(error))
    # Not by ``__new__``: a TimeoutError with an ``__init__`` of its own ignores them there.
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def raisable(error: BaseException) -> BaseException:
    """The exception for the consumer: the error, unless its class has a meaning for the consumer's own task."""
    if not isinstance(error, (Cancelled, GeneratorExit, StopIteration, StopAsyncIteration)):
        return error
    failure = GeneralFailure(
        f"stream: the source, or what was called for an item, raised {type(error).__name__}"
    )
    failure.__cause__ = error
    return failure


def clear_frames(error: BaseException | None) -> None:
    """Lets go of what the frames of a failed execution hold, its memory above all, while the failure itself is kept.

    The cause of a failed fence that an execution waited for belongs to the application, and is not changed.
    """
    for _ in range(CHAIN_MAX):
        if error is None or isinstance(error, FenceError):
            return
        error.__traceback__ = _plain_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _plain_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is of ordinary functions which have ended, without their variables.

    Not ``traceback.clear_frames``: the frame of a coroutine may be one that continues, after it has handed the failure over, and to
    clear that would close the coroutine.
    """
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept = None
    for entry in reversed(entries):
        frame = entry.tb_frame
        if frame.f_code.co_flags & _MAY_BE_SUSPENDED:
            continue
        try:
            frame.clear()
        except RuntimeError:
            continue  # It still runs.
        kept = TracebackType(kept, frame, entry.tb_lasti, entry.tb_lineno)
    return kept

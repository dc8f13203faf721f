"""Failures that are kept: what they must not keep alive with them."""

from __future__ import annotations

import traceback

from aionn.errors import Error

__all__ = ["clear_frames", "own_error"]

CHAIN_MAX = 16
"""How many causes of a failure have their frames cleared: drivers wrap an error once or twice."""


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


def clear_frames(error: BaseException | None) -> None:
    """Lets go of what the frames of a failed execution hold, its memory above all, while the failure itself is kept."""
    for _ in range(CHAIN_MAX):
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

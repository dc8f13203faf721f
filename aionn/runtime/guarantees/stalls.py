"""The stalls that count for the frames of a stream: of the event loop, and of the driver's threads that execute them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from aionn.platform.stalls import (
    NO_STALLS,
    AllStalls,
    Stalls,
    stalls_of_this_thread,
    stalls_of_thread,
)
from aionn.runtime.clock import now_ns

__all__ = ["is_virtual", "stalls_of_frames", "stalls_of_loop"]

REAL_CLOCK_NS = 1_000_000_000
"""Farther from CLOCK_MONOTONIC the loop's clock is a virtual one, which no machine delays."""


def is_virtual() -> bool:
    """Whether the loop's clock is a virtual one."""
    return abs(now_ns() - time.monotonic_ns()) > REAL_CLOCK_NS


def stalls_of_loop() -> Stalls:
    """The stalls of the calling thread, which runs the event loop; under a virtual clock, nothing is ever counted."""
    return NO_STALLS if is_virtual() else stalls_of_this_thread()


def stalls_of_frames(of_loop: Stalls, threads: Iterable[int]) -> Stalls:
    """The stalls of the frames of one burst.

    Args:
        of_loop: Those of the event loop.
        threads: The threads that execute the frames, by their numbers in the kernel.
    """
    parts = [stalls_of_thread(thread) for thread in threads]
    return AllStalls([of_loop, *parts]) if parts and of_loop is not NO_STALLS else of_loop

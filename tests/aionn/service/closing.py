"""Descriptors that threads close."""

from __future__ import annotations

import time

from aionn.platform import descriptors

CLOSED_S_MAX = 30.0


def until_closed() -> None:
    """Waits until no thread closes anything: the descriptors of this process can be counted then."""
    end_s = time.monotonic() + CLOSED_S_MAX
    while not (descriptors._memories.is_idle() and descriptors._others.is_idle()):
        assert time.monotonic() < end_s, "a thread still closes descriptors"
        time.sleep(0.001)

"""The time for which the machine may not run the threads of a device, as the admission of streams counts with it.

Owns the variable that has it. Without real-time scheduling other programs delay a thread for any time, which no number bounds; with
it the kernel may end a system call of another program first (``aionn doctor`` has the setting, and measures delays).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from aionn.errors import InvalidArgument

__all__ = ["DELAY_VARIABLE", "reserved_delay_ns"]

DELAY_VARIABLE = "AIONN_RESERVED_DELAY_US"

DELAY_US_MAX = 1_000_000
"""Longest delay that counts: a second. With more, no stream of a camera is admitted, so it is a mistake in the unit."""


def reserved_delay_ns(environment: Mapping[str, str] | None = None) -> int:
    """The delay of each slot of a device, see ``aionn.scheduler.admission``.

    Args:
        environment: The variables; None takes the process's.

    Raises:
        InvalidArgument: The variable has no such number.
    """
    text = (os.environ if environment is None else environment).get(DELAY_VARIABLE, "") or "0"
    if not (text.isascii() and text.isdecimal()) or int(text) > DELAY_US_MAX:
        raise InvalidArgument(f"{DELAY_VARIABLE}: expected from 0 to {DELAY_US_MAX} microseconds, got {text}")
    return 1000 * int(text)

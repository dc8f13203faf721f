"""Deadline and priority of a request, from the parameters of the protocol and the time that its transport leaves; pure.

Three durations can limit a request, and the first that passes counts:

- the transport's (``grpc-timeout``, ``X-Request-Timeout-Seconds``), from the arrival on;
- ``timeout`` in microseconds, a parameter of Triton. There it limits the wait in the queue alone; here the whole request, since an
  answer that comes later is of no use either;
- ``aionn_deadline_us``, from the capture of the frame on. The sender states the frame's age when it sends, ``aionn_age_us``: clocks
  of two machines need not agree. The time on the way cannot be seen here, so that the deadline is late by it.

Source: Triton, "Schedule Policy Extension"; gRPC over HTTP/2 (``grpc-timeout``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import aionn
from aionn.oip.requests import Parameter

__all__ = ["Terms", "terms_of"]

DURATION_US_MAX: Final = 10**15
"""Thirty years: a longer duration is a mistake, and would overflow times in nanoseconds."""

_REFUSED: Final = {
    "sequence_id": "sequences of requests",
    "sequence_start": "sequences of requests",
    "sequence_end": "sequences of requests",
}
"""Parameters that would change the answer, and what they ask for."""

_LEVELS: Final = {0: aionn.Priority.MEDIUM, 1: aionn.Priority.HIGH, 2: aionn.Priority.MEDIUM}


class Terms(NamedTuple):
    """The terms of one execution.

    Attributes:
        deadline_ns: On the clock of ``aionn.now_ns``; None without one.
        priority: Against other executions.
    """

    deadline_ns: int | None
    priority: aionn.Priority


def terms_of(parameters: Mapping[str, Parameter], arrived_ns: int, remaining_ns: int | None) -> Terms:
    """The terms of a request.

    Args:
        parameters: Of the request.
        arrived_ns: When it arrived.
        remaining_ns: The time that the transport leaves, from then on; None for any.

    Raises:
        InvalidArgument: A parameter has a wrong value, or asks for something that is not supported.
    """
    for name, feature in _REFUSED.items():
        if parameters.get(name) not in (None, 0, False, ""):
            raise aionn.InvalidArgument(f"parameter {name}: {feature} are not supported")
    ends = [] if remaining_ns is None else [arrived_ns + remaining_ns]
    timeout_us = _duration(parameters, "timeout")
    if timeout_us:  # 0 is Triton's word for none.
        ends.append(arrived_ns + timeout_us * 1000)
    age_us, within_us = _duration(parameters, "aionn_age_us"), _duration(parameters, "aionn_deadline_us")
    if within_us is not None:
        ends.append(arrived_ns + (within_us - (age_us or 0)) * 1000)
    elif age_us is not None:
        raise aionn.InvalidArgument(
            "parameter aionn_age_us: it has no effect alone; send aionn_deadline_us, from the capture on, as well"
        )
    # A frame that is too old may be due before the clock of this machine began.
    return Terms(max(0, min(ends)) if ends else None, _priority(parameters))


def _duration(parameters: Mapping[str, Parameter], name: str) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    number = _whole(value)
    if number is None or not 0 <= number <= DURATION_US_MAX:
        raise aionn.InvalidArgument(
            f"parameter {name}: expected microseconds from 0 to {DURATION_US_MAX}, got {value!r:.80}"
        )
    return number


def _priority(parameters: Mapping[str, Parameter]) -> aionn.Priority:
    """Triton's levels: 1 is the highest, 0 the default."""
    value = parameters.get("priority")
    if value is None:
        return aionn.Priority.MEDIUM
    number = _whole(value)
    if number is None or number < 0:
        raise aionn.InvalidArgument(
            f"parameter priority: expected 1 (highest), 0 or 2 (medium), 3 and more (low), got {value!r:.80}"
        )
    return _LEVELS.get(number, aionn.Priority.LOW)


def _whole(value: Parameter) -> int | None:
    """A whole number, which some clients send as a text; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= 20 and value.isascii() and value.isdecimal():
        return int(value)
    return None

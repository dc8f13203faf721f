"""The numbers that an option takes: declared in the command's signature, checked before the command runs."""

from __future__ import annotations

from typing import Any

import msgspec
from cyclopts import Parameter

from aionn.errors import InvalidArgument

__all__ = ["DEADLINE_MS_MAX", "SEED_MAX", "Range", "numbers"]

SEED_MAX = (1 << 63) - 1
"""Largest seed: what a message between processes carries as an integer."""

DEADLINE_MS_MAX = 366 * 86_400_000.0
"""Longest time until a deadline, a year: far from where nanoseconds since the start of the machine leave 64 bits."""


class Range(msgspec.Struct, frozen=True):
    """The numbers that an option takes; not a number is never one of them.

    Attributes:
        low: The smallest.
        high: The largest.
        unit: The unit of the number, for the message; empty for nothing.
        is_open: Whether ``low`` itself is refused.
    """

    low: float
    high: float
    unit: str = ""
    is_open: bool = False

    def has(self, value: float) -> bool:
        """Whether a number is taken."""
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __call__(self, kind: Any, value: Any) -> None:
        """Checks a value: a number, a tuple of them, or a default that is None. The option's name is added later.

        Raises:
            InvalidArgument: One is not taken.
        """
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not self.has(number):
                raise InvalidArgument(f"expected {self}")

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.is_open:
            return f"more than {_text(self.low)} and at most {_text(self.high)}{unit}"
        return f"from {_text(self.low)} to {_text(self.high)}{unit}"


def numbers(low: float, high: float, unit: str = "", *, is_open: bool = False) -> Parameter:
    """The annotation of an option that takes numbers from ``low`` to ``high``."""
    return Parameter(validator=Range(low, high, unit, is_open))


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"

"""Scripted faults: the executions of a simulated device that fail, and the form of the failure, chosen by a test instead of a seed.

Owns the script; ``aionn.drivers.simulated.driver`` causes the faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from aionn.drivers.simulated.profiles import Draw, Fault
from aionn.errors import InvalidArgument

__all__ = ["Fault", "scripted"]


def scripted(faults: Mapping[int, Fault | str], *, at_share: float = 0.5) -> Iterator[Draw]:
    """The draws of a device: the given faults, and nothing else. For ``SimulatedDevice(script=...)``.

    Args:
        faults: By number of the start, from 0: ``{2: "hang"}`` lets the third execution hang. One that is resumed after giving way
            has started once more.
        at_share: Where in the execution the fault strikes, from 0 to 1, as a share of its duration.

    Raises:
        InvalidArgument: A number is negative, there is no such fault, or the share is out of its range.
    """
    if not 0 <= at_share <= 1:
        raise InvalidArgument(f"at_share: expected a share from 0 to 1, got {at_share!r}")
    try:
        script = {number: Fault(fault) for number, fault in faults.items()}
    except ValueError as e:
        raise InvalidArgument(f"faults: expected {', '.join(fault.value for fault in Fault)}; {e}") from None
    if min(script, default=0) < 0:
        raise InvalidArgument(f"faults: expected numbers of at least 0, got {min(script)}")
    return (
        Draw(fault=script[number], at_share=at_share) if number in script else Draw()
        for number in itertools.count()
    )

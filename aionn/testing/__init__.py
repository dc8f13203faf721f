"""Tools for tests of timing: virtual time, described devices, faults by seed, small models.

Nothing of the product imports this package. Names are imported when first used, so that pytest starts as quickly with the plugin as
without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aionn.drivers.simulated.driver import SimulatedDevice
    from aionn.drivers.simulated.profiles import DeviceProfile
    from aionn.testing.clock import Deadlock, StuckPin, VirtualClock, VirtualClockLoop, run
    from aionn.testing.faults import Fault, scripted
    from aionn.testing.links import SimulatedLink

_HOME_BY_NAME = {
    "Deadlock": "aionn.testing.clock",
    "DeviceProfile": "aionn.drivers.simulated.profiles",
    "Fault": "aionn.testing.faults",
    "SimulatedDevice": "aionn.drivers.simulated.driver",
    "SimulatedLink": "aionn.testing.links",
    "StuckPin": "aionn.testing.clock",
    "VirtualClock": "aionn.testing.clock",
    "VirtualClockLoop": "aionn.testing.clock",
    "run": "aionn.testing.clock",
    "scripted": "aionn.testing.faults",
}

__all__ = [
    "Deadlock",
    "DeviceProfile",
    "Fault",
    "SimulatedDevice",
    "SimulatedLink",
    "StuckPin",
    "VirtualClock",
    "VirtualClockLoop",
    "run",
    "scripted",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_BY_NAME:
        raise AttributeError(f"module 'aionn.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_BY_NAME[name]), name)
    globals()[name] = value
    return value

"""Real-time scheduling, locked memory, a watchdog over real-time threads, and a check of the machine.

This package does not import the runtime or the drivers: they call it. Each part has a pure core, which takes the state of the
system as arguments, and a thin shell that reads and changes that state. Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aionn.realtime.collector import Collection, CollectorMode
    from aionn.realtime.memory import PageFaults, PageLocks
    from aionn.realtime.permission import Permission
    from aionn.realtime.priorities import SchedulingClass
    from aionn.realtime.scheduling import Mode, Scheduling, current
    from aionn.realtime.threads import ThreadRow, Threads
    from aionn.realtime.watchdog import RunLimit, Watchdog

_HOME_BY_NAME = {
    "Collection": "aionn.realtime.collector",
    "CollectorMode": "aionn.realtime.collector",
    "Mode": "aionn.realtime.scheduling",
    "PageFaults": "aionn.realtime.memory",
    "PageLocks": "aionn.realtime.memory",
    "Permission": "aionn.realtime.permission",
    "RunLimit": "aionn.realtime.watchdog",
    "Scheduling": "aionn.realtime.scheduling",
    "SchedulingClass": "aionn.realtime.priorities",
    "current": "aionn.realtime.scheduling",
    "ThreadRow": "aionn.realtime.threads",
    "Threads": "aionn.realtime.threads",
    "Watchdog": "aionn.realtime.watchdog",
}

__all__ = [
    "Collection",
    "CollectorMode",
    "Mode",
    "PageFaults",
    "PageLocks",
    "Permission",
    "RunLimit",
    "Scheduling",
    "SchedulingClass",
    "ThreadRow",
    "Threads",
    "Watchdog",
    "current",
]


def __getattr__(name: str) -> Any:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)

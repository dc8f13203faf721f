"""The runtime's objects as tables for notebooks; pure.

Owns which figures a notebook shows. ``aionn.reports`` has the tables; a notebook adds its own style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from aionn.hal import DeviceInfo
from aionn.reports.columns import counted
from aionn.reports.html_page import element, joined, table

__all__ = ["compilation_html", "counts_html", "device_html", "runtime_html"]

DevicesShown = Iterable[tuple[str, str, DeviceInfo]]
"""Of each device its name, its driver and its description."""


def runtime_html(is_open: bool, devices: DevicesShown, unavailable: Iterable[tuple[str, str]]) -> str:
    """A runtime: its devices, and those that are unavailable with the reason."""
    rows = [
        (name, info.type.name, driver, info.version, info.feature_level.name, info.slots)
        for name, driver, info in devices
    ]
    heads = ("device", "type", "driver", "version", "feature level", "slots")
    state = "open" if is_open else "closed"
    shown = table(heads, rows) if rows else None
    missing = [*unavailable]
    return joined(
        element("p", f"Runtime, {state}: {counted(len(rows), 'device')}"),
        shown,
        table(("unavailable", "reason"), missing, text=("reason",)) if missing else None,
    )


def device_html(name: str, driver: str, info: DeviceInfo, pid: int | None, waiting: int) -> str:
    """A device."""
    rows = [
        ("device", name),
        ("type", info.type.name),
        ("driver", f"{driver} {info.version}"),
        ("feature level", info.feature_level.name),
        ("slots", info.slots),
        ("driver process", "none" if pid is None else pid),
        ("executions that wait", waiting),
    ]
    return table((), rows)


def compilation_html(
    inputs: Sequence[object],
    outputs: Sequence[object],
    placement: Iterable[tuple[str, str]],
    from_cache: bool,
) -> str:
    """A compilation.

    Args:
        inputs: Descriptions of what it takes.
        outputs: Descriptions of what it gives.
        placement: Device and type of each operation.
        from_cache: Whether it came from the cache.
    """
    values = [("input", index, str(spec)) for index, spec in enumerate(inputs)]
    values += [("output", index, str(spec)) for index, spec in enumerate(outputs)]
    by_device = Counter(device for device, _ in placement)
    parts = [f"{device}: {counted(count, 'operation')}" for device, count in by_device.items()]
    origin = ", from the cache" if from_cache else ""
    return joined(
        element("p", f"Compilation{origin}; {'; '.join(parts) or 'no operations'}"),
        table(("", "index", "value"), values),
    )


def counts_html(counts: Iterable[tuple[str, int]]) -> str:
    """Counts by name."""
    return table((), [(name.replace("_", " "), count) for name, count in counts])

"""Objects of the runtime as tables for notebooks; pure.

Owns the form. The objects give the values; a notebook adds its own style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from aionn.reports.columns import counted
from aionn.reports.html_page import element, joined, table

__all__ = ["compilation_html", "runtime_html", "values_html"]


def runtime_html(
    is_open: bool, devices: Iterable[Sequence[object]], unavailable: Iterable[tuple[str, str]]
) -> str:
    """A runtime.

    Args:
        is_open: Whether it is open.
        devices: Of each device name, type, driver, version, feature level and slots.
        unavailable: Of each device that is unavailable its name and the reason.
    """
    rows = [*devices]
    heads = ("device", "type", "driver", "version", "feature level", "slots")
    state = "open" if is_open else "closed"
    shown = table(heads, rows) if rows else None
    missing = [*unavailable]
    return joined(
        element("p", f"Runtime, {state}: {counted(len(rows), 'device')}"),
        shown,
        table(("unavailable", "reason"), missing, text=("reason",)) if missing else None,
    )


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


def values_html(values: Iterable[tuple[str, object]]) -> str:
    """Values by name."""
    return table((), [*values])

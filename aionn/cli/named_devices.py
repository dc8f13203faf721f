"""The option ``--device`` of commands that open a runtime: also devices that are used only where they are named."""

from __future__ import annotations

from collections.abc import Sequence

from aionn.drivers import registry

__all__ = ["drivers_for"]


def drivers_for(devices: str | Sequence[str] | None) -> list[str] | None:
    """The drivers that a command opens, as ``aionn.open`` takes them.

    Args:
        devices: The device or devices that ``--device`` names; None means that it is absent.

    Returns:
        None, which means all that are used by default, unless a device is among them that is used only where it is named: then
        the drivers of the named devices.
    """
    names = [devices] if isinstance(devices, str) else list(devices or ())
    on_request = registry.devices_on_request()
    if not set(names).intersection(on_request):
        return None
    return [name for name in (*registry.driver_names(), *on_request) if name in names]

"""A device of a node (``aionn serve --listen``) as a suite tests it: by its address and its name.

Owns the check that the node has the device that was named, and the lists that count for it: those of the driver that is registered
here under the device's name, since the node has the same version of aionn.
"""

from __future__ import annotations

from aionn.conformance.expectations import Expectations, driver_expectations
from aionn.drivers import registry
from aionn.errors import InvalidArgument
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.platform.loops import finish

__all__ = ["device_of_node", "expectations_of"]


async def device_of_node(name: str, node: str) -> NodeDevice:
    """Connects to a node.

    Args:
        name: Of the device, ``NODE/DEVICE``.
        node: The node's address, as for ``aionn.open(fleet=[...])``.

    Raises:
        InvalidArgument: It is not an address, or the node has another device.
        DeviceUnavailable: The node cannot be reached.
    """
    device = NodeDevice(parse_node(node, "--fleet"))
    try:
        await device.connect()
        if device.info.name != name:
            raise InvalidArgument(
                f"--fleet {node}: expected the device {name!r}, the node has {device.info.name!r}"
            )
    except BaseException:
        await finish(device.aclose())
        raise
    return device


def expectations_of(device: str, node: str = "") -> Expectations:
    """The lists that count for a device.

    Args:
        device: The registered name of a driver, or module and attribute; of a node ``NODE/DEVICE``.
        node: The node's address; empty for a driver of this machine.

    Raises:
        InvalidArgument: No such driver, or a list of its module is invalid.
        DeviceUnavailable: It cannot be imported.
    """
    if not node:
        return driver_expectations(device)
    driver = device.rpartition("/")[2]
    return driver_expectations(driver) if driver in registry.driver_names() else Expectations()

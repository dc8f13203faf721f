"""HAL 1.0, 1.1 and 1.2: their types (``conversion``), and devices whose drivers know nothing newer (``device``)."""

from aionn.drivers.versions.conversion import HalVersion
from aionn.drivers.versions.device import VersionedDevice, VersionedPreparedModel

__all__ = ["HalVersion", "VersionedDevice", "VersionedPreparedModel"]

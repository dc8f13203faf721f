"""The pseudo-device of the steps that the runtime itself runs: an IF or WHILE that no device takes.

Presents the interpreter as a device: a name and no memories. Its steps take no slot of it: the steps inside wait for slots of
devices, which order them.

Source: the interpreter pseudo-device of the NN HAL's runtime (``ExecutionPlan``).
"""

from __future__ import annotations

from typing import NoReturn, cast

from aionn.errors import GeneralFailure
from aionn.hal import Device, DeviceInfo, DeviceType, FeatureLevel, uniform_capabilities
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.placement.division import INTERPRETER

__all__ = ["interpreter_device"]


def interpreter_device() -> RuntimeDevice:
    """A device for the step of one IF or WHILE."""
    return RuntimeDevice(INTERPRETER, INTERPRETER, cast(Device, _InterpreterDevice()))


class _InterpreterDevice:
    """The properties of a step's device that the runtime uses: its description, and whether it has memories."""

    info = DeviceInfo(
        INTERPRETER, DeviceType.OTHER, "1", FeatureLevel.LEVEL_8, uniform_capabilities(1.0, 1.0)
    )

    async def allocate(self, *arguments: object) -> NoReturn:
        """See ``Device``."""
        raise GeneralFailure(f"{INTERPRETER}: has no memories of its own")

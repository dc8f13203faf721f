"""The CPU reference driver: every operation of the spec, by the interpreter.

It defines the results that other devices are compared with, and is the device of a machine without another. Its performance numbers
are 1.0 by definition.

Source: the NN HAL's ``nnapi-reference`` device.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    FeatureLevel,
    Model,
    OutputShape,
    Priority,
    uniform_capabilities,
)
from aionn.interpreter import Interpreter, RunControl
from aionn.observability.tracing import section
from aionn.ops import CONTRACTS

__all__ = ["INFO", "ReferenceDevice", "info_for"]

MEMORY_BYTES_MAX = 1 << 30
"""Limit of all device memories together: more than the frames of any stream, and a bound for clients' requests."""

INFO = DeviceInfo(
    name="reference",
    type=DeviceType.CPU,
    version="1",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=uniform_capabilities(1.0, 1.0),
    cache_files=CacheFileCounts(1, 1),
    cancel=CancelCapability.BETWEEN_OPERATIONS,
    takes_images=True,
)


def info_for(name: str) -> DeviceInfo:
    """The DeviceInfo of the device of this name."""
    return msgspec.structs.replace(INFO, name=name)


class ReferenceDevice(BlockingDevice):
    """Runs any valid model without extensions, one execution at a time."""

    is_preemptible = True
    prepares_beside = True

    def __init__(self, name: str = INFO.name) -> None:
        super().__init__(info_for(name), memory_bytes_max=MEMORY_BYTES_MAX)

    def supports(self, model: Model) -> Sequence[bool]:
        """True for every operation of the spec; False for vendor extensions and the deprecated OEM operation."""
        return [operation.type in CONTRACTS for operation in model.main.operations]

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> ReferencePreparedModel:
        return ReferencePreparedModel(self, model, priority)


class ReferencePreparedModel(BlockingPreparedModel):
    """A model with its constants decoded."""

    def __init__(self, device: ReferenceDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        self._interpreter: Interpreter | None = Interpreter(model)

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        interpreter = self._interpreter
        assert interpreter is not None, "released when nothing runs any more"
        with section("LC_PCO", "interpreter"):
            results = interpreter.run(inputs, control)
        return [area.store(array) for area, array in zip(outputs, results, strict=True)]

    def release(self) -> None:
        """See the base class."""
        self._interpreter = None

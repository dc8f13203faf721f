"""The driver ``litert-cpu``: models on LiteRT's CPU kernels and XNNPACK, in the driver's process.

Owns the device, which LiteRT versions it takes, and prepared models with one warm interpreter per slot. ``lowering`` converts
models; nothing of LiteRT is imported before a model comes, so that clients can call ``info_for`` at no cost.

Invariants:
1. An operation is supported when it was lowered and LiteRT planned the result.
2. A prepared model has as many interpreters as the device has slots; one runs in one thread at a time.

Source: the NN HAL's driver contract; LiteRT's Python package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.caching import KeptFile
from aionn.drivers.kit.engines.device import (
    EngineDevice,
    EnginePreparedModel,
    Kept,
    LoweredModel,
    Slot,
    measured_capabilities,
)
from aionn.drivers.kit.engines.installed import check_version, version_of
from aionn.drivers.kit.engines.native import native_call
from aionn.drivers.kit.gate import GateControl
from aionn.drivers.litert.expectations import EXPECTED_DIFFERENCES, EXPECTED_FAILURES, UNSUPPORTED
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    FeatureLevel,
    GiveNativeCall,
    Model,
    NativeCall,
    OutputShape,
    Priority,
)
from aionn.interpreter import RunControl

if TYPE_CHECKING:
    from aionn.drivers.litert.in_place import InPlaceEngine
    from aionn.drivers.litert.lowering import Lowered

__all__ = ["EXPECTED_DIFFERENCES", "EXPECTED_FAILURES", "INFO", "UNSUPPORTED", "LitertDevice", "info_for"]

DISTRIBUTION = "ai-edge-litert"
VERSION_MIN = (2, 0)

THREADS_VARIABLE = "AIONN_LITERT_THREADS"
"""Environment variable with the number of threads of each interpreter; 1 without it."""

FLOAT_TIME, SIGNED_TIME = 0.22, 0.06
"""Execution time over the reference device's on mobilenet_v2_1.0_224 in float32 and int8, on one thread each: 3.4 of 14.7 ms and
1.6 of 26.1 ms. Types without a figure of their own take the larger one, and energy follows time. ``python -m benchmarks.models
--capabilities`` measures both again; it wants a machine that does nothing else."""


INFO = DeviceInfo(
    name="litert-cpu",
    type=DeviceType.CPU,
    version="3",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=measured_capabilities(FLOAT_TIME, SIGNED_TIME),
    cache_files=CacheFileCounts(1, 1),
    slots=2,
    cancel=CancelCapability.NONE,
)


def info_for(name: str) -> DeviceInfo:
    """The DeviceInfo of the device of this name.

    Raises:
        DeviceUnavailable: LiteRT is not installed, or too old.
    """
    found = check_version(DISTRIBUTION, version_of(DISTRIBUTION), VERSION_MIN, "litert")
    return msgspec.structs.replace(INFO, name=name, version=f"{INFO.version} LiteRT {found}")


class LitertDevice(EngineDevice):
    """LiteRT on the CPU. Two concurrent executions, each on the number of threads in ``AIONN_LITERT_THREADS`` (1 without).

    Raises:
        DeviceUnavailable: LiteRT is not installed or too old, or a variable makes no sense.
    """

    def __init__(self, name: str = INFO.name) -> None:
        super().__init__(info_for(name), THREADS_VARIABLE)

    def load_engine(self) -> None:
        """See the base class."""
        from aionn.drivers.litert import engine as engine

    def lower(self, model: Model) -> Lowered:
        from aionn.drivers.litert import lowering

        return lowering.lower(model)

    def check(self, lowered: LoweredModel) -> None:
        from aionn.drivers.litert import engine

        engine.check(cast("Lowered", lowered))

    def make(
        self, model: Model, lowered: LoweredModel, priority: Priority, deadline_ns: int | None
    ) -> LitertPreparedModel:
        return LitertPreparedModel(self, model, priority, cast("Lowered", lowered))

    def load(
        self, kept: Kept, file: KeptFile, priority: Priority, deadline_ns: int | None
    ) -> LitertPreparedModel:
        from aionn.drivers.litert.lowering import Lowered

        details = _DETAILS.decode(kept.details)
        lowered = Lowered(
            file.take(),
            kept.is_read,
            kept.fixed(),
            details.is_static,
            details.is_input_in_place,
            details.is_output_in_place,
        )
        return LitertPreparedModel(self, kept.model, priority, lowered)


class _Details(msgspec.Struct, frozen=True):
    """The part of a cached compilation beside the lowered file."""

    is_static: bool
    is_input_in_place: tuple[bool, ...]
    is_output_in_place: tuple[bool, ...]


_DETAILS = msgspec.msgpack.Decoder(_Details)


class LitertPreparedModel(EnginePreparedModel):
    """A lowered model in one interpreter per slot."""

    def __init__(self, device: LitertDevice, model: Model, priority: Priority, lowered: Lowered) -> None:
        from aionn.drivers.litert.engine import make_engines
        from aionn.drivers.litert.in_place import InPlaceEngine

        shapes = [
            tuple(operand.dimensions)
            for operand, value in zip(model.main.outputs, lowered.fixed, strict=True)
            if value is None
        ]

        def make() -> Sequence[Slot]:
            return make_engines(lowered, device.thread_count, shapes, device.info.slots) if shapes else []

        super().__init__(device, model, priority, lowered, make)
        # By the device's slots; empty where the engines cannot be called without Python.
        engines = [engine for engine in self._idle if isinstance(engine, InPlaceEngine)]
        self._by_slot: Sequence[InPlaceEngine] = engines if device.is_native else ()

    def _run_file(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        if not self._by_slot:
            return super()._run_file(inputs, outputs, control)
        # Calls without Python use the engine of their slot, and so does every other execution.
        assert isinstance(control, GateControl) and control.slot is not None, "it runs in a slot"
        return self._by_slot[control.slot].run(inputs, outputs)

    @property
    def native(self) -> GiveNativeCall | None:  # type: ignore[override]
        """See ``PreparedModel``: calls of LiteRT's own function."""
        return self._native_call if self._by_slot else None

    def _native_call(self, arguments: Any) -> NativeCall | None:
        return native_call(self, self._by_slot, arguments, "LiteRT")

    def release(self) -> None:
        self._by_slot = ()
        super().release()

    def kept_details(self) -> tuple[msgspec.Struct, bytes]:
        """See the base class."""
        lowered = cast("Lowered", self._lowered)
        details = _Details(lowered.is_static, lowered.is_input_in_place, lowered.is_output_in_place)
        return details, lowered.file

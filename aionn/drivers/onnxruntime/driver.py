"""The driver ``ort-cpu``: models on ONNX Runtime's CPU kernels, in the driver's process; ``ort-*`` on its other providers.

Owns the device, and prepared models with one session and a slot for each of the device's. ``lowering`` converts models, ``engine``
runs them, ``providers`` defines the names; nothing of ONNX Runtime is imported before a model comes, so that clients can call
``info_for`` at no cost.

Invariants:
1. An operation is supported when it was lowered and ONNX Runtime has kernels for the result.
2. A prepared model has one session, and as many slots as the device; a slot runs in one thread at a time.

Source: the NN HAL's driver contract; ONNX Runtime's Python package.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from aionn.drivers.kit.engines.device import (
    Kept,
    LoweredModel,
    StoppablePreparedModel,
    measured_capabilities,
)
from aionn.drivers.kit.engines.installed import processor_digest
from aionn.drivers.kit.onnx.device import OnnxDevice
from aionn.drivers.kit.onnx.lowered import OPSET, Argument, Lowered
from aionn.drivers.onnxruntime.expectations import EXPECTED_DIFFERENCES, EXPECTED_FAILURES, UNSUPPORTED
from aionn.drivers.onnxruntime.providers import Provider, installed_version, provider_named
from aionn.errors import GeneralFailure
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    FeatureLevel,
    Model,
    Priority,
)
from aionn.models.onnx.extension import EXTENSION

if TYPE_CHECKING:
    from aionn.drivers.onnxruntime import engine

__all__ = [
    "EXPECTED_DIFFERENCES",
    "EXPECTED_FAILURES",
    "INFO",
    "UNSUPPORTED",
    "OrtDevice",
    "factory_for",
    "info_for",
]

THREADS_VARIABLE = "AIONN_ORT_THREADS"
"""Environment variable with the number of threads of an execution; 1 without it."""

FLOAT_TIME, SIGNED_TIME = 0.25, 0.07
"""Execution time over the reference device's on mobilenet_v2_1.0_224 in float32 and int8, on one thread each. Types without a
figure of their own take the larger one, and energy follows time."""


INFO = DeviceInfo(
    name="ort-cpu",
    type=DeviceType.CPU,
    version="1",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=measured_capabilities(FLOAT_TIME, SIGNED_TIME),
    cache_files=CacheFileCounts(1, 1),
    slots=2,
    cancel=CancelCapability.BETWEEN_OPERATIONS,
    extensions=(EXTENSION,),
)


def info_for(name: str, driver: str = INFO.name) -> DeviceInfo:
    """The DeviceInfo of the device of this name.

    Args:
        name: The device's name.
        driver: The driver's, which decides the provider.

    Raises:
        DeviceUnavailable: ONNX Runtime is not installed, too old, or installed twice, or there is no such provider.
    """
    provider = provider_named(driver)
    version = f"{INFO.version} ONNX Runtime {installed_version()} {provider.name} opset {OPSET}"
    if provider.is_cpu:
        return msgspec.structs.replace(INFO, name=name, version=version)
    return msgspec.structs.replace(
        INFO,
        name=name,
        version=version,
        type=DeviceType.GPU if "CUDA" in provider.name else DeviceType.ACCELERATOR,
        slots=1,
        cancel=CancelCapability.NONE,
    )


class OrtDevice(OnnxDevice):
    """ONNX Runtime on one execution provider. On the CPU two concurrent executions, each on the number of threads in
    ``AIONN_ORT_THREADS`` (1 without).

    Raises:
        DeviceUnavailable: ONNX Runtime cannot be used, or the number of threads makes no sense.
    """

    def __init__(self, name: str = INFO.name, driver: str = INFO.name) -> None:
        super().__init__(info_for(name, driver), THREADS_VARIABLE)
        self.provider: Provider = provider_named(driver)

    def check_new(self, lowered: Lowered) -> None:
        """See the base class."""
        from aionn.drivers.onnxruntime import engine

        engine.check(lowered, self.provider)

    def make(
        self, model: Model, lowered: LoweredModel, priority: Priority, deadline_ns: int | None
    ) -> OrtPreparedModel:
        """See the base class."""
        from aionn.drivers.onnxruntime.engine import Loading, compile_session

        onnx = cast(Lowered, lowered)
        if not onnx.file:
            return OrtPreparedModel(self, model, priority, onnx, None, Form.PLAIN)
        loading = Loading(self.provider, self.thread_count)
        with self.interrupts.watching(deadline_ns, None, loading.stop):
            session, is_optimized = compile_session(onnx, loading)
        form = Form.OPTIMIZABLE if is_optimized else Form.PLAIN
        return OrtPreparedModel(self, model, priority, onnx, session, form)

    def load(self, kept: Kept, file: bytes, priority: Priority, deadline_ns: int | None) -> OrtPreparedModel:
        """The cache has the optimised model: nothing is lowered or optimised again."""
        from aionn.drivers.onnxruntime.engine import Loading, restore_session

        details = _DETAILS.decode(kept.details)
        if details.processor != processor_digest():
            raise GeneralFailure("compilation cache: the model was optimised for another processor")
        lowered = Lowered(file, kept.is_read, kept.fixed(), details.inputs, details.outputs)
        session = None
        if file:
            loading = Loading(self.provider, self.thread_count)
            with self.interrupts.watching(deadline_ns, None, loading.stop):
                session = restore_session(file, loading, is_optimized=details.form == Form.OPTIMIZED)
        return OrtPreparedModel(self, kept.model, priority, lowered, session, details.form)


class Form(enum.StrEnum):
    """The kind of a prepared model's file: an ONNX model that is to be optimised or not, or ONNX Runtime's optimised one."""

    OPTIMIZABLE = "optimizable"
    PLAIN = "plain"
    OPTIMIZED = "optimized"


def factory_for(driver: str) -> type[OrtDevice]:
    """The device of a driver's name; see ``aionn.drivers.registry``."""

    class Named(OrtDevice):
        def __init__(self, name: str = driver) -> None:
            super().__init__(name, driver)

    return Named


class _Details(msgspec.Struct, frozen=True):
    """The part of a cached compilation beside ONNX Runtime's model."""

    form: Form
    processor: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]


_DETAILS = msgspec.msgpack.Decoder(_Details)


class OrtPreparedModel(StoppablePreparedModel):
    """A lowered model in one session, with a slot for each of the device's.

    Args:
        device: The device.
        model: The HAL model.
        priority: See ``BlockingPreparedModel``.
        lowered: The lowered model.
        session: Its session; None where no output depends on an input.
        form: What the file in ``lowered`` is.
    """

    device: OrtDevice

    def __init__(
        self,
        device: OrtDevice,
        model: Model,
        priority: Priority,
        lowered: Lowered,
        session: Any,
        form: Form,
    ) -> None:
        def make() -> Sequence[engine.Slot]:
            from aionn.drivers.onnxruntime import engine

            return [engine.Slot(session, lowered) for _ in range(device.info.slots)]

        super().__init__(device, model, priority, lowered, list if session is None else make)
        self._form = form

    def kept_details(self) -> tuple[msgspec.Struct, bytes]:
        """The optimised model."""
        from aionn.drivers.onnxruntime.engine import optimized_bytes

        lowered = cast(Lowered, self._lowered)
        file, form = lowered.file, self._form
        if form == Form.OPTIMIZABLE:
            file, form = optimized_bytes(lowered, self.device.provider), Form.OPTIMIZED
        return _Details(form, processor_digest(), lowered.inputs, lowered.outputs), file

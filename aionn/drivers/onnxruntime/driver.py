"""The driver ``ort-cpu``: models on ONNX Runtime's CPU kernels, in the driver's process; ``ort-*`` on its other providers.

Owns the device. ``kit.onnx`` lowers models and has the prepared ones, ``engine`` compiles and runs them, ``providers`` defines the
names; nothing of ONNX Runtime is imported before a model comes, so that clients can call ``info_for`` at no cost.

Invariants:
1. An operation is supported when it was lowered and ONNX Runtime has kernels for the result.
2. A prepared model has one session, and as many slots as the device; a slot runs in one thread at a time.

Source: the NN HAL's driver contract; ONNX Runtime's Python package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from aionn.drivers.kit.caching import KeptFile
from aionn.drivers.kit.engines.device import measured_capabilities
from aionn.drivers.kit.onnx.device import OnnxDevice
from aionn.drivers.kit.onnx.lowered import OPSET, Dialect, Lowered
from aionn.drivers.onnxruntime.expectations import EXPECTED_DIFFERENCES, EXPECTED_FAILURES, UNSUPPORTED
from aionn.drivers.onnxruntime.gaps import foreign_gap_of, gap_of
from aionn.drivers.onnxruntime.providers import Provider, installed_version, provider_named
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    DeviceInfo,
    DeviceType,
    FeatureLevel,
    Priority,
)
from aionn.models.onnx.extension import EXTENSION

if TYPE_CHECKING:
    from aionn.drivers.onnxruntime.engine import Session

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
    version="2",
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


_ON_CPU = Dialect(gap_of=gap_of, takes_weights=True)

# CUDA's kernels do not report an index that is out of range, and BitwiseXor has no kernel.
_ELSEWHERE = Dialect(reports_indexes=False, has_bitwise=False, gap_of=foreign_gap_of)


class OrtDevice(OnnxDevice):
    """ONNX Runtime on one execution provider. On the CPU two concurrent executions, each on the number of threads in
    ``AIONN_ORT_THREADS`` (1 without).

    Raises:
        DeviceUnavailable: ONNX Runtime cannot be used, or the number of threads makes no sense.
    """

    def __init__(self, name: str = INFO.name, driver: str = INFO.name) -> None:
        super().__init__(info_for(name, driver), THREADS_VARIABLE)
        self.provider: Provider = provider_named(driver)
        self.dialect = _ON_CPU if self.provider.is_cpu else _ELSEWHERE

    def load_engine(self) -> None:
        """See the base class."""
        from aionn.drivers.onnxruntime import engine as engine

    def is_accepted(self, lowered: Lowered) -> bool:
        """See the base class. Other providers take a kind of node with some attributes and not with others."""
        return not lowered.file or (self.provider.is_cpu and super().is_accepted(lowered))

    def check_new(self, lowered: Lowered) -> None:
        """See the base class."""
        from aionn.drivers.onnxruntime import engine

        engine.check(lowered, self.provider)

    def compile(
        self, lowered: Lowered, *, is_relaxed: bool, priority: Priority, deadline_ns: int | None
    ) -> Session:
        """See the base class."""
        from aionn.drivers.onnxruntime.engine import Loading, compile_session

        loading = Loading(self.provider, self.thread_count, is_relaxed=is_relaxed, is_native=self.is_native)
        with self.interrupts.watching(deadline_ns, None, loading.stop):
            return compile_session(lowered, loading)

    def load_compiled(
        self,
        file: KeptFile,
        form: str,
        *,
        is_relaxed: bool,
        priority: Priority,
        deadline_ns: int | None,
    ) -> Session:
        """See the base class."""
        from aionn.drivers.onnxruntime.engine import Loading, restore_session

        loading = Loading(self.provider, self.thread_count, is_relaxed=is_relaxed, is_native=self.is_native)
        with self.interrupts.watching(deadline_ns, None, loading.stop):
            return restore_session(file, form, loading)


def factory_for(driver: str) -> Callable[[str], OrtDevice]:
    """The device of a driver's name; see ``aionn.drivers.registry``."""

    def make(name: str = driver) -> OrtDevice:
        return OrtDevice(name, driver)

    return make

"""The description of a device: type, level, performance, extensions.

Owns the records that are queried once and never change for a driver's build. Lower performance numbers are better; 1.0 is the
CPU reference device.

Invariants (checked by ``aionn.validation.check_capabilities``):
1. ``operand_performance`` is sorted by type, unique, and has no SUBGRAPH entry.
2. Every ratio is positive and finite.

Source: ``Capabilities``, ``DeviceType``, ``DeviceStatus``, ``Extension`` of the NN HAL 1.3.
"""

from __future__ import annotations

import enum
import sys

import msgspec

from aionn.hal.operand import OperandType

__all__ = [
    "CACHE_FILES_MAX",
    "CACHE_TOKEN_BYTES",
    "NO_PERFORMANCE",
    "CacheFileCounts",
    "CancelCapability",
    "Capabilities",
    "DeviceInfo",
    "DeviceStatus",
    "DeviceType",
    "Extension",
    "ExtensionNameAndPrefix",
    "ExtensionOperandType",
    "FeatureLevel",
    "OperandPerformance",
    "PerformanceInfo",
    "uniform_capabilities",
]

CACHE_FILES_MAX = 32
"""Most model or data cache files that a device may ask for; the spec's number."""

CACHE_TOKEN_BYTES = 32
"""Length of a compilation caching token; the spec's number."""


class FeatureLevel(enum.IntEnum):
    """Feature levels: 1 to 4 are HAL 1.0 to 1.3, 5 to 8 are AIDL versions 1 to 4."""

    LEVEL_1 = 1
    LEVEL_2 = 2
    LEVEL_3 = 3
    LEVEL_4 = 4
    LEVEL_5 = 5
    LEVEL_6 = 6
    LEVEL_7 = 7
    LEVEL_8 = 8


class DeviceType(enum.IntEnum):
    """The kind of hardware. 0 is used by the runtime alone: an unknown type."""

    UNKNOWN = 0
    OTHER = 1
    CPU = 2
    GPU = 3
    ACCELERATOR = 4


class DeviceStatus(enum.IntEnum):
    """Whether a device can take work now."""

    AVAILABLE = 0
    BUSY = 1
    OFFLINE = 2
    UNKNOWN = 3


class CancelCapability(enum.IntEnum):
    """When a running execution can be stopped. Declared by the driver and measured by the conformance suite."""

    NONE = 0
    BETWEEN_OPERATIONS = 1
    ANYTIME = 2


class PerformanceInfo(msgspec.Struct, frozen=True, array_like=True):
    """Ratios to the CPU reference device; lower is better.

    Attributes:
        exec_time: Execution time over the reference's.
        power_usage: Energy over the reference's.
    """

    exec_time: float
    power_usage: float


NO_PERFORMANCE = PerformanceInfo(sys.float_info.max, sys.float_info.max)
"""The performance of a type without an entry: the worst possible."""


class OperandPerformance(msgspec.Struct, frozen=True, array_like=True):
    """Performance of operations whose first input has this type."""

    type: OperandType
    info: PerformanceInfo


class Capabilities(msgspec.Struct, frozen=True, array_like=True):
    """A device's performance by operand type.

    Attributes:
        relaxed_float32_to_float16_scalar: For FLOAT32 in relaxed models.
        relaxed_float32_to_float16_tensor: For TENSOR_FLOAT32 in relaxed models.
        operand_performance: One entry per type, sorted by type; a type that is absent counts as ``NO_PERFORMANCE``.
        if_performance: Cost of an IF without its branches.
        while_performance: Cost of a WHILE without its subgraphs.
    """

    relaxed_float32_to_float16_scalar: PerformanceInfo
    relaxed_float32_to_float16_tensor: PerformanceInfo
    operand_performance: tuple[OperandPerformance, ...]
    if_performance: PerformanceInfo
    while_performance: PerformanceInfo

    def performance(self, operand_type: int, *, is_relaxed: bool = False) -> PerformanceInfo:
        """The entry for a type, ``NO_PERFORMANCE`` without one.

        The lookup checks equality: AOSP's returns the next type's entry where one is missing.
        """
        if is_relaxed and operand_type == OperandType.FLOAT32:
            return self.relaxed_float32_to_float16_scalar
        if is_relaxed and operand_type == OperandType.TENSOR_FLOAT32:
            return self.relaxed_float32_to_float16_tensor
        for entry in self.operand_performance:
            if entry.type == operand_type:
                return entry.info
        return NO_PERFORMANCE


def uniform_capabilities(exec_time: float, power_usage: float) -> Capabilities:
    """Capabilities with the same ratios for every operand type."""
    info = PerformanceInfo(exec_time, power_usage)
    return Capabilities(
        relaxed_float32_to_float16_scalar=info,
        relaxed_float32_to_float16_tensor=info,
        operand_performance=tuple(
            OperandPerformance(member, info)
            for member in sorted(OperandType)
            if member != OperandType.SUBGRAPH
        ),
        if_performance=info,
        while_performance=info,
    )


class ExtensionOperandType(msgspec.Struct, frozen=True, array_like=True):
    """One operand type of an extension: its low 16 bits, and the size of an element."""

    type: int
    is_tensor: bool
    byte_size: int


class Extension(msgspec.Struct, frozen=True, array_like=True):
    """A vendor extension that a device supports: a reverse-domain name and its operand types."""

    name: str
    operand_types: tuple[ExtensionOperandType, ...] = ()


class ExtensionNameAndPrefix(msgspec.Struct, frozen=True, array_like=True):
    """The number of an extension in one model: the prefix is the high bits of the extension's codes, never 0."""

    name: str
    prefix: int


class CacheFileCounts(msgspec.Struct, frozen=True, array_like=True):
    """Number of cache files of a device; (0, 0) means that it does not cache."""

    model: int = 0
    data: int = 0


class DeviceInfo(msgspec.Struct, frozen=True):
    """Everything about a device that never changes for a build of its driver.

    Attributes:
        name: ``<vendor>-<accelerator>`` for drivers of others; unique in a runtime.
        type: The kind of hardware.
        version: Non-empty; changes with every change of the driver that changes results or cache files.
        feature_level: The highest level that the driver answers for.
        capabilities: Performance by operand type.
        extensions: Vendor extensions it supports.
        cache_files: Number of cache files that it wants.
        slots: Number of executions that it can run concurrently; at least 1.
        cancel: When a running execution can be stopped.
        takes_images: Whether executions may read and write images (memory of kind ``hardware_buffer``).
    """

    name: str
    type: DeviceType
    version: str
    feature_level: FeatureLevel
    capabilities: Capabilities
    extensions: tuple[Extension, ...] = ()
    cache_files: CacheFileCounts = CacheFileCounts()
    slots: int = 1
    cancel: CancelCapability = CancelCapability.NONE
    takes_images: bool = False

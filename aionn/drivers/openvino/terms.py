"""The promises of a device of OpenVINO, and the properties that its models are compiled with, from its description.

Owns the description: a table of the properties that OpenVINO reports of a device; and the decisions that follow from it. Nothing of
OpenVINO is imported here, so that the decisions for hardware that is not there can be tested.

Invariants:
1. Numbers are computed in float32. Float16 is chosen only for models that allow it (``relax_computation_float32_to_float16``), and
   bfloat16 never: it has fewer digits than the HAL allows.
2. Only properties that the device reports as writable are set; one other where its integers would be wrong.

Source: "Supported Properties" of OpenVINO's plugins.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aionn.hal import CancelCapability, DeviceType, Priority

__all__ = ["SLOTS_MAX", "Description", "Terms", "properties_for", "terms_of"]

SLOTS_MAX = 2
"""Executions that run concurrently: one computes while the data of the other one are copied, or on another core."""

_PRIORITIES = {Priority.LOW: "LOW", Priority.MEDIUM: "MEDIUM", Priority.HIGH: "HIGH"}


class Description(msgspec.Struct, frozen=True):
    """A device as OpenVINO describes it.

    Attributes:
        device: OpenVINO's name, such as ``CPU`` or ``GPU.1``.
        full_name: FULL_DEVICE_NAME.
        capabilities: OPTIMIZATION_CAPABILITIES: types that it computes in, and EXPORT_IMPORT.
        writable: The names of the properties that can be set.
        streams_max: The larger number of RANGE_FOR_STREAMS.
        driver_version: The version of the device's own driver, as text; empty without one.
        saturates: Whether its sums of products of bytes saturate; see ``hardware.saturates``.
    """

    device: str
    full_name: str
    capabilities: tuple[str, ...]
    writable: frozenset[str]
    streams_max: int = 1
    driver_version: str = ""
    saturates: bool = False

    @property
    def kind(self) -> str:
        """``CPU``, ``GPU`` or ``NPU``."""
        return self.device.partition(".")[0]


class Terms(msgspec.Struct, frozen=True):
    """The promises of a device.

    Attributes:
        type: Its type.
        slots: Executions that run concurrently.
        model_count: Compiled models of each prepared one: one for each slot, or one with a stream for each slot.
        cancel: Where an execution can be stopped.
        is_cached: Whether compiled models can be kept.
        precision: The type that floats are computed in.
        relaxed_precision: The same for models that allow float16.
        needs_relaxed: Whether it computes only models that allow float16.
    """

    type: DeviceType
    slots: int
    model_count: int
    cancel: CancelCapability
    is_cached: bool
    precision: str
    relaxed_precision: str
    needs_relaxed: bool


def terms_of(description: Description) -> Terms:
    """The promises of a device.

    A cancelled request stops between two nodes on the CPU; the GPU ignores the call, and the NPU does not have it.

    On the CPU a model is compiled for one stream: the graphs of several streams are made concurrently and share their weights, and
    in one of forty compilations of a quantised layer (OpenVINO 2026.4) they were wrong.
    """
    kind = description.kind
    has_float16 = "FP16" in description.capabilities
    has_float32 = kind == "CPU" or "FP32" in description.capabilities
    return Terms(
        {"CPU": DeviceType.CPU, "GPU": DeviceType.GPU}.get(kind, DeviceType.ACCELERATOR),
        max(1, min(SLOTS_MAX, description.streams_max)) if kind != "CPU" else SLOTS_MAX,
        SLOTS_MAX if kind == "CPU" else 1,
        CancelCapability.BETWEEN_OPERATIONS if kind == "CPU" else CancelCapability.NONE,
        "EXPORT_IMPORT" in description.capabilities,
        "f32",
        "f16" if has_float16 else "f32",
        not has_float32,
    )


def properties_for(
    description: Description, *, is_relaxed: bool, thread_count: int, priority: Priority
) -> Mapping[str, str]:
    """The properties that a model is compiled with.

    Args:
        description: The device.
        is_relaxed: Whether the model allows float16.
        thread_count: Threads of each execution, of a device that computes on the processor.
        priority: Of the model, for devices that have priorities of their own.
    """
    terms = terms_of(description)
    streams = terms.slots // terms.model_count
    wanted = {
        "PERFORMANCE_HINT": "LATENCY",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "INFERENCE_PRECISION_HINT": terms.relaxed_precision if is_relaxed else terms.precision,
        # By default 32 numbers share a scale of 8 bits in large products of matrices.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(streams * thread_count),
        # By default the threads of every process are bound to the same cores.
        "ENABLE_CPU_PINNING": "NO",
        "MODEL_PRIORITY": _PRIORITIES[priority],
    }
    found = {name: value for name, value in wanted.items() if name in description.writable}
    if description.saturates:
        # Quantised layers are computed with floats then. The plugin takes this property and does not list it.
        found["LP_TRANSFORMS_MODE"] = "NO"
    return found

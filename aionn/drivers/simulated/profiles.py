"""Described devices: how long an operation takes on hardware that is not there, by operation and byte counts alone.

Owns the description (``DeviceProfile``), the cost of a model (``ModelCost``), the durations that follow from the two, the clock's
ramp, what noise and which failures a seed draws, and the ready profiles. Refuses to own time: it reads no clock and never waits.
The simulated driver and the simulator at scale share it, and so agree to the nanosecond.

Invariants:
1. Durations are positive integers: ``max(arithmetic / rate, bytes / bandwidth) / clock share + overhead``, at least 1 ns.
2. Profile, seed and position in the sequence alone decide noise and failure, on every Python and under every hash seed.
3. The clock's share stays within [``cold_share``, 1]; an open burst keeps it from falling.

Source: the roofline model; clock ramp-up after the NN HAL's rule that a burst may hold the device in a high-performance state.
Rates of the ready profiles are of the order of published figures for such hardware; they describe no product.
"""

from __future__ import annotations

import enum
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from aionn.drivers.kit.described import read_described
from aionn.errors import InvalidArgument
from aionn.hal import (
    OPERAND_TYPE_PROPERTIES,
    CancelCapability,
    DeviceType,
    Model,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_extension_operand_type,
    operand_size_bytes,
)

__all__ = [
    "DEVICE_SETS",
    "PROFILES",
    "ClockRamp",
    "ClockState",
    "DeviceProfile",
    "Draw",
    "FailureRates",
    "Fault",
    "ModelCost",
    "OperationCost",
    "Power",
    "clock_share_at",
    "draws",
    "model_cost",
    "model_duration_ns",
    "operation_durations_ns",
    "profile_named",
    "read_profile",
    "run_operations",
    "supports_operation",
    "unsupported_reason",
]

DATA_TYPES = ("float32", "float16", "int8")
"""The data types that a rate is given for; every operand type counts as one of them."""


class ClockRamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dependence of the clock on the load.

    Attributes:
        cold_share: Share of the full rate after a rest; 1 for a clock that never falls.
        ramp_ns: Busy time from cold to full.
        hold_ns: Rest after which the clock falls back to cold.
    """

    cold_share: float = 1.0
    ramp_ns: int = 0
    hold_ns: int = 0


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Power of the device, in watts."""

    idle_w: float = 0.0
    busy_w: float = 0.0


class FailureRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Probability per execution of each way to fail; the rest succeeds."""

    transient: float = 0.0
    persistent: float = 0.0
    hang: float = 0.0
    death: float = 0.0


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device, described.

    Attributes:
        name: The device's name.
        type: ``cpu``, ``gpu``, ``accelerator`` or ``other``.
        slots: Executions that it runs concurrently, each at the full rate.
        rates: Arithmetic operations per second by data type (``float32``, ``float16``, ``int8``); an absent one is not supported.
        memory_bandwidth: Bytes per second.
        operation_overhead_ns: Paid by every operation.
        launch_overhead_ns: Paid once by every execution, before its first operation.
        clock: Dependence of the clock on the load.
        power: Its power.
        memory_bytes_max: Most bytes that the constants and temporaries of a model may take; None means no limit.
        unsupported_operations: Names of the operations that it cannot run.
        supported_operations: If not empty, the only ones that it can.
        preemption: ``none``, ``between_operations`` or ``anytime``: where a running execution can be preempted.
        noise: Standard deviation of the logarithm of an execution's duration over its expected one; 0 for exact durations.
        failures: Probabilities of failing.
    """

    name: str
    type: str = "other"
    slots: int = 1
    rates: dict[str, float]
    memory_bandwidth: float
    operation_overhead_ns: int = 0
    launch_overhead_ns: int = 0
    clock: ClockRamp = ClockRamp()
    power: Power = Power()
    memory_bytes_max: int | None = None
    unsupported_operations: tuple[str, ...] = ()
    supported_operations: tuple[str, ...] = ()
    preemption: str = "between_operations"
    noise: float = 0.0
    failures: FailureRates = FailureRates()

    def __post_init__(self) -> None:
        # msgspec turns a ValueError here into a ValidationError with the path of the field's table.
        for field, is_fine, expected in self._rules():
            if not is_fine:
                raise ValueError(f"{field}: expected {expected}, got {_field_of(self, field)!r}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        yield "name", bool(self.name), "a name"
        yield "type", self.type in _DEVICE_TYPES, f"one of {', '.join(_DEVICE_TYPES)}"
        yield "slots", 1 <= self.slots <= 1024, "from 1 to 1024"
        known = set(self.rates) <= set(DATA_TYPES) and bool(self.rates)
        yield "rates", known, f"one rate or more for {', '.join(DATA_TYPES)}"
        yield "rates", all(_is_positive(rate) for rate in self.rates.values()), "positive numbers"
        yield "memory_bandwidth", _is_positive(self.memory_bandwidth), "a positive number of bytes per second"
        yield "operation_overhead_ns", self.operation_overhead_ns >= 0, "at least 0"
        yield "launch_overhead_ns", self.launch_overhead_ns >= 0, "at least 0"
        yield "clock.cold_share", 0 < self.clock.cold_share <= 1, "above 0 and at most 1"
        yield "clock.ramp_ns", self.clock.ramp_ns >= 0, "at least 0"
        yield "clock.hold_ns", self.clock.hold_ns >= 0, "at least 0"
        yield "memory_bytes_max", self.memory_bytes_max is None or self.memory_bytes_max > 0, "above 0"
        for field in ("unsupported_operations", "supported_operations"):
            names = getattr(self, field)
            yield field, all(name in OperationType.__members__ for name in names), "names of operations"
        yield "preemption", self.preemption in _PREEMPTION, f"one of {', '.join(_PREEMPTION)}"
        yield "noise", math.isfinite(self.noise) and self.noise >= 0, "at least 0"
        for name in ("transient", "persistent", "hang", "death"):
            yield f"failures.{name}", 0 <= getattr(self.failures, name) <= 1, "a probability"
        failures = self.failures
        total = failures.transient + failures.persistent + failures.hang + failures.death
        yield "failures", total <= 1, "probabilities that add up to at most 1"

    @property
    def device_type(self) -> DeviceType:
        """The HAL's word for ``type``."""
        return _DEVICE_TYPES[self.type]

    @property
    def cancel(self) -> CancelCapability:
        """The HAL's word for ``preemption``."""
        return _PREEMPTION[self.preemption]


_DEVICE_TYPES = {
    "cpu": DeviceType.CPU,
    "gpu": DeviceType.GPU,
    "accelerator": DeviceType.ACCELERATOR,
    "other": DeviceType.OTHER,
}
_PREEMPTION = {
    "none": CancelCapability.NONE,
    "between_operations": CancelCapability.BETWEEN_OPERATIONS,
    "anytime": CancelCapability.ANYTIME,
}


def _field_of(value: object, path: str) -> object:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


# --- What a model costs -------------------------------------------------------------------------------------------------------


class OperationCost(msgspec.Struct, frozen=True, array_like=True):
    """The cost of one operation on a device.

    Attributes:
        type: An ``OperationType`` or an extension's code.
        data_type: ``float32``, ``float16`` or ``int8``.
        arithmetic: Multiplications and additions, counted singly.
        size_bytes: Bytes read and written, constants included.
    """

    type: int
    data_type: str
    arithmetic: float
    size_bytes: float


class ModelCost(msgspec.Struct, frozen=True):
    """The cost of one execution of a model on a device.

    Attributes:
        operations: In execution order; the operations of an IF's or WHILE's subgraphs follow it, each counted once.
        memory_bytes: Constants and temporaries together.
    """

    operations: tuple[OperationCost, ...]
    memory_bytes: int = 0


def model_cost(model: Model) -> ModelCost:
    """Counts the arithmetic and the bytes of a validated model. Unknown extents count as nothing."""
    operations: list[OperationCost] = []
    subgraphs = (model.main, *model.referenced)
    for subgraph in subgraphs:
        operations += [_operation_cost(subgraph, operation) for operation in subgraph.operations]
    memory_bytes = sum(
        _size_bytes(operand.type, operand.dimensions)
        for subgraph in subgraphs
        for operand in subgraph.operands
    )
    return ModelCost(tuple(operations), memory_bytes)


def _size_bytes(code: int, dimensions: tuple[int, ...]) -> int:
    return 0 if is_extension_operand_type(code) else operand_size_bytes(code, dimensions)


def _operation_cost(subgraph: Subgraph, operation: Operation) -> OperationCost:
    inputs = [subgraph.operands[index] for index in operation.inputs]
    outputs = [subgraph.operands[index] for index in operation.outputs]
    size_bytes = sum(_size_bytes(o.type, o.dimensions) for o in (*inputs, *outputs))
    result = math.prod(outputs[0].dimensions) if outputs and outputs[0].dimensions else 1
    weights = math.prod(inputs[1].dimensions) if len(inputs) > 1 and inputs[1].dimensions else 1
    kind = operation.type
    if kind in _CONVOLUTIONS and len(inputs) > 1 and inputs[1].dimensions:
        arithmetic = 2 * result * weights // max(1, inputs[1].dimensions[0])
    elif kind == OperationType.TRANSPOSE_CONV_2D and inputs[0].dimensions and inputs[1].dimensions:
        # Every input element meets every output channel and kernel position.
        arithmetic = 2 * math.prod(inputs[0].dimensions) * weights // max(1, inputs[1].dimensions[-1])
    elif kind == OperationType.DEPTHWISE_CONV_2D and len(inputs) > 1 and inputs[1].dimensions:
        arithmetic = 2 * result * weights // max(1, inputs[1].dimensions[-1])
    elif kind in (OperationType.FULLY_CONNECTED, OperationType.BATCH_MATMUL) and inputs[1].dimensions:
        arithmetic = 2 * result * inputs[1].dimensions[-1]
    elif kind in _RECURRENT:
        steps = (
            inputs[0].dimensions[0] * max(1, math.prod(inputs[0].dimensions[1:-1]))
            if inputs[0].dimensions
            else 1
        )
        arithmetic = (
            2 * steps * sum(math.prod(o.dimensions) for o in inputs[1:] if o.is_constant and o.dimensions)
        )
    else:
        arithmetic = max([result, *(math.prod(o.dimensions) for o in inputs if o.dimensions)])
    first = inputs[0].type if inputs else OperandType.TENSOR_FLOAT32
    return OperationCost(int(kind), _data_type(first), float(arithmetic), float(size_bytes))


_CONVOLUTIONS = {OperationType.CONV_2D, OperationType.GROUPED_CONV_2D}
_RECURRENT = {
    OperationType.LSTM,
    OperationType.RNN,
    OperationType.SVDF,
    OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
    OperationType.UNIDIRECTIONAL_SEQUENCE_RNN,
    OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
    OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
    OperationType.QUANTIZED_16BIT_LSTM,
    OperationType.QUANTIZED_LSTM,
}


def _data_type(code: int) -> str:
    if is_extension_operand_type(code):
        return "float32"
    dtype = OPERAND_TYPE_PROPERTIES[OperandType(code)].dtype
    if dtype.startswith("float"):
        return dtype
    # Operations on indexes and shapes do not determine the choice of a device: they count as the narrowest type.
    return "int8"


# --- How long it takes --------------------------------------------------------------------------------------------------------


def supports_operation(profile: DeviceProfile, operation: OperationCost) -> bool:
    """Whether the device can run the operation, by type of operation and of data."""
    if operation.data_type not in profile.rates:
        return False
    name = _OPERATION_NAMES.get(operation.type)
    if profile.supported_operations:
        return name in profile.supported_operations
    return name not in profile.unsupported_operations


_OPERATION_NAMES = {int(member): member.name for member in OperationType}


def unsupported_reason(profile: DeviceProfile, cost: ModelCost) -> str | None:
    """The reason why the device cannot run the model, in a few words; None if it can."""
    limit = profile.memory_bytes_max
    if limit is not None and cost.memory_bytes > limit:
        return f"needs {cost.memory_bytes} bytes, the device has {limit}"
    for index, operation in enumerate(cost.operations):
        if not supports_operation(profile, operation):
            name = _OPERATION_NAMES.get(operation.type, f"0x{operation.type:x}")
            return f"operation {index} ({name}, {operation.data_type}) is not supported"
    return None


def operation_durations_ns(
    profile: DeviceProfile, cost: ModelCost, *, clock_share: float = 1.0
) -> tuple[int, ...]:
    """Expected duration of every operation at a fixed clock; the launch overhead is part of the first.

    Raises:
        InvalidArgument: The device cannot run the model.
    """
    reason = unsupported_reason(profile, cost)
    if reason is not None:
        raise InvalidArgument(f"device {profile.name}: the model {reason}")
    durations = [_duration_ns(profile, operation, clock_share) for operation in cost.operations]
    if durations:
        durations[0] += profile.launch_overhead_ns
    return tuple(durations) or (max(1, profile.launch_overhead_ns),)


def _duration_ns(profile: DeviceProfile, operation: OperationCost, clock_share: float) -> int:
    arithmetic_s = operation.arithmetic / profile.rates[operation.data_type]
    memory_s = operation.size_bytes / profile.memory_bandwidth
    return max(1, round(max(arithmetic_s, memory_s) / clock_share * 1e9) + profile.operation_overhead_ns)


def model_duration_ns(profile: DeviceProfile, cost: ModelCost, *, clock_share: float = 1.0) -> int:
    """Expected duration of one execution at a fixed clock.

    Raises:
        InvalidArgument: The device cannot run the model.
    """
    return sum(operation_durations_ns(profile, cost, clock_share=clock_share))


class ClockState(msgspec.Struct, frozen=True, array_like=True):
    """The clock at the end of the device's last work.

    Attributes:
        share: Share of the full rate.
        at_ns: When that was.
    """

    share: float
    at_ns: int


def clock_share_at(ramp: ClockRamp, state: ClockState | None, now_ns: int, *, held: bool = False) -> float:
    """The share of the full rate that an execution starts with.

    Args:
        ramp: The device's.
        state: When and how it last stopped; None if it never ran.
        now_ns: The time of the start.
        held: Whether an open burst keeps the clock from falling.
    """
    if state is None:
        return ramp.cold_share
    if not held and now_ns - state.at_ns > ramp.hold_ns:
        return ramp.cold_share
    return state.share


def run_operations(
    profile: DeviceProfile, full_speed_ns: Sequence[int], start_ns: int, share: float, factor: float = 1.0
) -> tuple[list[int], ClockState]:
    """When each operation ends, under a clock that rises while the device works.

    Args:
        profile: The device.
        full_speed_ns: ``operation_durations_ns`` of the model, or a tail of it.
        start_ns: The time of the start.
        share: The clock's share at the start.
        factor: Noise: multiplies every duration.

    Returns:
        The end of every operation, and the clock's state after the last.
    """
    ramp = profile.clock
    climb = (1.0 - ramp.cold_share) / ramp.ramp_ns if ramp.ramp_ns else math.inf
    at_ns = start_ns
    ends = []
    for duration_ns in full_speed_ns:
        taken_ns = max(1, round(duration_ns * factor / share))
        at_ns += taken_ns
        if share < 1.0:
            share = min(1.0, share + climb * taken_ns)
        ends.append(at_ns)
    return ends, ClockState(share, at_ns)


# --- Noise and failures by seed -----------------------------------------------------------------------------------------------


class Fault(enum.Enum):
    """The end of an execution."""

    NONE = "none"
    TRANSIENT = "transient"
    PERSISTENT = "persistent"
    HANG = "hang"
    DEATH = "death"


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """The values that the seed draws for one execution.

    Attributes:
        factor: Multiplies its durations.
        fault: The way it ends.
        at_share: Where in the execution the fault strikes, as a share of its duration; 1 without one.
    """

    factor: float = 1.0
    fault: Fault = Fault.NONE
    at_share: float = 1.0


def draws(profile: DeviceProfile, seed: int) -> Iterator[Draw]:
    """An endless sequence, one draw per execution in the order of their starts on this device."""
    # Seeding with text hashes it with SHA-512, not with the process's hash seed.
    source = random.Random(f"{seed}/{profile.name}")
    failures = profile.failures
    limits = []
    total = 0.0
    for fault in (Fault.TRANSIENT, Fault.PERSISTENT, Fault.HANG, Fault.DEATH):
        total += getattr(failures, fault.value)
        limits.append((total, fault))
    exact = Draw()
    while True:
        if not total and not profile.noise:
            yield exact
            continue
        factor = math.exp(source.gauss(0.0, profile.noise)) if profile.noise else 1.0
        value = source.random() if total else 1.0
        fault = next((fault for limit, fault in limits if value < limit), Fault.NONE)
        at_share = source.random() if fault in (Fault.TRANSIENT, Fault.HANG, Fault.DEATH) else 1.0
        yield Draw(factor, fault, 0.0 if fault == Fault.PERSISTENT else at_share)


# --- Files and ready profiles --------------------------------------------------------------------------------------------------


def read_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Reads a device's description.

    Raises:
        InvalidArgument: As for ``read_described``.
    """
    return read_described(path, DeviceProfile)


_NO_CONTROL_FLOW = ("IF", "WHILE")
_NO_DETECTION = (
    *_NO_CONTROL_FLOW,
    "BOX_WITH_NMS_LIMIT",
    "DETECTION_POSTPROCESSING",
    "GENERATE_PROPOSALS",
    "HASHTABLE_LOOKUP",
    "LSH_PROJECTION",
    "RANDOM_MULTINOMIAL",
)


def _profile(name: str, kind: str, rates: dict[str, float], bandwidth: float, **rest: Any) -> DeviceProfile:
    return DeviceProfile(name=name, type=kind, rates=rates, memory_bandwidth=bandwidth, **rest)


PROFILES: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            _profile(
                "phone-cpu", "cpu", {"float32": 60e9, "float16": 100e9, "int8": 160e9}, 20e9,
                operation_overhead_ns=2_000, launch_overhead_ns=20_000,
                clock=ClockRamp(0.4, 8_000_000, 20_000_000), power=Power(0.1, 3.0),
            ),
            _profile(
                "phone-gpu", "gpu", {"float32": 250e9, "float16": 450e9, "int8": 250e9}, 25e9,
                operation_overhead_ns=15_000, launch_overhead_ns=400_000, unsupported_operations=_NO_DETECTION,
                clock=ClockRamp(0.3, 15_000_000, 30_000_000), power=Power(0.15, 4.0), memory_bytes_max=1 << 30,
            ),
            _profile(
                "phone-dsp", "accelerator", {"int8": 400e9}, 15e9,
                operation_overhead_ns=8_000, launch_overhead_ns=250_000, unsupported_operations=_NO_DETECTION,
                clock=ClockRamp(0.5, 5_000_000, 20_000_000), power=Power(0.05, 1.0), memory_bytes_max=1 << 28,
            ),
            _profile(
                "phone-npu", "accelerator", {"float16": 800e9, "int8": 2000e9}, 25e9,
                operation_overhead_ns=5_000, launch_overhead_ns=300_000, unsupported_operations=_NO_DETECTION,
                clock=ClockRamp(0.4, 10_000_000, 30_000_000), power=Power(0.1, 2.0), memory_bytes_max=1 << 29,
            ),
            _profile(
                "edge-cpu", "cpu", {"float32": 80e9, "float16": 80e9, "int8": 200e9}, 12e9, slots=2,
                operation_overhead_ns=2_000, launch_overhead_ns=20_000,
                clock=ClockRamp(0.6, 10_000_000, 50_000_000), power=Power(1.5, 8.0),
            ),
            _profile(
                "edge-accelerator", "accelerator", {"int8": 1500e9}, 8e9,
                operation_overhead_ns=4_000, launch_overhead_ns=200_000, unsupported_operations=_NO_DETECTION,
                power=Power(0.5, 2.5), memory_bytes_max=1 << 28,
            ),
            _profile(
                "server-cpu", "cpu", {"float32": 400e9, "float16": 400e9, "int8": 1200e9}, 80e9, slots=4,
                operation_overhead_ns=1_500, launch_overhead_ns=15_000, power=Power(40.0, 150.0),
            ),
            _profile(
                "server-gpu", "gpu", {"float32": 8e12, "float16": 40e12, "int8": 60e12}, 400e9, slots=2,
                operation_overhead_ns=6_000, launch_overhead_ns=60_000, unsupported_operations=_NO_DETECTION,
                power=Power(20.0, 120.0), memory_bytes_max=16 << 30,
            ),
        )
    }
)  # fmt: skip
"""Ready descriptions by name."""

DEVICE_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "phone": ("phone-cpu", "phone-gpu", "phone-dsp", "phone-npu"),
        "edge": ("edge-cpu", "edge-accelerator"),
        "server": ("server-cpu", "server-gpu"),
    }
)
"""Names of ready profiles of devices of one machine."""


def profile_named(name: str) -> DeviceProfile:
    """A ready profile.

    Raises:
        InvalidArgument: No entry has that name.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise InvalidArgument(f"device: expected one of {', '.join(PROFILES)}; got {name!r}") from None

"""The older versions' types, and conversion in both directions.

Owns what HAL 1.0, 1.1 and 1.2 look like: a model is one flat graph, capabilities are two or three numbers, a request has memories
alone, a status ends at INVALID_ARGUMENT, a time is in microseconds. ``aionn.ops`` defines the lowest level of each operation:
callers pass it in.

Invariants:
1. A model that complies with a version converts without loss of meaning; converting it back gives the original.
2. A conversion that loses something logs a warning; one that would change a model's results is rejected.

Source: ``compliantWithV1_x`` and ``convertToV1_x`` of the NN HAL's support code, and the older interfaces' records.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

import msgspec

from aionn.errors import ErrorStatus, InvalidArgument, InvalidModel
from aionn.hal.capabilities import (
    NO_PERFORMANCE,
    Capabilities,
    ExtensionNameAndPrefix,
    OperandPerformance,
    PerformanceInfo,
)
from aionn.hal.memory import Memory, MemoryKind
from aionn.hal.model import Model, Subgraph
from aionn.hal.operand import (
    OPERAND_TYPE_PROPERTIES,
    ChannelQuant,
    DataLocation,
    Operand,
    OperandLifeTime,
    OperandType,
    is_extension_operand_type,
    is_scalar_type,
    operand_type_name,
)
from aionn.hal.operation import EXTENSION_OPERATION_MIN, Operation
from aionn.hal.request import BufferToken, Request, RequestArgument, Timing

__all__ = [
    "CapabilitiesV1_0",
    "CapabilitiesV1_1",
    "CapabilitiesV1_2",
    "HalVersion",
    "ModelV1_0",
    "ModelV1_1",
    "ModelV1_2",
    "OldCapabilities",
    "OldModel",
    "OperandV1_0",
    "OperandV1_2",
    "RequestV1_0",
    "TimingV1_2",
    "capabilities_are_compliant",
    "convert_capabilities",
    "convert_model",
    "convert_request",
    "convert_status",
    "convert_timing",
    "noncompliant_operations",
    "request_breach",
    "upgrade_capabilities",
    "upgrade_model",
    "upgrade_timing",
]

NO_TIME_US = 2**64 - 1
"""HAL 1.2's "not measured"."""


class HalVersion(enum.IntEnum):
    """The HIDL versions by feature level."""

    V1_0 = 1
    V1_1 = 2
    V1_2 = 3
    V1_3 = 4


_QUANTIZED_LIKE = (
    OperandType.INT32,
    OperandType.UINT32,
    OperandType.TENSOR_INT32,
    OperandType.OEM,
    OperandType.TENSOR_OEM_BYTE,
)
"""Types without a performance entry of their own in HAL 1.0 and 1.1: they count as 8 bits quantised."""

_POOL_KINDS = {
    HalVersion.V1_0: frozenset({MemoryKind.ASHMEM, MemoryKind.MMAP_FD}),
    HalVersion.V1_1: frozenset({MemoryKind.ASHMEM, MemoryKind.MMAP_FD}),
    HalVersion.V1_2: frozenset(MemoryKind),
    HalVersion.V1_3: frozenset(MemoryKind),
}


# Models


class OperandV1_0(msgspec.Struct, frozen=True, array_like=True):
    """An operand of HAL 1.0 and 1.1. See ``Operand`` for the attributes; ``consumer_count`` is exact."""

    type: int
    dimensions: tuple[int, ...]
    consumer_count: int
    scale: float
    zero_point: int
    lifetime: OperandLifeTime
    location: DataLocation


class OperandV1_2(OperandV1_0, frozen=True, array_like=True):
    """An operand of HAL 1.2: with parameters per channel and of extensions."""

    channel_quant: ChannelQuant | None = None
    extension_data: bytes | None = None


class ModelV1_0(msgspec.Struct, frozen=True):
    """A model of HAL 1.0: one flat graph."""

    operands: tuple[OperandV1_0, ...]
    operations: tuple[Operation, ...]
    input_indexes: tuple[int, ...]
    output_indexes: tuple[int, ...]
    operand_values: bytes
    pools: tuple[Memory, ...]


class ModelV1_1(ModelV1_0, frozen=True):
    """A model of HAL 1.1: float32 may be relaxed."""

    relax_computation_float32_to_float16: bool = False


class ModelV1_2(ModelV1_1, frozen=True):
    """A model of HAL 1.2: with vendor extensions."""

    extension_name_to_prefix: tuple[ExtensionNameAndPrefix, ...] = ()


OldModel = ModelV1_0 | ModelV1_1 | ModelV1_2


def noncompliant_operations(
    model: Model, version: HalVersion, operation_levels: Sequence[int]
) -> dict[int, str]:
    """The operations of the main subgraph that a version cannot express.

    The relaxed flag makes no model non-compliant: a driver that does not know it computes more exactly than it must.

    Args:
        model: A valid model.
        version: The version.
        operation_levels: The lowest feature level of each operation, as in its contract.

    Returns:
        Operation index -> why; empty if the model is compliant.
    """
    breaches: dict[int, str] = {}
    for index, (operation, level) in enumerate(zip(model.main.operations, operation_levels, strict=True)):
        why: str | None = None
        if operation.type >= EXTENSION_OPERATION_MIN and version < HalVersion.V1_2:
            why = "vendor extensions exist from HAL 1.2 on"
        elif level > version:
            why = f"it needs feature level {level}"
        for operand_index in (*operation.inputs, *operation.outputs):
            why = why or _operand_breach(model, model.main.operands[operand_index], version)
        if why is not None:
            breaches[index] = why
    return breaches


def _operand_breach(model: Model, operand: Operand, version: HalVersion) -> str | None:
    name = operand_type_name(operand.type)
    if is_extension_operand_type(operand.type):
        return None if version >= HalVersion.V1_2 else "extension types exist from HAL 1.2 on"
    if OPERAND_TYPE_PROPERTIES[OperandType(operand.type)].feature_level > version:
        return f"type {name} is newer"
    is_rankless = not is_scalar_type(operand.type) and not operand.dimensions
    if version < HalVersion.V1_2 and is_rankless and operand.lifetime != OperandLifeTime.NO_VALUE:
        return f"a {name} of unknown rank exists from HAL 1.2 on"
    if operand.lifetime == OperandLifeTime.CONSTANT_REFERENCE:
        kind = model.pools[operand.location.pool_index].kind
        if kind not in _POOL_KINDS[version]:
            return f"constants in memory of kind {kind} exist from HAL 1.2 on"
    is_open = any(extent == 0 for extent in operand.dimensions)
    is_interface = operand.lifetime in (OperandLifeTime.SUBGRAPH_INPUT, OperandLifeTime.SUBGRAPH_OUTPUT)
    if version < HalVersion.V1_2 and is_open and is_interface:
        return "inputs and outputs of unknown shape exist from HAL 1.2 on"
    return None


def convert_model(model: Model, version: HalVersion) -> tuple[OldModel, tuple[str, ...]]:
    """A model in an older version's type.

    Args:
        model: Compliant with the version, apart from the relaxed flag.
        version: Below 1.3.

    Returns:
        The model, with exact consumer counts, and a warning for each thing that was lost.

    Raises:
        InvalidModel: It has subgraphs, or an operand that the version cannot express.
    """
    assert version < HalVersion.V1_3, "the newest version's type is Model itself"
    if model.referenced:
        raise InvalidModel(f"model: expected one flat graph for HAL {_name(version)}, got subgraphs")
    uses = Counter(i for operation in model.main.operations for i in operation.inputs)
    operands = []
    for index, operand in enumerate(model.main.operands):
        why = _operand_breach(model, operand, version)
        if why is not None:
            raise InvalidModel(f"operand {index}: HAL {_name(version)} cannot express it: {why}")
        fields = (
            operand.type,
            operand.dimensions,
            uses[index],
            operand.scale,
            operand.zero_point,
            operand.lifetime,
            operand.location,
        )
        operands.append(
            OperandV1_2(*fields, operand.channel_quant, operand.extension_data)
            if version >= HalVersion.V1_2
            else OperandV1_0(*fields)
        )
    main = model.main
    parts = (
        tuple(operands),
        main.operations,
        main.input_indexes,
        main.output_indexes,
        model.operand_values,
        model.pools,
    )
    is_relaxed = model.relax_computation_float32_to_float16
    if version == HalVersion.V1_0:
        warnings = ("HAL 1.0 knows no relaxed float32: it is computed in full",) if is_relaxed else ()
        return ModelV1_0(*parts), warnings
    if version == HalVersion.V1_1:
        return ModelV1_1(*parts, is_relaxed), ()
    return ModelV1_2(*parts, is_relaxed, model.extension_name_to_prefix), ()


def upgrade_model(model: OldModel) -> Model:
    """An older version's model in the newest type.

    Raises:
        InvalidModel: A consumer count is wrong.
    """
    uses = Counter(i for operation in model.operations for i in operation.inputs)
    operands = []
    for index, old in enumerate(model.operands):
        if old.consumer_count != uses[index]:
            raise InvalidModel(
                f"operand {index}, consumer count: expected {uses[index]}, got {old.consumer_count}"
            )
        operands.append(
            Operand(
                old.type,
                old.dimensions,
                old.scale,
                old.zero_point,
                old.lifetime,
                old.location,
                old.channel_quant if isinstance(old, OperandV1_2) else None,
                old.extension_data if isinstance(old, OperandV1_2) else None,
            )
        )
    return Model(
        Subgraph(tuple(operands), model.operations, model.input_indexes, model.output_indexes),
        operand_values=model.operand_values,
        pools=model.pools,
        relax_computation_float32_to_float16=(
            isinstance(model, ModelV1_1) and model.relax_computation_float32_to_float16
        ),
        extension_name_to_prefix=model.extension_name_to_prefix if isinstance(model, ModelV1_2) else (),
    )


def _name(version: HalVersion) -> str:
    return version.name[1:].replace("_", ".")


# Requests


class RequestV1_0(msgspec.Struct, frozen=True):
    """A request of HAL 1.0 to 1.2: its pools are memories."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[Memory, ...]


def request_breach(request: Request, version: HalVersion) -> str | None:
    """The reason why a version cannot express a request; None if it can."""
    for index, pool in enumerate(request.pools):
        if isinstance(pool, BufferToken):
            if version < HalVersion.V1_3:
                return f"pool {index}: device memories exist from HAL 1.3 on"
        elif pool.kind not in _POOL_KINDS[version]:
            return f"pool {index}: memory of kind {pool.kind} exists from HAL 1.2 on"
    return None


def convert_request(request: Request, version: HalVersion) -> RequestV1_0:
    """A request in the type of HAL 1.0 to 1.2.

    Raises:
        InvalidArgument: The version cannot express it.
    """
    why = request_breach(request, version)
    if why is not None:
        raise InvalidArgument(f"request, {why}")
    pools = tuple(pool for pool in request.pools if isinstance(pool, Memory))
    if len(pools) != len(request.pools):
        raise InvalidArgument("request: device memories exist from HAL 1.3 on")
    return RequestV1_0(request.inputs, request.outputs, pools)


# Statuses and times


def convert_status(status: ErrorStatus, version: HalVersion) -> ErrorStatus:
    """A status as a version knows it: missed deadlines and exhausted resources are GENERAL_FAILURE before 1.3, and so is a dead
    peer in every version."""
    if status == ErrorStatus.DEAD_OBJECT:
        return ErrorStatus.GENERAL_FAILURE
    if version < HalVersion.V1_3 and status > ErrorStatus.INVALID_ARGUMENT:
        return ErrorStatus.GENERAL_FAILURE
    return status


class TimingV1_2(msgspec.Struct, frozen=True, array_like=True):
    """Times of HAL 1.2 and 1.3, in microseconds; ``NO_TIME_US`` where not measured."""

    time_on_device_us: int = NO_TIME_US
    time_in_driver_us: int = NO_TIME_US


def convert_timing(timing: Timing) -> TimingV1_2:
    """Times in whole microseconds, rounded down."""
    return TimingV1_2(*(NO_TIME_US if t is None else min(t // 1000, NO_TIME_US - 1) for t in _times(timing)))


def upgrade_timing(timing: TimingV1_2) -> Timing:
    """Times in nanoseconds."""
    pair = (timing.time_on_device_us, timing.time_in_driver_us)
    return Timing(*(None if t == NO_TIME_US else t * 1000 for t in pair))


def _times(timing: Timing) -> tuple[int | None, int | None]:
    return timing.time_on_device_ns, timing.time_in_driver_ns


# Capabilities


class CapabilitiesV1_0(msgspec.Struct, frozen=True, array_like=True):
    """Performance of HAL 1.0."""

    float32: PerformanceInfo
    quantized8: PerformanceInfo


class CapabilitiesV1_1(CapabilitiesV1_0, frozen=True, array_like=True):
    """Performance of HAL 1.1: with relaxed float32."""

    relaxed_float32_to_float16: PerformanceInfo = NO_PERFORMANCE


class CapabilitiesV1_2(msgspec.Struct, frozen=True, array_like=True):
    """Performance of HAL 1.2: by operand type, without control flow."""

    relaxed_float32_to_float16_scalar: PerformanceInfo
    relaxed_float32_to_float16_tensor: PerformanceInfo
    operand_performance: tuple[OperandPerformance, ...]


OldCapabilities = CapabilitiesV1_0 | CapabilitiesV1_1 | CapabilitiesV1_2


def capabilities_are_compliant(capabilities: Capabilities, version: HalVersion) -> bool:
    """Whether a version can express a device's performance without loss."""
    if version >= HalVersion.V1_2:
        return True
    relaxed = capabilities.relaxed_float32_to_float16_tensor
    float32 = capabilities.performance(OperandType.TENSOR_FLOAT32)
    quantized = capabilities.performance(OperandType.TENSOR_QUANT8_ASYMM)
    if relaxed != capabilities.relaxed_float32_to_float16_scalar:
        return False
    if capabilities.performance(OperandType.FLOAT32) != float32:
        return False
    if any(capabilities.performance(kind) != quantized for kind in _QUANTIZED_LIKE):
        return False
    return version >= HalVersion.V1_1 or relaxed == float32


def convert_capabilities(
    capabilities: Capabilities, version: HalVersion
) -> tuple[OldCapabilities, tuple[str, ...]]:
    """Performance in an older version's type, and a warning if something was lost."""
    assert version < HalVersion.V1_3, "the newest version's type is Capabilities itself"
    is_lossy = not capabilities_are_compliant(capabilities, version)
    warnings = (f"HAL {_name(version)} knows fewer types: their performance is left out",) if is_lossy else ()
    float32 = capabilities.performance(OperandType.TENSOR_FLOAT32)
    quantized = capabilities.performance(OperandType.TENSOR_QUANT8_ASYMM)
    if version == HalVersion.V1_0:
        return CapabilitiesV1_0(float32, quantized), warnings
    if version == HalVersion.V1_1:
        relaxed = capabilities.relaxed_float32_to_float16_tensor
        return CapabilitiesV1_1(float32, quantized, relaxed), warnings
    known = tuple(
        entry
        for entry in capabilities.operand_performance
        if OPERAND_TYPE_PROPERTIES[entry.type].feature_level <= version
    )
    return (
        CapabilitiesV1_2(
            capabilities.relaxed_float32_to_float16_scalar,
            capabilities.relaxed_float32_to_float16_tensor,
            known,
        ),
        warnings,
    )


def upgrade_capabilities(old: OldCapabilities) -> Capabilities:
    """An older version's performance in the newest type. Types that the version does not describe get the worst performance."""
    if isinstance(old, CapabilitiesV1_2):
        return Capabilities(
            old.relaxed_float32_to_float16_scalar,
            old.relaxed_float32_to_float16_tensor,
            old.operand_performance,
            NO_PERFORMANCE,
            NO_PERFORMANCE,
        )
    relaxed = old.relaxed_float32_to_float16 if isinstance(old, CapabilitiesV1_1) else old.float32
    by_type = dict.fromkeys((*_QUANTIZED_LIKE, OperandType.TENSOR_QUANT8_ASYMM), old.quantized8)
    by_type |= dict.fromkeys((OperandType.FLOAT32, OperandType.TENSOR_FLOAT32), old.float32)
    entries = tuple(OperandPerformance(kind, by_type[kind]) for kind in sorted(by_type))
    return Capabilities(relaxed, relaxed, entries, NO_PERFORMANCE, NO_PERFORMANCE)

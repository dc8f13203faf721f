"""The content of a model, and the operations that each device can run, before anything is compiled.

Owns the queries and the summary; ``partition`` chooses the devices.

Invariants:
1. A device is asked only about what its feature level can express; it supports nothing of the rest.
2. A device that fails to answer is reported with its reason, and the other devices are still queried.
3. Answers are in the order of the model's operations, whatever a device was shown.

Source: ``ANeuralNetworksModel_getSupportedOperationsForDevices`` of the NN HAL's runtime.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence

import anyio.to_thread
import msgspec

from aionn.errors import Error
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    Subgraph,
    constant_array,
    is_extension_operand_type,
    operand_size_bytes,
    operand_type_name,
)
from aionn.hal.slicing import Slice
from aionn.models.importing import NO_OPTIONS, ImportOptions
from aionn.models.operation_names import operation_name
from aionn.platform.real_work import real_work
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.placement.levels import expressible_part, operation_levels
from aionn.runtime.placement.planning import load_model
from aionn.validation import validate_model

__all__ = [
    "ModelSummary",
    "OperationSummary",
    "Support",
    "ask_support",
    "describe_operand",
    "summarize_model",
]


VALUES_SHOWN_MAX = 8
"""Elements of a constant that is shown with its values: enough for shapes, axes and paddings of four axes."""


class Support(msgspec.Struct, frozen=True):
    """A device's answer about a model.

    Attributes:
        device: The device's name.
        supported: For each operation of the main subgraph whether the device can run it.
        error: Why it did not answer; empty where it did.
    """

    device: str
    supported: tuple[bool, ...]
    error: str = ""


class OperationSummary(msgspec.Struct, frozen=True):
    """One operation of a model.

    Attributes:
        subgraph: Its subgraph, 0 for the main one.
        index: Its index there.
        type: Its name.
        inputs: Types and shapes of what it reads, with the values of scalars and of small constants of whole numbers.
        outputs: Types and shapes of what it writes.
        feature_level: The least that can express it; 0 for one that is not in the main subgraph.
    """

    subgraph: int
    index: int
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    feature_level: int = 0


class ModelSummary(msgspec.Struct, frozen=True):
    """The content of a model.

    Attributes:
        feature_level: The least that can express all of it.
        subgraphs: Number of subgraphs.
        operands: Number of operands.
        operands_by_lifetime: Number of operands of each lifetime, by the spec's names.
        operands_by_type: Number of operands of each type, by the spec's names.
        constant_values: Elements of all constants.
        constant_bytes: Bytes of all constants.
        temporary_bytes: Bytes of all values between operations whose size is known.
        unknown_sizes: Values whose size only an execution knows.
        is_relaxed: Whether float32 may be computed as float16.
        extensions: Names of the extensions that it uses.
        operations: Every operation.
    """

    feature_level: int
    subgraphs: int
    operands: int
    operands_by_lifetime: dict[str, int]
    operands_by_type: dict[str, int]
    constant_values: int
    constant_bytes: int
    temporary_bytes: int
    unknown_sizes: int
    is_relaxed: bool
    extensions: tuple[str, ...]
    operations: tuple[OperationSummary, ...]


def summarize_model(model: Model) -> ModelSummary:
    """Counts and describes what is in a model.

    Raises:
        InvalidModel: It breaks a rule.
    """
    level = validate_model(model)
    levels = operation_levels(model)
    subgraphs = (model.main, *model.referenced)
    operands = [operand for subgraph in subgraphs for operand in subgraph.operands]
    constants = [operand for operand in operands if operand.is_constant]
    temporaries = [o for o in operands if o.lifetime == OperandLifeTime.TEMPORARY_VARIABLE]
    sizes = [operand_size_bytes(o.type, o.dimensions) for o in temporaries]
    return ModelSummary(
        level,
        len(subgraphs),
        len(operands),
        _counted(operand.lifetime.name for operand in operands),
        _counted(operand_type_name(operand.type) for operand in operands),
        sum(math.prod(operand.dimensions) for operand in constants),
        sum(operand.location.length for operand in constants),
        sum(sizes),
        sum(not size for size in sizes),
        model.relax_computation_float32_to_float16,
        tuple(sorted(entry.name for entry in model.extension_name_to_prefix)),
        tuple(
            OperationSummary(
                position,
                index,
                operation_name(model, operation.type),
                _described(model, subgraph, operation.inputs),
                _described(model, subgraph, operation.outputs),
                levels[index] if position == 0 else 0,
            )
            for position, subgraph in enumerate(subgraphs)
            for index, operation in enumerate(subgraph.operations)
        ),
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _described(model: Model, subgraph: Subgraph, indexes: Sequence[int]) -> tuple[str, ...]:
    operands = (subgraph.operands[index] for index in indexes)
    return tuple(describe_operand(operand) + _value(model, operand) for operand in operands)


def _value(model: Model, operand: Operand) -> str:
    """`` = 1`` or `` = [0, 2]`` for a scalar, and for a small constant of whole numbers; empty for other operands."""
    if operand.lifetime == OperandLifeTime.NO_VALUE:
        return " left out"
    if not operand.is_constant or is_extension_operand_type(operand.type):
        return ""
    array = constant_array(model, operand)
    if array.ndim == 0 or (array.size <= VALUES_SHOWN_MAX and array.dtype.kind in "ib" and not operand.scale):
        return f" = {array.tolist()}"
    return ""


def describe_operand(operand: Operand) -> str:
    """An operand's type and shape in words; ``?`` stands for an extent that is not known."""
    shape = "x".join(str(extent) if extent else "?" for extent in operand.dimensions)
    return f"{operand_type_name(operand.type)} {shape or 'scalar'}"


async def ask_support(
    model: Model | str | os.PathLike[str],
    devices: Sequence[RuntimeDevice],
    options: ImportOptions = NO_OPTIONS,
) -> tuple[Support, ...]:
    """Asks devices what they support of a model; see ``Runtime.supported_operations``."""
    loaded = (await load_model(model, options)).model

    def cut() -> list[Slice | None]:
        everything = Slice(loaded, tuple(range(len(loaded.main.operations))))
        level = validate_model(loaded)
        levels = operation_levels(loaded)
        return [
            everything
            if level <= device.feature_level
            else expressible_part(loaded, levels, device.feature_level)
            for device in devices
        ]

    with real_work("slicing a model"):
        questions = await anyio.to_thread.run_sync(cut)
    answers = []
    for device, question in zip(devices, questions, strict=True):
        supported, error = [False] * len(loaded.main.operations), ""
        try:
            flags = () if question is None else await device.hal.supported_operations(question.model)
            shown = () if question is None else question.operation_indexes
            if len(flags) != len(shown):
                error = f"{len(shown)} operations, but {len(flags)} answers"
            else:
                for index, is_supported in zip(shown, flags, strict=True):
                    supported[index] = bool(is_supported)
        except Error as e:
            error = str(e)
        answers.append(Support(device.name, tuple(supported), error))
    return tuple(answers)

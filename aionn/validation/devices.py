"""Checks of devices' descriptions, of allocations and caching requests, and of their reports.

Owns the rules for capabilities, extensions, cache files, buffer roles, timings and output shapes. A device's own breach is a
``GeneralFailure``, since no caller can fix it; a caller's is an ``InvalidArgument``.

Source: the rules of the NN HAL 1.3 for these records, and of its callbacks for results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument
from aionn.hal import (
    CACHE_FILES_MAX,
    CACHE_TOKEN_BYTES,
    NO_TIMING,
    RANK_MAX,
    BufferDesc,
    BufferRole,
    CacheFileCounts,
    CacheFiles,
    Capabilities,
    DeviceInfo,
    ExecutionResult,
    Extension,
    Model,
    Operand,
    OperandType,
    OutputShape,
    PerformanceInfo,
    Subgraph,
    Timing,
    combine_dimensions,
    dimensions_are_known,
    is_extension_operand_type,
    is_scalar_type,
    operand_type_name,
)
from aionn.validation.field_types import check_field_types
from aionn.validation.names import is_extension_name

__all__ = [
    "check_allocation",
    "check_buffer_roles",
    "check_cache_files",
    "check_capabilities",
    "check_device_info",
    "check_execution_result",
    "check_extension",
    "check_extensions",
    "check_output_shapes",
    "check_timing",
]

SLOTS_MAX = 1024
"""Most concurrent executions of a device, many times the number of real hardware: each costs both ends some hundred bytes from the
start, and a burst or a thread when it is used."""

TEXT_CHARACTERS_MAX = 256
"""Longest name or version of a device: it is printed in a line of a log, an error or a table."""


NUMBER_MAX = 2**63 - 1
"""Largest whole number that a message of the HAL's wire holds for every reader."""

ELEMENT_BYTES_MAX = 2**32 - 1
"""Most bytes of an element: sizes are unsigned 32-bit numbers on the HAL's wire."""


def check_capabilities(capabilities: Capabilities) -> None:
    """Checks performance figures.

    Raises:
        InvalidArgument: Types repeat, are out of order or include SUBGRAPH, or a ratio is not positive and finite.
    """
    for what, info in (
        ("relaxed scalar", capabilities.relaxed_float32_to_float16_scalar),
        ("relaxed tensor", capabilities.relaxed_float32_to_float16_tensor),
        ("IF", capabilities.if_performance),
        ("WHILE", capabilities.while_performance),
    ):
        _check_performance(info, f"capabilities, {what}")
    before = -1
    for entry in capabilities.operand_performance:
        where = f"capabilities, {operand_type_name(entry.type)}"
        if entry.type == OperandType.SUBGRAPH:
            raise InvalidArgument(f"{where}: expected IF and WHILE performance instead, got an entry")
        if entry.type <= before:
            raise InvalidArgument(
                f"{where}: expected types in rising order, got it after {operand_type_name(before)}"
            )
        before = int(entry.type)
        _check_performance(entry.info, where)


def _check_performance(info: PerformanceInfo, where: str) -> None:
    for name, ratio in (("execution time", info.exec_time), ("power usage", info.power_usage)):
        if not 0 < ratio <= (NUMBER_MAX if isinstance(ratio, int) else sys.float_info.max):
            raise InvalidArgument(f"{where}, {name}: expected a positive finite ratio, got {ratio}")


def check_extension(extension: Extension) -> None:
    """Checks an extension's name and operand types.

    Raises:
        InvalidArgument: The name is illegal, a type repeats or does not fit 16 bits, or an element has no size.
    """
    if not is_extension_name(extension.name):
        raise InvalidArgument(
            f"extension: expected a name of lower-case words joined by periods, got {extension.name!r}"
        )
    seen = set()
    for entry in extension.operand_types:
        where = f"extension {extension.name}, operand type {entry.type}"
        if not 0 <= entry.type <= 0xFFFF:
            raise InvalidArgument(f"{where}: expected a number of 16 bits")
        if entry.type in seen:
            raise InvalidArgument(f"{where}: expected every type once, got it twice")
        seen.add(entry.type)
        if not 0 < entry.byte_size <= ELEMENT_BYTES_MAX:
            raise InvalidArgument(f"{where}: expected 1 to {ELEMENT_BYTES_MAX} bytes, got {entry.byte_size}")


def check_extensions(extensions: Sequence[Extension]) -> None:
    """Checks a device's extensions: each of them, and that no name repeats.

    Raises:
        InvalidArgument: One of them is illegal, or two have the same name.
    """
    names = set()
    for extension in extensions:
        check_extension(extension)
        if extension.name in names:
            raise InvalidArgument(f"extension {extension.name}: expected every name once, got it twice")
        names.add(extension.name)


def check_device_info(info: DeviceInfo) -> None:
    """Checks the whole description of a device.

    Raises:
        InvalidArgument: A part is illegal; the device must not be used then.
    """
    check_field_types(info, DeviceInfo, "device")
    for what, text in (("name", info.name), ("version", info.version)):
        if not text:
            raise InvalidArgument(f"device {info.name!r}, {what}: expected a text, got an empty one")
        if len(text) > TEXT_CHARACTERS_MAX or not text.isprintable():
            raise InvalidArgument(
                f"device, {what}: expected a printable text of at most {TEXT_CHARACTERS_MAX} characters, got"
                f" {text[:TEXT_CHARACTERS_MAX]!r}"
            )
    if not 1 <= info.slots <= SLOTS_MAX:
        raise InvalidArgument(f"device {info.name}, slots: expected 1 to {SLOTS_MAX}, got {info.slots}")
    for what, count in (("model", info.cache_files.model), ("data", info.cache_files.data)):
        if not 0 <= count <= CACHE_FILES_MAX:
            raise InvalidArgument(
                f"device {info.name}, {what} cache files: expected 0 to {CACHE_FILES_MAX}, got {count}"
            )
    check_capabilities(info.capabilities)
    check_extensions(info.extensions)


def check_cache_files(cache: CacheFiles, counts: CacheFileCounts | None = None) -> None:
    """Checks compilation cache arguments.

    Args:
        cache: The files and the token.
        counts: Number of files that the device wants; None leaves the counts at the spec's limit.

    Raises:
        InvalidArgument: Too many files or another number than wanted, a descriptor that is not open, or a token of wrong length.
    """
    check_field_types(cache, CacheFiles, "cache")
    if len(cache.token) != CACHE_TOKEN_BYTES:
        raise InvalidArgument(f"cache token: expected {CACHE_TOKEN_BYTES} bytes, got {len(cache.token)}")
    for what, files, wanted in (
        ("model", cache.model, None if counts is None else counts.model),
        ("data", cache.data, None if counts is None else counts.data),
    ):
        if len(files) > CACHE_FILES_MAX:
            raise InvalidArgument(f"{what} cache files: expected at most {CACHE_FILES_MAX}, got {len(files)}")
        if wanted is not None and len(files) != wanted:
            raise InvalidArgument(f"{what} cache files: expected {wanted}, got {len(files)}")
        for index, fd in enumerate(files):
            try:
                os.fstat(fd)
            except (OSError, OverflowError) as e:
                raise InvalidArgument(
                    f"{what} cache file {index}: expected an open descriptor, got {fd}"
                ) from e


def check_allocation(description: object, models: object, input_roles: object, output_roles: object) -> None:
    """Checks the types of what a device memory is described by.

    Raises:
        InvalidArgument: The description or a role is of another type, or holds a value of another type.
    """
    check_field_types(description, BufferDesc, "allocate, description")
    check_field_types(models, Sequence[object], "allocate, models")
    check_field_types(input_roles, Sequence[BufferRole], "allocate, input roles")
    check_field_types(output_roles, Sequence[BufferRole], "allocate, output roles")


def check_buffer_roles(
    desc: BufferDesc,
    models: Sequence[Model],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
    *,
    identities: Sequence[int] | None = None,
) -> Operand:
    """Checks what a device memory is meant for.

    Args:
        desc: The caller's knowledge of its shape.
        models: The prepared models' models; roles refer to them by index.
        input_roles: Inputs that it may be.
        output_roles: Outputs that it may be.
        identities: Which prepared model each of ``models`` is of, since one may be listed twice and two may have equal models; None
            means that each is of another.

    Returns:
        The operand that the memory can hold: type and quantisation of the roles, dimensions of all roles and ``desc`` combined.

    Raises:
        InvalidArgument: There is no role, one repeats or does not exist, or roles and description contradict each other.
    """
    if not models or not (input_roles or output_roles):
        raise InvalidArgument("allocate: expected at least one prepared model and one role, got none")
    if len(desc.dimensions) > RANK_MAX:
        raise InvalidArgument(f"allocate: expected at most {RANK_MAX} dimensions, got {len(desc.dimensions)}")
    if any(extent < 0 for extent in desc.dimensions):
        raise InvalidArgument(f"allocate: expected extents of 0 or more, got {list(desc.dimensions)}")
    combined: Operand | None = None
    dimensions = desc.dimensions
    seen = set()
    for what, roles in (("input", input_roles), ("output", output_roles)):
        for index, role in enumerate(roles):
            where = f"allocate, {what} role {index}"
            operand = _operand_of_role(models, role, what, where)
            identity = role.model_index if identities is None else identities[role.model_index]
            key = (identity, what, role.io_index)
            if key in seen:
                raise InvalidArgument(f"{where}: expected every role once, got it twice")
            seen.add(key)
            combined = operand if combined is None else combined
            for name in ("type", "scale", "zero_point", "channel_quant", "extension_data"):
                expected, got = getattr(combined, name), getattr(operand, name)
                if expected != got:
                    is_long = name in ("channel_quant", "extension_data")
                    values = (
                        "that of the first role, got another"
                        if is_long
                        else f"{expected} as the first role, got {got}"
                    )
                    raise InvalidArgument(f"{where}, {name}: expected {values}")
            joined = combine_dimensions(dimensions, operand.dimensions)
            if joined is None:
                raise InvalidArgument(
                    f"{where}, dimensions: expected what fits {list(dimensions)}, got {list(operand.dimensions)}"
                )
            dimensions = joined
    assert combined is not None, "there is a role"
    if dimensions and not is_extension_operand_type(combined.type) and is_scalar_type(combined.type):
        raise InvalidArgument(f"allocate: expected no dimensions for a scalar, got {list(dimensions)}")
    return msgspec.structs.replace(combined, dimensions=dimensions)


def _operand_of_role(models: Sequence[Model], role: BufferRole, what: str, where: str) -> Operand:
    if not 0 <= role.model_index < len(models):
        raise InvalidArgument(f"{where}: expected a model index below {len(models)}, got {role.model_index}")
    if not 0 < role.probability <= 1:
        raise InvalidArgument(f"{where}: expected a probability in (0, 1], got {role.probability}")
    main = models[role.model_index].main
    operands = main.inputs if what == "input" else main.outputs
    if not 0 <= role.io_index < len(operands):
        raise InvalidArgument(f"{where}: expected an {what} index below {len(operands)}, got {role.io_index}")
    return operands[role.io_index]


def check_timing(timing: Timing) -> None:
    """Checks measured times.

    Raises:
        GeneralFailure: A time is negative, or the device took longer than its driver.
    """
    for what, time_ns in (("device", timing.time_on_device_ns), ("driver", timing.time_in_driver_ns)):
        if time_ns is not None and time_ns < 0:
            raise GeneralFailure(f"timing, {what}: expected 0 ns or more, got {time_ns} ns")
    on_device, in_driver = timing.time_on_device_ns, timing.time_in_driver_ns
    if on_device is not None and in_driver is not None and on_device > in_driver:
        raise GeneralFailure(
            f"timing: expected the device to take no longer than the driver ({in_driver} ns), got {on_device} ns"
        )


def check_output_shapes(status: ErrorStatus, shapes: Sequence[OutputShape], main: Subgraph) -> None:
    """Checks the output shapes that an execution reports with a status.

    Raises:
        GeneralFailure: The list contradicts the status or the model.
    """
    if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
        if shapes:
            raise GeneralFailure(f"output shapes: expected none with status {status.name}, got {len(shapes)}")
        return
    if not shapes and status == ErrorStatus.NONE:
        return
    if len(shapes) != len(main.outputs):
        raise GeneralFailure(f"output shapes: expected {len(main.outputs)}, got {len(shapes)}")
    if (status == ErrorStatus.NONE) != all(shape.is_sufficient for shape in shapes):
        raise GeneralFailure(f"output shapes: the flags of sufficient size contradict status {status.name}")
    for index, (shape, operand) in enumerate(zip(shapes, main.outputs, strict=True)):
        where = f"output shape {index}"
        if len(shape.dimensions) > RANK_MAX:
            raise GeneralFailure(
                f"{where}: expected at most {RANK_MAX} dimensions, got {len(shape.dimensions)}"
            )
        if any(extent < 0 for extent in shape.dimensions):
            raise GeneralFailure(f"{where}: expected extents of 0 or more, got {list(shape.dimensions)}")
        if combine_dimensions(operand.dimensions, shape.dimensions) is None:
            raise GeneralFailure(
                f"{where}: expected what fits {list(operand.dimensions)}, got {list(shape.dimensions)}"
            )
        is_complete = (
            is_extension_operand_type(operand.type)
            or len(shape.dimensions) > 0
            or dimensions_are_known(operand.type, shape.dimensions)
        )
        # An extent of 0 is a real one here: the result has no elements. Only a missing rank is a contradiction.
        if status == ErrorStatus.NONE and not is_complete:
            raise GeneralFailure(f"{where}: expected a known rank with status NONE, got none")


def check_execution_result(main: Subgraph, result: ExecutionResult, *, measure: bool) -> None:
    """Checks what a synchronous execution reports.

    Args:
        main: The model's main subgraph.
        result: The report.
        measure: Whether timings were asked for.

    Raises:
        GeneralFailure: The report contradicts itself, the model or the question.
    """
    shapes = result.output_shapes
    if (
        result.output_sufficient_size
        and result.timing == NO_TIMING
        and len(shapes) == len(main.output_indexes)
    ):
        # The usual case first, which nothing can contradict: the whole shapes that the model states.
        for index, shape in zip(main.output_indexes, shapes, strict=True):
            stated = main.operands[index].dimensions
            if not stated or 0 in stated or shape.dimensions != stated or not shape.is_sufficient:
                break
        else:
            return
    status = ErrorStatus.NONE if result.output_sufficient_size else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    check_output_shapes(status, shapes, main)
    check_timing(result.timing)
    if (not measure or not result.output_sufficient_size) and result.timing != Timing():
        raise GeneralFailure(
            f"timing: expected none, as it was not asked for or not earned, got {result.timing}"
        )

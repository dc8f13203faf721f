"""Whole models against the rules: pools, extensions, operands, operations, order, references between subgraphs.

Owns the order of the checks and everything that one subgraph can show; checks of two subgraphs are in ``control_flow``, a single
operation's contract in ``aionn.ops``.

Invariants:
1. Nothing is used before it is checked: indexes before operands, places before values, values before contracts.
2. Sums are Python's integers, so that no offset can wrap around.
3. The level that is returned is the least at which every type, place and operation of the model exists.

Source: the rules of the NN HAL 1.3 for models, in the stricter form of its canonical types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from aionn.errors import InvalidModel
from aionn.hal import (
    EXTENSION_OPERATION_MIN,
    EXTENSION_TYPE_MIN,
    OPERAND_TYPE_PROPERTIES,
    RANK_MAX,
    ExtensionNameAndPrefix,
    MemoryKind,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_extension_operand_type,
    operand_size_bytes,
    operand_type_name,
    operation_type_name,
)
from aionn.hal.pieces import between_pieces
from aionn.ops import Array, validate_operation
from aionn.validation.control_flow import check_acyclic, check_control_flow
from aionn.validation.field_types import check_field_types
from aionn.validation.names import is_extension_name

__all__ = ["EXTENSION_PREFIX_MAX", "SIZE_BYTES_MAX", "validate_model"]

EXTENSION_PREFIX_MAX = 0x7FFF
"""Prefixes fill the high 15 bits of a code that stays positive as a signed 32-bit number."""

SIZE_BYTES_MAX = 2**32 - 1
"""Sizes, offsets and extents are unsigned 32-bit numbers on the HAL's wire."""

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""Scales are 32-bit numbers on the HAL's wire; a Python number beyond them would become infinite in a kernel."""

_OEM_TYPES = (OperandType.OEM, OperandType.TENSOR_OEM_BYTE)

OMITTABLE = frozenset(
    {
        OperationType.BIDIRECTIONAL_SEQUENCE_LSTM,
        OperationType.BIDIRECTIONAL_SEQUENCE_RNN,
        OperationType.IF,
        OperationType.LSH_PROJECTION,
        OperationType.LSTM,
        OperationType.QUANTIZED_LSTM,
        OperationType.SQUEEZE,
        OperationType.SVDF,
        OperationType.TRANSPOSE,
        OperationType.TRANSPOSE_CONV_2D,
        OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM,
        OperationType.WHILE,
    }
)
"""Operations that take inputs of lifetime NO_VALUE somewhere; which ones they are is in their contracts."""


def needed_inputs(model: Model) -> frozenset[int]:
    """The inputs of a model that no execution may leave out: an operation reads them that takes no operand without a value."""
    read = {
        index
        for operation in model.main.operations
        if operation.type < EXTENSION_OPERATION_MIN
        and operation.type != OperationType.OEM_OPERATION
        and operation.type not in OMITTABLE
        for index in operation.inputs
    }
    return frozenset(i for i, index in enumerate(model.main.input_indexes) if index in read)


def validate_model(model: Model) -> int:
    """Checks a model against every rule.

    Returns:
        The lowest feature level that can express it, from 1 to 8.

    Raises:
        InvalidArgument: It is not a model.
        InvalidModel: A rule is broken, or a field holds a value of another type; the message begins with the place, such as
            ``subgraph 0, operation 4 (CONV_2D), input 1``.
            Subgraph 0 is the main one, subgraph ``i + 1`` is ``model.referenced[i]``.
    """
    check_field_types(model, Model, "model")
    level = max(_check_pools(model), _check_extension_names(model.extension_name_to_prefix))
    if model.relax_computation_float32_to_float16:
        level = max(level, 2)
    if model.referenced:
        level = max(level, 4)
    subgraphs = (model.main, *model.referenced)
    for index, subgraph in enumerate(subgraphs):
        level = max(level, _check_operands(model, subgraph, f"subgraph {index}"))
    check_acyclic(model)
    for index, subgraph in enumerate(subgraphs):
        # All of them first: IF and WHILE look at the inputs and outputs of others.
        _check_interface(subgraph, f"subgraph {index}")
    for index, subgraph in enumerate(subgraphs):
        where = f"subgraph {index}"
        level = max(level, _check_operations(model, subgraph, where))
        _check_order(subgraph, where)
        _check_consumers(subgraph, where)
    return level


def _refuse(where: str, what: str, expected: object, got: object) -> NoReturn:
    raise InvalidModel(f"{where}, {what}: expected {expected}, got {got}")


def _check_pools(model: Model) -> int:
    level = 1
    for index, pool in enumerate(model.pools):
        if pool.is_closed:
            raise InvalidModel(f"pool {index}: expected an open descriptor, got a closed pool")
        if pool.size_bytes <= 0:
            raise InvalidModel(f"pool {index}: expected at least 1 byte, got {pool.size_bytes}")
        if pool.kind in (MemoryKind.HARDWARE_BUFFER, MemoryKind.HARDWARE_BUFFER_BLOB):
            level = 3
    return level


def _check_extension_names(entries: Sequence[ExtensionNameAndPrefix]) -> int:
    for index, entry in enumerate(entries):
        where = f"extension {index}"
        if not is_extension_name(entry.name):
            _refuse(where, "name", "lower-case words joined by periods", repr(entry.name))
        if not 0 < entry.prefix <= EXTENSION_PREFIX_MAX:
            _refuse(where, "prefix", f"1 to {EXTENSION_PREFIX_MAX}", entry.prefix)
    for what, values in (("name", [e.name for e in entries]), ("prefix", [e.prefix for e in entries])):
        for value, count in Counter(values).items():
            if count > 1:
                _refuse("extensions", what, "no repetition", f"{value!r} {count} times")
    return 3 if entries else 1


# Operands


def _check_operands(model: Model, subgraph: Subgraph, where: str) -> int:
    if not subgraph.operands:
        _refuse(where, "operands", "at least one", "none")
    if not subgraph.operations:
        _refuse(where, "operations", "at least one", "none")
    prefixes = {entry.prefix for entry in model.extension_name_to_prefix}
    level = 1
    for index, operand in enumerate(subgraph.operands):
        place = f"{where}, operand {index} ({operand_type_name(operand.type)})"
        level = max(
            level,
            _check_type(operand, prefixes, place),
            _check_dimensions(operand, place),
        )
        _check_quantization(operand, place)
        _check_parameters(operand, place)
        _check_location(model, operand, place)
        between_pieces()
    return level


def _check_type(operand: Operand, prefixes: set[int], where: str) -> int:
    if is_extension_operand_type(operand.type):
        prefix = operand.type // EXTENSION_TYPE_MIN
        if prefix not in prefixes:
            _refuse(where, "type", f"a prefix of the model's extensions {sorted(prefixes)}", prefix)
        level = 3
    elif isinstance(operand.type, OperandType):
        level = OPERAND_TYPE_PROPERTIES[operand.type].feature_level
    else:
        _refuse(where, "type", "a type of the spec", operand.type)
    if not isinstance(operand.lifetime, OperandLifeTime):
        _refuse(where, "lifetime", "a lifetime of the spec", operand.lifetime)
    is_subgraph = operand.type == OperandType.SUBGRAPH
    if is_subgraph != (operand.lifetime == OperandLifeTime.SUBGRAPH):
        expected = "SUBGRAPH" if is_subgraph else "another than SUBGRAPH"
        _refuse(where, "lifetime", expected, operand.lifetime.name)
    return level


def _check_dimensions(operand: Operand, where: str) -> int:
    dimensions = operand.dimensions
    if len(dimensions) > RANK_MAX:
        _refuse(where, "dimensions", f"at most {RANK_MAX}", len(dimensions))
    if any(not 0 <= extent <= SIZE_BYTES_MAX for extent in dimensions):
        _refuse(where, "dimensions", f"extents from 0 to {SIZE_BYTES_MAX}", list(dimensions))
    if is_extension_operand_type(operand.type):
        return 3
    if OPERAND_TYPE_PROPERTIES[OperandType(operand.type)].is_scalar:
        if dimensions:
            _refuse(where, "dimensions", "none, as it is a scalar", list(dimensions))
        return 1
    size_bytes = operand_size_bytes(operand.type, dimensions)
    if size_bytes > SIZE_BYTES_MAX:
        _refuse(where, "dimensions", f"at most {SIZE_BYTES_MAX} bytes", f"{list(dimensions)}")
    if operand.is_constant and size_bytes == 0:
        _refuse(where, "dimensions", "a known shape, as it is a constant", list(dimensions))
    # A tensor of unknown rank exists from level 3 on.
    return 1 if dimensions else 3


def _check_quantization(operand: Operand, where: str) -> None:
    scale, zero_point = operand.scale, operand.zero_point
    if operand.type in _OEM_TYPES:
        return
    if not -FLOAT32_MAX <= scale <= FLOAT32_MAX:
        _refuse(where, "scale", "a finite number", scale)
    if is_extension_operand_type(operand.type):
        low, high, is_quantized = 0, 0, False
    else:
        properties = OPERAND_TYPE_PROPERTIES[OperandType(operand.type)]
        low, high = properties.zero_point_min, properties.zero_point_max
        is_quantized = properties.is_quantized
    if is_quantized:
        if not scale > 0:
            _refuse(where, "scale", "a positive number", scale)
    elif operand.type == OperandType.TENSOR_INT32:
        if not scale >= 0:
            _refuse(where, "scale", "0 or more", scale)
    elif scale != 0:
        _refuse(where, "scale", 0, scale)
    if not low <= zero_point <= high:
        expected = f"{low} to {high}" if high > low else "0"
        _refuse(where, "zero point", expected, zero_point)


def _check_parameters(operand: Operand, where: str) -> None:
    if operand.type in _OEM_TYPES:
        return
    quant = operand.channel_quant
    if operand.extension_data is not None and not is_extension_operand_type(operand.type):
        _refuse(where, "extension data", "none", f"{len(operand.extension_data)} bytes")
    if operand.type != OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        if quant is not None:
            # A text of them all takes a quarter of a second, in one call.
            _refuse(where, "channel quantisation", "none", f"{len(quant.scales)} scales")
        return
    if quant is None:
        _refuse(where, "channel quantisation", "scales and an axis", "none")
    rank = len(operand.dimensions)
    if not 0 <= quant.channel_dim < rank:
        _refuse(where, "channel axis", f"an axis below {rank}", quant.channel_dim)
    extent = operand.dimensions[quant.channel_dim]
    if extent == 0:
        _refuse(where, "channel axis", "a known extent", list(operand.dimensions))
    if len(quant.scales) != extent:
        _refuse(where, "channel scales", extent, len(quant.scales))
    for scale in quant.scales:
        if not 0 < scale <= FLOAT32_MAX:
            _refuse(where, "channel scales", "positive finite numbers", scale)


def _check_location(model: Model, operand: Operand, where: str) -> None:
    location = operand.location
    fields = (location.pool_index, location.offset, location.length)
    if any(not 0 <= value <= SIZE_BYTES_MAX for value in fields):
        _refuse(where, "location", f"numbers from 0 to {SIZE_BYTES_MAX}", location)
    if location.padding != 0:
        _refuse(where, "location", "no padding", location.padding)
    match operand.lifetime:
        case OperandLifeTime.CONSTANT_COPY:
            if location.pool_index != 0:
                _refuse(where, "location", "pool index 0", location.pool_index)
            _check_range(operand, len(model.operand_values), "the model's values", where)
        case OperandLifeTime.CONSTANT_REFERENCE:
            if location.pool_index >= len(model.pools):
                _refuse(where, "location", f"a pool index below {len(model.pools)}", location.pool_index)
            pool = model.pools[location.pool_index]
            if pool.kind == MemoryKind.HARDWARE_BUFFER:
                _refuse(where, "location", "a pool that can hold constants", f"one of kind {pool.kind}")
            _check_range(operand, pool.size_bytes, f"pool {location.pool_index}", where)
        case OperandLifeTime.SUBGRAPH:
            if location.pool_index != 0 or location.length != 0:
                _refuse(where, "location", "a subgraph index as the offset and else 0", location)
            if location.offset >= len(model.referenced):
                _refuse(where, "subgraph", f"an index below {len(model.referenced)}", location.offset)
        case _:
            if any(fields):
                _refuse(where, "location", f"0 for lifetime {operand.lifetime.name}", location)


def _check_range(operand: Operand, size_bytes: int, what: str, where: str) -> None:
    location = operand.location
    if location.offset + location.length > size_bytes:
        _refuse(
            where,
            "location",
            f"bytes inside of {what} ({size_bytes} bytes)",
            f"{location.length} bytes at {location.offset}",
        )
    if operand.type in _OEM_TYPES or is_extension_operand_type(operand.type):
        return
    expected = operand_size_bytes(operand.type, operand.dimensions)
    if location.length != expected:
        _refuse(where, "length", f"{expected} bytes", location.length)


# Operations and graph


def _check_operations(model: Model, subgraph: Subgraph, where: str) -> int:
    prefixes = {entry.prefix for entry in model.extension_name_to_prefix}
    level = 1
    read: dict[int, Array] = {}
    parts: dict[int, bytes | None] = {}
    for index, operation in enumerate(subgraph.operations):
        name = operation_type_name(operation.type)
        place = f"{where}, operation {index}"
        _check_indexes(subgraph, operation, f"{place} ({name})")
        if operation.type >= EXTENSION_OPERATION_MIN:
            prefix = operation.type // EXTENSION_OPERATION_MIN
            if prefix not in prefixes:
                expected = f"a prefix of the model's extensions {sorted(prefixes)}"
                _refuse(f"{place} ({name})", "type", expected, prefix)
            level = max(level, 3)
        elif operation.type != OperationType.OEM_OPERATION:
            level = max(
                level,
                validate_operation(model, subgraph.operands, operation, where=place, read=read, parts=parts),
            )
            _check_omitted(subgraph, operation, f"{place} ({name})")
        if operation.type in (OperationType.IF, OperationType.WHILE):
            check_control_flow(model, subgraph, operation, f"{place} ({name})")
        between_pieces()
    return level


def _check_indexes(subgraph: Subgraph, operation: Operation, where: str) -> None:
    count = len(subgraph.operands)
    for what, indexes in (("input", operation.inputs), ("output", operation.outputs)):
        for position, index in enumerate(indexes):
            if not 0 <= index < count:
                _refuse(where, f"{what} {position}", f"an operand index below {count}", index)
    for position, index in enumerate(operation.outputs):
        lifetime = subgraph.operands[index].lifetime
        if lifetime not in (OperandLifeTime.TEMPORARY_VARIABLE, OperandLifeTime.SUBGRAPH_OUTPUT):
            expected = "lifetime TEMPORARY_VARIABLE or SUBGRAPH_OUTPUT"
            _refuse(where, f"output {position}", expected, lifetime.name)


def _check_omitted(subgraph: Subgraph, operation: Operation, where: str) -> None:
    if operation.type in OMITTABLE:
        return
    for position, index in enumerate(operation.inputs):
        if subgraph.operands[index].lifetime == OperandLifeTime.NO_VALUE:
            _refuse(where, f"input {position}", "a value", "an operand that is left out")


def _check_interface(subgraph: Subgraph, where: str) -> None:
    for what, indexes, lifetime in (
        ("input", subgraph.input_indexes, OperandLifeTime.SUBGRAPH_INPUT),
        ("output", subgraph.output_indexes, OperandLifeTime.SUBGRAPH_OUTPUT),
    ):
        count = len(subgraph.operands)
        for position, index in enumerate(indexes):
            if not 0 <= index < count:
                _refuse(where, f"{what} {position}", f"an operand index below {count}", index)
            got = subgraph.operands[index].lifetime
            if got != lifetime:
                _refuse(where, f"{what} {position}", f"lifetime {lifetime.name}", got.name)
        listed = set(indexes)
        if len(listed) != len(indexes):
            repeated = [index for index, count in Counter(indexes).items() if count > 1]
            _refuse(where, f"{what}s", "every operand once", f"operand {repeated[0]} repeated")
        for index, operand in enumerate(subgraph.operands):
            if operand.lifetime == lifetime and index not in listed:
                _refuse(where, f"operand {index}", f"to be among the {what}s", f"lifetime {lifetime.name}")


def _check_order(subgraph: Subgraph, where: str) -> None:
    written = [
        operand.lifetime not in (OperandLifeTime.TEMPORARY_VARIABLE, OperandLifeTime.SUBGRAPH_OUTPUT)
        for operand in subgraph.operands
    ]
    for position, operation in enumerate(subgraph.operations):
        place = f"{where}, operation {position} ({operation_type_name(operation.type)})"
        for number, index in enumerate(operation.inputs):
            if not written[index]:
                _refuse(place, f"input {number}", "a value that is written before", f"operand {index}")
        for number, index in enumerate(operation.outputs):
            if written[index]:
                _refuse(place, f"output {number}", "an operand that is written once", f"operand {index}")
            written[index] = True
        between_pieces()
    for index, is_written in enumerate(written):
        if not is_written:
            _refuse(where, f"operand {index}", "to be written by an operation", "no writer")


def _check_consumers(subgraph: Subgraph, where: str) -> None:
    uses = Counter(index for operation in subgraph.operations for index in operation.inputs)
    for index, operand in enumerate(subgraph.operands):
        if operand.consumer_count is not None and operand.consumer_count != uses[index]:
            _refuse(where, f"operand {index}, consumer count", uses[index], operand.consumer_count)

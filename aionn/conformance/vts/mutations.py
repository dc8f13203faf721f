"""Mutations that make a legal model illegal, family by family, with the combinations that stay legal.

Owns the 20 families that change a model; the two that change preference and priority need none. The cases (``refusals``) check the
driver's answers.

Invariants:
1. A mutation that is given is illegal by the rules; values that a rule leaves free are exempt, by the tables and predicates beside
   the families.
2. Only the main subgraph changes, and only in the way of the mutation's name: everything else stays as legal as it was.

Source: ``ValidateModel`` of the NN HAL's VTS 1.3 for families and exemptions; the operations' contracts for the rest of the latter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from aionn.hal import (
    ChannelQuant,
    DataLocation,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_scalar_type,
)

__all__ = ["FAMILIES", "Mutation"]

replace = msgspec.structs.replace
Op = OperationType
T = OperandType
LifeTime = OperandLifeTime

_QUANT8 = (T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED)
_FLOATS = (T.TENSOR_FLOAT16, T.TENSOR_FLOAT32)
_WRITTEN = (LifeTime.TEMPORARY_VARIABLE, LifeTime.SUBGRAPH_OUTPUT)
_CONSTANT = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


class Mutation(NamedTuple):
    """One change.

    Attributes:
        where: The changed place, and the new value.
        make: Makes the changed model.
    """

    where: str
    make: Callable[[], Model]


Family = Callable[[Model], Iterator[Mutation]]


def _with_main(
    model: Model,
    *,
    operands: Sequence[Operand] | None = None,
    operations: Sequence[Operation] | None = None,
    inputs: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
) -> Model:
    main = model.main
    return replace(
        model,
        main=Subgraph(
            main.operands if operands is None else tuple(operands),
            main.operations if operations is None else tuple(operations),
            main.input_indexes if inputs is None else tuple(inputs),
            main.output_indexes if outputs is None else tuple(outputs),
        ),
    )


def _with_operand(model: Model, index: int, operand: Operand) -> Model:
    operands = list(model.main.operands)
    operands[index] = operand
    return _with_main(model, operands=operands)


def _with_operation(model: Model, index: int, operation: Operation) -> Model:
    operations = list(model.main.operations)
    operations[index] = operation
    return _with_main(model, operations=operations)


def _without(values: Sequence[int], position: int) -> tuple[int, ...]:
    return (*values[:position], *values[position + 1 :])


# Order and writers


def _execution_order(model: Model) -> Iterator[Mutation]:
    operations = model.main.operations
    for i, first in enumerate(operations):
        for j in range(i + 1, len(operations)):
            if set(first.outputs) & set(operations[j].inputs):
                order = [*operations[:i], *operations[i + 1 : j + 1], first, *operations[j + 1 :]]
                yield Mutation(
                    f"operation {i} moved behind {j}", partial(_with_main, model, operations=order)
                )


def _extra_writer(model: Model) -> Iterator[Mutation]:
    operations = model.main.operations
    for i, operation in enumerate(operations):
        twice = (*operations, operation)
        yield Mutation(f"operation {i} done twice", partial(_with_main, model, operations=twice))


def _remove_writer(model: Model) -> Iterator[Mutation]:
    main = model.main
    for i, operation in enumerate(main.operations):
        for position, index in enumerate(operation.outputs):

            def make(
                i: int = i, operation: Operation = operation, position: int = position, index: int = index
            ) -> Model:
                fresh = replace(main.operands[index], lifetime=LifeTime.TEMPORARY_VARIABLE)
                outputs = (
                    *operation.outputs[:position],
                    len(main.operands),
                    *operation.outputs[position + 1 :],
                )
                changed = _with_operation(model, i, replace(operation, outputs=outputs))
                return _with_main(changed, operands=(*main.operands, fresh))

            yield Mutation(f"operand {index} without its writer", make)


# Operands

_BAD_TYPES = (16, 9999, 10002, 0xFFFF)


def _operand_type(model: Model) -> Iterator[Mutation]:
    for i, operand in enumerate(model.main.operands):
        for code in _BAD_TYPES:
            yield Mutation(
                f"operand {i} of type {code}",
                partial(_with_operand, model, i, replace(operand, type=code)),
            )


def _operand_rank(model: Model) -> Iterator[Mutation]:
    for i, operand in enumerate(model.main.operands):
        if is_scalar_type(operand.type):
            changed = replace(operand, dimensions=(1,))
        elif operand.is_constant:
            changed = replace(operand, dimensions=())
        else:
            continue
        yield Mutation(
            f"operand {i} of rank {len(changed.dimensions)}",
            partial(_with_operand, model, i, changed),
        )


_BAD_SCALES = {
    T.TENSOR_INT32: -1.0,
    T.TENSOR_QUANT8_ASYMM: 0.0,
    T.TENSOR_QUANT8_ASYMM_SIGNED: 0.0,
    T.TENSOR_QUANT8_SYMM: 0.0,
    T.TENSOR_QUANT16_ASYMM: 0.0,
    T.TENSOR_QUANT16_SYMM: 0.0,
}
"""For every other type a scale of 1 is the illegal one."""

_BAD_ZERO_POINTS = {
    T.TENSOR_QUANT8_ASYMM: (-1, 256),
    T.TENSOR_QUANT8_ASYMM_SIGNED: (-129, 128),
    T.TENSOR_QUANT8_SYMM: (-129, -1, 1, 128),
    T.TENSOR_QUANT16_ASYMM: (-1, 65536),
    T.TENSOR_QUANT16_SYMM: (-32769, -1, 1, 32768),
}
"""For every other type a zero point of 1 is the illegal one."""


def _scale(model: Model) -> Iterator[Mutation]:
    for i, operand in enumerate(model.main.operands):
        scale = _BAD_SCALES.get(T(operand.type), 1.0)
        yield Mutation(
            f"operand {i} of scale {scale:g}",
            partial(_with_operand, model, i, replace(operand, scale=scale)),
        )


def _zero_point(model: Model) -> Iterator[Mutation]:
    for i, operand in enumerate(model.main.operands):
        for zero_point in _BAD_ZERO_POINTS.get(T(operand.type), (1,)):
            yield Mutation(
                f"operand {i} of zero point {zero_point}",
                partial(_with_operand, model, i, replace(operand, zero_point=zero_point)),
            )


def _lifetime(model: Model) -> Iterator[Mutation]:
    main = model.main
    used_by: dict[int, set[int]] = {}
    for operation in main.operations:
        for index in operation.inputs:
            used_by.setdefault(index, set()).add(operation.type)
    for i, operand in enumerate(main.operands):
        for lifetime in LifeTime:
            between_constants = operand.lifetime in _CONSTANT and lifetime in _CONSTANT
            # A constant may be left out if no operation reads it, or all that do take an omitted input.
            left_out = (
                operand.lifetime in _CONSTANT
                and lifetime == LifeTime.NO_VALUE
                and used_by.get(i, set()) <= _TAKES_OMITTED
            )
            if lifetime == operand.lifetime or between_constants or left_out:
                continue
            location = operand.location if lifetime in _CONSTANT else DataLocation()
            changed = replace(operand, lifetime=lifetime, location=location)
            yield Mutation(
                f"operand {i} ({operand.lifetime.name}) of lifetime {lifetime.name}",
                partial(_with_operand, model, i, changed),
            )


def _input_output(model: Model) -> Iterator[Mutation]:
    """Operands that change their lifetime together with the lists of inputs and outputs."""
    main = model.main
    for i, operand in enumerate(main.operands):
        inputs = tuple(index for index in main.input_indexes if index != i)
        outputs = tuple(index for index in main.output_indexes if index != i)

        def changed(
            lifetime: LifeTime, inputs: tuple[int, ...], outputs: tuple[int, ...], i: int = i
        ) -> Callable[[], Model]:
            operand = replace(model.main.operands[i], lifetime=lifetime, location=DataLocation())
            return partial(_with_main, _with_operand(model, i, operand), inputs=inputs, outputs=outputs)

        if operand.lifetime in _WRITTEN:
            yield Mutation(
                f"written operand {i} made an input", changed(LifeTime.SUBGRAPH_INPUT, (*inputs, i), outputs)
            )
        elif operand.lifetime != LifeTime.SUBGRAPH:
            yield Mutation(
                f"operand {i} made an output", changed(LifeTime.SUBGRAPH_OUTPUT, inputs, (*outputs, i))
            )
            yield Mutation(
                f"operand {i} made temporary", changed(LifeTime.TEMPORARY_VARIABLE, inputs, outputs)
            )
    for what, indexes in (("input", main.input_indexes), ("output", main.output_indexes)):
        for position, index in enumerate(indexes):
            for wrong in (index, len(main.operands)):
                listed = (
                    (*indexes, wrong)
                    if wrong == index
                    else (*indexes[:position], wrong, *indexes[position + 1 :])
                )
                yield Mutation(
                    f"{what} {position}: operand {wrong} {'twice' if wrong == index else 'instead'}",
                    partial(_with_main, model, inputs=listed)
                    if what == "input"
                    else partial(_with_main, model, outputs=listed),
                )


def _consumer_count(model: Model) -> Iterator[Mutation]:
    uses = Counter(index for operation in model.main.operations for index in operation.inputs)
    exact = [replace(operand, consumer_count=uses[i]) for i, operand in enumerate(model.main.operands)]
    for i in range(len(exact)):
        for change in (-1, 1):

            def make(i: int = i, change: int = change) -> Model:
                operands = list(exact)
                operands[i] = replace(exact[i], consumer_count=uses[i] + change)
                return _with_main(model, operands=operands)

            yield Mutation(f"operand {i} with {uses[i] + change} consumers instead of {uses[i]}", make)


# Operations' operands


def _retyped(operand: Operand, kind: OperandType) -> Operand:
    """The operand with another type, and whatever that type needs beside it."""
    if is_scalar_type(kind):
        return replace(operand, type=kind, dimensions=(), scale=0.0, zero_point=0, channel_quant=None)
    dimensions = operand.dimensions or (1,)
    if kind in (T.TENSOR_BOOL8, *_FLOATS):
        scale, zero_point = 0.0, 0
    elif kind == T.TENSOR_INT32:
        scale, zero_point = operand.scale, 0
    elif kind == T.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        quant = ChannelQuant((1.0,) * dimensions[0], 0)
        return replace(
            operand, type=kind, dimensions=dimensions, scale=0.0, zero_point=0, channel_quant=quant
        )
    else:
        scale = operand.scale or 1.0
        low, high = _ZERO_POINTS[kind]
        zero_point = min(max(operand.zero_point, low), high)
    return replace(
        operand, type=kind, dimensions=dimensions, scale=scale, zero_point=zero_point, channel_quant=None
    )


_ZERO_POINTS = {
    T.TENSOR_QUANT8_ASYMM: (0, 255),
    T.TENSOR_QUANT8_ASYMM_SIGNED: (-128, 127),
    T.TENSOR_QUANT8_SYMM: (0, 0),
    T.TENSOR_QUANT16_ASYMM: (0, 65535),
    T.TENSOR_QUANT16_SYMM: (0, 0),
}

_TENSORS = tuple(T(kind) for kind in T if kind < T.OEM and not is_scalar_type(kind))
_CAST = (*_FLOATS, T.TENSOR_INT32, *_QUANT8)
_WEIGHTS: dict[tuple[str, int], tuple[OperandType, ...]] = {
    ("input", 1): (*_QUANT8, T.TENSOR_QUANT8_SYMM_PER_CHANNEL)
}

_EXEMPT_TYPES: dict[int, dict[tuple[str, int], tuple[OperandType, ...]]] = {
    Op.ARGMAX: {("input", 0): _CAST},
    Op.ARGMIN: {("input", 0): _CAST},
    Op.AXIS_ALIGNED_BBOX_TRANSFORM: {("input", 1): _QUANT8},
    Op.CAST: {("input", 0): _CAST, ("output", 0): _CAST},
    Op.CONV_2D: _WEIGHTS,
    Op.DEPTHWISE_CONV_2D: _WEIGHTS,
    Op.DEQUANTIZE: {
        ("input", 0): (*_QUANT8, T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT8_SYMM_PER_CHANNEL),
        ("output", 0): _FLOATS,
    },
    Op.GROUPED_CONV_2D: _WEIGHTS,
    Op.LSH_PROJECTION: {("input", 1): _TENSORS},
    Op.QUANTIZE: {("input", 0): _FLOATS, ("output", 0): _QUANT8},
    Op.RANDOM_MULTINOMIAL: {("input", 0): _FLOATS},
    Op.RANK: {("input", 0): _TENSORS},
    Op.TRANSPOSE_CONV_2D: _WEIGHTS,
}
"""Types that an operation takes at an operand without regard to the other ones."""

_TAKES_OMITTED = frozenset(
    {
        Op.BIDIRECTIONAL_SEQUENCE_LSTM,
        Op.BIDIRECTIONAL_SEQUENCE_RNN,
        Op.IF,
        Op.LSH_PROJECTION,
        Op.LSTM,
        Op.QUANTIZED_LSTM,
        Op.SQUEEZE,
        Op.SVDF,
        Op.TRANSPOSE,
        Op.TRANSPOSE_CONV_2D,
        Op.UNIDIRECTIONAL_SEQUENCE_LSTM,
        Op.WHILE,
    }
)
"""Operations with inputs that may be left out."""


def _operation_operand_type(model: Model) -> Iterator[Mutation]:
    main = model.main
    uses: dict[int, list[tuple[OperandType, ...]]] = {}
    for operation in main.operations:
        exempt_at = _EXEMPT_TYPES.get(operation.type, {})
        for what, indexes in (("input", operation.inputs), ("output", operation.outputs)):
            for position, index in enumerate(indexes):
                uses.setdefault(index, []).append(exempt_at.get((what, position), ()))
    for i, allowed in sorted(uses.items()):
        operand = main.operands[i]
        exempt = set.intersection(*map(set, allowed))
        for kind in T:
            if kind in (operand.type, T.OEM, T.TENSOR_OEM_BYTE, T.SUBGRAPH) or kind in exempt:
                continue
            yield Mutation(
                f"operand {i} of type {kind.name}",
                partial(_with_operand, model, i, _retyped(operand, kind)),
            )


_BAD_OPERATIONS = (max(code for code in Op if code != Op.OEM_OPERATION) + 1, 9999, 10001)


def _operation_type(model: Model) -> Iterator[Mutation]:
    for i, operation in enumerate(model.main.operations):
        for code in _BAD_OPERATIONS:
            yield Mutation(
                f"operation {i} of type {code}",
                partial(_with_operation, model, i, replace(operation, type=code)),
            )


def _index_out_of_range(what: str) -> Family:
    def family(model: Model) -> Iterator[Mutation]:
        count = len(model.main.operands)
        for i, operation in enumerate(model.main.operations):
            indexes: tuple[int, ...] = getattr(operation, what)
            for position in range(len(indexes)):
                for wrong in (count, 2**31 - 1, -1):
                    changed = replace(
                        operation, **{what: (*indexes[:position], wrong, *indexes[position + 1 :])}
                    )
                    yield Mutation(
                        f"operation {i}, {what[:-1]} {position}: operand {wrong}",
                        partial(_with_operation, model, i, changed),
                    )

    return family


# Removing and adding


def _without_operand(model: Model, index: int) -> Model:
    def renumber(indexes: Sequence[int]) -> tuple[int, ...]:
        return tuple(i - (i > index) for i in indexes if i != index)

    main = model.main
    return _with_main(
        model,
        operands=(*main.operands[:index], *main.operands[index + 1 :]),
        operations=[
            replace(o, inputs=renumber(o.inputs), outputs=renumber(o.outputs)) for o in main.operations
        ],
        inputs=renumber(main.input_indexes),
        outputs=renumber(main.output_indexes),
    )


def _stays_legal_without(operation: Operation, index: int) -> bool:
    """Whether taking an operand away from an operation may leave it legal."""
    if index in operation.outputs:
        return operation.type in _OPTIONAL_OUTPUTS
    positions = [p for p, i in enumerate(operation.inputs) if i == index]
    return all(_is_optional(operation, position) for position in positions)


def _remove_operand(model: Model) -> Iterator[Mutation]:
    for index in range(len(model.main.operands)):
        users = [o for o in model.main.operations if index in (*o.inputs, *o.outputs)]
        if users and not all(_stays_legal_without(o, index) for o in users):
            yield Mutation(f"without operand {index}", partial(_without_operand, model, index))


def _remove_operation(model: Model) -> Iterator[Mutation]:
    operations = model.main.operations
    for i in range(len(operations)):
        left = (*operations[:i], *operations[i + 1 :])
        yield Mutation(f"without operation {i}", partial(_with_main, model, operations=left))


def _remove_input(model: Model) -> Iterator[Mutation]:
    for i, operation in enumerate(model.main.operations):
        for position in range(len(operation.inputs)):
            if _is_optional(operation, position):
                continue
            changed = replace(operation, inputs=_without(operation.inputs, position))
            yield Mutation(
                f"operation {i} without input {position}",
                partial(_with_operation, model, i, changed),
            )


def _remove_output(model: Model) -> Iterator[Mutation]:
    for i, operation in enumerate(model.main.operations):
        for position in range(len(operation.outputs)):
            changed = replace(operation, outputs=_without(operation.outputs, position))
            yield Mutation(
                f"operation {i} without output {position}",
                partial(_with_operation, model, i, changed),
            )


def _add(what: str) -> Family:
    def family(model: Model) -> Iterator[Mutation]:
        main = model.main
        lifetime = LifeTime.SUBGRAPH_INPUT if what == "inputs" else LifeTime.SUBGRAPH_OUTPUT
        operands = (*main.operands, Operand(T.INT32, lifetime=lifetime))
        index = len(main.operands)
        for i, operation in enumerate(main.operations):
            if what == "inputs" and _takes_another_scalar(operation):
                continue

            def make(i: int = i, operation: Operation = operation) -> Model:
                changed = replace(operation, **{what: (*getattr(operation, what), index)})
                whole = _with_main(_with_operation(model, i, changed), operands=operands)
                if what == "inputs":
                    return _with_main(whole, inputs=(*main.input_indexes, index))
                return _with_main(whole, outputs=(*main.output_indexes, index))

            yield Mutation(f"operation {i} with another of its {what}", make)

    return family


_OPTIONAL_OUTPUTS = frozenset(
    {
        Op.BIDIRECTIONAL_SEQUENCE_LSTM,
        Op.BIDIRECTIONAL_SEQUENCE_RNN,
        Op.SPLIT,
        Op.UNIDIRECTIONAL_SEQUENCE_LSTM,
        Op.UNIDIRECTIONAL_SEQUENCE_RNN,
        Op.WHILE,
    }
)
"""Operations whose number of outputs is given by another operand, or by the caller: an operand less may fit as well."""

_POOL = ((11, 10), (8, 7))
_RESIZE = ((4, 3), (5, 3), (5, 4), (6, 3), (6, 4), (6, 5))
_OPTIONAL_INPUTS: dict[int, tuple[tuple[int, int], ...]] = {
    Op.AVERAGE_POOL_2D: _POOL,
    Op.BATCH_TO_SPACE_ND: ((3, 2),),
    Op.CONV_2D: _POOL,
    Op.DEPTHWISE_CONV_2D: ((12, 11), (9, 8)),
    Op.DEPTH_TO_SPACE: ((3, 2),),
    Op.L2_NORMALIZATION: ((2, 1),),
    Op.L2_POOL_2D: _POOL,
    Op.LOCAL_RESPONSE_NORMALIZATION: ((6, 5),),
    Op.MAX_POOL_2D: _POOL,
    Op.RESIZE_BILINEAR: _RESIZE,
    Op.RESIZE_NEAREST_NEIGHBOR: _RESIZE,
    Op.SOFTMAX: ((3, 2),),
    Op.SPACE_TO_BATCH_ND: ((4, 3),),
    Op.SPACE_TO_DEPTH: ((3, 2),),
}
"""Number of inputs and the position of one that may go: a layout, an axis, a rounding."""

_OPTIONAL_AXIS = {Op.L2_NORMALIZATION: 1, Op.LOCAL_RESPONSE_NORMALIZATION: 5, Op.SOFTMAX: 2}
"""Operations that take an axis behind this many inputs."""


def _is_optional(operation: Operation, position: int) -> bool:
    """Whether an operation may stay legal without one of its inputs."""
    count = len(operation.inputs)
    if operation.type == Op.CONCATENATION:
        return count > 2 and position != count - 1
    if operation.type == Op.PACK:
        return count > 2 and position != 0
    return (count, position) in _OPTIONAL_INPUTS.get(operation.type, ())


def _takes_another_scalar(operation: Operation) -> bool:
    """Whether an operation may take one more input that is an INT32 scalar."""
    return len(operation.inputs) == _OPTIONAL_AXIS.get(OperationType(operation.type))


FAMILIES: dict[str, Family] = {
    "operation_execution_order": _execution_order,
    "operand_type": _operand_type,
    "operand_rank": _operand_rank,
    "operand_scale": _scale,
    "operand_zero_point": _zero_point,
    "operand_lifetime": _lifetime,
    "operand_input_output": _input_output,
    "operand_consumer_count": _consumer_count,
    "operand_extra_writer": _extra_writer,
    "operand_remove_writer": _remove_writer,
    "operation_operand_type": _operation_operand_type,
    "operation_type": _operation_type,
    "operation_input_index": _index_out_of_range("inputs"),
    "operation_output_index": _index_out_of_range("outputs"),
    "remove_operand": _remove_operand,
    "remove_operation": _remove_operation,
    "remove_operation_input": _remove_input,
    "remove_operation_output": _remove_output,
    "add_operation_input": _add("inputs"),
    "add_operation_output": _add("outputs"),
}
"""Families of mutations by name; the first word names the changed part."""

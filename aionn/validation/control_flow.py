"""IF and WHILE against the subgraphs that they refer to, and the references among subgraphs.

Owns the rules that take more than one subgraph. The places of the references must have been checked.

Invariant: two operands are compatible when type, scale, zero point and parameters are equal and no known extent differs.

Source: the rules for control flow of the NN HAL 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from aionn.errors import InvalidModel
from aionn.hal import (
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    combine_dimensions,
    operand_type_name,
)

__all__ = ["check_acyclic", "check_control_flow"]


def check_acyclic(model: Model) -> None:
    """Demands that no referenced subgraph refers to itself by any way.

    Raises:
        InvalidModel: There is a circle; the message lists it.
    """
    references = [
        sorted({o.location.offset for o in s.operands if o.lifetime == OperandLifeTime.SUBGRAPH})
        for s in model.referenced
    ]
    # 0: not seen, 1: on the path, 2: done. No recursion: the model chooses the depth.
    state = [0] * len(references)
    for start in range(len(references)):
        path: list[int] = []
        stack = [start]
        while stack:
            index = stack[-1]
            if state[index] == 0:
                state[index] = 1
                path.append(index)
                for target in references[index]:
                    if state[target] == 1:
                        circle = [*path[path.index(target) :], target]
                        names = " -> ".join(f"subgraph {i + 1}" for i in circle)
                        raise InvalidModel(f"{names}: expected no circle of references")
                    if state[target] == 0:
                        stack.append(target)
            else:
                stack.pop()
                if state[index] == 1:
                    state[index] = 2
                    path.pop()


def check_control_flow(model: Model, subgraph: Subgraph, operation: Operation, where: str) -> None:
    """Checks an IF or WHILE whose own contract holds.

    Raises:
        InvalidModel: A referenced subgraph does not fit the operation.
    """
    operands = subgraph.operands
    inputs = [operands[i] for i in operation.inputs]
    outputs = [operands[i] for i in operation.outputs]
    if operation.type == OperationType.IF:
        _check_condition(inputs[0], f"{where}, input 0")
        for position in (1, 2):
            branch = model.referenced[inputs[position].location.offset]
            place = f"{where}, input {position}"
            _check_all(branch.inputs, inputs[3:], f"{place}: branch input")
            _check_all(branch.outputs, outputs, f"{place}: branch output")
        return
    _check_while(model, inputs, outputs, where)


def _check_while(model: Model, inputs: Sequence[Operand], outputs: Sequence[Operand], where: str) -> None:
    condition = model.referenced[inputs[0].location.offset]
    body = model.referenced[inputs[1].location.offset]
    state = inputs[2:]
    _check_all(condition.inputs, state, f"{where}, input 0: condition input")
    if len(condition.outputs) != 1:
        _refuse(f"{where}, input 0: condition outputs", 1, len(condition.outputs))
    _check_condition(condition.outputs[0], f"{where}, input 0: condition output 0")
    _check_all(body.inputs, state, f"{where}, input 1: body input")
    if not len(outputs) <= len(body.outputs) <= len(body.inputs):
        _refuse(
            f"{where}, input 1: body outputs",
            f"{len(outputs)} to {len(body.inputs)}",
            len(body.outputs),
        )
    _check_all(body.outputs[: len(outputs)], outputs, f"{where}, input 1: body output")
    for position, (after, before) in enumerate(zip(body.outputs, body.inputs, strict=False)):
        _check_compatible(after, before, f"{where}, input 1: body output {position}")


def _refuse(where: str, expected: object, got: object) -> NoReturn:
    raise InvalidModel(f"{where}: expected {expected}, got {got}")


def _check_condition(operand: Operand, where: str) -> None:
    # An unknown shape is left to the execution.
    if operand.type != OperandType.TENSOR_BOOL8 or combine_dimensions(operand.dimensions, (1,)) is None:
        _refuse(where, "TENSOR_BOOL8 of shape [1]", _described(operand))


def _check_all(inner: Sequence[Operand], outer: Sequence[Operand], where: str) -> None:
    if len(inner) != len(outer):
        _refuse(f"{where}s", len(outer), len(inner))
    for position, (a, b) in enumerate(zip(inner, outer, strict=True)):
        _check_compatible(a, b, f"{where} {position}")


def _check_compatible(inner: Operand, outer: Operand, where: str) -> None:
    is_same = (
        inner.type == outer.type
        and inner.scale == outer.scale
        and inner.zero_point == outer.zero_point
        and inner.channel_quant == outer.channel_quant
        and inner.extension_data == outer.extension_data
        and combine_dimensions(inner.dimensions, outer.dimensions) is not None
    )
    if not is_same:
        _refuse(where, _described(outer), _described(inner))


def _described(operand: Operand) -> str:
    text = f"{operand_type_name(operand.type)} {list(operand.dimensions)}"
    if operand.scale or operand.zero_point:
        text += f" with scale {operand.scale} and zero point {operand.zero_point}"
    return text

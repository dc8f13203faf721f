"""IF and WHILE: the contract of the operations themselves.

Owns which inputs and outputs they take and the types of those. Refuses to own what happens: the interpreter runs the
referenced subgraphs. ``aionn.validation`` compares the subgraphs' inputs and outputs with the operation's, since that takes
the whole model.

Invariants:
1. The kernels here are never reached: an executor treats both operations itself, before it looks for a kernel.
2. Neither validator looks at the types of the values that pass through.

Source: IF and WHILE of the NN HAL 1.3.
"""

from __future__ import annotations

from typing import NoReturn

from aionn.hal import OperandLifeTime, OperandType, OperationType
from aionn.ops.signature import Call, Check, OperationContract

__all__ = ["OPERATIONS"]

_LEVEL = 4


def _subgraph_input(check: Check, index: int) -> None:
    check.input_type(index, (OperandType.SUBGRAPH,))
    lifetime = check.inputs[index].lifetime
    check.require(
        lifetime == OperandLifeTime.SUBGRAPH,
        f"input {index}",
        "lifetime SUBGRAPH",
        f"lifetime {lifetime.name}",
    )


def _no_subgraph_beyond(check: Check, first: int) -> None:
    """Values that pass into the subgraphs are data: a subgraph cannot be handed over."""
    for what, operands, start in (("input", check.inputs, first), ("output", check.outputs, 0)):
        for index in range(start, len(operands)):
            check.require(
                operands[index].type != OperandType.SUBGRAPH, f"{what} {index}", "a value", "a subgraph"
            )


def _validate_if(check: Check) -> None:
    check.needs(_LEVEL)
    check.counts_at_least(3, 1)
    check.input_type(0, (OperandType.TENSOR_BOOL8,))
    check.require(not check.is_omitted(0), "input 0", "a condition", "no value")
    check.input_rank(0, 1)
    check.extent("input 0", check.inputs[0], 0, 1)
    _subgraph_input(check, 1)
    _subgraph_input(check, 2)
    _no_subgraph_beyond(check, 3)


def _validate_while(check: Check) -> None:
    check.needs(_LEVEL)
    check.counts_at_least(3, 1)
    _subgraph_input(check, 0)
    _subgraph_input(check, 1)
    _no_subgraph_beyond(check, 2)
    states = len(check.inputs) - 2
    check.require(
        len(check.outputs) <= states,
        "number of outputs",
        f"at most {states}, one per state value",
        len(check.outputs),
    )


def _execute(call: Call) -> NoReturn:
    raise AssertionError("IF and WHILE have no kernel: the executor runs their subgraphs")


OPERATIONS: tuple[OperationContract, ...] = (
    OperationContract(
        type=OperationType.IF,
        validate=_validate_if,
        shapes=None,
        execute=_execute,
        doc="""Runs one of two subgraphs.

outputs = then(inputs 3...) if input 0 else otherwise(inputs 3...).

Inputs:
    0: condition, TENSOR_BOOL8 [1].
    1: SUBGRAPH to run when the condition is true.
    2: SUBGRAPH to run when it is false.
    3...: the inputs of either subgraph, any type; their number may be 0.

Outputs:
    0...: the outputs of the subgraph that ran.

Quantisation: types, scales and zero points of the values equal those of both subgraphs' inputs and outputs.

Types by feature level: 4.

Stricter than the spec: none. A condition of unknown shape is checked when it runs.

Source: NN HAL 1.3, ``OperationType::IF``.
""",
    ),
    OperationContract(
        type=OperationType.WHILE,
        validate=_validate_while,
        shapes=None,
        execute=_execute,
        doc="""Runs a subgraph while the condition of another is true.

state = inputs 2...; while condition(state): state[:n] = body(state), n being the number of the body's outputs;
outputs = the first values of state. State beyond the body's outputs stays constant through the loop.

Inputs:
    0: SUBGRAPH of the condition: takes the state, returns TENSOR_BOOL8 [1].
    1: SUBGRAPH of the body: takes the state, returns its first values anew.
    2...: the initial state, any type; at least one.

Outputs:
    0...: final values of the first state values; at most as many as the body returns.

Quantisation: types, scales and zero points of a state value equal in both subgraphs and outside.

Types by feature level: 4.

Time: the loop time-out of the execution runs from the loop's start; it is looked at after each condition that holds, before
the body.

Stricter than the spec: none. The operation alone allows at most one output per state value; that the body returns enough is the
whole model's matter.

Source: NN HAL 1.3, ``OperationType::WHILE``.
""",
    ),
)

"""The cost of hand-overs between devices against the gain of the quickest device for each operation. Pure.

``partition`` chooses the best device for each operation by itself, as the NN HAL's runtime does. A model whose operations are
supported by two devices in turn would so be handed to and fro between them. Here a step moves to another device that supports all
of its operations if that saves more time by the hand-overs that are no longer needed than the operations take longer there.

Invariants:
1. An operation moves only to a device that supports it, and never to the reference device, which is for what no other device takes.
2. The estimate of the whole never rises; equal arguments give equal choices.
3. IF, WHILE and operations on values of unknown size do not move: their duration cannot be estimated.

Source: costs of a hand-over and durations of the reference device's kernels on small machines, as orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from aionn.errors import GeneralFailure
from aionn.hal import Model, Operation, OperationType
from aionn.runtime.placement.partition import (
    CONTROL_FLOW,
    Candidate,
    Choice,
    Step,
    is_unknown,
    make_steps,
)

__all__ = ["reference_us", "spare_handovers"]

HANDOVER_US = 60.0
"""A step more: a request to another process and its answer, and an operand that goes through memory."""

OPERATION_US = 10.0
"""An operation of a few elements on the reference device, to whose speed the scores of all devices refer."""

ELEMENT_US = 0.002
"""One element that is read or written."""

PRODUCT_US = 0.0005
"""One multiplication of a layer with weights."""

SWEEPS_MAX = 8
"""Looks at all steps. One look takes out every second of the steps that alternate between two devices."""

_WEIGHTED = frozenset(
    (
        OperationType.CONV_2D,
        OperationType.DEPTHWISE_CONV_2D,
        OperationType.GROUPED_CONV_2D,
        OperationType.TRANSPOSE_CONV_2D,
        OperationType.FULLY_CONNECTED,
        OperationType.BATCH_MATMUL,
    )
)
"""Operations with weights as input 1."""


def reference_us(model: Model, operation: Operation) -> float | None:
    """An estimate of the reference device's time for an operation; None for one that cannot be estimated."""
    operands = model.main.operands
    used = [operands[index] for index in (*operation.inputs, *operation.outputs)]
    if operation.type in CONTROL_FLOW or any(is_unknown(operand) for operand in used):
        return None
    sizes = [math.prod(operand.dimensions) for operand in used]
    elements = sum(size for size, operand in zip(sizes, used, strict=True) if not operand.is_constant)
    products = 0
    if operation.type in _WEIGHTED and len(operation.inputs) > 1:
        result, weights = operands[operation.outputs[0]].dimensions, operands[operation.inputs[1]].dimensions
        # Each result is a sum over the weights of one channel; of a product of matrices, over those of one column.
        shared = math.prod(weights[:-2]) if operation.type == OperationType.BATCH_MATMUL else 1
        products = math.prod(result) * math.prod(weights) // max(1, shared * (result[-1] if result else 1))
    return OPERATION_US + elements * ELEMENT_US + products * PRODUCT_US


def spare_handovers(
    model: Model, candidates: Sequence[Candidate], choices: tuple[Choice, ...]
) -> tuple[Choice, ...]:
    """The choices with steps moved to other devices where that is estimated to take less time.

    Args:
        model: The model whose main subgraph the choices are about.
        candidates: The devices.
        choices: The best device for each operation by itself.
    """
    if len({choice.candidate for choice in choices}) < 2:
        return choices
    works = [reference_us(model, operation) for operation in model.main.operations]
    try:
        best, steps = choices, make_steps(model, choices)
        for _ in range(SWEEPS_MAX):
            moved = _swept(best, steps, works, candidates)
            cut = make_steps(model, moved)
            if _total_us(moved, cut, works) >= _total_us(best, steps, works):
                break
            best, steps = moved, cut
    except GeneralFailure:
        return choices  # A step that no driver can be given is reported where the model is divided.
    return best


def _total_us(choices: Sequence[Choice], steps: Sequence[Step], works: Sequence[float | None]) -> float:
    return HANDOVER_US * len(steps) + sum(
        work * _score(choice, choice.candidate)
        for choice, work in zip(choices, works, strict=True)
        if work is not None and not choice.is_interpreted
    )


def _score(choice: Choice, candidate: int) -> float:
    score = choice.scores[candidate]
    assert score is not None, "a device that supports the operation has a score"
    return score


def _swept(
    choices: tuple[Choice, ...],
    steps: Sequence[Step],
    works: Sequence[float | None],
    candidates: Sequence[Candidate],
) -> tuple[Choice, ...]:
    """The choices after one look at every step. Of neighbours only the first moves, since its move changes the gain of the next."""
    writer = {key: number for number, step in enumerate(steps) for key in step.outputs}
    before = [{writer[key] for key in step.inputs if key in writer} for step in steps]
    after: list[set[int]] = [set() for _ in steps]
    for number, sources in enumerate(before):
        for source in sources:
            after[source].add(number)
    changed = list(choices)
    moved: set[int] = set()
    for number, step in enumerate(steps):
        neighbours = before[number] | after[number]
        if step.is_interpreted or neighbours & moved or any(works[i] is None for i in step.operations):
            continue
        gains = []
        for candidate, device in enumerate(candidates):
            scores = [choices[i].scores[candidate] for i in step.operations]
            if candidate == step.candidate or device.is_reference or any(score is None for score in scores):
                continue
            joined = sum(
                any(steps[i].candidate == candidate for i in side[number]) for side in (before, after)
            )
            longer = sum(
                (works[i] or 0.0) * (_score(choices[i], candidate) - _score(choices[i], step.candidate))
                for i in step.operations
            )
            gains.append((HANDOVER_US * joined - longer, -candidate))
        gain, index = max(gains, default=(0.0, 0))
        if gain > 0:
            moved.add(number)
            for i in step.operations:
                changed[i] = _moved(choices[i], -index, candidates)
    return tuple(changed)


def _moved(choice: Choice, candidate: int, candidates: Sequence[Candidate]) -> Choice:
    reason = (
        f"spares a hand-over ({candidates[candidate].name} {_score(choice, candidate):g}, "
        f"{candidates[choice.candidate].name} {_score(choice, choice.candidate):g})"
    )
    return msgspec.structs.replace(choice, candidate=candidate, reason=reason)

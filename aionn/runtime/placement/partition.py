"""The choice of a device for each operation, and the division of the work into steps. Pure: no device is asked here.

Owns scores, the choice, the order of steps, and the model of each step. Support was queried before; steps are prepared and run
elsewhere. ``division`` handles the subgraphs of an IF or WHILE that no device takes.

Invariants:
1. Every operation of a subgraph is in exactly one step; an operand is written by one step and read by later ones only.
2. The choice depends on the arguments alone: equal arguments give equal steps.
3. A device takes an IF or WHILE as a whole, with the subgraphs that it refers to; with values of unknown size, only the reference
   device does. One that is interpreted is a step of its own, of the candidate behind the last.

Source: partitioning of the NN HAL's runtime (``ExecutionPlan``): scores by the type of an operation's first input, ties to the CPU
device and then to the earlier one, ready queues drained from the last device to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from aionn.errors import GeneralFailure, InvalidArgument
from aionn.hal import (
    Capabilities,
    ExecutionPreference,
    FeatureLevel,
    Model,
    Operand,
    OperandLifeTime,
    Operation,
    OperationType,
    PerformanceInfo,
    Subgraph,
    dimensions_are_known,
    operation_type_name,
)
from aionn.hal.slicing import cut_model, read_from_outside, read_outside
from aionn.models.operation_names import operation_name

__all__ = [
    "CONTROL_FLOW",
    "Candidate",
    "Choice",
    "Step",
    "choose_devices",
    "has_unknown_sizes",
    "is_unknown",
    "make_steps",
    "may_be_chosen",
    "needs_reference",
    "referenced_subgraphs",
    "step_model",
]


CONTROL_FLOW = (OperationType.IF, OperationType.WHILE)

_HELD = (OperandLifeTime.TEMPORARY_VARIABLE, OperandLifeTime.SUBGRAPH_INPUT, OperandLifeTime.SUBGRAPH_OUTPUT)


class Candidate(msgspec.Struct, frozen=True):
    """The properties of a device that partitioning uses.

    Attributes:
        name: Its name.
        capabilities: Its performance.
        supported: One answer per operation of the main subgraph.
        is_reference: Whether it is the CPU reference device, which wins ties.
        feature_level: The highest level that it answers for.
        is_asked: Whether it was asked; one that could not be chosen anyway supports nothing.
    """

    name: str
    capabilities: Capabilities
    supported: tuple[bool, ...]
    is_reference: bool = False
    feature_level: int = FeatureLevel.LEVEL_8
    is_asked: bool = True


class Choice(msgspec.Struct, frozen=True):
    """Where one operation goes.

    Attributes:
        operation: Its index in the main subgraph.
        candidate: Index of the device; the number of devices for an IF or WHILE that is interpreted.
        scores: One per device, lower is better; None for a device that cannot run it.
        reason: Why there.
    """

    operation: int
    candidate: int
    scores: tuple[float | None, ...]
    reason: str

    @property
    def is_interpreted(self) -> bool:
        """Whether no device takes it, and its subgraphs are divided on their own."""
        return self.candidate == len(self.scores)


class Step(msgspec.Struct, frozen=True):
    """A part of the main subgraph that runs on one device in one go.

    Attributes:
        candidate: Index of the device.
        operations: Indexes of its operations, in execution order.
        inputs: Operands that it reads and does not write, constants left out, by index in the main subgraph.
        outputs: Operands that it writes and that a later step or the caller reads.
        is_interpreted: Whether it consists of one IF or WHILE that no device takes.
    """

    candidate: int
    operations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_interpreted: bool = False


def is_unknown(operand: Operand) -> bool:
    """Whether only an execution knows the size of a value."""
    return operand.lifetime in _HELD and not dimensions_are_known(operand.type, operand.dimensions)


def referenced_subgraphs(model: Model, operands: Sequence[Operand]) -> list[Subgraph]:
    """The subgraphs that operands refer to."""
    return [model.referenced[o.location.offset] for o in operands if o.lifetime == OperandLifeTime.SUBGRAPH]


def has_unknown_sizes(model: Model, subgraph: Subgraph, operation: Operation) -> bool:
    """Whether an IF or WHILE has, around it or inside of it, a value whose size only the execution knows."""
    used = [subgraph.operands[index] for index in (*operation.inputs, *operation.outputs)]
    return any(is_unknown(o) for o in used) or any(
        any(is_unknown(o) for o in inner.operands)
        or any(has_unknown_sizes(model, inner, o) for o in inner.operations if o.type in CONTROL_FLOW)
        for inner in referenced_subgraphs(model, used)
    )


Interpretation = Callable[[int, bool], str | None]
"""Whether the runtime itself can run an IF or WHILE: from its index, and whether the reference device could take it as a whole, to
where its subgraphs would go, in words; None where it cannot, or where that would be of no use."""


def needs_reference(model: Model, operation: Operation) -> bool:
    """Whether no device but the reference device may be given an operation of the main subgraph."""
    return operation.type in CONTROL_FLOW and has_unknown_sizes(model, model.main, operation)


def may_be_chosen(
    model: Model, capabilities: Capabilities, asked: Sequence[Candidate], preference: ExecutionPreference
) -> bool:
    """Whether a device has to be asked which operations of the main subgraph it supports: False where another one supports all of
    them and has a lower score for each. A process that would get no work is not started.

    Args:
        model: Whose main subgraph it is. With an IF or WHILE in it every device is asked.
        capabilities: The device's performance.
        asked: The devices that have answered.
        preference: The aim of the choice of devices.
    """
    operations = model.main.operations
    if any(operation.type in CONTROL_FLOW for operation in operations):
        return True
    scores = [_score(model, model.main, operation, capabilities, preference) for operation in operations]
    return not any(
        all(other.supported)
        and all(
            _score(model, model.main, operation, other.capabilities, preference) < score
            for operation, score in zip(operations, scores, strict=True)
        )
        for other in asked
    )


def choose_devices(
    model: Model,
    candidates: Sequence[Candidate],
    preference: ExecutionPreference,
    interpretation: Interpretation = lambda operation, could_be_whole: None,
) -> tuple[Choice, ...]:
    """The best device for each operation of the main subgraph.

    Args:
        model: Whose main subgraph it is.
        candidates: The devices.
        preference: The aim of the choice of devices.
        interpretation: Asked about each IF and WHILE that no device would take, or the reference device.

    Raises:
        InvalidArgument: Some operation is supported by no device; all such operations are listed.
    """
    choices = []
    homeless: set[str] = set()
    for index, operation in enumerate(model.main.operations):
        only_reference = needs_reference(model, operation)
        scores = tuple(
            _score(model, model.main, operation, c.capabilities, preference)
            if c.supported[index] and (c.is_reference or not only_reference)
            else None
            for c in candidates
        )
        able = [i for i, score in enumerate(scores) if score is not None]
        # min() keeps the first of equals, so the reference device sorts before other devices at the same score.
        best = min(able, key=lambda i: (scores[i], not candidates[i].is_reference, i), default=None)
        if operation.type in CONTROL_FLOW and (best is None or candidates[best].is_reference):
            # The reference device takes what is of unknown size as a whole: between devices such values are copied to and fro.
            reason = None if best is not None and only_reference else interpretation(index, best is not None)
            if reason is not None:
                choices.append(Choice(index, len(candidates), scores, reason))
                continue
        if best is None:
            name = operation_name(model, operation.type)
            homeless.add(f"{name} with values of unknown size" if only_reference else name)
            continue
        choices.append(Choice(index, best, scores, _reason(best, able, scores, candidates)))
    if homeless:
        names = ", ".join(c.name for c in candidates)
        raise InvalidArgument(f"compile: no device supports {', '.join(sorted(homeless))} (asked: {names})")
    return tuple(choices)


def _reason(
    best: int, able: Sequence[int], scores: Sequence[float | None], candidates: Sequence[Candidate]
) -> str:
    listed = ", ".join(f"{candidates[i].name} {scores[i]:g}" for i in able)
    unasked = [candidate.name for candidate in candidates if not candidate.is_asked]
    if unasked:
        listed += f"; slower and not asked: {', '.join(unasked)}"
    elif len(able) == 1:
        return "the only device that supports it" if len(candidates) > 1 else "the only device asked for"
    if any(scores[i] == scores[best] for i in able if i != best):
        tie = "the reference device wins ties" if candidates[best].is_reference else "first of equals"
        return f"{tie} ({listed})"
    return f"lowest score ({listed})"


def _score(
    model: Model,
    subgraph: Subgraph,
    operation: Operation,
    capabilities: Capabilities,
    preference: ExecutionPreference,
) -> float:
    """Execution time or power relative to the CPU: of the first input's type; of IF and WHILE with what they contain."""

    def pick(info: PerformanceInfo) -> float:
        return info.power_usage if preference == ExecutionPreference.LOW_POWER else info.exec_time

    def inside(operand_index: int) -> float:
        referenced = model.referenced[subgraph.operands[operand_index].location.offset]
        return sum(_score(model, referenced, o, capabilities, preference) for o in referenced.operations)

    if operation.type == OperationType.IF:
        branches = (inside(operation.inputs[1]) + inside(operation.inputs[2])) / 2
        return pick(capabilities.if_performance) + branches
    if operation.type == OperationType.WHILE:
        both = inside(operation.inputs[0]) + inside(operation.inputs[1])
        return pick(capabilities.while_performance) + both
    # SELECT's first input is its condition: the type that matters is the next one's.
    position = 1 if operation.type == OperationType.SELECT else 0
    kind = subgraph.operands[operation.inputs[position]].type
    relaxed = model.relax_computation_float32_to_float16
    return pick(capabilities.performance(kind, is_relaxed=relaxed))


def make_steps(model: Model, choices: Sequence[Choice]) -> tuple[Step, ...]:
    """Cuts the main subgraph into steps, in the order in which they run.

    Raises:
        GeneralFailure: A step would have no input or no output, which no driver can be given.
    """
    main = model.main
    device_of = {choice.operation: choice.candidate for choice in choices}
    interpreted = {choice.candidate for choice in choices if choice.is_interpreted}
    writer = {index: i for i, operation in enumerate(main.operations) for index in operation.outputs}
    waits: dict[int, set[int]] = {
        i: {writer[index] for index in operation.inputs if index in writer}
        for i, operation in enumerate(main.operations)
    }
    readers: dict[int, list[int]] = {}
    for i, needed in waits.items():
        for before in needed:
            readers.setdefault(before, []).append(i)
    queues: dict[int, list[int]] = {}
    for i in waits:
        if not waits[i]:
            queues.setdefault(device_of[i], []).append(i)
    groups: list[tuple[int, list[int]]] = []
    while any(queues.values()):
        device = max(d for d, queue in queues.items() if queue)
        group: list[int] = []
        queue = queues[device]
        while queue:
            done = queue.pop(0)
            group.append(done)
            for reader in readers.get(done, ()):
                waits[reader].discard(done)
                if not waits[reader]:
                    queues.setdefault(device_of[reader], []).append(reader)
            if device in interpreted:
                break
        groups.append((device, group))
    return tuple(
        _step(model.main, device, operations, is_interpreted=device in interpreted)
        for device, operations in groups
    )


def _step(main: Subgraph, device: int, operations: Sequence[int], *, is_interpreted: bool) -> Step:
    inputs, outputs = read_from_outside(main, operations), read_outside(main, operations)
    if not (inputs and outputs) and not is_interpreted:
        names = ", ".join(operation_type_name(main.operations[i].type) for i in operations)
        raise GeneralFailure(
            f"partition: the step with {names} has no {'inputs' if not inputs else 'outputs'}"
        )
    return Step(device, tuple(operations), inputs, outputs, is_interpreted)


def step_model(model: Model, step: Step) -> Model:
    """The model for a step's device: its inputs and outputs are those of the step, in the step's order."""
    return cut_model(model, step.operations, step.inputs, step.outputs)

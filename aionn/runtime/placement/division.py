"""Division of a model with IF and WHILE: the main subgraph, and separately the subgraphs of operations that no device takes. Pure.

Owns when an IF or WHILE is interpreted, which subgraphs devices must be asked about for that, and the division of each.
``partition`` cuts one subgraph, ``planning`` prepares steps.

Invariants:
1. An operation that a device other than the reference device does best as a whole is never interpreted.
2. An operation that only the reference device could take is interpreted where another device does part of it better, and is
   otherwise left to it.
3. A subgraph is divided once, however many operations refer to it.

Source: partitioning of control flow in the NN HAL's runtime (``ExecutionPlan``): its interpreter pseudo-device, numbered behind all
devices. Wider than there: without the reference device, also what has values of unknown size is interpreted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from aionn.errors import Error, GeneralFailure, InvalidArgument
from aionn.hal import (
    ExecutionPreference,
    FeatureLevel,
    Model,
    Operation,
    OperationType,
    Subgraph,
    operation_type_name,
)
from aionn.hal.slicing import without_unused
from aionn.runtime.placement.handovers import spare_handovers
from aionn.runtime.placement.partition import (
    CONTROL_FLOW,
    Candidate,
    Choice,
    Step,
    choose_devices,
    is_unknown,
    make_steps,
)

__all__ = ["INTERPRETER", "Division", "divide", "open_references", "referenced_by", "subgraph_model"]

INTERPRETER = "interpreter"
"""The name of the runtime itself in lists of devices."""


class Division(msgspec.Struct, frozen=True):
    """The division of one subgraph.

    Attributes:
        model: The subgraph, as a model of its own.
        choices: Where each of its operations goes.
        steps: In the order in which they run.
    """

    model: Model
    choices: tuple[Choice, ...]
    steps: tuple[Step, ...]


def _subgraph(model: Model, number: int) -> Subgraph:
    return model.referenced[number - 1] if number else model.main


def subgraph_model(model: Model, number: int) -> Model:
    """A subgraph as a model of its own: 0 is the main one, ``number`` else ``model.referenced[number - 1]``."""
    if number == 0:
        return model
    return without_unused(msgspec.structs.replace(model, main=_subgraph(model, number)))


def referenced_by(model: Model, number: int, operation: int) -> tuple[int, int]:
    """The numbers of the two subgraphs of an IF (then, else) or a WHILE (condition, body)."""
    subgraph = _subgraph(model, number)
    first, second = _references_of(subgraph.operations[operation])
    return subgraph.operands[first].location.offset + 1, subgraph.operands[second].location.offset + 1


def _references_of(operation: Operation) -> tuple[int, ...]:
    assert operation.type in CONTROL_FLOW, "only these refer to subgraphs"
    return operation.inputs[1:3] if operation.type == OperationType.IF else operation.inputs[0:2]


def open_references(
    model: Model, number: int, candidates: Sequence[Candidate], preference: ExecutionPreference
) -> list[int]:
    """The subgraphs that devices must be asked about on their own, since an operation that refers to them may be interpreted.

    Args:
        model: The whole model.
        number: The subgraph that the devices were asked about.
        candidates: With their answers.
        preference: The aim of the choice of devices.
    """
    if not model.referenced:
        return []
    found: dict[int, None] = {}

    def note(operation: int, could_be_whole: bool) -> str:
        found.update(dict.fromkeys(referenced_by(model, number, operation)))
        return "open"

    if not all(candidate.is_reference for candidate in candidates):
        with contextlib.suppress(
            InvalidArgument
        ):  # An operation that no device supports is reported when the model is divided.
            choose_devices(subgraph_model(model, number), candidates, preference, note)
    return list(found)


def divide(
    model: Model, asked: Mapping[int, Sequence[Candidate]], preference: ExecutionPreference
) -> dict[int, Division]:
    """Divides the main subgraph, and those of every IF and WHILE that is interpreted.

    Args:
        model: The whole model.
        asked: By number of the subgraph, the devices with their answers about it. 0 must be there.
        preference: The aim of the choice of devices.

    Returns:
        The divisions by number; 0 and what is reached from there.

    Raises:
        InvalidArgument: Some operation is supported by no device, inside or outside.
        GeneralFailure: A step would have no input or no output, or a device is too old for what goes between two.
    """
    return _Dividing(model, asked, preference).run()


def _check_sizes(division: Division, candidates: Sequence[Candidate]) -> None:
    """Rejects divisions that old devices cannot execute: they neither report nor accept the size of a value between two steps.

    Raises:
        GeneralFailure: Such a size is not known, and one of its devices is below level 3.
    """
    main = division.model.main
    written = {key for step in division.steps for key in step.outputs}
    between = {key for step in division.steps for key in step.inputs if key in written}
    for step in division.steps:
        if step.is_interpreted or candidates[step.candidate].feature_level >= FeatureLevel.LEVEL_3:
            continue
        for key in (*step.inputs, *step.outputs):
            if key in between and is_unknown(main.operands[key]):
                raise GeneralFailure(
                    f"partition: {candidates[step.candidate].name} is below level 3, and the size of operand {key}, which goes "
                    "from one device to another, is not known"
                )


class _Dividing:
    def __init__(
        self, model: Model, asked: Mapping[int, Sequence[Candidate]], preference: ExecutionPreference
    ) -> None:
        self._model = model
        self._asked = asked
        self._preference = preference
        self._known: dict[int, Division | Error] = {}

    def run(self) -> dict[int, Division]:
        reached = {0: self._divided(0)}
        pending = [0]
        while pending:
            number = pending.pop()
            for choice in reached[number].choices:
                if choice.is_interpreted:
                    for inner in referenced_by(self._model, number, choice.operation):
                        if inner not in reached:
                            reached[inner] = self._divided(inner)
                            pending.append(inner)
        return reached

    def _divided(self, number: int) -> Division:
        if number not in self._known:
            try:
                self._known[number] = self._divide(number)
            except Error as e:
                self._known[number] = e
        known = self._known[number]
        if isinstance(known, Error):
            raise known
        return known

    def _divide(self, number: int) -> Division:
        part = subgraph_model(self._model, number)
        candidates = self._asked[number]

        def interpretation(operation: int, could_be_whole: bool) -> str | None:
            numbers = referenced_by(self._model, number, operation)
            if any(inner not in self._asked for inner in numbers):
                return None
            try:
                names = self._devices_of(numbers)
            except Error as e:
                if could_be_whole:
                    return None
                if isinstance(e, InvalidArgument):
                    kind = operation_type_name(part.main.operations[operation].type)
                    raise InvalidArgument(f"{e}, inside of {kind}") from None
                raise
            if could_be_whole and all(candidate.is_reference for candidate in names.values()):
                return None
            return f"interpreted: no device is better for it as a whole; inside of it: {', '.join(names)}"

        choices = choose_devices(part, candidates, self._preference, interpretation)
        if self._preference != ExecutionPreference.LOW_POWER:
            choices = spare_handovers(part, candidates, choices)
        division = Division(part, choices, make_steps(part, choices))
        _check_sizes(division, candidates)
        return division

    def _devices_of(self, numbers: Sequence[int]) -> dict[str, Candidate]:
        """The devices that subgraphs go to, by name."""
        names: dict[str, Candidate] = {}
        for number in numbers:
            candidates = self._asked[number]
            for choice in self._divided(number).choices:
                if choice.is_interpreted:
                    names.update(self._devices_of(referenced_by(self._model, number, choice.operation)))
                else:
                    candidate = candidates[choice.candidate]
                    names[candidate.name] = candidate
        return names

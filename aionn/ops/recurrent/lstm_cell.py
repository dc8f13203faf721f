"""The cell of the floating-point LSTM operations and its options.

Owns where a cell keeps its operands, which of them belong together, and the arithmetic of one step: coupled input and forget gate
(CIFG), peepholes, projection, layer normalisation, clipping and an auxiliary input. Which options a model uses follows from what
it leaves out. Owns no operation.

Invariants:
1. ``CellPlaces`` alone gives the places of a cell's operands in an operation; rules, shapes and arithmetic are the same for all.
2. Products with inputs are taken for all steps and gates together; only the product with the state waits for the step before.

Source: LSTM of the NN HAL's specification and its CPU operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from aionn.hal import OperandLifeTime
from aionn.ops.recurrent.recurrence import (
    SIGMOID,
    TANH,
    Axes,
    Floats,
    activate,
    check_activation,
    optional_floats,
    require_present,
    sigmoid,
)
from aionn.ops.signature import Call, Check

__all__ = [
    "Cell",
    "CellParameters",
    "CellPlaces",
    "Presence",
    "Refuse",
    "cell_parameters",
    "check_parameters",
    "check_run_options",
    "known_presence",
    "run_refusal",
    "validate_options",
    "validate_projection",
]

_ACTIVATIONS = (0, 1, 3, TANH, SIGMOID)
_NORM_EPSILON = np.float32(1e-8)
"""Keeps the normalisation of equal values finite; the kernels of the spec use the same."""


@dataclass(frozen=True, slots=True)
class CellPlaces:
    """The places of one cell's operands among an operation's inputs. Gates in order: input, forget, cell, output.

    Attributes:
        first: The first of 17 in a row: four input weights, four recurrent weights, three peephole weights (input, forget,
            output), four biases, projection weights and projection bias.
        states: Output state and cell state.
        norms: Layer normalisation weights of the gates; none in the oldest form of LSTM.
        auxiliary: Auxiliary weights of the gates; none where the operation has no auxiliary input.
        name: Distinguishes the names of extents where an operation has two cells.
    """

    first: int
    states: tuple[int, int]
    norms: tuple[int, ...] = ()
    auxiliary: tuple[int, ...] = ()
    name: str = ""

    @property
    def weights(self) -> tuple[int, ...]:
        """Input weights of the gates."""
        return tuple(range(self.first, self.first + 4))

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Recurrent weights of the gates."""
        return tuple(range(self.first + 4, self.first + 8))

    @property
    def peepholes(self) -> tuple[int, int, int]:
        """Peephole weights of input, forget and output gate."""
        return self.first + 8, self.first + 9, self.first + 10

    @property
    def biases(self) -> tuple[int, ...]:
        """Biases of the gates."""
        return tuple(range(self.first + 11, self.first + 15))

    @property
    def projection(self) -> tuple[int, int]:
        """Projection weights and projection bias."""
        return self.first + 15, self.first + 16

    @property
    def optional(self) -> tuple[int, ...]:
        """Operands that may be left out."""
        input_gate = (self.weights[0], self.recurrent[0], self.biases[0])
        return (*input_gate, *self.peepholes, *self.projection, *self.norms, *self.auxiliary)

    @property
    def required(self) -> tuple[int, ...]:
        """Operands that must be present."""
        return (*self.weights[1:], *self.recurrent[1:], *self.biases[1:], *self.states)

    def axes(self, source: str = "input") -> dict[int, Axes]:
        """Names of the axes; the input weights are multiplied with ``source``."""
        units, output = f"{self.name}units", f"{self.name}output"
        table: dict[int, Axes] = dict.fromkeys(self.weights, (units, source))
        table |= dict.fromkeys(self.recurrent, (units, output))
        table |= dict.fromkeys((*self.peepholes, *self.biases, *self.norms), (units,))
        table |= {self.projection[0]: (output, units), self.projection[1]: (output,)}
        table |= {self.states[0]: ("batch", output), self.states[1]: ("batch", units)}
        return table | dict.fromkeys(self.auxiliary, (units, "auxiliary"))


Refuse = Callable[[str, str, str], NoReturn]
"""Ends a validation or an execution: the place, what was expected, what came."""

Presence = Callable[[int], bool | None]
"""Whether an input is there; None if only the request determines it."""


def _check_options(places: CellPlaces, present: Presence, refuse: Refuse) -> None:
    """Demands that what an option needs is there as a whole or not at all. None stands for a value that only the request
    determines.
    """

    def together(what: str, *indexes: int) -> None:
        states = [present(index) for index in indexes]
        if True in states and False in states:
            got = ", ".join(
                f"{i} {'given' if s else 'left out'}" for i, s in zip(indexes, states) if s is not None
            )
            refuse(f"inputs {indexes[0]} to {indexes[-1]}", f"{what} together or not at all", got)

    def absent(what: str, index: int) -> None:
        if present(index):
            refuse(f"input {index}", f"no value, since {what}", "a value")

    together("input gate", places.weights[0], places.recurrent[0], places.biases[0])
    has_input_gate = present(places.weights[0])
    to_input, to_forget, to_output = places.peepholes
    together("peephole weights", to_forget, to_output)
    if has_input_gate:
        together("peephole weights", to_input, to_forget)
    elif present(to_forget) is False:
        absent("there are no other peephole weights", to_input)
    if present(places.projection[0]) is False:
        absent("there are no projection weights", places.projection[1])
    for what, gates in (("normalisation weights", places.norms), ("auxiliary weights", places.auxiliary)):
        if gates:
            together(what, *gates[1:])
            if has_input_gate:
                together(what, gates[0], gates[1])
            elif has_input_gate is False:
                absent("the input gate is coupled", gates[0])


def known_presence(check: Check) -> Presence:
    """Whether the model gives an input; None where the request may still leave it out."""

    def present(index: int) -> bool | None:
        lifetime = check.inputs[index].lifetime
        return None if lifetime == OperandLifeTime.SUBGRAPH_INPUT else lifetime != OperandLifeTime.NO_VALUE

    return present


def run_refusal(call: Call) -> Refuse:
    """Ends an execution with a message in three parts."""

    def refuse(what: str, expected: str, got: str) -> NoReturn:
        call.refuse(f"{what}: expected {expected}, got {got}")

    return refuse


def validate_options(check: Check, places: CellPlaces) -> None:
    """Refuses a model whose cell has half an option."""
    require_present(check, *places.required)
    _check_options(places, known_presence(check), check.refuse)


def _check_projection(
    places: CellPlaces, found: Mapping[str, int], present: Presence, refuse: Refuse
) -> None:
    """Demands as many outputs as units where nothing projects the one to the other."""
    units, output = found.get(f"{places.name}units"), found.get(f"{places.name}output")
    if present(places.projection[0]) is False and None not in (units, output) and units != output:
        refuse(
            f"input {places.recurrent[3]}",
            f"shape [{units}, {units}] without projection",
            f"[{units}, {output}]",
        )


def validate_projection(check: Check, places: CellPlaces, found: Mapping[str, int]) -> None:
    """Refuses a model whose cell needs a projection and has none; ``found`` are the known extents by name."""
    _check_projection(places, found, known_presence(check), check.refuse)


def check_run_options(call: Call, places: CellPlaces, found: Mapping[str, int]) -> None:
    """Ends an execution whose cell has half an option, or needs a projection; ``found`` are the extents by name."""
    _check_options(places, call.has, run_refusal(call))
    _check_projection(places, found, call.has, run_refusal(call))


@dataclass(frozen=True, slots=True)
class CellParameters:
    """The scalar arguments. A clip of 0 does not clip."""

    activation: int
    cell_clip: float
    projection_clip: float


def cell_parameters(call: Call, first: int) -> CellParameters:
    """The activation and the two clips, which follow each other from input ``first`` on."""
    activation = int(call.scalar(first))
    if activation not in _ACTIVATIONS:
        call.refuse(f"input {first}: expected an activation of {list(_ACTIVATIONS)}, got {activation}")
    clips = [float(call.scalar(first + 1)), float(call.scalar(first + 2))]
    for index, clip in enumerate(clips, first + 1):
        if not clip >= 0:
            call.refuse(f"input {index}: expected a clip of at least 0, got {clip}")
    return CellParameters(activation, *clips)


def check_parameters(check: Check, first: int) -> None:
    """Refuses what ``cell_parameters`` would, as far as the model fixes it."""
    require_present(check, first, first + 1, first + 2)
    check_activation(check, first, _ACTIVATIONS)
    for index in (first + 1, first + 2):
        clip = check.constant(index)
        if clip is not None:
            check.require(clip.item() >= 0, f"input {index}", "a clip of at least 0", clip.item())


class Cell:
    """One cell with its operands as float32.

    Gates are stacked along the first axis of the weights in the order input, forget, cell, output, without the first of them where
    it is coupled to the second.
    """

    def __init__(self, call: Call, places: CellPlaces, parameters: CellParameters) -> None:
        gates = range(4) if call.has(places.weights[0]) else range(1, 4)
        self.is_coupled = len(gates) == 3
        self.parameters = parameters

        def stacked(key: str, indexes: tuple[int, ...]) -> Floats:
            chosen = [indexes[gate] for gate in gates]
            return call.kept(
                f"{places.name}{key}",
                chosen,
                lambda: np.concatenate([call.array(index) for index in chosen]).astype(np.float32),
            )

        self.weights = stacked("weights", places.weights)
        self.recurrent = stacked("recurrent", places.recurrent)
        self.bias = stacked("bias", places.biases)
        self.norm = stacked("norm", places.norms) if places.norms and call.has(places.norms[1]) else None
        self.auxiliary = (
            stacked("auxiliary", places.auxiliary)
            if places.auxiliary and call.has(places.auxiliary[1])
            else None
        )
        self.to_input, self.to_forget, self.to_output = (optional_floats(call, i) for i in places.peepholes)
        self.projection, self.projection_bias = (optional_floats(call, i) for i in places.projection)
        self.output_state, self.cell_state = (
            call.array(index).astype(np.float32, copy=False) for index in places.states
        )

    def drive(self, inputs: Floats, auxiliary: Floats | None = None) -> Floats:
        """The contribution of inputs [..., input] to the gates, [..., gates * units]; with the bias unless it comes after a
        norm.
        """
        drive = inputs @ self.weights.T
        if self.auxiliary is not None and auxiliary is not None:
            drive = drive + auxiliary @ self.auxiliary.T
        return drive if self.norm is not None else drive + self.bias

    def _gate(self, sums: Floats, gate: int, cell_state: Floats | None, peephole: Floats | None) -> Floats:
        """A gate before its activation, counted from the end: -4 input, -3 forget, -2 cell, -1 output."""
        units = self.cell_state.shape[1]
        end = sums.shape[1] + (gate + 1) * units
        own = slice(end - units, end)
        value = sums[:, own]
        if cell_state is not None and peephole is not None:
            value = value + peephole * cell_state
        if self.norm is None:
            return value
        centred = value - value.mean(axis=1, keepdims=True)
        variance = np.square(centred).mean(axis=1, keepdims=True)
        normalized: Floats = centred / np.sqrt(variance + _NORM_EPSILON) * self.norm[own] + self.bias[own]
        return normalized

    def step(self, drive: Floats, output_state: Floats, cell_state: Floats) -> tuple[Floats, Floats, Floats]:
        """One step: the output, which is the next output state, the next cell state, and the gates after their activation."""
        activation, cell_clip = self.parameters.activation, self.parameters.cell_clip
        sums = drive + output_state @ self.recurrent.T
        forget = sigmoid(self._gate(sums, -3, cell_state, self.to_forget))
        if self.is_coupled:
            take = 1 - forget
        else:
            take = sigmoid(self._gate(sums, -4, cell_state, self.to_input))
        candidate = activate(self._gate(sums, -2, None, None), activation)
        cell_state = forget * cell_state + take * candidate
        if cell_clip > 0:
            cell_state = np.clip(cell_state, np.float32(-cell_clip), np.float32(cell_clip))
        release = sigmoid(self._gate(sums, -1, cell_state, self.to_output))
        output = self._project(release * activate(cell_state, activation))
        gates = [candidate, forget, release] if self.is_coupled else [take, candidate, forget, release]
        return output, cell_state, np.concatenate(gates, axis=1)

    def _project(self, hidden: Floats) -> Floats:
        if self.projection is None:
            return hidden
        output = hidden @ self.projection.T
        if self.projection_bias is not None:
            output = output + self.projection_bias
        clip = self.parameters.projection_clip
        return np.clip(output, np.float32(-clip), np.float32(clip)) if clip > 0 else output

    def unroll(self, drive: Floats, *, is_backward: bool = False) -> tuple[Floats, Floats, Floats]:
        """All steps of a sequence.

        Args:
            drive: [time, batch, gates * units].
            is_backward: Whether time runs from the last entry to the first.

        Returns:
            The outputs [time, batch, output], each at its input's place, and both states after the last step.
        """
        # Copies, so that a sequence without steps does not answer with its inputs.
        output_state, cell_state = self.output_state.copy(), self.cell_state.copy()
        outputs = np.empty((len(drive), *output_state.shape), dtype=np.float32)
        steps = range(len(drive))
        for step in reversed(steps) if is_backward else steps:
            output_state, cell_state, _ = self.step(drive[step], output_state, cell_state)
            outputs[step] = output_state
        return outputs, output_state, cell_state

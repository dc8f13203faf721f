"""The common part of the recurrent families: shapes with named extents, their activations, and the order of time.

Owns no operation. The shapes of an operation's operands are written as names (``{0: ("batch", "input"), 1: ("units", "input")}``);
equal names must have equal extents, as far as the model knows them when it is validated, and all of them when it runs.

Invariants:
1. An operand that is left out is not looked at.
2. Sequences are handled as [time, batch, size] inside of kernels, whatever the operation's layout.

Source: the shapes in the NN HAL's specification of the RNN, LSTM and SVDF operations; ``ActivationFn`` of its CPU operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aionn.hal import OperandLifeTime
from aionn.ops.numerics.fixed_point import float_activation
from aionn.ops.signature import Array, Call, Check

__all__ = [
    "SIGMOID",
    "TANH",
    "Axes",
    "Floats",
    "activate",
    "check_activation",
    "check_extents",
    "extents",
    "layout_axes",
    "may_be_left_out",
    "optional_floats",
    "require_present",
    "sequence_floats",
    "sigmoid",
]

Axes = tuple[str, ...]
Floats = npt.NDArray[np.float32]

TANH = 4
SIGMOID = 6
"""Activation codes that only the recurrent operations know, beside those of ``FusedActivation``; 5 is not used."""


def sigmoid(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The logistic function, without overflow."""
    # 0.5 * (1 + tanh(x / 2)) is the same function, and saturates instead of overflowing.
    result: npt.NDArray[Any] = values.dtype.type(0.5) * (np.tanh(values * values.dtype.type(0.5)) + 1)
    return result


def activate(values: npt.NDArray[Any], activation: int) -> npt.NDArray[Any]:
    """Applies an activation by its code: those of ``FusedActivation``, TANH or SIGMOID."""
    if activation == TANH:
        tanh: npt.NDArray[Any] = np.tanh(values)
        return tanh
    if activation == SIGMOID:
        return sigmoid(values)
    return float_activation(values, activation)


def check_activation(check: Check, index: int, legal: tuple[int, ...]) -> None:
    """Demands one of the activation codes where the model fixes it."""
    value = check.constant(index)
    if value is not None:
        check.require(
            value.item() in legal, f"input {index}", f"an activation of {list(legal)}", value.item()
        )


def _bind(
    what: str, axes: Axes, extents_of: tuple[int | None, ...], bound: dict[str, int], refuse: Any
) -> None:
    """Compares one shape with its names; ``bound`` collects what the names stand for. None is an extent not known yet."""
    fits = len(axes) == len(extents_of)
    if fits:
        for name, extent in zip(axes, extents_of, strict=True):
            if extent is not None and bound.setdefault(name, extent) != extent:
                fits = False
    if not fits:
        known = [f"{name} = {bound[name]}" if name in bound else name for name in axes]
        got = [0 if extent is None else extent for extent in extents_of]
        refuse(what, f"shape [{', '.join(known)}]", got)


def may_be_left_out(check: Check, index: int) -> bool:
    """Whether an optional input has no value, or may yet have none: a request may leave out what the subgraph takes as input."""
    return check.is_omitted(index) or check.inputs[index].lifetime == OperandLifeTime.SUBGRAPH_INPUT


def check_extents(
    check: Check,
    axes: Mapping[int, Axes],
    outputs: Mapping[int, Axes] | None = None,
    *,
    optional: Collection[int] = (),
) -> dict[str, int]:
    """Refuses the model where the extents that it states contradict each other.

    Args:
        check: The operation.
        axes: Names of the axes of inputs.
        outputs: Names of the axes of outputs.
        optional: Inputs that may be left out. If the request determines that, their shapes are left to the execution:
            models state shapes like [0] for them.

    Returns:
        The extents that are known by name.
    """
    bound: dict[str, int] = {}
    for what, operands, table in (("input", check.inputs, axes), ("output", check.outputs, outputs or {})):
        for index, names in table.items():
            if index >= len(operands):
                continue
            if what == "input" and index in optional and may_be_left_out(check, index):
                continue
            dimensions = operands[index].dimensions
            if dimensions:
                _bind(
                    f"{what} {index}",
                    names,
                    tuple(extent or None for extent in dimensions),
                    bound,
                    check.refuse,
                )
    return bound


def extents(call: Call, axes: Mapping[int, Axes], *, optional: Collection[int] = ()) -> dict[str, int]:
    """The extent of each name; ends the execution where shapes contradict each other or a value is missing."""
    bound: dict[str, int] = {}

    def refuse(what: str, expected: str, got: object) -> None:
        call.refuse(f"{what}: expected {expected}, got {got}")

    for index, names in axes.items():
        if call.has(index) or index not in optional:
            _bind(f"input {index}", names, call.array(index).shape, bound, refuse)
    return bound


def require_present(check: Check, *indexes: int) -> None:
    """Refuses the model where one of the inputs is left out."""
    for index in indexes:
        check.require(not check.is_omitted(index), f"input {index}", "a value", "none")


def layout_axes(is_time_major: bool | None, size: str) -> Axes:
    """Names of a sequence's axes; None for a layout that is not known yet."""
    if is_time_major is None:
        return ("first", "second", size)
    return ("time", "batch", size) if is_time_major else ("batch", "time", size)


def sequence_floats(array: Array, *, is_time_major: bool) -> Floats:
    """A sequence as float32 [time, batch, size]. Being its own inverse, also turns a result into the layout asked for."""
    wide = array.astype(np.float32, copy=False)
    return wide if is_time_major else wide.swapaxes(0, 1)


def optional_floats(call: Call, index: int) -> Floats | None:
    """An input as float32, None where it is left out."""
    return call.array(index).astype(np.float32, copy=False) if call.has(index) else None

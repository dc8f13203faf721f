"""The error for models that an engine cannot run, and models of some operations of another one, for questions to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from aionn.hal import Model
from aionn.hal.slicing import cut_model, read_from_outside

__all__ = ["Unsupported", "part_of", "single_operation_model"]


class Unsupported(Exception):
    """An engine has no equivalent of something in a model, or rejects it; the message has the reason."""


def single_operation_model(model: Model, index: int) -> Model:
    """The model of one operation of the main subgraph, with its inputs and outputs as the model's."""
    return part_of(model, (index,))


def part_of(model: Model, indexes: Sequence[int]) -> Model:
    """The model of some operations of the main subgraph, with all that they write as its outputs."""
    operations = model.main.operations
    outputs = tuple(output for index in indexes for output in operations[index].outputs)
    return cut_model(model, tuple(indexes), read_from_outside(model.main, tuple(indexes)), outputs)

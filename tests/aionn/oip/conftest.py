"""A model that takes as long as a test wants, behind a door, without a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np

import aionn
from aionn.hal import OperandType
from aionn.oip.models import ServedModel
from aionn.oip.requests import InputTensor, Request
from aionn.oip.tensors import Array, datatype_of, from_raw, raw_bytes


class HeldNet:
    """Doubles a vector of four floats; where it is held, it waits until it is released, cancelled or late.

    Attributes:
        is_held: Whether executions wait.
        running: Executions under way.
        cancelled: Number of executions that were cancelled.
        asked: Deadline and priority of each execution.
        error: Raised by the next execution; None raises nothing.
    """

    inputs = (aionn.TensorSpec("x", OperandType.TENSOR_FLOAT32, (1, 4)),)
    outputs = (aionn.TensorSpec("y", OperandType.TENSOR_FLOAT32, (1, 4)),)

    def __init__(self) -> None:
        self.is_held = False
        self.running = 0
        self.cancelled = 0
        self.asked: list[tuple[int | None, aionn.Priority]] = []
        self.error: Exception | None = None
        self._changed = anyio.Event()

    def release(self) -> None:
        """Ends all executions."""
        self.is_held = False
        self._changed.set()

    async def execute(self, inputs: Sequence[Any], *, deadline: int | None, priority: aionn.Priority) -> Any:
        self.asked.append((deadline, priority))
        if self.error is not None:
            raise self.error
        self.running += 1
        try:
            while self.is_held:
                left_s = 60.0 if deadline is None else (deadline - aionn.now_ns()) / 1e9
                with anyio.move_on_after(left_s):
                    await self._changed.wait()
                if self.is_held and deadline is not None and aionn.now_ns() >= deadline:
                    raise aionn.MissedDeadline("held: the deadline passed", transient=False)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return SimpleNamespace(outputs=[inputs[0] * np.float32(2)])


def served_model(net: Any, name: str = "double") -> ServedModel:
    """A model with a name that executes by a net of a test."""
    return ServedModel(name, net, "test")


def request_for(
    values: Array | None = None,
    *,
    model: str = "double",
    version: str = "",
    id: str = "",
    parameters: Mapping[str, Any] | None = None,
    name: str = "x",
) -> Request:
    """A request for a model with one input."""
    given = np.ones((1, 4), np.float32) if values is None else values
    shape = given.shape
    tensor = InputTensor(
        name,
        datatype_of(given.dtype),
        shape,
        lambda dtype: from_raw(raw_bytes(given), dtype, shape, "input"),
    )
    return Request(model, version, id, parameters or {}, (tensor,), ())

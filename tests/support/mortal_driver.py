"""A driver that fails as its input asks: for errors that cross from its process, and for deaths in the middle of an execution."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.skeleton import SkeletonDevice, SkeletonModel
from aionn.hal import ExecutionPreference, Model, OperandType, OperationType, OutputShape, Priority
from aionn.interpreter import RunControl
from aionn.models.builder import GraphBuilder

RAISES, DIES = 13.0, 666.0
"""Values of the first input with which an execution raises an exception of Python's, or ends the process."""

EXIT_CODE = 3


class MortalModel(SkeletonModel):
    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        first = inputs[0]
        assert first is not None
        if first.flat[0] == RAISES:
            planted_failure()
        if first.flat[0] == DIES:
            os._exit(EXIT_CODE)
        return super().run(inputs, outputs, control)


def planted_failure() -> None:
    raise ZeroDivisionError("planted [in the driver]")


class MortalDevice(SkeletonDevice):
    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> MortalModel:
        return MortalModel(self, model, priority)


class DiesWhilePreparing(SkeletonDevice):
    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> MortalModel:
        os._exit(EXIT_CODE)


def sum_model() -> Model:
    """``first + second``, of one float each."""
    graph = GraphBuilder()
    first = graph.input(OperandType.TENSOR_FLOAT32, (1,))
    second = graph.input(OperandType.TENSOR_FLOAT32, (1,))
    return graph.build([graph.result(OperationType.ADD, [first, second, 0], first)])


def doubled_model() -> Model:
    """``first + first``, of one float."""
    graph = GraphBuilder()
    first = graph.input(OperandType.TENSOR_FLOAT32, (1,))
    return graph.build([graph.result(OperationType.ADD, [first, first, 0], first)])

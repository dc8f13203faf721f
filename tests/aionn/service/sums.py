"""The sum of two vectors: the model and a request for it, for tests of what carries executions."""

from __future__ import annotations

import numpy as np

from aionn.hal import DataLocation, Memory, Model, OperandType, OperationType, Request, RequestArgument
from aionn.models.builder import GraphBuilder

__all__ = ["Sum", "sum_model"]


def sum_model(count: int = 4) -> Model:
    """``a + b`` of float32 vectors."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, (count,))
    b = graph.input(OperandType.TENSOR_FLOAT32, (count,))
    return graph.build([graph.result(OperationType.ADD, [a, b, graph.constant(0)], a)])


class Sum:
    """A request for the sum of two vectors in one pool."""

    def __init__(self, count: int = 4) -> None:
        self.memory = Memory.create(12 * count)
        self.values = self.memory.array.view(np.float32).reshape(3, count)
        self.values[0], self.values[1] = np.arange(count), 100.0
        size = 4 * count
        arguments = [RequestArgument(False, DataLocation(0, i * size, size)) for i in range(3)]
        self.request = Request((arguments[0], arguments[1]), (arguments[2],), (self.memory,))

    @property
    def is_right(self) -> bool:
        return bool((self.values[2] == self.values[0] + self.values[1]).all())

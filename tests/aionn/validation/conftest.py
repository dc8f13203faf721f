"""Small models for the rules' tests, and the means to break one thing in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from aionn.hal import Model, OperandType, OperationType, Subgraph
from aionn.models.builder import GraphBuilder

F32 = OperandType.TENSOR_FLOAT32


def change_operand(model: Model, index: int, *, subgraph: int = 0, **changes: Any) -> Model:
    """The model with one operand changed."""
    graph = model.main if subgraph == 0 else model.referenced[subgraph - 1]
    operands = list(graph.operands)
    operands[index] = msgspec.structs.replace(operands[index], **changes)
    return change_subgraph(model, subgraph=subgraph, operands=tuple(operands))


def change_operation(model: Model, index: int, *, subgraph: int = 0, **changes: Any) -> Model:
    """The model with one operation changed."""
    graph = model.main if subgraph == 0 else model.referenced[subgraph - 1]
    operations = list(graph.operations)
    operations[index] = msgspec.structs.replace(operations[index], **changes)
    return change_subgraph(model, subgraph=subgraph, operations=tuple(operations))


def change_subgraph(model: Model, *, subgraph: int = 0, **changes: Any) -> Model:
    """The model with one subgraph changed."""
    if subgraph == 0:
        return msgspec.structs.replace(model, main=msgspec.structs.replace(model.main, **changes))
    referenced: list[Subgraph] = list(model.referenced)
    referenced[subgraph - 1] = msgspec.structs.replace(referenced[subgraph - 1], **changes)
    return msgspec.structs.replace(model, referenced=tuple(referenced))


class Broken:
    """The three changes, as one fixture."""

    operand = staticmethod(change_operand)
    operation = staticmethod(change_operation)
    subgraph = staticmethod(change_subgraph)


@pytest.fixture(scope="session")
def change() -> type[Broken]:
    return Broken


@pytest.fixture
def models() -> Iterator[Callable[[Model], Model]]:
    """Keeps models and closes their pools afterwards."""
    kept: list[Model] = []

    def keep(model: Model) -> Model:
        kept.append(model)
        return model

    yield keep
    for model in kept:
        for pool in model.pools:
            pool.close()


@pytest.fixture
def plain(models) -> Model:
    """ADD of input 0 and a large constant into a temporary, then ABS of it.

    Operands: 0 input, 1 constant in the pool, 2 constant scalar, 3 temporary, 4 output.
    """
    g = GraphBuilder()
    x = g.input(F32, (2, 40))
    y = g.result(OperationType.ADD, [x, g.constant(np.ones(40, np.float32)), 0], x)
    return models(g.build([g.result(OperationType.ABS, [y], y)]))


@pytest.fixture
def quantized(models) -> Model:
    """QUANT8 ADD: operands 0 and 1 inputs, 2 scalar, 3 output."""
    g = GraphBuilder()
    kind = OperandType.TENSOR_QUANT8_ASYMM
    x, y = (g.input(kind, (4,), scale=0.5, zero_point=128) for _ in range(2))
    return models(g.build([g.result(OperationType.ADD, [x, y, 0], x)]))


@pytest.fixture
def branching(models) -> Model:
    """IF with a NEG and an ABS branch: operands 0 condition, 1 value, 2 and 3 subgraphs, 4 output."""
    g = GraphBuilder()
    flag, x = g.input(OperandType.TENSOR_BOOL8, (1,)), g.input(F32, (2,))
    then, otherwise = (_unary(kind) for kind in (OperationType.NEG, OperationType.ABS))
    return models(g.build([g.result(OperationType.IF, [flag, g.graph(then), g.graph(otherwise), x], x)]))


@pytest.fixture
def looping(models) -> Model:
    """WHILE over a counter and a value: main operands 0 and 1 inputs, 2 and 3 subgraphs, 4 and 5 outputs."""
    condition = GraphBuilder()
    counter = condition.input(OperandType.TENSOR_INT32, (1,))
    condition.input(F32, (2,))
    flag = condition.variable(OperandType.TENSOR_BOOL8, (1,))
    condition.operation(OperationType.LESS, [counter, condition.constant([5])], [flag])
    condition.finish([flag])
    body = GraphBuilder()
    i, v = body.input(OperandType.TENSOR_INT32, (1,)), body.input(F32, (2,))
    body.finish(
        [
            body.result(OperationType.ADD, [i, body.constant([1]), 0], i),
            body.result(OperationType.ADD, [v, v, 0], v),
        ]
    )
    g = GraphBuilder()
    start, x = g.input(OperandType.TENSOR_INT32, (1,)), g.input(F32, (2,))
    count, out = g.variable(OperandType.TENSOR_INT32, (1,)), g.variable(F32, (2,))
    g.operation(OperationType.WHILE, [g.graph(condition), g.graph(body), start, x], [count, out])
    return models(g.build([count, out]))


def _unary(kind: OperationType) -> GraphBuilder:
    g = GraphBuilder()
    x = g.input(F32, (2,))
    return g.finish([g.result(kind, [x], x)])

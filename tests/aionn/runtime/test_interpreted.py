"""Parts of an interpreted IF or WHILE: what a condition may be, and memory that is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aionn
from aionn.hal import BufferToken, DataLocation, OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime import control_flow
from aionn.runtime.arguments import Binding, RequestArea
from aionn.runtime.control_flow import _truth
from aionn.testing.split import PickyDevice

X = np.array([1.5, -2.25, 3.0], np.float32)


def test_condition_is_one_boolean() -> None:
    def held(*values: bool) -> Binding:
        array = np.array(values)
        return Binding(BufferToken(1), DataLocation(), array.shape, array)

    assert _truth(held(True), "input 0") and not _truth(held(False), "input 0")
    for condition, got in (
        (None, "none"),
        (held(True, True), r"shape \[2\]"),
        (held(True)._replace(array=None), r"shape \[1\]"),
    ):
        with pytest.raises(aionn.InvalidArgument, match=f"input 0: expected one boolean, got {got}"):
            _truth(condition, "input 0")


async def test_memory_of_a_branch_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(RequestArea):
        def __init__(self, values: Any) -> None:
            made.append(values)
            super().__init__(values)

    monkeypatch.setattr(control_flow, "RequestArea", Counted)
    graph = GraphBuilder()
    condition = graph.input(OperandType.TENSOR_BOOL8, (1,))
    value = graph.input(OperandType.TENSOR_FLOAT32, (3,))
    branches = []
    for kind in (OperationType.ABS, OperationType.FLOOR):
        inner = GraphBuilder()
        given = inner.input(OperandType.TENSOR_FLOAT32, (3,))
        branches.append(graph.graph(inner.finish([inner.result(kind, [given], given)])))
    model = graph.build([graph.result(OperationType.IF, [condition, *branches, value], value)])
    async with aionn.open(devices=[PickyDevice("npu")]) as runtime:
        net = await runtime.compile(model)
        for holds in (True, False, True, False, True):
            (got,) = (await net.execute([np.array([holds]), X])).outputs
            np.testing.assert_array_equal(got, np.abs(X) if holds else np.floor(X))
    assert len(made) == 2, "one of each branch"

"""A lookup by indexes that are computed, for devices that report one that is out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.hal import Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder


def gather() -> Model:
    graph = GraphBuilder()
    table = graph.input(OperandType.TENSOR_FLOAT32, (3, 2))
    rows = graph.input(OperandType.TENSOR_INT32, (2,))
    return graph.build([graph.result(OperationType.GATHER, [table, graph.constant(0), rows], table, (2, 2))])


async def check_index_out_of_range(device: Any, small: Any, index: int, *, match: str) -> None:
    """An index out of range is an error, and the prepared model goes on."""
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    prepared = await device.prepare_model(gather())
    for place, works in ((2, True), (index, False), (1, True)):
        request = small.request([values, np.array([0, place], dtype=np.int32)], [(16, (2, 2))])
        if works:
            await prepared.execute_synchronously(request)
            assert small.output(request).tolist() == [*values[0], *values[place]]
        else:
            with pytest.raises(InvalidArgument, match=match):
                await prepared.execute_synchronously(request)
    await prepared.aclose()

"""Claims about where values are placed in a pool, and about requests whose values are all in one."""

from __future__ import annotations

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.hal import PREFERRED_ALIGNMENT_BYTES, OperandType, OperationType
from aionn.hal.pooled_request import PooledRequest, place_values
from aionn.models.builder import GraphBuilder
from aionn.testing.models import identity


@pytest.mark.parametrize("guard", [0, 64, 128])
def test_values_are_aligned_and_apart_by_the_guard(guard: int) -> None:
    sizes = [1, 63, 64, 65, 0, 128, 7]
    locations, size = place_values(sizes, pool_index=3, guard_bytes=guard)
    free_from = 0
    for location, wanted in zip(locations, sizes, strict=True):
        assert (location.pool_index, location.length) == (3, wanted)
        assert location.offset % PREFERRED_ALIGNMENT_BYTES == 0
        assert location.offset - free_from >= guard
        free_from = location.offset + max(wanted, 1)
    assert size - free_from >= guard


def test_pool_without_values_has_a_size() -> None:
    assert place_values([]) == ([], PREFERRED_ALIGNMENT_BYTES)


def test_values_that_are_written_are_where_the_request_says() -> None:
    with PooledRequest(identity((2, 3))) as pooled:
        pooled.write([np.arange(6, dtype=np.float32).reshape(3, 2).T.copy().reshape(2, 3)])
        (argument,), (pool,) = pooled.request.inputs, pooled.request.pools
        place = argument.location
        found = pool.array[place.offset : place.offset + place.length].view(np.float32)
        assert found.tolist() == [0, 2, 4, 1, 3, 5]
        assert [output.shape for output in pooled.outputs()] == [(2, 3)]


def test_request_needs_the_shapes_that_the_model_leaves_open() -> None:
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (0, 4))
    y = graph.variable(OperandType.TENSOR_FLOAT32, (2, 4))
    graph.operation(OperationType.RELU, [x], [y])
    model = graph.build([y])
    with pytest.raises(InvalidArgument, match="input 0"):
        PooledRequest(model)
    with PooledRequest(model, [(2, 4)]) as pooled:
        assert pooled.request.inputs[0].dimensions == (2, 4)

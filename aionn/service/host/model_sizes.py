"""About how much memory a model of a client takes, before it is prepared.

Owns the estimate, and the thread on which large models are counted. The limits are in ``wire.quotas``.
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.hal import Model, Subgraph
from aionn.hal.callers import Connection
from aionn.scheduler.worker_turns import WorkerTurns

__all__ = ["model_bytes"]

OBJECT_BYTES = 256
"""Memory of an operand or an operation without its lists: CPython's objects have 150, and a driver keeps something for each."""

NUMBER_BYTES = 40
"""Memory of an extent, a scale or an index in a list: a CPython object of 28 or 32 bytes, and the reference to it."""

COUNTED_ON_LOOP_MAX = 1000
"""Operands and operations that are counted in the event loop, some 0.2 ms; the largest models take 0.2 s."""

COUNTED_BESIDE_MAX = 1
"""Models of all clients that are counted concurrently on threads. They would only share the interpreter's lock, and an execution
would wait for all of them each time that it needs it."""

_countings = WorkerTurns("counting of models", COUNTED_BESIDE_MAX)


async def model_bytes(model: Model, owner: Connection) -> int:
    """About what a model takes: its constants, and its operands and operations as objects."""
    constant_bytes = len(model.operand_values) + sum(pool.size_bytes for pool in model.pools)
    graphs = (model.main, *model.referenced)
    if sum(len(graph.operands) + len(graph.operations) for graph in graphs) <= COUNTED_ON_LOOP_MAX:
        return constant_bytes + _structure_bytes(graphs)
    return constant_bytes + await _countings.run(owner, _structure_bytes, graphs)


def _structure_bytes(graphs: Sequence[Subgraph]) -> int:
    objects = numbers = data_bytes = 0
    for graph in graphs:
        objects += len(graph.operands) + len(graph.operations)
        numbers += len(graph.input_indexes) + len(graph.output_indexes)
        numbers += sum(len(operation.inputs) + len(operation.outputs) for operation in graph.operations)
        for operand in graph.operands:
            numbers += len(operand.dimensions)
            if operand.extension_data is not None:
                data_bytes += len(operand.extension_data)
            if operand.channel_quant is not None:
                numbers += len(operand.channel_quant.scales)
    return OBJECT_BYTES * objects + NUMBER_BYTES * numbers + data_bytes

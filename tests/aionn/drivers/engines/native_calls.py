"""Values, outputs and counts for tests of calls without Python."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np

from aionn.hal import Memory, Request
from tests.aionn.burst.native_device import NativeBurst

WAIT_S = 30.0


def drawn(model: Any, seed: int) -> list[np.ndarray[Any, Any]]:
    source = np.random.default_rng(seed)
    values: list[np.ndarray[Any, Any]] = []
    for operand in model.main.inputs:
        if "FLOAT" in operand.type.name:
            values.append(source.random(operand.dimensions, dtype=np.float32))
        else:
            kind = np.int8 if "SIGNED" in operand.type.name else np.uint8
            values.append(source.integers(0, 256, operand.dimensions).astype(kind))
    return values


def output_bytes(request: Request) -> bytes:
    """The first output, which is overwritten."""
    location = request.outputs[0].location
    pool = request.pools[location.pool_index]
    assert isinstance(pool, Memory)
    answer = pool.array[location.offset : location.offset + location.length].tobytes()
    pool.array[location.offset : location.offset + location.length] = 0xAA
    return answer


async def python_bytes(prepared: Any, request: Request) -> bytes:
    """The first output of an execution by Python. Its slot is free afterwards, so that the next packet can be answered natively."""
    await prepared.execute_synchronously(request)
    with anyio.fail_after(WAIT_S):
        while prepared.device.gate._slots.held_count:  # A job is released after its answer.
            await anyio.sleep(0.001)
    return output_bytes(request)


def answered(burst: NativeBurst) -> int:
    """The number of native calls."""
    assert burst.server._answers is not None
    count: int = burst.server._answers.activity()[0]
    return count

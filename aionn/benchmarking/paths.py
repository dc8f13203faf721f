"""The four ways to have a prepared model compute, each as one awaitable to take the time of.

Owns the paths: sync, async, fenced, burst. The conformance suites check the
answers against the driver contract.

Source: the driver contract in ``aionn.hal.device``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument
from aionn.hal import (
    Model,
    Operand,
    OutputShape,
    PreparedModel,
    Request,
    Timing,
    operand_dtype,
    operand_size_bytes,
)
from fences import SyncFence

__all__ = ["PATHS", "Call", "Path", "draw_inputs", "opened"]

Array = npt.NDArray[Any]
Path = Literal["sync", "async", "fenced", "burst"]
PATHS: tuple[Path, ...] = get_args(Path)
Call = Callable[[], Awaitable[None]]


def draw_inputs(model: Model, generator: np.random.Generator) -> list[Array]:
    """Random inputs of a model whose inputs' shapes are known.

    Raises:
        InvalidArgument: A shape is not known.
    """
    return [_drawn(index, operand, generator) for index, operand in enumerate(model.main.inputs)]


def _drawn(index: int, operand: Operand, generator: np.random.Generator) -> Array:
    dtype, shape = operand_dtype(operand.type), operand.dimensions
    if not operand_size_bytes(operand.type, shape):
        raise InvalidArgument(
            f"bench: input {index}: expected a shape that the model fixes, got {list(shape)}"
        )
    if dtype.kind == "f":
        return np.asarray(generator.random(shape), dtype=dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    info = np.iinfo(dtype.name)
    # Plain integers are often indexes or extents: small ones are likelier to be legal.
    low, high = (int(info.min), int(info.max) + 1) if operand.scale else (0, 2)
    return generator.integers(low, high, shape).astype(dtype)


@contextlib.asynccontextmanager
async def opened(prepared: PreparedModel, request: Request, path: Path) -> AsyncIterator[Call]:
    """Makes a path ready; the function that it returns executes the request once, and raises ``Error`` where the device fails."""
    if path == "burst":
        burst = await prepared.configure_execution_burst()
        try:

            async def through_burst() -> None:
                await burst.execute_synchronously(request, (0,))

            yield through_burst
        finally:
            await burst.aclose()
        return

    async def synchronously() -> None:
        await prepared.execute_synchronously(request)

    yield {
        "sync": synchronously,
        "async": lambda: _called_back(prepared, request),
        "fenced": lambda: _fenced(prepared, request),
    }[path]


async def _called_back(prepared: PreparedModel, request: Request) -> None:
    done = SyncFence("bench")
    ended: list[ErrorStatus] = []

    def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
        ended.append(status)
        done.try_signal()

    await prepared.execute(request, callback)
    await done
    _check(ended[0])


async def _fenced(prepared: PreparedModel, request: Request) -> None:
    launched = await prepared.execute_fenced(request, ())
    try:
        if launched.fence is not None:
            await launched.fence
        status, _ = await launched.get_execution_info()
    finally:
        if launched.fence is not None:
            launched.fence.close()
    _check(status)


def _check(status: ErrorStatus) -> None:
    if status != ErrorStatus.NONE:
        raise GeneralFailure(f"bench: the device answers {status.name}")

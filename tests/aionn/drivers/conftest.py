"""Small models, requests over shared memory, and the reference device in this process and in one of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from aionn.drivers.reference import ReferenceDevice
from aionn.hal import (
    BufferToken,
    DataLocation,
    Device,
    FusedActivation,
    Memory,
    Model,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from aionn.runtime.background import Background
from aionn.service.client.device import RemoteDevice
from tests.support.loop_reference import LoopReferenceDevice

HERE = Path(__file__).parent


def sum_model(dimensions: Sequence[int] = (2, 3), output: Sequence[int] | None = None) -> Model:
    """``a + b`` of float32 tensors."""
    graph = GraphBuilder()
    a = graph.input(OperandType.TENSOR_FLOAT32, dimensions)
    b = graph.input(OperandType.TENSOR_FLOAT32, dimensions)
    activation = graph.constant(int(FusedActivation.NONE))
    result = graph.result(OperationType.ADD, [a, b, activation], a, output)
    return graph.build([result])


def request_of(
    inputs: Sequence[npt.NDArray[Any] | int], outputs: Sequence[tuple[int, Sequence[int]] | int]
) -> Request:
    """A request: an array, or a device memory's token, per input; bytes and shape, or a token, per output."""
    pools: list[Memory | BufferToken] = []

    def argument(
        size_bytes: int, dimensions: Sequence[int], value: npt.NDArray[Any] | None
    ) -> RequestArgument:
        memory = Memory.create(max(1, size_bytes))
        if value is not None:
            memory.array[:] = np.frombuffer(value.tobytes(), np.uint8)
        pools.append(memory)
        return RequestArgument(False, DataLocation(len(pools) - 1, 0, size_bytes), tuple(dimensions))

    def token(number: int) -> RequestArgument:
        pools.append(BufferToken(number))
        return RequestArgument(False, DataLocation(len(pools) - 1))

    ins = [token(i) if isinstance(i, int) else argument(i.nbytes, i.shape, i) for i in inputs]
    outs = [token(o) if isinstance(o, int) else argument(o[0], o[1], None) for o in outputs]
    return Request(tuple(ins), tuple(outs), tuple(pools))


def output_of(request: Request, index: int = 0) -> npt.NDArray[np.float32]:
    """An output of a request as float32."""
    location = request.outputs[index].location
    pool = request.pools[location.pool_index]
    assert isinstance(pool, Memory)
    return pool.array[location.offset : location.offset + location.length].copy().view(np.float32)


class Small:
    """What the tests of drivers make models and requests with."""

    sum_model = staticmethod(sum_model)
    request = staticmethod(request_of)
    output = staticmethod(output_of)


@pytest.fixture
def small() -> type[Small]:
    return Small


@pytest_asyncio.fixture(loop_scope="module")
async def reference() -> AsyncIterator[ReferenceDevice]:
    async with ReferenceDevice() as device:
        yield device


@contextlib.asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Device]:
    """The reference device; the same claims hold through a driver process, and for a device on the event loop."""
    if kind != "process":
        async with ReferenceDevice() if kind == "in_process" else LoopReferenceDevice() as own:
            yield own
        return
    # The task group must be entered and left in one task, which a fixture's two halves are not.
    background = Background()
    await background.start()
    try:
        remote = RemoteDevice("reference", "reference", background.tasks)
        await remote.connect()
        yield remote
        await remote.aclose()
    finally:
        await background.aclose()


KINDS = ["in_process", "process", "loop"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """A device for all tests of a module, in one event loop."""
    async with opened(request.param) as device:
        # What is started when it is first needed: threads, a watch of descriptors.
        prepared = await device.prepare_model(sum_model())
        ones = np.ones((2, 3), np.float32)
        await prepared.execute_synchronously(request_of([ones, ones], [(24, (2, 3))]))
        await prepared.aclose()
        yield device


@pytest_asyncio.fixture(loop_scope="module", params=KINDS)
async def fresh_device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """A device that nothing was asked of."""
    async with opened(request.param) as device:
        yield device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs what uses a device in the event loop of its module."""
    for item in items:
        used = {"device", "fresh_device", "reference"} & set(getattr(item, "fixturenames", ()))
        if used and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)

"""Values that no argument expects, for the arguments of every public call: an error of aionn's or a result, and no driver process
ends with them, which would end everything else on its device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing.models import identity
from fences import SyncFence

X = np.ones(4, np.float32)
LIMIT_S = 60


class OwnNumber(int):
    """An integer of a class that no decoder knows."""


ODD: list[Any] = [
    None,
    0,
    1,
    -1,
    2**63,
    2**64,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    True,
    np.True_,
    np.int64(1),
    np.float32(1.5),
    np.array([1, 2]),
    "x",
    "\ud800",
    "a\0b",
    b"x",
    bytearray(b"x"),
    memoryview(b"x"),
    [],
    (),
    {},
    set(),
    object(),
    OwnNumber(1),
    SyncFence("odd"),
    [X, X],
]

SAMPLE_STEP = 3
"""Each argument gets each third of the odd values in the ordinary run, and its neighbours get the others."""

Net = aionn.Compilation


class Opened(NamedTuple):
    """A runtime with one driver process, and what is asked of it."""

    runtime: aionn.Runtime
    net: Net
    memory: aionn.DeviceMemory | aionn.SharedMemory


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    async with aionn.open(drivers=["reference"], spare_processes=False) as runtime:
        net = await runtime.compile(identity((4,)))
        memory = await runtime.allocate(inputs=[(net, 0)])
        await memory.write(X)
        yield Opened(runtime, net, memory)


async def _inputs(on: Opened, inputs: Any) -> None:
    await on.net.execute(inputs)


async def _execute(on: Opened, **given: Any) -> None:
    await on.net.execute([X], **given)


async def _fenced(on: Opened, **given: Any) -> None:
    await on.net.execute_fenced([X], **given)


async def _waiting(on: Opened, fence: Any) -> None:
    on.net.execute_fenced([X], wait_for=[fence]).cancel()


async def _reusable(on: Opened, **given: Any) -> None:
    await on.net.reusable(**given).execute()


async def _computed(on: Opened, **given: Any) -> None:
    await on.net.reusable().execute(**given)


async def _burst(on: Opened, **given: Any) -> None:
    async with on.net.burst() as burst:
        await burst.execute([X], **given)


async def _slots(on: Opened, **given: Any) -> None:
    async with on.net.burst(**given) as burst:
        await burst.execute([X])


async def _lent(on: Opened, **given: Any) -> None:
    async with on.net.burst() as burst:
        with burst.lend() as slot:
            await slot.execute(**given)


async def _stream(on: Opened, **given: Any) -> None:
    async def source() -> AsyncIterator[Any]:
        yield X

    async with on.net.burst() as burst, burst.stream(source(), **given) as stream:
        async for _ in stream:
            pass


async def _input(on: Opened, value: Any) -> None:
    await on.net.execute([value])


async def _output(on: Opened, value: Any) -> None:
    await on.net.execute([X], outputs=[value])


async def _changed(on: Opened, **given: Any) -> None:
    on.net.execute_fenced([X]).change_priority(**given)


async def _compiled(on: Opened, **given: Any) -> None:
    await (await on.runtime.compile(identity((4,)), **given)).aclose()


async def _model(on: Opened, model: Any) -> None:
    await (await on.runtime.compile(model)).aclose()


async def _supported(on: Opened, **given: Any) -> None:
    await on.runtime.supported_operations(identity((4,)), **given)


async def _replaced(on: Opened, model: Any) -> None:
    await on.net.replace(model)


async def _replaced_by(on: Opened, deadline: Any) -> None:
    await on.net.replace(identity((4,)), deadline=deadline)


async def _allocated(on: Opened, **given: Any) -> None:
    await on.runtime.allocate(**{"inputs": [(on.net, 0)], **given})


async def _role(on: Opened, role: Any) -> None:
    await on.runtime.allocate(inputs=[role])


async def _index(on: Opened, index: Any) -> None:
    await on.runtime.allocate(inputs=[(on.net, index)])


async def _extent(on: Opened, extent: Any) -> None:
    await on.runtime.allocate(inputs=[(on.net, 0)], shape=[extent])


async def _copied_from(on: Opened, source: Any) -> None:
    await on.runtime.copy(source, on.memory)


async def _copied_to(on: Opened, destination: Any) -> None:
    await on.runtime.copy(on.memory, destination)


async def _written(on: Opened, values: Any) -> None:
    await on.memory.write(values)


async def _shared(on: Opened, **given: Any) -> None:
    with aionn.SharedMemory.create(**{"shape": (4,), "dtype": np.float32, **given}) as memory:
        await on.net.execute([memory])


async def _shared_from(on: Opened, array: Any) -> None:
    with aionn.SharedMemory.from_array(array) as memory:
        await on.net.execute([memory])


async def _imported(on: Opened, **given: Any) -> None:
    with aionn.SharedMemory.create((4,), np.float32) as memory:
        fd = memory.memory.fileno()
        with aionn.SharedMemory.from_fd(**{"fd": fd, "shape": (4,), "dtype": np.float32, **given}) as own:
            await on.net.execute([own])


async def _image(on: Opened, **given: Any) -> None:
    with aionn.ImageMemory.create(**{"width": 2, "height": 2, **given}) as image:
        await on.net.execute([image])


async def _image_from(on: Opened, array: Any) -> None:
    with aionn.ImageMemory.from_array(array) as image:
        await on.net.execute([image])


async def _opened(on: Opened, **given: Any) -> None:
    async with aionn.open(**{"drivers": ["reference"], "isolation": "in_process", **given}):
        pass


CALLS: dict[str, list[tuple[Callable[..., Awaitable[object]], str]]] = {
    "executions": [
        (_inputs, "inputs"),
        (_execute, "outputs deadline priority measure loop_timeout"),
        (_fenced, "wait_for deadline duration priority measure loop_timeout"),
        (_waiting, "fence"),
        (_reusable, "measure loop_timeout"),
        (_computed, "deadline priority"),
        (_input, "value"),
        (_output, "value"),
        (_changed, "priority"),
    ],
    "bursts": [
        (_burst, "deadline priority measure"),
        (_slots, "slots"),
        (_lent, "deadline priority measure"),
        (_stream, "on_late priority measure guarantee period jitter name phase_ns"),
    ],
    "compilations": [
        (_compiled, "preference priority deadline cache_token allow_fallback recover"),
        (_compiled, "dimensions input_shapes values"),
        (_model, "model"),
        (_supported, "devices dimensions input_shapes values"),
        (_replaced, "model"),
        (_replaced_by, "deadline"),
        (_opened, "trace telemetry"),
    ],
    "memories": [
        (_allocated, "inputs outputs shape"),
        (_role, "role"),
        (_index, "index"),
        (_extent, "extent"),
        (_copied_from, "source"),
        (_copied_to, "destination"),
        (_written, "values"),
        (_shared, "shape dtype"),
        (_shared_from, "array"),
        (_imported, "fd shape dtype offset"),
        (_image, "width height layers format stride"),
        (_image_from, "array"),
    ],
}


@pytest.mark.parametrize("step", [SAMPLE_STEP, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("calls", list(CALLS))
@pytest.mark.thorough
async def test_odd_argument_ends_no_driver_process(
    opened: Opened, calls: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # A text may be the name of a file.
    device = opened.runtime.device("reference")
    pid = device.pid
    assert pid is not None
    for number, (call, names) in enumerate(CALLS[calls]):
        for place, name in enumerate(names.split(), number):
            for odd in ODD[place % step :: step]:
                said = f"{call.__name__}, {name}: {odd!r}"
                with anyio.fail_after(LIMIT_S):
                    try:
                        await call(opened, **{name: odd})
                    except aionn.DeadObject:
                        pytest.fail(f"{said} ended the driver process")
                    except aionn.Error:
                        pass
                    except Exception as e:
                        pytest.fail(f"{said} raised {e!r}")
                    await opened.net.execute([X])
                assert device.pid == pid, f"{said} ended the driver process"

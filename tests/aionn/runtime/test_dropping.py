"""What is dropped without being closed: here and in the driver process nothing of it stays."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn.burst.controller import BurstController
from aionn.burst.session import BurstState
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice
from aionn.runtime.background import Background
from aionn.runtime.dropping import close_when_dropped
from tests.support.split import split_devices

ONE = np.ones(1, np.float32)
LIMIT_S = 30
ROUNDS = 3
LOOP_S = 0.2
"""How long a loop may go on that nobody waits for: what it uses is freed when it has ended."""

Use = Callable[[aionn.Runtime], Awaitable[None]]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What only the garbage collector would find is not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def compiled(runtime: aionn.Runtime) -> None:
    await runtime.compile(endless_model())


async def executed(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    await net.execute([-ONE])
    await net.execute([-ONE], deadline=aionn.after(60))
    await net.execute_fenced([-ONE])


async def failed(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    with pytest.raises(aionn.MissedDeadline):
        await net.execute([ONE], deadline=aionn.after(0.01))


async def cancelled(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    for options in ({}, {"deadline": aionn.after(60)}):
        # Where the machine is so busy that the loop ends first, it is a failure that is freed.
        with contextlib.suppress(aionn.MissedDeadline), anyio.move_on_after(0.01):
            await net.execute([ONE], loop_timeout=LOOP_S, **options)


async def burst(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    opened = await net.burst().__aenter__()
    await opened.execute([-ONE])
    await opened.execute([-ONE], deadline=aionn.after(60), measure=True)


async def stream(runtime: aionn.Runtime) -> None:
    async def numbers() -> AsyncIterator[Any]:
        while True:
            yield -ONE

    net = await runtime.compile(endless_model())
    opened = await net.burst().__aenter__()
    for deadline in (None, lambda item: aionn.after(60)):
        async for _ in opened.stream(numbers(), deadline=deadline):
            break


async def reusable(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    again = net.reusable()
    again.inputs[0][...] = -1
    for _ in range(2):
        await again.execute()


async def memory(runtime: aionn.Runtime) -> None:
    net = await runtime.compile(endless_model())
    held = await runtime.allocate(inputs=[(net, 0)])
    await held.write(-ONE)
    await net.execute([held])


USES = [compiled, executed, failed, cancelled, burst, stream, reusable, memory]


def held_by(pid: int) -> int:
    """Descriptors and shared mappings of a process."""
    with open(f"/proc/{pid}/maps") as file:
        mappings = sum("/memfd:" in line for line in file)
    return len(os.listdir(f"/proc/{pid}/fd")) + mappings


def held(runtime: aionn.Runtime) -> list[int]:
    pid = runtime.devices[0].pid
    return [held_by(os.getpid()), *([] if pid is None else [held_by(pid)])]


@pytest.mark.sampled(32)
@pytest.mark.parametrize("isolation", ["process", "in_process"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
async def test_what_is_dropped_is_freed_here_and_at_the_driver(
    use: Use, isolation: str, without_collector: None
) -> None:
    async with aionn.open(drivers=["reference"], isolation=isolation) as runtime:
        await use(runtime)
        await use(runtime)
        await nothing_left(runtime)
        before = held(runtime)
        for _ in range(ROUNDS):
            await use(runtime)
        await nothing_left(runtime)
        # The driver process frees what it was told of a little later; a cancelled execution ends at its next operation.
        with anyio.move_on_after(LIMIT_S):
            while any(now > then for now, then in zip(held(runtime), before, strict=True)):
                await anyio.sleep(0.01)
        assert all(now <= then for now, then in zip(held(runtime), before, strict=True)), (
            before,
            held(runtime),
        )


async def nothing_left(runtime: aionn.Runtime) -> None:
    background = runtime.background
    with anyio.move_on_after(LIMIT_S):
        while list(runtime._compilations) or background._dropped or background._executions:
            await anyio.sleep(0.001)
    assert not list(runtime._compilations) and not background._dropped and not background._executions


async def test_memory_of_a_stream_that_ends_with_an_error_is_freed(without_collector: None) -> None:
    async def numbers() -> AsyncIterator[Any]:
        while True:
            yield -ONE

    async def use(runtime: aionn.Runtime, is_read: bool) -> None:
        async with (await runtime.compile(endless_model())).burst(slots=2) as burst:
            stream = burst.stream(numbers())
            await anext(stream)
            pid = cast(int, runtime.devices[0].pid)
            os.kill(pid, signal.SIGKILL)
            if not is_read:
                while runtime.devices[0].pid == pid:
                    await anyio.sleep(0.001)
                return
            async for _ in stream:
                pass

    def memories() -> list[str]:
        with open("/proc/self/maps") as file:
            return [line for line in file if "aionn-request" in line]

    async with aionn.open(drivers=["reference"]) as runtime:
        for is_read in (True, False):
            with contextlib.suppress(aionn.DeadObject):
                await use(runtime, is_read)
            with anyio.fail_after(LIMIT_S):
                while memories():
                    await anyio.sleep(0.001)


async def test_burst_keeps_the_compilation_that_it_was_made_of(without_collector: None) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        async with (await runtime.compile(endless_model())).burst() as opened:
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert (await opened.execute([-ONE])).outputs[0] == -1
        again = (await runtime.compile(endless_model())).reusable()
        again.inputs[0][...] = -1
        assert (await again.execute()).outputs[0] == -1
        under_way = (await runtime.compile(endless_model())).execute_fenced([-ONE])
        assert (await under_way).outputs[0] == -1


async def test_driver_of_this_process_is_told_to_release_what_is_dropped(without_collector: None) -> None:
    device = ReferenceDevice("reference")
    released: list[object] = []
    prepare = device.prepare

    def prepared(*arguments: Any, **options: Any) -> Any:
        made = prepare(*arguments, **options)
        made.release = lambda: released.append(None)  # type: ignore[method-assign]
        return made

    device.prepare = prepared  # type: ignore[method-assign]
    async with aionn.open(devices=[device]) as runtime:
        net = await runtime.compile(endless_model())
        closed = await runtime.compile(endless_model())
        await closed.aclose()
        assert len(released) == 1
        del net
        with anyio.fail_after(LIMIT_S):
            while len(released) < 2:
                await anyio.lowlevel.checkpoint()
        del closed
        await anyio.lowlevel.checkpoint()
    assert len(released) == 2


async def test_object_that_is_dropped_as_the_background_begins_to_close_is_closed() -> None:
    closed: list[str] = []

    class Owner: ...

    async def close(name: str) -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        closed.append(name)

    background = Background()
    await background.start()
    began, waits = Owner(), Owner()
    close_when_dropped(began, background, functools.partial(close, "began"))
    close_when_dropped(waits, background, functools.partial(close, "waits"))
    del began
    await anyio.lowlevel.checkpoint()
    del waits
    await background.aclose()
    assert sorted(closed) == ["began", "waits"]


async def test_compilation_that_is_dropped_as_the_runtime_begins_to_close_is_freed_before_its_device() -> (
    None
):
    device = ReferenceDevice("reference")
    ends: list[str] = []
    prepare, aclose = device.prepare, device.aclose

    def prepared(*arguments: Any, **options: Any) -> Any:
        made = prepare(*arguments, **options)
        made.release = lambda: ends.append("model")  # type: ignore[method-assign]
        return made

    async def closed() -> None:
        ends.append("device")
        await aclose()

    device.prepare = prepared  # type: ignore[method-assign]
    device.aclose = closed  # type: ignore[method-assign]
    async with aionn.open(devices=[device]) as runtime:
        net = await runtime.compile(endless_model())
        del net
    assert ends[:2] == ["model", "device"]


async def test_burst_that_is_dropped_as_the_runtime_begins_to_close_is_closed(
    without_collector: None,
) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(endless_model())
        opened = await net.burst().__aenter__()
        await opened.execute([-ONE])
        controllers = [device_burst.hal for of_step in opened._opened for device_burst in of_step]
        del net, opened
    assert [cast(BurstController, c).state for c in controllers] == [BurstState.CLOSED]


async def test_compilation_of_several_steps_is_freed_when_it_is_dropped(without_collector: None) -> None:
    async with aionn.open(devices=split_devices(1)) as runtime:
        await compiled(runtime)
        await nothing_left(runtime)


async def test_memory_of_a_dropped_compilation_fits_no_other(without_collector: None) -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        net = await runtime.compile(endless_model())
        held = await runtime.allocate(inputs=[(net, 0)])
        assert isinstance(held, aionn.runtime.memory.own.DeviceMemory)
        await held.write(-ONE)
        del net
        for _ in range(8):
            net = await runtime.compile(endless_model())
            with pytest.raises(aionn.InvalidArgument, match="not made for this use"):
                await net.execute([held])
            del net
        await held.aclose()


async def test_collector_in_another_thread_frees(without_collector: None) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        cycle: list[object] = [await runtime.compile(endless_model())]
        cycle.append(cycle)
        del cycle
        await anyio.to_thread.run_sync(gc.collect)
        await nothing_left(runtime)

"""Every public class: a representation that says something, and a refusal to be copied of those that belong to this process."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

import aionn
import aionn.blocking
import aionn.media
import fences
import fmq
from aionn.hal import OperationType
from aionn.testing.models import chain

X = np.ones(3, np.float32)
MODULES = (aionn, aionn.media, fences, fmq, aionn.blocking)

PLAIN = {
    "LogMel": "tables of numbers, which a copy has as well",
    "Model": "a description of a model, of plain values",
    "Permit": "written in C, which a driver makes; Python has no object of it in hand",
    "Slots": "written in C, which a driver makes; Python has no object of it in hand",
}
"""Public classes whose objects belong to no process, or are of no use to an application, with the reason."""


def of_this_process() -> dict[str, type]:
    """The public classes that are neither errors nor values, by module and name."""
    found = {}
    for module in MODULES:
        names = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        for name in names:
            kind = getattr(module, name)
            is_own = inspect.isclass(kind) and not (
                module is aionn.blocking and kind.__module__ != "aionn.blocking"
            )
            if (
                not is_own
                or name in PLAIN
                or issubclass(kind, BaseException | enum.Enum | msgspec.Struct | tuple)
            ):
                continue
            found[f"{module.__name__}.{name}"] = kind
    return found


KINDS = of_this_process()


async def items() -> AsyncIterator[np.ndarray]:
    yield X


@pytest.fixture
async def objects(tmp_path: Any) -> AsyncIterator[dict[type, Any]]:
    """One object of each class, by its class."""
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(aionn.open(drivers=["reference"], isolation="in_process"))
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        burst = await stack.enter_async_context(net.burst(slots=6))
        execution = net.execute_fenced([X])
        await execution
        memory = await runtime.allocate(inputs=[(net, 0)])
        stack.push_async_callback(memory.aclose)
        lent = stack.enter_context(burst.lend())
        streams = [burst.stream(items()), burst.stream(items(), guarantee="best", period=1.0)]
        for stream in streams:
            stack.callback(stream.cancel)
        fleet = aionn.FleetStreams(runtime, chain([OperationType.RELU], (3,)), devices=["reference"])
        await stack.enter_async_context(fleet)
        shared = stack.enter_context(aionn.SharedMemory.create((3,), np.float32))
        image = stack.enter_context(aionn.ImageMemory.create(4, 4))
        tee = aionn.media.tee(items())
        timeline = fences.Timeline("line")
        queue = stack.enter_context(fmq.MessageQueue.create(4, 4))
        writing = queue.begin_write(1)
        made = [
            runtime, *runtime.devices, net, burst, execution, net.reusable(), memory, lent, *streams,
            fleet, fleet.stream(items(), period=1.0, name="gate"), shared, image, tee, tee.branch(),
            aionn.media.camera(), aionn.media.synthetic_video(size=(8, 8), frames=1),
            aionn.media.joined(items(), items(), tolerance_s=0.1),
            aionn.media.record(tmp_path / "file"), aionn.media.CameraWatch(),
            aionn.media.CaptureMemory([np.zeros((4, 4, 3), np.uint8) for _ in range(3)]),
            timeline, timeline.fence(1), fences.SyncFence(), fences.SyncFence().then(lambda: None),
            fences.Chain(), queue, writing, fmq.Answers(),
            fmq.EventFlag(memoryview(bytearray(4))),
        ]  # fmt: skip
        yield {type(one): one for one in made}


@pytest.fixture
def blocking_objects() -> Iterator[dict[type, Any]]:
    """One object of each class of ``aionn.blocking``."""
    with ExitStack() as stack:
        runtime = stack.enter_context(aionn.blocking.open(drivers=["reference"], isolation="in_process"))
        net = stack.enter_context(runtime.compile(chain([OperationType.RELU], (3,))))
        burst = stack.enter_context(net.burst(slots=6))
        execution = net.execute_fenced([X])
        execution.result()
        memory = runtime.allocate(inputs=[(net, 0)])
        stack.callback(memory.close)
        lent = stack.enter_context(burst.lend())
        streams = [burst.stream([X]), burst.stream([X], guarantee="best", period=1.0)]
        for stream in streams:
            stack.callback(stream.close)
        made = [runtime, net, burst, execution, net.reusable(), memory, lent, *streams]
        yield {type(one): one for one in made}


def check(made: dict[type, Any], kind: type) -> None:
    """Both claims, for one class."""
    one = made[kind]
    shown = repr(one)
    assert kind.__name__.removeprefix("Runtime") in shown or kind.__module__.startswith(
        "fences."
    )  # Names of their own.
    assert " object at 0x" not in shown and "\n" not in shown and len(shown) < 200
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be (copied or )?pickled[.;] \w+"):
            duplicate(one)


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("aionn.blocking")])
async def test_object_of_this_process_has_a_representation_and_is_not_copied(
    objects: dict[type, Any], name: str
) -> None:
    check(objects, KINDS[name])


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("aionn.blocking")])
def test_blocking_object_has_a_representation_and_is_not_copied(
    blocking_objects: dict[type, Any], name: str
) -> None:
    check(blocking_objects, KINDS[name])


async def test_representation_names_the_state_also_after_the_close() -> None:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        assert repr(runtime) == "<Runtime open, reference>"
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        burst = net.burst()
        assert repr(burst) == "<Burst not entered, on reference, 0 streams>"
        async with burst:
            assert repr(burst) == "<Burst open, on reference, 0 streams>"
            stream = burst.stream(items())
            assert repr(stream) == "<Stream open, on_time 0, late 0, dropped 0, lost 0>"
        reusable = net.reusable()
        assert repr(reusable) == "<ReusableExecution not executed, [3]>"
        await reusable.execute()
        assert repr(reusable) == "<ReusableExecution finished, [3]>"
        with aionn.SharedMemory.create((3,), np.float32) as memory:
            assert repr(memory) == "<SharedMemory float32 [3], open>"
    assert repr(memory) == "<SharedMemory float32 [3], closed>"
    assert repr(runtime) == "<Runtime closed, reference>"
    assert repr(burst) == "<Burst closed, on reference, 0 streams>"
    assert repr(stream) == "<Stream ended, on_time 0, late 0, dropped 0, lost 0>"

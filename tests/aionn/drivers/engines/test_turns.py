"""Models of several processes, checked and prepared in turns between their pieces: each gives what it gives alone, to the byte.

Every piece is followed by the turn of another process here, wherever the drivers have pieces: while they check, lower, save and
restore. Some calls are cancelled and some have deadlines that come.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.conformance.random_graphs.graphs import draw_case
from aionn.conformance.random_graphs.sets import TESTS
from aionn.drivers.kit import blocking
from aionn.drivers.kit.blocking import BlockingDevice
from aionn.drivers.onnx_reference.driver import OnnxReferenceDevice
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import DeviceUnavailable, Error, InvalidArgument, MissedDeadline
from aionn.hal import CacheFiles, Model, OperandType, OperationType, Priority
from aionn.hal.callers import Connection, client_of_call
from aionn.hal.pooled_request import PooledRequest
from aionn.models.builder import ExtensionCode, GraphBuilder
from aionn.models.onnx.extension import (
    EXTENSION_NAME,
    ElementType,
    ValueType,
    encode_attributes,
    number_of,
)
from aionn.scheduler.shared_slots import SharedSlots
from aionn.testing import models
from fences import now_ns
from tests.aionn.drivers.engines.conftest import ENGINES, MISSING

MAKERS: dict[str, Callable[[], BlockingDevice]] = {
    "reference": ReferenceDevice,
    "onnx-reference": OnnxReferenceDevice,
} | {engine.device: engine.make for engine in ENGINES if engine.device not in MISSING}

SETS = (
    "CHAIN_TENSOR_FLOAT32",
    "CHAIN_TENSOR_QUANT8_ASYMM",
    "SMALL_TENSOR_FLOAT32_4",
    "SMALL_TENSOR_FLOAT32_2",
)

PROCESSES, CONNECTIONS, MODELS, CALLS = 4, 2, 10, 3
LONG = 12
"""Times as many models and calls of a connection in the long form."""

SOON_NS = 30_000_000
"""Latest deadline, and latest cancellation: about when most calls have begun."""


class Sample(NamedTuple):
    """A model with values of its inputs."""

    model: Model
    inputs: tuple[Any, ...]


class Alone(NamedTuple):
    """What a device said and computed with nothing beside it."""

    sample: Sample
    support: tuple[bool, ...]
    results: tuple[bytes, ...] | str


def operators(number: int) -> Sample:
    """A chain of operators of ONNX."""
    graph = GraphBuilder()
    shape = (number % 5 + 1, 3)
    value = ValueType(1, shape)
    last = graph.input(OperandType.TENSOR_FLOAT32, shape)
    kinds = ("Erf", "Sin", "Cos", "Mish")
    for position in range(number % 7 + 3):
        data = encode_attributes(22, {}, [value], [value])
        kind = ExtensionCode(EXTENSION_NAME, ElementType.ATTRIBUTES)
        record = graph.constant(data, kind, dimensions=(len(data),))
        number_of_kind = number_of(kinds[(number + position) % len(kinds)])
        result = graph.variable(OperandType.TENSOR_FLOAT32, shape)
        graph.operation(ExtensionCode(EXTENSION_NAME, number_of_kind), [last, record], [result])
        last = result
    return Sample(graph.build([last]), (np.random.default_rng(number).random(shape, np.float32),))


def samples(device: str, count: int) -> Iterator[Sample]:
    """Seeded models, about half of them with many pieces."""
    for number in range(count):
        if device == "onnx-reference":
            yield operators(number)
        elif number % 2:
            case = draw_case(TESTS[SETS[number // 2 % len(SETS)]], number)
            yield Sample(case.model, case.inputs)
        else:
            chance = random.Random(number)
            types = (OperationType.FLOOR, OperationType.RELU, OperationType.ABS, OperationType.TANH)
            shape = (chance.randrange(1, 5), chance.randrange(1, 9))
            model = models.chain(chance.choices(types, k=chance.randrange(20, 60)), shape)
            yield Sample(model, (np.random.default_rng(number).normal(size=shape).astype(np.float32),))


async def results_of(prepared: Any, sample: Sample) -> tuple[bytes, ...] | str:
    """The bytes of the outputs; the name of the error where there are none."""
    with PooledRequest(sample.model) as pooled:
        pooled.write(sample.inputs)
        try:
            await prepared.execute_synchronously(pooled.request)
        except Error as e:
            return type(e).__name__
        return tuple(output.tobytes() for output in pooled.outputs())


@contextlib.contextmanager
def cache_files() -> Iterator[CacheFiles]:
    fds = [os.memfd_create(name) for name in ("model", "data")]
    try:
        yield CacheFiles(fds[:1], fds[1:], bytes(32))
    finally:
        for fd in fds:
            os.close(fd)


class Bench:
    """A device that several processes use, and what they found."""

    def __init__(self, device: BlockingDevice, alone: list[Alone]) -> None:
        self.device = device
        self.alone = alone
        self.prepared = self.restored = self.asked = self.cancelled = self.late = 0

    async def prepare(self, one: Alone, chance: random.Random) -> None:
        """Has a model prepared, saved, and restored, and compares the results."""
        priority = chance.choice([Priority.LOW, Priority.MEDIUM])
        with cache_files() as files:
            cache = files if chance.random() < 0.4 else None
            deadline_ns = now_ns() + chance.randrange(SOON_NS) if chance.random() < 0.2 else None
            try:
                prepared: Any = await self.device.prepare_model(
                    one.sample.model, priority=priority, deadline_ns=deadline_ns, cache=cache
                )
            except MissedDeadline:
                assert deadline_ns is not None
                self.late += 1
                return
            except InvalidArgument:
                assert not all(one.support), one
                return
            assert all(one.support), one
            self.prepared += 1
            await self.compare(prepared, one)
            if cache is not None:
                restored = await self.device.prepare_model_from_cache(cache, priority=priority)
                self.restored += 1
                await self.compare(restored, one)

    async def compare(self, prepared: Any, one: Alone) -> None:
        try:
            assert await results_of(prepared, one.sample) == one.results
        finally:
            with anyio.CancelScope(shield=True):
                await prepared.aclose()

    async def use(self, process: int, connection: int, calls: int) -> None:
        """The calls of one connection."""
        client_of_call.set(Connection(process, connection))
        chance = random.Random(f"{process} {connection}")
        for _ in range(calls):
            one = chance.choice(self.alone)
            after_s = chance.random() * SOON_NS / 1e9 if chance.random() < 0.25 else None
            with anyio.move_on_after(after_s) as scope:
                if chance.random() < 0.25:
                    assert await self.device.supported_operations(one.sample.model) == one.support
                    self.asked += 1
                else:
                    await self.prepare(one, chance)
            self.cancelled += scope.cancelled_caught


async def learnt(make: Callable[[], BlockingDevice], device_name: str, count: int) -> list[Alone]:
    """What a device says to the models, one after the other."""
    found = []
    async with make() as device:
        for sample in samples(device_name, count):
            support = await device.supported_operations(sample.model)
            results: tuple[bytes, ...] | str = ()
            if all(support):
                prepared = await device.prepare_model(sample.model)
                try:
                    results = await results_of(prepared, sample)
                finally:
                    await prepared.aclose()
            found.append(Alone(sample, support, results))
    return found


async def in_turns(name: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compares what several processes get of one device with what one gets; returns figures."""
    alone = await learnt(MAKERS[name], name, MODELS * factor)
    assert sum(all(one.support) for one in alone) > len(alone) / 2
    given = 0
    give = SharedSlots.give_turn

    def counted(slots: SharedSlots, job: Any) -> None:
        nonlocal given
        given += 1
        give(slots, job)

    monkeypatch.setattr(SharedSlots, "give_turn", counted)
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    async with MAKERS[name]() as device:
        bench = Bench(device, alone)
        async with anyio.create_task_group() as tasks:
            for process in range(PROCESSES):
                for connection in range(CONNECTIONS):
                    tasks.start_soon(bench.use, process, connection, CALLS * factor)
        slots = device.preparing._slots
    assert not (slots._queued or slots._shown or slots._behind or slots._suspended or slots._given)
    assert slots.held_count == slots.waiting_count == device.preparing._paused_count == 0
    return {
        "turns": given,
        **{key: value for key, value in vars(bench).items() if isinstance(value, int)},
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] if name == "openvino-cpu" else []) for name in MAKERS],
)
async def test_models_prepared_in_turns_are_those_prepared_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = await in_turns(name, 1, monkeypatch)
    print(name, figures)
    assert figures["turns"] > 50 and figures["prepared"] > 5, figures


@pytest.mark.long
@pytest.mark.parametrize("name", MAKERS)
async def test_many_models_prepared_in_turns_are_those_prepared_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = await in_turns(name, LONG, monkeypatch)
    print(name, figures)
    assert figures["turns"] > 50 * LONG and figures["prepared"] > 5 * LONG, figures


@pytest.mark.parametrize("name", MAKERS)
async def test_device_that_is_closed_in_the_middle_of_turns_answers_every_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have given their turns go on to their ends, and some whose caller has left end at their next piece."""
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    sample = operators(6) if name == "onnx-reference" else next(samples(name, 1))
    device = MAKERS[name]()
    answered: list[int] = []
    waiting: list[int] = []
    slots = device.preparing._slots
    give = slots.give_turn

    def counted(job: Any) -> None:
        give(job)
        waiting.append(slots.waiting_count)

    slots.give_turn = counted  # type: ignore[method-assign]

    async def ask(process: int) -> None:
        client_of_call.set(Connection(process, process))
        with anyio.move_on_after(0.001 * process if process % 2 else None):
            with contextlib.suppress(DeviceUnavailable):  # Closed before it was asked.
                assert all(await device.supported_operations(sample.model))
        answered.append(process)

    async with anyio.create_task_group() as tasks:
        for process in range(8):
            tasks.start_soon(ask, process)
        while not waiting:
            await anyio.lowlevel.checkpoint()
        await device.aclose()
    assert sorted(answered) == list(range(8)) and max(waiting) >= 1
    assert not (slots._queued or slots._shown or slots._behind or slots._suspended or slots._given)
    assert slots.held_count == slots.waiting_count == device.preparing._paused_count == 0
    assert not [t for t in threading.enumerate() if t.name.startswith(f"aionn-{device.info.name}-preparing")]

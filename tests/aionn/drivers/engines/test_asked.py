"""A model that a client asked about is validated and lowered once, if its constants cannot change before it is prepared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit import blocking
from aionn.drivers.kit.engines.asked import KEPT_NS
from aionn.drivers.kit.engines.device import EngineDevice
from aionn.errors import InvalidModel
from aionn.hal import FusedActivation, Memory, Model, OperandType, OperationType, PreparedModel
from aionn.hal.callers import Connection, client_of_call
from aionn.models.builder import GraphBuilder
from aionn.models.importing import load_file
from aionn.testing.models import identity
from tests.aionn.drivers.engines.conftest import Engine

SIZE = 40
ZEROS = np.zeros(SIZE, np.float32)


def added(constant: float) -> Model:
    """A model whose constants are in a pool that is sealed against writing."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (SIZE,))
    terms = g.constant(np.full(SIZE, constant, np.float32))
    return g.build([g.result(OperationType.ADD, [x, terms, int(FusedActivation.NONE)], x)])


def changeable(model: Model) -> Model:
    """The model with its constants in memory that can be written."""
    (pool,) = model.pools
    copy = Memory.create(pool.size_bytes)
    copy.array[:] = pool.array
    return msgspec.structs.replace(model, pools=(copy,))


def received(model: Model) -> Model:
    """The model as another object with mappings of its own, as a driver process gets it with each call."""
    pools = tuple(Memory.from_fd(pool.fileno(), writable=False) for pool in model.pools)
    return msgspec.structs.replace(model, pools=pools)


def counting(make: Callable[[], EngineDevice], lowered: list[Model]) -> EngineDevice:
    """A device that notes the models that it lowers."""
    device = make()
    lower = device.lower

    def noted(model: Model) -> Any:
        lowered.append(model)
        return lower(model)

    device.lower = noted  # type: ignore[method-assign]
    return device


async def result_of(prepared: PreparedModel, model: Model) -> float:
    request = request_for(model, [ZEROS])
    await prepared.execute_synchronously(request)
    (location,) = [argument.location for argument in request.outputs]
    assert location is not None
    pool = request.pools[location.pool_index]
    assert isinstance(pool, Memory)
    return float(pool.array[location.offset : location.offset + location.length].view(np.float32)[0])


async def test_model_is_lowered_once_for_the_question_and_the_preparation(engine: Engine) -> None:
    lowered: list[Model] = []
    async with counting(engine.make, lowered) as device:
        model = added(3)
        assert await device.supported_operations(received(model)) == (True,)
        prepared = await device.prepare_model(received(model))
        assert len(lowered) == 1
        assert await result_of(prepared, model) == 3
        await device.prepare_model(received(model))
        assert len(lowered) == 2, "kept for one preparation"


async def test_model_of_a_file_is_lowered_once(engine: Engine, example_data: Path) -> None:
    lowered: list[Model] = []
    async with counting(engine.make, lowered) as device:
        model = load_file(example_data / "digits_float.tflite").model
        assert all(await device.supported_operations(received(model)))
        await device.prepare_model(received(model))
        assert len(lowered) == 1


async def test_model_with_other_constants_is_lowered_again(engine: Engine) -> None:
    lowered: list[Model] = []
    async with counting(engine.make, lowered) as device:
        await device.supported_operations(added(3))
        other = added(4)
        assert await result_of(await device.prepare_model(other), other) == 4
        assert len(lowered) == 2


async def test_model_that_can_be_changed_is_lowered_again(engine: Engine) -> None:
    lowered: list[Model] = []
    async with counting(engine.make, lowered) as device:
        model = changeable(added(3))
        await device.supported_operations(model)
        model.pools[0].array.view(np.float32)[:SIZE] = 5
        assert await result_of(await device.prepare_model(model), model) == 5
        assert len(lowered) == 2


async def test_model_of_another_client_is_lowered_again(engine: Engine) -> None:
    lowered: list[Model] = []
    async with counting(engine.make, lowered) as device:
        model = added(3)
        token = client_of_call.set("first")
        await device.supported_operations(model)
        client_of_call.reset(token)
        client_of_call.set("second")
        await device.prepare_model(model)
        assert len(lowered) == 2


async def test_lowered_model_is_forgotten_when_its_time_is_over(engine: Engine) -> None:
    lowered: list[Model] = []
    async with counting(engine.make, lowered) as device:
        ends: list[tuple[int, Callable[[], None]]] = []
        asked_ns = device.now()

        def call_at(time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
            ends.append((time_ns, function))
            return lambda: None

        device.alarm.call_at = call_at  # type: ignore[method-assign]
        model = added(3)
        await device.supported_operations(model)
        ((time_ns, end),) = ends
        assert asked_ns + KEPT_NS <= time_ns <= device.now() + KEPT_NS
        end()
        await device.prepare_model(model)
        assert len(lowered) == 2


async def test_question_that_is_cancelled_at_its_end_keeps_no_model(engine: Engine) -> None:
    is_lowered, is_cancelled = threading.Event(), threading.Event()
    async with engine.make() as device:
        keep = device.keep_lowered

        def slowly(model: Model, lowered: Any) -> None:
            keep(model, lowered)
            is_lowered.set()
            assert is_cancelled.wait(10)

        device.keep_lowered = slowly  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(device.supported_operations, added(3))
            assert await anyio.to_thread.run_sync(is_lowered.wait, 10)
            tasks.cancel_scope.cancel()
        is_cancelled.set()
    assert device._found is None


async def test_one_lowered_model_has_a_time_whoever_asks_in_turns(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of another model's record, which was kept in between, would end this one's."""
    monkeypatch.setattr(blocking, "TURN_NS", 0)
    given: list[None] = []
    ends: list[Callable[[], None]] = []
    async with engine.make() as device:
        slots = device.preparing._slots
        give = slots.give_turn

        def noted(job: Any) -> None:
            given.append(None)
            give(job)

        def call_at(time_ns: int, function: Callable[[], None]) -> Callable[[], None]:
            ends.append(function)

            def cancel() -> None:
                if function in ends:
                    ends.remove(function)

            return cancel

        slots.give_turn = noted  # type: ignore[method-assign]
        device.alarm.call_at = call_at  # type: ignore[method-assign]

        async def ask(process: int) -> None:
            client_of_call.set(Connection(process, process))
            assert all(await device.supported_operations(identity((4,), operations=100)))

        async with anyio.create_task_group() as tasks:
            for process in range(3):
                tasks.start_soon(ask, process)
        assert given and device._asked is not None
        (end,) = ends
        end()
        assert device._asked is None


@pytest.mark.parametrize("field", ["main", "pools", "operand_values"])
async def test_damaged_model_after_a_question_is_refused(engine: Engine, field: str) -> None:
    async with engine.make() as device:
        model = added(3)
        await device.supported_operations(model)
        with pytest.raises(InvalidModel):
            await device.prepare_model(msgspec.structs.replace(model, **{field: None}))

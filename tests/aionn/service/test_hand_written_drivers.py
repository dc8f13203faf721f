"""A driver that is written without base classes: what it must say of its abilities, served and in the application."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ErrorStatus, GeneralFailure
from aionn.hal import (
    BufferDefaults,
    BufferDesc,
    BufferRole,
    BurstDefaults,
    CacheFiles,
    ExecutionResult,
    LaunchBase,
    Memory,
    PreparedModelDefaults,
    Request,
    check_abilities,
)

X = np.arange(4, dtype=np.float32)
WAIT_S_MAX = 20.0


class OldBurst:
    """A burst with the calls of the contract, and without abilities."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def execute_synchronously(
        self, request: Request, memory_identifiers: Sequence[int], **options: Any
    ) -> Any:
        return await self._inner.execute_synchronously(request, memory_identifiers, **options)

    async def release_memory_resource(self, memory_identifier: int) -> None:
        await self._inner.release_memory_resource(memory_identifier)

    async def aclose(self) -> None:
        await self._inner.aclose()


class NewBurst(OldBurst, BurstDefaults):
    """The same, and it says that it has no ability."""


class OldModel:
    """A prepared model with the calls of the contract, and without abilities."""

    burst: type[OldBurst] = OldBurst

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def execute_synchronously(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
    ) -> ExecutionResult:
        result: ExecutionResult = await self.inner.execute_synchronously(
            request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
        )
        return result

    async def configure_execution_burst(
        self, *, controller_polling_us: int = 0, server_polling_us: int = 0
    ) -> OldBurst:
        return self.burst(await self.inner.configure_execution_burst())

    async def aclose(self) -> None:
        await self.inner.aclose()


class MixedModel(OldModel, PreparedModelDefaults):
    """It says that it has no ability, but its bursts do not."""


class NewModel(MixedModel):
    """The same with its bursts."""

    burst = NewBurst


class OldBuffer:
    """A device memory that does not say its size."""

    def __init__(self, inner: Any) -> None:
        self.token = inner.token
        self._inner = inner

    async def copy_to(self, destination: Memory) -> None:
        await self._inner.copy_to(destination)

    async def copy_from(self, source: Memory, dimensions: Sequence[int]) -> None:
        await self._inner.copy_from(source, dimensions)

    async def aclose(self) -> None:
        await self._inner.aclose()


class NewBuffer(OldBuffer, BufferDefaults):
    """The same, and says so."""


class HandWritten:
    """The reference device's calls, and nothing that only its base classes have."""

    def __init__(self, model: type[OldModel], buffer: type[OldBuffer] = NewBuffer) -> None:
        self._inner = ReferenceDevice("plain")
        self.info = self._inner.info
        self._model = model
        self._buffer = buffer

    async def status(self) -> Any:
        return await self._inner.status()

    async def supported_operations(self, model: Any) -> Any:
        return await self._inner.supported_operations(model)

    async def prepare_model(self, model: Any, **options: Any) -> Any:
        return self._model(await self._inner.prepare_model(model, **options))

    async def prepare_model_from_cache(self, cache: CacheFiles, **options: Any) -> Any:
        return self._model(await self._inner.prepare_model_from_cache(cache, **options))

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[Any],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Any:
        models = [prepared.inner for prepared in prepared_models]
        return self._buffer(await self._inner.allocate(description, models, input_roles, output_roles))

    async def aclose(self) -> None:
        await self._inner.aclose()


LACKING = (
    "plain: the driver's OldModel lacks owner, takes_priority.*; inherit aionn.hal.PreparedModelDefaults"
)


async def test_every_ability_that_is_missing_is_named() -> None:
    for defaults in (PreparedModelDefaults, BurstDefaults, BufferDefaults):
        check_abilities(defaults(), defaults, "plain")
    with pytest.raises(GeneralFailure) as caught:
        check_abilities(OldModel(None), PreparedModelDefaults, "plain")
    assert str(caught.value).endswith(
        "plain: the driver's OldModel lacks owner, takes_priority, expected_duration_ns, execute_bound, native, is_gone,"
        " launch, bind, abandon; inherit aionn.hal.PreparedModelDefaults"
    )
    with pytest.raises(
        GeneralFailure, match=r"NoneType lacks size_bytes; inherit aionn\.hal\.BufferDefaults"
    ):
        check_abilities(None, BufferDefaults, "plain")


async def test_driver_without_abilities_is_served(serving: Any, small: Any) -> None:
    """It is executed by the loop, in bursts too, takes no priority, and counts no memory."""
    client = (await serving(HandWritten(NewModel))).client("plain")
    prepared = await client.prepare_model(small.sum_model())
    assert prepared.expected_duration_ns is None
    work = small.Sum()
    await prepared.execute_synchronously(work.request, priority=aionn.Priority.HIGH)
    assert work.is_right
    burst, other = await prepared.configure_execution_burst(), small.Sum()
    await burst.execute_synchronously(other.request, [1])
    assert other.is_right
    await burst.aclose()
    buffer = await client.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    await buffer.aclose()
    await client.aclose()


async def test_served_driver_without_the_members_is_refused(serving: Any, small: Any) -> None:
    client = (await serving(HandWritten(OldModel))).client("plain")
    with pytest.raises(GeneralFailure, match=LACKING):
        await client.prepare_model(small.sum_model())
    await client.aclose()
    client = (await serving(HandWritten(NewModel, OldBuffer))).client("plain")
    prepared = await client.prepare_model(small.sum_model())
    with pytest.raises(
        GeneralFailure, match=r"OldBuffer lacks size_bytes; inherit aionn\.hal\.BufferDefaults"
    ):
        await client.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
    await client.aclose()


class Uncancellable(LaunchBase):
    def cancel(self) -> None:
        raise RuntimeError("planted")


async def test_cancelled_call_of_a_driver_whose_launch_cannot_be_cancelled_ends_with_the_launch(
    serving: Any, small: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end is the client's permission to use the memory again."""
    caplog.set_level(logging.CRITICAL)
    held, made = Uncancellable(), anyio.Event()

    class Model(NewModel):
        def launch(self, request: Request, **options: Any) -> Any:
            made.set()
            return held

    client = (await serving(HandWritten(Model))).client("plain")
    launch = (await client.prepare_model(small.sum_model())).launch(small.Sum().request)
    with anyio.fail_after(30):
        await made.wait()
        launch.cancel()
        await client.status()  # Answered after the cancellation has been read.
        assert not launch.is_done
        held.finish(ExecutionResult())
        await launch.done
    await client.aclose()


async def test_served_driver_whose_launch_is_none_is_refused(serving: Any, small: Any) -> None:
    class Model(NewModel):
        async def launch(self, request: Request, **options: Any) -> Any:  # type: ignore[override]
            return None

    client = (await serving(HandWritten(Model))).client("plain")
    prepared = await client.prepare_model(small.sum_model())
    with pytest.warns(RuntimeWarning, match="never awaited"):
        with pytest.raises(
            GeneralFailure, match="expected a Launch from the driver's launch, got a coroutine"
        ):
            await prepared.execute_synchronously(small.Sum().request)
        gc.collect()
    await client.aclose()


async def test_driver_that_raises_cancellation_of_its_own_fails_one_call_alone(
    serving: Any, small: Any
) -> None:
    class Cancelling(HandWritten):
        async def prepare_model(self, model: Any, **options: Any) -> Any:
            raise asyncio.CancelledError("planted")

    client = (await serving(Cancelling(NewModel))).client("plain")
    with anyio.fail_after(30):
        for _ in range(2):
            with pytest.raises(GeneralFailure, match="CancelledError: planted"):
                await client.prepare_model(small.sum_model())
    await client.aclose()


class FaultyModel(NewModel):
    """It raises an error that is not one of the contract."""

    async def execute(self, request: Request, callback: Any, **options: Any) -> Any:
        raise ZeroDivisionError("planted")


async def test_launch_that_a_driver_fails_with_an_error_of_its_own_is_over(serving: Any, small: Any) -> None:
    client = (await serving(HandWritten(FaultyModel), executions=1)).client("plain")
    prepared = await client.prepare_model(small.sum_model())
    for _ in range(2):  # The first one does not keep the place of the second.
        over, statuses = anyio.Event(), list[ErrorStatus]()

        def callback(
            status: Any, shapes: Any, timing: Any, over: Any = over, statuses: Any = statuses
        ) -> None:
            statuses.append(status)
            over.set()

        with anyio.fail_after(WAIT_S_MAX):
            with contextlib.suppress(GeneralFailure):
                statuses.append(await prepared.execute(small.Sum().request, callback))
                await over.wait()
        assert ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT not in statuses
        await anyio.wait_all_tasks_blocked()
    await client.aclose()


async def test_driver_without_abilities_runs_in_the_application(small: Any) -> None:
    async with aionn.open(devices=[HandWritten(NewModel)]) as runtime:
        net = await runtime.compile(small.sum_model())
        assert (await net.execute([X, X])).outputs[0].tolist() == [0, 2, 4, 6]
        async with net.burst() as burst:
            assert (await burst.execute([X, X])).outputs[0].tolist() == [0, 2, 4, 6]


async def test_driver_in_the_application_without_the_members_is_refused(small: Any) -> None:
    async with aionn.open(devices=[HandWritten(OldModel)]) as runtime:
        with pytest.raises(GeneralFailure, match=LACKING):
            await runtime.compile(small.sum_model())
    async with aionn.open(devices=[HandWritten(MixedModel)]) as runtime:
        net = await runtime.compile(small.sum_model())
        with pytest.raises(
            GeneralFailure,
            match=r"OldBurst lacks thread_id, in_flight, launch; inherit aionn\.hal\.BurstDefaults",
        ):
            async with net.burst():
                pass


async def test_kept_compilation_is_checked_as_well(small: Any, tmp_path: Any) -> None:
    async with aionn.open(devices=[HandWritten(NewModel)]) as runtime:
        await runtime.compile(small.sum_model(), cache_dir=tmp_path)
    async with aionn.open(devices=[HandWritten(OldModel)]) as runtime:
        with pytest.raises(GeneralFailure, match=LACKING):
            await runtime.compile(small.sum_model(), cache_dir=tmp_path)

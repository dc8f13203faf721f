"""Drivers that are wrong in exactly one way each, to see that the driver suite finds it.

Owns the faults and the case of the suite that names each. All of them wrap the reference driver and behave like it, except for the
fault. For authors who change the suite, or write checks of their own.

Invariants:
1. A fault touches nothing else: with the case that names it taken out, the suite passes or fails elsewhere only by the same fault.
2. A fault delays calls for a bounded time, or in a way that cancellation or the end of its process ends.

Source: the fault table of the project's reliability goals; mutation testing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import anyio
import msgspec
import numpy as np

from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ErrorStatus, GeneralFailure, InvalidArgument
from aionn.hal import (
    CACHE_TOKEN_BYTES,
    Buffer,
    BufferDefaults,
    BufferDesc,
    BufferRole,
    CacheFiles,
    CancelCapability,
    DeviceInfo,
    ExecutionCallback,
    ExecutionResult,
    FencedExecution,
    Memory,
    Model,
    OutputShape,
    PreparedModelDefaults,
    Request,
    Timing,
)
from fences import SyncFence

__all__ = ["FAULTS", "PROCESS_FAULTS", "FaultyDevice", "FaultyPreparedModel"]

HELD_US = 400_000
"""Time for which a driver holds the interpreter's lock: as long as the execution of the suite runs beside it."""


class FaultyPreparedModel:
    """A prepared model of the reference driver; subclasses change a method. It launches by its own ``execute_synchronously``."""

    launch = PreparedModelDefaults.launch

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultyDevice:
    """The reference device; subclasses change a method.

    Args:
        name: The device's name.
    """

    case = ""
    """The case of the driver suite that names the fault."""
    model: type[FaultyPreparedModel] = FaultyPreparedModel

    def __init__(self, name: str = "faulty") -> None:
        self.inner = ReferenceDevice(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def info(self) -> DeviceInfo:
        return self.inner.info

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        return self.model(await self.inner.prepare_model(model, **options))

    async def prepare_model_from_cache(self, cache: CacheFiles, **options: Any) -> Any:
        return self.model(await self.inner.prepare_model_from_cache(cache, **options))

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[Any],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Any:
        models = [getattr(p, "inner", p) for p in prepared_models]
        return await self.inner.allocate(description, models, input_roles, output_roles)


# Descriptions of devices


class UnsortedCapabilities(FaultyDevice):
    """Lists performance in an order of its own."""

    case = "basics/info_is_legal"

    @property
    def info(self) -> DeviceInfo:
        info = self.inner.info
        entries = info.capabilities.operand_performance
        capabilities = msgspec.structs.replace(info.capabilities, operand_performance=entries[::-1])
        return msgspec.structs.replace(info, capabilities=capabilities)


class SupportsOneLess(FaultyDevice):
    """Answers for one operation less than there are."""

    case = "basics/support_has_one_answer_each"

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        answer = await self.inner.supported_operations(model)
        return answer[:-1] if len(answer) > 3 else answer


# Checks that are skipped


class SkipsModelCheck(FaultyDevice):
    """Takes models with any scale for supported ones."""

    case = "model_mutations/operand_scale"

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        try:
            return await self.inner.supported_operations(model)
        except InvalidArgument as e:
            if ", scale:" in str(e):
                return (True,) * len(model.main.operations)
            raise


class SkipsPriorityCheck(FaultyDevice):
    """Takes any number for a priority."""

    case = "model_mutations/execution_priority"

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        options.pop("priority", None)
        return await super().prepare_model(model, **options)


class _ForgivingModel(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        main = self.inner.model.main
        fitting = msgspec.structs.replace(
            request,
            inputs=request.inputs[: len(main.input_indexes)],
            outputs=request.outputs[: len(main.output_indexes)],
        )
        result: ExecutionResult = await self.inner.execute_synchronously(fitting, **options)
        return result


class SkipsRequestCheck(FaultyDevice):
    """Takes requests with more arguments than the model has."""

    case = "request_validation/counts[sync]"
    model = _ForgivingModel


class _HeedlessOfFences(FaultyPreparedModel):
    async def execute_fenced(
        self, request: Request, wait_for: Sequence[SyncFence], **options: Any
    ) -> FencedExecution:
        launched: FencedExecution = await self.inner.execute_fenced(request, (), **options)
        return launched


class IgnoresFences(FaultyDevice):
    """Starts fenced executions immediately."""

    case = "executions/waits_for_fences"
    model = _HeedlessOfFences


class SkipsProbabilityCheck(FaultyDevice):
    """Takes any probability of a buffer role."""

    case = "allocate/invalid_probability[tensor_float32]"

    async def allocate(
        self,
        description: BufferDesc,
        prepared_models: Sequence[Any],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Any:
        roles = [
            [BufferRole(r.model_index, r.io_index, 1.0) for r in of_kind]
            for of_kind in (input_roles, output_roles)
        ]
        return await super().allocate(description, prepared_models, *roles)


class _BufferOfZeros(BufferDefaults):
    def __init__(self, inner: Buffer) -> None:
        self.inner = inner
        self.token = inner.token

    async def copy_to(self, destination: Memory) -> None:
        try:
            await self.inner.copy_to(destination)
        except GeneralFailure:
            destination.array[:] = 0

    async def copy_from(self, source: Memory, dimensions: Sequence[int]) -> None:
        await self.inner.copy_from(source, dimensions)

    async def aclose(self) -> None:
        await self.inner.aclose()


class ReadsUninitialized(FaultyDevice):
    """Gives zeros out of a device memory that nothing was written to."""

    case = "copy/to_uninitialized_memory[tensor_float32]"

    async def allocate(self, *arguments: Any) -> Any:
        return _BufferOfZeros(await super().allocate(*arguments))


# Answers


class _TwiceNotifying(FaultyPreparedModel):
    async def execute(self, request: Request, callback: ExecutionCallback, **options: Any) -> ErrorStatus:
        def twice(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
            callback(status, shapes, timing)
            callback(status, shapes, timing)

        status: ErrorStatus = await self.inner.execute(request, twice, **options)
        return status


class NotifiesTwice(FaultyDevice):
    """Calls every callback twice."""

    case = "executions/callback_comes_once"
    model = _TwiceNotifying


class _NeverNotifying(FaultyPreparedModel):
    async def execute(self, request: Request, callback: ExecutionCallback, **options: Any) -> ErrorStatus:
        status: ErrorStatus = await self.inner.execute(request, lambda *answer: None, **options)
        return status


class NeverNotifies(FaultyDevice):
    """Calls no callback."""

    case = "executions/writes_outputs_alone[async]"
    model = _NeverNotifying


class _Timed(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        result: ExecutionResult = await self.inner.execute_synchronously(request, **options)
        return msgspec.structs.replace(result, timing=Timing(2, 1))


class WrongTimes(FaultyDevice):
    """Reports times that were not requested."""

    case = "executions/times_are_measured[sync]"
    model = _Timed


class _Overflowing(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        result: ExecutionResult = await self.inner.execute_synchronously(request, **options)
        location = request.outputs[-1].location
        pool = request.pools[location.pool_index]
        if isinstance(pool, Memory):
            pool.array[location.offset + location.length :][:1] = 0
        return result


class WritesPastOutput(FaultyDevice):
    """Writes a byte behind the last output."""

    case = "executions/writes_outputs_alone[sync]"
    model = _Overflowing


# Time


class _Unhurried(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        options.pop("deadline_ns", None)
        result: ExecutionResult = await self.inner.execute_synchronously(request, **options)
        return result


class ReturnsAfterDeadline(FaultyDevice):
    """Takes no notice of deadlines, and answers when it is done."""

    case = "quality_of_service/deadline_ends_execution[sync]"
    model = _Unhurried


class _Unstoppable(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        finished = SyncFence("execution")
        results: list[ExecutionResult | BaseException] = []

        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                # A shield of anyio is enough: its host cancels by scope.
                with anyio.CancelScope(shield=True):
                    try:
                        results.append(await self.inner.execute_synchronously(request, **options))
                    except Exception as e:
                        results.append(e)
                    finished.signal()

            tasks.start_soon(run)
            await finished
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result


class ClaimsToStop(FaultyDevice):
    """Declares that it can be stopped at any time, and cannot be stopped."""

    case = "claims/cancelled_execution_frees_the_slot"
    model = _Unstoppable

    @property
    def info(self) -> DeviceInfo:
        return msgspec.structs.replace(self.inner.info, cancel=CancelCapability.ANYTIME)


class _LockHolding(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        # PyDLL, unlike CDLL, keeps the interpreter's lock during the call.
        ctypes.PyDLL(None).usleep(HELD_US)
        options["loop_timeout_ns"] = 1
        result: ExecutionResult = await self.inner.execute_synchronously(request, **options)
        return result


class HoldsGil(FaultyDevice):
    """Computes with the interpreter's lock held: nothing else in its process runs at that time."""

    case = "claims/answers_while_executing"
    model = _LockHolding


# Caching


def _blank(cache: CacheFiles) -> CacheFiles:
    return cache._replace(
        token=cache.token if len(cache.token) != CACHE_TOKEN_BYTES else bytes(CACHE_TOKEN_BYTES)
    )


class IgnoresToken(FaultyDevice):
    """Restores whatever the files hold, for any token."""

    case = "caching/wrong_token[tensor_float32]"

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        if options.get("cache") is not None:
            options["cache"] = _blank(options["cache"])
        return await super().prepare_model(model, **options)

    async def prepare_model_from_cache(self, cache: CacheFiles, **options: Any) -> Any:
        return await super().prepare_model_from_cache(_blank(cache), **options)


class TrustsCache(FaultyDevice):
    """Remembers by the token alone what it has saved, and does not look at the files when it restores."""

    case = "caching/corrupted_model_cache[tensor_float32]"

    def __init__(self, name: str = "faulty") -> None:
        super().__init__(name)
        self._models: dict[bytes, Model] = {}

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        cache = options.get("cache")
        if cache is not None:
            self._models[cache.token] = model
        return await super().prepare_model(model, **options)

    async def prepare_model_from_cache(self, cache: CacheFiles, **options: Any) -> Any:
        known = self._models.get(cache.token)
        if known is not None:
            return await super().prepare_model(known, **options)
        return await super().prepare_model_from_cache(cache, **options)


class FailsForCache(FaultyDevice):
    """Refuses to prepare when a token is malformed."""

    case = "caching/token_length[tensor_float32]"

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        cache = options.get("cache")
        if cache is not None and len(cache.token) != CACHE_TOKEN_BYTES:
            raise InvalidArgument("prepare_model: the token is malformed")
        return await super().prepare_model(model, **options)


# Life


class KeepsModels(FaultyDevice):
    """Never frees a prepared model."""

    case = "lifetimes/closing_frees_memory"

    def __init__(self, name: str = "faulty") -> None:
        super().__init__(name)
        self._kept: list[Any] = []

    async def prepare_model(self, model: Model, **options: Any) -> Any:
        prepared = await super().prepare_model(model, **options)
        # A copy, as a device with memory of its own makes one.
        self._kept.append([np.array(pool.array) for pool in model.pools])
        return prepared

    async def aclose(self) -> None:
        self._kept.clear()
        await self.inner.aclose()


class _Deadly(FaultyPreparedModel):
    async def execute_synchronously(self, request: Request, **options: Any) -> ExecutionResult:
        if any(a.location.pool_index >= len(request.pools) for a in request.inputs):
            os._exit(3)
        result: ExecutionResult = await self.inner.execute_synchronously(request, **options)
        return result


class Dies(FaultyDevice):
    """Its process ends when a request names a pool that there is not. Only for a process of its own."""

    case = "request_validation/pool_index[sync]"
    model = _Deadly


class Hangs(FaultyDevice):
    """Never answers a model with an operation that does not exist."""

    case = "model_mutations/operation_type"

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        with contextlib.suppress(InvalidArgument):
            return await self.inner.supported_operations(model)
        if any(o.type > 10000 for o in model.main.operations):
            await anyio.sleep_forever()
        raise InvalidArgument("supported_operations: the model breaks a rule")


class HangsItsProcess(Hangs):
    """As ``Hangs``, and nothing else in its process runs any more either. Only for a process of its own."""

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        if any(o.type > 10000 for o in model.main.operations):
            _hang()
        return await self.inner.supported_operations(model)


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()


FAULTS: tuple[type[FaultyDevice], ...] = (
    UnsortedCapabilities,
    SupportsOneLess,
    SkipsModelCheck,
    SkipsPriorityCheck,
    SkipsRequestCheck,
    IgnoresFences,
    SkipsProbabilityCheck,
    ReadsUninitialized,
    NotifiesTwice,
    NeverNotifies,
    WrongTimes,
    WritesPastOutput,
    ReturnsAfterDeadline,
    ClaimsToStop,
    HoldsGil,
    IgnoresToken,
    TrustsCache,
    FailsForCache,
    KeepsModels,
    Hangs,
)
"""Faults that may be in this process."""

PROCESS_FAULTS: tuple[type[FaultyDevice], ...] = (Dies, HoldsGil, HangsItsProcess)
"""Faults that must be, or are worse, in a process of their own."""

"""Fallback to the CPU reference device: only where it was allowed, never for the caller's own mistake, always reported.

Owns when a failure may be made good by the reference device, the models that are prepared there for it, and how values in a
device's memory get there.

Invariants:
1. A caller's mistake, an output that is too small and a missed deadline never fall back.
2. A model with vendor extensions or the OEM operation never falls back: the reference device does not know what they mean.
3. The result reports each fallback, with the reason.
4. Values that a step reads from a device's memory, or writes there, go through ordinary memory, unless their size is unknown.

Source: ``ExecutionPlan`` and ``CompilationBuilder`` of the NN HAL's runtime.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import anyio

from aionn.errors import (
    Error,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    OutputInsufficientSize,
    general_failure_of,
    shortage_of,
)
from aionn.hal import (
    BufferToken,
    DataLocation,
    Memory,
    Model,
    OperationType,
    PreparedModel,
    Priority,
    is_extension_operand_type,
    operand_size_bytes,
)
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.memory.arguments import Binding, RequestArea

__all__ = ["Fallback", "can_fall_back", "driver_error", "in_ordinary_memory", "may_fall_back"]


Recovering = Callable[[str, PreparedModel, Callable[[], Coroutine[Any, Any, PreparedModel]]], PreparedModel]
"""Makes a prepared model recover from the death of its driver: device's name, the model, and how it is prepared again."""


def driver_error(error: BaseException, where: str) -> Error:
    """The exception of a driver in this process, as one of the errors that drivers may raise."""
    if isinstance(error, Error):
        return error
    return shortage_of(error, where) or general_failure_of(error, where)


def may_fall_back(error: Error) -> bool:
    """Whether a failure is one that another device could make good."""
    return not isinstance(error, InvalidArgument | OutputInsufficientSize | MissedDeadline)


def can_fall_back(model: Model) -> bool:
    """Whether the reference device can run the whole model."""
    return not any(
        operation.type == OperationType.OEM_OPERATION or is_extension_operand_type(operation.type)
        for subgraph in (model.main, *model.referenced)
        for operation in subgraph.operations
    )


@contextlib.asynccontextmanager
async def in_ordinary_memory(
    area: RequestArea, inputs: Sequence[int], outputs: Sequence[int]
) -> AsyncIterator[None]:
    """Moves values of a step from a device's memory to ordinary memory for the duration of the block, where any device can use
    them.

    Args:
        area: Where the values are.
        inputs: Keys of what the step reads: copied from the device before.
        outputs: Keys of what it writes: copied to the device after it has not failed.

    Raises:
        GeneralFailure: The size of such a value is not known, or the device has no value to give.
        DeadObject: The device is gone, and with it what its memory held.
    """
    keys = [k for k in (*inputs, *outputs) if k in area.bound and isinstance(area.bound[k].pool, BufferToken)]
    if not keys:
        yield
        return
    before = area.bound
    with contextlib.ExitStack() as stack:
        staged: dict[int, Binding] = {}
        memories: dict[int, Memory] = {}
        for key in keys:
            binding, spec = before[key], area.spec(key)
            size_bytes = operand_size_bytes(spec.type, binding.shape)
            if not size_bytes or binding.buffer is None:
                raise GeneralFailure(f"{spec.name}: what is in a device's memory cannot be moved: {spec}")
            memory = memories[key] = Memory.create(size_bytes, name="aionn-staging")
            stack.callback(memory.close)
            if key in inputs:
                await binding.buffer.copy_to(memory)
            view = memory.array[:size_bytes].view(spec.dtype).reshape(binding.shape)
            staged[key] = Binding(memory, DataLocation(0, 0, size_bytes), binding.shape, view)
        area.move({**before, **staged})
        try:
            yield
        finally:
            area.move(before)
        for key in outputs:
            buffer = before[key].buffer if key in staged else None
            if buffer is not None:
                await buffer.copy_from(memories[key], before[key].shape)


class Fallback:
    """The reference device, for the steps of one compilation.

    Attributes:
        device: The reference device.
    """

    def __init__(
        self,
        device: RuntimeDevice,
        models: Sequence[Model],
        priority: Priority,
        recovering: Recovering | None = None,
    ) -> None:
        self.device = device
        self._recovering = recovering
        self._models = tuple(models)
        self._priority = priority
        self._prepared: dict[int, PreparedModel] = {}
        self._preparing = anyio.Lock()

    async def prepared(self, step: int) -> PreparedModel:
        """A step's model on the reference device, prepared when first needed. Raises as ``Device.prepare_model``."""
        async with self._preparing:
            if step not in self._prepared:
                prepare = functools.partial(
                    self.device.hal.prepare_model, self._models[step], priority=self._priority
                )
                prepared = await prepare()
                if self._recovering is not None:
                    prepared = self._recovering(self.device.name, prepared, prepare)
                self._prepared[step] = prepared
            return self._prepared[step]

    async def aclose(self) -> None:
        """Frees what was prepared. Idempotent."""
        while self._prepared:
            await self._prepared.popitem()[1].aclose()

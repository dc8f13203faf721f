"""Fallback to the CPU reference device: only where it was allowed, never for the caller's own mistake, always told.

Owns when a failure may be made good by the reference device, and the models that are prepared there for it.

Invariants:
1. A caller's mistake, an output that is too small and a missed deadline never fall back.
2. A model with vendor extensions or the OEM operation never falls back: the reference device does not know what they mean.
3. What fell back is told in the result, with the reason.

Source: ``ExecutionPlan`` and ``CompilationBuilder`` of the NN HAL's runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from aionn.errors import Error, InvalidArgument, MissedDeadline, OutputInsufficientSize
from aionn.hal import Model, OperationType, PreparedModel, Priority, is_extension_operand_type

if TYPE_CHECKING:
    from aionn.runtime.runtime import RuntimeDevice

__all__ = ["Fallback", "can_fall_back", "may_fall_back"]


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


class Fallback:
    """The reference device, for the steps of one compilation.

    Attributes:
        device: The reference device.
    """

    def __init__(self, device: RuntimeDevice, models: Sequence[Model], priority: Priority) -> None:
        self.device = device
        self._models = tuple(models)
        self._priority = priority
        self._prepared: dict[int, PreparedModel] = {}
        self._preparing = anyio.Lock()

    async def prepared(self, step: int) -> PreparedModel:
        """A step's model on the reference device, prepared when first needed. Raises as ``Device.prepare_model``."""
        async with self._preparing:
            if step not in self._prepared:
                self._prepared[step] = await self.device.hal.prepare_model(
                    self._models[step], priority=self._priority
                )
            return self._prepared[step]

    async def aclose(self) -> None:
        """Frees what was prepared. Idempotent."""
        while self._prepared:
            await self._prepared.popitem()[1].aclose()

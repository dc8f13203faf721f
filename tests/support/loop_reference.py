"""The reference driver on the event loop: what a driver made of ``AsyncDevice`` is when it does all that the contract offers.

Owns nothing but the choice of base class: the interpreter computes on a worker thread while the loop waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread
import msgspec

import fences
from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.asynchronous import AsyncDevice, AsyncPreparedModel
from aionn.drivers.kit.turns import Turn
from aionn.drivers.reference import INFO, MEMORY_BYTES_MAX
from aionn.hal import ExecutionPreference, Model, OutputShape, Priority
from aionn.interpreter import Interpreter, RunControl
from aionn.ops import CONTRACTS

__all__ = ["LoopReferenceDevice"]


class LoopReferenceDevice(AsyncDevice):
    """Runs any valid model without extensions; device memories, caching and images included."""

    def __init__(self, name: str = "loop-reference") -> None:
        super().__init__(msgspec.structs.replace(INFO, name=name), memory_bytes_max=MEMORY_BYTES_MAX)

    def supports(self, model: Model) -> Sequence[bool]:
        return [operation.type in CONTRACTS for operation in model.main.operations]

    async def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> LoopReferencePreparedModel:
        # Decoding constants takes its time: not on the event loop.
        return await anyio.to_thread.run_sync(LoopReferencePreparedModel, self, model, priority)


class LoopReferencePreparedModel(AsyncPreparedModel):
    """A model with its constants decoded."""

    def __init__(self, device: LoopReferenceDevice, model: Model, priority: Priority) -> None:
        super().__init__(device, model, priority)
        self._interpreter = Interpreter(model)

    async def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], turn: Turn
    ) -> Sequence[OutputShape]:
        # The clock of fences, unlike the loop's, can be read by any thread; both have the same time.
        control = RunControl(
            deadline_ns=turn.deadline_ns,
            loop_timeout_ns=turn.loop_timeout_ns,
            is_cancelled=lambda: turn.is_given_up,
            now=fences.now_ns,
        )
        results = await anyio.to_thread.run_sync(self._interpreter.run, inputs, control)
        return [area.store(array) for area, array in zip(outputs, results, strict=True)]

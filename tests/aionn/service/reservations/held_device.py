"""A device whose executions end when a test lets them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import msgspec

from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Model, OutputShape

LIMIT_S = 30.0


class HeldDevice(ReferenceDevice):
    """The reference device with one slot, on which an execution is known by the first value of its first input.

    Args:
        name: Its name.

    Attributes:
        began: The values of the executions that have begun, in their order.
    """

    def __init__(self, name: str = "reference") -> None:
        super().__init__()
        self.info = msgspec.structs.replace(self.info, name=name, slots=1)
        self.began: list[float] = []
        self._condition = threading.Condition()
        self._kept: set[float] = set()

    def hold(self, *values: float) -> None:
        """Keeps executions of these values on the device until ``let_go``."""
        with self._condition:
            self._kept.update(values)

    def let_go(self, *values: float) -> None:
        with self._condition:
            self._kept.difference_update(values)
            self._condition.notify_all()

    async def has_begun(self, value: float) -> None:
        """Waits until an execution has begun."""

        def wait() -> bool:
            with self._condition:
                return self._condition.wait_for(lambda: value in self.began, LIMIT_S)

        assert await anyio.to_thread.run_sync(wait), f"{value} has not begun, but {self.began}"

    async def waits(self, count: int) -> None:
        """Waits until so many executions wait in the queue of the device."""
        with anyio.fail_after(LIMIT_S):
            while self.gate.waiting_count < count:
                await anyio.sleep(0.001)

    def prepare(self, model: Model, **options: Any) -> Any:
        prepared = super().prepare(model, **options)
        run = prepared.run

        def held(inputs: Sequence[Any], outputs: Sequence[Any], control: Any) -> Sequence[OutputShape]:
            value = float(inputs[0].flat[0])
            with self._condition:
                self.began.append(value)
                self._condition.notify_all()
                assert self._condition.wait_for(lambda: value not in self._kept, LIMIT_S)
            return run(inputs, outputs, control)

        prepared.run = held
        return prepared

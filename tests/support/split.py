"""The reference device split over several: each supports a share of the operations, drawn or given, and rejects all else.

Owns the draw, which depends on the seed and on the operation, not on its place: a step of a model gets the same answer as the whole
model. For tests of partitioning.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Sequence

import msgspec

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
from aionn.errors import Error, InvalidArgument
from aionn.hal import (
    Device,
    ExecutionPreference,
    FeatureLevel,
    Model,
    Operand,
    Operation,
    OperationType,
    OutputShape,
    Priority,
    uniform_capabilities,
)
from aionn.interpreter import RunControl
from aionn.validation import validate_model

__all__ = [
    "SPLIT",
    "PickyDevice",
    "SplitDevice",
    "dies_at_prepare",
    "dies_at_run",
    "picky_about_control_flow",
    "split_devices",
]

SPLIT = (
    ("split-quick", FeatureLevel.LEVEL_8, 0.3, 3.0),
    ("split-old", FeatureLevel.LEVEL_3, 0.5, 0.5),
    ("split-frugal", FeatureLevel.LEVEL_4, 2.0, 0.2),
)
"""Name, level, time and power of each; the last two cannot express everything, and must never be shown it."""


_CONTROL_FLOW = (OperationType.IF, OperationType.WHILE)


class PickyDevice(ReferenceDevice):
    """The reference device, for the given kinds of operations.

    Args:
        name: Its name.
        kinds: What it supports; None for all but IF and WHILE.
        time: Its time and power, relative to the reference device.
        level: What it can express.
        fail: Called before each execution; what it raises is the execution's failure.

    Attributes:
        executions: How many it has begun.
    """

    def __init__(
        self,
        name: str,
        kinds: Collection[OperationType] | None = None,
        *,
        time: float = 0.5,
        level: FeatureLevel = FeatureLevel.LEVEL_7,
        fail: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name)
        capabilities = uniform_capabilities(time, time)
        self.info = msgspec.structs.replace(self.info, feature_level=level, capabilities=capabilities)
        self.kinds = kinds
        self.fail = fail
        self.executions = 0

    def supports(self, model: Model) -> Sequence[bool]:
        """True for its kinds."""
        known = super().supports(model)
        return [
            is_known and (o.type in self.kinds if self.kinds is not None else o.type not in _CONTROL_FLOW)
            for is_known, o in zip(known, model.main.operations, strict=True)
        ]

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> ReferencePreparedModel:
        return _PickyPreparedModel(self, model, priority)


class _PickyPreparedModel(ReferencePreparedModel):
    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        device = self.device
        assert isinstance(device, PickyDevice)
        device.executions += 1
        device.fail()
        return super().run(inputs, outputs, control)


def picky_about_control_flow(name: str) -> Device:
    """Supports all but IF and WHILE. For ``drivers={...: "tests.support.split:picky_about_control_flow"}``."""
    return PickyDevice(name)


class SplitDevice(ReferenceDevice):
    """A share of the reference device.

    Args:
        index: Which share.
        seed: Of the draw.
        fail_at: ``prepare`` or ``run``: where it calls ``failure``; None means nowhere.
        failure: Makes what it raises, unless it ends the process.
    """

    def __init__(
        self,
        index: int,
        seed: int,
        *,
        fail_at: str | None = None,
        failure: Callable[[], Error] = lambda: Error("planted"),
    ) -> None:
        name, level, time, power = SPLIT[index]
        super().__init__(name)
        capabilities = uniform_capabilities(time, power)
        self.info = msgspec.structs.replace(self.info, feature_level=level, capabilities=capabilities)
        self._index = index
        self._seed = seed
        self._fail_at = fail_at
        self._failure = failure

    def supports(self, model: Model) -> Sequence[bool]:
        """The same answer for the same operation, at any place.

        Raises:
            InvalidArgument: The model needs a higher level than the device has.
        """
        level = validate_model(model)
        if level > self.info.feature_level:
            raise InvalidArgument(
                f"{self.info.name}: knows level {self.info.feature_level}, was shown {level}"
            )
        known = super().supports(model)
        return [
            is_known and self._has(model, operation)
            for is_known, operation in zip(known, model.main.operations, strict=True)
        ]

    def _has(self, model: Model, operation: Operation) -> bool:
        operands = model.main.operands
        said = [_described(operands[index]) for index in (*operation.inputs, *operation.outputs)]
        draw = zlib.crc32(repr((self._seed, int(operation.type), said)).encode())
        # From 1 to 7: a set of devices that is not empty.
        return bool((draw % 7 + 1) >> self._index & 1)

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> ReferencePreparedModel:
        if self._fail_at == "prepare":
            raise self.failure
        if self._fail_at == "run":
            return _FailingPreparedModel(self, model, priority)
        return ReferencePreparedModel(self, model, priority)

    @property
    def failure(self) -> Error:
        """A fresh one: a raised exception keeps the frames that it passed."""
        return self._failure()


class _FailingPreparedModel(ReferencePreparedModel):
    def run(
        self, inputs: Sequence[object], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        device = self.device
        assert isinstance(device, SplitDevice)
        raise device.failure


def _described(operand: Operand) -> tuple[object, ...]:
    # Of constants also the place, which distinguishes one convolution's weights from another's.
    return (int(operand.type), operand.dimensions, operand.is_constant and repr(operand.location))


def split_devices(seed: int) -> list[Device]:
    """The whole split; each operation is supported by at least one of them, unless its level keeps it from that one."""
    return [SplitDevice(index, seed) for index in range(len(SPLIT))]


def dies_at_prepare(name: str) -> Device:
    """A driver whose process ends when it is given a model. For ``drivers={...: "tests.support.split:dies_at_prepare"}``."""
    return _mortal(name, "prepare")


def dies_at_run(name: str) -> Device:
    """A driver whose process ends with its first execution."""
    return _mortal(name, "run")


def _mortal(name: str, where: str) -> Device:
    device = SplitDevice(0, seed=1, fail_at=where, failure=lambda: os._exit(1))
    device.info = msgspec.structs.replace(device.info, name=name)
    return device

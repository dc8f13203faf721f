"""The base class of devices whose engine reads ONNX models.

Owns the lowering, and which kinds of nodes the engine was asked for: those that it accepted once are not asked for again.
"""

from __future__ import annotations

import abc
from typing import ClassVar, cast

from aionn.drivers.kit.engines.device import EngineDevice, LoweredModel
from aionn.drivers.kit.onnx.lowered import FULL, Dialect, Lowered
from aionn.hal import DeviceInfo, Model

__all__ = ["OnnxDevice"]


class OnnxDevice(EngineDevice):
    """A device around an engine that reads ONNX models. Implement ``check_new``, ``make`` and ``load``.

    Args:
        info: What never changes for a build of the driver.
        threads_variable: Environment variable with the number of threads of an execution.

    Raises:
        DeviceUnavailable: The number of threads makes no sense.
    """

    dialect: ClassVar[Dialect] = FULL
    """Where the engine's reading of ONNX differs."""

    def __init__(self, info: DeviceInfo, threads_variable: str) -> None:
        super().__init__(info, threads_variable)
        # Bounded by the operators and the types that are written.
        self._accepted: set[tuple[object, ...]] = set()

    def lower(self, model: Model) -> Lowered:
        """See the base class."""
        # Not before a model comes: clients import this module for its DeviceInfo.
        from aionn.drivers.kit.onnx import lowering

        return lowering.lower(model, self.dialect)

    def check(self, lowered: LoweredModel) -> None:
        """See the base class. Kinds of nodes that were accepted before are not asked for again."""
        onnx = cast(Lowered, lowered)
        if not self.is_accepted(onnx):
            self.check_new(onnx)
            self.accept(onnx)

    def is_accepted(self, lowered: Lowered) -> bool:
        """Whether every kind of its nodes was accepted before."""
        return not lowered.file or lowered.kernels <= self._accepted

    def accept(self, lowered: Lowered) -> None:
        """Notes that the engine accepts the kinds of its nodes."""
        self._accepted |= lowered.kernels

    @abc.abstractmethod
    def check_new(self, lowered: Lowered) -> None:
        """Asks the engine whether it can run a model that has new kinds of nodes.

        Raises:
            Unsupported: It cannot.
        """

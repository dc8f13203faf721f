"""Calls of an engine's C function in place of Python (``PreparedModel.native``), for the drivers around engines.

Owns which executions can be made in this way, and the ``NativeCall`` for them. A driver's slots make the calls.

Invariants:
1. A call has an argument list for each slot of the device; no two of them share memory of the engine.
2. No call is given for arguments that have to be copied, for a model with values that no input decides, and with real time, which
   gives each execution a class.

Source: the contract of ``PreparedModel.native``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.engines.device import EnginePreparedModel
from aionn.errors import Error, general_failure_of
from aionn.hal import NO_TIMING, ExecutionResult, NativeCall, OutputShape
from aionn.realtime import current

__all__ = ["KeptCall", "NativeSlot", "native_call"]


class KeptCall(Protocol):
    """One execution in one slot, as a call of a C function; all that it uses lives as long as this does.

    Attributes:
        words: The arguments of the function, at most 6.
    """

    @property
    def words(self) -> tuple[int, ...]: ...


class NativeSlot(Protocol):
    """A slot whose executions can be calls of a C function.

    Attributes:
        run_address: The address of the function, which returns 0 for success; of equal slots the same one.
        shapes: The outputs' shapes of an execution that copies none of them.
    """

    @property
    def run_address(self) -> int: ...

    @property
    def shapes(self) -> Sequence[OutputShape]: ...

    def kept_call(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> KeptCall | None:
        """An execution as a call, for any number of times; None where an argument has to be copied, or the engine makes none."""


def native_call(
    prepared: EnginePreparedModel, slots: Sequence[NativeSlot], arguments: Any, label: str
) -> NativeCall | None:
    """The call for arguments that ``execute_bound`` has executed.

    Args:
        prepared: The prepared model.
        slots: One for each of the device's, in their order; empty where there are no calls.
        arguments: The result of ``bind``.
        label: The engine's name.

    Returns:
        None where the execution has to be made by Python.

    Raises:
        InvalidArgument: The prepared model is closed.
        DeviceUnavailable: The device is.
    """
    if not slots or not prepared.is_whole or not arguments.is_plain or current() is not None:
        return None
    inputs, outputs = arguments.inputs(), arguments.outputs
    calls: list[KeptCall] = []
    for slot in slots:
        call = slot.kept_call(inputs, outputs)
        if call is None:
            return None
        calls.append(call)
    device = prepared.device

    def failed(status: int) -> Error:
        return general_failure_of(RuntimeError(f"{label} gives status {status}"), device.info.name)

    return NativeCall(
        slots[0].run_address,
        tuple(call.words for call in calls),
        prepared.permit(),
        ExecutionResult(True, tuple(slots[0].shapes), NO_TIMING),
        device.gate.release_native,
        failed,
        f"{device.info.name}, native",
        (arguments, calls),
    )

"""An asyncio runtime for neural networks with the execution model of the Android NN HAL.

``async with aionn.open() as runtime`` finds devices; ``runtime.compile`` makes a model ready; ``execute``,
``execute_fenced`` and ``burst`` run it, with priorities and deadlines. Names are imported when first used, so that ``import
aionn`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if "t" in sys.abiflags:
    raise ImportError(
        "aionn: expected a Python with a global interpreter lock, got a free-threaded build: queues and fences rely on the lock"
    )

if TYPE_CHECKING:
    from aionn import blocking as blocking
    from aionn import hal as hal
    from aionn import media as media
    from aionn import realtime as realtime
    from aionn import watch as watch
    from aionn.errors import (
        DeadObject,
        DeviceUnavailable,
        Error,
        ErrorStatus,
        ExecutionCancelled,
        GeneralFailure,
        InvalidArgument,
        InvalidModel,
        MissedDeadline,
        NotAdmitted,
        OutputInsufficientSize,
        ResourceExhausted,
    )
    from aionn.hal import ExecutionPreference, Model, Priority
    from aionn.observability.tracing import section
    from aionn.runtime.clock import after, now_ns
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.devices import RuntimeDevice
    from aionn.runtime.executions.burst import Burst
    from aionn.runtime.executions.execution import Execution, Result
    from aionn.runtime.executions.lent import LentSlot
    from aionn.runtime.executions.results import StreamResult
    from aionn.runtime.executions.stream import Stream
    from aionn.runtime.fleet.placed import PlacedStream
    from aionn.runtime.fleet.streams import FleetStreams
    from aionn.runtime.guarantees.guarantee import StreamReservation
    from aionn.runtime.guarantees.stream import GuaranteedStream
    from aionn.runtime.memory.arguments import TensorSpec
    from aionn.runtime.memory.images import ImageMemory
    from aionn.runtime.memory.own import DeviceMemory, SharedMemory
    from aionn.runtime.memory.pictures import image_writer
    from aionn.runtime.memory.real_values import value_writer
    from aionn.runtime.metrics.spans import trace_context
    from aionn.runtime.placement.plan import Placement
    from aionn.runtime.realtime import RealtimeReport
    from aionn.runtime.runtime import Runtime
    from aionn.runtime.runtime import open_runtime as open

__version__ = "0.1.0"

_MODULES = ("blocking", "hal", "media", "realtime", "watch")
"""Modules that messages and pages name as ``aionn.media``: imported when first used, as names are."""

_HOME_BY_NAME = {
    "Burst": "aionn.runtime.executions.burst",
    "Compilation": "aionn.runtime.compilation",
    "DeadObject": "aionn.errors",
    "DeviceMemory": "aionn.runtime.memory.own",
    "DeviceUnavailable": "aionn.errors",
    "Error": "aionn.errors",
    "ErrorStatus": "aionn.errors",
    "Execution": "aionn.runtime.executions.execution",
    "ExecutionCancelled": "aionn.errors",
    "ExecutionPreference": "aionn.hal",
    "FleetStreams": "aionn.runtime.fleet.streams",
    "GeneralFailure": "aionn.errors",
    "GuaranteedStream": "aionn.runtime.guarantees.stream",
    "ImageMemory": "aionn.runtime.memory.images",
    "InvalidArgument": "aionn.errors",
    "InvalidModel": "aionn.errors",
    "LentSlot": "aionn.runtime.executions.lent",
    "MissedDeadline": "aionn.errors",
    "Model": "aionn.hal",
    "NotAdmitted": "aionn.errors",
    "OutputInsufficientSize": "aionn.errors",
    "PlacedStream": "aionn.runtime.fleet.placed",
    "Placement": "aionn.runtime.placement.plan",
    "Priority": "aionn.hal",
    "RealtimeReport": "aionn.runtime.realtime",
    "ResourceExhausted": "aionn.errors",
    "Result": "aionn.runtime.executions.execution",
    "Runtime": "aionn.runtime.runtime",
    "RuntimeDevice": "aionn.runtime.devices",
    "SharedMemory": "aionn.runtime.memory.own",
    "Stream": "aionn.runtime.executions.stream",
    "StreamReservation": "aionn.runtime.guarantees.guarantee",
    "StreamResult": "aionn.runtime.executions.results",
    "TensorSpec": "aionn.runtime.memory.arguments",
    "after": "aionn.runtime.clock",
    "image_writer": "aionn.runtime.memory.pictures",
    "now_ns": "aionn.runtime.clock",
    "section": "aionn.observability.tracing",
    "trace_context": "aionn.runtime.metrics.spans",
    "value_writer": "aionn.runtime.memory.real_values",
}

_MODULES_OF_NAMES = ("aionn.media", "aionn.models.tflite", "aionn.models.onnx")
"""Packages whose names are looked for here: the error about a name names the package that has it."""

__all__ = [
    "Burst",
    "Compilation",
    "DeadObject",
    "DeviceMemory",
    "DeviceUnavailable",
    "Error",
    "ErrorStatus",
    "Execution",
    "ExecutionCancelled",
    "ExecutionPreference",
    "FleetStreams",
    "GeneralFailure",
    "GuaranteedStream",
    "ImageMemory",
    "InvalidArgument",
    "InvalidModel",
    "LentSlot",
    "MissedDeadline",
    "Model",
    "NotAdmitted",
    "OutputInsufficientSize",
    "PlacedStream",
    "Placement",
    "Priority",
    "RealtimeReport",
    "ResourceExhausted",
    "Result",
    "Runtime",
    "RuntimeDevice",
    "SharedMemory",
    "Stream",
    "StreamReservation",
    "StreamResult",
    "TensorSpec",
    "after",
    "image_writer",
    "now_ns",
    "open",
    "section",
    "trace_context",
    "value_writer",
]


def __getattr__(name: str) -> Any:
    if name == "open":
        value = importlib.import_module("aionn.runtime.runtime").open_runtime
        value.__qualname__ = "open"  # Errors of Python about arguments have it.
    elif name in _MODULES:
        value = importlib.import_module(f"aionn.{name}")
    elif name in _HOME_BY_NAME:
        value = getattr(importlib.import_module(_HOME_BY_NAME[name]), name)
    else:
        raise AttributeError(f"module 'aionn' has no attribute {name!r}{_advice_on(name)}")
    globals()[name] = value
    return value


def _advice_on(name: str) -> str:
    """The end of the message about a name that is not here: the package that has it, or a similar name that is here."""
    if name.startswith("_"):  # Python and its tools ask for these; no package is imported for them.
        return ""
    for home in _MODULES_OF_NAMES:
        if name in importlib.import_module(home).__all__:
            return f"; {name} is in {home}"
    import difflib

    close = difflib.get_close_matches(name, [*__all__, *_MODULES], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})

"""An asyncio runtime for neural networks with the execution model of the Android NN HAL.

``async with aionn.open() as runtime`` finds devices; ``runtime.compile`` makes a model ready; ``execute``,
``execute_fenced`` and ``burst`` run it, with priorities and deadlines. Names are imported when first used, so that ``import
aionn`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        OutputInsufficientSize,
        ResourceExhausted,
    )
    from aionn.hal import ExecutionPreference, Model, Priority
    from aionn.hal.tracing import section
    from aionn.runtime.arguments import TensorSpec, image_writer, value_writer
    from aionn.runtime.burst import Burst
    from aionn.runtime.clock import after, now_ns
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.execution import Execution, Result
    from aionn.runtime.images import ImageMemory
    from aionn.runtime.memory import DeviceMemory, SharedMemory
    from aionn.runtime.plan import Placement
    from aionn.runtime.runtime import Runtime, RuntimeDevice
    from aionn.runtime.runtime import open_runtime as open
    from aionn.runtime.stream import Stream, StreamResult

__version__ = "0.1.0"

_HOME_BY_NAME = {
    "Burst": "aionn.runtime.burst",
    "Compilation": "aionn.runtime.compilation",
    "DeadObject": "aionn.errors",
    "DeviceMemory": "aionn.runtime.memory",
    "DeviceUnavailable": "aionn.errors",
    "Error": "aionn.errors",
    "ErrorStatus": "aionn.errors",
    "Execution": "aionn.runtime.execution",
    "ExecutionCancelled": "aionn.errors",
    "ExecutionPreference": "aionn.hal",
    "GeneralFailure": "aionn.errors",
    "ImageMemory": "aionn.runtime.images",
    "InvalidArgument": "aionn.errors",
    "InvalidModel": "aionn.errors",
    "MissedDeadline": "aionn.errors",
    "Model": "aionn.hal",
    "OutputInsufficientSize": "aionn.errors",
    "Placement": "aionn.runtime.plan",
    "Priority": "aionn.hal",
    "ResourceExhausted": "aionn.errors",
    "Result": "aionn.runtime.execution",
    "Runtime": "aionn.runtime.runtime",
    "RuntimeDevice": "aionn.runtime.runtime",
    "SharedMemory": "aionn.runtime.memory",
    "Stream": "aionn.runtime.stream",
    "StreamResult": "aionn.runtime.stream",
    "TensorSpec": "aionn.runtime.arguments",
    "after": "aionn.runtime.clock",
    "image_writer": "aionn.runtime.arguments",
    "now_ns": "aionn.runtime.clock",
    "section": "aionn.hal.tracing",
    "value_writer": "aionn.runtime.arguments",
}

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
    "GeneralFailure",
    "ImageMemory",
    "InvalidArgument",
    "InvalidModel",
    "MissedDeadline",
    "Model",
    "OutputInsufficientSize",
    "Placement",
    "Priority",
    "ResourceExhausted",
    "Result",
    "Runtime",
    "RuntimeDevice",
    "SharedMemory",
    "Stream",
    "StreamResult",
    "TensorSpec",
    "after",
    "image_writer",
    "now_ns",
    "open",
    "section",
    "value_writer",
]


def __getattr__(name: str) -> Any:
    if name == "open":
        value = importlib.import_module("aionn.runtime.runtime").open_runtime
    elif name in _HOME_BY_NAME:
        value = getattr(importlib.import_module(_HOME_BY_NAME[name]), name)
    else:
        raise AttributeError(f"module 'aionn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

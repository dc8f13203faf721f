"""``ort-cpu`` in a process with little memory beyond what it has when it prepares its first model, as on a small machine."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from aionn.drivers.kit.onnx.lowered import Lowered
from aionn.drivers.onnxruntime.driver import OrtDevice
from aionn.hal import FusedActivation, Model, OperandType, OperationType
from aionn.models.builder import GraphBuilder

ROOM_BYTES = 96 << 20
"""More than a small model and the messages about it need."""

EXTENT = 8192
"""A product of a row and a column of so many floats has 256 MiB."""

LOOK_S = 0.001


def _statm_bytes(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


class RefusedDevice(OrtDevice):
    """The system refuses the memory."""

    _is_limited = False

    def compile(self, lowered: Lowered, **options: Any) -> Any:
        if not self._is_limited:
            import onnxruntime  # noqa: F401 - it shall have its place.

            self._is_limited = True
            most = _statm_bytes(0) + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return super().compile(lowered, **options)


class KilledDevice(OrtDevice):
    """The memory is granted, and the process is killed when it uses it, as the kernel does it."""

    _is_watched = False

    def compile(self, lowered: Lowered, **options: Any) -> Any:
        if not self._is_watched:
            import onnxruntime  # noqa: F401 - see above.

            self._is_watched = True
            threading.Thread(target=_kill_beyond, args=(_statm_bytes(1) + ROOM_BYTES,), daemon=True).start()
        return super().compile(lowered, **options)


def _kill_beyond(most: int) -> None:
    while _statm_bytes(1) <= most:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def wide_model() -> Model:
    """The sums of the rows of tanh(column x row): two tensors of 256 MiB, none of them in memory of the application."""
    graph = GraphBuilder()
    column = graph.input(OperandType.TENSOR_FLOAT32, (EXTENT, 1))
    row = graph.constant(0.5 * np.ones((1, EXTENT), np.float32))
    none = int(FusedActivation.NONE)
    product = graph.result(OperationType.MUL, [column, row, none], column, (EXTENT, EXTENT))
    bent = graph.result(OperationType.TANH, [product], column, (EXTENT, EXTENT))
    axes = graph.constant(np.array([1], np.int32))
    return graph.build([graph.result(OperationType.REDUCE_SUM, [bent, axes, True], column, (EXTENT, 1))])

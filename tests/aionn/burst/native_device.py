"""A device whose engine is a C function that a test can hold, and bursts around it in this process."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np

import fmq
from aionn.burst.controller import BurstController
from aionn.burst.server import BurstServer
from aionn.conformance.requests import request_for
from aionn.drivers.kit.arguments import address_of
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.reference import INFO
from aionn.errors import Error, general_failure_of
from aionn.hal import (
    ExecutionResult,
    GiveNativeCall,
    Memory,
    Model,
    NativeCall,
    OutputShape,
    Priority,
    Request,
)
from aionn.testing import models
from tests.aionn.burst.both_ends import CountedTurns

WAIT_S = 10.0
COUNT = 4
MODEL = models.identity((COUNT,))
SHAPES = (OutputShape((COUNT,)),)

_Function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 6)


class NativeModel(BlockingPreparedModel):
    """Doubles four numbers, in Python or by the device's function."""

    device: NativeDevice

    def run(self, inputs: Any, outputs: Any, control: Any) -> Sequence[OutputShape]:
        with self.device.using():
            self.device.python_count += 1
            if self.device.status:
                raise RuntimeError(f"status {self.device.status}")
            return [area.store(2 * value) for area, value in zip(outputs, inputs, strict=True)]

    @property
    def native(self) -> GiveNativeCall:  # type: ignore[override]
        return self._call

    def _call(self, arguments: Any) -> NativeCall | None:
        device = self.device
        (given,), (area,) = arguments.inputs(), arguments.outputs
        words = (address_of(given), address_of(area.buffer), self.identity)
        device.offered += 1
        return NativeCall(
            device.address, (words,) * device.info.slots, self.permit(), ExecutionResult(True, SHAPES),
            device.gate.release_native, self._failed, "native", arguments,
        )  # fmt: skip

    def _failed(self, status: int) -> Error:
        return general_failure_of(RuntimeError(f"status {status}"), self.device.info.name)


class NativeDevice(BlockingDevice):
    """Counts executions, and lets a test hold or fail them.

    Attributes:
        python_count: Executions in Python.
        called: The words of each native call.
        offered: How often a native call was asked for.
        status: What the engine returns.
        is_held: Whether native calls wait for ``may_end``.
        entered: Released by each native call that is held.
        address: Of the engine's function.
        used_max: Most executions that ran concurrently.
    """

    def __init__(self, slots: int = 1) -> None:
        super().__init__(msgspec.structs.replace(INFO, slots=slots))
        self.python_count = self.offered = self.status = 0
        self.called: list[tuple[int, int, int]] = []
        self.is_held = False
        self.entered, self.may_end = threading.Semaphore(0), threading.Event()
        self._lock, self._used, self.used_max = threading.Lock(), 0, 0
        self._function = _Function(self._engine)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        self.address = address

    def _engine(self, given: int, output: int, model: int, *_: int) -> int:
        with self.using():
            self.called.append((given, output, model))
            if self.is_held:
                self.entered.release()
                self.may_end.wait(WAIT_S)
            if self.status:
                return self.status
            numbers = ctypes.c_float * COUNT
            numbers.from_address(output)[:] = [2 * value for value in numbers.from_address(given)]
            return 0

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Counts an execution that runs."""
        with self._lock:
            self._used += 1
            self.used_max = max(self.used_max, self._used)
        try:
            yield
        finally:
            with self._lock:
                self._used -= 1

    @property
    def native_count(self) -> int:
        return len(self.called)

    def supports(self, model: Model) -> Sequence[bool]:
        return [True] * len(model.main.operations)

    def prepare(self, model: Model, *, priority: Priority, **_: Any) -> NativeModel:
        return NativeModel(self, model, priority)


class NativeBurst:
    """Both ends of a burst of a prepared model, over real queues."""

    def __init__(self, prepared: NativeModel, *, is_native: bool = True) -> None:
        self.prepared = prepared
        self.requests, self.results = fmq.MessageQueue.create(1, 1 << 12), fmq.MessageQueue.create(1, 1 << 12)
        self.asked: list[list[int]] = []
        self.turns = CountedTurns()
        self.controller = BurstController(self.requests, self.results, free_slot=self._free, end=self._end)
        self.server = BurstServer(
            fmq.MessageQueue.attach(self.requests.descriptor, self.requests.fds),
            fmq.MessageQueue.attach(self.results.descriptor, self.results.fds),
            execute=prepared.execute_bound,
            get_memories=self._memories,
            bind=prepared.bind,
            native=prepared.native if is_native else None,
            turns=self.turns,
            name="aionn-burst-native",
        )
        self.server.start()

    def _memories(self, slots: Sequence[int]) -> Sequence[Memory]:
        self.asked.append(list(slots))
        return self.controller.memories(slots)

    async def _free(self, slot: int) -> None:
        self.server.free_slot(slot)

    async def _end(self) -> None:
        await anyio.to_thread.run_sync(self.server.stop)

    async def execute(self, request: Request, identifier: int = 0, **limits: Any) -> ExecutionResult:
        identifiers = [identifier] * len(request.pools)
        return await self.controller.execute_synchronously(request, identifiers, **limits)

    def packet(self) -> bytes:
        """The bytes of the last request without limits that was kept."""
        return [kept.payload for key, kept in self.controller._packets.items() if not key[2]][-1]

    def ask(self, packet: bytes) -> bytes:
        """Sends bytes in place of a request, and returns those of the result."""
        assert self.requests.write_message(packet)
        answer = self.results.read_message_blocking(int(WAIT_S * 1e9))
        assert answer is not None, "no answer in time"
        return answer


def request_of(*values: float) -> Request:
    return request_for(MODEL, [np.asarray(values, np.float32)])


def output_of(request: Request) -> list[float]:
    argument = request.outputs[0]
    pool = request.pools[argument.location.pool_index]
    assert isinstance(pool, Memory)
    start = argument.location.offset
    values: list[float] = pool.array[start : start + 4 * COUNT].view(np.float32).tolist()
    return values

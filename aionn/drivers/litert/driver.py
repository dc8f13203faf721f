"""The driver ``litert-cpu``: models on LiteRT's CPU kernels and XNNPACK, in the driver's process.

Owns the device, which LiteRT versions it takes, and prepared models with one warm interpreter per slot. ``lowering`` converts
models; nothing of LiteRT is imported before a model comes, so that clients can call ``info_for`` at no cost.

Invariants:
1. An operation is supported when it was lowered and LiteRT planned the result.
2. A prepared model has as many interpreters as the device has slots; one runs in one thread at a time.

Source: the NN HAL's driver contract; LiteRT's Python package.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.caching import CacheContents
from aionn.drivers.litert.expectations import EXPECTED_FAILURES, UNSUPPORTED
from aionn.errors import DeviceUnavailable, GeneralFailure, InvalidArgument
from aionn.hal import (
    CacheFileCounts,
    CancelCapability,
    Capabilities,
    DeviceInfo,
    DeviceType,
    ExecutionPreference,
    FeatureLevel,
    Model,
    OperandPerformance,
    OperandType,
    OutputShape,
    PerformanceInfo,
    Priority,
    operand_dtype,
    uniform_capabilities,
)
from aionn.interpreter import RunControl

if TYPE_CHECKING:
    from aionn.drivers.litert.engine import Engine
    from aionn.drivers.litert.in_place import InPlaceEngine
    from aionn.drivers.litert.lowering import Lowered

__all__ = ["EXPECTED_FAILURES", "INFO", "UNSUPPORTED", "LitertDevice", "info_for"]

DISTRIBUTION = "ai-edge-litert"
VERSION_MIN = (2, 0)

THREADS_VARIABLE = "AIONN_LITERT_THREADS"
"""Environment variable with the number of threads of each interpreter; 1 without it."""

THREADS_MAX = 256

MEMORY_BYTES_MAX = 1 << 30

FLOAT_TIME, SIGNED_TIME = 0.22, 0.06
"""Execution time over the reference device's on mobilenet_v2_1.0_224 in float32 and int8, on one thread each: 3.4 of 14.7 ms and
1.6 of 26.1 ms. Types without a figure of their own take the larger one, and energy follows time. ``python -m benchmarks.models
--capabilities`` measures both again; it wants a machine that does nothing else."""


def _capabilities() -> Capabilities:
    known = uniform_capabilities(FLOAT_TIME, FLOAT_TIME)
    signed = PerformanceInfo(SIGNED_TIME, SIGNED_TIME)
    entries = tuple(
        OperandPerformance(e.type, signed) if e.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED else e
        for e in known.operand_performance
    )
    return msgspec.structs.replace(known, operand_performance=entries)


INFO = DeviceInfo(
    name="litert-cpu",
    type=DeviceType.CPU,
    version="1",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=_capabilities(),
    cache_files=CacheFileCounts(1, 1),
    slots=2,
    cancel=CancelCapability.NONE,
)


def info_for(name: str) -> DeviceInfo:
    """The DeviceInfo of the device of this name.

    Raises:
        DeviceUnavailable: LiteRT is not installed, or too old.
    """
    try:
        found = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise DeviceUnavailable(f"{DISTRIBUTION} is not installed; pip install 'aionn[litert]'") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise DeviceUnavailable(f"{DISTRIBUTION}: expected version {wanted} or later, got {found}")
    return msgspec.structs.replace(INFO, name=name, version=f"{INFO.version} LiteRT {found}")


def _thread_count() -> int:
    text = os.environ.get(THREADS_VARIABLE, "1")
    if not text.isdecimal() or not 1 <= int(text) <= THREADS_MAX:
        raise DeviceUnavailable(f"{THREADS_VARIABLE}: expected from 1 to {THREADS_MAX}, got {text!r}")
    return int(text)


class LitertDevice(BlockingDevice):
    """LiteRT on the CPU. Two concurrent executions, each on the number of threads in ``AIONN_LITERT_THREADS`` (1 without).

    Raises:
        DeviceUnavailable: LiteRT is not installed or too old, or the number of threads makes no sense.
    """

    prepares_beside = True
    marks_engine_calls = True

    def __init__(self, name: str = INFO.name) -> None:
        super().__init__(info_for(name), memory_bytes_max=MEMORY_BYTES_MAX)
        self.thread_count = _thread_count()
        self._found: tuple[Model, Lowered] | None = None

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        answer = await super().supported_operations(model)
        self._found = None  # It holds the model, which must not be prepared.
        return answer

    def supports(self, model: Model) -> Sequence[bool]:
        """True for every operation that could be lowered and that LiteRT then planned: all together, or else each by itself."""
        from aionn.drivers.litert.engine import check
        from aionn.drivers.litert.lowering import Unsupported, lower, single_operation_model

        def can_run(part: Model) -> bool:
            try:
                lowered = lower(part)
                check(lowered)
            except Unsupported:
                return False
            if part is model:
                # A preparation asks whether the model is supported, and then for the model: it is lowered once.
                self._found = model, lowered
            return True

        if can_run(model):
            return [True] * len(model.main.operations)
        answers = [can_run(single_operation_model(model, i)) for i in range(len(model.main.operations))]
        # Each by itself, but not together: nothing is sure.
        return [False] * len(answers) if all(answers) else answers

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> LitertPreparedModel:
        from aionn.drivers.litert.lowering import Unsupported, lower

        found, self._found = self._found, None
        try:
            lowered = found[1] if found is not None and found[0] is model else lower(model)
            return LitertPreparedModel(self, model, priority, lowered)
        except Unsupported as e:
            raise InvalidArgument(f"prepare_model: {self.info.name}: {e}") from e

    def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> LitertPreparedModel:
        """The lowered file is what was kept: nothing is lowered again."""
        from aionn.drivers.litert.lowering import Lowered, Unsupported

        try:
            kept = _DECODER.decode(contents.model[0])
            lowered = Lowered(
                bytes(contents.data[0]),
                kept.is_static,
                kept.is_read,
                _restored(kept),
                kept.is_input_in_place,
                kept.is_output_in_place,
            )
            return LitertPreparedModel(self, kept.model, priority, lowered)
        except (msgspec.MsgspecError, IndexError, RecursionError) as e:
            raise GeneralFailure(f"compilation cache: expected a lowered model: {e}") from e
        except Unsupported as e:
            raise GeneralFailure(f"compilation cache: {self.info.name}: {e}") from e


class _FixedOnDisk(msgspec.Struct, frozen=True, array_like=True):
    """The value of an output that no input decides."""

    shape: tuple[int, ...]
    data: bytes


class _LoweredOnDisk(msgspec.Struct, frozen=True):
    """A lowered model without its file. The model has no constants: they are in the file."""

    model: Model
    is_static: bool
    is_read: tuple[bool, ...]
    fixed: tuple[_FixedOnDisk | None, ...]
    is_input_in_place: tuple[bool, ...]
    is_output_in_place: tuple[bool, ...]


def _restored(kept: _LoweredOnDisk) -> tuple[Array | None, ...]:
    try:
        return tuple(
            None
            if value is None
            else np.frombuffer(value.data, operand_dtype(operand.type)).reshape(value.shape)
            for operand, value in zip(kept.model.main.outputs, kept.fixed, strict=True)
        )
    except ValueError as e:
        raise GeneralFailure(f"compilation cache: expected values of outputs: {e}") from e


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_LoweredOnDisk)


class LitertPreparedModel(BlockingPreparedModel):
    """A lowered model in one interpreter per slot."""

    def __init__(self, device: LitertDevice, model: Model, priority: Priority, lowered: Lowered) -> None:
        from aionn.drivers.litert.engine import make_engines

        super().__init__(device, model, priority)
        self._lowered = lowered
        # The part of the model's inputs and outputs that the file has; None where it has them all.
        self._computed: list[int] | None = None
        if any(value is not None for value in lowered.fixed) or not all(lowered.is_read):
            self._computed = [i for i, value in enumerate(lowered.fixed) if value is None]
        shapes = [
            tuple(operand.dimensions)
            for operand, value in zip(model.main.outputs, lowered.fixed, strict=True)
            if value is None
        ]
        # The last one used is taken first: its memory is in the caches.
        self._idle: deque[Engine | InPlaceEngine] = deque()
        if shapes:
            self._idle.extend(make_engines(lowered, device.thread_count, shapes, device.info.slots))

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        if self._computed is not None:
            return self._run_part(inputs, outputs, self._computed)
        engine = self._idle.pop()
        try:
            return engine.run(inputs, outputs)
        finally:
            self._idle.append(engine)

    def _run_part(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], computed: Sequence[int]
    ) -> Sequence[OutputShape]:
        """Runs a file that has not all of the model's inputs and outputs."""
        shapes: dict[int, OutputShape] = {}
        if computed:
            read = [value for value, is_read in zip(inputs, self._lowered.is_read, strict=True) if is_read]
            engine = self._idle.pop()
            try:
                found = engine.run(read, [outputs[i] for i in computed])
            finally:
                self._idle.append(engine)
            shapes.update(zip(computed, found, strict=True))
        for i, value in enumerate(self._lowered.fixed):
            if value is not None:
                shapes[i] = outputs[i].store(value)
        return [shapes[i] for i in range(len(outputs))]

    def cached(self) -> CacheContents:
        """The lowered file, and what a request is checked against: the main subgraph's inputs and outputs."""
        main = self.model.main
        used = (*main.input_indexes, *main.output_indexes)
        arguments = msgspec.structs.replace(
            main,
            operands=tuple(main.operands[i] for i in used),
            operations=(),
            input_indexes=tuple(range(len(main.input_indexes))),
            output_indexes=tuple(range(len(main.input_indexes), len(used))),
        )
        lowered = self._lowered
        kept = _LoweredOnDisk(
            Model(arguments),
            lowered.is_static,
            lowered.is_read,
            tuple(None if v is None else _FixedOnDisk(v.shape, v.tobytes()) for v in lowered.fixed),
            lowered.is_input_in_place,
            lowered.is_output_in_place,
        )
        return CacheContents([_ENCODER.encode(kept)], [lowered.file])

    def release(self) -> None:
        # The file is as large as the model, and a reference to a closed prepared model must not keep it.
        self._idle.clear()
        self._lowered = msgspec.structs.replace(self._lowered, file=b"")

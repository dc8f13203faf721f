"""The driver ``ort-cpu``: models on ONNX Runtime's CPU kernels, in the driver's process; ``ort-*`` on its other providers.

Owns the device, and prepared models with one session and a slot for each of the device's. ``lowering`` converts models, ``engine``
runs them, ``providers`` defines the names; nothing of ONNX Runtime is imported before a model comes, so that clients can call
``info_for`` at no cost.

Invariants:
1. An operation is supported when it was lowered and ONNX Runtime has kernels for the result.
2. A prepared model has one session, and as many slots as the device; a slot runs in one thread at a time.

Source: the NN HAL's driver contract; ONNX Runtime's Python package.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.caching import CacheContents
from aionn.drivers.onnxruntime.expectations import EXPECTED_DIFFERENCES, EXPECTED_FAILURES, UNSUPPORTED
from aionn.drivers.onnxruntime.lowered import OPSET, Argument, Lowered
from aionn.drivers.onnxruntime.providers import Provider, installed_version, provider_named
from aionn.errors import DeviceUnavailable, Error, GeneralFailure, InvalidArgument, MissedDeadline
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
from aionn.models.onnx.extension import EXTENSION

if TYPE_CHECKING:
    from aionn.drivers.onnxruntime.engine import Slot

__all__ = [
    "EXPECTED_DIFFERENCES",
    "EXPECTED_FAILURES",
    "INFO",
    "UNSUPPORTED",
    "OrtDevice",
    "factory_for",
    "info_for",
]

THREADS_VARIABLE = "AIONN_ORT_THREADS"
"""Environment variable with the number of threads of an execution; 1 without it."""

THREADS_MAX = 256

MEMORY_BYTES_MAX = 1 << 30

FLOAT_TIME, SIGNED_TIME = 0.25, 0.07
"""Execution time over the reference device's on mobilenet_v2_1.0_224 in float32 and int8, on one thread each. Types without a
figure of their own take the larger one, and energy follows time."""


def _capabilities() -> Capabilities:
    known = uniform_capabilities(FLOAT_TIME, FLOAT_TIME)
    signed = PerformanceInfo(SIGNED_TIME, SIGNED_TIME)
    entries = tuple(
        OperandPerformance(e.type, signed) if e.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED else e
        for e in known.operand_performance
    )
    return msgspec.structs.replace(known, operand_performance=entries)


INFO = DeviceInfo(
    name="ort-cpu",
    type=DeviceType.CPU,
    version="1",
    feature_level=FeatureLevel.LEVEL_7,
    capabilities=_capabilities(),
    cache_files=CacheFileCounts(1, 1),
    slots=2,
    cancel=CancelCapability.BETWEEN_OPERATIONS,
    extensions=(EXTENSION,),
)


def info_for(name: str, driver: str = INFO.name) -> DeviceInfo:
    """The DeviceInfo of the device of this name.

    Args:
        name: The device's name.
        driver: The driver's, which decides the provider.

    Raises:
        DeviceUnavailable: ONNX Runtime is not installed, too old, or installed twice, or there is no such provider.
    """
    provider = provider_named(driver)
    version = f"{INFO.version} ONNX Runtime {installed_version()} {provider.name} opset {OPSET}"
    if provider.is_cpu:
        return msgspec.structs.replace(INFO, name=name, version=version)
    return msgspec.structs.replace(
        INFO,
        name=name,
        version=version,
        type=DeviceType.GPU if "CUDA" in provider.name else DeviceType.ACCELERATOR,
        slots=1,
        cancel=CancelCapability.NONE,
    )


def _thread_count() -> int:
    text = os.environ.get(THREADS_VARIABLE, "1")
    if not text.isdecimal() or not 1 <= int(text) <= THREADS_MAX:
        raise DeviceUnavailable(f"{THREADS_VARIABLE}: expected from 1 to {THREADS_MAX}, got {text!r}")
    return int(text)


class OrtDevice(BlockingDevice):
    """ONNX Runtime on one execution provider. On the CPU two concurrent executions, each on the number of threads in
    ``AIONN_ORT_THREADS`` (1 without).

    Raises:
        DeviceUnavailable: ONNX Runtime cannot be used, or the number of threads makes no sense.
    """

    prepares_beside = True
    marks_engine_calls = True

    def __init__(self, name: str = INFO.name, driver: str = INFO.name) -> None:
        super().__init__(info_for(name, driver), memory_bytes_max=MEMORY_BYTES_MAX)
        self.provider: Provider = provider_named(driver)
        self.thread_count = _thread_count()
        self._found: tuple[Model, Lowered] | None = None

    async def supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See ``Device``."""
        answer = await super().supported_operations(model)
        self._found = None  # It holds the model, which must not be prepared.
        return answer

    def supports(self, model: Model) -> Sequence[bool]:
        """True for every operation that could be lowered and that ONNX Runtime has kernels for: all together, or else each by
        itself.
        """
        from aionn.drivers.onnxruntime.engine import check
        from aionn.drivers.onnxruntime.lowering import Unsupported, lower, single_operation_model

        def can_run(part: Model) -> bool:
            try:
                lowered = lower(part)
                check(lowered, self.provider)
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
    ) -> OrtPreparedModel:
        from aionn.drivers.onnxruntime.engine import Loading, compile_session
        from aionn.drivers.onnxruntime.lowering import Unsupported, lower

        found, self._found = self._found, None
        loading = Loading(self.provider, self.thread_count)
        try:
            lowered = found[1] if found is not None and found[0] is model else lower(model)
            with self.interrupts.watching(deadline_ns, None, loading.stop):
                session, is_optimized = compile_session(lowered, loading) if lowered.file else (None, False)
        except Unsupported as e:
            self._check_in_time(deadline_ns)
            raise InvalidArgument(f"prepare_model: {self.info.name}: {e}") from e
        form = Form.OPTIMIZABLE if is_optimized else Form.PLAIN
        return OrtPreparedModel(self, model, priority, lowered, session, form)

    def _check_in_time(self, deadline_ns: int | None) -> None:
        if deadline_ns is not None and self.now() >= deadline_ns:
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)

    def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> OrtPreparedModel:
        """The cache has the optimised model: nothing is lowered or optimised again."""
        from aionn.drivers.onnxruntime.engine import Loading, restore_session
        from aionn.drivers.onnxruntime.graph import Unsupported

        try:
            kept = _DECODER.decode(contents.model[0])
            if kept.processor != _processor():
                raise GeneralFailure("compilation cache: the model was optimised for another processor")
            lowered = Lowered(
                bytes(contents.data[0]), kept.inputs, kept.outputs, kept.is_read, _restored(kept)
            )
            session = None
            if lowered.file:
                loading = Loading(self.provider, self.thread_count)
                with self.interrupts.watching(deadline_ns, None, loading.stop):
                    session = restore_session(lowered.file, loading, is_optimized=kept.form == Form.OPTIMIZED)
        except (msgspec.MsgspecError, IndexError) as e:
            raise GeneralFailure(f"compilation cache: expected an optimised model: {e}") from e
        except Unsupported as e:
            self._check_in_time(deadline_ns)
            raise GeneralFailure(f"compilation cache: {self.info.name}: {e}") from e
        return OrtPreparedModel(self, kept.model, priority, lowered, session, kept.form)


class Form(enum.StrEnum):
    """The kind of a prepared model's file: an ONNX model that is to be optimised or not, or ONNX Runtime's optimised one."""

    OPTIMIZABLE = "optimizable"
    PLAIN = "plain"
    OPTIMIZED = "optimized"


def factory_for(driver: str) -> type[OrtDevice]:
    """The device of a driver's name; see ``aionn.drivers.registry``."""

    class Named(OrtDevice):
        def __init__(self, name: str = driver) -> None:
            super().__init__(name, driver)

    return Named


def _processor() -> str:
    """A digest of the processor's instructions, by which ONNX Runtime chooses its layouts."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
    return hashlib.sha256(flags.encode()).hexdigest()


class _FixedOnDisk(msgspec.Struct, frozen=True, array_like=True):
    """The value of an output that no input decides."""

    shape: tuple[int, ...]
    data: bytes


class _LoweredOnDisk(msgspec.Struct, frozen=True):
    """A lowered model without its file. The model has no constants: they are in the file."""

    model: Model
    form: Form
    processor: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    is_read: tuple[bool, ...]
    fixed: tuple[_FixedOnDisk | None, ...]


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


class OrtPreparedModel(BlockingPreparedModel):
    """A lowered model in one session, with a slot for each of the device's.

    Args:
        device: The device.
        model: The HAL model.
        priority: See ``BlockingPreparedModel``.
        lowered: The lowered model.
        session: Its session; None where no output depends on an input.
        form: What the file in ``lowered`` is.
    """

    device: OrtDevice

    def __init__(
        self,
        device: OrtDevice,
        model: Model,
        priority: Priority,
        lowered: Lowered,
        session: Any,
        form: Form,
    ) -> None:
        super().__init__(device, model, priority)
        self._lowered = lowered
        self._form = form
        # The part of the model's inputs and outputs that the file has; None where it has them all.
        self._computed: list[int] | None = None
        if any(value is not None for value in lowered.fixed) or not all(lowered.is_read):
            self._computed = [i for i, value in enumerate(lowered.fixed) if value is None]
        # The last one used is taken first: its memory is in the caches.
        self._idle: deque[Slot] = deque()
        if session is not None:
            from aionn.drivers.onnxruntime.engine import Slot

            self._idle.extend(Slot(session, lowered) for _ in range(device.info.slots))

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        if self._computed is not None:
            return self._run_part(inputs, outputs, self._computed, control)
        return self._run_session(inputs, outputs, control)

    def _run_session(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        slot = self._idle.pop()
        try:
            slot.begin()
            with self.interruptible(control, slot.stop):
                return slot.run(inputs, outputs)
        except Error:
            control.check()  # An execution that was stopped fails with the reason for it.
            raise
        finally:
            self._idle.append(slot)

    def _run_part(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[OutputArea],
        computed: Sequence[int],
        control: RunControl,
    ) -> Sequence[OutputShape]:
        """Runs a file that has not all of the model's inputs and outputs."""
        shapes: dict[int, OutputShape] = {}
        if computed:
            read = [value for value, is_read in zip(inputs, self._lowered.is_read, strict=True) if is_read]
            found = self._run_session(read, [outputs[i] for i in computed], control)
            shapes.update(zip(computed, found, strict=True))
        for i, value in enumerate(self._lowered.fixed):
            if value is not None:
                shapes[i] = outputs[i].store(value)
        return [shapes[i] for i in range(len(outputs))]

    def cached(self) -> CacheContents:
        """The optimised model, and what a request is checked against: the main subgraph's inputs and outputs."""
        from aionn.drivers.onnxruntime.engine import optimized_bytes

        main = self.model.main
        used = (*main.input_indexes, *main.output_indexes)
        arguments = msgspec.structs.replace(
            main,
            operands=tuple(main.operands[i] for i in used),
            operations=(),
            input_indexes=tuple(range(len(main.input_indexes))),
            output_indexes=tuple(range(len(main.input_indexes), len(used))),
        )
        lowered, file, form = self._lowered, self._lowered.file, self._form
        if form == Form.OPTIMIZABLE:
            file, form = optimized_bytes(lowered, self.device.provider), Form.OPTIMIZED
        kept = _LoweredOnDisk(
            Model(arguments),
            form,
            _processor(),
            lowered.inputs,
            lowered.outputs,
            lowered.is_read,
            tuple(None if v is None else _FixedOnDisk(v.shape, v.tobytes()) for v in lowered.fixed),
        )
        return CacheContents([_ENCODER.encode(kept)], [file])

    def release(self) -> None:
        # The file is as large as the model, and a reference to a closed prepared model must not keep it.
        self._idle.clear()
        self._lowered = msgspec.structs.replace(self._lowered, file=b"")

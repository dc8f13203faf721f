"""Base classes for drivers around an engine: a model is lowered to the engine's own form, checked by it, and run in slots.

Owns which operations are supported, the result of a check until the preparation that follows it, prepared models with a slot for
each of the device's, the outputs that no input decides, and what the compilation cache keeps beside the engine's file.

Invariants:
1. An operation is supported when it was lowered and the engine accepted the result.
2. A slot of a prepared model runs in one thread at a time.
3. An execution that was stopped fails with the reason for it, not with the engine's error.

Source: the NN HAL's driver contract.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.caching import CacheContents, KeptFile, checked_structure
from aionn.drivers.kit.engines.asked import KEPT_NS, Asked, asked_about
from aionn.drivers.kit.engines.installed import is_native_on, thread_count
from aionn.drivers.kit.engines.support import Unsupported, single_operation_model
from aionn.errors import (
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from aionn.hal import (
    Capabilities,
    DeviceInfo,
    DeviceStatus,
    ExecutionPreference,
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

__all__ = [
    "EngineDevice",
    "EnginePreparedModel",
    "Kept",
    "LoweredModel",
    "Slot",
    "StoppablePreparedModel",
    "StoppableSlot",
    "measured_capabilities",
]

MEMORY_BYTES_MAX = 1 << 30

_T = TypeVar("_T")


def measured_capabilities(float_time: float, signed_time: float) -> Capabilities:
    """The performance of a device by two figures: its time over the reference device's, of float32 and of signed 8-bit tensors.
    Other types take the first one, and energy follows time.
    """
    known = uniform_capabilities(float_time, float_time)
    signed = PerformanceInfo(signed_time, signed_time)
    entries = tuple(
        OperandPerformance(e.type, signed) if e.type == OperandType.TENSOR_QUANT8_ASYMM_SIGNED else e
        for e in known.operand_performance
    )
    return msgspec.structs.replace(known, operand_performance=entries)


class LoweredModel(msgspec.Struct, frozen=True):
    """A lowered model, as far as every engine has it.

    Attributes:
        file: The model for the engine; empty where no output depends on an input. It has the inputs that are read and the outputs
            that are computed, in the model's order.
        is_read: For each input of the HAL model, whether the file has it; only others may be omitted at an execution.
        fixed: For each output of the HAL model, its value where no input decides it; None where it is computed.
    """

    file: bytes
    is_read: tuple[bool, ...]
    fixed: tuple[Array | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the file has all inputs and outputs of the model."""
        return all(self.is_read) and all(value is None for value in self.fixed)


class Slot(Protocol):
    """The belongings of one execution at a time."""

    def run(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> Sequence[OutputShape]:
        """Computes, and writes the outputs."""


class StoppableSlot(Slot, Protocol):
    """A slot whose run another thread can stop.

    Attributes:
        is_brief: Whether the next run is certain to be over before it could be stopped.
    """

    is_brief: bool

    def begin(self) -> None:
        """Takes back an earlier ``stop``. Before each run, and before another thread may stop it."""

    def stop(self) -> None:
        """Ends the run where the engine can. From any thread."""


class EngineDevice(BlockingDevice):
    """A device around an engine. Implement ``load_engine``, ``lower``, ``check``, ``make`` and ``load``.

    Args:
        info: The description that never changes for a build of the driver.
        threads_variable: Environment variable with the number of threads of an execution.

    Attributes:
        is_native: Whether bursts may call the engine without Python (``AIONN_NATIVE``).

    Raises:
        DeviceUnavailable: A variable makes no sense.
    """

    prepares_beside = True
    marks_engine_calls = True

    def __init__(self, info: DeviceInfo, threads_variable: str) -> None:
        super().__init__(info, memory_bytes_max=MEMORY_BYTES_MAX)
        self.thread_count = thread_count(threads_variable)
        self.is_native = is_native_on()
        # Set from the end of a check until the preparation behind it or the end of the work, between two of its pieces: work on
        # another model never meets it.
        self._found: tuple[Model, LoweredModel] | None = None
        self._asked: Asked | None = None
        self._end_of_asked: Callable[[], None] = lambda: None
        self._has_engine = False

    async def status(self) -> DeviceStatus:
        """See ``Device``. Until the engine has taken a model, the answer waits for its import.

        Raises:
            DeviceUnavailable: The engine cannot be imported, or does not work; the message has the reason.
        """
        if not self._has_engine:
            await self._in_pieces(Priority.MEDIUM, None, self.load_engine)
            self._has_engine = True
        return await super().status()

    @abc.abstractmethod
    def load_engine(self) -> None:
        """Imports the engine, and asks it for no more than what shows that it works. May be called again.

        Raises:
            ImportError: It cannot be imported.
            DeviceUnavailable: It does not work.
        """

    async def _in_pieces(self, priority: Priority, deadline_ns: int | None, call: Callable[[], _T]) -> _T:
        """See the base class. The engine is imported with the first model."""

        def run() -> _T:
            try:
                return call()
            except ImportError as e:
                raise DeviceUnavailable(
                    f"{self.info.name}: its engine is installed and cannot be imported: {e}"
                ) from e
            finally:
                # It holds the model, which is not prepared after a question or a failure. Work without a turn has found nothing,
                # and would drop what another one has found.
                if self.preparing.has_slot:
                    self._found = None

        return await super()._in_pieces(priority, deadline_ns, run)

    @abc.abstractmethod
    def lower(self, model: Model) -> LoweredModel:
        """Lowers a whole model.

        Raises:
            Unsupported: The engine's form has no equivalent of something in it.
        """

    @abc.abstractmethod
    def check(self, lowered: LoweredModel) -> None:
        """Asks the engine whether it can run a lowered model, in the quickest way that it has.

        Raises:
            Unsupported: It cannot.
        """

    @abc.abstractmethod
    def make(
        self, model: Model, lowered: LoweredModel, priority: Priority, deadline_ns: int | None
    ) -> EnginePreparedModel:
        """Compiles a lowered model.

        Raises:
            Unsupported: The engine rejects it.
        """

    @abc.abstractmethod
    def load(
        self, kept: Kept, file: KeptFile, priority: Priority, deadline_ns: int | None
    ) -> EnginePreparedModel:
        """Compiles what ``EnginePreparedModel`` kept of a model.

        Raises:
            Unsupported: The engine rejects it.
            GeneralFailure: It is for another processor, for example.
        """

    def _checked_support(self, model: Model) -> tuple[bool, ...]:
        """See the base class. A model that was asked about before is neither validated nor lowered again."""
        asked = self._asked
        if asked is not None and asked.is_for(model):
            self._found = model, asked.lowered
            return (True,) * len(model.main.operations)
        self._found = None
        self._forget()
        answer = super()._checked_support(model)
        found = self._found
        if found is not None and all(answer):
            self._keep(asked_about(*found))
        return answer

    def _keep(self, asked: Asked | None) -> None:
        def drop() -> None:
            if self._asked is asked:
                self._asked = None

        if asked is None:
            return
        self._forget()  # Another model may have been lowered between the pieces of this one.
        try:
            self._end_of_asked = self.alarm.call_at(self.now() + KEPT_NS, drop)
        except ResourceExhausted:
            return  # No thread is left that would drop it: the preparation validates and lowers again.
        self._asked = asked

    def _forget(self) -> None:
        self._asked = None
        self._end_of_asked()

    def supports(self, model: Model) -> Sequence[bool]:
        """True for every operation that could be lowered and that the engine accepts: all together, or else each by itself."""
        if self._can_run(model, is_whole=True):
            return [True] * len(model.main.operations)
        answers = self.support_in_parts(model)
        # Each by itself, but not together: nothing is sure.
        return [False] * len(answers) if all(answers) else answers

    def support_in_parts(self, model: Model) -> Sequence[bool]:
        """Whether each operation is supported, of a model that is not supported whole."""
        count = len(model.main.operations)
        return [self._can_run(single_operation_model(model, i)) for i in range(count)]

    def _can_run(self, part: Model, *, is_whole: bool = False) -> bool:
        try:
            lowered = self.lower(part)
            self.check(lowered)
        except Unsupported:
            return False
        if is_whole:
            self.keep_lowered(part, lowered)
        return True

    def keep_lowered(self, model: Model, lowered: LoweredModel) -> None:
        """A preparation asks whether the model is supported, and then for the model, often after a question: it is lowered once."""
        self._found = model, lowered
        # A compilation follows, which may take a minute, and the status would wait for its end.
        self._has_engine = self._has_engine or bool(lowered.file)

    def prepare(
        self, model: Model, *, preference: ExecutionPreference, priority: Priority, deadline_ns: int | None
    ) -> EnginePreparedModel:
        found, self._found = self._found, None
        self._forget()
        try:
            lowered = found[1] if found is not None and found[0] is model else self.lower(model)
            return self.make(model, lowered, priority, deadline_ns)
        except Unsupported as e:
            self._check_in_time(deadline_ns)
            raise InvalidArgument(f"prepare_model: {self.info.name}: {e}") from e

    def _check_in_time(self, deadline_ns: int | None) -> None:
        if deadline_ns is not None and self.now() >= deadline_ns:
            raise MissedDeadline("prepare_model: the deadline passed while preparing", transient=True)

    def restore(
        self, contents: CacheContents, *, priority: Priority, deadline_ns: int | None
    ) -> EnginePreparedModel:
        """The cache has the lowered or compiled model: nothing is lowered again."""
        try:
            structure = checked_structure(contents.model[0])
        except (IndexError, ValueError) as e:
            raise GeneralFailure(f"compilation cache: expected a lowered model: {e}") from e
        try:
            kept = _DECODER.decode(structure)
            file = [KeptFile(contents)]
            del contents  # The engine needs memory: the driver drops the file when it has read it.
            return self.load(kept, file.pop(), priority, deadline_ns)
        except (msgspec.MsgspecError, IndexError, RecursionError) as e:
            raise GeneralFailure(f"compilation cache: expected a lowered model: {e}") from e
        except Unsupported as e:
            self._check_in_time(deadline_ns)
            raise GeneralFailure(f"compilation cache: {self.info.name}: {e}") from e


class _FixedOnDisk(msgspec.Struct, frozen=True, array_like=True):
    """The value of an output that no input decides."""

    shape: tuple[int, ...]
    data: bytes


class Kept(msgspec.Struct, frozen=True):
    """The part of a cached compilation beside the engine's file.

    Attributes:
        model: Its requests are checked against this: the main subgraph's inputs and outputs, and whether it is relaxed. It has no
            constants.
        is_read: See ``LoweredModel``.
        values: See ``LoweredModel.fixed``.
        details: The driver's addition.
    """

    model: Model
    is_read: tuple[bool, ...]
    values: tuple[_FixedOnDisk | None, ...]
    details: msgspec.Raw

    def fixed(self) -> tuple[Array | None, ...]:
        """See ``LoweredModel.fixed``.

        Raises:
            GeneralFailure: A value has not its type and shape.
        """
        try:
            return tuple(
                None
                if value is None
                else np.frombuffer(value.data, operand_dtype(operand.type)).reshape(value.shape)
                for operand, value in zip(self.model.main.outputs, self.values, strict=True)
            )
        except ValueError as e:
            raise GeneralFailure(f"compilation cache: expected values of outputs: {e}") from e


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Kept)


class EnginePreparedModel(BlockingPreparedModel):
    """A lowered model with a slot for each of the device's. Implement ``kept_details``.

    Args:
        device: The device.
        model: The HAL model.
        priority: See ``BlockingPreparedModel``.
        lowered: The lowered model.
        make_slots: Makes one for each of the device's, or none where no output depends on an input. Called after the constructor of
            ``BlockingPreparedModel``, as ``marks_engine_calls`` requires.
    """

    def __init__(
        self,
        device: EngineDevice,
        model: Model,
        priority: Priority,
        lowered: LoweredModel,
        make_slots: Callable[[], Sequence[Slot]],
    ) -> None:
        super().__init__(device, model, priority)
        self._lowered = lowered
        # The part of the model's inputs and outputs that the file has; None where it has them all.
        self._computed: list[int] | None = None
        if not lowered.is_whole:
            self._computed = [i for i, value in enumerate(lowered.fixed) if value is None]
        # The last one used is taken first: its memory is in the caches.
        self._idle: deque[Slot] = deque(make_slots())

    @property
    def is_whole(self) -> bool:
        """Whether the file has all inputs and outputs of the model."""
        return self._computed is None

    def run(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        if self._computed is not None:
            return self._run_part(inputs, outputs, self._computed, control)
        return self._run_file(inputs, outputs, control)

    def _run_file(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        slot = self._idle.pop()
        try:
            return slot.run(inputs, outputs)
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
            found = self._run_file(read, [outputs[i] for i in computed], control)
            shapes.update(zip(computed, found, strict=True))
        for i, value in enumerate(self._lowered.fixed):
            if value is not None:
                shapes[i] = outputs[i].store(value)
        return [shapes[i] for i in range(len(outputs))]

    @abc.abstractmethod
    def kept_details(self) -> tuple[msgspec.Struct, bytes]:
        """The arguments of ``EngineDevice.load``: the driver's addition to ``Kept``, and the engine's file."""

    def cached(self) -> CacheContents:
        """The engine's file, and what a request is checked against: the main subgraph's inputs and outputs."""
        main = self.model.main
        used = (*main.input_indexes, *main.output_indexes)
        arguments = msgspec.structs.replace(
            main,
            operands=tuple(main.operands[i] for i in used),
            operations=(),
            input_indexes=tuple(range(len(main.input_indexes))),
            output_indexes=tuple(range(len(main.input_indexes), len(used))),
        )
        details, file = self.kept_details()
        values = tuple(None if v is None else _FixedOnDisk(v.shape, v.tobytes()) for v in self._lowered.fixed)
        is_relaxed = self.model.relax_computation_float32_to_float16
        model = Model(arguments, relax_computation_float32_to_float16=is_relaxed)
        kept = Kept(model, self._lowered.is_read, values, msgspec.Raw(_ENCODER.encode(details)))
        return CacheContents([checked_structure(_ENCODER.encode(kept))], [file])

    def release(self) -> None:
        # The file is as large as the model, and a reference to a closed prepared model must not keep it.
        self._idle.clear()
        self._lowered = msgspec.structs.replace(self._lowered, file=b"")


class StoppablePreparedModel(EnginePreparedModel):
    """The same with slots that another thread can stop: an execution ends where the engine can, when it is cancelled or its
    deadline has passed.
    """

    _idle: deque[StoppableSlot]  # type: ignore[assignment]

    def _run_file(
        self, inputs: Sequence[Array | None], outputs: Sequence[OutputArea], control: RunControl
    ) -> Sequence[OutputShape]:
        slot = self._idle.pop()
        try:
            slot.begin()
            if slot.is_brief:
                return slot.run(inputs, outputs)
            with self.interruptible(control, slot.stop):
                return slot.run(inputs, outputs)
        except Error:
            control.check()  # An execution that was stopped fails with the reason for it.
            raise
        finally:
            self._idle.append(slot)

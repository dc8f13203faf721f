"""The base class of devices whose engine reads ONNX models, their prepared models, and what their caches keep.

Owns the lowering; the kinds of nodes that the engine accepted, for which it is not asked again; and the part of a cached
compilation beside the engine's file, which is bound to the processor. A driver compiles, and its slots run.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from aionn.drivers.kit.caching import KeptFile
from aionn.drivers.kit.engines.device import (
    EngineDevice,
    Kept,
    LoweredModel,
    StoppablePreparedModel,
    StoppableSlot,
)
from aionn.drivers.kit.engines.installed import processor_digest
from aionn.drivers.kit.engines.slot import BoundSlot
from aionn.drivers.kit.onnx.lowered import FULL, Argument, Dialect, Lowered
from aionn.errors import GeneralFailure
from aionn.hal import DeviceInfo, GiveNativeCall, Model, NativeCall, Priority

__all__ = ["Compiled", "OnnxDevice", "OnnxPreparedModel", "OnnxSlot"]


class OnnxSlot(BoundSlot[Any]):
    """A slot of an engine that reads ONNX models. Implement ``bind_arrays`` and ``compute``; see the base class for the rest.

    Args:
        lowered: The model.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.arguments: tuple[Argument, ...] = (*lowered.inputs, *lowered.outputs)
        self.input_count = len(lowered.inputs)
        super().__init__(
            [argument.place for argument in lowered.inputs],
            [argument.place for argument in lowered.outputs],
            [argument.shape or () for argument in lowered.outputs],
        )


class Compiled(abc.ABC):
    """A model that an engine has compiled, as long as a prepared model uses it."""

    @abc.abstractmethod
    def make_slots(self, lowered: Lowered, count: int) -> Sequence[OnnxSlot]:
        """Makes a slot for each of the device's."""

    @abc.abstractmethod
    def kept(self) -> tuple[str, bytes]:
        """Returns the content of the compilation cache: the driver's name for the form of the file, and the file.

        Raises:
            OSError: The engine cannot write it.
            Unsupported: The same.
        """

    def native_call(
        self, prepared: OnnxPreparedModel, slots: Sequence[Any], arguments: Any
    ) -> NativeCall | None:
        """Returns the call of a C function for arguments that ``execute_bound`` has executed; None: it has to be made by Python.

        Args:
            prepared: The prepared model.
            slots: The result of ``make_slots``.
            arguments: The result of ``bind``.
        """
        return None


class OnnxDevice(EngineDevice):
    """A device around an engine that reads ONNX models. Implement ``load_engine``, ``check_new``, ``compile`` and
    ``load_compiled``.

    Args:
        info: The description that never changes for a build of the driver.
        threads_variable: Environment variable with the number of threads of an execution.

    Raises:
        DeviceUnavailable: The number of threads makes no sense.
    """

    dialect: Dialect = FULL
    """Where the engine's reading of ONNX differs."""

    def __init__(self, info: DeviceInfo, threads_variable: str) -> None:
        super().__init__(info, threads_variable)
        # Bounded by the operators and the types that are written.
        self._accepted: set[tuple[object, ...]] = set()

    def lower(self, model: Model) -> Lowered:
        """See the base class."""
        # Imported with the first model, since clients import this module for its DeviceInfo alone.
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

    @abc.abstractmethod
    def compile(
        self, lowered: Lowered, *, is_relaxed: bool, priority: Priority, deadline_ns: int | None
    ) -> Compiled:
        """Compiles a lowered model.

        Args:
            lowered: The model.
            is_relaxed: Whether floats may have the range and precision of float16.
            priority: Relative to other models of the device.
            deadline_ns: When its caller stops waiting; None means never.

        Raises:
            Unsupported: The engine rejects it.
        """

    @abc.abstractmethod
    def load_compiled(
        self,
        file: KeptFile,
        form: str,
        *,
        is_relaxed: bool,
        priority: Priority,
        deadline_ns: int | None,
    ) -> Compiled:
        """Compiles what ``Compiled.kept`` gave.

        Args:
            file: The engine's file.
            form: The driver's name for its form.
            is_relaxed: See ``compile``, as are the other arguments.
            priority: See ``compile``.
            deadline_ns: See ``compile``.

        Raises:
            Unsupported: The engine rejects it.
        """

    def make(
        self, model: Model, lowered: LoweredModel, priority: Priority, deadline_ns: int | None
    ) -> OnnxPreparedModel:
        """See the base class."""
        onnx = cast(Lowered, lowered)
        is_relaxed = model.relax_computation_float32_to_float16
        compiled = None
        if onnx.file:
            compiled = self.compile(onnx, is_relaxed=is_relaxed, priority=priority, deadline_ns=deadline_ns)
        return OnnxPreparedModel(self, model, priority, onnx, compiled)

    def load(
        self, kept: Kept, file: KeptFile, priority: Priority, deadline_ns: int | None
    ) -> OnnxPreparedModel:
        """The cache has the compiled model: nothing is lowered or compiled again."""
        details = _DETAILS.decode(kept.details)
        if details.processor != processor_digest():
            raise GeneralFailure("compilation cache: the model was compiled for another processor")
        lowered = Lowered(b"", kept.is_read, kept.fixed(), details.inputs, details.outputs, details.check)
        is_relaxed = kept.model.relax_computation_float32_to_float16
        compiled = None
        if file.size_bytes:
            compiled = self.load_compiled(
                file, details.form, is_relaxed=is_relaxed, priority=priority, deadline_ns=deadline_ns
            )
        return OnnxPreparedModel(self, kept.model, priority, lowered, compiled)


class _Details(msgspec.Struct, frozen=True):
    """The part of a cached compilation beside the engine's file."""

    form: str
    processor: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    check: Argument | None


_DETAILS = msgspec.msgpack.Decoder(_Details)


class OnnxPreparedModel(StoppablePreparedModel):
    """A compiled model, with a slot for each of the device's.

    Args:
        device: The device.
        model: The HAL model.
        priority: See ``BlockingPreparedModel``.
        lowered: The lowered model.
        compiled: The engine's; None where no output depends on an input.

    Attributes:
        compiled: See above; None as well after ``release``.
    """

    def __init__(
        self,
        device: OnnxDevice,
        model: Model,
        priority: Priority,
        lowered: Lowered,
        compiled: Compiled | None,
    ) -> None:
        def make() -> Sequence[OnnxSlot]:
            return [] if compiled is None else compiled.make_slots(lowered, device.info.slots)

        # The file is not kept: the engine's model has its contents.
        kept = msgspec.structs.replace(lowered, file=b"", weights=())
        super().__init__(device, model, priority, kept, make)
        self.compiled = compiled
        # By the device's slots; empty where bursts always call the engine by Python.
        self._by_slot: Sequence[StoppableSlot] = tuple(self._idle) if device.is_native else ()

    @property
    def native(self) -> GiveNativeCall | None:  # type: ignore[override]
        """See ``PreparedModel``: calls of the engine's own function."""
        return self._native_call if self._by_slot else None

    def _native_call(self, arguments: Any) -> NativeCall | None:
        compiled, slots = self.compiled, self._by_slot
        return None if compiled is None else compiled.native_call(self, slots, arguments)

    def kept_details(self) -> tuple[msgspec.Struct, bytes]:
        """See the base class."""
        lowered = cast(Lowered, self._lowered)
        form, file = ("", b"") if self.compiled is None else self.compiled.kept()
        details = _Details(form, processor_digest(), lowered.inputs, lowered.outputs, lowered.check)
        return details, file

    def release(self) -> None:
        """See the base class."""
        super().release()
        self.compiled = None
        self._by_slot = ()

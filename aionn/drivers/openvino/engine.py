"""Models and requests of OpenVINO: described, checked, compiled, kept, bound to the client's memory, run and stopped.

Owns everything that touches OpenVINO's Python package, and what its exceptions mean: all of them are RuntimeErrors, so that the
place where one was raised decides the status; their texts, which may contain names of files, go to the log.

Invariants:
1. OpenVINO works directly on memory that a client can change only as ``BoundArguments`` allows.
2. A request is run by ``start_async`` and ``wait``, on one thread at a time: nothing stops ``infer``, and a callback is never
   called for a request that was cancelled. One that is certain to be short is run by ``infer``, which spares a change of threads.
   Python's lock is free while OpenVINO computes.
3. A ``stop`` is not lost, whether it comes before the request has begun or after; one that is short ends by itself.
4. A model has calls without Python (``native``) only if it was exported rightly, and if an execution is certain to be short.

Source: OpenVINO's Python API.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea, address_of, engine_memory
from aionn.drivers.kit.engines.native import native_call
from aionn.drivers.kit.engines.support import Unsupported, is_exhausted, short_text
from aionn.drivers.kit.onnx.device import Compiled, OnnxPreparedModel, OnnxSlot
from aionn.drivers.kit.onnx.lowered import Lowered
from aionn.drivers.kit.threads.classes import engine_call
from aionn.drivers.openvino.hardware import saturates
from aionn.drivers.openvino.memory_files import MemoryFile
from aionn.drivers.openvino.native import BLOB_BYTES_MAX, KeptCall, NativeModel, native_models
from aionn.drivers.openvino.terms import Description, terms_of
from aionn.errors import DeviceUnavailable, Error, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import NativeCall, OutputShape
from aionn.realtime import current


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
    """Within it the package that reports the use of OpenVINO to its makers cannot be imported. OpenVINO works without it; with
    it, its import sends an event, and writes an identifier below the user's home.
    """
    reporting, modules = "openvino_telemetry", cast(dict[str, Any], sys.modules)
    is_imported = reporting in modules
    modules.setdefault(reporting, None)
    try:
        yield
    finally:
        if not is_imported and modules.get(reporting) is None:  # Another thread may have imported it by now.
            modules.pop(reporting, None)


with _without_reports():
    import openvino as ov

__all__ = ["CompiledModel", "Slot", "compiled_model", "describe", "loaded_model", "rejected_operations"]

_logger = logging.getLogger("aionn.driver")

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, MemoryError)
"""The exceptions of OpenVINO, and of its Python package for arguments."""

LARGE_BYTES = 1 << 20
"""A model from this size on is read from a file in memory. OpenVINO copies a smaller one in less than 2 ms, with the interpreter's
lock."""

_WITHOUT_8_BITS = {"LP_TRANSFORMS_MODE": "NO"}
"""A property of the CPU plugin, which it does not list: quantised layers are computed with floats. Its passes for 8 bits write
nodes for some layers that no kernel can run."""

_NOT_EXPORTED = ("GRU", "LSTM", "RNN")
"""Operators whose models OpenVINO 2026.4 exports wrongly: imported again, a layer over a sequence has other results from the second
step on where the batch is larger than 1."""

_FUSED_NOT_EXPORTED = frozenset(("RoPE",))
"""Operations that OpenVINO makes of several and exports wrongly: half of the result of a rotary embedding is noise."""

_DIVIDES = "nonconvertable_divide_0"
"""OpenVINO's mark of a Divide that stays one. Others become products with the reciprocal, which is rounded by itself: a number
divided by itself may be less than 1 then (41 is the first), and its floor 0."""

BRIEF_NS = 500_000
"""An execution that takes less ends about as soon as it could be stopped: a layer of a large network takes as long, and so does the
way of a cancellation to another thread on a machine that is busy."""

REHEARSAL_MS = 100
"""The longest first run of a model that may have calls without Python. It allocates memory, and takes up to 60 times as long as
those that follow."""

REHEARSALS = 3
"""The runs that follow, of which one has to be short."""

_BLOB, _ONNX = "blob", "onnx"
"""The forms of a cached file: OpenVINO's exported model, or the lowered one."""

_NODE_NAME = re.compile(r"#(\d+)\.")
"""Where the name of a node has the index of its operation."""


_cores: list[Any] = []
_core_turn = threading.Lock()


def _core() -> Any:
    """The process's one core: its plugins are loaded once. Each that is loaded gives its thread a signal stack and unmaps it in
    the end: after several that are not nested, the next signal would end the process. Devices ask for it in threads of their own.
    """
    with _core_turn:
        if not _cores:
            _cores.append(ov.Core())
        return _cores[0]


def describe(device: str) -> Description:
    """Asks OpenVINO for a device's properties.

    Raises:
        DeviceUnavailable: OpenVINO does not find the device, or cannot describe it.
    """
    try:
        core = _core()
        found = core.available_devices
        if not any(name == device or name.partition(".")[0] == device for name in found):
            raise DeviceUnavailable(
                f"OpenVINO {ov.__version__} finds no {device}, but {', '.join(found) or 'nothing'}: this machine has none, or its "
                "driver, the part of the driver that programs load, or its firmware is missing or of another version"
            )
        names = {
            str(name): str(how) for name, how in core.get_property(device, "SUPPORTED_PROPERTIES").items()
        }

        def text(name: str) -> str:
            return str(core.get_property(device, name)) if name in names else ""

        streams = core.get_property(device, "RANGE_FOR_STREAMS") if "RANGE_FOR_STREAMS" in names else (1, 1)
        return Description(
            device,
            text("FULL_DEVICE_NAME"),
            tuple(map(str, core.get_property(device, "OPTIMIZATION_CAPABILITIES"))),
            frozenset(name for name, how in names.items() if how == "RW"),
            int(streams[1]),
            text("NPU_DRIVER_VERSION") or text("GPU_DRIVER_VERSION"),
            device == "CPU" and saturates(),
        )
    except _FAILURES as e:
        raise DeviceUnavailable(f"{device}: OpenVINO cannot describe it: {short_text(e)}") from e


def _failure(where: str, error: BaseException) -> Error:
    """The error for a failure of OpenVINO while it computes or loads."""
    _logger.warning("%s: OpenVINO: %s", where, short_text(error))
    if is_exhausted(error):
        return ResourceExhausted(f"{where}: OpenVINO has no memory or no thread left")
    return GeneralFailure(f"{where}: OpenVINO failed; the log has its message")


def _rejected(error: BaseException) -> Unsupported | Error:
    """The exception for a model that OpenVINO does not read, compile or import."""
    if is_exhausted(error):
        return _failure("prepare_model", error)
    _logger.debug("OpenVINO rejects a model: %s", error)
    return Unsupported(f"OpenVINO rejects it: {short_text(error)}")


def _keep_quotients(model: Any) -> None:
    """Marks the divisions that stay ones: all but those of a constant by something computed.

    OpenVINO 2026.4 makes the latter a part of the operation that computes the divisor (a convolution, a product of matrices, a
    reduction, a resize), and divides by the constant there. As products with reciprocals, which are not marked, they are right.
    """
    varying: set[str] = set()
    for operation in model.get_ordered_ops():
        kind = operation.get_type_name()
        sources = [each.get_node() for each in operation.input_values()]
        if kind == "Parameter" or any(each.get_name() in varying for each in sources):
            varying.add(operation.get_name())
        if kind == "Divide" and (
            sources[0].get_name() in varying or sources[1].get_type_name() == "Parameter"
        ):
            operation.get_rt_info()[_DIVIDES] = ""


def _read(file: bytes) -> Any:
    try:
        if len(file) < LARGE_BYTES:
            model = _core().read_model(file, b"")
        else:
            with MemoryFile() as copy:
                copy.write(file)
                model = _core().read_model(copy.path)
        _keep_quotients(model)
    except _FAILURES as e:
        raise _rejected(e) from e
    return model


def rejected_operations(lowered: Lowered, device: str, properties: Mapping[str, str]) -> frozenset[int]:
    """The operations, by their index, that a device has no kernels for. Asked once for the whole model: each question builds the
    plugin's whole graph.

    Raises:
        Unsupported: OpenVINO cannot read the model, or a node does not name its operation.
    """
    model = _read(lowered.file)
    try:
        found = _core().query_model(model, device, dict(properties))
    except _FAILURES as e:
        raise _rejected(e) from e
    missing = {op.get_friendly_name() for op in model.get_ops()} - set(found)
    rejected = set()
    for name in missing:
        match = _NODE_NAME.search(name)
        if match is None:
            raise Unsupported(f"OpenVINO has no kernel on {device} for {name}")
        rejected.add(int(match[1]))
    return frozenset(rejected)


def _compiled(file: bytes, device: str, properties: Mapping[str, str]) -> Any:
    try:
        return _core().compile_model(_read(file), device, dict(properties))
    except _FAILURES as e:
        if device != "CPU" or is_exhausted(e):
            raise _rejected(e) from e
        _logger.debug("OpenVINO fails to compile with its passes for 8 bits: %s", short_text(e))
    try:
        return _core().compile_model(_read(file), device, {**properties, **_WITHOUT_8_BITS})
    except _FAILURES as e:
        raise _rejected(e) from e


def _exported(compiled: Any) -> bytes:
    """A compiled model as bytes.

    Raises:
        OSError: OpenVINO cannot write it.
    """
    try:
        with MemoryFile() as stream:
            compiled.export_model(stream)
            return stream.content()
    except MemoryError as e:
        raise _failure("prepare_model", e) from e
    except _FAILURES as e:
        raise OSError(f"OpenVINO writes no compiled model: {short_text(e)}") from e


def _imported(blob: bytes, device: str, properties: Mapping[str, str]) -> Any:
    try:
        # Bytes are read in place. A stream would be copied with the interpreter's lock, and the memory of a tensor would have to
        # live as long as the model, which refers to constants in it.
        return _core().import_model(blob, device, dict(properties))
    except _FAILURES as e:
        raise _rejected(e) from e


def _is_exported(compiled: Any) -> bool:
    """Whether OpenVINO exports a compiled model rightly, by the operations that it has made."""
    try:
        operations = compiled.get_runtime_model().get_ops()
        made = {op.get_rt_info()["layerType"].astype(str) for op in operations}
    except _FAILURES as e:
        _logger.debug("OpenVINO does not list the operations of a compiled model: %s", short_text(e))
        return False
    return made.isdisjoint(_FUSED_NOT_EXPORTED)


class CompiledModel(Compiled):
    """OpenVINO's compiled models of a lowered one: one for each of the device's slots, or one that all slots share.

    Args:
        models: Them.
        file: The lowered model where it has operations that OpenVINO does not export rightly; else empty.
        exported: The exported model and its properties, for calls without Python; None: it gets none.
    """

    def __init__(
        self, models: Sequence[Any], file: bytes, exported: tuple[bytes, Mapping[str, str]] | None = None
    ) -> None:
        self._models = models
        self._file = file
        self._exported = exported

    def make_slots(self, lowered: Lowered, count: int) -> Sequence[Slot]:
        """See the base class.

        The compiled models of calls without Python are made here as well. Made when a burst first asks for a call, they would delay
        its second frame by some tens of milliseconds, also where it is a frame of a reservation, which is never called so.
        """
        slots = [Slot(self._models[i % len(self._models)], lowered) for i in range(count)]
        exported, self._exported = self._exported, None
        first = slots[0]
        if exported is not None and lowered.is_whole and (sample := first.rehearse()) is not None:
            models = native_models(*exported, first.arguments, first.input_count, sample, count)
            for slot, model in zip(slots, models, strict=bool(models)):
                slot.native = model
        return slots

    def native_call(
        self, prepared: OnnxPreparedModel, slots: Sequence[Slot], arguments: Any
    ) -> NativeCall | None:
        """See the base class."""
        return native_call(prepared, slots, arguments, "OpenVINO")

    def kept(self) -> tuple[str, bytes]:
        """See the base class."""
        if self._file:
            return _ONNX, self._file
        return _BLOB, _exported(self._models[0])


def compiled_model(
    lowered: Lowered, description: Description, properties: Mapping[str, str], *, is_native: bool = False
) -> CompiledModel:
    """The compiled model of a lowered one.

    Args:
        lowered: It.
        description: The device.
        properties: See ``properties_for``.
        is_native: Whether it has calls without Python where that is possible.

    Raises:
        Unsupported: OpenVINO rejects it.
        ResourceExhausted: There is no memory left.
    """
    if any(op_type in _NOT_EXPORTED for _, op_type, *_ in lowered.kernels):
        return _compiled_each(lowered.file, description, properties)
    first = _compiled(lowered.file, description.device, properties)
    if terms_of(description).model_count == 1:
        return CompiledModel([first], b"")
    if _is_exported(first):
        try:
            return _with_others(first, _exported(first), description, properties, is_native=is_native)
        except (OSError, Unsupported) as e:
            _logger.debug("OpenVINO does not copy a compiled model: %s", e)
    return _compiled_each(lowered.file, description, properties, first)


def loaded_model(
    file: bytes,
    form: str,
    description: Description,
    properties: Mapping[str, str],
    *,
    is_native: bool = False,
) -> CompiledModel:
    """The compiled model of what ``CompiledModel.kept`` returned. See ``compiled_model`` for the other arguments.

    Raises:
        Unsupported: OpenVINO rejects it.
    """
    if form == _ONNX:
        return _compiled_each(file, description, properties)
    first = _imported(file, description.device, properties)
    return _with_others(first, file, description, properties, is_native=is_native)


def _compiled_each(
    file: bytes, description: Description, properties: Mapping[str, str], *models: Any
) -> CompiledModel:
    """Compiles a lowered model as often as it is needed, less the compiled models that are there."""
    missing = range(terms_of(description).model_count - len(models))
    return CompiledModel([*models, *(_compiled(file, description.device, properties) for _ in missing)], file)


def _with_others(
    first: Any, blob: bytes, description: Description, properties: Mapping[str, str], *, is_native: bool
) -> CompiledModel:
    others = terms_of(description).model_count - 1
    imported = [_imported(blob, description.device, properties) for _ in range(others)]
    may_call = is_native and description.kind == "CPU" and len(blob) <= BLOB_BYTES_MAX
    return CompiledModel([first, *imported], b"", (blob, properties) if may_call else None)


class Slot(OnnxSlot):
    """A request, and tensors over the client's memory and the slot's own.

    Args:
        compiled: OpenVINO's compiled model.
        lowered: The model.

    Attributes:
        native: The compiled model for calls without Python; None: it gives none.

    Raises:
        Error: OpenVINO makes no request.
    """

    native: NativeModel | None = None

    def __init__(self, compiled: Any, lowered: Lowered) -> None:
        super().__init__(lowered)
        try:
            self._request = compiled.create_infer_request()
        except _FAILURES as e:
            raise _failure("prepare_model", e) from e
        self._wait = engine_call(self._request.wait)
        # The package's own class has an ``infer`` that takes longer: it converts inputs and lists outputs.
        self._plain: Any = super(ov.InferRequest, self._request)
        # With real time a LOW job has its class in ``wait``, where its thread does not hold the interpreter's lock.
        self._may_infer = current() is None
        self._dtypes = [np.dtype(argument.dtype) for argument in self.arguments]
        self._sizes = [argument.shape for argument in self.arguments]
        self._set: list[Any] = []
        self._check: Array | None = None
        if lowered.check is not None:
            self._check = engine_memory(lowered.check.dtype, lowered.check.shape or ())
            self._request.set_output_tensor(len(lowered.outputs), ov.Tensor(self._check, shared_memory=True))
        self._is_stopped = False

    def begin(self) -> None:
        """Takes back an earlier ``stop``. Before each run, and before another thread may stop it."""
        self._is_stopped = False

    def stop(self) -> None:
        """Ends the run between two nodes, where the device can. From any thread."""
        self._is_stopped = True
        with contextlib.suppress(*_FAILURES):
            self._request.cancel()

    def compute(self, arguments: list[Any]) -> None:
        """See the base class."""
        request = self._request
        try:
            if arguments is not self._set:
                self._use(arguments)
            started_ns = time.monotonic_ns()
            if self.is_brief and not self._is_stopped:
                self._plain.infer({}, True, False)
            else:
                request.start_async()
                # A stop that came before the start has stopped nothing.
                if self._is_stopped:
                    request.cancel()
                self._wait()
            # Shapes alone decide how long a model takes, so that the next execution takes as long.
            self.is_brief = self._may_infer and time.monotonic_ns() - started_ns < BRIEF_NS
        except _FAILURES as e:
            if self._is_stopped:
                raise GeneralFailure("execution: it was stopped") from e
            raise _failure("execution", e) from e
        if self._check is not None and self._check[0]:
            raise InvalidArgument("execution: an index is out of range")

    def rehearse(self) -> list[Array] | None:
        """Runs some times on memory of its own, before any other run.

        Returns:
            The inputs, which are ones, and the outputs, if the next run is certain to be short; None if it is not, or if it cannot
            be a call without Python.
        """
        arguments = self.arguments
        if not self._may_infer or self._check is not None or any(a.shape is None for a in arguments):
            return None
        request = self._request
        try:
            arrays = [engine_memory(argument.dtype, argument.shape or ()) for argument in arguments]
            for value in arrays[: self.input_count]:
                value.fill(1)  # A legal divisor.
            self._use(self.bind_arrays(arrays))
            request.start_async()
            if not request.wait_for(REHEARSAL_MS):
                request.cancel()
                with contextlib.suppress(RuntimeError):  # It was cancelled.
                    request.wait()
                return None
            for _ in range(REHEARSALS):
                # Of the processor: others that use the machine now would decide about all of the model's calls.
                started_ns = time.thread_time_ns()
                self._plain.infer({}, True, False)
                if time.thread_time_ns() - started_ns < BRIEF_NS:
                    self.is_brief = True
                    break
        except _FAILURES as e:
            _logger.debug("OpenVINO fails at the rehearsal of a model: %s", short_text(e))
        finally:
            self._set = []  # Its memory ends here.
        return arrays if self.is_brief else None

    @property
    def run_address(self) -> int:
        """See ``NativeSlot``."""
        assert self.native is not None, "it has given calls"
        return self.native.run_address

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """See ``NativeSlot``."""
        return self._shapes

    def kept_call(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> KeptCall | None:
        """See ``NativeSlot``. Its tensors are not those of ``run``, which are dropped when many sets of arguments have come."""
        if self.native is None:
            return None
        arrays = self._bound.in_place(inputs, areas)
        return None if arrays is None else self.native.kept_call(arrays)

    def open_output(self, arguments: list[Any], index: int) -> Array:
        """See the base class."""
        result: Array = self._request.get_output_tensor(index).data
        return result

    def _use(self, tensors: list[Any]) -> None:
        self._set = []
        for place, one in enumerate(tensors):
            if one is None:
                continue
            if place < self.input_count:
                self._request.set_input_tensor(place, one)
            else:
                self._request.set_output_tensor(place - self.input_count, one)
        self._set = tensors

    def bind_arrays(self, arrays: Sequence[Array | None]) -> list[Any]:
        """OpenVINO's tensors over arrays."""
        return [
            None
            if array is None or shape is None
            else ov.Tensor(_writable(array, dtype, shape), shared_memory=True)
            for array, dtype, shape in zip(arrays, self._dtypes, self._sizes, strict=True)
        ]


def _writable(array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """An array over the same memory that OpenVINO takes: it rejects one that is read-only, although it only reads inputs."""
    size_bytes = dtype.itemsize * int(np.prod(shape))
    raw: Any = (ctypes.c_char * size_bytes).from_address(address_of(array))
    result: Array = np.frombuffer(raw, dtype).reshape(shape)
    return result

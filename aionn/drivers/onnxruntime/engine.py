"""Sessions of ONNX Runtime: made, checked, bound to the client's memory, run and stopped.

Owns everything that touches ONNX Runtime's Python package: session options, where a session's nodes were placed, bindings in place,
run options, and what its exceptions mean.

Invariants:
1. A session runs on the provider that was asked for, or is not made: there is no silent fallback.
2. ONNX Runtime works directly on memory that a client can change only as ``BoundArguments`` allows.
3. One thread at a time runs a slot. All slots of a model share one session. Python's lock is free while ONNX Runtime computes.

Source: ONNX Runtime's Python API.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import functools
import io
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as states

from aionn.drivers.kit.arguments import Array, OutputArea, address_of, engine_memory
from aionn.drivers.kit.caching import KeptFile
from aionn.drivers.kit.engines.native import native_call
from aionn.drivers.kit.engines.support import Unsupported, is_exhausted, short_text
from aionn.drivers.kit.onnx.device import Compiled, OnnxPreparedModel, OnnxSlot
from aionn.drivers.kit.onnx.lowered import Lowered
from aionn.drivers.kit.threads.classes import engine_call
from aionn.drivers.onnxruntime.c_interface import Failure, interface
from aionn.drivers.onnxruntime.native import FILE_BYTES_MAX, KeptCall, NativeModel, Source
from aionn.drivers.onnxruntime.providers import Provider
from aionn.errors import DeviceUnavailable, Error, GeneralFailure, InvalidArgument, ResourceExhausted
from aionn.hal import NativeCall, OutputShape
from aionn.models.onnx.constants import DTYPES
from aionn.models.onnx.schema import DataType, TensorProto

__all__ = ["Form", "Loading", "Session", "Slot", "check", "compile_session", "restore_session"]

_FAILURES: tuple[type[BaseException], ...] = (
    *(kind for kind in vars(states).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
    IndexError,
)
"""The exceptions of ONNX Runtime."""

_KINDS: dict[int, type[Exception]] = {2: states.InvalidArgument, 11: states.EPFail}
"""The exceptions, by the number of a status, that are not treated as every other one."""

_logger = logging.getLogger("aionn.driver")

_SEVERITY_ERROR = 3

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""The levels of ``logging`` by ONNX Runtime's severity."""


def _log(severity: int, category: str, logid: str, where: str, message: str) -> None:
    _logger.log(_LEVELS[severity], "ONNX Runtime: %s (%s)", message.strip(), where)


def _route_messages() -> None:
    """Makes ONNX Runtime's messages records of this module's logger. Those that matter arrive as exceptions as well."""
    try:
        ort.set_default_logger_callback(_log, _SEVERITY_ERROR)
    except AttributeError:
        # Older versions write to standard error, which the application logs for driver processes.
        ort.set_default_logger_severity(_SEVERITY_ERROR)
    else:
        # A message while the interpreter ends would find no interpreter to call.
        atexit.register(ort.set_default_logger_callback, None)


_route_messages()


@functools.cache
def _load_cuda() -> None:
    """Loads the libraries of CUDA that are installed as packages of Python, which the dynamic loader does not find."""
    try:
        preload = ort.preload_dlls
    except AttributeError:
        return
    # It prints what it does not find, and the error about the provider names that as well.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        preload()
    if printed.getvalue():
        _logger.info("ONNX Runtime: %s", " ".join(printed.getvalue().split()))


_INEXACT_OPTIMIZERS = ("WeightBiasQuantization",)
"""Passes of ONNX Runtime that change results: this one rounds the float weights of a layer between quantised values to 8 bits."""

_RUN_ENTRIES = {
    # Without this entry each run looks for it, raises and catches an exception, at the cost of ten small models.
    "gpu_graph_id": "-1"
}
"""The configuration of each run."""


def _entries(provider: Provider) -> dict[str, str]:
    """The configuration of a session."""
    entries = {
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
        # Otherwise signed 8-bit layers are made unsigned ones, by a pass that fails on nodes of this opset.
        "session.qdqisint8allowed": "1",
    }
    if not _multiplies_exactly():
        entries["session.disable_quant_qdq"] = "1"
    if not provider.is_cpu:
        entries["session.disable_cpu_ep_fallback"] = "1"
    return entries


def _options(thread_count: int, entries: Mapping[str, str]) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = thread_count
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # 0 is everything, 3 errors: they arrive as exceptions, and the rest is about ONNX Runtime's own work.
    options.log_severity_level = 1 if _logger.isEnabledFor(logging.DEBUG) else 4
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


@functools.cache
def _multiplies_exactly() -> bool:
    """Whether the processor adds products of 8-bit numbers up in 32 bits. Others saturate in 16 bits, which gives wrong sums: there
    quantised layers are computed with floats.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    return "vnni" in text or "vendor_id" not in text  # Only the x86 processors state a vendor_id.


class Loading:
    """The making of a session, which another thread may end.

    Args:
        provider: Where it runs.
        thread_count: Threads of one execution.
        is_relaxed: Whether floats may have the range and precision of float16.
        is_native: Whether bursts may call ONNX Runtime without Python.
    """

    def __init__(
        self, provider: Provider, thread_count: int, *, is_relaxed: bool = False, is_native: bool = False
    ) -> None:
        self.provider = provider
        self.is_relaxed = is_relaxed
        self.is_native = is_native and provider.is_cpu
        self._entries = _entries(provider)
        self.options = _options(thread_count, self._entries)

    def configure(self, key: str, value: str) -> None:
        """Adds an entry to the session's configuration."""
        self._entries[key] = value
        self.options.add_session_config_entry(key, value)

    def source(self, file: bytes) -> Source:
        """The origin of a second session with the same options, of the same model with all of its constants."""
        # The package has an argument for these passes, and the C interface an entry.
        entries = {
            **self._entries,
            "optimization.disable_specified_optimizers": ";".join(_INEXACT_OPTIMIZERS),
        }
        level, thread_count = int(self.options.graph_optimization_level), self.options.intra_op_num_threads
        return Source(file, level, thread_count, entries, _RUN_ENTRIES)

    def stop(self) -> None:
        """Ends it: ``make`` raises. From any thread."""
        self.options.set_load_cancellation_flag(True)

    def make(self, file: bytes | str, weights: Sequence[TensorProto] = ()) -> Any:
        """The session of a model, or of the path of its file. The memory of weights beside the file must live as long.

        Raises:
            DeviceUnavailable: The provider is not there, or did not take the model.
            ResourceExhausted: There is no memory left.
            Unsupported: ONNX Runtime rejects the model.
        """
        name = self.provider.name
        available = ort.get_available_providers()
        if name not in available:
            raise DeviceUnavailable(
                f"{name}: the installed ONNX Runtime {ort.__version__} has {', '.join(available)}; install the distribution "
                "that contains it"
            )
        if self.provider.is_cuda:
            _load_cuda()
        try:
            if weights:
                self.options.add_external_initializers(
                    [tensor.name for tensor in weights], [_ort_value(tensor) for tensor in weights]
                )
            session = ort.InferenceSession(
                file,
                self.options,
                providers=[name],
                provider_options=[self.provider.options_for(is_relaxed=self.is_relaxed)],
                disabled_optimizers=list(_INEXACT_OPTIMIZERS),
                # Otherwise a provider that fails is replaced by the CPU's, and the reason, such as exhausted memory, is lost.
                enable_fallback=0,
            )
            session.disable_fallback()
        except _FAILURES as e:
            if is_exhausted(e):
                raise _error_of(e, "prepare_model") from e
            if type(e) is RuntimeError and not self.provider.is_cpu:
                # Errors about the model are of ONNX Runtime's own classes.
                raise DeviceUnavailable(f"{name}: ONNX Runtime cannot start it: {short_text(e)}") from e
            raise Unsupported(f"ONNX Runtime rejects it: {short_text(e)}") from e
        got = session.get_providers()
        if got[0] != name:
            raise DeviceUnavailable(
                f"{name}: ONNX Runtime made a session on {', '.join(got)} instead, as a library or a driver of the provider is "
                "missing; see its messages, and the provider's requirements"
            )
        return session


def _ort_value(tensor: TensorProto) -> Any:
    """A constant in its own memory."""
    assert tensor.raw is not None, "weights have their bytes"
    array = np.frombuffer(tensor.raw, DTYPES[DataType(tensor.data_type)]).reshape(tensor.dims)
    return ort.OrtValue.ortvalue_from_numpy(array)


def check(lowered: Lowered, provider: Provider) -> None:
    """Checks that ONNX Runtime has kernels for a model.

    Raises:
        Unsupported: It has not, or rejects the model.
    """
    loading = Loading(provider, 1)
    loading.options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    loading.configure("session.disable_prepacking", "1")
    loading.make(lowered.file, lowered.weights)


class Form(enum.StrEnum):
    """The kind of a model's file: an ONNX model that is to be optimised or not, or ONNX Runtime's optimised one."""

    OPTIMIZABLE = "optimizable"
    PLAIN = "plain"
    OPTIMIZED = "optimized"


class Session(Compiled):
    """A session, which all slots share.

    Args:
        session: ONNX Runtime's.
        lowered: The model that it was made of; None for one from a cache, which is not kept again.
        form: The form of the file.
        provider: Where it runs.
        source: The origin of a second session, which is called without Python; None where bursts call this one alone.

    Attributes:
        form: See above.
    """

    def __init__(
        self,
        session: Any,
        lowered: Lowered | None,
        form: Form,
        provider: Provider,
        source: Source | None = None,
    ) -> None:
        self.session = session
        self.form = form
        self._lowered = lowered
        self._provider = provider
        self._source = source

    def make_slots(self, lowered: Lowered, count: int) -> Sequence[Slot]:
        """See the base class."""
        native = None
        # The C interface runs no check, and an output of unknown shape has no place in the client's memory.
        if (
            self._source is not None
            and lowered.check is None
            and all(argument.shape is not None for argument in lowered.outputs)
        ):
            native = NativeModel(self._source, (*lowered.inputs, *lowered.outputs), len(lowered.inputs))
        self._source = None
        slots = [self._slot(lowered, native) for _ in range(count)]
        if not self._provider.is_cpu:
            # A first execution loads kernels, and chooses among those of a layer: it takes a second.
            _try_out(slots[0])
        return slots

    def runs(self, lowered: Lowered) -> bool:
        """Whether it computes something of zeros."""
        return _try_out(self._slot(lowered))

    def _slot(self, lowered: Lowered, native: NativeModel | None = None) -> Slot:
        return Slot(self.session, lowered, copies_inputs=not self._provider.is_cpu, native=native)

    def native_call(
        self, prepared: OnnxPreparedModel, slots: Sequence[Slot], arguments: Any
    ) -> NativeCall | None:
        """See the base class."""
        call = native_call(prepared, slots, arguments, "ONNX Runtime")
        if call is None:
            return None
        _, calls = cast(tuple[object, Sequence[KeptCall]], call.kept)

        def failed(status: int) -> Error:
            # One thread makes the calls of a burst, one after another.
            found = [failure for kept in calls if (failure := kept.take_failure()) is not None]
            failure = found[0] if found else Failure(status, f"status {status}")
            return _error_of(_KINDS.get(failure.code, RuntimeError)(failure.message))

        return call._replace(failed=failed)

    def kept(self) -> tuple[str, bytes]:
        """The optimised model."""
        assert self._lowered is not None, "only a compilation is kept"
        file = self._lowered.whole_file()
        if self.form == Form.OPTIMIZABLE:
            return Form.OPTIMIZED.value, _optimized_bytes(file, self._provider)
        return self.form.value, file


def compile_session(lowered: Lowered, loading: Loading) -> Session:
    """The session of a model. Raises as ``Loading.make``.

    A pass of the optimiser may write a graph that no kernel can run: ONNX Runtime moves a Transpose behind a Resize, for example,
    whose kernel has not every order of axes. So the session of a model with a Transpose is run once, and made again without the
    optimiser where that fails. A run takes as long as the making of the session, and passes that move no axes keep to kernels.
    """
    provider = loading.provider
    found = _session(lowered, loading, Form.OPTIMIZABLE)
    if not _moves_axes(lowered) or found.runs(lowered):
        return found
    plain = Loading(
        provider,
        loading.options.intra_op_num_threads,
        is_relaxed=loading.is_relaxed,
        is_native=loading.is_native,
    )
    plain.options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    other = _session(lowered, plain, Form.PLAIN)
    # Zeros may be illegal values as well, which both sessions report.
    return other if other.runs(lowered) else found


def _session(lowered: Lowered, loading: Loading, form: Form) -> Session:
    source = None
    size_bytes = len(lowered.file) + sum(len(tensor.raw or b"") for tensor in lowered.weights)
    if loading.is_native and size_bytes <= FILE_BYTES_MAX:
        source = loading.source(lowered.whole_file())
    return Session(loading.make(lowered.file, lowered.weights), lowered, form, loading.provider, source)


def _moves_axes(lowered: Lowered) -> bool:
    return any("Transpose" in kernel for kernel in lowered.kernels)


def _try_out(slot: Slot) -> bool:
    """Whether a slot computes something of zeros."""
    try:
        slot.try_out()
    except Error as e:
        _logger.debug("ONNX Runtime fails on zeros: %s", e)
        return False
    return True


def _optimized_bytes(file: bytes, provider: Provider) -> bytes:
    """A model after ONNX Runtime's optimisations, in its own format.

    Raises:
        Unsupported: ONNX Runtime cannot write it.
    """
    with tempfile.TemporaryDirectory(prefix="aionn-ort-") as folder:
        path = Path(folder) / "model.ort"
        loading = Loading(provider, 1)
        loading.options.optimized_model_filepath = str(path)
        loading.configure("session.save_model_format", "ORT")
        loading.make(file)
        try:
            return path.read_bytes()
        except OSError as e:
            raise Unsupported(f"ONNX Runtime wrote no optimised model: {e}") from e


def restore_session(file: KeptFile, form: str, loading: Loading) -> Session:
    """The session of what ``Session.kept`` returned. Raises as ``Loading.make``.

    ONNX Runtime reads the optimised form from a path: it copies bytes once more, with the interpreter's lock. A model in the other
    forms, and one for another provider, could name files beside its own: these are given as bytes.
    """
    if form not in list(Form):
        raise Unsupported(f"expected a form of {', '.join(Form)}, got {form!r}")
    path = None
    if form == Form.OPTIMIZED:
        loading.configure("session.load_model_format", "ORT")
        path = file.path if loading.provider.is_cpu else None
    loading.options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    is_kept = loading.is_native and file.size_bytes <= FILE_BYTES_MAX
    content = b"" if path is not None else file.take()
    session = loading.make(content if path is None else path)
    source = loading.source(content or file.take()) if is_kept else None
    return Session(session, None, Form(form), loading.provider, source)


class _Binding(NamedTuple):
    """The arguments of a run.

    Attributes:
        bound: ONNX Runtime's binding.
        inputs: The arguments of ``bind_input`` for the inputs that are bound anew before each run.
    """

    bound: Any
    inputs: list[tuple[Any, ...]]


class Slot(OnnxSlot):
    """Bindings to the client's memory and the slot's own, and run options.

    Args:
        session: Shared by all slots.
        lowered: The model.
        copies_inputs: Whether the provider has memory of its own: ONNX Runtime copies an input there when it is bound, and not when
            the session runs.
        native: Shared by all slots; None where bursts call ONNX Runtime by Python alone.
    """

    def __init__(
        self,
        session: Any,
        lowered: Lowered,
        *,
        copies_inputs: bool = False,
        native: NativeModel | None = None,
    ) -> None:
        super().__init__(lowered)
        self._native = native
        self._session = session
        self._copies_inputs = copies_inputs
        self._run = engine_call(session.run_with_iobinding)
        # ONNX Runtime allocates these outputs in each run.
        self._open = [argument.name for argument in lowered.outputs if argument.shape is None]
        self._options = ort.RunOptions()
        for key, value in _RUN_ENTRIES.items():
            self._options.add_run_config_entry(key, value)
        self._options.log_severity_level = 4
        self._check: Array | None = None
        self._check_name = ""
        if lowered.check is not None:
            self._check = engine_memory(lowered.check.dtype, lowered.check.shape or ())
            self._check_name = lowered.check.name
        self._is_stopped = False
        # ONNX Runtime has their addresses alone: they are released behind the session.
        self._weights = lowered.weights

    def begin(self) -> None:
        """Takes back an earlier ``stop``. Before each run, and before another thread may stop it."""
        if self._is_stopped:  # Otherwise each run would pay for a call of ONNX Runtime.
            self._options.terminate = self._is_stopped = False

    def stop(self) -> None:
        """Ends the run between two nodes. From any thread."""
        self._is_stopped = self._options.terminate = True

    def compute(self, arguments: _Binding) -> None:
        """See the base class. ONNX Runtime reports an index that is out of range on the CPU, and the model on other providers."""
        native = self._native
        if native is None:
            self._compute(arguments)
            return
        started_ns = native.clock()
        self._compute(arguments)
        native.note(native.clock() - started_ns)

    def _compute(self, arguments: _Binding) -> None:
        bound = arguments.bound
        for name in self._open:
            bound.bind_output(name, "cpu")
        try:
            for given in arguments.inputs:
                bound.bind_input(*given)
            self._run(bound, self._options)
        except _FAILURES as e:
            raise _error_of(e) from e
        if self._check is not None and self._check[0]:
            raise InvalidArgument("execution: an index is out of range")

    def open_output(self, arguments: _Binding, index: int) -> Array:
        """See the base class."""
        result: Array = arguments.bound.get_outputs()[index].numpy()
        return result

    @property
    def shapes(self) -> Sequence[OutputShape]:
        """The outputs' shapes of an execution that copies none of them."""
        return self._shapes

    @property
    def run_address(self) -> int:
        """The address of the function for ``KeptCall.words``, which returns 0 for success. Only where there are calls."""
        return interface().call_address

    def kept_call(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> KeptCall | None:
        """An execution as a call of the C interface, for any number of times; None where an argument has to be copied, or the model
        is not brief.
        """
        if self._native is None or (arrays := self._bound.in_place(inputs, areas)) is None:
            return None
        session = self._native.session()
        return None if session is None else session.bind(arrays)

    def try_out(self) -> None:
        """Computes something of zeros. Raises as ``compute``."""
        own = [
            None if argument.shape is None else engine_memory(argument.dtype, argument.shape)
            for argument in self.arguments
        ]
        # A binding has addresses alone: the arrays live until the end of this function.
        self.compute(self.bind_arrays(own))

    def bind_arrays(self, arrays: Sequence[Array | None]) -> _Binding:
        """The binding of these arrays."""
        again: list[tuple[Any, ...]] = []
        binding = self._session.io_binding()
        for place, (argument, array) in enumerate(zip(self.arguments, arrays, strict=True)):
            if array is None or argument.shape is None:
                binding.bind_output(argument.name, "cpu")
                continue
            kind, shape = np.dtype(argument.dtype), list(argument.shape)
            given = (argument.name, "cpu", 0, kind, shape, address_of(array))
            if place >= self.input_count:
                binding.bind_output(*given)
            elif self._copies_inputs:
                again.append(given)
            else:
                binding.bind_input(*given)
        if self._check is not None:
            flag = self._check
            binding.bind_output(self._check_name, "cpu", 0, flag.dtype, list(flag.shape), address_of(flag))
        return _Binding(binding, again)


def _error_of(error: BaseException, where: str = "execution") -> Error:
    """The error for a failed run, or for another call that failed for want of memory."""
    text = f"ONNX Runtime: {short_text(error)}"
    if isinstance(error, states.InvalidArgument) or "out of data bounds" in text:
        return InvalidArgument(f"execution: {text}")
    if isinstance(error, states.EPFail):
        return DeviceUnavailable(f"execution: {text}")
    if is_exhausted(error):
        return ResourceExhausted(f"{where}: {text}")
    return GeneralFailure(f"execution: {text}")

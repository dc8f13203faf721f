"""Executions of brief models as calls of ONNX Runtime's C interface: a session of its own, and bindings to the client's memory.

Owns which models have such calls, their session beside that of Python, which cannot be called without Python, and bindings that
live as long as a burst may use them.

Invariants:
1. The session is made of the same file, with the same options, as that of Python: it computes the same bytes.
2. A model has one only if an execution ends before it could be stopped (``BRIEF_NS``): nothing stops a native call.
3. ONNX Runtime works directly on memory that a client can change only as ``BoundArguments`` allows.
4. ONNX Runtime's objects end when no call uses them, and stay when the process ends: a thread may still make a call then.

Source: ONNX Runtime's C interface.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from aionn.drivers.kit.arguments import Array, address_of, engine_memory
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.lowered import Argument
from aionn.drivers.onnxruntime.c_interface import Failure, Interface, interface
from aionn.models.onnx.constants import DTYPE_NAMES

__all__ = ["BRIEF_NS", "FILE_BYTES_MAX", "KeptCall", "NativeModel", "Source"]

BRIEF_NS = 500_000
"""An execution that takes less ends about as soon as it could be stopped; see the same figure of the driver for OpenVINO."""

TRIED_NS = 20 * BRIEF_NS
"""A model whose executions by Python take longer is not tried: the first one takes some times as long as later ones."""

TRIALS = 3
"""Executions of a new session, whose quickest decides: the first one allocates memory."""

FILE_BYTES_MAX = 4 << 20
"""The largest file of a model that has a second session. In ``BRIEF_NS`` a processor reads about as many bytes of constants."""

_SEQUENTIAL, _FATAL = 0, 4

_logger = logging.getLogger("aionn.driver")

_ELEMENT_TYPES = {name: int(number) for number, name in DTYPE_NAMES.items()}


class Source(NamedTuple):
    """All that a session is made of.

    Attributes:
        file: The model, with all of its constants.
        level: ONNX Runtime's number of the level of its optimiser.
        thread_count: Threads of one execution.
        entries: The entries of the session's configuration.
        run_entries: Those of each run's.
    """

    file: bytes
    level: int
    thread_count: int
    entries: Mapping[str, str]
    run_entries: Mapping[str, str]


class NativeSession:
    """A session of the C interface, which threads may run concurrently.

    Args:
        source: Its origin.
        arguments: The model's inputs and outputs.
        input_count: The number of inputs among them.

    Attributes:
        interface: The C interface.
        words: The first arguments of a run: the session and the run options.

    Raises:
        Unsupported: There is no C interface, or ONNX Runtime rejects something.
    """

    def __init__(self, source: Source, arguments: Sequence[Argument], input_count: int) -> None:
        self.interface = interface()
        self._arguments = arguments
        self._input_count = input_count
        handles: list[tuple[str, int]] = []
        weakref.finalize(self, _release, self.interface, handles).atexit = False
        session = self._make_session(source)
        handles.append(("ReleaseSession", session))
        options = self.interface.make("CreateRunOptions")
        handles.append(("ReleaseRunOptions", options))
        self.interface.call("RunOptionsSetRunLogSeverityLevel", options, _FATAL)
        for key, value in source.run_entries.items():
            self.interface.call("AddRunConfigEntry", options, key.encode(), value.encode())
        self.words = session, options

    def _make_session(self, source: Source) -> int:
        call = self.interface.call
        options = self.interface.make("CreateSessionOptions")
        try:
            call("SetIntraOpNumThreads", options, source.thread_count)
            call("SetInterOpNumThreads", options, 1)
            call("SetSessionExecutionMode", options, _SEQUENTIAL)
            # A message would call Python. Errors arrive as statuses.
            call("SetSessionLogSeverityLevel", options, _FATAL)
            call("SetSessionGraphOptimizationLevel", options, source.level)
            for key, value in source.entries.items():
                call("AddSessionConfigEntry", options, key.encode(), value.encode())
            return self.interface.make_session(source.file, options)
        finally:
            self.interface.release("ReleaseSessionOptions", options)

    def bind(self, arrays: Sequence[Array]) -> KeptCall:
        """The call that reads and writes these arrays, inputs first."""
        api = self.interface
        handles: list[tuple[str, int]] = []
        place = ctypes.c_void_p()
        try:
            binding = api.make("CreateIoBinding", self.words[0])
            handles.append(("ReleaseIoBinding", binding))
            for index, (argument, array) in enumerate(zip(self._arguments, arrays, strict=True)):
                assert argument.shape is not None, "every shape is known"
                kind = _ELEMENT_TYPES[argument.dtype]
                value = api.make_tensor(address_of(array), array.nbytes, argument.shape, kind)
                handles.append(("ReleaseValue", value))
                function = "BindInput" if index < self._input_count else "BindOutput"
                api.call(function, binding, argument.name.encode(), value)
        except BaseException:
            _release(api, handles)
            raise
        return KeptCall(self, binding, place, handles, arrays)

    def quickest_ns(self, clock: Callable[[], int]) -> int:
        """The time of an execution, by a clock in nanoseconds.

        Raises:
            Unsupported: It failed.
        """
        own = [engine_memory(a.dtype, a.shape or ()) for a in self._arguments]
        kept = self.bind(own)
        times = []
        for _ in range(TRIALS):
            started_ns = clock()
            self.interface.call("RunWithBinding", *kept.words[2:5])
            times.append(clock() - started_ns)
        return min(times)


class KeptCall:
    """An execution as words of a machine; ONNX Runtime's objects for its arguments live as long as this does.

    Args:
        session: The session that is run.
        binding: ONNX Runtime's binding.
        place: Where the status of a failed call goes.
        handles: The objects that end with this one.
        arrays: The arrays that ONNX Runtime uses in place.

    Attributes:
        words: The arguments of ``aionn_ort_call``.
    """

    def __init__(
        self,
        session: NativeSession,
        binding: int,
        place: ctypes.c_void_p,
        handles: list[tuple[str, int]],
        arrays: Sequence[Array],
    ) -> None:
        self.words: tuple[int, ...] = (
            session.interface.address_of("RunWithBinding"),
            ctypes.addressof(place),
            *session.words,
            binding,
            0,
        )
        self._kept = session, arrays
        self._api, self._place = session.interface, place
        # The session lives until then, as its bindings use it.
        weakref.finalize(self, _end, session, place, handles).atexit = False

    def take_failure(self) -> Failure | None:
        """Returns the failure of a call, once; None: no call has failed."""
        status, self._place.value = self._place.value, None
        return None if status is None else self._api.failure_of(status)


class NativeModel:
    """The session of a model's native calls, made when one is first asked for.

    Args:
        source: Its origin.
        arguments: The model's inputs and outputs.
        input_count: The number of inputs among them.

    Attributes:
        clock: Measures executions, in nanoseconds: those of one thread by its processor time, since it may wait for a processor.
        shortest_ns: The shortest execution by Python; None before the first. Written by any slot.
    """

    def __init__(self, source: Source, arguments: Sequence[Argument], input_count: int) -> None:
        self._source: Source | None = source
        self._arguments = arguments
        self._input_count = input_count
        self._turn = threading.Lock()
        self._session: NativeSession | None = None
        self.clock = time.thread_time_ns if source.thread_count == 1 else time.monotonic_ns
        self.shortest_ns: int | None = None

    def note(self, took_ns: int) -> None:
        """Notes the duration of an execution by Python."""
        if self.shortest_ns is None or took_ns < self.shortest_ns:
            self.shortest_ns = took_ns

    def session(self) -> NativeSession | None:
        """The session; None for a model that is not brief, or that ONNX Runtime does not make one for. From any thread; blocks for
        the making of a session.
        """
        if self.shortest_ns is not None and self.shortest_ns > TRIED_NS:
            return None
        with self._turn:
            source, self._source = self._source, None  # Tried once; the session has the file's contents.
            if source is not None:
                self._session = self._made(source)
            return self._session

    def _made(self, source: Source) -> NativeSession | None:
        try:
            session = NativeSession(source, self._arguments, self._input_count)
            took_ns = session.quickest_ns(self.clock)
        except Unsupported as e:
            _logger.info("ONNX Runtime: bursts call it by Python: %s", e)
            return None
        return session if took_ns < BRIEF_NS else None


def _release(api: Interface, handles: list[tuple[str, int]]) -> None:
    """Ends objects, the last one made first."""
    while handles:
        api.release(*handles.pop())


def _end(session: NativeSession, place: ctypes.c_void_p, handles: list[tuple[str, int]]) -> None:
    """Ends the objects of a call, and a status that was not taken."""
    api = session.interface
    if place.value is not None:
        api.release("ReleaseStatus", place.value)
        place.value = None
    _release(api, handles)

"""ONNX Runtime's C interface: the functions that native calls need, of the runtime that the Python package has loaded.

Owns the way to the interface, the versions that it was tried with, the places and signatures of functions, and statuses, which are
objects that have to be released.

Invariants:
1. A version of ONNX Runtime that is not listed is never called in this way.
2. There is one runtime in the process: its environment, allocators and messages are those of the Python package.

Source: ``OrtApi`` in ONNX Runtime's public header onnxruntime_c_api.h, a table of functions to whose end others are added: a place
in it never changes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime as ort

from aionn.drivers.kit.engines.support import Unsupported

__all__ = ["Failure", "Interface", "interface", "is_known_version"]

VERSIONS_KNOWN = ("1.32.",)
"""Versions that this was tried with. The table promises more; the versions of the engine that the tests never run do not."""

API_VERSION = 22
"""The table that is asked for: that of the first version that the driver takes."""

_ENTRY = Path(__file__).with_name("_entry.abi3.so")

_Pointer = ctypes.c_void_p
_Size = ctypes.c_size_t
_Text = ctypes.c_char_p
_FATAL = 4

_BUILD_INFO = 254
"""The place of ``GetBuildInfoString``, behind all that are used: its text shows that none is missing before."""

_CALLS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "CreateStatus": (0, (ctypes.c_int, _Text)),
    "CreateEnv": (3, (ctypes.c_int, _Text, _Pointer)),
    "CreateSessionFromArray": (8, (_Pointer, _Text, _Size, _Pointer, _Pointer)),
    "CreateSessionOptions": (10, (_Pointer,)),
    "SetSessionExecutionMode": (13, (_Pointer, ctypes.c_int)),
    "SetSessionLogSeverityLevel": (22, (_Pointer, ctypes.c_int)),
    "SetSessionGraphOptimizationLevel": (23, (_Pointer, ctypes.c_int)),
    "SetIntraOpNumThreads": (24, (_Pointer, ctypes.c_int)),
    "SetInterOpNumThreads": (25, (_Pointer, ctypes.c_int)),
    "CreateRunOptions": (39, (_Pointer,)),
    "RunOptionsSetRunLogSeverityLevel": (41, (_Pointer, ctypes.c_int)),
    "CreateTensorWithDataAsOrtValue": (
        49,
        (_Pointer, _Pointer, _Size, _Pointer, _Size, ctypes.c_int, _Pointer),
    ),
    "CreateCpuMemoryInfo": (69, (ctypes.c_int, ctypes.c_int, _Pointer)),
    "AddSessionConfigEntry": (130, (_Pointer, _Text, _Text)),
    "RunWithBinding": (133, (_Pointer, _Pointer, _Pointer)),
    "CreateIoBinding": (134, (_Pointer, _Pointer)),
    "BindInput": (136, (_Pointer, _Text, _Pointer)),
    "BindOutput": (137, (_Pointer, _Text, _Pointer)),
    "AddRunConfigEntry": (165, (_Pointer, _Text, _Text)),
}
"""Functions that return a status, NULL for success: place in the table, and arguments."""

_RELEASES = {
    "ReleaseStatus": 93,
    "ReleaseSession": 95,
    "ReleaseValue": 96,
    "ReleaseRunOptions": 97,
    "ReleaseSessionOptions": 100,
    "ReleaseIoBinding": 135,
}
"""Functions that end an object, and return nothing."""

_NAMES = (
    "OK", "FAIL", "INVALID_ARGUMENT", "NO_SUCHFILE", "NO_MODEL", "ENGINE_ERROR", "RUNTIME_EXCEPTION", "INVALID_PROTOBUF",
    "MODEL_LOADED", "NOT_IMPLEMENTED", "INVALID_GRAPH", "EP_FAIL",
)  # fmt: skip
"""The names of statuses by their numbers, as the Python package writes them."""


def is_known_version() -> bool:
    """Whether the installed ONNX Runtime is one that this was tried with."""
    return bool(ort.__version__.startswith(VERSIONS_KNOWN))


class Failure(NamedTuple):
    """The contents of a status.

    Attributes:
        code: ONNX Runtime's number.
        message: The text, as an exception of the Python package has it.
    """

    code: int
    message: str


class Interface:
    """The functions.

    Attributes:
        call_address: The address of a function as ``NativeCall`` wants it. Its words are the address of a function that returns a
            status, that of the pointer that the status of a failed call is written to, and the function's arguments.

    Raises:
        Unsupported: The version is not known, the library of this driver was not built, or a check fails.
    """

    def __init__(self) -> None:
        if not is_known_version():
            raise Unsupported(f"ONNX Runtime's C interface: version {ort.__version__} is not known")
        base = self._registered()
        get_api = ctypes.CFUNCTYPE(_Pointer, ctypes.c_uint32)(_word(base))
        get_version = ctypes.CFUNCTYPE(_Text)(_word(base + ctypes.sizeof(_Pointer)))
        if (found := get_version()) != ort.__version__.encode():
            raise Unsupported(f"ONNX Runtime's C interface: expected {ort.__version__}, got {found!r}")
        table = get_api(API_VERSION)
        if not table:
            raise Unsupported(f"ONNX Runtime's C interface: it has no table {API_VERSION}")
        self._table: int = table
        self._calls = {
            name: ctypes.CFUNCTYPE(_Pointer, *arguments)(self._at(place))
            for name, (place, arguments) in _CALLS.items()
        }
        self._releases = {
            name: ctypes.CFUNCTYPE(None, _Pointer)(self._at(place)) for name, place in _RELEASES.items()
        }
        self._code_of = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer)(self._at(1))
        self._message_of = ctypes.CFUNCTYPE(_Text, _Pointer)(self._at(2))
        self._check_table()
        # The process's one, which the Python package has made. No reference is given back: others count theirs.
        self._environment = self.make("CreateEnv", _FATAL, b"aionn")
        self._memory = self.make("CreateCpuMemoryInfo", 0, 0)

    def _registered(self) -> int:
        """The address of the ``OrtApiBase``."""
        try:
            entry = ctypes.CDLL(str(_ENTRY))
            call, give = entry.aionn_ort_call, entry.aionn_ort_interface
            ort.SessionOptions().register_custom_ops_library(str(_ENTRY))
        except Exception as e:  # The library is missing, or the package refuses it in one of its exceptions.
            raise Unsupported(f"ONNX Runtime's C interface: {e}") from e
        address = ctypes.cast(call, _Pointer).value
        give.restype = _Pointer
        base = give()
        if not base or address is None:
            raise Unsupported("ONNX Runtime's C interface: the package gives none")
        self.call_address = address
        return int(base)

    def _at(self, place: int) -> int:
        return _word(self._table + place * ctypes.sizeof(_Pointer))

    def _check_table(self) -> None:
        """Checks that the table has its functions where they are expected: a status keeps what it is made of, and behind the last
        function that is used is one whose text is known.
        """
        status = self._calls["CreateStatus"](1, b"aionn")
        if self.failure_of(status) != (1, "[ONNXRuntimeError] : 1 : FAIL : aionn"):
            raise Unsupported("ONNX Runtime's C interface: a status has lost its message")
        information = ctypes.CFUNCTYPE(_Text)(self._at(_BUILD_INFO))() or b""
        if not information.startswith(b"ORT Build Info"):
            raise Unsupported(
                f"ONNX Runtime's C interface: expected the build's description, got {information!r}"
            )

    def address_of(self, name: str) -> int:
        """The address of a function that returns a status."""
        return self._at(_CALLS[name][0])

    def failure_of(self, status: int) -> Failure:
        """The contents of the status of a failed call. Releases the status."""
        code = self._code_of(status)
        message = (self._message_of(status) or b"").decode(errors="replace")
        self.release("ReleaseStatus", status)
        name = _NAMES[code] if 0 <= code < len(_NAMES) else "GENERAL_ERROR"
        return Failure(code, f"[ONNXRuntimeError] : {code} : {name} : {message}")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function, without the interpreter's lock.

        Raises:
            Unsupported: It failed.
        """
        status = self._calls[name](*arguments)
        if status:
            raise Unsupported(f"{name}: {self.failure_of(status).message}")

    def make(self, name: str, *arguments: Any) -> int:
        """Calls a function whose last argument takes a new object. Raises as ``call``."""
        handle = _Pointer()
        self.call(name, *arguments, ctypes.byref(handle))
        assert handle.value is not None, "it succeeded"
        return handle.value

    def release(self, name: str, handle: int) -> None:
        """Ends an object."""
        self._releases[name](handle)

    def make_session(self, file: bytes, options: int) -> int:
        """A session of a model, which ONNX Runtime copies. Raises as ``call``."""
        return self.make("CreateSessionFromArray", self._environment, file, len(file), options)

    def make_tensor(self, address: int, size_bytes: int, shape: tuple[int, ...], element_type: int) -> int:
        """A tensor over memory of the caller, which must live as long. Raises as ``call``."""
        extents = (ctypes.c_int64 * len(shape))(*shape)
        return self.make(
            "CreateTensorWithDataAsOrtValue",
            self._memory,
            address,
            size_bytes,
            extents,
            len(shape),
            element_type,
        )


def _word(address: int) -> int:
    """The address that is stored at an address."""
    return _Pointer.from_address(address).value or 0


_turn = threading.Lock()


@functools.cache
def _made() -> Interface | Unsupported:
    try:
        return Interface()
    except Unsupported as e:
        return e


def interface() -> Interface:
    """The process's one, made when it is first needed. From any thread.

    Raises:
        Unsupported: See ``Interface``.
    """
    with _turn:
        made = _made()
    if isinstance(made, Unsupported):
        raise made
    return made

"""Executions of brief models as calls of OpenVINO's C interface: compiled models of its own, and requests over the client's memory.

Owns the library, the versions whose signatures are known, and everything that is made by it. A request of OpenVINO's Python package
cannot be called without Python, so that a model that has such calls is compiled once more for each slot, from the exported bytes.

Invariants:
1. A version of OpenVINO that is not listed is never called: its signatures may be others.
2. The library has one core, for as long as the process: see ``engine._core``, whose plugin it does not share.
3. One thread at a time runs a compiled model: each slot of the device has one. Each call has a request of its own, whose tensors
   never change.
4. OpenVINO's objects end when no call uses them, and stay when the process ends: a thread may still make a call then.

Source: OpenVINO's C API.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aionn.drivers.kit.arguments import Array, address_of, engine_memory
from aionn.drivers.kit.engines.c_library import CLibrary, Handle
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.onnx.lowered import Argument

__all__ = ["BLOB_BYTES_MAX", "KeptCall", "NativeModel", "is_known_version", "native_models"]

VERSIONS_KNOWN = ("2026.4.",)
"""Versions that the signatures below were tried with."""

BLOB_BYTES_MAX = 4 << 20
"""The largest exported model that is compiled once more. A processor reads about as many bytes of constants in ``BRIEF_NS``."""

_CPU = b"CPU"

_logger = logging.getLogger("aionn.driver")
_turn = threading.Lock()


class _Shape(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int64), ("dimensions", ctypes.POINTER(ctypes.c_int64)))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ov_core_create": (ctypes.POINTER(Handle),),
    # Its arguments from the third one on are variable, and ctypes passes them by their own types.
    "ov_core_set_property": (Handle, ctypes.c_char_p),
    "ov_core_import_model": (
        Handle,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.POINTER(Handle),
    ),
    "ov_compiled_model_create_infer_request": (Handle, ctypes.POINTER(Handle)),
    "ov_infer_request_get_input_tensor_by_index": (Handle, ctypes.c_size_t, ctypes.POINTER(Handle)),
    "ov_infer_request_get_output_tensor_by_index": (Handle, ctypes.c_size_t, ctypes.POINTER(Handle)),
    "ov_infer_request_set_input_tensor_by_index": (Handle, ctypes.c_size_t, Handle),
    "ov_infer_request_set_output_tensor_by_index": (Handle, ctypes.c_size_t, Handle),
    "ov_infer_request_infer": (Handle,),
    "ov_tensor_get_element_type": (Handle, ctypes.POINTER(ctypes.c_int)),
    "ov_tensor_get_byte_size": (Handle, ctypes.POINTER(ctypes.c_size_t)),
    "ov_tensor_create_from_host_ptr": (ctypes.c_int, _Shape, ctypes.c_void_p, ctypes.POINTER(Handle)),
}
_ENDS = dict.fromkeys(("ov_compiled_model_free", "ov_infer_request_free", "ov_tensor_free"), (Handle,))


def is_known_version() -> bool:
    """Whether the installed OpenVINO is one whose C interface is known."""
    return importlib.metadata.version("openvino").startswith(VERSIONS_KNOWN)


class _Library(CLibrary):
    """The shared library and its core, of which a process has one."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("openvino")
        assert spec is not None and spec.origin is not None, "it was imported"
        # The end of its name has the version.
        found = sorted((Path(spec.origin).parent / "libs").glob("libopenvino_c.so*"))
        if not found:
            raise Unsupported("OpenVINO's C interface: the installed package lacks libopenvino_c.so")
        super().__init__(str(found[0]), "OpenVINO", _SIGNATURES, _ENDS)
        self._core = self.make("ov_core_create")

    def imported(self, blob: bytes, properties: Mapping[str, str]) -> ctypes.c_void_p:
        """A compiled model of exported bytes. Called with the turn held: properties are those of the core."""
        for name, value in properties.items():
            words = ctypes.c_char_p(name.encode()), ctypes.c_char_p(value.encode())
            self.check(name, self.functions.ov_core_set_property(self._core, _CPU, *words))
        return self.make("ov_core_import_model", self._core, blob, len(blob), _CPU)


@functools.cache
def _library() -> _Library:
    return _Library()


class KeptCall:
    """A call of ``ov_infer_request_infer`` as words of a machine; its request lives as long as this does.

    Args:
        model: The compiled model.
        request: The request, whose tensors are set; it is owned by this object from now on.
        arrays: The arrays that OpenVINO uses in place.

    Attributes:
        words: The arguments.
    """

    def __init__(self, model: NativeModel, request: ctypes.c_void_p, arrays: Sequence[Array]) -> None:
        assert request.value is not None, "it was made"
        self.words: tuple[int, ...] = (request.value,)
        self._kept = model, arrays
        # The model lives until then: the collector ends the objects of a cycle in any order.
        end = weakref.finalize(self, _free_request, model, request)
        end.atexit = False  # A thread may still make the call then.


class NativeModel:
    """A compiled model of the C interface, for one slot of the device.

    Args:
        blob: The exported bytes.
        properties: Those that it was compiled with.
        arguments: Its inputs, then its outputs; every shape is known.
        input_count: The number of its inputs.

    Attributes:
        functions: OpenVINO's library.

    Raises:
        Unsupported: The C interface is not known, or rejects the model.
    """

    def __init__(
        self, blob: bytes, properties: Mapping[str, str], arguments: Sequence[Argument], input_count: int
    ) -> None:
        with _turn:
            library = self._library = _library()
            compiled = library.imported(blob, properties)
        self.functions = library.functions
        # OpenVINO reads the constants where they are, in the exported bytes, as long as the compiled model lives.
        end = weakref.finalize(self, _free_model, self.functions, compiled, blob)
        end.atexit = False
        self._compiled = compiled
        self._shapes = [argument.shape or () for argument in arguments]
        self._places = [
            ("input", place) if place < input_count else ("output", place - input_count)
            for place in range(len(arguments))
        ]
        self._types = self._element_types([argument.dtype for argument in arguments])

    def _element_types(self, dtypes: Sequence[str]) -> list[int]:
        """OpenVINO's numbers of the elements' types, which are those of the model's own tensors."""
        library, functions = self._library, self.functions
        request = library.make("ov_compiled_model_create_infer_request", self._compiled)
        try:
            found = []
            for (kind, index), shape, dtype in zip(self._places, self._shapes, dtypes, strict=True):
                tensor = library.make(f"ov_infer_request_get_{kind}_tensor_by_index", request, index)
                number, size_bytes = ctypes.c_int(), ctypes.c_size_t()
                library.check("type", functions.ov_tensor_get_element_type(tensor, ctypes.byref(number)))
                library.check("size", functions.ov_tensor_get_byte_size(tensor, ctypes.byref(size_bytes)))
                functions.ov_tensor_free(tensor)
                expected = np.dtype(dtype).itemsize * math.prod(shape)
                if size_bytes.value != expected:
                    raise Unsupported(f"{kind} {index}: expected {expected} bytes, got {size_bytes.value}")
                found.append(number.value)
            return found
        finally:
            functions.ov_infer_request_free(request)

    @property
    def run_address(self) -> int:
        """The address of OpenVINO's function for ``KeptCall.words``, which returns 0 for success."""
        address = ctypes.cast(self.functions.ov_infer_request_infer, ctypes.c_void_p).value
        assert address is not None, "the library was loaded"
        return address

    def kept_call(self, arrays: Sequence[Array]) -> KeptCall:
        """An execution as one call of OpenVINO, for any number of times.

        Args:
            arrays: Memory for each input, then for each output.

        Raises:
            Unsupported: OpenVINO rejects the memory.
        """
        library = self._library
        request = library.make("ov_compiled_model_create_infer_request", self._compiled)
        call = KeptCall(self, request, arrays)
        for (kind, index), number, shape, array in zip(
            self._places, self._types, self._shapes, arrays, strict=True
        ):
            extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
            tensor = library.make(
                "ov_tensor_create_from_host_ptr", number, _Shape(len(shape), extents), address_of(array)
            )
            try:
                name = f"ov_infer_request_set_{kind}_tensor_by_index"
                library.check(name, getattr(self.functions, name)(request, index, tensor))
            finally:
                self.functions.ov_tensor_free(tensor)  # The request has its own reference.
        return call

    def run(self, call: KeptCall) -> int:
        """Makes a call; its status."""
        status: int = self.functions.ov_infer_request_infer(*call.words)
        return status


def _free_request(model: NativeModel, request: ctypes.c_void_p) -> None:
    """Ends a request before the model that it runs."""
    model.functions.ov_infer_request_free(request)


def _free_model(functions: ctypes.CDLL, compiled: ctypes.c_void_p, blob: bytes) -> None:
    """Ends a compiled model before the bytes that it reads."""
    functions.ov_compiled_model_free(compiled)
    del blob


def native_models(
    blob: bytes,
    properties: Mapping[str, str],
    arguments: Sequence[Argument],
    input_count: int,
    sample: Sequence[Array],
    count: int,
) -> Sequence[NativeModel]:
    """Compiled models of the C interface that have run once, and gave the bytes of Python's.

    Args:
        blob: See ``NativeModel``, as are the next three.
        properties: See there.
        arguments: See there.
        input_count: See there.
        sample: Inputs, and Python's outputs for them.
        count: The number of models.

    Returns:
        An empty sequence where the C interface cannot be used; the log has the reason.
    """
    try:
        if not is_known_version():
            raise Unsupported("the C interface of this version is not known")
        models = [NativeModel(blob, properties, arguments, input_count) for _ in range(count)]
        for model in models:
            outputs = [engine_memory(a.dtype, a.shape or ()) for a in arguments[input_count:]]
            status = model.run(model.kept_call([*sample[:input_count], *outputs]))
            if status:
                raise Unsupported(f"the first execution gives status {status}")
            for output, wanted in zip(outputs, sample[input_count:], strict=True):
                if output.tobytes() != wanted.tobytes():
                    raise Unsupported("the first execution has other results than Python's")
    except (Unsupported, MemoryError) as e:
        _logger.debug("OpenVINO is not called without Python: %s", e)
        return ()
    return models

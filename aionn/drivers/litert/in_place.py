"""LiteRT's C interface: executions that read and write the client's memory in place.

Owns the library, the versions whose signatures are known, compiled models, and which arrays LiteRT may be given as they are. Values
that it must not use are copied, into and out of memory of the engine's own.

Invariants:
1. A version of LiteRT that is not listed is never called: its signatures may be others.
2. LiteRT works directly on memory that a client can change only as ``BoundArguments`` allows; ``Lowered`` marks the values
   that are never addresses.
3. One thread at a time runs an engine. Python's lock is free while LiteRT computes: ctypes releases it.

Source: LiteRT's public C headers; XNNPACK reads up to ``READ_PAST_BYTES`` (``kit.arguments``) behind what it was given.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea, address_of
from aionn.drivers.kit.engines.bound import BoundArguments, Place
from aionn.drivers.kit.engines.c_library import CLibrary, Handle
from aionn.drivers.kit.engines.slot import BoundSlot
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.threads.classes import engine_call
from aionn.drivers.litert.lowering import Lowered
from aionn.hal import OutputShape

__all__ = ["InPlaceEngine", "KeptCall", "Tensor", "is_known_version"]

VERSIONS_KNOWN = ("2.3.",)
"""Versions that the signatures below were tried with."""

RANK_MAX = 8

_ELEMENT_TYPES = {
    "float32": 1, "int32": 2, "uint8": 3, "bool": 6, "int16": 7, "int8": 9, "float16": 10,
}  # fmt: skip
_CPU = 1

_lock = threading.Lock()


class Tensor(NamedTuple):
    """An input or an output of a lowered file.

    Attributes:
        place: Which tensor of the file it is.
        shape: Its extents, all known.
        dtype: numpy's element type.
    """

    place: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Layout(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_uint32),  # 7 bits, and one for the presence of strides
        ("dimensions", ctypes.c_int32 * RANK_MAX),
        ("strides", ctypes.c_uint32 * RANK_MAX),
    )


class _TensorType(ctypes.Structure):
    _fields_ = (("element_type", ctypes.c_int), ("layout", _Layout))


class _EnvironmentOption(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_int),
        ("type", ctypes.c_int64),  # an int, padded to its union's alignment
        ("value", ctypes.c_int64),
    )


_AUTO_REGISTER, _INTEGER = 24, 2

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


_keep = _Destructor(lambda payload: None)
"""Destroys nothing: Python owns the payload."""

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "LiteRtCreateEnvironment": (ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Handle)),
    "LiteRtCreateModelFromBuffer": (Handle, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Handle)),
    "LiteRtCreateOptions": (ctypes.POINTER(Handle),),
    "LiteRtSetOptionsHardwareAccelerators": (Handle, ctypes.c_int),
    "LiteRtCreateOpaqueOptions": (
        ctypes.c_char_p,
        ctypes.c_char_p,
        _Destructor,
        ctypes.POINTER(Handle),
    ),
    "LiteRtAddOpaqueOptions": (Handle, Handle),
    "LiteRtCreateCompiledModel": (Handle, Handle, Handle, ctypes.POINTER(Handle)),
    "LiteRtCreateTensorBufferFromHostMemory": (
        ctypes.POINTER(_TensorType),
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.POINTER(Handle),
    ),
    "LiteRtRunCompiledModel": (
        Handle,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ),
}
_DESTROY = {
    "LiteRtDestroyTensorBuffer": (Handle,),
    "LiteRtDestroyCompiledModel": (Handle,),
    "LiteRtDestroyModel": (Handle,),
    "LiteRtDestroyOptions": (Handle,),
}


def is_known_version() -> bool:
    """Whether the installed LiteRT is one whose C interface is known."""
    return importlib.metadata.version("ai-edge-litert").startswith(VERSIONS_KNOWN)


class _Library(CLibrary):
    """The shared library and its environment, of which a process has one."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("ai_edge_litert")
        assert spec is not None and spec.origin is not None, "its version was read"
        path = os.path.join(os.path.dirname(spec.origin), "libLiteRt.so")
        super().__init__(path, "LiteRT", _SIGNATURES, _DESTROY)
        # Without this LiteRT looks for accelerators that are not there, and complains.
        option = _EnvironmentOption(_AUTO_REGISTER, _INTEGER, _CPU)
        self.environment = self.make("LiteRtCreateEnvironment", 1, ctypes.byref(option))


@functools.cache
def _library() -> _Library:
    return _Library()


class _Call(NamedTuple):
    """The arguments of a call of LiteRT.

    Attributes:
        arguments: Of its function.
        buffers: LiteRT's objects for arrays of the client.
    """

    arguments: tuple[Any, ...]
    buffers: list[ctypes.c_void_p]


class KeptCall:
    """A call of ``LiteRtRunCompiledModel`` as words of a machine; LiteRT's objects for its arrays live as long as this does.

    Args:
        engine: The engine that is run.
        call: The arguments.
        arrays: The arrays of the client, which LiteRT uses in place.

    Attributes:
        words: The arguments.
    """

    def __init__(self, engine: InPlaceEngine, call: _Call, arrays: Sequence[Array]) -> None:
        compiled, signature, input_count, inputs, output_count, outputs = call.arguments
        self.words: tuple[int, ...] = (
            compiled.value,
            signature,
            input_count,
            ctypes.addressof(inputs),
            output_count,
            ctypes.addressof(outputs),
        )
        self._kept = engine, call, arrays
        end = weakref.finalize(self, _release, engine.functions, call)
        end.atexit = False  # A thread may still make the call then.


class InPlaceEngine(BoundSlot[_Call]):
    """A lowered file, compiled, that has run once.

    Args:
        lowered: The file.
        thread_count: Threads of one execution.
        inputs: Its inputs.
        outputs: Its outputs.
        shapes: The outputs' shapes as the HAL has them.

    Attributes:
        functions: LiteRT's library.

    Raises:
        Unsupported: LiteRT's C interface cannot run it; ``Engine`` perhaps can.
    """

    def __init__(
        self,
        lowered: Lowered,
        thread_count: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        tensors = [*inputs, *outputs]
        if not all(len(t.shape) <= RANK_MAX and t.dtype.name in _ELEMENT_TYPES for t in tensors):
            raise Unsupported("LiteRT's C interface: a tensor of this type or rank")
        if len({t.place for t in tensors}) != len(tensors):
            raise Unsupported("LiteRT's C interface: one tensor in two places")
        with _lock:
            self._library = _library()
        self.functions = self._library.functions
        self._run = engine_call(self.functions.LiteRtRunCompiledModel)
        self._tensors = tensors
        may_bind = (*lowered.is_input_in_place, *lowered.is_output_in_place)
        places = [Place(t.dtype.name, t.shape, m) for t, m in zip(tensors, may_bind, strict=True)]
        self._input_count = len(inputs)
        self._handles: list[tuple[str, ctypes.c_void_p]] = []
        # It must not refer to this object, whose end ends what LiteRT made.
        drop = functools.partial(_release, self.functions)
        super().__init__(places[: len(inputs)], places[len(inputs) :], shapes, drop)
        # LiteRT reads the file, and our own memory, for as long as its objects live.
        own = [self._bound.own(place) for place in range(len(tensors))]
        options = f"num_threads = {thread_count}\n".encode()
        memory = (lowered.file, options, own)
        end = weakref.finalize(self, _destroy, self.functions, self._handles, self._bound, memory)
        end.atexit = False  # A thread may still run it then, and the process gives everything back.
        self._compiled = self._compile(lowered.file, options)
        own_buffers = [self._buffer(t, a) for t, a in zip(tensors, own, strict=True)]
        self._handles.extend(("LiteRtDestroyTensorBuffer", b) for b in own_buffers)
        # The first run packs the remaining constants, and shows that this way works at all.
        self._library.check("LiteRtRunCompiledModel", self._run(*self._arguments(own_buffers)))
        self._own_buffers = {id(a): b for a, b in zip(own, own_buffers, strict=True)}

    def _compile(self, file: bytes, cpu_options: bytes) -> ctypes.c_void_p:
        make, functions = self._library.make, self.functions
        model = make("LiteRtCreateModelFromBuffer", self._library.environment, file, len(file))
        self._handles.append(("LiteRtDestroyModel", model))
        options = make("LiteRtCreateOptions")
        self._handles.append(("LiteRtDestroyOptions", options))
        check = self._library.check
        check("accelerators", functions.LiteRtSetOptionsHardwareAccelerators(options, _CPU))
        cpu = make("LiteRtCreateOpaqueOptions", b"xnnpack", cpu_options, _keep)
        check("LiteRtAddOpaqueOptions", functions.LiteRtAddOpaqueOptions(options, cpu))
        compiled = make("LiteRtCreateCompiledModel", self._library.environment, model, options)
        self._handles.append(("LiteRtDestroyCompiledModel", compiled))
        return compiled

    def _buffer(self, tensor: Tensor, array: Array) -> ctypes.c_void_p:
        """LiteRT's object for memory of ours."""
        kind = _TensorType(_ELEMENT_TYPES[tensor.dtype.name])
        kind.layout.rank = len(tensor.shape)
        kind.layout.dimensions[: len(tensor.shape)] = tensor.shape
        size_bytes = tensor.dtype.itemsize * int(np.prod(tensor.shape))
        return self._library.make(
            "LiteRtCreateTensorBufferFromHostMemory", kind, address_of(array), size_bytes, None
        )

    def _arguments(self, buffers: Sequence[ctypes.c_void_p]) -> tuple[Any, ...]:
        read, written = buffers[: self._input_count], buffers[self._input_count :]
        return (
            self._compiled,
            0,
            len(read),
            (Handle * len(read))(*read),
            len(written),
            (Handle * len(written))(*written),
        )

    def compute(self, arguments: _Call) -> None:
        """See the base class.

        Raises:
            RuntimeError: LiteRT failed, for example at an index out of range.
        """
        status = self._run(*arguments.arguments)
        if status:
            raise RuntimeError(f"LiteRT gives status {status}")

    @property
    def shapes(self) -> list[OutputShape]:
        """The outputs' shapes of an execution that copies none of them."""
        return self._shapes

    @property
    def run_address(self) -> int:
        """The address of LiteRT's function for ``KeptCall.words``, which returns 0 for success."""
        address = ctypes.cast(self.functions.LiteRtRunCompiledModel, ctypes.c_void_p).value
        assert address is not None, "the library was loaded"
        return address

    def kept_call(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> KeptCall | None:
        """An execution as one call of LiteRT, for any number of times; None where an argument has to be copied.

        Its arrays are LiteRT's own objects, not those of ``run``, which are dropped when many sets of arguments have come.
        """
        arrays = self._bound.in_place(inputs, areas)
        return None if arrays is None else KeptCall(self, self.bind_arrays(arrays), arrays)

    def bind_arrays(self, arrays: Sequence[Array | None]) -> _Call:
        """The call of LiteRT for these arrays."""
        buffers, made = [], []
        for tensor, array in zip(self._tensors, arrays, strict=True):
            assert array is not None, "every shape is known"
            buffer = self._own_buffers.get(id(array))
            if buffer is None:
                buffer = self._buffer(tensor, array)
                made.append(buffer)
            buffers.append(buffer)
        return _Call(self._arguments(buffers), made)


def _release(functions: ctypes.CDLL, call: _Call) -> None:
    for buffer in call.buffers:
        functions.LiteRtDestroyTensorBuffer(buffer)


def _destroy(
    functions: ctypes.CDLL,
    handles: list[tuple[str, ctypes.c_void_p]],
    bound: BoundArguments[_Call],
    memory: object,
) -> None:
    """Ends LiteRT's objects, the last one made first; they read ``memory``."""
    bound.clear()
    while handles:
        function, handle = handles.pop()
        getattr(functions, function)(handle)

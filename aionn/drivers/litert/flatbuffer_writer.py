"""Writes .tflite files: tensors, operators and subgraphs over the schema that LiteRT's wheel ships.

Owns the form of the file. The ``lowering`` modules convert HAL operations.

Invariants:
1. Equal constants are stored once; every stored buffer is aligned to 16 bytes, as the schema demands.
2. Tensor 0 of nothing: an input that is left out is -1.

Source: the public TensorFlow Lite schema.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import flatbuffers
import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from aionn.drivers.kit.engines.support import Unsupported

__all__ = [
    "NO_TENSOR",
    "VALUE_TYPES",
    "FileParts",
    "FileWriter",
    "Quantization",
    "SubgraphFile",
]

Array = npt.NDArray[Any]

NO_TENSOR = -1
"""Stands for an input that is left out."""

FILE_BYTES_MAX = 2**31 - 2**20
"""Offsets in a file are 32 bits, signed."""

_DIGEST_BYTES = 32
"""Length of the digest by which equal constants are known; two different ones with the same digest cannot be made."""

_STRUCTURE_BYTES = 65536
"""Memory for the tables of a model of some hundred operators; more is allocated by the builder."""

_TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "float16": schema.TensorType.FLOAT16,
    "int32": schema.TensorType.INT32,
    "uint8": schema.TensorType.UINT8,
    "int8": schema.TensorType.INT8,
    "int16": schema.TensorType.INT16,
    "bool": schema.TensorType.BOOL,
}

VALUE_TYPES = tuple(_TYPES[name] for name in ("float32", "uint8", "int8"))
"""Types whose numbers are measured or computed; integers of others are also counts and indexes."""


class Quantization(NamedTuple):
    """Conversion of stored numbers to real ones: ``real = (stored - zero_point) * scale``.

    Attributes:
        scales: One scale, or one per index along ``axis``.
        zero_point: The same for all.
        axis: Which axis the scales belong to.
    """

    scales: tuple[float, ...]
    zero_point: int = 0
    axis: int = 0


class _Buffer(schema.BufferT):  # type: ignore[misc]
    """A buffer whose bytes are aligned; the generated code aligns to 1."""

    def Pack(self, builder: flatbuffers.Builder) -> int:
        vector = None
        if self.data is not None:
            size = len(self.data)
            builder.StartVector(1, size, 16)
            builder.head -= size
            # numpy copies without the interpreter's lock.
            np.frombuffer(builder.Bytes, np.uint8)[builder.head : builder.head + size] = self.data
            vector = builder.EndVector()
        schema.BufferStart(builder)
        if vector is not None:
            schema.BufferAddData(builder, vector)
        place: int = schema.BufferEnd(builder)
        return place


class _Scratch:
    """Memory in which a file is written from its end to its beginning.

    It is a file in memory, from which the system reads a finished model while other threads run: a copy of hundreds of megabytes
    by Python would hold the interpreter's lock for some tenths of a second.

    Attributes:
        mapped: The memory.

    Raises:
        MemoryError: There is no memory, or no descriptor, left.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._fd = os.memfd_create("aionn-litert", os.MFD_CLOEXEC)
            try:
                # With its pages: one that the kernel cannot allocate when it is written ends the process by SIGBUS.
                os.posix_fallocate(self._fd, 0, size_bytes)
                self.mapped = mmap.mmap(self._fd, size_bytes)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as e:
            raise MemoryError(f"a model of {size_bytes} bytes: {e.strerror}") from e

    def read_from(self, start: int) -> bytes:
        """The content from a place on."""
        data = os.pread(self._fd, len(self.mapped) - start, start)
        assert len(data) == len(self.mapped) - start, "a file in memory is read in one piece"
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        # A table that was being written when an error was raised may still refer to the memory.
        with contextlib.suppress(BufferError):
            self.mapped.close()


class FileParts:
    """Data that the subgraphs of a file share: constants and operators' codes.

    It knows no subgraph: a circle of references would keep a model's constants until Python looks for circles.

    Attributes:
        is_static: Whether every shape is known before execution, so that LiteRT never moves a tensor.
        buffers: The constants, the first one empty.
        size_bytes: Their size.
    """

    def __init__(self) -> None:
        self.is_static = True
        self.buffers: list[_Buffer] = [_Buffer()]
        self.size_bytes = 0
        self._places: dict[bytes, int] = {}
        self._codes: dict[str, int] = {}

    @property
    def codes(self) -> tuple[str, ...]:
        """Names of the operators in the order of their codes."""
        return tuple(self._codes)

    def buffer(self, data: npt.NDArray[np.uint8]) -> int:
        """Stores a constant, once."""
        # Other threads run while hashlib computes a digest, but not while Python computes the hash of bytes.
        digest = hashlib.blake2b(data.data, digest_size=_DIGEST_BYTES).digest()
        place = self._places.get(digest)
        if place is None:
            self.size_bytes += len(data)
            if self.size_bytes > FILE_BYTES_MAX:
                raise Unsupported(f"constants of more than {FILE_BYTES_MAX} bytes")
            buffer = _Buffer()
            buffer.data = data
            self.buffers.append(buffer)
            place = self._places[digest] = len(self.buffers) - 1
        return place

    def code(self, name: str) -> int:
        """The index of an operator's code."""
        return self._codes.setdefault(name, len(self._codes))


class SubgraphFile:
    """One subgraph that is being written.

    Attributes:
        parts: The parts that the subgraphs share.
        tensors: The tensors of the file.
        shapes: Their shapes; 0 for an unknown extent, empty where the rank is unknown or 0.
        operators: The operators, in execution order.
        inputs: Indexes of the tensors that are inputs.
        outputs: Indexes of the tensors that are outputs.
    """

    def __init__(self, parts: FileParts) -> None:
        self.parts = parts
        self.tensors: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        self.operators: list[Any] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def tensor(
        self,
        dtype: str,
        shape: Sequence[int],
        quantization: Quantization | None = None,
        value: Array | None = None,
    ) -> int:
        """Adds a tensor, constant where a value is given; returns its index. Without a value an extent of 0 is one not known
        yet.
        """
        tensor = schema.TensorT()
        tensor.type = _TYPES[dtype]
        tensor.shape = np.asarray(shape, dtype=np.int32)
        if value is None and 0 in shape:
            tensor.shape = np.maximum(tensor.shape, 1)
            tensor.shapeSignature = np.asarray([extent or -1 for extent in shape], dtype=np.int32)
        tensor.hasRank = True
        tensor.name = f"t{len(self.tensors)}"
        if quantization is not None:
            q = tensor.quantization = schema.QuantizationParametersT()
            q.scale = np.asarray(quantization.scales, dtype=np.float32)
            q.zeroPoint = np.full(len(quantization.scales), quantization.zero_point, dtype=np.int64)
            q.quantizedDimension = quantization.axis
        if value is not None:
            tensor.buffer = self.parts.buffer(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        self.tensors.append(tensor)
        self.shapes.append(tuple(int(extent) for extent in shape))
        return len(self.tensors) - 1

    def operator(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        options: str | None,
        values: dict[str, Any],
    ) -> None:
        """Adds an operator with its options' table."""
        operator = schema.OperatorT()
        operator.opcodeIndex = self.parts.code(name)
        operator.inputs = np.asarray(inputs, dtype=np.int32)
        operator.outputs = np.asarray(outputs, dtype=np.int32)
        if options is not None:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, options)
            table = getattr(schema, f"{options}T")()
            for key, value in values.items():
                assert hasattr(table, key), f"{options} has no {key}"
                setattr(table, key, value)
            operator.builtinOptions = table
        self.operators.append(operator)


class FileWriter:
    """A file that is being written; subgraph 0 is the main one.

    Attributes:
        parts: The parts that the subgraphs share.
        subgraphs: The subgraphs written so far.
    """

    def __init__(self) -> None:
        self.parts = FileParts()
        self.subgraphs: list[SubgraphFile] = []

    def subgraph(self) -> SubgraphFile:
        """Adds a subgraph."""
        self.subgraphs.append(SubgraphFile(self.parts))
        return self.subgraphs[-1]

    def finish(self) -> bytes:
        """The file."""
        model = schema.ModelT()
        model.version = 3
        model.description = "aionn"
        model.buffers = self.parts.buffers
        model.operatorCodes = []
        for name in self.parts.codes:
            code = schema.OperatorCodeT()
            code.builtinCode = getattr(schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
            code.version = _VERSIONS.get(name, 1)
            model.operatorCodes.append(code)
        model.subgraphs = []
        for index, source in enumerate(self.subgraphs):
            subgraph = schema.SubGraphT()
            subgraph.name = f"s{index}"
            subgraph.tensors = source.tensors
            subgraph.operators = source.operators
            subgraph.inputs = np.asarray(source.inputs, dtype=np.int32)
            subgraph.outputs = np.asarray(source.outputs, dtype=np.int32)
            model.subgraphs.append(subgraph)
        with _Scratch(self.parts.size_bytes + _STRUCTURE_BYTES) as scratch:
            builder = flatbuffers.Builder(0)
            builder.Bytes, builder.head = scratch.mapped, len(scratch.mapped)
            builder.Finish(model.Pack(builder), b"TFL3")
            if builder.Bytes is scratch.mapped:
                return scratch.read_from(builder.Head())
            # More structure than was expected: the builder has moved everything to larger memory of its own.
            return bytes(builder.Output())


_VERSIONS = {"BROADCAST_TO": 2}
"""Operators whose first version is not 1."""

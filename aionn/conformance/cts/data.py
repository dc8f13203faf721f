"""The public conformance data: models with inputs and expected outputs, read, built and judged.

Owns the data's format, how a test becomes a ``Model`` and arguments, and the comparison with its tolerances. How a model is run
is the caller's business.

Source: the README beside the data; tolerances of the CTS test harness.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import InvalidArgument
from aionn.hal import (
    ChannelQuant,
    DataLocation,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
    is_scalar_type,
    operand_dtype,
)
from aionn.platform.files import read_regular

__all__ = [
    "CtsOperand",
    "CtsOperation",
    "CtsSubgraph",
    "CtsTest",
    "CtsTolerance",
    "Mismatch",
    "build_model",
    "check_shapes",
    "compare",
    "iterate_tests",
    "load_tests",
    "main_inputs",
    "operand_bytes",
    "operation_types",
    "output_place",
    "signed_counterpart",
    "test_files",
]

_HALF = 5 * 2.0**-10
_SINGLE_ATOL = 1e-5
_SINGLE_RTOL = 5 * 2.0**-23


class CtsTolerance(msgspec.Struct, frozen=True):
    """The tolerances that a test asks for."""

    float32: str
    quant8_atol: int
    multinomial: float | None = None


class CtsChannelQuant(msgspec.Struct, frozen=True):
    """Per-channel scales in the data."""

    scales: tuple[float, ...]
    channel_dim: int


class CtsOperand(msgspec.Struct, frozen=True):
    """An operand in the data; see the data's README."""

    name: str | None
    type: str
    dimensions: tuple[int, ...]
    scale: float
    zero_point: int
    channel_quant: CtsChannelQuant | None
    lifetime: str
    is_ignored: bool
    data: bytes | None


class CtsOperation(msgspec.Struct, frozen=True):
    """An operation in the data."""

    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class CtsSubgraph(msgspec.Struct, frozen=True):
    """A subgraph in the data."""

    name: str | None
    operands: tuple[CtsOperand, ...]
    operations: tuple[CtsOperation, ...]
    input_indexes: tuple[int, ...]
    output_indexes: tuple[int, ...]


class CtsTest(msgspec.Struct, frozen=True):
    """One test: a model, its inputs and what must come out."""

    name: str
    spec: str
    version: str
    min_feature_level: str | None
    is_relaxed: bool
    expect_failure: bool
    tolerance: CtsTolerance
    main: CtsSubgraph
    referenced: tuple[CtsSubgraph, ...]


FILE_BYTES_MAX = 1 << 28
"""Compressed; the largest public file has some hundred kilobytes."""

_DECODER = msgspec.msgpack.Decoder(list[CtsTest], strict=False)


class _Named(msgspec.Struct):
    name: str


_NAMES = msgspec.msgpack.Decoder(list[_Named], strict=False)

_ELEMENTS = {
    kind.name: (4, True)
    if kind == OperandType.SUBGRAPH
    else (operand_dtype(kind).itemsize, is_scalar_type(kind))
    for kind in OperandType
}
"""By name of an operand type: the bytes of an element, and whether an operand has one. Tables, since the data have a hundred
thousand operands."""

_LIFETIMES = frozenset(OperandLifeTime.__members__)
_OPERATIONS = frozenset(OperationType.__members__)


def test_files(folder: Path) -> list[Path]:
    """All data files below a folder, in a fixed order.

    Raises:
        InvalidArgument: The folder has no data file.
    """
    files = sorted(folder.glob("*/*.msgpack.gz")) or sorted(folder.glob("*.msgpack.gz"))
    if not files:
        raise InvalidArgument(f"conformance data: no *.msgpack.gz files in {folder}")
    return files


def load_tests(path: Path, *, contains: str = "") -> list[CtsTest]:
    """The tests of one data file whose names contain a text. Of a file without such a test only the names are read.

    Raises:
        InvalidArgument: It cannot be read, or a test in it breaks the format.
    """
    try:
        content = gzip.decompress(read_regular(path, "conformance data:", FILE_BYTES_MAX))
        if contains and not any(contains in test.name for test in _NAMES.decode(content)):
            return []
        tests = [test for test in _DECODER.decode(content) if contains in test.name]
    except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.MsgspecError, RecursionError) as e:
        raise InvalidArgument(f"conformance data: {path} cannot be read: {e}") from e
    for test in tests:
        for index, subgraph in enumerate((test.main, *test.referenced)):
            try:
                _check_subgraph(subgraph, is_main=index == 0)
            except InvalidArgument as e:
                raise InvalidArgument(f"conformance data: {path}, {test.name}, subgraph {index}, {e}") from e
    return tests


def _check_subgraph(subgraph: CtsSubgraph, *, is_main: bool) -> None:
    """Mistakes that are not the device's: names that do not exist, indexes beyond the end, data of another size."""
    count = len(subgraph.operands)
    lists = [subgraph.input_indexes, subgraph.output_indexes]
    for operation in subgraph.operations:
        if operation.type not in _OPERATIONS:
            raise InvalidArgument(f"operations: expected a type of the HAL, got {operation.type!r}")
        lists += [operation.inputs, operation.outputs]
    for indexes in lists:
        if indexes and not (min(indexes) >= 0 and max(indexes) < count):
            raise InvalidArgument(f"operand indexes: expected 0 to {count - 1}, got {list(indexes)}")
    for index, operand in enumerate(subgraph.operands):
        if operand.type not in _ELEMENTS or operand.lifetime not in _LIFETIMES:
            known = "a type and a lifetime of the HAL"
            raise InvalidArgument(
                f"operand {index}: expected {known}, got {operand.type!r}, {operand.lifetime!r}"
            )
        if not operand.data or not (is_main or operand.lifetime.startswith("CONSTANT")):
            continue
        if len(operand.data) != operand_bytes(operand):
            size = f"{operand_bytes(operand)} bytes for {operand.type} {list(operand.dimensions)}"
            raise InvalidArgument(f"operand {index}, data: expected {size}, got {len(operand.data)}")


def operand_bytes(operand: CtsOperand) -> int:
    """Size of an operand's value, by its type and shape."""
    size_bytes, is_scalar = _ELEMENTS[operand.type]
    return size_bytes if is_scalar else size_bytes * math.prod(operand.dimensions)


def operation_types(test: CtsTest) -> set[str]:
    """The operation types of all subgraphs, the ADDs that make inputs internal left out."""
    types = set()
    for subgraph in (test.main, *test.referenced):
        for operation in subgraph.operations:
            names = {subgraph.operands[i].name for i in operation.inputs}
            if not (operation.type == "ADD" and any(n and n.startswith("placeholder") for n in names)):
                types.add(operation.type)
    return types


NOT_COUPLED = {"HASHTABLE_LOOKUP", "LSH_PROJECTION", "PAD_V2", "CAST", "QUANTIZED_16BIT_LSTM"}
"""Operations whose unsigned 8-bit form has no signed one of the same meaning."""


def signed_counterpart(test: CtsTest) -> CtsTest | None:
    """The test with unsigned 8-bit tensors turned into signed ones, values and zero points less by 128.

    Returns:
        None for a model of several operations or with subgraphs, without such tensors, or of an operation in ``NOT_COUPLED``.
    """
    main = test.main
    if test.referenced or len(main.operations) != 1 or main.operations[0].type in NOT_COUPLED:
        return None
    (operation,) = main.operations
    if not any(
        main.operands[i].type == "TENSOR_QUANT8_ASYMM" for i in (*operation.inputs, *operation.outputs)
    ):
        return None
    operands = tuple(_signed(o) if o.type == "TENSOR_QUANT8_ASYMM" else o for o in main.operands)
    return msgspec.structs.replace(test, main=msgspec.structs.replace(main, operands=operands))


def _signed(operand: CtsOperand) -> CtsOperand:
    data = operand.data
    if data:
        data = (np.frombuffer(data, np.uint8) ^ 0x80).tobytes()
    return msgspec.structs.replace(
        operand, type="TENSOR_QUANT8_ASYMM_SIGNED", zero_point=operand.zero_point - 128, data=data
    )


def output_place(test: CtsTest, output: int) -> tuple[str, int]:
    """The operation that writes an output of the model, such as ``operation 3 (CONV_2D)``, and the output's operand index."""
    index = test.main.output_indexes[output]
    for position, operation in enumerate(test.main.operations):
        if index in operation.outputs:
            return f"operation {position} ({operation.type})", index
    return "no operation", index


class _Values:
    """Collects the bytes of constants."""

    def __init__(self) -> None:
        self.copied = bytearray()
        self.referenced = bytearray()

    def place(self, lifetime: OperandLifeTime, data: bytes) -> DataLocation:
        into = self.copied if lifetime == OperandLifeTime.CONSTANT_COPY else self.referenced
        into.extend(b"\0" * (-len(into) % 64))
        location = DataLocation(0, len(into), len(data))
        into.extend(data)
        return location


def build_model(test: CtsTest, *, with_dynamic_outputs: bool = False) -> Model:
    """The test's model.

    Args:
        test: The test to build.
        with_dynamic_outputs: Sets every extent of every operation's output to unknown, the rank kept.
    """
    values = _Values()
    main, *referenced = [_subgraph(s, values, with_dynamic_outputs) for s in (test.main, *test.referenced)]
    pools = []
    if values.referenced:
        pool = Memory.create(len(values.referenced))
        pool.array[:] = np.frombuffer(bytes(values.referenced), dtype=np.uint8)
        pools.append(pool)
    return Model(
        main=main,
        referenced=tuple(referenced),
        operand_values=bytes(values.copied),
        pools=tuple(pools),
        relax_computation_float32_to_float16=test.is_relaxed,
    )


def _subgraph(subgraph: CtsSubgraph, values: _Values, with_dynamic_outputs: bool) -> Subgraph:
    written = {index for operation in subgraph.operations for index in operation.outputs}
    operands = []
    for index, operand in enumerate(subgraph.operands):
        lifetime = OperandLifeTime[operand.lifetime]
        location = DataLocation()
        dimensions = operand.dimensions
        if lifetime == OperandLifeTime.SUBGRAPH:
            location = DataLocation(0, int.from_bytes(operand.data or b"", "little"), 0)
        elif lifetime in (OperandLifeTime.CONSTANT_COPY, OperandLifeTime.CONSTANT_REFERENCE):
            location = values.place(lifetime, operand.data or b"")
        elif with_dynamic_outputs and index in written:
            dimensions = (0,) * len(dimensions)
        quant = operand.channel_quant
        operands.append(
            Operand(
                type=OperandType[operand.type],
                dimensions=dimensions,
                scale=operand.scale,
                zero_point=operand.zero_point,
                lifetime=lifetime,
                location=location,
                channel_quant=None if quant is None else ChannelQuant(quant.scales, quant.channel_dim),
            )
        )
    operations = tuple(Operation(OperationType[o.type], o.inputs, o.outputs) for o in subgraph.operations)
    return Subgraph(tuple(operands), operations, subgraph.input_indexes, subgraph.output_indexes)


def _array(operand: CtsOperand) -> npt.NDArray[Any]:
    code = OperandType[operand.type]
    flat = np.frombuffer(operand.data or b"", dtype=operand_dtype(code))
    return flat.reshape(() if is_scalar_type(code) else operand.dimensions)


def main_inputs(test: CtsTest) -> list[npt.NDArray[Any] | None]:
    """The inputs in the order of the model's arguments; None for one that is left out."""
    operands = [test.main.operands[i] for i in test.main.input_indexes]
    return [None if not operand.data else _array(operand) for operand in operands]


class Mismatch(msgspec.Struct, frozen=True):
    """The first difference that a test does not allow.

    Attributes:
        output: Index of the output.
        index: Index of the element; empty where the shape differs.
        expected: Expected value or shape.
        got: Value or shape that came.
        tolerance: The tolerance, as text.
    """

    output: int
    index: tuple[int, ...]
    expected: str
    got: str
    tolerance: str

    def __str__(self) -> str:
        place = f"output {self.output}" + (f", element {list(self.index)}" if self.index else "")
        return f"{place}: expected {self.expected}, got {self.got} (tolerance {self.tolerance})"


def check_shapes(test: CtsTest, shapes: Sequence[tuple[int, ...]]) -> Mismatch | None:
    """Compares reported output shapes with the expected ones."""
    for output, (index, got) in enumerate(zip(test.main.output_indexes, shapes, strict=True)):
        operand = test.main.operands[index]
        if not operand.is_ignored and tuple(got) != operand.dimensions:
            return Mismatch(output, (), f"shape {list(operand.dimensions)}", f"shape {list(got)}", "exact")
    return None


def _tolerance(test: CtsTest, operand: CtsOperand) -> tuple[float, float]:
    match operand.type:
        case "TENSOR_FLOAT32" | "FLOAT32":
            return (_HALF, _HALF) if test.tolerance.float32 == "half" else (_SINGLE_ATOL, _SINGLE_RTOL)
        case "TENSOR_FLOAT16" | "FLOAT16":
            return _HALF, _HALF
        case "TENSOR_BOOL8" | "BOOL":
            return 0.0, 0.0
        case "TENSOR_QUANT8_ASYMM" | "TENSOR_QUANT8_ASYMM_SIGNED" | "TENSOR_QUANT8_SYMM":
            return float(test.tolerance.quant8_atol), 0.0
        case _:
            return 1.0, 0.0


def compare(test: CtsTest, outputs: Sequence[npt.NDArray[Any]]) -> Mismatch | None:
    """Judges results as the CTS does; None when they are right.

    Args:
        test: Holds the expectation.
        outputs: One array per output, in the order of the model's results.
    """
    wrong_shape = check_shapes(test, [array.shape for array in outputs])
    if wrong_shape is not None:
        return wrong_shape
    if test.tolerance.multinomial is not None:
        return _compare_multinomial(test, outputs[0])
    for output, (index, got) in enumerate(zip(test.main.output_indexes, outputs, strict=True)):
        operand = test.main.operands[index]
        if operand.is_ignored:
            continue
        expected = _array(operand).astype(np.float64)
        actual = got.astype(np.float64)
        atol, rtol = _tolerance(test, operand)
        with np.errstate(invalid="ignore"):
            right = np.abs(actual - expected) <= atol + rtol * np.abs(expected)
        # Equal infinities differ by NaN.
        right |= (actual == expected) & ~np.isnan(actual)
        if not right.all():
            where = tuple(int(i) for i in np.argwhere(~right)[0])
            return Mismatch(
                output,
                where,
                repr(float(expected[where])),
                repr(float(actual[where])),
                f"{atol:g} + {rtol:g}*|x|",
            )
    return None


def _compare_multinomial(test: CtsTest, samples: npt.NDArray[Any]) -> Mismatch | None:
    (logits,) = [a for a in main_inputs(test)[:1] if a is not None]
    row = logits.astype(np.float64).reshape(-1)
    shares = np.exp(row) / np.exp(row).sum()
    limit = test.tolerance.multinomial or 0.0
    for index, share in enumerate(shares):
        got = float(np.count_nonzero(samples == index)) / max(1, math.prod(samples.shape))
        if not abs(got - share) <= limit:
            return Mismatch(0, (index,), f"share {share:.4f}", f"share {got:.4f}", f"{limit:g}")
    return None


def iterate_tests(folder: Path, *, contains: str = "") -> Iterator[CtsTest]:
    """All tests below a folder whose name contains a text, in a fixed order."""
    for path in test_files(folder):
        yield from load_tests(path, contains=contains)

"""Imports TensorFlow Lite files: ``load_tflite`` makes a ``hal.Model`` of a file.

Owns the order of the work and what the caller learns beside the model: names, signatures, where each operation comes from. Reading
is in ``schema``, writing in ``graph``, the meaning of operators in ``operators``.

Invariants:
1. A file either becomes a model whose operations keep their contracts or is refused with one ``InvalidModel``, whatever its
   bytes are. Checks across two subgraphs are left to ``aionn.validation``.
2. When operators cannot be expressed, the one error lists all of them with their counts.
3. The model holds its own copy of the constants; the file is not needed afterwards.

Source: the public TensorFlow Lite schema; the contracts in ``aionn.ops``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from aionn.errors import InvalidArgument, InvalidModel
from aionn.hal import Model, Operand, Subgraph, operation_type_name
from aionn.models.foreign_files import error_of_file
from aionn.models.tflite.constants import ModelWriter
from aionn.models.tflite.folding import fold
from aionn.models.tflite.graph import Consequence, Inexpressible, SubgraphWriter
from aionn.models.tflite.merging import write
from aionn.models.tflite.operators import CONVERSIONS, operator_name
from aionn.models.tflite.schema import (
    EXTENT_MAX,
    Signature,
    TfliteFile,
    TfliteOperator,
    TfliteSubgraph,
    read_file,
)
from aionn.platform.files import read_regular

__all__ = ["TfliteArgument", "TfliteModel", "TfliteSignature", "load_tflite"]

FILE_BYTES_MAX = (1 << 31) - 1
"""The largest flatbuffer: its offsets are 32 bits with a sign."""


class TfliteArgument(msgspec.Struct, frozen=True):
    """An input or output of an imported model.

    Attributes:
        name: The tensor's name in the file.
        operand: Its operand in ``model.main``: ``type``, ``dimensions``, ``scale`` and ``zero_point``.
        dimensions: Its shape in the file, 0 for an open extent; the operand's has no rank 0 and at most four axes, the leading ones
            merged.
    """

    name: str
    operand: Operand
    dimensions: tuple[int, ...] = ()


class TfliteSignature(msgspec.Struct, frozen=True):
    """Names that the file gives to the inputs and outputs.

    Attributes:
        key: The signature's name.
        inputs: Name and position among the model's inputs.
        outputs: Name and position among the model's outputs.
    """

    key: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]


class TfliteModel(msgspec.Struct, frozen=True):
    """An imported file.

    Attributes:
        model: The model that a device prepares.
        inputs: The main subgraph's inputs in the order of the arguments.
        outputs: The main subgraph's outputs in the order of the results.
        signatures: Those of the main subgraph.
        signature_keys: The names of all signatures in the file; ``load_tflite`` takes one of them.
        operation_names: For the main subgraph and then each referenced one, a name per operation, such as
            ``CONV_2D of operator 3 CONV_2D``.
    """

    model: Model
    inputs: tuple[TfliteArgument, ...]
    outputs: tuple[TfliteArgument, ...]
    signatures: tuple[TfliteSignature, ...]
    operation_names: tuple[tuple[str, ...], ...]
    signature_keys: tuple[str, ...] = ()


def load_tflite(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    *,
    signature: str | None = None,
    input_shapes: Sequence[Sequence[int] | None] | None = None,
) -> TfliteModel:
    """Imports a file.

    Args:
        source: Its path, or its bytes.
        signature: The name of the signature whose subgraph becomes the model's main one; None for the file's first subgraph.
        input_shapes: For each input its shape where the file leaves extents open, None for the file's default shape; None takes
            the default shapes of all.

    Raises:
        InvalidModel: The file is damaged, or has operators that the HAL cannot express; all of these are listed.
        InvalidArgument: The path cannot be read, or names no regular file; the file has no such signature, or a shape does not
            fit its input's.
        ResourceExhausted: The file does not fit into memory.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        where, data = "model", bytes(source)
    else:
        where, data = f"model {os.fsdecode(source)}", read_regular(source, "model", FILE_BYTES_MAX)
    try:
        file = read_file(data)
        return _Import(file, _main_index(file, signature), input_shapes).run()
    except InvalidModel as e:
        raise error_of_file(where, data, e) from e


def _main_index(file: TfliteFile, signature: str | None) -> int:
    if signature is None:
        return 0
    keys = [one.key for one in file.signatures]
    if signature not in keys:
        raise InvalidArgument(f"load_tflite, signature: expected one of {keys}, got {signature!r}")
    return file.signatures[keys.index(signature)].subgraph_index


def _with_shapes(
    subgraph: TfliteSubgraph, input_shapes: Sequence[Sequence[int] | None] | None
) -> TfliteSubgraph:
    """The subgraph with these shapes as its inputs' default ones."""
    shapes = [None] * len(subgraph.inputs) if input_shapes is None else list(input_shapes)
    if len(shapes) != len(subgraph.inputs):
        raise InvalidArgument(
            f"load_tflite, input shapes: expected {len(subgraph.inputs)} entries, got {len(shapes)}"
        )
    tensors = list(subgraph.tensors)
    for position, (index, given) in enumerate(zip(subgraph.inputs, shapes, strict=True)):
        if given is None:
            continue
        shape, open_ = tuple(given), tensors[index].dimensions
        fits = len(shape) == len(open_) and all(
            0 < extent <= EXTENT_MAX and known in (0, extent)
            for extent, known in zip(shape, open_, strict=True)
        )
        if not fits:
            raise InvalidArgument(
                f"load_tflite, shape of input {position}: expected what fits {list(open_)}, where 0 is open, got {list(shape)}"
            )
        tensors[index] = msgspec.structs.replace(tensors[index], shape=shape)
    return msgspec.structs.replace(subgraph, tensors=tuple(tensors))


class _Import:
    """One import: the subgraphs in the order in which they are found, and what could not be expressed."""

    def __init__(
        self, file: TfliteFile, main_index: int, input_shapes: Sequence[Sequence[int] | None] | None
    ) -> None:
        self._main_index = main_index
        self._main = _with_shapes(file.subgraphs[main_index], input_shapes)
        subgraphs = [*file.subgraphs]
        subgraphs[main_index] = self._main
        file = msgspec.structs.replace(file, subgraphs=tuple(subgraphs))
        self._file = file
        self._model = ModelWriter(file)
        self._failures: dict[str, tuple[int, str]] = {}
        self._names: list[tuple[str, ...]] = []
        self._references: list[set[int]] = []

    def run(self) -> TfliteModel:
        subgraphs = [self._subgraph(self._main_index, len(self._main.outputs), is_main=True)]
        done = 0
        while done < len(self._model.wanted):
            subgraphs.append(self._subgraph(*self._model.wanted[done]))
            done += 1
        if self._failures:
            raise InvalidModel(self._complaint())
        self._check_acyclic()
        written = [s for s in subgraphs if s is not None]
        if not all(s.operations for s in written):
            raise InvalidModel(
                "tflite: expected subgraphs with operations, got one in which nothing is computed"
            )
        assert len(written) == len(subgraphs), "what is missing is a failure"
        model = self._model.finish(written)
        return TfliteModel(
            model=model,
            inputs=self._arguments(self._main.inputs, model.main.inputs),
            outputs=self._arguments(self._main.outputs, model.main.outputs),
            signatures=tuple(
                self._signature(s) for s in self._file.signatures if s.subgraph_index == self._main_index
            ),
            operation_names=tuple(self._names),
            signature_keys=tuple(s.key for s in self._file.signatures),
        )

    def _subgraph(self, index: int, output_count: int, *, is_main: bool = False) -> Subgraph | None:
        try:
            g = SubgraphWriter(self._model, index, is_main=is_main)
        except Inexpressible as e:
            self._fail("input", e)
            return None
        for position, operator in enumerate(self._file.subgraphs[index].operators):
            self._operator(g, position, operator)
        self._references.append(g.references)
        try:
            subgraph = g.finish(output_count)
        except Inexpressible as e:
            if not isinstance(e, Consequence):
                self._fail("output", e)
            return None
        self._names.append(
            tuple(
                f"{operation_type_name(operation.type)} of {origin}"
                for operation, origin in zip(subgraph.operations, g.sources, strict=True)
            )
        )
        return subgraph

    def _operator(self, g: SubgraphWriter, position: int, operator: TfliteOperator) -> None:
        name = operator_name(operator)
        g.source = f"operator {position} {name}"
        for tensor_index in operator.inputs:
            if tensor_index >= 0 and not g.is_written(tensor_index):
                g.refuse(
                    operator,
                    "inputs",
                    "inputs, constants and what earlier operators wrote",
                    f"tensor {tensor_index} ({g.tensors[tensor_index].name!r})",
                )
        conversion = CONVERSIONS.get(operator.code)
        try:
            if fold(g, operator):
                return
            if conversion is None:
                raise Inexpressible("no such operator is known")
            if conversion.convert is None:
                raise Inexpressible(conversion.how)
            write(g, operator, conversion.convert)
        except Inexpressible as e:
            if not isinstance(e, Consequence):
                self._fail(name, e)
            g.bind_anything(operator)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            # The checks name what can be wrong; should damage find a way past them, it is still the file's fault.
            if isinstance(e, InvalidModel):
                raise
            raise InvalidModel(f"tflite, {operator.where} ({name}): unforeseen contents: {e!r}") from e

    def _fail(self, name: str, reason: Inexpressible) -> None:
        count, first = self._failures.get(name, (0, str(reason)))
        self._failures[name] = count + 1, first

    def _complaint(self) -> str:
        count = sum(count for count, _ in self._failures.values())
        listed = "; ".join(f"{n} x {name}: {why}" for name, (n, why) in self._failures.items())
        return f"tflite: expected operators that the HAL can express, got {count} that it cannot: {listed}"

    def _check_acyclic(self) -> None:
        """Demands that no subgraph refers to itself by any way. ``_references`` has the main subgraph first."""
        state = [0] * len(self._references)
        for start in range(len(state)):
            stack = [start]
            while stack:
                index = stack[-1]
                if state[index] == 0:
                    state[index] = 1
                    for target in self._references[index]:
                        if state[target + 1] == 1:
                            raise InvalidModel(
                                "tflite: expected subgraphs that do not refer to themselves, got a cycle"
                            )
                        if state[target + 1] == 0:
                            stack.append(target + 1)
                else:
                    state[index] = 2
                    stack.pop()

    def _arguments(self, tensors: Sequence[int], operands: Sequence[Operand]) -> tuple[TfliteArgument, ...]:
        named = [self._main.tensors[index] for index in tensors]
        return tuple(TfliteArgument(t.name, o, t.dimensions) for t, o in zip(named, operands, strict=True))

    def _signature(self, signature: Signature) -> TfliteSignature:
        main = self._main
        positions = []
        for what, entries, tensors in (
            ("input", signature.inputs, main.inputs),
            ("output", signature.outputs, main.outputs),
        ):
            # The first position of a tensor that is an output more than once.
            position_of = {tensor: position for position, tensor in reversed(list(enumerate(tensors)))}
            for name, tensor in entries:
                if tensor not in position_of:
                    raise InvalidModel(
                        f"tflite, signature {signature.key!r}: expected {what} {name!r} to be one of the model's, "
                        f"got tensor {tensor}"
                    )
            positions.append(tuple((name, position_of[tensor]) for name, tensor in entries))
        return TfliteSignature(signature.key, positions[0], positions[1])

"""One LiteRT interpreter, made ready once and run many times; and which engine a file gets.

Owns the interpreter, and views of its inputs and outputs. Each execution copies its arguments into LiteRT's memory and the results
out of it, once each; nothing else is allocated. ``in_place`` has the engine that copies nothing, for files that it can run.

Invariants:
1. ``run`` is called by one thread at a time. It releases Python's lock while LiteRT computes.
2. Views are used while the interpreter lives, and only where LiteRT keeps a tensor's place from one execution to the next.

Source: LiteRT's Python package: ``Interpreter.invoke`` releases the lock, ``CompiledModel`` does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from aionn.drivers.kit.arguments import OutputArea
from aionn.drivers.kit.engines.support import Unsupported
from aionn.drivers.kit.threads.classes import engine_call
from aionn.drivers.litert.flatbuffer_writer import Array
from aionn.drivers.litert.in_place import InPlaceEngine, Tensor, is_known_version
from aionn.drivers.litert.lowering import Lowered
from aionn.errors import InvalidArgument
from aionn.hal import OutputShape

__all__ = ["Engine", "check", "make_engines"]


def check(lowered: Lowered) -> None:
    """Queries LiteRT whether it can run a file, and whether it gives every tensor the file's shape.

    Of another shape, rank 0 for example where the HAL's is [1], what reads the tensor would compute something else.

    Raises:
        Unsupported: It refuses the file, or plans another shape.
    """
    if not lowered.file:
        return
    interpreter = _planned(lowered)
    for details, declared in zip(interpreter.get_tensor_details(), lowered.shapes, strict=False):
        planned = tuple(details["shape"].tolist())
        if declared and 0 not in declared and planned != declared:
            raise Unsupported(f"LiteRT gives tensor {details['name']} shape {planned}, expected {declared}")


def _planned(lowered: Lowered) -> Interpreter:
    """LiteRT's plan of a file with its builtin kernels, without packed weights.

    Raises:
        Unsupported: LiteRT refuses it.
    """
    try:
        interpreter = Interpreter(
            model_content=lowered.file,
            num_threads=1,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
        interpreter.allocate_tensors()
    except (RuntimeError, ValueError) as e:
        raise Unsupported(f"LiteRT refuses it: {e}") from e
    return interpreter


def _arguments(lowered: Lowered) -> tuple[list[Tensor], list[Tensor]]:
    """A file's inputs and outputs with the shapes that LiteRT plans."""
    interpreter = _planned(lowered)
    inputs, outputs = (
        [Tensor(int(d["index"]), tuple(int(n) for n in d["shape"]), np.dtype(d["dtype"])) for d in details]
        for details in (interpreter.get_input_details(), interpreter.get_output_details())
    )
    return inputs, outputs


def make_engines(
    lowered: Lowered, thread_count: int, shapes: Sequence[tuple[int, ...]], count: int
) -> list[Engine] | list[InPlaceEngine]:
    """Engines that work in the client's memory, or interpreters for what those cannot run.

    Args:
        lowered: The file.
        thread_count: Threads of one execution.
        shapes: The outputs' shapes, those of the file alone, as the HAL has them; 0 or empty where unknown.
        count: Their number.

    Raises:
        Unsupported: LiteRT refuses the file.
    """
    if lowered.is_static and is_known_version():
        inputs, outputs = _arguments(lowered)
        if all(t.shape and 0 not in t.shape for t in (*inputs, *outputs)):
            sizes = zip(outputs, shapes, strict=True)
            known = [s if 0 not in s and np.prod(s) == np.prod(t.shape) else t.shape for t, s in sizes]
            try:
                return [InPlaceEngine(lowered, thread_count, inputs, outputs, known) for _ in range(count)]
            except Unsupported:
                pass  # The interpreter raises the reason, if it cannot run it either.
    return [Engine(lowered, thread_count, shapes) for _ in range(count)]


class Engine:
    """A file in an interpreter, its memory planned and its weights packed.

    Args:
        lowered: The file.
        thread_count: Threads of one execution.
        shapes: The outputs' shapes as the HAL has them; 0 or empty where unknown.

    Raises:
        Unsupported: LiteRT refuses the file.
    """

    def __init__(self, lowered: Lowered, thread_count: int, shapes: Sequence[tuple[int, ...]] = ()) -> None:
        self._shapes = shapes
        try:
            self._interpreter = Interpreter(model_content=lowered.file, num_threads=thread_count)
            self._interpreter.allocate_tensors()
            self._invoke = engine_call(self._interpreter.invoke)
        except (RuntimeError, ValueError) as e:
            raise Unsupported(f"LiteRT refuses it: {e}") from e
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._inputs = [int(d["index"]) for d in inputs]
        self._outputs = [int(d["index"]) for d in outputs]
        self._views: tuple[list[Array], list[Array]] | None = None
        # LiteRT gives a tensor of rank 0 as a number, and one without elements has no place.
        details = [*inputs, *outputs]
        if lowered.is_static and all(d["shape"].size and d["shape"].all() for d in details):
            self._views = [self._view(d) for d in inputs], [self._view(d) for d in outputs]

    def _view(self, details: dict[str, Any]) -> Array:
        """A tensor's memory."""
        array = self._interpreter.tensor(details["index"])()
        # An array of LiteRT's keeps the interpreter from being run; one at the same address does not.
        address, size_bytes, dtype, shape = array.ctypes.data, array.nbytes, array.dtype, array.shape
        del array
        raw = (ctypes.c_char * size_bytes).from_address(address)
        return np.frombuffer(raw, dtype=dtype).reshape(shape)

    def run(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> list[OutputShape]:
        """Computes, and writes the outputs. Raises as ``compute`` does."""
        results = zip(areas, self.compute(inputs), self._shapes, strict=True)
        return [area.store(_shaped(result, shape)) for area, result, shape in results]

    def compute(self, inputs: Sequence[Array | None]) -> list[Array]:
        """Computes. The results may be views that the next call overwrites.

        Raises:
            InvalidArgument: An input is left out.
            RuntimeError: LiteRT failed, for example at an index out of range.
        """
        if self._views is None:
            return self._run_by_value(inputs)
        for position, (view, value) in enumerate(zip(self._views[0], inputs, strict=True)):
            if value is None:
                raise InvalidArgument(f"execution, input {position}: missing")
            np.copyto(view, value, casting="no")
        self._invoke()
        return self._views[1]

    def _run_by_value(self, inputs: Sequence[Array | None]) -> list[Array]:
        for position, (index, value) in enumerate(zip(self._inputs, inputs, strict=True)):
            if value is None:
                raise InvalidArgument(f"execution, input {position}: missing")
            self._interpreter.set_tensor(index, value)
        self._invoke()
        return [np.asarray(self._interpreter.get_tensor(index)) for index in self._outputs]


def _shaped(result: Array, declared: tuple[int, ...]) -> Array:
    """The result in the HAL's shape: a single number has shape [1]."""
    if result.shape == declared or (declared and 0 not in declared and result.size == np.prod(declared)):
        return result if result.shape == declared else result.reshape(declared)
    return result.reshape(1) if result.ndim == 0 else result

"""One LiteRT interpreter, made ready once and run many times.

Owns the interpreter, and views of its inputs and outputs. Each execution copies its arguments into LiteRT's memory and the results
out of it, once each; nothing else is allocated.

Invariants:
1. ``run`` is called by one thread at a time. It lets go of Python's lock while LiteRT computes.
2. Views are used while the interpreter lives, and only where LiteRT keeps a tensor's place from one execution to the next.

Source: LiteRT's Python package: ``Interpreter.invoke`` releases the lock, ``CompiledModel`` does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from aionn.drivers.litert.flatbuffer_writer import Array, Unsupported
from aionn.drivers.litert.lowering import Lowered
from aionn.errors import InvalidArgument

__all__ = ["Engine", "check"]


def check(lowered: Lowered) -> None:
    """Lets LiteRT plan a file with its builtin kernels, without packing weights.

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


class Engine:
    """A file in an interpreter, its memory planned and its weights packed.

    Raises:
        Unsupported: LiteRT refuses the file.
    """

    def __init__(self, lowered: Lowered, thread_count: int) -> None:
        try:
            self._interpreter = Interpreter(model_content=lowered.file, num_threads=thread_count)
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as e:
            raise Unsupported(f"LiteRT refuses it: {e}") from e
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._is_read = lowered.is_read
        self._inputs = [int(d["index"]) for d in inputs]
        self._outputs = [int(d["index"]) for d in outputs]
        self._views: tuple[list[Array], list[Array]] | None = None
        # LiteRT gives a tensor of rank 0 as a number, and one without elements has no place.
        details = [*inputs, *outputs]
        if (
            lowered.is_static
            and all(lowered.is_read)
            and all(d["shape"].size and d["shape"].all() for d in details)
        ):
            self._views = [self._view(d) for d in inputs], [self._view(d) for d in outputs]

    def _view(self, details: dict[str, Any]) -> Array:
        """A tensor's memory."""
        array = self._interpreter.tensor(details["index"])()
        # An array of LiteRT's keeps the interpreter from being run; one at the same address does not.
        address, size_bytes, dtype, shape = array.ctypes.data, array.nbytes, array.dtype, array.shape
        del array
        raw = (ctypes.c_char * size_bytes).from_address(address)
        return np.frombuffer(raw, dtype=dtype).reshape(shape)

    def run(self, inputs: Sequence[Array | None]) -> list[Array]:
        """Computes. The results may be views that the next ``run`` overwrites.

        Raises:
            InvalidArgument: An input that is needed is left out.
            RuntimeError: LiteRT failed, for example at an index out of range.
        """
        if self._views is None:
            return self._run_by_value(inputs)
        for view, value in zip(self._views[0], inputs, strict=True):
            if value is None:
                raise InvalidArgument("execution: an input that the model reads is left out")
            np.copyto(view, value, casting="no")
        self._interpreter.invoke()
        return self._views[1]

    def _run_by_value(self, inputs: Sequence[Array | None]) -> list[Array]:
        for index, value, is_read in zip(self._inputs, inputs, self._is_read, strict=True):
            if value is not None:
                self._interpreter.set_tensor(index, value)
            elif is_read:
                raise InvalidArgument("execution: an input that the model reads is left out")
        self._interpreter.invoke()
        return [np.asarray(self._interpreter.get_tensor(index)) for index in self._outputs]

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
        self._inputs = [
            None if 0 in d["shape"] else self._view(d) for d in self._interpreter.get_input_details()
        ]
        self._outputs = [
            (int(d["index"]), None if lowered.has_control_flow or 0 in d["shape"] else self._view(d))
            for d in self._interpreter.get_output_details()
        ]

    def _view(self, details: dict[str, Any]) -> Array | None:
        """A tensor's memory; None where it has no place of its own yet."""
        try:
            array = self._interpreter.tensor(details["index"])()
        except ValueError:
            return None  # A tensor whose shape LiteRT finds while it computes.
        # An array of LiteRT's keeps the interpreter from being run; one at the same address does not.
        address, size_bytes, dtype, shape = array.ctypes.data, array.nbytes, array.dtype, array.shape
        del array
        raw = (ctypes.c_char * size_bytes).from_address(address)
        return np.frombuffer(raw, dtype=dtype).reshape(shape)

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Computes. The results are views that the next ``run`` overwrites.

        Raises:
            RuntimeError: LiteRT failed, for example at an index out of range.
        """
        for view, value in zip(self._inputs, inputs, strict=True):
            if view is not None:
                np.copyto(view, value, casting="no")
        self._interpreter.invoke()
        return [
            view if view is not None else self._interpreter.get_tensor(index) for index, view in self._outputs
        ]

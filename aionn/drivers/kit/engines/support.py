"""The error for models that an engine cannot run, models of some operations of another one, for questions to the engine, and the
texts of engines' exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aionn.hal import Model
from aionn.hal.slicing import cut_model, read_from_outside

__all__ = ["Unsupported", "is_exhausted", "part_of", "short_text", "single_operation_model"]

_TEXT_MAX = 300
"""Characters of an engine's message that an error quotes: its first sentences, before a trace of its own."""

_EXHAUSTED = re.compile(
    r"bad_alloc|(?<!-)\ballocate\b|OUT_OF_(HOST_MEMORY|DEVICE_MEMORY|RESOURCES)|OBJECT_ALLOCATION_FAILURE|max size of memory"
    r"|Resource temporarily unavailable|out of memory|is smaller than requested bytes|_ALLOC(ATION)?_FAILED"
)
"""Parts of engines' messages where memory or threads were exhausted: "failed to allocate", and not "the pre-allocated output"; the
names of OpenCL's and Level Zero's errors; "[GPU] Exceeded max size of memory object allocation"; CUDA's error, and "available
memory of N is smaller than requested bytes of M", of ONNX Runtime where a provider's memory has a limit; the names of the errors of
cuBLAS and cuDNN; and the C library's text where it cannot start a thread."""


class Unsupported(Exception):
    """An engine has no equivalent of something in a model, or rejects it; the message has the reason."""


def single_operation_model(model: Model, index: int) -> Model:
    """The model of one operation of the main subgraph, with its inputs and outputs as the model's."""
    return part_of(model, (index,))


def part_of(model: Model, indexes: Sequence[int]) -> Model:
    """The model of some operations of the main subgraph, with all that they write as its outputs."""
    operations = model.main.operations
    outputs = tuple(output for index in indexes for output in operations[index].outputs)
    return cut_model(model, tuple(indexes), read_from_outside(model.main, tuple(indexes)), outputs)


def short_text(error: BaseException) -> str:
    """The message of an engine's exception, in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "..."


def is_exhausted(error: BaseException) -> bool:
    """Whether an engine's exception reports that there is no memory, or no thread, left."""
    return isinstance(error, MemoryError) or _EXHAUSTED.search(str(error)) is not None

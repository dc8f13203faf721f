"""The models that a door serves: their descriptions, the check of a request against them, and the execution.

Invariants:
1. No value of a request is converted before name, datatype and shape fit the model.
2. The largest message that can be of use is known from the models: nothing larger is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import aionn
from aionn.oip.refusals import NotServed
from aionn.oip.requests import (
    VERSION,
    InputTensor,
    ModelDescription,
    TensorDescription,
    WantedOutput,
    check_name,
)
from aionn.oip.tensors import Array, count_of, datatype_of

__all__ = [
    "EXECUTIONS_MAX",
    "MODELS_MAX",
    "ServedModel",
    "find_models",
    "message_bytes_max",
    "served",
]

MODELS_MAX: Final = 64
"""Models of one door: each has memory for its requests."""

EXECUTIONS_MAX: Final = 64
"""Requests under way of one door. All of them can be in buffers of a burst, where the scheduler orders them by priority and
deadline; more would only wait until they are late."""

BUFFERS_BYTES_MAX: Final = 64 << 20
"""Memory for the requests of one model: 64 frames of 1 MiB. A model with larger ones gets fewer buffers, at least two, and requests
that wait for a buffer get it in the order of their arrival."""

BUFFERS_MIN: Final = 2

UNKNOWN_BYTES_MAX: Final = 16 << 20
"""Largest message where a model does not state a shape: a picture of 4 megapixels in floats fits."""

ENVELOPE_BYTES: Final = 64 << 10
"""Names, shapes and parameters of a message, beside its values."""

ELEMENT_BYTES_MAX: Final = 32
"""Bytes that an element may take: 10 as a packed integer, 25 as JSON, with a bracket and blanks."""

MESSAGE_BYTES_MAX: Final = 256 << 20
"""Largest message of all: a few of them fit into the memory of a small machine."""

EXTENT_END: Final = 1 << 31
"""Extents of an operand are below it."""

SUFFIXES: Final = (".tflite", ".onnx")


class _Tensor(NamedTuple):
    """An input or output: its description, and its element type in numpy."""

    description: TensorDescription
    dtype: np.dtype[Any]


class ServedModel:
    """A compiled model with a name.

    Args:
        name: The name.
        net: The model.
        platform: The form of its file, such as ``onnx``.
        burst: Executes it; None where its shapes are unknown, which a burst does not take.
    """

    def __init__(
        self, name: str, net: aionn.Compilation, platform: str, burst: aionn.Burst | None = None
    ) -> None:
        self.name = check_name(name, "model")
        self._net = net
        self._burst = burst
        inputs = _tensors(net.inputs, "input", f"model {name}")
        outputs = _tensors(net.outputs, "output", f"model {name}")
        self.description = ModelDescription(
            name,
            f"{aionn.__name__}_{platform}",
            tuple(one.description for one in inputs),
            tuple(one.description for one in outputs),
        )
        self._inputs = {one.description.name: (index, one) for index, one in enumerate(inputs)}
        self._outputs = {one.description.name: index for index, one in enumerate(outputs)}

    def check_version(self, version: str) -> None:
        """Raises ``NotServed`` for any other version than the one there is; a request may leave it out."""
        if version not in ("", VERSION):
            raise NotServed(
                f"model {self.name!r}: version {version!r:.80} is not served, only version {VERSION}"
            )

    def check_inputs(self, given: Sequence[InputTensor]) -> list[tuple[int, InputTensor, np.dtype[Any]]]:
        """Position, tensor and element type of each input of a request.

        Raises:
            InvalidArgument: A name, datatype or shape is not that of the model, or a name is there twice.
        """
        found = []
        names: set[str] = set()
        for tensor in given:
            where = f"model {self.name!r}, input {tensor.name!r:.160}"
            known = self._inputs.get(tensor.name)
            if known is None:
                raise aionn.InvalidArgument(f"{where}: expected one of {_listed(self._inputs)}")
            if tensor.name in names:
                raise aionn.InvalidArgument(f"{where}: expected each input once, got it twice")
            names.add(tensor.name)
            index, one = known
            if tensor.datatype != one.description.datatype:
                raise aionn.InvalidArgument(
                    f"{where}: expected the datatype {one.description.datatype}, got {tensor.datatype!r:.80}"
                )
            _check_shape(one.description.shape, tensor.shape, where)
            found.append((index, tensor, one.dtype))
        return found

    def wanted(self, outputs: Sequence[WantedOutput], is_binary: bool) -> list[tuple[int, bool]]:
        """Position of each output that a request wants, and whether it wants raw bytes.

        Raises:
            InvalidArgument: A name is not that of an output.
        """
        if not outputs:
            return [(index, is_binary) for index in range(len(self._outputs))]
        found = []
        for one in outputs:
            index = self._outputs.get(one.name)
            if index is None:
                raise aionn.InvalidArgument(
                    f"model {self.name!r}, output {one.name!r:.160}: expected one of {_listed(self._outputs)}"
                )
            found.append((index, one.is_binary))
        return found

    async def execute(
        self, values: Mapping[int, Array], deadline_ns: int | None, priority: aionn.Priority
    ) -> Sequence[Array]:
        """The outputs for inputs by position. Raises as ``Compilation.execute``."""
        inputs = [values.get(index) for index in range(len(self._inputs))]
        execute = self._net.execute if self._burst is None else self._burst.execute
        result = await execute(inputs, deadline=deadline_ns, priority=priority)
        return result.outputs


def _tensors(specs: Sequence[aionn.TensorSpec], word: str, where: str) -> list[_Tensor]:
    found: list[_Tensor] = []
    names: set[str] = set()
    for index, spec in enumerate(specs):
        name = spec.name or f"{word}_{index}"
        while name in names:
            name = f"{name}_{index}"
        names.add(name)
        dtype, shape = spec.dtype, spec.dimensions
        if spec.declared is not None:
            dtype = np.dtype(spec.declared.dtype)
            shape = shape if spec.declared.dimensions is None else spec.declared.dimensions
        try:
            datatype = datatype_of(dtype)
        except aionn.InvalidArgument as e:
            raise aionn.InvalidArgument(f"{where}, {word} {name!r}: {e}") from None
        extents = tuple(extent or -1 for extent in shape)
        found.append(_Tensor(TensorDescription(name, datatype, extents), dtype))
    return found


def _check_shape(expected: tuple[int, ...], given: tuple[int, ...], where: str) -> None:
    fits = len(expected) == len(given) and all(
        0 < g < EXTENT_END and e in (-1, g) for e, g in zip(expected, given, strict=True)
    )
    if not fits:
        raise aionn.InvalidArgument(f"{where}: expected the shape {list(expected)}, got {list(given)}")


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name)[:80] for name in names]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def message_bytes_max(models: Iterable[ServedModel]) -> int:
    """The largest message that a request to one of the models can need."""
    return max(
        (min(MESSAGE_BYTES_MAX, _message_bytes(model.description)) for model in models),
        default=ENVELOPE_BYTES,
    )


def _message_bytes(model: ModelDescription) -> int:
    if any(-1 in one.shape for one in model.inputs):
        return UNKNOWN_BYTES_MAX
    return ENVELOPE_BYTES + ELEMENT_BYTES_MAX * sum(count_of(one.shape) for one in model.inputs)


def _buffers(model: aionn.Compilation) -> int:
    """Number of buffers of a burst."""
    frame = sum(count_of(spec.dimensions) * spec.dtype.itemsize for spec in (*model.inputs, *model.outputs))
    return max(BUFFERS_MIN, min(EXECUTIONS_MAX, BUFFERS_BYTES_MAX // max(1, frame)))


def find_models(places: Sequence[str]) -> dict[str, Path]:
    """The files of models, by name, that a command line names: ``NAME=FILE``, ``FILE``, or a folder of files.

    A file without a name has that of the file, without its suffix. A folder stands for the files in it that end in .tflite or
    .onnx.

    Raises:
        InvalidArgument: There is no such file, a folder has none, or two models have the same name.
    """
    found: dict[str, Path] = {}
    for place in places:
        for name, path in _models_at(place):
            check_name(name, f"--model {place}")
            if name in found:
                raise aionn.InvalidArgument(
                    f"--model {place}: two models have the name {name!r}, {found[name]} and {path}; "
                    f"write --model OTHER={path}"
                )
            found[name] = path
    if len(found) > MODELS_MAX:
        raise aionn.InvalidArgument(f"--model: expected at most {MODELS_MAX} models, got {len(found)}")
    return found


def _models_at(place: str) -> list[tuple[str, Path]]:
    name, separator, rest = place.partition("=")
    path = Path(place)
    if separator and not path.exists():
        path = Path(rest)
        if path.is_dir():
            raise aionn.InvalidArgument(
                f"--model {place}: {rest} is a folder, whose files have their own names"
            )
    else:
        name = ""
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES and one.is_file())
        if not files:
            raise aionn.InvalidArgument(f"--model {place}: no file of the folder ends in .tflite or .onnx")
        return [(one.stem, one) for one in files]
    if not path.is_file():
        raise aionn.InvalidArgument(f"--model {place}: no such file")
    return [(name or path.stem, path)]


@asynccontextmanager
async def served(
    runtime: aionn.Runtime, files: Mapping[str, str | os.PathLike[str]]
) -> AsyncIterator[dict[str, ServedModel]]:
    """The models of files, compiled on all devices of a runtime, while inside.

    Raises:
        Error: As ``Runtime.compile``, with the name of the model.
    """
    async with AsyncExitStack() as stack:
        models = {}
        for name, path in files.items():
            net = await stack.enter_async_context(await runtime.compile(path))
            burst = None
            if all(0 not in spec.dimensions for spec in (*net.inputs, *net.outputs)):
                # Beyond the bursts that a client may have, models are executed without one, at a higher cost for each request.
                with contextlib.suppress(aionn.ResourceExhausted):
                    burst = await stack.enter_async_context(net.burst(slots=_buffers(net)))
            platform = Path(path).suffix.lstrip(".").lower() or "model"
            models[name] = ServedModel(name, net, platform, burst)
        yield models

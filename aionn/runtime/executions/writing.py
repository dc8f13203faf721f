"""Writing the items of a stream into the inputs of a model.

Owns the forms that an item may have: an array for the only input, a mapping from the names of inputs to arrays, or anything that a
function of the application writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aionn.errors import InvalidArgument, class_text
from aionn.hal import Priority
from aionn.runtime.executions.slot_pool import FrameBuffer
from aionn.runtime.memory.arguments import Array, TensorSpec, check_inputs
from aionn.runtime.memory.usual import usual_input

__all__ = ["StreamArguments", "ViewsWriter", "item_writer"]

ViewsWriter = Callable[[Any, Mapping[str, Array]], Mapping[str, Any] | None]
"""Writes a value of an application into views of several inputs, by their names; or returns arrays for some of them."""


class StreamArguments(NamedTuple):
    """The arguments of a stream, with or without a guarantee, that were checked.

    Attributes:
        source: Gives the items.
        write: Writes an item into the memory of its inputs.
        drops_late: Whether late items are dropped.
        rank: Their priority.
        measure: Whether their timing is wanted.
    """

    source: AsyncIterable[Any]
    write: Callable[[Any, FrameBuffer], object]
    drops_late: bool
    rank: Priority
    measure: bool


def item_writer(
    inputs: Sequence[TensorSpec], into: Callable[[Any, Any], object] | None
) -> Callable[[Any, FrameBuffer], object]:
    """Makes the function that writes an item into a buffer.

    Args:
        inputs: The inputs of the model.
        into: As for ``Burst.stream``.

    Raises:
        InvalidArgument: ``into`` is not a function, or the inputs have names that are missing or equal.
    """
    if into is not None and not callable(into):
        raise InvalidArgument(
            f"stream, into: expected a function into(item, view), got {class_text(into)}; see aionn.image_writer"
        )
    if len(inputs) == 1:
        if into is None:
            return _array_writer(inputs)
        write: Callable[[Any, Array], object] = into

        def write_one(item: Any, buffer: FrameBuffer) -> None:
            view = buffer.views[0].view()
            returned = write(item, view)
            if returned is not None:
                _check_returned(returned, view)

        return write_one
    if not inputs or len({spec.name for spec in inputs}) != len(inputs):
        names = ", ".join(spec.name for spec in inputs)
        raise InvalidArgument(
            f"stream: expected a model whose inputs have different names, got {names or 'none'}"
        )
    return _ItemWriter(inputs, into)


def _check_returned(returned: object, view: Array) -> None:
    """Rejects an array, a mapping or a coroutine: the function that returned it writes nothing into the view. Numbers, such as the
    count of ``readinto``, and the view itself, as ``out=`` of numpy returns it, are ignored.
    """
    if isinstance(returned, np.ndarray):
        has_written = np.may_share_memory(returned, view)
    else:
        has_written = not isinstance(returned, Mapping | Coroutine)
    if has_written:
        return
    if isinstance(returned, Coroutine):
        returned.close()
    raise InvalidArgument(
        "stream, into: expected a function that writes into its view and returns nothing, got one that "
        f"returned {class_text(returned)}; write view[...] = array"
    )


class _ItemWriter:
    """Writes items of a stream into several inputs, by their names."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        into: Callable[[Any, Mapping[str, Array]], object] | None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._into = into

    def __call__(self, item: Any, buffer: FrameBuffer) -> None:
        area = buffer.area
        views = {name: area.view(key).view() for name, key in zip(self._specs, buffer.inputs, strict=True)}
        if self._into is None:
            self._copy(item, views, is_whole=True)
            return
        given = self._into(item, views)
        if given is not None:
            self._copy(given, views, is_whole=False)

    def _copy(self, values: Any, views: Mapping[str, Array], *, is_whole: bool) -> None:
        names = ", ".join(self._specs)
        if not isinstance(values, Mapping):
            raise InvalidArgument(
                f"stream: expected a mapping from the names of inputs ({names}) to arrays, got {class_text(values)}"
            )
        unknown = [name for name in values if name not in views]
        missing = [name for name in views if name not in values] if is_whole else []
        if unknown or missing:
            wrong = f"{unknown[0]!r}, which the model lacks" if unknown else f"no {missing[0]!r}"
            raise InvalidArgument(f"stream: expected arrays for {names}; got {wrong}")
        for index, (name, spec) in enumerate(self._specs.items()):
            if name not in values:
                continue
            (array,) = check_inputs([spec], [values[name]], first=index)
            if array is None:
                raise InvalidArgument(f"stream: expected an array for {name}, got None")
            views[name][...] = array


def _array_writer(specs: Sequence[TensorSpec]) -> Callable[[Any, FrameBuffer], object]:
    usual = usual_input(specs)

    def write(value: Any, buffer: FrameBuffer) -> None:
        array: Array | None = value
        if usual is None or not usual.is_form_of(value):
            (array,) = check_inputs(specs, [value])
        if array is None:
            raise InvalidArgument(f"stream: expected an array for {specs[0].name}, got None")
        buffer.views[0][...] = array

    return write

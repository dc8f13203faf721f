"""The arguments of executions as an engine is given them: in the client's memory where that is safe, else copied.

Owns the decision which arrays an engine uses directly, its own memory for the other arrays, and the sets of arguments that were
seen before: a burst's slots come again and again, and nothing is made anew for them.

Invariants:
1. An engine works directly on memory that a client can change during the execution only where no value is ever an address
   (``Place.is_in_place``); other values are copied, into and out of memory of the slot's own.
2. An array is used in place only while it is the checked object: its mapping lives as long as it does.
3. One thread at a time uses an object.

Source: ``kit.arguments`` for what an engine can use in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from operator import call, is_
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from aionn.drivers.kit.arguments import Array, OutputArea, engine_memory, fits_in_place
from aionn.errors import InvalidArgument

__all__ = ["BOUND_MAX", "Bound", "BoundArguments", "Place"]

BOUND_MAX = 256
"""Most sets of arguments kept by a slot: a burst's slots come again and again, others once."""

T = TypeVar("T")

Make = Callable[[Sequence[Array | None]], T]
"""Makes what an engine is called with, from an array for each input and output: the client's, or the slot's own; None for an output
whose shape only the execution knows."""


class Place(NamedTuple):
    """An input or an output of an engine's model.

    Attributes:
        dtype: numpy's name of its element type.
        shape: Its extents; None for an output whose shape only the execution knows.
        is_in_place: Whether the engine may use it in memory that a client can change during the execution.
    """

    dtype: str
    shape: tuple[int, ...] | None
    is_in_place: bool


class Bound(NamedTuple, Generic[T]):
    """One set of arguments that was looked at.

    Attributes:
        references: The arrays, weakly.
        arguments: The arguments of the engine's call.
        copied_in: Which inputs are copied.
        copied_out: Which outputs are copied, or have a shape that only the execution knows.
    """

    references: list[weakref.ref[Array]]
    arguments: T
    copied_in: list[int]
    copied_out: list[int]


class BoundArguments(Generic[T]):
    """The sets of arguments that a slot has seen.

    Args:
        inputs: The inputs of the engine's model.
        outputs: Its outputs.
        drop: Called with what ``make`` of ``bind`` made, when it is used no more.
    """

    def __init__(
        self,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        drop: Callable[[T], None] | None = None,
    ) -> None:
        self._places = (*inputs, *outputs)
        self._input_count = len(inputs)
        self._drop = drop
        self._own: list[Array | None] = [None] * len(self._places)
        self._bound: dict[tuple[int, ...], Bound[T]] = {}

    def __len__(self) -> int:
        return len(self._bound)

    def values(self) -> Collection[Bound[T]]:
        """The sets that are kept."""
        return self._bound.values()

    def own(self, place: int) -> Array:
        """The slot's own memory for an input, or behind those for an output; made when it is first needed."""
        memory = self._own[place]
        if memory is None:
            dtype, shape, _ = self._places[place]
            assert shape is not None, "it has no memory before the execution"
            memory = self._own[place] = engine_memory(dtype, shape)
        return memory

    def own_output(self, index: int) -> Array | None:
        """The slot's own memory for an output; None where the shape is not known."""
        return self._own[self._input_count + index]

    def bind(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea], make: Make[T]) -> Bound[T]:
        """The set of these arguments; inputs that are copied have been.

        Args:
            inputs: One array per input.
            areas: One area per output.
            make: Makes what the engine is called with, where the set is new.

        Raises:
            InvalidArgument: An input is omitted.
        """
        arrays = [*inputs, *[area.buffer for area in areas]]
        key = tuple(map(id, arrays))
        bound = self._bound.get(key)
        if bound is None or not all(map(is_, map(call, bound.references), arrays)):
            bound = self._look_at(key, arrays, make)
        for index in bound.copied_in:
            value, own = inputs[index], self._own[index]
            assert value is not None and own is not None, "looked at when it was bound"
            if value.dtype != own.dtype:  # Values of extension types come as bytes.
                value = np.frombuffer(value.tobytes(), own.dtype).reshape(own.shape)
            np.copyto(own, value, casting="no")
        return bound

    def in_place(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> list[Array] | None:
        """The arrays of an execution, inputs first, if the engine can use each of them in place; None otherwise."""
        found = []
        arrays = [*inputs, *[area.buffer for area in areas]]
        for index, (place, array) in enumerate(zip(self._places, arrays, strict=True)):
            if array is None or not self._is_in_place(index, place, array):
                return None
            found.append(array)
        return found

    def _is_in_place(self, index: int, place: Place, array: Array) -> bool:
        dtype, shape, is_in_place = place
        return (
            shape is not None
            and is_in_place
            and fits_in_place(array, dtype, shape, is_input=index < self._input_count)
        )

    def _look_at(self, key: tuple[int, ...], arrays: Sequence[Array | None], make: Make[T]) -> Bound[T]:
        count = self._input_count
        copied: list[int] = []
        given: list[Array] = []
        used: list[Array | None] = []
        for index, (place, array) in enumerate(zip(self._places, arrays, strict=True)):
            if array is None:
                raise InvalidArgument(f"execution, input {index}: missing")
            given.append(array)
            if self._is_in_place(index, place, array):
                used.append(array)
                continue
            copied.append(index)
            used.append(None if place.shape is None else self.own(index))
        bound = Bound(
            [weakref.ref(array) for array in given],
            make(used),
            [i for i in copied if i < count],
            [i - count for i in copied if i >= count],
        )
        outdated = self._bound.pop(key, None)
        if outdated is not None and self._drop is not None:
            self._drop(outdated.arguments)
        if len(self._bound) >= BOUND_MAX:
            self.clear()
        self._bound[key] = bound
        return bound

    def clear(self) -> None:
        """Forgets all sets."""
        if self._drop is not None:
            for bound in self._bound.values():
                self._drop(bound.arguments)
        self._bound.clear()

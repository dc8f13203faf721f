"""The common part of slots whose engine works in the client's memory: bind the arguments, compute, copy the remaining results.

Owns the order of one execution. A driver's slot derives from ``BoundSlot`` and has the calls of its engine.

Invariants:
1. An engine works directly on memory that a client can change only as ``BoundArguments`` allows.
2. One thread at a time runs a slot.

Source: ``kit.engines.bound`` for the arguments.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from aionn.drivers.kit.arguments import Array, OutputArea
from aionn.drivers.kit.engines.bound import BoundArguments, Place
from aionn.hal import OutputShape

__all__ = ["BoundSlot"]

T = TypeVar("T")


class BoundSlot(abc.ABC, Generic[T]):
    """The belongings of one execution at a time: memory of its own, and the sets of arguments that it has seen. Implement
    ``bind_arrays`` and ``compute``; ``open_output`` where an output's shape may be unknown before the execution, and ``begin``
    and ``stop`` where another thread can stop the engine.

    Args:
        inputs: The inputs of the engine's model.
        outputs: Its outputs.
        shapes: The outputs' shapes as the HAL has them; empty where only the execution knows.
        drop: Called with a result of ``bind_arrays`` that is used no more.

    Attributes:
        is_brief: Whether the next run is certain to be over before it could be stopped; False where that is unknown.
    """

    is_brief = False

    def __init__(
        self,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        shapes: Sequence[tuple[int, ...]],
        drop: Callable[[T], None] | None = None,
    ) -> None:
        self._shapes = [OutputShape(shape) for shape in shapes]
        self._bound: BoundArguments[T] = BoundArguments(inputs, outputs, drop)

    @abc.abstractmethod
    def bind_arrays(self, arrays: Sequence[Array | None]) -> T:
        """Makes the argument of ``compute`` from an array for each input and output; None for an output whose shape only the
        execution knows.
        """

    @abc.abstractmethod
    def compute(self, arguments: T) -> None:
        """Runs the engine.

        Raises:
            Error: It failed, or was stopped.
        """

    def open_output(self, arguments: T, index: int) -> Array:
        """The result of an output whose shape only the execution knows."""
        raise AssertionError("every shape is known")

    def begin(self) -> None:
        """Takes back an earlier ``stop``. Before each run, and before another thread may stop it."""

    def stop(self) -> None:
        """Ends the run where the engine can. From any thread."""

    def run(self, inputs: Sequence[Array | None], areas: Sequence[OutputArea]) -> list[OutputShape]:
        """Computes, and writes the outputs.

        Raises:
            Error: An input is omitted, the engine failed, or it was stopped.
        """
        bound = self._bound.bind(inputs, areas, self.bind_arrays)
        self.compute(bound.arguments)
        if not bound.copied_out:
            return self._shapes
        shapes = list(self._shapes)
        for index in bound.copied_out:
            result = self._bound.own_output(index)
            if result is None:
                result = self.open_output(bound.arguments, index)
            else:
                result = result.reshape(shapes[index].dimensions)
            shapes[index] = areas[index].store(result)
        return shapes

"""An application's arrays and the shared memory that carries them to a device.

Owns the description of inputs and outputs, the checks of what an application passes, and the layout of request memory.
``real_values`` and ``pictures`` make what a model's input takes.

Invariants:
1. Values are stored 64-byte aligned and padded in one memory per execution, so that mapping it once serves every argument of every
   step.
2. A value that does not fit the model is refused before anything is copied.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aionn.errors import GeneralFailure, InvalidArgument, OutputInsufficientSize, class_text
from aionn.hal import (
    Buffer,
    BufferToken,
    DataLocation,
    Memory,
    Operand,
    OutputShape,
    Request,
    RequestArgument,
    combine_dimensions,
    dimensions_are_known,
    is_scalar_type,
    operand_dtype,
    operand_size_bytes,
    operand_type_name,
)
from aionn.hal.pooled_request import place_values
from aionn.runtime.memory.declared import Declared, in_declared, number_of, stored_as
from aionn.runtime.memory.remedies import remedy_for_input

__all__ = [
    "AREAS_KEPT_MAX",
    "Array",
    "Binding",
    "RequestArea",
    "TensorSpec",
    "check_apart",
    "check_inputs",
    "check_unmasked",
    "declared_spec",
    "output_target",
    "tensor_spec",
]

_logger = logging.getLogger("aionn.memory")

_OVERLAP_WORK_MAX = 1000
"""Steps of a comparison of two views: some microseconds. Only views of many axes that interleave take more, and are let pass."""

Array = npt.NDArray[Any]

NAMED_MAX = 8
"""Inputs that a message names; a model of states may have hundreds."""

AREAS_KEPT_MAX = 8
"""Request memories that a compilation, or a subgraph of one, keeps for the next execution; more are given back."""

# In a request an extent of 0 means "unknown": an empty value cannot be an input.
_EMPTY = "no device can be given an empty value"

UNKNOWN_OUTPUT_BYTES = 4096
"""First estimate for an output whose size the model does not give: a page; the device reports the size that it needs if that is too
small.
"""


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output of a model.

    Attributes:
        name: Its name, where the model has one.
        type: Operand type.
        dimensions: Extents, 0 where unknown; ``()`` for a scalar or an unknown rank.
        scale: Quantisation scale, 0 for types without.
        zero_point: Quantisation zero point.
        declared: The element type and shape that the model's file declares, if they differ from the operand's. Arrays of both are
            accepted, and results have the declared ones; memories and views of memory have the operand's.
    """

    name: str
    type: int
    dimensions: tuple[int, ...]
    scale: float = 0.0
    zero_point: int = 0
    declared: Declared | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy's element type."""
        return operand_dtype(self.type)

    def __str__(self) -> str:
        shape = "x".join(str(d) if d else "?" for d in self.dimensions) or "scalar"
        quantisation = f" scale {self.scale:g} zero point {self.zero_point}" if self.scale else ""
        declared = "" if self.declared is None else f" (in the file {self.declared})"
        return f"{self.name} {operand_type_name(self.type)} {shape}{quantisation}{declared}"


def tensor_spec(operand: Operand, name: str) -> TensorSpec:
    """The description of an operand."""
    return TensorSpec(name, operand.type, operand.dimensions, operand.scale, operand.zero_point)


def declared_spec(
    operand: Operand, name: str, dtype: str = "", dimensions: tuple[int, ...] | None = None
) -> TensorSpec:
    """The description of an operand for which a file declares a type and a shape; the defaults mean those of the operand."""
    spec = tensor_spec(operand, name)
    own = spec.dimensions if dimensions_are_known(spec.type, spec.dimensions) else None
    declared = Declared(dtype or spec.dtype.name, own if dimensions is None else dimensions)
    if declared == Declared(spec.dtype.name, own):
        return spec
    return msgspec.structs.replace(spec, declared=declared)


_dtype_of = functools.cache(operand_dtype)
"""As ``operand_dtype``, in a third of the time: at most one entry for each operand type."""

BOUND = object()
"""Stands for an input in a memory of the application's own."""


def check_inputs(
    specs: Sequence[TensorSpec],
    values: Sequence[Any],
    needed: Callable[[], Collection[int]] = frozenset[int],
    first: int = 0,
) -> list[Array | None]:
    """The values that an application passes, as arrays of the model's types; None stays None: an input that is left out.

    Args:
        specs: The model's inputs.
        values: A value for each, None, or ``BOUND``, which becomes None.
        needed: Which inputs cannot be left out; asked only when one is.
        first: Index of the first of the inputs.

    Raises:
        InvalidArgument: Wrong number, type or shape, or one is missing; names the input, the expected and the actual value.
    """
    if not isinstance(values, (list, tuple)) or len(values) != len(specs):
        raise _not_a_list_of(specs, values)
    if len(specs) == 1:  # As below, in half of the time: most models have one, and each frame is checked.
        v, s = values[0], specs[0]
        if type(v) is np.ndarray and v.shape == s.dimensions and v.dtype == _dtype_of(s.type) and v.size:
            return [v]
    return [
        # The usual case first: an array with exactly the model's type and shape.
        v
        if type(v) is np.ndarray and v.shape == s.dimensions and v.dtype == _dtype_of(s.type) and v.size
        else _check_input(i, s, v, needed)
        for i, (s, v) in enumerate(zip(specs, values, strict=True), first)
    ]


def _not_a_list_of(specs: Sequence[TensorSpec], values: object) -> InvalidArgument:
    names = ", ".join([spec.name for spec in specs[:NAMED_MAX]] + ["..."] * (len(specs) > NAMED_MAX))
    count = f"{len(specs)} array{'' if len(specs) == 1 else 's'}"
    if isinstance(values, list | tuple):
        return InvalidArgument(f"inputs: expected {count}, got {len(values)} (it takes {names})")
    advice = "; write [array]" if isinstance(values, np.ndarray) else ""
    if isinstance(values, Mapping):
        advice = f"; write a list in the order of net.inputs: {names}"
    return InvalidArgument(f"inputs: expected a list with {count}, got {class_text(values)}{advice}")


def _check_input(
    index: int, spec: TensorSpec, value: Any, needed: Callable[[], Collection[int]]
) -> Array | None:
    if value is BOUND:
        return None
    where = f"input {index} ({spec.name})"
    if value is None:
        if index in needed():
            raise InvalidArgument(f"{where}: missing; it cannot be left out (it takes {_taken(spec)})")
        return None
    try:
        return _fitted(spec, value, where)
    except InvalidArgument as e:
        known = spec.declared
        types = (spec.dtype.name,) if known is None else (known.dtype, spec.dtype.name)
        dimensions = spec.dimensions if known is None or known.dimensions is None else known.dimensions
        remedy = remedy_for_input(value, types, dimensions, is_quantised=spec.scale != 0)
        raise InvalidArgument(f"{e} (it takes {_taken(spec)}){remedy}") from e.__cause__


def _taken(spec: TensorSpec) -> str:
    """The element type and shape that an input takes, in words."""
    if spec.declared is not None and spec.declared.dimensions is not None:
        return f"{spec.declared.dtype} of shape {list(spec.declared.dimensions)}"
    if is_scalar_type(spec.type):
        return f"one {spec.dtype}"
    return f"{spec.dtype} of {f'shape {list(spec.dimensions)}' if spec.dimensions else 'any shape'}"


def _fitted(spec: TensorSpec, value: Any, where: str) -> Array:
    if not isinstance(value, np.ndarray):
        value = _array_of(spec, value, where)
    elif type(value) is not np.ndarray:
        check_unmasked(value, where)
        value = np.asarray(value)  # A class of its own may have attributes of its own.
    if not value.dtype.isnative and value.dtype.newbyteorder("=") == spec.dtype:
        value = value.astype(spec.dtype)
    if spec.declared is not None:
        value = stored_as(value, spec.dtype, spec.dimensions, spec.declared, where)
    if value.dtype != spec.dtype:
        raise InvalidArgument(
            f"{where}: expected element type {spec.dtype}, got {value.dtype} of shape {list(value.shape)}"
        )
    expected = spec.dimensions
    if is_scalar_type(spec.type):
        if value.size != 1:
            raise InvalidArgument(f"{where}: expected a scalar, got shape {list(value.shape)}")
        return np.asarray(value).reshape(())
    if expected and (value.ndim != len(expected) or combine_dimensions(expected, value.shape) is None):
        raise InvalidArgument(f"{where}: expected shape {list(expected)}, got {list(value.shape)}")
    if value.size == 0:
        raise InvalidArgument(f"{where}: expected at least one element, got shape {list(value.shape)}")
    return np.asarray(value)


def _array_of(spec: TensorSpec, value: Any, where: str) -> Array:
    """Makes an array of another value: of a number for a scalar, or of a buffer, as a view."""
    if isinstance(value, bool | int | float):
        if is_scalar_type(spec.type):
            return number_of(value, spec.dtype.name, where)
        if spec.declared is not None and spec.declared.dimensions == ():
            return number_of(value, spec.declared.dtype, where)
    return _view_of(value, where, "an array or a buffer")


def check_unmasked(value: object, where: str) -> None:
    """Rejects an array with masked elements, since a device computes with the numbers behind the mask.

    Raises:
        InvalidArgument: It has some.
    """
    # ``np.ma`` is imported when it is first named, so that it is named for subclasses of arrays alone.
    if type(value) is not np.ndarray and isinstance(value, np.ndarray) and np.ma.is_masked(value):
        raise InvalidArgument(f"{where}: expected an array without masked elements, got masked ones")


def _view_of(value: Any, where: str, expected: str) -> Array:
    """The array that an application passed: itself, or a view of a DLPack object or of a buffer."""
    if isinstance(value, np.ndarray):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"{where}: expected {expected}, got {class_text(value)} (see numpy.asarray)"
        ) from None
    except Exception as e:
        raise InvalidArgument(
            f"{where}: expected {expected}, got {class_text(value)} that cannot be read: {e}"
        ) from e
    try:
        return np.asarray(view)
    except (TypeError, ValueError, RuntimeError) as e:
        raise InvalidArgument(f"{where}: expected {expected} of numbers, got {class_text(value)}: {e}") from e


def output_target(index: int, spec: TensorSpec, value: Any) -> Array:
    """An array of the application's own that an output is copied to: a view of what it passed.

    Raises:
        InvalidArgument: It is not an array, cannot be written, or does not fit; names the output, the expected and the actual
            value.
    """
    where = f"output {index} ({spec.name})"
    array = _view_of(value, where, "a memory, an array or a buffer")
    if not array.flags.writeable:
        raise InvalidArgument(f"{where}: expected an array that can be written, got a read-only one")
    if spec.declared is not None:
        shape = array.shape if spec.declared.dimensions is None else spec.declared.dimensions
        if (array.dtype.name, array.shape) != (spec.declared.dtype, shape):
            raise InvalidArgument(
                f"{where}: expected {spec.declared.dtype} of shape {list(shape)}, "
                f"got {array.dtype} of shape {list(array.shape)}"
            )
        return array
    if array.dtype != spec.dtype:
        raise InvalidArgument(f"{where}: expected element type {spec.dtype}, got {array.dtype}")
    if is_scalar_type(spec.type):
        if array.size != 1:
            raise InvalidArgument(f"{where}: expected room for a scalar, got shape {list(array.shape)}")
    elif spec.dimensions and combine_dimensions(spec.dimensions, array.shape) is None:
        raise InvalidArgument(f"{where}: expected shape {list(spec.dimensions)}, got {list(array.shape)}")
    return array


def check_apart(targets: Mapping[int, Array]) -> None:
    """Checks that no memory is to get two outputs, of which the later one would overwrite a part of the other.

    Args:
        targets: The arrays, by output.

    Raises:
        InvalidArgument: Two overlap; names both.
    """
    for (index, array), (other, other_array) in itertools.combinations(targets.items(), 2):
        try:
            # Of the bounds of its work, the stubs of numpy have the two special ones.
            is_shared = np.shares_memory(array, other_array, max_work=_OVERLAP_WORK_MAX)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            continue
        if is_shared:
            raise InvalidArgument(
                f"output {other}: expected an array of its own, got one that overlaps that of output {index}"
            )


class Value(msgspec.Struct, frozen=True):
    """A value that travels between the application and devices, or from one step to the next.

    Attributes:
        key: Its operand's index in the main subgraph.
        spec: Its description.
        shape: Its extents for this execution where they are known; None for an input that is left out.
        size_bytes: Room for it.
    """

    key: int
    spec: TensorSpec
    shape: tuple[int, ...] | None
    size_bytes: int


def input_value(key: int, spec: TensorSpec, shape: tuple[int, ...] | None) -> Value:
    """An input of a known shape, or one that is left out (None)."""
    return Value(key, spec, shape, 0 if shape is None else operand_size_bytes(spec.type, shape))


def result_value(key: int, spec: TensorSpec, size_bytes: int | None = None) -> Value:
    """A value that a device will write; None takes the size of the description, or an estimate."""
    if size_bytes is None:
        size_bytes = operand_size_bytes(spec.type, spec.dimensions) or UNKNOWN_OUTPUT_BYTES
    return Value(key, spec, spec.dimensions, size_bytes)


class Binding(NamedTuple):
    """A value in memory of the application's own.

    Attributes:
        pool: The memory.
        location: Place in the memory; the request gives the pool's index.
        shape: Of the value.
        array: Its view; None where only the device can see it.
        buffer: The device memory that holds it, if that is known; None for ordinary memory.
    """

    pool: Memory | BufferToken
    location: DataLocation
    shape: tuple[int, ...]
    array: Array | None
    buffer: Buffer | None = None


class RequestArea:
    """Shared memory for all values of one execution, and the requests that refer to it.

    Attributes:
        memories: Pool 0 holds every value; one pool more for each value that had to grow.
    """

    def __init__(self, values: Sequence[Value]) -> None:
        self._made_for = values
        self._requests: dict[tuple[tuple[int, ...], tuple[int, ...]], Request] = {}
        self._views: dict[int, Array] = {}
        self._values = {value.key: value for value in values}
        self._declared = {v.key: v.spec.declared for v in values if v.spec.declared is not None}
        self._locations: dict[int, DataLocation] = {}
        self._shapes: dict[int, tuple[int, ...] | None] = {value.key: value.shape for value in values}
        self._bound: Mapping[int, Binding] = {}
        self._targets: Mapping[int, Array] = {}
        locations, size_bytes = place_values(value.size_bytes for value in values)
        self._locations.update(zip((value.key for value in values), locations, strict=True))
        self.memories = [Memory.create(size_bytes, name="aionn-request")]
        _logger.debug("request memory: %d bytes for %d values", self.memories[0].size_bytes, len(values))

    def is_for(self, values: Sequence[Value]) -> bool:
        """Whether the area was made for values like these, so that it can be used again for them."""
        return self._made_for is values or list(self._values.values()) == list(values)

    def bind(self, bound: Mapping[int, Binding], targets: Mapping[int, Array] | None = None) -> None:
        """Places values outside of this area, and copies outputs to arrays, until the next call."""
        self._targets = targets or {}
        if bound or self._bound:
            self._forget()
            self._shapes = {value.key: value.shape for value in self._values.values()}
            self._shapes.update({key: binding.shape for key, binding in bound.items()})
            self._bound = bound

    def spec(self, key: int) -> TensorSpec:
        """The description of a value."""
        return self._values[key].spec

    @property
    def bound(self) -> Mapping[int, Binding]:
        """The values outside of the area, by key."""
        return self._bound

    def move(self, bound: Mapping[int, Binding]) -> None:
        """Moves the values outside of the area to other places, during an execution."""
        self._forget()
        self._bound = bound

    def _forget(self) -> None:
        """Shapes or places have changed: requests and views are made anew."""
        self._requests.clear()
        self._views.clear()

    def view(self, key: int) -> Array:
        """A writable view of a value that is not left out, in its present shape."""
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._new_view(key)
        return view

    def _new_view(self, key: int) -> Array:
        value, location, shape = self._values[key], self._locations[key], self._shapes[key]
        assert shape is not None, "a value that is left out has no view"
        size_bytes = operand_size_bytes(value.spec.type, shape) if all(shape) else 0
        if size_bytes > location.length:
            raise GeneralFailure(
                f"{value.spec.name}: the device reports {size_bytes} bytes in a room of {location.length}"
            )
        pool = self.memories[location.pool_index]
        flat = pool.array[location.offset : location.offset + size_bytes].view(value.spec.dtype)
        return flat.reshape(() if is_scalar_type(value.spec.type) else shape)

    def binding(self, key: int) -> Binding:
        """The place of a value that is not left out, for reading it there."""
        if key in self._bound:
            return self._bound[key]
        view, location = self.view(key), self._locations[key]
        place = DataLocation(0, location.offset, view.nbytes)
        return Binding(self.memories[location.pool_index], place, self._shapes[key] or (), view)

    def write(self, keys: Sequence[int], arrays: Sequence[Array | None]) -> None:
        """Copies checked inputs into the memory."""
        for key, array in zip(keys, arrays, strict=True):
            if array is not None:
                view = self._views.get(key)
                (self.view(key) if view is None else view)[...] = array  # The check has compared their types.

    def outputs(self, keys: Sequence[int], *, copy: bool) -> tuple[Array, ...]:
        """Results: arrays of their own, or read-only views; values in the application's memory are always views."""
        if not (self._bound or self._targets or self._declared):
            # The usual case, most of all with one output.
            if len(keys) == 1:
                array = self._views.get(keys[0])
                if array is None:
                    array = self.view(keys[0])
                if copy:
                    return (array.copy(),)
                array = array.view()
                array.setflags(write=False)
                return (array,)
            if copy:
                return tuple([self.view(key).copy() for key in keys])
        views = []
        for key in keys:
            if key in self._bound:
                array = self._bound[key].array
                view = np.empty(0, self._values[key].spec.dtype) if array is None else array.view()
            elif key in self._targets:
                views.append(self._copied(key))
                continue
            elif key in self._declared:
                view = in_declared(self.view(key), self._declared[key], copy=copy)
                if copy:
                    views.append(view)
                    continue
                view = view.view()
            elif copy:
                views.append(self.view(key).copy())
                continue
            else:
                view = self.view(key).view()
            view.flags.writeable = False
            views.append(view)
        return tuple(views)

    def _copied(self, key: int) -> Array:
        target, view = self._targets[key], self.view(key)
        if key in self._declared:
            view = in_declared(view, self._declared[key], copy=False)
        if view.size != target.size or (view.ndim and view.shape != target.shape):
            raise OutputInsufficientSize(
                f"{self._values[key].spec.name}: the output has shape {list(view.shape)}, its array {list(target.shape)}",
                [(view.shape, False)],
            )
        np.copyto(target, view.reshape(target.shape), casting="no")
        return target

    def request(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Request:
        """The request of a step that reads and writes these values; the same object as long as nothing has changed."""
        request = self._requests.get((inputs, outputs))
        if request is None:
            request = self._requests[inputs, outputs] = self._new_request(inputs, outputs)
        return request

    def _new_request(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Request:
        read = []
        pools: list[Memory | BufferToken] = list(self.memories)

        def elsewhere(key: int) -> RequestArgument:
            binding, value = self._bound[key], self._values[key]
            place = next((i for i, pool in enumerate(pools) if pool is binding.pool), len(pools))
            if place == len(pools):
                pools.append(binding.pool)
            location = msgspec.structs.replace(binding.location, pool_index=place)
            shape = binding.shape
            return RequestArgument(False, location, () if shape == value.spec.dimensions else shape)

        for key in inputs:
            if key in self._bound:
                if 0 in self._bound[key].shape:
                    raise GeneralFailure(f"{self._values[key].spec.name}: {_EMPTY}")
                read.append(elsewhere(key))
                continue
            shape, value = self._shapes[key], self._values[key]
            if shape is None:
                read.append(RequestArgument(has_no_value=True))
            elif 0 in shape:
                raise GeneralFailure(f"{value.spec.name}: {_EMPTY}")
            else:
                location = self._locations[key]
                if value.shape != shape or location.length == 0:
                    # A value that an earlier step wrote may be smaller than its room.
                    size_bytes = operand_size_bytes(value.spec.type, shape)
                    location = DataLocation(location.pool_index, location.offset, size_bytes)
                read.append(RequestArgument(False, location, () if shape == value.spec.dimensions else shape))
        written = tuple(
            elsewhere(key) if key in self._bound else RequestArgument(False, self._locations[key])
            for key in outputs
        )
        return Request(tuple(read), written, tuple(pools))

    def note(self, keys: Sequence[int], shapes: Sequence[OutputShape]) -> None:
        """Remembers the shapes that a device reported for what it wrote.

        Raises:
            GeneralFailure: It reported no shapes, and the model does not have them.
        """
        if not shapes:
            for spec in (self._values[key].spec for key in keys):
                if not dimensions_are_known(spec.type, spec.dimensions):
                    raise GeneralFailure(f"{spec.name}: the device reports no shape")
        for key, shape in zip(keys, shapes, strict=False):
            if shape.is_sufficient and self._shapes[key] != shape.dimensions:
                self._shapes[key] = shape.dimensions
                self._forget()

    def grow(self, keys: Sequence[int], shapes: Sequence[OutputShape]) -> dict[int, int]:
        """Makes more room for what did not fit: what the device asks for, at least twice what there was.

        Returns:
            The new sizes by key, for the next execution.
        """
        sizes = {}
        self._forget()
        for key, shape in zip(keys, shapes, strict=False):
            if not shape.is_sufficient:
                if key in self._bound:
                    reported = [(s.dimensions, s.is_sufficient) for s in shapes]
                    raise OutputInsufficientSize("execute: an output does not fit its memory", reported)
                known = operand_size_bytes(self._values[key].spec.type, shape.dimensions)
                sizes[key] = max(known, 2 * self._locations[key].length)
                self.memories.append(Memory.create(sizes[key], name="aionn-request"))
                _logger.debug("request memory: %d bytes more for %s", sizes[key], self._values[key].spec.name)
                self._locations[key] = DataLocation(len(self.memories) - 1, 0, sizes[key])
        return sizes

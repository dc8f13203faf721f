"""The arguments of an execution against the model.

Owns counts, places, shapes, sizes and overlaps. The driver checks the device memory of a token and its use.

Invariants:
1. An argument that passed is inside its pool; nothing outside of the areas that it names has to be touched.
2. A pool that is a device memory or an image counts as one of unknown size: offset, length and padding are 0 there, and mean the
   whole of it. The driver checks that an image's pixels fit the model.
3. Outputs overlap nothing that the execution reads or writes, the model's constants included; inputs may share memory. Overlap is
   decided by files, not by ``Memory`` objects: one file may be in several pools, and in those of the model.

Source: the rules of the NN HAL 1.3 for requests, in the stricter form of its canonical types, which demand exact sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from aionn.errors import InvalidArgument
from aionn.hal import (
    RANK_MAX,
    BufferToken,
    Memory,
    MemoryKind,
    Model,
    Operand,
    OperandLifeTime,
    Request,
    RequestArgument,
    combine_dimensions,
    dimensions_are_known,
    is_extension_operand_type,
    is_scalar_type,
    operand_size_bytes,
)
from aionn.validation.field_types import check_field_types

__all__ = ["check_memory_identifiers", "validate_request"]

_NUMBER_MAX = 2**32 - 1
_WHOLE = frozenset({int})


def validate_request(
    model: Model, request: Request, *, allow_unspecified_outputs: bool = True
) -> tuple[tuple[int, ...] | None, ...]:
    """Checks a request against a model that has been validated.

    Args:
        model: The model.
        request: Its arguments.
        allow_unspecified_outputs: Whether outputs may have unknown extents; fenced execution forbids them.

    Returns:
        The final shape of each input: ``()`` for a scalar, None for an input that is left out.

    Raises:
        InvalidArgument: The request does not fit; the message begins with the place, such as ``request, input 1``.
    """
    _check_pools(request.pools)
    inputs, outputs = model.main.inputs, model.main.outputs
    for what, arguments, operands in (
        ("inputs", request.inputs, inputs),
        ("outputs", request.outputs, outputs),
    ):
        if len(arguments) != len(operands):
            _refuse("request", what, len(operands), len(arguments))
    shapes = tuple(
        [
            _check_input(request, argument, operand, f"request, input {index}")
            for index, (argument, operand) in enumerate(zip(request.inputs, inputs, strict=True))
        ]
    )
    for index, (argument, operand) in enumerate(zip(request.outputs, outputs, strict=True)):
        where = f"request, output {index}"
        shape = _check_argument(request, argument, operand, where)
        if shape is not None and not allow_unspecified_outputs:
            is_known = is_extension_operand_type(operand.type) or dimensions_are_known(operand.type, shape)
            if not is_known:
                _refuse(where, "shape", "every extent known, as this kind of execution demands", list(shape))
    _check_overlaps(request)
    _check_constants(model, request)
    return shapes


def check_memory_identifiers(request: Request, identifiers: Sequence[int]) -> None:
    """Checks the identifiers of a burst's memories against the request that they come with.

    Args:
        request: The arguments of an execution in a burst.
        identifiers: One per pool; -1 for a memory that is not to be remembered, and for every device memory.

    Raises:
        InvalidArgument: A number too many or too few, below -1, or one for a device memory.
    """
    try:
        count = len(request.pools)
    except (AttributeError, TypeError):
        check_field_types(request, Request, "request")
        raise
    if len(identifiers) != count or any(i < -1 for i in identifiers):
        raise InvalidArgument(
            f"burst: expected {count} memory identifiers of at least -1, got {list(identifiers)}"
        )
    for pool, identifier in zip(request.pools, identifiers, strict=True):
        if isinstance(pool, BufferToken) and identifier != -1:
            raise InvalidArgument(f"burst: expected identifier -1 for a device memory, got {identifier}")


def _refuse(where: str, what: str, expected: object, got: object) -> NoReturn:
    raise InvalidArgument(f"{where}, {what}: expected {expected}, got {got}")


def _check_pools(pools: Sequence[Memory | BufferToken]) -> None:
    for index, pool in enumerate(pools):
        if isinstance(pool, BufferToken):
            if pool.token <= 0:
                _refuse("request", f"pool {index}", "a positive token", pool.token)
        elif pool.is_closed or pool.size_bytes <= 0:
            _refuse("request", f"pool {index}", "open memory of at least 1 byte", repr(pool))


def _check_input(
    request: Request, argument: RequestArgument, operand: Operand, where: str
) -> tuple[int, ...] | None:
    shape = _check_argument(request, argument, operand, where)
    if shape is None or is_extension_operand_type(operand.type):
        # Only the extension can judge its values.
        return shape
    if not dimensions_are_known(operand.type, shape):
        _refuse(where, "shape", "every extent known, from the model and the request together", list(shape))
    return shape


def _check_argument(
    request: Request, argument: RequestArgument, operand: Operand, where: str
) -> tuple[int, ...] | None:
    """Checks one argument but for whether its shape must be known; returns the shape, None for one that is left out."""
    location, dimensions = argument.location, argument.dimensions
    if len(dimensions) > RANK_MAX:
        _refuse(where, "dimensions", f"at most {RANK_MAX}", len(dimensions))
    numbers = (location.pool_index, location.offset, location.length, location.padding, *dimensions)
    if not _WHOLE.issuperset(map(type, numbers)):
        check_field_types(argument, RequestArgument, where)
    if min(numbers) < 0 or max(numbers) > _NUMBER_MAX:
        _refuse(where, "numbers", f"0 to {_NUMBER_MAX}", f"{location}, dimensions {list(dimensions)}")
    if argument.has_no_value:
        if any(numbers):
            _refuse(where, "location and dimensions", "nothing, as it is left out", argument)
        return None
    _check_place(request, argument, where)
    is_extension = is_extension_operand_type(operand.type)
    if not is_extension and is_scalar_type(operand.type) and dimensions:
        _refuse(where, "dimensions", "none, as it is a scalar", list(dimensions))
    shape = combine_dimensions(operand.dimensions, dimensions)
    if shape is None:
        _refuse(where, "dimensions", f"what fits the model's {list(operand.dimensions)}", list(dimensions))
    if 0 in dimensions and any(
        known and not given for known, given in zip(operand.dimensions, dimensions, strict=False)
    ):
        # An extent that the model knows cannot be unknown to the request.
        _refuse(where, "dimensions", f"the model's {list(operand.dimensions)}", list(dimensions))
    if not is_extension and location.length:
        expected = operand_size_bytes(operand.type, shape)
        if expected and location.length != expected:
            _refuse(where, "length", f"{expected} bytes for shape {list(shape)}", location.length)
    return shape


def _check_place(request: Request, argument: RequestArgument, where: str) -> None:
    location = argument.location
    if location.pool_index >= len(request.pools):
        _refuse(where, "pool index", f"an index below {len(request.pools)}", location.pool_index)
    pool = request.pools[location.pool_index]
    if _is_whole(pool):
        if location.offset or location.length or location.padding:
            what = "a device memory" if isinstance(pool, BufferToken) else "an image"
            _refuse(where, "location", f"offset, length and padding 0 in {what}", location)
        return
    assert isinstance(pool, Memory), "only memory has parts"
    end = location.offset + location.length + location.padding
    if end > pool.size_bytes:
        _refuse(where, "location", f"an end within the pool's {pool.size_bytes} bytes", f"end at byte {end}")
    if location.length == 0:
        _refuse(where, "length", "at least 1 byte", 0)


class _Area(NamedTuple):
    """A range of bytes of a file; ``reach`` also counts the padding, into which an output may be written."""

    start: int
    end: int
    reach: int
    is_output: bool
    name: str


def _is_whole(pool: Memory | BufferToken) -> bool:
    """Whether an argument takes the whole of a pool."""
    return isinstance(pool, BufferToken) or pool.kind == MemoryKind.HARDWARE_BUFFER


def _area(pool: Memory | BufferToken, argument: RequestArgument, is_output: bool, name: str) -> _Area:
    if isinstance(pool, BufferToken):
        # A device memory has no addresses here: two uses of it always overlap.
        return _Area(0, 1, 1, is_output, name)
    if pool.kind == MemoryKind.HARDWARE_BUFFER:
        end = pool.offset + pool.size_bytes
        return _Area(pool.offset, end, end, is_output, name)
    location = argument.location
    start = pool.offset + location.offset
    end = start + location.length
    return _Area(start, end, end + location.padding, is_output, name)


def _check_overlaps(request: Request) -> None:
    areas: dict[object, list[_Area]] = {}
    for what, arguments in (("input", request.inputs), ("output", request.outputs)):
        for index, argument in enumerate(arguments):
            if argument.has_no_value:
                continue
            pool = request.pools[argument.location.pool_index]
            area = _area(pool, argument, what == "output", f"{what} {index}")
            file = ("token", pool.token) if isinstance(pool, BufferToken) else pool.file
            areas.setdefault(file, []).append(area)
    for in_file in areas.values():
        if len(in_file) > 1:
            _check_areas(sorted(in_file))


def _check_constants(model: Model, request: Request) -> None:
    """Checks that no output overlaps the model's constants. Only requests over the model's own files take any time."""
    if not model.pools:
        return
    files = [pool.file for pool in model.pools]
    for index, argument in enumerate(request.outputs):
        if argument.has_no_value:
            continue
        pool = request.pools[argument.location.pool_index]
        if isinstance(pool, BufferToken) or pool.file not in files:
            continue
        area = _area(pool, argument, True, f"output {index}")
        for start, end in _constant_ranges(model, pool.file):
            if start < area.reach and area.start < end:
                where = f"bytes {area.start} to {area.reach}, where a constant is from {start} to {end}"
                _refuse("request", area.name, "memory apart from the model's constants", where)


def _constant_ranges(model: Model, file: tuple[int, int]) -> Iterator[tuple[int, int]]:
    for subgraph in (model.main, *model.referenced):
        for operand in subgraph.operands:
            if operand.lifetime == OperandLifeTime.CONSTANT_REFERENCE:
                pool, location = model.pools[operand.location.pool_index], operand.location
                if pool.file == file:
                    start = pool.offset + location.offset
                    yield start, start + location.length


def _check_areas(areas: Sequence[_Area]) -> None:
    farthest: _Area | None = None
    farthest_output: _Area | None = None
    for area in areas:
        clash = None
        if farthest_output is not None and farthest_output.reach > area.start:
            clash = farthest_output
        elif area.is_output and farthest is not None and farthest.end > area.start:
            clash = farthest
        if clash is not None:
            where = f"bytes {area.start} to {area.end}, shared with {clash.name}"
            _refuse("request", area.name, "memory apart from every other argument of an output", where)
        if farthest is None or area.end > farthest.end:
            farthest = area
        if area.is_output and (farthest_output is None or area.reach > farthest_output.reach):
            farthest_output = area

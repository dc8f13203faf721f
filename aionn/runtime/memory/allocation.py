"""Memory for given uses: the device that it belongs to, if all uses are on one device.

Owns the check that the uses go together. ``own`` defines the memories, and how requests name them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from aionn.errors import DeadObject, GeneralFailure, InvalidArgument
from aionn.hal import BufferDesc, BufferRole, combine_dimensions, dimensions_are_known, operand_dtype
from aionn.runtime.background import Background
from aionn.runtime.compilation import Compilation
from aionn.runtime.executions.stepping import PreparedStep
from aionn.runtime.memory.arguments import TensorSpec
from aionn.runtime.memory.own import DeviceMemory, SharedMemory, extents_of
from aionn.runtime.recovery.prepared import RecoveringPreparedModel, drivers_own
from aionn.runtime.recovery.states import PREPARATIONS_MAX
from aionn.validation import is_iterable

__all__ = ["IoRole", "allocate"]

EXTENT_MAX = 2**32 - 1
"""Extents are unsigned 32-bit numbers on the HAL's wire."""


class IoRole(NamedTuple):
    """One use of a memory: an input or output of a compilation, by index."""

    compilation: Compilation
    io_index: int


async def allocate(
    background: Background,
    inputs: Sequence[tuple[Compilation, int]],
    outputs: Sequence[tuple[Compilation, int]],
    dimensions: Sequence[int],
) -> DeviceMemory | SharedMemory:
    """Memory for the given uses, of compilations whose runtime has this background; see ``Runtime.allocate``."""
    for what, roles_given in (("inputs", inputs), ("outputs", outputs)):
        if not is_iterable(roles_given):
            raise InvalidArgument(
                f"allocate, {what}: expected a list of compilations and indexes, got {roles_given!r}"
            )
    given = [*((role, False) for role in inputs), *((role, True) for role in outputs)]
    if not given:
        raise InvalidArgument("allocate: expected at least one role, got none")
    roles = [
        (_checked_role(background, role, f"allocate, role {position}"), is_output)
        for position, (role, is_output) in enumerate(given)
    ]
    named = {(role.compilation.identity, is_output, role.io_index) for role, is_output in roles}
    if len(named) != len(roles):
        raise InvalidArgument("allocate: expected every role once, got one twice")
    shape = _known_extents(dimensions)
    first: TensorSpec | None = None
    steps: list[tuple[PreparedStep, bool, int]] = []
    for position, (role, is_output) in enumerate(roles):
        where = f"allocate, role {position}"
        spec = _spec_of(role, is_output, where)
        first = spec if first is None else first
        if (spec.type, spec.scale, spec.zero_point) != (first.type, first.scale, first.zero_point):
            raise InvalidArgument(f"{where}: expected what fits {first}, got {spec}")
        joined = combine_dimensions(shape, spec.dimensions)
        if joined is None:
            raise InvalidArgument(f"{where}: expected what fits shape {list(shape)}, got {spec}")
        shape = joined
        steps += _uses(role, is_output)
    assert first is not None, "there is a role"
    held = TensorSpec(first.name, first.type, shape, first.scale, first.zero_point)
    if len({id(step.device) for step, _, _ in steps}) == 1:
        try:
            return await _allocate_at(steps, held, frozenset(named))
        except GeneralFailure:
            pass  # The device has none of its own.
    if not dimensions_are_known(held.type, shape):
        raise GeneralFailure(f"allocate: no device has memory for {held}, and its size is not known")
    return SharedMemory.create(shape, operand_dtype(held.type))


def _known_extents(dimensions: Sequence[int]) -> tuple[int, ...]:
    extents = extents_of(dimensions, "allocate, shape")
    if not all(0 <= extent <= EXTENT_MAX for extent in extents):
        raise InvalidArgument(
            f"allocate, shape: expected extents from 0 (unknown) to {EXTENT_MAX}, got {list(extents)}"
        )
    return extents


def _checked_role(background: Background, role: tuple[Compilation, int], where: str) -> IoRole:
    try:
        compilation, index = role
        owner, io_index = compilation._background, operator.index(index)
    except (TypeError, ValueError, AttributeError):
        raise InvalidArgument(f"{where}: expected a compilation and an index, got {role!r}") from None
    if owner is not background:
        raise InvalidArgument(f"{where}: expected a compilation of this runtime, got one of another")
    return IoRole(compilation, io_index)


def _spec_of(role: IoRole, is_output: bool, where: str) -> TensorSpec:
    role.compilation._check_open()
    specs = role.compilation.outputs if is_output else role.compilation.inputs
    if not 0 <= role.io_index < len(specs):
        what = "output" if is_output else "input"
        raise InvalidArgument(f"{where}: expected an {what} index below {len(specs)}, got {role.io_index}")
    return specs[role.io_index]


def _uses(role: IoRole, is_output: bool) -> list[tuple[PreparedStep, bool, int]]:
    """Where a role meets the steps: ``(step, whether it writes, which argument)``."""
    plan = role.compilation._plan
    main = plan.model.main
    key = (main.output_indexes if is_output else main.input_indexes)[role.io_index]
    return plan.uses(key)


async def _allocate_at(
    steps: Sequence[tuple[PreparedStep, bool, int]],
    spec: TensorSpec,
    roles: frozenset[tuple[object, bool, int]],
) -> DeviceMemory:
    device = steps[0][0].device
    prepared = list({id(step.prepared): step.prepared for step, _, _ in steps}.values())
    recovering = [model for model in prepared if isinstance(model, RecoveringPreparedModel)]
    index_of = {id(model): index for index, model in enumerate(prepared)}
    input_roles, output_roles = (
        [
            BufferRole(index_of[id(step.prepared)], argument)
            for step, writes, argument in steps
            if writes is is_output
        ]
        for is_output in (False, True)
    )
    for _ in range(PREPARATIONS_MAX):
        for model in recovering:
            await model.over()
        deaths = [model.deaths for model in recovering]
        own = [drivers_own(model) for model in prepared]
        try:
            buffer = await device.hal.allocate(BufferDesc(spec.dimensions), own, input_roles, output_roles)
        except DeadObject as e:
            is_known = [model.deaths for model in recovering] != deaths
            is_known = is_known or any(model.is_lost for model in recovering)
            # Of several models, the error does not name the one whose driver died, and others may have a process that lives.
            if is_known or (len(prepared) == len(recovering) == 1 and recovering[0].lost(e)):
                continue
            raise
        if [model.deaths for model in recovering] == deaths:
            for model in recovering:
                model.owns(buffer.token)
            return DeviceMemory(device.name, buffer, spec, roles)
    raise DeadObject(f"allocate: the driver of {device.name} died {PREPARATIONS_MAX} times", transient=True)

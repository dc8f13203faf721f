"""Cases: device memories as ``allocate`` gives them (``allocate``), and copies into and out of them (``copy``).

Owns the 15 ways to allocate wrongly and the 7 to copy wrongly, each for four types, what must work beside them, and what all cases
about device memories share. A device that has no memories of its own skips them all.

Source: ``MemoryDomainTests`` of the NN HAL's VTS 1.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from aionn.conformance.computing import closing
from aionn.conformance.vts.case import (
    Case,
    CaseSkipped,
    VtsSubject,
    expect_refusal,
    fail,
)
from aionn.conformance.vts.models import MEMORY_TYPES, add_model, conv_model, quantization
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import (
    Buffer,
    BufferDesc,
    BufferRole,
    Memory,
    MemoryKind,
    Model,
    OperandType,
    OperationType,
    PreparedModel,
    operand_dtype,
    operand_size_bytes,
)
from aionn.models.builder import GraphBuilder

__all__ = [
    "CASES",
    "FAILURE",
    "FIRST",
    "INVALID",
    "SHAPE",
    "VALUES",
    "allocated",
    "initialize",
    "memory_of",
    "size_of",
    "type_name",
]


INVALID = ErrorStatus.INVALID_ARGUMENT
FAILURE = ErrorStatus.GENERAL_FAILURE
QUANTIZED = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
SHAPE = (1, 2, 2, 1)
FIRST = BufferRole(0, 0)
VALUES = (1, 2, 3, 4)


@contextlib.asynccontextmanager
async def allocated(
    subject: VtsSubject,
    models: Sequence[PreparedModel],
    inputs: Sequence[BufferRole] = (),
    outputs: Sequence[BufferRole] = (),
    dimensions: tuple[int, ...] = (),
) -> AsyncIterator[Buffer]:
    """A device memory. The case is skipped where the device has none, or none of this description."""
    subject.step()
    try:
        buffer = await subject.device.allocate(BufferDesc(dimensions), models, inputs, outputs)
    except Error as e:
        if status_of(e) != FAILURE:
            raise
        raise CaseSkipped(f"the device allocates no such memory: {e}") from e
    async with closing(buffer):
        if buffer.token <= 0:
            fail("a positive token", buffer.token)
        subject.step()
        yield buffer


async def _check_allocates(subject: VtsSubject, prepared: PreparedModel) -> None:
    """Ends the case as skipped where the device has no memories: a refusal would show nothing then."""
    async with allocated(subject, [prepared], [FIRST]):
        pass


@contextlib.contextmanager
def memory_of(size_bytes: int, kind: MemoryKind = MemoryKind.ASHMEM) -> Iterator[Memory]:
    memory = Memory.create(size_bytes, kind=kind)
    try:
        yield memory
    finally:
        memory.close()


def size_of(kind: OperandType) -> int:
    return operand_size_bytes(kind, SHAPE)


async def initialize(buffer: Buffer, kind: OperandType, dimensions: Sequence[int] = ()) -> None:
    values = np.array(VALUES, operand_dtype(kind))
    with memory_of(values.nbytes) as memory:
        memory.array[:] = values.view(np.uint8)
        await buffer.copy_from(memory, dimensions)


# Allocating


class _Allocation:
    """Calls of ``allocate`` that must fail."""

    def __init__(self, subject: VtsSubject, kind: OperandType) -> None:
        self.subject = subject
        self.kind = kind

    async def refused(
        self,
        models: Sequence[Any],
        inputs: Sequence[BufferRole] = (),
        outputs: Sequence[BufferRole] = (),
        dimensions: tuple[int, ...] = (),
        where: str = "",
    ) -> None:
        self.subject.step()
        call = self.subject.device.allocate(BufferDesc(dimensions), models, inputs, outputs)
        await expect_refusal(call, where, allowed=(INVALID, FAILURE))

    async def conflict(self, one: Model, other: Model) -> None:
        """The first input of both models cannot be one memory."""
        async with self.subject.prepared(one) as first, self.subject.prepared(other) as second:
            await _check_allocates(self.subject, first)
            await _check_allocates(self.subject, second)
            await self.refused([first, second], [FIRST, BufferRole(1, 0)], where="two inputs")
            await self.refused([first, second], [FIRST], [BufferRole(1, 0)], where="input and output")

    async def of_one(
        self,
        *calls: tuple[Sequence[BufferRole], Sequence[BufferRole], tuple[int, ...]],
        model: Model | None = None,
    ) -> None:
        """Roles and dimensions that one model's arguments refuse."""
        async with self.subject.prepared(model or conv_model(self.kind)) as prepared:
            await _check_allocates(self.subject, prepared)
            for inputs, outputs, dimensions in calls:
                await self.refused(
                    [prepared], inputs, outputs, dimensions, f"{inputs}, {outputs}, {dimensions}"
                )


async def _empty_role(a: _Allocation) -> None:
    await a.of_one(((), (), ()), ((), (), SHAPE))


async def _null_prepared_model(a: _Allocation) -> None:
    async with a.subject.prepared(conv_model(a.kind)) as prepared:
        await _check_allocates(a.subject, prepared)
        await a.refused([None], [FIRST], where="None")
        await a.refused([], [FIRST], where="no model")


async def _invalid_prepared_model(a: _Allocation) -> None:
    async with a.subject.prepared(conv_model(a.kind)) as prepared:
        await _check_allocates(a.subject, prepared)
        await a.refused([object()], [FIRST], where="another object")
        closed = await a.subject.device.prepare_model(conv_model(a.kind))
        await closed.aclose()
        await a.refused([closed], [FIRST], where="a closed model")
        if a.subject.get_other is not None:
            other = await a.subject.get_other()
            a.subject.step()
            foreign = await other.prepare_model(conv_model(a.kind))
            async with closing(foreign):
                await a.refused([foreign], [FIRST], where="another device's model")


async def _invalid_model_index(a: _Allocation) -> None:
    await a.of_one(
        *(([BufferRole(index, 0)], (), ()) for index in (1, -1, 2**31 - 1)), ((), [BufferRole(1, 0)], ())
    )


async def _invalid_io_index(a: _Allocation) -> None:
    await a.of_one(
        *(([BufferRole(0, index)], (), ()) for index in (9, -1, 2**31 - 1)), ((), [BufferRole(0, 9)], ())
    )


async def _invalid_probability(a: _Allocation) -> None:
    bad = [BufferRole(0, 0, p) for p in (10.0, 0.0, -0.5, float("nan"))]
    await a.of_one(*(([role], (), ()) for role in bad), *(((), [role], ()) for role in bad))


async def _same_role_twice(a: _Allocation) -> None:
    await a.of_one(([FIRST, FIRST], (), ()), ((), [FIRST, FIRST], ()))


async def _conflict_operand_type(a: _Allocation) -> None:
    others = {
        OperandType.TENSOR_FLOAT32: OperandType.TENSOR_FLOAT16,
        OperandType.TENSOR_FLOAT16: OperandType.TENSOR_FLOAT32,
        OperandType.TENSOR_QUANT8_ASYMM: OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
        OperandType.TENSOR_QUANT8_ASYMM_SIGNED: OperandType.TENSOR_QUANT8_ASYMM,
    }
    await a.conflict(conv_model(a.kind), conv_model(others[a.kind]))


async def _conflict_scale(a: _Allocation) -> None:
    await a.conflict(conv_model(a.kind), conv_model(a.kind, scale=2.0))


async def _conflict_zero_point(a: _Allocation) -> None:
    await a.conflict(conv_model(a.kind), conv_model(a.kind, zero_point=5))


async def _conflict_rank_between_roles(a: _Allocation) -> None:
    await a.conflict(add_model(a.kind, (1, 4)), add_model(a.kind, (1, 4, 1)))


async def _conflict_dimensions_between_roles(a: _Allocation) -> None:
    await a.conflict(add_model(a.kind, (1, 4)), add_model(a.kind, (1, 5)))


async def _conflict_rank_between_role_and_desc(a: _Allocation) -> None:
    await a.of_one(([FIRST], (), (1, 2, 2)), ((), [FIRST], (1, 2, 2, 1, 1)))


async def _conflict_dimensions_between_role_and_desc(a: _Allocation) -> None:
    await a.of_one(([FIRST], (), (1, 2, 2, 2)), ((), [FIRST], (4, 2, 2, 1)))


async def _conflict_rank_with_scalar_role(a: _Allocation) -> None:
    g = GraphBuilder()
    parameters = quantization(a.kind)
    x = g.input(a.kind, (1, 4), **parameters)
    activation = g.input(OperandType.INT32)
    other = g.constant(np.ones(1, operand_dtype(a.kind)), a.kind, **parameters)
    y = g.variable(a.kind, (1, 4), **parameters)
    g.operation(OperationType.ADD, [x, other, activation], [y])
    await a.of_one(([BufferRole(0, 1)], (), (1,)), model=g.build([y]))


ALLOCATE: Mapping[str, Callable[[_Allocation], Awaitable[None]]] = {
    "empty_role": _empty_role,
    "null_prepared_model": _null_prepared_model,
    "invalid_prepared_model": _invalid_prepared_model,
    "invalid_model_index": _invalid_model_index,
    "invalid_io_index": _invalid_io_index,
    "invalid_probability": _invalid_probability,
    "same_role_twice": _same_role_twice,
    "conflict_operand_type": _conflict_operand_type,
    "conflict_scale": _conflict_scale,
    "conflict_zero_point": _conflict_zero_point,
    "conflict_rank_between_roles": _conflict_rank_between_roles,
    "conflict_dimensions_between_roles": _conflict_dimensions_between_roles,
    "conflict_rank_between_role_and_desc": _conflict_rank_between_role_and_desc,
    "conflict_dimensions_between_role_and_desc": _conflict_dimensions_between_role_and_desc,
    "conflict_rank_with_scalar_role": _conflict_rank_with_scalar_role,
}

FOR_QUANTIZED = ("conflict_scale", "conflict_zero_point")
"""Rules that concern only types with scale and zero point."""


async def _allocate(subject: VtsSubject, name: str, kind: OperandType) -> None:
    await ALLOCATE[name](_Allocation(subject, kind))


async def _tokens_are_unique(subject: VtsSubject, kind: OperandType) -> None:
    """Live memories have different positive tokens; a memory that was closed is gone for executions."""
    model = conv_model(kind)
    async with subject.prepared(model) as prepared, contextlib.AsyncExitStack() as stack:
        buffers = [
            await stack.enter_async_context(allocated(subject, [prepared], [FIRST], [FIRST]))
            for _ in range(8)
        ]
        tokens = {buffer.token for buffer in buffers}
        if len(tokens) != len(buffers):
            fail(f"{len(buffers)} different tokens", sorted(buffer.token for buffer in buffers))


# Copying


@contextlib.asynccontextmanager
async def _buffer(
    subject: VtsSubject, kind: OperandType, *, is_dynamic: bool = False
) -> AsyncIterator[Buffer]:
    """A memory for the output of a convolution, of unknown shape if that is dynamic."""
    model = conv_model(kind, has_dynamic_output=is_dynamic)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], () if is_dynamic else [FIRST], [FIRST]) as buffer,
    ):
        yield buffer


async def _copy_from_invalid_size(subject: VtsSubject, kind: OperandType, *, is_dynamic: bool) -> None:
    async with _buffer(subject, kind, is_dynamic=is_dynamic) as buffer:
        dimensions = SHAPE if is_dynamic else ()
        for size_bytes in (size_of(kind) - 1, size_of(kind) + 1):
            with memory_of(size_bytes) as memory:
                subject.step()
                await expect_refusal(
                    buffer.copy_from(memory, dimensions), f"{size_bytes} bytes instead of {size_of(kind)}"
                )


async def _copy_from_invalid_dimensions(subject: VtsSubject, kind: OperandType, *, is_dynamic: bool) -> None:
    bad: list[tuple[int, ...]] = [(1, 2, 2), (1, 2, 2, 1, 1)]
    bad += [(), (1, 0, 2, 1)] if is_dynamic else [(1, 4, 1, 1), (1, 2, 2, 2)]
    async with _buffer(subject, kind, is_dynamic=is_dynamic) as buffer:
        with memory_of(size_of(kind)) as memory:
            for dimensions in bad:
                subject.step()
                await expect_refusal(buffer.copy_from(memory, dimensions), f"dimensions {list(dimensions)}")


async def _copy_to_uninitialized(subject: VtsSubject, kind: OperandType) -> None:
    """Nothing can be read before something was written, nor after a write that failed."""
    async with _buffer(subject, kind) as buffer:
        with memory_of(size_of(kind)) as memory:
            await expect_refusal(buffer.copy_to(memory), "after allocation", allowed=(FAILURE,))
            await initialize(buffer, kind)
            subject.step()
            await expect_refusal(buffer.copy_from(memory, (9, 9, 9, 9)), "a copy that fails")
            await expect_refusal(buffer.copy_to(memory), "after a copy that failed", allowed=(FAILURE,))


async def _copy_to_invalid_size(subject: VtsSubject, kind: OperandType, *, is_dynamic: bool) -> None:
    """Sizes are looked at before the state is."""
    async with _buffer(subject, kind, is_dynamic=is_dynamic) as buffer:
        for state in ("uninitialised", "initialised"):
            if state == "initialised":
                await initialize(buffer, kind, SHAPE)
            elif is_dynamic:
                continue  # It has no size yet.
            for size_bytes in (size_of(kind) - 1, size_of(kind) + 1):
                with memory_of(size_bytes) as memory:
                    subject.step()
                    await expect_refusal(buffer.copy_to(memory), f"{state}, {size_bytes} bytes")


async def _copy_round_trip(subject: VtsSubject, kind: OperandType) -> None:
    """Copied values are read back unchanged, any number of times, from and to every kind of memory that copies must take."""
    async with _buffer(subject, kind) as buffer:
        values = np.array(VALUES, operand_dtype(kind))
        for source_kind in (MemoryKind.ASHMEM, MemoryKind.HARDWARE_BUFFER_BLOB):
            with (
                memory_of(values.nbytes, source_kind) as source,
                memory_of(values.nbytes, source_kind) as destination,
            ):
                source.array[:] = values.view(np.uint8)
                subject.step()
                await buffer.copy_from(source, ())
                source.array[:] = 0
                for _ in range(2):
                    destination.array[:] = 0
                    await buffer.copy_to(destination)
                    if destination.array.tobytes() != values.tobytes():
                        fail(f"{values}", destination.array.view(values.dtype), str(source_kind))


COPY: Mapping[str, Callable[..., Awaitable[None]]] = {
    "from_invalid_memory_size": partial(_copy_from_invalid_size, is_dynamic=False),
    "from_invalid_memory_size_dynamic_shape": partial(_copy_from_invalid_size, is_dynamic=True),
    "from_invalid_dimensions": partial(_copy_from_invalid_dimensions, is_dynamic=False),
    "from_invalid_dimensions_dynamic_shape": partial(_copy_from_invalid_dimensions, is_dynamic=True),
    "to_uninitialized_memory": _copy_to_uninitialized,
    "to_invalid_memory_size": partial(_copy_to_invalid_size, is_dynamic=False),
    "to_invalid_memory_size_dynamic_shape": partial(_copy_to_invalid_size, is_dynamic=True),
    "round_trip": _copy_round_trip,
}


def type_name(kind: OperandType) -> str:
    return kind.name.lower()


CASES = (
    *(
        Case(f"allocate/{name}[{type_name(kind)}]", partial(_allocate, name=name, kind=kind))
        for name in ALLOCATE
        for kind in (QUANTIZED if name in FOR_QUANTIZED else MEMORY_TYPES)
    ),
    *(
        Case(f"allocate/tokens_are_unique[{type_name(kind)}]", partial(_tokens_are_unique, kind=kind))
        for kind in MEMORY_TYPES
    ),
    *(
        Case(f"copy/{name}[{type_name(kind)}]", cast(Any, partial(check, kind=kind)))
        for name, check in COPY.items()
        for kind in MEMORY_TYPES
    ),
)

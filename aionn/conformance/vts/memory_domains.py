"""Cases: executions on device memories (``memory_domains``).

Owns the 7 ways to execute wrongly, each for four types and every path, and what must work beside them. ``buffers`` covers the
allocation of memories.

Source: ``MemoryDomainTests`` of the NN HAL's VTS 1.3.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from aionn.conformance.vts.buffers import (
    FAILURE,
    FIRST,
    INVALID,
    SHAPE,
    VALUES,
    allocated,
    initialize,
    memory_of,
    size_of,
    type_name,
)
from aionn.conformance.vts.case import (
    Case,
    CaseSkipped,
    VtsSubject,
    expect_refusal,
    expect_status,
    fail,
    status_of_call,
)
from aionn.conformance.vts.models import MEMORY_TYPES, RequestPools, conv_model, quantization
from aionn.conformance.vts.paths import PATHS, Path, executing, expect_refused
from aionn.errors import ErrorStatus
from aionn.hal import (
    Buffer,
    BufferRole,
    BufferToken,
    DataLocation,
    Model,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
    operand_dtype,
)
from aionn.models.builder import GraphBuilder

__all__ = ["CASES"]


async def _content(buffer: Buffer, kind: OperandType) -> list[float]:
    with memory_of(size_of(kind)) as memory:
        await buffer.copy_to(memory)
        return [float(x) for x in memory.array.view(operand_dtype(kind))]


# Executing


def _with_token(
    request: Request, what: str, index: int, token: int, dimensions: tuple[int, ...] = ()
) -> Request:
    """The request with one argument in a device memory."""
    arguments = list(getattr(request, what))
    arguments[index] = RequestArgument(location=DataLocation(len(request.pools)), dimensions=dimensions)
    return msgspec.structs.replace(
        request, **{what: tuple(arguments)}, pools=(*request.pools, BufferToken(token))
    )


def _requested(model: Model, kind: OperandType) -> RequestPools:
    values = np.array(VALUES, operand_dtype(kind))
    return RequestPools(model, [values.reshape(o.dimensions) for o in model.main.inputs])


def _allowed(path: Path, *statuses: ErrorStatus) -> Sequence[ErrorStatus]:
    # A burst's packets name no device memory; one that has packets refuses the request, whatever else is wrong with it.
    return (*statuses, INVALID) if path == "burst" else statuses


async def _invalid_token(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    model = conv_model(kind)
    async with subject.prepared(model) as prepared:
        async with allocated(subject, [prepared], [FIRST], [FIRST]) as gone:
            pass
        async with executing(subject, prepared, path) as executor:
            with _requested(model, kind) as pools:
                for what in ("inputs", "outputs"):
                    for token in (100, 0, -1, gone.token):
                        request = _with_token(pools.request, what, 0, token)
                        await expect_refused(executor, request, f"{what[:-1]} with token {token}")


async def _invalid_prepared_model_executed(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    """A memory is for the prepared models that it was allocated for, and no other."""
    model = conv_model(kind)
    async with (
        subject.prepared(model) as prepared,
        subject.prepared(model) as other,
        allocated(subject, [other], [FIRST], [FIRST]) as buffer,
        executing(subject, prepared, path) as executor,
    ):
        await initialize(buffer, kind)
        with _requested(model, kind) as pools:
            for what in ("inputs", "outputs"):
                await expect_refused(executor, _with_token(pools.request, what, 0, buffer.token), what)


def _two_inputs(kind: OperandType) -> Model:
    g = GraphBuilder()
    parameters = quantization(kind)
    a, b = (g.input(kind, SHAPE, **parameters) for _ in range(2))
    y, z = (g.variable(kind, SHAPE, **parameters) for _ in range(2))
    g.operation(OperationType.ADD, [a, b, 0], [y])
    g.operation(OperationType.MAXIMUM, [a, b], [z])
    return g.build([y, z])


async def _invalid_io_index_executed(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    """A memory for one argument is not one for another."""
    model = _two_inputs(kind)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], [FIRST], [FIRST]) as buffer,
        executing(subject, prepared, path) as executor,
    ):
        await initialize(buffer, kind)
        with _requested(model, kind) as pools:
            for what in ("inputs", "outputs"):
                await expect_refused(executor, _with_token(pools.request, what, 1, buffer.token), what)


async def _invalid_io_type(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    """A memory for an input is not one for an output, nor the other way round."""
    model = conv_model(kind)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], [FIRST]) as for_input,
        allocated(subject, [prepared], (), [FIRST]) as for_output,
        executing(subject, prepared, path) as executor,
    ):
        await initialize(for_output, kind)
        with _requested(model, kind) as pools:
            await expect_refused(
                executor, _with_token(pools.request, "outputs", 0, for_input.token), "as output"
            )
            await expect_refused(
                executor, _with_token(pools.request, "inputs", 0, for_output.token), "as input"
            )


async def _uninitialized_memory(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    model = conv_model(kind)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], [FIRST], [FIRST]) as buffer,
        executing(subject, prepared, path) as executor,
    ):
        with _requested(model, kind) as pools:
            request = _with_token(pools.request, "inputs", 0, buffer.token)
            await expect_refused(executor, request, "after allocation", allowed=_allowed(path, FAILURE))


async def _same_request_multiple_roles(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    """One memory for an output and anything else of the same request is refused; for two inputs it is legal."""
    model = _two_inputs(kind)
    both = [BufferRole(0, 0), BufferRole(0, 1)]
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], both, both) as buffer,
        executing(subject, prepared, path) as executor,
    ):
        await initialize(buffer, kind)
        with _requested(model, kind) as pools:
            for first, second in (("inputs", "outputs"), ("outputs", "outputs")):
                request = _with_token(pools.request, first, 0, buffer.token)
                request = _with_token(request, second, 1, buffer.token)
                await expect_refused(executor, request, f"{first} and {second}")
            await initialize(buffer, kind)
            request = _with_token(pools.request, "inputs", 0, buffer.token)
            request = _with_token(request, "inputs", 1, buffer.token)
            answer = await executor.execute(request)
            expect_status(
                answer.status, answer.message, _allowed(path, ErrorStatus.NONE), "two inputs of one memory"
            )


def _unknown_shape_model(kind: OperandType) -> Model:
    g = GraphBuilder()
    parameters = quantization(kind)
    x = g.input(kind, (0, 0, 0, 0), **parameters)
    y = g.variable(kind, (0, 0, 0, 0), **parameters)
    g.operation(
        OperationType.ADD, [x, g.constant(np.zeros(1, operand_dtype(kind)), kind, **parameters), 0], [y]
    )
    return g.build([y])


async def _invalid_dimensions(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    """The request's dimensions must be those of the last write for an input, and fit the allocation for an output."""
    model = _unknown_shape_model(kind)
    size_bytes = size_of(kind)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], [FIRST], [FIRST], SHAPE) as buffer,
        executing(subject, prepared, path) as executor,
    ):
        await initialize(buffer, kind)
        with memory_of(size_bytes) as inputs, memory_of(size_bytes) as outputs:
            place = DataLocation(0, 0, size_bytes)
            plain = RequestArgument(location=place, dimensions=(1, 4, 1, 1))
            token = RequestArgument(location=DataLocation(1), dimensions=(1, 4, 1, 1))
            pool = BufferToken(buffer.token)
            await expect_refused(executor, Request((token,), (plain,), (outputs, pool)), "input")
            await expect_refused(executor, Request((plain,), (token,), (inputs, pool)), "output")


async def _chains(subject: VtsSubject, kind: OperandType, path: Path) -> None:
    """A value that one execution writes into a memory is read by the next one; a failed execution leaves it uninitialised."""
    model = conv_model(kind)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], [FIRST], [FIRST]) as buffer,
        executing(subject, prepared, path) as executor,
    ):
        with _requested(model, kind) as pools:
            into = _with_token(pools.request, "outputs", 0, buffer.token)
            answer = await executor.execute(into)
            if path == "burst" and answer.status == INVALID:
                raise CaseSkipped("this burst carries no device memories")
            expect_status(answer.status, answer.message, [ErrorStatus.NONE], "a memory as output")
            if await _content(buffer, kind) != [float(v) for v in VALUES]:
                fail(f"{VALUES}", await _content(buffer, kind), "copied from the memory")
            pools.reset()
            answer = await executor.execute(_with_token(pools.request, "inputs", 0, buffer.token))
            expect_status(answer.status, answer.message, [ErrorStatus.NONE], "a memory as input")
            if [float(v) for v in pools.output().ravel()] != [float(v) for v in VALUES]:
                fail(f"{VALUES}", pools.output().ravel(), "computed from the memory")


async def _failed_execution_uninitializes(subject: VtsSubject, kind: OperandType) -> None:
    """An execution that misses its deadline leaves its output's memory uninitialised, or never touched it."""
    model = conv_model(kind)
    async with (
        subject.prepared(model) as prepared,
        allocated(subject, [prepared], [FIRST], [FIRST]) as buffer,
    ):
        await initialize(buffer, kind)
        with _requested(model, kind) as pools:
            subject.step()
            request = _with_token(pools.request, "outputs", 0, buffer.token)
            status, _ = await status_of_call(prepared.execute_synchronously(request, deadline_ns=1))
            if status == ErrorStatus.NONE:
                raise CaseSkipped("the device takes no notice of a deadline in the past")
            with memory_of(size_of(kind)) as memory:
                await expect_refusal(buffer.copy_to(memory), allowed=(FAILURE,))


EXECUTION: Mapping[str, Callable[..., Awaitable[None]]] = {
    "invalid_token": _invalid_token,
    "invalid_prepared_model": _invalid_prepared_model_executed,
    "invalid_io_index": _invalid_io_index_executed,
    "invalid_io_type": _invalid_io_type,
    "uninitialized_memory": _uninitialized_memory,
    "same_request_multiple_roles": _same_request_multiple_roles,
    "invalid_dimensions": _invalid_dimensions,
    "chain": _chains,
}

CASES = (
    *(
        Case(
            f"memory_domains/{name}[{type_name(kind)},{path}]",
            cast(Any, partial(check, kind=kind, path=path)),
        )
        for name, check in EXECUTION.items()
        for kind in MEMORY_TYPES
        for path in PATHS
    ),
    *(
        Case(
            f"memory_domains/failed_execution_uninitializes[{type_name(kind)}]",
            partial(_failed_execution_uninitializes, kind=kind),
        )
        for kind in MEMORY_TYPES
    ),
)

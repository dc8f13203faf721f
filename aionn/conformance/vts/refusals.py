"""Cases: what breaks a rule is refused. Models (``model_mutations``), requests (``request_validation``) and other arguments.

Owns the claims; the mutations themselves are in ``mutations``.

Source: ``ValidateModel`` and ``ValidateRequest`` of the NN HAL's VTS 1.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from aionn.conformance.cts import CtsTest
from aionn.conformance.cts.arguments import TestArguments
from aionn.conformance.vts.case import Case, CaseSkipped, VtsSubject, expect_refusal, fail
from aionn.conformance.vts.models import RequestPools, add_model, chain_model, model_of
from aionn.conformance.vts.mutations import FAMILIES
from aionn.conformance.vts.paths import PATHS, Path, executing, expect_refused
from aionn.errors import InvalidArgument
from aionn.hal import (
    DataLocation,
    Memory,
    Model,
    OperandLifeTime,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
)
from aionn.models.builder import GraphBuilder
from fences import SyncFence

__all__ = ["CASES"]

replace = msgspec.structs.replace

REQUEST_MODELS_MAX = 24
"""Number of models of a sample that the rules for requests are tried with, beyond counts: they do not depend on the operation."""


def _models(subject: VtsSubject) -> Iterator[tuple[str, Model]]:
    yield "three additions", chain_model(3)
    for test in subject.tests:
        with model_of(test) as model:
            yield test.name, model


async def _refuses_models(subject: VtsSubject, family: str) -> None:
    """Neither asking for support nor preparing takes the model."""
    count = 0
    for name, model in _models(subject):
        mutations = subject.sample(list(FAMILIES[family](model)), family, name)
        for mutation in mutations:
            changed = mutation.make()
            where = f"{name}, {mutation.where}"
            subject.step()
            await expect_refusal(
                subject.device.supported_operations(changed), f"{where}, supported_operations"
            )
            subject.step()
            await expect_refusal(subject.device.prepare_model(changed), f"{where}, prepare_model")
            count += 1
    if not count:
        raise CaseSkipped("no model of the sample can be changed so")


async def _refuses_preference(subject: VtsSubject) -> None:
    for value in (-1, 3):
        subject.step()
        call = subject.device.prepare_model(add_model(), preference=cast(Any, value))
        await expect_refusal(call, f"preference {value}")


async def _refuses_priority(subject: VtsSubject) -> None:
    for value in (-1, 3):
        subject.step()
        call = subject.device.prepare_model(add_model(), priority=cast(Any, value))
        await expect_refusal(call, f"priority {value}")


async def _refuses_negative_deadline(subject: VtsSubject) -> None:
    for value in (-1, -(2**62), 2**63):
        subject.step()
        call = subject.device.prepare_model(add_model(), deadline_ns=value)
        await expect_refusal(call, f"deadline {value} ns")


# Requests

Change = Callable[[Request], Iterator[tuple[str, Request]]]


def _counts(request: Request) -> Iterator[tuple[str, Request]]:
    for what in ("inputs", "outputs"):
        arguments: tuple[RequestArgument, ...] = getattr(request, what)
        for i in range(len(arguments)):
            left = (*arguments[:i], *arguments[i + 1 :])
            yield f"without {what[:-1]} {i}", replace(request, **{what: left})
        yield f"with another of its {what}", replace(request, **{what: (*arguments, arguments[-1])})


def _each(
    request: Request, change: Callable[[RequestArgument], RequestArgument]
) -> Iterator[tuple[str, Request]]:
    for what in ("inputs", "outputs"):
        arguments: tuple[RequestArgument, ...] = getattr(request, what)
        for i, argument in enumerate(arguments):
            if not argument.has_no_value:
                changed = (*arguments[:i], change(argument), *arguments[i + 1 :])
                yield f"{what[:-1]} {i}", replace(request, **{what: changed})


def _moved(argument: RequestArgument, **changes: int) -> RequestArgument:
    return replace(argument, location=replace(argument.location, **changes))


def _longer(argument: RequestArgument, change: int) -> RequestArgument:
    return _moved(argument, length=argument.location.length + change)


def _pool_indexes(request: Request) -> Iterator[tuple[str, Request]]:
    for wrong in (len(request.pools), 2**31 - 1, 2**32 - 1):
        for where, changed in _each(request, partial(_moved, pool_index=wrong)):
            yield f"{where} in pool {wrong}", changed


def _outside(request: Request) -> Iterator[tuple[str, Request]]:
    for offset in (2**31, 2**32 - 1, 2**32 - 64):
        for where, changed in _each(request, partial(_moved, offset=offset)):
            yield f"{where} at {offset}", changed
    for where, changed in _each(request, lambda a: _moved(a, padding=2**32 - 1)):
        yield f"{where} with a padding of {2**32 - 1}", changed


def _lengths(request: Request) -> Iterator[tuple[str, Request]]:
    for change in (-1, 1):
        for where, changed in _each(request, partial(_longer, change=change)):
            yield f"{where}, a length {change:+d}", changed


def _dimensions(request: Request) -> Iterator[tuple[str, Request]]:
    for where, changed in _each(request, lambda a: replace(a, dimensions=(1,) * 7)):
        yield f"{where} of rank 7", changed
    for where, changed in _each(request, lambda a: replace(a, dimensions=(2**32 - 1,) * 4)):
        yield f"{where} of huge extents", changed


def _no_value(request: Request) -> Iterator[tuple[str, Request]]:
    for where, changed in _each(request, lambda a: replace(a, has_no_value=True)):
        yield f"{where} left out but with a place", changed
    for i in range(len(request.outputs)):
        outputs = (*request.outputs[:i], RequestArgument(has_no_value=True, location=DataLocation(0, 0, 1)))
        yield f"output {i} left out", replace(request, outputs=(*outputs, *request.outputs[i + 1 :]))


def _overlaps(request: Request) -> Iterator[tuple[str, Request]]:
    first = request.outputs[0]
    for i, argument in enumerate(request.inputs):
        if not argument.has_no_value and argument.location.length >= first.location.length:
            location = replace(argument.location, length=first.location.length)
            moved = replace(first, location=location)
            yield f"output 0 over input {i}", replace(request, outputs=(moved, *request.outputs[1:]))
            again = replace(moved, location=replace(location, pool_index=len(request.pools)))
            pools = (*request.pools, request.pools[location.pool_index])
            changed = replace(request, outputs=(again, *request.outputs[1:]), pools=pools)
            yield f"output 0 over input {i}, whose pool comes twice", changed


REQUEST_CHANGES: dict[str, Change] = {
    "counts": _counts,
    "dimensions": _dimensions,
    "lengths": _lengths,
    "no_value": _no_value,
    "outside_of_pool": _outside,
    "overlaps": _overlaps,
    "pool_index": _pool_indexes,
}


async def _refuses_requests(subject: VtsSubject, change: str, path: Path) -> None:
    """Every change of a legal request is refused, on every path alike."""
    count = 0
    tests = (
        subject.tests
        if change == "counts"
        else subject.tests[:: max(1, len(subject.tests) // REQUEST_MODELS_MAX)]
    )
    model = add_model()
    with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
        count += await _refuses_changes(subject, model, pools.request, change, path, "add")
    for test in filter(_can_be_requested, tests):
        with contextlib.suppress(CaseSkipped), model_of(test) as model, TestArguments(test) as arguments:
            count += await _refuses_changes(subject, model, arguments.request, change, path, test.name)
    if not count:
        raise CaseSkipped("no request of the sample can be changed so")


def _can_be_requested(test: CtsTest) -> bool:
    """Models of known shapes without empty outputs, so that every path takes the unchanged request."""
    operands = [test.main.operands[i] for i in (*test.main.input_indexes, *test.main.output_indexes)]
    return all(0 not in operand.dimensions for operand in operands)


async def _refuses_changes(
    subject: VtsSubject, model: Model, request: Request, change: str, path: Path, name: str
) -> int:
    changes = subject.sample(list(REQUEST_CHANGES[change](request)), change, name)
    if not changes:
        return 0
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        for where, changed in changes:
            await expect_refused(executor, changed, f"{name}, {where}")
    return len(changes)


async def _refuses_closed_pool(subject: VtsSubject, path: Path) -> None:
    model = add_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            pools.output_pool.close()
            await expect_refused(executor, pools.request)


async def _refuses_read_only_output(subject: VtsSubject, path: Path) -> None:
    model = add_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            if subject.is_remote:
                raise CaseSkipped("the rights of this process do not show those of another process")
            view = Memory.from_fd(pools.output_pool.fileno(), writable=False)
            try:
                await expect_refused(executor, replace(pools.request, pools=(pools.input_pool, view)))
            finally:
                view.close()


async def _refuses_output_over_constant(subject: VtsSubject, path: Path) -> None:
    """Writing to memory that the model uses for its constants is refused: later executions would read what was written."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1, 64))
    constant = g.constant(np.ones((1, 64), np.float32))
    model = g.build([g.result(OperationType.ADD, [x, constant, 0], x)])
    constants, at = next(
        (model.pools[o.location.pool_index], o.location)
        for o in model.main.operands
        if o.lifetime == OperandLifeTime.CONSTANT_REFERENCE
    )
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.zeros((1, 64), np.float32)]) as pools:
            (output,) = pools.request.outputs
            place = DataLocation(len(pools.request.pools), at.offset, at.length)
            changed = replace(
                pools.request,
                outputs=(replace(output, location=place),),
                pools=(*pools.request.pools, constants),
            )
            await expect_refused(executor, changed)
    if (constants.array[at.offset : at.offset + at.length].view(np.float32) != 1).any():
        fail("the model's constants as they were", "other bytes")


async def _refuses_negative_times(subject: VtsSubject) -> None:
    model = add_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            for what in ("deadline_ns", "loop_timeout_ns"):
                subject.step()
                arguments: dict[str, Any] = {what: -1}
                await expect_refusal(
                    prepared.execute_synchronously(pools.request, **arguments), f"sync, {what} -1"
                )
                await expect_refusal(
                    prepared.execute_fenced(pools.request, (), **arguments), f"fenced, {what} -1"
                )
            await expect_refusal(
                prepared.execute_fenced(pools.request, (), duration_ns=-1), "fenced, duration_ns -1"
            )


async def _refuses_failed_fence(subject: VtsSubject) -> None:
    """A fence that has failed already is refused; nothing is launched."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools, SyncFence("failed") as fence:
            fence.fail(InvalidArgument("a fence of the suite"))
            subject.step()
            await expect_refusal(prepared.execute_fenced(pools.request, [fence]))
            if (pools.output().view(np.uint8) != 0xA5).any():
                fail("outputs as they were", "other bytes")


async def _refuses_what_is_no_fence(subject: VtsSubject) -> None:
    """Null instead of a fence, and any other value that is not a fence, is rejected; nothing is launched."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools, SyncFence("one") as fence:
            fence.signal()
            for wait_for in ([None], [fence, None], [-1], ["fence"]):
                subject.step()
                call = prepared.execute_fenced(pools.request, cast(Any, wait_for))
                await expect_refusal(call, f"wait_for {[str(one) for one in wait_for]}")
            if (pools.output().view(np.uint8) != 0xA5).any():
                fail("outputs as they were", "other bytes")


async def _refuses_closed_model(subject: VtsSubject, path: Path) -> None:
    """A prepared model that was closed executes nothing more."""
    model = add_model()
    await subject.check_support(model)
    prepared = await subject.device.prepare_model(model)
    await prepared.aclose()
    await prepared.aclose()
    with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
        if path == "burst":
            await expect_refusal(prepared.configure_execution_burst())
        else:
            async with executing(subject, prepared, path) as executor:
                await expect_refused(executor, pools.request)


CASES = (
    *(Case(f"model_mutations/{family}", partial(_refuses_models, family=family)) for family in FAMILIES),
    Case("model_mutations/execution_preference", _refuses_preference),
    Case("model_mutations/execution_priority", _refuses_priority),
    Case("model_mutations/deadline", _refuses_negative_deadline),
    *(
        Case(f"request_validation/{change}[{path}]", partial(_refuses_requests, change=change, path=path))
        for change in REQUEST_CHANGES
        for path in PATHS
    ),
    *(
        Case(f"request_validation/{name}[{path}]", partial(check, path=path))
        for name, check in (
            ("closed_pool", _refuses_closed_pool),
            ("output_over_constant", _refuses_output_over_constant),
            ("read_only_output", _refuses_read_only_output),
            ("closed_model", _refuses_closed_model),
        )
        for path in PATHS
    ),
    Case("request_validation/negative_times", _refuses_negative_times),
    Case("request_validation/failed_fence", _refuses_failed_fence),
    Case("request_validation/no_fence", _refuses_what_is_no_fence),
)

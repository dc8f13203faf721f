"""Cases: lifetimes (``lifetimes``) and measurements of the abilities that a driver declares (``claims``).

Owns the only cases that look at the memory of a process, and most of those that look at a clock. Their bounds are far from what is
measured: a busy machine passes.

Source: section 2.2 of the spec for lifetimes; ``CancelCapability`` and obligation 4 of the driver contract for the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from aionn.conformance.computing import closing
from aionn.conformance.vts.case import Case, CaseSkipped, VtsSubject, expect_status, fail, status_of_call
from aionn.conformance.vts.models import RequestPools, add_model, endless_model
from aionn.conformance.vts.paths import PATHS, executing
from aionn.conformance.vts.quality import LOOP_NS, SLACK_S
from aionn.errors import Error, ErrorStatus
from aionn.hal import (
    CancelCapability,
    DataLocation,
    Memory,
    Model,
    Operand,
    OperandLifeTime,
    OperandType,
    Operation,
    OperationType,
    PreparedModel,
    Subgraph,
)
from aionn.models.builder import GraphBuilder

__all__ = ["CASES"]

MODELS_COUNT = 40
CYCLES = 24
CONSTANT_BYTES = 8 << 20
GROWTH_MAX_BYTES = 64 << 20
"""A third of what the cycles' constants take together: a driver that keeps them all shows, one that frees late does not."""

RUN_NS = 400_000_000
"""Duration of the execution during which a device must answer."""

ANSWERS_MIN = 4
"""Answers within that time that show a thread free to give them; a free one gives some eighty."""


def _floats(value: float) -> list[npt.NDArray[np.float32]]:
    return [np.full((1, 4), value, np.float32)]


async def _many_models(subject: VtsSubject) -> None:
    """Many prepared models live side by side; each computes its own, in whatever order they are made, used and closed."""
    prepared: list[PreparedModel] = []
    models = [add_model(constant=float(i)) for i in range(MODELS_COUNT)]
    await subject.check_support(models[0])
    try:
        for model in models:
            subject.step()
            prepared.append(await subject.device.prepare_model(model))
        for i in [*range(0, MODELS_COUNT, 2), *reversed(range(1, MODELS_COUNT, 2))]:
            with RequestPools(models[i], _floats(100.0)) as pools:
                subject.step()
                await prepared[i].execute_synchronously(pools.request)
                if (pools.output() != 100 + i).any():
                    fail(f"100 + {i}", pools.output(), f"model {i}")
            if i % 3 == 0:
                await prepared[i].aclose()
    finally:
        for each in prepared:
            subject.step()
            await each.aclose()


async def _executions_at_once(subject: VtsSubject) -> None:
    """Executions of all kinds run concurrently on one prepared model; none is lost, none is mixed up."""
    model = add_model()
    async with subject.prepared(model) as prepared:

        async def execute(number: int) -> None:
            async with executing(subject, prepared, PATHS[number % len(PATHS)]) as executor:
                with RequestPools(model, _floats(float(number))) as pools:
                    for _ in range(5):
                        pools.reset()
                        answer = await executor.execute(pools.request)
                        expect_status(answer.status, answer.message, [ErrorStatus.NONE], f"task {number}")
                        if (pools.output() != number + 1).any():
                            fail(f"{number} + 1", pools.output(), f"task {number}")

        await _all([partial(execute, number) for number in range(12)])


async def _all(calls: list[Callable[[], Awaitable[None]]]) -> None:
    """Runs them concurrently and raises the first failure itself, not a group of them."""
    errors: list[Exception] = []

    async def run(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as e:
            errors.append(e)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(run, call)
    if errors:
        raise errors[0]


async def _closing_twice(subject: VtsSubject) -> None:
    """Closing is idempotent, for prepared models and bursts."""
    model = add_model()
    await subject.check_support(model)
    prepared = await subject.device.prepare_model(model)
    burst = await prepared.configure_execution_burst()
    for thing in (burst, burst, prepared, prepared, burst):
        subject.step()
        await thing.aclose()


async def _closing_while_executing(subject: VtsSubject) -> None:
    """A model that is closed under a running execution lets it end, one way or the other, and the device continues."""
    model = endless_model()
    await subject.check_support(model)
    prepared = await subject.device.prepare_model(model)
    with RequestPools(model, [np.ones(1, np.float32)]) as pools:
        answers: list[ErrorStatus] = []

        async def execute() -> None:
            call = prepared.execute_synchronously(pools.request, loop_timeout_ns=200_000_000)
            answers.append((await status_of_call(call))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(execute)
            await anyio.sleep(0.02)
            subject.step()
            await prepared.aclose()
            subject.step()
        if answers[0] == ErrorStatus.NONE:
            fail("a failure, since the loop never ends by itself", "success")
    await _still_computes(subject)


async def _cancelled_calls(subject: VtsSubject) -> None:
    """Calls that are cancelled immediately, and a little later, leave the device as it was."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        for delay_s in (0.0, 0.0, 0.0005, 0.002):
            with RequestPools(model, _floats(0.0)) as pools:
                with anyio.move_on_after(delay_s):
                    await prepared.execute_synchronously(pools.request)
                with anyio.move_on_after(delay_s):
                    made = await subject.device.prepare_model(model)
                    await made.aclose()
            subject.step()
    await _still_computes(subject)


async def _still_computes(subject: VtsSubject) -> None:
    model = add_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, _floats(0.0)) as pools:
            subject.step()
            await prepared.execute_synchronously(pools.request)
            if (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output(), "afterwards")


def _large_model(value: float) -> Model:
    """ADD of a large constant, made without a builder, which would keep the constant until it is collected."""
    pool = Memory.create(CONSTANT_BYTES)
    pool.array.view(np.float32)[:] = value
    extent = CONSTANT_BYTES // 4
    kind = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(kind, (1,), lifetime=OperandLifeTime.SUBGRAPH_INPUT),
        Operand(
            kind,
            (extent,),
            lifetime=OperandLifeTime.CONSTANT_REFERENCE,
            location=DataLocation(0, 0, CONSTANT_BYTES),
        ),
        Operand(OperandType.INT32, lifetime=OperandLifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4)),
        Operand(kind, (extent,), lifetime=OperandLifeTime.SUBGRAPH_OUTPUT),
    )
    main = Subgraph(operands, (Operation(OperationType.ADD, (0, 1, 2), (3,)),), (0,), (3,))
    return Model(main, operand_values=bytes(4), pools=(pool,))


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _closing_frees_memory(subject: VtsSubject) -> None:
    """The resources of a model are free when it is closed: preparing large ones repeatedly does not add up."""
    pid = getattr(subject.device, "pid", None) or os.getpid()
    await subject.check_support(add_model())
    before = 0
    for cycle in range(CYCLES):
        model = _large_model(float(cycle))
        try:
            async with subject.prepared(model):
                pass
        finally:
            for pool in model.pools:
                pool.close()
            del model
        if (
            cycle == 3
        ):  # Resources that are taken once, such as threads and allocators' reserves, have been taken.
            before = _resident_bytes(pid)
    growth = _resident_bytes(pid) - before
    if growth > GROWTH_MAX_BYTES:
        fail(
            f"at most {GROWTH_MAX_BYTES >> 20} MiB more after {CYCLES} models of {CONSTANT_BYTES >> 20} MiB",
            f"{growth >> 20} MiB more",
        )


async def _constants_outlive_their_source(subject: VtsSubject) -> None:
    """A prepared model keeps the memory of its constants: the client may close its own end."""
    g = GraphBuilder()
    x = g.input(OperandType.TENSOR_FLOAT32, (1,))
    constant = g.constant(np.arange(64, dtype=np.float32))
    y = g.variable(OperandType.TENSOR_FLOAT32, (64,))
    g.operation(OperationType.ADD, [x, constant, 0], [y])
    model = g.build([y])
    if not model.pools:
        raise CaseSkipped("the constants are copied")
    async with subject.prepared(model) as prepared:
        for pool in model.pools:
            pool.close()
        with RequestPools(model, [np.ones(1, np.float32)]) as pools:
            subject.step()
            await prepared.execute_synchronously(pools.request)
            if pools.output().tolist() != [float(i + 1) for i in range(64)]:
                fail("1 to 64", pools.output())


# Claims


async def _cancelled_execution_frees_the_slot(subject: VtsSubject) -> None:
    """A device that declares that it can be stopped is free soon after its caller was cancelled."""
    if subject.device.info.cancel == CancelCapability.NONE:
        raise CaseSkipped("the device declares that it cannot be stopped")
    model, small = endless_model(), add_model()
    async with subject.prepared(model) as prepared, subject.prepared(small) as afterwards:
        with (
            RequestPools(model, [np.ones(1, np.float32)]) as pools,
            RequestPools(small, _floats(0.0)) as others,
        ):
            for _ in range(subject.device.info.slots):
                subject.step()
                # Counted from here, since a driver may keep its caller until the execution has ended.
                cancelled_s = time.monotonic() + 0.05
                with anyio.move_on_after(0.05):
                    await prepared.execute_synchronously(pools.request, loop_timeout_ns=LOOP_NS)
                    fail("an execution that continues until it is cancelled", "its end")
            subject.step()
            await afterwards.execute_synchronously(others.request)
            late_s = time.monotonic() - cancelled_s
            if late_s > SLACK_S:
                fail(
                    f"the next execution within {SLACK_S:g} s, as the device can be stopped"
                    f" ({subject.device.info.cancel.name})",
                    f"one after {late_s:.2f} s",
                )


async def _answers_while_executing(subject: VtsSubject) -> None:
    """A device answers questions while it computes: it holds neither the event loop nor the interpreter's lock."""
    model = endless_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.ones(1, np.float32)]) as pools:
            best = 0
            for _ in range(3):
                best = max(best, await _answers_beside(subject, prepared, pools))
                if best >= ANSWERS_MIN:
                    return
            fail(
                f"at least {ANSWERS_MIN} answers while an execution runs for {RUN_NS // 1_000_000} ms",
                f"{best}: the driver holds the event loop or the interpreter's lock",
            )


async def _answers_beside(subject: VtsSubject, prepared: PreparedModel, pools: RequestPools) -> int:
    """Number of status queries that a device answers while it executes."""
    count = 0
    subject.step()
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            nonlocal count
            while True:
                await subject.device.status()
                count += 1
                await anyio.sleep(0.005)

        async def execute() -> None:
            try:
                await prepared.execute_synchronously(pools.request, loop_timeout_ns=RUN_NS)
            except Error:
                pass  # The loop's time-out; another case checks the status.
            finally:
                tasks.cancel_scope.cancel()

        tasks.start_soon(execute)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(ask)
    return count


async def _slots_run_at_once(subject: VtsSubject) -> None:
    """A device of several slots computes as many requests concurrently."""
    slots = subject.device.info.slots
    if slots < 2:
        raise CaseSkipped("the device has one slot")
    model = endless_model()
    async with subject.prepared(model) as prepared:

        async def execute() -> None:
            with RequestPools(model, [np.ones(1, np.float32)]) as pools:
                await status_of_call(prepared.execute_synchronously(pools.request, loop_timeout_ns=RUN_NS))

        began_s = time.monotonic()
        subject.step()
        await _all([execute] * slots)
        took_s = time.monotonic() - began_s
        if took_s > RUN_NS * (slots - 0.2) / 1e9:
            fail(f"{slots} executions of {RUN_NS / 1e9:g} s, concurrently", f"{took_s:.2f} s for all of them")


async def _closes_in_time(subject: VtsSubject) -> None:
    """A prepared model and a burst close within their time even though others are in use."""
    model = add_model()
    async with subject.prepared(model) as prepared:
        for _ in range(20):
            burst = await prepared.configure_execution_burst()
            async with closing(burst):
                with RequestPools(model, _floats(0.0)) as pools:
                    subject.step()
                    await burst.execute_synchronously(pools.request, (0, 1))


CASES = (
    Case("lifetimes/many_models_side_by_side", _many_models),
    Case("lifetimes/executions_at_once", _executions_at_once),
    Case("lifetimes/closing_twice", _closing_twice),
    Case("lifetimes/closing_while_executing", _closing_while_executing),
    Case("lifetimes/cancelled_calls", _cancelled_calls),
    Case("lifetimes/closing_frees_memory", _closing_frees_memory),
    Case("lifetimes/constants_outlive_their_source", _constants_outlive_their_source),
    Case("lifetimes/bursts_come_and_go", _closes_in_time),
    Case("claims/cancelled_execution_frees_the_slot", _cancelled_execution_frees_the_slot),
    Case("claims/answers_while_executing", _answers_while_executing),
    Case("claims/slots_run_at_once", _slots_run_at_once),
)

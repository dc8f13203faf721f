"""The ways to have a prepared model compute, each reduced to one awaitable that gives one answer.

Owns the four modes, the reusable execution, and the driver contract's rules for every answer whatever its content: callbacks come
once, fences and information agree, a failure reports neither shapes nor times. The suite checks the values of the outputs.

Invariants:
1. Every failure that the contract knows becomes an ``Answer``; a driver that breaks the contract raises ``Breach``.
2. Every object that was opened on the device is closed again, in bounded time.

Source: obligations in ``aionn.hal.device``; the executors of the NN HAL's VTS.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import anyio

from aionn.conformance.requests import FILL
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import (
    NO_TIMING,
    Execution,
    ExecutionResult,
    FencedExecution,
    Memory,
    OutputShape,
    PreparedModel,
    Request,
    Timing,
)
from aionn.platform.loops import finish
from fences import FenceError, FenceStatus, SyncFence

__all__ = [
    "MODES",
    "Answer",
    "Breach",
    "Compute",
    "Mode",
    "close",
    "closing",
    "computing",
    "reusable_computing",
]

Mode = Literal["sync", "async", "burst", "fenced"]
MODES: tuple[Mode, ...] = get_args(Mode)

CLOSE_S_MAX = 5.0
"""Limit of closing an object on the device: a device that hangs must not hang the suite."""


class Breach(Exception):
    """The driver broke the contract.

    Attributes:
        expected: The contract's rule.
        got: The driver's result.
    """

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected = expected
        self.got = got


class Answer(NamedTuple):
    """The end of a computation.

    Attributes:
        status: NONE, OUTPUT_INSUFFICIENT_SIZE, or why it failed.
        shapes: One per output; may be empty when every output has the shape that the model states.
        timing: The measured durations.
        message: The error's words.
    """

    status: ErrorStatus
    shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""


Compute = Callable[[], Awaitable[Answer]]


class _Closable(Protocol):
    async def aclose(self) -> None: ...


@contextlib.asynccontextmanager
async def closing(thing: _Closable) -> AsyncIterator[None]:
    """Closes an object of the device at the end, in all cases, for ``CLOSE_S_MAX`` at most."""
    try:
        yield
    finally:
        await close(thing)


async def close(thing: _Closable, within_s: float = CLOSE_S_MAX) -> None:
    """Closes an object of the device although the caller is cancelled, for ``within_s`` at most."""
    await finish(_closed(thing, within_s))


async def _closed(thing: _Closable, within_s: float) -> None:
    with anyio.move_on_after(within_s):
        await thing.aclose()


@contextlib.asynccontextmanager
async def computing(
    prepared: PreparedModel,
    request: Request,
    mode: Mode,
    *,
    measure: bool = False,
    loop_timeout_ns: int | None = None,
) -> AsyncIterator[Compute]:
    """Makes a request ready to be computed in a mode, any number of times, one after the other.

    A burst remembers the memories from the first time on, and carries no loop time-out: the default holds there. Without timings it
    computes twice: a driver may answer the second packet, of the same bytes, without Python (``AIONN_NATIVE``). Fenced execution
    computes twice, the second waiting for the first.
    """
    if mode == "sync":
        yield lambda: _answer(
            lambda: prepared.execute_synchronously(request, measure=measure, loop_timeout_ns=loop_timeout_ns)
        )
    elif mode == "async":
        yield lambda: _call_back(prepared, request, measure, loop_timeout_ns)
    elif mode == "fenced":

        def launch(wait_for: Sequence[SyncFence]) -> Awaitable[FencedExecution]:
            return prepared.execute_fenced(
                request, wait_for, measure=measure, loop_timeout_ns=loop_timeout_ns
            )

        yield lambda: _chained(launch)
    else:
        burst = await prepared.configure_execution_burst()
        async with closing(burst):
            identifiers = range(len(request.pools))

            def execute() -> Awaitable[ExecutionResult]:
                return burst.execute_synchronously(request, identifiers, measure=measure)

            yield lambda: _answer(execute) if measure else _repeated(request, execute)
            for identifier in identifiers:
                await burst.release_memory_resource(identifier)


async def reusable_computing(
    prepared: PreparedModel, request: Request, mode: Mode, *, loop_timeout_ns: int | None = None
) -> Compute:
    """Makes a reusable execution, to be computed by fences in that mode and synchronously otherwise.

    Raises:
        Error: The device refuses the request.
    """
    execution: Execution = await prepared.create_reusable_execution(
        request, measure=True, loop_timeout_ns=loop_timeout_ns
    )
    if mode == "fenced":
        return lambda: _launched(execution.execute_fenced)
    return lambda: _answer(execution.execute_synchronously)


async def _answer(call: Callable[[], Awaitable[ExecutionResult]]) -> Answer:
    try:
        result = await call()
    except Error as e:
        return Answer(status_of(e), message=str(e))
    enough = result.output_sufficient_size
    if enough and not all(shape.is_sufficient for shape in result.output_shapes):
        raise Breach("sufficient outputs, as the result reports", "an output shape marked as insufficient")
    status = ErrorStatus.NONE if enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    return _checked(Answer(status, result.output_shapes, result.timing))


async def _repeated(request: Request, call: Callable[[], Awaitable[ExecutionResult]]) -> Answer:
    """Two executions; the answer is that of the second, or the failure of the first. Outputs of the first are overwritten."""
    first = await _answer(call)
    if first.status is not ErrorStatus.NONE:
        return first
    for argument in request.outputs:
        pool = None if argument.has_no_value else request.pools[argument.location.pool_index]
        if isinstance(pool, Memory):
            place = argument.location
            pool.array[place.offset : place.offset + place.length] = FILL
    return await _answer(call)


async def _call_back(
    prepared: PreparedModel, request: Request, measure: bool, loop_timeout_ns: int | None
) -> Answer:
    answers: list[Answer] = []
    called = SyncFence("callback")

    def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
        answers.append(Answer(status, tuple(shapes), timing))
        called.try_signal()

    launch = await prepared.execute(request, callback, measure=measure, loop_timeout_ns=loop_timeout_ns)
    await called
    if len(answers) != 1:
        raise Breach("one callback", f"{len(answers)} callbacks")
    (answer,) = answers
    if launch not in (ErrorStatus.NONE, answer.status):
        raise Breach(f"a callback with the launch's {launch.name}", answer.status.name)
    return _checked(answer)


Launch = Callable[[Sequence[SyncFence]], Awaitable[FencedExecution]]


async def _launched(launch: Launch) -> Answer:
    """One fenced execution, behind a fence that is signalled after the launch."""
    with SyncFence("start") as start:
        try:
            launched = await launch([start])
        except Error as e:
            return Answer(status_of(e), message=str(e))
        start.signal()
        return await _finished(launched)


async def _chained(launch: Launch) -> Answer:
    """Two fenced executions, the second behind the first; the answer is that of the second, or the failure of the first."""
    with SyncFence("start") as start:
        try:
            first = await launch([start])
            second = await launch([start] if first.fence is None else [first.fence])
        except Error as e:
            start.try_signal()
            return Answer(status_of(e), message=str(e))
        start.signal()
        answer = await _finished(first)
        after = await _finished(second)
        return after if answer.status == ErrorStatus.NONE else answer


async def _finished(launched: FencedExecution) -> Answer:
    message = ""
    if launched.fence is not None:
        try:
            await launched.fence
        except FenceError as e:
            message = str(e)
    status, timing = await launched.get_execution_info()
    failed = launched.fence is not None and launched.fence.status == FenceStatus.FAILED
    if failed != (status != ErrorStatus.NONE):
        raise Breach(
            f"information that agrees with the fence, which {'failed' if failed else 'was signalled'}",
            status.name,
        )
    if launched.fence is not None:
        launched.fence.close()
    return _checked(Answer(status, (), timing.launched, message))


def _checked(answer: Answer) -> Answer:
    """The rules for every answer.

    Raises:
        Breach: It does not.
    """
    known = (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
    if answer.status not in known and answer.shapes:
        raise Breach(f"no output shapes with {answer.status.name}", f"{len(answer.shapes)} shapes")
    if answer.status != ErrorStatus.NONE and answer.timing != NO_TIMING:
        raise Breach(f"no timing with {answer.status.name}", str(answer.timing))
    on_device, in_driver = answer.timing.time_on_device_ns, answer.timing.time_in_driver_ns
    if on_device is not None and in_driver is not None and on_device > in_driver:
        raise Breach(f"a time in the driver of at least the device's {on_device} ns", f"{in_driver} ns")
    return answer

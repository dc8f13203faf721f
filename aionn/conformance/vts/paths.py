"""The four ways to execute, each reduced to one answer, with all rules of the contract for a launch checked on the way.

Owns the paths' differences: how a deadline is missed, how a refusal arrives, what a callback may do. Unlike ``computing``, whose
modes run the conformance data, these calls are made to fail as often as to succeed, and take deadlines.

Invariants:
1. A callback that comes twice is found, at the latest when ``Callbacks.check`` is called at the case's end.
2. A refusal reports neither shapes nor times, on any path.

Source: the executors of the NN HAL's VTS 1.3.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from aionn.conformance.computing import MODES, Answer, Mode, closing
from aionn.conformance.cts import CtsTest
from aionn.conformance.cts.arguments import TestArguments
from aionn.conformance.vts.case import CaseSkipped, VtsSubject, expect_outputs, expect_status, fail
from aionn.conformance.vts.models import model_of
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import NO_TIMING, Burst, MemoryKind, OutputShape, PreparedModel, Priority, Request, Timing
from fences import FenceError, FenceStatus, SyncFence

__all__ = ["PATHS", "Callbacks", "Executor", "Path", "compute_tests", "executing", "expect_refused"]

Path = Mode
PATHS = MODES


class Callbacks:
    """Counts callbacks: each must come once, and nothing after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: list[list[Answer]] = []

    def new(self) -> tuple[Any, list[Answer], SyncFence]:
        """A callback to hand to a driver, its arguments, and a fence that signals at the first call."""
        answers: list[Answer] = []
        called = SyncFence("callback")
        self._answers.append(answers)

        def callback(status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
            with self._lock:
                answers.append(Answer(status, tuple(shapes), timing))
            called.try_signal()

        return callback, answers, called

    def check(self) -> None:
        """Ends the case as failed where a callback did not come exactly once."""
        for answers in self._answers:
            if len(answers) != 1:
                fail("every callback to be notified once", f"one notified {len(answers)} times")


class Executor:
    """Executes requests on one prepared model by one path; made by ``executing``."""

    def __init__(self, subject: VtsSubject, prepared: PreparedModel, path: Path, burst: Burst | None) -> None:
        self._subject = subject
        self._prepared = prepared
        self.path = path
        self._burst = burst
        self.callbacks = Callbacks()

    async def execute(
        self,
        request: Request,
        *,
        measure: bool = False,
        deadline_ns: int | None = None,
        loop_timeout_ns: int | None = None,
        where: str = "",
    ) -> Answer:
        """One execution. A burst is given no loop time-out: its packets carry none."""
        self._subject.step()
        if self.path == "fenced":
            answer = await self._fenced(request, measure, deadline_ns, loop_timeout_ns)
        elif self.path == "async":
            answer = await self._asynchronous(request, measure, deadline_ns, loop_timeout_ns, where)
        else:
            answer = await self._synchronous(request, measure, deadline_ns, loop_timeout_ns)
        _check(answer, measure, where)
        return answer

    async def _synchronous(
        self, request: Request, measure: bool, deadline_ns: int | None, loop_timeout_ns: int | None
    ) -> Answer:
        try:
            if self._burst is None:
                result = await self._prepared.execute_synchronously(
                    request, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
                )
            else:
                # A device memory has no identifier; and nothing is remembered, since every request has pools of its own.
                result = await self._burst.execute_synchronously(
                    request, [-1] * len(request.pools), measure=measure, deadline_ns=deadline_ns
                )
        except Error as e:
            return Answer(status_of(e), message=str(e))
        enough = result.output_sufficient_size
        return Answer(
            ErrorStatus.NONE if enough else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE,
            tuple(result.output_shapes),
            result.timing,
        )

    async def _asynchronous(
        self,
        request: Request,
        measure: bool,
        deadline_ns: int | None,
        loop_timeout_ns: int | None,
        where: str,
    ) -> Answer:
        callback, answers, called = self.callbacks.new()
        launch = await self._prepared.execute(
            request, callback, measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
        )
        await called
        answer = answers[0]
        if launch not in (ErrorStatus.NONE, answer.status):
            fail(f"a callback with the launch's {launch.name}", answer.status.name, where)
        if answer.status == ErrorStatus.INVALID_ARGUMENT and launch != answer.status:
            fail("a launch that is refused with INVALID_ARGUMENT, as its callback was", launch.name, where)
        missed = (ErrorStatus.MISSED_DEADLINE_PERSISTENT, ErrorStatus.MISSED_DEADLINE_TRANSIENT)
        if launch in missed:
            fail("a launch with NONE, since a deadline is missed by the callback", launch.name, where)
        return answer

    async def _fenced(
        self, request: Request, measure: bool, deadline_ns: int | None, loop_timeout_ns: int | None
    ) -> Answer:
        try:
            fence, get_info = await self._prepared.execute_fenced(
                request, (), measure=measure, deadline_ns=deadline_ns, loop_timeout_ns=loop_timeout_ns
            )
        except Error as e:
            return Answer(status_of(e), message=str(e))
        message = ""
        if fence is not None:
            with contextlib.closing(fence):
                try:
                    await fence
                except FenceError as e:
                    message = str(e)
                has_failed = fence.status == FenceStatus.FAILED
        else:
            has_failed = False
        status, timing = await get_info()
        if has_failed != (status != ErrorStatus.NONE):
            fail(
                f"information that agrees with a fence that {'failed' if has_failed else 'signalled'}",
                status.name,
            )
        launched, fenced = timing.launched.time_in_driver_ns, timing.fenced.time_in_driver_ns
        if launched is not None and fenced is not None and fenced > launched:
            fail(f"a time from the fences of at most the {launched} ns from the launch", f"{fenced} ns")
        return Answer(status, (), timing.launched, message)


def _check(answer: Answer, measure: bool, where: str) -> None:
    if answer.status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE) and answer.shapes:
        fail(f"no output shapes with {answer.status.name}", f"{len(answer.shapes)} shapes", where)
    if (answer.status != ErrorStatus.NONE or not measure) and answer.timing != NO_TIMING:
        fail("no times, as none were asked for or earned", answer.timing, where)
    on_device, in_driver = answer.timing.time_on_device_ns, answer.timing.time_in_driver_ns
    if on_device is not None and in_driver is not None and on_device > in_driver:
        fail(f"at least the device's {on_device} ns in the driver", f"{in_driver} ns", where)


@contextlib.asynccontextmanager
async def executing(subject: VtsSubject, prepared: PreparedModel, path: Path) -> AsyncIterator[Executor]:
    """An executor for a path. Ends with a look at all callbacks."""
    if path == "burst":
        subject.step()
        burst = await prepared.configure_execution_burst()
        async with closing(burst):
            yield Executor(subject, prepared, path, burst)
    else:
        executor = Executor(subject, prepared, path, None)
        yield executor
        executor.callbacks.check()


async def compute_tests(
    subject: VtsSubject,
    tests: Iterable[CtsTest],
    path: Path,
    *,
    priority: Priority = Priority.MEDIUM,
    kind: MemoryKind = MemoryKind.ASHMEM,
    get_deadline_ns: Callable[[], int | None] = lambda: None,
    allowed: Sequence[ErrorStatus] = (ErrorStatus.NONE,),
) -> int:
    """Computes each of some conformance models once; ends the case as failed where one does otherwise than it should.

    Args:
        subject: The subject of the case.
        tests: The models.
        path: The form of execution.
        priority: Of the prepared models.
        kind: Of the memories of inputs and outputs.
        get_deadline_ns: Asked before every execution.
        allowed: The statuses by which an execution may end; with NONE come the right outputs.

    Returns:
        Number of the models that the device supports.
    """
    count = 0
    for test in tests:
        with contextlib.suppress(CaseSkipped), model_of(test) as model:
            async with (
                subject.prepared(model, priority=priority) as prepared,
                executing(subject, prepared, path) as executor,
            ):
                with TestArguments(test, kind=kind) as arguments:
                    arguments.reset()
                    answer = await executor.execute(
                        arguments.request, deadline_ns=get_deadline_ns(), where=test.name
                    )
                    expect_status(answer.status, answer.message, allowed, test.name)
                    if answer.status == ErrorStatus.NONE:
                        expect_outputs(test, arguments.outputs(answer.shapes))
                    count += 1
    return count


async def expect_refused(
    executor: Executor,
    request: Request,
    where: str = "",
    *,
    allowed: Sequence[ErrorStatus] = (ErrorStatus.INVALID_ARGUMENT,),
) -> None:
    """Ends the case as failed unless the path refuses the request with one of the statuses."""
    answer = await executor.execute(request, where=where)
    expect_status(answer.status, answer.message, allowed, where)

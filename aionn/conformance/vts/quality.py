"""Cases: quality of service. Priorities, and deadlines that have passed, that are near, and that never come.

Source: ``QualityOfServiceTests`` of the NN HAL's VTS 1.3; obligation 3 of the driver contract for what a deadline means.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from aionn.conformance.vts.case import Case, VtsSubject, expect_status, fail, status_of_call
from aionn.conformance.vts.models import RequestPools, add_model, endless_model, has_definite_outputs
from aionn.conformance.vts.paths import PATHS, Path, compute_tests, executing
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import TIME_MAX_NS, CancelCapability, Priority
from fences import FenceError, SyncFence

__all__ = ["CASES", "MISSED", "SLACK_S"]

MISSED = (ErrorStatus.MISSED_DEADLINE_TRANSIENT, ErrorStatus.MISSED_DEADLINE_PERSISTENT)
NONE = ErrorStatus.NONE

SHORT_NS = 5_000_000
"""A deadline that a small model may or may not meet; the VTS's number."""

SLACK_S = 1.5
"""Limit of the delay in noticing an end here: far longer than any machine's scheduling, far shorter than the loop that is ended."""

LOOP_NS = 3_500_000_000
"""Loop time-out of executions that something else must end."""

MODELS_MAX = 12
"""Models of a sample that are tried with every deadline: what a deadline means does not depend on the operation."""

DEADLINES = ("now", "short", "unlimited")


def _deadline_ns(deadline: str) -> int:
    now_ns = time.monotonic_ns()
    return {"now": now_ns, "short": now_ns + SHORT_NS, "unlimited": TIME_MAX_NS}[deadline]


def _allowed(deadline: str) -> tuple[ErrorStatus, ...]:
    return (NONE,) if deadline == "unlimited" else (NONE, *MISSED)


async def _prepares(subject: VtsSubject, priority: Priority, deadline: str) -> None:
    """Preparing succeeds, or misses its deadline; a model that was prepared computes."""
    model = add_model()
    await subject.check_support(model)
    subject.step()
    try:
        prepared = await subject.device.prepare_model(
            model, priority=priority, deadline_ns=_deadline_ns(deadline)
        )
    except Error as e:
        expect_status(status_of(e), str(e), _allowed(deadline))
        return
    try:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            subject.step()
            await prepared.execute_synchronously(pools.request)
            if (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output())
    finally:
        await prepared.aclose()


async def _executes(subject: VtsSubject, priority: Priority, deadline: str, path: Path) -> None:
    """An execution succeeds with the right result, or misses its deadline, without times."""
    made = await compute_tests(
        subject,
        filter(has_definite_outputs, subject.spread(MODELS_MAX)),
        path,
        priority=priority,
        get_deadline_ns=partial(_deadline_ns, deadline),
        allowed=_allowed(deadline),
    )
    if not made:
        await _executes_addition(subject, priority, deadline, path)


async def _executes_addition(subject: VtsSubject, priority: Priority, deadline: str, path: Path) -> None:
    model = add_model()
    async with (
        subject.prepared(model, priority=priority) as prepared,
        executing(subject, prepared, path) as executor,
    ):
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            answer = await executor.execute(pools.request, deadline_ns=_deadline_ns(deadline))
            expect_status(answer.status, answer.message, _allowed(deadline))
            if answer.status == NONE and (pools.output() != 1).any():
                fail("0 + 1 = 1", pools.output())


async def _past_deadline_is_missed(subject: VtsSubject, path: Path) -> None:
    """A deadline that has passed before the start is missed, and nothing is computed."""
    model = add_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.zeros((1, 4), np.float32)]) as pools:
            for deadline_ns in (0, 1, time.monotonic_ns() - 1_000_000):
                answer = await executor.execute(pools.request, deadline_ns=deadline_ns)
                expect_status(answer.status, answer.message, MISSED, f"deadline {deadline_ns} ns")
            pools.reset()
            answer = await executor.execute(pools.request)
            expect_status(answer.status, answer.message, [NONE], "without a deadline")


async def _preparing_past_deadline_is_missed(subject: VtsSubject) -> None:
    await subject.check_support(add_model())
    for deadline_ns in (0, 1):
        subject.step()
        status, words = await status_of_call(
            subject.device.prepare_model(add_model(), deadline_ns=deadline_ns)
        )
        expect_status(status, words, MISSED, f"deadline {deadline_ns} ns")


async def _deadline_ends_execution(subject: VtsSubject, path: Path) -> None:
    """A deadline that passes while an execution runs is missed, and soon, if the device declares that it can be stopped."""
    model = endless_model()
    async with subject.prepared(model) as prepared, executing(subject, prepared, path) as executor:
        with RequestPools(model, [np.ones(1, np.float32)]) as pools:
            deadline_ns = time.monotonic_ns() + 50_000_000
            answer = await executor.execute(pools.request, deadline_ns=deadline_ns, loop_timeout_ns=LOOP_NS)
            late_s = (time.monotonic_ns() - deadline_ns) / 1e9
            expect_status(answer.status, answer.message, MISSED)
            _check_late(subject, late_s)


async def _allowance_ends_fenced(subject: VtsSubject) -> None:
    """The allowance after the fences fails the fence of an execution that takes longer, and the information reports it."""
    model = endless_model()
    async with subject.prepared(model) as prepared:
        with RequestPools(model, [np.ones(1, np.float32)]) as pools, SyncFence("start") as start:
            subject.step()
            launched = await prepared.execute_fenced(
                pools.request, [start], duration_ns=50_000_000, loop_timeout_ns=LOOP_NS
            )
            if launched.fence is None:
                fail("a fence, as the execution cannot have been done", "none")
            start.signal()
            began_s = time.monotonic()
            subject.step()
            try:
                await launched.fence
            except FenceError:
                pass
            else:
                fail("a failed fence", "one that signalled")
            finally:
                launched.fence.close()
            late_s = time.monotonic() - began_s - 0.05
            # A fence must fail immediately, whatever the device is able to do.
            if late_s > SLACK_S:
                fail(
                    f"a failed fence within {SLACK_S:g} s of the allowance's end", f"one after {late_s:.2f} s"
                )
            status, _ = await launched.get_execution_info()
            expect_status(status, "", MISSED, "information")


def _check_late(subject: VtsSubject, late_s: float) -> None:
    if late_s > SLACK_S and subject.device.info.cancel != CancelCapability.NONE:
        fail(
            f"an answer within {SLACK_S:g} s of the deadline, as the device declares that it can be stopped",
            f"one after {late_s:.2f} s",
        )


CASES = (
    *(
        Case(
            f"quality_of_service/prepare[{priority.name.lower()},{deadline}]",
            partial(_prepares, priority=priority, deadline=deadline),
        )
        for priority in (Priority.LOW, Priority.HIGH)
        for deadline in DEADLINES
    ),
    *(
        Case(
            f"quality_of_service/execute[{priority.name.lower()},{deadline},{path}]",
            partial(_executes, priority=priority, deadline=deadline, path=path),
        )
        for priority in (Priority.LOW, Priority.HIGH)
        for deadline in DEADLINES
        for path in PATHS
    ),
    *(
        Case(
            f"quality_of_service/past_deadline_is_missed[{path}]",
            partial(_past_deadline_is_missed, path=path),
        )
        for path in PATHS
    ),
    Case("quality_of_service/past_deadline_is_missed[prepare]", _preparing_past_deadline_is_missed),
    *(
        Case(
            f"quality_of_service/deadline_ends_execution[{path}]",
            partial(_deadline_ends_execution, path=path),
        )
        for path in PATHS
        if path
        != "burst"  # Its packets carry none; the end of the loop by itself is among the generated kinds.
    ),
    Case("quality_of_service/allowance_ends_fenced_execution", _allowance_ends_fenced),
)

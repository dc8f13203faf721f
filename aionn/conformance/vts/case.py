"""A case of the driver suite, and its tools: a device, models to work on, and functions that report findings.

Owns the vocabulary of the cases (the modules beside this one) and the small things that all of them do: calling a device within
bounded time, preparing a model, demanding a refusal. Knows no case, and nothing of how cases are chosen, run and counted (``run``).

Invariants:
1. A case returns, or raises ``CaseFailed`` or ``CaseSkipped``; objects that it opened on the device are closed again.
2. Every call on the device is a step; the time that a case may take counts from its last step, so that a long case does not count
   as a hang.
3. Cases use the contract in ``aionn.hal.device`` alone. Only ``packets`` looks behind a burst, at its queues.

Source: the NN HAL's VTS; trio's published checkers, which know no test framework either.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy.typing as npt

from aionn.conformance.computing import close, closing
from aionn.conformance.cts import CtsTest, compare
from aionn.conformance.support import unsupported_reason
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import Device, Model, PreparedModel, Priority

__all__ = [
    "Case",
    "CaseFailed",
    "CaseSkipped",
    "VtsSubject",
    "expect_outputs",
    "expect_refusal",
    "expect_status",
    "fail",
    "status_of_call",
]

STEP_S = 10.0
"""Limit of one step: a model of the suite takes milliseconds on the reference driver, a process a second to start."""

_T = TypeVar("_T")


class CaseFailed(Exception):
    """The driver did something else than it should.

    Attributes:
        where: The part of the case, such as the mutation; empty if the case has no parts.
        expected: The expected result.
        got: The actual result.
    """

    def __init__(self, expected: str, got: str, where: str = "") -> None:
        super().__init__(
            f"{where}: expected {expected}, got {got}" if where else f"expected {expected}, got {got}"
        )
        self.where = where
        self.expected = expected
        self.got = got


class CaseSkipped(Exception):
    """The case means nothing for this device; its words are the reason."""


def fail(expected: str, got: object, where: str = "") -> NoReturn:
    """Ends the case as failed."""
    raise CaseFailed(expected, str(got), where)


class VtsSubject:
    """The resources of a case.

    Args:
        device: The device.
        tests: Conformance models, a sample or all; those that must fail are ``failing_tests`` afterwards.
        mutants_max: Most mutations of one family of one model; None for all.
        is_remote: Whether the device is in a process of its own.
        step: Called at every step.
        get_other: Gives a second device of the same driver, for what must not mix; None without one.
    """

    def __init__(
        self,
        device: Device,
        tests: Sequence[CtsTest] = (),
        *,
        mutants_max: int | None = None,
        is_remote: bool = False,
        step: Callable[[], None] = lambda: None,
        get_other: Callable[[], Awaitable[Device]] | None = None,
    ) -> None:
        self.device = device
        self.tests = [test for test in tests if not test.expect_failure]
        self.failing_tests = [test for test in tests if test.expect_failure]
        self.mutants_max = mutants_max
        self.is_remote = is_remote
        self.step = step
        self.get_other = get_other

    def sample(self, items: Sequence[_T], *key: object) -> list[_T]:
        """At most ``mutants_max`` of them, in order; which ones depends on ``key`` alone."""
        if self.mutants_max is None or len(items) <= self.mutants_max:
            return list(items)
        rng = random.Random(zlib.crc32(repr(key).encode()))
        return [items[i] for i in sorted(rng.sample(range(len(items)), self.mutants_max))]

    def spread(self, count_min: int) -> list[CtsTest]:
        """Tests at equal distances, at least ``count_min``; all where there are no more, and where ``mutants_max`` is None."""
        step = max(1, len(self.tests) // count_min) if self.mutants_max is not None else 1
        return self.tests[::step]

    async def check_support(self, model: Model) -> None:
        """Ends the case as skipped where the device does not support the whole model."""
        self.step()
        supported = await self.device.supported_operations(model)
        reason = unsupported_reason(model, supported, self.device.info.feature_level)
        if reason:
            raise CaseSkipped(reason)

    @contextlib.asynccontextmanager
    async def prepared(
        self, model: Model, *, priority: Priority = Priority.MEDIUM
    ) -> AsyncIterator[PreparedModel]:
        """The model made ready; the case is skipped where the device does not support it."""
        await self.check_support(model)
        self.step()
        prepared = await self.device.prepare_model(model, priority=priority)
        async with closing(prepared):
            self.step()
            yield prepared


async def status_of_call(call: Awaitable[Any], where: str = "") -> tuple[ErrorStatus, str]:
    """The end of a call, and its message; an object that a success returned is closed."""
    try:
        result = await call
    except Error as e:
        return status_of(e), str(e)
    except (CaseFailed, CaseSkipped):
        raise
    except Exception as e:
        fail("success, or one of aionn.errors", f"{type(e).__name__}: {e}", where)
    aclose = getattr(result, "aclose", None)
    if aclose is not None:
        await close(result, STEP_S)
    if getattr(result, "output_sufficient_size", True) is False:
        return ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, ""
    return ErrorStatus.NONE, "success"


def expect_status(got: ErrorStatus, words: str, allowed: Sequence[ErrorStatus], where: str = "") -> None:
    """Ends the case as failed unless the status is one of those."""
    if got not in allowed:
        expected = " or ".join(status.name for status in allowed)
        fail(expected, "success" if got == ErrorStatus.NONE else f"{got.name} ({words})", where)


def expect_outputs(test: CtsTest, outputs: Sequence[npt.NDArray[Any]]) -> None:
    """Ends the case as failed unless the outputs equal the test's, within its tolerance."""
    mismatch = compare(test, outputs)
    if mismatch is not None:
        fail(mismatch.expected, mismatch.got, test.name)


async def expect_refusal(
    call: Awaitable[Any], where: str = "", *, allowed: Sequence[ErrorStatus] = (ErrorStatus.INVALID_ARGUMENT,)
) -> None:
    """Ends the case as failed unless the call raises one of the statuses."""
    got, words = await status_of_call(call, where)
    expect_status(got, words, allowed, where)


class Case(NamedTuple):
    """One thing that a driver must do.

    Attributes:
        name: ``group/claim``, the claim with its variation in brackets.
        run: Checks it.
    """

    name: str
    run: Callable[[VtsSubject], Awaitable[None]]

    @property
    def group(self) -> str:
        """The subject of the case."""
        return self.name.partition("/")[0]

"""The driver suite: does a driver keep the contract, hostile callers included?

Owns the list of cases, the choice among them, and a run: each case within its time, judged against the driver's declarations,
counted. The modules beside this one have the cases; ``vts_report`` formats reports for people.

Invariants:
1. Every case has exactly one outcome. A case whose driver does not answer within ``Settings.step_s`` has failed, and so has one
   that raises anything else than ``CaseSkipped``.
2. A device that did not answer in time is never used again.
3. An entry of ``EXPECTED_FAILURES`` whose case passes is a failure of the list.

Source: the NN HAL's VTS 1.3; IREE's conformance registry.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import msgspec

from aionn.conformance.computing import Breach
from aionn.conformance.cts import CtsTest
from aionn.conformance.suite import Counts, DeviceUnderTest, Isolation, Verdict, open_device_under_test
from aionn.conformance.vts import (
    basics,
    buffers,
    caching,
    images,
    lifetimes,
    memory_domains,
    packets,
    quality,
    refusals,
)
from aionn.conformance.vts.case import STEP_S, Case, CaseFailed, CaseSkipped, VtsSubject
from aionn.conformance.vts.models import default_data, sample_tests
from aionn.errors import Error, InvalidArgument, status_of
from aionn.hal import Device
from aionn.service.client.device import RemoteDevice

__all__ = [
    "CASES",
    "Case",
    "Settings",
    "VtsFailure",
    "VtsOutcome",
    "VtsReport",
    "chosen_cases",
    "load_sample",
    "run_case",
    "run_cases",
    "run_vts",
    "stale_entries",
]

CASES: tuple[Case, ...] = (
    *basics.CASES,
    *refusals.CASES,
    *packets.CASES,
    *buffers.CASES,
    *memory_domains.CASES,
    *images.CASES,
    *quality.CASES,
    *caching.CASES,
    *lifetimes.CASES,
)
"""All cases, in the order in which they are run."""

MUTANTS_MAX = 10
"""Mutations of one family of one model in an ordinary run: with a model for each operation that is some 14,000 in all."""


class Settings(msgspec.Struct, frozen=True):
    """Options of cases.

    Attributes:
        step_s: Time that one call on the driver may take.
        mutants_max: Most mutations of one family of one model; None for all.
        unsupported: The cases that the driver can never pass: globs over their names, with reasons.
        expected_failures: The cases that the driver does not pass yet: globs over their names, with reasons. Such a case must fail.
    """

    step_s: float = STEP_S
    mutants_max: int | None = MUTANTS_MAX
    unsupported: Mapping[str, str] = {}
    expected_failures: Mapping[str, str] = {}


class VtsFailure(msgspec.Struct, frozen=True):
    """A fault of a driver.

    Attributes:
        case: The case's name.
        where: The part of the case, such as the mutation; empty if the case has no parts.
        expected: The expected result.
        got: The actual result.
    """

    case: str
    where: str
    expected: str
    got: str

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.case}{where}: expected {self.expected}, got {self.got}"


class VtsOutcome(msgspec.Struct, frozen=True):
    """The end of a case.

    Attributes:
        case: Its name.
        verdict: Its verdict.
        seconds: Its duration.
        reason: Why it was skipped, or was expected to fail.
        failure: The failure, where it failed.
    """

    case: str
    verdict: Verdict
    seconds: float
    reason: str = ""
    failure: VtsFailure | None = None


class VtsReport(msgspec.Struct, frozen=True):
    """The result of a run. ``--json`` promises the first seven.

    Attributes:
        passed: Cases that passed.
        failed: Cases that failed, and mistakes in the driver's lists.
        skipped: Cases that mean nothing for this driver.
        expected_failures: Cases that failed as the driver declared.
        seconds: Wall-clock time.
        by_group: Counts by the first part of the cases' names.
        failures: One for each case that failed.
        skip_reasons: Why cases were skipped, and how many for each reason.
        driver: The driver under test.
        outcomes: All of them, in order.
    """

    passed: int
    failed: int
    skipped: int
    expected_failures: int
    seconds: float
    by_group: dict[str, Counts]
    failures: tuple[VtsFailure, ...]
    skip_reasons: dict[str, int]
    driver: str
    outcomes: tuple[VtsOutcome, ...] = ()


def chosen_cases(contains: str = "") -> list[Case]:
    """The cases with a text in their names.

    Raises:
        InvalidArgument: No case has the text in its name.
    """
    cases = [case for case in CASES if contains in case.name]
    if not cases:
        groups = dict.fromkeys(case.name.partition("/")[0] for case in CASES)
        raise InvalidArgument(
            f"driver suite: no case has {contains!r} in its name; there are cases of {', '.join(groups)}"
        )
    return cases


def load_sample(data: Path | None = None, *, per_operation: int | None = 1) -> Sequence[CtsTest]:
    """Conformance models to work on; none where there are no data.

    Args:
        data: Where the data are; None takes that of ``default_data``.
        per_operation: See ``sample_tests``.
    """
    folder = data or default_data()
    return sample_tests(folder, per_operation=per_operation) if folder is not None else ()


async def run_vts(
    driver: str,
    *,
    isolation: Isolation = "process",
    node: str = "",
    contains: str = "",
    tests: Sequence[CtsTest] = (),
    settings: Settings | None = None,
    progress: Callable[[VtsOutcome, int], None] | None = None,
) -> VtsReport:
    """Runs the suite on a registered driver, or on a device of a node.

    Args:
        driver: The registered name; of a node ``NODE/DEVICE``.
        isolation: Whether the driver runs in a process of its own.
        node: The node's address; empty for a driver of this machine.
        contains: Only cases with this in their names; empty for all.
        tests: Conformance models to work on, as from ``load_sample``.
        settings: The settings for all cases; None for the defaults.
        progress: Called after every case with the outcome, and the number of cases.

    Raises:
        InvalidArgument: No such driver or case.
        DeviceUnavailable: The driver cannot be started, or the node cannot be reached.
    """
    cases = chosen_cases(contains)
    async with (
        open_device_under_test(driver, isolation, node=node) as device,
        open_device_under_test(driver, isolation, node=node) as other,
    ):
        return await run_cases(
            device,
            cases,
            driver=driver,
            tests=tests,
            settings=settings,
            is_remote=bool(node) or isolation == "process",
            is_whole=not contains,
            other=other,
            progress=progress,
        )


async def run_cases(
    device: DeviceUnderTest,
    cases: Sequence[Case],
    *,
    driver: str = "",
    tests: Sequence[CtsTest] = (),
    settings: Settings | None = None,
    is_remote: bool = False,
    is_whole: bool = False,
    other: DeviceUnderTest | None = None,
    progress: Callable[[VtsOutcome, int], None] | None = None,
) -> VtsReport:
    """Runs cases one after the other. See ``run_vts`` for the arguments; ``is_whole`` is whether these are all cases."""
    settings = settings or Settings()
    began_s = time.monotonic()
    outcomes = []
    for case in cases:
        outcome = await run_case(
            device, case, tests=tests, settings=settings, is_remote=is_remote, other=other
        )
        outcomes.append(outcome)
        if progress is not None:
            progress(outcome, len(cases))
    return report_of(
        driver, outcomes, stale_entries(settings, cases) if is_whole else (), time.monotonic() - began_s
    )


def stale_entries(settings: Settings, cases: Iterable[Case]) -> tuple[VtsFailure, ...]:
    """Entries of the driver's lists that match no case."""
    names = [case.name for case in cases]
    return tuple(
        VtsFailure("the driver's lists", "", "a pattern of a case that exists", repr(pattern))
        for pattern in (*settings.unsupported, *settings.expected_failures)
        if not fnmatch.filter(names, _escaped(pattern))
    )


def _escaped(pattern: str) -> str:
    # Brackets are part of the names themselves.
    return pattern.replace("[", "[[]")


def _reason(entries: Mapping[str, str], name: str) -> str | None:
    return next(
        (why for pattern, why in entries.items() if fnmatch.fnmatchcase(name, _escaped(pattern))), None
    )


async def run_case(
    device: DeviceUnderTest,
    case: Case,
    *,
    tests: Sequence[CtsTest] = (),
    settings: Settings | None = None,
    is_remote: bool = False,
    other: DeviceUnderTest | None = None,
) -> VtsOutcome:
    """Runs one case and judges it."""
    settings = settings or Settings()
    began_s = time.monotonic()
    reason = _reason(settings.unsupported, case.name)
    if reason is not None:
        return VtsOutcome(case.name, "skipped", 0.0, reason)
    why_skipped = ""
    failure: VtsFailure | None = None

    def failed(expected: str, got: str, where: str = "") -> VtsFailure:
        return VtsFailure(case.name, where, expected, got)

    try:
        current = await _ready(device)
    except Error as e:
        failure = failed("a device", f"{status_of(e).name}: {e}")
        return _judged(case, settings, failure, "", time.monotonic() - began_s)
    with anyio.CancelScope(deadline=anyio.current_time() + settings.step_s) as scope:

        def step() -> None:
            scope.deadline = anyio.current_time() + settings.step_s

        try:
            subject = VtsSubject(
                current,
                tests,
                mutants_max=settings.mutants_max,
                is_remote=is_remote,
                step=step,
                get_other=None if other is None else other.get,
            )
            step()
            await case.run(subject)
        except CaseSkipped as e:
            why_skipped = str(e)
        except CaseFailed as e:
            failure = failed(e.expected, e.got, e.where)
        except Breach as e:
            failure = failed(e.expected, e.got)
        except Error as e:
            failure = failed("success", f"{status_of(e).name}: {e}")
        except Exception as e:
            failure = failed("success, or one of aionn.errors", f"{type(e).__name__}: {e}")
    if scope.cancelled_caught:
        await device.give_up()
        failure = failed(f"an answer within {settings.step_s:g} s", "none")
    return _judged(case, settings, failure, why_skipped, time.monotonic() - began_s)


async def _ready(device: DeviceUnderTest) -> Device:
    """The device; one whose process has died is started again first, within the time that starting may take."""
    current = await device.get()
    if isinstance(current, RemoteDevice):
        await current.connect()
    return current


def _judged(
    case: Case, settings: Settings, failure: VtsFailure | None, why_skipped: str, seconds: float
) -> VtsOutcome:
    expected = _reason(settings.expected_failures, case.name)
    if why_skipped:
        return VtsOutcome(case.name, "skipped", seconds, why_skipped)
    if expected is not None:
        if failure is not None:
            return VtsOutcome(case.name, "expected_failure", seconds, expected)
        failure = VtsFailure(
            case.name, "", f"a failure, as EXPECTED_FAILURES declares ({expected})", "success"
        )
    if failure is not None:
        return VtsOutcome(case.name, "failed", seconds, failure=failure)
    return VtsOutcome(case.name, "passed", seconds)


def report_of(
    driver: str, outcomes: Sequence[VtsOutcome], mistakes: Sequence[VtsFailure], seconds: float
) -> VtsReport:
    """Counts outcomes."""
    counts = Counts()
    by_group: dict[str, Counts] = {}
    skip_reasons: dict[str, int] = {}
    for outcome in outcomes:
        counts.add(outcome.verdict)
        by_group.setdefault(outcome.case.partition("/")[0], Counts()).add(outcome.verdict)
        if outcome.verdict == "skipped":
            skip_reasons[outcome.reason] = skip_reasons.get(outcome.reason, 0) + 1
    for _ in mistakes:
        counts.add("failed")
    return VtsReport(
        passed=counts.passed,
        failed=counts.failed,
        skipped=counts.skipped,
        expected_failures=counts.expected_failures,
        seconds=round(seconds, 3),
        by_group=by_group,
        failures=(*(o.failure for o in outcomes if o.failure is not None), *mistakes),
        skip_reasons=dict(sorted(skip_reasons.items())),
        driver=driver,
        outcomes=tuple(outcomes),
    )

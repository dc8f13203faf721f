"""Many tests on one device: in order, each within its time, counted against the driver's declarations.

Owns the verdict on a test, the counts, and the replacement of a device that hangs. ``cts.run`` defines the checks.

Invariants:
1. A test ends after its first failure that was not expected; later ones would report the same fault.
2. A device that did not answer in time is never used again, and its calls are not waited for.
3. A test to which none of the chosen checks applies is not counted at all.

Source: section "One suite, all drivers" of the project's style; IREE's conformance registry.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Literal

import anyio
import msgspec

from aionn.conformance.computing import Mode, close
from aionn.conformance.cts import CtsTest, operation_types
from aionn.conformance.cts.run import CHECKS, Bench, Check, CheckFailed, CheckSkipped, Failure, applies
from aionn.conformance.expectations import Expectations, Subject
from aionn.conformance.nodes import device_of_node
from aionn.drivers import registry
from aionn.fleet.device import NodeDevice
from aionn.hal import Device
from aionn.service.client.device import RemoteDevice

__all__ = [
    "Counts",
    "DeviceUnderTest",
    "Isolation",
    "Outcome",
    "Report",
    "Settings",
    "Tally",
    "Verdict",
    "device_name",
    "open_device_under_test",
    "run_test",
    "run_tests",
    "subject_of",
]

Isolation = Literal["process", "in_process"]

Verdict = Literal["passed", "failed", "skipped", "expected_failure"]

TIME_LIMIT_S = 30.0
"""Limit of one check: the largest of the models takes less than a second in numpy."""


class Settings(msgspec.Struct, frozen=True, tag="data"):
    """Options of the tests of the public data.

    Attributes:
        mode: The mode of executions.
        checks: The checks made of each test.
        time_limit_s: Time that one check may take.
        expectations: The driver's declarations.
    """

    mode: Mode = "sync"
    checks: tuple[Check, ...] = CHECKS
    time_limit_s: float = TIME_LIMIT_S
    expectations: Expectations = Expectations()


class Outcome(msgspec.Struct, frozen=True):
    """The end of a test.

    Attributes:
        test: Its name.
        operations: The operations that occur in it.
        verdict: The whole test's.
        checks: The verdict of each check that was made.
        reason: Why it was skipped, or was expected to fail.
        failure: The failure, where it failed.
    """

    test: str
    operations: tuple[str, ...]
    verdict: Verdict
    checks: dict[str, Verdict] = {}
    reason: str = ""
    failure: Failure | None = None


class Counts(msgspec.Struct):
    """Number of tests by outcome."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    expected_failures: int = 0

    def add(self, verdict: Verdict) -> None:
        """Counts one more."""
        match verdict:
            case "passed":
                self.passed += 1
            case "failed":
                self.failed += 1
            case "skipped":
                self.skipped += 1
            case "expected_failure":
                self.expected_failures += 1

    @property
    def total(self) -> int:
        """All that were counted."""
        return self.passed + self.failed + self.skipped + self.expected_failures


class Report(msgspec.Struct, frozen=True):
    """The result of a run of the suite. ``--json`` promises the first seven.

    Attributes:
        passed: Tests of which all checks passed.
        failed: Tests with a failure, and mistakes in the driver's lists.
        skipped: Tests that were not run.
        expected_failures: Tests that failed as the driver declared.
        seconds: Wall-clock time.
        by_operation: The tests in which an operation occurs.
        failures: One for each test that failed.
        by_check: The checks that were made.
        skip_reasons: Why tests were skipped, and how many for each reason.
    """

    passed: int
    failed: int
    skipped: int
    expected_failures: int
    seconds: float
    by_operation: dict[str, Counts]
    failures: tuple[Failure, ...]
    by_check: dict[str, Counts]
    skip_reasons: dict[str, int]


class Tally:
    """Counts outcomes as they come."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._by_operation: dict[str, Counts] = {}
        self._by_check: dict[str, Counts] = {}
        self._failures: list[Failure] = []
        self._skip_reasons: dict[str, int] = {}

    def add(self, outcome: Outcome) -> None:
        """Counts one test."""
        self.counts.add(outcome.verdict)
        for operation in outcome.operations:
            self._by_operation.setdefault(operation, Counts()).add(outcome.verdict)
        for check, verdict in outcome.checks.items():
            self._by_check.setdefault(check, Counts()).add(verdict)
        if outcome.failure is not None:
            self._failures.append(outcome.failure)
        if outcome.verdict == "skipped":
            self._skip_reasons[outcome.reason] = self._skip_reasons.get(outcome.reason, 0) + 1

    def add_failure(self, failure: Failure) -> None:
        """Counts a failure that belongs to no test."""
        self.counts.add("failed")
        self._failures.append(failure)

    def report(self, seconds: float) -> Report:
        """All that was counted, in a fixed order."""
        counts = self.counts
        return Report(
            passed=counts.passed,
            failed=counts.failed,
            skipped=counts.skipped,
            expected_failures=counts.expected_failures,
            seconds=round(seconds, 3),
            by_operation=dict(sorted(self._by_operation.items())),
            failures=tuple(sorted(self._failures, key=lambda failure: failure.test)),
            by_check={check: self._by_check[check] for check in CHECKS if check in self._by_check},
            skip_reasons=dict(sorted(self._skip_reasons.items())),
        )


class DeviceUnderTest:
    """The device that tests run on, and a new one in the place of one that hangs.

    Args:
        make: Makes a device.
    """

    def __init__(self, make: Callable[[], Awaitable[Device]]) -> None:
        self._make = make
        self._device: Device | None = None

    async def get(self) -> Device:
        """The device, created if missing."""
        if self._device is None:
            self._device = await self._make()
        return self._device

    async def give_up(self) -> None:
        """Lets go of a device that hangs.

        A driver process is ended, and a node loses this client. A device in this process cannot be ended: closing it would wait for
        what hangs, so it is left alone.
        """
        device, self._device = self._device, None
        if isinstance(device, RemoteDevice | NodeDevice):
            await close(device)

    async def aclose(self) -> None:
        """Closes the device. Idempotent."""
        device, self._device = self._device, None
        if device is not None:
            await close(device)


def device_name(driver: str) -> str:
    """The name that a driver's device is given: the registered one; for ``acme.npu:Driver`` a legal one, ``acme-driver``."""
    module, colon, attribute = driver.partition(":")
    if not colon:
        return driver
    words = (module.partition(".")[0], attribute.rpartition(".")[2])
    return "-".join(re.sub("[^a-z0-9]", "", word.lower()) or "driver" for word in words)


@contextlib.asynccontextmanager
async def open_device_under_test(
    driver: str, isolation: Isolation = "process", *, node: str = ""
) -> AsyncIterator[DeviceUnderTest]:
    """Opens a registered driver's device, or one of a node.

    Args:
        driver: The registered name, or module and attribute; of a node ``NODE/DEVICE``.
        isolation: Whether the driver runs in a process of its own; without a meaning for a node.
        node: The node's address; empty for a driver of this machine.

    Raises:
        InvalidArgument: No such driver, or the node has another device.
        DeviceUnavailable: It cannot be imported, started or reached, or its DeviceInfo is invalid.
    """
    name = device_name(driver)
    async with anyio.create_task_group() as tasks:

        async def make() -> Device:
            if node:
                return await device_of_node(driver, node)
            if isolation == "in_process":
                return registry.make_device(driver, name)
            device = RemoteDevice(driver, name, tasks, info=registry.built_in_info(driver, name))
            await device.connect()
            return device

        device = DeviceUnderTest(make)
        try:
            await device.get()
            yield device
        finally:
            await device.aclose()
            tasks.cancel_scope.cancel()


def subject_of(test: CtsTest) -> Subject:
    """The names that the driver's lists are compared with."""
    return Subject(test.name, frozenset(operation_types(test)), frozenset(CHECKS))


async def run_tests(
    device: DeviceUnderTest, tests: Iterable[CtsTest], settings: Settings | None = None
) -> Report:
    """Runs tests one after the other, in this process.

    Args:
        device: The device that they run on; stays open.
        tests: As from ``cts.iterate_tests``.
        settings: Their settings; None for the defaults.
    """
    started_s = time.monotonic()
    tally = Tally()
    for test in tests:
        outcome = await run_test(device, test, settings or Settings())
        if outcome is not None:
            tally.add(outcome)
    return tally.report(time.monotonic() - started_s)


async def run_test(device: DeviceUnderTest, test: CtsTest, settings: Settings) -> Outcome | None:
    """Runs one test; None when none of the chosen checks applies to it."""
    subject = subject_of(test)
    operations = tuple(sorted(subject.operations))
    current = await device.get()
    checks = [check for check in settings.checks if applies(check, test, settings.mode, current)]
    if not checks:
        return None
    reason = settings.expectations.why_unsupported(subject)
    if reason is not None:
        return Outcome(test.name, operations, "skipped", reason=reason)
    verdicts: dict[str, Verdict] = {}
    failure: Failure | None = None
    reasons: dict[Verdict, str] = {}
    bench = Bench(test, settings.mode, current)
    for check in checks:
        reason = settings.expectations.why_unsupported(subject, check)
        if reason is not None:
            verdicts[check], reasons["skipped"] = "skipped", reason
            continue
        if bench.device is not await device.get():
            # The one before hangs, and what it prepared is lost with it.
            bench = Bench(test, settings.mode, await device.get())
        verdicts[check], failure, reason = await _run_check(device, bench, check, subject, settings)
        if reason:
            reasons.setdefault(verdicts[check], reason)
        if failure is not None or (check == "general" and verdicts[check] == "skipped"):
            break
    try:
        await bench.aclose()
    except CheckFailed as e:
        failure = failure or e.failure
    return _judge(test, subject, settings, verdicts, failure, reasons)


async def _run_check(
    device: DeviceUnderTest, bench: Bench, check: Check, subject: Subject, settings: Settings
) -> tuple[Verdict, Failure | None, str]:
    """Makes one check: the verdict, the failure that was not expected, and the reason."""
    expected = settings.expectations.why_expected_to_fail(subject, check)
    failure: Failure | None = None
    with anyio.move_on_after(settings.time_limit_s) as limit:
        try:
            await bench.make(check)
        except CheckFailed as e:
            failure = e.failure
        except CheckSkipped as e:
            return "skipped", None, str(e)
    test = bench.test
    if limit.cancelled_caught:
        await device.give_up()
        answer = f"an answer within {settings.time_limit_s:g} s"
        failure = Failure(test.name, check, settings.mode, _names(subject), None, (), answer, "none")
    if expected is not None:
        if failure is not None:
            return "expected_failure", None, expected
        return "failed", _listed_but_passed(test, check, settings, subject, expected), ""
    return ("passed", None, "") if failure is None else ("failed", failure, "")


def _judge(
    test: CtsTest,
    subject: Subject,
    settings: Settings,
    verdicts: dict[str, Verdict],
    failure: Failure | None,
    reasons: dict[Verdict, str],
) -> Outcome:
    """The verdict on the whole test from those on its checks."""
    operations = tuple(sorted(subject.operations))
    expected = settings.expectations.why_expected_to_fail(subject)
    if set(verdicts.values()) == {"skipped"} or verdicts.get("general") == "skipped":
        return Outcome(test.name, operations, "skipped", verdicts, reasons["skipped"])
    if expected is not None:
        if failure is not None:
            return Outcome(test.name, operations, "expected_failure", verdicts, expected)
        failure = _listed_but_passed(test, "", settings, subject, expected)
    if failure is not None:
        return Outcome(test.name, operations, "failed", verdicts, failure=failure)
    if "expected_failure" in reasons:
        return Outcome(test.name, operations, "expected_failure", verdicts, reasons["expected_failure"])
    return Outcome(test.name, operations, "passed", verdicts)


def _listed_but_passed(
    test: CtsTest, check: str, settings: Settings, subject: Subject, reason: str
) -> Failure:
    expected = f"a failure, as EXPECTED_FAILURES declares ({reason})"
    return Failure(test.name, check, settings.mode, _names(subject), None, (), expected, "success")


def _names(subject: Subject) -> str:
    return ", ".join(sorted(subject.operations))

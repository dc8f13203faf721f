"""The suites as pytest tests, for a driver's own repository.

Owns the way from a suite to a test class: one test for each case, a device that stays open for all of them, verdicts in pytest's
words. The suites define cases and verdicts.

In a test file of the driver's repository::

    from aionn.conformance.pytest_suite import suite

    TestContract = suite("vts", driver="acme-npu", unsupported={"claims/slots_run_at_once": "one slot"})
    TestValues = suite("cts", driver="acme-npu", data=Path("cts"), expected_failures={"LSTM": "wrong in the second step"})

Invariants:
1. Each case is one test, named as in the suite, so that ``-k`` and reports work as everywhere.
2. A case that is expected to fail and passes is a failure.

Source: IREE's conformance suites, which every driver of others instantiates.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

import anyio.from_thread
import msgspec
import pytest

from aionn.conformance import suite as cts_suite
from aionn.conformance.cts import iterate_tests
from aionn.conformance.expectations import Expectations, driver_expectations
from aionn.conformance.suite import DeviceUnderTest, Isolation, open_device_under_test
from aionn.conformance.vts import run as vts
from aionn.conformance.vts.models import DATA_VARIABLE, default_data
from aionn.errors import InvalidArgument

__all__ = ["suite"]


def suite(
    name: Literal["vts", "cts"],
    *,
    driver: str,
    isolation: Isolation = "process",
    unsupported: Mapping[str, str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    data: Path | None = None,
    contains: str = "",
    settings: vts.Settings | cts_suite.Settings | None = None,
) -> type:
    """A test class to be given a name in a test module.

    Args:
        name: ``vts``: does the driver keep the contract? ``cts``: its results against the spec's.
        driver: The registered name of the driver.
        isolation: Whether the driver runs in a process of its own.
        unsupported: The cases that the driver can never pass: patterns over names, with reasons. None takes the module's list.
        expected_failures: The cases that it does not pass yet, which must fail. None takes the driver's module's list.
        data: The folder of the conformance data; None takes that of ``default_data``. ``vts`` does without.
        contains: Only cases with this in their names.
        settings: The settings for all cases; the two lists are put in. None for the defaults.

    Raises:
        InvalidArgument: No such driver or case, or there are no data for ``cts``.
    """
    lists = driver_expectations(driver)
    never = lists.unsupported if unsupported is None else unsupported
    not_yet = lists.expected_failures if expected_failures is None else expected_failures
    if name == "vts":
        chosen = settings if isinstance(settings, vts.Settings) else vts.Settings()
        chosen = msgspec.structs.replace(
            chosen,
            unsupported={p: why for p, why in never.items() if "/" in p},
            expected_failures={p: why for p, why in not_yet.items() if "/" in p},
        )
        return _driver_class(driver, isolation, data, contains, chosen)
    chosen_cts = settings if isinstance(settings, cts_suite.Settings) else cts_suite.Settings()
    entries = [{p: why for p, why in entry.items() if "/" not in p} for entry in (never, not_yet)]
    chosen_cts = msgspec.structs.replace(chosen_cts, expectations=Expectations(*entries))
    folder = data or default_data()
    if folder is None:
        raise InvalidArgument(f"cts: expected the folder of the conformance data, here or in {DATA_VARIABLE}")
    return _data_class(driver, isolation, folder, contains, chosen_cts)


class _Opened:
    """Devices in an event loop of their own thread, and calls into it."""

    def __init__(self, driver: str, isolation: Isolation) -> None:
        self._driver = driver
        self._isolation = isolation
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Opened:
        self.portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
        self.device, self.other = self._stack.enter_context(
            self.portal.wrap_async_context_manager(self._open())
        )
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[DeviceUnderTest, DeviceUnderTest]]:
        async with (
            open_device_under_test(self._driver, self._isolation) as device,
            open_device_under_test(self._driver, self._isolation) as other,
        ):
            yield device, other


def _opening(driver: str, isolation: Isolation) -> dict[str, Any]:
    """The fixture that opens devices before a class's first test and closes them after its last."""

    def setup_class(cls: Any) -> None:
        cls.opened = _Opened(driver, isolation).__enter__()

    def teardown_class(cls: Any) -> None:
        cls.opened.__exit__()

    return {"setup_class": classmethod(setup_class), "teardown_class": classmethod(teardown_class)}


def _report(verdict: str, reason: str, failure: object) -> None:
    """A verdict in pytest's words."""
    if verdict == "failed":
        pytest.fail(str(failure), pytrace=False)
    elif verdict == "skipped":
        pytest.skip(reason)
    elif verdict == "expected_failure":
        pytest.xfail(reason)


def _driver_class(
    driver: str, isolation: Isolation, data: Path | None, contains: str, settings: vts.Settings
) -> type:
    cases = vts.chosen_cases(contains)
    mistakes = () if contains else vts.stale_entries(settings, cases)
    tests = vts.load_sample(data, per_operation=1 if settings.mutants_max is not None else None)

    @pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
    def test_case(self: Any, case: vts.Case) -> None:
        opened: _Opened = self.opened

        async def run() -> vts.VtsOutcome:
            return await vts.run_case(
                opened.device,
                case,
                tests=tests,
                settings=settings,
                is_remote=isolation == "process",
                other=opened.other,
            )

        outcome = opened.portal.call(run)
        _report(outcome.verdict, outcome.reason, outcome.failure)

    def test_lists_name_cases_that_exist(self: object) -> None:
        if mistakes:
            pytest.fail("; ".join(map(str, mistakes)), pytrace=False)

    members = {
        **_opening(driver, isolation),
        "test_case": test_case,
        "test_lists_name_cases_that_exist": test_lists_name_cases_that_exist,
    }
    return type("DriverSuite", (), members)


def _data_class(
    driver: str, isolation: Isolation, folder: Path, contains: str, settings: cts_suite.Settings
) -> type:
    tests = list(iterate_tests(folder, contains=contains))
    stale = [] if contains else settings.expectations.stale(map(cts_suite.subject_of, tests))

    @pytest.mark.parametrize("test", tests, ids=lambda test: test.name)
    def test_values(self: Any, test: Any) -> None:
        opened: _Opened = self.opened

        async def run() -> cts_suite.Outcome | None:
            return await cts_suite.run_test(opened.device, test, settings)

        outcome = opened.portal.call(run)
        if outcome is None:
            pytest.skip("none of the chosen checks applies")
        _report(outcome.verdict, outcome.reason, outcome.failure)

    def test_lists_name_tests_that_exist(self: object) -> None:
        if stale:
            pytest.fail(f"the driver's lists: no test is named {', '.join(stale)}", pytrace=False)

    members = {
        **_opening(driver, isolation),
        "test_values": test_values,
        "test_lists_name_tests_that_exist": test_lists_name_tests_that_exist,
    }
    return type("DataSuite", (), members)

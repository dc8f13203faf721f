"""The driver suite passes on the reference driver, covers what the spec's suites cover, and reports what it found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import anyio
import msgspec
import pytest

from aionn.cli.main import main
from aionn.conformance.cts import CtsTest, build_model
from aionn.conformance.suite import DeviceUnderTest, device_name, open_device_under_test
from aionn.conformance.vts.case import STEP_S, CaseSkipped, VtsSubject, fail
from aionn.conformance.vts.models import chain_model
from aionn.conformance.vts.mutations import FAMILIES
from aionn.conformance.vts.run import (
    CASES,
    Case,
    Settings,
    VtsReport,
    chosen_cases,
    load_sample,
    run_cases,
    run_vts,
    stale_entries,
)
from aionn.conformance.vts_report import html_report, junit_report
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import InvalidArgument
from aionn.hal import CacheFileCounts, Device, Model, OperationType
from aionn.validation import validate_model
from tests.support.conformance_data import small_sample
from tests.support.loop_reference import LoopReferenceDevice

SAMPLE = Settings(mutants_max=2)
SLOW_CASES = ("generated/infinite_loop_timeout[burst]",)
"""Two seconds each: a burst's packets carry no loop time-out, so that the default has to pass."""


@pytest.fixture(scope="module")
def tests(shared: Path) -> Sequence[CtsTest]:
    return small_sample(shared / "cts")


def verdicts(report: VtsReport) -> tuple[int, int, int, int]:
    return report.passed, report.failed, report.skipped, report.expected_failures


# The cases


def test_names_are_unique_and_grouped() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(case.group and case.name.partition("/")[2] for case in CASES)


def test_suite_has_what_the_specs_suites_have() -> None:
    groups = Counter(case.group for case in CASES)
    mutations = {case.name for case in CASES if case.group == "model_mutations"}
    assert len(mutations) >= 22
    assert {f"model_mutations/{family}" for family in FAMILIES} <= mutations

    def bodies(group: str) -> set[str]:
        return {case.name.partition("[")[0] for case in CASES if case.group == group}

    assert len(bodies("allocate") - {"allocate/tokens_are_unique"}) == 15
    assert len(bodies("copy") - {"copy/round_trip"}) == 7
    executed = bodies("memory_domains") - {
        "memory_domains/chain",
        "memory_domains/failed_execution_uninitializes",
    }
    assert len(executed) == 7
    for body in executed:
        assert sum(case.name.startswith(f"{body}[") for case in CASES) == 4 * 4
    for path in ("sync", "async", "burst", "fenced"):
        assert f"generated/expected_failure[{path}]" in {case.name for case in CASES}
        assert f"request_validation/counts[{path}]" in {case.name for case in CASES}
    assert {"burst_packets", "caching", "quality_of_service", "lifetimes", "claims"} <= groups.keys()
    assert len(bodies("caching")) >= 17


def test_every_family_changes_a_model_of_several_operations() -> None:
    model = chain_model(3)
    for name, family in FAMILIES.items():
        mutations = list(family(model))
        assert mutations, name
        for mutation in mutations:
            with pytest.raises(InvalidArgument):
                validate_model(mutation.make())


def test_mutations_leave_the_model_itself_alone() -> None:
    model = chain_model(2)
    before = repr(model)
    for family in FAMILIES.values():
        for mutation in family(model):
            mutation.make()
    assert repr(model) == before


@pytest.mark.long
def test_every_mutation_of_all_data_is_illegal(shared: Path) -> None:
    for test in load_sample(shared / "cts", per_operation=None):
        if test.expect_failure:
            continue
        model = build_model(test)
        for name, family in FAMILIES.items():
            for mutation in family(model):
                try:
                    validate_model(mutation.make())
                except InvalidArgument:
                    continue
                pytest.fail(f"{test.name}, {name}, {mutation.where}: legal")
        for pool in model.pools:
            pool.close()


# The reference driver


def test_sample_has_every_operation(tests: Sequence[CtsTest]) -> None:
    found = {operation.type for test in tests for operation in test.main.operations}
    assert len(found) >= 100
    assert sum(len(test.main.operations) >= 3 for test in tests) >= 5


@pytest.mark.parametrize(
    ("kind", "step", "data_step"),
    [
        (ReferenceDevice, 5, 40),
        pytest.param(ReferenceDevice, 2, 40, marks=pytest.mark.long),
        *(pytest.param(ReferenceDevice, 1, data_step, marks=pytest.mark.long) for data_step in (40, 20, 10)),
        # The rules of models and requests are the same code as the reference device's.
        (LoopReferenceDevice, 12, 40),
        pytest.param(LoopReferenceDevice, 1, 40, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
async def test_reference_passes_in_this_process(
    tests: Sequence[CtsTest], kind: type[ReferenceDevice | LoopReferenceDevice], step: int, data_step: int
) -> None:
    async with kind() as reference, kind() as second:

        async def make() -> Device:
            return reference

        async def make_second() -> Device:
            return second

        cases = [case for case in CASES if case.name not in SLOW_CASES][::step]
        report = await run_cases(
            DeviceUnderTest(make),
            cases,
            tests=tests[::data_step],
            settings=SAMPLE,
            other=DeviceUnderTest(make_second),
        )
    assert report.failures == ()
    assert set(report.skip_reasons) <= {"the device caches", "the device has one slot"}
    assert report.passed > 400 // step


def test_device_of_a_module_gets_a_legal_name() -> None:
    names = {
        "reference": "reference",
        "acme.npu_driver:NpuDevice": "acme-npudevice",
        "acme_npu:make.Device": "acmenpu-device",
        "_:_": "driver-driver",
    }
    assert {driver: device_name(driver) for driver in names} == names


@pytest.mark.slow
async def test_reference_passes_in_a_driver_process(tests: Sequence[CtsTest]) -> None:
    wanted = ("basics", "executions", "burst", "copy", "lifetimes", "claims", "quality_of_service/past")
    # One in four: what the process adds is the same for the variants of a case.
    cases = [case for case in CASES if case.name.startswith(wanted)][::4]
    async with open_device_under_test("reference", "process") as device:
        report = await run_cases(device, cases, tests=tests[::20], settings=SAMPLE, is_remote=True)
    assert report.failures == ()
    assert report.passed >= len(cases) - 2


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.parametrize("driver", ["reference", "tests.support.loop_reference:LoopReferenceDevice"])
async def test_reference_passes_every_case_thoroughly(shared: Path, driver: str, isolation: str) -> None:
    tests = load_sample(shared / "cts", per_operation=10)
    report = await run_vts(
        driver,
        isolation=isolation,
        tests=tests,
        settings=Settings(mutants_max=200),  # type: ignore[arg-type]
    )
    assert report.failures == ()


async def test_cases_do_without_conformance_data() -> None:
    report = await run_vts("reference", isolation="in_process", contains="model_mutations")
    assert verdicts(report) == (len(chosen_cases("model_mutations")), 0, 0, 0)


class TanhAlone(ReferenceDevice):
    """A device with one operation, which is not that of the suite's models, and without a cache."""

    def __init__(self, name: str = "tanh-alone") -> None:
        super().__init__(name)
        self.info = msgspec.structs.replace(self.info, cache_files=CacheFileCounts())

    def supports(self, model: Model) -> Sequence[bool]:
        return [operation.type == OperationType.TANH for operation in model.main.operations]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("contains", ["caching", ""])
async def test_device_that_lacks_the_operations_of_the_suites_models_fails_no_case(contains: str) -> None:
    async with TanhAlone() as device:

        async def make() -> Device:
            return device

        cases = chosen_cases(contains)
        report = await run_cases(DeviceUnderTest(make), cases, settings=SAMPLE, is_whole=not contains)
    assert report.failures == ()
    assert report.skipped > 0
    # In the words of the other suite: the operation and its types.
    assert any(re.match("the device does not support [A-Z].* of TENSOR_", why) for why in report.skip_reasons)


# Running and judging


async def passing(subject: VtsSubject) -> None:
    await subject.device.status()


async def failing(subject: VtsSubject) -> None:
    fail("one", "two", "here")


async def skipping(subject: VtsSubject) -> None:
    raise CaseSkipped("for a reason")


async def raising(subject: VtsSubject) -> None:
    raise KeyError("a bug of the driver")


async def hanging(subject: VtsSubject) -> None:
    await anyio.sleep_forever()


async def stepping(subject: VtsSubject) -> None:
    for _ in range(4):
        await anyio.sleep(STEP_S / 3)
        subject.step()


CHECKS = {
    "passing": passing,
    "failing": failing,
    "skipping": skipping,
    "raising": raising,
    "hanging": hanging,
    "stepping": stepping,
}


async def run_own(*names: str, **settings: object) -> VtsReport:
    async with ReferenceDevice() as reference:

        async def make() -> Device:
            return reference

        cases = [Case(f"own/{name}[x]", CHECKS[name]) for name in names]
        chosen = Settings(**settings)  # type: ignore[arg-type]
        return await run_cases(DeviceUnderTest(make), cases, settings=chosen, is_whole=True)


@pytest.mark.aionn(virtual_time=True)
async def test_every_case_has_one_verdict() -> None:
    report = await run_own(*CHECKS)
    assert verdicts(report) == (2, 3, 1, 0)
    assert [o.verdict for o in report.outcomes] == [
        "passed",
        "failed",
        "skipped",
        "failed",
        "failed",
        "passed",
    ]
    assert report.skip_reasons == {"for a reason": 1}
    assert str(report.failures[0]) == "own/failing[x] (here): expected one, got two"
    assert "KeyError" in report.failures[1].got
    assert report.by_group["own"].total == 6


@pytest.mark.aionn(virtual_time=True)
async def test_case_that_hangs_fails_and_a_long_one_does_not() -> None:
    report = await run_own("hanging", "stepping")
    assert [o.verdict for o in report.outcomes] == ["failed", "passed"]
    assert report.failures[0].expected == f"an answer within {STEP_S:g} s"


async def test_unsupported_is_not_run_and_expected_failures_are_strict() -> None:
    report = await run_own(
        "passing",
        "failing",
        "raising",
        unsupported={"own/rais*": "never"},
        expected_failures={"own/failing[x]": "not yet", "own/passing*": "not yet"},
    )
    assert verdicts(report) == (0, 1, 1, 1)
    assert report.failures[0].expected == "a failure, as EXPECTED_FAILURES declares (not yet)"


async def test_entry_that_matches_no_case_is_a_failure() -> None:
    report = await run_own("passing", unsupported={"own/other*": "never"})
    assert verdicts(report) == (1, 1, 0, 0)
    assert stale_entries(Settings(unsupported={"claims/*": "why"}), CASES) == ()


def test_unknown_text_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no case"):
        chosen_cases("no such case")


# Reports


class Tags(HTMLParser):
    """Notes what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


async def test_reports_are_whole_and_self_contained() -> None:
    report = await run_own("passing", "failing", "skipping", unsupported={"own/<&\x00*": "never"})
    root = ElementTree.fromstring(junit_report(report))
    assert root.get("tests") == "3"
    assert len(root.findall(".//testcase")) == 4  # The entry that matches nothing is one more.
    assert len(root.findall(".//failure")) == 2
    assert len(root.findall(".//skipped")) == 1
    page = html_report(report)
    tags = Tags()
    tags.feed(page)
    assert tags.links == []
    assert "http" not in page
    assert "own/failing[x]" in page and "&lt;&amp;" in page


@pytest.mark.thorough
def test_command_writes_all_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit, page = tmp_path / "report.xml", tmp_path / "report.html"
    arguments = ["conformance", "reference", "--suite", "vts", "-k", "basics/", "--isolation", "in_process"]
    try:
        code = main([*arguments, "--json", "--junit", str(junit), "--html", str(page)])
    except SystemExit as e:
        code = e.code
    assert not code
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 0
    assert report["passed"] == len(chosen_cases("basics/"))
    assert set(report) >= {
        "passed",
        "failed",
        "skipped",
        "expected_failures",
        "seconds",
        "by_group",
        "failures",
    }
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    assert page.read_text().startswith("<!DOCTYPE html>")


FACE = """
from aionn.conformance.pytest_suite import suite

TestContract = suite(
    "vts",
    driver="reference",
    isolation="in_process",
    contains="basics/",
    unsupported={"basics/preference*": "not wanted"},
    expected_failures={"basics/status_is_available": "not yet"},
)
"""


@pytest.mark.thorough
def test_drivers_author_has_the_suite_as_pytest_tests(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "test_driver.py").write_text(FACE)
    path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "error",
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # The status case passes although it is expected to fail: that is a failure.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 5 passed, 3 skipped" in done.stdout
    assert "as EXPECTED_FAILURES declares (not yet)" in done.stdout

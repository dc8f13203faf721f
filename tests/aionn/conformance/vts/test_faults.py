"""The driver suite finds planted faults, each at the case that names it, and blames nobody else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aionn.conformance.suite import DeviceUnderTest, open_device_under_test
from aionn.conformance.vts import lifetimes, quality
from aionn.conformance.vts import run as vts
from aionn.conformance.vts.case import Case
from aionn.conformance.vts.run import Settings, VtsOutcome, VtsReport, chosen_cases, run_cases
from aionn.drivers.reference import ReferenceDevice
from aionn.hal import Device
from tests.support import wrong_drivers
from tests.support.wrong_drivers import (
    FAULTS,
    PROCESS_FAULTS,
    ClaimsToStop,
    FaultyDevice,
    Hangs,
    HangsItsProcess,
    KeepsModels,
    NeverNotifies,
    ReturnsAfterDeadline,
)

HANGING = (NeverNotifies, Hangs, HangsItsProcess)

LASTING = (ReturnsAfterDeadline, ClaimsToStop, KeepsModels, Hangs)
"""Faults whose cases wait or compute for half a second and more; that others are found shows the same of the suite."""

HANG_S = 1.0
"""Limit of a step of the case that must hang; the steps of every other case have that of ``Settings``."""


LOOP_NS = int((quality.SLACK_S + 0.5) * 1e9)
"""Limit of a loop that a faulty device does not end: later than it would have to."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case that must hang is given up soon, and no other one, however slow the machine is."""
    run_case, hanging = vts.run_case, {fault.case for fault in HANGING}

    async def run(device: DeviceUnderTest, case: Case, *, settings: Settings, **more: Any) -> VtsOutcome:
        if case.name in hanging and type(await device.get()) is not ReferenceDevice:
            settings = msgspec.structs.replace(settings, step_s=HANG_S)
        return await run_case(device, case, settings=settings, **more)

    monkeypatch.setattr(vts, "run_case", run)
    for module in (quality, lifetimes):
        monkeypatch.setattr(module, "LOOP_NS", LOOP_NS)


async def run_in_process(make: Callable[[], Device], *names: str) -> VtsReport:
    async def make_device() -> Device:
        return make()

    device = DeviceUnderTest(make_device)
    first = await device.get()
    try:
        cases = [case for name in names for case in chosen_cases(name)]
        return await run_cases(device, cases)
    finally:
        await device.aclose()
        await first.aclose()


def failed_cases(report: VtsReport) -> set[str]:
    return {failure.case for failure in report.failures}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.thorough) if f in LASTING else f for f in FAULTS],
    ids=lambda fault: fault.__name__,
)
async def test_fault_is_found_at_the_case_that_names_it(fault: type[FaultyDevice]) -> None:
    report = await run_in_process(
        fault, fault.case, "burst/identifiers_are_checked", "lifetimes/closing_twice"
    )
    assert failed_cases(report) == {fault.case}, report.failures


async def test_right_driver_passes_the_cases_that_name_faults() -> None:
    report = await run_in_process(
        ReferenceDevice, *sorted({fault.case for fault in (*FAULTS, *PROCESS_FAULTS)})
    )
    assert not report.failures
    assert not report.skipped


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which the faults are registered as drivers: by an installed package, as others' drivers are."""
    metadata = tmp_path / "faulty_drivers-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-drivers\nVersion: 1\n")
    lines = [
        f"faulty-{fault.__name__.lower()} = {wrong_drivers.__name__}:{fault.__name__}"
        for fault in PROCESS_FAULTS
    ]
    (metadata / "entry_points.txt").write_text("\n".join(["[aionn.drivers]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    return "faulty-"


@pytest.mark.slow
@pytest.mark.parametrize("fault", PROCESS_FAULTS, ids=lambda fault: fault.__name__)
async def test_fault_in_a_driver_process_is_found_and_the_suite_goes_on(
    registered: str, fault: type[FaultyDevice]
) -> None:
    driver = f"{registered}{fault.__name__.lower()}"
    async with open_device_under_test(driver, "process") as device:
        cases = [*chosen_cases(fault.case), *chosen_cases("lifetimes/closing_twice")]
        with anyio.fail_after(60):
            report = await run_cases(device, cases, is_remote=True)
    assert failed_cases(report) == {fault.case}, report.failures
    assert report.passed == 1

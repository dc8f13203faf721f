"""The suite in several processes: every test has one outcome, whatever dies."""

from __future__ import annotations

import contextlib
import subprocess
import textwrap
from collections import deque
from pathlib import Path

import msgspec
import pytest

from aionn.conformance import workers
from aionn.conformance.cts import CtsTest
from aionn.conformance.suite import DeviceUnderTest, Outcome, Settings, Tally
from aionn.conformance.workers import find_units, run_suite
from aionn.errors import DeviceUnavailable, Error, InvalidArgument
from aionn.platform.python_process import python_command, python_environment
from tests.support.conformance_data import vector_test, write_tests

RUN_S_MAX = 60

DRIVER = '''
"""Computes as the reference device does; the first input's first value chooses a way to fail."""

import os
import signal
import sys
import threading

from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel

UNSUPPORTED = {"never_*": "no such hardware"}
EXPECTED_FAILURES = {"later": "not written yet"}


class Prepared(ReferencePreparedModel):
    def run(self, inputs, outputs, control):
        match int(inputs[0].reshape(-1)[0]):
            case 666:
                os._exit(7)
            case 667:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 668:
                threading.Event().wait()
            case 669:
                raise RuntimeError("not written yet")
        print("noise on standard output")
        return super().run(inputs, outputs, control)


class Device(ReferenceDevice):
    def prepare(self, model, **arguments):
        return Prepared(self, model, arguments["priority"])
'''

ENTRY_POINTS = """
[aionn.drivers]
moody = moody_driver:Device
broken = no_such_module:Device
"""


@pytest.fixture(autouse=True)
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drivers of others, installed for this test: one that runs, one that cannot be imported."""
    place = tmp_path / "installed"
    (place / "moody-1.dist-info").mkdir(parents=True)
    (place / "moody-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1\n")
    (place / "moody-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (place / "moody_driver.py").write_text(textwrap.dedent(DRIVER))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")


def write(folder: Path, **tests: float) -> Path:
    """Data of two files, with the tests by turns in the one and the other: NEG of one value each."""
    folder.mkdir()
    rows = [vector_test("NEG", [[value]], [-value], name=name) for name, value in tests.items()]
    for part in (0, 1):
        write_tests(folder / f"part{part}.msgpack.gz", rows[part::2])
    return folder


async def test_lists_of_the_drivers_module_hold(tmp_path: Path) -> None:
    data = write(tmp_path / "data", first=1, never_this=1, later=669, second=2)
    report = await run_suite("moody", data, isolation="in_process")
    assert (report.passed, report.skipped, report.expected_failures, report.failed) == (2, 1, 1, 0)
    assert report.skip_reasons == {"no such hardware": 1}


async def test_entry_for_no_test_fails_unless_only_a_part_is_run(tmp_path: Path) -> None:
    data = write(tmp_path / "data", first=1, later=669)
    report = await run_suite("moody", data, isolation="in_process")
    assert (report.passed, report.expected_failures, report.failed) == (1, 1, 1)
    assert (report.failures[0].test, report.failures[0].got) == ("the lists of moody", "'never_*'")
    assert (await run_suite("moody", data, contains="first", isolation="in_process")).failed == 0


@pytest.mark.slow
async def test_worker_that_dies_costs_its_test_alone(tmp_path: Path) -> None:
    data = write(
        tmp_path / "data", a=1, b=2, exits=666, c=3, d=4, crashes=667, later=669, never_this=1, e=5, f=6
    )
    seen: list[int] = []

    def progress(tally: Tally, total: int) -> None:
        assert total == 10
        seen.append(tally.counts.total)

    report = await run_suite("moody", data, isolation="in_process", jobs=2, progress=progress)
    assert (report.passed, report.failed, report.skipped, report.expected_failures) == (6, 2, 1, 1)
    assert [(f.test, f.got) for f in report.failures] == [
        ("crashes", "the end of the process (exit status -11)"),
        ("exits", "the end of the process (exit status 7)"),
    ]
    assert seen == list(range(1, 11))


@pytest.mark.slow
async def test_driver_process_that_dies_or_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "data", a=1, exits=666, b=2, hangs=668, c=3, later=669, never_this=1)
    settings = Settings(checks=("general",))
    run_test = workers.run_test

    async def run(device: DeviceUnderTest, test: CtsTest, settings: Settings) -> Outcome | None:
        """The test that must hang is given up soon, and no other one, however slow the machine is."""
        limit_s = 1.0 if test.name == "hangs" else settings.time_limit_s
        return await run_test(device, test, msgspec.structs.replace(settings, time_limit_s=limit_s))

    monkeypatch.setattr(workers, "run_test", run)
    report = await run_suite("moody", data, settings=settings, jobs=1)
    assert (report.passed, report.failed, report.skipped, report.expected_failures) == (3, 2, 1, 1)
    exits, hangs = report.failures
    assert (exits.test, exits.got.split(":")[0]) == ("exits", "DEAD_OBJECT")
    assert (hangs.test, hangs.expected) == ("hangs", "an answer within 1 s")


@pytest.mark.parametrize("jobs", [1, 2])
async def test_driver_that_cannot_be_imported_is_told(tmp_path: Path, jobs: int) -> None:
    data = write(tmp_path / "data", a=1, b=2)
    with pytest.raises(DeviceUnavailable, match="no_such_module"):
        await run_suite("broken", data, isolation="in_process", jobs=jobs)


async def test_unknown_driver_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "data", a=1)
    with pytest.raises(InvalidArgument, match="moody"):
        await run_suite("unknown", data)


@pytest.mark.slow
async def test_what_ends_a_worker_before_its_first_test_is_told(tmp_path: Path) -> None:
    data = write(tmp_path / "data", a=1, b=2)
    # Imported here before, so that only the workers miss it.
    await run_suite("moody", data, contains="a", isolation="in_process")
    (tmp_path / "installed" / "moody_driver.py").unlink()
    with pytest.raises(ExceptionGroup) as group:
        await run_suite("moody", data, isolation="in_process", jobs=2)
    assert group.value.subgroup(Error) is not None
    assert "cannot be loaded" in str(group.value.exceptions[0])


@pytest.mark.slow
async def test_reason_of_a_worker_that_ended_before_its_first_unit_was_sent_is_told(tmp_path: Path) -> None:
    (unit, *_), _ = find_units(write(tmp_path / "data", a=1))
    job = workers._Job("broken", "in_process", Settings())
    worker = workers._Worker(job, deque(), lambda name: (), lambda outcome: None)
    await worker._start()
    assert worker._process is not None
    await worker._process.wait()
    try:
        with pytest.raises(Error, match="cannot be loaded"):
            await worker._run_unit(unit)
    finally:
        await worker._end()


@pytest.mark.parametrize("is_unable", [False, True])
def test_worker_whose_parent_has_ended_ends_without_a_traceback(tmp_path: Path, is_unable: bool) -> None:
    units, _ = find_units(write(tmp_path / "data", first=1, second=2))
    job = workers._Job("broken" if is_unable else "reference", "in_process", Settings())
    with subprocess.Popen(
        python_command("aionn.conformance.workers", msgspec.json.encode(job).decode()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=python_environment(),
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
        worker.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(msgspec.json.encode(units[0]) + b"\n")
            worker.stdin.flush()
        errors = worker.stderr.read().decode()
        assert worker.wait(RUN_S_MAX) == 0
    assert "BrokenPipe" not in errors and "Traceback" not in errors

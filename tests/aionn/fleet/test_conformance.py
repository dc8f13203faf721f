"""The suites of drivers on a device of a node: it keeps the contract, and its values are those of the device."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from aionn.conformance import cts
from aionn.conformance.computing import Mode
from aionn.conformance.cts import CtsTest
from aionn.conformance.suite import DeviceUnderTest, Settings, open_device_under_test, run_tests
from aionn.conformance.vts.run import Settings as VtsSettings
from aionn.conformance.vts.run import chosen_cases, run_cases
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.hal import Device
from tests.aionn.conformance.cts.test_in_process import answer_of
from tests.aionn.conformance.cts.test_in_process import sample as byte_tests
from tests.aionn.fleet.conftest import Served
from tests.support.conformance_data import all_tests, small_sample

pytestmark = pytest.mark.forked("any")

Command = Callable[..., "subprocess.CompletedProcess[str]"]

SAMPLE = 30
"""Tests of the conformance data in the ordinary run, evenly chosen."""

BYTES, BYTES_LONG = 16, 750
"""Tests whose outputs are compared byte by byte in the ordinary run, in both modes together; and in the long one, in each."""

EVERY = 12
"""The ordinary run takes each eighth case of the contract."""

SLOW = (
    "lifetimes/closing_frees_memory",
    "generated/infinite_loop_timeout[burst]",
    "lifetimes/many_models_side_by_side",
)


@pytest.fixture
async def under_test(served: Served) -> AsyncIterator[DeviceUnderTest]:
    async def make() -> Device:
        device = NodeDevice(parse_node(f"{served.address}?silence_ms=60000"))
        await device.connect()
        return device

    device = DeviceUnderTest(make)
    yield device
    await device.aclose()


@pytest.mark.slow
async def test_sample_of_the_data_has_the_same_values(under_test: DeviceUnderTest, shared: Path) -> None:
    tests = all_tests(shared / "cts")
    step = len(tests) // SAMPLE
    settings = Settings(mode="burst", checks=("general",))
    report = await run_tests(under_test, tests[::step][:SAMPLE], settings)
    assert report.failed == 0, report.failures[:10]
    assert report.passed >= SAMPLE * 0.9


async def compare_bytes(served: Served, tests: Sequence[CtsTest], mode: Mode) -> int:
    """Compares the outputs of tests on the device of a node with those of the same driver here; returns how many had outputs."""
    compared = 0
    async with (
        open_device_under_test("reference", "process") as here,
        open_device_under_test("edge1/reference", node=f"{served.address}?silence_ms=60000") as there,
    ):
        for test in tests:
            expected = await answer_of(await here.get(), test, mode)
            assert await answer_of(await there.get(), test, mode) == expected, f"{test.name}, {mode}"
            compared += bool(expected[2])
    return compared


@pytest.mark.parametrize("mode", ["sync", "burst"])
async def test_bytes_are_those_of_the_device_of_this_machine(
    served: Served, shared: Path, mode: Mode
) -> None:
    tests = byte_tests(shared, BYTES)[mode == "burst" :: 2]
    assert await compare_bytes(served, tests, mode) >= len(tests) * 3 // 4


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "burst"])
async def test_bytes_of_many_tests_are_those_of_the_device_of_this_machine(
    served: Served, shared: Path, mode: Mode
) -> None:
    tests = byte_tests(shared, BYTES_LONG)
    assert await compare_bytes(served, tests, mode) >= len(tests) * 3 // 4


@pytest.mark.long
async def test_all_data_have_the_same_values(under_test: DeviceUnderTest, shared: Path) -> None:
    report = await run_tests(under_test, cts.iterate_tests(shared / "cts"), Settings())
    assert report.failed == 0, report.failures[:10]


@pytest.mark.thorough
async def test_sample_of_the_contract_is_kept(under_test: DeviceUnderTest, shared: Path) -> None:
    report = await run_cases(
        under_test,
        [case for case in chosen_cases("")[::EVERY] if case.name not in SLOW],
        driver="reference",
        tests=small_sample(shared / "cts")[:1],
        settings=VtsSettings(mutants_max=2),
        is_remote=True,
    )
    assert report.failed == 0, report.failures[:10]


def test_command_tests_the_device_that_a_node_has(served: Served, aionn_here: Command) -> None:
    node = ("--fleet", f"{served.address}?silence_ms=60000")
    finished = aionn_here(
        "conformance", "edge1/reference", *node, "--suite", "vts", "-k", "info_is", "--json"
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    report = json.loads(finished.stdout)
    assert (report["driver"], report["passed"], report["failed"]) == ("edge1/reference", 1, 0)
    finished = aionn_here(
        "conformance", "edge1/reference", *node, "--suite", "random", "--seeds", "2", "--jobs", "1"
    )
    assert finished.returncode == 0 and "2 passed, 0 failed" in finished.stdout
    finished = aionn_here("conformance", "edge1/other", *node, "--suite", "vts", "-k", "info_is")
    assert finished.returncode == 2
    assert "expected the device 'edge1/other', the node has 'edge1/reference'" in finished.stderr


@pytest.mark.long
async def test_contract_is_kept(under_test: DeviceUnderTest, shared: Path) -> None:
    report = await run_cases(
        under_test,
        chosen_cases(""),
        driver="reference",
        tests=small_sample(shared / "cts"),
        settings=VtsSettings(mutants_max=None),
        is_remote=True,
        is_whole=True,
    )
    assert report.failed == 0, report.failures[:10]

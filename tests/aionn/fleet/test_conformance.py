"""The suites of drivers on a device of a node: it keeps the contract, and its values are those of the device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aionn.conformance import cts
from aionn.conformance.suite import DeviceUnderTest, Settings, run_tests
from aionn.conformance.vts.run import Settings as VtsSettings
from aionn.conformance.vts.run import chosen_cases, run_cases
from aionn.fleet.addresses import parse_node
from aionn.fleet.device import NodeDevice
from aionn.hal import Device
from tests.aionn.fleet.conftest import Served
from tests.support.conformance_data import all_tests, small_sample

pytestmark = pytest.mark.forked("any")

SAMPLE = 30
"""Tests of the conformance data in the ordinary run, evenly chosen."""

EVERY = 12
"""The ordinary run takes each eighth case of the contract."""

SLOW = (
    "lifetimes/closing_frees_memory",
    "generated/infinite_loop_timeout[burst]",
    "lifetimes/many_models_side_by_side",
)

EXPECTED = {"basics/info_is_legal": "the name is that of the node and of its device: edge1/reference"}


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
        settings=VtsSettings(mutants_max=2, expected_failures=EXPECTED),
        is_remote=True,
    )
    assert report.failed == 0, report.failures[:10]


@pytest.mark.long
async def test_contract_is_kept(under_test: DeviceUnderTest, shared: Path) -> None:
    report = await run_cases(
        under_test,
        chosen_cases(""),
        driver="reference",
        tests=small_sample(shared / "cts"),
        settings=VtsSettings(mutants_max=None, expected_failures=EXPECTED),
        is_remote=True,
        is_whole=True,
    )
    assert report.failed == 0, report.failures[:10]

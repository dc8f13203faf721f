"""A share of the conformance data on the reference device, and data that are no data."""

from __future__ import annotations

import functools
import gc
import gzip
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aionn.conformance import cts
from aionn.conformance.computing import MODES, Mode
from aionn.conformance.cts import CtsTest
from aionn.conformance.suite import DeviceUnderTest, Settings, run_tests
from aionn.conformance.workers import run_suite
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import InvalidArgument
from aionn.hal import (
    Device,
)
from tests.support.conformance_data import all_tests, vector_test

TEST_COUNT = 7581
OPERATION_COUNT = 106
COUPLED_COUNT = 699
"""Tests of one operation with unsigned 8-bit tensors, the exceptions left out."""

EMPTY_OUTPUT_COUNT = 176
"""Tests with an output that is empty, which fenced execution forbids."""

SEED = 20

LEFT_S_MAX = 20.0


@pytest.fixture(scope="module")
def data(shared: Path) -> Iterator[Path]:
    if not (shared / "cts").is_dir():
        pytest.skip("the conformance data are not beside the repository")
    yield shared / "cts"
    shuffled.cache_clear()  # They are many, and no other module needs them.


@functools.cache
def shuffled(data: Path) -> list[CtsTest]:
    tests = list(all_tests(data))
    random.Random(SEED).shuffle(tests)
    return tests


def share(data: Path, part: int, *, has_every_operation: bool = True) -> list[CtsTest]:
    """One test in ``part``, drawn by the seed, and more until every operation occurs."""
    tests = shuffled(data)
    if not has_every_operation:
        return tests[::part]
    chosen: list[CtsTest] = []
    seen: set[str] = set()
    for position, test in enumerate(tests):
        new = cts.operation_types(test) - seen
        if position % part == 0 or new:
            chosen.append(test)
            seen |= new
    return chosen


@pytest.fixture
async def reference() -> AsyncIterator[Device]:
    async with ReferenceDevice() as device:
        yield device


# --- The data ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "part", "operations"),
    [
        ("sync", 480, OPERATION_COUNT),
        # What a mode adds to an execution is the same for every operation.
        ("burst", 240, OPERATION_COUNT // 5),
        *(
            pytest.param(mode, 240, OPERATION_COUNT // 5, marks=pytest.mark.thorough)
            for mode in ("async", "fenced")
        ),
        *(
            pytest.param(mode, 120, OPERATION_COUNT, marks=pytest.mark.long)
            for mode in ("sync", "async", "burst", "fenced")
        ),
    ],
)
async def test_reference_passes_a_share_of_the_data(
    data: Path, reference: Device, mode: Mode, part: int, operations: int
) -> None:
    chosen = share(data, part, has_every_operation=operations == OPERATION_COUNT)
    tests = [t for t in chosen if mode != "burst" or not t.name.startswith("while_infinite_loop")]

    async def make() -> Device:
        return reference

    report = await run_tests(DeviceUnderTest(make), tests, Settings(mode=mode))
    assert report.failures == ()
    assert report.passed + report.skipped == len(tests) >= TEST_COUNT // part
    assert mode == "fenced" or report.skipped == 0
    assert operations <= len(report.by_operation) <= OPERATION_COUNT
    assert set(report.by_check) >= {"general", "dynamic_shape", "signed_coupling"}


@pytest.mark.thorough
async def test_reference_passes_in_driver_processes(data: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    report = await run_suite("reference", data, contains="l2_pool_float", jobs=2)
    assert (report.failures, report.skipped, report.expected_failures) == ((), 0, 0)
    assert report.passed == report.by_operation["L2_POOL_2D"].passed == 12
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["in_process", "process"])
@pytest.mark.parametrize("mode", MODES)
async def test_reference_passes_all_of_the_data(data: Path, mode: Mode, isolation: Any) -> None:
    report = await run_suite("reference", data, isolation=isolation, settings=Settings(mode=mode), jobs=2)
    assert report.failures == ()
    skipped = EMPTY_OUTPUT_COUNT if mode == "fenced" else 0
    assert (report.passed, report.skipped, report.expected_failures) == (TEST_COUNT - skipped, skipped, 0)
    assert len(report.by_operation) == OPERATION_COUNT
    assert report.by_check["signed_coupling"].total == COUPLED_COUNT


@pytest.mark.thorough
async def test_nothing_grows_with_the_number_of_models(data: Path, reference: Device) -> None:
    async def make() -> Device:
        return reference

    device = DeviceUnderTest(make)
    tests = share(data, 200)[:15]
    await run_tests(device, tests)
    before = _held()
    await run_tests(device, tests)
    with anyio.move_on_after(LEFT_S_MAX):  # The thread of an execution leaves its memory after the answer.
        while any(now > then for now, then in zip(_held(), before, strict=True)):
            await anyio.sleep(0.01)
    assert all(now <= then for now, then in zip(_held(), before, strict=True))


def _held() -> tuple[int, int]:
    """Descriptors and mappings of this process."""
    gc.collect()  # Errors hold their frames in cycles, and the frames hold mapped memory.
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:")


def test_data_are_complete(data: Path) -> None:
    tests = shuffled(data)
    assert len(tests) == len({test.name for test in tests}) == TEST_COUNT
    assert sum(cts.signed_counterpart(test) is not None for test in tests) == COUPLED_COUNT


def test_missing_and_damaged_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no .*files"):
        cts.test_files(tmp_path)
    (tmp_path / "a.msgpack.gz").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        cts.load_tests(tmp_path / "a.msgpack.gz")


async def test_text_in_no_name_is_refused(data: Path) -> None:
    with pytest.raises(InvalidArgument, match="no test in"):
        await run_suite("reference", data, contains="no such test")


# --- Mistakes in the data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("type", "TENSOR_FLOAT8", "operand 0: expected a type"),
        ("lifetime", "ETERNAL", "operand 0: expected a type and a lifetime"),
        ("data", b"123", "operand 0, data: expected 12 bytes"),
        (
            "operations",
            [{"type": "ADDD", "inputs": [], "outputs": []}],
            "expected a type of the HAL, got 'ADDD'",
        ),
        ("output_indexes", [4], "expected 0 to 3, got [4]"),
    ],
)
def test_mistake_in_the_data_is_not_the_devices(tmp_path: Path, place: str, value: Any, words: str) -> None:
    by_hand = vector_test("ADD", [[1, 2, 3], [10, 20, 30]], [11, 22, 33], name="add_by_hand")
    test = msgspec.to_builtins(by_hand, builtin_types=(bytes,))
    target = test["main"] if place in test["main"] else test["main"]["operands"][0]
    target[place] = value
    path = tmp_path / "wrong.msgpack.gz"
    path.write_bytes(gzip.compress(msgspec.msgpack.encode([test])))
    with pytest.raises(InvalidArgument) as caught:
        cts.load_tests(path)
    assert words in str(caught.value) and "add_by_hand" in str(caught.value)

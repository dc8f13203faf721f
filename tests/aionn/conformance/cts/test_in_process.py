"""The same driver gives the same bytes in a process of its own as in this one, in every mode."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import pytest

from aionn.conformance.computing import MODES, Mode, computing
from aionn.conformance.cts import CtsTest, build_model
from aionn.conformance.cts.arguments import TestArguments as Arguments
from aionn.conformance.cts.run import ENDLESS
from aionn.conformance.suite import open_device_under_test
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import ErrorStatus
from aionn.hal import Device, Memory
from tests.support.conformance_data import all_tests

SEED = 6
TESTS = 16


@pytest.fixture(autouse=True)
def as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the driver process's matrix library add in as many threads as this one's: sums depend on it in their last bits."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", os.environ.get("OPENBLAS_NUM_THREADS", str(os.cpu_count())))


@functools.lru_cache(maxsize=1)
def sample(shared: Path, count: int | None) -> list[CtsTest]:
    if not (shared / "cts").is_dir():
        pytest.skip("the conformance data are not beside the repository")
    tests = [t for t in all_tests(shared / "cts") if not t.expect_failure and not t.name.startswith(ENDLESS)]
    return tests if count is None else random.Random(SEED).sample(tests, count)


async def answer_of(device: Device, test: CtsTest, mode: Mode) -> tuple[ErrorStatus, object, list[bytes]]:
    """Status, shapes and the outputs' bytes."""
    model = build_model(test)
    prepared = await device.prepare_model(model)
    try:
        with Arguments(test) as arguments:
            async with computing(prepared, arguments.request, mode) as compute:
                for _ in range(2 if mode == "burst" else 1):
                    arguments.reset()
                    answer = await compute()
            if answer.status != ErrorStatus.NONE:
                return answer.status, answer.shapes, []
            outputs = [output.tobytes() for output in arguments.outputs(answer.shapes)]
            return answer.status, answer.shapes, outputs
    finally:
        await prepared.aclose()
        for pool in model.pools:
            if isinstance(pool, Memory):
                pool.close()


async def compare(tests: list[CtsTest], mode: Mode) -> int:
    """Compares every test, and returns how many had outputs."""
    compared = 0
    async with ReferenceDevice() as here, open_device_under_test("reference", "process") as under_test:
        there = await under_test.get()
        for test in tests:
            expected = await answer_of(here, test, mode)
            assert await answer_of(there, test, mode) == expected, f"{test.name}, {mode}"
            compared += bool(expected[2])
    return compared


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.thorough) for mode in MODES[1:])]
)
async def test_results_are_the_same_in_a_driver_process(shared: Path, mode: Mode) -> None:
    tests = sample(shared, TESTS)[MODES.index(mode) % 2 :: 2]  # Half of them, two modes after each other all.
    assert await compare(tests, mode) >= len(tests) * 3 // 4


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_all_results_are_the_same_in_a_driver_process(shared: Path, mode: Mode) -> None:
    tests = sample(shared, None)
    assert await compare(tests, mode) >= len(tests) - 200

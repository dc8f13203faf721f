"""What an engine's device does not take whole is divided between it and the reference device, and the answers stay right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.conformance import cts
from aionn.conformance.cts import CtsTest
from aionn.errors import Error
from tests.support.conformance_data import all_tests

SHARE = 1000
"""One test of a single operation in so many is in the ordinary run, and eight times as many of several operations."""

SHARE_LONG = 40
"""The same with ``--long``, besides."""

LOOP_TIMEOUT_S = 0.05


class Tally:
    """What a run has seen, so that a test can demand that it saw it."""

    def __init__(self) -> None:
        self.tests = self.divided = 0


async def run(engine: Any, tests: Sequence[CtsTest]) -> Tally:
    """Runs those that the engine's device does not take whole on both devices together."""
    tally = Tally()
    async with (
        engine.make() as device,
        aionn.open(drivers=[engine.device, "reference"], isolation="in_process") as runtime,
    ):
        for test in tests:
            model = cts.build_model(test)
            try:
                taken = await device.supported_operations(model)
            except Error:
                assert test.expect_failure, test.name
                continue
            if not all(taken):
                tally.tests += 1
                await run_one(runtime, test, tally)
    return tally


async def run_one(runtime: aionn.Runtime, test: CtsTest, tally: Tally) -> None:
    is_endless = "while_infinite_loop" in test.name
    try:
        async with await runtime.compile(cts.build_model(test)) as net:
            tally.divided += len(net.devices) > 1
            inputs = cts.main_inputs(test)
            result = await net.execute(inputs, loop_timeout=LOOP_TIMEOUT_S if is_endless else None)
    except Error as e:
        assert test.expect_failure or is_endless, f"{test.name}: {e}"
    else:
        assert not test.expect_failure, test.name
        assert cts.compare(test, result.outputs) is None, test.name


def draw(shared: Path, share: int) -> list[CtsTest]:
    chosen = random.Random(2)
    tests = all_tests(shared / "cts")
    return [t for t in tests if chosen.random() < (8 if len(t.main.operations) > 1 else 1) / share]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("share", "more_than"), [(SHARE, 0), pytest.param(SHARE_LONG, 15, marks=pytest.mark.long)]
)
async def test_share_of_what_an_engine_refuses_passes_on_two_devices(
    engine: Any, shared: Path, share: int, more_than: int
) -> None:
    tally = await run(engine, draw(shared, share))
    assert tally.tests > more_than
    assert tally.divided > 0


@pytest.mark.long
async def test_all_that_an_engine_refuses_passes_on_two_devices(engine: Any, shared: Path) -> None:
    tally = await run(engine, all_tests(shared / "cts"))
    print(f"{tally.tests} tests, {tally.divided} of them divided")
    assert tally.tests > 800
    assert tally.divided > 10

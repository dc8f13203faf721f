"""The conformance data on the reference device split over three: whatever the cut, the answers are those of the whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import aionn
from aionn.conformance import cts
from aionn.conformance.cts import CtsTest
from aionn.conformance.random_graphs.graphs import draw_plan, interpret, make_case
from aionn.conformance.random_graphs.sets import GRAPH_TESTS
from aionn.errors import (
    DeadObject,
    DeviceUnavailable,
    Error,
    GeneralFailure,
    InvalidArgument,
    ResourceExhausted,
)
from tests.support.conformance_data import all_tests
from tests.support.split import SPLIT, PickyDevice, SplitDevice, split_devices
from tests.support.split_run import Tally, run_one, run_split

SHARE = 120
"""One conformance test in so many is in the ordinary run, with those of several operations drawn more often."""

SHARE_LONG = 12
"""The same with ``--long``, besides."""


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    if not (shared / "cts").is_dir():
        pytest.skip("the conformance data are not beside the repository")
    return shared / "cts"


def draw(data: Path, seed: int, share: int) -> list[CtsTest]:
    rng = random.Random(seed)
    return [
        test
        for test in all_tests(data)
        if rng.random() < (len(test.main.operations) > 1) / share + 1 / (8 * share)
    ]


@pytest.mark.parametrize(
    ("share", "more_than", "cut_more_than"),
    [(SHARE, 15, 4), pytest.param(SHARE_LONG, 200, 60, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("seed", [1])
@pytest.mark.thorough
async def test_share_of_the_data_passes_on_a_split_device(
    data: Path, seed: int, share: int, more_than: int, cut_more_than: int
) -> None:
    tally = await run_split(draw(data, seed, share), seed)
    assert tally.tests > more_than
    assert tally.cut > cut_more_than
    assert tally.interpreted > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
async def test_all_data_pass_on_a_split_device(data: Path, seed: int) -> None:
    tally = await run_split(all_tests(data), seed, progress=print)
    assert tally.tests == len(all_tests(data))
    assert tally.cut > 1000
    assert tally.interpreted > 100


class FailingShare(NamedTuple):
    """How many tests are run with a device that fails.

    Attributes:
        share: As for a device that does not fail.
        failing: Of that draw, one test in so many.
        more_than: Fewest tests that these are, less one.
        fallen_back_more_than: Fewest executions that fall back, less one.
    """

    share: int
    failing: int
    more_than: int
    fallen_back_more_than: int

    def draw(self, data: Path, seed: int) -> list[CtsTest]:
        return draw(data, seed, self.share)[:: self.failing]


FAILING_SHARES = [
    pytest.param(FailingShare(SHARE, 3, 10, 3), id="share"),
    pytest.param(FailingShare(SHARE_LONG, 3, 60, 20), id="long share", marks=pytest.mark.long),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", FAILING_SHARES)
@pytest.mark.parametrize("index", range(len(SPLIT)))
@pytest.mark.parametrize("fail_at", ["prepare", "run"])
@pytest.mark.thorough
async def test_share_of_the_data_passes_with_a_device_that_fails(
    data: Path, fail_at: str, index: int, share: FailingShare
) -> None:
    """Whichever of the three it is, and wherever it fails: the answers are right, and results say what fell back."""
    seed = 3
    devices = [SplitDevice(i, seed, fail_at=fail_at if i == index else None) for i in range(len(SPLIT))]
    tests = share.draw(data, seed)
    # The last one is slow and frugal: only who wants that is sent there.
    preference = "low_power" if index == 2 else "fast_single_answer"
    tally = await run_split(tests, seed, devices=devices, preference=preference)
    assert tally.tests > share.more_than
    assert (tally.fallen_back > share.fallen_back_more_than) == (fail_at == "run")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", FAILING_SHARES)
@pytest.mark.parametrize("after", [1, 7])
async def test_share_of_the_data_passes_with_a_device_that_dies_midway(
    data: Path, after: int, share: FailingShare
) -> None:
    """From one execution on everything that the device is asked fails, as with a process that is gone."""
    calls = 0

    def dies() -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise DeadObject("planted")

    devices = [PickyDevice("mortal", fail=dies), *split_devices(6)]
    tally = await run_split(share.draw(data, 6), 6, devices=devices)
    assert calls > after and tally.fallen_back > share.fallen_back_more_than


EXPECTED_REFUSALS = ("no device can be given an empty value", "has no inputs", "has no outputs")
"""What a cut can meet that no device can be asked for; with leave to fall back, the reference device gets the whole model."""


@pytest.mark.parametrize("share", [SHARE, pytest.param(SHARE_LONG, marks=pytest.mark.long)])
@pytest.mark.thorough
async def test_without_leave_to_fall_back_only_what_cannot_be_cut_fails(data: Path, share: int) -> None:
    seed, failed = 4, 0
    async with aionn.open(
        devices=split_devices(seed), drivers=["reference"], isolation="in_process"
    ) as runtime:
        for test in draw(data, seed, share):
            if test.expect_failure:
                continue
            try:
                await run_one(runtime, test, Tally(), allow_fallback=False)
            except (GeneralFailure, AssertionError) as e:
                cause = e if isinstance(e, GeneralFailure) else e.__context__
                assert any(words in str(cause) for words in EXPECTED_REFUSALS), f"{test.name}: {cause}"
                failed += 1
    assert failed > 0


@pytest.mark.parametrize("seeds", [10, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.thorough
async def test_random_graphs_give_the_same_on_a_split_device(seeds: int) -> None:
    cut = 0
    async with aionn.open(devices=split_devices(5), drivers=["reference"], isolation="in_process") as runtime:
        for seed in range(seeds):
            case = make_case(draw_plan(GRAPH_TESTS[seed % len(GRAPH_TESTS)], seed))
            if case is None:
                continue
            async with await runtime.compile(case.model, allow_fallback=True) as net:
                cut += len(net.devices) > 1
                result = await net.execute(case.inputs)
            expected = interpret(case.model, case.inputs)
            for index, is_checked in enumerate(case.is_checked):
                if is_checked:
                    np.testing.assert_allclose(
                        result.outputs[index].astype(float),
                        expected[index].astype(float),
                        rtol=1e-5,
                        atol=1e-6,
                    )
    assert cut > seeds // 3


def cut_test(data: Path) -> CtsTest:
    """One of many operations, of which some go to the first device."""
    return max((t for t in all_tests(data) if not t.referenced), key=lambda t: len(t.main.operations))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("fail_at", ["prepare", "run"])
@pytest.mark.parametrize("failure", [GeneralFailure, DeviceUnavailable, DeadObject, ResourceExhausted])
@pytest.mark.thorough
async def test_failing_device_is_made_good_or_told(data: Path, fail_at: str, failure: type[Error]) -> None:
    test = cut_test(data)
    broken = SplitDevice(0, 1, fail_at=fail_at, failure=lambda: failure("planted"))
    devices = [broken, SplitDevice(1, 1), SplitDevice(2, 1)]
    async with aionn.open(devices=devices, drivers=["reference"], isolation="in_process") as runtime:
        model = cts.build_model(test)
        net = await runtime.compile(model, allow_fallback=True)
        result = await net.execute(cts.main_inputs(test))
        assert cts.compare(test, result.outputs) is None
        if fail_at == "prepare":
            assert net.devices == ("reference",)
            assert all("compiling failed (planted)" in p.reason for p in net.placement)
            with pytest.raises(failure, match="planted"):
                await runtime.compile(model)
        else:
            assert broken.info.name in net.devices
            assert result.fallback and all(
                "failed (planted); ran on reference" in told for told in result.fallback
            )
            strict = await runtime.compile(model)
            with pytest.raises(failure, match="planted"):
                await strict.execute(cts.main_inputs(test))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["prepare", "run"])
async def test_dying_driver_is_made_good_or_told(data: Path, where: str) -> None:
    test = cut_test(data)
    drivers = {"mortal": f"tests.support.split:dies_at_{where}", "reference": "reference"}
    async with aionn.open(drivers=drivers) as runtime:
        model = cts.build_model(test)
        net = await runtime.compile(model, allow_fallback=True)
        result = await net.execute(cts.main_inputs(test))
        assert cts.compare(test, result.outputs) is None
        if where == "prepare":
            assert net.devices == ("reference",)
            with pytest.raises(DeadObject):
                await runtime.compile(model)
        else:
            assert "mortal" in net.devices
            assert result.fallback
            strict = await runtime.compile(model)
            with pytest.raises(DeadObject):
                await strict.execute(cts.main_inputs(test))


async def test_failing_reference_step_is_rescued_by_nobody(data: Path) -> None:
    """A caller's mistake is the caller's, however much leave there is."""
    broken = SplitDevice(0, 1, fail_at="run", failure=lambda: InvalidArgument("planted"))
    test = cut_test(data)
    async with aionn.open(
        devices=[broken, SplitDevice(1, 1), SplitDevice(2, 1)], drivers=["reference"], isolation="in_process"
    ) as runtime:
        net = await runtime.compile(cts.build_model(test), allow_fallback=True)
        with pytest.raises(InvalidArgument, match="planted"):
            await net.execute(cts.main_inputs(test))

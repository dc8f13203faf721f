"""The public conformance data on the engines' drivers: a few specifications of every family, and all of them in the long form,
there also split between each driver and the reference device (a share of that is in ``test_split``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aionn.conformance import cts
from aionn.conformance.suite import Report, Settings
from aionn.conformance.workers import run_suite
from tests.support.split_run import run_split

SUPPORTED_SHARE_MIN = 0.6

FAMILIES = (
    "depthwise_conv2d_per_channel_different",
    "reduce_max_quant8",
)
"""Four to eight tests each: an engine compiles every one of them."""

FAMILIES_LONG = (
    "l2_pool_v1_2_large_nhwc",
    "resize_bilinear_v1_3_half_pixel_centers_2x6x7x3",
    "transpose_conv2d_large",
)

OF_ONE_ENGINE = {"litert-cpu": ("while_sum_of_powers_quant8_n_4",)}


async def run(device: str, shared: Path, contains: str, seconds: float = 30.0) -> Report:
    return await run_suite(
        device,
        shared / "cts",
        contains=contains,
        isolation="in_process",
        settings=Settings("sync", ("general",), seconds),
        jobs=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "families", [FAMILIES, pytest.param(FAMILIES_LONG, marks=pytest.mark.long)], ids=["some", "others"]
)
async def test_families_pass(engine: Any, shared: Path, families: tuple[str, ...]) -> None:
    for family in (*families, *OF_ONE_ENGINE.get(engine.device, ())):
        report = await run(engine.device, shared, family)
        assert [str(failure) for failure in report.failures] == []
        assert report.passed > 0


@pytest.mark.long
async def test_all_that_is_supported_passes(engine: Any, shared: Path) -> None:
    report = await run(engine.device, shared, "")
    assert [str(failure) for failure in report.failures] == []
    whole = report.passed + report.skipped + report.expected_failures
    assert report.passed >= SUPPORTED_SHARE_MIN * whole


@pytest.mark.long
async def test_all_data_pass_split_with_the_reference_device(engine: Any, shared: Path) -> None:
    tally = await run_split(cts.iterate_tests(shared / "cts"), 0, devices=[engine.make()], progress=print)
    print(tally)
    assert tally.cut > 0 and tally.interpreted > 0

"""The public conformance data on `ort-cpu`: a few specifications of every family here, all of them in the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from aionn.conformance.suite import Report, Settings
from aionn.conformance.workers import run_suite

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

SUPPORTED_SHARE_MIN = 0.6

FAMILIES = (
    "depthwise_conv2d_per_channel",
    "l2_pool_v1_2",
    "reduce_max",
    "resize_bilinear_v1_3_half",
    "transpose_conv2d_large",
)


async def run(shared: Path, contains: str, seconds: float = 30.0) -> Report:
    return await run_suite(
        "ort-cpu",
        shared / "cts",
        contains=contains,
        isolation="in_process",
        settings=Settings("sync", ("general",), seconds),
        jobs=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_family_passes(shared: Path, family: str) -> None:
    report = await run(shared, family)
    assert [str(failure) for failure in report.failures] == []
    assert report.passed > 0


@pytest.mark.long
async def test_all_that_is_supported_passes(shared: Path) -> None:
    report = await run(shared, "")
    assert [str(failure) for failure in report.failures] == []
    whole = report.passed + report.skipped + report.expected_failures
    assert report.passed >= SUPPORTED_SHARE_MIN * whole

"""A session that exhausts the memory takes its driver process along and nothing else."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import aionn
from tests.support.mortal_driver import sum_model
from tests.support.starved_ort import EXTENT, wide_model

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

LIMIT_S = 100
ONE = np.ones(1, np.float32)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "error"),
    [("RefusedDevice", aionn.ResourceExhausted), ("KilledDevice", aionn.DeadObject)],
)
async def test_session_without_memory_ends_its_driver_process_at_most(
    driver: str, error: type[Exception]
) -> None:
    drivers = {"starved": f"tests.support.starved_ort:{driver}", "reference": "reference"}
    answered, is_over = 0, False

    async def answer(net: aionn.Compilation) -> None:
        nonlocal answered
        while not is_over:
            result = await net.execute([ONE, ONE])
            assert result.outputs[0].tolist() == [2.0]
            answered += 1

    with anyio.fail_after(LIMIT_S):
        async with (
            aionn.open(drivers=drivers) as runtime,
            await runtime.compile(sum_model(), devices="reference") as beside,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(answer, beside)
            with pytest.raises(error):
                net = await runtime.compile(wide_model(), devices="starved")
                await net.execute([np.ones((EXTENT, 1), np.float32)])
            before = answered
            # The device serves again: in the same process, or in the next one.
            async with await runtime.compile(sum_model(), devices="starved") as small:
                result = await small.execute([ONE, ONE])
                assert (result.device, result.outputs[0].tolist()) == ("starved", [2.0])
            while answered <= before:
                await anyio.sleep(0.001)
            is_over = True

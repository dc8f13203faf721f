"""The runtime's objects as a notebook shows them, and a runtime that one cell opens and another one closes."""

from __future__ import annotations

import asyncio

import pytest

import aionn
from aionn.runtime.executions.stream import StreamStatistics

MODEL = "examples/data/digits_float.tflite"


async def test_runtime_is_opened_in_one_task_and_closed_in_another(repository) -> None:
    runtime = await asyncio.create_task(aionn.open(drivers=["reference"], isolation="in_process").start())
    net = await asyncio.create_task(runtime.compile(repository / MODEL))
    shown = runtime._repr_html_(), runtime.devices[0]._repr_html_(), net._repr_html_()
    await asyncio.create_task(runtime.aclose())
    assert "Runtime, open: 1 device" in shown[0] and "Runtime, closed" in runtime._repr_html_()
    assert "<td>reference</td>" in shown[0] and "<td>driver process</td>" in shown[1]
    assert "reference: " in shown[2] and "TENSOR_FLOAT32 1x49x40x1" in shown[2]


async def test_runtime_is_started_once() -> None:
    runtime = await aionn.open(drivers=["reference"], isolation="in_process").start()
    try:
        with pytest.raises(aionn.InvalidArgument, match="not opened before"):
            await runtime.start()
    finally:
        await runtime.aclose()
    with pytest.raises(aionn.InvalidArgument, match="not opened before"):
        await runtime.start()


def test_statistics_of_a_stream_are_a_table() -> None:
    html = StreamStatistics(on_time=7, late=1, dropped=2)._repr_html_()
    assert "on time" in html and ">7<" in html

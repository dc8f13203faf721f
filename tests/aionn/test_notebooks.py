"""The runtime's objects as a notebook shows them, and a runtime that one cell opens and another one closes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import aionn
from aionn.runtime.executions.results import StreamStatistics

MODEL = "examples/data/digits_float.tflite"


async def test_runtime_is_opened_in_one_task_and_closed_in_another(repository) -> None:
    runtime = await asyncio.create_task(aionn.open(drivers=["reference"], isolation="in_process").start())
    net = await asyncio.create_task(runtime.compile(repository / MODEL))
    shown = runtime._repr_html_(), runtime.devices[0]._repr_html_(), net._repr_html_()
    await asyncio.create_task(runtime.aclose())
    assert "Runtime, open: 1 device" in shown[0] and "Runtime, closed" in runtime._repr_html_()
    assert "<td>reference</td>" in shown[0] and "<td>driver process</td>" in shown[1]
    assert "reference: " in shown[2] and "TENSOR_FLOAT32 1x49x40x1" in shown[2]


async def test_runtime_is_entered_once() -> None:
    runtime = aionn.open(drivers=["reference"], isolation="in_process")
    async with runtime:
        with pytest.raises(aionn.InvalidArgument, match=r"not opened before; use aionn.open again"):
            await runtime.__aenter__()
        assert runtime.is_open
    with pytest.raises(aionn.InvalidArgument, match=r"not opened before; use aionn.open again"):
        async with runtime:
            pass


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


@pytest.mark.thorough
def test_example_notebook_runs_and_shows_its_objects(repository: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed")
    import nbformat

    path = repository / "examples" / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells), "it is stored without outputs"
    # In a process of its own: the client's event loop and kernel leave threads and sockets behind.
    program = (
        "import sys, nbformat, nbclient\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=100, kernel_name='python3', resources={'metadata': {'path': sys.argv[2]}})"
        ".execute()\n"
        "print(nbformat.writes(notebook))\n"
    )
    assert nbclient
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path), str(path.parent)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    executed = nbformat.reads(ran.stdout, as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert [o for o in outputs if o.output_type == "stream" and o.name == "stderr"] == []
    tables = [html for o in outputs if "data" in o and (html := o["data"].get("text/html"))]
    assert any("Runtime, open" in html for html in tables) and any(
        "Runtime, closed" in html for html in tables
    )
    assert any("p99 ms" in html for html in tables)

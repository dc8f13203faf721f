"""The programs of the how-to pages that need more than an interpreter: a web application, a driver, the tutorial."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from tests.documentation.pages import ROOT, blocks

RUN_S_MAX = 100
TUTORIAL = ROOT / "examples" / "tutorial"


def block_with(page: str, text: str) -> str:
    (found,) = [block.text for block in blocks("python") if block.page == page and text in block.text]
    return found


# --- FastAPI ------------------------------------------------------------------------------------------------------------------


async def answer_of(application: Any, method: str, path: str, body: bytes) -> tuple[int, Any]:
    """One request, by the interface between a web server and an application."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [], "client": None, "server": None,
    }  # fmt: skip
    await application(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(content)


@pytest.mark.thorough
async def test_web_application_answers_rejects_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="FastAPI is not installed")
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(aionn.open.__kwdefaults__, "isolation", "in_process")
    monkeypatch.setitem(aionn.open.__kwdefaults__, "drivers", ["reference"])
    # FastAPI looks the annotations of a handler up in its module.
    space: dict[str, Any] = {"__name__": "web"}
    exec(compile(block_with("docs/how-to/fastapi.md", "@app.post"), "web.py", "exec"), space)
    application = space["app"]
    picture = np.zeros((1, 96, 96, 3), np.float32).tobytes()
    assert len(picture) == 110592
    async with application.router.lifespan_context(application):
        status, answer = await answer_of(application, "POST", "/classify", picture)
        assert (status, answer["device"]) == (200, "reference")
        status, answer = await answer_of(application, "POST", "/classify", b"short")
        assert status == 422 and "110592 bytes" in answer["detail"]
        assert await answer_of(application, "GET", "/health", b"") == (200, {"reference": "AVAILABLE"})
        space["WITHIN_S"] = 0.0
        status, _ = await answer_of(application, "POST", "/classify", picture)
        assert status == 503
    # FastAPI keeps its applications; the model's memory shall not stay with this one.
    del application.state.net, application.state.runtime


# --- A driver from nothing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def driver_folder(tmp_path: Path) -> Path:
    (tmp_path / "my_driver.py").write_text(block_with("docs/how-to/first-driver.md", "class MyDevice"))
    return tmp_path


@pytest.mark.forked("any")
def test_first_driver_runs_its_operations_and_no_others(driver_folder: Path) -> None:
    program = driver_folder / "use.py"
    program.write_text(block_with("docs/how-to/first-driver.md", "net.placement") + "\nanyio.run(main)\n")
    done = subprocess.run(
        [sys.executable, program], cwd=driver_folder, capture_output=True, text=True, timeout=RUN_S_MAX
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\w+) runs on (\w+)", done.stdout) == [
        ("ADD", "mine"),
        ("TANH", "mine"),
        ("ABS", "reference"),
    ]
    assert done.stdout.splitlines()[-1] == "[[0.9640276 0.9640276 0.9640276 0.9640276]]"


CONFORMANCE = [
    pytest.param(("--suite", "random", "--seeds", "20", "--first", "1", "--jobs", "1"), id="some graphs"),
    pytest.param(("--suite", "random", "--seeds", "200"), id="graphs", marks=pytest.mark.long),
    pytest.param(("--suite", "vts"), id="contract", marks=pytest.mark.long),
]


@pytest.mark.forked("any")
@pytest.mark.slow
@pytest.mark.parametrize("options", CONFORMANCE)
def test_first_driver_passes_the_suites(driver_folder: Path, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "aionn", "conformance", "my_driver:MyDevice", *options, "--json"]
    limit_s = RUN_S_MAX if "20" in options else 10 * RUN_S_MAX
    done = subprocess.run(command, cwd=driver_folder, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr


# --- Operators of a user's own --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "shown"),
    [("make_function", r"\[\[0\.73105"), ("extract_model", r"\[\[-2\. +-?0\. -1\. -3\.\]\]")],
)
def test_model_with_an_operator_of_its_own_runs(part: str, shown: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="the onnx package is not installed: pip install --group onnx")
    (tmp_path / "program.py").write_text(block_with("docs/how-to/custom-operators.md", part))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S_MAX
    )
    assert done.returncode == 0, done.stderr
    assert re.match(shown, done.stdout)


# --- A notebook ---------------------------------------------------------------------------------------------------------------


async def execute_cell(text: str, space: dict[str, Any]) -> Any:
    """The value of a cell's last expression. A notebook executes a cell in a task of its own, with ``await`` at its top level."""
    tree = ast.parse(text)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
    code = compile(ast.fix_missing_locations(tree), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run() -> None:
        result = eval(code, space)
        if inspect.isawaitable(result):
            await result

    space["_"] = None
    await asyncio.create_task(run())
    return space["_"]


async def test_cells_of_the_notebook_s_page_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(aionn.open.__kwdefaults__, "isolation", "in_process")
    monkeypatch.setitem(aionn.open.__kwdefaults__, "drivers", ["reference"])
    cells = [block.text for block in blocks("python") if block.page == "docs/how-to/jupyter.md"]
    space: dict[str, Any] = {}
    with anyio.fail_after(RUN_S_MAX):
        for cell in cells:
            shown = await execute_cell(cell, space)
            if cell.startswith("collector "):
                while not space["collector"].snapshot().streams:
                    await anyio.sleep(0.001)  # The stream goes on beside the cells.
                assert "video" in shown._repr_html_() or "video" in space["collector"]._repr_html_()
            elif shown is not None and not isinstance(shown, np.ndarray | tuple):
                assert "<table" in shown._repr_html_()
    assert space["watching"].done() and "closed" in space["runtime"]._repr_html_()


# --- The tutorial's application -----------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.forked("any")
def test_application_of_the_tutorial_runs_on_a_clip_and_a_recording(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    command = [sys.executable, "-W", "error", TUTORIAL / "application.py", "--seconds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S_MAX)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines.keys() >= {"camera", "microphone", "heavy model", "seen", "heard"}
    answered = sum(int(count) for count in re.findall(r"(\d+) (?:on_time|dropped|late)", lines["camera"]))
    assert answered >= 5

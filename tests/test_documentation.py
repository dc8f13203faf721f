"""Every complete example in the documentation runs: a Python block that ends in ``anyio.run(main)``, or needs no event loop."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.errors import NotAdmitted

ROOT = Path(__file__).resolve().parents[1]
RUN_S_MAX = 60
TRIES = 3
LINES_ENOUGH = 30
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


SHOWN = re.compile(
    r"^```python\n((?:(?!^```).)*?)^```\n\n[^\n]+\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL
)
"""An example, one line of text, and the output of the example."""

DEVICES = re.compile(r"^(?:litert-cpu|ort-cpu|reference)\b", re.MULTILINE)

NEEDS_PROCESS = re.compile(r"\.pid\b|gc\.freeze\(")
"""An example that names its driver process, or keeps the collector from the objects of a device in this process."""


def is_complete(block: str) -> bool:
    return block.rstrip().endswith("anyio.run(main)") or "with aionn.blocking.open(" in block


def examples() -> list[tuple[str, str]]:
    """Those that write files by the package ``onnx`` are run by ``tests/documentation/test_how_to.py``."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = [
            block
            for block in BLOCK.findall(page.read_text())
            if is_complete(block) and "import onnx" not in block
        ]
        found += [(f"{page.name}[{i}]", block) for i, block in enumerate(blocks)]
    return found


def outputs() -> dict[str, str]:
    """The output that a page shows, by the code of the example."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return dict(found for page in pages for found in SHOWN.findall(page.read_text()))


@pytest.mark.parametrize(
    "page",
    [
        "compilation",
        "devices",
        "executions",
        "faults",
        "memory",
        "models",
        "settings",
        "streams",
        "threads",
        "traces-and-logs",
    ],
)
def test_page_of_the_runtime_has_an_example(page: str) -> None:
    assert any(name.startswith(f"{page}.md") for name, _ in examples())


def is_endless(block: str) -> bool:
    """A stream goes on for as long as its video does."""
    return "aionn.media" in block


FINITE = [(name, block) for name, block in examples() if not is_endless(block)]
ENDLESS = [(name, block) for name, block in examples() if is_endless(block)]


def run_with_room(code: str, name: str) -> None:
    """Runs an example, again where a machine that was busy at that moment rightly rejects its stream."""
    for _ in range(TRIES - 1):
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
            return
        except* NotAdmitted:
            pass
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "code"), FINITE, ids=[name for name, _ in FINITE])
def test_example_in_the_documentation_runs(
    name: str,
    code: str,
    isolation: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_log_tags: None,
) -> None:
    # In this process: an interpreter for each takes longer than the examples, and here it is checked what they leave behind.
    # So does a driver process; the programs below have theirs.
    if isolation == "in_process" and not NEEDS_PROCESS.search(code):
        monkeypatch.setitem(aionn.open.__kwdefaults__, "isolation", "in_process")
    monkeypatch.chdir(ROOT)
    run_with_room(code, name)
    told = capfd.readouterr()
    assert told.out, told.err
    shown = outputs().get(code)
    assert shown is None or DEVICES.sub("device", told.out) == DEVICES.sub("device", shown)


def test_tutorial_shows_the_output_of_its_first_program() -> None:
    assert any("examples/data/shapes_float.tflite" in code for code in outputs())


def program(name: str, code: str) -> Any:
    """A case; the pages for users of other software repeat the stream of README.md in other words."""
    marks = [pytest.mark.long] if name.startswith("coming-from-") and is_endless(code) else []
    return pytest.param(name, code, id=name, marks=marks)


@pytest.mark.forked("any")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "code"), [program(*example) for example in [*ENDLESS, FINITE[0]]])
def test_example_in_the_documentation_is_a_program(name: str, code: str) -> None:
    if is_endless(code):
        pytest.importorskip("av", reason="PyAV is not installed")
    if "WatchPage" in code:
        pytest.importorskip("uvicorn", reason="uvicorn and websockets are not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        lines = list(itertools.islice(running.stdout, LINES_ENOUGH))
        if len(lines) == LINES_ENOUGH:  # A stream: it would go on for as long as its video does.
            running.terminate()
        errors = running.stderr.read()
        running.wait(timeout=RUN_S_MAX)
    assert lines, errors
    assert len(lines) == LINES_ENOUGH or running.returncode == 0, errors


def test_every_public_error_says_what_to_do_next() -> None:
    page = (ROOT / "docs" / "production" / "faults.md").read_text()
    errors = [name for name in aionn.__all__ if is_error(getattr(aionn, name))]
    assert "DeadObject" in errors and "Error" in errors
    for name in errors:
        assert re.search(rf"(?m)^\| `{name}`[ |]", page), f"faults.md has no row for {name}"


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) >= 2
    assert commands[0].endswith("aionn demo") and commands[1].endswith("pytest -n 3")
    assert (ROOT / "README.md").read_text().index("```") == (ROOT / "README.md").read_text().index("```sh")

"""Every example runs, checks its own result, and stays short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
LINES_MAX = 80
RUN_S_MAX = 60


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_checks_itself(example: Path, repository: Path) -> None:
    if "media" in example.read_text():
        pytest.importorskip("av", reason="PyAV is not installed")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]),
    }
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env=environment,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < LINES_MAX

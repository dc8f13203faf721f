"""Every example runs, checks its own result, and stays short."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
PROGRAMS = [path for path in EXAMPLES if path.stem in ("deadline_test", "stream_video", "trace_layers")]
"""Those that run pytest, that last, and that trace their whole process."""

HERE = [path for path in EXAMPLES if path not in PROGRAMS]
LINES_MAX = 80
RUN_S_MAX = 60


@pytest.mark.sampled(3)
@pytest.mark.parametrize("example", HERE, ids=lambda path: path.stem)
def test_example_runs_and_checks_itself(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # In this process: an interpreter for each takes longer than most of them, and here it is checked what they leave behind.
    runpy.run_path(str(example), run_name="__main__")
    assert capfd.readouterr().err == ""


@pytest.mark.forked("any")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("example", [*PROGRAMS, HERE[0]], ids=lambda path: path.stem)
@pytest.mark.thorough
def test_example_is_a_program(example: Path, repository: Path) -> None:
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


def test_application_without_a_camera_says_how_it_runs_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    application = EXAMPLES[0].parent / "tutorial" / "application.py"
    monkeypatch.setattr(sys, "argv", [str(application), "--video", "/dev/video250", "--seconds", "0.1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(application), run_name="__main__")
    told = str(ended.value.code)
    assert told.startswith("camera /dev/video250: ") and "there is no such camera" in told
    assert told.endswith("without --video and --audio, a clip and a recording replace camera and microphone")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < LINES_MAX

"""The whole demo in terminals of usual widths, in a pipe, and without colours."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.aionn.reports.test_terminal import in_terminal, plain

DEMO = "from aionn.cli.main import main; main(['demo'])"
RUN_S_MAX = 100
CLASSES = "\nclasses "
WORDS = re.compile(r"words (\w+, ){20,29}\w+")


@pytest.mark.long
@pytest.mark.parametrize("width", [60, 80, 120])
def test_demo_fits_its_terminal(width: int) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    shown = plain(in_terminal(width, DEMO))
    lines = re.split(r"[\r\n]+", shown)
    assert [line for line in lines if len(line.rstrip()) > width] == []
    words = " ".join(shown.split())  # The place where a line ends depends on the figures before it.
    assert "accuracy 100.0%" in words and "video" in words and "audio" in words
    assert CLASSES in shown and WORDS.search(words)


@pytest.mark.long
@pytest.mark.parametrize("colours", ["", "1"])
def test_demo_in_a_pipe_is_plain_text(colours: str) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    environment = {**os.environ, "NO_COLOR": colours}
    done = subprocess.run(
        [sys.executable, "-c", DEMO], capture_output=True, text=True, timeout=RUN_S_MAX, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert CLASSES in done.stdout and WORDS.search(done.stdout)
    assert (
        "accuracy 100.0%" in done.stdout
        and "\x1b" not in done.stdout + done.stderr
        and "\r" not in done.stdout
    )

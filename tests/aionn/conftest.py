"""The command line in this process: most of what a command tells needs no process of its own, which takes a second to start."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aionn.cli.main import main

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aionn_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in this process: ``aionn_here("run", path)``, for a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        told = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return subprocess.CompletedProcess(arguments, end.value.code, told.out, told.err)

    return run

"""The command line in this process, since one of its own takes a second to start; and an end to calls that wait for a file."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aionn.cli.main import main

Command = Callable[..., "subprocess.CompletedProcess[str]"]
WAIT_S_MAX = 60


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


@pytest.fixture(scope="session")
def lack_of_cuda() -> str | None:
    """Why the device ``ort-cuda`` cannot be used; None if it can. Once for all: what CUDA opens stays in the process, and is not
    left behind by the test that is the first to use it.
    """
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    from tests.aionn.drivers.onnxruntime.provider import why_not

    return why_not("ort-cuda")


@pytest.fixture
def ends_at_once() -> Iterator[None]:
    """Ends a call of the main thread that waits: opening a pipe without the flag would do so for ever."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(WAIT_S_MAX)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)

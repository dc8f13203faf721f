"""The command line in this process, since one of its own takes a second to start; forked driver processes, for the same reason; and
an end to calls that wait for a file.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aionn.cli.main import main
from aionn.service.client.supervisor import StartConditions
from tests.support.fork_server import ForkedStarts, ForkServer, Kinds

Command = Callable[..., "subprocess.CompletedProcess[str]"]
WAIT_S_MAX = 60

MODULES = ("aionn.service.host.process", "aionn.validation", "aionn.drivers.reference")
"""Imported by the process that others are forked from."""

_kinds = pytest.StashKey[Kinds]()
"""Which of the processes that the present test starts are forked."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("forked")
    kinds: Kinds = mark.args[0] if mark else "product"
    item.session.stash[_kinds] = kinds


@pytest.fixture(scope="session", autouse=True)
def forked_starts(request: pytest.FixtureRequest) -> Iterator[ForkedStarts | None]:
    """Driver processes are forked from one that has imported what they need; with ``--long`` each is executed.

    The mark ``forked("none")`` is for tests whose claims are about the start of a process, ``forked("any")`` for tests that start
    Python themselves, and make no claim about that.
    """
    if request.config.getoption("--long"):
        yield None
        return
    stash = request.session.stash
    environment = StartConditions.now("reference", "reference", None).environment
    server = ForkServer(MODULES, environment)
    starts = ForkedStarts(server, lambda: stash[_kinds])
    yield starts
    starts.end()
    server.close()


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

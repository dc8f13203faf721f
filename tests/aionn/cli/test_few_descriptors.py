"""A low limit of file descriptors is raised as far as the system allows; a command that meets it names it in one sentence."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import aionn
from aionn.cli import commands
from aionn.cli import main as entry

RUN_S_MAX = 60
DIGITS = Path(__file__).parents[3] / "examples" / "data" / "digits_float.tflite"
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize("limit", [5, 40])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["run", str(DIGITS)], id="run"),
        *(pytest.param([name], id=name, marks=pytest.mark.long) for name in ("devices", "doctor")),
    ],
)
@pytest.mark.thorough
def test_command_with_few_descriptors_does_its_work_or_names_the_limit(
    arguments: list[str], limit: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aionn", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert "Traceback" not in done.stderr
    if done.returncode == 2:
        last = done.stderr.splitlines()[-1]
        assert last.startswith("aionn: ")
        assert f"this process may have {limit} file descriptors (RLIMIT_NOFILE): raise the limit" in last
    else:
        assert done.returncode in (0, 1)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (64, 4096, 256),
        (64, UNLIMITED, 256),
        (64, 100, 100),
        (100, 100, None),
        (256, 4096, None),
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_low_limit_is_raised_as_far_as_the_system_allows(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    entry._allow_descriptors()
    assert calls == ([] if raised is None else [(raised, hard)])


def loader_failure() -> BaseException:
    return ImportError("libx.so: cannot open shared object file: Too many open files")


def cause() -> BaseException:
    error = aionn.GeneralFailure("the device is lost")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    return error


def context() -> BaseException:
    error = AttributeError("_ssock")
    error.__context__ = OSError(errno.EMFILE, "Too many open files")
    return error


def group() -> BaseException:
    return BaseExceptionGroup("tasks", [ValueError("x"), BaseExceptionGroup("inner", [cause()])])


def failing(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise failure

    monkeypatch.setattr(commands, "app", fail)
    entry.main(["devices"])


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (loader_failure, "no file descriptor is left"),
        (cause, "the device is lost"),
        (context, "no file descriptor is left"),
        (group, "the device is lost"),
    ],
)
def test_limit_that_is_met_is_named_wherever_it_is_in_the_causes(
    failure: Callable[[], BaseException],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        failing(failure(), monkeypatch)
    assert ended.value.code == 2
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert capsys.readouterr().err == (
        f"aionn: {text}; this process may have {allowed} file descriptors (RLIMIT_NOFILE): "
        "raise the limit, such as by `ulimit -n 1024`\n"
    )


def test_other_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        failing(ZeroDivisionError(), monkeypatch)

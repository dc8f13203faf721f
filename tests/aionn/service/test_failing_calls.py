"""Whichever system call fails, in the application or in the driver process: an error of the package or success, and no leak."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.server_scope import server_scope

HERE = Path(__file__).parent
RUN_S_MAX = 100
START_S_MAX = 30

SHORTAGES = ("mmap:ENOMEM", "fallocate:ENOSPC", "memfd_create:EMFILE", "eventfd:EMFILE", "fcntl_dup:EMFILE")
"""What making memories, queues and copies of descriptors needs."""

STARTS = ("socketpair:EMFILE", "fork:EAGAIN", "pipe:EMFILE", "pidfd_open:EMFILE", "pthread_create:EAGAIN")
"""What starting a driver process needs."""

TRAFFIC = ("recvmsg:ENOMEM", "sendmsg:ENOBUFS", "epoll_ctl:ENOMEM")
"""What every message needs."""

PASSING = (
    "recvmsg:EINTR",
    "recvmsg:EAGAIN",
    "sendmsg:EINTR",
    "sendmsg:EAGAIN",
    "send:EAGAIN",
    "epoll_wait:EINTR",
    "poll:EINTR",
)
"""What is to be tried again: nobody must notice."""

CONNECTIONS = ("socket:EMFILE", "connect:EAGAIN", "send:ENOMEM")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets calls fail, compiled as the native module is: by the machine's compiler, or by zig's."""
    chosen = os.environ.get("CC", "").strip()
    names = [shlex.split(chosen)] if chosen else [["cc"], ["gcc"], ["clang"]]
    command = next((name for name in names if shutil.which(name[0])), None)
    if command is None:
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("there is no C compiler: neither $CC, cc, gcc or clang nor the package ziglang")
        command = [sys.executable, "-m", "ziglang", "cc"]
    path = tmp_path_factory.mktemp("library") / "failing_calls.so"
    subprocess.run(
        [*command, "-shared", "-fPIC", "-O1", "-o", str(path), str(HERE / "failing_calls.c"), "-ldl"],
        check=True,
        timeout=120,
    )
    return path


class Stage(NamedTuple):
    """Where lives are lived.

    Attributes:
        environment: Of every process of it.
        plan: The file that says what fails.
        folder: For sockets and logs.
    """

    environment: dict[str, str]
    plan: Path
    folder: Path


@pytest.fixture(scope=server_scope)
def stage(library: Path, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Stage:
    folder = tmp_path_factory.mktemp("stage")
    plan = folder / "plan"
    plan.write_bytes(bytes(64))
    path = os.pathsep.join(filter(None, (str(repository), str(HERE), os.environ.get("PYTHONPATH"))))
    more = {"LD_PRELOAD": str(library), "FAILING_CALLS_PLAN": str(plan), "PYTHONPATH": path}
    return Stage({**os.environ, **more}, plan, folder)


@pytest.fixture(scope=server_scope)
def server(stage: Stage) -> Iterator[tuple[int, Path]]:
    """A driver process that outlives the lives of its clients, whatever fails in it: one for all tests, or for each."""
    path, log = stage.folder / "device.sock", stage.folder / "server.log"
    command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", str(path), "--quiet"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, env=stage.environment, stderr=stderr, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            end_s = time.monotonic() + START_S_MAX
            while not path.exists():
                assert process.poll() is None and time.monotonic() < end_s, log.read_text()
                time.sleep(0.01)
            yield process.pid, path
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(20)
    assert "Traceback" not in log.read_text(), log.read_text()


Lives = Callable[..., dict[str, dict[str, int]]]


@pytest.fixture(scope=server_scope)
def lives(stage: Stage) -> Iterator[Lives]:
    """Lives lives in an application while the calls fail, every ``step``-th one of each kind: how they ended, by fault.

    The application is one for all tests, or for each: it checks itself after each life that nothing is left.
    """
    log = stage.folder / "application.log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, str(HERE / "failing_calls.py"), str(stage.plan)],
            env=stage.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        told, asked = process.stdout, process.stdin
        assert told is not None and asked is not None

        def live(
            server: tuple[int, Path] | None, faults: list[str], *, step: int = 1, timeout_s: int = RUN_S_MAX
        ) -> dict[str, dict[str, int]]:
            pid, path = (None, None) if server is None else (server[0], str(server[1]))
            request = {"faults": faults, "step": step, "server": pid, "socket_path": path}
            asked.write(json.dumps(request).encode() + b"\n")
            asked.flush()
            is_answered, _, _ = select.select([told], [], [], timeout_s)
            if not is_answered:
                process.kill()
            line = told.readline()
            assert line, log.read_text()
            report = json.loads(line)
            assert report["wrong"] == [], "\n".join(report["wrong"])
            outcomes: dict[str, dict[str, int]] = report["outcomes"]
            return outcomes

        try:
            yield live
        finally:
            asked.close()
            try:
                process.wait(20)
            finally:
                process.kill()


def of(role: str, *groups: tuple[str, ...]) -> list[str]:
    return [f"{role}:{fault}" for group in groups for fault in group]


ROLES = [
    pytest.param(("client", "driver"), id="client and driver"),
    pytest.param(("client",), id="client", marks=pytest.mark.long),
    pytest.param(("driver",), id="driver", marks=pytest.mark.long),
]
"""In which process calls fail: in both, in lives one after the other of one application; or in one, for which there is one."""


def test_shortage_in_the_application_is_an_error_and_passes(lives: Lives, server: tuple[int, Path]) -> None:
    faults = [*of("client", SHORTAGES), "client:socket:EMFILE", "client:connect:EAGAIN"]
    outcomes = lives(server, faults, step=12)
    for fault in of("client", SHORTAGES):
        assert set(outcomes[fault]) == {"ResourceExhausted"}
    assert outcomes["client:socket:EMFILE"] == {"DeviceUnavailable": 1}
    assert outcomes["client:connect:EAGAIN"] == {"success": 1}


def test_shortage_in_the_driver_process_is_an_error_and_passes(
    lives: Lives, server: tuple[int, Path]
) -> None:
    faults = ["driver:mmap:ENOMEM", "driver:fcntl_dup:EMFILE", "driver:accept:EMFILE"]
    outcomes = lives(server, faults, step=16)
    assert set(outcomes["driver:mmap:ENOMEM"]) == {"ResourceExhausted"}
    assert set(outcomes["driver:fcntl_dup:EMFILE"]) == {"ResourceExhausted"}
    assert outcomes["driver:accept:EMFILE"] == {"success": 1}  # The client waits in the backlog.


@pytest.mark.parametrize("roles", ROLES)
def test_interrupted_calls_are_made_again(
    lives: Lives, server: tuple[int, Path], roles: tuple[str, ...]
) -> None:
    interruptions = ("recvmsg:EINTR", "sendmsg:EAGAIN", "sendmsg:EINTR")
    faults = [fault for role in roles for fault in of(role, interruptions)]
    outcomes = lives(server, faults, step=40)
    assert all(set(outcomes[fault]) == {"success"} for fault in faults)
    for role in roles:
        assert outcomes[f"{role}:recvmsg:EINTR"]["success"] >= 2


@pytest.mark.parametrize("roles", ROLES)
def test_connection_that_fails_ends_alone(
    lives: Lives, server: tuple[int, Path], roles: tuple[str, ...]
) -> None:
    outcomes = lives(server, [fault for role in roles for fault in of(role, TRAFFIC)], step=60)
    for role in roles:
        ended = [counts for fault, counts in outcomes.items() if fault.startswith(role)]
        assert sum(sum(counts.values()) for counts in ended) >= 2


def test_too_many_descriptors_under_way_are_refused_and_pass(lives: Lives, server: tuple[int, Path]) -> None:
    (outcomes,) = lives(server, ["client:sendmsg:ETOOMANYREFS"], step=8).values()
    assert outcomes["ResourceExhausted"] >= 2 and set(outcomes) <= {
        "DeviceUnavailable",
        "ResourceExhausted",
        "success",
    }


@pytest.mark.thorough
def test_driver_process_that_cannot_be_started_leaves_nothing(lives: Lives) -> None:
    outcomes = lives(None, ["client:socketpair:EMFILE", "client:pidfd_open:EMFILE"], step=50)
    assert outcomes["client:socketpair:EMFILE"]["DeviceUnavailable"] == 1
    assert outcomes["client:pidfd_open:EMFILE"] == {"DeviceUnavailable": 1}


@pytest.mark.long
@pytest.mark.parametrize("role", ["client", "driver"])
@pytest.mark.parametrize("fault", [*SHORTAGES, *TRAFFIC, *PASSING, *CONNECTIONS, "pthread_create:EAGAIN"])
def test_every_call_fails_once(lives: Lives, server: tuple[int, Path], role: str, fault: str) -> None:
    outcomes = lives(server, of(role, (fault,)), timeout_s=600)
    if fault in PASSING:
        assert set(outcomes[f"{role}:{fault}"]) <= {"success"}


@pytest.mark.long
@pytest.mark.parametrize("role", ["client", "driver"])
@pytest.mark.parametrize("fault", [*SHORTAGES, *STARTS, *TRAFFIC])
def test_every_call_fails_once_around_a_process_of_its_own(lives: Lives, role: str, fault: str) -> None:
    lives(None, of(role, (fault,)), timeout_s=600)

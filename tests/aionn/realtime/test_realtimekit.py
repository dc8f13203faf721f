"""RealtimeKit: granting, refusing, slow, absent and talking nonsense, on a private bus with a real daemon."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aionn.realtime.children import LIMITS, OPEN, as_root, run_child, without_sys_nice

pytestmark = pytest.mark.forked("any")

pytest.importorskip("jeepney")

ASK = """
from aionn.realtime.realtimekit import ask_realtimekit
import msgspec
begun = time.monotonic()
found = ask_realtimekit(timeout_s=0.3)
say(**msgspec.to_builtins(found), is_quick=time.monotonic() - begun < 20)
"""


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a private bus."""
    if shutil.which("dbus-daemon") is None:
        pytest.skip("dbus-daemon is not installed")
    path = tmp_path_factory.mktemp("bus") / "socket"
    command = [
        "dbus-daemon",
        "--session",
        "--nofork",
        "--nopidfile",
        f"--address=unix:path={path}",
        "--print-address",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            if not daemon.stdout.readline():
                pytest.skip("dbus-daemon cannot run here")
            yield f"unix:path={path}"
        finally:
            daemon.terminate()


@contextlib.contextmanager
def kit(bus: str, how: str) -> Iterator[dict[str, str]]:
    """Variables of an environment in which RealtimeKit behaves in this way."""
    service = [sys.executable, str(Path(__file__).with_name("granting_kit.py")), bus, how]
    with subprocess.Popen(service, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "ready\n"
            yield {"DBUS_SYSTEM_BUS_ADDRESS": bus}
        finally:
            running.terminate()


@as_root
def test_realtimekit_grants_threads_and_the_watchdog_one_by_one(bus: str) -> None:
    code = """
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.scheduling import Mode, Scheduling
scheduling = Scheduling.open(Mode.REQUIRED)
LOW, MEDIUM, HIGH = SchedulingClass
rows = [scheduling.acquire(c, "test") for c in (HIGH, MEDIUM, LOW, HIGH)]
changed = scheduling.change(threading.get_native_id(), MEDIUM)
lowered = [scheduling.change(threading.get_native_id(), each) for each in (LOW, HIGH)]
lowered.append(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)
limits = resource.getrlimit(resource.RLIMIT_RTTIME)
watchdog = scheduling._end.pid
say(changed=changed, lowered=lowered, way=scheduling.permission.way,
    rows=[[row.state, row.policy, row.priority] for row in rows], limits=limits,
    watchdog=[os.sched_getscheduler(watchdog) & ~os.SCHED_RESET_ON_FORK, os.sched_getparam(watchdog).sched_priority],
    left=scheduling.close(), policy=os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)
"""
    with kit(bus, "grant") as environment:
        found = run_child(code, before=without_sys_nice(), environment=environment)
    assert found["way"] == "RealtimeKit"
    assert not found["changed"], "no question to another process in the path of an execution"
    assert found["lowered"] == [True, False, 0], "a LOW job must not keep the class of a HIGH one"
    assert found["rows"] == [
        ["real time", "SCHED_RR", 10],
        ["real time", "SCHED_RR", 5],
        ["ordinary", "SCHED_OTHER", 0],
        ["real time", "SCHED_RR", 10],
    ]
    assert found["limits"] == [200_000, 200_000], (
        "RealtimeKit grants nothing to a process with a higher limit"
    )
    assert found["watchdog"] == [2, 15]
    assert (found["left"], found["policy"]) == ([], 0)


@as_root
@pytest.mark.thorough
def test_runtime_gets_the_threads_of_both_processes_from_realtimekit(bus: str) -> None:
    code = """
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        async with net.burst() as burst:
            await burst.execute([X])
            report = await runtime.realtime()
    say(permission=report.permission, rows=rows(report), after=os.sched_getscheduler(0) & ~FLAG)
asyncio.run(main())
"""
    with kit(bus, "grant") as environment:
        found = run_child(OPEN + code, before=without_sys_nice(), environment=environment)
    assert "permitted by RealtimeKit;" in found["permission"] and found["after"] == 0
    granted = ["real time", "SCHED_RR", 10]
    assert found["rows"]["application"]["event loop"] == found["rows"]["reference"]["control"] == granted
    assert granted in [row for name, row in found["rows"]["reference"].items() if "burst" in name]


@pytest.mark.sampled(4)
@as_root
@pytest.mark.parametrize(
    ("how", "cause", "words"),
    [
        ("refuse", "refused", "RealtimeKit: it rejects the request (not today)"),
        ("silent", "slow", "RealtimeKit: no answer within 1 s"),
        ("low", "limit too low", "RealtimeKit grants priorities up to 2, expected at least 3"),
        ("nonsense", "failed", "MaxRealtimePriority: expected a number"),
    ],
)
def test_realtimekit_that_does_not_grant_is_told(bus: str, how: str, cause: str, words: str) -> None:
    code = """
from aionn.realtime.permission import ask
import msgspec
found = ask()
say(**msgspec.to_builtins(found), told=str(found))
"""
    with kit(bus, how) as environment:
        found = run_child(code, before=without_sys_nice(), environment=environment)
    assert not found["priorities"]
    refusal = found["refusals"][1]
    assert (refusal["way"], refusal["cause"]) == ("RealtimeKit", cause)
    assert words in found["told"]


def test_bus_without_realtimekit_says_absent(bus: str) -> None:
    # The bus answers on a busy machine too, if there is time for it.
    found = run_child(ASK.replace("0.3", "20"), environment={"DBUS_SYSTEM_BUS_ADDRESS": bus})
    assert found["cause"] == "absent" and "not installed" in found["sentence"]


def test_machine_without_a_bus_says_absent() -> None:
    found = run_child(ASK)
    assert found["cause"] == "absent" and "no system bus can be reached" in found["sentence"]


@pytest.mark.parametrize("address", ["nonsense", "tcp:host=localhost", "unix:", ";", "unix:path"])
def test_address_that_makes_no_sense_says_absent(address: str) -> None:
    found = run_child(ASK, environment={"DBUS_SYSTEM_BUS_ADDRESS": address})
    assert found["cause"] == "absent"


def test_missing_library_says_how_to_install_it() -> None:
    found = run_child("sys.modules['jeepney'] = None\n" + ASK)
    assert found["sentence"] == "jeepney is not installed: pip install 'aionn[realtimekit]'"


def read_line(client: socket.socket) -> None:
    """What a client says, up to the end of a line."""
    said = b""
    while not said.endswith(b"\r\n") and (more := client.recv(1)):
        said += more


def greet(client: socket.socket) -> None:
    """The bus's part of the authentication, by the D-Bus specification."""
    read_line(client)
    client.sendall(b"OK 0123456789abcdef0123456789abcdef\r\n")
    read_line(client)


BAD_BUSES: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "never greets": (lambda client: client.recv(1 << 16), "slow"),
    "greets and is silent": (greet, "slow"),
    "hangs up": (lambda client: client.close(), "absent"),
    "greets and hangs up": (lambda client: (greet(client), client.close()), "failed"),
    "refuses": (lambda client: (read_line(client), client.sendall(b"REJECTED\r\n")), "refused"),
    "sends noise": (lambda client: (greet(client), client.sendall(b"noise" * 100)), "failed"),
    "sends noise for a greeting": (
        lambda client: (read_line(client), client.sendall(b"\xff\r\n")),
        "refused",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BAD_BUSES)
def test_bad_bus_is_told_in_time(name: str, tmp_path: Path) -> None:
    behave, cause = BAD_BUSES[name]
    path = tmp_path / "bus"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        clients: list[socket.socket] = []

        def serve() -> None:
            client, _ = listening.accept()
            clients.append(client)
            with contextlib.suppress(OSError):
                behave(client)

        server = threading.Thread(target=serve, name="bad bus")
        server.start()
        try:
            found = run_child(ASK, environment={"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={path}"})
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            server.join(30)
            for client in clients:
                client.close()
    assert found["is_quick"]
    assert found["cause"] == cause, found["sentence"]


@pytest.mark.skipif(not LIMITS, reason="the number of the system call is not known for this processor")
def test_limit_that_a_sandbox_keeps_from_being_lowered_is_a_reason() -> None:
    code = f"""
import errno, msgspec
from aionn.realtime.realtimekit import Offer, make_realtime
refuse({LIMITS}, errno.EPERM)
say(**msgspec.to_builtins(make_realtime(Offer(20, 200_000), os.getpid(), threading.get_native_id(), 10)))
"""
    found = run_child(code)
    assert found["cause"] == "system call refused by a filter"
    assert found["sentence"].startswith("RLIMIT_RTTIME cannot be lowered")

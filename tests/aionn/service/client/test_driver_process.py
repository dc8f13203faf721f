"""Driver processes die, and applications die; the other side notices in time and nothing is left."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.errors import ErrorStatus
from aionn.observability.tracing import start_tracing, stop_tracing
from aionn.runtime.background import Background
from aionn.service.client.device import RemoteDevice
from aionn.service.client.supervisor import DriverProcess, kill_all
from aionn.service.entry import main
from aionn.service.wire.protocol import PROTOCOL_VERSION, Call, Failed, Hello, Reply, decode, encode

NOTICED_S_MAX = 30.0


def stop(pid: int) -> None:
    """Stops a process, and returns once every thread of it has stopped: kill() alone only asks for it."""
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + 10
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end_s, "the process does not stop"


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # The thread has ended by now.


@pytest.fixture
def digits(example_data: Path) -> Path:
    return example_data / "digits_float.tflite"


@pytest.fixture
def silence() -> np.ndarray:
    return np.full((1, 49, 40, 1), np.log(1e-6), dtype=np.float32)


async def test_program_that_ends_without_closing_kills_a_process_that_is_stopped() -> None:
    process = await DriverProcess.start("reference", "reference")
    stop(process.pid)
    kill_all()
    with anyio.fail_after(NOTICED_S_MAX):
        assert await process.wait() == -signal.SIGKILL
    kill_all()  # Not one that has ended.
    process.socket.close()
    await process.aclose()
    kill_all()


@pytest.mark.parametrize(
    "name",
    ["--spare", *(pytest.param(name, marks=pytest.mark.long) for name in ("-h", "--fd", "-1", "a b=c"))],
)
async def test_name_of_a_device_may_look_like_an_option(background: Background, name: str) -> None:
    device = RemoteDevice("reference", name, background.tasks)
    try:
        await device.connect()
        assert device.pid is not None
    finally:
        await device.aclose()


async def test_killed_driver_ends_every_pending_await(digits: Path, silence: np.ndarray) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(digits)
        (device,) = runtime.devices
        pid = device.pid
        assert pid is not None
        async with net.burst() as burst:
            await burst.execute([silence])
            stop(pid)  # so that everything below is pending for certain
            errors: list[aionn.Error] = []

            async def expect_death(execution: object) -> None:
                try:
                    await execution  # type: ignore[misc]
                except aionn.Error as e:
                    errors.append(e)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_death, net.execute([silence]))
                tasks.start_soon(expect_death, net.execute([silence], priority="high"))
                tasks.start_soon(expect_death, burst.execute([silence]))
                tasks.start_soon(expect_death, net.execute_fenced([silence]).wait())
                await anyio.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
            assert time.monotonic() - killed_s < NOTICED_S_MAX
            assert [type(e) for e in errors] == [aionn.DeadObject] * 4
            with pytest.raises(aionn.DeadObject):
                await burst.execute([silence])
        with pytest.raises(aionn.DeadObject):
            await net.execute([silence])
        again = await runtime.compile(digits)
        assert device.pid is not None and device.pid != pid
        assert int((await again.execute([silence])).outputs[0].argmax()) == 0


async def test_driver_killed_in_mid_stream_ends_the_stream(digits: Path, silence: np.ndarray) -> None:
    async def endless() -> AsyncIterator[np.ndarray]:
        while True:
            yield silence

    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(digits)
        pid = runtime.devices[0].pid
        assert pid is not None
        async with net.burst() as burst:
            seen = 0
            killed_s = 0.0
            with pytest.raises(aionn.DeadObject):
                async for _ in burst.stream(endless()):
                    seen += 1
                    if seen == 5:
                        os.kill(pid, signal.SIGKILL)
                        killed_s = time.monotonic()
            assert time.monotonic() - killed_s < NOTICED_S_MAX


async def test_driver_that_dies_while_compiling_is_started_again(digits: Path) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        (device,) = runtime.devices
        await device.status()
        pid = device.pid
        assert pid is not None and isinstance(device.hal, RemoteDevice)
        connection = device.hal._connection
        assert connection is not None
        stop(pid)
        with pytest.raises(aionn.DeadObject):
            async with anyio.create_task_group() as tasks:

                async def kill_once_asked() -> None:
                    while connection.is_quiet():
                        await anyio.sleep(0.001)
                    os.kill(pid, signal.SIGKILL)

                tasks.start_soon(kill_once_asked)
                try:
                    await runtime.compile(digits)
                except aionn.DeadObject as e:
                    dead = e
            raise dead
        await runtime.compile(digits)


@pytest.mark.forked("any")
def test_killed_application_takes_its_driver_along(digits: Path, repository: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, anyio, aionn, numpy as np

        async def main():
            async with aionn.open(drivers=["reference"]) as runtime:
                net = await runtime.compile(sys.argv[1])
                async with net.burst() as burst:
                    value = np.zeros((1, 49, 40, 1), np.float32)
                    await burst.execute([value])
                    print(runtime.devices[0].pid, flush=True)
                    while True:
                        await burst.execute([value])

        anyio.run(main)
        """
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]),
    }
    application = subprocess.Popen(
        [sys.executable, "-c", script, str(digits)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert application.stdout is not None
        driver = os.pidfd_open(int(application.stdout.readline()))
    finally:
        application.kill()
        application.wait()
        assert application.stdout is not None
        application.stdout.close()
    try:
        readable, _, _ = select.select([driver], [], [], NOTICED_S_MAX)
        assert readable, "the driver process outlived its application"
    finally:
        os.close(driver)


async def test_stopped_driver_does_not_hold_a_deadline_up(digits: Path, silence: np.ndarray) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(digits)
        expected = (await net.execute([silence])).outputs[0]
        pid = runtime.devices[0].pid
        assert pid is not None
        async with net.burst() as burst:
            await burst.execute([silence])
            stop(pid)
            try:
                with pytest.raises(aionn.MissedDeadline, match="running"):
                    await burst.execute([np.zeros_like(silence)], deadline=aionn.after(0.05))
            finally:
                os.kill(pid, signal.SIGCONT)
            # The late result is not taken for the answer to the next request.
            np.testing.assert_array_equal((await burst.execute([silence])).outputs[0], expected)


async def test_cancelled_start_leaves_no_process(digits: Path) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        for delay_s in (0.0, 0.005, 0.02, 0.1):
            with anyio.move_on_after(delay_s):
                await runtime.devices[0].status()
        await runtime.compile(digits)


@pytest.mark.parametrize("limits", ["shortened", pytest.param("whole", marks=pytest.mark.long)])
async def test_runtime_closes_in_bounded_time_around_a_stopped_driver(
    digits: Path, silence: np.ndarray, monkeypatch: pytest.MonkeyPatch, limits: str
) -> None:
    if limits == "shortened":  # Those of the parts: each of them passes here.
        monkeypatch.setattr("aionn.service.client.supervisor.END_S_MAX", 0.3)
        monkeypatch.setattr("aionn.service.client.prepared.FREE_S_MAX", 0.2)
        monkeypatch.setattr("aionn.burst.controller.END_S_MAX", 0.2)
        monkeypatch.setattr("aionn.runtime.executions.burst.CLOSE_S_MAX", 0.2)
    async with aionn.open(drivers=["reference"]) as runtime:
        net = await runtime.compile(digits)
        async with net.burst() as burst:
            await burst.execute([silence])
            pid = runtime.devices[0].pid
            assert pid is not None
            stop(pid)
            began_s = time.monotonic()
    assert time.monotonic() - began_s < 20.0
    assert not Path(f"/proc/{pid}").exists()


async def test_what_a_driver_writes_to_standard_error_goes_to_a_logger(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "loud_driver.py"
    module.write_text(
        "import sys\nfrom aionn.drivers.reference import ReferenceDevice\n"
        "class Loud(ReferenceDevice):\n"
        "    def __init__(self, name):\n"
        "        super().__init__(name)\n"
        "        print('INFO: hello', file=sys.stderr, flush=True)\n"
        "        print('engine: something odd', file=sys.stderr, flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level("INFO", logger="aionn.driver"):
        async with aionn.open(drivers={"loud": "loud_driver:Loud"}) as runtime:
            await runtime.devices[0].status()
    said = [
        (r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("aionn.driver")
    ]
    assert said == [
        ("aionn.driver.loud", "INFO", "INFO: hello"),
        ("aionn.driver.loud", "WARNING", "engine: something odd"),
    ]


async def test_death_is_seen_although_a_child_of_the_driver_keeps_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    (tmp_path / "forking_driver.py").write_text(
        "import os, time\nfrom pathlib import Path\nfrom aionn.drivers.reference import ReferenceDevice\n"
        "class Forking(ReferenceDevice):\n"
        "    def __init__(self, name):\n"
        "        super().__init__(name)\n"
        "        child = os.fork()\n"
        "        if not child:\n"
        "            os.close(2)\n"
        "            time.sleep(600)\n"
        "            os._exit(0)\n"
        "        Path(__file__).with_name('child').write_text(str(child))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    device = RemoteDevice("forking_driver:Forking", "forking", background.tasks)
    await device.connect()
    pid = device.pid
    assert pid is not None
    try:
        stop(pid)
        with anyio.fail_after(NOTICED_S_MAX), pytest.raises(aionn.DeadObject):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    _kill_when,
                    pid,
                    lambda: device._connection is not None and device._connection.channel.pending_count > 0,
                )
                try:
                    await device.status()
                except aionn.DeadObject as e:
                    dead = e
            raise dead
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        await device.aclose()


async def test_process_whose_loop_is_stuck_ends_by_itself_when_its_client_is_gone(
    background: Background,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "stuck_driver.py").write_text(
        "import sys, time\n"
        "def Device(*arguments):\n"
        "    print('it sleeps', file=sys.stderr, flush=True)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process = await DriverProcess.start("stuck_driver:Device", "stuck")
    try:
        background.tasks.start_soon(process.log_output)
        with anyio.fail_after(30):
            while "it sleeps" not in caplog.text:
                await anyio.sleep(0.01)
        process.socket.close()
        with anyio.fail_after(NOTICED_S_MAX):
            assert await process.wait() == 0
    finally:
        process.kill()
        await process.aclose()


async def test_end_of_a_process_that_cannot_be_watched_is_awaited_beside_other_tasks(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await DriverProcess.start("reference", "reference")
    background.tasks.start_soon(process.log_output)
    watch, ended = anyio.wait_readable, []

    async def refuse(fd: int) -> None:
        if fd == process._pidfd:
            raise OSError(errno.ENOSPC, "no watch is left")
        await watch(fd)

    async def wait() -> None:
        ended.append(await process.wait())

    monkeypatch.setattr(anyio, "wait_readable", refuse)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            assert ended == []
            process.kill()
        assert ended == [-signal.SIGKILL]
    finally:
        process.socket.close()
        await process.aclose()


async def test_process_of_another_is_not_killed_by_a_forked_child(background: Background) -> None:
    process = await DriverProcess.start("reference", "reference")
    background.tasks.start_soon(process.log_output)
    try:
        child = os.fork()
        if child == 0:
            process.kill()
            os._exit(0)
        assert await anyio.to_thread.run_sync(os.waitpid, child, 0) == (child, 0)
        process.socket.close()
        with anyio.fail_after(30):
            assert await process.wait() == 0, "it has ended by itself"
    finally:
        await process.aclose()


async def test_child_that_is_forked_during_a_start_has_no_copy_of_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs: list[tuple[socket.socket, socket.socket]] = []
    statuses: list[int] = []
    make = socket.socketpair

    def pair(*arguments: int) -> tuple[socket.socket, socket.socket]:
        pairs.append(make(*arguments))
        return pairs[-1]

    def spawn(*_: object) -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if {each.fileno() for each in pairs[-1]} == {-1} else 1)
        statuses.append(os.waitpid(child, 0)[1])
        raise OSError("no process is started")

    monkeypatch.setattr("aionn.service.client.supervisor.socket.socketpair", pair)
    monkeypatch.setattr("aionn.service.client.supervisor._spawn", spawn)
    with pytest.raises(aionn.DeviceUnavailable):
        await DriverProcess.start("reference", "reference")
    assert statuses == [0]


async def test_driver_process_adds_to_the_trace_of_its_application(
    background: Background, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    start_tracing(path, process="the application")
    try:
        device = RemoteDevice("reference", "reference", background.tasks)
        await device.connect()
        await device.aclose()
    finally:
        stop_tracing()
    told = path.read_text()
    assert "the application" in told and "driver of reference" in told


async def _kill_when(pid: int, is_time: Callable[[], bool]) -> None:
    while not is_time():
        await anyio.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("left_out", ["--fd", "--driver", "--name"])
def test_command_of_a_driver_process_refuses_to_start_without_one_of_its_arguments(
    left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--fd": "99", "--driver": "reference", "--name": "reference"}
    del arguments[left_out]
    with pytest.raises(SystemExit) as caught:
        main([word for pair in arguments.items() for word in pair])
    assert caught.value.code == 2 and f"required: {left_out}" in capsys.readouterr().err


WITHOUT_THREADS = """
import sys, threading
from aionn.service.host import process as host

start = threading.Thread.start

def refuse(thread):
    if thread.name.startswith("aionn-"):
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = refuse
host.main(sys.argv[1:])
"""


@pytest.mark.forked("any")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("hang_after", [["--hang-after=60"], []])
async def test_driver_process_without_threads_tells_its_client_and_ends(hang_after: list[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = ["--driver=reference", "--name=reference", f"--fd={theirs.fileno()}", *hang_after]
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_THREADS, *arguments],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        theirs.close()
        payload, _, _ = encode(Call(1, Hello(PROTOCOL_VERSION)))
        ours.send(payload)
        ours.settimeout(30.0)
        reply = decode(await anyio.to_thread.run_sync(ours.recv, 1 << 16), [])
        assert isinstance(reply, Reply) and isinstance(reply.body, Failed)
        assert reply.body.status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        assert reply.body.message.startswith("driver process: no thread can be started")
        ours.close()
        _, told = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=30))
        assert "Traceback" not in told
    finally:
        process.kill()
        process.wait()

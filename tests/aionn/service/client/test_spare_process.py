"""A spare process stands in for a driver process that has died, and costs nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import aionn
from aionn.hal import DeviceStatus
from aionn.runtime.background import Background
from aionn.service import entry
from aionn.service.client import device as client
from aionn.service.client import spare
from aionn.service.client.device import RemoteDevice
from aionn.service.client.spare import Spare
from aionn.service.client.supervisor import DriverProcess, StartConditions

READY_S_MAX = 60.0
GONE_S_MAX = 30.0

DRIVER = """
import os
from pathlib import Path
from aionn.drivers.reference import ReferenceDevice

class Device(ReferenceDevice):
    def __init__(self, name):
        super().__init__(name)
        with open(Path(__file__).with_name("made"), "a") as file:
            file.write(f"{os.getpid()} VERSION\\n")
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare process is started as soon as the device serves."""
    monkeypatch.setattr(spare, "SERVED_S", 0.0)
    monkeypatch.setattr(spare, "QUIET_S_MAX", 0.0)


@pytest.fixture
async def device(background: Background) -> AsyncIterator[RemoteDevice]:
    own = RemoteDevice("reference", "reference", background.tasks, spare=True)
    yield own
    await own.aclose()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each process that is started, whether it is a spare one."""
    found: list[bool] = []
    start = DriverProcess.start

    async def record(*given: object, is_spare: bool = False, **more: object) -> DriverProcess:
        found.append(is_spare)
        return await start(*given, is_spare=is_spare, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(DriverProcess, "start", record)
    return found


async def ready(device: RemoteDevice) -> int:
    """The device's spare process, when it is ready."""
    with anyio.fail_after(READY_S_MAX):
        while device.spare_pid is None:
            await anyio.sleep(0.005)
        return device.spare_pid


async def kill(device: RemoteDevice) -> int:
    """Kills the driver process and returns when that is known."""
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(GONE_S_MAX):
        while device.pid is not None:
            await anyio.sleep(0.001)
    return pid


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def gone(pid: int) -> None:
    with anyio.fail_after(GONE_S_MAX):
        while exists(pid):
            await anyio.sleep(0.005)


async def test_spare_process_takes_over_and_gets_a_successor(
    device: RemoteDevice, started: list[bool]
) -> None:
    await device.connect()
    for _ in range(2):
        waiting = await ready(device)
        assert waiting != device.pid
        await kill(device)
        assert await device.status() == DeviceStatus.AVAILABLE
        assert device.pid == waiting
    assert started.count(False) == 1


async def test_spare_process_makes_no_device_before_it_is_needed(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counted_driver.py").write_text(DRIVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    device = RemoteDevice("counted_driver:Device", "counted", background.tasks, spare=True)
    await device.connect()
    first, waiting = device.pid, await ready(device)
    assert (tmp_path / "made").read_text() == f"{first} VERSION\n"
    await kill(device)
    await device.connect()
    assert (tmp_path / "made").read_text() == f"{first} VERSION\n{waiting} VERSION\n"
    await device.aclose()


@pytest.mark.thorough
async def test_spare_process_executes_what_its_files_say_when_it_is_needed(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "edited_driver.py"
    module.write_text(DRIVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    device = RemoteDevice("edited_driver:Device", "edited", background.tasks, spare=True)
    await device.connect()
    waiting = await ready(device)
    module.write_text(DRIVER.replace("VERSION", "EDITED VERSION"))
    await kill(device)
    await device.connect()
    assert (tmp_path / "made").read_text().splitlines()[-1] == f"{waiting} EDITED VERSION"
    await device.aclose()


@pytest.mark.parametrize("what", ["variable", "removed variable", "folder", "module path", "processors"])
def test_what_a_process_gets_from_its_application_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("AIONN_LITERT_THREADS", "1")
    processors = os.sched_getaffinity(0)
    if what == "processors" and len(processors) < 2:
        pytest.skip("there is one processor")
    before = StartConditions.now("reference", "reference", None)
    assert StartConditions.now("reference", "reference", None) == before
    try:
        match what:
            case "variable":
                monkeypatch.setenv("AIONN_LITERT_THREADS", "2")
            case "removed variable":
                monkeypatch.delenv("AIONN_LITERT_THREADS")
            case "folder":
                monkeypatch.chdir(tmp_path)
            case "module path":
                monkeypatch.syspath_prepend(str(tmp_path))
            case "processors":
                os.sched_setaffinity(0, {min(processors)})
        assert StartConditions.now("reference", "reference", None) != before
    finally:
        os.sched_setaffinity(0, processors)


def command_line(pid: int) -> list[str]:
    """Without the number of the socket, which is the process's own."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    del words[words.index("--fd") + 1]
    return words


@pytest.mark.forked("none")
@pytest.mark.thorough
async def test_spare_process_has_the_command_line_of_any_other(background: Background) -> None:
    device = RemoteDevice("reference", "reference", background.tasks, spare=True, hang_after_s=600.0)
    await device.connect()
    assert device.pid is not None
    own, spares = command_line(device.pid), command_line(await ready(device))
    assert "--hang-after=600.0" in own
    assert spares == [*own[:-1], "--spare", ""]
    await device.aclose()


async def test_spare_process_from_other_conditions_is_discarded(
    device: RemoteDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    await device.connect()
    waiting = await ready(device)
    await kill(device)
    monkeypatch.setenv("AIONN_LITERT_THREADS", "7")
    await device.connect()
    assert device.pid != waiting
    await gone(waiting)


async def test_spare_process_that_has_died_is_reaped_and_the_driver_started(device: RemoteDevice) -> None:
    await device.connect()
    waiting = await ready(device)
    os.kill(waiting, signal.SIGKILL)
    await gone(waiting)
    await kill(device)
    assert await device.status() == DeviceStatus.AVAILABLE
    assert device.pid not in (None, waiting)


async def test_spare_process_that_does_not_serve_is_followed_by_a_start(
    device: RemoteDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    await device.connect()
    waiting = await ready(device)
    os.kill(waiting, signal.SIGSTOP)
    await kill(device)
    monkeypatch.setattr(client, "START_S_MAX", 0.2)
    serve = RemoteDevice._serve

    async def serve_with_time(self: RemoteDevice, peer: DriverProcess) -> object:
        if peer.pid != waiting:
            monkeypatch.setattr(client, "START_S_MAX", 30.0)
        return await serve(self, peer)

    monkeypatch.setattr(RemoteDevice, "_serve", serve_with_time)
    assert await device.status() == DeviceStatus.AVAILABLE
    assert device.pid not in (None, waiting)


async def test_driver_that_dies_before_it_has_served_for_long_has_no_spare_process(
    device: RemoteDevice, started: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "SERVED_S", 60.0)
    for _ in range(3):
        await device.connect()
        await kill(device)
    assert started == [False] * 3


async def test_no_spare_process_is_started_for_a_process_that_serves_no_more(started: list[bool]) -> None:
    keeper = Spare("reference", "reference", None, is_quiet=lambda: True, is_serving=lambda: False)
    with anyio.fail_after(READY_S_MAX):
        await keeper.keep()
    assert not started and await keeper.take() is None


async def test_spare_process_waits_for_a_quiet_moment(
    started: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "QUIET_S_MAX", READY_S_MAX)
    monkeypatch.setattr(spare, "QUIET_PAUSE_S", 0.0)
    asked: list[bool] = []

    def is_quiet() -> bool:
        assert not started
        asked.append(len(asked) == 10)
        return asked[-1]

    keeper = Spare("reference", "reference", None, is_quiet=is_quiet, is_serving=lambda: True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keeper.keep)
        with anyio.fail_after(READY_S_MAX):
            while keeper.pid is None:
                await anyio.sleep(0.005)
        await keeper.aclose()
    assert started == [True] and len(asked) == 11


@pytest.mark.parametrize(
    "delays_s", [(0.0, 0.1), pytest.param((0.0, 0.01, 0.1, 0.4), marks=pytest.mark.long)], ids=["two", "four"]
)
async def test_closed_device_leaves_no_spare_process_at_any_moment(
    background: Background, started: list[bool], delays_s: tuple[float, ...]
) -> None:
    for delay_s in delays_s:
        device = RemoteDevice("reference", "reference", background.tasks, spare=True)
        await device.connect()
        await anyio.sleep(delay_s)
        await device.aclose()
    device = RemoteDevice("reference", "reference", background.tasks, spare=True)
    await device.connect()
    waiting = await ready(device)
    await device.aclose()
    assert not exists(waiting)


async def test_cancelled_tasks_end_the_spare_process() -> None:
    own = Background()
    await own.start()
    device = RemoteDevice("reference", "reference", own.tasks, spare=True)
    await device.connect()
    waiting = await ready(device)
    await own.aclose()
    assert not exists(waiting)


async def test_cancelled_call_leaves_no_process_of_its_own(device: RemoteDevice) -> None:
    await device.connect()
    waiting = await ready(device)
    await kill(device)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await device.status()
    await device.status()
    assert device.pid is not None
    await device.aclose()
    assert not exists(waiting)


async def test_ready_process_has_the_priority_of_any_other(device: RemoteDevice) -> None:
    def priorities(pid: int) -> set[int]:
        found = set()
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                found.add(os.getpriority(os.PRIO_PROCESS, int(task)))
        return found

    await device.connect()
    waiting = await ready(device)
    # The thread that imported has been joined; the kernel may list it a moment longer.
    with anyio.fail_after(GONE_S_MAX):
        while priorities(waiting) != {os.getpriority(os.PRIO_PROCESS, 0)}:
            await anyio.sleep(0.005)
    group = Path(f"/proc/{waiting}/autogroup")
    if group.exists():
        assert group.read_text().split()[-1] == "0"


@pytest.mark.parametrize(
    "wrong",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "import os\nif '--spare' in __import__('sys').orig_argv: os._exit(3)\n",
        pytest.param(
            "import sys\nif '--spare' in sys.orig_argv: raise RuntimeError('twice')\n", marks=pytest.mark.long
        ),
    ],
    ids=["leaves a thread at low priority", "ends the process", "raises"],
)
async def test_driver_that_cannot_be_imported_ahead_has_no_spare_process(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    (tmp_path / "odd_driver.py").write_text(f"{wrong}\n{DRIVER}")
    monkeypatch.syspath_prepend(str(tmp_path))
    device = RemoteDevice("odd_driver:Device", "odd", background.tasks, spare=True)
    await device.connect()
    keeper = device._spare
    assert keeper is not None
    with anyio.fail_after(READY_S_MAX):
        await keeper._over.wait()
    assert device.spare_pid is None
    await kill(device)
    assert await device.status() == DeviceStatus.AVAILABLE
    await device.aclose()


async def test_setting_says_whether_there_are_spare_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for option, variable, expected in ((None, "0", False), (None, "1", True), (False, "1", False)):
        monkeypatch.setenv("AIONN_SPARE_PROCESSES", variable)
        async with aionn.open(drivers=["reference"], spare_processes=option) as runtime:
            await runtime.devices[0].status()
            hal = runtime.devices[0].hal
            assert isinstance(hal, RemoteDevice)
            assert (hal._spare is not None) == expected


APPLICATION = """
import os, sys, time, anyio
from aionn.service.client import spare
from aionn.runtime.background import Background
from aionn.service.client.device import RemoteDevice
spare.SERVED_S = spare.QUIET_S_MAX = 0.0

async def main():
    background = Background()
    await background.start()
    device = RemoteDevice("reference", "reference", background.tasks, spare=True)
    await device.connect()
    while (device.spare_pid if {ready} else device._spare._process) is None:
        await anyio.sleep(0.005)
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    print(child, device._spare._process.pid, flush=True)
    await anyio.sleep(600)

anyio.run(main)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "importing"])
def test_killed_application_takes_its_spare_process_along(repository: Path, is_ready: bool) -> None:
    script = textwrap.dedent(APPLICATION).replace("{ready}", str(is_ready))
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    application = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert application.stdout is not None
        child, waiting = map(int, application.stdout.readline().split())
        watched = os.pidfd_open(waiting)
    finally:
        application.kill()
        application.wait()
        assert application.stdout is not None
        application.stdout.close()
    try:
        readable, _, _ = select.select([watched], [], [], GONE_S_MAX)
        assert readable, "the spare process outlived its application"
    finally:
        os.close(watched)
        os.kill(child, signal.SIGKILL)


def test_changed_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "seen_module.py"
    module.write_text("a = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "seen_module", raising=False)
    __import__("seen_module")
    before = entry._signatures()
    assert str(module) in before and entry._signatures(before) == before
    module.unlink()
    assert entry._signatures(before) != before
    del sys.modules["seen_module"]

"""Launches and their callbacks, drivers that hang, drivers that come back different, drivers that cannot start."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import aionn
import aionn.blocking
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import DeadObject, DeviceUnavailable, ErrorStatus, InvalidArgument
from aionn.hal import OperationType, OutputShape, Timing
from aionn.service.client import device as client_module
from aionn.service.client.device import RemoteDevice
from aionn.testing.models import chain
from fences import FenceError, FenceStatus, SyncFence

NOTICED_S_MAX = 40.0

DRIVERS = """
    import ctypes, os, time
    import msgspec
    from aionn.drivers.reference import ReferenceDevice, ReferencePreparedModel
    from aionn.hal import ExecutionResult, NativeCall, OutputShape

    class Sleeping(ReferenceDevice):
        def prepare(self, model, **more):
            return SleepingModel(self, model, more["priority"])

    class SleepingModel(ReferencePreparedModel):
        @property
        def native(self):
            return self.sleep

        def sleep(self, arguments):
            function = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
            words = ((int(os.environ["SLEEP_US"]),),) * self.device.info.slots
            result = ExecutionResult(True, tuple(OutputShape(area.dimensions) for area in arguments.outputs))
            release = self.device.gate.release_native
            return NativeCall(function, words, self.permit(), result, release, None, "sleeping", arguments)

    class Looping(ReferenceDevice):
        def prepare(self, model, **more):
            return LoopingModel(self, model, more["priority"])

    class LoopingModel(ReferencePreparedModel):
        def run(self, inputs, outputs, control):
            if os.environ["HANG"] == "loop":
                while True:
                    pass
            ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the GIL.

    class Changing(ReferenceDevice):
        def __init__(self, name):
            super().__init__(name)
            path = os.environ["COUNTER"]
            count = len(open(path).read()) if os.path.exists(path) else 0
            open(path, "a").write("x")
            self.info = msgspec.structs.replace(self.info, version=str(count))

    class Twice(ReferenceDevice):
        def prepare(self, model, **more):
            return TwiceModel(self, model, more["priority"])

    class TwiceModel(ReferencePreparedModel):
        async def execute(self, request, callback, **more):
            def twice(*result):
                callback(*result)
                callback(*result)
            return await super().execute(request, twice, **more)

    def broken(name):
        raise RuntimeError("no such hardware")

    class TooManyFiles(ReferenceDevice):
        def __init__(self, name):
            super().__init__(name)
            counts = msgspec.structs.replace(self.info.cache_files, model=33)
            self.info = msgspec.structs.replace(self.info, cache_files=counts)

    def dies(name):
        os._exit(3)

    nothing = 1
"""


@pytest.fixture(autouse=True)
def wrong_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_drivers.py").write_text(textwrap.dedent(DRIVERS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COUNTER", str(tmp_path / "counter"))


class Told:
    """A callback that remembers."""

    def __init__(self) -> None:
        self.statuses: list[ErrorStatus] = []
        self._event = anyio.Event()

    def __call__(self, status: ErrorStatus, shapes: Sequence[OutputShape], timing: Timing) -> None:
        self.statuses.append(status)
        self._event.set()

    async def wait(self) -> None:
        with anyio.fail_after(NOTICED_S_MAX):
            await self._event.wait()


async def test_launch_returns_before_the_execution_has_ended(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    slot = served.device.gate.slot(2, None)
    await anyio.to_thread.run_sync(slot.__enter__)  # Nothing runs until it is given back.
    work, told = small.Sum(), Told()
    with anyio.fail_after(NOTICED_S_MAX):
        assert await prepared.execute(work.request, told) == ErrorStatus.NONE
    assert told.statuses == []
    slot.__exit__(None, None, None)
    await told.wait()
    assert told.statuses == [ErrorStatus.NONE] and work.is_right
    await client.aclose()


async def test_launch_that_fails_tells_the_callback_the_same_once(served: Any, small: Any) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    told = Told()
    request = type(small.Sum().request)((), (), ())
    assert await prepared.execute(request, told) == ErrorStatus.INVALID_ARGUMENT
    await prepared.execute_synchronously(small.Sum().request)
    assert told.statuses == [ErrorStatus.INVALID_ARGUMENT]
    late = Told()
    assert await prepared.execute(small.Sum().request, late, deadline_ns=1) == ErrorStatus.NONE
    await late.wait()
    assert late.statuses == [ErrorStatus.MISSED_DEADLINE_PERSISTENT]
    await prepared.aclose()
    closed = Told()
    assert await prepared.execute(small.Sum().request, closed) == ErrorStatus.INVALID_ARGUMENT
    assert closed.statuses == [ErrorStatus.INVALID_ARGUMENT]
    await client.aclose()


async def test_callback_comes_once_from_a_driver_that_notifies_twice(background: Any, small: Any) -> None:
    device = RemoteDevice("wrong_drivers:Twice", "twice", background.tasks)
    prepared = await device.prepare_model(small.sum_model())
    told = Told()
    await prepared.execute(small.Sum().request, told)
    await told.wait()
    await prepared.execute_synchronously(small.Sum().request)
    assert told.statuses == [ErrorStatus.NONE]
    await device.aclose()


async def test_death_tells_every_callback_once(background: Any, small: Any) -> None:
    device = RemoteDevice("reference", "reference", background.tasks)
    prepared = await device.prepare_model(small.sum_model())
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    told = [Told() for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for each in told:
            tasks.start_soon(prepared.execute, small.Sum().request, each)
        with anyio.move_on_after(0.05):  # A caller that gives up still gets its callback.
            await prepared.execute(small.Sum().request, told[0].__class__())
        os.kill(pid, signal.SIGKILL)
        for each in told:
            await each.wait()
    assert [each.statuses for each in told] == [[ErrorStatus.DEAD_OBJECT]] * 3
    after = Told()
    assert await prepared.execute(small.Sum().request, after) == ErrorStatus.DEAD_OBJECT
    assert after.statuses == [ErrorStatus.DEAD_OBJECT]
    await device.aclose()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "by"),
    [
        ("loop", "execute"),
        ("loop", "fenced"),
        ("hold the GIL", "burst"),
        pytest.param("loop", "burst", marks=pytest.mark.long),
        pytest.param("hold the GIL", "execute", marks=pytest.mark.long),
        pytest.param("hold the GIL", "reusable fenced", marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
async def test_device_that_hangs_ends_its_process(
    background: Any, small: Any, monkeypatch: pytest.MonkeyPatch, how: str, by: str, capfd: Any
) -> None:
    monkeypatch.setenv("HANG", how)
    device = RemoteDevice("wrong_drivers:Looping", "looping", background.tasks, hang_after_s=1.0)
    prepared = await device.prepare_model(small.sum_model())
    pid = device.pid
    with anyio.fail_after(NOTICED_S_MAX), pytest.raises((DeadObject, FenceError)) as caught:
        if by == "execute":
            await prepared.execute_synchronously(small.Sum().request)
        elif by == "burst":
            burst = await prepared.configure_execution_burst()
            try:
                await burst.execute_synchronously(small.Sum().request, [-1])
            finally:
                await burst.aclose()
        else:
            await hang_fenced(prepared, small.Sum().request, by)
    assert by.endswith("fenced") == isinstance(caught.value, FenceError)
    # Another process serves the next call.
    await device.prepare_model(small.sum_model())
    assert device.pid not in (None, pid)
    await device.aclose()


@pytest.mark.slow
async def test_native_call_that_hangs_ends_its_process_and_calls_that_end_do_not(
    background: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEP_US", "150000")
    device = RemoteDevice("wrong_drivers:Sleeping", "sleeping", background.tasks, hang_after_s=1.0)
    prepared = await device.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    request = small.Sum().request
    for _ in range(8):  # The first by Python; the others take more than the limit together.
        await burst.execute_synchronously(request, [0])
    await burst.aclose()
    await device.aclose()
    monkeypatch.setenv("SLEEP_US", "900000000")
    device = RemoteDevice("wrong_drivers:Sleeping", "sleeping", background.tasks, hang_after_s=0.3)
    prepared = await device.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    await burst.execute_synchronously(request, [0])
    began_s = time.monotonic()
    with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeadObject):
        await burst.execute_synchronously(request, [0])
    assert time.monotonic() - began_s >= 0.3
    await burst.aclose()
    await device.aclose()


async def test_process_that_is_killed_during_a_native_call_ends_its_executions(
    background: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEP_US", "900000000")
    device = RemoteDevice("wrong_drivers:Sleeping", "sleeping", background.tasks)
    prepared = await device.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    request = small.Sum().request
    await burst.execute_synchronously(request, [0])
    launch = burst.launch(request, [0])
    assert device.pid is not None
    os.kill(device.pid, signal.SIGKILL)
    with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeadObject):
        await launch
    await burst.aclose()
    prepared = await device.prepare_model(small.sum_model())
    await prepared.execute_synchronously(request)
    await device.aclose()


async def hang_fenced(prepared: Any, request: Any, by: str) -> None:
    """The watch begins when the device may: the fence that the execution waits for is signalled after more than the limit."""
    with SyncFence("start") as start:
        if by == "fenced":
            launched = await prepared.execute_fenced(request, [start])
        else:
            execution = await prepared.create_reusable_execution(request)
            launched = await execution.execute_fenced([start])
        with launched.fence:
            await anyio.sleep(1.5)
            assert launched.fence.status == FenceStatus.PENDING
            start.signal()
            try:
                await launched.fence
            finally:
                with pytest.raises(DeadObject):
                    await launched.get_execution_info()


async def test_fenced_execution_that_is_given_up_is_watched_no_more(
    background: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RemoteDevice("reference", "reference", background.tasks, hang_after_s=1.0)
    prepared = await device.prepare_model(small.sum_model())
    pid = device.pid
    with SyncFence("never") as never:
        deadline_ns = time.monotonic_ns() + 200_000_000
        launched = await prepared.execute_fenced(small.Sum().request, [never], deadline_ns=deadline_ns)
        with launched.fence, pytest.raises(FenceError):
            await launched.fence
        assert (await launched.get_execution_info())[0] == ErrorStatus.MISSED_DEADLINE_TRANSIENT
        await anyio.sleep(1.2)
    await prepared.execute_synchronously(small.Sum().request)
    assert device.pid == pid
    await device.aclose()


async def test_device_that_says_illegal_things_of_itself_is_refused(serving: Any) -> None:
    wrong = ReferenceDevice()
    wrong.info = msgspec.structs.replace(wrong.info, slots=0)
    client = (await serving(wrong)).client()
    for _ in range(2):
        with pytest.raises(DeviceUnavailable, match="slots: expected 1 to 1024, got 0"):
            await client.connect()
    await client.aclose()
    capabilities = wrong.info.capabilities
    backwards = msgspec.structs.replace(
        capabilities, operand_performance=capabilities.operand_performance[::-1]
    )
    other = ReferenceDevice()
    other.info = msgspec.structs.replace(other.info, capabilities=backwards)
    client = (await serving(other)).client()
    with pytest.raises(DeviceUnavailable, match="rising order"):
        await client.connect()
    await client.aclose()


async def test_process_that_is_stopped_is_killed(background: Any, small: Any) -> None:
    device = RemoteDevice("reference", "reference", background.tasks, hang_after_s=0.5)
    prepared = await device.prepare_model(small.sum_model())
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeadObject, match="answered nothing"):
        await prepared.execute_synchronously(small.Sum().request)
    await device.status()
    await device.aclose()
    with anyio.fail_after(NOTICED_S_MAX):
        while Path(f"/proc/{pid}").exists():  # It was killed, and the kernel may still be ending it.
            await anyio.sleep(0.005)


@pytest.mark.parametrize(
    ("hang_after_s", "busy_s", "idle_s"),
    [(1.0, 1.2, 1.1), pytest.param(2.0, 3.0, 2.4, marks=pytest.mark.long)],
)
async def test_busy_device_is_not_taken_for_a_hanging_one(
    background: Any, small: Any, hang_after_s: float, busy_s: float, idle_s: float
) -> None:
    device = RemoteDevice("reference", "reference", background.tasks, hang_after_s=hang_after_s)
    prepared = await device.prepare_model(small.sum_model())
    pid = device.pid
    end_s = time.monotonic() + busy_s
    while time.monotonic() < end_s:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(prepared.execute_synchronously, small.Sum().request)
    await anyio.sleep(idle_s)  # Idle for longer than the limit is no hang, either.
    await device.status()
    assert device.pid == pid
    await device.aclose()


async def test_driver_that_comes_back_different_is_refused(background: Any, small: Any) -> None:
    device = RemoteDevice("wrong_drivers:Changing", "changing", background.tasks)
    await device.connect()
    assert device.info.version == "0"
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises((DeviceUnavailable, DeadObject)):
            await device.prepare_model(small.sum_model())
        await _gone(device)
    with pytest.raises(DeviceUnavailable, match="differs"):
        await device.prepare_model(small.sum_model())
    assert device.info.version == "0"
    await device.aclose()


async def _gone(device: RemoteDevice) -> None:
    with anyio.fail_after(NOTICED_S_MAX):
        while device.pid is not None:
            await anyio.sleep(0.005)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ("wrong_drivers:broken", "RuntimeError: no such hardware"),
        ("wrong_drivers:nothing", "expected something that makes a device"),
        ("wrong_drivers:missing", "AttributeError"),
        ("wrong_drivers:TooManyFiles", "cache files: expected 0 to 32, got 33"),
        ("no_such_module:x", "ModuleNotFoundError"),
        ("no_such_driver", "expected one of"),
        ("wrong_drivers:dies", "is gone"),
    ],
)
@pytest.mark.parametrize("calls", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_driver_that_cannot_start_is_unavailable_with_its_reason(
    background: Any, driver: str, why: str, calls: int
) -> None:
    device = RemoteDevice(driver, "broken", background.tasks)
    for _ in range(calls):
        with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeviceUnavailable, match=why):
            await device.connect()
    await device.aclose()


async def test_driver_that_cannot_start_is_tried_again_by_the_next_call(background: Any) -> None:
    device = RemoteDevice("wrong_drivers:broken", "broken", background.tasks)
    for _ in range(2):
        with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeviceUnavailable, match="no such hardware"):
            await device.connect()
    await device.aclose()


async def test_starts_in_a_row_are_spaced(
    background: Any, monkeypatch: pytest.MonkeyPatch, small: Any
) -> None:
    pauses: list[float] = []
    sleep = anyio.sleep

    async def remember(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client_module, "SHORT_LIFE_S", 3600.0)
    device = RemoteDevice("reference", "reference", background.tasks)
    await device.connect()
    monkeypatch.setattr(client_module.anyio, "sleep", remember)
    for _ in range(4):
        pid = device.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while device.pid is not None:
            await sleep(0.005)
        await device.connect()
    assert pauses == [0.05, 0.1, 0.2]
    await device.aclose()


async def test_start_after_a_long_life_does_not_wait(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SHORT_LIFE_S", 0.0)
    monkeypatch.setattr(client_module, "PAUSE_S_MIN", 3600.0)
    monkeypatch.setattr(client_module, "PAUSE_S_MAX", 3600.0)
    device = served.client()
    with anyio.fail_after(NOTICED_S_MAX):
        for _ in range(4):
            await device.connect()
            connection = device._connection
            connection.channel.close("it was unplugged")
    await device.aclose()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [pytest.param("loop", marks=pytest.mark.long), "hold the GIL", "stop"])
async def test_setting_ends_what_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, capfd: Any
) -> None:
    """A device that makes no progress, and a process that is stopped and cannot watch itself."""
    monkeypatch.setenv("HANG", how)
    monkeypatch.syspath_prepend(tmp_path)
    async with aionn.open(drivers={"looping": "wrong_drivers:Looping"}, hang_after_s=1) as runtime:
        net = await runtime.compile(chain([OperationType.RELU], (3,)))
        pid = runtime.device("looping").pid
        assert pid is not None
        if how == "stop":
            os.kill(pid, signal.SIGSTOP)
        with anyio.fail_after(NOTICED_S_MAX), pytest.raises(DeadObject):
            await net.execute([np.ones(3, np.float32)])
        await runtime.device("looping").status()
        assert runtime.device("looping").pid not in (None, pid)


def test_hang_ends_for_calls_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HANG", "loop")
    monkeypatch.setenv("AIONN_HANG_AFTER_S", "1")
    with aionn.blocking.open(drivers={"looping": "wrong_drivers:Looping"}) as runtime:
        net = runtime.compile(chain([OperationType.RELU], (3,)))
        with pytest.raises(DeadObject):
            net.execute([np.ones(3, np.float32)])


async def test_hang_limit_must_be_positive(background: Any) -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        RemoteDevice("reference", "reference", background.tasks, hang_after_s=0)

"""Whatever a hostile driver does, an application keeps what it has of a good device, and nothing of the driver stays.

Each attack of hostile_driver_attacks.py and hostile_driver_lies.py runs as a driver process of a runtime that has a good device as
well, the reference device in a process of its own. The good device answers rightly, the event loop goes on, memory is bounded;
every call on the hostile device ends with its result, with an error of the package, or with the limit that was set for it; the
runtime closes in time. That no descriptor, thread, mapping or process is left is checked after each test, by conftest.py.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import anyio
import hostile_application as application
import hostile_driver as driver
import hostile_driver_attacks  # noqa: F401
import hostile_driver_lies  # noqa: F401
import numpy as np
import pytest

import aionn
from aionn.hal import LaunchBase
from aionn.service.client import device as client
from aionn.service.client import prepared as prepared_module
from aionn.service.client import supervisor

HERE = Path(__file__).parent

CALL_S = 0.25
"""How long a call on the hostile device may take in the quick form: a call that is answered takes some milliseconds."""

PREPARE_S = 20.0
"""How long it may take to prepare a model for attacks that answer this call, whatever they do to later ones."""

START_S_MAX = client.START_S_MAX
CALL_LONG_S = 5.0
ATTACK_LONG_S = 15.0

DELAY_S_MAX = 1.0
"""Longest time for which the event loop may keep a task waiting: what blocks a loop blocks it longer."""

CLOSE_S_MAX = 20.0
"""How long closing may take: limits of the parts are shortened, and the machine may be busy."""

LEFT_S_MAX = 30.0
"""How long a process that was killed may take until it is gone."""

RSS_MORE_KIB = 192 << 10
"""Memory that the allocator keeps, and one large message."""

EXPECTED: dict[str, dict[str, set[str]]] = {
    "nothing": {"run": {"ok"}, "run, burst": {"ok"}, "execute_fenced": {"ok"}, "burst": {"ok"}},
    "fences_of_a_child": {"execute_fenced": {"FenceError"}},
    "same_burst_handles": {"configure_burst": {"ok", "GeneralFailure"}, "burst": {"DeadObject"}},
    "wrong_durations": {"run": {"ok"}, "run, fenced": {"ok"}},
    "reads_nothing_after_preparing": {"run, deadline": {"MissedDeadline"}},
    "answers_pings_alone": {"run, deadline": {"MissedDeadline"}},
    "stops_itself": {"run, deadline": {"MissedDeadline"}},
    "failures_without_a_failure": {"prepare_model": {"GeneralFailure"}},
    "wrong_handles": {"allocate": {"GeneralFailure"}},
    "wrong_shapes": {"run": {"GeneralFailure"}},
    "wrong_timings": {"run": {"GeneralFailure"}},
}
"""What must come of calls, by attack and name of the call, where it is more than what holds for all."""

SILENT = {"reads_nothing_after_preparing", "answers_pings_alone", "stops_itself"}
"""Of those, attacks that leave calls unanswered; the others answer, and get the time for it that a busy machine takes."""

UNREAD = "flood_descriptors"
"""The attack that leaves most to be taken from the socket when it is closed."""

ATTACKS = sorted(driver.ATTACKS)
SAMPLE = 15
"""Of so many attacks from which no more is expected than from all, the ordinary run takes one, whatever others there are; and of
those that leave calls unanswered, which wait for several limits, the one that seems to live."""


def is_sampled(attack: str) -> bool:
    if attack in SILENT:
        return attack == "answers_pings_alone"
    return attack in EXPECTED or attack == UNREAD or zlib.crc32(attack.encode()) % SAMPLE == 2


@pytest.fixture(autouse=True)
def drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets driver processes import the hostile driver, and shortens what waits for one that is silent."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("HOSTILE_NICE", "19")
    monkeypatch.setattr(supervisor, "END_S_MAX", 0.3)
    monkeypatch.setattr(prepared_module, "FREE_S_MAX", 0.2)
    monkeypatch.setattr("aionn.burst.controller.END_S_MAX", 0.2)
    monkeypatch.setattr("aionn.runtime.executions.burst.CLOSE_S_MAX", 0.2)


def rss_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def sessions() -> set[int]:
    """The sessions of all processes."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # It has ended.
        if state != "Z":
            found.add(int(session))
    return found


async def beside(attack: str, call_s: float, seconds: float) -> tuple[Any, float]:
    """An application beside an attack: what came of calls on the hostile device, and how long closing took."""
    delay = application.Delay()
    outcomes = None
    runtime = aionn.open(drivers={"good": "reference", "hostile": f"hostile_driver:{attack}"})
    before_kib = rss_kib()
    pids: set[int] = set()
    async with runtime:
        hostile = next((device for device in runtime.devices if device.name == "hostile"), None)
        client.START_S_MAX = START_S_MAX
        async with application.good_device(runtime) as good, anyio.create_task_group() as tasks:
            await good.one()
            tasks.start_soon(delay.watch)
            tasks.start_soon(good.go_on)
            end_s = time.monotonic() + seconds
            if hostile is not None:
                prepare_s = PREPARE_S if attack in EXPECTED else call_s
                outcomes = application.Outcomes(hostile.hal, call_s, prepare_s)
                tasks.start_soon(_watch_pids, hostile, pids)
                while True:
                    await application.use_runtime(runtime, outcomes)
                    await application.use_contract(hostile.hal, outcomes)
                    if time.monotonic() >= end_s:
                        break
            tasks.cancel_scope.cancel()
        began_s = time.monotonic()
    close_s = time.monotonic() - began_s
    with anyio.fail_after(LEFT_S_MAX):
        while pids & sessions():
            await anyio.sleep(0.01)
    assert good.wrong == []
    assert outcomes is None or outcomes.undocumented == []
    assert delay.worst_s < DELAY_S_MAX, outcomes
    assert rss_kib() < before_kib + RSS_MORE_KIB
    print(attack, f"delay {delay.worst_s:.3f} close {close_s:.2f}", outcomes)
    return outcomes, close_s


async def _watch_pids(device: Any, pids: set[int]) -> None:
    """Collects the processes of a device: each is a session."""
    while True:
        if device.pid is not None:
            pids.add(device.pid)
        await anyio.sleep(0.01)


@pytest.mark.parametrize(
    "attack", [a if is_sampled(a) else pytest.param(a, marks=pytest.mark.long) for a in ATTACKS]
)
@pytest.mark.thorough
async def test_application_goes_on_beside(
    attack: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attack == "never_says_hello":
        monkeypatch.setattr("aionn.service.client.device.START_S_MAX", 1.0)
    with anyio.fail_after(60):
        call_s = CALL_LONG_S if attack in EXPECTED.keys() - SILENT else CALL_S
        outcomes, close_s = await beside(attack, call_s, 0.0)
    assert close_s < CLOSE_S_MAX
    for name, expected in EXPECTED.get(attack, {}).items():
        assert set(outcomes.by_call[name]) == expected, (name, str(outcomes))
    assert "Traceback" not in caplog.text, caplog.text[:4000]


@pytest.mark.thorough
async def test_closing_takes_no_longer_with_many_objects_of_a_device_that_frees_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s, count = 0.5, 40
    monkeypatch.setattr(prepared_module, "FREE_S_MAX", limit_s)
    monkeypatch.setattr("aionn.burst.controller.END_S_MAX", limit_s)
    kept = []
    async with aionn.open(drivers={"hostile": "hostile_driver:frees_nothing"}) as runtime:
        for _ in range(count):
            kept.append(await runtime.compile(application.sum_model(), devices="hostile"))
            burst = kept[-1].burst()
            await burst.__aenter__()
            kept.append(burst)
        began_s = time.monotonic()
        with anyio.fail_after(60):
            for object_ in kept[: count // 2]:
                await object_.aclose()
            await runtime.aclose()
    assert time.monotonic() - began_s < count * limit_s


async def test_closing_waits_for_executions_of_several_bursts_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s, count = 0.5, 40
    monkeypatch.setattr("aionn.runtime.executions.burst.CLOSE_S_MAX", limit_s)
    values = [np.zeros(4, np.float32)] * 2
    async with aionn.open(drivers={"hostile": "hostile_driver:answers_pings_alone"}) as runtime:
        compilation = await runtime.compile(application.sum_model(), devices="hostile")
        bursts = [compilation.burst() for _ in range(count)]
        for burst in bursts:
            await burst.__aenter__()
        with anyio.move_on_after(limit_s):
            await bursts[0].execute(values)  # It holds the device's only slot, and is answered by nobody.
        for burst in bursts[1:]:
            (device_burst,) = burst._opened[0]
            device_burst.last = LaunchBase()  # One that runs, and never ends.
        began_s = time.monotonic()
        with anyio.fail_after(60):
            await compilation.aclose()
        close_s = time.monotonic() - began_s
    assert close_s < count * limit_s


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS)
async def test_application_goes_on_beside_for_long(
    attack: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTILE_SECONDS", str(10 * ATTACK_LONG_S))
    if attack == "never_says_hello":
        monkeypatch.setattr("aionn.service.client.device.START_S_MAX", 1.0)
    with anyio.fail_after(10 * ATTACK_LONG_S):
        _, close_s = await beside(attack, CALL_LONG_S, ATTACK_LONG_S)
    assert close_s < CLOSE_S_MAX
    assert "Traceback" not in caplog.text, caplog.text[:4000]

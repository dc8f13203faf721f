"""The runtime on simulated devices under virtual time: deadlines, priorities and fences to the nanosecond."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.runtime.compilation import Compilation
from aionn.runtime.runtime import Runtime
from aionn.testing import SimulatedDevice, VirtualClock, models, run, scripted

X = np.array([1.5, -2.5, 3.0, 4.0], np.float32)
MS = 1_000_000


class Trial:
    """One run: a runtime on devices, a clock that begins at 0, and a log of what ended when."""

    def __init__(self, *devices: SimulatedDevice) -> None:
        self.clock = VirtualClock()
        self.devices = devices
        self.log: list[tuple[float, str, str]] = []

    def run(
        self, main: Callable[[Trial, Runtime], Coroutine[Any, Any, None]]
    ) -> list[tuple[float, str, str]]:
        async def all_of_it() -> None:
            async with aionn.open(devices=self.devices) as runtime:
                await main(self, runtime)

        run(all_of_it, clock=self.clock)
        return self.log

    async def note(self, name: str, awaited: Any) -> None:
        """Logs when (ms) ``awaited`` ends, and how."""
        outcome = "done"
        try:
            await awaited
        except aionn.Error as e:
            outcome = e.status.name
        self.log.append((round(self.clock.now_ns / MS, 6), name, outcome))

    async def note_all(self, **awaited: Any) -> None:
        async with anyio.create_task_group() as tasks:
            for name, each in awaited.items():
                tasks.start_soon(self.note, name, each)


def npu(run_time_s: float = 0.020, **options: Any) -> SimulatedDevice:
    return SimulatedDevice("npu", run_time_s=run_time_s, **options)


async def compiled(runtime: Runtime, **options: Any) -> Compilation:
    return await runtime.compile(models.identity((4,)), **options)


def test_urgent_work_overtakes_what_waits() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        await trial.note_all(
            a=net.execute_fenced([X], priority="low", deadline=trial.clock.after(1.0)),
            b=net.execute_fenced([X], priority="low", deadline=trial.clock.after(0.5)),
            c=net.execute_fenced([X], priority="high", deadline=trial.clock.after(0.045)),
        )

    assert Trial(npu()).run(main) == [(20, "a", "done"), (40, "c", "done"), (60, "b", "done")]


def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        deadlines = {"a": None, "b": None, "c": 900, "d": 500, "e": 700}
        executions = {
            name: net.execute_fenced([X], deadline=None if ms is None else ms * MS)
            for name, ms in deadlines.items()
        }
        await trial.note_all(**executions)

    ended = Trial(npu()).run(main)
    assert [name for _, name, _ in ended] == ["a", "d", "e", "c", "b"]
    assert [at_ms for at_ms, _, _ in ended] == [20, 40, 60, 80, 100]


def test_the_caller_hears_of_a_miss_by_its_deadline_and_the_next_is_served() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        await trial.note("warm", net.execute([X]))
        await trial.note("late", net.execute([X], deadline=trial.clock.after(0.015)))
        await trial.note("next", net.execute([X], deadline=trial.clock.after(0.060)))

    warm, late, following = Trial(npu()).run(main)
    assert warm == (20, "warm", "done")
    assert late[0] <= 35
    assert late[2].startswith("MISSED_DEADLINE")
    assert following[2] == "done"


def test_a_passed_deadline_is_told_at_once_and_takes_no_device_time() -> None:
    device = npu()

    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        await anyio.sleep(1)
        await trial.note("passed", net.execute([X], deadline=trial.clock.now_ns - 1))

    assert Trial(device).run(main) == [(1000, "passed", "MISSED_DEADLINE_PERSISTENT")]
    assert device.statistics().started == 0


def test_a_chain_of_fences_takes_the_sum_of_its_links() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        first = await compiled(runtime, devices="detector")
        second = await compiled(runtime, devices="reader")
        a = first.execute_fenced([X])
        b = second.execute_fenced([X], wait_for=[a.fence])
        c = first.execute_fenced([X], wait_for=[b.fence])
        await trial.note_all(a=a, b=b, c=c)
        assert b.fence.signal_time_ns == 25 * MS

    devices = SimulatedDevice("detector", run_time_s=0.020), SimulatedDevice("reader", run_time_s=0.005)
    assert Trial(*devices).run(main) == [(20, "a", "done"), (25, "b", "done"), (45, "c", "done")]


def test_a_failed_link_fails_what_waits_for_it_at_the_same_time() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        a = net.execute_fenced([X])
        b = net.execute_fenced([X], wait_for=[a.fence])
        c = net.execute_fenced([X], wait_for=[b.fence], deadline=trial.clock.after(1))
        await trial.note_all(a=a, b=b, c=c)

    ended = Trial(npu(script=scripted({0: "transient"}))).run(main)
    assert [at_ms for at_ms, _, _ in ended] == [10, 10, 10]
    assert ended[0] == (10, "a", "RESOURCE_EXHAUSTED_TRANSIENT")
    assert {outcome for _, _, outcome in ended[1:]} <= {"GENERAL_FAILURE", "RESOURCE_EXHAUSTED_TRANSIENT"}


def test_a_deadline_holds_while_fences_are_waited_for() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        a = net.execute_fenced([X])
        b = net.execute_fenced([X], wait_for=[a.fence], deadline=trial.clock.after(0.012))
        d = net.execute_fenced([X], wait_for=[a.fence], duration=0.012)
        await trial.note_all(a=a, b=b, d=d)

    ended = {name: (at_ms, outcome) for at_ms, name, outcome in Trial(npu()).run(main)}
    assert ended["a"] == (20, "done")
    assert ended["b"][0] <= 12
    assert ended["d"][0] <= 32
    assert {ended[name][1][:15] for name in "bd"} == {"MISSED_DEADLINE"}


def test_a_hanging_device_costs_its_callers_their_deadlines_and_closing_is_bounded() -> None:
    trial = Trial(npu(script=scripted({0: "hang"})))

    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        await trial.note("hangs", net.execute([X], deadline=trial.clock.after(0.1)))
        await trial.note("waits", net.execute([X], deadline=trial.clock.after(0.1)))

    ended = trial.run(main)
    assert [name for _, name, _ in ended] == ["hangs", "waits"]
    assert ended[0][0] == 100
    assert ended[1][0] <= 200
    assert all(outcome.startswith("MISSED_DEADLINE") for _, _, outcome in ended)
    assert trial.clock.now <= 15, "closing gives a hanging device a few seconds at most"


def test_a_dead_device_is_compiled_for_again() -> None:
    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        await trial.note("dies", net.execute([X]))
        await trial.note("dead", net.execute([X]))
        again = await compiled(runtime)
        await trial.note("again", again.execute([X]))

    ended = Trial(npu(script=scripted({0: "death"}))).run(main)
    assert ended == [(10, "dies", "DEAD_OBJECT"), (10, "dead", "DEAD_OBJECT"), (30, "again", "done")]


def test_ten_minutes_of_camera_frames_lose_none() -> None:
    trial = Trial(npu(0.020, results="zeros"))
    period_s, count = 1.0, 600

    async def frames() -> AsyncIterator[np.ndarray[Any, Any]]:
        for number in range(count):
            await anyio.sleep(period_s * number - trial.clock.now)
            yield X

    async def main(trial: Trial, runtime: Runtime) -> None:
        net = await compiled(runtime)
        async with net.burst() as burst:
            stream = burst.stream(frames(), deadline=lambda _: trial.clock.after(0.033))
            statuses = [result.status async for result in stream]
        assert statuses == ["on_time"] * count

    trial.run(main)
    assert trial.clock.now == pytest.approx(period_s * (count - 1) + 0.020)


def test_a_runtime_takes_devices_as_objects_and_closes_them() -> None:
    first, second = npu(), SimulatedDevice("phone-cpu")

    async def main() -> None:
        async with aionn.open(
            devices=[first, second], drivers=["reference"], isolation="in_process"
        ) as runtime:
            assert [device.name for device in runtime.devices] == ["npu", "phone-cpu", "reference"]
            assert runtime.devices[0].driver == "given"
            net = await compiled(runtime, devices="npu")
            assert {placed.device for placed in net.placement} == {"npu"}
        for device in (first, second):
            with pytest.raises(aionn.DeviceUnavailable):
                await device.supported_operations(models.identity((4,)))

    run(main)
    for devices in ([npu(), npu()], [SimulatedDevice("npu", name="reference", run_time_s=1.0)]):
        with pytest.raises(aionn.InvalidArgument, match="different names"):
            aionn.open(devices=devices, drivers=["reference"])


def test_real_devices_in_this_process_hold_the_clock(example_data: Path) -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
            net = await runtime.compile(example_data / "shapes_float.tflite")
            picture = np.zeros(net.inputs[0].dimensions, np.float32)
            # Far shorter than the work takes in real time.
            for _ in range(3):
                await net.execute([picture], deadline=clock.after(1e-6))
            await anyio.sleep(5)
            fenced = net.execute_fenced([picture], deadline=clock.after(1e-6))
            await fenced

    run(main, clock=clock)
    assert clock.now == 5


def traffic(seed: int) -> list[tuple[float, str, str]]:
    """Random traffic on two devices, computed by threads; what ends when, and how."""

    async def client(trial: Trial, net: Compilation, name: str, source: random.Random) -> None:
        for number in range(12):
            await anyio.sleep(source.choice([0.0, 0.005, 0.020]))
            deadline = source.choice([None, trial.clock.after(source.choice([0.010, 0.050, 0.200]))])
            priority = source.choice(["low", "medium", "high"])
            awaited = net.execute([X], priority=priority, deadline=deadline)
            await trial.note(f"{name}{number}", awaited)

    async def main(trial: Trial, runtime: Runtime) -> None:
        nets = [await compiled(runtime, devices=name) for name in ("npu", "gpu")]
        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(client, trial, nets[index % 2], "abcdef"[index], random.Random(seed + index))

    gpu = SimulatedDevice("gpu", run_time_s=0.007, slots=2, seed=seed, noise=0.2)
    return Trial(npu(0.010), gpu).run(main)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.thorough
def test_the_same_traffic_is_decided_in_the_same_order(seed: int) -> None:
    first = traffic(seed)
    assert len(first) == 72
    assert {outcome for _, _, outcome in first} > {"done"}, "some of it is late"
    for _ in range(3):
        assert traffic(seed) == first

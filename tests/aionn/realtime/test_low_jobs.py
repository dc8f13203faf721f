"""LOW jobs beside more urgent ones of the same process: their classes, and the slot that is kept from them."""

from __future__ import annotations

import pytest

from tests.aionn.realtime.children import OPEN, as_root, run_child

pytestmark = pytest.mark.forked("any")

DEVICE = """
SHAPES, FRAME = "examples/data/shapes_int8.tflite", np.zeros((1, 96, 96, 3), np.int8)
"""


@as_root
def test_low_job_is_ordinary_only_while_its_engine_computes() -> None:
    pytest.importorskip("ai_edge_litert")
    code = """
import aionn.drivers.litert.driver as driver
import aionn.drivers.litert.in_place as in_place
seen = []
run, mark = driver.LitertPreparedModel.run, in_place.engine_call
def spy(self, *arguments):
    seen.append(state()[:2])
    return run(self, *arguments)
def mark_and_spy(call):
    def compute(*arguments):
        if counting:
            seen.append(state()[:2])
        return call(*arguments)
    return mark(compute)
driver.LitertPreparedModel.run, in_place.engine_call = spy, mark_and_spy
counting = False
async def main():
    global counting
    async with aionn.open(drivers=["litert-cpu"], isolation="in_process", realtime="required") as runtime:
        net = await runtime.compile(SHAPES, priority="high")
        counting = True
        for priority in ("high", "medium", "low"):
            await net.execute([FRAME], priority=priority)
        waiting = [row[1:] for name, row in rows(await runtime.realtime())["application"].items() if "worker" in name]
    say(seen=seen, waiting=waiting)
asyncio.run(main())
"""
    found = run_child(OPEN + DEVICE + code)
    # The driver, then its engine, for each execution.
    assert found["seen"] == [[2, 10], [2, 10], [2, 5], [2, 5], [2, 10], [0, 0]]
    assert found["waiting"] and all(row == ["SCHED_RR", 10] for row in found["waiting"])


@as_root
def test_thread_of_a_low_burst_is_medium_while_its_process_has_models_above_low() -> None:
    pytest.importorskip("ai_edge_litert")
    code = """
from aionn.hal import Priority
async def row_of(runtime, burst):
    await burst.execute([FRAME])
    await burst.execute([FRAME])
    found = rows(await runtime.realtime())["litert-cpu"]
    return [row for name, row in found.items() if name.startswith("burst")]
def states_of_two_low_jobs(device):
    enter, leave = device.dispatcher.enter, device.dispatcher.leave
    leave(enter(priority=Priority.HIGH, deadline_ns=None))
    jobs = [enter(priority=Priority.LOW, deadline_ns=None) for _ in range(2)]
    found = [job.state.name for job in jobs]
    for job in reversed(jobs):
        leave(job)
    return found
async def main():
    async with aionn.open(drivers=["litert-cpu"], realtime="required") as runtime:
        low = await runtime.compile(SHAPES, priority="low")
        async with low.burst() as burst:
            alone = await row_of(runtime, burst)
            async with await runtime.compile(SHAPES, priority="high"):
                beside = await row_of(runtime, burst)
                kept = states_of_two_low_jobs(runtime.devices[0])
            after = await row_of(runtime, burst)
    async with aionn.open(drivers=["litert-cpu"], realtime="off") as runtime:
        usual = states_of_two_low_jobs(runtime.devices[0])
    say(alone=alone, beside=beside, after=after, kept=kept, usual=usual)
asyncio.run(main())
"""
    found = run_child(OPEN + DEVICE + code)
    ordinary, medium = ["ordinary", "SCHED_OTHER", 0], ["real time", "SCHED_RR", 5]
    assert found["alone"] and all(row == ordinary for row in found["alone"])
    assert medium in found["beside"]
    assert found["after"] and all(row in (ordinary, medium) for row in found["after"])
    assert ordinary in found["after"]
    assert found["kept"] == ["RUNNING", "WAITING"]
    assert found["usual"] == ["RUNNING", "RUNNING"]


@as_root
def test_every_thread_of_the_process_is_ordinary_after_closing() -> None:
    pytest.importorskip("ai_edge_litert")
    code = """
def all_threads():
    return [os.sched_getscheduler(int(tid)) & ~FLAG for tid in os.listdir("/proc/self/task")]
async def main():
    async with aionn.open(drivers=["litert-cpu"], isolation="in_process", realtime="required") as runtime:
        net = await runtime.compile(SHAPES, priority="high")
        low = await runtime.compile(SHAPES, priority="low")
        async with net.burst() as burst, low.burst() as other:
            for _ in range(6):
                await burst.execute([FRAME])
                await other.execute([FRAME])
        during = all_threads()
    say(during=during.count(RR), after=set(all_threads()) == {0}, own=state() == before)
before = state()
asyncio.run(main())
"""
    found = run_child(OPEN + DEVICE + code, environment={"AIONN_LITERT_THREADS": "2"})
    assert found["during"] > 1 and found["after"] and found["own"]

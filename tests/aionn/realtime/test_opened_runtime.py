"""What ``aionn.open(realtime=...)`` does to threads and memory; each claim in a real child process with its limits set."""

from __future__ import annotations

import json
import re

import pytest

import aionn
from aionn.errors import InvalidArgument
from tests.aionn.realtime.children import (
    LIMITS,
    OPEN,
    SET_SCHEDULER,
    TRY,
    as_root,
    finished_child,
    run_child,
    without_sys_nice,
)

pytestmark = pytest.mark.forked("any")

PUT_BACK_MS = 200
"""Within how much of its own processor time a spinning callback is ordinary again."""

# --- The setting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["on", "", "Required", 1, True])
def test_wrong_value_is_refused_at_the_call(value: object) -> None:
    with pytest.raises(
        InvalidArgument, match=r"realtime: expected (one of required, if_permitted, off|a text), got"
    ):
        aionn.open(realtime=value)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgument, match=r"collector: expected (one of ordinary, frozen, disabled|a text), got"
    ):
        aionn.open(collector=value)  # type: ignore[arg-type]


def test_wrong_variable_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_REALTIME", "yes")
    with pytest.raises(
        InvalidArgument, match="AIONN_REALTIME: expected one of required, if_permitted, off, got 'yes'"
    ):
        aionn.open()


def test_collector_is_frozen_with_real_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aionn.open().settings.collector == "ordinary"
    assert aionn.open(realtime="if_permitted").settings.collector == "frozen"
    assert aionn.open(realtime="if_permitted", collector="ordinary").settings.collector == "ordinary"
    monkeypatch.setenv("AIONN_COLLECTOR", "disabled")
    assert aionn.open().settings.collector == "disabled"


# --- Without real time ------------------------------------------------------------------------------------------------------


@pytest.mark.forked("none")
@pytest.mark.thorough
def test_off_changes_no_thread_and_starts_no_process() -> None:
    code = """
async def main():
    before = state()
    async with aionn.open(drivers=["reference"], realtime="off") as runtime:
        net = await runtime.compile(MODEL)
        await net.execute([X])
        children = [pid for tid in os.listdir("/proc/self/task") for pid in open(f"/proc/self/task/{tid}/children").read().split()]
        report = await runtime.realtime()
        (driver,) = [int(each) for each in children]
        threads = [os.sched_getscheduler(int(tid)) for tid in os.listdir(f"/proc/{driver}/task")]
        say(same=state() == before, granted=[report.is_realtime, report.permission, report.processes, report.memory],
            policies=sorted(set(threads)), frozen=gc.get_freeze_count())
asyncio.run(main())
"""
    assert run_child(OPEN + code) == {
        "same": True,
        "granted": [False, "", [], []],
        "policies": [0],
        "frozen": 0,
    }


# --- Threads ----------------------------------------------------------------------------------------------------------------


@as_root
def test_threads_of_both_processes_get_their_classes() -> None:
    code = """
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        nets = {p: await runtime.compile(MODEL, priority=p) for p in ("high", "medium", "low")}
        found = {}
        for priority, net in nets.items():
            async with net.burst() as burst:
                await burst.execute([X])
                found[priority] = rows(await runtime.realtime())["reference"]
        await nets["high"].execute([X])
        report = await runtime.realtime()
        policies = {}
        for process in report.processes:
            for row in process.rows:
                policies[row.name] = os.sched_getscheduler(row.tid)
        last = {**rows(report)["reference"], **rows(report)["application"]}
        ours = {int(tid) for tid in os.listdir("/proc/self/task")}
        realtime_here = [tid for tid in ours if os.sched_getscheduler(tid) & ~FLAG == RR]
    say(bursts={p: [row for name, row in each.items() if name.startswith("burst")] for p, each in found.items()}, last=last,
        flags=[bool(policy & FLAG) for policy in policies.values()], loop_alone=realtime_here == [threading.get_native_id()])
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found["bursts"]["high"] and all(
        row == ["real time", "SCHED_RR", 10] for row in found["bursts"]["high"]
    )
    assert found["bursts"]["medium"] and all(
        row == ["real time", "SCHED_RR", 5] for row in found["bursts"]["medium"]
    )
    assert found["bursts"]["low"] and all(
        row == ["ordinary", "SCHED_OTHER", 0] for row in found["bursts"]["low"]
    )
    last = found["last"]
    assert last["event loop"] == last["control"] == last["reference worker"] == ["real time", "SCHED_RR", 10]
    assert found["flags"] and all(found["flags"])
    assert found["loop_alone"]


@as_root
def test_threads_of_an_engines_pool_get_the_class_of_their_model() -> None:
    pytest.importorskip("ai_edge_litert")
    code = """
async def main():
    async with aionn.open(drivers=["litert-cpu"], realtime="required") as runtime:
        net = await runtime.compile("examples/data/shapes_float.tflite", priority="high")
        async with net.burst() as burst:
            for _ in range(6):
                await burst.execute([np.zeros((1, 96, 96, 3), np.float32)])
            found = [row for process in (await runtime.realtime()).processes for row in process.rows]
            say(engine=[[row.state, row.priority] for row in found if "engine" in row.name])
asyncio.run(main())
"""
    found = run_child(OPEN + code, environment={"AIONN_LITERT_THREADS": "2"})
    assert found["engine"] and all(row == ["real time", 10] for row in found["engine"])


@as_root
def test_job_runs_in_its_class_on_a_thread_that_waits_as_high() -> None:
    code = """
from aionn.testing.models import identity
import aionn.drivers.reference as reference
seen = []
run = reference.ReferencePreparedModel.run
def spy(self, *arguments):
    seen.append(state()[:2])
    return run(self, *arguments)
reference.ReferencePreparedModel.run = spy
async def main():
    async with aionn.open(drivers=["reference"], isolation="in_process", realtime="required") as runtime:
        net = await runtime.compile(identity())
        for priority in ("high", "medium", "low", "high"):
            await net.execute([np.ones(1, np.float32)], priority=priority)
        async with await runtime.compile(identity(), priority="low") as low:
            await low.execute([np.ones(1, np.float32)])
        waiting = [row[1:] for name, row in rows(await runtime.realtime())["application"].items() if "worker" in name]
    say(seen=seen, waiting=waiting)
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found["seen"] == [[2, 10], [2, 5], [0, 0], [2, 10], [0, 0]]
    assert found["waiting"] and all(row == ["SCHED_RR", 10] for row in found["waiting"])


@pytest.mark.sampled(2)
@as_root
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.thorough
def test_driver_process_that_replaces_a_dead_one_gets_its_classes(spare: bool) -> None:
    code = """
import signal
async def main():
    async with aionn.open(drivers=["reference"], realtime="required", spare_processes=SPARE) as runtime:
        await runtime.compile(MODEL)
        device = runtime.devices[0]
        first = device.pid
        while SPARE and device.hal.spare_pid is None:
            await asyncio.sleep(0.05)
        expected = device.hal.spare_pid
        os.kill(first, signal.SIGKILL)
        while device.pid is not None:
            await asyncio.sleep(0.01)
        net = await runtime.compile(MODEL, priority="high")
        async with net.burst() as burst:
            await burst.execute([X])
            report = rows(await runtime.realtime())["reference"]
        say(other=device.pid != first, is_spare=device.pid == expected, report=report)
asyncio.run(main())
"""
    found = run_child(OPEN + code.replace("SPARE", str(spare)))
    assert found["other"] and found["is_spare"] is spare
    assert found["report"]["control"] == ["real time", "SCHED_RR", 10]
    assert ["real time", "SCHED_RR", 10] in [row for name, row in found["report"].items() if "burst" in name]


@as_root
def test_processes_that_a_real_time_loop_starts_are_ordinary() -> None:
    code = """
import subprocess
ASK = "import os; print(os.sched_getscheduler(0))"
async def main():
    async with aionn.open(drivers=["reference"], realtime="required"):
        told = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True).stdout
        found = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        thread.start(); thread.join()
        pid = os.fork()
        if pid == 0:
            from aionn.realtime import current
            os._exit(10 * (current() is not None) + (os.sched_getscheduler(0) & ~FLAG))
        say(process=int(told), thread=found[0], forked=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
asyncio.run(main())
"""
    assert run_child(OPEN + code) == {"process": 0, "thread": 0, "forked": 0}


@as_root
def test_forked_child_has_no_loop_thread_and_no_lock_of_its_parent() -> None:
    code = """
from aionn.runtime.realtime import _loop_threads
async def main():
    async with aionn.open(drivers=["reference"], realtime="required"):
        with _loop_threads._lock:  # As another thread does while its runtime is opened.
            pid = os.fork()
            if pid == 0:
                os._exit(len(_loop_threads._count) + 10 * (not _loop_threads._lock.acquire(timeout=5)))
        say(forked=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
asyncio.run(main())
"""
    assert run_child(OPEN + code) == {"forked": 0}


@as_root
def test_blocking_runtime_gets_its_loops_thread_and_gives_it_back() -> None:
    code = """
import aionn.blocking
before = state()
with aionn.blocking.open(drivers=["reference"], realtime="required") as runtime:
    report = runtime.realtime()
    (row,) = report.processes[0].rows
    say(state=row.state, other=row.tid != threading.get_native_id(), same=state() == before)
say(left=[int(tid) for tid in os.listdir("/proc/self/task") if os.sched_getscheduler(int(tid)) & ~FLAG == RR])
"""
    assert run_child(OPEN + code) == {"state": "real time", "other": True, "same": True, "left": []}


# --- Given back -------------------------------------------------------------------------------------------------------------

ENDS = {
    "closed": """
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        during.append(state()[:2])
        await (await runtime.compile(MODEL)).execute([X])
    after.append(state())
""",
    "cancelled twice while closing": """
async def work(opened):
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        await runtime.compile(MODEL)
        during.append(state()[:2])
        opened.set()
        await asyncio.sleep(60)
async def main():
    opened = asyncio.Event()
    task = asyncio.create_task(work(opened))
    await opened.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    after.append(state())
""",
    "cancelled twice while opening": """
async def main():
    task = asyncio.create_task(aionn.open(drivers=["reference"], realtime="required").__aenter__())
    await asyncio.sleep(0.005)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    during.append([2, 10])
    after.append(state())
""",
    "failed to open": """
async def main():
    from aionn.errors import Error
    try:
        async with aionn.open(drivers=["nothing"], realtime="required"):
            pass
    except Error:
        during.append([2, 10])
    after.append(state())
""",
    "of two runtimes": """
async def main():
    first, second = (aionn.open(drivers=["reference"], realtime=mode) for mode in ("required", "if_permitted"))
    await first.__aenter__()
    await second.__aenter__()
    await first.aclose()
    during.append(state()[:2])
    await second.aclose()
    after.append(state())
""",
    "never closed": """
async def main():
    global kept
    kept = aionn.open(drivers=["reference"], realtime="required")
    await kept.__aenter__()
    during.append(state()[:2])
""",
}


@pytest.mark.sampled(6)
@as_root
@pytest.mark.parametrize("end", list(ENDS))
def test_loops_thread_is_as_it_was_before(end: str) -> None:
    code = """
async def whole():
    await main()
before, during, after = state(), [], []
asyncio.run(whole())
after.append(state())
from aionn.realtime import current
say(during=during, changed=[each for each in after if each != before], flag=os.sched_getscheduler(0) & FLAG,
    watchdog_left=current() is not None)
"""
    found = run_child(OPEN + ENDS[end] + code)
    assert found["during"] == [[2, 10]]
    assert found["changed"] == [] and found["flag"] == 0
    assert found["watchdog_left"] is (end == "never closed")


# --- Safety -----------------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.thorough
def test_spinning_callback_is_put_back_and_the_runtime_continues() -> None:
    code = """
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        net = await runtime.compile(MODEL)
        def spin():
            begun = time.thread_time()
            while os.sched_getscheduler(0) & ~FLAG == RR and time.thread_time() - begun < 0.45:
                pass
            say(ms=1e3 * (time.thread_time() - begun), policy=os.sched_getscheduler(0) & ~FLAG)
        asyncio.get_running_loop().call_soon(spin)
        await asyncio.sleep(0)
        result = await net.execute([X])
        (row,) = (await runtime.realtime()).processes[0].rows
        say(outputs=len(result.outputs), state=row.state, reason=row.reason)
    say(after=os.sched_getscheduler(0))
asyncio.run(main())
"""
    ended = finished_child(OPEN + code)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = {}
    for line in ended.stdout.splitlines():
        found |= json.loads(line)
    assert found["policy"] == 0 and float(str(found["ms"])) < PUT_BACK_MS
    assert (found["outputs"], found["state"], found["after"]) == (1, "put back", 0)
    assert re.search(
        r"aionn: the real-time thread 'event loop' \(\d+ of process \d+\) ran 1\d\d ms", ended.stderr
    )


@as_root
def test_driver_that_spins_is_put_back_and_named() -> None:
    code = """
import aionn.drivers.reference as reference
def spin(self, inputs, outputs, control):
    begun = time.thread_time()
    while os.sched_getscheduler(0) & ~FLAG == RR and time.thread_time() - begun < 0.45:
        pass
    took.append([1e3 * (time.thread_time() - begun), os.sched_getscheduler(0) & ~FLAG])
    return run(self, inputs, outputs, control)
took = []
run, reference.ReferencePreparedModel.run = reference.ReferencePreparedModel.run, spin
async def main():
    async with aionn.open(drivers=["reference"], isolation="in_process", realtime="required") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        await net.execute([X])
        states = [row.state for row in (await runtime.realtime()).processes[0].rows if "worker" in row.name]
        say(took=took, states=states)
asyncio.run(main())
"""
    ended = finished_child(OPEN + code)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    ((ms, policy),) = found["took"]
    assert ms < PUT_BACK_MS and policy == 0
    assert "put back" in found["states"]
    assert "aionn: the real-time thread 'reference worker'" in ended.stderr


@as_root
def test_limit_of_the_kernel_is_set_while_open_and_restored() -> None:
    code = """
RTTIME = resource.RLIMIT_RTTIME
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        await runtime.compile(MODEL)
        say(here=resource.getrlimit(RTTIME)[0], driver=resource.prlimit(runtime.devices[0].pid, RTTIME)[0])
asyncio.run(main())
say(after=resource.getrlimit(RTTIME)[0])
"""
    assert run_child(OPEN + code) == {"here": 500_000, "driver": 500_000, "after": 700_000}


@as_root
def test_limit_of_the_kernel_stays_until_the_last_of_several_runtimes_is_closed() -> None:
    code = """
import signal
def limit(): return [resource.getrlimit(resource.RLIMIT_RTTIME)[0], signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL]

async def main():
    before, found = limit(), []
    first, second, third = (aionn.open(drivers=["reference"], realtime="required", isolation="in_process") for _ in range(3))
    for change in (first.start, second.start, first.aclose, third.start, third.aclose, second.aclose):
        await change()
        found.append(limit())
    say(before=before, found=found)
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found["found"] == [[500_000, False]] * 5 + [found["before"]]


# --- Permission and refusal -------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.thorough
def test_required_without_permission_is_refused_with_the_remedy_and_permitted_alone_takes_what_is_free() -> (
    None
):
    found = run_child(OPEN + TRY, before=without_sys_nice("ipc_lock"))
    assert found["required"].startswith("real time is required: no real-time scheduling (")
    assert "\n" not in found["required"] and (
        "rtprio" in found["required"] or "SYS_NICE" in found["required"]
    )
    assert found["outputs"] == 1 and found["same"]
    assert found["rows"]["application"]["event loop"] == ["refused", "SCHED_OTHER", 0]
    assert {row[0] for row in found["rows"]["reference"].values()} == {"refused"}
    assert found["slack"] == "1"
    assert found["memory"] and all(row[0] for row in found["memory"])


@as_root
def test_limit_of_priorities_is_used_and_kept_to() -> None:
    found = run_child(OPEN + "limit(resource.RLIMIT_RTPRIO, 6)\n" + TRY, before=without_sys_nice())
    assert found["required"] is True and found["same"]
    assert found["rows"]["application"]["event loop"] == ["real time", "SCHED_RR", 4]
    assert {tuple(row) for row in found["rows"]["reference"].values()} == {("real time", "SCHED_RR", 4)}


@as_root
@pytest.mark.thorough
def test_limit_of_nice_values_is_used_in_both_processes() -> None:
    found = run_child(OPEN + "limit(resource.RLIMIT_NICE, 32)\n" + TRY, before=without_sys_nice())
    assert "no real-time scheduling" in found["required"]
    assert found["permission"].startswith("nice values down to -12")
    assert set(found["nice"]) == {-12} and len(found["nice"]) > 2
    assert {row[0] for each in found["rows"].values() for row in each.values()} == {"nice"}


@pytest.mark.sampled(2)
@as_root
@pytest.mark.parametrize(("number", "words"), [(1, "EPERM"), (38, "ENOSYS")])
@pytest.mark.thorough
def test_call_that_a_filter_refuses_refuses_required_and_stops_nothing(number: int, words: str) -> None:
    if not SET_SCHEDULER:
        pytest.skip("the number of the system call is not known here")
    found = run_child(OPEN + f"refuse({SET_SCHEDULER}, {number})\n" + TRY)
    assert words in found["required"] and found["required"].startswith("real time is required")
    assert found["outputs"] == 1 and found["same"]
    # CAP_SYS_NICE permits lower nice values, by another call. Without the refused one, threads inherit them.
    states = {tuple(row[:2]) for each in found["rows"].values() for row in each.values()}
    assert ("nice", "SCHED_OTHER") in states and states <= {
        ("nice", "SCHED_OTHER"),
        ("its own", "SCHED_OTHER"),
    }
    assert set(found["nice"]) == {-15}


@pytest.mark.forked("none")  # The server of forked processes compares limits.
@as_root
@pytest.mark.skipif(not LIMITS, reason="the number of the system call is not known for this processor")
def test_sandbox_that_refuses_to_read_limits_stops_nothing() -> None:
    code = f"""
async def main():
    async with aionn.open(drivers=["reference"], realtime="if_permitted") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        async with net.burst() as burst:
            result = await burst.execute([X])
            report = await runtime.realtime()
            found = rows(report)
        say(outputs=len(result.outputs), loop=found["application"]["event loop"], permission=report.permission)
refuse({LIMITS}, 1)
before = state()
asyncio.run(main())
say(same=state() == before)
"""
    found = run_child(OPEN + code)
    assert (found["outputs"], found["same"]) == (1, True)
    # As the capability permits, which no limit concerns.
    if "CAP_SYS_NICE" in found["permission"]:
        assert found["loop"] == ["real time", "SCHED_RR", 10]


@as_root
@pytest.mark.thorough
def test_limits_that_are_taken_away_while_it_runs_stop_nothing() -> None:
    code = """
limit(resource.RLIMIT_RTPRIO, 15)
async def main():
    async with aionn.open(drivers=["reference"], realtime="if_permitted") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
        resource.prlimit(runtime.devices[0].pid, resource.RLIMIT_RTPRIO, (0, 0))
        async with net.burst() as burst:
            result = await burst.execute([X])
            found = rows(await runtime.realtime())
        say(outputs=len(result.outputs), loop=found["application"]["event loop"],
            bursts=[row[0] for name, row in found["reference"].items() if "burst" in name])
    say(after=os.sched_getscheduler(0) & ~FLAG)
asyncio.run(main())
"""
    found = run_child(OPEN + code, before=without_sys_nice())
    assert (found["outputs"], found["after"]) == (1, 0)
    assert found["loop"] == ["real time", "SCHED_RR", 10]
    assert found["bursts"] and set(found["bursts"]) == {"refused"}


@as_root
def test_report_and_threads_of_all_processes_follow_the_death_of_the_watchdog() -> None:
    code = """
import signal
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        async with net.burst() as burst:
            await burst.execute([X])
            before = await runtime.realtime()
            os.kill(runtime._realtime.scheduling._end.pid, signal.SIGKILL)
            await asyncio.to_thread(runtime._realtime.scheduling._waiting.join)
            report = await runtime.realtime()
            end = time.monotonic() + 20
            while any(policy == "SCHED_RR" for each in rows(report).values() for _, policy, _ in each.values()):
                assert time.monotonic() < end, rows(report)
                await asyncio.sleep(0.01)
                report = await runtime.realtime()
            result = await burst.execute([X])
        say(was=before.is_realtime, now=report.is_realtime, permission=report.permission, outputs=len(result.outputs),
            states=sorted({state for each in rows(report).values() for state, _, _ in each.values()}), loop=state()[0])
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        say(again=(await runtime.realtime()).is_realtime, rr=state()[0] == RR)
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found == {
        "was": True,
        "now": False,
        "permission": "the watchdog over real-time threads has ended or does not answer, so no thread runs under SCHED_RR",
        "outputs": 1,
        "states": ["refused"],
        "loop": 0,
        "again": True,
        "rr": True,
    }

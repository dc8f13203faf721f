"""Memory, the collector, telemetry and commands with real time; each claim in a real child process."""

from __future__ import annotations

import pytest

from tests.aionn.realtime.children import OPEN, TRY, as_root, run_child, without_sys_nice

pytestmark = pytest.mark.forked("any")

# --- Memory and the collector -----------------------------------------------------------------------------------------------


@as_root
@pytest.mark.thorough
def test_memory_that_is_too_large_to_lock_works_and_is_reported() -> None:
    found = run_child(
        OPEN + "limit(resource.RLIMIT_MEMLOCK, 4096)\n" + TRY, before=without_sys_nice("ipc_lock")
    )
    assert found["outputs"] == 1
    refused = [row for row in found["memory"] if not row[1]]
    assert refused and all(
        touched and "RLIMIT_MEMLOCK is 4096 bytes" in reason for touched, _, reason in refused
    )
    assert "RLIMIT_MEMLOCK is 4096 bytes" in found["not_locked"]


@as_root
def test_memory_of_a_burst_is_locked_while_it_is_open() -> None:
    code = """
def locked():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1])
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        before = locked()
        async with net.burst() as burst:
            during = locked()
            await burst.execute([X])
            report = await runtime.realtime()
        dropped = net.burst()
        await dropped.__aenter__()
        del dropped, burst
        gc.collect()
        while locked() > before:
            await asyncio.sleep(0.01)
        say(before=before, during=during, driver=report.processes[1].not_locked, rows=[row.is_locked for row in report.memory])
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found["during"] > found["before"] == 0
    assert found["driver"] == "" and found["rows"] and all(found["rows"])


@pytest.mark.forked("none")
@pytest.mark.thorough
def test_collector_is_frozen_from_the_first_compilation_to_the_end() -> None:
    code = """
async def main():
    async with aionn.open(drivers=["reference"], collector="frozen") as runtime:
        before = gc.get_freeze_count()
        await runtime.compile(MODEL)
        say(before=before, during=gc.get_freeze_count() > 10_000, enabled=gc.isenabled())
    say(after=gc.get_freeze_count())
asyncio.run(main())
"""
    assert run_child(OPEN + code) == {"before": 0, "during": True, "enabled": True, "after": 0}


@as_root
def test_warm_burst_causes_no_page_faults() -> None:
    code = """
from aionn.realtime import PageFaults
def of_process(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return [int(fields[7]), int(fields[9])]  # minor, major
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        net = await runtime.compile(MODEL, priority="high")
        pid = runtime.devices[0].pid
        async with net.burst() as burst:
            for _ in range(400):
                await burst.execute([X])
            here, driver = [], []
            old = [of_process(os.getpid()), of_process(pid)]
            while len(here) < 6 or len(here) < 60 and not ([0, 0] in here[1:] and [0, 0] in driver[1:]):
                for _ in range(40):
                    await burst.execute([X])
                new = [of_process(os.getpid()), of_process(pid)]
                for steps, before, after in zip((here, driver), old, new):
                    steps.append([b - a for a, b in zip(before, after)])
                old = new
        say(here=here[1:], driver=driver[1:])
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    for process in ("here", "driver"):
        assert all(major == 0 for _, major in found[process]), found
        # Python takes and returns memory of its own now and then, and the kernel moves locked pages where it compacts memory; a
        # frame causes none.
        assert min(minor for minor, _ in found[process]) == 0, found


# --- Telemetry --------------------------------------------------------------------------------------------------------------


@as_root
def test_listeners_get_the_threads_of_all_processes() -> None:
    code = """
async def main():
    got = []
    async with aionn.open(drivers=["reference"], realtime="required", telemetry=[got.append]) as runtime:
        await runtime.compile(MODEL)
    (report,) = [each for each in got if each.kind == "threads"]
    say(found={process.process: [row.name for row in process.rows] for process in report.processes})
asyncio.run(main())
"""
    found = run_child(OPEN + code)["found"]
    assert found["application"] == ["event loop"]
    assert "control" in found["reference"]


def test_report_does_not_wait_for_a_process_that_has_stopped() -> None:
    code = """
import signal
import aionn.runtime.runtime as runtime_module
runtime_module.THREADS_S = 0.05
async def main():
    async with aionn.open(drivers=["reference"], realtime="if_permitted") as runtime:
        await runtime.compile(MODEL)
        os.kill(runtime.devices[0].pid, signal.SIGSTOP)
        (_, driver) = (await runtime.realtime()).processes
        os.kill(runtime.devices[0].pid, signal.SIGCONT)
        say(rows=driver.rows, reason=driver.not_locked)
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found == {"rows": [], "reason": "it did not answer within 0.05 s"}


# --- Commands ---------------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.thorough
def test_commands_refuse_required_without_permission_in_one_sentence() -> None:
    code = """
import subprocess
COMMANDS = {"bench": ["bench", MODEL], "serve": ["serve", "reference", "--socket", "/nonexistent/socket"]}
for name, words in COMMANDS.items():
    command = [sys.executable, "-m", "aionn", *words, "--realtime", "required"]
    ended = subprocess.run(command, capture_output=True, text=True)
    say(**{name: [ended.returncode, " ".join(ended.stderr.split())]})
"""
    found = run_child(OPEN + code, before=without_sys_nice())
    for status, words in found.values():
        assert status != 0
        assert (
            words.startswith("aionn: real time is required: no real-time scheduling (")
            and "Traceback" not in words
        )


@as_root
@pytest.mark.thorough
def test_served_device_has_the_scheduling_of_its_server() -> None:
    code = """
import subprocess, tempfile
async def main():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        command = [sys.executable, "-m", "aionn", "serve", "reference", "--socket", path, "--realtime", "required"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        server.stdout.readline()
        try:
            async with aionn.open(drivers=[], sockets=[path], realtime="if_permitted") as runtime:
                net = await runtime.compile(MODEL, priority="high")
                async with net.burst() as burst:
                    await burst.execute([X])
                    found = rows(await runtime.realtime())
        finally:
            server.terminate()
            code = server.wait()
            server.stdout.close()
    (name,) = [each for each in found if each != "application"]
    say(code=code, control=found[name]["control"], bursts=[row for each, row in found[name].items() if "burst" in each])
asyncio.run(main())
"""
    found = run_child(OPEN + code)
    assert found["code"] == 0 and found["control"] == ["real time", "SCHED_RR", 10]
    assert ["real time", "SCHED_RR", 10] in found["bursts"]

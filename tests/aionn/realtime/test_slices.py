"""Ordinary threads above LOW get a short slice, which needs no permission; in real child processes without privilege."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest

from aionn.cli.realtime import realtime_sentence
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.scheduling import Mode
from aionn.realtime.threads import State, ThreadRow
from aionn.realtime.threads.slices import SLICE_NS, read_attributes
from aionn.runtime.realtime import ProcessThreads, RealtimeReport
from tests.aionn.realtime.children import (
    GET_ATTRIBUTES,
    OPEN,
    SET_ATTRIBUTES,
    as_root,
    run_child,
    without_sys_nice,
)
from tests.aionn.realtime.test_threads import OTHER, RESET, THREADS


def has_slices() -> bool:
    """Whether this kernel has slices of single threads."""
    try:
        return os.sched_getscheduler(0) != OTHER or read_attributes(0).slice_ns > 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.forked("any"),
    pytest.mark.skipif(not has_slices(), reason="slices of single threads need Linux 6.12"),
]
known_numbers = pytest.mark.skipif(
    not SET_ATTRIBUTES, reason="the number of sched_setattr is known for x86_64 and aarch64 only"
)

SLICES = (
    THREADS
    + """
from aionn.realtime.threads.slices import SLICE_NS, read_attributes, set_slice
def slice_of(tid=0):
    return read_attributes(tid).slice_ns
ORDINARY_NS = slice_of()
NICE, NONE = Permission(Way.NICE, None, -12), Permission(Way.NONE)
"""
)


@pytest.mark.parametrize("way", ["NONE", "NICE"])
def test_threads_above_low_have_a_short_slice_and_low_ones_have_none(way: str) -> None:
    code = f"""
if {way} is NONE: drop()
threads = Threads({way}, None)
found = []
for scheduling_class in (HIGH, LOW, MEDIUM, LOW, HIGH):
    row = threads.acquire(scheduling_class, "test")
    found.append([row.slice_ns, row.slice_reason, slice_of() == ORDINARY_NS])
for scheduling_class in (LOW, MEDIUM, HIGH):
    threads.change(me, scheduling_class)
    row = threads.table()[0]
    found.append([row.slice_ns, row.slice_reason, slice_of() == ORDINARY_NS])
threads.call_as_low(lambda: found.append(slice_of() == ORDINARY_NS), ())
say(found=found, left=threads.give_back(), same=slice_of() == ORDINARY_NS)
"""
    if way == "NICE" and os.geteuid() != 0:
        pytest.skip("only root may lower nice values without a limit")
    short, own = [SLICE_NS, "", False], [None, "", True]
    assert run_child(SLICES + code) == {
        "found": [short, own, short, own, short, own, short, short, True],
        "left": "",
        "same": True,
    }


@as_root
def test_slice_stays_when_the_nice_value_changes() -> None:
    code = """
os.setpriority(os.PRIO_PROCESS, me, 0)
threads = Threads(NICE, None)
found = []
for scheduling_class in (HIGH, MEDIUM, HIGH):
    threads.change(me, scheduling_class) or threads.acquire(scheduling_class, "test")
    found.append([os.getpriority(os.PRIO_PROCESS, me), slice_of()])
os.setpriority(os.PRIO_PROCESS, me, 4)  # As another program does.
found.append([os.getpriority(os.PRIO_PROCESS, me), slice_of()])
threads.acquire(MEDIUM, "test")
found.append([os.getpriority(os.PRIO_PROCESS, me), slice_of()])
say(found=found, left=threads.give_back(), after=[os.getpriority(os.PRIO_PROCESS, me), slice_of() == ORDINARY_NS])
"""
    assert run_child(SLICES + code) == {
        "found": [[-12, SLICE_NS], [-8, SLICE_NS], [-12, SLICE_NS], [4, SLICE_NS], [-8, SLICE_NS]],
        "left": "",
        "after": [0, True],
    }


def test_slice_of_a_threads_own_is_restored() -> None:
    code = """
drop()
os.setpriority(os.PRIO_PROCESS, me, 19)
found = []
for own_ns in (5_000_000, 0):
    set_slice(0, own_ns)
    before = slice_of()
    threads = Threads(NONE, None)
    during = threads.acquire(HIGH, "test").slice_ns
    low = threads.acquire(LOW, "test") and slice_of()
    threads.acquire(HIGH, "test")
    found.append([during, low == before, threads.close(), slice_of() == before, os.getpriority(os.PRIO_PROCESS, me)])
say(found=found, differs=before != 5_000_000)
"""
    assert run_child(SLICES + code) == {"found": [[SLICE_NS, True, [], True, 19]] * 2, "differs": True}


def test_closing_restores_the_slices_of_all_threads() -> None:
    code = """
drop()
others = [Other() for _ in range(2)]
tids = [me, *(other.tid for other in others)]
set_slice(others[0].tid, 7_000_000)
before = [slice_of(tid) for tid in tids]
threads = Threads(NONE, None)
for tid in tids: threads.acquire(HIGH, f"test {tid}", tid)
during = [row.slice_ns for row in threads.table()]
left = threads.close()
after = [slice_of(tid) for tid in tids]
for other in others: other.close()
say(during=during, left=left, same=before == after, own=before[1])
"""
    assert run_child(SLICES + code) == {
        "during": [SLICE_NS] * 3,
        "left": [],
        "same": True,
        "own": 7_000_000,
    }


def test_new_threads_and_processes_have_the_kernels_slice() -> None:
    code = """
drop()
threads = Threads(NONE, None)
threads.acquire(HIGH, "test")
other = Other()
thread = slice_of(other.tid) == ORDINARY_NS
other.close()
pid = os.fork()
if pid == 0: os._exit(slice_of() == ORDINARY_NS)
process = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
say(thread=thread, process=process, left=threads.give_back(), policy=os.sched_getscheduler(0))
"""
    # The flag can be cleared with CAP_SYS_NICE only, and means nothing to an ordinary thread.
    assert run_child(SLICES + code) == {
        "thread": True,
        "process": 1,
        "left": "",
        "policy": OTHER | RESET,
    }


@as_root
def test_thread_whose_real_time_scheduling_is_refused_gets_a_slice_until_it_is_granted() -> None:
    code = """
class Deaf(Guard):
    is_deaf = True
    def watch(self, pid, tid, name): return not self.is_deaf
guard = Deaf()
threads = Threads(ask(), guard)
refused = threads.acquire(HIGH, "test")
guard.is_deaf = False
granted = threads.acquire(HIGH, "test")
threads.change(me, LOW)
low = slice_of() == ORDINARY_NS
threads.change(me, HIGH)
again = threads.table()[0]
threads.put_back(me, "it spins")
spins = [threads.table()[0].slice_ns, slice_of() == ORDINARY_NS]
say(refused=[refused.state, refused.slice_ns], granted=[granted.state, granted.slice_ns], low=low,
    again=[again.state, again.slice_ns], spins=spins, left=threads.close(), same=slice_of() == ORDINARY_NS)
"""
    assert run_child(SLICES + code) == {
        "refused": ["refused", SLICE_NS],
        "granted": ["real time", None],
        "low": True,
        "again": ["real time", None],
        "spins": [None, True],
        "left": [],
        "same": True,
    }


@pytest.mark.parametrize("policy", ["SCHED_BATCH", "SCHED_IDLE"])
def test_thread_with_another_policy_keeps_it_without_a_slice(policy: str) -> None:
    code = f"""
drop()
os.sched_setscheduler(0, os.{policy}, os.sched_param(0))
threads = Threads(NONE, None)
row = threads.acquire(HIGH, "test")
say(row=[row.policy, row.slice_ns, row.slice_reason], left=threads.give_back(), after=os.sched_getscheduler(0) == os.{policy})
"""
    assert run_child(SLICES + code) == {
        "row": [policy, None, f"{policy} has no slices"],
        "left": "",
        "after": True,
    }


@as_root
def test_thread_with_a_negative_nice_value_of_its_own_leaves_it_to_its_children() -> None:
    code = """
os.setpriority(os.PRIO_PROCESS, me, -5)
drop()
threads = Threads(NONE, None)
row = threads.acquire(HIGH, "test")
other = Other()
nice = os.getpriority(os.PRIO_PROCESS, other.tid)
other.close()
say(slice=row.slice_ns, reason=row.slice_reason, nice=nice, left=threads.give_back(), policy=os.sched_getscheduler(0))
"""
    assert run_child(SLICES + code) == {
        "slice": None,
        "reason": "it keeps the kernel's slice with its own nice value -5",
        "nice": -5,
        "left": "",
        "policy": OTHER,
    }


@known_numbers
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", [SET_ATTRIBUTES, GET_ATTRIBUTES])
def test_filter_that_refuses_the_system_call_is_reported(call: int, number: int) -> None:
    code = f"""
drop()
refuse({call}, {number})
before = state()
threads = Threads(NONE, None)
row = threads.acquire(HIGH, "test")
say(state=row.state, slack=row.slack_ns, slice=row.slice_ns, reason=row.slice_reason, changed=threads.change(me, LOW),
    left=threads.close(), same=state() == before)
"""
    assert run_child(SLICES + code) == {
        "state": "refused",
        "slack": 1,
        "slice": None,
        "reason": f"sched_setattr failed with {errno.errorcode[number]}",
        "changed": True,
        "left": [],
        "same": True,
    }


@known_numbers
def test_filter_that_comes_later_is_reported_and_leaves_the_thread_usable() -> None:
    code = f"""
drop()
threads = Threads(NONE, None)
first = threads.acquire(HIGH, "test").slice_ns
refuse({SET_ATTRIBUTES}, {errno.EPERM})
changed = threads.change(me, LOW)
row = threads.table()[0]
say(first=first, changed=changed, reason=row.slice_reason, left=threads.close())
"""
    refused = "sched_setattr failed with EPERM"
    found = run_child(SLICES + code)
    assert (found["first"], found["changed"], found["reason"]) == (SLICE_NS, True, refused)
    assert len(found["left"]) == 1 and found["left"][0].endswith(refused)


def test_older_kernel_is_reported_and_changes_nothing() -> None:
    # It reports a slice of 0.
    code = """
drop()
from aionn.realtime.threads import slices
unpack = slices._LAYOUT.unpack
class Older:
    size, pack = slices._LAYOUT.size, slices._LAYOUT.pack
    @staticmethod
    def unpack(data):
        values = list(unpack(data))
        values[5] = 0
        return tuple(values)
slices._LAYOUT = Older
before = state()
threads = Threads(NONE, None)
row = threads.acquire(HIGH, "test")
say(slice=row.slice_ns, reason=row.slice_reason, left=threads.close(), same=state() == before)
"""
    assert run_child(SLICES + code) == {
        "slice": None,
        "reason": "the kernel has no slices of single threads; Linux 6.12 and newer have",
        "left": [],
        "same": True,
    }


def test_sentence_of_commands_counts_the_slices() -> None:
    row = ThreadRow(7, "event loop", SchedulingClass.HIGH, State.REFUSED, "SCHED_OTHER", 0, 0, 1)
    rows = (row, msgspec.structs.replace(row, slice_ns=SLICE_NS))
    report = RealtimeReport(Mode.IF_PERMITTED, False, "none", (ProcessThreads("application", 7, rows),))
    assert realtime_sentence(report) == "0 of 2 threads under SCHED_RR, 1 with a slice of 0.1 ms; none"
    none = msgspec.structs.replace(report, processes=(ProcessThreads("application", 7, (row,)),))
    assert realtime_sentence(none) == "0 of 1 threads under SCHED_RR; none"


@pytest.mark.thorough
def test_unprivileged_runtime_has_slices_on_its_path_and_none_on_low_threads() -> None:
    code = """
from aionn.realtime.threads.slices import read_attributes
limit(resource.RLIMIT_RTPRIO, 0); limit(resource.RLIMIT_NICE, 0)
async def main():
    before = [read_attributes(0).slice_ns, state()]
    async with aionn.open(drivers=["reference"], realtime="if_permitted") as runtime:
        high, low = [await runtime.compile(MODEL, priority=p) for p in ("high", "low")]
        async with high.burst() as first:
            await first.execute([X])
            found = {row.name: row.slice_ns for process in (await runtime.realtime()).processes for row in process.rows}
            async with low.burst() as second:
                await second.execute([X])
                lows = [row.slice_ns for process in (await runtime.realtime()).processes for row in process.rows
                        if row.scheduling_class == 0]
        say(found=sorted({name.rstrip("0123456789 "): each for name, each in found.items()}.items()), lows=lows)
    say(same=[read_attributes(0).slice_ns, state()] == before)
asyncio.run(main())
"""
    found = run_child(OPEN + code, before=without_sys_nice() if os.geteuid() == 0 else ())
    names = dict(found["found"])
    assert {"event loop", "control", "burst"} <= set(names)
    assert set(names.values()) == {SLICE_NS}
    assert found["lows"] == [None]
    assert found["same"]

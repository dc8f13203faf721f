"""Threads are granted what the process may give, and are afterwards what they were before; in real child processes."""

from __future__ import annotations

import errno

import pytest

from tests.aionn.realtime.children import SET_SCHEDULER, as_root, run_child

pytestmark = pytest.mark.forked("any")

THREADS = """
from aionn.realtime.permission import Permission, Way, ask
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.threads import Threads, threads_here
LOW, MEDIUM, HIGH = SchedulingClass
me = threading.get_native_id()

class Guard:
    "A watchdog that only notes; the kernel's limit ends this process if it spins."
    def __init__(self): self.told = []
    def watch(self, pid, tid, name): self.told.append(["watch", tid, name]); return True
    def forget(self, pid, tid): self.told.append(["forget", tid])
    def take_put_back(self): return []
    def take_rested(self): return []

def state(tid=me):
    slack = open(f"/proc/{tid}/timerslack_ns").read().strip()
    return [os.sched_getscheduler(tid), os.sched_getparam(tid).sched_priority, os.getpriority(os.PRIO_PROCESS, tid), slack]

class Other:
    "A thread that waits until it is told to end."
    def __init__(self):
        self.end, ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: (ready.set(), self.end.wait()))
        self.thread.start()
        ready.wait()
        self.tid = self.thread.native_id
    def close(self):
        self.end.set()
        self.thread.join()
        while self.tid in threads_here():  # The kernel's part ends a moment later.
            os.sched_yield()
"""
RESET = 1 << 30
"""SCHED_RESET_ON_FORK."""

OTHER, FIFO, RR, BATCH, IDLE = 0, 1, 2, 3, 5


@as_root
@pytest.mark.parametrize("policy", [OTHER, BATCH, IDLE, OTHER | RESET])
def test_thread_is_what_it_was_after_it_is_given_back(policy: int) -> None:
    code = f"""
os.sched_setscheduler(0, {policy}, os.sched_param(0))
if {policy} != {IDLE}: os.setpriority(os.PRIO_PROCESS, me, 3)
open(f"/proc/{{me}}/timerslack_ns", "w").write("12345")
before = state()
threads = Threads(ask(), Guard())
during = []
for scheduling_class in (HIGH, MEDIUM, LOW, HIGH):
    row = threads.acquire(scheduling_class, "test")
    during.append([row.state, row.policy, row.priority, *state()[:2]])
say(before=before, during=during, left=threads.give_back(), after=state())
"""
    found = run_child(THREADS + code)
    assert found["left"] == ""
    assert found["after"] == found["before"]
    high, medium, low, _ = found["during"]
    assert high == ["real time", "SCHED_RR", 10, RR | RESET, 10]
    assert medium == ["real time", "SCHED_RR", 5, RR | RESET, 5]
    assert low[0] == "ordinary" and low[3] == policy | RESET


@as_root
def test_thread_with_a_policy_of_its_own_keeps_it() -> None:
    code = """
threads = Threads(ask(), Guard())
found = []
for policy, priority in ((os.SCHED_FIFO, 40), (os.SCHED_RR, 3)):
    os.sched_setscheduler(0, policy, os.sched_param(priority))
    before = state()
    row = threads.acquire(HIGH, "test")
    low = threads.acquire(LOW, "test").policy
    found.append([row.state, row.priority, low, threads.give_back(), state() == before])
say(found=found)
"""
    assert run_child(THREADS + code)["found"] == [
        ["its own", 40, "SCHED_OTHER", "", True],
        ["real time", 10, "SCHED_OTHER", "", True],
    ]


@as_root
def test_closing_leaves_every_thread_as_it_was() -> None:
    code = """
others = [Other() for _ in range(3)]
tids = [me, *(other.tid for other in others)]
os.setpriority(os.PRIO_PROCESS, others[1].tid, 7)
before = [state(tid) for tid in tids]
guard = Guard()
threads = Threads(ask(), guard)
for tid, scheduling_class in zip(tids, (HIGH, MEDIUM, HIGH, LOW)):
    threads.acquire(scheduling_class, f"test {tid}", tid)
during = [[row.state, row.priority] for row in threads.table()]
left = threads.close()
after = [state(tid) for tid in tids]
for other in others: other.close()
say(is_same=after == before, during=during, left=left, rows=len(threads.table()),
    watched=sum(t[0] == "watch" for t in guard.told), forgotten=sum(t[0] == "forget" for t in guard.told))
"""
    assert run_child(THREADS + code) == {
        "is_same": True,
        "during": [["real time", 10], ["real time", 5], ["real time", 10], ["ordinary", 0]],
        "left": [],
        "rows": 0,
        "watched": 3,
        "forgotten": 4,
    }


@as_root
def test_children_and_threads_of_a_real_time_thread_are_ordinary() -> None:
    code = """
threads = Threads(ask(), Guard())
threads.acquire(HIGH, "test")
other = Other()
inherited = os.sched_getscheduler(other.tid)
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, str(os.sched_getscheduler(0)).encode())
    os._exit(0)
child = int(os.read(read, 16))
os.wait()
threads.close()
other.close()
say(inherited=inherited, child=child)
"""
    assert run_child(THREADS + code) == {"inherited": OTHER, "child": OTHER}


@as_root
def test_a_limit_that_is_lowered_meanwhile_is_told_and_hurts_nothing() -> None:
    code = """
threads = Threads(ask(), Guard())
first = threads.acquire(HIGH, "test").state
os.setresuid(65534, 65534, 65534)
kept = threads.table()[0].state
low = threads.acquire(LOW, "test")
again = threads.acquire(HIGH, "test")
changed = threads.change(me, MEDIUM)
say(first=first, kept=kept, low=low.state, again=again.state, reason=again.reason, changed=changed,
    left=threads.give_back(), policy=os.sched_getscheduler(0))
"""
    assert run_child(THREADS + code) == {
        "first": "real time",
        "kept": "real time",
        "low": "ordinary",
        "again": "refused",
        "reason": "sched_setscheduler failed with EPERM",
        "changed": False,
        "left": "",
        # The flag can be cleared with CAP_SYS_NICE only, and means nothing to an ordinary thread.
        "policy": OTHER | RESET,
    }


@as_root
def test_unprivileged_process_with_a_limit_gives_threads_back() -> None:
    code = """
drop(rtprio=20)
threads = Threads(ask(), Guard())
states = [threads.acquire(c, "test").state for c in (HIGH, LOW, MEDIUM)]
say(states=states, left=threads.give_back(), after=state())
"""
    found = run_child(THREADS + code)
    assert found["states"] == ["real time", "ordinary", "real time"]
    assert found["left"] == "" and found["after"][:3] == [OTHER | RESET, 0, 0]


@as_root
def test_nice_values_stand_in_where_real_time_is_refused() -> None:
    code = """
os.setpriority(os.PRIO_PROCESS, me, 2)
before = state()
threads = Threads(Permission(Way.NICE, None, -12), None)
found = [[row.state, row.nice] for row in (threads.acquire(c, "test") for c in (HIGH, MEDIUM, LOW, HIGH))]
say(found=found, left=threads.give_back(), is_same=state() == before)
"""
    assert run_child(THREADS + code) == {
        "found": [["nice", -12], ["nice", -8], ["ordinary", 2], ["nice", -12]],
        "left": "",
        "is_same": True,
    }


def test_without_permission_the_table_says_why_and_the_slack_is_set_all_the_same() -> None:
    code = """
drop()
before = state()
threads = Threads(ask(), None)
row = threads.acquire(HIGH, "test")
left, after = threads.give_back(), state()
say(state=row.state, policy=row.policy, slack=row.slack_ns, reason=row.reason, left=left, is_same=after[1:] == before[1:],
    policy_after=after[0])
"""
    found = run_child(THREADS + code)
    assert (found["state"], found["policy"], found["slack"]) == ("refused", "SCHED_OTHER", 1)
    assert found["reason"] == "real-time scheduling is not permitted"
    assert found["left"] == "" and found["is_same"]
    # A thread that had a slice keeps the flag.
    assert found["policy_after"] in (OTHER, OTHER | RESET)


@as_root
def test_no_thread_is_made_real_time_without_a_watchdog() -> None:
    code = """
class Dead(Guard):
    def watch(self, pid, tid, name): return False
found = [[row.state, row.policy, row.reason] for row in (Threads(ask(), guard).acquire(HIGH, "x") for guard in (None, Dead()))]
say(found=found)
"""
    assert run_child(THREADS + code)["found"] == [
        ["refused", "SCHED_OTHER", "there is no watchdog to monitor real-time threads"],
        ["refused", "SCHED_OTHER", "the watchdog cannot monitor it"],
    ]


@as_root
def test_thread_that_has_ended_is_told_and_left_alone() -> None:
    code = """
threads = Threads(ask(), Guard())
other = Other()
threads.acquire(MEDIUM, "short", other.tid)
other.close()
row = threads.table()[0]
changed = threads.change(other.tid, HIGH)
left = threads.close()
never = threads.acquire(HIGH, "none", 1 << 21).state
say(state=row.state, changed=changed, left=left, never=never, rows=len(threads.table()))
"""
    assert run_child(THREADS + code) == {
        "state": "gone",
        "changed": False,
        "left": [],
        "never": "gone",
        "rows": 0,
    }


@as_root
def test_put_back_thread_stays_ordinary_until_it_is_acquired_again() -> None:
    code = """
threads = Threads(ask(), Guard())
threads.acquire(HIGH, "test")
threads.put_back(me, "it spins")
row = threads.table()[0]
changed = threads.change(me, HIGH)
policy = os.sched_getscheduler(0)
again = threads.acquire(HIGH, "test").state
threads.close()
say(state=row.state, reason=row.reason, changed=changed, policy=policy, again=again)
"""
    assert run_child(THREADS + code) == {
        "state": "put back",
        "reason": "it spins",
        "changed": False,
        "policy": OTHER | RESET,
        "again": "real time",
    }


@as_root
def test_deadline_of_the_kernel_stays() -> None:
    code = """
import struct
number = {"x86_64": 314, "aarch64": 274}.get(os.uname().machine)
attributes = struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 1_000_000, 10_000_000, 10_000_000)
libc = ctypes.CDLL(None, use_errno=True)
taken = number and libc.syscall(number, 0, attributes, 0) == 0
threads = Threads(ask(), Guard())
row = threads.acquire(HIGH, "test")
say(taken=bool(taken), state=row.state, policy=row.policy, left=threads.give_back(), after=os.sched_getscheduler(0))
"""
    found = run_child(THREADS + code)
    if not found["taken"]:
        pytest.skip("this kernel admits no SCHED_DEADLINE thread")
    assert (found["state"], found["policy"]) == ("its own", "SCHED_DEADLINE")
    assert found["left"] == "" and found["after"] == 6


@as_root
@pytest.mark.skipif(not SET_SCHEDULER, reason="the number of the system call is not known here")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_nice_value_is_restored_where_a_sandbox_refuses_to_set_policies(number: int) -> None:
    code = f"""
refuse({SET_SCHEDULER}, {number})
before = state()
threads = Threads(Permission(Way.NICE, None, -15), None)
row = threads.acquire(HIGH, "nice")
left = threads.give_back()
say(before=before, row=row.state, nice=row.nice, left=left, after=state())
"""
    found = run_child(THREADS + code)
    assert (found["row"], found["nice"]) == ("nice", -15)
    assert found["after"][1:] == found["before"][1:], "all but SCHED_RESET_ON_FORK"
    assert found["left"] in ("", f"sched_setscheduler failed with {errno.errorcode[number]}")


RESTED = """
class Reports(Guard):
    "A watchdog whose reports a test makes."
    def __init__(self): super().__init__(); self.put_back, self.rested = [], []
    def take_put_back(self): taken, self.put_back = self.put_back, []; return taken
    def take_rested(self): taken, self.rested = self.rested, []; return taken

guard = Reports()
threads = Threads(ask(), guard)
threads.acquire(HIGH, "test")
def put_back(rests=1):
    os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    guard.put_back = [(os.getpid(), me, 124_000_000, rests)]
def rested():
    guard.rested = [(os.getpid(), me)]
    row = threads.table()[0]
    return [row.state, row.priority, row.reason, row.times_put_back]
"""


@as_root
def test_rested_thread_gets_its_class_again_and_the_report_counts() -> None:
    code = """
put_back()
row = threads.table()[0]
say(state=row.state, reason=row.reason, again=rested())
put_back(0)
say(last=threads.table()[0].reason)
threads.close()
"""
    assert run_child(THREADS + RESTED + code) == {
        "state": "put back",
        "reason": "it ran 124 ms without a pause, and gets real time again after 5 s without that",
        "again": ["real time", 10, "", 1],
        "last": "it ran 124 ms without a pause, and stays ordinary",
    }


@as_root
def test_thread_that_rested_during_a_low_job_gets_real_time_after_it() -> None:
    code = """
put_back()
threads.table()
changed = threads.change(me, LOW)
during = rested()
say(changed=changed, during=during, change=threads.change(me, HIGH), after=threads.table()[0].state)
put_back()
threads.table()
during = threads.call_as_low(rested, ())
say(call=during, end=threads.table()[0].state, left=threads.close())
"""
    assert run_child(THREADS + RESTED + code) == {
        "changed": False,
        "during": ["ordinary", 0, "", 1],
        "change": True,
        "after": "real time",
        "call": ["ordinary", 0, "", 2],
        "end": "real time",
        "left": [],
    }


@as_root
def test_report_of_a_rest_changes_no_thread_that_another_process_made_ordinary() -> None:
    code = """
os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
say(row=rested(), gone=threads.give_back(), late=[guard.rested.append((os.getpid(), me)), threads.table()][1])
"""
    assert run_child(THREADS + RESTED + code) == {
        "row": ["put back", 0, "another process made it ordinary", 0],
        "gone": "",
        "late": [],
    }

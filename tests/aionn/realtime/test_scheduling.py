"""One object from the setting to the last thread given back, in two processes; real child processes."""

from __future__ import annotations

import pytest

from aionn.errors import InvalidArgument
from aionn.realtime import Mode, Scheduling, SchedulingClass
from tests.aionn.realtime.children import as_root, run_child

pytestmark = pytest.mark.forked("any")


def test_off_grants_nothing_and_starts_nothing() -> None:
    scheduling = Scheduling.open(Mode.OFF)
    assert not scheduling.is_realtime and scheduling.permission is None
    assert scheduling.acquire(SchedulingClass.HIGH, "test") is None
    assert not scheduling.change(1, SchedulingClass.LOW)
    assert scheduling.lend() is None and scheduling.table() == [] and scheduling.close() == []


@pytest.mark.parametrize("text", ["", "on", "REQUIRED", None, 1, []])
def test_mode_of_another_name_is_refused(text: object) -> None:
    with pytest.raises(InvalidArgument, match="realtime: expected one of required, if_permitted, off, got"):
        Mode.parse(text, "realtime")


OPEN = """
from aionn.errors import DeviceUnavailable
from aionn.realtime import Mode, Scheduling, SchedulingClass
HIGH = SchedulingClass.HIGH
"""


def test_required_without_permission_is_refused_in_a_sentence_with_the_remedy() -> None:
    code = """
drop()
try:
    Scheduling.open(Mode.REQUIRED)
except DeviceUnavailable as e:
    say(told=str(e))
scheduling = Scheduling.open(Mode.IF_PERMITTED)
say(state=scheduling.acquire(HIGH, "test").state, lent=scheduling.lend(), left=scheduling.close())
"""
    found = run_child(OPEN + code)
    assert found["told"].startswith(
        "real time is required: no real-time scheduling (the process has no CAP_SYS_NICE"
    )
    assert (
        "rtprio" in found["told"]
        or "SYS_NICE to securityContext" in found["told"]
        or "LimitRTPRIO" in found["told"]
    )
    assert "\n" not in found["told"]
    assert (found["state"], found["lent"], found["left"]) == ("refused", None, [])


@as_root
def test_driver_process_joins_by_a_lent_connection() -> None:
    code = """
import msgspec, subprocess
from aionn.realtime.scheduling import Lent
DRIVER = '''
import json, os, socket, sys
import msgspec
from aionn.realtime import Scheduling, SchedulingClass
from aionn.realtime.scheduling import Lent
lent = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Lent)
scheduling = Scheduling.join(lent, socket.socket(fileno=int(sys.argv[2])))
row = scheduling.acquire(SchedulingClass.MEDIUM, "worker")
none = scheduling.lend()
left = scheduling.close()
print(json.dumps([row.state, row.priority, none, left, os.sched_getscheduler(0)]))
'''
scheduling = Scheduling.open(Mode.IF_PERMITTED)
lent, end = scheduling.lend()
words = msgspec.msgpack.encode(lent).hex()
command = [sys.executable, "-c", DRIVER, words, str(end.fileno())]
ended = subprocess.run(command, pass_fds=[end.fileno()], capture_output=True, text=True)
end.close()
assert ended.returncode == 0, ended.stderr
say(driver=json.loads(ended.stdout), is_realtime=scheduling.is_realtime, left=scheduling.close(), again=scheduling.close())
"""
    assert run_child(OPEN + code) == {
        "driver": ["real time", 5, None, [], 0],
        "is_realtime": True,
        "left": [],
        "again": [],
    }


@as_root
def test_real_time_that_cannot_be_watched_is_no_real_time() -> None:
    code = """
from aionn.realtime import watchdog
watchdog.sys.executable = "/nonexistent/python"
try:
    Scheduling.open(Mode.REQUIRED)
except DeviceUnavailable as e:
    say(told=str(e))
scheduling = Scheduling.open(Mode.IF_PERMITTED)
row = scheduling.acquire(HIGH, "test")
say(state=row.state, reason=row.reason, left=scheduling.close())
"""
    found = run_child(OPEN + code)
    assert "the watchdog over real-time threads cannot be started" in found["told"]
    assert (found["state"], found["reason"]) == (
        "refused",
        "there is no watchdog to monitor real-time threads",
    )


@pytest.mark.parametrize("may_join", [False, True])
def test_process_joins_one_scheduling_of_the_client_that_started_it(may_join: bool) -> None:
    code = """
from aionn.errors import InvalidArgument
from aionn.realtime import Permission, current
from aionn.realtime.permission import Way
from aionn.realtime.scheduling import Lent
from aionn.service.host.threads import HostThreads
threads = HostThreads(may_join=MAY)
refused = []
for _ in range(2):
    try:
        threads.join(Lent(Permission(Way.NONE)))
        refused.append(False)
    except InvalidArgument:
        refused.append(True)
joined = current() is not None
threads.close()
say(refused=refused, joined=joined, left=current() is not None)
"""
    found = run_child(code.replace("MAY", str(may_join)))
    assert found == {"refused": [not may_join, True], "joined": may_join, "left": False}


@as_root
def test_objects_of_a_process_are_shared_until_the_last_user_has_closed() -> None:
    code = """
from aionn.realtime.scheduling import close_shared, current, open_shared
first = open_shared(Mode.IF_PERMITTED)
second = open_shared(Mode.REQUIRED)
first.acquire(HIGH, "test")
close_shared()
between = [current() is first, os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK]
pid = os.fork()
if pid == 0:
    os._exit(current() is not None)
forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
close_shared()
say(same=second is first, between=between, forked=forked, left=[current() is not None, os.sched_getscheduler(0)])
"""
    assert run_child(OPEN + code) == {"same": True, "between": [True, 2], "forked": 0, "left": [False, 0]}


# --- The end of the watchdog ------------------------------------------------------------------------------------------------


@as_root
def test_without_the_watchdog_every_thread_is_ordinary() -> None:
    code = """
import signal
scheduling = Scheduling.open(Mode.REQUIRED)
scheduling.acquire(HIGH, "test")
scheduling.acquire(SchedulingClass.LOW, "low", low.native_id)
before = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
os.kill(scheduling._end.pid, signal.SIGKILL)
scheduling._waiting.join()
policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
rows = {row.name: [row.state, row.reason] for row in scheduling.table()}
raised = scheduling.change(low.native_id, HIGH)
later = scheduling.acquire(HIGH, "test")
say(policies=[before, policy], is_realtime=scheduling.is_realtime, sentence=scheduling.sentence, rows=rows, raised=raised,
    later=[later.state, later.policy], lent=scheduling.lend(), slices=later.slice_ns or later.slice_reason != "",
    left=scheduling.close(), after=os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)
done.set()
"""
    start = """
done = threading.Event()
low = threading.Thread(target=done.wait)
low.start()
"""
    found = run_child(OPEN + start + code)
    why = "the watchdog over real-time threads has ended or does not answer, so no thread runs under SCHED_RR"
    assert found["policies"] == [2, 0] and not found["is_realtime"] and found["sentence"] == why
    assert found["rows"] == {"test": ["refused", why], "low": ["ordinary", ""]}
    assert not found["raised"] and found["later"] == ["refused", "SCHED_OTHER"]
    assert found["lent"] is None and found["slices"] and found["left"] == [] and found["after"] == 0


@as_root
@pytest.mark.parametrize("way", ["change", "call_as_low"])
def test_thread_that_changes_its_class_while_the_watchdog_ends_is_ordinary(way: str) -> None:
    code = """
import signal
scheduling = Scheduling.open(Mode.REQUIRED)
scheduling.acquire(HIGH, "test")
def end():
    "Kills the watchdog, and has the table notice it in the middle of the change."
    os.kill(scheduling._end.pid, signal.SIGKILL)
    scheduling._waiting.join()
if sys.argv[1] == "call_as_low":
    scheduling.call_as_low(end, ())
else:
    from aionn.realtime.threads import table
    switch = table.set_policy
    def set_policy(*arguments):
        end()
        return switch(*arguments)
    scheduling.change(threading.get_native_id(), SchedulingClass.MEDIUM)
    table.set_policy = set_policy
    say(changed=scheduling.change(threading.get_native_id(), HIGH))
(row,) = scheduling.table()
say(policy=os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, state=row.state, left=scheduling.close())
"""
    found = run_child(OPEN + code, arguments=[way])
    assert (found["policy"], found["state"], found["left"]) == (0, "refused", [])
    assert found.get("changed") is not True


@as_root
def test_watchdog_that_does_not_answer_costs_one_second_once_and_real_time() -> None:
    code = """
import signal
from aionn.realtime import watchdog
watchdog.END_S = 0.1  # Before it is killed.
scheduling = Scheduling.open(Mode.REQUIRED)
scheduling.acquire(HIGH, "test")
done = threading.Event()
others = [threading.Thread(target=done.wait) for _ in range(8)]
for other in others:
    other.start()
os.kill(scheduling._end.pid, signal.SIGSTOP)
states = [scheduling.acquire(HIGH, "other", other.native_id).state for other in others[:1]]
scheduling._waiting.join()
sent = []
scheduling._end._send = lambda message: sent.append(message) or True
states += [scheduling.acquire(HIGH, "other", other.native_id).state for other in others[1:]]
say(policy=os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, states=states, is_realtime=scheduling.is_realtime, asked=len(sent))
done.set()
scheduling.close()
"""
    assert run_child(OPEN + code) == {
        "policy": 0,
        "states": ["refused"] * 8,
        "is_realtime": False,
        "asked": 0,
    }


@as_root
def test_fork_beside_a_thread_that_looks_at_the_table_leaves_the_child_no_held_lock() -> None:
    """The thread that waits for the watchdog's messages may hold the table's lock, and is not there in the child."""
    code = """
scheduling = open_shared(Mode.REQUIRED)
scheduling.acquire(HIGH, "test")
is_held, may_end = threading.Event(), threading.Event()
def hold():
    with scheduling._lock, scheduling._threads._lock, scheduling._end._lock:
        is_held.set()
        may_end.wait()
thread = threading.Thread(target=hold)
thread.start()
is_held.wait()
child = os.fork()
if child == 0:
    scheduling.table()
    os._exit(0)
status = None
for _ in range(1000):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    status = "hangs"
may_end.set()
thread.join()
say(status=status)
close_shared()
"""
    assert run_child("from aionn.realtime.scheduling import close_shared, open_shared\n" + OPEN + code) == {
        "status": 0
    }


@as_root
def test_forked_child_does_not_touch_the_threads_of_its_parent() -> None:
    code = """
scheduling = open_shared(Mode.REQUIRED)
scheduling.acquire(HIGH, "test")
child = os.fork()
if child == 0:
    scheduling.table()
    os._exit(0)
_, status = os.waitpid(child, 0)
say(status=status, policy=os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, is_realtime=scheduling.is_realtime)
close_shared()
"""
    assert run_child("from aionn.realtime.scheduling import close_shared, open_shared\n" + OPEN + code) == {
        "status": 0,
        "policy": 2,
        "is_realtime": True,
    }

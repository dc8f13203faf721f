"""A real-time thread that does not yield is put back, whatever it does with the interpreter's lock; in real child processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aionn.realtime import watching
from aionn.realtime.watching import (
    BUDGET_NS,
    MESSAGE_BYTES_MAX,
    NAME_LENGTH_MAX,
    PERIOD_MS,
    REST_NS,
    REST_WINDOW_NS,
    RESTS_MAX,
    Pauses,
    Rests,
    Standing,
)
from tests.aionn.realtime.children import CHILD_S, OPEN, as_root, finished_child, run_child, without_sys_nice

pytestmark = pytest.mark.forked("any")

PUT_BACK_MS = 200
"""Within how much of its own processor time a spinning thread is ordinary again."""

NOTICED_MS = BUDGET_NS / 1e6 + 2 * PERIOD_MS
"""What a thread has run at most when it is put back, on a machine that runs the watchdog at once."""

WATCHDOG = """
from aionn.realtime.permission import ask
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.threads import Threads
from aionn.realtime.watchdog import Watchdog, WatchdogEnd
HIGH = SchedulingClass.HIGH
permission = ask()
watchdog = Watchdog(permission)
threads = Threads(permission, watchdog)
RR, FLAG = os.SCHED_RR, os.SCHED_RESET_ON_FORK
"""


# --- The process ----------------------------------------------------------------------------------------------------------


@as_root
def test_spinning_thread_is_put_back_and_named() -> None:
    code = """
found = {}
def spin():
    tid = threading.get_native_id()
    threads.acquire(HIGH, "spinner", tid)
    begun = time.thread_time()
    while os.sched_getscheduler(0) & ~FLAG == RR and time.thread_time() - begun < 0.5:
        pass
    found.update(ms=1e3 * (time.thread_time() - begun), policy=os.sched_getscheduler(0) & ~FLAG)
    row = threads.table()[0]
    found.update(state=row.state, reason=row.reason)
thread = threading.Thread(target=spin)
thread.start()
thread.join()
threads.close()
watchdog.close()
say(**found)
"""
    ended = finished_child(WATCHDOG + code)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["policy"] == os.SCHED_OTHER
    assert found["ms"] < PUT_BACK_MS
    assert found["state"] == "put back" and "without a pause" in found["reason"]
    assert "aionn: the real-time thread 'spinner' (" in ended.stderr
    assert "was put back to the ordinary class" in ended.stderr


@as_root
@pytest.mark.thorough
def test_thread_that_keeps_the_interpreters_lock_is_put_back() -> None:
    code = """
def one(count):
    begun = time.thread_time()
    sum(range(count))  # One call, during which no other thread of this process runs.
    return time.thread_time() - begun
count = 10_000
while (took := one(count)) < 0.02:
    count *= 2
threads.acquire(HIGH, "keeper")
begun = time.thread_time()
one(int(count * 0.4 / took))
spun_ms = 1e3 * (time.thread_time() - begun)
reports = watchdog.take_put_back()
policy = os.sched_getscheduler(0) & ~FLAG
threads.close()
watchdog.close()
say(spun_ms=spun_ms, reports=[ran_ns / 1e6 for _, _, ran_ns, _ in reports], policy=policy)
"""
    found = run_child(WATCHDOG + code)
    assert found["spun_ms"] > NOTICED_MS, "it spun long enough to be noticed"
    assert found["policy"] == os.SCHED_OTHER
    assert len(found["reports"]) == 1 and found["reports"][0] < PUT_BACK_MS


@as_root
def test_thread_that_pauses_is_left_alone() -> None:
    code = """
threads.acquire(HIGH, "honest")
for _ in range(8):
    until = time.thread_time() + 0.03
    while time.thread_time() < until:
        pass
    time.sleep(0.0005)
row = threads.table()[0]
threads.close()
watchdog.close()
say(state=row.state, ran_ms=1e3 * time.thread_time())
"""
    found = run_child(WATCHDOG + code)
    assert found["ran_ms"] > PUT_BACK_MS
    assert found["state"] == "real time"


@as_root
def test_threads_of_another_process_are_ordinary_when_its_connection_ends() -> None:
    code = """
lent = watchdog.lend()
read, write = os.pipe()
done, finish = os.pipe()
pid = os.fork()
if pid == 0:
    end = WatchdogEnd(lent)
    row = Threads(permission, end).acquire(HIGH, "driver")
    end.close()
    deadline = time.monotonic() + 20
    while os.sched_getscheduler(0) & ~FLAG == RR and time.monotonic() < deadline:
        time.sleep(0.001)
    os.write(write, f"{row.state}, {os.sched_getscheduler(0) & ~FLAG}".encode())
    os._exit(0)
lent.close()
told = os.read(read, 64).decode()
os.waitpid(pid, 0)
alive = watchdog.is_alive()
watchdog.close()
say(told=told, alive=alive, after=watchdog.is_alive(), can_watch=watchdog.watch(1, 1, "x"))
"""
    assert run_child(WATCHDOG + code) == {
        "told": "real time, 0",
        "alive": True,
        "after": False,
        "can_watch": False,
    }


@as_root
def test_watchdog_ends_with_the_process_that_started_it() -> None:
    found = run_child(WATCHDOG + "say(pid=watchdog.pid); sys.stdout.flush(); os._exit(0)")
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{found['pid']}/fd/0") and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not os.path.exists(f"/proc/{found['pid']}/fd/0")


@as_root
def test_connection_does_not_reach_threads_of_another() -> None:
    code = """
me = threading.get_native_id()
threads.acquire(HIGH, "mine")
other = WatchdogEnd(watchdog.lend())
taken = other.watch(os.getpid(), me, "taken over")
other.forget(os.getpid(), me)
other.close()
ended = watchdog.watch(os.getpid(), 1 << 22, "ended")  # Answered after all of that.
kept = os.sched_getscheduler(0) & ~FLAG
begun = time.thread_time()
while os.sched_getscheduler(0) & ~FLAG == RR and time.thread_time() - begun < 0.4:
    pass
say(taken=taken, ended=ended, kept=kept, spun=os.sched_getscheduler(0) & ~FLAG)
threads.close()
watchdog.close()
"""
    assert run_child(WATCHDOG + code) == {"taken": False, "ended": False, "kept": 2, "spun": 0}


@as_root
def test_thread_is_refused_when_the_watchdog_has_no_room_for_it() -> None:
    code = """
import subprocess
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
subprocess.run(["prlimit", f"--pid={watchdog.pid}", "--nofile=5:5"], check=True)
row = threads.acquire(HIGH, "one too many")
say(state=row.state, reason=row.reason, policy=row.policy)
threads.close()
watchdog.close()
"""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    assert run_child(WATCHDOG + code) == {
        "state": "refused",
        "reason": "the watchdog cannot monitor it",
        "policy": "SCHED_OTHER",
    }


@as_root
def test_nonsense_on_a_connection_changes_nothing() -> None:
    code = """
for message in (b"nonsense", b"{}", b"[1]", b'{"watch": [1]}', b'{"watch": ["..", 1, "x"]}', b'{"watch": [-1, 99999999, "x"]}',
                b'{"forget": [1, 2]}', b'{"lend": []}', b"\\xff" * 600, b'{"watch": [1e99, 1, "x"]}', b"[" * 500):
    watchdog._socket.send(message)
row = threads.acquire(HIGH, "n" * 10_000 + "\\U0001f600" * 50)
alive = watchdog.is_alive()
threads.close()
watchdog.close()
say(alive=alive, state=row.state)
"""
    assert run_child(WATCHDOG + code) == {"alive": True, "state": "real time"}


READY, WATCHED = b'{"looks": []}', 1
NESTED = b"[" * MESSAGE_BYTES_MAX
LEND = b'{"lend": []}'


@contextmanager
def process_of_its_own() -> Iterator[socket.socket]:
    """The first connection of a watchdog that has no priority, and so needs no right."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        here.settimeout(CHILD_S)
        with there:
            command = [sys.executable, "-I", "-S", watching.__file__, str(there.fileno()), "0"]
            process = subprocess.Popen(command, pass_fds=[there.fileno()])
        try:
            assert here.recv(MESSAGE_BYTES_MAX) == READY
            yield here
            here.close()
            assert process.wait(CHILD_S) == 0
        finally:
            process.kill()
            process.wait()


def is_watched(connection: socket.socket, name: str = "x") -> bool:
    """Has the calling thread monitored, and forgotten again."""
    thread = [os.getpid(), threading.get_native_id()]
    answer = answered(connection, thread, name)
    connection.send(json.dumps({"forget": thread}).encode())
    # Messages of one connection are read in order, and those of another one before them, perhaps.
    answered(connection, [os.getpid(), 0], "none")
    return answer == WATCHED


def answered(connection: socket.socket, thread: list[int], name: str) -> int:
    """The answer to the request to monitor a thread."""
    connection.send(json.dumps({"watch": [*thread, name]}).encode())
    while (answer := json.loads(connection.recv(MESSAGE_BYTES_MAX))["watched"])[:2] != thread:
        pass
    return int(answer[2])


def test_watchdog_survives_every_message() -> None:
    digits = b"9" * 400
    with process_of_its_own() as connection, open(os.devnull, "rb") as file, socket.socket() as strange:
        for message in (
            *(NESTED, b'{"a":' * 300, b"9" * 5000, b"\xff\xfe", b'{"watch": [1, 1, "\\ud800"]}'),
            *(b'{"watch": [%b, 1, "x"]}' % digits, b'{"watch": [%d, %b, "x"]}' % (os.getpid(), digits)),
            *(b'{"watch": [true, -1, "x"]}', b'{"forget": [%b, NaN]}' % digits, b'{"lend": [1]}', LEND),
        ):
            connection.send(message)
            for fds in ([file.fileno()], [strange.fileno(), file.fileno()]):
                if message != LEND:
                    socket.send_fds(connection, [message], fds)
        socket.send_fds(connection, [LEND], [file.fileno()])
        assert is_watched(connection)


def test_only_the_process_that_started_the_watchdog_lends_connections() -> None:
    with process_of_its_own() as first:
        lent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with lent:
            with theirs:
                socket.send_fds(first, [LEND], [theirs.fileno()])
            lent.settimeout(CHILD_S)
            assert is_watched(lent)
            further, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with further:
                with theirs:
                    socket.send_fds(lent, [LEND], [theirs.fileno()])
                assert is_watched(lent) and is_watched(first)
                assert not further.recv(1), "it is closed"


@pytest.mark.parametrize("letter", ["\U0001f600", "\x01", '"'])
def test_thread_with_any_name_is_monitored(letter: str) -> None:
    with process_of_its_own() as connection:
        assert is_watched(connection, NAME_LENGTH_MAX * letter)


@as_root
def test_watchdog_that_may_not_rise_above_the_others_says_so() -> None:
    code = """
from aionn.realtime.permission import Permission, Way
from aionn.realtime.priorities import Priorities
from aionn.realtime.watchdog import Watchdog
for permission in (Permission(Way.LIMIT, Priorities(5, 10, 15)), Permission(Way.NONE)):
    try:
        Watchdog(permission)
    except PermissionError as e:
        say(**{permission.way: str(e)})
"""
    assert run_child(code, before=without_sys_nice()) == {
        "RLIMIT_RTPRIO": "the watchdog cannot run: sched_setscheduler: Operation not permitted",
        "none": "without real-time scheduling there are no threads to monitor",
    }


@as_root
def test_process_with_a_limit_and_no_capability_is_looked_after() -> None:
    code = """
threads.acquire(HIGH, "spinner")
begun = time.thread_time()
while os.sched_getscheduler(0) & ~FLAG == RR and time.thread_time() - begun < 0.5:
    pass
ms = 1e3 * (time.thread_time() - begun)
row = threads.table()[0]
say(way=permission.way, ms=ms, state=row.state, left=threads.close())
watchdog.close()
"""
    found = run_child("limit(resource.RLIMIT_RTPRIO, 20)\n" + WATCHDOG + code, before=without_sys_nice())
    assert found.pop("ms") < PUT_BACK_MS
    assert found == {"way": "RLIMIT_RTPRIO", "state": "put back", "left": []}


@as_root
@pytest.mark.thorough
def test_loop_gets_real_time_again_after_one_long_callback() -> None:
    code = """
async def main():
    async with aionn.open(drivers=["reference"], realtime="required") as runtime:
        begun = time.thread_time()
        while os.sched_getscheduler(0) & ~FLAG == RR and time.thread_time() - begun < 0.45:
            pass
        spun, put_back_s = state()[0], time.monotonic()
        while state()[0] != RR and time.monotonic() - put_back_s < 30:
            await asyncio.sleep(0.05)
        rested_s = time.monotonic() - put_back_s
        (row,) = (await runtime.realtime()).processes[0].rows
        say(spun=spun, rested_s=rested_s, state=row.state, priority=row.priority, count=row.times_put_back)
    say(after=os.sched_getscheduler(0))
asyncio.run(main())
"""
    ended = finished_child(OPEN + code)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[0])
    assert found.pop("rested_s") > 4.5
    assert found == {"spun": 0, "state": "real time", "priority": 10, "count": 1}
    assert json.loads(ended.stdout.splitlines()[1]) == {"after": 0}
    assert "put back to the ordinary class, until it has not done so for 5 s" in ended.stderr
    assert "the thread 'event loop' (" in ended.stderr and "gets real time again" in ended.stderr


# --- The rule -------------------------------------------------------------------------------------------------------------


def looked(pauses_at_ns: list[int], spin_from_ns: int | None, seed: int) -> int | None:
    """What a thread on a processor of its own has run without a pause when the rule notices; None if it never does.

    Args:
        pauses_at_ns: When it pauses.
        spin_from_ns: From when on it does not pause any more; None for never.
        seed: Of the jitter of the looks, up to a tenth of a period.
    """
    jitter = random.Random(seed)
    rule = Pauses()
    now_ns = 0
    for _ in range(80):
        now_ns += int(PERIOD_MS * 1e6 * jitter.uniform(1, 1.1))
        switches = sum(
            at_ns <= now_ns for at_ns in pauses_at_ns if spin_from_ns is None or at_ns <= spin_from_ns
        )
        if rule.is_busy(now_ns) and rule.ran_too_long(now_ns, switches):
            return now_ns - max(at_ns for at_ns in [0, *pauses_at_ns] if at_ns <= (spin_from_ns or now_ns))
    return None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_rule_notices_within_the_budget_and_two_periods(seed: int) -> None:
    jitter = random.Random(seed)
    pauses = sorted(jitter.randrange(1_000_000_000) for _ in range(200))
    spun_ns = looked(pauses, jitter.choice(pauses), seed)
    assert spun_ns is not None
    assert BUDGET_NS <= spun_ns <= BUDGET_NS + 2.3 * PERIOD_MS * 1e6


def test_rule_never_notices_a_thread_that_pauses_often_enough() -> None:
    pauses = list(range(0, 3_000_000_000, BUDGET_NS - 2 * PERIOD_MS * 1_000_000))
    assert looked(pauses, None, 0) is None


def test_rule_begins_again_when_it_is_told_to() -> None:
    rule = Pauses()
    assert rule.ran_too_long(0, 5) == 0
    assert rule.ran_too_long(BUDGET_NS, 5) == BUDGET_NS
    rule.begin_again()
    assert rule.ran_too_long(2 * BUDGET_NS, 5) == 0
    assert rule.ran_too_long(3 * BUDGET_NS, 5) == BUDGET_NS


def test_thread_that_was_put_back_rests_before_it_may_be_a_real_time_thread_again() -> None:
    rests = Rests()
    assert not rests.is_over(10 * REST_NS), "nothing has put it back"
    assert rests.put_back(1_000) and rests.standing is Standing.RESTING
    assert not rests.is_over(1_000 + REST_NS - 1) and rests.is_over(1_000 + REST_NS)
    rests.end()
    assert rests.standing is Standing.REALTIME and not rests.is_over(10 * REST_NS)


def test_rest_begins_again_with_each_long_run() -> None:
    rests = Rests()
    rests.put_back(0)
    rests.ran_too_long(REST_NS - 1)
    assert not rests.is_over(REST_NS) and rests.is_over(2 * REST_NS - 1)


@pytest.mark.parametrize("rests_max", [0, 1, RESTS_MAX])
def test_thread_that_is_put_back_too_often_stays_ordinary(rests_max: int) -> None:
    rests = Rests(rests_max)
    now_ns = 0
    for _ in range(rests_max):
        assert rests.put_back(now_ns)
        now_ns += REST_NS
        assert rests.is_over(now_ns)
        rests.end()
    assert not rests.put_back(now_ns) and rests.standing is Standing.ORDINARY
    assert not rests.is_over(now_ns + REST_WINDOW_NS) and not rests.put_back(now_ns + 2 * REST_WINDOW_NS)


def test_thread_that_is_put_back_seldom_gets_real_time_again_without_end() -> None:
    rests = Rests()
    for now_ns in range(0, 20 * REST_WINDOW_NS, REST_WINDOW_NS // RESTS_MAX):
        assert rests.put_back(now_ns)
        rests.end()

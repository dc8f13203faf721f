"""RLIMIT_RTTIME stands in for a watchdog that has died; in real child processes."""

from __future__ import annotations

import errno
import signal

import pytest

from tests.aionn.realtime.children import LIMITS, as_root, finished_child, run_child

LIMITED = """
import signal
from aionn.realtime.permission import ask
from aionn.realtime.priorities import SchedulingClass
from aionn.realtime.watchdog import RunLimit
from aionn.realtime.threads import Threads

class Dead:
    def watch(self, pid, tid, name): return True
    def forget(self, pid, tid): pass
    def take_put_back(self): return []
    def take_rested(self): return []

def state():
    return [list(resource.getrlimit(resource.RLIMIT_RTTIME)), signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL]

threads = Threads(ask(), Dead())
def spin():
    threads.acquire(SchedulingClass.HIGH, "spinner")
    begun = time.thread_time()
    while os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR and time.thread_time() - begun < 0.4:
        pass
    return 1e3 * (time.thread_time() - begun)
"""


@as_root
def test_spinning_main_thread_is_put_back_without_a_watchdog() -> None:
    code = """
before = state()
limit = RunLimit(lambda: threads.put_back_all("it ran into RLIMIT_RTTIME"), limit_us=60_000)
told = limit.open()
spun = [spin(), spin()]
row = threads.table()[0]
threads.close()
limit.close()
limit.close()
say(told=told, spun=spun, state=row.state, reason=row.reason, is_same=state() == before)
"""
    found = run_child(LIMITED + code)
    assert all(ms < 300 for ms in found.pop("spun")), "the second time as well"
    assert found == {"told": "", "state": "put back", "reason": "it ran into RLIMIT_RTTIME", "is_same": True}


@as_root
def test_spinning_driver_process_is_ended_by_the_kernel() -> None:
    ended = finished_child(LIMITED + "say(told=RunLimit(None, limit_us=60_000).open())\nspin()\n")
    assert ended.returncode == -signal.SIGXCPU
    assert ended.stdout == '{"told": ""}\n'


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("resource.setrlimit(resource.RLIMIT_RTTIME, (40_000, 40_000))", "RLIMIT_RTTIME is 40000 us already"),
        ("signal.signal(signal.SIGXCPU, signal.SIG_IGN)", "the program has its own handler of SIGXCPU"),
        (
            "resource.setrlimit(resource.RLIMIT_CPU, (9, 10))",
            "RLIMIT_CPU is set, and the kernel sends the same signal for it",
        ),
    ],
)
def test_limit_leaves_alone_what_the_program_has_set(first: str, told: str) -> None:
    code = f"""
{first}
before = state()
limit = RunLimit(lambda: None, limit_us=60_000)
told = limit.open()
limit.close()
say(told=told, is_same=state() == before)
"""
    assert run_child(LIMITED + code) == {"told": told, "is_same": True}


def test_limit_of_an_application_is_set_in_its_main_thread() -> None:
    code = """
found = []
thread = threading.Thread(target=lambda: found.append(RunLimit(lambda: None).open()))
thread.start()
thread.join()
say(found=found)
"""
    assert run_child(LIMITED + code) == {"found": ["only the main thread can set a signal handler"]}


@pytest.mark.parametrize(
    ("put_back", "answer"),
    [
        ("lambda: None", "ValueError('not allowed to raise maximum limit')"),
        ("None", "OSError(38, 'Function not implemented')"),
    ],
)
def test_limit_that_a_sandbox_refuses_is_reported(put_back: str, answer: str) -> None:
    code = f"""
def refused(kind, limits):
    raise {answer}

before = state()
resource.setrlimit, own = refused, resource.setrlimit
limit = RunLimit({put_back})
reason = limit.open()
resource.setrlimit = own
limit.close()
say(reason=reason, is_same=state() == before)
"""
    found = run_child(LIMITED + code)
    assert found.pop("reason").startswith("RLIMIT_RTTIME cannot be set: ") and found == {"is_same": True}


@as_root
def test_handler_raises_nothing_where_the_hard_limit_was_lowered_since() -> None:
    code = """
limit = RunLimit(lambda: threads.put_back_all("it ran into RLIMIT_RTTIME"), limit_us=60_000)
told = limit.open()
resource.setrlimit(resource.RLIMIT_RTTIME, (20_000, 30_000))
signal.raise_signal(signal.SIGXCPU)
lowered = list(resource.getrlimit(resource.RLIMIT_RTTIME))
limit.close()
say(told=told, lowered=lowered)
"""
    assert run_child(LIMITED + code) == {"told": "", "lowered": [30_000, 30_000]}


@pytest.mark.skipif(not LIMITS, reason="the number of the system call is not known for this processor")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_sandbox_that_comes_after_opening_lets_the_limit_close(number: int) -> None:
    code = f"""
limit = RunLimit(lambda: None, limit_us=60_000)
told = limit.open()
refuse({LIMITS}, {number})
signal.raise_signal(signal.SIGXCPU)
limit.close()
say(told=told, is_default=signal.getsignal(signal.SIGXCPU) is signal.SIG_DFL, again=RunLimit(None).open())
"""
    found = run_child(LIMITED + code)
    assert found.pop("again").startswith("RLIMIT_RTTIME cannot be read")
    assert found == {"told": "", "is_default": True}

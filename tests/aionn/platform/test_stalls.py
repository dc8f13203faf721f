"""What the machine did not run threads for: the kernel's counters, and what is never counted."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from aionn.platform.stalls import (
    AGE_NS,
    NO_STALLS,
    READINGS_MAX,
    TICK_NS,
    AllStalls,
    LoopStalls,
    ThreadReading,
    ThreadStalls,
    ThreadTimes,
    read_counters,
    read_times,
    stalls_of_this_thread,
    stalls_of_thread,
    times_of_this_thread,
    waited_since,
)
from aionn.runtime.guarantees.stalls import stalls_of_loop
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.testing import VirtualClock, run

STAT = b"""cpu  10 0 5 900 1 0 0 30 0 0
cpu0 5 0 3 450 1 0 0 12 0 0
cpu1 5 0 2 450 0 0 0 18 0 0
intr 1234 5
"""


def test_counters_are_read_by_processor():
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert read_counters(b"51613257 194588 23\n", STAT) == (194588, {0: 12 * tick_ns, 1: 18 * tick_ns})
    assert read_counters(b"", b"") == (0, {})
    assert read_counters(b"x y z", b"cpu  1\ncpu0 1 2\n") == (0, {0: 0})


def test_text_that_ends_within_a_number_has_no_other_number():
    whole = read_counters(b"", STAT)[1]
    for length in range(len(STAT)):
        part = read_counters(b"", STAT[:length])[1]
        assert part.items() <= whole.items()


class Counters:
    def __init__(self):
        self.waited, self.stolen = 0, {0: 0, 1: 0}

    def __call__(self):
        return self.waited, self.stolen


def test_time_counts_from_the_last_reading_before():
    counters = Counters()
    stalls = LoopStalls(counters)
    assert stalls.since(0, 5) == 0, "nothing is known before the first reading"
    stalls.look(0)
    counters.waited = 7
    stalls.look(AGE_NS - 1)
    assert stalls.since(AGE_NS, AGE_NS) == 7, "the reading is as old as it may be"
    stalls.look(AGE_NS)
    assert stalls.since(AGE_NS, AGE_NS) == 0 and stalls.since(5, AGE_NS) == 7
    counters.stolen = {0: 3, 1: 9}
    assert stalls.since(AGE_NS, AGE_NS + 50) == 9, "the processor that lacked most"
    counters.waited = 20
    assert stalls.since(AGE_NS, AGE_NS + 50) == 13, (
        "not the sum: a thread waits while its processor is stolen"
    )
    assert stalls.since(AGE_NS, AGE_NS + 5) == 5, "no longer than the time itself"


def test_readings_are_bounded_and_nothing_is_assumed_beyond_them():
    counters = Counters()
    stalls = LoopStalls(counters)
    for number in range(2 * READINGS_MAX):
        counters.waited = number
        stalls.look(number * AGE_NS)
    assert stalls.since(0, 0) == 0
    assert stalls.since(2 * READINGS_MAX * AGE_NS, 0) == 0


def test_thread_that_sleeps_or_computes_has_no_stall_of_that_length():
    """A call that blocks the loop is not the machine's doing."""
    began_ns = time.monotonic_ns()
    stalls = stalls_of_this_thread()
    before_ns, _ = stalls._read()
    time.sleep(0.2)
    waited_ns, _ = stalls._read()
    assert 0 <= waited_ns - before_ns <= time.monotonic_ns() - began_ns - 200_000_000


def test_counters_are_those_of_the_thread_that_runs_the_loop():
    found = []
    stalls = stalls_of_this_thread()
    thread = threading.Thread(target=lambda: found.append(stalls._read()))
    thread.start()
    thread.join()
    assert found[0][0] <= stalls._read()[0] + 1_000_000_000


def test_processors_that_the_loop_may_not_use_do_not_count():
    def read():
        os.sched_setaffinity(0, {processors[0]})
        found.append(stalls_of_this_thread()._read()[1])

    found, processors = [], sorted(os.sched_getaffinity(0))
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert set(found[0]) <= {processors[0]}


def test_processor_that_comes_or_goes_counts_nothing():
    counters = Counters()
    stalls = LoopStalls(counters)
    stalls.look(0)
    counters.stolen = {1: 4, 7: 1000}
    assert stalls.since(0, 5) == 4


def test_stall_before_the_measurement_counts_only_as_far_as_it_must_have_reached_into_it():
    """Since a reading is older than it may be, some of what was counted since may lie before."""
    ms = 1_000_000
    for waited, counted in ((70, 0), (110, 20), (500, 80)):
        counters = Counters()
        stalls = LoopStalls(counters)
        stalls.look(0)
        counters.waited = waited * ms
        assert stalls.since(100 * ms, 170 * ms) == counted * ms
    stalls.look(95 * ms)
    counters.waited += 60 * ms
    assert stalls.since(100 * ms, 170 * ms) == 60 * ms


def test_stall_before_the_capture_of_a_late_frame_does_not_bring_it_late():
    ms = 1_000_000
    for stalled_at, label in ((50, Label.DELAYED), (150, Label.STALLED)):
        counters = Counters()
        server = BandwidthServer(
            1,
            slot=0,
            period_ns=100 * ms,
            deadline_ns=100 * ms,
            jitter_ns=10 * ms,
            duration_ns=10 * ms,
            piece_ns=10 * ms,
        )
        server.stalls = LoopStalls(counters)
        frame = server.arrive(0, 100 * ms)
        counters.waited += 70 * ms * (stalled_at < 90)
        frame.start(80 * ms)
        frame.stop(90 * ms, can_preempt=False)
        counters.waited += 70 * ms * (stalled_at > 90)
        assert server.arrive(170 * ms, 200 * ms).label is label


def test_virtual_clock_has_no_stalls():
    async def main():
        assert stalls_of_loop() is NO_STALLS

    run(main, clock=VirtualClock())


# --- A thread that another one asks about ---


def test_counters_of_a_thread_are_read():
    assert read_times(b"51613257 194588 23\n") == ThreadTimes(51613257, 194588)
    assert [read_times(text) for text in (b"", b"7", b"x y z", b"-1 5 2")] == [None] * 4
    assert times_of_this_thread() is not None


MS = 1_000_000


@pytest.mark.parametrize(
    ("ran", "waited", "ready", "counted"),
    [
        (30, 0, None, 0),  # It computed all the time.
        (5, 0, None, 0),  # It slept for 25 ms: a lock, or a device of its own.
        (5, 25, None, 25),
        (5, 25, 10, 25),
        (5, 0, 10, 15),  # 25 ms without a processor, which it has not got yet; a tick may be its own.
        (29, 0, 10, 0),  # It computes: its processor time is counted at the next tick.
        (5, 0, 35, 0),  # It had no work before.
        (0, 200, None, 40),  # No longer than the time since 10 ms before the frame.
    ],
)
def test_time_without_a_processor_is_what_the_kernel_counts_and_what_is_missing(ran, waited, ready, counted):
    first = ThreadReading(0, ThreadTimes(100 * MS, 7 * MS))
    last = ThreadTimes((100 + ran) * MS, (7 + waited) * MS)
    ready_ns = None if ready is None else ready * MS
    found = waited_since(first, last, then_ns=10 * MS, now_ns=40 * MS, ready_ns=ready_ns)
    assert found == counted * MS and TICK_NS == 10 * MS


def test_thread_is_read_at_most_once_in_ten_milliseconds_and_one_that_has_ended_never_waited():
    times = iter([ThreadTimes(0, 0), ThreadTimes(0, 5), None])
    stalls = ThreadStalls(lambda: next(times), lambda: False)
    assert stalls.since(0, 5) == 0
    stalls.look(0)
    stalls.look(AGE_NS - 1)
    assert stalls.since(AGE_NS - 1, AGE_NS) == 5
    assert stalls.since(AGE_NS - 1, AGE_NS) == 0


def test_longest_of_several_stalls_counts():
    counters = [Counters(), Counters()]
    stalls = AllStalls([LoopStalls(each) for each in counters])
    stalls.look(0)
    counters[0].waited, counters[1].waited = 3, 8
    assert stalls.since(0, 20) == 8 and AllStalls([]).since(0, 20) == 0


def test_thread_of_which_nothing_can_be_read_has_no_stalls():
    stalls = stalls_of_thread(2**22 + 1)
    stalls.look(0)
    assert stalls.since(0, 50 * MS) == 0


def _is_asleep(thread):
    """Whether the kernel has a thread of this process wait for an event, and not for a processor (proc(5), stat)."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_thread_that_gets_no_processor_waits_and_one_that_sleeps_does_not():
    """Two threads on one processor without real time: one computes, and the other one waits for it about half of the time."""
    processor, began, ends = min(os.sched_getaffinity(0)), threading.Barrier(4), threading.Event()
    found = {}

    def work(name, step):
        os.sched_setaffinity(0, {processor})
        found[name] = stalls_of_thread(threading.get_native_id())
        began.wait()
        while not ends.is_set():
            step()

    block = bytes(1 << 20)
    threads = [
        threading.Thread(target=work, args=("busy", lambda: hashlib.sha256(block))),
        threading.Thread(target=work, args=("busy too", lambda: hashlib.sha256(block))),
        threading.Thread(target=work, args=("asleep", lambda: ends.wait(60))),
    ]
    for thread in threads:
        thread.start()
    began.wait()
    deadline_s = time.monotonic() + 60
    looks = 0
    while (
        looks < 5
    ):  # On its way to its wait, it waits for the processor and for the interpreter's lock as well.
        assert time.monotonic() < deadline_s, "a thread that waits for an event does not sleep"
        looks = looks + 1 if _is_asleep(threads[2].native_id) else 0
        time.sleep(0.01)
    then_ns = time.monotonic_ns()
    for stalls in found.values():
        stalls.look(then_ns)
    while max(found[name].since(then_ns, time.monotonic_ns()) for name in ("busy", "busy too")) < 20 * MS:
        assert time.monotonic() < deadline_s, "neither of two threads on one processor waited"
        time.sleep(0.01)
    asleep_ns = found["asleep"].since(then_ns + AGE_NS, time.monotonic_ns())
    ends.set()
    for thread in threads:
        thread.join()
    assert asleep_ns < 20 * MS


# --- What a frame is told ---


@pytest.mark.parametrize(
    ("waited", "label", "debt"), [(0, Label.OVERRAN, 6), (4, Label.OVERRAN, 2), (6, Label.STALLED, 0)]
)
def test_frame_overran_unless_its_thread_had_no_processor_for_as_long(waited, label, debt):
    server = BandwidthServer(
        1,
        slot=0,
        period_ns=100 * MS,
        deadline_ns=100 * MS,
        jitter_ns=0,
        duration_ns=10 * MS,
        piece_ns=10 * MS,
    )
    thread = Counters()
    server.stalls = AllStalls([ThreadStalls(lambda: ThreadTimes(0, thread.waited), lambda: False)])
    frame = server.arrive(0, 100 * MS)
    frame.start(0)
    thread.waited = waited * MS
    assert frame.exhaust(16 * MS) and frame.label is (None if label is Label.STALLED else label)
    frame.stop(16 * MS, can_preempt=False)
    assert frame.label is label and server.debt_ns == debt * MS and not frame.is_reserved


def test_thread_that_waited_for_its_slot_was_not_kept_from_a_processor():
    """It slept while another execution had the slot, and computes now."""
    server = BandwidthServer(
        1, slot=0, period_ns=100 * MS, deadline_ns=60 * MS, jitter_ns=0, duration_ns=10 * MS, piece_ns=10 * MS
    )
    server.stalls = AllStalls([ThreadStalls(lambda: ThreadTimes(0, 0), lambda: True)])
    frame = server.arrive(0, 60 * MS)
    frame.start(55 * MS)
    frame.lost(61 * MS, MS)
    assert frame.label is None, "the scheduler has lost it"
    stalled = server.arrive(100 * MS, 160 * MS)
    stalled.start(120 * MS)
    stalled.lost(161 * MS, MS)
    assert stalled.label is Label.STALLED

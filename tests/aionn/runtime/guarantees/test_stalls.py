"""What the machine did not run the event loop for: the kernel's counters, and what is never counted."""

import os
import threading
import time

from aionn.runtime.guarantees.stalls import AGE_NS, READINGS_MAX, LoopStalls, read_counters, stalls_of_loop
from aionn.scheduler.bandwidth import NO_STALLS, BandwidthServer, Label
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
    stalls = stalls_of_loop()
    before_ns, _ = stalls._read()
    time.sleep(0.2)
    waited_ns, _ = stalls._read()
    assert 0 <= waited_ns - before_ns <= time.monotonic_ns() - began_ns - 200_000_000


def test_counters_are_those_of_the_thread_that_runs_the_loop():
    found = []
    stalls = stalls_of_loop()
    thread = threading.Thread(target=lambda: found.append(stalls._read()))
    thread.start()
    thread.join()
    assert found[0][0] <= stalls._read()[0] + 1_000_000_000


def test_processors_that_the_loop_may_not_use_do_not_count():
    def read():
        os.sched_setaffinity(0, {processors[0]})
        found.append(stalls_of_loop()._read()[1])

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

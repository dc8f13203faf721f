"""The stalls of the threads that execute frames of a reservation, which each asks about itself."""

import threading

from aionn.platform.stalls import AGE_NS, NO_STALLS, ThreadTimes
from aionn.scheduler.bandwidth import BandwidthServer, Label
from aionn.scheduler.reservations.calls import ExecutingStalls, ReservedCall, reserved_call

MS = 1_000_000


class Threads:
    """The counters of each thread, which a test sets."""

    def __init__(self):
        self.own = threading.local()

    def __call__(self):
        return ThreadTimes(0, getattr(self.own, "waited", 0))


def held(number=1, times=None):
    server = BandwidthServer(
        number,
        slot=0,
        period_ns=100 * MS,
        deadline_ns=90 * MS,
        jitter_ns=0,
        duration_ns=10 * MS,
        piece_ns=10 * MS,
    )
    server.stalls = ExecutingStalls(number, NO_STALLS, times or Threads())
    return server


def executed(server, times, waited, starts_elsewhere=False):
    """A frame on a thread of its own, which has no processor for some of its 16 ms; returns the frame."""
    found = []

    def execute():
        reserved_call.set(ReservedCall(server, 0))
        frame = server.arrive(0, None)
        if starts_elsewhere:
            on_another_thread(lambda: frame.start(AGE_NS))
        else:
            frame.start(AGE_NS)
        times.own.waited = waited
        frame.stop(AGE_NS + 16 * MS, can_preempt=False)
        found.append(frame)

    on_another_thread(execute)
    return found[0]


def on_another_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_frame_whose_thread_was_not_run_is_stalled_and_owes_nothing():
    times = Threads()
    server = held(times=times)
    frame = executed(server, times, 6 * MS)
    assert frame.label is Label.STALLED and server.debt_ns == 0


def test_frame_whose_thread_computed_for_too_long_overran():
    times = Threads()
    server = held(times=times)
    frame = executed(server, times, 0)
    assert frame.label is Label.OVERRAN and server.debt_ns == 6 * MS


def test_thread_that_gives_the_slot_to_a_frame_is_not_its_own():
    for waited, label in ((6 * MS, Label.STALLED), (0, Label.OVERRAN)):
        times = Threads()
        assert executed(held(times=times), times, waited, starts_elsewhere=True).label is label


def test_thread_that_executes_something_else_is_not_counted():
    times = Threads()
    first, second = held(1, times), held(2, times)
    frame = second.arrive(0, None)
    frame.start(AGE_NS)

    def stop():
        reserved_call.set(ReservedCall(first, 0))
        first.stalls.look(0)
        times.own.waited = 50 * MS
        frame.stop(AGE_NS + 16 * MS, can_preempt=False)
        assert first.stalls.since(0, AGE_NS + 50 * MS) == 50 * MS

    on_another_thread(stop)
    assert frame.label is Label.OVERRAN

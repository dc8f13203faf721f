"""The heap of callbacks: time and order."""

import random

from aionn.simulation.core import Core


def test_events_run_in_the_order_of_their_times():
    core = Core()
    seen = []
    source = random.Random(1)
    for _ in range(500):
        core.at(source.randrange(50), lambda at: seen.append((core.now_ns, at)), len(seen))
    assert core.run() == 500
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)


def test_events_of_one_time_run_in_the_order_of_asking():
    core = Core()
    seen = []
    for number in range(20):
        core.at(5, seen.append, number)
    core.run()
    assert seen == list(range(20))


def test_past_counts_as_now():
    core = Core()
    seen = []
    core.at(10, lambda _: core.at(3, lambda _: seen.append(core.now_ns)))
    core.run()
    assert seen == [10]


def test_run_stops_at_a_time_and_goes_on():
    core = Core()
    seen = []
    for at_ns in (1, 5, 9):
        core.at(at_ns, seen.append, at_ns)
    assert core.run(until_ns=5) == 2
    assert (seen, core.now_ns) == ([1, 5], 5)
    assert core.run(until_ns=7) == 0 and core.now_ns == 7
    core.run()
    assert seen == [1, 5, 9] and core.events == 3

"""A stream whose device is slower than its source executes the newest item, whatever it had read before."""

import numpy as np
import pytest

import aionn
from aionn.media import Frame, Source
from aionn.testing import SimulatedDevice, VirtualClock, run
from aionn.testing.models import identity

PERIOD_S, RUN_S = 0.02, 0.095


def pictures(clock, keep):
    def made():
        for index in range(100):
            yield round(index * PERIOD_S * 1e9), Frame(np.full(1, index, np.float32), 0, index, 0.0)

    return Source(made(), name="test", keep=keep, now=lambda: clock.now_ns, blocking=False)


@pytest.mark.parametrize("on_late", ["drop", "deliver"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_item_that_waited_for_a_buffer_gives_way_to_a_newer_one(slots, on_late):
    clock = VirtualClock()
    ages_s, indices, answers_s = [], [], []

    def write(frame, view):
        ages_s.append((clock.now_ns - frame.captured_at_ns) / 1e9)
        view[:] = frame.data

    async def main():
        device = SimulatedDevice("npu", run_time_s=RUN_S)
        async with aionn.open(devices=[device]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst(slots=slots) as burst, pictures(clock, "latest") as frames:
                results = burst.stream(
                    frames,
                    into=write,
                    deadline=lambda frame: frame.captured_at_ns + 1_000_000_000,
                    on_late=on_late,
                )
                async for result in results:
                    assert result.status == "on_time"
                    assert result.outputs[0] == result.item.index
                    indices.append(result.item.index)
                    answers_s.append((result.finished_ns - result.item.captured_at_ns) / 1e9)
                return frames.statistics()

    account = run(main, clock=clock)
    # An item that had a buffer earlier than the device would be older by a whole execution.
    assert max(answers_s[slots + 2 : -2]) <= RUN_S + PERIOD_S + 1e-4
    assert len(ages_s) == len(indices) >= 15
    assert max(ages_s[:-1]) <= PERIOD_S + 1e-4
    assert indices == sorted(set(indices))
    assert (account.presented, account.queued) == (100, 0)
    assert account.delivered == len(indices) and account.dropped == 100 - len(indices)


@pytest.mark.parametrize(("keep", "write_s"), [("latest", 0.0), ("latest", RUN_S / 4), ("all", 0.0)])
def test_item_is_written_early_where_that_takes_long_or_its_source_keeps_every_item(keep, write_s):
    clock = VirtualClock()
    waits_s, begun_s = [], {}

    def write(frame, view):
        clock._now_s += write_s  # In the thread of the loop, which does nothing else meanwhile.
        begun_s[frame.index] = clock.now
        view[:] = frame.data

    async def main():
        async with aionn.open(devices=[SimulatedDevice("npu", run_time_s=RUN_S)]) as runtime:
            net = await runtime.compile(identity())
            async with net.burst(slots=2) as burst, pictures(clock, keep) as frames:
                async for result in burst.stream(frames, into=write):
                    waits_s.append(result.finished_ns / 1e9 - RUN_S - begun_s[result.item.index])

    run(main, clock=clock)
    steady = waits_s[4:-2]
    if keep == "latest" and write_s == 0:
        assert max(steady) <= 1e-4
    else:
        assert min(steady) > RUN_S / 2

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
@pytest.mark.parametrize("slots", [1, 2])
def test_item_that_waited_for_a_buffer_gives_way_to_a_newer_one(slots, on_late):
    clock = VirtualClock()
    ages_s, indices = [], []

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
                return frames.statistics()

    account = run(main, clock=clock)
    assert len(ages_s) == len(indices) >= 15
    assert max(ages_s[:-1]) <= PERIOD_S + 1e-4
    assert indices == sorted(set(indices))
    assert (account.presented, account.queued) == (100, 0)
    assert account.delivered == len(indices) and account.dropped == 100 - len(indices)

"""Sources that send less often than they declare are not lost, and those that fall silent are, soon."""

import re

import anyio
import pytest

from aionn.media.live.capture import SourceUnavailable
from aionn.media.live.silence import silence_ns
from aionn.media.live.source import LiveSource
from aionn.testing.clock import VirtualClock, run
from tests.aionn.media.live.test_slow_consumer import Device, Opener

DECLARED_NS = 40_000_000


class Declaring(Device):
    """A device that declares 25 frames/s."""

    period_ns = DECLARED_NS


def delivered(pauses_s):
    """Frames of a device that pauses so long before each of them, and the silence after which it was lost."""
    clock = VirtualClock(pin_descriptors=False, stuck_s=60)

    async def body():
        device = Declaring(clock)
        source = LiveSource(Opener(device), name="test", reconnect=None, now=lambda: clock.now_ns)
        with clock.pin("opening"):
            await source.__aenter__()

        async def film():
            for pause_s in pauses_s:
                await anyio.sleep(pause_s)
                device.fill()

        count = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(film)
            with pytest.raises(SourceUnavailable, match="is silent") as raised:
                async for _ in source:
                    count += 1
            tasks.cancel_scope.cancel()
        with clock.pin("closing"):
            await source.__aexit__(None, None, None)
        # Not by the clock: the device is closed in a thread, for which virtual time does not wait.
        silent_s = re.search(r"an item within (\S+) s", str(raised.value))
        assert silent_s is not None
        return count, float(silent_s[1])

    return run(body, clock=clock)


def test_source_that_sends_less_often_than_it_declares_is_not_lost():
    count, silent_s = delivered([0.1] + [2.0] * 20)
    assert count == 21
    assert silent_s == pytest.approx(6.0, abs=0.1)


def test_source_that_keeps_its_rate_is_lost_after_a_second():
    count, silent_s = delivered([0.04] * 50)
    assert count == 50
    assert silent_s == pytest.approx(1.0, abs=0.1)


def test_source_that_became_slow_for_the_night_is_kept_from_its_first_long_pause_on():
    count, silent_s = delivered([0.04] * 30 + [0.3, 0.8, 2.0, 2.0, 5.0])
    assert count == 35
    assert silent_s == pytest.approx(15.0, abs=0.1)


def test_pauses_of_a_while_ago_do_not_count():
    count, silent_s = delivered([0.1, 3.0] + [0.04] * 20)
    assert count == 22
    assert silent_s == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("period_ns", "pauses_ns", "expected_s"),
    [
        (DECLARED_NS, [], 5.0),
        (DECLARED_NS, [DECLARED_NS], 1.0),
        (10**9, [10**9], 3.0),
        (10**9, [10**7], 3.0),
        (DECLARED_NS, [10**7, 2 * 10**9, 10**7], 6.0),
        (None, [], 5.0),
        (None, [10**7], 5.0),
        (None, [4 * 10**9], 12.0),
        (4 * 10**9, [], 12.0),
    ],
)
def test_longest_pause_follows_the_declared_period_and_the_last_pauses(period_ns, pauses_ns, expected_s):
    assert silence_ns(period_ns, pauses_ns) == int(expected_s * 1e9)

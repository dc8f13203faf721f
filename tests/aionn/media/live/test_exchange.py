"""An item that was taken and not used is exchanged for the newest one: for consumers that find out late when they can use it."""

import anyio
import pytest

from aionn.media import Reconnection, camera, record, replay, tee
from aionn.media.live.source import LiveSource
from aionn.testing.clock import VirtualClock, run
from tests.aionn.media.live.test_slow_consumer import Device, Opener
from tests.support.media.fake_camera import FakeSystem

SOON = Reconnection(first_s=0.01, most_s=0.02)


async def until(condition):
    while not condition():
        await anyio.sleep(0.001)


def live(body, keep="latest"):
    """Runs ``body(source, device)`` over a device whose conversion is immediate."""
    clock = VirtualClock(pin_descriptors=False, stuck_s=60)

    async def main():
        device = Device(clock)
        source = LiveSource(Opener(device), name="test", keep=keep, reconnect=None, now=lambda: clock.now_ns)
        with clock.pin("opening"):
            await source.__aenter__()
        result = await body(source, device)
        with clock.pin("closing"):
            await source.__aexit__(None, None, None)
        return result

    return run(main, clock=clock)


def is_consistent(account):
    return account.presented == account.delivered + account.dropped + account.queued


def test_newest_item_takes_the_place_and_the_other_counts_as_dropped():
    async def body(source, device):
        device.fill()
        first = await anext(source)
        assert source.newest_in_place_of(first) is first
        for _ in range(3):
            device.fill()
            await anyio.sleep(0.01)
        newest = source.newest_in_place_of(first)
        assert (first.index, newest.index) == (0, 3)
        assert source.newest_in_place_of(newest) is newest
        account = source.statistics()
        assert is_consistent(account)
        assert (account.presented, account.delivered, account.dropped, account.queued) == (4, 1, 3, 0)

    live(body)


@pytest.mark.parametrize("keep", ["all", "oldest"])
def test_item_stays_where_the_newest_is_not_kept(keep):
    async def body(source, device):
        device.fill()
        first = await anext(source)
        device.fill()
        await anyio.sleep(0.01)
        assert source.newest_in_place_of(first) is first
        assert (await anext(source)).index == 1

    live(body, keep)


def test_item_stays_after_the_end():
    async def body(source, device):
        device.fill()
        return source, await anext(source)

    source, item = live(body)
    assert source.newest_in_place_of(item) is item


def test_camera_has_the_newest_converted_while_its_consumer_exchanges_and_nothing_in_vain_otherwise(
    really, monkeypatch
):
    """Conversions of a camera run in a thread, which an exchange does not wait for."""
    monkeypatch.setattr("aionn.media.live.source.PREPARED_NS_MAX", 10**12)  # The machine may be slow.
    system = FakeSystem()
    one = system.camera

    async def filled(source):
        presented = source.statistics().presented
        one.fill()
        await until(lambda: source.statistics().presented > presented)

    async def body():
        async with camera(system=system, reconnect=SOON) as source:
            converted = []
            convert = source._capture.convert
            source._capture.convert = lambda grab: converted.append(grab.index) or convert(grab)
            one.fill()
            item = await anext(source)
            await filled(source)
            assert source.newest_in_place_of(item) is item, "nothing was converted yet"
            for number in range(2, 5):
                await filled(source)
                await until(lambda number=number: converted[-1] == number and source._ready)
                newest = source.newest_in_place_of(item)
                assert newest.index == number
                assert is_consistent(source.statistics())
                item = newest
            # A consumer that is fast again: nothing is converted before it asks.
            while source._unexchanged < 8:
                await filled(source)
                await anext(source)
            before = len(converted)
            for _ in range(5):
                await filled(source)
            await anyio.sleep(0.02)
            assert len(converted) == before
            return source.statistics()

    account = really(body)
    assert is_consistent(account)
    assert one.holds_nothing


def test_slow_conversion_is_not_made_before_it_is_asked_for(really, monkeypatch):
    monkeypatch.setattr("aionn.media.live.source.PREPARED_NS_MAX", -1)
    system = FakeSystem()
    one = system.camera

    async def body():
        async with camera(system=system, reconnect=SOON) as source:
            one.fill()
            item = await anext(source)
            for _ in range(3):
                one.fill()
                await anyio.sleep(0.01)
                assert source.newest_in_place_of(item) is item
            return source.statistics()

    account = really(body)
    assert is_consistent(account) and account.delivered == 1


def test_gap_before_the_exchanged_item_is_marked_on_the_newest(really):
    system = FakeSystem()
    one = system.camera

    async def body():
        async with camera(system=system, reconnect=SOON) as source, tee(source) as shared:
            branch = shared.branch()
            one.fill()
            await anext(branch)
            one.unplug()
            await until(lambda: source.health().state != "live")
            one.plug()
            await until(lambda: source.health().state == "live")
            one.fill()
            item = await anext(branch)
            assert item.follows_gap
            while (newest := branch.newest_in_place_of(item)) is item:
                one.fill()
                await anyio.sleep(0.002)
            assert newest.follows_gap and newest.index > item.index
            later = newest
            while (item := branch.newest_in_place_of(later)) is later:
                one.fill()
                await anyio.sleep(0.002)
            account = branch.statistics()
            assert is_consistent(account) and (account.delivered, account.dropped >= 2) == (2, True)

    really(body)


def test_recording_has_the_item_and_the_newest_one(really, tmp_path):
    system = FakeSystem()
    one = system.camera

    async def body():
        async with (
            camera(system=system, reconnect=SOON) as source,
            tee(source) as shared,
            record(tmp_path / "a.rec") as recorder,
        ):
            items = recorder.through(shared.branch())
            one.fill()
            item = await anext(items)
            while (newest := items.newest_in_place_of(item)) is item:
                one.fill()
                await anyio.sleep(0.002)
        async with replay(tmp_path / "a.rec", keep="all") as frames:
            return [item.index, newest.index], [frame.index async for frame in frames]

    taken, recorded = really(body)
    assert recorded == taken

"""Waiting for descriptors: in which turn of the loop they are read, and how a wait ends."""

import asyncio
import os
import select

import pytest

from aionn.media.live.changes import Changes
from aionn.media.live.readable import until_readable, while_readable
from aionn.media.live.source import LiveSource
from tests.aionn.media.live.test_slow_consumer import Device, Opener


@pytest.fixture
def pipe():
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    yield ends
    for end in ends:
        os.close(end)


def test_descriptor_is_read_until_the_reader_ends_it(really, pipe):
    reader, writer = pipe

    async def body():
        found = []

        def read():
            found.append(os.read(reader, 1))
            if len(found) < 3:
                os.write(writer, b"x")
            return len(found) < 2

        os.write(writer, b"x")
        assert await while_readable(reader, read, 10.0)
        # It is readable, and not read any more.
        await asyncio.sleep(0.01)
        assert len(found) == 2
        assert await until_readable(reader, 10.0)
        assert os.read(reader, 9) == b"x"

    really(body)


def test_wait_ends_at_its_limit_however_much_was_read(really, pipe):
    reader, writer = pipe

    async def body():
        found = []
        os.write(writer, b"x")
        assert not await while_readable(reader, lambda: bool(found.append(os.read(reader, 1)) or True), 0.01)
        assert found == [b"x"]
        assert not await until_readable(reader, 0.01)

    really(body)


def test_exception_of_a_reader_is_raised_and_ends_the_wait(really, pipe):
    reader, writer = pipe

    async def body():
        os.write(writer, b"x")
        with pytest.raises(ZeroDivisionError):
            await while_readable(reader, lambda: 1 // 0 > 0, 10.0)
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(reader)

    really(body)


def test_cancelled_wait_watches_nothing(really, pipe):
    async def body():
        task = asyncio.ensure_future(while_readable(pipe[0], lambda: True, 10.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not asyncio.get_running_loop().remove_reader(pipe[0])

    really(body)


def test_change_wakes_all_that_wait_and_cancelled_ones_are_forgotten(really):
    async def body():
        changes = Changes()
        waiting = [asyncio.ensure_future(changes.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert len(changes._waiting) == 2
        changes.announce()
        changes.announce()
        done, _ = await asyncio.wait(waiting, timeout=5)
        assert len(done) == 3 and waiting[1].cancelled()
        later = asyncio.ensure_future(changes.wait())
        await asyncio.sleep(0)
        assert not later.done(), "only the next change ends it"
        changes.announce()
        await later

    really(body)


class Now:
    now_ns = 1_000_000_000


def test_consumer_has_an_item_in_the_turn_after_the_one_that_notices_it(really):
    """Each further turn of the loop is a tenth of the way of a frame to a quick model."""

    async def body():
        device = Device(Now)
        loop = asyncio.get_running_loop()
        turns = [0]

        def count():
            turns[0] += 1
            handle[0] = loop.call_soon(count)

        handle = [None]
        found = []
        async with LiveSource(Opener(device), name="test", reconnect=None, now=lambda: Now.now_ns) as source:
            for _ in range(3):
                taking = asyncio.ensure_future(anext(source))
                await asyncio.sleep(0.01)
                device.fill()
                assert select.select([device.fd], [], [], 5)[0]
                turns[0] = 0
                taking.add_done_callback(lambda _: found.append(turns[0]))
                count()
                await taking
                handle[0].cancel()
        return found

    # The first turn is this one; the loop notices the item in the second, its consumer takes it in the third, and the fourth calls
    # the callback.
    assert really(body) == [4, 4, 4]

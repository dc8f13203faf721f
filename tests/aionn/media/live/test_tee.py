"""One source for several consumers: the newest item wins in each, and what one consumer does is nothing to the next."""

import asyncio
import contextlib
import gc
import random

import anyio
import numpy as np
import pytest

from aionn.errors import GeneralFailure, InvalidArgument
from aionn.media import Frame, Reconnection, camera, synthetic_video, tee
from aionn.media.live.tee import BRANCHES_MAX
from tests.support.media.fake_camera import FakeSystem


def frame(index, follows_gap=False):
    return Frame(np.zeros((1, 1, 3), np.uint8), index, index, index / 30, follows_gap=follows_gap)


class Fed:
    """A source that returns what a test puts into it."""

    def __init__(self):
        self.items = asyncio.Queue()
        self.reads = 0
        self.cancelled = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.reads += 1
        try:
            item = await self.items.get()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(item, BaseException):
            raise item
        return item

    async def feed(self, *items):
        for item in items:
            self.items.put_nowait(item)
            await settled()


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


def test_every_branch_gets_the_newest_item_and_counts_what_it_missed(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            fast, slow = shared.branch(), shared.branch()
            seen = []
            for index in range(5):
                await source.feed(frame(index))
                seen.append((await anext(fast)).index)
            assert seen == [0, 1, 2, 3, 4]
            assert (await anext(slow)).index == 4
            account = slow.statistics()
            assert (account.presented, account.delivered, account.dropped) == (5, 1, 4)
            assert fast.statistics().dropped == 0

    really(body)


def test_items_are_shared_and_not_copied(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            first, second = shared.branch(), shared.branch()
            await source.feed(frame(0))
            assert (await anext(first)).data is (await anext(second)).data

    really(body)


def test_oldest_keeps_the_queue_of_its_branch_alone(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            oldest, latest = shared.branch(keep="oldest", queue_max=3), shared.branch()
            await source.feed(*map(frame, range(6)))
            assert [(await anext(oldest)).index for _ in range(3)] == [0, 1, 2]
            assert (await anext(latest)).index == 5

    really(body)


@pytest.mark.parametrize(
    "way", ["stops reading", "closes", "is cancelled", "is cancelled twice", "is dropped"]
)
def test_consumer_that_leaves_does_not_disturb_the_other(really, way):
    async def body():
        source = Fed()

        async def consume(branch):
            async for _ in branch:
                pass

        async with tee(source) as shared:
            stays, leaves = shared.branch(), shared.branch()
            task = asyncio.create_task(consume(leaves))
            await source.feed(frame(0))
            assert (await anext(stays)).index == 0
            if way == "closes":
                leaves.close()
                await task
            else:
                task.cancel()
                await asyncio.sleep(0)
                if way == "is cancelled twice":
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if way == "is dropped":
                del leaves, task
                gc.collect()
                assert "1 branches" in repr(shared)
            for index in range(1, 4):
                await source.feed(frame(index))
                assert (await anext(stays)).index == index

    really(body)


def test_cancelled_wait_of_a_branch_loses_nothing(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            branch = shared.branch(keep="oldest")
            for index in range(20):
                waiting = asyncio.create_task(anext(branch))
                await settled()
                source.items.put_nowait(frame(index))
                for _ in range(index % 6):
                    await asyncio.sleep(0)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert (await waiting).index == index
                    continue
                assert (await anext(branch)).index == index
            assert source.cancelled == 0

    really(body)


def test_source_is_not_read_without_a_branch(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            await settled()
            assert source.reads == 0
            with contextlib.closing(shared.branch()) as branch:
                await source.feed(frame(0))
                assert (await anext(branch)).index == 0
            reads = source.reads
            await source.feed(frame(1), frame(2))
            # The read that was in progress has ended, and no other one began.
            assert source.reads == reads
            assert (await anext(shared.branch())).index == 2

    really(body)


def test_branch_of_a_tee_that_is_not_entered_gets_the_first_item(virtually):
    async def body(now):
        async with synthetic_video(size=(8, 8), frames=3, fps=10, now=now) as source:
            shared = tee(source)
            branch = shared.branch(keep="oldest")
            await anyio.sleep(1)
            async with shared:
                return [frame.index async for frame in branch]

    # The source keeps the newest of those that came before the tee was entered.
    assert virtually(body) == [2]


def test_end_of_the_source_ends_every_branch_after_its_items(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            first, second = shared.branch(), shared.branch(keep="oldest")
            await source.feed(frame(0), frame(1), StopAsyncIteration())
            assert [item.index async for item in first] == [1]
            assert [item.index async for item in second] == [0, 1]
            assert [item async for item in shared.branch()] == []

    really(body)


def test_error_of_the_source_is_raised_in_every_branch_after_its_items(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            branches = [shared.branch(), shared.branch()]
            await source.feed(frame(0), ZeroDivisionError("broken"))
            for branch in branches:
                assert (await anext(branch)).index == 0
                with pytest.raises(ZeroDivisionError, match="broken"):
                    await anext(branch)
                with pytest.raises(StopAsyncIteration):
                    await anext(branch)
            with pytest.raises(ZeroDivisionError):
                await anext(shared.branch())

    really(body)


def test_source_that_is_cancelled_from_its_own_side_is_an_error_and_no_end(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            branch = shared.branch()
            await source.feed(asyncio.CancelledError())
            with pytest.raises(GeneralFailure, match="got a cancellation"):
                await anext(branch)

    really(body)


def test_leaving_the_tee_ends_waiting_consumers_and_leaves_the_source_open(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            branch = shared.branch()
            waiting = asyncio.create_task(anext(branch, "ended"))
            await settled()
        assert await waiting == "ended"
        assert source.cancelled == 1
        await source.feed(frame(7))
        assert (await anext(source)).index == 7
        assert [item async for item in shared.branch()] == []

    really(body)


@pytest.mark.parametrize("turns", range(4))
def test_tee_that_is_cancelled_twice_while_it_closes_leaves_nothing(really, turns):
    async def body():
        source = Fed()

        async def use():
            async with tee(source) as shared:
                await anext(shared.branch())

        task = asyncio.create_task(use())
        await settled()
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled()
        assert len(asyncio.all_tasks()) == 1

    really(body)


def test_source_that_never_waits_leaves_the_loop_its_time(really):
    async def endless():
        index = 0
        while True:
            yield frame(index)
            index += 1

    async def body():
        async with tee(endless()) as shared:
            branch = shared.branch()
            last = -1
            for _ in range(5):
                await anyio.sleep(0.001)
                item = await anext(branch)
                assert item.index > last
                last = item.index

    really(body)


def test_source_that_never_returns_does_not_keep_the_tee_open(really, monkeypatch):
    monkeypatch.setattr("aionn.media.live.tee.CLOSE_S_MAX", 0.05)
    ends = []

    async def stubborn():
        while not ends:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        return
        yield

    async def body():
        async with tee(stubborn()) as shared:
            branch = shared.branch()
            waiting = asyncio.create_task(anext(branch, "ended"))
            await settled()
        assert await waiting == "ended"
        ends.append(True)
        await anyio.sleep(0.1)

    really(body)


def test_gap_before_a_dropped_item_is_marked_on_the_next_one_of_the_branch(really):
    async def body():
        source = Fed()
        async with tee(source) as shared:
            latest, oldest = shared.branch(), shared.branch(keep="oldest", queue_max=2)
            await source.feed(frame(0), frame(1), frame(2, follows_gap=True), frame(3))
            marks = [(item.index, item.follows_gap) for item in [await anext(oldest) for _ in range(2)]]
            assert marks == [(0, False), (1, False)]
            assert (await anext(latest)).follows_gap
            await source.feed(frame(4))
            # The frame of the gap was dropped by the one branch and delivered by the other as frame 3.
            assert (await anext(oldest)).follows_gap
            assert not (await anext(latest)).follows_gap

    really(body)


def test_tee_of_a_camera_lives_through_its_losses(really):
    system = FakeSystem()
    one = system.camera

    async def body():
        reconnect = Reconnection(first_s=0.01, most_s=0.02)
        async with camera(system=system, reconnect=reconnect) as source, tee(source) as shared:
            branches = [shared.branch(), shared.branch()]
            one.fill()
            for branch in branches:
                assert (await anext(branch)).index == 0
            one.unplug()
            while source.health().state == "live":
                await anyio.sleep(0.001)
            one.plug()
            while source.health().state != "live":
                await anyio.sleep(0.001)
            one.fill()
            for branch in branches:
                assert (await anext(branch)).follows_gap

    really(body)
    assert one.holds_nothing


@pytest.mark.parametrize("seed", range(4))
def test_random_consumers_break_no_promise(really, seed):
    chance = random.Random(seed)

    async def consume(branch, seen):
        while True:
            seen.append((await anext(branch)).index)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)

    async def body():
        source = Fed()
        async with tee(source) as shared:
            consumers = []
            for index in range(200):
                event = chance.random()
                if event < 0.1 and len(consumers) < BRANCHES_MAX:
                    branch, seen = shared.branch(keep=chance.choice(["latest", "oldest"])), []
                    consumers.append((branch, seen, asyncio.create_task(consume(branch, seen))))
                elif event < 0.15 and consumers:
                    chance.choice(consumers)[2].cancel()
                elif event < 0.18 and consumers:
                    chance.choice(consumers)[0].close()
                source.items.put_nowait(frame(index))
                await asyncio.sleep(0)
                for branch, seen, _ in consumers:
                    account = branch.statistics()
                    assert account.presented == account.delivered + account.dropped + account.queued
                    assert account.queued <= 4
                    assert seen == sorted(set(seen)) and len(seen) == account.delivered
            for _, _, task in consumers:
                task.cancel()
            await asyncio.gather(*(task for _, _, task in consumers), return_exceptions=True)

    really(body)


def test_impossible_use_is_rejected(really):
    async def body():
        with pytest.raises(InvalidArgument, match="expected an async iterable, got a list"):
            tee([1, 2])
        shared = tee(Fed())
        for arguments, words in (
            ({"keep": "all"}, "hold back the rest"),
            ({"keep": "newest"}, "expected one of"),
            ({"queue_max": 0}, "queue_max"),
        ):
            with pytest.raises(InvalidArgument, match=words):
                shared.branch(**arguments)
        branches = [shared.branch() for _ in range(BRANCHES_MAX)]
        with pytest.raises(InvalidArgument, match="expected at most 64 open branches"):
            shared.branch()
        branches.pop().close()
        branches.append(shared.branch())
        async with shared:
            pass
        with pytest.raises(InvalidArgument, match="can be entered once"):
            async with shared:
                pass

    really(body)

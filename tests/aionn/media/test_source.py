"""The shell: pace, policies, errors and every way to leave it. Virtual time unless a thread is the point."""

import asyncio
import contextlib
import gc
import threading

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.errors import GeneralFailure, InvalidArgument
from aionn.media import Frame, Source, synthetic_video, tee
from aionn.media.source import AHEAD_MAX

FRAME_NS = 40_000_000


class Made:
    """Frames of 25 per second that know how many were made and whether their generator was closed."""

    def __init__(self, count, fail_at=None, before=None):
        self.count, self.fail_at, self.before = count, fail_at, before
        self.made = self.closed = 0
        self.threads = set()

    def items(self):
        try:
            for index in range(self.count):
                self.threads.add(threading.current_thread())
                if index == self.fail_at:
                    raise RuntimeError(f"frame {index} is broken")
                if self.before is not None:
                    self.before(index)
                self.made += 1
                yield index * FRAME_NS, Frame(np.zeros((1, 1, 3), np.uint8), 0, index, index * FRAME_NS / 1e9)
        finally:
            self.closed += 1

    def source(self, **options):
        return Source(self.items(), name="test", **options)


def drained(source, pause_s=0.0):
    async def drain():
        frames = []
        async with source as items:
            async for frame in items:
                frames.append(frame)
                await anyio.sleep(pause_s)
        return frames

    return drain()


def test_frames_are_presented_when_they_are_due(virtually):
    async def body(now):
        start_ns = now()
        seen = []
        async with Made(50).source(now=now, blocking=False) as frames:
            async for frame in frames:
                seen.append((frame.captured_at_ns - start_ns, now() - frame.captured_at_ns))
        return seen, frames.statistics()

    seen, account = virtually(body)
    for index, (captured_ns, latency_ns) in enumerate(seen):
        # The virtual clock counts on by a nanosecond a wait, to get past rounding.
        assert index * FRAME_NS <= captured_ns <= index * FRAME_NS + 2_000
        assert 0 <= latency_ns < 1_000
    assert (account.presented, account.delivered, account.dropped, account.late) == (50, 50, 0, 0)


def test_slow_consumer_gets_the_newest_frame_and_the_rest_is_counted(virtually):
    async def body(now):
        source = Made(50).source(now=now, blocking=False, keep="latest")
        frames = await drained(source, pause_s=0.1)
        return [frame.index for frame in frames], source.statistics()

    indices, account = virtually(body)
    assert indices[:4] == [0, 2, 5, 7]
    assert indices[-1] == 49
    assert account.delivered == len(indices)
    assert account.dropped == 50 - len(indices)
    assert account.presented == 50


def test_oldest_keeps_the_queue_and_drops_what_comes_later(virtually):
    async def body(now):
        source = Made(10).source(now=now, blocking=False, keep="oldest", queue_max=3)
        async with source as frames:
            await anyio.sleep(5)
            return [frame.index async for frame in frames], source.statistics()

    indices, account = virtually(body)
    assert indices == [0, 1, 2]
    assert (account.dropped, account.delivered) == (7, 3)


def test_all_holds_the_source_back_and_says_so(virtually):
    async def body(now):
        made = Made(40)
        async with made.source(now=now, blocking=False, keep="all", queue_max=3) as frames:
            started_ns = now()
            await anyio.sleep(5)
            stuck = made.made, frames.statistics()
            rest = [frame async for frame in frames]
        return started_ns, stuck, rest, frames.statistics()

    started_ns, (made, account), rest, final = virtually(body)
    assert (account.presented, account.queued, account.dropped) == (3, 3, 0)
    # Three queued, one in the presenter's hands, the buffer, one in the maker's hands.
    assert made <= 3 + 1 + AHEAD_MAX + 1
    assert [frame.index for frame in rest] == list(range(40))
    moments = [frame.captured_at_ns for frame in rest]
    assert moments == sorted(moments)
    assert (
        moments[2] < started_ns + 4 * FRAME_NS
    )  # Presented in time, then waited: that is the consumer's latency.
    assert moments[3] >= started_ns + 5_000_000_000  # Held back: did not count as captured meanwhile.
    assert final.held_back == 37
    assert (final.dropped, final.delivered, final.late) == (0, 40, 0)


def test_without_pace_nothing_is_dropped_and_no_time_passes(virtually):
    async def body(now):
        start_ns = now()
        source = synthetic_video(frames=200, pace=False, keep="latest", now=now)
        frames = await drained(source)
        took_ns = now() - start_ns
        slowly = await drained(synthetic_video(frames=20, pace=False, keep="latest", now=now), pause_s=1.0)
        assert [frame.index for frame in slowly] == list(range(20))
        return [frame.index for frame in frames], took_ns, source.statistics()

    indices, took_ns, account = virtually(body)
    assert indices == list(range(200))
    assert took_ns < FRAME_NS
    assert (account.dropped, account.held_back, account.late) == (0, 0, 0)


def test_frame_that_is_made_too_late_is_counted_and_captured_when_ready(really):
    gate = threading.Event()

    def slow(index):
        if index == 2:
            assert gate.wait(10)

    async def body():
        async with Made(4, before=slow).source(keep="all") as frames:
            await anyio.sleep(3 * FRAME_NS / 1e9)
            opened_ns = time_ns()
            gate.set()
            return opened_ns, [frame async for frame in frames], frames.statistics()

    from time import monotonic_ns as time_ns

    opened_ns, frames, account = really(body)
    assert [frame.index for frame in frames] == [0, 1, 2, 3]
    assert frames[2].captured_at_ns >= opened_ns > frames[1].captured_at_ns
    assert account.late >= 1


def test_blocking_generator_runs_off_the_loop_and_one_step_at_a_time(really):
    released = threading.Event()
    inside = threading.Lock()

    def blocked(index):
        assert inside.acquire(blocking=False)
        if index == 1:
            assert released.wait(10), "the loop was blocked"
        inside.release()

    made = Made(5, before=blocked)

    async def body():
        async with made.source(pace=False) as frames:
            assert (await anext(frames)).index == 0
            released.set()  # Reached only if the step that waits for it runs elsewhere.
            return [frame.index async for frame in frames]

    assert really(body) == [1, 2, 3, 4]
    assert threading.main_thread() not in made.threads
    assert made.closed == 1


@pytest.mark.parametrize("blocking", [False, True])
def test_error_in_mid_stream_comes_after_what_was_presented(really, blocking):
    made = Made(10, fail_at=3)

    async def body():
        indices = []
        async with made.source(pace=False, blocking=blocking) as frames:
            with pytest.raises(RuntimeError, match="frame 3 is broken"):
                async for frame in frames:
                    indices.append(frame.index)
            assert [frame async for frame in frames] == []
        return indices

    assert really(body) == [0, 1, 2]
    assert made.closed == 1


@pytest.mark.parametrize("blocking", [False, True])
def test_error_in_the_first_step_comes_out_of_entering(really, blocking):
    made = Made(10, fail_at=0)

    async def body():
        with pytest.raises(RuntimeError, match="frame 0 is broken"):
            async with made.source(blocking=blocking):
                raise AssertionError("entered")

    really(body)
    assert made.closed == 1


async def leave_by_break(source):
    async with source as frames:
        async for _ in frames:
            break


async def leave_by_error(source):
    with pytest.raises(KeyError, match="mine"):
        async with source as frames:
            async for _ in frames:
                raise KeyError("mine")


async def leave_by_anyio_timeout(source):
    with anyio.move_on_after(0.02) as scope:
        async with source as frames:
            await anext(frames)
            await anyio.sleep(60)
    assert scope.cancelled_caught


async def leave_by_asyncio_timeout(source):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            async with source as frames:
                await anext(frames)
                await anyio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def leave_by_task_cancel(source):
    inside = asyncio.Event()

    async def consume():
        async with source as frames:
            await anext(frames)
            inside.set()
            await anyio.sleep(60)

    task = asyncio.create_task(consume())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def leave_by_cancel_while_waiting_for_a_frame(source):
    async with source as frames:
        first = await anext(frames)
        with anyio.move_on_after(0.0):
            await anext(frames)
            await anext(frames)
        # What was cancelled took nothing that is lost.
        following = await anext(frames)
        assert following.index - first.index == frames.statistics().delivered - 1


async def leave_by_failing_sibling(source):
    async def fail():
        await anyio.sleep(0.01)
        raise KeyError("sibling")

    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            async with source as frames:
                await anext(frames)
                await anyio.sleep(60)
    assert caught.group_contains(KeyError, match="sibling")


LEAVINGS = [
    leave_by_break,
    leave_by_error,
    leave_by_anyio_timeout,
    leave_by_asyncio_timeout,
    leave_by_task_cancel,
    leave_by_cancel_while_waiting_for_a_frame,
    leave_by_failing_sibling,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("keep", ["all", "latest"])
@pytest.mark.parametrize("leave", LEAVINGS, ids=lambda leave: leave.__name__)
def test_every_way_out_closes_the_generator_and_leaves_nothing(really, leave, keep, blocking):
    made = Made(1_000)
    source = made.source(keep=keep, blocking=blocking)

    async def body():
        await leave(source)
        # On a machine so busy that a time-out came first, the generator may never have started.
        assert made.closed == (1 if made.made else 0)
        before = made.made
        await anyio.lowlevel.checkpoint()
        assert made.made == before
        assert asyncio.all_tasks() == {asyncio.current_task()}

    really(body)
    assert "closed" in repr(source)


@pytest.mark.parametrize("entered", [False, True], ids=["while entering", "inside"])
def test_cancelling_waits_for_the_step_in_the_thread(really, entered):
    started, gate = threading.Event(), threading.Event()

    def stuck(index):
        if index == int(entered):
            started.set()
            assert gate.wait(10)

    made = Made(10, before=stuck)

    async def consume():
        async with made.source(pace=False) as frames:
            async for _ in frames:
                pass

    async def body():
        task = asyncio.create_task(consume())
        while not started.is_set():
            await anyio.sleep(0.001)
        task.cancel()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert not task.done()
        assert made.closed == 0
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.closed == 1

    really(body)


def test_second_cancel_while_closing_still_closes(really):
    made = Made(10)
    source = made.source()

    async def consume():
        async with source as frames:
            await anext(frames)
            await anyio.sleep(60)

    async def body():
        task = asyncio.create_task(consume())
        while not source.statistics().delivered:
            await anyio.sleep(0.001)
        cancels = 0
        while not task.done():  # One cancellation for every step of leaving.
            task.cancel()
            cancels += 1
            await asyncio.sleep(0)
        assert cancels > 1
        assert task.cancelled()
        assert made.closed == 1

    really(body)


def test_empty_medium_ends_at_once(virtually):
    async def body(now):
        return await drained(Made(0).source(now=now, blocking=False))

    assert virtually(body) == []


def test_source_is_entered_once_and_iterated_inside(virtually):
    async def body(now):
        source = Made(3).source(now=now, blocking=False)
        with pytest.raises(
            InvalidArgument,
            match=r"inside its `async with`, the source is new; write async with source as items$",
        ):
            await anext(source)
        async with source as frames:
            assert frames is source
            with pytest.raises(InvalidArgument, match="this one is open; make another"):
                await source.__aenter__()
        with pytest.raises(InvalidArgument, match="the source is closed"):
            await anext(source)
        with pytest.raises(InvalidArgument, match="this one is closed"):
            await source.__aenter__()
        await source.__aexit__(None, None, None)  # Closing again is no mistake.

    virtually(body)


def test_source_that_was_dropped_open_warns():
    source = Made(3).source()
    source._state = "open"
    with pytest.warns(ResourceWarning, match="test open, .*was dropped open"):
        del source
        gc.collect()


def test_source_that_was_never_entered_opens_nothing():
    made = Made(3)
    source = made.source()
    del source
    gc.collect()
    assert (made.made, made.closed) == (0, 0)


@pytest.mark.parametrize("blocking", [True, False])
def test_error_of_a_generator_that_looks_like_a_cancellation_reaches_the_consumer(really, blocking):
    """The medium would seem to have ended."""

    def before(index):
        if index == 2:
            raise asyncio.CancelledError("of the generator")

    async def body():
        source = Made(5, before=before).source(blocking=blocking, pace=False)
        frames = []
        with pytest.raises(GeneralFailure, match="of the generator"):
            async with source as items:
                async for frame in items:
                    frames.append(frame)
        return len(frames)

    assert really(body) == 2


@pytest.mark.filterwarnings("ignore:<Source .* was dropped open:ResourceWarning")
@pytest.mark.parametrize("blocking", [True, False])
def test_source_in_an_async_generator_is_closed_by_the_task_that_closes_the_generator(blocking):
    """That of ``asyncio.run``, for a generator that its consumer has left."""
    made, failures = Made(50), []

    async def frames():
        async with made.source(blocking=blocking) as items:
            async for frame in items:
                yield frame

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        left = frames()
        await anext(left)
        return left

    asyncio.run(main())
    assert made.closed == 1 and not failures


def test_source_that_is_cancelled_while_it_opens_leaves_nothing(really):
    made = Made(50)

    async def body():
        for turns in range(12):
            source = made.source()
            task = asyncio.ensure_future(source.__aenter__())
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                await source.__aexit__(None, None, None)
                continue
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1

    really(body)


@pytest.mark.parametrize("way", ["source", "branch"])
def test_second_consumer_is_rejected_while_the_first_waits(way, virtually):
    async def body(now):
        async with contextlib.AsyncExitStack() as stack:
            items = await stack.enter_async_context(Made(4).source(now=now, blocking=False))
            if way == "branch":
                items = (await stack.enter_async_context(tee(items))).branch()
            await anext(items)
            first = asyncio.ensure_future(anext(items))
            await anyio.lowlevel.checkpoint()
            assert not first.done()
            with pytest.raises(InvalidArgument, match=r"expected one consumer.*tee\(source\)"):
                await anext(items)
            assert (await first).index >= 1
            assert (await anext(items)).index >= 2

    virtually(body)

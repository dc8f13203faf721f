"""Waiting in event loops and threads: several of them, cancelled at every await, closed, and with a descriptor to watch."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

import fences
from fences import FenceError, FenceStatus, SyncFence

THREAD_COUNT = 4


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


def exported():
    """A fence of this process and another object that imports it, as a second process would."""
    fence = SyncFence("exporter")
    return fence, SyncFence.from_fd(fence.fileno(), "importer")


def test_cancelled_waiter_leaves_the_others_waiting(run):
    async def main():
        fence = SyncFence()
        tasks = [asyncio.ensure_future(asyncio.wait_for(fence, None)) for _ in range(5)]
        await turns()
        assert fence.waiter_count == 5
        tasks[2].cancel()
        await turns()
        assert fence.waiter_count == 4
        fence.signal()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None)] * 2 + [asyncio.CancelledError] + [
            type(None)
        ] * 2
        assert fence.waiter_count == 0

    run(main())


def test_task_cancelled_after_the_signal_but_before_it_ran_disturbs_nobody(run):
    async def main():
        fence = SyncFence()

        async def waiter():
            await fence

        tasks = [asyncio.ensure_future(waiter()) for _ in range(2)]
        await turns()
        fence.signal()
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError) and results[1] is None

    run(main())


def test_waiting_again_and_again_with_a_timeout_leaves_nothing(run):
    async def main():
        local = SyncFence()
        exporter, imported = exported()
        for fence in (local, imported):
            for _ in range(50):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(fence, 0)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.0001):
                        await fence
            assert fence.waiter_count == 0
        imported.close()
        exporter.close()

    run(main())


@pytest.mark.parametrize("kind", ["local", "chained", "merged", "first", "point", "imported"])
def test_cancellation_at_every_await(run, kind):
    """A task awaits a fence several times in a row; it is cancelled at its k-th await, for every k, beside one that is not."""

    def make():
        source = SyncFence("source")
        if kind == "chained":
            return source, source.then(lambda: None), source.signal
        if kind == "merged":
            return source, fences.merge([source, SyncFence.signalled()]), source.signal
        if kind == "first":
            return source, fences.first([source, SyncFence()]), source.signal
        if kind == "point":
            timeline = fences.Timeline()
            return source, timeline.fence(3), lambda: timeline.advance(5)
        if kind == "imported":
            return source, SyncFence.from_fd(source.fileno()), source.signal
        return source, source, source.signal

    async def main():
        stage_count = 3
        for cancelled_stage in range(stage_count + 1):
            stages = [make() for _ in range(stage_count)]
            reached = [0, 0]

            async def walk(who, stages=stages, reached=reached):
                for _, fence, _ in stages:
                    await fence
                    reached[who] += 1

            victim, other = asyncio.ensure_future(walk(0)), asyncio.ensure_future(walk(1))
            for index, (_, fence, finish) in enumerate(stages):
                await turns()
                if index == cancelled_stage:
                    victim.cancel()
                    await asyncio.wait([victim])
                assert fence.waiter_count == (1 if index >= cancelled_stage else 2)
                finish()
                await asyncio.wait([asyncio.ensure_future(asyncio.wait_for(fence, None))])
            await asyncio.wait([victim, other])
            assert reached == [cancelled_stage, stage_count]
            assert victim.cancelled() == (cancelled_stage < stage_count) and other.exception() is None
            for source, fence, _ in stages:
                assert fence.waiter_count == 0 and fence.status is FenceStatus.SIGNALLED
                source.close()

    run(main())


def test_two_loops_and_threads_await_one_fence(new_loop):
    """Each resumes exactly once, whichever thread signals."""
    for imported in (False, True):
        source = SyncFence("source")
        fence = SyncFence.from_fd(source.fileno()) if imported else source
        resumed = []

        def sleep_in_loop(fence=fence, resumed=resumed):
            async def wait(index):
                await fence
                resumed.append((threading.get_ident(), index))

            async def main():
                await asyncio.gather(*(wait(index) for index in range(3)))

            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(main())

        def sleep_in_thread(fence=fence, resumed=resumed):
            fence.wait()
            resumed.append((threading.get_ident(), 0))

        threads = [threading.Thread(target=sleep_in_loop) for _ in range(2)]
        threads += [threading.Thread(target=sleep_in_thread) for _ in range(2)]
        for thread in threads:
            thread.start()
        while fence.waiter_count < 8:
            threading.Event().wait(0.001)
        source.signal()
        for thread in threads:
            thread.join()
        assert len(resumed) == len(set(resumed)) == 8
        assert fence.waiter_count == 0
        source.close()


def test_loop_closed_with_waiters_costs_nobody_else_anything(new_loop):
    for imported in (False, True):
        source = SyncFence("source")
        fence = SyncFence.from_fd(source.fileno()) if imported else source
        loop = new_loop()

        async def wait(fence=fence):
            await fence

        task = loop.create_task(wait())
        loop.run_until_complete(turns())
        task._log_destroy_pending = False  # asyncio's own complaint about what this test does on purpose.
        loop.close()
        seen = []
        late = threading.Thread(target=lambda fence=fence, seen=seen: seen.append(fence.wait()))
        late.start()
        source.signal()
        late.join()
        assert seen == [True]
        fence.close()
        source.close()
        task.get_coro().close()
        del task, loop


def test_waiters_of_a_loop_wake_in_one_call(run):
    """However many tasks wait, another thread crosses into their loop once."""

    async def main():
        fence = SyncFence()
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(asyncio.wait_for(fence, None)) for _ in range(100)]
        await turns()
        crossings = []

        class Counting:
            def __getattr__(self, name):
                if name == "call_soon_threadsafe":
                    crossings.append(1)
                return getattr(loop, name)

        group = fence._group_of(loop)
        group.loop = Counting()
        await asyncio.to_thread(fence.signal)
        await asyncio.gather(*tasks)
        assert len(crossings) == 1

    run(main())


class Registrations:
    """Counts what a loop is asked to watch; of the loops, only asyncio's own lets its methods be replaced."""

    def __init__(self, loop, monkeypatch):
        self.now, self.ever = set(), []
        add, remove = loop.add_reader, loop.remove_reader

        def add_reader(number, *rest):
            self.now.add(number)
            self.ever.append(number)
            return add(number, *rest)

        def remove_reader(number):
            self.now.discard(number)
            return remove(number)

        monkeypatch.setattr(loop, "add_reader", add_reader)
        monkeypatch.setattr(loop, "remove_reader", remove_reader)


def test_one_registration_however_many_wait(monkeypatch):
    async def main():
        registrations = Registrations(asyncio.get_running_loop(), monkeypatch)
        source, fence = exported()
        after = fence.then(lambda: None)
        tasks = [asyncio.ensure_future(asyncio.wait_for(each, None)) for each in [fence] * 50 + [after] * 50]
        await turns()
        assert len(registrations.now) == len(registrations.ever) == 1
        source.signal()
        await asyncio.gather(*tasks)
        await turns()
        assert registrations.now == set() and len(registrations.ever) == 1
        source.close()

    asyncio.run(main())


def test_last_cancelled_waiter_takes_the_registration_away(monkeypatch):
    async def main():
        registrations = Registrations(asyncio.get_running_loop(), monkeypatch)
        source, fence = exported()
        tasks = [asyncio.ensure_future(asyncio.wait_for(fence, None)) for _ in range(2)]
        await turns()
        tasks[0].cancel()
        await turns()
        assert len(registrations.now) == 1
        tasks[1].cancel()
        await turns()
        assert registrations.now == set() and fence.waiter_count == 0
        await asyncio.gather(*tasks, return_exceptions=True)
        fence.close()
        source.close()

    asyncio.run(main())


def test_own_exported_fence_is_not_watched(monkeypatch):
    async def main():
        registrations = Registrations(asyncio.get_running_loop(), monkeypatch)
        fence = SyncFence()
        fence.fileno()
        asyncio.get_running_loop().call_soon(fence.signal)
        await fence
        assert registrations.ever == []
        fence.close()

    asyncio.run(main())


def test_imported_fence_that_finished_unnoticed_does_not_yield(run):
    async def main():
        source, fence = exported()
        source.signal(5)
        others = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        await fence
        assert others == [] and fence.signal_time_ns == 5
        source.close()

    run(main())


def test_close_wakes_those_who_wait_for_an_imported_fence(run):
    async def main():
        source, fence = exported()
        task = asyncio.ensure_future(asyncio.wait_for(fence, None))
        thread = asyncio.ensure_future(asyncio.to_thread(fence.wait))
        while fence.waiter_count < 2:
            await asyncio.sleep(0)
        fence.close()
        for waiting in (task, thread):
            with pytest.raises(FenceError, match="closed while pending"):
                await waiting
        assert source.status is FenceStatus.PENDING
        source.close()

    run(main())


def test_dependants_of_imported_fences_run_without_any_loop():
    pairs = [exported() for _ in range(3)]
    merged = fences.merge(fence for _, fence in pairs)
    woken = threading.Event()
    merged.add_callback(lambda _: woken.set())
    for source, _ in pairs:
        assert not woken.is_set()
        source.signal()
    assert woken.wait(30)
    assert merged.wait(0) is True
    for source, _ in pairs:
        source.close()


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (os, "eventfd", OSError("no descriptor is left")),
        (threading.Thread, "start", RuntimeError("no thread")),
    ],
)
def test_dependant_that_nobody_could_watch_for_is_refused_and_the_next_is_not(
    place, name, error, monkeypatch
):
    source, fence = exported()
    called = threading.Event()

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(place, name, fail)
        with pytest.raises(type(error), match=str(error)):
            fence.add_callback(lambda _: called.set())
    after = threading.Event()
    fence.add_callback(lambda _: after.set())
    source.signal()
    assert after.wait(30) and not called.is_set()
    source.close()


def test_imported_fence_closed_under_the_background_thread_lets_it_end():
    source, fence = exported()
    after = fence.then(lambda: None)
    fence.close()
    assert after.status is FenceStatus.FAILED
    source.close()


def test_wait_of_imported_fence_times_out_and_leaves_nothing():
    source, fence = exported()
    assert fence.wait(1_000_000) is False
    assert fence.wait(0) is False
    assert fence.waiter_count == 0
    source.signal()
    assert fence.wait(0) is True
    source.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer instead of passing: an hour takes no time."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        select = self._selector.select

        def jump(timeout=None):
            events = select(0)
            if not events and timeout:
                self.now_s += timeout
            return events

        self._selector.select = jump

    def time(self):
        return self.now_s


def test_fences_work_under_virtual_time():
    async def main():
        loop = asyncio.get_running_loop()
        fence = SyncFence()
        chained = fence.then(lambda: None)
        loop.call_later(1800, fence.signal)
        async with asyncio.timeout(3600):
            await chained
        assert (loop.time(), chained.signal_time_ns) == (1800, 1800 * 10**9)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(SyncFence(), 3600)
        assert loop.time() == 5400
        source, imported = exported()
        loop.call_later(10, source.signal)
        async with asyncio.timeout(3600):
            await imported
        assert imported.signal_time_ns == 5410 * 10**9
        source.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        before = fences.set_clock(lambda: int(loop.time() * 1e9))
        try:
            runner.run(main())
        finally:
            fences.set_clock(before)


# Races. Threads change places every few microseconds here, so that each race is run thousands of times.


@pytest.fixture
def eager_switching():

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*bodies):
    """Run the bodies at the same time; raise what any of them raised."""
    barrier = threading.Barrier(len(bodies))
    errors = []

    def start(body):
        try:
            barrier.wait()
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_of_many_threads_that_finish_a_fence_one_wins(eager_switching):
    row = [SyncFence() for _ in range(300)]
    wins = [[] for _ in row]
    calls = [[] for _ in row]
    for fence, seen in zip(row, calls):
        fence.add_callback(seen.append)

    def finish(who):
        for index, fence in enumerate(row):
            if fence.try_signal(who) if who % 2 else fence.try_fail(str(who)):
                wins[index].append(who)

    in_threads(*(lambda who=who: finish(who) for who in range(THREAD_COUNT)))
    for fence, winners, seen in zip(row, wins, calls):
        assert len(winners) == len(seen) == 1
        assert fence.signal_time_ns == (winners[0] if winners[0] % 2 else None)


def test_every_dependant_attached_while_the_fence_finishes_runs_once(eager_switching):
    row = [SyncFence() for _ in range(300)]
    calls = [[] for _ in row]

    def attach(who):
        for index, fence in enumerate(row):
            fence.then(lambda index=index: calls[index].append(who))
            fence.add_callback(lambda _, index=index: calls[index].append(-who))

    def finish():
        for fence in row:
            fence.signal()

    in_threads(finish, *(lambda who=who: attach(who) for who in range(1, THREAD_COUNT)))
    everyone = sorted([*range(1, THREAD_COUNT), *(-who for who in range(1, THREAD_COUNT))])
    assert [sorted(seen) for seen in calls] == [everyone] * len(row)


def test_callback_is_either_removed_or_called(eager_switching):
    row = [SyncFence() for _ in range(300)]
    calls = [[] for _ in row]
    removed = [[] for _ in row]

    def toggle(who):
        for index, fence in enumerate(row):

            def callback(_, index=index):
                calls[index].append(who)

            for _ in range(3):
                fence.add_callback(callback)
                removed[index].append((who, fence.remove_callback(callback)))

    def finish():
        for fence in row:
            fence.signal()

    in_threads(finish, *(lambda who=who: toggle(who) for who in range(1, THREAD_COUNT)))
    for index in range(len(row)):
        for who in range(1, THREAD_COUNT):
            kept = sum(1 for each, gone in removed[index] if each == who and not gone)
            assert calls[index].count(who) == kept


def test_chained_fence_is_closed_or_run_but_not_both(eager_switching):
    row = [SyncFence() for _ in range(300)]
    ran = [False] * len(row)

    def work(index):
        ran[index] = True

    chained = [fence.then(lambda index=index: work(index)) for index, fence in enumerate(row)]

    def finish():
        for fence in row:
            fence.signal()

    def close():
        for fence in chained:
            fence.close()

    in_threads(finish, close)
    for fence, done in zip(chained, ran):
        assert fence.status is (FenceStatus.SIGNALLED if done else FenceStatus.FAILED)


def test_merges_of_fences_finished_in_several_threads_finish_once(eager_switching):
    row = [SyncFence() for _ in range(400)]
    merged = [fences.merge(row[index : index + 4]) for index in range(0, len(row), 4)]
    calls = []
    for fence in merged:
        fence.add_callback(calls.append)
    in_threads(*(lambda who=who: [fence.signal() for fence in row[who::4]] for who in range(4)))
    assert len(calls) == len(set(calls)) == len(merged)
    assert all(fence.status is FenceStatus.SIGNALLED for fence in merged)


def test_tasks_awaiting_while_another_thread_signals_all_wake(run, eager_switching):
    async def main():
        for imported in (False, True):
            sources = [SyncFence() for _ in range(100)]
            row = [SyncFence.from_fd(source.fileno()) for source in sources] if imported else sources

            async def wait(fence):
                await fence

            signalling = asyncio.ensure_future(
                asyncio.to_thread(lambda sources=sources: [fence.signal() for fence in sources])
            )
            await asyncio.gather(*(wait(fence) for fence in row for _ in range(3)))
            await signalling
            for fence in {*sources, *row}:
                assert fence.waiter_count == 0
                fence.close()

    run(main())


def test_background_thread_watches_on_after_a_callback_that_ends_a_program(caplog):
    first, second = exported(), exported()
    raised, called = threading.Event(), threading.Event()

    def leave(_):
        raised.set()
        sys.exit(1)

    first[1].add_callback(leave)
    second[1].add_callback(lambda _: called.set())
    first[0].signal()
    assert raised.wait(30)
    second[0].signal()
    assert called.wait(30)
    assert "a callback of" in caplog.text
    for fence in (*first, *second):
        fence.close()

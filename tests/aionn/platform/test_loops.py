"""What is to be finished is finished, however often and by whomever its caller is cancelled."""

from __future__ import annotations

import asyncio
import gc
import weakref

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from aionn.errors import DeadObject, GeneralFailure, MissedDeadline
from aionn.platform.loops import finish, finish_all, wait_from_thread
from tests.support.cancellation import cancelled_natively

TURNS = 20
WAIT_S_MAX = 20.0


async def _turns(done: list[str]) -> str:
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()
    done.append("done")
    return "result"


async def test_result_and_failure_are_those_of_the_work() -> None:
    async def fail() -> None:
        raise OSError("broken")

    assert await finish(_turns([])) == "result"
    with pytest.raises(OSError, match="broken"):
        await finish(fail())


@pytest.mark.parametrize("count", [1, 2, TURNS * 2])
async def test_native_cancellation_is_raised_when_the_work_has_ended(count: int) -> None:
    done: list[str] = []
    task = asyncio.create_task(finish(_turns(done)))
    for _ in range(count):
        await asyncio.sleep(0)
        if not done:
            assert not task.done()
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["done"]


async def test_failure_is_the_context_of_a_cancellation() -> None:
    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise OSError("broken")

    task = asyncio.create_task(finish(fail()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(raised.value.__context__, OSError)


@pytest.mark.parametrize("is_raised", [True, False])
async def test_work_that_is_cancelled_from_within_is_a_failure_and_no_cancellation_of_its_caller(
    is_raised: bool,
) -> None:
    async def work() -> None:
        await anyio.lowlevel.checkpoint()
        if is_raised:
            raise asyncio.CancelledError("of a driver")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.lowlevel.checkpoint()

    with pytest.raises(GeneralFailure, match="CancelledError") as caught:
        await finish(work())
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    with pytest.raises(GeneralFailure):
        await finish_all([work, work])
    caller = asyncio.create_task(finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert caller.cancelled()


async def test_scope_of_anyio_is_left_when_the_work_has_ended() -> None:
    done: list[str] = []
    with anyio.move_on_after(0) as scope:
        await finish(_turns(done))
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert done == ["done"]


def test_end_of_the_loop_does_not_cancel_the_work() -> None:
    done: list[str] = []

    async def main() -> None:
        task = asyncio.create_task(finish(_turns(done)))
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(main())  # It cancels every task that it knows.
    assert done == ["done"]


async def test_work_is_finished_where_asyncio_keeps_no_private_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(asyncio, "_unregister_task")
    done: list[str] = []
    await cancelled_natively(finish(_turns(done)), TURNS // 2)
    assert done == ["done"]


def test_asyncio_has_the_private_call() -> None:
    # Without it the work goes on until the loop ends, and no longer: then this module needs another way.
    assert callable(asyncio._unregister_task)


async def test_what_was_worked_on_is_dropped_with_the_cancellation() -> None:
    class Thing:
        async def aclose(self) -> None:
            await finish(_turns([]))

    thing = Thing()
    ref = weakref.ref(thing)
    gc.disable()
    try:
        task = asyncio.create_task(thing.aclose())
        del thing
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        await asyncio.sleep(0)
        assert ref() is None
    finally:
        gc.enable()


async def test_all_works_run_side_by_side_and_to_their_ends_though_one_fails():
    begun, ended = [], []
    everybody = anyio.Event()

    def work(number):
        async def run():
            begun.append(number)
            if len(begun) == 3:
                everybody.set()
            await everybody.wait()
            if number:
                raise ValueError(str(number))
            await anyio.sleep(0.01)
            ended.append(number)

        return run

    with pytest.raises(ValueError, match="1"):
        await finish_all([work(0), work(1), work(2)])
    assert ended == [0]
    await finish_all([])


async def test_thread_gets_the_answer_or_the_error_of_what_it_asks() -> None:
    async def fail() -> None:
        raise MissedDeadline("late")

    async def answer() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    async with anyio.from_thread.BlockingPortal() as portal:
        assert await anyio.to_thread.run_sync(wait_from_thread, portal, answer, "ended") == 7
        with pytest.raises(MissedDeadline, match="late"):
            await anyio.to_thread.run_sync(wait_from_thread, portal, fail, "ended")


async def test_thread_that_waits_when_the_tasks_are_cancelled_is_told_so() -> None:
    asked, told = anyio.Event(), []

    async def ask() -> None:
        asked.set()
        await anyio.sleep_forever()

    def wait(portal: anyio.from_thread.BlockingPortal) -> None:
        try:
            wait_from_thread(portal, ask, "it ended")
        except DeadObject as e:
            told.append(str(e))

    with anyio.fail_after(WAIT_S_MAX):
        with anyio.CancelScope() as scope:
            async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, wait, portal)
                await asked.wait()
                scope.cancel()
        assert scope.cancelled_caught and told == ["it ended"]
        # A portal that has ended takes no questions.
        await anyio.to_thread.run_sync(wait, portal)
    assert told == ["it ended"] * 2


async def test_question_that_raises_no_exception_leaves_the_portal_open() -> None:
    async def fail() -> None:
        raise SystemExit(3)

    async def answer() -> int:
        return 7

    async with anyio.from_thread.BlockingPortal() as portal:

        def ask() -> int:
            with pytest.raises(SystemExit):
                wait_from_thread(portal, fail, "ended")
            return wait_from_thread(portal, answer, "ended")

        assert await anyio.to_thread.run_sync(ask) == 7

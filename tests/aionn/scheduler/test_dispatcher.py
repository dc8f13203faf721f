"""The event loop's shell: slots are exclusive, held and given back, whoever is cancelled or late."""

import anyio
import pytest

from aionn.errors import InvalidArgument, MissedDeadline, ResourceExhausted
from aionn.hal import Priority
from aionn.scheduler.dispatcher import Dispatcher
from aionn.scheduler.work import Start

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


def now_ns():
    return int(anyio.current_time() * 1e9)


@pytest.fixture
def dispatcher():
    return Dispatcher(1, now=now_ns)


async def hold(dispatcher, order, name, *, priority=MEDIUM, deadline_ns=None):
    work = await dispatcher.acquire(priority=priority, deadline_ns=deadline_ns)
    order.append(name)
    await anyio.lowlevel.checkpoint()
    dispatcher.release(work)


async def test_slots_go_by_priority_then_deadline(dispatcher):
    order = []
    first = await dispatcher.acquire(priority=LOW, deadline_ns=None)
    far = now_ns() + 10**12
    async with anyio.create_task_group() as tasks:
        for name, priority, deadline in (
            ("low", LOW, None),
            ("later", MEDIUM, far + 1),
            ("sooner", MEDIUM, far),
            ("high", HIGH, None),
        ):

            async def one(name=name, priority=priority, deadline=deadline):
                await hold(dispatcher, order, name, priority=priority, deadline_ns=deadline)

            tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        dispatcher.release(first)
    assert order == ["high", "sooner", "later", "low"]


async def test_slot_is_held_until_it_is_released(dispatcher):
    await dispatcher.acquire(priority=LOW, deadline_ns=None)
    with anyio.move_on_after(0.02) as scope:
        await dispatcher.acquire(priority=HIGH, deadline_ns=None)
    assert scope.cancelled_caught
    dispatcher.release()
    await dispatcher.acquire(priority=LOW, deadline_ns=None)
    dispatcher.release()
    assert dispatcher.statistics().waiting == 0


async def test_release_of_a_slot_that_is_not_held_is_refused(dispatcher):
    with pytest.raises(InvalidArgument, match="not held"):
        dispatcher.release()


async def test_past_deadline_is_a_persistent_miss(dispatcher):
    with pytest.raises(MissedDeadline) as caught:
        await dispatcher.acquire(priority=HIGH, deadline_ns=now_ns())
    assert not caught.value.transient


async def test_waiter_is_told_when_its_deadline_comes(dispatcher):
    await dispatcher.acquire(priority=LOW, deadline_ns=None)
    with pytest.raises(MissedDeadline) as caught:
        await dispatcher.acquire(priority=HIGH, deadline_ns=now_ns() + 5_000_000)
    assert caught.value.transient
    dispatcher.release()


async def test_learnt_duration_makes_a_deadline_impossible():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    work = await dispatcher.acquire(priority=HIGH, deadline_ns=None, model="m")
    clock[0] = 1000
    dispatcher.release(work)
    with pytest.raises(MissedDeadline, match="even an idle device would need 1212 ns") as caught:
        dispatcher.enter(priority=HIGH, deadline_ns=2200, model="m")
    assert not caught.value.transient
    dispatcher.leave(dispatcher.enter(priority=HIGH, deadline_ns=2213, model="m"))


async def test_waiter_is_told_before_its_deadline_when_it_cannot_be_kept():
    clock = [0]
    dispatcher = Dispatcher(1, now=lambda: clock[0])
    work = await dispatcher.acquire(priority=HIGH, deadline_ns=None, model="m")
    clock[0] = 1000
    dispatcher.release(work)
    await dispatcher.acquire(priority=HIGH, deadline_ns=None)
    waiting = dispatcher.enter(priority=HIGH, deadline_ns=2500, model="m")
    clock[0] = 1300
    other = dispatcher.enter(priority=LOW, deadline_ns=None)
    with pytest.raises(MissedDeadline) as caught:
        await dispatcher.turn(waiting)
    assert caught.value.transient
    dispatcher.leave(other)
    dispatcher.release()


async def test_cancelled_waiter_leaves_and_a_cancelled_holder_keeps():
    dispatcher = Dispatcher(1, now=now_ns)
    holder = await dispatcher.acquire(priority=LOW, deadline_ns=None)
    order = []
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(hold, dispatcher, order, "second")
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await dispatcher.acquire(priority=HIGH, deadline_ns=None)
        assert dispatcher.statistics().waiting == 1
        dispatcher.release(holder)
    assert order == ["second"]


async def test_turn_that_comes_with_the_cancellation_is_given_back():
    dispatcher = Dispatcher(1, now=now_ns)
    holder = await dispatcher.acquire(priority=LOW, deadline_ns=None)

    async def wait(scope):
        with scope:
            dispatcher.release(await dispatcher.acquire(priority=HIGH, deadline_ns=None))

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(wait, scope)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        dispatcher.release(holder)
    dispatcher.release(await dispatcher.acquire(priority=LOW, deadline_ns=None))


async def test_full_room_refuses_or_displaces():
    dispatcher = Dispatcher(1, now=now_ns, waiting_max=1)
    await dispatcher.acquire(priority=LOW, deadline_ns=None)
    dispatcher.enter(priority=LOW, deadline_ns=None)
    with pytest.raises(ResourceExhausted) as caught:
        dispatcher.enter(priority=HIGH, deadline_ns=None)
    assert caught.value.transient
    dispatcher = Dispatcher(1, now=now_ns, waiting_max=1, on_full="displace")
    await dispatcher.acquire(priority=LOW, deadline_ns=None)
    lesser = dispatcher.enter(priority=LOW, deadline_ns=None)
    dispatcher.enter(priority=HIGH, deadline_ns=None)
    with pytest.raises(ResourceExhausted):
        await dispatcher.turn(lesser)


async def test_unknown_priority_is_refused(dispatcher):
    with pytest.raises(InvalidArgument, match="expected a Priority, got 7"):
        dispatcher.enter(priority=7, deadline_ns=None)


async def test_priority_changes_while_waiting(dispatcher):
    holder = await dispatcher.acquire(priority=LOW, deadline_ns=None)
    first = dispatcher.enter(priority=MEDIUM, deadline_ns=None)
    second = dispatcher.enter(priority=LOW, deadline_ns=None)
    assert dispatcher.change_priority(second, HIGH)
    dispatcher.release(holder)
    await dispatcher.turn(second)
    assert "MEDIUM" in dispatcher.explain() and "slot 0: <Work 2" in dispatcher.explain()
    dispatcher.release(second)
    await dispatcher.turn(first)
    dispatcher.release(first)


async def test_every_action_is_traced():
    traced = []
    dispatcher = Dispatcher(2, now=now_ns, trace=lambda at_ns, action: traced.append(action))
    works = [await dispatcher.acquire(priority=LOW, deadline_ns=None) for _ in range(2)]
    assert [action.work for action in traced if isinstance(action, Start)] == works
    for work in works:
        dispatcher.release(work)

"""A device's slots for tasks: the same order as for threads, preemption, cancellation."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.gate import SlotGate
from aionn.drivers.kit.loop_gate import LoopControl, LoopGate, loop_now_ns
from aionn.errors import GeneralFailure, MissedDeadline
from aionn.hal import Priority
from aionn.scheduler.plain_policy import PlainPolicy
from aionn.scheduler.planning_policy import PlanPolicy
from aionn.scheduler.ready_queue import Policy
from aionn.scheduler.shared_slots import SharedSlots
from aionn.testing import SimulatedDevice, models, run
from tests.support.loop_reference import LoopReferenceDevice, LoopReferencePreparedModel

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
MS = 1_000_000
WAIT_S = 10.0
POLICIES = [pytest.param(policy, id=policy.name) for policy in (PlanPolicy(), PlainPolicy())]

Terms = tuple[Priority, int | None, str]


def gate_of(slot_count: int = 1, *, policy: Policy) -> LoopGate:
    return LoopGate(slot_count, name="device", policy=policy, can_preempt=True)


def order_of_threads(jobs: Sequence[Terms], gate: SlotGate) -> list[int]:
    order: list[int] = []
    may_end, done = threading.Event(), threading.Semaphore(0)
    gate.submit(HIGH, None, lambda: may_end.wait(WAIT_S) and None)

    def job(number: int) -> None:
        order.append(number)
        done.release()

    for number, (priority, deadline_ns, owner) in enumerate(jobs):
        gate.submit(priority, deadline_ns, lambda number=number: job(number), owner=owner)  # type: ignore[misc]
    may_end.set()
    for _ in jobs:
        assert done.acquire(timeout=WAIT_S)
    gate.close()
    return order


def order_of_tasks(jobs: Sequence[Terms], policy: Policy) -> list[int]:
    order: list[int] = []

    async def main() -> None:
        gate = gate_of(policy=policy)
        holder = LoopControl(gate, priority=HIGH)
        await gate.acquire(holder)

        async def job(number: int, priority: Priority, deadline_ns: int | None, owner: str) -> None:
            control = LoopControl(gate, priority=priority, deadline_ns=deadline_ns, owner=owner)
            await gate.acquire(control)
            order.append(number)
            gate.release(control)

        async with anyio.create_task_group() as tasks:
            for number, terms in enumerate(jobs):
                tasks.start_soon(job, number, *terms)
            await anyio.wait_all_tasks_blocked()
            gate.release(holder)

    anyio.run(main)
    return order


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_tasks_get_their_slots_in_the_order_of_threads(seed: int, policy: Policy) -> None:
    source = random.Random(seed)
    far_ns = 10**18
    jobs: list[Terms] = [
        (
            source.choice(list(Priority)),
            source.choice((None, far_ns + source.randrange(20))),
            source.choice("abc"),
        )
        for _ in range(40)
    ]
    gate = SlotGate(1, name="device")
    gate._slots = SharedSlots(1, name="device", now=lambda: 0, policy=policy)
    assert order_of_tasks(jobs, policy) == order_of_threads(jobs, gate)


def test_drivers_on_the_loop_use_the_policy_of_the_application_by_default() -> None:
    """A job that has waited for two seconds goes before MEDIUM ones that came later; the plain order would not let it."""
    ended: list[str] = []

    class Prepared(LoopReferencePreparedModel):
        async def run(self, inputs, outputs, control):  # type: ignore[no-untyped-def]
            await anyio.sleep(1)
            return [area.store(array) for area, array in zip(outputs, inputs, strict=True)]

    class Device(LoopReferenceDevice):
        async def prepare(self, model, **_):  # type: ignore[no-untyped-def]
            return Prepared(self, model, MEDIUM)

    async def main() -> None:
        async with Device() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            request = request_for(prepared.model, [np.zeros(4, np.float32)])
            slot_count = device.info.slots

            async def run_one(name: str, priority: Priority) -> None:
                await prepared.execute_synchronously(request, priority=priority)
                ended.append(name)

            async with anyio.create_task_group() as tasks:
                for _ in range(slot_count):
                    tasks.start_soon(run_one, "holder", MEDIUM)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(run_one, "low", LOW)
                for number in range(4 * slot_count):
                    tasks.start_soon(run_one, f"medium{number}", MEDIUM)
                    await anyio.sleep(0.9 / slot_count)

    run(main)
    assert "low" in ended[:-1], ended


def test_two_high_jobs_preempt_two_low_ones() -> None:
    """Both LOW executions stop at their next boundary, 1 ms after each other's start, and not one after the other."""
    ended_ms: dict[str, float] = {}

    async def main() -> None:
        async with SimulatedDevice("npu", run_time_s=0.010, results="zeros", slots=2) as device:
            model = models.identity((4,), operations=10)
            request = request_for(model, [np.zeros(4, np.float32)])
            prepared = await device.prepare_model(model)
            begin_ns = loop_now_ns()

            async def run_one(name: str, priority: Priority) -> None:
                await prepared.execute_synchronously(request, priority=priority)
                ended_ms[name] = (loop_now_ns() - begin_ns) / MS

            async with anyio.create_task_group() as tasks:
                for name in ("low0", "low1"):
                    tasks.start_soon(run_one, name, LOW)
                await anyio.sleep(0.0005)
                for name in ("high0", "high1"):
                    tasks.start_soon(run_one, name, HIGH)
            assert device.statistics().preempted == 2

    run(main)
    assert ended_ms == {name: pytest.approx(11 if "high" in name else 20) for name in ended_ms}
    assert len(ended_ms) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelled_and_late_jobs_leave_the_queue_and_release_their_slots(policy: Policy) -> None:
    async def main() -> None:
        gate = gate_of(policy=policy)
        holder = LoopControl(gate)
        await gate.acquire(holder)
        late = LoopControl(gate, deadline_ns=loop_now_ns() + 5 * MS)
        with pytest.raises(MissedDeadline) as caught:
            await gate.acquire(late)
        assert not caught.value.transient
        cancelled = LoopControl(gate, priority=HIGH)
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(GeneralFailure):
                    await gate.acquire(cancelled)

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert holder.must_stop, "a HIGH job waits for the slot"
            cancelled.cancel()
            assert not holder.must_stop
        async with anyio.create_task_group() as tasks:

            async def hold() -> None:
                control = LoopControl(gate)
                await gate.acquire(control)
                gate.release(control)

            tasks.start_soon(hold)
            await anyio.wait_all_tasks_blocked()
            # Its slot comes in the same turn of the loop as the cancellation.
            gate.release(holder)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(WAIT_S):
            last = LoopControl(gate)
            await gate.acquire(last)
            assert last.slot == 0
            gate.release(last)

    run(main)


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_are_exclusive_whoever_is_cancelled_late_or_preempted(policy: Policy) -> None:
    source = random.Random(7)
    holding: set[int] = set()
    ended: list[int] = []

    async def main() -> None:
        gate = gate_of(2, policy=policy)

        async def job(number: int) -> None:
            deadline_ns = source.choice((None, loop_now_ns() + source.randrange(1, 40) * MS))
            control = LoopControl(
                gate,
                priority=source.choice(list(Priority)),
                deadline_ns=deadline_ns,
                owner=number % 3,
                model="m",
            )
            try:
                with anyio.move_on_after(source.choice((1000.0, 0.02))):
                    await gate.acquire(control)
                    for _ in range(3):
                        assert control.slot is not None and control.slot not in holding
                        holding.add(control.slot)
                        await control.sleep_until(loop_now_ns() + source.randrange(1, 5) * MS)
                        holding.discard(control.slot)
                        control.check()
                        await control.pause_if_preempted()
            except (MissedDeadline, GeneralFailure):
                pass
            finally:
                if control.slot is not None:
                    holding.discard(control.slot)
                gate.release(control)
                ended.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(job, number)
                await anyio.sleep(source.random() * 0.01)
        assert gate._slots.held_count == gate._slots.waiting_count == 0

    run(main)
    assert sorted(ended) == list(range(300)) and not holding

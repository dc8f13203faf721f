"""A device's slots for threads and clients: the order across clients, preemption between operations, closing."""

import threading
import time

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.kit.blocking import BlockingDevice, BlockingPreparedModel
from aionn.drivers.kit.gate import SUSPENDED_MAX, SlotGate
from aionn.drivers.kit.threads.calls import run_on_gate
from aionn.drivers.reference import INFO, ReferenceDevice, ReferencePreparedModel
from aionn.errors import DeviceUnavailable, MissedDeadline
from aionn.hal import OutputShape, Priority
from aionn.testing import SimulatedDevice, models, run

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH
WAIT_S = 10.0


@pytest.fixture
def gate():
    gate = SlotGate(1, name="device", can_preempt=True)
    yield gate
    gate.close()


class Sessions:
    """Jobs that write down their order; the first holds the slot until it is let go."""

    def __init__(self, gate):
        self.gate = gate
        self.order = []
        self.may_end = threading.Event()
        self.done = threading.Semaphore(0)
        self.count = 0
        self.submit("holder", HIGH, wait=True)

    def submit(self, name, priority=MEDIUM, deadline_ns=None, *, owner=None, wait=False):
        def job():
            if wait:
                assert self.may_end.wait(WAIT_S)
            self.order.append(name)
            self.done.release()

        self.count += 1
        self.gate.submit(priority, deadline_ns, job, owner=owner)

    def run(self):
        self.may_end.set()
        for _ in range(self.count):
            assert self.done.acquire(timeout=WAIT_S)
        return self.order


def test_classes_go_before_clients_and_clients_take_turns(gate):
    sessions = Sessions(gate)
    for number in range(4):
        sessions.submit(f"a{number}", owner="a")
    sessions.submit("low", LOW, owner="a")
    sessions.submit("b0", owner="b")
    sessions.submit("b1", owner="b")
    sessions.submit("high", HIGH, owner="b")
    assert sessions.run() == ["holder", "high", "a0", "b0", "a1", "b1", "a2", "a3", "low"]


def test_a_thread_that_takes_a_slot_waits_in_the_same_queue(gate):
    sessions = Sessions(gate)
    sessions.submit("low", LOW)
    sessions.submit("high", HIGH)

    def take():
        with gate.slot(MEDIUM, None, owner="burst"):
            sessions.order.append("burst")
        sessions.done.release()

    waiting = gate.waiting_count
    thread = threading.Thread(target=take)
    thread.start()
    sessions.count += 1
    while gate.waiting_count == waiting:
        thread.join(0.001)
    assert sessions.run() == ["holder", "high", "burst", "low"]
    thread.join()


def test_closing_runs_what_waits_and_refuses_more():
    gate = SlotGate(1, name="device")
    sessions = Sessions(gate)
    for number in range(20):
        sessions.submit(f"c{number}", Priority(number % 3))
    closer = threading.Thread(target=gate.close)
    closer.start()
    assert len(sessions.run()) == 21
    closer.join(WAIT_S)
    assert not closer.is_alive()
    gate.close()
    with pytest.raises(DeviceUnavailable):
        gate.submit(HIGH, None, lambda: None)
    with pytest.raises(DeviceUnavailable), gate.slot(HIGH, None):
        pass


def test_job_is_preempted_between_operations_and_goes_on(gate):
    order, at_boundary, asked = [], threading.Event(), threading.Event()
    done = threading.Semaphore(0)

    def low():
        control = gate.control(deadline_ns=None, loop_timeout_ns=None, is_cancelled=None)
        order.append("low begins")
        at_boundary.set()
        assert asked.wait(WAIT_S)
        control.check()
        order.append("low ends")
        assert control.away_ns > 0
        done.release()

    def high():
        order.append("high")
        done.release()

    gate.submit(LOW, None, low)
    assert at_boundary.wait(WAIT_S)
    gate.submit(HIGH, None, high)
    asked.set()
    for _ in range(2):
        assert done.acquire(timeout=WAIT_S)
    assert order == ["low begins", "high", "low ends"]


def test_suspended_jobs_of_a_process_are_bounded_and_others_are_still_preempted(gate):
    """Each LOW job is preempted, and before it continues another one with an earlier deadline is started."""
    count, done, far_ns = 2 * SUSPENDED_MAX, threading.Semaphore(0), time.monotonic_ns() + 10**12
    before, let_last_end = threading.active_count(), threading.Event()
    let_last_end.set()

    def preempted(number, owner):
        """Begins a LOW job, preempts it, and returns what lets the job end that preempts it."""
        begun, asked, other_begun, let_end = (threading.Event() for _ in range(4))

        def low():
            control = gate.control(deadline_ns=None, loop_timeout_ns=None, is_cancelled=None)
            begun.set()
            assert asked.wait(WAIT_S)
            control.check()
            done.release()

        def high():
            other_begun.set()
            assert let_end.wait(WAIT_S)
            done.release()

        gate.submit(LOW, far_ns - number, low, owner=owner)
        let_last_end.set()
        assert begun.wait(WAIT_S)
        gate.submit(HIGH, None, high, owner=owner)
        asked.set()
        assert other_begun.wait(WAIT_S)
        return let_end

    for number in range(count):
        let_last_end = preempted(number, "a")
    assert threading.active_count() - before <= SUSPENDED_MAX + 1
    suspended = gate._paused_count
    let_last_end = preempted(count, "b")
    assert gate._paused_count == suspended + 1, "the limit of one process is not that of another"
    let_last_end.set()
    for _ in range(2 * (count + 1)):
        assert done.acquire(timeout=WAIT_S)


def test_high_interrupts_low_of_another_client_on_the_reference_device(monkeypatch):
    """Real threads, real kernels: the LOW execution sleeps between its operations until the HIGH one has answered."""
    entered, asked = threading.Event(), threading.Event()
    ended = []
    original = ReferencePreparedModel.run

    def halting(self, inputs, outputs, control):
        if self.priority == LOW:
            entered.set()
            assert asked.wait(WAIT_S)
        shapes = original(self, inputs, outputs, control)
        ended.append(self.priority)
        return shapes

    monkeypatch.setattr(ReferencePreparedModel, "run", halting)

    async def main():
        async with ReferenceDevice() as device:
            low = await device.prepare_model(models.identity((4,), operations=3), priority=LOW)
            high = await device.prepare_model(models.identity((4,)), priority=HIGH)
            low.owner, high.owner = "a", "b"
            request = request_for(low.model, [np.array([1.5, 2.5, 3.5, 4.5], np.float32)])
            timings = {}

            async def run_one(prepared):
                result = await prepared.execute_synchronously(request, measure=True)
                timings[prepared.priority] = result.timing

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_one, low)
                await anyio.to_thread.run_sync(entered.wait, WAIT_S)
                tasks.start_soon(run_one, high)
                while not device.gate.waiting_count:
                    await anyio.lowlevel.checkpoint()
                asked.set()
            return timings[LOW]

    timing = anyio.run(main)
    assert ended == [HIGH, LOW]
    assert timing.time_on_device_ns < timing.time_in_driver_ns, "what it waited for is not its own time"


def test_device_that_does_not_stop_is_not_preempted():
    entered, may_end = threading.Event(), threading.Event()
    order = []

    class Prepared(BlockingPreparedModel):
        def run(self, inputs, outputs, control):
            order.append(self.priority)
            if self.priority == LOW:
                entered.set()
                assert may_end.wait(WAIT_S)
            control.check()
            order.append(-self.priority)
            return [OutputShape((4,), True) for _ in outputs]

    class Device(BlockingDevice):
        def supports(self, model):
            return [True for _ in model.main.operations]

        def prepare(self, model, *, preference, priority, deadline_ns):
            return Prepared(self, model, priority)

    async def main():
        async with Device(INFO) as device:
            model = models.identity((4,))
            low = await device.prepare_model(model, priority=LOW)
            high = await device.prepare_model(model, priority=HIGH)
            request = request_for(model, [np.zeros(4, np.float32)])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(low.execute_synchronously, request)
                await anyio.to_thread.run_sync(entered.wait)
                tasks.start_soon(high.execute_synchronously, request)
                while not device.gate.waiting_count:
                    await anyio.lowlevel.checkpoint()
                may_end.set()

    anyio.run(main)
    assert order == [LOW, -LOW, HIGH, -HIGH]


def test_executions_may_be_of_another_class_than_their_prepared_model():
    async def main():
        ended = []
        async with ReferenceDevice() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            request = request_for(prepared.model, [np.zeros(4, np.float32)])

            async def run(priority):
                await prepared.execute_synchronously(request, priority=priority)
                ended.append(priority)

            async with anyio.create_task_group() as tasks:
                with device.gate.slot(HIGH, None):
                    for priority in (LOW, MEDIUM, HIGH):
                        tasks.start_soon(run, priority)
                    while device.gate.waiting_count < 3:
                        await anyio.lowlevel.checkpoint()
        assert ended == [HIGH, MEDIUM, LOW]

    anyio.run(main)


def test_expired_work_is_told_and_never_runs():
    async def main():
        async with ReferenceDevice() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            request = request_for(prepared.model, [np.zeros(4, np.float32)])
            with pytest.raises(MissedDeadline) as caught:
                await prepared.execute_synchronously(request, deadline_ns=device.now() - 1)
            assert not caught.value.transient

    anyio.run(main)


def test_clients_of_a_device_on_the_loop_take_turns_too():
    async def main():
        ended = []
        async with SimulatedDevice("npu", run_time_s=0.010, results="zeros") as device:
            request = request_for(models.identity((4,)), [np.zeros(4, np.float32)])

            async def run_one(name, prepared):
                await prepared.execute_synchronously(request)
                ended.append(name)

            async with anyio.create_task_group() as tasks:
                for owner, count in (("flood", 6), ("guest", 2)):
                    prepared = await device.prepare_model(models.identity((4,)))
                    prepared.owner = owner
                    for number in range(count):
                        tasks.start_soon(run_one, f"{owner}{number}", prepared)
        order = [f"flood{number}" for number in range(6)]
        assert [name for name in ended if name.startswith("flood")] == order
        assert ended.index("guest0") <= 2 and ended.index("guest1") <= 4

    run(main)


def test_work_whose_caller_is_gone_before_its_turn_never_runs():
    ran = []

    async def main():
        gate = SlotGate(1, name="device")
        may_end = threading.Event()
        gate.submit(HIGH, None, lambda: may_end.wait(WAIT_S))
        async with anyio.create_task_group() as tasks:

            async def ask():
                await run_on_gate(gate, MEDIUM, None, lambda _: ran.append("run"))

            tasks.start_soon(ask)
            await anyio.lowlevel.checkpoint()
            assert gate.waiting_count == 1
            tasks.cancel_scope.cancel()
        may_end.set()
        gate.close()  # It runs what waits.

    anyio.run(main)
    assert ran == []

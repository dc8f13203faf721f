"""The scheduler in the path that executions take: early refusal, interruption, overruns, chains, changes, on simulated devices."""

import itertools
import random

import anyio
import numpy as np
import pytest

import aionn
from aionn.drivers.simulated.driver import SimulatedPreparedModel
from aionn.drivers.simulated.profiles import Draw, FailureRates, Fault
from aionn.hal import TIME_MAX_NS, Priority
from aionn.runtime.executions.execution import ExecutionState
from aionn.testing import SimulatedDevice, VirtualClock, models, run, scripted
from fences import FenceStatus, SyncFence, merge

X = np.array([1.5, -2.5, 3.0, 4.0], np.float32)
MS = 1_000_000


def npu(run_time_s=0.020, **options):
    options.setdefault("results", "zeros")
    return SimulatedDevice("npu", run_time_s=run_time_s, **options)


@pytest.fixture
def silent(monkeypatch):
    """The driver does not say how long an execution takes."""
    nothing = property(lambda model: None, lambda model, duration_ns: None)
    monkeypatch.setattr(SimulatedPreparedModel, "expected_duration_ns", nothing)


def slow_draws(factor):
    """Everything takes so many times as long as the driver says."""
    while True:
        yield Draw(factor=factor)


class Trial:
    """Executions on one device, and when each ended how."""

    def __init__(self, device, *, operations=1, clock=None):
        self.device = device
        self.operations = operations
        self.clock = VirtualClock() if clock is None else clock
        self.log = []

    def play(self, main):
        async def all_of_it():
            async with aionn.open(devices=[self.device]) as self.runtime:
                self.net = await self.runtime.compile(models.identity((4,), operations=self.operations))
                self.dispatcher = self.runtime.devices[0].dispatcher
                async with anyio.create_task_group() as self.tasks:
                    await main(self)

        run(all_of_it, clock=self.clock)
        return self.log

    def start(self, name, **options):
        execution = self.net.execute_fenced([X], **options)
        self.tasks.start_soon(self.note, name, execution)
        return execution

    async def note(self, name, awaited):
        try:
            await awaited
            outcome = "done"
        except aionn.Error as e:
            outcome = e.status.name
        self.log.append((self.clock.now_ns / MS, name, outcome))


def test_hopeless_work_is_refused_early():
    async def main(trial):
        with pytest.raises(aionn.MissedDeadline) as caught:
            await trial.net.execute([X], deadline=trial.clock.after(0.015))
        assert not caught.value.transient and trial.clock.now == 0
        assert trial.device.statistics().started == 0

    Trial(npu()).play(main)


def test_learnt_durations_refuse_what_the_driver_says_nothing_of(silent):
    async def main(trial):
        await trial.note("unknown", trial.net.execute([X], deadline=trial.clock.after(0.015)))
        assert trial.device.statistics().started == 1, "nothing was known yet"
        for _ in range(4):
            await trial.net.execute([X])
        at_s = trial.clock.now
        with pytest.raises(aionn.MissedDeadline) as caught:
            await trial.net.execute([X], deadline=trial.clock.after(0.015))
        assert not caught.value.transient and trial.clock.now == at_s

    Trial(npu()).play(main)


def test_what_was_late_teaches_how_long_it_takes_at_least(silent):
    async def main(trial):
        for _ in range(4):
            await trial.note("late", trial.net.execute([X], deadline=trial.clock.after(0.025)))
            await anyio.sleep(0.1)
        started = trial.device.statistics().started
        await trial.note("hopeless", trial.net.execute([X], deadline=trial.clock.after(0.010)))
        assert trial.device.statistics().started == started

    log = Trial(npu(script=slow_draws(2.0), preemption="between_operations"), operations=10).play(main)
    assert log[-1][1:] == ("hopeless", "MISSED_DEADLINE_PERSISTENT")
    assert log[0][1:] == ("late", "MISSED_DEADLINE_TRANSIENT")


def test_what_failed_teaches_nothing(silent):
    def draws():
        yield from [Draw(fault=Fault.TRANSIENT, at_share=0.1)] * 4
        while True:
            yield Draw()

    async def main(trial):
        for _ in range(4):
            execution = trial.net.execute_fenced([X], deadline=trial.clock.after(1.0))
            await trial.note("fails", execution)
        assert trial.dispatcher.learnt_count == 0
        await trial.note("fits", trial.net.execute_fenced([X], deadline=trial.clock.after(1.0)))
        assert trial.dispatcher.learnt_count == 1

    log = Trial(npu(script=draws())).play(main)
    outcomes = [outcome for *_, outcome in log]
    assert outcomes[-1] == "done" and set(outcomes[:4]).isdisjoint({"done"})


def test_execution_says_what_it_waits_for():
    async def main(trial):
        with SyncFence("before") as before:
            behind, free = trial.start("behind", wait_for=[before]), trial.start("free")
            assert behind.state is ExecutionState.WAITING_FOR_FENCES
            assert free.state is ExecutionState.WAITING_FOR_SLOT
            await free
            assert behind.state is ExecutionState.WAITING_FOR_FENCES
            before.signal()
            await behind
        assert behind.state is ExecutionState.FINISHED

    Trial(npu()).play(main)


def test_hopeless_chain_is_refused_before_its_fences_signal():
    async def main(trial):
        first = trial.start("first")
        trial.start("hopeless", wait_for=[first.fence], deadline=trial.clock.after(0.019))
        trial.start("fine", wait_for=[first.fence], deadline=trial.clock.after(0.041))

    assert Trial(npu()).play(main) == [
        (0, "hopeless", "MISSED_DEADLINE_PERSISTENT"),
        (20, "first", "done"),
        (40, "fine", "done"),
    ]


def test_waiting_work_is_told_as_soon_as_it_cannot_be_kept():
    async def main(trial):
        trial.start("holds")
        trial.start("late", deadline=trial.clock.after(0.030))
        trial.start("fits", deadline=trial.clock.after(0.041))

    assert Trial(npu(preemption="none")).play(main) == [
        (pytest.approx(10, abs=1e-3), "late", "MISSED_DEADLINE_TRANSIENT"),
        (20, "holds", "done"),
        (40, "fits", "done"),
    ]


def test_high_interrupts_low_between_operations_and_low_goes_on():
    async def main(trial):
        trial.start("low", priority="low")
        await anyio.sleep(0.015)
        trial.start("high", priority="high")

    # Ten operations of 2 ms: the next boundary after 15 ms is at 16 ms.
    trial = Trial(npu(preemption="between_operations"), operations=10)
    assert trial.play(main) == [(36, "high", "done"), (40, "low", "done")]
    assert trial.device.statistics().preempted == 1
    assert trial.dispatcher.counts()["preempted"] == 1


def test_urgent_execution_of_a_burst_waits_for_the_line_that_another_uses():
    async def main(trial):
        async def one(burst, name, after_s, within_s):
            await anyio.sleep(after_s)
            await trial.note(name, burst.execute([X], deadline=trial.clock.after(within_s)))

        async with trial.net.burst(slots=2) as burst, anyio.create_task_group() as tasks:
            tasks.start_soon(one, burst, "first", 0.0, 1.0)
            tasks.start_soon(one, burst, "urgent", 0.002, 0.040)
        assert trial.dispatcher.counts()["preempted"] == 1

    log = Trial(npu(preemption="between_operations"), operations=10).play(main)
    assert log == [(20, "first", "done"), (40, "urgent", "done")]


def test_device_that_cannot_stop_is_not_interrupted():
    async def main(trial):
        trial.start("low", priority="low")
        await anyio.sleep(0.015)
        trial.start("high", priority="high")

    trial = Trial(npu(preemption="none"), operations=10)
    assert trial.play(main) == [(20, "low", "done"), (40, "high", "done")]
    assert trial.device.statistics().preempted == 0


def test_interrupted_work_is_not_begun_anew():
    async def main(trial):
        trial.start("low", priority="low")
        for _ in range(5):
            await anyio.sleep(0.003)
            trial.start("high", priority="high")

    trial = Trial(npu(0.002, preemption="between_operations"), operations=2)
    assert trial.play(main)[-1][1:] == ("high", "done")
    assert trial.device.statistics().busy_ns == 6 * 2 * MS, "every operation ran once"


def test_work_that_overruns_is_stopped_at_the_next_boundary():
    async def main(trial):
        trial.start("late", deadline=trial.clock.after(0.025))
        await anyio.sleep(0.001)
        trial.start("next")

    # Slower than its driver says: operations of 4 ms, where 2 were expected.
    slow = npu(preemption="between_operations", script=slow_draws(2.0))
    trial = Trial(slow, operations=10)
    assert trial.play(main) == [(25, "late", "MISSED_DEADLINE_TRANSIENT"), (68, "next", "done")]
    assert trial.device.statistics().failed == 1
    assert trial.dispatcher.counts()["overran"] <= 1


@pytest.mark.thorough
async def test_work_that_overruns_is_stopped_in_real_time():
    slow = SimulatedDevice(
        "npu", run_time_s=0.02, results="zeros", preemption="between_operations", script=slow_draws(6000.0)
    )
    with anyio.fail_after(60):
        async with aionn.open(devices=[slow]) as runtime:
            net = await runtime.compile(models.identity((4,), operations=1000))
            while (
                not slow.statistics().failed
            ):  # A busy machine may refuse it before it has begun: then again.
                with pytest.raises(aionn.MissedDeadline):
                    await net.execute([X], deadline=aionn.after(0.06))
                # Its two minutes are not waited for: the device is free at the next boundary, 120 ms later.
                while runtime.devices[0].dispatcher.explain().startswith("slot 0: <Job"):
                    await anyio.sleep(0.005)
            assert slow.statistics().failed == 1


@pytest.mark.thorough
async def test_high_interrupts_low_in_real_time():
    # The first takes a minute: however slow the machine is, it has not ended by itself when the second one comes.
    draws = (Draw(factor=factor) for factor in itertools.chain([600.0], itertools.repeat(1.0)))
    device = SimulatedDevice(
        "npu", run_time_s=0.1, results="zeros", preemption="between_operations", script=draws
    )
    with anyio.fail_after(50):
        async with aionn.open(devices=[device]) as runtime:
            net = await runtime.compile(models.identity((4,), operations=1000))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(net.execute, [X])
                while "free" in runtime.devices[0].dispatcher.explain():
                    await anyio.sleep(0.001)
                await net.execute([X], priority="high")
                assert runtime.devices[0].dispatcher.explain().startswith("slot 0: <Job 0"), "it goes on"
                tasks.cancel_scope.cancel()
    assert device.statistics().preempted == 1


def test_priority_and_deadline_are_inherited_along_a_chain():
    async def main(trial):
        trial.start("holds", priority="high")
        first = trial.start("first", priority="low")
        second = trial.start("second", priority="low", wait_for=[first.fence])
        trial.start("flood0")
        trial.start("flood1")
        trial.start("third", priority="high", wait_for=[second.fence], deadline=trial.clock.after(0.090))
        for leader in (first, second):
            text = leader.explain()
            assert "priority LOW, raised to HIGH by one that waits for it, no deadline" in text

    order = [name for _, name, _ in Trial(npu(), operations=10).play(main)]
    assert order == ["holds", "first", "second", "third", "flood0", "flood1"]


def test_urgency_is_lent_early_enough_for_the_rest_of_the_chain():
    async def main(trial):
        trial.start("holds")
        first = trial.start("first")
        other = trial.start("other", deadline=trial.clock.after(0.075))
        trial.start("second", wait_for=[first.fence], deadline=trial.clock.after(0.081))
        assert other.deadline_ns == 75 * MS

    # "second" has the later deadline, but what it waits for must be done by 55 ms at the latest.
    log = Trial(npu(preemption="none")).play(main)
    assert log == [
        (20, "holds", "done"),
        (40, "first", "done"),
        (60, "other", "done"),
        (80, "second", "done"),
    ]


def test_a_merge_of_fences_lends_to_all_of_them():
    async def main(trial):
        trial.start("holds", priority="high")
        parts = [trial.start(name, priority="low") for name in ("a", "b")]
        trial.start("flood")
        trial.start("end", priority="high", wait_for=[merge([part.fence for part in parts])])

    order = [name for _, name, _ in Trial(npu(), operations=10).play(main)]
    assert order == ["holds", "a", "b", "end", "flood"]


def test_priority_can_be_changed_while_it_waits():
    async def main(trial):
        running = trial.start("holds")
        trial.start("first")
        second = trial.start("second")
        await anyio.sleep(0.001)
        assert second.change_priority("high")
        assert not running.change_priority(Priority.LOW)
        with pytest.raises(aionn.InvalidArgument):
            second.change_priority(7)

    order = [name for _, name, _ in Trial(npu(preemption="none")).play(main)]
    assert order == ["holds", "second", "first"]


@pytest.mark.parametrize("deadline", [-1, 2**63, 1.5, "soon"])
def test_deadlines_that_are_none_are_refused(deadline):
    async def main(trial):
        with pytest.raises(aionn.InvalidArgument):
            await trial.net.execute([X], deadline=deadline)
        assert trial.dispatcher.statistics().entered == 0

    Trial(npu()).play(main)


def test_deadlines_in_the_past_at_the_end_of_time_and_none():
    async def main(trial):
        await anyio.sleep(1)
        for name, deadline in (
            ("past", 1),
            ("now", 10**9),
            ("end", TIME_MAX_NS),
            ("almost", TIME_MAX_NS - 1),
        ):
            await trial.note(name, trial.net.execute([X], deadline=deadline))
        await trial.note("none", trial.net.execute([X]))

    log = Trial(npu()).play(main)
    assert [entry[1:] for entry in log] == [
        ("past", "MISSED_DEADLINE_PERSISTENT"),
        ("now", "MISSED_DEADLINE_PERSISTENT"),
        ("end", "done"),
        ("almost", "INVALID_ARGUMENT"),
        ("none", "done"),
    ]


def test_unknown_priorities_and_negative_durations_are_refused():
    async def main(trial):
        for priority in ("urgent", 7, -1, 1.5):
            with pytest.raises(aionn.InvalidArgument, match="priority"):
                await trial.net.execute([X], priority=priority)
        with pytest.raises(aionn.InvalidArgument, match="duration"):
            trial.net.execute_fenced([X], duration=-1.0)

    Trial(npu()).play(main)


def test_a_device_that_never_answers_costs_its_slot_and_no_more():
    async def main(trial):
        trial.start("hangs", deadline=trial.clock.after(0.030))
        trial.start("waits", deadline=trial.clock.after(0.060))
        await anyio.sleep(0.1)
        assert "slot 0: <Job 0" in trial.runtime.devices[0].explain()

    log = Trial(npu(script=scripted({0: "hang"}))).play(main)
    assert [entry[1:] for entry in log] == [
        ("hangs", "MISSED_DEADLINE_TRANSIENT"),
        ("waits", "MISSED_DEADLINE_TRANSIENT"),
    ]
    assert log[0][0] == 30 and log[1][0] <= 60


def test_an_answer_after_the_deadline_is_thrown_away():
    async def main(trial):
        late = trial.start("late", deadline=trial.clock.after(0.025))
        with pytest.raises(aionn.MissedDeadline):
            await late
        assert trial.clock.now == 0.025
        await anyio.sleep(1)
        with pytest.raises(aionn.MissedDeadline):
            await late
        assert late.fence.status == FenceStatus.FAILED

    trial = Trial(npu(preemption="none", script=slow_draws(2.0)))
    assert trial.play(main) == [(25, "late", "MISSED_DEADLINE_TRANSIENT")]
    assert trial.device.statistics().started == 1


def traffic(seed):
    """Executions, chains, changes and cancellations on a device with faults, all drawn from a seed; and what they left behind."""
    source = random.Random(seed)
    failures = FailureRates(transient=0.05, persistent=0.05)
    device = npu(
        source.choice((0.002, 0.010)),
        seed=seed,
        noise=0.3,
        failures=failures,
        slots=source.choice((1, 2)),
        preemption=source.choice(("none", "between_operations", "anytime")),
    )
    told = []

    async def main(trial):
        executions = []
        for number in range(60):
            await anyio.sleep(source.choice((0.0, 0.001, 0.004, 0.012)))
            leaders = [e.fence for e in source.sample(executions, min(len(executions), source.randrange(3)))]
            allowance_s = source.choice((None, 0.001, 0.015, 0.050, 0.3))
            deadline = None if allowance_s is None else trial.clock.after(allowance_s)
            priority = source.choice(("low", "medium", "high"))
            try:
                execution = trial.start(f"e{number}", wait_for=leaders, deadline=deadline, priority=priority)
            except aionn.InvalidArgument:
                continue  # What it waits for has failed already.
            executions.append(execution)
            execution.fence.add_callback(
                lambda fence, number=number: told.append((number, trial.clock.now_ns))
            )
            if source.random() < 0.1:
                source.choice(executions).cancel()
            if source.random() < 0.1:
                source.choice(executions).change_priority(source.choice(list(Priority)))
        with anyio.CancelScope(shield=True):
            await anyio.sleep(5)
        for execution in executions:
            if execution.deadline_ns is not None:
                assert execution.finished_ns <= execution.deadline_ns + 1, "everybody hears by the deadline"
        assert trial.dispatcher.explain().replace("1", "0") in ("slot 0: free", "slot 0: free\nslot 0: free")
        statistics = trial.dispatcher.statistics()
        assert statistics.waiting == 0
        assert trial.device.statistics().started <= statistics.started
        assert len(told) == len({number for number, _ in told}) == len(executions), "one answer each"

    return Trial(device, operations=5).play(main), told, device.statistics()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_everybody_is_answered_once_and_the_device_is_free_again(seed):
    first = traffic(seed)
    assert len(first[0]) == len(first[1])
    assert traffic(seed) == first, "the same seed, the same run"

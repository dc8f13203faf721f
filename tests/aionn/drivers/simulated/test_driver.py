"""Simulated devices: exact times, order of turns, deadlines and faults."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.drivers.simulated.driver import SimulatedDevice, SimulatedPreparedModel
from aionn.drivers.simulated.profiles import (
    PROFILES,
    ClockRamp,
    DeviceProfile,
    FailureRates,
    model_cost,
    model_duration_ns,
    operation_durations_ns,
)
from aionn.errors import (
    DeadObject,
    Error,
    InvalidArgument,
)
from aionn.hal import (
    DataLocation,
    DeviceStatus,
    Memory,
    Model,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
    Timing,
)
from aionn.hal.pooled_request import PooledRequest
from aionn.testing import VirtualClock, models, run, scripted

MS = 1_000_000
X = np.array([1.5, 2.5, -3.5, 4.0], np.float32)
MODEL = models.identity((4,), operations=10)


def device_of(run_time_s: float = 0.010, **options: Any) -> SimulatedDevice:
    return SimulatedDevice("npu", run_time_s=run_time_s, **options)


class Bench:
    """A device under virtual time: starts executions, and notes when and how each ends."""

    def __init__(self, device: SimulatedDevice, model: Model | None = None) -> None:
        self.device = device
        self.model = MODEL if model is None else model
        self.clock = VirtualClock()
        self.log: list[tuple[int, str, str]] = []
        self._prepared: dict[Priority, SimulatedPreparedModel] = {}

    async def prepared(self, priority: Priority = Priority.MEDIUM) -> SimulatedPreparedModel:
        if priority not in self._prepared:
            prepared = await self.device.prepare_model(self.model, priority=priority)
            assert isinstance(prepared, SimulatedPreparedModel)
            self._prepared[priority] = prepared
        return self._prepared[priority]

    async def execute(
        self,
        name: str,
        *,
        at_ns: int = 0,
        priority: Priority = Priority.MEDIUM,
        deadline_ns: int | None = None,
        give_up_ns: int | None = None,
    ) -> None:
        prepared = await self.prepared(priority)
        await anyio.sleep((at_ns - self.clock.now_ns) / 1e9)
        outcome = "gave up"
        try:
            with anyio.move_on_after(None if give_up_ns is None else (give_up_ns - at_ns) / 1e9):
                await prepared.execute_synchronously(request_for(MODEL, [X]), deadline_ns=deadline_ns)
                outcome = "done"
        except Error as e:
            outcome = e.status.name
        self.log.append((self.clock.now_ns // 1000, name, outcome))

    def play(self, *starts: dict[str, Any], close_at_ns: int | None = None) -> list[tuple[int, str, str]]:
        """Runs executions ``a``, ``b``, ... with the given options; returns when (us), which and how in the order of their ends."""

        async def main() -> None:
            for priority in Priority:
                await self.prepared(priority)
            async with self.device, anyio.create_task_group() as tasks:
                for name, options in zip("abcdefgh", starts, strict=False):
                    tasks.start_soon(lambda n=name, o=options: self.execute(n, **o))
                if close_at_ns is not None:
                    await anyio.sleep(close_at_ns / 1e9)
                    await self.device.aclose()

        run(main, clock=self.clock)
        return self.log


# --- How long it takes --------------------------------------------------------------------------------------------------------


def steady(name: str) -> DeviceProfile:
    """A ready profile without a rising clock."""
    return SimulatedDevice(name, clock=ClockRamp()).profile


@pytest.mark.parametrize("name", [name for name, p in PROFILES.items() if "float32" in p.rates])
def test_an_execution_takes_what_the_profile_says(name: str) -> None:
    profile = steady(name)
    model = models.identity((64, 64), operations=5)
    clock = VirtualClock()
    x = np.ones((64, 64), np.float32)

    async def main() -> Timing:
        async with SimulatedDevice(profile) as device:
            prepared = await device.prepare_model(model)
            return (await prepared.execute_synchronously(request_for(model, [x]), measure=True)).timing

    expected_ns = model_duration_ns(profile, model_cost(model))
    assert run(main, clock=clock) == Timing(expected_ns, expected_ns)
    assert clock.now_ns == expected_ns


def test_the_clock_rises_with_work_and_falls_with_rest_but_not_in_a_burst() -> None:
    model = models.identity((256, 256), operations=20)
    x = np.ones((256, 256), np.float32)

    async def main() -> tuple[list[int], list[int]]:
        async with SimulatedDevice("phone-cpu", results="zeros") as device:
            prepared = await device.prepare_model(model)

            async def took_ns() -> int:
                timing = (await prepared.execute_synchronously(request_for(model, [x]), measure=True)).timing
                return timing.time_on_device_ns or 0

            rising = [await took_ns() for _ in range(12)]
            await anyio.sleep(60)
            rested = [await took_ns()]
            burst = await prepared.configure_execution_burst()
            [await took_ns() for _ in range(12)]
            await anyio.sleep(60)
            rested.append(await took_ns())
            await burst.aclose()
            await burst.aclose()
            await anyio.sleep(60)
            rested.append(await took_ns())
            return rising, rested

    rising, rested = run(main)
    full_ns = model_duration_ns(PROFILES["phone-cpu"], model_cost(model))
    assert rising == sorted(rising, reverse=True)
    assert (rising[0] > 1.5 * full_ns, rising[-1]) == (True, full_ns)
    assert rested == [rising[0], full_ns, rising[0]]


def test_a_stated_run_time_is_exact_whatever_the_model() -> None:
    for operations in (1, 7, 1000):
        bench = Bench(device_of(0.020), models.identity((4,), operations=operations))
        assert bench.play({}, {}) == [(20_000, "a", "done"), (40_000, "b", "done")]


def test_the_same_program_takes_its_time_in_real_time() -> None:
    async def main() -> float:
        async with device_of(0.030) as device:
            prepared = await device.prepare_model(models.identity((4,)))
            began_s = time.monotonic()
            await prepared.execute_synchronously(request_for(MODEL, [X]))
            return time.monotonic() - began_s

    assert anyio.run(main) >= 0.030


@pytest.mark.parametrize("count", [600, pytest.param(2000, marks=pytest.mark.long)])
def test_simulated_time_is_cheap(count: int) -> None:
    bench = Bench(device_of(0.5, results="zeros"), models.identity((4,)))

    async def main() -> None:
        prepared = await bench.prepared()
        request = request_for(MODEL, [X])
        async with bench.device:
            for _ in range(count):
                await prepared.execute_synchronously(request)

    run(main, clock=bench.clock)
    assert bench.clock.now == count / 2


# --- Results ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("results", "expected"), [("computed", [1, 2, -4, 4]), ("zeros", [0, 0, 0, 0])])
def test_results_are_computed_or_left_out(results: Any, expected: list[float]) -> None:
    pooled = PooledRequest(MODEL)
    pooled.write([X])

    async def main() -> Sequence[OutputShape]:
        async with device_of(results=results) as device:
            prepared = await device.prepare_model(models.identity((4,)))
            return (await prepared.execute_synchronously(pooled.request)).output_shapes

    assert run(main) == (OutputShape((4,)),)
    assert pooled.outputs()[0].tolist() == expected


def test_results_go_by_the_inputs_at_the_start() -> None:
    pooled = PooledRequest(MODEL)
    pooled.write([X])

    async def main() -> None:
        async with device_of() as device, anyio.create_task_group() as tasks:
            prepared = await device.prepare_model(models.identity((4,)))
            tasks.start_soon(prepared.execute_synchronously, pooled.request)
            await anyio.sleep(0.005)
            pooled.write([np.zeros_like(X)])

    run(main)
    assert pooled.outputs()[0].tolist() == [1, 2, -4, 4]


def test_an_output_that_does_not_fit_is_reported() -> None:
    pool = Memory.create(32)
    arguments = [
        RequestArgument(False, DataLocation(0, 0, 16), (4,)),
        RequestArgument(False, DataLocation(0, 16, 8)),
    ]
    model = models.identity((4,))
    operands = list(model.main.operands)
    operands[1] = type(operands[1])(operands[1].type, (0,), lifetime=operands[1].lifetime)
    model = Model(type(model.main)(tuple(operands), model.main.operations, (0,), (1,)))

    async def main() -> bool:
        async with device_of() as device:
            prepared = await device.prepare_model(model)
            request = Request((arguments[0],), (arguments[1],), (pool,))
            result = await prepared.execute_synchronously(request)
            assert result.output_shapes == (OutputShape((4,), is_sufficient=False),)
            return result.output_sufficient_size

    assert not run(main)


# --- Turns --------------------------------------------------------------------------------------------------------------------


def test_slots_go_by_priority_then_deadline_then_arrival() -> None:
    bench = Bench(device_of(preemption="none"))
    ended = bench.play(
        {},
        {"at_ns": 1 * MS},
        {"at_ns": 1 * MS, "deadline_ns": 500 * MS},
        {"at_ns": 1 * MS, "deadline_ns": 400 * MS},
        {"at_ns": 2 * MS, "priority": Priority.HIGH},
        {"at_ns": 1 * MS, "priority": Priority.LOW, "deadline_ns": 300 * MS},
        {"at_ns": 1 * MS},
    )
    assert "".join(name for _, name, _ in ended) == "aedcbgf"
    assert [at_us for at_us, _, _ in ended] == [10_000 * n for n in range(1, 8)]


def test_slots_run_at_once() -> None:
    bench = Bench(device_of(slots=2))
    assert [(at, name) for at, name, _ in bench.play({}, {}, {})] == [
        (10_000, "a"),
        (10_000, "b"),
        (20_000, "c"),
    ]


@pytest.mark.parametrize(
    ("preemption", "expected"),
    [
        ("none", [(10_000, "a", "done"), (20_000, "b", "done")]),
        ("between_operations", [(14_000, "b", "done"), (20_000, "a", "done")]),
        ("anytime", [(13_500, "b", "done"), (20_000, "a", "done")]),
    ],
)
def test_a_higher_priority_waits_until_the_device_can_stop(
    preemption: str, expected: list[tuple[int, str, str]]
) -> None:
    bench = Bench(device_of(preemption=preemption))
    low, high = {"priority": Priority.LOW}, {"at_ns": 3_500_000, "priority": Priority.HIGH}
    assert bench.play(low, high) == expected
    statistics = bench.device.statistics()
    assert (statistics.started, statistics.finished, statistics.failed) == (2, 2, 0)
    assert (statistics.busy_ns, statistics.preempted) == (20 * MS, int(preemption != "none"))


def test_an_equal_priority_does_not_interrupt() -> None:
    bench = Bench(device_of())
    assert bench.play({}, {"at_ns": 1 * MS, "deadline_ns": 25 * MS}) == [
        (10_000, "a", "done"),
        (20_000, "b", "done"),
    ]


def test_work_that_gave_way_keeps_its_place_among_its_equals() -> None:
    bench = Bench(device_of())
    ended = bench.play({}, {"at_ns": 1 * MS}, {"at_ns": 2_500_000, "priority": Priority.HIGH})
    assert [(at, name) for at, name, _ in ended] == [(13_000, "c"), (20_000, "a"), (30_000, "b")]


def test_who_waited_and_left_interrupts_nobody() -> None:
    bench = Bench(device_of())
    ended = bench.play({}, {"at_ns": 3_200_000, "priority": Priority.HIGH, "give_up_ns": 3_500_000})
    assert ended == [(3_500, "b", "gave up"), (10_000, "a", "done")]
    assert bench.device.statistics().started == 1


# --- Deadlines and giving up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"deadline_ns": 5_500_000}, (6_000, "MISSED_DEADLINE_TRANSIENT"), id="next boundary"),
        pytest.param({"deadline_ns": 9_500_000}, (10_000, "done"), id="after the last boundary"),
        pytest.param({"deadline_ns": 10 * MS}, (10_000, "done"), id="just in time"),
        pytest.param(
            {"at_ns": 1 * MS, "deadline_ns": 1 * MS}, (1_000, "MISSED_DEADLINE_PERSISTENT"), id="passed"
        ),
    ],
)
def test_a_deadline_ends_an_execution_at_the_next_boundary(
    options: dict[str, int], expected: tuple[int, str]
) -> None:
    ((at_us, _, outcome),) = Bench(device_of()).play(options)
    assert (at_us, outcome) == expected


def test_a_deadline_that_passes_while_waiting_is_told_then_and_nothing_starts() -> None:
    bench = Bench(device_of())
    assert bench.play({}, {"deadline_ns": 4 * MS}) == [
        (4_000, "b", "MISSED_DEADLINE_PERSISTENT"),
        (10_000, "a", "done"),
    ]
    assert bench.device.statistics().started == 1


def test_a_caller_that_gives_up_returns_at_once_and_the_device_stops_at_a_boundary() -> None:
    bench = Bench(device_of())
    assert bench.play({"give_up_ns": 2_500_000}, {"at_ns": 1 * MS}) == [
        (2_500, "a", "gave up"),
        (13_000, "b", "done"),
    ]
    statistics = bench.device.statistics()
    assert (statistics.failed, statistics.busy_ns) == (1, 13 * MS)


def test_a_device_that_cannot_stop_keeps_its_slot() -> None:
    bench = Bench(device_of(preemption="none"))
    assert bench.play({"give_up_ns": 2_500_000}, {"at_ns": 1 * MS}) == [
        (2_500, "a", "gave up"),
        (20_000, "b", "done"),
    ]


def test_who_gives_up_while_waiting_never_runs() -> None:
    bench = Bench(device_of())
    assert bench.play({}, {"give_up_ns": 5 * MS}, {"at_ns": 1 * MS}) == [
        (5_000, "b", "gave up"),
        (10_000, "a", "done"),
        (20_000, "c", "done"),
    ]


# --- Faults -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("transient", (5_000, "RESOURCE_EXHAUSTED_TRANSIENT")),
        ("persistent", (5_000, "GENERAL_FAILURE")),
        ("death", (5_000, "DEAD_OBJECT")),
        ("none", (10_000, "done")),
    ],
)
def test_a_fault_shows_at_its_time(fault: str, expected: tuple[int, str]) -> None:
    ((at_us, _, outcome),) = Bench(device_of(script=scripted({0: fault}))).play({})
    assert (at_us, outcome) == expected


def test_a_failed_execution_leaves_the_next_alone() -> None:
    bench = Bench(device_of(script=scripted({0: "transient"}, at_share=0.25)))
    assert bench.play({}, {}) == [(2_500, "a", "RESOURCE_EXHAUSTED_TRANSIENT"), (12_500, "b", "done")]


def test_a_hanging_device_keeps_its_slot_until_it_is_closed() -> None:
    bench = Bench(device_of(script=scripted({0: "hang"})))
    starts = [{"give_up_ns": 50 * MS}, {"deadline_ns": 60 * MS}, {}]
    assert bench.play(*starts, close_at_ns=100 * MS) == [
        (50_000, "a", "gave up"),
        (60_000, "b", "MISSED_DEADLINE_PERSISTENT"),
        (100_000, "c", "DEVICE_UNAVAILABLE"),
    ]


def test_a_death_loses_everything_until_something_is_prepared_again() -> None:
    device = device_of(slots=2, script=scripted({1: "death"}))
    clock = VirtualClock()

    async def main() -> None:
        async with device:
            prepared = await device.prepare_model(models.identity((4,)))
            ended: list[int] = []

            async def dies() -> None:
                with pytest.raises(DeadObject):
                    await prepared.execute_synchronously(request_for(MODEL, [X]))
                ended.append(clock.now_ns)

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(dies)
            assert ended == [5 * MS] * 5, "two that ran and three that waited"
            assert await device.status() == DeviceStatus.OFFLINE
            for late in (
                prepared.execute_synchronously,
                lambda request: prepared.execute_fenced(request, ()),
                lambda request: prepared.configure_execution_burst(),
            ):
                with pytest.raises(DeadObject):
                    await late(request_for(MODEL, [X]))  # type: ignore[operator]
            again = await device.prepare_model(models.identity((4,)))
            assert await device.status() == DeviceStatus.AVAILABLE
            await again.execute_synchronously(request_for(MODEL, [X]))
            with pytest.raises(DeadObject):
                await prepared.execute_synchronously(request_for(MODEL, [X]))

    run(main, clock=clock)
    assert clock.now_ns == 15 * MS


def test_profile_seed_and_order_decide_noise_and_faults() -> None:
    failures = FailureRates(transient=0.2, persistent=0.1)

    def outcomes(seed: int) -> list[tuple[int, str, str]]:
        bench = Bench(SimulatedDevice("edge-cpu", seed=seed, noise=0.3, failures=failures))
        return bench.play(*({"priority": p} for p in (Priority.LOW, Priority.HIGH, *[Priority.MEDIUM] * 6)))

    assert outcomes(1) == outcomes(1)
    assert len({str(outcomes(seed)) for seed in range(5)}) == 5


def test_scripts_and_descriptions_are_checked() -> None:
    for make in (
        lambda: SimulatedDevice("no such profile"),
        lambda: SimulatedDevice("npu", run_time_s=0.0),
        lambda: SimulatedDevice("npu", run_time_s=float("nan")),
        lambda: SimulatedDevice("phone-cpu", slots=0),
        lambda: SimulatedDevice("phone-cpu", no_such_field=1),
        lambda: SimulatedDevice("phone-cpu", results="guessed"),  # type: ignore[arg-type]
        lambda: scripted({0: "explosion"}),
        lambda: scripted({-1: "hang"}),
        lambda: scripted({}, at_share=1.5),
        lambda: models.identity((0,)),
        lambda: models.identity((1,), operations=0),
    ):
        with pytest.raises(InvalidArgument):
            make()


# --- Traffic ------------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_traffic_keeps_every_rule(seed: int) -> None:
    """Random traffic against separate checks: slots, conservation of work, deadlines told on time, nothing lost."""
    source = random.Random(seed)
    slots = source.choice([1, 2, 3])
    preemption = source.choice(["none", "between_operations", "anytime"])
    device = device_of(slots=slots, preemption=preemption, results="zeros")
    bench = Bench(device)
    starts = []
    for _ in range(8):
        at_ns = source.randrange(40) * MS // 2
        starts.append(
            {
                "at_ns": at_ns,
                "priority": source.choice(list(Priority)),
                "deadline_ns": source.choice([None, at_ns + source.randrange(5, 60) * MS]),
                "give_up_ns": source.choice([None, None, at_ns + source.randrange(1, 30) * MS]),
            }
        )
    ended = bench.play(*starts)
    assert len(ended) == len(starts), f"seed {seed}: everyone hears exactly once"
    longest_step_ns = 10 * MS if preemption == "none" else 1 * MS if preemption != "anytime" else 0
    by_name = dict(zip("abcdefgh", starts, strict=True))
    done = 0
    for at_us, name, outcome in ended:
        options, at_ns = by_name[name], at_us * 1000
        if outcome == "done":
            done += 1
            assert at_ns >= options["at_ns"] + 10 * MS
        if options["deadline_ns"] is not None:
            # Who runs stops at the next boundary; the last operation is let end.
            assert at_ns <= options["deadline_ns"] + longest_step_ns, f"seed {seed}: {name} told late"
        if outcome == "gave up":
            assert at_ns == options["give_up_ns"], f"seed {seed}: {name} returned late"
    statistics = device.statistics()
    assert statistics.finished >= done
    assert statistics.finished + statistics.failed == statistics.started <= len(starts)
    end_ns = bench.clock.now_ns
    assert done * 10 * MS <= statistics.busy_ns <= slots * end_ns


def test_durations_of_operations_bound_the_wait_of_a_higher_priority() -> None:
    model = models.identity((64, 64), operations=12)
    profile = steady("phone-cpu")
    longest_ns = max(operation_durations_ns(profile, model_cost(model)))
    total_ns = model_duration_ns(profile, model_cost(model))
    x = np.ones((64, 64), np.float32)
    waits: list[int] = []

    async def main() -> None:
        async with SimulatedDevice(profile, results="zeros") as device, anyio.create_task_group() as tasks:
            low = await device.prepare_model(model, priority=Priority.LOW)
            high = await device.prepare_model(model, priority=Priority.HIGH)
            for _ in range(4):
                tasks.start_soon(low.execute_synchronously, request_for(model, [x]))
            source = random.Random(5)
            for _ in range(20):
                await anyio.sleep(source.random() * 2e-4)
                began_ns = clock.now_ns
                await high.execute_synchronously(request_for(model, [x]))
                waits.append(clock.now_ns - began_ns - total_ns)

    clock = VirtualClock()
    run(main, clock=clock)
    assert 0 < max(waits) <= longest_ns

"""A client and a node in virtual time: deadlines, silence, partitions, clocks that disagree.

Source: rules of docs/production/fleet.md."""

from __future__ import annotations

import random
import re
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from aionn.errors import DeadObject, DeviceUnavailable, Error, ErrorStatus, InvalidArgument, MissedDeadline
from aionn.fleet.messages import Outcome, framed
from aionn.hal import DeviceStatus, Priority
from aionn.testing import run
from tests.aionn.fleet.conftest import Simulation, simulated
from tests.aionn.service.sums import Sum, sum_model

MS = 1_000_000
ROUNDING_NS = 10
"""Of the loop's clock, which counts seconds in floating point."""


async def raised_after_s(call: Coroutine[Any, Any, object]) -> tuple[float, BaseException]:
    """When a call ended, from now, and how."""
    began_s = anyio.current_time()
    try:
        await call
    except Error as e:
        return anyio.current_time() - began_s, e
    raise AssertionError("it succeeded")


def test_execution_crosses_the_network() -> None:
    async def main() -> None:
        async with simulated(latency_s=0.01) as there:
            prepared = await there.device.prepare_model(sum_model())
            burst = await prepared.configure_execution_burst()
            for _ in range(3):
                frame = Sum()
                began_s = anyio.current_time()
                await burst.execute_synchronously(frame.request, [-1])
                assert frame.is_right
                assert anyio.current_time() - began_s >= 0.0249, "two ways and the device"
            assert there.device.info.name == "edge1/timed" and there.device.info.location == "remote"
            assert 0.019e9 < there.device.round_trip_ns < 0.021e9

    run(main)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(6))
def test_no_frame_is_on_time_that_was_late(seed: int) -> None:
    """Jitter of up to 20 ms, a clock that is a second off and drifts: the caller is notified at his deadline, and the node's
    deadline is never later than it, nor earlier than by the jitter and a millisecond."""
    offset_s = (1.0, -1.0, 0.3, 12_345.0, -0.001, 0.0)[seed]
    counts = {"on time": 0, "missed": 0}

    async def main() -> None:
        async with simulated(
            latency_s=0.001, jitter_s=0.02, clock_offset_s=offset_s, drift_ppm=100 - 40 * seed, seed=seed
        ) as there:
            rng = random.Random(seed)
            prepared = await there.device.prepare_model(sum_model())
            burst = await prepared.configure_execution_burst()
            await anyio.sleep(1)  # The probes at the start.
            for _ in range(150):
                there.local.duration_s = rng.uniform(0.001, 0.03)
                frame, deadline_ns = Sum(), there.link.client_now() + rng.randrange(5 * MS, 70 * MS)
                known = len(there.local.deadlines)
                try:
                    await burst.execute_synchronously(frame.request, [-1], deadline_ns=deadline_ns)
                except MissedDeadline:
                    counts["missed"] += 1
                    # At the deadline; or before it where the node knows that it cannot be made.
                    assert there.link.client_now() >= deadline_ns - 21 * MS
                    assert there.link.client_now() <= deadline_ns + 1
                else:
                    counts["on time"] += 1
                    assert there.link.client_now() < deadline_ns
                    assert frame.is_right
                await anyio.sleep(0.08)  # What was late has come in that time.
                for at_node_ns, _ in there.local.deadlines[known:]:
                    assert -ROUNDING_NS <= deadline_ns - at_node_ns <= 21 * MS
                    counts["seen"] = counts.get("seen", 0) + 1

    run(main)
    assert counts["on time"] > 40 and counts["missed"] > 20 and counts["seen"] > 100


def test_caller_is_notified_at_the_deadline_whatever_the_network_does() -> None:
    async def main() -> None:
        async with simulated(address="127.0.0.1:7463?silence_ms=60000") as there:
            prepared = await there.device.prepare_model(sum_model())
            burst = await prepared.configure_execution_burst()
            await burst.execute_synchronously(Sum().request, [-1])
            there.link.is_partitioned = True
            frame = Sum()
            deadline_ns = there.link.client_now() + 30 * MS
            call = burst.execute_synchronously(frame.request, [-1], deadline_ns=deadline_ns)
            after_s, error = await raised_after_s(call)
            assert isinstance(error, MissedDeadline) and error.transient
            assert after_s == pytest.approx(0.03, abs=1e-6)
            # The memory is the caller's again: what still comes for it is discarded.
            frame.values[2] = 7
            there.link.heal()
            await anyio.sleep(1)
            assert (frame.values[2] == 7).all()
            again = Sum()
            await burst.execute_synchronously(again.request, [-1])
            assert again.is_right

    run(main)


@pytest.mark.parametrize("latency_s", [0.0001, 0.004])
def test_silent_node_ends_every_call_within_a_quarter_of_a_second(latency_s: float) -> None:
    async def main() -> None:
        async with simulated(latency_s=latency_s, slots=2) as there:
            there.local.duration_s = 100
            prepared = await there.device.prepare_model(sum_model())
            bursts = [await prepared.configure_execution_burst() for _ in range(2)]
            errors: list[tuple[float, BaseException]] = []

            async def call(coroutine: Coroutine[Any, Any, object]) -> None:
                errors.append(await raised_after_s(coroutine))

            async with anyio.create_task_group() as tasks:
                for burst in bursts:
                    tasks.start_soon(call, burst.execute_synchronously(Sum().request, [-1]))
                tasks.start_soon(call, prepared.execute_synchronously(Sum().request))
                await anyio.sleep(3)
                assert not errors, "heartbeats come while it computes"
                there.link.is_partitioned = True
                silent_s = anyio.current_time()
                tasks.start_soon(call, there.device.supported_operations(sum_model()))
            assert len(errors) == 4
            assert all(isinstance(error, DeadObject) for _, error in errors)
            assert anyio.current_time() - silent_s <= 0.25
            assert there.device.has_died

    run(main)


def test_path_that_swallows_large_packets_counts_as_silence() -> None:
    async def main() -> None:
        async with simulated() as there:
            prepared = await there.device.prepare_model(sum_model(1000))
            burst = await prepared.configure_execution_burst()
            there.link.swallows_above_bytes = 1400
            after_s, error = await raised_after_s(burst.execute_synchronously(Sum(1000).request, [-1]))
            assert isinstance(error, DeadObject) and after_s <= 0.25

    run(main)


def test_slow_upload_is_not_silence() -> None:
    async def main() -> None:
        async with simulated(bytes_per_s=1e6) as there:
            prepared = await there.device.prepare_model(sum_model(250_000))
            burst = await prepared.configure_execution_burst()
            frame = Sum(250_000)
            await burst.execute_synchronously(frame.request, [-1])
            assert frame.is_right
            assert 0.8e6 < there.device.bytes_per_s < 1.1e6

    run(main)


def test_loss_delays_frames_and_loses_none() -> None:
    async def main() -> None:
        async with simulated(loss=0.1, seed=3, address="127.0.0.1:7463?silence_ms=5000") as there:
            prepared = await there.device.prepare_model(sum_model())
            burst = await prepared.configure_execution_burst()
            for _ in range(50):
                frame = Sum()
                await burst.execute_synchronously(frame.request, [-1])
                assert frame.is_right

    run(main)


def test_node_is_reached_again_and_its_old_objects_stay_dead() -> None:
    async def main() -> None:
        async with simulated() as there:
            old = await there.device.prepare_model(sum_model())
            there.local.duration_s = 10
            async with anyio.create_task_group() as tasks:
                errors: list[BaseException] = []

                async def call() -> None:
                    errors.append((await raised_after_s(old.execute_synchronously(Sum().request)))[1])

                tasks.start_soon(call)
                await anyio.sleep(1)
                there.link.cut()
            assert isinstance(errors[0], DeadObject)
            await anyio.sleep(1)
            new = await there.device.prepare_model(sum_model())
            frame = Sum()
            await new.execute_synchronously(frame.request)
            assert frame.is_right and there.device.connections == 2
            with pytest.raises(DeadObject):
                await old.execute_synchronously(Sum().request)

    run(main)


def test_node_that_comes_back_with_another_device_is_refused() -> None:
    async def main() -> None:
        async with simulated() as there:
            await there.device.connect()
            there.version = "2"
            there.link.cut()
            await anyio.sleep(1)
            with pytest.raises(
                DeviceUnavailable,
                match=r"came back with another device: expected edge1/timed 1, got edge1/timed 2",
            ):
                await there.device.prepare_model(sum_model())
            assert await there.device.status() is DeviceStatus.OFFLINE

    run(main)


def test_idle_node_that_is_gone_is_noticed_by_the_next_probe() -> None:
    async def main() -> None:
        async with simulated() as there:
            await there.device.connect()
            await anyio.sleep(60)
            assert not there.device.has_died
            there.link.is_partitioned = True
            await anyio.sleep(6)
            assert there.device.has_died

    run(main)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(4))
def test_damaged_frames_never_become_results(seed: int) -> None:
    """Bits of lengths and heads flip, and results are replayed: an execution is right, or it is an error."""

    async def main() -> None:
        async with simulated(slots=2, seed=seed) as there:
            rng = random.Random(seed)
            before = b""

            def tamper(data: bytes) -> bytes:
                nonlocal before
                chance, kept, before = rng.random(), before, data
                if chance < 0.05:
                    return data + data
                if chance < 0.1:
                    return kept + data
                if chance < 0.15:
                    at = rng.randrange(min(len(data), 24))
                    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
                return data

            right = wrong = 0
            for _ in range(40):
                there.link.tamper = None
                await anyio.sleep(0.3)
                try:
                    prepared = await there.device.prepare_model(sum_model())
                except DeadObject:
                    continue  # The control connection was damaged before.
                there.link.tamper = tamper
                for _ in range(10):
                    frame = Sum()
                    frame.values[0] = rng.random()
                    try:
                        with anyio.fail_after(2):
                            await prepared.execute_synchronously(frame.request)
                    except (Error, TimeoutError):
                        wrong += 1
                        break
                    assert frame.is_right
                    right += 1
                await prepared.aclose()
            assert right > 50 and wrong > 10

    run(main)


def test_result_of_another_generation_ends_the_connection() -> None:
    async def main() -> None:
        async with simulated() as there:
            prepared = await there.device.prepare_model(sum_model())
            burst = await prepared.configure_execution_burst()
            stale = framed(Outcome(1, 12345, 0, 0, 0, ErrorStatus.NONE))
            is_result = re.compile(rb".{16}[\x90-\x9f]", re.DOTALL).match
            there.link.tamper = lambda data: stale + data if is_result(data) else data
            _, error = await raised_after_s(burst.execute_synchronously(Sum().request, [-1]))
            assert isinstance(error, DeadObject) and "replayed" in str(error)

    run(main)


def test_cancelled_execution_leaves_the_data_connection_usable() -> None:
    async def main() -> None:
        async with simulated() as there:
            there.local.duration_s = 50
            prepared = await there.device.prepare_model(sum_model())
            burst = await prepared.configure_execution_burst()
            with anyio.move_on_after(0.1):
                await burst.execute_synchronously(Sum().request, [-1])
            there.local.duration_s = 0.001
            frame, began_s = Sum(), anyio.current_time()
            await burst.execute_synchronously(frame.request, [-1])
            assert frame.is_right and anyio.current_time() - began_s < 1, "the device stopped"

    run(main)


def test_waiting_executions_are_ordered_by_priority_and_deadline() -> None:
    async def main() -> None:
        async with simulated() as there:
            prepared = await there.device.prepare_model(sum_model())
            await prepared.configure_execution_burst()
            order: list[str] = []

            async def call(name: str, priority: Priority, deadline_s: float) -> None:
                deadline_ns = there.link.client_now() + round(deadline_s * 1e9)
                await prepared.execute_synchronously(
                    Sum().request, priority=priority, deadline_ns=deadline_ns
                )
                order.append(name)

            async with anyio.create_task_group() as tasks:
                for name, priority, deadline_s in (
                    ("first", Priority.MEDIUM, 5),
                    ("low", Priority.LOW, 1),
                    ("late", Priority.MEDIUM, 4),
                    ("early", Priority.MEDIUM, 2),
                    ("high", Priority.HIGH, 9),
                ):
                    tasks.start_soon(call, name, priority, deadline_s)
                    await anyio.sleep(0.0005)
            assert order == ["first", "high", "early", "late", "low"]

    run(main)


def test_deadline_of_a_preparation_is_kept() -> None:
    async def main() -> None:
        async with simulated(address="127.0.0.1:7463?silence_ms=60000") as there:
            await there.device.connect()
            there.link.is_partitioned = True
            deadline_ns = there.link.client_now() + 40 * MS
            after_s, error = await raised_after_s(
                there.device.prepare_model(sum_model(), deadline_ns=deadline_ns)
            )
            assert isinstance(error, MissedDeadline) and after_s == pytest.approx(0.04, abs=1e-6)

    run(main)


def test_closed_prepared_model_is_freed_at_the_node() -> None:
    async def main() -> None:
        async with simulated() as there:
            prepared = await there.device.prepare_model(sum_model())
            await prepared.execute_synchronously(Sum().request)
            assert (await there.device.figures()).data_connections == 1
            await prepared.aclose()
            await anyio.sleep(1)
            assert (await there.device.figures()).data_connections == 0
            assert there.local.prepared[0]._closed
            with pytest.raises(InvalidArgument, match="closed"):
                await prepared.execute_synchronously(Sum().request)

    run(main)


def test_two_runs_are_alike() -> None:
    async def main() -> list[tuple[int, int]]:
        async with simulated(
            jitter_s=0.02, loss=0.02, seed=9, address="127.0.0.1:7463?silence_ms=9000"
        ) as there:
            await ten_frames(there)
            return there.local.deadlines

    assert run(main) == run(main)


async def ten_frames(there: Simulation) -> None:
    prepared = await there.device.prepare_model(sum_model())
    for _ in range(10):
        deadline_ns = there.link.client_now() + 10_000 * MS
        await prepared.execute_synchronously(Sum().request, deadline_ns=deadline_ns)

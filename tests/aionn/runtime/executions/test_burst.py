"""Bursts and streams: order, slots, lateness, errors in mid-stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.burst.controller import BurstController
from aionn.conformance.vts.models import endless_model
from aionn.drivers.kit.launching import DirectBurst
from aionn.hal import qos

Values = npt.NDArray[np.float32]
LIMIT_S = 12.0
"""Far beyond the deadlines, and sooner than a loop ends by its own time-out where a test has ``long_loops``."""


def end_loops_after(timeout_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops in bursts have this time-out."""
    for kind in (BurstController, DirectBurst):
        launch = kind.launch

        def launched(self: Any, *arguments: Any, launch: Any = launch, **options: Any) -> Any:
            return launch(self, *arguments, **{**options, "loop_timeout_ns": timeout_ns})

        monkeypatch.setattr(kind, "launch", launched)


@pytest.fixture
def long_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops in bursts have the longest time-out that there is, 15 s."""
    end_loops_after(qos.LOOP_TIMEOUT_MAX_NS, monkeypatch)


@pytest.fixture
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops in bursts have a time-out of a second: nobody waits for their end, and they compute until then."""
    end_loops_after(1_000_000_000, monkeypatch)


@pytest.fixture
def runtime(shared_runtime: aionn.Runtime) -> aionn.Runtime:
    return shared_runtime


@pytest.fixture
def any_runtime(any_shared_runtime: aionn.Runtime) -> aionn.Runtime:
    return any_shared_runtime


async def numbered(count: int, like: Values) -> AsyncIterator[Values]:
    for index in range(count):
        yield np.full_like(like, index)


@pytest.mark.sampled(2)
async def test_stream_gives_results_in_order(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    expected = [(await net.execute([np.full_like(silence, i)])).outputs[0] for i in range(8)]
    async with net.burst(slots=3) as burst:
        got = [result.outputs[0].copy() async for result in burst.stream(numbered(8, silence))]
    np.testing.assert_array_equal(got, expected)


async def test_stream_outputs_are_read_only_views(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    async with net.burst() as burst:
        async for result in burst.stream(numbered(1, silence)):
            assert "next result" in result.valid_until
            assert not result.outputs[0].flags.writeable
            assert result.outputs[0].base is not None


@pytest.mark.thorough
async def test_many_executions_wait_for_slots(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    results: list[aionn.Result] = []
    async with net.burst(slots=2) as burst, anyio.create_task_group() as tasks:

        async def one() -> None:
            results.append(await burst.execute([silence]))

        for _ in range(10):
            tasks.start_soon(one)
    assert len(results) == 10


async def test_source_that_raises_ends_the_stream_with_its_error(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    async def breaks() -> AsyncIterator[Values]:
        yield silence
        yield silence
        raise aionn.InvalidArgument("camera: unplugged")

    net = await any_runtime.compile(digits)
    async with net.burst() as burst:
        seen = 0
        with pytest.raises(aionn.InvalidArgument, match="camera: unplugged"):
            async for _ in burst.stream(breaks()):
                seen += 1
        assert seen == 2
        assert int((await burst.execute([silence])).outputs[0].argmax()) == 0


async def test_item_of_the_wrong_shape_ends_the_stream(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    async def wrong() -> AsyncIterator[Values]:
        yield silence[:, :10]

    net = await runtime.compile(digits)
    async with net.burst() as burst:
        with pytest.raises(aionn.InvalidArgument, match="expected shape"):
            async for _ in burst.stream(wrong()):
                pass
        await burst.execute([silence])


async def test_consumer_may_leave_in_mid_stream(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    async with net.burst() as burst:
        async for result in burst.stream(numbered(1000, silence)):
            assert result.status == "on_time"
            break


async def test_late_items_are_dropped_or_delivered(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    async with net.burst() as burst:
        dropping = burst.stream(numbered(3, silence), deadline=lambda item: 1, on_late="drop")
        assert [(r.status, r.outputs) async for r in dropping] == [("dropped", ())] * 3
        assert dropping.statistics().dropped == 3
        delivering = burst.stream(numbered(3, silence), deadline=lambda item: 1, on_late="deliver")
        assert [(r.status, len(r.outputs)) async for r in delivering] == [("late", 1)] * 3


async def test_negative_deadline_ends_the_stream(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    async with net.burst() as burst:
        with pytest.raises(aionn.InvalidArgument, match=r"deadline: expected nanoseconds .* got -1"):
            async for _ in burst.stream(numbered(2, silence), deadline=lambda item: -1):
                pass


async def test_cancelled_execution_does_not_confuse_the_next_one(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    other = np.zeros_like(silence)
    expected = (await net.execute([silence])).outputs[0]
    async with net.burst() as burst:
        for delay_s in (0.0, 0.0001, 0.0005, 0.001):
            with anyio.move_on_after(delay_s):
                await burst.execute([other])
            np.testing.assert_array_equal((await burst.execute([silence])).outputs[0], expected)


@pytest.mark.parametrize("slots", [0, -1, 65])
async def test_illegal_slot_count_is_refused(runtime: aionn.Runtime, digits: Path, slots: int) -> None:
    net = await runtime.compile(digits)
    with pytest.raises(aionn.InvalidArgument, match="expected from 1 to 64 slots"):
        net.burst(slots=slots)


async def test_burst_outside_of_its_scope_is_refused(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    burst = net.burst()
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        await burst.execute([silence])
    async with burst:
        pass
    with pytest.raises(aionn.InvalidArgument, match="burst: closed"):
        await burst.execute([silence])


async def test_burst_can_be_entered_once(runtime: aionn.Runtime, digits: Path, silence: Values) -> None:
    net = await runtime.compile(digits)
    burst = net.burst()
    async with burst:
        with pytest.raises(aionn.InvalidArgument, match="can be entered once"):
            await burst.__aenter__()
        await burst.execute([silence])
    with pytest.raises(aionn.InvalidArgument, match="can be entered once"):
        await burst.__aenter__()
    never = net.burst()
    await never.aclose()
    with pytest.raises(aionn.InvalidArgument, match="can be entered once"):
        await never.__aenter__()


async def test_cancelled_execution_holds_the_device_until_it_has_answered(
    runtime: aionn.Runtime, short_loops: None
) -> None:
    net = await runtime.compile(endless_model())
    value = np.ones(1, np.float32)
    async with net.burst(slots=1) as burst:
        dispatcher = runtime.devices[0].dispatcher
        with anyio.move_on_after(0.05):
            await burst.execute([value])
        assert "free" not in dispatcher.explain(), "the loop ends by its time-out of a second"
        # The only slot is free again, and so is the device's, when the loop has ended.
        with anyio.fail_after(LIMIT_S):
            result = await burst.execute([-value])
        np.testing.assert_array_equal(result.outputs[0], -value)
        assert "free" in dispatcher.explain()


async def test_deadline_ends_an_execution_in_the_driver(runtime: aionn.Runtime, long_loops: None) -> None:
    net = await runtime.compile(endless_model())
    value = np.ones(1, np.float32)
    async with net.burst() as burst:
        for _ in range(3):
            with pytest.raises(aionn.MissedDeadline):
                await burst.execute([value], deadline=aionn.after(0.05))
        # The driver gave up each at its next operation: this one waits for none of their time-outs.
        with anyio.fail_after(LIMIT_S):
            await burst.execute([-value])


@pytest.mark.parametrize("preference", ["fast_single_answer", "low_power"])
async def test_polling_windows_are_the_drivers_and_the_bursts_unless_power_is_to_be_saved(
    digits: Path, silence: Values, preference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, given = BurstController.__init__, []

    def noted(self: BurstController, *args: Any, **options: Any) -> None:
        given.append(options["polling_ns"])
        make(self, *args, **options)

    monkeypatch.setattr(BurstController, "__init__", noted)
    async with aionn.open(
        drivers=["reference"], burst_controller_polling_us=40, burst_server_polling_us=50
    ) as runtime:
        net = await runtime.compile(digits, preference=preference)
        expected = (await net.execute([silence])).outputs[0]
        async with net.burst() as burst:
            assert given == [40_000 if preference == "fast_single_answer" else 0]
            for _ in range(3):
                np.testing.assert_array_equal((await burst.execute([silence])).outputs[0], expected)


@pytest.mark.thorough
async def test_failed_execution_falls_back_where_that_is_allowed(
    digits: Path, silence: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ai_edge_litert")
    async with aionn.open(drivers=["litert-cpu", "reference"]) as runtime:
        for allow_fallback in (True, False):
            net = await runtime.compile(digits, allow_fallback=allow_fallback)
            assert net.devices == ("litert-cpu",)
            async with net.burst(slots=1) as burst:
                expected = await burst.execute([silence])
                calls = []

                async def fail(*args: Any, **options: Any) -> Any:
                    calls.append(args)  # noqa: B023 - called in this round alone
                    raise aionn.GeneralFailure("broken")

                right = BurstController.execute_synchronously
                monkeypatch.setattr(BurstController, "execute_synchronously", fail)
                if allow_fallback:
                    result = await burst.execute([silence])
                    np.testing.assert_allclose(result.outputs[0], expected.outputs[0], atol=1e-5)
                    assert "litert-cpu failed (broken); ran on reference" in result.fallback[0]
                else:
                    with pytest.raises(aionn.GeneralFailure, match="broken"):
                        await burst.execute([silence])
                assert len(calls) == 1, "what was sent is not sent again"
                monkeypatch.setattr(BurstController, "execute_synchronously", right)
                assert (await burst.execute([silence])).fallback == ()


async def test_wait_for_a_slot_ends_at_the_deadline(any_runtime: aionn.Runtime) -> None:
    net = await any_runtime.compile(endless_model())
    value = np.ones(1, np.float32)
    async with net.burst(slots=1) as burst:
        slot = burst.lend()
        deadline = aionn.after(0.05)
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.MissedDeadline) as missed:
            await burst.execute([-value], deadline=deadline)
        assert missed.value.transient and aionn.after(0) >= deadline
        with pytest.raises(aionn.MissedDeadline) as missed:
            await burst.execute([-value], deadline=1)
        assert not missed.value.transient
        assert not burst.statistics().waiting
        slot.close()


@pytest.mark.sampled(2)
async def test_execution_that_waits_for_a_slot_is_told_that_its_burst_was_closed(
    any_runtime: aionn.Runtime, short_loops: None
) -> None:
    net = await any_runtime.compile(endless_model())
    value = np.ones(1, np.float32)
    errors: list[aionn.Error] = []
    burst = net.burst(slots=1)
    async with anyio.create_task_group() as tasks:

        async def execute(value: Values) -> None:
            try:
                await burst.execute([value])
            except aionn.Error as e:
                errors.append(e)

        async with burst:
            tasks.start_soon(execute, value)
            while burst.statistics().free:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(execute, -value)
            while not burst.statistics().waiting:
                await anyio.lowlevel.checkpoint()
    assert any("closed" in str(e) for e in errors)

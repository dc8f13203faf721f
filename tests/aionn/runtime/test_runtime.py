"""Devices, compilation, execution: what an application sees."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.conformance.vts.models import endless_model
from aionn.service.client.prepared import RemotePreparedModel
from fences import SyncFence

Values = npt.NDArray[np.float32]


@pytest.fixture
def runtime(shared_runtime: aionn.Runtime) -> aionn.Runtime:
    return shared_runtime


@pytest.fixture
def any_runtime(any_shared_runtime: aionn.Runtime) -> aionn.Runtime:
    return any_shared_runtime


async def test_execute_gives_the_same_answer_on_every_path(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    plain = (await net.execute([silence])).outputs[0]
    fenced = (await net.execute_fenced([silence])).outputs[0]
    async with net.burst() as burst:
        through_burst = (await burst.execute([silence])).outputs[0]
    assert plain.shape == (1, 11)
    assert int(plain.argmax()) == 0, "silence is background"
    np.testing.assert_array_equal(plain, fenced)
    np.testing.assert_array_equal(plain, through_burst)


async def test_driver_process_is_started_when_first_needed(digits: Path) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        (device,) = runtime.devices
        assert device.pid is None
        assert (device.name, device.type.name, int(device.feature_level)) == ("reference", "CPU", 7)
        await runtime.compile(digits)
        assert device.pid is not None and device.pid != os.getpid()


async def test_driver_process_ends_with_the_runtime(digits: Path) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        await runtime.compile(digits)
        pid = runtime.devices[0].pid
        assert pid is not None and Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


async def test_timing_is_measured_only_when_asked(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    assert (await net.execute([silence])).timing.time_on_device_ns is None
    timing = (await net.execute([silence], measure=True)).timing
    assert timing.time_on_device_ns is not None and timing.time_in_driver_ns is not None
    assert 0 < timing.time_on_device_ns <= timing.time_in_driver_ns


async def test_placement_says_where_every_operation_runs(runtime: aionn.Runtime, digits: Path) -> None:
    net = await runtime.compile(digits)
    assert [p.operation for p in net.placement] == list(range(len(net.model.main.operations)))
    assert {p.device for p in net.placement} == {"reference"}
    assert all(p.reason for p in net.placement)


async def test_outputs_are_the_callers_own(any_runtime: aionn.Runtime, digits: Path, silence: Values) -> None:
    net = await any_runtime.compile(digits)
    first = (await net.execute([silence])).outputs[0]
    before = first.copy()
    await net.execute([np.ones_like(silence)])
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs: expected 1 array, got 0"),
        ([np.zeros((1, 49, 40, 1))], "element type float32, got float64"),
        ([np.zeros((1, 49, 41, 1), np.float32)], r"expected shape \[1, 49, 40, 1\], got \[1, 49, 41, 1\]"),
        ([object()], "expected an array or a buffer, got an object"),
        ("frame", "expected a list with 1 array, got a str"),
    ],
)
async def test_wrong_input_is_refused_in_one_sentence(
    runtime: aionn.Runtime, digits: Path, silence: Values, inputs: list[object], message: str
) -> None:
    net = await runtime.compile(digits)
    with pytest.raises(aionn.InvalidArgument, match=message):
        await net.execute(inputs)
    assert (await net.execute([silence])).status == aionn.ErrorStatus.NONE


async def test_buffers_and_dlpack_are_taken(runtime: aionn.Runtime, digits: Path, silence: Values) -> None:
    net = await runtime.compile(digits)
    expected = (await net.execute([silence])).outputs[0]

    class OnlyDlpack:
        def __dlpack__(self, **keywords: object) -> object:
            return silence.__dlpack__(**keywords)

        def __dlpack_device__(self) -> object:
            return silence.__dlpack_device__()

    np.testing.assert_array_equal((await net.execute([memoryview(silence)])).outputs[0], expected)
    np.testing.assert_array_equal((await net.execute([OnlyDlpack()])).outputs[0], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": "npu"}, "device: expected one of reference; got 'npu'"),
        ({"devices": []}, "expected different names, at least one"),
        ({"devices": ["reference", "reference"]}, "expected different names"),
        ({"priority": "urgent"}, "priority: expected one of low, medium, high, got 'urgent'"),
        ({"preference": "cheap"}, "preference: expected one of low_power"),
        ({"deadline": -1}, "deadline: expected nanoseconds .*, got -1; use"),
    ],
)
async def test_wrong_compile_argument_is_refused(
    runtime: aionn.Runtime, digits: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(aionn.InvalidArgument, match=message):
        await runtime.compile(digits, **arguments)  # type: ignore[arg-type]


async def test_file_that_is_no_model_is_refused(runtime: aionn.Runtime, tmp_path: Path) -> None:
    path = tmp_path / "no.tflite"
    with pytest.raises(aionn.InvalidArgument, match="cannot be read: No such file"):
        await runtime.compile(path)
    path.write_bytes(b"this is no flatbuffer at all, whatever its name says")
    with pytest.raises(aionn.InvalidModel, match="file, got a text file; the model comes first"):
        await runtime.compile(path)


async def test_negative_deadline_is_refused(runtime: aionn.Runtime, digits: Path, silence: Values) -> None:
    net = await runtime.compile(digits)
    with pytest.raises(aionn.InvalidArgument, match=r"deadline: expected nanoseconds .*, got -5; use"):
        await net.execute([silence], deadline=-5)
    with pytest.raises(aionn.InvalidArgument, match="after: expected a number of seconds of at least 0"):
        aionn.after(-0.1)


async def test_deadline_in_the_past_is_persistent(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    with pytest.raises(aionn.MissedDeadline) as missed:
        await net.execute([silence], deadline=time.monotonic_ns() - 1)
    assert not missed.value.transient
    assert isinstance(missed.value, TimeoutError)


async def test_unlimited_deadline_does_not_overflow(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    result = await net.execute([silence], deadline=2**63 - 1)
    assert result.status == aionn.ErrorStatus.NONE
    assert aionn.after(float("inf")) == 2**63 - 1


async def test_waiting_execution_expires_at_its_deadline(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    never = SyncFence()
    execution = net.execute_fenced([silence], wait_for=[never], deadline=aionn.after(0.05))
    with pytest.raises(aionn.MissedDeadline, match="waiting for fences"):
        await execution
    never.signal()


async def test_fence_that_fails_fails_the_execution(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    broken = SyncFence("camera")
    execution = net.execute_fenced([silence], wait_for=[broken])
    broken.fail("unplugged")
    with pytest.raises(aionn.GeneralFailure, match=r"camera.*unplugged"):
        await execution
    with pytest.raises(aionn.InvalidArgument, match="has failed already"):
        net.execute_fenced([silence], wait_for=[broken])


async def test_allowance_counts_from_the_last_fence(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    first, last = SyncFence(), SyncFence()
    execution = net.execute_fenced([silence], wait_for=[first, last], duration=30.0)
    first.signal()
    await anyio.sleep(0.02)
    last.signal()
    assert (await execution).status == aionn.ErrorStatus.NONE
    tight = net.execute_fenced([silence], wait_for=[last], duration=0.0)
    with pytest.raises(aionn.MissedDeadline):
        await tight


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_allowance_counts_from_the_call_where_there_is_no_fence(
    any_runtime: aionn.Runtime, deadline_s: float | None
) -> None:
    net = await any_runtime.compile(endless_model())
    deadline = None if deadline_s is None else aionn.after(deadline_s)
    # The loop itself ends by its time-out of ten seconds.
    with anyio.fail_after(8):
        execution = net.execute_fenced(
            [np.ones(1, np.float32)], deadline=deadline, duration=0.05, loop_timeout=10
        )
        with pytest.raises(aionn.MissedDeadline):
            await execution


async def test_deadline_that_is_sooner_than_the_allowance_counts(any_runtime: aionn.Runtime) -> None:
    net = await any_runtime.compile(endless_model())
    with anyio.fail_after(8):
        execution = net.execute_fenced(
            [np.ones(1, np.float32)], deadline=aionn.after(0.05), duration=60.0, loop_timeout=10
        )
        with pytest.raises(aionn.MissedDeadline):
            await execution


@pytest.mark.parametrize("with_fence", [False, True])
async def test_allowance_without_end_does_not_overflow(any_runtime: aionn.Runtime, with_fence: bool) -> None:
    net = await any_runtime.compile(endless_model())
    fences = [SyncFence.signalled()] if with_fence else []
    execution = net.execute_fenced([-np.ones(1, np.float32)], wait_for=fences, duration=float("inf"))
    assert (await execution).outputs[0] == -1


async def test_cancelled_execution_leaves_the_device_usable(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    for delay_s in (0.0, 0.0002, 0.002):
        with anyio.move_on_after(delay_s):
            await net.execute([silence])
    result = await net.execute([silence])
    assert int(result.outputs[0].argmax()) == 0


async def test_priority_comes_before_deadline_before_arrival(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    await net.execute([silence])
    gate = SyncFence()
    finished: list[str] = []

    def start(name: str, priority: str, deadline: int | None) -> None:
        execution = net.execute_fenced([silence], wait_for=[gate], priority=priority, deadline=deadline)
        execution.fence.add_callback(lambda fence: finished.append(name))
        executions.append(execution)

    executions: list[aionn.Execution] = []
    # The first takes the device at once, and nothing interrupts it: it is HIGH, and as long as the others. Their order is the
    # scheduler's.
    start("first", "high", None)
    start("low", "low", aionn.after(20))
    start("medium", "medium", None)
    start("high, late deadline", "high", aionn.after(60))
    start("high, early deadline", "high", aionn.after(30))
    start("high, none", "high", None)
    gate.signal()
    for execution in executions:
        await execution
    assert finished == [
        "first",
        "high, early deadline",
        "high, late deadline",
        "high, none",
        "medium",
        "low",
    ]


async def test_closed_compilation_refuses(runtime: aionn.Runtime, digits: Path, silence: Values) -> None:
    net = await runtime.compile(digits)
    await net.aclose()
    await net.aclose()
    with pytest.raises(aionn.InvalidArgument, match="closed"):
        await net.execute([silence])


async def test_unknown_isolation_and_doubled_names_are_refused() -> None:
    with pytest.raises(aionn.InvalidArgument, match="expected process or in_process"):
        aionn.open(isolation="thread")  # type: ignore[arg-type]
    with pytest.raises(aionn.InvalidArgument, match="expected different names"):
        aionn.open(drivers=["reference", "reference"])


async def test_unknown_driver_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(aionn.InvalidArgument, match="driver 'npu': expected one of"):
        async with aionn.open(drivers={"mine": "npu"}):
            pass


async def test_dropped_compilation_is_freed(
    any_runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await any_runtime.compile(digits)
    await net.execute([silence])
    left = weakref.ref(net)
    del net
    gc.collect()
    assert left() is None


async def test_dropped_compilation_is_freed_at_the_driver(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    await net.execute([silence])
    (step,) = net._plan.steps
    left = weakref.ref(step.prepared)
    assert isinstance(step.prepared, RemotePreparedModel) and step.prepared._owned.is_alive
    del net, step
    gc.collect()
    with anyio.fail_after(30):
        while left() is not None:  # It is closed in a turn of the loop.
            await anyio.sleep(0.001)


async def test_burst_and_execution_keep_their_compilation(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    execution, burst = net.execute_fenced([silence]), net.burst()
    del net
    gc.collect()
    async with burst:
        result = await burst.execute([silence])
        assert (result.outputs[0] == (await execution).outputs[0]).all()


async def test_open_burst_is_closed_with_the_runtime(digits: Path, silence: Values) -> None:
    async with aionn.open(drivers=["reference"]) as runtime:
        burst = (await runtime.compile(digits)).burst()
        await burst.__aenter__()
        gc.collect()
        await burst.execute([silence])
    with pytest.raises(aionn.InvalidArgument, match="burst: closed"):
        await burst.execute([silence])


async def test_each_await_of_a_failed_execution_raises_an_error_of_its_own(
    runtime: aionn.Runtime, digits: Path, silence: Values
) -> None:
    net = await runtime.compile(digits)
    execution = net.execute_fenced([silence], deadline=1)
    errors = []
    for _ in range(2):
        with pytest.raises(aionn.MissedDeadline) as raised:
            await execution
        errors.append(raised.value)
    first, second = errors
    assert first is not second
    assert (str(first), first.transient, first.status) == (str(second), second.transient, second.status)
    assert "deadline" in str(first) and not first.transient

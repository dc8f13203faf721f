"""The driver contract of devices that work on the event loop, kept by the simulated ones."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.conformance.requests import request_for
from aionn.conformance.suite import DeviceUnderTest
from aionn.conformance.vts.run import VtsReport, chosen_cases, run_cases
from aionn.drivers import registry
from aionn.drivers.kit import asynchronous
from aionn.drivers.simulated import driver
from aionn.drivers.simulated.driver import SimulatedDevice, info_for
from aionn.drivers.simulated.profiles import (
    PROFILES,
)
from aionn.errors import (
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from aionn.hal import (
    CancelCapability,
    ExecutionPreference,
    OperationType,
    OutputShape,
    Request,
    Timing,
)
from aionn.hal.callers import Connection, client_of_call
from aionn.scheduler.worker_turns import BESIDE_MAX
from aionn.testing import VirtualClock, models, run
from aionn.validation import check_device_info
from fences import FenceStatus, SyncFence

MS = 1_000_000
WAIT_S_MAX = 20.0
X = np.array([1.5, 2.5, -3.5, 4.0], np.float32)
MODEL = models.identity((4,), operations=10)


def device_of(run_time_s: float = 0.010, **options: Any) -> SimulatedDevice:
    return SimulatedDevice("npu", run_time_s=run_time_s, **options)


# --- The contract -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_what_a_device_says_of_itself_is_legal(name: str) -> None:
    device = SimulatedDevice(name)
    check_device_info(device.info)
    assert device.info == info_for(name) == registry.built_in_info("simulated", name)


def test_simulated_devices_are_there_only_on_request() -> None:
    assert "simulated" not in registry.driver_names()
    device = registry.load_factory("simulated")("phone-dsp")
    assert device.info.cancel == CancelCapability.BETWEEN_OPERATIONS
    with pytest.raises(InvalidArgument, match="phone-cpu"):
        registry.load_factory("simulated")("toaster")


def test_what_a_profile_lacks_is_refused() -> None:
    async def main() -> None:
        chain = models.chain([OperationType.RELU, OperationType.FLOOR, OperationType.RELU], (4,))
        async with SimulatedDevice("phone-gpu", unsupported_operations=("FLOOR",)) as device:
            assert await device.supported_operations(chain) == (True, False, True)
            with pytest.raises(InvalidArgument, match="does not support FLOOR"):
                await device.prepare_model(chain)
        async with SimulatedDevice("phone-dsp") as device:
            assert await device.supported_operations(chain) == (False, False, False), "no float32"
        async with SimulatedDevice("phone-gpu", memory_bytes_max=10) as device:
            with pytest.raises(ResourceExhausted) as caught:
                await device.prepare_model(chain)
            assert not caught.value.transient

    run(main)


def test_preparing_keeps_the_rules_of_deadlines_and_arguments() -> None:
    async def main() -> None:
        await anyio.sleep(1)
        async with device_of() as device:
            model = models.identity((4,))
            with pytest.raises(MissedDeadline) as caught:
                await device.prepare_model(model, deadline_ns=1)
            assert not caught.value.transient
            for wrong in ({"priority": 7}, {"preference": -1}, {"deadline_ns": -1}, {"deadline_ns": 2**63}):
                with pytest.raises(InvalidArgument):
                    await device.prepare_model(model, **wrong)  # type: ignore[arg-type]
            prepared = await device.prepare_model(model, preference=ExecutionPreference.LOW_POWER)
            for wrong in ({"deadline_ns": -1}, {"loop_timeout_ns": 2**63}):
                with pytest.raises(InvalidArgument):
                    await prepared.execute_synchronously(request_for(MODEL, [X]), **wrong)  # type: ignore[arg-type]
            await prepared.aclose()
            with pytest.raises(InvalidArgument, match="closed"):
                await prepared.execute_synchronously(request_for(MODEL, [X]))
        for call in (device.supported_operations, device.prepare_model):
            with pytest.raises(DeviceUnavailable):
                await call(model)

    run(main)


def test_a_callback_comes_exactly_once_whatever_happens() -> None:
    async def main() -> list[tuple[str, ErrorStatus]]:
        seen: list[tuple[str, ErrorStatus]] = []

        def tell(name: str) -> Callable[[ErrorStatus, Sequence[OutputShape], Timing], None]:
            return lambda status, shapes, timing: seen.append((name, status))

        device = device_of()
        prepared = await device.prepare_model(models.identity((4,), operations=10))
        bad = Request((), (), ())
        assert await prepared.execute(request_for(MODEL, [X]), tell("good")) == ErrorStatus.NONE
        assert await prepared.execute(bad, tell("bad")) == ErrorStatus.INVALID_ARGUMENT
        assert (
            await prepared.execute(request_for(MODEL, [X]), tell("late"), deadline_ns=12 * MS)
            == ErrorStatus.NONE
        )
        await anyio.sleep(0.1)
        assert (
            await prepared.execute(request_for(MODEL, [X]), tell("passed"), deadline_ns=1) == ErrorStatus.NONE
        )
        await anyio.sleep(0.1)
        await prepared.execute(request_for(MODEL, [X]), tell("closed while it runs"))
        await anyio.sleep(0.001)
        await prepared.execute(request_for(MODEL, [X]), tell("closed before it began"))
        await device.aclose()
        await anyio.sleep(1)
        return seen

    assert run(main) == [
        ("bad", ErrorStatus.INVALID_ARGUMENT),
        ("good", ErrorStatus.NONE),
        ("late", ErrorStatus.MISSED_DEADLINE_TRANSIENT),
        ("passed", ErrorStatus.MISSED_DEADLINE_PERSISTENT),
        ("closed before it began", ErrorStatus.DEVICE_UNAVAILABLE),
        ("closed while it runs", ErrorStatus.DEVICE_UNAVAILABLE),
    ]


def test_a_fenced_execution_starts_when_its_fences_have_signalled() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with device_of() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            first, second = SyncFence("first"), SyncFence("second")
            launched = await prepared.execute_fenced(request_for(MODEL, [X]), [first, second], measure=True)
            assert launched.fence is not None
            chained = await prepared.execute_fenced(request_for(MODEL, [X]), [launched.fence])
            await anyio.sleep(0.1)
            first.signal()
            await anyio.sleep(0.1)
            assert (await launched.get_execution_info())[0] == ErrorStatus.GENERAL_FAILURE
            second.signal()
            assert chained.fence is not None
            await chained.fence
            assert launched.fence.signal_time_ns == 210 * MS
            status, timing = await launched.get_execution_info()
            assert status == ErrorStatus.NONE
            assert timing.launched == Timing(10 * MS, 210 * MS)
            assert timing.fenced == Timing(10 * MS, 10 * MS)

    run(main, clock=clock)
    assert clock.now_ns == 220 * MS


@pytest.mark.parametrize(
    ("options", "signal_at_s", "fails_at_ns", "status"),
    [
        pytest.param(
            {"deadline_ns": 50 * MS}, None, 50 * MS, ErrorStatus.MISSED_DEADLINE_TRANSIENT, id="waiting"
        ),
        pytest.param(
            {"deadline_ns": 55 * MS}, 0.05, 55 * MS, ErrorStatus.MISSED_DEADLINE_TRANSIENT, id="running"
        ),
        pytest.param(
            {"duration_ns": 4 * MS}, 0.05, 54 * MS, ErrorStatus.MISSED_DEADLINE_TRANSIENT, id="allowance"
        ),
        pytest.param({}, -0.05, 50 * MS, ErrorStatus.GENERAL_FAILURE, id="failed fence"),
    ],
)
def test_a_fenced_execution_fails_its_fence_on_time(
    options: dict[str, int], signal_at_s: float | None, fails_at_ns: int, status: ErrorStatus
) -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with device_of() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            dependency = SyncFence("dependency")
            launched = await prepared.execute_fenced(request_for(MODEL, [X]), [dependency], **options)  # type: ignore[arg-type]
            fence = launched.fence
            assert fence is not None
            fence.add_callback(lambda _: times.append(clock.now_ns))
            if signal_at_s is not None:
                await anyio.sleep(abs(signal_at_s))
                dependency.signal() if signal_at_s > 0 else dependency.fail("broken")
            with pytest.raises(Exception, match=r"npu|fence|allowance|deadline"):
                await fence
            assert (await launched.get_execution_info())[0] == status
            if signal_at_s is None:
                dependency.signal()

    times: list[int] = []
    run(main, clock=clock)
    assert times == [fails_at_ns]


def test_a_fenced_execution_refuses_what_cannot_begin() -> None:
    async def main() -> None:
        await anyio.sleep(1)
        async with device_of() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            failed = SyncFence("failed")
            failed.fail("before")
            with pytest.raises(InvalidArgument, match="has failed already"):
                await prepared.execute_fenced(request_for(MODEL, [X]), [failed])
            with pytest.raises(MissedDeadline) as caught:
                await prepared.execute_fenced(request_for(MODEL, [X]), [], deadline_ns=1)
            assert not caught.value.transient
            pending = await prepared.execute_fenced(request_for(MODEL, [X]), [SyncFence("never")])
        assert pending.fence is not None
        assert pending.fence.status == FenceStatus.FAILED, "closing finishes every fence"

    run(main)


def test_bursts_and_reusable_executions_take_one_at_a_time() -> None:
    async def main() -> None:
        async with device_of() as device:
            prepared = await device.prepare_model(models.identity((4,)))
            burst = await prepared.configure_execution_burst()
            reusable = await prepared.create_reusable_execution(request_for(MODEL, [X]))
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: burst.execute_synchronously(request_for(MODEL, [X]), [-1]),
                lambda: reusable.execute_synchronously(),
            ]
            for call in calls:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    await anyio.sleep(0.001)
                    with pytest.raises(InvalidArgument):
                        await call()
                await call()
            await burst.aclose()

    run(main)


def test_a_driver_bug_is_a_general_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with device_of() as device:
            prepared = await device.prepare_model(models.identity((4,)))

            async def broken(*arguments: Any) -> Sequence[OutputShape]:
                raise KeyError("oops")

            monkeypatch.setattr(prepared, "run", broken)
            with pytest.raises(GeneralFailure, match="KeyError"):
                await prepared.execute_synchronously(request_for(MODEL, [X]))
            monkeypatch.undo()
            await prepared.execute_synchronously(request_for(MODEL, [X]))

    run(main)


async def _ask(device: SimulatedDevice) -> None:
    assert await device.supported_operations(MODEL) == (True,) * 10


async def _prepare(device: SimulatedDevice) -> None:
    await (await device.prepare_model(MODEL)).aclose()


@pytest.mark.parametrize("call", [_ask, _prepare])
async def test_processes_take_turns_at_calls_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[SimulatedDevice], Awaitable[None]]
) -> None:
    device, may_end, order = device_of(), threading.Event(), list[Any]()
    check, make = device._checked_support, driver.SimulatedPreparedModel

    def halting(call: Callable[..., Any]) -> Callable[..., Any]:
        def halted(*arguments: Any) -> Any:
            order.append(client_of_call.get())
            assert may_end.wait(WAIT_S_MAX)
            return call(*arguments)

        return halted

    if call is _ask:
        monkeypatch.setattr(device, "_checked_support", halting(check))
    else:
        monkeypatch.setattr(driver, "SimulatedPreparedModel", halting(make))
    flood = 40 + 8 * BESIDE_MAX

    async def one(process: int, client: int) -> None:
        client_of_call.set(Connection(process, client))
        await call(device)

    async with device, anyio.create_task_group() as tasks:
        try:
            for client in range(flood):
                tasks.start_soon(one, 1, client)
            with anyio.fail_after(WAIT_S_MAX):
                while len(order) + asynchronous._calls.waiting_count < flood:
                    await anyio.sleep(0.001)
                assert len(order) == BESIDE_MAX  # One process may use all threads.
                tasks.start_soon(one, 2, 0)
                while asynchronous._calls.waiting_count < flood + 1 - BESIDE_MAX:
                    await anyio.sleep(0.001)
        finally:
            may_end.set()
    processes = [connection.process for connection in order]
    assert sorted(processes) == [1] * flood + [2] and processes.index(2) <= 6 * BESIDE_MAX


async def test_error_of_a_call_beside_the_loop_is_not_taken_for_a_shortage_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("of the call")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # Python's words

    async with device_of() as device:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(ResourceExhausted, match="no thread is left"):
            await device.on_thread(fail)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=r"^of the call$"):
            await device.on_thread(fail)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", ["claims", "quality_of_service"])
def test_the_driver_suite_finds_nothing(group: str) -> None:
    async def make() -> SimulatedDevice:
        return SimulatedDevice("phone-cpu")

    async def main() -> VtsReport:
        device, other = DeviceUnderTest(make), DeviceUnderTest(make)
        try:
            return await run_cases(device, chosen_cases(group), other=other)
        finally:
            await device.aclose()
            await other.aclose()

    report = anyio.run(main)
    assert report.failures == ()
    assert report.passed > 0

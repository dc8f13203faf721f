"""The runtime from threads: the same answers and errors, nothing left behind."""

from __future__ import annotations

import datetime
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

import aionn
import aionn.blocking
from aionn.hal import OperationType
from aionn.testing import SimulatedDevice
from aionn.testing.models import chain, identity
from fences import SyncFence

CLOSING_S = 0.05
"""Much longer than closing an idle runtime takes."""

WATCHDOG_S = 20.0
"""Nothing here takes nearly so long."""

Values = npt.NDArray[np.float32]


@pytest.fixture(params=["process", "in_process"])
def runtime(request: pytest.FixtureRequest) -> Iterator[aionn.blocking.Runtime]:
    with aionn.blocking.open(drivers=["reference"], isolation=request.param) as opened:
        yield opened


def test_every_path_gives_the_same_answer(
    runtime: aionn.blocking.Runtime, digits: Path, silence: Values
) -> None:
    assert [device.name for device in runtime.devices] == ["reference"]
    assert runtime.status("reference").name == "AVAILABLE"
    with runtime.compile(digits) as net:
        (expected,) = net.execute([silence]).outputs
        assert int(expected.argmax()) == 0
        fence = SyncFence("go")
        fenced = net.execute_fenced([silence], wait_for=[fence])
        assert fenced.fence.status.name == "PENDING"
        fence.signal()
        np.testing.assert_array_equal(fenced.result().outputs[0], expected)
        with net.burst() as burst:
            np.testing.assert_array_equal(burst.execute([silence]).outputs[0], expected)
            seen = [r.outputs[0].copy() for r in burst.stream([silence] * 5)]
        assert len(seen) == 5
        np.testing.assert_array_equal(seen, [expected] * 5)


def test_many_threads_share_one_compilation(
    runtime: aionn.blocking.Runtime, digits: Path, silence: Values
) -> None:
    net = runtime.compile(digits)
    inputs = [silence + i for i in range(12)]
    expected = [net.execute([x]).outputs[0] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: net.execute([x]).outputs[0], inputs))
    np.testing.assert_array_equal(got, expected)


def test_errors_are_those_of_the_runtime(runtime: aionn.blocking.Runtime, digits: Path) -> None:
    with pytest.raises(aionn.InvalidArgument, match="cannot be read"):
        runtime.compile("absent.tflite")
    net = runtime.compile(digits)
    with pytest.raises(aionn.InvalidArgument, match="input 0"):
        net.execute([np.zeros(3, np.float32)])
    with pytest.raises(aionn.MissedDeadline):
        net.execute([np.zeros((1, 49, 40, 1), np.float32)], deadline=1)


def test_consumer_may_leave_a_stream(runtime: aionn.blocking.Runtime, digits: Path, silence: Values) -> None:
    with runtime.compile(digits) as net, net.burst() as burst:
        for result in burst.stream(silence for _ in iter(int, 1)):
            assert result.status == "on_time"
            break
        assert burst.execute([silence]).status.name == "NONE"


def test_stream_with_a_guarantee_has_its_reservation_and_gives_it_back() -> None:
    device = SimulatedDevice("npu", run_time_s=0.0001, results="zeros")
    one = np.ones(4, np.float32)
    with aionn.blocking.open(devices=[device]) as runtime:
        net = runtime.compile(identity((4,)))
        with net.burst() as burst:
            terms = {"guarantee": True, "period": 10.0, "jitter": 9.0}
            with burst.stream([one], **terms) as results:
                assert isinstance(results, aionn.blocking.GuaranteedStream)
                assert results.reservation is not None and results.reservation.slot == "npu/0"
                assert results.refusal is None and "reserved on npu/0" in results.explain()
                changed = results.change(period=datetime.timedelta(seconds=20))
                assert changed is not None and changed.period_ns == 20_000_000_000
                assert [result.status for result in results] == ["on_time"]
                assert results.statistics().on_time == 1
            assert "released" in results.explain()
            with pytest.raises(aionn.NotAdmitted), burst.stream([one], guarantee=True, period=1e-6):
                pass
            results = burst.stream([one], **terms)
            assert results.admit() is not None
            results.close()
            with pytest.raises(aionn.InvalidArgument, match="ended"):
                results.admit()
        assert runtime.devices[0].reservations.count == 0


def test_source_that_fails_ends_the_stream_with_its_error(
    runtime: aionn.blocking.Runtime, digits: Path, silence: Values
) -> None:
    def source() -> Iterator[Values]:
        yield silence
        raise OSError("the camera is gone")

    with runtime.compile(digits) as net, net.burst() as burst:
        results = burst.stream(source())
        next(results)
        with pytest.raises(OSError, match="the camera is gone"):
            next(results)


def test_stream_whose_source_gets_no_thread_says_so_and_closes(
    digits: Path, silence: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "aionn-source":
            raise RuntimeError("can't start new thread")  # Python's words
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with (
        aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime,
        runtime.compile(digits) as net,
        net.burst() as burst,
    ):
        with pytest.raises(aionn.ResourceExhausted, match="source of a stream: no thread"):
            next(burst.stream([silence]))
        assert len(burst.execute([silence]).outputs) == 1


def test_cancelled_execution_tells_who_waits(
    runtime: aionn.blocking.Runtime, digits: Path, silence: Values
) -> None:
    net = runtime.compile(digits)
    fenced = net.execute_fenced([silence], wait_for=[SyncFence("never")])
    fenced.cancel()
    with pytest.raises(aionn.ExecutionCancelled, match="cancelled"):
        fenced.result()


def test_runtime_is_opened_once_and_closed_for_good(digits: Path) -> None:
    before = threading.active_count()
    runtime = aionn.blocking.open(drivers=["reference"], isolation="in_process")
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        runtime.compile(digits)
    with pytest.raises(aionn.InvalidArgument, match="devices: the runtime is not open"):
        assert runtime.devices
    with runtime:
        assert threading.active_count() > before
        with pytest.raises(aionn.InvalidArgument, match="opened once"):
            runtime.__enter__()
    runtime.close()
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        runtime.compile(digits)


def test_runtime_is_started_without_a_with_statement(digits: Path, silence: Values) -> None:
    runtime = aionn.blocking.open(drivers=["reference"], isolation="in_process").start()
    try:
        net = runtime.compile(digits, recover=True)
        assert len(net.execute([silence]).outputs) == 1 and net.recoveries == 0
    finally:
        runtime.close()


def test_runtime_that_cannot_open_leaves_nothing() -> None:
    with pytest.raises(aionn.InvalidArgument, match="driver 'none'"):
        aionn.blocking.open(drivers=["none"]).__enter__()


@pytest.mark.parametrize(
    "name", ["Runtime", "Compilation", "Execution", "Burst", "LentSlot", "Stream", "DeviceMemory"]
)
def test_whole_interface_has_its_counterpart(name: str) -> None:
    # What the parts of the runtime say to each other is not for applications.
    inner = {
        "Runtime": {"tasks", "background"},
        "Compilation": {"close_streams"},
        "Burst": {"check_unreserved", "close_streams", "open_beside", "replace", "was_entered"},
        "DeviceMemory": {"binding"},
    }
    own = {word for word in dir(getattr(aionn, name)) if not word.startswith("_")}
    here = {word for word in dir(getattr(aionn.blocking, name)) if not word.startswith("_")}
    attributes = {"aclose": "close", "wait": "result"}
    missing = {attributes.get(word, word) for word in own} - inner.get(name, set()) - here
    assert not missing


def test_memories_and_reusable_executions_from_threads(runtime: aionn.blocking.Runtime) -> None:
    x, relu = np.array([-1.0, 2.0], np.float32), [0.0, 2.0]
    with runtime.compile(chain([OperationType.RELU], (2,))) as net:
        assert [a.supported for a in runtime.supported_operations(net.model)] == [(True,)]
        assert net.steps == (("reference", (0,)),) and not net.from_cache and "<svg" in net.page()
        with (
            runtime.allocate(inputs=[(net, 0)]) as device_in,
            runtime.allocate(outputs=[(net, 0)]) as device_out,
            aionn.SharedMemory.from_array(x) as shared,
        ):
            assert isinstance(device_in, aionn.blocking.DeviceMemory) and device_in.device == "reference"
            with pytest.raises(aionn.GeneralFailure):
                device_out.read()
            runtime.copy(shared, device_in)
            net.execute([device_in], outputs=[device_out])
            assert device_out.read().tolist() == relu
            assert net.execute([shared]).outputs[0].tolist() == relu
            device_in.write(-x)
            fenced = net.execute_fenced([device_in], outputs=[device_out])
            fenced.result()
            assert fenced.state.name == "FINISHED" and fenced.deadline_ns is None and fenced.explain()
            assert not fenced.change_priority(aionn.Priority.HIGH)
            runtime.copy(device_out, shared)
            assert shared.array.tolist() == [1.0, 0.0]
        with pytest.raises(aionn.InvalidArgument, match="closed"):
            net.execute([device_in])
        again = net.reusable(measure=True)
        for value in (1.0, -1.0):
            again.inputs[0][:] = value
            assert again.execute().outputs[0].tolist() == [max(value, 0.0)] * 2
        assert again.outputs[0].tolist() == [0.0] * 2


def test_stream_that_outlives_its_runtime_is_dropped_in_silence(digits: Path, silence: Values) -> None:
    with aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime:
        net = runtime.compile(digits)
        burst = net.burst()
        burst.__enter__()
        stream = burst.stream(silence for _ in range(3))
        assert next(stream).status == "on_time"
    # Its generator is closed here, when there is no event loop any more; an error would fail this test as unraisable.
    del stream


def test_stream_that_the_collector_finds_does_not_wait_for_the_loop(digits: Path, silence: Values) -> None:
    """The collector may interrupt a thread that has a lock, as of logging, for which the loop waits."""
    lock, is_waiting, got = threading.Lock(), threading.Event(), []

    def write(item: Values, view: Values) -> None:
        is_waiting.set()
        got.append(lock.acquire(timeout=WATCHDOG_S))
        view[...] = item

    with (
        aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime,
        runtime.compile(digits) as net,
        net.burst() as burst,
        net.burst() as another,
        ThreadPoolExecutor() as threads,
    ):
        stream = burst.stream([silence] * 3)
        assert next(stream).status == "on_time"
        cycle: list[object] = [stream]
        cycle.append(cycle)
        with lock:
            other = threads.submit(list, another.stream([silence], into=write))
            assert is_waiting.wait(WATCHDOG_S)
            del stream, cycle
            gc.collect()
        assert len(other.result(WATCHDOG_S)) == 1 and got == [True]
        assert burst.statistics().streams == 0


def test_stream_counts_and_can_be_ended(
    runtime: aionn.blocking.Runtime, digits: Path, silence: Values
) -> None:
    with runtime.compile(digits) as net, net.burst() as burst:
        stream = burst.stream(silence for _ in iter(int, 1))
        assert next(stream).status == next(stream).status == "on_time"
        assert stream.statistics().on_time == 2
        stream.cancel()
        assert list(burst.stream([])) == []


def test_closing_waits_for_the_worker_threads_of_the_loop() -> None:
    """They end by themselves, but not at once: here their last act, the end of a thread's own data, takes longer than closing."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(CLOSING_S)

    own, workers = threading.local(), []

    def work() -> None:
        own.slow = Slow()
        workers.append(threading.current_thread())

    runtime = aionn.blocking.open(drivers=["reference"], isolation="in_process").__enter__()
    assert runtime._loop is not None
    runtime._loop.call(anyio.to_thread.run_sync, work)
    assert workers[0].is_alive()
    runtime.close()
    assert not workers[0].is_alive()


class OwnEnd(BaseException):
    """What is no ``Exception``."""


def _both() -> BaseException:
    return BaseExceptionGroup("both", [OwnEnd()])


@pytest.mark.parametrize("make", [OwnEnd, SystemExit, KeyboardInterrupt, _both])
def test_source_that_raises_no_exception_ends_its_stream_alone(make: Callable[[], BaseException]) -> None:
    kind = type(make())

    def source() -> Iterator[Values]:
        yield np.ones(4, np.float32)
        raise make()

    with aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime:
        net = runtime.compile(identity((4,)))
        with net.burst() as burst:
            stream = burst.stream(source())
            next(stream)
            with pytest.raises(kind):
                next(stream)
            assert burst.execute([np.ones(4, np.float32)]).outputs[0].sum() == 4
        net.execute([np.ones(4, np.float32)])


def test_second_consumer_of_a_stream_is_refused() -> None:
    asked, gone_on = threading.Event(), threading.Event()

    def source() -> Iterator[Values]:
        asked.set()
        gone_on.wait(20)
        yield np.ones(4, np.float32)

    with aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime:
        net = runtime.compile(identity((4,)))
        with net.burst() as burst, ThreadPoolExecutor(1) as pool:
            stream = burst.stream(source())
            first = pool.submit(next, stream)
            assert asked.wait(20)
            with pytest.raises(aionn.InvalidArgument, match="expected one consumer, but another thread"):
                next(stream)
            gone_on.set()
            assert first.result(20).outputs[0].sum() == 4


def test_thread_that_is_interrupted_at_any_step_of_a_call_does_not_stop_the_others() -> None:
    """An interrupt comes between any two steps of a thread: one that then keeps a lock of the loop's would stop all threads."""
    value = np.ones(4, np.float32)

    def interrupt_at(step: int) -> Callable[[FrameType, str, object], None]:
        seen = itertools.count()

        def profile(*_: object) -> None:
            if next(seen) == step:
                sys.setprofile(None)
                raise KeyboardInterrupt

        return profile

    def ask() -> None:
        answers.append(net.execute([value]).outputs[0].sum())

    answers: list[float] = []
    with aionn.blocking.open(drivers=["reference"], isolation="in_process") as runtime:
        net = runtime.compile(identity((4,)))
        for step in itertools.count():
            try:
                sys.setprofile(interrupt_at(step))
                net.execute([value])
                sys.setprofile(None)
                break
            except KeyboardInterrupt:
                pass
            other = threading.Thread(target=ask, daemon=True)
            other.start()
            other.join(20)
            assert len(answers) == step + 1, f"the loop stands still after an interrupt at step {step}"
        assert step > 20

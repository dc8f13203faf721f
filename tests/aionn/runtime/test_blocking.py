"""The runtime from threads: the same answers and errors, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import aionn
import aionn.blocking
from fences import SyncFence

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


def test_cancelled_execution_tells_who_waits(
    runtime: aionn.blocking.Runtime, digits: Path, silence: Values
) -> None:
    net = runtime.compile(digits)
    fenced = net.execute_fenced([silence], wait_for=[SyncFence("never")])
    fenced.cancel()
    with pytest.raises(aionn.GeneralFailure, match="cancelled"):
        fenced.result()


def test_runtime_is_opened_once_and_closed_for_good(digits: Path) -> None:
    before = threading.active_count()
    runtime = aionn.blocking.open(drivers=["reference"], isolation="in_process")
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        runtime.compile(digits)
    with runtime:
        assert threading.active_count() > before
        with pytest.raises(aionn.InvalidArgument, match="opened once"):
            runtime.__enter__()
    runtime.close()
    with pytest.raises(aionn.InvalidArgument, match="not open"):
        runtime.compile(digits)


def test_runtime_that_cannot_open_leaves_nothing() -> None:
    with pytest.raises(aionn.InvalidArgument, match="driver 'none'"):
        aionn.blocking.open(drivers=["none"]).__enter__()

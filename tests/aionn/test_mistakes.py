"""What a newcomer gets wrong, and the words of each answer: what was expected, what was given, and what to write instead."""

from __future__ import annotations

import asyncio
import datetime
import gc
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn.conformance.requests import request_for
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice
from aionn.errors import TRACEBACK_CHARACTERS_MAX, DriverTraceback, traceback_of
from aionn.hal import OperandType, OperationType
from aionn.models.builder import GraphBuilder
from aionn.runtime.clock import mistake_in
from aionn.runtime.executions.execution import ExecutionState
from aionn.testing.models import identity
from fences import FenceError, FenceStatus, SyncFence
from tests.support.mortal_driver import RAISES, doubled_model, sum_model

X = np.ones(4, np.float32)
NS = 1_000_000_000
DAY_NS = 86_400 * NS
LIMIT_S = 60
MORTAL = {"mortal": "tests.support.mortal_driver:MortalDevice"}


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(drivers=["reference"], isolation="in_process") as opened:
        yield opened


@pytest.fixture
async def net(runtime: aionn.Runtime) -> AsyncIterator[aionn.Compilation]:
    async with await runtime.compile(identity((4,))) as compiled:
        yield compiled


async def once() -> AsyncIterator[Any]:
    yield X


# Deadlines

UP_NS = 5 * DAY_NS
WALL_NS = 20_000 * DAY_NS


@pytest.mark.parametrize(
    ("deadline", "words"),
    [
        (33_000_000, "got 33000000, which looks like a duration; did you mean aionn.after(0.033)?"),
        (WALL_NS + 33_000_000, "which looks like time.time_ns(), another clock; use aionn.after(seconds)"),
        (WALL_NS / 1e9 + 0.033, "which looks like time.time() in seconds; use aionn.after(seconds)"),
        (UP_NS / 1e9 + 0.033, "which looks like time.monotonic() in seconds; use aionn.after(seconds)"),
        (UP_NS + 3 * DAY_NS, "which is 3 days ahead, more than a day; None means no deadline"),
        (True, "got True; use aionn.after(seconds)"),
        (33, "got 33, which looks like a duration; use aionn.after(seconds)"),
        (33_000, "got 33000, which looks like a duration; use aionn.after(seconds)"),
        (UP_NS + 0.5e9, "got 432000500000000.0, a float; write int(...)"),
        (33e6, "got 33000000.0; did you mean aionn.after(0.033)?"),
        ("33ms", "got '33ms'; use aionn.after(seconds)"),
        (0.033, "got 0.033, which looks like seconds from now; did you mean aionn.after(0.033)?"),
        (np.float32(0.5), "got 0.5, which looks like seconds from now; did you mean aionn.after(0.5)?"),
        (-1, "got -1; use aionn.after(seconds)"),
        (-0.5, "got -0.5; use aionn.after(seconds)"),
        (float("nan"), "got nan; use aionn.after(seconds)"),
        (float("inf"), "got inf; use aionn.after(seconds)"),
        (1e300, "got 1e+300; use aionn.after(seconds)"),
        (2**63, "which is more than 2**63 - 1; None means no deadline, aionn.after(seconds) is one from now"),
        (DAY_NS // 10, "got 8640000000000, which looks like a duration; use aionn.after(seconds)"),
    ],
)
def test_mistaken_deadline_is_named(deadline: Any, words: str) -> None:
    mistake = mistake_in(deadline, UP_NS, wall_ns=WALL_NS, real_ns=UP_NS, started_ns=UP_NS - NS)
    assert (
        mistake is not None and words in mistake and "expected nanoseconds on the monotonic clock" in mistake
    )


def test_seconds_of_the_loop_are_named_soon_after_the_machine_has_started() -> None:
    up_ns = 300 * NS
    mistake = mistake_in(301.5, up_ns, wall_ns=WALL_NS, real_ns=up_ns, started_ns=up_ns - NS)
    assert (
        mistake is not None and "looks like time.monotonic() in seconds; use aionn.after(seconds)" in mistake
    )


@pytest.mark.parametrize(
    ("deadline", "now", "started"),
    [
        (UP_NS + NS, UP_NS, UP_NS - NS),
        (UP_NS - NS // 2, UP_NS, UP_NS - NS),
        (UP_NS - NS // 2, UP_NS + 3600 * NS, UP_NS - NS),  # The process was stopped for an hour.
        (0, UP_NS, UP_NS - NS),
        (1, UP_NS, UP_NS - NS),
        (33_000_000, 40 * NS, 39 * NS),  # The machine has just started: it may be a time.
        (2**63 - 1, UP_NS, UP_NS - NS),
    ],
)
def test_deadline_that_may_be_meant_is_left_alone(deadline: Any, now: int, started: int) -> None:
    assert mistake_in(deadline, now, wall_ns=WALL_NS, real_ns=now, started_ns=started) is None


def test_virtual_time_begins_anywhere_so_the_past_is_not_judged() -> None:
    assert mistake_in(33_000_000, 200 * NS, wall_ns=WALL_NS, real_ns=UP_NS, started_ns=UP_NS - NS) is None


@pytest.mark.parametrize("seconds", [33_000_000, 86_401, 1e300])
def test_after_refuses_what_is_no_number_of_seconds(seconds: float) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"^after: expected a number of seconds .* at most 86400 \(a day\), got"
    ):
        aionn.after(seconds)
    with pytest.raises(
        aionn.InvalidArgument, match=r"got 33000000; did you mean 0.033\? It looks like nanoseconds$"
    ):
        aionn.after(33_000_000)
    with pytest.raises(aionn.InvalidArgument, match=r"got 86401; None means no deadline$"):
        aionn.after(86_401)
    with pytest.raises(aionn.InvalidArgument, match=r"got 1e\+300; None means no deadline$"):
        aionn.after(1e300)
    assert aionn.after(86_400) - aionn.now_ns() > DAY_NS - NS


SPAN = datetime.timedelta(milliseconds=33)


def test_seconds_of_numpy_are_seconds_and_a_span_of_time_is_named() -> None:
    for seconds in (np.float32(60), np.int64(60)):
        assert 59 * NS < aionn.after(seconds) - aionn.now_ns() <= 60 * NS  # type: ignore[arg-type]
    with pytest.raises(
        aionn.InvalidArgument,
        match=r"^after: expected a number of seconds .*, got datetime.*; write its total_seconds\(\)$",
    ):
        aionn.after(SPAN)  # type: ignore[arg-type]


async def test_deadline_of_another_type_is_named(net: aionn.Compilation) -> None:
    for deadline, words in (
        (SPAN, r"got datetime.*; did you mean aionn.after\(0.033\)\?$"),
        (
            aionn.after,
            r"got <function after.*; a function is for streams, write deadline=aionn.after\(seconds\)$",
        ),
    ):
        with pytest.raises(aionn.InvalidArgument, match=words):
            await net.execute([X], deadline=deadline)  # type: ignore[arg-type]
    soon: Any = np.int64(aionn.after(60))
    await net.execute([X], deadline=soon)
    async with net.burst() as burst:
        await burst.execute([X], deadline=soon)
        assert (await anext(burst.stream(once(), deadline=lambda item: soon))).status == "on_time"
    with pytest.raises(aionn.InvalidArgument, match="which looks like a duration"):
        await net.execute([X], deadline=np.int64(33_000_000))  # type: ignore[arg-type]


async def test_mistaken_deadline_is_refused_by_every_way_to_execute(net: aionn.Compilation) -> None:
    wall = time.time_ns() + 33_000_000
    words = "which looks like time.time_ns()"
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.execute([X], deadline=wall)
    with pytest.raises(aionn.InvalidArgument, match=words):
        net.execute_fenced([X], deadline=wall)
    with pytest.raises(aionn.InvalidArgument, match=words):
        await net.reusable().execute(deadline=wall)
    async with net.burst() as burst:
        with pytest.raises(aionn.InvalidArgument, match=words):
            await burst.execute([X], deadline=wall)


async def test_first_frame_with_a_mistaken_deadline_ends_the_stream(net: aionn.Compilation) -> None:
    async with net.burst() as burst:
        for mistaken in (lambda item: time.time_ns(), lambda item: aionn.now_ns() + 2 * DAY_NS):
            stream = burst.stream(once(), deadline=mistaken)
            with pytest.raises(aionn.InvalidArgument, match=r"^stream: deadline: expected nanoseconds"):
                await anext(stream)
            assert stream.statistics().dropped == 0


async def test_message_of_a_deadline_that_passed_says_how_late_it_is(
    net: aionn.Compilation, runtime: aionn.Runtime
) -> None:
    late = aionn.now_ns() - 5_000_000
    words = r"had passed before the start, too late by [\d.]+ ms"
    with pytest.raises(aionn.MissedDeadline, match=words):
        await net.execute([X], deadline=late)
    with pytest.raises(aionn.MissedDeadline, match=words):
        await runtime.compile(identity(), deadline=late)
    async with net.burst(slots=1) as burst:
        with burst.lend(), pytest.raises(aionn.MissedDeadline, match=words):
            await burst.execute([X], deadline=late)


async def test_driver_says_how_late_it_is() -> None:
    late = time.monotonic_ns() - 5_000_000
    words = r"had passed before the start, too late by [\d.]+ ms"
    model = identity((4,))
    request = request_for(model, [X])
    async with ReferenceDevice() as device:
        with pytest.raises(aionn.MissedDeadline, match=words):
            await device.prepare_model(model, deadline_ns=late)
        prepared = await device.prepare_model(model)
        with pytest.raises(aionn.MissedDeadline, match=words):
            await prepared.execute_synchronously(request, deadline_ns=late)
        with pytest.raises(aionn.MissedDeadline, match=words):
            await prepared.execute_fenced(request, [], deadline_ns=late)


# Other arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"deadline": 5},
            r"deadline: expected a function .* got 5; write deadline=lambda item: aionn.after\(seconds\)",
        ),
        (
            {"into": X},
            r"into: expected a function into\(item, view\), got an ndarray; see aionn.image_writer",
        ),
    ],
)
async def test_options_of_a_stream_are_checked_at_the_call(
    net: aionn.Compilation, options: Any, words: str
) -> None:
    async with net.burst() as burst:
        with pytest.raises(aionn.InvalidArgument, match=words):
            burst.stream(once(), **options)


async def test_into_that_returns_what_it_should_write_ends_the_stream(net: aionn.Compilation) -> None:
    async def later(item: Any, view: Any) -> None:
        view[...] = item

    functions: dict[str, Any] = {
        "got one that returned an ndarray": lambda item, view: item * 2,
        "got one that returned a dict": lambda item, view: {"input0": item},
        "got one that returned a coroutine": later,
    }
    async with net.burst() as burst:
        for words, into in functions.items():
            stream = burst.stream(once(), into=into)
            with pytest.raises(
                aionn.InvalidArgument, match=f"into: expected a function .*, {words}; write view"
            ):
                await anext(stream)
        doubled = burst.stream(once(), into=lambda item, view: np.multiply(item, 2, out=view))
        assert (await anext(doubled)).outputs[0].tolist() == [2, 2, 2, 2]


def test_writer_of_what_is_no_input() -> None:
    for writer in (aionn.image_writer, aionn.value_writer):
        with pytest.raises(
            aionn.InvalidArgument, match=r"_writer: expected an input, such as net.inputs\[0\], got a list"
        ):
            writer([])  # type: ignore[arg-type]


async def test_source_that_is_no_async_iterable_is_refused_at_the_call(net: aionn.Compilation) -> None:
    def generator() -> Iterator[Any]:
        yield X

    async with net.burst() as burst:
        for source, words in (
            (
                "clip.mp4",
                r"got a str; aionn.media.video_file and audio_file read files, and aionn.media.network an address$",
            ),
            (generator(), r"got a generator; make it one by an async generator \(async def and yield\)"),
            ([X], "got a list; make it one"),
            (once, "got a function; call it, if it is an async generator function"),
        ):
            with pytest.raises(aionn.InvalidArgument, match=words):
                burst.stream(source)  # type: ignore[type-var]


async def test_fence_without_a_list(net: aionn.Compilation) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"expected a list of fences, got a SyncFence; write \[fence\]"
    ):
        net.execute_fenced([X], wait_for=SyncFence("bare"))  # type: ignore[arg-type]
    execution = net.execute_fenced([X])
    for given in (execution, [execution]):
        with pytest.raises(aionn.InvalidArgument, match=r"got an Execution; write \[execution.fence\]"):
            net.execute_fenced([X], wait_for=given)  # type: ignore[arg-type]
    await execution


async def test_fences_of_a_generator_are_waited_for(net: aionn.Compilation) -> None:
    fence = SyncFence("go")
    await net.execute([X])
    execution = net.execute_fenced([X], wait_for=(f for f in [fence]))  # type: ignore[arg-type]
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    assert execution.state is ExecutionState.WAITING_FOR_FENCES
    fence.signal()
    await execution


async def test_flags_are_bools(net: aionn.Compilation, runtime: aionn.Runtime) -> None:
    with pytest.raises(aionn.InvalidArgument, match=r"^measure: expected a bool, got 1$"):
        await net.execute([X], measure=1)  # type: ignore[arg-type]
    with pytest.raises(aionn.InvalidArgument, match=r"^recover: expected a bool, got 'x'$"):
        await runtime.compile(identity((4,)), recover="x")  # type: ignore[arg-type]
    measured = await net.execute([X], measure=np.True_)  # type: ignore[arg-type]
    assert measured.timing.time_on_device_ns is not None


async def test_outputs_without_a_list(net: aionn.Compilation) -> None:
    for outputs, words in ((X, r"got an ndarray; write \[output\]"), (5, "got an int")):
        with pytest.raises(aionn.InvalidArgument, match=f"^outputs: expected a list with 1 entry, {words}$"):
            await net.execute([X], outputs=outputs)  # type: ignore[arg-type]


async def test_value_whose_memory_cannot_be_read(net: aionn.Compilation) -> None:
    class Broken:
        def __dlpack__(self, **options: Any) -> Any:
            raise ZeroDivisionError("planted")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    released = memoryview(bytearray(16))
    released.release()
    for value, words in (
        (Broken(), "a Broken that cannot be read: planted"),
        (released, "a memoryview that"),
    ):
        with pytest.raises(aionn.InvalidArgument, match=f"^input 0 .*got {words}"):
            await net.execute([value])
        with pytest.raises(aionn.InvalidArgument, match=f"^output 0 .*got {words}"):
            await net.execute([X], outputs=[value])


async def test_values_that_are_no_arrays(net: aionn.Compilation) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"expected a list with 1 array, got an ndarray; write \[array\]"
    ):
        await net.execute(X)  # type: ignore[arg-type]
    with pytest.raises(aionn.InvalidArgument, match=r"expected 1 array, got 2 \(it takes input0\)"):
        await net.execute([X, X])
    with pytest.raises(aionn.InvalidArgument, match=r"got a list \(see numpy.asarray\)"):
        await net.execute([[1.0, 2.0]])
    with pytest.raises(
        aionn.InvalidArgument, match=r"got a dict; write a list in the order of net.inputs: input0$"
    ):
        await net.execute({"input0": X})  # type: ignore[arg-type]
    for path in ("picture.jpg", Path("picture.jpg")):
        with pytest.raises(aionn.InvalidArgument, match=r"; a path is not read here$"):
            await net.execute([path])


async def test_image_of_another_library_in_a_writer(runtime: aionn.Runtime) -> None:
    class Image:
        """As PIL's: numpy can read it, and it has neither a ``dtype`` nor a buffer."""

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.zeros((2, 2, 3), np.uint8)

    async with await runtime.compile(identity((1, 2, 2, 3))) as net, net.burst() as burst:

        async def images() -> AsyncIterator[Any]:
            yield Image()

        for into, words in (
            (
                aionn.image_writer(net.inputs[0]),
                r"expected a picture as a uint8 array, got an Image; numpy.asarray\(image\) makes it one",
            ),
            (None, r"got an Image \(see numpy.asarray\)"),
        ):
            with pytest.raises(aionn.InvalidArgument, match=words):
                await anext(burst.stream(images(), into=into))


async def test_bytes_of_a_model(runtime: aionn.Runtime) -> None:
    with pytest.raises(
        aionn.InvalidArgument, match=r"got bytes; write the bytes to a file .* and give its path"
    ):
        await runtime.compile(b"TFL3")  # type: ignore[arg-type]


async def test_wrong_shape_of_a_model_by_hand_is_refused_when_it_is_compiled(runtime: aionn.Runtime) -> None:
    for dimensions in ((1.5,), (None, 3), "ab", 4):
        with pytest.raises(aionn.InvalidModel, match="dimensions: expected"):
            GraphBuilder().input(OperandType.TENSOR_FLOAT32, dimensions)  # type: ignore[arg-type]
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, 4))
    y = graph.variable(OperandType.TENSOR_FLOAT32, (1, 5))
    graph.operation(OperationType.RELU, [x], [y])
    words = r"operation 0 \(RELU\), output 0: expected shape \[1, 4\], which its inputs give, got \[1, 5\]"
    with pytest.raises(aionn.InvalidModel, match=words):
        await runtime.compile(graph.build([y]))


# Failures of drivers


async def test_traceback_of_a_driver_process_is_the_cause_of_its_error() -> None:
    async with aionn.open(drivers=MORTAL, spare_processes=False) as runtime:
        net = await runtime.compile(doubled_model())
        bad = np.full(1, RAISES, np.float32)
        async with net.burst() as burst:
            with anyio.fail_after(LIMIT_S):
                for execute in (net.execute, burst.execute, net.execute_fenced):
                    with pytest.raises(aionn.GeneralFailure, match=r"planted \[in the driver\]") as failed:
                        await execute([bad])
                    cause = failed.value.__cause__
                    assert isinstance(cause, DriverTraceback), execute
                    assert "in the driver process" in str(cause) and 'mortal_driver.py", line' in cause.text
                    assert "in planted_failure" in cause.text and "ZeroDivisionError" in cause.text


def test_traceback_is_bounded_and_only_for_failures() -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        raise ZeroDivisionError("x" * 5000 + "\ud800 the end")

    try:
        deep(50)
    except ZeroDivisionError as e:
        text = traceback_of(e)
    assert len(text) <= TRACEBACK_CHARACTERS_MAX and text.endswith("\\ud800 the end")
    text.encode()
    try:
        len(3)  # type: ignore[arg-type]
    except TypeError as e:
        first, place, line, *marks, last = traceback_of(e).split("\n")
    assert first.startswith("Traceback") and __file__ in place and "in test_traceback_is" in place
    assert line.strip().startswith("len(3)") and last.startswith("TypeError: object of type")
    assert not marks, "marks within a line parse its source: 1 ms under the interpreter's lock"
    for error in (
        aionn.InvalidArgument("x"),
        aionn.MissedDeadline("x"),
        MemoryError(),
        aionn.ExecutionCancelled("x"),
    ):
        assert traceback_of(error) == ""


async def test_failure_that_nobody_awaits_is_reported() -> None:
    async with aionn.open(drivers=MORTAL, isolation="in_process") as runtime:
        net = await runtime.compile(doubled_model())
        bad = np.full(1, RAISES, np.float32)
        reports: list[dict[str, Any]] = []
        with anyio.fail_after(LIMIT_S):
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda loop, context: reports.append(context))
            try:
                awaited = net.execute_fenced([bad])
                with pytest.raises(aionn.GeneralFailure):
                    await awaited
                followed = net.execute_fenced([bad])
                follower = net.execute_fenced([np.ones(1, np.float32)], wait_for=[followed.fence])
                with pytest.raises(aionn.GeneralFailure):
                    await follower
                cancelled = net.execute_fenced([bad])
                cancelled.cancel()
                del awaited, followed, follower, cancelled
                gc.collect()
                assert not reports
                net.execute_fenced([bad])
                while not reports:
                    await anyio.sleep(0.001)
                    gc.collect()
            finally:
                loop.set_exception_handler(None)
        (report,) = reports
        assert "an execution failed, and neither it nor its fence was awaited" in report["message"]
        assert "planted" in str(report["exception"])


async def test_execution_that_ends_with_its_runtime_is_not_reported() -> None:
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reports.append(context))
    try:
        with anyio.fail_after(LIMIT_S):
            async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
                net = await runtime.compile(endless_model())
                running = net.execute_fenced([np.ones(1, np.float32)], loop_timeout=0.3)
                while running.state is not ExecutionState.RUNNING:
                    await anyio.sleep(0.001)
            # Its device was closed, or its task was cancelled: which one is first is not determined.
            assert running.fence.status == FenceStatus.FAILED
            del running
            for _ in range(3):
                gc.collect()
                await anyio.lowlevel.checkpoint()
    finally:
        loop.set_exception_handler(None)
    assert not reports


async def test_failure_of_a_chain_names_its_origin_once() -> None:
    async with aionn.open(drivers=MORTAL, isolation="in_process") as runtime:
        net = await runtime.compile(doubled_model())
        links = [net.execute_fenced([np.full(1, RAISES, np.float32)])]
        for _ in range(5):
            links.append(net.execute_fenced([np.ones(1, np.float32)], wait_for=[links[-1].fence]))
        with anyio.fail_after(LIMIT_S), pytest.raises(aionn.GeneralFailure) as failed:
            await links[-1]
        assert str(failed.value).startswith(
            "execution: a fence that it waits for has failed: execution on mortal: "
        )
        assert str(failed.value).count("planted") == 1 and str(failed.value).count("has failed") == 1
        cause = failed.value.__cause__
        assert isinstance(cause, FenceError) and cause.origin == "execution on mortal"
        origin = cause.__cause__
        assert isinstance(origin, aionn.GeneralFailure) and "planted" in str(origin)
        for link in links[:-1]:
            with pytest.raises(aionn.GeneralFailure):
                await link


# Streams with several inputs


async def test_stream_writes_mappings_into_several_inputs(runtime: aionn.Runtime) -> None:
    def into(item: float, views: Any) -> Any:
        views["input0"][...] = item
        return {"input1": np.full(1, 10 * item, np.float32)}

    async def mappings() -> AsyncIterator[Any]:
        for value in (1.0, 2.0):
            yield {"input1": np.full(1, value, np.float32), "input0": np.full(1, 3.0, np.float32)}

    async def plain() -> AsyncIterator[float]:
        for value in (1.0, 2.0):
            yield value

    async with await runtime.compile(sum_model()) as net, net.burst() as burst:
        assert [float(r.outputs[0][0]) async for r in burst.stream(mappings())] == [4.0, 5.0]
        assert [float(r.outputs[0][0]) async for r in burst.stream(plain(), into=into)] == [11.0, 22.0]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (X, r"expected a mapping from the names of inputs \(input0, input1\) to arrays, got an ndarray"),
        ({"input0": np.ones(1, np.float32)}, "expected arrays for input0, input1; got no 'input1'"),
        ({"a": 1}, "expected arrays for input0, input1; got 'a', which the model lacks"),
    ],
)
async def test_item_that_does_not_fit_several_inputs(runtime: aionn.Runtime, item: Any, words: str) -> None:
    async def items() -> AsyncIterator[Any]:
        yield item

    async with await runtime.compile(sum_model()) as net, net.burst() as burst:
        with pytest.raises(aionn.InvalidArgument, match=words):
            await anext(burst.stream(items()))


# Event loops


def test_open_without_asyncio_is_refused_in_words() -> None:
    coroutine = aionn.open(drivers=["reference"]).__aenter__()
    with pytest.raises(
        aionn.InvalidArgument, match=r"expected a running event loop of asyncio.*aionn.blocking"
    ):
        coroutine.send(None)

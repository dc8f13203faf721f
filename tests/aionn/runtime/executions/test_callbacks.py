"""What an application's own code raises: a source, a writer, a deadline's function, a listener, a callback of a fence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

import aionn
from aionn.conformance.vts.models import endless_model
from aionn.drivers.reference import ReferenceDevice

Values = npt.NDArray[np.float32]
ONE = np.ones(1, np.float32)
LIMIT_S = 30

MISLEADING = [asyncio.CancelledError, GeneratorExit, StopIteration, StopAsyncIteration]
"""What would tell the consumer something about itself: it is raised a GeneralFailure instead."""

OTHERS = [KeyboardInterrupt, SystemExit, ValueError, BaseException]


@pytest.fixture
async def runtime() -> AsyncIterator[aionn.Runtime]:
    async with aionn.open(devices=[ReferenceDevice("reference")]) as opened:
        yield opened


class Source:
    """Gives two items and raises."""

    def __init__(self, raised: BaseException | None) -> None:
        self._raised = raised
        self._count = 0

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Values:
        self._count += 1
        if self._count == 3:
            if self._raised is None:
                raise StopAsyncIteration
            raise self._raised
        return -self._count * ONE


def stream_that_raises(
    burst: aionn.Burst, where: str, with_deadlines: bool, raised: BaseException
) -> aionn.Stream[Values]:
    def at_third(item: Values) -> None:
        if item[0] == -3:
            raise raised

    def deadline(item: Values) -> int:
        if where == "deadline":
            at_third(item)
        return aionn.after(60)

    def into(item: Values, view: Values) -> None:
        if where == "into":
            at_third(item)
        view[...] = item

    async def numbers() -> AsyncIterator[Values]:
        for number in range(1, 9):
            yield -number * ONE

    source = Source(raised) if where == "source" else numbers()
    return burst.stream(
        source, into=into, deadline=deadline if with_deadlines or where == "deadline" else None
    )


def expected(raised: type[BaseException], where: str) -> type[BaseException]:
    if raised is StopIteration and where == "source":
        return RuntimeError  # A coroutine cannot raise it: Python's own rule.
    return aionn.GeneralFailure if raised in MISLEADING else raised


@pytest.mark.sampled(24)
@pytest.mark.parametrize("with_deadlines", [False, True])
@pytest.mark.parametrize(
    ("raised", "where"),
    [
        pytest.param(raised, where, id=f"{raised.__name__}-{where}")
        for raised in (*MISLEADING, *OTHERS)
        for where in ("source", "into", "deadline")
        if (raised, where) != (StopAsyncIteration, "source")  # This is how a source ends.
    ],
)
async def test_what_is_raised_for_an_item_ends_its_stream_alone(
    runtime: aionn.Runtime, raised: type[BaseException], where: str, with_deadlines: bool
) -> None:
    net = await runtime.compile(endless_model())
    go = anyio.Event()

    async def bystander() -> AsyncIterator[Values]:
        yield -ONE
        await go.wait()
        yield -2 * ONE

    with anyio.fail_after(LIMIT_S):
        async with net.burst(slots=3) as burst, net.burst() as other:
            going_on = other.stream(bystander())
            assert (await anext(going_on)).outputs[0] == -1
            stream = stream_that_raises(burst, where, with_deadlines, raised())
            assert [float((await anext(stream)).outputs[0][0]) for _ in range(2)] == [-1, -2]
            with pytest.raises(expected(raised, where)) as caught:
                await anext(stream)
            if isinstance(caught.value, aionn.GeneralFailure):
                assert f"raised {raised.__name__}" in str(caught.value)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            # Nothing else has ended, and every slot is free.
            while burst.statistics().free < 3:
                await anyio.lowlevel.checkpoint()
            assert (await burst.execute([-7 * ONE])).outputs[0] == -7
            go.set()
            assert [float(r.outputs[0][0]) async for r in going_on] == [-2]


@pytest.mark.parametrize("with_deadlines", [False, True])
async def test_source_that_awaits_what_was_cancelled_ends_its_stream_alone(
    runtime: aionn.Runtime, with_deadlines: bool
) -> None:
    async def source() -> AsyncIterator[Values]:
        yield -ONE
        camera = asyncio.get_running_loop().create_future()
        camera.cancel()
        await camera

    net = await runtime.compile(endless_model())
    with anyio.fail_after(LIMIT_S):
        async with net.burst() as burst:
            stream = burst.stream(
                source(), deadline=(lambda item: aionn.after(60)) if with_deadlines else None
            )
            await anext(stream)
            with pytest.raises(aionn.GeneralFailure, match="raised CancelledError"):
                await anext(stream)
        assert (await net.execute([-ONE])).outputs[0] == -1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("raised", [*MISLEADING, ValueError, BaseException], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("what", ["execute", "execute_fenced", "burst"])
async def test_what_a_listener_raises_is_logged(
    raised: type[BaseException], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[str] = []

    def breaks(report: Any) -> None:
        reports.append(report.kind)
        raise raised

    async with aionn.open(devices=[ReferenceDevice("reference")], telemetry=[breaks]) as runtime:
        net = await runtime.compile(endless_model())
        if what == "burst":
            async with net.burst() as burst:
                await burst.execute([-ONE])
        else:
            run: Callable[..., Any] = getattr(net, what)
            assert (await run([-ONE])).outputs[0] == -1
    assert reports == ["compilation", "execution"]
    assert caplog.text.count("a listener failed") == 2


@pytest.mark.parametrize("raised", [*MISLEADING, ValueError, BaseException], ids=lambda kind: kind.__name__)
async def test_what_a_callback_of_an_executions_fence_raises_is_logged(
    runtime: aionn.Runtime, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(fence: object) -> None:
        raise raised

    net = await runtime.compile(endless_model())
    execution = net.execute_fenced([-ONE])
    execution.fence.add_callback(breaks)
    assert (await execution).outputs[0] == -1
    late = net.execute_fenced([ONE], deadline=aionn.after(0.02))
    late.fence.add_callback(breaks)
    with pytest.raises(aionn.MissedDeadline):
        await late
    given_up = net.execute_fenced([ONE])
    given_up.fence.add_callback(breaks)
    given_up.cancel()
    with pytest.raises(aionn.ExecutionCancelled, match="cancelled"):
        await given_up
    assert caplog.text.count("a callback of") == 3
    with anyio.fail_after(LIMIT_S):
        assert (await net.execute([-ONE])).outputs[0] == -1

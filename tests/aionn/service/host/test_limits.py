"""Limits of time reach the device whichever way an execution takes to it; bursts at their bounds; what is freed and counted."""

from __future__ import annotations

import time
from typing import Any

import anyio
import numpy as np
import pytest

from aionn.burst.session import POLLING_US_MAX
from aionn.conformance.vts.models import endless_model
from aionn.errors import Error, ErrorStatus, InvalidArgument, ResourceExhausted, status_of
from aionn.hal import NO_TIMING, DataLocation, Memory, Request, RequestArgument, Timing
from aionn.service.host import bursts as bursts_module
from aionn.service.host.bursts import Bursts
from aionn.service.host.session import Session
from fences import FenceError

ANSWER_S_MAX = 10.0
SOON_NS = 100_000_000
LATER_NS = 3_000_000_000
"""Deadlines that are not missed before the execution begins: the later one where the machine is busy."""

LATE_S = 3600.0
LOOP_NS = 20_000_000
LOOP_LONG_NS = 15_000_000_000
"""The longest: beyond ``ANSWER_S_MAX``, so that it is not what ends an execution."""

MISSED = ErrorStatus.MISSED_DEADLINE_TRANSIENT


def looping(value: float) -> Request:
    """A request for the endless loop, which ends at once for values below 0."""
    memory = Memory.create(128)
    memory.array[:4].view(np.float32)[0] = value
    arguments = [RequestArgument(False, DataLocation(0, offset, 4)) for offset in (0, 64)]
    return Request((arguments[0],), (arguments[1],), (memory,))


class Ways:
    """Every way of execution, each with the status and the timing that it ends with."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    async def synchronous(self, request: Request, **limits: Any) -> Timing:
        return (await self._prepared.execute_synchronously(request, **limits)).timing

    async def launched(self, request: Request, **limits: Any) -> Any:
        told: list[Any] = []
        over = anyio.Event()

        def callback(status: ErrorStatus, shapes: Any, timing: Timing) -> None:
            told.append((status, timing))
            over.set()

        await self._prepared.execute(request, callback, **limits)
        await over.wait()
        return told[0]

    async def fenced(self, request: Request, **limits: Any) -> Any:
        return await self._info(await self._prepared.execute_fenced(request, [], **limits))

    async def reusable(self, request: Request, *, deadline_ns: int | None = None, **made: Any) -> Timing:
        execution = await self._prepared.create_reusable_execution(request, **made)
        return (await execution.execute_synchronously(deadline_ns=deadline_ns)).timing

    async def reusable_fenced(self, request: Request, *, deadline_ns: int | None = None, **made: Any) -> Any:
        execution = await self._prepared.create_reusable_execution(request, **made)
        return await self._info(await execution.execute_fenced([], deadline_ns=deadline_ns))

    async def _info(self, launched: Any) -> Any:
        try:
            await launched.fence
        except FenceError:
            pass
        status, timing = await launched.get_execution_info()
        return status, timing.launched

    async def end(self, way: str, request: Request, **limits: Any) -> tuple[ErrorStatus, Timing]:
        with anyio.fail_after(ANSWER_S_MAX):
            try:
                answer = await getattr(self, way)(request, **limits)
            except Error as e:
                return status_of(e), NO_TIMING
        return answer if isinstance(answer, tuple) else (ErrorStatus.NONE, answer)


WAYS = ["synchronous", "launched", "fenced", "reusable", "reusable_fenced"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
async def test_limits_of_time_end_an_execution_whichever_way_it_takes(served: Any, way: str) -> None:
    client = served.client()
    ways = Ways(await client.prepare_model(endless_model()))
    long_ns = int(LATE_S * 1e9)
    for delay_ns in (SOON_NS, LATER_NS):
        deadline_ns = time.monotonic_ns() + delay_ns
        late = await ways.end(way, looping(1.0), deadline_ns=deadline_ns, loop_timeout_ns=LOOP_LONG_NS)
        assert time.monotonic_ns() >= deadline_ns
        if late[0] == MISSED:
            break
    assert late[0] == MISSED
    looped = await ways.end(
        way, looping(1.0), loop_timeout_ns=LOOP_NS, deadline_ns=time.monotonic_ns() + long_ns
    )
    assert looped[0] == MISSED
    await client.aclose()


@pytest.mark.parametrize("way", WAYS)
async def test_timing_is_measured_where_it_is_asked_for_and_nowhere_else(served: Any, way: str) -> None:
    client = served.client()
    ways = Ways(await client.prepare_model(endless_model()))
    status, timing = await ways.end(way, looping(-1.0), measure=True)
    assert status == ErrorStatus.NONE and timing.time_in_driver_ns is not None
    status, timing = await ways.end(way, looping(-1.0))
    assert status == ErrorStatus.NONE and timing == NO_TIMING
    await client.aclose()


async def test_closing_a_prepared_model_leaves_executions_and_bursts_of_another(
    served: Any, small: Any
) -> None:
    client = served.client()
    one, other = [await client.prepare_model(small.sum_model()) for _ in range(2)]
    work = small.Sum()
    kept, gone = [await p.create_reusable_execution(work.request) for p in (one, other)]
    burst = await one.configure_execution_burst()
    await other.aclose()
    await kept.execute_synchronously()
    await burst.execute_synchronously(work.request, [0])
    assert work.is_right
    with pytest.raises(InvalidArgument, match="no reusable execution"):
        await gone.execute_synchronously()
    await burst.aclose()
    await client.aclose()


@pytest.mark.parametrize("end", ["controller_polling_us", "server_polling_us"])
async def test_polling_windows_are_bounded_at_both_ends(served: Any, small: Any, end: str) -> None:
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    work = small.Sum()
    for window_us in (0, POLLING_US_MAX):
        burst = await prepared.configure_execution_burst(**{end: window_us})
        await burst.execute_synchronously(work.request, [0])
        assert work.is_right
        await burst.aclose()
    for window_us in (-1, POLLING_US_MAX + 1):
        with pytest.raises(InvalidArgument, match="polling window"):
            await prepared.configure_execution_burst(**{end: window_us})
    await client.aclose()


async def test_queue_of_exactly_the_largest_size_is_taken(
    served: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    configure = Bursts.configure

    def noting(self: Bursts, body: Any, *more: Any) -> int:
        sizes.append(max(queue.size_bytes for queue in (body.requests, body.results)))
        return configure(self, body, *more)

    monkeypatch.setattr(Bursts, "configure", noting)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    await (await prepared.configure_execution_burst()).aclose()
    monkeypatch.setattr(bursts_module, "QUEUE_BYTES_MAX", sizes[0])
    await (await prepared.configure_execution_burst()).aclose()
    monkeypatch.setattr(bursts_module, "QUEUE_BYTES_MAX", sizes[0] - 1)
    with pytest.raises(ResourceExhausted, match="expected a queue of at most"):
        await prepared.configure_execution_burst()
    await client.aclose()


async def test_rest_counts_memories_of_requests_and_bursts(
    served: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    begin = Session.__init__

    def remember(self: Session, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        sessions.append(self)

    monkeypatch.setattr(Session, "__init__", remember)
    client = served.client()
    prepared = await client.prepare_model(small.sum_model())
    burst = await prepared.configure_execution_burst()
    for _ in range(3):
        work = small.Sum()
        for _ in range(3):
            await prepared.execute_synchronously(work.request)
        await burst.execute_synchronously(work.request, [0])
        await burst.release_memory_resource(0)
        await burst.execute_synchronously(work.request, [0])
        assert work.is_right
        # Not zero seconds: the clock may not have moved on since.
        assert sessions[0].rest(-1.0) == 2
        assert sessions[0].rest(-1.0) == 0
    await burst.aclose()
    await client.aclose()


async def test_connection_is_made_once_and_again_when_it_is_gone(served: Any) -> None:
    client = served.client()
    await client.status()
    first = client._connection
    await client.status()
    assert client._connection is first
    first.channel.close("the end")
    await client.status()
    assert client._connection is not first
    await client.aclose()
